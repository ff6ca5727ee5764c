//! `Workers`: an ordered parallel map on threads with bounded channels, so that data loads during a
//! step.
//!
//! A feeder thread pulls the jobs, numbers and queues them, workers take them, and the consumer
//! returns the results in the order of the jobs. The feeder takes a permit for each job, and the
//! consumer releases it with the result, so the number of pending jobs and results is at most the
//! number of permits, `count * prefetch_factor`, however slow the consumer is.
//!
//! Dropping the iterator drops the consumer's ends of all channels, which stops the feeder and the
//! workers after their current jobs; long jobs of this crate end early, see [`is_stopped`]. The
//! drop waits for that, at most [`LINGER`]; slower threads are detached and end after their job.

use std::any::Any;
use std::cell::RefCell;
use std::collections::VecDeque;
use std::convert::Infallible;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;
use std::{io, iter};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, after, bounded, never, select_biased};
use parking_lot::Mutex;

/// Maximum wait for threads to end when an iterator is dropped.
const LINGER: Duration = Duration::from_secs(5);

/// Maximum number of workers, and of pending results of each.
const MAX_COUNT: usize = 1024;

/// Settings of an ordered parallel map: number of threads, and how far ahead they run.
/// [`map`](Self::map) can run any number of maps, each with its own threads.
#[derive(Clone, Debug)]
pub struct Workers {
    count: usize,
    prefetch_factor: usize,
    timeout: Option<Duration>,
    /// Idle threads, if they are kept from one map to the next.
    kept: Option<Arc<Mutex<Option<Threads>>>>,
    linger: Duration,
}

/// Reason for which a map has no result for a job.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WorkerError {
    /// The job, or the iterator of jobs, panicked.
    #[error("panicked: {0}")]
    Panicked(String),
    /// A result did not come in time.
    #[error(
        "no result from {workers} workers within {timeout:?}: see whether the data can be read, or raise `timeout`"
    )]
    Timeout {
        /// Number of workers.
        workers: usize,
        /// How long the consumer waited.
        timeout: Duration,
    },
    /// The operating system failed to create a thread.
    #[error("cannot start {workers} worker threads")]
    Spawn {
        /// Number of workers.
        workers: usize,
        /// Error of the operating system.
        source: io::Error,
    },
}

impl Workers {
    /// Uses `count` threads, each with two jobs ahead of the consumer, which waits without limit.
    /// With 0 each job runs on the calling thread when its result is requested. Counts above 1024
    /// are reduced to that.
    #[must_use]
    pub fn new(count: usize) -> Self {
        Self {
            count: count.min(MAX_COUNT),
            prefetch_factor: 2,
            timeout: None,
            kept: None,
            linger: LINGER,
        }
    }

    /// Number of worker threads.
    #[must_use]
    pub const fn count(&self) -> usize {
        self.count
    }

    /// Sets the number of jobs and results per worker that may be pending, from 1 to 1024; other
    /// numbers are clamped.
    #[must_use]
    pub fn prefetch_factor(self, prefetch_factor: usize) -> Self {
        Self { prefetch_factor: prefetch_factor.clamp(1, MAX_COUNT), ..self }
    }

    /// Sets the timeout of the consumer for one result. Without workers there is no waiting.
    #[must_use]
    pub fn timeout(self, timeout: Duration) -> Self {
        Self { timeout: Some(timeout), ..self }
    }

    /// Keeps the threads after a map for the next one, until the last clone of `self` is dropped.
    #[must_use]
    pub fn persistent(self) -> Self {
        Self { kept: Some(Arc::default()), ..self }
    }

