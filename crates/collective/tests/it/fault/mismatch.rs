//! Ranks that call different operations, over every transport: all get the calls of all ranks, and
//! no byte has changed.

use std::sync::{Barrier, LazyLock};
use std::time::Instant;

use collective::{Error, ProcessGroup, ReduceOp, Result, SharedBuf};
use half::f16;

use super::transports::{PAIRS, TestTransport, transports};
use super::{Calls, TIMEOUT, at_once};
use crate::common::play;

/// A call with a buffer, and another buffer of that size per rank.
trait Call: Fn(&ProcessGroup, &mut [f32], &mut [f32]) -> Result<()> + Sync {}

impl<F: Fn(&ProcessGroup, &mut [f32], &mut [f32]) -> Result<()> + Sync> Call for F {}

/// Large enough for any rank; created before the time is measured.
static ONES: LazyLock<Vec<f32>> = LazyLock::new(|| vec![1.0; 3 * 1_000_002]);
static WHOLE: LazyLock<Vec<i32>> = LazyLock::new(|| vec![1; 1_000_002]);

/// Ranks make `call` with equal buffers. All must get a mismatch of `field` with all calls, and
/// unchanged buffers.
fn mismatch_of(transport: TestTransport, world: usize, field: &str, call: &impl Call) {
    LazyLock::force(&ONES);
    LazyLock::force(&WHOLE);
    for count in [12, transport.large] {
        // Passed when all ranks have their errors, because comparing bytes takes a core from
        // waiting ranks.
        let (told, calls) = (Barrier::new(world), Calls::default());
        play(transport.groups(world, TIMEOUT), |group| {
            let fill: Vec<f32> = (0..count).map(|i| (i + group.rank()) as f32).collect();
            let (mut one, mut two) = (fill.clone(), fill.repeat(world));
            group.barrier().unwrap();
            calls.now();
            let result = call(&group, &mut one, &mut two);
            let known = Instant::now();
            told.wait();
            let error = result.unwrap_err();
            at_once(transport.name, calls.until(known));
            let Error::Mismatch { op, field: got, by_rank } = &error else { panic!("{error}") };
            assert_eq!(*got, field, "{error}");
            assert!(by_rank.iter().map(|(rank, _)| *rank).eq(0..world), "{error}");
            assert!(by_rank.iter().any(|(_, call)| *call != by_rank[0].1), "{error}");
            assert!(one == fill && two == fill.repeat(world));
            let next = group.barrier().unwrap_err();
            // Lists of lengths are compared separately, by the ranks that have them.
            let apart = op.contains("_v") && matches!(next, Error::Aborted { .. });
            assert!(apart || matches!(next, Error::Poisoned(_)), "{next}");
            assert!(next.to_string().contains("disagree"), "{next}");
            let next = group.send(&one, (group.rank() + 1) % world).unwrap_err();
            assert!(matches!(next, Error::Poisoned(_)), "{next}");
        });
    }
}

fn mismatch(field: &str, call: impl Call) {
    for transport in transports() {
        mismatch_of(transport, 2, field, &call);
        mismatch_of(transport, 3, field, &call);
    }
}

#[test]
fn different_calls_are_a_mismatch_and_change_nothing() {
    let sum = ReduceOp::Sum;
    mismatch("verb", |group, one, _| match group.rank() {
        0 => group.all_reduce(one, sum),
        _ => group.barrier(),
    });
    mismatch("verb", |group, one, two| match group.rank() {
        1 => group.all_gather(two, one),
        _ => group.reduce_scatter(one, two, sum),
    });
    // Gloo itself returns garbage.
    mismatch("dtype", |group, one, _| match group.rank() {
        0 => group.all_reduce(one, sum),
        _ => group.all_reduce(&mut vec![f16::ONE; one.len()], sum),
    });
    mismatch("dtype", |group, one, _| match group.rank() {
        0 => group.all_reduce(one, sum),
        _ => group.all_reduce(&mut vec![1_i32; one.len()], sum),
    });
    mismatch("op", |group, one, _| {
        group.all_reduce(one, if group.rank() == 0 { sum } else { ReduceOp::Avg })
    });
    mismatch("root", |group, one, _| group.broadcast(one, group.rank()));
    // Gloo itself ends the process.
    mismatch("count", |group, one, _| {
        let count = one.len() - group.rank();
        group.all_reduce(&mut one[..count], sum)
    });
    mismatch("op", |group, one, _| {
        group.all_reduce(one, ReduceOp::pre_mul_sum(0.5 + group.rank() as f64))
    });
    mismatch("op", |group, one, _| {
        group.reduce(one, if group.rank() == 0 { sum } else { ReduceOp::Max }, 0)
    });
    mismatch("root", |group, one, _| group.reduce(one, sum, group.rank()));
    // Counts around the switch between algorithms.
    mismatch("count", |group, one, two| match group.rank() {
        0 => group.all_reduce(&mut one[..5], sum),
        _ => group.all_reduce(two, sum),
    });
}

#[test]
fn block_lengths_are_reported_with_the_factor_of_the_operator() {
    let op = ReduceOp::pre_mul_sum(0.5);
    play(transports().next().unwrap().groups(2, TIMEOUT), |group| {
        let counts = [3 - group.rank(); 2];
        let error = group.reduce_scatter_v(
            &mut [0.0; 3][..counts[0]],
            &[0.0; 6][..2 * counts[0]],
            &counts,
            op,
        );
        let Err(Error::Mismatch { field: "count", by_rank, .. }) = error else {
            panic!("{error:?}")
        };
        assert!(by_rank.iter().all(|(_, call)| call.contains("premulsum(0.5)")), "{by_rank:?}");
    });
    // Equal counts, different factors.
    mismatch("op", |group, one, two| {
        let op = ReduceOp::pre_mul_sum(0.5 + group.rank() as f64);
        group.reduce_scatter_v(one, two, &vec![one.len(); group.world_size()], op)
    });
}

