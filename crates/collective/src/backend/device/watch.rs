//! Operations under way, and the thread that watches over them.
//!
//! The thread looks every millisecond while something is under way: which streams have reached their
//! operations and which operations have ended, whether the host's side of the group has failed,
//! whether the library reports an error, and whether time is over for the oldest operation. It alone decides
//! why the group has failed, and it alone aborts the communicator, once: everybody else
//! [posts](Shared::fail) what they saw and waits for the verdict.
//!
//! The invariant: an operation is done only if its event was reached before there was a verdict,
//! because an abort lets streams go on, too.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, mpsc};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::flight::Op;
use super::herald::{Case, Finding, Herald, Verdict, inquest_time};
use super::library::{Communicator, Doubt};
use crate::backend::Backend;
use crate::device::Mark as _;
use crate::{Error, Rank, Result};

/// Lists that may be under way at once.
const MOST: usize = 1024;
/// Between two looks while something is under way, and while nothing is.
pub(super) const BUSY: Duration = Duration::from_millis(1);
const IDLE: Duration = Duration::from_millis(50);
/// How long the host's side may take to name the dead whose silence the library has noticed.
const NAMING: Duration = Duration::from_millis(500);
/// How long the store may take to tell a verdict, or to hear one, beside an inquest.
const TELLING: Duration = Duration::from_secs(1);
/// How long an abort may take before waits end without it.
pub(super) const ABORT: Duration = Duration::from_secs(10);

/// What the watching thread shares with the callers.
#[derive(Debug)]
pub(super) struct Shared<C: Communicator> {
    pub(super) host: Arc<dyn Backend>,
    pub(super) communicator: Arc<C>,
    pub(super) herald: Herald,
    pub(super) name: String,
    pub(super) rank: Rank,
    pub(super) world: usize,
    ops: Mutex<VecDeque<Arc<Op<C>>>>,
    /// With `ops`: wakes the thread.
    changed: Condvar,
    /// What a caller saw.
    pub(super) posted: Mutex<Option<Error>>,
    pub(super) verdict: OnceLock<(Error, Instant)>,
    /// A caller has got the verdict; from then on the group is poisoned.
    pub(super) told: AtomicBool,
    /// With `over`: once the abort is over, the failure as it is told.
    aborted: Mutex<Option<Error>>,
    over: Condvar,
    stop: AtomicBool,
}

/// Why the thread thinks that the group has failed.
enum Cause<C: Communicator> {
    /// The host's side has.
    Host(Error),
    /// Something failed here.
    Own(Error),
    /// Time is over for this one.
    Late(Arc<Op<C>>, Duration, Finding),
}

impl<C: Communicator> Shared<C> {
    pub(super) fn new(
        host: Arc<dyn Backend>,
        communicator: Arc<C>,
        herald: Herald,
        name: String,
    ) -> Self {
        Self {
            rank: host.rank(),
            world: host.world_size(),
            host,
            communicator,
            herald,
            name,
            ops: Mutex::default(),
            changed: Condvar::new(),
            posted: Mutex::default(),
            verdict: OnceLock::new(),
            told: AtomicBool::new(false),
            aborted: Mutex::default(),
            over: Condvar::new(),
            stop: AtomicBool::new(false),
        }
    }

    /// Why the group has failed, if it has.
    pub(super) fn verdict(&self) -> Option<&Error> {
        self.verdict.get().map(|(error, _)| error)
    }

    /// The verdict for a caller who meets it: as it is for the first, then as poison.
    pub(super) fn met(&self) -> Result<()> {
        match self.verdict() {
            None => Ok(()),
            // Relaxed: whoever comes first, each caller gets one or the other.
            Some(error) if !self.told.swap(true, Ordering::Relaxed) => Err(error.clone()),
            Some(error) => Err(Error::Poisoned(Box::new(error.clone()))),
        }
    }

