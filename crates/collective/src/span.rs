//! Bytes that peers may also see: raw memory with bounds, never a reference.
//!
//! A rank's peers read its staged data and, for shared buffers, write its results, so neither `&`
//! nor `&mut` may stand over such memory. A [`Span`] is a pointer and a length made once, by an
//! unsafe call that argues for the memory; everything after is bounds-checked and safe to call.
//! What keeps two ranks from touching the same bytes at once is the algorithms' protocol, stated in
//! [`backend::host`](crate::backend).

#![expect(unsafe_code, reason = "copies through raw pointers to memory shared with peers")]

use std::marker::PhantomData;

/// `len` bytes at `ptr`, alive for `'a`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Span<'a> {
    ptr: *mut u8,
    len: usize,
    life: PhantomData<&'a ()>,
}

impl<'a> Span<'a> {
    /// A slice that nobody else sees.
    pub(crate) fn from_mut(bytes: &'a mut [u8]) -> Self {
        // SAFETY: borrowed mutably for all of `'a`, and a `Span` stays on its thread.
        unsafe { Self::new(bytes.as_mut_ptr(), bytes.len()) }
    }

    /// # Safety
    ///
    /// For all of `'a` the `len` bytes at `ptr` are readable and, unless this span is only copied
    /// from, writable. They are touched through this span and pointers only, and not by two ranks
    /// or threads at once unless all only read.
    pub(crate) unsafe fn new(ptr: *mut u8, len: usize) -> Self {
        Self { ptr, len, life: PhantomData }
    }

    /// No bytes.
    pub(crate) fn empty() -> Self {
        Self { ptr: std::ptr::NonNull::dangling().as_ptr(), len: 0, life: PhantomData }
    }

    pub(crate) fn len(self) -> usize {
        self.len
    }

    pub(crate) fn ptr(self) -> *mut u8 {
        self.ptr
    }

    /// The `len` bytes from `offset` on.
    pub(crate) fn part(self, offset: usize, len: usize) -> Self {
        let inside = offset.checked_add(len).is_some_and(|end| end <= self.len);
        assert!(inside, "{offset}+{len} lies outside of {} bytes", self.len);
        Self { ptr: self.ptr.wrapping_add(offset), len, life: PhantomData }
    }

    /// Copies all of `source`, which has the same length, here.
    pub(crate) fn copy_from_slice(self, source: &[u8]) {
        assert_eq!(self.len, source.len(), "a copy keeps the length");
        // SAFETY: both are alive and hold this many bytes; `copy` allows them to overlap.
        unsafe { std::ptr::copy(source.as_ptr(), self.ptr, self.len) };
    }

    /// Copies all of `source`, which has the same length, here.
    pub(crate) fn copy_from(self, source: Span<'_>) {
        assert_eq!(self.len, source.len, "a copy keeps the length");
        // SAFETY: both spans are alive and hold this many bytes (invariant of the type; `part`
        // stays inside); `copy` allows them to overlap.
        unsafe { std::ptr::copy(source.ptr, self.ptr, self.len) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_a_part() {
        let mut from = [1_u8, 2, 3, 4];
        let mut to = [0_u8; 4];
        // SAFETY: the array outlives the span and is not touched meanwhile.
        let source = unsafe { Span::new(from.as_mut_ptr(), 4) };
        // SAFETY: likewise.
        let target = unsafe { Span::new(to.as_mut_ptr(), 4) };
        target.part(0, 2).copy_from(source.part(2, 2));
        target.part(4, 0).copy_from(source.part(4, 0));
        assert_eq!(to, [3, 4, 0, 0]);
    }

    #[test]
    #[should_panic(expected = "outside")]
    fn parts_stay_inside() {
        let mut bytes = [0_u8; 4];
        // SAFETY: the array outlives the span and is not touched meanwhile.
        let span = unsafe { Span::new(bytes.as_mut_ptr(), 4) };
        let _ = span.part(3, 2);
    }
}
