//! The loops, written plainly, one element after another. This is the definition; `x86_64.rs`
//! compiles these same lines for wider registers.

use half::bf16;

use super::{Kernel, Rule};

/// A rule over the elements of one block.
pub(super) struct Sweep<'a, R, const N: usize> {
    pub(super) rule: R,
    pub(super) param: &'a mut [f32],
    pub(super) grad: &'a [f32],
    pub(super) state: [&'a mut [f32]; N],
}

impl<R: Rule<N>, const N: usize> Kernel for Sweep<'_, R, N> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        // Slices of one length, so that the loop below needs no further check.
        let count = self.param.len();
        let param = &mut self.param[..count];
        let grad = &self.grad[..count];
        let state = self.state.map(|slot| &mut slot[..count]);
        for i in 0..count {
            let old = std::array::from_fn(|slot| state[slot][i]);
            let (new_param, new) = self.rule.update(param[i], grad[i], old);
            param[i] = new_param;
            for slot in 0..N {
                state[slot][i] = new[slot];
            }
        }
    }
}

/// Whether any `input * scale` is infinite or NaN.
pub(super) struct HasNonFinite<'a> {
    pub(super) input: &'a [f32],
    pub(super) scale: f32,
}

impl Kernel for HasNonFinite<'_> {
    type Output = bool;

    /// Without its sign a float is finite exactly if its bits, as an integer, are below those of
    /// infinity; the largest decides for all.
    #[inline(always)]
    fn run(self) -> bool {
        let mut largest = 0;
        for x in self.input {
            largest = largest.max((x * self.scale).to_bits() & 0x7fff_ffff);
        }
        largest >= f32::INFINITY.to_bits()
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
            // Adds just below half a unit, and one more if that makes the result even.
            let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
            // Rounding could carry a NaN into infinity; instead it is cut off and made quiet.
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
