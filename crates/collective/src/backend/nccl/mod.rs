//! The NCCL backend: CUDA devices and NCCL communicators for the [device core](super::device).
//!
//! This module launches no kernels of its own. It uses the CUDA driver only for a context, events,
//! streams and copies, through a table of 23 functions ([`sys`]). Tests replace that table and
//! NCCL's by fakes.
//!
//! # Properties of NCCL that determine the design
//!
//! * A call may block until its peers call too. So communicators are non-blocking, and every call
//!   is polled. An event must not be recorded before the call has completed: it would be reached
//!   before the operation has started.
//! * Two threads must not use a communicator at once, except that `ncclCommAbort` must come from
//!   another thread if a call hangs ([`communicator`]). Aborting twice, or using an aborted
//!   communicator, is undefined behaviour.
//! * NCCL has no timeout, does not detect a killed peer on the same machine, and does not name
//!   ranks in errors.
//! * Counts or types that differ between ranks cause a hang or wrong data. Calls are compared in
//!   advance only with [`Config::with_checks`], which costs a host collective per list of calls;
//!   otherwise a hang is diagnosed after its timeout.
//! * Its enums grow between versions, so they are integers here. The summation order and rounding
//!   depend on version, size and topology.
//! * `ncclGetLastError` returns one text for the whole process: with several groups, an error may
//!   carry the text of another group.

mod communicator;
mod cuda;
mod join;
mod loader;
mod result;
mod sys;

use std::sync::Arc;
use std::time::Duration;

pub(crate) use self::join::join;
pub use self::result::Libraries;
use super::Connect;
use super::rendezvous;
use super::shared_config::SharedConfig;
#[cfg(doc)]
use crate::Error;
use crate::Transport;

/// Time between two polls of a communicator that is in progress.
const TICK: Duration = Duration::from_micros(50);

/// Options of a group over NCCL.
///
/// NCCL reads the others from its environment variables, which must be equal on all ranks:
/// `NCCL_MIN_CTAS` and `NCCL_MAX_CTAS` for the number of CTAs of its kernels,
/// `NCCL_CGA_CLUSTER_SIZE` for the number of CTAs in a cluster, `NCCL_NET` for the network module.
#[derive(Clone, Debug, Default)]
pub struct Config {
    ranks_per_id: Option<usize>,
    checks: bool,
}

impl Config {
    /// Sets the number of ranks per NCCL id, if NCCL supports several ids; 128 by default.
    pub fn with_ranks_per_id(mut self, ranks: usize) -> Self {
        self.ranks_per_id = Some(ranks);
        self
    }

    /// Sets whether ranks compare calls before they enqueue them. A difference is
    /// [`Error::Mismatch`] on all ranks, and no memory has changed. Each list of calls then costs
    /// an [`all_gather`](crate::ProcessGroup::all_gather) of 168 bytes on the host. Point-to-point
    /// messages, and the block lengths of the `_v` verbs, are not compared. Must be equal on all
    /// ranks.
    pub fn with_checks(mut self, checks: bool) -> Self {
        self.checks = checks;
        self
    }

    fn ranks_per_id(&self) -> usize {
        self.ranks_per_id.unwrap_or(128)
    }

    /// Adds the options that must be equal on all ranks: all of them.
    pub(super) fn add_to(&self, shared: SharedConfig) -> SharedConfig {
        shared
            .with("nccl::Config::with_ranks_per_id", self.ranks_per_id())
            .with("nccl::Config::with_checks", self.checks)
    }
}

/// Returns a connector for [`ProcessGroup::from_store_with`](crate::ProcessGroup::from_store_with)
/// that makes groups over NCCL with these libraries and this configuration. It ignores the
/// transport of the options and requires their [CUDA
/// device](crate::GroupOptions::with_cuda_device).
pub fn connector(libraries: Libraries, config: Config) -> Arc<Connect> {
    Arc::new(move |store, rank, world, options| {
        let options = options.clone().with_transport(Transport::Nccl);
        let shared = config.add_to(SharedConfig::new(world, &options));
        let library = |transport| match transport {
            Transport::Nccl => Ok(libraries.version()),
            _ => Err("joins by NCCL's connector".into()),
        };
        let joining =
            rendezvous::exchange_locations(&**store, rank, world, &options, &library, shared)?;
        let reason = "requested".into();
        let backend = join(store, &joining, reason, Ok(libraries), &config)?;
        joining.delete_own_keys();
        Ok(Arc::new(backend))
    })
}

/// Returns the version of this process's NCCL, for the rendezvous.
pub(super) fn here() -> Result<i32, String> {
    Libraries::global()
        .map(|libraries| libraries.version())
        .map_err(|error| format!("cannot use NCCL: {error}"))
}