    /// Returns `work` of each job, in the order of the jobs.
    ///
    /// Results do not depend on the number of workers if `work` is a function of the job only. A
    /// panic in `work` is the error of that job, and later jobs still run; a panic in `jobs` is the
    /// last item.
    pub fn map<J, R, F>(
        &self,
        jobs: impl Iterator<Item = J> + Send + 'static,
        work: F,
    ) -> OrderedMap<R>
    where
        J: Send + 'static,
        R: Send + 'static,
        F: Fn(J) -> R + Send + Sync + 'static,
    {
        let mut jobs = until_panic(jobs);
        if self.count == 0 {
            let results =
                iter::from_fn(move || Some(jobs.next()?.and_then(|job| catch(|| work(job)))));
            return OrderedMap(Source::Here(Box::new(results)));
        }
        OrderedMap(match self.threads() {
            Ok(threads) => Source::Threads(Running::start(self.clone(), threads, jobs, work)),
            Err(source) => {
                let error = WorkerError::Spawn { workers: self.count, source };
                Source::Here(Box::new(iter::once(Err(error))))
            }
        })
    }

    /// Threads of one map: kept ones, or new ones.
    fn threads(&self) -> io::Result<Threads> {
        let kept = self.kept.as_ref();
        let kept = kept.and_then(|kept| kept.lock().take());
        kept.map_or_else(|| Threads::spawn(self.count), Ok)
    }
}

/// Results of [`Workers::map`], in the order of the jobs.
pub struct OrderedMap<R>(Source<R>);

enum Source<R> {
    Here(Box<dyn Iterator<Item = Result<R, WorkerError>> + Send>),
    Threads(Running<R>),
}

impl<R> std::fmt::Debug for OrderedMap<R> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OrderedMap").finish_non_exhaustive()
    }
}

impl<R> Iterator for OrderedMap<R> {
    type Item = Result<R, WorkerError>;

    /// Waits for the next result. After [`WorkerError::Timeout`] it waits for the same result
    /// again.
    fn next(&mut self) -> Option<Self::Item> {
        match &mut self.0 {
            Source::Here(results) => results.next(),
            Source::Threads(running) => running.next(),
        }
    }
}

type Numbered<T> = (usize, Result<T, WorkerError>);

/// A map on threads, from the consumer's side.
struct Running<R> {
    workers: Workers,
    /// The consumer's ends, until the map has ended.
    ends: Option<Ends<R>>,
    threads: Option<Threads>,
    /// Number of results returned.
    done: usize,
    /// Results from the next one on, as far as available.
    ready: VecDeque<Option<Result<R, WorkerError>>>,
    /// Set when the map has ended, for [`is_stopped`].
    stopped: Arc<AtomicBool>,
}

struct Ends<R> {
    results: Receiver<Numbered<R>>,
    permits: Sender<()>,
    /// Never sent to; dropping it stops the workers.
    _stop: Sender<Infallible>,
    /// Never received from; disconnected when the feeder and all workers have ended.
    alive: Receiver<Infallible>,
}

impl<R: Send + 'static> Running<R> {
    fn start<J, F>(
        workers: Workers,
        threads: Threads,
        jobs: impl Iterator<Item = Result<J, WorkerError>> + Send + 'static,
        work: F,
    ) -> Self
    where
        J: Send + 'static,
        F: Fn(J) -> R + Send + Sync + 'static,
    {
        // Holders of a permit never block on a full channel.
        let ahead = workers.count * workers.prefetch_factor;
        let (permits, permits_in) = bounded(ahead);
        let (queue, queue_in) = bounded(ahead);
        let (results_out, results) = bounded(ahead);
        let (stop, stop_in) = bounded(0);
        let (alive_out, alive) = bounded(0);
        for _ in 0..ahead {
            permits.try_send(()).expect("the channel has room for all permits");
        }
        let stopped = Arc::new(AtomicBool::new(false));
        let (alive_in, flag) = (alive_out.clone(), Arc::clone(&stopped));
        threads.run(Box::new(move || {
            let _flag = Flag::set(flag);
            feed(jobs, &permits_in, &queue);
            // `alive` is dropped last: then everything else has been dropped.
            drop((permits_in, queue, alive_in));
        }));
        let work = Arc::new(work);
        for _ in 0..workers.count {
            let (work, queue, results) = (Arc::clone(&work), queue_in.clone(), results_out.clone());
            let (stop, alive) = (stop_in.clone(), alive_out.clone());
            let flag = Arc::clone(&stopped);
            threads.run(Box::new(move || {
                let _flag = Flag::set(flag);
                serve(&queue, &stop, &results, &*work);
                drop((work, queue, results, stop, alive));
            }));
        }
        let ends = Some(Ends { results, permits, _stop: stop, alive });
        let (threads, ready) = (Some(threads), VecDeque::new());
        Self { workers, ends, threads, done: 0, ready, stopped }
    }
}

