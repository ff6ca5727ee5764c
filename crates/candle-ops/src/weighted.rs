//! What convolution and the fully connected layer share: an input, a weight, an optional bias, and kernels over slices
//! for both directions.

use candle_core::{Result, Shape, Tensor, bail};

use super::operator::{Input, Operator, apply2, apply3};
use super::real::Real;
use super::{cast, composed};

/// The extents of one call, checked against each other, and its arithmetic.
pub(super) trait Kernel: Sized + Send + Sync + 'static {
    /// Options besides the shapes.
    type Options;
    /// Name in messages and in PyTorch's autocast lists.
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

    /// The gradient of the input alone: weight and bias are frozen.
    fn input_gradient<T: Real>(&self, x: &[T], weight: &[T], dy: &[T]) -> Option<Vec<T>> {
        self.backward(x, weight, dy, true).x
    }
}

/// The gradients of one call.
pub(super) struct Gradients<T> {
    pub(super) x: Option<Vec<T>>,
    pub(super) weight: Vec<T>,
    pub(super) bias: Vec<T>,
}

/// Applies `K`. All arguments are of one dtype.
pub(super) fn apply<K: Kernel>(
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
            [x, weight, bias] if composed::is_for(&x) => kernel.on_device(&x, &weight, Some(&bias)),
            inputs => apply3(Weighted(kernel), inputs),
        },
        None => match cast(K::NAME, [x, weight])? {
            [x, weight] if composed::is_for(&x) => kernel.on_device(&x, &weight, None),
            inputs => apply2(Weighted(kernel), inputs),
        },
    }
}

struct Weighted<K>(K);

impl<K: Kernel> Weighted<K> {
    fn forward<T: Real>(
        &self,
        [x, weight]: [Input<'_>; 2],
        bias: Option<&[T]>,
    ) -> Result<(Vec<T>, Shape)> {
        let y = self.0.forward(&x.values::<T>()?, &weight.values::<T>()?, bias);
        Ok((y, self.0.output_shape(x.shape())))
    }

    fn gradients<T: Real>(
        &self,
        [x, weight]: [Input<'_>; 2],
        dy: Input<'_>,
    ) -> Result<Gradients<T>> {
        let (input, weight, dy) = (x.values::<T>()?, weight.values::<T>()?, dy.values::<T>()?);
        Ok(self.0.backward(&input, &weight, &dy, x.is_tracked))
    }

    fn input_gradient<T: Real>(
        &self,
        [x, weight]: [Input<'_>; 2],
        dy: Input<'_>,
    ) -> Result<Option<Vec<T>>> {
        Ok(self.0.input_gradient(&x.values::<T>()?, &weight.values::<T>()?, &dy.values::<T>()?))
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
        self.forward([x, weight], Some(&bias.values::<T>()?))
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
