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
//! * [`execute`]: the algorithms of [`algo`](crate::algo), carried out.
//!
//! The invariant: data connections are read and written by the thread that carries out an operation
//! alone, control connections are read by their thread alone, and whoever fails tells all peers
//! before its caller learns of it. So a rank that ends because the group failed is not taken for the
//! reason of it.
//!
//! A forked child keeps its parent's sockets open: should the parent be killed while a child lives,
//! the peers learn of it from a timeout only.

#![expect(unsafe_code, reason = "turns the memory of an operation into spans")]

mod address;
pub(super) mod connect;
mod control;
mod execute;
pub(crate) mod frame;
mod lane;
pub(super) mod link;
mod ring;
mod sys;
pub(super) mod turn;

use std::fmt::Debug;
use std::sync::OnceLock;
use std::time::Duration;

use parking_lot::Mutex;

use self::connect::Connections;
use self::control::Control;
use self::frame::{Cause, Failure};
use self::link::Link;
use self::turn::{Stop, Turn};
use super::block::Block;
use super::host::ForkGuard;
use super::meet::{Joining, Place};
use super::{Backend, Patience, RawBufs, RawShared, Transfer, TransferMemory, Wait};
use crate::algo::{self, Costs, Layout};
use crate::span::Span;
use crate::{DType, Determinism, Error, OpDesc, Rank, Result, Verb, simd};

