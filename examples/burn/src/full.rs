//! The loop of `plain.rs` on any number of ranks, in f16, with a loss scale, clipping,
//! accumulation, a schedule, and exact resume.

use std::path::Path;

use burn::tensor::Device;
use burn_two_processes::lend::Lent;
use burn_two_processes::mlp::{BATCH, BATCHES, LR, Mlp, samples};
use train_step::fused_optim::{AdamW, AdamWHyper, Clip};
use train_step::{Model, Result, Trainer, TrainerBuilder};

pub fn options() -> TrainerBuilder {
    let warm_up = |step| ((step + 1) as f64 / 10.0).min(1.0);
    Trainer::builder().f16().clip(Clip::norm(1.0)).accumulate(2).schedule(warm_up)
}

pub fn train(options: TrainerBuilder, epochs: usize, path: &Path) -> Result<Vec<f64>> {
    let device = Device::flex().autodiff();
    let mut model = Lent::new(Mlp::new(&device))?;
    // burn's defaults, but for the learning rate.
    let hyper = AdamWHyper { lr: LR, eps: 1e-5, weight_decay: 1e-4, ..Default::default() };
    let adamw = AdamW::with_one_group(hyper, model.params().len())?;
    let mut train = options.build(&mut model, Box::new(adamw))?;
    let part = BATCH / train.world_size();
    let rows = train.rank() * part..(train.rank() + 1) * part;
    let mut losses = Vec::new();
    for epoch in train.resume(&mut model, path)?..epochs {
        train.begin_epoch(BATCHES, 0)?;
        for batch in 0..BATCHES {
            let batch = samples(batch, rows.clone(), &device);
            let step = train.step(&mut model, |lent, cx| lent.pass(cx, |mlp| mlp.loss(&batch)))?;
            losses.extend(train.mean([step.loss])?);
        }
        train.save(&mut model, path, epoch + 1)?;
    }
    Ok(losses)
}
