//! Batch normalization: two launches forward, two backward, and one more each to sum the parts of
//! channels-last images, which stay channels-last.

use std::sync::Arc;

use candle_core::{DType, Result, Tensor};

use super::channels_last::Order;
use super::jobs::{NormJob, TrackJob, u32_of};
use super::node::node_of;
use super::{FOLDED, Kernel, Kernels, Output, blocks_of_warps, chunks_of};
use crate::graph::custom_op::apply3;
use crate::sizes::{BatchNormOptions, NormBy, Planes, Running, Statistics};

/// Returns the statistics, too.
pub(super) fn batch_norm(
    kernels: &Arc<Kernels>,
    [x, gamma, beta]: [&Tensor; 3],
    by: NormBy<'_>,
    options: BatchNormOptions,
    planes: Planes,
) -> Result<(Tensor, Statistics)> {
    let order = Order::of(x);
    // A cast to the same type has no effect.
    let [gamma, beta] = [gamma.to_dtype(DType::F32)?, beta.to_dtype(DType::F32)?];
    let (gamma, beta) = (&gamma.contiguous()?, &beta.contiguous()?);
    let norm = Norm::new(kernels, x.dtype(), options, planes, order);
    let own = &kernels.laid(x, order)?;
    let statistics = match by {
        NormBy::Given(given) => Statistics {
            mean: given.mean.detach().to_dtype(DType::F32)?.contiguous()?,
            var: given.var.detach().to_dtype(DType::F32)?.contiguous()?,
        },
        NormBy::Batch(running) => norm.measure(own, running)?,
    };
    let y = kernels.empty(own.shape(), x.dtype())?;
    let at = kernels.address(own)?;
    let is_tracked = [x, gamma, beta].iter().any(|t| t.track_op());
    let bits = if is_tracked { norm.bits(at | y.at)? } else { None };
    let job = NormJob {
        x: at,
        y: y.at,
        bits: bits.as_ref().map_or(0, |bits| bits.at),
        gamma: kernels.address(gamma)?,
        beta: kernels.address(beta)?,
        mean: kernels.address(&statistics.mean)?,
        var: kernels.address(&statistics.var)?,
        ..NormJob::default()
    };
    // SAFETY: all tensors that `normalize` uses, contiguous and of these extents.
    unsafe { norm.each([Kernel::normalize, Kernel::normalize_last], &job) }?;
    let kept = Kept {
        statistics: statistics.clone(),
        of_batch: matches!(by, NormBy::Batch(_)),
        bits: bits.map(Output::tensor),
    };
    let backward =
        move |inputs: [&Tensor; 3], y: &Tensor, dy: &Tensor| norm.backward(inputs, y, dy, &kept);
    Ok((apply3(node_of("batch_norm", y, order, backward), [x, gamma, beta])?, statistics))
}

/// The sum of each channel of channels-first images, `f32`.
pub(super) fn sums_of_channels(kernels: &Arc<Kernels>, dy: &Tensor) -> Result<Tensor> {
    let options = BatchNormOptions { eps: 0.0, relu: false };
    let norm = Norm::new(kernels, dy.dtype(), options, Planes::new(dy.shape())?, Order::First);
    let dy = kernels.laid(dy, Order::First)?;
    let sums = kernels.empty(norm.planes.channels, DType::F32)?;
    let part = kernels.empty((norm.planes.channels, norm.parts, 2), DType::F64)?;
    let job =
        NormJob { dy: kernels.address(&dy)?, dbeta: sums.at, part: part.at, ..NormJob::default() };
    // SAFETY: all tensors that `norm_sums` uses without an input.
    unsafe { norm.add_up([Kernel::norm_sums, Kernel::norm_sums_last], &job) }?;
    Ok(sums.tensor())
}

/// Updates running statistics.
pub(super) fn track(kernels: &Kernels, running: Running<'_>, batch: &Statistics) -> Result<()> {
    let Running { of, momentum, factor } = running;
    let channels = of.mean.elem_count();
    let job = TrackJob {
        mean: kernels.address(&of.mean)?,
        var: kernels.address(&of.var)?,
        batch_mean: kernels.address(&batch.mean)?,
        batch_var: kernels.address(&batch.var)?,
        channels: u32_of(channels),
        momentum: momentum as f32,
        factor,
        unused: 0,
    };
    // SAFETY: a `TrackJob` of four contiguous tensors of as many channels, `f32`.
    unsafe { kernels.launch(DType::F32, Kernel::track, channels.div_ceil(super::THREADS), &job) }
}

