//! Runs loops compiled for wider vectors if the processor has them.
//!
//! No loop uses fused multiply-add, and the compiler does not reorder sums, so all versions give
//! bitwise the same results.

#![expect(unsafe_code, reason = "a function compiled for a feature is called once it is detected")]

/// A loop over slices. `run` and all functions that it calls must be `#[inline(always)]`: only
/// inlined code is compiled for wide vectors.
pub(crate) trait Kernel {
    /// Runs the loop.
    fn run(self);
}

/// Runs a kernel in the widest version supported by the processor.
pub(crate) fn run(kernel: impl Kernel) {
    #[cfg(target_arch = "x86_64")]
    if is_allowed(Width::Avx512) && is_x86_feature_detected!("avx512f") {
        // SAFETY: the processor has AVX-512 Foundation, as detected above.
        return unsafe { with_avx512(kernel) };
    } else if is_allowed(Width::Avx2) && is_x86_feature_detected!("avx2") {
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

/// Versions of a loop.
#[cfg(any(target_arch = "x86_64", test))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Width {
    /// For any processor.
    #[cfg(test)]
    Baseline,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

#[cfg(all(target_arch = "x86_64", not(test)))]
const fn is_allowed(_: Width) -> bool {
    true
}

#[cfg(all(target_arch = "x86_64", test))]
use tests::is_allowed;

#[cfg(test)]
pub(crate) mod tests {
    use std::cell::Cell;

    use super::Width;

    thread_local! {
        static WIDEST: Cell<Option<Width>> = const { Cell::new(None) };
    }

    #[cfg(target_arch = "x86_64")]
    pub(crate) fn is_allowed(width: Width) -> bool {
        WIDEST.get().is_none_or(|widest| width <= widest)
    }

    /// Results of `call` with each version of the loops.
    pub(crate) fn on_each_width<R>(mut call: impl FnMut() -> R) -> Vec<(Width, R)> {
        #[cfg(target_arch = "x86_64")]
        let widths = [Width::Baseline, Width::Avx2, Width::Avx512];
        #[cfg(not(target_arch = "x86_64"))]
        let widths = [Width::Baseline];
        let on = |width| {
            WIDEST.set(Some(width));
            let result = call();
            WIDEST.set(None);
            (width, result)
        };
        widths.map(on).into()
    }
}
