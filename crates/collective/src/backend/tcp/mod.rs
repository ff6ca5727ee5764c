//! Ranks on several machines: TCP connections between all pairs of them, and shared memory between
//! those of one machine if it is wanted.
//!
//! * [`connect`] and [`address`]: how the ranks find each other through the store;
//! * [`frame`]: what goes over a connection, checked header by header;
//! * [`control`]: one connection per pair, and a thread, for deaths, failures and the question for
//!   whom a rank waits;
//! * [`link`] and [`lane`]: one connection per pair for data, and what is queued on it;
//! * [`ring`]: what a link is within a machine;
//! * [`turn`]: one operation, from fingerprints to the last byte, and all waiting;
//! * [`execute`]: the algorithms of [`algo`], carried out.
//!
//! The invariant: data connections are read and written by the thread that carries out an operation
//! alone, control connections are read by their thread alone, and whoever fails tells all peers
//! before its caller learns of it. So a rank that ends because the group failed is not taken for the
//! reason of it.
//!
//! A forked child keeps its parent's sockets open: should the parent be killed while a child lives,
//! the peers learn of it from a timeout only.

mod address;
pub(super) mod connect;
mod control;
mod execute;
pub(crate) mod frame;
pub(super) mod lane;
pub(super) mod link;
mod ring;
pub(super) mod sys;
pub(super) mod turn;

use std::fmt::Debug;
use std::time::Duration;

use parking_lot::Mutex;

use self::connect::Connections;
use self::control::Control;
use self::frame::{Cause, Failure};
use self::link::Link;
use self::turn::{Stop, Turn};

use super::core::{
    BARRIER, DEFAULT_WAIT, Direction, GroupCore, HostBackend, SpanTransfer, run_single_rank,
};
use super::rendezvous::{Joining, RankLocation};
use super::zeroed_memory::ZeroedMemory;
use super::{RawShared, Wait};
use crate::algo::{self, Costs, Layout};
use crate::span::Span;
use crate::{Determinism, Error, OpDesc, Rank, Result, Verb};

/// Ranks a group may have: each has two connections or three to each other, and a process 1024 open
/// files unless told otherwise.
const MAX_RANKS: usize = 1024;
/// Scratch memory that is kept from one operation to the next.
const SCRATCH_KEPT: usize = 16 << 20;

/// Reductions of a library, for groups in which any order of folding will do.
pub(super) trait Native: Debug + Send + Sync {
    /// Does an `all_reduce` or a `reduce` that all ranks have entered, in place; overwrites the memory
    /// on every rank.
    fn reduce(
        &self,
        turn: &Turn<'_>,
        memory: Span<'_>,
        go_on: &dyn Fn() -> bool,
    ) -> std::result::Result<(), Stop>;
}

/// One rank of a group over connections between all pairs.
#[derive(Debug)]
pub(crate) struct Tcp {
    core: GroupCore,
    layout: Layout,
    determinism: Determinism,
    costs: Costs,
    native: Option<Box<dyn Native>>,
    state: Mutex<State>,
    // Says goodbye when dropped.
    control: Control,
}

#[derive(Debug)]
struct State {
    /// Operations of all ranks so far.
    seq: u64,
    links: Vec<Option<Box<dyn Link>>>,
    scratch: Vec<u8>,
}

/// Joins a group; returns when all ranks have. With `rings`, ranks of one machine share memory.
pub(crate) fn join(joining: &Joining<'_>, reason: String, rings: bool) -> Result<Tcp> {
    check_world("TCP", joining.world())?;
    let layout = layout(joining);
    let sharing: &[Rank] = if rings { layout.members(layout.machine(joining.rank)) } else { &[] };
    let connections = connect::connect(joining, sharing)?;
    Tcp::new(joining, ("tcp", reason), connections, costs(rings), None)
}

/// Checks that a group over connections between all pairs may have so many ranks.
pub(super) fn check_world(carrier: &str, world: usize) -> Result<()> {
    if world <= MAX_RANKS {
        return Ok(());
    }
    let text = format!("a group over {carrier} has 1 to {MAX_RANKS} ranks, not {world}");
    Err(Error::InvalidArgument(text))
}

fn layout(joining: &Joining<'_>) -> Layout {
    let machines: Vec<_> = joining.locations.iter().map(RankLocation::machine).collect();
    Layout::new(&machines)
}