/// Queues the jobs, each with a permit, until there is no more job or no consumer.
fn feed<J>(
    jobs: impl Iterator<Item = Result<J, WorkerError>>,
    permits: &Receiver<()>,
    queue: &Sender<Numbered<J>>,
) {
    let mut jobs = jobs.enumerate();
    while permits.recv().is_ok() {
        let Some(job) = jobs.next() else { return };
        if queue.send(job).is_err() {
            return;
        }
    }
}

/// Runs queued jobs until the feeder or the consumer has ended.
fn serve<J, R>(
    queue: &Receiver<Numbered<J>>,
    stop: &Receiver<Infallible>,
    results: &Sender<Numbered<R>>,
    work: impl Fn(J) -> R,
) {
    loop {
        let job = select_biased! {
            recv(stop) -> _ => return,
            recv(queue) -> job => job,
        };
        let Ok((index, job)) = job else { return };
        let result = job.and_then(|job| catch(|| work(job)));
        if results.send((index, result)).is_err() {
            return;
        }
    }
}

impl<R> Running<R> {
    fn next(&mut self) -> Option<Result<R, WorkerError>> {
        let timeout = self.workers.timeout;
        let too_late = timeout.map_or_else(never, after);
        while !matches!(self.ready.front(), Some(Some(_))) {
            let ends = self.ends.as_ref()?;
            let result = select_biased! {
                recv(ends.results) -> result => result,
                recv(too_late) -> _ => {
                    let timeout = timeout.unwrap_or_default();
                    return Some(Err(WorkerError::Timeout { workers: self.workers.count, timeout }));
                }
            };
            let Ok((index, result)) = result else {
                self.end();
                return None;
            };
            let at = index - self.done;
            self.ready.resize_with(self.ready.len().max(at + 1), || None);
            self.ready[at] = Some(result);
        }
        self.done += 1;
        // An error means that the feeder has seen the last job and takes no more permits.
        let _ = self.ends.as_ref()?.permits.send(());
        self.ready.pop_front().flatten()
    }

    /// Stops the threads and waits for them; keeps or detaches them.
    fn end(&mut self) {
        let (Some(ends), Some(threads)) = (self.ends.take(), self.threads.take()) else { return };
        // Read by `is_stopped`; no other memory depends on it.
        self.stopped.store(true, Ordering::Relaxed);
        let Ends { results, permits, _stop, alive } = ends;
        drop((results, permits, _stop));
        if alive.recv_timeout(self.workers.linger) == Err(RecvTimeoutError::Timeout) {
            threads.detach();
        } else if let Some(kept) = &self.workers.kept {
            *kept.lock() = Some(threads);
        }
    }
}

impl<R> Drop for Running<R> {
    fn drop(&mut self) {
        self.end();
    }
}

/// Threads that wait for tasks. Dropping them waits until they have ended.
#[derive(Debug)]
struct Threads {
    tasks: Option<Sender<Task>>,
    handles: Vec<JoinHandle<()>>,
}

type Task = Box<dyn FnOnce() + Send>;

