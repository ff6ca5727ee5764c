//! The simulator as a backend: ranks are threads, their data are real, only time is not.
//!
//! Every rank leaves its call and waits. The last one to come compares the fingerprints, carries
//! out all ranks' schedules on their buffers, and wakes the others. It does so under the lock that a
//! rank must take to go on, so that nobody's memory is touched once its call has returned. Messages
//! between pairs need no meeting: they wait in the mail until they are asked for.

#![expect(unsafe_code, reason = "implements the calls that take type-erased memory")]

use std::any::Any;
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};

use super::data::{self, Blocks, Buffers};
use super::engine::{self, Failure, Outcome, duration, time};
use super::network::{Fault, Network};
use super::queue::Time;
use super::{NAME, schedules};
use crate::algo::{self, Costs, Layout, Schedule};
use crate::backend::block::Block;
use crate::backend::{Backend, RawBufs, RawShared, Transfer, TransferMemory, Wait};
use crate::{DType, Error, Fingerprint, GroupOptions, OpDesc, Place, Rank, Result, Verb};

/// The virtual clocks of a simulated group.
#[derive(Clone, Debug)]
pub struct Clocks(Arc<World>);

impl Clocks {
    /// How much time has passed for a rank since the group was made.
    ///
    /// # Panics
    ///
    /// If there is no such rank.
    pub fn now(&self, rank: Rank) -> Duration {
        duration(self.0.state.lock().clocks[rank])
    }

    /// Lets time pass for a rank, as computing would.
    ///
    /// # Panics
    ///
    /// If there is no such rank.
    pub fn advance(&self, rank: Rank, by: Duration) {
        let clock = &mut self.0.state.lock().clocks[rank];
        *clock = clock.saturating_add(time(by));
    }
}

/// All ranks of a group, in order, and their clocks.
pub(crate) fn group(
    world_size: usize,
    network: Network,
    options: &GroupOptions,
) -> Result<(Vec<Sim>, Clocks)> {
    let layout = network.layout(world_size)?;
    let state = State {
        calls: (0..world_size).map(|_| None).collect(),
        results: (0..world_size).map(|_| None).collect(),
        seq: vec![0; world_size],
        clocks: vec![0; world_size],
        left: vec![false; world_size],
        mail: HashMap::new(),
        shared: (0..world_size).map(|_| Vec::new()).collect(),
    };
    let world = Arc::new(World {
        costs: network.costs(),
        meeting: time(network.meeting(world_size)),
        network,
        layout,
        options: options.clone(),
        pid: std::process::id(),
        state: Mutex::new(state),
        bell: Condvar::new(),
        poison: OnceLock::new(),
    });
    let rank = |rank| Sim { world: Arc::clone(&world), rank, failed: OnceLock::new() };
    Ok(((0..world_size).map(rank).collect(), Clocks(world)))
}

/// One rank of a simulated group.
#[derive(Debug)]
pub(crate) struct Sim {
    world: Arc<World>,
    rank: Rank,
    /// This rank's first failure.
    failed: OnceLock<Error>,
}

/// What the ranks share.
#[derive(Debug)]
struct World {
    network: Network,
    layout: Layout,
    costs: Costs,
    meeting: Time,
    options: GroupOptions,
    pid: u32,
    state: Mutex<State>,
    /// Rings when a call has its result, mail comes, or somebody leaves.
    bell: Condvar,
    poison: OnceLock<Poison>,
}

/// Everything by rank.
#[derive(Debug)]
struct State {
    calls: Vec<Option<Call>>,
    results: Vec<Option<Result<()>>>,
    /// Calls so far.
    seq: Vec<u64>,
    clocks: Vec<Time>,
    left: Vec<bool>,
    /// By sender and receiver.
    mail: HashMap<(Rank, Rank), VecDeque<Parcel>>,
    shared: Vec<Vec<Shared>>,
}

/// What a rank calls.
#[derive(Debug)]
struct Call {
    op: OpDesc,
    print: Fingerprint,
    task: Task,
}

#[derive(Debug)]
enum Task {
    Meet,
    Run(RawBufs),
    Exchange(Vec<Transfer>),
}

