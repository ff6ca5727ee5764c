//! Operations in flight, and the communication thread that runs them, one per group.
//!
//! A buffer passed to an asynchronous operation moves into its job and is returned through its
//! [`Work`]. So no borrowed memory is in flight: dropping a `Work` frees the buffer when the
//! operation is done, forgetting it leaks, and neither corrupts memory.
//!
//! Jobs are handed to the thread through a channel ([`Queue`]) and counted ([`Unfinished`]);
//! outcomes are handed to their `Work` ([`Slot`]) with a lock and a condition variable. All have
//! loom models at the end of the file.

use std::fmt;
use std::mem;
use std::ops::DerefMut;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use tracing::{Span, dispatcher};

use crate::backend::Backend;
use crate::sync::atomic::{AtomicUsize, Ordering};
use crate::sync::{Condvar, Mutex, MutexGuard, lock, mpsc, thread, wait};
use crate::{Element, Error, Rank, Result};

/// Capacity of a group's queue; submitting to a full queue blocks.
const QUEUE_CAPACITY: usize = if cfg!(loom) { 1 } else { 1024 };

const PANICKED: &str = "an operation panicked on its communication thread";

/// Memory that an asynchronous operation can own.
pub trait Buffer: Send + 'static {
    /// The element type.
    type Elem: Element;

    /// Returns the memory; the length must be the same each time.
    fn as_mut_slice(&mut self) -> &mut [Self::Elem];
}

/// A `Vec`, a `Box` of a slice, a [`SharedBuf`](crate::SharedBuf).
impl<T: Element, B: DerefMut<Target = [T]> + Send + 'static> Buffer for B {
    type Elem = T;

    fn as_mut_slice(&mut self) -> &mut [T] {
        self
    }
}

/// An operation in flight, which owns its buffer, or its buffers as a tuple.
///
/// [`wait`](Self::wait) for it, or `.await` it: it is a future that works with any executor and
/// never blocks one. Dropping it, whether before, between or after polls, lets the operation finish
/// in the background, still in order, and then frees the buffer. Peers are not affected.
///
/// # Examples
///
/// ```
/// # use std::time::Duration;
/// use collective::{ProcessGroup, ReduceOp, Result, SharedBuf};
///
/// fn step(group: &ProcessGroup) -> Result<()> {
///     let mut bucket: SharedBuf<f32> = group.alloc(1000)?;
///     bucket.fill(group.rank() as f32);
///     let work = group.all_reduce_async(bucket, ReduceOp::Avg)?;
///     // Compute the next gradients here.
///     let bucket = work.wait()?;
///     assert!(bucket.iter().all(|&x| x == 0.5));
///     Ok(())
/// }
/// # let groups = ProcessGroup::threads(2, Duration::from_secs(10))?;
/// # std::thread::scope(|scope| {
/// #     for group in groups {
/// #         scope.spawn(move || step(&group).expect("both ranks are here"));
/// #     }
/// # });
/// # Ok::<(), collective::Error>(())
/// ```
#[must_use = "dropping a `Work` loses the buffer and the error"]
pub struct Work<B> {
    slot: Arc<Slot<B>>,
    /// Detects a fork. The backend is dropped only after all operations are done.
    backend: Weak<dyn Backend>,
}

impl<B> Work<B> {
    /// Waits for the operation and returns the buffer.
    ///
    /// Blocks for at most the group's timeout for each step of each operation queued up to this
    /// one.
    ///
    /// # Errors
    ///
    /// The operation's error; the buffer is dropped then. [`Error::InvalidArgument`] in a fork of
    /// the process that started it.
    ///
    /// # Panics
    ///
    /// If a poll has already returned the outcome.
    pub fn wait(self) -> Result<B> {
        self.wait_until(None).unwrap_or_else(|_| unreachable!("there is no deadline"))
    }

