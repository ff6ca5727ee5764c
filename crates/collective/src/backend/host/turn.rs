//! One rank's turn at one operation: entering, announcing, waiting.
//!
//! Entering publishes this rank's fingerprint, waits for everyone's, and compares; only then may
//! data move. Slots are used in turn by even and odd operations: a rank can enter operation `k + 2`
//! only after all have entered `k + 1`, and so have left `k`.
//!
//! Waiting is a ladder: look a few times; spin while that is likely to help; yield the core; sleep
//! on this rank's bell. Whoever publishes rings the bells of those who sleep. Every rung looks for a
//! failed group and a peer that left, and ends at the group's timeout.
//!
//! What counts for small operations is how many cache lines pass between the cores, and that nobody
//! waits for a line on its way out: a rank publishes with Release, looks only at what the others
//! publish, and leaves the fence between publishing and ringing to those who go to sleep.

use std::time::{Duration, Instant};

use super::Host;
use super::pace::Pace;
use super::segment::{Counter, Poison, Segment, Stages};
use super::sys;
use crate::backend::core::WaitStep;
use crate::span::Span;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::{BufferLocation, Error, OpDesc, Rank, Result, WaitPolicy};

/// Looks before the first clock is read.
pub(super) const LOOKS: u32 = if cfg!(loom) { 1 } else { 200 };
/// The same, when every rank can have a core and nothing else to do: about as long as a peer on
/// another chip takes to answer.
const LOOKS_ALERT: u32 = if cfg!(loom) { 1 } else { 1000 };
/// How long a caller spins, when every rank can have a core. Longer gains nothing, since a yield on
/// a free core takes less than a microsecond, and costs when a peer wants this core.
pub(super) const SPIN: Duration = Duration::from_micros(if cfg!(loom) { 0 } else { 1 });
/// The longest sleep without looking around, should a wake-up be lost to a crash.
pub(super) const TICK: Duration = Duration::from_millis(50);
/// The longest sleep where a publisher may not ring the bell.
const NAP: Duration = Duration::from_millis(1);
/// Fingerprints are always compared; a build that measures what it costs leaves it out.
const CHECKED: bool = cfg!(not(without_fingerprints));
/// Ranks whose spans lie on the stack: an allocation is felt in a small operation.
const FEW_RANKS: usize = 8;

/// Whom to wait for.
#[derive(Clone, Copy, Debug)]
pub(super) enum Who {
    /// All the others. A rank that looks at what it has just published itself waits for the store
    /// to leave the core.
    All,
    /// One rank.
    One(Rank),
}

impl Who {
    fn ranks(self, world: usize) -> std::ops::Range<Rank> {
        match self {
            Self::All => 0..world,
            Self::One(rank) => rank..rank + 1,
        }
    }
}

/// An operation under way on this rank.
#[derive(Debug)]
pub(super) struct Turn<'a> {
    pub(super) host: &'a Host,
    pub(super) op: &'a OpDesc,
    pub(super) location: BufferLocation,
    pub(super) seq: u64,
    /// Number of the next operation that all ranks enter.
    pub(super) next: u64,
    pub(super) policy: WaitPolicy,
    pub(super) timeout: Duration,
    /// Number of the operation's first chunk; the algorithm advances it by the chunks it used.
    pub(super) chunk: &'a mut u64,
    pub(super) pace: &'a Pace,
}

