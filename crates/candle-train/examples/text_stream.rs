//! Trains a small language model on a stream of text files, whose lines are shuffled, tokenized and
//! packed into rows as they are read:
//!
//! ```sh
//! cargo run --release -p gradstack-candle-train --example text_stream \
//!   DIRECTORY STEPS 'shards/*.txt.gz'
//! launch --nproc-per-node 2 -- target/release/examples/text_stream \
//!   DIRECTORY STEPS 'shards/*.txt.gz'
//! ```
//!
//! Without files it generates one in the directory. An interrupted run resumes at the line after
//! its last save. A token is a byte here; `Tokenize::from_file` loads a `tokenizer.json` (feature
//! `tokenizers`).

#![expect(clippy::print_stdout, reason = "an example shows its result")]

use std::path::Path;

use candle_core::{DType, Device, Module, Tensor};
use candle_ops::nn::{
    Embedding, Init, LayerNorm, Linear, VarBuilder, VarMap, layer_norm, linear, linear_no_bias,
};
use candle_ops::{
    AttentionOptions, CrossEntropyOptions, add, cross_entropy_with, gelu, self_attention,
};
use candle_train::{AdamWHyper, Trainer, tensor};
use train_data::stream::{Stream, StreamLoader, StreamOptions};
use train_data::transforms::{IGNORED, Tokenize, pack};
use train_data::{Batch, Workers};

type Result<T, E = Box<dyn std::error::Error + Send + Sync>> = std::result::Result<T, E>;

/// Number of tokens: the bytes, and the end of a text.
const VOCABULARY: usize = 257;
const END: i64 = 256;
const WIDTH: usize = 64;
const HEADS: usize = 4;
/// Length of a row of tokens.
const CONTEXT: usize = 64;
/// Lines per batch, which are packed into about half as many rows.
const LINES: usize = 16;

struct Net {
    tokens: Embedding,
    positions: Tensor,
    norm1: LayerNorm,
    qkv: Linear,
    out: Linear,
    norm2: LayerNorm,
    up: Linear,
    down: Linear,
    head: Linear,
}

impl Net {
    fn new(vb: VarBuilder<'_>) -> candle_core::Result<Self> {
        let small = Init::Randn { mean: 0.0, stdev: 0.02 };
        let tokens = vb.get_with_hints((VOCABULARY, WIDTH), "tokens", small)?;
        Ok(Self {
            tokens: Embedding::new(tokens, WIDTH),
            positions: vb.get_with_hints((CONTEXT, WIDTH), "positions", small)?,
            norm1: layer_norm(WIDTH, 1e-5, vb.pp("norm1"))?,
            qkv: linear(WIDTH, 3 * WIDTH, vb.pp("qkv"))?,
            out: linear(WIDTH, WIDTH, vb.pp("out"))?,
            norm2: layer_norm(WIDTH, 1e-5, vb.pp("norm2"))?,
            up: linear(WIDTH, 4 * WIDTH, vb.pp("up"))?,
            down: linear(4 * WIDTH, WIDTH, vb.pp("down"))?,
            head: linear_no_bias(WIDTH, VOCABULARY, vb.pp("head"))?,
        })
    }
}

impl Module for Net {
    /// Logits of the next token at each position of `[rows, CONTEXT]`.
    fn forward(&self, tokens: &Tensor) -> candle_core::Result<Tensor> {
        let x = add(&self.tokens.forward(tokens)?, &self.positions)?;
        let options = AttentionOptions { heads: HEADS, causal: true };
        let attended = self_attention(&self.qkv.forward(&self.norm1.forward(&x)?)?, options)?;
        let x = add(&x, &self.out.forward(&attended)?)?;
        let hidden = gelu(&self.up.forward(&self.norm2.forward(&x)?)?)?;
        self.head.forward(&add(&x, &self.down.forward(&hidden)?)?)
    }
}

/// Endless rows of tokens of this rank's lines.
fn loader(files: &[String], train: &Trainer) -> Result<StreamLoader> {
    let (rank, world_size) = (train.rank(), train.world_size());
    let options = StreamOptions { shuffle_buffer: 256, seed: 1, rank, world_size, repeat: true };
    let tokenize = Tokenize::new(|text| Ok(text.bytes().map(i64::from).collect()));
    let stream = Stream::text(files, options)?.transform(tokenize);
    let loader = StreamLoader::new(stream, LINES, Workers::new(2))?;
    Ok(loader.collate(|lines| Ok(pack(lines, CONTEXT, END)?)))
}

/// Mean loss of next-token prediction.
fn loss(net: &Net, batch: &Batch) -> Result<impl FnMut() -> candle_core::Result<Tensor>> {
    let field = |name| -> Result<Tensor> { Ok(tensor(batch.get(name)?, &Device::Cpu)?) };
    let (tokens, labels) = (field("input_ids")?, field("labels")?);
    let options = CrossEntropyOptions { ignore_index: Some(IGNORED), ..Default::default() };
    Ok(move || {
        let logits = net.forward(&tokens)?.flatten_to(1)?;
        cross_entropy_with(&logits, &labels.flatten_all()?, options)
    })
}

/// Trains up to this number of steps, and returns the loss of the last one.
pub(crate) fn train(files: &[String], run: &Path, steps: u64) -> Result<f64> {
    let vars = VarMap::new();
    let net = Net::new(VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu))?;
    let hyper = AdamWHyper { lr: 3e-3, ..Default::default() };
    let mut train = Trainer::builder(&vars).seed(1).build(hyper)?;
    let mut loader = loader(files, &train)?;
    if let (_, Some(position)) = train.resume_with(run)? {
        loader.resume(position)?;
    }
    let mut last = f64::NAN;
    while train.steps() < steps {
        let batch = loader.next_batch()?.ok_or("the files are empty")?;
        let mean = train.step(loss(&net, &batch)?)?.loss;
        if train.steps().is_multiple_of(20) || train.steps() == steps {
            last = train.mean(&mean)?;
            train.save_with(run, 0, &loader.position())?;
            if train.is_main() {
                println!("step {}: loss {last:.3}", train.steps());
            }
        }
    }
    Ok(last)
}

/// Generates a text of sentences, one per line.
pub(crate) fn make_text(file: &Path) -> Result<()> {
    let who = ["the cat", "a dog", "my aunt", "the moon", "no one"];
    let does = ["sees", "likes", "hears", "forgets"];
    let sentence = |i: usize| {
        let object = who[i * 7 % 11 % who.len()];
        format!("{} {} {object}.\n", who[i % who.len()], does[i * i % does.len()])
    };
    Ok(std::fs::write(file, (0..1000).map(sentence).collect::<String>())?)
}

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let directory = arguments.next().unwrap_or_else(|| "target/text_stream".into());
    let directory = Path::new(&directory);
    let steps = arguments.next().map_or(Ok(200), |steps| steps.parse())?;
    let mut files: Vec<String> = arguments.collect();
    std::fs::create_dir_all(directory)?;
    if files.is_empty() {
        let file = directory.join("text.txt");
        make_text(&file)?;
        files.push(file.to_string_lossy().into_owned());
    }
    train(&files, &directory.join("run.safetensors"), steps).map(drop)
}