struct Norm {
    kernels: Arc<Kernels>,
    dtype: DType,
    planes: Planes,
    /// Number of blocks per channel.
    parts: usize,
    options: BatchNormOptions,
    order: Order,
}

/// State of the forward pass for the backward pass.
struct Kept {
    statistics: Statistics,
    of_batch: bool,
    /// A bit for each element that is not 0 or below, after a ReLU: the backward pass would read
    /// the elements twice.
    bits: Option<Tensor>,
}

impl Norm {
    fn new(
        kernels: &Arc<Kernels>,
        dtype: DType,
        options: BatchNormOptions,
        planes: Planes,
        order: Order,
    ) -> Self {
        let Planes { images, channels, pixels } = planes;
        let parts = match order {
            Order::First => {
                let most = chunks_of(images, pixels).clamp(1, 64);
                (images * pixels / PART).clamp(1, most)
            }
            Order::Last => parts_of_rows(images * pixels, channels, SUMMING),
        };
        Self { kernels: kernels.clone(), dtype, planes, parts, options, order }
    }

    /// Computes the statistics of the batch, and updates running ones: for channels-last images in
    /// the same launch.
    fn measure(&self, x: &Tensor, running: Option<Running<'_>>) -> Result<Statistics> {
        let [mean, var] = [(); 2].map(|()| self.kernels.empty(self.planes.channels, DType::F32));
        let (mean, var) = (mean?, var?);
        let part = self.kernels.empty((self.planes.channels, self.parts, 3), DType::F64)?;
        let job = NormJob {
            x: self.kernels.address(x)?,
            mean: mean.at,
            var: var.at,
            part: part.at,
            ..NormJob::default()
        };
        let job = match running.filter(|_| self.order == Order::Last) {
            Some(Running { of, momentum, factor }) => NormJob {
                running_mean: self.kernels.address(&of.mean)?,
                running_var: self.kernels.address(&of.var)?,
                momentum: momentum as f32,
                factor,
                ..job
            },
            None => job,
        };
        // SAFETY: all tensors that `moments` and `fold_parts_last` use.
        unsafe { self.add_up([Kernel::moments, Kernel::moments_last], &job) }?;
        let statistics = Statistics { mean: mean.tensor(), var: var.tensor() };
        if let Some(running) = running.filter(|_| self.order == Order::First) {
            track(&self.kernels, running, &statistics)?;
        }
        Ok(statistics)
    }

    /// Memory for the bits of a ReLU's results, if each thread has packs of channels: for
    /// addresses, or-ed together, that allow it.
    fn bits(&self, addresses: u64) -> Result<Option<Output>> {
        let Planes { images, channels, pixels } = self.planes;
        let pack = 16 / self.dtype.size_in_bytes();
        let fits = addresses.is_multiple_of(16) && channels.is_multiple_of(pack);
        let packs = images * pixels * channels / pack;
        let has_bits = self.options.relu && self.order == Order::Last && fits;
        has_bits.then(|| self.kernels.empty(packs, DType::U8)).transpose()
    }

