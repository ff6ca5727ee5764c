//! Cost model, and the choice of the cheapest algorithm.
//!
//! The model is alpha-beta-gamma with the latency split as in LogGP: a message of `n` bytes takes
//! `latency + per_message + n * per_byte` (alpha is the first two); folding `n` bytes takes `n *
//! fold_per_byte`. Of several concurrent messages, a rank starts one every `per_message`, its
//! machine's network interface sends one after the other, and only the first waits for the latency.
//! Ranks of one machine share the interface in each direction; between ranks of one machine there
//! is another [`Link`], which is not shared. Copies within a rank are free.
//!
//! Sources: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in
//! MPICH", 2005 (recursive doubling, halving-doubling, binomial trees, scatter and all-gather);
//! Patarasuk, Yuan, "Bandwidth Optimal All-reduce Algorithms", 2009 (ring); Alexandrov, Ionescu,
//! Schauser, Scheiman, "LogGP", 1995 (messages in a row).
//!
//! Every rank must make the same choice, so it depends only on values that all ranks know.

use super::ring::PIECE as RING_PIECE;
use super::two_level::{Level, parts};
use super::{Algorithm, Layout};
use crate::simd::acc_size;
use crate::{DType, Determinism, OpDesc, ReduceOp, Verb};

/// Cost of a message from one rank to another.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Link {
    /// Seconds until the first byte arrives, during which other messages can be in flight.
    pub latency: f64,
    /// Seconds that a rank spends on each message, sending or receiving.
    pub per_message: f64,
    /// Seconds for each byte: one over the bandwidth of one direction.
    pub per_byte: f64,
}

impl Link {
    /// Seconds for an empty message.
    fn alpha(self) -> f64 {
        self.latency + self.per_message
    }

    /// Seconds for a message.
    fn message(self, bytes: f64) -> f64 {
        self.alpha() + bytes * self.per_byte
    }
}

/// Costs of messages and folds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Costs {
    /// Between ranks of one machine.
    pub(crate) within: Link,
    /// Between machines, for all ranks of a machine together.
    pub(crate) between: Link,
    /// Seconds to fold one byte into others.
    pub(crate) fold_per_byte: f64,
    /// Minimum size of a chunk in bytes.
    pub(crate) min_chunk: usize,
}

/// Maximum size of a group of the hierarchical algorithm, unless [`Costs::min_chunk`] requires
/// larger ones.
const MAX_GROUP_BYTES: f64 = (160 << 10) as f64;

/// Maximum size of a buffer that is reduced by an algorithm whose scratch memory is as large.
/// Larger scratch memory exceeds the caches; then algorithms that work in parts are faster, though
/// the model does not show it.
const MAX_WHOLE_BYTES: usize = 4 << 20;

impl Default for Costs {
    /// 7 us and 3 GB/s between machines, 0.5 us and 10 GB/s within one, 10 GB/s to fold.
    fn default() -> Self {
        Self {
            within: Link { latency: 0.4e-6, per_message: 0.1e-6, per_byte: 0.1e-9 },
            between: Link { latency: 5e-6, per_message: 2e-6, per_byte: 1e-9 / 3.0 },
            fold_per_byte: 0.1e-9,
            min_chunk: 256 << 10,
        }
    }
}

impl Costs {
    /// Elements per chunk of the direct algorithm, and of a flat fold.
    ///
    /// Chunks bound scratch memory but save no time in the model, where each adds a round. Their
    /// size makes that overhead a twentieth of the transfer time, and is at least `min_chunk`.
    pub(super) fn chunk(&self, op: &OpDesc, layout: &Layout) -> usize {
        elements(self.chunk_bytes(layout, op.verb), op)
    }

    /// Elements per chunk of a chain.
    pub(super) fn chain_chunk(&self, op: &OpDesc, layout: &Layout) -> usize {
        let bytes = (op.count * op.dtype.size()) as f64;
        elements(self.chain_bytes(layout, bytes), op)
    }

    /// Elements per group of the hierarchical algorithm.
    pub(super) fn group(&self, op: &OpDesc, layout: &Layout) -> usize {
        elements(self.group_bytes(layout, op), op)
    }

