//! Collectives on serde types, for small and infrequent objects.
//!
//! Objects are sent as JSON: a length first, then the bytes. For large arrays of numbers use the
//! verbs of [`ProcessGroup`].

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::{Error, ProcessGroup, Rank, Result};

/// Maximum length of an object as JSON, in bytes.
pub const MAX_OBJECT_BYTES: usize = 256 << 20;

/// A value that ranks can exchange: any owned serde type.
pub trait Object: Serialize + DeserializeOwned {}

impl<T: Serialize + DeserializeOwned> Object for T {}

/// Sent instead of a length: this rank has no object to send.
const NONE: u64 = u64::MAX;

/// Returns the objects of all ranks, in rank order, on every rank.
///
/// Every rank must call it. Blocks. Two collectives: of 8 bytes, and of the longest object's length
/// per rank.
///
/// # Errors
///
/// [`Error::InvalidArgument`], on every rank, if an object cannot be serialized or is longer than
/// [`MAX_OBJECT_BYTES`], and on the receiving rank if one cannot be deserialized as a `T`; the
/// group stays usable. Else as [`ProcessGroup::all_gather`].
pub fn all_gather_object<T: Object>(group: &ProcessGroup, object: &T) -> Result<Vec<T>> {
    let all = all_gather_json(group, write(object))?;
    all.iter().enumerate().map(|(rank, json)| read(rank, json)).collect()
}

/// Returns the objects of all ranks, in rank order, on the root; `None` on the other ranks.
///
/// Every rank must call it with the same root. Blocks. An all-gather of 8 bytes, then a
/// [`gather_v`](ProcessGroup::gather_v) of the objects.
///
/// # Errors
///
/// Same as [`all_gather_object`], and [`Error::InvalidArgument`] if the root is not a rank of the
/// group.
pub fn gather_object<T: Object>(
    group: &ProcessGroup,
    object: &T,
    root: Rank,
) -> Result<Option<Vec<T>>> {
    if root >= group.world_size() {
        return Err(Error::InvalidArgument(format!(
            "gather_object: root {root} is not below world size {}",
            group.world_size()
        )));
    }
    let (json, lens) = all_gather_lens(group, write(object))?;
    if group.rank() != root {
        group.gather_v(&mut [], &json, &[], root)?;
        return Ok(None);
    }
    let mut all = vec![0; lens.iter().sum()];
    group.gather_v(&mut all, &json, &lens, root)?;
    let mut rest = &all[..];
    let object = |(rank, &len)| {
        let own;
        (own, rest) = rest.split_at(len);
        read(rank, own)
    };
    lens.iter().enumerate().map(object).collect::<Result<_>>().map(Some)
}

/// Returns element `r` of the root's list, one object per rank, on rank `r`. The root
/// passes `Some`, the others may pass `None`.
///
/// Every rank must call it with the same root. Blocks. A [`scatter`](ProcessGroup::scatter) of 8
/// bytes, then a [`scatter_v`](ProcessGroup::scatter_v) of the objects.
///
/// # Errors
///
/// [`Error::InvalidArgument`] if the root is not a rank of the group; on every rank, if the root
/// passes no list, one whose length is not the world size, or an object that cannot be serialized
/// or is longer than [`MAX_OBJECT_BYTES`]; and on the receiving rank if its object cannot be
/// deserialized as a `T`. The group stays usable. Else as [`ProcessGroup::scatter_v`].
#[doc(alias = "scatter_object_list")]
pub fn scatter_object<T: Object>(
    group: &ProcessGroup,
    objects: Option<&[T]>,
    root: Rank,
) -> Result<T> {
    let world = group.world_size();
    let json: Result<Vec<_>> = match objects {
        _ if group.rank() != root => Ok(Vec::new()),
        Some(objects) if objects.len() == world => objects.iter().map(write).collect(),
        _ => {
            let given = objects.map_or(0, <[T]>::len);
            let text = format!("scatter_object: the root passed {given} objects for {world} ranks");
            Err(Error::InvalidArgument(text))
        }
    };
    let none = |_: &Error| vec![NONE; world];
    let len = |json: &Vec<u8>| json.len() as u64;
    let lens = json.as_ref().map_or_else(none, |json| json.iter().map(len).collect());
    let mut own = [0];
    group.scatter(&mut own, &lens, root)?;
    let json = json?;
    let mut own = vec![0; check(root, own[0])?];
    let lens: Vec<usize> = json.iter().map(Vec::len).collect();
    group.scatter_v(&mut own, &json.concat(), &lens, root)?;
    read(root, &own)
}

/// Sends an object to rank `to`, which must [`recv_object`] it. Only these two take part. Two
/// messages: of 8 bytes, and of the object's length.
///
/// # Errors
///
/// [`Error::InvalidArgument`], on the receiver too, if the object cannot be serialized or is longer
/// than [`MAX_OBJECT_BYTES`]; the group stays usable. Else as [`ProcessGroup::send`].
#[doc(alias = "send_object_list")]
pub fn send_object<T: Serialize>(group: &ProcessGroup, object: &T, to: Rank) -> Result<()> {
    let json = write(object);
    group.send(&[len_or_none(&json)], to)?;
    group.send(&json?, to)
}

