//! Real bytes for the engine: what each rank's memory is, and what is on its way between them.

#![expect(unsafe_code, reason = "turns the memory of an operation into spans")]

use std::collections::{HashMap, VecDeque};

use super::engine::Carry;
use crate::algo::{Buf, Memory, Region, Round};
use crate::backend::{RawBufs, Transfer, TransferMemory};
use crate::span::Span;
use crate::{DType, OpDesc, Rank};

/// Bytes that have left their sender and are not yet stored, by sender and receiver.
type Wires = HashMap<(Rank, Rank), VecDeque<Vec<u8>>>;

fn put(wires: &mut Wires, from: Rank, to: Rank, source: Span<'_>) {
    wires.entry((from, to)).or_default().push_back(bytes_of(source));
}

fn take(wires: &mut Wires, from: Rank, to: Rank, target: Span<'_>) {
    let bytes = wires.get_mut(&(from, to)).and_then(VecDeque::pop_front);
    store(target, &mut bytes.expect("a round ends when its messages have come"));
}

/// A copy.
pub(super) fn bytes_of(source: Span<'_>) -> Vec<u8> {
    let mut bytes = vec![0; source.len()];
    store_from(&mut bytes, source);
    bytes
}

fn store_from(bytes: &mut [u8], source: Span<'_>) {
    // SAFETY: the borrow lasts as long as the span.
    unsafe { Span::new(bytes.as_mut_ptr(), bytes.len()) }.copy_from(source);
}

/// Stores bytes, which are as many as the target holds.
pub(super) fn store(target: Span<'_>, bytes: &mut [u8]) {
    // SAFETY: the borrow lasts as long as the span.
    target.copy_from(unsafe { Span::new(bytes.as_mut_ptr(), bytes.len()) });
}

/// Every rank's buffers of one operation.
pub(super) struct Buffers<'a> {
    dtype: DType,
    memory: Vec<Memory<'a>>,
    wires: Wires,
}

impl<'a> Buffers<'a> {
    /// # Safety
    ///
    /// For all of `'a` the memory of all ranks is good as [`RawBufs`] says for `op`, and nobody
    /// else touches it.
    pub(super) unsafe fn new(op: &OpDesc, bufs: &[RawBufs], scratch: &'a mut [Vec<u8>]) -> Self {
        let (world, size) = (bufs.len(), op.dtype.size());
        let memory = |(bufs, scratch): (&RawBufs, &'a mut Vec<u8>)| Memory {
            // SAFETY: the caller's promise; schedules only copy from the input.
            input: unsafe { Span::new(bufs.input.cast_mut(), op.input_count(world) * size) },
            // SAFETY: the caller's promise.
            output: unsafe { Span::new(bufs.output, op.output_count(world) * size) },
            // SAFETY: borrowed for `'a`.
            scratch: unsafe { Span::new(scratch.as_mut_ptr(), scratch.len()) },
        };
        let memory = bufs.iter().zip(scratch).map(memory).collect();
        Self { dtype: op.dtype, memory, wires: Wires::new() }
    }
}

impl Carry for Buffers<'_> {
    const DATA: bool = true;

    fn send(&mut self, from: Rank, to: Rank, region: Region) {
        put(&mut self.wires, from, to, self.memory[from].region(region));
    }

    fn finish(&mut self, rank: Rank, round: &Round) {
        for &(from, region) in &round.recvs {
            take(&mut self.wires, from, rank, self.memory[rank].region(region));
        }
        self.memory[rank].work(self.dtype, round);
    }
}

/// Every rank's blocks of one exchange. The offset of a region is the index of its block.
pub(super) struct Blocks<'a> {
    transfers: &'a [&'a [Transfer]],
    wires: Wires,
}

impl<'a> Blocks<'a> {
    /// # Safety
    ///
    /// For all of `'a` the memory of all transfers is good for `count` elements, and nobody else
    /// touches it.
    pub(super) unsafe fn new(transfers: &'a [&'a [Transfer]]) -> Self {
        Self { transfers, wires: Wires::new() }
    }

    /// One rank's part.
    pub(super) fn round(transfers: &[Transfer]) -> Round {
        let mut round = Round::default();
        for (offset, transfer) in transfers.iter().enumerate() {
            let len = transfer.count * transfer.dtype.size();
            let region = Region { buf: Buf::Output, offset, len };
            match transfer.memory {
                TransferMemory::Send(_) => round.send(transfer.peer, region),
                TransferMemory::Receive(_) => round.recv(transfer.peer, region),
            }
        }
        round
    }

    fn span(&self, rank: Rank, region: Region) -> Span<'a> {
        // SAFETY: the promise of `new`.
        unsafe { span(&self.transfers[rank][region.offset]) }
    }
}

impl Carry for Blocks<'_> {
    const DATA: bool = true;

    fn send(&mut self, from: Rank, to: Rank, region: Region) {
        let source = self.span(from, region);
        put(&mut self.wires, from, to, source);
    }

    fn finish(&mut self, rank: Rank, round: &Round) {
        for &(from, region) in &round.recvs {
            let target = self.span(rank, region);
            take(&mut self.wires, from, rank, target);
        }
    }
}

/// The memory of a transfer; only copied from if it is to be sent.
///
/// # Safety
///
/// For all of `'a` the memory is good for `count` elements, and nobody else touches it.
pub(super) unsafe fn span<'a>(transfer: &Transfer) -> Span<'a> {
    let ptr = match transfer.memory {
        TransferMemory::Send(ptr) => ptr.cast_mut(),
        TransferMemory::Receive(ptr) => ptr,
    };
    // SAFETY: the caller's promise.
    unsafe { Span::new(ptr, transfer.count * transfer.dtype.size()) }
}

/// Type and count of each.
type Messages = Vec<(DType, usize)>;

/// The first pair of ranks of which one does not send what the other expects.
pub(super) fn unmatched(transfers: &[&[Transfer]]) -> Option<(Rank, Rank)> {
    let mut pairs: HashMap<(Rank, Rank), [Messages; 2]> = HashMap::new();
    for (rank, transfers) in transfers.iter().enumerate() {
        for Transfer { peer, dtype, count, memory } in *transfers {
            let (pair, side) = match memory {
                TransferMemory::Send(_) => ((rank, *peer), 0),
                TransferMemory::Receive(_) => ((*peer, rank), 1),
            };
            pairs.entry(pair).or_default()[side].push((*dtype, *count));
        }
    }
    pairs.into_iter().filter(|(_, [sent, wanted])| sent != wanted).map(|(pair, _)| pair).min()
}
