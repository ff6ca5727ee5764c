//! A small BERT of transformers, fine-tuned by LoRA, published, and read by transformers and PEFT.

use std::fs;
use std::path::Path;
use std::process::Command;

use candle_core::{D, Device, Module, Result as CandleResult, Tensor};
use candle_nn::VarBuilder;
use fused_optim::{AdamW, AdamWHyper};
use runner::checkpoint::{ExportOptions, export};
use runner::data::{Array, ArrayData, BoxError, Dataset, Draw, Sample, SampleRng};
use runner::engine::candle::nn::{Embedding, LayerNorm, Linear, embedding, layer_norm, linear};
use runner::engine::candle::{CandleEngine, CandleModel, Loss, Outputs, TensorBatch, ops};
use runner::hooks::CheckpointHook;
use runner::model::LoraOptions;
use runner::optim_wrapper::OptimWrapperFactory;
use runner::{DataLoaderConfig, LoadOptions, Result, Runner, TrainConfig};

const WIDTH: usize = 8;
const HEADS: usize = 2;
const TOKENS: [i64; 5] = [3, 1, 4, 1, 5];

/// BERT without mask and dropout, with the names of transformers.
struct Bert {
    words: Embedding,
    positions: Embedding,
    types: Embedding,
    norm: LayerNorm,
    layers: Vec<Layer>,
}

struct Layer {
    qkv: [Linear; 3],
    out: (Linear, LayerNorm),
    up: Linear,
    down: (Linear, LayerNorm),
}

impl Bert {
    fn new(vb: &VarBuilder<'_>) -> CandleResult<Self> {
        let (embeddings, layers) = (vb.pp("embeddings"), vb.pp("encoder.layer"));
        let table = |rows, name: &str| embedding(rows, WIDTH, embeddings.pp(name));
        Ok(Self {
            words: table(11, "word_embeddings")?,
            positions: table(6, "position_embeddings")?,
            types: table(2, "token_type_embeddings")?,
            norm: layer_norm(WIDTH, 1e-12, embeddings.pp("LayerNorm"))?,
            layers: (0..2).map(|at| Layer::new(&layers.pp(at))).collect::<CandleResult<_>>()?,
        })
    }

    fn forward(&self, tokens: &Tensor) -> CandleResult<Tensor> {
        let places = Tensor::arange(0, TOKENS.len() as i64, &Device::Cpu)?;
        let rows = (self.words.forward(tokens)? + self.types.forward(&tokens.zeros_like()?)?)?;
        let x = self.norm.forward(&rows.broadcast_add(&self.positions.forward(&places)?)?)?;
        self.layers.iter().try_fold(x, |x, layer| layer.forward(&x))
    }
}

impl Layer {
    fn new(vb: &VarBuilder<'_>) -> CandleResult<Self> {
        let own = vb.pp("attention.self");
        let projection = |name| linear(WIDTH, WIDTH, own.pp(name));
        let with_norm = |inputs, vb: VarBuilder<'_>| {
            let dense = linear(inputs, WIDTH, vb.pp("dense"))?;
            Ok::<_, candle_core::Error>((dense, layer_norm(WIDTH, 1e-12, vb.pp("LayerNorm"))?))
        };
        Ok(Self {
            qkv: [projection("query")?, projection("key")?, projection("value")?],
            out: with_norm(WIDTH, vb.pp("attention.output"))?,
            up: linear(WIDTH, 16, vb.pp("intermediate.dense"))?,
            down: with_norm(16, vb.pp("output"))?,
        })
    }

    fn forward(&self, x: &Tensor) -> CandleResult<Tensor> {
        let heads = |layer: &Linear| {
            let y = layer.forward(x)?.reshape(((), TOKENS.len(), HEADS, WIDTH / HEADS))?;
            y.transpose(1, 2)?.contiguous()
        };
        let [q, k, v] = &self.qkv;
        let options = ops::SdpaOptions::default();
        let y = ops::scaled_dot_product_attention(&heads(q)?, &heads(k)?, &heads(v)?, options)?;
        let y = self.out.0.forward(&y.transpose(1, 2)?.reshape(x.shape())?)?;
        let x = self.out.1.forward(&(x + y)?)?;
        let y = self.down.0.forward(&ops::gelu(&self.up.forward(&x)?)?)?;
        self.down.1.forward(&(x + y)?)
    }
}

impl CandleModel for Bert {
    fn loss(&self, batch: &TensorBatch) -> CandleResult<Loss> {
        // Any loss that changes the adapters.
        let y = self.forward(batch.get("tokens")?)?;
        Ok(Loss::new(y.narrow(D::Minus1, 0, 3)?.sqr()?.mean_all()?))
    }

