//! The discrete-event engine: carries out the schedules of all ranks in virtual time.
//!
//! A message takes three steps. Its sender starts it, `per_message` after the one before; the
//! interface of the sender's machine carries it, after those started before; `latency` later its
//! first byte reaches the other machine, whose interface carries it, after those that came before.
//! Interfaces are used in the order of time, so those two steps are events. Where no other rank can
//! use the sender's interface, the step needs no event, and a rank can run ahead: then a message
//! costs one event. A round is over when its messages are, and folding has taken its time; that
//! needs no event at all, because it concerns this rank alone.

use std::time::Duration;

use super::network::{Fault, Network};
use super::queue::{Message, MessageEvent, Queue, Time};
use crate::algo::{Layout, Link, Local, Region, Round, Schedule};
use crate::{Error, Rank};

/// Why ranks cannot go on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Failure {
    /// Noticed at a time.
    Died { at: Time, rank: Rank },
    /// `by` has waited long enough for `missing`.
    TimedOut { at: Time, waited: Time, by: Rank, missing: Vec<Rank> },
}

impl Failure {
    pub(super) fn at(&self) -> Time {
        match self {
            Self::Died { at, .. } | Self::TimedOut { at, .. } => *at,
        }
    }
}

/// What one direction of an interface carried.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Bytes sent to other machines.
    pub sent: u64,
    /// Bytes received from other machines.
    pub received: u64,
}

/// How it went.
#[derive(Debug)]
pub(super) struct Outcome {
    /// When each rank was done; `None` if it never was.
    pub(super) done: Vec<Option<Time>>,
    /// The first failure, for those who were not.
    pub(super) failure: Option<Failure>,
    pub(super) messages: u64,
    /// By machine.
    pub(super) interfaces: Vec<Traffic>,
}

impl Outcome {
    /// Nobody got anything.
    pub(super) fn all_failed(world: usize, failure: Failure) -> Self {
        let done = vec![None; world];
        Self { done, failure: Some(failure), messages: 0, interfaces: Vec::new() }
    }
}

/// One rank's side of messages that nobody else is in the way of.
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

    /// Sends a message, and says when it arrives.
    pub(super) fn send(&mut self, link: Link, bytes: usize) -> Time {
        let pace = Pace::new(link);
        self.free += pace.per_message;
        self.departed = self.free.max(self.departed) + pace.carry(bytes);
        self.departed + pace.latency
    }

    /// Takes in a message that arrives at a time.
    pub(super) fn receive(&mut self, link: Link, at: Time) {
        self.arrived = at.max(self.arrived + Pace::new(link).per_message);
    }

    /// When all is done.
    pub(super) fn end(self) -> Time {
        self.departed.max(self.arrived)
    }
}

/// Carries out the schedules of all ranks, who all begin at `start`.
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
                engine.carry_out(time, message);
                engine.ranks[message.from as usize].leaving -= 1;
                engine.advance(message.from as usize);
            }
            MessageEvent::Arrive => engine.arrive(time, message),
        }
    }
    engine.outcome()
}

/// A link in picoseconds.
#[derive(Clone, Copy, Debug)]
struct Pace {
    latency: Time,
    per_message: Time,
    per_byte: f64,
}

impl Pace {
    fn new(link: Link) -> Self {
        Self {
            latency: ticks(link.latency),
            per_message: ticks(link.per_message),
            per_byte: link.per_byte * 1e12,
        }
    }

    fn carry(self, bytes: usize) -> Time {
        nearest(bytes as f64 * self.per_byte)
    }
}

/// One rank's state.
#[derive(Debug)]
struct Runner {
    /// The round under way.
    round: usize,
    /// When it began.
    since: Time,
    /// When its last message had left.
    departed: Time,
    /// When its last message had come; never less than for any message before.
    arrived: Time,
    /// How long the local work of the round takes.
    work: Time,
    /// Messages of the round still to come.
    missing: u32,
    /// Messages of the round of which is not known yet when they leave.
    leaving: u32,
    /// When this rank can start its next message.
    free: Time,
    /// Out of and into this rank, within its machine.
    inside: [Time; 2],
    state: State,
    /// On its machine.
    alone: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Running,
    Done,
    /// Died, or gave up waiting.
    Stopped,
}

struct Engine<'a> {
    layout: &'a Layout,
    schedules: &'a [Schedule],
    queue: Queue,
    ranks: Vec<Runner>,
    /// By pair, see `pair`: messages wanted by the round under way, or if negative, come early.
    balance: Vec<i32>,
    /// Out of and into each machine: when it is free.
    outside: Vec<[Time; 2]>,
    interfaces: Vec<Traffic>,
    within: Pace,
    between: Pace,
    fold_per_byte: f64,
    timeout: Time,
    /// By rank.
    deaths: Vec<Time>,
    /// Which machines become slower, when, and by how much.
    slow: Vec<(usize, Time, u32)>,
    /// Messages to lose, and how many come before.
    losses: Vec<(Rank, Rank, u64)>,
    messages: u64,
    failures: Vec<Failure>,
    round: Round,
}