    /// Waits for the operation, but no longer than `timeout`: `Ok` with the result of
    /// [`wait`](Self::wait), or `Err` with the `Work` itself, still in flight, to be waited for
    /// again.
    ///
    /// # Errors
    ///
    /// The `Work`, if the operation is not done by then. This is not a failure of the group.
    ///
    /// # Panics
    ///
    /// Same as [`wait`](Self::wait).
    pub fn wait_timeout(self, timeout: Duration) -> Result<Result<B>, Self> {
        self.wait_until(Instant::now().checked_add(timeout))
    }

    /// Returns whether [`wait`](Self::wait) would return at once.
    pub fn is_done(&self) -> bool {
        self.forked() || !matches!(*lock(&self.slot.state), WorkState::InFlight(_))
    }

    fn wait_until(self, deadline: Option<Instant>) -> Result<Result<B>, Self> {
        if self.forked() {
            return Ok(Err(in_a_fork()));
        }
        let mut state = lock(&self.slot.state);
        while matches!(*state, WorkState::InFlight(_)) {
            let Some(deadline) = deadline else {
                state = wait(&self.slot.done, state);
                continue;
            };
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                drop(state);
                return Err(self);
            }
            let woken = self.slot.done.wait_timeout(state, left);
            (state, _) = woken.expect("no code panics under this lock");
        }
        Ok(WorkState::take(state))
    }

    fn forked(&self) -> bool {
        self.backend.upgrade().is_some_and(|backend| backend.forked())
    }
}

impl<B> Future for Work<B> {
    type Output = Result<B>;

    /// Ready with the result of [`wait`](Self::wait).
    ///
    /// # Panics
    ///
    /// If it has been ready before.
    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<B>> {
        if self.forked() {
            return Poll::Ready(Err(in_a_fork()));
        }
        // The waker is the executor's code, so it is cloned and dropped outside of the lock.
        let mut waker = Some(context.waker().clone());
        let mut state = lock(&self.slot.state);
        if let WorkState::InFlight(kept) = &mut *state {
            mem::swap(kept, &mut waker);
            drop(state);
            return Poll::Pending;
        }
        Poll::Ready(WorkState::take(state))
    }
}

impl<B> Drop for Work<B> {
    fn drop(&mut self) {
        // In a fork, a thread that does not exist there may hold the lock forever.
        if !self.forked() {
            let unwanted = mem::replace(&mut *lock(&self.slot.state), WorkState::Taken);
            // Drops the waker or buffer, which run user code, outside of the lock.
            drop(unwanted);
        }
    }
}

impl<B> fmt::Debug for Work<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Work").field("done", &self.is_done()).finish()
    }
}

fn in_a_fork() -> Error {
    Error::InvalidArgument("an operation cannot be waited for in a fork of its process".into())
}

/// Storage of an operation's outcome for its [`Work`].
struct Slot<B> {
    state: Mutex<WorkState<B>>,
    done: Condvar,
}

enum WorkState<B> {
    /// In flight, with the waker of the task that polled last.
    InFlight(Option<Waker>),
    Done(Result<B>),
    /// The outcome was returned, or the `Work` was dropped.
    Taken,
}

impl<B> WorkState<B> {
    /// Returns the outcome. Panics unless it is stored, after unlocking: a poisoned lock would make
    /// [`Work`]'s `Drop` panic, too.
    fn take(mut state: MutexGuard<'_, Self>) -> Result<B> {
        let taken = mem::replace(&mut *state, Self::Taken);
        drop(state);
        match taken {
            Self::Done(outcome) => outcome,
            _ => panic!("the outcome of this `Work` was already returned"),
        }
    }
}

impl<B> Slot<B> {
    fn new() -> Self {
        Self { state: Mutex::new(WorkState::InFlight(None)), done: Condvar::new() }
    }

