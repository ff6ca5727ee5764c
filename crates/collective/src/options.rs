//! How a group is made. An option by which a rank chooses an algorithm or the form of a message is
//! listed in `backend/shared_config.rs` too: ranks compare it when they join.

use std::path::PathBuf;
use std::time::Duration;

use crate::backend::Seed;
#[cfg(doc)]
use crate::{ProcessGroup, ReduceOp, flight::FlightRecord};

/// How a group is made.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct GroupOptions {
    /// How long a rank waits for a peer to take its next step: to join, to enter an operation, to
    /// deliver the next chunk. 10 minutes unless set.
    pub timeout: Duration,
    /// The group's name in the store and in error texts; groups that share a store need different
    /// ones. `default` unless set.
    pub name: String,
    /// Whether reductions fold in rank order. They do unless set. The same on all ranks.
    pub determinism: Determinism,
    /// What carries the data. [`Transport::Auto`] unless set. The same on all ranks.
    pub transport: Transport,
    /// Ranks with different ids count as being on different machines, even if they are not. None
    /// unless set.
    pub host_id: Option<String>,
    /// Where the group's flight record goes when the group fails. Nowhere unless set here or by the
    /// environment's `COLLECTIVE_FLIGHT_DIR`.
    pub flight_dir: Option<PathBuf>,
    /// The CUDA device whose memory the group is to move, by its number in the driver. None unless
    /// set.
    pub cuda_device: Option<u32>,
    /// The Ascend NPU whose memory the group is to move, by its number in AscendCL. None unless set.
    pub npu_device: Option<u32>,
    /// What the group that this one is split from made for it.
    pub(crate) seed: Option<Seed>,
}

/// What carries the data of a group whose ranks are processes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Transport {
    /// [`Nccl`](Self::Nccl) if every rank gives a
    /// [CUDA device](GroupOptions::with_cuda_device) and has NCCL, [`Hccl`](Self::Hccl) if every rank
    /// gives an [NPU](GroupOptions::with_npu_device) and has HCCL. Else [`Host`](Self::Host), or
    /// [`Tcp`](Self::Tcp) if a rank may not open the memory of another on its machine: that of another user, or
    /// of a process that is not dumpable (`prctl(2)`, `PR_SET_DUMPABLE`).
    /// [`ProcessGroup::backend_reason`] says why it was which.
    #[default]
    Auto,
    /// Shared memory within a machine. If there are several machines, it is as with
    /// [`Tcp`](Self::Tcp) between ranks of two of them; between ranks of one it is a ring in shared
    /// memory each way, and the cost model knows that those are faster.
    Host,
    /// TCP connections between all ranks, also those of one machine.
    ///
    /// A rank listens at the address by which it reaches the store, or at that of the interface
    /// which the environment variable `COLLECTIVE_IFNAME` names: `eth0`, or `^lo` for any but this.
    ///
    /// Every operation begins with 64 bytes, its fingerprint, from every rank to every other, with
    /// the first block right behind it: a small one is one step, in which each rank sends its buffer
    /// to all others. What follows for large ones depends on size, ranks and machines; every rank
    /// chooses alike. Two connections between each pair of ranks; one thread in each process that
    /// sleeps unless something has failed. A host that vanishes while nobody waits for it is noticed
    /// within about 25 seconds. [`ProcessGroup::alloc`] gives ordinary memory.
    Tcp,
    /// As [`Tcp`](Self::Tcp), but libgloo carries the blocks, over connections of its own. Needs the
    /// feature `gloo`.
    ///
    /// With [`Determinism::Fast`] `all_reduce` and `reduce` are gloo's ring. The process must ignore
    /// `SIGPIPE`, as Rust programs do.
    Gloo,
    /// NCCL for the memory of a CUDA device, which [`GroupOptions::with_cuda_device`] names; beside
    /// it what [`Host`](Self::Host) is for the memory of the host. Needs the feature `nccl`, and at
    /// run time NVIDIA's driver and NCCL 2.14 or later, the same on all ranks.
    ///
    /// [`ProcessGroup::device`] has the verbs. Two more threads in each process, and the store must
    /// stay where it is while the group lives: it tells who is missing when time is over. The order
    /// in which NCCL adds is its own, whatever [`Determinism`] says. NCCL has no bit operations, and
    /// moves 16-bit integers without reducing them, see [`Unsupported`](crate::Error::Unsupported).
    /// `bool` and 8-bit floats are bytes to it.
    Nccl,
    /// HCCL for the memory of an Ascend NPU, which [`GroupOptions::with_npu_device`] names; beside it
    /// what [`Host`](Self::Host) is for the memory of the host. Needs the feature `hccl`, and at run
    /// time CANN 8.1 or later with its driver, the same on all ranks.
    ///
    /// Prototypes match CANN's headers and the order of calls is tested on a simulator that checks
    /// rules; it has not been run on Ascend hardware.
    ///
    /// As with [`Nccl`](Self::Nccl), [`ProcessGroup::device`] has the verbs, two more threads and the
    /// store serve the group, and the order of additions is the library's. Further:
    ///
    /// * Streams must belong to the context of AscendCL that was current on the thread which joined,
    ///   split or rebuilt the group; if none was, or one of another device, to the device's own, as
    ///   `aclrtSetDevice` makes it current.
    /// * Reductions are of i8, i32, i64, f16, bf16 (not on the first generation of chips) and f32 by
    ///   sum, average, product (not of bf16), minimum and maximum; all else is
    ///   [`Unsupported`](crate::Error::Unsupported), and likewise
    ///   [`register`](crate::device::DeviceCalls::register). An average is a sum and then a division by
    ///   `aclnnInplaceDivs`: 16-bit floats are rounded twice, a sum beyond their range is infinite.
    /// * HCCL cannot end one group's operations. A group that fails while something of it is under way
    ///   has the device drop all work of this process, other groups' as well, unless
    ///   `hccl::Config::with_device_abort` forbids it.
    /// * HCCL's own waits end with `HCCL_CONNECT_TIMEOUT` and `HCCL_EXEC_TIMEOUT`; an error that comes
    ///   of them names the variable, and the ranks that were missing.
    Hccl,
}