    /// Returns the size of a group in bytes. Each of `k` groups adds a message time to its round,
    /// and the last machine waits for `2 (M - 1)` groups: the sum is minimal where the two are
    /// equal. Half of that size increases this sum by a quarter, and halves the wait on networks
    /// that are slower than the model's. Groups above [`MAX_GROUP_BYTES`] increase this wait and
    /// exceed the nearer caches.
    fn group_bytes(&self, layout: &Layout, op: &OpDesc) -> f64 {
        let bytes = (op.count * op.dtype.size()) as f64;
        let ends = 2.0 * layout.machines() as f64 - 1.0;
        let best = (bytes * self.between.alpha() / (ends * self.between.per_byte)).sqrt();
        (best / 2.0).min(MAX_GROUP_BYTES).max(self.min_chunk as f64 / 8.0)
    }

    fn chunk_bytes(&self, layout: &Layout, verb: Verb) -> f64 {
        let link = self.slowest(layout);
        let start = link.latency + (layout.world() as f64 - 1.0) * link.per_message;
        let bytes = (10.0 * start / (link.per_byte * layout.sharing())).max(self.min_chunk as f64);
        // Such a chunk is received from every rank, others in parts.
        if verb == Verb::ReduceScatter { bytes / layout.world() as f64 } else { bytes }
    }

    /// Returns the size of a chunk in bytes. `k` chunks cost `k * per_message` at every rank, and
    /// each of the `p - 2` inner ranks waits for `1 / k` of the bytes: the sum is minimal where the
    /// two are equal.
    fn chain_bytes(&self, layout: &Layout, bytes: f64) -> f64 {
        let link = self.slowest(layout);
        let between = (layout.world() as f64 - 2.0).max(1.0);
        let best = (bytes * link.per_message / (between * link.per_byte)).sqrt();
        best.max(self.min_chunk as f64 / 64.0)
    }

    fn slowest(&self, layout: &Layout) -> Link {
        if layout.machines() > 1 { self.between } else { self.within }
    }

    /// Returns the algorithm with the least expected time among those that keep the promised bits
    /// and use little scratch memory.
    fn best(&self, op: &OpDesc, layout: &Layout, bits: Determinism) -> (Algorithm, f64) {
        let usable = |&algorithm: &Algorithm| {
            layout.able(algorithm, op, bits) && has_small_scratch(algorithm, op, layout.world())
        };
        let usable = Algorithm::ALL.into_iter().filter(usable);
        let timed = usable.map(|algorithm| (algorithm, expected(algorithm, op, layout, self)));
        timed.min_by(|(_, a), (_, b)| a.total_cmp(b)).expect("`Flat` implements all verbs")
    }
}

/// Whether the algorithm's scratch memory is bounded, or the buffer is at most [`MAX_WHOLE_BYTES`]
/// long.
fn has_small_scratch(algorithm: Algorithm, op: &OpDesc, world: usize) -> bool {
    let in_parts = match algorithm {
        Algorithm::RecursiveDoubling | Algorithm::HalvingDoubling | Algorithm::Binomial => false,
        // Its parts are chosen by this rule, too; in other reductions a leader copies the input.
        Algorithm::TwoLevel => op.verb == Verb::AllReduce,
        _ => true,
    };
    in_parts || op.op.is_none() || op.input_count(world) * op.dtype.size() <= MAX_WHOLE_BYTES
}

/// Returns the elements per chunk, for the fewest equal chunks of at most about `bytes` bytes.
fn elements(bytes: f64, op: &OpDesc) -> usize {
    let most = (bytes as usize / op.dtype.size()).max(1);
    op.count.div_ceil(op.count.div_ceil(most).max(1)).max(1)
}

/// Returns the algorithm with the least expected time among those that keep the promised bits.
pub(crate) fn choose(
    op: &OpDesc,
    layout: &Layout,
    determinism: Determinism,
    costs: &Costs,
) -> Algorithm {
    costs.best(op, layout, determinism).0
}

