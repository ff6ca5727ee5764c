//! Sums of `f32`, `f16` and `bf16` with AVX2 and F16C.
//!
//! Each kernel keeps four vectors of eight `f32` sums in registers, adds the sources to them one
//! after another in rank order, scales for an average, makes any NaN the canonical one, and rounds
//! once. It does whole groups of 32 elements and returns how many bytes it did; the scalar
//! definition does the rest. Bit for bit the scalar rule: the same IEEE additions and roundings in
//! the same order.

#![expect(unsafe_code, reason = "vector loads and stores on raw memory")]

use std::arch::x86_64::{
    __m128i, __m256, _CMP_UNORD_Q, _MM_FROUND_TO_NEAREST_INT, _mm_loadu_si128, _mm_storeu_si128,
    _mm256_add_epi32, _mm256_add_ps, _mm256_and_si256, _mm256_blendv_ps, _mm256_castps_si256,
    _mm256_castsi256_ps, _mm256_castsi256_si128, _mm256_cmp_ps, _mm256_cvtepu16_epi32,
    _mm256_cvtph_ps, _mm256_cvtps_ph, _mm256_loadu_ps, _mm256_mul_ps, _mm256_packus_epi32,
    _mm256_permute4x64_epi64, _mm256_set1_epi32, _mm256_set1_ps, _mm256_slli_epi32,
    _mm256_srli_epi32, _mm256_storeu_ps,
};

use crate::span::Span;

/// Elements of one vector of sums.
const LANES: usize = 8;
/// Elements of one round of a kernel.
const GROUP: usize = 4 * LANES;

/// Proof that the processor has AVX2 and F16C.
#[derive(Clone, Copy)]
pub(super) struct Avx2(());

impl Avx2 {
    pub(super) fn detect() -> Option<Self> {
        let found = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c");
        found.then_some(Self(()))
    }
}

macro_rules! kernel {
    ($method:ident, $kernel:ident, $size:literal, $load:ident, $store:ident) => {
        impl Avx2 {
            /// Sums whole groups, and returns the bytes done.
            pub(super) fn $method(
                self,
                out: Span<'_>,
                sources: &[Span<'_>],
                scale: Option<f32>,
            ) -> usize {
                // SAFETY: `self` proves that the processor has the features.
                unsafe { $kernel(out, sources, scale) }
            }
        }

        #[target_feature(enable = "avx2,f16c")]
        fn $kernel(out: Span<'_>, sources: &[Span<'_>], scale: Option<f32>) -> usize {
            let bytes = out.len() / (GROUP * $size) * (GROUP * $size);
            assert!(sources.iter().all(|source| source.len() >= bytes), "sources reach as far");
            let (first, others) = sources.split_first().expect("at least one source");
            let scale = scale.map(|scale| _mm256_set1_ps(scale));
            for offset in (0..bytes).step_by(GROUP * $size) {
                let at = |span: Span<'_>, vector: usize| {
                    span.ptr().wrapping_add(offset + vector * LANES * $size)
                };
                let mut sums = [_mm256_set1_ps(0.0); 4];
                for (vector, sum) in sums.iter_mut().enumerate() {
                    // SAFETY: offset + 4 vectors <= bytes <= the span's length.
                    *sum = unsafe { $load(at(*first, vector)) };
                }
                for source in others {
                    for (vector, sum) in sums.iter_mut().enumerate() {
                        // SAFETY: as above, for every source.
                        let addend = unsafe { $load(at(*source, vector)) };
                        *sum = _mm256_add_ps(*sum, addend);
                    }
                }
                for (vector, sum) in sums.into_iter().enumerate() {
                    let sum = scale.map_or(sum, |scale| _mm256_mul_ps(sum, scale));
                    // SAFETY: as above, for `out`.
                    unsafe { $store(at(out, vector), canonical(sum)) };
                }
            }
            bytes
        }
    };
}

kernel!(sum_f32, kernel_f32, 4, load_f32, store_f32);
kernel!(sum_f16, kernel_f16, 2, load_f16, store_f16);
kernel!(sum_bf16, kernel_bf16, 2, load_bf16, store_bf16);

/// Any NaN becomes the positive quiet NaN without payload.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn canonical(x: __m256) -> __m256 {
    _mm256_blendv_ps(x, _mm256_set1_ps(f32::NAN), _mm256_cmp_ps::<_CMP_UNORD_Q>(x, x))
}

/// # Safety
///
/// `ptr` is good for reading 32 bytes.
#[inline]
#[target_feature(enable = "avx2,f16c")]
unsafe fn load_f32(ptr: *mut u8) -> __m256 {
    // SAFETY: the caller's promise; the load is unaligned.
    unsafe { _mm256_loadu_ps(ptr.cast()) }
}

