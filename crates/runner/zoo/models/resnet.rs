//! Residual networks of basic blocks, for small images as well as large.
//!
//! Follows: torchvision's `resnet.py` (`BasicBlock`, parameter names), with the stem of the CIFAR
//! networks by default. Convolutions start with PyTorch's default instead of torchvision's
//! `kaiming_normal_`; batch normalisation follows each, so little depends on it.

use candle_core::{Module, ModuleT, Result, Tensor, bail};

use super::{classification_loss, inputs};
use runner::engine::candle::nn::{
    BatchNorm, Conv2d, Conv2dConfig, Linear, VarBuilder, batch_norm, conv2d_no_bias, linear,
};
use runner::engine::candle::ops::{self, Normalization, Window};
use runner::engine::candle::{CandleModel, Loss, Outputs, TensorBatch};

/// Shape of a [`ResNet`].
#[derive(Clone, Debug, PartialEq)]
pub struct ResNetOptions {
    /// Channels of an image. Defaults to 1.
    pub in_channels: usize,
    /// Classes. Defaults to 10.
    pub num_classes: usize,
    /// Channels of the first stage; each following stage has twice as many. Defaults to 16.
    pub width: usize,
    /// Blocks of each stage; each stage but the first halves the image. Defaults to
    /// `[2, 2, 2, 2]`, a ResNet-18.
    pub blocks: Vec<usize>,
    /// Kernel of the first convolution. Defaults to 3; 7 for large images.
    pub stem_kernel: usize,
    /// Stride of the first convolution. Defaults to 1; 2 for large images.
    pub stem_stride: usize,
    /// Whether a 3 x 3 / stride 2 max-pool follows the first convolution. Defaults to false.
    pub stem_max_pool: bool,
    /// How bytes become numbers. Defaults to 0..1.
    pub normalization: Normalization,
}

impl Default for ResNetOptions {
    fn default() -> Self {
        Self {
            in_channels: 1,
            num_classes: 10,
            width: 16,
            blocks: vec![2, 2, 2, 2],
            stem_kernel: 3,
            stem_stride: 1,
            stem_max_pool: false,
            normalization: Normalization::default(),
        }
    }
}

/// A residual network: stem, stages of [`ResNetOptions::blocks`], mean over the image, `fc`.
///
/// Parameters have torchvision's names: `conv1.weight`, `bn1.weight`, `layer1.0.conv1.weight`,
/// `layer2.0.downsample.0.weight`, `fc.bias`.
#[derive(Debug)]
pub struct ResNet {
    conv1: Conv2d,
    bn1: BatchNorm,
    max_pool: bool,
    blocks: Vec<BasicBlock>,
    fc: Linear,
    normalization: Normalization,
}

impl ResNet {
    /// Builds the layers.
    ///
    /// # Errors
    ///
    /// Those of the builder; options without a stage, or with an even stem kernel.
    pub fn new(options: &ResNetOptions, vb: VarBuilder<'_>) -> Result<Self> {
        if options.blocks.is_empty() || options.stem_kernel.is_multiple_of(2) {
            bail!("a ResNet has at least one stage and an odd stem kernel: {options:?}");
        }
        let stem = Conv2dConfig {
            stride: options.stem_stride,
            padding: options.stem_kernel / 2,
            ..Conv2dConfig::default()
        };
        let conv1 = conv2d_no_bias(
            options.in_channels,
            options.width,
            options.stem_kernel,
            stem,
            vb.pp("conv1"),
        )?;
        let bn1 = norm(options.width, true, &vb.pp("bn1"))?;
        let mut blocks = Vec::new();
        let mut channels = options.width;
        for (stage, count) in options.blocks.iter().enumerate() {
            let vb = vb.pp(format!("layer{}", stage + 1));
            let out_channels = options.width << stage;
            for block in 0..*count {
                let stride = if stage > 0 && block == 0 { 2 } else { 1 };
                blocks.push(BasicBlock::new(channels, out_channels, stride, &vb.pp(block))?);
                channels = out_channels;
            }
        }
        let fc = linear(channels, options.num_classes, vb.pp("fc"))?;
        let normalization = options.normalization.clone();
        Ok(Self { conv1, bn1, max_pool: options.stem_max_pool, blocks, fc, normalization })
    }

    fn logits(&self, batch: &TensorBatch, train: bool) -> Result<Tensor> {
        self.forward_t(&inputs(batch, &self.normalization)?, train)
    }
}

/// Logits of images that are normalised already.
impl ModuleT for ResNet {
    fn forward_t(&self, images: &Tensor, train: bool) -> Result<Tensor> {
        let mut x = self.conv1.forward(images)?;
        x = self.bn1.forward_t(&x, train)?;
        if self.max_pool {
            x = ops::max_pool2d(&x, 3, Window { stride: 2, padding: 1 })?;
        }
        for block in &self.blocks {
            x = block.forward_t(&x, train)?;
        }
        self.fc.forward(&ops::global_avg_pool(&x)?)
    }
}

impl CandleModel for ResNet {
    fn loss(&self, batch: &TensorBatch) -> Result<Loss> {
        classification_loss(&self.logits(batch, true)?, batch)
    }

    fn predict(&self, batch: &TensorBatch) -> Result<Outputs> {
        Ok(Outputs::new().with("logits", self.logits(batch, false)?))
    }
}

/// `relu(bn2(conv2(relu(bn1(conv1(x))))) + shortcut(x))`.
#[derive(Debug)]
struct BasicBlock {
    conv1: Conv2d,
    bn1: BatchNorm,
    conv2: Conv2d,
    bn2: BatchNorm,
    /// Brings `x` to the block's shape where that differs.
    downsample: Option<(Conv2d, BatchNorm)>,
}

impl BasicBlock {
    fn new(
        in_channels: usize,
        channels: usize,
        stride: usize,
        vb: &VarBuilder<'_>,
    ) -> Result<Self> {
        let conv = |from, kernel: usize, stride, vb| {
            let config = Conv2dConfig { stride, padding: kernel / 2, ..Conv2dConfig::default() };
            conv2d_no_bias(from, channels, kernel, config, vb)
        };
        let conv1 = conv(in_channels, 3, stride, vb.pp("conv1"))?;
        let bn1 = norm(channels, true, &vb.pp("bn1"))?;
        let conv2 = conv(channels, 3, 1, vb.pp("conv2"))?;
        let bn2 = norm(channels, false, &vb.pp("bn2"))?;
        let downsample = if stride != 1 || in_channels != channels {
            let vb = vb.pp("downsample");
            Some((conv(in_channels, 1, stride, vb.pp(0))?, norm(channels, false, &vb.pp(1))?))
        } else {
            None
        };
        Ok(Self { conv1, bn1, conv2, bn2, downsample })
    }
}

impl ModuleT for BasicBlock {
    fn forward_t(&self, x: &Tensor, train: bool) -> Result<Tensor> {
        let y = self.bn1.forward_t(&self.conv1.forward(x)?, train)?;
        let y = self.bn2.forward_t(&self.conv2.forward(&y)?, train)?;
        match &self.downsample {
            Some((conv, norm)) => ops::add_relu(&y, &norm.forward_t(&conv.forward(x)?, train)?),
            None => ops::add_relu(&y, x),
        }
    }
}

fn norm(channels: usize, relu: bool, vb: &VarBuilder<'_>) -> Result<BatchNorm> {
    let norm = batch_norm(channels, 1e-5, vb.clone())?;
    Ok(if relu { norm.with_relu() } else { norm })
}
