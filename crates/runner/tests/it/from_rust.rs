//! A short program in Rust: pretrained weights, a frozen body, mixed precision, accumulation,
//! clipping.

use std::collections::HashMap;

use candle_core::{Device, Module, Result as CandleResult, Tensor};
use candle_nn::VarBuilder;
use fused_optim::{AdamW, AdamWHyper, Clip, DType, SliceMut};
use runner::engine::candle::nn::{Linear, linear};
use runner::engine::candle::{CandleEngine, CandleModel, Loss, Outputs, TensorBatch, ops};
use runner::model::DistributedDataParallel;
use runner::optim_wrapper::OptimWrapperFactory;
use runner::zoo::{Digits, Split};
use runner::{DataLoaderConfig, Result, Runner, TrainConfig};

struct Net {
    body: Linear,
    head: Linear,
    is_detached: bool,
}

impl Net {
    fn new(vb: &VarBuilder<'static>, is_detached: bool) -> CandleResult<Self> {
        let (body, head) = (linear(64, 16, vb.pp("body"))?, linear(16, 10, vb.pp("head"))?);
        Ok(Self { body, head, is_detached })
    }

    fn logits(&self, batch: &TensorBatch) -> CandleResult<Tensor> {
        let pixels = (batch.get("inputs")?.flatten_from(1)?.to_dtype(batch.dtype())? / 16.0)?;
        let body = ops::relu(&self.body.forward(&pixels)?)?;
        self.head.forward(&if self.is_detached { body.detach() } else { body })
    }
}

impl CandleModel for Net {
    fn loss(&self, batch: &TensorBatch) -> CandleResult<Loss> {
        Ok(Loss::new(ops::cross_entropy(&self.logits(batch)?, batch.get("labels")?)?))
    }

    fn predict(&self, batch: &TensorBatch) -> CandleResult<Outputs> {
        Ok(Outputs::new().with("logits", self.logits(batch)?))
    }
}

/// Names and values of the weights: trained and frozen.
fn weights(runner: &mut Runner) -> Result<[HashMap<String, Vec<f32>>; 2]> {
    let engine = runner.engine_mut();
    let names = [engine.params(), engine.frozen()]
        .map(|specs| specs.iter().map(|spec| spec.name.clone()).collect::<Vec<_>>());
    let [mut params, mut frozen] = [HashMap::new(), HashMap::new()];
    let copy = |names: &[String], slices: &[SliceMut<'_>]| {
        let values = slices.iter().map(|slice| match slice {
            SliceMut::F32(values) => values.to_vec(),
            other => panic!("{other:?}"),
        });
        names.iter().cloned().zip(values).collect::<HashMap<_, _>>()
    };
    engine.with_params(&mut |slices| {
        params = copy(&names[0], slices);
        Ok(())
    })?;
    engine.with_frozen(&mut |slices| {
        frozen = copy(&names[1], slices);
        Ok(())
    })?;
    Ok([params, frozen])
}

#[test]
fn head_is_trained_on_a_pretrained_frozen_body() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("model.safetensors");
    let random = |shape: &[usize]| Tensor::randn(0_f32, 0.1, shape, &Device::Cpu).unwrap();
    let saved: HashMap<_, _> = [
        ("body.weight", random(&[16, 64])),
        ("body.bias", random(&[16])),
        ("head.weight", random(&[10, 16])),
        ("head.bias", random(&[10])),
    ]
    .into();
    candle_core::safetensors::save(&saved, &file).unwrap();

    let hyper = AdamWHyper { lr: 1e-2, ..AdamWHyper::default() };
    let adamw = move |count| AdamW::with_one_group(hyper, count);
    let mut runner = Runner::builder()
        .model(CandleEngine::factory(|vb| Net::new(&vb, false)))
        .load_from(file)
        .frozen(vec!["body.*".to_owned()])
        .optim_wrapper(
            OptimWrapperFactory::amp(DType::F16, adamw).accumulate(2).clip(Clip::norm(1.0)),
        )
        .train_dataloader(DataLoaderConfig::new(Digits::new(Split::Train, 0).unwrap(), 64))
        .train_cfg(TrainConfig::new(1))
        .work_dir(dir.path().join("run"))
        .build()
        .unwrap();
    runner.train().unwrap();
    let [trained, frozen] = weights(&mut runner).unwrap();
    let before = |name: &str| saved[name].flatten_all().unwrap().to_vec1::<f32>().unwrap();
    for name in ["body.weight", "body.bias"] {
        assert_eq!(frozen[name], before(name), "{name}");
    }
    for name in ["head.weight", "head.bias"] {
        assert_ne!(trained[name], before(name), "{name}");
    }
}

#[test]
fn detached_body_trains_with_find_unused_parameters() {
    let dir = tempfile::tempdir().unwrap();
    let run = |name: &str, finds_unused: bool| {
        let hyper = AdamWHyper::default();
        let mut builder = Runner::builder()
            .model(CandleEngine::factory(|vb| Net::new(&vb, true)))
            .optim_wrapper(OptimWrapperFactory::fp32(move |count| {
                AdamW::with_one_group(hyper, count)
            }))
            .train_dataloader(DataLoaderConfig::new(Digits::new(Split::Test, 0).unwrap(), 64))
            .train_cfg(TrainConfig::new(1))
            .work_dir(dir.path().join(name));
        if finds_unused {
            builder = builder.model_wrapper(DistributedDataParallel::finding_unused());
        }
        builder.build().and_then(|mut runner| runner.train()).map(drop)
    };
    let error = run("strict", false).unwrap_err().to_string();
    assert!(error.contains("body.weight"), "{error}");
    run("finding", true).unwrap();
}
