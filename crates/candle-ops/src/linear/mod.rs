//! The affine map of a fully connected layer.

mod dispatch;
pub(crate) mod weighted;

use candle_core::{Result, Shape, Tensor, bail};
use half::bf16;

use self::weighted::{Bf16Kernel, Gradients, Kernel};
use crate::cpu::gemm::{Factor, Mat, gemm};
use crate::cpu::gemm_bf16;
use crate::cpu::real::Real;
use crate::sizes::LinearSizes;

/// `x * weight^T + bias`.
///
/// Shapes: `x` is `[..., i]`, `weight` `[o, i]`, `bias` `[o]`, the result `[..., o]`; all arguments
/// have the same dtype. NaN and infinities propagate. Single-threaded. A processor with AVX512_BF16
/// multiplies `bf16` directly, and treats numbers below 1.2e-38 as 0 then.
///
/// The backward pass computes all three gradients; that of `x` only if it is needed.
///
/// # Errors
///
/// Mismatched shapes or dtypes.
pub fn linear(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    weighted::apply::<LinearSizes>(x, weight, bias, ())
}

impl LinearSizes {
    fn product<T: Real, E: Factor<T>>(&self, x: &[E], weight: &[E], bias: Option<&[T]>) -> Vec<T> {
        let mut y = vec![T::ZERO; self.rows * self.outputs];
        if let Some(bias) = bias {
            y.chunks_exact_mut(self.outputs).for_each(|row| row.copy_from_slice(bias));
        }
        let weight = Mat::new(weight, self.outputs, self.inputs);
        gemm(&mut y, bias.is_some(), Mat::new(x, self.rows, self.inputs), weight.t());
        y
    }

    fn gradients<T: Real, E: Factor<T>>(
        &self,
        [x, weight, dy]: [&[E]; 3],
        wants_x: bool,
    ) -> Gradients<T> {
        let mut db = vec![T::ZERO; self.outputs];
        for row in dy.chunks_exact(self.outputs) {
            db.iter_mut().zip(row).for_each(|(db, dy)| *db += dy.widen());
        }
        let mut dw = vec![T::ZERO; weight.len()];
        let rows = Mat::new(x, self.rows, self.inputs);
        gemm(&mut dw, false, Mat::new(dy, self.rows, self.outputs).t(), rows);
        Gradients { x: wants_x.then(|| self.dx(weight, dy)), weight: dw, bias: db }
    }

    fn dx<T: Real, E: Factor<T>>(&self, weight: &[E], dy: &[E]) -> Vec<T> {
        let mut dx = vec![T::ZERO; self.rows * self.inputs];
        let dy = Mat::new(dy, self.rows, self.outputs);
        gemm(&mut dx, false, dy, Mat::new(weight, self.outputs, self.inputs));
        dx
    }
}

impl Kernel for LinearSizes {
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
        self.output_shape(x)
    }

    fn forward<T: Real>(&self, x: &[T], weight: &[T], bias: Option<&[T]>) -> Vec<T> {
        self.product(x, weight, bias)
    }

    fn on_device(&self, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        dispatch::linear(x, weight, bias, *self)
    }

    fn backward<T: Real>(&self, x: &[T], weight: &[T], dy: &[T], wants_x: bool) -> Gradients<T> {
        self.gradients([x, weight, dy], wants_x)
    }

    fn input_gradient<T: Real>(&self, _: &[T], weight: &[T], dy: &[T]) -> Option<Vec<T>> {
        Some(self.dx(weight, dy))
    }

    fn bf16(&self) -> Option<&dyn Bf16Kernel> {
        gemm_bf16::is_available().then_some(self)
    }
}

impl Bf16Kernel for LinearSizes {
    fn forward(&self, x: &[bf16], weight: &[bf16], bias: Option<&[f32]>) -> Vec<f32> {
        self.product(x, weight, bias)
    }

    fn backward(&self, inputs: [&[bf16]; 3], wants_x: bool) -> Gradients<f32> {
        self.gradients(inputs, wants_x)
    }

    fn input_gradient(&self, weight: &[bf16], dy: &[bf16]) -> Vec<f32> {
        self.dx(weight, dy)
    }
}
