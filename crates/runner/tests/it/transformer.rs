//! The zoo's transformer learns, in `f32`, under autocast and with half parameters; parameters
//! silently cut off from the loss by stock candle are an error in the first step.

use std::path::Path;
use std::time::Duration;

use candle_core::{Module, Tensor};
use candle_nn::VarBuilder;
use collective::{ProcessGroup, reducer::ReducerOptions};
use runner::config::Config;
use runner::data::{Array, ArrayData, Batch, Dataset};
use runner::engine::candle::{
    CandleEngine, CandleModel, CandleOptions, Loss, Outputs, TensorBatch, nn, ops,
};
use runner::engine::{Engine, EngineState, Model, StepContext};
use runner::model::{DistributedDataParallel, ModelWrapper};

use runner::zoo::SyntheticTokens;

use crate::common::from_config;

fn train(dir: &Path, wrapper: &str) -> f64 {
    let text = format!(
        "{wrapper}
        optimizer = {{ type = 'AdamW', lr = 0.004 }}
        clip_grad = {{ max_norm = 1.0 }}
        paramwise_cfg = {{ norm_decay_mult = 0.0, bias_decay_mult = 0.0 }}
        [model]
        type = 'Transformer'
        image_size = 8
        patch_size = 2
        width = 32
        heads = 4
        layers = 1
        feed_forward = 64
        [train_dataloader]
        batch_size = 32
        dataset = {{ type = 'Digits', split = 'train' }}
        [val_dataloader]
        batch_size = 64
        dataset = {{ type = 'Digits', split = 'test' }}
        [val_evaluator]
        type = 'Accuracy'
        [train_cfg]
        max_epochs = 4
        [randomness]
        seed = 1"
    );
    let group = ProcessGroup::threads(1, Duration::from_secs(60)).unwrap().remove(0);
    let config = Config::from_text("c.toml", text).unwrap();
    let builder = from_config(config).unwrap().work_dir(dir).process_group(group);
    builder.build().unwrap().train().unwrap()[0].1
}

#[test]
fn digits_are_learned() {
    let dir = tempfile::tempdir().unwrap();
    for (at, wrapper) in [
        "[optim_wrapper]\ntype = 'OptimWrapper'",
        "[optim_wrapper]\ntype = 'AmpOptimWrapper'\ndtype = 'float16'",
        "[optim_wrapper]\ntype = 'AmpOptimWrapper'\ndtype = 'bfloat16'",
        "[optim_wrapper]\ntype = 'AmpOptimWrapper'\ndtype = 'float16'\nhalf_parameters = true",
    ]
    .iter()
    .enumerate()
    {
        let accuracy = train(&dir.path().join(at.to_string()), wrapper);
        assert!(accuracy > 70.0, "{wrapper}: {accuracy}");
    }
}

/// The token embedding is also the output layer: one parameter, whose gradient is complete after
/// both uses.
#[test]
fn gpt_learns_tokens_and_resumes() {
    let run = |dir: &Path, steps: usize, resume: bool| {
        let text = format!(
            "resume = {resume}
            model = {{ type = 'Gpt', vocab_size = 11, context = 12, width = 32, heads = 2, layers = 2 }}
            optim_wrapper = {{ type = 'AmpOptimWrapper', dtype = 'bfloat16', optimizer = {{ type = 'AdamW', lr = 0.01 }},
                clip_grad = {{ max_norm = 1.0 }} }}
            train_dataloader = {{ batch_size = 16,
                dataset = {{ type = 'SyntheticTokens', length = 12, vocab_size = 11 }} }}
            train_cfg = {{ type = 'IterBasedTrainLoop', max_iters = {steps} }}
            default_hooks = {{ checkpoint = {{ type = 'CheckpointHook', by_epoch = false, interval = 30 }} }}
            randomness = {{ seed = 1 }}"
        );
        let group = ProcessGroup::threads(1, Duration::from_secs(60)).unwrap().remove(0);
        let builder = from_config(Config::from_text("c.toml", text).unwrap()).unwrap();
        let mut runner = builder.work_dir(dir).process_group(group).build().unwrap();
        runner.train().unwrap();
        let saved = |name| std::fs::read(dir.join(format!("iter_{steps}/{name}"))).unwrap();
        (runner, ["model.safetensors", "optimizer.safetensors"].map(saved))
    };
    let dir = tempfile::tempdir().unwrap();
    let (mut runner, whole) = run(&dir.path().join("whole"), 60, false);
    run(&dir.path().join("parts"), 30, false);
    let (_, parts) = run(&dir.path().join("parts"), 60, true);
    assert!(whole == parts);
    assert_eq!(runner.engine_mut().params().len(), 2 + 2 * 12 + 2);

    let tokens = SyntheticTokens::new(64, 12, 11, 0).unwrap();
    let batch = tokens.batch(&(0..64).map(Into::into).collect::<Vec<_>>()).unwrap();
    let ArrayData::I64(labels) = batch.get("labels").unwrap().data() else { panic!("tokens") };
    let outputs = runner.engine_mut().eval(&batch).unwrap();
    let ArrayData::F32(logits) = outputs[0].1.data() else { panic!("{outputs:?}") };
    let largest = |row: &[f32]| (0..11).max_by(|a, b| row[*a].total_cmp(&row[*b])).unwrap();
    let rows = logits.chunks_exact(11).map(largest);
    let right = rows.zip(labels).filter(|(guess, label)| *guess as i64 == **label).count();
    // Nine in ten tokens follow from the previous one.
    assert!(right > 64 * 12 * 8 / 10, "{right} of {}", labels.len());
}

