//! A store whose waits end when somebody gives up.
//!
//! Ranks that join a group wait for one another through the store. If one of them fails at that, the
//! others would wait for it until their timeout; so it says so under a key, and their waits end. They
//! look at that key the less often the more ranks there are: a store has so much time for all of them.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{Store, deadline};
use crate::{Error, Rank, Result};

/// The longest wait without looking whether somebody has given up: this, or more if many look.
const TICK: Duration = Duration::from_millis(20);
/// What each look may take of the store's time, on average.
const TICK_PER_RANK: Duration = Duration::from_micros(250);
/// Bytes of the reason that are told.
const MAX_REASON: usize = 1000;

/// A part of a store's use: the joining of one group, which can be given up.
#[derive(Clone, Debug)]
pub(crate) struct WatchedStore {
    store: Arc<dyn Store>,
    /// What a rank sets to end everybody's waits.
    key: String,
    tick: Duration,
}

impl WatchedStore {
    /// `key` is one that no other attempt has used.
    pub(crate) fn new(store: Arc<dyn Store>, key: String, world_size: usize) -> Self {
        let ranks = u32::try_from(world_size).unwrap_or(u32::MAX);
        Self { store, key, tick: TICK.max(TICK_PER_RANK.saturating_mul(ranks)) }
    }

    /// Ends the waits of the others; the first reason counts. A store that does not answer leaves
    /// them to their timeout.
    pub(crate) fn give_up(&self, rank: Rank, error: &Error) {
        let mut reason = error.to_string();
        reason.truncate(reason.floor_char_boundary(MAX_REASON));
        let note = serde_json::to_vec(&(rank, reason)).expect("a number and a text");
        drop(self.store.compare_set(&self.key, b"", &note));
    }

    fn given_up(&self) -> Result<()> {
        if !self.store.check(&[&self.key])? {
            return Ok(());
        }
        let note = self.store.get(&self.key, TICK)?;
        let (by, reason): (Rank, String) = serde_json::from_slice(&note)
            .map_err(|_| Error::InvalidArgument(format!("{} is garbled", self.key)))?;
        Err(Error::Aborted { by, reason })
    }

    /// Waits for `keys` in slices of a tick, and then does `last` in the time that is left.
    fn in_slices<R>(
        &self,
        keys: &[&str],
        timeout: Duration,
        last: impl FnOnce(Duration) -> Result<R>,
    ) -> Result<R> {
        let (start, deadline) = (Instant::now(), deadline(timeout));
        let left = || deadline.saturating_duration_since(Instant::now());
        while left() > self.tick && !self.store.came_within(keys, self.tick)? {
            self.given_up()?;
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
        self.in_slices(&[key], timeout, |left| self.store.get(key, left))
    }

    fn add(&self, key: &str, delta: i64) -> Result<i64> {
        self.store.add(key, delta)
    }

    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>> {
        self.store.compare_set(key, expected, desired)
    }

    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<()> {
        self.in_slices(keys, timeout, |left| self.store.wait(keys, left))
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
        self.in_slices(keys, timeout, |left| self.store.multi_get(keys, left))
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
    fn the_way_to_the_store_is_that_of_the_store_beneath() {
        let server = crate::TcpStoreServer::bind(([127, 0, 0, 1], 0).into()).unwrap();
        let store = crate::TcpStore::connect("localhost", server.port(), LONG).unwrap();
        let prefix = crate::PrefixStore::new("p", Arc::new(store));
        let watched = WatchedStore::new(Arc::new(prefix), "failed".into(), 2);
        assert!(watched.local_ip().is_some_and(|ip| ip.is_loopback()));
        assert_eq!(MemoryStore::new().local_ip(), None);
    }

    #[test]
    fn a_wait_ends_with_the_key_the_deadline_or_the_first_who_gives_up() {
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
        watched.give_up(3, &Error::InvalidArgument("é".repeat(600)));
        watched.give_up(4, &Error::InvalidArgument("later".into()));
        let error = waiter.join().unwrap();
        let Error::Aborted { by: 3, reason } = &error else { panic!("{error}") };
        assert_eq!(reason, &"é".repeat(500));
        // What is there is still found.
        assert_eq!(watched.get("k", LONG).unwrap(), b"v");
    }
}
