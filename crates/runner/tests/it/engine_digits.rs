//! End-to-end learning: the candle engine trains a small residual network on the digits.

use std::sync::Arc;

use fused_optim::{DType, Slice, SliceMut};
use half::{bf16, f16};
use parking_lot::Mutex;
use runner::data::ArrayData;
use runner::data::{Dataset, Draw};
use runner::engine::candle::ops::Normalization;
use runner::engine::candle::{CandleEngine, CandleOptions};
use runner::engine::{Engine, GradSink, Model, SharedSink};
use runner::zoo::{Digits, ResNet, ResNetOptions, Split};

use crate::common::step::train_step;

/// Stochastic gradient descent with momentum on `f32` master weights, as a gradient sink.
struct Sgd {
    masters: Vec<Vec<f32>>,
    momenta: Vec<Vec<f32>>,
    gradients: Vec<Vec<f32>>,
}

impl GradSink for Sgd {
    fn ready(&mut self, index: usize, grad: Slice<'_>) -> train_step::Result<()> {
        self.gradients[index] = widen(&grad);
        Ok(())
    }
}

impl Sgd {
    /// Takes one step, unless a gradient is not finite. Returns whether it was taken.
    fn step(&mut self, slices: &mut [SliceMut<'_>], lr: f32, scale: f32) -> bool {
        if self.gradients.iter().flatten().any(|g| !g.is_finite()) {
            return false;
        }
        for (i, slice) in slices.iter_mut().enumerate() {
            let (master, momentum) = (&mut self.masters[i], &mut self.momenta[i]);
            for ((w, m), g) in master.iter_mut().zip(momentum).zip(&self.gradients[i]) {
                *m = 0.9 * *m + g / scale;
                *w -= lr * *m;
            }
            match slice {
                SliceMut::F32(weight) => weight.copy_from_slice(master),
                SliceMut::F16(weight) => {
                    weight.iter_mut().zip(master).for_each(|(w, m)| *w = f16::from_f32(*m));
                }
                SliceMut::Bf16(weight) => {
                    weight.iter_mut().zip(master).for_each(|(w, m)| *w = bf16::from_f32(*m));
                }
            }
        }
        true
    }
}

fn widen(slice: &Slice<'_>) -> Vec<f32> {
    match slice {
        Slice::F32(v) => v.to_vec(),
        Slice::F16(v) => v.iter().map(|v| v.to_f32()).collect(),
        Slice::Bf16(v) => v.iter().map(|v| v.to_f32()).collect(),
    }
}

/// Returns the losses, and the accuracy on the held-out fifth after five epochs.
fn train(dtype: DType, autocast: Option<DType>, scale: f32) -> (Vec<f64>, f64) {
    const EPOCHS: usize = 5;
    const BATCH: usize = 32;
    let data = Digits::new(Split::Train, 0).unwrap();
    let options = ResNetOptions {
        width: 8,
        blocks: vec![1, 1],
        normalization: Normalization { mean: vec![Digits::MEAN], std: vec![Digits::STD] },
        ..Default::default()
    };
    let mut engine = CandleEngine::new(CandleOptions { dtype, ..Default::default() }, |vb| {
        ResNet::new(&options, vb)
    })
    .unwrap();
    let mut masters = Vec::new();
    engine
        .with_params(&mut |slices| {
            masters = slices.iter().map(|s| widen(&s.as_slice())).collect();
            Ok(())
        })
        .unwrap();
    let zeros: Vec<_> = masters.iter().map(|m| vec![0.0; m.len()]).collect();
    let sgd = Sgd { masters, momenta: zeros.clone(), gradients: zeros };
    let sgd = Arc::new(Mutex::new(sgd));
    let sink: SharedSink = sgd.clone();

    let steps = EPOCHS * data.len() / BATCH;
    let mut taken = 0;
    let mut losses = Vec::new();
    for step in 0..steps {
        // 1 438 = 2 * 719, so this stride visits every sample once per epoch, in a mixed order.
        let order = (step * BATCH..(step + 1) * BATCH).map(|i| (i * 337) % data.len());
        let batch = data.batch(&order.map(Draw::from).collect::<Vec<_>>()).unwrap();
        let step_losses = train_step(&mut engine, autocast, &batch, scale, &sink).unwrap();
        losses.push(step_losses.scalars().unwrap()[0].1);
        let progress = step as f32 / steps as f32;
        let lr = 0.05 * (1.0 + (std::f32::consts::PI * progress).cos());
        engine
            .with_params(&mut |slices| {
                taken += usize::from(sgd.lock().step(slices, lr, scale));
                Ok(())
            })
            .unwrap();
    }
    assert!(taken > steps * 9 / 10, "{taken} of {steps} steps were finite");
    (losses, accuracy(&mut engine))
}

fn accuracy(engine: &mut CandleEngine) -> f64 {
    let test = Digits::new(Split::Test, 0).unwrap();
    let batch = test.batch(&(0..test.len()).map(Draw::from).collect::<Vec<_>>()).unwrap();
    let outputs = engine.eval(&batch).unwrap();
    let ArrayData::F32(logits) = outputs[0].1.data() else { panic!("logits are f32") };
    let ArrayData::I64(labels) = batch.get("labels").unwrap().data() else { panic!() };
    let right = logits.chunks_exact(10).zip(labels).filter(|(row, label)| {
        let best = (0..10).max_by(|a, b| row[*a].total_cmp(&row[*b])).unwrap();
        best as i64 == **label
    });
    right.count() as f64 / labels.len() as f64
}

#[test]
fn digits_are_learned_in_f32_and_under_autocast() {
    let (wide, accuracy) = train(DType::F32, None, 1.0);
    assert!(accuracy > 0.97, "{accuracy}");
    for (dtype, scale, digits) in [(DType::F16, 65536.0, 11), (DType::Bf16, 1.0, 8)] {
        let (losses, accuracy) = train(DType::F32, Some(dtype), scale);
        assert!(accuracy > 0.97, "{dtype:?}: {accuracy}");
        // Half precision was used, and in the first steps, before differences have grown, losses
        // are within a few roundings of the type's significant bits.
        assert_ne!(losses, wide, "{dtype:?}");
        for (half, wide) in losses.iter().zip(&wide).take(5) {
            let bound = 16.0 * wide * 0.5f64.powi(digits);
            assert!((half - wide).abs() < bound, "{dtype:?}: {losses:?}");
        }
    }
}

#[test]
fn digits_are_learned_with_half_parameters_and_a_loss_scale() {
    let (_, accuracy) = train(DType::F16, None, 65536.0);
    assert!(accuracy > 0.97, "{accuracy}");
}

#[test]
fn losses_of_bf16_parameters_are_those_of_f32_within_a_few_roundings() {
    let [(wide, _), (half, accuracy)] =
        [DType::F32, DType::Bf16].map(|dtype| train(dtype, None, 1.0));
    assert!(accuracy > 0.97, "{accuracy}");
    for (half, wide) in half.iter().zip(&wide).take(5) {
        assert!((half - wide).abs() < 16.0 * wide * 0.5f64.powi(8), "{half}, not {wide}");
    }
}
