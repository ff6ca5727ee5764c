//! One suite for every transport and world sizes 1 to 5: every verb, operator and type, compared
//! bit for bit with a slow and obvious reference that computes the result from all ranks' inputs.
//! Since every rank compares with the reference, all ranks have the same bits.

mod common_rules;
mod messages;
mod moves;
mod reductions;
pub(crate) mod twin;

use std::sync::Arc;
use std::time::Duration;

use crate::common::{self, Role, Workers};
use collective::sim::{Network, Placement};
use collective::{F8E4M3, F8E5M2, GroupOptions, MemoryStore, ProcessGroup, ReduceOp, Result};
use half::{bf16, f16};
use twin::Number;

const TIMEOUT: Duration = Duration::from_secs(30);

/// How much of the suite to run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scope {
    /// Numbers of elements.
    counts: &'static [usize],
    /// Number of sets of blocks of different lengths.
    uneven: usize,
    /// Number of batches of random messages.
    batches: u64,
    /// Whether to test shared buffers.
    shared: bool,
}

/// Whether `COLLECTIVE_TEST_SCOPE=thin` is set: under a sanitizer each element costs more.
fn thin() -> bool {
    std::env::var_os("COLLECTIVE_TEST_SCOPE").is_some_and(|scope| scope == "thin")
}

/// Everything, or less if [`thin`].
fn full() -> Scope {
    if thin() { Scope { shared: true, ..THIN } } else { FULL }
}

/// As [`THIN`], with a count that takes several messages unless [`thin`].
fn several_messages() -> Scope {
    if thin() { THIN } else { Scope { counts: &[0, 1, 33, 70_001], ..THIN } }
}

/// Everything: around vector widths, the largest payload of a slot, and the chunk size.
const FULL: Scope = Scope {
    counts: &[0, 1, 7, 33, 1000, 2049, 8191, 70_001],
    uneven: 6,
    batches: 24,
    shared: true,
};

/// Every verb, operator and type, at fewer sizes, for backends whose steps are slow.
const THIN: Scope = Scope { counts: &[0, 1, 33, 4099], uneven: 2, batches: 6, shared: false };

/// The suite over groups of 1 to 5 ranks, played by threads.
fn over(groups: impl Fn(usize) -> Vec<ProcessGroup>, scope: Scope) {
    for world in 1..=5 {
        for result in common::play(groups(world), |group| suite(group, scope)) {
            result.unwrap();
        }
    }
}

fn suite(group: ProcessGroup, scope: Scope) -> Result<()> {
    all_of::<f16>(&group, scope)?;
    all_of::<bf16>(&group, scope)?;
    all_of::<f32>(&group, scope)?;
    all_of::<f64>(&group, scope)?;
    all_of::<i8>(&group, scope)?;
    all_of::<u8>(&group, scope)?;
    all_of::<i32>(&group, scope)?;
    all_of::<i64>(&group, scope)?;
    all_of::<u64>(&group, scope)?;
    // The code is that of the types above, so a few lengths are enough.
    let few = Scope { counts: &[1, 33, 2049], uneven: 2, ..scope };
    all_of::<i16>(&group, few)?;
    all_of::<u16>(&group, few)?;
    all_of::<u32>(&group, few)?;
    all_of::<bool>(&group, few)?;
    all_of::<F8E4M3>(&group, few)?;
    all_of::<F8E5M2>(&group, few)?;
    messages::all(&group, scope)?;
    common_rules::all(&group)?;
    common_rules::buffers(group).map(drop)
}

fn all_of<T: Number>(group: &ProcessGroup, scope: Scope) -> Result<()> {
    let seed = T::DTYPE as u64 * 100;
    reductions::all::<T>(group, scope, seed)?;
    moves::all::<T>(group, scope, seed + 50)
}

#[test]
fn ranks_as_threads() {
    over(|world| ProcessGroup::threads(world, TIMEOUT).unwrap(), full());
}

#[cfg(feature = "gloo")]
#[test]
fn ranks_over_gloo() {
    over(|world| common::over("gloo", world, TIMEOUT), THIN);
}

#[test]
fn ranks_of_a_simulated_network() {
    let options = GroupOptions::default().with_timeout(TIMEOUT);
    let group = |world| ProcessGroup::simulated(world, Network::default(), &options).unwrap().0;
    over(group, THIN);
}

#[test]
fn ranks_as_threads_over_tcp() {
    over(|world| common::over("tcp", world, TIMEOUT), several_messages());
}

#[test]
fn ranks_as_threads_on_two_machines() {
    over(|world| common::over("machines", world, TIMEOUT), several_messages());
}

/// For groups of more than eight ranks, which compare fingerprints in rounds
/// (`backend::tcp::call`).
const MANY: Scope = Scope { counts: &[34, 4100], uneven: 1, batches: 2, shared: false };

