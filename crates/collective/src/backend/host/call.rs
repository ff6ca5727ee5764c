//! A call in progress on this rank: entering, publishing, waiting.
//!
//! Entering publishes this rank's fingerprint, waits for those of all ranks and compares them; only
//! then may data move. Even and odd operations alternate between two slots: a rank can enter
//! operation `k + 2` only after all have entered `k + 1`, and so have finished `k`.
//!
//! A wait polls a few times, spins while that is likely to help, yields the core, and finally
//! sleeps on this rank's futex. A rank that publishes wakes the ranks that sleep. Every step checks
//! for a failed group and for peers that left, and a wait ends at the group's timeout.
//!
//! The cost of small operations is that of the cache lines that move between cores, plus any wait
//! for a store to leave its core. So a rank publishes with Release and reads only the words of
//! other ranks, and waiters issue the barrier between publishing and waking, so publishers need
//! none.

use std::ops::Range;
use std::time::{Duration, Instant};

use super::Host;
use super::route_tuner::RouteTuner;
use super::segment::{Counter, STAGES, Segment};
use super::sys;
use crate::backend::core::{WaitStep, shortened};
use crate::backend::failure::{Cause, Failure};
use crate::memory::Span;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::{BufferLocation, Error, OpDesc, Rank, Result, WaitPolicy};

/// Polls before the clock is first read.
pub(super) const POLLS: u32 = if cfg!(loom) { 1 } else { 200 };
/// The same if every rank has its own core and its caller blocks: about as long as a peer on
/// another chip takes to answer.
const POLLS_WITH_DEDICATED_CORE: u32 = if cfg!(loom) { 1 } else { 1000 };
/// How long a blocking call spins if every rank has its own core. Longer gains nothing, since a
/// yield on a free core takes less than a microsecond, and delays a peer that needs this core.
pub(super) const SPIN: Duration = Duration::from_micros(if cfg!(loom) { 0 } else { 1 });
/// Longest sleep between checks, in case a crash loses a wake-up.
pub(super) const MAX_SLEEP: Duration = Duration::from_millis(50);
/// Longest sleep if a publisher may not see the sleep flag.
const MAX_SLEEP_UNFENCED: Duration = Duration::from_millis(1);
/// Fingerprints are always compared, except in builds that measure the cost of comparing.
const CHECKED: bool = cfg!(not(without_fingerprints));
/// Up to this number of ranks, [`Call::spans`] uses the stack, because an allocation is too slow
/// for small operations.
const FEW_RANKS: usize = 8;

/// A call in progress on this rank.
#[derive(Debug)]
pub(super) struct Call<'a> {
    pub(super) host: &'a Host,
    pub(super) desc: &'a OpDesc,
    pub(super) location: BufferLocation,
    pub(super) seq: u64,
    /// Sequence number of the next operation of all ranks.
    pub(super) next: u64,
    pub(super) policy: WaitPolicy,
    pub(super) timeout: Duration,
    /// Number of the call's first chunk; the algorithm advances it by the chunks that it uses.
    pub(super) chunk: &'a mut u64,
    pub(super) route_tuner: &'a RouteTuner,
}

