//! The part of AscendCL that this backend uses: a device's context, events, streams, memory,
//! copies.
//!
//! A [`Device`] uses a context that it does not own: the current one of the thread that joins the
//! group, or the default one that `aclrtSetDevice` creates, which lasts as long as the process.
//! Every call of CANN [enters](device::Device::enter) it first and restores the thread's context
//! afterwards.
//!
//! Invariant: an event is destroyed only after its stream has reached it and every stream that
//! waits for it has passed the wait. Until then the device keeps it.

#![expect(unsafe_code, reason = "calls C")]

use std::any::Any;
use std::sync::Arc;

use npu_sys::safe::{Buffer, Context, Entered, Stream};
use npu_sys::sys::{
    ACL_EVENT_SYNC, AclrtEvent, AclrtEventRecordedStatus, AclrtMemcpyKind, AclrtStream,
    HcclRootInfo,
};
use parking_lot::Mutex;

use super::result::{Libraries, Tables};
use crate::backend::device::{self, pointer};
use crate::backend::device_memory::{DeviceBuf, DeviceStream, Mark};
use crate::{Error, Result};

/// A device and one of its contexts.
#[derive(Debug)]
pub(crate) struct Device {
    pub(super) tables: Arc<Tables>,
    pub(super) index: i32,
    /// Name of the chip, if AscendCL reports it.
    pub(super) soc: Option<String>,
    context: Context,
    /// Dropped events that streams may still use, each with its guards.
    retired: Mutex<Vec<Vec<AclrtEvent>>>,
}

impl Device {
    /// Opens the device with this index among those in `ASCEND_RT_VISIBLE_DEVICES`.
    pub(super) fn open(libraries: &Libraries, index: u32) -> Result<Arc<Self>> {
        let tables = Arc::clone(libraries.tables());
        let acl = &tables.acl;
        let found = npu_sys::probe_with(acl).map_err(|error| tables.error(error))?;
        let number = i32::try_from(index).ok().filter(|_| (index as usize) < found.count);
        let number = number.ok_or_else(|| {
            Error::InvalidArgument(format!(
                "there is no NPU {index} among {}; ASCEND_RT_VISIBLE_DEVICES may hide some",
                found.count
            ))
        })?;
        let context = Context::of_thread(acl, index as usize);
        let context = context.map_err(|error| tables.error(error))?;
        let retired = Mutex::default();
        Ok(Arc::new(Self { tables, index: number, soc: found.soc, context, retired }))
    }

    /// Creates the root info of a communicator, on rank 0.
    pub(super) fn root_info(&self) -> Result<HcclRootInfo> {
        let _entered = device::Device::enter(self)?;
        let mut info = HcclRootInfo { internal: [0; 4108] };
        // SAFETY: hccl.h, `HcclGetRootInfo`: writes one root info; a device is current.
        self.check(unsafe { self.tables.hccl.HcclGetRootInfo(&raw mut info) })?;
        Ok(info)
    }

    fn check<T>(&self, result: npu_sys::Result<T>) -> Result<T> {
        result.map_err(|error| self.tables.error(error))
    }

    /// Returns whether the stream of an event has reached it.
    fn reached(&self, event: AclrtEvent) -> Result<bool> {
        let _entered = device::Device::enter(self)?;
        let mut status = AclrtEventRecordedStatus::NOT_READY;
        // SAFETY: acl_rt.h, `aclrtQueryEventStatus`: an event that exists; writes one status.
        self.check(unsafe { self.tables.acl.aclrtQueryEventStatus(event, &raw mut status) })?;
        Ok(status == AclrtEventRecordedStatus::COMPLETE)
    }

    fn new_event(&self) -> Result<AclrtEvent> {
        let mut raw = AclrtEvent::NULL;
        let acl = &self.tables.acl;
        // SAFETY: acl_rt.h, `aclrtCreateEventExWithFlag`: writes one handle. The flag lets streams
        // wait for the event.
        self.check(unsafe { acl.aclrtCreateEventExWithFlag(&raw mut raw, ACL_EVENT_SYNC) })?;
        Ok(raw)
    }

    fn record(&self, event: AclrtEvent, stream: DeviceStream) -> Result<()> {
        let stream = AclrtStream(stream.as_raw());
        // SAFETY: acl_rt.h, `aclrtRecordEvent`: the event exists, in the context that is current;
        // the stream is alive, as `DeviceStream::from_raw` requires.
        self.check(unsafe { self.tables.acl.aclrtRecordEvent(event, stream) })
    }

    /// Destroys the dropped events, `also` included, that no stream uses any more.
    fn sweep(&self, also: Option<Vec<AclrtEvent>>) {
        let Ok(_entered) = device::Device::enter(self) else { return };
        let mut retired = self.retired.lock();
        retired.extend(also);
        retired.retain(|events| {
            let over = events.iter().all(|&raw| matches!(self.reached(raw), Ok(true)));
            if over {
                events.iter().for_each(|&raw| {
                    // SAFETY: acl_rt.h, `aclrtDestroyEvent`: an event that exists, destroyed once;
                    // it has been reached, and all waits for it have passed. Errors are ignored.
                    drop(unsafe { self.tables.acl.aclrtDestroyEvent(raw) });
                });
            }
            !over
        });
    }

