//! Layer normalisation over the last dimension.

use candle_core::{Result, Shape, Tensor, bail};

use super::operator::{Input, Operator, apply3};
use super::real::Real;
use super::sums::{dot_centered, sum, sum_by};
use super::{cast, composed};

/// `gamma * (x - mean) / sqrt(var + eps) + beta`, with mean and biased variance over the last
/// dimension.
///
/// Shapes: `x` is `[..., c]`, `gamma` and `beta` are `[c]`. The result is of `x`'s type; `gamma` and
/// `beta` may have a narrower one, or `f32` beside a half `x`. A NaN or infinity makes its whole row NaN.
/// Unlike candle-nn's `layer_norm`, which silently cuts the graph, it has a backward, through the
/// statistics.
///
/// # Errors
///
/// Shapes or dtypes that do not fit, an empty last dimension.
pub fn layer_norm(x: &Tensor, gamma: &Tensor, beta: &Tensor, eps: f32) -> Result<Tensor> {
    let [x, gamma, beta] = cast("layer_norm", [x, gamma, beta])?;
    let width = x.dims().last().copied().unwrap_or(0);
    if width == 0 || gamma.dims() != [width] || beta.dims() != [width] {
        let (x, gamma, beta) = (x.shape(), gamma.dims(), beta.dims());
        bail!("layer_norm: an input {x:?}, parameters {gamma:?} and {beta:?}");
    }
    if composed::is_for(&x) {
        return composed::layer_norm(&x, &gamma, &beta, eps);
    }
    apply3(LayerNorm { eps }, [x, gamma, beta])
}

struct LayerNorm {
    eps: f32,
}

impl LayerNorm {
    /// Mean of a row, and 1 over its deviation.
    fn measure<T: Real>(&self, row: &[T]) -> (T, T) {
        let count = T::of(row.len() as f64);
        let mean = sum(row) / count;
        let var = sum_by(row, |v| (v - mean) * (v - mean)) / count;
        (mean, (var + T::of(self.eps.into())).sqrt().recip())
    }
}

impl Operator<3> for LayerNorm {
    const NAME: &'static str = "layer_norm";

    fn forward<T: Real>(&self, [x, gamma, beta]: [Input<'_>; 3]) -> Result<(Vec<T>, Shape)> {
        let shape = x.shape();
        let width = gamma.shape().elem_count();
        let (gamma, beta) = (gamma.values::<T>()?, beta.values::<T>()?);
        let mut y = x.values()?.into_owned();
        for row in y.chunks_exact_mut(width) {
            let (mean, inverse) = self.measure(row);
            for ((v, gamma), beta) in row.iter_mut().zip(&*gamma).zip(&*beta) {
                *v = (*v - mean) * inverse * *gamma + *beta;
            }
        }
        Ok((y, shape.clone()))
    }

    fn backward<T: Real>(
        &self,
        [x, gamma, _]: [Input<'_>; 3],
        _y: Input<'_>,
        dy: Input<'_>,
    ) -> Result<[Option<Vec<T>>; 3]> {
        let (values, scale) = (x.values::<T>()?, gamma.values::<T>()?);
        let mut dx = dy.values()?.into_owned();
        let width = scale.len();
        let (mut dgamma, mut dbeta) = (vec![T::ZERO; width], vec![T::ZERO; width]);
        for (row, dx) in values.chunks_exact(width).zip(dx.chunks_exact_mut(width)) {
            let (mean, inverse) = self.measure(row);
            for (((dx, v), scale), (dgamma, dbeta)) in
                dx.iter_mut().zip(row).zip(&*scale).zip(dgamma.iter_mut().zip(&mut dbeta))
            {
                *dbeta += *dx;
                *dgamma += *dx * (*v - mean) * inverse;
                *dx *= *scale;
            }
            // dx = (g - mean(g) - n * mean(g * n)) / deviation, with g = dy * gamma and n the
            // normalised input.
            let count = T::of(width as f64);
            let average = sum(dx) / count;
            let along = dot_centered(dx, row, mean) * inverse * inverse / count;
            dx.iter_mut()
                .zip(row)
                .for_each(|(g, v)| *g = (*g - average - (*v - mean) * along) * inverse);
        }
        Ok([Some(dx), Some(dgamma), Some(dbeta)])
    }
}
