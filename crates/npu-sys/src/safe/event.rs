//! Events in streams.

#![expect(unsafe_code, reason = "calls C")]

use std::sync::Arc;

use super::{Context, Stream, argument, dropped};
use crate::Result;
use crate::sys::{ACL_EVENT_SYNC, AclrtEvent, AclrtEventRecordedStatus};

/// An event that is recorded on a stream and for which other streams can wait. Clones share it.
#[derive(Clone, Debug)]
pub struct Event(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    context: Context,
    raw: AclrtEvent,
}

impl Event {
    /// Creates an event that is not recorded yet.
    ///
    /// # Errors
    ///
    /// [`Error::Status`](crate::Error::Status).
    pub fn new(context: &Context) -> Result<Self> {
        let _entered = context.enter()?;
        let mut raw = AclrtEvent::NULL;
        // SAFETY: acl_rt.h, `aclrtCreateEventExWithFlag`: writes one handle, to a local. The flag
        // lets streams wait for the event.
        unsafe { context.acl().aclrtCreateEventExWithFlag(&raw mut raw, ACL_EVENT_SYNC) }?;
        Ok(Self(Arc::new(Inner { context: context.clone(), raw })))
    }

    /// Records the event on `stream`, after the work enqueued so far.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`](crate::Error::Argument) if the stream belongs to another context.
    /// [`Error::Status`](crate::Error::Status).
    pub fn record(&self, stream: &Stream) -> Result<()> {
        if *stream.context() != self.0.context {
            return argument("cannot record an event on a stream of another context");
        }
        stream.enqueue(Box::new(self.clone()), |acl, raw| {
            // SAFETY: acl_rt.h, `aclrtRecordEvent`: both exist, and their context is current.
            unsafe { acl.aclrtRecordEvent(self.0.raw, raw) }
        })
    }

    /// Makes all future work enqueued on `stream` wait for the event.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`](crate::Error::Argument) if the stream belongs to another device.
    /// [`Error::Status`](crate::Error::Status).
    pub fn wait(&self, stream: &Stream) -> Result<()> {
        if stream.context().device() != self.0.context.device() {
            return argument("a stream cannot wait for an event of another device");
        }
        stream.enqueue(Box::new(self.clone()), |acl, raw| {
            // SAFETY: acl_rt.h, `aclrtStreamWaitEvent`: both exist, the stream's context is
            // current.
            unsafe { acl.aclrtStreamWaitEvent(raw, self.0.raw) }
        })
    }

    /// Returns whether all work that was enqueued before [`record`](Self::record) has completed.
    ///
    /// # Errors
    ///
    /// [`Error::Status`](crate::Error::Status).
    pub fn is_complete(&self) -> Result<bool> {
        let _entered = self.0.context.enter()?;
        let mut status = AclrtEventRecordedStatus::NOT_READY;
        // SAFETY: acl_rt.h, `aclrtQueryEventStatus`: writes one status, to a local.
        unsafe { self.0.context.acl().aclrtQueryEventStatus(self.0.raw, &raw mut status) }?;
        Ok(status == AclrtEventRecordedStatus::COMPLETE)
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let Ok(_entered) = self.context.enter() else { return };
        // SAFETY: acl_rt.h, `aclrtDestroyEvent`: destroys the event once; streams that use it have
        // a clone.
        dropped(unsafe { self.context.acl().aclrtDestroyEvent(self.raw) });
    }
}