/// Receives an object that rank `from` sends with [`send_object`]. Only these two take part.
///
/// # Errors
///
/// [`Error::InvalidArgument`] if the sender's object could not be sent, or cannot be deserialized
/// as a `T`; the group stays usable. Else as [`ProcessGroup::recv`].
#[doc(alias = "recv_object_list")]
pub fn recv_object<T: DeserializeOwned>(group: &ProcessGroup, from: Rank) -> Result<T> {
    let mut len = [0];
    group.recv(&mut len, from)?;
    let mut json = vec![0; check(from, len[0])?];
    group.recv(&mut json, from)?;
    read(from, &json)
}

/// Returns the root's object on every rank. The root passes `Some`, the others may pass `None`.
///
/// Every rank must call it with the same root. Blocks. Two collectives: of 8 bytes, and of the
/// object's length.
///
/// # Errors
///
/// [`Error::InvalidArgument`], on every rank, if the root passes none, or one that cannot be
/// serialized or is longer than [`MAX_OBJECT_BYTES`], and on the receiving rank if it cannot be
/// deserialized as a `T`; the group stays usable. Else as [`ProcessGroup::broadcast`].
pub fn broadcast_object<T: Object>(
    group: &ProcessGroup,
    object: Option<T>,
    root: Rank,
) -> Result<T> {
    let json = match &object {
        _ if group.rank() != root => Ok(Vec::new()),
        Some(object) => write(object),
        None => Err(Error::InvalidArgument("broadcast_object: the root passed no object".into())),
    };
    read(root, &broadcast_json(group, json, root)?)
}

/// Replaces the objects of every other rank by the root's. A rank whose list has another length
/// keeps its objects and gets an error.
///
/// Every rank must call it with the same root. Blocks. Two collectives: of 8 bytes, and of the
/// objects' length.
///
/// # Errors
///
/// Same as [`broadcast_object`].
pub fn broadcast_object_list<T: Object>(
    group: &ProcessGroup,
    objects: &mut [T],
    root: Rank,
) -> Result<()> {
    let is_root = group.rank() == root;
    let json = if is_root { write(&objects) } else { Ok(Vec::new()) };
    let json = broadcast_json(group, json, root)?;
    if is_root {
        return Ok(());
    }
    let list: Vec<T> = read(root, &json)?;
    if list.len() != objects.len() {
        let (sent, own) = (list.len(), objects.len());
        let text = format!("rank {root} sends a list of {sent} objects, this rank has {own}");
        return Err(Error::InvalidArgument(text));
    }
    objects.iter_mut().zip(list).for_each(|(own, object)| *own = object);
    Ok(())
}

/// Returns every rank's JSON, or an error on all ranks if one has none.
fn all_gather_json(group: &ProcessGroup, json: Result<Vec<u8>>) -> Result<Vec<Vec<u8>>> {
    let (mut json, lens) = all_gather_lens(group, json)?;
    let longest = lens.iter().copied().max().unwrap_or(0);
    json.resize(longest, 0);
    let mut all = vec![0; longest * group.world_size()];
    group.all_gather(&mut all, &json)?;
    let block = |(rank, len): (Rank, &usize)| all[rank * longest..][..*len].to_vec();
    Ok(lens.iter().enumerate().map(block).collect())
}

/// Returns this rank's JSON and the lengths of all ranks', or an error on all ranks if one has
/// none.
fn all_gather_lens(group: &ProcessGroup, json: Result<Vec<u8>>) -> Result<(Vec<u8>, Vec<usize>)> {
    let mut lens = vec![0; group.world_size()];
    group.all_gather(&mut lens, &[len_or_none(&json)])?;
    let lens = lens.into_iter().enumerate().map(|(rank, len)| check(rank, len));
    Ok((json?, lens.collect::<Result<_>>()?))
}

/// Returns the root's JSON, or an error on all ranks if it has none.
fn broadcast_json(group: &ProcessGroup, json: Result<Vec<u8>>, root: Rank) -> Result<Vec<u8>> {
    let mut len = [len_or_none(&json)];
    group.broadcast(&mut len, root)?;
    let mut json = json?;
    json.resize(check(root, len[0])?, 0);
    group.broadcast(&mut json, root)?;
    Ok(json)
}

fn write<T: Serialize>(object: &T) -> Result<Vec<u8>> {
    let json = serde_json::to_vec(object)
        .map_err(|error| Error::InvalidArgument(format!("cannot serialize the object: {error}")))?;
    if json.len() > MAX_OBJECT_BYTES {
        return Err(too_long("the object", json.len() as u64));
    }
    Ok(json)
}

fn len_or_none(json: &Result<Vec<u8>>) -> u64 {
    json.as_ref().map_or(NONE, |json| json.len() as u64)
}

/// Checks a length received from a peer.
fn check(rank: Rank, len: u64) -> Result<usize> {
    if len == NONE {
        return Err(Error::InvalidArgument(format!("rank {rank} has no object to send")));
    }
    let valid = usize::try_from(len).ok().filter(|&len| len <= MAX_OBJECT_BYTES);
    valid.ok_or_else(|| too_long(&format!("the object of rank {rank}"), len))
}

fn too_long(what: &str, len: u64) -> Error {
    Error::InvalidArgument(format!("{what} has {len} bytes, the limit is {MAX_OBJECT_BYTES}"))
}

fn read<T: DeserializeOwned>(rank: Rank, json: &[u8]) -> Result<T> {
    serde_json::from_slice(json).map_err(|error| {
        Error::InvalidArgument(format!("the object of rank {rank} cannot be read: {error}"))
    })
}
