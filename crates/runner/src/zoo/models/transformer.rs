//! A transformer over the patches of an image.
//!
//! Follows: `torch.nn.TransformerEncoder` with `norm_first`, GELU and no dropout, with its
//! parameter names and initial values. Before it, each patch is projected to a vector (`embed`) to
//! which a position embedding (`position`) is added; after it come a norm, the mean over the
//! patches, and `fc`.

use candle_core::{DType, Module, Result, Tensor, bail};

use super::{classification_loss, inputs};
use crate::engine::candle::nn::{Init, LayerNorm, Linear, VarBuilder, layer_norm, linear};
use crate::engine::candle::ops::{self, AttentionOptions, Normalization};
use crate::engine::candle::{CandleModel, Loss, Outputs, TensorBatch};

/// Options of a [`Transformer`].
#[derive(Clone, Debug, PartialEq)]
pub struct TransformerOptions {
    /// Channels of an image. Defaults to 1.
    pub in_channels: usize,
    /// Rows and columns of an image. Defaults to 28.
    pub image_size: usize,
    /// Rows and columns of a patch; must divide the image's. Defaults to 4.
    pub patch_size: usize,
    /// Features per position. Defaults to 64.
    pub width: usize,
    /// Number of attention heads per layer; must divide the width. Defaults to 4.
    pub heads: usize,
    /// Number of layers. Defaults to 2.
    pub layers: usize,
    /// Width of each layer's feed-forward part. Defaults to 256.
    pub feed_forward: usize,
    /// Number of classes. Defaults to 10.
    pub num_classes: usize,
    /// Normalization of bytes. Defaults to the range 0..1.
    pub normalization: Normalization,
}

impl Default for TransformerOptions {
    fn default() -> Self {
        Self {
            in_channels: 1,
            image_size: 28,
            patch_size: 4,
            width: 64,
            heads: 4,
            layers: 2,
            feed_forward: 256,
            num_classes: 10,
            normalization: Normalization::default(),
        }
    }
}

/// A transformer that classifies images: `embed.weight`, `position`,
/// `layers.0.self_attn.in_proj_weight`, `layers.0.linear1.weight`, `norm.weight`, `fc.bias`.
#[derive(Debug)]
pub struct Transformer {
    embed: Linear,
    position: Tensor,
    layers: Vec<Layer>,
    norm: LayerNorm,
    fc: Linear,
    options: TransformerOptions,
}

impl Transformer {
    /// Builds the layers.
    ///
    /// # Errors
    ///
    /// Those of the builder; a patch that does not divide the image, heads that do not divide the
    /// width.
    pub fn new(options: &TransformerOptions, vb: VarBuilder<'_>) -> Result<Self> {
        let TransformerOptions { image_size, patch_size, width, heads, .. } = *options;
        if patch_size == 0 || heads == 0 || image_size % patch_size != 0 || width % heads != 0 {
            bail!(
                "the patch size must divide the image size, and the heads the width, got {options:?}"
            );
        }
        // A size that does not fit a `usize` does not fit the memory, which the layers report.
        let positions = (image_size / patch_size).saturating_pow(2);
        let patch = options.in_channels.saturating_mul(patch_size.saturating_pow(2));
        let layer = |at| Layer::new(options, &vb.pp("layers").pp(at));
        let small = Init::Randn { mean: 0.0, stdev: 0.02 };
        Ok(Self {
            embed: linear(patch, width, vb.pp("embed"))?,
            position: vb.get_with_hints((positions, width), "position", small)?,
            layers: (0..options.layers).map(layer).collect::<Result<_>>()?,
            norm: layer_norm(width, 1e-5, vb.pp("norm"))?,
            fc: linear(width, options.num_classes, vb.pp("fc"))?,
            options: options.clone(),
        })
    }

    fn logits(&self, batch: &TensorBatch) -> Result<Tensor> {
        let images = inputs(batch, &self.options.normalization)?;
        let mut x = self.embed.forward(&patches(&images, self.options.patch_size)?)?;
        x = ops::add(&x, &self.position)?;
        for layer in &self.layers {
            x = layer.forward(&x)?;
        }
        let x = self.norm.forward(&x)?;
        // candle sums half tensors in their own type.
        let wide = if x.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
        self.fc.forward(&x.to_dtype(wide)?.mean(1)?.to_dtype(x.dtype())?)
    }
}

/// Reshapes `[n, c, h, w]` to `[n, patches, c * size * size]`.
fn patches(images: &Tensor, size: usize) -> Result<Tensor> {
    let (n, c, h, w) = images.dims4()?;
    images
        .reshape(&[n, c, h / size, size, w / size, size][..])?
        .permute([0, 2, 4, 1, 3, 5])?
        .reshape((n, (h / size) * (w / size), c * size * size))
}

impl CandleModel for Transformer {
    fn loss(&self, batch: &TensorBatch) -> Result<Loss> {
        classification_loss(&self.logits(batch)?, batch)
    }

    fn predict(&self, batch: &TensorBatch) -> Result<Outputs> {
        Ok(Outputs::new().with("logits", self.logits(batch)?))
    }
}

/// `x + attention(norm1(x))`, then `x + linear2(gelu(linear1(norm2(x))))`.
#[derive(Debug)]
struct Layer {
    norm1: LayerNorm,
    in_proj_weight: Tensor,
    in_proj_bias: Tensor,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor,
    norm2: LayerNorm,
    linear1: Linear,
    linear2: Linear,
    attention: AttentionOptions,
}

impl Layer {
    fn new(options: &TransformerOptions, vb: &VarBuilder<'_>) -> Result<Self> {
        let width = options.width;
        let attn = vb.pp("self_attn");
        // Xavier initialization of three square matrices together; the output matrix has a linear
        // layer's default.
        let bound = (6.0 / (4 * width) as f64).sqrt();
        let xavier = Init::Uniform { lo: -bound, up: bound };
        let bound = 1.0 / (width as f64).sqrt();
        let fan_in = Init::Uniform { lo: -bound, up: bound };
        let zero = Init::Const(0.0);
        let out = attn.pp("out_proj");
        Ok(Self {
            norm1: layer_norm(width, 1e-5, vb.pp("norm1"))?,
            in_proj_weight: attn.get_with_hints((3 * width, width), "in_proj_weight", xavier)?,
            in_proj_bias: attn.get_with_hints(3 * width, "in_proj_bias", zero)?,
            out_proj_weight: out.get_with_hints((width, width), "weight", fan_in)?,
            out_proj_bias: out.get_with_hints(width, "bias", zero)?,
            norm2: layer_norm(width, 1e-5, vb.pp("norm2"))?,
            linear1: linear(width, options.feed_forward, vb.pp("linear1"))?,
            linear2: linear(options.feed_forward, width, vb.pp("linear2"))?,
            attention: AttentionOptions { heads: options.heads, causal: false },
        })
    }
}

impl Module for Layer {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let y = self.norm1.forward(x)?;
        let qkv = ops::linear(&y, &self.in_proj_weight, Some(&self.in_proj_bias))?;
        let y = ops::self_attention(&qkv, self.attention)?;
        let x = ops::add(x, &ops::linear(&y, &self.out_proj_weight, Some(&self.out_proj_bias))?)?;
        let y = ops::gelu(&self.linear1.forward(&self.norm2.forward(&x)?)?)?;
        ops::add(&x, &self.linear2.forward(&y)?)
    }
}
