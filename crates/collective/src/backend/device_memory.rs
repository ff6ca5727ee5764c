//! [`DeviceBackend`]: the trait of backends that also move memory of a GPU or NPU, and the types it
//! takes.

#![expect(unsafe_code, reason = "declares the calls that take type-erased memory")]

use std::any::Any;
use std::ffi::c_void;
use std::fmt::Debug;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use super::Backend;
use crate::{DType, Error, OpDesc, Rank, Result};

/// Device memory: its address, number of elements and element type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceBuf {
    address: u64,
    count: usize,
    dtype: DType,
}

impl DeviceBuf {
    /// Describes `count` elements at `address`: a `CUdeviceptr` for CUDA, an address from
    /// `aclrtMalloc` for NPUs.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] if the memory would exceed the address space, or if
    /// the address is not a multiple of the element's size.
    ///
    /// # Safety
    ///
    /// From each call that takes this value or a part of it until that call's [`DeviceWork`] has
    /// settled, or for a registration until it is dropped:
    ///
    /// * the memory is allocated on the group's device, or the device can access it;
    /// * nothing else accesses it, except the work before and after the operation in the same
    ///   stream; memory that is only read may be read by others, too.
    pub unsafe fn from_raw(address: u64, count: usize, dtype: DType) -> Result<Self> {
        let end = count.checked_mul(dtype.size()).filter(|&bytes| isize::try_from(bytes).is_ok());
        let end = end.and_then(|bytes| address.checked_add(bytes as u64));
        if end.is_none() || !address.is_multiple_of(dtype.size() as u64) {
            let text = format!(
                "device pointer {address:#x} is not aligned to {dtype}, or {count} elements exceed the address space"
            );
            return Err(Error::InvalidArgument(text));
        }
        Ok(Self { address, count, dtype })
    }

    /// Describes a slice of CUDA's memory, of candle's tensor for example: as
    /// [`from_raw`](Self::from_raw).
    ///
    /// # Errors
    ///
    /// As [`from_raw`](Self::from_raw).
    ///
    /// # Safety
    ///
    /// As [`from_raw`](Self::from_raw).
    #[cfg(feature = "cuda")]
    pub unsafe fn from_slice(slice: cuda_rt::DeviceSlice) -> Result<Self> {
        // SAFETY: the caller's promise.
        unsafe { Self::from_raw(slice.ptr, slice.len, slice.dtype.into()) }
    }

    /// Returns the address.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Returns the number of elements.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Returns the number of bytes.
    pub fn bytes(&self) -> usize {
        self.count * self.dtype.size()
    }

    /// Returns the element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns the part with these elements.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] if the range is not within the buffer.
    pub fn part(&self, range: Range<usize>) -> Result<Self> {
        if range.start > range.end || range.end > self.count {
            let text = format!("range {range:?} is not in a buffer of {} elements", self.count);
            return Err(Error::InvalidArgument(text));
        }
        let address = self.address + (range.start * self.dtype.size()) as u64;
        Ok(Self { address, count: range.len(), dtype: self.dtype })
    }

    /// Returns whether the buffers have a byte in common.
    pub(crate) fn overlaps(&self, other: &Self) -> bool {
        let end = |buf: &Self| buf.address + buf.bytes() as u64;
        self.bytes() > 0
            && other.bytes() > 0
            && self.address < end(other)
            && other.address < end(self)
    }
}

/// A stream of a device, owned by the caller: a `CUstream` for CUDA, an `aclrtStream` for NPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceStream(usize);

impl DeviceStream {
    /// Wraps a stream. Null is the default stream of the device or, for NPUs, of the group's
    /// context.
    ///
    /// # Safety
    ///
    /// It is a stream of the group's device, and is alive until every [`DeviceWork`] enqueued in it
    /// has settled.
    pub unsafe fn from_raw(stream: *mut c_void) -> Self {
        Self(stream.expose_provenance())
    }

    /// Returns the stream as passed to [`from_raw`](Self::from_raw).
    pub fn as_raw(self) -> *mut c_void {
        std::ptr::with_exposed_provenance_mut(self.0)
    }
}

/// One step of a list of operations on device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DeviceStep {
    /// One of `all_reduce`, `reduce`, `broadcast`, `all_gather` and `reduce_scatter`, by all ranks.
    Run {
        /// The operation and its count.
        op: OpDesc,
        /// Address of [`OpDesc::input_count`] elements. In place, that of the output or of this
        /// rank's part of it.
        input: u64,
        /// Address of [`OpDesc::output_count`] elements; a `reduce` to another root does not write
        /// them.
        output: u64,
    },
    /// Sends a block to a rank, which may be this one.
    Send {
        /// Destination rank.
        peer: Rank,
        /// Memory to send.
        buf: DeviceBuf,
    },
    /// Receives a block from a rank, which may be this one.
    Receive {
        /// Source rank.
        peer: Rank,
        /// Memory to receive into.
        buf: DeviceBuf,
    },
}

