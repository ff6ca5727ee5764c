//! Trains a small Llama on a folder of text, and writes text with it:
//!
//! ```sh
//! cargo run --release -p gradstack-candle-train --example llama DIRECTORY EPOCHS 'texts/**/*.txt'
//! launch --nproc-per-node 2 -- target/release/examples/llama DIRECTORY EPOCHS 'texts/**/*.txt'
//! ```
//!
//! The directory gets the tokenizer and the tokens, which are made once, the run, which goes on
//! where it was interrupted, and the model in Hugging Face's format: `config.json`,
//! `model.safetensors` and `tokenizer.json`.

#![expect(clippy::print_stdout, reason = "a program prints")]

use std::path::Path;
use std::sync::Arc;

use candle_core::{DType, Module, Tensor};
use candle_ops::cross_entropy;
use candle_ops::nn::{GenerateOptions, Llama, LlamaConfig, VarMap};
use candle_train::{AdamWHyper, Clip, Fields, Trainer, seeded};
use train_data::tokens::{TokenizedText, TokenizerSource};
use train_data::{DataLoader, Dataset};

type Result<T, E = Box<dyn std::error::Error + Send + Sync>> = std::result::Result<T, E>;

/// Windows of text in a batch, over all ranks.
const BATCH: usize = 16;

/// Mean loss of the next tokens.
fn loss(net: &Llama, batch: &Fields) -> candle_core::Result<Tensor> {
    let logits = net.forward(batch.get("input_ids")?)?.flatten_to(1)?;
    cross_entropy(&logits, &batch.get("labels")?.flatten_all()?)
}

/// Trains a model of these sizes, with a tokenizer of up to `vocab_size` tokens, up to a number of
/// epochs. Returns the text that it writes after `prompt`, and its perplexity on unseen text.
pub(crate) fn train(
    texts: &[String],
    directory: &Path,
    epochs: usize,
    config: &LlamaConfig,
    prompt: &str,
) -> Result<(String, f64)> {
    let tokenizer = TokenizerSource::Train { vocab_size: config.vocab_size };
    let text = TokenizedText::prepare(texts, &tokenizer, directory)?;
    let config = LlamaConfig { vocab_size: text.vocab_size(), ..config.clone() };
    let windows = text.windows(config.max_position_embeddings)?;
    let last = windows.len().div_ceil(10);
    let (windows, unseen) = windows.split_last(last)?;

    let vars = VarMap::new();
    let net = Llama::new(&config, seeded(&vars, 1, DType::F32, &candle_train::device()?))?;
    let hyper =
        AdamWHyper { lr: 2e-3, betas: (0.9, 0.95), weight_decay: 0.1, ..Default::default() };
    let steps = (epochs * windows.len().div_ceil(BATCH)) as f64;
    let builder = Trainer::builder(&vars).bf16().clip(Clip::norm(1.0)).schedule(move |step| {
        let warm = (step as f64 + 1.0) / 20.0;
        warm.min(0.55 + 0.45 * (std::f64::consts::PI * step as f64 / steps).cos())
    });
    let mut train = builder.build(hyper)?;
    let sampler = train.sampler(windows.len());
    let loader = DataLoader::builder(Arc::new(windows), sampler);
    let loader = loader.batch_size(BATCH / train.world_size()).build()?;

    let mut run = train.resumable(loader, directory.join("run.safetensors"), epochs)?.every(10);
    while let Some(epoch) = run.next_epoch(&mut train)? {
        while let Some(batch) = run.next_batch(&mut train)? {
            train.step_on(&batch, |batch| loss(&net, batch))?;
        }
        let perplexity = train.mean_loss(&unseen, BATCH, |batch| loss(&net, batch))?.exp();
        if train.is_main() {
            println!("epoch {epoch}: a perplexity of {perplexity:.2} on unseen text");
        }
    }
    if train.is_main() {
        vars.save(directory.join("model.safetensors"))?;
        config.save(directory.join("config.json"))?;
    }
    let options = GenerateOptions {
        temperature: 0.8,
        top_p: 0.95,
        stop_tokens: vec![text.end()],
        ..Default::default()
    };
    let prompt = text.encode(prompt)?;
    let written = train.evaluate(|| net.generate(&prompt, &options))?;
    let written = text.tokenizer().decode(&[prompt, written].concat(), true)?;
    let perplexity = train.mean_loss(&unseen, BATCH, |batch| loss(&net, batch))?.exp();
    Ok((written, perplexity))
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, directory, epochs, texts @ ..] = &arguments[..] else {
        return Err("usage: llama DIRECTORY EPOCHS PATTERN...".into());
    };
    let config = LlamaConfig {
        vocab_size: 4096,
        hidden_size: 256,
        intermediate_size: 688,
        num_hidden_layers: 4,
        num_attention_heads: 8,
        num_key_value_heads: 4,
        max_position_embeddings: 128,
        ..Default::default()
    };
    let (written, _) = train(texts, Path::new(directory), epochs.parse()?, &config, "The")?;
    println!("{written}");
    Ok(())
}
