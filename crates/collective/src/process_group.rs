//! The group: what a rank holds and calls, typed.
//!
//! Every length, root and operator is checked in [`verbs`](crate::verbs), before anything is sent,
//! so a caller's mistake is an error on the rank that made it and leaves the group usable. Behind
//! that there are only [`OpDesc`] and raw memory.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::backend::{Backend, Patience, Wait, host};
use crate::store::Store;
use crate::verbs::{Message, Verbs, check_bytes, check_len};
use crate::work::{Buffer, Queue, Work};
use crate::{Element, OpDesc, Rank, ReduceOp, Result, SharedBuf, Verb};

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
    /// Whether reductions fold in rank order. They do unless set.
    pub determinism: Determinism,
}

/// In which order a reduction folds the ranks' numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Determinism {
    /// In rank order, as [`ReduceOp`] says: same bits on all ranks, whatever the transport, the
    /// size, the offset in the buffer.
    #[default]
    RankOrder,
    /// In any order that is faster between machines. 16-bit floats may be rounded at each of
    /// several steps. All ranks still get the same bits, and get them again when they repeat the
    /// call.
    Fast,
}

impl Default for GroupOptions {
    fn default() -> Self {
        Self {
            timeout: Duration::from_secs(600),
            name: "default".into(),
            determinism: Determinism::RankOrder,
        }
    }
}

