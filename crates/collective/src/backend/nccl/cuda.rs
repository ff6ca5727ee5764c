//! The part of the CUDA driver API that this backend uses: a device's primary context, events,
//! streams, copies.
//!
//! The primary context is the one that the CUDA runtime, and so NCCL, uses in this process. A
//! [`Device`] retains it. Every call of CUDA or NCCL [enters](device::Device::enter) it first and
//! restores the thread's context afterwards.

#![expect(unsafe_code, reason = "calls C")]

use std::any::Any;
use std::ffi::c_int;
use std::sync::Arc;

use parking_lot::Mutex;

use super::sys::{self, CAPTURE_RELAXED, CudaApi, CudaResult, NO_TIMING, NON_BLOCKING};
use crate::backend::device::{self, Device as _};
use crate::backend::device_memory::{DeviceBuf, DeviceStream, Mark, OnDrop};
use crate::{Error, Result};

/// Maximum number of unused events that are kept for reuse.
const EVENTS_KEPT: usize = 256;

/// A CUDA device, with its primary context retained.
#[derive(Debug)]
pub(crate) struct Device {
    api: CudaApi,
    pub(super) ordinal: u32,
    handle: c_int,
    context: sys::Context,
    events: Mutex<Vec<Raw>>,
}

// SAFETY: a context may be current on several threads, and the driver API is thread-safe.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

/// An event handle, usable from any thread.
#[derive(Clone, Copy, Debug)]
struct Raw(sys::Event);

// SAFETY: the driver's functions on events may be called from any thread.
unsafe impl Send for Raw {}
// SAFETY: as above.
unsafe impl Sync for Raw {}

impl Device {
    pub(super) fn open(api: CudaApi, ordinal: u32) -> Result<Arc<Self>> {
        // SAFETY: no preconditions; may be called again.
        unsafe { api.cuInit(0) }?;
        let mut count = 0;
        // SAFETY: writes one `int`.
        unsafe { api.cuDeviceGetCount(&raw mut count) }?;
        let number = c_int::try_from(ordinal).ok().filter(|&number| number < count);
        let number = number.ok_or_else(|| {
            Error::InvalidArgument(format!(
                "there is no CUDA device {ordinal} among {count}; start one rank for each GPU, or \
                 let CUDA_VISIBLE_DEVICES show more"
            ))
        })?;
        let mut handle = 0;
        // SAFETY: writes one `int`; the ordinal is in range.
        unsafe { api.cuDeviceGet(&raw mut handle, number) }?;
        let mut context = std::ptr::null_mut();
        // SAFETY: writes one handle; the device is from `cuDeviceGet`.
        unsafe { api.cuDevicePrimaryCtxRetain(&raw mut context, handle) }?;
        Ok(Arc::new(Self { api, ordinal, handle, context, events: Mutex::default() }))
    }

    /// Returns the UUID of the GPU, or of the MIG instance.
    pub(super) fn uuid(&self) -> Result<[u8; 16]> {
        let mut uuid = [0; 16];
        // SAFETY: writes 16 bytes; the device is from `cuDeviceGet`.
        unsafe { self.api.cuDeviceGetUuid_v2(&raw mut uuid, self.handle) }?;
        Ok(uuid)
    }
}

impl device::Device for Device {
    type Event = Event;
    type Entered<'a> = Entered<'a>;

    fn name(&self) -> String {
        format!("cuda:{}", self.ordinal)
    }

