//! The scalar loops compiled for AVX2 and AVX-512.
//!
//! Nothing here computes: [`Kernel::run`] is inlined into a function with wider registers enabled,
//! and the compiler vectorises it. Rust never contracts `a * b + c` into one rounding, so the bits
//! are those of the scalar loop.
//!
//! Invariant: an [`Isa`] exists only if this processor has the instructions it names; its one
//! constructor asks.

#![expect(unsafe_code, reason = "calls functions that need instructions detected at run time")]

use super::Kernel;

/// Proof that wider instructions than the build's may be used.
#[derive(Clone, Copy, Debug)]
pub(super) struct Isa(Width);

#[derive(Clone, Copy, Debug)]
enum Width {
    Avx2,
    Avx512,
}

impl Isa {
    /// The widest of this processor; the answer is cached by `std`.
    pub(super) fn detect() -> Option<Self> {
        Self::avx512().or_else(Self::avx2)
    }

    /// All of this processor's.
    #[cfg(test)]
    pub(super) fn all() -> impl Iterator<Item = Self> {
        [Self::avx2(), Self::avx512()].into_iter().flatten()
    }

    fn avx2() -> Option<Self> {
        is_x86_feature_detected!("avx2").then_some(Self(Width::Avx2))
    }

    fn avx512() -> Option<Self> {
        let found = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl");
        found.then_some(Self(Width::Avx512))
    }

    /// Runs a loop with these instructions.
    pub(super) fn run<K: Kernel>(self, kernel: K) -> K::Output {
        match self.0 {
            // SAFETY: `Self::avx2` made this value, so the processor has AVX2.
            Width::Avx2 => unsafe { with_avx2(kernel) },
            // SAFETY: `Self::avx512` made this value, so the processor has AVX-512 F, BW and VL.
            Width::Avx512 => unsafe { with_avx512(kernel) },
        }
    }
}

#[target_feature(enable = "avx2")]
fn with_avx2<K: Kernel>(kernel: K) -> K::Output {
    kernel.run()
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn with_avx512<K: Kernel>(kernel: K) -> K::Output {
    kernel.run()
}
