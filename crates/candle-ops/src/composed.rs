//! The operators of this engine as compositions of candle's own, for tensors in a device's memory.
//!
//! The kernels beside this file are loops for the CPU. Elsewhere the same functions are made of candle's
//! operators, which differentiates them; of those, only ones whose gradients are right. They allocate and
//! launch more than the kernels of `cuda/`, which `compile` puts in their place for the types and operators that
//! those have. What they promise is what the CPU's kernels do, except that
//!
//! * products and convolutions of half tensors round the product before a bias is added to it, and attention
//!   its scores and its shares;
//! * of several largest values of a window it is unsaid which one gets the gradient, and a NaN beside an
//!   infinity may lose to it;
//! * sums go in the device's order, those of a batch's statistics in `f32`.
//!
//! Labels and indices are looked at on the host first (`limit.rs`).
//!
//! The tests run these on the CPU, against differences and against the kernels.

use candle_core::{D, DType, Result, Tensor, bail};

use super::attention::{self, AttentionOptions};
use super::autocast::each;
use super::constants::constant;
use super::conv::{Window, positions};
use super::elementwise::Normalization;
use super::norm::{BatchNormOptions, Planes, Statistics};
#[cfg(feature = "cuda")]
use super::{conv::Geometry, cuda, weighted::Kernel};

/// Whether `x` lies where the kernels do not reach.
pub(super) fn takes(x: &Tensor) -> bool {
    #[cfg(test)]
    if tests::FORCED.get() {
        return true;
    }
    !x.device().is_cpu()
}

pub(super) fn relu(x: &Tensor) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    if let Some(kernels) = cuda::of(x) {
        return cuda::relu(&kernels, x);
    }
    // candle's own has a gradient of 1 at 0, and none of NaN.
    let zeros = x.zeros_like()?;
    x.detach().le(&zeros)?.where_cond(&zeros, x)
}

pub(super) fn add_relu(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    if let Some(kernels) = cuda::of(a) {
        return cuda::add_relu(&kernels, a, b);
    }
    relu(&(a + b)?)
}

pub(super) fn normalize(images: &Tensor, by: &Normalization, dtype: DType) -> Result<Tensor> {
    if images.dtype() != DType::U8 {
        bail!("normalize: images must be u8, not {:?}", images.dtype());
    }
    let channels =
        |values: &[f32]| Tensor::from_slice(values, (1, values.len(), 1, 1), images.device());
    images
        .to_dtype(DType::F32)?
        .broadcast_div(&channels(&[255.0])?)?
        .broadcast_sub(&channels(&by.mean)?)?
        .broadcast_div(&channels(&by.std)?)?
        .to_dtype(dtype)
}

pub(super) fn gelu(x: &Tensor) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    if let Some(kernels) = cuda::of(x) {
        return cuda::gelu(&kernels, x);
    }
    let [wide] = widened([x])?;
    let probability = (&wide * std::f64::consts::FRAC_1_SQRT_2)?.erf()?.affine(0.5, 0.5)?;
    (wide * probability)?.to_dtype(x.dtype())
}

pub(super) fn softmax(x: &Tensor) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    if let Some(kernels) = cuda::of(x) {
        return cuda::softmax(&kernels, x);
    }
    let [wide] = widened([x])?;
    let largest = wide.detach().max_keepdim(D::Minus1)?;
    let shares = wide.broadcast_sub(&largest)?.exp()?;
    shares.broadcast_div(&shares.sum_keepdim(D::Minus1)?)?.to_dtype(x.dtype())
}

pub(super) fn layer_norm(x: &Tensor, gamma: &Tensor, beta: &Tensor, eps: f32) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    if let Some(kernels) = cuda::of(x) {
        return cuda::layer_norm(&kernels, x, gamma, beta, eps);
    }
    let [wide, gamma, beta] = widened([x, gamma, beta])?;
    let centered = wide.broadcast_sub(&wide.mean_keepdim(D::Minus1)?)?;
    let var = centered.sqr()?.mean_keepdim(D::Minus1)?;
    centered
        .broadcast_div(&(var + f64::from(eps))?.sqrt()?)?
        .broadcast_mul(&gamma)?
        .broadcast_add(&beta)?
        .to_dtype(x.dtype())
}

