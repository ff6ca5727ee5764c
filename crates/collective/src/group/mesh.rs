//! Named dimensions over a flat group, as `torch.distributed.device_mesh`: one group per dimension.

use std::ops::Index;

use super::object::all_gather_object;
use crate::{Error, ProcessGroup, Result};

/// The ranks of a group as a grid with named dimensions, in row-major order: neighbours along the
/// last dimension are neighbours in the group.
///
/// For each dimension this rank has the group of the ranks whose other coordinates equal its own;
/// its rank in that group is its coordinate.
///
/// # Examples
///
/// ```
/// # use std::time::Duration;
/// use collective::{DeviceMesh, ProcessGroup, ReduceOp};
///
/// let groups = ProcessGroup::threads(4, Duration::from_secs(10))?;
/// std::thread::scope(|scope| {
///     for group in groups {
///         scope.spawn(move || {
///             let dims = [("dp", 2), ("tp", 2)];
///             let mesh = DeviceMesh::new(&group, &dims).expect("all are here");
///             let mut x = [group.rank()].map(|rank| rank as f32);
///             mesh["tp"].all_reduce(&mut x, ReduceOp::Sum).expect("both are here");
///             assert_eq!(x, [if mesh["dp"].rank() == 0 { 1.0 } else { 5.0 }]);
///         });
///     }
/// });
/// # Ok::<(), collective::Error>(())
/// ```
#[doc(alias = "init_device_mesh")]
#[derive(Clone, Debug)]
pub struct DeviceMesh {
    dims: Vec<(String, ProcessGroup)>,
}

impl DeviceMesh {
    /// Makes a mesh of `dims`, names and sizes, whose product is the group's world size.
    ///
    /// Every rank of the group must call it with the same `dims`, which are compared first with two
    /// collectives. Blocks. Then it calls [`split`](ProcessGroup::split) once per dimension. The
    /// new groups are independent of `group` and have their own connections: over TCP, two to each
    /// peer in each group. With 2 x 4 ranks each rank has 8 of these, in addition to the 14 of
    /// `group`. Within a machine each group has a segment of shared memory.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`], before anything is sent, if the product of the sizes is not the
    /// world size, or a name is empty or duplicate; and on every rank, if the ranks give different
    /// `dims`. Else as [`ProcessGroup::split`].
    pub fn new(group: &ProcessGroup, dims: &[(&str, usize)]) -> Result<Self> {
        let (rank, world) = (group.rank(), group.world_size());
        check(dims, world)?;
        group.origin("a mesh")?;
        let own: Vec<(String, usize)> =
            dims.iter().map(|&(name, size)| (name.to_owned(), size)).collect();
        let all = all_gather_object(group, &own)?;
        if let Some(other) = all.iter().position(|dims| *dims != all[0]) {
            let (first, dims) = (&all[0], &all[other]);
            return refuse(format!("rank 0 gives the dimensions {first:?}, rank {other} {dims:?}"));
        }
        let mut stride = world;
        let part = |(name, size): (String, usize)| {
            stride /= size;
            // The first rank of this rank's line along this dimension is the colour.
            let first = rank - rank / stride % size * stride;
            let Some(part) = group.split(Some(first as u32), 0)? else {
                unreachable!("a rank that gives a colour has a group")
            };
            Ok((name, part))
        };
        Ok(Self { dims: own.into_iter().map(part).collect::<Result<_>>()? })
    }

    /// Returns this rank's group along a dimension; `None` if there is no such name. `mesh["tp"]`
    /// returns the same, and panics if there is none.
    pub fn get(&self, name: &str) -> Option<&ProcessGroup> {
        self.dims.iter().find(|dim| dim.0 == name).map(|dim| &dim.1)
    }

    /// Returns the dimensions' names and this rank's groups along them, in order.
    pub fn dims(&self) -> impl Iterator<Item = (&str, &ProcessGroup)> {
        self.dims.iter().map(|(name, group)| (&**name, group))
    }
}

impl Index<&str> for DeviceMesh {
    type Output = ProcessGroup;

    /// Returns this rank's group along a dimension.
    ///
    /// # Panics
    ///
    /// If the mesh has no dimension of this name.
    fn index(&self, name: &str) -> &ProcessGroup {
        self.get(name).unwrap_or_else(|| panic!("the mesh has no dimension {name:?}"))
    }
}

fn check(dims: &[(&str, usize)], world: usize) -> Result<()> {
    let ranks = dims.iter().try_fold(1_usize, |ranks, dim| ranks.checked_mul(dim.1));
    if ranks != Some(world) {
        return refuse(format!("{dims:?} do not multiply to the group's {world} ranks"));
    }
    let wrong = |&(at, &(name, _)): &(usize, &(&str, usize))| {
        name.is_empty() || dims[..at].iter().any(|dim| dim.0 == name)
    };
    dims.iter().enumerate().find(wrong).map_or(Ok(()), |(_, (name, _))| {
        refuse(format!("dimension name {name:?} is empty or duplicate"))
    })
}

fn refuse<T>(text: String) -> Result<T> {
    Err(Error::InvalidArgument(format!("DeviceMesh: {text}")))
}
