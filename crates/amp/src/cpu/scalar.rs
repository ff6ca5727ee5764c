//! The loops as scalar code, which define the results; `x86_64.rs` compiles them for wider
//! registers.

use half::bf16;

use super::Kernel;

/// The bits of an f32 without its sign. As integers they order like magnitudes: finite values,
/// infinity, NaNs.
#[inline(always)]
const fn magnitude(x: f32) -> u32 {
    x.to_bits() & 0x7fff_ffff
}

const INFINITY: u32 = f32::INFINITY.to_bits();

/// Whether any element is infinite or NaN.
pub(super) struct HasNonFinite<'a> {
    pub(super) input: &'a [f32],
}

impl Kernel for HasNonFinite<'_> {
    type Output = bool;

    #[inline(always)]
    fn run(self) -> bool {
        let mut largest = 0;
        for x in self.input {
            largest = largest.max(magnitude(*x));
        }
        largest >= INFINITY
    }
}

/// Whether any element without its sign bit is at least `least`.
pub(super) struct AnyAtLeast<'a> {
    pub(super) input: &'a [u16],
    pub(super) least: u16,
}

impl Kernel for AnyAtLeast<'_> {
    type Output = bool;

    #[inline(always)]
    fn run(self) -> bool {
        let mut largest = 0;
        for x in self.input {
            largest = largest.max(x & 0x7fff);
        }
        largest >= self.least
    }
}

/// Multiplies in place; returns whether any input was infinite or NaN.
pub(super) struct Unscale<'a> {
    pub(super) values: &'a mut [f32],
    pub(super) factor: f32,
}

impl Kernel for Unscale<'_> {
    type Output = bool;

    #[inline(always)]
    fn run(self) -> bool {
        let mut largest = 0;
        for x in self.values {
            largest = largest.max(magnitude(*x));
            *x *= self.factor;
        }
        largest >= INFINITY
    }
}

/// f32 to bf16, rounded to nearest even; a NaN stays one, with its sign.
pub(super) struct ToBf16<'a> {
    pub(super) input: &'a [f32],
    pub(super) output: &'a mut [bf16],
}

impl Kernel for ToBf16<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        for (x, y) in self.input.iter().zip(self.output) {
            let bits = x.to_bits();
            // Adds just below half a unit, and one more for ties with an odd result.
            let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
            // Rounding could carry a NaN over; truncate it and set the quiet bit.
            let nan = (bits >> 16) | 0x40;
            *y = bf16::from_bits(if x.is_nan() { nan as u16 } else { rounded as u16 });
        }
    }
}

/// bf16 to f32, exactly.
pub(super) struct FromBf16<'a> {
    pub(super) input: &'a [bf16],
    pub(super) output: &'a mut [f32],
}

impl Kernel for FromBf16<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        for (x, y) in self.input.iter().zip(self.output) {
            *y = f32::from_bits(u32::from(x.to_bits()) << 16);
        }
    }
}
