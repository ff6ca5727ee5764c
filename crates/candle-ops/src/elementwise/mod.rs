//! Element-wise operators: ReLU, addition, products, image normalization, random numbers; sums and
//! concatenation.

pub(crate) mod composed;
pub(crate) mod dispatch;
pub(crate) mod dropout;
pub(crate) mod random;

use candle_core::backend::BackendStorage;
use candle_core::{
    CpuStorage, CudaStorage, CustomOp1, DType, Layout, Result, Shape, Tensor, bail, op,
};

use crate::autocast::{promote, sum_dtype, to_dtype};
use crate::cast;
use crate::cpu::real::Real;
use crate::graph::custom_op::{self, Differentiable, channels_last};
use crate::graph::device;
use crate::graph::operator::{Input, Operator, apply1, apply2};

/// `max(x, 0)`; NaN is propagated. Any shape; exact.
///
/// # Errors
///
/// An unsupported dtype.
pub fn relu(x: &Tensor) -> Result<Tensor> {
    let [x] = cast("relu", [x])?;
    if device::dispatches(&x) { dispatch::relu(&x) } else { apply1(Relu, [x]) }
}

/// `a + b`, broadcast like candle's `broadcast_add`. As in PyTorch, operands of two floating-point
/// types are cast to the wider one first, and `f16` with `bf16` both to `f32`. The gradient of a
/// broadcast half-precision tensor is summed in `f32`.
///
/// # Errors
///
/// Shapes that do not broadcast.
pub fn add(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let [a, b] = cast("add", [a, b])?;
    match device::add([&a, &b])? {
        Some(sum) => Ok(sum),
        None => {
            let [a, b] = promote([a, b])?;
            broadcast_add(&a, &b)
        }
    }
}

/// [`add`] for one type. candle's own operator sums the gradient of a broadcast half-precision
/// tensor in its type.
pub(crate) fn broadcast_add(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let shape = a.shape().broadcast_shape_binary_op(b.shape(), "add")?;
    if let Some(sum) = dispatch::add_rows([a, b])? {
        return Ok(sum);
    }
    let whole = |x: &Tensor| {
        if *x.shape() == shape {
            return Ok(x.clone());
        }
        to_dtype(&to_dtype(x, sum_dtype(x.dtype()))?.broadcast_as(&shape)?, x.dtype())
    };
    let (a, b) = (&whole(a)?, &whole(b)?);
    if let Some(sum) = device::add([a, b])? {
        return Ok(sum);
    }
    let are_channels_last =
        !a.device().is_cpu() && [a, b].iter().all(|t| channels_last(t).is_some());
    custom_op::apply2(Add { are_channels_last }, [a, b])
}

/// `relu(a + b)`, the end of a residual block, in one pass. Both have the same shape; two types are
/// cast as by [`add`]; NaN is propagated.
///
/// # Errors
///
/// Mismatched shapes; an unsupported dtype.
pub fn add_relu(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let [a, b] = promote(cast("add", [a, b])?)?;
    if a.shape() != b.shape() {
        bail!("add_relu: shapes {:?} and {:?} differ", a.shape(), b.shape());
    }
    if device::dispatches(&a) { dispatch::add_relu(&a, &b) } else { apply2(AddRelu, [a, b]) }
}

/// ReLU of one value; NaN is propagated.
#[inline]
pub(crate) fn relu_of<T: Real>(v: T) -> T {
    if v <= T::ZERO { T::ZERO } else { v }
}

/// candle's addition of two tensors with the same shape and type, as an operator of this crate.
struct Add {
    are_channels_last: bool,
}

impl Add {
    /// The order in which a tensor's memory is traversed.
    fn order(&self, layout: &Layout) -> Result<Layout> {
        if self.are_channels_last { layout.permute(&[0, 2, 3, 1]) } else { Ok(layout.clone()) }
    }
}

impl Differentiable<2> for Add {
    fn name(&self) -> &'static str {
        "add"
    }

    fn forward(
        &self,
        [(a, a_layout), (b, b_layout)]: [(&CpuStorage, &Layout); 2],
    ) -> Result<(CpuStorage, Shape)> {
        let sum = match of_halves([(a, a_layout), (b, b_layout)], |a, b| a + b)? {
            Some(sum) => sum,
            None => a.binary_impl::<op::Add>(b, a_layout, b_layout)?,
        };
        Ok((sum, a_layout.shape().clone()))
    }

    fn is_channels_last(&self) -> bool {
        self.are_channels_last
    }

    fn cuda_forward(
        &self,
        [(a, a_layout), (b, b_layout)]: [(&CudaStorage, &Layout); 2],
    ) -> Result<(CudaStorage, Shape)> {
        let (a_layout, b_layout) = (self.order(a_layout)?, self.order(b_layout)?);
        let sum = a.binary_impl::<op::Add>(b, &a_layout, &b_layout)?;
        Ok((sum, a_layout.shape().clone()))
    }

    fn backward(&self, _: [&Tensor; 2], _y: &Tensor, dy: &Tensor) -> Result<[Option<Tensor>; 2]> {
        Ok([Some(dy.clone()), Some(dy.clone())])
    }
}

