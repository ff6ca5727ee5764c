//! Our side of `runner.sh`: measures one work per call and prints one number per line.
//!
//! ```text
//! # ms per forward and backward, median
//! side_by_side_runner step NAME ours|compiled|stock ROUNDS
//! # ns per iteration of an empty training step
//! side_by_side_runner loop ITERATIONS INTERVAL
//! # ms per step; under a launcher, of all ranks
//! side_by_side_runner ranks STEPS
//! # the same by `candle_train::Trainer`, 32 images, with SGD's step
//! side_by_side_runner trainer WIDTH STEPS
//! ```

#![expect(clippy::unwrap_used, reason = "a benchmark fails by panicking")]
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "the script reads the output")]

use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use candle_train::{SgdHyper, Trainer};
use collective::{GroupOptions, ProcessGroup, Topology, reducer::ReducerOptions};
use fused_optim::{Slice, SliceMut};
use parking_lot::Mutex;
use runner::config::Config;
use runner::data::{Array, ArrayData, Batch, BoxError, DATASETS, Dataset, Sample, SampleRng};
use runner::engine::candle::candle_core::{DType, Device, Module, ModuleT, Result, Tensor};
use runner::engine::candle::candle_nn::{self, VarBuilder, VarMap};
use runner::engine::candle::{CandleEngine, CandleModel, CandleOptions, ops};
use runner::engine::{
    CompileOptions, Engine, EngineState, GradSink, Gradient, Losses, Model, SharedSink,
    StepContext, TensorSpec,
};
use runner::hooks::{Hook, Priority};
use runner::model::{DistributedDataParallel, MODEL_WRAPPERS, MODELS, ModelWrapper};
use runner::zoo::{Mlp, MlpOptions, ResNet, ResNetOptions, Transformer, TransformerOptions};
use runner::{Runner, RunnerBuilder};

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    match args[..] {
        ["step", name, "ours", rounds] => print(&ours(name, false, rounds.parse().unwrap())),
        ["step", name, "compiled", rounds] => print(&ours(name, true, rounds.parse().unwrap())),
        ["step", name, "stock", rounds] => print(&stock(name, rounds.parse().unwrap())),
        ["loop", iterations, interval] => {
            empty_loop(iterations.parse().unwrap(), interval.parse().unwrap());
        }
        ["ranks", steps] => ranks(steps.parse().unwrap()),
        ["trainer", width, steps] => trainer(width.parse().unwrap(), steps.parse().unwrap()),
        _ => {
            eprintln!("see the head of this file");
            std::process::exit(2);
        }
    }
}

/// Prints the median in milliseconds.
fn print(seconds: &[f64]) {
    let mut sorted = seconds.to_vec();
    sorted.sort_by(f64::total_cmp);
    println!("{:.4}", sorted[sorted.len() / 2] * 1e3);
}

fn timed(rounds: usize, mut step: impl FnMut()) -> Vec<f64> {
    step();
    (0..rounds)
        .map(|_| {
            let start = Instant::now();
            step();
            start.elapsed().as_secs_f64()
        })
        .collect()
}

/// Width of the images, and batch size.
fn extent(name: &str) -> (usize, usize) {
    match name {
        "transformer" => (16, 16),
        _ => (28, 64),
    }
}

fn batch(name: &str) -> Batch {
    let (side, count) = extent(name);
    let pixels = (0..count * side * side).map(|i| ((i * 37) % 255) as f32 / 127.0 - 1.0).collect();
    let labels = (0..count).map(|i| (i % 10) as i64).collect();
    Batch::new()
        .with("inputs", Array::new([count, 1, side, side], ArrayData::F32(pixels)).unwrap())
        .with("labels", Array::new([count], ArrayData::I64(labels)).unwrap())
}