    /// Adds an operation, once there is room.
    pub(super) fn watch(&self, op: &Arc<Op<C>>) -> Result<()> {
        let mut ops = self.ops.lock();
        while ops.len() >= MOST {
            let oldest = Arc::clone(&ops[0]);
            drop(ops);
            oldest.waited.get_or_init(Instant::now);
            std::thread::sleep(BUSY);
            if self.verdict().is_some() {
                return Err(self.failure());
            }
            ops = self.ops.lock();
        }
        ops.push_back(Arc::clone(op));
        self.changed.notify_one();
        Ok(())
    }

    pub(super) fn wake(&self) {
        drop(self.ops.lock());
        self.changed.notify_one();
    }

    pub(super) fn stop(&self) {
        // Release: pairs with the thread's Acquire.
        self.stop.store(true, Ordering::Release);
        self.wake();
    }

    /// Waits, for as long as the watch lets it take, until nothing is under way.
    pub(super) fn drain(&self) {
        loop {
            let oldest = self.ops.lock().front().cloned();
            let Some(op) = oldest else { return };
            if self.verdict().is_some() {
                return;
            }
            op.waited.get_or_init(Instant::now);
            self.wake();
            std::thread::sleep(BUSY);
        }
    }

    /// Fails the group for what a caller saw, and returns why it has failed, which may be something
    /// else.
    pub(super) fn fail(&self, error: Error) -> Error {
        self.posted.lock().get_or_insert(error);
        self.failure()
    }

    /// Why the group has failed, once the device has let go of all memory; for when it must fail.
    pub(super) fn failure(&self) -> Error {
        self.wake();
        let deadline = Instant::now() + NAMING + 2 * self.telling() + ABORT;
        let mut aborted = self.aborted.lock();
        while aborted.is_none() {
            if self.over.wait_until(&mut aborted, deadline).timed_out() {
                break;
            }
        }
        self.told.store(true, Ordering::Relaxed);
        aborted.clone().unwrap_or_else(|| stuck::<C>(None, self.verdict()))
    }

    /// Whether the abort is over.
    pub(super) fn is_aborted(&self) -> bool {
        self.aborted.lock().is_some()
    }

    /// How long the thread that talks to the store may take for one request.
    fn telling(&self) -> Duration {
        TELLING + inquest_time(self.world)
    }

    fn name_of(&self, op: &Op<C>) -> String {
        format!("{} #{} of group {}", op.first.verb, op.seq, self.name)
    }

    /// The thread.
    pub(super) fn run(&self) {
        let mut inquest = None;
        let mut looks = 0_u32;
        loop {
            let mut ops = self.ops.lock();
            let pause = if ops.is_empty() { IDLE } else { BUSY };
            self.changed.wait_for(&mut ops, pause);
            drop(ops);
            // Acquire: pairs with `stop`.
            if self.stop.load(Ordering::Acquire) {
                return;
            }
            looks = looks.wrapping_add(1);
            let cause = match self.look(pause == IDLE || looks.is_multiple_of(10)) {
                Ok(()) => self.late(&mut inquest),
                Err(cause) => Some(cause),
            };
            if let Some(cause) = cause {
                self.conclude(cause);
                return;
            }
        }
    }

    /// Notes what has begun and ended, and looks for failures; of the library's only if asked.
    fn look(&self, ask_library: bool) -> std::result::Result<(), Cause<C>> {
        if let Some(error) = self.posted.lock().take() {
            return Err(Cause::Own(error));
        }
        self.host.health().map_err(Cause::Host)?;
        self.note_progress().map_err(Cause::Own)?;
        if ask_library {
            self.communicator.healthy().map_err(Cause::Own)?;
        }
        Ok(())
    }

