//! Pending operations, and the thread that watches them.
//!
//! While operations are pending the thread polls every millisecond: which streams have reached
//! their operations, which operations have ended, whether the host side of the group has failed,
//! whether the library reports an error, and whether an operation has timed out. Only this thread
//! decides why the group has failed, and only it aborts the communicator, once: callers report an
//! error with [`fail`](Watchdog::fail) and wait for the decision.
//!
//! Invariant: an operation has succeeded only if its end event was reached before the group failed,
//! because an abort lets streams continue, too.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, mpsc};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::library::{Communicator, PossibleCause};
use super::pending::Pending;
use super::progress::{
    DIAGNOSING, FailureReason, Participants, Progress, RankFailure, Records, diagnosis_time,
};
use crate::backend::Backend;
use crate::backend::device_memory::Mark as _;
use crate::{Error, Result};

/// Largest number of pending lists.
const MAX_PENDING: usize = 1024;
/// Time between two polls while operations are pending, and while none is.
pub(super) const POLL: Duration = Duration::from_millis(1);
const IDLE_POLL: Duration = Duration::from_millis(50);
/// Time for the host side to name a dead rank after the library has reported a failure.
const HOST_ERROR_WAIT: Duration = Duration::from_millis(500);
/// Time for the store to write or read a record, in addition to a diagnosis.
const STORE_WAIT: Duration = Duration::from_secs(1);
/// Time for an abort, after which waits return without it.
pub(super) const ABORT_TIMEOUT: Duration = Duration::from_secs(10);

/// State that the watchdog thread shares with the callers.
#[derive(Debug)]
pub(super) struct Watchdog<C: Communicator> {
    pub(super) host: Arc<dyn Backend>,
    pub(super) communicator: Arc<C>,
    records: Arc<Records>,
    /// Which lists were enqueued and which were reached by their streams.
    progress: Mutex<Progress>,
    /// The group's name.
    pub(super) name: String,
    pending: Mutex<VecDeque<Arc<Pending<C>>>>,
    /// With `pending`: wakes the thread.
    changed: Condvar,
    /// First error that a caller has seen.
    pub(super) observed: Mutex<Option<Error>>,
    /// Why the group has failed, and when that was decided.
    pub(super) failed: OnceLock<(Error, Instant)>,
    /// The failure has been returned to a caller; later calls get [`Error::Poisoned`].
    pub(super) returned: AtomicBool,
    /// With `abort_ended`: the failure that callers get, set when the abort has ended.
    aborted: Mutex<Option<Error>>,
    abort_ended: Condvar,
    stop: AtomicBool,
}

/// A failure that the thread has detected.
enum Trigger<C: Communicator> {
    HostFailed(Error),
    DeviceFailed(Error),
    /// An operation, how long it has lasted, and whether its stream has reached it.
    TimedOut(Arc<Pending<C>>, Duration, bool),
}

impl<C: Communicator> Watchdog<C> {
    pub(super) fn new(
        host: Arc<dyn Backend>,
        communicator: Arc<C>,
        records: Records,
        name: String,
    ) -> Self {
        Self {
            host,
            communicator,
            records: Arc::new(records),
            progress: Mutex::default(),
            name,
            pending: Mutex::default(),
            changed: Condvar::new(),
            observed: Mutex::default(),
            failed: OnceLock::new(),
            returned: AtomicBool::new(false),
            aborted: Mutex::default(),
            abort_ended: Condvar::new(),
            stop: AtomicBool::new(false),
        }
    }

    /// Returns why the group has failed, if it has.
    pub(super) fn failure(&self) -> Option<&Error> {
        self.failed.get().map(|(error, _)| error)
    }

    /// Fails if the group has failed: with the failure the first time, then with
    /// [`Error::Poisoned`].
    pub(super) fn ready(&self) -> Result<()> {
        match self.failure() {
            None => Ok(()),
            // Relaxed: of concurrent callers, any one may get the failure itself.
            Some(error) if !self.returned.swap(true, Ordering::Relaxed) => Err(error.clone()),
            Some(error) => Err(Error::Poisoned(Box::new(error.clone()))),
        }
    }

