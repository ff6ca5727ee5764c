//! Gradients compared with differences of the loss: wrong ones are named on request, and cause a
//! warning in a run's first step; correct networks pass, and no state is changed.

#![expect(clippy::disallowed_methods, reason = "tests candle's wrong operators")]

mod nets;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use collective::ProcessGroup;
use fused_optim::{DType, Slice, SliceMut};
use parking_lot::Mutex;
use runner::Result;
use runner::config::Config;
use runner::data::{Array, ArrayData, Batch};
use runner::engine::candle::candle_core::{self, Tensor};
use runner::engine::candle::candle_nn::{self, VarBuilder};
use runner::engine::candle::{
    CandleEngine, CandleModel, CandleOptions, Loss, Outputs, TensorBatch,
};
use runner::engine::{
    CompileOptions, Engine, EngineState, GradSink, Model, SharedSink, StepContext,
};
use runner::model::MODELS;
use runner::zoo::{
    Gpt, GptOptions, Mlp, MlpOptions, ResNet, ResNetOptions, Transformer, TransformerOptions,
};

use nets::Net;

use crate::common::from_config;

/// Stores all gradients in order of arrival.
#[derive(Default)]
struct Keep(Vec<(usize, Vec<f32>)>);

impl GradSink for Keep {
    fn ready(&mut self, index: usize, grad: Slice<'_>) -> train_step::Result<()> {
        let grad = match grad {
            Slice::F32(grad) => grad.to_vec(),
            Slice::F16(grad) => grad.iter().map(|v| v.to_f32()).collect(),
            Slice::Bf16(grad) => grad.iter().map(|v| v.to_f32()).collect(),
        };
        self.0.push((index, grad));
        Ok(())
    }
}

fn engine(net: &Net, options: CandleOptions) -> CandleEngine {
    CandleEngine::new(options, |vb| net.build(vb)).unwrap()
}

fn in_f64(is_f64: bool) -> CandleOptions {
    CandleOptions { is_f64, ..CandleOptions::default() }
}

/// Returns the warning of a step.
fn step(engine: &mut CandleEngine, batch: &Batch, scale: f32) -> Result<Option<String>> {
    lowered_step(engine, batch, scale, None)
}

fn lowered_step(
    engine: &mut CandleEngine,
    batch: &Batch,
    loss_scale: f32,
    autocast: Option<DType>,
) -> Result<Option<String>> {
    let sink: SharedSink = Arc::new(Mutex::new(Keep::default()));
    let mut state = EngineState::default();
    let mut cx = StepContext { loss_scale, autocast, ..StepContext::new(sink, &mut state) };
    engine.train_step(batch, &mut cx)?;
    Ok(cx.warning)
}

fn wrong(engine: &mut CandleEngine, batch: &Batch) -> Vec<String> {
    let wrong = engine.check_gradients(batch, &[]).unwrap();
    wrong.into_iter().map(|wrong| wrong.name).collect()
}

#[test]
fn each_wrong_operator_of_candle_is_found() {
    for (what, net, named) in nets::wrong() {
        let batch = net.batch();
        let found = engine(&net, in_f64(true)).check_gradients(&batch, &[]);
        let is_norm = what.contains("layer norm");
        assert_eq!(found.is_err(), is_norm, "{what}: candle's layer norm has no f64");
        // In f32 small errors cannot be distinguished from kinks.
        let in_f32 = wrong(&mut engine(&net, in_f64(false)), &batch);
        let is_named = |name: &String| named.contains(&name.as_str());
        assert!(!in_f32.is_empty() && in_f32.iter().all(is_named), "{what}: {in_f32:?}");
        let found = found.map_or(in_f32, |found| found.into_iter().map(|of| of.name).collect());
        assert_eq!(found, named, "{what}");
        let warning = step(&mut engine(&net, CandleOptions::default()), &batch, 1024.0).unwrap();
        let warning = warning.unwrap_or_else(|| panic!("no warning of {what}"));
        assert!(warning.contains("`runner check CONFIG --gradients`"), "{warning}");
    }
}