/// With the statistics given, or those of the batch; and which they were.
pub(super) fn batch_norm(
    [x, gamma, beta]: [&Tensor; 3],
    given: Option<&Statistics>,
    options: BatchNormOptions,
) -> Result<(Tensor, Statistics)> {
    #[cfg(feature = "cuda")]
    if let Some(kernels) = cuda::of(x) {
        return cuda::batch_norm(&kernels, [x, gamma, beta], given, options);
    }
    let channels = Planes::new(x.shape())?.channels();
    let [wide, gamma, beta] = widened([x, gamma, beta])?;
    let line = |t: &Tensor| t.reshape((1, channels, 1, 1));
    let over = (0, 2, 3);
    let mean = match given {
        Some(given) => line(&given.mean.detach())?.to_dtype(wide.dtype())?,
        None => wide.mean_keepdim(over)?,
    };
    let centered = wide.broadcast_sub(&mean)?;
    let var = match given {
        Some(given) => line(&given.var.detach())?.to_dtype(wide.dtype())?,
        None => centered.sqr()?.mean_keepdim(over)?,
    };
    let scale = (line(&gamma)? / (&var + f64::from(options.eps))?.sqrt()?)?;
    let y = centered.broadcast_mul(&scale)?.broadcast_add(&line(&beta)?)?;
    let y = if options.relu { relu(&y)? } else { y };
    let flat = |t: &Tensor| t.detach().flatten_all()?.to_dtype(DType::F32);
    Ok((y.to_dtype(x.dtype())?, Statistics { mean: flat(&mean)?, var: flat(&var)? }))
}

pub(super) fn linear(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    if let Some(kernels) = cuda::of_many(x, x.elem_count() / weight.dim(1)? * weight.dim(0)?) {
        return cuda::linear(&kernels, x, weight, bias);
    }
    let (outputs, inputs) = weight.dims2()?;
    let mut shape = x.dims().to_vec();
    shape.pop();
    shape.push(outputs);
    let y = x.reshape(((), inputs))?.matmul(&weight.t()?)?;
    let y = if let Some(bias) = bias { y.broadcast_add(bias)? } else { y };
    y.reshape(shape)
}

pub(super) fn conv2d(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    window: Window,
) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    {
        let geometry = Geometry::new(x.shape(), weight.shape(), window)?;
        if let Some(kernels) = cuda::of_many(x, geometry.largest()) {
            return cuda::conv2d(&kernels, x, weight, bias, geometry);
        }
    }
    let (_, _, height, width) = x.dims4()?;
    let (outputs, _, kernel_height, kernel_width) = weight.dims4()?;
    let Window { stride, padding } = window;
    let covered = |extent, kernel| -> Result<usize> {
        Ok((positions(extent, kernel, window)? - 1) * stride + kernel)
    };
    let (rows, columns) = (covered(height, kernel_height)?, covered(width, kernel_width)?);
    let y = if height + 2 * padding - rows == width + 2 * padding - columns {
        x.conv2d(weight, padding, stride, 1, 1)?
    } else {
        // Its backward takes what windows leave over of a column for what they leave of a line.
        x.pad_with_zeros(2, padding, padding)?
            .pad_with_zeros(3, padding, padding)?
            .narrow(2, 0, rows)?
            .narrow(3, 0, columns)?
            .conv2d(weight, 0, stride, 1, 1)?
    };
    match bias {
        Some(bias) => y.broadcast_add(&bias.reshape((1, outputs, 1, 1))?),
        None => Ok(y),
    }
}

/// Every window as a line of its pixels, of which the largest is taken.
pub(super) fn max_pool2d(x: &Tensor, kernel: usize, window: Window) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    if let Some(kernels) = cuda::of(x) {
        return cuda::max_pool2d(&kernels, x, kernel, window);
    }
    let (images, channels, height, width) = x.dims4()?;
    let outputs = (positions(height, kernel, window)?, positions(width, kernel, window)?);
    let count = outputs.0 * outputs.1;
    let mut planes = x.reshape((images, channels, height * width))?;
    if window.padding > 0 {
        let padding = Tensor::new(f32::NEG_INFINITY, x.device())?.to_dtype(x.dtype())?;
        let padding = padding.broadcast_as((images, channels, 1))?.contiguous()?;
        planes = Tensor::cat(&[&planes, &padding], 2)?;
    }
    let shapes = [height, width, kernel, window.stride, window.padding];
    let at = constant("max_pool2d", &shapes, x.device(), || {
        let pixels = pixels((height, width), outputs, kernel, window)?;
        Tensor::from_vec(pixels, count * kernel * kernel, x.device())
    })?;
    let lines = planes.index_select(&at, 2)?.reshape((images, channels, count, kernel * kernel))?;
    // A search for the largest passes over NaN.
    let seen = lines.detach();
    let infinity = Tensor::new(f32::INFINITY, x.device())?.to_dtype(x.dtype())?;
    let infinity = infinity.broadcast_as(seen.shape())?;
    let taken = seen.ne(&seen)?.where_cond(&infinity, &seen)?.argmax_keepdim(3)?;
    lines.gather(&taken, 3)?.reshape((images, channels, outputs.0, outputs.1))
}

