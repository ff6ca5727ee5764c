//! A language model: GPT-2.
//!
//! Follows: transformers' `GPT2LMHeadModel` (names, initial values, tied output layer), without
//! dropout. Matrices are `[out, in]` as in PyTorch's `Linear`, so published weights are loaded with
//! `transpose` in `load_from`, and GELU is exact, while GPT-2 uses an approximation that differs by
//! up to 5e-4.

use candle_core::{Module, Result, Tensor, bail};

use train_data::transforms::IGNORED;

use crate::data::{ArrayData, Batch};
use crate::engine::candle::nn::{Embedding, Init, LayerNorm, Linear, VarBuilder, layer_norm};
use crate::engine::candle::ops::{self, AttentionOptions, CrossEntropyOptions};
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
/// It reads the field `input_ids`, as the text transforms make it, or `inputs`: tokens `[n,
/// positions]`; for the loss also `labels`, the next token at each position, or -100 for none, as
/// `pack` makes them. Without `labels` they are made of the tokens where `attention_mask` is 1. It
/// predicts `logits`, `[n, positions, vocab_size]`.
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
        self.forward(tokens(batch)?)
    }
}

fn tokens(batch: &TensorBatch) -> Result<&Tensor> {
    batch.find("input_ids").map_or_else(|| batch.get("inputs"), Ok)
}

/// Returns the label of each token: the field `labels`, or the next token that is not padding.
fn labels(batch: &TensorBatch) -> Result<Tensor> {
    let (None, Some(mask)) = (batch.find("labels"), batch.find("attention_mask")) else {
        return batch.get("labels").cloned();
    };
    let tokens = tokens(batch)?;
    let (rows, positions) = tokens.dims2()?;
    let ignored = Tensor::full(IGNORED, (rows, positions), tokens.device())?;
    let rest = positions.saturating_sub(1);
    let [next, kept, none] =
        [tokens, mask, &ignored].map(|of| of.narrow(1, positions - rest, rest));
    Tensor::cat(&[&kept?.where_cond(&next?, &none?)?, &ignored.narrow(1, rest, 1)?], 1)
}

/// Returns the logits of the next token at each position of `[n, positions]`.
impl Module for Gpt {
    fn forward(&self, tokens: &Tensor) -> Result<Tensor> {
        let (_, positions) = tokens.dims2()?;
        let context = self.wpe.dim(0)?;
        if positions > context {
            bail!(
                "a text has {positions} tokens, but the model only {context} positions: set a larger \
                 `context`, or shorten texts"
            );
        }
        let x = ops::add(&self.wte.forward(tokens)?, &self.wpe.narrow(0, 0, positions)?)?;
        let x = self.blocks.iter().try_fold(x, |x, block| block.forward(&x))?;
        ops::linear(&self.norm.forward(&x)?, self.wte.embeddings(), None)
    }
}

/// Returns the number of tokens that have a label; `None` if the batch has no labels.
fn count_labels(batch: &Batch) -> Option<usize> {
    if let Ok(labels) = batch.get("labels") {
        return Some(match labels.data() {
            ArrayData::I64(labels) => labels.iter().filter(|label| **label != IGNORED).count(),
            ArrayData::I32(labels) => {
                labels.iter().filter(|label| i64::from(**label) != IGNORED).count()
            }
            _ => labels.shape().iter().product(),
        });
    }
    let mask = batch.get("attention_mask").ok()?;
    let [rows, positions] = mask.shape() else { return None };
    // A row's first token is no label.
    let is_label = |at: &usize| !at.is_multiple_of(*positions);
    let all = (0..rows * positions).filter(is_label);
    Some(match mask.data() {
        ArrayData::I64(mask) => all.filter(|at| mask[*at] != 0).count(),
        ArrayData::I32(mask) => all.filter(|at| mask[*at] != 0).count(),
        ArrayData::U8(mask) => all.filter(|at| mask[*at] != 0).count(),
        ArrayData::Bool(mask) => all.filter(|at| mask[*at]).count(),
        _ => return None,
    })
}

impl CandleModel for Gpt {
    /// A step is the mean over all labels of its batches and ranks.
    fn loss_count(&self, batch: &Batch) -> Result<Option<f64>> {
        Ok(count_labels(batch).map(|count| count as f64))
    }

