//! Key-value stores, through which ranks find one another before a process group exists.
//!
//! A [`Store`] is a small shared map with atomic counters and blocking reads. Three kinds implement
//! it:
//!
//! * [`MemoryStore`], for ranks that are threads of one process, and for tests;
//! * [`TcpStore`], a client of a [`TcpStoreServer`] or of PyTorch's `TCPStore` server;
//! * [`PrefixStore`], a view of another store under a prefix.
//!
//! Invariant: every wait has a deadline, and its error names the store's address and the missing
//! keys.

mod exchange;
mod memory;
mod prefix;
pub mod tcp;
mod values;

use std::fmt::Debug;
use std::net::IpAddr;
use std::time::{Duration, Instant};

pub use self::exchange::exchange;
pub(crate) use self::exchange::{join_values, split_values};
pub use self::memory::MemoryStore;
pub use self::prefix::PrefixStore;
pub(crate) use self::prefix::{
    FAILED, FAILURE_GRACE, check_failed, publish_failure, watch_interval,
};
pub use self::tcp::client::TcpStore;
pub use self::tcp::server::{Endpoint, TcpStoreServer};
use crate::{Error, Result};

/// A map shared by the ranks of a job, with counters and blocking reads.
///
/// All methods may be called from several threads at once: a waiting thread does not block another.
/// An operation takes effect before it returns: any rank notified afterwards sees it.
pub trait Store: Send + Sync + Debug {
    /// Stores `value` under `key`, replacing an earlier value, and wakes the ranks that wait for
    /// `key`.
    ///
    /// # Errors
    ///
    /// [`Store`](crate::Error::Store) if the store cannot be reached, or if key or value exceed its
    /// limits.
    fn set(&self, key: &str, value: &[u8]) -> Result<()>;

    /// Blocks until `key` exists and returns its value.
    ///
    /// Returns an empty value if the key is set and deleted before it is read.
    ///
    /// # Errors
    ///
    /// [`KeyTimeout`](crate::Error::KeyTimeout) if the key was not set within `timeout`, and those
    /// of [`set`](Self::set).
    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        Ok(self.multi_get(&[key], timeout)?.pop().unwrap_or_default())
    }

    /// Adds `delta` to the counter `key`, which starts at 0, and returns the sum. Wraps at the
    /// ends of `i64`. A counter is stored as decimal text, which [`get`](Self::get) returns.
    ///
    /// # Errors
    ///
    /// Same as [`set`](Self::set), and if the stored value does not begin with a number.
    fn add(&self, key: &str, delta: i64) -> Result<i64>;

    /// Stores `desired` if the value of `key` equals `expected`, or if `key` is missing and
    /// `expected` is empty. Returns the value now stored; for a missing key that was expected to
    /// have a value, returns `expected`, as PyTorch's store does.
    ///
    /// # Errors
    ///
    /// Same as [`set`](Self::set).
    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>>;

    /// Blocks until each of `keys` has been set, even if it was deleted afterwards.
    ///
    /// # Errors
    ///
    /// [`KeyTimeout`](crate::Error::KeyTimeout) with the missing keys, and the errors of
    /// [`set`](Self::set).
    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<()> {
        let start = Instant::now();
        if self.try_wait(keys, timeout)? {
            return Ok(());
        }
        let missing =
            missing(&keys[..keys.len().min(MAX_KEYS_NAMED)], &mut |some| self.check(some))?;
        // The last one may have come in the meantime.
        if missing.is_empty() && self.check(keys)? {
            return Ok(());
        }
        let keys = missing.into_iter().map(|index| keys[index].to_owned()).collect();
        Err(Error::KeyTimeout { store: self.name(), keys, waited: start.elapsed() })
    }

    /// Same as [`wait`](Self::wait), but returns whether each of `keys` was set within `timeout`:
    /// for polling, without the cost of finding the missing keys.
    ///
    /// # Errors
    ///
    /// Same as [`set`](Self::set).
    fn try_wait(&self, keys: &[&str], timeout: Duration) -> Result<bool>;

    /// Returns the values that `keys` have now, in the order of `keys`; empty for a missing key.
    /// One request over TCP.
    ///
    /// # Errors
    ///
    /// Same as [`set`](Self::set).
    fn read(&self, keys: &[&str]) -> Result<Vec<Vec<u8>>>;

    /// Returns the store's name for errors: its address, and the prefix of a [`PrefixStore`].
    fn name(&self) -> String;

    /// Returns whether all of `keys` exist now.
    ///
    /// # Errors
    ///
    /// Same as [`set`](Self::set).
    fn check(&self, keys: &[&str]) -> Result<bool>;

    /// Removes `key`; returns whether it existed.
    ///
    /// # Errors
    ///
    /// Same as [`set`](Self::set).
    fn delete_key(&self, key: &str) -> Result<bool>;

    /// Returns the number of keys in the whole store, under any prefix.
    ///
    /// # Errors
    ///
    /// Same as [`set`](Self::set).
    fn num_keys(&self) -> Result<i64>;

    /// Blocks until each of `keys` exists and returns their values, in the order of `keys`. One
    /// request over TCP.
    ///
    /// # Errors
    ///
    /// Same as [`wait`](Self::wait).
    fn multi_get(&self, keys: &[&str], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        self.wait(keys, timeout)?;
        self.read(keys)
    }

    /// Stores several values, each as [`set`](Self::set) does. One request over TCP.
    ///
    /// # Errors
    ///
    /// Same as [`set`](Self::set); after an error some values may have been stored.
    fn multi_set(&self, pairs: &[(&str, &[u8])]) -> Result<()> {
        pairs.iter().try_for_each(|(key, value)| self.set(key, value))
    }

    /// Returns the local address of this machine's connection to the store, at which peers can
    /// reach this machine; `None` if there is no connection, or the store has no address.
    fn local_ip(&self) -> Option<IpAddr> {
        None
    }
}

