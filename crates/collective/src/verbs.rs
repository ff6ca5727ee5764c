//! Every verb as one function from checked slices to an [`OpDesc`] and raw memory.
//!
//! [`ProcessGroup`](crate::ProcessGroup)'s blocking calls run these on the caller's thread, its
//! asynchronous ones on the communication thread; nothing else calls a backend. Every check that
//! needs no peer is made before anything is sent. `all_reduce`, `reduce`, `broadcast`,
//! `all_gather`, `reduce_scatter` and `barrier` are implemented by the backend. Verbs that only
//! send blocks between ranks are cut into [`Transfer`]s here, for all backends.

#![expect(unsafe_code, reason = "passes checked slices to backends as raw memory")]

use std::marker::PhantomData;

use crate::backend::{Backend, RawBufs, Transfer, TransferMemory, Wait, WaitPolicy};
use crate::copy::copy_slice;
use crate::flight::Recorder;
use crate::op::{BufferLocation, Fingerprint};
use crate::{DType, Element, Error, OpDesc, Rank, ReduceOp, Result, Verb};

/// One message of [`batch_isend_irecv`](crate::ProcessGroup::batch_isend_irecv).
#[derive(Debug)]
#[doc(alias = "P2POp")]
pub struct Message<'a> {
    transfer: Transfer,
    memory: PhantomData<&'a mut [u8]>,
}

impl<'a> Message<'a> {
    /// Sends `buf` to rank `to`.
    pub fn send<T: Element>(buf: &'a [T], to: Rank) -> Self {
        Self::new::<T>(to, buf.len(), TransferMemory::Send(buf.as_ptr().cast()))
    }

    /// Receives into `buf` the message that rank `from` sends, of the same length and type.
    pub fn recv<T: Element>(buf: &'a mut [T], from: Rank) -> Self {
        Self::new::<T>(from, buf.len(), TransferMemory::Receive(buf.as_mut_ptr().cast()))
    }

    fn new<T: Element>(peer: Rank, count: usize, memory: TransferMemory) -> Self {
        Self { transfer: Transfer { peer, dtype: T::DTYPE, count, memory }, memory: PhantomData }
    }
}

/// A backend, with the wait policy and timeout of its calls.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Verbs<'a> {
    backend: &'a dyn Backend,
    wait: Wait,
    /// Records every step. `None` in a dry run, which ends at the first step.
    recorder: Option<&'a Recorder>,
}

impl<'a> Verbs<'a> {
    pub(crate) fn new(backend: &'a dyn Backend, recorder: &'a Recorder, wait: Wait) -> Self {
        Self { backend, wait, recorder: Some(recorder) }
    }

    /// Returns the error that `call` would find before anything is sent: runs it up to its first
    /// step, which is not executed. An asynchronous call is checked this way before it is queued,
    /// so its checks are those of the blocking call.
    pub(crate) fn dry_run(
        backend: &'a dyn Backend,
        call: impl FnOnce(Self) -> Result<()>,
    ) -> Result<()> {
        let wait = Wait { policy: WaitPolicy::Sleep, timeout: None };
        match call(Self { backend, wait, recorder: None }) {
            Err(error @ Error::InvalidArgument(_)) => Err(error),
            _ => Ok(()),
        }
    }

    fn rank(self) -> Rank {
        self.backend.rank()
    }

    fn world(self) -> usize {
        self.backend.world_size()
    }

    pub(crate) fn all_reduce<T: Element>(self, buf: &mut [T], op: ReduceOp) -> Result<()> {
        self.run_in_place(&describe(Verb::AllReduce, T::DTYPE, Some(op), None, buf.len()), buf)
    }

    pub(crate) fn reduce<T: Element>(self, buf: &mut [T], op: ReduceOp, root: Rank) -> Result<()> {
        self.run_in_place(&describe(Verb::Reduce, T::DTYPE, Some(op), Some(root), buf.len()), buf)
    }

    pub(crate) fn broadcast<T: Element>(self, buf: &mut [T], root: Rank) -> Result<()> {
        self.run_in_place(&describe(Verb::Broadcast, T::DTYPE, None, Some(root), buf.len()), buf)
    }

