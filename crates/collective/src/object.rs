//! Collectives over anything serde can write: small, rare, convenient.
//!
//! Objects travel as JSON: a length first, then the bytes. For numbers in bulk use the verbs of
//! [`ProcessGroup`].

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::{Error, ProcessGroup, Rank, Result};

/// Bytes an object may have as JSON.
pub const MAX_OBJECT_BYTES: usize = 256 << 20;

/// In place of a length: this rank has no object to send.
const NONE: u64 = u64::MAX;

/// Every rank gets the objects of all ranks, in rank order.
///
/// Every rank must call it. Blocks. Two collectives, of 8 bytes and of the longest object's length
/// per rank.
///
/// # Errors
///
/// [`Error::InvalidArgument`], on every rank, if an object cannot be written or is longer than
/// [`MAX_OBJECT_BYTES`], and on the rank concerned if one cannot be read as a `T`; the group stays
/// usable. Else as [`ProcessGroup::all_gather`].
pub fn all_gather_object<T>(group: &ProcessGroup, object: &T) -> Result<Vec<T>>
where
    T: Serialize + DeserializeOwned,
{
    let json = write(object);
    let mut lens = vec![0; group.world_size()];
    group.all_gather(&mut lens, &[announce(&json)])?;
    let mut json = json?;
    let lens: Vec<usize> =
        lens.into_iter().enumerate().map(|(rank, len)| check(rank, len)).collect::<Result<_>>()?;
    let longest = lens.iter().copied().max().unwrap_or(0);
    json.resize(longest, 0);
    let mut all = vec![0; longest * group.world_size()];
    group.all_gather(&mut all, &json)?;
    lens.iter().enumerate().map(|(rank, len)| read(rank, &all[rank * longest..][..*len])).collect()
}

/// Every rank gets the root's object. The root gives `Some`, the others may give `None`.
///
/// Every rank must call it with the same root. Blocks. Two collectives, of 8 bytes and of the
/// object's length.
///
/// # Errors
///
/// [`Error::InvalidArgument`], on every rank, if the root gives none, or one that cannot be written
/// or is longer than [`MAX_OBJECT_BYTES`], and on the rank concerned if it cannot be read as a `T`;
/// the group stays usable. Else as [`ProcessGroup::broadcast`].
#[doc(alias = "broadcast_object_list")]
pub fn broadcast_object<T>(group: &ProcessGroup, object: Option<T>, root: Rank) -> Result<T>
where
    T: Serialize + DeserializeOwned,
{
    let is_root = group.rank() == root;
    let json = match &object {
        Some(object) if is_root => write(object),
        None if is_root => Err(Error::InvalidArgument("the root gives no object".into())),
        _ => Ok(Vec::new()),
    };
    let mut len = [announce(&json)];
    group.broadcast(&mut len, root)?;
    let mut json = json?;
    json.resize(check(root, len[0])?, 0);
    group.broadcast(&mut json, root)?;
    read(root, &json)
}

fn write<T: Serialize>(object: &T) -> Result<Vec<u8>> {
    let json = serde_json::to_vec(object)
        .map_err(|error| Error::InvalidArgument(format!("the object cannot be sent: {error}")))?;
    if json.len() > MAX_OBJECT_BYTES {
        let len = json.len();
        return Err(Error::InvalidArgument(format!(
            "an object of {len} bytes is too long to send"
        )));
    }
    Ok(json)
}

fn announce(json: &Result<Vec<u8>>) -> u64 {
    json.as_ref().map_or(NONE, |json| json.len() as u64)
}

/// A length that came from a peer.
fn check(rank: Rank, len: u64) -> Result<usize> {
    if len == NONE {
        return Err(Error::InvalidArgument(format!("rank {rank} has no object to send")));
    }
    let len = usize::try_from(len).ok().filter(|&len| len <= MAX_OBJECT_BYTES);
    len.ok_or_else(|| Error::InvalidArgument(format!("rank {rank} announces too long an object")))
}

fn read<T: DeserializeOwned>(rank: Rank, json: &[u8]) -> Result<T> {
    serde_json::from_slice(json).map_err(|error| {
        Error::InvalidArgument(format!("the object of rank {rank} cannot be read: {error}"))
    })
}
