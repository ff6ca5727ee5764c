//! A context: a device as one user sees it.

#![expect(unsafe_code, reason = "calls C")]

use std::marker::PhantomData;
use std::sync::Arc;

use super::{argument, dropped};
use crate::status::REPEAT_INITIALIZE;
use crate::sys::{Acl, AclrtContext};
use crate::{Error, Result, result};

/// A context of its own on a device. Clones are the same context; it ends with the last of them and of
/// all that was made in it.
#[derive(Clone, Debug)]
pub struct Context(Arc<Held>);

#[derive(Debug)]
struct Held {
    acl: &'static Acl,
    device: usize,
    raw: AclrtContext,
}

impl Context {
    /// A context on the device with this index among those that `ASCEND_RT_VISIBLE_DEVICES` leaves.
    ///
    /// Initialises AscendCL if nobody has. The thread's current context stays what it was; if there was
    /// none, this one stays current, since AscendCL has no way back to none.
    ///
    /// # Errors
    ///
    /// [`Error::Status`], for example of an index that is too large.
    pub fn new(acl: &'static Acl, device: usize) -> Result<Self> {
        match result::init(acl) {
            Err(Error::Status { status, .. }) if status.code() == REPEAT_INITIALIZE => {}
            other => other?,
        }
        let Ok(index) = i32::try_from(device) else {
            return argument(format!("there is no device {device}"));
        };
        let previous = current(acl);
        let mut raw = AclrtContext::NULL;
        // SAFETY: acl_rt.h, `aclrtCreateContext`: writes one handle, to a local.
        unsafe { acl.aclrtCreateContext(&raw mut raw, index) }?;
        let made = Self(Arc::new(Held { acl, device, raw }));
        // AscendCL has made it current.
        drop(Entered { acl, previous, entered: raw, thread: PhantomData, pinned: PhantomData });
        Ok(made)
    }

    /// The device's index.
    #[must_use]
    pub fn device(&self) -> usize {
        self.0.device
    }

    /// The table it was made with.
    #[must_use]
    pub fn acl(&self) -> &'static Acl {
        self.0.acl
    }

    /// The handle, for calls of one's own; valid as long as `self`.
    #[must_use]
    pub fn raw(&self) -> AclrtContext {
        self.0.raw
    }

    /// Makes this context the thread's current one until the guard is dropped.
    ///
    /// # Errors
    ///
    /// [`Error::Status`].
    pub fn enter(&self) -> Result<Entered<'_>> {
        self.0.enter()
    }
}

impl PartialEq for Context {
    /// Whether it is the same context, not only the same device.
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Context {}

impl Held {
    fn enter(&self) -> Result<Entered<'_>> {
        let previous = current(self.acl);
        if previous != self.raw {
            // SAFETY: acl_rt.h, `aclrtSetCurrentContext`: a context that exists, as `self` does.
            unsafe { self.acl.aclrtSetCurrentContext(self.raw) }?;
        }
        let (thread, pinned) = (PhantomData, PhantomData);
        Ok(Entered { acl: self.acl, previous, entered: self.raw, thread, pinned })
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        // SAFETY: acl_rt.h, `aclrtDestroyContext`: a context that exists; all that was made in it held
        // a clone, so nothing is left in it.
        dropped(unsafe { self.acl.aclrtDestroyContext(self.raw) });
    }
}

/// The thread's current context; null if there is none, which AscendCL calls an error.
fn current(acl: &Acl) -> AclrtContext {
    let mut raw = AclrtContext::NULL;
    // SAFETY: acl_rt.h, `aclrtGetCurrentContext`: writes one handle, to a local.
    match unsafe { acl.aclrtGetCurrentContext(&raw mut raw) } {
        Ok(()) => raw,
        Err(_) => AclrtContext::NULL,
    }
}

/// While it lives, a context is the thread's current one.
#[derive(Debug)]
#[must_use = "the previous context is put back when this is dropped"]
pub struct Entered<'a> {
    acl: &'static Acl,
    previous: AclrtContext,
    entered: AclrtContext,
    thread: PhantomData<&'a ()>,
    /// What is current belongs to a thread, so the guard stays there.
    pinned: PhantomData<*mut ()>,
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        if self.previous != AclrtContext::NULL && self.previous != self.entered {
            // SAFETY: acl_rt.h, `aclrtSetCurrentContext`: this thread had this context; if somebody
            // has destroyed it since, that is an error code.
            dropped(unsafe { self.acl.aclrtSetCurrentContext(self.previous) });
        }
    }
}