    pub(crate) fn all_gather<T: Element>(self, output: &mut [T], input: &[T]) -> Result<()> {
        self.run(&describe(Verb::AllGather, T::DTYPE, None, None, input.len()), output, input)
    }

    pub(crate) fn reduce_scatter<T: Element>(
        self,
        output: &mut [T],
        input: &[T],
        op: ReduceOp,
    ) -> Result<()> {
        self.run(
            &describe(Verb::ReduceScatter, T::DTYPE, Some(op), None, output.len()),
            output,
            input,
        )
    }

    pub(crate) fn barrier(self) -> Result<()> {
        self.run_in_place::<u8>(&describe(Verb::Barrier, DType::U8, None, None, 0), &mut [])
    }

    pub(crate) fn gather<T: Element>(self, out: &mut [T], input: &[T], root: Rank) -> Result<()> {
        let desc = describe(Verb::Gather, T::DTYPE, None, Some(root), input.len());
        let counts = vec![input.len(); self.world()];
        self.check_root_counts(&desc, "output", out.len(), &counts)?;
        self.gather_blocks(&desc, out, input, &counts, root)
    }

    pub(crate) fn scatter<T: Element>(self, out: &mut [T], input: &[T], root: Rank) -> Result<()> {
        let desc = describe(Verb::Scatter, T::DTYPE, None, Some(root), out.len());
        let counts = vec![out.len(); self.world()];
        self.check_root_counts(&desc, "input", input.len(), &counts)?;
        self.scatter_blocks(&desc, out, input, &counts, root)
    }

    pub(crate) fn all_to_all<T: Element>(self, output: &mut [T], input: &[T]) -> Result<()> {
        let count = input.len() / self.world();
        let desc = describe(Verb::AllToAll, T::DTYPE, None, None, count);
        let counts = vec![count; self.world()];
        self.check_counts("input", input.len(), &counts)?;
        check_len("output", output.len(), input.len())?;
        self.exchange_blocks(&desc, (output, &counts), (input, &counts))
    }

    pub(crate) fn all_gather_v<T: Element>(
        self,
        output: &mut [T],
        input: &[T],
        counts: &[usize],
    ) -> Result<()> {
        let (rank, world) = (self.rank(), self.world());
        self.check_counts("output", output.len(), counts)?;
        check_len("input", input.len(), counts[rank])?;
        let desc = describe(Verb::AllGatherV, T::DTYPE, None, None, 0);
        self.check_rows(&desc, counts, |rows| (1..world).all(|rank| rows[rank] == rows[0]))?;
        let mut messages: Vec<_> = self.peers().map(|peer| Message::send(input, peer)).collect();
        messages.extend(receives(rank, output, counts));
        self.exchange(&batch(), messages)?;
        copy_slice(&mut output[range(counts, rank)], input);
        Ok(())
    }

    pub(crate) fn gather_v<T: Element>(
        self,
        output: &mut [T],
        input: &[T],
        counts: &[usize],
        root: Rank,
    ) -> Result<()> {
        let desc = describe(Verb::GatherV, T::DTYPE, None, Some(root), 0);
        let is_root = self.check_root_counts(&desc, "output", output.len(), counts)?;
        if is_root {
            check_len("input", input.len(), counts[root])?;
        }
        self.check_rows(&desc, &self.root_row(is_root, input.len(), counts), fits_root(root))?;
        self.gather_blocks(&batch(), output, input, counts, root)
    }

    pub(crate) fn scatter_v<T: Element>(
        self,
        output: &mut [T],
        input: &[T],
        counts: &[usize],
        root: Rank,
    ) -> Result<()> {
        let desc = describe(Verb::ScatterV, T::DTYPE, None, Some(root), 0);
        let is_root = self.check_root_counts(&desc, "input", input.len(), counts)?;
        if is_root {
            check_len("output", output.len(), counts[root])?;
        }
        self.check_rows(&desc, &self.root_row(is_root, output.len(), counts), fits_root(root))?;
        self.scatter_blocks(&batch(), output, input, counts, root)
    }

