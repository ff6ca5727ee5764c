//! Root mean square normalization over the last dimension.

use candle_core::{Result, Shape, Tensor, bail};

use super::dispatch;
use crate::cast;
use crate::cpu::real::Real;
use crate::cpu::simd::{self, Kernel};
use crate::cpu::sums::{dot_centered, sum_by};
use crate::graph::device;
use crate::graph::operator::{Input, Operator, apply2};

/// `gamma * x / sqrt(mean(x^2) + eps)`, with the mean over the last dimension.
///
/// Shapes: `x` is `[..., c]`, `gamma` is `[c]`. The result has the type of `x`; `gamma` may have a
/// narrower type, or `f32` with a half-precision `x`. A NaN makes its whole row NaN. Unlike
/// candle-nn's `rms_norm`, which silently detaches the graph, it has a backward pass, through the
/// mean.
///
/// # Errors
///
/// Mismatched shapes or dtypes; an empty last dimension.
pub fn rms_norm(x: &Tensor, gamma: &Tensor, eps: f32) -> Result<Tensor> {
    let [x, gamma] = cast("rms_norm", [x, gamma])?;
    let width = x.dims().last().copied().unwrap_or(0);
    if width == 0 || gamma.dims() != [width] {
        let (x, gamma) = (x.dims(), gamma.dims());
        bail!(
            "rms_norm: the weight has shape {gamma:?}, but the last dimension of the input {x:?} is {width}"
        );
    }
    if device::dispatches(&x) {
        return dispatch::rms_norm(&x, &gamma, eps);
    }
    apply2(RmsNorm { eps }, [x, gamma])
}

struct RmsNorm {
    eps: f32,
}

impl Operator<2> for RmsNorm {
    const NAME: &'static str = "rms_norm";

    fn forward<T: Real>(&self, [x, gamma]: [Input<'_>; 2]) -> Result<(Vec<T>, Shape)> {
        let mut y = x.values()?.into_owned();
        let gamma = &*gamma.values()?;
        simd::run(Rows { rows: &mut y, gamma, eps: T::of(self.eps.into()) });
        Ok((y, x.shape().clone()))
    }

    fn backward<T: Real>(
        &self,
        [x, gamma]: [Input<'_>; 2],
        _y: Input<'_>,
        dy: Input<'_>,
    ) -> Result<[Option<Vec<T>>; 2]> {
        let (x, gamma) = (&*x.values::<T>()?, &*gamma.values::<T>()?);
        let (mut dx, mut dgamma) = (dy.values()?.into_owned(), vec![T::ZERO; gamma.len()]);
        let eps = T::of(self.eps.into());
        simd::run(RowsBackward { x, gamma, eps, dx: &mut dx, dgamma: &mut dgamma });
        Ok([Some(dx), Some(dgamma)])
    }
}

/// The reciprocal of a row's root mean square.
#[inline(always)]
fn inverse<T: Real>(row: &[T], eps: T) -> T {
    (sum_by(row, |v| v * v) / T::of(row.len() as f64) + eps).sqrt().recip()
}

/// Normalizes each row in place.
struct Rows<'a, T> {
    rows: &'a mut [T],
    gamma: &'a [T],
    eps: T,
}

impl<T: Real> Kernel for Rows<'_, T> {
    #[inline(always)]
    fn run(self) {
        for row in self.rows.chunks_exact_mut(self.gamma.len()) {
            let inverse = inverse(row, self.eps);
            for (v, gamma) in row.iter_mut().zip(self.gamma) {
                *v = *v * inverse * *gamma;
            }
        }
    }
}

/// Computes the gradients.
struct RowsBackward<'a, T> {
    x: &'a [T],
    gamma: &'a [T],
    eps: T,
    /// The gradient of the result, replaced by that of `x`.
    dx: &'a mut [T],
    dgamma: &'a mut [T],
}

impl<T: Real> Kernel for RowsBackward<'_, T> {
    #[inline(always)]
    fn run(self) {
        let Self { x, gamma, eps, dx, dgamma } = self;
        let width = gamma.len();
        for (row, dx) in x.chunks_exact(width).zip(dx.chunks_exact_mut(width)) {
            let inverse = inverse(row, eps);
            for (((dx, v), scale), dgamma) in
                dx.iter_mut().zip(row).zip(gamma).zip(dgamma.iter_mut())
            {
                *dgamma += *dx * *v * inverse;
                *dx *= *scale;
            }
            // dx = (g - n * mean(g * n)) / root, with g = dy * gamma and n the normalized input.
            let along = dot_centered(dx, row, T::ZERO) * inverse * inverse / T::of(width as f64);
            for (g, v) in dx.iter_mut().zip(row) {
                *g = (*g - *v * along) * inverse;
            }
        }
    }
}