/// Only for transports with shared buffers.
#[test]
fn a_shared_and_a_private_buffer_are_a_mismatch() {
    let call = |group: &ProcessGroup, one: &mut [f32], _: &mut [f32]| {
        let mut shared: SharedBuf<f32> = group.alloc(one.len())?;
        shared.fill(7.0);
        let result = match group.rank() {
            0 => group.all_reduce(&mut shared, ReduceOp::Sum),
            _ => group.all_reduce(one, ReduceOp::Sum),
        };
        assert!(shared.iter().all(|&x| x == 7.0));
        result
    };
    let host = transports().next().unwrap();
    for (transport, world) in [(host, 2), (host, 3), (PAIRS, 3), (PAIRS, 5)] {
        mismatch_of(transport, world, "buffer", &call);
    }
}

#[test]
fn different_exchanges_are_a_mismatch_and_change_nothing() {
    let sum = ReduceOp::Sum;
    let last = |group: &ProcessGroup| group.world_size() - 1;
    mismatch("verb", |group, one, two| match group.rank() {
        0 => group.gather(two, one, 0),
        _ => group.scatter(one, two, 0),
    });
    mismatch("verb", |group, one, two| match group.rank() {
        rank if rank == last(group) => group.gather(two, one, rank),
        rank => group.scatter(one, if rank == 0 { two } else { &[] }, 0),
    });
    mismatch("verb", |group, one, two| match group.rank() {
        0 => group.all_to_all(two, &ONES[..two.len()]),
        _ => group.all_reduce(one, sum),
    });
    mismatch("verb", |group, _, two| match group.rank() {
        0 => group.all_to_all(two, &ONES[..two.len()]),
        _ => group.barrier(),
    });
    mismatch("dtype", |group, one, two| match group.rank() {
        0 => group.gather(two, one, 0),
        _ => group.gather(&mut [], &WHOLE[..one.len()], 0),
    });
    mismatch("root", |group, one, two| group.gather(two, one, group.rank()));
    mismatch("root", |group, one, two| group.scatter(one, two, group.rank()));
    mismatch("count", |group, one, two| match group.rank() {
        0 => group.gather(two, one, 0),
        _ => group.gather(&mut [], &one[1..], 0),
    });
    mismatch("count", |group, one, two| match group.rank() {
        0 => group.scatter(one, two, 0),
        _ => group.scatter(&mut one[1..], &[], 0),
    });
    mismatch("count", |group, one, two| match group.rank() {
        0 => group.all_to_all(two, &ONES[..two.len()]),
        _ => group.all_to_all(one, &two[..one.len()]),
    });
}

#[test]
fn a_message_and_a_collective_are_a_mismatch() {
    for transport in transports() {
        mismatch_of(transport, 2, "verb", &|group, one, _| match group.rank() {
            0 => group.all_reduce(one, ReduceOp::Sum),
            _ => group.recv(one, 0),
        });
        mismatch_of(transport, 2, "verb", &|group, one, two| match group.rank() {
            0 => group.all_gather(two, one),
            // A message that fits into the channel is sent before it is compared.
            _ => group.send(one, 0).and_then(|()| group.barrier()),
        });
    }
}

#[test]
fn different_block_lengths_are_a_mismatch_and_change_nothing() {
    // The lengths that a rank gives: its own block is complete, one element is missing of the
    // others'.
    let list = |group: &ProcessGroup, rank: usize, n: usize| -> Vec<usize> {
        (0..group.world_size()).map(|other| n - usize::from(other != rank)).collect()
    };
    let short = |group: &ProcessGroup| group.world_size() - 1;
    mismatch("count", |group, one, two| {
        let list = list(group, group.rank(), one.len());
        group.all_gather_v(&mut two[short(group)..], one, &list)
    });
    mismatch("count", |group, one, two| {
        group.gather_v(&mut two[short(group)..], one, &list(group, 0, one.len()), 0)
    });
    mismatch("count", |group, one, two| {
        group.scatter_v(one, &two[short(group)..], &list(group, 0, one.len()), 0)
    });
    mismatch("count", |group, one, two| {
        let list = list(group, group.rank(), one.len());
        group.reduce_scatter_v(one, &two[short(group)..], &list, ReduceOp::Sum)
    });
    mismatch("verb", |group, one, two| {
        let list = vec![one.len(); group.world_size()];
        match group.rank() {
            0 => group.all_gather_v(two, one, &list),
            _ => group.reduce_scatter_v(one, two, &list, ReduceOp::Sum),
        }
    });
    let to_all = |group: &ProcessGroup, one: &mut [f32], two: &mut [f32]| match group.rank() {
        0 => group.all_to_all_v(&mut two[..one.len()], &[0, one.len()], one, &[0, one.len()]),
        _ => {
            let (into, from) = (&mut two[1..one.len()], &one[1..]);
            group.all_to_all_v(into, &[from.len(), 0], from, &[from.len(), 0])
        }
    };
    transports().for_each(|transport| mismatch_of(transport, 2, "count", &to_all));
}
