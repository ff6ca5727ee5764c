//! Weights and optimizer move between a loop of one's own on `candle-train` and `runner`.

use std::path::Path;
use std::time::Duration;

use candle_core::{DType, Device, Module, Tensor};
use candle_nn::{Linear, VarBuilder, VarMap, linear};
use candle_train::{AdamWHyper, Trainer};
use collective::ProcessGroup;
use collective::reducer::ReducerOptions;
use fused_optim::{AdamW, Optimizer, ParamSpec};
use runner::checkpoint::{self, Contents, Meta, model_tensors};
use runner::data::{Array, Batch};
use runner::engine::candle::{
    CandleEngine, CandleModel, CandleOptions, Loss, Outputs, TensorBatch,
};
use runner::engine::{EngineState, Model};
use runner::model::DistributedDataParallel;
use runner::optim_wrapper::{OptimWrapper, update_params};
use runner::train_step::optimizer_state;

const INPUTS: [[f32; 3]; 2] = [[1.0, -2.0, 0.5], [0.25, 1.5, -1.0]];

/// Two layers, whose names are not in their alphabetical order.
#[derive(Clone)]
struct Net(Linear, Linear);

impl Net {
    fn new(vb: &VarBuilder<'_>) -> candle_core::Result<Self> {
        Ok(Self(linear(3, 4, vb.pp("second"))?, linear(4, 1, vb.pp("first"))?))
    }

    fn mean_square(&self, inputs: &Tensor) -> candle_core::Result<Tensor> {
        self.1.forward(&self.0.forward(inputs)?.tanh()?)?.sqr()?.mean_all()
    }
}

impl CandleModel for Net {
    fn loss(&self, batch: &TensorBatch) -> candle_core::Result<Loss> {
        Ok(Loss::new(self.mean_square(batch.get("inputs")?)?))
    }

    fn predict(&self, _: &TensorBatch) -> candle_core::Result<Outputs> {
        Ok(Outputs::new())
    }
}

fn hyper() -> AdamWHyper {
    AdamWHyper { lr: 0.01, ..AdamWHyper::default() }
}

/// A loop of one's own.
struct Own {
    vars: VarMap,
    net: Net,
    train: Trainer,
}

impl Own {
    fn new() -> Self {
        let vars = VarMap::new();
        let net = Net::new(&VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu)).unwrap();
        let train = Trainer::builder(&vars).group(alone()).build(hyper()).unwrap();
        Self { vars, net, train }
    }

    fn step(&mut self) {
        let inputs = Tensor::new(&INPUTS, &Device::Cpu).unwrap();
        self.train.step(|| self.net.mean_square(&inputs)).unwrap();
    }

    fn weights(&self) -> Vec<(String, Vec<f32>)> {
        let vars = self.vars.data().lock().unwrap();
        let values = |var: &candle_core::Var| var.flatten_all().unwrap().to_vec1().unwrap();
        let mut all: Vec<_> = vars.iter().map(|(name, var)| (name.clone(), values(var))).collect();
        all.sort_by(|(a, _), (b, _)| a.cmp(b));
        all
    }
}

/// A model and an optimizer of `runner`.
struct Run {
    engine: CandleEngine,
    model: DistributedDataParallel,
    optim: OptimWrapper,
}

impl Run {
    fn new() -> Self {
        let engine = CandleEngine::new(CandleOptions::default(), |vb| Net::new(&vb)).unwrap();
        let options = ReducerOptions::default();
        let model = DistributedDataParallel::new(alone(), engine.params(), options).unwrap();
        let mut adamw = AdamW::with_one_group(hyper(), engine.params().len()).unwrap();
        let specs = engine.params().iter().map(|spec| ParamSpec::new(&*spec.name, &spec.shape));
        adamw.set_param_names(&specs.collect::<Vec<_>>()).unwrap();
        Self { engine, model, optim: OptimWrapper::new(Box::new(adamw), 1) }
    }

    fn step(&mut self) {
        let inputs = Array::new([2, 3], INPUTS.concat()).unwrap();
        let batch = Batch::new().with("inputs", inputs);
        let mut state = EngineState::default();
        let parts = (&mut self.engine, &mut self.model);
        update_params(&mut self.optim, (parts.0, parts.1), &batch, &mut state).unwrap();
    }

    fn weights(&mut self) -> Vec<(String, Vec<f32>)> {
        let (names, mut values) = (self.engine.params().to_vec(), Vec::new());
        let read = &mut |slices: &mut [fused_optim::SliceMut<'_>]| {
            values = slices.iter().map(|s| train_step::to_f32(s.as_slice()).into()).collect();
            Ok(())
        };
        self.engine.with_params(read).unwrap();
        let mut all: Vec<_> = names.into_iter().map(|spec| spec.name).zip(values).collect();
        all.sort_by(|(a, _), (b, _)| a.cmp(b));
        all
    }
}

fn alone() -> ProcessGroup {
    ProcessGroup::threads(1, Duration::from_secs(30)).unwrap().remove(0)
}

#[test]
fn runner_goes_on_with_weights_and_optimizer_of_a_candle_program() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("run.safetensors");
    let mut own = Own::new();
    (0..3).for_each(|_| own.step());
    own.train.save(&path, 1).unwrap();

    let mut run = Run::new();
    let weights = candle_core::safetensors::load(&path, &Device::Cpu).unwrap();
    let specs = run.engine.params().to_vec();
    let write = &mut |slices: &mut [fused_optim::SliceMut<'_>]| {
        for (slice, spec) in slices.iter_mut().zip(&specs) {
            let values = weights[&spec.name].flatten_all().unwrap().to_vec1::<f32>().unwrap();
            train_step::round_into(slice, &values);
        }
        Ok(())
    };
    run.engine.with_params(write).unwrap();
    run.optim.optimizer_mut().load_state_dict(&optimizer_state(&path).unwrap()).unwrap();
    assert_eq!(run.weights(), own.weights());
    for _ in 0..2 {
        own.step();
        run.step();
        assert_eq!(run.weights(), own.weights());
    }
}

#[test]
fn candle_program_goes_on_with_weights_and_optimizer_of_runner() {
    let directory = tempfile::tempdir().unwrap();
    let mut run = Run::new();
    (0..3).for_each(|_| run.step());
    let contents = Contents {
        meta: Meta::default(),
        model: model_tensors(&mut run.engine).unwrap(),
        ..Contents::default()
    };
    let saved = checkpoint::save(directory.path(), "iter_3", contents, Some(&run.optim)).unwrap();

    let mut own = Own::new();
    own.vars.load(saved.join("model.safetensors")).unwrap();
    let dict = optimizer_state(saved.join("optimizer.safetensors")).unwrap();
    own.train.optimizer().load_state_dict(&dict).unwrap();
    assert_eq!(run.weights(), own.weights());
    for _ in 0..2 {
        own.step();
        run.step();
        assert_eq!(run.weights(), own.weights());
    }
    let error = optimizer_state(Path::new("/nonexistent")).unwrap_err().to_string();
    assert!(error.starts_with("checkpoint /nonexistent: "), "{error}");
}