    /// Adds an operation; blocks while [`MAX_PENDING`] are pending.
    pub(super) fn add(&self, op: &Arc<Pending<C>>) -> Result<()> {
        let mut pending = self.pending.lock();
        while pending.len() >= MAX_PENDING {
            let oldest = Arc::clone(&pending[0]);
            drop(pending);
            oldest.waited.get_or_init(Instant::now);
            std::thread::sleep(POLL);
            if self.failure().is_some() {
                return Err(self.wait_for_failure());
            }
            pending = self.pending.lock();
        }
        if let Participants::All(list) = &op.participants {
            self.progress.lock().enqueued = list.seq + 1;
        }
        pending.push_back(Arc::clone(op));
        self.changed.notify_one();
        Ok(())
    }

    pub(super) fn wake(&self) {
        drop(self.pending.lock());
        self.changed.notify_one();
    }

    pub(super) fn stop(&self) {
        // Release: pairs with the thread's Acquire.
        self.stop.store(true, Ordering::Release);
        self.wake();
    }

    /// Blocks until nothing is pending or the group has failed.
    pub(super) fn drain(&self) {
        loop {
            let oldest = self.pending.lock().front().cloned();
            let Some(op) = oldest else { return };
            if self.failure().is_some() {
                return;
            }
            op.waited.get_or_init(Instant::now);
            self.wake();
            std::thread::sleep(POLL);
        }
    }

    /// Fails the group because of an error that a caller has seen. Returns why the group has
    /// failed, which may be an earlier failure.
    pub(super) fn fail(&self, error: Error) -> Error {
        self.observed.lock().get_or_insert(error);
        self.wait_for_failure()
    }

    /// Blocks until the abort has ended, so that the device has released all memory, and returns
    /// why the group failed. Only for a group that has failed or is certain to.
    pub(super) fn wait_for_failure(&self) -> Error {
        self.wake();
        let deadline = Instant::now() + HOST_ERROR_WAIT + 2 * self.store_timeout() + ABORT_TIMEOUT;
        let mut aborted = self.aborted.lock();
        while aborted.is_none() {
            if self.abort_ended.wait_until(&mut aborted, deadline).timed_out() {
                break;
            }
        }
        self.returned.store(true, Ordering::Relaxed);
        aborted.clone().unwrap_or_else(|| abort_error::<C>(Ok(ABORT_TIMEOUT), self.failure()))
    }

    /// Blocks until it is decided why the group failed, and returns that; not until the abort has
    /// ended. Only for a group that is certain to fail.
    pub(super) fn wait_for_decision(&self) -> Option<Error> {
        self.wake();
        let deadline = Instant::now() + HOST_ERROR_WAIT + 2 * self.store_timeout();
        while self.failure().is_none() && Instant::now() < deadline {
            std::thread::sleep(POLL);
        }
        self.returned.store(true, Ordering::Relaxed);
        self.failure().cloned()
    }

    pub(super) fn is_aborted(&self) -> bool {
        self.aborted.lock().is_some()
    }

    /// Returns the timeout of [`with_records`](Self::with_records).
    fn store_timeout(&self) -> Duration {
        STORE_WAIT + diagnosis_time(self.host.world_size())
    }

