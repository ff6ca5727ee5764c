//! Collectives on device memory: the trait that a backend for GPUs or NPUs implements, and the types of its callers.
//!
//! Memory and streams belong to the caller and are passed as addresses. An operation is enqueued in a stream and the
//! call returns; [`DeviceWork`] tells when it has ended. The host waits for a device only if asked to. Two things
//! differ from the verbs on slices:
//!
//! * **The caller keeps the contract** of [`DeviceBuf::from_raw`], which cannot be checked. The memory is in use
//!   until the `DeviceWork` has settled, also after a failure: an error is returned only once the device has
//!   released the memory.
//! * **Calls are not compared before data move**, unless the backend is configured to, because the peers' hosts may be
//!   far ahead or behind. Each rank checks lengths, roots and operators before it enqueues; a rank that calls
//!   something else is found when the operation times out.
//!
//! [`ProcessGroup::device`](crate::ProcessGroup::device) begins a list of calls, see [`DeviceCalls`]. The verbs on
//! slices work in the same group, on host memory.

#![expect(unsafe_code, reason = "declares the calls that take type-erased memory")]

mod calls;

use std::any::Any;
use std::ffi::c_void;
use std::fmt::Debug;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

pub use self::calls::DeviceCalls;
use crate::{Backend, DType, Error, OpDesc, Rank, Result};

/// Memory of a device: where it lies, how many elements, of which type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceBuf {
    address: u64,
    count: usize,
    dtype: DType,
}

impl DeviceBuf {
    /// `count` elements at `address`, for CUDA a `CUdeviceptr`, for NPUs what `aclrtMalloc` gives.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] if the memory would go beyond the end of the address space, or if
    /// the address is not a multiple of the element's size.
    ///
    /// # Safety
    ///
    /// From each call that is given this value or a part of it until that call's [`DeviceWork`] has
    /// settled, or for a registration until it is dropped:
    ///
    /// * the memory is allocated on the group's device, or can be reached by it;
    /// * nothing else accesses it, except what the same stream does before and after the operation;
    ///   memory that is only read may be read by others too.
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

    /// Where it lies.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Elements.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Bytes.
    pub fn bytes(&self) -> usize {
        self.count * self.dtype.size()
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// A part of it, by elements.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] if it has no such part.
    pub fn part(&self, range: Range<usize>) -> Result<Self> {
        if range.start > range.end || range.end > self.count {
            let text = format!("a buffer of {} elements has no part {range:?}", self.count);
            return Err(Error::InvalidArgument(text));
        }
        let address = self.address + (range.start * self.dtype.size()) as u64;
        Ok(Self { address, count: range.len(), dtype: self.dtype })
    }

    /// Whether they have a byte in common.
    pub(crate) fn overlaps(&self, other: &Self) -> bool {
        let end = |buf: &Self| buf.address + buf.bytes() as u64;
        self.bytes() > 0
            && other.bytes() > 0
            && self.address < end(other)
            && other.address < end(self)
    }
}

/// A queue of a device, for CUDA a `CUstream`, for NPUs an `aclrtStream`; somebody else's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceStream(usize);

impl DeviceStream {
    /// This stream; null is the default stream: of the device, for NPUs of the group's context.
    ///
    /// # Safety
    ///
    /// It is a stream of the group's device, and lives until every [`DeviceWork`] that was enqueued
    /// in it has settled.
    pub unsafe fn from_raw(stream: *mut c_void) -> Self {
        Self(stream.expose_provenance())
    }

    /// As it was given.
    pub fn as_raw(self) -> *mut c_void {
        std::ptr::with_exposed_provenance_mut(self.0)
    }
}

/// A step of operations on device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DeviceStep {
    /// One of `all_reduce`, `reduce`, `broadcast`, `all_gather` and `reduce_scatter`, by all ranks.
    Run {
        /// Which, and on how much.
        op: OpDesc,
        /// [`OpDesc::input_count`] elements. In place, it is where the output is, or this rank's
        /// part of it.
        input: u64,
        /// [`OpDesc::output_count`] elements; not touched by a `reduce` to another root.
        output: u64,
    },
    /// A block to a rank, which may be this one.
    Send {
        /// To whom.
        peer: Rank,
        /// What.
        buf: DeviceBuf,
    },
    /// A block from a rank, which may be this one.
    Receive {
        /// From whom.
        peer: Rank,
        /// Where to.
        buf: DeviceBuf,
    },
}

/// Told once how an operation ended.
pub type Ended = Box<dyn FnOnce(&Result<()>) + Send>;

