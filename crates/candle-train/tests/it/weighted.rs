//! Tests that compare steps over batches of unequal numbers of tokens with a loop in `f64` over all
//! of their tokens.

use candle_core::{DType, Device, Tensor, Var};
use candle_nn::VarMap;
use candle_train::{Clip, LossScaler, LossScalerOptions, SgdHyper, Trainer, TrainerBuilder};
use collective::ProcessGroup;

use super::{ranks, weights};

const FEATURES: usize = 5;
const TOKENS: usize = 6;
const STEPS: usize = 4;
const LR: f64 = 0.05;

/// A pseudo-random number between -1 and 1 that bf16 holds exactly.
fn number(index: usize) -> f64 {
    let mixed = (index as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    ((mixed >> 40) % 65) as f64 / 32.0 - 1.0
}

/// The features and the target of a token.
fn token(step: usize, batch: usize, rank: usize, at: usize) -> ([f64; FEATURES], f64) {
    let index = ((step * 7 + batch) * 5 + rank) * TOKENS + at;
    (std::array::from_fn(|feature| number(index * 11 + feature)), number(index * 13 + 7))
}

/// Number of tokens of a batch: some have none, but never all of a step.
fn count(step: usize, batch: usize, rank: usize) -> usize {
    if (batch + step + rank) % 3 == 2 || (rank == 1 && batch == 0 && step % 2 == 1) {
        return 0;
    }
    1 + (step * 5 + batch * 3 + rank * 2) % TOKENS
}

/// One loop over all tokens of each step.
fn reference(accumulate: usize, world_size: usize, clip: Option<f64>) -> Vec<f64> {
    let mut weight = vec![0.5; FEATURES];
    for step in 0..STEPS {
        let (mut gradient, mut total) = (vec![0.0; FEATURES], 0.0);
        for (batch, rank) in (0..accumulate).flat_map(|b| (0..world_size).map(move |r| (b, r))) {
            for at in 0..count(step, batch, rank) {
                let (x, y) = token(step, batch, rank, at);
                let error = x.iter().zip(&weight).map(|(x, w)| x * w).sum::<f64>() - y;
                gradient.iter_mut().zip(x).for_each(|(sum, x)| *sum += 2.0 * error * x);
                total += 1.0;
            }
        }
        let norm = gradient.iter().map(|g| (g / total).powi(2)).sum::<f64>().sqrt();
        let factor = clip.map_or(1.0, |max| (max / (norm + 1e-6)).min(1.0)) / total;
        weight.iter_mut().zip(gradient).for_each(|(w, g)| *w -= LR * factor * g);
    }
    weight
}

fn scaler(init_scale: f32) -> LossScaler {
    LossScaler::new(LossScalerOptions { init_scale, ..Default::default() }).unwrap()
}

fn model() -> (VarMap, Var) {
    let (vars, start) = (VarMap::new(), Tensor::full(0.5_f32, (1, FEATURES), &Device::Cpu));
    let weight = Var::from_tensor(&start.unwrap()).unwrap();
    vars.data().lock().unwrap().insert("w".to_owned(), weight.clone());
    (vars, weight)
}

/// The mean loss of the first `count` tokens of a batch: NaN for none.
fn loss(
    weight: &Var,
    (step, batch, rank): (usize, usize, usize),
    count: usize,
) -> candle_core::Result<Tensor> {
    let tokens: Vec<_> = (0..TOKENS).map(|at| token(step, batch, rank, at)).collect();
    let x: Vec<_> = tokens.iter().flat_map(|(x, _)| x.map(|x| x as f32)).collect();
    let y: Vec<_> = tokens.iter().map(|(_, y)| *y as f32).collect();
    let mask: Vec<_> = (0..TOKENS).map(|at| if at < count { 1.0_f32 } else { 0.0 }).collect();
    let x = Tensor::from_vec(x, (TOKENS, FEATURES), &Device::Cpu)?;
    let y = Tensor::from_vec(y, (TOKENS, 1), &Device::Cpu)?;
    let mask = Tensor::from_vec(mask, (TOKENS, 1), &Device::Cpu)?;
    let out = candle_ops::linear(&x, weight, None)?.to_dtype(DType::F32)?;
    let sum = ((out - y)?.sqr()? * &mask)?.sum_all()?;
    sum / mask.sum_all()?
}

fn trained(
    group: ProcessGroup,
    accumulate: usize,
    options: &(impl Fn(TrainerBuilder) -> TrainerBuilder + Sync),
) -> Vec<f32> {
    let (vars, weight) = model();
    let rank = group.rank();
    let builder = options(Trainer::builder(&vars).group(group).accumulate(accumulate));
    let mut train = builder.build(SgdHyper { lr: LR, ..Default::default() }).unwrap();
    for (step, batch) in (0..STEPS).flat_map(|step| (0..accumulate).map(move |b| (step, b))) {
        let count = count(step, batch, rank);
        train.step_weighted(count, || loss(&weight, (step, batch, rank), count)).unwrap();
    }
    assert_eq!(train.steps(), STEPS as u64);
    weights(&vars).remove(0)
}

#[test]
fn a_weighted_step_is_the_mean_of_all_tokens() {
    type Options = fn(TrainerBuilder) -> TrainerBuilder;
    let kinds: [(&str, Options, f64); 5] = [
        ("unused", TrainerBuilder::find_unused_parameters, 1e-6),
        ("f32", |b| b, 1e-6),
        ("f16", |b| b.f16().loss_scaler(scaler(256.0)), 2e-3),
        ("bf16", TrainerBuilder::bf16, 2e-2),
        ("scaled", |b| b.loss_scaler(LossScaler::fixed(1024.0).unwrap()), 1e-6),
    ];
    for (name, options, tolerance) in kinds {
        for (world_size, accumulate) in
            [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (2, 3), (3, 1), (3, 3)]
        {
            // A batch of one rank alone must have a token in each step.
            if (world_size, accumulate) == (1, 1) {
                continue;
            }
            for clip in [None, Some(0.05)] {
                let expected = reference(accumulate, world_size, clip);
                let options = |builder: TrainerBuilder| match clip {
                    Some(max) => options(builder.clip(Clip::norm(max))),
                    None => options(builder),
                };
                let all = ranks(world_size, |group| {
                    // Steps in which all ranks have 0 tokens are errors, tested below.
                    trained(group, accumulate, &options)
                });
                for (rank, weight) in all.iter().enumerate() {
                    assert_eq!(weight, &all[0], "rank {rank}");
                    for (own, expected) in weight.iter().zip(&expected) {
                        let error = (f64::from(*own) - expected).abs();
                        assert!(
                            error <= tolerance,
                            "{name}, {world_size} ranks, {accumulate} batches, clip {clip:?}: {own} instead of {expected}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn equal_counts_are_a_step_without_counts_bit_for_bit() {
    for (world_size, accumulate) in [(1, 1), (1, 3), (2, 2), (3, 1)] {
        let runs = ranks(world_size, |group| {
            let run = |group: &ProcessGroup, count: Option<usize>| {
                let (vars, weight) = model();
                let rank = group.rank();
                let builder = Trainer::builder(&vars).group(group.clone()).accumulate(accumulate);
                let mut train = builder.build(SgdHyper { lr: LR, ..Default::default() }).unwrap();
                for batch in 0..6 {
                    let forward = || loss(&weight, (1, batch, rank), 3);
                    match count {
                        Some(count) => train.step_weighted(count, forward).unwrap(),
                        None => train.step(forward).unwrap(),
                    };
                }
                weights(&vars)
            };
            [run(&group, None), run(&group, Some(1)), run(&group, Some(3))]
        });
        for [plain, one, three] in runs {
            assert_eq!(
                (&plain, &plain),
                (&one, &three),
                "{world_size} ranks, {accumulate} batches"
            );
        }
    }
}

#[test]
fn a_step_without_any_token_is_an_error_on_all_ranks_and_the_next_is_right() {
    for accumulate in [1, 2] {
        let results = ranks(2, |group| {
            let (vars, weight) = model();
            let rank = group.rank();
            let builder = Trainer::builder(&vars).group(group).accumulate(accumulate);
            let mut train = builder.build(SgdHyper { lr: LR, ..Default::default() }).unwrap();
            for _ in 1..accumulate {
                train.step_weighted(0, || loss(&weight, (0, 0, rank), 0)).unwrap();
            }
            let none = train.step_weighted(0, || loss(&weight, (0, 0, rank), 0)).unwrap_err();
            for batch in 0..accumulate {
                // The first batch of the step has tokens on one rank alone.
                let count = if rank == 0 { 1 + batch } else { 3 * batch };
                train.step_weighted(count, || loss(&weight, (0, batch, rank), count)).unwrap();
            }
            (none.to_string(), weights(&vars).remove(0))
        });
        let mut expected = vec![0.5; FEATURES];
        let (mut gradient, mut total) = ([0.0; FEATURES], 0.0);
        for (batch, rank) in (0..accumulate).flat_map(|b| [(b, 0), (b, 1)]) {
            for at in 0..(if rank == 0 { 1 + batch } else { 3 * batch }) {
                let (x, y) = token(0, batch, rank, at);
                let error = x.iter().map(|x| x * 0.5).sum::<f64>() - y;
                gradient.iter_mut().zip(x).for_each(|(sum, x)| *sum += 2.0 * error * x);
                total += 1.0;
            }
        }
        expected.iter_mut().zip(gradient).for_each(|(w, g)| *w -= LR * g / total);
        for (error, weight) in results {
            assert!(error.contains("counts of all ranks") && error.contains("are 0"), "{error}");
            for (own, expected) in weight.iter().zip(&expected) {
                assert!((f64::from(*own) - expected).abs() < 1e-6, "{own} instead of {expected}");
            }
        }
    }
}

#[test]
fn a_weighted_batch_beside_one_without_a_count_is_named() {
    let errors = ranks(2, |group| {
        let (vars, weight) = model();
        let rank = group.rank();
        let mut train = Trainer::builder(&vars).group(group).build(SgdHyper::default()).unwrap();
        let forward = || loss(&weight, (0, 0, rank), 3);
        let differ = if rank == 0 { train.step(forward) } else { train.step_weighted(3, forward) };
        differ.unwrap_err().to_string()
    });
    for error in errors {
        assert!(error.contains("rank 0: `Trainer::step`"), "{error}");
        assert!(error.contains("rank 1: `Trainer::step_weighted`"), "{error}");
    }
    let (vars, weight) = model();
    let group = ranks(1, |group| group).remove(0);
    let mut train =
        Trainer::builder(&vars).group(group).accumulate(2).build(SgdHyper::default()).unwrap();
    train.step(|| loss(&weight, (0, 0, 0), 3)).unwrap();
    let mixed = train.step_weighted(3, || loss(&weight, (0, 1, 0), 3)).unwrap_err().to_string();
    assert!(mixed.contains("`step` and `step_weighted`"), "{mixed}");
}

#[test]
fn optimizers_with_state_are_as_with_the_whole_step_in_one_batch() {
    // AdamW is insensitive to the scale of gradients, but not to that between steps.
    let run = |accumulate: usize| {
        let (vars, weight) = model();
        let group = ranks(1, |group| group).remove(0);
        let builder = Trainer::builder(&vars).group(group).accumulate(accumulate);
        let mut train =
            builder.build(candle_train::AdamWHyper { lr: 0.1, ..Default::default() }).unwrap();
        for step in 0..3 {
            let parts: &[(usize, usize)] =
                if accumulate == 1 { &[(0, 6)] } else { &[(0, 1), (1, 6)] };
            for (from, to) in parts {
                let forward = || {
                    let part = |count| loss(&weight, (step, 0, 0), count);
                    let sum = |count: usize| {
                        if count == 0 { part(1)?.zeros_like() } else { part(count)? * count as f64 }
                    };
                    (sum(*to)? - sum(*from)?)? / (to - from) as f64
                };
                train.step_weighted(to - from, forward).unwrap();
            }
        }
        weights(&vars).remove(0)
    };
    for (one, two) in run(1).iter().zip(run(2)) {
        assert!((one - two).abs() < 1e-5, "{one} {two}");
    }
}

#[test]
fn unusual_counts_leave_gradients_in_the_range_of_f16() {
    for (world_size, accumulate) in [(1, 1), (2, 1), (1, 2), (2, 2)] {
        let steps = ranks(world_size, |group| {
            let (vars, weight) = model();
            let rank = group.rank();
            let builder = Trainer::builder(&vars).group(group).accumulate(accumulate);
            let builder = builder.f16().loss_scaler(scaler(16384.0));
            let mut train = builder.build(SgdHyper { lr: 1e-3, ..Default::default() }).unwrap();
            for step in 0..16 {
                for batch in 0..accumulate {
                    let is_unusual = step % 4 == 3 && (batch, rank) == (0, world_size - 1);
                    let count = if is_unusual { 2048 } else { 16 };
                    train.step_weighted(count, || loss(&weight, (0, batch, rank), 6)).unwrap();
                }
            }
            (train.steps(), train.loss_scale())
        });
        for steps in steps {
            assert_eq!(steps, (16, 16384.0), "{world_size} ranks, {accumulate} batches");
        }
    }
}
