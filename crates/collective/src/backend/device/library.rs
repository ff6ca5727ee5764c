//! Traits that a device library implements for the core: a device with events, and a communicator.

#![expect(unsafe_code, reason = "declares calls on callers' memory and streams")]

use std::any::Any;
use std::ffi::c_void;
use std::fmt::Debug;
use std::sync::Arc;
use std::time::Instant;

use crate::backend::device_memory::{DeviceBuf, DeviceStep, DeviceStream, Mark};
use crate::{Error, OpDesc, Rank, Result};

/// A device, as used by one group.
pub(crate) trait Device: Debug + Send + Sync + 'static {
    /// An event of the device.
    type Event: Event;
    /// Guard: the device is current on this thread until it is dropped.
    type Entered<'a>
    where
        Self: 'a;

    /// Returns the device's name, for example `cuda:3`.
    fn name(&self) -> String;

    /// Makes the device current on this thread until the result is dropped.
    fn enter(&self) -> Result<Self::Entered<'_>>;

    /// Allows this thread's calls to run beside other threads' captures of streams into graphs, and
    /// leaves those valid.
    fn relax_captures(&self) -> Result<()> {
        Ok(())
    }

    /// Checks that operations can be enqueued in the stream. The device must be current.
    fn check_stream(&self, stream: DeviceStream) -> Result<()>;

    /// Returns an event that is not recorded yet. The device must be current.
    fn event(self: &Arc<Self>) -> Result<Self::Event>;

    /// As [`DeviceBackend::stream`](crate::device::DeviceBackend::stream).
    fn stream(self: &Arc<Self>) -> Result<(DeviceStream, Box<dyn Any + Send + Sync>)>;

    /// # Safety
    ///
    /// As [`DeviceBackend::copy`](crate::device::DeviceBackend::copy); here and below for at least
    /// one byte.
    unsafe fn copy(&self, to: DeviceBuf, from: DeviceBuf, stream: DeviceStream) -> Result<()>;

    /// # Safety
    ///
    /// As [`DeviceBackend::upload`](crate::device::DeviceBackend::upload).
    unsafe fn upload(&self, to: DeviceBuf, from: &[u8]) -> Result<()>;

    /// # Safety
    ///
    /// As [`DeviceBackend::download`](crate::device::DeviceBackend::download).
    unsafe fn download(&self, to: &mut [u8], from: DeviceBuf) -> Result<()>;

    /// # Safety
    ///
    /// As [`DeviceBackend::clear`](crate::device::DeviceBackend::clear).
    unsafe fn clear(&self, buf: DeviceBuf, stream: DeviceStream) -> Result<()>;
}

/// An event that can be recorded in a stream.
pub(crate) trait Event: Mark + 'static {
    /// Records the event at the end of the stream. Its device must be current.
    fn record(&self, stream: DeviceStream) -> Result<()>;
}

/// This rank's handle to a library's communicator.
pub(crate) trait Communicator: Debug + Send + Sync + Sized + 'static {
    /// The backend's name.
    const BACKEND: &'static str;
    /// Name of the function that aborts a failed communicator, for error texts.
    const ABORT: &'static str;
    /// Until when the device may use memory after a failed abort, for error texts.
    const IN_USE_UNTIL: &'static str;

    /// The device type.
    type Device: Device;
    /// Resources that a launch needs until it has completed.
    type KeepAlive: Debug + Send + Sync;

    /// Checks that the library supports the operation on this device.
    fn supports(&self, op: &OpDesc) -> Result<()>;

    /// Enqueues the steps in a stream. While it waits, it calls `check_health` repeatedly, which
    /// sleeps briefly and fails once the group has failed.
    ///
    /// # Safety
    ///
    /// As [`DeviceBackend::enqueue`](crate::device::DeviceBackend::enqueue).
    unsafe fn launch(
        &self,
        steps: &[DeviceStep],
        stream: DeviceStream,
        check_health: &dyn Fn() -> Result<()>,
    ) -> Result<Self::KeepAlive>;

    /// Fails if the library reports an asynchronous error. Does not block.
    fn healthy(&self) -> Result<()>;

    /// Returns whether the operation before `end` has ended. Fails if the operation failed.
    fn ended(&self, end: &EventOf<Self>) -> Result<bool> {
        end.reached()
    }

    /// Splits the communicator, like `ncclCommSplit`. All ranks call it; members of a new group
    /// pass its color and their rank in it. `check_health` is as for [`launch`](Self::launch).
    /// Called only if [`GroupConfig::can_split`](super::GroupConfig::can_split).
    fn split(
        &self,
        _color_and_key: Option<(Rank, Rank)>,
        _deadline: Instant,
        _check_health: &dyn Fn() -> Result<()>,
    ) -> Result<Option<Self>> {
        Err(unsupported::<Self>("splitting a communicator"))
    }

    /// Aborts the communicator at once, without its peers. Returns whether the device has released
    /// all memory; after an error it has not. `under_way` returns whether operations are in the
    /// streams.
    fn abort(&self, under_way: &dyn Fn() -> bool) -> Result<bool>;

    /// Destroys the communicator together with its peers, when no operation is pending. Aborts it
    /// after the deadline or a failure.
    fn finish(&self, deadline: Instant);

    /// # Safety
    ///
    /// As [`DeviceBackend::register`](crate::device::DeviceBackend::register).
    unsafe fn register(self: &Arc<Self>, _buf: DeviceBuf) -> Result<Box<dyn Any + Send + Sync>> {
        Err(unsupported::<Self>("registered memory"))
    }

    /// As [`DeviceBackend::alloc_device`](crate::device::DeviceBackend::alloc_device).
    fn alloc(&self, bytes: usize) -> Result<(u64, Box<dyn Any + Send + Sync>)>;

    /// Returns whether a peer may have caused an error of the library.
    fn is_remote(error: &Error) -> bool;

    /// Returns the possible cause of a library error that names no rank.
    fn possible_cause(_error: &Error) -> PossibleCause {
        PossibleCause::AsReported
    }
}

/// Possible cause of a library error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(not(feature = "npu"), expect(dead_code, reason = "NCCL's errors are as reported"))]
pub(crate) enum PossibleCause {
    /// The cause that the error reports.
    AsReported,
    /// Ranks called different operations.
    Mismatch,
    /// Ranks called different operations, or some are missing; the text follows the operation's
    /// name.
    MismatchOrMissing(&'static str),
}

/// Returns the error for a feature that the library lacks.
pub(crate) fn unsupported<C: Communicator>(what: impl Into<String>) -> Error {
    Error::Unsupported { backend: C::BACKEND, what: what.into() }
}

pub(crate) type EventOf<C> = <<C as Communicator>::Device as Device>::Event;

/// Converts a device address to a C pointer.
pub(crate) fn pointer(address: u64) -> *mut c_void {
    std::ptr::with_exposed_provenance_mut(address as usize)
}
