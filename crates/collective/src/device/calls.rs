//! Verbs on device memory: checks buffers and translates each call to [`DeviceStep`]s.
//!
//! The counterpart of [`verbs`](crate::group::verbs) for memory that the host cannot access. The
//! checks are the same, those of [`blocks`](crate::op::blocks), and that no memory overlaps. Verbs
//! that no library has are translated to point-to-point messages, including one from this rank to
//! itself.

#![expect(unsafe_code, reason = "passes checked buffers to backends")]

use std::sync::Arc;
use std::time::Duration;

use tracing::Span;

use super::{
    DeviceBackend, DeviceBatch, DeviceBuf, DeviceMemory, DeviceStep, DeviceStream, DeviceWork,
    KeepAlive, Registration,
};
use crate::flight::Recorder;
use crate::op::blocks::{BATCH, Blocks, check_bytes, check_peer, check_run, describe};
use crate::work::Queue;
use crate::{DType, Error, OpDesc, Rank, ReduceOp, Result, Verb};

/// A list of operations on device memory that start together. Each call adds one;
/// [`enqueue`](Self::enqueue) enqueues the list in a stream.
///
/// Each call is checked at once, as far as that needs no peer; an error enqueues nothing and leaves
/// the group usable. All ranks must make the same lists in the same order, except lists of
/// point-to-point messages only, in which only the named ranks take part. The calls of one list are
/// not ordered: their memory must not overlap, unless it is only read.
///
/// A list is one launch, for any number of tensors.
///
/// Arguments and results are those of the verb of the same name of
/// [`ProcessGroup`](crate::ProcessGroup); `reduce` to another root leaves the buffer unchanged. The
/// library determines the summation order and the rounding of floats. The results are the same on
/// all ranks. [`Determinism`](crate::Determinism) applies to host memory only.
///
/// # Errors
///
/// All verbs: [`Error::InvalidArgument`] for invalid lengths, types, roots or peers, and for an
/// input that overlaps the output other than in place. [`Error::Unsupported`] for an operator that
/// the library does not have.
#[derive(Debug)]
#[must_use = "nothing happens before it is enqueued"]
pub struct DeviceCalls<'a> {
    backend: &'a dyn DeviceBackend,
    recorder: &'a Arc<Recorder>,
    queue: &'a Queue,
    ops: Vec<OpDesc>,
    steps: Vec<DeviceStep>,
    timeout: Option<Duration>,
}

impl<'a> DeviceCalls<'a> {
    pub(crate) fn new(
        backend: &'a dyn DeviceBackend,
        recorder: &'a Arc<Recorder>,
        queue: &'a Queue,
        timeout: Option<Duration>,
    ) -> Self {
        Self { backend, recorder, queue, ops: Vec::new(), steps: Vec::new(), timeout }
    }

    /// Returns the device's name, for example `cuda:3`.
    pub fn device_name(&self) -> String {
        self.backend.device_name()
    }

    /// Sets the timeout of the operations, from when the stream has reached them; by default the
    /// group's timeout.
    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// Registers memory with the library until the result is dropped, so that the library need not
    /// copy it.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] if the library is too old; [`Error::Backend`].
    ///
    /// # Safety
    ///
    /// The memory is as [`DeviceBuf::from_raw`] says until the result is dropped.
    pub unsafe fn register(&self, buf: DeviceBuf) -> Result<Registration> {
        // SAFETY: the caller's promise.
        unsafe { self.backend.register(buf) }.map(|kept| Registration(KeepAlive(kept)))
    }

    /// Allocates memory with the library's allocator.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] if the size exceeds the address space; [`Error::Unsupported`] if
    /// the library is too old; [`Error::Backend`].
    #[doc(alias = "ncclMemAlloc")]
    pub fn alloc(&self, dtype: DType, count: usize) -> Result<DeviceMemory> {
        check_bytes(dtype, count, 1)?;
        let (address, kept) = self.backend.alloc_device(count * dtype.size())?;
        // SAFETY: the library has just allocated it, and only `DeviceMemory::as_buf`, which is
        // unsafe, hands it out.
        let buf = unsafe { DeviceBuf::from_raw(address, count, dtype) }?;
        Ok(DeviceMemory { buf, _kept: KeepAlive(kept) })
    }
}

