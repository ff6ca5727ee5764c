//! What carries the data: the object-safe trait every backend implements.
//!
//! A backend sees no types, only an [`OpDesc`] and raw memory; [`ProcessGroup`] has checked lengths,
//! operator and root before it calls. So a new backend is one implementation of [`Backend`] and
//! nothing else changes.
//!
//! [`ProcessGroup`]: crate::ProcessGroup

#![expect(unsafe_code, reason = "declares the calls that take type-erased memory")]

pub(crate) mod block;
pub(crate) mod core;
#[cfg(any(feature = "nccl", feature = "hccl"))]
pub(crate) mod device;
#[cfg(feature = "gloo")]
pub(crate) mod gloo;
#[cfg(feature = "hccl")]
pub(crate) mod hccl;
pub(crate) mod host;
pub(crate) mod meet;
#[cfg(feature = "nccl")]
pub(crate) mod nccl;
pub(crate) mod shared_config;
pub(crate) mod tcp;

use std::any::Any;
use std::fmt::Debug;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use crate::device::DeviceBackend;
pub use crate::membership::Connect;
pub use crate::op::{Fingerprint, OpDesc, Place, Verb};
pub use crate::reduce_op::Factor;
use crate::{DType, Rank, Result};

/// The memory of one operation. Lengths follow from the [`OpDesc`].
#[derive(Clone, Copy, Debug)]
pub struct RawBufs {
    /// [`OpDesc::input_count`] elements. For verbs that work in place, the same as `output`.
    pub input: *const u8,
    /// [`OpDesc::output_count`] elements. Those of [`DType::Bool`] must be 0 or 1 when the call
    /// returns, well or not.
    pub output: *mut u8,
}

impl RawBufs {
    /// For operations that move nothing.
    #[cfg(any(feature = "nccl", feature = "hccl"))]
    pub(crate) const NONE: Self =
        Self { input: std::ptr::dangling(), output: std::ptr::dangling_mut() };
}

/// One block on its way from this rank or to it.
#[derive(Clone, Copy, Debug)]
pub struct Transfer {
    /// The other rank, never this one.
    pub peer: Rank,
    /// The element type.
    pub dtype: DType,
    /// Elements; 0 is a message too.
    pub count: usize,
    /// Where the block lies, and which way it goes.
    pub memory: TransferMemory,
}

/// The memory of a [`Transfer`], which says its direction.
#[derive(Clone, Copy, Debug)]
pub enum TransferMemory {
    /// To be sent.
    Send(*const u8),
    /// To be received into.
    Receive(*mut u8),
}

/// How to wait for peers.
#[derive(Clone, Copy, Debug)]
pub struct Wait {
    /// How alertly.
    pub patience: Patience,
    /// How long for a peer's next step, if not the group's timeout.
    pub timeout: Option<Duration>,
}

/// How alertly to wait for peers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Patience {
    /// A caller stands still: wait as alertly as the machine allows.
    Caller,
    /// Computation goes on beside: give the core away soon.
    Background,
}

/// Memory of [`Backend::alloc`]: this rank's part, zeroed, aligned to 64 bytes.
#[derive(Debug)]
pub struct RawShared {
    pub(crate) ptr: NonNull<u8>,
    pub(crate) bytes: usize,
    /// Keeps the memory mapped.
    _keep: Arc<dyn Any + Send + Sync>,
}

impl RawShared {
    /// `bytes` of memory at `ptr` that live as long as `keep`.
    ///
    /// # Safety
    ///
    /// They are zero, aligned to 64 bytes, and readable and
    /// writable while `keep` lives. Nothing else in the program refers to them, and peers touch
    /// them only while an operation on them runs on this rank.
    pub unsafe fn new(ptr: NonNull<u8>, bytes: usize, keep: Arc<dyn Any + Send + Sync>) -> Self {
        Self { ptr, bytes, _keep: keep }
    }
}

/// What a backend made for a new group, taken once by whoever joins that; see
/// [`Backend::split_seed`].
#[derive(Clone, Debug)]
pub struct Seed(Arc<Mutex<Option<Box<dyn Any + Send>>>>);

impl Seed {
    /// Holds this until it is taken.
    pub fn new(thing: impl Any + Send) -> Self {
        Self(Arc::new(Mutex::new(Some(Box::new(thing)))))
    }

