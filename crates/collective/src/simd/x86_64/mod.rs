//! Sums of `f32`, `f16` and `bf16` with AVX2 and F16C, or with AVX-512.
//!
//! Each kernel keeps 32 `f32` sums in registers, adds the sources to them one after another in rank
//! order, scales for an average, makes any NaN the canonical one, rounds once, and stores the
//! result to every out. A prefix is the first addend, and a partial result is stored as `f32`. It
//! processes whole groups of 32 elements and returns the number of bytes; the scalar definition
//! processes the rest. The result equals the scalar rule bit for bit: the
//! same IEEE additions and roundings in the same order. AVX-512 is used for its stores: if several
//! outs are in other cores' caches, storing whole lines takes half the time. Sources are often in
//! other cores' caches, too, and are prefetched.

#![expect(unsafe_code, reason = "vector loads and stores on raw memory")]

mod avx2;
mod avx512;

use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};

use super::{LINE, Operands};
use crate::DType;
use crate::memory::copy::AHEAD;
use crate::memory::simd_limit::{Simd, allows};

/// Elements per iteration of a kernel.
const GROUP: usize = 32;

/// Kernels that this processor supports, for `f32`, `f16` and `bf16`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Width([Kernel; 3]);

type Kernel = unsafe fn(&Operands<'_>, Option<f32>, usize) -> usize;

impl Width {
    /// The widest that the processor has and [`simd_limit`](crate::memory::simd_limit) allows.
    pub(super) fn best() -> Option<Self> {
        let avx512 = || allows(Simd::Avx512).then(Self::avx512).flatten();
        let avx2 = || allows(Simd::Avx2).then(Self::avx2).flatten();
        avx512().or_else(avx2)
    }

    fn avx512() -> Option<Self> {
        let kernels: [Kernel; 3] = [avx512::sum_f32, avx512::sum_f16, avx512::sum_bf16];
        is_x86_feature_detected!("avx512f").then_some(Self(kernels))
    }

    fn avx2() -> Option<Self> {
        let found = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c");
        found.then_some(Self([avx2::sum_f32, avx2::sum_f16, avx2::sum_bf16]))
    }

    /// Sums whole groups from byte `start` on, and returns the number of bytes summed; 0 if there
    /// is no kernel for the type.
    pub(super) fn sum(
        self,
        dtype: DType,
        operands: &Operands<'_>,
        scale: Option<f32>,
        start: usize,
    ) -> usize {
        let [f32, f16, bf16] = self.0;
        let kernel = match dtype {
            DType::F32 => f32,
            DType::F16 => f16,
            DType::Bf16 => bf16,
            _ => return 0,
        };
        // SAFETY: a `Width` is made from detected features only, so the processor has them.
        unsafe { kernel(operands, scale, start) }
    }
}

/// Prefetches bytes at distance [`AHEAD`] from `source`.
#[inline(always)]
fn prefetch(source: *const u8, bytes: usize) {
    for line in (AHEAD..AHEAD + bytes).step_by(LINE) {
        // SAFETY: a prefetch is a hint that is valid for any address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(source.wrapping_add(line).cast()) };
    }
}

/// Defines a kernel in a module that has `LANES`, `splat`, `add`, `mul`, `canonical`, and the named
/// conversions from `LANES` elements in a vector of type `$raw` to `f32` and back.
macro_rules! kernel {
    ($kernel:ident, $instance:ident, $features:literal, $raw:ty, $widen:ident, $narrow:ident) => {
        #[target_feature(enable = $features)]
        pub(super) fn $kernel(operands: &Operands<'_>, scale: Option<f32>, start: usize) -> usize {
            // Separate arguments, not inlined, tell the compiler that stores do not change the
            // spans.
            let Operands { outs, sources, prefix, ranks } = *operands;
            match (prefix, ranks) {
                (None, Some(_)) => $instance::<false>(outs, sources, None, false, scale, start),
                _ => $instance::<true>(outs, sources, prefix, ranks.is_none(), scale, start),
            }
        }

        /// `PART`: there is a prefix, or the result is a partial one.
        #[target_feature(enable = $features)]
        #[inline(never)]
        fn $instance<const PART: bool>(
            outs: &[Span<'_>],
            sources: &[Span<'_>],
            prefix: Option<Span<'_>>,
            is_partial: bool,
            scale: Option<f32>,
            start: usize,
        ) -> usize {
            const VECTORS: usize = GROUP / LANES;
            const BYTES: usize = VECTORS * size_of::<$raw>();
            const WIDER: usize = size_of::<Wide>() / size_of::<$raw>();
            let (prefix, is_partial) = (prefix.filter(|_| PART), PART && is_partial);
            let (first, others) = sources.split_first().expect("at least one source");
            let bytes = (first.len() - start) / BYTES * BYTES;
            let end = start + bytes;
            let fit = |spans: &[Span<'_>], wider| spans.iter().all(|s| s.len() >= wider * end);
            let out_wider = if is_partial { WIDER } else { 1 };
            let fits = fit(sources, 1) && fit(outs, out_wider);
            assert!(fits && fit(prefix.as_slice(), WIDER), "the spans are long enough");
            let scale = scale.map(|scale| splat(scale));
            for offset in (start..end).step_by(BYTES) {
                let at = |span: &Span<'_>, vector: usize, wider: usize| {
                    span.ptr().wrapping_add(wider * (offset + vector * size_of::<$raw>()))
                };
                sources.iter().for_each(|source| super::prefetch(at(source, 0, 1), BYTES));
                let mut sums = [splat(0.0); VECTORS];
                for (vector, sum) in sums.iter_mut().enumerate() {
                    // SAFETY: offset + `VECTORS` vectors <= end <= the span's length.
                    let raw = unsafe { at(first, vector, 1).cast::<$raw>().read_unaligned() };
                    *sum = $widen(raw);
                    if let Some(prefix) = &prefix {
                        let before = at(prefix, vector, WIDER);
                        // SAFETY: as above; the span has `WIDER * end` bytes.
                        let before = unsafe { before.cast::<Wide>().read_unaligned() };
                        *sum = add(before, *sum);
                    }
                }
                for source in others {
                    for (vector, sum) in sums.iter_mut().enumerate() {
                        let from = at(source, vector, 1);
                        // SAFETY: as above, for every source.
                        let raw = unsafe { from.cast::<$raw>().read_unaligned() };
                        *sum = add(*sum, $widen(raw));
                    }
                }
                for sum in &mut sums {
                    *sum = canonical(scale.map_or(*sum, |scale| mul(*sum, scale)));
                }
                for out in outs {
                    for (vector, &sum) in sums.iter().enumerate() {
                        let to = at(out, vector, out_wider);
                        if is_partial {
                            // SAFETY: as above, for every out; it has `WIDER * end` bytes.
                            unsafe { to.cast::<Wide>().write_unaligned(sum) };
                            continue;
                        }
                        let raw = $narrow(sum);
                        // SAFETY: as above, for every out.
                        unsafe { to.cast::<$raw>().write_unaligned(raw) };
                    }
                }
            }
            bytes
        }
    };
}

use kernel;

#[cfg(test)]
mod tests {
    use half::{bf16, f16};
    use proptest::prelude::*;

    use super::*;
    use crate::memory::Span;
    use crate::simd::scalar::{Float, fold_float};
    use crate::{DType, ReduceOp};

    fn span<T>(data: &mut [T]) -> Span<'_> {
        // SAFETY: the borrow lasts as long as the span.
        unsafe { Span::new(data.as_mut_ptr().cast(), size_of_val(data)) }
    }

    /// Compares both implementations on the same numbers, unaligned by `skip` elements.
    fn agree<T: Float>(ranks: &[Vec<T>], skip: usize, op: ReduceOp, bits: impl Fn(T) -> u64) {
        let mut ranks = ranks.to_vec();
        let count = ranks[0].len() - skip;
        let sources: Vec<_> = ranks.iter_mut().map(|data| span(&mut data[skip..])).collect();
        let [mut ours, mut also, mut plain] = [const { Vec::new() }; 3];
        for out in [&mut ours, &mut also, &mut plain] {
            *out = vec![T::default(); count];
        }
        let (sources, prefix, ranks) = (&*sources, None, Some(sources.len()));
        let outs = &[span(&mut plain)];
        let operands = Operands { outs, sources, prefix, ranks };
        fold_float::<T>(op, &operands, 0..count * size_of::<T>());
        let scale = (op == ReduceOp::Avg).then(|| 1.0 / sources.len() as f32);
        for width in [Width::avx512(), Width::avx2()].into_iter().flatten() {
            ours.fill(T::default());
            also.fill(T::default());
            let outs = &[span(&mut ours), span(&mut also)];
            let operands = Operands { outs, sources, prefix, ranks };
            let done = width.sum(T::DTYPE, &operands, scale, 0) / size_of::<T>();
            assert_eq!(done, count / GROUP * GROUP);
            for (i, &expected) in plain.iter().enumerate() {
                // Elements that the kernel does not process are unchanged.
                let expected = bits(if i < done { expected } else { T::default() });
                let got = [bits(ours[i]), bits(also[i])];
                assert_eq!(got, [expected; 2], "{width:?}: {op} of {} at {i}", T::DTYPE);
            }
        }
    }

    fn agree_all(ranks: &[Vec<u32>], skip: usize) {
        let cast = |f: &dyn Fn(u32) -> f32| -> Vec<Vec<f32>> {
            ranks.iter().map(|rank| rank.iter().map(|&x| f(x)).collect()).collect()
        };
        let halves = |x: u32| (x >> 16) as u16;
        for op in [ReduceOp::Sum, ReduceOp::Avg] {
            agree(&cast(&f32::from_bits), skip, op, |x| x.to_bits().into());
            let f16s: Vec<Vec<f16>> = ranks
                .iter()
                .map(|rank| rank.iter().map(|&x| f16::from_bits(halves(x))).collect())
                .collect();
            agree(&f16s, skip, op, |x| x.to_bits().into());
            let bf16s: Vec<Vec<bf16>> = ranks
                .iter()
                .map(|rank| rank.iter().map(|&x| bf16::from_bits(halves(x))).collect())
                .collect();
            agree(&bf16s, skip, op, |x| x.to_bits().into());
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn equals_the_scalar_rule(
            ranks in (1_usize..5, 1_usize..200).prop_flat_map(|(n, count)| {
                prop::collection::vec(prop::collection::vec(any::<u32>(), count), n)
            }),
            skip in 0_usize..9,
        ) {
            agree_all(&ranks, skip.min(ranks[0].len()));
        }
    }

    #[test]
    fn equals_the_scalar_rule_for_every_half() {
        let all: Vec<u32> = (0..=0xffff_u32).map(|x| x << 16).collect();
        let mut turned = all.clone();
        turned.rotate_left(12_345);
        agree_all(std::slice::from_ref(&all), 0);
        agree_all(&[all, turned], 0);
    }

    #[test]
    fn large_buffers_from_any_byte_on_equal_the_scalar_rule() {
        let numbers: Vec<f32> = (0..crate::simd::LARGE as u32).map(|i| i as f32 * 0.37).collect();
        let mut sources = [numbers.clone(), numbers];
        sources[1].rotate_left(4321);
        let bytes = sources[0].len() * 4 - 64;
        for at in [0, 4, 12, 15, 33, 60] {
            let spans = sources.each_mut().map(|data| span(data).part(at, bytes));
            let [mut ours, mut plain] = [const { Vec::new() }; 2];
            for out in [&mut ours, &mut plain] {
                *out = vec![0.0_f32; bytes / 4 + 16];
            }
            let out = span(&mut ours).part(64 - at, bytes);
            crate::simd::fold(DType::F32, ReduceOp::Sum, &[out], &spans);
            let outs = &[span(&mut plain).part(64 - at, bytes)];
            let operands = Operands { outs, sources: &spans, prefix: None, ranks: Some(2) };
            fold_float::<f32>(ReduceOp::Sum, &operands, 0..bytes);
            assert!(ours.iter().zip(&plain).all(|(a, b)| a.to_bits() == b.to_bits()), "{at}");
        }
    }

    #[test]
    fn sums_of_halves_round_once() {
        let mut ranks: Vec<Vec<f16>> = vec![vec![f16::ONE; 40]; 8];
        ranks[0].fill(f16::from_f32(2048.0));
        let sources: Vec<_> = ranks.iter_mut().map(|data| span(data)).collect();
        let mut out = [f16::ZERO; 40];
        crate::simd::fold(DType::F16, ReduceOp::Sum, &[span(&mut out)], &sources);
        // 2048 + 7 = 2055 lies between 2054 and 2056; adding one by one would stay at 2048.
        assert_eq!(out, [f16::from_f32(2056.0); 40]);
    }
}
