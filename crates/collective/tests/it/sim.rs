//! The simulator against closed forms that are repeated here; its faults, and its backend.

#[expect(dead_code, reason = "its tables are compared row by row")]
#[path = "../../examples/cost_table.rs"]
mod cost_table;

use std::time::Duration;

use collective::sim::{Algorithm, Fault, Link, Network, Placement, simulate};
use collective::{
    DType, Determinism, Error, GroupOptions, ProcessGroup, Rank, ReduceOp, Result,
    backend::{OpDesc, Verb},
};

use crate::common;

const MICRO: Duration = Duration::from_micros(1);

fn op(verb: Verb, count: usize) -> OpDesc {
    let folds = matches!(verb, Verb::AllReduce | Verb::Reduce | Verb::ReduceScatter);
    let rooted = matches!(verb, Verb::Reduce | Verb::Broadcast | Verb::Gather | Verb::Scatter);
    OpDesc {
        verb,
        dtype: DType::F32,
        op: folds.then_some(ReduceOp::Sum),
        root: rooted.then_some(0),
        count,
    }
}

/// Closed-form time of an all-reduce (by a binomial tree a reduce) of `n` bytes on `p` ranks, one
/// on each machine.
fn textbook(algorithm: Algorithm, n: f64, p: usize) -> f64 {
    let Network { between, fold_per_byte: gamma, .. } = Network::default();
    let (alpha, beta) = (between.latency + between.per_message, between.per_byte);
    let (ranks, steps) = (p as f64, (p as f64).log2());
    // Consecutive messages follow each other at the pace of the slower of rank and interface.
    let row =
        |bytes: f64| alpha + bytes * beta + (ranks - 2.0) * between.per_message.max(bytes * beta);
    let shared = (ranks - 1.0) / ranks * n;
    match algorithm {
        Algorithm::Flat => row(n) + (ranks - 1.0) * n * gamma,
        Algorithm::Direct => 2.0 * row(n / ranks) + shared * gamma,
        Algorithm::Ring => 2.0 * (ranks - 1.0) * alpha + 2.0 * shared * beta + shared * gamma,
        Algorithm::RecursiveDoubling => steps * (alpha + n * beta + n * gamma),
        Algorithm::HalvingDoubling => 2.0 * steps * alpha + 2.0 * shared * beta + shared * gamma,
        Algorithm::Binomial => steps * (alpha + n * beta + n * gamma),
        _ => unreachable!("no closed form for this algorithm"),
    }
}

fn check_against_textbook(algorithm: Algorithm, bytes: usize, ranks: usize) {
    let verb = if algorithm == Algorithm::Binomial { Verb::Reduce } else { Verb::AllReduce };
    let op = op(verb, bytes / 4);
    let report =
        simulate(&Network::default(), ranks, &op, Determinism::Fast, Some(algorithm)).unwrap();
    let (got, expected) = (report.time.as_secs_f64(), textbook(algorithm, bytes as f64, ranks));
    let what = format!("{algorithm} of {bytes} bytes on {ranks} ranks: {got} for {expected}");
    assert!((got / expected - 1.0).abs() < 0.01, "{what}");
    assert!((report.expected.as_secs_f64() / expected - 1.0).abs() < 0.01, "model: {what}");
}

#[test]
fn all_reduce_times_match_the_closed_forms() {
    for ranks in [8, 64, 512, 4096] {
        // Multiples of 4,096 elements, so that every shard is a whole one.
        for bytes in [16 << 10, 256 << 10, 1 << 20, 16 << 20] {
            for algorithm in
                [Algorithm::RecursiveDoubling, Algorithm::HalvingDoubling, Algorithm::Binomial]
            {
                check_against_textbook(algorithm, bytes, ranks);
            }
            if ranks <= 512 {
                check_against_textbook(Algorithm::Flat, bytes, ranks);
                check_against_textbook(Algorithm::Ring, bytes, ranks);
            }
            // Larger ones are sent in several chunks, in different rounds.
            if ranks <= 512 && bytes <= 256 << 10 {
                check_against_textbook(Algorithm::Direct, bytes, ranks);
            }
        }
    }
}

/// Algorithms that send up to 33 million messages.
#[test]
fn all_reduce_times_match_the_closed_forms_on_4096_ranks() {
    check_against_textbook(Algorithm::Flat, 256 << 10, 4096);
    check_against_textbook(Algorithm::Direct, 16 << 20, 4096);
    check_against_textbook(Algorithm::Ring, 16 << 20, 4096);
}

