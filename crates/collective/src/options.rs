//! Options of a group. Options that choose an algorithm or a message format are also listed in
//! `backend/shared_config.rs`: ranks compare them when they join.

use std::any::Any;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

#[cfg(doc)]
use crate::{ProcessGroup, ReduceOp, flight::FlightRecord};

/// Options of a group.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct GroupOptions {
    /// How long a rank waits for a peer's next step: to join, to enter an operation, to deliver the
    /// next chunk. Default: 10 minutes.
    pub timeout: Duration,
    /// The group's name in the store and in error texts; groups that share a store need different
    /// names. Default: `default`.
    pub name: String,
    /// The order of reductions. Default: rank order. The same on all ranks.
    pub determinism: Determinism,
    /// The transport. Default: [`Transport::Auto`]. The same on all ranks.
    pub transport: Transport,
    /// Ranks with different ids count as being on different machines, even if they are not.
    /// Default: none.
    pub host_id: Option<String>,
    /// Directory of the flight record that is written when the group fails. Default: the
    /// environment variable `COLLECTIVE_FLIGHT_DIR`; if unset, no record is written.
    pub flight_dir: Option<PathBuf>,
    /// The CUDA device whose memory the group moves, by its number in the driver. Default: none.
    pub cuda_device: Option<u32>,
    /// The Ascend NPU whose memory the group moves, by its number in AscendCL. Default: none.
    pub npu_device: Option<u32>,
    /// The parent group's [`split_seed`](crate::Backend::split_seed) for this group.
    pub(crate) seed: Option<Seed>,
}

/// The transport of a group whose ranks are processes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Transport {
    /// [`Nccl`](Self::Nccl) if every rank gives a [CUDA device](GroupOptions::with_cuda_device) and
    /// has NCCL; [`Hccl`](Self::Hccl) if every rank gives an [NPU](GroupOptions::with_npu_device)
    /// and has HCCL. Otherwise [`Host`](Self::Host), or [`Tcp`](Self::Tcp) if a rank may not open
    /// the memory of another on its machine, because that belongs to another user or to a process
    /// that is not dumpable (`prctl(2)`, `PR_SET_DUMPABLE`). [`ProcessGroup::backend_reason`]
    /// returns the reason for the choice.
    #[default]
    Auto,
    /// Shared memory within a machine. With several machines, [`Tcp`](Self::Tcp) between ranks of
    /// different machines, and a ring in shared memory in each direction between ranks of the same
    /// machine; the cost model accounts for the difference in speed.
    Host,
    /// TCP connections between all ranks, also those on the same machine.
    ///
    /// A rank listens on the address by which it reaches the store, or on that of the interface
    /// named by the environment variable `COLLECTIVE_IFNAME`: `eth0`, or `^lo` for any but `lo`.
    ///
    /// Every operation begins with 64 bytes, its fingerprint, from every rank to every other,
    /// followed by the first block: a small operation is one step, in which each rank sends its
    /// buffer to all others. The algorithm for large operations depends on size, ranks and
    /// machines; every rank makes the same choice. There are two connections between each pair of
    /// ranks, and one thread in each process that sleeps unless something has failed. A host that
    /// vanishes while no rank waits for it is detected within about 25 seconds.
    /// [`ProcessGroup::alloc`] returns ordinary memory.
    Tcp,
    /// Same as [`Tcp`](Self::Tcp), but libgloo carries the blocks, over its own connections. Needs
    /// the feature `gloo`.
    ///
    /// The process must ignore `SIGPIPE`, as Rust programs do.
    Gloo,
    /// NCCL for the memory of the CUDA device set with [`GroupOptions::with_cuda_device`];
    /// [`Host`](Self::Host) for host memory. Needs the feature `cuda`, and at run time NVIDIA's
    /// driver 470 and NCCL 2.19, or later, NCCL the same on all ranks.
    ///
    /// Each rank needs a GPU of its own, unless the environment variable
    /// `NCCL_MULTI_RANK_GPU_ENABLE=1` lets NCCL, 2.30 or later, share GPUs. Joining ends with an
    /// all-reduce of one number, which may take 60 s, or the timeout if that is shorter; if the
    /// GPUs cannot reach one another, the error says what to try.
    ///
    /// [`ProcessGroup::device`] has the verbs. Each process has one more thread, and the store
    /// must stay reachable while the group lives: on a timeout it identifies the missing ranks.
    /// NCCL chooses its own order of additions, whatever [`Determinism`] is set. NCCL has no bit
    /// operations, and moves 16-bit integers without reducing them, see
    /// [`Unsupported`](crate::Error::Unsupported). It moves `bool` and 8-bit floats as bytes.
    Nccl,
    /// HCCL for the memory of the Ascend NPU set with [`GroupOptions::with_npu_device`];
    /// [`Host`](Self::Host) for host memory. Needs the feature `npu`, and at run time CANN 8.1 or
    /// later with its driver, the same on all ranks.
    ///
    /// Prototypes match CANN's headers, and the order of calls is tested on a simulator that checks
    /// rules; it has not been run on Ascend hardware.
    ///
    /// As with [`Nccl`](Self::Nccl), [`ProcessGroup::device`] has the verbs, each process has one
    /// more thread, the store must stay reachable, and the library chooses the order of additions.
    /// Further:
    ///
    /// * Streams must belong to the AscendCL context that was current on the thread that joined,
    ///   split or rebuilt the group; if none was, or one of another device, to the device's default
    ///   context, which `aclrtSetDevice` makes current.
    /// * Reductions support i8, i32, i64, f16, bf16 (not on the first generation of chips) and f32,
    ///   with sum, average, product (not of bf16), minimum and maximum; all else is
    ///   [`Unsupported`](crate::Error::Unsupported), and so is
    ///   [`register`](crate::device::DeviceCalls::register). An average is a sum followed by a
    ///   division with `aclnnInplaceDivs`: 16-bit floats are rounded twice, and a sum beyond their
    ///   range is infinite.
    /// * HCCL cannot end one group's operations. A group that fails with operations in flight makes
    ///   the device drop all work of this process, other groups' as well, unless
    ///   `hccl::Config::with_device_abort` forbids it.
    /// * HCCL's own waits end after `HCCL_CONNECT_TIMEOUT` and `HCCL_EXEC_TIMEOUT`; the resulting
    ///   error names the variable and the missing ranks.
    Hccl,
}