    fn note_progress(&self) -> Result<()> {
        let ops: Vec<Arc<Op<C>>> = self.ops.lock().iter().cloned().collect();
        let mut messages = Vec::new();
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
                if let Case::All(list) = &op.case {
                    self.herald.progress.lock().begin(list);
                }
            }
            // Told as begun all the same.
            ended?;
            if done {
                op.settle(&Ok(()));
            } else if let Case::Messages(peers) = &op.case {
                messages.extend(peers.iter().copied());
            }
        }
        self.herald.progress.lock().set_messages(&messages);
        self.ops.lock().retain(|op| op.outcome.get().is_none());
        Ok(())
    }

    /// Whether time is over for an operation. Who is missing is asked a little before.
    fn late(
        &self,
        inquest: &mut Option<(Arc<Op<C>>, mpsc::Receiver<Finding>)>,
    ) -> Option<Cause<C>> {
        let head = |op: &Op<C>| inquest_time(self.world).min(op.timeout / 2);
        let due = |op: &&Arc<Op<C>>| {
            op.since().is_some_and(|(since, _)| since.elapsed() + head(op) >= op.timeout)
        };
        let op = self.ops.lock().iter().find(due).cloned();
        let Some(op) = op else {
            *inquest = None;
            return None;
        };
        let (since, here) = op.since()?;
        let waited = since.elapsed();
        if !here {
            let missing = Finding::Missing(vec![self.rank]);
            return (waited >= op.timeout).then_some(Cause::Late(op, waited, missing));
        }
        if inquest.as_ref().is_none_or(|(about, _)| !Arc::ptr_eq(about, &op)) {
            *inquest = Some((Arc::clone(&op), self.herald.inquire(op.case.clone())));
        }
        let (_, answer) = inquest.as_ref()?;
        if waited < op.timeout {
            return None;
        }
        let patience = op.timeout + self.telling();
        let finding = match answer.try_recv() {
            Ok(finding) => finding,
            Err(mpsc::TryRecvError::Empty) if waited < patience => return None,
            Err(_) => Finding::Unknown("the store does not answer".into()),
        };
        Some(Cause::Late(op, waited, finding))
    }

    /// Decides why the group has failed, tells the peers, and ends what is under way.
    fn conclude(&self, cause: Cause<C>) {
        // One that its waiter has seen the end of may still be in the list.
        let open = |op: &&Arc<Op<C>>| op.outcome.get().is_none();
        let oldest = self.ops.lock().iter().find(open).cloned();
        let during = oldest.as_ref().map(|op| self.name_of(op));
        let during = during.unwrap_or_else(|| format!("group {}", self.name));
        let waited =
            oldest.as_ref().and_then(|op| op.since()).map_or(Duration::ZERO, |s| s.0.elapsed());
        let error = match cause {
            Cause::Host(error) => self.understand(error, during, waited),
            Cause::Own(error) => match self.named(&error) {
                Some(named) => self.understand(named, during, waited),
                None => match oldest.as_ref().and_then(|op| self.explain(&error, op, waited)) {
                    Some((error, verdict)) => self.tell(error, verdict),
                    None => {
                        // Every rank compares calls for itself.
                        if !matches!(error, Error::Mismatch { .. }) {
                            self.host.abort(&error.to_string());
                        }
                        error
                    }
                },
            },
            Cause::Late(op, waited, finding) => {
                let (error, verdict) = blame::<C>(self.name_of(&op), waited, finding);
                self.tell(error, verdict)
            }
        };
        // Nobody else sets it.
        drop(self.verdict.set((error.clone(), Instant::now())));
        let under_way = || {
            let ops: Vec<Arc<Op<C>>> = self.ops.lock().iter().cloned().collect();
            ops.iter().any(|op| op.is_under_way())
        };
        let aborted = self.communicator.abort(&under_way);
        let let_go = matches!(aborted, Ok(true));
        let ops = std::mem::take(&mut *self.ops.lock());
        let failed = if let_go { error } else { stuck::<C>(aborted.err(), Some(&error)) };
        ops.iter().for_each(|op| op.settle(&Err(failed.clone())));
        if !let_go {
            // The device may still use what the launches have kept.
            std::mem::forget(ops);
        }
        *self.aborted.lock() = Some(failed);
        self.over.notify_all();
    }

    /// Tells the peers why the group has failed.
    fn tell(&self, error: Error, verdict: Option<Verdict>) -> Error {
        if let Some(verdict) = verdict {
            self.herald.tell(verdict, self.telling());
        }
        self.host.abort(&error.to_string());
        error
    }

    /// What the peers' progress makes of the library's error, for libraries that end what hangs, or
    /// is called differently, with an error of their own that names nobody.
    fn explain(
        &self,
        error: &Error,
        op: &Op<C>,
        waited: Duration,
    ) -> Option<(Error, Option<Verdict>)> {
        let doubt = C::doubt(error);
        if doubt == Doubt::None {
            return None;
        }
        // Whoever posted the error may have been faster than the last look.
        drop(self.note_progress());
        let answer = self.herald.inquire(op.case.clone());
        match (answer.recv_timeout(self.telling()).ok()?, doubt) {
            (finding @ Finding::Differ(..), _) => {
                Some(blame::<C>(self.name_of(op), waited, finding))
            }
            (finding @ Finding::Missing(_), Doubt::Absent(how)) => {
                Some(blame::<C>(format!("{} {how}", self.name_of(op)), waited, finding))
            }
            _ => None,
        }
    }

    /// Who is to blame for an error that may come from a peer's end: the host's side knows in a
    /// moment.
    fn named(&self, error: &Error) -> Option<Error> {
        let deadline = Instant::now() + if C::is_remote(error) { NAMING } else { Duration::ZERO };
        loop {
            match self.host.health() {
                Err(error) => return Some(error),
                Ok(()) if Instant::now() >= deadline => return None,
                Ok(()) => std::thread::sleep(BUSY),
            }
        }
    }

    /// A failure of the host's side, as this rank tells it of `op`.
    fn understand(&self, error: Error, op: String, waited: Duration) -> Error {
        match error {
            Error::PeerDied { rank, pid, .. } => Error::PeerDied { op, rank, pid },
            Error::Timeout { missing, waited, .. } => Error::Timeout { op, waited, missing },
            Error::Aborted { by, reason } => match self.herald.ask(self.telling()) {
                Some(Verdict::TimedOut(missing)) if !missing.contains(&self.rank) => {
                    Error::Timeout { op, waited, missing }
                }
                Some(Verdict::Mismatch(field, by_rank)) => {
                    let known = ["verb", "dtype", "op", "root", "count", "calls"];
                    let field = known.into_iter().find(|known| *known == field).unwrap_or("verb");
                    Error::Mismatch { op, field, by_rank }
                }
                _ => Error::Aborted { by, reason },
            },
            other => other,
        }
    }
}

