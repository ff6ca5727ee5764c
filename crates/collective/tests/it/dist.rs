//! The functions of `mmengine.dist` against references that know all ranks' values, and without a
//! group.

use std::collections::BTreeMap;
use std::time::Duration;

use collective::dist::{self, Coalesce, Param, all_reduce_params};
use collective::{Error, ProcessGroup, Rank, ReduceOp, Topology, object};
use half::bf16;

use crate::common;

const TIMEOUT: Duration = Duration::from_secs(30);

/// Calls `rank` on every rank of groups of 1 to 4 ranks, with the world size.
fn worlds(rank: impl Fn(&ProcessGroup, usize) + Sync) {
    for world in 1..=4 {
        common::threads(world, TIMEOUT, |group| {
            rank(&group, world);
            group.barrier().unwrap();
        });
    }
}

/// A number that depends on rank and index; sums of four are exact in `bf16`, and as integers.
fn number(rank: Rank, index: usize) -> i64 {
    ((rank * 7 + index * 3) % 11) as i64 - 4
}

/// The expected result of a reduction at one index, reduced in rank order.
fn folded(op: ReduceOp, world: usize, index: usize) -> f64 {
    let mut numbers = (0..world).map(|rank| number(rank, index));
    let mut fold = |f: fn(i64, i64) -> i64| numbers.by_ref().reduce(f).unwrap() as f64;
    match op {
        ReduceOp::Sum => fold(|a, b| a + b),
        ReduceOp::Avg => fold(|a, b| a + b) * (1.0 / world as f64),
        ReduceOp::Product => fold(|a, b| a * b),
        ReduceOp::Min => fold(i64::min),
        ReduceOp::Max => fold(i64::max),
        ReduceOp::BitAnd => fold(|a, b| a & b),
        ReduceOp::BitOr => fold(|a, b| a | b),
        _ => fold(|a, b| a ^ b),
    }
}

const FLOAT_OPS: [ReduceOp; 5] =
    [ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Product, ReduceOp::Min, ReduceOp::Max];
const INT_OPS: [ReduceOp; 6] = [
    ReduceOp::Sum,
    ReduceOp::Min,
    ReduceOp::Max,
    ReduceOp::BitAnd,
    ReduceOp::BitOr,
    ReduceOp::BitXor,
];

#[test]
fn rank_queries_work_with_and_without_a_group() {
    assert!(!dist::is_distributed(None) && dist::is_main_process(None));
    assert_eq!((dist::dist_info(None), dist::backend(None)), ((0, 1), None));
    assert_eq!(dist::master_only(None, || 5), Some(5));
    dist::barrier(None).unwrap();
    worlds(|group, world| {
        let (rank, group) = (group.rank(), Some(group));
        assert!(dist::is_distributed(group));
        assert_eq!(dist::backend(group), Some("host"));
        assert_eq!((dist::rank(group), dist::world_size(group)), (rank, world));
        assert_eq!(dist::dist_info(group), (rank, world));
        assert_eq!(dist::is_main_process(group), rank == 0);
        assert_eq!(dist::master_only(group, || rank), (rank == 0).then_some(0));
        dist::barrier(group).unwrap();
    });
}

#[test]
fn without_a_group_data_is_unchanged() {
    let mut numbers = [1_i64, 2];
    for op in [ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Product] {
        dist::all_reduce(&mut numbers, op, None).unwrap();
    }
    dist::broadcast(&mut numbers, 0, None).unwrap();
    assert_eq!(numbers, [1, 2]);
    assert_eq!(dist::all_gather(&numbers, None).unwrap(), [[1, 2]]);
    assert_eq!(dist::gather(&numbers, 0, None).unwrap(), [[1, 2]]);
    // Without a group, objects that JSON cannot represent are allowed.
    let map = BTreeMap::from([((1, 2), 3)]);
    let list = vec![map.clone()];
    assert_eq!(dist::all_gather_object(map.clone(), None).unwrap(), list);
    assert_eq!(dist::gather_object(map.clone(), 0, None).unwrap(), Some(list));
    dist::broadcast_object_list(&mut [map], 0, None).unwrap();
    assert_eq!(dist::collect_results(vec![1, 2, 3], 2, None).unwrap(), Some(vec![1, 2]));
    for error in [
        dist::broadcast(&mut numbers, 1, None).unwrap_err(),
        dist::gather(&numbers, 1, None).unwrap_err(),
        dist::gather_object(0, 1, None).unwrap_err(),
        dist::broadcast_object_list(&mut [0], 1, None).unwrap_err(),
    ] {
        assert_eq!(error.to_string(), "there is no root 1 among 1 ranks");
    }
}

