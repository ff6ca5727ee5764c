//! Reduction kernels: `out[i] = sources[0][i] . sources[1][i] . ...`, in the order of the sources.
//!
//! [`scalar`] is the definition; tests check that the vector code equals it bit for bit. Each call
//! dispatches at run time on the processor's features: sums of `f32`, `f16` and `bf16` have vector
//! code for x86-64; the compiler vectorizes the rest.

mod scalar;
#[cfg(target_arch = "x86_64")]
mod x86_64;

use std::ops::Range;

use half::{bf16, f16};

use crate::span::Span;
use crate::{DType, ReduceOp};

/// Bytes of a cache line.
const LINE: usize = 64;
/// From this size in bytes on, vectors start at a cache line of the first out. Large heap buffers are
/// not line-aligned, and vectors that cross lines cost more than processing a few numbers one by one.
const LARGE: usize = 16 << 10;

/// Folds the sources, one per rank and in rank order, into each of `outs`.
///
/// All spans have the same length, a whole number of elements of `dtype`. An out may be one of the
/// sources: each element is read from all sources before it is written. NaN, rounding and wrapping
/// follow [`ReduceOp`]. Spans may be empty.
///
/// `op` must be defined for `dtype`.
pub(crate) fn fold(dtype: DType, op: ReduceOp, outs: &[Span<'_>], sources: &[Span<'_>]) {
    let len = sources.first().expect("a fold has at least one source").len();
    assert!(!outs.is_empty(), "a fold has at least one out");
    assert!(outs.iter().chain(sources).all(|span| span.len() == len), "spans have equal length");
    assert_eq!(len % dtype.size(), 0, "whole elements");
    let start = if len < LARGE { 0 } else { to_line(outs[0], dtype.size()) };
    let end = start + fold_vector(dtype, op, outs, sources, start);
    for rest in [0..start, end..len] {
        if !rest.is_empty() {
            fold_scalar(dtype, op, outs, sources, rest);
        }
    }
}

/// Bytes before the first cache line, or 0 if that is not a whole number of elements.
fn to_line(out: Span<'_>, size: usize) -> usize {
    let bytes = out.ptr().align_offset(LINE);
    if bytes.is_multiple_of(size) { bytes } else { 0 }
}

/// Copies; if one span is twice as long as the other, it holds `f32` for the other's numbers of a
/// 16-bit type, and they are converted, rounded as in [`fold`].
pub(crate) fn convert(dtype: DType, to: Span<'_>, from: Span<'_>) {
    match dtype {
        _ if to.len() == from.len() => to.copy_from(from),
        DType::F16 => scalar::convert::<f16>(to, from),
        DType::Bf16 => scalar::convert::<bf16>(to, from),
        _ => unreachable!("only 16-bit types are converted, not {dtype}"),
    }
}

fn fold_scalar(
    dtype: DType,
    op: ReduceOp,
    outs: &[Span<'_>],
    sources: &[Span<'_>],
    bytes: Range<usize>,
) {
    match dtype {
        DType::F16 => scalar::fold_float::<f16>(op, outs, sources, bytes),
        DType::Bf16 => scalar::fold_float::<bf16>(op, outs, sources, bytes),
        DType::F32 => scalar::fold_float::<f32>(op, outs, sources, bytes),
        DType::F64 => scalar::fold_float::<f64>(op, outs, sources, bytes),
        DType::I8 => scalar::fold_integer::<i8>(op, outs, sources, bytes),
        DType::I16 => scalar::fold_integer::<i16>(op, outs, sources, bytes),
        DType::I32 => scalar::fold_integer::<i32>(op, outs, sources, bytes),
        DType::I64 => scalar::fold_integer::<i64>(op, outs, sources, bytes),
        DType::U8 | DType::Bool => scalar::fold_integer::<u8>(op, outs, sources, bytes),
        DType::U16 => scalar::fold_integer::<u16>(op, outs, sources, bytes),
        DType::U32 => scalar::fold_integer::<u32>(op, outs, sources, bytes),
        DType::U64 => scalar::fold_integer::<u64>(op, outs, sources, bytes),
        DType::F8E4M3 | DType::F8E5M2 => {
            unreachable!("`OpDesc::check` rejects reductions of {dtype}")
        }
    }
}

/// Folds with vector instructions from byte `start` on, and returns the number of bytes folded; 0
/// if there is no kernel.
#[cfg(target_arch = "x86_64")]
fn fold_vector(
    dtype: DType,
    op: ReduceOp,
    outs: &[Span<'_>],
    sources: &[Span<'_>],
    start: usize,
) -> usize {
    let scale = match op {
        ReduceOp::Sum => None,
        ReduceOp::Avg => Some(1.0 / sources.len() as f32),
        _ => return 0,
    };
    x86_64::Width::best().map_or(0, |width| width.sum(dtype, outs, sources, scale, start))
}

#[cfg(not(target_arch = "x86_64"))]
fn fold_vector(_: DType, _: ReduceOp, _: &[Span<'_>], _: &[Span<'_>], _: usize) -> usize {
    0
}
