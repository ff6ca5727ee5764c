//! What an algorithm costs, and which one costs least.
//!
//! The model is the alpha-beta-gamma model with the latency taken apart, as LogGP does: a message of
//! `n` bytes takes `latency + per_message + n * per_byte` (alpha is the first two), folding `n`
//! bytes into others `n * fold_per_byte`. Of several messages at once, a rank starts one every
//! `per_message`, its machine's network interface carries one after the other, and only the first
//! waits for the latency. Ranks of one machine share the interface, each direction of it; between
//! ranks of one machine there is another [`Link`], shared by nobody. Copies within a rank are free.
//!
//! Sources: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in
//! MPICH", 2005 (recursive doubling, halving-doubling, binomial trees, scatter and all-gather);
//! Patarasuk, Yuan, "Bandwidth Optimal All-reduce Algorithms", 2009 (ring); Alexandrov, Ionescu,
//! Schauser, Scheiman, "LogGP", 1995 (messages in a row).
//!
//! Every rank must come to the same choice, so it depends on nothing that a rank alone knows.

use super::{Algorithm, Layout};
use crate::{Determinism, OpDesc, Verb};

/// What a message costs from one rank to another.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Link {
    /// Seconds until the first byte arrives, during which others can be under way.
    pub latency: f64,
    /// Seconds that a rank spends on each message, sending or receiving.
    pub per_message: f64,
    /// Seconds for each byte: one over the bandwidth of one direction.
    pub per_byte: f64,
}

/// What messages and folds cost.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Costs {
    /// Between ranks of one machine.
    pub(crate) within: Link,
    /// Between machines, for all ranks of a machine together.
    pub(crate) between: Link,
    /// Seconds to fold one byte into others.
    pub(crate) fold_per_byte: f64,
    /// Least bytes of a chunk.
    pub(crate) min_chunk: usize,
}

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
    /// Elements of a chunk of the direct algorithm.
    ///
    /// Chunks bound scratch memory and gain no time in the model, where each costs another round:
    /// so they are as large as makes that a twentieth of the time they carry bytes, and at least
    /// `min_chunk`.
    pub(super) fn chunk(&self, op: &OpDesc, layout: &Layout) -> usize {
        let shape = Shape::new(layout);
        let link = if shape.machines > 1 { self.between } else { self.within };
        let start = link.latency + (shape.world as f64 - 1.0) * link.per_message;
        let per_byte = 2.0 * link.per_byte * shape.sharing();
        let bytes = (20.0 * start / per_byte) as usize;
        (bytes.max(self.min_chunk) / op.dtype.size()).clamp(1, op.count.max(1))
    }

    fn best(&self, op: &OpDesc, shape: Shape, chunk: usize, determinism: Determinism) -> Algorithm {
        let able = Algorithm::ALL.into_iter().filter(|&a| able(a, op, determinism));
        let time = |a: &Algorithm| self.time(*a, op, shape, chunk);
        able.min_by(|a, b| time(a).total_cmp(&time(b))).unwrap_or(Algorithm::Flat)
    }

    /// Expected seconds.
    fn time(&self, algorithm: Algorithm, op: &OpDesc, shape: Shape, chunk: usize) -> f64 {
        let bytes = (op.count * op.dtype.size()) as f64;
        let fold = op.op.map_or(0.0, |_| self.fold_per_byte);
        let form = Form { costs: self, shape, bytes, fold };
        match algorithm {
            Algorithm::Flat => form.flat(op.verb),
            Algorithm::Direct => form.direct(op.verb, (chunk * op.dtype.size()) as f64),
        }
    }
}

/// The algorithm with the least expected time among those that keep the promised bits.
pub(super) fn choose(
    op: &OpDesc,
    layout: &Layout,
    determinism: Determinism,
    costs: &Costs,
) -> Algorithm {
    costs.best(op, Shape::new(layout), costs.chunk(op, layout), determinism)
}

/// Whether an algorithm does this operation, with the bits that are promised.
pub(super) fn able(algorithm: Algorithm, op: &OpDesc, _determinism: Determinism) -> bool {
    match algorithm {
        Algorithm::Flat => true,
        Algorithm::Direct => {
            matches!(
                op.verb,
                Verb::AllReduce | Verb::Reduce | Verb::Broadcast | Verb::ReduceScatter
            )
        }
    }
}

/// What the closed forms see of a layout.
#[derive(Clone, Copy, Debug)]
struct Shape {
    world: usize,
    machines: usize,
    /// The most ranks on a machine.
    widest: usize,
}

impl Shape {
    fn new(layout: &Layout) -> Self {
        Self { world: layout.world(), machines: layout.machines(), widest: layout.widest() }
    }

    /// How many ranks use an interface at once if all talk to other machines.
    fn sharing(self) -> f64 {
        if self.machines > 1 { self.widest as f64 } else { 1.0 }
    }
}

/// The closed forms.
#[derive(Clone, Copy, Debug)]
struct Form<'a> {
    costs: &'a Costs,
    shape: Shape,
    /// Of the buffer or block, see [`OpDesc::count`].
    bytes: f64,
    /// Seconds to fold a byte; 0 if nothing is folded.
    fold: f64,
}

impl Form<'_> {
    fn peers(self) -> f64 {
        self.shape.world as f64 - 1.0
    }

    /// A round in which a rank sends (or receives) `times` messages of `bytes` each for every other
    /// rank, while `sharing` ranks of its machine do the same.
    fn all_peers(self, times: f64, bytes: f64, sharing: f64) -> f64 {
        let row = |link: Link, own: f64, interface: f64| {
            if own == 0.0 {
                return 0.0;
            }
            let carry = bytes * link.per_byte;
            let rest = ((own - 1.0) * link.per_message).max((interface - 1.0) * carry);
            link.latency + link.per_message + carry + rest
        };
        let inside = times * (self.shape.widest as f64 - 1.0);
        let outside = times * (self.shape.world - self.shape.widest) as f64;
        let inside = row(self.costs.within, inside, inside);
        inside.max(row(self.costs.between, outside, outside * sharing))
    }

    fn flat(self, verb: Verb) -> f64 {
        let rooted = matches!(verb, Verb::Reduce | Verb::Broadcast | Verb::Gather | Verb::Scatter);
        let sharing = if rooted { 1.0 } else { self.shape.sharing() };
        self.all_peers(1.0, self.bytes, sharing) + self.peers() * self.bytes * self.fold
    }

    fn direct(self, verb: Verb, chunk: f64) -> f64 {
        let sharing = self.shape.sharing();
        let chunks = (self.bytes / chunk).ceil().max(1.0);
        let mean = self.bytes / chunks;
        let peers = self.peers();
        let (owners, to_owners, on) = match verb {
            Verb::AllReduce => (peers + 1.0, sharing, sharing),
            Verb::Reduce => (peers.max(1.0), sharing, 1.0),
            Verb::Broadcast => (peers.max(1.0), 1.0, sharing),
            _ => {
                let round = self.all_peers(1.0, mean, sharing) + peers * mean * self.fold;
                return chunks * round;
            }
        };
        let part = mean / owners;
        let fold = peers * part * self.fold;
        let first = self.all_peers(1.0, part, to_owners);
        let both = self.all_peers(2.0, part, to_owners.max(on));
        first + fold + (chunks - 1.0) * (both + fold) + self.all_peers(1.0, part, on)
    }
}