    /// Stores the outcome, or drops it if the `Work` was dropped.
    fn fill(&self, outcome: Result<B>) {
        let mut state = lock(&self.state);
        let WorkState::InFlight(waker) = &mut *state else { return };
        let waker = waker.take();
        *state = WorkState::Done(outcome);
        drop(state);
        self.done.notify_one();
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

/// Runs the operation and delivers its result. Delivery follows the decrement of the count, so a
/// caller that has the result finds the queue empty.
type Job = Box<dyn FnOnce(&dyn Backend, &Unfinished) + Send>;
type Jobs = mpsc::Sender<Option<Job>>;

/// The queue of one group, and its communication thread, which the first operation starts.
pub(crate) struct Queue {
    backend: Arc<dyn Backend>,
    unfinished: Arc<Unfinished>,
    /// The thread, and the sender of its jobs; `None` as a job ends it.
    thread: Mutex<Option<(Jobs, thread::JoinHandle<()>)>>,
}

impl fmt::Debug for Queue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Queue").field("backend", &self.backend).finish_non_exhaustive()
    }
}

/// Number of operations queued or running, shared by the callers and the thread.
#[derive(Default)]
struct Unfinished {
    /// Decremented under the lock, so that no caller misses it between its check and its sleep.
    count: AtomicUsize,
    lock: Mutex<()>,
    /// Wakes callers: an operation is done.
    progress: Condvar,
}

impl Unfinished {
    /// Blocks until at most this many are unfinished.
    fn wait_for_at_most(&self, most: usize) {
        // Acquire: pairs with the Release in `finish_one`.
        if self.count.load(Ordering::Acquire) <= most {
            return;
        }
        let mut guard = lock(&self.lock);
        while self.count.load(Ordering::Acquire) > most {
            guard = wait(&self.progress, guard);
        }
    }

    fn finish_one(&self) {
        let guard = lock(&self.lock);
        // Release: pairs with the Acquire in `wait_for_at_most`, which makes the operation's
        // effects visible to a thread that sees the count drop.
        self.count.fetch_sub(1, Ordering::Release);
        drop(guard);
        self.progress.notify_all();
    }
}

impl Queue {
    pub(crate) fn new(backend: Arc<dyn Backend>) -> Self {
        Self { backend, unfinished: Arc::default(), thread: Mutex::new(None) }
    }

    /// Blocks until everything submitted before is done.
    pub(crate) fn drain(&self) {
        self.unfinished.wait_for_at_most(0);
    }

    /// Queues `run` on `buffer`; blocks while the queue is full. Threads that submit at once may
    /// exceed its capacity by one operation each.
    pub(crate) fn submit<B: Send + 'static>(
        &self,
        mut buffer: B,
        run: impl FnOnce(&dyn Backend, &mut B) -> Result<()> + Send + 'static,
    ) -> Result<Work<B>> {
        let jobs = self.start()?;
        let slot = Arc::new(Slot::new());
        let work = Work { slot: Arc::clone(&slot), backend: Arc::downgrade(&self.backend) };
        self.unfinished.wait_for_at_most(QUEUE_CAPACITY - 1);
        // Relaxed: a later `drain` on this thread sees it anyway; other threads order their own
        // calls.
        self.unfinished.count.fetch_add(1, Ordering::Relaxed);
        let span = Span::current();
        let job: Job = Box::new(move |backend, unfinished| {
            let run = || in_span(span, || run(backend, &mut buffer));
            let outcome = catch_unwind(AssertUnwindSafe(run));
            // A panic is a bug; the abort ends all waits, here and on peers.
            let outcome = outcome.unwrap_or_else(|_| {
                backend.abort(PANICKED);
                Err(panicked(backend.rank()))
            });
            unfinished.finish_one();
            match outcome {
                Ok(()) => slot.fill(Ok(buffer)),
                Err(error) => slot.fill(Err(error)),
            }
        });
        jobs.send(Some(job)).expect("the thread catches the panics of its jobs");
        Ok(work)
    }

    /// Returns the sender of jobs, and starts the thread if this is the first operation.
    fn start(&self) -> Result<Jobs> {
        let mut thread = lock(&self.thread);
        if let Some((jobs, _)) = &*thread {
            return Ok(jobs.clone());
        }
        let (sender, jobs) = mpsc::channel::<Option<Job>>();
        let (backend, unfinished) = (Arc::clone(&self.backend), Arc::clone(&self.unfinished));
        let body = move || {
            while let Ok(Some(job)) = jobs.recv() {
                // A panic while dropping an unclaimed buffer or waking a task has been printed and
                // affects no other operation.
                drop(catch_unwind(AssertUnwindSafe(|| job(&*backend, &unfinished))));
            }
        };
        let spawned = thread::Builder::new().name("collective".into()).spawn(body);
        let fail = |error| Error::io("starting the communication thread", &error);
        *thread = Some((sender.clone(), spawned.map_err(fail)?));
        Ok(sender)
    }
}