/// The verbs.
#[expect(clippy::missing_errors_doc, reason = "with the type, for all verbs")]
impl DeviceCalls<'_> {
    /// Adds [`ProcessGroup::all_reduce`](crate::ProcessGroup::all_reduce).
    pub fn all_reduce(self, buf: DeviceBuf, op: ReduceOp) -> Result<Self> {
        let op = describe(Verb::AllReduce, buf.dtype(), Some(op), None, buf.count());
        self.run(op, buf, buf)
    }

    /// Adds [`ProcessGroup::reduce`](crate::ProcessGroup::reduce).
    pub fn reduce(self, buf: DeviceBuf, op: ReduceOp, root: Rank) -> Result<Self> {
        let op = describe(Verb::Reduce, buf.dtype(), Some(op), Some(root), buf.count());
        self.run(op, buf, buf)
    }

    /// Adds [`ProcessGroup::broadcast`](crate::ProcessGroup::broadcast).
    pub fn broadcast(self, buf: DeviceBuf, root: Rank) -> Result<Self> {
        let op = describe(Verb::Broadcast, buf.dtype(), None, Some(root), buf.count());
        self.run(op, buf, buf)
    }

    /// Adds [`ProcessGroup::all_gather`](crate::ProcessGroup::all_gather); in place if the input is
    /// this rank's block of the output.
    pub fn all_gather(self, output: DeviceBuf, input: DeviceBuf) -> Result<Self> {
        let op = describe(Verb::AllGather, input.dtype(), None, None, input.count());
        self.run(op, output, input)
    }

    /// Adds [`ProcessGroup::reduce_scatter`](crate::ProcessGroup::reduce_scatter); in place if the
    /// output is this rank's block of the input.
    pub fn reduce_scatter(self, output: DeviceBuf, input: DeviceBuf, op: ReduceOp) -> Result<Self> {
        let op = describe(Verb::ReduceScatter, input.dtype(), Some(op), None, output.count());
        self.run(op, output, input)
    }

    /// Adds [`ProcessGroup::gather`](crate::ProcessGroup::gather); the output is used on the root
    /// only.
    pub fn gather(self, output: Option<DeviceBuf>, input: DeviceBuf, root: Rank) -> Result<Self> {
        self.rooted((Verb::Gather, root), output, input, None)
    }

    /// Adds [`ProcessGroup::gather_v`](crate::ProcessGroup::gather_v).
    pub fn gather_v(
        self,
        output: Option<DeviceBuf>,
        input: DeviceBuf,
        counts: &[usize],
        root: Rank,
    ) -> Result<Self> {
        self.rooted((Verb::GatherV, root), output, input, Some(counts))
    }

    /// Adds [`ProcessGroup::scatter`](crate::ProcessGroup::scatter); the input is used on the root
    /// only.
    pub fn scatter(self, output: DeviceBuf, input: Option<DeviceBuf>, root: Rank) -> Result<Self> {
        self.rooted((Verb::Scatter, root), input, output, None)
    }

    /// Adds [`ProcessGroup::scatter_v`](crate::ProcessGroup::scatter_v).
    pub fn scatter_v(
        self,
        output: DeviceBuf,
        input: Option<DeviceBuf>,
        counts: &[usize],
        root: Rank,
    ) -> Result<Self> {
        self.rooted((Verb::ScatterV, root), input, output, Some(counts))
    }

    /// Adds [`ProcessGroup::all_to_all`](crate::ProcessGroup::all_to_all).
    pub fn all_to_all(self, output: DeviceBuf, input: DeviceBuf) -> Result<Self> {
        let count = input.count() / self.world();
        let counts = vec![count; self.world()];
        let op = describe(Verb::AllToAll, input.dtype(), None, None, count);
        self.exchange(op, (output, &counts), (input, &counts))
    }

    /// Adds [`ProcessGroup::all_to_all_v`](crate::ProcessGroup::all_to_all_v).
    pub fn all_to_all_v(
        self,
        output: DeviceBuf,
        output_counts: &[usize],
        input: DeviceBuf,
        input_counts: &[usize],
    ) -> Result<Self> {
        let op = describe(Verb::AllToAllV, input.dtype(), None, None, 0);
        self.exchange(op, (output, output_counts), (input, input_counts))
    }

    /// Adds [`ProcessGroup::all_gather_v`](crate::ProcessGroup::all_gather_v).
    pub fn all_gather_v(
        self,
        output: DeviceBuf,
        input: DeviceBuf,
        counts: &[usize],
    ) -> Result<Self> {
        let op = describe(Verb::AllGatherV, input.dtype(), None, None, 0);
        self.exchange(op, (output, counts), (input, counts))
    }

    /// Adds [`ProcessGroup::reduce_scatter_v`](crate::ProcessGroup::reduce_scatter_v), as one
    /// `reduce` per rank.
    pub fn reduce_scatter_v(
        mut self,
        output: DeviceBuf,
        input: DeviceBuf,
        counts: &[usize],
        op: ReduceOp,
    ) -> Result<Self> {
        let rank = self.rank();
        let desc = describe(Verb::ReduceScatterV, input.dtype(), Some(op), None, 0);
        let blocks = self.blocks(&desc, (output, counts), (input, counts))?;
        apart_or(input, output, Some(input.part(blocks.sends[rank].1.clone())?))?;
        self.push(desc)?;
        for (root, range) in blocks.sends {
            let block = input.part(range)?;
            let op = describe(Verb::Reduce, input.dtype(), Some(op), Some(root), block.count());
            let op = self.launched(op);
            let output = if root == rank { output.address() } else { block.address() };
            self.steps.push(DeviceStep::Run { op, input: block.address(), output });
        }
        Ok(self)
    }

    /// Adds a message to rank `to`, which must receive it.
    pub fn send(self, buf: DeviceBuf, to: Rank) -> Result<Self> {
        self.message(to, buf.dtype(), DeviceStep::Send { peer: to, buf })
    }

    /// Adds a message from rank `from`, which must send the same number of elements of the same
    /// type.
    pub fn recv(self, buf: DeviceBuf, from: Rank) -> Result<Self> {
        self.message(from, buf.dtype(), DeviceStep::Receive { peer: from, buf })
    }
}

