//! A call in progress on this rank: entering, moving the queued transfers, waiting.
//!
//! Sends and receives are queued per peer ([`peer_queue`](crate::backend::peer_queue)) and progress
//! concurrently. To enter, a rank sends a header with its fingerprint to every peer, directly
//! followed by the first block, so that a small operation is one message each way. Blocks stay in
//! the sockets until all fingerprints have arrived and are equal; only then is anything received
//! into the caller's memory. In a group of more than [`MAX_DIRECT_RANKS`] ranks a dissemination
//! barrier carries the fingerprints: in round `k` a rank exchanges headers with the ranks at
//! distance `2^k` on either side. After the last round all ranks have entered. If two calls differ,
//! there is a pair of ranks that has compared different calls.
//!
//! A wait spins while that is likely to help, then yields the core, then polls. It ends with the
//! group's failure or at the timeout, which restarts whenever data have moved, except while ranks
//! have not entered. After half of the timeout this rank asks its peers which ranks they wait for,
//! so that the error names the ranks that are late and not those that wait
//! ([`control`](super::control)).

use std::io;
use std::time::{Duration, Instant};

use super::Tcp;
use super::control::ControlPlane;
use crate::backend::Wait;
use crate::backend::core::{Direction, GroupCore, HostBackend as _, SpanTransfer, WaitStep};
use crate::backend::failure::Cause;
use crate::backend::peer_queue::{PeerQueue, ReceiveError, unexpected};
use crate::memory::Span;
use crate::net::stream::PeerStream;
use crate::net::sys;
use crate::{BufferLocation, Error, Fingerprint, OpDesc, Rank, Result, Verb, WaitPolicy};

/// Maximum size of a group in which every rank sends its fingerprint directly to all others.
pub(super) const MAX_DIRECT_RANKS: usize = 8;
/// How long a blocking call spins if every rank of the machine has its own core.
const SPIN: Duration = Duration::from_micros(50);
/// Shortest and longest interval at which the peers are asked which ranks they wait for.
const ASK_INTERVAL: [Duration; 2] = [Duration::from_millis(2), Duration::from_secs(1)];
/// Maximum duration of one sleep.
const MAX_SLEEP: Duration = Duration::from_secs(3600);

/// A call in progress on this rank.
#[derive(Debug)]
pub(in crate::backend) struct Call<'a> {
    tcp: &'a Tcp,
    /// By rank; `None` for this one.
    streams: &'a mut [Option<Box<dyn PeerStream>>],
    pub(in crate::backend) desc: OpDesc,
    /// Sequence number in the group; meaningless for batches.
    pub(in crate::backend) seq: u64,
    policy: WaitPolicy,
    pub(in crate::backend) timeout: Duration,
    pub(super) location: BufferLocation,
    /// By rank; empty for this one.
    queues: Vec<PeerQueue<'a>>,
}

/// Condition that ends a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Until {
    /// All queued headers, which are the fingerprints, are received.
    Entered,
    /// Everything queued is received and sent.
    Done,
}

/// Why a call failed.
#[derive(Debug)]
enum CallError {
    /// The connection to a rank has failed.
    ConnectionLost(Rank, io::Error),
    /// These ranks were late.
    TimedOut(Vec<Rank>),
    Failed(Cause),
}

/// State of a wait while nothing moves.
#[derive(Debug)]
struct WaitState {
    until: Until,
    since: Option<Instant>,
    asked: Option<Instant>,
}

impl<'a> Call<'a> {
    /// Begins a call; `next` is the sequence number of the group's next operation.
    pub(super) fn begin(
        tcp: &'a Tcp,
        next: &mut u64,
        streams: &'a mut [Option<Box<dyn PeerStream>>],
        op: &OpDesc,
        wait: Wait,
    ) -> Result<Self> {
        tcp.core.ready()?;
        let seq = *next;
        // Batches involve only some ranks, so they are not numbered.
        *next += u64::from(op.verb != Verb::Batch);
        let (policy, timeout) = (wait.policy, wait.timeout.unwrap_or(tcp.core.timeout));
        let queues = std::iter::repeat_with(PeerQueue::default).take(streams.len()).collect();
        let location = BufferLocation::Private;
        let call = Self { tcp, streams, desc: *op, seq, policy, timeout, location, queues };
        // The group may have failed while this rank computed.
        match tcp.control.failure() {
            None => Ok(call),
            Some(failure) => Err(tcp.core.error(failure, call.name(), Duration::ZERO)),
        }
    }

    pub(in crate::backend) fn rank(&self) -> Rank {
        self.tcp.core.rank
    }

    pub(in crate::backend) fn world(&self) -> usize {
        self.queues.len()
    }

    /// Name for error texts.
    pub(super) fn name(&self) -> String {
        match self.desc.verb {
            verb @ Verb::Batch => format!("{verb} of group {}", self.core().name),
            verb => self.core().name_of(verb, self.seq),
        }
    }

    /// Queues the send of this rank's fingerprint to the peers, and the receive of theirs.
    pub(super) fn enter(&mut self) {
        self.enter_round(0);
    }

