//! A pending operation: its state in the [watchdog](super::watchdog), and the caller's handle,
//! which is behind a [`DeviceWork`](crate::device::DeviceWork).
//!
//! Invariant: an operation has succeeded only if its end event was reached before the group failed.

#![expect(unsafe_code, reason = "passes streams to the library")]

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::library::{Communicator, EventOf};
use super::progress::Participants;
use super::watchdog::{ABORT_TIMEOUT, POLL, Watchdog, abort_error};
use crate::backend::device_memory::{DeviceStream, Ended, InFlight, Mark as _};
use crate::{OpDesc, Result};

/// A list of operations in a stream.
pub(super) struct Pending<C: Communicator> {
    /// The first operation, for error texts.
    pub(super) first: OpDesc,
    pub(super) participants: Participants,
    /// Sequence number among the lists of all ranks, or among the lists of messages.
    pub(super) seq: u64,
    pub(super) timeout: Duration,
    /// Events before and after the operations.
    pub(super) begin: EventOf<C>,
    pub(super) end: EventOf<C>,
    /// Resources that the launch needs until it has completed.
    pub(super) kept: OnceLock<C::KeepAlive>,
    /// `end` has been recorded.
    pub(super) launched: AtomicBool,
    /// The launch failed, and `end` has been recorded after the part that is in the stream.
    pub(super) closed: AtomicBool,
    pub(super) enqueued: Instant,
    pub(super) begun: OnceLock<Instant>,
    /// When a caller began to wait for it.
    pub(super) waited: OnceLock<Instant>,
    pub(super) ended: Mutex<Option<Ended>>,
    pub(super) outcome: OnceLock<Result<()>>,
}

impl<C: Communicator> fmt::Debug for Pending<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pending").field("first", &self.first).finish_non_exhaustive()
    }
}

impl<C: Communicator> Pending<C> {
    /// Sets the outcome and calls `ended`, once.
    pub(super) fn complete(&self, result: &Result<()>) {
        // Held until the outcome is set, so `ended` has been called before a caller sees the
        // outcome.
        let mut ended = self.ended.lock();
        if self.outcome.get().is_none() {
            if let Some(ended) = ended.take() {
                ended(result);
            }
            self.outcome.get_or_init(|| result.clone());
        }
    }

    /// Returns whether the device may still run it.
    pub(super) fn is_under_way(&self) -> bool {
        // Acquire: pairs with the stores after the end was recorded.
        let recorded = self.launched.load(Ordering::Acquire) || self.closed.load(Ordering::Acquire);
        !(recorded && matches!(self.end.reached(), Ok(true)))
    }

    /// Returns when its timeout started, if it has, and whether its stream has reached it.
    pub(super) fn since(&self) -> Option<(Instant, bool)> {
        // Acquire: pairs with the store after the end was recorded.
        if !self.launched.load(Ordering::Acquire) {
            return Some((self.enqueued, true));
        }
        let begun = self.begun.get().map(|&at| (at, true));
        begun.or_else(|| self.waited.get().map(|&at| (at, false)))
    }
}

/// The operation behind a [`DeviceWork`](crate::device::DeviceWork).
#[derive(Debug)]
pub(super) struct DeviceOp<C: Communicator> {
    pub(super) op: Arc<Pending<C>>,
    pub(super) watchdog: Weak<Watchdog<C>>,
}

impl<C: Communicator> InFlight for DeviceOp<C> {
    fn settled(&self) -> Option<Result<()>> {
        let op = &self.op;
        if let Some(outcome) = op.outcome.get() {
            if let (Err(_), Some(watchdog)) = (outcome, self.watchdog.upgrade()) {
                watchdog.returned.store(true, Ordering::Relaxed);
            }
            return Some(outcome.clone());
        }
        // A group that was dropped has completed its operations, unless an abort hangs.
        let Some(watchdog) = self.watchdog.upgrade() else {
            return Some(Err(abort_error::<C>(Ok(ABORT_TIMEOUT), None)));
        };
        if let Some((error, at)) = watchdog.failed.get() {
            // After that time, the watchdog's abort hangs.
            let hangs = at.elapsed() > ABORT_TIMEOUT;
            return hangs.then(|| Err(abort_error::<C>(Ok(ABORT_TIMEOUT), Some(error))));
        }
        match watchdog.communicator.ended(&op.end) {
            // Read the failure after the event: it is set before the abort.
            Ok(true) if watchdog.failure().is_none() => {
                op.complete(&Ok(()));
                watchdog.wake();
                Some(Ok(()))
            }
            Ok(_) => None,
            Err(error) => {
                watchdog.observed.lock().get_or_insert(error);
                watchdog.wake();
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
                // 1% of the time waited so far, so that little latency is added.
                let nap = (waited / 100).clamp(Duration::from_micros(20), POLL);
                std::thread::sleep(timeout.map_or(nap, |timeout| nap.min(timeout - waited)));
            }
        }
    }

    unsafe fn order(&self, stream: DeviceStream) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.op.end.order(stream) }
    }
}
