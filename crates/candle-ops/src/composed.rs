//! The operators as compositions of candle's own, for tensors on a GPU.
//!
//! The loops beside this file are for the CPU. On a GPU the same functions are compositions of candle's operators, which
//! differentiates them; only operators whose gradients are right are used. They allocate and launch more than the
//! kernels of `cuda/`, which replace them where the entered [`Context`](crate::Context) has kernels and they support
//! the type. Results are those of the CPU, except that
//!
//! * products and convolutions of half tensors round the product before the bias is added, and attention its scores and
//!   weights;
//! * which of several largest values of a window gets the gradient is unspecified, and a NaN beside an infinity may lose
//!   to it;
//! * sums are in the device's order, those of a batch's statistics in `f32`.
//!
//! Labels and indices are checked on the host first (`index_range.rs`).
//!
//! The tests run the compositions on the CPU, against differences and against the loops.

use candle_core::{D, DType, Result, Tensor, bail};

use super::autocast::each;
use super::constants::constant;
use super::conv::{Geometry, Window};
use super::conv_grouped::Grouped;
#[cfg(feature = "cuda")]
use super::cuda;
use super::elementwise::{Normalization, broadcast_add};
use super::loss::CrossEntropy;
use super::norm::{BatchNormOptions, Planes, Statistics};
use super::pool::Windows;
use super::rope::Pairs;
use super::upsample::Axis;
use super::weighted::Kernel;
use super::{attention, linear::Extents};