impl<'a> Turn<'a> {
    pub(super) fn segment(&self) -> &'a Segment {
        &self.host.segment
    }

    pub(super) fn rank(&self) -> Rank {
        self.host.core.rank
    }

    pub(super) fn world(&self) -> usize {
        self.host.world()
    }

    /// The other ranks, from the next one round, so that not all go to the same one first.
    pub(super) fn peers(&self) -> impl Iterator<Item = Rank> + use<> {
        self.host.core.peers()
    }

    /// Gives `then` a span for each rank, in rank order.
    pub(super) fn spans<R>(
        &self,
        of: impl Fn(Rank) -> Span<'a>,
        then: impl FnOnce(&[Span<'a>]) -> R,
    ) -> R {
        let world = self.world();
        if world > FEW_RANKS {
            return then(&(0..world).map(of).collect::<Vec<_>>());
        }
        let mut few = [Span::EMPTY; FEW_RANKS];
        for (rank, span) in few[..world].iter_mut().enumerate() {
            *span = of(rank);
        }
        then(&few[..world])
    }

    /// Meets all ranks at this operation and compares what they call.
    pub(super) fn enter(&self) -> Result<()> {
        let (segment, seq) = (self.segment(), self.seq);
        if let Some(poison) = segment.poison() {
            return Err(self.failure(poison, Duration::ZERO));
        }
        let own = self.host.core.fingerprint(self.op, seq, self.location);
        if CHECKED {
            segment.set_fingerprint(self.rank(), &own);
        }
        // Release: publishes the fingerprint and the slot's data to the Acquire loads in `wait`.
        segment.entry(self.rank(), seq).store(seq + 1, Ordering::Release);
        let entered = |rank, order| segment.entry(rank, seq).load(order) > seq;
        // Not this rank's own, see `Who::All`.
        let all_here = self.peers().all(|rank| self.look(segment.entry(rank, seq), seq));
        self.ring_peers();
        if !all_here {
            self.wait(Who::All, &entered, None)?;
        }
        if CHECKED && self.peers().any(|rank| !segment.has_fingerprint(rank, &own)) {
            let calls = (0..self.world()).map(|rank| (rank, segment.fingerprint(rank, seq)));
            return self.host.core.compare(&own, calls, self.name());
        }
        Ok(())
    }

    /// Announces a counter of this rank.
    pub(super) fn publish(&self, counter: Counter, value: u64) {
        // Release: pairs with the Acquire in `wait`.
        self.segment().counter(self.rank(), counter).store(value, Ordering::Release);
        self.ring_peers();
    }

    /// Waits until a counter has reached `value`.
    pub(super) fn wait_for(&self, who: Who, counter: Counter, value: u64) -> Result<()> {
        let segment = self.segment();
        let reached = |rank, order| segment.counter(rank, counter).load(order) >= value;
        // A rank that has not staged a chunk may itself wait for a reader of the stage.
        let staged = (counter == Counter::Staged).then_some(value);
        self.wait(who, &reached, staged)
    }

    /// What everybody's `Drained` must have reached before a rank's `Staged` can reach `staged`.
    fn drained_before(&self, staged: u64) -> u64 {
        staged.saturating_sub(Stages::of(self.world()).count)
    }

    /// The `len` bytes of this rank's stage for a chunk, once nobody reads its previous contents.
    pub(super) fn claim_stage(&self, chunk: u64, len: usize) -> Result<Span<'a>> {
        self.wait_for(Who::All, Counter::Drained, self.drained_before(chunk + 1))?;
        Ok(self.segment().stage(self.rank(), chunk, len))
    }

    /// Stages all of a chunk and says so.
    pub(super) fn stage(&self, chunk: u64, data: Span<'_>) -> Result<()> {
        let stage = self.claim_stage(chunk, data.len())?;
        self.pace.stage(chunk, data.len(), |route| stage.copy_by(route, data));
        self.publish(Counter::Staged, chunk + 1);
        Ok(())
    }

    fn ring_peers(&self) {
        self.segment().fence_publisher();
        for rank in self.peers() {
            self.segment().ring(rank);
        }
    }

    /// Whether a word comes to exceed a value at once.
    fn look(&self, word: &AtomicU64, value: u64) -> bool {
        (0..self.looks()).any(|_| word.load(Ordering::Acquire) > value)
    }

    fn looks(&self) -> u32 {
        match self.policy {
            WaitPolicy::Spin if self.host.core.has_dedicated_core => LOOKS_ALERT,
            _ => LOOKS,
        }
    }

    /// Waits; if it is for chunks to be staged, `staged` is how many of the group's.
    fn wait(
        &self,
        who: Who,
        reached: &impl Fn(Rank, Ordering) -> bool,
        staged: Option<u64>,
    ) -> Result<()> {
        let (mut since, looks) = (None, self.looks());
        for rank in who.ranks(self.world()).filter(|&rank| rank != self.rank()) {
            if !(0..looks).any(|_| reached(rank, Ordering::Acquire)) {
                let since = *since.get_or_insert_with(Instant::now);
                self.wait_patiently(rank, who, since, reached, staged)?;
            }
        }
        Ok(())
    }

    #[cold]
    fn wait_patiently(
        &self,
        rank: Rank,
        who: Who,
        since: Instant,
        reached: &dyn Fn(Rank, Ordering) -> bool,
        staged: Option<u64>,
    ) -> Result<()> {
        loop {
            let waited = since.elapsed();
            match self.host.core.wait_step(self.policy, SPIN, waited) {
                WaitStep::Spin => {
                    for _ in 0..16 {
                        if reached(rank, Ordering::Acquire) {
                            return Ok(());
                        }
                        std::hint::spin_loop();
                    }
                }
                WaitStep::Yield => std::thread::yield_now(),
                WaitStep::Sleep => {
                    let tick = TICK.min(self.timeout.saturating_sub(waited));
                    self.sleep(rank, tick, reached);
                }
            }
            if reached(rank, Ordering::Acquire) {
                return Ok(());
            }
            let failure = self.segment().poison().or_else(|| self.left(rank));
            // Whoever failed or left may have done its part of this operation before.
            if failure.is_some() && reached(rank, Ordering::Acquire) {
                return Ok(());
            }
            if let Some(poison) = failure {
                self.segment().set_poison(poison);
                return Err(self.failure(poison, waited));
            }
            if waited >= self.timeout {
                return self.timed_out(who, waited, reached, staged);
            }
        }
    }

    pub(super) fn left(&self, rank: Rank) -> Option<Poison> {
        self.segment().is_gone(rank).then_some(Poison::Left { rank })
    }

    /// Sleeps on this rank's bell, unless there is a reason not to.
    fn sleep(&self, rank: Rank, tick: Duration, reached: &dyn Fn(Rank, Ordering) -> bool) {
        let bell = self.segment().bell(self.rank());
        // Either the looks below see what a peer published, or the peer, who looks at the bell after
        // publishing, sees it set.
        let tick = if self.segment().set_bell(self.rank()) { tick } else { tick.min(NAP) };
        let awake = reached(rank, Ordering::Acquire)
            || self.segment().poison().is_some()
            || self.segment().is_gone(rank);
        if !awake {
            sys::futex_wait(bell, 1, tick);
        }
        bell.store(0, Ordering::SeqCst);
    }

    /// Fails the group because ranks did not come, unless they have by now.
    fn timed_out(
        &self,
        who: Who,
        waited: Duration,
        reached: &dyn Fn(Rank, Ordering) -> bool,
        staged: Option<u64>,
    ) -> Result<()> {
        let absent = |rank: &Rank| !reached(*rank, Ordering::Acquire);
        let others = who.ranks(self.world()).filter(|&rank| rank != self.rank());
        let mut missing: Vec<Rank> = others.filter(absent).collect();
        if missing.is_empty() {
            return Ok(());
        }
        if let Some(staged) = staged {
            let drained = |rank| self.segment().counter(rank, Counter::Drained);
            let needed = self.drained_before(staged);
            let readers =
                self.peers().filter(|&rank| drained(rank).load(Ordering::Acquire) < needed);
            // Those who are waited for by the ones this rank waits for.
            let blocking: Vec<Rank> = readers.collect();
            if !blocking.is_empty() {
                missing = blocking;
            }
        }
        let error = Error::Timeout { op: self.name(), waited, missing: missing.clone() };
        self.segment().write_note(self.rank(), &error.to_string(), &missing);
        self.segment().set_poison(Poison::TimedOut { by: self.rank() });
        Err(error)
    }

    /// The group's failure, as this rank tells it.
    pub(super) fn failure(&self, poison: Poison, waited: Duration) -> Error {
        self.host.error(poison, self.name(), waited)
    }

    /// For example `all_reduce #17 of group default`.
    pub(super) fn name(&self) -> String {
        self.host.core.name_of(self.op.verb, self.seq)
    }
}
