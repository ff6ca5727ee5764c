//! Sums over slices, with partial sums that the compiler keeps in vector registers.
//!
//! All functions are `#[inline(always)]`, so that a [`Kernel`](crate::cpu::simd::Kernel) can call
//! them.

use super::real::Real;

/// Sum of a slice.
#[inline(always)]
pub(crate) fn sum<T: Real>(values: &[T]) -> T {
    sum_by(values, |v| v)
}

/// Sum of `f` over a slice, like [`sum`].
#[inline(always)]
pub(crate) fn sum_by<T: Real>(values: &[T], f: impl Fn(T) -> T) -> T {
    let (chunks, rest) = values.as_chunks::<LANES>();
    let mut lanes = [T::ZERO; LANES];
    for chunk in chunks {
        for (lane, v) in lanes.iter_mut().zip(chunk) {
            *lane += f(*v);
        }
    }
    let mut last = T::ZERO;
    for v in rest {
        last += f(*v);
    }
    fold(lanes) + last
}

/// Sum of `a * (b - center)`, like [`sum`].
#[inline(always)]
pub(crate) fn dot_centered<T: Real>(a: &[T], b: &[T], center: T) -> T {
    let (a_chunks, a_rest) = a.as_chunks::<LANES>();
    let (b_chunks, b_rest) = b.as_chunks::<LANES>();
    let mut lanes = [T::ZERO; LANES];
    for (a, b) in a_chunks.iter().zip(b_chunks) {
        for ((lane, a), b) in lanes.iter_mut().zip(a).zip(b) {
            *lane += *a * (*b - center);
        }
    }
    let mut last = T::ZERO;
    for (a, b) in a_rest.iter().zip(b_rest) {
        last += *a * (*b - center);
    }
    fold(lanes) + last
}

/// Sum of the partial sums.
#[inline(always)]
fn fold<T: Real>(lanes: [T; LANES]) -> T {
    let mut total = T::ZERO;
    for lane in &lanes {
        total += *lane;
    }
    total
}

/// The largest value of a slice; negative infinity if it is empty. Skips NaN. May return a zero of
/// either sign.
#[inline(always)]
pub(crate) fn largest<T: Real>(values: &[T]) -> T {
    let larger = |a: T, b: T| if b > a { b } else { a };
    let (chunks, rest) = values.as_chunks::<LANES>();
    let mut lanes = [T::NEG_INFINITY; LANES];
    for chunk in chunks {
        for (lane, v) in lanes.iter_mut().zip(chunk) {
            *lane = larger(*lane, *v);
        }
    }
    let mut largest = T::NEG_INFINITY;
    for v in lanes.iter().chain(rest) {
        largest = larger(largest, *v);
    }
    largest
}

/// Partial sums of a reduction.
const LANES: usize = 16;
