//! Trains a U-Net to find discs in noisy images: a data set, a run that resumes by itself, averaged
//! weights, the best epoch.
//!
//! ```sh
//! cargo run --release -p gradstack-candle-train --example unet FILE EPOCHS
//! launch --nproc-per-node 2 -- target/release/examples/unet FILE EPOCHS
//! ```

#![expect(clippy::print_stdout, reason = "an example shows its result")]

use std::path::Path;
use std::sync::Arc;

use candle_core::{DType, Device, Result, Tensor};
use candle_ops::nn::loss::binary_cross_entropy_with_logit;
use candle_ops::nn::{
    Conv2d, Conv2dConfig, GroupNorm, Module, VarBuilder, VarMap, conv2d, group_norm,
};
use candle_ops::{Window, max_pool2d, relu, upsample_nearest2d};
use candle_train::train_data::{Array, BoxError, DataLoader, Dataset, Sample, SampleRng, Workers};
use candle_train::{AdamWHyper, Fields, Trainer, WeightAverage, seeded};
use rand_chacha::rand_core::Rng;

const SIDE: usize = 32;
const WIDTH: usize = 8;

/// Images of a disc in noise, with a mask of the disc.
struct Discs(usize);

impl Dataset for Discs {
    fn len(&self) -> usize {
        self.0
    }

    fn sample(
        &self,
        index: usize,
        random: &mut SampleRng,
    ) -> std::result::Result<Sample, BoxError> {
        let [cx, cy, radius] =
            [37, 71, 113].map(|prime| (index * prime % 101) as f32 / 101.0 * 16.0 + 4.0);
        let inside = |at: usize| {
            ((at % SIDE) as f32 - 4.0 - cx).hypot((at / SIDE) as f32 - 4.0 - cy) < radius / 2.0
        };
        let mask: Vec<f32> = (0..SIDE * SIDE).map(|at| f32::from(u8::from(inside(at)))).collect();
        let mut noise = || random.next_u32() as f32 / u32::MAX as f32;
        let image: Vec<f32> = mask.iter().map(|mask| mask + 0.6 * noise()).collect();
        let shape = [1, SIDE, SIDE];
        Ok(Sample::new()
            .with("image", Array::new(shape, image)?)
            .with("mask", Array::new(shape, mask)?))
    }
}

/// Two convolutions with a norm each.
struct Block(Conv2d, GroupNorm, Conv2d, GroupNorm);

impl Block {
    fn new(from: usize, to: usize, vb: VarBuilder<'_>) -> Result<Self> {
        let same = Conv2dConfig { padding: 1, ..Default::default() };
        Ok(Self(
            conv2d(from, to, 3, same, vb.pp("conv1"))?,
            group_norm(4, to, 1e-5, vb.pp("norm1"))?,
            conv2d(to, to, 3, same, vb.pp("conv2"))?,
            group_norm(4, to, 1e-5, vb.pp("norm2"))?,
        ))
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let x = relu(&self.1.forward(&self.0.forward(x)?)?)?;
        relu(&self.3.forward(&self.2.forward(&x)?)?)
    }
}

/// Three levels, with the features of each level's way down beside those of its way up.
struct UNet {
    down: [Block; 3],
    up: [Block; 2],
    head: Conv2d,
}

impl UNet {
    fn new(vb: VarBuilder<'_>) -> Result<Self> {
        let block = |from, to, name: &str| Block::new(from * WIDTH, to * WIDTH, vb.pp(name));
        Ok(Self {
            down: [
                Block::new(1, WIDTH, vb.pp("down0"))?,
                block(1, 2, "down1")?,
                block(2, 4, "down2")?,
            ],
            up: [block(4 + 2, 2, "up1")?, block(2 + 1, 1, "up0")?],
            head: conv2d(WIDTH, 1, 1, Conv2dConfig::default(), vb.pp("head"))?,
        })
    }

    /// Logits of the mask.
    fn forward(&self, image: &Tensor) -> Result<Tensor> {
        let half = |x: &Tensor| max_pool2d(x, 2, Window { stride: 2, padding: 0 });
        let a = self.down[0].forward(image)?;
        let b = self.down[1].forward(&half(&a)?)?;
        let mut x = self.down[2].forward(&half(&b)?)?;
        for (block, beside) in self.up.iter().zip([b, a]) {
            let (_, _, height, width) = beside.dims4()?;
            x = block
                .forward(&Tensor::cat(&[&upsample_nearest2d(&x, height, width)?, &beside], 1)?)?;
        }
        self.head.forward(&x)
    }

    fn loss(&self, fields: &Fields) -> Result<Tensor> {
        binary_cross_entropy_with_logit(&self.forward(fields.get("image")?)?, fields.get("mask")?)
    }
}

/// Trains up to this number of epochs, and returns how well discs of other images are found.
pub(crate) fn train(run: &Path, epochs: usize) -> std::result::Result<f64, BoxError> {
    let vars = VarMap::new();
    let net = UNet::new(seeded(&vars, 1, DType::F32, &Device::Cpu))?;
    let ema = WeightAverage::Ema { decay: 0.9 };
    let mut train = Trainer::builder(&vars)
        .average(ema)
        .build(AdamWHyper { lr: 1e-2, ..Default::default() })?;
    let loader = DataLoader::builder(Arc::new(Discs(128)), train.sampler(128)).batch_size(8);
    let test = DataLoader::builder(Arc::new(Discs(32)), train.eval_sampler(32)).batch_size(8);
    let test = test.build()?;
    let loader = loader.workers(Workers::new(1)).build()?;
    let mut run = train.resumable(loader, run, epochs)?.every(10).patience(5);
    while let Some(epoch) = run.next_epoch(&mut train)? {
        while let Some(batch) = run.next_batch(&mut train)? {
            train.step_on(&batch, |fields| net.loss(fields))?;
        }
        let iou = evaluate(&mut train, &net, &test)?;
        if run.keep_best(&mut train, iou)? && train.is_main() {
            println!("epoch {epoch}: {iou:.3}");
        }
    }
    evaluate(&mut train, &net, &test)
}

/// The intersection of the found and the right discs over their union.
fn evaluate(
    train: &mut Trainer,
    net: &UNet,
    test: &DataLoader,
) -> std::result::Result<f64, BoxError> {
    let mut counts = [0.0; 2];
    for batch in test.batches(0) {
        let batch = batch?;
        let (image, mask) = (train.tensor(batch.get("image")?)?, train.tensor(batch.get("mask")?)?);
        let found = train.evaluate(|| net.forward(&image))?.gt(0.0)?.to_dtype(DType::F32)?;
        let sum = |x: Tensor| x.sum_all()?.to_scalar::<f32>();
        let both = sum((&found * &mask)?)?;
        counts[0] += f64::from(both);
        counts[1] += f64::from(sum((found + mask)?)? - both);
    }
    let [both, either] = train.sum(counts)?;
    Ok(both / either)
}

fn main() -> std::result::Result<(), BoxError> {
    let mut arguments = std::env::args().skip(1);
    let run = arguments.next().unwrap_or_else(|| "target/unet.safetensors".into());
    let epochs = arguments.next().map_or(Ok(10), |epochs| epochs.parse())?;
    train(Path::new(&run), epochs)?;
    Ok(())
}
