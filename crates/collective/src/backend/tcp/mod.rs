//! Ranks on several machines: TCP connections between all pairs, and optionally shared memory
//! between the ranks of one machine.
//!
//! * [`connect`] and [`net::address`](crate::net::address): how the ranks find and connect to each
//!   other;
//! * [`frame`](super::frame): the headers and messages on a connection;
//! * [`control`]: one connection per pair, and one thread per rank, for deaths, failures and
//!   reports of which ranks a rank waits for;
//! * [`net::stream`](crate::net::stream) and [`peer_queue`](super::peer_queue): one connection per
//!   pair for data, and the transfers queued on it;
//! * [`ring`]: replaces a data connection within a machine;
//! * [`call`]: a call in progress, from fingerprints to the last byte, and all waiting;
//! * [`execute`]: runs the schedules of [`algo`].
//!
//! Ranks of one machine that have rings also share the memory of `alloc`
//! ([`host::shared`](super::host::shared)), and store into each other's parts of a buffer.
//!
//! The invariant: only the thread that runs an operation accesses data connections, and only the
//! control thread reads control connections. A rank that fails notifies all peers before its caller
//! gets the error. So a rank that ends because the group has failed is not reported as the cause.
//!
//! Limit: a forked child keeps its parent's sockets open. If the parent is killed while a child
//! lives, the peers detect that only by a timeout.

pub(super) mod call;
pub(super) mod connect;
mod control;
mod execute;
mod ring;

use std::fmt::Debug;
use std::sync::Arc;

use parking_lot::Mutex;

use self::call::Call;
use self::connect::Connections;
use self::control::ControlPlane;

use super::core::{
    BARRIER, DEFAULT_WAIT, Direction, GroupCore, HostBackend, SpanTransfer, run_single_rank,
};
use super::failure::{Cause, Failure};
use super::host::shared::{self, SharedBuffers};
use super::rendezvous::{Joining, RankLocation};
use super::{Backend, RawShared, Wait, host};
use crate::algo::{self, Costs, Layout};
use crate::memory::Span;
use crate::net::stream::PeerStream;
use crate::{BufferLocation, DType, Determinism, Error, OpDesc, Rank, Result, Verb};

/// Maximum number of ranks: a rank has two or three connections to each peer, and each is an open
/// file.
const MAX_RANKS: usize = 1024;
/// Maximum size of scratch memory kept between operations, in bytes.
const MAX_KEPT_SCRATCH: usize = 16 << 20;

/// One rank of a group with connections between all pairs.
#[derive(Debug)]
pub(crate) struct Tcp {
    core: GroupCore,
    layout: Layout,
    determinism: Determinism,
    costs: Costs,
    /// If the ranks of a machine share memory: the process of its first rank, whose files they
    /// open.
    sharing: Option<u32>,
    state: Mutex<TcpState>,
    // Sends goodbyes when dropped.
    control: ControlPlane,
}

#[derive(Debug)]
struct TcpState {
    /// Sequence number of the next operation of all ranks.
    seq: u64,
    streams: Vec<Option<Box<dyn PeerStream>>>,
    scratch: Vec<u8>,
    shared: SharedBuffers,
}

/// Joins a group; blocks until all ranks have joined. With `rings`, ranks of one machine use shared
/// memory.
pub(crate) fn join(joining: &Joining<'_>, reason: String, rings: bool) -> Result<Tcp> {
    check_world("TCP", joining.world())?;
    let layout = layout(joining);
    let sharing: &[Rank] = if rings { layout.members(layout.machine(joining.rank)) } else { &[] };
    let connections = connect::connect(joining, sharing)?;
    Tcp::new(joining, ("tcp", reason), connections, rings)
}

/// Joins a group for host memory, on one machine or several.
pub(crate) fn join_host(joining: &Joining<'_>, reason: String) -> Result<Arc<dyn Backend>> {
    let own = &joining.locations[joining.rank];
    let several = joining.locations.iter().any(|location| location.machine() != own.machine());
    Ok(match several {
        true => Arc::new(join(joining, reason, true)?),
        false => Arc::new(host::shm::join(joining, reason)?),
    })
}

