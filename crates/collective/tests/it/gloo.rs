//! Tests of the backend over libgloo only: its own reductions, mismatched messages, joining. The
//! conformance suite checks that its results have the same bits as those of every other backend,
//! and `fault/transports.rs` that it reports the same failures.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::common::{self, DEADLINE, Role, SOON, Workers, over, play};
use collective::{
    Error, GroupOptions, MemoryStore, Message, ProcessGroup, ReduceOp, Result, SharedBuf, TcpStore,
};
use half::{bf16, f16};

const TIMEOUT: Duration = Duration::from_secs(20);

fn options(timeout: Duration) -> GroupOptions {
    common::options("gloo", 0, timeout)
}

/// Calls `rank` on every rank of a group over gloo, as threads of this process.
fn threads<T: Send>(
    world: usize,
    timeout: Duration,
    rank: impl Fn(ProcessGroup) -> T + Sync,
) -> Vec<T> {
    play(over("gloo", world, timeout), rank)
}

/// Runs the verbs that move data, and checks each result.
fn moves(group: &ProcessGroup) -> Result<()> {
    let (rank, world) = (group.rank(), group.world_size());
    let of = |rank: usize, count: usize| -> Vec<i32> {
        (0..count as i32).map(|i| i ^ (rank as i32) << 20).collect()
    };
    for (i, count) in [0, 1, 1000, 300_000].into_iter().enumerate() {
        let root = i % world;
        let all: Vec<i32> = (0..world).flat_map(|rank| of(rank, count)).collect();
        let sum = |i: usize| (0..world).map(|rank| of(rank, count)[i]).sum::<i32>();

        let mut buf = of(rank, count);
        group.broadcast(&mut buf, root)?;
        assert_eq!(buf, of(root, count));
        let mut output = vec![0; world * count];
        group.all_gather(&mut output, &of(rank, count))?;
        assert_eq!(output, all);
        let mut buf = of(rank, count);
        group.reduce(&mut buf, ReduceOp::Sum, root)?;
        if rank == root {
            assert!(count == 0 || (buf[0], buf[count - 1]) == (sum(0), sum(count - 1)));
        } else {
            assert_eq!(buf, of(rank, count), "only the root's buffer changes");
        }
        let mut output = vec![0; if rank == root { world * count } else { 0 }];
        group.gather(&mut output, &of(rank, count), root)?;
        assert!(rank != root || output == all);
        let mut output = vec![0; count];
        let input = if rank == root { all.clone() } else { Vec::new() };
        group.scatter(&mut output, &input, root)?;
        assert_eq!(output, of(rank, count));
        let mut output = vec![0; world * count];
        group.all_to_all(&mut output, &of(rank, world * count))?;
        let block = |from: usize| of(from, world * count)[rank * count..][..count].to_vec();
        assert_eq!(output, (0..world).flat_map(block).collect::<Vec<_>>());

        let counts: Vec<usize> = (0..world).map(|rank| (count + rank) % 5000).collect();
        let mut output = vec![0; counts.iter().sum()];
        group.all_gather_v(&mut output, &of(rank, counts[rank]), &counts)?;
        let expected = (0..world).flat_map(|rank| of(rank, counts[rank]));
        assert_eq!(output, expected.collect::<Vec<_>>());
        let mut output = vec![0; counts[rank]];
        let input = of(rank, counts.iter().sum());
        group.reduce_scatter_v(&mut output, &input, &counts, ReduceOp::Max)?;
        let start = counts[..rank].iter().sum();
        assert_eq!(output, of(world - 1, input.len())[start..][..counts[rank]]);
    }
    let mut shared: SharedBuf<f32> = group.alloc(1000)?;
    assert!(shared.iter().all(|&x| x == 0.0));
    shared.fill(1.5);
    group.all_reduce(&mut shared, ReduceOp::Sum)?;
    assert!(shared.iter().all(|&x| x == 1.5 * world as f32));
    let mut sum = group.all_reduce_async(vec![rank as u64; 9], ReduceOp::Sum)?.wait()?;
    assert_eq!(sum.pop(), Some((0..world as u64).sum()));
    group.monitored_barrier(TIMEOUT)
}

