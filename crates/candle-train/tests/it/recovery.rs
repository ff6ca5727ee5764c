//! Tests that after any error of a step the next one is right: no gradient of a failed batch is in
//! it, and no step is weaker than another.

use std::cell::Cell;
use std::rc::Rc;

use candle_core::{CpuStorage, CustomOp1, DType, Device, Layout, Result, Shape, Tensor, Var, bail};
use candle_nn::VarMap;
use candle_train::{
    Builder, Clip, DataParallel, LossScaler, LossScalerOptions, ReducerOptions, SgdHyper, Trainer,
};
use collective::ProcessGroup;

use super::{ranks, weights};

/// Variables of one element each, and ones in a large tensor.
fn model(names: &[&str]) -> (VarMap, Vec<Var>) {
    let vars = VarMap::new();
    let new = |name: &&str| {
        let var = Var::zeros(1, DType::F32, &Device::Cpu).unwrap();
        vars.data().lock().unwrap().insert((*name).to_owned(), var.clone());
        var
    };
    let all = names.iter().map(new).collect();
    (vars, all)
}

fn alone() -> ProcessGroup {
    ranks(1, |group| group).remove(0)
}

fn sgd(builder: Builder) -> Trainer {
    builder.build(SgdHyper { lr: 1.0, ..Default::default() }).unwrap()
}

/// A loss whose gradient is `gradient`.
fn loss(w: &Tensor, gradient: f64) -> Result<Tensor> {
    (w * gradient)?.sum_all()
}

fn value(w: &Var) -> f32 {
    w.to_vec1::<f32>().unwrap()[0]
}

/// The identity, whose backward pass fails.
struct Fails;

impl CustomOp1 for Fails {
    fn name(&self) -> &'static str {
        "fails"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        Ok((x.clone(), layout.shape().clone()))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, _: &Tensor) -> Result<Option<Tensor>> {
        bail!("the backward pass fails here")
    }
}

/// How a batch fails.
#[derive(Clone, Copy, Debug, PartialEq)]
enum How {
    Closure,
    Shape,
    Backward,
}

const ALL: [How; 3] = [How::Closure, How::Shape, How::Backward];

/// A batch with this gradient, which fails.
fn failing(w: &Tensor, how: How) -> Result<Tensor> {
    match how {
        How::Closure => bail!("the closure fails here"),
        How::Shape => w.broadcast_as((2, 1)),
        How::Backward => loss(w, 100.0)?.apply_op1(Fails),
    }
}

#[test]
fn failed_batches_leave_steps_of_full_strength() {
    for how in ALL {
        for failed in 0..8 {
            for next_epoch in [false, true] {
                let (vars, all) = model(&["w"]);
                let w = &all[0];
                let mut train = sgd(Trainer::builder(&vars).group(alone()).accumulate(4));
                if next_epoch {
                    assert_eq!(train.batches(8, 1, 0).unwrap().len(), 8);
                }
                for batch in 0..8 {
                    let result =
                        train.step(|| if batch == failed { failing(w, how) } else { loss(w, 1.0) });
                    assert_eq!(result.is_err(), batch == failed);
                }
                // A step has no batch left if its last one fails.
                let expected = if failed % 4 == 3 { 1 } else { 2 };
                assert_eq!(train.steps(), expected, "{how:?} at {failed}");
                assert_eq!(value(w), -(expected as f32), "{how:?} at {failed}");
                if next_epoch {
                    train.batches(8, 1, 1).unwrap();
                }
                for _ in 0..4 {
                    train.step(|| loss(w, 1.0)).unwrap();
                }
                assert_eq!(value(w), -(expected as f32) - 1.0, "{how:?} at {failed}");
            }
        }
    }
}

