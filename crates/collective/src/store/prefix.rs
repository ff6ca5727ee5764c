//! A view of another store under a prefix.
//!
//! `PrefixStore::new("p", store)` maps the key `k` to `p/k`, as PyTorch's does. With nested
//! prefixes, the one nearest the underlying store comes first in the key.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use super::Store;
use crate::Result;

/// A store whose keys all begin with a prefix, so that groups and attempts share no keys.
///
/// [`num_keys`](Store::num_keys) counts the whole underlying store.
#[derive(Clone, Debug)]
pub struct PrefixStore {
    prefix: String,
    store: Arc<dyn Store>,
}

impl PrefixStore {
    /// Makes a view of the part of `store` under `prefix`.
    #[must_use]
    pub fn new(prefix: impl Into<String>, store: Arc<dyn Store>) -> Self {
        Self { prefix: prefix.into(), store }
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

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        self.store.get(&self.key(key), timeout)
    }

    fn add(&self, key: &str, delta: i64) -> Result<i64> {
        self.store.add(&self.key(key), delta)
    }

    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>> {
        self.store.compare_set(&self.key(key), expected, desired)
    }

    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<()> {
        self.with_keys(keys, |keys| self.store.wait(keys, timeout))
    }

    fn try_wait(&self, keys: &[&str], timeout: Duration) -> Result<bool> {
        self.with_keys(keys, |keys| self.store.try_wait(keys, timeout))
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

    fn multi_get(&self, keys: &[&str], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        self.with_keys(keys, |keys| self.store.multi_get(keys, timeout))
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MemoryStore;

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
