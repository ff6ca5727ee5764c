//! A plain loop of burn's, in one process and f32.

use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::Device;
use burn_two_processes::mlp::{BATCH, BATCHES, EPOCHS, LR, Mlp, samples};

pub fn train() -> Vec<f64> {
    let device = Device::flex().autodiff();
    let mut model = Mlp::new(&device);
    let mut adamw = AdamWConfig::new().init();
    let mut losses = Vec::new();
    for _ in 0..EPOCHS {
        for batch in 0..BATCHES {
            let loss = model.loss(&samples(batch, 0..BATCH, &device));
            losses.push(loss.clone().into_scalar::<f64>());
            let grads = GradientsParams::from_grads(loss.backward(), &model);
            model = adamw.step(LR, model, grads);
        }
    }
    losses
}
