//! The group: what a rank holds and calls, typed.
//!
//! Every length, root and operator is checked in [`verbs`](crate::verbs), before anything is sent,
//! so a caller's mistake is an error on the rank that made it and leaves the group usable. Behind
//! that there are only [`OpDesc`] and raw memory.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::backend::{Backend, Patience, Wait, host};
use crate::copy::copy_slice;
use crate::device::DeviceCalls;
use crate::flight::{FlightRecord, Recorder, Whose};
use crate::membership::{Membership, Origin, connect};
#[cfg(feature = "sim")]
use crate::sim::{self, Clocks, Network};
use crate::store::{MemoryStore, Store};
use crate::verbs::{Message, Verbs, check_bytes, check_len};
use crate::work::{Queue, Work};
use crate::{Element, Error, GroupOptions, OpDesc, Rank, ReduceOp, Result, SharedBuf, Verb};

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
/// return [`Error::Poisoned`]; [`rebuild`](Self::rebuild) makes a new one of those that are left.
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
    pub(crate) queue: Arc<Queue>,
    pub(crate) backend: Arc<dyn Backend>,
    recorder: Arc<Recorder>,
    pub(crate) membership: Arc<Membership>,
    /// For the calls made with this value, if not the group's.
    timeout: Option<Duration>,
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
        let origin = Origin { store: Arc::new(MemoryStore::new()), connect: Arc::new(connect) };
        let group = |host| {
            let membership = Membership::first(world_size, options.clone(), Some(origin.clone()));
            Self::new(Arc::new(host), membership)
        };
        Ok(hosts.into_iter().map(group).collect())
    }

    /// A group whose ranks are threads of this process, on a [`network`](crate::sim::Network) that
    /// is simulated: the data are real and the bits those of every other backend, the time is
    /// virtual and told by the clocks. Does not wait.
    ///
    /// Rank `r` is element `r` of the result, to be moved to the thread that plays it. The groups
    /// cannot be [`split`](Self::split) or [rebuilt](Self::rebuild).
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] if the network does not fit the ranks, and for more than 256 of them.
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

    /// A group whose ranks are processes: of one machine, over shared memory, or of several, over
    /// TCP or libgloo, with NCCL beside for the memory of devices; see
    /// [`Transport`](crate::Transport).
    ///
    /// Every rank must call it, with the same `world_size`, name, transport and determinism, each
    /// with its own `rank`. Blocks until all have. Nothing is left behind on a machine, however the
    /// processes end.
    ///
    /// # Errors
    ///
    /// [`Error::Timeout`] naming the ranks that did not come; [`Error::Rendezvous`] naming rank,
    /// address and port if one cannot be connected to; [`Error::Unsupported`] if shared memory was
    /// asked for and the ranks are on several machines (or in several pid namespaces);
    /// [`Error::PeerDied`]; the store's errors; [`Error::InvalidArgument`] for a rank or size out of
    /// range. [`Error::Mismatch`] on every rank, with the value of rank 0 and that of the first rank
    /// that differs, if world size, transport, determinism or the version of this crate differ.
    pub fn from_store(
        store: Arc<dyn Store>,
        rank: Rank,
        world_size: usize,
        options: GroupOptions,
    ) -> Result<Self> {
        Self::from_store_with(store, rank, world_size, options, Arc::new(connect))
    }

    /// A group over a backend that is connected already. It cannot be [`split`](Self::split) or
    /// [rebuilt](Self::rebuild): nobody knows how to make another.
    pub fn from_backend(backend: Arc<dyn Backend>) -> Self {
        Self::from_backend_with(backend, &GroupOptions::default())
    }

    /// A group over a backend that is connected already, with the name and the directory for its
    /// flight record of `options`; the rest is the backend's.
    pub fn from_backend_with(backend: Arc<dyn Backend>, options: &GroupOptions) -> Self {
        let membership = Membership::first(backend.world_size(), options.clone(), None);
        Self::new(backend, membership)
    }

    pub(crate) fn new(backend: Arc<dyn Backend>, membership: Membership) -> Self {
        let queue = Arc::new(Queue::new(Arc::clone(&backend)));
        let recorder = Arc::new(Recorder::new(&membership.options));
        Self { queue, backend, recorder, membership: Arc::new(membership), timeout: None }
    }

    /// This membership with another timeout for the calls that are made with the value returned, for
    /// example `group.with_timeout(limit).all_gather(&mut output, &input)`. The group stays as it is.
    ///
    /// As cheap as a clone. This rank waits for `timeout`, shorter or longer than
    /// [`GroupOptions::timeout`], for each next step of a peer; the other ranks wait as long as they
    /// asked for themselves. A call that is late fails as one that exceeds the group's timeout does,
    /// and the group is unusable on all ranks. It holds for the verbs, blocking and asynchronous, for
    /// [`object`](crate::object)s and for [`device`](Self::device); but
    /// [`alloc`](Self::alloc), [`rebuild`](Self::rebuild) and the joining of a
    /// [`split`](Self::split) have the group's timeout.
    pub fn with_timeout(&self, timeout: Duration) -> Self {
        Self { timeout: Some(timeout), ..self.clone() }
    }

    /// This rank, `0..world_size`.
    pub fn rank(&self) -> Rank {
        self.backend.rank()
    }

    /// Number of ranks.
    pub fn world_size(&self) -> usize {
        self.backend.world_size()
    }

    /// Sends `buf` to rank `to`, which must [`recv`](Self::recv) it. Only these two take part.
    ///
    /// Blocks until the message is on its way: one that fits in the channel to the receiver (up to 64
    /// KiB in shared memory, the sockets' buffers over TCP) may be before it is received, a longer one is
    /// not. Over gloo none is. Messages between two ranks arrive in the order in which they were sent.
    ///
    /// The receiver compares type and count before it takes a byte. If they do not fit, a sender that
    /// still waits gets [`Error::Mismatch`] at once. One that has returned gets it from its first call
    /// that waits or begins after the comparison, which may be any call of the group.
    ///
    /// # Errors
    ///
    /// As [`batch_isend_irecv`](Self::batch_isend_irecv).
    pub fn send<T: Element>(&self, buf: &[T], to: Rank) -> Result<()> {
        self.batch_isend_irecv(vec![Message::send(buf, to)])
    }

    /// Receives into `buf` what rank `from` [`send`](Self::send)s: as many elements, of the same
    /// type. Only these two take part. Blocks until it is there. If it does not fit, this rank, the
    /// sender and all others get [`Error::Mismatch`] with what both have called.
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
    /// [`Error::Mismatch`] if type or count of a message are not what its receiver expects, whose
    /// buffer for it is unchanged, or if the other end calls a collective instead: on every rank, in
    /// the call in which it waits or its next one, see [`send`](Self::send). Else as
    /// [`all_reduce`](Self::all_reduce).
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
        let mut all = bufs.concat();
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
        let mut all = bufs.concat();
        self.broadcast(&mut all, root)?;
        split_back(&all, bufs);
        Ok(())
    }

    /// Gathers many small buffers as one, see [`all_reduce_coalesced`](Self::all_reduce_coalesced):
    /// each output gets what [`all_gather`](Self::all_gather) of its input gives.
    ///
    /// Every rank must call it with inputs of the same lengths; the total is compared.
    ///
    /// # Errors
    ///
    /// As [`all_gather`](Self::all_gather).
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

    /// Reduces many small buffers as one, see [`all_reduce_coalesced`](Self::all_reduce_coalesced):
    /// each output gets what [`reduce_scatter`](Self::reduce_scatter) of its input gives.
    ///
    /// Every rank must call it with outputs of the same lengths; the total is compared.
    ///
    /// # Errors
    ///
    /// As [`reduce_scatter`](Self::reduce_scatter).
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

    /// Returns when every rank has called it. One step, no data.
    ///
    /// # Errors
    ///
    /// As [`all_reduce`](Self::all_reduce).
    pub fn barrier(&self) -> Result<()> {
        self.verbs()?.barrier()
    }

    /// A [`barrier`](Self::barrier) [with a timeout](Self::with_timeout) of its own.
    ///
    /// # Errors
    ///
    /// [`Error::Timeout`] with the missing ranks, on every rank that came; else as
    /// [`barrier`](Self::barrier).
    pub fn monitored_barrier(&self, timeout: Duration) -> Result<()> {
        self.with_timeout(timeout).barrier()
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
        let op = OpDesc { verb: Verb::Alloc, dtype: T::DTYPE, op: None, root: None, count };
        let backend = &*self.backend;
        let alloc = || backend.alloc(T::DTYPE, count);
        let raw = self.recorder.record(backend, &op, &[], Patience::Caller, alloc)?;
        SharedBuf::new(raw, count)
    }

    /// Gives the group up on all ranks: whoever waits, or calls later, gets [`Error::Aborted`] with
    /// this rank and reason. For the rank that fails outside of a collective, so that its peers need
    /// not time out. Does not block; any rank may call it at any time, from any thread.
    /// Peers get the first 320 bytes of the reason. The first failure of a group is the one that
    /// counts: after another this does nothing.
    pub fn abort(&self, reason: &str) {
        self.backend.abort(reason);
    }

    /// What this rank called last, and how far each call got; from any thread, without waiting.
    pub fn flight_record(&self) -> FlightRecord {
        self.recorder.read(Whose::of(&*self.backend))
    }

    /// Begins a list of operations on memory of the group's device.
    ///
    /// The group is over a backend that has one, such as [`Transport::Nccl`](crate::Transport::Nccl).
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] if the backend moves memory of the host only; [`Error::Poisoned`].
    pub fn device(&self) -> Result<DeviceCalls<'_>> {
        let Some(device) = self.backend.device() else {
            let what = "memory of a device".into();
            return Err(Error::Unsupported { backend: self.backend.name(), what });
        };
        device.ready()?;
        if device.compares() {
            self.queue.drain();
        }
        Ok(DeviceCalls::new(device, &self.recorder, self.timeout))
    }

    /// What the blocking calls run on, once it is their turn.
    pub(crate) fn verbs(&self) -> Result<Verbs<'_>> {
        self.backend.ready()?;
        self.queue.drain();
        let wait = Wait { patience: Patience::Caller, timeout: self.timeout };
        Ok(Verbs::new(&*self.backend, &self.recorder, wait))
    }

    /// Queues `run` on `bufs`, after a rehearsal that finds the caller's mistakes.
    pub(crate) fn submit<B: Send + 'static>(
        &self,
        mut bufs: B,
        run: impl Fn(Verbs<'_>, &mut B) -> Result<()> + Send + 'static,
    ) -> Result<Work<B>> {
        self.backend.ready()?;
        Verbs::rehearse(&*self.backend, |verbs| run(verbs, &mut bufs))?;
        let recorder = Arc::clone(&self.recorder);
        let wait = Wait { patience: Patience::Background, timeout: self.timeout };
        self.queue.submit(bufs, move |backend, bufs| {
            let result = run(Verbs::new(backend, &recorder, wait), bufs);
            if let Err(error @ Error::InvalidArgument(_)) = &result {
                // A buffer has changed its length in flight, and the peers need not wait for it.
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
