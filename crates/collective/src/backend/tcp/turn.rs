//! One rank's turn at one operation: entering, moving what is queued, waiting.
//!
//! Sends and receives are queued per peer ([`lane`](super::lane)) and all go on at once. Entering is
//! a header with the fingerprint to every peer, with the first block right behind it, so that a
//! small operation is one message each way. Blocks behind fingerprints stay in the sockets until all
//! fingerprints have come and are equal: only then is anything received into the caller's memory.
//! In a group of more than [`FEW`] ranks a dissemination barrier carries the fingerprints: in round `k` a rank
//! exchanges headers with the ranks at distance `2^k` on either side. After the last round all ranks have
//! entered, and any two whose calls differ are linked by a pair that has compared them.
//!
//! Waiting is a ladder: try again at once while that is likely to help; yield the core; poll. The
//! group's failure ends it, and the timeout, which begins anew when something has moved, but not
//! while ranks have still to enter. From half of the timeout on, the peers are asked for whom they
//! wait, so that it is not they who are blamed ([`control`](super::control)).

use std::cell::Cell;
use std::io;
use std::time::{Duration, Instant};

use super::Tcp;
use super::control::Control;
use super::frame::Cause;
use super::lane::{Fault, Lane};
use super::link::Link;
use super::sys;
use crate::backend::core::{Direction, GroupCore, SpanTransfer, WaitStep};
use crate::span::Span;
use crate::{BufferLocation, Error, Fingerprint, OpDesc, Rank, Result, Verb, WaitPolicy};

/// Largest group in which every rank sends its fingerprint to every other at once.
pub(super) const FEW: usize = 8;
/// How long a caller tries again at once, when every rank of the machine can have a core.
const SPIN: Duration = Duration::from_micros(50);
/// Time between two questions to the peers, at least and at most.
const ASK: [Duration; 2] = [Duration::from_millis(2), Duration::from_secs(1)];
/// The longest sleep.
const TICK: Duration = Duration::from_secs(3600);

/// An operation under way on this rank.
#[derive(Debug)]
pub(in crate::backend) struct Turn<'a> {
    tcp: &'a Tcp,
    /// By rank; none for this one.
    links: &'a mut [Option<Box<dyn Link>>],
    pub(in crate::backend) op: OpDesc,
    /// Position in the group's history; of no meaning for what not all ranks take part in.
    pub(in crate::backend) seq: u64,
    policy: WaitPolicy,
    pub(in crate::backend) timeout: Duration,
    /// By rank; nothing in that of this one.
    lanes: Vec<Lane<'a>>,
}

/// What to wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Until {
    /// All that was queued has come, which are the fingerprints.
    Entered,
    /// All has come and gone.
    Done,
}

/// Why nothing more can be moved.
#[derive(Debug)]
pub(in crate::backend) enum Stop {
    /// The connection to a rank has failed.
    Lost(Rank, io::Error),
    /// These ranks did not do their part in time.
    Late(Vec<Rank>),
    Failed(Cause),
}

/// A wait so far.
#[derive(Debug)]
struct Pause {
    until: Until,
    since: Option<Instant>,
    asked: Cell<Option<Instant>>,
}

impl<'a> Turn<'a> {
    pub(super) fn new(
        tcp: &'a Tcp,
        links: &'a mut [Option<Box<dyn Link>>],
        op: OpDesc,
        seq: u64,
        policy: WaitPolicy,
        timeout: Duration,
    ) -> Self {
        let lanes = std::iter::repeat_with(Lane::default).take(links.len()).collect();
        Self { tcp, links, op, seq, policy, timeout, lanes }
    }

    pub(in crate::backend) fn rank(&self) -> Rank {
        self.tcp.core.rank
    }

    pub(in crate::backend) fn world(&self) -> usize {
        self.lanes.len()
    }

    /// For example `all_reduce #17 of group default`.
    pub(super) fn name(&self) -> String {
        match self.op.verb {
            verb @ Verb::Batch => format!("{verb} of group {}", self.core().name),
            verb => self.core().name_of(verb, self.seq),
        }
    }

    /// Queues the header that says that this rank has entered, and those of the peers.
    pub(super) fn enter(&mut self) {
        self.enter_at(0);
    }

    /// As [`enter`](Self::enter), for the peers of one round.
    fn enter_at(&mut self, round: u32) {
        let own = self.own();
        let (rank, world, far) = (self.rank(), self.world(), 1 << round);
        let [ahead, behind] = [(rank + far) % world, (rank + world - far) % world];
        for peer in self.core().peers() {
            if self.tells_all() || peer == ahead || peer == behind {
                self.lanes[peer].enter(&own);
            }
        }
    }

    /// Whether fingerprints go to all ranks at once, so that blocks may follow them without waiting.
    pub(super) fn tells_all(&self) -> bool {
        self.world() <= FEW
    }

