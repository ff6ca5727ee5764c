//! The sigmoid linear unit, and SwiGLU, which uses it as a gate.

use candle_core::{Result, Shape, Tensor, bail};

use super::dispatch;
use super::pointwise::{self, Activation};
use crate::autocast::promote;
use crate::cast;
use crate::cpu::real::Real;
use crate::cpu::simd::{self, Kernel};
use crate::graph::device;
use crate::graph::operator::{Input, Operator, apply2};

/// `x / (1 + exp(-x))`: PyTorch's `silu`.
///
/// Any shape. NaN is propagated; negative infinity returns the limit 0 (PyTorch returns NaN).
///
/// # Errors
///
/// An unsupported dtype.
pub fn silu(x: &Tensor) -> Result<Tensor> {
    let [x] = cast("silu", [x])?;
    if device::dispatches(&x) { dispatch::silu(&x) } else { pointwise::apply(Silu, x) }
}

/// `silu(gate) * up` in one pass: the activation of SwiGLU, between its projections. Half-precision
/// results are rounded once.
///
/// Both inputs have the same shape; two types are cast as by [`add`](crate::add).
///
/// # Errors
///
/// Mismatched shapes; an unsupported dtype.
pub fn swiglu(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    let [gate, up] = promote(cast("silu", [gate, up])?)?;
    if gate.shape() != up.shape() {
        bail!("swiglu: shapes {:?} and {:?} differ", gate.shape(), up.shape());
    }
    if device::dispatches(&gate) {
        dispatch::swiglu(&gate, &up)
    } else {
        apply2(SwiGlu, [gate, up])
    }
}

/// From this magnitude on the sigmoid is 0 or 1 in the precision of `f32`, and `exp` of it is
/// finite.
pub(crate) const END: f64 = 88.0;

/// The function and its derivative.
#[inline(always)]
fn silu_of<T: Real>(x: T) -> (T, T) {
    // Clamped, since infinity times zero is NaN.
    let (least, most) = (T::of(-END), T::of(END));
    let low = if x < least { least } else { x };
    let bounded = if low > most { most } else { low };
    let sigmoid = (T::ONE + (T::ZERO - bounded).quick_exp()).recip();
    (low * sigmoid, sigmoid + bounded * sigmoid * (T::ONE - sigmoid))
}

#[derive(Clone, Copy)]
struct Silu;

impl Activation for Silu {
    const NAME: &'static str = "silu";

    #[inline(always)]
    fn at<T: Real>(self, x: T) -> (T, T) {
        silu_of(x)
    }
}

struct SwiGlu;

impl Operator<2> for SwiGlu {
    const NAME: &'static str = "swiglu";

    fn forward<T: Real>(&self, [gate, up]: [Input<'_>; 2]) -> Result<(Vec<T>, Shape)> {
        let mut y = gate.values::<T>()?.into_owned();
        simd::run(Gated { y: &mut y, up: &up.values::<T>()? });
        Ok((y, gate.shape().clone()))
    }

    fn backward<T: Real>(
        &self,
        [gate, up]: [Input<'_>; 2],
        _y: Input<'_>,
        dy: Input<'_>,
    ) -> Result<[Option<Vec<T>>; 2]> {
        let (gate, up, dy) = (gate.values::<T>()?, up.values::<T>()?, dy.values::<T>()?);
        let (mut dgate, mut dup) = (gate.into_owned(), up.into_owned());
        simd::run(GatedGradient { dgate: &mut dgate, dup: &mut dup, dy: &dy });
        Ok([Some(dgate), Some(dup)])
    }
}

struct Gated<'a, T> {
    /// The gate, overwritten by the result.
    y: &'a mut [T],
    up: &'a [T],
}

impl<T: Real> Kernel for Gated<'_, T> {
    #[inline(always)]
    fn run(self) {
        for (y, up) in self.y.iter_mut().zip(self.up) {
            *y = silu_of(*y).0 * *up;
        }
    }
}

struct GatedGradient<'a, T> {
    /// The gate, overwritten by its gradient.
    dgate: &'a mut [T],
    /// The other input, overwritten by its gradient.
    dup: &'a mut [T],
    dy: &'a [T],
}

impl<T: Real> Kernel for GatedGradient<'_, T> {
    #[inline(always)]
    fn run(self) {
        for ((gate, up), dy) in self.dgate.iter_mut().zip(self.dup).zip(self.dy) {
            let (value, slope) = silu_of(*gate);
            (*gate, *up) = (*dy * *up * slope, *dy * value);
        }
    }
}
