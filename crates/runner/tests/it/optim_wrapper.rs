//! Accumulation and clipping compared step by step with MMEngine; optimizers for parts of a model.

use std::path::Path;
use std::time::Duration;

use collective::{ProcessGroup, reducer::ReducerOptions};
use fused_optim::{
    Adam, AdamHyper, Applied, Clip, DType, FoundInf, Optimizer, ParamGroup, ParamMut, ParamSpec,
    Sgd, SgdHyper, Slice, SliceMut, StateDict, StepCtl,
};
use runner::Result;
use runner::checkpoint;
use runner::config::Config;
use runner::data::{Array, Batch, BoxError, Dataset, Sample, SampleRng};
use runner::engine::{Engine, EngineState, Losses, Model, StepContext, TensorSpec};
use runner::model::DistributedDataParallel;
use runner::optim_wrapper::{
    Member, OPTIM_WRAPPERS, OptimWrapper, OptimWrapperFactory, OptimizerDict, update_params,
};
use runner::placement::Placement;
use runner::{DataLoaderConfig, RunnerBuilder, TrainConfig};
use serde_json::Value;

/// One weight `w` of three numbers; the loss of the `i`-th batch is `0.01 * (w . x - 1)^2` with
/// `x = [i + 1, (7 i mod 5) - 2, 0.1 i]`.
struct Quadratic {
    specs: Vec<TensorSpec>,
    w: Vec<f32>,
    batch: usize,
}

impl Quadratic {
    fn new(w: Vec<f32>) -> Self {
        let spec = TensorSpec { name: "w".to_owned(), shape: vec![w.len()], dtype: DType::F32 };
        Self { specs: vec![spec], w, batch: 0 }
    }
}

impl Model for Quadratic {
    fn params(&self) -> &[TensorSpec] {
        &self.specs
    }

    fn buffers(&self) -> &[TensorSpec] {
        &[]
    }

    fn with_params(&mut self, visit: &mut train_step::Visit<'_>) -> train_step::Result<()> {
        visit(&mut [SliceMut::F32(&mut self.w)])
    }

    fn with_buffers(&mut self, visit: &mut train_step::Visit<'_>) -> train_step::Result<()> {
        visit(&mut [])
    }
}

impl Engine for Quadratic {
    fn train_step(&mut self, _: &Batch, cx: &mut StepContext<'_>) -> Result<Losses> {
        let i = self.batch;
        self.batch += 1;
        let x = [i as f64 + 1.0, ((7 * i) % 5) as f64 - 2.0, 0.1 * i as f64];
        let off = self.w.iter().zip(x).map(|(w, x)| f64::from(*w) * x).sum::<f64>() - 1.0;
        let gradient = x.map(|x| (0.02 * off * x * f64::from(cx.loss_scale)) as f32);
        cx.sink.lock().ready(0, Slice::F32(&gradient))?;
        Ok(Losses::new(vec![("loss".to_owned(), 0.01 * off * off)]))
    }

    fn eval(&mut self, _: &Batch) -> Result<Vec<(String, Array)>> {
        Ok(Vec::new())
    }
}

fn ddp(engine: &dyn Engine) -> DistributedDataParallel {
    let group = ProcessGroup::threads(1, Duration::from_secs(60)).unwrap().remove(0);
    DistributedDataParallel::new(group, engine.params(), ReducerOptions::default()).unwrap()
}

/// Compares the weights after every batch, with and without gradient clipping.
#[test]
fn steps_match_mmengine() {
    let text = include_str!("../vectors/accumulation.json");
    let cases: Value = serde_json::from_str(text).unwrap();
    for case in cases.as_array().unwrap() {
        let numbers = |v: &Value| -> Vec<f64> { serde_json::from_value(v.clone()).unwrap() };
        let clip = match &case["clip_grad"] {
            Value::Null => String::new(),
            clip if clip["type"] == "value" => {
                format!("clip_grad = {{ type = 'value', clip_value = {} }}", clip["clip_value"])
            }
            clip => format!("clip_grad = {{ max_norm = {} }}", clip["max_norm"]),
        };
        let config = format!(
            "type = 'OptimWrapper'\naccumulative_counts = {}\n{clip}\n\
             optimizer = {{ type = 'SGD', lr = {}, momentum = {} }}",
            case["accumulative_counts"], case["lr"], case["momentum"]
        );
        let section = Config::from_text("c.toml", config).unwrap().into_section();
        let w0 = numbers(&case["w0"]).iter().map(|w| *w as f32).collect();
        let mut engine = Quadratic::new(w0);
        let mut model = ddp(&engine);
        let build = OPTIM_WRAPPERS.build(section).unwrap().build;
        let mut optim = build(engine.params(), &Placement::host()).unwrap();
        let max = case["max_counts"].as_u64().unwrap() as usize;
        optim.accumulation().initialize_count_status(0, max);
        let mut state = EngineState::default();
        for (at, iter) in case["iters"].as_array().unwrap().iter().enumerate() {
            let batch = Batch::new();
            let update =
                update_params(&mut optim, (&mut engine, &mut model), &batch, &mut state).unwrap();
            assert_eq!(update.applied.is_some(), iter["should_sync"], "{case} {at}");
            // Recorded in f64, computed in f32: ten steps of rounding errors.
            for (got, wanted) in engine.w.iter().zip(numbers(&iter["w"])) {
                assert!((f64::from(*got) - wanted).abs() < 3e-6, "{at}: {got} is not {wanted}");
            }
            let logged = optim.log_scalars().iter().any(|(name, _)| *name == "grad_norm");
            assert_eq!(logged, clip.contains("max_norm") && update.applied.is_some());
        }
    }
}

