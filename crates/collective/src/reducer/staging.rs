//! Averages a host bucket in device memory, for groups whose library reduces only device memory.
//!
//! The copies block the host; the reduction does not: it is enqueued into the reducer's own stream
//! when the bucket is full, and the end of the pass waits for it. Invariant: between
//! [`begin`](StagedBuf::begin) and [`end`](StagedBuf::end) the library owns the memory; if
//! it may still use it, the memory is leaked.

#![expect(unsafe_code, reason = "passes device memory and a stream to the backend")]

use std::mem;
use std::sync::Arc;
use std::time::Duration;

use super::device::backend;
use crate::device::{DeviceMemory, KeepAlive};
use crate::{DeviceBuf, DeviceStream, DeviceWork, Element, Error, ProcessGroup, ReduceOp, Result};

/// The stream shared by a reducer's buckets.
#[derive(Debug)]
pub(super) struct Staging {
    stream: DeviceStream,
    _kept: KeepAlive,
    // Declared after the stream, which belongs to the group's device.
    group: ProcessGroup,
}

impl Staging {
    pub(super) fn new(group: &ProcessGroup) -> Result<Arc<Self>> {
        drop(group.device()?);
        let (stream, kept) = backend(group).stream()?;
        Ok(Arc::new(Self { stream, _kept: KeepAlive(kept), group: group.clone() }))
    }
}

/// Device memory of one bucket.
#[derive(Debug)]
pub(super) struct StagedBuf {
    memory: Option<DeviceMemory>,
    buf: DeviceBuf,
    work: Option<DeviceWork>,
    staging: Arc<Staging>,
}

impl StagedBuf {
    pub(super) fn new<T: Element>(staging: &Arc<Staging>, count: usize) -> Result<Self> {
        // At least one element: a library may refuse an empty allocation.
        let memory = staging.group.device()?.alloc(T::DTYPE, count.max(1))?;
        // SAFETY: freed after its last access, or leaked.
        let buf = unsafe { memory.as_buf() }.part(0..count)?;
        Ok(Self { memory: Some(memory), buf, work: None, staging: Arc::clone(staging) })
    }

    /// Copies the numbers to the device and starts their average over all ranks.
    pub(super) fn begin<T: Element>(&mut self, from: &[T]) -> Result<()> {
        let (ptr, len) = (from.as_ptr().cast(), size_of_val(from));
        // SAFETY: an `Element` has no padding, so all bytes of the slice are initialized.
        let bytes = unsafe { std::slice::from_raw_parts(ptr, len) };
        let group = &self.staging.group;
        // SAFETY: memory of the group's device that is not in use: the last work on it is
        // complete. The bucket that was passed to `new` has the length of `from`.
        unsafe { backend(group).upload(self.buf, bytes) }?;
        let calls = group.device()?.all_reduce(self.buf, ReduceOp::Avg)?;
        let work = calls.enqueue(self.staging.stream);
        if let Err(Error::Backend { .. }) = &work {
            // The device may still run a part of the operation, if the abort has failed as well.
            mem::forget(self.memory.take());
        }
        self.work = Some(work?);
        Ok(())
    }

    /// Waits for the average and copies it back.
    pub(super) fn end<T: Element>(&mut self, to: &mut [T]) -> Result<()> {
        let Some(work) = &self.work else { return Ok(()) };
        // On failure `self.work` stays set, because `drop` needs it.
        work.wait()?;
        self.work = None;
        let (ptr, len) = (to.as_mut_ptr().cast(), size_of_val(to));
        // SAFETY: any bytes are a valid float, and the slice is borrowed exclusively.
        let bytes = unsafe { std::slice::from_raw_parts_mut(ptr, len) };
        // SAFETY: memory of the group's device; the work on it is complete. The lengths are as in
        // `begin`.
        unsafe { backend(&self.staging.group).download(bytes, self.buf) }
    }
}

impl Drop for StagedBuf {
    fn drop(&mut self) {
        let complete = match &self.work {
            None => true,
            // A settled work has released the memory, whatever its result, except after a backend
            // error.
            Some(work) => match work.wait_timeout(DROP_TIMEOUT) {
                Ok(complete) => complete,
                Err(Error::Backend { .. }) => false,
                Err(_) => true,
            },
        };
        if !complete {
            // The device may still write there, so the memory is leaked.
            mem::forget(self.memory.take());
        }
    }
}

/// Timeout of dropping a bucket.
const DROP_TIMEOUT: Duration = Duration::from_secs(10);
