//! The discrete-event engine: executes the schedules of all ranks in virtual time.
//!
//! A message has three steps. The sender starts it, `per_message` after its previous one. The
//! interface of the sender's machine transmits it, after the messages started before. `latency`
//! after transmission begins, the first byte reaches the receiver's machine, and that machine's
//! interface receives the message, after those that arrived before. An interface handles messages
//! in time order, so transmission and arrival are events. If no other rank can use the sender's
//! interface, transmission needs no event and the rank can run ahead: a message then costs one
//! event. A round ends when its messages are done and its local work has taken its time; this needs
//! no event, because it affects only this rank.

use std::time::Duration;

use super::network::{Fault, Network};
use super::queue::{Message, MessageEvent, Queue, Time};
use crate::algo::{Layout, Link, Local, Region, Round, Schedule};
use crate::{Error, Rank};

/// Why the group failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum SimFailure {
    /// `rank` died; its peers notice at `at`.
    Died { at: Time, rank: Rank },
    /// `by` timed out waiting for `missing`.
    TimedOut { at: Time, waited: Time, by: Rank, missing: Vec<Rank> },
}

impl SimFailure {
    pub(super) fn at(&self) -> Time {
        match self {
            Self::Died { at, .. } | Self::TimedOut { at, .. } => *at,
        }
    }
}

/// Bytes that a machine's network interface carried.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Bytes sent to other machines.
    pub sent: u64,
    /// Bytes received from other machines.
    pub received: u64,
}

/// Result of a simulation.
#[derive(Debug)]
pub(super) struct Outcome {
    /// When each rank finished; `None` if it did not.
    pub(super) done: Vec<Option<Time>>,
    /// The first failure, if a rank did not finish.
    pub(super) failure: Option<SimFailure>,
    pub(super) messages: u64,
    /// By machine.
    pub(super) interfaces: Vec<Traffic>,
}

impl Outcome {
    /// No rank finished.
    pub(super) fn all_failed(world: usize, failure: SimFailure) -> Self {
        let done = vec![None; world];
        Self { done, failure: Some(failure), messages: 0, interfaces: Vec::new() }
    }
}

/// Times of one rank's messages on links that it shares with no other rank.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ports {
    /// When the rank can start its next message.
    free: Time,
    departed: Time,
    arrived: Time,
}

impl Ports {
    pub(super) fn new(now: Time) -> Self {
        Self { free: now, departed: now, arrived: now }
    }

    /// Sends a message; returns when it arrives.
    pub(super) fn send(&mut self, link: Link, bytes: usize) -> Time {
        let link = LinkTicks::new(link);
        self.free = self.free.saturating_add(link.per_message);
        let begin = self.free.max(self.departed);
        self.departed = begin.saturating_add(link.transfer_time(bytes));
        self.departed.saturating_add(link.latency)
    }

    /// Receives a message that arrives at `at`.
    pub(super) fn receive(&mut self, link: Link, at: Time) {
        self.arrived = at.max(self.arrived.saturating_add(LinkTicks::new(link).per_message));
    }

    /// Returns when the last message is done.
    pub(super) fn end(self) -> Time {
        self.departed.max(self.arrived)
    }
}

/// Executes the schedules of all ranks, which all begin at `start`.
pub(super) fn run(
    network: &Network,
    layout: &Layout,
    schedules: &[Schedule],
    start: Time,
) -> Outcome {
    let mut engine = Engine::new(network, layout, schedules, start);
    for rank in 0..schedules.len() {
        engine.begin(rank);
        engine.advance(rank);
    }
    while let Some((time, message)) = engine.queue.take() {
        match message.at {
            MessageEvent::Start => {
                engine.transmit(time, message);
                engine.ranks[message.from as usize].queued_sends -= 1;
                engine.advance(message.from as usize);
            }
            MessageEvent::Arrive => engine.arrive(time, message),
        }
    }
    engine.outcome()
}

/// Costs of a [`Link`] in picoseconds.
#[derive(Clone, Copy, Debug)]
struct LinkTicks {
    latency: Time,
    per_message: Time,
    per_byte: f64,
}

impl LinkTicks {
    fn new(link: Link) -> Self {
        Self {
            latency: ticks(link.latency),
            per_message: ticks(link.per_message),
            per_byte: link.per_byte * 1e12,
        }
    }

    fn transfer_time(self, bytes: usize) -> Time {
        round_to_tick(bytes as f64 * self.per_byte)
    }
}

