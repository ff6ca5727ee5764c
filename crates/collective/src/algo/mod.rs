//! Algorithms between ranks that exchange messages, as data: what one rank sends, receives and
//! folds, round by round.
//!
//! An algorithm is a pure function from an operation, a rank and a topology to a [`Schedule`]. The
//! TCP backend carries schedules out on sockets; the simulator carries out those of all ranks in
//! virtual time. So what is simulated is what runs. (Within one machine the host backend has
//! algorithms of its own, which fold where the data lie.)
//!
//! [`plan`] is the one door: it chooses by the cost model ([`cost`]) among the algorithms that keep
//! the bits promised by [`Determinism`]:
//!
//! * [`flat`] (`Flat`, `Direct`) folds every element once, over all ranks' numbers in rank order.
//! * [`hierarchical`] continues that fold from machine to machine.
//! * [`ring`](mod@ring), [`doubling`], [`tree`] and [`two_level`] fold on the way. They serve when the order
//!   cannot matter: nothing is folded, integers, or [`Determinism::Fast`].
//!
//! A schedule is asked for one round at a time, by number, and fills a [`Round`] that its executor
//! keeps: a ring of 4,096 ranks has 8,190 rounds per rank, none of them worth storing.

mod cost;
mod doubling;
mod flat;
mod hierarchical;
mod layout;
mod memory;
mod ring;
#[cfg(test)]
mod tests;
mod tree;
mod two_level;

use std::fmt;
use std::ops::Range;

pub use self::cost::Link;
pub(crate) use self::cost::{Costs, able, choose, expected};
pub(crate) use self::layout::Layout;
pub(crate) use self::memory::Memory;
use crate::{DType, Determinism, OpDesc, Rank, ReduceOp, Verb};

/// One of the buffers a schedule works on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Buf {
    /// The caller's input, which is only read. Not used by verbs that work in place.
    Input,
    /// The caller's output; for verbs that work in place, also the input.
    Output,
    /// [`Schedule::scratch`] bytes of this rank's own.
    Scratch,
}

/// Some bytes of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Region {
    pub(crate) buf: Buf,
    /// In bytes.
    pub(crate) offset: usize,
    /// In bytes.
    pub(crate) len: usize,
}

/// Work on this rank's own memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Local {
    /// The regions do not overlap.
    Copy { to: Region, from: Region },
    /// `to = from[0] . from[1] . ...` in this order. `to` may be one of the sources. `Avg` divides
    /// by the number of sources, so it is only used where they are all ranks'.
    Fold {
        op: ReduceOp,
        to: Region,
        /// Indices into [`Round::sources`].
        from: Range<usize>,
        /// Of `f32` numbers, in an operation of a type of 16 bits.
        wide: bool,
    },
    /// `f32` numbers of those of 16 bits.
    Widen { to: Region, from: Region },
    /// Numbers of 16 bits of `f32` ones, rounded to nearest even.
    Narrow { to: Region, from: Region },
}

/// What happens at once, then what follows on this rank.
///
/// All sends and receives of a round go on together, in any order; when they are done, the local
/// work is done in order, and the next round may begin. Within a round nothing is received into
/// what is sent, nor twice into the same bytes. Ranks are in no way in step: a rank begins its next
/// round when its own is over. Between two ranks, messages of one direction arrive in the order of
/// the rounds, and within a round in the order of the lists. No message is empty.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Round {
    pub(crate) sends: Vec<(Rank, Region)>,
    pub(crate) recvs: Vec<(Rank, Region)>,
    pub(crate) local: Vec<Local>,
    /// The sources of all folds.
    pub(crate) sources: Vec<Region>,
}

impl Round {
    fn clear(&mut self) {
        self.sends.clear();
        self.recvs.clear();
        self.local.clear();
        self.sources.clear();
    }

    pub(crate) fn send(&mut self, to: Rank, region: Region) {
        if region.len > 0 {
            self.sends.push((to, region));
        }
    }

