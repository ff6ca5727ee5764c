//! Memory copies with vector instructions, with cached or non-temporal stores.
//!
//! libc's `memmove` is fast for small copies and for copies larger than a core's private cache. For
//! sizes between them glibc uses `rep movsb` on x86-64. On AMD processors that is many times slower
//! than vectors if the target starts less than a vector after the source modulo a line, as a user's
//! buffer does relative to a staging buffer: see `cargo bench -p benches --bench copy`. On other
//! architectures glibc's `memmove` already uses vectors.

#![expect(unsafe_code, reason = "vector loads and stores on raw memory")]

use std::ops::Range;

use super::Span;
#[cfg(target_arch = "x86_64")]
use super::simd_limit::{Simd, allows};
use crate::Element;

/// Bytes of a cache line; a streaming store writes whole lines.
const LINE: usize = 64;
/// Sizes of copies that use `copy_avx2`: the range in which glibc uses `rep movsb`.
const BY_VECTORS: Range<usize> = 2 << 10..1 << 20;

/// Copies all of `from` to `to`, which has the same length and may overlap it.
pub(crate) fn cached(to: Span<'_>, from: Span<'_>) {
    copy::<false>(to, from);
}

/// The same to memory that another core may have read since it was last written: prefetches it for
/// writing. This is slower if the target is already in this core's cache.
pub(crate) fn cached_to_shared(to: Span<'_>, from: Span<'_>) {
    copy::<true>(to, from);
}

fn copy<const PREFETCH: bool>(to: Span<'_>, from: Span<'_>) {
    assert_eq!(to.len(), from.len(), "a copy between spans of equal length");
    #[cfg(target_arch = "x86_64")]
    if BY_VECTORS.contains(&to.len())
        && to.ptr().addr().abs_diff(from.ptr().addr()) >= to.len()
        && allows(Simd::Avx2)
        && is_x86_feature_detected!("avx2")
    {
        // SAFETY: the processor has AVX2.
        return unsafe { copy_avx2::<PREFETCH>(to, from) };
    }
    // SAFETY: both spans are alive and hold this many bytes (invariant of the type); `copy` allows
    // overlap.
    unsafe { std::ptr::copy(from.ptr(), to.ptr(), to.len()) };
}

/// Prefetches memory that another core has read, for writing; does not block.
pub(crate) fn prefetch_for_write(memory: Span<'_>) {
    #[cfg(target_arch = "x86_64")]
    for at in (0..memory.len()).step_by(LINE) {
        prefetch_line(memory.ptr().wrapping_add(at));
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = memory;
}

#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn prefetch_line(line: *const u8) {
    // SAFETY: a hint that changes no memory, and does nothing on processors that lack it.
    unsafe { std::arch::asm!("prefetchw [{}]", in(reg) line, options(nostack, preserves_flags)) };
}

/// [`cached_to_shared`] for slices, because a bucket may be one that peers read.
#[doc(hidden)]
pub fn copy_slice<T: Element>(to: &mut [T], from: &[T]) {
    let (len, size) = (size_of_val(to), size_of_val(from));
    // SAFETY: borrowed mutably for the call; the bytes are those of the elements.
    let to = unsafe { Span::new(to.as_mut_ptr().cast(), len) };
    // SAFETY: borrowed for the call, and only copied from.
    cached_to_shared(to, unsafe { Span::new(from.as_ptr().cast_mut().cast(), size) });
}

/// Prefetch distance in bytes for memory that is often in another core's cache: the target of
/// [`copy_avx2`], and the sources of a sum.
#[cfg(target_arch = "x86_64")]
pub(crate) const AHEAD: usize = 1024;
/// Bytes that [`copy_avx2`] holds in registers.
#[cfg(target_arch = "x86_64")]
const BLOCK: usize = 128;

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn copy_avx2<const PREFETCH: bool>(to: Span<'_>, from: Span<'_>) {
    use std::arch::x86_64::{_mm256_loadu_si256, _mm256_setzero_si256, _mm256_storeu_si256};
    const VECTOR: usize = 32;
    let len = to.len();
    assert!(from.len() == len && len >= 2 * BLOCK, "equal lengths, at least two blocks");
    let block = |at: usize| {
        debug_assert!(at + BLOCK <= len, "block in bounds");
        for line in (AHEAD..AHEAD + BLOCK).step_by(LINE).take_while(|_| PREFETCH) {
            prefetch_line(to.ptr().wrapping_add(at + line));
        }
        let mut parts = [_mm256_setzero_si256(); BLOCK / VECTOR];
        for (i, part) in parts.iter_mut().enumerate() {
            // SAFETY: inside of `from`, as every block is; the load is unaligned.
            *part = unsafe { _mm256_loadu_si256(from.ptr().wrapping_add(at + VECTOR * i).cast()) };
        }
        for (i, part) in parts.into_iter().enumerate() {
            // SAFETY: inside of `to`, as above; the store is unaligned.
            unsafe { _mm256_storeu_si256(to.ptr().wrapping_add(at + VECTOR * i).cast(), part) };
        }
    };
    // The first and last block are unaligned and overlap the aligned blocks between them.
    block(0);
    for at in (to.ptr().align_offset(VECTOR)..len - BLOCK).step_by(BLOCK) {
        block(at);
    }
    block(len - BLOCK);
}