fn engine(name: &str) -> CandleEngine {
    let resnet = |width| ResNetOptions { width, ..ResNetOptions::default() };
    let transformer = TransformerOptions {
        image_size: 16,
        patch_size: 2,
        width: 128,
        feed_forward: 512,
        ..TransformerOptions::default()
    };
    type Model = Box<dyn CandleModel>;
    let name = name.to_owned();
    let build = move |vb: VarBuilder<'static>| -> Result<Model> {
        Ok(match &*name {
            "mlp" => Box::new(Mlp::new(&MlpOptions::default(), vb)?),
            "resnet16" => Box::new(ResNet::new(&resnet(16), vb)?),
            "resnet64" => Box::new(ResNet::new(&resnet(64), vb)?),
            "transformer" => Box::new(Transformer::new(&transformer, vb)?),
            other => panic!("no work called {other}"),
        })
    };
    CandleEngine::new(CandleOptions::default(), build).unwrap()
}

/// Discards gradients.
struct Discard;

impl GradSink for Discard {
    fn ready(&mut self, _: usize, grad: Slice<'_>) -> runner::train_step::Result<()> {
        black_box(grad);
        Ok(())
    }
}

fn ours(name: &str, compile: bool, rounds: usize) -> Vec<f64> {
    let (mut engine, batch) = (engine(name), batch(name));
    if compile {
        engine.compile(&CompileOptions::default()).unwrap();
    }
    let sink: SharedSink = Arc::new(Mutex::new(Discard));
    let mut state = EngineState::default();
    timed(rounds, || {
        let mut cx = StepContext::new(sink.clone(), &mut state);
        black_box(engine.train_step(&batch, &mut cx).unwrap());
    })
}

/// The same networks with candle-nn's layers and operators.
fn stock(name: &str, rounds: usize) -> Vec<f64> {
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    let (side, count) = extent(name);
    let x = Tensor::randn(0_f32, 1.0, (count, 1, side, side), &Device::Cpu).unwrap();
    let labels = Tensor::from_iter((0..count).map(|i| (i % 10) as i64), &Device::Cpu).unwrap();
    let net: Net = match name {
        "mlp" => stock_mlp(&vb).unwrap(),
        "resnet16" => stock_resnet(&vb, 16).unwrap(),
        "resnet64" => stock_resnet(&vb, 64).unwrap(),
        // Stock candle's layer norm has no gradient, so there is nothing to compare.
        other => panic!("stock candle does not train {other}"),
    };
    timed(rounds, || {
        let loss = candle_nn::loss::cross_entropy(&net(&x).unwrap(), &labels).unwrap();
        black_box(loss.backward().unwrap());
    })
}

type Net = Box<dyn Fn(&Tensor) -> Result<Tensor>>;

fn stock_mlp(vb: &VarBuilder<'_>) -> Result<Net> {
    let layer = |i, o, at: usize| candle_nn::linear(i, o, vb.pp(at));
    let layers = [layer(784, 512, 0)?, layer(512, 512, 1)?, layer(512, 10, 2)?];
    Ok(Box::new(move |x| {
        let x = layers[0].forward(&x.flatten_from(1)?)?.relu()?;
        layers[2].forward(&layers[1].forward(&x)?.relu()?)
    }))
}

/// A convolution and its batch norm.
struct ConvNorm(candle_nn::Conv2d, candle_nn::BatchNorm);

impl ConvNorm {
    fn new(i: usize, o: usize, kernel: usize, stride: usize, vb: &VarBuilder<'_>) -> Result<Self> {
        let config = candle_nn::Conv2dConfig { padding: kernel / 2, stride, ..Default::default() };
        let conv = candle_nn::conv2d_no_bias(i, o, kernel, config, vb.pp("conv"))?;
        Ok(Self(conv, candle_nn::batch_norm(o, 1e-5, vb.pp("bn"))?))
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.1.forward_t(&self.0.forward(x)?, true)
    }
}