    pub(crate) fn recv(&mut self, from: Rank, region: Region) {
        if region.len > 0 {
            self.recvs.push((from, region));
        }
    }

    fn copy(&mut self, to: Region, from: Region) {
        if to.len > 0 && to != from {
            self.local.push(Local::Copy { to, from });
        }
    }

    fn fold(&mut self, op: ReduceOp, to: Region, from: impl IntoIterator<Item = Region>) {
        self.fold_as(op, to, from, false);
    }

    fn fold_wide(&mut self, op: ReduceOp, to: Region, from: impl IntoIterator<Item = Region>) {
        self.fold_as(op, to, from, true);
    }

    fn fold_as(
        &mut self,
        op: ReduceOp,
        to: Region,
        from: impl IntoIterator<Item = Region>,
        wide: bool,
    ) {
        if to.len > 0 {
            let start = self.sources.len();
            self.sources.extend(from);
            self.local.push(Local::Fold { op, to, from: start..self.sources.len(), wide });
        }
    }

    fn widen(&mut self, to: Region, from: Region) {
        if to.len > 0 {
            self.local.push(Local::Widen { to, from });
        }
    }

    fn narrow(&mut self, to: Region, from: Region) {
        if to.len > 0 {
            self.local.push(Local::Narrow { to, from });
        }
    }
}

/// One rank's part in an operation.
pub(crate) struct Schedule {
    /// Bytes of scratch memory.
    pub(crate) scratch: usize,
    /// Number of rounds.
    pub(crate) rounds: usize,
    fill: Box<Fill>,
}

/// Adds to an empty round what round number so-and-so is.
type Fill = dyn Fn(usize, &mut Round) + Send + Sync;

impl Schedule {
    fn new(
        scratch: usize,
        rounds: usize,
        fill: impl Fn(usize, &mut Round) + Send + Sync + 'static,
    ) -> Self {
        Self { scratch, rounds, fill: Box::new(fill) }
    }

    /// One round.
    pub(crate) fn once(only: Round) -> Self {
        Self::new(0, 1, move |_, round| round.clone_from(&only))
    }

    fn empty() -> Self {
        Self::new(0, 0, |_, _| ())
    }

    /// This, then `next`, in the same scratch memory.
    fn then(self, next: Self) -> Self {
        if self.rounds == 0 {
            return Self { scratch: self.scratch.max(next.scratch), ..next };
        }
        let (scratch, rounds) = (self.scratch.max(next.scratch), self.rounds + next.rounds);
        Self::new(scratch, rounds, move |index, round| match index.checked_sub(self.rounds) {
            None => (self.fill)(index, round),
            Some(index) => (next.fill)(index, round),
        })
    }

    /// Rank `i` of the schedule is `ranks[i]`.
    fn among(self, ranks: Vec<Rank>) -> Self {
        Self::new(self.scratch, self.rounds, move |index, round| {
            (self.fill)(index, round);
            for (rank, _) in round.sends.iter_mut().chain(&mut round.recvs) {
                *rank = ranks[*rank];
            }
        })
    }

    /// Every region is another one, with `scratch` bytes more of scratch memory.
    fn on_regions(
        self,
        scratch: usize,
        other: impl Fn(Region) -> Region + Send + Sync + 'static,
    ) -> Self {
        Self::new(self.scratch + scratch, self.rounds, move |index, round| {
            (self.fill)(index, round);
            for (_, region) in round.sends.iter_mut().chain(&mut round.recvs) {
                *region = other(*region);
            }
            for region in &mut round.sources {
                *region = other(*region);
            }
            for local in &mut round.local {
                match local {
                    Local::Copy { to, from }
                    | Local::Widen { to, from }
                    | Local::Narrow { to, from } => (*to, *from) = (other(*to), other(*from)),
                    Local::Fold { to, .. } => *to = other(*to),
                }
            }
        })
    }

