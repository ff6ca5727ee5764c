//! How the ranks of a communicator meet: ids through our store, and an init that can be waited for.
//!
//! NCCL's init waits for all ranks without end and names nobody. Here it never blocks: a rank says in
//! the store that it begins, and looks at the communicator, at the host's side of the group and at
//! the clock until the communicator is ready. By the time a rank gets here all ranks have met on the
//! host, so one that is missing has stopped or died since.

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::communicator::Communicator;
use super::cuda::Device;
use super::herald::Herald;
use super::result::version_text;
use super::sys::UniqueId;
use super::watch::Shared;
use super::{Config, Libraries, Nccl};
use crate::backend::meet::{Joining, host, tell_all};
use crate::backend::{Backend, Patience, RawBufs, Wait};
use crate::store::Store;
use crate::{DType, Error, OpDesc, Rank, Result, Verb};

/// Between two looks at what peers have to do.
const TICK: Duration = Duration::from_millis(1);
/// The longest wait for a key without looking at the host's side.
const SLICE: Duration = Duration::from_millis(20);

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
) -> Result<Nccl> {
    let libraries = libraries?;
    for (rank, place) in joining.places.iter().enumerate() {
        if let Err(why) = &place.nccl {
            let what = format!("rank {rank}: {why}");
            return Err(Error::Unsupported { backend: "nccl", what });
        }
    }
    let ordinal = joining.options.cuda_device.ok_or_else(|| {
        let text = "a group over NCCL is made for a CUDA device: GroupOptions::with_cuda_device";
        Error::InvalidArgument(text.into())
    })?;
    let own = Member {
        version: libraries.version(),
        split: libraries.nccl.split.is_some(),
        scalable: libraries.nccl.init_scalable.is_some(),
    };
    let members = tell_all(joining, "nccl", &own)?;
    check_versions(&members)?;
    let host = host(joining, reason.clone())?;
    let meeting = Meeting { store, joining, host: &host, libraries, members: &members };
    let made = meeting.connect(ordinal, config).and_then(|(device, communicator)| {
        meeting.barrier()?;
        let prefix = meeting.key("nccl");
        let herald = Herald::start(Arc::clone(store), prefix, joining.rank, joining.world())?;
        let (host, name) = (Arc::clone(&host), joining.options.name.clone());
        let shared = Shared::new(host, Arc::new(communicator), herald, name);
        let can_split = members.iter().all(|member| member.split);
        Nccl::new(device, shared, reason, config.clone(), joining.options.timeout, can_split)
    });
    // The peers need not wait for this rank.
    made.inspect_err(|error| host.abort(&error.to_string()))
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

/// A rank that joins, once it has met the others on the host.
struct Meeting<'a> {
    store: &'a Arc<dyn Store>,
    joining: &'a Joining<'a>,
    host: &'a Arc<dyn Backend>,
    libraries: Libraries,
    members: &'a [Member],
}

impl Meeting<'_> {
    fn connect(&self, ordinal: u32, config: &Config) -> Result<(Arc<Device>, Communicator)> {
        let device = Device::open(self.libraries.cuda, ordinal)?;
        let seed = self.joining.options.seed();
        if let Some(communicator) = seed.and_then(|seed| seed.take::<Communicator>()) {
            return Ok((device, communicator));
        }
        let mut ids = self.ids(config)?;
        let Joining { rank, .. } = *self.joining;
        let world = self.joining.world();
        self.store.set(&self.entered(rank), b"")?;
        let (mut config, _name) = config.to_sys();
        let communicator = Communicator::join(
            self.libraries.nccl,
            Arc::clone(&device),
            (rank, world),
            &mut ids,
            &mut config,
        )?;
        while !communicator.ready()? {
            self.host.health()?;
            if Instant::now() >= self.joining.deadline {
                return Err(self.late());
            }
            std::thread::sleep(TICK);
        }
        Ok((device, communicator))
    }

    /// The ids, each made by the first of the ranks that it is for.
    fn ids(&self, config: &Config) -> Result<Vec<UniqueId>> {
        let world = self.joining.world();
        let scalable = self.members.iter().all(|member| member.scalable);
        let count = if scalable { world.div_ceil(config.ranks_per_id.max(1)) } else { 1 };
        let owner = |index: usize| index * world / count;
        let key = |index: usize| self.key(&format!("nccl-id/{index}"));
        for index in (0..count).filter(|&index| owner(index) == self.joining.rank) {
            self.store.set(&key(index), &self.libraries.nccl.unique_id()?.0)?;
        }
        let read = |index| {
            let bytes = self.value(&key(index), owner(index))?;
            let id = <[u8; 128]>::try_from(bytes);
            id.map(UniqueId).map_err(|_| crate::backend::meet::garbled(owner(index)))
        };
        (0..count).map(read).collect()
    }

    /// A key that a rank sets.
    fn value(&self, key: &str, owner: Rank) -> Result<Vec<u8>> {
        loop {
            match self.store.get(key, SLICE) {
                Err(Error::KeyTimeout { .. }) => self.host.health()?,
                other => return other,
            }
            if Instant::now() >= self.joining.deadline {
                return Err(self.joining.timeout("NCCL's id", vec![owner]));
            }
        }
    }

    /// Time is over: for ranks that have not begun, or for NCCL.
    fn late(&self) -> Error {
        let mut missing = Vec::new();
        for rank in 0..self.joining.world() {
            match self.store.check(&[&self.entered(rank)]) {
                Ok(true) => {}
                Ok(false) => missing.push(rank),
                Err(error) => return error,
            }
        }
        if !missing.is_empty() {
            return self.joining.timeout("NCCL's init", missing);
        }
        Error::Backend {
            backend: "nccl",
            during: format!("joining {}", self.joining.group()),
            name: "ncclInProgress".into(),
            code: 7,
            text: "all ranks have begun, and NCCL's init is not over; its NCCL_DEBUG=INFO may tell why"
                .into(),
        }
    }

    /// All ranks' communicators are ready, or none's is.
    fn barrier(&self) -> Result<()> {
        let op = OpDesc { verb: Verb::Barrier, dtype: DType::U8, op: None, root: None, count: 0 };
        let left = self.joining.deadline.saturating_duration_since(Instant::now());
        super::run_on_host(
            &**self.host,
            &op,
            RawBufs::NONE,
            Wait { patience: Patience::Caller, timeout: Some(left.max(TICK)) },
        )
    }

    fn key(&self, what: &str) -> String {
        format!("{}/{}/{what}", self.joining.options.name, self.joining.generation)
    }

    fn entered(&self, rank: Rank) -> String {
        self.key(&format!("nccl-entered/{rank}"))
    }
}
