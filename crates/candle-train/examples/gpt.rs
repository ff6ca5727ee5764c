//! Trains a GPT of 10 M parameters on the King James Bible (Debian:
//! `apt-get install bible-kjv bible-kjv-text`), in bf16 on two ranks, and writes text with it:
//!
//! ```sh
//! cargo build --release -p gradstack-launch
//! cargo build --release -p gradstack-candle-train --example gpt
//! target/release/launch --nproc-per-node 2 -- target/release/examples/gpt target/gpt 20
//! ```
//!
//! The second argument is the number of epochs of 30 batches, the third `f32` for full precision. A
//! run that was interrupted goes on where it last saved. `tests/examples/gpt.py` compares it with
//! PyTorch.

#![expect(clippy::print_stdout, reason = "a program prints")]

use std::fs::OpenOptions;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use candle_core::{D, DType, Device, Module, Result, Tensor};
use candle_ops::nn::{
    Embedding, Init, LayerNorm, Linear, VarBuilder, VarMap, layer_norm, linear, linear_no_bias,
};
use candle_ops::{AttentionOptions, add, cross_entropy, gelu, self_attention};
use candle_train::{AdamWHyper, Clip, Trainer};
use collective::object::all_gather_object;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use tokenizers::models::bpe::{BPE, BpeTrainerBuilder};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{DecoderWrapper, NormalizerWrapper, PostProcessorWrapper, PreTokenizerWrapper};

const VOCABULARY: usize = 4096;
const WIDTH: usize = 320;
const HEADS: usize = 5;
const LAYERS: usize = 6;
const CONTEXT: usize = 64;
/// Windows of text in a batch, over all ranks.
const BATCH: usize = 16;
const BATCHES_PER_EPOCH: usize = 30;

type Tokenizer = tokenizers::TokenizerImpl<
    BPE,
    NormalizerWrapper,
    PreTokenizerWrapper,
    PostProcessorWrapper,
    DecoderWrapper,
>;
type Error = Box<dyn std::error::Error + Send + Sync>;

struct Block {
    norm1: LayerNorm,
    qkv: Linear,
    out: Linear,
    norm2: LayerNorm,
    up: Linear,
    down: Linear,
}

impl Block {
    fn new(vb: VarBuilder<'_>) -> Result<Self> {
        Ok(Self {
            norm1: layer_norm(WIDTH, 1e-5, vb.pp("norm1"))?,
            qkv: linear(WIDTH, 3 * WIDTH, vb.pp("qkv"))?,
            out: linear(WIDTH, WIDTH, vb.pp("out"))?,
            norm2: layer_norm(WIDTH, 1e-5, vb.pp("norm2"))?,
            up: linear(WIDTH, 4 * WIDTH, vb.pp("up"))?,
            down: linear(4 * WIDTH, WIDTH, vb.pp("down"))?,
        })
    }
}

impl Module for Block {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let options = AttentionOptions { heads: HEADS, causal: true };
        let attended = self_attention(&self.qkv.forward(&self.norm1.forward(x)?)?, options)?;
        let x = add(x, &self.out.forward(&attended)?)?;
        let hidden = gelu(&self.up.forward(&self.norm2.forward(&x)?)?)?;
        add(&x, &self.down.forward(&hidden)?)
    }
}

struct Gpt {
    tokens: Embedding,
    positions: Tensor,
    blocks: Vec<Block>,
    norm: LayerNorm,
    head: Linear,
}

impl Gpt {
    fn new(vb: VarBuilder<'_>) -> Result<Self> {
        let small = Init::Randn { mean: 0.0, stdev: 0.02 };
        let tokens = vb.get_with_hints((VOCABULARY, WIDTH), "tokens", small)?;
        Ok(Self {
            tokens: Embedding::new(tokens, WIDTH),
            positions: vb.get_with_hints((CONTEXT, WIDTH), "positions", small)?,
            blocks: (0..LAYERS)
                .map(|layer| Block::new(vb.pp("blocks").pp(layer)))
                .collect::<Result<_>>()?,
            norm: layer_norm(WIDTH, 1e-5, vb.pp("norm"))?,
            head: linear_no_bias(WIDTH, VOCABULARY, vb.pp("head"))?,
        })
    }
}

impl Module for Gpt {
    /// Logits of the next token at each position of `[batch, CONTEXT]`.
    fn forward(&self, tokens: &Tensor) -> Result<Tensor> {
        let x = add(&self.tokens.forward(tokens)?, &self.positions)?;
        let x = self.blocks.iter().try_fold(x, |x, block| block.forward(&x))?;
        self.head.forward(&self.norm.forward(&x)?)
    }
}

/// Trains a tokenizer on the text, one verse per line, and writes it and the text's tokens.
fn prepare(directory: &Path) -> std::result::Result<(), Error> {
    std::fs::create_dir_all(directory)?;
    let bible = Command::new("bible").args(["-f", "gen1:1-rev22:21"]).output();
    let bible = bible.map_err(|e| format!("bible: {e}; install bible-kjv and bible-kjv-text"))?;
    let text = String::from_utf8(bible.stdout)?;
    // "Ge1:1 In the beginning" without the number.
    let verses = text.lines().filter_map(|line| Some(line.split_once(' ')?.1));
    let text = verses.collect::<Vec<_>>().join("\n");

    let bytes = ByteLevel::default().add_prefix_space(false);
    let mut tokenizer = Tokenizer::new(BPE::default());
    tokenizer.with_pre_tokenizer(Some(bytes)).with_decoder(Some(bytes));
    let mut trainer = BpeTrainerBuilder::new()
        .vocab_size(VOCABULARY)
        .show_progress(false)
        .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
        .build();
    tokenizer.train(&mut trainer, text.lines())?;
    tokenizer.save(directory.join("tokenizer.json"), false)?;
    let tokens = tokenizer.encode(text, false)?.get_ids().to_vec();
    let count = tokens.len();
    let tokens = Tensor::from_vec(tokens, count, &Device::Cpu)?;
    Ok(tokens.save_safetensors("tokens", directory.join("tokens.safetensors"))?)
}

