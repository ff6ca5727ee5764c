//! Tests that compare a trainer with a hand-written loop. Ranks are threads.

#![expect(clippy::unwrap_used, reason = "a test")]

mod by_hand;
mod checkpoint;
#[path = "../../../collective/tests/it/common/collector.rs"]
mod collector;
mod compile;
mod errors;
mod eval_weights;
mod examples;
mod failures;
mod first_step;
mod order;
mod parts;
mod process;
mod recovery;
mod refusals;
mod resumable;
mod resume;
mod schedules;
mod step_on;
mod trace;
mod weighted;

use std::time::Duration;

use candle_core::{DType, Device, Module, Result, Tensor};
use candle_nn::{VarBuilder, VarMap};
use candle_ops::nn::{Linear, linear};
use collective::ProcessGroup;

const FEATURES: usize = 16;
const SAMPLES: usize = 96;

/// Two linear layers with dropout between them.
struct Net(Linear, Linear);

impl Net {
    fn new(vb: VarBuilder<'_>) -> Result<Self> {
        Ok(Self(linear(FEATURES, 32, vb.pp("b"))?, linear(32, 4, vb.pp("a"))?))
    }
}

impl Module for Net {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let x = candle_ops::dropout(&candle_ops::relu(&self.0.forward(x)?)?, 0.1)?;
        self.1.forward(&x)
    }
}

/// A model whose weights depend only on `seed`.
fn model(seed: u32) -> (VarMap, Net) {
    let vars = VarMap::new();
    let net = Net::new(VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu)).unwrap();
    let mut named: Vec<_> = vars.data().lock().unwrap().clone().into_iter().collect();
    named.sort_by(|(a, _), (b, _)| a.cmp(b));
    for (index, (_, var)) in named.iter().enumerate() {
        let value = |i: usize| ((i * 7 + index * 13) as f32 * 0.37 + seed as f32).sin() * 0.3;
        let values: Vec<_> = (0..var.elem_count()).map(value).collect();
        var.set(&Tensor::from_vec(values, var.shape(), &Device::Cpu).unwrap()).unwrap();
    }
    (vars, net)
}

/// Inputs and labels of these samples.
fn batch(rows: &[u32]) -> (Tensor, Tensor) {
    let x =
        |row: u32| (0..FEATURES).map(move |i| ((row as usize * FEATURES + i) as f32 * 0.731).sin());
    let xs: Vec<f32> = rows.iter().flat_map(|row| x(*row)).collect();
    let ys: Vec<i64> = rows.iter().map(|row| i64::from(x(*row).sum::<f32>() > 0.0)).collect();
    let xs = Tensor::from_vec(xs, (rows.len(), FEATURES), &Device::Cpu).unwrap();
    (xs, Tensor::from_vec(ys, rows.len(), &Device::Cpu).unwrap())
}

/// Runs a rank on each of `count` threads.
fn ranks<R: Send>(count: usize, run: impl Fn(ProcessGroup) -> R + Sync) -> Vec<R> {
    let groups = ProcessGroup::threads(count, Duration::from_secs(60)).unwrap();
    std::thread::scope(|scope| {
        let threads: Vec<_> = groups.into_iter().map(|group| scope.spawn(|| run(group))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// All values of the variables, in order of names.
fn weights(vars: &VarMap) -> Vec<Vec<f32>> {
    let mut named: Vec<_> = vars.data().lock().unwrap().clone().into_iter().collect();
    named.sort_by(|(a, _), (b, _)| a.cmp(b));
    named.iter().map(|(_, var)| var.flatten_all().unwrap().to_vec1().unwrap()).collect()
}