/// Checks the number of ranks of a group with connections between all pairs.
pub(super) fn check_world(backend: &str, world: usize) -> Result<()> {
    if world <= MAX_RANKS {
        return Ok(());
    }
    let text = format!("a group over {backend} has 1 to {MAX_RANKS} ranks, not {world}");
    Err(Error::InvalidArgument(text))
}

fn layout(joining: &Joining<'_>) -> Layout {
    let machines: Vec<_> = joining.locations.iter().map(RankLocation::machine).collect();
    Layout::new(&machines)
}

impl Tcp {
    /// Makes a group over these connections; blocks until all ranks have theirs. With `rings`,
    /// ranks of one machine share memory.
    pub(super) fn new(
        joining: &Joining<'_>,
        backend: (&'static str, String),
        Connections { data: streams, control }: Connections,
        rings: bool,
    ) -> Result<Self> {
        let own = &joining.locations[joining.rank];
        let neighbours = joining.locations.iter().filter(|place| place.same_cores(own)).count();
        let core =
            GroupCore::new(backend, (joining.rank, joining.world()), neighbours, joining.options)?;
        let layout = layout(joining);
        let first = layout.members(layout.machine(joining.rank))[0];
        let (scratch, shared) = Default::default();
        let tcp = Self {
            core,
            layout,
            determinism: joining.options.determinism,
            costs: costs(rings),
            sharing: rings.then(|| joining.locations[first].pid),
            state: Mutex::new(TcpState { seq: 0, streams, scratch, shared }),
            control: ControlPlane::start(joining.rank, control)?,
        };
        // The first barrier: all ranks have all their connections.
        tcp.core.note_failure(tcp.enter_only(&mut tcp.state.lock(), &BARRIER))?;
        Ok(tcp)
    }

    /// Runs an operation that moves no data.
    fn enter_only(&self, state: &mut TcpState, op: &OpDesc) -> Result<()> {
        self.exchange_in(state, op, Vec::new(), DEFAULT_WAIT)
    }

    /// Returns the ranks of this machine, in order, and this rank's index among them.
    fn members(&self) -> (&[Rank], usize) {
        let members = self.layout.members(self.layout.machine(self.core.rank));
        let own = members.iter().position(|&rank| rank == self.core.rank);
        (members, own.expect("a rank is on its machine"))
    }

    fn exchange_in(
        &self,
        state: &mut TcpState,
        op: &OpDesc,
        blocks: Vec<SpanTransfer<'_>>,
        wait: Wait,
    ) -> Result<()> {
        let mut call = Call::begin(self, &mut state.seq, &mut state.streams, op, wait)?;
        if op.verb != Verb::Batch {
            // Blocks sent before all ranks have entered must not delay a fingerprint.
            let waits = |block: &SpanTransfer<'_>| {
                !call.compares_directly() || block.memory.len() > execute::EARLY
            };
            let large = blocks.iter().position(waits);
            let (early, late) = blocks.split_at(large.unwrap_or(blocks.len()));
            call.enter();
            call.queue(early, Direction::Send);
            call.wait_entered()?;
            call.queue(late, Direction::Send);
        } else {
            call.queue(&blocks, Direction::Send);
        }
        call.queue(&blocks, Direction::Receive);
        call.finish()
    }

    /// Allocates a buffer that the ranks of this machine share.
    fn alloc_in_machine(
        &self,
        state: &mut TcpState,
        op: &OpDesc,
        stride: usize,
        first_pid: u32,
    ) -> Result<RawShared> {
        let (members, own) = self.members();
        let first = members[0];
        let ranks = (own, members.len(), stride);
        // Both exchanges are barriers of all ranks.
        let map = shared::make(self, op, ranks, (first, first_pid), |number| {
            let mut number = number.to_ne_bytes();
            let memory = Span::from_mut(&mut number);
            let (dtype, count) = (DType::U64, 1);
            let block = |&peer, direction| SpanTransfer { peer, direction, dtype, count, memory };
            let blocks = match own {
                0 => members[1..].iter().map(|peer| block(peer, Direction::Send)).collect(),
                _ => vec![block(&first, Direction::Receive)],
            };
            self.exchange_in(state, op, blocks, DEFAULT_WAIT)?;
            Ok(u64::from_ne_bytes(number))
        })?;
        self.enter_only(state, op)?;
        Ok(state.shared.add(map, own, stride))
    }
}

