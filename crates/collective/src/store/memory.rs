//! A store within one process.
//!
//! One map under a lock, and a condition variable that every change notifies. Clones share the map:
//! give one to each thread.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use super::values::Values;
use super::{Store, deadline};
use crate::{Error, Result};

/// A store for the threads of one process, and for tests of code that uses a store. A fork of the
/// process gets a copy.
///
/// # Examples
///
/// ```
/// use std::time::Duration;
/// use collective::{MemoryStore, Store};
///
/// let store = MemoryStore::new();
/// let other = store.clone();
/// std::thread::spawn(move || other.set("address", b"127.0.0.1:29500"));
/// assert_eq!(store.get("address", Duration::from_secs(5))?, b"127.0.0.1:29500");
/// # Ok::<(), collective::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct MemoryStore {
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    values: Mutex<Values>,
    changed: Condvar,
}

impl MemoryStore {
    /// Makes an empty store.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Changes the values and wakes every waiter, which then checks its keys.
    fn change<R>(&self, change: impl FnOnce(&mut Values) -> R) -> R {
        let result = change(&mut self.shared.values.lock());
        self.shared.changed.notify_all();
        result
    }
}

impl Store for MemoryStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.change(|values| values.set(key.as_bytes(), value));
        Ok(())
    }

    fn read(&self, keys: &[&str]) -> Result<Vec<Vec<u8>>> {
        let values = self.shared.values.lock();
        let value = |key: &&str| values.get(key.as_bytes()).unwrap_or_default().to_vec();
        Ok(keys.iter().map(value).collect())
    }

    fn add(&self, key: &str, delta: i64) -> Result<i64> {
        self.change(|values| values.add(key.as_bytes(), delta)).ok_or_else(|| Error::Store {
            store: NAME.to_owned(),
            during: format!("add {key:?}"),
            reason: "the stored value does not begin with a number".to_owned(),
        })
    }

    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>> {
        Ok(self.change(|values| values.compare_set(key.as_bytes(), expected, desired).0.to_vec()))
    }

    fn try_wait(&self, keys: &[&str], timeout: Duration) -> Result<bool> {
        let deadline = deadline(timeout);
        let mut values = self.shared.values.lock();
        let (mut missing, mut late) = (keys.to_vec(), false);
        loop {
            missing.retain(|key| !values.contains(key.as_bytes()));
            if missing.is_empty() || late {
                return Ok(missing.is_empty());
            }
            late = self.shared.changed.wait_until(&mut values, deadline).timed_out();
        }
    }

    fn name(&self) -> String {
        NAME.to_owned()
    }

    fn check(&self, keys: &[&str]) -> Result<bool> {
        let values = self.shared.values.lock();
        Ok(keys.iter().all(|key| values.contains(key.as_bytes())))
    }

    fn delete_key(&self, key: &str) -> Result<bool> {
        Ok(self.shared.values.lock().delete(key.as_bytes()))
    }

    fn num_keys(&self) -> Result<i64> {
        Ok(i64::try_from(self.shared.values.lock().len()).expect("a map has fewer than 2^63 keys"))
    }
}

/// The store's name in errors.
const NAME: &str = "memory";