#[test]
fn a_batch_that_fails_on_one_rank_is_an_error_on_all_and_the_next_step_is_right() {
    for how in ALL {
        for accumulate in [1, 3] {
            for failed in 0..accumulate {
                let results = ranks(3, |group| {
                    let (vars, all) = model(&["a", "b", "c"]);
                    let rank = group.rank();
                    // A bucket for each variable.
                    let mut options = ReducerOptions::default();
                    (options.first_bucket_bytes, options.bucket_bytes) = (1, 1);
                    let builder = Trainer::builder(&vars).group(group).accumulate(accumulate);
                    let mut train = sgd(builder.reducer(options));
                    // `a` is used last in the forward pass, so its gradient is sent first.
                    let good = |gradient: f64| {
                        let others = (loss(&all[1], 1.0)? + loss(&all[2], 1.0)?)?;
                        loss(&all[0], gradient)? + others
                    };
                    let bad = || match how {
                        How::Backward => {
                            loss(&all[0], 1.0)?
                                + failing(&(all[1].as_tensor() * all[2].as_tensor())?, how)?
                        }
                        how => failing(&all[0], how),
                    };
                    for _ in 0..2 * accumulate {
                        train.step(|| good(1.0)).unwrap();
                    }
                    let mut errors = Vec::new();
                    for batch in 0..accumulate {
                        let fails = rank == 1 && batch == failed;
                        let result = train.step(|| if fails { bad() } else { good(100.0) });
                        errors.push(result.err().map(|error| error.to_string()));
                    }
                    for _ in 0..2 * accumulate {
                        train.step(|| good(2.0)).unwrap();
                    }
                    (errors, train.steps(), value(&all[0]))
                });
                for (rank, (errors, steps, w)) in results.iter().enumerate() {
                    assert_eq!((*steps, *w), (4, -6.0), "{how:?} at {failed} of {accumulate}");
                    let last = errors.last().unwrap().as_ref().unwrap();
                    let own = errors[failed].clone().unwrap_or_default();
                    let text = if rank == 1 { &own } else { last };
                    let reason =
                        ["closure fails here", "[2, 1]", "backward pass fails here"][how as usize];
                    assert!(text.contains(reason), "{text}");
                    assert!(rank == 1 || text.contains("rank 1 failed"), "{text}");
                    assert_eq!(
                        errors.iter().flatten().count(),
                        if rank == 1 && failed + 1 < accumulate { 2 } else { 1 }
                    );
                }
            }
        }
    }
}

#[test]
fn a_refused_rate_drops_its_gradients() {
    for count in [1, 2] {
        let results = ranks(count, |group| {
            let (vars, all) = model(&["w"]);
            let rank = group.rank();
            let factor = Cell::new(0);
            let schedule = move |_| {
                factor.set(factor.get() + 1);
                if factor.get() == 2 && rank + 1 == count { f64::NAN } else { 1.0 }
            };
            let mut train = sgd(Trainer::builder(&vars).group(group).schedule(schedule));
            train.step(|| loss(&all[0], 1.0)).unwrap();
            let error = train.step(|| loss(&all[0], 100.0)).unwrap_err().to_string();
            train.step(|| loss(&all[0], 2.0)).unwrap();
            (error, value(&all[0]))
        });
        for (error, w) in results {
            assert!(error.contains("invalid learning rate"), "{error}");
            assert_eq!(w, -3.0);
        }
    }
}

#[test]
fn a_refused_update_drops_its_gradients() {
    let (vars, all) = model(&["w"]);
    let clip = Clip::Norm(fused_optim::ClipNorm {
        error_if_nonfinite: true,
        ..fused_optim::ClipNorm::new(10.0)
    });
    let mut train = sgd(Trainer::builder(&vars).group(alone()).clip(clip));
    train.step(|| loss(&all[0], 1.0)).unwrap();
    let error = train.step(|| loss(&all[0], f64::NAN)).unwrap_err().to_string();
    assert!(error.contains("norm"), "{error}");
    train.step(|| loss(&all[0], 2.0)).unwrap();
    assert_eq!(value(&all[0]), -3.0);
}

