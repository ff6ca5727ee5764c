//! Rendezvous of a communicator's ranks: NCCL ids through the store, and an init with a deadline.
//!
//! NCCL's init waits for all ranks without a timeout and does not name a missing one. Here it does not block: a rank
//! records in the store that it has started, then polls the communicator, the host side of the group and the deadline
//! until the communicator is ready. All ranks have joined the host side before, so a missing rank has stopped or died
//! since.

use std::sync::Arc;
use std::time::Instant;

use serde::{Deserialize, Serialize};

use super::communicator::Communicator;
use super::cuda::Device;
use super::result::version_text;
use super::sys::UniqueId;
use super::{Config, Libraries, TICK};
use crate::backend::device::{self, DeviceGroup, GroupConfig, Rendezvous, device_of};
use crate::backend::rendezvous::{Joining, all_gather_records, malformed_record};
use crate::store::Store;
use crate::{Error, Result, Transport};

/// Version and features of a rank's NCCL, exchanged through the store.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Member {
    version: i32,
    split: bool,
    scalable: bool,
}

/// Joins a group. Returns when all ranks have joined.
pub(crate) fn join(
    store: &Arc<dyn Store>,
    joining: &Joining<'_>,
    reason: String,
    libraries: Result<Libraries>,
    config: &Config,
) -> Result<DeviceGroup<Communicator>> {
    let libraries = libraries?;
    let requirement = "NCCL needs a CUDA device: call GroupOptions::with_cuda_device";
    let ordinal = device_of(joining, ("nccl", Transport::Nccl), requirement)?;
    let own = Member {
        version: libraries.version(),
        split: libraries.nccl.ncclCommSplit.is_some(),
        scalable: libraries.nccl.ncclCommInitRankScalable.is_some(),
    };
    let members = all_gather_records(joining, "nccl", &own)?;
    check_versions(&members)?;
    let can_split = members.iter().all(|member| member.split);
    let (timeout, checks) = (joining.options.timeout, config.checks);
    let group = GroupConfig { reason, timeout, checks, can_split };
    device::join(store, joining, group, |rendezvous| {
        connect(rendezvous, libraries, &members, ordinal, config)
    })
}

/// Fails if the ranks have different versions. NCCL checks this too, but does not name a rank.
fn check_versions(members: &[Member]) -> Result<()> {
    let first = &members[0];
    match members.iter().position(|member| member.version != first.version) {
        None => Ok(()),
        Some(rank) => Err(Error::InvalidArgument(format!(
            "rank 0 has NCCL {}, rank {rank} has {}; all ranks need the same",
            version_text(first.version),
            version_text(members[rank].version)
        ))),
    }
}

fn connect(
    rendezvous: &Rendezvous<'_>,
    libraries: Libraries,
    members: &[Member],
    ordinal: u32,
    config: &Config,
) -> Result<(Arc<Device>, Communicator)> {
    let joining = rendezvous.joining;
    let device = Device::open(libraries.cuda, ordinal)?;
    let seed = joining.options.seed();
    if let Some(communicator) = seed.and_then(|seed| seed.take::<Communicator>()) {
        return Ok((device, communicator));
    }
    let mut ids = ids(rendezvous, libraries, members, config)?;
    let (rank, world) = (joining.rank, joining.world());
    rendezvous.mark_started()?;
    let (nccl, on) = (libraries.nccl, Arc::clone(&device));
    let communicator = Communicator::join(nccl, on, (rank, world), &mut ids, config)?;
    while !communicator.ready()? {
        rendezvous.host.health()?;
        if Instant::now() >= joining.deadline {
            let text = "all ranks have started NCCL's init, but it has not completed; set NCCL_DEBUG=INFO to see why";
            let status = ("ncclInProgress", 7);
            return Err(rendezvous.timeout_error("NCCL's init", status, text.into()));
        }
        std::thread::sleep(TICK);
    }
    Ok((device, communicator))
}

/// Returns the group's NCCL ids. The first of the ranks that use an id creates it.
fn ids(
    rendezvous: &Rendezvous<'_>,
    libraries: Libraries,
    members: &[Member],
    config: &Config,
) -> Result<Vec<UniqueId>> {
    let world = members.len();
    let scalable = members.iter().all(|member| member.scalable);
    let count = if scalable { world.div_ceil(config.ranks_per_id().max(1)) } else { 1 };
    let owner = |index: usize| index * world / count;
    let key = |index: usize| format!("-id/{index}");
    for index in (0..count).filter(|&index| owner(index) == rendezvous.joining.rank) {
        rendezvous.set(&key(index), &libraries.unique_id()?)?;
    }
    let read = |index| {
        let bytes = rendezvous.value(&key(index), owner(index), "NCCL's id")?;
        let id = <[u8; 128]>::try_from(bytes);
        id.map(UniqueId).map_err(|_| malformed_record(owner(index), rendezvous.key(&key(index))))
    };
    (0..count).map(read).collect()
}
