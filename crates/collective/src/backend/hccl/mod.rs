//! HCCL beneath the [core](super::device) of device backends: Ascend NPUs, HCCL's communicators.
//!
//! CANN is used through `npu-sys`, whose tables are loaded at run time. Prototypes and layouts are verified against
//! real headers, the order of calls on a simulator that enforces the rules of CANN's documents. **None of this has
//! been run on Ascend hardware.**
//!
//! # Properties of HCCL that decide the design
//!
//! * The init waits for all ranks, for `HCCL_CONNECT_TIMEOUT`, and so may the first operation between two ranks. The
//!   init runs on a thread that can be abandoned ([`join`](mod@join)); an operation blocks its caller, while the watchdog
//!   decides.
//! * **A single communicator's operations cannot be ended.** `HcclCommDestroy` must not be called while they are in a
//!   stream, and they wait for their peers as long as `HCCL_EXEC_TIMEOUT` says. So a group that fails with pending
//!   operations has the device drop all work of this process (`aclrtDeviceTaskAbort`); other groups and other
//!   work on the device fail, too. [`Config::with_device_abort`] turns that off.
//! * A stream continues behind an operation that fails, so an operation has succeeded only if
//!   `HcclGetCommAsyncError` reports nothing after its end.
//! * There are no groups of calls: the operations of a list are put into the stream one by one, in order, and
//!   its messages last, by `HcclBatchSendRecv` ([`communicator`]).
//! * There is no average. It is a sum and then a division by the operator `aclnnInplaceDivs` ([`mean`]), so 16-bit
//!   floats are rounded twice, and a sum beyond their range is infinite.
//! * AscendCL has a current context per thread, and a stream belongs to one context. The group's context is the
//!   current one of the joining thread, if it is of the group's device, else the device's default one, that of
//!   `aclrtSetDevice` ([`npu`]).

mod communicator;
mod join;
mod mean;
mod npu;
mod result;

use std::sync::Arc;

pub(crate) use self::join::join;
pub use self::result::Libraries;
use super::rendezvous;
use super::shared_config::SharedConfig;
use crate::membership::Connect;
use crate::{Error, Result, Transport};

/// Options of a group over HCCL.
#[derive(Clone, Debug)]
pub struct Config {
    buffer_mib: Option<u32>,
    deterministic: Option<bool>,
    device_abort: bool,
    checks: bool,
}

impl Default for Config {
    fn default() -> Self {
        Self { buffer_mib: None, deterministic: None, device_abort: true, checks: false }
    }
}

impl Config {
    /// Sets the device memory for a communicator's buffers, in MiB; by default `HCCL_BUFFSIZE`.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] for 0, or for `u32::MAX`, which means HCCL's default.
    pub fn with_buffer_mib(mut self, mib: u32) -> Result<Self> {
        if mib == 0 || mib == u32::MAX {
            return Err(Error::InvalidArgument(format!("HCCL has no buffers of {mib} MiB")));
        }
        self.buffer_mib = Some(mib);
        Ok(self)
    }

    /// Sets whether HCCL adds in the same order at every call; by default `HCCL_DETERMINISTIC`.
    pub fn with_deterministic(mut self, deterministic: bool) -> Self {
        self.deterministic = Some(deterministic);
        self
    }

    /// Sets whether a group that fails may have the device drop *all* work of this process, including that of
    /// other groups, to end its own operations; true by default. If false, errors are returned once HCCL has given up
    /// or, after ten seconds, as an error which says that the device may still use the memory.
    #[doc(alias = "aclrtDeviceTaskAbort")]
    pub fn with_device_abort(mut self, may: bool) -> Self {
        self.device_abort = may;
        self
    }

    /// Sets whether ranks compare calls before they enqueue them: a difference is [`Error::Mismatch`] on all ranks, and
    /// no memory has changed. Each list of calls then costs an [`all_gather`](crate::ProcessGroup::all_gather) of 168
    /// bytes on the host. Messages between pairs, and the lengths of verbs with blocks of different lengths, are
    /// not compared. Must be equal on all ranks.
    pub fn with_checks(mut self, checks: bool) -> Self {
        self.checks = checks;
        self
    }

    /// Adds the options that must be equal on all ranks: all but `with_device_abort`.
    pub(super) fn add_to(&self, shared: SharedConfig) -> SharedConfig {
        shared
            .with("hccl::Config::with_buffer_mib", self.buffer_mib)
            .with("hccl::Config::with_deterministic", self.deterministic)
            .with("hccl::Config::with_checks", self.checks)
    }
}

/// Makes groups over HCCL with these libraries and this configuration, for
/// [`ProcessGroup::from_store_with`](crate::ProcessGroup::from_store_with). Ignores the options' transport; needs their
/// [NPU](crate::GroupOptions::with_npu_device).
pub fn connector(libraries: Libraries, config: Config) -> Arc<Connect> {
    Arc::new(move |store, rank, world, options| {
        let options = options.clone().with_transport(Transport::Hccl);
        let present =
            rendezvous::DeviceLibraries { hccl: Ok(()), ..rendezvous::DeviceLibraries::default() };
        let shared = config.add_to(SharedConfig::new(world, &options));
        let joining =
            rendezvous::exchange_locations(&**store, rank, world, &options, present, shared)?;
        let reason = "it was asked for".into();
        let backend = join(store, &joining, reason, Ok(libraries.clone()), &config)?;
        joining.delete_own_keys();
        Ok(Arc::new(backend))
    })
}

/// Whether this machine has HCCL, for the rendezvous.
pub(super) fn here() -> std::result::Result<(), String> {
    Libraries::global().map(drop).map_err(|error| error.to_string())
}
