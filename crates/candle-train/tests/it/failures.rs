//! Tests of what fails on one of several ranks alone, and of batches that add nothing to their
//! step.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use candle_core::{DType, Device, Result, Tensor, Var, bail};
use candle_nn::VarMap;
use candle_train::{LossScaler, LossScalerOptions, ReducerOptions, SgdHyper, Trainer};
use collective::ProcessGroup;
use fused_optim::{
    Applied, CpuOptimizer, Error, HyperParam, Optimizer, ParamGroup, ParamMut, ParamSpec,
    StateDict, StepCtl,
};

use super::recovery::{alone, loss, model, sgd, value};
use super::{ranks, weights};

#[test]
fn parameters_that_a_static_graph_does_not_use_need_no_gradient_of_a_failed_batch() {
    ranks(2, |group| {
        let (vars, all) = model(&["idle", "w"]);
        let rank = group.rank();
        let mut options = ReducerOptions::default();
        options.static_graph = true;
        let new = |group: &ProcessGroup| {
            sgd(Trainer::builder(&vars).group(group.clone()).reducer(options.clone()))
        };
        let good = || loss(&all[1], 1.0);
        let mut train = new(&group);
        (0..2).for_each(|_| drop(train.step(good).unwrap()));
        let failed = train.step(|| if rank == 1 { bail!("fails here") } else { good() });
        let failed = failed.unwrap_err().to_string();
        assert!(failed.contains("fails here"), "{failed}");
        train.step(good).unwrap();
        drop(train);
        let mut train = new(&group);
        (0..2).for_each(|_| drop(train.step_weighted(3, good).unwrap()));
        train.step_weighted(if rank == 1 { 0 } else { 2 }, good).unwrap();
        assert_eq!(weights(&vars), [[0.0], [-6.0]]);
    });
}

/// SGD that fails in an update (1), or when its hyper-parameters are read (2).
#[derive(Debug)]
struct Failing(CpuOptimizer<SgdHyper>, Arc<AtomicU8>);

impl Failing {
    fn check(&self, how: u8) -> fused_optim::Result<()> {
        match self.1.load(Ordering::Relaxed) == how {
            true => Err(Error::InvalidHyper { name: "fails here", value: 0.0 }),
            false => Ok(()),
        }
    }
}

impl Optimizer for Failing {
    fn kind(&self) -> &'static str {
        self.0.kind()
    }
    fn step(&mut self, params: &mut [ParamMut<'_>], ctl: &StepCtl) -> fused_optim::Result<Applied> {
        self.check(1)?;
        self.0.step(params, ctl)
    }
    fn state_dict(&self) -> fused_optim::Result<StateDict> {
        self.0.state_dict()
    }
    fn set_param_names(&mut self, params: &[ParamSpec]) -> fused_optim::Result<()> {
        self.0.set_param_names(params)
    }
    fn load_state_dict(&mut self, dict: &StateDict) -> fused_optim::Result<()> {
        self.0.load_state_dict(dict)
    }
    fn group_count(&self) -> usize {
        self.0.group_count()
    }
    fn hyper_param(&self, group: usize, param: HyperParam) -> fused_optim::Result<Option<f64>> {
        self.check(2)?;
        self.0.hyper_param(group, param)
    }
    fn set_hyper_param(
        &mut self,
        group: usize,
        param: HyperParam,
        value: f64,
    ) -> fused_optim::Result<()> {
        self.0.set_hyper_param(group, param, value)
    }
    fn refresh_masters(&mut self) -> fused_optim::Result<()> {
        self.0.refresh_masters()
    }
    fn set_threads(&mut self, threads: usize) {
        self.0.set_threads(threads);
    }
    fn grad_norm(&self) -> Option<f64> {
        self.0.grad_norm()
    }
}