    /// Same as [`enter`](Self::enter), for the peers of one round.
    fn enter_round(&mut self, round: u32) {
        let own = self.own();
        let (rank, world, distance) = (self.rank(), self.world(), 1 << round);
        let [ahead, behind] = [(rank + distance) % world, (rank + world - distance) % world];
        for peer in self.core().peers() {
            if self.compares_directly() || peer == ahead || peer == behind {
                self.queues[peer].enter(&own);
            }
        }
    }

    /// Returns whether fingerprints are sent directly to all ranks, so that blocks may follow at
    /// once.
    pub(super) fn compares_directly(&self) -> bool {
        self.world() <= MAX_DIRECT_RANKS
    }

    /// Returns the fingerprint of this rank's call.
    fn own(&self) -> Fingerprint {
        self.desc.fingerprint(self.seq, self.location)
    }

    /// Waits until all ranks have entered and compares their calls. Only [`enter`](Self::enter)
    /// and, if the call [`compares_directly`](Self::compares_directly), sends may have been queued.
    pub(super) fn wait_entered(&mut self) -> Result<()> {
        let rounds = if self.compares_directly() { 1 } else { self.world().ilog2() };
        for round in 0..rounds {
            if round > 0 {
                self.enter_round(round);
            }
            self.wait_until(Until::Entered)?;
            self.compare()?;
        }
        Ok(())
    }

    /// Compares this rank's call with those received so far.
    fn compare(&self) -> Result<()> {
        let own = self.own();
        let entered =
            |rank: Rank| if rank == self.rank() { Some(own) } else { self.queues[rank].entered };
        let calls = (0..self.world()).filter_map(|rank| Some((rank, entered(rank)?)));
        match self.core().compare(&own, calls, self.name()) {
            // Not all ranks have received the different call.
            Err(Error::Mismatch { field, by_rank, .. }) if !self.compares_directly() => {
                let cause = Cause::Mismatch { field: field.into(), by_rank };
                Err(self.fail(CallError::Failed(cause), Duration::ZERO))
            }
            compared => compared,
        }
    }

    /// Queues the send of a block of this operation, unless it is empty.
    pub(super) fn send_block(&mut self, to: Rank, body: Span<'a>) {
        if body.len() > 0 {
            self.queues[to].send_block(self.seq, body);
        }
    }

    /// Queues the receive of a block of this operation, unless it is empty.
    pub(super) fn receive_block(&mut self, from: Rank, body: Span<'a>) {
        if body.len() > 0 {
            self.queues[from].receive_block(self.seq, body);
        }
    }

    /// Queues the transfers of this direction.
    pub(super) fn queue(&mut self, transfers: &[SpanTransfer<'a>], direction: Direction) {
        for block in transfers.iter().filter(|block| block.direction == direction) {
            self.queues[block.peer].message(self.desc.verb, block);
        }
    }

    /// Blocks until everything queued is received and sent.
    pub(super) fn finish(&mut self) -> Result<()> {
        self.wait_until(Until::Done)
    }

    fn core(&self) -> &'a GroupCore {
        &self.tcp.core
    }

