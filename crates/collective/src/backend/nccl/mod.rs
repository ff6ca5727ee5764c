//! NCCL beneath the [core](super::device) of device backends: CUDA's devices, NCCL's communicators.
//!
//! Nothing here launches kernels of its own, so of the driver a context, events, a stream and copies
//! are needed, through a table of eighteen functions ([`sys`]) that a test can fake as well as NCCL's.
//!
//! # NCCL's sharp edges, which decide the shape
//!
//! * A call may block for as long as a peer does. So communicators are non-blocking, and every call
//!   is polled. An event must not be recorded before the call is over: it would be reached before
//!   the operation has begun.
//! * A communicator is not safe for two threads, but `ncclCommAbort` must come from another thread
//!   if a call hangs ([`communicator`]). Aborting twice, or using what was aborted, is undefined.
//! * NCCL has no deadline, does not notice a killed peer of the same machine, and names no rank.
//! * Counts or types that differ are a hang or garbage. Nothing is compared before data move, which
//!   would cost a meeting on the host for each operation, unless [`Config::with_checks`] asks for
//!   that; a hang is explained afterwards.
//! * Its enumerations grow, so here they are integers. What its adding rounds to, and in which order,
//!   depends on version, size and topology.
//! * `ncclGetLastError` is the process's, not the communicator's: with several groups in a process an
//!   error may carry another's words.

mod communicator;
mod cuda;
mod join;
mod loader;
mod result;
mod sys;

use std::ffi::{CString, c_int};
use std::sync::Arc;
use std::time::Duration;

pub(crate) use self::join::join;
pub use self::result::Libraries;
use super::meet;
use super::shared_config::SharedConfig;
use crate::membership::Connect;
use crate::{Error, Result, Transport};

/// Between two looks at a communicator that is in progress.
const TICK: Duration = Duration::from_micros(50);

/// What NCCL is told of a group, and how ranks meet.
#[derive(Clone, Debug)]
pub struct Config {
    min_ctas: Option<u16>,
    max_ctas: Option<u16>,
    cga_cluster_size: Option<u16>,
    net_name: Option<CString>,
    ranks_per_id: usize,
    checks: bool,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            min_ctas: None,
            max_ctas: None,
            cga_cluster_size: None,
            net_name: None,
            ranks_per_id: 128,
            checks: false,
        }
    }
}

impl Config {
    /// Sets how many blocks NCCL's kernels have at least and at most; NCCL's choice unless set.
    pub fn with_ctas(mut self, min: u16, max: u16) -> Self {
        (self.min_ctas, self.max_ctas) = (Some(min), Some(max));
        self
    }

    /// Sets how many blocks make a cluster, 0 to 8; NCCL's choice unless set.
    pub fn with_cga_cluster_size(mut self, size: u16) -> Self {
        self.cga_cluster_size = Some(size);
        self
    }

    /// Sets the network, for example `IB` or `Socket`; NCCL's choice unless set.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] for a name with a NUL.
    pub fn with_net_name(mut self, name: &str) -> Result<Self> {
        let name = CString::new(name)
            .map_err(|_| Error::InvalidArgument("a network's name has no NUL".into()))?;
        self.net_name = Some(name);
        Ok(self)
    }

    /// Sets for how many ranks NCCL makes one id, if it can have several; 128 unless set.
    pub fn with_ranks_per_id(mut self, ranks: usize) -> Self {
        self.ranks_per_id = ranks;
        self
    }

    /// Has the ranks compare what they call before they enqueue it: a difference is
    /// [`Error::Mismatch`] on all of them, and no byte has changed. Each list of calls then meets
    /// the peers on the host, which costs what an [`all_gather`](crate::ProcessGroup::all_gather) of
    /// 168 bytes does. Messages between pairs and the lengths of verbs with blocks of different
    /// lengths are not compared. The same on all ranks.
    pub fn with_checks(mut self, checks: bool) -> Self {
        self.checks = checks;
        self
    }

    /// What it adds to what all ranks have alike: everything.
    pub(super) fn add_to(&self, shared: SharedConfig) -> SharedConfig {
        shared
            .with("nccl::Config::with_ctas", (self.min_ctas, self.max_ctas))
            .with("nccl::Config::with_cga_cluster_size", self.cga_cluster_size)
            .with("nccl::Config::with_net_name", &self.net_name)
            .with("nccl::Config::with_ranks_per_id", self.ranks_per_id)
            .with("nccl::Config::with_checks", self.checks)
    }

    /// As C has it, good while the name lives.
    fn to_sys(&self) -> (sys::Config, Option<CString>) {
        let name = self.net_name.clone();
        let number = |value: Option<u16>| value.map_or(sys::UNDEFINED, c_int::from);
        let config = sys::Config {
            cga_cluster_size: number(self.cga_cluster_size),
            min_ctas: number(self.min_ctas),
            max_ctas: number(self.max_ctas),
            net_name: name.as_ref().map_or(std::ptr::null(), |name| name.as_ptr()),
            ..sys::Config::new()
        };
        (config, name)
    }
}

/// Makes groups over NCCL with these libraries and this configuration, for
/// [`ProcessGroup::from_store_with`](crate::ProcessGroup::from_store_with). The options' transport
/// does not count; their [CUDA device](crate::GroupOptions::with_cuda_device) does.
pub fn connector(libraries: Libraries, config: Config) -> Arc<Connect> {
    Arc::new(move |store, rank, world, options| {
        let options = options.clone().with_transport(Transport::Nccl);
        let nccl = Ok(libraries.version());
        let here = meet::Here { nccl, ..meet::Here::default() };
        let shared = config.add_to(SharedConfig::new(world, &options));
        let joining = meet::gather(&**store, rank, world, &options, here, shared)?;
        let reason = "it was asked for".into();
        let backend = join(store, &joining, reason, Ok(libraries), &config)?;
        joining.forget();
        Ok(Arc::new(backend))
    })
}

/// What this machine's NCCL is, as ranks tell one another.
pub(super) fn here() -> std::result::Result<i32, String> {
    Libraries::global().map(|libraries| libraries.version()).map_err(|error| error.to_string())
}