impl Tcp {
    /// Over these connections; returns when all ranks have theirs.
    pub(super) fn new(
        joining: &Joining<'_>,
        (carrier, reason): (&'static str, String),
        Connections { links, control }: Connections,
        costs: Costs,
        native: Option<Box<dyn Native>>,
    ) -> Result<Self> {
        let own = &joining.locations[joining.rank];
        let neighbours = joining.locations.iter().filter(|place| place.same_cores(own)).count();
        let core = GroupCore::new(
            (carrier, reason),
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
            native,
            state: Mutex::new(State { seq: 0, links, scratch: Vec::new() }),
            control: Control::start(joining.rank, control)?,
        };
        // A first barrier: everyone has all its connections.
        tcp.core.note_failure(tcp.only_enter(&BARRIER))?;
        Ok(tcp)
    }

    /// Meets all ranks at an operation that moves nothing.
    fn only_enter(&self, op: &OpDesc) -> Result<()> {
        let state = &mut *self.state.lock();
        let mut turn = self.turn(&mut state.seq, &mut state.links, op, DEFAULT_WAIT)?;
        turn.enter();
        turn.meet().and_then(|()| turn.finish())
    }

    /// Begins an operation.
    fn turn<'a>(
        &'a self,
        next: &mut u64,
        links: &'a mut [Option<Box<dyn Link>>],
        op: &OpDesc,
        wait: Wait,
    ) -> Result<Turn<'a>> {
        self.core.ready()?;
        let seq = *next;
        // What not all ranks take part in is no step of the group's history.
        *next += u64::from(op.verb != Verb::Batch);
        let timeout = wait.timeout.unwrap_or(self.core.timeout);
        let turn = Turn::new(self, links, *op, seq, wait.policy, timeout);
        // What has happened while this rank computed.
        match self.control.failure() {
            None => Ok(turn),
            Some(failure) => Err(self.core.error(failure, turn.name(), Duration::ZERO)),
        }
    }
}

impl HostBackend for Tcp {
    fn core(&self) -> &GroupCore {
        &self.core
    }

    fn run_spans(&self, op: &OpDesc, input: Span<'_>, output: Span<'_>, wait: Wait) -> Result<()> {
        let State { seq, links, scratch } = &mut *self.state.lock();
        let mut turn = self.turn(seq, links, op, wait)?;
        if self.core.world == 1 {
            run_single_rank(op, input, output);
            return Ok(());
        }
        let fast = self.determinism == Determinism::Fast;
        let result = match (&self.native, op.verb) {
            (Some(native), Verb::AllReduce | Verb::Reduce) if fast => {
                execute::by_library(&mut turn, &**native, output, scratch)
            }
            _ => {
                let (rank, layout) = (self.core.rank, &self.layout);
                let schedule = algo::plan(op, rank, layout, self.determinism, &self.costs);
                let scratch = at_least(scratch, schedule.scratch);
                let memory = algo::Memory { input, output, scratch };
                execute::run(&mut turn, &schedule, op.dtype, memory)
            }
        };
        drop(turn);
        if scratch.len() > SCRATCH_KEPT {
            *scratch = Vec::new();
        }
        result
    }

    fn exchange_spans(&self, op: &OpDesc, blocks: Vec<SpanTransfer<'_>>, wait: Wait) -> Result<()> {
        let state = &mut *self.state.lock();
        let mut turn = self.turn(&mut state.seq, &mut state.links, op, wait)?;
        if op.verb != Verb::Batch {
            // What goes before all have entered should not hold up a fingerprint.
            let waits =
                |block: &SpanTransfer<'_>| !turn.tells_all() || block.memory.len() > execute::EARLY;
            let large = blocks.iter().position(waits);
            let (early, late) = blocks.split_at(large.unwrap_or(blocks.len()));
            turn.enter();
            turn.queue(early, Direction::Send);
            turn.meet()?;
            turn.queue(late, Direction::Send);
        } else {
            if let Some(gone) = blocks.iter().find(|block| self.control.has_left(block.peer)) {
                let failure = self.control.left(gone.peer, &turn.name());
                return Err(self.core.error(failure, turn.name(), Duration::ZERO));
            }
            turn.queue(&blocks, Direction::Send);
        }
        turn.queue(&blocks, Direction::Receive);
        turn.finish()
    }

    fn alloc_shared(&self, op: &OpDesc) -> Result<RawShared> {
        // The caller's mistake, seen before anything is sent.
        let layout = ZeroedMemory::layout(op)?;
        self.core.note_failure(self.only_enter(op))?;
        let Some(memory) = ZeroedMemory::new(layout) else {
            let reason = format!("{op}: no memory");
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
        // A fork's copy must not say goodbye for the parent.
        if self.core.forked() {
            self.control.forget();
            // A library's threads, for which closing its connections would wait, are in the parent.
            std::mem::forget(std::mem::take(&mut self.state.get_mut().links));
            std::mem::forget(self.native.take());
        }
    }
}

/// What messages cost. Every chunk of a direct all-reduce is a moment at which ranks wait for one
/// another; one whose blocks fit a core's own cache and the sockets' buffers is worth it, a larger one is
/// sent, received and folded at the memory's speed. Without rings, bytes take as long within a machine as
/// between two.
pub(super) fn costs(rings: bool) -> Costs {
    let costs = Costs { min_chunk: 768 << 10, ..Costs::default() };
    if rings { costs } else { Costs { within: costs.between, ..costs } }
}

/// The first `len` bytes, which there are from now on.
fn at_least(memory: &mut Vec<u8>, len: usize) -> Span<'_> {
    if memory.len() < len {
        memory.resize(len, 0);
    }
    Span::from_mut(&mut memory[..len])
}
