//! Reduction kernels: `out[i] = sources[0][i] . sources[1][i] . ...`, in the order of the sources,
//! see [`Operands`].
//!
//! [`scalar`] is the definition; tests check that the vector code equals it bit for bit. Each call
//! dispatches at run time on the processor's features: sums of `f32`, `f16` and `bf16` have vector
//! code for x86-64; the compiler vectorizes the rest.

mod scalar;
#[cfg(target_arch = "x86_64")]
mod x86_64;

use std::ops::Range;

use half::{bf16, f16};

use crate::memory::Span;
use crate::{DType, ReduceOp};

/// Bytes of a cache line.
const LINE: usize = 64;
/// From this size in bytes on, vectors start at a cache line of the first out. Large heap buffers
/// are not line-aligned, and vectors that cross lines cost more than processing a few numbers one
/// by one.
const LARGE: usize = 16 << 10;

/// The operands of a fold: `out[i] = prefix[i] . sources[0][i] . sources[1][i] . ...`.
///
/// The sources have the same length, a whole number of elements of the data type. The other spans
/// have as many elements; prefix and partial results have the type in which the fold computes, see
/// [`acc_size`]. An out may be one of the sources: each element is read from all sources before it
/// is written.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Operands<'a> {
    pub(crate) outs: &'a [Span<'a>],
    pub(crate) sources: &'a [Span<'a>],
    /// The partial result of earlier ranks.
    pub(crate) prefix: Option<Span<'a>>,
    /// Number of ranks, including those of the prefix; `None` if others follow, so that the result
    /// is a partial one.
    pub(crate) ranks: Option<usize>,
}

/// Size in bytes of the type in which numbers are folded: `f32` for 16-bit floats, else their own.
pub(crate) fn acc_size(dtype: DType) -> usize {
    if matches!(dtype, DType::F16 | DType::Bf16) { size_of::<f32>() } else { dtype.size() }
}

/// Folds the sources, one per rank and in rank order, into each of `outs`; see [`Operands`].
pub(crate) fn fold(dtype: DType, op: ReduceOp, outs: &[Span<'_>], sources: &[Span<'_>]) {
    fold_part(dtype, op, &Operands { outs, sources, prefix: None, ranks: Some(sources.len()) });
}

/// Folds the operands. NaN, rounding and wrapping follow [`ReduceOp`]. Spans may be empty.
///
/// `op` must be defined for `dtype`.
pub(crate) fn fold_part(dtype: DType, op: ReduceOp, operands: &Operands<'_>) {
    let Operands { outs, sources, prefix, ranks } = *operands;
    let len = sources.first().expect("a fold has at least one source").len();
    let (size, acc_size) = (dtype.size(), acc_size(dtype));
    let out_size = if ranks.is_some() { size } else { acc_size };
    assert!(!outs.is_empty(), "a fold has at least one out");
    assert_eq!(len % size, 0, "whole elements");
    let has = |span: &Span<'_>, size_of_one: usize| span.len() == len / size * size_of_one;
    let fits = sources.iter().all(|span| has(span, size))
        && outs.iter().all(|span| has(span, out_size))
        && prefix.iter().all(|span| has(span, acc_size));
    assert!(fits, "spans have equal numbers of elements");
    let start = if len < LARGE { 0 } else { to_line(outs[0], out_size) * size };
    let end = start + fold_vector(dtype, op, operands, start);
    for rest in [0..start, end..len] {
        if !rest.is_empty() {
            fold_scalar(dtype, op, operands, rest);
        }
    }
}

/// Number of elements before the first cache line, or 0 if that is not a whole number.
fn to_line(out: Span<'_>, size: usize) -> usize {
    let bytes = out.ptr().align_offset(LINE);
    if bytes.is_multiple_of(size) { bytes / size } else { 0 }
}

fn fold_scalar(dtype: DType, op: ReduceOp, operands: &Operands<'_>, bytes: Range<usize>) {
    match dtype {
        DType::F16 => scalar::fold_float::<f16>(op, operands, bytes),
        DType::Bf16 => scalar::fold_float::<bf16>(op, operands, bytes),
        DType::F32 => scalar::fold_float::<f32>(op, operands, bytes),
        DType::F64 => scalar::fold_float::<f64>(op, operands, bytes),
        DType::I8 => scalar::fold_integer::<i8>(op, operands, bytes),
        DType::I16 => scalar::fold_integer::<i16>(op, operands, bytes),
        DType::I32 => scalar::fold_integer::<i32>(op, operands, bytes),
        DType::I64 => scalar::fold_integer::<i64>(op, operands, bytes),
        DType::U8 | DType::Bool => scalar::fold_integer::<u8>(op, operands, bytes),
        DType::U16 => scalar::fold_integer::<u16>(op, operands, bytes),
        DType::U32 => scalar::fold_integer::<u32>(op, operands, bytes),
        DType::U64 => scalar::fold_integer::<u64>(op, operands, bytes),
        DType::F8E4M3 | DType::F8E5M2 => {
            unreachable!("`OpDesc::check` rejects reductions of {dtype}")
        }
    }
}

/// Folds with vector instructions from byte `start` of the sources on, and returns the number of
/// bytes folded; 0 if there is no kernel.
#[cfg(target_arch = "x86_64")]
fn fold_vector(dtype: DType, op: ReduceOp, operands: &Operands<'_>, start: usize) -> usize {
    let scale = match (op, operands.ranks) {
        (ReduceOp::Sum, _) | (ReduceOp::Avg, None) => None,
        (ReduceOp::Avg, Some(ranks)) => Some(1.0 / ranks as f32),
        _ => return 0,
    };
    x86_64::Width::best().map_or(0, |width| width.sum(dtype, operands, scale, start))
}

#[cfg(not(target_arch = "x86_64"))]
fn fold_vector(_: DType, _: ReduceOp, _: &Operands<'_>, _: usize) -> usize {
    0
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Folds in two parts, cut at each rank, on blocks, vectors and the rest after them.
    #[test]
    fn a_continued_fold_has_the_bits_of_one_fold() {
        let ranks = 4;
        let cases = DType::ALL.into_iter().flat_map(|dtype| ReduceOp::ALL.map(|op| (dtype, op)));
        for (dtype, op) in cases.filter(|&(dtype, op)| op.supports(dtype)) {
            for count in [1, 31, 33, 1_100, 20_011] {
                let (bytes, wide) = (count * dtype.size(), count * acc_size(dtype));
                let byte = |i: usize| (i.wrapping_mul(0x9e37_79b9) >> 17) as u8;
                let mut data: Vec<u8> = (0..ranks * bytes).map(byte).collect();
                let data = Span::from_mut(&mut data);
                let sources: Vec<_> = (0..ranks).map(|at| data.part(at * bytes, bytes)).collect();
                let [mut whole, mut last, mut partial] =
                    [bytes, bytes, wide].map(|len| vec![0_u8; len]);
                fold(dtype, op, &[Span::from_mut(&mut whole)], &sources);
                for cut in 1..ranks {
                    let (first, second) = sources.split_at(cut);
                    let prefix = Span::from_mut(&mut partial);
                    let (outs, sources) = (&[prefix], first);
                    fold_part(dtype, op, &Operands { outs, sources, prefix: None, ranks: None });
                    let (outs, sources) = (&[Span::from_mut(&mut last)], second);
                    let (prefix, ranks) = (Some(prefix), Some(ranks));
                    fold_part(dtype, op, &Operands { outs, sources, prefix, ranks });
                    assert!(last == whole, "{op} of {count} {dtype} cut at {cut}");
                }
            }
        }
    }
}