/// Expected time of an operation in seconds, in closed form.
pub(crate) fn expected(algorithm: Algorithm, op: &OpDesc, layout: &Layout, costs: &Costs) -> f64 {
    if op.verb == Verb::Barrier || op.count == 0 {
        return 0.0;
    }
    let bytes = (op.count * op.dtype.size()) as f64;
    let fold = op.op.map_or(0.0, |_| costs.fold_per_byte);
    let form = Form { costs, layout, bytes, fold };
    let scale = match op.op {
        Some(ReduceOp::Avg | ReduceOp::PreMulSum(_)) => bytes * fold,
        _ => 0.0,
    };
    match algorithm {
        Algorithm::Flat => form.flat(op),
        Algorithm::Direct => form.direct(op.verb),
        Algorithm::Ring => form.ring(op.verb) + scale,
        Algorithm::RecursiveDoubling | Algorithm::HalvingDoubling => {
            form.doubling(algorithm, op.verb) + scale
        }
        Algorithm::Binomial => form.binomial() + scale,
        Algorithm::TwoLevel => form.two_level(op) + scale,
        Algorithm::Hierarchical => form.hierarchical(op),
    }
}

impl Layout {
    /// Number of ranks that share an interface if all communicate with other machines.
    fn sharing(&self) -> f64 {
        if self.machines() > 1 { self.widest() as f64 } else { 1.0 }
    }

    /// Exchanges at distances below 2 to the power of this stay within a machine.
    fn steps_inside(&self) -> usize {
        let even = self.in_order() && self.world() == self.machines() * self.widest();
        if even { self.widest().trailing_zeros() as usize } else { 0 }
    }

    /// Whether an algorithm implements this operation with the promised bits.
    pub(crate) fn able(&self, algorithm: Algorithm, op: &OpDesc, determinism: Determinism) -> bool {
        let moves = op.op.is_none();
        let any_order = determinism == Determinism::Fast || moves || !op.dtype.is_float();
        // A sum of `f16` can be infinite where its product with the factor is not.
        let needs_wide_sum =
            op.dtype == DType::F16 && matches!(op.op, Some(ReduceOp::Avg | ReduceOp::PreMulSum(_)));
        let fits = match (algorithm, op.verb) {
            (Algorithm::Flat, _) => return true,
            (Algorithm::Direct, Verb::AllReduce | Verb::Reduce | Verb::Broadcast) => return true,
            (Algorithm::Ring, verb) => verb.is_run(),
            (Algorithm::Hierarchical, verb) => {
                return op.op.is_some()
                    && verb.is_run()
                    && self.machines() > 1
                    && self.machines() < self.world()
                    && (self.in_order() || any_order);
            }
            (Algorithm::TwoLevel, verb) => {
                verb.is_run() && self.machines() > 1 && self.machines() < self.world()
            }
            (Algorithm::RecursiveDoubling | Algorithm::HalvingDoubling, Verb::AllReduce) => true,
            (Algorithm::RecursiveDoubling, Verb::AllGather | Verb::Counts)
            | (Algorithm::HalvingDoubling, Verb::ReduceScatter) => self.world().is_power_of_two(),
            (Algorithm::Binomial, Verb::Reduce | Verb::Broadcast) => true,
            _ => false,
        };
        fits && any_order && !needs_wide_sum && self.world() > 1
    }
}

/// The closed forms.
#[derive(Clone, Copy, Debug)]
struct Form<'a> {
    costs: &'a Costs,
    layout: &'a Layout,
    /// Bytes of the buffer or block, see [`OpDesc::count`].
    bytes: f64,
    /// Seconds to fold a byte; 0 if nothing is folded.
    fold: f64,
}