/// Progress of one rank.
#[derive(Debug)]
struct Progress {
    /// Current round.
    round: usize,
    /// When the round began.
    round_start: Time,
    /// When the last message sent in the round has left.
    departed: Time,
    /// When the last message received so far has arrived; never decreases.
    arrived: Time,
    /// Duration of the round's local work.
    local_work: Time,
    /// Messages of the round not received yet.
    missing: u32,
    /// Messages of the round whose transmission is still an event in the queue.
    queued_sends: u32,
    /// When this rank can start its next message.
    free: Time,
    /// When this rank's links within its machine are free, for sending and for receiving.
    inside: [Time; 2],
    state: RankState,
    /// Whether it is the only rank of its machine.
    alone: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RankState {
    Running,
    Done,
    /// Died or timed out.
    Stopped,
}

struct Engine<'a> {
    layout: &'a Layout,
    schedules: &'a [Schedule],
    queue: Queue,
    ranks: Vec<Progress>,
    /// For each pair of ranks (see `pair`): messages that the current round still has to receive,
    /// or, if negative, messages that arrived early.
    balance: Vec<i32>,
    /// When each machine's interface is free, for sending and for receiving.
    outside: Vec<[Time; 2]>,
    interfaces: Vec<Traffic>,
    within: LinkTicks,
    between: LinkTicks,
    fold_per_byte: f64,
    timeout: Time,
    /// When each rank dies; [`Time::MAX`] if it does not.
    deaths: Vec<Time>,
    /// Slowdowns of interfaces: machine, start time, factor.
    slow: Vec<(usize, Time, u32)>,
    /// Lost messages: sender, receiver, and the number of messages still to deliver before.
    losses: Vec<(Rank, Rank, u64)>,
    messages: u64,
    failures: Vec<SimFailure>,
    round: Round,
}

impl<'a> Engine<'a> {
    fn new(network: &Network, layout: &'a Layout, schedules: &'a [Schedule], start: Time) -> Self {
        let (world, machines) = (layout.world(), layout.machines());
        let progress = |rank| Progress {
            alone: layout.members(layout.machine(rank)).len() == 1,
            round: 0,
            round_start: start,
            departed: start,
            arrived: start,
            local_work: 0,
            missing: 0,
            queued_sends: 0,
            free: start,
            inside: [start; 2],
            state: RankState::Running,
        };
        let mut deaths = vec![Time::MAX; world];
        let (mut slow, mut losses) = (Vec::new(), Vec::new());
        for fault in &network.faults {
            match *fault {
                Fault::Death { rank, at } => deaths[rank] = deaths[rank].min(time(at)),
                Fault::Slow { rank, at, times } => {
                    slow.push((layout.machine(rank), time(at), times));
                }
                Fault::Loss { from, to, message } => losses.push((from, to, message)),
            }
        }
        Self {
            layout,
            schedules,
            queue: Queue::new(world),
            ranks: (0..world).map(progress).collect(),
            balance: vec![0; world * world],
            outside: vec![[start; 2]; machines],
            interfaces: vec![Traffic::default(); machines],
            within: LinkTicks::new(network.within),
            between: LinkTicks::new(network.between),
            fold_per_byte: network.fold_per_byte * 1e12,
            timeout: time(network.timeout),
            deaths,
            slow,
            losses,
            messages: 0,
            failures: Vec::new(),
            round: Round::default(),
        }
    }

    fn is_dead(&self, rank: Rank, now: Time) -> bool {
        now >= self.deaths[rank] && self.deaths[rank] < Time::MAX
    }

    /// Begins a rank's next round, or marks the rank as done or dead.
    fn begin(&mut self, rank: Rank) {
        let now = self.ranks[rank].round_start;
        if self.is_dead(rank, now) {
            self.ranks[rank].state = RankState::Stopped;
            return;
        }
        if self.ranks[rank].round == self.schedules[rank].rounds {
            self.ranks[rank].state = RankState::Done;
            return;
        }
        let mut round = std::mem::take(&mut self.round);
        self.schedules[rank].round(self.ranks[rank].round, &mut round);
        let (mut missing, world) = (0, self.ranks.len());
        for &(from, _) in &round.recvs {
            let balance = &mut self.balance[pair(from, rank, world)];
            missing += u32::from(*balance >= 0);
            *balance += 1;
        }
        let progress = &mut self.ranks[rank];
        progress.missing = missing;
        progress.departed = now;
        progress.local_work = fold_time(&round, self.fold_per_byte);
        for &(to, region) in &round.sends {
            self.start(rank, to, region);
        }
        self.round = round;
    }

