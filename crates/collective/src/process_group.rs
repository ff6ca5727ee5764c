//! The group: typed at the door, checked at the door, then handed to a backend.
//!
//! Every length, root and operator is checked here, before anything is sent, so a caller's mistake
//! is an error on the rank that made it and leaves the group usable. Behind the door there are only
//! [`OpDesc`] and raw memory.

#![expect(unsafe_code, reason = "hands checked slices to backends as raw memory")]

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::backend::{Backend, Patience, RawBufs, host};
use crate::store::Store;
use crate::work::{Buffer, Queue, Work};
use crate::{DType, Element, Error, OpDesc, Rank, ReduceOp, Result, SharedBuf, Verb};

/// How a group is made.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct GroupOptions {
    /// How long a rank waits for a peer to take its next step: to join, to enter an operation, to
    /// deliver the next chunk. 10 minutes unless set.
    pub timeout: Duration,
    /// The group's name in the store and in error texts; groups that share a store need different
    /// ones. `default` unless set.
    pub name: String,
}

impl Default for GroupOptions {
    fn default() -> Self {
        Self { timeout: Duration::from_secs(600), name: "default".into() }
    }
}

impl GroupOptions {
    /// Sets the timeout.
    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Sets the name.
    pub fn with_name(mut self, name: impl Into<String>) -> Self {
        self.name = name.into();
        self
    }
}

/// One rank's membership in a group of ranks that work together.
///
/// All ranks make the same calls in the same order, with equal types, counts, operators and roots.
/// The ranks compare what they call before any data move; a difference is
/// [`Error::Mismatch`] on all of them.
///
/// Blocking calls run on the caller's thread, after the asynchronous ones submitted before them.
/// Calls of one rank from several threads must be ordered by the caller, as on every other rank.
/// Clones are the same membership. When the last one is dropped, the rank has left: it waits for
/// its operations in flight, and peers that then wait for it get an error that names it.
///
/// After any error but [`Error::InvalidArgument`] the group is unusable on every rank, and calls
/// return [`Error::Poisoned`].
///
/// # Examples
///
/// ```
/// use std::time::Duration;
/// use collective::{ProcessGroup, ReduceOp};
///
/// let groups = ProcessGroup::threads(2, Duration::from_secs(10))?;
/// std::thread::scope(|scope| {
///     for group in groups {
///         scope.spawn(move || {
///             let mut x = [group.rank() as f32, 1.0];
///             group.all_reduce(&mut x, ReduceOp::Sum).expect("both ranks are here");
///             assert_eq!(x, [1.0, 2.0]);
///         });
///     }
/// });
/// # Ok::<(), collective::Error>(())
/// ```
#[derive(Clone)]
pub struct ProcessGroup {
    // Dropped first: the queue's operations end before the backend says goodbye.
    queue: Arc<Queue>,
    backend: Arc<dyn Backend>,
}

impl ProcessGroup {
    /// A group whose ranks are threads of this process: rank `r` is element `r` of the result, to be
    /// moved to the thread that plays it. Does not wait.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] for 0 or more than 256 ranks; [`Error::Io`] if the system has no
    /// memory.
    pub fn threads(world_size: usize, timeout: Duration) -> Result<Vec<Self>> {
        let options = GroupOptions::default().with_timeout(timeout);
        let hosts = host::threads::group(world_size, &options)?;
        Ok(hosts.into_iter().map(|host| Self::from_backend(Arc::new(host))).collect())
    }

    /// A group whose ranks are processes of one machine, over shared memory.
    ///
    /// Every rank must call it, with the same `world_size` and name, each with its own `rank`.
    /// Blocks until all have. Nothing is left behind on the machine, however the processes end.
    ///
    /// # Errors
    ///
    /// [`Error::Timeout`] naming the ranks that did not come; [`Error::Unsupported`] if the ranks
    /// are on several machines (or in several pid namespaces); [`Error::PeerDied`]; the store's
    /// errors; [`Error::InvalidArgument`] for a rank or size out of range.
    pub fn from_store(
        store: Arc<dyn Store>,
        rank: Rank,
        world_size: usize,
        options: GroupOptions,
    ) -> Result<Self> {
        let host = host::shm::join(&*store, rank, world_size, &options)?;
        Ok(Self::from_backend(Arc::new(host)))
    }

    /// A group over any backend.
    pub fn from_backend(backend: Arc<dyn Backend>) -> Self {
        Self { queue: Arc::new(Queue::new(Arc::clone(&backend))), backend }
    }

    /// This rank, `0..world_size`.
    pub fn rank(&self) -> Rank {
        self.backend.rank()
    }

