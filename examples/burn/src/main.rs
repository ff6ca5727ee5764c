//! A burn program on two processes: burn computes losses and gradients, `collective` averages the
//! gradients, `amp` scales the loss, `fused-optim` steps.
//!
//! ```sh
//! cargo run --manifest-path examples/burn/Cargo.toml
//! ```
//!
//! It starts itself as two ranks, each of which has half of the batch, trains the same model on the
//! whole batch with burn's AdamW in one process, and fails if a loss differs by more than
//! [`TOLERANCE`].
//!
//! All of it is on the CPU. With a model on a GPU the same program copies the gradients to the host
//! and the weights back at each step, and waits for the device at each copy: 8 bytes for each f32
//! parameter. `bin/f16.rs` steps on the device.

use std::error::Error;
use std::net::TcpListener;
use std::process::{Command, Stdio};

use amp::{LossScaler, LossScalerOptions};
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{Device, Tensor, TensorData};
use collective::{GroupOptions, ReduceOp, Topology, init_process_group};
use fused_optim::{AdamW, AdamWHyper, Applied, FoundInf, Optimizer, ParamMut, Slice, StepCtl};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

const RANKS: usize = 2;
const STEPS: usize = 50;
const BATCH: usize = 64;
const FEATURES: usize = 8;
const LR: f64 = 1e-2;
/// Largest relative difference of two losses: sums are taken in another order, and each optimizer
/// rounds in its own way.
const TOLERANCE: f32 = 1e-4;

fn main() -> Result<()> {
    let topology = Topology::from_env(|name| std::env::var(name).ok())?;
    if topology.world_size > 1 {
        return train_rank(&topology);
    }
    let (ours, burns) = (train_on_two_processes()?, train_with_burn());
    for (step, (our, burn)) in ours.iter().zip(&burns).enumerate() {
        if (our - burn).abs() > TOLERANCE * burn.abs() {
            return Err(format!("step {step}: the losses are {our} and {burn}").into());
        }
    }
    println!("{RANKS} processes and one: equal losses for {STEPS} steps, to {}", burns[STEPS - 1]);
    Ok(())
}

/// burn's AdamW on the whole batch, in this process. Returns the losses.
fn train_with_burn() -> Vec<f32> {
    let device = Device::flex().autodiff();
    let (mut model, (inputs, targets)) = (Mlp::new(&device), batch(0..BATCH, &device));
    let mut adamw = AdamWConfig::new().init();
    let mut losses = Vec::new();
    for _ in 0..STEPS {
        let loss = model.loss(&inputs, &targets);
        losses.push(loss.clone().into_scalar::<f32>());
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        model = adamw.step(LR, model, grads);
    }
    losses
}

/// Starts the ranks, which run [`train_rank`]. Returns the losses that rank 0 prints.
fn train_on_two_processes() -> Result<Vec<f32>> {
    let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port().to_string();
    let start = |rank: usize| {
        Command::new(std::env::current_exe()?)
            .envs([("RANK", rank.to_string()), ("WORLD_SIZE", RANKS.to_string())])
            .envs([("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", &port)])
            .stdout(Stdio::piped())
            .spawn()
    };
    let ranks = (0..RANKS).map(start).collect::<std::io::Result<Vec<_>>>()?;
    let mut losses = Vec::new();
    for (rank, child) in ranks.into_iter().enumerate() {
        let output = child.wait_with_output()?;
        if !output.status.success() {
            return Err(format!("rank {rank}: {}", output.status).into());
        }
        for line in String::from_utf8(output.stdout)?.lines() {
            losses.push(line.parse()?);
        }
    }
    if losses.len() != STEPS {
        return Err(format!("{} losses from rank 0", losses.len()).into());
    }
    Ok(losses)
}