#[test]
fn random_correct_networks_pass() {
    for seed in 0..200 {
        let net = nets::random(seed);
        let (batch, what) = (net.batch(), net.what());
        let found = wrong(&mut engine(&net, in_f64(seed % 4 != 0)), &batch);
        assert!(found.is_empty(), "{seed}: {found:?} of {what}");
        let mut of_f32 = engine(&net, CandleOptions::default());
        assert_eq!(step(&mut of_f32, &batch, 1024.0).unwrap(), None, "{seed}: {what}");
        for dtype in [DType::F16, DType::Bf16] {
            let mut lowered = engine(&net, CandleOptions::default());
            // Some of candle's operators do not support half types.
            let warning =
                lowered_step(&mut lowered, &batch, 128.0, Some(dtype)).unwrap_or_default();
            assert_eq!(warning, None, "{seed}, {dtype:?}: {what}");
        }
    }
}

/// A batch of images with labels.
fn images(shape: &[usize], classes: i64) -> Batch {
    let pixel = |i: usize| if i.is_multiple_of(3) { 0 } else { (i * 37 % 251) as u8 };
    let pixels = (0..shape.iter().product()).map(pixel).collect();
    let labels = (0..shape[0] as i64).map(|i| i % classes).collect();
    Batch::new()
        .with("inputs", Array::new(shape.to_vec(), ArrayData::U8(pixels)).unwrap())
        .with("labels", Array::new([shape[0]], ArrayData::I64(labels)).unwrap())
}

#[test]
fn models_of_the_zoo_pass() {
    fn check<M: CandleModel + 'static>(
        batch: &Batch,
        build: impl Fn(VarBuilder<'static>) -> candle_core::Result<M>,
    ) {
        for is_f64 in [true, false] {
            let mut engine = CandleEngine::new(in_f64(is_f64), &build).unwrap();
            assert_eq!(wrong(&mut engine, batch), [""; 0], "f64: {is_f64}");
        }
        for dtype in [None, Some(DType::F16), Some(DType::Bf16)] {
            let mut engine = CandleEngine::new(CandleOptions::default(), &build).unwrap();
            let warning = lowered_step(&mut engine, batch, 1024.0, dtype).unwrap();
            assert_eq!(warning, None, "{dtype:?}");
        }
    }
    let small = images(&[8, 1, 8, 8], 10);
    let mlp = MlpOptions { in_features: 64, ..MlpOptions::default() };
    check(&small, |vb| Mlp::new(&mlp, vb));
    let stem = ResNetOptions {
        width: 4,
        blocks: vec![1, 1],
        stem_kernel: 7,
        stem_stride: 2,
        stem_max_pool: true,
        ..ResNetOptions::default()
    };
    check(&images(&[8, 1, 16, 16], 10), |vb| ResNet::new(&stem, vb));
    let bottlenecks = ResNetOptions { bottleneck: true, ..stem };
    check(&images(&[8, 1, 16, 16], 10), |vb| ResNet::new(&bottlenecks, vb));
    check(&small, |vb| ResNet::new(&ResNetOptions { width: 4, ..Default::default() }, vb));
    let transformer = TransformerOptions {
        image_size: 8,
        width: 16,
        heads: 2,
        layers: 2,
        ..TransformerOptions::default()
    };
    check(&small, |vb| Transformer::new(&transformer, vb));
    let gpt = GptOptions { vocab_size: 20, context: 6, width: 16, heads: 2, layers: 2 };
    let tokens = |step: i64| {
        let tokens = (0..24).map(|i| (i * step) % 20).collect();
        Array::new([4, 6], ArrayData::I64(tokens)).unwrap()
    };
    let text = Batch::new().with("inputs", tokens(7)).with("labels", tokens(11));
    check(&text, |vb| Gpt::new(&gpt, vb));
}

/// Position embeddings are added to every image of a batch: candle sums their gradient in their own
/// type.
#[test]
fn gradients_of_a_half_transformer_match_f32() {
    let options = TransformerOptions {
        image_size: 8,
        width: 16,
        heads: 2,
        layers: 1,
        ..TransformerOptions::default()
    };
    let gradients = |dtype| {
        let options_of = CandleOptions { dtype, check_gradients: false, ..Default::default() };
        let build = |vb: VarBuilder<'static>| Transformer::new(&options, vb);
        let mut engine = CandleEngine::new(options_of, build).unwrap();
        let keep = Arc::new(Mutex::new(Keep::default()));
        let sink: SharedSink = keep.clone();
        let mut state = EngineState::default();
        let mut cx = StepContext::new(sink, &mut state);
        engine.train_step(&images(&[512, 1, 8, 8], 10), &mut cx).unwrap();
        let mut gradients = std::mem::take(&mut keep.lock().0);
        gradients.sort_by_key(|(index, _)| *index);
        let names = engine.params().to_vec().into_iter().map(|spec| spec.name);
        names.zip(gradients.into_iter().map(|(_, gradient)| gradient)).collect::<Vec<_>>()
    };
    let norm = |values: &mut dyn Iterator<Item = f32>| values.map(|v| v * v).sum::<f32>().sqrt();
    for dtype in [DType::Bf16, DType::F16] {
        for ((name, half), (_, wide)) in gradients(dtype).iter().zip(gradients(DType::F32)) {
            let off = norm(&mut half.iter().zip(&wide).map(|(a, b)| a - b));
            let share = off / norm(&mut wide.iter().copied());
            assert!(share < 0.015, "{name} in {dtype:?}: {share}");
        }
    }
}