impl<'a> Call<'a> {
    pub(super) fn segment(&self) -> &'a Segment {
        &self.host.segment
    }

    pub(super) fn rank(&self) -> Rank {
        self.host.core.rank
    }

    pub(super) fn world(&self) -> usize {
        self.host.world()
    }

    /// The other ranks, starting with the next one.
    pub(super) fn peers(&self) -> impl Iterator<Item = Rank> + use<> {
        self.host.core.peers()
    }

    /// Calls `then` with a span for each rank, in rank order.
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

    /// Publishes this rank's fingerprint, waits until all ranks have entered, and compares their
    /// calls.
    pub(super) fn enter(&self) -> Result<()> {
        let (segment, seq) = (self.segment(), self.seq);
        self.check_failure(Duration::ZERO)?;
        let own = self.desc.fingerprint(seq, self.location);
        if CHECKED {
            segment.set_fingerprint(self.rank(), &own);
        }
        // Release: publishes the fingerprint and the slot's data to the Acquire loads in `wait`.
        segment.entry(self.rank(), seq).store(seq + 1, Ordering::Release);
        let entered = |rank| segment.entry(rank, seq).load(Ordering::Acquire) > seq;
        // Not this rank's own, as in `wait`.
        let all_here = self.peers().all(|rank| self.poll(segment.entry(rank, seq), seq));
        self.wake_peers();
        if !all_here {
            self.wait(0..self.world(), &entered, None)?;
        }
        if CHECKED && self.peers().any(|rank| !segment.has_fingerprint(rank, &own)) {
            let calls = (0..self.world()).map(|rank| (rank, segment.fingerprint(rank, seq)));
            return self.host.core.compare(&own, calls, self.name());
        }
        Ok(())
    }

    /// Publishes a counter of this rank.
    pub(super) fn publish(&self, counter: Counter, value: u64) {
        // Release: pairs with the Acquire in `wait`.
        self.segment().counter(self.rank(), counter).store(value, Ordering::Release);
        self.wake_peers();
    }

    /// Waits until a counter has reached `value`.
    pub(super) fn wait_for(&self, who: Range<Rank>, counter: Counter, value: u64) -> Result<()> {
        let segment = self.segment();
        let reached = |rank| segment.counter(rank, counter).load(Ordering::Acquire) >= value;
        // A rank that has not staged a chunk may itself wait for a reader of its stage.
        let staged = (counter == Counter::Staged).then_some(value);
        self.wait(who, &reached, staged)
    }

    /// Waits until no rank reads the earlier contents of this rank's stage for a chunk; returns the
    /// first `len` bytes of the stage.
    pub(super) fn claim_stage(&self, chunk: u64, len: usize) -> Result<Span<'a>> {
        self.wait_for(0..self.world(), Counter::Drained, drained_before(chunk + 1))?;
        Ok(self.segment().stage(self.rank(), chunk, len))
    }

    /// Stages a whole chunk and publishes it.
    pub(super) fn stage(&self, chunk: u64, data: Span<'_>) -> Result<()> {
        let stage = self.claim_stage(chunk, data.len())?;
        self.route_tuner.timed_copy(chunk, data.len(), |route| stage.copy_by(route, data));
        self.publish(Counter::Staged, chunk + 1);
        Ok(())
    }

    fn wake_peers(&self) {
        self.segment().fence_publisher();
        for rank in self.peers() {
            self.segment().wake(rank);
        }
    }

    /// Polls until `word` exceeds `value`; returns whether it did.
    fn poll(&self, word: &AtomicU64, value: u64) -> bool {
        (0..self.max_polls()).any(|_| word.load(Ordering::Acquire) > value)
    }

    fn max_polls(&self) -> u32 {
        match self.policy {
            WaitPolicy::Spin if self.host.core.has_dedicated_core => POLLS_WITH_DEDICATED_CORE,
            _ => POLLS,
        }
    }

    /// Waits until `reached` holds for the ranks of `who`, but not for this one: a rank that reads
    /// what it has just published waits for its store to leave the core. If it waits for staged
    /// chunks, `staged` is their count.
    fn wait(
        &self,
        who: Range<Rank>,
        reached: &impl Fn(Rank) -> bool,
        staged: Option<u64>,
    ) -> Result<()> {
        let (mut since, looks) = (None, self.max_polls());
        for rank in who.clone().filter(|&rank| rank != self.rank()) {
            if !(0..looks).any(|_| reached(rank)) {
                let since = *since.get_or_insert_with(Instant::now);
                self.wait_slowly(rank, &who, since, reached, staged)?;
            }
        }
        Ok(())
    }

    #[cold]
    fn wait_slowly(
        &self,
        rank: Rank,
        who: &Range<Rank>,
        since: Instant,
        reached: &dyn Fn(Rank) -> bool,
        staged: Option<u64>,
    ) -> Result<()> {
        loop {
            let waited = since.elapsed();
            match self.host.core.wait_step(self.policy, SPIN, waited) {
                WaitStep::Spin => {
                    for _ in 0..16 {
                        if reached(rank) {
                            return Ok(());
                        }
                        std::hint::spin_loop();
                    }
                }
                WaitStep::Yield => std::thread::yield_now(),
                WaitStep::Sleep => {
                    let tick = MAX_SLEEP.min(self.timeout.saturating_sub(waited));
                    self.sleep(tick, || {
                        let segment = self.segment();
                        reached(rank) || segment.has_failed() || segment.has_left(rank)
                    });
                }
            }
            if reached(rank) {
                return Ok(());
            }
            if self.segment().has_failed() || self.segment().has_left(rank) {
                // The rank that failed or left may have done its part of this operation before.
                if reached(rank) {
                    return Ok(());
                }
                return Err(self.fail_by(&self.left(rank), waited));
            }
            if waited >= self.timeout {
                return self.timed_out(who.clone(), waited, reached, staged);
            }
        }
    }

    /// The failure of a group that a rank left before this operation.
    pub(super) fn left(&self, rank: Rank) -> Failure {
        let reason = format!("it left the group before {}", self.name());
        Failure { by: rank, cause: Cause::Aborted { reason: shortened(&reason).to_owned() } }
    }

    /// Sleeps on this rank's futex, unless the wait is over.
    pub(super) fn sleep(&self, tick: Duration, is_over: impl FnOnce() -> bool) {
        let flag = self.segment().sleep_flag(self.rank());
        // Either `is_over` sees what a peer published, or the peer, which reads the flag after
        // publishing, sees it set.
        let tick = if self.segment().set_sleep_flag(self.rank()) {
            tick
        } else {
            tick.min(MAX_SLEEP_UNFENCED)
        };
        if !is_over() {
            sys::futex_wait(flag, 1, tick);
        }
        flag.store(0, Ordering::SeqCst);
    }

    /// Fails the group because of the missing ranks, unless they have arrived by now.
    fn timed_out(
        &self,
        who: Range<Rank>,
        waited: Duration,
        reached: &dyn Fn(Rank) -> bool,
        staged: Option<u64>,
    ) -> Result<()> {
        let absent = |rank: &Rank| !reached(*rank);
        let others = who.filter(|&rank| rank != self.rank());
        let mut missing: Vec<Rank> = others.filter(absent).collect();
        if missing.is_empty() {
            return Ok(());
        }
        if let Some(staged) = staged {
            let drained = |rank| self.segment().counter(rank, Counter::Drained);
            let needed = drained_before(staged);
            let readers =
                self.peers().filter(|&rank| drained(rank).load(Ordering::Acquire) < needed);
            // The missing ranks are themselves waiting for these ranks.
            let blocking: Vec<Rank> = readers.collect();
            if !blocking.is_empty() {
                missing = blocking;
            }
        }
        Err(self.fail(self.timeout_cause(missing, waited), waited))
    }

    /// The cause of a failure because `missing` were late.
    pub(super) fn timeout_cause(&self, missing: Vec<Rank>, waited: Duration) -> Cause {
        let error = Error::Timeout { op: self.name(), waited, missing: missing.clone() };
        Cause::TimedOut { missing, text: shortened(&error.to_string()).to_owned() }
    }

    /// Returns the group's failure, if it has failed, as this rank's error.
    pub(super) fn check_failure(&self, waited: Duration) -> Result<()> {
        let failure = if self.segment().has_failed() { self.segment().failure() } else { None };
        failure.map_or(Ok(()), |failure| Err(self.host.core.error(&failure, self.name(), waited)))
    }

    /// Fails the group, unless it has failed already; returns its failure as this rank's error.
    pub(super) fn fail(&self, cause: Cause, waited: Duration) -> Error {
        self.fail_by(&Failure { by: self.rank(), cause }, waited)
    }

    /// [`fail`](Self::fail) for a failure of another rank.
    pub(super) fn fail_by(&self, failure: &Failure, waited: Duration) -> Error {
        self.segment().fail(self.rank(), failure);
        self.check_failure(waited).expect_err("it has failed now")
    }

    /// Name of the call in error texts.
    pub(super) fn name(&self) -> String {
        self.host.core.name_of(self.desc.verb, self.seq)
    }
}

/// Value that all ranks' `Drained` must reach before a rank's `Staged` can reach `staged`.
fn drained_before(staged: u64) -> u64 {
    staged.saturating_sub(STAGES)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::GroupOptions;
    use crate::backend::Backend as _;
    use crate::backend::core::{BARRIER, DEFAULT_WAIT};
    use crate::backend::host::threads;

    /// A rank may abort its group on another thread while an operation times out.
    #[test]
    fn a_timeout_after_an_abort_of_the_same_rank_does_not_change_its_reason() {
        let hosts = threads::group(2, &GroupOptions::default()).unwrap();
        let mut state = hosts[0].state.lock();
        let call = hosts[0].call(&mut state, &BARRIER, BufferLocation::Private, DEFAULT_WAIT);
        hosts[0].abort("enough");
        let own = call.timed_out(0..2, Duration::ZERO, &|_| false, None).unwrap_err();
        for error in [own, hosts[1].health().unwrap_err()] {
            assert!(
                matches!(&error, Error::Aborted { by: 0, reason } if reason == "enough"),
                "{error}"
            );
        }
    }
}
