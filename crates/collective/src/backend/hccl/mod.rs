//! HCCL beneath the [core](super::device) of device backends: Ascend NPUs, HCCL's communicators.
//!
//! CANN is reached through `npu-sys`, whose tables are loaded at run time. What has been verified is
//! what is said there: prototypes and layouts against real headers, the order of calls on a simulator
//! that enforces the rules of CANN's documents. **None of this has been run on Ascend hardware.**
//!
//! # What is special to HCCL, and decides the shape
//!
//! * The init waits for all ranks, for `HCCL_CONNECT_TIMEOUT`, and so may the first operation between
//!   two of them. The init runs on a thread that can be left to itself ([`join`]); an operation blocks
//!   its caller, beside whom the watch decides.
//! * **Nothing ends one communicator's operations.** `HcclCommDestroy` must not be called while they
//!   are in a stream, and they wait for their peers as long as `HCCL_EXEC_TIMEOUT` says. So a group
//!   that fails with something under way has the device drop all work of this process
//!   (`aclrtDeviceTaskAbort`), which other groups and computing on it notice as failures of their own,
//!   unless [`Config::with_device_abort`] says otherwise.
//! * An operation that fails lets its stream go on, so the end of an operation counts only if
//!   `HcclGetCommAsyncError` has nothing to say behind it.
//! * There are no groups of calls: the operations of a list are put into the stream one by one, in
//!   order, its messages at last, by `HcclBatchSendRecv` ([`communicator`]).
//! * There is no average. It is a sum and then a division by the operator `aclnnInplaceDivs`
//!   ([`mean`]), so 16-bit floats are rounded twice, and a sum beyond their range is infinite.
//! * AscendCL has a current context per thread, and streams belong to one. The group's is the one that
//!   is current on the thread which joins, if that is of its device, else the device's own, the one of
//!   `aclrtSetDevice` ([`npu`]).

mod communicator;
mod join;
mod mean;
mod npu;
mod result;

use std::sync::Arc;

pub(crate) use self::join::join;
pub use self::result::Libraries;
use super::meet;
use super::shared_config::SharedConfig;
use crate::membership::Connect;
use crate::{Error, Result, Transport};

/// What HCCL is told of a group.
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
    /// Sets how much memory of the device a communicator may have for buffers, in MiB; HCCL's choice
    /// (`HCCL_BUFFSIZE`) unless set.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] for none at all, or for the number that means HCCL's choice.
    pub fn with_buffer_mib(mut self, mib: u32) -> Result<Self> {
        if mib == 0 || mib == u32::MAX {
            return Err(Error::InvalidArgument(format!("HCCL has no buffers of {mib} MiB")));
        }
        self.buffer_mib = Some(mib);
        Ok(self)
    }

    /// Sets whether HCCL adds in the same order at every call; HCCL's choice
    /// (`HCCL_DETERMINISTIC`) unless set.
    pub fn with_deterministic(mut self, deterministic: bool) -> Self {
        self.deterministic = Some(deterministic);
        self
    }

    /// Sets whether a group that fails may have the device drop *all* work of this process, other
    /// groups' and computing included, to end its own operations; it may unless set. If not, errors are
    /// told once HCCL has given up by itself or, after ten seconds, as one which says that the device
    /// may still use the memory.
    #[doc(alias = "aclrtDeviceTaskAbort")]
    pub fn with_device_abort(mut self, may: bool) -> Self {
        self.device_abort = may;
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

    /// What it adds to what all ranks have alike: everything but what a failed rank may do.
    pub(super) fn add_to(&self, shared: SharedConfig) -> SharedConfig {
        shared
            .with("hccl::Config::with_buffer_mib", self.buffer_mib)
            .with("hccl::Config::with_deterministic", self.deterministic)
            .with("hccl::Config::with_checks", self.checks)
    }
}

/// Makes groups over HCCL with these libraries and this configuration, for
/// [`ProcessGroup::from_store_with`](crate::ProcessGroup::from_store_with). The options' transport
/// does not count; their [NPU](crate::GroupOptions::with_npu_device) does.
pub fn connector(libraries: Libraries, config: Config) -> Arc<Connect> {
    Arc::new(move |store, rank, world, options| {
        let options = options.clone().with_transport(Transport::Hccl);
        let here = meet::Here { hccl: Ok(()), ..meet::Here::default() };
        let shared = config.add_to(SharedConfig::new(world, &options));
        let joining = meet::gather(&**store, rank, world, &options, here, shared)?;
        let reason = "it was asked for".into();
        let backend = join(store, &joining, reason, Ok(libraries.clone()), &config)?;
        joining.forget();
        Ok(Arc::new(backend))
    })
}

/// Whether this machine has HCCL, as ranks tell one another.
pub(super) fn here() -> std::result::Result<(), String> {
    Libraries::global().map(drop).map_err(|error| error.to_string())
}
