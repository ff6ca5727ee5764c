//! Whole networks trained with the operators composed, as on a GPU, or with a GPU's kernels, beside the same with
//! the CPU's.

use std::sync::Arc;

use candle_core::{Device, Tensor};
use candle_nn::VarBuilder;
use fused_optim::{DType, Slice, SliceMut};
use parking_lot::Mutex;

use super::tests::flat;
use super::*;
use crate::Result;
use crate::data::{Array, ArrayData, Batch};
use crate::engine::candle::{CandleEngine, CandleModel, CandleOptions};
use crate::engine::{CompileOptions, ComputeDevice, Engine, GradSink, SharedSink};
use crate::zoo::{Mlp, MlpOptions, ResNet, ResNetOptions, Transformer, TransformerOptions};

#[derive(Default)]
struct Keep(Vec<(usize, Vec<f32>)>);

impl GradSink for Keep {
    fn ready(&mut self, index: usize, grad: Slice<'_>) -> Result<()> {
        let Slice::F32(values) = grad else { panic!("parameters are f32") };
        self.0.push((index, values.to_vec()));
        Ok(())
    }
}

/// Ten images of 8 x 8 and their labels, others for each step.
fn batch(step: usize) -> Batch {
    let pixels = (0..640).map(|i| ((i * 37 + step * 91) % 256) as u8).collect();
    let labels = (0..10).map(|i| ((i * 7 + step) % 10) as i64).collect();
    Batch::new()
        .with("inputs", Array::new([10, 1, 8, 8], ArrayData::U8(pixels)).unwrap())
        .with("labels", Array::new([10], ArrayData::I64(labels)).unwrap())
}

/// Losses of three steps of gradient descent, and all numbers that are there at the end: gradients,
/// parameters, buffers, logits.
fn train<M: CandleModel + 'static>(
    build: impl FnOnce(VarBuilder<'static>) -> candle_core::Result<M>,
    (device, compiled): (ComputeDevice, bool),
    autocast: Option<DType>,
) -> (Vec<f64>, Vec<Vec<f32>>) {
    let mut engine =
        CandleEngine::new(CandleOptions { device, ..Default::default() }, build).unwrap();
    engine.set_autocast(autocast).unwrap();
    if compiled {
        let report = engine.compile(&CompileOptions::default()).unwrap().to_string();
        assert!(report.contains("applied: kernels of this engine's own"), "{report}");
    }
    let (mut losses, mut numbers) = (Vec::new(), Vec::new());
    for step in 0..3 {
        let keep = Arc::new(Mutex::new(Keep::default()));
        let sink: SharedSink = keep.clone();
        losses.push(engine.forward_backward(&batch(step), 8.0, &sink).unwrap().scalars[0].1);
        let mut grads = std::mem::take(&mut keep.lock().0);
        grads.sort_by_key(|(index, _)| *index);
        assert_eq!(grads.len(), engine.params().len());
        let mut descend = |params: &mut [SliceMut<'_>]| {
            for (param, (_, grad)) in params.iter_mut().zip(&grads) {
                let SliceMut::F32(values) = param else { panic!("parameters are f32") };
                values.iter_mut().zip(grad).for_each(|(v, g)| *v -= 0.01 * g);
            }
            Ok(())
        };
        engine.with_params(&mut descend).unwrap();
        numbers = grads.into_iter().map(|(_, grad)| grad).collect();
    }
    let mut copy = |slices: &mut [SliceMut<'_>]| {
        for slice in slices {
            let SliceMut::F32(values) = slice else { panic!("all are f32") };
            numbers.push(values.to_vec());
        }
        Ok(())
    };
    engine.with_params(&mut copy).unwrap();
    engine.with_buffers(&mut copy).unwrap();
    for (_, logits) in engine.eval(&batch(3)).unwrap() {
        let ArrayData::F32(values) = logits.data() else { panic!("logits are f32") };
        numbers.push(values.clone());
    }
    (losses, numbers)
}

/// Three steps magnify what rounding leaves of a gradient.
const WITHIN: f32 = 1e-3;

