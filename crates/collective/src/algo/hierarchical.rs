//! Reduces over several machines with the bits of rank order, sending the numbers through each
//! machine's interface once.
//!
//! A fold from left to right can be cut anywhere. The first machine folds its ranks' numbers, each
//! following machine continues the fold over its own, and the last machine has the result, which is
//! sent back. So a machine sends only its partial result and the final result, however many ranks
//! it has. Partial results of 16-bit types are sent as the `f32` in which they are folded, and
//! rounded once, by the last machine.
//!
//! The numbers are cut into groups, so that each machine works on a different group at the same
//! time, and each group into stripes: a stripe is folded by one rank of each machine, its *owner*,
//! which receives the other ranks' numbers and sends them the result. In round `t` the ranks of
//! machine `m` collect group `t`, which the previous machine forwarded in its round `t + 1`; they
//! forward group `t - 1`; and they receive the result of group `t - 2 (M - 1 - m)`, for `M`
//! machines. With a root the last machine sends the result to the root instead.
//!
//! In a buffer that the ranks of each machine share, owners read the other ranks' numbers and store
//! the results in place. At the end the ranks of a machine notify each other that they are done.

use super::{
    Buf, Layout, Local, RankCall, Region, Round, Schedule, Slots, chunk_range, shard, within,
};
use crate::simd::acc_size;
use crate::{Rank, Verb};

/// The hierarchical algorithm, on groups of `chunk` elements. `layout` has several machines, and is
/// in order unless the order of ranks does not matter.
///
/// With `shared`, for an all-reduce, the output is in a shared buffer.
pub(super) fn hierarchical(
    call: RankCall,
    layout: &Layout,
    chunk: usize,
    shared: bool,
) -> Schedule {
    let chain = Chain::new(call, layout, chunk, shared);
    let (scratch, rounds) = (chain.scratch_bytes(chain.owned()), chain.rounds());
    Schedule::new(scratch, rounds + usize::from(shared), move |index, round| {
        if index == rounds {
            return chain.notify_members(round);
        }
        if index < chain.groups {
            chain.collect(index, round);
        }
        if let Some(group) = index.checked_sub(1).filter(|group| *group < chain.groups) {
            chain.forward(group, round);
        }
        if call.verb == Verb::AllReduce {
            chain.return_result(index, round);
        } else {
            chain.receive_result(index, round);
        }
    })
}

#[derive(Debug)]
struct Chain {
    call: RankCall,
    layout: Layout,
    /// Whether the output is in a shared buffer.
    shared: bool,
    machine: usize,
    /// Elements per group, and groups per block.
    chunk: usize,
    per_block: usize,
    groups: usize,
    stripes: usize,
    slots: Slots,
}

/// The fold of one stripe of a group.
struct Part {
    input: Region,
    output: Region,
    /// The only rank that gets the result, if there is one.
    root: Option<Rank>,
}