impl<'a> Engine<'a> {
    fn new(network: &Network, layout: &'a Layout, schedules: &'a [Schedule], start: Time) -> Self {
        let (world, machines) = (layout.world(), layout.machines());
        let runner = |rank| Runner {
            alone: layout.members(layout.machine(rank)).len() == 1,
            round: 0,
            since: start,
            departed: start,
            arrived: start,
            work: 0,
            missing: 0,
            leaving: 0,
            free: start,
            inside: [start; 2],
            state: State::Running,
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
            ranks: (0..world).map(runner).collect(),
            balance: vec![0; world * world],
            outside: vec![[start; 2]; machines],
            interfaces: vec![Traffic::default(); machines],
            within: Pace::new(network.within),
            between: Pace::new(network.between),
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

    /// Begins the round that a rank has reached, if there is one.
    fn begin(&mut self, rank: Rank) {
        let now = self.ranks[rank].since;
        if now >= self.deaths[rank] {
            self.ranks[rank].state = State::Stopped;
            return;
        }
        if self.ranks[rank].round == self.schedules[rank].rounds {
            self.ranks[rank].state = State::Done;
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
        let runner = &mut self.ranks[rank];
        runner.missing = missing;
        runner.departed = now;
        runner.work = folding(&round, self.fold_per_byte);
        for &(to, region) in &round.sends {
            self.start(rank, to, region);
        }
        self.round = round;
    }

    /// Ends rounds of a rank for as long as they have all they need, and begins those that follow.
    fn advance(&mut self, rank: Rank) {
        loop {
            let runner = &mut self.ranks[rank];
            if runner.state != State::Running || runner.missing > 0 || runner.leaving > 0 {
                return;
            }
            let last = runner.since.max(runner.departed).max(runner.arrived);
            runner.since = last + runner.work;
            runner.round += 1;
            self.begin(rank);
        }
    }

    fn start(&mut self, from: Rank, to: Rank, region: Region) {
        let inside = self.layout.machine(from) == self.layout.machine(to);
        let pace = if inside { self.within } else { self.between };
        let runner = &mut self.ranks[from];
        let time = runner.since.max(runner.free) + pace.per_message;
        if time > self.deaths[from] {
            return;
        }
        runner.free = time;
        runner.departed = runner.departed.max(time);
        self.messages += 1;
        let message = Message {
            at: MessageEvent::Start,
            from: from as u32,
            to: to as u32,
            bytes: region.len,
        };
        if inside || runner.alone {
            self.carry_out(time, message);
        } else {
            // Ranks that share an interface use it in the order of time.
            runner.leaving += 1;
            self.queue.put(time, message);
        }
    }

    /// The sender's side of the link carries a message.
    fn carry_out(&mut self, time: Time, message: Message) {
        let (from, to) = (message.from as usize, message.to as usize);
        let machine = self.layout.machine(from);
        let inside = machine == self.layout.machine(to);
        let (pace, slower) = self.pace(inside, machine, time);
        let runner = &mut self.ranks[from];
        let free = if inside { &mut runner.inside[0] } else { &mut self.outside[machine][0] };
        let begin = time.max(*free);
        *free = begin + pace.carry(message.bytes) * slower;
        runner.departed = runner.departed.max(*free);
        if *free > self.deaths[from] {
            return;
        }
        if !inside {
            self.interfaces[machine].sent += message.bytes as u64;
        }
        if !self.is_lost(from, to) {
            self.queue.put(begin + pace.latency, Message { at: MessageEvent::Arrive, ..message });
        }
    }

    fn pace(&self, inside: bool, machine: usize, now: Time) -> (Pace, Time) {
        if inside {
            return (self.within, 1);
        }
        let slow = self.slow.iter().filter(|&&(slow, at, _)| slow == machine && at <= now);
        (self.between, slow.map(|&(_, _, times)| Time::from(times)).product())
    }

    fn is_lost(&mut self, from: Rank, to: Rank) -> bool {
        let Some(index) = self.losses.iter().position(|loss| (loss.0, loss.1) == (from, to)) else {
            return false;
        };
        let before = &mut self.losses[index].2;
        let lost = *before == 0;
        *before = before.saturating_sub(1);
        lost
    }

    /// The receiver's side of the link carries a message.
    fn arrive(&mut self, time: Time, message: Message) {
        let (from, to) = (message.from as usize, message.to as usize);
        let machine = self.layout.machine(to);
        let inside = machine == self.layout.machine(from);
        let (pace, slower) = self.pace(inside, machine, time);
        let runner = &mut self.ranks[to];
        let free = if inside { &mut runner.inside[1] } else { &mut self.outside[machine][1] };
        *free = time.max(*free) + pace.carry(message.bytes) * slower;
        let arrived = (*free).max(runner.arrived + pace.per_message);
        if !inside {
            self.interfaces[machine].received += message.bytes as u64;
        }
        if runner.state != State::Running {
            return;
        }
        if arrived.saturating_sub(runner.since) > self.timeout {
            self.give_up(to);
            return;
        }
        runner.arrived = arrived;
        let balance = &mut self.balance[pair(from, to, self.layout.world())];
        *balance -= 1;
        if *balance >= 0 {
            runner.missing -= 1;
            self.advance(to);
        }
    }

    /// A rank has waited too long.
    fn give_up(&mut self, rank: Rank) {
        self.ranks[rank].state = State::Stopped;
        let at = self.ranks[rank].since.saturating_add(self.timeout);
        if at >= self.deaths[rank] {
            return;
        }
        let world = self.ranks.len();
        let missing =
            (0..world).filter(|&from| self.balance[pair(from, rank, world)] > 0).collect();
        self.failures.push(Failure::TimedOut { at, waited: self.timeout, by: rank, missing });
    }

    /// Nothing is under way any more: who still waits, waits in vain.
    fn outcome(mut self) -> Outcome {
        for rank in 0..self.ranks.len() {
            if self.ranks[rank].state == State::Running {
                self.give_up(rank);
            }
        }
        let done = |runner: &Runner| (runner.state == State::Done).then_some(runner.since);
        let done: Vec<_> = self.ranks.iter().map(done).collect();
        if done.contains(&None) {
            // A death is noticed as a message would be.
            let dead = self.deaths.iter().enumerate().filter(|(_, at)| **at < Time::MAX);
            let latency = self.between.latency;
            let notice =
                |(rank, at): (Rank, &Time)| Failure::Died { at: at.saturating_add(latency), rank };
            self.failures.extend(dead.map(notice));
        }
        Outcome {
            done,
            failure: first_of(self.failures),
            messages: self.messages,
            interfaces: self.interfaces,
        }
    }
}

/// The number of a pair of ranks. Ranks that do the same reach as far ahead, and so have their pairs
/// side by side.
fn pair(from: Rank, to: Rank, world: usize) -> usize {
    let ahead = if to >= from { to - from } else { to + world - from };
    ahead * world + from
}

/// The first failure. Of ranks that give up at once, one that waits for a rank which does not: the
/// others wait for one another, and for that one.
fn first_of(failures: Vec<Failure>) -> Option<Failure> {
    let at = failures.iter().map(Failure::at).min()?;
    let first: Vec<_> = failures.into_iter().filter(|failure| failure.at() == at).collect();
    let gives_up = |rank: Rank| {
        first.iter().any(|failure| matches!(failure, Failure::TimedOut { by, .. } if *by == rank))
    };
    let is_cause = |failure: &Failure| match failure {
        Failure::Died { .. } => true,
        Failure::TimedOut { missing, .. } => missing.iter().any(|&rank| !gives_up(rank)),
    };
    let cause = first.iter().position(is_cause).unwrap_or(0);
    first.into_iter().nth(cause)
}

/// How long the local work of a round takes.
fn folding(round: &Round, per_byte: f64) -> Time {
    let bytes = |local: &Local| match local {
        Local::Copy { .. } | Local::Widen { .. } | Local::Narrow { .. } => 0,
        Local::Fold { to, from, .. } => to.len * from.len().saturating_sub(1).max(1),
    };
    nearest(round.local.iter().map(bytes).sum::<usize>() as f64 * per_byte)
}

/// What a rank reports that was not done.
pub(super) fn error(rank: Rank, failure: Option<&Failure>, op: &str) -> Error {
    let op = op.to_owned();
    match failure {
        Some(&Failure::Died { rank: dead, .. }) if dead == rank => {
            Error::Aborted { by: rank, reason: format!("it died during {op}, as planned") }
        }
        Some(&Failure::Died { rank, .. }) => Error::PeerDied { op, rank, pid: std::process::id() },
        Some(Failure::TimedOut { waited, by, missing, .. }) if missing.contains(&rank) => {
            // The others have given this rank up.
            let waited = duration(*waited);
            let error = Error::Timeout { op, waited, missing: missing.clone() };
            Error::Aborted { by: *by, reason: error.to_string() }
        }
        Some(Failure::TimedOut { waited, missing, .. }) => {
            Error::Timeout { op, waited: duration(*waited), missing: missing.clone() }
        }
        None => Error::Aborted { by: rank, reason: format!("it was dead before {op}") },
    }
}

fn ticks(seconds: f64) -> Time {
    nearest(seconds * 1e12)
}

/// What `round` gives for numbers that are not negative, but not as a call, as it would be for want of
/// SSE 4.1.
fn nearest(ticks: f64) -> Time {
    let whole = ticks as i64;
    whole.cast_unsigned() + Time::from(ticks - whole as f64 >= 0.5)
}

/// A duration in ticks.
pub(super) fn time(duration: Duration) -> Time {
    Time::try_from(duration.as_nanos().saturating_mul(1000)).unwrap_or(Time::MAX)
}

/// Ticks as a duration.
pub(super) fn duration(time: Time) -> Duration {
    Duration::from_nanos(time / 1000)
}
