//! A language model: GPT-2.
//!
//! Follows: transformers' `GPT2LMHeadModel` (names, initial values, tied output layer), without
//! dropout. Matrices are `[out, in]` as in PyTorch's `Linear`, so published weights are loaded with
//! `transpose` in `load_from`, and GELU is exact, while GPT-2 uses an approximation that differs by
//! up to 5e-4.

use candle_core::{Module, Result, Tensor, bail};

use crate::engine::candle::nn::{Embedding, Init, LayerNorm, Linear, VarBuilder, layer_norm};
use crate::engine::candle::ops::{self, AttentionOptions};
use crate::engine::candle::{CandleModel, Loss, Outputs, TensorBatch};

/// Options of a [`Gpt`]. The default is the smallest GPT-2, with 124 million parameters.
#[derive(Clone, Debug, PartialEq)]
pub struct GptOptions {
    /// Size of the vocabulary. Defaults to 50257.
    pub vocab_size: usize,
    /// Maximum number of positions. Defaults to 1024.
    pub context: usize,
    /// Features per position. Defaults to 768.
    pub width: usize,
    /// Number of attention heads per layer; must divide the width. Defaults to 12.
    pub heads: usize,
    /// Number of layers. Defaults to 12.
    pub layers: usize,
}

impl Default for GptOptions {
    fn default() -> Self {
        Self { vocab_size: 50257, context: 1024, width: 768, heads: 12, layers: 12 }
    }
}

/// A decoder over tokens: `wte.weight`, `wpe.weight`, `h.0.attn.c_attn.weight`,
/// `h.0.mlp.c_fc.weight`, `ln_f.weight`.
///
/// It reads the field `inputs`, tokens `[n, positions]`; for the loss also `labels`, the next token
/// at each position; and predicts `logits`, `[n, positions, vocab_size]`.
#[derive(Debug)]
pub struct Gpt {
    wte: Embedding,
    wpe: Tensor,
    blocks: Vec<Block>,
    norm: LayerNorm,
}

impl Gpt {
    /// Builds the layers.
    ///
    /// # Errors
    ///
    /// Those of the builder; heads that do not divide the width.
    pub fn new(options: &GptOptions, vb: VarBuilder<'_>) -> Result<Self> {
        let GptOptions { vocab_size, context, width, heads, layers } = *options;
        if heads == 0 || width % heads != 0 {
            bail!("the number of heads must divide the width, got {options:?}");
        }
        let table = |rows, name| vb.pp(name).get_with_hints((rows, width), "weight", normal(0.02));
        Ok(Self {
            wte: Embedding::new(table(vocab_size, "wte")?, width),
            wpe: table(context, "wpe")?,
            blocks: (0..layers)
                .map(|layer| Block::new(options, &vb.pp("h").pp(layer)))
                .collect::<Result<_>>()?,
            norm: layer_norm(width, 1e-5, vb.pp("ln_f"))?,
        })
    }

    fn logits(&self, batch: &TensorBatch) -> Result<Tensor> {
        self.forward(batch.get("inputs")?)
    }
}

/// Returns the logits of the next token at each position of `[n, positions]`.
impl Module for Gpt {
    fn forward(&self, tokens: &Tensor) -> Result<Tensor> {
        let (_, positions) = tokens.dims2()?;
        let x = ops::add(&self.wte.forward(tokens)?, &self.wpe.narrow(0, 0, positions)?)?;
        let x = self.blocks.iter().try_fold(x, |x, block| block.forward(&x))?;
        ops::linear(&self.norm.forward(&x)?, self.wte.embeddings(), None)
    }
}

impl CandleModel for Gpt {
    fn loss(&self, batch: &TensorBatch) -> Result<Loss> {
        let (logits, labels) = (self.logits(batch)?, batch.get("labels")?);
        Ok(Loss::new(ops::cross_entropy(&logits.flatten_to(1)?, &labels.flatten_all()?)?))
    }

    fn predict(&self, batch: &TensorBatch) -> Result<Outputs> {
        Ok(Outputs::new().with("logits", self.logits(batch)?))
    }
}

/// `x + attention(ln_1(x))`, then `x + mlp(ln_2(x))`.
#[derive(Debug)]
struct Block {
    norm1: LayerNorm,
    qkv: Linear,
    out: Linear,
    norm2: LayerNorm,
    up: Linear,
    down: Linear,
    attention: AttentionOptions,
}

impl Block {
    fn new(options: &GptOptions, vb: &VarBuilder<'_>) -> Result<Self> {
        let width = options.width;
        let layer = |inputs, outputs, stdev, name| {
            let vb = vb.pp(name);
            let weight = vb.get_with_hints((outputs, inputs), "weight", normal(stdev))?;
            let bias = vb.get_with_hints(outputs, "bias", Init::Const(0.0))?;
            Ok::<_, candle_core::Error>(Linear::new(weight, Some(bias)))
        };
        // Two matrices of each layer add to the residual stream.
        let residual = 0.02 / (2.0 * options.layers as f64).sqrt();
        Ok(Self {
            norm1: layer_norm(width, 1e-5, vb.pp("ln_1"))?,
            qkv: layer(width, 3 * width, 0.02, "attn.c_attn")?,
            out: layer(width, width, residual, "attn.c_proj")?,
            norm2: layer_norm(width, 1e-5, vb.pp("ln_2"))?,
            up: layer(width, 4 * width, 0.02, "mlp.c_fc")?,
            down: layer(4 * width, width, residual, "mlp.c_proj")?,
            attention: AttentionOptions { heads: options.heads, causal: true },
        })
    }
}

impl Module for Block {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let y = ops::self_attention(&self.qkv.forward(&self.norm1.forward(x)?)?, self.attention)?;
        let x = ops::add(x, &self.out.forward(&y)?)?;
        let y = ops::gelu(&self.up.forward(&self.norm2.forward(&x)?)?)?;
        ops::add(&x, &self.down.forward(&y)?)
    }
}

fn normal(stdev: f64) -> Init {
    Init::Randn { mean: 0.0, stdev }
}