// SAFETY: the pointers of a call are used while the rank that made it waits for its result, by the
// one thread that holds the lock.
unsafe impl Send for Call {}

/// A message between a pair, under way.
#[derive(Debug)]
struct Parcel {
    dtype: DType,
    count: usize,
    bytes: Vec<u8>,
    arrives: Time,
}

/// A shared buffer of a rank, while it lives.
#[derive(Debug)]
struct Shared {
    id: u64,
    address: usize,
    bytes: usize,
    memory: Weak<dyn Any + Send + Sync>,
}

/// Why the group can do no more.
#[derive(Clone, Debug)]
enum Poison {
    Aborted { by: Rank, reason: String },
    Left { rank: Rank },
    Failed(Failure),
    Mismatch { field: &'static str, by_rank: Vec<(Rank, String)> },
}

/// How long a rank sleeps without looking around, should an abort's bell ring just before.
const TICK: Duration = Duration::from_millis(20);
/// How much of its reason an abort tells.
const REASON: usize = 320;

impl World {
    fn size(&self) -> usize {
        self.layout.world()
    }

    fn name(&self, op: &OpDesc, seq: u64) -> String {
        format!("{} #{seq} of group {}", op.verb, self.options.name)
    }

    fn poison(&self, poison: Poison) {
        self.poison.get_or_init(|| poison);
        self.bell.notify_all();
    }

    /// The group's failure, as a rank tells it; `None` if there is none.
    fn failure(&self, rank: Rank, op: &str) -> Option<Error> {
        Some(match self.poison.get()? {
            Poison::Aborted { by, reason } => Error::Aborted { by: *by, reason: reason.clone() },
            Poison::Left { rank } => {
                Error::Aborted { by: *rank, reason: format!("it left the group before {op}") }
            }
            Poison::Failed(failure) => engine::error(rank, Some(failure), op),
            Poison::Mismatch { field, by_rank } => {
                Error::Mismatch { op: op.to_owned(), field, by_rank: by_rank.clone() }
            }
        })
    }

    /// Carries out the calls of all ranks.
    fn perform(&self, state: &mut State) {
        let calls: Vec<Call> = state.calls.iter_mut().filter_map(Option::take).collect();
        let own = &calls[0];
        let seq = own.print.seq;
        if let Some(field) = calls.iter().find_map(|call| own.print.difference(&call.print)) {
            let called = |(rank, call): (Rank, &Call)| (rank, call.print.to_string());
            let by_rank: Vec<_> = calls.iter().enumerate().map(called).collect();
            for (result, call) in state.results.iter_mut().zip(&calls) {
                let (op, by_rank) = (self.name(&call.op, seq), by_rank.clone());
                *result = Some(Err(Error::Mismatch { op, field, by_rank }));
            }
            return;
        }
        let op = self.name(&own.op, seq);
        if let Some((from, to)) = data::unmatched(&transfers(&calls)) {
            let text = format!("{op}: rank {from} does not send what rank {to} expects");
            let error = Error::InvalidArgument(text);
            self.poison(Poison::Aborted { by: to, reason: error.to_string() });
            state.results.fill(Some(Err(error)));
            return;
        }
        let start = state.clocks.iter().copied().max().unwrap_or(0) + self.meeting;
        let outcome = self.outcome(&calls, start);
        let gave_up = outcome.failure.as_ref().map_or(start, Failure::at);
        if let Some(failure) = outcome.failure {
            self.poison(Poison::Failed(failure));
        }
        for (rank, done) in outcome.done.into_iter().enumerate() {
            state.clocks[rank] = done.unwrap_or(gave_up);
            state.results[rank] = Some(match done {
                Some(_) => Ok(()),
                None => {
                    Err(self.failure(rank, &op).unwrap_or_else(|| engine::error(rank, None, &op)))
                }
            });
        }
    }

