//! Every verb as one function from checked slices to an [`OpDesc`] and raw memory.
//!
//! [`ProcessGroup`](crate::ProcessGroup)'s blocking calls run these on the caller's thread, its
//! asynchronous ones on the communication thread; nothing else calls a backend. Every check that
//! needs no peer is made before anything is sent, with [`blocks`](crate::op::blocks). `all_reduce`,
//! `reduce`, `broadcast`, `all_gather`, `reduce_scatter` and `barrier` are implemented by the
//! backend. Verbs that only send blocks between ranks are cut into [`Transfer`]s here, for all
//! backends.

#![expect(unsafe_code, reason = "passes checked slices to backends as raw memory")]

use std::marker::PhantomData;
use std::ops::Range;

use crate::backend::{Backend, RawBufs, Transfer, TransferMemory, Wait, WaitPolicy};
use crate::flight::Recorder;
use crate::memory::copy::copy_slice;
use crate::op::blocks::{BATCH, Blocks, check_peer, check_run, describe};
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

/// A backend, with the wait policy, timeout and tag of its calls.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Verbs<'a> {
    backend: &'a dyn Backend,
    wait: Wait,
    /// Records every step. `None` in a dry run, which ends at the first step.
    recorder: Option<&'a Recorder>,
    /// The purpose of the call, if ranks are to compare it.
    tag: Option<&'a str>,
}

impl<'a> Verbs<'a> {
    pub(crate) fn new(backend: &'a dyn Backend, recorder: &'a Recorder, wait: Wait) -> Self {
        Self { backend, wait, recorder: Some(recorder), tag: None }
    }

    pub(crate) fn with_tag(self, tag: Option<&'a str>) -> Self {
        Self { tag, ..self }
    }

