//! Buckets that are compressed, that overflow, or that have no elements.

use super::*;

#[test]
fn compression_hooks_round_before_and_after_the_average() {
    type Round = fn(f32) -> f32;
    let rounds: [(_, Round); 2] = [
        (CommHook::Fp16Compress, |x| f16::from_f32(x).to_f32()),
        (CommHook::Bf16Compress, |x| bf16::from_f32(x).to_f32()),
    ];
    for (hook, round) in rounds {
        ranks(3, DEADLINE, |group| {
            let (rank, world) = (group.rank(), group.world_size());
            let mut all = options((64, 64));
            all.comm_hook = hook.clone();
            let mut model = params(&[40, 7]);
            model.push(ParamInfo::new("wide", 5, DType::F64));
            let mut side = Side::new(group.clone(), model, all, Kernels::default());
            for number in 0..2 {
                side.reducer.prepare(true).unwrap();
                let of = |rank: usize, i: usize, n| gradient::<f32>(n, 3 * rank + i + number);
                side.ready(2, vec![rank as f64 / 3.0; 5]).unwrap();
                side.ready(1, of(rank, 1, 7)).unwrap();
                side.ready(0, of(rank, 0, 40)).unwrap();
                side.finish().unwrap();
                for (i, n) in [(0, 40), (1, 7)] {
                    let mut sum: Vec<f32> = of(0, i, n).into_iter().map(round).collect();
                    for other in 1..world {
                        sum.iter_mut().zip(of(other, i, n)).for_each(|(sum, x)| *sum += round(x));
                    }
                    let want: Vec<f32> = sum.iter().map(|x| round(x * (1.0 / 3.0_f32))).collect();
                    assert_eq!(side.grad::<f32>(i).unwrap(), want, "{hook:?} {i}");
                }
                assert_eq!(side.grad::<f64>(2).unwrap(), [1.0 / 3.0; 5]);
                side.reducer.zero_grad();
            }
        });
    }
}

/// A value above the range of `f16` becomes infinite on all ranks, and every rank's epilogue sees
/// it.
#[test]
fn a_compressed_bucket_overflows_on_all_ranks() {
    for (hook, fits) in [(CommHook::Fp16Compress, false), (CommHook::Bf16Compress, true)] {
        ranks(2, DEADLINE, |group| {
            let rank = group.rank();
            let kernels = Kernels::default();
            let seen = Arc::clone(&kernels.seen);
            let mut options = tiny();
            options.comm_hook = hook.clone();
            let mut side = Side::new(group, params(&[2, 0, 3]), options, kernels);
            for number in 0..4 {
                let large = number % 2 == 1 && rank == 1;
                let buckets = side.reducer.plan().buckets().len();
                side.pass(&[2, 0, 3], true, |i| if large && i == 2 { 65_536.0 } else { 2.0 });
                side.stream.sync();
                let seen = std::mem::take(&mut *seen.lock().unwrap());
                assert_eq!(seen.len(), buckets);
                assert_eq!(seen.iter().all(|one| one.2), fits || number % 2 == 0);
                let large = if fits { 32_768.0 } else { f32::INFINITY };
                let third = if number % 2 == 1 { large } else { 2.0 };
                assert_eq!(side.grad::<f32>(2).unwrap(), [third; 3]);
                assert_eq!(side.grad::<f32>(1), Some(Vec::new()));
                assert_eq!(side.grad::<f32>(0).unwrap(), [2.0; 2]);
                side.reducer.zero_grad();
            }
        });
    }
}

#[test]
fn empty_buckets_are_averaged_like_others() {
    for hook in [CommHook::AllReduce, CommHook::Fp16Compress] {
        ranks(2, DEADLINE, |group| {
            let kernels = Kernels::default();
            let seen = Arc::clone(&kernels.seen);
            let mut options = tiny();
            options.comm_hook = hook.clone();
            // Each type has its own bucket.
            let mut model = params(&[0, 0]);
            model.push(ParamInfo::new("wide", 0, DType::F64));
            let mut side = Side::new(group, model, options, kernels);
            for _ in 0..3 {
                side.reducer.prepare(true).unwrap();
                side.ready(2, Vec::<f64>::new()).unwrap();
                side.ready(1, Vec::<f32>::new()).unwrap();
                side.ready(0, Vec::<f32>::new()).unwrap();
                let buckets = side.reducer.plan().buckets().len();
                side.finish().unwrap();
                side.stream.sync();
                let seen = std::mem::take(&mut *seen.lock().unwrap());
                let expected: Vec<_> = (0..buckets).map(|bucket| (bucket, 0.0, true)).collect();
                assert_eq!(seen, expected);
                assert!(buckets > 1);
                assert_eq!(side.grad::<f32>(1), Some(Vec::new()));
            }
            side.reducer.wait().unwrap();
        });
    }
}

#[test]
fn through_device_averages_match_the_host() {
    let counts = [7, 0, 33, 16];
    ranks(2, DEADLINE, |group| {
        let averages = |through_device| {
            let mut options = options((64, 128));
            options.through_device = through_device;
            let mut reducer = Reducer::new(group.clone(), params(&counts), options).unwrap();
            let mut averages = Vec::new();
            for pass in 0..2 {
                reducer.prepare(true).unwrap();
                for (index, &count) in counts.iter().enumerate().rev() {
                    let seed = index + group.rank() * 5 + pass * 3;
                    reducer.ready(index, &gradient::<f32>(count, seed)).unwrap();
                }
                reducer.finish().unwrap();
                for index in 0..counts.len() {
                    averages.extend_from_slice(reducer.grad::<f32>(index).unwrap());
                }
                reducer.zero_grad();
            }
            averages
        };
        assert_eq!(averages(true), averages(false));
    });
}
