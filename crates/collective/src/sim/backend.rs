//! The simulator as a backend: ranks are threads with real data and virtual clocks.
//!
//! A host group of threads moves the data, compares calls and reports missing ranks. Each rank has
//! a virtual clock. Once all ranks have entered an operation, the first rank to leave it simulates
//! the operation and sets all clocks. Point-to-point messages need no such synchronization: the
//! sender records each message's arrival time for its receiver.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use parking_lot::Mutex;

use super::engine::{self, Outcome, Ports, SimFailure, duration, time};
use super::network::{Fault, Network};
use super::queue::Time;
use super::{NAME, schedules};
use crate::algo::{self, Buf, Layout, Link, Region, Round, Schedule};
use crate::backend::core::{Direction, GroupCore, HostBackend, SpanTransfer};
use crate::backend::failure::{self, Cause};
use crate::backend::host::{self, Host};
use crate::backend::{Backend as _, RawShared, Wait};
use crate::memory::Span;
use crate::{Error, GroupOptions, OpDesc, Rank, Result, Verb};

/// The virtual clocks of a simulated group.
#[derive(Clone, Debug)]
pub struct Clocks(Arc<World>);

impl Clocks {
    /// Returns a rank's virtual time since the group was made.
    ///
    /// # Panics
    ///
    /// If `rank` is out of range.
    pub fn now(&self, rank: Rank) -> Duration {
        duration(self.0.state.lock().clocks[rank])
    }

    /// Advances a rank's clock, to simulate computation.
    ///
    /// # Panics
    ///
    /// If `rank` is out of range.
    pub fn advance(&self, rank: Rank, by: Duration) {
        let clock = &mut self.0.state.lock().clocks[rank];
        *clock = clock.saturating_add(time(by));
    }
}

/// Creates all ranks of a group, in order, and their clocks.
pub(crate) fn group(
    world_size: usize,
    network: Network,
    options: &GroupOptions,
) -> Result<(Vec<Sim>, Clocks)> {
    let layout = network.layout(world_size)?;
    let state = SimState {
        clocks: vec![0; world_size],
        rounds: vec![Round::default(); world_size],
        done: vec![None; world_size],
        arrivals: HashMap::new(),
    };
    let world = Arc::new(World {
        network,
        layout,
        options: options.clone(),
        state: Mutex::new(state),
        failure: OnceLock::new(),
    });
    let sim = |(rank, host)| {
        let what = (NAME, "requested".into());
        let core = GroupCore::new(what, (rank, world_size), world_size, options)?;
        Ok(Sim { host, world: Arc::clone(&world), core })
    };
    let hosts = host::threads::group(world_size, options)?.into_iter();
    let sims = hosts.enumerate().map(sim).collect::<Result<_>>()?;
    Ok((sims, Clocks(world)))
}

/// One rank of a simulated group.
#[derive(Debug)]
pub(crate) struct Sim {
    /// Moves the data.
    host: Host,
    world: Arc<World>,
    core: GroupCore,
}

/// State shared by the ranks.
#[derive(Debug)]
struct World {
    network: Network,
    layout: Layout,
    options: GroupOptions,
    state: Mutex<SimState>,
    /// The simulated failure that ended the group.
    failure: OnceLock<SimFailure>,
}

/// The mutable state; vectors are indexed by rank.
#[derive(Debug)]
struct SimState {
    clocks: Vec<Time>,
    /// The rank's messages in the latest operation that it has entered, if that is an exchange.
    rounds: Vec<Round>,
    /// If the operation that the rank is in has been simulated: when the rank finished it, or
    /// `None` if it did not.
    done: Vec<Option<Option<Time>>>,
    /// Arrival times of messages that have not been received, by sender and receiver.
    arrivals: HashMap<(Rank, Rank), VecDeque<Time>>,
}

impl World {
    /// Returns the group's simulated failure, as an error of `rank`.
    fn failure(&self, rank: Rank, op: &OpDesc) -> Option<Error> {
        let op = format!("{} of group {}", op.verb, self.options.name);
        self.failure.get().map(|failure| engine::error(rank, Some(failure), &op))
    }

    /// Returns the first death of the ranks that `of` accepts.
    fn first_death(&self, of: impl Fn(Rank) -> bool) -> Option<(Rank, Time)> {
        let deaths = self.network.faults.iter().filter_map(|fault| match *fault {
            Fault::Death { rank, at } if of(rank) => Some((rank, time(at))),
            _ => None,
        });
        deaths.min_by_key(|&(_, at)| at)
    }

    /// Simulates the operation that all ranks have entered, and sets their clocks.
    fn simulate(&self, state: &mut SimState, op: &OpDesc) {
        let start = state.clocks.iter().copied().max().unwrap_or(0);
        let start = start.saturating_add(time(self.network.meeting(self.layout.world())));
        let rounds = state.rounds.iter_mut().map(std::mem::take).collect();
        let outcome = self.outcome(op, rounds, start);
        let gave_up = outcome.failure.as_ref().map_or(start, SimFailure::at);
        if let Some(failure) = outcome.failure {
            self.failure.get_or_init(|| failure);
        }
        state.clocks = outcome.done.iter().map(|done| done.unwrap_or(gave_up)).collect();
        state.done = outcome.done.into_iter().map(Some).collect();
    }

