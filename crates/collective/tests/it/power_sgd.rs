//! PowerSGD: how near its averages are, what it keeps between passes, and what it forgets.

use collective::reducer::{CommHook, ParamInfo, PowerSgd, Reducer, ReducerOptions};
use collective::{DType, Error, ProcessGroup};

use crate::reducer::ranks;

fn power_sgd(change: impl FnOnce(&mut PowerSgd)) -> ReducerOptions {
    let mut power = PowerSgd::default();
    power.start_iter = 2;
    change(&mut power);
    let mut options = ReducerOptions::default();
    options.comm_hook = CommHook::PowerSgd(power);
    options
}

/// One pass with gradients of an 8 x 6 matrix and a vector, different on each rank.
fn matrix_pass(reducer: &mut Reducer, rank: usize, pass: usize) -> [Vec<f32>; 2] {
    let value = |at: usize| ((at * 37 + rank * 11 + pass * 5) % 17) as f32 - 8.0;
    let own = [(0..48).map(value).collect::<Vec<_>>(), (0..5).map(value).collect()];
    reducer.prepare(true).unwrap();
    reducer.ready(1, &own[1]).unwrap();
    reducer.ready(0, &own[0]).unwrap();
    reducer.finish().unwrap();
    let grads = [0, 1].map(|index| reducer.grad::<f32>(index).unwrap().to_vec());
    reducer.zero_grad();
    grads
}

fn matrix() -> Vec<ParamInfo> {
    vec![
        ParamInfo::new("matrix", 48, DType::F32).with_rows(8),
        ParamInfo::new("vector", 5, DType::F32),
    ]
}

/// Averages without compression for the same passes.
fn plain_averages(group: &ProcessGroup, passes: usize) -> Vec<[Vec<f32>; 2]> {
    let mut reducer = Reducer::new(group.clone(), matrix(), ReducerOptions::default()).unwrap();
    (0..passes).map(|pass| matrix_pass(&mut reducer, group.rank(), pass)).collect()
}

