//! Operations in flight, and the one thread per group that carries them out.
//!
//! A buffer given to an asynchronous operation moves into its job and comes back through its
//! [`Work`]. So nothing borrowed is ever in flight: dropping a `Work` frees the buffer when the
//! operation is done, forgetting it leaks, and neither corrupts.
//!
//! The two hand-offs, of jobs to the thread ([`Queue`]) and of outcomes to their `Work` ([`Slot`]),
//! are a lock and a condition variable each, and have loom models at the foot of the file.

use std::collections::VecDeque;
use std::fmt;
use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use crate::backend::Backend;
use crate::sync::atomic::{AtomicUsize, Ordering};
use crate::sync::{Condvar, Mutex, lock, thread, wait};
use crate::{Element, Error, Rank, Result};

/// Operations that may wait in a group's queue; a further one waits for a place.
const QUEUE_CAPACITY: usize = if cfg!(loom) { 1 } else { 1024 };

const PANICKED: &str = "an operation panicked on its communication thread";

/// Memory that an asynchronous operation can own.
pub trait Buffer: Send + 'static {
    /// Its numbers.
    type Elem: Element;

    /// The memory, of the same length each time.
    fn as_mut_slice(&mut self) -> &mut [Self::Elem];
}

impl<T: Element> Buffer for Vec<T> {
    type Elem = T;

    fn as_mut_slice(&mut self) -> &mut [T] {
        self
    }
}

impl<T: Element> Buffer for Box<[T]> {
    type Elem = T;

    fn as_mut_slice(&mut self) -> &mut [T] {
        self
    }
}

/// An operation in flight, which owns its buffer, or its buffers as a tuple.
///
/// [`wait`](Self::wait) for it, or `.await` it: it is a future that works with any executor and
/// never blocks one. Dropping it, whether before, between or after polls, lets the operation finish
/// in the background, still in order, and then frees the buffer. The peers notice nothing.
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
    /// Knows a fork. Gone only after all operations are done.
    backend: Weak<dyn Backend>,
}

impl<B> Work<B> {
    /// Waits for the operation and gives the buffer back.
    ///
    /// Blocks for at most the group's timeout for each step of each operation queued up to this
    /// one.
    ///
    /// # Errors
    ///
    /// What the operation failed with; the buffer is dropped then. [`Error::InvalidArgument`] in a
    /// fork of the process that started it.
    ///
    /// # Panics
    ///
    /// If the outcome has been given out by a poll.
    pub fn wait(self) -> Result<B> {
        self.wait_until(None).unwrap_or_else(|_| unreachable!("without a deadline"))
    }

    /// Waits for the operation, but no longer than `timeout`: `Ok` with what
    /// [`wait`](Self::wait) returns, or `Err` with the `Work` itself, still in flight, to be waited
    /// for again.
    ///
    /// # Errors
    ///
    /// The `Work`, if the operation is not done by then. This is no failure of the group.
    ///
    /// # Panics
    ///
    /// As [`wait`](Self::wait).
    pub fn wait_timeout(self, timeout: Duration) -> Result<Result<B>, Self> {
        self.wait_until(Instant::now().checked_add(timeout))
    }

    /// Whether [`wait`](Self::wait) would return at once.
    pub fn is_done(&self) -> bool {
        self.forked() || !matches!(*lock(&self.slot.state), State::UnderWay(_))
    }

    fn wait_until(self, deadline: Option<Instant>) -> Result<Result<B>, Self> {
        if self.forked() {
            return Ok(Err(in_a_fork()));
        }
        let mut state = lock(&self.slot.state);
        while matches!(*state, State::UnderWay(_)) {
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
            (state, _) = woken.expect("nobody panics under this lock");
        }
        Ok(state.take())
    }

    fn forked(&self) -> bool {
        self.backend.upgrade().is_some_and(|backend| backend.forked())
    }
}

impl<B> Future for Work<B> {
    type Output = Result<B>;

    /// Ready with what [`wait`](Self::wait) returns.
    ///
    /// # Panics
    ///
    /// If it has been ready before.
    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<B>> {
        if self.forked() {
            return Poll::Ready(Err(in_a_fork()));
        }
        // Cloned and dropped outside of the lock: it is the executor's code.
        let mut waker = Some(context.waker().clone());
        let mut state = lock(&self.slot.state);
        if let State::UnderWay(kept) = &mut *state {
            mem::swap(kept, &mut waker);
            drop(state);
            return Poll::Pending;
        }
        Poll::Ready(state.take())
    }
}