    fn outcome(&self, op: &OpDesc, rounds: Vec<Round>, start: Time) -> Outcome {
        // A rank that died before `start` does not take part.
        if let Some((rank, at)) = self.first_death(|_| true).filter(|&(_, at)| at <= start) {
            let latency = time(Duration::from_secs_f64(self.network.between.latency));
            let at = at.saturating_add(latency);
            return Outcome::all_failed(self.layout.world(), SimFailure::Died { at, rank });
        }
        let schedules = if op.verb.is_run() {
            let costs = self.network.costs();
            let algorithm = algo::choose(op, &self.layout, self.options.determinism, &costs);
            schedules(algorithm, op, &self.layout, &costs)
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
    /// Checks that the group is usable, before an operation.
    fn begin(&self, op: &OpDesc) -> Result<()> {
        self.core.ready()?;
        self.world.failure(self.core.rank, op).map_or(Ok(()), Err)
    }

    /// Runs an operation of all ranks on the host group, then simulates it unless another rank has
    /// done so.
    fn step<T>(&self, op: &OpDesc, round: Round, run: impl FnOnce() -> Result<T>) -> Result<T> {
        let (world, rank) = (&*self.world, self.core.rank);
        self.begin(op)?;
        world.state.lock().rounds[rank] = round;
        let value = run().map_err(|error| world.failure(rank, op).unwrap_or(error))?;
        let mut state = world.state.lock();
        // All ranks have entered, because the host group compares all calls before it returns. So
        // each has taken its result of the operation before.
        if state.done[rank].is_none() {
            world.simulate(&mut state, op);
        }
        match state.done[rank].take() {
            Some(Some(_)) => Ok(value),
            _ => Err(world.failure(rank, op).unwrap_or_else(|| engine::error(rank, None, "it"))),
        }
    }

    /// Runs a batch of point-to-point messages.
    fn batch(&self, op: &OpDesc, blocks: Vec<SpanTransfer<'_>>, wait: Wait) -> Result<()> {
        let (world, rank) = (&*self.world, self.core.rank);
        self.begin(op)?;
        let mut state = world.state.lock();
        let now = state.clocks[rank];
        if let Some((_, at)) = world.first_death(|dead| dead == rank).filter(|&(_, at)| at <= now) {
            drop(state);
            let failure = world.failure.get_or_init(|| SimFailure::Died { at, rank });
            let error = engine::error(rank, Some(failure), &op.verb.to_string());
            self.host.abort(&error.to_string());
            return Err(error);
        }
        let mut ports = Ports::new(now);
        for block in blocks.iter().filter(|block| block.direction == Direction::Send) {
            let arrives = ports.send(world.link(rank, block.peer), block.memory.len());
            state.arrivals.entry((rank, block.peer)).or_default().push_back(arrives);
        }
        drop(state);
        let moved = self.host.exchange_spans(op, blocks.clone(), wait);
        moved.map_err(|error| world.failure(rank, op).unwrap_or(error))?;
        let mut state = world.state.lock();
        for block in blocks.iter().filter(|block| block.direction == Direction::Receive) {
            let arrivals = state.arrivals.get_mut(&(block.peer, rank));
            let arrives = arrivals.and_then(VecDeque::pop_front).expect("recorded by the sender");
            ports.receive(world.link(rank, block.peer), arrives);
        }
        state.clocks[rank] = ports.end();
        Ok(())
    }
}

/// Converts a rank's part of an exchange to a round; the offsets of the blocks do not matter.
fn round(blocks: &[SpanTransfer<'_>]) -> Round {
    let mut round = Round::default();
    for block in blocks {
        let region = Region { buf: Buf::Output, offset: 0, len: block.memory.len() };
        match block.direction {
            Direction::Send => round.send(block.peer, region),
            Direction::Receive => round.recv(block.peer, region),
        }
    }
    round
}

impl HostBackend for Sim {
    fn core(&self) -> &GroupCore {
        &self.core
    }

    fn run_spans(&self, op: &OpDesc, input: Span<'_>, output: Span<'_>, wait: Wait) -> Result<()> {
        self.step(op, Round::default(), || self.host.run_spans(op, input, output, wait))
    }

    fn exchange_spans(&self, op: &OpDesc, blocks: Vec<SpanTransfer<'_>>, wait: Wait) -> Result<()> {
        if op.verb == Verb::Batch {
            return self.batch(op, blocks, wait);
        }
        self.step(op, round(&blocks), || self.host.exchange_spans(op, blocks, wait))
    }

    fn alloc_shared(&self, op: &OpDesc) -> Result<RawShared> {
        self.core.note_failure(self.step(op, Round::default(), || self.host.alloc_shared(op)))
    }

    fn failure(&self) -> Option<failure::Failure> {
        self.host.failure()
    }

    fn fail_group(&self, cause: Cause) {
        self.host.fail_group(cause);
    }
}
