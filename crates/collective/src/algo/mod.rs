//! Collective algorithms as data: the sends, receives and folds of one rank, round by round.
//!
//! An algorithm is a pure function from an operation, a rank and a topology to a [`Schedule`]. The
//! TCP backend executes schedules on sockets; the simulator executes those of all ranks in virtual
//! time. So the simulation uses the same algorithms as a real run. (Within one machine the host
//! backend has its own algorithms, which fold data in place.)
//!
//! [`plan`] is the entry point: it chooses by the cost model ([`cost`]) among the algorithms that
//! keep the bits promised by [`Determinism`]:
//!
//! * [`flat`] (`Flat`, `Direct`) folds every element once, over all ranks' numbers in rank order.
//! * [`hierarchical`] continues that fold from machine to machine.
//! * [`ring`](mod@ring), [`doubling`], [`tree`] and [`two_level`] fold partial results in another
//!   order. They are used where the order cannot matter: without a fold, for integers, or with
//!   [`Determinism::Fast`].
//!
//! A schedule is generated one round at a time, by number, into a [`Round`] that its executor
//! reuses: a ring of 4,096 ranks has 8,190 rounds per rank, too many to store.

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
pub(crate) use self::cost::{Costs, choose, expected};
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
    /// The output, in a shared buffer, of the rank with this index on this machine.
    Member(usize),
}

/// A range of bytes in a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Region {
    pub(crate) buf: Buf,
    /// Offset in bytes.
    pub(crate) offset: usize,
    /// Length in bytes.
    pub(crate) len: usize,
}

/// Work on this rank's own memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Local {
    /// The regions have the same length and do not overlap.
    Copy { to: Region, from: Region },
    /// `to = prefix . from[0] . from[1] . ...` in this order, see
    /// [`Operands`](crate::simd::Operands). `to` may be one of the sources.
    Fold {
        op: ReduceOp,
        to: Region,
        prefix: Option<Region>,
        /// Indices into [`Round::sources`].
        from: Range<usize>,
        /// Number of ranks by which `Avg` divides; `None` for a partial result.
        ranks: Option<usize>,
    },
}

/// Concurrent messages, followed by work on this rank.
///
/// All sends and receives of a round run concurrently, in any order; when they are done, the local
/// work is done in order, and the next round may begin. Within a round, receives do not overlap
/// sends or other receives. Ranks are not synchronized: a rank begins its next round when its own
/// is done. Between two ranks, messages of one direction arrive in the order of the rounds, and
/// within a round in the order of the lists. No message is empty.
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
        if to.len > 0 {
            let from = self.add_sources(from);
            self.local.push(Local::Fold { op, to, prefix: None, ranks: Some(from.len()), from });
        }
    }

    fn add_sources(&mut self, from: impl IntoIterator<Item = Region>) -> Range<usize> {
        let start = self.sources.len();
        self.sources.extend(from);
        start..self.sources.len()
    }
}

/// One rank's schedule of an operation.
pub(crate) struct Schedule {
    /// Bytes of scratch memory.
    pub(crate) scratch: usize,
    /// Number of rounds.
    pub(crate) rounds: usize,
    fill: Box<Fill>,
}

/// Fills an empty round with the contents of the given round number.
type Fill = dyn Fn(usize, &mut Round) + Send + Sync;

impl Schedule {
    fn new(
        scratch: usize,
        rounds: usize,
        fill: impl Fn(usize, &mut Round) + Send + Sync + 'static,
    ) -> Self {
        Self { scratch, rounds, fill: Box::new(fill) }
    }

    /// Makes a schedule of a single round.
    pub(crate) fn once(only: Round) -> Self {
        Self::new(0, 1, move |_, round| round.clone_from(&only))
    }

    fn empty() -> Self {
        Self::new(0, 0, |_, _| ())
    }

    /// Appends `next`; both use the same scratch memory.
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

    /// Changes every round after it is filled.
    fn and(mut self, change: impl Fn(usize, &mut Round) + Send + Sync + 'static) -> Self {
        let fill = self.fill;
        self.fill = Box::new(move |index, round| {
            fill(index, round);
            change(index, round);
        });
        self
    }

    /// Renumbers the schedule's ranks: rank `i` becomes `ranks[i]`.
    fn among(self, ranks: Vec<Rank>) -> Self {
        self.and(move |_, round| {
            for (rank, _) in round.sends.iter_mut().chain(&mut round.recvs) {
                *rank = ranks[*rank];
            }
        })
    }

    /// Maps every region, with `scratch` more bytes of scratch memory.
    fn on_regions(
        mut self,
        scratch: usize,
        other: impl Fn(Region) -> Region + Send + Sync + 'static,
    ) -> Self {
        self.scratch += scratch;
        self.and(move |_, round| {
            for (_, region) in round.sends.iter_mut().chain(&mut round.recvs) {
                *region = other(*region);
            }
            for region in &mut round.sources {
                *region = other(*region);
            }
            for local in &mut round.local {
                match local {
                    Local::Copy { to, from } => (*to, *from) = (other(*to), other(*from)),
                    Local::Fold { to, prefix, .. } => {
                        *to = other(*to);
                        *prefix = prefix.map(&other);
                    }
                }
            }
        })
    }

