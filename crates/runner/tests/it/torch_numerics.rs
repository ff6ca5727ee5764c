//! Compares the candle engine with libtorch: the zoo's networks, with the same parameters, batches
//! and optimizer, in `f32` and under autocast.
//!
//! libtorch runs in a Python process: `TORCH_PYTHON` is a Python that can import torch, by default
//! `python3`.
//!
//! `tests/tch` makes the same comparison in one process, through the `tch` crate, with tch's own
//! optimizers as well. It is a separate workspace and not a feature of this crate, because tch 0.26
//! compiles only against libtorch 2.13, while `pip install` brings torch 2.15, which the other
//! tests use: with such a feature, `--all-features`, as used for lints and documentation, would
//! need a second torch. `.ci/nightly` installs it.

use std::io::Write;
use std::process::{Command, Stdio};
use std::time::Duration;

use candle_core::Result;
use candle_nn::VarBuilder;
use collective::{ProcessGroup, reducer::ReducerOptions};
use fused_optim::{DType, Sgd, SgdHyper, SliceMut};
use runner::data::{Array, ArrayData, Batch};
use runner::engine::candle::{CandleEngine, CandleModel, CandleOptions};
use runner::engine::{EngineState, Model, TensorSpec};
use runner::model::DistributedDataParallel;
use runner::optim_wrapper::{OptimWrapper, update_params};
use runner::zoo::{
    Gpt, GptOptions, Mlp, MlpOptions, ResNet, ResNetOptions, Transformer, TransformerOptions,
};
use serde_json::{Map, Value, json};

const PEER: &str = r#"
import json, sys
import torch
from torch import nn
from torch.nn import functional as F

class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 16), nn.Linear(16, 4)])
    def forward(self, x):
        return self.layers[1](F.relu(self.layers[0](x.flatten(1))))

class Block(nn.Module):
    def __init__(self, i, o, stride):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(i, o, 3, stride, 1, bias=False), nn.BatchNorm2d(o)
        self.conv2, self.bn2 = nn.Conv2d(o, o, 3, 1, 1, bias=False), nn.BatchNorm2d(o)
        self.downsample = None
        if stride != 1 or i != o:
            self.downsample = nn.Sequential(nn.Conv2d(i, o, 1, stride, bias=False), nn.BatchNorm2d(o))
    def forward(self, x):
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + (x if self.downsample is None else self.downsample(x)))

class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(1, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16)
        self.layer1 = nn.Sequential(Block(16, 16, 1))
        self.layer2 = nn.Sequential(Block(16, 32, 2))
        self.fc = nn.Linear(32, 4)
    def forward(self, x):
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 3, 2, 1)
        return self.fc(self.layer2(self.layer1(x)).mean((2, 3)))

class Bottleneck(nn.Module):
    def __init__(self, i, width, stride):
        super().__init__()
        o = 4 * width
        self.conv1, self.bn1 = nn.Conv2d(i, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, o, 1, bias=False), nn.BatchNorm2d(o)
        self.downsample = None
        if stride != 1 or i != o:
            self.downsample = nn.Sequential(nn.Conv2d(i, o, 1, stride, bias=False), nn.BatchNorm2d(o))
    def forward(self, x):
        y = F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))
        y = self.bn3(self.conv3(y))
        return F.relu(y + (x if self.downsample is None else self.downsample(x)))

