//! Common parts of convolution and the fully connected layer: an input, a weight, an optional bias,
//! and kernels over slices for both directions.

use candle_core::{Result, Shape, Tensor, bail};
use half::bf16;

use crate::cast;
use crate::cpu::real::Real;
use crate::graph::device;
use crate::graph::operator::{Input, Operator, apply2, apply3};

/// The sizes of one call, checked for consistency, and its computation.
pub(crate) trait Kernel: Sized + Send + Sync + 'static {
    /// Options besides the shapes.
    type Options;
    /// Name in error messages and in PyTorch's autocast lists.
    const NAME: &'static str;

    /// Checks the shapes of input and weight.
    fn new(x: &Shape, weight: &Shape, options: Self::Options) -> Result<Self>;

    /// Length of a bias.
    fn outputs(&self) -> usize;

    /// Shape of the result for an input of shape `x`.
    fn output_shape(&self, x: &Shape) -> Shape;

    /// The result.
    fn forward<T: Real>(&self, x: &[T], weight: &[T], bias: Option<&[T]>) -> Vec<T>;

    /// The result on a device.
    fn on_device(&self, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor>;

    /// The gradients, given that of the result; that of the input only if `wants_x`.
    fn backward<T: Real>(&self, x: &[T], weight: &[T], dy: &[T], wants_x: bool) -> Gradients<T>;

    /// The gradient of the input only: weight and bias are frozen.
    fn input_gradient<T: Real>(&self, x: &[T], weight: &[T], dy: &[T]) -> Option<Vec<T>> {
        self.backward(x, weight, dy, true).x
    }

    /// The same for `bf16` as stored, if the processor can multiply it directly.
    fn bf16(&self) -> Option<&dyn Bf16Kernel> {
        None
    }
}

/// The computation of a [`Kernel`] in `bf16`, summed in `f32`.
pub(crate) trait Bf16Kernel {
    fn forward(&self, x: &[bf16], weight: &[bf16], bias: Option<&[f32]>) -> Vec<f32>;

    /// The gradients, given input, weight and the result's gradient.
    fn backward(&self, inputs: [&[bf16]; 3], wants_x: bool) -> Gradients<f32>;

    fn input_gradient(&self, weight: &[bf16], dy: &[bf16]) -> Vec<f32>;
}

/// The gradients of one call.
pub(crate) struct Gradients<T> {
    pub(crate) x: Option<Vec<T>>,
    pub(crate) weight: Vec<T>,
    pub(crate) bias: Vec<T>,
}

/// Applies `K`. All arguments have the same dtype.
pub(crate) fn apply<K: Kernel>(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    options: K::Options,
) -> Result<Tensor> {
    let kernel = K::new(x.shape(), weight.shape(), options)?;
    let outputs = kernel.outputs();
    if let Some(bias) = bias.filter(|bias| bias.dims() != [outputs]) {
        bail!("{}: a bias of shape {:?} for {outputs} outputs", K::NAME, bias.shape());
    }
    match bias {
        Some(bias) => match cast(K::NAME, [x, weight, bias])? {
            [x, weight, bias] if device::dispatches(&x) => {
                kernel.on_device(&x, &weight, Some(&bias))
            }
            inputs => apply3(Weighted(kernel), inputs),
        },
        None => match cast(K::NAME, [x, weight])? {
            [x, weight] if device::dispatches(&x) => kernel.on_device(&x, &weight, None),
            inputs => apply2(Weighted(kernel), inputs),
        },
    }
}

struct Weighted<K>(K);

impl<K: Kernel> Weighted<K> {
    fn forward<T: Real>(
        &self,
        [x, weight]: [Input<'_>; 2],
        bias: Option<Input<'_>>,
    ) -> Result<(Vec<T>, Shape)> {
        let shape = self.0.output_shape(x.shape());
        if let Some((kernel, [x, weight])) = self.bf16([x, weight]) {
            let bias = bias.map(|bias| bias.values()).transpose()?;
            return Ok((T::of_f32s(kernel.forward(x, weight, bias.as_deref())), shape));
        }
        let bias = bias.map(|bias| bias.values()).transpose()?;
        let y = self.0.forward(&x.values::<T>()?, &weight.values::<T>()?, bias.as_deref());
        Ok((y, shape))
    }

    fn gradients<T: Real>(
        &self,
        [x, weight]: [Input<'_>; 2],
        dy: Input<'_>,
    ) -> Result<Gradients<T>> {
        if let Some((kernel, inputs)) = self.bf16([x, weight, dy]) {
            let Gradients { x, weight, bias } = kernel.backward(inputs, x.is_tracked);
            let [weight, bias] = [weight, bias].map(T::of_f32s);
            return Ok(Gradients { x: x.map(T::of_f32s), weight, bias });
        }
        let (input, weight, dy) = (x.values::<T>()?, weight.values::<T>()?, dy.values::<T>()?);
        Ok(self.0.backward(&input, &weight, &dy, x.is_tracked))
    }

    fn input_gradient<T: Real>(
        &self,
        [x, weight]: [Input<'_>; 2],
        dy: Input<'_>,
    ) -> Result<Option<Vec<T>>> {
        if let Some((kernel, [weight, dy])) = self.bf16([weight, dy]) {
            return Ok(Some(T::of_f32s(kernel.input_gradient(weight, dy))));
        }
        Ok(self.0.input_gradient(&x.values::<T>()?, &weight.values::<T>()?, &dy.values::<T>()?))
    }

    /// The kernel for these inputs, if they are `bf16` and it has one.
    fn bf16<'a, const N: usize>(
        &self,
        inputs: [Input<'a>; N],
    ) -> Option<(&dyn Bf16Kernel, [&'a [bf16]; N])> {
        let kernel = self.0.bf16()?;
        let all = inputs.map(|input| input.bf16());
        all.iter().all(Option::is_some).then(|| (kernel, all.map(Option::unwrap_or_default)))
    }
}

impl<K: Kernel> Operator<2> for Weighted<K> {
    const NAME: &'static str = K::NAME;

    fn forward<T: Real>(&self, inputs: [Input<'_>; 2]) -> Result<(Vec<T>, Shape)> {
        self.forward(inputs, None)
    }

    fn backward<T: Real>(
        &self,
        inputs: [Input<'_>; 2],
        _y: Input<'_>,
        dy: Input<'_>,
    ) -> Result<[Option<Vec<T>>; 2]> {
        if !inputs[1].is_tracked {
            return Ok([self.input_gradient(inputs, dy)?, None]);
        }
        let Gradients { x, weight, .. } = self.gradients(inputs, dy)?;
        Ok([x, Some(weight)])
    }
}

impl<K: Kernel> Operator<3> for Weighted<K> {
    const NAME: &'static str = K::NAME;

    fn forward<T: Real>(&self, [x, weight, bias]: [Input<'_>; 3]) -> Result<(Vec<T>, Shape)> {
        self.forward([x, weight], Some(bias))
    }

    fn backward<T: Real>(
        &self,
        [x, weight, bias]: [Input<'_>; 3],
        _y: Input<'_>,
        dy: Input<'_>,
    ) -> Result<[Option<Vec<T>>; 3]> {
        if !weight.is_tracked && !bias.is_tracked {
            return Ok([self.input_gradient([x, weight], dy)?, None, None]);
        }
        let Gradients { x, weight, bias } = self.gradients([x, weight], dy)?;
        Ok([x, Some(weight), Some(bias)])
    }
}