/// Callback for the result of an operation, called once.
pub type Ended = Box<dyn FnOnce(&Result<()>) + Send>;

/// Operations that start together, in one stream.
pub struct DeviceBatch<'a> {
    /// The calls, in order; not empty.
    pub ops: &'a [OpDesc],
    /// The steps of the calls.
    pub steps: &'a [DeviceStep],
    /// The stream to enqueue in.
    pub stream: DeviceStream,
    /// Timeout from when the stream has reached them; `None` is the group's timeout.
    pub timeout: Option<Duration>,
    /// Callback for when they have ended; not called if `enqueue` itself fails.
    pub ended: Ended,
}

impl Debug for DeviceBatch<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DeviceBatch").field("ops", &self.ops).finish_non_exhaustive()
    }
}

/// A [`Backend`] that also handles device memory.
pub trait DeviceBackend: Backend {
    /// Returns the device's name, for example `cuda:3`.
    fn device_name(&self) -> String;

    /// Checks that the backend has the operator for the type. Called before anything is enqueued.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`].
    fn supports(&self, op: &OpDesc) -> Result<()>;

    /// Returns whether [`enqueue`](Self::enqueue) first compares calls with the peers on the host.
    fn compares(&self) -> bool {
        false
    }

    /// Enqueues operations in a stream and returns. Concurrent calls block each other.
    ///
    /// # Errors
    ///
    /// Those of the library, or the group's failure. Either poisons the group.
    ///
    /// # Safety
    ///
    /// The memory of the steps is as [`DeviceBuf::from_raw`] says, with the lengths of the steps.
    /// Memory that is written overlaps no other. The stream is as [`DeviceStream::from_raw`] says.
    /// Peers are ranks of the group.
    unsafe fn enqueue(&self, batch: DeviceBatch<'_>) -> Result<DeviceWork>;

    /// Registers memory with the library until the result is dropped.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`], or those of the library.
    ///
    /// # Safety
    ///
    /// As [`DeviceBuf::from_raw`] says of registrations.
    unsafe fn register(&self, buf: DeviceBuf) -> Result<Box<dyn Any + Send + Sync>>;

    /// Allocates memory with the library's allocator. Returns its address, and a value that frees
    /// it when dropped.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`], or those of the library.
    fn alloc_device(&self, bytes: usize) -> Result<(u64, Box<dyn Any + Send + Sync>)>;

    /// Creates a stream that does not wait for other streams implicitly. It lives until the second
    /// result is dropped; work that is in it then is still completed.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`], or those of the library.
    fn stream(&self) -> Result<(DeviceStream, Box<dyn Any + Send + Sync>)>;

    /// Records an event at the end of a stream.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] for a stream that is being captured; those of the library.
    ///
    /// # Safety
    ///
    /// The stream is as [`DeviceStream::from_raw`] says.
    unsafe fn mark(&self, stream: DeviceStream) -> Result<Box<dyn Mark>>;

    /// Copies within the device, in stream order.
    ///
    /// # Errors
    ///
    /// Those of the library.
    ///
    /// # Safety
    ///
    /// Both are as [`DeviceBuf::from_raw`] says until the stream has completed the copy, have the
    /// same number of bytes, and do not overlap. The stream is as [`DeviceStream::from_raw`] says.
    unsafe fn copy(&self, to: DeviceBuf, from: DeviceBuf, stream: DeviceStream) -> Result<()>;

    /// Copies from the host. Blocks until the copy has completed.
    ///
    /// # Errors
    ///
    /// Those of the library.
    ///
    /// # Safety
    ///
    /// `to` is memory of the device that nothing else uses until this returns. Both have the same
    /// number of bytes.
    unsafe fn upload(&self, to: DeviceBuf, from: &[u8]) -> Result<()>;

    /// Copies to the host. Blocks until the copy has completed.
    ///
    /// # Errors
    ///
    /// Those of the library.
    ///
    /// # Safety
    ///
    /// `from` is memory of the device that nothing else writes until this returns. Both have the
    /// same number of bytes.
    unsafe fn download(&self, to: &mut [u8], from: DeviceBuf) -> Result<()>;

    /// Sets every byte to zero, in stream order.
    ///
    /// # Errors
    ///
    /// Those of the library.
    ///
    /// # Safety
    ///
    /// As [`copy`](Self::copy).
    unsafe fn clear(&self, buf: DeviceBuf, stream: DeviceStream) -> Result<()>;
}

/// An event in a stream, from [`DeviceBackend::mark`].
pub trait Mark: Send + Sync + Debug {
    /// Returns whether the stream has reached it. Does not block.
    ///
    /// # Errors
    ///
    /// Those of the library.
    fn reached(&self) -> Result<bool>;