    /// Multiplies `region` by `factor` after the last round.
    fn scaled(self, region: Region, factor: f64) -> Self {
        let last = self.rounds - 1;
        self.and(move |index, round| {
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

/// An algorithm for ranks that exchange messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Algorithm {
    /// Every rank sends all its data to the ranks that need them: one round, or, where they are
    /// folded, one for each chunk.
    Flat,
    /// Reduce-scatter between all pairs, where each rank folds its shard once over all ranks'
    /// numbers in rank order, then all-gather between all pairs; in chunks.
    Direct,
    /// A ring; a pipelined chain for broadcast and reduce.
    Ring,
    /// Partners at distances 1, 2, 4, ... exchange all their data.
    RecursiveDoubling,
    /// Rabenseifner's: partners exchange halves, then return the results.
    HalvingDoubling,
    /// A binomial tree, for broadcast and reduce.
    Binomial,
    /// A step within each machine, one between machines, and one within each machine.
    TwoLevel,
    /// Each machine continues the previous machine's fold over its own ranks; the result is sent
    /// back. The buffer is cut into groups, so that all machines are busy at once.
    Hierarchical,
}

impl Algorithm {
    /// All algorithms.
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

/// Returns this rank's schedule with the least expected time; every rank makes the same choice.
pub(crate) fn plan(
    op: &OpDesc,
    rank: Rank,
    layout: &Layout,
    determinism: Determinism,
    costs: &Costs,
) -> Schedule {
    schedule(choose(op, layout, determinism, costs), op, rank, layout, costs, false)
}

/// Returns this rank's schedule for one algorithm, which must be [`able`](Layout::able). `shared`:
/// an all-reduce of a buffer that the ranks of each machine share.
pub(crate) fn schedule(
    algorithm: Algorithm,
    op: &OpDesc,
    rank: Rank,
    layout: &Layout,
    costs: &Costs,
    shared: bool,
) -> Schedule {
    let call = RankCall::new(op, rank, layout.world());
    if op.verb == Verb::Barrier || op.count == 0 {
        return Schedule::empty();
    }
    match algorithm {
        Algorithm::Flat => return flat::flat(call, costs.chunk(op, layout)),
        Algorithm::Direct => return flat::direct(call, costs.chunk(op, layout)),
        Algorithm::Hierarchical => {
            return hierarchical::hierarchical(call, layout, costs.group(op, layout), shared);
        }
        _ => (),
    }
    let (sum, factor) = match op.op {
        Some(ReduceOp::Avg) => (Some(ReduceOp::Sum), Some(1.0 / call.world as f64)),
        Some(ReduceOp::PreMulSum(factor)) => (Some(ReduceOp::Sum), Some(factor.get())),
        other => (other, None),
    };
    let summed = RankCall { op: sum, ..call };
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
struct RankCall {
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

impl RankCall {
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

    /// The other ranks in the order of sending: from the next rank on, so that not all ranks send
    /// to the same one first.
    fn peers(self) -> impl Iterator<Item = Rank> {
        (self.rank + 1..self.world).chain(0..self.rank)
    }

    /// The other ranks in the order of receiving: from the previous rank backwards, in the order in
    /// which they send to this one.
    fn sources(self) -> impl Iterator<Item = Rank> {
        (0..self.rank).rev().chain((self.rank + 1..self.world).rev())
    }

    /// The bytes of a range of elements.
    fn region(self, buf: Buf, elements: Range<usize>) -> Region {
        let Range { start, end } = elements;
        Region { buf, offset: start * self.size, len: (end - start) * self.size }
    }

    /// Block `index` of a buffer of blocks of [`OpDesc::count`] elements.
    fn block(self, buf: Buf, index: usize) -> Region {
        self.region(buf, index * self.count..(index + 1) * self.count)
    }

    /// A whole buffer of [`OpDesc::count`] elements.
    fn whole(self, buf: Buf) -> Region {
        self.block(buf, 0)
    }
}

/// Returns the elements of part `index` of `count` elements, cut into `parts` parts whose sizes
/// differ by at most one.
fn shard(count: usize, parts: usize, index: usize) -> Range<usize> {
    let (each, more) = (count / parts, count % parts);
    let start = |index: usize| each * index + index.min(more);
    start(index)..start(index + 1)
}

/// The elements of chunk `index`.
fn chunk_range(count: usize, chunk: usize, index: usize) -> Range<usize> {
    index * chunk..count.min((index + 1) * chunk)
}

/// The subrange `inner` of the range `outer`.
fn within(outer: &Range<usize>, inner: Range<usize>) -> Range<usize> {
    outer.start + inner.start..outer.start + inner.end
}

/// Equal slots in scratch memory, aligned to cache lines.
#[derive(Clone, Copy, Debug)]
struct Slots {
    offset: usize,
    stride: usize,
}

impl Slots {
    /// Slots of up to `bytes` each, from `offset` on.
    fn new(offset: usize, bytes: usize) -> Self {
        Self { offset, stride: bytes.next_multiple_of(LINE) }
    }

    fn slot(self, index: usize, len: usize) -> Region {
        debug_assert!(len <= self.stride, "fits the slot");
        Region { buf: Buf::Scratch, offset: self.offset + index * self.stride, len }
    }

    /// The end of the first `slots` slots.
    fn end(self, slots: usize) -> usize {
        self.offset + slots * self.stride
    }
}

const LINE: usize = 64;