    /// Allocates memory, with the padding that CANN's kernels require after it.
    pub(super) fn alloc(&self, bytes: usize) -> Result<Buffer> {
        self.check(Buffer::new(&self.context, bytes.max(1)))
    }
}

impl device::Device for Device {
    type Event = Event;
    type Entered<'a> = Entered<'a>;

    fn name(&self) -> String {
        format!("npu:{}", self.index)
    }

    fn enter(&self) -> Result<Entered<'_>> {
        self.check(self.context.enter())
    }

    fn check_stream(&self, _stream: DeviceStream) -> Result<()> {
        Ok(())
    }

    fn event(self: &Arc<Self>) -> Result<Event> {
        self.sweep(None);
        let raw = self.new_event()?;
        Ok(Event { device: Arc::clone(self), raw, guards: Mutex::default() })
    }

    fn stream(self: &Arc<Self>) -> Result<(DeviceStream, Box<dyn Any + Send + Sync>)> {
        let stream = self.check(Stream::new(&self.context))?;
        // SAFETY: a stream of this device. It lives as long as the second result, and until its
        // work has completed.
        Ok((unsafe { DeviceStream::from_raw(stream.raw().0) }, Box::new(stream)))
    }

    unsafe fn copy(&self, to: DeviceBuf, from: DeviceBuf, stream: DeviceStream) -> Result<()> {
        let bytes = to.bytes();
        let (to, from, stream) =
            (pointer(to.address()), pointer(from.address()), AclrtStream(stream.as_raw()));
        let (acl, kind) = (&self.tables.acl, AclrtMemcpyKind::DEVICE_TO_DEVICE);
        // SAFETY: acl_rt.h, `aclrtMemcpyAsync`: both have `bytes` bytes, by the caller's promise.
        self.check(unsafe { acl.aclrtMemcpyAsync(to, bytes, from, bytes, kind, stream) })
    }

    unsafe fn upload(&self, to: DeviceBuf, from: &[u8]) -> Result<()> {
        let (bytes, kind) = (from.len(), AclrtMemcpyKind::HOST_TO_DEVICE);
        let (to, from, acl) = (pointer(to.address()), from.as_ptr().cast(), &self.tables.acl);
        // SAFETY: acl_rt.h, `aclrtMemcpy`: both have `bytes` bytes; the copy is synchronous.
        self.check(unsafe { acl.aclrtMemcpy(to, bytes, from, bytes, kind) })
    }

    unsafe fn download(&self, to: &mut [u8], from: DeviceBuf) -> Result<()> {
        let (bytes, kind) = (to.len(), AclrtMemcpyKind::DEVICE_TO_HOST);
        let (to, from, acl) = (to.as_mut_ptr().cast(), pointer(from.address()), &self.tables.acl);
        // SAFETY: acl_rt.h, `aclrtMemcpy`: as above.
        self.check(unsafe { acl.aclrtMemcpy(to, bytes, from, bytes, kind) })
    }

    unsafe fn clear(&self, buf: DeviceBuf, stream: DeviceStream) -> Result<()> {
        let bytes = buf.bytes();
        let (at, stream) = (pointer(buf.address()), AclrtStream(stream.as_raw()));
        // SAFETY: acl_rt.h, `aclrtMemsetAsync`: `bytes` bytes, by the caller's promise.
        self.check(unsafe { self.tables.acl.aclrtMemsetAsync(at, bytes, 0, bytes, stream) })
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // Events that streams still use are leaked.
        self.sweep(None);
    }
}

/// An event of the device, which marks a position in a stream.
#[derive(Debug)]
pub(crate) struct Event {
    device: Arc<Device>,
    raw: AclrtEvent,
    /// Events recorded after each wait for this one, in the waiting stream.
    guards: Mutex<Vec<AclrtEvent>>,
}

impl device::Event for Event {
    fn record(&self, stream: DeviceStream) -> Result<()> {
        self.device.record(self.raw, stream)
    }
}

impl Mark for Event {
    fn reached(&self) -> Result<bool> {
        self.device.reached(self.raw)
    }

    unsafe fn order(&self, stream: DeviceStream) -> Result<()> {
        let device = &*self.device;
        let _entered = device::Device::enter(device)?;
        let guard = device.new_event()?;
        self.guards.lock().push(guard);
        let waiting = AclrtStream(stream.as_raw());
        // SAFETY: acl_rt.h, `aclrtStreamWaitEvent`: the event exists; the stream is alive, by the
        // caller's promise.
        device.check(unsafe { device.tables.acl.aclrtStreamWaitEvent(waiting, self.raw) })?;
        device.record(guard, stream)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let mut events = std::mem::take(self.guards.get_mut());
        events.push(self.raw);
        self.device.sweep(Some(events));
    }
}
