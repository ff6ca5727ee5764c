//! Training tools for [candle](candle_core) programs with their own training loop: data
//! parallelism, mixed precision, fused optimizers, learning rate schedules, gradient accumulation,
//! exact resuming.
//!
//! A [`Trainer`] is built from a model's variables. Each [`step`](Trainer::step) runs the program's
//! forward pass under autocast, averages gradients over the ranks during the backward pass, checks,
//! unscales and clips them, and updates the variables. The same program runs on one rank or on
//! several, with any launcher.
//!
//! ```
//! use candle_core::{DType, Device, Module, Tensor};
//! use candle_nn::{VarBuilder, VarMap};
//! use candle_ops::cross_entropy;
//! use candle_train::{AdamWHyper, Trainer};
//!
//! let vars = VarMap::new();
//! let net = candle_nn::linear(16, 4, VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu))?;
//! let inputs = Tensor::ones((64, 16), DType::F32, &Device::Cpu)?;
//! let labels = Tensor::zeros(64, DType::I64, &Device::Cpu)?;
//! # let directory = tempfile::tempdir()?;
//! # let path = directory.path().join("run.safetensors");
//!
//! let mut train = Trainer::builder(&vars).build(AdamWHyper::default())?;
//! for epoch in train.resume(&path)?..3 {
//!     for rows in train.batches(64, 16, epoch)? {
//!         let rows = Tensor::new(rows, &Device::Cpu)?;
//!         let (x, y) = (inputs.index_select(&rows, 0)?, labels.index_select(&rows, 0)?);
//!         train.step(|| cross_entropy(&net.forward(&x)?, &y))?;
//!     }
//!     train.save(&path, epoch + 1)?;
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Parts to use alone
//!
//! * [`DataParallel`]: averages over the ranks, for any optimizer with a `GradStore`.
//! * [`ParamIndex`]: the gradients of a tape by index, during the backward pass, for other ways of
//!   averaging.
//! * [`fused_optim::candle::VarOptimizer`]: the optimizers.
//! * [`amp::LossScaler`], [`candle_ops::Context`] and [`candle_ops::record`](candle_ops::record()):
//!   mixed precision without a trainer.
//! * [`DefaultSampler`], [`Accumulation`]: the samples of each rank, and the batches that end in a
//!   step.
//!
//! # Limits
//!
//! * Variables are of `f32`, `f16` or `bf16`, on the CPU or all on one GPU (feature `cuda`), which
//!   was tested only with a fake GPU.
//! * Averaging overlaps with the backward pass of layers of `candle-ops`; gradients of candle's own
//!   operators are averaged at the end of their section of the graph.
//! * Datasets, logs and validation are left to the program; `runner` has them. [`train_data`] has
//!   loaders, for [`Trainer::batches_of`], and streams.

mod age;
mod averages;
mod backward;
mod batches;
mod builder;
mod compile;
mod data;
mod device;
mod error;
mod eval;
mod first_step;
#[cfg(feature = "cuda")]
mod gpu;
pub mod gradient_check;
#[cfg(feature = "cuda")]
pub mod graph;
mod inputs;
mod mean_loss;
mod parts;
mod pass;
#[cfg(feature = "cuda")]
mod pinned;
pub mod process;
mod resumable;
mod step_on;
mod stored;
mod sums;
mod tensors;
mod trainer;
mod trainers;
mod variables;

pub use age::age;
pub use amp::{LossScaler, LossScalerOptions};
pub use averages::DataParallel;
pub use backward::ParamIndex;
pub use builder::{IntoOptimizer, TrainerBuilder};
pub use candle_ops::nn::seeded;
pub use collective::reducer::ReducerOptions;
pub use collective::{GroupOptions, ProcessGroup, Topology, init_process_group};
pub use data::{Fields, array, tensor};
pub use device::{cuda_device, device};
pub use error::{Error, Result};
pub use fused_optim::{
    self, AdadeltaHyper, AdamHyper, AdamWHyper, Clip, ClipNorm, HyperParam, LambHyper, LionHyper,
    RmsPropHyper, ScheduleFreeAdamWHyper, SgdHyper, WeightAverage,
};
#[cfg(feature = "cuda")]
pub use gpu::tune_optimizer;
pub use inputs::Inputs;
pub use parts::Parts;
pub use resumable::{Resumable, TrainingData};
pub use tensors::{ModelTensors, OnDevice, Tensors, report, set};
pub use train_data::{self, DefaultSampler};
pub use train_step::{self, Accumulation, CompileMode, CompileOptions, CompileReport, Outcome};
pub use trainer::{Step, Trainer};
pub use trainers::Trainers;
pub use variables::is_buffer;

/// Tests the examples of the README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
