//! Trains a convolutional network on generated images of digits, with candle-nn's `VarMap` and
//! candle's own AdamW.
//!
//! ```sh
//! cargo run --release -p gradstack-candle-ops --example train_cnn
//! ```

#![expect(clippy::print_stdout, reason = "an example")]

use candle_core::{DType, Device, Module, ModuleT, Result, Tensor};
use candle_ops::nn::{
    AdamW, BatchNorm, Conv2d, Conv2dConfig, Linear, Optimizer, ParamsAdamW, VarBuilder, VarMap,
    batch_norm, conv2d_no_bias, linear,
};
use candle_ops::{Context, Normalization, Window, cross_entropy, dropout, max_pool2d, normalize};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

struct Cnn {
    conv1: Conv2d,
    norm1: BatchNorm,
    conv2: Conv2d,
    norm2: BatchNorm,
    fc: Linear,
}

impl Cnn {
    fn new(vb: VarBuilder<'_>) -> Result<Self> {
        let conv = Conv2dConfig { padding: 1, ..Conv2dConfig::default() };
        Ok(Self {
            conv1: conv2d_no_bias(1, 16, 3, conv, vb.pp("conv1"))?,
            norm1: batch_norm(16, 1e-5, vb.pp("norm1"))?.with_relu(),
            conv2: conv2d_no_bias(16, 32, 3, conv, vb.pp("conv2"))?,
            norm2: batch_norm(32, 1e-5, vb.pp("norm2"))?.with_relu(),
            fc: linear(32 * 6 * 6, 10, vb.pp("fc"))?,
        })
    }

    /// Logits of images as bytes, `[n, 1, 12, 12]`.
    fn forward(&self, images: &Tensor, train: bool) -> Result<Tensor> {
        let x = normalize(images, &Normalization::default(), DType::F32)?;
        let x = self.norm1.forward_t(&self.conv1.forward(&x)?, train)?;
        let x = max_pool2d(&x, 2, Window { stride: 2, padding: 0 })?;
        let x = self.norm2.forward_t(&self.conv2.forward(&x)?, train)?;
        self.fc.forward(&dropout(&x.flatten_from(1)?, 0.2)?)
    }
}

/// Trains for `steps` batches of 32 images. Returns the loss of the last batch, and the accuracy on
/// other images.
pub(crate) fn train(steps: usize) -> Result<(f32, f64)> {
    let device = Device::Cpu;
    let vars = VarMap::new();
    let model = Cnn::new(VarBuilder::from_varmap(&vars, DType::F32, &device))?;
    let mut adamw = AdamW::new(vars.all_vars(), ParamsAdamW { lr: 2e-3, ..Default::default() })?;
    // Seeds dropout, and times the algorithms of each convolution.
    let mut context = Context::new(0).with_autotune(2);
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    let mut last = f32::NAN;
    for step in 1..=steps {
        let (images, labels) = digits(32, &mut rng, &device)?;
        last = context.enter(|| {
            let loss = cross_entropy(&model.forward(&images, true)?, &labels)?;
            adamw.backward_step(&loss)?;
            loss.to_scalar()
        })?;
        if step % 20 == 0 {
            println!("step {step}: loss {last:.4}");
        }
    }
    let (images, labels) = digits(500, &mut rng, &device)?;
    let logits = context.evaluate(|| model.forward(&images, false))?;
    let right = logits.argmax(1)?.to_dtype(DType::I64)?.eq(&labels)?;
    let accuracy = right.to_dtype(DType::F64)?.mean_all()?.to_scalar()?;
    println!("accuracy on {} other images: {accuracy:.3}", labels.elem_count());
    Ok((last, accuracy))
}

/// Digits 0 to 9 as 3 x 5 bits, by rows.
const GLYPHS: [u16; 10] = [
    0b111_101_101_101_111,
    0b010_110_010_010_111,
    0b111_001_111_100_111,
    0b111_001_111_001_111,
    0b101_101_111_001_001,
    0b111_100_111_001_111,
    0b111_100_111_101_111,
    0b111_001_010_010_010,
    0b111_101_111_101_111,
    0b111_101_111_001_111,
];

/// Generates `count` images of 12 x 12 bytes, and their labels: glyphs of 6 x 10 pixels at random
/// positions, in noise.
fn digits(count: usize, rng: &mut ChaCha8Rng, device: &Device) -> Result<(Tensor, Tensor)> {
    let mut below = |end: u32| (rng.next_u32() % end) as usize;
    let (mut pixels, mut labels) = (Vec::with_capacity(count * 144), Vec::with_capacity(count));
    for _ in 0..count {
        let digit = below(10);
        let (left, top, ink) = (below(7), below(3), 100 + below(56));
        for (y, x) in (0..12_usize).flat_map(|y| (0..12_usize).map(move |x| (y, x))) {
            let bit = y.checked_sub(top).zip(x.checked_sub(left)).map(|(y, x)| (y / 2, x / 2));
            let is_ink = bit.is_some_and(|(row, column)| {
                row < 5 && column < 3 && GLYPHS[digit] >> (14 - 3 * row - column) & 1 == 1
            });
            pixels.push((below(100) + if is_ink { ink } else { 0 }) as u8);
        }
        labels.push(digit as i64);
    }
    Ok((
        Tensor::from_vec(pixels, (count, 1, 12, 12), device)?,
        Tensor::from_vec(labels, count, device)?,
    ))
}

fn main() -> Result<()> {
    train(200).map(|_| ())
}