#[test]
fn a_caught_panic_leaves_a_trainer_of_one_rank_usable() {
    struct Panics;
    impl CustomOp1 for Panics {
        fn name(&self) -> &'static str {
            "panics"
        }
        fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
            Ok((x.clone(), layout.shape().clone()))
        }
        fn bwd(&self, _: &Tensor, _: &Tensor, _: &Tensor) -> Result<Option<Tensor>> {
            panic!("in a backward pass")
        }
    }
    let (vars, all) = model(&["a", "b"]);
    let mut train = sgd(Trainer::builder(&vars).group(alone()));
    let good = |gradient| loss(&all[0], gradient)? + loss(&all[1], 1.0)?;
    train.step(|| good(1.0)).unwrap();
    for in_backward in [false, true] {
        let bad = || match in_backward {
            false => panic!("in a forward pass"),
            true => {
                candle_ops::add(&candle_ops::relu(&all[0])?, &all[1].apply_op1(Panics)?)?.sum_all()
            }
        };
        let step = std::panic::AssertUnwindSafe(|| train.step(bad).map(drop));
        std::panic::catch_unwind(step).unwrap_err();
        train.step(|| good(1.0)).unwrap();
    }
    assert_eq!(value(&all[0]), -3.0);
    drop(train);
    // The gradients of the step so far are dropped, and not counted.
    let mut train = sgd(Trainer::builder(&vars).group(alone()).accumulate(3));
    train.step(|| good(100.0)).unwrap();
    let step = std::panic::AssertUnwindSafe(|| train.step(|| panic!("again")).map(drop));
    std::panic::catch_unwind(step).unwrap_err();
    train.step(|| good(1.0)).unwrap();
    assert_eq!((train.steps(), value(&all[0])), (1, -4.0));
}

#[test]
fn averages_alone_are_usable_after_a_backward_error() {
    let (vars, all) = model(&["a", "b"]);
    let mut options = ReducerOptions::default();
    (options.first_bucket_bytes, options.bucket_bytes) = (1, 1);
    let mut averages = DataParallel::new(&vars, alone(), options.clone()).unwrap();
    let good = |all: &[Var]| loss(&all[0], 1.0)? + loss(&all[1], 2.0)?;
    let bad = |all: &[Var]| loss(&all[0], 1.0)? + failing(&all[1], How::Backward)?;
    let backward = |averages: &mut DataParallel, forward: &dyn Fn() -> Result<Tensor>, sync| {
        let (loss, tape) = candle_ops::record(forward);
        let loss = loss.unwrap();
        averages.backward((tape, &loss), loss.ones_like().unwrap(), sync)
    };
    backward(&mut averages, &|| good(&all), true).unwrap();
    averages.zero_grad();
    for sync in [true, false] {
        let error = backward(&mut averages, &|| bad(&all), sync).unwrap_err().to_string();
        assert!(error.contains("backward pass fails here"), "{error}");
        backward(&mut averages, &|| good(&all), true).unwrap();
        let gradients = averages.take().unwrap();
        let found = all.iter().map(|var| gradients.get(var).unwrap().to_vec1::<f32>().unwrap());
        assert_eq!(found.collect::<Vec<_>>(), [[1.0], [2.0]]);
    }
    let errors = ranks(2, |group| {
        let (vars, all) = model(&["a", "b"]);
        let rank = group.rank();
        let mut averages = DataParallel::new(&vars, group, options.clone()).unwrap();
        backward(&mut averages, &|| good(&all), true).unwrap();
        let forward = || if rank == 1 { bad(&all) } else { good(&all) };
        backward(&mut averages, &forward, true).unwrap_err().to_string()
    });
    assert!(errors.iter().all(|error| error.contains("backward pass fails here")), "{errors:?}");
}

#[test]
fn zero_grad_within_an_epoch_keeps_its_place() {
    let (vars, all) = model(&["w"]);
    let mut train = sgd(Trainer::builder(&vars).group(alone()).accumulate(4));
    assert_eq!(train.batches(6, 1, 0).unwrap().len(), 6);
    train.step(|| loss(&all[0], 100.0)).unwrap();
    train.zero_grad();
    let mut steps = Vec::new();
    for _ in 1..6 {
        train.step(|| loss(&all[0], 1.0)).unwrap();
        steps.push(train.steps());
    }
    assert_eq!((steps, value(&all[0])), (vec![0, 0, 1, 1, 2], -2.0));
    train.batches(6, 1, 1).unwrap();
}

