//! Key-value stores: how ranks find each other before they have a group.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::{Error, Result};

/// A small key-value store that all ranks of a job can reach.
pub trait Store: Send + Sync + std::fmt::Debug {
    /// Stores a value.
    ///
    /// # Errors
    ///
    /// The store cannot be reached.
    fn set(&self, key: &str, value: &[u8]) -> Result<()>;

    /// Returns a value, waiting until there is one.
    ///
    /// # Errors
    ///
    /// The key did not appear in time, or the store cannot be reached.
    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>>;

    /// Adds to a number kept as decimal text, absent counting as 0, and returns the sum.
    ///
    /// # Errors
    ///
    /// The value is not a number, or the store cannot be reached.
    fn add(&self, key: &str, delta: i64) -> Result<i64>;

    /// Stores `desired` if the value is `expected` (or is absent and `expected` is empty), and
    /// returns the value afterwards.
    ///
    /// # Errors
    ///
    /// The store cannot be reached.
    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>>;

    /// Waits until all keys exist.
    ///
    /// # Errors
    ///
    /// They did not all appear in time, or the store cannot be reached.
    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<()>;

    /// Whether all keys exist.
    ///
    /// # Errors
    ///
    /// The store cannot be reached.
    fn check(&self, keys: &[&str]) -> Result<bool>;

    /// Removes a key; whether it was there.
    ///
    /// # Errors
    ///
    /// The store cannot be reached.
    fn delete_key(&self, key: &str) -> Result<bool>;

    /// Number of keys.
    ///
    /// # Errors
    ///
    /// The store cannot be reached.
    fn num_keys(&self) -> Result<i64>;
}

/// A store for the threads of one process.
#[derive(Debug, Default)]
pub struct MemoryStore {
    map: Mutex<HashMap<String, Vec<u8>>>,
    changed: Condvar,
}

impl MemoryStore {
    /// An empty store.
    pub fn new() -> Self {
        Self::default()
    }
}

impl Store for MemoryStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.map.lock().insert(key.to_owned(), value.to_vec());
        self.changed.notify_all();
        Ok(())
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        self.wait(&[key], timeout)?;
        Ok(self.map.lock().get(key).cloned().unwrap_or_default())
    }

    fn add(&self, key: &str, delta: i64) -> Result<i64> {
        let mut map = self.map.lock();
        let old = map.get(key).map(|value| String::from_utf8_lossy(value).parse::<i64>());
        let old = old.transpose().map_err(|_| {
            Error::InvalidArgument(format!("the value of {key} in the store is not a number"))
        })?;
        let sum = old.unwrap_or(0) + delta;
        map.insert(key.to_owned(), sum.to_string().into_bytes());
        self.changed.notify_all();
        Ok(sum)
    }

    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>> {
        let mut map = self.map.lock();
        let old = map.get(key).cloned().unwrap_or_default();
        if old != expected {
            return Ok(old);
        }
        map.insert(key.to_owned(), desired.to_vec());
        self.changed.notify_all();
        Ok(desired.to_vec())
    }

    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<()> {
        let deadline = Instant::now() + timeout;
        let mut map = self.map.lock();
        while !keys.iter().all(|key| map.contains_key(*key)) {
            if self.changed.wait_until(&mut map, deadline).timed_out() {
                return Err(Error::Timeout {
                    op: format!("waiting for {} in the store", keys.join(", ")),
                    waited: timeout,
                    missing: Vec::new(),
                });
            }
        }
        Ok(())
    }

    fn check(&self, keys: &[&str]) -> Result<bool> {
        let map = self.map.lock();
        Ok(keys.iter().all(|key| map.contains_key(*key)))
    }

    fn delete_key(&self, key: &str) -> Result<bool> {
        Ok(self.map.lock().remove(key).is_some())
    }

    fn num_keys(&self) -> Result<i64> {
        let count = self.map.lock().len();
        Ok(i64::try_from(count).expect("a map does not hold 2^63 keys"))
    }
}
