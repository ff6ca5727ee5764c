//! Batch normalisation over images, fused with the ReLU that follows it.
//!
//! Stock layers compose it of a dozen element-wise operators, each of which reads and writes the
//! whole activation, forward and backward. Here forward reads the input three times and writes
//! once, backward reads twice and writes once.

use candle_core::{CpuStorage, CustomOp3, Layout, Result, Shape, Tensor, bail};

use super::{cast, host};

/// Mean and variance per channel.
#[derive(Clone, Debug, PartialEq)]
pub struct Statistics {
    /// Mean.
    pub mean: Vec<f32>,
    /// Variance. Of a batch: biased, divided by the number of values.
    pub var: Vec<f32>,
}

/// What [`batch_norm`] takes beside its tensors.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BatchNormOptions {
    /// Added to the variance.
    pub eps: f32,
    /// Whether a ReLU follows.
    pub relu: bool,
}

/// `gamma * (x - mean) / sqrt(var + eps) + beta` per channel, with the statistics of the batch,
/// which are returned; then, if asked, ReLU.
///
/// Shapes: `x` is `[n, c, h, w]`, `gamma` and `beta` are `[c]`. `x` is `f32`, `f16` or `bf16`, and
/// so is the result; `gamma` and `beta` may have another of these types (`f32` beside a half `x`).
/// Computed in `f32`, sums of a channel in `f64` over rows summed in `f32`, rounded once at the
/// end. A NaN or infinity makes its whole channel NaN; ReLU keeps NaN.
///
/// Backward differentiates through the statistics.
///
/// # Errors
///
/// Shapes or dtypes that do not fit; fewer than two values per channel.
pub fn batch_norm(
    x: &Tensor,
    gamma: &Tensor,
    beta: &Tensor,
    options: BatchNormOptions,
) -> Result<(Tensor, Statistics)> {
    let [x, gamma, beta] = cast("batch_norm", [x, gamma, beta])?;
    let x = x.contiguous()?;
    let statistics = {
        let planes = Planes::new(x.shape())?;
        if planes.values() < 2 {
            bail!("batch_norm: one value per channel has no variance to train with");
        }
        let (storage, layout) = x.storage_and_layout();
        measure(&planes, &host::floats_of(&storage, layout)?)
    };
    let op = BatchNorm { options, statistics: statistics.clone(), of_batch: true };
    let y = x.apply_op3(&gamma.contiguous()?, &beta.contiguous()?, op)?;
    Ok((y, statistics))
}

/// As [`batch_norm`], with given statistics, which backward treats as constants.
///
/// # Errors
///
/// As [`batch_norm`]; statistics of another number of channels.
pub fn batch_norm_with(
    x: &Tensor,
    gamma: &Tensor,
    beta: &Tensor,
    statistics: Statistics,
    options: BatchNormOptions,
) -> Result<Tensor> {
    let [x, gamma, beta] = cast("batch_norm", [x, gamma, beta])?;
    let op = BatchNorm { options, statistics, of_batch: false };
    x.contiguous()?.apply_op3(&gamma.contiguous()?, &beta.contiguous()?, op)
}

struct BatchNorm {
    options: BatchNormOptions,
    statistics: Statistics,
    /// Whether they are those of `x`, so that backward goes through them.
    of_batch: bool,
}

impl CustomOp3 for BatchNorm {
    fn name(&self) -> &'static str {
        "batch_norm"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        gamma: &CpuStorage,
        gamma_layout: &Layout,
        beta: &CpuStorage,
        beta_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let planes = Planes::new(x_layout.shape())?;
        let dtype = host::float_dtype(x)?;
        let x = host::floats(x, x_layout)?;
        let gamma = host::floats(gamma, gamma_layout)?;
        let beta = host::floats(beta, beta_layout)?;
        let statistics = &self.statistics;
        let channels = [gamma.len(), beta.len(), statistics.mean.len(), statistics.var.len()];
        if channels != [planes.channels; 4] {
            bail!("batch_norm: {} channels, parameters of {channels:?}", planes.channels);
        }
        let y = forward(&planes, &x, &gamma, &beta, statistics, self.options);
        Ok((host::rounded(y, dtype)?, x_layout.shape().clone()))
    }

    fn bwd(
        &self,
        x: &Tensor,
        gamma: &Tensor,
        beta: &Tensor,
        y: &Tensor,
        dy: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let dy = dy.contiguous()?;
        let (x_storage, x_layout) = x.storage_and_layout();
        let (gamma_storage, gamma_layout) = gamma.storage_and_layout();
        let (y_storage, y_layout) = y.storage_and_layout();
        let (dy_storage, dy_layout) = dy.storage_and_layout();
        let mut dy = host::floats_of(&dy_storage, dy_layout)?;
        if self.options.relu {
            // What ReLU stopped does not flow back. It keeps NaN, and so does this comparison.
            let y = host::floats_of(&y_storage, y_layout)?;
            for (dy, y) in dy.to_mut().iter_mut().zip(&*y) {
                *dy = if *y <= 0.0 { 0.0 } else { *dy };
            }
        }
        let gradients = backward(
            &Planes::new(x.shape())?,
            &host::floats_of(&x_storage, x_layout)?,
            &host::floats_of(&gamma_storage, gamma_layout)?,
            &dy,
            &self.statistics,
            self.options.eps,
            self.of_batch,
        );
        Ok((
            Some(host::tensor(gradients.x, x.shape(), x.dtype())?),
            Some(host::tensor(gradients.gamma, gamma.shape(), gamma.dtype())?),
            Some(host::tensor(gradients.beta, beta.shape(), beta.dtype())?),
        ))
    }
}