/// Ranks a group may have: each has two connections or three to each other, and a process 1024 open
/// files unless told otherwise.
const MAX_RANKS: usize = 1024;
/// Scratch memory that is kept from one operation to the next.
const SCRATCH_KEPT: usize = 16 << 20;
/// The longest reason of an abort that is told.
const REASON_BYTES: usize = 320;

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
    carrier: &'static str,
    rank: Rank,
    /// Why it is this carrier.
    reason: String,
    layout: Layout,
    name: String,
    timeout: Duration,
    determinism: Determinism,
    /// Digest of the configuration that all ranks share.
    config_digest: u8,
    costs: Costs,
    native: Option<Box<dyn Native>>,
    /// Every rank of this machine can have a core to itself.
    alert: bool,
    state: Mutex<State>,
    /// This rank's first failure.
    failed: OnceLock<Error>,
    guard: ForkGuard,
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
    let machines: Vec<_> = joining.places.iter().map(Place::machine).collect();
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
        let own = &joining.places[joining.rank];
        let neighbours = joining.places.iter().filter(|place| place.same_cores(own)).count();
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let tcp = Self {
            carrier,
            rank: joining.rank,
            reason,
            layout: layout(joining),
            name: joining.options.name.clone(),
            timeout: joining.options.timeout,
            determinism: joining.options.determinism,
            config_digest: joining.shared.digest(),
            costs,
            native,
            alert: neighbours <= cores,
            state: Mutex::new(State { seq: 0, links, scratch: Vec::new() }),
            failed: OnceLock::new(),
            guard: ForkGuard::new()?,
            control: Control::start(joining.rank, control)?,
        };
        tcp.meet()?;
        Ok(tcp)
    }

    /// The other ranks, from the next one round, so that not all go to the same one first.
    fn peers(&self) -> impl Iterator<Item = Rank> + use<> {
        let (rank, world) = (self.rank, self.layout.world());
        (1..world).map(move |step| (rank + step) % world)
    }

    /// A first barrier: everyone has all its connections.
    fn meet(&self) -> Result<()> {
        let op = OpDesc { verb: Verb::Barrier, dtype: DType::U8, op: None, root: None, count: 0 };
        self.only_enter(&op)
    }

    /// Meets all ranks at an operation that moves nothing.
    fn only_enter(&self, op: &OpDesc) -> Result<()> {
        let state = &mut *self.state.lock();
        let wait = Wait { patience: Patience::Caller, timeout: None };
        let mut turn = self.turn(&mut state.seq, &mut state.links, op, wait)?;
        turn.enter();
        self.note_failure(turn.meet().and_then(|()| turn.finish()))
    }

    /// Begins an operation.
    fn turn<'a>(
        &'a self,
        next: &mut u64,
        links: &'a mut [Option<Box<dyn Link>>],
        op: &OpDesc,
        wait: Wait,
    ) -> Result<Turn<'a>> {
        self.ready()?;
        let seq = *next;
        // What not all ranks take part in is no step of the group's history.
        *next += u64::from(op.verb != Verb::Batch);
        let timeout = wait.timeout.unwrap_or(self.timeout);
        let turn = Turn::new(self, links, *op, seq, wait.patience, timeout);
        // What has happened while this rank computed.
        match self.control.failure() {
            None => Ok(turn),
            Some(failure) => {
                self.note_failure(Err(self.error(failure, turn.name(), Duration::ZERO)))
            }
        }
    }

    fn fork_check(&self) -> Result<()> {
        if self.guard.forked() {
            return Err(Error::InvalidArgument(
                "a process group belongs to the process that made it, not to a fork".into(),
            ));
        }
        Ok(())
    }

    /// Remembers the first failure.
    fn note_failure<T>(&self, result: Result<T>) -> Result<T> {
        if let Err(error) = &result {
            self.failed.get_or_init(|| error.clone());
        }
        result
    }

    /// The group's failure, as this rank tells it.
    fn error(&self, failure: &Failure, op: String, waited: Duration) -> Error {
        let by = failure.by;
        match failure.cause.clone() {
            Cause::Died { rank, .. } if rank == self.rank => {
                let reason = format!("rank {by} has lost its connection to this rank");
                Error::Aborted { by, reason }
            }
            Cause::Died { rank, pid, how } => {
                let op = how.map_or_else(|| op.clone(), |how| format!("{op}: {how}"));
                Error::PeerDied { op, rank, pid }
            }
            Cause::Aborted { reason } => Error::Aborted { by, reason },
            // For the rank that came too late, the others have given up.
            Cause::TimedOut { missing, text } if missing.contains(&self.rank) => {
                Error::Aborted { by, reason: text }
            }
            Cause::TimedOut { missing, .. } => Error::Timeout { op, waited, missing },
            Cause::Mismatch { field, by_rank } => {
                let known = ["verb", "dtype", "count"].into_iter().find(|known| *known == field);
                Error::Mismatch { op, field: known.unwrap_or("verb"), by_rank }
            }
        }
    }

    fn perform(&self, op: &OpDesc, input: Span<'_>, output: Span<'_>, wait: Wait) -> Result<()> {
        let State { seq, links, scratch } = &mut *self.state.lock();
        let mut turn = self.turn(seq, links, op, wait)?;
        if self.layout.world() == 1 {
            alone(op, input, output);
            return Ok(());
        }
        let fast = self.determinism == Determinism::Fast;
        let result = match (&self.native, op.verb) {
            (Some(native), Verb::AllReduce | Verb::Reduce) if fast => {
                execute::by_library(&mut turn, &**native, output, scratch)
            }
            _ => {
                let schedule =
                    algo::plan(op, self.rank, &self.layout, self.determinism, &self.costs);
                let scratch = at_least(scratch, schedule.scratch);
                let memory = algo::Memory { input, output, scratch };
                execute::run(&mut turn, &schedule, op.dtype, memory)
            }
        };
        drop(turn);
        if scratch.len() > SCRATCH_KEPT {
            *scratch = Vec::new();
        }
        self.note_failure(result)
    }

    /// Queues the transfers and carries them out.
    fn trade<'a>(&self, turn: &mut Turn<'a>, blocks: &[(Transfer, Span<'a>)]) -> Result<()> {
        let all_ranks = turn.op.verb != Verb::Batch;
        let send = |turn: &mut Turn<'a>, blocks: &[(Transfer, Span<'a>)]| {
            for (Transfer { peer, dtype, count, memory }, span) in blocks {
                if let TransferMemory::Send(_) = memory {
                    turn.send_message(*peer, *dtype, *count, *span);
                }
            }
        };
        if all_ranks {
            // What goes before all have entered should not hold up a fingerprint.
            let large = blocks.iter().position(|(_, span)| span.len() > execute::EARLY);
            let (early, late) = blocks.split_at(large.unwrap_or(blocks.len()));
            turn.enter();
            send(turn, early);
            turn.meet()?;
            send(turn, late);
        } else {
            let gone = blocks.iter().find(|(block, _)| self.control.has_left(block.peer));
            if let Some((Transfer { peer, .. }, _)) = gone {
                let failure = self.control.left(*peer, &turn.name());
                return Err(self.error(failure, turn.name(), Duration::ZERO));
            }
            send(turn, blocks);
        }
        for (Transfer { peer, dtype, count, memory }, span) in blocks {
            if let TransferMemory::Receive(_) = memory {
                turn.receive_message(*peer, *dtype, *count, *span);
            }
        }
        turn.finish()
    }
}

