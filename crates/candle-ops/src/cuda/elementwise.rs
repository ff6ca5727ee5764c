//! ReLU, GELU, the sum at the end of a residual block, and image normalization.

use std::sync::Arc;

use candle_core::{DType, Result, Tensor};

use super::channels_last::Order;
use super::jobs::{AddRowsJob, BytesJob, MapJob, u32_of};
use super::node::{node, node_of};
use super::{Kernel, Kernels, Output, THREADS, blocks_of_threads, blocks_of_warps, chunks_of};
use crate::graph::custom_op::{apply1, apply2};
use crate::state::constants::constant;

pub(super) fn relu(kernels: &Arc<Kernels>, x: &Tensor) -> Result<Tensor> {
    let order = Order::of(x);
    let own = &kernels.laid(x, order)?;
    let y = kernels.map(Kernel::relu, [own, own])?;
    let kernels = kernels.clone();
    let backward = move |_: [&Tensor; 1], y: &Tensor, dy: &Tensor| {
        Ok([Some(kernels.relu_gradient(y, dy, order)?)])
    };
    apply1(node_of("relu", y, order, backward), [x])
}

pub(super) fn gelu(kernels: &Arc<Kernels>, x: &Tensor) -> Result<Tensor> {
    let x = &x.contiguous()?;
    let y = kernels.map(Kernel::gelu, [x, x])?;
    let kernels = kernels.clone();
    let backward = move |[x]: [&Tensor; 1], _: &Tensor, dy: &Tensor| {
        let dx = match kernels.summed(Kernel::gelu_backward_sums, [x, dy], x.dtype())? {
            Some(dx) => dx,
            None => kernels.map(Kernel::gelu_backward, [x, dy])?.tensor(),
        };
        Ok([Some(dx)])
    };
    apply1(node("gelu", y, backward), [x])
}

/// Both have the same shape and type, and are contiguous.
pub(super) fn add(kernels: &Arc<Kernels>, a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let y = kernels.map(Kernel::add, [a, b])?;
    let backward = |_: [&Tensor; 2], _: &Tensor, dy: &Tensor| Ok([0; 2].map(|_| Some(dy.clone())));
    apply2(node("add", y, backward), [a, b])
}

/// Both have the same type and are contiguous; the elements of `row` are added to each row of
/// `whole`.
pub(super) fn add_rows(kernels: &Arc<Kernels>, whole: &Tensor, row: &Tensor) -> Result<Tensor> {
    let y = kernels.empty(whole.shape(), whole.dtype())?;
    let count = row.elem_count();
    let rows = whole.elem_count() / count;
    let job = AddRowsJob {
        a: kernels.address(whole)?,
        b: kernels.address(row)?,
        y: y.at,
        rows: u32_of(rows),
        count: u32_of(count),
    };
    let blocks = blocks_of_warps(chunks_of(rows, count));
    // SAFETY: an `AddRowsJob` of `rows * count` elements, `count` and as many results, of this
    // type.
    unsafe { kernels.launch(whole.dtype(), Kernel::add_rows, blocks, &job) }?;
    let kernels = kernels.clone();
    let backward = move |[_, row]: [&Tensor; 2], _: &Tensor, dy: &Tensor| {
        let sums = || {
            let sums = kernels.column_sums(dy, row.elem_count())?;
            sums.reshape(row.shape())?.to_dtype(row.dtype())
        };
        Ok([Some(dy.clone()), row.track_op().then(sums).transpose()?])
    };
    apply2(node("add", y, backward), [whole, row])
}

/// Casts a contiguous tensor to another type. One of both types is `f32`, and the other has a
/// program.
pub(super) fn cast(kernels: &Arc<Kernels>, x: &Tensor, dtype: DType) -> Result<Tensor> {
    let y = kernels.converted(x, dtype)?;
    let kernels = kernels.clone();
    let backward = move |[x]: [&Tensor; 1], _: &Tensor, dy: &Tensor| {
        Ok([Some(kernels.converted(dy, x.dtype())?.tensor())])
    };
    apply1(node("to_dtype", y, backward), [x])
}

/// Both have the same shape and type.
pub(super) fn add_relu(kernels: &Arc<Kernels>, a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let order = if Order::of(a) == Order::Last { Order::Last } else { Order::of(b) };
    let y = kernels.map(Kernel::add_relu, [&kernels.laid(a, order)?, &kernels.laid(b, order)?])?;
    let kernels = kernels.clone();
    let backward = move |_: [&Tensor; 2], y: &Tensor, dy: &Tensor| {
        let dx = kernels.relu_gradient(y, dy, order)?;
        Ok([Some(dx.clone()), Some(dx)])
    };
    apply2(node_of("add_relu", y, order, backward), [a, b])
}