#[test]
fn numbers_are_reduced_gathered_and_broadcast() {
    worlds(|group, world| {
        let rank = group.rank();
        let own: Vec<f64> = (0..20).map(|index| number(rank, index) as f64).collect();
        for op in FLOAT_OPS {
            let mut data = own.clone();
            dist::all_reduce(&mut data, op, Some(group)).unwrap();
            let wanted: Vec<f64> = (0..20).map(|index| folded(op, world, index)).collect();
            assert_eq!(data, wanted, "{op}");
        }
        for op in INT_OPS {
            let mut data: Vec<i64> = (0..20).map(|index| number(rank, index)).collect();
            dist::all_reduce(&mut data, op, Some(group)).unwrap();
            let wanted: Vec<i64> = (0..20).map(|index| folded(op, world, index) as i64).collect();
            assert_eq!(data, wanted, "{op}");
        }
        let all: Vec<Vec<f64>> = (0..world)
            .map(|rank| (0..20).map(|index| number(rank, index) as f64).collect())
            .collect();
        assert_eq!(dist::all_gather(&own, Some(group)).unwrap(), all);
        assert_eq!(
            dist::all_gather::<u8>(&[], Some(group)).unwrap(),
            vec![Vec::<u8>::new(); world]
        );
        for root in 0..world {
            let gathered = dist::gather(&own, root, Some(group)).unwrap();
            assert_eq!(gathered, if rank == root { all.clone() } else { vec![] });
            let mut data = own.clone();
            dist::broadcast(&mut data, root, Some(group)).unwrap();
            assert_eq!(data, all[root]);
        }
        let error = dist::broadcast(&mut own.clone(), world, Some(group)).unwrap_err();
        assert!(matches!(error, Error::InvalidArgument(_)), "{error}");
        if world > 1 {
            let error = dist::all_reduce(&mut [1_i64], ReduceOp::Avg, Some(group)).unwrap_err();
            assert!(matches!(error, Error::InvalidArgument(_)), "{error}");
        }
    });
}

#[test]
fn sync_random_seed_is_shared_and_new_each_time() {
    worlds(|group, _| {
        let seeds = [0; 8].map(|_| dist::sync_random_seed(Some(group)).unwrap());
        let all = object::all_gather_object(group, &seeds).unwrap();
        assert!(all.iter().all(|other| *other == seeds), "{all:?}");
        assert!(seeds.iter().all(|&seed| seed < 1 << 31));
        // Two of eight are equal once in 10^8 runs.
        assert!((1..8).all(|at| !seeds[..at].contains(&seeds[at])), "{seeds:?}");
    });
    assert_ne!(dist::sync_random_seed(None).unwrap(), dist::sync_random_seed(None).unwrap());
}

/// A key for each index; the keys do not sort in the order of the indices.
fn key(index: usize) -> String {
    format!("loss_{}", (index * 5) % 7)
}

