//! Streams: queues of work for a device.

#![expect(unsafe_code, reason = "calls C")]

use std::any::Any;
use std::ffi::c_void;
use std::fmt;
use std::mem;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::memory::Pinned;
use super::{Buffer, Context, argument, dropped};
use crate::status::STREAM_SYNC_TIMEOUT;
use crate::sys::{Acl, AclrtMemcpyKind, AclrtStream};
use crate::{Error, Plan, Result};

/// The owner of memory that enqueued work uses; dropped after the stream has been synchronized.
pub type KeepAlive = Box<dyn Any + Send + Sync>;

/// A queue of work that runs in order and asynchronously.
///
/// After [`Stream::MAX_PENDING`] operations, the next one synchronizes the stream first.
pub struct Stream {
    context: Context,
    raw: AclrtStream,
    in_use: Mutex<Vec<KeepAlive>>,
}

impl Stream {
    /// Maximum number of operations between two synchronizations.
    pub const MAX_PENDING: usize = 1024;
    /// How long `drop` waits for the stream; after that the stream and its memory leak.
    const DROP_TIMEOUT: Duration = Duration::from_secs(10);

    /// Creates a stream.
    ///
    /// # Errors
    ///
    /// [`Error::Status`].
    pub fn new(context: &Context) -> Result<Self> {
        let _entered = context.enter()?;
        let mut raw = AclrtStream::NULL;
        // SAFETY: acl_rt.h, `aclrtCreateStream`: writes one handle, to a local; a context is
        // current.
        unsafe { context.acl().aclrtCreateStream(&raw mut raw) }?;
        Ok(Self { context: context.clone(), raw, in_use: Mutex::default() })
    }

    /// The stream's context.
    #[must_use]
    pub const fn context(&self) -> &Context {
        &self.context
    }

    /// The raw handle, valid as long as `self`.
    #[must_use]
    pub const fn raw(&self) -> AclrtStream {
        self.raw
    }

    /// Enqueues work by `call`, with the stream's context current, and keeps `keep` alive until the
    /// stream has been synchronized.
    ///
    /// # Errors
    ///
    /// Those of `call`; `keep` is kept alive, too.
    pub fn enqueue(
        &self,
        keep: KeepAlive,
        call: impl FnOnce(&Acl, AclrtStream) -> Result<()>,
    ) -> Result<()> {
        let mut in_use = self.in_use();
        if in_use.len() >= Self::MAX_PENDING {
            drop(in_use);
            self.synchronize()?;
            in_use = self.in_use();
        }
        // Locked until the work is enqueued, so that a concurrent synchronization drops only owners
        // of work that was enqueued before.
        in_use.push(keep);
        let _entered = self.context.enter()?;
        call(self.context.acl(), self.raw)
    }

    /// Blocks until all enqueued work has completed, and drops the owners of its memory.
    ///
    /// # Errors
    ///
    /// [`Error::Status`] of this call or of enqueued work; the owners are kept then.
    pub fn synchronize(&self) -> Result<()> {
        self.synchronize_by(|acl| {
            // SAFETY: acl_rt.h, `aclrtSynchronizeStream`: a stream of the current context.
            unsafe { acl.aclrtSynchronizeStream(self.raw) }
        })
    }

    /// As [`synchronize`](Self::synchronize), with a timeout.
    ///
    /// # Errors
    ///
    /// Also [`Error::Status`] with `ACL_ERROR_RT_STREAM_SYNC_TIMEOUT`, and [`Error::NoFunction`] if
    /// this CANN has no timeouts.
    pub fn synchronize_for(&self, timeout: Duration) -> Result<()> {
        let timeout_ms = i32::try_from(timeout.as_millis()).unwrap_or(i32::MAX);
        self.synchronize_by(|acl| {
            // SAFETY: acl_rt.h, `aclrtSynchronizeStreamWithTimeout`: as above.
            unsafe { acl.aclrtSynchronizeStreamWithTimeout(self.raw, timeout_ms) }
        })
    }

    /// Copies bytes to the device. `from` may be changed after the return.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`] if the range is not in the buffer, or the buffer belongs to another
    /// context. [`Error::Status`].
    pub fn upload(&self, to: &Buffer, offset: usize, from: &[u8]) -> Result<()> {
        let (to_address, bytes) = (self.range(to, offset, from.len())?, from.len());
        if from.is_empty() {
            return Ok(());
        }
        let mut staged = Pinned::new(&self.context, bytes)?;
        staged.content().copy_from_slice(from);
        let from = staged.address();
        self.enqueue(Box::new((to.clone(), staged)), |acl, raw| {
            let kind = AclrtMemcpyKind::HOST_TO_DEVICE;
            // SAFETY: acl_rt.h, `aclrtMemcpyAsync`: both ranges have `bytes` bytes, and the stream
            // keeps their owners alive until it has been synchronized.
            unsafe { acl.aclrtMemcpyAsync(to_address, bytes, from, bytes, kind, raw) }
        })
    }

