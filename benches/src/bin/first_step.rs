//! Cost of the candle engine's gradient check: the time of a run's first step, which has two more
//! forward passes, compared with the following steps, for networks of several depths.
//!
//! ```text
//! first_step [NETWORK | DEPTH]...
//! ```

#![expect(clippy::unwrap_used, reason = "a benchmark fails by panicking")]
#![expect(clippy::print_stdout, reason = "this program's result is what it prints")]

use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

use fused_optim::{DType, Slice};
use parking_lot::Mutex;
use runner::data::{Array, ArrayData, Batch};
use runner::engine::candle::candle_core::{self, D, Module, Result, Tensor};
use runner::engine::candle::candle_nn::{self, Init, RNN, VarBuilder, ops, rnn};
use runner::engine::candle::{
    CandleEngine, CandleModel, CandleOptions, Loss, Outputs, TensorBatch, ops as right,
};
use runner::engine::{Engine, EngineState, GradSink, SharedSink, StepContext};

fn main() {
    let (mut depths, mut names) = (Vec::new(), Vec::new());
    for arg in std::env::args().skip(1) {
        arg.parse::<usize>().map_or_else(|_| names.push(arg), |depth| depths.push(depth));
    }
    if depths.is_empty() {
        depths = vec![4, 16];
    }
    println!("| network, type | layers | a step, ms | the first one, ms | first / step |");
    println!("|---|---|---|---|---|");
    let networks: [(&str, Network, &[usize]); 5] = [
        ("convolutions, leaky ReLU", convolution, &[8, 16, 16, 16]),
        ("transformer", transformer, &[8, 48, WIDTH]),
        ("LSTM", lstm, &[8, 12, WIDTH]),
        ("experts by `index_add`", experts, &[8, 48, WIDTH]),
        ("`ops::scatter` of constants", constants, &[8, 48, WIDTH]),
    ];
    let is_selected = |name: &str| names.is_empty() || names.iter().any(|n| name.contains(n));
    for (name, network, shape) in networks.into_iter().filter(|(name, ..)| is_selected(name)) {
        for (dtype, of) in [(DType::F32, "f32"), (DType::F16, "f16")] {
            for depth in &depths {
                let (first, step) = first_and_next(network, shape, *depth, dtype);
                println!(
                    "| {name}, {of} | {depth} | {:.1} | {:.1} | {:.1} |",
                    step * 1e3,
                    first * 1e3,
                    first / step
                );
            }
        }
    }
}

const WIDTH: usize = 64;

/// Seconds of the first step, and the median of the following ones.
fn first_and_next(network: Network, shape: &[usize], depth: usize, dtype: DType) -> (f64, f64) {
    let count = shape.iter().product();
    let numbers = (0..count).map(|i: usize| ((i * 37) % 255) as f32 / 127.0 - 1.0).collect();
    let batch =
        Batch::new().with("x", Array::new(shape.to_vec(), ArrayData::F32(numbers)).unwrap());
    let sink: SharedSink = Arc::new(Mutex::new(Discard));
    let run = || {
        let options = CandleOptions { dtype, ..CandleOptions::default() };
        let build = |vb: VarBuilder<'static>| {
            let layers = (0..depth).map(|at| network(vb.pp(at)));
            Ok(Chain(layers.collect::<Result<_>>()?))
        };
        let mut engine = CandleEngine::new(options, build).unwrap();
        let mut step = || {
            let start = Instant::now();
            let mut state = EngineState::default();
            let mut cx = StepContext::new(sink.clone(), &mut state);
            black_box(engine.train_step(&batch, &mut cx).unwrap());
            start.elapsed().as_secs_f64()
        };
        let first = step();
        let mut next = [step(), step(), step()];
        next.sort_by(f64::total_cmp);
        (first, next[1])
    };
    // Warm-up: the first run allocates memory.
    run();
    run()
}

/// Discards gradients.
struct Discard;

impl GradSink for Discard {
    fn ready(&mut self, _: usize, grad: Slice<'_>) -> runner::train_step::Result<()> {
        black_box(grad);
        Ok(())
    }
}

type Layer = Box<dyn Fn(&Tensor) -> Result<Tensor> + Send>;

