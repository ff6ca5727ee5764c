//! Checks for infinite and NaN elements.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use crate::cpu;

/// An element type of gradients: `f32`, `f16` or `bf16`. Sealed.
pub trait Element: sealed::Sealed + Copy + Send + Sync + 'static {}

mod sealed {
    #[expect(unnameable_types, reason = "sealed: only this crate implements it")]
    pub trait Sealed: Sized {
        fn has_non_finite(values: &[Self]) -> bool;
    }
}

/// Returns whether any element is infinite or NaN; false for an empty slice.
///
/// One read-only pass that stops soon after the first such element. A float is finite exactly if
/// its exponent bits are not all ones, so this is vectorized integer arithmetic on the bits.
///
/// ```
/// use half::bf16;
///
/// assert!(!amp::has_non_finite(&[1.0_f32, f32::MAX, -0.0]));
/// assert!(amp::has_non_finite(&[bf16::ONE, bf16::NAN]));
/// ```
#[doc(alias = "found_inf")]
#[must_use]
pub fn has_non_finite<T: Element>(values: &[T]) -> bool {
    T::has_non_finite(values)
}

impl Element for f32 {}

impl sealed::Sealed for f32 {
    fn has_non_finite(values: &[Self]) -> bool {
        cpu::has_non_finite(values)
    }
}

impl Element for f16 {}

impl sealed::Sealed for f16 {
    fn has_non_finite(values: &[Self]) -> bool {
        cpu::any_at_least(values.reinterpret_cast(), Self::INFINITY.to_bits())
    }
}

impl Element for bf16 {}

impl sealed::Sealed for bf16 {
    fn has_non_finite(values: &[Self]) -> bool {
        cpu::any_at_least(values.reinterpret_cast(), Self::INFINITY.to_bits())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_half_value_is_classified_correctly() {
        for bits in 0..=u16::MAX {
            let (f, b) = (f16::from_bits(bits), bf16::from_bits(bits));
            assert_eq!(has_non_finite(&[f]), !f.is_finite(), "{bits:#06x}");
            assert_eq!(has_non_finite(&[b]), !b.is_finite(), "{bits:#06x}");
        }
    }

    #[test]
    fn one_non_finite_element_is_found_at_any_position() {
        for len in [1, 7, 8, 15, 16, 17, 63, 64, 65, 4095, 4096, 4097, 9000] {
            for at in [0, len / 2, len - 1] {
                for bad in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN, -f32::NAN] {
                    let mut values = vec![f32::MAX; len];
                    let mut halves = vec![f16::MIN; len];
                    assert!(!has_non_finite(&values) && !has_non_finite(&halves));
                    values[at] = bad;
                    halves[at] = f16::from_f32(bad);
                    assert!(has_non_finite(&values) && has_non_finite(&halves), "{bad} {at}/{len}");
                }
            }
        }
        assert!(!has_non_finite::<f32>(&[]));
    }
}
