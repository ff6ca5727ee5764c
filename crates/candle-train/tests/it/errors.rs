//! Tests that invalid calls return clear errors, and change nothing.

use std::fs;

use candle_core::{DType, Device, Module, Tensor};
use candle_nn::{VarBuilder, VarMap};
use candle_ops::nn::{LoraOptions, lora};
use candle_ops::{cross_entropy, nn};
use candle_train::{AdamWHyper, SgdHyper, Trainer};
use collective::ProcessGroup;
use collective::reducer::{CommHook, PowerSgd, ReducerOptions};

use super::{batch, model, ranks, weights};

fn alone() -> ProcessGroup {
    ProcessGroup::threads(1, std::time::Duration::from_secs(10)).unwrap().remove(0)
}

fn step(train: &mut Trainer, net: &super::Net) -> candle_train::Result<candle_train::Step> {
    let (x, y) = batch(&[0, 1, 2, 3]);
    train.step(|| cross_entropy(&net.forward(&x)?, &y))
}

#[test]
fn a_parameter_without_a_gradient_is_named_on_all_ranks() {
    let errors = ranks(2, |group| {
        let (vars, net) = model(1);
        let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
        let _unused = candle_nn::linear(2, 2, vb.pp("unused")).unwrap();
        let mut train = Trainer::builder(&vars).group(group).build(AdamWHyper::default()).unwrap();
        step(&mut train, &net).unwrap_err().to_string()
    });
    assert!(errors.iter().all(|error| error.contains("unused.weight")), "{errors:?}");
}

#[test]
fn frozen_variables_are_left_alone() {
    let (vars, net) = model(1);
    let before = weights(&vars);
    let mut train = Trainer::builder(&vars)
        .group(alone())
        .frozen(["b.*"])
        .build(AdamWHyper::default())
        .unwrap();
    step(&mut train, &net).unwrap();
    let after = weights(&vars);
    assert!(after[0] != before[0] && after[1] != before[1]);
    assert_eq!(after[2..], before[2..]);
    let error = Trainer::builder(&vars).group(alone()).frozen(["c.*"]).build(AdamWHyper::default());
    let error = error.unwrap_err().to_string();
    assert!(error.contains("`c.*`") && error.contains("a.bias, a.weight, b.bias"), "{error}");
}

#[test]
fn adapters_are_trained_alone() {
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    let options = LoraOptions { rank: 2, alpha: 4.0, dropout: 0.0, targets: vec!["b".to_owned()] };
    let net = lora(&options, || super::Net::new(vb)).unwrap();
    let names = ["a.bias", "a.weight", "b.bias", "b.lora_A.weight", "b.lora_B.weight", "b.weight"];
    for (frozen, trained) in
        [(&["*"][..], &names[3..5]), (&[], &["a.bias", "a.weight", "b.lora_B.weight"])]
    {
        let before = weights(&vars);
        let builder = Trainer::builder(&vars).group(alone()).frozen(frozen.iter().copied());
        let mut train = builder.build(AdamWHyper::default()).unwrap();
        // The first step changes only the second factor of adapters, which is initialized with
        // zeros.
        step(&mut train, &net).unwrap();
        step(&mut train, &net).unwrap();
        for ((name, before), after) in names.iter().zip(before).zip(weights(&vars)) {
            let is_trained = trained.contains(name) || *name == "b.lora_A.weight";
            assert_eq!(before != after, is_trained, "{name}");
        }
    }
}

#[test]
fn autocast_of_a_model_that_knows_none_is_an_error() {
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    let net = candle_nn::linear(16, 1, vb).unwrap();
    let mut train =
        Trainer::builder(&vars).group(alone()).f16().build(AdamWHyper::default()).unwrap();
    let (x, _) = batch(&[0, 1]);
    let error = train.step(|| net.forward(&x)?.mean_all()).unwrap_err().to_string();
    assert!(error.contains("no operator ran in half precision"), "{error}");
}

#[test]
fn a_loss_of_several_elements_is_refused() {
    let (vars, net) = model(1);
    let mut train = Trainer::builder(&vars).group(alone()).build(AdamWHyper::default()).unwrap();
    let (x, _) = batch(&[0, 1]);
    let error = train.step(|| net.forward(&x)).unwrap_err().to_string();
    assert!(error.contains("[2, 4]"), "{error}");
}