impl Drop for Queue {
    /// Waits for the operations in flight, each for at most the group's timeout per step.
    fn drop(&mut self) {
        let thread = self.thread.get_mut().expect("no code panics under this lock");
        let Some((jobs, handle)) = thread.take() else { return };
        if self.backend.forked() {
            // The thread exists only in the parent; there is nothing to close, join or detach.
            mem::forget((jobs, handle));
            return;
        }
        drop(jobs.send(None));
        if handle.thread().id() != thread::current().id() {
            handle.join().expect("the thread catches the panics of its jobs");
        }
    }
}

/// Runs an operation in the span in which it was submitted, for that span's subscriber. The span is
/// dropped before the caller gets the result.
fn in_span<T>(span: Span, run: impl FnOnce() -> T) -> T {
    match span.with_subscriber(|(_, subscriber)| subscriber.clone()) {
        None => run(),
        Some(subscriber) => dispatcher::with_default(&subscriber, || span.in_scope(run)),
    }
}

fn panicked(by: Rank) -> Error {
    Error::Aborted { by, reason: PANICKED.into() }
}

#[cfg(test)]
#[cfg(loom)]
mod loom_models {
    use std::pin::pin;
    use std::task::Wake;

    use super::*;
    use crate::backend::{RawBufs, RawShared, Transfer, Wait};
    use crate::{DType, OpDesc};

    /// A backend whose methods the models never call.
    #[derive(Debug)]
    struct NoBackend;