    /// Number of ranks.
    pub fn world_size(&self) -> usize {
        self.backend.world_size()
    }

    /// Reduces the ranks' buffers, element by element, in place; every rank gets the result, with
    /// the same bits.
    ///
    /// Every rank must call it with the same count, type and operator. Blocks. A buffer of
    /// [`alloc`](Self::alloc), or the same part of it on every rank, is reduced where it lies; if
    /// only some ranks pass one, that is a mismatch.
    ///
    /// Over shared memory, for `n` ranks and `b` bytes: up to 8 KiB one step, each rank reads all
    /// `n * b`. Above, in chunks of 256 KiB, three steps each: a rank writes `(n-1)/n * b` for the
    /// others, folds `b / n` from each of them, and reads `(n-1)/n * b` of results. In place: one
    /// step; a rank reads `b / n` from every rank and writes it to every rank.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] if `op` is not defined for `T`. [`Error::Mismatch`] with `buf`
    /// unchanged. Otherwise a peer's failure, with the contents of `buf` unspecified.
    #[doc(alias = "allreduce")]
    pub fn all_reduce<T: Element>(&self, buf: &mut [T], op: ReduceOp) -> Result<()> {
        let desc = describe::<T>(Verb::AllReduce, Some(op), None, buf.len());
        self.run_in_place(&desc, buf)
    }

    /// Copies the root's buffer to every rank.
    ///
    /// Every rank must call it with the same count, type and root. Blocks, on every rank, until all
    /// have entered and this rank has its copy. Over shared memory the root writes the buffer once,
    /// in chunks of 256 KiB, and every other rank reads it. All ranks end with the same bits.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] if there is no such root; else as [`all_reduce`](Self::all_reduce).
    pub fn broadcast<T: Element>(&self, buf: &mut [T], root: Rank) -> Result<()> {
        let desc = describe::<T>(Verb::Broadcast, None, Some(root), buf.len());
        self.run_in_place(&desc, buf)
    }

    /// Concatenates the ranks' inputs, in rank order, on every rank.
    ///
    /// Every rank must call it with the same `input.len()` and type, and with
    /// `output.len() == world_size * input.len()`. Blocks. Over shared memory every rank writes its
    /// input once, in chunks of 256 KiB, and reads those of the others. All ranks end with the same
    /// bits.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] if the lengths do not fit; else as
    /// [`all_reduce`](Self::all_reduce).
    #[doc(alias = "allgather")]
    pub fn all_gather<T: Element>(&self, output: &mut [T], input: &[T]) -> Result<()> {
        let desc = describe::<T>(Verb::AllGather, None, None, input.len());
        self.run(&desc, output, input)
    }

    /// Reduces the ranks' inputs and leaves rank `r` with block `r` of the result.
    ///
    /// Every rank must call it with the same `output.len()`, type and operator, and with
    /// `input.len() == world_size * output.len()`. Blocks. Over shared memory a rank writes the
    /// other ranks' blocks of its input once, in chunks of 256 KiB, and reads its own block from
    /// every other rank. The result has the bits that [`all_reduce`](Self::all_reduce) gives.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] if the lengths do not fit or `op` is not defined for `T`; else as
    /// [`all_reduce`](Self::all_reduce).
    pub fn reduce_scatter<T: Element>(
        &self,
        output: &mut [T],
        input: &[T],
        op: ReduceOp,
    ) -> Result<()> {
        let desc = describe::<T>(Verb::ReduceScatter, Some(op), None, output.len());
        self.run(&desc, output, input)
    }

    /// Returns when every rank has called it. One step, no data.
    ///
    /// # Errors
    ///
    /// As [`all_reduce`](Self::all_reduce).
    pub fn barrier(&self) -> Result<()> {
        self.run_in_place::<u8>(&describe::<u8>(Verb::Barrier, None, None, 0), &mut [])
    }

    /// Starts an [`all_reduce`](Self::all_reduce) and returns; the result comes with
    /// [`Work::wait`].
    ///
    /// Every rank must call it in the same place among its calls; whether a rank takes the blocking
    /// or the asynchronous form is its own affair. Operations run on the group's one communication
    /// thread in the order of submission. Does not block unless 1024 operations are queued. Steps,
    /// bytes and bits are those of the blocking form.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`], or the group's earlier failure; `buf` is dropped. What happens
    /// in flight is reported by [`Work::wait`].
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
    pub fn all_reduce_async<B: Buffer>(&self, mut buf: B, op: ReduceOp) -> Result<Work<B>> {
        self.backend.ready()?;
        let desc = describe::<B::Elem>(Verb::AllReduce, Some(op), None, buf.count());
        desc.check(self.world_size())?;
        self.queue.submit(buf, move |backend, buf| {
            let buf = buf.as_mut_slice();
            check_len("buffer", buf.len(), desc.count)?;
            let output: *mut u8 = buf.as_mut_ptr().cast();
            let bufs = RawBufs { input: output.cast_const(), output };
            // SAFETY: `buf` is borrowed mutably for the call and has `desc.count` elements; `desc`
            // was checked above.
            unsafe { backend.run(&desc, bufs, Patience::Background) }
        })
    }