    /// What it holds, if that is a `T` and has not been taken.
    pub fn take<T: Any>(&self) -> Option<T> {
        let mut place = self.0.lock();
        let thing = place.take_if(|thing| thing.is::<T>())?;
        drop(place);
        thing.downcast().ok().map(|thing| *thing)
    }
}

/// A way to move data between the ranks of one group.
///
/// One rank's view. Calls of [`run`](Self::run), [`exchange`](Self::exchange) and
/// [`alloc`](Self::alloc) come one at a time or block each other; [`abort`](Self::abort) may come at any time from any thread and must not wait
/// for them.
pub trait Backend: Send + Sync + Debug {
    /// The backend's name, for error texts.
    fn name(&self) -> &'static str;

    /// Why the group is over this backend and no other, for a log.
    fn reason(&self) -> &str {
        "it was asked for"
    }

    /// This rank.
    fn rank(&self) -> Rank;

    /// Number of ranks.
    fn world_size(&self) -> usize;

    /// Whether this process is a fork of the one that made the group, which may not use it.
    fn forked(&self) -> bool;

    /// Whether the group can take an operation at all, without waiting for anything.
    ///
    /// # Errors
    ///
    /// The group is poisoned, or this process is a fork of the one that made it.
    fn ready(&self) -> Result<()>;

    /// Does one of `all_reduce`, `reduce`, `broadcast`, `all_gather`, `reduce_scatter` and
    /// `barrier`, and returns when this rank's part is done and its memory is its own.
    ///
    /// Fingerprints of all ranks are compared before any byte of `output` changes. All but
    /// `all_gather` and `reduce_scatter` work in place; `reduce` leaves the buffer of every rank
    /// but the root as it was.
    ///
    /// # Errors
    ///
    /// [`Error::Mismatch`](crate::Error::Mismatch) with the buffers unchanged; otherwise a peer's
    /// failure, with the contents of `output` unspecified. Either poisons the group.
    ///
    /// # Safety
    ///
    /// `bufs` is readable (`input`) and writable (`output`) as [`RawBufs`] says, and nobody else
    /// touches it until the call returns. `op` has passed [`OpDesc::check`].
    unsafe fn run(&self, op: &OpDesc, bufs: RawBufs, wait: Wait) -> Result<()>;

    /// Sends and receives blocks, all at once, and returns when this rank's are done: the other
    /// verbs, and messages between pairs.
    ///
    /// For [`Verb::Batch`] only the ranks named by transfers take part. Between
    /// two ranks the blocks of one direction match in the order in which they are given, over all
    /// calls. Sender and receiver must agree on type and count, which is compared before a byte is
    /// received. For every other verb all ranks call it, and their fingerprints are compared first,
    /// as by [`run`](Self::run).
    ///
    /// # Errors
    ///
    /// As [`run`](Self::run).
    ///
    /// # Safety
    ///
    /// The memory of every transfer is good for `count` elements, readable or writable by its
    /// direction; what is received into overlaps no other transfer; and nobody else touches any
    /// of it until the call returns. No peer is this rank or beyond the last.
    unsafe fn exchange(&self, op: &OpDesc, transfers: &[Transfer], wait: Wait) -> Result<()>;

    /// Obtains `count` elements on every rank in memory that this backend reduces in place.
    ///
    /// # Errors
    ///
    /// As [`run`](Self::run), or the system has no memory.
    fn alloc(&self, dtype: DType, count: usize) -> Result<RawShared>;

    /// Why the group has failed, as far as is known here without waiting; also what nobody has met
    /// in an operation yet, such as a death.
    ///
    /// # Errors
    ///
    /// The failure.
    fn health(&self) -> Result<()> {
        self.ready()
    }

    /// This backend as one that also moves the memory of a device.
    fn device(&self) -> Option<&dyn DeviceBackend> {
        None
    }

    /// Begins a split, before the new groups are joined: what the ranks that give a colour take from
    /// this group into the new one. All ranks call it; `members` are the ranks of this rank's new
    /// group, in their new order, or none.
    ///
    /// # Errors
    ///
    /// As [`run`](Self::run).
    fn split_seed(&self, members: Option<&[Rank]>) -> Result<Option<Seed>> {
        let _ = members;
        Ok(None)
    }

    /// Gives the group up: everybody's waits end with
    /// [`Error::Aborted`](crate::Error::Aborted), now and later.
    fn abort(&self, reason: &str);
}
