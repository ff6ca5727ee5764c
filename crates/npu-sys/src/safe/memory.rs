//! Device memory and pinned host memory.

#![expect(unsafe_code, reason = "calls C, and makes slices of pinned memory")]

use std::ffi::c_void;
use std::ptr::{self, NonNull};
use std::slice;
use std::sync::Arc;

use super::{Context, argument, dropped};
use crate::Result;
use crate::sys::AclrtMemMallocPolicy;

/// Device memory. Clones share it; it is freed with the last clone, including those of streams that
/// use it.
#[derive(Clone, Debug)]
pub struct Buffer(Arc<Memory>);

#[derive(Debug)]
struct Memory {
    context: Context,
    address: NonNull<c_void>,
    bytes: usize,
}

// SAFETY: Rust never dereferences the device address; AscendCL may be called with it from any
// thread on which the context is current, which every call here ensures.
unsafe impl Send for Memory {}
// SAFETY: as above; it is immutable.
unsafe impl Sync for Memory {}

impl Buffer {
    /// Allocates uninitialized memory at a multiple of 64 bytes, followed by at least 32 bytes of
    /// padding, since CANN's kernels may read up to a multiple of 32.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`](crate::Error::Argument) if `bytes` is 0 or too large.
    /// [`Error::Status`](crate::Error::Status).
    pub fn new(context: &Context, bytes: usize) -> Result<Self> {
        let padded = bytes.checked_next_multiple_of(32).and_then(|bytes| bytes.checked_add(32));
        let (Some(padded), false) = (padded, bytes == 0) else {
            return argument(format!("a buffer cannot have {bytes} bytes"));
        };
        let acl = context.acl();
        let _entered = context.enter()?;
        let mut address = ptr::null_mut();
        let policy = AclrtMemMallocPolicy::HUGE_FIRST;
        // SAFETY: acl_rt.h, `aclrtMalloc`: writes one address, to a local; a context is current.
        unsafe { acl.aclrtMalloc(&raw mut address, padded, policy) }?;
        let function = "aclrtMalloc";
        let address = NonNull::new(address).ok_or(crate::Error::Null { function })?;
        Ok(Self(Arc::new(Memory { context: context.clone(), address, bytes })))
    }

    /// The buffer's context.
    #[must_use]
    pub fn context(&self) -> &Context {
        &self.0.context
    }

    /// The size in bytes, without padding.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.0.bytes
    }

    /// The device address, valid as long as `self`.
    #[must_use]
    pub fn address(&self) -> *mut c_void {
        self.0.address.as_ptr()
    }

    /// The address at `offset`; an error unless `bytes` bytes from there are in the buffer.
    pub(super) fn range(&self, offset: usize, bytes: usize) -> Result<*mut c_void> {
        match offset.checked_add(bytes) {
            Some(end) if end <= self.bytes() => Ok(self.address().wrapping_byte_add(offset)),
            _ => argument(format!(
                "{bytes} bytes at {offset} are not inside a buffer of {}",
                self.bytes()
            )),
        }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let Ok(_entered) = self.context.enter() else { return };
        // SAFETY: acl_rt.h, `aclrtFree`: frees memory of `aclrtMalloc` once; streams that use it
        // have a clone, so none does.
        dropped(unsafe { self.context.acl().aclrtFree(self.address.as_ptr()) });
    }
}

/// Pinned host memory for asynchronous copies.
#[derive(Debug)]
pub(super) struct Pinned {
    context: Context,
    address: NonNull<c_void>,
    bytes: usize,
}

// SAFETY: host memory with one owner.
unsafe impl Send for Pinned {}
// SAFETY: as above; it is accessed only through `&mut self` and by the stream that owns it.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// Allocates zeroed memory.
    pub(super) fn new(context: &Context, bytes: usize) -> Result<Self> {
        let _entered = context.enter()?;
        let mut address = ptr::null_mut();
        // SAFETY: acl_rt.h, `aclrtMallocHost`: writes one address, to a local; a context is
        // current.
        unsafe { context.acl().aclrtMallocHost(&raw mut address, bytes) }?;
        let function = "aclrtMallocHost";
        let address = NonNull::new(address).ok_or(crate::Error::Null { function })?;
        // SAFETY: `bytes` bytes of host memory that were just allocated.
        unsafe { address.as_ptr().cast::<u8>().write_bytes(0, bytes) };
        Ok(Self { context: context.clone(), address, bytes })
    }

    pub(super) const fn address(&self) -> *mut c_void {
        self.address.as_ptr()
    }

    /// The content. No copy may be in flight, which the stream ensures.
    pub(super) const fn content(&mut self) -> &mut [u8] {
        // SAFETY: `bytes` bytes, initialized in `new`; borrowed as `self` is.
        unsafe { slice::from_raw_parts_mut(self.address.as_ptr().cast(), self.bytes) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let Ok(_entered) = self.context.enter() else { return };
        // SAFETY: acl_rt.h, `aclrtFreeHost`: frees memory of `aclrtMallocHost` once.
        dropped(unsafe { self.context.acl().aclrtFreeHost(self.address.as_ptr()) });
    }
}
