//! The Gaussian error linear unit.

use candle_core::{Result, Shape, Tensor};

use super::operator::{Input, Operator, apply1};
use super::real::Real;
use super::{cast, composed};

/// `x * P(z <= x)` for a standard normal `z`: PyTorch's `gelu` without approximation.
///
/// Any shape; computed in `f32`, the probability is within 3e-7. NaN stays NaN; negative infinity becomes 0, the limit
/// (PyTorch makes it NaN).
///
/// # Errors
///
/// Another dtype.
pub fn gelu(x: &Tensor) -> Result<Tensor> {
    let [x] = cast("gelu", [x])?;
    if composed::is_for(&x) { composed::gelu(&x) } else { apply1(Gelu, [x]) }
}

struct Gelu;

impl Operator<1> for Gelu {
    const NAME: &'static str = "gelu";

    fn forward<T: Real>(&self, [x]: [Input<'_>; 1]) -> Result<(Vec<T>, Shape)> {
        let y = x.values::<T>()?.iter().map(|x| x.gelu().0).collect();
        Ok((y, x.shape().clone()))
    }

    fn backward<T: Real>(
        &self,
        [x]: [Input<'_>; 1],
        _y: Input<'_>,
        dy: Input<'_>,
    ) -> Result<[Option<Vec<T>>; 1]> {
        let (x, dy) = (x.values::<T>()?, dy.values::<T>()?);
        Ok([Some(x.iter().zip(&*dy).map(|(x, dy)| *dy * x.gelu().1).collect())])
    }
}