impl Threads {
    /// One thread for a feeder, and one for each of `workers`.
    fn spawn(workers: usize) -> io::Result<Self> {
        let (tasks, tasks_in) = bounded::<Task>(workers + 1);
        let mut threads = Self { tasks: Some(tasks), handles: Vec::new() };
        for index in 0..=workers {
            let tasks = tasks_in.clone();
            let thread = Builder::new().name(format!("data-{index}"));
            threads.handles.push(thread.spawn(move || tasks.iter().for_each(|task| task()))?);
        }
        Ok(threads)
    }

    /// Runs `task` on one of the threads; there are at most as many tasks as threads.
    fn run(&self, task: Task) {
        let tasks = self.tasks.as_ref().expect("only dropping takes it");
        tasks.send(task).expect("the threads wait for tasks");
    }

    /// Detaches the threads; each ends after its task.
    fn detach(mut self) {
        self.handles.clear();
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.tasks = None;
        for thread in self.handles.drain(..) {
            // An error is a panic, which has been printed.
            let _ = thread.join();
        }
    }
}

thread_local! {
    /// Whether the map that this thread works for has ended; `None` in other threads.
    static STOPPED: RefCell<Option<Arc<AtomicBool>>> = const { RefCell::new(None) };
}

/// Returns whether the map that this thread works for has ended. A job of many samples asks before
/// each, and ends early, as nothing receives its result.
pub(crate) fn is_stopped() -> bool {
    // Set when a map ends; no other memory depends on it.
    STOPPED.with_borrow(|flag| flag.as_ref().is_some_and(|flag| flag.load(Ordering::Relaxed)))
}

/// Error of a job that ends early, which nothing receives.
pub(crate) const IS_STOPPED: &str = "the iterator was dropped";

/// The thread's flag for [`is_stopped`], until it is dropped.
struct Flag;

impl Flag {
    fn set(flag: Arc<AtomicBool>) -> Self {
        STOPPED.set(Some(flag));
        Self
    }
}

impl Drop for Flag {
    fn drop(&mut self) {
        STOPPED.set(None);
    }
}

/// Items of `jobs`; a panic is the last.
fn until_panic<J>(
    jobs: impl Iterator<Item = J> + Send + 'static,
) -> impl Iterator<Item = Result<J, WorkerError>> + Send {
    let mut jobs = Some(jobs);
    iter::from_fn(move || {
        let job = catch(|| jobs.as_mut()?.next());
        if job.is_err() {
            jobs = None;
        }
        job.transpose()
    })
}

/// Calls `f`; a panic is an error with its message.
pub(crate) fn catch<T>(f: impl FnOnce() -> T) -> Result<T, WorkerError> {
    // `f` is called again after a panic only if it can be shared between threads, so it keeps its
    // own state consistent.
    catch_unwind(AssertUnwindSafe(f)).map_err(|payload| WorkerError::Panicked(message(&*payload)))
}