impl DeviceCalls<'_> {
    /// Enqueues the list at the end of a stream. Does not wait for the operations, but may block
    /// until they are launched, if the library needs the peers for that (a first message between
    /// two ranks).
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] for an empty list, or buffers of its calls that overlap;
    /// [`Error::Poisoned`]; the group's failure, which poisons it; [`Error::Unsupported`] for a
    /// stream that is being captured.
    pub fn enqueue(self, stream: DeviceStream) -> Result<DeviceWork> {
        let Self { backend, recorder, queue, ops, steps, timeout } = self;
        let Some(first) = ops.first() else {
            return Err(Error::InvalidArgument("`enqueue` called on an empty list".into()));
        };
        check_overlap(&steps, backend.rank(), backend.world_size())?;
        backend.ready()?;
        if backend.compares() {
            // Asynchronous calls made before come first on the host, on every rank.
            queue.drain();
        }
        let seq = recorder.begin_device(first, ops.len());
        let keep = Arc::clone(recorder);
        // Open until the operations have ended.
        let spans = (recorder.span(first), Span::current());
        let ended = Box::new(move |result: &Result<()>| {
            keep.end(seq, result.as_ref().err());
            drop(spans);
        });
        let batch = DeviceBatch { ops: &ops, steps: &steps, stream, timeout, ended };
        // SAFETY: guaranteed when buffers and stream were made; lengths, peers and overlaps have
        // been checked here and by the verbs.
        let work = unsafe { backend.enqueue(batch) };
        work.inspect_err(|error| recorder.end(seq, Some(error)))
    }

    fn rank(&self) -> Rank {
        self.backend.rank()
    }

    fn world(&self) -> usize {
        self.backend.world_size()
    }

    /// Adds an operation that the backend supports.
    fn push(&mut self, op: OpDesc) -> Result<()> {
        op.check(self.world())?;
        self.backend.supports(&op)?;
        self.ops.push(op);
        Ok(())
    }

    fn run(mut self, op: OpDesc, output: DeviceBuf, input: DeviceBuf) -> Result<Self> {
        same_type(output, input)?;
        check_run(&op, self.world(), output.count(), input.count())?;
        let scatters = op.verb == Verb::ReduceScatter;
        let (whole, block) = if scatters { (input, output) } else { (output, input) };
        let start = if whole.count() == block.count() { 0 } else { self.rank() * block.count() };
        apart_or(whole, block, Some(whole.part(start..start + block.count())?))?;
        self.push(op)?;
        let op = self.launched(op);
        self.steps.push(DeviceStep::Run { op, input: input.address(), output: output.address() });
        Ok(self)
    }

    /// The operation to launch for `op`. NCCL runs a kernel for an average of one rank, and for a
    /// sum at most a copy.
    fn launched(&self, op: OpDesc) -> OpDesc {
        let alone = self.world() == 1 && op.op == Some(ReduceOp::Avg);
        OpDesc { op: if alone { Some(ReduceOp::Sum) } else { op.op }, ..op }
    }

    fn message(mut self, peer: Rank, dtype: DType, step: DeviceStep) -> Result<Self> {
        check_peer(peer, self.rank(), self.world())?;
        self.push(OpDesc { dtype, ..BATCH })?;
        self.steps.push(step);
        Ok(self)
    }

    /// Adds a gather to the root, or a scatter from it: `own` is this rank's block, `all` the
    /// root's buffer. Without `counts`, all blocks are as long as `own`.
    fn rooted(
        self,
        (verb, root): (Verb, Rank),
        all: Option<DeviceBuf>,
        own: DeviceBuf,
        counts: Option<&[usize]>,
    ) -> Result<Self> {
        let count = if counts.is_some() { 0 } else { own.count() };
        let op = describe(verb, own.dtype(), None, Some(root), count);
        let gathers = matches!(verb, Verb::Gather | Verb::GatherV);
        let all = match all {
            Some(all) if self.rank() == root => all,
            _ if self.rank() != root => own.part(0..0)?,
            _ => {
                let whole = if gathers { "output" } else { "input" };
                return Err(Error::InvalidArgument(format!("the root must pass an {whole}")));
            }
        };
        let equal = vec![own.count(); self.world()];
        let counts = counts.unwrap_or(&equal);
        let (output, input) = if gathers { (all, own) } else { (own, all) };
        self.exchange(op, (output, counts), (input, counts))
    }

    fn blocks(
        &self,
        op: &OpDesc,
        (output, to): (DeviceBuf, &[usize]),
        (input, from): (DeviceBuf, &[usize]),
    ) -> Result<Blocks> {
        same_type(output, input)?;
        Blocks::new(op, (self.rank(), self.world()), (output.count(), to), (input.count(), from))
    }

    /// Adds the messages of a verb. `output` and `input` are buffers and the lengths of their
    /// blocks by rank.
    fn exchange(
        mut self,
        op: OpDesc,
        output: (DeviceBuf, &[usize]),
        input: (DeviceBuf, &[usize]),
    ) -> Result<Self> {
        let blocks = self.blocks(&op, output, input)?;
        apart_or(output.0, input.0, None)?;
        self.push(op)?;
        for (peer, range) in blocks.sends {
            self.steps.push(DeviceStep::Send { peer, buf: input.0.part(range)? });
        }
        for (peer, range) in blocks.receives {
            self.steps.push(DeviceStep::Receive { peer, buf: output.0.part(range)? });
        }
        Ok(self)
    }
}