impl Backend for Tcp {
    fn name(&self) -> &'static str {
        self.carrier
    }

    fn reason(&self) -> &str {
        &self.reason
    }

    fn rank(&self) -> Rank {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.layout.world()
    }

    fn forked(&self) -> bool {
        self.guard.forked()
    }

    fn ready(&self) -> Result<()> {
        self.fork_check()?;
        match self.failed.get() {
            Some(error) => Err(Error::Poisoned(Box::new(error.clone()))),
            None => Ok(()),
        }
    }

    fn health(&self) -> Result<()> {
        self.fork_check()?;
        if let Some(error) = self.failed.get() {
            return Err(error.clone());
        }
        match self.control.failure() {
            Some(failure) => {
                Err(self.error(failure, format!("group {}", self.name), Duration::ZERO))
            }
            None => Ok(()),
        }
    }

    unsafe fn run(&self, op: &OpDesc, bufs: RawBufs, wait: Wait) -> Result<()> {
        self.fork_check()?;
        let (size, world) = (op.dtype.size(), self.layout.world());
        let (input_len, output_len) = (op.input_count(world) * size, op.output_count(world) * size);
        // SAFETY: the caller's promise; schedules only read the input.
        let input = unsafe { Span::new(bufs.input.cast_mut(), input_len) };
        // SAFETY: the caller's promise.
        let output = unsafe { Span::new(bufs.output, output_len) };
        self.perform(op, input, output, wait)
    }

    unsafe fn exchange(&self, op: &OpDesc, transfers: &[Transfer], wait: Wait) -> Result<()> {
        self.fork_check()?;
        let block = |transfer: &Transfer| {
            let ptr = match transfer.memory {
                TransferMemory::Send(from) => from.cast_mut(),
                TransferMemory::Receive(to) => to,
            };
            // SAFETY: the caller's promise; what is to be sent is only read.
            (*transfer, unsafe { Span::new(ptr, transfer.count * transfer.dtype.size()) })
        };
        let blocks: Vec<_> = transfers.iter().map(block).collect();
        let state = &mut *self.state.lock();
        let mut turn = self.turn(&mut state.seq, &mut state.links, op, wait)?;
        self.note_failure(self.trade(&mut turn, &blocks))
    }

    fn alloc(&self, dtype: DType, count: usize) -> Result<RawShared> {
        self.fork_check()?;
        let op = OpDesc { verb: Verb::Alloc, dtype, op: None, root: None, count };
        // The caller's mistake, seen before anything is sent.
        let layout = Block::layout(&op)?;
        self.only_enter(&op)?;
        let Some(block) = Block::new(layout) else {
            let reason = format!("{op}: no memory");
            self.abort(&reason);
            return self.note_failure(Err(Error::Aborted { by: self.rank, reason }));
        };
        Ok(block.share())
    }

    fn abort(&self, reason: &str) {
        if self.guard.forked() {
            return;
        }
        let end = reason.floor_char_boundary(REASON_BYTES);
        self.control.fail(Cause::Aborted { reason: reason[..end].to_owned() });
    }
}

impl Drop for Tcp {
    fn drop(&mut self) {
        // A fork's copy must not say goodbye for the parent.
        if self.guard.forked() {
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

/// A group of one: the verbs without the peers.
fn alone(op: &OpDesc, input: Span<'_>, output: Span<'_>) {
    match op.op {
        Some(reduce) => simd::fold(op.dtype, reduce, &[output], &[input]),
        None => output.copy_from(input),
    }
}
