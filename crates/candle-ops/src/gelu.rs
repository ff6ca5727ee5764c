//! The Gaussian error linear unit.

use candle_core::{Result, Shape, Tensor};

use super::operator::{Input, Operator, apply1};
use super::real::Real;
use super::simd::{self, Kernel};
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
        let values = x.values::<T>()?;
        let mut y = vec![T::ZERO; values.len()];
        simd::run(Values { x: &values, y: &mut y });
        Ok((y, x.shape().clone()))
    }

    fn backward<T: Real>(
        &self,
        [x]: [Input<'_>; 1],
        _y: Input<'_>,
        dy: Input<'_>,
    ) -> Result<[Option<Vec<T>>; 1]> {
        let (x, mut dx) = (x.values::<T>()?, dy.values::<T>()?.into_owned());
        simd::run(Gradient { x: &x, dx: &mut dx });
        Ok([Some(dx)])
    }
}

struct Values<'a, T> {
    x: &'a [T],
    y: &'a mut [T],
}

impl<T: Real> Kernel for Values<'_, T> {
    #[inline(always)]
    fn run(self) {
        for (y, x) in self.y.iter_mut().zip(self.x) {
            *y = x.gelu().0;
        }
    }
}

struct Gradient<'a, T> {
    x: &'a [T],
    /// That of the result, which becomes that of `x`.
    dx: &'a mut [T],
}

impl<T: Real> Kernel for Gradient<'_, T> {
    #[inline(always)]
    fn run(self) {
        for (dx, x) in self.dx.iter_mut().zip(self.x) {
            *dx *= x.gelu().1;
        }
    }
}
