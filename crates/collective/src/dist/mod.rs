//! The functions of `mmengine.dist`.
//!
//! Each takes an optional group as its last argument. Without a group, each function acts as for a
//! group of one rank, which usually means that it does nothing. `None` never means a default group:
//! pass the group you have. So the same code runs with and without a launcher.
//!
//! Functions that take a group must be called by all of its ranks, in the same order, unless their
//! docs say that they do not communicate. They block.
//!
//! | `mmengine.dist` | here |
//! |---|---|
//! | `init_dist`, `infer_launcher` | [`init_process_group`](crate::init_process_group); [`Topology::from_env`](crate::Topology::from_env) finds the launcher |
//! | `is_distributed` | [`is_distributed`] |
//! | `get_default_group` | none: there is no global default group |
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
//! | `get_data_device`, `get_comm_device`, `cast_data_device` | none: these functions take host memory |
//!
//! The operator `mean` is [`ReduceOp::Avg`]: the rank-order sum times `1 / world_size`, in `f32`
//! for 16-bit floats and rounded once. MMEngine divides the rounded sum, so its last bit may differ
//! if the world size is not a power of two, and a sum that overflows 16 bits is infinite there but
//! not here. MMEngine rounds a mean of integers towards zero after a conversion through `f32`; here
//! that is an error. As in MMEngine, a group of one rank does not communicate; the root is still
//! checked.

mod params;

use std::collections::BTreeMap;
use std::hash::{BuildHasher, DefaultHasher, Hash, Hasher, RandomState};

pub use self::params::{Coalesce, Param, all_reduce_params};
use crate::group::object::{self, Object};
use crate::{DType, Element, Error, ProcessGroup, Rank, ReduceOp, Result, Topology};

/// Returns whether there is a group, even of one rank. Does not communicate.
pub fn is_distributed(group: Option<&ProcessGroup>) -> bool {
    group.is_some()
}

/// Returns the name of the group's backend; `None` without a group. Does not communicate.
#[doc(alias = "get_backend")]
pub fn backend(group: Option<&ProcessGroup>) -> Option<&'static str> {
    group.map(ProcessGroup::backend_name)
}

/// Returns this rank; 0 without a group. Does not communicate.
#[doc(alias = "get_rank")]
#[doc(alias = "get_local_rank")]
pub fn rank(group: Option<&ProcessGroup>) -> Rank {
    group.map_or(0, ProcessGroup::rank)
}

/// Returns the number of ranks; 1 without a group. Does not communicate.
#[doc(alias = "get_world_size")]
#[doc(alias = "get_local_size")]
pub fn world_size(group: Option<&ProcessGroup>) -> usize {
    group.map_or(1, ProcessGroup::world_size)
}

/// Returns this rank and the number of ranks. Does not communicate.
#[doc(alias = "get_dist_info")]
pub fn dist_info(group: Option<&ProcessGroup>) -> (Rank, usize) {
    (rank(group), world_size(group))
}

/// Returns whether this is rank 0. Does not communicate.
pub fn is_main_process(group: Option<&ProcessGroup>) -> bool {
    rank(group) == 0
}

/// Calls `f` on rank 0 only; other ranks get `None`. Does not communicate, so `f` must not either.
pub fn master_only<R>(group: Option<&ProcessGroup>, f: impl FnOnce() -> R) -> Option<R> {
    is_main_process(group).then(f)
}

/// Makes the group of this host's ranks, in rank order.
///
/// The host is the topology's [`node_rank`](Topology::node_rank). If the launcher sets none, ranks
/// with the same `rank - local_rank` are taken to share a host, which is wrong if `mpirun`
/// distributes ranks cyclically. Calls [`split`](ProcessGroup::split) once.
///
/// # Errors
///
/// The errors of [`split`](ProcessGroup::split); [`Error::InvalidArgument`] if the topology's rank
/// or world size differ from the group's, or its local rank is unknown or differs from the rank in
/// the new group.
#[doc(alias = "init_local_group")]
#[doc(alias = "get_local_group")]
pub fn local_group(group: &ProcessGroup, topology: &Topology) -> Result<ProcessGroup> {
    let Topology { rank, world_size, .. } = *topology;
    if (rank, world_size) != (group.rank(), group.world_size()) {
        let (own, world) = (group.rank(), group.world_size());
        return Err(Error::InvalidArgument(format!(
            "local_group: the topology is of rank {rank} of {world_size}, but the group's rank is \
             {own} of {world}"
        )));
    }
    let (Some(local_rank), Some(local_size)) = (topology.local_rank, topology.local_world_size)
    else {
        let text = "local_group: LOCAL_RANK or LOCAL_WORLD_SIZE is not set; set both, or call \
                    Topology::locate first";
        return Err(Error::InvalidArgument(text.into()));
    };
    let host = topology.node_rank.or_else(|| rank.checked_sub(local_rank));
    let host = host.and_then(|host| u32::try_from(host).ok()).ok_or_else(|| {
        Error::InvalidArgument(format!(
            "local_group: rank {rank} cannot have the local rank {local_rank} where ranks are \
             consecutive on each host; set GROUP_RANK where they are not"
        ))
    })?;
    let Some(local) = group.split(Some(host), 0)? else { unreachable!("it gave a colour") };
    let (given, found) = ((local_rank, local_size), (local.rank(), local.world_size()));
    if given != found {
        return Err(Error::InvalidArgument(format!(
            "local_group: the launcher's local rank is {} of {}, but by global ranks it is {} of \
             {}; local_group needs ranks that are consecutive on each host",
            given.0, given.1, found.0, found.1
        )));
    }
    Ok(local)
}

