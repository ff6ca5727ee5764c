//! The simulator as a backend: ranks are threads, their data are real, only time is not.
//!
//! A group of threads in shared memory moves the data, compares calls and names who is missing. Around it each rank
//! has a virtual clock. Once all ranks have come to an operation, the first to leave it simulates the operation and
//! sets the clocks of all. Messages between pairs need no meeting: the time at which each arrives waits in the mail.

#![expect(unsafe_code, reason = "implements the calls that take type-erased memory")]

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use parking_lot::Mutex;

use super::engine::{self, Failure, Outcome, Ports, duration, time};
use super::network::{Fault, Network};
use super::queue::Time;
use super::{NAME, schedules};
use crate::algo::{self, Buf, Costs, Layout, Link, Region, Round, Schedule};
use crate::backend::host::{self, Host};
use crate::backend::{Backend, RawBufs, RawShared, Transfer, TransferMemory, Wait};
use crate::{DType, Error, GroupOptions, OpDesc, Rank, Result, Verb};

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
        clocks: vec![0; world_size],
        begun: vec![0; world_size],
        rounds: vec![Round::default(); world_size],
        simulated: 0,
        done: vec![None; world_size],
        mail: HashMap::new(),
    };
    let world = Arc::new(World {
        costs: network.costs(),
        meeting: time(network.meeting(world_size)),
        network,
        layout,
        options: options.clone(),
        state: Mutex::new(state),
        failure: OnceLock::new(),
    });
    let hosts = host::threads::group(world_size, options)?;
    let sim = |host| Sim { host, world: Arc::clone(&world), failed: OnceLock::new() };
    Ok((hosts.into_iter().map(sim).collect(), Clocks(world)))
}

/// One rank of a simulated group.
#[derive(Debug)]
pub(crate) struct Sim {
    /// Moves the data.
    host: Host,
    world: Arc<World>,
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
    state: Mutex<State>,
    /// The simulated failure that ended the group.
    failure: OnceLock<Failure>,
}

/// What changes; vectors are by rank.
#[derive(Debug)]
struct State {
    clocks: Vec<Time>,
    /// Operations that the rank has come to.
    begun: Vec<u64>,
    /// What the rank sends and receives in the last of them, if that is an exchange.
    rounds: Vec<Round>,
    /// Operations that have been simulated.
    simulated: u64,
    /// When the rank was done with the last of them; `None` if it never was.
    done: Vec<Option<Time>>,
    /// By sender and receiver: when messages arrive.
    mail: HashMap<(Rank, Rank), VecDeque<Time>>,
}

impl World {
    /// The group's simulated failure, as a rank reports it.
    fn failure(&self, rank: Rank, op: &OpDesc) -> Option<Error> {
        let op = format!("{} of group {}", op.verb, self.options.name);
        self.failure.get().map(|failure| engine::error(rank, Some(failure), &op))
    }

    fn first_death(&self) -> Option<(Rank, Time)> {
        let deaths = self.network.faults.iter().filter_map(|fault| match *fault {
            Fault::Death { rank, at } => Some((rank, time(at))),
            _ => None,
        });
        deaths.min_by_key(|&(_, at)| at)
    }

    /// Simulates the operation that all ranks have come to, and sets their clocks.
    fn simulate(&self, state: &mut State, op: &OpDesc) {
        let start = state.clocks.iter().copied().max().unwrap_or(0) + self.meeting;
        let rounds = state.rounds.iter_mut().map(std::mem::take).collect();
        let outcome = self.outcome(op, rounds, start);
        let gave_up = outcome.failure.as_ref().map_or(start, Failure::at);
        if let Some(failure) = outcome.failure {
            self.failure.get_or_init(|| failure);
        }
        state.clocks = outcome.done.iter().map(|done| done.unwrap_or(gave_up)).collect();
        state.done = outcome.done;
        state.simulated += 1;
    }

    fn outcome(&self, op: &OpDesc, rounds: Vec<Round>, start: Time) -> Outcome {
        // Who is dead by now did not come.
        if let Some((rank, at)) = self.first_death().filter(|&(_, at)| at <= start) {
            let at = at + time(Duration::from_secs_f64(self.network.between.latency));
            return Outcome::all_failed(self.layout.world(), Failure::Died { at, rank });
        }
        let schedules = if op.verb.is_run() {
            let algorithm = algo::choose(op, &self.layout, self.options.determinism, &self.costs);
            schedules(algorithm, op, &self.layout, &self.costs)
        } else {
            rounds.into_iter().map(Schedule::once).collect()
        };
        engine::run(&self.network, &self.layout, &schedules, start)
    }

    fn link(&self, a: Rank, b: Rank) -> Link {
        let inside = self.layout.machine(a) == self.layout.machine(b);
        if inside { self.network.within } else { self.network.between }
    }
}

impl Sim {
    fn rank(&self) -> Rank {
        self.host.rank()
    }

    fn remember<T>(&self, result: Result<T>) -> Result<T> {
        result.inspect_err(|error| {
            self.failed.get_or_init(|| error.clone());
        })
    }