/// Adds an `f32` and a half-precision tensor of the same shape, contiguous.
pub(super) fn add_to_f32(kernels: &Arc<Kernels>, wide: &Tensor, half: &Tensor) -> Result<Tensor> {
    let y = kernels.empty(wide.shape(), DType::F32)?;
    let count = wide.elem_count();
    let (a, b) = (kernels.address(wide)?, kernels.address(half)?);
    let job = MapJob { a, b, y: y.at, count: count as u64 };
    // SAFETY: a `MapJob` of `count` elements each, `b` of the program's type, the others `f32`.
    unsafe { kernels.launch(half.dtype(), Kernel::add_to_f32, blocks_of_threads(count), &job) }?;
    let kernels = kernels.clone();
    let backward = move |[_, half]: [&Tensor; 2], _: &Tensor, dy: &Tensor| {
        let narrow = || match kernels.summed(Kernel::cast_from_f32_sums, [dy, dy], half.dtype())? {
            Some(narrow) => Ok(narrow),
            None => Ok::<_, candle_core::Error>(kernels.converted(dy, half.dtype())?.tensor()),
        };
        Ok([Some(dy.clone()), half.track_op().then(narrow).transpose()?])
    };
    apply2(node("add", y, backward), [wide, half])
}

/// Normalizes `u8` images `[n, c, h, w]`; means and deviations match the channels.
pub(super) fn normalize(
    kernels: &Kernels,
    images: &Tensor,
    [mean, std]: [&[f32]; 2],
    dtype: DType,
) -> Result<Tensor> {
    let images = &images.contiguous()?;
    let (count, channels, height, width) = images.dims4()?;
    let (planes, pixels, channels) = match (mean.len(), std.len()) {
        (1, 1) => (1, images.elem_count(), 1),
        _ => (count * channels, height * width, channels),
    };
    // A single value is used for all channels.
    let each = |values: &[f32]| values.iter().copied().cycle().take(channels).collect::<Vec<_>>();
    let by = [each(mean), each(std)].concat();
    let bits: Vec<_> = by.iter().map(|value| value.to_bits() as usize).collect();
    let by = constant("normalize", &bits, images.device(), || {
        Tensor::from_slice(&by, by.len(), images.device())
    })?;
    let y = kernels.empty(images.shape(), dtype)?;
    let job = BytesJob {
        x: kernels.address(images)?,
        y: y.at,
        by: kernels.address(&by)?,
        planes: u32_of(planes),
        pixels: u32_of(pixels),
        channels: u32_of(channels),
        unused: 0,
    };
    let blocks = blocks_of_warps(chunks_of(planes, pixels));
    // SAFETY: a `BytesJob` of `planes * pixels` bytes and as many results, with two numbers for
    // each channel.
    unsafe { kernels.launch(dtype, Kernel::scale_bytes, blocks, &job) }?;
    Ok(y.tensor())
}

impl Kernels {
    /// The gradient for a result in this layout, and its gradient.
    fn relu_gradient(&self, y: &Tensor, dy: &Tensor, order: Order) -> Result<Tensor> {
        let both = [&self.laid(y, order)?, &self.laid(dy, order)?];
        self.map(Kernel::relu_backward, both)?.seen(order)
    }

    /// See [`cast`].
    fn converted(&self, x: &Tensor, dtype: DType) -> Result<Output> {
        let y = self.empty(x.shape(), dtype)?;
        let (of, kernel) = match x.dtype() {
            DType::F32 => (dtype, Kernel::cast_from_f32),
            half => (half, Kernel::cast_to_f32),
        };
        let count = x.elem_count();
        let job = MapJob { a: self.address(x)?, b: 0, y: y.at, count: count as u64 };
        // Four times four elements per thread.
        let blocks = count.div_ceil(16 * THREADS).min(1 << 12);
        // SAFETY: a `MapJob` of two tensors of `count` elements, one `f32`, the other of the
        // program's type.
        unsafe { self.launch(of, kernel, blocks, &job) }?;
        Ok(y)
    }

    /// A kernel over the elements of two contiguous tensors with the same shape and type.
    pub(super) fn map(&self, kernel: Kernel, [a, b]: [&Tensor; 2]) -> Result<Output> {
        let y = self.empty(a.shape(), a.dtype())?;
        let count = a.elem_count();
        let (a_at, b_at) = (self.address(a)?, self.address(b)?);
        let job = MapJob { a: a_at, b: b_at, y: y.at, count: count as u64 };
        // SAFETY: a `MapJob` of three tensors of `count` elements of this type.
        unsafe { self.launch(a.dtype(), kernel, blocks_of_threads(count), &job) }?;
        Ok(y)
    }
}
