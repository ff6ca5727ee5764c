//! Reduces or gathers within each machine, then between machines, then distributes within each
//! machine.
//!
//! One rank of each machine, its leader, communicates with other machines. The leader is the root,
//! if it is on the machine, else the first rank. So a machine's network interface carries the data
//! of one rank instead of all. The parts are operations on subgroups; the cost model chooses their
//! algorithms.

use std::ops::Range;

use super::{Buf, Costs, Layout, RankCall, Region, Round, Schedule, Slots};
use crate::{Determinism, OpDesc, Rank, Verb};

/// The two-level algorithm.
pub(super) fn two_level(call: RankCall, layout: &Layout, costs: &Costs) -> Schedule {
    let levels = Levels { call, layout, costs };
    match call.verb {
        Verb::AllReduce | Verb::Reduce | Verb::Broadcast => levels.compose(),
        Verb::AllGather | Verb::Counts => levels.all_gather(),
        Verb::ReduceScatter => levels.reduce_scatter(),
        verb => unreachable!("{verb} has no two-level algorithm"),
    }
}

#[derive(Clone, Copy, Debug)]
struct Levels<'a> {
    call: RankCall,
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

    /// Runs the [`parts`] of a verb one after another.
    fn compose(self) -> Schedule {
        let mut all = Schedule::empty();
        for &(level, verb) in parts(self.call.verb) {
            all = all.then(match level {
                Level::Inside => self.inside(verb, self.call.count),
                Level::Outside if self.is_leader() => self.outside(verb),
                Level::Outside => Schedule::empty(),
            });
        }
        // Only the root's buffer may change, so the other leaders reduce a copy.
        match self.call.verb == Verb::Reduce && self.is_leader() && !self.call.is_root() {
            true => on_copy(self.call.whole(Buf::Output), all),
            false => all,
        }
    }

    /// Sends the blocks to the leaders, exchanges them between leaders, and sends all blocks to all
    /// ranks.
    fn all_gather(self) -> Schedule {
        let (call, leader) = (self.call, self.leader(self.machine()));
        let rest = self.inside(Verb::Broadcast, call.count * call.world);
        if call.rank != leader {
            let give = move |_, round: &mut Round| round.send(leader, call.whole(Buf::Input));
            return Schedule::new(0, 1, give).then(rest);
        }
        let (members, peers) = (self.other_members(), self.other_leaders());
        let mine = runs(self.layout.members(self.machine()));
        let output = move |run: &Range<Rank>| {
            call.region(Buf::Output, run.start * call.count..run.end * call.count)
        };
        let gather = Schedule::new(0, 2, move |index, round| {
            if index == 0 {
                members.iter().for_each(|&rank| round.recv(rank, output(&(rank..rank + 1))));
                return round.copy(output(&(call.rank..call.rank + 1)), call.whole(Buf::Input));
            }
            for (peer, theirs) in &peers {
                mine.iter().for_each(|run| round.send(*peer, output(run)));
                theirs.iter().for_each(|run| round.recv(*peer, output(run)));
            }
        });
        gather.then(rest)
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
        let block = call.count * call.size;
        let place = move |run: &Range<Rank>| Region {
            buf: Buf::Scratch,
            offset: run.start * block,
            len: run.len() * block,
        };
        let (members, peers) = (self.other_members(), self.other_leaders());
        let mine = self.layout.members(self.machine());
        let slots = Slots::new(Slots::new(0, input.len).end(1), mine.len() * block);
        let mine = runs(mine);
        let rest = Schedule::new(slots.end(peers.len()), 2, move |index, round| {
            if index == 1 {
                members.iter().for_each(|&rank| round.send(rank, place(&(rank..rank + 1))));
                return round.copy(call.whole(Buf::Output), place(&(call.rank..call.rank + 1)));
            }
            // Each leader gets and folds the sums of its own machine's blocks.
            for (peer, theirs) in &peers {
                theirs.iter().for_each(|run| round.send(*peer, place(run)));
            }
            let mut done = 0;
            for run in &mine {
                let len = run.len() * block;
                let arrived = |index: usize| {
                    let region = slots.slot(index, len);
                    Region { offset: region.offset + done, ..region }
                };
                for (index, (peer, _)) in peers.iter().enumerate() {
                    round.recv(*peer, arrived(index));
                }
                let sources = std::iter::once(place(run)).chain((0..peers.len()).map(arrived));
                round.fold(call.reduce_op(), place(run), sources);
                done += len;
            }
        });
        on_copy(input, inside).then(rest)
    }
}

/// The ranks of a part of the algorithm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Level {
    /// Those of each machine.
    Inside,
    /// The leaders of the machines.
    Outside,
}

/// The parts of an all-reduce, a reduce or a broadcast: the ranks, and their operation.
pub(super) fn parts(verb: Verb) -> &'static [(Level, Verb)] {
    use Level::{Inside, Outside};
    match verb {
        Verb::Reduce => &[(Inside, Verb::Reduce), (Outside, Verb::Reduce)],
        Verb::Broadcast => &[(Outside, Verb::Broadcast), (Inside, Verb::Broadcast)],
        _ => &[(Inside, Verb::Reduce), (Outside, Verb::AllReduce), (Inside, Verb::Broadcast)],
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