const FACTS: [f32; 4] = [1.0, -2.0, 0.5, 4.0];

/// Gradients of step `at` for two tensors of two elements.
fn gradients(at: usize) -> [[f32; 2]; 2] {
    let at = at as f32;
    [[at + 1.0, -at], [0.25 * at, 3.0]]
}

fn step(
    optimizer: &mut dyn Optimizer,
    weights: &mut [[f32; 2]; 2],
    gradients: &[[f32; 2]; 2],
    ctl: &StepCtl,
) -> Applied {
    let mut params: Vec<_> = weights
        .iter_mut()
        .zip(gradients)
        .map(|(w, g)| ParamMut::new(&mut w[..], Some(Slice::F32(g))))
        .collect();
    optimizer.step(&mut params, ctl).unwrap()
}

fn parts() -> (Box<dyn Optimizer>, Box<dyn Optimizer>) {
    let adam = Adam::new([ParamGroup::new(AdamHyper::default(), [1])]).unwrap();
    let hyper = SgdHyper { lr: 0.5, momentum: 0.9, ..SgdHyper::default() };
    (Box::new(adam), Box::new(Sgd::new([ParamGroup::new(hyper, [0])]).unwrap()))
}

fn dict() -> OptimizerDict {
    let (adam, sgd) = parts();
    OptimizerDict::new(vec![
        Member { name: "a".to_owned(), optimizer: adam, clip: None },
        Member { name: "b".to_owned(), optimizer: sgd, clip: Some(Clip::norm(0.5)) },
    ])
}

#[test]
fn optimizer_dict_steps_like_its_parts_and_resumes_bit_for_bit() {
    let start = [[FACTS[0], FACTS[1]], [FACTS[2], FACTS[3]]];
    let ctl = StepCtl { found_inf: FoundInf::Check, ..StepCtl::PLAIN };
    let (mut dict, (mut adam, mut sgd)) = (dict(), parts());
    let (mut whole, mut apart) = (start, start);
    for at in 0..3 {
        assert_eq!(step(&mut dict, &mut whole, &gradients(at), &ctl), Applied::Applied);
        let clipped = StepCtl { clip: Some(Clip::norm(0.5)), ..ctl };
        for (part, ctl) in [(&mut adam, &ctl), (&mut sgd, &clipped)] {
            assert_eq!(step(&mut **part, &mut apart, &gradients(at), ctl), Applied::Applied);
        }
        assert_eq!(whole, apart);
    }
    // An overflow in one part skips both.
    let mut overflow = gradients(3);
    overflow[1][0] = f32::INFINITY;
    assert_eq!(step(&mut dict, &mut whole, &overflow, &ctl), Applied::SkippedNonFinite);
    assert_eq!(whole, apart);

    let bytes = dict.state_dict().unwrap().to_safetensors().unwrap();
    let saved = StateDict::from_safetensors(&bytes).unwrap();
    let mut resumed = self::dict();
    resumed.set_lr(0, 0.125).unwrap();
    resumed.load_state_dict(&saved).unwrap();
    assert_eq!(resumed.state_dict().unwrap(), dict.state_dict().unwrap());
    let mut other = whole;
    assert_eq!(step(&mut dict, &mut whole, &gradients(4), &ctl), Applied::Applied);
    assert_eq!(step(&mut resumed, &mut other, &gradients(4), &ctl), Applied::Applied);
    assert_eq!(whole, other);
}

