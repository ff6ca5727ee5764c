//! Batch normalisation: two launches forward, two backward.

use std::sync::Arc;

use candle_core::{DType, Result, Tensor};

use super::super::norm::{BatchNormOptions, Statistics};
use super::node::node3;
use super::{Kernels, blocks_of_warps, pair, stretches};

/// With the statistics given, or those of the batch; and which they were.
pub(in super::super) fn batch_norm(
    kernels: &Arc<Kernels>,
    [x, gamma, beta]: [&Tensor; 3],
    given: Option<&Statistics>,
    options: BatchNormOptions,
) -> Result<(Tensor, Statistics)> {
    let x = &x.contiguous()?;
    // Of few numbers; a cast to their own type is none.
    let [gamma, beta] = [gamma.to_dtype(DType::F32)?, beta.to_dtype(DType::F32)?];
    let (gamma, beta) = (&gamma.contiguous()?, &beta.contiguous()?);
    let norm = Norm::new(kernels, x, options)?;
    let statistics = match given {
        Some(given) => Statistics {
            mean: given.mean.detach().to_dtype(DType::F32)?.contiguous()?,
            var: given.var.detach().to_dtype(DType::F32)?.contiguous()?,
        },
        None => norm.measure(x)?,
    };
    let y = kernels.empty(x.shape(), x.dtype())?;
    let job = Job {
        x: kernels.address(x)?,
        y: y.at,
        gamma: kernels.address(gamma)?,
        beta: kernels.address(beta)?,
        mean: kernels.address(&statistics.mean)?,
        var: kernels.address(&statistics.var)?,
        ..Job::default()
    };
    // SAFETY: all that `normalize` goes through, contiguous and of these extents.
    unsafe { norm.launch("normalize", norm.blocks(), &job) }?;
    let (kept, of_batch) = (statistics.clone(), given.is_none());
    let y = node3("batch_norm", [x, gamma, beta], y, move |inputs, y, dy| {
        norm.backward(inputs, y, dy, &kept, of_batch)
    })?;
    Ok((y, statistics))
}

/// The sum of each channel of images, `f32`.
pub(super) fn sums_of_channels(kernels: &Arc<Kernels>, dy: &Tensor) -> Result<Tensor> {
    let norm = Norm::new(kernels, dy, BatchNormOptions { eps: 0.0, relu: false })?;
    let sums = kernels.empty(norm.channels, DType::F32)?;
    let part = kernels.empty((norm.channels, norm.parts, 2), DType::F64)?;
    let job = Job { dy: kernels.address(dy)?, dbeta: sums.at, part: part.at, ..Job::default() };
    // SAFETY: all that `norm_sums` goes through without an input.
    unsafe { norm.launch("norm_sums", norm.channels * norm.parts, &job) }?;
    Ok(sums.tensor())
}

/// The addresses of a `NormJob`; 0: not there.
#[derive(Clone, Copy, Default)]
struct Job {
    x: u64,
    y: u64,
    dy: u64,
    dx: u64,
    gamma: u64,
    beta: u64,
    mean: u64,
    var: u64,
    dgamma: u64,
    dbeta: u64,
    along: u64,
    part: u64,
}

struct Norm {
    kernels: Arc<Kernels>,
    dtype: DType,
    images: usize,
    channels: usize,
    pixels: usize,
    /// Blocks that share a channel.
    parts: usize,
    options: BatchNormOptions,
}

impl Norm {
    fn new(kernels: &Arc<Kernels>, x: &Tensor, options: BatchNormOptions) -> Result<Self> {
        let (images, channels, height, width) = x.dims4()?;
        let pixels = height * width;
        let most = stretches(images, pixels).clamp(1, 64);
        Ok(Self {
            kernels: kernels.clone(),
            dtype: x.dtype(),
            images,
            channels,
            pixels,
            parts: (images * pixels / PART).clamp(1, most),
            options,
        })
    }

    /// Statistics of the batch.
    fn measure(&self, x: &Tensor) -> Result<Statistics> {
        let [mean, var] = [(); 2].map(|()| self.kernels.empty(self.channels, DType::F32));
        let (mean, var) = (mean?, var?);
        let part = self.kernels.empty((self.channels, self.parts, 3), DType::F64)?;
        let job = Job {
            x: self.kernels.address(x)?,
            mean: mean.at,
            var: var.at,
            part: part.at,
            ..Job::default()
        };
        // SAFETY: all that `moments` goes through.
        unsafe { self.launch("moments", self.channels * self.parts, &job) }?;
        Ok(Statistics { mean: mean.tensor(), var: var.tensor() })
    }

    fn backward(
        &self,
        [x, gamma, _]: [&Tensor; 3],
        y: &Tensor,
        dy: &Tensor,
        statistics: &Statistics,
        of_batch: bool,
    ) -> Result<[Option<Tensor>; 3]> {
        let kernels = &self.kernels;
        let [dgamma, dbeta] = [(); 2].map(|()| kernels.empty(self.channels, DType::F32));
        let (dgamma, dbeta) = (dgamma?, dbeta?);
        let along = kernels.empty((self.channels, 2), DType::F32)?;
        let part = kernels.empty((self.channels, self.parts, 2), DType::F64)?;
        let dx = kernels.empty(x.shape(), self.dtype)?;
        let job = Job {
            x: kernels.address(x)?,
            y: if self.options.relu { kernels.address(y)? } else { 0 },
            dy: kernels.address(dy)?,
            dx: dx.at,
            gamma: kernels.address(gamma)?,
            mean: kernels.address(&statistics.mean)?,
            var: kernels.address(&statistics.var)?,
            dgamma: dgamma.at,
            dbeta: dbeta.at,
            along: along.at,
            part: part.at,
            ..Job::default()
        };
        // SAFETY: all that `norm_sums` goes through.
        unsafe { self.launch("norm_sums", self.channels * self.parts, &job) }?;
        let job = Job { along: if of_batch { along.at } else { 0 }, ..job };
        // SAFETY: all that `norm_backward` goes through.
        unsafe { self.launch("norm_backward", self.blocks(), &job) }?;
        Ok([Some(dx.tensor()), Some(dgamma.tensor()), Some(dbeta.tensor())])
    }

    /// Blocks that go through all planes.
    fn blocks(&self) -> usize {
        blocks_of_warps(stretches(self.images * self.channels, self.pixels))
    }

    /// # Safety
    ///
    /// All addresses that the kernel uses must be those of contiguous tensors of these extents.
    unsafe fn launch(&self, kernel: &str, blocks: usize, job: &Job) -> Result<()> {
        let words = [
            job.x,
            job.y,
            job.dy,
            job.dx,
            job.gamma,
            job.beta,
            job.mean,
            job.var,
            job.dgamma,
            job.dbeta,
            job.along,
            job.part,
            self.kernels.address(&self.kernels.arrived)?,
            pair(self.images, self.channels),
            pair(self.pixels, self.parts),
            pair(self.options.eps.to_bits() as usize, self.options.relu.into()),
        ];
        // SAFETY: a `NormJob`; the caller vouches for the addresses.
        unsafe { self.kernels.launch(self.dtype, kernel, blocks, &words) }
    }
}

/// Values of a channel that a block is worth.
const PART: usize = 1 << 14;
