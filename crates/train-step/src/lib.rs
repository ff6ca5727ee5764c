//! Parts of a training step that need no tensor crate: learning rate schedules, gradient
//! accumulation, parameter groups.
//!
//! * [`Schedules`]: MMEngine's nineteen schedulers of learning rate and momentum, chained, with
//!   their state, over any [`Optimizer`](fused_optim::Optimizer).
//! * [`Accumulation`]: which batches end in a step, and the divisor of their losses.
//! * [`Paramwise`]: groups of parameters by name and kind, with factors of learning rate and weight
//!   decay.
//!
//! An engine describes its tensors by [`TensorSpec`]; their memory stays with it.

mod accumulation;
mod error;
mod groups;
mod schedule;
mod spec;

pub use accumulation::{Accumulation, BatchRole};
pub use error::{Error, Result};
pub use fused_optim;
pub use groups::{Multipliers, Paramwise};
pub use schedule::{
    Anneal, Comparison, Floor, NOT_BY_EPOCHS, OneCycle, Param, Plateau, RunLength, Scheduler,
    SchedulerConfig, Schedules, Shape, Threshold, differences, find_metric,
};
pub use spec::TensorSpec;

/// Tests the examples of the README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