impl HostBackend for Tcp {
    fn core(&self) -> &GroupCore {
        &self.core
    }

    fn run_spans(&self, op: &OpDesc, input: Span<'_>, output: Span<'_>, wait: Wait) -> Result<()> {
        let TcpState { seq, streams, scratch, shared } = &mut *self.state.lock();
        let shared = shared.find(op, output);
        let location = shared.as_ref().map_or(BufferLocation::Private, |shared| shared.location);
        let mut members = Vec::new();
        if let Some(shared) = &shared {
            members.extend((0..self.members().0.len()).map(|at| shared.part(at, 0, output.len())));
        }
        let mut call = Call::begin(self, seq, streams, op, wait)?;
        call.location = location;
        if self.core.world == 1 {
            run_single_rank(op, input, output);
            return Ok(());
        }
        let (rank, layout) = (self.core.rank, &self.layout);
        let algorithm = algo::choose(op, layout, self.determinism, &self.costs);
        let schedule = algo::schedule(algorithm, op, rank, layout, &self.costs, shared.is_some());
        let memory = algo::Memory {
            input,
            output,
            scratch: at_least(scratch, schedule.scratch),
            members: &members,
        };
        let result = execute::run(&mut call, &schedule, op.dtype, memory);
        drop(call);
        if let (Err(_), Some(shared)) = (&result, &shared) {
            // A peer that saw all ranks enter may still store into this rank's part.
            shared.detach(output.len());
        }
        if scratch.len() > MAX_KEPT_SCRATCH {
            *scratch = Vec::new();
        }
        result
    }

    fn exchange_spans(&self, op: &OpDesc, blocks: Vec<SpanTransfer<'_>>, wait: Wait) -> Result<()> {
        self.exchange_in(&mut self.state.lock(), op, blocks, wait)
    }

    fn alloc_shared(&self, op: &OpDesc) -> Result<RawShared> {
        let state = &mut *self.state.lock();
        // An invalid argument is detected before anything is sent.
        if let Some(pid) = self.sharing {
            let stride = shared::stride(op, self.members().0.len())?;
            return self.core.note_failure(self.alloc_in_machine(state, op, stride, pid));
        }
        let bytes = shared::stride(op, 1)?;
        self.core.note_failure(self.enter_only(state, op))?;
        let memory = shared::private(bytes).map_err(|error| Error::io(op.to_string(), &error));
        self.core.note_failure(self.or_abort(op, memory))
    }

    fn failure(&self) -> Option<Failure> {
        self.control.failure().cloned()
    }

    fn fail_group(&self, cause: Cause) {
        self.control.fail(cause);
    }
}

impl Drop for Tcp {
    fn drop(&mut self) {
        // A forked child must not send goodbyes for its parent.
        if self.core.forked() {
            self.control.forget();
            // Closing gloo's connections would wait for its thread, which exists only in the
            // parent.
            std::mem::forget(std::mem::take(&mut self.state.get_mut().streams));
        }
    }
}

/// The cost model. Ranks wait for each other after every chunk of a direct all-reduce; that pays
/// off if a chunk's blocks fit into a core's cache and the sockets' buffers, because a larger chunk
/// is sent, received and reduced at memory speed. Without rings a message within a machine costs as
/// much as one between machines.
pub(super) fn costs(rings: bool) -> Costs {
    let costs = Costs { min_chunk: 768 << 10, ..Costs::default() };
    if rings { costs } else { Costs { within: costs.between, ..costs } }
}

/// Returns the first `len` bytes of `memory`, after growing it if necessary.
fn at_least(memory: &mut Vec<u8>, len: usize) -> Span<'_> {
    if memory.len() < len {
        memory.resize(len, 0);
    }
    Span::from_mut(&mut memory[..len])
}
