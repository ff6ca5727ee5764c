//! The definition of every reduction, in plain Rust.
//!
//! Processes the data in blocks: copies a block of each source out of shared memory, then folds it
//! into an accumulator on the stack. The compiler vectorizes those loops for the target; the order
//! of operations per element stays the sources' order.

#![expect(unsafe_code, reason = "copies blocks between raw memory and typed arrays")]

use std::convert::identity;
use std::num::Wrapping;
use std::ops::{Add, BitAnd, BitOr, BitXor, Mul, Range};

use half::{bf16, f16};

use super::Operands;
use crate::memory::Span;
use crate::{Element, ReduceOp};

/// Elements per block: accumulator and block fit in the first-level cache.
const BLOCK: usize = 512;
/// Elements per block for fewer elements, because clearing a block takes time. Applies to the
/// smallest messages and to the rest after vector code.
const FEW: usize = 32;

/// A floating-point type and its accumulator type.
pub(super) trait Float: Element {
    /// The type in which the fold computes.
    type Acc: Element + PartialOrd + Add<Output = Self::Acc> + Mul<Output = Self::Acc>;
    fn widen(self) -> Self::Acc;
    /// Rounds to nearest even; any NaN becomes the positive quiet NaN without payload.
    fn narrow(acc: Self::Acc) -> Self;
    fn is_nan(acc: Self::Acc) -> bool;
    /// Converts a factor, rounded.
    fn factor(factor: f64) -> Self::Acc;
}

macro_rules! float {
    ($type:ty, $acc:ty, $widen:expr, $narrow:expr, $factor:expr) => {
        impl Float for $type {
            type Acc = $acc;
            #[inline]
            fn widen(self) -> $acc {
                $widen(self)
            }
            #[inline]
            fn narrow(acc: $acc) -> Self {
                $narrow(if acc.is_nan() { <$acc>::NAN } else { acc })
            }
            #[inline]
            fn is_nan(acc: $acc) -> bool {
                acc.is_nan()
            }
            #[inline]
            fn factor(factor: f64) -> $acc {
                $factor(factor)
            }
        }
    };
}

float!(f32, f32, identity, identity, |factor| factor as f32);
float!(f64, f64, identity, identity, identity);
float!(f16, f32, f16::to_f32, f16::from_f32, |factor| factor as f32);
float!(bf16, f32, bf16::to_f32, bf16::from_f32, |factor| factor as f32);

/// Folds the floating-point numbers in a range of bytes.
pub(super) fn fold_float<T: Float>(op: ReduceOp, operands: &Operands<'_>, bytes: Range<usize>) {
    // Rounded to `f32` it equals `1 / n` computed in `f32`, for all `n` below 2^24.
    let scale = T::factor(1.0 / operands.ranks.unwrap_or(1) as f64);
    // Returns NaN if either is NaN, and the first of two zeros.
    let min = |a, b| if b < a || T::is_nan(b) && !T::is_nan(a) { b } else { a };
    let max = |a, b| if b > a || T::is_nan(b) && !T::is_nan(a) { b } else { a };
    let (widen, narrow) = (T::widen, T::narrow);
    match op {
        ReduceOp::Sum => fold(operands, bytes, widen, Add::add, narrow),
        ReduceOp::Avg => fold(operands, bytes, widen, Add::add, |acc| narrow(acc * scale)),
        ReduceOp::Product => fold(operands, bytes, widen, Mul::mul, narrow),
        ReduceOp::Min => fold(operands, bytes, widen, min, narrow),
        ReduceOp::Max => fold(operands, bytes, widen, max, narrow),
        ReduceOp::PreMulSum(factor) => {
            let factor = T::factor(factor.get());
            fold(operands, bytes, |x| T::widen(x) * factor, Add::add, narrow);
        }
        ReduceOp::BitAnd | ReduceOp::BitOr | ReduceOp::BitXor => {
            unreachable!("`OpDesc::check` rejects bit operations on floats")
        }
    }
}