#[test]
fn a_file_of_another_run_is_refused_and_changes_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("run.safetensors");
    let (vars, net) = model(1);
    let mut train = Trainer::builder(&vars).group(alone()).build(AdamWHyper::default()).unwrap();
    step(&mut train, &net).unwrap();
    train.save(&path, 1).unwrap();

    let (others, _net) = model(2);
    let before = weights(&others);
    let refused = |train: &mut Trainer| train.resume(&path).unwrap_err().to_string();
    let mut sgd =
        Trainer::builder(&others).group(alone()).build(SgdHyper { lr: 0.1, ..SgdHyper::default() });
    let error = refused(sgd.as_mut().unwrap());
    assert!(error.contains("run.safetensors") && error.contains("adamw"), "{error}");
    let vb = VarBuilder::from_varmap(&others, DType::F32, &Device::Cpu);
    let _more = candle_nn::linear(2, 2, vb.pp("more")).unwrap();
    let mut larger = Trainer::builder(&others).group(alone()).build(AdamWHyper::default()).unwrap();
    let error = refused(&mut larger);
    assert!(error.contains("it has no `more.bias`"), "{error}");
    assert_eq!(weights(&others)[..4], before);

    let bytes = fs::read(&path).unwrap();
    fs::write(&path, &bytes[..bytes.len() / 2]).unwrap();
    assert!(train.resume(&path).unwrap_err().to_string().contains("run.safetensors"));
}

#[test]
fn a_save_between_two_steps_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let (vars, net) = model(1);
    let mut train =
        Trainer::builder(&vars).group(alone()).accumulate(2).build(AdamWHyper::default());
    let train = train.as_mut().unwrap();
    step(train, &net).unwrap();
    let error = train.save(directory.path().join("run"), 0).unwrap_err().to_string();
    assert!(error.contains("1 batches wait"), "{error}");
}

#[test]
fn a_directory_that_cannot_be_written_is_an_error_on_all_ranks() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("file");
    fs::write(&file, "").unwrap();
    let errors = ranks(2, |group| {
        let (vars, _net) = model(1);
        let train = Trainer::builder(&vars).group(group).build(AdamWHyper::default()).unwrap();
        train.save(file.join("run"), 0).unwrap_err().to_string()
    });
    assert!(errors[0].contains("file/run") && errors[0] == errors[1], "{errors:?}");
}

#[test]
fn batches_that_cannot_be_dealt_are_refused() {
    let errors = ranks(2, |group| {
        let (vars, net) = model(1);
        let builder = Trainer::builder(&vars).group(group).accumulate(2);
        let mut train = builder.build(AdamWHyper::default()).unwrap();
        let odd = train.batches(100, 5, 0).unwrap_err().to_string();
        assert_eq!(train.batches(100, 10, 0).unwrap().len(), 10);
        step(&mut train, &net).unwrap();
        let waits = train.batches(100, 10, 0).unwrap_err().to_string();
        train.zero_grad();
        train.batches(100, 10, 0).unwrap();
        [odd, waits]
    });
    assert!(errors[0][0].contains("5 samples does not divide among 2 ranks"), "{errors:?}");
    assert!(errors[0][1].contains("1 batches wait"), "{errors:?}");
}

#[test]
fn ranks_with_other_options_are_told() {
    let errors = ranks(2, |group| {
        let (vars, _net) = model(1);
        let lr = if group.rank() == 0 { 0.5 } else { 0.25 };
        let built = Trainer::builder(&vars).group(group);
        built.build(SgdHyper { lr, ..SgdHyper::default() }).unwrap_err().to_string()
    });
    assert!(errors[0] == errors[1] && errors[0].contains("rank 1"), "{errors:?}");
    assert!(errors[0].contains("0.5") && errors[0].contains("0.25"), "{errors:?}");
}

#[test]
fn variables_made_after_the_trainer_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let (vars, net) = model(1);
    let mut train = Trainer::builder(&vars).group(alone()).build(AdamWHyper::default()).unwrap();
    step(&mut train, &net).unwrap();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    let _head = candle_nn::linear(2, 2, vb.pp("head")).unwrap();
    for error in [step(&mut train, &net).unwrap_err(), train.save(directory.path(), 0).unwrap_err()]
    {
        assert!(error.to_string().contains("head.bias"), "{error}");
    }
}

#[test]
fn batches_may_be_gone_through_again() {
    let (vars, net) = model(1);
    let builder = Trainer::builder(&vars).group(alone()).accumulate(4);
    let mut train = builder.build(AdamWHyper::default()).unwrap();
    let batches = train.batches(9, 1, 0).unwrap();
    let mut steps = Vec::new();
    for _ in batches.iter().chain(&batches) {
        step(&mut train, &net).unwrap();
        steps.push(train.steps());
    }
    assert_eq!(steps, [0, 0, 0, 1, 1, 1, 1, 2, 3, 3, 3, 3, 4, 4, 4, 4, 5, 6]);
}

