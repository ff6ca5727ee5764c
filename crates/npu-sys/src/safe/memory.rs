//! Memory of a device, and pinned memory of the host.

#![expect(unsafe_code, reason = "calls C, and makes slices of pinned memory")]

use std::ffi::c_void;
use std::ptr::{self, NonNull};
use std::slice;
use std::sync::Arc;

use super::{Context, argument, dropped};
use crate::Result;
use crate::sys::AclrtMemMallocPolicy;

/// Memory of a device. Clones are the same memory; it is freed with the last of them, streams that
/// still use it included.
#[derive(Clone, Debug)]
pub struct Buffer(Arc<Memory>);

#[derive(Debug)]
struct Memory {
    context: Context,
    address: NonNull<c_void>,
    bytes: usize,
}

// SAFETY: an address of a device, which Rust never follows; AscendCL's calls with it may come from any
// thread that has made the context current, as every call here does.
unsafe impl Send for Memory {}
// SAFETY: as above; nothing here changes after it was made.
unsafe impl Sync for Memory {}

impl Buffer {
    /// Memory of undefined content, which starts at a multiple of 64 bytes. 32 bytes or more follow it
    /// that belong to nobody, since CANN's kernels may read on to a multiple of 32.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`](crate::Error::Argument) for no bytes at all, or too many to count.
    /// [`Error::Status`](crate::Error::Status).
    pub fn new(context: &Context, bytes: usize) -> Result<Self> {
        let room = bytes.checked_next_multiple_of(32).and_then(|bytes| bytes.checked_add(32));
        let (Some(room), false) = (room, bytes == 0) else {
            return argument(format!("a buffer cannot have {bytes} bytes"));
        };
        let acl = context.acl();
        let _entered = context.enter()?;
        let mut address = ptr::null_mut();
        let policy = AclrtMemMallocPolicy::HUGE_FIRST;
        // SAFETY: acl_rt.h, `aclrtMalloc`: writes one address, to a local; a context is current.
        unsafe { acl.aclrtMalloc(&raw mut address, room, policy) }?;
        let function = "aclrtMalloc";
        let address = NonNull::new(address).ok_or(crate::Error::Null { function })?;
        Ok(Self(Arc::new(Memory { context: context.clone(), address, bytes })))
    }

    /// Its context.
    #[must_use]
    pub fn context(&self) -> &Context {
        &self.0.context
    }

    /// Bytes that were asked for.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.0.bytes
    }

    /// Its address on the device, for calls of one's own; valid as long as `self`.
    #[must_use]
    pub fn address(&self) -> *mut c_void {
        self.0.address.as_ptr()
    }

    /// The address `offset` bytes in, if `bytes` from there on are inside.
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
        // SAFETY: acl_rt.h, `aclrtFree`: memory of `aclrtMalloc`, once; streams that use it hold a
        // clone, so none does.
        dropped(unsafe { self.context.acl().aclrtFree(self.address.as_ptr()) });
    }
}

/// Memory of the host that copies of a stream may use while the program goes on.
#[derive(Debug)]
pub(super) struct Pinned {
    context: Context,
    address: NonNull<c_void>,
    bytes: usize,
}

// SAFETY: memory of the host of which this is the only owner.
unsafe impl Send for Pinned {}
// SAFETY: as above; it is read and written through `&mut self` only, and by the stream that holds it.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// Memory of zeros.
    pub(super) fn new(context: &Context, bytes: usize) -> Result<Self> {
        let _entered = context.enter()?;
        let mut address = ptr::null_mut();
        // SAFETY: acl_rt.h, `aclrtMallocHost`: writes one address, to a local; a context is current.
        unsafe { context.acl().aclrtMallocHost(&raw mut address, bytes) }?;
        let function = "aclrtMallocHost";
        let address = NonNull::new(address).ok_or(crate::Error::Null { function })?;
        // SAFETY: `bytes` bytes of the host, just made, which nobody else knows.
        unsafe { address.as_ptr().cast::<u8>().write_bytes(0, bytes) };
        Ok(Self { context: context.clone(), address, bytes })
    }

    pub(super) const fn address(&self) -> *mut c_void {
        self.address.as_ptr()
    }

    /// Its content. No copy may be under way: who keeps that is the stream.
    pub(super) const fn content(&mut self) -> &mut [u8] {
        // SAFETY: `bytes` bytes that were set to zero when made; borrowed as `self` is.
        unsafe { slice::from_raw_parts_mut(self.address.as_ptr().cast(), self.bytes) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let Ok(_entered) = self.context.enter() else { return };
        // SAFETY: acl_rt.h, `aclrtFreeHost`: memory of `aclrtMallocHost`, once.
        dropped(unsafe { self.context.acl().aclrtFreeHost(self.address.as_ptr()) });
    }
}