#[test]
fn an_optimizer_that_fails_on_one_rank_ends_the_run_on_all_with_the_reason() {
    for how in [1, 2] {
        let errors = ranks(2, |group| {
            let (vars, all) = model(&["w"]);
            let rank = group.rank();
            let fails = Arc::new(AtomicU8::new(0));
            let own = Arc::clone(&fails);
            let built = Trainer::builder(&vars).group(group).build_with(move |_, _| {
                let sgd = CpuOptimizer::new([ParamGroup::new(SgdHyper::default(), vec![0])]);
                let sgd = sgd.map_err(candle_core::Error::wrap)?;
                let optimizer: Box<dyn Optimizer> = Box::new(Failing(sgd, own));
                Ok(optimizer)
            });
            let mut train = built.unwrap();
            train.step(|| loss(&all[0], 1.0)).unwrap();
            fails.store(if rank == 1 { how } else { 0 }, Ordering::Relaxed);
            let first = train.step(|| loss(&all[0], 1.0)).map(drop);
            assert!(rank == 0 || first.is_err());
            fails.store(0, Ordering::Relaxed);
            train.step(|| loss(&all[0], 1.0)).unwrap_err().to_string()
        });
        for (rank, error) in errors.iter().enumerate() {
            assert!(error.contains("fails here"), "{how}, rank {rank}: {error}");
        }
    }
}

#[test]
fn a_parameter_used_only_in_a_dropped_batch_is_not_stepped() {
    let (vars, all) = model(&["a", "b"]);
    all[1].set(&Tensor::ones(1, DType::F32, &Device::Cpu).unwrap()).unwrap();
    let builder = Trainer::builder(&vars).group(alone()).accumulate(3).find_unused_parameters();
    let hyper = SgdHyper { lr: 1.0, weight_decay: 0.5, ..Default::default() };
    let mut train = builder.build(hyper).unwrap();
    train.step(|| loss(&all[0], 1.0)? + loss(&all[1], 1.0)?).unwrap();
    train.step(|| bail!("fails here")).unwrap_err();
    train.step(|| loss(&all[0], 1.0)).unwrap();
    assert_eq!((train.steps(), weights(&vars)), (1, vec![vec![-1.0], vec![1.0]]));
}

#[test]
fn another_method_may_follow_a_caught_panic() {
    let (vars, all) = model(&["w"]);
    let mut train = sgd(Trainer::builder(&vars).group(alone()).accumulate(3));
    let step = std::panic::AssertUnwindSafe(|| train.step(|| panic!("here")).map(drop));
    std::panic::catch_unwind(step).unwrap_err();
    for count in [1, 3] {
        train.step_weighted(count, || loss(&all[0], 1.0)).unwrap();
    }
    assert_eq!((train.steps(), value(&all[0])), (1, -1.0));
}

#[test]
fn a_batch_of_no_tokens_leaves_the_statistics_of_norm_layers_unchanged() {
    let (vars, all) = model(&["w", "bn.running_mean"]);
    let mut train = sgd(Trainer::builder(&vars).group(alone()).accumulate(2));
    let mut batch = |count: usize, mean: f32| {
        let forward = || {
            all[1].set(&Tensor::new(&[mean], &Device::Cpu)?)?;
            loss(&all[0], 1.0)
        };
        train.step_weighted(count, forward).unwrap();
        value(&all[1])
    };
    let means = [batch(0, f32::NAN), batch(2, 1.0), batch(3, 2.0), batch(0, 9.0)];
    assert_eq!(means, [0.0, 1.0, 2.0, 2.0]);
}