#[test]
fn times_of_every_verb_match_the_model() {
    let verbs =
        [Verb::Reduce, Verb::Broadcast, Verb::AllGather, Verb::ReduceScatter, Verb::AllReduce];
    for verb in verbs {
        for algorithm in Algorithm::ALL {
            for (ranks, count) in [(8, 4096), (64, 4096), (64, 1 << 20)] {
                let op = op(verb, count);
                let report =
                    simulate(&Network::default(), ranks, &op, Determinism::Fast, Some(algorithm));
                let Ok(report) = report else { continue };
                let ratio = report.time.as_secs_f64() / report.expected.as_secs_f64();
                // With a root, some ranks are served before others and start earlier, which the
                // model does not include.
                let bound = if op.root.is_some() { 0.1 } else { 0.01 };
                assert!((ratio - 1.0).abs() < bound, "{op} by {algorithm} on {ranks}: {ratio}");
            }
        }
    }
}

#[test]
fn ranks_of_a_machine_share_its_interface() {
    let network = Network::default().with_placement(Placement::Blocks(8));
    let n = 64 << 10;
    let run = |ranks, algorithm| {
        simulate(&network, ranks, &op(Verb::AllReduce, n / 4), Determinism::Fast, Some(algorithm))
            .unwrap()
    };
    // Three steps within machines, then all eight ranks exchange everything between them.
    let Network { within, between, fold_per_byte, .. } = network;
    let step = |link: Link, share: f64| {
        link.latency + link.per_message + n as f64 * (share * link.per_byte + fold_per_byte)
    };
    let expected = 3.0 * step(within, 1.0) + step(between, 8.0);
    let got = run(16, Algorithm::RecursiveDoubling).time.as_secs_f64();
    assert!((got / expected - 1.0).abs() < 0.01, "{got} for {expected}");

    let (flat, two) = (run(1024, Algorithm::RecursiveDoubling), run(1024, Algorithm::TwoLevel));
    let sent = |report: &collective::sim::Report| report.interfaces[3].sent;
    assert_eq!(sent(&flat), 8 * 7 * n as u64);
    assert!(sent(&two) <= 7 * n as u64);
    assert!(two.time * 3 < flat.time, "{:?} against {:?}", two.time, flat.time);
    assert!(two.time < run(1024, Algorithm::Ring).time);
}

/// In rank order, the bytes that an interface sends do not depend on the number of ranks per
/// machine.
#[test]
fn hierarchical_all_reduce_bounds_bytes_sent_per_machine() {
    let count = 4 << 20;
    for (machines, dtype, most) in [
        (2, DType::F32, 1.0),
        (3, DType::F32, 2.0),
        (4, DType::F32, 2.0),
        (2, DType::Bf16, 2.0),
        (4, DType::Bf16, 3.0),
    ] {
        // Two ranks a machine of 16-bit types send no more by the direct algorithm.
        let fewest = if dtype == DType::F32 { 2 } else { 4 };
        for each in [fewest, 8] {
            let network = Network::default().with_placement(Placement::Blocks(each));
            let op = OpDesc { dtype, ..op(Verb::AllReduce, count) };
            let run = |algorithm| {
                simulate(&network, machines * each, &op, Determinism::RankOrder, algorithm).unwrap()
            };
            let (chosen, direct) = (run(None), run(Some(Algorithm::Direct)));
            let what = format!("{machines} machines of {each}, {dtype}");
            assert_eq!(chosen.algorithm, Algorithm::Hierarchical, "{what}");
            assert!(chosen.time < direct.time, "{what}: {:?}, {:?}", chosen.time, direct.time);
            let ratio = chosen.time.as_secs_f64() / chosen.expected.as_secs_f64();
            assert!((0.5..1.5).contains(&ratio), "{what}: {ratio} of what was expected");
            let bytes = (count * dtype.size()) as f64;
            for interface in &chosen.interfaces {
                let sent = interface.sent as f64 / bytes;
                assert!(sent <= most, "{what}: sent {sent}");
            }
        }
    }
}

