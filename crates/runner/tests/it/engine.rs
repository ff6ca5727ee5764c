//! The candle engine through its trait: gradients equal those of plain candle and arrive in order
//! of backward; in-place updates, half precision, errors.

use std::sync::Arc;

use candle_core::{Device, Module, ModuleT, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};
use fused_optim::{DType, Slice, SliceMut};
use parking_lot::Mutex;
use runner::Error;
use runner::data::{Array, ArrayData, Batch};
use runner::engine::candle::{
    CandleEngine, CandleModel, CandleOptions, Loss, Outputs, TensorBatch, ops,
};
use runner::engine::{Engine, GradSink, Model, SharedSink};
use runner::zoo::{Mlp, MlpOptions, ResNet, ResNetOptions};

use crate::common::step::train_step;

/// Stores every gradient, in order of arrival.
#[derive(Default)]
struct Keep {
    seen: Vec<(usize, DType, Vec<f32>)>,
    refuse: Option<usize>,
}

impl GradSink for Keep {
    fn ready(&mut self, index: usize, grad: Slice<'_>) -> train_step::Result<()> {
        if self.refuse == Some(index) {
            return Err(Error::data("refused").into());
        }
        self.seen.push((index, grad.dtype(), widen(&grad)));
        Ok(())
    }
}

fn widen(slice: &Slice<'_>) -> Vec<f32> {
    match slice {
        Slice::F32(v) => v.to_vec(),
        Slice::F16(v) => v.iter().map(|v| v.to_f32()).collect(),
        Slice::Bf16(v) => v.iter().map(|v| v.to_f32()).collect(),
    }
}

fn keep() -> (Arc<Mutex<Keep>>, SharedSink) {
    let keep = Arc::new(Mutex::new(Keep::default()));
    let sink: SharedSink = keep.clone();
    (keep, sink)
}

/// Returns eight images of 8 x 8 pixels with labels, always the same.
fn batch() -> Batch {
    let pixels = (0..8 * 64).map(|i| ((i * 37) % 256) as u8).collect();
    let labels = (0..8).map(|i| i % 3).collect();
    Batch::new()
        .with("inputs", Array::new([8, 1, 8, 8], ArrayData::U8(pixels)).unwrap())
        .with("labels", Array::new([8], ArrayData::I64(labels)).unwrap())
}

/// A network of stock candle-nn layers.
struct Stock {
    conv: candle_nn::Conv2d,
    norm: Option<candle_nn::BatchNorm>,
    fc1: candle_nn::Linear,
    fc2: candle_nn::Linear,
}

impl Stock {
    fn new(vb: VarBuilder<'_>) -> candle_core::Result<Self> {
        let padded = candle_nn::Conv2dConfig { padding: 1, ..Default::default() };
        Ok(Self {
            conv: candle_nn::conv2d(1, 4, 3, padded, vb.pp("conv"))?,
            norm: Some(candle_nn::batch_norm(4, 1e-5, vb.pp("norm"))?),
            fc1: candle_nn::linear(4 * 16, 8, vb.pp("fc1"))?,
            fc2: candle_nn::linear(8, 3, vb.pp("fc2"))?,
        })
    }

    /// Without the norm layer: the stock implementation requires its statistics in `f32` in
    /// training and in the input's type in evaluation.
    fn without_norm(vb: VarBuilder<'_>) -> candle_core::Result<Self> {
        Ok(Self { norm: None, ..Self::new(vb)? })
    }

    fn logits(&self, images: &Tensor) -> candle_core::Result<Tensor> {
        let mut x = self.conv.forward(images)?;
        if let Some(norm) = &self.norm {
            x = norm.forward_t(&x, true)?;
        }
        let x = ops::max_pool2d(&x.relu()?, 2, ops::Window { stride: 2, padding: 0 })?;
        self.fc2.forward(&self.fc1.forward(&x.flatten_from(1)?)?.relu()?)
    }

    fn loss(&self, images: &Tensor, labels: &Tensor) -> candle_core::Result<Tensor> {
        candle_nn::loss::cross_entropy(
            &self.logits(images)?.to_dtype(candle_core::DType::F32)?,
            labels,
        )
    }
}

impl CandleModel for Stock {
    fn loss(&self, batch: &TensorBatch) -> candle_core::Result<Loss> {
        let images = batch.get("inputs")?.to_dtype(batch.dtype())?;
        let loss = self.loss(&images, batch.get("labels")?)?;
        let twice = (&loss * 2.0)?;
        Ok(Loss::new(loss).with("twice", twice))
    }

