//! Rendezvous of a communicator's ranks: NCCL ids over the host side, and an init with a deadline.
//!
//! NCCL's init waits for all ranks without a timeout and does not name a missing one. Here it does
//! not block: once all ranks are ready for it, a rank starts it, then polls the communicator, the
//! host side of the group and the deadline until the communicator is ready. Then the ranks run a
//! first all-reduce, which has a short timeout: GPUs that cannot reach one another are found before
//! a training's first step, which has the group's timeout, because ranks may be late for it.
//!
//! All ranks have the same version of NCCL, so the same optional functions.

#![expect(unsafe_code, reason = "runs an operation on memory of its own")]

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::communicator::Communicator;
use super::cuda::Device;
use super::result::version_text;
use super::sys::UniqueId;
use super::{Config, Libraries, TICK};
use crate::backend::device::{
    self, Communicator as _, Device as _, DeviceGroup, Event as _, GroupConfig, Rendezvous,
    device_of,
};
use crate::backend::device_memory::{DeviceStep, Mark as _};
use crate::backend::rendezvous::{Joining, RankLocation};
use crate::op::blocks::describe;
use crate::store::Store;
use crate::{DType, Error, ReduceOp, Result, Transport, Verb};

/// Longest time of a communicator's first all-reduce.
const FIRST_TIMEOUT: Duration = Duration::from_secs(60);
/// Remedies for GPUs that cannot reach one another, for error texts.
const REMEDIES: &str = "try NCCL_P2P_DISABLE=1 (a virtual machine or an IOMMU may block copies \
                        between GPUs), a larger /dev/shm (containers: --shm-size), and another \
                        version of the driver; NCCL_DEBUG=INFO shows more";

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
    check_versions(&joining.locations)?;
    let (timeout, checks) = (joining.options.timeout, config.checks);
    let group = GroupConfig { reason, timeout, checks, can_split: true };
    device::join(store, joining, group, |rendezvous| {
        connect(rendezvous, libraries, ordinal, config)
    })
}

/// Fails if the ranks have different versions. NCCL checks this too, but does not name a rank.
fn check_versions(ranks: &[RankLocation]) -> Result<()> {
    // `device_of` has checked that all have one.
    let versions: Vec<i32> = ranks.iter().flat_map(|rank| rank.nccl.library.clone()).collect();
    match versions.iter().position(|&version| version != versions[0]) {
        None => Ok(()),
        Some(rank) => Err(Error::InvalidArgument(format!(
            "rank 0 has NCCL {}, rank {rank} has {}; all ranks need the same",
            version_text(versions[0]),
            version_text(versions[rank])
        ))),
    }
}

/// Fails if two ranks have the same GPU, unless NCCL is told to share GPUs. NCCL checks this too,
/// but names neither the UUID nor a remedy.
fn check_gpus(uuids: &[[u8; 16]]) -> Result<()> {
    // Since NCCL 2.30, an experiment there.
    if std::env::var_os("NCCL_MULTI_RANK_GPU_ENABLE").is_some_and(|value| value != "0") {
        return Ok(());
    }
    let mut ranks = HashMap::new();
    for (rank, uuid) in uuids.iter().enumerate() {
        if let Some(other) = ranks.insert(uuid, rank) {
            return Err(Error::InvalidArgument(format!(
                "ranks {other} and {rank} are both on the GPU {}, but NCCL needs one for each \
                 rank; start no more ranks than GPUs, and let CUDA_VISIBLE_DEVICES show all of \
                 them, or another one to each rank",
                uuid_text(*uuid)
            )));
        }
    }
    Ok(())
}

/// Formats a UUID as `nvidia-smi -L` does, without `GPU-`.
fn uuid_text(uuid: [u8; 16]) -> String {
    let hex = format!("{:032x}", u128::from_be_bytes(uuid));
    [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]].join("-")
}

fn connect(
    rendezvous: &Rendezvous<'_>,
    libraries: Libraries,
    ordinal: u32,
    config: &Config,
) -> Result<(Arc<Device>, Communicator)> {
    let joining = rendezvous.joining;
    let device = Device::open(libraries.cuda, ordinal)?;
    let seed = joining.options.seed();
    if let Some(communicator) = seed.and_then(|seed| seed.take::<Communicator>()) {
        return Ok((device, communicator));
    }
    // All ranks are ready for the init once each has the others' GPUs.
    check_gpus(&rendezvous.all_gather(device.uuid()?)?)?;
    let mut ids = ids(rendezvous, libraries, config)?;
    let (rank, world) = (joining.rank, joining.world());
    let (nccl, on) = (libraries.nccl, Arc::clone(&device));
    let communicator = Communicator::join(nccl, on, (rank, world), &mut ids)?;
    while !communicator.ready()? {
        rendezvous.host.health()?;
        if Instant::now() >= joining.deadline {
            let text = "all ranks have started NCCL's init, but it has not completed";
            let status = ("ncclInProgress", 7);
            return Err(rendezvous.timeout_error(status, format!("{text}; {REMEDIES}")));
        }
        std::thread::sleep(TICK);
    }
    if world > 1 {
        first_all_reduce(rendezvous, &device, &communicator)?;
    }
    Ok((device, communicator))
}

/// Adds one number over the ranks. It may take [`FIRST_TIMEOUT`], or the group's timeout if that is
/// shorter. All ranks are here, so the time does not include that of a late rank.
fn first_all_reduce(
    rendezvous: &Rendezvous<'_>,
    device: &Arc<Device>,
    communicator: &Communicator,
) -> Result<()> {
    let timeout = rendezvous.joining.options.timeout.min(FIRST_TIMEOUT);
    let deadline = Instant::now() + timeout;
    let wait = || {
        rendezvous.host.health()?;
        if Instant::now() >= deadline {
            let text = "the first all_reduce between the ranks' GPUs has not completed within";
            let text = format!("{text} {timeout:?}; {REMEDIES}");
            return Err(rendezvous.timeout_error(("timed out", 0), text));
        }
        std::thread::sleep(TICK);
        Ok(())
    };
    let _entered = device.enter()?;
    let (stream, _stream) = device.stream()?;
    let (end, (address, memory)) = (device.event()?, communicator.alloc(DType::F32.size())?);
    let op = describe(Verb::AllReduce, DType::F32, Some(ReduceOp::Sum), None, 1);
    let step = DeviceStep::Run { op, input: address, output: address };
    let run = || {
        // SAFETY: memory and stream are this function's, and only freed once the operation has
        // ended or the communicator is aborted. The number may be any.
        unsafe { communicator.launch(&[step], stream, &wait) }?;
        end.record(stream)?;
        while !end.reached()? {
            wait()?;
        }
        Ok(())
    };
    let ended = run();
    if ended.is_err() && !matches!(communicator.abort(&|| true), Ok(true)) {
        // The device may still use it.
        std::mem::forget(memory);
    }
    ended
}

/// Returns the group's NCCL ids. The first of the ranks that use an id creates it.
fn ids(
    rendezvous: &Rendezvous<'_>,
    libraries: Libraries,
    config: &Config,
) -> Result<Vec<UniqueId>> {
    let (rank, world) = (rendezvous.joining.rank, rendezvous.joining.world());
    let scalable = libraries.nccl.ncclCommInitRankScalable.is_some();
    let count = if scalable { world.div_ceil(config.ranks_per_id().max(1)) } else { 1 };
    let id = |index| {
        let owner = index * world / count;
        let mut id = if owner == rank { libraries.unique_id()? } else { [0; 128] };
        rendezvous.broadcast(&mut id, owner)?;
        Ok(UniqueId(id))
    };
    (0..count).map(id).collect()
}
