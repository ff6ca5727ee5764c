//! Sums with eight numbers per vector.

use std::arch::x86_64::{
    __m128i, __m256, _CMP_UNORD_Q, _MM_FROUND_TO_NEAREST_INT, _mm256_add_epi32,
    _mm256_add_ps as add, _mm256_and_si256, _mm256_blendv_ps, _mm256_castps_si256,
    _mm256_castsi256_ps, _mm256_castsi256_si128, _mm256_cmp_ps, _mm256_cvtepu16_epi32,
    _mm256_cvtph_ps as widen_f16, _mm256_cvtps_ph, _mm256_mul_ps as mul, _mm256_packus_epi32,
    _mm256_permute4x64_epi64, _mm256_set1_epi32, _mm256_set1_ps as splat, _mm256_slli_epi32,
    _mm256_srli_epi32,
};
use std::convert::identity;

use super::{GROUP, Operands, kernel};
use crate::memory::Span;

type Wide = __m256;
const LANES: usize = 8;

kernel!(sum_f32, add_f32, "avx2,f16c", __m256, identity, identity);
kernel!(sum_f16, add_f16, "avx2,f16c", __m128i, widen_f16, narrow_f16);
kernel!(sum_bf16, add_bf16, "avx2,f16c", __m128i, widen_bf16, narrow_bf16);

/// Any NaN becomes the positive quiet NaN without payload.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn canonical(x: __m256) -> __m256 {
    _mm256_blendv_ps(x, splat(f32::NAN), _mm256_cmp_ps::<_CMP_UNORD_Q>(x, x))
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn narrow_f16(x: __m256) -> __m128i {
    _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x)
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn widen_bf16(halves: __m128i) -> __m256 {
    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(halves)))
}

/// Rounds to nearest even by adding 0x7fff, plus 1 if the kept part is odd. The only NaN passed
/// here is the canonical one, which does not overflow.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn narrow_bf16(x: __m256) -> __m128i {
    let bits = _mm256_castps_si256(x);
    let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
    let bias = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
    let kept = _mm256_srli_epi32::<16>(_mm256_add_epi32(bits, bias));
    // Packs each 128-bit lane to 64 bits, then moves the two halves together.
    let packed = _mm256_permute4x64_epi64::<0b1000>(_mm256_packus_epi32(kept, kept));
    _mm256_castsi256_si128(packed)
}