    fn predict(&self, batch: &TensorBatch) -> candle_core::Result<Outputs> {
        let images = batch.get("inputs")?.to_dtype(batch.dtype())?;
        Ok(Outputs::new().with("logits", self.logits(&images)?))
    }
}

#[test]
fn gradients_of_stock_layers_are_bit_identical_and_last_layer_first() {
    let mut engine = CandleEngine::new(CandleOptions::default(), Stock::new).unwrap();
    let names: Vec<_> = engine.params().iter().map(|p| p.name.clone()).collect();
    assert_eq!(names[..2], ["conv.weight", "conv.bias"]);
    assert_eq!(engine.buffers().len(), 2);

    // The same network on plain variables with the same values.
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, candle_core::DType::F32, &Device::Cpu);
    let plain = Stock::new(vb).unwrap();
    let vars = vars.data().lock().unwrap();
    let specs = engine.params().to_vec();
    engine
        .with_params(&mut |slices| {
            for (spec, slice) in specs.iter().zip(slices) {
                let values = widen(&slice.as_slice());
                let values = Tensor::from_vec(values, spec.shape.clone(), &Device::Cpu).unwrap();
                vars[&spec.name].set(&values).unwrap();
            }
            Ok(())
        })
        .unwrap();

    let data = batch();
    let ArrayData::U8(pixels) = data.get("inputs").unwrap().data() else { panic!() };
    let pixels: Vec<_> = pixels.iter().map(|p| f32::from(*p)).collect();
    let images = Tensor::from_vec(pixels, (8, 1, 8, 8), &Device::Cpu).unwrap();
    let labels = Tensor::from_iter((0..8i64).map(|i| i % 3), &Device::Cpu).unwrap();
    for _ in 0..3 {
        let loss = plain.loss(&images, &labels).unwrap();
        let grads = loss.backward().unwrap();
        let (keep, sink) = keep();
        let losses = train_step(&mut engine, None, &data, 1.0, &sink).unwrap();
        let loss = f64::from(loss.to_scalar::<f32>().unwrap());
        assert_eq!(
            losses.scalars().unwrap(),
            [("loss".into(), loss), ("twice".into(), 2.0 * loss)]
        );

        let keep = keep.lock();
        let order: Vec<_> = keep.seen.iter().map(|(i, ..)| names[*i].as_str()).collect();
        let layers: Vec<_> = order.iter().map(|n| n.split('.').next().unwrap()).collect();
        assert_eq!(layers, ["fc2", "fc2", "fc1", "fc1", "norm", "norm", "conv", "conv"]);
        for (index, _, gradient) in &keep.seen {
            let var: &Var = &vars[&names[*index]];
            let expected = grads.get(var).unwrap().flatten_all().unwrap().to_vec1::<f32>();
            assert_eq!(*gradient, expected.unwrap(), "{}", names[*index]);
        }

        // One step of SGD on both.
        for var in names.iter().map(|n| &vars[n]) {
            let grad = (grads.get(var).unwrap() * 0.01).unwrap();
            var.set(&(var.as_tensor() - grad).unwrap()).unwrap();
        }
        engine
            .with_params(&mut |slices| {
                for (index, _, gradient) in &keep.seen {
                    let SliceMut::F32(weight) = &mut slices[*index] else { panic!() };
                    weight.iter_mut().zip(gradient).for_each(|(w, g)| *w -= g * 0.01);
                }
                Ok(())
            })
            .unwrap();
    }
}

fn resnet(dtype: DType) -> CandleEngine {
    let options = ResNetOptions {
        width: 4,
        blocks: vec![1, 1],
        num_classes: 3,
        stem_max_pool: true,
        ..Default::default()
    };
    CandleEngine::new(CandleOptions { dtype, seed: 1, ..Default::default() }, |vb| {
        ResNet::new(&options, vb)
    })
    .unwrap()
}