#[test]
fn an_epoch_that_begins_within_a_step_begins_with_a_step_of_full_strength() {
    use candle_train::train_data::{BoxError, DataLoader, Dataset, Sample, SampleRng};
    struct Empty;
    impl Dataset for Empty {
        fn len(&self) -> usize {
            8
        }
        fn sample(&self, _: usize, _: &mut SampleRng) -> std::result::Result<Sample, BoxError> {
            Ok(Sample::new())
        }
    }
    let (vars, all) = model(&["w"]);
    let mut train = sgd(Trainer::builder(&vars).group(alone()).accumulate(4));
    let loader = DataLoader::new(std::sync::Arc::new(Empty), train.sampler(8), 1, false).unwrap();
    // As after a save at batch 6 of a run with other numbers of batches per step.
    drop(train.batches_of(&loader, 0, 6).unwrap());
    for _ in 6..8 {
        train.step(|| loss(&all[0], 1.0)).unwrap();
    }
    assert_eq!((train.steps(), value(&all[0])), (1, -1.0));
}

#[test]
fn a_failed_batch_leaves_the_statistics_of_norm_layers_unchanged() {
    for count in [1, 2] {
        for how in ALL {
            for half in [false, true] {
                ranks(count, |group| {
                    let (vars, all) = model(&["w", "bn.running_mean"]);
                    let rank = group.rank();
                    let builder = Trainer::builder(&vars).group(group);
                    let scaler = || LossScaler::fixed(4.0).unwrap();
                    let mut train = sgd(if half { builder.loss_scaler(scaler()) } else { builder });
                    let set = |to: f32| all[1].set(&Tensor::new(&[to], &Device::Cpu)?);
                    let good = |mean| set(mean).and_then(|()| loss(&all[0], 1.0));
                    train.step(|| good(0.5)).unwrap();
                    assert_eq!(value(&all[1]), 0.5);
                    let fails = rank + 1 == count;
                    let bad = || {
                        set(1e29).and_then(|()| {
                            if fails { failing(&all[0], how) } else { loss(&all[0], 1.0) }
                        })
                    };
                    train.step(bad).unwrap_err();
                    assert_eq!(value(&all[1]), 0.5, "{how:?}, {count} ranks");
                    train.step(|| good(0.25)).unwrap();
                    assert_eq!((value(&all[1]), value(&all[0])), (0.25, -2.0));
                });
            }
        }
    }
}

#[test]
fn gradients_that_are_never_finite_end_the_run_and_name_a_parameter() {
    for count in [1, 2] {
        for (limit, with_limit) in [(100, false), (3, true)] {
            let results = ranks(count, |group| {
                let (vars, all) = model(&["a", "b", "c"]);
                let is_last = group.rank() + 1 == count;
                let builder = Trainer::builder(&vars).group(group);
                let builder =
                    if with_limit { builder.max_consecutive_skips(limit) } else { builder };
                let mut train = sgd(builder.loss_scaler(LossScaler::fixed(4.0).unwrap()));
                let step = |train: &mut Trainer, bad: f64| {
                    let bad = if is_last { bad } else { 1.0 };
                    train
                        .step(|| (loss(&all[0], 1.0)? + loss(&all[1], bad)?)? + loss(&all[2], bad)?)
                };
                // A step that is applied begins the count anew.
                step(&mut train, f64::NAN).unwrap();
                step(&mut train, 1.0).unwrap();
                for _ in 1..limit {
                    step(&mut train, f64::INFINITY).unwrap();
                }
                let error = step(&mut train, f64::INFINITY).unwrap_err().to_string();
                assert_eq!((train.steps(), value(&all[0])), (1, -1.0));
                step(&mut train, 1.0).unwrap();
                assert_eq!((train.steps(), value(&all[0])), (2, -2.0));
                error
            });
            for error in results {
                let parts = [
                    &format!("skipped {limit} steps"),
                    "`b`",
                    "loss scale of 4",
                    "max_consecutive_skips",
                ];
                assert!(parts.iter().all(|part| error.contains(*part)), "{error}");
            }
        }
    }
}

