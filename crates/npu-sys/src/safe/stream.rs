//! A queue of work for a device.

#![expect(unsafe_code, reason = "calls C")]

use std::any::Any;
use std::ffi::c_void;
use std::fmt;
use std::mem;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::memory::Pinned;
use super::{Buffer, Context, argument, dropped};
use crate::sys::{Acl, AclrtMemcpyKind, AclrtStream};
use crate::{Error, Plan, Result};

/// What work in a stream uses, held until the stream is synchronised.
pub type Kept = Box<dyn Any + Send + Sync>;

/// A queue of work that is done in order, while the program goes on.
///
/// At most [`Stream::MOST`] pieces of work wait in it: the next one waits for them.
pub struct Stream {
    context: Context,
    raw: AclrtStream,
    kept: Mutex<Vec<Kept>>,
}

impl Stream {
    /// How much may wait in a stream.
    pub const MOST: usize = 1024;
    /// How long to wait for a stream that is dropped; after that its memory is leaked.
    const PATIENCE: Duration = Duration::from_secs(60);

    /// An empty stream.
    ///
    /// # Errors
    ///
    /// [`Error::Status`].
    pub fn new(context: &Context) -> Result<Self> {
        let _entered = context.enter()?;
        let mut raw = AclrtStream::NULL;
        // SAFETY: acl_rt.h, `aclrtCreateStream`: writes one handle, to a local; a context is current.
        unsafe { context.acl().aclrtCreateStream(&raw mut raw) }?;
        Ok(Self { context: context.clone(), raw, kept: Mutex::default() })
    }

    /// Its context.
    #[must_use]
    pub const fn context(&self) -> &Context {
        &self.context
    }

    /// The handle, for calls of one's own; valid as long as `self`.
    #[must_use]
    pub const fn raw(&self) -> AclrtStream {
        self.raw
    }

    /// Puts work into the stream by `call`, with the stream's context current, and holds `keep` until
    /// the stream has been synchronised.
    ///
    /// # Errors
    ///
    /// What `call` returns; `keep` is held all the same.
    pub fn enqueue(
        &self,
        keep: Kept,
        call: impl FnOnce(&Acl, AclrtStream) -> Result<()>,
    ) -> Result<()> {
        let mut kept = self.kept();
        if kept.len() >= Self::MOST {
            drop(kept);
            self.synchronize()?;
            kept = self.kept();
        }
        // Under the lock until the work is in the stream: who synchronises releases only what was put
        // there before.
        kept.push(keep);
        let _entered = self.context.enter()?;
        call(self.context.acl(), self.raw)
    }

    /// Waits until all that is in the stream is done, and releases what it used.
    ///
    /// # Errors
    ///
    /// [`Error::Status`], of this call or of work in the stream; what it used is held on.
    pub fn synchronize(&self) -> Result<()> {
        self.settle(|acl| {
            // SAFETY: acl_rt.h, `aclrtSynchronizeStream`: a stream of the current context.
            unsafe { acl.aclrtSynchronizeStream(self.raw) }
        })
    }

    /// As [`synchronize`](Self::synchronize), but for at most `timeout`.
    ///
    /// # Errors
    ///
    /// Also [`Error::Status`] with `ACL_ERROR_RT_STREAM_SYNC_TIMEOUT`, and [`Error::NoFunction`] if
    /// this CANN cannot wait so.
    pub fn synchronize_for(&self, timeout: Duration) -> Result<()> {
        let timeout_ms = i32::try_from(timeout.as_millis()).unwrap_or(i32::MAX);
        self.settle(|acl| {
            // SAFETY: acl_rt.h, `aclrtSynchronizeStreamWithTimeout`: as above.
            unsafe { acl.aclrtSynchronizeStreamWithTimeout(self.raw, timeout_ms) }
        })
    }

