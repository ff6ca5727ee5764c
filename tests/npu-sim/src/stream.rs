//! Streams: a thread each, which does the stream's work in order.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::world::{CHANGED, World, world};

/// A piece of work: it locks the world itself, or stays away from it while it waits.
pub(crate) type Job = Box<dyn FnOnce() -> Result<(), i32> + Send>;

pub(crate) struct Stream {
    pub(crate) context: usize,
    pub(crate) device: usize,
    queue: VecDeque<Job>,
    pub(crate) submitted: u64,
    pub(crate) done: u64,
    /// How much somebody waits for.
    demanded: u64,
    /// The first failure of its work.
    pub(crate) error: Option<i32>,
    pub(crate) stops_on_failure: bool,
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Stream({} of {} done)", self.done, self.submitted)
    }
}

pub(crate) const INVALID: i32 = 107_000;
pub(crate) const WRONG_CONTEXT: i32 = 107_003;
pub(crate) const INVALID_HANDLE: i32 = 107_017;
pub(crate) const TIMEOUT: i32 = 507_046;
/// Status of a stream whose work was aborted.
pub(crate) const ABORTED: i32 = 107_020;

impl World {
    pub(crate) fn new_stream(&mut self, context: usize, device: usize) -> Result<usize, i32> {
        let id = self.handle();
        let stream = Stream {
            context,
            device,
            queue: VecDeque::new(),
            submitted: 0,
            done: 0,
            demanded: 0,
            error: None,
            stops_on_failure: false,
        };
        self.streams.insert(id, stream);
        let spawned = thread::Builder::new().name("npu-sim stream".into()).spawn(move || work(id));
        let Ok(thread) = spawned else {
            self.streams.remove(&id);
            return Err(200_000);
        };
        let mut threads = THREADS.lock().unwrap_or_else(PoisonError::into_inner);
        threads.retain(|thread| !thread.is_finished());
        threads.push(thread);
        Ok(id)
    }

    /// The stream a call means, which must be of the thread's context; null is the context's own.
    pub(crate) fn stream_of(&mut self, handle: usize) -> Result<usize, i32> {
        let (context, device) = self.current()?;
        if handle == 0 {
            if let Some(id) = self.default_streams.get(&context) {
                return Ok(*id);
            }
            let id = self.new_stream(context, device)?;
            self.default_streams.insert(context, id);
            return Ok(id);
        }
        let Some(stream) = self.streams.get(&handle) else { return Err(INVALID_HANDLE) };
        if stream.context == context { Ok(handle) } else { Err(WRONG_CONTEXT) }
    }

    /// Puts work into a stream; its number there.
    pub(crate) fn submit(&mut self, id: usize, job: Job) -> Result<u64, i32> {
        let stream = self.streams.get_mut(&id).ok_or(INVALID_HANDLE)?;
        if let Some(code) = stream.error.filter(|_| stream.stops_on_failure) {
            return Err(code);
        }
        stream.queue.push_back(job);
        stream.submitted += 1;
        CHANGED.notify_all();
        Ok(stream.submitted)
    }

    /// Somebody needs the first `until` pieces of a stream's work.
    pub(crate) fn demand(&mut self, id: usize, until: u64) {
        if let Some(stream) = self.streams.get_mut(&id) {
            stream.demanded = stream.demanded.max(until);
            CHANGED.notify_all();
        }
    }

    /// Whether they are done; also if the stream is gone.
    pub(crate) fn is_done(&self, id: usize, until: u64) -> bool {
        self.streams.get(&id).is_none_or(|stream| stream.done >= until)
    }

    /// Drops what a stream has not begun.
    pub(crate) fn abort(&mut self, id: usize) {
        if let Some(stream) = self.streams.get_mut(&id) {
            let dropped = stream.queue.len();
            stream.queue.clear();
            stream.done += dropped as u64;
            if dropped > 0 {
                stream.error.get_or_insert(ABORTED);
            }
            CHANGED.notify_all();
        }
    }
}

/// The streams' threads, but for those that have long ended.
static THREADS: Mutex<Vec<JoinHandle<()>>> = Mutex::new(Vec::new());

/// Waits for the threads of streams that are gone, but not for work that does not end: a checker of
/// leaks at the end of the process takes a thread that is about to end for one.
pub(crate) fn join_all() {
    let threads = std::mem::take(&mut *THREADS.lock().unwrap_or_else(PoisonError::into_inner));
    let deadline = Instant::now() + Duration::from_secs(1);
    for thread in threads {
        while !thread.is_finished() && Instant::now() < deadline {
            thread::sleep(Duration::from_micros(100));
        }
        if thread.is_finished() {
            // One that panicked has said so.
            drop(thread.join());
        }
    }
}

/// Waits until a stream has done so much; its failure, if it had one.
pub(crate) fn wait(id: usize, until: u64, timeout: Option<Duration>) -> Result<(), i32> {
    let deadline = timeout.map(|timeout| Instant::now() + timeout);
    let mut world = world();
    world.demand(id, until);
    while !world.is_done(id, until) {
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        if left == Some(Duration::ZERO) {
            return Err(TIMEOUT);
        }
        // No notification is lost under the lock; the pause is for deadlines only.
        let pause = left.unwrap_or(Duration::from_secs(1));
        let waited = CHANGED.wait_timeout(world, pause);
        world = waited.unwrap_or_else(PoisonError::into_inner).0;
    }
    match world.streams.get_mut(&id) {
        Some(stream) if stream.stops_on_failure => stream.error.map_or(Ok(()), Err),
        Some(stream) => stream.error.take().map_or(Ok(()), Err),
        None => Ok(()),
    }
}

/// A stream's thread, until the stream is gone.
fn work(id: usize) {
    loop {
        let Some(job) = next(id) else { return };
        let outcome = job();
        let mut world = world();
        let Some(stream) = world.streams.get_mut(&id) else { return };
        stream.done += 1;
        if let Err(code) = outcome {
            stream.error.get_or_insert(code);
            if stream.stops_on_failure {
                stream.done += stream.queue.len() as u64;
                stream.queue.clear();
            }
        }
        CHANGED.notify_all();
    }
}

/// The stream's next work, when there is some that is needed; nothing once the stream is gone.
fn next(id: usize) -> Option<Job> {
    let mut world = world();
    loop {
        let eager = world.config.eager;
        let stream = world.streams.get_mut(&id)?;
        if (eager || stream.done < stream.demanded)
            && let Some(job) = stream.queue.pop_front()
        {
            return Some(job);
        }
        world = CHANGED.wait(world).unwrap_or_else(PoisonError::into_inner);
    }
}
