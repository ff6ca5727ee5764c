//! Ranks that join a group for devices, once they have met on the host.
//!
//! A library's init waits for all ranks, and names nobody. So a rank says in the store that it begins,
//! and whoever waits in vain reads there who has not begun.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{Communicator, DeviceGroup, Manner, run_on_host};
use crate::backend::core::BARRIER;
use crate::backend::meet::{Joining, host};
use crate::backend::{Backend, Patience, RawBufs, Wait};
use crate::store::Store;
use crate::{Error, Rank, Result, Transport};

/// Between two looks at what peers have to do.
const TICK: Duration = Duration::from_millis(1);
/// The longest wait for a key without looking at the host's side.
const SLICE: Duration = Duration::from_millis(20);

/// The number of this rank's device, once all ranks are known to have the library; `asks` says what a
/// group is made for and how that is given.
pub(crate) fn device_of(
    joining: &Joining<'_>,
    (backend, transport): (&'static str, Transport),
    asks: &str,
) -> Result<u32> {
    for (rank, place) in joining.places.iter().enumerate() {
        if let Some(why) = place.lacks(transport) {
            return Err(Error::Unsupported { backend, what: format!("rank {rank}: {why}") });
        }
    }
    let device = joining.places[joining.rank].device(transport);
    device.ok_or_else(|| Error::InvalidArgument(format!("a group over {asks}")))
}

/// Joins a group whose ranks make their communicators with `connect`, once they have met on the host;
/// returns when all have.
pub(crate) fn join<C: Communicator>(
    store: &Arc<dyn Store>,
    joining: &Joining<'_>,
    manner: Manner,
    connect: impl FnOnce(&Meeting<'_>) -> Result<(Arc<C::Device>, C)>,
) -> Result<DeviceGroup<C>> {
    let host = host(joining, manner.reason.clone())?;
    let meeting = Meeting { library: C::BACKEND, store, joining, host: &host };
    let made = connect(&meeting).and_then(|(device, communicator)| {
        DeviceGroup::begin(&meeting, device, communicator, manner)
    });
    // The peers need not wait for this rank.
    made.inspect_err(|error| host.abort(&error.to_string()))
}

/// A rank that joins.
pub(crate) struct Meeting<'a> {
    /// Of the library, in keys.
    pub(crate) library: &'static str,
    pub(crate) store: &'a Arc<dyn Store>,
    pub(crate) joining: &'a Joining<'a>,
    pub(crate) host: &'a Arc<dyn Backend>,
}

impl Meeting<'_> {
    pub(crate) fn key(&self, what: &str) -> String {
        format!("{}/{}{what}", self.joining.options.name, self.library)
    }

    /// Sets a key that [`value`](Self::value) reads.
    pub(crate) fn set(&self, what: &str, value: &[u8]) -> Result<()> {
        self.joining.set(self.key(what), value)
    }

    /// A key that a rank sets; `name` is what it holds.
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

    /// Says that this rank begins the library's init.
    pub(crate) fn enter(&self) -> Result<()> {
        self.set(&format!("-entered/{}", self.joining.rank), b"")
    }

    /// Time is over for `init`: because of the ranks that have not begun, or, as `otherwise` tells, of
    /// the library.
    pub(crate) fn late(&self, init: &str, otherwise: impl FnOnce() -> Error) -> Error {
        let mut missing = Vec::new();
        for rank in 0..self.joining.world() {
            match self.store.check(&[&self.key(&format!("-entered/{rank}"))]) {
                Ok(true) => {}
                Ok(false) => missing.push(rank),
                Err(error) => return error,
            }
        }
        match missing.is_empty() {
            true => otherwise(),
            false => self.joining.timeout(init, missing),
        }
    }

    /// All ranks' communicators are ready, or none's is.
    pub(crate) fn barrier(&self) -> Result<()> {
        let left = self.joining.deadline.saturating_duration_since(Instant::now());
        let wait = Wait { patience: Patience::Caller, timeout: Some(left.max(TICK)) };
        run_on_host(&**self.host, &BARRIER, RawBufs::NONE, wait)
    }
}
