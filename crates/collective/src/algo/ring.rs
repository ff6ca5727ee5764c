//! Rings and chains: every rank exchanges messages with its two neighbours only.
//!
//! The neighbours are those of [`Layout::order`], machine by machine, so that one rank of each
//! machine sends to another machine and one receives.
//!
//! *Ring* all-reduce, reduce-scatter and all-gather: in each of `p - 1` steps a rank forwards the
//! shard it received in the previous step, folded with its own numbers or unchanged. *Chain*
//! broadcast and reduce: the buffer is forwarded from rank to rank in chunks, with all links busy
//! at once.

use super::{Buf, Call, Layout, Region, Schedule, Slots, chunk_range, shard};
use crate::{Rank, Verb};

/// The ring or, for verbs with a root, the chain, `chunk` elements at a time.
pub(super) fn ring(call: Call, layout: &Layout, chunk: usize) -> Schedule {
    let chunk = chunk.clamp(1, call.count);
    let chunks = call.count.div_ceil(chunk);
    let at = layout.position(call.rank);
    let neighbour = |steps| layout.order()[(at + steps) % call.world];
    let (next, previous) = (neighbour(1), neighbour(call.world - 1));
    let ring = Ring { call, layout: layout.clone(), at, next, previous, chunk, chunks };
    match call.verb {
        Verb::AllReduce => ring.all_reduce(),
        Verb::ReduceScatter => ring.reduce_scatter(),
        Verb::AllGather | Verb::Counts => ring.all_gather(),
        Verb::Broadcast | Verb::Reduce => ring.chain(),
        verb => unreachable!("{verb} has no ring"),
    }
}

#[derive(Debug)]
struct Ring {
    call: Call,
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
    /// The position `steps` before this rank's.
    fn before(&self, steps: usize) -> usize {
        let world = self.call.world;
        (self.at + 2 * world - steps) % world
    }

    fn rank(&self, position: usize) -> Rank {
        self.layout.order()[position]
    }

    fn all_reduce(self) -> Schedule {
        let Call { world, count, size, .. } = self.call;
        let steps = world - 1;
        let slots = Slots::new(0, count.div_ceil(world) * size);
        let part = move |call: Call, index| call.region(Buf::Output, shard(count, world, index));
        Schedule::new(slots.end(1), 2 * steps, move |step, round| {
            if step < steps {
                let own = part(self.call, self.before(step + 1));
                let arrived = slots.slot(0, own.len);
                round.send(self.next, part(self.call, self.before(step)));
                round.recv(self.previous, arrived);
                round.fold(self.call.reduce_op(), own, [arrived, own]);
            } else {
                // This rank's finished shard is now the one after its position.
                let step = step - steps;
                round.send(self.next, part(self.call, self.before(step + world - 1)));
                round.recv(self.previous, part(self.call, self.before(step)));
            }
        })
    }

    fn reduce_scatter(self) -> Schedule {
        let call = self.call;
        let slots = Slots::new(0, call.count * call.size);
        let len = call.count * call.size;
        Schedule::new(slots.end(2), call.world - 1, move |step, round| {
            // The arriving block belongs to the rank `step + 2` positions before; in the last step,
            // to this rank.
            let last = step + 2 == call.world;
            let own = call.block(Buf::Input, self.rank(self.before(step + 2)));
            let arrived = slots.slot(step % 2, len);
            let sent = match step {
                0 => call.block(Buf::Input, self.rank(self.before(1))),
                _ => slots.slot((step - 1) % 2, len),
            };
            round.send(self.next, sent);
            round.recv(self.previous, arrived);
            let to = if last { call.whole(Buf::Output) } else { arrived };
            round.fold(call.reduce_op(), to, [arrived, own]);
        })
    }

    fn all_gather(self) -> Schedule {
        let call = self.call;
        Schedule::new(0, call.world - 1, move |step, round| {
            let block = |steps| call.block(Buf::Output, self.rank(self.before(steps)));
            let sent = if step == 0 { call.whole(Buf::Input) } else { block(step) };
            round.send(self.next, sent);
            round.recv(self.previous, block(step + 1));
            if step == 0 {
                round.copy(block(0), call.whole(Buf::Input));
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
        // Where a chunk arrives: a partial result must not overwrite this rank's own numbers.
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
