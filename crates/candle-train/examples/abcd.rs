//! The model of `base.rs`, trained data-parallel with any launcher, in f16, with fused AdamW,
//! dropout, checkpoints and exact resuming:
//! `launch --nproc-per-node 2 -- target/debug/examples/abcd`.

#![expect(clippy::print_stdout, reason = "an example shows its result")]

use candle_core::{DType, Device, Module, Tensor};
use candle_nn::{VarBuilder, VarMap};
use candle_ops::nn::{Linear, linear};
use candle_ops::{cross_entropy, dropout, relu};
use candle_train::{AdamWHyper, Trainer};

#[path = "points/mod.rs"]
mod points;
use points::{CLASSES, FEATURES, batch, data};

struct Net(Linear, Linear);

impl Net {
    fn new(vb: VarBuilder<'_>) -> candle_core::Result<Self> {
        Ok(Self(linear(FEATURES, 64, vb.pp("a"))?, linear(64, CLASSES, vb.pp("b"))?))
    }
}

impl Module for Net {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        self.1.forward(&dropout(&relu(&self.0.forward(x)?)?, 0.1)?)
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let path = std::env::args().nth(1).unwrap_or_else(|| "abcd.safetensors".into());
    let (x, y) = data(2048)?;
    let vars = VarMap::new();
    let net = Net::new(VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu))?;
    let hyper = AdamWHyper { lr: 1e-2, ..Default::default() };
    let mut train = Trainer::builder(&vars).f16().build(hyper)?;
    for epoch in train.resume(&path)?..6 {
        let mut last = 0.0;
        for rows in train.batches(2048, 64, epoch)? {
            let (xs, ys) = batch(&x, &y, &rows)?;
            let loss = train.step(|| cross_entropy(&net.forward(&xs)?, &ys))?.loss;
            last = train.mean(&loss)?;
        }
        train.save(&path, epoch + 1)?;
        if train.is_main() {
            println!("epoch {epoch}: loss {last:.4}, loss scale {}", train.loss_scale());
        }
    }
    Ok(())
}