fn same_type(output: DeviceBuf, input: DeviceBuf) -> Result<()> {
    if output.dtype() == input.dtype() {
        return Ok(());
    }
    let (from, to) = (input.dtype(), output.dtype());
    Err(Error::InvalidArgument(format!("the input has type {from}, the output {to}")))
}

/// Checks that `buf` does not overlap `whole`, except as the block of an in-place operation,
/// `place`.
fn apart_or(whole: DeviceBuf, buf: DeviceBuf, place: Option<DeviceBuf>) -> Result<()> {
    if !buf.overlaps(&whole) || place == Some(buf) {
        return Ok(());
    }
    Err(Error::InvalidArgument("input and output overlap other than in place".into()))
}

/// Checks that no step uses memory that another step writes.
fn check_overlap(steps: &[DeviceStep], rank: Rank, world: usize) -> Result<()> {
    let mut ranges: Vec<(u64, u64, bool)> = Vec::with_capacity(2 * steps.len());
    let mut add = |address: u64, bytes: usize, written| {
        if bytes > 0 {
            ranges.push((address, address + bytes as u64, written));
        }
    };
    for step in steps {
        match *step {
            DeviceStep::Send { buf, .. } => add(buf.address(), buf.bytes(), false),
            DeviceStep::Receive { buf, .. } => add(buf.address(), buf.bytes(), true),
            DeviceStep::Run { op, input, output } => {
                let size = op.dtype.size();
                let read = op.input_count(world) * size;
                let written = op.output_count(world) * size;
                let is_root = op.root == Some(rank);
                let keeps =
                    matches!((op.verb, is_root), (Verb::Reduce, false) | (Verb::Broadcast, true));
                let inside = |at: u64, len: usize, of: u64, whole: usize| {
                    at >= of && at + len as u64 <= of + whole as u64
                };
                // In place, the larger buffer includes the smaller one.
                if keeps || inside(output, written, input, read) {
                    add(input, read, !keeps);
                } else {
                    add(output, written, true);
                    if !inside(input, read, output, written) {
                        add(input, read, false);
                    }
                }
            }
        }
    }
    ranges.sort_unstable();
    let (mut end_of_any, mut end_of_written) = (0, 0);
    for (start, end, written) in ranges {
        if start < if written { end_of_any } else { end_of_written } {
            return Err(Error::InvalidArgument(format!(
                "memory at {start:#x} is written by one call and used by another of the same list"
            )));
        }
        end_of_any = end_of_any.max(end);
        if written {
            end_of_written = end_of_written.max(end);
        }
    }
    Ok(())
}
