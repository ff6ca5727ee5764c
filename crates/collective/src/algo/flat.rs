//! Algorithms that fold every element once, over all ranks' numbers in rank order: they have the
//! bits that [`ReduceOp`](crate::ReduceOp) promises, for every type.
//!
//! *Flat*: each rank that needs numbers receives them whole from the ranks that have them. One
//! round; where numbers are folded, a round for each chunk, to bound scratch memory.
//!
//! *Direct*: the buffer is cut into shards, one per rank. Every rank sends each shard to its owner,
//! which folds it and sends the result to all ranks that need it. It takes two message times and
//! sends the fewest possible bytes, but needs a message for every pair of ranks. It processes the
//! buffer in chunks, to bound scratch memory: a round carries the shards of one chunk and the
//! results of the previous one.
//!
//! With a root, the other ranks own the shards, so that no rank sends or receives more than the
//! buffer once.

use super::{Buf, RankCall, Region, Round, Schedule, Slots, chunk_range, shard, within};
use crate::{Rank, Verb};

/// The flat algorithm; it folds `chunk` elements of each rank at a time.
pub(super) fn flat(call: RankCall, chunk: usize) -> Schedule {
    match call.op {
        Some(_) => flat_fold(call, chunk),
        None => Schedule::new(0, 1, move |_, round| exchange(call, round)),
    }
}

/// The direct algorithm, `chunk` elements at a time.
pub(super) fn direct(call: RankCall, chunk: usize) -> Schedule {
    Sharded::new(call, chunk).schedule()
}

/// Sends and receives whole blocks, for verbs without a fold.
fn exchange(call: RankCall, round: &mut Round) {
    let from_root = matches!(call.verb, Verb::Broadcast | Verb::Scatter);
    let gives = |rank| !from_root || rank == call.root;
    let takes = |rank| call.verb != Verb::Gather || rank == call.root;
    let for_rank = |rank| match call.verb {
        Verb::Broadcast => call.whole(Buf::Output),
        Verb::Scatter | Verb::AllToAll => call.block(Buf::Input, rank),
        _ => call.whole(Buf::Input),
    };
    let of_rank = |rank| match from_root {
        true => call.whole(Buf::Output),
        false => call.block(Buf::Output, rank),
    };
    if gives(call.rank) {
        call.peers().filter(|&peer| takes(peer)).for_each(|peer| round.send(peer, for_rank(peer)));
    }
    if takes(call.rank) {
        call.sources().filter(|&peer| gives(peer)).for_each(|peer| round.recv(peer, of_rank(peer)));
    }
    if gives(call.rank) && takes(call.rank) {
        round.copy(of_rank(call.rank), for_rank(call.rank));
    }
}

/// Receives `own.len` bytes from every other rank and folds them, with this rank's `own`, into
/// `to`.
fn fold_arrivals(call: RankCall, round: &mut Round, slots: Slots, own: Region, to: Region) {
    let arrival = |peer: Rank| slots.slot(peer - usize::from(peer > call.rank), own.len);
    for peer in call.sources() {
        round.recv(peer, arrival(peer));
    }
    let source = |rank| if rank == call.rank { own } else { arrival(rank) };
    round.fold(call.reduce_op(), to, (0..call.world).map(source));
}

fn flat_fold(call: RankCall, chunk: usize) -> Schedule {
    let chunk = chunk.clamp(1, call.count);
    let slots = Slots::new(0, chunk * call.size);
    let wants = move |rank: Rank| call.verb != Verb::Reduce || rank == call.root;
    let scratch = if wants(call.rank) { slots.end(call.world - 1) } else { 0 };
    Schedule::new(scratch, call.count.div_ceil(chunk), move |index, round| {
        let part = chunk_range(call.count, chunk, index);
        // The part that a rank folds.
        let share = |rank: Rank| match call.verb {
            Verb::ReduceScatter => {
                let block = rank * call.count..(rank + 1) * call.count;
                call.region(Buf::Input, within(&block, part.clone()))
            }
            _ => call.region(Buf::Output, part.clone()),
        };
        for peer in call.peers().filter(|&peer| wants(peer)) {
            round.send(peer, share(peer));
        }
        if wants(call.rank) {
            let to = call.region(Buf::Output, part.clone());
            fold_arrivals(call, round, slots, share(call.rank), to);
        }
    })
}

/// The direct algorithm on a buffer that is processed in place.
#[derive(Clone, Copy, Debug)]
struct Sharded {
    call: RankCall,
    /// Elements per chunk.
    chunk: usize,
    chunks: usize,
    /// Number of ranks that own shards: all, or all but the root.
    owners: usize,
}

impl Sharded {
    fn new(call: RankCall, chunk: usize) -> Self {
        let chunk = chunk.clamp(1, call.count);
        let owners = if call.verb == Verb::AllReduce { call.world } else { call.world - 1 };
        Self { call, chunk, chunks: call.count.div_ceil(chunk), owners: owners.max(1) }
    }

    /// The part of a chunk of the output that a rank owns; empty if it owns none.
    fn owned(self, chunk: usize, rank: Rank) -> Region {
        let outer = chunk_range(self.call.count, self.chunk, chunk);
        let index = match self.call.verb {
            Verb::AllReduce => rank,
            _ if self.call.world == 1 => 0,
            _ if rank == self.call.root => return self.call.region(Buf::Output, 0..0),
            _ => rank - usize::from(rank > self.call.root),
        };
        let part = shard(outer.len(), self.owners, index);
        self.call.region(Buf::Output, within(&outer, part))
    }

    /// In round `i`, owners get and fold their parts of chunk `i`, and send the results of chunk
    /// `i - 1`.
    fn schedule(self) -> Schedule {
        let (call, folds) = (self.call, self.call.op.is_some());
        let slots = Slots::new(0, self.chunk.div_ceil(self.owners) * call.size);
        // Only the root of a `reduce` gets the result in its buffer.
        let in_place = call.verb != Verb::Reduce || call.world == 1;
        let slot_count = if folds { call.world - usize::from(in_place) } else { 0 };
        let result = move |own: Region| match in_place {
            true => own,
            false => slots.slot(call.world - 1, own.len),
        };
        Schedule::new(slots.end(slot_count), self.chunks + 1, move |index, round| {
            if index < self.chunks {
                let own = self.owned(index, call.rank);
                if folds || call.is_root() {
                    call.peers().for_each(|peer| round.send(peer, self.owned(index, peer)));
                } else {
                    round.recv(call.root, own);
                }
                if folds && own.len > 0 {
                    fold_arrivals(call, round, slots, own, result(own));
                }
            }
            if let Some(done) = index.checked_sub(1) {
                self.send_results(round, done, result(self.owned(done, call.rank)));
            }
        })
    }

    /// Sends this rank's part of a chunk's result to the ranks that need it, and receives theirs.
    fn send_results(self, round: &mut Round, chunk: usize, own: Region) {
        let call = self.call;
        let wants = |rank: Rank| match call.verb {
            Verb::Reduce => rank == call.root,
            Verb::Broadcast => rank != call.root,
            _ => true,
        };
        for peer in call.peers().filter(|&peer| wants(peer)) {
            round.send(peer, own);
        }
        if wants(call.rank) {
            for peer in call.sources() {
                round.recv(peer, self.owned(chunk, peer));
            }
        }
    }
}
