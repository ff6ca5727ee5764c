//! A bucket's way through the memory of a device: for gradients that are made on the host, in a group
//! whose library reduces on devices.
//!
//! The copies block the host, the reduction does not: it is put into a stream of the reducer's own when
//! the bucket is full, and waited for when the pass ends. Invariant: between [`begin`](Detour::begin) and
//! [`end`](Detour::end) the memory is the library's; if it may not have let go of it, it is never freed.

#![expect(unsafe_code, reason = "hands memory of a device and a stream to the backend")]

use std::fmt;
use std::mem;
use std::sync::Arc;
use std::time::Duration;

use crate::device::{DeviceBackend, DeviceMemory, Kept};
use crate::{DeviceBuf, DeviceStream, DeviceWork, Element, Error, ProcessGroup, ReduceOp, Result};

/// What a reducer's buckets share: the stream that their reductions are put into.
#[derive(Debug)]
pub(super) struct Lane {
    stream: DeviceStream,
    _kept: Kept,
    // Behind the stream, which is of its device.
    group: ProcessGroup,
}

impl Lane {
    pub(super) fn new(group: &ProcessGroup) -> Result<Arc<Self>> {
        drop(group.device()?);
        let (stream, kept) = backend(group).stream()?;
        Ok(Arc::new(Self { stream, _kept: Kept(kept), group: group.clone() }))
    }
}

/// One bucket's memory there.
pub(super) struct Detour {
    memory: Option<DeviceMemory>,
    buf: DeviceBuf,
    work: Option<DeviceWork>,
    lane: Arc<Lane>,
}

impl Detour {
    pub(super) fn new<T: Element>(lane: &Arc<Lane>, count: usize) -> Result<Self> {
        // A library may refuse to allocate nothing.
        let memory = lane.group.device()?.alloc(T::DTYPE, count.max(1))?;
        // SAFETY: freed when nothing uses it any more, or never.
        let buf = unsafe { memory.as_buf() }.part(0..count)?;
        Ok(Self { memory: Some(memory), buf, work: None, lane: Arc::clone(lane) })
    }

    /// Copies the numbers there and begins their average over all ranks.
    pub(super) fn begin<T: Element>(&mut self, from: &[T]) -> Result<()> {
        let (ptr, len) = (from.as_ptr().cast(), size_of_val(from));
        // SAFETY: an `Element` has no padding, so all bytes of the slice are numbers to read.
        let bytes = unsafe { std::slice::from_raw_parts(ptr, len) };
        let group = &self.lane.group;
        // SAFETY: memory of the group's device, which nobody uses: the last work on it is over.
        unsafe { backend(group).upload(self.buf, bytes) }?;
        let calls = group.device()?.all_reduce(self.buf, ReduceOp::Avg)?;
        self.work = Some(calls.enqueue(self.lane.stream)?);
        Ok(())
    }

    /// Waits for the average and copies it back.
    pub(super) fn end<T: Element>(&mut self, to: &mut [T]) -> Result<()> {
        let Some(work) = &self.work else { return Ok(()) };
        // A failure leaves the work where it is: `drop` asks it.
        work.wait()?;
        self.work = None;
        let (ptr, len) = (to.as_mut_ptr().cast(), size_of_val(to));
        // SAFETY: any bytes are a float, and the slice is borrowed exclusively.
        let bytes = unsafe { std::slice::from_raw_parts_mut(ptr, len) };
        // SAFETY: memory of the group's device, whose work is over.
        unsafe { backend(&self.lane.group).download(bytes, self.buf) }
    }
}

impl fmt::Debug for Detour {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Detour").field("buf", &self.buf).finish_non_exhaustive()
    }
}

impl Drop for Detour {
    fn drop(&mut self) {
        let over = match &self.work {
            None => true,
            // Settled well, or with an error that is told once the memory is free, but for this one.
            Some(work) => match work.wait_timeout(GOODBYE) {
                Ok(over) => over,
                Err(Error::Backend { .. }) => false,
                Err(_) => true,
            },
        };
        if !over {
            // Somebody may still write there.
            mem::forget(self.memory.take());
        }
    }
}

/// How long dropping a bucket may take.
const GOODBYE: Duration = Duration::from_secs(10);

fn backend(group: &ProcessGroup) -> &dyn DeviceBackend {
    group.backend.device().expect("a lane is made for a group with a device only")
}
