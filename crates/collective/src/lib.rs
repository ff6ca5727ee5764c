//! Process groups: collective communication between the ranks of a training job.
//!
//! # The model in one page
//!
//! A job is `world_size` ranks. Each holds a [`ProcessGroup`], and all make the same calls in the
//! same order: [`all_reduce`](ProcessGroup::all_reduce), [`broadcast`](ProcessGroup::broadcast),
//! [`all_gather`](ProcessGroup::all_gather), [`reduce_scatter`](ProcessGroup::reduce_scatter),
//! [`barrier`](ProcessGroup::barrier), and the functions of [`object`] for any serde type. Ranks
//! are threads of one process ([`ProcessGroup::threads`]: tests, examples) or processes, on one
//! machine or several, that find each other through a [`store`] ([`ProcessGroup::from_store`];
//! [`init()`] reads the launcher's environment variables). [`dist`] has the functions
//! of `mmengine.dist`, for code that also runs without a group. A [`Reducer`](reducer::Reducer)
//! averages a model's gradients over a group while backward still runs.
//!
//! * **Same call everywhere, checked.** Each call is an [`OpDesc`]; its [`Fingerprint`] is compared
//!   with all peers' before any data move. If they differ, every rank gets [`Error::Mismatch`] with
//!   each rank's call, and no buffer is changed.
//! * **Same bits everywhere.** Reductions fold in rank order, 16-bit floats in `f32` and rounded
//!   once, see [`ReduceOp`]. The result does not depend on the rank, the transport, the chunking or
//!   the offset in the buffer.
//! * **No silent hang.** Every wait has a deadline, and its error names the missing ranks. When a
//!   process dies, its peers get [`Error::PeerDied`] with its rank at once; [`ProcessGroup::abort`]
//!   ends every rank's waits. After a failure a group is [poisoned](Error::Poisoned) on all ranks.
//! * **Recovery from failures.** [`ProcessGroup::rebuild`] makes a new group of the surviving
//!   ranks; [`ProcessGroup::split`] makes subgroups that fail independently of their parent; a
//!   [`DeviceMesh`] has one for each dimension of a grid.
//! * **Buffers in flight are owned.** [`ProcessGroup::all_reduce_async`] and the other asynchronous
//!   calls take the buffer by value; the [`Work`], which is also a future, returns it. Forgetting a
//!   `Work` leaks memory and never corrupts it. Within a [`scope`](ProcessGroup::scope) buffers are
//!   borrowed.
//! * **Failures are recorded.** [`ProcessGroup::flight_record`] lists a rank's last calls and
//!   their outcomes; with [`GroupOptions::with_flight_dir`] it is written to a file when the group
//!   fails. If a peer caused that ([`Error::is_caused_by_peer`]), the rank says so in the
//!   launcher's error file, `TORCHELASTIC_ERROR_FILE`, so that the peer is the root cause reported.
//! * **A run can be watched.** A subscriber of `tracing` gets spans and events, listed
//!   [below](#spans-and-events).
//! * **Shared buffers are faster.** [`ProcessGroup::alloc`] returns memory shared by the ranks of
//!   a machine; reducing it copies nothing between them.
//! * **Device memory has a separate API.** [`ProcessGroup::device`] takes memory of a CUDA device
//!   or an NPU and a stream. Its guarantees differ, see [`device`]: the items above are about host
//!   memory.
//! * **Simulated networks.** With the feature `sim`, the module `sim` runs the multi-machine
//!   algorithms in virtual time: for thousands of ranks without data, or for threads with real
//!   data, faults included.
//!
//! A [`Backend`] carries the data; [`backend`] documents how to write one. The built-in ones need
//! nothing installed: shared memory within a machine, TCP between machines ([`Transport`]). TCP is
//! neither authenticated nor encrypted: any host that can reach a rank's port can disturb a group,
//! so the network must be trusted. Linux only.
//!
//! # Spans and events
//!
//! A program that installs a [`tracing`](https://docs.rs/tracing) subscriber gets these, with the
//! target `collective`. Without one nothing is formatted, and each costs an atomic load.
//!
//! * Span `bucket { rank, pass, bucket, bytes, dtype }` (debug): from the launch of a gradient
//!   bucket until its average is complete, on whichever thread that happens.
//! * Span `finish { rank, pass }` (debug): the end of a pass; the rank waits for its buckets.
//! * Span `call { group, rank, op }` (trace): one step of a verb, on the thread that runs it. On a
//!   device, until the device has run it.
//! * Event `group_made { group, rank, world_size, backend, epoch }` (debug): this rank has joined a
//!   group.
//! * Event `group_failed { group, rank, error }` (error): the group's first failure on this rank.
//!
//! An asynchronous call runs within the span in which it was submitted, also on another thread.

// docs.rs notes at each item the feature that it needs.
#![cfg_attr(docsrs, feature(doc_cfg))]

#[cfg(not(target_os = "linux"))]
compile_error!(
    "`collective` needs Linux: its ranks share memory, wait and bind to processors by Linux system calls"
);

pub mod backend;
pub mod device;
pub mod dist;
pub mod flight;
pub mod init;
pub mod reducer;
#[cfg(feature = "sim")]
pub mod sim;
pub mod store;

#[cfg_attr(
    not(feature = "sim"),
    expect(
        dead_code,
        unreachable_pub,
        unused_imports,
        reason = "only the simulator uses and exports these"
    )
)]
mod algo;
mod error;
mod group;
mod memory;
mod net;
mod op;
mod options;
mod simd;
mod sync;
mod work;

pub use error::{Error, Result};
pub use group::{DeviceMesh, Message, ProcessGroup, object, scope};
pub use init::{Topology, init, init_process_group, init_with};
pub use memory::SharedBuf;
#[doc(hidden)]
pub use memory::copy::copy_slice;
pub use op::{DType, Element, F8E4M3, F8E5M2, ReduceOp};
pub use options::{Determinism, GroupOptions, Transport};
pub use store::{MemoryStore, Store, TcpStore};
pub use work::{Buffer, Work};

pub(crate) use backend::{Backend, WaitPolicy};
pub(crate) use device::{DeviceBuf, DeviceStream, DeviceWork};
pub(crate) use op::{BufferLocation, Fingerprint, OpDesc, Verb};
pub(crate) use store::{PrefixStore, TcpStoreServer};

/// NCCL's own configuration, see [`Transport::Nccl`].
#[cfg(feature = "cuda")]
pub mod nccl {
    pub use crate::backend::nccl::{Config, Libraries, connector};
}

/// HCCL's own configuration, see [`Transport::Hccl`].
#[cfg(feature = "npu")]
pub mod hccl {
    pub use crate::backend::hccl::{Config, Libraries, connector};
}

/// Frames of the TCP backend, for the fuzz target; not part of the API.
#[doc(hidden)]
pub mod wire {
    pub use crate::backend::failure::{Cause, Failure};
    pub use crate::backend::frame::{
        CONTROL_BYTES, Channel, ControlMessage, Frame, HEADER, Hello, Malformed,
    };
}

/// A process's index within a group, `0..world_size`.
pub type Rank = usize;

/// Compiles and runs the README's examples.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
