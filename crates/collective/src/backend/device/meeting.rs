//! Ranks that join a group for devices, once they have met on the host.
//!
//! A library's init waits for all ranks, and names nobody. So a rank says in the store that it begins,
//! and whoever waits in vain reads there who has not begun.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::run_on_host;
use crate::backend::meet::Joining;
use crate::backend::{Backend, Patience, RawBufs, Wait};
use crate::store::Store;
use crate::{DType, Error, OpDesc, Rank, Result, Verb};

/// Between two looks at what peers have to do.
const TICK: Duration = Duration::from_millis(1);
/// The longest wait for a key without looking at the host's side.
const SLICE: Duration = Duration::from_millis(20);

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

    /// Who has not begun.
    pub(crate) fn absent(&self) -> Result<Vec<Rank>> {
        let mut missing = Vec::new();
        for rank in 0..self.joining.world() {
            if !self.store.check(&[&self.key(&format!("-entered/{rank}"))])? {
                missing.push(rank);
            }
        }
        Ok(missing)
    }

    /// All ranks' communicators are ready, or none's is.
    pub(crate) fn barrier(&self) -> Result<()> {
        let op = OpDesc { verb: Verb::Barrier, dtype: DType::U8, op: None, root: None, count: 0 };
        let left = self.joining.deadline.saturating_duration_since(Instant::now());
        let wait = Wait { patience: Patience::Caller, timeout: Some(left.max(TICK)) };
        run_on_host(&**self.host, &op, RawBufs::NONE, wait)
    }
}