/// No algorithm is more than 1.5 times as fast as the chosen one.
#[test]
fn the_chosen_algorithm_is_near_the_fastest() {
    for (ranks, per_machine) in [(3, 1), (8, 1), (48, 1), (64, 8), (40, 5), (12, 12)] {
        let network = Network::default().with_placement(Placement::Blocks(per_machine));
        for count in [1, 1000, 30_000, 1 << 20] {
            for verb in [Verb::AllReduce, Verb::Broadcast, Verb::AllGather, Verb::Reduce] {
                let op = op(verb, count);
                let time = |algorithm| {
                    let report = simulate(&network, ranks, &op, Determinism::Fast, algorithm);
                    report.map(|report| (report.time, report.algorithm))
                };
                let (chosen, name) = time(None).unwrap();
                for algorithm in Algorithm::ALL {
                    let Ok((other, _)) = time(Some(algorithm)) else { continue };
                    assert!(
                        chosen.as_secs_f64() <= 1.5 * other.as_secs_f64(),
                        "{op} on {ranks}, {per_machine} a machine: {name} takes {chosen:?}, \
                         {algorithm} {other:?}"
                    );
                }
            }
        }
    }
}

#[test]
fn rank_order_allows_only_algorithms_that_keep_the_bits() {
    let network = Network::default();
    let by = |op: &OpDesc, algorithm| simulate(&network, 8, op, Determinism::RankOrder, algorithm);
    let sum = op(Verb::AllReduce, 1000);
    let error = by(&sum, Some(Algorithm::Ring)).unwrap_err();
    assert!(matches!(error, Error::Unsupported { .. }), "{error}");
    let chosen = by(&sum, None).unwrap().algorithm;
    assert!(matches!(chosen, Algorithm::Flat | Algorithm::Direct), "{chosen}");
    by(&OpDesc { dtype: DType::I32, ..sum }, Some(Algorithm::Ring)).unwrap();
}

fn report(network: &Network, algorithm: Algorithm) -> Vec<Result<Duration>> {
    simulate(network, 16, &op(Verb::AllReduce, 1 << 20), Determinism::Fast, Some(algorithm))
        .unwrap()
        .ranks
}

#[test]
fn a_dead_rank_is_named_by_all_that_need_it() {
    for algorithm in
        [Algorithm::Flat, Algorithm::Direct, Algorithm::Ring, Algorithm::HalvingDoubling]
    {
        let network = Network::default();
        let whole = simulate(
            &network,
            16,
            &op(Verb::AllReduce, 1 << 20),
            Determinism::Fast,
            Some(algorithm),
        );
        let whole = whole.unwrap().time;
        for (part, dead) in [(1, 3), (4, 15), (7, 0)] {
            let fault = Fault::Death { rank: dead, at: whole * part / 10 };
            let ranks = report(&network.clone().with_fault(fault), algorithm);
            let mut told = 0;
            for (rank, result) in ranks.into_iter().enumerate() {
                match result {
                    Err(Error::PeerDied { rank: named, .. }) => {
                        assert_eq!(named, dead);
                        told += 1;
                    }
                    Err(Error::Aborted { by, .. }) => assert_eq!((by, rank), (dead, dead)),
                    Ok(_) => assert_ne!(rank, dead),
                    other => panic!("{algorithm}: rank {rank}: {other:?}"),
                }
            }
            assert!(told > 0, "{algorithm}: rank {dead} at {part}/10");
        }
    }
}

#[test]
fn a_lost_message_times_out_at_its_receiver() {
    let network = Network::default().with_timeout(Duration::from_secs(5));
    for algorithm in [Algorithm::Flat, Algorithm::Direct, Algorithm::Ring] {
        let fault = Fault::Loss { from: 2, to: 3, message: 0 };
        let ranks = report(&network.clone().with_fault(fault), algorithm);
        let who = |result: &Result<Duration>| match result {
            Ok(_) => None,
            Err(Error::Timeout { missing, waited, .. }) => {
                assert_eq!(*waited, Duration::from_secs(5));
                Some(missing.clone())
            }
            Err(Error::Aborted { by, .. }) => Some(vec![*by]),
            Err(other) => panic!("{other}"),
        };
        assert_eq!(who(&ranks[3]), Some(vec![2]), "{algorithm}");
        let others: Vec<_> = ranks.iter().enumerate().filter(|(rank, _)| *rank != 3).collect();
        for (rank, result) in others {
            let by = if rank == 2 { vec![3] } else { vec![2] };
            assert!(who(result).is_none_or(|named| named == by), "{algorithm}: rank {rank}");
        }
    }
    // All ranks of a chain wait from the start; only the rank whose peer does not wait knows the
    // missing rank.
    let network = network.with_fault(Fault::Loss { from: 0, to: 1, message: 0 });
    let op = op(Verb::Broadcast, 1 << 20);
    let chain = simulate(&network, 6, &op, Determinism::Fast, Some(Algorithm::Ring)).unwrap();
    assert!(chain.ranks[0].is_ok());
    for result in &chain.ranks[1..] {
        let Err(Error::Timeout { missing, .. }) = result else { panic!("{result:?}") };
        assert_eq!(missing, &[0]);
    }
}