fn stock_resnet(vb: &VarBuilder<'_>, width: usize) -> Result<Net> {
    let stem = ConvNorm::new(1, width, 3, 1, &vb.pp("stem"))?;
    let mut blocks = Vec::new();
    let mut from = width;
    for stage in 0..4 {
        let to = width << stage;
        for block in 0..2 {
            let vb = vb.pp(stage).pp(block);
            let stride = if stage > 0 && block == 0 { 2 } else { 1 };
            let short = (stride != 1 || from != to)
                .then(|| ConvNorm::new(from, to, 1, stride, &vb.pp("short")))
                .transpose()?;
            let a = ConvNorm::new(from, to, 3, stride, &vb.pp("a"))?;
            blocks.push((a, ConvNorm::new(to, to, 3, 1, &vb.pp("b"))?, short));
            from = to;
        }
    }
    let fc = candle_nn::linear(from, 10, vb.pp("fc"))?;
    Ok(Box::new(move |x| {
        let mut x = stem.forward(x)?.relu()?;
        for (a, b, short) in &blocks {
            let y = b.forward(&a.forward(&x)?.relu()?)?;
            x = match short {
                Some(short) => (y + short.forward(&x)?)?,
                None => (y + x)?,
            }
            .relu()?;
        }
        fc.forward(&x.mean((2, 3))?)
    }))
}

/// An engine whose step does nothing.
struct Empty([TensorSpec; 1], [f32; 1]);

impl Model for Empty {
    fn params(&self) -> &[TensorSpec] {
        &self.0
    }

    fn buffers(&self) -> &[TensorSpec] {
        &[]
    }

    fn with_params(
        &mut self,
        visit: &mut runner::train_step::Visit<'_>,
    ) -> runner::train_step::Result<()> {
        visit(&mut [SliceMut::F32(&mut self.1)])
    }

    fn with_buffers(
        &mut self,
        visit: &mut runner::train_step::Visit<'_>,
    ) -> runner::train_step::Result<()> {
        visit(&mut [])
    }
}

impl Engine for Empty {
    fn train_step(&mut self, _: &Batch, _: &mut StepContext<'_>) -> runner::Result<Losses> {
        Ok(Losses::new(vec![("loss".to_owned(), 1.0)]))
    }

    fn eval(&mut self, _: &Batch) -> runner::Result<Vec<(String, Array)>> {
        Ok(Vec::new())
    }
}

struct Nothing(usize);

impl Dataset for Nothing {
    fn name(&self) -> &'static str {
        "nothing"
    }

    fn len(&self) -> usize {
        self.0
    }

    fn sample(&self, _: usize, _: &mut SampleRng) -> std::result::Result<Sample, BoxError> {
        Ok(Sample::new())
    }
}

/// Discards gradients, and has one of zero.
struct NoGradients(SharedSink);

struct NoSink;

impl GradSink for NoSink {
    fn ready(&mut self, _: usize, _: Slice<'_>) -> runner::train_step::Result<()> {
        Ok(())
    }
}

impl ModelWrapper for NoGradients {
    fn sink(&self) -> SharedSink {
        Arc::clone(&self.0)
    }

    fn prepare(
        &mut self,
        _: Option<&mut dyn Model>,
        _: &mut StepContext<'_>,
    ) -> runner::train_step::Result<()> {
        Ok(())
    }

    fn finish(&mut self) -> runner::train_step::Result<()> {
        Ok(())
    }