#[test]
fn a_loss_scale_at_its_minimum_names_the_parameter_and_bf16_ends() {
    let nan = |half: fn(Builder) -> Builder| {
        let (vars, net) = super::model(1);
        let mut train =
            half(Trainer::builder(&vars).group(alone())).build(SgdHyper::default()).unwrap();
        let (x, y) = super::batch(&[0, 1, 2, 3]);
        for step in 0.. {
            assert!(step < 200);
            let forward = || {
                let out = candle_core::Module::forward(&net, &x)?;
                candle_ops::cross_entropy(&out, &y)? * f64::NAN
            };
            if let Err(error) = train.step(forward) {
                return (step + 1, error.to_string());
            }
        }
        unreachable!()
    };
    let (steps, error) = nan(Builder::f16);
    assert_eq!(steps, 41);
    assert!(error.contains("`a.bias`") && error.contains("smallest loss scale"), "{error}");
    let (steps, error) = nan(Builder::bf16);
    assert_eq!(steps, 100);
    assert!(error.contains("`a.bias`") && error.contains("loss scale of 1"), "{error}");
    let scaler = || LossScaler::new(LossScalerOptions::default()).unwrap();
    let none = Trainer::builder(&super::model(1).0).group(alone()).loss_scaler(scaler());
    let error = none.max_consecutive_skips(0).build(SgdHyper::default()).unwrap_err().to_string();
    assert!(error.contains("`max_consecutive_skips` must be at least 1"), "{error}");
}

#[test]
fn ranks_with_other_rates_are_named_in_the_same_step() {
    let errors = ranks(3, |group| {
        let (vars, all) = model(&["w"]);
        let rank = group.rank();
        let factor = move |step| if step == 1 && rank == 2 { 0.5 } else { 1.0 };
        let mut train = sgd(Trainer::builder(&vars).group(group.clone()).schedule(factor));
        train.step(|| loss(&all[0], 1.0)).unwrap();
        let schedules = train.step(|| loss(&all[0], 1.0)).unwrap_err().to_string();
        drop(train);
        let mut train = sgd(Trainer::builder(&vars).group(group));
        let param = fused_optim::HyperParam::WeightDecay;
        if rank == 1 {
            train.optimizer().set_hyper_param(0, param, 0.25).unwrap();
        }
        let set = train.step(|| loss(&all[0], 1.0)).unwrap_err().to_string();
        train.optimizer().set_hyper_param(0, param, 0.0).unwrap();
        train.step(|| loss(&all[0], 1.0)).unwrap();
        assert_eq!(value(&all[0]), -2.0);
        [schedules, set]
    });
    for [schedules, set] in errors {
        assert!(schedules.contains("rank 0 has learning rate 1.0"), "{schedules}");
        assert!(schedules.contains("rank 2 learning rate 0.5"), "{schedules}");
        assert!(set.contains("rank 1") && set.contains("weight decay 0.25"), "{set}");
    }
}

