//! Ranks on several machines: TCP connections between all pairs, and optionally shared memory between
//! the ranks of one machine.
//!
//! * [`connect`] and [`address`]: how the ranks find and connect to each other;
//! * [`frame`]: the headers and messages on a connection;
//! * [`control`]: one connection per pair, and one thread per rank, for deaths, failures and reports of
//!   which ranks a rank waits for;
//! * [`stream`] and [`peer_queue`]: one connection per pair for data, and the transfers queued on it;
//! * [`ring`]: replaces a data connection within a machine;
//! * [`call`]: a call in progress, from fingerprints to the last byte, and all waiting;
//! * [`execute`]: runs the schedules of [`algo`].
//!
//! The invariant: only the thread that runs an operation accesses data connections, and only the control
//! thread reads control connections. A rank that fails tells all peers before its caller gets the error.
//! So a rank that ends because the group has failed is not reported as the cause.
//!
//! Limit: a forked child keeps its parent's sockets open. If the parent is killed while a child lives,
//! the peers detect that only by a timeout.

mod address;
pub(super) mod call;
pub(super) mod connect;
mod control;
mod execute;
pub(crate) mod frame;
pub(super) mod peer_queue;
mod ring;
pub(super) mod stream;
pub(super) mod sys;

use std::fmt::Debug;
use std::time::Duration;

use parking_lot::Mutex;

use self::call::{Call, CallError};
use self::connect::Connections;
use self::control::ControlPlane;
use self::frame::{Cause, Failure};
use self::stream::PeerStream;

use super::core::{
    BARRIER, DEFAULT_WAIT, Direction, GroupCore, HostBackend, SpanTransfer, run_single_rank,
};
use super::rendezvous::{Joining, RankLocation};
use super::zeroed_memory::ZeroedMemory;
use super::{RawShared, Wait};
use crate::algo::{self, Costs, Layout};
use crate::span::Span;
use crate::{Determinism, Error, OpDesc, Rank, Result, Verb};

/// Largest group: a rank has two or three connections to each peer, and each is an open file.
const MAX_RANKS: usize = 1024;
/// Largest scratch memory kept between operations, in bytes.
const MAX_KEPT_SCRATCH: usize = 16 << 20;

/// Reductions of a library, for [`Determinism::Fast`].
pub(super) trait LibraryReductions: Debug + Send + Sync {
    /// Runs an `all_reduce` or a `reduce` that all ranks have entered, in place. Overwrites the memory on
    /// every rank. Must return when `should_continue` returns false, which it calls repeatedly.
    fn reduce(
        &self,
        call: &Call<'_>,
        memory: Span<'_>,
        should_continue: &dyn Fn() -> bool,
    ) -> std::result::Result<(), CallError>;
}

/// One rank of a group with connections between all pairs.
#[derive(Debug)]
pub(crate) struct Tcp {
    core: GroupCore,
    layout: Layout,
    determinism: Determinism,
    costs: Costs,
    library: Option<Box<dyn LibraryReductions>>,
    state: Mutex<State>,
    // Sends goodbyes when dropped.
    control: ControlPlane,
}

#[derive(Debug)]
struct State {
    /// Sequence number of the next operation of all ranks.
    seq: u64,
    streams: Vec<Option<Box<dyn PeerStream>>>,
    scratch: Vec<u8>,
}

/// Joins a group; returns when all ranks have joined. With `rings`, ranks of one machine use shared
/// memory.
pub(crate) fn join(joining: &Joining<'_>, reason: String, rings: bool) -> Result<Tcp> {
    check_world("TCP", joining.world())?;
    let layout = layout(joining);
    let sharing: &[Rank] = if rings { layout.members(layout.machine(joining.rank)) } else { &[] };
    let connections = connect::connect(joining, sharing)?;
    Tcp::new(joining, ("tcp", reason), connections, costs(rings), None)
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
    /// Makes a group over these connections; returns when all ranks have theirs.
    pub(super) fn new(
        joining: &Joining<'_>,
        backend: (&'static str, String),
        Connections { data: streams, control }: Connections,
        costs: Costs,
        library: Option<Box<dyn LibraryReductions>>,
    ) -> Result<Self> {
        let own = &joining.locations[joining.rank];
        let neighbours = joining.locations.iter().filter(|place| place.same_cores(own)).count();
        let core = GroupCore::new(
            backend,
            (joining.rank, joining.world()),
            neighbours,
            joining.options,
            joining.shared.digest(),
        )?;
        let tcp = Self {
            core,
            layout: layout(joining),
            determinism: joining.options.determinism,
            costs,
            library,
            state: Mutex::new(State { seq: 0, streams, scratch: Vec::new() }),
            control: ControlPlane::start(joining.rank, control)?,
        };
        // The first barrier: all ranks have all their connections.
        tcp.core.note_failure(tcp.enter_only(&BARRIER))?;
        Ok(tcp)
    }

    /// Runs an operation that moves no data.
    fn enter_only(&self, op: &OpDesc) -> Result<()> {
        let state = &mut *self.state.lock();
        let mut call = self.call(&mut state.seq, &mut state.streams, op, DEFAULT_WAIT)?;
        call.enter();
        call.wait_entered().and_then(|()| call.finish())
    }

    /// Begins a call.
    fn call<'a>(
        &'a self,
        next: &mut u64,
        streams: &'a mut [Option<Box<dyn PeerStream>>],
        op: &OpDesc,
        wait: Wait,
    ) -> Result<Call<'a>> {
        self.core.ready()?;
        let seq = *next;
        // Batches involve only some ranks, so they are not numbered.
        *next += u64::from(op.verb != Verb::Batch);
        let timeout = wait.timeout.unwrap_or(self.core.timeout);
        let call = Call::new(self, streams, *op, seq, wait.policy, timeout);
        // The group may have failed while this rank computed.
        match self.control.failure() {
            None => Ok(call),
            Some(failure) => Err(self.core.error(failure, call.name(), Duration::ZERO)),
        }
    }
}

