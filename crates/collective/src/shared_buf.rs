//! Buffers in the shared segment, where a backend reduces in place.
//!
//! A plain `&mut [T]` over this memory is sound because peers access this rank's part only while an
//! operation on it runs on this rank, and then the buffer is mutably borrowed by that call or owned
//! by its [`Work`](crate::Work). An operation that fails detaches the memory from the peers before
//! it returns, see [`Backend::run`](crate::Backend::run).

#![expect(unsafe_code, reason = "makes slices of memory mapped by the backend")]

use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

use crate::backend::RawShared;
use crate::{Element, Error, Result};

/// A buffer of [`ProcessGroup::alloc`](crate::ProcessGroup::alloc). Dereferences to `[T]`.
///
/// The group that made it reduces it in place; for any other use it is ordinary memory. It may
/// outlive its group.
#[derive(Debug)]
pub struct SharedBuf<T> {
    raw: RawShared,
    count: usize,
    elements: PhantomData<T>,
}

// SAFETY: it owns its memory as a `Vec<T>` does, and an `Element` is `Send`.
unsafe impl<T: Element> Send for SharedBuf<T> {}
// SAFETY: shared access only reads, as with a `Vec<T>`, and an `Element` is `Sync`.
unsafe impl<T: Element> Sync for SharedBuf<T> {}

impl<T: Element> SharedBuf<T> {
    /// Wraps `raw`, which only this buffer uses.
    pub(crate) fn new(raw: RawShared, count: usize, backend: &'static str) -> Result<Self> {
        if raw.bytes / size_of::<T>() >= count && raw.ptr.cast::<T>().is_aligned() {
            return Ok(Self { raw, count, elements: PhantomData });
        }
        let (ptr, bytes, dtype) = (raw.ptr, raw.bytes, T::DTYPE);
        let text = format!("{bytes} bytes at {ptr:p} cannot hold {count} {dtype}");
        let [during, name] = ["Backend::alloc", "short or misaligned memory"].map(String::from);
        Err(Error::Backend { backend, during, name, code: 0, text })
    }
}

impl<T: Element> Deref for SharedBuf<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: `count` elements are mapped and aligned (checked in `new`), they hold `Element`s,
        // and nothing writes while `self` is borrowed and no operation runs on it.
        unsafe { std::slice::from_raw_parts(self.raw.ptr.cast().as_ptr(), self.count) }
    }
}

impl<T: Element> DerefMut for SharedBuf<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as in `deref`; and the borrow of `self` is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.raw.ptr.cast().as_ptr(), self.count) }
    }
}
