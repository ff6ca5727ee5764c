//! Sums with eight numbers per vector.

use std::arch::x86_64::{
    __m128i, __m256, _CMP_UNORD_Q, _MM_FROUND_TO_NEAREST_INT, _mm_loadu_si128, _mm_storeu_si128,
    _mm256_add_epi32, _mm256_add_ps as add, _mm256_and_si256, _mm256_blendv_ps,
    _mm256_castps_si256, _mm256_castsi256_ps, _mm256_castsi256_si128, _mm256_cmp_ps,
    _mm256_cvtepu16_epi32, _mm256_cvtph_ps, _mm256_cvtps_ph, _mm256_loadu_ps, _mm256_mul_ps as mul,
    _mm256_packus_epi32, _mm256_permute4x64_epi64, _mm256_set1_epi32, _mm256_set1_ps as splat,
    _mm256_slli_epi32, _mm256_srli_epi32, _mm256_storeu_ps,
};

use super::{GROUP, kernel};
use crate::span::Span;

const LANES: usize = 8;

kernel!(sum_f32, "avx2,f16c", 4, load_f32, store_f32);
kernel!(sum_f16, "avx2,f16c", 2, load_f16, store_f16);
kernel!(sum_bf16, "avx2,f16c", 2, load_bf16, store_bf16);

/// Any NaN becomes the positive quiet NaN without payload.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn canonical(x: __m256) -> __m256 {
    _mm256_blendv_ps(x, splat(f32::NAN), _mm256_cmp_ps::<_CMP_UNORD_Q>(x, x))
}

/// # Safety
///
/// `ptr` is good for reading 32 bytes.
#[inline]
#[target_feature(enable = "avx2,f16c")]
unsafe fn load_f32(ptr: *mut u8) -> __m256 {
    // SAFETY: required of the caller; the load is unaligned.
    unsafe { _mm256_loadu_ps(ptr.cast()) }
}

/// # Safety
///
/// `ptr` is good for writing 32 bytes.
#[inline]
#[target_feature(enable = "avx2,f16c")]
unsafe fn store_f32(ptr: *mut u8, x: __m256) {
    // SAFETY: required of the caller; the store is unaligned.
    unsafe { _mm256_storeu_ps(ptr.cast(), x) };
}

/// # Safety
///
/// `ptr` is good for reading 16 bytes.
#[inline]
#[target_feature(enable = "avx2,f16c")]
unsafe fn load_16(ptr: *mut u8) -> __m128i {
    // SAFETY: required of the caller; the load is unaligned.
    unsafe { _mm_loadu_si128(ptr.cast()) }
}

/// # Safety
///
/// `ptr` is good for writing 16 bytes.
#[inline]
#[target_feature(enable = "avx2,f16c")]
unsafe fn store_16(ptr: *mut u8, x: __m128i) {
    // SAFETY: required of the caller; the store is unaligned.
    unsafe { _mm_storeu_si128(ptr.cast(), x) };
}

/// # Safety
///
/// Same as [`load_16`].
#[inline]
#[target_feature(enable = "avx2,f16c")]
unsafe fn load_f16(ptr: *mut u8) -> __m256 {
    // SAFETY: required of the caller.
    _mm256_cvtph_ps(unsafe { load_16(ptr) })
}

/// # Safety
///
/// Same as [`store_16`].
#[inline]
#[target_feature(enable = "avx2,f16c")]
unsafe fn store_f16(ptr: *mut u8, x: __m256) {
    let rounded = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x);
    // SAFETY: required of the caller.
    unsafe { store_16(ptr, rounded) };
}

/// # Safety
///
/// Same as [`load_16`].
#[inline]
#[target_feature(enable = "avx2,f16c")]
unsafe fn load_bf16(ptr: *mut u8) -> __m256 {
    // SAFETY: required of the caller.
    let halves = unsafe { load_16(ptr) };
    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(halves)))
}

/// Rounds to nearest even by adding 0x7fff, plus 1 if the kept part is odd. The canonical NaN, the
/// only one that comes here, does not overflow by this.
///
/// # Safety
///
/// Same as [`store_16`].
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
    // SAFETY: required of the caller.
    unsafe { store_16(ptr, rounded) };
}
