//! The functions of `mmengine.dist`, for those who know them.
//!
//! Each takes the group last, as an option: without one the program runs alone, and the functions
//! do what they do for a group of one, which is as a rule nothing. There is no group in the
//! background that `None` could mean; pass the one you have. So code that is written once runs with
//! and without a launcher.
//!
//! All of them that take a group must be called by all of its ranks, in the same order, unless they
//! say that they do not communicate. They block.
//!
//! | `mmengine.dist` | here |
//! |---|---|
//! | `init_dist`, `infer_launcher` | [`init_process_group`](crate::init_process_group); [`Topology::from_env`](crate::Topology::from_env) finds the launcher |
//! | `is_distributed` | [`is_distributed`] |
//! | `get_default_group` | none: a group is a value |
//! | `get_backend`, `get_rank`, `get_world_size`, `get_dist_info` | [`backend`], [`rank`], [`world_size`], [`dist_info`] |
//! | `is_main_process`, `master_only` | [`is_main_process`], [`master_only`] |
//! | `init_local_group`, `get_local_group` | [`local_group`] returns it |
//! | `get_local_rank`, `get_local_size` | [`rank`] and [`world_size`] of the local group, or [`Topology::local_rank`](crate::Topology::local_rank) and `local_world_size` without one |
//! | `barrier` | [`barrier`] |
//! | `all_reduce`, `broadcast`, `all_gather`, `gather` | [`all_reduce`], [`broadcast`], [`all_gather`], [`gather`] |
//! | `all_reduce_dict`, `all_reduce_params` | [`all_reduce_dict`], [`all_reduce_params`] |
//! | `sync_random_seed` | [`sync_random_seed`] |
//! | `broadcast_object_list`, `all_gather_object`, `gather_object` | the same, over serde instead of pickle |
//! | `collect_results`, `collect_results_cpu`, `collect_results_gpu` | [`collect_results`] |
//! | `get_data_device`, `get_comm_device`, `cast_data_device` | none: a slice is where it is, and a backend takes host memory |
//!
//! The operator `mean` is [`ReduceOp::Avg`]: the rank-order sum times `1 / world_size`, in `f32` for
//! 16-bit floats and rounded once. MMEngine divides the rounded sum, so the last bit may differ from
//! it where the world size is no power of two, and a sum that overflows 16 bits is infinite there
//! and not here. It rounds a mean of integers towards zero after a detour through `f32`; here that
//! is refused. In a group of one nothing is checked and nothing done, as there.

mod params;

use std::collections::BTreeMap;
use std::hash::{BuildHasher, DefaultHasher, Hash, Hasher, RandomState};

use serde::Serialize;
use serde::de::DeserializeOwned;

pub use self::params::{Coalesce, Param, all_reduce_params};
use crate::{DType, Element, Error, ProcessGroup, Rank, ReduceOp, Result, Topology, object};

/// Whether there is a group, be it of one rank. Does not communicate.
pub fn is_distributed(group: Option<&ProcessGroup>) -> bool {
    group.is_some()
}

/// The name of the group's backend; `None` without a group. Does not communicate.
#[doc(alias = "get_backend")]
pub fn backend(group: Option<&ProcessGroup>) -> Option<&'static str> {
    group.map(ProcessGroup::backend_name)
}

/// This rank; 0 without a group. Does not communicate.
#[doc(alias = "get_rank")]
#[doc(alias = "get_local_rank")]
pub fn rank(group: Option<&ProcessGroup>) -> Rank {
    group.map_or(0, ProcessGroup::rank)
}

/// Number of ranks; 1 without a group. Does not communicate.
#[doc(alias = "get_world_size")]
#[doc(alias = "get_local_size")]
pub fn world_size(group: Option<&ProcessGroup>) -> usize {
    group.map_or(1, ProcessGroup::world_size)
}

/// This rank and the number of ranks. Does not communicate.
#[doc(alias = "get_dist_info")]
pub fn dist_info(group: Option<&ProcessGroup>) -> (Rank, usize) {
    (rank(group), world_size(group))
}