#[test]
fn all_reduce_dict_reduces_each_value() {
    worlds(|group, world| {
        for op in FLOAT_OPS {
            let mut scalars: BTreeMap<String, f64> =
                (0..7).map(|index| (key(index), number(group.rank(), index) as f64)).collect();
            dist::all_reduce_dict(&mut scalars, op, Some(group)).unwrap();
            for index in 0..7 {
                assert_eq!(scalars[&key(index)], folded(op, world, index), "{op}");
            }
        }
        // Values of several numbers; one is empty.
        let value = |index: usize, of: &dyn Fn(usize) -> f64| -> Vec<f32> {
            (0..index).map(|at| of(index + at) as f32).collect()
        };
        let own = |index| number(group.rank(), index) as f64;
        let mut tensors: BTreeMap<String, Vec<f32>> =
            (0..7).map(|index| (key(index), value(index, &own))).collect();
        dist::all_reduce_dict(&mut tensors, ReduceOp::Sum, Some(group)).unwrap();
        for index in 0..7 {
            let wanted = value(index, &|index| folded(ReduceOp::Sum, world, index));
            assert_eq!(tensors[&key(index)], wanted);
        }
        let mut none = BTreeMap::<String, f32>::new();
        dist::all_reduce_dict(&mut none, ReduceOp::Sum, Some(group)).unwrap();
    });
}

#[test]
fn different_dictionaries_are_an_error_and_stay_unchanged() {
    common::threads(3, TIMEOUT, |group| {
        let odd = group.rank() == 2;
        let last = if odd { "loss_mask" } else { "loss_cls" };
        let mut data = BTreeMap::from([("loss_box".to_owned(), 1.0), (last.to_owned(), 2.0)]);
        let before = data.clone();
        let error = dist::all_reduce_dict(&mut data, ReduceOp::Sum, Some(&group)).unwrap_err();
        let text = "all_reduce_dict: the keys differ: rank 0 has [\"loss_cls\" (1)] where rank 2 \
                    has [\"loss_mask\" (1)]";
        assert_eq!(error.to_string(), text);
        assert_eq!(data, before);

        let mut data = BTreeMap::from([("x".to_owned(), vec![1.0; 2 + usize::from(odd)])]);
        let error = dist::all_reduce_dict(&mut data, ReduceOp::Sum, Some(&group)).unwrap_err();
        assert!(error.to_string().contains("[\"x\" (2)] where rank 2 has [\"x\" (3)]"), "{error}");
        // Only one rank has a key.
        let mut data: BTreeMap<String, f32> = BTreeMap::new();
        if odd {
            data.insert("extra".into(), 1.0);
        }
        let error = dist::all_reduce_dict(&mut data, ReduceOp::Sum, Some(&group)).unwrap_err();
        assert!(error.to_string().contains("[] where rank 2 has [\"extra\" (1)]"), "{error}");
        group.barrier().unwrap();

        let reduced = if odd {
            let mut data = BTreeMap::from([("x".to_owned(), 1.0_f64)]);
            dist::all_reduce_dict(&mut data, ReduceOp::Sum, Some(&group))
        } else {
            let mut data = BTreeMap::from([("x".to_owned(), 1.0_f32)]);
            dist::all_reduce_dict(&mut data, ReduceOp::Sum, Some(&group))
        };
        let error = reduced.unwrap_err();
        assert!(matches!(error, Error::Mismatch { field: "dtype", .. }), "{error}");
    });
}

/// Parameters of four types, in turn, of different lengths; some empty.
#[derive(Debug, Default, PartialEq)]
struct Model {
    f32s: Vec<Vec<f32>>,
    bf16s: Vec<Vec<bf16>>,
    i64s: Vec<Vec<i64>>,
    f64s: Vec<Vec<f64>>,
}

impl Model {
    fn new(of: impl Fn(usize) -> f64) -> Self {
        let mut model = Self::default();
        for param in 0..10 {
            let numbers = (0..param * 13 % 8).map(|at| of(param * 100 + at));
            model.f32s.push(numbers.clone().map(|x| x as f32).collect());
            model.bf16s.push(numbers.clone().map(bf16::from_f64).collect());
            model.i64s.push(numbers.clone().map(|x| x as i64).collect());
            model.f64s.push(numbers.collect());
        }
        model
    }