    /// Returns the error that `call` would find before anything is sent: runs it up to its first
    /// step, which is not executed. An asynchronous call is checked this way before it is queued,
    /// so its checks are those of the blocking call.
    pub(crate) fn dry_run(
        backend: &'a dyn Backend,
        call: impl FnOnce(Self) -> Result<()>,
    ) -> Result<()> {
        let wait = Wait { policy: WaitPolicy::Sleep, timeout: None };
        match call(Self { backend, wait, recorder: None, tag: None }) {
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
        self.exchange_blocks(&desc, (out, &counts), (input, &counts))
    }

    pub(crate) fn scatter<T: Element>(self, out: &mut [T], input: &[T], root: Rank) -> Result<()> {
        let desc = describe(Verb::Scatter, T::DTYPE, None, Some(root), out.len());
        let counts = vec![out.len(); self.world()];
        self.exchange_blocks(&desc, (out, &counts), (input, &counts))
    }

    pub(crate) fn all_to_all<T: Element>(self, output: &mut [T], input: &[T]) -> Result<()> {
        let count = input.len() / self.world();
        let desc = describe(Verb::AllToAll, T::DTYPE, None, None, count);
        let counts = vec![count; self.world()];
        self.exchange_blocks(&desc, (output, &counts), (input, &counts))
    }

    pub(crate) fn all_gather_v<T: Element>(
        self,
        output: &mut [T],
        input: &[T],
        counts: &[usize],
    ) -> Result<()> {
        let desc = describe(Verb::AllGatherV, T::DTYPE, None, None, 0);
        self.exchange_blocks(&desc, (output, counts), (input, counts))
    }

    pub(crate) fn gather_v<T: Element>(
        self,
        output: &mut [T],
        input: &[T],
        counts: &[usize],
        root: Rank,
    ) -> Result<()> {
        let desc = describe(Verb::GatherV, T::DTYPE, None, Some(root), 0);
        self.exchange_blocks(&desc, (output, counts), (input, counts))
    }

    pub(crate) fn scatter_v<T: Element>(
        self,
        output: &mut [T],
        input: &[T],
        counts: &[usize],
        root: Rank,
    ) -> Result<()> {
        let desc = describe(Verb::ScatterV, T::DTYPE, None, Some(root), 0);
        self.exchange_blocks(&desc, (output, counts), (input, counts))
    }

    pub(crate) fn all_to_all_v<T: Element>(
        self,
        output: &mut [T],
        output_counts: &[usize],
        input: &[T],
        input_counts: &[usize],
    ) -> Result<()> {
        let desc = describe(Verb::AllToAllV, T::DTYPE, None, None, 0);
        self.exchange_blocks(&desc, (output, output_counts), (input, input_counts))
    }

    pub(crate) fn reduce_scatter_v<T: Element>(
        self,
        output: &mut [T],
        input: &[T],
        counts: &[usize],
        op: ReduceOp,
    ) -> Result<()> {
        let desc = describe(Verb::ReduceScatterV, T::DTYPE, Some(op), None, 0);
        let blocks = self.blocks(&desc, (output.len(), counts), (input.len(), counts))?;
        self.compare_blocks(&desc, &blocks)?;
        let mut block = Vec::new();
        for (root, range) in blocks.sends {
            block.clear();
            block.extend_from_slice(&input[range]);
            self.reduce(&mut block, op, root)?;
            if root == self.rank() {
                copy_slice(output, &block);
            }
        }
        Ok(())
    }

    pub(crate) fn batch(self, messages: Vec<Message<'_>>) -> Result<()> {
        let transfers: Vec<_> = messages.iter().map(|message| message.transfer).collect();
        for transfer in &transfers {
            check_peer(transfer.peer, self.rank(), self.world())?;
        }
        // SAFETY: `messages` borrow the memory for the call; the peers were checked above.
        unsafe { self.exchange(&BATCH, &transfers) }
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
        check_run(desc, self.world(), output.len(), input.len())?;
        let bufs = RawBufs { input: input.as_ptr().cast(), output: output.as_mut_ptr().cast() };
        self.step(desc, &[], || {
            // SAFETY: the lengths and `desc` were checked above, and both slices are borrowed for
            // the call.
            unsafe { self.backend.run(desc, bufs, self.wait) }
        })
    }

    /// # Safety
    ///
    /// The memory of the transfers is borrowed for the call, mutably if it is received into, and
    /// the peers are other ranks of the group.
    unsafe fn exchange(self, desc: &OpDesc, transfers: &[Transfer]) -> Result<()> {
        self.step(desc, transfers, || {
            // SAFETY: the caller's promise.
            unsafe { self.backend.exchange(desc, transfers, self.wait) }
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
        // Messages involve only some ranks. Blocks of different lengths are sent as messages, after
        // their lengths have been compared with the tag.
        if let Some(tag) = self.tag.filter(|_| desc.verb != Verb::Batch) {
            self.compare_tags(desc, tag)?;
        }
        recorder.record(desc, transfers, self.wait.policy, run)
    }

    /// All-gathers the ranks' calls and tags, and compares them before any data move. The result is
    /// the same on every rank.
    fn compare_tags(self, desc: &OpDesc, tag: &str) -> Result<()> {
        let [what, count, .., factor] = desc.fingerprint(0, BufferLocation::Private).words();
        let mut own = [0_u64; 4 + TAG_WORDS];
        own[..4].copy_from_slice(&[what, count, factor, hash(tag)]);
        let text = &tag[..tag.floor_char_boundary(8 * TAG_WORDS)];
        for (word, bytes) in own[4..].iter_mut().zip(text.as_bytes().chunks(8)) {
            let mut padded = [0; 8];
            padded[..bytes.len()].copy_from_slice(bytes);
            *word = u64::from_le_bytes(padded);
        }
        let mut all = vec![0; own.len() * self.world()];
        let row = describe(Verb::Counts, DType::U64, None, None, own.len());
        self.with_tag(None).run(&row, &mut all, &own)?;
        let rows: Vec<&[u64]> = all.chunks_exact(own.len()).collect();
        let print = |row: &[u64]| Fingerprint::from_words(0, [row[0], row[1], 0, 0, row[2]]);
        let differs = rows.iter().find_map(|row| {
            let tags = (row[3] != own[3]).then_some("tag");
            print(row).difference(&print(&own)).or(tags)
        });
        let Some(field) = differs else { return Ok(()) };
        let called = |(rank, row): (Rank, &&[u64])| {
            let bytes: Vec<u8> = row[4..].iter().flat_map(|word| word.to_le_bytes()).collect();
            let text = String::from_utf8_lossy(&bytes);
            (rank, format!("{}, tag `{}`", print(row), text.trim_end_matches('\0')))
        };
        self.disagree(desc, field, rows.iter().enumerate().map(called).collect())
    }

    /// Fails the group, on every rank, after calls that differ.
    fn disagree(
        self,
        desc: &OpDesc,
        field: &'static str,
        by_rank: Vec<(Rank, String)>,
    ) -> Result<()> {
        let error = Error::Mismatch { op: desc.verb.to_string(), field, by_rank };
        if let Some(recorder) = self.recorder {
            recorder.failed(&error);
        }
        // Without the barrier, an abort could reach a rank that does not have all rows yet.
        drop(self.with_tag(None).barrier());
        self.backend.abort(&error.to_string());
        Err(error)
    }

    fn blocks(
        self,
        desc: &OpDesc,
        output: (usize, &[usize]),
        input: (usize, &[usize]),
    ) -> Result<Blocks> {
        Blocks::new(desc, (self.rank(), self.world()), output, input)
    }

    /// Sends the blocks of the input, receives those of the output, and copies this rank's own
    /// block. `output` and `input` are buffers and the lengths of their blocks by rank.
    fn exchange_blocks<T: Element>(
        self,
        desc: &OpDesc,
        (output, to): (&mut [T], &[usize]),
        (input, from): (&[T], &[usize]),
    ) -> Result<()> {
        let rank = self.rank();
        let blocks = self.blocks(desc, (output.len(), to), (input.len(), from))?;
        if desc.verb.is_varying() {
            self.compare_blocks(desc, &blocks)?;
        }
        let transfer = |peer: Rank, block: &Range<usize>, memory| {
            (peer != rank).then(|| Transfer { peer, dtype: T::DTYPE, count: block.len(), memory })
        };
        let (start, end) = (input.as_ptr(), output.as_mut_ptr());
        let sends = blocks.sends.iter().filter_map(|(peer, block)| {
            transfer(*peer, block, TransferMemory::Send(start.wrapping_add(block.start).cast()))
        });
        let receives = blocks.receives.iter().filter_map(|(peer, block)| {
            transfer(*peer, block, TransferMemory::Receive(end.wrapping_add(block.start).cast()))
        });
        let transfers: Vec<_> = sends.chain(receives).collect();
        // SAFETY: the blocks lie in the slices, which are borrowed for the call, and those received
        // into do not overlap; peers are ranks of the group other than this one.
        unsafe { self.exchange(if desc.verb.is_varying() { &BATCH } else { desc }, &transfers) }?;
        if let Some((to, from)) = blocks.own(rank) {
            copy_slice(&mut output[to], &input[from]);
        }
        Ok(())
    }

    /// All-gathers the lengths of all ranks' blocks and compares what each rank receives with what
    /// the others send, before any data move. The result is the same on every rank.
    fn compare_blocks(self, desc: &OpDesc, blocks: &Blocks) -> Result<()> {
        let world = self.world();
        let [what, .., factor] = desc.fingerprint(0, BufferLocation::Private).words();
        let mut own = vec![0; 2 + 2 * world];
        (own[0], own[1]) = (what, factor);
        let lengths = blocks.receives.iter().map(|(from, block)| (2 + from, block));
        for (at, block) in
            lengths.chain(blocks.sends.iter().map(|(to, block)| (2 + world + to, block)))
        {
            own[at] = block.len() as u64;
        }
        let mut all = vec![0; own.len() * world];
        let counts = describe(Verb::Counts, DType::U64, None, None, own.len());
        self.run(&counts, &mut all, &own)?;
        let rows: Vec<&[u64]> = all.chunks_exact(own.len()).collect();
        let print = |row: &[u64]| Fingerprint::from_words(0, [row[0], 0, 0, 0, row[1]]);
        let differs = rows.iter().find_map(|row| print(row).difference(&print(&own)));
        let (received, sent) = (
            |to: Rank, from: Rank| rows[to][2 + from],
            |from: Rank, to: Rank| rows[from][2 + world + to],
        );
        let fits = |to: Rank| (0..world).all(|from| received(to, from) == sent(from, to));
        if differs.is_none() && (0..world).all(fits) {
            return Ok(());
        }
        let called = |(rank, row): (Rank, &&[u64])| {
            let (receives, sends) = row[2..].split_at(world);
            (rank, format!("{}, receives {receives:?}, sends {sends:?}", print(row)))
        };
        let by_rank = rows.iter().enumerate().map(called).collect();
        self.disagree(desc, differs.unwrap_or("count"), by_rank)
    }
}

/// FNV-1a, which is the same in every process.
fn hash(text: &str) -> u64 {
    let step = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    text.bytes().fold(0xcbf2_9ce4_8422_2325, step)
}

/// Words of a tag's text that ranks send: 64 bytes.
const TAG_WORDS: usize = 8;