    fn outcome(&self, calls: &[Call], start: Time) -> Outcome {
        // Who is dead by now did not come.
        if let Some((rank, at)) = self.first_death().filter(|&(_, at)| at <= start) {
            let at = at + time(Duration::from_secs_f64(self.network.between.latency));
            return Outcome::all_failed(self.size(), Failure::Died { at, rank });
        }
        let op = &calls[0].op;
        let bufs = calls.iter().map(|call| match &call.task {
            Task::Run(bufs) => Some(*bufs),
            _ => None,
        });
        if let Some(bufs) = bufs.collect::<Option<Vec<_>>>() {
            return self.run_all(op, &bufs, start);
        }
        self.exchange_all(&transfers(calls), start)
    }

    fn first_death(&self) -> Option<(Rank, Time)> {
        let deaths = self.network.faults.iter().filter_map(|fault| match *fault {
            Fault::Death { rank, at } => Some((rank, time(at))),
            _ => None,
        });
        deaths.min_by_key(|&(_, at)| at)
    }

    fn run_all(&self, op: &OpDesc, bufs: &[RawBufs], start: Time) -> Outcome {
        let algorithm = algo::choose(op, &self.layout, self.options.determinism, &self.costs);
        let schedules = schedules(algorithm, op, &self.layout, &self.costs);
        let mut scratch: Vec<_> =
            schedules.iter().map(|schedule| vec![0; schedule.scratch]).collect();
        // SAFETY: all ranks wait in `run`, whose callers promise this, and cannot go on before this
        // thread gives up the lock.
        let mut buffers = unsafe { Buffers::new(op, bufs, &mut scratch) };
        engine::run(&self.network, &self.layout, &schedules, start, &mut buffers)
    }

    fn exchange_all(&self, transfers: &[&[Transfer]], start: Time) -> Outcome {
        let rounds = transfers.iter().map(|transfers| Blocks::round(transfers));
        let schedules: Vec<_> = rounds.map(Schedule::once).collect();
        // SAFETY: all ranks wait in `exchange`, whose callers promise this, and cannot go on before
        // this thread gives up the lock.
        let mut blocks = unsafe { Blocks::new(transfers) };
        engine::run(&self.network, &self.layout, &schedules, start, &mut blocks)
    }
}

/// Every rank's blocks.
fn transfers(calls: &[Call]) -> Vec<&[Transfer]> {
    calls
        .iter()
        .map(|call| match &call.task {
            Task::Exchange(transfers) => &transfers[..],
            _ => &[],
        })
        .collect()
}

impl Sim {
    fn fork_check(&self) -> Result<()> {
        if self.forked() {
            return Err(Error::InvalidArgument(
                "a process group belongs to the process that made it, not to a fork".into(),
            ));
        }
        Ok(())
    }

    fn note_failure<T>(&self, result: Result<T>) -> Result<T> {
        if let Err(error) = &result {
            self.failed.get_or_init(|| error.clone());
        }
        result
    }

    /// Leaves a call, and waits until all ranks' have been carried out. The number of the call.
    fn call(&self, op: &OpDesc, task: Task, wait: Wait) -> Result<u64> {
        self.ready()?;
        let world = &*self.world;
        let mut state = world.state.lock();
        let seq = state.seq[self.rank];
        state.seq[self.rank] += 1;
        let name = world.name(op, seq);
        if let Some(error) = world.failure(self.rank, &name) {
            return Err(error);
        }
        let print = op.fingerprint(seq, state.place(self.rank, op, &task));
        state.calls[self.rank] = Some(Call { op: *op, print, task });
        if state.calls.iter().all(Option::is_some) {
            world.perform(&mut state);
            world.bell.notify_all();
        }
        let absent = |state: &State| {
            let ranks = 0..world.size();
            ranks.filter(|&rank| state.calls[rank].is_none()).collect::<Vec<Rank>>()
        };
        let result =
            self.wait(&mut state, &name, wait, absent, |state| state.results[self.rank].take());
        // Whoever comes later must not find a call that has been given up.
        if result.is_err() {
            state.calls[self.rank] = None;
        }
        result?.map(|()| seq)
    }