#[test]
fn losses_of_candle_nn_run_in_f32_under_autocast() {
    let (vars, net) = model(1);
    let mut train =
        Trainer::builder(&vars).group(alone()).f16().build(AdamWHyper::default()).unwrap();
    let (x, _) = batch(&[0, 1]);
    let target = Tensor::ones((2, 4), DType::F32, &Device::Cpu).unwrap();
    for loss in [nn::loss::mse, |x: &Tensor, y: &Tensor| nn::loss::huber(x, y, 1.0)] {
        let loss = train.step(|| loss(&net.forward(&x)?, &target)).unwrap().loss;
        assert_eq!(loss.dtype(), DType::F32);
    }
}

#[test]
fn power_sgd_is_refused() {
    let (vars, _net) = model(1);
    let mut options = ReducerOptions::default();
    options.comm_hook = CommHook::PowerSgd(PowerSgd::default());
    let built = Trainer::builder(&vars).group(alone()).reducer(options);
    let error = built.build(AdamWHyper::default()).unwrap_err().to_string();
    assert!(error.contains("PowerSGD is not supported"), "{error}");
}

#[test]
fn a_loss_made_before_the_step_is_an_error_that_says_so() {
    let (vars, net) = model(1);
    let mut train = Trainer::builder(&vars).group(alone()).build(AdamWHyper::default()).unwrap();
    let (x, y) = batch(&[0, 1, 2, 3]);
    let loss = cross_entropy(&net.forward(&x).unwrap(), &y).unwrap();
    let error = train.step(|| Ok(loss.clone())).unwrap_err().to_string();
    let loss = Tensor::ones((), DType::F32, &Device::Cpu).unwrap();
    let constant = train.step(|| Ok(loss.clone())).unwrap_err().to_string();
    for error in [error, constant] {
        assert!(error.contains("run the forward pass within the closure"), "{error}");
    }
    step(&mut train, &net).unwrap();
}

#[test]
fn a_backward_within_the_step_is_an_error_that_says_so() {
    let (vars, net) = model(1);
    let mut train = Trainer::builder(&vars).group(alone()).build(AdamWHyper::default()).unwrap();
    let (x, y) = batch(&[0, 1, 2, 3]);
    let error = train.step(|| {
        let loss = cross_entropy(&net.forward(&x)?, &y)?;
        loss.backward()?;
        Ok(loss)
    });
    let error = error.unwrap_err().to_string();
    assert!(error.contains("return the loss, and do not call `backward`"), "{error}");
    step(&mut train, &net).unwrap();
}

#[test]
fn an_unused_parameter_leaves_a_trainer_of_one_rank_usable() {
    let (vars, net) = model(1);
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    let unused = candle_nn::linear(2, 2, vb.pp("unused")).unwrap();
    let mut train = Trainer::builder(&vars).group(alone()).build(AdamWHyper::default()).unwrap();
    let error = step(&mut train, &net).unwrap_err().to_string();
    assert!(error.contains("unused.bias, unused.weight"), "{error}");
    assert!(error.contains("find_unused_parameters") && error.contains("frozen"), "{error}");
    let (x, y) = batch(&[0, 1, 2, 3]);
    let all = || {
        let extra = unused.forward(&Tensor::ones((1, 2), DType::F32, &Device::Cpu)?)?.sum_all()?;
        cross_entropy(&net.forward(&x)?, &y)? + extra
    };
    train.step(all).unwrap();
}

#[test]
fn after_a_failed_backward_the_epoch_still_ends_in_a_step() {
    let (vars, net) = model(1);
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    let unused = candle_nn::linear(2, 2, vb.pp("unused")).unwrap();
    let builder = Trainer::builder(&vars).group(alone()).accumulate(2);
    let mut train = builder.build(AdamWHyper::default()).unwrap();
    assert_eq!(train.batches(12, 4, 0).unwrap().len(), 3);
    step(&mut train, &net).unwrap();
    step(&mut train, &net).unwrap_err();
    let (x, y) = batch(&[0, 1, 2, 3]);
    let all = || {
        let extra = unused.forward(&Tensor::ones((1, 2), DType::F32, &Device::Cpu)?)?.sum_all()?;
        cross_entropy(&net.forward(&x)?, &y)? + extra
    };
    train.step(all).unwrap();
    assert_eq!(train.steps(), 1);
    train.batches(12, 4, 1).unwrap();
}

#[test]
fn a_sum_of_two_types_under_autocast_is_advised() {
    let (vars, net) = model(1);
    let mut train =
        Trainer::builder(&vars).group(alone()).f16().build(AdamWHyper::default()).unwrap();
    let (x, y) = batch(&[0, 1, 2, 3]);
    let target = Tensor::ones((4, 4), DType::F32, &Device::Cpu).unwrap();
    let error = train.step(|| cross_entropy(&(net.forward(&x)? + &target)?, &y));
    let error = error.unwrap_err().to_string();
    assert!(error.contains("F16") && error.contains("`candle_ops::add`"), "{error}");
}