    fn enter(&self) -> Result<Entered<'_>> {
        // SAFETY: the context is kept alive by `self`.
        unsafe { self.api.cuCtxPushCurrent_v2(self.context) }?;
        Ok(Entered(self))
    }

    fn relax_captures(&self) -> Result<()> {
        let mut mode = CAPTURE_RELAXED;
        // SAFETY: a mode, which it exchanges for this thread's former one.
        unsafe { self.api.cuThreadExchangeStreamCaptureMode(&raw mut mode) }
    }

    fn check_stream(&self, stream: DeviceStream) -> Result<()> {
        let mut status = 0;
        // SAFETY: the stream is alive, as `DeviceStream::from_raw` requires; writes one enumerator.
        unsafe { self.api.cuStreamIsCapturing(stream.as_raw(), &raw mut status) }?;
        if status != 0 {
            let what = "a stream that is being captured into a graph".into();
            return Err(Error::Unsupported { backend: "nccl", what });
        }
        Ok(())
    }

    fn event(self: &Arc<Self>) -> Result<Event> {
        let kept = self.events.lock().pop();
        let raw = match kept {
            Some(raw) => raw,
            None => {
                let mut raw = std::ptr::null_mut();
                // SAFETY: writes one handle.
                unsafe { self.api.cuEventCreate(&raw mut raw, NO_TIMING) }?;
                Raw(raw)
            }
        };
        Ok(Event { device: Arc::clone(self), raw })
    }

    fn stream(self: &Arc<Self>) -> Result<(DeviceStream, Box<dyn Any + Send + Sync>)> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: writes one handle.
        unsafe { self.api.cuStreamCreate(&raw mut raw, NON_BLOCKING) }?;
        // SAFETY: a stream of this device. It lives as long as the second result, and until its
        // work has completed.
        let stream = unsafe { DeviceStream::from_raw(raw) };
        let device = Arc::clone(self);
        let destroy = OnDrop(move || {
            let _entered = device.enter();
            // SAFETY: created above, destroyed once. Does not block: the driver frees it when its
            // work has completed.
            let _ = unsafe { device.api.cuStreamDestroy_v2(stream.as_raw()) };
        });
        Ok((stream, Box::new(destroy)))
    }

    unsafe fn copy(&self, to: DeviceBuf, from: DeviceBuf, stream: DeviceStream) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe {
            self.api.cuMemcpyDtoDAsync_v2(to.address(), from.address(), to.bytes(), stream.as_raw())
        }
    }

    unsafe fn upload(&self, to: DeviceBuf, from: &[u8]) -> Result<()> {
        // SAFETY: both have this many bytes, by the caller's promise.
        unsafe { self.api.cuMemcpyHtoD_v2(to.address(), from.as_ptr().cast(), from.len()) }?;
        // It returns once the driver has read pageable memory. The default stream completes the
        // copy. SAFETY: null is the default stream of the current device.
        unsafe { self.api.cuStreamSynchronize(std::ptr::null_mut()) }
    }

    unsafe fn download(&self, to: &mut [u8], from: DeviceBuf) -> Result<()> {
        // SAFETY: as above; the copy is synchronous.
        unsafe { self.api.cuMemcpyDtoH_v2(to.as_mut_ptr().cast(), from.address(), to.len()) }
    }

    unsafe fn clear(&self, buf: DeviceBuf, stream: DeviceStream) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.api.cuMemsetD8Async(buf.address(), 0, buf.bytes(), stream.as_raw()) }
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        for Raw(event) in self.events.get_mut().drain(..) {
            // SAFETY: an event of this device that is no longer used. Errors are ignored.
            let _ = unsafe { self.api.cuEventDestroy_v2(event) };
        }
        // SAFETY: retained once in `open`.
        let _ = unsafe { self.api.cuDevicePrimaryCtxRelease_v2(self.handle) };
    }
}

/// Guard: the device's context is current on this thread until it is dropped.
#[derive(Debug)]
pub(crate) struct Entered<'a>(&'a Device);

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        let mut context = std::ptr::null_mut();
        // SAFETY: writes one handle; pops the context that `enter` pushed on this thread. The guard
        // stays on its thread, because it has a lifetime and is used within one scope only.
        let _ = unsafe { self.0.api.cuCtxPopCurrent_v2(&raw mut context) };
    }
}

/// An event of the device, which marks a position in a stream.
#[derive(Debug)]
pub(crate) struct Event {
    device: Arc<Device>,
    raw: Raw,
}

impl device::Event for Event {
    fn record(&self, stream: DeviceStream) -> Result<()> {
        // SAFETY: the event is of this device; the stream is alive, as `DeviceStream::from_raw`
        // requires.
        unsafe { self.device.api.cuEventRecord(self.raw.0, stream.as_raw()) }
    }
}

impl Mark for Event {
    fn reached(&self) -> Result<bool> {
        // SAFETY: an event of this device.
        match unsafe { (self.device.api.cuEventQuery)(self.raw.0) } {
            CudaResult::NOT_READY => Ok(false),
            result => self.device.api.check(result, "cuEventQuery").map(|()| true),
        }
    }

    unsafe fn order(&self, stream: DeviceStream) -> Result<()> {
        // A null stream is the default stream of the current device.
        let _entered = self.device.enter()?;
        // SAFETY: as for `record`.
        unsafe { self.device.api.cuStreamWaitEvent(stream.as_raw(), self.raw.0, 0) }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let mut events = self.device.events.lock();
        if events.len() < EVENTS_KEPT {
            // An event that a stream has not reached yet may be recorded again: the later record
            // counts.
            events.push(self.raw);
            return;
        }
        drop(events);
        // SAFETY: an event of this device, used by nothing else. The driver frees it once streams
        // have reached it.
        let _ = unsafe { self.device.api.cuEventDestroy_v2(self.raw.0) };
    }
}