    fn control(&self) -> &'a ControlPlane {
        &self.tcp.control
    }

    fn wait_until(&mut self, until: Until) -> Result<()> {
        let mut state = WaitState::new(until);
        loop {
            // Read before `progress`: a rank may have completed its part before it failed.
            let failed = self.control().failure();
            let moved = self.progress(until);
            if self.is_over(until) {
                return Ok(());
            }
            if let Some(failure) = failed {
                return Err(self.core().error(failure, self.name(), state.waited()));
            }
            match (moved, until) {
                (Err(error), _) => return Err(self.fail(error, state.waited())),
                (Ok(true), Until::Done) => state = WaitState::new(until),
                // A rank that has not entered may need this core.
                (Ok(true), Until::Entered) if !self.core().has_dedicated_core => {
                    std::thread::yield_now();
                }
                (Ok(true), Until::Entered) => {}
                (Ok(false), _) => self.pause(&mut state)?,
            }
        }
    }

    fn is_over(&self, until: Until) -> bool {
        let mut queues = self.queues.iter();
        match until {
            Until::Entered => queues.all(PeerQueue::all_received),
            Until::Done => queues.all(|queue| queue.all_received() && queue.all_sent()),
        }
    }

    /// Sends and receives as much as possible without blocking; returns whether any bytes moved.
    /// Tries all connections before it reports a lost one.
    fn progress(&mut self, until: Until) -> std::result::Result<bool, CallError> {
        let core = self.core();
        let (mut moved, mut lost) = (false, None);
        for rank in core.peers() {
            let queue = &mut self.queues[rank];
            if queue.all_sent() && queue.all_received() {
                continue;
            }
            let stream = self.streams[rank].as_mut().expect("a stream to every peer");
            match queue.send(&mut **stream) {
                // If ranks share cores, send to all peers first; theirs arrive meanwhile.
                Ok(true) if until == Until::Entered && !core.has_dedicated_core => {
                    moved = true;
                    continue;
                }
                Ok(some) => moved |= some,
                // The peer may have left after a mismatch; its fingerprint has arrived.
                Err(_) if until == Until::Entered => {}
                Err(error) => lost = Some(CallError::ConnectionLost(rank, error)),
            }
            match queue.receive(&mut **stream) {
                Ok(some) => moved |= some,
                Err(ReceiveError::ConnectionLost(error)) => {
                    lost = Some(CallError::ConnectionLost(rank, error));
                }
                Err(ReceiveError::Unexpected(frames)) => {
                    let own = (self.rank(), &self.desc);
                    return Err(CallError::Failed(unexpected(*frames, own, rank)));
                }
            }
        }
        match lost {
            // The bytes that moved may have completed the wait.
            Some(stop) if !moved => Err(stop),
            _ => Ok(moved),
        }
    }

    /// Fails the group; returns this rank's error.
    #[cold]
    fn fail(&self, error: CallError, waited: Duration) -> Error {
        let op = self.name();
        let failure = match error {
            CallError::ConnectionLost(rank, error) => {
                self.control().diagnose_lost(rank, &error, &op)
            }
            CallError::TimedOut(ranks) => {
                let missing = self.control().late_ranks(&ranks, self.timeout / 4);
                let error = Error::Timeout { op: op.clone(), waited, missing: missing.clone() };
                self.control().fail(Cause::TimedOut { missing, text: error.to_string() })
            }
            CallError::Failed(cause) => self.control().fail(cause),
        };
        self.core().error(failure, op, waited)
    }

    /// Waits briefly, after a `progress` that moved no bytes.
    fn pause(&mut self, state: &mut WaitState) -> Result<()> {
        let since = *state.since.get_or_insert_with(Instant::now);
        let waited = since.elapsed();
        if waited >= self.timeout {
            return Err(self.fail(CallError::TimedOut(self.pending(state.until)), waited));
        }
        match self.core().wait_step(self.policy, SPIN, waited) {
            WaitStep::Spin => std::hint::spin_loop(),
            WaitStep::Yield => std::thread::yield_now(),
            WaitStep::Sleep => self.sleep(state, waited)?,
        }
        Ok(())
    }

    #[cold]
    fn sleep(&mut self, state: &mut WaitState, waited: Duration) -> Result<()> {
        self.control().wait_for(&self.pending(state.until));
        let mut tick = (self.timeout - waited).min(MAX_SLEEP);
        let half = self.timeout / 2;
        if waited < half {
            tick = tick.min(half - waited);
        } else {
            tick = tick.min(self.ask(&mut state.asked));
        }
        let polled = self.poll(tick).map_err(|error| Error::io("waiting for peers", &error));
        // The peers would wait for this rank.
        self.tcp.or_abort(&self.desc, polled)
    }

    /// Asks the peers which ranks they wait for, at most once per interval; returns the interval.
    fn ask(&self, asked: &mut Option<Instant>) -> Duration {
        let interval = (self.timeout / 16).clamp(ASK_INTERVAL[0], ASK_INTERVAL[1]);
        if asked.is_none_or(|asked| asked.elapsed() >= interval) {
            self.control().ask_all();
            *asked = Some(Instant::now());
        }
        interval
    }

    /// Blocks until a stream is ready, the group has failed, or `tick` has passed.
    fn poll(&mut self, tick: Duration) -> io::Result<()> {
        let mut fds = vec![sys::interest(self.control().failure_event().fd(), true, false)];
        let mut is_ready = false;
        for (queue, stream) in self.queues.iter().zip(&mut *self.streams) {
            let (receive, send) = (!queue.all_received(), !queue.all_sent());
            if let (true, Some(stream)) = (receive || send, stream) {
                match stream.poll_interest(receive, send)? {
                    Some(fd) => fds.push(fd),
                    None => is_ready = true,
                }
            }
        }
        if !is_ready {
            sys::poll(&mut fds, Some(tick))?;
        }
        self.streams.iter_mut().flatten().for_each(|stream| stream.after_poll());
        Ok(())
    }

    /// Returns the ranks that this call still waits for.
    fn pending(&self, until: Until) -> Vec<Rank> {
        let sent = |queue: &PeerQueue<'_>| until == Until::Entered || queue.all_sent();
        let is_pending = |queue: &PeerQueue<'_>| !(queue.all_received() && sent(queue));
        (0..self.queues.len()).filter(|&rank| is_pending(&self.queues[rank])).collect()
    }
}

impl Drop for Call<'_> {
    fn drop(&mut self) {
        self.control().wait_for(&[]);
        self.streams.iter_mut().flatten().for_each(|stream| stream.end_call());
    }
}

impl WaitState {
    fn new(until: Until) -> Self {
        Self { until, since: None, asked: None }
    }

    fn waited(&self) -> Duration {
        self.since.map_or(Duration::ZERO, |since| since.elapsed())
    }
}