    #[expect(unsafe_code, reason = "the trait's calls are unsafe")]
    impl Backend for NoBackend {
        fn name(&self) -> &'static str {
            "none"
        }
        fn rank(&self) -> Rank {
            0
        }
        fn world_size(&self) -> usize {
            1
        }
        fn forked(&self) -> bool {
            false
        }
        fn ready(&self) -> Result<()> {
            Ok(())
        }
        unsafe fn run(&self, _: &OpDesc, _: RawBufs, _: Wait) -> Result<()> {
            Ok(())
        }
        unsafe fn exchange(&self, _: &OpDesc, _: &[Transfer], _: Wait) -> Result<()> {
            Ok(())
        }
        fn alloc(&self, _: DType, _: usize) -> Result<RawShared> {
            Err(panicked(0))
        }
        fn abort(&self, _: &str) {}
    }

    /// Explores every interleaving with up to three preemptions.
    fn model(body: impl Fn() + Sync + Send + 'static) {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(3);
        builder.check(body);
    }

    /// A buffer that counts its drops. Relaxed: only the hand-off orders the drops.
    struct Counted(Arc<AtomicUsize>);

    impl Drop for Counted {
        fn drop(&mut self) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    struct Unpark(thread::Thread);

    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }

    fn block_on<F: Future>(future: F) -> F::Output {
        let mut future = pin!(future);
        let waker = Waker::from(Arc::new(Unpark(thread::current())));
        loop {
            match future.as_mut().poll(&mut Context::from_waker(&waker)) {
                Poll::Ready(output) => return output,
                Poll::Pending => thread::park(),
            }
        }
    }

    /// A `Work`, and a thread that stores its outcome.
    fn hand_off() -> (Work<Counted>, Arc<AtomicUsize>, thread::JoinHandle<()>) {
        let backend: Arc<dyn Backend> = Arc::new(NoBackend);
        let (slot, freed) = (Arc::new(Slot::new()), Arc::new(AtomicUsize::new(0)));
        let work = Work { slot: Arc::clone(&slot), backend: Arc::downgrade(&backend) };
        let buffer = Counted(Arc::clone(&freed));
        (work, freed, thread::spawn(move || slot.fill(Ok(buffer))))
    }

    #[test]
    fn wait_returns_the_delivered_buffer() {
        model(|| {
            let (work, freed, thread) = hand_off();
            let buffer = work.wait();
            assert_eq!(freed.load(Ordering::Relaxed), 0);
            drop(buffer);
            thread.join().unwrap();
            assert_eq!(freed.load(Ordering::Relaxed), 1);
        });
    }

    #[test]
    fn the_last_polled_waker_is_woken() {
        model(|| {
            let (mut work, freed, thread) = hand_off();
            let first = pin!(&mut work).poll(&mut Context::from_waker(Waker::noop()));
            match first {
                Poll::Ready(buffer) => drop(buffer),
                Poll::Pending => drop(block_on(work)),
            }
            thread.join().unwrap();
            assert_eq!(freed.load(Ordering::Relaxed), 1);
        });
    }

    #[test]
    fn a_dropped_work_frees_its_buffer_once() {
        for polled in [false, true] {
            model(move || {
                let (mut work, freed, thread) = hand_off();
                if polled {
                    drop(pin!(&mut work).poll(&mut Context::from_waker(Waker::noop())));
                }
                drop(work);
                thread.join().unwrap();
                assert_eq!(freed.load(Ordering::Relaxed), 1);
            });
        }
    }

    fn queue() -> (Queue, Arc<AtomicUsize>) {
        (Queue::new(Arc::new(NoBackend)), Arc::new(AtomicUsize::new(0)))
    }

    /// Submits an operation that must be the `nth` to run.
    fn submit(queue: &Queue, done: &Arc<AtomicUsize>, nth: usize) -> Work<()> {
        let done = Arc::clone(done);
        let run = move |_: &dyn Backend, (): &mut ()| {
            // A load and a store, not a read-modify-write: only the queue serializes operations.
            assert_eq!(done.load(Ordering::Relaxed), nth);
            done.store(nth + 1, Ordering::Relaxed);
            Ok(())
        };
        queue.submit((), run).unwrap()
    }

    #[test]
    fn operations_run_in_order_and_draining_waits_for_them() {
        model(|| {
            let (queue, done) = queue();
            // The third waits until the queue has space.
            let works: Vec<_> = (0..3).map(|nth| submit(&queue, &done, nth)).collect();
            queue.drain();
            assert_eq!(done.load(Ordering::Relaxed), 3);
            drop((works, queue));
        });
    }

    #[test]
    fn queue_is_empty_once_the_result_is_returned() {
        model(|| {
            let (queue, done) = queue();
            submit(&queue, &done, 0).wait().unwrap();
            assert_eq!(queue.unfinished.count.load(Ordering::Relaxed), 0);
            assert_eq!(done.load(Ordering::Relaxed), 1);
            submit(&queue, &done, 1).wait().unwrap();
        });
    }

    #[test]
    fn dropping_a_queue_waits_for_its_operations() {
        model(|| {
            let (queue, done) = queue();
            let first = submit(&queue, &done, 0);
            drop(submit(&queue, &done, 1));
            drop(queue);
            assert_eq!(done.load(Ordering::Relaxed), 2);
            assert!(first.is_done());
            first.wait().unwrap();
        });
    }

    #[test]
    fn drain_on_another_thread_waits_for_operations() {
        model(|| {
            let (queue, done) = queue();
            let queue = Arc::new(queue);
            let work = submit(&queue, &done, 0);
            let other = thread::spawn({
                let (queue, done) = (Arc::clone(&queue), Arc::clone(&done));
                move || {
                    queue.drain();
                    assert_eq!(done.load(Ordering::Relaxed), 1);
                }
            });
            drop(work);
            other.join().unwrap();
        });
    }
}
