//! Group normalization: over groups of channels of each sample.

use candle_core::{Result, Shape, Tensor, bail};

use super::dispatch;
use crate::cast;
use crate::cpu::real::Real;
use crate::cpu::simd::{self, Kernel};
use crate::cpu::sums::{dot_centered, sum, sum_by};
use crate::graph::device;
use crate::graph::operator::{Input, Operator, apply3};

/// `gamma * (x - mean) / sqrt(var + eps) + beta`, with mean and biased variance over each of
/// `groups` groups of channels of a sample. With one group it is layer normalization of images;
/// with as many groups as channels, instance normalization.
///
/// Shapes: `x` is `[n, c, ...]`, `gamma` and `beta` are `[c]`. The result has the type of `x`;
/// `gamma` and `beta` may have a narrower type, or `f32` with a half-precision `x`. A NaN or
/// infinity makes its whole group NaN. The backward pass differentiates through the statistics.
///
/// # Errors
///
/// Mismatched shapes or dtypes; groups that do not divide the channels; an empty group.
pub fn group_norm(
    x: &Tensor,
    groups: usize,
    gamma: &Tensor,
    beta: &Tensor,
    eps: f32,
) -> Result<Tensor> {
    let [x, gamma, beta] = cast("group_norm", [x, gamma, beta])?;
    let channels = x.dims().get(1).copied().unwrap_or(0);
    let fits = gamma.dims() == [channels] && beta.dims() == [channels];
    if !fits || x.elem_count() == 0 || groups == 0 || channels % groups != 0 {
        let (x, gamma, beta) = (x.dims(), gamma.dims(), beta.dims());
        bail!(
            "group_norm: an input {x:?} has {channels} channels, which {groups} groups must divide; the weight has shape \
             {gamma:?} and the bias {beta:?}, but both must be [{channels}]"
        );
    }
    if device::dispatches(&x) {
        return dispatch::group_norm(&x, groups, [&gamma, &beta], eps);
    }
    let pixels = x.dims()[2..].iter().product();
    apply3(GroupNorm { groups, pixels, eps }, [x, gamma, beta])
}

struct GroupNorm {
    groups: usize,
    /// Number of elements in a channel of one sample.
    pixels: usize,
    eps: f32,
}

impl Operator<3> for GroupNorm {
    const NAME: &'static str = "group_norm";

    fn forward<T: Real>(&self, [x, gamma, beta]: [Input<'_>; 3]) -> Result<(Vec<T>, Shape)> {
        let mut y = x.values()?.into_owned();
        let (gamma, beta) = (&*gamma.values()?, &*beta.values()?);
        simd::run(Groups { of: self, values: &mut y, gamma, beta });
        Ok((y, x.shape().clone()))
    }

    fn backward<T: Real>(
        &self,
        [x, gamma, _]: [Input<'_>; 3],
        _y: Input<'_>,
        dy: Input<'_>,
    ) -> Result<[Option<Vec<T>>; 3]> {
        let (x, gamma) = (&*x.values::<T>()?, &*gamma.values::<T>()?);
        let mut dx = dy.values()?.into_owned();
        let (mut dgamma, mut dbeta) = (vec![T::ZERO; gamma.len()], vec![T::ZERO; gamma.len()]);
        simd::run(GroupsBackward {
            of: self,
            x,
            gamma,
            dx: &mut dx,
            dgamma: &mut dgamma,
            dbeta: &mut dbeta,
        });
        Ok([Some(dx), Some(dgamma), Some(dbeta)])
    }
}

/// Mean of a group, and the reciprocal of its deviation.
#[inline(always)]
fn measure<T: Real>(group: &[T], eps: f32) -> (T, T) {
    let count = T::of(group.len() as f64);
    let mean = sum(group) / count;
    let var = sum_by(group, |v| (v - mean) * (v - mean)) / count;
    (mean, (var + T::of(eps.into())).sqrt().recip())
}

/// Normalizes each group in place.
struct Groups<'a, T> {
    of: &'a GroupNorm,
    values: &'a mut [T],
    gamma: &'a [T],
    beta: &'a [T],
}

impl<T: Real> Kernel for Groups<'_, T> {
    #[inline(always)]
    fn run(self) {
        let GroupNorm { groups, pixels, eps } = *self.of;
        let channels = self.gamma.len() / groups;
        for (at, group) in self.values.chunks_exact_mut(channels * pixels).enumerate() {
            let (mean, inverse) = measure(group, eps);
            let first = at % groups * channels;
            for (c, plane) in (first..).zip(group.chunks_exact_mut(pixels)) {
                let (gamma, beta) = (self.gamma[c], self.beta[c]);
                plane.iter_mut().for_each(|v| *v = (*v - mean) * inverse * gamma + beta);
            }
        }
    }
}

/// Computes the gradients.
struct GroupsBackward<'a, T> {
    of: &'a GroupNorm,
    x: &'a [T],
    gamma: &'a [T],
    /// The gradient of the result, replaced by that of `x`.
    dx: &'a mut [T],
    dgamma: &'a mut [T],
    dbeta: &'a mut [T],
}

impl<T: Real> Kernel for GroupsBackward<'_, T> {
    #[inline(always)]
    fn run(self) {
        let GroupNorm { groups, pixels, eps } = *self.of;
        let channels = self.gamma.len() / groups;
        let size = channels * pixels;
        for (at, (x, dx)) in
            self.x.chunks_exact(size).zip(self.dx.chunks_exact_mut(size)).enumerate()
        {
            let (mean, inverse) = measure(x, eps);
            let first = at % groups * channels;
            let planes = x.chunks_exact(pixels).zip(dx.chunks_exact_mut(pixels));
            for (c, (x, dy)) in (first..).zip(planes) {
                self.dbeta[c] += sum(dy);
                self.dgamma[c] += dot_centered(dy, x, mean) * inverse;
                let gamma = self.gamma[c];
                dy.iter_mut().for_each(|v| *v *= gamma);
            }
            // As in layer normalization: g = dy * gamma minus its mean and its projection on the
            // normalized input.
            let count = T::of(size as f64);
            let average = sum(dx) / count;
            let along = dot_centered(dx, x, mean) * inverse * inverse / count;
            for (g, v) in dx.iter_mut().zip(x) {
                *g = (*g - average - (*v - mean) * along) * inverse;
            }
        }
    }
}