#[test]
fn the_earliest_lost_message_counts() {
    let received = |losses: &[u64]| {
        let fault = |&message| Fault::Loss { from: 2, to: 3, message };
        let network = losses.iter().map(fault).fold(Network::default(), Network::with_fault);
        let op = op(Verb::AllReduce, 1000);
        let report = simulate(&network, 8, &op, Determinism::Fast, Some(Algorithm::Ring)).unwrap();
        report.interfaces[3].received
    };
    assert!(received(&[5]) > 0);
    assert_eq!([received(&[5, 0]), received(&[0, 5])], [0; 2]);
}

#[test]
fn a_slow_link_delays_an_operation_or_times_out() {
    let time = |network: &Network| {
        let op = op(Verb::AllReduce, 1 << 20);
        simulate(network, 8, &op, Determinism::Fast, Some(Algorithm::Ring)).unwrap()
    };
    let network = Network::default();
    let slow = network.clone().with_fault(Fault::Slow { rank: 3, at: Duration::ZERO, times: 10 });
    let (good, bad) = (time(&network), time(&slow));
    assert!(bad.time > good.time * 8 && bad.time < good.time * 22, "{:?}", bad.time);
    let late = Fault::Slow { rank: 3, at: good.time * 2, times: 10 };
    assert_eq!(time(&network.with_fault(late)).time, good.time);

    let hasty = time(&slow.with_timeout(good.time / 4));
    let named = hasty.ranks.iter().filter_map(|result| match result {
        Err(Error::Timeout { missing, .. }) => Some(missing.clone()),
        _ => None,
    });
    let named: Vec<_> = named.collect();
    assert!(!named.is_empty() && named.iter().all(|missing| *missing == [2] || *missing == [3]));
}

#[test]
fn an_invalid_network_is_an_error() {
    let op = op(Verb::AllReduce, 10);
    let default = Network::default;
    let mut negative = default();
    negative.between.per_byte = -1.0;
    for (network, ranks) in [
        (negative, 4),
        (default(), 0),
        (default(), 100_000),
        (default().with_placement(Placement::Blocks(0)), 4),
        (default().with_placement(Placement::Machines(vec![0; 3])), 4),
        (default().with_fault(Fault::Death { rank: 4, at: MICRO }), 4),
    ] {
        let result = simulate(&network, ranks, &op, Determinism::Fast, None);
        assert!(matches!(result, Err(Error::InvalidArgument(_))), "{network:?}");
    }
    let no_operator = OpDesc { op: None, ..op };
    simulate(&default(), 4, &no_operator, Determinism::Fast, None).unwrap_err();
}

/// The rows of 8 and 64 ranks, and those of 512 and 4,096 ranks that are computed quickly.
#[test]
fn the_cost_table_in_the_docs_matches_the_example() {
    let text = include_str!("../../src/sim/cost_table.md");
    let (mut per_machine, mut rows) = (1, 0);
    for line in text.lines() {
        if line.starts_with("Eight") {
            per_machine = 8;
        }
        let cells: Vec<_> = line.split('|').map(str::trim).collect();
        let Some(Ok(ranks)) = cells.get(1).map(|ranks| ranks.parse::<usize>()) else { continue };
        let named = |algorithm: &Algorithm| algorithm.to_string() == cells[2];
        let algorithm = Algorithm::ALL.into_iter().find(named).unwrap();
        let quick = matches!(algorithm, Algorithm::HalvingDoubling | Algorithm::RecursiveDoubling);
        if ranks <= 64 || quick {
            assert_eq!(line, cost_table::row(ranks, algorithm, per_machine));
            rows += 1;
        }
    }
    assert_eq!(rows, 2 * 5 + 2 * 2 + 4 + 2 * 2);
}

fn options(timeout: Duration) -> GroupOptions {
    GroupOptions::default().with_timeout(timeout)
}

const LONG: Duration = Duration::from_secs(30);

