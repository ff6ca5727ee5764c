//! A data-parallel training step that needs no tensor crate.
//!
//! * [`Trainer`]: the step of a program's own loop, with all of the following, errors of one rank
//!   on all, and checkpoints ([`checkpoint`]).
//! * [`Parts`]: several trainers with one checkpoint.
//! * [`Model`]: a model's tensors, lent to a step as slices, or on a device. Their memory stays
//!   with the tensor crate.
//! * [`DistributedDataParallel`], a [`ModelWrapper`]: takes gradients one by one during backward,
//!   and averages them over ranks meanwhile.
//! * [`OptimWrapper`]: loss scale, accumulation, clipping, weights of batches, the optimizer's
//!   step; a skipped step changes nothing.
//! * [`Schedules`]: MMEngine's nineteen schedulers of learning rate and momentum, chained, with
//!   their state, over any [`Optimizer`](fused_optim::Optimizer).
//! * [`Accumulation`]: which batches end in a step, and the divisor of their losses.
//! * [`Paramwise`]: groups of parameters by name and kind, with factors of learning rate and weight
//!   decay.

mod accumulation;
mod averages;
pub mod checkpoint;
mod compile;
mod context;
mod device;
mod error;
mod groups;
mod model;
mod optim;
mod schedule;
mod spec;
#[cfg(test)]
mod testing;
mod trainer;

pub use accumulation::{Accumulation, BatchRole};
pub use averages::{
    Averages, DistributedDataParallel, ModelWrapper, WrapperFactory, WrapperOver, with_host_grads,
};
pub use compile::{CompileBackend, CompileMode, CompileOptions, CompileReport};
pub use context::{EngineState, GradSink, OptimizerStep, SharedSink, StepContext, on_device};
pub use device::{Averaged, DeviceAverages, DeviceBuckets, DeviceTensor, Gradient, HostTensor};
pub use error::{BoxError, Error, Result};
pub use fused_optim;
pub use groups::{Multipliers, Paramwise};
pub use model::{DeviceModel, Model, Visit, broadcast, has_non_finite, round_into, to_f32};
pub use optim::{
    MAX_CONSECUTIVE_SKIPS, Member, OptimWrapper, OptimWrapperState, OptimizerDict, Overflows,
    PendingCounts, Update, assign,
};
pub use schedule::{
    Anneal, Comparison, Floor, NOT_BY_EPOCHS, OneCycle, Param, Plateau, RunLength, Scheduler,
    SchedulerConfig, Schedules, Shape, Threshold, differences, find_metric,
};
pub use spec::{TensorSpec, WrongGradient};
pub use trainer::{
    Outcome, Parts, Schedule, Step, Trainer, TrainerBuilder, is_reserved, optimizer_state,
};

/// Tests the examples of the README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
