//! The scalar loops compiled for AVX2 and AVX-512, and f16 conversion by F16C and AVX-512.
//!
//! [`Kernel::run`], or for AVX-512 [`Kernel::run_wide`], is inlined into a function with wider
//! registers enabled, and the compiler vectorizes it. Rust never contracts `a * b + c` into a fused
//! multiply-add, so the bits are those of the scalar loop. f16 is converted eight or 32 at a time,
//! rounded to nearest even, subnormals kept, NaNs made quiet, with the bits of the `half` crate.
//!
//! Invariant: an [`Isa`] exists only if this processor has its instructions; its constructors
//! detect them.

#![expect(unsafe_code, reason = "instructions detected at run time; unaligned loads and stores")]

use std::arch::x86_64::{
    _MM_FROUND_TO_NEAREST_INT, _MM_HINT_T0, _mm_loadu_si128, _mm_prefetch, _mm_storeu_si128,
    _mm256_cvtph_ps, _mm256_cvtps_ph, _mm256_loadu_ps, _mm256_loadu_si256, _mm256_storeu_ps,
    _mm512_castsi256_si512, _mm512_cvtph_ps, _mm512_cvtps_ph, _mm512_inserti64x4, _mm512_loadu_ps,
    _mm512_storeu_ps, _mm512_storeu_si512,
};

use half::f16;
use half::slice::HalfFloatSliceExt;

use super::Kernel;
use super::simd_limit::{Simd, allows};

/// Token: this processor supports wider instructions than the build assumes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Isa(Width);

#[derive(Clone, Copy, Debug)]
enum Width {
    Avx2,
    Avx512,
}

impl Isa {
    /// The widest that the processor has and [`simd_limit`](super::simd_limit) allows; `std` caches
    /// the detection.
    #[inline]
    pub(super) fn detect() -> Option<Self> {
        let avx512 = || allows(Simd::Avx512).then(Self::avx512).flatten();
        let avx2 = || allows(Simd::Avx2).then(Self::avx2).flatten();
        avx512().or_else(avx2)
    }

    /// Instruction sets of this processor, the widest last.
    #[cfg(test)]
    pub(super) fn all() -> impl Iterator<Item = Self> {
        [Self::avx2(), Self::avx512()].into_iter().flatten()
    }

    #[inline]
    fn avx2() -> Option<Self> {
        let found = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c");
        found.then_some(Self(Width::Avx2))
    }

    #[inline]
    fn avx512() -> Option<Self> {
        let found = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl");
        found.then_some(Self(Width::Avx512))
    }

    /// Runs a loop with these instructions.
    pub(super) fn run<K: Kernel>(self, kernel: K) -> K::Output {
        match self.0 {
            // SAFETY: `Self::avx2` made this value, so the processor has AVX2 and F16C.
            Width::Avx2 => unsafe { with_avx2(kernel) },
            // SAFETY: `Self::avx512` made this value, so the processor has AVX-512 F, BW and VL.
            Width::Avx512 => unsafe { with_avx512(kernel) },
        }
    }

    /// Converts the leading whole registers of two slices of equal length; returns the number of
    /// elements converted.
    pub(super) fn widen(self, input: &[f16], output: &mut [f32]) -> usize {
        match self.0 {
            // SAFETY: `Self::avx2` made this value, so the processor has AVX2 and F16C.
            Width::Avx2 => unsafe { widen8(input.reinterpret_cast(), output) },
            // SAFETY: `Self::avx512` made this value, so the processor has AVX-512 F.
            Width::Avx512 => unsafe { widen16(input.reinterpret_cast(), output) },
        }
    }

    /// As [`widen`](Self::widen), to f16.
    pub(super) fn narrow(self, input: &[f32], output: &mut [f16]) -> usize {
        match self.0 {
            // SAFETY: `Self::avx2` made this value, so the processor has AVX2 and F16C.
            Width::Avx2 => unsafe { narrow8(input, output.reinterpret_cast_mut()) },
            // SAFETY: `Self::avx512` made this value, so the processor has AVX-512 F.
            Width::Avx512 => unsafe { narrow32(input, output.reinterpret_cast_mut()) },
        }
    }
}

/// Prefetches a cache line.
#[inline(always)]
pub(super) fn prefetch(address: *const f32) {
    // SAFETY: a hint; it accesses no memory, whatever the address.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) };
}

#[target_feature(enable = "avx2")]
fn with_avx2<K: Kernel>(kernel: K) -> K::Output {
    kernel.run()
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn with_avx512<K: Kernel>(kernel: K) -> K::Output {
    kernel.run_wide()
}

#[target_feature(enable = "avx2,f16c")]
fn widen8(input: &[u16], output: &mut [f32]) -> usize {
    let (input, output) = (input.as_chunks::<8>().0, output.as_chunks_mut::<8>().0);
    for (x, y) in input.iter().zip(&mut *output) {
        // SAFETY: reads 16 bytes, the array's; the load needs no alignment.
        let halves = unsafe { _mm_loadu_si128(x.as_ptr().cast()) };
        let wide = _mm256_cvtph_ps(halves);
        // SAFETY: writes 32 bytes, the array's; the store needs no alignment.
        unsafe { _mm256_storeu_ps(y.as_mut_ptr(), wide) };
    }
    8 * output.len()
}

#[target_feature(enable = "avx512f")]
fn widen16(input: &[u16], output: &mut [f32]) -> usize {
    let (input, output) = (input.as_chunks::<16>().0, output.as_chunks_mut::<16>().0);
    for (x, y) in input.iter().zip(&mut *output) {
        // SAFETY: reads 32 bytes, the array's; the load needs no alignment.
        let halves = unsafe { _mm256_loadu_si256(x.as_ptr().cast()) };
        let wide = _mm512_cvtph_ps(halves);
        // SAFETY: writes 64 bytes, the array's; the store needs no alignment.
        unsafe { _mm512_storeu_ps(y.as_mut_ptr(), wide) };
    }
    16 * output.len()
}

#[target_feature(enable = "avx2,f16c")]
fn narrow8(input: &[f32], output: &mut [u16]) -> usize {
    let (input, output) = (input.as_chunks::<8>().0, output.as_chunks_mut::<8>().0);
    for (x, y) in input.iter().zip(&mut *output) {
        // SAFETY: reads 32 bytes, the array's; the load needs no alignment.
        let wide = unsafe { _mm256_loadu_ps(x.as_ptr()) };
        let halves = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(wide);
        // SAFETY: writes 16 bytes, the array's; the store needs no alignment.
        unsafe { _mm_storeu_si128(y.as_mut_ptr().cast(), halves) };
    }
    8 * output.len()
}

/// Stores the halves of two registers at once: `vcvtps2ph` to memory is slower than to a register.
#[target_feature(enable = "avx512f")]
fn narrow32(input: &[f32], output: &mut [u16]) -> usize {
    let (input, output) = (input.as_chunks::<32>().0, output.as_chunks_mut::<32>().0);
    for (x, y) in input.iter().zip(&mut *output) {
        let halves = [0, 16].map(|at| {
            // SAFETY: reads 64 bytes of the array's 128; the load needs no alignment.
            let wide = unsafe { _mm512_loadu_ps(x[at..].as_ptr()) };
            _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(wide)
        });
        let both = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(halves[0]), halves[1]);
        // SAFETY: writes 64 bytes, the array's; the store needs no alignment.
        unsafe { _mm512_storeu_si512(y.as_mut_ptr().cast(), both) };
    }
    32 * output.len()
}
