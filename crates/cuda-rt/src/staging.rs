//! Pinned host buffers for copies to and from the device.
//!
//! The device reads and writes host memory some time after the copy is enqueued. So `write` first
//! copies the bytes to a pinned buffer and records an event after the device's copy; a buffer is
//! reused after its event has completed. `read_later` has the device write to such a buffer, which
//! a [`LateRead`] keeps until it is dropped.

#![expect(unsafe_code, reason = "calls the driver with raw handles and addresses")]

use std::collections::VecDeque;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, PoisonError};
use std::{mem, ptr, slice};

use cudarc::driver::sys::{CUevent, CUevent_flags, CUresult};
use cudarc::driver::{CudaStream, DriverError, result};

use crate::driver::{failed, make_current};

/// Buffers for copies on one stream, the least recently used first.
#[derive(Debug)]
pub(crate) struct Staging {
    stream: Arc<CudaStream>,
    buffers: Mutex<VecDeque<Buffer>>,
}

#[derive(Debug)]
struct Buffer {
    memory: *mut c_void,
    bytes: usize,
    /// Recorded after the last copy from the buffer.
    event: CUevent,
}

// SAFETY: host memory and a handle of the driver may be used from any thread.
unsafe impl Send for Buffer {}

/// Maximum size of a buffer; longer uploads are split.
const MAX_BYTES: usize = 1 << 20;
/// Maximum number of uploads in flight, and of buffers that are kept for later.
const MAX_BUFFERS: usize = 64;

impl Staging {
    pub(crate) fn new(stream: Arc<CudaStream>) -> Self {
        Self { stream, buffers: Mutex::default() }
    }

    /// Copies to a device address; enqueued on the stream, which must not be capturing. The context
    /// must be current.
    ///
    /// # Safety
    ///
    /// The destination must be valid until the copy has run.
    pub(crate) unsafe fn write(&self, address: u64, bytes: &[u8]) -> Result<(), DriverError> {
        let mut buffers = self.buffers.lock().unwrap_or_else(PoisonError::into_inner);
        for (piece, bytes) in bytes.chunks(MAX_BYTES).enumerate() {
            let buffer = free(&mut buffers, bytes.len())?;
            // SAFETY: the buffer is long enough, and no copy reads it any more.
            unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), buffer.memory.cast(), bytes.len()) };
            // SAFETY: these bytes were written above.
            let filled = unsafe { slice::from_raw_parts(buffer.memory.cast::<u8>(), bytes.len()) };
            let to = address + (piece * MAX_BYTES) as u64;
            // SAFETY: the caller guarantees the address; the buffer is unchanged until its event
            // has completed.
            let copied = unsafe { result::memcpy_htod_async(to, filled, self.stream.cu_stream()) };
            let record = |()| {
                // SAFETY: both are alive, and of one context.
                unsafe { result::event::record(buffer.event, self.stream.cu_stream()) }
            };
            let recorded = copied.and_then(record);
            if let Err(error) = recorded {
                // Without the event, the device may still read the buffer: leak it.
                mem::forget(buffer);
                return Err(error);
            }
            buffers.push_back(buffer);
        }
        Ok(())
    }
}

/// Bytes that are being copied from the device to pinned memory.
#[derive(Debug)]
pub struct LateRead {
    /// Its place to return to; taken when this is dropped.
    buffer: Option<Buffer>,
    bytes: usize,
    staging: Arc<Staging>,
}

impl Staging {
    /// Enqueues a copy from a device address on the stream, which must not be capturing. The
    /// context must be current.
    ///
    /// # Safety
    ///
    /// The source must be valid until the copy has run.
    pub(crate) unsafe fn read_later(
        self: &Arc<Self>,
        address: u64,
        bytes: usize,
    ) -> Result<LateRead, DriverError> {
        let buffer = {
            let mut buffers = self.buffers.lock().unwrap_or_else(PoisonError::into_inner);
            free(&mut buffers, bytes)?
        };
        // SAFETY: the buffer is long enough, no other copy uses it, and `Buffer::new` has zeroed
        // it.
        let into = unsafe { slice::from_raw_parts_mut(buffer.memory.cast::<u8>(), bytes) };
        // SAFETY: the caller guarantees the address; the buffer is kept until its event has
        // completed.
        let copied = unsafe { result::memcpy_dtoh_async(into, address, self.stream.cu_stream()) };
        // SAFETY: both are alive, and of one context.
        let record = |()| unsafe { result::event::record(buffer.event, self.stream.cu_stream()) };
        if let Err(error) = copied.and_then(record) {
            // Without the event, the device may still write to the buffer: leak it.
            mem::forget(buffer);
            return Err(error);
        }
        Ok(LateRead { buffer: Some(buffer), bytes, staging: Arc::clone(self) })
    }
}