/// Copies all of `from` to `to`, which has the same length and does not overlap it, with
/// non-temporal stores. The copy is visible before anything this thread publishes afterwards.
pub(crate) fn streamed(to: Span<'_>, from: Span<'_>) {
    assert_eq!(to.len(), from.len(), "a copy between spans of equal length");
    let head = to.ptr().align_offset(LINE).min(to.len());
    let body = (to.len() - head) / LINE * LINE;
    let tail = to.len() - head - body;
    cached(to.part(0, head), from.part(0, head));
    stream_lines(to.part(head, body), from.part(head, body));
    cached(to.part(head + body, tail), from.part(head + body, tail));
}

/// Copies whole cache lines with non-temporal stores.
#[cfg(target_arch = "x86_64")]
fn stream_lines(to: Span<'_>, from: Span<'_>) {
    // SAFETY: every x86-64 processor has SSE2.
    unsafe { stream_lines_sse2(to, from) };
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "sse2")]
fn stream_lines_sse2(to: Span<'_>, from: Span<'_>) {
    use std::arch::x86_64::{_mm_loadu_si128, _mm_setzero_si128, _mm_sfence, _mm_stream_si128};
    assert!(to.len() == from.len() && to.len().is_multiple_of(LINE), "equal, whole lines");
    assert!(to.ptr().addr().is_multiple_of(LINE) || to.len() == 0, "the target is line-aligned");
    for line in (0..to.len()).step_by(LINE) {
        let mut parts = [_mm_setzero_si128(); 4];
        for (i, part) in parts.iter_mut().enumerate() {
            // SAFETY: inside of `from`, by the first assertion; the load is unaligned.
            *part = unsafe { _mm_loadu_si128(from.ptr().wrapping_add(line + 16 * i).cast()) };
        }
        for (i, part) in parts.into_iter().enumerate() {
            // SAFETY: inside of `to`, and aligned, by the assertions.
            unsafe { _mm_stream_si128(to.ptr().wrapping_add(line + 16 * i).cast(), part) };
        }
    }
    // Release stores do not order earlier streaming stores; this fence does.
    _mm_sfence();
}

#[cfg(not(target_arch = "x86_64"))]
fn stream_lines(to: Span<'_>, from: Span<'_>) {
    cached(to, from);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tests lengths around a block and around the sizes at which the method changes, at all
    /// offsets from vector alignment.
    #[test]
    fn copies_exactly_the_given_bytes() {
        let lengths = [2047, 2048, 2049, 2175, 2176, 2177, 2304, 4096, 5000, 1 << 20];
        for len in lengths {
            for (source, target) in (0..64).map(|at| (at * 7 % 64, at)) {
                let from: Vec<u8> = (0..len + 64).map(|i| (i * 7 + i / 251) as u8).collect();
                let mut to = vec![0xaa_u8; len + 128];
                copy_slice(&mut to[target..target + len], &from[source..source + len]);
                assert!(to[target..target + len] == from[source..source + len], "{len} {target}");
                to[target..target + len].fill(0x55);
                let mut copied = from.clone();
                let copied = Span::from_mut(&mut copied).part(source, len);
                cached(Span::from_mut(&mut to).part(target, len), copied);
                assert!(to[target..target + len] == from[source..source + len], "{len} {target}");
                let mut others = to[..target].iter().chain(&to[target + len..]);
                assert!(others.all(|&x| x == 0xaa), "{len} {target}");
            }
        }
    }

    #[test]
    fn overlapping_copies_are_moves() {
        let start: Vec<u8> = (0..9000_u32).map(|i| (i * 31 % 253) as u8).collect();
        for (from, to) in [(0, 1), (1, 0), (0, 4000), (4000, 0), (100, 100), (0, 5000)] {
            let (mut ours, mut libc) = (start.clone(), start.clone());
            let memory = Span::from_mut(&mut ours);
            cached(memory.part(to, 4000), memory.part(from, 4000));
            libc.copy_within(from..from + 4000, to);
            assert!(ours == libc, "{from} to {to}");
        }
    }
}