#[test]
fn optimizer_dict_refuses_a_foreign_state_and_is_unchanged() {
    let mut saved = dict().state_dict().unwrap();
    let mut target = dict();
    target.set_lr(0, 0.125).unwrap();
    let before = target.state_dict().unwrap();
    // The second part's state does not match; at that point the first has been loaded.
    saved.param_groups = saved.param_groups.replace("\"nesterov\":false", "\"nesterov\":true");
    saved.param_groups = saved.param_groups.replace("\"momentum\":0.9", "\"momentum\":0.0");
    assert!(target.load_state_dict(&saved).is_err());
    assert_eq!(target.state_dict().unwrap(), before);

    saved = dict().state_dict().unwrap();
    saved.param_groups = saved.param_groups.replace("\"name\":\"b\"", "\"name\":\"c\"");
    let error = target.load_state_dict(&saved).unwrap_err().to_string();
    assert!(error.contains("the state has the parts a, c, this run has a, b"), "{error}");
    let sgd = parts().1.state_dict().unwrap();
    assert!(target.load_state_dict(&sgd).is_err());
    assert_eq!(target.state_dict().unwrap(), before);
    assert!(OptimWrapper::new(Box::new(target), 1).loss_scale() == 1.0);
}

/// The order of the model's parameters differs between processes.
#[test]
fn optimizer_dict_resumes_by_parameter_name() {
    let dict = |names: [&str; 2]| {
        let at = |prefix| [names.iter().position(|name| name.starts_with(prefix)).unwrap()];
        let adam = Adam::new([ParamGroup::new(AdamHyper::default(), at("a."))]).unwrap();
        let hyper = SgdHyper { lr: 0.5, momentum: 0.9, ..SgdHyper::default() };
        let sgd = Sgd::new([ParamGroup::new(hyper, at("b."))]).unwrap();
        let member =
            |name: &str, optimizer| Member { name: name.to_owned(), optimizer, clip: None };
        let mut dict =
            OptimizerDict::new(vec![member("a", Box::new(adam)), member("b", Box::new(sgd))]);
        dict.set_param_names(&names.map(|name| ParamSpec::new(name, &[2]))).unwrap();
        dict
    };
    let ctl = StepCtl::PLAIN;
    let (mut one, mut weights) = (dict(["b.w", "a.w"]), [[1.0, -2.0], [0.5, 4.0]]);
    assert_eq!(step(&mut one, &mut weights, &gradients(0), &ctl), Applied::Applied);
    let bytes = one.state_dict().unwrap().to_safetensors().unwrap();
    let saved = StateDict::from_safetensors(&bytes).unwrap();
    let (mut other, mut turned) = (dict(["a.w", "b.w"]), [weights[1], weights[0]]);
    other.load_state_dict(&saved).unwrap();
    let [b, a] = gradients(1);
    assert_eq!(step(&mut one, &mut weights, &[b, a], &ctl), Applied::Applied);
    assert_eq!(step(&mut other, &mut turned, &[a, b], &ctl), Applied::Applied);
    assert_eq!(weights, [turned[1], turned[0]]);

    let before = other.state_dict().unwrap();
    let mut wrong = saved.clone();
    wrong.params.get_mut(&0).unwrap().name = "b.v".to_owned();
    let error = other.load_state_dict(&wrong).unwrap_err().to_string();
    assert_eq!(error, "state dict, b.w: missing");
    wrong = saved;
    wrong.state.insert(2, wrong.state[&0].clone());
    let error = other.load_state_dict(&wrong).unwrap_err().to_string();
    assert_eq!(error, "state dict, state.2: unknown");
    assert_eq!(other.state_dict().unwrap(), before);
}

/// Parameters of equal size, in a process-specific order, with gradients that depend on the name.
struct Unordered {
    specs: Vec<TensorSpec>,
    values: Vec<[f32; 2]>,
}

impl Unordered {
    fn new(names: &[&str]) -> Self {
        let spec = |name: &&str| TensorSpec {
            name: (*name).to_owned(),
            shape: vec![2],
            dtype: DType::F32,
        };
        Self { specs: names.iter().map(spec).collect(), values: vec![[1.0, -1.0]; names.len()] }
    }
}

impl Model for Unordered {
    fn params(&self) -> &[TensorSpec] {
        &self.specs
    }

    fn buffers(&self) -> &[TensorSpec] {
        &[]
    }

    fn with_params(&mut self, visit: &mut train_step::Visit<'_>) -> train_step::Result<()> {
        visit(&mut self.values.iter_mut().map(|v| SliceMut::F32(v)).collect::<Vec<_>>())
    }