#[test]
fn extreme_times_saturate() {
    let link = Link { latency: 1.0, per_message: 1.0, per_byte: 1.0 };
    let slow = Fault::Slow { rank: 1, at: Duration::ZERO, times: u32::MAX };
    let mut network = Network::default().with_fault(slow).with_fault(slow).with_fault(slow);
    network = network.with_timeout(Duration::MAX).with_placement(Placement::Blocks(2));
    (network.within, network.between, network.fold_per_byte) = (link, link, 1.0);
    let latest = Duration::from_nanos(u64::MAX / 1000);
    for verb in [Verb::AllReduce, Verb::Broadcast, Verb::AllGather] {
        for algorithm in Algorithm::ALL {
            for count in [1 << 20, 1 << 58] {
                // Chains and chunks would have too many rounds.
                let few = [Algorithm::RecursiveDoubling, Algorithm::HalvingDoubling];
                if count > 1 << 20 && !(few.contains(&algorithm) || verb == Verb::AllGather) {
                    continue;
                }
                let op = op(verb, count);
                let report = simulate(&network, 4, &op, Determinism::Fast, Some(algorithm));
                let Ok(report) = report else { continue };
                assert_eq!(report.time, latest, "{op} by {algorithm}");
                assert!(report.ranks.iter().all(Result::is_ok), "{op} by {algorithm}");
            }
        }
    }

    let (groups, clocks) = ProcessGroup::simulated(2, network, &options(LONG)).unwrap();
    clocks.advance(0, Duration::MAX);
    common::play(groups, |group| {
        group.all_reduce(&mut [1.0_f32; 3], ReduceOp::Sum).unwrap();
        match group.rank() {
            0 => group.send(&[1_u8; 9], 1).unwrap(),
            _ => group.recv(&mut [0_u8; 9], 0).unwrap(),
        }
    });
    assert_eq!([clocks.now(0), clocks.now(1)], [latest; 2]);
}

#[test]
fn clocks_match_the_time_of_simulate() {
    let network = Network::default().with_placement(Placement::Machines(vec![0, 1, 0, 2, 1, 0]));
    for determinism in [Determinism::RankOrder, Determinism::Fast] {
        let options = options(LONG).with_determinism(determinism);
        let (groups, clocks) = ProcessGroup::simulated(6, network.clone(), &options).unwrap();
        // All ranks wait for the last one.
        clocks.advance(4, MICRO * 100);
        let count = 100_003;
        let sums = common::play(groups, |group| {
            let mut x: Vec<f32> = (0..count).map(|i| (i * (group.rank() + 3)) as f32).collect();
            group.all_reduce(&mut x, ReduceOp::Avg).unwrap();
            x
        });
        assert!(sums.iter().all(|sum| sum == &sums[0]), "same bits on all ranks");
        assert!((sums[0][10] - 55.0).abs() < 1e-4);
        let call = OpDesc { op: Some(ReduceOp::Avg), ..op(Verb::AllReduce, count) };
        let report = simulate(&network, 6, &call, determinism, None).unwrap();
        let last = (0..6).map(|rank| clocks.now(rank)).max().unwrap();
        let expected = MICRO * 100 + network.meeting(6) + report.time;
        assert!(last.abs_diff(expected) <= Duration::from_nanos(2), "{last:?} for {expected:?}");
    }
}

#[test]
fn a_meeting_costs_the_same_for_equal_placements() {
    let meeting = |placement| Network::default().with_placement(placement).meeting(4);
    let (inside, across) = (Placement::Blocks(4), Placement::Blocks(3));
    assert_eq!(meeting(Placement::Machines(vec![7; 4])), meeting(inside));
    assert_eq!(meeting(Placement::Machines(vec![0, 0, 0, 1])), meeting(across));
}

#[test]
fn a_message_between_two_ranks_takes_the_modelled_time() {
    let network = Network::default();
    let (groups, clocks) = ProcessGroup::simulated(3, network.clone(), &options(LONG)).unwrap();
    common::play(groups, |group| match group.rank() {
        0 => group.send(&[1_u8; 3000], 1).unwrap(),
        1 => group.recv(&mut [0_u8; 3000], 0).unwrap(),
        _ => (),
    });
    let link = network.between;
    let expected = link.latency + link.per_message + 3000.0 * link.per_byte;
    assert!(clocks.now(1).abs_diff(Duration::from_secs_f64(expected)) < Duration::from_nanos(2));
    assert_eq!(clocks.now(2), Duration::ZERO);
}