/// Operations that begin together, in one stream.
pub struct DeviceBatch<'a> {
    /// What the caller called, in order; not empty.
    pub ops: &'a [OpDesc],
    /// What it comes to.
    pub steps: &'a [DeviceStep],
    /// The queue that they are put in.
    pub stream: DeviceStream,
    /// How long they may take once the stream has reached them, if not the group's timeout.
    pub timeout: Option<Duration>,
    /// To be called when they have ended; not if `enqueue` itself fails.
    pub ended: Ended,
}

impl Debug for DeviceBatch<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DeviceBatch").field("ops", &self.ops).finish_non_exhaustive()
    }
}

/// A [`Backend`] that also moves the memory of devices.
pub trait DeviceBackend: Backend {
    /// The device's name, for example `cuda:3`.
    fn device_name(&self) -> String;

    /// Whether it has the operator for the type; asked before anything is enqueued.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`].
    fn supports(&self, op: &OpDesc) -> Result<()>;

    /// Whether [`enqueue`](Self::enqueue) meets the peers on the host and compares calls first.
    fn compares(&self) -> bool {
        false
    }

    /// Puts operations into a stream and returns. Calls come one at a time or block each other.
    ///
    /// # Errors
    ///
    /// Those of the library, or the group's failure. Either poisons the group.
    ///
    /// # Safety
    ///
    /// The steps' memory is as [`DeviceBuf::from_raw`] says, with the lengths that the steps say; what
    /// is written overlaps nothing else. The stream is as [`DeviceStream::from_raw`] says. Peers exist.
    unsafe fn enqueue(&self, batch: DeviceBatch<'_>) -> Result<DeviceWork>;

    /// Tells the library of memory that will be used often. Lasts until the result is dropped.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`], or the library's.
    ///
    /// # Safety
    ///
    /// As [`DeviceBuf::from_raw`] says of registrations.
    unsafe fn register(&self, buf: DeviceBuf) -> Result<Box<dyn Any + Send + Sync>>;

    /// Obtains memory that the library likes best, until the result is dropped; its address.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`], or the library's.
    fn alloc_device(&self, bytes: usize) -> Result<(u64, Box<dyn Any + Send + Sync>)>;

    /// A stream of its own, which waits for no other unless it is told to, until the result is
    /// dropped. What is in it then is still done.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`], or the library's.
    fn stream(&self) -> Result<(DeviceStream, Box<dyn Any + Send + Sync>)>;

    /// Where a stream is now: behind all that it has to do.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] for a stream that is being captured; the library's.
    ///
    /// # Safety
    ///
    /// The stream is as [`DeviceStream::from_raw`] says.
    unsafe fn mark(&self, stream: DeviceStream) -> Result<Box<dyn Mark>>;

    /// Copies within the device, in order of the stream.
    ///
    /// # Errors
    ///
    /// The library's.
    ///
    /// # Safety
    ///
    /// Both are as [`DeviceBuf::from_raw`] says until the stream has come this far, as long as one
    /// another in bytes, and do not overlap. The stream is as [`DeviceStream::from_raw`] says.
    unsafe fn copy(&self, to: DeviceBuf, from: DeviceBuf, stream: DeviceStream) -> Result<()>;

    /// Copies from the host, of as many bytes; returns when they are there.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`]; [`Error::InvalidArgument`] for another length; the library's.
    ///
    /// # Safety
    ///
    /// Memory of the device that nobody else uses until this returns.
    unsafe fn upload(&self, to: DeviceBuf, from: &[u8]) -> Result<()> {
        let _ = (to, from);
        Err(no_copies(self.name()))
    }

    /// Copies to the host, likewise.
    ///
    /// # Errors
    ///
    /// As [`upload`](Self::upload).
    ///
    /// # Safety
    ///
    /// Memory of the device that nobody else writes until this returns.
    unsafe fn download(&self, to: &mut [u8], from: DeviceBuf) -> Result<()> {
        let _ = (to, from);
        Err(no_copies(self.name()))
    }

    /// Sets every byte to zero, in order of the stream.
    ///
    /// # Errors
    ///
    /// The library's.
    ///
    /// # Safety
    ///
    /// As [`copy`](Self::copy).
    unsafe fn clear(&self, buf: DeviceBuf, stream: DeviceStream) -> Result<()>;
}

pub(crate) fn no_copies(backend: &'static str) -> Error {
    Error::Unsupported { backend, what: "copies between host and device".into() }
}

/// A place in a stream, from [`DeviceBackend::mark`].
pub trait Mark: Send + Sync + Debug {
    /// Whether the stream has reached it. Does not wait.
    ///
    /// # Errors
    ///
    /// The library's.
    fn reached(&self) -> Result<bool>;

