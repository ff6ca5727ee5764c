//! The affine map of a fully connected layer.

use candle_core::{Result, Shape, Tensor, bail};

use super::composed;
use super::gemm::{Mat, gemm};
use super::real::Real;
use super::weighted::{self, Gradients, Kernel};

/// `x * weight^T + bias`.
///
/// Shapes: `x` is `[..., i]`, `weight` `[o, i]`, `bias` `[o]`, the result `[..., o]`; all arguments of
/// one dtype. NaN and infinities propagate. Single-threaded.
///
/// Backward gives all three gradients; that of `x` only if something upstream needs it.
///
/// # Errors
///
/// Shapes or dtypes that do not fit.
pub fn linear(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    weighted::apply::<Extents>(x, weight, bias, ())
}

/// Extents of the product, checked against each other.
#[derive(Clone, Copy, Debug)]
pub(super) struct Extents {
    pub(super) rows: usize,
    pub(super) inputs: usize,
    pub(super) outputs: usize,
}

impl Extents {
    fn dx<T: Real>(&self, dy: Mat<'_, T>, weight: &[T]) -> Vec<T> {
        let mut dx = vec![T::ZERO; self.rows * self.inputs];
        gemm(&mut dx, false, dy, Mat::new(weight, self.outputs, self.inputs));
        dx
    }
}

impl Kernel for Extents {
    type Options = ();
    const NAME: &'static str = "linear";

    fn new(x: &Shape, weight: &Shape, (): ()) -> Result<Self> {
        let (outputs, inputs) = weight.dims2()?;
        let Some((&last, leading)) = x.dims().split_last() else {
            bail!("linear: the input is a scalar");
        };
        if last != inputs || inputs * outputs == 0 {
            bail!("linear: an input of shape {x:?} does not fit a weight of shape {weight:?}");
        }
        Ok(Self { rows: leading.iter().product(), inputs, outputs })
    }

    fn outputs(&self) -> usize {
        self.outputs
    }

    fn output_shape(&self, x: &Shape) -> Shape {
        let mut dims = x.dims().to_vec();
        *dims.last_mut().expect("an input has a last dimension") = self.outputs;
        dims.into()
    }

    fn forward<T: Real>(&self, x: &[T], weight: &[T], bias: Option<&[T]>) -> Vec<T> {
        let mut y = vec![T::ZERO; self.rows * self.outputs];
        if let Some(bias) = bias {
            y.chunks_exact_mut(self.outputs).for_each(|row| row.copy_from_slice(bias));
        }
        let weight = Mat::new(weight, self.outputs, self.inputs);
        gemm(&mut y, bias.is_some(), Mat::new(x, self.rows, self.inputs), weight.t());
        y
    }

    fn on_device(&self, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        composed::linear(x, weight, bias, *self)
    }

    fn backward<T: Real>(&self, x: &[T], weight: &[T], dy: &[T], wants_x: bool) -> Gradients<T> {
        let mut db = vec![T::ZERO; self.outputs];
        for row in dy.chunks_exact(self.outputs) {
            db.iter_mut().zip(row).for_each(|(db, dy)| *db += *dy);
        }
        let dy = Mat::new(dy, self.rows, self.outputs);
        let mut dw = vec![T::ZERO; weight.len()];
        gemm(&mut dw, false, dy.t(), Mat::new(x, self.rows, self.inputs));
        let dx = wants_x.then(|| self.dx(dy, weight));
        Gradients { x: dx, weight: dw, bias: db }
    }

    fn input_gradient<T: Real>(&self, _: &[T], weight: &[T], dy: &[T]) -> Option<Vec<T>> {
        Some(self.dx(Mat::new(dy, self.rows, self.outputs), weight))
    }
}