impl Transport {
    /// Returns whether this build has the transport: `Gloo` needs the feature `gloo`, `Nccl` the
    /// feature `cuda`, and `Hccl` the feature `npu`.
    pub const fn is_built_in(self) -> bool {
        match self {
            Self::Auto | Self::Host | Self::Tcp => true,
            Self::Gloo => cfg!(feature = "gloo"),
            Self::Nccl => cfg!(feature = "cuda"),
            Self::Hccl => cfg!(feature = "npu"),
        }
    }
}

/// The order in which a reduction folds the ranks' numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Determinism {
    /// Rank order, see [`ReduceOp`]: the same bits on all ranks, independent of the transport, the
    /// size and the offset in the buffer.
    #[default]
    RankOrder,
    /// The fastest order between machines. 16-bit floats may be rounded at each of several steps,
    /// and a sum that exceeds `f16` at one of them is infinite; `Avg` and `PreMulSum` of `f16` are
    /// folded in `f32`. All ranks still get the same bits, and the same again when the call is
    /// repeated.
    Fast,
}

/// State that a backend passes to a group split from its own, which takes it once; see
/// [`Backend::split_seed`](crate::backend::Backend::split_seed).
#[derive(Clone, Debug)]
pub struct Seed(Arc<Mutex<Option<Box<dyn Any + Send>>>>);

impl Seed {
    /// Holds `value` until it is taken.
    pub fn new(value: impl Any + Send) -> Self {
        Self(Arc::new(Mutex::new(Some(Box::new(value)))))
    }

    /// Takes the value; `None` if it is not a `T` or has been taken.
    pub fn take<T: Any>(&self) -> Option<T> {
        let value = self.0.lock().take_if(|value| value.is::<T>())?;
        value.downcast().ok().map(|value| *value)
    }
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

    /// Sets the transport. An explicit choice is never replaced by another.
    pub fn with_transport(mut self, transport: Transport) -> Self {
        self.transport = transport;
        self
    }

    /// Sets an id: ranks with different ids count as being on different machines. For tests of
    /// multi-machine jobs on one machine, and for containers that cannot share memory.
    pub fn with_host_id(mut self, id: impl Into<String>) -> Self {
        self.host_id = Some(id.into());
        self
    }

    /// Sets the directory where the [`FlightRecord`] is written at the group's first failure on
    /// this rank, as JSON: `{dir}/{group}-rank{rank}-{pid}.json`. Characters of the group's name
    /// other than letters, digits, `.`, `-` and `_` are percent-encoded, and a name of more than
    /// 180 bytes is cut and ends with its hash. The directory is created if it is missing. A later
    /// failure of a group of the same name replaces the file; if writing fails, there is no record.
    pub fn with_flight_dir(mut self, dir: impl Into<PathBuf>) -> Self {
        self.flight_dir = Some(dir.into());
        self
    }

    /// Sets the CUDA device whose memory the group moves, see [`ProcessGroup::device`]; the verbs
    /// on slices still work. The number is the driver's: it counts the devices that
    /// `CUDA_VISIBLE_DEVICES` leaves visible.
    pub fn with_cuda_device(mut self, ordinal: u32) -> Self {
        self.cuda_device = Some(ordinal);
        self
    }

    /// Sets the Ascend NPU whose memory the group moves, see [`ProcessGroup::device`]; the verbs on
    /// slices still work. The number is AscendCL's: it counts the devices that
    /// `ASCEND_RT_VISIBLE_DEVICES` leaves visible, as [`Topology::device`](crate::Topology::device)
    /// does.
    pub fn with_npu_device(mut self, index: u32) -> Self {
        self.npu_device = Some(index);
        self
    }

    /// Returns the value of [`Backend::split_seed`](crate::Backend::split_seed) for the group being
    /// joined, for the code that makes its backend.
    pub fn seed(&self) -> Option<&Seed> {
        self.seed.as_ref()
    }

    /// Sets the name.
    pub fn with_name(mut self, name: impl Into<String>) -> Self {
        self.name = name.into();
        self
    }
}
