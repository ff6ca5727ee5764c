//! What the core needs of a library: a device with events, and a communicator.

#![expect(unsafe_code, reason = "declares calls on the memory and streams of others")]

use std::any::Any;
use std::ffi::c_void;
use std::fmt::Debug;
use std::sync::Arc;
use std::time::Instant;

use crate::device::{DeviceBuf, DeviceStep, DeviceStream, Mark, no_copies};
use crate::{Error, OpDesc, Rank, Result};

/// A device, as one group sees it.
pub(crate) trait Device: Debug + Send + Sync + 'static {
    /// An event of the device.
    type Event: Event;
    /// While it lives, the device is this thread's current one.
    type Entered<'a>
    where
        Self: 'a;

    /// For example `cuda:3`.
    fn name(&self) -> String;

    /// Makes the device current on this thread until the result is dropped.
    fn enter(&self) -> Result<Self::Entered<'_>>;

    /// Whether operations can be put into the stream; the device is current.
    fn check_stream(&self, stream: DeviceStream) -> Result<()>;

    /// A new event, in no stream yet; the device is current.
    fn event(self: &Arc<Self>) -> Result<Self::Event>;

    /// As [`DeviceBackend::stream`](crate::device::DeviceBackend::stream).
    fn stream(self: &Arc<Self>) -> Result<(DeviceStream, Box<dyn Any + Send + Sync>)>;

    /// # Safety
    ///
    /// As [`DeviceBackend::copy`](crate::device::DeviceBackend::copy); here and below of at least one byte.
    unsafe fn copy(&self, to: DeviceBuf, from: DeviceBuf, stream: DeviceStream) -> Result<()>;

    /// # Safety
    ///
    /// As [`DeviceBackend::upload`](crate::device::DeviceBackend::upload); of as many bytes.
    unsafe fn upload(&self, _to: DeviceBuf, _from: &[u8]) -> Result<()> {
        Err(no_copies("device"))
    }

    /// # Safety
    ///
    /// As [`DeviceBackend::download`](crate::device::DeviceBackend::download); of as many bytes.
    unsafe fn download(&self, _to: &mut [u8], _from: DeviceBuf) -> Result<()> {
        Err(no_copies("device"))
    }

    /// # Safety
    ///
    /// As [`DeviceBackend::clear`](crate::device::DeviceBackend::clear).
    unsafe fn clear(&self, buf: DeviceBuf, stream: DeviceStream) -> Result<()>;
}

/// An event in a stream.
pub(crate) trait Event: Mark + 'static {
    /// Records it at the end of the stream; its device is current.
    fn record(&self, stream: DeviceStream) -> Result<()>;
}

/// One rank's end of a library's communicator.
pub(crate) trait Communicator: Debug + Send + Sync + Sized + 'static {
    /// The backend's name.
    const BACKEND: &'static str;
    /// Name of the function that ends a failed communicator, for error texts.
    const ABORT: &'static str;
    /// How long the device may use memory that an abort has not released, for error texts.
    const HELD: &'static str;

    /// The device beneath.
    type Device: Device;
    /// What a launch needs until it has ended.
    type KeepAlive: Debug + Send + Sync;

    /// Whether the library has the operator on this device.
    fn supports(&self, op: &OpDesc) -> Result<()>;

    /// Puts the steps into a stream. While it waits it calls `check_health` repeatedly, which sleeps for a moment
    /// and fails once the group has.
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

    /// Returns an asynchronous error of the library, if there is one. Does not wait.
    fn healthy(&self) -> Result<()>;

    /// Whether the operation before `end` has ended; an error if it failed.
    fn ended(&self, end: &EventOf<Self>) -> Result<bool> {
        end.reached()
    }

    /// Makes this rank's end of a new group of some of the ranks. All ranks call it; those in a new group
    /// give a colour and their rank in it. `check_health` as for [`launch`](Self::launch). Only called if
    /// [`GroupConfig::can_split`](super::GroupConfig::can_split).
    fn split(
        &self,
        _place: Option<(Rank, Rank)>,
        _deadline: Instant,
        _go_on: &dyn Fn() -> Result<()>,
    ) -> Result<Option<Self>> {
        Err(unsupported::<Self>("communicators made by a split"))
    }

    /// Ends it at once, without the peers. Returns whether the device has released all memory; after an
    /// error it has not. `under_way` tells whether operations are in the streams.
    fn abort(&self, under_way: &dyn Fn() -> bool) -> Result<bool>;

    /// Ends it together with the peers, when nothing is under way; aborts after the deadline or a failure.
    fn finish(&self, deadline: Instant);

    /// # Safety
    ///
    /// As [`DeviceBackend::register`](crate::device::DeviceBackend::register).
    unsafe fn register(self: &Arc<Self>, _buf: DeviceBuf) -> Result<Box<dyn Any + Send + Sync>> {
        Err(unsupported::<Self>("registered memory"))
    }

    /// As [`DeviceBackend::alloc_device`](crate::device::DeviceBackend::alloc_device).
    fn alloc(&self, bytes: usize) -> Result<(u64, Box<dyn Any + Send + Sync>)>;

    /// Whether an error of the library may come from a peer's end.
    fn is_remote(error: &Error) -> bool;

    /// What may be behind an error of the library that names no rank.
    fn possible_cause(_error: &Error) -> PossibleCause {
        PossibleCause::AsReported
    }
}

/// What may be behind an error of a library.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(not(feature = "hccl"), expect(dead_code, reason = "NCCL's errors are as reported"))]
pub(crate) enum PossibleCause {
    /// What it says.
    AsReported,
    /// Ranks that called different things.
    Mismatch,
    /// Likewise, or ranks that did not come; the text follows an operation's name.
    MismatchOrMissing(&'static str),
}

/// The error for what a library lacks.
pub(crate) fn unsupported<C: Communicator>(what: impl Into<String>) -> Error {
    Error::Unsupported { backend: C::BACKEND, what: what.into() }
}

pub(crate) type EventOf<C> = <<C as Communicator>::Device as Device>::Event;

/// An address of a device as C has it.
pub(crate) fn pointer(address: u64) -> *mut c_void {
    std::ptr::with_exposed_provenance_mut(address as usize)
}