#[test]
fn resnet_has_torchvisions_names_and_every_gradient_last_layer_first() {
    let mut engine = resnet(DType::F32);
    let names: Vec<_> = engine.params().iter().map(|p| p.name.clone()).collect();
    assert_eq!(
        names,
        [
            "conv1.weight",
            "bn1.weight",
            "bn1.bias",
            "layer1.0.conv1.weight",
            "layer1.0.bn1.weight",
            "layer1.0.bn1.bias",
            "layer1.0.conv2.weight",
            "layer1.0.bn2.weight",
            "layer1.0.bn2.bias",
            "layer2.0.conv1.weight",
            "layer2.0.bn1.weight",
            "layer2.0.bn1.bias",
            "layer2.0.conv2.weight",
            "layer2.0.bn2.weight",
            "layer2.0.bn2.bias",
            "layer2.0.downsample.0.weight",
            "layer2.0.downsample.1.weight",
            "layer2.0.downsample.1.bias",
            "fc.weight",
            "fc.bias",
        ]
    );
    let (keep, sink) = keep();
    train_step(&mut engine, None, &batch(), 1.0, &sink).unwrap();
    let keep = keep.lock();
    let mut order: Vec<_> = keep.seen.iter().map(|(i, ..)| *i).collect();
    let stage = |i: usize| names[i].split('.').next().unwrap().to_owned();
    let mut stages: Vec<_> = order.iter().map(|i| stage(*i)).collect();
    stages.dedup();
    assert_eq!(stages, ["fc", "layer2", "layer1", "bn1", "conv1"]);
    order.sort_unstable();
    assert_eq!(order, (0..names.len()).collect::<Vec<_>>());
}

/// Cosine of the angle between two gradients.
fn cosine(a: &[f32], b: &[f32]) -> f32 {
    let dot = |a: &[f32], b: &[f32]| -> f32 { a.iter().zip(b).map(|(a, b)| a * b).sum() };
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}

#[test]
fn half_parameters_are_half_except_norm_layers() {
    for (dtype, least) in [(DType::F16, 0.99), (DType::Bf16, 0.9)] {
        let mut engine = resnet(dtype);
        for spec in engine.params().iter().chain(engine.buffers()) {
            let norm = spec.name.contains("bn") || spec.name.contains("downsample.1");
            assert_eq!(spec.dtype, if norm { DType::F32 } else { dtype }, "{}", spec.name);
        }
        let specs = engine.params().to_vec();
        let mut wide = resnet(DType::F32);
        let (half_keep, half_sink) = keep();
        let (wide_keep, wide_sink) = keep();
        let half_loss = train_step(&mut engine, None, &batch(), 1024.0, &half_sink).unwrap();
        let wide_loss = train_step(&mut wide, None, &batch(), 1024.0, &wide_sink).unwrap();
        let (half, wide) = (half_loss.scalars().unwrap()[0].1, wide_loss.scalars().unwrap()[0].1);
        assert!((half - wide).abs() < 0.02, "{half} {wide}");
        let (half, wide) = (half_keep.lock(), wide_keep.lock());
        for ((i, got, half), (j, _, wide)) in half.seen.iter().zip(&wide.seen) {
            assert_eq!((i, *got), (j, specs[*i].dtype));
            // Eleven or eight bits of mantissa through eight layers: the direction stays nearly
            // equal.
            assert!(cosine(half, wide) > least, "{}", specs[*i].name);
        }
    }
}

#[test]
fn stock_layers_train_with_half_parameters_unchanged() {
    let stock = |dtype| {
        CandleEngine::new(CandleOptions { dtype, ..Default::default() }, Stock::without_norm)
            .unwrap()
    };
    let (half_keep, half_sink) = keep();
    let (wide_keep, wide_sink) = keep();
    let half = train_step(&mut stock(DType::F16), None, &batch(), 1.0, &half_sink).unwrap();
    let wide = train_step(&mut stock(DType::F32), None, &batch(), 1.0, &wide_sink).unwrap();
    let (half, wide) = (half.scalars().unwrap()[0].1, wide.scalars().unwrap()[0].1);
    assert!((half - wide).abs() < 0.01 * wide, "{half} {wide}");
    for ((i, got, half), (j, _, wide)) in half_keep.lock().seen.iter().zip(&wide_keep.lock().seen) {
        assert_eq!((i, *got), (j, DType::F16));
        assert!(cosine(half, wide) > 0.99, "{i}");
    }
}

