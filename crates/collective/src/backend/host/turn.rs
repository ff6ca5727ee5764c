//! One rank's turn at one operation: entering, announcing, waiting.
//!
//! Entering publishes this rank's fingerprint, waits for everyone's, and compares; only then may
//! data move. Slots are used in turn by even and odd operations: a rank can enter operation `k + 2`
//! only after all have entered `k + 1`, and so have left `k`.
//!
//! Waiting is a ladder: look a few times; spin while that is likely to help; yield the core; sleep
//! on this rank's bell. Whoever publishes rings the bells of those who sleep. Every rung looks for a
//! failed group and a peer that left, and ends at the group's timeout.

use std::time::{Duration, Instant};

use super::Host;
use super::segment::{Counter, Poison, Segment};
use super::sys;
use crate::span::Span;
use crate::sync::atomic::{Ordering, fence};
use crate::{Error, OpDesc, Patience, Place, Rank, Result};

/// Looks before the first clock is read.
pub(super) const LOOKS: u32 = if cfg!(loom) { 1 } else { 200 };
/// How long a caller spins, when every rank can have a core. Longer gains nothing, since a yield on
/// a free core takes less than a microsecond, and costs when a peer wants this core.
pub(super) const SPIN: Duration = Duration::from_micros(if cfg!(loom) { 0 } else { 1 });
/// How long a caller yields before it sleeps.
pub(super) const YIELD: Duration = Duration::from_micros(if cfg!(loom) { 0 } else { 300 });
/// How long the communication thread spins before it sleeps.
pub(super) const SPIN_BACKGROUND: Duration = Duration::from_micros(if cfg!(loom) { 0 } else { 2 });
/// The longest sleep without looking around, should a wake-up be lost to a crash.
pub(super) const TICK: Duration = Duration::from_millis(50);

/// Whom to wait for.
#[derive(Clone, Copy, Debug)]
pub(super) enum Who {
    /// Everybody, this rank included.
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
    pub(super) place: Place,
    pub(super) seq: u64,
    pub(super) patience: Patience,
    pub(super) timeout: Duration,
    /// Number of the operation's first chunk; the algorithm advances it by the chunks it used.
    pub(super) chunk: &'a mut u64,
}

