//! Sums with sixteen numbers per vector, a cache line of `f32`.

use std::arch::x86_64::{
    __m256i, __m512, _CMP_UNORD_Q, _MM_FROUND_TO_NEAREST_INT, _mm256_loadu_si256,
    _mm256_storeu_si256, _mm512_add_epi32, _mm512_add_ps as add, _mm512_and_si512,
    _mm512_castps_si512, _mm512_castsi512_ps, _mm512_cmp_ps_mask, _mm512_cvtepi32_epi16,
    _mm512_cvtepu16_epi32, _mm512_cvtph_ps, _mm512_cvtps_ph, _mm512_loadu_ps, _mm512_mask_mov_ps,
    _mm512_mul_ps as mul, _mm512_set1_epi32, _mm512_set1_ps as splat, _mm512_slli_epi32,
    _mm512_srli_epi32, _mm512_storeu_ps,
};

use super::{GROUP, kernel};
use crate::span::Span;

const LANES: usize = 16;

kernel!(sum_f32, "avx512f", 4, load_f32, store_f32);
kernel!(sum_f16, "avx512f", 2, load_f16, store_f16);
kernel!(sum_bf16, "avx512f", 2, load_bf16, store_bf16);

/// Any NaN becomes the positive quiet NaN without payload.
#[inline]
#[target_feature(enable = "avx512f")]
fn canonical(x: __m512) -> __m512 {
    _mm512_mask_mov_ps(x, _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, x), splat(f32::NAN))
}

/// # Safety
///
/// `ptr` is good for reading 64 bytes.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn load_f32(ptr: *mut u8) -> __m512 {
    // SAFETY: required of the caller; the load is unaligned.
    unsafe { _mm512_loadu_ps(ptr.cast()) }
}

/// # Safety
///
/// `ptr` is good for writing 64 bytes.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn store_f32(ptr: *mut u8, x: __m512) {
    // SAFETY: required of the caller; the store is unaligned.
    unsafe { _mm512_storeu_ps(ptr.cast(), x) };
}

/// # Safety
///
/// `ptr` is good for reading 32 bytes.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn load_16(ptr: *mut u8) -> __m256i {
    // SAFETY: required of the caller; the load is unaligned.
    unsafe { _mm256_loadu_si256(ptr.cast()) }
}

/// # Safety
///
/// `ptr` is good for writing 32 bytes.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn store_16(ptr: *mut u8, x: __m256i) {
    // SAFETY: required of the caller; the store is unaligned.
    unsafe { _mm256_storeu_si256(ptr.cast(), x) };
}

/// # Safety
///
/// Same as [`load_16`].
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn load_f16(ptr: *mut u8) -> __m512 {
    // SAFETY: required of the caller.
    _mm512_cvtph_ps(unsafe { load_16(ptr) })
}

/// # Safety
///
/// Same as [`store_16`].
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn store_f16(ptr: *mut u8, x: __m512) {
    let rounded = _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x);
    // SAFETY: required of the caller.
    unsafe { store_16(ptr, rounded) };
}

/// # Safety
///
/// Same as [`load_16`].
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn load_bf16(ptr: *mut u8) -> __m512 {
    // SAFETY: required of the caller.
    let halves = unsafe { load_16(ptr) };
    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(halves)))
}

/// Rounds as [`super::avx2`] does.
///
/// # Safety
///
/// Same as [`store_16`].
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn store_bf16(ptr: *mut u8, x: __m512) {
    let bits = _mm512_castps_si512(x);
    let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
    let bias = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
    let kept = _mm512_srli_epi32::<16>(_mm512_add_epi32(bits, bias));
    let rounded = _mm512_cvtepi32_epi16(kept);
    // SAFETY: required of the caller.
    unsafe { store_16(ptr, rounded) };
}