    fn predict(&self, batch: &TensorBatch) -> CandleResult<Outputs> {
        Ok(Outputs::new().with("y", self.forward(batch.get("tokens")?)?))
    }
}

struct Sentence;

impl Dataset for Sentence {
    fn len(&self) -> usize {
        4
    }

    fn sample(&self, _: usize, _: &mut SampleRng) -> Result<Sample, BoxError> {
        Ok(Sample::new().with("tokens", Array::new([TOKENS.len()], TOKENS.to_vec())?))
    }
}

/// Runs Python on the directory, and returns its output.
fn python(script: &str, dir: &Path) -> String {
    let python = std::env::var("TORCH_PYTHON").unwrap_or_else(|_| "python3".into());
    let done = Command::new(python).args(["-c", script]).arg(dir).output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    String::from_utf8(done.stdout).unwrap()
}

const MAKE: &str = "
import sys, torch
from transformers import BertConfig, BertModel
torch.manual_seed(0)
config = BertConfig(vocab_size=11, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
                    max_position_embeddings=6, initializer_range=0.5, hidden_dropout_prob=0.0,
                    attention_probs_dropout_prob=0.0)
BertModel(config, add_pooling_layer=False).save_pretrained(sys.argv[1] + '/base')
";

/// Prints the outputs of the merged model, of base with adapter, and of the base.
const READ: &str = "
import json, sys, torch
from peft import PeftModel
from transformers import AutoModel
def model(name):
    model, info = AutoModel.from_pretrained(sys.argv[1] + '/' + name, add_pooling_layer=False, output_loading_info=True)
    assert not any(info.values()), info
    return model.eval()
tokens = torch.tensor([[3, 1, 4, 1, 5]])
values = lambda model: model(tokens).last_hidden_state.flatten().tolist()
with torch.no_grad():
    adapted = PeftModel.from_pretrained(model('base'), sys.argv[1] + '/adapter')
    print(json.dumps([values(model('merged')), values(adapted), values(model('base'))]))
";

#[test]
#[ignore = "needs transformers and PEFT: TORCH_PYTHON, or python3, imports them; nightly"]
fn nightly_published_weights_load_in_transformers_and_peft() {
    let dir = tempfile::tempdir().unwrap();
    python(MAKE, dir.path());
    let base = dir.path().join("base");
    let hyper = AdamWHyper { lr: 0.1, ..AdamWHyper::default() };
    let lora = LoraOptions {
        rank: 2,
        alpha: 3.0,
        dropout: 0.0,
        targets: ["*.query", "*.value", "*.intermediate.dense"].map(str::to_owned).into(),
    };
    let strict = LoadOptions { strict: Some(true), ..LoadOptions::default() };
    let mut runner = Runner::builder()
        .model(CandleEngine::factory(|vb| Bert::new(&vb)))
        .load_from(base.join("model.safetensors"))
        .load_options(strict)
        .lora(lora)
        .frozen(vec!["*".to_owned()])
        .optim_wrapper(OptimWrapperFactory::fp32(move |count| AdamW::with_one_group(hyper, count)))
        .train_dataloader(DataLoaderConfig::new(Sentence, 2))
        .train_cfg(TrainConfig::new(3))
        .seed(0)
        .hook(Box::new(CheckpointHook::new(1)))
        .work_dir(dir.path().join("run"))
        .build()
        .unwrap();
    runner.train().unwrap();
    for (name, file, adapter) in
        [("merged", "model.safetensors", false), ("adapter", "adapter_model.safetensors", true)]
    {
        fs::create_dir(dir.path().join(name)).unwrap();
        let options = ExportOptions { adapter, ..ExportOptions::default() };
        let checkpoint = dir.path().join("run/epoch_3");
        export(&checkpoint, &dir.path().join(name).join(file), options).unwrap();
    }
    fs::copy(base.join("config.json"), dir.path().join("merged/config.json")).unwrap();

    let batch = Sentence.batch(&[Draw::from(0)]).unwrap();
    let outputs = runner.engine_mut().eval(&batch).unwrap();
    let ArrayData::F32(own) = outputs[0].1.data() else { panic!("{outputs:?}") };
    let said = python(READ, dir.path());
    let [merged, adapted, before]: [Vec<f32>; 3] = serde_json::from_str(&said).unwrap();
    let apart = |other: &[f32]| {
        let apart = own.iter().zip(other).map(|(own, other)| (own - other).abs());
        apart.fold(0.0, f32::max)
    };
    assert_eq!(own.len(), merged.len());
    // Rounding errors of values around 1.
    assert!(apart(&merged) < 1e-5 && apart(&adapted) < 1e-5, "{merged:?} {adapted:?} {own:?}");
    assert!(apart(&before) > 0.1, "not trained: {before:?} {own:?}");
}
