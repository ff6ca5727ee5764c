//! How the ranks of a communicator meet: ids through our store, and an init that can be waited for.
//!
//! NCCL's init waits for all ranks without end and names nobody. Here it never blocks: a rank says in
//! the store that it begins, and looks at the communicator, at the host's side of the group and at
//! the clock until the communicator is ready. By the time a rank gets here all ranks have met on the
//! host, so one that is missing has stopped or died since.

use std::sync::Arc;
use std::time::Instant;

use serde::{Deserialize, Serialize};

use super::communicator::Communicator;
use super::cuda::Device;
use super::result::version_text;
use super::sys::UniqueId;
use super::{Config, Libraries, TICK};
use crate::backend::device::{self, DeviceGroup, Manner, Meeting, device_of};
use crate::backend::meet::{Joining, garbled, tell_all};
use crate::store::Store;
use crate::{Error, Result, Transport};

/// What a rank says of its NCCL in the store.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Member {
    version: i32,
    split: bool,
    scalable: bool,
}

/// Joins a group; returns when all ranks have.
pub(crate) fn join(
    store: &Arc<dyn Store>,
    joining: &Joining<'_>,
    reason: String,
    libraries: Result<Libraries>,
    config: &Config,
) -> Result<DeviceGroup<Communicator>> {
    let libraries = libraries?;
    let asks = "NCCL is made for a CUDA device: GroupOptions::with_cuda_device";
    let ordinal = device_of(joining, ("nccl", Transport::Nccl), asks)?;
    let own = Member {
        version: libraries.version(),
        split: libraries.nccl.split.is_some(),
        scalable: libraries.nccl.init_scalable.is_some(),
    };
    let members = tell_all(joining, "nccl", &own)?;
    check_versions(&members)?;
    let can_split = members.iter().all(|member| member.split);
    let (timeout, checks) = (joining.options.timeout, config.checks);
    let manner = Manner { reason, timeout, checks, can_split };
    device::join(store, joining, manner, |meeting| {
        connect(meeting, libraries, &members, ordinal, config)
    })
}

/// NCCL refuses to talk to another version of itself, in words that name nobody.
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
    meeting: &Meeting<'_>,
    libraries: Libraries,
    members: &[Member],
    ordinal: u32,
    config: &Config,
) -> Result<(Arc<Device>, Communicator)> {
    let joining = meeting.joining;
    let device = Device::open(libraries.cuda, ordinal)?;
    let seed = joining.options.seed();
    if let Some(communicator) = seed.and_then(|seed| seed.take::<Communicator>()) {
        return Ok((device, communicator));
    }
    let mut ids = ids(meeting, libraries, members, config)?;
    let (rank, world) = (joining.rank, joining.world());
    meeting.enter()?;
    let (nccl, on) = (libraries.nccl, Arc::clone(&device));
    let communicator = Communicator::join(nccl, on, (rank, world), &mut ids, config)?;
    while !communicator.ready()? {
        meeting.host.health()?;
        if Instant::now() >= joining.deadline {
            return Err(late(meeting));
        }
        std::thread::sleep(TICK);
    }
    Ok((device, communicator))
}

/// The ids, each made by the first of the ranks that it is for.
fn ids(
    meeting: &Meeting<'_>,
    libraries: Libraries,
    members: &[Member],
    config: &Config,
) -> Result<Vec<UniqueId>> {
    let world = members.len();
    let scalable = members.iter().all(|member| member.scalable);
    let count = if scalable { world.div_ceil(config.ranks_per_id.max(1)) } else { 1 };
    let owner = |index: usize| index * world / count;
    let key = |index: usize| format!("-id/{index}");
    for index in (0..count).filter(|&index| owner(index) == meeting.joining.rank) {
        meeting.set(&key(index), &libraries.nccl.unique_id()?.0)?;
    }
    let read = |index| {
        let bytes = meeting.value(&key(index), owner(index), "NCCL's id")?;
        let id = <[u8; 128]>::try_from(bytes);
        id.map(UniqueId).map_err(|_| garbled(owner(index)))
    };
    (0..count).map(read).collect()
}

/// Time is over.
fn late(meeting: &Meeting<'_>) -> Error {
    meeting.late("NCCL's init", || Error::Backend {
        backend: "nccl",
        during: format!("joining {}", meeting.joining.group()),
        name: "ncclInProgress".into(),
        code: 7,
        text: "all ranks have begun, and NCCL's init is not over; its NCCL_DEBUG=INFO may tell why"
            .into(),
    })
}
