//! Tests that after any error of a step the next one is right: no gradient of a failed batch is in
//! it, and no step is weaker than another.

use std::cell::Cell;

use candle_core::{CpuStorage, CustomOp1, DType, Device, Layout, Result, Shape, Tensor, Var, bail};
use candle_nn::VarMap;
use candle_train::{
    Clip, DataParallel, LossScaler, LossScalerOptions, ReducerOptions, SgdHyper, Trainer,
    TrainerBuilder,
};
use collective::ProcessGroup;

use super::ranks;

/// Variables of one element each, and ones in a large tensor.
pub(super) fn model(names: &[&str]) -> (VarMap, Vec<Var>) {
    let vars = VarMap::new();
    let new = |name: &&str| {
        let var = Var::zeros(1, DType::F32, &Device::Cpu).unwrap();
        vars.data().lock().unwrap().insert((*name).to_owned(), var.clone());
        var
    };
    let all = names.iter().map(new).collect();
    (vars, all)
}

pub(super) fn alone() -> ProcessGroup {
    ranks(1, |group| group).remove(0)
}

pub(super) fn sgd(builder: TrainerBuilder) -> Trainer {
    builder.build(SgdHyper { lr: 1.0, ..Default::default() }).unwrap()
}

/// A loss whose gradient is `gradient`.
pub(super) fn loss(w: &Tensor, gradient: f64) -> Result<Tensor> {
    (w * gradient)?.sum_all()
}

pub(super) fn value(w: &Var) -> f32 {
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
    let builder = DataLoader::builder(std::sync::Arc::new(Empty), train.sampler(8));
    let mut loader = builder.build().unwrap();
    // As after a save at batch 6 of a run with other numbers of batches per step.
    loader.batches_from(0, 5).take(1).for_each(drop);
    loader.resume(loader.position()).unwrap();
    assert_eq!(train.batches_of(&loader, 0).unwrap().count(), 2);
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
    let nan = |half: fn(TrainerBuilder) -> TrainerBuilder| {
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
    let (steps, error) = nan(TrainerBuilder::f16);
    assert_eq!(steps, 41);
    assert!(error.contains("`a.bias`") && error.contains("smallest loss scale"), "{error}");
    let (steps, error) = nan(TrainerBuilder::bf16);
    assert_eq!(steps, 100);
    assert!(error.contains("`a.bias`") && error.contains("loss scale of 1"), "{error}");
    let scaler = || LossScaler::new(LossScalerOptions::default()).unwrap();
    let none = Trainer::builder(&super::model(1).0).group(alone()).loss_scaler(scaler());
    let error = none.max_consecutive_skips(0).build(SgdHyper::default()).unwrap_err().to_string();
    assert!(error.contains("`max_consecutive_skips` must be at least 1"), "{error}");
}

#[test]
fn a_resumed_run_goes_on_counting_skipped_steps() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("run");
    let run = || {
        let (vars, all) = model(&["w"]);
        let scaler = LossScaler::fixed(2.0).unwrap();
        let builder = Trainer::builder(&vars).group(alone()).loss_scaler(scaler);
        let mut train = sgd(builder.max_consecutive_skips(4));
        train.resume(&path).unwrap();
        let mut steps = 0;
        while train.step(|| loss(&all[0], f64::NAN)).is_ok() {
            steps += 1;
            if steps == 2 {
                train.save(&path, 0).unwrap();
            }
        }
        steps
    };
    assert_eq!((run(), run()), (3, 1));
}

#[test]
fn the_loss_scale_falls_also_when_each_skipped_step_is_an_error() {
    let (vars, all) = model(&["w"]);
    let options = LossScalerOptions { init_scale: 1024.0, ..LossScalerOptions::default() };
    let builder = Trainer::builder(&vars).group(alone()).max_consecutive_skips(1);
    let mut train = sgd(builder.loss_scaler(LossScaler::new(options).unwrap()));
    // Times 1024 or 512 it is infinite.
    let mut step = || train.step(|| loss(&all[0], 1e36)).map(drop);
    for scale in ["1024", "512"] {
        let error = step().unwrap_err().to_string();
        assert!(error.contains(&format!("at a loss scale of {scale};")), "{error}");
    }
    step().unwrap();
    assert_eq!((train.loss_scale(), train.steps()), (256.0, 1));
}