/// Messages in both directions at once, out of order between peers, empty and large ones.
fn messages(group: &ProcessGroup) -> Result<()> {
    let (rank, world) = (group.rank(), group.world_size());
    let peers: Vec<usize> = (0..world).filter(|&peer| peer != rank).collect();
    let counts = [3, 0, 3_000_000, 1];
    for round in 0..3_u64 {
        let of = |from: usize, to: usize, i: usize| {
            vec![round << 40 | (from << 20 | to << 10 | i) as u64; counts[i]]
        };
        let out: Vec<Vec<Vec<u64>>> = peers
            .iter()
            .map(|&peer| (0..counts.len()).map(|i| of(rank, peer, i)).collect())
            .collect();
        let mut into: Vec<Vec<Vec<u64>>> =
            peers.iter().map(|_| counts.iter().map(|&count| vec![0; count]).collect()).collect();
        let mut batch = Vec::new();
        for (&peer, blocks) in peers.iter().zip(&mut into).rev() {
            batch.extend(blocks.iter_mut().map(|block| Message::recv(block, peer)));
        }
        for (&peer, blocks) in peers.iter().zip(&out) {
            batch.extend(blocks.iter().map(|block| Message::send(block, peer)));
        }
        group.batch_isend_irecv(batch)?;
        for (&peer, blocks) in peers.iter().zip(&into) {
            for (i, block) in blocks.iter().enumerate() {
                assert_eq!(*block, of(peer, rank, i));
            }
        }
    }
    // Only ranks 0 and 1; the others are in the barrier already.
    if world > 1 && rank < 2 {
        let mut got = [0.0_f32; 5];
        match rank {
            0 => group.send(&[1.0_f32; 5], 1)?,
            _ => group.recv(&mut got, 0)?,
        }
        assert!(rank == 0 || got == [1.0; 5]);
    }
    group.barrier()
}

/// Any order of reduction is allowed, but the ranks must have equal bits and correct results.
fn fast(group: &ProcessGroup) -> Result<()> {
    let (rank, world) = (group.rank(), group.world_size());
    for count in [0, 1, 5, 1000, 100_003] {
        let value = |rank: usize, i: usize| ((i * 7 + rank * 13) % 64) as f32;
        let fold = |i: usize, f: fn(f32, f32) -> f32| {
            (0..world).map(|rank| value(rank, i)).reduce(f).unwrap()
        };
        let mean = |i: usize| fold(i, |a, b| a + b) / world as f32;
        let own: Vec<bf16> = (0..count).map(|i| bf16::from_f32(value(rank, i))).collect();
        let mut buf = own.clone();
        group.all_reduce(&mut buf, ReduceOp::Avg)?;
        let mut all = vec![bf16::ZERO; world * count];
        group.all_gather(&mut all, &buf)?;
        for (i, x) in buf.iter().enumerate() {
            // Two roundings of 2^-9, of sums up to five times the mean.
            assert!((x.to_f32() - mean(i)).abs() <= mean(i) / 64.0, "{x} is not {}", mean(i));
            assert!((0..world).all(|rank| all[rank * count + i].to_bits() == x.to_bits()));
        }
        let mut buf = own.clone();
        group.reduce(&mut buf, ReduceOp::Max, world - 1)?;
        let max = |i: usize| bf16::from_f32(fold(i, f32::max));
        let expected = if rank == world - 1 { (0..count).map(max).collect() } else { own };
        assert_eq!(buf, expected);
        let mut buf: Vec<f32> = (0..count).map(|i| value(rank, i)).collect();
        group.all_reduce(&mut buf, ReduceOp::pre_mul_sum(0.25))?;
        assert!(buf.iter().enumerate().all(|(i, &x)| x == fold(i, |a, b| a + b) / 4.0));
        let mut buf = vec![if rank == 0 { f16::NAN } else { f16::ONE }; count];
        group.all_reduce(&mut buf, ReduceOp::Min)?;
        assert!(buf.iter().all(|x| x.is_nan()));
        let mut bits = vec![1_u64 << rank; count];
        group.all_reduce(&mut bits, ReduceOp::BitXor)?;
        assert_eq!(bits, vec![(1 << world) - 1; count]);
    }
    Ok(())
}

#[test]
fn moving_verbs_and_messages_deliver_the_right_data() {
    for world in 1..=5 {
        threads(world, TIMEOUT, |group| moves(&group).unwrap());
        threads(world, TIMEOUT, |group| messages(&group).unwrap());
    }
}

#[test]
fn fast_reductions_agree_on_all_ranks() {
    for world in 1..=5 {
        play(over("gloo-fast", world, TIMEOUT), |group| fast(&group).unwrap());
    }
}

#[test]
fn moving_verbs_and_messages_work_between_processes() {
    for world in 1..=4 {
        let ranks: Vec<_> = (0..world).collect();
        Workers::start_over("gloo", "gloo::moves", world, &ranks, TIMEOUT).finish();
    }
}

#[test]
fn a_name_can_be_reused_after_its_group_is_dropped() {
    let store = Arc::new(MemoryStore::new());
    for _ in 0..2 {
        std::thread::scope(|scope| {
            for rank in 0..3 {
                let store = Arc::clone(&store);
                scope.spawn(move || {
                    let group = ProcessGroup::from_store(store, rank, 3, options(TIMEOUT)).unwrap();
                    group.barrier().unwrap();
                });
            }
        });
    }
}

