//! Layer normalization over the last dimension.

use candle_core::{Result, Shape, Tensor, bail};

use super::dispatch;
use crate::cast;
use crate::cpu::real::Real;
use crate::cpu::simd::{self, Kernel};
use crate::cpu::sums::{dot_centered, sum, sum_by};
use crate::graph::device;
use crate::graph::operator::{Input, Operator, apply3};

/// `gamma * (x - mean) / sqrt(var + eps) + beta`, with mean and biased variance over the last
/// dimension.
///
/// Shapes: `x` is `[..., c]`, `gamma` and `beta` are `[c]`. The result has the type of `x`; `gamma`
/// and `beta` may have a narrower type, or `f32` with a half-precision `x`. A NaN or infinity makes
/// its whole row NaN. Unlike candle-nn's `layer_norm`, which silently detaches the graph, it has a
/// backward pass, through the statistics.
///
/// # Errors
///
/// Mismatched shapes or dtypes; an empty last dimension.
pub fn layer_norm(x: &Tensor, gamma: &Tensor, beta: &Tensor, eps: f32) -> Result<Tensor> {
    let [x, gamma, beta] = cast("layer_norm", [x, gamma, beta])?;
    let width = x.dims().last().copied().unwrap_or(0);
    if width == 0 || gamma.dims() != [width] || beta.dims() != [width] {
        let (x, gamma, beta) = (x.dims(), gamma.dims(), beta.dims());
        bail!(
            "layer_norm: the weight has shape {gamma:?} and the bias {beta:?}, but the last dimension of the input {x:?} \
             is {width}"
        );
    }
    if device::dispatches(&x) {
        return dispatch::layer_norm(&x, &gamma, &beta, eps);
    }
    apply3(LayerNorm { eps }, [x, gamma, beta])
}

struct LayerNorm {
    eps: f32,
}

impl Operator<3> for LayerNorm {
    const NAME: &'static str = "layer_norm";

    fn forward<T: Real>(&self, [x, gamma, beta]: [Input<'_>; 3]) -> Result<(Vec<T>, Shape)> {
        let mut y = x.values()?.into_owned();
        let (gamma, beta) = (&*gamma.values()?, &*beta.values()?);
        simd::run(Rows { rows: &mut y, gamma, beta, eps: T::of(self.eps.into()) });
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
        simd::run(RowsBackward {
            x,
            gamma,
            eps: T::of(self.eps.into()),
            dx: &mut dx,
            dgamma: &mut dgamma,
            dbeta: &mut dbeta,
        });
        Ok([Some(dx), Some(dgamma), Some(dbeta)])
    }
}

/// Mean of a row, and the reciprocal of its deviation.
#[inline(always)]
fn measure<T: Real>(row: &[T], eps: T) -> (T, T) {
    let count = T::of(row.len() as f64);
    let mean = sum(row) / count;
    let var = sum_by(row, |v| (v - mean) * (v - mean)) / count;
    (mean, (var + eps).sqrt().recip())
}

/// Normalizes each row in place.
struct Rows<'a, T> {
    rows: &'a mut [T],
    gamma: &'a [T],
    beta: &'a [T],
    eps: T,
}

impl<T: Real> Kernel for Rows<'_, T> {
    #[inline(always)]
    fn run(self) {
        for row in self.rows.chunks_exact_mut(self.gamma.len()) {
            let (mean, inverse) = measure(row, self.eps);
            for ((v, gamma), beta) in row.iter_mut().zip(self.gamma).zip(self.beta) {
                *v = (*v - mean) * inverse * *gamma + *beta;
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
    dbeta: &'a mut [T],
}

impl<T: Real> Kernel for RowsBackward<'_, T> {
    #[inline(always)]
    fn run(self) {
        let Self { x, gamma, eps, dx, dgamma, dbeta } = self;
        let width = gamma.len();
        for (row, dx) in x.chunks_exact(width).zip(dx.chunks_exact_mut(width)) {
            let (mean, inverse) = measure(row, eps);
            for (((dx, v), scale), (dgamma, dbeta)) in
                dx.iter_mut().zip(row).zip(gamma).zip(dgamma.iter_mut().zip(&mut *dbeta))
            {
                *dbeta += *dx;
                *dgamma += *dx * (*v - mean) * inverse;
                *dx *= *scale;
            }
            // dx = (g - mean(g) - n * mean(g * n)) / deviation, with g = dy * gamma and n the
            // normalized input.
            let count = T::of(width as f64);
            let average = sum(dx) / count;
            let along = dot_centered(dx, row, mean) * inverse * inverse / count;
            for (g, v) in dx.iter_mut().zip(row) {
                *g = (*g - average - (*v - mean) * along) * inverse;
            }
        }
    }
}
