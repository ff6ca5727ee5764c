//! [`ProcessGroup`], a rank's typed interface to its group.
//!
//! [`verbs`](super::verbs) checks every length, root and operator before anything is sent, so a
//! caller's mistake is an error on the rank that made it and leaves the group usable. Backends see
//! only [`OpDesc`](crate::OpDesc) and raw memory.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tracing::debug;

use super::membership::{Membership, Origin};
use super::verbs::{Message, Verbs};
use crate::backend::{Backend, Wait, WaitPolicy, host, transport};
use crate::device::DeviceCalls;
use crate::flight::{FlightRecord, Recorder, error_file};
use crate::memory::copy::copy_slice;
use crate::op::blocks::{check_bytes, check_len, describe};
#[cfg(feature = "sim")]
use crate::sim::{self, Clocks, Network};
use crate::store::{MemoryStore, Store};
use crate::work::{Queue, Work};
use crate::{Element, Error, GroupOptions, Rank, ReduceOp, Result, SharedBuf, Verb};

/// One rank's membership in a group.
///
/// All ranks make the same calls in the same order, with equal types, counts, operators and roots.
/// The ranks compare their calls before any data move; a difference is [`Error::Mismatch`] on all
/// of them.
///
/// Blocking calls run on the caller's thread, after the asynchronous ones submitted before them. If
/// several threads of a rank make calls, the caller must order them as on every other rank. Clones
/// share the membership. Dropping the last one waits for the operations in flight and leaves the
/// group; peers that then wait for this rank get an error that names it.
///
/// After any error but [`Error::InvalidArgument`] the group is unusable on every rank, and calls
/// return [`Error::Poisoned`]; [`rebuild`](Self::rebuild) makes a new group of the surviving ranks.
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
    // Dropped first: the queue's operations complete before the backend leaves the group.
    pub(crate) queue: Arc<Queue>,
    pub(crate) backend: Arc<dyn Backend>,
    recorder: Arc<Recorder>,
    pub(crate) membership: Arc<Membership>,
    /// Timeout of the calls made with this value; `None` for the group's.
    timeout: Option<Duration>,
    /// Tag of the calls made with this value.
    tag: Option<Arc<str>>,
}

impl ProcessGroup {
    /// Makes a group whose ranks are threads of this process: element `r` of the result is rank
    /// `r`, to be moved to its thread. Does not block.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] for 0 or more than 256 ranks; [`Error::Io`] if there is not
    /// enough memory.
    pub fn threads(world_size: usize, timeout: Duration) -> Result<Vec<Self>> {
        let options = GroupOptions::default().with_timeout(timeout);
        let hosts = host::threads::group(world_size, &options)?;
        let origin =
            Origin { store: Arc::new(MemoryStore::new()), connect: Arc::new(transport::join) };
        let group = |host| {
            let membership = Membership::first(world_size, options.clone(), Some(origin.clone()));
            Self::new(Arc::new(host), membership)
        };
        Ok(hosts.into_iter().map(group).collect())
    }

