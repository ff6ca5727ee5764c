//! A view of another store under a prefix.
//!
//! `PrefixStore::new("p", store)` maps the key `k` to `p/k`, as PyTorch's does. With nested
//! prefixes, the one nearest the underlying store comes first in the key.
//!
//! Ranks that join a group wait for one another through the store. If one of them fails, the others
//! would wait until their timeout. Instead it writes its error under a key of a watched view, which
//! all poll while they wait. The poll interval grows with the number of ranks, which bounds the
//! store's load.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{Store, deadline};
use crate::{Error, Rank, Result};

/// A store whose keys all begin with a prefix, so that groups and attempts share no keys.
///
/// [`num_keys`](Store::num_keys) counts the whole underlying store.
#[derive(Clone, Debug)]
pub struct PrefixStore {
    prefix: String,
    store: Arc<dyn Store>,
    /// Interval at which waits poll for another rank's failure; `None` unless the view is watched.
    watch: Option<Duration>,
}

impl PrefixStore {
    /// Makes a view of the part of `store` under `prefix`.
    #[must_use]
    pub fn new(prefix: impl Into<String>, store: Arc<dyn Store>) -> Self {
        Self { prefix: prefix.into(), store, watch: None }
    }

    /// Makes a view for joining one group, whose waits end if one of the ranks
    /// [fails](Self::abort); `prefix` must not have been used by another attempt.
    pub(crate) fn watched(prefix: &str, store: Arc<dyn Store>, world_size: usize) -> Self {
        Self { watch: Some(watch_interval(world_size)), ..Self::new(prefix, store) }
    }

    /// Ends the waits of the other ranks of a watched view, which return the first call's error. If
    /// the store does not answer, they wait until their timeout. Has no effect for a rank that
    /// another has joined as.
    pub(crate) fn abort(&self, rank: Rank, error: &Error) {
        drop(self.publish(rank, error));
    }

    fn publish(&self, rank: Rank, error: &Error) -> Result<()> {
        match error {
            Error::DuplicateRank { .. } => Ok(()),
            _ => publish_failure(self, FAILED, rank, error.to_string()),
        }
    }

    /// [Aborts](Self::abort), unless every rank detects the error itself. Returns the error, or the
    /// failure of another rank that may have caused it.
    pub(crate) fn failed(&self, rank: Rank, error: Error) -> Error {
        let asked = match error {
            Error::Timeout { .. }
            | Error::KeyTimeout { .. }
            | Error::Mismatch { .. }
            | Error::Aborted { .. }
            | Error::Store { .. } => return error,
            // A rank that fails while it joins closes its connections before it publishes why.
            Error::PeerDied { .. } => self.try_wait(&[FAILED], FAILURE_GRACE).map(drop),
            _ => self.publish(rank, &error),
        };
        if matches!(asked, Err(Error::Store { .. } | Error::Rendezvous { .. })) {
            // Rank 0 has ended, and the store with it: it would be waited for.
            return error;
        }
        let is_lost = matches!(error, Error::PeerDied { .. } | Error::Rendezvous { .. });
        match check_failed(self) {
            Err(first @ Error::Aborted { by, .. }) if is_lost && by != rank => first,
            _ => error,
        }
    }

    fn key(&self, key: &str) -> String {
        format!("{}/{key}", self.prefix)
    }

    fn with_keys<R>(&self, keys: &[&str], call: impl FnOnce(&[&str]) -> R) -> R {
        let keys: Vec<_> = keys.iter().map(|key| self.key(key)).collect();
        let keys: Vec<_> = keys.iter().map(String::as_str).collect();
        call(&keys)
    }
}

impl Store for PrefixStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.store.set(&self.key(key), value)
    }

    fn read(&self, keys: &[&str]) -> Result<Vec<Vec<u8>>> {
        self.with_keys(keys, |keys| self.store.read(keys))
    }

    fn add(&self, key: &str, delta: i64) -> Result<i64> {
        self.store.add(&self.key(key), delta)
    }

    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>> {
        self.store.compare_set(&self.key(key), expected, desired)
    }

    /// In a watched view, polls the failure key: first at every tick, later less often.
    fn try_wait(&self, keys: &[&str], timeout: Duration) -> Result<bool> {
        let (deadline, mut tick) = (deadline(timeout), self.watch.unwrap_or(timeout));
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let there = self.with_keys(keys, |keys| self.store.try_wait(keys, left.min(tick)))?;
            if there || left <= tick {
                return Ok(there);
            }
            check_failed(self)?;
            tick = (tick * 2).min(MAX_TICK.max(tick));
        }
    }

    fn name(&self) -> String {
        format!("{} under {}", self.store.name(), self.prefix)
    }

    fn check(&self, keys: &[&str]) -> Result<bool> {
        self.with_keys(keys, |keys| self.store.check(keys))
    }

    fn delete_key(&self, key: &str) -> Result<bool> {
        self.store.delete_key(&self.key(key))
    }

    fn num_keys(&self) -> Result<i64> {
        self.store.num_keys()
    }

    fn multi_set(&self, pairs: &[(&str, &[u8])]) -> Result<()> {
        let keys: Vec<_> = pairs.iter().map(|(key, _)| self.key(key)).collect();
        let pairs: Vec<_> =
            keys.iter().zip(pairs).map(|(key, &(_, value))| (key.as_str(), value)).collect();
        self.store.multi_set(&pairs)
    }

    fn local_ip(&self) -> Option<IpAddr> {
        self.store.local_ip()
    }
}

