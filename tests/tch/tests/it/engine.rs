//! The engine's contract with `runner`: gradients arrive during backward, an error of the sink ends
//! it, and whole runs work.

use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use collective::ProcessGroup;
use parking_lot::Mutex;
use runner::config::Config;
use runner::data::{Array, Batch};
use runner::engine::{Engine, EngineState, GradSink, Model, SharedSink, StepContext};
use runner::model::{MODELS, ModelContext, ModelFactory};
use runner::{Error, Result, RunnerBuilder};
use tch::nn::{self, Module};
use tch::{Kind, Tensor};
use tch_engine::{TchEngine, TchModel, field};
use train_step::fused_optim::{DType, Slice, SliceMut};

use crate::nets::Net;

/// An engine on one thread: several would add in an order of their own.
#[expect(unsafe_code, reason = "the engine's constructor")]
pub fn engine<M: TchModel>(build: impl FnOnce(&nn::Path<'_>) -> M) -> Result<TchEngine<M>> {
    tch::set_num_threads(1);
    let cx = ModelContext::new(DType::F32, 0);
    // SAFETY: the models here keep their variables to themselves, and each variable is made anew.
    unsafe { TchEngine::new(&cx, build) }
}

/// Layers one after the other, and what backward has come to when a gradient arrives.
struct Chain(Vec<nn::Linear>);

impl TchModel for Chain {
    fn loss(&self, batch: &Batch) -> Result<Tensor> {
        let x = field(batch, "inputs")?;
        Ok(self.0.iter().fold(x, |x, layer| layer.forward(&x).tanh()).sum(Kind::Float))
    }

    fn predict(&self, batch: &Batch) -> Result<Vec<(String, Tensor)>> {
        let kinds = [Kind::Float, Kind::Double, Kind::Uint8].map(|kind| {
            let x = self.0.iter().fold(field(batch, "inputs")?, |x, layer| layer.forward(&x));
            assert!(!x.requires_grad(), "an evaluation keeps no graph");
            Ok((format!("{kind:?}"), x.relu().to_kind(kind).transpose(0, 1).transpose(0, 1)))
        });
        kinds.into_iter().collect()
    }
}

fn chain() -> TchEngine<Chain> {
    engine(|vs| Chain((0..4_i64).map(|i| nn::linear(vs / i, 4, 4, Default::default())).collect()))
        .unwrap()
}

fn inputs() -> Batch {
    let values = (0..12).map(|i| i as f32 / 12.0).collect::<Vec<_>>();
    Batch::new().with("inputs", Array::new([3, 4], values).unwrap())
}

/// Notes what comes, in order, and does as told to one of them.
struct Note {
    come: Gradients,
    at: usize,
    act: fn() -> Result<()>,
}

type Gradients = Vec<(usize, Vec<f32>)>;

impl GradSink for Note {
    fn ready(&mut self, index: usize, grad: Slice<'_>) -> train_step::Result<()> {
        let Slice::F32(values) = grad else { panic!("gradients are f32") };
        self.come.push((index, values.to_vec()));
        if index == self.at {
            (self.act)()?;
        }
        Ok(())
    }
}

fn pass(engine: &mut dyn Engine, at: usize, act: fn() -> Result<()>) -> (Result<f64>, Gradients) {
    let note = Arc::new(Mutex::new(Note { come: Vec::new(), at, act }));
    let sink: SharedSink = note.clone();
    let mut state = EngineState::default();
    let losses = engine.train_step(&inputs(), &mut StepContext::new(sink, &mut state));
    let come = note.lock().come.clone();
    (losses.map(|losses| losses.scalars().unwrap()[0].1), come)
}

#[test]
fn gradients_come_during_backward_and_a_refused_one_ends_it() {
    let mut engine = chain();
    let names: Vec<_> = engine.params().iter().map(|p| p.name.as_str()).collect();
    assert_eq!(names[..3], ["0.bias", "0.weight", "1.bias"]);
    let (loss, come) = pass(&mut engine, 99, || Ok(()));
    let loss = loss.unwrap();
    let layers: Vec<_> = come.iter().map(|(index, _)| index / 2).collect();
    assert_eq!(layers, [3, 3, 2, 2, 1, 1, 0, 0], "the last layer first: {come:?}");

    let (refused, few) = pass(&mut engine, 4, || Err(Error::data("enough")));
    assert!(matches!(refused, Err(Error::Data { reason, .. }) if reason == "enough"), "unchanged");
    assert!(
        few.len() < come.len() && few.iter().any(|(index, _)| *index == 4),
        "backward stopped: {few:?}"
    );
    let (panicked, _) = pass(&mut engine, 4, || panic!("as the test wants"));
    assert!(matches!(panicked, Err(Error::Engine { .. })));

    assert_eq!(pass(&mut engine, 99, || Ok(())).0.unwrap(), loss, "and nothing is left of it");
    assert_eq!(pass(&mut engine, 99, || Ok(())).1, come);
}

#[test]
fn a_gradient_of_another_engines_is_not_this_ones_and_does_not_enter_its_own() {
    let mut clones = Vec::new();
    let mut other = engine(|vs| {
        let layer = nn::linear(vs, 4, 4, Default::default());
        let bs = layer.bs.as_ref().map(Tensor::shallow_clone);
        clones.push(nn::Linear { ws: layer.ws.shallow_clone(), bs });
        Chain(vec![layer])
    })
    .unwrap();
    let its_own = pass(&mut other, 99, || Ok(())).1;
    let mut one = engine(|vs| {
        clones.insert(0, nn::linear(vs, 4, 4, Default::default()));
        Chain(clones)
    })
    .unwrap();
    let come = pass(&mut one, 99, || Ok(())).1;
    assert_eq!(come.len(), 2, "of its first layer: {come:?}");
    assert_eq!(pass(&mut other, 99, || Ok(())).1, its_own);
}

#[test]
fn memory_is_lent_not_copied() {
    let mut engine = chain();
    let before = pass(&mut engine, 99, || Ok(())).0.unwrap();
    let zero = |slices: &mut [SliceMut<'_>]| {
        for slice in slices {
            let SliceMut::F32(values) = slice else { panic!("parameters are f32") };
            values.fill(0.0);
        }
        Ok(())
    };
    engine.with_params(&mut |slices| zero(slices)).unwrap();
    assert_ne!(before, 0.0);
    assert_eq!(pass(&mut engine, 99, || Ok(())).0.unwrap(), 0.0, "forward reads what was written");
}

#[test]
fn outputs_of_any_kind_and_layout_reach_the_host() {
    let outputs = chain().eval(&inputs()).unwrap();
    assert_eq!(outputs.len(), 3);
    assert_eq!(outputs[0].1, outputs[1].1);
    assert!(outputs.iter().all(|(_, array)| array.shape() == [3, 4]));
}

#[test]
fn what_does_not_fit_is_an_error_with_a_name() {
    let doubles = engine(|vs| {
        let double = Tensor::zeros([2], (Kind::Double, vs.device()));
        drop(vs.sub("deep").add("double", double, true));
        Chain(Vec::new())
    });
    let error = doubles.err().unwrap().to_string();
    assert!(error.contains("deep.double"), "{error}");
    let mut engine = chain();
    let error = engine.eval(&Batch::new()).unwrap_err().to_string();
    assert!(error.contains("no field `inputs`"), "{error}");
    assert!(!engine.supports_autocast(DType::F32));
    let mut empty = self::engine(|_| Chain(Vec::new())).unwrap();
    let error = pass(&mut empty, 0, || Ok(())).0.unwrap_err().to_string();
    assert!(error.contains("backward") && error.contains("grad"), "{error}");
}

const RUN: &str = r#"
model.type = "TchResNet"
train_dataloader = { batch_size = 64, dataset = { type = "Digits" } }
val_dataloader = { batch_size = 64, dataset = { type = "Digits", split = "test" } }
val_evaluator.type = "Accuracy"
randomness.seed = 3
[optim_wrapper]
type = "AmpOptimWrapper"
dtype = "float16"
loss_scale = { init_scale = 256.0, growth_interval = 5 }
optimizer = { type = "SGD", lr = 0.05, momentum = 0.9 }
"#;

/// Digits on two ranks, under autocast to f16 with a dynamic loss scale, by the runner.
fn run(dir: &Path, epochs: usize, resume: bool) -> Vec<(String, f64)> {
    let text = format!("train_cfg.max_epochs = {epochs}\n{RUN}");
    let rank = |group| {
        RunnerBuilder::from_config(Config::from_text("c.toml", &text)?)?
            .process_group(group)
            .work_dir(dir)
            .resume(resume)
            .build()?
            .train()
    };
    thread::scope(|scope| {
        let groups = ProcessGroup::threads(2, Duration::from_secs(60)).unwrap();
        let ranks: Vec<_> = groups.into_iter().map(|group| scope.spawn(|| rank(group))).collect();
        let mut figures = ranks.into_iter().map(|rank| rank.join().unwrap().unwrap());
        figures.next().unwrap()
    })
}

#[test]
fn the_runner_trains_it_and_goes_on_from_a_checkpoint_to_the_same_bits() {
    let factory =
        || -> ModelFactory { Box::new(|_| Ok(Box::new(engine(|vs| Net::ResNet.build(vs, 10))?))) };
    runner::zoo::register();
    MODELS.register("TchResNet", move |_| Ok(factory())).unwrap();
    let dirs = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let [whole, parts] = dirs.each_ref().map(tempfile::TempDir::path);
    let figures = run(whole, 2, false);
    run(parts, 1, false);
    assert_eq!(run(parts, 2, true), figures);
    let accuracy = figures.iter().find(|(name, _)| name.ends_with("accuracy")).unwrap().1;
    assert!(accuracy > 60.0, "{figures:?}");
    for file in ["model.safetensors", "optimizer.safetensors"] {
        let [a, b] = [whole, parts].map(|dir| std::fs::read(dir.join("epoch_2").join(file)));
        assert!(a.unwrap() == b.unwrap(), "{file}");
    }
}