impl GroupOptions {
    /// Sets the timeout.
    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Sets the order of reductions.
    pub fn with_determinism(mut self, determinism: Determinism) -> Self {
        self.determinism = determinism;
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
    /// others, folds `b / n` from each of them, and reads `(n-1)/n * b` of results; between two
    /// ranks, in chunks of 128 KiB, two steps each: a rank writes `b` for the other and folds `b`
    /// from it. In place: one step; a rank reads `b / n` from every rank and writes it to every
    /// rank.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] if `op` is not defined for `T`. [`Error::Mismatch`] with `buf`
    /// unchanged. Otherwise a peer's failure, with the contents of `buf` unspecified.
    #[doc(alias = "allreduce")]
    pub fn all_reduce<T: Element>(&self, buf: &mut [T], op: ReduceOp) -> Result<()> {
        self.verbs()?.all_reduce(buf, op)
    }

    /// Reduces the ranks' buffers, element by element, into the root's; the others' stay as they
    /// were.
    ///
    /// Every rank must call it with the same count, type, operator and root. Blocks. The root gets
    /// the bits that [`all_reduce`](Self::all_reduce) gives, for the same steps; only the root reads
    /// results.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] if `op` is not defined for `T` or there is no such root; else as
    /// [`all_reduce`](Self::all_reduce).
    pub fn reduce<T: Element>(&self, buf: &mut [T], op: ReduceOp, root: Rank) -> Result<()> {
        self.verbs()?.reduce(buf, op, root)
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
        self.verbs()?.broadcast(buf, root)
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
        self.verbs()?.all_gather(output, input)
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
        self.verbs()?.reduce_scatter(output, input, op)
    }

    /// Concatenates the ranks' inputs, in rank order, on the root.
    ///
    /// Every rank must call it with the same `input.len()`, type and root. On the root
    /// `output.len() == world_size * input.len()`; elsewhere `output` is left alone, and may be
    /// empty. Blocks until the root has all, and on the others until their input is on its way. One
    /// step; every rank but the root sends its input once.
    ///
    /// # Errors
    ///
    /// As [`all_gather`](Self::all_gather), or [`Error::InvalidArgument`] if there is no such root.
    pub fn gather<T: Element>(&self, output: &mut [T], input: &[T], root: Rank) -> Result<()> {
        self.verbs()?.gather(output, input, root)
    }

    /// Leaves rank `r` with block `r` of the root's input.
    ///
    /// Every rank must call it with the same `output.len()`, type and root. On the root
    /// `input.len() == world_size * output.len()`; elsewhere `input` is not read, and may be empty.
    /// Blocks until this rank has its block, and on the root until all are on their way. One step;
    /// the root sends each block once.
    ///
    /// # Errors
    ///
    /// As [`gather`](Self::gather).
    pub fn scatter<T: Element>(&self, output: &mut [T], input: &[T], root: Rank) -> Result<()> {
        self.verbs()?.scatter(output, input, root)
    }

    /// Block `s` of rank `r`'s input becomes block `r` of rank `s`'s output.
    ///
    /// Every rank must call it with the same `input.len() == output.len()`, a multiple of
    /// `world_size`, and type. Blocks. One step; every rank sends each block but its own once.
    ///
    /// # Errors
    ///
    /// As [`all_gather`](Self::all_gather).
    #[doc(alias = "alltoall")]
    pub fn all_to_all<T: Element>(&self, output: &mut [T], input: &[T]) -> Result<()> {
        self.verbs()?.all_to_all(output, input)
    }

    /// [`all_gather`](Self::all_gather) of inputs of different lengths: `counts[r]` elements of
    /// rank `r`.
    ///
    /// Every rank must call it with the same `counts` and type, `input.len() == counts[rank]`, and
    /// `output.len()` their sum. Blocks. Two steps: an all-gather of the counts, which are compared
    /// on every rank, then every rank sends its input to every other.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] if the lengths do not fit; [`Error::Mismatch`] on every rank,
    /// with `output` unchanged, if the ranks' counts do not; else as
    /// [`all_reduce`](Self::all_reduce).
    #[doc(alias = "allgatherv")]
    pub fn all_gather_v<T: Element>(
        &self,
        output: &mut [T],
        input: &[T],
        counts: &[usize],
    ) -> Result<()> {
        self.verbs()?.all_gather_v(output, input, counts)
    }

    /// [`gather`](Self::gather) of inputs of different lengths: the root says that rank `r` has
    /// `counts[r]` elements, and elsewhere `counts` is not read.
    ///
    /// Two steps: an all-gather of the counts, then the inputs.
    ///
    /// # Errors
    ///
    /// As [`all_gather_v`](Self::all_gather_v).
    pub fn gather_v<T: Element>(
        &self,
        output: &mut [T],
        input: &[T],
        counts: &[usize],
        root: Rank,
    ) -> Result<()> {
        self.verbs()?.gather_v(output, input, counts, root)
    }

    /// [`scatter`](Self::scatter) of blocks of different lengths: the root says that rank `r` gets
    /// `counts[r]` elements, and elsewhere `counts` is not read.
    ///
    /// Two steps: an all-gather of the counts, then the blocks.
    ///
    /// # Errors
    ///
    /// As [`all_gather_v`](Self::all_gather_v).
    pub fn scatter_v<T: Element>(
        &self,
        output: &mut [T],
        input: &[T],
        counts: &[usize],
        root: Rank,
    ) -> Result<()> {
        self.verbs()?.scatter_v(output, input, counts, root)
    }

    /// [`reduce_scatter`](Self::reduce_scatter) with blocks of different lengths: rank `r` is left
    /// with `counts[r]` elements of the result.
    ///
    /// Every rank must call it with the same `counts`, type and operator,
    /// `output.len() == counts[rank]` and `input.len()` the sum of the counts. Blocks. An
    /// all-gather of the counts, then a [`reduce`](Self::reduce) for each rank, on a copy of the
    /// block.
    ///
    /// # Errors
    ///
    /// As [`all_gather_v`](Self::all_gather_v), or [`Error::InvalidArgument`] if `op` is not
    /// defined for `T`.
    pub fn reduce_scatter_v<T: Element>(
        &self,
        output: &mut [T],
        input: &[T],
        counts: &[usize],
        op: ReduceOp,
    ) -> Result<()> {
        self.verbs()?.reduce_scatter_v(output, input, counts, op)
    }

    /// [`all_to_all`](Self::all_to_all) with blocks of different lengths: this rank sends
    /// `input_counts[s]` elements to rank `s` and receives `output_counts[r]` from rank `r`.
    ///
    /// What a rank sends another must be what that one expects. Blocks. Two steps: an all-gather of
    /// all counts, then the blocks.
    ///
    /// # Errors
    ///
    /// As [`all_gather_v`](Self::all_gather_v).
    #[doc(alias = "all_to_all_single")]
    pub fn all_to_all_v<T: Element>(
        &self,
        output: &mut [T],
        output_counts: &[usize],
        input: &[T],
        input_counts: &[usize],
    ) -> Result<()> {
        self.verbs()?.all_to_all_v(output, output_counts, input, input_counts)
    }

    /// Sends `buf` to rank `to`, which must [`recv`](Self::recv) it. Only these two take part.
    ///
    /// Blocks until the message is on its way; that may be before the receiver asks for it, or not.
    /// Messages between two ranks arrive in the order in which they were sent.
    ///
    /// # Errors
    ///
    /// As [`batch_isend_irecv`](Self::batch_isend_irecv).
    pub fn send<T: Element>(&self, buf: &[T], to: Rank) -> Result<()> {
        self.batch_isend_irecv(vec![Message::send(buf, to)])
    }

    /// Receives into `buf` what rank `from` [`send`](Self::send)s: as many elements, of the same
    /// type. Only these two take part. Blocks until it is there.
    ///
    /// # Errors
    ///
    /// As [`batch_isend_irecv`](Self::batch_isend_irecv).
    pub fn recv<T: Element>(&self, buf: &mut [T], from: Rank) -> Result<()> {
        self.batch_isend_irecv(vec![Message::recv(buf, from)])
    }

    /// Sends and receives messages all at once, so that no order among them can lock the ranks up.
    /// Blocks until all are done.
    ///
    /// Only the ranks named take part. Between two ranks the messages of one direction match in the
    /// order in which they are given, over all calls.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] for a message to this rank itself or to none of the group.
    /// [`Error::Mismatch`] on the receiver, with its buffer unchanged, if type or count of a message
    /// are not what it expects. Else as [`all_reduce`](Self::all_reduce).
    pub fn batch_isend_irecv(&self, messages: Vec<Message<'_>>) -> Result<()> {
        self.verbs()?.batch(messages)
    }

    /// Reduces many small buffers as one: copies them one after another into one buffer,
    /// [`all_reduce`](Self::all_reduce)s that, and copies back. Same bits, one operation.
    ///
    /// Every rank must call it with buffers of the same total length.
    ///
    /// # Errors
    ///
    /// As [`all_reduce`](Self::all_reduce).
    pub fn all_reduce_coalesced<T: Element>(
        &self,
        bufs: &mut [&mut [T]],
        op: ReduceOp,
    ) -> Result<()> {
        let mut all = concat(bufs);
        self.all_reduce(&mut all, op)?;
        split_back(&all, bufs);
        Ok(())
    }

    /// Broadcasts many small buffers as one, see
    /// [`all_reduce_coalesced`](Self::all_reduce_coalesced).
    ///
    /// # Errors
    ///
    /// As [`broadcast`](Self::broadcast).
    pub fn broadcast_coalesced<T: Element>(&self, bufs: &mut [&mut [T]], root: Rank) -> Result<()> {
        let mut all = concat(bufs);
        self.broadcast(&mut all, root)?;
        split_back(&all, bufs);
        Ok(())
    }

    /// Returns when every rank has called it. One step, no data.
    ///
    /// # Errors
    ///
    /// As [`all_reduce`](Self::all_reduce).
    pub fn barrier(&self) -> Result<()> {
        self.verbs()?.barrier()
    }

    /// A [`barrier`](Self::barrier) with a deadline of its own: whoever has come says, after
    /// `timeout`, which ranks have not.
    ///
    /// # Errors
    ///
    /// [`Error::Timeout`] with the missing ranks, on every rank that came; else as
    /// [`barrier`](Self::barrier).
    pub fn monitored_barrier(&self, timeout: Duration) -> Result<()> {
        let mut verbs = self.verbs()?;
        verbs.wait.timeout = Some(timeout);
        verbs.barrier()
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
        let count = buf.count();
        self.checked::<B::Elem>(Verb::AllReduce, Some(op), None)?;
        self.submit(buf, move |verbs, buf| verbs.all_reduce(same_len(buf, count)?, op))
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

    /// What the blocking calls run on, once it is their turn.
    fn verbs(&self) -> Result<Verbs<'_>> {
        self.backend.ready()?;
        self.queue.drain();
        let wait = Wait { patience: Patience::Caller, timeout: None };
        Ok(Verbs { backend: &*self.backend, wait })
    }

    fn submit<B: Send + 'static>(
        &self,
        bufs: B,
        run: impl FnOnce(Verbs<'_>, &mut B) -> Result<()> + Send + 'static,
    ) -> Result<Work<B>> {
        self.backend.ready()?;
        let wait = Wait { patience: Patience::Background, timeout: None };
        self.queue.submit(bufs, move |backend, bufs| run(Verbs { backend, wait }, bufs))
    }

    /// A caller's mistake, seen before an operation is queued.
    fn checked<T: Element>(
        &self,
        verb: Verb,
        op: Option<ReduceOp>,
        root: Option<Rank>,
    ) -> Result<()> {
        self.backend.ready()?;
        OpDesc { verb, dtype: T::DTYPE, op, root, count: 0 }.check(self.world_size())
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

/// The slice of a buffer that must not have changed its length since it was queued.
fn same_len<B: Buffer>(buf: &mut B, count: usize) -> Result<&mut [B::Elem]> {
    let slice = buf.as_mut_slice();
    check_len("buffer", slice.len(), count)?;
    Ok(slice)
}

fn concat<T: Element>(bufs: &[&mut [T]]) -> Vec<T> {
    let mut all = Vec::with_capacity(bufs.iter().map(|buf| buf.len()).sum());
    for buf in bufs {
        all.extend_from_slice(buf);
    }
    all
}

fn split_back<T: Element>(mut all: &[T], bufs: &mut [&mut [T]]) {
    for buf in bufs {
        let own;
        (own, all) = all.split_at(buf.len());
        buf.copy_from_slice(own);
    }
}
