//! Tests that compare the losses and weights of a trainer with those of a hand-written loop.

use amp::{Autocast, LossScaler, LossScalerOptions};
use candle_core::{Module, Tensor};
use candle_nn::Optimizer as _;
use candle_ops::{Context, cross_entropy};
use candle_train::{AdamWHyper, Clip, DataParallel, DefaultSampler, ReducerOptions, Trainer};
use collective::{ProcessGroup, ReduceOp};
use fused_optim::candle::VarOptimizer;
use fused_optim::{AdamW, Applied, FoundInf, StepCtl};

use super::{SAMPLES, batch, model, ranks, weights};

type Run = (Vec<f32>, Vec<Vec<f32>>);

const EPOCHS: usize = 4;
const BATCH: usize = 16;

fn hyper() -> AdamWHyper {
    AdamWHyper { lr: 1e-2, ..AdamWHyper::default() }
}

fn factor(step: u64) -> f64 {
    1.0 / (1.0 + 0.1 * step as f64)
}

/// A loss scaler that overflows a few times.
fn scaler() -> LossScaler {
    let options =
        LossScalerOptions { init_scale: 8e6, growth_interval: 3, ..LossScalerOptions::default() };
    LossScaler::new(options).unwrap()
}

/// Steps after every second batch, in `f16`, with a gradient norm of at most `clip`.
fn by_hand(group: &ProcessGroup) -> Run {
    let (vars, net) = model(group.rank() as u32);
    let mut optimizer = VarOptimizer::<AdamW>::from_var_map(&vars, hyper()).unwrap();
    for var in optimizer.vars() {
        let mut values = var.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        group.broadcast(&mut values, 0).unwrap();
        var.set(&Tensor::from_vec(values, var.shape(), var.device()).unwrap()).unwrap();
    }
    let mut scaler = scaler();
    let seed = 5 + group.rank() as u64;
    let mut context = Context::new(seed).with_autocast(Autocast::cpu().with_f16());
    let (mut losses, mut steps, mut skipped) = (Vec::new(), 0, 0);
    for epoch in 0..EPOCHS {
        let (rank, world_size) = (group.rank(), group.world_size());
        let sampler = DefaultSampler {
            len: SAMPLES,
            shuffle: true,
            seed: 5,
            rank,
            world_size,
            round_up: true,
        };
        let rows: Vec<u32> = sampler.indices(epoch).into_iter().map(|i| i as u32).collect();
        let batches: Vec<_> = rows.chunks(BATCH / world_size).collect();
        for pair in batches.chunks(2) {
            let mut sums: Vec<Vec<f32>> = Vec::new();
            for rows in pair {
                let (x, y) = batch(rows);
                let (loss, gradients) = context.enter(|| {
                    let loss = cross_entropy(&net.forward(&x).unwrap(), &y).unwrap();
                    let scale = f64::from(scaler.scale()) / pair.len() as f64;
                    let gradients = (&loss * scale).unwrap().backward().unwrap();
                    (loss, gradients)
                });
                losses.push(loss.to_scalar::<f32>().unwrap());
                for (index, var) in optimizer.vars().iter().enumerate() {
                    let own = gradients.get(var).unwrap().flatten_all().unwrap();
                    let own = own.to_vec1::<f32>().unwrap();
                    match sums.get_mut(index) {
                        Some(sum) => sum.iter_mut().zip(own).for_each(|(sum, own)| *sum += own),
                        None => sums.push(own),
                    }
                }
            }
            let mut averages = candle_core::backprop::GradStore::default();
            for (var, mut sum) in optimizer.vars().iter().zip(sums) {
                group.all_reduce(&mut sum, ReduceOp::Avg).unwrap();
                averages.insert(var, Tensor::from_vec(sum, var.shape(), var.device()).unwrap());
            }
            optimizer.set_learning_rate(hyper().lr * factor(steps));
            let ctl = StepCtl {
                grad_scale: scaler.inv_scale(),
                found_inf: FoundInf::Check,
                clip: Some(Clip::norm(0.5)),
            };
            let applied = optimizer.step_with(&averages, &ctl).unwrap();
            scaler.update(applied == Applied::SkippedNonFinite).unwrap();
            steps += u64::from(applied == Applied::Applied);
            skipped += u64::from(applied == Applied::SkippedNonFinite);
        }
    }
    assert!(steps > 3 && skipped > 0, "{steps} steps, {skipped} skipped");
    (losses, weights(&vars))
}

