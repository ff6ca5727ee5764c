//! A store whose waits end when a rank fails to join.
//!
//! Ranks that join a group wait for one another through the store. If one of them fails, the others
//! would wait until their timeout. Instead it writes its error under a key that all poll while they
//! wait. The poll interval grows with the number of ranks, which bounds the store's load.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{Store, deadline};
use crate::{Error, Rank, Result};

/// Poll interval of the failure key, for few ranks.
const TICK: Duration = Duration::from_millis(20);
/// The poll interval is at least this much per rank.
const TICK_PER_RANK: Duration = Duration::from_micros(250);
/// Maximum length of the reason, in bytes.
const MAX_REASON: usize = 1000;

/// A view of a store for joining one group, which any rank can abort.
#[derive(Clone, Debug)]
pub(crate) struct WatchedStore {
    store: Arc<dyn Store>,
    /// The key that a failed rank sets to end all waits.
    key: String,
    tick: Duration,
}

impl WatchedStore {
    /// Makes a view of `store`; `key` must not have been used by another attempt.
    pub(crate) fn new(store: Arc<dyn Store>, key: String, world_size: usize) -> Self {
        let ranks = u32::try_from(world_size).unwrap_or(u32::MAX);
        Self { store, key, tick: TICK.max(TICK_PER_RANK.saturating_mul(ranks)) }
    }

    /// Ends the waits of the other ranks, which return the first call's error. If the store does not
    /// answer, they wait until their timeout.
    pub(crate) fn abort(&self, rank: Rank, error: &Error) {
        let mut reason = error.to_string();
        reason.truncate(reason.floor_char_boundary(MAX_REASON));
        let note = serde_json::to_vec(&(rank, reason)).expect("a number and a text");
        drop(self.store.compare_set(&self.key, b"", &note));
    }

    fn check_failed(&self) -> Result<()> {
        if !self.store.check(&[&self.key])? {
            return Ok(());
        }
        let note = self.store.get(&self.key, TICK)?;
        Err(match serde_json::from_slice::<(Rank, String)>(&note) {
            Ok((by, reason)) => Error::Aborted { by, reason },
            Err(_) => {
                Error::MalformedRecord { record: "a rank's failure".into(), key: self.key.clone() }
            }
        })
    }

    /// Waits for `keys`, polling the failure key at every tick, and then runs `last` with the time
    /// left.
    fn poll_then<R>(
        &self,
        keys: &[&str],
        timeout: Duration,
        last: impl FnOnce(Duration) -> Result<R>,
    ) -> Result<R> {
        let (start, deadline) = (Instant::now(), deadline(timeout));
        let left = || deadline.saturating_duration_since(Instant::now());
        while left() > self.tick && !self.store.try_wait(keys, self.tick)? {
            self.check_failed()?;
        }
        last(left()).map_err(|error| match error {
            Error::KeyTimeout { store, keys, .. } => {
                Error::KeyTimeout { store, keys, waited: start.elapsed() }
            }
            other => other,
        })
    }
}

impl Store for WatchedStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.store.set(key, value)
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        self.poll_then(&[key], timeout, |left| self.store.get(key, left))
    }

    fn add(&self, key: &str, delta: i64) -> Result<i64> {
        self.store.add(key, delta)
    }

    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>> {
        self.store.compare_set(key, expected, desired)
    }

    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<()> {
        self.poll_then(keys, timeout, |left| self.store.wait(keys, left))
    }

    fn check(&self, keys: &[&str]) -> Result<bool> {
        self.store.check(keys)
    }

    fn delete_key(&self, key: &str) -> Result<bool> {
        self.store.delete_key(key)
    }

    fn num_keys(&self) -> Result<i64> {
        self.store.num_keys()
    }

    fn multi_get(&self, keys: &[&str], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        self.poll_then(keys, timeout, |left| self.store.multi_get(keys, left))
    }

    fn multi_set(&self, pairs: &[(&str, &[u8])]) -> Result<()> {
        self.store.multi_set(pairs)
    }

    fn local_ip(&self) -> Option<IpAddr> {
        self.store.local_ip()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MemoryStore;

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn local_ip_is_that_of_the_underlying_store() {
        let server = crate::TcpStoreServer::bind(([127, 0, 0, 1], 0).into()).unwrap();
        let store = crate::TcpStore::connect("localhost", server.port(), LONG).unwrap();
        let prefix = crate::PrefixStore::new("p", Arc::new(store));
        let watched = WatchedStore::new(Arc::new(prefix), "failed".into(), 2);
        assert!(watched.local_ip().is_some_and(|ip| ip.is_loopback()));
        assert_eq!(MemoryStore::new().local_ip(), None);
    }

    #[test]
    fn a_wait_ends_with_the_key_the_deadline_or_the_first_failure() {
        let store = MemoryStore::new();
        let watched = WatchedStore::new(Arc::new(store.clone()), "failed".into(), 2);
        store.set("k", b"v").unwrap();
        assert_eq!(watched.get("k", Duration::ZERO).unwrap(), b"v");
        let timeout = Duration::from_millis(70);
        let error = watched.wait(&["k", "missing"], timeout).unwrap_err();
        let Error::KeyTimeout { keys, waited, .. } = &error else { panic!("{error}") };
        assert!(keys == &["missing"] && *waited >= timeout, "{error}");

        let other = watched.clone();
        let waiter = std::thread::spawn(move || other.get("missing", LONG).unwrap_err());
        watched.abort(3, &Error::InvalidArgument("é".repeat(600)));
        watched.abort(4, &Error::InvalidArgument("later".into()));
        let error = waiter.join().unwrap();
        let Error::Aborted { by: 3, reason } = &error else { panic!("{error}") };
        assert_eq!(reason, &"é".repeat(500));
        // Existing keys are still readable.
        assert_eq!(watched.get("k", LONG).unwrap(), b"v");
    }
}