    /// Ends a rank's current round if all its messages are done, begins the next one, and repeats.
    fn advance(&mut self, rank: Rank) {
        loop {
            let progress = &mut self.ranks[rank];
            if progress.state != RankState::Running
                || progress.missing > 0
                || progress.queued_sends > 0
            {
                return;
            }
            let last = progress.round_start.max(progress.departed).max(progress.arrived);
            progress.round_start = last.saturating_add(progress.local_work);
            progress.round += 1;
            self.begin(rank);
        }
    }

    fn start(&mut self, from: Rank, to: Rank, region: Region) {
        let inside = self.layout.machine(from) == self.layout.machine(to);
        let link = if inside { self.within } else { self.between };
        let progress = &mut self.ranks[from];
        let time = progress.round_start.max(progress.free).saturating_add(link.per_message);
        if time > self.deaths[from] {
            return;
        }
        progress.free = time;
        progress.departed = progress.departed.max(time);
        self.messages += 1;
        let message = Message {
            at: MessageEvent::Start,
            from: from as u32,
            to: to as u32,
            bytes: region.len,
        };
        if inside || progress.alone {
            self.transmit(time, message);
        } else {
            // Ranks that share an interface use it in time order.
            progress.queued_sends += 1;
            self.queue.put(time, message);
        }
    }

    /// The sender's link transmits a message.
    fn transmit(&mut self, time: Time, message: Message) {
        let (from, to) = (message.from as usize, message.to as usize);
        let machine = self.layout.machine(from);
        let inside = machine == self.layout.machine(to);
        let (link, slower) = self.link(inside, machine, time);
        let progress = &mut self.ranks[from];
        let free = if inside { &mut progress.inside[0] } else { &mut self.outside[machine][0] };
        let begin = time.max(*free);
        let transfer = link.transfer_time(message.bytes).saturating_mul(slower);
        *free = begin.saturating_add(transfer);
        progress.departed = progress.departed.max(*free);
        if *free > self.deaths[from] {
            return;
        }
        if !inside {
            self.interfaces[machine].sent += message.bytes as u64;
        }
        if !self.is_lost(from, to) {
            let arrives = begin.saturating_add(link.latency);
            self.queue.put(arrives, Message { at: MessageEvent::Arrive, ..message });
        }
    }

    fn link(&self, inside: bool, machine: usize, now: Time) -> (LinkTicks, Time) {
        if inside {
            return (self.within, 1);
        }
        let slow = self.slow.iter().filter(|&&(slow, at, _)| slow == machine && at <= now);
        let factors = slow.map(|&(_, _, times)| Time::from(times));
        (self.between, factors.fold(1, Time::saturating_mul))
    }

    fn is_lost(&mut self, from: Rank, to: Rank) -> bool {
        let mut lost = false;
        for (_, _, before) in self.losses.iter_mut().filter(|loss| (loss.0, loss.1) == (from, to)) {
            lost |= *before == 0;
            *before = before.saturating_sub(1);
        }
        lost
    }

    /// The receiver's link receives a message.
    fn arrive(&mut self, time: Time, message: Message) {
        let (from, to) = (message.from as usize, message.to as usize);
        let machine = self.layout.machine(to);
        let inside = machine == self.layout.machine(from);
        let (link, slower) = self.link(inside, machine, time);
        let progress = &mut self.ranks[to];
        let free = if inside { &mut progress.inside[1] } else { &mut self.outside[machine][1] };
        let transfer = link.transfer_time(message.bytes).saturating_mul(slower);
        *free = time.max(*free).saturating_add(transfer);
        let arrived = (*free).max(progress.arrived.saturating_add(link.per_message));
        if !inside {
            self.interfaces[machine].received += message.bytes as u64;
        }
        if progress.state != RankState::Running {
            return;
        }
        if arrived.saturating_sub(progress.round_start) > self.timeout {
            self.time_out(to);
            return;
        }
        progress.arrived = arrived;
        let balance = &mut self.balance[pair(from, to, self.layout.world())];
        *balance -= 1;
        if *balance >= 0 {
            progress.missing -= 1;
            self.advance(to);
        }
    }

    /// Stops a rank that has waited for the timeout.
    fn time_out(&mut self, rank: Rank) {
        self.ranks[rank].state = RankState::Stopped;
        let at = self.ranks[rank].round_start.saturating_add(self.timeout);
        if self.is_dead(rank, at) {
            return;
        }
        let world = self.ranks.len();
        let missing =
            (0..world).filter(|&from| self.balance[pair(from, rank, world)] > 0).collect();
        self.failures.push(SimFailure::TimedOut { at, waited: self.timeout, by: rank, missing });
    }