class Bottlenecks(ResNet):
    def __init__(self):
        super().__init__()
        self.layer1 = nn.Sequential(Bottleneck(16, 16, 1))
        self.layer2 = nn.Sequential(Bottleneck(64, 32, 2))
        self.fc = nn.Linear(128, 4)

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.attn = nn.ModuleDict(dict(c_attn=nn.Linear(16, 48), c_proj=nn.Linear(16, 16)))
        self.mlp = nn.ModuleDict(dict(c_fc=nn.Linear(16, 64), c_proj=nn.Linear(64, 16)))
    def forward(self, x):
        n, t, c = x.shape
        qkv = self.attn["c_attn"](self.ln_1(x)).view(n, t, 3, 2, c // 2).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*qkv, is_causal=True).transpose(1, 2).reshape(n, t, c)
        x = x + self.attn["c_proj"](y)
        return x + self.mlp["c_proj"](F.gelu(self.mlp["c_fc"](self.ln_2(x))))

class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(12, 16), nn.Embedding(8, 16)
        self.h, self.ln_f = nn.ModuleList([Layer(), Layer()]), nn.LayerNorm(16)
    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe.weight
        for layer in self.h:
            x = layer(x)
        return F.linear(self.ln_f(x), self.wte.weight).flatten(0, 1)

class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.position = nn.Linear(4, 16), nn.Parameter(torch.zeros(16, 16))
        layer = lambda: nn.TransformerEncoderLayer(
            16, 2, 32, dropout=0.0, activation="gelu", batch_first=True, norm_first=True)
        self.layers = nn.ModuleList([layer(), layer()])
        self.norm, self.fc = nn.LayerNorm(16), nn.Linear(16, 4)
    def forward(self, x):
        n = x.shape[0]
        x = self.embed(x.reshape(n, 1, 4, 2, 4, 2).permute(0, 2, 4, 1, 3, 5).reshape(n, 16, 4))
        x = x + self.position
        for layer in self.layers:
            x = layer(x)
        return self.fc(self.norm(x).mean(1))

torch.set_num_threads(1)
def train(job):
    models = {"mlp": Mlp, "resnet": ResNet, "bottlenecks": Bottlenecks, "transformer": Transformer, "gpt": Gpt}
    model = models[job["name"]]().train()
    state = model.state_dict()
    for name, values in job["tensors"].items():
        state[name] = torch.tensor(values, dtype=torch.float32).reshape(state[name].shape)
    model.load_state_dict(state)
    half = {"f32": None, "f16": torch.float16, "bf16": torch.bfloat16}[job["dtype"]]
    optimizer = torch.optim.SGD(model.parameters(), lr=job["lr"], momentum=0.9)
    losses = []
    for inputs, labels in job["batches"]:
        x = torch.tensor(inputs)
        x = x.reshape(-1, 8) if job["name"] == "gpt" else x.float().reshape(-1, 1, 8, 8)
        with torch.autocast("cpu", dtype=half or torch.bfloat16, enabled=half is not None):
            loss = F.cross_entropy(model(x), torch.tensor(labels))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    state = model.state_dict().items()
    return losses, {n: t.flatten().tolist() for n, t in state if n in job["tensors"]}

json.dump([train(job) for job in json.load(sys.stdin)], sys.stdout)
"#;

const STEPS: usize = 12;
const BATCH: usize = 16;
const LR: f64 = 0.05;

fn engine(name: &'static str) -> CandleEngine {
    let build = move |vb: VarBuilder<'static>| -> Result<Box<dyn CandleModel>> {
        Ok(match name {
            "mlp" => {
                let (in_features, hidden) = (64, vec![16]);
                let options =
                    MlpOptions { in_features, hidden, num_classes: 4, ..MlpOptions::default() };
                Box::new(Mlp::new(&options, vb)?)
            }
            "resnet" | "bottlenecks" => {
                let options = ResNetOptions {
                    bottleneck: name == "bottlenecks",
                    blocks: vec![1, 1],
                    num_classes: 4,
                    stem_max_pool: true,
                    ..ResNetOptions::default()
                };
                Box::new(ResNet::new(&options, vb)?)
            }
            "gpt" => {
                let options =
                    GptOptions { vocab_size: 12, context: 8, width: 16, heads: 2, layers: 2 };
                Box::new(Gpt::new(&options, vb)?)
            }
            _ => {
                let options = TransformerOptions {
                    image_size: 8,
                    patch_size: 2,
                    width: 16,
                    heads: 2,
                    feed_forward: 32,
                    num_classes: 4,
                    ..TransformerOptions::default()
                };
                Box::new(Transformer::new(&options, vb)?)
            }
        })
    };
    CandleEngine::new(CandleOptions::default(), build).unwrap()
}

