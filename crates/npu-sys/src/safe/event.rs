//! A mark in a stream.

#![expect(unsafe_code, reason = "calls C")]

use std::sync::Arc;

use super::{Context, Stream, argument, dropped};
use crate::Result;
use crate::sys::{ACL_EVENT_SYNC, AclrtEvent, AclrtEventRecordedStatus};

/// A mark that one stream reaches and others, or the host, wait for. Clones are the same mark.
#[derive(Clone, Debug)]
pub struct Event(Arc<Held>);

#[derive(Debug)]
struct Held {
    context: Context,
    raw: AclrtEvent,
}

impl Event {
    /// A mark in no stream yet.
    ///
    /// # Errors
    ///
    /// [`Error::Status`](crate::Error::Status).
    pub fn new(context: &Context) -> Result<Self> {
        let _entered = context.enter()?;
        let mut raw = AclrtEvent::NULL;
        // SAFETY: acl_rt.h, `aclrtCreateEventExWithFlag`: writes one handle, to a local. The flag lets
        // streams wait for the event.
        unsafe { context.acl().aclrtCreateEventExWithFlag(&raw mut raw, ACL_EVENT_SYNC) }?;
        Ok(Self(Arc::new(Held { context: context.clone(), raw })))
    }

    /// Puts the mark at the present end of `stream`.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`](crate::Error::Argument) if the stream is of another context.
    /// [`Error::Status`](crate::Error::Status).
    pub fn record(&self, stream: &Stream) -> Result<()> {
        if *stream.context() != self.0.context {
            return argument("an event and the stream that records it are of different contexts");
        }
        stream.enqueue(Box::new(self.clone()), |acl, raw| {
            // SAFETY: acl_rt.h, `aclrtRecordEvent`: both exist, and their context is current.
            unsafe { acl.aclrtRecordEvent(self.0.raw, raw) }
        })
    }

    /// Makes `stream` wait for the mark before it does what is put into it from now on.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`](crate::Error::Argument) if the stream is of another device.
    /// [`Error::Status`](crate::Error::Status).
    pub fn hold_back(&self, stream: &Stream) -> Result<()> {
        if stream.context().device() != self.0.context.device() {
            return argument("an event cannot hold back a stream of another device");
        }
        stream.enqueue(Box::new(self.clone()), |acl, raw| {
            // SAFETY: acl_rt.h, `aclrtStreamWaitEvent`: both exist, the stream's context is current.
            unsafe { acl.aclrtStreamWaitEvent(raw, self.0.raw) }
        })
    }

    /// Whether all that was in the stream before the mark is done.
    ///
    /// # Errors
    ///
    /// [`Error::Status`](crate::Error::Status).
    pub fn is_reached(&self) -> Result<bool> {
        let _entered = self.0.context.enter()?;
        let mut status = AclrtEventRecordedStatus::NOT_READY;
        // SAFETY: acl_rt.h, `aclrtQueryEventStatus`: writes one status, to a local.
        unsafe { self.0.context.acl().aclrtQueryEventStatus(self.0.raw, &raw mut status) }?;
        Ok(status == AclrtEventRecordedStatus::COMPLETE)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let Ok(_entered) = self.context.enter() else { return };
        // SAFETY: acl_rt.h, `aclrtDestroyEvent`: an event that exists, once; streams that use it hold
        // a clone.
        dropped(unsafe { self.context.acl().aclrtDestroyEvent(self.raw) });
    }
}
