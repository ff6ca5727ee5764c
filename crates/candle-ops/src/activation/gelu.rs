//! The Gaussian error linear unit.

use candle_core::{Result, Tensor};

use super::dispatch;
use super::pointwise::{self, Activation};
use crate::cast;
use crate::cpu::real::Real;
use crate::graph::device;

/// `x * P(z <= x)` for a standard normal `z`: PyTorch's `gelu` without approximation.
///
/// Any shape. Computed in `f32`, the probability has an error of at most 3e-7. NaN is propagated;
/// negative infinity returns the limit 0 (PyTorch returns NaN).
///
/// # Errors
///
/// An unsupported dtype.
pub fn gelu(x: &Tensor) -> Result<Tensor> {
    let [x] = cast("gelu", [x])?;
    if device::dispatches(&x) { dispatch::gelu(&x) } else { pointwise::apply(Gelu, x) }
}

#[derive(Clone, Copy)]
struct Gelu;

impl Activation for Gelu {
    const NAME: &'static str = "gelu";

    #[inline(always)]
    fn at<T: Real>(self, x: T) -> (T, T) {
        x.gelu()
    }
}