    /// Copies bytes to a device. They may be changed as soon as this returns.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`] if they do not fit, or the buffer is of another context.
    /// [`Error::Status`].
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
            // SAFETY: acl_rt.h, `aclrtMemcpyAsync`: both ranges are of `bytes` bytes, and the stream
            // holds their owners until it has been synchronised.
            unsafe { acl.aclrtMemcpyAsync(to_address, bytes, from, bytes, kind, raw) }
        })
    }

    /// Copies bytes from a device, after all that is in the stream; waits for it.
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
                // SAFETY: acl_rt.h, `aclrtMemcpyAsync`: both ranges are of `bytes` bytes. The stream
                // holds the buffer; `staged` is not dropped before the stream is done, see below.
                unsafe {
                    acl.aclrtMemcpyAsync(staged_address, bytes, from_address, bytes, kind, raw)
                }
            })
            .and_then(|()| self.synchronize());
        match done {
            Ok(()) => to.copy_from_slice(staged.content()),
            // The copy may still come.
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
            return argument("a copy's two ranges overlap");
        }
        self.enqueue(Box::new((to.0.clone(), from.0.clone())), |acl, raw| {
            let kind = AclrtMemcpyKind::DEVICE_TO_DEVICE;
            // SAFETY: acl_rt.h, `aclrtMemcpyAsync`: both ranges are of `bytes` bytes, apart, and held.
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
            // SAFETY: acl_rt.h, `aclrtMemsetAsync`: a range of `bytes` bytes, held.
            unsafe { acl.aclrtMemsetAsync(address, bytes, i32::from(value), bytes, raw) }
        })
    }

    /// Puts a planned operator into the stream, with a workspace of the size it wants.
    ///
    /// # Errors
    ///
    /// [`Error::Status`].
    ///
    /// # Safety
    ///
    /// The memory of the plan's tensors must be owned by `keep`, and be of this stream's context.
    pub unsafe fn launch(&self, plan: Plan, keep: Kept) -> Result<()> {
        let bytes = plan.workspace_bytes();
        let workspace = match usize::try_from(bytes) {
            Ok(0) => None,
            Ok(bytes) => Some(Buffer::new(&self.context, bytes)?),
            Err(_) => return argument(format!("{bytes} bytes of workspace cannot be counted")),
        };
        let address = workspace.as_ref().map_or_else(std::ptr::null_mut, Buffer::address);
        self.enqueue(Box::new((keep, workspace)), |_, raw| {
            // SAFETY: the workspace is as large as the plan wants and, like the tensors by the caller's
            // word, held by the stream; the stream's context is current.
            unsafe { plan.run(address, raw) }
        })
    }

    fn range(&self, buffer: &Buffer, offset: usize, bytes: usize) -> Result<*mut c_void> {
        if *buffer.context() != self.context {
            return argument("a buffer and a stream are of different contexts");
        }
        buffer.range(offset, bytes)
    }

    fn kept(&self) -> MutexGuard<'_, Vec<Kept>> {
        // A panic under the lock leaves a list that is longer than need be.
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn settle(&self, wait: impl FnOnce(&Acl) -> Result<()>) -> Result<()> {
        let before = mem::take(&mut *self.kept());
        let entered = self.context.enter();
        let waited = entered.and_then(|_entered| wait(self.context.acl()));
        match &waited {
            Ok(()) => drop(before),
            Err(_) => self.kept().extend(before),
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
        let waited = match self.synchronize_for(Self::PATIENCE) {
            Err(Error::NoFunction { .. }) => self.synchronize(),
            other => other,
        };
        if waited.is_err() {
            // Work may still be under way, and use these.
            mem::forget(mem::take(&mut *self.kept()));
        }
        let Ok(_entered) = self.context.enter() else { return };
        // SAFETY: acl_rt.h, `aclrtDestroyStream`: a stream of the current context, once.
        dropped(unsafe { self.context.acl().aclrtDestroyStream(self.raw) });
    }
}