/// One rank: its part of the batch. Rank 0 prints the losses of the whole batch.
fn train_rank(topology: &Topology) -> Result<()> {
    let group = init_process_group(topology, GroupOptions::default())?;
    let device = Device::flex().autodiff();
    let part = BATCH / RANKS;
    let (inputs, targets) = batch(group.rank() * part..(group.rank() + 1) * part, &device);
    let mut model = Mlp::new(&device);
    let mut weights = floats(&model, None);
    for weight in &mut weights {
        group.broadcast(weight, 0)?;
    }
    // burn's defaults, but for the learning rate.
    let hyper = AdamWHyper { lr: LR, eps: 1e-5, weight_decay: 1e-4, ..Default::default() };
    let mut adamw = AdamW::with_one_group(hyper, weights.len())?;
    let mut scaler = LossScaler::new(LossScalerOptions::default())?;
    for _ in 0..STEPS {
        model = model.map(&mut Write(weights.iter()));
        let loss = model.loss(&inputs, &targets);
        let mut value = [loss.clone().into_scalar::<f32>()];
        let grads = loss.mul_scalar(scaler.scale()).backward();
        let mut grads = floats(&model, Some(GradientsParams::from_grads(grads, &model)));
        group.all_reduce(&mut value, ReduceOp::Avg)?;
        for grad in &mut grads {
            group.all_reduce(grad, ReduceOp::Avg)?;
        }
        let mut params: Vec<_> = (weights.iter_mut().zip(&grads))
            .map(|(weight, grad)| ParamMut::new(&mut weight[..], Some(Slice::F32(grad))))
            .collect();
        // Undoes the scale, and skips the step if a gradient is infinite: on all ranks, which have
        // equal gradients.
        let grad_scale = scaler.inv_scale();
        let ctl = StepCtl { grad_scale, found_inf: FoundInf::Check, ..StepCtl::PLAIN };
        let applied = adamw.step(&mut params, &ctl)?;
        scaler.update(applied == Applied::SkippedNonFinite)?;
        if group.rank() == 0 {
            println!("{:?}", value[0]);
        }
    }
    Ok(())
}

#[derive(Module, Debug)]
struct Mlp {
    hidden: Linear,
    output: Linear,
}

impl Mlp {
    /// With the same weights in every process.
    fn new(device: &Device) -> Self {
        device.seed(0);
        let model = Self {
            hidden: LinearConfig::new(FEATURES, 32).init(device),
            output: LinearConfig::new(32, 1).init(device),
        };
        // burn makes weights when they are first read: now, in this order.
        floats(&model, None);
        model
    }

    /// The mean squared error.
    fn loss(&self, inputs: &Tensor<2>, targets: &Tensor<2>) -> Tensor<1> {
        let hidden = self.hidden.forward(inputs.clone()).tanh();
        (self.output.forward(hidden) - targets.clone()).square().mean()
    }
}

/// Some samples, and what is to be learned of them.
fn batch(samples: std::ops::Range<usize>, device: &Device) -> (Tensor<2>, Tensor<2>) {
    let feature = |i: usize| (i as f32 * 0.7).sin();
    let inputs: Vec<f32> =
        (samples.start * FEATURES..samples.end * FEATURES).map(feature).collect();
    let targets: Vec<f32> = inputs.chunks(FEATURES).map(|x| x[0] * x[1] + x[2].max(x[3])).collect();
    let tensor = |values: Vec<f32>| {
        let shape = [samples.len(), values.len() / samples.len()];
        Tensor::from_data(TensorData::new(values, shape), device)
    };
    (tensor(inputs), tensor(targets))
}

/// The elements of the model's weights, or of their gradients, in order of its fields.
fn floats(model: &Mlp, grads: Option<GradientsParams>) -> Vec<Vec<f32>> {
    let mut read = Read(grads, Vec::new());
    model.visit(&mut read);
    read.1
}

/// Reads a module's weights or, if they are there, gradients.
struct Read(Option<GradientsParams>, Vec<Vec<f32>>);

impl ModuleVisitor for Read {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let tensor = match &mut self.0 {
            Some(grads) => grads.remove(param.id).expect("every weight is in the loss"),
            None => param.val(),
        };
        self.1.push(tensor.into_data().try_into_vec().expect("weights are f32"));
    }
}

/// Sets a module's weights.
struct Write<'a>(std::slice::Iter<'a, Vec<f32>>);

impl ModuleMapper for Write<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let values = self.0.next().expect("as many as were read").clone();
        param.map(|old| {
            let data = TensorData::new(values, old.shape());
            Tensor::from_data(data, &old.device()).require_grad()
        })
    }
}