/// Mean loss of predicting each next token of these windows.
fn loss(net: &Gpt, tokens: &Tensor, windows: &[u32]) -> Result<Tensor> {
    let cut = |ahead: usize| {
        let windows = windows.iter().map(|window| *window as usize * CONTEXT + ahead);
        let windows = windows.map(|start| tokens.narrow(0, start, CONTEXT));
        Tensor::stack(&windows.collect::<Result<Vec<_>>>()?, 0)
    };
    cross_entropy(&net.forward(&cut(0)?)?.flatten_to(1)?, &cut(1)?.flatten_all()?)
}

/// Goes on with a text, each token drawn by its probability; `temperature` below 1 favours likely
/// ones.
fn write(
    net: &Gpt,
    context: &[u32],
    count: usize,
    temperature: f64,
    seed: u64,
) -> Result<Vec<u32>> {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let mut text = context.to_vec();
    for _ in 0..count {
        let mut window = text[text.len().saturating_sub(CONTEXT)..].to_vec();
        let last = window.len() - 1;
        window.resize(CONTEXT, 0);
        let logits = net.forward(&Tensor::from_vec(window, (1, CONTEXT), &Device::Cpu)?)?;
        let logits = (logits.get(0)?.get(last)?.to_dtype(DType::F32)? / temperature)?;
        let exp = logits.broadcast_sub(&logits.max_keepdim(D::Minus1)?)?.exp()?.to_vec1::<f32>()?;
        let mut rest = random.next_u32() as f32 / u32::MAX as f32 * exp.iter().sum::<f32>();
        let drawn = exp.iter().position(|weight| {
            rest -= weight;
            rest <= 0.0
        });
        text.push(drawn.unwrap_or(0) as u32);
    }
    Ok(text)
}

fn main() -> std::result::Result<(), Error> {
    let arguments: Vec<String> = std::env::args().collect();
    let directory = PathBuf::from(arguments.get(1).map_or("target/gpt", String::as_str));
    let epochs: usize = arguments.get(2).map_or(Ok(20), |epochs| epochs.parse())?;
    let is_full = arguments.get(3).is_some_and(|precision| precision == "f32");

    let vars = VarMap::new();
    let net = Gpt::new(VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu))?;
    let hyper =
        AdamWHyper { lr: 1e-3, betas: (0.9, 0.95), weight_decay: 0.1, ..Default::default() };
    let steps = (epochs * BATCHES_PER_EPOCH) as f64;
    let builder = Trainer::builder(&vars).clip(Clip::norm(1.0)).schedule(move |step| {
        let warm = (step as f64 + 1.0) / 20.0;
        warm.min(0.55 + 0.45 * (std::f64::consts::PI * step as f64 / steps).cos())
    });
    let mut train = if is_full { builder } else { builder.bf16() }.build(hyper)?;

    let file = |name: &str| directory.join(name);
    if train.is_main() && !file("tokens.safetensors").exists() {
        prepare(&directory)?;
    }
    train.group().barrier()?;
    let tokens = candle_core::safetensors::load(file("tokens.safetensors"), &Device::Cpu)?;
    let tokens = &tokens["tokens"];
    let windows = (tokens.elem_count() - 1) / CONTEXT;
    // The last ones, of the Revelation, show what is learned.
    let (unseen, windows) = ((windows - 128) as u32..windows as u32, windows - 128);

    let first = train.resume(file("run.safetensors"))?;
    if first == 0 {
        train.save(file("start.safetensors"), 0)?;
    }
    let mut log = OpenOptions::new().create(true).append(true).open(file("log.jsonl"))?;
    for epoch in first..epochs {
        let begun = Instant::now();
        for batch in train.batches(windows, BATCH, epoch)?.into_iter().take(BATCHES_PER_EPOCH) {
            let step = train.steps();
            let loss = train.step(|| loss(&net, tokens, &batch))?.loss;
            let (loss, batch) = (train.mean(&loss)?, all_gather_object(train.group(), &batch)?);
            if train.is_main() {
                let line = serde_json::json!({ "step": step, "loss": loss, "windows": batch });
                writeln!(log, "{line}")?;
            }
        }
        let seconds = begun.elapsed().as_secs_f64();
        train.save(file("run.safetensors"), epoch + 1)?;
        let own: Vec<u32> = unseen.clone().skip(train.rank()).step_by(train.world_size()).collect();
        let unseen = train.evaluate(|| loss(&net, tokens, &own))?;
        let unseen = train.mean(&unseen)?;
        if train.is_main() {
            let speed = (BATCHES_PER_EPOCH * BATCH * CONTEXT) as f64 / seconds;
            println!("epoch {epoch}: loss on unseen text {unseen:.3}, {speed:.0} tokens a second");
        }
    }
    if train.is_main() {
        let tokenizer = tokenizers::Tokenizer::from_file(file("tokenizer.json"))?;
        let start = tokenizer.encode("And God said unto Moses,", false)?;
        let text = train.evaluate(|| write(&net, start.get_ids(), 120, 0.8, 1))?;
        println!("{}", tokenizer.decode(&text, false)?);
    }
    Ok(())
}