    pub(crate) fn all_to_all_v<T: Element>(
        self,
        output: &mut [T],
        output_counts: &[usize],
        input: &[T],
        input_counts: &[usize],
    ) -> Result<()> {
        let (rank, world) = (self.rank(), self.world());
        self.check_counts("output", output.len(), output_counts)?;
        self.check_counts("input", input.len(), input_counts)?;
        if output_counts[rank] != input_counts[rank] {
            let (to, from) = (input_counts[rank], output_counts[rank]);
            let text = format!("this rank sends itself {to} elements but receives {from}");
            return Err(Error::InvalidArgument(text));
        }
        let desc = describe(Verb::AllToAllV, T::DTYPE, None, None, 0);
        let row = [output_counts, input_counts].concat();
        self.check_rows(&desc, &row, |rows| {
            let fits = |to: Rank, from: Rank| rows[to][from] == rows[from][world + to];
            (0..world).all(|to| (0..world).all(|from| fits(to, from)))
        })?;
        self.exchange_blocks(&batch(), (output, output_counts), (input, input_counts))
    }

    pub(crate) fn reduce_scatter_v<T: Element>(
        self,
        output: &mut [T],
        input: &[T],
        counts: &[usize],
        op: ReduceOp,
    ) -> Result<()> {
        let (rank, world) = (self.rank(), self.world());
        self.check_counts("input", input.len(), counts)?;
        check_len("output", output.len(), counts[rank])?;
        let desc = describe(Verb::ReduceScatterV, T::DTYPE, Some(op), None, 0);
        desc.check(world)?;
        self.check_rows(&desc, counts, |rows| (1..world).all(|rank| rows[rank] == rows[0]))?;
        let mut block = Vec::new();
        for (root, range) in (0..world).map(|root| (root, range(counts, root))) {
            block.clear();
            block.extend_from_slice(&input[range]);
            self.reduce(&mut block, op, root)?;
            if root == rank {
                copy_slice(output, &block);
            }
        }
        Ok(())
    }

    pub(crate) fn batch(self, messages: Vec<Message<'_>>) -> Result<()> {
        for message in &messages {
            check_peer(message.transfer.peer, self.rank(), self.world())?;
        }
        self.exchange(&batch(), messages)
    }

    fn run_in_place<T: Element>(self, desc: &OpDesc, buf: &mut [T]) -> Result<()> {
        desc.check(self.world())?;
        let output: *mut u8 = buf.as_mut_ptr().cast();
        let bufs = RawBufs { input: output.cast_const(), output };
        self.step(desc, &[], || {
            // SAFETY: the caller of this function gave `desc` the length of `buf`, which is
            // borrowed mutably for the call; `desc` has been checked.
            unsafe { self.backend.run(desc, bufs, self.wait) }
        })
    }

    fn run<T: Element>(self, desc: &OpDesc, output: &mut [T], input: &[T]) -> Result<()> {
        check_bytes::<T>(desc.count, self.world())?;
        check_len("output", output.len(), desc.output_count(self.world()))?;
        check_len("input", input.len(), desc.input_count(self.world()))?;
        desc.check(self.world())?;
        let bufs = RawBufs { input: input.as_ptr().cast(), output: output.as_mut_ptr().cast() };
        self.step(desc, &[], || {
            // SAFETY: the lengths and `desc` were checked above, and both slices are borrowed for
            // the call.
            unsafe { self.backend.run(desc, bufs, self.wait) }
        })
    }

    fn exchange(self, desc: &OpDesc, messages: Vec<Message<'_>>) -> Result<()> {
        let transfers: Vec<_> = messages.iter().map(|message| message.transfer).collect();
        self.step(desc, &transfers, || {
            // SAFETY: each message borrows its memory for longer than the call, mutably if it is
            // received into; the callers of this function have checked the peers.
            unsafe { self.backend.exchange(desc, &transfers, self.wait) }
        })
    }