    /// Has another stream wait until it is reached; the host does not.
    ///
    /// # Errors
    ///
    /// The library's.
    ///
    /// # Safety
    ///
    /// The stream is one of the same device, and lives.
    unsafe fn order(&self, stream: DeviceStream) -> Result<()>;
}

/// What a backend knows of operations in a stream.
pub trait InFlight: Send + Sync + Debug {
    /// How they ended, once they have and the device has let go of their memory. Does not wait.
    fn settled(&self) -> Option<Result<()>>;

    /// Waits until they have ended, but no longer than `timeout` if there is one; whether they have.
    ///
    /// # Errors
    ///
    /// The group's failure, and the memory is free again unless the error says otherwise.
    fn wait(&self, timeout: Option<Duration>) -> Result<bool>;

    /// Has another stream wait for them.
    ///
    /// # Errors
    ///
    /// The library's.
    ///
    /// # Safety
    ///
    /// The stream is one of the same device, and lives.
    unsafe fn order(&self, stream: DeviceStream) -> Result<()>;
}

/// Operations in a stream, from [`DeviceCalls::enqueue`].
///
/// Dropping it changes nothing: the operations go on, and the memory stays in use until they have
/// ended.
#[derive(Clone, Debug)]
#[must_use = "the memory is in use until it has settled"]
pub struct DeviceWork(Arc<dyn InFlight>);

impl DeviceWork {
    /// For backends.
    pub fn new(flight: Arc<dyn InFlight>) -> Self {
        Self(flight)
    }

    /// Waits until the operations have ended, here on the host.
    ///
    /// Blocks for the group's timeout at most, counted from when the stream has reached the
    /// operations or, should it not get there, from now.
    ///
    /// # Errors
    ///
    /// The group's failure: [`Error::Timeout`], [`Error::PeerDied`], [`Error::Mismatch`],
    /// [`Error::Aborted`], [`Error::Backend`]. What was to be written is unspecified then, and the
    /// memory is free again; should the library not give it back, [`Error::Backend`] says so.
    pub fn wait(&self) -> Result<()> {
        self.0.wait(None).map(drop)
    }

    /// As [`wait`](Self::wait), but no longer than `timeout`; whether they have ended. Time that is
    /// over is no failure.
    ///
    /// # Errors
    ///
    /// As [`wait`](Self::wait).
    pub fn wait_timeout(&self, timeout: Duration) -> Result<bool> {
        self.0.wait(Some(timeout))
    }

    /// How the operations ended; `None` if they have not. Does not wait.
    pub fn settled(&self) -> Option<Result<()>> {
        self.0.settled()
    }

    /// Has another stream of the device wait for the operations; the host does not.
    ///
    /// # Errors
    ///
    /// [`Error::Backend`].
    ///
    /// # Safety
    ///
    /// As [`DeviceStream::from_raw`]. A failure of the group lets the stream go on too: look at
    /// [`settled`](Self::settled) before its results are used.
    pub unsafe fn order(&self, stream: DeviceStream) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.0.order(stream) }
    }
}

/// Memory that is registered with the group's library, until it is dropped.
#[derive(Debug)]
pub struct Registration(#[expect(dead_code, reason = "dropped, no more")] KeepAlive);

/// Device memory from the group's library, freed when it is dropped.
#[derive(Debug)]
pub struct DeviceMemory {
    address: u64,
    count: usize,
    dtype: DType,
    _kept: KeepAlive,
}

impl DeviceMemory {
    /// Its memory.
    ///
    /// # Safety
    ///
    /// As [`DeviceBuf::from_raw`]: it is not dropped while the value is in use.
    pub unsafe fn as_buf(&self) -> DeviceBuf {
        DeviceBuf { address: self.address, count: self.count, dtype: self.dtype }
    }
}

/// Calls a function when it is dropped.
#[cfg(any(feature = "nccl", feature = "hccl"))]
pub(crate) struct OnDrop<F: FnMut()>(pub(crate) F);

#[cfg(any(feature = "nccl", feature = "hccl"))]
impl<F: FnMut()> Drop for OnDrop<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}

/// Something that lasts until it is dropped.
pub(crate) struct KeepAlive(
    #[expect(dead_code, reason = "dropped, no more")] pub(crate) Box<dyn Any + Send + Sync>,
);

impl Debug for KeepAlive {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("KeepAlive")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn buf(address: u64, count: usize) -> Result<DeviceBuf> {
        // SAFETY: nothing is done with it.
        unsafe { DeviceBuf::from_raw(address, count, DType::F32) }
    }

    #[test]
    fn memory_that_cannot_be_is_refused() {
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
        #[expect(clippy::reversed_empty_ranges, reason = "that is the mistake")]
        let reversed = whole.part(7..3);
        assert!(reversed.is_err());
        let other = whole.part(7..10).unwrap();
        assert!(part.overlaps(&whole) && !part.overlaps(&other));
        assert!(!whole.part(4..4).unwrap().overlaps(&part));
    }
}
