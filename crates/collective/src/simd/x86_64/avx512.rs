//! Sums with sixteen numbers per vector, a cache line of `f32`.

use std::arch::x86_64::{
    __m256i, __m512, _CMP_UNORD_Q, _MM_FROUND_TO_NEAREST_INT, _mm512_add_epi32,
    _mm512_add_ps as add, _mm512_and_si512, _mm512_castps_si512, _mm512_castsi512_ps,
    _mm512_cmp_ps_mask, _mm512_cvtepi32_epi16, _mm512_cvtepu16_epi32, _mm512_cvtph_ps as widen_f16,
    _mm512_cvtps_ph, _mm512_mask_mov_ps, _mm512_mul_ps as mul, _mm512_set1_epi32,
    _mm512_set1_ps as splat, _mm512_slli_epi32, _mm512_srli_epi32,
};
use std::convert::identity;

use super::{GROUP, Operands, kernel};
use crate::memory::Span;

type Wide = __m512;
const LANES: usize = 16;

kernel!(sum_f32, add_f32, "avx512f", __m512, identity, identity);
kernel!(sum_f16, add_f16, "avx512f", __m256i, widen_f16, narrow_f16);
kernel!(sum_bf16, add_bf16, "avx512f", __m256i, widen_bf16, narrow_bf16);

/// Any NaN becomes the positive quiet NaN without payload.
#[inline]
#[target_feature(enable = "avx512f")]
fn canonical(x: __m512) -> __m512 {
    _mm512_mask_mov_ps(x, _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, x), splat(f32::NAN))
}

#[inline]
#[target_feature(enable = "avx512f")]
fn narrow_f16(x: __m512) -> __m256i {
    _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x)
}

#[inline]
#[target_feature(enable = "avx512f")]
fn widen_bf16(halves: __m256i) -> __m512 {
    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(halves)))
}

/// Rounds like [`super::avx2`].
#[inline]
#[target_feature(enable = "avx512f")]
fn narrow_bf16(x: __m512) -> __m256i {
    let bits = _mm512_castps_si512(x);
    let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
    let bias = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
    let kept = _mm512_srli_epi32::<16>(_mm512_add_epi32(bits, bias));
    _mm512_cvtepi32_epi16(kept)
}