/// Every verb, with one type that is reduced as it is and one that is reduced in `f32`.
fn suite_of_many(group: ProcessGroup) -> Result<()> {
    reductions::all::<bf16>(&group, MANY, 3)?;
    reductions::all::<f32>(&group, MANY, 4)?;
    moves::all::<f32>(&group, MANY, 5)?;
    messages::all(&group, MANY)?;
    common_rules::all(&group)
}

fn many_as_threads(groups: &[(&str, usize)]) {
    for &(transport, world) in groups {
        for result in common::play(common::over(transport, world, TIMEOUT), suite_of_many) {
            result.unwrap();
        }
    }
}

fn many_as_processes(groups: &[(&str, usize)]) {
    for &(transport, world) in groups {
        let ranks: Vec<_> = (0..world).collect();
        Workers::start_over(transport, "conformance::many", world, &ranks, TIMEOUT).finish();
    }
}

#[test]
fn many_ranks() {
    many_as_threads(&[("host", 16), ("tcp", 33), ("machines", 8)]);
    many_as_processes(&[("host", 33), ("machines", 16)]);
}

#[test]
#[ignore = "nightly: a minute of groups of many ranks"]
fn nightly_many_ranks_over_every_transport() {
    let every = ["host", "tcp", "machines"].map(|over| [8, 9, 16, 33].map(|world| (over, world)));
    many_as_threads(every.as_flattened());
    many_as_processes(every.as_flattened());
    #[cfg(feature = "gloo")]
    many_as_threads(&[("gloo", 8), ("gloo", 16), ("gloo", 33)]);
}

/// Neighbours share a machine, so that reductions continue from machine to machine.
#[test]
fn ranks_as_threads_on_machines_in_rank_order() {
    let counts: &[usize] = if thin() { &[300_003] } else { &[33, 1_000_003] };
    let scope = Scope { counts, ..THIN };
    let host = |rank: usize, each: usize| (rank / each).to_string();
    for (world, each) in [(4, 2), (5, 3), (6, 2)] {
        let options = |rank| common::options("host", rank, TIMEOUT).with_host_id(host(rank, each));
        for result in
            common::play(common::joined(world, options), |group| suite_of_few(group, scope))
        {
            result.unwrap();
        }
    }
}

#[test]
fn sixty_four_ranks_on_eight_simulated_machines() {
    let options = GroupOptions::default().with_timeout(TIMEOUT);
    let network = Network::default().with_placement(Placement::Blocks(8));
    let scope = Scope { counts: &[20_001], uneven: 0, batches: 1, shared: false };
    let (groups, _) = ProcessGroup::simulated(64, network, &options).unwrap();
    for result in common::play(groups, |group| suite_of_few(group, scope)) {
        result.unwrap();
    }
}

/// Reductions of a type that is reduced as it is, and of one that is not.
fn suite_of_few(group: ProcessGroup, scope: Scope) -> Result<()> {
    reductions::all::<bf16>(&group, scope, 1)?;
    reductions::all::<f32>(&group, scope, 2)
}

#[test]
fn ranks_as_processes_over_tcp() {
    for (transport, world) in [("tcp", 2), ("tcp", 3), ("machines", 4)] {
        let ranks: Vec<_> = (0..world).collect();
        Workers::start_over(transport, "conformance::thin", world, &ranks, TIMEOUT).finish();
    }
}

/// Joins as processes do, but within one process; and uses the same name twice.
#[test]
fn a_name_can_be_reused_after_its_group_is_dropped() {
    let store = Arc::new(MemoryStore::new());
    for round in 0..3 {
        std::thread::scope(|scope| {
            for rank in 0..3 {
                let options = GroupOptions::default().with_timeout(TIMEOUT).with_name("again");
                let store = Arc::clone(&store);
                scope.spawn(move || {
                    let group = ProcessGroup::from_store(store, rank, 3, options).unwrap();
                    let mut x = [(rank + round) as u64];
                    group.all_reduce(&mut x, ReduceOp::Max).unwrap();
                    assert_eq!(x, [2 + round as u64]);
                });
            }
        });
    }
}

/// Processes differ from threads only in how they join, so not every world size needs every count.
#[test]
fn ranks_as_processes() {
    for (world, scope) in [(1, "thin"), (2, "suite"), (3, "thin"), (4, "thin"), (5, "suite")] {
        let ranks: Vec<_> = (0..world).collect();
        Workers::start(&format!("conformance::{scope}"), world, &ranks, TIMEOUT).finish();
    }
}

/// Runs a process rank.
pub(crate) fn worker() {
    if let Some(role) = Role::from_env() {
        let group = role.join().unwrap();
        let result = match &role.scenario[..] {
            "many" => suite_of_many(group),
            "thin" => suite(group, THIN),
            _ => suite(group, full()),
        };
        result.unwrap();
    }
}