impl Form<'_> {
    fn peers(self) -> f64 {
        self.layout.world() as f64 - 1.0
    }

    /// Time of a round in which a rank sends (or receives) `times` messages of `bytes` each for
    /// every other rank, while `sharing` ranks of its machine do the same.
    fn all_peers(self, times: f64, bytes: f64, sharing: f64) -> f64 {
        let row = |link: Link, own: f64, interface: f64| {
            if own == 0.0 {
                return 0.0;
            }
            let carry = bytes * link.per_byte;
            let rest = ((own - 1.0) * link.per_message).max((interface - 1.0) * carry);
            link.alpha() + carry + rest
        };
        let inside = times * (self.layout.widest() as f64 - 1.0);
        let outside = times * (self.layout.world() - self.layout.widest()) as f64;
        let inside = row(self.costs.within, inside, inside);
        inside.max(row(self.costs.between, outside, outside * sharing))
    }

    /// Time of an exchange at distance 2 to the power of `step`.
    fn step(self, step: usize, bytes: f64) -> f64 {
        if step < self.layout.steps_inside() || self.layout.machines() == 1 {
            self.costs.within.message(bytes)
        } else {
            let link = self.costs.between;
            link.alpha() + bytes * link.per_byte * self.layout.sharing()
        }
    }

    /// Number of chunks of [`Costs::chunk`] elements.
    fn chunks(self, verb: Verb) -> f64 {
        (self.bytes / self.costs.chunk_bytes(self.layout, verb)).ceil().max(1.0)
    }

    /// Every rank has folded a chunk before it sends the next; those that send to a root do not
    /// wait.
    fn flat(self, op: &OpDesc) -> f64 {
        let chunks = if op.op.is_some() { self.chunks(op.verb) } else { 1.0 };
        let mean = self.bytes / chunks;
        let fold = self.peers() * mean * self.fold;
        match op.verb.has_root() {
            true => self.all_peers(1.0, self.bytes, 1.0) + fold,
            false => chunks * (self.all_peers(1.0, mean, self.layout.sharing()) + fold),
        }
    }

    /// Two message times for each chunk but the last; all parts are sent to all ranks.
    fn direct(self, verb: Verb) -> f64 {
        let sharing = self.layout.sharing();
        let chunks = self.chunks(verb);
        let mean = self.bytes / chunks;
        let peers = self.peers();
        let (owners, to_owners, on) = match verb {
            Verb::AllReduce => (peers + 1.0, sharing, sharing),
            Verb::Reduce => (peers.max(1.0), sharing, 1.0),
            _ => (peers.max(1.0), 1.0, sharing),
        };
        let part = mean / owners;
        let fold = peers * part * self.fold;
        let first = self.all_peers(1.0, part, to_owners);
        // The root of a broadcast sends no results, and the other ranks send nothing else.
        let messages = if verb == Verb::Broadcast { 1.0 } else { 2.0 };
        let both = self.all_peers(messages, part, to_owners.max(on));
        first + fold + (chunks - 1.0) * (both + fold) + self.all_peers(1.0, part, on)
    }

    /// Time of `p - 1` hops with `bytes` each, between machines and within them.
    fn hops(self, bytes: f64) -> f64 {
        let outside = if self.layout.machines() > 1 { self.layout.machines() } else { 0 };
        let outside = outside.min(self.layout.world() - 1) as f64;
        let Costs { within, between, .. } = self.costs;
        outside * between.message(bytes) + (self.peers() - outside) * within.message(bytes)
    }

    /// Patarasuk and Yuan: `2 (p - 1) alpha + 2 n (p - 1) / p beta + n (p - 1) / p gamma`; a
    /// reduce-scatter and an all-gather are its two halves. The chain: `p - 1` hops of one chunk,
    /// then the other chunks.
    fn ring(self, verb: Verb) -> f64 {
        let turn = |bytes: f64| {
            let link = self.costs.slowest(self.layout);
            let busy = self.peers() * link.message(bytes) - (self.peers() - 1.0) * link.latency;
            self.hops(bytes).max(busy)
        };
        let fold = |bytes: f64| {
            let pieces = (bytes / RING_PIECE as f64).ceil().max(1.0);
            pieces * turn(bytes / pieces) + self.peers() * bytes * self.fold
        };
        match verb {
            Verb::AllReduce => {
                let part = self.bytes / self.layout.world() as f64;
                fold(part) + turn(part)
            }
            Verb::ReduceScatter => fold(self.bytes),
            Verb::Reduce | Verb::Broadcast => {
                let chunks = self.bytes / self.costs.chain_bytes(self.layout, self.bytes);
                let chunks = chunks.ceil().max(1.0);
                let part = self.bytes / chunks;
                let link = self.costs.slowest(self.layout);
                let row = link.per_message + part * (link.per_byte + self.fold);
                self.hops(part) + self.peers() * part * self.fold + (chunks - 1.0) * row
            }
            _ => turn(self.bytes),
        }
    }

    /// Returns the exponent of the largest power of two up to the number of ranks, and the cost of
    /// folding in the other ranks.
    fn cube(self) -> (usize, f64) {
        let steps = self.layout.world().ilog2() as usize;
        if self.layout.world().is_power_of_two() {
            return (steps, 0.0);
        }
        (steps, 2.0 * self.step(0, self.bytes) + self.bytes * self.fold)
    }

    /// Recursive doubling: `lg p (alpha + n beta + n gamma)`. Rabenseifner:
    /// `2 lg p alpha + 2 n (p - 1) / p beta + n (p - 1) / p gamma`. An all-gather and a
    /// reduce-scatter: `lg p alpha + (p - 1) n (beta + gamma)`.
    fn doubling(self, algorithm: Algorithm, verb: Verb) -> f64 {
        let (steps, excess) = self.cube();
        let step = |i: usize| {
            let (times, part) = match (verb, algorithm) {
                (Verb::AllReduce, Algorithm::RecursiveDoubling) => (1.0, self.bytes),
                (Verb::AllReduce, _) => (2.0, self.bytes / f64::from(2 << i)),
                _ => (1.0, self.bytes * f64::from(1 << i)),
            };
            times * self.step(i, part) + part * self.fold
        };
        excess + (0..steps).map(step).sum::<f64>()
    }

    /// `ceil(lg p) (alpha + n beta + n gamma)`.
    fn binomial(self) -> f64 {
        let (world, machines) = (self.layout.world(), self.layout.machines());
        let depth = |ranks: usize| f64::from(ranks.next_power_of_two().trailing_zeros());
        let inside = depth(world) - depth(machines);
        let Costs { within, between, .. } = self.costs;
        inside * within.message(self.bytes)
            + depth(machines) * between.message(self.bytes)
            + depth(world) * self.bytes * self.fold
    }

    /// A round for each group, plus those until the first groups arrive. A round takes the longer
    /// of the interface's sends and a rank's messages within its machine, plus a fold.
    fn hierarchical(self, op: &OpDesc) -> f64 {
        let layout = self.layout;
        let (machines, widest, world) = (layout.machines(), layout.widest(), layout.world());
        let Costs { within, between, .. } = self.costs;
        let blocks = if op.verb == Verb::ReduceScatter { world as f64 } else { 1.0 };
        let groups = (self.bytes / self.costs.group_bytes(self.layout, op)).ceil().max(1.0);
        let (bytes, others) = (self.bytes / groups, widest as f64 - 1.0);
        let prefix = (acc_size(op.dtype) / op.dtype.size()) as f64;
        let part = bytes / widest as f64;
        let returns = op.verb == Verb::AllReduce;
        let sent = if machines > 2 && returns { prefix + 1.0 } else { prefix };
        let outside = between.alpha() + sent * bytes * between.per_byte;
        let row = within.per_message.max(part * within.per_byte);
        let inside = within.alpha() + if returns { 2.0 } else { 1.0 } * others * row;
        let fold = widest as f64 * part * self.fold;
        let round = outside.max(inside) + fold;
        if returns {
            return (groups + 2.0 * machines as f64 - 1.0) * round;
        }
        // No rank waits for a result, so the slower of interface and ranks determines the rate of
        // groups.
        let busy = (outside - between.latency).max(inside + fold);
        blocks * groups * busy + machines as f64 * round
    }

    /// The sum of the best algorithms' times for the parts.
    fn two_level(self, desc: &OpDesc) -> f64 {
        let layout = self.layout;
        let (machines, widest, world) = (layout.machines(), layout.widest(), layout.world());
        let (inside, outside) = (&Layout::blocks(widest, widest), &Layout::blocks(machines, 1));
        let sum = desc.op.map(|_| ReduceOp::Sum);
        let best = |verb: Verb, count: usize, layout: &Layout| {
            let op = sum.filter(|_| verb != Verb::Broadcast);
            let op = OpDesc { verb, op, root: Some(0), count, ..*desc };
            self.costs.best(&op, layout, Determinism::Fast).1
        };
        let among = |layout, bytes| Form { layout, ..self }.all_peers(1.0, bytes, 1.0);
        let (count, all) = (desc.count, desc.count * world);
        match desc.verb {
            Verb::ReduceScatter => {
                let machine = self.bytes * widest as f64;
                best(Verb::Reduce, all, inside)
                    + among(outside, machine)
                    + (machines as f64 - 1.0) * machine * self.fold
                    + among(inside, self.bytes)
            }
            Verb::AllGather | Verb::Counts => {
                among(inside, self.bytes)
                    + among(outside, self.bytes * widest as f64)
                    + best(Verb::Broadcast, all, inside)
            }
            verb => {
                let layout = |level| if level == Level::Inside { inside } else { outside };
                let time = |&(level, verb)| best(verb, count, layout(level));
                parts(verb).iter().map(time).sum()
            }
        }
    }
}