    /// What a rank does before anything else.
    fn begin(&self, op: &OpDesc) -> Result<()> {
        self.ready()?;
        self.world.failure(self.rank(), op).map_or(Ok(()), Err)
    }

    /// Has the host group do an operation of all ranks, then simulates it unless another rank has.
    fn step<T>(&self, op: &OpDesc, round: Round, run: impl FnOnce() -> Result<T>) -> Result<T> {
        let (world, rank) = (&*self.world, self.rank());
        self.begin(op)?;
        let mut state = world.state.lock();
        state.begun[rank] += 1;
        state.rounds[rank] = round;
        drop(state);
        let value = run().map_err(|error| world.failure(rank, op).unwrap_or(error))?;
        let mut state = world.state.lock();
        // All have come: the host group compares calls before it lets anybody go.
        if state.simulated < state.begun[rank] {
            world.simulate(&mut state, op);
        }
        match state.done[rank] {
            Some(_) => Ok(value),
            None => Err(world.failure(rank, op).unwrap_or_else(|| engine::error(rank, None, "it"))),
        }
    }

    /// Messages between pairs.
    ///
    /// # Safety
    ///
    /// As [`Backend::exchange`].
    unsafe fn batch(&self, op: &OpDesc, transfers: &[Transfer], wait: Wait) -> Result<()> {
        let (world, rank) = (&*self.world, self.rank());
        self.begin(op)?;
        let mut state = world.state.lock();
        let now = state.clocks[rank];
        if let Some((_, at)) = world.first_death().filter(|&(dead, at)| dead == rank && at <= now) {
            drop(state);
            let failure = world.failure.get_or_init(|| Failure::Died { at, rank });
            let error = engine::error(rank, Some(failure), &op.verb.to_string());
            self.host.abort(&error.to_string());
            return Err(error);
        }
        let mut ports = Ports::new(now);
        for transfer in transfers.iter().filter(|transfer| is_send(transfer)) {
            let arrives = ports.send(world.link(rank, transfer.peer), bytes(transfer));
            state.mail.entry((rank, transfer.peer)).or_default().push_back(arrives);
        }
        drop(state);
        // SAFETY: the caller's promise.
        let moved = unsafe { self.host.exchange(op, transfers, wait) };
        moved.map_err(|error| world.failure(rank, op).unwrap_or(error))?;
        let mut state = world.state.lock();
        for transfer in transfers.iter().filter(|transfer| !is_send(transfer)) {
            let mail = state.mail.get_mut(&(transfer.peer, rank)).and_then(VecDeque::pop_front);
            let arrives = mail.expect("its time is in the mail before a message is sent");
            ports.receive(world.link(rank, transfer.peer), arrives);
        }
        state.clocks[rank] = ports.end();
        Ok(())
    }
}

fn is_send(transfer: &Transfer) -> bool {
    matches!(transfer.memory, TransferMemory::Send(_))
}

fn bytes(transfer: &Transfer) -> usize {
    transfer.count * transfer.dtype.size()
}

/// One rank's part of an exchange; where its blocks lie does not matter.
fn round(transfers: &[Transfer]) -> Round {
    let mut round = Round::default();
    for transfer in transfers {
        let region = Region { buf: Buf::Output, offset: 0, len: bytes(transfer) };
        match transfer.memory {
            TransferMemory::Send(_) => round.send(transfer.peer, region),
            TransferMemory::Receive(_) => round.recv(transfer.peer, region),
        }
    }
    round
}

impl Backend for Sim {
    fn name(&self) -> &'static str {
        NAME
    }

    fn rank(&self) -> Rank {
        self.host.rank()
    }

    fn world_size(&self) -> usize {
        self.host.world_size()
    }

    fn forked(&self) -> bool {
        self.host.forked()
    }

    fn ready(&self) -> Result<()> {
        match self.failed.get() {
            Some(error) if !self.forked() => Err(Error::Poisoned(Box::new(error.clone()))),
            _ => self.host.ready(),
        }
    }

    unsafe fn run(&self, op: &OpDesc, bufs: RawBufs, wait: Wait) -> Result<()> {
        // SAFETY: the caller's promise.
        self.remember(self.step(op, Round::default(), || unsafe { self.host.run(op, bufs, wait) }))
    }

    unsafe fn exchange(&self, op: &OpDesc, transfers: &[Transfer], wait: Wait) -> Result<()> {
        if op.verb == Verb::Batch {
            // SAFETY: the caller's promise.
            return self.remember(unsafe { self.batch(op, transfers, wait) });
        }
        self.remember(self.step(op, round(transfers), || {
            // SAFETY: the caller's promise.
            unsafe { self.host.exchange(op, transfers, wait) }
        }))
    }

    fn alloc(&self, dtype: DType, count: usize) -> Result<RawShared> {
        let op = OpDesc { verb: Verb::Alloc, dtype, op: None, root: None, count };
        self.remember(self.step(&op, Round::default(), || self.host.alloc(dtype, count)))
    }

    fn health(&self) -> Result<()> {
        self.ready()?;
        self.host.health()
    }

    fn abort(&self, reason: &str) {
        self.host.abort(reason);
    }
}