/// Whether compositions are for this tensor, and not the CPU's loops.
pub(super) fn is_for(x: &Tensor) -> bool {
    !x.device().is_cpu() || forced()
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

/// The sum of two contiguous tensors of one shape, if there is a kernel; of an `f32` and a half one, too, which it widens
/// while it reads it.
pub(super) fn add([a, b]: [&Tensor; 2]) -> Result<Option<Tensor>> {
    #[cfg(feature = "cuda")]
    if a.shape() == b.shape() && a.is_contiguous() && b.is_contiguous() {
        let (wide, half) = if a.dtype() == DType::F32 { (a, b) } else { (b, a) };
        let Some(kernels) = cuda::of(half) else { return Ok(None) };
        return match (wide.dtype(), half.dtype()) {
            (one, other) if one == other => cuda::add(&kernels, a, b).map(Some),
            (DType::F32, _) => cuda::add_to_f32(&kernels, wide, half).map(Some),
            _ => Ok(None),
        };
    }
    let _ = (a, b);
    Ok(None)
}

/// The sum, if there is a kernel and one summand is for each row of the other: positions, for each sample of a batch.
pub(super) fn add_rows([a, b]: [&Tensor; 2]) -> Result<Option<Tensor>> {
    #[cfg(feature = "cuda")]
    {
        let [whole, row] = if a.elem_count() < b.elem_count() { [b, a] } else { [a, b] };
        let ones = row.dims().iter().take_while(|dim| **dim == 1).count();
        let fits = whole.dims().ends_with(&row.dims()[ones..]) && row.rank() <= whole.rank();
        // A warp takes a row.
        let is_long = row.elem_count() >= 32 && row.elem_count() < whole.elem_count();
        if fits && is_long && whole.is_contiguous() && row.is_contiguous() {
            let Some(kernels) = cuda::of(whole) else { return Ok(None) };
            return cuda::add_rows(&kernels, whole, row).map(Some);
        }
    }
    let _ = (a, b);
    Ok(None)
}

/// `x`, contiguous, of another type, if there is a kernel.
pub(super) fn cast(x: &Tensor, dtype: DType) -> Result<Option<Tensor>> {
    #[cfg(feature = "cuda")]
    if let (DType::F32, half @ (DType::F16 | DType::BF16))
    | (half @ (DType::F16 | DType::BF16), DType::F32) = (x.dtype(), dtype)
        && x.is_contiguous()
        && let Some(kernels) = cuda::of_type(x, half, 1)
    {
        return cuda::cast(&kernels, x, dtype).map(Some);
    }
    let _ = (x, dtype);
    Ok(None)
}

pub(super) fn normalize(images: &Tensor, by: &Normalization, dtype: DType) -> Result<Tensor> {
    if images.dtype() != DType::U8 {
        bail!("normalize: images must be u8, not {:?}", images.dtype());
    }
    #[cfg(feature = "cuda")]
    if let Some(kernels) = cuda::of_type(images, dtype, 1) {
        return cuda::normalize(&kernels, images, by, dtype);
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
    let (low, bounded) = clamped(&wide, 40.0)?;
    let probability = (bounded * std::f64::consts::FRAC_1_SQRT_2)?.erf()?.affine(0.5, 0.5)?;
    (low * probability)?.to_dtype(x.dtype())
}

/// At least `-end`; and also at most `end`. Infinity times zero is NaN. Unlike these, candle's `clamp` may lose a NaN.
fn clamped(x: &Tensor, end: f64) -> Result<(Tensor, Tensor)> {
    let end = (x.zeros_like()? + end)?;
    let least = end.neg()?;
    let low = x.detach().lt(&least)?.where_cond(&least, x)?;
    let bounded = low.detach().gt(&end)?.where_cond(&end, &low)?;
    Ok((low, bounded))
}

pub(super) fn silu(x: &Tensor) -> Result<Tensor> {
    let [wide] = widened([x])?;
    wide_silu(&wide)?.to_dtype(x.dtype())
}

fn wide_silu(x: &Tensor) -> Result<Tensor> {
    let (low, bounded) = clamped(x, super::silu::END)?;
    low / (bounded.neg()?.exp()? + 1.0)?
}

pub(super) fn swiglu(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    let [wide, up] = widened([gate, up])?;
    (wide_silu(&wide)? * up)?.to_dtype(gate.dtype())
}

/// Of `[b, heads, t, d]`.
pub(super) fn rope(x: &Tensor, cos: &Tensor, sin: &Tensor, pairs: Pairs) -> Result<Tensor> {
    let [wide, cos, sin] = widened([x, cos, sin])?;
    let (samples, heads, positions, depth) = x.dims4()?;
    // The dimension of the two numbers of a pair.
    let (of, shape) = match pairs {
        Pairs::Halves => (3, [samples, heads, positions, 2, depth / 2]),
        Pairs::Neighbours => (4, [samples, heads, positions, depth / 2, 2]),
    };
    let angles = |t: &Tensor| -> Result<Tensor> {
        let t = if t.rank() == 2 { t.unsqueeze(0)? } else { t.clone() };
        t.narrow(1, 0, positions)?.unsqueeze(1)?.unsqueeze(of)
    };
    let (cos, sin, wide) = (angles(&cos)?, angles(&sin)?, wide.reshape(&shape[..])?);
    let (a, b) = (wide.narrow(of, 0, 1)?, wide.narrow(of, 1, 1)?);
    let turned = [
        (a.broadcast_mul(&cos)? - b.broadcast_mul(&sin)?)?,
        (a.broadcast_mul(&sin)? + b.broadcast_mul(&cos)?)?,
    ];
    Tensor::cat(&turned, of)?.reshape(x.shape())?.to_dtype(x.dtype())
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

/// `x` is `[n, c, ...]`.
pub(super) fn group_norm(
    x: &Tensor,
    groups: usize,
    [gamma, beta]: [&Tensor; 2],
    eps: f32,
) -> Result<Tensor> {
    let [wide, gamma, beta] = widened([x, gamma, beta])?;
    let (n, c) = (x.dim(0)?, x.dim(1)?);
    let rows = wide.reshape((n, groups, ()))?;
    let centered = rows.broadcast_sub(&rows.mean_keepdim(D::Minus1)?)?;
    let var = centered.sqr()?.mean_keepdim(D::Minus1)?;
    centered
        .broadcast_div(&(var + f64::from(eps))?.sqrt()?)?
        .reshape((n, c, ()))?
        .broadcast_mul(&gamma.reshape((1, c, 1))?)?
        .broadcast_add(&beta.reshape((1, c, 1))?)?
        .reshape(x.shape())?
        .to_dtype(x.dtype())
}

/// By products with the weights of each side; nearest pixels are selected.
pub(super) fn upsample(x: &Tensor, [rows, columns]: [&Axis; 2]) -> Result<Tensor> {
    let (n, c, height, width) = x.dims4()?;
    let [wide] = widened([x])?;
    if let (Some(rows), Some(columns)) = (rows.nearest(), columns.nearest()) {
        let select = |x: Tensor, dim, at: Vec<u32>| {
            let count = at.len();
            // candle's needs it so on a GPU, where images may be channels-last.
            x.contiguous()?.index_select(&Tensor::from_vec(at, count, x.device())?, dim)
        };
        return select(select(wide, 2, rows)?, 3, columns)?.to_dtype(x.dtype());
    }
    let weights = |axis: &Axis, extent: usize| {
        let shape = (axis.len(), extent);
        Tensor::from_vec(axis.matrix(extent), shape, x.device())?.to_dtype(wide.dtype())?.t()
    };
    // The last dimension, twice.
    let of_width = wide.reshape((n * c * height, width))?.matmul(&weights(columns, width)?)?;
    let turned = of_width.reshape((n * c, height, columns.len()))?.transpose(1, 2)?.contiguous()?;
    let of_height =
        turned.reshape((n * c * columns.len(), height))?.matmul(&weights(rows, height)?)?;
    of_height
        .reshape((n, c, columns.len(), rows.len()))?
        .transpose(2, 3)?
        .contiguous()?
        .to_dtype(x.dtype())
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

pub(super) fn rms_norm(x: &Tensor, gamma: &Tensor, eps: f32) -> Result<Tensor> {
    let [wide, gamma] = widened([x, gamma])?;
    let mean = wide.sqr()?.mean_keepdim(D::Minus1)?;
    wide.broadcast_div(&(mean + f64::from(eps))?.sqrt()?)?
        .broadcast_mul(&gamma)?
        .to_dtype(x.dtype())
}

/// With the given statistics or those of the batch, which are returned.
pub(super) fn batch_norm(
    [x, gamma, beta]: [&Tensor; 3],
    given: Option<&Statistics>,
    options: BatchNormOptions,
    planes: Planes,
) -> Result<(Tensor, Statistics)> {
    #[cfg(feature = "cuda")]
    if let Some(kernels) = cuda::of(x) {
        return cuda::batch_norm(&kernels, [x, gamma, beta], given, options, planes);
    }
    let [wide, gamma, beta] = widened([x, gamma, beta])?;
    let line = |t: &Tensor| t.reshape((1, planes.channels, 1, 1));
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

pub(super) fn linear(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    extents: Extents,
) -> Result<Tensor> {
    let shape = extents.output_shape(x.shape());
    #[cfg(feature = "cuda")]
    if let Some(kernels) = cuda::of_many(x, shape.elem_count()) {
        return cuda::linear(&kernels, x, weight, bias, extents);
    }
    let y = x.reshape((extents.rows, extents.inputs))?.matmul(&weight.t()?)?;
    let y = if let Some(bias) = bias { broadcast_add(&y, bias)? } else { y };
    y.reshape(shape)
}

pub(super) fn conv2d(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    extents: Geometry,
) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    if let Some(kernels) = cuda::of_many(x, extents.largest())
        && let Some(y) =
            cuda::conv2d(&kernels, x, weight, bias, Grouped { one: extents, groups: 1 })?
    {
        return Ok(y);
    }
    let Geometry { height, width, out_height, out_width, dilation, .. } = extents;
    let Window { stride, padding } = extents.window;
    // Rows and columns of the padded image that windows cover.
    let rows = (out_height - 1) * stride + (extents.kernel_height - 1) * dilation + 1;
    let columns = (out_width - 1) * stride + (extents.kernel_width - 1) * dilation + 1;
    let y = if height + 2 * padding - rows == width + 2 * padding - columns {
        x.conv2d(weight, padding, stride, dilation, 1)?
    } else {
        // candle's backward takes the number of columns left over for that of rows.
        x.pad_with_zeros(2, padding, padding)?
            .pad_with_zeros(3, padding, padding)?
            .narrow(2, 0, rows)?
            .narrow(3, 0, columns)?
            .conv2d(weight, 0, stride, dilation, 1)?
    };
    match bias {
        Some(bias) => broadcast_add(&y, &bias.reshape((1, extents.out_channels, 1, 1))?),
        None => Ok(y),
    }
}

pub(super) fn conv2d_grouped(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    of: &Grouped,
) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    if let Some(kernels) = cuda::of_many(x, of.groups * of.one.largest())
        && let Some(y) = cuda::conv2d(&kernels, x, weight, bias, *of)?
    {
        return Ok(y);
    }
    in_groups(of.groups, [(x, 1), (weight, 0)], bias, |x, weight, bias| {
        conv2d(x, weight, bias, of.one)
    })
}

/// Applies `call` to each group: `[x, weight]` with the dimensions that they are split along, and the bias.
pub(super) fn in_groups(
    groups: usize,
    inputs: [(&Tensor, usize); 2],
    bias: Option<&Tensor>,
    call: impl Fn(&Tensor, &Tensor, Option<&Tensor>) -> Result<Tensor>,
) -> Result<Tensor> {
    let part = |t: &Tensor, dim: usize, group: usize| {
        let length = t.dim(dim)? / groups;
        t.narrow(dim, group * length, length)?.contiguous()
    };
    let [(x, x_dim), (weight, weight_dim)] = inputs;
    let each = |group| {
        let bias = bias.map(|bias| part(bias, 0, group)).transpose()?;
        call(&part(x, x_dim, group)?, &part(weight, weight_dim, group)?, bias.as_ref())
    };
    Tensor::cat(&(0..groups).map(each).collect::<Result<Vec<_>>>()?, 1)
}

pub(super) fn conv_transpose2d(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    extents: Geometry,
    output_padding: usize,
) -> Result<Tensor> {
    let Geometry { window: Window { stride, padding }, dilation, .. } = extents;
    let y = if output_padding == 0 {
        x.conv_transpose2d(weight, padding, 0, stride, dilation)?
    } else {
        // candle's backward fails for an output padding of a stride or more.
        x.conv_transpose2d(weight, 0, 0, stride, dilation)?
            .pad_with_zeros(2, 0, output_padding)?
            .pad_with_zeros(3, 0, output_padding)?
            .narrow(2, padding, extents.height)?
            .narrow(3, padding, extents.width)?
    };
    match bias {
        Some(bias) => broadcast_add(&y, &bias.reshape((1, extents.channels, 1, 1))?),
        None => Ok(y),
    }
}

/// Gathers the pixels of every window as a row, and takes the largest of each row.
pub(super) fn max_pool2d(x: &Tensor, extents: Windows) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    if let Some(kernels) = cuda::of(x) {
        return cuda::max_pool2d(&kernels, x, extents);
    }
    let Windows { images, channels, height, width, kernel, window, .. } = extents;
    let count = extents.out_height * extents.out_width;
    // A pixel of several windows sums their gradients.
    let (dtype, [x]) = (x.dtype(), &widened([x])?);
    let mut planes = x.reshape((images, channels, height * width))?;
    if window.padding > 0 {
        let padding = Tensor::new(f32::NEG_INFINITY, x.device())?.to_dtype(x.dtype())?;
        let padding = padding.broadcast_as((images, channels, 1))?.contiguous()?;
        planes = Tensor::cat(&[&planes, &padding], 2)?;
    }
    let shapes = [height, width, kernel, window.stride, window.padding];
    let at = constant("max_pool2d", &shapes, x.device(), || {
        Tensor::from_vec(pixels(extents), count * kernel * kernel, x.device())
    })?;
    let rows = planes.index_select(&at, 2)?.reshape((images, channels, count, kernel * kernel))?;
    // argmax skips NaN, so infinity stands for it.
    let seen = rows.detach();
    let infinity = Tensor::new(f32::INFINITY, x.device())?.to_dtype(x.dtype())?;
    let infinity = infinity.broadcast_as(seen.shape())?;
    let taken = seen.ne(&seen)?.where_cond(&infinity, &seen)?.argmax_keepdim(3)?;
    rows.gather(&taken, 3)?.reshape(extents.output_shape())?.to_dtype(dtype)
}

/// Index in its plane of each pixel of each window; that of padding is one past the plane.
fn pixels(extents: Windows) -> Vec<u32> {
    let Windows { height, width, out_height, out_width, kernel, window, .. } = extents;
    // Along one axis.
    let inside = |output: usize, tap: usize, extent: usize| {
        let at = (output * window.stride + tap).checked_sub(window.padding);
        at.filter(|at| *at < extent)
    };
    let mut pixels = Vec::with_capacity(out_height * out_width * kernel * kernel);
    for (y, x) in (0..out_height).flat_map(|y| (0..out_width).map(move |x| (y, x))) {
        for (tap_y, tap_x) in (0..kernel).flat_map(|y| (0..kernel).map(move |x| (y, x))) {
            let at = inside(y, tap_y, height).zip(inside(x, tap_x, width));
            // Planes are smaller than `u32::MAX`.
            pixels.push(at.map_or(height * width, |(row, column)| row * width + column) as u32);
        }
    }
    pixels
}

pub(super) fn global_avg_pool(x: &Tensor) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    if let Some(kernels) = cuda::of(x) {
        return cuda::global_avg_pool(&kernels, x);
    }
    let [wide] = widened([x])?;
    wide.flatten_from(2)?.mean(2)?.to_dtype(x.dtype())
}

pub(super) fn self_attention(qkv: &Tensor, extents: attention::Extents) -> Result<Tensor> {
    let attention::Extents { samples, positions, heads, depth, .. } = extents;
    #[cfg(feature = "cuda")]
    if let Some(kernels) = cuda::of_many(qkv, positions * positions) {
        return cuda::self_attention(&kernels, qkv, extents);
    }
    let part = |part: usize| {
        qkv.narrow(2, part * extents.width(), extents.width())?
            .reshape((samples, positions, heads, depth))?
            .transpose(1, 2)?
            .contiguous()
    };
    let y = attention([&part(0)?, &part(1)?, &part(2)?], &extents.problem())?;
    y.transpose(1, 2)?.reshape(extents.output_shape())
}

/// Heads that share keys are the rows of one product.
pub(super) fn attention([q, k, v]: [&Tensor; 3], of: &attention::Problem) -> Result<Tensor> {
    let attention::Problem { samples, heads, kv_heads, queries, keys, .. } = *of;
    let rows = heads / kv_heads * queries;
    #[cfg(feature = "cuda")]
    if of.mask.is_none()
        && of.dropout.is_none()
        && let Some(kernels) = cuda::of_many(q, rows * keys)
    {
        return cuda::attention(&kernels, [q, k, v], of);
    }
    let (k, v) = (k.contiguous()?, v.contiguous()?);
    let grouped = (q * of.scale)?.reshape((samples, kv_heads, rows, of.depth))?;
    let mut scores = grouped.matmul(&k.t()?)?.reshape(of.scores_shape())?;
    if let Some(mask) = &of.mask {
        scores = broadcast_add(&scores.to_dtype(mask.dtype())?, mask)?;
    }
    if of.causal {
        let seen = constant("causal", &[queries, keys], q.device(), || {
            let seen = (0..queries).flat_map(|i| (0..keys).map(move |j| u8::from(j <= i)));
            Tensor::from_iter(seen, q.device())?.reshape((queries, keys))
        })?;
        let (shape, never) = (scores.shape(), scalar(f64::NEG_INFINITY, &scores)?);
        scores = seen.broadcast_as(shape)?.where_cond(&scores, &never.broadcast_as(shape)?)?;
    }
    let mut weights = match of.mask {
        Some(_) => masked_softmax(&scores)?.to_dtype(q.dtype())?,
        None => softmax(&scores)?,
    };
    if let Some(dropout) = &of.dropout {
        weights = dropout.multiply(&weights)?;
    }
    let y = weights.reshape((samples, kv_heads, rows, keys))?.matmul(&v)?;
    y.reshape((samples, heads, queries, of.value_depth))
}

/// Softmax whose rows of negative infinity are 0.
fn masked_softmax(x: &Tensor) -> Result<Tensor> {
    let largest = x.detach().max_keepdim(D::Minus1)?;
    let hidden = largest.broadcast_eq(&scalar(f64::NEG_INFINITY, x)?)?;
    let largest = hidden.where_cond(&largest.zeros_like()?, &largest)?;
    let shares = x.broadcast_sub(&largest)?.exp()?;
    let sum = (shares.sum_keepdim(D::Minus1)? + hidden.to_dtype(x.dtype())?)?;
    shares.broadcast_div(&sum)
}

/// The caller has checked the indices.
pub(super) fn embedding(ids: &Tensor, weight: &Tensor, padding: Option<usize>) -> Result<Tensor> {
    let (_, width) = weight.dims2()?;
    #[cfg(feature = "cuda")]
    if let Some(kernels) = cuda::of_many(weight, ids.elem_count() * width)
        && ids.elem_count() > 0
    {
        return cuda::embedding(&kernels, ids, weight, padding);
    }
    let [wide] = widened([weight])?;
    let (flat, mut shape) = (ids.flatten_all()?, ids.dims().to_vec());
    let mut y = wide.contiguous()?.index_select(&flat, 0)?;
    if let Some(padding) = padding {
        let flat = flat.to_dtype(DType::I64)?;
        let is_padding = flat.broadcast_eq(&scalar(padding as f64, &flat)?)?.unsqueeze(1)?;
        y = is_padding.broadcast_as(y.shape())?.where_cond(&y.detach(), &y)?;
    }
    shape.push(width);
    y.reshape(shape)?.to_dtype(weight.dtype())
}

/// The caller has checked the labels.
pub(super) fn cross_entropy(logits: &Tensor, labels: &Tensor, of: &CrossEntropy) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    if let Some(kernels) = cuda::of(logits).filter(|_| of.is_plain()) {
        return cuda::cross_entropy(&kernels, logits, labels);
    }
    let [wide] = widened([logits])?;
    let shifted = wide.broadcast_sub(&wide.detach().max_keepdim(1)?)?;
    let log = shifted.exp()?.sum_keepdim(1)?.log()?;
    if of.is_plain() {
        return (log - shifted.gather(&labels.unsqueeze(1)?, 1)?)?.mean_all();
    }
    let labels = labels.to_dtype(DType::I64)?;
    // Any number but a label, if none is ignored.
    let kept = labels.broadcast_ne(&scalar(of.ignore_index.unwrap_or(-1) as f64, &labels)?)?;
    let at = kept.where_cond(&labels, &labels.zeros_like()?)?;
    let (_, classes) = logits.dims2()?;
    let weights = match &of.weight {
        Some(weight) => weight.to_device(logits.device())?.to_dtype(wide.dtype())?,
        None => Tensor::ones(classes, wide.dtype(), logits.device())?,
    };
    let own = (weights.index_select(&at, 0)? * kept.to_dtype(wide.dtype())?)?;
    let nll = (&log - shifted.gather(&at.unsqueeze(1)?, 1)?)?.squeeze(1)?;
    let mut rows = ((nll * &own)? * (1.0 - of.smoothing))?;
    if of.smoothing > 0.0 {
        let all = log.broadcast_sub(&shifted)?.broadcast_mul(&weights)?.sum(1)?;
        rows = (rows + (all * (of.smoothing / classes as f64))?)?;
    }
    let total = kept.where_cond(&rows, &rows.zeros_like()?)?.sum_all()?;
    // If all are ignored, the loss is NaN, and gradients are 0.
    let weight = own.sum_all()?;
    let none = weight.eq(&weight.zeros_like()?)?;
    let nan = none.where_cond(&(weight.zeros_like()? * f64::NAN)?, &weight.zeros_like()?)?;
    (total / (weight + none.to_dtype(wide.dtype())?)?)? + nan
}

