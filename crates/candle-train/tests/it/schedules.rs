//! Tests of schedulers, parameter groups, and what a step returns.

use candle_core::{DType, Device, Var};
use candle_nn::VarMap;
use candle_train::train_step::{
    Floor, Multipliers, Param, Paramwise, Plateau, RunLength, SchedulerConfig, Shape,
};
use candle_train::{
    Clip, LossScaler, LossScalerOptions, Outcome, SgdHyper, Trainer, TrainerBuilder,
};
use fused_optim::{CpuOptimizer, HyperParam};

use super::ranks;
use super::recovery::{alone, loss, model, sgd, value};

const STEPS: u64 = 8;

fn warm_up_and_cosine() -> [SchedulerConfig; 2] {
    let warm_up = Shape::Linear { start_factor: 0.25, end_factor: 1.0 };
    let cosine = Shape::CosineAnnealing { t_max: None, floor: Floor::Value(0.0) };
    [
        SchedulerConfig { end: Some(3), ..SchedulerConfig::by_iters(Param::Lr, warm_up) },
        SchedulerConfig { begin: 3, ..SchedulerConfig::by_iters(Param::Lr, cosine) },
    ]
}

fn scheduled(vars: &VarMap) -> TrainerBuilder {
    Trainer::builder(vars).schedulers(RunLength::of_iters(STEPS), warm_up_and_cosine())
}

#[test]
fn schedulers_set_the_rates_of_each_step_and_are_resumed_to_the_bit() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("run");
    for world_size in [1, 2] {
        ranks(world_size, |group| {
            let path = path.with_extension(world_size.to_string());
            let build = || {
                let (vars, all) = model(&["w"]);
                (sgd(scheduled(&vars).group(group.clone())), all)
            };
            let step = |train: &mut Trainer, w: &Var| {
                train.step(|| loss(w, 1.0)).unwrap();
                value(w)
            };
            let (mut whole, all) = build();
            let rates = (0..STEPS).map(|_| {
                step(&mut whole, &all[0]);
                whole.learning_rate()
            });
            let rates: Vec<_> = rates.collect();
            assert_eq!(rates[0], 0.25);
            assert!((rates[2] - 1.0).abs() < 1e-12 && rates[7] < 0.2, "{rates:?}");
            let sum: f64 = rates.iter().sum();
            assert!((f64::from(value(&all[0])) + sum).abs() < 1e-6, "{rates:?}");
            // Killed after five steps.
            let (mut first, w) = build();
            for _ in 0..5 {
                step(&mut first, &w[0]);
            }
            first.save(&path, 0).unwrap();
            step(&mut first, &w[0]);
            drop(first);
            let (mut second, w) = build();
            second.resume(&path).unwrap();
            assert_eq!(second.learning_rate(), rates[4]);
            for _ in 5..STEPS {
                step(&mut second, &w[0]);
            }
            assert_eq!(value(&w[0]), value(&all[0]));
            drop(second);
            let (vars, _) = model(&["w"]);
            let mut none = sgd(Trainer::builder(&vars).group(group.clone()));
            let error = none.resume(&path).unwrap_err().to_string();
            assert!(error.contains("saved with schedulers"), "{error}");
        });
    }
}

#[test]
fn a_skipped_step_does_not_count_for_schedulers() {
    let (vars, all) = model(&["w"]);
    let scaler = LossScaler::new(LossScalerOptions::default()).unwrap();
    let mut train = sgd(scheduled(&vars).group(alone()).loss_scaler(scaler));
    let skipped = train.step(|| loss(&all[0], f64::NAN)).unwrap().outcome;
    assert_eq!(skipped, Outcome::Skipped { loss_scale: 32768.0 });
    assert_eq!((train.learning_rate(), train.steps()), (0.25, 0));
    assert_eq!(train.step(|| loss(&all[0], 1.0)).unwrap().outcome, Outcome::Updated);
    assert_eq!(train.learning_rate(), 0.25);
    train.step(|| loss(&all[0], 1.0)).unwrap();
    assert!(train.learning_rate() > 0.25);
}

