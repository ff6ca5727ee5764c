//! Exchanges with partners at distances 1, 2, 4, ...: `lg p` steps.
//!
//! *Recursive doubling*: partners exchange all their data. *Halving-doubling* (Rabenseifner):
//! partners first exchange halves of their data, then return the results, which sends as many bytes
//! as a ring in `2 lg p` steps. The largest parts are sent the shortest distance, which is within a
//! machine if ranks are placed in order.
//!
//! If `p` is not a power of two, an all-reduce begins by folding pairs of the first ranks until it
//! is, and ends by sending the result to the ranks that were folded in.

use std::ops::Range;

use super::{Buf, RankCall, Round, Schedule, Slots, shard, within};
use crate::{Rank, Verb};

/// Recursive doubling. All verbs but all-reduce need a power of two of ranks.
pub(super) fn recursive_doubling(call: RankCall) -> Schedule {
    match call.verb {
        Verb::AllReduce => folded(call, whole_exchanges),
        Verb::AllGather | Verb::Counts => all_gather(call),
        verb => unreachable!("{verb} has no recursive doubling"),
    }
}

/// Halving and doubling. `reduce_scatter` needs a power of two of ranks.
pub(super) fn halving_doubling(call: RankCall) -> Schedule {
    match call.verb {
        Verb::AllReduce => folded(call, half_exchanges),
        Verb::ReduceScatter => reduce_scatter(call),
        verb => unreachable!("{verb} has no halving and doubling"),
    }
}

/// The ranks that take part, a power of two, after the other ranks have been folded in.
#[derive(Clone, Copy, Debug)]
struct Cube {
    call: RankCall,
    steps: usize,
    /// Number of pairs among the first ranks; the second of each takes part.
    pairs: usize,
    /// This rank's index among those that take part.
    number: usize,
}

impl Cube {
    fn rank(self, number: usize) -> Rank {
        if number < self.pairs { 2 * number + 1 } else { number + self.pairs }
    }

    fn partner(self, step: usize) -> Rank {
        self.rank(self.number ^ (1 << step))
    }

    /// Whether this rank is the upper one of the two at a step.
    fn is_upper(self, step: usize) -> bool {
        self.number >> step & 1 == 1
    }
}

/// An all-reduce among a power of two of ranks; the others are folded in before and get the result
/// after.
fn folded(call: RankCall, exchanges: fn(Cube) -> Schedule) -> Schedule {
    let RankCall { rank, world, .. } = call;
    let steps = world.ilog2() as usize;
    let pairs = world - (1 << steps);
    let whole = call.whole(Buf::Output);
    if rank >= 2 * pairs {
        return exchanges(Cube { call, steps, pairs, number: rank - pairs });
    }
    if rank % 2 == 0 {
        return Schedule::new(0, 2, move |index, round| match index {
            0 => round.send(rank + 1, whole),
            _ => round.recv(rank + 1, whole),
        });
    }
    let slot = Slots::new(0, whole.len);
    let take = Schedule::new(slot.end(1), 1, move |_, round| {
        let arrived = slot.slot(0, whole.len);
        round.recv(rank - 1, arrived);
        round.fold(call.reduce_op(), whole, [arrived, whole]);
    });
    let give = Schedule::new(0, 1, move |_, round| round.send(rank - 1, whole));
    take.then(exchanges(Cube { call, steps, pairs, number: rank / 2 })).then(give)
}

fn whole_exchanges(cube: Cube) -> Schedule {
    let whole = cube.call.whole(Buf::Output);
    let slot = Slots::new(0, whole.len);
    Schedule::new(slot.end(1), cube.steps, move |step, round| {
        let (partner, arrived) = (cube.partner(step), slot.slot(0, whole.len));
        round.send(partner, whole);
        round.recv(partner, arrived);
        // In the same order on both sides, for the same bits.
        let sources = if cube.is_upper(step) { [arrived, whole] } else { [whole, arrived] };
        round.fold(cube.call.reduce_op(), whole, sources);
    })
}

fn half_exchanges(cube: Cube) -> Schedule {
    let call = cube.call;
    let slot = Slots::new(0, call.count.div_ceil(2) * call.size);
    Schedule::new(slot.end(1), 2 * cube.steps, move |index, round| {
        let halving = index < cube.steps;
        let step = if halving { index } else { 2 * cube.steps - 1 - index };
        let (kept, other) = halves(cube, step);
        let (kept, other) = (call.region(Buf::Output, kept), call.region(Buf::Output, other));
        let partner = cube.partner(step);
        if halving {
            let arrived = slot.slot(0, kept.len);
            round.send(partner, other);
            round.recv(partner, arrived);
            round.fold(call.reduce_op(), kept, [arrived, kept]);
        } else {
            round.send(partner, kept);
            round.recv(partner, other);
        }
    })
}

/// Returns the elements that this rank keeps in a halving step, and those that it sends.
fn halves(cube: Cube, step: usize) -> (Range<usize>, Range<usize>) {
    let half = |all: &Range<usize>, index| within(all, shard(all.len(), 2, index));
    let upper = |step| usize::from(cube.is_upper(step));
    let all = (0..step).fold(0..cube.call.count, |all, step| half(&all, upper(step)));
    (half(&all, upper(step)), half(&all, 1 - upper(step)))
}

fn all_gather(call: RankCall) -> Schedule {
    let blocks = move |first: usize, blocks: usize| {
        call.region(Buf::Output, first * call.count..(first + blocks) * call.count)
    };
    Schedule::new(0, call.world.ilog2() as usize, move |step, round| {
        let held = 1 << step;
        let first = call.rank & !(held - 1);
        let partner = call.rank ^ held;
        let sent = if step == 0 { call.whole(Buf::Input) } else { blocks(first, held) };
        round.send(partner, sent);
        round.recv(partner, blocks(first ^ held, held));
        if step == 0 {
            round.copy(call.block(Buf::Output, call.rank), call.whole(Buf::Input));
        }
    })
}

/// Halves from the largest distance on, so that every rank ends with its own block.
fn reduce_scatter(call: RankCall) -> Schedule {
    let block = call.count * call.size;
    let sums = Slots::new(0, call.world / 2 * block);
    let steps = call.world.ilog2() as usize;
    Schedule::new(sums.end(2), steps, move |step, round| {
        reduce_scatter_step(call, sums, step, round);
    })
}

fn reduce_scatter_step(call: RankCall, sums: Slots, step: usize, round: &mut Round) {
    let block = call.count * call.size;
    let kept = call.world >> (step + 1);
    let partner = call.rank ^ kept;
    let first = call.rank & !(kept - 1);
    // After the first step the sums of the remaining blocks are in slot 0, starting with the first
    // block kept in that step.
    let held = |first: usize| {
        if step == 0 {
            return call.region(Buf::Input, first * call.count..(first + kept) * call.count);
        }
        let origin = call.rank & !(call.world / 2 - 1);
        let mut region = sums.slot(0, kept * block);
        region.offset += (first - origin) * block;
        region
    };
    let arrived = sums.slot(1, kept * block);
    round.send(partner, held(first ^ kept));
    round.recv(partner, arrived);
    let to = if kept == 1 {
        call.whole(Buf::Output)
    } else if step == 0 {
        sums.slot(0, kept * block)
    } else {
        held(first)
    };
    round.fold(call.reduce_op(), to, [arrived, held(first)]);
}