/// # Safety
///
/// `ptr` is good for writing 32 bytes.
#[inline]
#[target_feature(enable = "avx2,f16c")]
unsafe fn store_f32(ptr: *mut u8, x: __m256) {
    // SAFETY: the caller's promise; the store is unaligned.
    unsafe { _mm256_storeu_ps(ptr.cast(), x) };
}

/// # Safety
///
/// `ptr` is good for reading 16 bytes.
#[inline]
#[target_feature(enable = "avx2,f16c")]
unsafe fn load_16(ptr: *mut u8) -> __m128i {
    // SAFETY: the caller's promise; the load is unaligned.
    unsafe { _mm_loadu_si128(ptr.cast()) }
}

/// # Safety
///
/// `ptr` is good for writing 16 bytes.
#[inline]
#[target_feature(enable = "avx2,f16c")]
unsafe fn store_16(ptr: *mut u8, x: __m128i) {
    // SAFETY: the caller's promise; the store is unaligned.
    unsafe { _mm_storeu_si128(ptr.cast(), x) };
}

/// # Safety
///
/// As [`load_16`].
#[inline]
#[target_feature(enable = "avx2,f16c")]
unsafe fn load_f16(ptr: *mut u8) -> __m256 {
    // SAFETY: the caller's promise.
    _mm256_cvtph_ps(unsafe { load_16(ptr) })
}

/// # Safety
///
/// As [`store_16`].
#[inline]
#[target_feature(enable = "avx2,f16c")]
unsafe fn store_f16(ptr: *mut u8, x: __m256) {
    let rounded = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x);
    // SAFETY: the caller's promise.
    unsafe { store_16(ptr, rounded) };
}

/// # Safety
///
/// As [`load_16`].
#[inline]
#[target_feature(enable = "avx2,f16c")]
unsafe fn load_bf16(ptr: *mut u8) -> __m256 {
    // SAFETY: the caller's promise.
    let halves = unsafe { load_16(ptr) };
    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(halves)))
}

/// Rounds to nearest even by adding 0x7fff, plus 1 if the kept part is odd. The canonical NaN, the
/// only one that comes here, does not overflow by this.
///
/// # Safety
///
/// As [`store_16`].
#[inline]
#[target_feature(enable = "avx2,f16c")]
unsafe fn store_bf16(ptr: *mut u8, x: __m256) {
    let bits = _mm256_castps_si256(x);
    let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
    let bias = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
    let kept = _mm256_srli_epi32::<16>(_mm256_add_epi32(bits, bias));
    // Packs each 128-bit lane to 64 bits, then brings the two that count together.
    let packed = _mm256_permute4x64_epi64::<0b1000>(_mm256_packus_epi32(kept, kept));
    let rounded = _mm256_castsi256_si128(packed);
    // SAFETY: the caller's promise.
    unsafe { store_16(ptr, rounded) };
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};
    use proptest::prelude::*;

    use super::*;
    use crate::simd::scalar::{Float, fold_float};
    use crate::{DType, ReduceOp};

    fn span<T>(data: &mut [T]) -> Span<'_> {
        // SAFETY: the borrow lasts as long as the span.
        unsafe { Span::new(data.as_mut_ptr().cast(), size_of_val(data)) }
    }

    /// Both ways over the same numbers, unaligned by `skip` elements.
    fn agree<T: Float>(ranks: &[Vec<T>], skip: usize, op: ReduceOp, bits: impl Fn(T) -> u64) {
        let mut ranks = ranks.to_vec();
        let count = ranks[0].len() - skip;
        let sources: Vec<_> = ranks.iter_mut().map(|data| span(&mut data[skip..])).collect();
        let (mut ours, mut plain) = (vec![T::default(); count], vec![T::default(); count]);
        crate::simd::fold(T::DTYPE, op, span(&mut ours), &sources);
        fold_float::<T>(op, span(&mut plain), &sources, 0);
        for (i, (&a, &b)) in ours.iter().zip(&plain).enumerate() {
            assert_eq!(bits(a), bits(b), "{op} of {} at {i}", T::DTYPE);
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
    fn sums_of_halves_round_once() {
        let mut ranks: Vec<Vec<f16>> = vec![vec![f16::ONE; 40]; 8];
        ranks[0].fill(f16::from_f32(2048.0));
        let sources: Vec<_> = ranks.iter_mut().map(|data| span(data)).collect();
        let mut out = [f16::ZERO; 40];
        crate::simd::fold(DType::F16, ReduceOp::Sum, span(&mut out), &sources);
        // 2048 + 7 = 2055 lies between 2054 and 2056; adding one by one would stay at 2048.
        assert_eq!(out, [f16::from_f32(2056.0); 40]);
    }
}