/// Returns a batch for a model: inputs, their shape, and labels.
fn batch(name: &str, step: usize) -> (ArrayData, Vec<usize>, Vec<i64>) {
    if name == "gpt" {
        let (inputs, labels) = text(step);
        return (ArrayData::I64(inputs), vec![BATCH, 8], labels);
    }
    let (inputs, labels) = images(step);
    (ArrayData::F32(inputs), vec![BATCH, 1, 8, 8], labels)
}

/// Tokens, each of which determines the next except for some noise; and the next tokens as labels.
fn text(step: usize) -> (Vec<i64>, Vec<i64>) {
    let follows =
        |at: usize, token: usize| if at.is_multiple_of(9) { at / 9 } else { 5 * token + 1 } % 12;
    let line = |i: usize| {
        let first = step * 7 + i * 5;
        (1..9).scan(first % 12, move |token, at| {
            let before = std::mem::replace(token, follows(first + at, *token));
            Some((before as i64, *token as i64))
        })
    };
    (0..BATCH).flat_map(line).unzip()
}

/// Images of four kinds of stripes, shuffled and with noise.
fn images(step: usize) -> (Vec<f32>, Vec<i64>) {
    let noise = |at: usize| ((at * 2_654_435_761) % 1009) as f32 / 1009.0 - 0.5;
    let labels: Vec<_> = (0..BATCH).map(|i| ((step * 7 + i * 5) % 4) as i64).collect();
    let image = |i: usize| {
        let label = labels[i] as usize;
        (0..64).map(move |at| {
            let along = if label < 2 { at / 8 } else { at % 8 };
            let stripe = if along % (label % 2 + 2) == 0 { 1.0 } else { -0.5 };
            stripe + noise((step * BATCH + i) * 64 + at)
        })
    };
    ((0..BATCH).flat_map(image).collect(), labels)
}

/// Returns all tensors of the model by name, widened to JSON's numbers.
fn tensors(engine: &mut CandleEngine) -> Map<String, Value> {
    let mut all = Map::new();
    let mut take = |specs: &[TensorSpec], slices: &mut [SliceMut<'_>]| {
        for (spec, slice) in specs.iter().zip(slices) {
            let SliceMut::F32(values) = slice else { panic!("{} is f32", spec.name) };
            all.insert(spec.name.clone(), json!(values));
        }
        Ok(())
    };
    let (params, buffers) = (engine.params().to_vec(), engine.buffers().to_vec());
    engine.with_params(&mut |slices| take(&params, slices)).unwrap();
    engine.with_buffers(&mut |slices| take(&buffers, slices)).unwrap();
    all
}

/// Returns the losses, and every tensor before and after training.
fn ours(name: &'static str, dtype: DType) -> (Vec<f64>, [Map<String, Value>; 2]) {
    let mut engine = engine(name);
    let before = tensors(&mut engine);
    let group = ProcessGroup::threads(1, Duration::from_secs(60)).unwrap().remove(0);
    let options = ReducerOptions::default();
    let mut model = DistributedDataParallel::new(group, engine.params(), options).unwrap();
    let hyper = SgdHyper { lr: LR, momentum: 0.9, ..SgdHyper::default() };
    let sgd = Sgd::with_one_group(hyper, engine.params().len()).unwrap();
    let autocast = (dtype != DType::F32).then_some(dtype);
    let mut optim = OptimWrapper::new(Box::new(sgd), 1).with_autocast(autocast);
    let mut state = EngineState::default();
    let losses = (0..STEPS).map(|step| {
        let (inputs, shape, labels) = batch(name, step);
        let shape_of_labels = if name == "gpt" { shape.clone() } else { vec![BATCH] };
        let batch = Batch::new()
            .with("inputs", Array::new(shape, inputs).unwrap())
            .with("labels", Array::new(shape_of_labels, ArrayData::I64(labels)).unwrap());
        let update =
            update_params(&mut optim, (&mut engine, &mut model), &batch, &mut state).unwrap();
        update.losses.scalars().unwrap()[0].1
    });
    let losses = losses.collect();
    (losses, [before, tensors(&mut engine)])
}