impl Chain {
    fn new(call: RankCall, layout: &Layout, chunk: usize, shared: bool) -> Self {
        let chunk = chunk.clamp(1, call.count);
        let per_block = call.count.div_ceil(chunk);
        let blocks = if call.verb == Verb::ReduceScatter { call.world } else { 1 };
        let stripes = layout.widest();
        Self {
            call,
            layout: layout.clone(),
            shared,
            machine: layout.machine(call.rank),
            chunk,
            per_block,
            groups: blocks * per_block,
            stripes,
            slots: Slots::new(0, chunk.div_ceil(stripes) * acc_size(call.dtype)),
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

    fn owner(&self, machine: usize, stripe: usize) -> Rank {
        let members = self.layout.members(machine);
        members[stripe % members.len()]
    }

    fn is_own(&self, stripe: usize) -> bool {
        self.owner(self.machine, stripe) == self.call.rank
    }

    fn own_stripes(&self) -> impl Iterator<Item = usize> {
        (0..self.stripes).filter(|&stripe| self.is_own(stripe))
    }

    /// Largest number of stripes owned by a rank of this machine.
    fn owned(&self) -> usize {
        self.stripes.div_ceil(self.members().len())
    }

    fn part(&self, group: usize, stripe: usize) -> Part {
        let call = self.call;
        let (block, index) = (group / self.per_block, group % self.per_block);
        let group = chunk_range(call.count, self.chunk, index);
        let own = within(&group, shard(group.len(), self.stripes, stripe));
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

    /// Bytes of scratch memory for `stripes` stripes. Each has the members' numbers, the prefix,
    /// and the partial result or, in the last machine, the result for a root on another rank.
    fn scratch_bytes(&self, stripes: usize) -> usize {
        self.slots.end(stripes * (self.members().len() + 2))
    }

    fn slot(&self, stripe: usize, index: usize, len: usize) -> Region {
        let members = self.members().len();
        self.slots.slot(stripe / members * (members + 2) + index, len)
    }

    fn arrival(&self, stripe: usize, member: usize, part: &Part) -> Region {
        self.slot(stripe, member, part.input.len)
    }

    /// Bytes of a part in the type in which it is folded.
    fn folded(&self, part: &Part) -> usize {
        part.input.len / self.call.size * acc_size(self.call.dtype)
    }

    fn prefix(&self, stripe: usize, part: &Part) -> Region {
        self.slot(stripe, self.members().len(), self.folded(part))
    }

    /// The data that this rank sends after a fold.
    fn result(&self, stripe: usize, part: &Part) -> Region {
        let len = if self.is_last() { part.input.len } else { self.folded(part) };
        self.slot(stripe, self.members().len() + 1, len)
    }

    /// The other ranks of this machine, with their indices.
    fn others(&self) -> impl Iterator<Item = (usize, Rank)> {
        let members = self.members().iter().copied().enumerate();
        members.filter(|&(_, rank)| rank != self.call.rank)
    }

    /// Sends numbers to the owners of their stripes, which fold them.
    fn collect(&self, group: usize, round: &mut Round) {
        for stripe in 0..self.stripes {
            let part = self.part(group, stripe);
            let owner = self.owner(self.machine, stripe);
            if owner != self.call.rank {
                if !self.shared {
                    round.send(owner, part.input);
                }
                continue;
            }
            if !self.shared {
                for (at, rank) in self.others() {
                    round.recv(rank, self.arrival(stripe, at, &part));
                }
            }
            if self.machine > 0 {
                round.recv(self.owner(self.machine - 1, stripe), self.prefix(stripe, &part));
            }
            self.fold(stripe, &part, round);
            if self.is_last() {
                self.store(&part, round);
            }
        }
    }

    /// Stores a result into the shared buffers of the other ranks.
    fn store(&self, part: &Part, round: &mut Round) {
        if self.shared {
            for (at, _) in self.others() {
                round.copy(Region { buf: Buf::Member(at), ..part.output }, part.output);
            }
        }
    }

    /// Exchanges a byte with the other ranks of this machine.
    fn notify_members(&self, round: &mut Round) {
        for (at, rank) in self.others() {
            round.send(rank, self.slot(0, self.members().len(), 1));
            round.recv(rank, self.slot(0, at, 1));
        }
    }

    fn fold(&self, stripe: usize, part: &Part, round: &mut Round) {
        let prefix = (self.machine > 0).then(|| self.prefix(stripe, part));
        let source = |(at, &rank): (usize, &Rank)| match rank == self.call.rank {
            true => part.input,
            false if self.shared => Region { buf: Buf::Member(at), ..part.input },
            false => self.arrival(stripe, at, part),
        };
        let to_self = part.root.is_none_or(|root| root == self.call.rank);
        let to = match self.is_last() && to_self {
            true => part.output,
            false => self.result(stripe, part),
        };
        if to.len > 0 {
            let from = round.add_sources(self.members().iter().enumerate().map(source));
            let ranks = self.is_last().then_some(self.call.world);
            round.local.push(Local::Fold { op: self.call.reduce_op(), to, prefix, from, ranks });
        }
    }

    /// Forwards the partial result to the next machine, or the final result from the last machine
    /// to the root.
    fn forward(&self, group: usize, round: &mut Round) {
        for stripe in self.own_stripes() {
            let part = self.part(group, stripe);
            if !self.is_last() {
                round.send(self.owner(self.machine + 1, stripe), self.result(stripe, &part));
            } else if let Some(root) = part.root.filter(|&root| root != self.call.rank) {
                round.send(root, self.result(stripe, &part));
            }
        }
    }

    /// Receives the result of an all-reduce from the next machine, and sends it to the other ranks
    /// of this machine and to the previous machine.
    fn return_result(&self, index: usize, round: &mut Round) {
        let lag = 2 * (self.layout.machines() - 1 - self.machine);
        let group = |lag: usize| index.checked_sub(lag).filter(|group| *group < self.groups);
        if let Some(group) = group(lag).filter(|_| !self.is_last()) {
            for stripe in self.own_stripes() {
                let (next, part) = (self.owner(self.machine + 1, stripe), self.part(group, stripe));
                round.recv(next, part.output);
                self.store(&part, round);
            }
        }
        let Some(group) = group(lag + 1) else { return };
        for stripe in 0..self.stripes {
            let (owner, part) = (self.owner(self.machine, stripe), self.part(group, stripe));
            if owner != self.call.rank {
                if !self.shared {
                    round.recv(owner, part.output);
                }
                continue;
            }
            if !self.shared {
                self.others().for_each(|(_, rank)| round.send(rank, part.output));
            }
            if self.machine > 0 {
                round.send(self.owner(self.machine - 1, stripe), part.output);
            }
        }
    }

    /// Receives the result from the last machine, on a root.
    fn receive_result(&self, index: usize, round: &mut Round) {
        let last = self.layout.machines() - 1;
        let group = index.checked_sub(last + 1 - self.machine);
        let Some(group) = group.filter(|group| *group < self.groups) else { return };
        for stripe in 0..self.stripes {
            let (owner, part) = (self.owner(last, stripe), self.part(group, stripe));
            if owner != self.call.rank && part.root == Some(self.call.rank) {
                round.recv(owner, part.output);
            }
        }
    }
}
