//! The pinned memory of the host through which uploads go.
//!
//! A device reads memory of the host some time after a copy was asked for. So what is uploaded is copied into a
//! buffer of our own first, behind whose last copy an event stands; a buffer is filled anew when that has passed.

#![expect(unsafe_code, reason = "calls the driver with raw handles and addresses")]

use std::collections::VecDeque;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, PoisonError};
use std::{mem, ptr, slice};

use cudarc::driver::sys::{CUevent, CUevent_flags};
use cudarc::driver::{CudaStream, DriverError, result};

/// Buffers for uploads in one stream, the one used longest ago first.
#[derive(Debug)]
pub(crate) struct Staging {
    stream: Arc<CudaStream>,
    buffers: Mutex<VecDeque<Buffer>>,
}

#[derive(Debug)]
struct Buffer {
    memory: *mut c_void,
    bytes: usize,
    /// Behind the last copy from it.
    event: CUevent,
}

// SAFETY: memory of the host and a handle of the driver may be used from any thread.
unsafe impl Send for Buffer {}

/// A buffer's bytes at most; longer uploads go in pieces.
const MOST_BYTES: usize = 1 << 20;
/// Uploads that the host is ahead of the device at most.
const MOST_BUFFERS: usize = 16;

impl Staging {
    pub(crate) fn new(stream: Arc<CudaStream>) -> Self {
        Self { stream, buffers: Mutex::default() }
    }

    /// Copies to an address of the device in order of the stream, which is not captured. The context is current.
    ///
    /// # Safety
    ///
    /// So many bytes must be writable there until the stream has come this far.
    pub(crate) unsafe fn write(&self, address: u64, bytes: &[u8]) -> Result<(), DriverError> {
        let mut buffers = self.buffers.lock().unwrap_or_else(PoisonError::into_inner);
        for (piece, bytes) in bytes.chunks(MOST_BYTES).enumerate() {
            let buffer = free(&mut buffers, bytes.len())?;
            // SAFETY: the buffer is as long, and no copy reads it any more.
            unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), buffer.memory.cast(), bytes.len()) };
            // SAFETY: written a moment ago.
            let filled = unsafe { slice::from_raw_parts(buffer.memory.cast::<u8>(), bytes.len()) };
            let to = address + (piece * MOST_BYTES) as u64;
            // SAFETY: the caller vouches for the address; the buffer stays as it is until its event has passed.
            let copied = unsafe { result::memcpy_htod_async(to, filled, self.stream.cu_stream()) };
            let mark = |()| {
                // SAFETY: both are alive, and of one context.
                unsafe { result::event::record(buffer.event, self.stream.cu_stream()) }
            };
            let marked = copied.and_then(mark);
            if let Err(error) = marked {
                // Nobody can say when the device has read it: it is never used again.
                mem::forget(buffer);
                return Err(error);
            }
            buffers.push_back(buffer);
        }
        Ok(())
    }
}

/// A buffer of so many bytes at least, that no copy reads any more.
fn free(buffers: &mut VecDeque<Buffer>, bytes: usize) -> Result<Buffer, DriverError> {
    let full = buffers.len() == MOST_BUFFERS;
    match buffers.pop_front_if(|oldest| full || oldest.is_free()) {
        Some(oldest) if oldest.bytes >= bytes => oldest.wait().map(|()| oldest),
        // It waits, if it must, where it is dropped.
        _ => Buffer::new(bytes.next_power_of_two().max(4096)),
    }
}

impl Buffer {
    fn new(bytes: usize) -> Result<Self, DriverError> {
        let event = result::event::create(CUevent_flags::CU_EVENT_DISABLE_TIMING)?;
        let mut buffer = Self { memory: ptr::null_mut(), bytes, event };
        // SAFETY: the context is current.
        buffer.memory = unsafe { result::malloc_host(bytes, 0) }?;
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
        // Errors here have nobody to go to. Where the device has failed it reads no more.
        let _ = self.wait();
        if !self.memory.is_null() {
            // SAFETY: allocated for this, and freed once; no copy reads it any more.
            let _ = unsafe { result::free_host(self.memory) };
        }
        // SAFETY: made for this, and destroyed once.
        let _ = unsafe { result::event::destroy(self.event) };
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        let buffers = self.buffers.get_mut().unwrap_or_else(PoisonError::into_inner);
        if self.stream.context().bind_to_thread().is_err() {
            // Lost until the process ends.
            mem::forget(mem::take(buffers));
        }
    }
}