#[test]
fn a_planned_death_is_reported_on_all_ranks() {
    let network = Network::default().with_fault(Fault::Death { rank: 2, at: MICRO * 200 });
    let (groups, clocks) = ProcessGroup::simulated(4, network, &options(LONG)).unwrap();
    let results = common::play(groups, |group| {
        for round in 0..100 {
            if let Err(error) = group.all_reduce(&mut vec![1.0_f32; 1000], ReduceOp::Sum) {
                let again = group.barrier().unwrap_err();
                assert!(matches!(again, Error::Poisoned(_)), "{again}");
                return (round, error);
            }
        }
        panic!("no rank died");
    });
    for (rank, (round, error)) in results.into_iter().enumerate() {
        assert!(round > 0, "the rank died before the first operation");
        match error {
            Error::PeerDied { rank: 2, .. } => assert_ne!(rank, 2),
            Error::Aborted { by: 2, .. } => assert_eq!(rank, 2),
            other => panic!("rank {rank}: {other}"),
        }
    }
    assert!(clocks.now(0) > MICRO * 200);
}

#[test]
fn a_dead_rank_sends_no_message_even_if_another_died_before() {
    let death = |rank, at| Fault::Death { rank, at };
    let network = Network::default().with_fault(death(0, MICRO)).with_fault(death(3, MICRO * 2));
    let (groups, clocks) = ProcessGroup::simulated(4, network, &options(LONG)).unwrap();
    clocks.advance(3, MICRO * 2);
    let results = common::play(groups, |group| {
        let result = match group.rank() {
            2 => group.recv(&mut [0_u8], 3),
            3 => group.send(&[1_u8], 2),
            _ => Ok(()),
        };
        // A rank that leaves would be another reason for failures.
        (result, group)
    });
    assert!(matches!(results[2].0, Err(Error::PeerDied { rank: 3, .. })), "{:?}", results[2].0);
    assert!(matches!(results[3].0, Err(Error::Aborted { by: 3, .. })), "{:?}", results[3].0);
}

#[test]
fn late_leaving_and_aborting_ranks_are_named() {
    let group =
        |timeout| ProcessGroup::simulated(4, Network::default(), &options(timeout)).unwrap().0;
    let results = common::play(group(Duration::from_millis(200)), |group| match group.rank() {
        1 | 3 => {
            std::thread::sleep(Duration::from_millis(600));
            group.barrier()
        }
        _ => group.barrier(),
    });
    for (rank, result) in results.into_iter().enumerate() {
        match result.unwrap_err() {
            Error::Timeout { missing, .. } => {
                assert_eq!(missing, [1, 3]);
                assert!(rank % 2 == 0);
            }
            Error::Aborted { by, .. } => assert!(rank % 2 == 1 && by % 2 == 0),
            other => panic!("rank {rank}: {other}"),
        }
    }
    // A rank that leaves or aborts ends the other ranks' waits at once.
    let results = common::play(group(LONG), |group| match group.rank() {
        3 => Ok(()),
        _ => group.barrier(),
    });
    for result in &results[..3] {
        assert!(matches!(result, Err(Error::Aborted { by: 3, .. })), "{result:?}");
    }
    let results = common::play(group(LONG), |group| {
        if group.rank() == 1 {
            group.abort("no more");
            std::thread::sleep(Duration::from_millis(100));
            return Ok(());
        }
        group.recv(&mut [0_u8], 1)
    });
    for rank in [0, 2, 3] {
        let Err(Error::Aborted { by: 1, reason }) = &results[rank] else {
            panic!("{:?}", results[rank]);
        };
        assert_eq!(reason, "no more");
    }
}

#[test]
fn different_calls_are_a_mismatch_on_all_ranks() {
    let call = |group: ProcessGroup, rank: Rank| {
        let mut x = [1_i32, 2, 3];
        let result = match rank {
            2 => group.all_reduce(&mut x[..2], ReduceOp::Sum),
            _ => group.all_reduce(&mut x, ReduceOp::Sum),
        };
        assert_eq!(x, [1, 2, 3], "untouched");
        result
    };
    let groups = ProcessGroup::simulated(3, Network::default(), &options(LONG)).unwrap().0;
    for result in common::play(groups, |group| call(group.clone(), group.rank())) {
        let Err(Error::Mismatch { field: "count", by_rank, .. }) = result else {
            panic!("{result:?}");
        };
        assert_eq!(by_rank.len(), 3);
    }
}