/// What an inquest's finding is to this rank, and to its peers.
fn blame<C: Communicator>(
    op: String,
    waited: Duration,
    finding: Finding,
) -> (Error, Option<Verdict>) {
    let unnamed = |text: String| Error::Backend {
        backend: C::BACKEND,
        during: op.clone(),
        name: "timed out".into(),
        code: 0,
        text: format!("not over after {waited:?}; {text}"),
    };
    match finding {
        Finding::Missing(missing) => {
            let verdict = Verdict::TimedOut(missing.clone());
            (Error::Timeout { op, waited, missing }, Some(verdict))
        }
        Finding::Differ(field, by_rank) => {
            let verdict = Verdict::Mismatch(field.into(), by_rank.clone());
            (Error::Mismatch { op, field, by_rank }, Some(verdict))
        }
        Finding::AllHere => {
            let text =
                "the streams of all ranks have reached it, so ranks do not reach one another";
            (unnamed(text.into()), None)
        }
        Finding::Unknown(reason) => {
            (unnamed(format!("nobody knows who is missing: {reason}")), None)
        }
    }
}

/// The device may still use the memory: the abort failed, or is not over in time.
pub(super) fn stuck<C: Communicator>(failed: Option<Error>, verdict: Option<&Error>) -> Error {
    let why = verdict.map_or_else(|| "not known yet".into(), ToString::to_string);
    let (name, code, how) = match failed {
        Some(Error::Backend { name, code, text, .. }) => (name, code, text),
        Some(error) => ("failed".into(), 0, error.to_string()),
        None => ("timed out".into(), 0, format!("not over after {ABORT:?}")),
    };
    let held = C::HELD;
    let text = format!(
        "{how}, so the device may still use the memory of operations{held}; why the group failed: {why}"
    );
    Error::Backend { backend: C::BACKEND, during: C::ABORT.into(), name, code, text }
}