/// With the kernels on the host, and on a device composed, or compiled.
fn assert_alike<M: CandleModel + 'static>(
    what: &str,
    on: (ComputeDevice, bool),
    (autocast, within): (Option<DType>, f32),
    build: impl Fn(VarBuilder<'static>) -> candle_core::Result<M>,
) {
    let (losses, numbers) = train(&build, (ComputeDevice::Cpu, false), autocast);
    let (other_losses, other_numbers) = composed(|| train(&build, on, autocast));
    for (a, b) in losses.iter().zip(&other_losses) {
        assert!(
            (a - b).abs() <= f64::from(within) * a.abs(),
            "{what}: {losses:?} {other_losses:?}"
        );
    }
    assert_eq!(numbers.len(), other_numbers.len());
    for (i, (a, b)) in numbers.iter().zip(&other_numbers).enumerate() {
        let largest = a.iter().fold(1e-3_f32, |m, v| m.max(v.abs()));
        let apart = a.iter().zip(b).fold(0_f32, |m, (a, b)| m.max((a - b).abs()));
        assert!(apart <= within * largest, "{what}: tensor {i} is off by {apart} of {largest}");
    }
}

fn networks_train_alike(on: (ComputeDevice, bool)) {
    let resnet = ResNetOptions {
        width: 4,
        blocks: vec![1, 1],
        stem_max_pool: true,
        ..ResNetOptions::default()
    };
    let mlp = MlpOptions { in_features: 64, hidden: vec![16], ..MlpOptions::default() };
    let transformer = TransformerOptions {
        image_size: 8,
        width: 16,
        feed_forward: 32,
        ..TransformerOptions::default()
    };
    let full = (None, WITHIN);
    assert_alike("resnet", on, full, |vb| ResNet::new(&resnet, vb));
    assert_alike("mlp", on, full, |vb| Mlp::new(&mlp, vb));
    assert_alike("transformer", on, full, |vb| Transformer::new(&transformer, vb));
    // Of eleven bits, with intermediate results rounded where the kernels do not.
    let half = (Some(DType::F16), 0.05);
    assert_alike("mlp in half", on, half, |vb| Mlp::new(&mlp, vb));
}

#[test]
fn networks_train_alike_on_the_host() {
    networks_train_alike((ComputeDevice::Cpu, false));
}

#[cfg(feature = "candle-cuda")]
#[test]
fn networks_train_alike_on_a_gpu() {
    for compiled in [false, true] {
        networks_train_alike((ComputeDevice::Cuda(0), compiled));
    }
}

#[test]
fn extremes_come_out_as_of_the_kernels() {
    let tensor = |values: &[f32]| Tensor::new(values, &Device::Cpu).unwrap();
    let (nan, infinity) = (f32::NAN, f32::INFINITY);
    let matrix = |values: &[f32]| tensor(values).reshape((2, ())).unwrap();
    let pool = |values: &[f32]| {
        let window = Window { stride: 1, padding: 1 };
        max_pool2d(&tensor(values).reshape((1, 1, 1, ())).unwrap(), 3, window)
    };
    let loss = |logits: &[f32], label: i64| {
        let logits = tensor(logits).unsqueeze(0).unwrap();
        cross_entropy(&logits, &Tensor::new(&[label], &Device::Cpu).unwrap())
    };
    let results = || {
        [
            relu(&tensor(&[nan, infinity, -infinity, 0.0])).unwrap(),
            gelu(&tensor(&[nan, infinity])).unwrap(),
            softmax(&matrix(&[1e30, -infinity, nan, 0.0])).unwrap(),
            pool(&[nan, 1.0]).unwrap(),
            pool(&[1.0, nan]).unwrap(),
            pool(&[1.0, infinity, -infinity]).unwrap(),
            loss(&[1e30, -1e30], 0).unwrap(),
            loss(&[3.0, -infinity], 0).unwrap(),
            loss(&[nan, 0.0], 1).unwrap(),
            loss(&[infinity, 0.0], 0).unwrap(),
        ]
    };
    for (i, (composed, kernel)) in composed(results).iter().zip(results()).enumerate() {
        for (got, wanted) in flat(composed).into_iter().zip(flat(&kernel)) {
            assert!(got == wanted || got.is_nan() && wanted.is_nan(), "{i}: {got}, not {wanted}");
        }
    }
    assert!(!composed::takes(&tensor(&[0.0])));
    composed(|| {
        assert!(composed::takes(&tensor(&[0.0])));
        assert!(loss(&[0.0, 0.0], 2).unwrap_err().to_string().contains("label 2"));
        let ids = Tensor::new(&[5_i64], &Device::Cpu).unwrap();
        let error = embedding(&ids, &matrix(&[0.0; 4])).unwrap_err().to_string();
        assert!(error.contains("index 5 is none of 2 rows"), "{error}");
    });
}
