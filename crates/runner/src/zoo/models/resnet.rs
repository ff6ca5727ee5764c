//! Residual networks of basic blocks or bottlenecks, for small images as well as large.
//!
//! Follows: torchvision's `resnet.py` (`BasicBlock`, `Bottleneck` with the stride in its 3 x 3
//! convolution, parameter names), with the stem of the CIFAR networks by default. Convolutions have
//! PyTorch's default initial values instead of torchvision's `kaiming_normal_`; because each is
//! followed by batch normalization, the difference is small.

use candle_core::{Module, ModuleT, Result, Tensor, bail};

use super::{classification_loss, inputs};
use crate::engine::candle::nn::{
    BatchNorm, Conv2d, Conv2dConfig, Linear, VarBuilder, batch_norm, conv2d_no_bias, linear,
};
use crate::engine::candle::ops::{self, Normalization, Window};
use crate::engine::candle::{CandleModel, Loss, Outputs, TensorBatch};

/// Options of a [`ResNet`].
#[derive(Clone, Debug, PartialEq)]
pub struct ResNetOptions {
    /// Channels of an image. Defaults to 1.
    pub in_channels: usize,
    /// Number of classes. Defaults to 10.
    pub num_classes: usize,
    /// Channels of the first stage; each following stage has twice as many. Defaults to 16.
    pub width: usize,
    /// Number of blocks of each stage; each stage but the first halves the image. Defaults to
    /// `[2, 2, 2, 2]`, a ResNet-18.
    pub blocks: Vec<usize>,
    /// Whether blocks are bottlenecks of 1 x 1, 3 x 3 and 1 x 1 convolutions, with four times a
    /// stage's channels as output; `[3, 4, 6, 3]` of them are a ResNet-50. Defaults to false.
    pub bottleneck: bool,
    /// Kernel size of the first convolution. Defaults to 3; 7 is common for large images.
    pub stem_kernel: usize,
    /// Stride of the first convolution. Defaults to 1; 2 is common for large images.
    pub stem_stride: usize,
    /// Whether a 3 x 3 / stride 2 max-pool follows the first convolution. Defaults to false.
    pub stem_max_pool: bool,
    /// Normalization of bytes. Defaults to the range 0..1.
    pub normalization: Normalization,
}

impl Default for ResNetOptions {
    fn default() -> Self {
        Self {
            in_channels: 1,
            num_classes: 10,
            width: 16,
            blocks: vec![2, 2, 2, 2],
            bottleneck: false,
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
    blocks: Vec<Block>,
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
            bail!("a ResNet needs at least one stage and an odd stem kernel, got {options:?}");
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
            let width = options.width << stage;
            for block in 0..*count {
                let stride = if stage > 0 && block == 0 { 2 } else { 1 };
                let of = (options.bottleneck, stride);
                let (block, out_channels) = Block::new(channels, width, of, &vb.pp(block))?;
                blocks.push(block);
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

/// Returns the logits of normalized images.
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

/// `relu(branch(x) + shortcut(x))`; the branch consists of convolutions with norms, and ReLU after
/// all but the last.
#[derive(Debug)]
struct Block {
    branch: Vec<(Conv2d, BatchNorm)>,
    /// Converts `x` to the block's shape if that differs.
    downsample: Option<(Conv2d, BatchNorm)>,
}

impl Block {
    /// Builds a block; also returns its number of output channels.
    fn new(
        in_channels: usize,
        width: usize,
        (bottleneck, stride): (bool, usize),
        vb: &VarBuilder<'_>,
    ) -> Result<(Self, usize)> {
        let conv = |from, to, kernel: usize, stride, vb| {
            let config = Conv2dConfig { stride, padding: kernel / 2, ..Conv2dConfig::default() };
            conv2d_no_bias(from, to, kernel, config, vb)
        };
        let channels = if bottleneck { 4 * width } else { width };
        // Output channels, kernel and stride of each convolution.
        let layers = match bottleneck {
            true => &[(width, 1, 1), (width, 3, stride), (channels, 1, 1)][..],
            false => &[(width, 3, stride), (width, 3, 1)],
        };
        let (mut branch, mut from) = (Vec::new(), in_channels);
        for (at, (to, kernel, stride)) in (1..).zip(layers) {
            let own = conv(from, *to, *kernel, *stride, vb.pp(format!("conv{at}")))?;
            branch.push((own, norm(*to, at < layers.len(), &vb.pp(format!("bn{at}")))?));
            from = *to;
        }
        let downsample = if stride != 1 || in_channels != channels {
            let vb = vb.pp("downsample");
            let own = conv(in_channels, channels, 1, stride, vb.pp(0))?;
            Some((own, norm(channels, false, &vb.pp(1))?))
        } else {
            None
        };
        Ok((Self { branch, downsample }, channels))
    }
}

impl ModuleT for Block {
    fn forward_t(&self, x: &Tensor, train: bool) -> Result<Tensor> {
        let through = |x: Tensor, (conv, norm): &(Conv2d, BatchNorm)| {
            norm.forward_t(&conv.forward(&x)?, train)
        };
        let y = self.branch.iter().try_fold(x.clone(), through)?;
        match &self.downsample {
            Some(layer) => ops::add_relu(&y, &through(x.clone(), layer)?),
            None => ops::add_relu(&y, x),
        }
    }
}

fn norm(channels: usize, relu: bool, vb: &VarBuilder<'_>) -> Result<BatchNorm> {
    let norm = batch_norm(channels, 1e-5, vb.clone())?;
    Ok(if relu { norm.with_relu() } else { norm })
}
