//! [`Backend`]: the object-safe trait that moves data between the ranks of a group.
//!
//! A backend sees no element types, only an [`OpDesc`] and raw memory; [`ProcessGroup`] has checked
//! lengths, operator and root before it calls. So a new backend needs only an implementation of
//! [`Backend`].
//!
//! [`ProcessGroup`]: crate::ProcessGroup

#![expect(unsafe_code, reason = "declares the calls that take type-erased memory")]

pub(crate) mod core;
#[cfg(any(feature = "cuda", feature = "npu"))]
pub(crate) mod device;
pub(crate) mod device_memory;
pub(crate) mod failure;
pub(crate) mod frame;
#[cfg(feature = "gloo")]
pub(crate) mod gloo;
#[cfg(feature = "npu")]
pub(crate) mod hccl;
pub(crate) mod host;
#[cfg(feature = "cuda")]
pub(crate) mod nccl;
mod peer_queue;
pub(crate) mod rendezvous;
pub(crate) mod shared_config;
pub(crate) mod tcp;
pub(crate) mod transport;

use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use self::device_memory::DeviceBackend;
pub use crate::memory::RawShared;
pub use crate::op::{BufferLocation, Factor, Fingerprint, OpDesc, Verb};
pub use crate::options::Seed;
use crate::store::Store;
use crate::{DType, GroupOptions, Rank, Result};

/// Connects one rank's backend: it joins `world_size` ranks that meet at the store under the
/// options' name, and returns when all have joined. Ranks call it with the same name and size, each
/// with its own rank.
pub type Connect =
    dyn Fn(&Arc<dyn Store>, Rank, usize, &GroupOptions) -> Result<Arc<dyn Backend>> + Send + Sync;

/// The memory of one operation. Lengths follow from the [`OpDesc`].
#[derive(Clone, Copy, Debug)]
pub struct RawBufs {
    /// [`OpDesc::input_count`] elements. For verbs that work in place, the same as `output`.
    pub input: *const u8,
    /// [`OpDesc::output_count`] elements. Those of [`DType::Bool`] must be 0 or 1 when the call
    /// returns, even with an error.
    pub output: *mut u8,
}

impl RawBufs {
    /// For operations that move no data.
    #[cfg(any(feature = "cuda", feature = "npu"))]
    pub(crate) const NONE: Self =
        Self { input: std::ptr::dangling(), output: std::ptr::dangling_mut() };
}

/// One block to send to, or to receive from, a peer.
#[derive(Clone, Copy, Debug)]
pub struct Transfer {
    /// The other rank, never this one.
    pub peer: Rank,
    /// The element type.
    pub dtype: DType,
    /// Number of elements; a transfer of 0 elements is sent, too.
    pub count: usize,
    /// The block's memory and direction.
    pub memory: TransferMemory,
}

/// The memory and the direction of a [`Transfer`].
#[derive(Clone, Copy, Debug)]
pub enum TransferMemory {
    /// Send from here.
    Send(*const u8),
    /// Receive into here.
    Receive(*mut u8),
}

/// How to wait for peers.
#[derive(Clone, Copy, Debug)]
pub struct Wait {
    /// Whether to spin or to sleep.
    pub policy: WaitPolicy,
    /// Timeout for a peer's next step; `None` is the group's timeout.
    pub timeout: Option<Duration>,
}

/// Whether a waiting thread keeps its core.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WaitPolicy {
    /// Spin, then yield, then sleep: lowest latency, for a call that blocks its caller.
    Spin,
    /// Sleep almost at once, and leave the core to computation: for asynchronous operations.
    Sleep,
}

/// Moves data between the ranks of one group; each rank has its own instance.
///
/// [`run`](Self::run), [`exchange`](Self::exchange) and [`alloc`](Self::alloc) are called one at a
/// time or block each other. [`abort`](Self::abort) may be called at any time from any thread and
/// must not wait for them.
pub trait Backend: Send + Sync + Debug {
    /// Returns the backend's name for error texts.
    fn name(&self) -> &'static str;

