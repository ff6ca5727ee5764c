//! Operations in flight, and the one thread per group that carries them out.
//!
//! A buffer given to an asynchronous operation moves into its job and comes back through its
//! [`Work`]. So nothing borrowed is ever in flight: dropping a `Work` frees the buffer when the
//! operation is done, forgetting it leaks, and neither corrupts.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::JoinHandle;

use crossbeam_channel::{Receiver, Sender, bounded};
use parking_lot::{Condvar, Mutex};

use crate::backend::Backend;
use crate::{Element, Error, Rank, Result};

/// Operations that may wait in a group's queue; a further one waits for a place.
const QUEUE_CAPACITY: usize = 1024;

const PANICKED: &str = "an operation panicked on its communication thread";

/// Memory that an asynchronous operation can own.
pub trait Buffer: Send + 'static {
    /// Its numbers.
    type Elem: Element;

    /// The memory, of the same length each time.
    fn as_mut_slice(&mut self) -> &mut [Self::Elem];

    /// Number of elements.
    fn count(&mut self) -> usize {
        self.as_mut_slice().len()
    }
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

/// An operation in flight, which owns its buffer.
///
/// Dropping it lets the operation finish in the background, still in order, and then frees the
/// buffer. The peers notice nothing.
#[must_use = "dropping a `Work` loses the buffer and the error"]
pub struct Work<B> {
    rank: Rank,
    result: Receiver<Result<B>>,
}

impl<B> Work<B> {
    /// Waits for the operation and gives the buffer back.
    ///
    /// Blocks for at most the group's timeout for each operation queued up to this one.
    ///
    /// # Errors
    ///
    /// What the operation failed with; the buffer is dropped then.
    pub fn wait(self) -> Result<B> {
        let panicked = || Error::Aborted { by: self.rank, reason: PANICKED.into() };
        self.result.recv().unwrap_or_else(|_| Err(panicked()))
    }

    /// Whether [`wait`](Self::wait) would return at once.
    pub fn is_done(&self) -> bool {
        !self.result.is_empty()
    }
}

impl<B> fmt::Debug for Work<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Work").field("done", &self.is_done()).finish()
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
    thread: Mutex<Option<CommThread>>,
    pending: Arc<Pending>,
}

#[derive(Debug)]
struct CommThread {
    jobs: Sender<Job>,
    handle: JoinHandle<()>,
}

/// Operations submitted and not yet done.
#[derive(Debug, Default)]
struct Pending {
    count: AtomicUsize,
    lock: Mutex<()>,
    idle: Condvar,
}

impl Pending {
    fn finish_one(&self) {
        let _guard = self.lock.lock();
        // Release: pairs with the Acquire in `Queue::drain`; what the job did is visible to whoever
        // sees it gone.
        self.count.fetch_sub(1, Ordering::Release);
        self.idle.notify_all();
    }
}

impl Queue {
    pub(crate) fn new(backend: Arc<dyn Backend>) -> Self {
        Self { backend, thread: Mutex::new(None), pending: Arc::default() }
    }

    /// Waits until everything submitted before is done.
    pub(crate) fn drain(&self) {
        // Acquire: pairs with `Pending::finish_one`.
        if self.pending.count.load(Ordering::Acquire) == 0 {
            return;
        }
        let mut guard = self.pending.lock.lock();
        while self.pending.count.load(Ordering::Acquire) != 0 {
            self.pending.idle.wait(&mut guard);
        }
    }

    /// Queues `run` on `buffer`.
    pub(crate) fn submit<B: Send + 'static>(
        &self,
        mut buffer: B,
        run: impl FnOnce(&dyn Backend, &mut B) -> Result<()> + Send + 'static,
    ) -> Result<Work<B>> {
        let (sender, result) = bounded(1);
        let job: Job = Box::new(move |backend| {
            let outcome = run(backend, &mut buffer);
            // Nobody may be listening: the `Work` was dropped, and the buffer is freed here.
            Box::new(move || drop(sender.send(outcome.map(|()| buffer))))
        });
        let mut thread = self.thread.lock();
        let comm = match &mut *thread {
            Some(comm) => comm,
            none => none.insert(self.start()?),
        };
        // Relaxed: this thread's own later `drain` sees it anyway; others have their own order.
        self.pending.count.fetch_add(1, Ordering::Relaxed);
        comm.jobs.send(job).expect("the thread receives until the queue is dropped");
        Ok(Work { rank: self.backend.rank(), result })
    }

    fn start(&self) -> Result<CommThread> {
        let (jobs, queue) = bounded::<Job>(QUEUE_CAPACITY);
        let (backend, pending) = (Arc::clone(&self.backend), Arc::clone(&self.pending));
        let body = move || {
            for job in queue {
                // A panic is a bug, but must leave nobody waiting: its `Work` sees the channel
                // closed, and the peers see the group aborted.
                let delivery = catch_unwind(AssertUnwindSafe(|| job(&*backend)));
                if delivery.is_err() {
                    backend.abort(PANICKED);
                }
                pending.finish_one();
                if let Ok(deliver) = delivery {
                    // The operation is over. If dropping a buffer that nobody wants panics, that
                    // has been printed, and concerns no other operation.
                    drop(catch_unwind(AssertUnwindSafe(deliver)));
                }
            }
        };
        let thread = std::thread::Builder::new().name("collective".into());
        let handle = thread
            .spawn(body)
            .map_err(|error| Error::io("starting the communication thread", &error))?;
        Ok(CommThread { jobs, handle })
    }
}

impl Drop for Queue {
    /// Waits for the operations in flight, each of which has the group's timeout.
    fn drop(&mut self) {
        let Some(comm) = self.thread.get_mut().take() else { return };
        if self.backend.forked() {
            // The thread stayed behind in the parent; here is nothing to close, join or detach.
            std::mem::forget(comm);
            return;
        }
        let CommThread { jobs, handle } = comm;
        drop(jobs);
        if handle.thread().id() != std::thread::current().id() {
            handle.join().expect("the thread catches the panics of its jobs");
        }
    }
}