    /// Waits until `reached` gives something, which `absent` ranks delay.
    fn wait<T>(
        &self,
        state: &mut MutexGuard<'_, State>,
        op: &str,
        wait: Wait,
        absent: impl Fn(&State) -> Vec<Rank>,
        mut reached: impl FnMut(&mut State) -> Option<T>,
    ) -> Result<T> {
        let world = &*self.world;
        let (since, timeout) = (Instant::now(), wait.timeout.unwrap_or(world.options.timeout));
        loop {
            if let Some(value) = reached(state) {
                return Ok(value);
            }
            let missing = absent(state);
            if let Some(&rank) = missing.iter().find(|&&rank| state.left[rank]) {
                world.poison(Poison::Left { rank });
            }
            let waited = since.elapsed();
            if waited >= timeout && world.poison.get().is_none() {
                let failure = Failure::TimedOut {
                    at: state.clocks[self.rank],
                    waited: time(waited),
                    by: self.rank,
                    missing,
                };
                world.poison(Poison::Failed(failure));
            }
            if let Some(error) = world.failure(self.rank, op) {
                return Err(error);
            }
            world.bell.wait_for(state, TICK.min(timeout - waited.min(timeout)));
        }
    }

    /// Messages between pairs.
    ///
    /// # Safety
    ///
    /// As [`Backend::exchange`].
    unsafe fn batch(&self, op: &OpDesc, transfers: &[Transfer], wait: Wait) -> Result<()> {
        self.ready()?;
        let world = &*self.world;
        let name = format!("{} of group {}", op.verb, world.options.name);
        let mut state = world.state.lock();
        if let Some(error) = world.failure(self.rank, &name) {
            return Err(error);
        }
        let now = state.clocks[self.rank];
        if let Some((_, at)) =
            world.first_death().filter(|&(rank, at)| rank == self.rank && at <= now)
        {
            world.poison(Poison::Failed(Failure::Died { at, rank: self.rank }));
            return Err(engine::error(
                self.rank,
                Some(&Failure::Died { at, rank: self.rank }),
                &name,
            ));
        }
        let mut ports = engine::Ports::new(now);
        for transfer in transfers {
            if let TransferMemory::Send(_) = transfer.memory {
                // SAFETY: the caller's promise.
                let bytes = data::bytes_of(unsafe { data::span(transfer) });
                let arrives = ports.send(self.link(transfer.peer), bytes.len());
                let Transfer { peer, dtype, count, .. } = *transfer;
                let parcel = Parcel { dtype, count, bytes, arrives };
                state.mail.entry((self.rank, peer)).or_default().push_back(parcel);
            }
        }
        world.bell.notify_all();
        let mut left: VecDeque<&Transfer> = transfers
            .iter()
            .filter(|transfer| matches!(transfer.memory, TransferMemory::Receive(_)))
            .collect();
        while let Some(transfer) = left.pop_front() {
            let from = transfer.peer;
            let mut parcel = {
                let missing = |state: &State| self.senders_missing(state, transfer, &left);
                self.wait(&mut state, &name, wait, missing, |state| {
                    state.mail.get_mut(&(from, self.rank)).and_then(VecDeque::pop_front)
                })?
            };
            self.check_parcel(&name, transfer, &parcel)?;
            ports.receive(self.link(from), parcel.arrives);
            // SAFETY: the caller's promise.
            data::store(unsafe { data::span(transfer) }, &mut parcel.bytes);
        }
        state.clocks[self.rank] = ports.end();
        Ok(())
    }

    fn link(&self, peer: Rank) -> algo::Link {
        let World { layout, network, .. } = &*self.world;
        if layout.machine(peer) == layout.machine(self.rank) {
            network.within
        } else {
            network.between
        }
    }

    /// Who has sent nothing of what this rank waits for.
    fn senders_missing(
        &self,
        state: &State,
        next: &Transfer,
        others: &VecDeque<&Transfer>,
    ) -> Vec<Rank> {
        let mut ranks: Vec<Rank> =
            others.iter().map(|transfer| transfer.peer).chain([next.peer]).collect();
        ranks.sort_unstable();
        ranks.dedup();
        let empty =
            |from: &Rank| state.mail.get(&(*from, self.rank)).is_none_or(VecDeque::is_empty);
        ranks.retain(empty);
        ranks
    }