    /// Returns the outcome once no event is left; ranks that still wait time out.
    fn outcome(mut self) -> Outcome {
        for rank in 0..self.ranks.len() {
            if self.ranks[rank].state == RankState::Running {
                self.time_out(rank);
            }
        }
        let done = |progress: &Progress| {
            (progress.state == RankState::Done).then_some(progress.round_start)
        };
        let done: Vec<_> = self.ranks.iter().map(done).collect();
        if done.contains(&None) {
            // Peers notice a death one latency later, as they would receive a message.
            let dead = self.deaths.iter().enumerate().filter(|(_, at)| **at < Time::MAX);
            let latency = self.between.latency;
            let notice = |(rank, at): (Rank, &Time)| SimFailure::Died {
                at: at.saturating_add(latency),
                rank,
            };
            self.failures.extend(dead.map(notice));
        }
        Outcome {
            done,
            failure: first_failure(self.failures),
            messages: self.messages,
            interfaces: self.interfaces,
        }
    }
}

/// Index of a pair of ranks in [`Engine::balance`]. Pairs at the same distance are adjacent,
/// because ranks usually send to the same distance at the same time.
fn pair(from: Rank, to: Rank, world: usize) -> usize {
    let ahead = if to >= from { to - from } else { to + world - from };
    ahead * world + from
}

/// Returns the first failure. If several ranks time out at the same time, prefers one whose missing
/// ranks include a rank that did not time out, because the other timeouts follow from it.
fn first_failure(failures: Vec<SimFailure>) -> Option<SimFailure> {
    let at = failures.iter().map(SimFailure::at).min()?;
    let first: Vec<_> = failures.into_iter().filter(|failure| failure.at() == at).collect();
    let timed_out = |rank: Rank| {
        first
            .iter()
            .any(|failure| matches!(failure, SimFailure::TimedOut { by, .. } if *by == rank))
    };
    let is_cause = |failure: &SimFailure| match failure {
        SimFailure::Died { .. } => true,
        SimFailure::TimedOut { missing, .. } => missing.iter().any(|&rank| !timed_out(rank)),
    };
    let cause = first.iter().position(is_cause).unwrap_or(0);
    first.into_iter().nth(cause)
}

/// Returns the duration of a round's local work; only folds take time.
fn fold_time(round: &Round, per_byte: f64) -> Time {
    let bytes = |local: &Local| match local {
        Local::Copy { .. } => 0,
        Local::Fold { prefix, from, .. } => {
            let operands = from.len() + usize::from(prefix.is_some());
            round.sources[from.start].len * (operands - 1).max(1)
        }
    };
    round_to_tick(round.local.iter().map(bytes).sum::<usize>() as f64 * per_byte)
}

/// Returns the error of a rank that did not finish.
pub(super) fn error(rank: Rank, failure: Option<&SimFailure>, op: &str) -> Error {
    let op = op.to_owned();
    match failure {
        Some(&SimFailure::Died { rank: dead, .. }) if dead == rank => {
            Error::Aborted { by: rank, reason: format!("simulated `Fault::Death` in {op}") }
        }
        Some(&SimFailure::Died { rank, .. }) => {
            Error::PeerDied { op, rank, pid: std::process::id() }
        }
        Some(SimFailure::TimedOut { waited, by, missing, .. }) if missing.contains(&rank) => {
            // A peer timed out waiting for this rank.
            let waited = duration(*waited);
            let error = Error::Timeout { op, waited, missing: missing.clone() };
            Error::Aborted { by: *by, reason: error.to_string() }
        }
        Some(SimFailure::TimedOut { waited, missing, .. }) => {
            Error::Timeout { op, waited: duration(*waited), missing: missing.clone() }
        }
        None => Error::Aborted { by: rank, reason: format!("it died before {op} began") },
    }
}

fn ticks(seconds: f64) -> Time {
    round_to_tick(seconds * 1e12)
}

/// Equals `ticks.round()` for non-negative numbers. Without SSE 4.1 `round` is a call into libm;
/// this is inlined.
fn round_to_tick(ticks: f64) -> Time {
    let whole = ticks as i64;
    whole.cast_unsigned() + Time::from(ticks - whole as f64 >= 0.5)
}

/// Converts a duration to ticks.
pub(super) fn time(duration: Duration) -> Time {
    Time::try_from(duration.as_nanos().saturating_mul(1000)).unwrap_or(Time::MAX)
}

/// Converts ticks to a duration.
pub(super) fn duration(time: Time) -> Duration {
    Duration::from_nanos(time / 1000)
}