/// Where in its plane each pixel of each window lies; one that is padding, behind the plane.
fn pixels(
    (height, width): (usize, usize),
    outputs: (usize, usize),
    kernel: usize,
    window: Window,
) -> Result<Vec<u32>> {
    let Ok(behind) = u32::try_from(height * width) else {
        bail!("max_pool2d: an image of {height} x {width} is too large");
    };
    // Along one axis.
    let inside = |output: usize, tap: usize, extent: usize| {
        let at = (output * window.stride + tap).checked_sub(window.padding);
        at.filter(|at| *at < extent)
    };
    let mut pixels = Vec::with_capacity(outputs.0 * outputs.1 * kernel * kernel);
    for (y, x) in (0..outputs.0).flat_map(|y| (0..outputs.1).map(move |x| (y, x))) {
        for (tap_y, tap_x) in (0..kernel).flat_map(|y| (0..kernel).map(move |x| (y, x))) {
            let at = inside(y, tap_y, height).zip(inside(x, tap_x, width));
            pixels.push(at.map_or(behind, |(row, column)| (row * width + column) as u32));
        }
    }
    Ok(pixels)
}

pub(super) fn global_avg_pool(x: &Tensor) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    if let Some(kernels) = cuda::of(x) {
        return cuda::global_avg_pool(&kernels, x);
    }
    let [wide] = widened([x])?;
    wide.flatten_from(2)?.mean(2)?.to_dtype(x.dtype())
}

pub(super) fn self_attention(qkv: &Tensor, options: AttentionOptions) -> Result<Tensor> {
    let (samples, positions, packed) = qkv.dims3()?;
    let depth = attention::depth(qkv.shape(), options)?;
    #[cfg(feature = "cuda")]
    if let Some(kernels) = cuda::of_many(qkv, qkv.elem_count() / depth * qkv.dim(1)?) {
        return cuda::self_attention(&kernels, qkv, options);
    }
    let part = |at: usize| {
        qkv.narrow(2, at * packed / 3, packed / 3)?
            .reshape((samples, positions, options.heads, depth))?
            .transpose(1, 2)?
            .contiguous()
    };
    let (q, k, v) = (part(0)?, part(1)?, part(2)?);
    let mut scores = (q * (depth as f64).sqrt().recip())?.matmul(&k.t()?)?;
    if options.causal {
        let seen = constant("causal", &[positions], qkv.device(), || {
            let seen = (0..positions).flat_map(|i| (0..positions).map(move |j| u8::from(j <= i)));
            Tensor::from_iter(seen, qkv.device())?.reshape((positions, positions))
        })?;
        let never = Tensor::new(f32::NEG_INFINITY, qkv.device())?.to_dtype(scores.dtype())?;
        let shape = scores.shape();
        scores = seen.broadcast_as(shape)?.where_cond(&scores, &never.broadcast_as(shape)?)?;
    }
    let y = softmax(&scores)?.matmul(&v)?;
    y.transpose(1, 2)?.reshape((samples, positions, packed / 3))
}

/// The rows are there: the caller has looked.
pub(super) fn embedding(ids: &Tensor, weight: &Tensor) -> Result<Tensor> {
    let (_, width) = weight.dims2()?;
    let [wide] = widened([weight])?;
    let mut shape = ids.dims().to_vec();
    shape.push(width);
    wide.index_select(&ids.flatten_all()?, 0)?.reshape(shape)?.to_dtype(weight.dtype())
}

/// The labels are classes: the caller has looked.
pub(super) fn cross_entropy(logits: &Tensor, labels: &Tensor) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    if let Some(kernels) = cuda::of(logits) {
        return cuda::cross_entropy(&kernels, logits, labels);
    }
    let [wide] = widened([logits])?;
    let labels = labels.reshape(((), 1))?;
    let shifted = wide.broadcast_sub(&wide.detach().max_keepdim(1)?)?;
    (shifted.exp()?.sum_keepdim(1)?.log()? - shifted.gather(&labels, 1)?)?.mean_all()
}

/// All in what is computed in: `f64` if the first is, else `f32`.
fn widened<const N: usize>(inputs: [&Tensor; N]) -> Result<[Tensor; N]> {
    let wide = if inputs[0].dtype() == DType::F64 { DType::F64 } else { DType::F32 };
    each(inputs, |input| match input.dtype().is_float() {
        true => input.to_dtype(wide),
        false => bail!("expected a floating-point type, got {:?}", input.dtype()),
    })
}

#[cfg(test)]
pub(super) mod tests {
    use std::cell::Cell;

    thread_local! {
        pub(super) static FORCED: Cell<bool> = const { Cell::new(false) };
    }

    /// Runs `call` with the operators composed, also of tensors of the host.
    pub(crate) fn composed<R>(call: impl FnOnce() -> R) -> R {
        FORCED.set(true);
        let result = call();
        FORCED.set(false);
        result
    }
}
