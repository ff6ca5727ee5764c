//! Batch normalization of images, fused with the following ReLU.
//!
//! Stock layers compose it from a dozen element-wise operators, each of which reads and writes the
//! whole activation, in the forward and the backward pass. Here the forward pass reads the input
//! three times and writes once; the backward pass reads twice and writes once.

use candle_core::{DType, Result, Shape, Tensor, bail};

use super::dispatch;
use crate::cast;
use crate::cpu::real::Real;
use crate::cpu::sums::{dot_centered, sum, sum_by};
use crate::elementwise::relu_of;
use crate::graph::device;
use crate::graph::operator::{Input, Operator, apply3};
use crate::sizes::{BatchNormOptions, NormBy, Planes, Running, Statistics};

/// `gamma * (x - mean) / sqrt(var + eps) + beta` per channel, with the statistics of the batch,
/// which are returned; optionally followed by ReLU.
///
/// Shapes: `x` is `[n, c, h, w]`, `gamma` and `beta` are `[c]`. The result has the type of `x`;
/// `gamma` and `beta` may have a narrower type, or `f32` with a half-precision `x`. A channel is
/// summed in `f64` over rows summed in `f32`. A NaN or infinity makes its whole channel NaN; ReLU
/// propagates NaN.
///
/// The backward pass differentiates through the statistics.
///
/// # Errors
///
/// Mismatched shapes or dtypes; fewer than two values per channel.
pub fn batch_norm(
    x: &Tensor,
    gamma: &Tensor,
    beta: &Tensor,
    options: BatchNormOptions,
) -> Result<(Tensor, Statistics)> {
    batch_norm_tracking([x, gamma, beta], options, None)
}

/// [`batch_norm`] that also updates running statistics.
pub(crate) fn batch_norm_tracking(
    [x, gamma, beta]: [&Tensor; 3],
    options: BatchNormOptions,
    running: Option<Running<'_>>,
) -> Result<(Tensor, Statistics)> {
    let [x, gamma, beta] = cast("batch_norm", [x, gamma, beta])?;
    let planes = checked(&x, &gamma, &beta)?;
    if planes.values() < 2 {
        let count = if planes.values() == 0 { "no" } else { "one" };
        bail!(
            "batch_norm: {count} value per channel has no variance to train with (the input is {:?}): if the last batch \
             of an epoch has a single sample, drop it (`drop_last`) or take another batch size",
            x.dims()
        );
    }
    if device::dispatches(&x) {
        let by = NormBy::Batch(running);
        return dispatch::batch_norm([&x, &gamma, &beta], by, options, planes);
    }
    let x = x.contiguous()?;
    let moments = {
        let (storage, layout) = x.storage_and_layout();
        let values = Input::new(&storage, layout)?;
        match x.dtype() {
            DType::F64 => measure::<f64>(&planes, &values.values::<f64>()?),
            _ => measure::<f32>(&planes, &values.values::<f32>()?),
        }
    };
    let round = |of: fn(&Moments) -> f64| {
        let values = moments.iter().map(|m| of(m) as f32).collect();
        Tensor::from_vec(values, planes.channels, x.device())
    };
    let statistics = Statistics { mean: round(|m| m.mean)?, var: round(|m| m.var)? };
    if let Some(running) = running {
        running.track(&statistics)?;
    }
    let op = BatchNorm { options, planes, moments, of_batch: true };
    Ok((apply3(op, [x, gamma, beta])?, statistics))
}