    fn loss(&self, batch: &TensorBatch) -> Result<Loss> {
        let (logits, labels) = (self.logits(batch)?, labels(batch)?);
        // On a GPU the loss is faster without an ignored label.
        let ignores = logits.device().is_cpu() || batch.find("input_ids").is_some();
        let ignore_index = ignores.then_some(IGNORED);
        let options = CrossEntropyOptions { ignore_index, ..CrossEntropyOptions::default() };
        let (logits, labels) = (logits.flatten_to(1)?, labels.flatten_all()?);
        Ok(Loss::new(ops::cross_entropy_with(&logits, &labels, options)?))
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

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use parking_lot::Mutex;
    use rand::SeedableRng;
    use train_data::transforms::{PadTokens, Transform, pack};

    use super::*;
    use crate::data::{Array, Sample, SampleRng};
    use crate::engine::candle::{CandleEngine, CandleOptions};
    use crate::engine::{Engine, EngineState, GradSink, StepContext};

    struct NoSink;

    impl GradSink for NoSink {
        fn ready(&mut self, _: usize, _: fused_optim::Slice<'_>) -> train_step::Result<()> {
            Ok(())
        }
    }

    fn loss(batch: &Batch) -> crate::Result<f64> {
        let options = GptOptions { vocab_size: 16, context: 8, width: 8, heads: 2, layers: 1 };
        let build = |vb: VarBuilder<'static>| Gpt::new(&options, vb);
        let mut engine = CandleEngine::new(CandleOptions::default(), build)?;
        let mut state = EngineState::default();
        let mut cx = StepContext::new(Arc::new(Mutex::new(NoSink)), &mut state);
        Ok(engine.train_step(batch, &mut cx)?.scalars()?[0].1)
    }

    fn ids(rows: usize, ids: &[i64]) -> Array {
        Array::new([rows, ids.len() / rows], ids.to_vec()).unwrap()
    }

    #[test]
    fn batches_of_the_text_transforms_are_trained_on() {
        let text = |ids: &[i64]| {
            Sample::new().with("input_ids", Array::new([ids.len()], ids.to_vec()).unwrap())
        };
        // Tokens that have no label do not count.
        let packed = pack(vec![text(&[1, 2, 3]), text(&[4, 5])], 4, 0).unwrap();
        assert_eq!(*packed.get("labels").unwrap(), ids(2, &[2, 3, 0, 4, 5, 0, IGNORED, IGNORED]));
        let of_packed = loss(&packed).unwrap();
        let whole = Batch::new()
            .with("inputs", ids(1, &[1, 2, 3, 0]))
            .with("labels", ids(1, &[2, 3, 0, 4]));
        let rest = Batch::new().with("inputs", ids(1, &[4, 5])).with("labels", ids(1, &[5, 0]));
        let expected = (4.0 * loss(&whole).unwrap() + 2.0 * loss(&rest).unwrap()) / 6.0;
        assert!((of_packed - expected).abs() < 1e-6, "{of_packed} {expected}");
        // Padding is no label, and the next token is.
        let mut random = SampleRng::from_seed([0; 32]);
        let mut pad = |ids: &[i64]| {
            let pad = PadTokens { length: 4, token: 9 };
            pad.apply(text(ids), &mut random).unwrap()
        };
        let padded = crate::data::PadCollate::new(0.0);
        let padded = padded.collate(vec![pad(&[1, 2, 3]), pad(&[4, 5])]).unwrap();
        let labelled = Batch::new()
            .with("inputs", ids(2, &[1, 2, 3, 9, 4, 5, 9, 9]))
            .with("labels", ids(2, &[2, 3, IGNORED, IGNORED, 5, IGNORED, IGNORED, IGNORED]));
        assert_eq!(loss(&padded).unwrap(), loss(&labelled).unwrap());
        // Steps are weighted by the number of labels.
        let counts = [&packed, &whole, &padded, &labelled, &Batch::new()].map(count_labels);
        assert_eq!(counts, [Some(6), Some(4), Some(3), Some(3), None]);
        let said = loss(&Batch::new().with("input_ids", ids(1, &[1, 2]))).unwrap_err().to_string();
        assert!(said.contains("no field `labels`"), "{said}");
        let long = ids(1, &[1; 9]);
        let long = Batch::new().with("inputs", long.clone()).with("labels", long);
        let said = loss(&long).unwrap_err().to_string();
        assert!(said.contains("9 tokens, but the model only 8 positions: set a larger"), "{said}");
    }
}
