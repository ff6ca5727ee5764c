//! Raw memory that peers may also access: a pointer with bounds, never a reference.
//!
//! A rank's peers read its staged data and, for shared buffers, write its results, so no `&` or
//! `&mut` to such memory may exist. A [`Span`] is a pointer and a length. Creating one is unsafe,
//! and the creator justifies it; every later access is bounds-checked and safe. The algorithms'
//! protocol, documented in [`backend::host`](crate::backend), prevents two ranks from accessing the
//! same bytes at once.

#![expect(unsafe_code, reason = "makes pointers to memory shared with peers")]

use std::marker::PhantomData;

use super::copy;

/// How a copy stores its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Route {
    /// Into this core's cache.
    Cached,
    /// Into memory, evicting the lines from every cache.
    Streamed,
}

/// `len` bytes at `ptr`, valid for `'a`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Span<'a> {
    ptr: *mut u8,
    len: usize,
    life: PhantomData<&'a ()>,
}

impl<'a> Span<'a> {
    /// An empty span with a non-null pointer.
    pub(crate) const EMPTY: Self =
        Self { ptr: std::ptr::dangling_mut(), len: 0, life: PhantomData };

    /// Creates a span of a slice that no peer accesses.
    pub(crate) fn from_mut(bytes: &'a mut [u8]) -> Self {
        // SAFETY: borrowed mutably for all of `'a`, and a `Span` stays on its thread.
        unsafe { Self::new(bytes.as_mut_ptr(), bytes.len()) }
    }

    /// # Safety
    ///
    /// For all of `'a` the `len` bytes at `ptr` are readable and, unless this span is only copied
    /// from, writable. They are accessed only through this span and through pointers, and never by
    /// two ranks or threads at once unless all of them only read.
    pub(crate) unsafe fn new(ptr: *mut u8, len: usize) -> Self {
        Self { ptr, len, life: PhantomData }
    }

    pub(crate) fn len(self) -> usize {
        self.len
    }

    pub(crate) fn ptr(self) -> *mut u8 {
        self.ptr
    }

    /// Returns the `len` bytes from `offset` on. Panics if they are out of bounds.
    pub(crate) fn part(self, offset: usize, len: usize) -> Self {
        let inside = offset.checked_add(len).is_some_and(|end| end <= self.len);
        assert!(inside, "{offset}+{len} is outside of {} bytes", self.len);
        Self { ptr: self.ptr.wrapping_add(offset), len, life: PhantomData }
    }

    /// Splits into the first `len` bytes and the rest.
    pub(crate) fn split_at(self, len: usize) -> (Self, Self) {
        (self.part(0, len), self.part(len, self.len - len))
    }

    /// Copies all of `source`, which has the same length, here.
    pub(crate) fn copy_from(self, source: Span<'_>) {
        copy::cached(self, source);
    }

    /// Copies all of `source`, which has the same length and does not overlap, by `route` to here,
    /// which other cores read. With either route the copy is visible before anything this thread
    /// publishes afterwards.
    pub(crate) fn copy_by(self, route: Route, source: Span<'_>) {
        match route {
            Route::Cached => copy::cached_to_shared(self, source),
            Route::Streamed => copy::streamed(self, source),
        }
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
        // SAFETY: as above.
        let target = unsafe { Span::new(to.as_mut_ptr(), 4) };
        target.part(0, 2).copy_from(source.part(2, 2));
        target.part(4, 0).copy_from(source.part(4, 0));
        assert_eq!(to, [3, 4, 0, 0]);
    }

    #[test]
    fn both_routes_copy_exactly_the_given_bytes() {
        for (start, len) in [(0, 0), (0, 64), (1, 63), (63, 1), (7, 200), (64, 512), (33, 700)] {
            let mut from: Vec<u8> = (0..len).map(|i| (i * 7 + 1) as u8).collect();
            for route in [Route::Cached, Route::Streamed] {
                let mut to = vec![0xaa_u8; 1024];
                // SAFETY: the vector outlives the span and is not touched meanwhile.
                let source = unsafe { Span::new(from.as_mut_ptr(), len) };
                // SAFETY: as above.
                let target = unsafe { Span::new(to.as_mut_ptr(), 1024) };
                target.part(start, len).copy_by(route, source);
                assert_eq!(to[start..start + len], from);
                assert!(to[..start].iter().chain(&to[start + len..]).all(|&x| x == 0xaa));
            }
        }
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
