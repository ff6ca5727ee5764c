//! Trains a generator and a discriminator of small images (a DCGAN): two trainers with one
//! checkpoint, so that a run that is killed goes on with both at the same batch.
//!
//! ```sh
//! cargo run --release -p gradstack-candle-train --example gan FILE EPOCHS
//! launch --nproc-per-node 2 -- target/release/examples/gan FILE EPOCHS
//! ```
//!
//! The images are discs of random places and sizes.

#![expect(clippy::print_stdout, reason = "an example shows its result")]

use std::path::Path;

use candle_core::{DType, Device, Result, Tensor};
use candle_ops::nn::loss::binary_cross_entropy_with_logit;
use candle_ops::nn::{
    BatchNorm, Conv2d, Conv2dConfig, ConvTranspose2d, ConvTranspose2dConfig, Linear, Module,
    ModuleT, VarBuilder, VarMap, batch_norm, conv_transpose2d, conv2d, linear,
};
use candle_ops::{randn, relu};
use candle_train::{AdamWHyper, Parts, Trainer, seeded};

const SIDE: usize = 16;
const NOISE: usize = 16;
const WIDTH: usize = 16;
const SAMPLES: usize = 512;
const CPU: Device = Device::Cpu;

struct Generator(Linear, BatchNorm, ConvTranspose2d, BatchNorm, ConvTranspose2d);

impl Generator {
    fn new(vb: VarBuilder<'_>) -> Result<Self> {
        let up = ConvTranspose2dConfig { stride: 2, padding: 1, ..Default::default() };
        Ok(Self(
            linear(NOISE, 2 * WIDTH * 16, vb.pp("fc"))?,
            batch_norm(2 * WIDTH, 1e-5, vb.pp("norm1"))?,
            conv_transpose2d(2 * WIDTH, WIDTH, 4, up, vb.pp("up1"))?,
            batch_norm(WIDTH, 1e-5, vb.pp("norm2"))?,
            conv_transpose2d(WIDTH, 1, 4, up, vb.pp("up2"))?,
        ))
    }

    /// Makes `count` images.
    fn draw(&self, count: usize) -> Result<Tensor> {
        let noise = randn(0.0, 1.0, (count, NOISE), DType::F32, &CPU)?;
        let x = self.0.forward(&noise)?.reshape((count, 2 * WIDTH, 4, 4))?;
        let x = self.2.forward(&relu(&self.1.forward_t(&x, true)?)?)?;
        self.4.forward(&relu(&self.3.forward_t(&x, true)?)?)?.tanh()
    }
}

struct Discriminator(Conv2d, Conv2d, Linear);

impl Discriminator {
    fn new(vb: VarBuilder<'_>) -> Result<Self> {
        let down = Conv2dConfig { stride: 2, padding: 1, ..Default::default() };
        Ok(Self(
            conv2d(1, WIDTH, 4, down, vb.pp("down1"))?,
            conv2d(WIDTH, 2 * WIDTH, 4, down, vb.pp("down2"))?,
            linear(2 * WIDTH * 16, 1, vb.pp("fc"))?,
        ))
    }

    /// Cross entropy of the claim that all images are real, or that none is.
    fn loss(&self, images: &Tensor, is_real: bool) -> Result<Tensor> {
        let x = candle_nn::ops::leaky_relu(&self.0.forward(images)?, 0.2)?;
        let x = candle_nn::ops::leaky_relu(&self.1.forward(&x)?, 0.2)?;
        let logits = self.2.forward(&x.flatten_from(1)?)?.to_dtype(DType::F32)?;
        let labels = (logits.zeros_like()? + f64::from(u8::from(is_real)))?;
        binary_cross_entropy_with_logit(&logits, &labels)
    }
}

/// Discs of -1 and 1, by their numbers.
fn images(rows: &[u32]) -> Result<Tensor> {
    let pixel = |row: u32, at: usize| {
        let (x, y) = ((at % SIDE) as f32, (at / SIDE) as f32);
        let [cx, cy, radius] = [7, 13, 29].map(|prime| (row * prime % 31) as f32 / 31.0);
        let far = (x - 4.0 - 8.0 * cx).hypot(y - 4.0 - 8.0 * cy);
        if far < 2.0 + 3.0 * radius { 1.0_f32 } else { -1.0 }
    };
    let all = rows.iter().flat_map(|row| (0..SIDE * SIDE).map(|at| pixel(*row, at)));
    Tensor::from_vec(all.collect::<Vec<_>>(), (rows.len(), 1, SIDE, SIDE), &CPU)
}

/// Trains up to this number of epochs, and returns the last losses of both.
pub(crate) fn train(run: &Path, epochs: usize) -> candle_train::Result<[f64; 2]> {
    let (g_vars, d_vars) = (VarMap::new(), VarMap::new());
    let generator = Generator::new(seeded(&g_vars, 1, DType::F32, &CPU))?;
    let discriminator = Discriminator::new(seeded(&d_vars, 2, DType::F32, &CPU))?;
    let hyper = AdamWHyper { lr: 1e-3, betas: (0.5, 0.999), ..Default::default() };
    let mut g = Trainer::builder(&g_vars).part("generator").build(hyper)?;
    let d = Trainer::builder(&d_vars).part("discriminator").group(g.group().clone());
    let mut d = d.build(hyper)?;

    let mut losses = [f64::NAN; 2];
    for epoch in Parts::of([&mut g, &mut d]).resume(run)?..epochs {
        for rows in d.batches(SAMPLES, 32, epoch)? {
            let real = images(&rows)?;
            let judged = d.step(|| {
                let fake = generator.draw(rows.len())?.detach();
                discriminator.loss(&real, true)? + discriminator.loss(&fake, false)?
            })?;
            // Gradients of the discriminator's variables are dropped.
            let made = g.step(|| discriminator.loss(&generator.draw(rows.len())?, true))?;
            losses = [g.mean(&made.loss)?, d.mean(&judged.loss)?];
        }
        Parts::of([&mut g, &mut d]).save(run, epoch + 1)?;
        if g.is_main() {
            let [made, judged] = losses;
            println!("epoch {epoch}: generator {made:.3}, discriminator {judged:.3}");
        }
    }
    Ok(losses)
}

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let run = arguments.next().unwrap_or_else(|| "target/gan.safetensors".into());
    let epochs = arguments.next().map_or(Ok(10), |epochs| epochs.parse())?;
    train(Path::new(&run), epochs)?;
    Ok(())
}