/// Blocks until every rank has called it.
///
/// # Errors
///
/// Same as [`ProcessGroup::barrier`].
pub fn barrier(group: Option<&ProcessGroup>) -> Result<()> {
    group.map_or(Ok(()), ProcessGroup::barrier)
}

/// Reduces the ranks' buffers in place; every rank gets the result, with the same bits.
///
/// Without a group it does nothing, whatever the operator.
///
/// # Errors
///
/// Same as [`ProcessGroup::all_reduce`].
pub fn all_reduce<T: Element>(
    data: &mut [T],
    op: ReduceOp,
    group: Option<&ProcessGroup>,
) -> Result<()> {
    several(group).map_or(Ok(()), |group| group.all_reduce(data, op))
}

/// Returns every rank's numbers, in rank order.
///
/// The length must be the same on every rank.
///
/// # Errors
///
/// Same as [`ProcessGroup::all_gather`].
pub fn all_gather<T: Element>(data: &[T], group: Option<&ProcessGroup>) -> Result<Vec<Vec<T>>> {
    let Some(group) = several(group) else { return Ok(vec![data.to_vec()]) };
    let mut all = vec![T::default(); data.len() * group.world_size()];
    group.all_gather(&mut all, data)?;
    let block = |rank| all[rank * data.len()..][..data.len()].to_vec();
    Ok((0..group.world_size()).map(block).collect())
}

/// Returns every rank's numbers, in rank order, on the root; an empty list on other ranks.
///
/// Length and root must be the same on every rank. Implemented as an [`all_gather`], which is fast
/// enough for the small data of these functions.
///
/// # Errors
///
/// Same as [`ProcessGroup::all_gather`]; [`Error::InvalidArgument`] if the root is not a rank of
/// the group.
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
/// Same as [`ProcessGroup::broadcast`].
pub fn broadcast<T: Element>(
    data: &mut [T],
    root: Rank,
    group: Option<&ProcessGroup>,
) -> Result<()> {
    check_root(root, group)?;
    several(group).map_or(Ok(()), |group| group.broadcast(data, root))
}

/// Returns rank 0's random number below 2^31 on all ranks.
///
/// # Errors
///
/// Same as [`ProcessGroup::broadcast`].
pub fn sync_random_seed(group: Option<&ProcessGroup>) -> Result<u32> {
    // `RandomState` has fresh random keys from the system.
    let mut seed = [RandomState::new().hash_one(0) as i32 & i32::MAX];
    broadcast(&mut seed, 0, group)?;
    Ok(seed[0].unsigned_abs())
}

/// Replaces every rank's objects by the root's; every rank must have the same number.
///
/// # Errors
///
/// Same as [`object::broadcast_object_list`].
pub fn broadcast_object_list<T: Object>(
    objects: &mut [T],
    root: Rank,
    group: Option<&ProcessGroup>,
) -> Result<()> {
    check_root(root, group)?;
    several(group).map_or(Ok(()), |group| object::broadcast_object_list(group, objects, root))
}

/// Returns the objects of all ranks, in rank order, on every rank.
///
/// # Errors
///
/// Same as [`object::all_gather_object`]. Without a group the object is not serialized, so any is
/// valid.
pub fn all_gather_object<T: Object>(object: T, group: Option<&ProcessGroup>) -> Result<Vec<T>> {
    match several(group) {
        Some(group) => object::all_gather_object(group, &object),
        None => Ok(vec![object]),
    }
}

/// Returns the objects of all ranks, in rank order, on the root; `None` on other ranks.
///
/// # Errors
///
/// Same as [`object::gather_object`]. Without a group the object is not serialized, so any is
/// valid.
pub fn gather_object<T: Object>(
    object: T,
    root: Rank,
    group: Option<&ProcessGroup>,
) -> Result<Option<Vec<T>>> {
    check_root(root, group)?;
    match several(group) {
        Some(group) => object::gather_object(group, &object, root),
        None => Ok(Some(vec![object])),
    }
}

/// Gathers the ranks' parts of a data set's results on rank 0, in the data set's order, and drops
/// the padding; other ranks get `None`.
///
/// A sampler distributes samples cyclically: rank `r` has samples `r`, `r + n`, `r + 2n`. So the
/// parts are interleaved, skipping ranks that have no more, and cut to `size`.
///
/// MMEngine has one function for a directory shared by all hosts and one for device memory; here
/// one suffices, because objects are small and in host memory. MMEngine also drops results that are
/// `None`; here every result is kept.
///
/// # Errors
///
/// Same as [`object::gather_object`].
pub fn collect_results<T: Object>(
    results: Vec<T>,
    size: usize,
    group: Option<&ProcessGroup>,
) -> Result<Option<Vec<T>>> {
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

/// A value of a dictionary that [`all_reduce_dict`] reduces: one or more numbers.
pub trait DictValue {
    /// The element type.
    type Elem: Element;

    /// Returns the numbers; the length must be the same each time.
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
/// Every rank must have the same keys with the same lengths, which are compared first: an
/// all-gather of 8 bytes, then one [`all_reduce`]. All values have one type; MMEngine promotes
/// types.
///
/// # Errors
///
/// [`Error::InvalidArgument`] on every rank, with `data` unchanged and the group usable, with the
/// keys that differ between ranks in presence or length; else as [`ProcessGroup::all_reduce`].
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

/// Compares hashes of the keys, and the keys themselves only if the hashes differ.
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

/// Returns the group if it has more than one rank.
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
