//! Over several machines with the bits of rank order, and each machine's interface carrying the numbers once.
//!
//! A fold from left to right can be cut anywhere. The first machine folds its ranks' numbers, the next one continues
//! over its own, and the last has the result, which runs back. So a machine sends what it has folded and the result,
//! however many ranks it has. Types of 16 bits travel as the `f32` that they are folded in, and are rounded once, by the
//! last machine.
//!
//! The numbers are cut into groups, of which each machine works on another one at the same time, and each group into
//! lanes: a lane is folded by one rank of each machine, its *owner*, which gets the other ranks' numbers and hands them
//! the result. In round `t` the ranks of machine `m` collect group `t`, which the machine before has handed on in its
//! round `t + 1`; they hand on group `t - 1`; and get the result of group `t - 2 (M - 1 - m)`, of `M` machines. With a
//! root the last machine sends the result there instead.

use super::{Buf, Call, Layout, Region, Round, Schedule, Slots, chunk_range, shard, within};
use crate::{DType, Rank, ReduceOp, Verb};

/// The hierarchical algorithm, on groups of `chunk` elements. `layout` has several machines, and is in order unless
/// the order of ranks does not matter.
pub(super) fn hierarchical(call: Call, layout: &Layout, chunk: usize) -> Schedule {
    let chain = Chain::new(call, layout, chunk);
    Schedule::new(chain.lane_slots(chain.owned()), chain.rounds(), move |index, round| {
        if index < chain.groups {
            chain.collect(index, round);
        }
        if let Some(group) = index.checked_sub(1).filter(|group| *group < chain.groups) {
            chain.hand_on(group, round);
        }
        if call.verb == Verb::AllReduce {
            chain.hand_back(index, round);
        } else {
            chain.take_result(index, round);
        }
    })
}

/// Whether numbers are folded in a wider type than their own.
pub(super) fn is_wide(dtype: DType) -> bool {
    matches!(dtype, DType::F16 | DType::Bf16)
}

#[derive(Debug)]
struct Chain {
    call: Call,
    /// What folds, and what the sum is multiplied by at the end.
    op: ReduceOp,
    factor: Option<f64>,
    layout: Layout,
    machine: usize,
    /// Elements of a group, and groups of a block.
    chunk: usize,
    per_block: usize,
    groups: usize,
    lanes: usize,
    slots: Slots,
}

/// What one lane of a group folds.
struct Part {
    input: Region,
    output: Region,
    /// Who alone gets the result.
    root: Option<Rank>,
}

impl Chain {
    fn new(call: Call, layout: &Layout, chunk: usize) -> Self {
        let chunk = chunk.clamp(1, call.count);
        let per_block = call.count.div_ceil(chunk);
        let blocks = if call.verb == Verb::ReduceScatter { call.world } else { 1 };
        let (op, factor) = match call.reduce_op() {
            ReduceOp::Avg => (ReduceOp::Sum, Some(1.0 / call.world as f64)),
            op => (op, None),
        };
        let lanes = layout.widest();
        let size = if is_wide(call.dtype) { size_of::<f32>() } else { call.size };
        Self {
            call,
            op,
            factor,
            layout: layout.clone(),
            machine: layout.machine(call.rank),
            chunk,
            per_block,
            groups: blocks * per_block,
            lanes,
            slots: Slots::new(0, chunk.div_ceil(lanes) * size),
        }
    }

    fn rounds(&self) -> usize {
        let after = self.layout.machines() - 1 - self.machine;
        self.groups + 1 + if self.call.verb == Verb::AllReduce { 2 * after } else { after }
    }

    fn is_last(&self) -> bool {
        self.machine + 1 == self.layout.machines()
    }

    fn members(&self) -> &[Rank] {
        self.layout.members(self.machine)
    }

    fn owner(&self, machine: usize, lane: usize) -> Rank {
        let members = self.layout.members(machine);
        members[lane % members.len()]
    }

    fn is_own(&self, lane: usize) -> bool {
        self.owner(self.machine, lane) == self.call.rank
    }

    fn own_lanes(&self) -> impl Iterator<Item = usize> {
        (0..self.lanes).filter(|&lane| self.is_own(lane))
    }

    /// The most lanes that a rank of this machine owns.
    fn owned(&self) -> usize {
        self.lanes.div_ceil(self.members().len())
    }

    fn part(&self, group: usize, lane: usize) -> Part {
        let call = self.call;
        let (block, index) = (group / self.per_block, group % self.per_block);
        let group = chunk_range(call.count, self.chunk, index);
        let own = within(&group, shard(group.len(), self.lanes, lane));
        let output = call.region(Buf::Output, own.clone());
        match call.verb {
            Verb::AllReduce => Part { input: output, output, root: None },
            Verb::Reduce => Part { input: output, output, root: Some(call.root) },
            _ => {
                let all = block * call.count..(block + 1) * call.count;
                let input = call.region(Buf::Input, within(&all, own));
                Part { input, output, root: Some(block) }
            }
        }
    }

    /// Bytes of scratch memory for so many lanes: for each what the members send, the prefix, the partial result, and
    /// the members' numbers in the wider type.
    fn lane_slots(&self, lanes: usize) -> usize {
        let members = self.members().len();
        let wide = if is_wide(self.call.dtype) { members } else { 0 };
        self.slots.end(lanes * (members + 2 + wide))
    }