/// Copies parameters and buffers of `from` to `to`.
fn copy_model(from: &mut CandleEngine, to: &mut CandleEngine) {
    let mut tensors = Vec::new();
    let mut read = |slices: &mut [SliceMut<'_>]| {
        tensors.extend(slices.iter().map(|s| widen(&s.as_slice())));
        Ok(())
    };
    from.with_params(&mut read).unwrap();
    from.with_buffers(&mut read).unwrap();
    let mut tensors = tensors.iter();
    let mut write = |slices: &mut [SliceMut<'_>]| {
        for (slice, values) in slices.iter_mut().zip(&mut tensors) {
            let SliceMut::F32(slice) = slice else { panic!("of another type") };
            slice.copy_from_slice(values);
        }
        Ok(())
    };
    to.with_params(&mut write).unwrap();
    to.with_buffers(&mut write).unwrap();
}

#[test]
fn autocast_keeps_parameters_and_gradients_in_f32_and_does_not_apply_to_evaluation() {
    let mut wide = resnet(DType::F32);
    let (wide_keep, wide_sink) = keep();
    let wide_loss =
        train_step(&mut wide, None, &batch(), 1024.0, &wide_sink).unwrap().scalars().unwrap()[0].1;
    for (dtype, least) in [(DType::F16, 0.99), (DType::Bf16, 0.9)] {
        let mut engine = resnet(DType::F32);
        let (half_keep, sink) = keep();
        let loss = train_step(&mut engine, Some(dtype), &batch(), 1024.0, &sink)
            .unwrap()
            .scalars()
            .unwrap()[0]
            .1;
        assert!(loss != wide_loss && (loss - wide_loss).abs() < 0.02, "{loss} {wide_loss}");
        let (half, wide_keep) = (half_keep.lock(), wide_keep.lock());
        for ((i, got, half), (j, _, wide)) in half.seen.iter().zip(&wide_keep.seen) {
            assert_eq!((i, *got), (j, DType::F32));
            assert!(cosine(half, wide) > least, "{i}");
        }
        // Evaluation uses the parameters' own type; only the running statistics were computed in
        // half precision.
        let outputs = engine.eval(&batch()).unwrap();
        let mut plain = resnet(DType::F32);
        copy_model(&mut engine, &mut plain);
        assert_eq!(plain.eval(&batch()).unwrap(), outputs);
    }
    assert!(!wide.supports_autocast(DType::F32));
    assert!(train_step(&mut wide, Some(DType::F32), &batch(), 1.0, &wide_sink).is_err());
}

#[test]
fn autocast_without_effect_is_an_error() {
    let mut engine = CandleEngine::new(CandleOptions::default(), Stock::new).unwrap();
    let (_, sink) = keep();
    train_step(&mut engine, None, &batch(), 1.0, &sink).unwrap();
    let error = train_step(&mut engine, Some(DType::Bf16), &batch(), 1.0, &sink);
    let error = error.unwrap_err().to_string();
    assert!(error.contains("half_parameters = true"), "{error}");
}

#[test]
fn loss_scale_applies_to_gradients_and_not_to_the_loss() {
    let mut engine = resnet(DType::F32);
    let (one, one_sink) = keep();
    let (scaled, scaled_sink) = keep();
    let a = train_step(&mut engine, None, &batch(), 1.0, &one_sink).unwrap();
    let b = train_step(&mut engine, None, &batch(), 256.0, &scaled_sink).unwrap();
    assert_eq!(a.scalars().unwrap(), b.scalars().unwrap());
    // A power of two, so multiplication is exact.
    for ((_, _, one), (_, _, scaled)) in one.lock().seen.iter().zip(&scaled.lock().seen) {
        assert!(one.iter().zip(scaled).all(|(a, b)| a * 256.0 == *b));
    }
    for scale in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        assert!(train_step(&mut engine, None, &batch(), scale, &one_sink).is_err());
    }
}

#[test]
fn changed_parameters_affect_the_next_forward() {
    let mut engine = resnet(DType::F16);
    let before = engine.eval(&batch()).unwrap();
    engine
        .with_params(&mut |slices| {
            let Some(SliceMut::F32(bias)) = slices.get_mut(1) else { panic!("bn1.weight") };
            bias.iter_mut().for_each(|v| *v *= 2.0);
            Ok(())
        })
        .unwrap();
    let after = engine.eval(&batch()).unwrap();
    assert_eq!(before[0].0, "logits");
    assert_eq!(before[0].1.shape(), [8, 3]);
    assert_ne!(before, after);

    // After an error or a panic in the visit the memory is returned.
    let error = engine.with_params(&mut |_| Err(Error::data("stop").into())).unwrap_err();
    assert_eq!(error.to_string(), "stop");
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        engine.with_params(&mut |_| panic!("stop"))
    }));
    assert!(panicked.is_err());
    assert_eq!(engine.eval(&batch()).unwrap(), after);
}