    /// Makes a group whose ranks are threads of this process, on a simulated
    /// [`network`](crate::sim::Network): the data are real, with the same bits as on every other
    /// backend; the time is virtual and read from the clocks. Does not block.
    ///
    /// Element `r` of the result is rank `r`, to be moved to its thread. The groups cannot be
    /// [`split`](Self::split) or [rebuilt](Self::rebuild).
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] if the network does not fit the ranks, and for more than 256 of
    /// them.
    #[cfg(feature = "sim")]
    pub fn simulated(
        world_size: usize,
        network: Network,
        options: &GroupOptions,
    ) -> Result<(Vec<Self>, Clocks)> {
        let (sims, clocks) = sim::backend::group(world_size, network, options)?;
        let group = |sim| Self::from_backend_with(Arc::new(sim), options);
        Ok((sims.into_iter().map(group).collect(), clocks))
    }

    /// Makes a group whose ranks are processes: of one machine, over shared memory, or of several,
    /// over TCP or libgloo, with NCCL or HCCL in addition for device memory; see
    /// [`Transport`](crate::Transport).
    ///
    /// Every rank must call it, with the same `world_size`, name, transport and determinism, each
    /// with its own `rank`. Blocks until all have. No files or shared memory are left on a machine,
    /// however the processes end.
    ///
    /// # Errors
    ///
    /// [`Error::Timeout`] with the ranks that did not join; [`Error::Rendezvous`] with rank,
    /// address and port if a connection to a rank fails; [`Error::Unsupported`] if shared memory
    /// was requested and the ranks are on several machines (or in several pid namespaces);
    /// [`Error::PeerDied`]; [`Error::Aborted`] with the rank and its error if joining failed on
    /// another rank; [`Error::DuplicateRank`] if another process or thread joins as this rank; the
    /// store's errors; [`Error::InvalidArgument`] for a rank or size out of range.
    /// [`Error::Mismatch`] on every rank, with the value of rank 0 and that of the first
    /// rank that differs, if world size, transport, determinism or the version of this crate
    /// differ.
    pub fn from_store(
        store: Arc<dyn Store>,
        rank: Rank,
        world_size: usize,
        options: GroupOptions,
    ) -> Result<Self> {
        Self::from_store_with(store, rank, world_size, options, Arc::new(transport::join))
    }

    /// Makes a group over a connected backend. It cannot be [`split`](Self::split) or
    /// [rebuilt](Self::rebuild), because it cannot connect further backends.
    pub fn from_backend(backend: Arc<dyn Backend>) -> Self {
        Self::from_backend_with(backend, &GroupOptions::default())
    }

    /// Makes a group over a connected backend, with the name and the flight record's directory of
    /// `options`; the backend determines the rest.
    pub fn from_backend_with(backend: Arc<dyn Backend>, options: &GroupOptions) -> Self {
        let membership = Membership::first(backend.world_size(), options.clone(), None);
        Self::new(backend, membership)
    }

    pub(crate) fn new(backend: Arc<dyn Backend>, membership: Membership) -> Self {
        error_file::withdraw();
        let queue = Arc::new(Queue::new(Arc::clone(&backend)));
        let recorder = Arc::new(Recorder::new(&*backend, &membership.options));
        debug!(
            name: "group_made", target: "collective", group = membership.options.name.as_str(),
            rank = backend.rank(), world_size = backend.world_size(), backend = backend.name(),
            epoch = membership.epoch, "made a group",
        );
        Self {
            queue,
            backend,
            recorder,
            membership: Arc::new(membership),
            timeout: None,
            tag: None,
        }
    }

    /// Returns this membership with another timeout for the calls made through the returned value,
    /// for example `group.with_timeout(limit).all_gather(&mut output, &input)`. The group itself is
    /// unchanged.
    ///
    /// It costs as much as a clone. This rank waits for `timeout`, shorter or longer than
    /// [`GroupOptions::timeout`], for each next step of a peer; the other ranks keep their own
    /// timeouts. A call that exceeds it fails as one that exceeds the group's timeout does, and the
    /// group is unusable on all ranks. It applies to the verbs, blocking and asynchronous, to
    /// [`object`](crate::object)s and to [`device`](Self::device). [`alloc`](Self::alloc),
    /// [`rebuild`](Self::rebuild) and the joining of a [`split`](Self::split) use the group's
    /// timeout.
    pub fn with_timeout(&self, timeout: Duration) -> Self {
        Self { timeout: Some(timeout), ..self.clone() }
    }

    /// Whether both values are clones of one membership, whatever their timeouts and tags.
    #[must_use]
    pub fn is_same_membership(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.membership, &other.membership)
    }

    /// Returns this membership with a tag for the calls made through the returned value, which
    /// ranks compare: the name of the tensor, for example. Ranks that average different tensors of
    /// equal length in one call then get [`Error::Mismatch`] with each rank's tag, before any data
    /// move: `group.with_tag("layer1.weight").all_reduce(&mut grad, ReduceOp::Avg)`.
    ///
    /// Every rank must make the call with a tag, or every rank without. A tagged call sends 96 more
    /// bytes to every rank, in one more step; the error shows the first 64 bytes of a tag. It
    /// applies to the verbs on host memory, blocking and asynchronous, except for messages between
    /// two ranks.
    pub fn with_tag(&self, tag: &str) -> Self {
        Self { tag: Some(tag.into()), ..self.clone() }
    }

    /// Returns this rank, `0..world_size`.
    pub fn rank(&self) -> Rank {
        self.backend.rank()
    }

    /// Returns the number of ranks.
    pub fn world_size(&self) -> usize {
        self.backend.world_size()
    }

    /// Sends `buf` to rank `to`, which must [`recv`](Self::recv) it. Only these two take part.
    ///
    /// Blocks until the message is in the channel to the receiver. If it fits there (up to 64 KiB
    /// in shared memory, the sockets' buffers over TCP), the call may return before the receiver
    /// calls [`recv`](Self::recv); with a longer message, or over gloo, it does not. Messages
    /// between two ranks arrive in the order in which they were sent.
    ///
    /// The receiver compares type and count before it reads any data. If they do not match, a
    /// sender that still waits gets [`Error::Mismatch`] at once. A sender that has returned gets it
    /// from its first call that waits or begins after the comparison, which may be any call of the
    /// group.
    ///
    /// # Errors
    ///
    /// Same as [`batch_isend_irecv`](Self::batch_isend_irecv).
    pub fn send<T: Element>(&self, buf: &[T], to: Rank) -> Result<()> {
        self.batch_isend_irecv(vec![Message::send(buf, to)])
    }

    /// Receives into `buf` the message that rank `from` [`send`](Self::send)s, of the same length
    /// and type. Only these two take part. Blocks until it has arrived. If it does not match, this
    /// rank, the sender and all others get [`Error::Mismatch`] with both calls.
    ///
    /// # Errors
    ///
    /// Same as [`batch_isend_irecv`](Self::batch_isend_irecv).
    pub fn recv<T: Element>(&self, buf: &mut [T], from: Rank) -> Result<()> {
        self.batch_isend_irecv(vec![Message::recv(buf, from)])
    }

    /// Sends and receives several messages concurrently, so that their order cannot cause a
    /// deadlock. Blocks until all are done.
    ///
    /// Only the ranks named take part. Between two ranks, the messages of one direction match in
    /// the order in which they are given, across all calls.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] for a message to this rank itself or to a rank outside the group.
    /// [`Error::Mismatch`] if type or count of a message differ from those that its receiver
    /// expects, whose buffer for it is unchanged, or if the other end calls a collective instead:
    /// on every rank, in the call in which it waits or its next one, see [`send`](Self::send). Else
    /// as [`all_reduce`](Self::all_reduce).
    pub fn batch_isend_irecv(&self, messages: Vec<Message<'_>>) -> Result<()> {
        self.verbs()?.batch(messages)
    }

    /// Reduces many small buffers in one operation: concatenates them,
    /// [`all_reduce`](Self::all_reduce)s the result, and copies back. The result has the same bits
    /// as separate calls.
    ///
    /// Every rank must call it with buffers of the same total length.
    ///
    /// # Errors
    ///
    /// Same as [`all_reduce`](Self::all_reduce).
    pub fn all_reduce_coalesced<T: Element>(
        &self,
        bufs: &mut [&mut [T]],
        op: ReduceOp,
    ) -> Result<()> {
        let mut all = bufs.concat();
        self.all_reduce(&mut all, op)?;
        split_back(&all, bufs);
        Ok(())
    }

    /// Broadcasts many small buffers in one operation, see
    /// [`all_reduce_coalesced`](Self::all_reduce_coalesced).
    ///
    /// # Errors
    ///
    /// Same as [`broadcast`](Self::broadcast).
    pub fn broadcast_coalesced<T: Element>(&self, bufs: &mut [&mut [T]], root: Rank) -> Result<()> {
        let mut all = bufs.concat();
        self.broadcast(&mut all, root)?;
        split_back(&all, bufs);
        Ok(())
    }

    /// Gathers many small buffers in one operation, see
    /// [`all_reduce_coalesced`](Self::all_reduce_coalesced): each output is the
    /// [`all_gather`](Self::all_gather) of its input.
    ///
    /// Every rank must call it with inputs of the same lengths; the total is compared.
    ///
    /// # Errors
    ///
    /// Same as [`all_gather`](Self::all_gather).
    pub fn all_gather_coalesced<T: Element>(
        &self,
        outputs: &mut [&mut [T]],
        inputs: &[&[T]],
    ) -> Result<()> {
        check_len("list of outputs", outputs.len(), inputs.len())?;
        for (output, input) in outputs.iter().zip(inputs) {
            check_len("output", output.len(), input.len().saturating_mul(self.world_size()))?;
        }
        let own = inputs.concat();
        let mut all = vec![T::default(); own.len() * self.world_size()];
        self.all_gather(&mut all, &own)?;
        let mut rest = &all[..];
        for rank in 0..self.world_size() {
            for (output, input) in outputs.iter_mut().zip(inputs) {
                let block;
                (block, rest) = rest.split_at(input.len());
                copy_slice(&mut output[rank * input.len()..][..input.len()], block);
            }
        }
        Ok(())
    }

    /// Reduces many small buffers in one operation, see
    /// [`all_reduce_coalesced`](Self::all_reduce_coalesced): each output is the
    /// [`reduce_scatter`](Self::reduce_scatter) of its input.
    ///
    /// Every rank must call it with outputs of the same lengths; the total is compared.
    ///
    /// # Errors
    ///
    /// Same as [`reduce_scatter`](Self::reduce_scatter).
    pub fn reduce_scatter_coalesced<T: Element>(
        &self,
        outputs: &mut [&mut [T]],
        inputs: &[&[T]],
        op: ReduceOp,
    ) -> Result<()> {
        check_len("list of outputs", outputs.len(), inputs.len())?;
        let mut all = Vec::with_capacity(inputs.iter().map(|input| input.len()).sum());
        for rank in 0..self.world_size() {
            for (output, input) in outputs.iter().zip(inputs) {
                let len = output.len();
                check_len("input", input.len(), len.saturating_mul(self.world_size()))?;
                all.extend_from_slice(&input[rank * len..][..len]);
            }
        }
        let mut own = vec![T::default(); all.len() / self.world_size()];
        self.reduce_scatter(&mut own, &all, op)?;
        split_back(&own, outputs);
        Ok(())
    }

    /// Blocks until every rank has called it. One step, no data.
    ///
    /// # Errors
    ///
    /// Same as [`all_reduce`](Self::all_reduce).
    pub fn barrier(&self) -> Result<()> {
        self.verbs()?.barrier()
    }

    /// A [`barrier`](Self::barrier) with its own [timeout](Self::with_timeout).
    ///
    /// # Errors
    ///
    /// [`Error::Timeout`] with the missing ranks, on every rank that called it; else as
    /// [`barrier`](Self::barrier).
    pub fn monitored_barrier(&self, timeout: Duration) -> Result<()> {
        self.with_timeout(timeout).barrier()
    }

    /// Allocates a buffer of `count` zeros in memory shared with the peers of this machine, which
    /// [`all_reduce`](Self::all_reduce) reduces in place. This saves the copies in and out: most of
    /// the time for buffers of 64 KiB and more on one machine, nothing for those up to 8 KiB. In a
    /// group over several machines it saves the copies between the ranks of each, if these are
    /// neighbours. With [`Transport::Tcp`](crate::Transport::Tcp) and other backends it is ordinary
    /// memory.
    ///
    /// Every rank must call it with the same count and type. Blocks. The memory is freed on each
    /// rank when its buffer is dropped, independently of the peers.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] or [`Error::Aborted`] if a rank has not enough memory; else as
    /// [`all_reduce`](Self::all_reduce).
    #[doc(alias = "ncclMemAlloc")]
    pub fn alloc<T: Element>(&self, count: usize) -> Result<SharedBuf<T>> {
        self.backend.ready()?;
        check_bytes(T::DTYPE, count, 1)?;
        self.queue.drain();
        let op = describe(Verb::Alloc, T::DTYPE, None, None, count);
        let alloc = || self.backend.alloc(T::DTYPE, count);
        let raw = self.recorder.record(&op, &[], WaitPolicy::Spin, alloc)?;
        SharedBuf::new(raw, count, self.backend.name())
    }

    /// Aborts the group on all ranks: every waiting or later call returns [`Error::Aborted`] with
    /// this rank and reason. A rank that fails outside of a collective should call it, so that its
    /// peers do not wait until the timeout. Does not block; any rank may call it at any time, from
    /// any thread. Peers get the first 320 bytes of the reason. Has no effect after another failure
    /// of the group.
    pub fn abort(&self, reason: &str) {
        self.backend.abort(reason);
    }

    /// Returns this rank's last calls and how far each got. Callable from any thread; does not
    /// block.
    pub fn flight_record(&self) -> FlightRecord {
        self.recorder.read()
    }

    /// Begins a list of operations on memory of the group's device.
    ///
    /// Needs a backend with a device, such as [`Transport::Nccl`](crate::Transport::Nccl).
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] if the backend moves host memory only; [`Error::Poisoned`].
    pub fn device(&self) -> Result<DeviceCalls<'_>> {
        let Some(device) = self.backend.device() else {
            let what = "device memory".into();
            return Err(Error::Unsupported { backend: self.backend.name(), what });
        };
        device.ready()?;
        Ok(DeviceCalls::new(device, &self.recorder, &self.queue, self.timeout))
    }

    /// Returns the verbs for a blocking call, after all queued operations are complete.
    pub(crate) fn verbs(&self) -> Result<Verbs<'_>> {
        self.backend.ready()?;
        self.queue.drain();
        let wait = Wait { policy: WaitPolicy::Spin, timeout: self.timeout };
        Ok(Verbs::new(&*self.backend, &self.recorder, wait).with_tag(self.tag.as_deref()))
    }

    /// Queues `run` on `bufs`, after a dry run that detects invalid arguments.
    pub(crate) fn submit<B: Send + 'static>(
        &self,
        mut bufs: B,
        run: impl Fn(Verbs<'_>, &mut B) -> Result<()> + Send + 'static,
    ) -> Result<Work<B>> {
        self.backend.ready()?;
        Verbs::dry_run(&*self.backend, |verbs| run(verbs, &mut bufs))?;
        let (recorder, tag) = (Arc::clone(&self.recorder), self.tag.clone());
        let wait = Wait { policy: WaitPolicy::Sleep, timeout: self.timeout };
        self.queue.submit(bufs, move |backend, bufs| {
            let result = run(Verbs::new(backend, &recorder, wait).with_tag(tag.as_deref()), bufs);
            if let Err(error @ Error::InvalidArgument(_)) = &result {
                // A buffer changed its length in flight; the abort ends the peers' waits.
                backend.abort(&error.to_string());
            }
            result
        })
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

fn split_back<T: Element>(mut all: &[T], bufs: &mut [&mut [T]]) {
    for buf in bufs {
        let own;
        (own, all) = all.split_at(buf.len());
        copy_slice(buf, own);
    }
}