    fn with_grads(
        &self,
        visit: &mut dyn FnMut(&[Option<Gradient<'_>>]) -> runner::train_step::Result<()>,
    ) -> runner::train_step::Result<()> {
        visit(&[Some(Gradient::Host(Slice::F32(&[0.0])))])
    }

    fn zero_grad(&mut self) {}
}

/// Measures from the first batch to the last, without the work before and after (mostly the
/// checkpoint), which does not depend on their number.
struct Watch(Arc<Mutex<Duration>>, Instant);

impl Hook for Watch {
    fn name(&self) -> &'static str {
        "Watch"
    }

    fn priority(&self) -> Priority {
        Priority::HIGHEST
    }

    fn before_train_epoch(&mut self, _: &mut Runner) -> runner::Result<()> {
        self.1 = Instant::now();
        Ok(())
    }

    fn after_train_epoch(&mut self, _: &mut Runner) -> runner::Result<()> {
        *self.0.lock() = self.1.elapsed();
        Ok(())
    }
}

/// Runs the loop with the default hooks, which log every `interval` iterations.
fn empty_loop(iterations: usize, interval: usize) {
    let register = MODELS.register("Empty", |_| {
        Ok(Box::new(|_| {
            let dtype = fused_optim::DType::F32;
            let spec = TensorSpec { name: "w".to_owned(), shape: vec![1], dtype };
            Ok(Box::new(Empty([spec], [1.0])))
        }))
    });
    register.unwrap();
    let no_gradients = MODEL_WRAPPERS.register("NoGradients", |_| {
        Ok(Box::new(|_, _| Ok(Box::new(NoGradients(Arc::new(Mutex::new(NoSink)))))))
    });
    no_gradients.unwrap();
    DATASETS
        .register("Nothing", move |_| Ok(Box::new(move || Ok(Arc::new(Nothing(iterations))))))
        .unwrap();
    let dir = std::env::temp_dir().join(format!("side_by_side_runner-{}", std::process::id()));
    let text = format!(
        "model = {{ type = 'Empty' }}
        # A step only after the last batch.
        optim_wrapper = {{ accumulative_counts = {iterations}, optimizer = {{ type = 'SGD', lr = 0.1 }} }}
        model_wrapper_cfg = {{ type = 'NoGradients' }}
        train_dataloader = {{ batch_size = 1, dataset = {{ type = 'Nothing' }} }}
        train_cfg = {{ max_epochs = 1 }}
        [default_hooks]
        logger = {{ interval = {interval} }}"
    );
    let group = ProcessGroup::threads(1, Duration::from_secs(60)).unwrap().remove(0);
    let config = Config::from_text("loop.toml", &text).unwrap();
    let builder = RunnerBuilder::from_config(config).unwrap().work_dir(&dir).process_group(group);
    let took = Arc::new(Mutex::new(Duration::ZERO));
    let watch = Box::new(Watch(Arc::clone(&took), Instant::now()));
    builder.hook(watch).build().unwrap().train().unwrap();
    std::fs::remove_dir_all(&dir).unwrap();
    eprintln!("{:.0}", took.lock().as_secs_f64() * 1e9 / iterations as f64);
}

/// A candle program's own loop around a `Trainer`: `torch_ddp.py`'s twin.
fn trainer(width: usize, steps: usize) {
    let (vars, device) = (VarMap::new(), Device::Cpu);
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &device);
    let net = ResNet::new(&ResNetOptions { width, ..ResNetOptions::default() }, vb).unwrap();
    let sgd = SgdHyper { lr: 0.03, momentum: 0.9, weight_decay: 1e-4, ..SgdHyper::default() };
    let mut train = Trainer::builder(&vars).build(sgd).unwrap();
    let x = Tensor::randn(0_f32, 1.0, (32, 1, 28, 28), &device).unwrap();
    let labels = Tensor::from_iter((0..32).map(|i| i % 10_i64), &device).unwrap();
    let times = timed(steps, || {
        let forward = || ops::cross_entropy(&net.forward_t(&x, true)?, &labels);
        black_box(train.step(forward).unwrap());
    });
    if train.is_main() {
        print(&times);
    }
}

/// Trains ResNet-18 of width 64 with data parallelism over the ranks of the environment.
fn ranks(steps: usize) {
    let topology = Topology::from_env(|name| std::env::var(name).ok()).unwrap();
    let group = collective::init_process_group(&topology, GroupOptions::default()).unwrap();
    let (mut engine, batch) = (engine("resnet64"), batch("resnet64"));
    let mut model =
        DistributedDataParallel::new(group.clone(), engine.params(), ReducerOptions::default())
            .unwrap();
    let mut state = EngineState::default();
    let times = timed(steps, || {
        let mut cx = StepContext::new(model.sink(), &mut state);
        model.prepare(Some(&mut engine), &mut cx).unwrap();
        engine.train_step(&batch, &mut cx).unwrap();
        model.finish().unwrap();
        model.zero_grad();
    });
    if group.rank() == 0 {
        print(&times);
    }
}