impl HostBackend for Tcp {
    fn core(&self) -> &GroupCore {
        &self.core
    }

    fn run_spans(&self, op: &OpDesc, input: Span<'_>, output: Span<'_>, wait: Wait) -> Result<()> {
        let State { seq, streams, scratch } = &mut *self.state.lock();
        let mut call = self.call(seq, streams, op, wait)?;
        if self.core.world == 1 {
            run_single_rank(op, input, output);
            return Ok(());
        }
        let fast = self.determinism == Determinism::Fast;
        let result = match (&self.library, op.verb) {
            (Some(library), Verb::AllReduce | Verb::Reduce) if fast => {
                execute::reduce_by_library(&mut call, &**library, output, scratch)
            }
            _ => {
                let (rank, layout) = (self.core.rank, &self.layout);
                let schedule = algo::plan(op, rank, layout, self.determinism, &self.costs);
                let scratch = at_least(scratch, schedule.scratch);
                let memory = algo::Memory { input, output, scratch };
                execute::run(&mut call, &schedule, op.dtype, memory)
            }
        };
        drop(call);
        if scratch.len() > MAX_KEPT_SCRATCH {
            *scratch = Vec::new();
        }
        result
    }

    fn exchange_spans(&self, op: &OpDesc, blocks: Vec<SpanTransfer<'_>>, wait: Wait) -> Result<()> {
        let state = &mut *self.state.lock();
        let mut call = self.call(&mut state.seq, &mut state.streams, op, wait)?;
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
            if let Some(gone) = blocks.iter().find(|block| self.control.has_left(block.peer)) {
                let failure = self.control.left(gone.peer, &call.name());
                return Err(self.core.error(failure, call.name(), Duration::ZERO));
            }
            call.queue(&blocks, Direction::Send);
        }
        call.queue(&blocks, Direction::Receive);
        call.finish()
    }

    fn alloc_shared(&self, op: &OpDesc) -> Result<RawShared> {
        // A caller's mistake is detected before anything is sent.
        let layout = ZeroedMemory::layout(op)?;
        self.core.note_failure(self.enter_only(op))?;
        let Some(memory) = ZeroedMemory::new(layout) else {
            let reason = format!("{op}: out of memory");
            self.abort_group(&reason);
            return self.core.note_failure(Err(Error::Aborted { by: self.core.rank, reason }));
        };
        Ok(memory.share())
    }

    fn failure(&self, _op: &str) -> Option<Failure> {
        self.control.failure().cloned()
    }

    fn abort_group(&self, reason: &str) {
        self.control.fail(Cause::Aborted { reason: reason.to_owned() });
    }
}

impl Drop for Tcp {
    fn drop(&mut self) {
        // A fork must not send goodbyes for its parent.
        if self.core.forked() {
            self.control.forget();
            // Closing a library's connections would wait for its threads, which exist only in the parent.
            std::mem::forget(std::mem::take(&mut self.state.get_mut().streams));
            std::mem::forget(self.library.take());
        }
    }
}

/// The cost model. Ranks wait for each other after every chunk of a direct all-reduce; that pays off if a
/// chunk's blocks fit into a core's cache and the sockets' buffers, because a larger chunk is sent,
/// received and reduced at memory speed. Without rings a message within a machine costs as much as one
/// between machines.
pub(super) fn costs(rings: bool) -> Costs {
    let costs = Costs { min_chunk: 768 << 10, ..Costs::default() };
    if rings { costs } else { Costs { within: costs.between, ..costs } }
}

/// Returns the first `len` bytes of `memory`, which it grows if necessary.
fn at_least(memory: &mut Vec<u8>, len: usize) -> Span<'_> {
    if memory.len() < len {
        memory.resize(len, 0);
    }
    Span::from_mut(&mut memory[..len])
}
