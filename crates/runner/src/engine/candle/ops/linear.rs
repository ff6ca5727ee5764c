//! The affine map of a fully connected layer.

use candle_core::{Result, Shape, Tensor, bail};

use super::gemm::{Mat, gemm};
use super::weighted::{self, Gradients, Kernel};

/// `x * weight^T + bias`.
///
/// Shapes: `x` is `[..., i]`, `weight` `[o, i]`, `bias` `[o]`, the result `[..., o]`. `f32`, `f16`
/// and `bf16`: computed and accumulated in `f32`, rounded once at the end. NaN and infinities
/// propagate. Single-threaded.
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
struct Extents {
    rows: usize,
    inputs: usize,
    outputs: usize,
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

    fn forward(&self, x: &[f32], weight: &[f32], bias: Option<&[f32]>) -> Vec<f32> {
        let mut y = vec![0.0; self.rows * self.outputs];
        if let Some(bias) = bias {
            y.chunks_exact_mut(self.outputs).for_each(|row| row.copy_from_slice(bias));
        }
        let weight = Mat::new(weight, self.outputs, self.inputs);
        gemm(&mut y, bias.is_some(), Mat::new(x, self.rows, self.inputs), weight.t());
        y
    }

    fn backward(&self, x: &[f32], weight: &[f32], dy: &[f32], wants_x: bool) -> Gradients {
        let mut db = vec![0.0; self.outputs];
        for row in dy.chunks_exact(self.outputs) {
            db.iter_mut().zip(row).for_each(|(db, dy)| *db += dy);
        }
        let dy = Mat::new(dy, self.rows, self.outputs);
        let mut dw = vec![0.0; weight.len()];
        gemm(&mut dw, false, dy.t(), Mat::new(x, self.rows, self.inputs));
        let dx = wants_x.then(|| {
            let mut dx = vec![0.0; x.len()];
            gemm(&mut dx, false, dy, Mat::new(weight, self.outputs, self.inputs));
            dx
        });
        Gradients { x: dx, weight: dw, bias: db }
    }
}