#[test]
fn a_small_first_count_does_not_overflow_f16_after_the_first_step() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("run");
    let new = || {
        let vars = VarMap::new();
        let weight = Tensor::full(0.5_f32, (1, 4), &Device::Cpu).unwrap();
        let weight = Var::from_tensor(&weight).unwrap();
        vars.data().lock().unwrap().insert("w".to_owned(), weight.clone());
        let options = LossScalerOptions { init_scale: 8192.0, ..Default::default() };
        let builder = Trainer::builder(&vars).group(alone()).accumulate(2).f16();
        (weight, sgd(builder.loss_scaler(LossScaler::new(options).unwrap())))
    };
    let step = |train: &mut Trainer, weight: &Var| {
        let x = Tensor::new(&[[0.01_f32, 0.02, 0.03, 0.0]], &Device::Cpu).unwrap();
        for (count, factor) in [(1, 300.0), (4096, 1.0)] {
            let forward = || {
                let out = candle_ops::linear(&x, weight, None)?.to_dtype(DType::F32)?;
                (out * factor)?.sum_all()
            };
            train.step_weighted(count, forward).unwrap();
        }
        weight.flatten_all().unwrap().to_vec1::<f32>().unwrap()
    };
    let (weight, mut train) = new();
    step(&mut train, &weight);
    let skipped = 1 - train.steps();
    let before = step(&mut train, &weight);
    let after = step(&mut train, &weight);
    assert_eq!((skipped, train.steps()), (1, 2));
    let mean = (300.0 + 4096.0) / 4097.0;
    for ((before, after), x) in before.iter().zip(after).zip([0.01, 0.02, 0.03, 0.0]) {
        assert!((before - after - mean * x).abs() < 1e-4, "{before} {after}");
    }
    train.save(&path, 1).unwrap();
    let next = step(&mut train, &weight);
    drop(train);
    let (weight, mut train) = new();
    train.resume(&path).unwrap();
    assert_eq!((step(&mut train, &weight), train.steps()), (next, 3));
}

/// A loss of views of a variable, whose gradient is another one for each element.
fn loss_of(views: &[Tensor], in_operator: bool) -> Result<Tensor> {
    let mut sum = Tensor::zeros((), DType::F32, &Device::Cpu)?;
    for (index, view) in (1..).zip(views) {
        let factors = Tensor::arange(0.0_f32, view.elem_count() as f32, &Device::Cpu)?;
        let factors = (factors.reshape(view.shape())? * f64::from(index))?;
        let view = if in_operator { candle_ops::relu(view)? } else { view.clone() };
        sum = (sum + (view * factors)?.sum_all()?)?;
    }
    Ok(sum)
}

#[test]
fn views_of_variables_may_be_made_before_the_trainer() {
    let views = |w: &Tensor| {
        let transposed = w.t().unwrap();
        let nested = transposed.unsqueeze(0);
        let views = [w.unsqueeze(0), Ok(transposed), w.narrow(1, 1, 2), w.reshape((3, 2)), nested];
        views.map(Result::unwrap)
    };
    let start = Tensor::full(5e3_f32, (2, 3), &Device::Cpu).unwrap();
    for in_operator in [false, true] {
        let vars = VarMap::new();
        let [w, other] = [(); 2].map(|()| Var::from_tensor(&start).unwrap());
        vars.data().lock().unwrap().insert("w".to_owned(), w.clone());
        let (own, copy) = (views(&w), w.t().unwrap().contiguous().unwrap());
        let mut train = sgd(Trainer::builder(&vars).group(alone()));
        for _ in 0..2 {
            let expected = loss_of(&views(&other), false).unwrap();
            let gradient = expected.backward().unwrap().remove(&other).unwrap();
            let found = train.step(|| loss_of(&own, in_operator)).unwrap().loss;
            let [found, expected] = [found, expected].map(|x| x.to_scalar::<f32>().unwrap());
            assert_eq!(found, expected);
            other.set(&(other.as_tensor() - gradient).unwrap()).unwrap();
            let [found, expected] = [&w, &other].map(|x| x.to_vec2::<f32>().unwrap());
            assert_eq!(found, expected);
        }
        let copied = train
            .step(|| loss_of(std::slice::from_ref(&copy), in_operator))
            .unwrap_err()
            .to_string();
        assert!(copied.contains("detach"), "{copied}");
    }
}
