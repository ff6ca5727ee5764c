//! Rings and chains: every rank exchanges messages with its two neighbours only.
//!
//! The neighbours are those of [`Layout::order`], machine by machine, so that one rank of each
//! machine sends to another machine and one receives.
//!
//! *Ring* reduce-scatter and all-gather: in each of `p - 1` steps a rank forwards the block it
//! received in the previous step, folded with its own numbers or unchanged. A reduce-scatter does
//! so for each piece of a block, to bound scratch memory. An all-reduce is one followed by the
//! other. *Chain* broadcast and reduce: the buffer is forwarded from rank to rank in chunks, with
//! all links busy at once.

use super::{Buf, Layout, RankCall, Region, Schedule, Slots, chunk_range, shard};
use crate::{Rank, Verb};

/// Maximum size in bytes of a message that is folded.
pub(super) const PIECE: usize = 2 << 20;

/// The ring or, for verbs with a root, the chain, `chunk` elements at a time.
pub(super) fn ring(call: RankCall, layout: &Layout, chunk: usize) -> Schedule {
    let chunk = chunk.clamp(1, call.count);
    let chunks = call.count.div_ceil(chunk);
    let at = layout.position(call.rank);
    let neighbour = |steps| layout.order()[(at + steps) % call.world];
    let (next, previous) = (neighbour(1), neighbour(call.world - 1));
    let ring = Ring { call, layout: layout.clone(), at, next, previous, chunk, chunks };
    let RankCall { rank, count, world, .. } = call;
    let shard = move |index| call.region(Buf::Output, shard(count, world, index));
    match call.verb {
        Verb::AllReduce => {
            let sums = ring.clone().reduce_scatter(shard, shard(rank));
            sums.then(ring.all_gather(shard(rank), shard))
        }
        Verb::ReduceScatter => {
            ring.reduce_scatter(move |index| call.block(Buf::Input, index), call.whole(Buf::Output))
        }
        Verb::AllGather | Verb::Counts => {
            ring.all_gather(call.whole(Buf::Input), move |index| call.block(Buf::Output, index))
        }
        Verb::Broadcast | Verb::Reduce => ring.chain(),
        verb => unreachable!("{verb} has no ring"),
    }
}

#[derive(Clone, Debug)]
struct Ring {
    call: RankCall,
    layout: Layout,
    /// This rank's position in the ring.
    at: usize,
    next: Rank,
    previous: Rank,
    /// Elements per chunk of a chain.
    chunk: usize,
    chunks: usize,
}

impl Ring {
    /// The rank `steps` positions before this one.
    fn before(&self, steps: usize) -> Rank {
        let world = self.call.world;
        self.layout.order()[(self.at + 2 * world - steps) % world]
    }

    /// Folds every rank's `block(index)` into `result` of rank `index`; leaves other blocks
    /// unchanged.
    fn reduce_scatter(
        self,
        block: impl Fn(Rank) -> Region + Send + Sync + 'static,
        result: Region,
    ) -> Schedule {
        let call = self.call;
        // The first block is not shorter than others.
        let longest = block(0).len;
        let (slots, steps) = (Slots::new(0, longest.min(PIECE)), call.world - 1);
        Schedule::new(slots.end(2), longest.div_ceil(PIECE) * steps, move |index, round| {
            let (piece, step) = (index / steps, index % steps);
            let part = |of: Region| {
                let start = (piece * PIECE).min(of.len);
                Region { offset: of.offset + start, len: (of.len - start).min(PIECE), ..of }
            };
            let own = |steps| part(block(self.before(steps)));
            let slot = |step: usize, len| slots.slot(step % 2, len);
            // The arriving block belongs to the rank `step + 2` positions before; in the last step,
            // to this rank.
            let (sent, folded) = (own(step + 1), own(step + 2));
            let arrived = slot(step, folded.len);
            round.send(self.next, if step == 0 { sent } else { slot(step - 1, sent.len) });
            round.recv(self.previous, arrived);
            let to = if step + 1 == steps { part(result) } else { arrived };
            round.fold(call.reduce_op(), to, [arrived, folded]);
        })
    }

    /// Gathers `own` of every rank `index` in `block(index)`.
    fn all_gather(
        self,
        own: Region,
        block: impl Fn(Rank) -> Region + Send + Sync + 'static,
    ) -> Schedule {
        Schedule::new(0, self.call.world - 1, move |step, round| {
            let block = |steps| block(self.before(steps));
            round.send(self.next, if step == 0 { own } else { block(step) });
            round.recv(self.previous, block(step + 1));
            if step == 0 {
                round.copy(block(0), own);
            }
        })
    }

    fn chunk_region(&self, index: usize) -> Region {
        let range = chunk_range(self.call.count, self.chunk, index);
        self.call.region(Buf::Output, range)
    }

    /// Number of positions from `position` to this rank.
    fn after(&self, position: usize) -> usize {
        (self.at + self.call.world - position) % self.call.world
    }

    /// A broadcast's chain begins at the root, a reduce's ends there.
    fn chain(self) -> Schedule {
        let (call, folds) = (self.call, self.call.op.is_some());
        let behind = self.after(self.layout.position(call.root) + usize::from(folds));
        let (first, last) = (behind == 0, behind + 1 == call.world);
        // A rank inside the chain sends a chunk in the round after it arrives.
        let lag = usize::from(!first);
        let rounds = self.chunks + usize::from(!first && !last);
        let slots = Slots::new(0, self.chunk * call.size);
        let scratch = slots.end(if first || !folds { 0 } else { 2 });
        // Destination of an arriving chunk: a partial result must not overwrite this rank's own
        // numbers.
        let place = move |index, own: Region| match folds {
            true => slots.slot(index % 2, own.len),
            false => own,
        };
        Schedule::new(scratch, rounds, move |index, round| {
            if !first && index < self.chunks {
                let own = self.chunk_region(index);
                let arrived = place(index, own);
                round.recv(self.previous, arrived);
                if folds {
                    round.fold(call.reduce_op(), if last { own } else { arrived }, [arrived, own]);
                }
            }
            if !last && index >= lag {
                let own = self.chunk_region(index - lag);
                round.send(self.next, if first { own } else { place(index - lag, own) });
            }
        })
    }
}