    fn slot(&self, lane: usize, index: usize, len: usize) -> Region {
        let (members, wide) = (self.members().len(), is_wide(self.call.dtype));
        let each = members + 2 + if wide { members } else { 0 };
        self.slots.slot(lane / members * each + index, len)
    }

    fn arrival(&self, lane: usize, member: usize, part: &Part) -> Region {
        self.slot(lane, member, part.input.len)
    }

    /// The result for a root elsewhere: this rank sends itself nothing.
    fn result(&self, lane: usize, part: &Part) -> Region {
        let own = self.members().iter().position(|&rank| rank == self.call.rank);
        self.arrival(lane, own.expect("a rank is on its machine"), part)
    }

    /// Bytes of a part in the type that it is folded in.
    fn folded(&self, part: &Part) -> usize {
        if is_wide(self.call.dtype) { 2 * part.input.len } else { part.input.len }
    }

    fn prefix(&self, lane: usize, part: &Part) -> Region {
        self.slot(lane, self.members().len(), self.folded(part))
    }

    fn partial(&self, lane: usize, part: &Part) -> Region {
        self.slot(lane, self.members().len() + 1, self.folded(part))
    }

    fn widened(&self, lane: usize, member: usize, part: &Part) -> Region {
        self.slot(lane, self.members().len() + 2 + member, self.folded(part))
    }

    /// Numbers go to the owners of their lanes, which fold them.
    fn collect(&self, group: usize, round: &mut Round) {
        for lane in 0..self.lanes {
            let part = self.part(group, lane);
            let owner = self.owner(self.machine, lane);
            if owner != self.call.rank {
                round.send(owner, part.input);
                continue;
            }
            for (at, &rank) in self.members().iter().enumerate() {
                if rank != owner {
                    round.recv(rank, self.arrival(lane, at, &part));
                }
            }
            if self.machine > 0 {
                round.recv(self.owner(self.machine - 1, lane), self.prefix(lane, &part));
            }
            self.fold(lane, &part, round);
        }
    }

    fn fold(&self, lane: usize, part: &Part, round: &mut Round) {
        let prefix = (self.machine > 0).then(|| self.prefix(lane, part));
        let source = |(at, &rank): (usize, &Rank)| match rank == self.call.rank {
            true => part.input,
            false => self.arrival(lane, at, part),
        };
        let sources = self.members().iter().enumerate().map(source);
        let result = match (self.is_last(), part.root) {
            (false, _) => self.partial(lane, part),
            (true, None) => part.output,
            (true, Some(root)) if root == self.call.rank => part.output,
            (true, Some(_)) => self.result(lane, part),
        };
        let factor = self.factor.filter(|_| self.is_last()).map(ReduceOp::pre_mul_sum);
        if !is_wide(self.call.dtype) {
            round.fold(self.op, result, prefix.into_iter().chain(sources));
            if let Some(factor) = factor {
                round.fold(factor, result, [result]);
            }
            return;
        }
        let partial = self.partial(lane, part);
        let widened = |at| self.widened(lane, at, part);
        sources.enumerate().for_each(|(at, source)| round.widen(widened(at), source));
        let wide = (0..self.members().len()).map(widened);
        round.fold_wide(self.op, partial, prefix.into_iter().chain(wide));
        if let Some(factor) = factor {
            round.fold_wide(factor, partial, [partial]);
        }
        if self.is_last() {
            round.narrow(result, partial);
        }
    }

    /// What has been folded goes to the next machine, from the last one to the root.
    fn hand_on(&self, group: usize, round: &mut Round) {
        for lane in self.own_lanes() {
            let part = self.part(group, lane);
            if !self.is_last() {
                round.send(self.owner(self.machine + 1, lane), self.partial(lane, &part));
            } else if let Some(root) = part.root.filter(|&root| root != self.call.rank) {
                round.send(root, self.result(lane, &part));
            }
        }
    }

    /// The result of an all-reduce comes from the next machine; it goes to the other ranks of this one, and to the one
    /// before.
    fn hand_back(&self, index: usize, round: &mut Round) {
        let lag = 2 * (self.layout.machines() - 1 - self.machine);
        let group = |lag: usize| index.checked_sub(lag).filter(|group| *group < self.groups);
        if let Some(group) = group(lag).filter(|_| !self.is_last()) {
            for lane in self.own_lanes() {
                let next = self.owner(self.machine + 1, lane);
                round.recv(next, self.part(group, lane).output);
            }
        }
        let Some(group) = group(lag + 1) else { return };
        for lane in 0..self.lanes {
            let (owner, output) = (self.owner(self.machine, lane), self.part(group, lane).output);
            if owner != self.call.rank {
                round.recv(owner, output);
                continue;
            }
            self.members().iter().filter(|&&rank| rank != owner).for_each(|&rank| {
                round.send(rank, output);
            });
            if self.machine > 0 {
                round.send(self.owner(self.machine - 1, lane), output);
            }
        }
    }

    /// A root gets the result from the last machine.
    fn take_result(&self, index: usize, round: &mut Round) {
        let last = self.layout.machines() - 1;
        let group = index.checked_sub(last + 1 - self.machine);
        let Some(group) = group.filter(|group| *group < self.groups) else { return };
        for lane in 0..self.lanes {
            let (owner, part) = (self.owner(last, lane), self.part(group, lane));
            if owner != self.call.rank && part.root == Some(self.call.rank) {
                round.recv(owner, part.output);
            }
        }
    }
}