    /// Obtains a buffer of `count` zeros in memory shared with the peers, where
    /// [`all_reduce`](Self::all_reduce) works in place. That saves the copies in and out, which is
    /// most of the time for buffers of 64 KiB and more, and nothing for those up to 8 KiB.
    ///
    /// Every rank must call it with the same count and type. Blocks. The memory is freed on each
    /// rank when its buffer is dropped; peers need not agree on when.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] or [`Error::Aborted`] if a rank has no memory; else as
    /// [`all_reduce`](Self::all_reduce).
    #[doc(alias = "ncclMemAlloc")]
    pub fn alloc<T: Element>(&self, count: usize) -> Result<SharedBuf<T>> {
        self.backend.ready()?;
        check_bytes::<T>(count, 1)?;
        self.queue.drain();
        SharedBuf::new(self.backend.alloc(T::DTYPE, count)?, count)
    }

    /// Gives the group up on all ranks: whoever waits, or calls later, gets [`Error::Aborted`] with
    /// this rank and reason. For the rank that fails outside of a collective, so that its peers need
    /// not time out. Does not block; any rank may call it at any time, from any thread.
    /// Peers get the first 320 bytes of the reason. The first failure of a group is the one that
    /// counts: after another this does nothing.
    pub fn abort(&self, reason: &str) {
        self.backend.abort(reason);
    }

    fn run_in_place<T: Element>(&self, desc: &OpDesc, buf: &mut [T]) -> Result<()> {
        let output: *mut u8 = buf.as_mut_ptr().cast();
        let bufs = RawBufs { input: output.cast_const(), output };
        self.start(desc)?;
        // SAFETY: the caller of this function gave `desc` the length of `buf`, which is borrowed
        // mutably for the call; `start` has checked `desc`.
        unsafe { self.backend.run(desc, bufs, Patience::Caller) }
    }

    fn run<T: Element>(&self, desc: &OpDesc, output: &mut [T], input: &[T]) -> Result<()> {
        check_bytes::<T>(desc.count, self.world_size())?;
        check_len("output", output.len(), desc.output_count(self.world_size()))?;
        check_len("input", input.len(), desc.input_count(self.world_size()))?;
        let bufs = RawBufs { input: input.as_ptr().cast(), output: output.as_mut_ptr().cast() };
        self.start(desc)?;
        // SAFETY: the lengths were checked above, both slices are borrowed for the call, and
        // `start` has checked `desc`.
        unsafe { self.backend.run(desc, bufs, Patience::Caller) }
    }

    /// Checks, and waits until it is this operation's turn.
    fn start(&self, desc: &OpDesc) -> Result<()> {
        desc.check(self.world_size())?;
        self.backend.ready()?;
        self.queue.drain();
        Ok(())
    }
}

impl fmt::Debug for ProcessGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProcessGroup")
            .field("backend", &self.backend.name())
            .field("rank", &self.rank())
            .field("world_size", &self.world_size())
            .finish()
    }
}

fn describe<T: Element>(
    verb: Verb,
    op: Option<ReduceOp>,
    root: Option<Rank>,
    count: usize,
) -> OpDesc {
    let dtype: DType = T::DTYPE;
    OpDesc { verb, dtype, op, root, count }
}

fn check_len(what: &str, got: usize, expected: usize) -> Result<()> {
    if got == expected {
        return Ok(());
    }
    Err(Error::InvalidArgument(format!("the {what} has {got} elements, expected {expected}")))
}

/// Checks that `count` elements for each of `times` ranks can be counted in bytes.
fn check_bytes<T: Element>(count: usize, times: usize) -> Result<()> {
    let bytes = count.checked_mul(times).and_then(|count| count.checked_mul(T::DTYPE.size()));
    if bytes.is_some_and(|bytes| isize::try_from(bytes).is_ok()) {
        return Ok(());
    }
    Err(Error::InvalidArgument(format!("{count} elements are more than memory can hold")))
}
