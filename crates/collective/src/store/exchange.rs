//! An all-gather through the store, with a number of requests linear in the number of ranks.
//!
//! Rank 0 waits for all values, reads them in one request, and publishes them under one key; the
//! others wait for that key. If each rank read each value, a thousand ranks would send a million
//! requests.

use std::time::{Duration, Instant};

use super::tcp::codec::put_blob;
use super::{Store, deadline};
use crate::{Error, Rank, Result};

/// Returns the `value` of each rank, in rank order, on every rank.
///
/// Every rank of `0..world_size` must call it, with a `key` that no earlier exchange used. The
/// values, plus 8 bytes for each, may total 8 MiB.
///
/// # Errors
///
/// [`Error::KeyTimeout`] if a rank did not call it within `timeout`: on rank 0 with the missing
/// ranks' keys, `<key>/<rank>`, on the others with rank 0's, `<key>/all`.
/// [`Error::MalformedRecord`] if rank 0 did not publish `world_size` values. Also the errors of
/// [`Store::set`].
///
/// # Examples
///
/// ```
/// use std::time::Duration;
/// use collective::MemoryStore;
/// use collective::store::exchange;
///
/// let store = MemoryStore::new();
/// std::thread::scope(|scope| {
///     for rank in 0..3_u8 {
///         let store = store.clone();
///         scope.spawn(move || {
///             let rank = usize::from(rank);
///             let timeout = Duration::from_secs(5);
///             let all = exchange(&store, "addresses", rank, 3, &[rank as u8; 2], timeout);
///             assert_eq!(all.unwrap(), [[0; 2], [1; 2], [2; 2]]);
///         });
///     }
/// });
/// ```
pub fn exchange(
    store: &dyn Store,
    key: &str,
    rank: Rank,
    world_size: usize,
    value: &[u8],
    timeout: Duration,
) -> Result<Vec<Vec<u8>>> {
    if rank >= world_size {
        let text = format!("exchange {key:?}: rank {rank} is not below {world_size}");
        return Err(Error::InvalidArgument(text));
    }
    let end = deadline(timeout);
    let (own, all) = (format!("{key}/{rank}"), format!("{key}/all"));
    store.set(&own, value)?;
    if rank == 0 {
        let keys: Vec<_> = (0..world_size).map(|rank| format!("{key}/{rank}")).collect();
        let keys: Vec<_> = keys.iter().map(String::as_str).collect();
        let values = store.multi_get(&keys, timeout)?;
        store.set(&all, &join_values(&values))?;
        return Ok(values);
    }
    let joined = store.get(&all, end.saturating_duration_since(Instant::now()))?;
    let values = split_values(&joined).filter(|values| values.len() == world_size);
    let record = format!("rank 0's list of {world_size} values");
    values.ok_or(Error::MalformedRecord { record, key: all })
}

/// Encodes these values for rank 0 to publish.
pub(crate) fn join_values(values: &[Vec<u8>]) -> Vec<u8> {
    let mut joined = Vec::new();
    values.iter().for_each(|value| put_blob(&mut joined, value));
    joined
}

/// Decodes [joined](join_values) values; `None` if they are malformed.
pub(crate) fn split_values(mut joined: &[u8]) -> Option<Vec<Vec<u8>>> {
    let mut values = Vec::new();
    while !joined.is_empty() {
        let (len, rest) = joined.split_first_chunk::<8>()?;
        let len = usize::try_from(u64::from_le_bytes(*len)).ok()?;
        let (value, rest) = rest.split_at_checked(len)?;
        values.push(value.to_vec());
        joined = rest;
    }
    Some(values)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn truncated_values_and_wrong_counts_are_errors() {
        let joined = join_values(&[b"ab".to_vec(), vec![], b"c".to_vec()]);
        assert_eq!(split_values(&joined).unwrap(), [&b"ab"[..], b"", b"c"]);
        assert_eq!(split_values(&joined[..joined.len() - 1]), None);
        assert_eq!(split_values(&u64::MAX.to_le_bytes()), None);
        assert_eq!(split_values(&[]).unwrap(), Vec::<Vec<u8>>::new());
        let store = crate::MemoryStore::new();
        store.set("k/all", &joined).unwrap();
        let read = |world| exchange(&store, "k", 1, world, b"", Duration::ZERO);
        assert_eq!(read(3).unwrap().len(), 3);
        for error in [read(2), read(4)].map(Result::unwrap_err) {
            assert!(
                matches!(&error, Error::MalformedRecord { key, .. } if key == "k/all"),
                "{error}"
            );
        }
    }
}