    fn params(&mut self) -> Vec<Param<'_>> {
        let Self { f32s, bf16s, i64s, f64s } = self;
        let of_each = f32s.iter_mut().zip(bf16s).zip(i64s).zip(f64s);
        let params = of_each.map(|(((a, b), c), d)| {
            [
                Param::from(&mut a[..]),
                Param::from(&mut b[..]),
                (&mut c[..]).into(),
                (&mut d[..]).into(),
            ]
        });
        params.flatten().collect()
    }
}

#[test]
fn all_reduce_params_gives_equal_results_for_any_coalescing() {
    let buckets = [0, 1, 20, 64, 1 << 20].map(|bytes| Coalesce::Buckets { bytes });
    let all = [Coalesce::PerType, Coalesce::Never].into_iter().chain(buckets);
    let all: Vec<_> = all.collect();
    worlds(|group, world| {
        for &coalesce in &all {
            for op in [ReduceOp::Sum, ReduceOp::Min, ReduceOp::Max] {
                let mut model = Model::new(|index| number(group.rank(), index) as f64);
                all_reduce_params(&mut model.params(), op, coalesce, Some(group)).unwrap();
                assert_eq!(model, Model::new(|index| folded(op, world, index)), "{coalesce:?}");
            }
        }
    });
    let mut model = Model::new(|index| index as f64);
    all_reduce_params(&mut model.params(), ReduceOp::Avg, Coalesce::PerType, None).unwrap();
    assert_eq!(model, Model::new(|index| index as f64));
}

/// A serializable object, different for each rank and index, of different lengths.
fn thing(rank: Rank, index: usize) -> (String, Option<Vec<u32>>) {
    let list = (0..rank as u32 * 3).collect();
    (format!("{rank}/{index}").repeat(1 + rank * index), (rank != index).then_some(list))
}

#[test]
fn objects_are_gathered_and_broadcast() {
    worlds(|group, world| {
        let rank = group.rank();
        let all: Vec<_> = (0..world).map(|rank| thing(rank, 1)).collect();
        assert_eq!(dist::all_gather_object(thing(rank, 1), Some(group)).unwrap(), all);
        for root in 0..world {
            let gathered = dist::gather_object(thing(rank, 1), root, Some(group)).unwrap();
            assert_eq!(gathered, (rank == root).then(|| all.clone()));
            let mut list: Vec<_> = (0..5).map(|index| thing(rank, index)).collect();
            dist::broadcast_object_list(&mut list, root, Some(group)).unwrap();
            assert_eq!(list, (0..5).map(|index| thing(root, index)).collect::<Vec<_>>());
        }
        dist::broadcast_object_list::<u8>(&mut [], 0, Some(group)).unwrap();
    });
}

#[test]
fn invalid_lists_and_roots_are_errors_and_the_group_stays_usable() {
    common::threads(3, TIMEOUT, |group| {
        let mut list = vec![group.rank(); 2 + group.rank() % 2];
        let result = dist::broadcast_object_list(&mut list, 0, Some(&group));
        if group.rank() == 1 {
            let text = "rank 0 sends a list of 2 objects, this rank has 3";
            assert_eq!(result.unwrap_err().to_string(), text);
            assert_eq!(list, [1, 1, 1]);
        } else {
            result.unwrap();
            assert_eq!(list, [0, 0]);
        }
        let error = object::gather_object(&group, &1, 3).unwrap_err();
        assert!(matches!(error, Error::InvalidArgument(_)), "{error}");
        // An object that JSON cannot represent, on one rank.
        let unwritable = BTreeMap::from_iter((group.rank() == 1).then_some((Some((1, 2)), 3)));
        let error = object::gather_object(&group, &unwritable, 0).unwrap_err();
        assert!(matches!(error, Error::InvalidArgument(_)), "{error}");
        group.barrier().unwrap();
    });
}

