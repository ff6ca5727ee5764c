//! Element-wise operators: ReLU, the sum that ends a residual block, image normalisation.

use candle_core::{CpuStorage, CustomOp1, CustomOp2, DType, Layout, Result, Shape, Tensor, bail};

use super::autocast::promote;
use super::{cast, host, relu_of};

/// `max(x, 0)`, NaN kept. Any shape; `f32`, `f16` or `bf16`; exact.
///
/// # Errors
///
/// Another dtype.
pub fn relu(x: &Tensor) -> Result<Tensor> {
    let [x] = cast("relu", [x])?;
    x.contiguous()?.apply_op1(Relu)
}

/// `a + b`, broadcast as candle's `broadcast_add`, of two floating-point types as PyTorch adds them: the
/// narrower is cast to the wider first, and `f16` with `bf16` both to `f32`.
///
/// # Errors
///
/// Shapes that do not fit.
pub fn add(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let [a, b] = promote(cast("add", [a, b])?)?;
    a.broadcast_add(&b)
}

/// `relu(a + b)`, the end of a residual block, in one pass. Both of one shape; `f32`, `f16` or `bf16`,
/// of two types cast as [`add`] does; added in `f32` and rounded once; NaN kept.
///
/// # Errors
///
/// Shapes that differ, another dtype.
pub fn add_relu(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let [a, b] = promote(cast("add", [a, b])?)?;
    a.contiguous()?.apply_op2(&b.contiguous()?, AddRelu)
}

struct Relu;

impl CustomOp1 for Relu {
    fn name(&self) -> &'static str {
        "relu"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let dtype = host::float_dtype(x)?;
        let y = host::floats(x, layout)?.iter().map(|v| relu_of(*v)).collect();
        Ok((host::rounded(y, dtype)?, layout.shape().clone()))
    }

    fn bwd(&self, _x: &Tensor, y: &Tensor, dy: &Tensor) -> Result<Option<Tensor>> {
        relu_backward(y, dy).map(Some)
    }
}

struct AddRelu;

impl CustomOp2 for AddRelu {
    fn name(&self) -> &'static str {
        "add_relu"
    }

    fn cpu_fwd(
        &self,
        a: &CpuStorage,
        a_layout: &Layout,
        b: &CpuStorage,
        b_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let dtype = host::float_dtype(a)?;
        if a_layout.shape() != b_layout.shape() || dtype != host::float_dtype(b)? {
            let (a, b) = (a_layout.shape(), b_layout.shape());
            bail!("add_relu: {a:?} and {b:?}, which must be of one shape and dtype");
        }
        let (a, b) = (host::floats(a, a_layout)?, host::floats(b, b_layout)?);
        let y = a.iter().zip(&*b).map(|(a, b)| relu_of(a + b)).collect();
        Ok((host::rounded(y, dtype)?, a_layout.shape().clone()))
    }

    fn bwd(
        &self,
        _a: &Tensor,
        _b: &Tensor,
        y: &Tensor,
        dy: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let gradient = relu_backward(y, dy)?;
        Ok((Some(gradient.clone()), Some(gradient)))
    }
}

/// `dy` where `y` is positive or NaN, 0 elsewhere.
fn relu_backward(y: &Tensor, dy: &Tensor) -> Result<Tensor> {
    let dy = dy.contiguous()?;
    let (y_storage, y_layout) = y.storage_and_layout();
    let (dy_storage, dy_layout) = dy.storage_and_layout();
    let y = host::floats_of(&y_storage, y_layout)?;
    let gradient = host::floats_of(&dy_storage, dy_layout)?;
    let gradient =
        y.iter().zip(&*gradient).map(|(y, g)| if *y <= 0.0 { 0.0 } else { *g }).collect();
    host::tensor(gradient, dy.shape(), dy.dtype())
}

/// How image bytes become numbers: `(byte / 255 - mean) / std` per channel.
#[derive(Clone, Debug, PartialEq)]
pub struct Normalization {
    /// Mean of each channel; one value stands for all channels.
    pub mean: Vec<f32>,
    /// Standard deviation of each channel; one value stands for all channels.
    pub std: Vec<f32>,
}

impl Default for Normalization {
    /// Mean 0, deviation 1: bytes become numbers from 0 to 1.
    fn default() -> Self {
        Self { mean: vec![0.0], std: vec![1.0] }
    }
}

/// Turns images of bytes, `[n, c, h, w]`, into numbers of `dtype` (`f32`, `f16` or `bf16`),
/// computed in `f32` and rounded once. No gradient flows through it.
///
/// # Errors
///
/// Images of another dtype or shape; a normalisation of another number of channels.
pub fn normalize(images: &Tensor, by: &Normalization, dtype: DType) -> Result<Tensor> {
    let (_, channels, height, width) = images.dims4()?;
    let fits = |count: usize| count == 1 || count == channels;
    if !fits(by.mean.len()) || !fits(by.std.len()) {
        bail!("normalize: {channels} channels, {} means, {} stds", by.mean.len(), by.std.len());
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
        Ok((host::rounded(y, self.dtype)?, layout.shape().clone()))
    }
}