    fn check_parcel(&self, op: &str, transfer: &Transfer, parcel: &Parcel) -> Result<()> {
        let field = match () {
            () if transfer.dtype != parcel.dtype => "dtype",
            () if transfer.count != parcel.count => "count",
            () => return Ok(()),
        };
        let (rank, peer) = (self.rank, transfer.peer);
        let sent = format!("a message of {} {} to rank {rank}", parcel.count, parcel.dtype);
        let wanted = format!("a message of {} {} from rank {peer}", transfer.count, transfer.dtype);
        let mut by_rank = vec![(peer, sent), (rank, wanted)];
        by_rank.sort_unstable();
        self.world.poison(Poison::Mismatch { field, by_rank: by_rank.clone() });
        Err(Error::Mismatch { op: op.to_owned(), field, by_rank })
    }
}

impl State {
    fn place(&self, rank: Rank, op: &OpDesc, task: &Task) -> Place {
        let Task::Run(bufs) = task else { return Place::Own };
        if op.verb != Verb::AllReduce || op.count == 0 || self.calls.len() == 1 {
            return Place::Own;
        }
        let place = |shared: &Shared| {
            let offset = bufs.output.addr().checked_sub(shared.address)?;
            let alive = shared.memory.strong_count() > 0;
            (alive && offset < shared.bytes)
                .then_some(Place::Shared { id: shared.id, offset: offset as u64 })
        };
        self.shared[rank].iter().find_map(place).unwrap_or(Place::Own)
    }
}

impl Backend for Sim {
    fn name(&self) -> &'static str {
        NAME
    }

    fn rank(&self) -> Rank {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.world.size()
    }

    fn forked(&self) -> bool {
        std::process::id() != self.world.pid
    }

    fn ready(&self) -> Result<()> {
        self.fork_check()?;
        match self.failed.get() {
            Some(error) => Err(Error::Poisoned(Box::new(error.clone()))),
            None => Ok(()),
        }
    }

    unsafe fn run(&self, op: &OpDesc, bufs: RawBufs, wait: Wait) -> Result<()> {
        self.note_failure(self.call(op, Task::Run(bufs), wait)).map(drop)
    }

    unsafe fn exchange(&self, op: &OpDesc, transfers: &[Transfer], wait: Wait) -> Result<()> {
        if op.verb == Verb::Batch {
            // SAFETY: the caller's promise.
            return self.note_failure(unsafe { self.batch(op, transfers, wait) });
        }
        let task = Task::Exchange(transfers.to_vec());
        self.note_failure(self.call(op, task, wait)).map(drop)
    }

    fn alloc(&self, dtype: DType, count: usize) -> Result<RawShared> {
        let op = OpDesc { verb: Verb::Alloc, dtype, op: None, root: None, count };
        let layout = Block::layout(&op)?;
        let none = || Error::InvalidArgument(format!("{op}: more than there is memory"));
        let raw = Block::new(layout).ok_or_else(none)?.share();
        let wait = Wait { patience: crate::Patience::Caller, timeout: None };
        let seq = self.note_failure(self.call(&op, Task::Meet, wait))?;
        let mut state = self.world.state.lock();
        let shared = &mut state.shared[self.rank];
        shared.retain(|shared| shared.memory.strong_count() > 0);
        let address = raw.ptr.as_ptr().addr();
        shared.push(Shared { id: seq + 1, address, bytes: raw.bytes, memory: raw.watch() });
        Ok(raw)
    }

    fn abort(&self, reason: &str) {
        if !self.forked() {
            let reason = reason[..reason.floor_char_boundary(REASON)].to_owned();
            self.world.poison(Poison::Aborted { by: self.rank, reason });
        }
    }
}

impl Drop for Sim {
    fn drop(&mut self) {
        // In a fork, another thread of the parent may have held the lock.
        if !self.forked() {
            self.world.state.lock().left[self.rank] = true;
            self.world.bell.notify_all();
        }
    }
}