#[test]
fn an_unexpected_message_is_a_mismatch_and_changes_nothing() {
    for wrong in 0..3 {
        threads(3, TIMEOUT, |group| {
            let start = Instant::now();
            let mut buf = [7_u32; 100].map(|x| x as f32);
            let error = match group.rank() {
                0 => match wrong {
                    0 => group.send(&[1.0_f32; 99], 1),
                    1 => group.send(&[1_i32; 100], 1),
                    // Sending an empty message completes at once.
                    _ => group.send(&[1.0_f32; 0], 1).and_then(|()| group.barrier()),
                },
                1 => group.recv(&mut buf, 0),
                _ => group.barrier(),
            }
            .unwrap_err();
            assert!(start.elapsed() < SOON);
            assert_eq!(buf, [7.0; 100]);
            let Error::Mismatch { field, .. } = &error else { panic!("{error}") };
            assert_eq!(*field, if wrong == 1 { "dtype" } else { "count" }, "{error}");
        });
    }
}

#[test]
fn a_send_or_receive_that_times_out_names_its_peer() {
    for receives in [false, true] {
        let timeout = Duration::from_millis(300);
        threads(2, timeout, |group| {
            if group.rank() == 1 {
                std::thread::sleep(2 * timeout);
                return;
            }
            let error = match receives {
                true => group.recv(&mut [0_u8; 3], 1),
                false => group.send(&[0_u8; 3], 1),
            };
            let Err(Error::Timeout { missing, .. }) = &error else { panic!("{error:?}") };
            assert_eq!(missing, &[1]);
        });
    }
}

#[test]
fn a_rank_that_dies_after_publishing_its_address_is_named() {
    // The published addresses belong to a process that has ended.
    let store = Arc::new(MemoryStore::new());
    let workers = Workers::start_over("gloo", "gloo::vanish", 2, &[0], Duration::from_secs(2));
    for (file, key) in
        [("places", "default/1/default/place/all"), ("member", "default/1/default/gloo/0/1")]
    {
        let said = workers.file(file);
        let bytes: Vec<u8> = said.split(' ').map(|byte| byte.parse().unwrap()).collect();
        collective::Store::set(&*store, key, &bytes).unwrap();
    }
    drop(workers);
    let start = Instant::now();
    let options = options(Duration::from_secs(2));
    let error = ProcessGroup::from_store(store, 1, 2, options).unwrap_err();
    assert!(start.elapsed() < SOON, "{:?}", start.elapsed());
    match error {
        Error::PeerDied { rank: 0, .. } => {}
        Error::Timeout { missing, .. } => assert_eq!(missing, [0]),
        other => panic!("{other}"),
    }
}

/// All data arrives even if its sender has left.
#[test]
fn a_rank_may_leave_after_its_part_is_done() {
    for _ in 0..20 {
        threads(3, TIMEOUT, |group| {
            let mut all = vec![0_i32; 3 * 50_000];
            group.all_gather(&mut all, &vec![group.rank() as i32; 50_000]).unwrap();
            match group.rank() {
                0 => group.send(&all, 1).unwrap(),
                1 => group.recv(&mut all, 0).unwrap(),
                _ => {}
            }
            assert_eq!(all[149_999], 2);
        });
    }
}

#[test]
fn split_and_rebuilt_groups_work_over_gloo() {
    threads(4, TIMEOUT, |group| {
        let rank = group.rank();
        let half = group.split(Some(rank as u32 % 2), 0).unwrap().unwrap();
        let mut sum = [rank as i64];
        half.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
        assert_eq!(sum, [if rank % 2 == 0 { 2 } else { 4 }]);
        drop(half);
        if rank == 2 {
            return;
        }
        let error = group.barrier().unwrap_err();
        assert!(matches!(error, Error::Aborted { by: 2, .. }), "{error}");
        let group = group.rebuild(Duration::from_millis(500)).unwrap();
        let mut sum = vec![rank as i64; 5000];
        group.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
        assert_eq!((group.global_ranks(), sum), (&[0, 1, 3][..], vec![4; 5000]));
    });
}

/// Runs a process rank.
pub(crate) fn worker() {
    let Some(role) = Role::from_env() else { return };
    if role.scenario == "vanish" {
        let store = Arc::new(TcpStore::connect(&role.host, role.port, role.timeout).unwrap());
        let options = options(role.timeout);
        let known = Arc::clone(&store);
        std::thread::spawn(move || ProcessGroup::from_store(known, role.rank, role.world, options));
        // Publishes a record for rank 1, so that rank 0 continues and publishes its own address.
        let place =
            collective::Store::get(&*store, "default/1/default/place/0", role.timeout).unwrap();
        collective::Store::set(&*store, "default/1/default/place/1", &place).unwrap();
        let get = |key| collective::Store::get(&*store, key, role.timeout).unwrap();
        let (places, member) =
            (get("default/1/default/place/all"), get("default/1/default/gloo/0/1"));
        for (name, bytes) in [("places", places), ("member", member)] {
            let text: Vec<String> = bytes.iter().map(ToString::to_string).collect();
            std::fs::write(role.dir.join("new"), text.join(" ")).unwrap();
            std::fs::rename(role.dir.join("new"), role.dir.join(name)).unwrap();
        }
        std::thread::sleep(DEADLINE);
        return;
    }
    let group = role.join().unwrap();
    moves(&group).unwrap();
    messages(&group).unwrap();
}