/// Like [`batch_norm`], with given statistics, which the backward pass treats as constants.
///
/// # Errors
///
/// The errors of [`batch_norm`]; statistics with another number of channels.
pub fn batch_norm_with(
    x: &Tensor,
    gamma: &Tensor,
    beta: &Tensor,
    statistics: &Statistics,
    options: BatchNormOptions,
) -> Result<Tensor> {
    let [x, gamma, beta] = cast("batch_norm", [x, gamma, beta])?;
    let Statistics { mean, var } = statistics;
    let planes = checked(&x, &gamma, &beta)?;
    let channels = planes.channels;
    if mean.dims() != [channels] || var.dims() != [channels] {
        let (mean, var) = (mean.dims(), var.dims());
        bail!(
            "batch_norm: the input has {channels} channels, but the means have shape {mean:?} and the variances {var:?}"
        );
    }
    if device::dispatches(&x) {
        let by = NormBy::Given(statistics);
        return Ok(dispatch::batch_norm([&x, &gamma, &beta], by, options, planes)?.0);
    }
    let (mean, var) = (mean.to_vec1::<f32>()?, var.to_vec1::<f32>()?);
    let moments = mean.iter().zip(&var);
    let moments = moments.map(|(mean, var)| Moments { mean: (*mean).into(), var: (*var).into() });
    let moments = moments.collect();
    apply3(BatchNorm { options, planes, moments, of_batch: false }, [x, gamma, beta])
}

impl Running<'_> {
    /// Updates the running statistics.
    pub(crate) fn track(self, batch: &Statistics) -> Result<()> {
        if let Some(kernels) = device::kernels(&self.of.mean) {
            return kernels.track(self, batch);
        }
        let var = (&batch.var * f64::from(self.factor))?;
        for (running, batch) in [(&self.of.mean, &batch.mean), (&self.of.var, &var)] {
            let old = running.detach();
            let step = ((batch - &old)? * self.momentum)?;
            running.slice_set(&(old + step)?, 0, 0)?;
        }
        Ok(())
    }
}

/// The sizes of `x`, checked against those of the parameters.
fn checked(x: &Tensor, gamma: &Tensor, beta: &Tensor) -> Result<Planes> {
    let planes = Planes::new(x.shape())?;
    if gamma.dims() != [planes.channels] || beta.dims() != [planes.channels] {
        let (x, gamma, beta) = (x.dims(), gamma.dims(), beta.dims());
        bail!(
            "batch_norm: the input {x:?} has {} channels, but the weight has shape {gamma:?} and the bias {beta:?}",
            planes.channels
        );
    }
    Ok(planes)
}

/// Mean and variance of a channel, in the precision in which they were computed.
#[derive(Clone, Copy)]
struct Moments {
    mean: f64,
    var: f64,
}

impl Moments {
    /// The mean, and the reciprocal of the deviation.
    fn scale<T: Real>(&self, eps: f32) -> (T, T) {
        let deviation = (T::of(self.var) + T::of(eps.into())).sqrt();
        (T::of(self.mean), deviation.recip())
    }
}

struct BatchNorm {
    options: BatchNormOptions,
    planes: Planes,
    moments: Vec<Moments>,
    /// Whether they are the statistics of `x`, so that the backward pass differentiates through
    /// them.
    of_batch: bool,
}

impl Operator<3> for BatchNorm {
    const NAME: &'static str = "batch_norm";

