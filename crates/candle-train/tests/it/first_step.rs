//! Tests of the check of gradients in a trainer's first step.

use std::cell::Cell;

use candle_core::{DType, Device, Module, Result, Tensor};
use candle_nn::{Conv2dConfig, VarBuilder, VarMap};
use candle_ops::nn::{Conv2d, Linear, conv2d, linear};
use candle_ops::{Window, cross_entropy, dropout, max_pool2d, randn, relu};
use candle_train::{Error, SgdHyper, Trainer, TrainerBuilder, seeded};

use super::{batch, model, ranks, weights};

/// A convolution, a pool, and a linear layer, with dropout between them.
struct Cnn(Conv2d, Linear);

impl Cnn {
    fn new(vb: VarBuilder<'_>) -> Result<Self> {
        let conv = conv2d(1, 4, 3, Conv2dConfig::default(), vb.pp("conv"))?;
        Ok(Self(conv, linear(36, 3, vb.pp("fc"))?))
    }

    fn loss(&self, pool: impl Fn(&Tensor) -> Result<Tensor>) -> Result<Tensor> {
        let x = Tensor::arange(0f32, 2.0 * 64.0, &Device::Cpu)?.affine(0.7, 0.1)?.sin()?;
        let x = relu(&pool(&self.0.forward(&x.reshape((2, 1, 8, 8))?)?)?)?;
        let x = dropout(&x.flatten_from(1)?, 0.1)?;
        cross_entropy(&self.1.forward(&x)?, &Tensor::new(&[0_i64, 2], &Device::Cpu)?)
    }
}

#[expect(clippy::disallowed_methods, reason = "its gradient is a quarter of the right one")]
fn wrong(x: &Tensor) -> Result<Tensor> {
    x.max_pool2d(2)
}

fn right(x: &Tensor) -> Result<Tensor> {
    max_pool2d(x, 2, Window { stride: 2, padding: 0 })
}

fn cnn() -> (VarMap, Cnn) {
    let vars = VarMap::new();
    let net = Cnn::new(seeded(&vars, 3, DType::F32, &Device::Cpu)).unwrap();
    (vars, net)
}

fn build(builder: TrainerBuilder) -> Trainer {
    builder.build(SgdHyper { lr: 0.1, ..SgdHyper::default() }).unwrap()
}

/// Names of the variables with wrong gradients.
fn names(error: &Error) -> Vec<&str> {
    match error {
        Error::Call { error, .. } => names(error),
        Error::WrongGradients(wrong) => wrong.iter().map(|wrong| &wrong.name[..]).collect(),
        error => panic!("{error}"),
    }
}

#[test]
fn first_step_refuses_the_gradient_of_stock_max_pool2d_by_name() {
    let (vars, net) = cnn();
    for half in [false, true] {
        let builder = Trainer::builder(&vars);
        let mut train = build(if half { builder.f16() } else { builder });
        let before = weights(&vars);
        let error = train.step(|| net.loss(wrong)).unwrap_err();
        assert_eq!(names(&error), ["conv.bias", "conv.weight"]);
        let text = error.to_string();
        assert!(text.contains("the gradient of `conv.weight` is wrong"), "{text}");
        assert!(text.contains("`check_gradients(false)`"), "{text}");
        assert_eq!(weights(&vars), before);
        // The same on request.
        let found = train.check_gradients(|| net.loss(wrong)).unwrap();
        assert_eq!(found.len(), 2);
        assert_eq!(train.check_gradients(|| net.loss(right)).unwrap(), []);
    }
    build(Trainer::builder(&vars).check_gradients(false)).step(|| net.loss(wrong)).unwrap();
}

#[test]
fn all_ranks_refuse_a_wrong_gradient() {
    let errors = ranks(2, |group| {
        let (vars, net) = cnn();
        let mut train = build(Trainer::builder(&vars).group(group));
        train.step(|| net.loss(wrong)).unwrap_err().to_string()
    });
    for error in errors {
        assert!(error.contains("the gradient of `conv.weight` is wrong"), "{error}");
    }
}

#[test]
fn ranks_that_check_differently_are_refused_and_an_error_of_one_rank_is_one_on_all() {
    let errors = ranks(2, |group| {
        let (vars, _net) = cnn();
        let checks = group.rank() == 0;
        let builder = Trainer::builder(&vars).group(group).check_gradients(checks);
        builder.build(SgdHyper::default()).unwrap_err().to_string()
    });
    assert!(errors.iter().any(|error| error.contains("check_gradients(false)")), "{errors:?}");
    // A variable made after the trainer on one rank.
    let errors = ranks(2, |group| {
        let (vars, net) = cnn();
        let rank = group.rank();
        let mut train = build(Trainer::builder(&vars).group(group));
        if rank == 1 {
            let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
            linear(1, 1, vb.pp("late")).unwrap();
        }
        train.step(|| net.loss(right)).unwrap_err().to_string()
    });
    assert!(errors.iter().all(|error| error.contains("late.weight")), "{errors:?}");
}

#[test]
fn first_step_with_right_gradients_changes_no_bit_by_the_check() {
    let run = |checks, accumulated| {
        ranks(2, |group| {
            let (vars, net) = cnn();
            let calls = Cell::new(0);
            let builder = Trainer::builder(&vars).group(group).check_gradients(checks);
            let mut train = build(builder.accumulate(accumulated));
            for _ in 0..4 {
                let loss = || {
                    calls.set(calls.get() + 1);
                    net.loss(right)? + randn(0.0, 0.01, (), DType::F32, &Device::Cpu)?
                };
                train.step(loss).unwrap();
            }
            (weights(&vars), calls.get())
        })
    };
    for accumulated in [1, 2] {
        let (checked, unchecked) = (run(true, accumulated), run(false, accumulated));
        assert_eq!(checked[0].0, unchecked[0].0);
        assert_eq!((checked[0].1, unchecked[0].1), (8, 4));
    }
}

#[test]
fn losses_that_cannot_be_repeated_or_differ_on_purpose_are_no_errors() {
    // candle's own random numbers.
    let (vars, net) = cnn();
    let noise = || net.loss(wrong)? * Tensor::rand(0.5f32, 1.5, (), &Device::Cpu)?;
    build(Trainer::builder(&vars)).step(noise).unwrap();
    // State of the closure.
    let mut count = 0.0;
    let counts = || {
        count += 1.0;
        net.loss(wrong)? * count
    };
    build(Trainer::builder(&vars)).step(counts).unwrap();
    // A batch that does not count on this rank.
    let (vars, net) = model(1);
    let (x, y) = batch(&[0, 1, 2]);
    let mut train = build(Trainer::builder(&vars).accumulate(2));
    train.step_weighted(0, || cross_entropy(&net.forward(&x)?, &y)? * f64::NAN).unwrap();
    train.step_weighted(3, || cross_entropy(&net.forward(&x)?, &y)).unwrap();
}