/// Builds a layer that keeps its input's shape.
type Network = fn(VarBuilder<'static>) -> Result<Layer>;

struct Chain(Vec<Layer>);

impl CandleModel for Chain {
    fn loss(&self, batch: &TensorBatch) -> Result<Loss> {
        let y = self.0.iter().try_fold(batch.get("x")?.clone(), |x, layer| layer(&x))?;
        Ok(Loss::new(y.to_dtype(candle_core::DType::F32)?.sqr()?.mean_all()?))
    }

    fn predict(&self, _: &TensorBatch) -> Result<Outputs> {
        Ok(Outputs::new())
    }
}

fn convolution(vb: VarBuilder<'static>) -> Result<Layer> {
    let config = candle_nn::Conv2dConfig { padding: 1, ..Default::default() };
    let conv = candle_nn::conv2d(16, 16, 3, config, vb)?;
    Ok(Box::new(move |x| ops::leaky_relu(&conv.forward(x)?, 0.1)))
}

/// A transformer layer with one head.
fn transformer(vb: VarBuilder<'static>) -> Result<Layer> {
    let linear = |from, to, name: &str| candle_nn::linear(from, to, vb.pp(name));
    let norm = |name: &str| -> Result<_> {
        let scale = vb.get_with_hints(WIDTH, &format!("{name}.weight"), Init::Const(1.0))?;
        let shift = vb.get_with_hints(WIDTH, &format!("{name}.bias"), Init::Const(0.0))?;
        Ok(move |x: &Tensor| ops::layer_norm_slow(x, &scale, &shift, 1e-5))
    };
    let (before, after) = (norm("before")?, norm("after")?);
    let [q, k, v] =
        [linear(WIDTH, WIDTH, "q")?, linear(WIDTH, WIDTH, "k")?, linear(WIDTH, WIDTH, "v")?];
    let (up, down) = (linear(WIDTH, 4 * WIDTH, "up")?, linear(4 * WIDTH, WIDTH, "down")?);
    Ok(Box::new(move |x| {
        let y = before(x)?;
        let scores = (q.forward(&y)?.matmul(&k.forward(&y)?.t()?)? * 0.125)?;
        let x = (x + ops::softmax(&scores, D::Minus1)?.matmul(&v.forward(&y)?)?)?;
        &x + down.forward(&up.forward(&after(&x)?)?.gelu()?)?
    }))
}

fn lstm(vb: VarBuilder<'static>) -> Result<Layer> {
    let lstm = rnn::lstm(WIDTH, WIDTH, rnn::LSTMConfig::default(), vb)?;
    Ok(Box::new(move |x| {
        let states = lstm.seq(x)?;
        Tensor::stack(&states.iter().map(rnn::LSTMState::h).collect::<Vec<_>>(), 1)
    }))
}

/// Four experts, each for a quarter of the rows.
fn experts(vb: VarBuilder<'static>) -> Result<Layer> {
    let experts: Vec<_> =
        (0..4).map(|i| candle_nn::linear(WIDTH, WIDTH, vb.pp(i))).collect::<Result<_>>()?;
    Ok(Box::new(move |x| {
        let rows = x.flatten_to(1)?;
        let mut y = rows.clone();
        for (i, expert) in experts.iter().enumerate() {
            let own = (0..rows.dim(0)? as u32).filter(|row| *row as usize % 4 == i);
            let own = Tensor::from_iter(own, x.device())?;
            y = y.index_add(&own, &expert.forward(&rows.index_select(&own, 0)?)?.silu()?, 0)?;
        }
        y.reshape(x.shape())
    }))
}

fn constants(vb: VarBuilder<'static>) -> Result<Layer> {
    let linear = candle_nn::linear(WIDTH, WIDTH, vb)?;
    Ok(Box::new(move |x| {
        let x = linear.forward(x)?;
        let dims = [x.dim(0)?, 3, WIDTH];
        let count = dims.iter().product::<usize>() as u32;
        let places = (0..count).map(|i| i / WIDTH as u32 % 3 + i % 45);
        let places = Tensor::from_iter(places, x.device())?.reshape(&dims)?;
        let numbers =
            Tensor::from_iter((0..count).map(|i| (i * 37 % 255) as f32 / 255.0), x.device())?;
        right::scatter(&x, &places, &numbers.reshape(&dims)?.to_dtype(x.dtype())?, 1)
    }))
}
