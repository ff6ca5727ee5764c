//! Runs loops compiled for wider vectors if the processor has them.
//!
//! No loop uses fused multiply-add, and the compiler does not reorder sums, so all versions give
//! bitwise the same results.

#![expect(unsafe_code, reason = "a function compiled for a feature is called once it is detected")]

#[cfg(target_arch = "x86_64")]
use super::simd_limit::Simd;

/// A loop over slices. `run` and all functions that it calls must be `#[inline(always)]`: only
/// inlined code is compiled for wide vectors.
pub(crate) trait Kernel {
    /// Runs the loop.
    fn run(self);
}

/// Runs a kernel in the widest version that the processor has and the environment allows.
pub(crate) fn run(kernel: impl Kernel) {
    #[cfg(target_arch = "x86_64")]
    if is_allowed(Simd::Avx512) && is_x86_feature_detected!("avx512f") {
        // SAFETY: the processor has AVX-512 Foundation, as detected above.
        return unsafe { with_avx512(kernel) };
    } else if is_allowed(Simd::Avx2) && is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has AVX2, as detected above.
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

/// Whether the environment, and in tests the thread, allows these instructions.
#[cfg(all(target_arch = "x86_64", not(test)))]
pub(crate) use super::simd_limit::allows as is_allowed;
#[cfg(all(target_arch = "x86_64", test))]
pub(crate) use tests::is_allowed;

#[cfg(test)]
pub(crate) mod tests {
    use std::cell::Cell;

    use crate::cpu::simd_limit::Simd;

    thread_local! {
        static WIDEST: Cell<Option<Simd>> = const { Cell::new(None) };
    }

    #[cfg(target_arch = "x86_64")]
    pub(crate) fn is_allowed(simd: Simd) -> bool {
        match WIDEST.get() {
            Some(widest) => simd <= widest,
            None => crate::cpu::simd_limit::allows(simd),
        }
    }

    /// Results of `call` with each version of the loops.
    pub(crate) fn on_each_width<R>(mut call: impl FnMut() -> R) -> Vec<(Simd, R)> {
        #[cfg(target_arch = "x86_64")]
        let widths = [Simd::Scalar, Simd::Avx2, Simd::Avx512];
        #[cfg(not(target_arch = "x86_64"))]
        let widths = [Simd::Scalar];
        let on = |width| {
            WIDEST.set(Some(width));
            let result = call();
            WIDEST.set(None);
            (width, result)
        };
        widths.map(on).into()
    }
}