/// Returns the message of a panic.
fn message(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().copied();
    let text = text.or_else(|| payload.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("without a message").to_owned()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::thread::{self, ThreadId};

    use proptest::prelude::*;

    use super::*;

    const LONG: Duration = Duration::from_secs(60);
    const SHORT: Duration = Duration::from_millis(20);

    /// Counts the values that are alive.
    #[derive(Clone, Default)]
    struct Census {
        alive: Arc<AtomicUsize>,
        most: Arc<AtomicUsize>,
    }

    struct Counted(Census);

    impl Census {
        // SeqCst throughout: counts of several threads, and nothing here is fast.
        fn born(&self) -> Counted {
            let alive = self.alive.fetch_add(1, Ordering::SeqCst) + 1;
            self.most.fetch_max(alive, Ordering::SeqCst);
            Counted(self.clone())
        }

        fn alive(&self) -> usize {
            self.alive.load(Ordering::SeqCst)
        }
    }

    impl Drop for Counted {
        fn drop(&mut self) {
            self.0.alive.fetch_sub(1, Ordering::SeqCst);
        }
    }

    fn text(result: Result<u64, WorkerError>) -> Result<u64, String> {
        result.map_err(|error| error.to_string())
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// Jobs that take different times, of which some panic.
        #[test]
        fn results_do_not_depend_on_the_number_of_workers(
            jobs in prop::collection::vec((0u64..300, 0u8..12), 0..40), ends_in_panic: bool,
            prefetch_factor in 1usize..4, persistent: bool,
        ) {
            let run = |workers: &Workers| {
                let end = iter::from_fn(move || ends_in_panic.then(|| panic!("no more")));
                let results = workers.map(jobs.clone().into_iter().chain(end), |(pause, kind)| {
                    assert_ne!(kind, 0, "a bad job of {pause}");
                    thread::sleep(Duration::from_micros(pause));
                    pause
                });
                results.take(60).map(text).collect::<Vec<_>>()
            };
            let expected = run(&Workers::new(0));
            prop_assert_eq!(expected.len(), jobs.len() + usize::from(ends_in_panic));
            for count in [1, 2, 7] {
                let workers = Workers::new(count).prefetch_factor(prefetch_factor);
                let workers = if persistent { workers.persistent() } else { workers };
                prop_assert_eq!(&run(&workers), &expected, "{} workers", count);
                prop_assert_eq!(&run(&workers), &expected, "{} workers again", count);
            }
        }
    }

    #[test]
    fn jobs_and_results_ahead_of_the_consumer_are_bounded() {
        for (count, factor) in [(1, 1), (1, 2), (3, 1), (4, 3)] {
            let census = Census::default();
            let (jobs, results) = (census.clone(), census.clone());
            let workers = Workers::new(count).prefetch_factor(factor);
            let mut map = workers.map(iter::repeat_with(move || jobs.born()), move |job| {
                drop(job);
                results.born()
            });
            for _ in 0..50 {
                let result = map.next().unwrap().unwrap();
                drop(result);
            }
            // The consumer pulls no more: what may run ahead does, and no more.
            let most = count * factor;
            while census.alive() < most {
                thread::yield_now();
            }
            thread::sleep(SHORT);
            assert_eq!(census.alive(), most);
            // One more that the consumer had.
            assert!(census.most.load(Ordering::SeqCst) <= most + 1);
            drop(map);
            assert_eq!(census.alive(), 0, "dropping the iterator drops all");
        }
    }

    #[test]
    fn without_workers_a_job_is_pulled_when_its_result_is_asked_for() {
        let census = Census::default();
        let jobs = census.clone();
        let here = thread::current().id();
        let mut map = Workers::new(0).map(iter::repeat_with(move || jobs.born()), move |job| {
            assert_eq!(thread::current().id(), here);
            job
        });
        assert_eq!(census.alive(), 0);
        let _first = map.next().unwrap().unwrap();
        assert_eq!(census.alive(), 1);
    }

    #[test]
    fn dropping_the_iterator_ends_threads_that_wait() {
        let census = Census::default();
        // The consumer takes nothing, or some results; there are jobs without end, or none.
        for (jobs, taken) in [(usize::MAX, 0), (usize::MAX, 5), (0, 0), (3, 1)] {
            let token = census.born();
            let workers = Workers { linger: LONG, ..Workers::new(3) };
            let mut map = workers.map(0..jobs, move |job| {
                let _token = &token;
                job
            });
            let results: Vec<_> = map.by_ref().take(taken).map(Result::unwrap).collect();
            assert_eq!(results, (0..taken).collect::<Vec<_>>());
            drop(map);
            assert_eq!(census.alive(), 0, "the threads have dropped the function");
        }
    }

    /// A job that waits for `gate`, or its iterator that does.
    fn gated(
        workers: &Workers,
        in_job: bool,
        gate: Receiver<()>,
        token: Counted,
    ) -> OrderedMap<usize> {
        let token = Arc::new(token);
        let (feeders, held) = (gate.clone(), Arc::clone(&token));
        let jobs = (0..).inspect(move |job| {
            let _held = &held;
            if *job == 1 && !in_job {
                let _ = feeders.recv();
            }
        });
        workers.map(jobs, move |job| {
            let _token = &token;
            if job == 1 && in_job {
                let _ = gate.recv();
            }
            job
        })
    }

    #[test]
    fn a_job_that_hangs_ends_the_wait_and_does_not_hold_up_the_drop() {
        for in_job in [true, false] {
            let census = Census::default();
            let (open, gate) = bounded(0);
            let workers = Workers { linger: SHORT, ..Workers::new(2).timeout(SHORT).persistent() };
            let mut map = gated(&workers, in_job, gate, census.born());
            assert_eq!(map.next().unwrap().unwrap(), 0);
            let error = map.next().unwrap().unwrap_err();
            let WorkerError::Timeout { workers: 2, timeout: SHORT } = error else {
                panic!("{error}")
            };
            drop(map);
            assert_eq!(census.alive(), 1, "the thread that hangs goes on");
            // A map after that has threads of its own.
            let squares: Vec<_> = workers.map(0..9, |x| x * x).map(Result::unwrap).collect();
            assert_eq!(squares, (0..9).map(|x| x * x).collect::<Vec<_>>());
            drop(open);
            while census.alive() > 0 {
                thread::yield_now();
            }
        }
    }

    #[test]
    fn a_long_job_is_told_that_its_iterator_was_dropped() {
        let (open, gate) = bounded::<()>(0);
        let (results, told) = bounded(2);
        let workers = Workers { linger: SHORT, ..Workers::new(1).persistent() };
        let map = workers.map(0..3, move |_| {
            results.send(is_stopped()).unwrap();
            let _ = gate.recv();
            results.send(is_stopped()).unwrap();
        });
        assert!(!told.recv().unwrap());
        drop(map);
        drop(open);
        assert!(told.recv().unwrap());
        // The next map of the same threads has a flag of its own, this thread none.
        assert!(workers.map(0..3, |_| is_stopped()).all(|told| !told.unwrap()));
        assert!(!is_stopped());
    }

    #[test]
    fn a_result_that_comes_after_a_timeout_is_not_lost() {
        let census = Census::default();
        let (open, gate) = bounded(0);
        let workers = Workers { linger: LONG, ..Workers::new(2).timeout(SHORT) };
        let mut map = gated(&workers, true, gate, census.born());
        assert_eq!(map.next().unwrap().unwrap(), 0);
        assert!(matches!(map.next(), Some(Err(WorkerError::Timeout { .. }))));
        drop(open);
        let later = map.filter_map(Result::ok).take(3);
        assert_eq!(later.collect::<Vec<_>>(), [1, 2, 3]);
    }

    fn thread_ids(workers: &Workers) -> BTreeSet<String> {
        let id = |id: ThreadId| format!("{id:?}");
        let ids = workers.map(0..64, move |_| id(thread::current().id()));
        ids.map(Result::unwrap).collect()
    }

    #[test]
    fn persistent_threads_are_those_of_the_map_before() {
        let kept = Workers::new(1).persistent();
        let all: BTreeSet<_> = (0..5).flat_map(|_| thread_ids(&kept)).collect();
        // The feeder's may change places with the worker's.
        assert!(all.len() <= 2, "{all:?}");
        // Two at once.
        let mut first = kept.map(0..9, |x| x);
        assert_eq!(kept.map(0..9, |x| x).map(Result::unwrap).sum::<i32>(), 36);
        assert_eq!(first.by_ref().map(Result::unwrap).sum::<i32>(), 36);
        let new = Workers::new(1);
        let all: BTreeSet<_> = (0..5).flat_map(|_| thread_ids(&new)).collect();
        assert_eq!(all.len(), 5);
    }
}