impl<'a> Turn<'a> {
    pub(super) fn segment(&self) -> &'a Segment {
        &self.host.segment
    }

    pub(super) fn rank(&self) -> Rank {
        self.host.rank
    }

    pub(super) fn world(&self) -> usize {
        self.host.world()
    }

    /// The other ranks, from the next one round, so that not all go to the same one first.
    pub(super) fn peers(&self) -> impl Iterator<Item = Rank> + use<> {
        let (rank, world) = (self.rank(), self.world());
        (1..world).map(move |step| (rank + step) % world)
    }

    /// Meets all ranks at this operation and compares what they call.
    pub(super) fn enter(&self) -> Result<()> {
        let (segment, seq) = (self.segment(), self.seq);
        if let Some(poison) = segment.poison() {
            return Err(self.failure(poison, Duration::ZERO));
        }
        let own = self.op.fingerprint(seq, self.place);
        segment.set_fingerprint(self.rank(), &own);
        // Release: publishes the fingerprint and the slot's data to the Acquire loads in `wait`.
        segment.entry(self.rank(), seq).store(seq + 1, Ordering::Release);
        self.ring_peers();
        self.wait(Who::All, &|rank, order| segment.entry(rank, seq).load(order) > seq)?;
        let differs = |rank| own.difference(&segment.fingerprint(rank, seq));
        match (0..self.world()).find_map(differs) {
            None => Ok(()),
            Some(field) => Err(self.mismatch(field)),
        }
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
        self.wait(who, &|rank, order| segment.counter(rank, counter).load(order) >= value)
    }

    /// This rank's stage for a chunk, once nobody reads its previous contents.
    pub(super) fn claim_stage(&self, chunk: u64) -> Result<Span<'a>> {
        let drained = (chunk + 1).saturating_sub(super::segment::STAGES);
        self.wait_for(Who::All, Counter::Drained, drained)?;
        Ok(self.segment().stage(self.rank(), chunk))
    }

    fn ring_peers(&self) {
        // SeqCst: pairs with the fence in `sleep`, see `Segment::ring`.
        fence(Ordering::SeqCst);
        for rank in self.peers() {
            self.segment().ring(rank);
        }
    }

    fn wait(&self, who: Who, reached: &impl Fn(Rank, Ordering) -> bool) -> Result<()> {
        let mut since = None;
        for rank in who.ranks(self.world()) {
            if !(0..LOOKS).any(|_| reached(rank, Ordering::Acquire)) {
                let since = *since.get_or_insert_with(Instant::now);
                self.wait_patiently(rank, who, since, reached)?;
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
    ) -> Result<()> {
        let (spin, pause) = match (self.patience, self.host.alert) {
            (Patience::Caller, true) => (SPIN, YIELD),
            (Patience::Caller, false) => (Duration::ZERO, YIELD),
            (Patience::Background, _) => (SPIN_BACKGROUND, Duration::ZERO),
        };
        loop {
            let waited = since.elapsed();
            if waited < spin {
                for _ in 0..16 {
                    if reached(rank, Ordering::Acquire) {
                        return Ok(());
                    }
                    std::hint::spin_loop();
                }
            } else if waited < pause {
                std::thread::yield_now();
            } else {
                let tick = TICK.min(self.timeout.saturating_sub(waited));
                self.sleep(rank, tick, reached);
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
                return self.timed_out(who, waited, reached);
            }
        }
    }

    pub(super) fn left(&self, rank: Rank) -> Option<Poison> {
        self.segment().is_gone(rank).then_some(Poison::Left { rank })
    }

    /// Sleeps on this rank's bell, unless there is a reason not to.
    fn sleep(&self, rank: Rank, tick: Duration, reached: &dyn Fn(Rank, Ordering) -> bool) {
        let bell = self.segment().bell(self.rank());
        bell.store(1, Ordering::SeqCst);
        // SeqCst: either the looks below see what a peer published, or the peer, who looks at the
        // bell after publishing and a fence of its own, sees it set.
        fence(Ordering::SeqCst);
        let awake = reached(rank, Ordering::Acquire)
            || self.segment().poison().is_some()
            || self.segment().is_gone(rank);
        if !awake {
            sys::futex_wait(bell, 1, tick);
        }
        bell.store(0, Ordering::SeqCst);
    }

    fn mismatch(&self, field: &'static str) -> Error {
        let called = |rank| (rank, self.segment().fingerprint(rank, self.seq).to_string());
        Error::Mismatch { op: self.name(), field, by_rank: (0..self.world()).map(called).collect() }
    }

    /// Fails the group because ranks did not come, unless they have by now.
    fn timed_out(
        &self,
        who: Who,
        waited: Duration,
        reached: &dyn Fn(Rank, Ordering) -> bool,
    ) -> Result<()> {
        let absent = |rank: &Rank| !reached(*rank, Ordering::Acquire);
        let missing: Vec<Rank> = who.ranks(self.world()).filter(absent).collect();
        if missing.is_empty() {
            return Ok(());
        }
        let error = Error::Timeout { op: self.name(), waited, missing: missing.clone() };
        self.segment().write_note(self.rank(), &error.to_string(), &missing);
        self.segment().set_poison(Poison::TimedOut { by: self.rank() });
        Err(error)
    }

    /// The group's failure, as this rank tells it.
    pub(super) fn failure(&self, poison: Poison, waited: Duration) -> Error {
        let op = self.name();
        match poison {
            Poison::Died { rank, pid } => Error::PeerDied { op, rank, pid },
            Poison::Left { rank } => {
                Error::Aborted { by: rank, reason: format!("it left the group before {op}") }
            }
            Poison::Aborted { by } => Error::Aborted { by, reason: self.segment().note(by).0 },
            Poison::TimedOut { by } => {
                let (reason, missing) = self.segment().note(by);
                // For the rank that came too late, the others have given up.
                if missing.contains(&self.rank()) {
                    Error::Aborted { by, reason }
                } else {
                    Error::Timeout { op, waited, missing }
                }
            }
        }
    }

    /// For example `all_reduce #17 of group default`.
    pub(super) fn name(&self) -> String {
        format!("{} #{} of group {}", self.op.verb, self.seq, self.host.name)
    }
}