/// Whether this is rank 0. Does not communicate.
pub fn is_main_process(group: Option<&ProcessGroup>) -> bool {
    rank(group) == 0
}

/// Calls `f` on rank 0, and only there; the others get `None`. Does not communicate, so `f` must
/// not either.
pub fn master_only<R>(group: Option<&ProcessGroup>, f: impl FnOnce() -> R) -> Option<R> {
    is_main_process(group).then(f)
}

/// The group of this host's ranks, in their order.
///
/// The host is the topology's [`node_rank`](Topology::node_rank); where the launcher gives none,
/// ranks whose `rank - local_rank` is the same, which are one host's unless `mpirun` was told to deal
/// them out in turns. One [`split`](ProcessGroup::split).
///
/// # Errors
///
/// Those of [`split`](ProcessGroup::split); [`Error::InvalidArgument`] if the topology is that of
/// another rank than the group's, or its local rank is unknown or not what comes of this.
#[doc(alias = "init_local_group")]
#[doc(alias = "get_local_group")]
pub fn local_group(group: &ProcessGroup, topology: &Topology) -> Result<ProcessGroup> {
    let Topology { rank, world_size, .. } = *topology;
    if (rank, world_size) != (group.rank(), group.world_size()) {
        let (own, world) = (group.rank(), group.world_size());
        return Err(Error::InvalidArgument(format!(
            "local_group: the topology is of rank {rank} of {world_size}, the group of rank {own} \
             of {world}"
        )));
    }
    let (Some(local_rank), Some(local_size)) = (topology.local_rank, topology.local_world_size)
    else {
        let text = "local_group: LOCAL_RANK or LOCAL_WORLD_SIZE is not set; set both, or call \
                    Topology::locate first";
        return Err(Error::InvalidArgument(text.into()));
    };
    let host = u32::try_from(topology.node_rank.unwrap_or(rank - local_rank))
        .map_err(|_| Error::InvalidArgument(format!("local_group: rank {rank} is too great")))?;
    let Some(local) = group.split(Some(host), 0)? else { unreachable!("it gave a colour") };
    let (told, found) = ((local_rank, local_size), (local.rank(), local.world_size()));
    if told != found {
        return Err(Error::InvalidArgument(format!(
            "local_group: the launcher says local rank {} of {}, the ranks' own numbers make it {} \
             of {}: they are not dealt out host by host",
            told.0, told.1, found.0, found.1
        )));
    }
    Ok(local)
}

/// Returns when every rank has called it.
///
/// # Errors
///
/// As [`ProcessGroup::barrier`].
pub fn barrier(group: Option<&ProcessGroup>) -> Result<()> {
    group.map_or(Ok(()), ProcessGroup::barrier)
}

/// Reduces the ranks' buffers, in place; every rank gets the result, with the same bits.
///
/// Alone it does nothing, whatever the operator.
///
/// # Errors
///
/// As [`ProcessGroup::all_reduce`].
pub fn all_reduce<T: Element>(
    data: &mut [T],
    op: ReduceOp,
    group: Option<&ProcessGroup>,
) -> Result<()> {
    several(group).map_or(Ok(()), |group| group.all_reduce(data, op))
}

/// Every rank's numbers, in rank order.
///
/// Every rank must give as many.
///
/// # Errors
///
/// As [`ProcessGroup::all_gather`].
pub fn all_gather<T: Element>(data: &[T], group: Option<&ProcessGroup>) -> Result<Vec<Vec<T>>> {
    let Some(group) = several(group) else { return Ok(vec![data.to_vec()]) };
    let mut all = vec![T::default(); data.len() * group.world_size()];
    group.all_gather(&mut all, data)?;
    let block = |rank| all[rank * data.len()..][..data.len()].to_vec();
    Ok((0..group.world_size()).map(block).collect())
}

