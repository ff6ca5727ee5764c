//! Loops compiled for any processor of the architecture, and for wider vectors where the processor has them.
//!
//! No loop uses fused multiply-add, and the compiler does not reorder sums, so all versions give the same bits.

#![expect(unsafe_code, reason = "a function compiled for a feature is called once it is detected")]

/// A loop over slices. `run` must be `#[inline(always)]`, and so must what it calls: only what is
/// inlined is compiled for the wide vectors.
pub(super) trait Kernel {
    /// Does the work.
    fn run(self);
}

/// Runs a kernel in the widest version that the processor can execute.
pub(super) fn run(kernel: impl Kernel) {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx512f") {
        // SAFETY: the processor has AVX-512 Foundation, as was just detected.
        return unsafe { with_avx512(kernel) };
    } else if std::arch::is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has AVX2, as was just detected.
        return unsafe { with_avx2(kernel) };
    }
    kernel.run();
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn with_avx512(kernel: impl Kernel) {
    kernel.run();
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn with_avx2(kernel: impl Kernel) {
    kernel.run();
}