    fn with_buffers(&mut self, visit: &mut train_step::Visit<'_>) -> train_step::Result<()> {
        visit(&mut [])
    }
}

impl Engine for Unordered {
    fn train_step(&mut self, _: &Batch, cx: &mut StepContext<'_>) -> Result<Losses> {
        for (index, (spec, values)) in self.specs.iter().zip(&self.values).enumerate() {
            let own = f32::from(spec.name.as_bytes()[0]) / 100.0;
            let gradient = values.map(|value| (0.25 * value + own) * cx.loss_scale);
            cx.sink.lock().ready(index, Slice::F32(&gradient))?;
        }
        Ok(Losses::new(vec![("loss".to_owned(), 1.0)]))
    }

    fn eval(&mut self, _: &Batch) -> Result<Vec<(String, Array)>> {
        Ok(Vec::new())
    }
}

struct Four;

impl Dataset for Four {
    fn name(&self) -> &'static str {
        "four"
    }

    fn len(&self) -> usize {
        4
    }

    fn sample(&self, _: usize, _: &mut SampleRng) -> Result<Sample, BoxError> {
        Ok(Sample::new().with("inputs", Array::scalar(0_u8)))
    }
}

/// Trains a model with parameters in this order up to an epoch.
fn train(dir: &Path, names: &'static [&'static str], epochs: usize) -> Result<()> {
    let sgd = |count| {
        let hyper = SgdHyper { lr: 0.125, momentum: 0.9, ..SgdHyper::default() };
        Sgd::with_one_group(hyper, count)
    };
    let group = ProcessGroup::threads(1, Duration::from_secs(60)).unwrap().remove(0);
    let builder = RunnerBuilder::default()
        .model(Box::new(|_| Ok(Box::new(Unordered::new(names)))))
        .optim_wrapper(OptimWrapperFactory::fp32(sgd))
        .train_dataloader(DataLoaderConfig::new(Four, 1))
        .train_cfg(TrainConfig::new(epochs))
        .work_dir(dir)
        .process_group(group)
        .seed(1)
        .default_hooks()
        .resume(true);
    builder.build()?.train()?;
    Ok(())
}

#[test]
fn gradient_norms_of_clipped_parts_are_logged() {
    let text = "type = 'OptimWrapperDict'
        a = { optimizer = { type = 'SGD', lr = 0.5 }, clip_grad = { max_norm = 10 } }
        b = { optimizer = { type = 'SGD', lr = 0.5 }, CLIP }
        c = { optimizer = { type = 'SGD', lr = 0.5 } }";
    let own = |name: &str, value: f32| 0.25 * value + f32::from(name.as_bytes()[0]) / 100.0;
    for (clip, parts) in [
        ("clip_grad = { type = 'value', clip_value = 1 }", &["a"][..]),
        ("clip_grad = { max_norm = 1 }", &["a", "b"]),
    ] {
        let section =
            Config::from_text("c.toml", text.replace("CLIP", clip)).unwrap().into_section();
        let mut engine = Unordered::new(&["a.w", "b.w", "c.w"]);
        let mut model = ddp(&engine);
        let build = OPTIM_WRAPPERS.build(section).unwrap().build;
        let mut optim = build(engine.params(), &Placement::host()).unwrap();
        let squares = parts.iter().flat_map(|part| [1.0, -1.0].map(|x| own(part, x).powi(2)));
        let norm = squares.sum::<f32>().sqrt();
        let mut state = EngineState::default();
        update_params(&mut optim, (&mut engine, &mut model), &Batch::new(), &mut state).unwrap();
        let logged = optim.log_scalars();
        let [("grad_norm", logged)] = logged[..] else { panic!("{logged:?}") };
        assert!((logged - f64::from(norm)).abs() < 1e-5, "{logged} is not {norm}");
    }
}

#[test]
fn run_resumes_with_another_order_of_parameters() {
    let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let [undisturbed, resumed] = folders.each_ref().map(tempfile::TempDir::path);
    train(undisturbed, &["u", "v", "w"], 3).unwrap();
    train(resumed, &["u", "v", "w"], 2).unwrap();
    train(resumed, &["w", "u", "v"], 3).unwrap();
    let weights = |dir: &Path| {
        let mut engine = Unordered::new(&["u", "v", "w"]);
        checkpoint::load(&dir.join("epoch_3")).unwrap().load_model(&mut engine).unwrap();
        engine.values
    };
    assert_eq!(weights(undisturbed), weights(resumed));
}