/// On the root every rank's numbers, in rank order; elsewhere an empty list.
///
/// Every rank must give as many and the same root. An [`all_gather`]: small enough here, and every
/// backend has it.
///
/// # Errors
///
/// As [`ProcessGroup::all_gather`]; [`Error::InvalidArgument`] if there is no such root.
pub fn gather<T: Element>(
    data: &[T],
    root: Rank,
    group: Option<&ProcessGroup>,
) -> Result<Vec<Vec<T>>> {
    check_root(root, group)?;
    let all = all_gather(data, group)?;
    Ok(if rank(group) == root { all } else { Vec::new() })
}

/// Copies the root's numbers to every rank.
///
/// # Errors
///
/// As [`ProcessGroup::broadcast`].
pub fn broadcast<T: Element>(
    data: &mut [T],
    root: Rank,
    group: Option<&ProcessGroup>,
) -> Result<()> {
    check_root(root, group)?;
    several(group).map_or(Ok(()), |group| group.broadcast(data, root))
}

/// A random number below 2^31, the same on all ranks: rank 0's.
///
/// # Errors
///
/// As [`ProcessGroup::broadcast`].
pub fn sync_random_seed(group: Option<&ProcessGroup>) -> Result<u32> {
    // Keyed by the system's random numbers, differently each time.
    let mut seed = [RandomState::new().hash_one(0) as i32 & i32::MAX];
    broadcast(&mut seed, 0, group)?;
    Ok(seed[0].unsigned_abs())
}

/// Replaces every rank's objects by the root's; every rank must have as many.
///
/// # Errors
///
/// As [`object::broadcast_object_list`].
pub fn broadcast_object_list<T>(
    objects: &mut [T],
    root: Rank,
    group: Option<&ProcessGroup>,
) -> Result<()>
where
    T: Serialize + DeserializeOwned,
{
    check_root(root, group)?;
    several(group).map_or(Ok(()), |group| object::broadcast_object_list(group, objects, root))
}

/// Every rank gets the objects of all ranks, in rank order.
///
/// # Errors
///
/// As [`object::all_gather_object`]. Alone the object is not written, and may be any.
pub fn all_gather_object<T>(object: T, group: Option<&ProcessGroup>) -> Result<Vec<T>>
where
    T: Serialize + DeserializeOwned,
{
    match several(group) {
        Some(group) => object::all_gather_object(group, &object),
        None => Ok(vec![object]),
    }
}

/// The root gets the objects of all ranks, in rank order; the others get `None`.
///
/// # Errors
///
/// As [`object::gather_object`]. Alone the object is not written, and may be any.
pub fn gather_object<T>(
    object: T,
    root: Rank,
    group: Option<&ProcessGroup>,
) -> Result<Option<Vec<T>>>
where
    T: Serialize + DeserializeOwned,
{
    check_root(root, group)?;
    match several(group) {
        Some(group) => object::gather_object(group, &object, root),
        None => Ok(Some(vec![object])),
    }
}

/// Brings the ranks' parts of a data set's results together on rank 0, in the data set's order, and
/// drops what was padded; the others get `None`.
///
/// A sampler deals samples out in turn: rank `r` has samples `r`, `r + n`, `r + 2n`. So the parts
/// are interleaved, a rank with fewer left out once it has no more, and cut to `size`.
///
/// One function where MMEngine has one for a directory that all hosts share and one for the
/// accelerator's memory: objects are small, and the host is where they are. MMEngine also drops
/// every result that is `None`; here a result is a result.
///
/// # Errors
///
/// As [`object::gather_object`].
pub fn collect_results<T>(
    results: Vec<T>,
    size: usize,
    group: Option<&ProcessGroup>,
) -> Result<Option<Vec<T>>>
where
    T: Serialize + DeserializeOwned,
{
    let Some(parts) = gather_object(results, 0, group)? else { return Ok(None) };
    let mut all = Vec::with_capacity(size.min(parts.iter().map(Vec::len).sum()));
    let mut parts: Vec<_> = parts.into_iter().map(Vec::into_iter).collect();
    loop {
        let before = all.len();
        all.extend(parts.iter_mut().filter_map(Iterator::next));
        if all.len() == before || all.len() >= size {
            break;
        }
    }
    all.truncate(size);
    Ok(Some(all))
}

/// A value of a dictionary to be reduced: a number or several.
pub trait DictValue {
    /// Their type.
    type Elem: Element;

