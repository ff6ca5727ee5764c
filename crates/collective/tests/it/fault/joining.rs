//! Ranks that join a group with different options, over every transport: no rank gets a group, and
//! every error names the values that differ.

use std::sync::Arc;
use std::time::{Duration, Instant};

use collective::{
    Determinism, Error, GroupOptions, MemoryStore, ProcessGroup, Rank, ReduceOp, Result, Transport,
};

use super::transports::transports;
use super::{SOON, TIMEOUT};
use crate::common::options;
use crate::common::refuse::refuse;

/// Joins one store on all ranks at once, each with its own world size and options, and calls `then`
/// with every group; returns the results by rank.
fn join_all<T: Send>(
    ranks: Vec<(usize, GroupOptions)>,
    then: impl Fn(ProcessGroup) -> T + Sync,
) -> Vec<Result<T>> {
    let (store, then) = (MemoryStore::new(), &then);
    std::thread::scope(|scope| {
        let join = |(rank, (world, options))| {
            let store = Arc::new(store.clone());
            scope.spawn(move || ProcessGroup::from_store(store, rank, world, options).map(then))
        };
        let ranks: Vec<_> = ranks.into_iter().enumerate().map(join).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// Checks that all ranks fail at once because `field` differs, with rank 0's value and the other.
fn refused(ranks: Vec<(usize, GroupOptions)>, field: &str, values: [(Rank, &str); 2]) {
    let start = Instant::now();
    for (rank, joined) in join_all(ranks, summed).into_iter().enumerate() {
        let error = joined.expect_err("joined, and summed");
        let Error::Mismatch { field: got, by_rank, .. } = &error else { panic!("{error}") };
        assert_eq!(*got, field, "rank {rank}: {error}");
        assert_eq!(*by_rank, values.map(|(rank, value)| (rank, value.to_owned())), "{error}");
    }
    assert!(start.elapsed() < SOON);
}

/// Describes the sum of a group that should not exist.
pub(super) fn summed(group: ProcessGroup) -> String {
    let value = |i: usize| (i % 1000) as f32;
    let mut x: Vec<f32> = (0..1 << 17).map(value).collect();
    let result = group.all_reduce(&mut x, ReduceOp::Sum);
    let world = group.world_size() as f32;
    let wrong = x.iter().enumerate().filter(|&(i, &x)| x != value(i) * world).count();
    format!("{result:?}: {wrong} of {} elements wrong", x.len())
}

#[test]
fn ranks_with_different_determinism_do_not_join() {
    let values = [(0, "RankOrder"), (1, "Fast")];
    for transport in transports().filter(|transport| transport.name != "gloo-fast") {
        for world in [2, 3] {
            let options = |rank| match rank {
                1 => options(transport.name, 1, TIMEOUT).with_determinism(Determinism::Fast),
                rank => options(transport.name, rank, TIMEOUT),
            };
            let ranks = (0..world).map(|rank| (world, options(rank))).collect();
            refused(ranks, "GroupOptions::determinism", values);
        }
    }
}

#[test]
fn ranks_with_different_transports_do_not_join() {
    let options = |transport| options(transport, 0, TIMEOUT);
    let ranks = vec![(3, options("auto")), (3, options("auto")), (3, options("tcp"))];
    refused(ranks, "GroupOptions::transport", [(0, "Auto"), (2, "Tcp")]);
}

/// Even if a rank would be waited for that is never started.
#[test]
fn ranks_with_different_world_sizes_do_not_join() {
    for (worlds, other) in [(vec![2, 3], 1), (vec![3, 2], 1), (vec![4, 4, 3], 2)] {
        let ranks = worlds.iter().map(|&world| (world, options("auto", 0, TIMEOUT))).collect();
        let [first, second] = [worlds[0], worlds[other]].map(|world| world.to_string());
        refused(ranks, "world_size", [(0, &first), (other, &second)]);
    }
}

#[test]
fn ranks_may_differ_in_timeout_and_host_id() {
    let own = |rank: usize| {
        let timeout = TIMEOUT + Duration::from_secs(rank as u64);
        let dir = std::env::temp_dir().join(format!("collective-none-{rank}"));
        let options = GroupOptions::default().with_timeout(timeout).with_flight_dir(dir);
        options.with_host_id(format!("host {rank}")).with_transport(Transport::Tcp)
    };
    for group in join_all((0..2).map(|rank| (2, own(rank))).collect(), |group| group.backend_name())
    {
        assert_eq!(group.unwrap(), "tcp");
    }
}

/// Once the records are exchanged the others wait for its connections or in the first barrier, not
/// at the store.
#[test]
fn the_reason_of_a_rank_that_fails_late_reaches_the_others() {
    let thread = &[libc::SYS_clone3, libc::SYS_clone][..];
    for (transport, calls, reason) in [
        ("host", &[libc::SYS_pidfd_open][..], "monitoring rank"),
        ("host", thread, "starting the thread that monitors the peers"),
        ("tcp", &[libc::SYS_listen], "listening for peers"),
        ("tcp", &[libc::SYS_connect], "connecting to rank 0"),
        ("tcp", thread, "starting the control thread"),
        ("machines", &[libc::SYS_memfd_create], "shared memory"),
    ] {
        for failing in [1, 2] {
            // Rank 2 of four is the first of two on its machine if neighbours share one.
            let transport = if transport == "machines" { "pairs" } else { transport };
            if (transport, failing) == ("pairs", 1) {
                continue;
            }
            let store = MemoryStore::new();
            let join = |rank| {
                if rank == failing {
                    refuse(calls, libc::EMFILE);
                }
                let options = options(transport, rank, TIMEOUT);
                ProcessGroup::from_store(Arc::new(store.clone()), rank, 4, options)
            };
            let errors: Vec<_> = std::thread::scope(|scope| {
                let ranks: Vec<_> = (0..4).map(|rank| scope.spawn(move || (join)(rank))).collect();
                ranks.into_iter().map(|rank| rank.join().unwrap().unwrap_err()).collect()
            });
            for (rank, error) in errors.iter().enumerate() {
                let text = error.to_string();
                assert!(text.contains(reason), "{transport}, rank {rank}: {text}");
                let aborted = matches!(error, Error::Aborted { by, .. } if *by == failing);
                assert_eq!(aborted, rank != failing, "{transport}, rank {rank}: {text}");
            }
        }
    }
}
