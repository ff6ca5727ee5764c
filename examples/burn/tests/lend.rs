//! `Lent` with running statistics and frozen weights.

use std::path::Path;

use amp::{LossScaler, LossScalerOptions};
use burn::module::Module;
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::tensor::{Device, Tensor};
use burn_two_processes::lend::Lent;
use burn_two_processes::mlp::{BATCH, BATCHES, samples};
use train_step::fused_optim::{AdamW, AdamWHyper};
use train_step::{Model, Outcome, Result, TensorSpec, Trainer};

#[derive(Module, Debug)]
struct Net {
    hidden: Linear,
    norms: Vec<BatchNorm>,
    output: Linear,
}

impl Net {
    fn new(device: &Device) -> Self {
        device.seed(0);
        Self {
            hidden: LinearConfig::new(8, 16).init(device).no_grad(),
            norms: vec![BatchNormConfig::new(16).init(device)],
            output: LinearConfig::new(16, 1).init(device),
        }
    }

    fn loss(&self, inputs: Tensor<2>, targets: Tensor<2>) -> Tensor<1> {
        let hidden = self.norms[0].forward(self.hidden.forward(inputs)).tanh();
        (self.output.forward(hidden) - targets).square().mean()
    }
}

/// Trains on one rank, in each epoch also on a batch of infinities if `skips`. Returns the losses
/// of the other batches.
fn train(epochs: usize, path: &Path, skips: bool) -> Result<Vec<f64>> {
    let device = Device::flex().autodiff();
    let mut model = Lent::new(Net::new(&device))?;
    let adamw = AdamW::with_one_group(AdamWHyper::default(), model.params().len())?;
    let scaler = LossScaler::new(LossScalerOptions::default())?;
    let mut train = Trainer::builder().loss_scaler(scaler).build(&mut model, Box::new(adamw))?;
    let mut losses = Vec::new();
    for epoch in train.resume(&mut model, path)?..epochs {
        for batch in 0..BATCHES {
            let (x, y) = samples(batch, 0..BATCH, &device);
            if skips && batch == 1 {
                let (x, y) = (x.clone().mul_scalar(f32::INFINITY), y.clone());
                let step =
                    train.step(&mut model, |lent, cx| lent.pass(cx, |net| net.loss(x, y)))?;
                assert!(matches!(step.outcome, Outcome::Skipped { .. }), "{step:?}");
            }
            let step = train.step(&mut model, |lent, cx| lent.pass(cx, |net| net.loss(x, y)))?;
            assert_eq!(step.outcome, Outcome::Updated);
            losses.push(step.loss);
        }
        train.save(&mut model, path, epoch + 1)?;
    }
    Ok(losses)
}

fn names(specs: &[TensorSpec]) -> Vec<&str> {
    specs.iter().map(|spec| &*spec.name).collect()
}

#[test]
fn tensors_have_burns_paths_by_kind() {
    let model = Lent::new(Net::new(&Device::flex().autodiff())).unwrap();
    let trained = ["norms.0.gamma", "norms.0.beta", "output.weight", "output.bias"];
    assert_eq!(names(model.params()), trained);
    assert_eq!(names(model.buffers()), ["norms.0.running_mean", "norms.0.running_var"]);
    assert_eq!(names(model.frozen()), ["hidden.weight", "hidden.bias"]);
    assert_eq!(model.frozen()[0].shape, [8, 16]);
}

#[test]
fn resume_and_skipped_steps_change_no_bit() {
    let folder = std::env::temp_dir().join(format!("burn-lend-{}", std::process::id()));
    std::fs::create_dir(&folder).unwrap();
    let [whole, halves, skipping] = ["whole", "halves", "skipping"].map(|name| folder.join(name));
    let losses = train(4, &whole, false).unwrap();
    let first = train(2, &halves, false).unwrap();
    assert_eq!([first, train(4, &halves, false).unwrap()].concat(), losses);
    // All tensors are in the file, running statistics included.
    assert!(std::fs::read(&whole).unwrap() == std::fs::read(&halves).unwrap());
    assert_eq!(train(4, &skipping, true).unwrap(), losses);
    std::fs::remove_dir_all(&folder).unwrap();
}
