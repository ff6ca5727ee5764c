//! Reduction kernels: `out[i] = sources[0][i] . sources[1][i] . ...`, in the order of the sources.
//!
//! [`scalar`] is the definition; the vector code equals it bit for bit, which tests hold it to.
//! Dispatch is at run time, per call, on what the processor has: sums of `f32`, `f16` and `bf16`
//! have vector code for x86-64; the rest is left to the compiler.

mod scalar;
#[cfg(target_arch = "x86_64")]
mod x86_64;

use half::{bf16, f16};

use crate::span::Span;
use crate::{DType, ReduceOp};

/// Folds the sources, one per rank and in rank order, into `out`.
///
/// All spans have the length of `out`, a whole number of elements of `dtype`. `out` may be one of
/// the sources: each element is read from all sources before it is written. NaN, rounding and
/// wrapping are as [`ReduceOp`] says. Empty spans are fine.
///
/// `op` must be defined for `dtype`.
pub(crate) fn fold(dtype: DType, op: ReduceOp, out: Span<'_>, sources: &[Span<'_>]) {
    assert!(!sources.is_empty(), "a fold has at least one source");
    assert!(sources.iter().all(|source| source.len() == out.len()), "sources as long as `out`");
    assert_eq!(out.len() % dtype.size(), 0, "whole elements");
    let done = fold_vector(dtype, op, out, sources);
    if done == out.len() {
        return;
    }
    let rest = |span: Span<'_>| (done, span.len() - done);
    let (offset, len) = rest(out);
    let out = out.part(offset, len);
    match dtype {
        DType::F16 => scalar::fold_float::<f16>(op, out, sources, offset),
        DType::Bf16 => scalar::fold_float::<bf16>(op, out, sources, offset),
        DType::F32 => scalar::fold_float::<f32>(op, out, sources, offset),
        DType::F64 => scalar::fold_float::<f64>(op, out, sources, offset),
        DType::I8 => scalar::fold_integer::<i8>(op, out, sources, offset),
        DType::U8 => scalar::fold_integer::<u8>(op, out, sources, offset),
        DType::I32 => scalar::fold_integer::<i32>(op, out, sources, offset),
        DType::I64 => scalar::fold_integer::<i64>(op, out, sources, offset),
        DType::U64 => scalar::fold_integer::<u64>(op, out, sources, offset),
    }
}

/// Folds a prefix with vector instructions, and returns its bytes; 0 if there are none for this.
#[cfg(target_arch = "x86_64")]
fn fold_vector(dtype: DType, op: ReduceOp, out: Span<'_>, sources: &[Span<'_>]) -> usize {
    let scale = match op {
        ReduceOp::Sum => None,
        ReduceOp::Avg => Some(1.0 / sources.len() as f32),
        _ => return 0,
    };
    let Some(avx2) = x86_64::Avx2::detect() else { return 0 };
    match dtype {
        DType::F32 => avx2.sum_f32(out, sources, scale),
        DType::F16 => avx2.sum_f16(out, sources, scale),
        DType::Bf16 => avx2.sum_bf16(out, sources, scale),
        _ => 0,
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn fold_vector(_: DType, _: ReduceOp, _: Span<'_>, _: &[Span<'_>]) -> usize {
    0
}
