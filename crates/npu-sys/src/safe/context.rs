//! Contexts of devices.

#![expect(unsafe_code, reason = "calls C")]

use std::marker::PhantomData;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use super::{argument, dropped};
use crate::status::REPEAT_INITIALIZE;
use crate::sys::{Acl, AclrtContext};
use crate::{Error, Result, result};

/// A context on a device. Clones share it; it is destroyed with the last clone and the last handle
/// that was created in it.
#[derive(Clone, Debug)]
pub struct Context(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    acl: Acl,
    device: usize,
    raw: AclrtContext,
    /// Whether it is destroyed with the last handle.
    owned: bool,
}

/// The contexts made by [`Context::new`] and not destroyed yet, for [`Context::of_thread`].
static CONTEXTS: Mutex<Vec<(AclrtContext, Weak<Inner>)>> = Mutex::new(Vec::new());

impl Context {
    /// Creates a context on a device; `device` is an index into the devices that
    /// `ASCEND_RT_VISIBLE_DEVICES` allows.
    ///
    /// Initializes AscendCL if necessary. Restores the thread's current context; if there was none,
    /// the new context stays current, since AscendCL cannot reset it to none.
    ///
    /// # Errors
    ///
    /// [`Error::Status`], for example if the index is too large.
    pub fn new(acl: &Acl, device: usize) -> Result<Self> {
        match result::init(acl) {
            Err(Error::Status { status, .. }) if status.code() == REPEAT_INITIALIZE => {}
            other => other?,
        }
        let (index, previous) = (index(device)?, current(acl));
        let mut raw = AclrtContext::NULL;
        // SAFETY: acl_rt.h, `aclrtCreateContext`: writes one handle, to a local.
        unsafe { acl.aclrtCreateContext(&raw mut raw, index) }?;
        let inner = Arc::new(Inner { acl: *acl, device, raw, owned: true });
        contexts().push((raw, Arc::downgrade(&inner)));
        let made = Self(inner);
        // AscendCL has made it current: restore the previous one.
        drop(Entered { acl, previous, entered: raw, thread: PhantomData, pinned: PhantomData });
        Ok(made)
    }

    /// Returns the thread's current context if it is of this device, else the device's default
    /// context, which `aclrtSetDevice` creates. Shares a context of [`new`](Self::new) with its
    /// other handles; any other is not destroyed by this crate, and code that calls
    /// `aclrtDestroyContext` or `aclrtResetDevice` itself must first drop the handles. Restores the
    /// thread's current context as [`new`](Self::new) does. AscendCL must have been initialized.
    ///
    /// # Errors
    ///
    /// [`Error::Status`], for example if the index is too large; [`Error::Null`].
    pub fn of_thread(acl: &Acl, device: usize) -> Result<Self> {
        // Locked, so that no current context is destroyed meanwhile.
        let contexts = contexts();
        let (index, previous) = (index(device)?, current(acl));
        let (mut raw, mut on) = (previous, -1);
        // Another thread may be about to destroy it.
        let ends = contexts.iter().any(|(made, inner)| *made == raw && inner.strong_count() == 0);
        if raw != AclrtContext::NULL && !ends {
            // SAFETY: acl_rt.h, `aclrtGetDevice`: writes one number, to a local.
            unsafe { acl.aclrtGetDevice(&raw mut on) }?;
        }
        if on != index {
            // SAFETY: acl_rt.h, `aclrtSetDevice`: makes the default context current; a device that
            // does not exist is an error code.
            unsafe { acl.aclrtSetDevice(index) }?;
            raw = current(acl);
            drop(Entered { acl, previous, entered: raw, thread: PhantomData, pinned: PhantomData });
        }
        if raw == AclrtContext::NULL {
            return Err(Error::Null { function: "aclrtSetDevice" });
        }
        let made = contexts.iter().find(|(made, _)| *made == raw);
        let shared = made.and_then(|(_, inner)| inner.upgrade());
        let foreign = || Arc::new(Inner { acl: *acl, device, raw, owned: false });
        Ok(Self(shared.unwrap_or_else(foreign)))
    }

    /// The device's index.
    #[must_use]
    pub fn device(&self) -> usize {
        self.0.device
    }

    /// The table of AscendCL's functions.
    #[must_use]
    pub fn acl(&self) -> &Acl {
        &self.0.acl
    }

    /// The raw handle, valid as long as `self`.
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
    /// Whether both are the same context, not only the same device.
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Context {}

impl Inner {
    fn enter(&self) -> Result<Entered<'_>> {
        let previous = current(&self.acl);
        if previous != self.raw {
            // SAFETY: acl_rt.h, `aclrtSetCurrentContext`: the context exists as long as `self`.
            unsafe { self.acl.aclrtSetCurrentContext(self.raw) }?;
        }
        let (thread, pinned) = (PhantomData, PhantomData);
        Ok(Entered { acl: &self.acl, previous, entered: self.raw, thread, pinned })
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if !self.owned {
            return;
        }
        let mut contexts = contexts();
        contexts.retain(|(made, _)| *made != self.raw);
        // SAFETY: acl_rt.h, `aclrtDestroyContext`: the context exists; every handle in it had a
        // clone, so none is left.
        dropped(unsafe { self.acl.aclrtDestroyContext(self.raw) });
    }
}

fn contexts() -> MutexGuard<'static, Vec<(AclrtContext, Weak<Inner>)>> {
    // After a panic the list is still valid.
    CONTEXTS.lock().unwrap_or_else(PoisonError::into_inner)
}

fn index(device: usize) -> Result<i32> {
    i32::try_from(device).or_else(|_| argument(format!("there is no device {device}")))
}

/// The thread's current context; null if there is none, for which AscendCL returns an error.
fn current(acl: &Acl) -> AclrtContext {
    let mut raw = AclrtContext::NULL;
    // SAFETY: acl_rt.h, `aclrtGetCurrentContext`: writes one handle, to a local.
    match unsafe { acl.aclrtGetCurrentContext(&raw mut raw) } {
        Ok(()) => raw,
        Err(_) => AclrtContext::NULL,
    }
}

/// A guard: a context is the thread's current one until this is dropped.
#[derive(Debug)]
#[must_use = "the previous context is restored when this is dropped"]
pub struct Entered<'a> {
    acl: &'a Acl,
    previous: AclrtContext,
    entered: AclrtContext,
    thread: PhantomData<&'a ()>,
    /// Not `Send`, since the current context belongs to a thread.
    pinned: PhantomData<*mut ()>,
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        if self.previous != AclrtContext::NULL && self.previous != self.entered {
            // SAFETY: acl_rt.h, `aclrtSetCurrentContext`: this context was current before; if it
            // has been destroyed since, the call returns an error code.
            dropped(unsafe { self.acl.aclrtSetCurrentContext(self.previous) });
        }
    }
}