/// In which order a reduction folds the ranks' numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Determinism {
    /// In rank order, as [`ReduceOp`] says: same bits on all ranks, whatever the transport, the
    /// size, the offset in the buffer.
    #[default]
    RankOrder,
    /// In any order that is faster between machines. 16-bit floats may be rounded at each of
    /// several steps. All ranks still get the same bits, and get them again when they repeat the
    /// call.
    Fast,
}

impl Default for GroupOptions {
    fn default() -> Self {
        Self {
            timeout: Duration::from_secs(600),
            name: "default".into(),
            determinism: Determinism::RankOrder,
            transport: Transport::Auto,
            host_id: None,
            flight_dir: None,
            cuda_device: None,
            npu_device: None,
            seed: None,
        }
    }
}

impl GroupOptions {
    /// Sets the timeout.
    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Sets the order of reductions.
    pub fn with_determinism(mut self, determinism: Determinism) -> Self {
        self.determinism = determinism;
        self
    }

    /// Sets what carries the data. An explicit choice is never replaced by another.
    pub fn with_transport(mut self, transport: Transport) -> Self {
        self.transport = transport;
        self
    }

    /// Has this rank count as being on another machine than those with another id: to try on one
    /// machine what several would do, or where two containers cannot share memory.
    pub fn with_host_id(mut self, id: impl Into<String>) -> Self {
        self.host_id = Some(id.into());
        self
    }

    /// Sets where the [`FlightRecord`] is written at the group's first failure on this rank, as
    /// JSON: `{dir}/{group}-rank{rank}-{pid}.json`, with characters of the group's name other than
    /// letters, digits, `.`, `-` and `_` replaced by `_`. The directory is made if need be. A later
    /// failure of a group of the same name replaces the file; one that cannot be written is left
    /// out.
    pub fn with_flight_dir(mut self, dir: impl Into<PathBuf>) -> Self {
        self.flight_dir = Some(dir.into());
        self
    }

    /// Makes the group for the memory of a CUDA device, see [`ProcessGroup::device`]; the verbs on
    /// slices work as ever. The number is the driver's, so it counts what `CUDA_VISIBLE_DEVICES`
    /// leaves.
    pub fn with_cuda_device(mut self, ordinal: u32) -> Self {
        self.cuda_device = Some(ordinal);
        self
    }

    /// Makes the group for the memory of an Ascend NPU, see [`ProcessGroup::device`]; the verbs on
    /// slices work as ever. The number is AscendCL's, so it counts what `ASCEND_RT_VISIBLE_DEVICES`
    /// leaves, as [`Topology::device`](crate::Topology::device) does.
    pub fn with_npu_device(mut self, index: u32) -> Self {
        self.npu_device = Some(index);
        self
    }

    /// What [`Backend::split_seed`](crate::Backend::split_seed) made for the group that is joined,
    /// for whoever makes its backend.
    pub fn seed(&self) -> Option<&Seed> {
        self.seed.as_ref()
    }

    /// Sets the name.
    pub fn with_name(mut self, name: impl Into<String>) -> Self {
        self.name = name.into();
        self
    }
}
