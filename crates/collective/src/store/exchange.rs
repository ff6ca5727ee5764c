//! What every rank says, told to every rank, in a number of requests that grows with the ranks and
//! not with their square.
//!
//! Rank 0 waits for all values, reads them in one request, and publishes them as one; the others
//! wait for that. If each read each by itself, a thousand ranks would ask a million times.

use std::time::{Duration, Instant};

use super::tcp::codec::put_blob;
use super::{Store, deadline};
use crate::{Error, Rank, Result};

/// Tells every rank the `value` of each, in the order of ranks.
///
/// Every rank of `0..world_size` must call it, with a `key` that was never used for this before. The
/// values together, and 8 bytes for each, may be 8 MiB long.
///
/// # Errors
///
/// [`Error::KeyTimeout`] if a rank, or rank 0 for the others, did not come within `timeout`; rank 0's
/// names the keys of those missing, `<key>/<rank>`. Those of [`Store::set`].
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
///             let all = exchange(&store, "addresses", rank, 3, &[rank as u8; 2], Duration::from_secs(5));
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
    values.ok_or_else(|| {
        let text = format!("exchange {key:?}: rank 0 published something else");
        Error::InvalidArgument(text)
    })
}

/// What rank 0 publishes of these values.
pub(crate) fn join_values(values: &[Vec<u8>]) -> Vec<u8> {
    let mut joined = Vec::new();
    values.iter().for_each(|value| put_blob(&mut joined, value));
    joined
}

/// The values that rank 0 has [joined](join_values); `None` if it has not.
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
    fn only_as_many_whole_values_are_taken() {
        let joined = join_values(&[b"ab".to_vec(), vec![], b"c".to_vec()]);
        assert_eq!(split_values(&joined).unwrap(), [&b"ab"[..], b"", b"c"]);
        assert_eq!(split_values(&joined[..joined.len() - 1]), None);
        assert_eq!(split_values(&u64::MAX.to_le_bytes()), None);
        assert_eq!(split_values(&[]).unwrap(), Vec::<Vec<u8>>::new());
        let store = crate::MemoryStore::new();
        store.set("k/all", &joined).unwrap();
        let told = |world| exchange(&store, "k", 1, world, b"", Duration::ZERO);
        assert_eq!(told(3).unwrap().len(), 3);
        assert!([told(2), told(4)].iter().all(Result::is_err));
    }
}