fn trained(group: &ProcessGroup) -> Run {
    let (vars, net) = model(group.rank() as u32);
    let mut train = Trainer::builder(&vars)
        .group(group.clone())
        .f16()
        .loss_scaler(scaler())
        .clip(Clip::norm(0.5))
        .accumulate(2)
        .schedule(factor)
        .seed(5)
        .build(hyper())
        .unwrap();
    let mut losses = Vec::new();
    for epoch in 0..EPOCHS {
        for rows in train.batches(SAMPLES, BATCH, epoch).unwrap() {
            let (x, y) = batch(&rows);
            let loss = train.step(|| cross_entropy(&net.forward(&x)?, &y)).unwrap().loss;
            losses.push(loss.to_scalar::<f32>().unwrap());
        }
    }
    assert!(train.optimizer().lr(0).unwrap() < hyper().lr);
    (losses, weights(&vars))
}

#[test]
fn a_trainer_is_the_loop_by_hand() {
    for count in [1, 2, 4] {
        let runs = ranks(count, |group| (by_hand(&group), trained(&group)));
        for (rank, (by_hand, trained)) in runs.iter().enumerate() {
            assert_eq!(by_hand, trained, "rank {rank} of {count}");
            assert_eq!(trained.1, runs[0].1.1, "rank {rank} of {count} beside rank 0");
        }
    }
}

#[test]
fn a_trainer_takes_at_most_twelve_lines_more_than_a_plain_loop() {
    let lines = |text: &str| text.lines().count();
    let (base, trained) =
        (include_str!("../../examples/base.rs"), include_str!("../../examples/abcd.rs"));
    assert!(lines(trained) <= lines(base) + 12, "{} and {}", lines(trained), lines(base));
}

#[test]
fn averages_alone_serve_any_optimizer() {
    let hand = |group: &ProcessGroup, with_averages: bool| {
        let (vars, net) = model(group.rank() as u32);
        let mut averages =
            DataParallel::new(&vars, group.clone(), ReducerOptions::default()).unwrap();
        let mut sgd = candle_nn::SGD::new(vars.all_vars(), 0.1).unwrap();
        for step in 0..4 {
            let (x, y) = batch(&[step * 2 + group.rank() as u32, 40 + step]);
            let forward = || cross_entropy(&net.forward(&x)?, &y);
            if with_averages {
                let mut gradients = forward().unwrap().backward().unwrap();
                averages.average(&mut gradients).unwrap();
                sgd.step(&gradients).unwrap();
            } else {
                let (loss, tape) = candle_ops::record(forward);
                let loss = loss.unwrap();
                let gradient = loss.ones_like().unwrap();
                averages.backward((tape, &loss), gradient, true).unwrap();
                sgd.step(&averages.take().unwrap()).unwrap();
            }
        }
        weights(&vars)
    };
    let all = ranks(2, |group| [hand(&group, true), hand(&group, false)]);
    assert_eq!(all[0], all[1]);
    assert_eq!(all[0][0], all[0][1]);
}

#[test]
fn an_evaluation_counts_each_sample_once() {
    for count in [1, 2, 3] {
        let shares = ranks(count, |group| {
            let (vars, _net) = model(1);
            let train = Trainer::builder(&vars).group(group).build(hyper()).unwrap();
            let batches = train.eval_batches(10, 6).unwrap();
            assert!(batches.iter().all(|rows| rows.len() <= 6 / count));
            let rows = batches.concat();
            let sum: u32 = rows.iter().sum();
            assert_eq!(train.sum([f64::from(sum), rows.len() as f64]).unwrap(), [45.0, 10.0]);
            rows
        });
        let mut all = shares.concat();
        all.sort_unstable();
        assert_eq!(all, (0..10).collect::<Vec<_>>(), "{count} ranks");
    }
}