    /// Fingerprint of this rank's call.
    fn own(&self) -> Fingerprint {
        self.core().fingerprint(&self.op, self.seq, BufferLocation::Private)
    }

    /// Waits until all ranks have entered, and compares what they call. Nothing but
    /// [`enter`](Self::enter) and sends may have been queued, and those only if it
    /// [`tells_all`](Self::tells_all).
    pub(super) fn meet(&mut self) -> Result<()> {
        let rounds = if self.tells_all() { 1 } else { self.world().ilog2() };
        for round in 0..rounds {
            if round > 0 {
                self.enter_at(round);
            }
            self.settle(Until::Entered)?;
            self.compare()?;
        }
        Ok(())
    }

    /// Compares this rank's call with those received so far.
    fn compare(&self) -> Result<()> {
        let own = self.own();
        let entered =
            |rank: Rank| if rank == self.rank() { Some(own) } else { self.lanes[rank].entered };
        let calls = (0..self.world()).filter_map(|rank| Some((rank, entered(rank)?)));
        match self.core().compare(&own, calls, self.name()) {
            // Not all ranks have received the call that differs.
            Err(Error::Mismatch { field, by_rank, .. }) if !self.tells_all() => {
                let cause = Cause::Mismatch { field: field.into(), by_rank };
                Err(self.stopped(Stop::Failed(cause), Duration::ZERO))
            }
            compared => compared,
        }
    }

    /// Queues a block of this operation, unless it is empty.
    pub(super) fn send_block(&mut self, to: Rank, body: Span<'a>) {
        if body.len() > 0 {
            self.lanes[to].send_block(self.seq, body);
        }
    }

    /// Queues a block of this operation, unless it is empty.
    pub(super) fn receive_block(&mut self, from: Rank, body: Span<'a>) {
        if body.len() > 0 {
            self.lanes[from].receive_block(self.seq, body);
        }
    }

    /// Queues those messages between pairs of ranks that go this way.
    pub(super) fn queue(&mut self, messages: &[SpanTransfer<'a>], direction: Direction) {
        for block in messages.iter().filter(|block| block.direction == direction) {
            self.lanes[block.peer].message(self.op.verb, block);
        }
    }

    /// Returns when all that was queued has come and gone.
    pub(super) fn finish(&mut self) -> Result<()> {
        self.settle(Until::Done)
    }

    /// Leaves the rest of the operation to a library, in which this rank waits for `peers`. `run` is
    /// given a function that it must ask now and then whether to go on.
    pub(in crate::backend) fn leave_to(
        &self,
        peers: &[Rank],
        run: impl FnOnce(&dyn Fn() -> bool) -> std::result::Result<(), Stop>,
    ) -> Result<()> {
        self.control().wait_for(peers);
        let (start, asked) = (Instant::now(), Cell::new(None));
        let go_on = || {
            if start.elapsed() >= self.timeout / 2 {
                self.ask(&asked);
            }
            self.control().failure().is_none()
        };
        run(&go_on).map_err(|stop| self.stopped(stop, start.elapsed()))
    }

    fn core(&self) -> &'a GroupCore {
        &self.tcp.core
    }