impl LateRead {
    /// The bytes, if the device has copied them. Does not wait.
    ///
    /// # Errors
    ///
    /// [`CudaError::Driver`](crate::CudaError::Driver), also of earlier work on the device.
    pub fn poll(&self) -> crate::error::Result<Option<&[u8]>> {
        self.bind()?;
        // SAFETY: the event is destroyed with the buffer.
        match unsafe { result::event::query(self.buffer().event) } {
            Ok(()) => Ok(Some(self.copied())),
            Err(DriverError(CUresult::CUDA_ERROR_NOT_READY)) => Ok(None),
            Err(error) => Err(failed("query an event")(error)),
        }
    }

    /// The bytes. Waits for this copy and what was enqueued before it.
    ///
    /// # Errors
    ///
    /// [`CudaError::Driver`](crate::CudaError::Driver), also of earlier work on the device.
    pub fn wait(&self) -> crate::error::Result<&[u8]> {
        self.bind()?;
        self.buffer().wait().map_err(failed("wait for a copy from the device"))?;
        Ok(self.copied())
    }

    fn bind(&self) -> crate::error::Result<()> {
        let context = self.staging.stream.context();
        context.bind_to_thread().map_err(failed("make the context current"))
    }

    fn buffer(&self) -> &Buffer {
        self.buffer.as_ref().expect("taken by `drop` alone")
    }

    /// Once the event has completed.
    fn copied(&self) -> &[u8] {
        // SAFETY: as long as the buffer, initialized when it was allocated; the device writes to it
        // no more.
        unsafe { slice::from_raw_parts(self.buffer().memory.cast::<u8>(), self.bytes) }
    }
}

impl Drop for LateRead {
    fn drop(&mut self) {
        let buffers = self.staging.buffers.lock();
        buffers.unwrap_or_else(PoisonError::into_inner).extend(self.buffer.take());
    }
}

/// Returns a buffer of at least `bytes` bytes that no copy reads any more.
fn free(buffers: &mut VecDeque<Buffer>, bytes: usize) -> Result<Buffer, DriverError> {
    let full = buffers.len() >= MAX_BUFFERS;
    match buffers.pop_front_if(|oldest| full || oldest.is_free()) {
        Some(oldest) if oldest.bytes >= bytes => {
            if !oldest.is_free() {
                oldest.wait()?;
            }
            Ok(oldest)
        }
        // A popped buffer that is too short waits for its event when dropped.
        _ => Buffer::new(bytes.next_power_of_two().max(4096)),
    }
}

impl Buffer {
    fn new(bytes: usize) -> Result<Self, DriverError> {
        let event = result::event::create(CUevent_flags::CU_EVENT_DISABLE_TIMING)?;
        let mut buffer = Self { memory: ptr::null_mut(), bytes, event };
        // SAFETY: the context is current.
        buffer.memory = unsafe { result::malloc_host(bytes, 0) }?;
        // SAFETY: just allocated with this size.
        unsafe { ptr::write_bytes(buffer.memory.cast::<u8>(), 0, bytes) };
        Ok(buffer)
    }

    fn is_free(&self) -> bool {
        // SAFETY: the event is destroyed with this.
        unsafe { result::event::query(self.event) }.is_ok()
    }

    fn wait(&self) -> Result<(), DriverError> {
        // SAFETY: the event is destroyed with this.
        unsafe { result::event::synchronize(self.event) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // `drop` cannot return errors. A failed device reads no more.
        let _ = self.wait();
        if !self.memory.is_null() {
            // SAFETY: allocated in `new` and freed once; no copy reads it any more.
            let _ = unsafe { result::free_host(self.memory) };
        }
        // SAFETY: created in `new` and destroyed once.
        let _ = unsafe { result::event::destroy(self.event) };
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        let buffers = self.buffers.get_mut().unwrap_or_else(PoisonError::into_inner);
        if make_current(self.stream.context()).is_err() {
            // They leak.
            mem::forget(mem::take(buffers));
        }
    }
}