    /// Calls the backend, through the recorder. All backend calls are made here.
    fn step(
        self,
        desc: &OpDesc,
        transfers: &[Transfer],
        run: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let Some(recorder) = self.recorder else {
            return Err(Error::Unsupported { backend: "dry run", what: desc.verb.to_string() });
        };
        recorder.record(desc, transfers, self.wait.policy, run)
    }

    /// Sends every rank's input to the root.
    fn gather_blocks<T: Element>(
        self,
        desc: &OpDesc,
        output: &mut [T],
        input: &[T],
        counts: &[usize],
        root: Rank,
    ) -> Result<()> {
        if self.rank() != root {
            return self.exchange(desc, vec![Message::send(input, root)]);
        }
        self.exchange(desc, receives(root, output, counts).collect())?;
        copy_slice(&mut output[range(counts, root)], input);
        Ok(())
    }

    /// Sends each rank its block of the root's input.
    fn scatter_blocks<T: Element>(
        self,
        desc: &OpDesc,
        output: &mut [T],
        input: &[T],
        counts: &[usize],
        root: Rank,
    ) -> Result<()> {
        if self.rank() != root {
            return self.exchange(desc, vec![Message::recv(output, root)]);
        }
        self.exchange(desc, sends(root, input, counts).collect())?;
        copy_slice(output, &input[range(counts, root)]);
        Ok(())
    }

    /// Sends every rank's blocks to every other rank.
    fn exchange_blocks<T: Element>(
        self,
        desc: &OpDesc,
        (output, to): (&mut [T], &[usize]),
        (input, from): (&[T], &[usize]),
    ) -> Result<()> {
        let rank = self.rank();
        let messages = sends(rank, input, from).chain(receives(rank, output, to)).collect();
        self.exchange(desc, messages)?;
        copy_slice(&mut output[range(to, rank)], &input[range(from, rank)]);
        Ok(())
    }

    /// All-gathers a row of lengths per rank and checks them with `fits`, before any data move. The
    /// result is the same on every rank.
    fn check_rows(
        self,
        desc: &OpDesc,
        row: &[usize],
        fits: impl FnOnce(&[&[u64]]) -> bool,
    ) -> Result<()> {
        let [what, .., factor] = desc.fingerprint(0, BufferLocation::Private).words();
        let own: Vec<u64> =
            [what, factor].into_iter().chain(row.iter().map(|&count| count as u64)).collect();
        let mut all = vec![0; own.len() * self.world()];
        let counts = describe(Verb::Counts, DType::U64, None, None, own.len());
        self.run(&counts, &mut all, &own)?;
        let rows: Vec<&[u64]> = all.chunks_exact(own.len()).collect();
        let print = |row: &[u64]| Fingerprint::from_words(0, [row[0], 0, 0, 0, row[1]]);
        let differs = rows.iter().find_map(|row| print(row).difference(&print(&own)));
        let lengths: Vec<&[u64]> = rows.iter().map(|row| &row[2..]).collect();
        if differs.is_none() && fits(&lengths) {
            return Ok(());
        }
        let called = |(rank, row): (Rank, &&[u64])| {
            (rank, format!("{}, counts {:?}", print(row), &row[2..]))
        };
        let by_rank = rows.iter().enumerate().map(called).collect();
        let field = differs.unwrap_or("count");
        let error = Error::Mismatch { op: desc.verb.to_string(), field, by_rank };
        if let Some(recorder) = self.recorder {
            recorder.failed(&error);
        }
        // Without the barrier, an abort could reach a rank that does not have all rows yet.
        drop(self.barrier());
        self.backend.abort(&error.to_string());
        Err(error)
    }

    /// Returns a rank's row for a verb of which only the root has the counts: the rank's own length,
    /// then the root's counts.
    fn root_row(self, is_root: bool, own: usize, counts: &[usize]) -> Vec<usize> {
        let mut row = vec![0; 1 + self.world()];
        row[0] = own;
        if is_root {
            row[1..].copy_from_slice(counts);
        }
        row
    }