#[test]
fn a_plateau_falls_by_the_metrics_of_a_validation() {
    let (vars, _) = model(&["w"]);
    let plateau = Shape::Plateau(Plateau { factor: 0.5, patience: 0, ..Plateau::default() });
    let plateau = SchedulerConfig::new(Param::Lr, plateau);
    let builder = Trainer::builder(&vars).group(alone());
    let mut train = sgd(builder.schedulers(RunLength::of_iters(STEPS), [plateau]));
    for (metric, rate) in [(3.0, 1.0), (2.0, 1.0), (2.0, 0.5), (1.0, 0.5)] {
        train.step_metrics(&[("loss".into(), metric)]).unwrap();
        assert_eq!(train.learning_rate(), rate);
    }
    let error = train.step_metrics(&[("accuracy".into(), 1.0)]).unwrap_err().to_string();
    assert!(error.contains("no metric `loss`; known: accuracy"), "{error}");
}

#[test]
fn schedulers_that_a_trainer_cannot_run_are_refused() {
    let (vars, _) = model(&["w"]);
    let build = |builder: TrainerBuilder, hyper: SgdHyper| {
        builder.group(alone()).build(hyper).map(drop).unwrap_err().to_string()
    };
    let both = build(scheduled(&vars).schedule(|_| 1.0), SgdHyper::default());
    assert!(both.contains("cannot both be set"), "{both}");
    let step = Shape::Step { step_size: 2, gamma: 0.1 };
    let with = |config| Trainer::builder(&vars).schedulers(RunLength::of_iters(STEPS), [config]);
    let epochs = build(with(SchedulerConfig::new(Param::Lr, step)), SgdHyper::default());
    assert!(epochs.contains("a trainer counts steps"), "{epochs}");
}

fn layer() -> (VarMap, [Var; 3]) {
    let vars = VarMap::new();
    let new = |name: &str, shape: &[usize]| {
        let var = Var::ones(shape, DType::F32, &Device::Cpu).unwrap();
        vars.data().lock().unwrap().insert(name.to_owned(), var.clone());
        var
    };
    let all = [new("fc.weight", &[2, 2]), new("fc.bias", &[2]), new("norm.weight", &[2])];
    (vars, all)
}

#[test]
fn groups_have_their_own_decay_and_rate() {
    let hyper = SgdHyper { lr: 0.5, weight_decay: 0.1, ..SgdHyper::default() };
    let custom = vec![("norm".to_owned(), Multipliers { lr: 0.0, weight_decay: 1.0 })];
    let paramwise = Paramwise { custom_keys: custom, ..Paramwise::no_decay_for_norms_and_biases() };
    let (vars, all) = layer();
    let mut train = Trainer::builder(&vars).group(alone()).groups(paramwise).build(hyper).unwrap();
    let optimizer = train.optimizer();
    let rates: Vec<_> = (0..3)
        .map(|group| {
            let of = |param| optimizer.hyper_param(group, param).unwrap().unwrap();
            (of(HyperParam::Lr), of(HyperParam::WeightDecay))
        })
        .collect();
    // In the order of the names: `fc.bias`, `fc.weight`, `norm.weight`.
    assert_eq!(rates, [(0.5, 0.0), (0.5, 0.1), (0.0, 0.1)]);
    train.step(|| (loss(&all[0], 1.0)? + loss(&all[1], 1.0)?)? + loss(&all[2], 1.0)?).unwrap();
    let first = |var: &Var| var.flatten_all().unwrap().to_vec1::<f32>().unwrap()[0];
    assert_eq!(all.each_ref().map(first), [0.45, 0.5, 1.0]);

    let key = vec![("nrom".to_owned(), Multipliers::default())];
    let misspelled = Paramwise { custom_keys: key, ..Paramwise::default() };
    let builder = Trainer::builder(&vars).group(alone()).groups(misspelled);
    let error = builder.build(hyper).unwrap_err().to_string();
    assert!(error.contains("`nrom`") && error.contains("norm.weight"), "{error}");
    let paramwise = Paramwise::no_decay_for_norms_and_biases();
    let builder = Trainer::builder(&vars).group(alone()).groups(paramwise);
    let error = builder.build_with(|vars, _| {
        let optimizer = CpuOptimizer::with_one_group(hyper, vars.len());
        Ok(Box::new(optimizer.map_err(candle_core::Error::wrap)?))
    });
    let error = error.unwrap_err().to_string();
    assert!(error.contains("`groups` is for `build`"), "{error}");
}

