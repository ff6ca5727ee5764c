//! Buffers in the shared segment, where a backend reduces in place.
//!
//! A plain `&mut [T]` over this memory is sound because peers access this rank's part only while an
//! operation on it runs on this rank, and then the buffer is mutably borrowed by that call or owned
//! by its [`Work`](crate::Work). An operation that fails detaches the memory from the peers before
//! it returns, see [`Backend::run`](crate::Backend::run).
//!
//! A forked child has the memory mapped, too, and would write into its parent's, so every access
//! checks for a fork. Advice to the kernel does not help: `MADV_WIPEONFORK` is for private memory,
//! and after `MADV_DONTFORK` the child's next allocation may be at the buffer's address.

#![expect(unsafe_code, reason = "makes slices of memory mapped by the backend")]

use std::any::Any;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::Arc;

use super::ForkGuard;
use crate::{Element, Error, Result};

/// This rank's part of the memory from [`Backend::alloc`](crate::backend::Backend::alloc), zeroed
/// and aligned to 64 bytes.
#[derive(Debug)]
pub struct RawShared {
    pub(crate) ptr: NonNull<u8>,
    pub(crate) bytes: usize,
    /// Keeps the memory mapped.
    _keep: Arc<dyn Any + Send + Sync>,
}

impl RawShared {
    /// Wraps `bytes` of memory at `ptr`, which live as long as `keep`.
    ///
    /// # Safety
    ///
    /// They are zero, aligned to 64 bytes, and readable and writable while `keep` lives. Nothing
    /// else in the program refers to them, and peers access them only while an operation on them
    /// runs on this rank.
    pub unsafe fn new(ptr: NonNull<u8>, bytes: usize, keep: Arc<dyn Any + Send + Sync>) -> Self {
        Self { ptr, bytes, _keep: keep }
    }
}

/// A buffer of [`ProcessGroup::alloc`](crate::ProcessGroup::alloc). Dereferences to `[T]`.
///
/// The group that made it reduces it in place; for any other use it is ordinary memory. It may
/// outlive its group.
///
/// Each dereference reads a flag, to detect a fork; a loop over single elements is faster over the
/// slice.
///
/// # Panics
///
/// Dereferencing panics in a fork of the process that made it, which owns the memory; dropping it
/// does not.
#[derive(Debug)]
pub struct SharedBuf<T> {
    raw: RawShared,
    count: usize,
    guard: ForkGuard,
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
            let guard = ForkGuard::new()?;
            return Ok(Self { raw, count, guard, elements: PhantomData });
        }
        let (ptr, bytes, dtype) = (raw.ptr, raw.bytes, T::DTYPE);
        let text = format!("{bytes} bytes at {ptr:p} cannot hold {count} {dtype}");
        let [during, name] = ["Backend::alloc", "short or misaligned memory"].map(String::from);
        Err(Error::Backend { backend, during, name, code: 0, text })
    }

    #[inline]
    #[track_caller]
    fn check_fork(&self) {
        assert!(
            !self.guard.forked(),
            "a SharedBuf cannot be used in a fork of the process that made it; copy the data before the fork"
        );
    }
}

impl<T: Element> Deref for SharedBuf<T> {
    type Target = [T];

    #[track_caller]
    fn deref(&self) -> &[T] {
        self.check_fork();
        // SAFETY: `count` elements are mapped and aligned (checked in `new`), they hold `Element`s,
        // and nothing writes while `self` is borrowed and no operation runs on it; a fork does not
        // get here.
        unsafe { std::slice::from_raw_parts(self.raw.ptr.cast().as_ptr(), self.count) }
    }
}

impl<T: Element> DerefMut for SharedBuf<T> {
    #[track_caller]
    fn deref_mut(&mut self) -> &mut [T] {
        self.check_fork();
        // SAFETY: as in `deref`; and the borrow of `self` is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.raw.ptr.cast().as_ptr(), self.count) }
    }
}
