//! Loops compiled for AVX2, which is detected at run time; results are bit-identical.

#![expect(unsafe_code, reason = "instructions detected at run time")]

#[cfg(target_arch = "x86_64")]
use super::simd_limit::{Simd, allows};

/// A loop, whose `run` is `#[inline(always)]`, so that it is compiled for the instructions of its
/// caller.
pub(super) trait Kernel {
    /// Result type.
    type Output;

    /// Runs it.
    fn run(self) -> Self::Output;
}

/// Runs a loop with AVX2 if the processor has it and the environment allows it.
pub(super) fn vectorized<K: Kernel>(kernel: K) -> K::Output {
    #[cfg(target_arch = "x86_64")]
    if allows(Simd::Avx2) && is_x86_feature_detected!("avx2") {
        // SAFETY: AVX2 was detected above.
        return unsafe { with_avx2(kernel) };
    }
    kernel.run()
}

/// # Safety
///
/// The processor must support AVX2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn with_avx2<K: Kernel>(kernel: K) -> K::Output {
    kernel.run()
}
