//! AdamW on candle's variables with ResNet-50's element counts: `fused_optim::candle::VarOptimizer`
//! compared with `candle_nn::AdamW`.
//!
//! ```sh
//! RAYON_NUM_THREADS=1 cargo run --release -p benches --features candle --bin candle_adamw \
//!   [THREADS [ROUNDS]]
//! ```
//!
//! Both update their own variables with equal gradients and must agree after three steps. Then, in
//! each round, each takes one untimed step and three timed ones; the time is the median of all
//! timed steps. THREADS (default 1) is the number of our threads; candle uses rayon's.

#![expect(clippy::print_stdout, reason = "this program's result is what it prints")]

use std::time::Instant;

use benches::tensors::{resnet50, tensors};
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Result, Tensor, Var, bail};
use candle_nn::Optimizer;
use fused_optim::candle::VarOptimizer;
use fused_optim::{AdamW, AdamWHyper};

fn main() -> Result<()> {
    let mut args = std::env::args().skip(1).map(|arg| arg.parse::<usize>());
    let mut next = |default| args.next().unwrap_or(Ok(default)).map_err(candle_core::Error::wrap);
    let (threads, rounds) = (next(1)?, next(15)?);
    let (ours, our_grads) = vars()?;
    let (theirs, their_grads) = vars()?;
    let mut fused = VarOptimizer::<AdamW>::new(ours.clone(), AdamWHyper::default())?;
    fused.set_threads(threads);
    let mut candle = candle_nn::AdamW::new(theirs.clone(), candle_nn::ParamsAdamW::default())?;
    for _ in 0..3 {
        fused.step(&our_grads)?;
        candle.step(&their_grads)?;
    }
    for (a, b) in ours.iter().zip(&theirs) {
        let difference = (a.as_tensor() - b.as_tensor())?.abs()?.max_all()?.to_scalar::<f32>()?;
        if difference > 1e-6 {
            bail!("weights differ by {difference}");
        }
    }
    let (mut our_times, mut their_times) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        time(&mut fused, &our_grads, &mut our_times)?;
        time(&mut candle, &their_grads, &mut their_times)?;
    }
    let (ours, theirs) = (median(our_times), median(their_times));
    println!("| what | ours | peer | its time | ratio |\n|---|---|---|---|---|");
    println!(
        "| AdamW, ResNet-50, candle's variables, {threads} threads | {ours:.1} ms | candle | {theirs:.1} ms | {:.2} |",
        theirs / ours
    );
    Ok(())
}

/// Variables and a gradient for each.
fn vars() -> Result<(Vec<Var>, GradStore)> {
    let mut grads = Var::zeros(1, DType::F32, &Device::Cpu)?.sum_all()?.backward()?;
    let mut vars = Vec::new();
    for values in tensors(&resnet50()) {
        let count = values.len();
        let tensor = Tensor::from_vec(values, count, &Device::Cpu)?;
        let var = Var::from_tensor(&tensor)?;
        grads.insert(&var, tensor);
        vars.push(var);
    }
    Ok((vars, grads))
}

/// Adds the milliseconds of three steps, after an untimed one.
fn time(optimizer: &mut impl Optimizer, grads: &GradStore, times: &mut Vec<f64>) -> Result<()> {
    optimizer.step(grads)?;
    for _ in 0..3 {
        let start = Instant::now();
        optimizer.step(grads)?;
        times.push(1e3 * start.elapsed().as_secs_f64());
    }
    Ok(())
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}