fn largest_difference(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

#[test]
fn full_rank_matches_the_plain_average() {
    ranks(3, |group| {
        let plain = plain_averages(&group, 6);
        // Each pass has a new basis: a warm start is exact only if the last pass's basis spans the
        // gradient.
        let options = power_sgd(|power| {
            (power.rank, power.min_compression_rate, power.warm_start) = (6, 0, false);
        });
        let rank = group.rank();
        let mut reducer = Reducer::new(group, matrix(), options).unwrap();
        for (pass, plain) in plain.iter().enumerate() {
            let got = matrix_pass(&mut reducer, rank, pass);
            // Before compression starts, and for the vector always, the bits are equal.
            assert_eq!(pass < 2, got[0] == plain[0], "pass {pass}");
            assert_eq!(got[1], plain[1]);
            // Values up to 8, through three products in f32.
            assert!(largest_difference(&got[0], &plain[0]) < 1e-4, "pass {pass}");
        }
    });
}

/// A rank-1 approximation of a matrix of rank 6 has a large error in each pass. Error feedback adds
/// it to the next pass, so that over many passes the sum differs from that of the averages only by
/// the last error.
#[test]
fn error_feedback_reduces_the_accumulated_error() {
    ranks(2, |group| {
        let passes = 120;
        let plain = plain_averages(&group, passes);
        let rank = group.rank();
        let mut off = [false, true].map(|error_feedback| {
            let options = power_sgd(|power| {
                power.min_compression_rate = 1;
                power.error_feedback = error_feedback;
            });
            let mut reducer = Reducer::new(group.clone(), matrix(), options).unwrap();
            let mut owed = [0.0; 48];
            for (pass, plain) in plain.iter().enumerate() {
                let got = matrix_pass(&mut reducer, rank, pass);
                owed.iter_mut()
                    .zip(got[0].iter().zip(&plain[0]))
                    .for_each(|(o, (g, p))| *o += p - g);
            }
            owed.iter().fold(0.0_f32, |most, owed| most.max(owed.abs()))
        });
        off.iter_mut().for_each(|off| *off /= passes as f32);
        assert!(off[1] < 0.5 * off[0], "error per pass without and with error feedback: {off:?}");
    });
}

#[test]
fn averages_are_equal_on_all_ranks_and_f16_is_refused() {
    let all = ranks(2, |group| {
        let rank = group.rank();
        let options = power_sgd(|power| power.min_compression_rate = 1);
        let mut reducer = Reducer::new(group, matrix(), options).unwrap();
        (0..8).map(|pass| matrix_pass(&mut reducer, rank, pass)).collect::<Vec<_>>()
    });
    assert_eq!(all[0], all[1]);
    let halves = || vec![ParamInfo::new("half", 48, DType::F16).with_rows(8)];
    ranks(1, |group| {
        let error = Reducer::new(group, halves(), power_sgd(|_| {})).unwrap_err();
        assert!(matches!(error, Error::Unsupported { .. }), "{error}");
    });
}

/// One pass with `gradient` as the matrix's.
fn matrix_pass_of(reducer: &mut Reducer, gradient: &[f32; 48]) -> Vec<f32> {
    reducer.prepare(true).unwrap();
    reducer.ready(1, &[1.0_f32; 5]).unwrap();
    reducer.ready(0, &gradient[..]).unwrap();
    reducer.finish().unwrap();
    let average = reducer.grad::<f32>(0).unwrap().to_vec();
    reducer.zero_grad();
    average
}

#[test]
fn forgets_a_pass_that_is_not_finite() {
    for bad in [f32::INFINITY, f32::NAN] {
        for (rank, warm_start) in [(1, true), (3, true), (2, false)] {
            let memories = ranks(2, |group| {
                let own = group.rank();
                let options = power_sgd(|power| {
                    (power.rank, power.min_compression_rate, power.warm_start) =
                        (rank, 0, warm_start);
                });
                let mut reducer = Reducer::new(group, matrix(), options).unwrap();
                let gradient = |pass: usize| {
                    std::array::from_fn(|at| ((at * 37 + own * 11 + pass * 5) % 17) as f32 - 8.0)
                };
                for pass in 0..4 {
                    matrix_pass_of(&mut reducer, &gradient(pass));
                }
                let mut overflow = gradient(4);
                if own == 1 {
                    overflow[7] = bad;
                }
                let average = matrix_pass_of(&mut reducer, &overflow);
                assert!(average.iter().any(|x| !x.is_finite()), "the optimizer skips no step");
                let state = reducer.state_dict().unwrap();
                assert!(state.buckets[0].error.iter().all(|x| *x == 0.0), "{state:?}");
                let averages: Vec<_> =
                    (5..8).map(|pass| matrix_pass_of(&mut reducer, &gradient(pass))).collect();
                assert!(averages.iter().flatten().all(|x| x.is_finite()), "{averages:?}");
                let state = reducer.state_dict().unwrap();
                let memory = state.buckets[0].q.iter().chain(&state.buckets[0].error);
                assert!(memory.clone().all(|x| x.is_finite()), "{state:?}");
                (averages, state.buckets[0].q.clone())
            });
            assert_eq!(memories[0], memories[1], "rank {rank} after {bad}");
        }
    }
}

#[test]
fn memory_follows_the_loss_scale() {
    ranks(2, |group| {
        let own = group.rank();
        let gradient = |pass: usize, scale: f32| {
            std::array::from_fn(|at| (((at * 37 + own * 11 + pass * 5) % 17) as f32 - 8.0) * scale)
        };
        let [plain, scaled] = [1.0, 0.25].map(|scale: f32| {
            let mut reducer = Reducer::new(group.clone(), matrix(), power_sgd(|_| {})).unwrap();
            (0..4).for_each(|pass| drop(matrix_pass_of(&mut reducer, &gradient(pass, 1.0))));
            reducer.rescale(scale);
            (4..7)
                .map(|pass| matrix_pass_of(&mut reducer, &gradient(pass, scale)))
                .collect::<Vec<_>>()
        });
        for (plain, mut scaled) in plain.into_iter().zip(scaled) {
            scaled.iter_mut().for_each(|x| *x /= 0.25);
            // A warm start from factors of another magnitude rounds otherwise.
            assert!(largest_difference(&plain, &scaled) < 1e-5, "{plain:?} {scaled:?}");
        }
    });
}

/// A new reducer with the state of another gives the same bits as the other, from any pass on.
#[test]
fn resumes_from_its_state_bit_for_bit() {
    for stop in [1, 2, 3, 7] {
        ranks(2, |group| {
            let (rank, options) = (group.rank(), power_sgd(|_| {}));
            let mut whole = Reducer::new(group.clone(), matrix(), options.clone()).unwrap();
            let mut plain =
                Reducer::new(group.clone(), matrix(), ReducerOptions::default()).unwrap();
            assert_eq!(plain.state_dict(), None);
            (0..stop).for_each(|pass| drop(matrix_pass(&mut whole, rank, pass)));
            let state = whole.state_dict().unwrap();
            let mut resumed = Reducer::new(group, matrix(), options).unwrap();
            resumed.load_state_dict(&state).unwrap();
            assert_eq!(resumed.state_dict().unwrap(), state);
            for pass in stop..stop + 4 {
                let of = [&mut whole, &mut resumed].map(|r| matrix_pass(r, rank, pass));
                assert_eq!(of[0], of[1], "pass {pass} after {stop}");
            }
            // A state of another model is an error.
            let mut other = state.clone();
            other.idle.pop();
            assert!(matches!(resumed.load_state_dict(&other), Err(Error::InvalidArgument(_))));
            assert!(
                stop <= 2
                    || matches!(plain.load_state_dict(&state), Err(Error::InvalidArgument(_)))
            );
        });
    }
}