#[test]
fn collect_results_returns_dataset_order() {
    worlds(|group, world| {
        for samples in 0..12_usize {
            // A sampler that pads, and one that does not.
            for dealt in [samples.next_multiple_of(world), samples] {
                let own = (group.rank()..dealt).step_by(world);
                let own = own.map(|sample| (sample % samples.max(1)).to_string()).collect();
                let all = dist::collect_results(own, samples, Some(group)).unwrap();
                let wanted = (0..samples).map(|sample| sample.to_string()).collect();
                assert_eq!(all, (group.rank() == 0).then_some(wanted));
            }
        }
        // One rank may have no results, or all of them.
        let own = if group.rank() + 1 == world { vec![1, 2, 3] } else { vec![] };
        let all = dist::collect_results(own, usize::MAX, Some(group)).unwrap();
        assert_eq!(all, (group.rank() == 0).then(|| vec![1, 2, 3]));
    });
}

#[test]
fn a_local_group_has_the_ranks_of_one_host() {
    // Hosts of 1 and 3 ranks.
    common::threads(4, TIMEOUT, |group| {
        let rank = group.rank();
        let (local_rank, local_size) = if rank == 0 { (0, 1) } else { (rank - 1, 3) };
        let topology = |rank: Rank| {
            Topology::from_env(|name| match name {
                "RANK" => Some(rank.to_string()),
                "WORLD_SIZE" => Some("4".into()),
                "LOCAL_RANK" => Some(local_rank.to_string()),
                "LOCAL_WORLD_SIZE" => Some(local_size.to_string()),
                "MASTER_ADDR" => Some("127.0.0.1".into()),
                "MASTER_PORT" => Some("29500".into()),
                _ => None,
            })
            .unwrap()
        };
        let local = dist::local_group(&group, &topology(rank)).unwrap();
        assert_eq!(dist::dist_info(Some(&local)), (local_rank, local_size));
        let ranks = if rank == 0 { vec![0] } else { vec![1, 2, 3] };
        assert_eq!(local.global_ranks(), ranks);
        let sum = ranks.iter().sum::<usize>() as i64;
        let mut x = [rank as i64];
        dist::all_reduce(&mut x, ReduceOp::Sum, Some(&local)).unwrap();
        assert_eq!(x, [sum]);
        let mut wrong = topology(rank);
        wrong.local_rank = Some(rank + 1);
        let error = dist::local_group(&group, &wrong).unwrap_err().to_string();
        assert!(error.contains(&format!("local rank {}", rank + 1)), "{error}");
        if rank == 1 {
            let error = dist::local_group(&local, &topology(rank)).unwrap_err().to_string();
            assert!(error.contains("of rank 1 of 4, but the group's rank is 0 of 3"), "{error}");
        }
    });
}

#[test]
fn group_rank_locates_hosts_with_interleaved_ranks() {
    common::threads(4, TIMEOUT, |group| {
        let rank = group.rank();
        let topology = |with_host: bool| {
            Topology::from_env(|name| match name {
                "RANK" => Some(rank.to_string()),
                "WORLD_SIZE" => Some("4".into()),
                "LOCAL_RANK" => Some((rank / 2).to_string()),
                "LOCAL_WORLD_SIZE" => Some("2".into()),
                "GROUP_RANK" if with_host => Some((rank % 2).to_string()),
                "MASTER_ADDR" => Some("127.0.0.1".into()),
                "MASTER_PORT" => Some("29500".into()),
                _ => None,
            })
            .unwrap()
        };
        let local = dist::local_group(&group, &topology(true)).unwrap();
        assert_eq!(local.global_ranks(), [rank % 2, rank % 2 + 2]);
        // Without it, ranks 0 and 3 would each be alone on a host, which contradicts
        // LOCAL_WORLD_SIZE.
        let guessed = dist::local_group(&group, &topology(false));
        assert_eq!(guessed.is_err(), rank == 0 || rank == 3);
    });
}
