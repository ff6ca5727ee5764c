//! Key-value stores: how ranks find one another before a process group exists.
//!
//! A [`Store`] is a small shared map with atomic counters and with waiting for a key that is not
//! there yet. Three kinds implement it:
//!
//! - [`MemoryStore`], for ranks that are threads of one process, and for tests;
//! - [`TcpStore`], a client of a [`TcpStoreServer`] or of PyTorch's `TCPStore` server, whose wire
//!   protocol both speak;
//! - [`PrefixStore`], a part of another store under a prefix of its own.
//!
//! Invariant: every wait has a deadline, and an error names the store's address and the keys that
//! were missing when it passed.

mod exchange;
mod memory;
mod prefix;
pub mod tcp;
mod values;
mod watched;

use std::fmt::Debug;
use std::net::IpAddr;
use std::time::{Duration, Instant};

pub use self::exchange::exchange;
pub(crate) use self::exchange::{join_values, split_values};
pub use self::memory::MemoryStore;
pub use self::prefix::PrefixStore;
pub use self::tcp::client::TcpStore;
pub use self::tcp::server::TcpStoreServer;
pub(crate) use self::watched::WatchedStore;
use crate::{Error, Result};

/// A map shared by the ranks of a job, with counters and with waiting.
///
/// All methods may be called from several threads at once: a thread that waits does not hold up
/// another. An operation that returned has happened: any rank told of it sees its effect.
pub trait Store: Send + Sync + Debug {
    /// Stores `value` under `key`, replacing what was there, and wakes who waits for `key`.
    ///
    /// # Errors
    ///
    /// [`Store`](crate::Error::Store) if the store cannot be reached, or if key or value are
    /// longer than it takes.
    fn set(&self, key: &str, value: &[u8]) -> Result<()>;

    /// Waits until `key` is there and returns its value.
    ///
    /// A key that is deleted between its arrival and the reading of it gives an empty value.
    ///
    /// # Errors
    ///
    /// [`KeyTimeout`](crate::Error::KeyTimeout) if the key did not come within `timeout`, and
    /// those of [`set`](Self::set).
    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>>;

    /// Adds `delta` to the counter `key`, which starts at 0, and returns the sum. Wraps at the
    /// ends of `i64`. A counter is stored as decimal text, which [`get`](Self::get) returns.
    ///
    /// # Errors
    ///
    /// As [`set`](Self::set), and if the value there does not begin with a number.
    fn add(&self, key: &str, delta: i64) -> Result<i64>;

    /// Stores `desired` if the value of `key` equals `expected`, or if `key` is missing and
    /// `expected` is empty. Returns the value now stored; for a missing key that was expected to
    /// have a value, returns `expected`, as PyTorch's store does.
    ///
    /// # Errors
    ///
    /// As [`set`](Self::set).
    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>>;

    /// Waits until each of `keys` has been there; a key deleted after its arrival counts.
    ///
    /// # Errors
    ///
    /// [`KeyTimeout`](crate::Error::KeyTimeout), naming the keys still missing, and those of
    /// [`set`](Self::set).
    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<()>;

    /// Waits as [`wait`](Self::wait), and returns whether each of `keys` has been there within `timeout`:
    /// for who asks again, and need not be told which are missing.
    ///
    /// # Errors
    ///
    /// As [`set`](Self::set).
    fn came_within(&self, keys: &[&str], timeout: Duration) -> Result<bool> {
        match self.wait(keys, timeout) {
            Ok(()) => Ok(true),
            Err(Error::KeyTimeout { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Whether all of `keys` are there now.
    ///
    /// # Errors
    ///
    /// As [`set`](Self::set).
    fn check(&self, keys: &[&str]) -> Result<bool>;

    /// Removes `key`; returns whether it was there.
    ///
    /// # Errors
    ///
    /// As [`set`](Self::set).
    fn delete_key(&self, key: &str) -> Result<bool>;

    /// Number of keys in the whole store, whatever their prefix.
    ///
    /// # Errors
    ///
    /// As [`set`](Self::set).
    fn num_keys(&self) -> Result<i64>;

    /// Waits until each of `keys` is there and returns their values, in the order of `keys`. Over
    /// TCP this is one request.
    ///
    /// # Errors
    ///
    /// As [`wait`](Self::wait).
    fn multi_get(&self, keys: &[&str], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        self.wait(keys, timeout)?;
        keys.iter().map(|key| self.get(key, timeout)).collect()
    }

    /// Stores several values, as [`set`](Self::set) each. Over TCP this is one request.
    ///
    /// # Errors
    ///
    /// As [`set`](Self::set); some may have been stored then.
    fn multi_set(&self, pairs: &[(&str, &[u8])]) -> Result<()> {
        pairs.iter().try_for_each(|(key, value)| self.set(key, value))
    }

    /// The address this machine has on its way to the store, which peers that reach the store
    /// can reach too; `None` if there is no way to go, or the store does not say.
    fn local_ip(&self) -> Option<IpAddr> {
        None
    }
}

/// Places of those of `keys` that are not there, where `check` says of several whether all are: few
/// questions if few are missing.
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
    let mut places = missing(left, check)?;
    places.extend(missing(right, check)?.into_iter().map(|place| left.len() + place));
    Ok(places)
}

/// The moment `timeout` from now; a timeout too long for the clock means about a century.
pub(crate) fn deadline(timeout: Duration) -> Instant {
    Instant::now() + timeout.min(FOREVER)
}

const FOREVER: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn the_missing_are_found_and_few_in_few_questions(
            there in prop::collection::vec(prop::bool::weighted(0.9), 0..300),
        ) {
            let mut asked = 0;
            let all: std::result::Result<Vec<usize>, ()> = missing(&there, &mut |some: &[bool]| {
                asked += 1;
                Ok(some.iter().all(|&there| there))
            });
            let want: Vec<_> = (0..there.len()).filter(|&at| !there[at]).collect();
            let most = 1 + 2 * want.len() * (there.len().max(1).ilog2() as usize + 1);
            prop_assert!(asked <= most, "{asked} questions for {} of {}", want.len(), there.len());
            prop_assert_eq!(all, Ok(want));
        }
    }
}