/// Extents of a tensor of images as planes of one channel each.
struct Planes {
    channels: usize,
    pixels: usize,
    images: usize,
}

impl Planes {
    fn new(shape: &Shape) -> Result<Self> {
        let (images, channels, height, width) = shape.dims4()?;
        if channels * height * width == 0 {
            bail!("batch_norm: nothing to normalise in shape {shape:?}");
        }
        Ok(Self { channels, pixels: height * width, images })
    }

    /// Values per channel.
    fn values(&self) -> usize {
        self.images * self.pixels
    }

    /// The planes of channel `c`, one per image.
    fn of<'a>(&self, data: &'a [f32], c: usize) -> impl Iterator<Item = &'a [f32]> {
        data.chunks_exact(self.pixels).skip(c).step_by(self.channels)
    }
}

fn measure(planes: &Planes, x: &[f32]) -> Statistics {
    let count = planes.values() as f64;
    let mut statistics = Statistics { mean: Vec::new(), var: Vec::new() };
    for c in 0..planes.channels {
        // Two passes: the difference of the mean square and the squared mean would cancel.
        let sum: f64 = planes.of(x, c).map(|plane| f64::from(super::sum(plane))).sum();
        let mean = (sum / count) as f32;
        let squares: f64 = planes
            .of(x, c)
            .map(|plane| f64::from(super::sum_by(plane, |v| (v - mean) * (v - mean))))
            .sum();
        statistics.mean.push(mean);
        statistics.var.push((squares / count) as f32);
    }
    statistics
}

fn forward(
    planes: &Planes,
    x: &[f32],
    gamma: &[f32],
    beta: &[f32],
    statistics: &Statistics,
    options: BatchNormOptions,
) -> Vec<f32> {
    let (scale, shift): (Vec<f32>, Vec<f32>) = (0..planes.channels)
        .map(|c| {
            let scale = gamma[c] / (statistics.var[c] + options.eps).sqrt();
            (scale, beta[c] - statistics.mean[c] * scale)
        })
        .unzip();
    let mut y = Vec::with_capacity(x.len());
    for (i, plane) in x.chunks_exact(planes.pixels).enumerate() {
        let (scale, shift) = (scale[i % planes.channels], shift[i % planes.channels]);
        if options.relu {
            y.extend(plane.iter().map(|v| super::relu_of(v * scale + shift)));
        } else {
            y.extend(plane.iter().map(|v| v * scale + shift));
        }
    }
    y
}

struct Gradients {
    x: Vec<f32>,
    gamma: Vec<f32>,
    beta: Vec<f32>,
}

fn backward(
    planes: &Planes,
    x: &[f32],
    gamma: &[f32],
    dy: &[f32],
    statistics: &Statistics,
    eps: f32,
    of_batch: bool,
) -> Gradients {
    let count = planes.values() as f64;
    let (mut dgamma, mut dbeta) = (Vec::new(), Vec::new());
    // dx = scale * (dy - mean(dy) - (x - mean) * mean(dy * (x - mean)) / (var + eps)),
    // without the means if the statistics are constants: dx = dy * a + x * b + c.
    let mut factors = Vec::with_capacity(planes.channels);
    for (c, gamma) in gamma.iter().enumerate() {
        let mean = statistics.mean[c];
        let inverse = 1.0 / (statistics.var[c] + eps).sqrt();
        let (mut sum, mut dot) = (0.0, 0.0);
        for (x, dy) in planes.of(x, c).zip(planes.of(dy, c)) {
            sum += f64::from(super::sum(dy));
            dot += f64::from(super::dot_centered(dy, x, mean));
        }
        dbeta.push(sum as f32);
        dgamma.push((dot * f64::from(inverse)) as f32);
        let a = gamma * inverse;
        if of_batch {
            let b = -a * inverse * inverse * (dot / count) as f32;
            factors.push((a, b, -a * (sum / count) as f32, mean));
        } else {
            factors.push((a, 0.0, 0.0, mean));
        }
    }
    let mut dx = Vec::with_capacity(x.len());
    for (i, (x, dy)) in
        x.chunks_exact(planes.pixels).zip(dy.chunks_exact(planes.pixels)).enumerate()
    {
        let (a, b, c, mean) = factors[i % planes.channels];
        dx.extend(x.iter().zip(dy).map(|(x, dy)| dy * a + (x - mean) * b + c));
    }
    Gradients { x: dx, gamma: dgamma, beta: dbeta }
}