    fn control(&self) -> &'a Control {
        &self.tcp.control
    }

    fn settle(&mut self, until: Until) -> Result<()> {
        let mut pause = Pause::new(until);
        loop {
            // Before moving what has come: whoever failed may have done its part before.
            let failed = self.control().failure();
            let moved = self.advance(until);
            if self.is_settled(until) {
                return Ok(());
            }
            if let Some(failure) = failed {
                return Err(self.core().error(failure, self.name(), pause.waited()));
            }
            match (moved, until) {
                (Err(stop), _) => return Err(self.stopped(stop, pause.waited())),
                (Ok(true), Until::Done) => pause = Pause::new(until),
                // Whoever has not come may need this core.
                (Ok(true), Until::Entered) if !self.core().has_dedicated_core => {
                    std::thread::yield_now()
                }
                (Ok(true), Until::Entered) => {}
                (Ok(false), _) => self.pause(&mut pause)?,
            }
        }
    }

    fn is_settled(&self, until: Until) -> bool {
        let mut lanes = self.lanes.iter();
        match until {
            Until::Entered => lanes.all(Lane::all_received),
            Until::Done => lanes.all(|lane| lane.all_received() && lane.all_sent()),
        }
    }

    /// Moves what can be moved now; whether that was anything. That a connection is lost is told
    /// after the others have been looked at.
    fn advance(&mut self, until: Until) -> std::result::Result<bool, Stop> {
        let core = self.core();
        let (mut moved, mut lost) = (false, None);
        for rank in core.peers() {
            let lane = &mut self.lanes[rank];
            if lane.all_sent() && lane.all_received() {
                continue;
            }
            let link = self.links[rank].as_mut().expect("a link to every peer");
            match lane.send(&mut **link) {
                // Where ranks share cores, the others' come while this one's go, or when it yields.
                Ok(true) if until == Until::Entered && !core.has_dedicated_core => {
                    moved = true;
                    continue;
                }
                Ok(some) => moved |= some,
                // Who has seen that the calls differ may have gone, and its fingerprint is here.
                Err(_) if until == Until::Entered => {}
                Err(error) => lost = Some(Stop::Lost(rank, error)),
            }
            match lane.receive(&mut **link) {
                Ok(some) => moved |= some,
                Err(Fault::Lost(error)) => lost = Some(Stop::Lost(rank, error)),
                Err(Fault::Unexpected(expected, got)) => {
                    let own = (self.rank(), &self.op);
                    let cause = match expected.mismatch(got, own, rank) {
                        Some((field, by_rank)) => Cause::Mismatch { field: field.into(), by_rank },
                        None => {
                            let reason = format!("rank {rank} sent what no rank sends: {got:?}");
                            Cause::Aborted { reason }
                        }
                    };
                    return Err(Stop::Failed(cause));
                }
            }
        }
        match lost {
            // What was received for the others may be all that was wanted.
            Some(stop) if !moved => Err(stop),
            _ => Ok(moved),
        }
    }

    #[cold]
    fn stopped(&self, stop: Stop, waited: Duration) -> Error {
        let op = self.name();
        let failure = match stop {
            Stop::Lost(rank, error) => self.control().verdict(rank, &error, &op),
            Stop::Late(ranks) => {
                let missing = self.control().blame(&ranks, self.timeout / 4);
                let error = Error::Timeout { op: op.clone(), waited, missing: missing.clone() };
                self.control().fail(Cause::TimedOut { missing, text: error.to_string() })
            }
            Stop::Failed(cause) => self.control().fail(cause),
        };
        self.core().error(failure, op, waited)
    }

    /// Waits a little, after nothing has moved.
    fn pause(&mut self, pause: &mut Pause) -> Result<()> {
        let since = *pause.since.get_or_insert_with(Instant::now);
        let waited = since.elapsed();
        if waited >= self.timeout {
            return Err(self.stopped(Stop::Late(self.pending(pause.until)), waited));
        }
        match self.core().wait_step(self.policy, SPIN, waited) {
            WaitStep::Spin => std::hint::spin_loop(),
            WaitStep::Yield => std::thread::yield_now(),
            WaitStep::Sleep => self.sleep(pause, waited)?,
        }
        Ok(())
    }

    #[cold]
    fn sleep(&mut self, pause: &Pause, waited: Duration) -> Result<()> {
        self.control().wait_for(&self.pending(pause.until));
        let mut tick = (self.timeout - waited).min(TICK);
        let half = self.timeout / 2;
        if waited < half {
            tick = tick.min(half - waited);
        } else {
            tick = tick.min(self.ask(&pause.asked));
        }
        self.poll(tick).map_err(|error| Error::io("waiting for peers", &error))
    }

    /// Asks the peers for whom they wait, unless that was done a moment ago; how long a moment is.
    fn ask(&self, asked: &Cell<Option<Instant>>) -> Duration {
        let every = (self.timeout / 16).clamp(ASK[0], ASK[1]);
        if asked.get().is_none_or(|asked| asked.elapsed() >= every) {
            self.control().ask();
            asked.set(Some(Instant::now()));
        }
        every
    }

    /// Returns when a link may move, the group has failed, or the time is over.
    fn poll(&mut self, tick: Duration) -> io::Result<()> {
        let mut fds = vec![sys::interest(self.control().bell().fd(), true, false)];
        let mut may_move = false;
        for (lane, link) in self.lanes.iter().zip(&mut *self.links) {
            let (receive, send) = (!lane.all_received(), !lane.all_sent());
            if let (true, Some(link)) = (receive || send, link) {
                match link.sleep(receive, send)? {
                    Some(fd) => fds.push(fd),
                    None => may_move = true,
                }
            }
        }
        if !may_move {
            sys::poll(&mut fds, Some(tick))?;
        }
        self.links.iter_mut().flatten().for_each(|link| link.wake());
        Ok(())
    }

    /// The ranks that have not done their part.
    fn pending(&self, until: Until) -> Vec<Rank> {
        let sent = |lane: &Lane<'_>| until == Until::Entered || lane.all_sent();
        let owes = |lane: &Lane<'_>| !(lane.all_received() && sent(lane));
        (0..self.lanes.len()).filter(|&rank| owes(&self.lanes[rank])).collect()
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.control().wait_for(&[]);
        self.links.iter_mut().flatten().for_each(|link| link.let_go());
    }
}

impl Pause {
    fn new(until: Until) -> Self {
        Self { until, since: None, asked: Cell::new(None) }
    }

    fn waited(&self) -> Duration {
        self.since.map_or(Duration::ZERO, |since| since.elapsed())
    }
}