    /// Calls `call` on another thread, because a store that does not respond must not delay this
    /// one. Returns `None` after the timeout.
    fn with_records<R: Send + 'static>(
        &self,
        call: impl FnOnce(&Records) -> R + Send + 'static,
    ) -> Option<R> {
        let (reply, answer) = mpsc::channel();
        let records = Arc::clone(&self.records);
        let thread = std::thread::Builder::new().name("collective-diagnosis".into());
        // The receiver may be gone when the answer comes.
        thread.spawn(move || drop(reply.send(call(&records)))).ok()?;
        answer.recv_timeout(self.store_timeout()).ok()
    }

    fn name_of(&self, op: &Pending<C>) -> String {
        format!("{} #{} of group {}", op.first.verb, op.seq, self.name)
    }

    /// Runs the watchdog thread.
    pub(super) fn run(&self) {
        let mut polls = 0_u32;
        loop {
            let mut pending = self.pending.lock();
            let pause = if pending.is_empty() { IDLE_POLL } else { POLL };
            self.changed.wait_for(&mut pending, pause);
            drop(pending);
            // Acquire: pairs with `stop`.
            if self.stop.load(Ordering::Acquire) {
                return;
            }
            polls = polls.wrapping_add(1);
            let trigger = match self.poll(pause == IDLE_POLL || polls.is_multiple_of(10)) {
                Ok(()) => self.check_timeouts(),
                Err(trigger) => Some(trigger),
            };
            if let Some(trigger) = trigger {
                self.fail_group(trigger);
                return;
            }
        }
    }

    /// Records which operations have begun and ended, and checks for failures; those of the library
    /// if `poll_library`.
    fn poll(&self, poll_library: bool) -> std::result::Result<(), Trigger<C>> {
        if let Some(error) = self.observed.lock().take() {
            return Err(Trigger::DeviceFailed(error));
        }
        self.host.health().map_err(Trigger::HostFailed)?;
        self.note_progress().map_err(Trigger::DeviceFailed)?;
        if poll_library {
            self.communicator.healthy().map_err(Trigger::DeviceFailed)?;
        }
        Ok(())
    }

    fn note_progress(&self) -> Result<()> {
        let ops: Vec<Arc<Pending<C>>> = self.pending.lock().iter().cloned().collect();
        for op in &ops {
            let ended = match op.outcome.get() {
                Some(_) => Ok(true),
                // Acquire: pairs with the store after the end was recorded.
                None if op.launched.load(Ordering::Acquire) => self.communicator.ended(&op.end),
                None => Ok(false),
            };
            let done = matches!(ended, Ok(true));
            if op.begun.get().is_none() && (done || op.begin.reached()?) {
                op.begun.get_or_init(Instant::now);
                if let Participants::All(list) = &op.participants {
                    self.progress.lock().begin(list);
                }
            }
            // A failed operation is reported as begun, too.
            ended?;
            if done {
                op.complete(&Ok(()));
            }
        }
        self.pending.lock().retain(|op| op.outcome.get().is_none());
        Ok(())
    }

    /// Returns how far this rank's streams are now.
    fn progress(&self) -> Progress {
        // A failure of the library or the device is reported already, or will be.
        drop(self.note_progress());
        let mut progress = self.progress.lock().clone();
        for op in self.pending.lock().iter() {
            match (&op.participants, op.begun.get()) {
                (Participants::All(list), None) => progress.waiting.push(list.seq),
                (Participants::Peers(peers), Some(_)) => progress.messages.extend(peers),
                _ => {}
            }
        }
        progress
    }

    /// Returns a trigger if an operation has timed out.
    fn check_timeouts(&self) -> Option<Trigger<C>> {
        self.pending.lock().iter().find_map(|op| {
            let (since, reached) = op.since()?;
            let waited = since.elapsed();
            let late = waited >= op.timeout;
            late.then(|| Trigger::TimedOut(Arc::clone(op), waited, reached))
        })
    }

    /// Decides why the group has failed, informs the peers, aborts the communicator, and completes
    /// all operations.
    fn fail_group(&self, trigger: Trigger<C>) {
        // A caller may have completed an operation that is still in the list.
        let open = |op: &&Arc<Pending<C>>| op.outcome.get().is_none();
        let oldest = self.pending.lock().iter().find(open).cloned();
        let during = oldest.as_ref().map(|op| self.name_of(op));
        let during = during.unwrap_or_else(|| format!("group {}", self.name));
        let since = oldest.as_ref().and_then(|op| op.since());
        let waited = since.map_or(Duration::ZERO, |(since, _)| since.elapsed());
        let error = match trigger {
            Trigger::HostFailed(error) => self.host_failure(error, during, waited),
            Trigger::DeviceFailed(error) => match self.host_error(&error) {
                Some(host) => self.host_failure(host, during, waited),
                None => match oldest {
                    Some(op) if C::possible_cause(&error) != PossibleCause::AsReported => {
                        self.diagnose(&op, waited, true, Some(error))
                    }
                    _ => {
                        // Every rank detects a mismatch itself.
                        if !matches!(error, Error::Mismatch { .. }) {
                            self.host.abort(&error.to_string());
                        }
                        error
                    }
                },
            },
            Trigger::TimedOut(op, waited, reached) => self.diagnose(&op, waited, reached, None),
        };
        // Only this thread sets it.
        drop(self.failed.set((error.clone(), Instant::now())));
        let under_way = || {
            let ops: Vec<Arc<Pending<C>>> = self.pending.lock().iter().cloned().collect();
            ops.iter().any(|op| op.is_under_way())
        };
        let start = Instant::now();
        let aborted = self.communicator.abort(&under_way);
        let released = matches!(aborted, Ok(true));
        let ops = std::mem::take(&mut *self.pending.lock());
        let failure = match aborted {
            Ok(true) => error,
            other => abort_error::<C>(other.map(|_| start.elapsed()), Some(&error)),
        };
        ops.iter().for_each(|op| op.complete(&Err(failure.clone())));
        if !released {
            // The device may still use the resources of the launches.
            std::mem::forget(ops);
        }
        *self.aborted.lock() = Some(failure);
        self.abort_ended.notify_all();
    }

    /// Aborts the host side, finds out why `op` has not completed, informs the peers, and returns
    /// the error. `reported` is an error of the library that may be due to missing ranks or a
    /// mismatch but names no rank.
    fn diagnose(
        &self,
        op: &Pending<C>,
        waited: Duration,
        reached: bool,
        reported: Option<Error>,
    ) -> Error {
        let (rank, name) = (self.host.rank(), self.name_of(op));
        self.host.abort(DIAGNOSING);
        match self.host.health() {
            Err(Error::Aborted { by, reason }) if by == rank && reason == DIAGNOSING => {}
            // Another failure was first.
            Err(error) => return self.host_failure(error, name, waited),
            Ok(()) => {}
        }
        let mut reason = if reached {
            let (own, participants) = (self.progress(), op.participants.clone());
            let found = self.with_records(move |records| records.diagnose(&own, &participants));
            found.unwrap_or_else(|| FailureReason::Unknown("the store does not answer".into()))
        } else {
            FailureReason::Missing(vec![rank])
        };
        let how = match (reported.as_ref().map(C::possible_cause), &reason) {
            (Some(PossibleCause::MismatchOrMissing(how)), FailureReason::Missing(_)) => Some(how),
            _ => None,
        };
        let error = match (reported, how) {
            (Some(error), None) if !matches!(reason, FailureReason::Mismatch(..)) => {
                // The ranks found do not explain the library's error.
                reason = FailureReason::NoneMissing;
                error
            }
            (_, how) => {
                let name = how.map(|how| format!("{name} {how}")).unwrap_or(name);
                reason.clone().into_error(C::BACKEND, name, waited)
            }
        };
        let failure = RankFailure { reason, text: error.to_string() };
        drop(self.with_records(move |records| records.publish_failure(&failure)));
        error
    }

    /// Returns the host side's failure, if any. Waits for it if a peer may have caused `error`.
    fn host_error(&self, error: &Error) -> Option<Error> {
        let wait = if C::is_remote(error) { HOST_ERROR_WAIT } else { Duration::ZERO };
        let deadline = Instant::now() + wait;
        loop {
            match self.host.health() {
                Err(error) => return Some(error),
                Ok(()) if Instant::now() >= deadline => return None,
                Ok(()) => std::thread::sleep(POLL),
            }
        }
    }

    /// Converts a failure of the host side to the error of `op`.
    fn host_failure(&self, error: Error, op: String, waited: Duration) -> Error {
        match error {
            Error::PeerDied { rank, pid, .. } => Error::PeerDied { op, rank, pid },
            Error::Timeout { missing, .. } => Error::Timeout { op, waited, missing },
            Error::Aborted { by, reason } if reason == DIAGNOSING => {
                let own = self.progress();
                match self.with_records(move |records| records.failure_of(by, &own)).flatten() {
                    Some(RankFailure { reason, .. })
                        if reason.is_about_others(self.host.rank()) =>
                    {
                        reason.into_error(C::BACKEND, op, waited)
                    }
                    Some(RankFailure { text, .. }) => Error::Aborted { by, reason: text },
                    None => Error::Aborted { by, reason },
                }
            }
            other => other,
        }
    }
}

/// Returns the error for an abort that failed or has not ended after this time: the device may
/// still use the memory.
pub(super) fn abort_error<C: Communicator>(
    aborted: Result<Duration>,
    failure: Option<&Error>,
) -> Error {
    let why = failure.map_or_else(|| "not known yet".into(), ToString::to_string);
    let (name, code, how) = match aborted {
        Err(Error::Backend { name, code, text, .. }) => (name, code, text),
        Err(error) => ("failed".into(), 0, error.to_string()),
        Ok(waited) => ("timed out".into(), 0, format!("not completed after {waited:?}")),
    };
    let until = C::IN_USE_UNTIL;
    let text = format!(
        "{how}, so the device may still use the memory of operations{until}; why the group failed: {why}"
    );
    Error::Backend { backend: C::BACKEND, during: C::ABORT.into(), name, code, text }
}