    /// Makes another stream wait until it is reached. Does not block the host.
    ///
    /// # Errors
    ///
    /// Those of the library.
    ///
    /// # Safety
    ///
    /// The stream is one of the same device, and is alive.
    unsafe fn order(&self, stream: DeviceStream) -> Result<()>;
}

/// Operations in a stream, as a backend tracks them.
pub trait InFlight: Send + Sync + Debug {
    /// Returns their result, once they have ended and the device has released their memory. Does
    /// not block.
    fn settled(&self) -> Option<Result<()>>;

    /// Blocks until they have ended, or for at most `timeout`. Returns whether they have ended.
    ///
    /// # Errors
    ///
    /// The group's failure. The device has released the memory unless the error says otherwise.
    fn wait(&self, timeout: Option<Duration>) -> Result<bool>;

    /// Makes another stream wait for them.
    ///
    /// # Errors
    ///
    /// Those of the library.
    ///
    /// # Safety
    ///
    /// The stream is one of the same device, and is alive.
    unsafe fn order(&self, stream: DeviceStream) -> Result<()>;
}

/// Operations in a stream, from [`DeviceCalls::enqueue`](crate::device::DeviceCalls::enqueue).
///
/// Dropping it does not cancel the operations: the memory stays in use until they have ended.
#[derive(Clone, Debug)]
#[must_use = "the memory is in use until it has settled"]
pub struct DeviceWork(Arc<dyn InFlight>);

impl DeviceWork {
    /// Wraps a backend's operations.
    pub fn new(flight: Arc<dyn InFlight>) -> Self {
        Self(flight)
    }

    /// Blocks the host until the operations have ended.
    ///
    /// Blocks for at most the group's timeout, from when the stream has reached the operations or,
    /// if it does not, from this call.
    ///
    /// # Errors
    ///
    /// The group's failure: [`Error::Timeout`], [`Error::PeerDied`], [`Error::Mismatch`],
    /// [`Error::Aborted`], [`Error::Backend`]. The output is unspecified then. The device has
    /// released the memory; if it has not, [`Error::Backend`] says so.
    pub fn wait(&self) -> Result<()> {
        self.0.wait(None).map(drop)
    }

    /// As [`wait`](Self::wait), but for at most `timeout`. Returns whether they have ended. An
    /// expired timeout is not a failure.
    ///
    /// # Errors
    ///
    /// As [`wait`](Self::wait).
    pub fn wait_timeout(&self, timeout: Duration) -> Result<bool> {
        self.0.wait(Some(timeout))
    }

    /// Returns the result of the operations; `None` if they have not ended. Does not block.
    pub fn settled(&self) -> Option<Result<()>> {
        self.0.settled()
    }

    /// Makes another stream of the device wait for the operations. Does not block the host.
    ///
    /// # Errors
    ///
    /// [`Error::Backend`].
    ///
    /// # Safety
    ///
    /// As [`DeviceStream::from_raw`]. After a failure of the group the stream continues, too: check
    /// [`settled`](Self::settled) before its results are used.
    pub unsafe fn order(&self, stream: DeviceStream) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.0.order(stream) }
    }
}

/// Calls a function when it is dropped.
#[cfg(feature = "cuda")]
pub(crate) struct OnDrop<F: FnMut()>(pub(crate) F);

#[cfg(feature = "cuda")]
impl<F: FnMut()> Drop for OnDrop<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn buf(address: u64, count: usize) -> Result<DeviceBuf> {
        // SAFETY: the memory is never accessed.
        unsafe { DeviceBuf::from_raw(address, count, DType::F32) }
    }

    #[test]
    fn misaligned_and_oversized_memory_is_refused() {
        for (address, count) in [(2, 1), (u64::MAX - 3, 2), (0, usize::MAX), (8, usize::MAX / 4)] {
            assert!(matches!(buf(address, count), Err(Error::InvalidArgument(_))), "{address}");
        }
        assert_eq!(buf(64, 3).unwrap().bytes(), 12);
    }

    #[test]
    fn parts_lie_inside() {
        let whole = buf(64, 10).unwrap();
        let part = whole.part(3..7).unwrap();
        assert_eq!((part.address(), part.count()), (76, 4));
        assert!(whole.part(3..11).is_err() && whole.part(10..10).is_ok());
        #[expect(clippy::reversed_empty_ranges, reason = "tests a reversed range")]
        let reversed = whole.part(7..3);
        assert!(reversed.is_err());
        let other = whole.part(7..10).unwrap();
        assert!(part.overlaps(&whole) && !part.overlaps(&other));
        assert!(!whole.part(4..4).unwrap().overlaps(&part));
    }
}