    fn forward<T: Real>(&self, [x, gamma, beta]: [Input<'_>; 3]) -> Result<(Vec<T>, Shape)> {
        let planes = &self.planes;
        let (values, gamma, beta) = (x.values::<T>()?, gamma.values::<T>()?, beta.values::<T>()?);
        let lines = self.moments.iter().zip(gamma.iter().zip(&*beta));
        let lines = lines.map(|(moments, (gamma, beta))| {
            let scale = *gamma / (T::of(moments.var) + T::of(self.options.eps.into())).sqrt();
            (scale, *beta - T::of(moments.mean) * scale)
        });
        let lines: Vec<(T, T)> = lines.collect();
        let mut y = Vec::with_capacity(values.len());
        for (i, plane) in values.chunks_exact(planes.pixels).enumerate() {
            let (scale, shift) = lines[i % planes.channels];
            if self.options.relu {
                y.extend(plane.iter().map(|v| relu_of(*v * scale + shift)));
            } else {
                y.extend(plane.iter().map(|v| *v * scale + shift));
            }
        }
        Ok((y, x.shape().clone()))
    }

    fn backward<T: Real>(
        &self,
        [x, gamma, _]: [Input<'_>; 3],
        y: Input<'_>,
        dy: Input<'_>,
    ) -> Result<[Option<Vec<T>>; 3]> {
        let mut dy = dy.values::<T>()?;
        if self.options.relu {
            // No gradient where ReLU returned 0. ReLU propagates NaN, and so does this comparison.
            for (dy, y) in dy.to_mut().iter_mut().zip(&*y.values::<T>()?) {
                *dy = if *y <= T::ZERO { T::ZERO } else { *dy };
            }
        }
        Ok(self.gradients(&x.values::<T>()?, &gamma.values::<T>()?, &dy))
    }
}

impl BatchNorm {
    fn gradients<T: Real>(&self, x: &[T], gamma: &[T], dy: &[T]) -> [Option<Vec<T>>; 3] {
        let planes = &self.planes;
        let count = planes.values() as f64;
        let (mut dgamma, mut dbeta) = (Vec::new(), Vec::new());
        // dx = scale * (dy - mean(dy) - (x - mean) * mean(dy * (x - mean)) / (var + eps)),
        // without the means if the statistics are constants: dx = dy * a + x * b + c.
        let mut factors = Vec::with_capacity(planes.channels);
        for (c, (gamma, moments)) in gamma.iter().zip(&self.moments).enumerate() {
            let (mean, inverse) = moments.scale::<T>(self.options.eps);
            let (mut total, mut dot) = (0.0, 0.0);
            for (x, dy) in planes.of(x, c).zip(planes.of(dy, c)) {
                total += sum(dy).to_f64();
                dot += dot_centered(dy, x, mean).to_f64();
            }
            dbeta.push(T::of(total));
            dgamma.push(T::of(dot * inverse.to_f64()));
            let a = *gamma * inverse;
            let (mut b, mut shift) = (T::ZERO, T::ZERO);
            if self.of_batch {
                b = T::ZERO - a * inverse * inverse * T::of(dot / count);
                shift = T::ZERO - a * T::of(total / count);
            }
            factors.push((a, b, shift, mean));
        }
        let mut dx = Vec::with_capacity(x.len());
        let pairs = x.chunks_exact(planes.pixels).zip(dy.chunks_exact(planes.pixels));
        for (i, (x, dy)) in pairs.enumerate() {
            let (a, b, shift, mean) = factors[i % planes.channels];
            dx.extend(x.iter().zip(dy).map(|(x, dy)| *dy * a + (*x - mean) * b + shift));
        }
        [Some(dx), Some(dgamma), Some(dbeta)]
    }
}

impl Planes {
    /// Number of values per channel.
    fn values(&self) -> usize {
        self.images * self.pixels
    }

    /// The planes of channel `c`, one per image.
    fn of<'a, T>(&self, data: &'a [T], c: usize) -> impl Iterator<Item = &'a [T]> {
        data.chunks_exact(self.pixels).skip(c).step_by(self.channels)
    }
}

fn measure<T: Real>(planes: &Planes, x: &[T]) -> Vec<Moments> {
    let count = planes.values() as f64;
    let channel = |c| {
        // Two passes: the difference of the mean square and the squared mean would cancel.
        let sum: f64 = planes.of(x, c).map(|plane| sum(plane).to_f64()).sum();
        let mean = T::of(sum / count);
        let squares: f64 =
            planes.of(x, c).map(|plane| sum_by(plane, |v| (v - mean) * (v - mean)).to_f64()).sum();
        // Rounded to `T`, so that forward and backward pass use the same numbers.
        Moments { mean: mean.to_f64(), var: T::of(squares / count).to_f64() }
    };
    (0..planes.channels).map(channel).collect()
}