/// `f` of each two elements of contiguous half-precision tensors of one type, rounded once, as by
/// candle's loops; those convert one element at a time, which takes several times as long.
pub(crate) fn of_halves(
    inputs: [(&CpuStorage, &Layout); 2],
    f: impl Fn(f32, f32) -> f32,
) -> Result<Option<CpuStorage>> {
    let dtype = inputs[0].0.dtype();
    let [Some((a, a_end)), Some((b, b_end))] =
        inputs.map(|(_, layout)| layout.contiguous_offsets())
    else {
        return Ok(None);
    };
    if !matches!(dtype, DType::F16 | DType::BF16) || inputs[1].0.dtype() != dtype {
        return Ok(None);
    }
    let (a, b) = (f32::read(inputs[0].0, a..a_end)?, f32::read(inputs[1].0, b..b_end)?);
    let values: Vec<_> = a.iter().zip(&*b).map(|(a, b)| f(*a, *b)).collect();
    Ok(Some(f32::store(values.into(), dtype)?))
}

struct Relu;

impl Operator<1> for Relu {
    const NAME: &'static str = "relu";

    fn forward<T: Real>(&self, [x]: [Input<'_>; 1]) -> Result<(Vec<T>, Shape)> {
        let y = x.values::<T>()?.iter().map(|v| relu_of(*v)).collect();
        Ok((y, x.shape().clone()))
    }

    fn backward<T: Real>(
        &self,
        _: [Input<'_>; 1],
        y: Input<'_>,
        dy: Input<'_>,
    ) -> Result<[Option<Vec<T>>; 1]> {
        Ok([Some(relu_backward(y, dy)?)])
    }
}

struct AddRelu;

impl Operator<2> for AddRelu {
    const NAME: &'static str = "add_relu";
    const ONE_GRADIENT: bool = true;

    fn forward<T: Real>(&self, [a, b]: [Input<'_>; 2]) -> Result<(Vec<T>, Shape)> {
        let (shape, a, b) = (a.shape().clone(), a.values::<T>()?, b.values::<T>()?);
        Ok((a.iter().zip(&*b).map(|(a, b)| relu_of(*a + *b)).collect(), shape))
    }

    fn backward<T: Real>(
        &self,
        _: [Input<'_>; 2],
        y: Input<'_>,
        dy: Input<'_>,
    ) -> Result<[Option<Vec<T>>; 2]> {
        Ok([Some(relu_backward(y, dy)?), None])
    }
}

/// `dy` where `y` is positive or NaN, 0 elsewhere.
fn relu_backward<T: Real>(y: Input<'_>, dy: Input<'_>) -> Result<Vec<T>> {
    let (y, dy) = (y.values::<T>()?, dy.values::<T>()?);
    Ok(y.iter().zip(&*dy).map(|(y, dy)| if *y <= T::ZERO { T::ZERO } else { *dy }).collect())
}

/// Conversion of image bytes to numbers: `(byte / 255 - mean) / std` per channel.
#[derive(Clone, Debug, PartialEq)]
pub struct Normalization {
    /// Mean of each channel; a single value is used for all channels.
    pub mean: Vec<f32>,
    /// Standard deviation of each channel; a single value is used for all channels.
    pub std: Vec<f32>,
}

impl Default for Normalization {
    /// Mean 0, deviation 1: bytes become numbers from 0 to 1.
    fn default() -> Self {
        Self { mean: vec![0.0], std: vec![1.0] }
    }
}

/// Converts images of bytes, `[n, c, h, w]`, to `dtype`, computed in `f32` and rounded once. It has
/// no backward pass.
///
/// # Errors
///
/// Images of another dtype or shape; a normalization for another number of channels.
pub fn normalize(images: &Tensor, by: &Normalization, dtype: DType) -> Result<Tensor> {
    let (_, channels, height, width) = images.dims4()?;
    let fits = |count: usize| count == 1 || count == channels;
    if !fits(by.mean.len()) || !fits(by.std.len()) {
        bail!("normalize: {channels} channels, {} means, {} stds", by.mean.len(), by.std.len());
    }
    if device::dispatches(images) {
        return dispatch::normalize(images, by, dtype);
    }
    images.contiguous()?.apply_op1_no_bwd(&Normalize { by, plane: height * width, channels, dtype })
}

struct Normalize<'a> {
    by: &'a Normalization,
    plane: usize,
    channels: usize,
    dtype: DType,
}

impl CustomOp1 for Normalize<'_> {
    fn name(&self) -> &'static str {
        "normalize"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (CpuStorage::U8(bytes), Some((start, end))) = (x, layout.contiguous_offsets()) else {
            bail!("normalize: images must be contiguous u8");
        };
        let of = |values: &[f32], c: usize| values[if values.len() == 1 { 0 } else { c }];
        let mut y = Vec::with_capacity(end - start);
        for (i, plane) in bytes[start..end].chunks_exact(self.plane.max(1)).enumerate() {
            let c = i % self.channels;
            let (mean, std) = (of(&self.by.mean, c), of(&self.by.std, c));
            y.extend(plane.iter().map(|byte| (f32::from(*byte) / 255.0 - mean) / std));
        }
        Ok((f32::store(y.into(), self.dtype)?, layout.shape().clone()))
    }
}
