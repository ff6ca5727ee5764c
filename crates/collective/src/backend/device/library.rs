//! What the core asks of a library: a device with events, and a communicator.

#![expect(unsafe_code, reason = "declares calls on the memory and streams of others")]

use std::any::Any;
use std::fmt::Debug;
use std::sync::Arc;
use std::time::Instant;

use crate::device::{DeviceBuf, DeviceStep, DeviceStream, Mark, no_copies};
use crate::{Error, OpDesc, Rank, Result};

/// A device, as one group sees it.
pub(crate) trait Device: Debug + Send + Sync + 'static {
    /// A place in a stream of it.
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

    /// An event that is nowhere yet; the device is current.
    fn event(self: &Arc<Self>) -> Result<Self::Event>;

    /// As [`DeviceBackend::stream`](crate::device::DeviceBackend::stream).
    fn stream(self: &Arc<Self>) -> Result<(DeviceStream, Box<dyn Any + Send + Sync>)>;

    /// # Safety
    ///
    /// As [`DeviceBackend::copy`](crate::device::DeviceBackend::copy).
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

/// A place in a stream.
pub(crate) trait Event: Mark + 'static {
    /// Puts it into the stream, behind what is there; its device is current.
    fn record(&self, stream: DeviceStream) -> Result<()>;
}

/// One rank's end of a library's communicator.
pub(crate) trait Communicator: Debug + Send + Sync + Sized + 'static {
    /// The backend's name.
    const BACKEND: &'static str;
    /// What ends a communicator that has failed, for error texts.
    const ABORT: &'static str;
    /// Until when the device may use memory that an abort has not freed, for error texts.
    const HELD: &'static str;

    /// The device beneath.
    type Device: Device;
    /// What a launch needs until it has ended.
    type Kept: Debug + Send + Sync;

    /// Whether the library has the operator on this device.
    fn supports(&self, op: &OpDesc) -> Result<()>;

    /// Puts the steps into a stream. While it has to wait it calls `go_on` again and again, which
    /// takes a moment and fails once the group has.
    ///
    /// # Safety
    ///
    /// As [`DeviceBackend::enqueue`](crate::device::DeviceBackend::enqueue).
    unsafe fn launch(
        &self,
        steps: &[DeviceStep],
        stream: DeviceStream,
        go_on: &dyn Fn() -> Result<()>,
    ) -> Result<Self::Kept>;

    /// A failure that the library has noticed beside all calls; does not wait.
    fn healthy(&self) -> Result<()>;

    /// Whether the operation behind which `end` was recorded is over; an error if it ended badly.
    fn ended(&self, end: &EventOf<Self>) -> Result<bool> {
        end.reached()
    }

    /// Makes the end of a new group of a part of the ranks, which all ranks call: with a colour and a
    /// place for those that are in one. `go_on` as for [`launch`](Self::launch).
    fn split(
        &self,
        place: Option<(Rank, Rank)>,
        deadline: Instant,
        go_on: &dyn Fn() -> Result<()>,
    ) -> Result<Option<Self>>;

    /// Frees what peers and device hold for it, without their consent, once; whether the device has
    /// let go of all memory when it returns: not after an error. `under_way` tells whether something is
    /// in the streams.
    fn abort(&self, under_way: &dyn Fn() -> bool) -> Result<bool>;

    /// Ends it in order, when nothing is under way; after the deadline or a failure, aborts.
    fn finish(&self, deadline: Instant);

    /// # Safety
    ///
    /// As [`DeviceBackend::register`](crate::device::DeviceBackend::register).
    unsafe fn register(self: &Arc<Self>, buf: DeviceBuf) -> Result<Box<dyn Any + Send + Sync>>;

    /// As [`DeviceBackend::alloc_device`](crate::device::DeviceBackend::alloc_device).
    fn alloc(&self, bytes: usize) -> Result<(u64, Box<dyn Any + Send + Sync>)>;

    /// Whether an error of the library may come from a peer's end.
    fn is_remote(error: &Error) -> bool;

    /// What an error of the library may mean that names nobody.
    fn doubt(error: &Error) -> Doubt;
}

/// What may be behind an error of a library.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(not(feature = "hccl"), expect(dead_code, reason = "NCCL's errors leave no doubt"))]
pub(crate) enum Doubt {
    /// What it says.
    None,
    /// Ranks that called different things.
    Different,
    /// Likewise, or ranks that did not come; how it is said behind an operation's name.
    Absent(&'static str),
}

pub(crate) type EventOf<C> = <<C as Communicator>::Device as Device>::Event;