impl<B> Drop for Work<B> {
    fn drop(&mut self) {
        // In a fork, a thread that the fork lacks may hold the lock for ever.
        if !self.forked() {
            let unwanted = mem::replace(&mut *lock(&self.slot.state), State::Over);
            // The waker or the buffer, which is the user's code, after the lock.
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
    Error::InvalidArgument("an operation belongs to the process that started it, not a fork".into())
}

/// Where an operation leaves its outcome for its [`Work`].
struct Slot<B> {
    state: Mutex<State<B>>,
    done: Condvar,
}

enum State<B> {
    /// With the task to be woken, if one has polled.
    UnderWay(Option<Waker>),
    Done(Result<B>),
    /// Given out, or nobody wants it.
    Over,
}

impl<B> State<B> {
    /// The outcome of what is no longer under way.
    fn take(&mut self) -> Result<B> {
        match mem::replace(self, Self::Over) {
            Self::Done(outcome) => outcome,
            _ => panic!("the outcome of this `Work` has been given out"),
        }
    }
}

impl<B> Slot<B> {
    fn new() -> Self {
        Self { state: Mutex::new(State::UnderWay(None)), done: Condvar::new() }
    }

    /// Leaves the outcome, or drops it if nobody wants it.
    fn fill(&self, outcome: Result<B>) {
        let mut state = lock(&self.state);
        let State::UnderWay(waker) = &mut *state else { return };
        let waker = waker.take();
        *state = State::Done(outcome);
        drop(state);
        self.done.notify_one();
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

/// Does the operation and returns what delivers the result. Delivering comes after the operation is
/// off the count, so that whoever gets the result finds the queue empty.
type Job = Box<dyn FnOnce(&dyn Backend) -> Delivery + Send>;
type Delivery = Box<dyn FnOnce() + Send>;

/// The queue of one group, and its communication thread, which the first operation starts.
#[derive(Debug)]
pub(crate) struct Queue {
    backend: Arc<dyn Backend>,
    line: Arc<Line>,
    thread: Mutex<Option<thread::JoinHandle<()>>>,
}

/// The operations between the callers and the thread.
#[derive(Debug)]
struct Line {
    /// Submitted and not yet done. Grows and shrinks under the lock; read without it too.
    unfinished: AtomicUsize,
    jobs: Mutex<Jobs>,
    /// For the thread: a job has come, or the line is closed.
    work: Condvar,
    /// For callers: a job has gone, or is done.
    progress: Condvar,
}

#[derive(Default)]
struct Jobs {
    waiting: VecDeque<Job>,
    closed: bool,
}

impl fmt::Debug for Jobs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Jobs").field("waiting", &self.waiting.len()).finish_non_exhaustive()
    }
}

impl Line {
    fn new() -> Self {
        Self {
            unfinished: AtomicUsize::new(0),
            jobs: Mutex::new(Jobs::default()),
            work: Condvar::new(),
            progress: Condvar::new(),
        }
    }

    /// Appends a job, once there is a place.
    fn push(&self, job: Job) {
        let mut jobs = lock(&self.jobs);
        while jobs.waiting.len() >= QUEUE_CAPACITY {
            jobs = wait(&self.progress, jobs);
        }
        // Relaxed: this thread's own later `drain` sees it anyway; others have their own order.
        self.unfinished.fetch_add(1, Ordering::Relaxed);
        jobs.waiting.push_back(job);
        drop(jobs);
        self.work.notify_one();
    }

    /// The next job; `None` once the line is closed and empty.
    fn next(&self) -> Option<Job> {
        let mut jobs = lock(&self.jobs);
        loop {
            if let Some(job) = jobs.waiting.pop_front() {
                drop(jobs);
                self.progress.notify_all();
                return Some(job);
            }
            if jobs.closed {
                return None;
            }
            jobs = wait(&self.work, jobs);
        }
    }

    fn finish_one(&self) {
        let jobs = lock(&self.jobs);
        // Release: pairs with the Acquire in `drain`; what the job did is visible to whoever sees it
        // gone.
        self.unfinished.fetch_sub(1, Ordering::Release);
        drop(jobs);
        self.progress.notify_all();
    }

    /// Waits until everything submitted before is done.
    fn drain(&self) {
        // Acquire: pairs with the Release in `finish_one`.
        if self.unfinished.load(Ordering::Acquire) == 0 {
            return;
        }
        let mut jobs = lock(&self.jobs);
        while self.unfinished.load(Ordering::Acquire) != 0 {
            jobs = wait(&self.progress, jobs);
        }
    }

    fn close(&self) {
        lock(&self.jobs).closed = true;
        self.work.notify_one();
    }
}

impl Queue {
    pub(crate) fn new(backend: Arc<dyn Backend>) -> Self {
        Self { backend, line: Arc::new(Line::new()), thread: Mutex::new(None) }
    }

    /// Waits until everything submitted before is done.
    pub(crate) fn drain(&self) {
        self.line.drain();
    }

    /// Queues `run` on `buffer`.
    pub(crate) fn submit<B: Send + 'static>(
        &self,
        mut buffer: B,
        run: impl FnOnce(&dyn Backend, &mut B) -> Result<()> + Send + 'static,
    ) -> Result<Work<B>> {
        self.start()?;
        let slot = Arc::new(Slot::new());
        let work = Work { slot: Arc::clone(&slot), backend: Arc::downgrade(&self.backend) };
        self.line.push(Box::new(move |backend| {
            let outcome = catch_unwind(AssertUnwindSafe(|| run(backend, &mut buffer)));
            // A panic is a bug, but must leave nobody waiting, neither here nor on a peer.
            let outcome = outcome.unwrap_or_else(|_| {
                backend.abort(PANICKED);
                Err(panicked(backend.rank()))
            });
            Box::new(move || match outcome {
                Ok(()) => slot.fill(Ok(buffer)),
                Err(error) => slot.fill(Err(error)),
            })
        }));
        Ok(work)
    }

    /// Starts the thread, if this is the first operation.
    fn start(&self) -> Result<()> {
        let mut thread = lock(&self.thread);
        if thread.is_some() {
            return Ok(());
        }
        let (backend, line) = (Arc::clone(&self.backend), Arc::clone(&self.line));
        let body = move || {
            while let Some(job) = line.next() {
                let deliver = job(&*backend);
                line.finish_one();
                // The operation is over. If dropping a buffer that nobody wants or waking a task
                // panics, that has been printed, and concerns no other operation.
                drop(catch_unwind(AssertUnwindSafe(deliver)));
            }
        };
        let spawned = thread::Builder::new().name("collective".into()).spawn(body);
        let fail = |error| Error::io("starting the communication thread", &error);
        *thread = Some(spawned.map_err(fail)?);
        Ok(())
    }
}

impl Drop for Queue {
    /// Waits for the operations in flight, each of which has the group's timeout.
    fn drop(&mut self) {
        let thread = self.thread.get_mut().expect("nobody panics under this lock");
        let Some(handle) = thread.take() else { return };
        if self.backend.forked() {
            // The thread stayed behind in the parent; here is nothing to close, join or detach.
            mem::forget(handle);
            return;
        }
        self.line.close();
        if handle.thread().id() != thread::current().id() {
            handle.join().expect("the thread catches the panics of its jobs");
        }
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

    /// Nothing but a name: the jobs of a model do not call it.
    #[derive(Debug)]
    struct Nowhere;

    #[expect(unsafe_code, reason = "the trait's calls are unsafe")]
    impl Backend for Nowhere {
        fn name(&self) -> &'static str {
            "nowhere"
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

    /// Every order of events with up to three preemptions.
    fn model(body: impl Fn() + Sync + Send + 'static) {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(3);
        builder.check(body);
    }

    /// A buffer that counts its end. Relaxed: only the hand-off orders it.
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

    /// A `Work`, and a thread that delivers what it waits for.
    fn hand_off() -> (Work<Counted>, Arc<AtomicUsize>, thread::JoinHandle<()>) {
        let backend: Arc<dyn Backend> = Arc::new(Nowhere);
        let (slot, freed) = (Arc::new(Slot::new()), Arc::new(AtomicUsize::new(0)));
        let work = Work { slot: Arc::clone(&slot), backend: Arc::downgrade(&backend) };
        let buffer = Counted(Arc::clone(&freed));
        (work, freed, thread::spawn(move || slot.fill(Ok(buffer))))
    }

    #[test]
    fn a_waiter_gets_what_is_delivered() {
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
    fn a_task_is_woken_by_the_last_waker_it_left() {
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
        (Queue::new(Arc::new(Nowhere)), Arc::new(AtomicUsize::new(0)))
    }

    /// Submits an operation that must be the `nth` to run.
    fn submit(queue: &Queue, done: &Arc<AtomicUsize>, nth: usize) -> Work<()> {
        let done = Arc::clone(done);
        let run = move |_: &dyn Backend, (): &mut ()| {
            // Not one read-modify-write: nothing but the queue keeps operations apart.
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
            // The third waits for a place.
            let works: Vec<_> = (0..3).map(|nth| submit(&queue, &done, nth)).collect();
            queue.drain();
            assert_eq!(done.load(Ordering::Relaxed), 3);
            drop((works, queue));
        });
    }

    #[test]
    fn whoever_has_the_result_finds_the_queue_empty() {
        model(|| {
            let (queue, done) = queue();
            submit(&queue, &done, 0).wait().unwrap();
            assert_eq!(queue.line.unfinished.load(Ordering::Relaxed), 0);
            assert_eq!(done.load(Ordering::Relaxed), 1);
            submit(&queue, &done, 1).wait().unwrap();
        });
    }

    #[test]
    fn a_dropped_queue_ends_its_operations_first() {
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
    fn a_caller_on_another_thread_drains_too() {
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