    /// Returns why this backend was chosen, for logs.
    fn reason(&self) -> &str {
        "requested"
    }

    /// Returns this rank.
    fn rank(&self) -> Rank;

    /// Returns the number of ranks.
    fn world_size(&self) -> usize;

    /// Returns whether this process is a fork of the one that made the group. A fork may not use
    /// the group.
    fn forked(&self) -> bool;

    /// Checks, without waiting, that the group can run operations.
    ///
    /// # Errors
    ///
    /// The group is poisoned, or this process is a fork of the one that made it.
    fn ready(&self) -> Result<()>;

    /// Runs an `all_reduce`, `reduce`, `broadcast`, `all_gather`, `reduce_scatter` or `barrier`.
    /// Returns when this rank's part is done and no peer uses its memory.
    ///
    /// Fingerprints of all ranks are compared before any byte of `output` changes. All but
    /// `all_gather` and `reduce_scatter` work in place; `reduce` does not change the buffers of
    /// ranks other than the root.
    ///
    /// # Errors
    ///
    /// [`Error::Mismatch`](crate::Error::Mismatch) with the buffers unchanged; otherwise a peer's
    /// failure, with the contents of `output` unspecified. Either poisons the group.
    ///
    /// # Safety
    ///
    /// `bufs` is readable (`input`) and writable (`output`) as [`RawBufs`] says, and nothing else
    /// accesses it until the call returns. `op` has passed [`OpDesc::check`].
    unsafe fn run(&self, op: &OpDesc, bufs: RawBufs, wait: Wait) -> Result<()>;

    /// Sends and receives blocks concurrently, for the other verbs and for point-to-point messages.
    /// Returns when this rank's blocks are sent and received.
    ///
    /// For [`Verb::Batch`] only the ranks named by transfers take part. The blocks that one rank
    /// sends to another are received in the order in which they are sent, across calls. Sender and
    /// receiver must agree on type and count, which are compared before a byte is received. For
    /// every other verb all ranks call it, and their fingerprints are compared first, as by
    /// [`run`](Self::run).
    ///
    /// # Errors
    ///
    /// As [`run`](Self::run).
    ///
    /// # Safety
    ///
    /// The memory of every transfer holds `count` elements, readable or writable according to its
    /// direction. Memory to receive into overlaps no other transfer. Nothing else accesses any of
    /// it until the call returns. Every peer is a rank of the group other than this one.
    unsafe fn exchange(&self, op: &OpDesc, transfers: &[Transfer], wait: Wait) -> Result<()>;

    /// Allocates `count` elements on every rank, in memory that this backend reduces in place.
    ///
    /// # Errors
    ///
    /// As [`run`](Self::run), or out of memory.
    fn alloc(&self, dtype: DType, count: usize) -> Result<RawShared>;

    /// Checks, without waiting, whether the group has failed, including failures that no operation
    /// has reported yet, such as a peer's death.
    ///
    /// # Errors
    ///
    /// The failure.
    fn health(&self) -> Result<()> {
        self.ready()
    }

    /// Returns this backend's interface for device memory; `None` if it has none.
    fn device(&self) -> Option<&dyn DeviceBackend> {
        None
    }

    /// Prepares a split, before the new groups are joined, and returns state for this rank's new
    /// group. All ranks call it. `members` are the ranks of this rank's new group in their new
    /// order; `None` if it joins none.
    ///
    /// # Errors
    ///
    /// As [`run`](Self::run).
    fn split_seed(&self, members: Option<&[Rank]>) -> Result<Option<Seed>> {
        let _ = members;
        Ok(None)
    }

    /// Fails the group: current and later waits of every rank fail with
    /// [`Error::Aborted`](crate::Error::Aborted).
    fn abort(&self, reason: &str);
}
