//! Reduces or gathers within each machine, then between machines, then distributes within each
//! machine.
//!
//! One rank of each machine, its leader, communicates with other machines. The leader is the root, if
//! it is on the machine, else the first rank. So a machine's network interface carries the data of one
//! rank instead of all. The parts are operations on subgroups; the cost model chooses their algorithms.

use std::ops::Range;

use super::{Buf, Call, Costs, Layout, Region, Round, Schedule, Slots};
use crate::{Determinism, OpDesc, Rank, Verb};

/// The two-level algorithm.
pub(super) fn two_level(call: Call, layout: &Layout, costs: &Costs) -> Schedule {
    let levels = Levels { call, layout, costs };
    match call.verb {
        Verb::AllReduce => levels.all_reduce(),
        Verb::Reduce => levels.reduce(),
        Verb::Broadcast => levels.broadcast(),
        Verb::AllGather | Verb::Counts => levels.all_gather(),
        Verb::ReduceScatter => levels.reduce_scatter(),
        verb => unreachable!("{verb} has no two-level algorithm"),
    }
}

#[derive(Clone, Copy, Debug)]
struct Levels<'a> {
    call: Call,
    layout: &'a Layout,
    costs: &'a Costs,
}

impl Levels<'_> {
    fn machine(self) -> usize {
        self.layout.machine(self.call.rank)
    }

    fn leader(self, machine: usize) -> Rank {
        let has_root = self.call.verb.has_root() && self.layout.machine(self.call.root) == machine;
        if has_root { self.call.root } else { self.layout.members(machine)[0] }
    }

    fn is_leader(self) -> bool {
        self.leader(self.machine()) == self.call.rank
    }

    /// A verb among the ranks of this machine on `count` elements; the leader is the root.
    fn inside(self, verb: Verb, count: usize) -> Schedule {
        let members = self.layout.members(self.machine());
        let layout = Layout::blocks(members.len(), members.len());
        self.part(verb, count, members.to_vec(), self.leader(self.machine()), &layout)
    }

    /// A verb among the leaders; this rank must be one.
    fn outside(self, verb: Verb) -> Schedule {
        let leaders: Vec<Rank> =
            (0..self.layout.machines()).map(|machine| self.leader(machine)).collect();
        let layout = Layout::blocks(leaders.len(), 1);
        self.part(verb, self.call.count, leaders, self.call.root, &layout)
    }

    fn part(
        self,
        verb: Verb,
        count: usize,
        ranks: Vec<Rank>,
        root: Rank,
        layout: &Layout,
    ) -> Schedule {
        let index = |rank| ranks.iter().position(|&other| other == rank);
        let me = index(self.call.rank).expect("this rank takes part");
        let op = OpDesc {
            verb,
            dtype: self.call.dtype,
            op: self.call.op.filter(|_| verb != Verb::Broadcast),
            root: verb.has_root().then(|| index(root).expect("the root takes part")),
            count,
        };
        super::plan(&op, me, layout, Determinism::Fast, self.costs).among(ranks)
    }

    fn all_reduce(self) -> Schedule {
        let Call { count, .. } = self.call;
        let first = self.inside(Verb::Reduce, count);
        let middle =
            if self.is_leader() { self.outside(Verb::AllReduce) } else { Schedule::empty() };
        first.then(middle).then(self.inside(Verb::Broadcast, count))
    }

    fn broadcast(self) -> Schedule {
        let first =
            if self.is_leader() { self.outside(Verb::Broadcast) } else { Schedule::empty() };
        first.then(self.inside(Verb::Broadcast, self.call.count))
    }

    fn reduce(self) -> Schedule {
        let whole = self.call.whole(Buf::Output);
        let first = self.inside(Verb::Reduce, self.call.count);
        if !self.is_leader() {
            return first;
        }
        let both = first.then(self.outside(Verb::Reduce));
        if self.call.is_root() {
            return both;
        }
        // Only the root's buffer may change, so the other leaders work on a copy.
        on_copy(whole, both)
    }

    /// Sends the blocks to the leaders, exchanges them between leaders, and sends all blocks to all ranks.
    fn all_gather(self) -> Schedule {
        let (call, machine) = (self.call, self.machine());
        let own = Schedule::new(0, 1, move |_, round| {
            round.copy(call.block(Buf::Output, call.rank), call.whole(Buf::Input));
        });
        let output = move |run: &Range<Rank>| {
            call.region(Buf::Output, run.start * call.count..run.end * call.count)
        };
        let collect = self.collect(own, move |rank| call.block(Buf::Output, rank));
        let between = if self.is_leader() {
            let peers = self.other_leaders();
            let mine = runs(self.layout.members(machine));
            Schedule::new(0, 1, move |_, round| {
                for (peer, theirs) in &peers {
                    mine.iter().for_each(|run| round.send(*peer, output(run)));
                    theirs.iter().for_each(|run| round.recv(*peer, output(run)));
                }
            })
        } else {
            Schedule::empty()
        };
        let rest = self.inside(Verb::Broadcast, call.count * call.world);
        collect.then(between).then(rest)
    }

    /// Sends the inputs of all ranks but the leader to the leader, after `own` on the leader.
    fn collect(
        self,
        own: Schedule,
        place: impl Fn(Rank) -> Region + Send + Sync + 'static,
    ) -> Schedule {
        let (call, leader) = (self.call, self.leader(self.machine()));
        if call.rank != leader {
            return Schedule::new(0, 1, move |_, round| {
                round.send(leader, call.whole(Buf::Input));
            });
        }
        let members = self.other_members();
        own.then(Schedule::new(0, 1, move |_, round| {
            members.iter().for_each(|&rank| round.recv(rank, place(rank)));
        }))
    }

    fn other_members(self) -> Vec<Rank> {
        let members = self.layout.members(self.machine()).iter().copied();
        members.filter(|&rank| rank != self.call.rank).collect()
    }

    /// The other leaders, from the next machine on, with the rank ranges of their machines.
    fn other_leaders(self) -> Vec<(Rank, Vec<Range<Rank>>)> {
        let machines = self.layout.machines();
        let others = (1..machines).map(|step| (self.machine() + step) % machines);
        others.map(|machine| (self.leader(machine), runs(self.layout.members(machine)))).collect()
    }

    /// Reduces all blocks to the leaders, then between leaders, and sends each block to its rank.
    fn reduce_scatter(self) -> Schedule {
        let (call, world) = (self.call, self.call.world);
        let inside = self.inside(Verb::Reduce, call.count * world);
        let input = call.region(Buf::Input, 0..call.count * world);
        let leader = self.leader(self.machine());
        if call.rank != leader {
            // A reduce does not change the buffers of ranks other than the root, so it may work on
            // the input.
            let inside = inside.on_regions(0, move |region| match region.buf {
                Buf::Output => Region { buf: Buf::Input, ..region },
                _ => region,
            });
            let take = move |_, round: &mut Round| round.recv(leader, call.whole(Buf::Output));
            return inside.then(Schedule::new(0, 1, take));
        }
        let sums = Slots::new(0, input.len);
        let place = move |run: &Range<Rank>| {
            let block = call.count * call.size;
            Region { buf: Buf::Scratch, offset: run.start * block, len: run.len() * block }
        };
        let members = self.other_members();
        let distribute = Schedule::new(0, 1, move |_, round| {
            members.iter().for_each(|&rank| round.send(rank, place(&(rank..rank + 1))));
            round.copy(call.whole(Buf::Output), place(&(call.rank..call.rank + 1)));
        });
        let between = self.fold_between(sums.end(1), place);
        on_copy(input, inside).then(between).then(distribute)
    }

    /// Exchanges and folds the sums of blocks between leaders: each leader gets those of its own machine.
    /// `place` maps ranks to the region of their blocks' sums; scratch memory is free from `scratch` on.
    fn fold_between(
        self,
        scratch: usize,
        place: impl Fn(&Range<Rank>) -> Region + Send + Sync + 'static,
    ) -> Schedule {
        let peers = self.other_leaders();
        let members = self.layout.members(self.machine());
        let mine = runs(members);
        let block = self.call.count * self.call.size;
        let slots = Slots::new(scratch, members.len() * block);
        let op = self.call.reduce_op();
        Schedule::new(slots.end(peers.len()), 1, move |_, round| {
            for (peer, theirs) in &peers {
                theirs.iter().for_each(|run| round.send(*peer, place(run)));
            }
            let mut done = 0;
            for run in &mine {
                let len = run.len() * block;
                let arrived = |index: usize| {
                    let mut region = slots.slot(index, len);
                    region.offset += done;
                    region
                };
                for (index, (peer, _)) in peers.iter().enumerate() {
                    round.recv(*peer, arrived(index));
                }
                let sources = std::iter::once(place(run)).chain((0..peers.len()).map(arrived));
                round.fold(op, place(run), sources);
                done += len;
            }
        })
    }
}

/// Merges consecutive ranks into ranges.
fn runs(ranks: &[Rank]) -> Vec<Range<Rank>> {
    let mut runs: Vec<Range<Rank>> = Vec::new();
    for &rank in ranks {
        match runs.last_mut() {
            Some(run) if run.end == rank => run.end += 1,
            _ => runs.push(rank..rank + 1),
        }
    }
    runs
}

/// Runs a schedule on a copy of `original`, at the start of scratch memory, instead of the output.
fn on_copy(original: Region, schedule: Schedule) -> Schedule {
    let copy = Slots::new(0, original.len);
    let make = Schedule::new(copy.end(1), 1, move |_, round| {
        round.copy(copy.slot(0, original.len), original);
    });
    let shift = copy.end(1);
    make.then(schedule.on_regions(shift, move |region| match region.buf {
        Buf::Output => Region { buf: Buf::Scratch, ..region },
        Buf::Scratch => Region { offset: region.offset + shift, ..region },
        Buf::Input | Buf::Member(_) => region,
    }))
}