    fn backward(
        &self,
        [x, gamma, _]: [&Tensor; 3],
        y: &Tensor,
        dy: &Tensor,
        kept: &Kept,
    ) -> Result<[Option<Tensor>; 3]> {
        let (kernels, statistics) = (&self.kernels, &kept.statistics);
        let [dgamma, dbeta] = [(); 2].map(|()| kernels.empty(self.planes.channels, DType::F32));
        let (dgamma, dbeta) = (dgamma?, dbeta?);
        let along = kernels.empty((self.planes.channels, 2), DType::F32)?;
        let part = kernels.empty((self.planes.channels, self.parts, 2), DType::F64)?;
        let [x, y, dy] = [x, y, dy].map(|t| kernels.laid(t, self.order));
        let (x, y, dy) = (x?, y?, dy?);
        let dx = kernels.empty(x.shape(), self.dtype)?;
        let job = NormJob {
            x: kernels.address(&x)?,
            y: if self.options.relu && kept.bits.is_none() { kernels.address(&y)? } else { 0 },
            bits: kept.bits.as_ref().map_or(Ok(0), |bits| kernels.address(bits))?,
            dy: kernels.address(&dy)?,
            dx: dx.at,
            gamma: kernels.address(gamma)?,
            mean: kernels.address(&statistics.mean)?,
            var: kernels.address(&statistics.var)?,
            dgamma: dgamma.at,
            dbeta: dbeta.at,
            along: along.at,
            part: part.at,
            ..NormJob::default()
        };
        // SAFETY: all tensors that `norm_sums` uses.
        unsafe { self.add_up([Kernel::norm_sums, Kernel::norm_sums_last], &job) }?;
        let job = NormJob { along: if kept.of_batch { along.at } else { 0 }, ..job };
        // SAFETY: all tensors that `norm_backward` uses.
        unsafe { self.each([Kernel::norm_backward, Kernel::norm_backward_last], &job) }?;
        Ok([Some(dx.seen(self.order)?), Some(dgamma.tensor()), Some(dbeta.tensor())])
    }

    /// Launches the kernel for this layout that sums over each channel, in parts.
    ///
    /// # Safety
    ///
    /// All addresses that the kernel uses must be those of contiguous tensors of these extents.
    unsafe fn add_up(&self, kernels: [Kernel; 2], job: &NormJob) -> Result<()> {
        let channels = self.planes.channels;
        let blocks = [channels, channels.div_ceil(SLICE)].map(|of_part| of_part * self.parts);
        // SAFETY: the caller vouches for the addresses.
        unsafe { self.launch(self.order.pick(kernels), self.order.pick(blocks), self.parts, job) }?;
        if self.order == Order::First {
            return Ok(());
        }
        // SAFETY: as above; the parts are written.
        unsafe { self.launch(Kernel::fold_parts_last, channels.div_ceil(FOLDED), self.parts, job) }
    }

    /// Launches the kernel for this layout that computes each element.
    ///
    /// # Safety
    ///
    /// As [`add_up`](Self::add_up).
    unsafe fn each(&self, kernels: [Kernel; 2], job: &NormJob) -> Result<()> {
        let Planes { images, channels, pixels } = self.planes;
        let of_planes = blocks_of_warps(chunks_of(images * channels, pixels));
        let parts = parts_of_rows(images * pixels, channels, WRITING);
        let blocks = [of_planes, parts * channels.div_ceil(SLICE)];
        // SAFETY: the caller vouches for the addresses.
        unsafe { self.launch(self.order.pick(kernels), self.order.pick(blocks), parts, job) }
    }

    /// # Safety
    ///
    /// As [`add_up`](Self::add_up).
    unsafe fn launch(
        &self,
        kernel: Kernel,
        blocks: usize,
        parts: usize,
        job: &NormJob,
    ) -> Result<()> {
        let job = NormJob {
            arrived: self.kernels.address(&self.kernels.arrived)?,
            images: u32_of(self.planes.images),
            channels: u32_of(self.planes.channels),
            pixels: u32_of(self.planes.pixels),
            parts: u32_of(parts),
            eps: self.options.eps,
            relu: self.options.relu.into(),
            ..*job
        };
        // SAFETY: a `NormJob`; the caller vouches for the addresses.
        unsafe { self.kernels.launch(self.dtype, kernel, blocks, &job) }
    }
}

/// Number of parts of the rows of channels-last images, for about this many blocks; each part has
/// at least 128 rows.
fn parts_of_rows(rows: usize, channels: usize, blocks: usize) -> usize {
    (blocks / channels.div_ceil(SLICE)).clamp(1, (rows / 128).max(1))
}

/// Number of values of a channel per block.
const PART: usize = 1 << 14;
/// Number of channels per block, the same as in `channels_last.cu`.
const SLICE: usize = 64;
/// Number of blocks for sums, of which a multiprocessor of an H100 runs three, and for writes.
const SUMMING: usize = 384;
const WRITING: usize = 768;