/// Returns the indices of the keys that do not exist. `check` returns whether all keys of a slice
/// exist; a binary search needs few calls of it if few keys are missing.
pub(crate) fn missing<K, E>(
    keys: &[K],
    check: &mut impl FnMut(&[K]) -> std::result::Result<bool, E>,
) -> std::result::Result<Vec<usize>, E> {
    if keys.is_empty() || check(keys)? {
        return Ok(Vec::new());
    }
    if keys.len() == 1 {
        return Ok(vec![0]);
    }
    let (left, right) = keys.split_at(keys.len() / 2);
    let mut indices = missing(left, check)?;
    indices.extend(missing(right, check)?.into_iter().map(|index| left.len() + index));
    Ok(indices)
}

/// Returns the instant `timeout` from now, at most 100 years, which the clock can represent.
pub(crate) fn deadline(timeout: Duration) -> Instant {
    Instant::now() + timeout.min(FOREVER)
}

/// Maximum number of missing keys that an error names.
const MAX_KEYS_NAMED: usize = 1024;
const FOREVER: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

#[cfg(test)]
pub(crate) mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use proptest::prelude::*;

    use super::*;

    /// A store in which other ranks come first: they write this value before the first
    /// `compare_set`, and every wait ends just before its key arrives.
    #[derive(Debug)]
    pub(crate) struct LateStore(pub(crate) MemoryStore, pub(crate) &'static str);

    impl Store for LateStore {
        fn set(&self, key: &str, value: &[u8]) -> Result<()> {
            self.0.set(key, value)
        }
        fn read(&self, keys: &[&str]) -> Result<Vec<Vec<u8>>> {
            self.0.read(keys)
        }
        fn name(&self) -> String {
            self.0.name()
        }
        fn add(&self, key: &str, delta: i64) -> Result<i64> {
            self.0.add(key, delta)
        }
        fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>> {
            self.0.compare_set(key, b"", self.1.as_bytes())?;
            self.0.compare_set(key, expected, desired)
        }
        fn try_wait(&self, _: &[&str], _: Duration) -> Result<bool> {
            Ok(false)
        }
        fn check(&self, keys: &[&str]) -> Result<bool> {
            self.0.check(keys)
        }
        fn delete_key(&self, key: &str) -> Result<bool> {
            self.0.delete_key(key)
        }
        fn num_keys(&self) -> Result<i64> {
            self.0.num_keys()
        }
    }

    /// Counts its requests, except waits, whose number depends on time.
    #[derive(Debug, Default)]
    pub(crate) struct CountingStore {
        store: MemoryStore,
        requests: AtomicUsize,
    }

    impl CountingStore {
        pub(crate) fn requests(&self) -> usize {
            self.requests.load(Ordering::Relaxed)
        }

        fn count(&self) -> &MemoryStore {
            self.requests.fetch_add(1, Ordering::Relaxed);
            &self.store
        }
    }

    impl Store for CountingStore {
        fn set(&self, key: &str, value: &[u8]) -> Result<()> {
            self.count().set(key, value)
        }
        fn read(&self, keys: &[&str]) -> Result<Vec<Vec<u8>>> {
            self.count().read(keys)
        }
        fn name(&self) -> String {
            self.store.name()
        }
        fn add(&self, key: &str, delta: i64) -> Result<i64> {
            self.count().add(key, delta)
        }
        fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>> {
            self.count().compare_set(key, expected, desired)
        }
        fn try_wait(&self, keys: &[&str], timeout: Duration) -> Result<bool> {
            self.store.try_wait(keys, timeout)
        }
        fn check(&self, keys: &[&str]) -> Result<bool> {
            self.count().check(keys)
        }
        fn delete_key(&self, key: &str) -> Result<bool> {
            self.count().delete_key(key)
        }
        fn num_keys(&self) -> Result<i64> {
            self.count().num_keys()
        }
    }

    #[test]
    fn a_key_that_comes_at_the_last_moment_is_not_missing() {
        let store = LateStore(MemoryStore::new(), "");
        store.set("key", b"1").unwrap();
        assert_eq!(store.get("key", Duration::ZERO).unwrap(), b"1");
        let error = store.wait(&["key", "none"], Duration::ZERO).unwrap_err();
        assert!(matches!(&error, Error::KeyTimeout { keys, .. } if keys == &["none"]), "{error}");
    }

    proptest! {
        #[test]
        fn missing_keys_are_found_with_few_checks(
            there in prop::collection::vec(prop::bool::weighted(0.9), 0..300),
        ) {
            let mut checks = 0;
            let all: std::result::Result<Vec<usize>, ()> = missing(&there, &mut |some: &[bool]| {
                checks += 1;
                Ok(some.iter().all(|&there| there))
            });
            let want: Vec<_> = (0..there.len()).filter(|&at| !there[at]).collect();
            let most = 1 + 2 * want.len() * (there.len().max(1).ilog2() as usize + 1);
            prop_assert!(checks <= most, "{checks} checks for {} of {}", want.len(), there.len());
            prop_assert_eq!(all, Ok(want));
        }
    }
}