/// Returns torch's results, job by job: losses, then tensors.
fn theirs(python: &str, jobs: &[Value]) -> Vec<(Vec<f64>, Value)> {
    let mut peer = Command::new(python)
        .args(["-c", PEER])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    peer.stdin.take().unwrap().write_all(json!(jobs).to_string().as_bytes()).unwrap();
    let output = peer.wait_with_output().unwrap();
    assert!(output.status.success(), "torch's side");
    serde_json::from_slice(&output.stdout).unwrap()
}

fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|v| v.as_f64().unwrap()).collect()
}

/// Norm of the difference, relative to that of `b`.
fn distance(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    let length = |v: &mut dyn Iterator<Item = f64>| v.map(|v| v * v).sum::<f64>().sqrt();
    length(&mut a.iter().zip(b).map(|(a, b)| a - b)) / length(&mut b.iter().copied()).max(1e-3)
}

#[test]
#[ignore = "needs PyTorch: TORCH_PYTHON, or python3, imports torch"]
fn training_matches_libtorch() {
    let python = std::env::var("TORCH_PYTHON").unwrap_or_else(|_| "python3".into());
    // Tolerances of losses and of tensors. In f32 for rounding errors that grow over twelve steps;
    // in half types for their last digits (2^-11, 2^-8), which affect small tensors more.
    let types = [
        (DType::F32, "f32", 1e-5, 1e-3),
        (DType::F16, "f16", 5e-3, 1e-1),
        (DType::Bf16, "bf16", 2e-2, 4e-1),
    ];
    let (mut runs, mut jobs) = (Vec::new(), Vec::new());
    for name in ["mlp", "resnet", "bottlenecks", "transformer", "gpt"] {
        let batches: Vec<_> = (0..STEPS)
            .map(|step| match batch(name, step) {
                (ArrayData::I64(inputs), _, labels) => json!([inputs, labels]),
                (ArrayData::F32(inputs), _, labels) => json!([inputs, labels]),
                (other, ..) => panic!("{other:?}"),
            })
            .collect();
        let mut wide = Vec::new();
        for (dtype, said, of_losses, of_tensors) in types {
            let (losses, [before, after]) = ours(name, dtype);
            if dtype == DType::F32 {
                wide.clone_from(&losses);
            } else {
                assert_ne!(losses, wide, "{name} ran in {said}");
            }
            jobs.push(json!({
                "name": name, "dtype": said, "tensors": before, "batches": batches, "lr": LR,
            }));
            runs.push((format!("{name} in {said}"), losses, before, after, of_losses, of_tensors));
        }
    }
    let peer = theirs(&python, &jobs);
    assert_eq!(peer.len(), runs.len());
    for (run, (wanted, tensors)) in runs.iter().zip(peer) {
        let (what, losses, before, after, of_losses, of_tensors) = run;
        assert!(wanted[STEPS - 1] < 0.9 * wanted[0], "{what} learns: {wanted:?}");
        let off = distance(losses, &wanted);
        eprintln!("{what}: losses are off by {off:.1e}");
        assert!(off < *of_losses, "{what}: losses are off by {off}: {losses:?} {wanted:?}");
        for (tensor, values) in after {
            let off = distance(&numbers(values), &numbers(&tensors[tensor]));
            assert!(off < *of_tensors, "{what}: {tensor} is off by {off}");
        }
        // Agreement is meaningful only for tensors that have changed by more than the tolerance.
        let moved = after.iter().map(|(name, v)| distance(&numbers(v), &numbers(&before[name])));
        assert!(moved.fold(0.0, f64::max) > 10.0 * of_losses, "{what} moves");
    }
}
