//! Rendezvous of a device group's ranks, after their host sides have joined.
//!
//! A library's init waits for all ranks and does not name a missing one. So a rank records in the store that it has
//! started the init, and a rank that times out reads which ranks have not started.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{Communicator, DeviceGroup, GroupConfig, run_on_host};
use crate::backend::core::BARRIER;
use crate::backend::rendezvous::{Joining, join_host};
use crate::backend::{Backend, RawBufs, Wait, WaitPolicy};
use crate::store::Store;
use crate::{Error, Rank, Result, Transport};

/// Shortest timeout of the barrier.
const TICK: Duration = Duration::from_millis(1);
/// Longest wait for a key before the host side is checked again.
const SLICE: Duration = Duration::from_millis(20);

/// Returns the index of this rank's device. Fails if a rank lacks the library. `requirement` completes the error
/// "a group over ..." for a rank without a device.
pub(crate) fn device_of(
    joining: &Joining<'_>,
    (backend, transport): (&'static str, Transport),
    requirement: &str,
) -> Result<u32> {
    for (rank, location) in joining.locations.iter().enumerate() {
        if let Some(why) = location.lacks(transport) {
            return Err(Error::Unsupported { backend, what: format!("rank {rank}: {why}") });
        }
    }
    let device = joining.locations[joining.rank].device(transport);
    device.ok_or_else(|| Error::InvalidArgument(format!("a group over {requirement}")))
}

/// Joins a group: its host side first, then the communicator that `connect` makes. Returns when all ranks have
/// joined.
pub(crate) fn join<C: Communicator>(
    store: &Arc<dyn Store>,
    joining: &Joining<'_>,
    config: GroupConfig,
    connect: impl FnOnce(&Rendezvous<'_>) -> Result<(Arc<C::Device>, C)>,
) -> Result<DeviceGroup<C>> {
    let host = join_host(joining, config.reason.clone())?;
    let rendezvous = Rendezvous { library: C::BACKEND, store, joining, host: &host };
    let made = connect(&rendezvous).and_then(|(device, communicator)| {
        DeviceGroup::begin(&rendezvous, device, communicator, config)
    });
    // The abort ends the waits of the peers.
    made.inspect_err(|error| host.abort(&error.to_string()))
}

/// State of a rank that joins a library's communicator.
pub(crate) struct Rendezvous<'a> {
    /// The library's name, for keys and errors.
    pub(crate) library: &'static str,
    pub(crate) store: &'a Arc<dyn Store>,
    pub(crate) joining: &'a Joining<'a>,
    pub(crate) host: &'a Arc<dyn Backend>,
}

impl Rendezvous<'_> {
    pub(crate) fn key(&self, what: &str) -> String {
        format!("{}/{}{what}", self.joining.options.name, self.library)
    }

    /// Sets a key that [`value`](Self::value) reads.
    pub(crate) fn set(&self, what: &str, value: &[u8]) -> Result<()> {
        self.joining.set(self.key(what), value)
    }

    /// Blocks until rank `owner` has set a key, and returns its value. `name` describes the value in errors.
    pub(crate) fn value(&self, what: &str, owner: Rank, name: &str) -> Result<Vec<u8>> {
        loop {
            match self.store.get(&self.key(what), SLICE) {
                Err(Error::KeyTimeout { .. }) => self.host.health()?,
                other => return other,
            }
            if Instant::now() >= self.joining.deadline {
                return Err(self.joining.timeout(name, vec![owner]));
            }
        }
    }

    /// Records in the store that this rank has started the library's init.
    pub(crate) fn mark_started(&self) -> Result<()> {
        self.set(&format!("-started/{}", self.joining.rank), b"")
    }

    /// Returns the error for an `init` that has timed out: a timeout with the ranks that have not started or, if all
    /// have, the library's status `(name, code)` with `text`.
    pub(crate) fn timeout_error(&self, init: &str, status: (&str, i32), text: String) -> Error {
        let mut missing = Vec::new();
        for rank in 0..self.joining.world() {
            match self.store.check(&[&self.key(&format!("-started/{rank}"))]) {
                Ok(true) => {}
                Ok(false) => missing.push(rank),
                Err(error) => return error,
            }
        }
        if !missing.is_empty() {
            return self.joining.timeout(init, missing);
        }
        let during = format!("joining {}", self.joining.group());
        let (name, code) = (status.0.into(), status.1);
        Error::Backend { backend: self.library, during, name, code, text }
    }

    /// Blocks until the communicators of all ranks are ready.
    pub(crate) fn barrier(&self) -> Result<()> {
        let left = self.joining.deadline.saturating_duration_since(Instant::now());
        let wait = Wait { policy: WaitPolicy::Spin, timeout: Some(left.max(TICK)) };
        run_on_host(&**self.host, &BARRIER, RawBufs::NONE, wait)
    }
}
