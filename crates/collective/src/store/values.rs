//! The data of a store: values, counters and queues. Does not implement waiting.
//!
//! [`MemoryStore`](super::MemoryStore) and the TCP server's state both use it, so they behave
//! alike. Clients rely on two quirks of PyTorch's store, which are kept: the reply of `compare_set`
//! for a missing key, and counters as text.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

/// Values and queues by key. A non-empty queue counts in [`contains`](Self::contains), and in no
/// other method on keys.
#[derive(Debug, Default)]
pub(super) struct Values {
    /// In an `Arc`, so that replies to thousands of clients share one copy of a value.
    values: HashMap<Vec<u8>, Arc<Vec<u8>>>,
    queues: HashMap<Vec<u8>, VecDeque<Vec<u8>>>,
    /// Approximate memory taken, see [`cost`].
    bytes: usize,
}

impl Values {
    pub(super) fn set(&mut self, key: &[u8], value: &[u8]) {
        let old = self.values.insert(key.to_vec(), Arc::new(value.to_vec()));
        self.bytes += cost(key, value.len());
        self.bytes -= old.map_or(0, |old| cost(key, old.len()));
    }

    #[cfg(test)]
    pub(super) fn set_bytes(&mut self, bytes: usize) {
        self.bytes = bytes;
    }

    /// Returns the approximate memory taken, in bytes.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(super) fn get(&self, key: &[u8]) -> Option<&[u8]> {
        self.values.get(key).map(|value| value.as_slice())
    }

    pub(super) fn get_shared(&self, key: &[u8]) -> Option<&Arc<Vec<u8>>> {
        self.values.get(key)
    }

    /// Returns the sum, or `None` (and no change) if the stored value does not begin with a number.
    pub(super) fn add(&mut self, key: &[u8], delta: i64) -> Option<i64> {
        let old = match self.values.get(key) {
            Some(value) => leading_number(value)?,
            None => 0,
        };
        let sum = old.wrapping_add(delta);
        self.set(key, sum.to_string().as_bytes());
        Some(sum)
    }

    /// Returns the value to reply with, and whether `desired` was stored.
    pub(super) fn compare_set<'a>(
        &'a mut self,
        key: &[u8],
        expected: &'a [u8],
        desired: &'a [u8],
    ) -> (&'a [u8], bool) {
        let stores = match self.values.get(key) {
            Some(value) => **value == expected,
            None => expected.is_empty(),
        };
        if stores {
            self.set(key, desired);
            return (desired, true);
        }
        (self.get(key).unwrap_or(expected), false)
    }

    pub(super) fn append(&mut self, key: &[u8], value: &[u8]) {
        if !self.values.contains_key(key) {
            self.bytes += cost(key, 0);
        }
        self.bytes += value.len();
        let old = self.values.entry(key.to_vec()).or_default();
        Arc::make_mut(old).extend_from_slice(value);
    }

    pub(super) fn delete(&mut self, key: &[u8]) -> bool {
        let old = self.values.remove(key);
        self.bytes -= old.as_ref().map_or(0, |old| cost(key, old.len()));
        old.is_some()
    }

    pub(super) fn len(&self) -> usize {
        self.values.len()
    }

    pub(super) fn keys(&self) -> impl Iterator<Item = &[u8]> {
        self.values.keys().map(Vec::as_slice)
    }

    pub(super) fn contains(&self, key: &[u8]) -> bool {
        self.values.contains_key(key) || self.queue_len(key) > 0
    }

    pub(super) fn queue_push(&mut self, key: &[u8], value: &[u8]) {
        self.queues.entry(key.to_vec()).or_default().push_back(value.to_vec());
        self.bytes += cost(key, value.len());
    }

    pub(super) fn queue_pop(&mut self, key: &[u8]) -> Option<Vec<u8>> {
        let queue = self.queues.get_mut(key)?;
        let value = queue.pop_front();
        self.bytes -= value.as_ref().map_or(0, |value| cost(key, value.len()));
        if queue.is_empty() {
            self.queues.remove(key);
        }
        value
    }

    pub(super) fn queue_len(&self, key: &[u8]) -> usize {
        self.queues.get(key).map_or(0, VecDeque::len)
    }
}

/// Returns the memory taken by a value or a queue element of `len` bytes, with overhead.
pub(super) fn cost(key: &[u8], len: usize) -> usize {
    key.len() + len + 128
}

/// Parses the number at the start of `text` as C's `strtoll` does: white space, a sign, digits.
pub(super) fn leading_number(text: &[u8]) -> Option<i64> {
    let text = text.trim_ascii_start();
    let sign = usize::from(matches!(text.first(), Some(b'-' | b'+')));
    let digits = text[sign..].iter().take_while(|byte| byte.is_ascii_digit()).count();
    if digits == 0 {
        return None;
    }
    std::str::from_utf8(&text[..sign + digits]).ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leading_number_parses_as_strtoll() {
        for (text, number) in [
            ("0", Some(0)),
            ("-2", Some(-2)),
            ("+7", Some(7)),
            (" \t12abc", Some(12)),
            ("9223372036854775807", Some(i64::MAX)),
            ("-9223372036854775808", Some(i64::MIN)),
            ("9223372036854775808", None),
            ("", None),
            ("-", None),
            ("abc", None),
        ] {
            assert_eq!(leading_number(text.as_bytes()), number, "{text:?}");
        }
    }

    #[test]
    fn add_wraps_and_does_not_change_text() {
        let mut values = Values::default();
        assert_eq!(values.add(b"n", i64::MAX), Some(i64::MAX));
        assert_eq!(values.add(b"n", 1), Some(i64::MIN));
        values.set(b"word", b"abc");
        assert_eq!(values.add(b"word", 1), None);
        assert_eq!(values.get(b"word"), Some(&b"abc"[..]));
    }

    #[test]
    fn an_empty_queue_is_removed() {
        let mut values = Values::default();
        values.queue_push(b"q", b"1");
        assert!(values.contains(b"q"));
        assert_eq!(values.len(), 0);
        assert_eq!(values.queue_pop(b"q"), Some(b"1".to_vec()));
        assert!(!values.contains(b"q"));
        assert_eq!(values.queue_pop(b"q"), None);
        assert_eq!(values.bytes(), 0);
    }
}
