//! Fine-tunes a Llama of Hugging Face's by LoRA on chats, lines of JSON as
//! `{"messages": [{"role": "user", "content": ".."}, {"role": "assistant", "content": ".."}]}`:
//!
//! ```sh
//! cargo run --release -p gradstack-candle-train --example chat_lora MODEL CHATS.jsonl OUT 2 '</s>'
//! ```
//!
//! `MODEL` is a folder with `config.json`, `tokenizer.json` and `model.safetensors`. Only the
//! tokens of the assistant are trained. `OUT` gets the run, which goes on where it was interrupted,
//! and the adapters for PEFT. Messages are written as TinyLlama's: `<|user|>\nHow many?</s>\n`.

#![expect(clippy::print_stdout, reason = "a program prints")]

use std::path::Path;
use std::sync::Arc;

use candle_core::{DType, Module, Tensor};
use candle_ops::nn::lora::{LoraOptions, lora, save_peft};
use candle_ops::nn::{GenerateOptions, Llama, LlamaConfig, VarMap, pretrained};
use candle_ops::{CrossEntropyOptions, cross_entropy_with};
use candle_train::{AdamWHyper, Fields, Trainer};
use tokenizers::Tokenizer;
use train_data::transforms::IGNORED;
use train_data::{Array, ArrayData, Batch, BoxError, DataLoader, PadCollate, Sample};

type Result<T, E = BoxError> = std::result::Result<T, E>;

/// The first `length` tokens of a chat. Each label is the next token if the assistant writes it.
fn sample(tokenizer: &Tokenizer, line: &str, end: &str, length: usize) -> Result<Sample> {
    let chat: serde_json::Value = serde_json::from_str(line)?;
    let (mut tokens, mut labels) = (Vec::new(), Vec::new());
    for message in chat["messages"].as_array().ok_or("a chat without `messages`")? {
        let of = |key: &str| message[key].as_str().ok_or_else(|| format!("no `{key}`: {message}"));
        let (role, content) = (of("role")?, of("content")?);
        for (text, is_trained) in [
            (format!("<|{role}|>\n"), false),
            (format!("{content}{end}"), role == "assistant"),
            ("\n".to_owned(), false),
        ] {
            let encoded = tokenizer.encode_fast(text, false)?;
            let new = encoded.get_ids().iter().copied().map(i64::from);
            labels.extend(new.clone().map(|token| if is_trained { token } else { IGNORED }));
            tokens.extend(new);
        }
    }
    let count = tokens.len().saturating_sub(1).min(length);
    let labels = labels.get(1..=count).unwrap_or_default().to_vec();
    if labels.iter().all(|label| *label == IGNORED) {
        return Err(format!("no answer within {length} tokens: {line}").into());
    }
    let labels = Array::new([count], labels)?;
    tokens.truncate(count);
    Ok(Sample::new().with("input_ids", Array::new([count], tokens)?).with("labels", labels))
}

fn loss(net: &Llama, batch: &Fields) -> candle_core::Result<Tensor> {
    let logits = net.forward(batch.get("input_ids")?)?.flatten_to(1)?;
    // The mean over the labels that are not ignored.
    let options = CrossEntropyOptions { ignore_index: Some(IGNORED), ..Default::default() };
    cross_entropy_with(&logits, &batch.get("labels")?.flatten_all()?, options)
}

fn trained_tokens(batch: &Batch) -> Result<usize> {
    let ArrayData::I64(labels) = batch.get("labels")?.data() else { return Ok(0) };
    Ok(labels.iter().filter(|label| **label != IGNORED).count())
}

/// Trains up to a number of epochs. Returns the last loss, and an answer to the question.
pub(crate) fn train(
    [model, chats, out]: [&Path; 3],
    (epochs, batch_size): (usize, usize),
    end: &str,
    question: &str,
) -> Result<(f64, String)> {
    let tokenizer = Tokenizer::from_file(model.join("tokenizer.json"))?;
    let stop = tokenizer.token_to_id(end).ok_or("the tokenizer has no such end token")?;
    let config = LlamaConfig::load(model.join("config.json"))?;
    let (text, length) = (std::fs::read_to_string(chats)?, config.max_position_embeddings);
    let chats = text.lines().map(|line| sample(&tokenizer, line, end, length));
    let chats = chats.collect::<Result<Vec<_>>>()?;

    let targets = ["q", "k", "v", "o", "gate", "up", "down"].map(|name| format!("*.{name}_proj"));
    let options = LoraOptions { rank: 8, alpha: 16.0, dropout: 0.0, targets: targets.into() };
    let vars = VarMap::new();
    let vb = pretrained(&vars, model, 1, DType::F32, &candle_train::device()?)?;
    let net = lora(&options, || Llama::new(&config, vb))?;
    let hyper = AdamWHyper { lr: 2e-3, weight_decay: 0.0, ..Default::default() };
    let mut train = Trainer::builder(&vars).bf16().build(hyper)?;
    let sampler = train.sampler(chats.len());
    let pad = PadCollate::new(0.0).field("labels", IGNORED as f64);
    let loader = DataLoader::builder(Arc::new(chats), sampler).batch_size(batch_size);
    let loader = loader.collate(move |chats| Ok(pad.collate(chats)?)).build()?;

    let mut last = f64::NAN;
    let mut run = train.resumable(loader, out.join("run.safetensors"), epochs)?;
    while let Some(epoch) = run.next_epoch(&mut train)? {
        while let Some(batch) = run.next_batch(&mut train)? {
            let count = trained_tokens(&batch)?;
            let step = train.step_on_weighted(count, &batch, |batch| loss(&net, batch))?;
            last = step.loss.to_scalar::<f32>()?.into();
        }
        println!("epoch {epoch}: loss {last:.3}");
    }
    if train.is_main() {
        save_peft(&vars, &options, out)?;
    }
    let prompt = format!("<|user|>\n{question}{end}\n<|assistant|>\n");
    let prompt = tokenizer.encode_fast(prompt, false)?;
    let options =
        GenerateOptions { temperature: 0.0, stop_tokens: vec![stop], ..Default::default() };
    let answer = train.evaluate(|| net.generate(prompt.get_ids(), &options))?;
    Ok((last, tokenizer.decode(&answer, true)?))
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, model, chats, out, epochs, end] = &arguments[..] else {
        return Err("usage: chat_lora MODEL CHATS.jsonl OUT EPOCHS END".into());
    };
    let paths = [model, chats, out].map(Path::new);
    let (_, answer) = train(paths, (epochs.parse()?, 8), end, "Who are you?")?;
    println!("{answer}");
    Ok(())
}