    /// Copies bytes from the device. Blocks until the stream is done.
    ///
    /// # Errors
    ///
    /// As [`upload`](Self::upload); [`Error::Status`] also of earlier work.
    pub fn download(&self, from: &Buffer, offset: usize, to: &mut [u8]) -> Result<()> {
        let (from_address, bytes) = (self.range(from, offset, to.len())?, to.len());
        if to.is_empty() {
            return Ok(());
        }
        let mut staged = Pinned::new(&self.context, bytes)?;
        let staged_address = staged.address();
        let done = self
            .enqueue(Box::new(from.clone()), |acl, raw| {
                let kind = AclrtMemcpyKind::DEVICE_TO_HOST;
                // SAFETY: acl_rt.h, `aclrtMemcpyAsync`: both ranges have `bytes` bytes. The stream
                // keeps the buffer alive; `staged` is not dropped before the copy is done, see
                // below.
                unsafe {
                    acl.aclrtMemcpyAsync(staged_address, bytes, from_address, bytes, kind, raw)
                }
            })
            .and_then(|()| self.synchronize());
        match done {
            Ok(()) => to.copy_from_slice(staged.content()),
            // The copy may still be in flight: leak its target.
            Err(_) => mem::forget(staged),
        }
        done
    }

    /// Copies between buffers of one device.
    ///
    /// # Errors
    ///
    /// As [`upload`](Self::upload), and [`Error::Argument`] if the ranges overlap.
    pub fn copy(&self, to: (&Buffer, usize), from: (&Buffer, usize), bytes: usize) -> Result<()> {
        let to_address = self.range(to.0, to.1, bytes)?;
        let from_address = self.range(from.0, from.1, bytes)?;
        if to_address.addr().abs_diff(from_address.addr()) < bytes {
            return argument("source and destination of the copy overlap");
        }
        self.enqueue(Box::new((to.0.clone(), from.0.clone())), |acl, raw| {
            let kind = AclrtMemcpyKind::DEVICE_TO_DEVICE;
            // SAFETY: acl_rt.h, `aclrtMemcpyAsync`: both ranges have `bytes` bytes, do not overlap,
            // and are kept alive.
            unsafe { acl.aclrtMemcpyAsync(to_address, bytes, from_address, bytes, kind, raw) }
        })
    }

    /// Sets every byte of a range.
    ///
    /// # Errors
    ///
    /// As [`upload`](Self::upload).
    pub fn fill(&self, to: &Buffer, offset: usize, bytes: usize, value: u8) -> Result<()> {
        let address = self.range(to, offset, bytes)?;
        self.enqueue(Box::new(to.clone()), |acl, raw| {
            // SAFETY: acl_rt.h, `aclrtMemsetAsync`: a range of `bytes` bytes, which is kept alive.
            unsafe { acl.aclrtMemsetAsync(address, bytes, i32::from(value), bytes, raw) }
        })
    }

    /// Enqueues a planned operator, with a workspace of the required size.
    ///
    /// # Errors
    ///
    /// [`Error::Status`].
    ///
    /// # Safety
    ///
    /// `keep` must own the memory of the plan's tensors, which must belong to this stream's
    /// context.
    pub unsafe fn launch(&self, plan: Plan, keep: KeepAlive) -> Result<()> {
        let bytes = plan.workspace_bytes();
        let workspace = match usize::try_from(bytes) {
            Ok(0) => None,
            Ok(bytes) => Some(Buffer::new(&self.context, bytes)?),
            Err(_) => return argument(format!("the workspace of {bytes} bytes is too large")),
        };
        let address = workspace.as_ref().map_or_else(std::ptr::null_mut, Buffer::address);
        self.enqueue(Box::new((keep, workspace)), |_, raw| {
            // SAFETY: the workspace has the required size; the stream keeps it and (as the caller
            // guarantees) the tensors alive; the stream's context is current.
            unsafe { plan.run(address, raw) }
        })
    }

    fn range(&self, buffer: &Buffer, offset: usize, bytes: usize) -> Result<*mut c_void> {
        if *buffer.context() != self.context {
            return argument("the buffer belongs to another context than the stream");
        }
        buffer.range(offset, bytes)
    }

    fn in_use(&self) -> MutexGuard<'_, Vec<KeepAlive>> {
        // After a panic the list is still valid; it may have an entry too many.
        self.in_use.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn synchronize_by(&self, wait: impl FnOnce(&Acl) -> Result<()>) -> Result<()> {
        let before = mem::take(&mut *self.in_use());
        let entered = self.context.enter();
        let waited = entered.and_then(|_entered| wait(self.context.acl()));
        match &waited {
            Ok(()) => drop(before),
            Err(_) => self.in_use().extend(before),
        }
        waited
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stream").field("context", &self.context).field("raw", &self.raw).finish()
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let waited = match self.synchronize_for(Self::DROP_TIMEOUT) {
            Err(Error::NoFunction { .. }) => self.synchronize(),
            other => other,
        };
        if waited.is_err() {
            // Work may still be in flight and use these: leak them.
            mem::forget(mem::take(&mut *self.in_use()));
        }
        if matches!(waited, Err(Error::Status { status, .. }) if status.code() == STREAM_SYNC_TIMEOUT)
        {
            // `aclrtDestroyStream` would block until the work completes: leak the stream, and so
            // its context.
            mem::forget(self.context.clone());
            return;
        }
        let Ok(_entered) = self.context.enter() else { return };
        // SAFETY: acl_rt.h, `aclrtDestroyStream`: destroys a stream of the current context once.
        dropped(unsafe { self.context.acl().aclrtDestroyStream(self.raw) });
    }
}