/// A number of `like`'s type on its device. Unlike `Tensor::new` it copies nothing from the host, which a step that is
/// captured as a CUDA graph could not.
fn scalar(value: f64, like: &Tensor) -> Result<Tensor> {
    Tensor::zeros((), like.dtype(), like.device())?.affine(1.0, value)
}

/// Casts all to the type that is computed in: `f64` if the first is, else `f32`.
fn widened<const N: usize>(inputs: [&Tensor; N]) -> Result<[Tensor; N]> {
    let wide = if inputs[0].dtype() == DType::F64 { DType::F64 } else { DType::F32 };
    each(inputs, |input| match input.dtype().is_float() {
        true => input.to_dtype(wide),
        false => bail!("expected a floating-point type, got {:?}", input.dtype()),
    })
}

#[cfg(not(test))]
const fn forced() -> bool {
    false
}

#[cfg(test)]
use tests::forced;

#[cfg(test)]
pub(super) mod tests {
    use std::cell::Cell;

    thread_local! {
        static FORCED: Cell<bool> = const { Cell::new(false) };
    }

    /// Whether compositions are for tensors on the CPU, too.
    pub(super) fn forced() -> bool {
        FORCED.get()
    }

    /// Runs `call` with compositions for tensors on the CPU, too.
    pub(crate) fn composed<R>(call: impl FnOnce() -> R) -> R {
        FORCED.set(true);
        let result = call();
        FORCED.set(false);
        result
    }
}