    /// The numbers, as many each time.
    fn elements(&mut self) -> &mut [Self::Elem];
}

impl<T: Element> DictValue for T {
    type Elem = T;

    fn elements(&mut self) -> &mut [T] {
        std::slice::from_mut(self)
    }
}

impl<T: Element> DictValue for Vec<T> {
    type Elem = T;

    fn elements(&mut self) -> &mut [T] {
        self
    }
}

/// Reduces all values of a dictionary as one buffer, in the order of their keys.
///
/// Every rank must have the same keys, with as many numbers each, which is compared first: one step
/// of 8 bytes, then one [`all_reduce`]. All values have one type, where MMEngine's are promoted.
///
/// # Errors
///
/// [`Error::InvalidArgument`] on every rank, with `data` unchanged and the group usable, naming the
/// keys that not all ranks have, or of different length; else as [`ProcessGroup::all_reduce`].
///
/// # Examples
///
/// ```
/// use std::collections::BTreeMap;
/// use collective::{ReduceOp, dist};
///
/// let mut losses = BTreeMap::from([("loss_box".to_owned(), 0.5), ("loss_cls".to_owned(), 1.5)]);
/// dist::all_reduce_dict(&mut losses, ReduceOp::Avg, None)?;
/// assert_eq!(losses["loss_cls"], 1.5);
/// # Ok::<(), collective::Error>(())
/// ```
pub fn all_reduce_dict<V: DictValue>(
    data: &mut BTreeMap<String, V>,
    op: ReduceOp,
    group: Option<&ProcessGroup>,
) -> Result<()> {
    let Some(group) = several(group) else { return Ok(()) };
    let shape: Vec<(String, usize)> =
        data.iter_mut().map(|(key, value)| (key.clone(), value.elements().len())).collect();
    agree_on_keys(group, &shape, V::Elem::DTYPE)?;
    let mut values: Vec<_> = data.values_mut().map(DictValue::elements).collect();
    group.all_reduce_coalesced(&mut values, op)
}

/// Compares a short hash, and only if it differs the keys themselves.
fn agree_on_keys(group: &ProcessGroup, own: &[(String, usize)], dtype: DType) -> Result<()> {
    let mut hasher = DefaultHasher::new();
    (own, dtype).hash(&mut hasher);
    let own_hash = hasher.finish();
    let mut hashes = vec![0; group.world_size()];
    group.all_gather(&mut hashes, &[own_hash])?;
    if hashes.iter().all(|&hash| hash == hashes[0]) {
        return Ok(());
    }
    let all = object::all_gather_object(group, &own.to_vec())?;
    let all: Vec<BTreeMap<String, usize>> =
        all.into_iter().map(|shape| shape.into_iter().collect()).collect();
    for (rank, other) in all.iter().enumerate() {
        let differ = |(key, len): &(&String, &usize), from: &BTreeMap<String, usize>| {
            (from.get(*key) != Some(len)).then(|| format!("{key:?} ({len})"))
        };
        let lacks: Vec<_> = all[0].iter().filter_map(|entry| differ(&entry, other)).collect();
        let has: Vec<_> = other.iter().filter_map(|entry| differ(&entry, &all[0])).collect();
        if !lacks.is_empty() || !has.is_empty() {
            let lists = [lacks, has].map(|keys| keys.join(", "));
            return Err(Error::InvalidArgument(format!(
                "all_reduce_dict: the keys differ: rank 0 has [{}] where rank {rank} has [{}]",
                lists[0], lists[1]
            )));
        }
    }
    // Only the types differ, which `all_reduce` reports.
    Ok(())
}

/// The group, if there is somebody to talk to.
fn several(group: Option<&ProcessGroup>) -> Option<&ProcessGroup> {
    group.filter(|group| group.world_size() > 1)
}

fn check_root(root: Rank, group: Option<&ProcessGroup>) -> Result<()> {
    if root < world_size(group) {
        return Ok(());
    }
    let world = world_size(group);
    Err(Error::InvalidArgument(format!("there is no root {root} among {world} ranks")))
}