#[test]
fn running_statistics_change_only_in_training() {
    let mut engine = resnet(DType::F32);
    let read = |engine: &mut CandleEngine| {
        let mut all = Vec::new();
        engine
            .with_buffers(&mut |slices| {
                all.extend(slices.iter().flat_map(|s| widen(&s.as_slice())));
                Ok(())
            })
            .unwrap();
        all
    };
    let start = read(&mut engine);
    engine.eval(&batch()).unwrap();
    assert_eq!(read(&mut engine), start);
    train_step(&mut engine, None, &batch(), 1.0, &keep().1).unwrap();
    assert_ne!(read(&mut engine), start);
}

#[test]
fn seed_determines_all_parameters() {
    let read = |seed| {
        let options = CandleOptions { seed, ..Default::default() };
        let mlp = MlpOptions { in_features: 64, hidden: vec![5], ..Default::default() };
        let mut engine = CandleEngine::new(options, |vb| Mlp::new(&mlp, vb)).unwrap();
        let mut all = Vec::new();
        engine
            .with_params(&mut |slices| {
                all.extend(slices.iter().flat_map(|s| widen(&s.as_slice())));
                Ok(())
            })
            .unwrap();
        all
    };
    assert_eq!(read(3), read(3));
    assert_ne!(read(3), read(4));
}

#[test]
fn error_of_the_sink_is_returned_unchanged_and_the_engine_continues() {
    let mut engine = resnet(DType::F32);
    let (keep, sink) = keep();
    keep.lock().refuse = Some(9);
    let error = train_step(&mut engine, None, &batch(), 1.0, &sink).unwrap_err();
    assert!(matches!(&error, Error::Data { reason, .. } if reason == "refused"), "{error:?}");
    assert!(keep.lock().seen.iter().all(|(i, ..)| *i != 0), "backward continued");
    keep.lock().refuse = None;
    train_step(&mut engine, None, &batch(), 1.0, &sink).unwrap();
}

#[test]
fn lent_parameters_are_returned_in_any_case() {
    let mut engine = resnet(DType::F16);
    let read = |engine: &mut CandleEngine| {
        let mut all = Vec::new();
        engine
            .with_params(&mut |params| {
                all.extend(params.iter().map(|p| widen(&p.as_slice())));
                Ok(())
            })
            .unwrap();
        all
    };
    let before = read(&mut engine);
    assert!(before.iter().all(|p| !p.is_empty()));
    let refused = engine.with_params(&mut |_| Err(Error::data("refused").into()));
    assert!(matches!(refused.map_err(Error::from), Err(Error::Data { .. })));
    assert_eq!(read(&mut engine), before);
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        engine.with_params(&mut |_| panic!("in the middle of a step"))
    }));
    assert!(panicked.is_err());
    assert_eq!(read(&mut engine), before);
}

/// A parameter as left operand, right operand, and both operands of stock operators.
struct Operands(Tensor);

impl CandleModel for Operands {
    fn loss(&self, batch: &TensorBatch) -> candle_core::Result<Loss> {
        let x = batch.get("x")?;
        let sum = (((&self.0 - x)? + (x / &self.0)?)? + (&self.0 * &self.0)?)?;
        Ok(Loss::new(sum.sum_all()?))
    }

    fn predict(&self, _batch: &TensorBatch) -> candle_core::Result<Outputs> {
        Ok(Outputs::new())
    }
}

#[test]
fn parameter_may_be_any_operand() {
    let mut engine = CandleEngine::new(CandleOptions::default(), |vb| {
        Ok(Operands(vb.get_with_hints(2, "w", candle_nn::Init::Const(2.0))?))
    })
    .unwrap();
    let x = Array::new([2], ArrayData::F32(vec![3.0, -8.0])).unwrap();
    let (keep, sink) = keep();
    train_step(&mut engine, None, &Batch::new().with("x", x), 1.0, &sink).unwrap();
    // d(w - x + x / w + w w) / dw = 1 - x / (w w) + 2 w.
    assert_eq!(keep.lock().seen, [(0, DType::F32, vec![4.25, 7.0])]);
}