/// Parameters and buffers, which with the engine's state are everything that a step may change.
fn tensors(engine: &mut CandleEngine) -> Vec<Vec<u32>> {
    let mut tensors = Vec::new();
    let mut read = |slices: &mut [SliceMut<'_>]| {
        for slice in slices {
            let SliceMut::F32(values) = slice else { panic!("f32") };
            tensors.push(values.iter().map(|v| v.to_bits()).collect());
        }
        Ok(())
    };
    engine.with_params(&mut read).unwrap();
    engine.with_buffers(&mut read).unwrap();
    tensors
}

/// Convolutions with norms and dropout, whose statistics and random numbers could be changed, and a
/// wrong pool.
#[test]
fn comparison_changes_no_bit_of_a_run() {
    let run = |net: &Net, check_gradients, checks_first| {
        let mut engine = engine(net, CandleOptions { check_gradients, ..Default::default() });
        if checks_first {
            let before = tensors(&mut engine);
            let wrong = engine.check_gradients(&net.batch(), &[]).unwrap();
            assert_eq!(wrong.is_empty(), net.what().contains("right"));
            assert_eq!(tensors(&mut engine), before);
        }
        let (mut seen, mut state) = (Vec::new(), EngineState::default());
        for _ in 0..3 {
            let keep = Arc::new(Mutex::new(Keep::default()));
            let sink: SharedSink = keep.clone();
            let mut cx = StepContext::new(sink, &mut state);
            let losses = engine.train_step(&net.batch(), &mut cx).unwrap();
            let gradients = std::mem::take(&mut keep.lock().0);
            let losses = losses.scalars().unwrap().to_vec();
            seen.push((losses, gradients, (tensors(&mut engine), state.clone())));
        }
        seen
    };
    for net in [nets::with_state(true), nets::with_state(false)] {
        let plain = run(&net, false, false);
        assert!(plain[0].2 != plain[1].2, "no state changes in a step");
        assert!(run(&net, true, false) == plain);
        assert!(run(&net, true, true) == plain);
    }
}

#[test]
fn comparison_does_not_autotune() {
    let findings = |check_gradients| {
        let net = nets::with_state(true);
        let mut engine = engine(&net, CandleOptions { check_gradients, ..Default::default() });
        engine.compile(&CompileOptions::default()).unwrap();
        let sink: SharedSink = Arc::new(Mutex::new(Keep::default()));
        let mut state = EngineState::default();
        engine.train_step(&net.batch(), &mut StepContext::new(sink, &mut state)).unwrap();
        let found: serde_json::Map<_, _> = serde_json::from_str(&state.autotune_cache).unwrap();
        found.keys().cloned().collect::<Vec<_>>()
    };
    assert_eq!(findings(true), findings(false));
}

/// Counts its forward passes.
struct Counting<M>(M, Arc<AtomicUsize>);

impl<M: CandleModel> CandleModel for Counting<M> {
    fn loss(&self, batch: &TensorBatch) -> candle_core::Result<Loss> {
        self.1.fetch_add(1, Ordering::Relaxed);
        self.0.loss(batch)
    }

    fn predict(&self, batch: &TensorBatch) -> candle_core::Result<Outputs> {
        self.0.predict(batch)
    }
}