    fn check_root_counts(
        self,
        desc: &OpDesc,
        what: &str,
        len: usize,
        counts: &[usize],
    ) -> Result<bool> {
        desc.check(self.world())?;
        let is_root = desc.root == Some(self.rank());
        if is_root {
            self.check_counts(what, len, counts)?;
        }
        Ok(is_root)
    }

    fn check_counts(self, what: &str, len: usize, counts: &[usize]) -> Result<()> {
        check_counts(what, len, counts, self.world())
    }

    fn peers(self) -> impl Iterator<Item = Rank> {
        let rank = self.rank();
        (0..self.world()).filter(move |&peer| peer != rank)
    }
}

/// Returns a check that every rank's own length equals the root's count for it.
fn fits_root(root: Rank) -> impl Fn(&[&[u64]]) -> bool {
    move |rows| rows.iter().zip(&rows[root][1..]).all(|(row, count)| row[0] == *count)
}

/// Returns the range of a rank's block; blocks are contiguous, in rank order.
fn range(counts: &[usize], rank: Rank) -> std::ops::Range<usize> {
    let start = counts[..rank].iter().sum();
    start..start + counts[rank]
}

/// Returns the sends of all blocks but this rank's own.
fn sends<'a, T: Element>(
    rank: Rank,
    mut input: &'a [T],
    counts: &'a [usize],
) -> impl Iterator<Item = Message<'a>> {
    let blocks = counts.iter().enumerate().map(move |(peer, &count)| {
        let block;
        (block, input) = input.split_at(count);
        (peer, block)
    });
    blocks.filter(move |&(peer, _)| peer != rank).map(|(peer, block)| Message::send(block, peer))
}

/// Returns the receives of all blocks but this rank's own.
fn receives<'a, T: Element>(
    rank: Rank,
    mut output: &'a mut [T],
    counts: &'a [usize],
) -> impl Iterator<Item = Message<'a>> {
    let blocks = counts.iter().enumerate().map(move |(peer, &count)| {
        let block;
        (block, output) = std::mem::take(&mut output).split_at_mut(count);
        (peer, block)
    });
    blocks.filter(move |(peer, _)| *peer != rank).map(|(peer, block)| Message::recv(block, peer))
}

fn batch() -> OpDesc {
    describe(Verb::Batch, DType::U8, None, None, 0)
}

pub(crate) fn describe(
    verb: Verb,
    dtype: DType,
    op: Option<ReduceOp>,
    root: Option<Rank>,
    count: usize,
) -> OpDesc {
    OpDesc { verb, dtype, op, root, count }
}

/// Checks that a message goes to, or comes from, another rank.
pub(crate) fn check_peer(peer: Rank, rank: Rank, world: usize) -> Result<()> {
    if peer != rank && peer < world {
        return Ok(());
    }
    Err(Error::InvalidArgument(format!(
        "message to or from rank {peer}: not another rank of the group (this is rank {rank} of {world})"
    )))
}

/// Checks that there is a count for each rank, and that they add up to `len`.
pub(crate) fn check_counts(what: &str, len: usize, counts: &[usize], world: usize) -> Result<()> {
    check_len("list of counts", counts.len(), world)?;
    let total = counts.iter().try_fold(0_usize, |sum, &count| sum.checked_add(count));
    check_len(what, len, total.unwrap_or(usize::MAX))
}

pub(crate) fn check_len(what: &str, got: usize, expected: usize) -> Result<()> {
    if got == expected {
        return Ok(());
    }
    Err(Error::InvalidArgument(format!("the {what} has {got} elements, expected {expected}")))
}

/// Checks that `count` elements for each of `times` ranks have at most `isize::MAX` bytes.
pub(crate) fn check_bytes<T: Element>(count: usize, times: usize) -> Result<()> {
    let bytes = count.checked_mul(times).and_then(|count| count.checked_mul(T::DTYPE.size()));
    if bytes.is_some_and(|bytes| isize::try_from(bytes).is_ok()) {
        return Ok(());
    }
    Err(Error::InvalidArgument(format!("{count} elements exceed the address space")))
}
