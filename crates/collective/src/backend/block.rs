//! Ordinary memory: what `alloc` of a backend gives whose ranks share none.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;
use std::sync::Arc;

use super::RawShared;
use crate::{Error, OpDesc, Result};

/// Zeroed memory, freed on drop.
#[derive(Debug)]
pub(crate) struct Block {
    ptr: NonNull<u8>,
    layout: Layout,
}

// SAFETY: owns plain memory of the process, as a `Vec<u8>` does.
unsafe impl Send for Block {}
// SAFETY: as for `Send`; a shared reference gives access to nothing.
unsafe impl Sync for Block {}

impl Block {
    /// What an `alloc` asks for: at least one byte, aligned to 64.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] if no memory can hold so much.
    pub(crate) fn layout(op: &OpDesc) -> Result<Layout> {
        let bytes = op.count.checked_mul(op.dtype.size());
        let layout = bytes.and_then(|bytes| Layout::from_size_align(bytes.max(1), 64).ok());
        layout.ok_or_else(|| Error::InvalidArgument(format!("{op}: more than memory can hold")))
    }

    /// `None` if there is no memory.
    ///
    /// # Panics
    ///
    /// If the layout has no size.
    pub(crate) fn new(layout: Layout) -> Option<Self> {
        assert!(layout.size() > 0, "the allocator wants a size");
        // SAFETY: the size is not zero.
        let ptr = unsafe { alloc_zeroed(layout) };
        NonNull::new(ptr).map(|ptr| Self { ptr, layout })
    }

    /// Gives it to a caller of `alloc`.
    pub(crate) fn share(self) -> RawShared {
        let (ptr, bytes) = (self.ptr, self.layout.size());
        // SAFETY: fresh zeros that live as long as the block, aligned as `layout` says; nothing else
        // refers to them.
        unsafe { RawShared::new(ptr, bytes, Arc::new(self)) }
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout, and freed once.
        unsafe { dealloc(self.ptr.as_ptr(), self.layout) };
    }
}
