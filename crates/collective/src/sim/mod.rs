//! A discrete-event simulator: runs the algorithms of the TCP backend on a simulated network in
//! virtual time.
//!
//! It has two uses. [`simulate`] computes the cost of an operation on a [`Network`] of up to 8,192
//! ranks, with a given algorithm or the one that the cost model chooses, and the error of each rank
//! if a fault occurs; it needs no data and one thread.
//! [`ProcessGroup::simulated`](crate::ProcessGroup::simulated) is a group of threads with real data
//! and virtual [clocks](Clocks), to test a program on networks and with faults ([`Fault`]) that are
//! not available; its data move through shared memory. Both simulate the schedules of messages and
//! folds that the TCP backend executes.
//!
//! # The model
//!
//! A message of `n` bytes takes `latency + per_message + n * per_byte` (alpha is the first two,
//! beta the last); folding `n` bytes takes `n * fold_per_byte` (gamma). The ranks of a machine
//! share its network interface; see [`Network`]. Not modelled: congestion inside the switch, memory
//! bandwidth shared by the ranks of a machine, and retransmission. With one rank per machine the
//! times agree with the textbooks' closed forms within 1 %, which a test checks for 8 to 4,096
//! ranks.
//!
//! One latency after a rank dies, all ranks that have not finished report
//! [`PeerDied`](crate::Error::PeerDied). A rank that waits in one round for longer than
//! [`Network::timeout`] reports the ranks whose messages are missing
//! ([`Timeout`](crate::Error::Timeout)), and fails the group as the TCP backend does.
//!
//! # What an all-reduce costs
//!
//! `f32` sums on [`Network::default`]: alpha 7 us, beta 1/3 ns (3 GB/s), gamma 0.1 ns; within a
//! machine alpha 0.5 us, beta 0.1 ns. Printed by
//! `cargo run --release -p gradstack-collective --example cost_table`.
#![doc = include_str!("cost_table.md")]
//!
//! With [`Determinism::RankOrder`], sums of floats can only use the rows `flat` and `direct`.

pub(crate) mod backend;
mod engine;
mod network;
mod queue;

use std::time::Duration;

pub use self::backend::Clocks;
pub use self::engine::Traffic;
pub use self::network::{Fault, Network, Placement};
use crate::algo::{self, Costs, Layout, Schedule};
pub use crate::algo::{Algorithm, Link};
use crate::{Determinism, Error, OpDesc, Rank, Result, Verb};

/// Result of a simulated operation.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Report {
    /// The algorithm.
    pub algorithm: Algorithm,
    /// When the last of the ranks that succeeded finished.
    pub time: Duration,
    /// Time expected by the cost model, without faults.
    pub expected: Duration,
    /// For each rank, when it finished, or its error.
    pub ranks: Vec<Result<Duration>>,
    /// Number of messages sent.
    pub messages: u64,
    /// Traffic of each machine's network interface, in the order of the machines' first ranks.
    pub interfaces: Vec<Traffic>,
}

/// Simulates one operation among `world_size` ranks that all enter it at time 0, without data.
///
/// If `algorithm` is `None`, the cost model chooses among those that keep the bits of
/// `determinism`. The time in which ranks meet and compare their calls is not included, except for
/// a barrier, which does nothing else and costs [`Network::meeting`].
///
/// # Errors
///
/// [`Error::InvalidArgument`] if the network does not fit the number of ranks, or the operation is
/// invalid; [`Error::Unsupported`] if the algorithm does not implement it, or not with these bits.
///
/// # Examples
///
/// ```
/// use collective::sim::{Network, simulate};
/// use collective::{DType, Determinism, ReduceOp, backend::{OpDesc, Verb}};
///
/// let op = OpDesc {
///     verb: Verb::AllReduce,
///     dtype: DType::F32,
///     op: Some(ReduceOp::Sum),
///     root: None,
///     count: 1 << 20,
/// };
/// let report = simulate(&Network::default(), 64, &op, Determinism::Fast, None)?;
/// println!("{} takes {:?}", report.algorithm, report.time);
/// # Ok::<(), collective::Error>(())
/// ```
pub fn simulate(
    network: &Network,
    world_size: usize,
    op: &OpDesc,
    determinism: Determinism,
    algorithm: Option<Algorithm>,
) -> Result<Report> {
    let layout = network.layout(world_size)?;
    check(op, world_size)?;
    let costs = network.costs();
    let algorithm = match algorithm {
        None => algo::choose(op, &layout, determinism, &costs),
        Some(algorithm) if layout.able(algorithm, op, determinism) => algorithm,
        Some(algorithm) => {
            let what = format!("{op} by {algorithm} among {world_size} ranks, {determinism:?}");
            return Err(Error::Unsupported { backend: NAME, what });
        }
    };
    let start =
        if op.verb == Verb::Barrier { engine::time(network.meeting(world_size)) } else { 0 };
    let schedules = schedules(algorithm, op, &layout, &costs);
    let outcome = engine::run(network, &layout, &schedules, start);
    let expected = algo::expected(algorithm, op, &layout, &costs);
    let rank = |(rank, done): (Rank, &Option<u64>)| match (done, &outcome.failure) {
        (Some(done), _) => Ok(engine::duration(*done)),
        (None, failure) => Err(engine::error(rank, failure.as_ref(), &op.to_string())),
    };
    Ok(Report {
        algorithm,
        time: engine::duration(outcome.done.iter().flatten().copied().max().unwrap_or(start)),
        expected: Duration::try_from_secs_f64(expected)
            .unwrap_or(Duration::MAX)
            .saturating_add(engine::duration(start)),
        ranks: outcome.done.iter().enumerate().map(rank).collect(),
        messages: outcome.messages,
        interfaces: outcome.interfaces,
    })
}

fn check(op: &OpDesc, world: usize) -> Result<()> {
    op.check(world)?;
    let bytes = op.count.checked_mul(world).and_then(|count| count.checked_mul(op.dtype.size()));
    let folds = matches!(op.verb, Verb::AllReduce | Verb::Reduce | Verb::ReduceScatter);
    let moves = op.verb.is_run() || op.verb.is_exchange() || op.verb == Verb::Barrier;
    let whole = op.root.is_some() == op.verb.has_root() && op.op.is_some() == folds;
    if !moves || !whole || bytes.is_none_or(|bytes| isize::try_from(bytes).is_err()) {
        return Err(Error::InvalidArgument(format!("{op}: invalid, or cannot be simulated")));
    }
    Ok(())
}

fn schedules(algorithm: Algorithm, op: &OpDesc, layout: &Layout, costs: &Costs) -> Vec<Schedule> {
    let schedule = |rank| algo::schedule(algorithm, op, rank, layout, costs, false);
    (0..layout.world()).map(schedule).collect()
}

const NAME: &str = "sim";
