//! The HCCL backend: Ascend NPUs and HCCL communicators for the [device core](super::device).
//!
//! CANN is used through `npu-sys`, whose tables are loaded at run time. Prototypes and layouts are
//! verified against the real headers, the order of calls on a simulator that enforces the rules of
//! CANN's documentation. **None of this has been run on Ascend hardware.**
//!
//! # Properties of HCCL that determine the design
//!
//! * The init blocks until all ranks have joined, for at most `HCCL_CONNECT_TIMEOUT`; so may the
//!   first operation between two ranks. The init runs on a thread that can be abandoned
//!   ([`join`](mod@join)); an operation blocks its caller, while the watchdog detects failures.
//! * **The operations of a single communicator cannot be aborted.** `HcclCommDestroy` must not be
//!   called while they are in a stream, and they wait for their peers for `HCCL_EXEC_TIMEOUT`. So a
//!   group that fails with pending operations aborts all work of this process on the device
//!   (`aclrtDeviceTaskAbort`), including that of other groups. [`Config::with_device_abort`] turns
//!   that off.
//! * A stream continues after a failed operation, so an operation has succeeded only if
//!   `HcclGetCommAsyncError` reports no error after its end.
//! * There are no group calls: the operations of a list are enqueued one by one, in order, and its
//!   messages last, by `HcclBatchSendRecv` ([`communicator`]).
//! * There is no average. It is a sum and a division by the operator `aclnnInplaceDivs` ([`mean`]),
//!   so 16-bit floats are rounded twice, and a sum beyond their range is infinite.
//! * AscendCL has a current context per thread, and a stream belongs to one context. The group uses
//!   the current context of the joining thread, if it is of the group's device, else the device's
//!   default context, which `aclrtSetDevice` creates ([`npu`]).

mod communicator;
mod join;
mod mean;
mod npu;
mod result;

use std::sync::Arc;

pub(crate) use self::join::join;
pub use self::result::Libraries;
use super::Connect;
use super::rendezvous;
use super::shared_config::SharedConfig;
#[cfg(doc)]
use crate::Error;
use crate::Transport;

/// Options of a group over HCCL.
///
/// HCCL reads the others from its environment variables, which must be equal on all ranks:
/// `HCCL_BUFFSIZE` for the device memory of a communicator's buffers, in MiB, and
/// `HCCL_DETERMINISTIC` for deterministic reductions.
#[derive(Clone, Debug)]
pub struct Config {
    device_abort: bool,
    checks: bool,
}

impl Default for Config {
    fn default() -> Self {
        Self { device_abort: true, checks: false }
    }
}

impl Config {
    /// Sets whether a failed group may abort *all* work of this process on the device, including
    /// that of other groups, to end its own operations; true by default. If false, errors are
    /// returned once HCCL has timed out or, after five seconds, with the warning that the device
    /// may still use the memory.
    #[doc(alias = "aclrtDeviceTaskAbort")]
    pub fn with_device_abort(mut self, enabled: bool) -> Self {
        self.device_abort = enabled;
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

    /// Adds the options that must be equal on all ranks: all but `with_device_abort`.
    pub(super) fn add_to(&self, shared: SharedConfig) -> SharedConfig {
        shared.with("hccl::Config::with_checks", self.checks)
    }
}

/// Returns a connector for [`ProcessGroup::from_store_with`](crate::ProcessGroup::from_store_with)
/// that makes groups over HCCL with these libraries and this configuration. It ignores the
/// transport of the options and requires their [NPU](crate::GroupOptions::with_npu_device).
pub fn connector(libraries: Libraries, config: Config) -> Arc<Connect> {
    Arc::new(move |store, rank, world, options| {
        let options = options.clone().with_transport(Transport::Hccl);
        let shared = config.add_to(SharedConfig::new(world, &options));
        let library = |transport| match transport {
            Transport::Hccl => Ok(0),
            _ => Err("joins by HCCL's connector".into()),
        };
        let joining =
            rendezvous::exchange_locations(&**store, rank, world, &options, &library, shared)?;
        let reason = "requested".into();
        let backend = join(store, &joining, reason, Ok(libraries.clone()), &config)?;
        joining.delete_own_keys();
        Ok(Arc::new(backend))
    })
}

/// Checks that this process can load HCCL, for the rendezvous.
pub(super) fn here() -> Result<i32, String> {
    Libraries::global().map(|_| 0).map_err(|error| format!("cannot use HCCL: {error}"))
}
