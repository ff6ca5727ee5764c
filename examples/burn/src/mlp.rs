//! A model and its samples.

use std::ops::Range;

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{DType, Device, Tensor, TensorData};

pub const LR: f64 = 1e-2;
pub const EPOCHS: usize = 10;
/// In an epoch: an odd number, so that with `.accumulate(2)` its last batch is a step of its own.
pub const BATCHES: usize = 5;
pub const BATCH: usize = 64;
const FEATURES: usize = 8;

#[derive(Module, Debug)]
pub struct Mlp {
    hidden: Linear,
    output: Linear,
}

impl Mlp {
    /// With the same weights in every process.
    pub fn new(device: &Device) -> Self {
        device.seed(0);
        Self {
            hidden: LinearConfig::new(FEATURES, 32).init(device),
            output: LinearConfig::new(32, 1).init(device),
        }
    }

    /// The mean squared error in f32, of products in the type of the weights.
    pub fn loss(&self, (inputs, targets): &(Tensor<2>, Tensor<2>)) -> Tensor<1> {
        let inputs = inputs.clone().cast(self.hidden.weight.dtype());
        let outputs = self.output.forward(self.hidden.forward(inputs).tanh());
        (outputs.cast(DType::F32) - targets.clone()).square().mean()
    }
}

/// Some samples of an epoch's batch, and what is to be learned of them.
pub fn samples(batch: usize, rows: Range<usize>, device: &Device) -> (Tensor<2>, Tensor<2>) {
    let rows = batch * BATCH + rows.start..batch * BATCH + rows.end;
    let feature = |i: usize| (i as f32 * 0.7).sin();
    let inputs = (rows.start * FEATURES..rows.end * FEATURES).map(feature).collect::<Vec<_>>();
    let targets = inputs.chunks(FEATURES).map(|x| x[0] * x[1] + x[2].max(x[3])).collect();
    let tensor = |values: Vec<f32>| {
        let shape = [rows.len(), values.len() / rows.len()];
        Tensor::from_data(TensorData::new(values, shape), device)
    };
    (tensor(inputs), tensor(targets))
}
