//! Collectives on device memory: [`DeviceBackend`], which backends for GPUs and NPUs implement, and
//! the types that callers use.
//!
//! Memory and streams belong to the caller and are passed as addresses. An operation is enqueued in
//! a stream and the call returns; [`DeviceWork`] reports its completion. The host waits for the
//! device only in the methods that say so. Two things differ from the verbs on slices:
//!
//! * **The caller must uphold the contract** of [`DeviceBuf::from_raw`], which cannot be checked.
//!   The memory is in use until the `DeviceWork` has settled, even after a failure: an error is
//!   returned only once the device has released the memory.
//! * **Calls are not compared before data is moved**, unless the backend is configured to, because
//!   the peers' hosts may be far ahead or behind. Each rank checks lengths, roots and operators
//!   before it enqueues; a rank that calls a different operation is detected when the operation
//!   times out.
//!
//! [`ProcessGroup::device`](crate::ProcessGroup::device) starts a list of calls, see
//! [`DeviceCalls`]. The verbs on slices work in the same group, on host memory.

#![expect(unsafe_code, reason = "declares a call that hands out device memory")]

mod calls;

use std::any::Any;
use std::fmt::Debug;

pub use self::calls::DeviceCalls;
pub use crate::backend::device_memory::{
    DeviceBackend, DeviceBatch, DeviceBuf, DeviceStep, DeviceStream, DeviceWork, Ended, InFlight,
    Mark,
};

/// Memory that is registered with the group's library, until it is dropped.
#[derive(Debug)]
pub struct Registration(#[expect(dead_code, reason = "held to be dropped")] KeepAlive);

/// Device memory from the group's library, freed when it is dropped.
#[derive(Debug)]
pub struct DeviceMemory {
    buf: DeviceBuf,
    _kept: KeepAlive,
}

impl DeviceMemory {
    /// Returns the memory as a buffer.
    ///
    /// # Safety
    ///
    /// As [`DeviceBuf::from_raw`]: `self` is not dropped while the buffer is in use.
    pub unsafe fn as_buf(&self) -> DeviceBuf {
        self.buf
    }
}

/// A resource that is held until it is dropped.
pub(crate) struct KeepAlive(
    #[expect(dead_code, reason = "held to be dropped")] pub(crate) Box<dyn Any + Send + Sync>,
);

impl Debug for KeepAlive {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("KeepAlive")
    }
}