/// Writes why a rank has failed under `key`, unless another one has failed before.
pub(crate) fn publish_failure(
    store: &dyn Store,
    key: &str,
    rank: Rank,
    mut reason: String,
) -> Result<()> {
    reason.truncate(reason.floor_char_boundary(MAX_REASON));
    let note = serde_json::to_vec(&(rank, reason)).expect("a number and a text");
    store.compare_set(key, b"", &note).map(drop)
}

/// Returns the failure of a rank that has [aborted](PrefixStore::abort) this watched view.
pub(crate) fn check_failed(view: &dyn Store) -> Result<()> {
    if !view.check(&[FAILED])? {
        return Ok(());
    }
    let note = view.read(&[FAILED])?.pop().unwrap_or_default();
    Err(match serde_json::from_slice::<(Rank, String)>(&note) {
        Ok((by, reason)) => Error::Aborted { by, reason },
        Err(_) => {
            let key = format!("{FAILED} of {}", view.name());
            Error::MalformedRecord { record: "a rank's failure".into(), key }
        }
    })
}

/// Returns the interval at which each of `world_size` waiting ranks may poll.
pub(crate) fn watch_interval(world_size: usize) -> Duration {
    let ranks = u32::try_from(world_size).unwrap_or(u32::MAX);
    TICK.max(TICK_PER_RANK.saturating_mul(ranks))
}

/// The key that a failed rank of a watched view sets.
pub(crate) const FAILED: &str = "failed";
/// How long to wait for that key after another rank has closed its connections.
pub(crate) const FAILURE_GRACE: Duration = Duration::from_secs(1);
/// Poll interval of that key, for few ranks.
const TICK: Duration = Duration::from_millis(20);
/// The same after a while.
const MAX_TICK: Duration = Duration::from_secs(1);
/// The poll interval is at least this much per rank.
const TICK_PER_RANK: Duration = Duration::from_micros(250);
/// Maximum length of the reason of a failure, in bytes.
const MAX_REASON: usize = 1000;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MemoryStore;

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn local_ip_is_that_of_the_underlying_store() {
        let server = crate::TcpStoreServer::bind(([127, 0, 0, 1], 0).into()).unwrap();
        let store = crate::TcpStore::connect("localhost", server.port(), LONG).unwrap();
        let prefix = PrefixStore::new("p", Arc::new(store));
        let watched = PrefixStore::watched("w", Arc::new(prefix), 2);
        assert!(watched.local_ip().is_some_and(|ip| ip.is_loopback()));
        assert_eq!(MemoryStore::new().local_ip(), None);
    }

    #[test]
    fn a_failure_does_not_wait_for_a_store_that_has_ended() {
        let invalid = || Error::InvalidArgument("no such device".into());
        let died = || Error::PeerDied { op: "join".into(), rank: 0, pid: 1 };
        for error in [invalid(), died()] {
            let server = crate::TcpStoreServer::bind(([127, 0, 0, 1], 0).into()).unwrap();
            let store = crate::TcpStore::connect("127.0.0.1", server.port(), LONG).unwrap();
            let watched = PrefixStore::watched("w", Arc::new(store), 2);
            watched.set("k", b"v").unwrap();
            drop(server);
            let (text, start) = (error.to_string(), Instant::now());
            assert_eq!(watched.failed(1, error).to_string(), text);
            assert!(start.elapsed() < LONG / 2, "{:?}", start.elapsed());
        }
    }

    #[test]
    fn a_wait_ends_with_the_key_the_deadline_or_the_first_failure() {
        let store = MemoryStore::new();
        let watched = PrefixStore::watched("w", Arc::new(store.clone()), 2);
        store.set("w/k", b"v").unwrap();
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
        assert!(matches!(watched.try_wait(&["missing"], LONG), Err(Error::Aborted { by: 3, .. })));
        assert_eq!(reason, &"é".repeat(500));
        // Existing keys are still readable.
        assert_eq!(watched.get("k", LONG).unwrap(), b"v");
    }

    #[test]
    fn the_prefix_nearest_the_store_comes_first() {
        let base = MemoryStore::new();
        let inner = PrefixStore::new("inner", Arc::new(base.clone()));
        let nested = PrefixStore::new("outer", Arc::new(inner));
        nested.set("k", b"v").unwrap();
        assert!(base.check(&["inner/outer/k"]).unwrap());
        assert!(nested.check(&["k"]).unwrap());
        assert_eq!(nested.num_keys().unwrap(), 1);
    }
}
