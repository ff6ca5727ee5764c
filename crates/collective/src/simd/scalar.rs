//! The definition of every reduction, in plain Rust.
//!
//! Processes the data in blocks: copies a block of each source out of shared memory, then folds it
//! into an accumulator on the stack. The compiler vectorizes those loops for the target; the order
//! of operations per element stays the sources' order.

#![expect(unsafe_code, reason = "copies blocks between raw memory and typed arrays")]

use std::convert::identity;
use std::num::Wrapping;
use std::ops::{Add, BitAnd, BitOr, BitXor, Mul, Range};

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use crate::span::Span;
use crate::{Element, ReduceOp};

/// Elements per block: accumulator and block fit in the first-level cache.
const BLOCK: usize = 512;
/// Fewer elements than this are folded one by one, which is faster than clearing a block. Applies
/// to the smallest messages and to the rest after vector code.
const FEW: usize = 32;

/// A floating-point type and its accumulator type.
pub(super) trait Float: Element {
    /// The type in which the fold computes.
    type Acc: Copy + Default + PartialOrd + Add<Output = Self::Acc> + Mul<Output = Self::Acc>;
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
pub(super) fn fold_float<T: Float>(
    op: ReduceOp,
    outs: &[Span<'_>],
    sources: &[Span<'_>],
    bytes: Range<usize>,
) {
    let one = |acc| acc;
    // Rounded to `f32` it equals `1 / n` computed in `f32`, for all `n` below 2^24.
    let scale = T::factor(1.0 / sources.len() as f64);
    // Returns NaN if either is NaN, and the first of two zeros.
    let min = |a, b| if b < a || T::is_nan(b) && !T::is_nan(a) { b } else { a };
    let max = |a, b| if b > a || T::is_nan(b) && !T::is_nan(a) { b } else { a };
    let (widen, narrow) = (T::widen, T::narrow);
    match op {
        ReduceOp::Sum => fold(outs, sources, bytes, widen, Add::add, one, narrow),
        ReduceOp::Avg => {
            fold(outs, sources, bytes, widen, Add::add, |acc| acc * scale, narrow);
        }
        ReduceOp::Product => fold(outs, sources, bytes, widen, Mul::mul, one, narrow),
        ReduceOp::Min => fold(outs, sources, bytes, widen, min, one, narrow),
        ReduceOp::Max => fold(outs, sources, bytes, widen, max, one, narrow),
        ReduceOp::PreMulSum(factor) => {
            let factor = T::factor(factor.get());
            fold(outs, sources, bytes, |x| T::widen(x) * factor, Add::add, one, narrow);
        }
        ReduceOp::BitAnd | ReduceOp::BitOr | ReduceOp::BitXor => {
            unreachable!("`OpDesc::check` rejects bit operations on floats")
        }
    }
}

/// Folds the integers in a range of bytes; sums and products wrap around.
pub(super) fn fold_integer<T: Element + Ord>(
    op: ReduceOp,
    outs: &[Span<'_>],
    sources: &[Span<'_>],
    bytes: Range<usize>,
) where
    Wrapping<T>: Default
        + Add<Output = Wrapping<T>>
        + Mul<Output = Wrapping<T>>
        + BitAnd<Output = Wrapping<T>>
        + BitOr<Output = Wrapping<T>>
        + BitXor<Output = Wrapping<T>>,
{
    let (one, inner) = (|acc| acc, |Wrapping(x)| x);
    match op {
        ReduceOp::Sum => fold(outs, sources, bytes, Wrapping, Add::add, one, inner),
        ReduceOp::Product => fold(outs, sources, bytes, Wrapping, Mul::mul, one, inner),
        ReduceOp::Min => fold(outs, sources, bytes, Wrapping, Ord::min, one, inner),
        ReduceOp::Max => fold(outs, sources, bytes, Wrapping, Ord::max, one, inner),
        ReduceOp::BitAnd => fold(outs, sources, bytes, Wrapping, BitAnd::bitand, one, inner),
        ReduceOp::BitOr => fold(outs, sources, bytes, Wrapping, BitOr::bitor, one, inner),
        ReduceOp::BitXor => fold(outs, sources, bytes, Wrapping, BitXor::bitxor, one, inner),
        ReduceOp::Avg | ReduceOp::PreMulSum(_) => {
            unreachable!("`OpDesc::check` rejects averages and factors of integers")
        }
    }
}

fn fold<T: Element, A: Copy + Default>(
    outs: &[Span<'_>],
    sources: &[Span<'_>],
    range: Range<usize>,
    widen: impl Fn(T) -> A,
    combine: impl Fn(A, A) -> A,
    finish: impl Fn(A) -> A,
    narrow: impl Fn(A) -> T,
) {
    let size = size_of::<T>();
    let (first, others) = sources.split_first().expect("a fold has at least one source");
    let (offset, count) = (range.start, range.len() / size);
    if count < FEW {
        for at in (0..count).map(|i| offset + i * size) {
            let load_one = |source: &Span<'_>| {
                let mut x = [T::default()];
                load(&mut x, source.part(at, size));
                widen(x[0])
            };
            let acc =
                others.iter().fold(load_one(first), |acc, source| combine(acc, load_one(source)));
            store(outs, at, &mut [narrow(finish(acc))]);
        }
        return;
    }
    let mut acc = [A::default(); BLOCK];
    let mut block = [T::default(); BLOCK];
    for start in (0..count).step_by(BLOCK) {
        let count = BLOCK.min(count - start);
        let (from, bytes) = (offset + start * size, count * size);
        let (acc, block) = (&mut acc[..count], &mut block[..count]);
        load(block, first.part(from, bytes));
        for (acc, &x) in acc.iter_mut().zip(&*block) {
            *acc = widen(x);
        }
        for source in others {
            load(block, source.part(from, bytes));
            for (acc, &x) in acc.iter_mut().zip(&*block) {
                *acc = combine(*acc, widen(x));
            }
        }
        for (x, &acc) in block.iter_mut().zip(&*acc) {
            *x = narrow(finish(acc));
        }
        store(outs, from, block);
    }
}

/// Converts halves to `f32` if `to` is longer, else `f32` to halves, rounded to nearest even; any
/// NaN becomes the canonical one then.
pub(super) fn convert<T: Float<Acc = f32>>(to: Span<'_>, from: Span<'_>)
where
    [T]: HalfFloatSliceExt,
{
    let (mut halves, mut wide) = ([T::default(); BLOCK], [0.0_f32; BLOCK]);
    let count = to.len().min(from.len()) / size_of::<T>();
    for start in (0..count).step_by(BLOCK) {
        let count = BLOCK.min(count - start);
        let (halves, wide) = (&mut halves[..count], &mut wide[..count]);
        if to.len() > from.len() {
            load(halves, from.part(start * size_of::<T>(), size_of_val(halves)));
            halves.convert_to_f32_slice(wide);
            store(&[to], start * size_of::<f32>(), wide);
        } else {
            load(wide, from.part(start * size_of::<f32>(), size_of_val(wide)));
            for x in wide.iter_mut().filter(|x| x.is_nan()) {
                *x = f32::NAN;
            }
            halves.convert_from_f32_slice(wide);
            store(&[to], start * size_of::<T>(), halves);
        }
    }
}

fn load<T: Element>(block: &mut [T], source: Span<'_>) {
    bytes_of(block).copy_from(source);
}

fn store<T: Element>(outs: &[Span<'_>], offset: usize, block: &mut [T]) {
    for out in outs {
        out.part(offset, size_of_val(block)).copy_from(bytes_of(block));
    }
}

fn bytes_of<T: Element>(block: &mut [T]) -> Span<'_> {
    // SAFETY: the borrow lasts as long as the span, and any bytes are valid values of the types
    // that are folded.
    unsafe { Span::new(block.as_mut_ptr().cast(), size_of_val(block)) }
}