/// A stock layer between two trained layers.
struct Stock {
    before: candle_nn::Linear,
    norm: Option<candle_nn::LayerNorm>,
    after: candle_nn::Linear,
    cut: fn(&Tensor) -> candle_core::Result<Tensor>,
}

impl Stock {
    fn new(
        vb: VarBuilder<'_>,
        norm: bool,
        cut: fn(&Tensor) -> candle_core::Result<Tensor>,
    ) -> candle_core::Result<Self> {
        let before = candle_nn::linear(4, 4, vb.pp("before"))?;
        let norm = if norm { Some(candle_nn::layer_norm(4, 1e-5, vb.pp("norm"))?) } else { None };
        Ok(Self { before, norm, after: candle_nn::linear(4, 2, vb.pp("after"))?, cut })
    }
}

impl CandleModel for Stock {
    fn loss(&self, batch: &TensorBatch) -> candle_core::Result<Loss> {
        let x = self.before.forward(batch.get("inputs")?)?;
        let y = match &self.norm {
            Some(norm) => norm.forward(&x)?,
            None => (self.cut)(&x)?,
        };
        let logits = self.after.forward(&y)?;
        Ok(Loss::new(ops::cross_entropy(&logits, batch.get("labels")?)?))
    }

    fn predict(&self, _: &TensorBatch) -> candle_core::Result<Outputs> {
        Ok(Outputs::new())
    }
}

fn step(mut engine: CandleEngine) -> runner::Result<()> {
    let group = ProcessGroup::threads(1, Duration::from_secs(60))?.remove(0);
    let options = ReducerOptions::default();
    let mut model = DistributedDataParallel::new(group, engine.params(), options)?;
    let inputs = ArrayData::F32((0..12).map(|i| (i as f32).sin()).collect());
    let batch = Batch::new()
        .with("inputs", Array::new([3, 4], inputs)?)
        .with("labels", Array::new([3], ArrayData::I64(vec![0, 1, 0]))?);
    let mut state = EngineState::default();
    let mut cx = StepContext::new(model.sink(), &mut state);
    model.prepare(Some(&mut engine), &mut cx)?;
    engine.train_step(&batch, &mut cx)?;
    Ok(model.finish()?)
}

#[test]
#[expect(clippy::disallowed_methods, reason = "tests operators without gradient")]
fn parameters_cut_off_by_stock_candle_are_named() {
    type Cut = fn(&Tensor) -> candle_core::Result<Tensor>;
    let softmax: Cut = |x| candle_nn::ops::softmax_last_dim(x);
    let rms_norm: Cut = |x| {
        let weight = Tensor::ones(4, x.dtype(), x.device())?;
        candle_nn::ops::rms_norm(x, &weight, 1e-5)
    };
    let ours: Cut = ops::softmax;
    let build = |norm: bool, cut: Cut| {
        CandleEngine::new(CandleOptions::default(), move |vb| Stock::new(vb, norm, cut)).unwrap()
    };
    for (norm, cut, named) in [
        (true, ours, &["before.weight", "before.bias", "norm.weight", "norm.bias"][..]),
        (false, softmax, &["before.weight", "before.bias"]),
        (false, rms_norm, &["before.weight", "before.bias"]),
    ] {
        let error = step(build(norm, cut)).unwrap_err();
        let runner::Error::Collective(collective::Error::UnusedParameters { names, .. }) = error
        else {
            panic!("{error}");
        };
        assert_eq!(names, named);
    }
    // Our replacements train all parameters.
    step(build(false, ours)).unwrap();
    let with_norm = CandleEngine::new(CandleOptions::default(), |vb| {
        let norm = nn::layer_norm(4, 1e-5, vb.pp("norm"))?;
        let net = Stock::new(vb, false, |x| Ok(x.clone()))?;
        Ok(Normed { norm, net })
    });
    step(with_norm.unwrap()).unwrap();
}

/// [`Stock`] after a norm layer of `nn`.
struct Normed {
    norm: nn::LayerNorm,
    net: Stock,
}

impl CandleModel for Normed {
    fn loss(&self, batch: &TensorBatch) -> candle_core::Result<Loss> {
        let x = self.net.before.forward(batch.get("inputs")?)?;
        let logits = self.net.after.forward(&self.norm.forward(&x)?)?;
        Ok(Loss::new(ops::cross_entropy(&logits, batch.get("labels")?)?))
    }

    fn predict(&self, _: &TensorBatch) -> candle_core::Result<Outputs> {
        Ok(Outputs::new())
    }
}
