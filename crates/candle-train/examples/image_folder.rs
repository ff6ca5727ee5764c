//! Trains a small convolutional network on JPEG and PNG files, in one folder per class:
//!
//! ```sh
//! cargo run --release -p gradstack-candle-train --example image_folder FOLDER EPOCHS
//! launch --nproc-per-node 2 -- target/release/examples/image_folder FOLDER EPOCHS
//! ```
//!
//! `FOLDER/train` and `FOLDER/val` have the same classes. Without a folder it generates one with
//! striped images. An interrupted run resumes after the last epoch that it saved.

#![expect(clippy::print_stdout, reason = "an example shows its result")]

use std::path::Path;
use std::sync::Arc;

use candle_core::{D, DType, Device, Module, Tensor};
use candle_ops::nn::{Conv2d, Conv2dConfig, Linear, VarBuilder, VarMap, conv2d, linear};
use candle_ops::{cross_entropy, relu};
use candle_train::{AdamWHyper, Trainer, tensor};
use train_data::transforms::{
    CenterCrop, ColorJitter, Normalize, Pipeline, RandomFlip, RandomResizedCrop, Resize,
    Transformed,
};
use train_data::{Batch, DataLoader, Dataset, DefaultSampler, ImageFolder, Workers};

type Result<T, E = Box<dyn std::error::Error + Send + Sync>> = std::result::Result<T, E>;

/// Height and width of the network's input images.
const SIZE: usize = 32;
const BATCH_SIZE: usize = 16;

struct Net {
    convolutions: Vec<Conv2d>,
    classify: Linear,
}

impl Net {
    fn new(classes: usize, vb: VarBuilder<'_>) -> candle_core::Result<Self> {
        let config = Conv2dConfig { stride: 2, padding: 1, ..Default::default() };
        let convolution = |(layer, [from, to]): (usize, [usize; 2])| {
            conv2d(from, to, 3, config, vb.pp("convolutions").pp(layer))
        };
        let widths = [[3, 16], [16, 32], [32, 64]];
        let convolutions = widths.into_iter().enumerate().map(convolution);
        let convolutions = convolutions.collect::<candle_core::Result<_>>()?;
        Ok(Self { convolutions, classify: linear(64, classes, vb.pp("classify"))? })
    }
}

impl Module for Net {
    fn forward(&self, images: &Tensor) -> candle_core::Result<Tensor> {
        let mut x = images.clone();
        for convolution in &self.convolutions {
            x = relu(&convolution.forward(&x)?)?;
        }
        self.classify.forward(&x.flatten_from(2)?.mean(D::Minus1)?)
    }
}

/// The loader of this rank's images: of training, in a new order each epoch and with augmentation,
/// or of validation.
fn loader(folder: &Path, is_training: bool, train: &Trainer) -> Result<DataLoader> {
    let normalize = Normalize::new([123.675, 116.28, 103.53], [58.395, 57.12, 57.375]);
    let pipeline = if is_training {
        Pipeline::new()
            .then(RandomResizedCrop { scale: [0.5, 1.0], ..RandomResizedCrop::square(SIZE) })
            .then(RandomFlip::default())
            .then(ColorJitter::new(0.4, 0.4, 0.4, 0.1))
    } else {
        Pipeline::new().then(Resize::short_edge(SIZE * 8 / 7)).then(CenterCrop::square(SIZE))
    };
    let images = Transformed::new(ImageFolder::new(folder)?, pipeline.then(normalize));
    // In training all ranks have the same number of images, in validation each image is on one
    // rank.
    let sampler = DefaultSampler {
        shuffle: is_training,
        round_up: is_training,
        ..train.sampler(images.len())
    };
    let builder = DataLoader::builder(Arc::new(images), sampler).batch_size(BATCH_SIZE);
    Ok(builder.workers(Workers::new(2)).build()?)
}

fn tensors(batch: &Batch) -> Result<(Tensor, Tensor)> {
    let field = |name| -> Result<Tensor> { Ok(tensor(batch.get(name)?, &Device::Cpu)?) };
    Ok((field("inputs")?, field("labels")?))
}

/// Trains, and returns the validation accuracy.
pub(crate) fn train(folder: &Path, run: &Path, epochs: usize) -> Result<f64> {
    let classes = ImageFolder::new(folder.join("train"))?.classes().len();
    let vars = VarMap::new();
    let net = Net::new(classes, VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu))?;
    let hyper = AdamWHyper { lr: 3e-3, ..Default::default() };
    let mut train = Trainer::builder(&vars).seed(1).build(hyper)?;
    let images = loader(&folder.join("train"), true, &train)?;
    let unseen = loader(&folder.join("val"), false, &train)?;
    let mut accuracy = 0.0;
    for epoch in train.resume(run)?..epochs {
        let mut last = 0.0;
        for batch in train.batches_of(&images, epoch)? {
            let (images, labels) = tensors(&batch?)?;
            let loss = train.step(|| cross_entropy(&net.forward(&images)?, &labels))?.loss;
            last = train.mean(&loss)?;
        }
        train.save(run, epoch + 1)?;
        let (mut right, mut seen) = (0.0, 0.0);
        for batch in unseen.batches(0) {
            let (images, labels) = tensors(&batch?)?;
            let found = train.evaluate(|| net.forward(&images))?.argmax(D::Minus1)?;
            let found = found.to_dtype(DType::I64)?.eq(&labels)?.to_dtype(DType::F64)?;
            (right, seen) =
                (right + found.sum_all()?.to_scalar::<f64>()?, seen + found.dim(0)? as f64);
        }
        let [right, seen] = train.sum([right, seen])?;
        accuracy = right / seen;
        if train.is_main() {
            println!("epoch {epoch}: loss {last:.4}, {:.1} % right", 100.0 * accuracy);
        }
    }
    Ok(accuracy)
}

/// Generates images of different sizes, with stripes in one of three directions, in two formats.
pub(crate) fn make_images(folder: &Path) -> Result<()> {
    for (split, count) in [("train", 40), ("val", 16)] {
        for (class, [by_x, by_y]) in [("across", [0, 1]), ("down", [1, 0]), ("slanted", [1, 1])] {
            std::fs::create_dir_all(folder.join(split).join(class))?;
            for index in 0..count {
                let (width, height) = (48 + index % 7, 40 + index % 11);
                let stripe = |x, y| match (by_x * x + by_y * y + index) / 4 % 2 {
                    0 => image::Rgb([40, 60, (index * 5) as u8]),
                    _ => image::Rgb([(90 + index * 4) as u8, 200, 190]),
                };
                let name = format!("{index}.{}", if index % 2 == 0 { "jpg" } else { "png" });
                let image = image::RgbImage::from_fn(width, height, stripe);
                image.save(folder.join(split).join(class).join(name))?;
            }
        }
    }
    Ok(())
}

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let folder = arguments.next().unwrap_or_else(|| "target/image_folder".into());
    let folder = Path::new(&folder);
    let epochs = arguments.next().map_or(Ok(10), |epochs| epochs.parse())?;
    if !folder.join("train").exists() {
        make_images(folder)?;
    }
    train(folder, &folder.join("run.safetensors"), epochs).map(drop)
}