/// Folds the integers in a range of bytes; sums and products wrap around.
pub(super) fn fold_integer<T: Element + Ord>(
    op: ReduceOp,
    operands: &Operands<'_>,
    bytes: Range<usize>,
) where
    Wrapping<T>: Add<Output = Wrapping<T>>
        + Mul<Output = Wrapping<T>>
        + BitAnd<Output = Wrapping<T>>
        + BitOr<Output = Wrapping<T>>
        + BitXor<Output = Wrapping<T>>,
{
    let same = identity::<T>;
    match op {
        ReduceOp::Sum => fold(operands, bytes, same, wrapping(Add::add), same),
        ReduceOp::Product => fold(operands, bytes, same, wrapping(Mul::mul), same),
        ReduceOp::Min => fold(operands, bytes, same, Ord::min, same),
        ReduceOp::Max => fold(operands, bytes, same, Ord::max, same),
        ReduceOp::BitAnd => fold(operands, bytes, same, wrapping(BitAnd::bitand), same),
        ReduceOp::BitOr => fold(operands, bytes, same, wrapping(BitOr::bitor), same),
        ReduceOp::BitXor => fold(operands, bytes, same, wrapping(BitXor::bitxor), same),
        ReduceOp::Avg | ReduceOp::PreMulSum(_) => {
            unreachable!("`OpDesc::check` rejects averages and factors of integers")
        }
    }
}

fn wrapping<T>(combine: impl Fn(Wrapping<T>, Wrapping<T>) -> Wrapping<T>) -> impl Fn(T, T) -> T {
    move |a, b| combine(Wrapping(a), Wrapping(b)).0
}

fn fold<T: Element, A: Element>(
    operands: &Operands<'_>,
    bytes: Range<usize>,
    widen: impl Fn(T) -> A,
    combine: impl Fn(A, A) -> A,
    narrow: impl Fn(A) -> T,
) {
    if bytes.len() < FEW * size_of::<T>() {
        blocks::<FEW, _, _>(operands, bytes, widen, combine, narrow);
    } else {
        blocks::<BLOCK, _, _>(operands, bytes, widen, combine, narrow);
    }
}

/// Folds blocks of `N` elements.
fn blocks<const N: usize, T: Element, A: Element>(
    operands: &Operands<'_>,
    bytes: Range<usize>,
    widen: impl Fn(T) -> A,
    combine: impl Fn(A, A) -> A,
    narrow: impl Fn(A) -> T,
) {
    let (first, count) = (bytes.start / size_of::<T>(), bytes.len() / size_of::<T>());
    let (mut acc, mut block) = ([A::default(); N], [T::default(); N]);
    for start in (0..count).step_by(N) {
        let (at, count) = (first + start, N.min(count - start));
        let (acc, block) = (&mut acc[..count], &mut block[..count]);
        let mut sources = operands.sources.iter();
        if let Some(prefix) = operands.prefix {
            load(acc, prefix, at);
        } else if let Some(&source) = sources.next() {
            load(block, source, at);
            for (acc, &x) in acc.iter_mut().zip(&*block) {
                *acc = widen(x);
            }
        }
        for &source in sources {
            load(block, source, at);
            for (acc, &x) in acc.iter_mut().zip(&*block) {
                *acc = combine(*acc, widen(x));
            }
        }
        if operands.ranks.is_none() {
            store(operands.outs, at, acc);
            continue;
        }
        for (x, &acc) in block.iter_mut().zip(&*acc) {
            *x = narrow(acc);
        }
        store(operands.outs, at, block);
    }
}

/// Loads a block from element `at` on.
fn load<T: Element>(block: &mut [T], source: Span<'_>, at: usize) {
    let block = bytes_of(block);
    block.copy_from(source.part(at * size_of::<T>(), block.len()));
}

fn store<T: Element>(outs: &[Span<'_>], at: usize, block: &mut [T]) {
    for out in outs {
        let block = bytes_of(block);
        out.part(at * size_of::<T>(), block.len()).copy_from(block);
    }
}

fn bytes_of<T: Element>(block: &mut [T]) -> Span<'_> {
    // SAFETY: the borrow lasts as long as the span, and any bytes are valid values of the types
    // that are folded.
    unsafe { Span::new(block.as_mut_ptr().cast(), size_of_val(block)) }
}