#[test]
fn a_detached_loss_is_refused_also_with_unused_parameters() {
    for count in [1, 2] {
        for (accumulate, find_unused) in [(1, true), (1, false), (2, true), (2, false)] {
            let errors = ranks(count, |group| {
                let (vars, all) = model(&["w"]);
                let detaches = group.rank() + 1 == count;
                let builder = Trainer::builder(&vars).group(group).accumulate(accumulate);
                let mut train =
                    sgd(if find_unused { builder.find_unused_parameters() } else { builder });
                for _ in 1..accumulate {
                    train.step(|| loss(&all[0], 1.0)).unwrap();
                }
                let bad =
                    || if detaches { Ok(loss(&all[0], 1.0)?.detach()) } else { loss(&all[0], 1.0) };
                let error = train.step(bad).unwrap_err().to_string();
                assert_eq!((train.steps(), value(&all[0])), (0, 0.0));
                for _ in 0..accumulate {
                    train.step(|| loss(&all[0], 1.0)).unwrap();
                }
                assert_eq!((train.steps(), value(&all[0])), (1, -1.0));
                error
            });
            assert!(errors[count - 1].contains("without `detach`"), "{errors:?}");
            assert!(count == 1 || errors[0].contains("rank 1 failed"), "{errors:?}");
        }
    }
}

#[test]
fn a_parameter_unused_on_one_rank_is_named_on_all_and_the_next_step_is_right() {
    let errors = ranks(2, |group| {
        let (vars, all) = model(&["a", "b"]);
        let rank = group.rank();
        let mut train = sgd(Trainer::builder(&vars).group(group));
        let good = || loss(&all[0], 1.0)? + loss(&all[1], 1.0)?;
        let error = train.step(|| if rank == 1 { loss(&all[0], 100.0) } else { good() });
        train.step(good).unwrap();
        assert_eq!(weights(&vars), [[-1.0], [-1.0]]);
        error.unwrap_err().to_string()
    });
    assert!(errors[1].contains("find_unused_parameters"), "{errors:?}");
    assert!(
        errors.iter().all(|error| error.contains("rank 1") && error.contains('b')),
        "{errors:?}"
    );
}

#[test]
fn a_mean_that_one_rank_cannot_read_is_an_error_on_all() {
    let errors = ranks(2, |group| {
        let (vars, _all) = model(&["w"]);
        let train = sgd(Trainer::builder(&vars).group(group));
        let value = Tensor::ones(1 + train.rank(), DType::F32, &Device::Cpu).unwrap();
        let error = train.mean(&value).unwrap_err().to_string();
        assert_eq!(train.mean(&value.get(0).unwrap()).unwrap(), 1.0);
        error
    });
    assert!(errors[0].contains("`Trainer::mean` failed on rank 1"), "{errors:?}");
    assert!(errors[1].contains("[2]"), "{errors:?}");
}

#[test]
fn state_of_an_earlier_step_must_be_detached() {
    let forwards: [fn(&Tensor, &Tensor) -> Result<Tensor>; 3] = [
        |w, h| (w * h)?.tanh(),
        |w, h| candle_ops::relu(&(w * h)?),
        |w, h| {
            candle_ops::linear(&candle_ops::relu(h)?.reshape((1, 1))?, &w.reshape((1, 1))?, None)?
                .reshape(1)
        },
    ];
    for (index, forward) in forwards.into_iter().enumerate() {
        let (vars, all) = model(&["w"]);
        all[0].set(&Tensor::new(&[0.5_f32], &Device::Cpu).unwrap()).unwrap();
        let mut train = sgd(Trainer::builder(&vars).group(alone()));
        let state = Rc::new(Cell::new(Some(Tensor::ones(1, DType::F32, &Device::Cpu).unwrap())));
        let run = |detach: bool| {
            let h = state.take().unwrap();
            let h = forward(&all[0], &if detach { h.detach() } else { h })?;
            state.set(Some(h.clone()));
            h.sum_all()
        };
        train.step(|| run(false)).unwrap();
        let error = train.step(|| run(false)).unwrap_err().to_string();
        assert!(
            error.contains("state of an earlier batch") && error.contains("`detach`"),
            "{index}: {error}"
        );
        for _ in 0..3 {
            train.step(|| run(true)).unwrap();
        }
    }
}