    /// Multiplies `region` by `factor` at the end.
    fn scaled(self, region: Region, factor: f64) -> Self {
        let last = self.rounds - 1;
        Self::new(self.scratch, self.rounds, move |index, round| {
            (self.fill)(index, round);
            if index == last {
                round.fold(ReduceOp::pre_mul_sum(factor), region, [region]);
            }
        })
    }

    /// Overwrites `round` with round number `index`, `0..rounds`.
    pub(crate) fn round(&self, index: usize, round: &mut Round) {
        debug_assert!(index < self.rounds, "round {index} of {}", self.rounds);
        round.clear();
        (self.fill)(index, round);
    }
}

impl fmt::Debug for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { scratch, rounds, .. } = self;
        f.debug_struct("Schedule").field("scratch", scratch).field("rounds", rounds).finish()
    }
}

/// How ranks that exchange messages do an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Algorithm {
    /// Everybody sends everything to whoever needs it, who folds it: one round.
    Flat,
    /// Reduce-scatter between all pairs, each rank folding its shard once over all ranks' numbers
    /// in rank order, then all-gather between all pairs; in chunks.
    Direct,
    /// A ring; for broadcast and reduce a pipelined chain.
    Ring,
    /// Partners at distances 1, 2, 4, ... exchange all they have.
    RecursiveDoubling,
    /// Rabenseifner's: partners exchange halves, then return them.
    HalvingDoubling,
    /// A binomial tree; for all-reduce up and down again.
    Binomial,
    /// Within each machine, between machines, within each machine.
    TwoLevel,
    /// Each machine continues the fold of the one before over its own ranks; the result runs back. In groups, with
    /// all machines busy at once.
    Hierarchical,
}

impl Algorithm {
    /// Every algorithm.
    pub const ALL: [Self; 8] = [
        Self::Flat,
        Self::Direct,
        Self::Ring,
        Self::RecursiveDoubling,
        Self::HalvingDoubling,
        Self::Binomial,
        Self::TwoLevel,
        Self::Hierarchical,
    ];
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Flat => "flat",
            Self::Direct => "direct",
            Self::Ring => "ring",
            Self::RecursiveDoubling => "recursive doubling",
            Self::HalvingDoubling => "halving-doubling",
            Self::Binomial => "binomial",
            Self::TwoLevel => "two-level",
            Self::Hierarchical => "hierarchical",
        })
    }
}

/// How this rank carries out the operation in the least expected time, by the same choice on every
/// rank.
pub(crate) fn plan(
    op: &OpDesc,
    rank: Rank,
    layout: &Layout,
    determinism: Determinism,
    costs: &Costs,
) -> Schedule {
    schedule(choose(op, layout, determinism, costs), op, rank, layout, costs)
}

/// How this rank carries out the operation by one algorithm, which must be [`able`].
pub(crate) fn schedule(
    algorithm: Algorithm,
    op: &OpDesc,
    rank: Rank,
    layout: &Layout,
    costs: &Costs,
) -> Schedule {
    let call = Call::new(op, rank, layout.world());
    if op.verb == Verb::Barrier || op.count == 0 {
        return Schedule::empty();
    }
    match algorithm {
        Algorithm::Flat => return flat::flat(call),
        Algorithm::Direct => return flat::direct(call, costs.chunk(op, layout)),
        Algorithm::Hierarchical => {
            return hierarchical::hierarchical(call, layout, costs.group(op, layout));
        }
        _ => (),
    }
    let (sum, factor) = match op.op {
        Some(ReduceOp::Avg) => (Some(ReduceOp::Sum), Some(1.0 / call.world as f64)),
        Some(ReduceOp::PreMulSum(factor)) => (Some(ReduceOp::Sum), Some(factor.get())),
        other => (other, None),
    };
    let summed = Call { op: sum, ..call };
    let schedule = match algorithm {
        Algorithm::Ring => ring::ring(summed, layout, costs.chain_chunk(op, layout)),
        Algorithm::RecursiveDoubling => doubling::recursive_doubling(summed),
        Algorithm::HalvingDoubling => doubling::halving_doubling(summed),
        Algorithm::Binomial => tree::binomial(summed, layout),
        Algorithm::TwoLevel => two_level::two_level(summed, layout, costs),
        Algorithm::Flat | Algorithm::Direct | Algorithm::Hierarchical => {
            unreachable!("returned above")
        }
    };
    match factor {
        Some(factor) if op.verb != Verb::Reduce || call.is_root() => {
            schedule.scaled(call.whole(Buf::Output), factor)
        }
        _ => schedule,
    }
}

