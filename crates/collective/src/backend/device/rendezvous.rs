//! Rendezvous of a device group's ranks, after their host sides have joined.
//!
//! A library's init waits for all ranks and does not name a missing one. So the ranks first meet at
//! a barrier of the host side, which names missing and dead ranks. Then they exchange the library's
//! ids and start the init.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{Communicator, DeviceGroup, GroupConfig, run_on_host};
use crate::backend::core::BARRIER;
use crate::backend::rendezvous::{Joining, find_inaccessible};
use crate::backend::{Backend, RawBufs, Wait, WaitPolicy, tcp};
use crate::op::blocks::describe;
use crate::store::Store;
use crate::{DType, Error, OpDesc, Rank, Result, Transport, Verb};

/// Shortest timeout of an operation on the host side.
const TICK: Duration = Duration::from_millis(1);

/// Returns the index of this rank's device. Fails on all ranks if one lacks the library or, as
/// `requirement` says, a device.
pub(crate) fn device_of(
    joining: &Joining<'_>,
    (backend, transport): (&'static str, Transport),
    requirement: &str,
) -> Result<u32> {
    for (rank, location) in joining.locations.iter().enumerate() {
        let support = location.support(transport);
        if let Err(why) = &support.library {
            return Err(Error::Unsupported { backend, what: format!("rank {rank} {why}") });
        }
        if support.index.is_none() {
            let text = format!("rank {rank} gives no device: a group over {requirement}");
            return Err(Error::InvalidArgument(text));
        }
    }
    Ok(joining.locations[joining.rank].support(transport).index.expect("checked above"))
}

/// Joins a group: its host side first, then the communicator that `connect` makes. Returns when all
/// ranks have joined.
pub(crate) fn join<C: Communicator>(
    store: &Arc<dyn Store>,
    joining: &Joining<'_>,
    config: GroupConfig,
    connect: impl FnOnce(&Rendezvous<'_>) -> Result<(Arc<C::Device>, C)>,
) -> Result<DeviceGroup<C>> {
    let reason = config.reason.clone();
    let host = match find_inaccessible(&joining.locations) {
        None => tcp::join_host(joining, reason)?,
        Some(_) => Arc::new(tcp::join(joining, reason, false)?),
    };
    let rendezvous = Rendezvous { library: C::BACKEND, store, joining, host: &host };
    let made = connect(&rendezvous).and_then(|(device, communicator)| {
        DeviceGroup::begin(&rendezvous, device, communicator, config)
    });
    // The abort ends the waits of the peers.
    made.inspect_err(|error| host.abort(&error.to_string()))
}

/// State of a rank that joins a library's communicator.
pub(crate) struct Rendezvous<'a> {
    /// The library's name, for errors.
    pub(crate) library: &'static str,
    pub(crate) store: &'a Arc<dyn Store>,
    pub(crate) joining: &'a Joining<'a>,
    pub(crate) host: &'a Arc<dyn Backend>,
}

impl Rendezvous<'_> {
    /// Returns the error for an init that has timed out after all ranks have started it, with the
    /// library's status `(name, code)`.
    pub(crate) fn timeout_error(&self, (name, code): (&str, i32), text: String) -> Error {
        let during = format!("joining {}", self.joining.group());
        Error::Backend { backend: self.library, during, name: name.into(), code, text }
    }

    /// Broadcasts rank `root`'s bytes.
    pub(crate) fn broadcast(&self, bytes: &mut [u8], root: Rank) -> Result<()> {
        let op = describe(Verb::Broadcast, DType::U8, None, Some(root), bytes.len());
        let output = bytes.as_mut_ptr();
        self.run(&op, RawBufs { input: output, output })
    }

    /// Gathers all ranks' bytes, by rank.
    #[cfg(feature = "cuda")]
    pub(crate) fn all_gather<const N: usize>(&self, own: [u8; N]) -> Result<Vec<[u8; N]>> {
        let mut all = vec![[0; N]; self.joining.world()];
        let op = describe(Verb::AllGather, DType::U8, None, None, N);
        self.run(&op, RawBufs { input: own.as_ptr(), output: all.as_mut_ptr().cast() })?;
        Ok(all)
    }

    /// Blocks until all ranks have called it.
    pub(crate) fn barrier(&self) -> Result<()> {
        self.run(&BARRIER, RawBufs::NONE)
    }

    /// Runs an operation on the host side, within the time left for joining.
    fn run(&self, op: &OpDesc, bufs: RawBufs) -> Result<()> {
        let left = self.joining.deadline.saturating_duration_since(Instant::now());
        let wait = Wait { policy: WaitPolicy::Spin, timeout: Some(left.max(TICK)) };
        run_on_host(&**self.host, op, bufs, wait)
    }
}
