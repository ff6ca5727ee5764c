//! Sums over slices, in partial sums that the compiler keeps in vector registers.

use crate::real::Real;

/// Sum of a slice.
pub(crate) fn sum<T: Real>(values: &[T]) -> T {
    sum_by(values, |v| v)
}

/// Sum of `f` over a slice, as [`sum`].
#[inline]
pub(crate) fn sum_by<T: Real>(values: &[T], f: impl Fn(T) -> T) -> T {
    let (chunks, rest) = values.as_chunks::<LANES>();
    let mut lanes = [T::ZERO; LANES];
    for chunk in chunks {
        for (lane, v) in lanes.iter_mut().zip(chunk) {
            *lane += f(*v);
        }
    }
    lanes.into_iter().sum::<T>() + rest.iter().map(|v| f(*v)).sum::<T>()
}

/// Sum of `a * (b - center)`, as [`sum`].
pub(crate) fn dot_centered<T: Real>(a: &[T], b: &[T], center: T) -> T {
    let (a_chunks, a_rest) = a.as_chunks::<LANES>();
    let (b_chunks, b_rest) = b.as_chunks::<LANES>();
    let mut lanes = [T::ZERO; LANES];
    for (a, b) in a_chunks.iter().zip(b_chunks) {
        for ((lane, a), b) in lanes.iter_mut().zip(a).zip(b) {
            *lane += *a * (*b - center);
        }
    }
    let rest: T = a_rest.iter().zip(b_rest).map(|(a, b)| *a * (*b - center)).sum();
    lanes.into_iter().sum::<T>() + rest
}

/// Partial sums of a reduction.
const LANES: usize = 16;