/// One rank's view of an operation.
#[derive(Clone, Copy, Debug)]
struct Call {
    verb: Verb,
    op: Option<ReduceOp>,
    dtype: DType,
    root: Rank,
    /// Elements, as in [`OpDesc::count`].
    count: usize,
    /// Bytes of an element.
    size: usize,
    rank: Rank,
    world: usize,
}

impl Call {
    fn new(op: &OpDesc, rank: Rank, world: usize) -> Self {
        Self {
            verb: op.verb,
            op: op.op,
            dtype: op.dtype,
            root: op.root.unwrap_or(0),
            count: op.count,
            size: op.dtype.size(),
            rank,
            world,
        }
    }

    fn is_root(self) -> bool {
        self.rank == self.root
    }

    fn reduce_op(self) -> ReduceOp {
        self.op.expect("the verb reduces, so it was called with an operator")
    }

    /// The other ranks, from the next one round, so that not all go to the same one first.
    fn peers(self) -> impl Iterator<Item = Rank> {
        (self.rank + 1..self.world).chain(0..self.rank)
    }

    /// The other ranks, from the one before this backwards: who sends to this rank first.
    fn sources(self) -> impl Iterator<Item = Rank> {
        (0..self.rank).rev().chain((self.rank + 1..self.world).rev())
    }

    /// Bytes for elements of a buffer.
    fn region(self, buf: Buf, elements: Range<usize>) -> Region {
        let Range { start, end } = elements;
        Region { buf, offset: start * self.size, len: (end - start) * self.size }
    }

    /// Block `index` of a buffer of blocks of [`OpDesc::count`] elements.
    fn block(self, buf: Buf, index: usize) -> Region {
        self.region(buf, index * self.count..(index + 1) * self.count)
    }

    /// The whole of a buffer of [`OpDesc::count`] elements.
    fn whole(self, buf: Buf) -> Region {
        self.block(buf, 0)
    }
}

/// The elements of part `index` of `count` elements cut into `parts` whose sizes differ by one at
/// most.
fn shard(count: usize, parts: usize, index: usize) -> Range<usize> {
    let (each, more) = (count / parts, count % parts);
    let start = |index: usize| each * index + index.min(more);
    start(index)..start(index + 1)
}

/// The elements of chunk `index`.
fn chunk_range(count: usize, chunk: usize, index: usize) -> Range<usize> {
    index * chunk..count.min((index + 1) * chunk)
}

/// Elements `inner` of the elements `outer`.
fn within(outer: &Range<usize>, inner: Range<usize>) -> Range<usize> {
    outer.start + inner.start..outer.start + inner.end
}

/// Equal places in scratch memory, apart by whole cache lines.
#[derive(Clone, Copy, Debug)]
struct Slots {
    offset: usize,
    stride: usize,
}

impl Slots {
    /// Places of up to `bytes` each, from `offset` on.
    fn new(offset: usize, bytes: usize) -> Self {
        Self { offset, stride: bytes.next_multiple_of(LINE) }
    }

    fn slot(self, index: usize, len: usize) -> Region {
        debug_assert!(len <= self.stride, "fits the slot");
        Region { buf: Buf::Scratch, offset: self.offset + index * self.stride, len }
    }

    /// The end of `slots` places.
    fn end(self, slots: usize) -> usize {
        self.offset + slots * self.stride
    }
}

const LINE: usize = 64;