#[test]
fn a_parameter_used_only_in_an_earlier_batch_of_a_step_is_averaged() {
    for count in [1, 2] {
        for find_unused in [false, true] {
            let all = ranks(count, |group| {
                let (vars, all) = model(&["a", "b"]);
                let builder = Trainer::builder(&vars).group(group).accumulate(2);
                let mut train =
                    sgd(if find_unused { builder.find_unused_parameters() } else { builder });
                for _ in 0..2 {
                    train.step(|| loss(&all[0], 1.0)? + loss(&all[1], 4.0)?).unwrap();
                    train.step(|| loss(&all[0], 1.0)).unwrap();
                }
                weights(&vars)
            });
            assert!(all.iter().all(|w| *w == [[-2.0], [-4.0]]), "{all:?}");
        }
    }
}

#[test]
fn a_variable_of_two_names_is_trained_once_and_saved_by_both() {
    let directory = tempfile::tempdir().unwrap();
    for count in [1, 2] {
        ranks(count, |group| {
            let path = directory.path().join(format!("run{count}"));
            let (vars, all) = model(&["a", "b"]);
            vars.data().lock().unwrap().insert("z.tied".to_owned(), all[0].clone());
            let mut train = sgd(Trainer::builder(&vars).group(group.clone()));
            train.step(|| loss(&all[0], 1.0)? + loss(&all[1], 4.0)?).unwrap();
            assert_eq!(weights(&vars), [[-1.0], [-4.0], [-1.0]]);
            train.save(&path, 1).unwrap();
            train.step(|| loss(&all[0], 1.0)? + loss(&all[1], 4.0)?).unwrap();
            assert_eq!(train.resume(&path).unwrap(), 1);
            assert_eq!(weights(&vars), [[-1.0], [-4.0], [-1.0]]);
            train.step(|| loss(&all[0], 1.0)? + loss(&all[1], 4.0)?).unwrap();
            assert_eq!(weights(&vars), [[-2.0], [-8.0], [-2.0]]);
            drop(train);
            // Freezing one name leaves the other.
            let mut train = sgd(Trainer::builder(&vars).group(group).frozen(["a"]));
            train.step(|| loss(&all[0], 1.0)? + loss(&all[1], 4.0)?).unwrap();
            assert_eq!(weights(&vars), [[-3.0], [-12.0], [-3.0]]);
        });
    }
}

#[test]
fn constants_of_all_integer_types_are_broadcast() {
    for dtype in [DType::U8, DType::U32, DType::I16, DType::I32, DType::I64] {
        let all = ranks(2, |group| {
            let (vars, all) = model(&["w"]);
            let ids = Tensor::new(&[3_u8 + group.rank() as u8, 7], &Device::Cpu).unwrap();
            let ids = Var::from_tensor(&ids.to_dtype(dtype).unwrap()).unwrap();
            vars.data().lock().unwrap().insert("ids".to_owned(), ids.clone());
            let mut train = sgd(Trainer::builder(&vars).group(group));
            train.step(|| loss(&all[0], 1.0)).unwrap();
            ids.to_dtype(DType::F32).unwrap().to_vec1::<f32>().unwrap()
        });
        assert_eq!(all, [[3.0, 7.0]; 2], "{dtype:?}");
    }
}

#[test]
fn an_optimizer_whose_groups_lack_variables_is_refused() {
    use fused_optim::{CpuOptimizer, Optimizer, ParamGroup};
    let (vars, all) = model(&["a", "b", "c"]);
    let built = |params: Vec<usize>| {
        Trainer::builder(&vars).group(alone()).build_with(move |_, _| {
            let group = ParamGroup::new(SgdHyper { lr: 1.0, ..Default::default() }, params);
            let optimizer = CpuOptimizer::new([group]).map_err(candle_core::Error::wrap)?;
            let optimizer: Box<dyn Optimizer> = Box::new(optimizer);
            Ok(optimizer)
        })
    };
    let error = built(vec![1]).unwrap_err().to_string();
    assert!(error.contains("no parameter group") && error.contains("a, c"), "{error}");
    let mut train = built(vec![1, 2, 0]).unwrap();
    train.step(|| (loss(&all[0], 1.0)? + loss(&all[1], 1.0)?)? + loss(&all[2], 1.0)?).unwrap();
}