#[test]
fn nan_loss_is_reported() {
    let mut engine = CandleEngine::new(CandleOptions::default(), |vb| {
        Ok(Operands(vb.get_with_hints(1, "w", candle_nn::Init::Const(2.0))?))
    })
    .unwrap();
    let x = Array::new([1], ArrayData::F32(vec![f32::NAN])).unwrap();
    let (keep, sink) = keep();
    let losses = train_step(&mut engine, None, &Batch::new().with("x", x), 1.0, &sink).unwrap();
    assert!(losses.scalars().unwrap()[0].1.is_nan());
    assert!(keep.lock().seen[0].2[0].is_nan());
}

/// Models with one error each.
struct Wrong {
    weight: Tensor,
    unused: Tensor,
    how: &'static str,
    vb: VarBuilder<'static>,
}

impl CandleModel for Wrong {
    fn loss(&self, batch: &TensorBatch) -> candle_core::Result<Loss> {
        let loss = ops::linear(batch.get("x")?, &self.weight, None)?.sum_all()?;
        Ok(Loss::new(match self.how {
            "vector" => self.weight.clone(),
            "constant" => Tensor::new(1f32, &Device::Cpu)?,
            "late" => self.vb.get((), "late")?,
            "cut" => (loss + self.unused.detach().sum_all()?)?,
            _ => batch.get("absent")?.clone(),
        }))
    }

    fn predict(&self, _batch: &TensorBatch) -> candle_core::Result<Outputs> {
        Ok(Outputs::new().with("weight", self.weight.clone()))
    }
}

fn wrong(how: &'static str) -> CandleEngine {
    CandleEngine::new(CandleOptions::default(), |vb| {
        let weight = vb.get((1, 2), "weight")?;
        assert!(vb.get((2, 1), "weight").is_err(), "one name, two shapes");
        Ok(Wrong { weight, unused: vb.get(3, "unused")?, how, vb })
    })
    .unwrap()
}

#[test]
fn invalid_model_is_an_error_with_the_reason() {
    let batch = Batch::new().with("x", Array::new([4, 2], ArrayData::F32(vec![1.0; 8])).unwrap());
    for (how, says) in [
        ("vector", "one f32"),
        ("constant", "depends on no trained parameter"),
        ("late", "`late` was requested after the model was built"),
        ("absent", "no field `absent`; it has [\"x\"]"),
    ] {
        let error =
            train_step(&mut wrong(how), None, &batch, 1.0, &keep().1).unwrap_err().to_string();
        assert!(error.contains(says), "{how}: {error}");
    }
    let error = wrong("").eval(&batch).unwrap_err().to_string();
    assert!(error.contains("`weight` has shape [1, 2], but the batch has 4 samples"), "{error}");
}

#[test]
fn parameter_detached_from_the_loss_is_not_reported() {
    let batch = Batch::new().with("x", Array::new([4, 2], ArrayData::F32(vec![1.0; 8])).unwrap());
    let (keep, sink) = keep();
    train_step(&mut wrong("cut"), None, &batch, 1.0, &sink).unwrap();
    assert_eq!(keep.lock().seen, [(0, DType::F32, vec![4.0, 4.0])]);
}

/// A parameter used twice, and requested twice.
struct Shared(Tensor, Tensor);

impl CandleModel for Shared {
    fn loss(&self, batch: &TensorBatch) -> candle_core::Result<Loss> {
        let hidden = ops::linear(batch.get("x")?, &self.0, None)?;
        Ok(Loss::new(ops::linear(&hidden, &self.1, None)?.sum_all()?))
    }

    fn predict(&self, _batch: &TensorBatch) -> candle_core::Result<Outputs> {
        Ok(Outputs::new())
    }
}

#[test]
fn shared_parameter_has_one_gradient() {
    let mut engine = CandleEngine::new(CandleOptions::default(), |vb| {
        let one = candle_nn::Init::Const(1.0);
        let get = || vb.get_with_hints((1, 1), "w", one);
        Ok(Shared(get()?, get()?))
    })
    .unwrap();
    assert_eq!(engine.params().len(), 1);
    let batch = Batch::new().with("x", Array::new([1, 1], ArrayData::F32(vec![3.0])).unwrap());
    let (keep, sink) = keep();
    train_step(&mut engine, None, &batch, 1.0, &sink).unwrap();
    // d(x w w) / dw = 2 x w.
    assert_eq!(keep.lock().seen, [(0, DType::F32, vec![6.0])]);
}