#[test]
fn a_step_returns_whether_it_was_taken_and_its_norm() {
    for world_size in [1, 2] {
        ranks(world_size, |group| {
            let (vars, all) = model(&["w"]);
            let builder = Trainer::builder(&vars).group(group).accumulate(2);
            let mut train = sgd(builder.clip(Clip::norm(1.0)));
            let mut step = |gradient| train.step(|| loss(&all[0], gradient)).unwrap();
            let accumulated = step(2.0);
            assert_eq!(accumulated.outcome, Outcome::Accumulated);
            assert_eq!(accumulated.loss.to_scalar::<f32>().unwrap(), 0.0);
            assert_eq!(step(4.0).outcome, Outcome::Updated);
            let norm = train.grad_norm().unwrap();
            assert!((norm - 3.0).abs() < 1e-6, "{norm}");
            assert!((value(&all[0]) + 1.0).abs() < 1e-5);
        });
    }
}

#[test]
fn a_rate_that_is_refused_changes_no_variable() {
    for world_size in [1, 2] {
        ranks(world_size, |group| {
            let (vars, all) = model(&["w"]);
            // The second step would have a negative rate.
            let bad =
                SchedulerConfig::by_iters(Param::Lr, Shape::Poly { power: 1.0, eta_min: -100.0 });
            let builder = Trainer::builder(&vars).group(group);
            let mut train = sgd(builder.schedulers(RunLength::of_iters(STEPS), [bad]));
            train.step(|| loss(&all[0], 1.0)).unwrap();
            for _ in 0..2 {
                train.step(|| loss(&all[0], 1.0)).unwrap_err();
                assert_eq!((train.steps(), value(&all[0])), (1, -1.0));
            }
        });
    }
}

#[test]
fn a_run_resumed_without_its_function_has_the_rates_before_it() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("run");
    let (vars, all) = model(&["w"]);
    let mut train = sgd(Trainer::builder(&vars).group(alone()).schedule(|_| 0.5));
    train.step(|| loss(&all[0], 1.0)).unwrap();
    assert_eq!(train.learning_rate(), 0.5);
    train.save(&path, 0).unwrap();
    drop(train);
    let mut train = sgd(Trainer::builder(&vars).group(alone()));
    train.resume(&path).unwrap();
    assert_eq!(train.learning_rate(), 1.0);
    // One that was set by hand stays.
    train.optimizer().set_hyper_param(0, HyperParam::Lr, 0.25).unwrap();
    train.save(&path, 0).unwrap();
    train.resume(&path).unwrap();
    assert_eq!(train.learning_rate(), 0.25);
}

#[test]
fn the_norm_of_a_skipped_step_is_not_that_of_an_earlier_one() {
    let (vars, all) = model(&["w"]);
    let builder = Trainer::builder(&vars).group(alone()).clip(Clip::norm(1.0));
    let mut train = sgd(builder.loss_scaler(LossScaler::fixed(2.0).unwrap()));
    assert_eq!(train.grad_norm(), None);
    train.step(|| loss(&all[0], 2.0)).unwrap();
    assert!(train.grad_norm().is_some());
    train.step(|| loss(&all[0], f64::NAN)).unwrap();
    assert_eq!(train.grad_norm(), None);
}