#[test]
fn first_step_runs_two_more_forward_passes() {
    for (what, net) in [("wrong", nets::with_state(false)), ("right", nets::with_state(true))] {
        for check_gradients in [true, false] {
            let count = Arc::new(AtomicUsize::new(0));
            let options = CandleOptions { check_gradients, ..Default::default() };
            let build = |vb| Ok(Counting(net.build(vb)?, Arc::clone(&count)));
            let mut engine = CandleEngine::new(options, build).unwrap();
            let mut passes = |batch| {
                let warning = step(&mut engine, &batch, 1.0).unwrap();
                (count.swap(0, Ordering::Relaxed), warning.is_some())
            };
            let is_due = check_gradients;
            // A step with non-finite gradients is not compared; the next one is.
            let nan = Array::new([2, 3, 4, 4], ArrayData::F32(vec![f32::NAN; 96])).unwrap();
            assert_eq!(passes(Batch::new().with("x", nan)), (1, false), "{what}");
            let both = (1 + 2 * usize::from(is_due), is_due && what == "wrong");
            assert_eq!(passes(net.batch()), both, "{what}");
            assert_eq!(passes(net.batch()), (1, false), "{what}");
        }
    }
}

#[test]
fn ignored_parameters_are_skipped_and_unknown_ones_refused() {
    let (_, net, named) = nets::wrong().remove(0);
    let mut engine = engine(&net, in_f64(true));
    assert_eq!(named, ["0.weight", "0.bias"]);
    let check = |engine: &mut CandleEngine, ignore: &str| {
        let wrong = engine.check_gradients(&net.batch(), &[ignore.to_owned()]);
        wrong.map(|wrong| wrong.iter().map(ToString::to_string).collect::<Vec<_>>())
    };
    let rest = check(&mut engine, "0.weight").unwrap();
    assert_eq!(rest.len(), 1);
    assert!(
        rest[0].starts_with("the gradient of `0.bias` is wrong: the slope of the loss along a"),
        "{}",
        rest[0]
    );
    let error = check(&mut engine, "0.wieght").unwrap_err().to_string();
    assert!(error.contains("unknown parameter `0.wieght`; did you mean `0.weight`?"), "{error}");
}

/// Trains an MLP on digits with `middle` between its layers. Returns the result, and the log.
fn run(
    name: &'static str,
    middle: fn(&Tensor) -> candle_core::Result<Tensor>,
) -> (Result<()>, String) {
    MODELS
        .register(name, move |_| Ok(CandleEngine::factory(move |vb| nets::Digits::new(vb, middle))))
        .unwrap();
    let config = format!(
        "model = {{ type = '{name}' }}\n\
         randomness = {{ seed = 0 }}\n\
         train_dataloader = {{ batch_size = 64, dataset = {{ type = 'Digits' }} }}\n\
         train_cfg = {{ type = 'IterBasedTrainLoop', max_iters = 3 }}\n\
         optim_wrapper = {{ type = 'OptimWrapper', optimizer = {{ type = 'SGD', lr = 0.05 }} }}\n"
    );
    let dir = tempfile::tempdir().unwrap();
    let group = ProcessGroup::threads(1, Duration::from_secs(60)).unwrap().remove(0);
    let builder = from_config(Config::from_text("c.toml", config).unwrap()).unwrap();
    let run = builder.work_dir(dir.path()).process_group(group).build().unwrap().train().map(drop);
    (run, log(dir.path()))
}

/// Log of the only run in a work directory.
fn log(dir: &Path) -> String {
    let of_run = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    let of_run =
        of_run.filter(|path| path.is_dir()).flat_map(|path| std::fs::read_dir(path).unwrap());
    let mut logs = of_run.map(|entry| entry.unwrap().path());
    let log = logs.find(|path| path.extension().is_some_and(|extension| extension == "log"));
    std::fs::read_to_string(log.unwrap()).unwrap()
}

#[test]
fn run_warns_once_and_continues() {
    let (outcome, log) = run("WrongDigits", |x| {
        x.reshape(((), 1, 4, 4))?.max_pool2d(2)?.flatten_from(1)?.repeat((1, 4))
    });
    outcome.unwrap();
    assert_eq!(log.matches("gradients do not match the loss").count(), 1, "{log}");
    let (outcome, log) = run("RightDigits", Tensor::relu);
    outcome.unwrap();
    assert!(!log.contains("gradients do not match"), "{log}");
}

#[test]
fn parameter_without_gradient_ends_the_run_by_name() {
    let (outcome, _) = run("CutDigits", candle_nn::ops::softmax_last_dim);
    let runner::Error::Collective(collective::Error::UnusedParameters { names, .. }) =
        outcome.unwrap_err()
    else {
        panic!("another error");
    };
    assert_eq!(names, ["hidden.weight", "hidden.bias"]);
}
