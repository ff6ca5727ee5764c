//! A simulated network: the algorithms that other backends run on sockets, on virtual time.
//!
//! Two uses. [`simulate`] says what an operation would cost on a [`Network`] of up to 8,192 ranks,
//! by the chosen algorithm or by the one the cost model picks, and what each rank would report if
//! something went wrong; it needs no data and one thread.
//! [`ProcessGroup::simulated`](crate::ProcessGroup::simulated) is a group of threads whose data are
//! real and whose [clocks](Clocks) are virtual, to test a program against networks and faults
//! ([`Fault`]) that are not at hand. Both simulate the same schedules of messages and folds that the
//! backend over TCP carries out, so what is simulated is what runs. A group's data move through shared memory meanwhile.
//!
//! # The model
//!
//! A message of `n` bytes takes `latency + per_message + n * per_byte` (alpha is the first two, beta
//! the last), folding `n` bytes into others `n * fold_per_byte` (gamma). The ranks of a machine
//! share its network interface; see [`Network`]. Not modelled: congestion inside the switch, memory
//! bandwidth shared by the ranks of a machine, and retransmission. For ranks on machines of their
//! own the times are those of the textbooks' closed forms within 1 %, which a test holds for 8 to
//! 4,096 ranks.
//!
//! A rank that dies is noticed by all who still need something one latency later
//! ([`PeerDied`](crate::Error::PeerDied)); a rank that waits in one round for longer than
//! [`Network::timeout`] reports whose messages it misses ([`Timeout`](crate::Error::Timeout)), and
//! fails the group as that backend would.
//!
//! # What an all-reduce costs
//!
//! `f32` sums on [`Network::default`]: alpha 7 us, beta 1/3 ns (3 GB/s), gamma 0.1 ns; within a
//! machine alpha 0.5 us, beta 0.1 ns. Printed by `cargo run --release -p collective --example
//! cost_table`.
#![doc = include_str!("cost_table.md")]
//!
//! With [`Determinism::RankOrder`], sums of floats may only take the rows `flat` and `direct`.

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

/// How a simulated operation went.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Report {
    /// By which algorithm.
    pub algorithm: Algorithm,
    /// When the last rank that could do its part had done it.
    pub time: Duration,
    /// What the cost model expects it to take, without faults.
    pub expected: Duration,
    /// What each rank got: when it was done, or the error that it reports.
    pub ranks: Vec<Result<Duration>>,
    /// Messages sent.
    pub messages: u64,
    /// What each machine's network interface carried, in the order of the machines' first ranks.
    pub interfaces: Vec<Traffic>,
}

/// Simulates one operation among `world_size` ranks that all enter it at time 0, without data.
///
/// `algorithm` is chosen by the cost model, among those with the bits of `determinism`, if none is
/// given. What ranks do to meet and compare what they call is not part of it; a barrier is only
/// that, and costs [`Network::meeting`].
///
/// # Errors
///
/// [`Error::InvalidArgument`] if the network does not fit the ranks, or the operation is none;
/// [`Error::Unsupported`] if the algorithm does not do it, or not with these bits.
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
        Some(algorithm) if algo::able(algorithm, op, &layout, determinism) => algorithm,
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
        expected: Duration::from_secs_f64(expected) + engine::duration(start),
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
        return Err(Error::InvalidArgument(format!("{op}: not an operation to simulate")));
    }
    Ok(())
}

fn schedules(algorithm: Algorithm, op: &OpDesc, layout: &Layout, costs: &Costs) -> Vec<Schedule> {
    let schedule = |rank| algo::schedule(algorithm, op, rank, layout, costs, false);
    (0..layout.world()).map(schedule).collect()
}

const NAME: &str = "sim";
