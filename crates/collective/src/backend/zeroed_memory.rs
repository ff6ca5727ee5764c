//! Private memory for [`Backend::alloc`](super::Backend::alloc) of backends without shared memory.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;
use std::sync::Arc;

use super::RawShared;
use crate::{Error, OpDesc, Result};

/// Zeroed memory, freed on drop.
#[derive(Debug)]
pub(crate) struct ZeroedMemory {
    ptr: NonNull<u8>,
    layout: Layout,
}

// SAFETY: owns plain memory of the process, as a `Vec<u8>` does.
unsafe impl Send for ZeroedMemory {}
// SAFETY: as for `Send`; a shared reference gives no access to the memory.
unsafe impl Sync for ZeroedMemory {}

impl ZeroedMemory {
    /// Returns the layout of an `alloc`: at least one byte, aligned to 64.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] if the size overflows.
    pub(crate) fn layout(op: &OpDesc) -> Result<Layout> {
        let bytes = op.count.checked_mul(op.dtype.size());
        let layout = bytes.and_then(|bytes| Layout::from_size_align(bytes.max(1), 64).ok());
        layout.ok_or_else(|| Error::InvalidArgument(format!("{op}: the size overflows")))
    }

    /// Allocates zeroed memory; `None` if the system is out of memory.
    ///
    /// # Panics
    ///
    /// If the layout's size is 0.
    pub(crate) fn new(layout: Layout) -> Option<Self> {
        assert!(layout.size() > 0, "the allocator needs a size above 0");
        // SAFETY: the size is not zero.
        let ptr = unsafe { alloc_zeroed(layout) };
        NonNull::new(ptr).map(|ptr| Self { ptr, layout })
    }

    /// Converts it to the result of `alloc`.
    pub(crate) fn share(self) -> RawShared {
        let (ptr, bytes) = (self.ptr, self.layout.size());
        // SAFETY: new zeroed bytes that live as long as `self`, aligned as `layout` requires; nothing else
        // refers to them.
        unsafe { RawShared::new(ptr, bytes, Arc::new(self)) }
    }
}

impl Drop for ZeroedMemory {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout, and freed once.
        unsafe { dealloc(self.ptr.as_ptr(), self.layout) };
    }
}
