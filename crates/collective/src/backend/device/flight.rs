//! An operation under way, from its two ends: what the watching thread keeps of it, and what a
//! [`DeviceWork`](crate::device::DeviceWork) asks.
//!
//! The invariant is the watch's: an operation is done only if its event was reached before there was
//! a verdict.

#![expect(unsafe_code, reason = "hands streams on")]

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::herald::{Case, List};
use super::library::{Communicator, EventOf};
use super::watch::{ABORT, BUSY, Shared, stuck};
use crate::device::{DeviceStream, Ended, InFlight, Mark as _};
use crate::{OpDesc, Rank, Result, Verb};

/// A list of operations in a stream.
#[derive(Debug)]
pub(super) struct Op<C: Communicator> {
    /// The first of them, for texts.
    pub(super) first: OpDesc,
    /// What it is to the peers: a place in the group's history, or messages.
    pub(super) case: Case,
    pub(super) seq: u64,
    pub(super) timeout: Duration,
    /// Reached before and after.
    pub(super) begin: EventOf<C>,
    pub(super) end: EventOf<C>,
    /// What the launch needs until it has ended.
    pub(super) kept: OnceLock<C::Kept>,
    /// `end` has been recorded.
    pub(super) launched: AtomicBool,
    /// The launch failed, and `end` is behind what it has left in the stream.
    pub(super) closed: AtomicBool,
    pub(super) enqueued: Instant,
    pub(super) begun: OnceLock<Instant>,
    /// Since when somebody waits for it.
    pub(super) waited: OnceLock<Instant>,
    pub(super) ended: Mutex<Option<EndedOnce>>,
    pub(super) outcome: OnceLock<Result<()>>,
}

/// [`Ended`], which has no `Debug`.
pub(super) struct EndedOnce(pub(super) Ended);

impl std::fmt::Debug for EndedOnce {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Ended")
    }
}

impl<C: Communicator> Op<C> {
    pub(super) fn new(
        ops: &[OpDesc],
        (seq, case): (u64, Case),
        timeout: Duration,
        [begin, end]: [EventOf<C>; 2],
        ended: Ended,
    ) -> Self {
        Self {
            first: ops[0],
            case,
            seq,
            timeout,
            begin,
            end,
            kept: OnceLock::new(),
            launched: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            enqueued: Instant::now(),
            begun: OnceLock::new(),
            waited: OnceLock::new(),
            ended: Mutex::new(Some(EndedOnce(ended))),
            outcome: OnceLock::new(),
        }
    }

    pub(super) fn settle(&self, result: &Result<()>) {
        // Held until the outcome can be seen: whoever sees it finds it told.
        let mut ended = self.ended.lock();
        if self.outcome.get().is_none() {
            if let Some(EndedOnce(ended)) = ended.take() {
                ended(result);
            }
            self.outcome.get_or_init(|| result.clone());
        }
    }

    /// Whether the device may still be at it.
    pub(super) fn is_under_way(&self) -> bool {
        // Acquire: pairs with the stores after the end was recorded.
        let recorded = self.launched.load(Ordering::Acquire) || self.closed.load(Ordering::Acquire);
        !(recorded && matches!(self.end.reached(), Ok(true)))
    }

    /// Since when it may be waited for, if it may; and whether its stream is there.
    pub(super) fn since(&self) -> Option<(Instant, bool)> {
        // Acquire: pairs with the store after the end was recorded.
        if !self.launched.load(Ordering::Acquire) {
            return Some((self.enqueued, true));
        }
        let begun = self.begun.get().map(|&at| (at, true));
        begun.or_else(|| self.waited.get().map(|&at| (at, false)))
    }
}

/// A [`DeviceWork`](crate::device::DeviceWork)'s side of an operation.
#[derive(Debug)]
pub(super) struct Flight<C: Communicator> {
    pub(super) op: Arc<Op<C>>,
    pub(super) shared: Weak<Shared<C>>,
}

impl<C: Communicator> InFlight for Flight<C> {
    fn settled(&self) -> Option<Result<()>> {
        let op = &self.op;
        if let Some(outcome) = op.outcome.get() {
            if let (Err(_), Some(shared)) = (outcome, self.shared.upgrade()) {
                shared.told.store(true, Ordering::Relaxed);
            }
            return Some(outcome.clone());
        }
        // A group that is gone has settled its operations, unless an abort hangs.
        let Some(shared) = self.shared.upgrade() else { return Some(Err(stuck::<C>(None, None))) };
        if let Some((error, at)) = shared.verdict.get() {
            // Past that the watch hangs in an abort.
            return (at.elapsed() > ABORT).then(|| Err(stuck::<C>(None, Some(error))));
        }
        match shared.communicator.ended(&op.end) {
            // The verdict is looked at after the event: who aborts has set it before.
            Ok(true) if shared.verdict().is_none() => {
                op.settle(&Ok(()));
                shared.wake();
                Some(Ok(()))
            }
            Ok(_) => None,
            Err(error) => {
                shared.posted.lock().get_or_insert(error);
                shared.wake();
                None
            }
        }
    }

    fn wait(&self, timeout: Option<Duration>) -> Result<bool> {
        let start = Instant::now();
        if timeout.is_none() {
            self.op.waited.get_or_init(|| start);
        }
        loop {
            if let Some(outcome) = self.settled() {
                return outcome.map(|()| true);
            }
            let waited = start.elapsed();
            if timeout.is_some_and(|timeout| waited >= timeout) {
                return Ok(false);
            }
            if waited < Duration::from_micros(50) {
                std::thread::yield_now();
            } else {
                // A hundredth of what has been waited already, so that little is lost.
                let nap = (waited / 100).clamp(Duration::from_micros(20), BUSY);
                std::thread::sleep(timeout.map_or(nap, |timeout| nap.min(timeout - waited)));
            }
        }
    }

    unsafe fn order(&self, stream: DeviceStream) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.op.end.order(stream) }
    }
}

/// The place of a list in the group's history, or its messages; `None` for messages with nobody.
pub(super) fn case(seq: u64, ops: &[OpDesc], peers: impl Iterator<Item = Rank>) -> Case {
    if ops.iter().any(|op| op.verb != Verb::Batch) {
        return Case::All(List::new(seq, ops));
    }
    let mut peers: Vec<Rank> = peers.collect();
    peers.sort_unstable();
    peers.dedup();
    Case::Messages(peers)
}
