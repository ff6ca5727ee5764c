//! The part of an engine that is on a device: gradients, averages and an optimizer's step there.

use std::any::Any;
use std::fmt;

use collective::reducer::ParamInfo;
use collective::{ProcessGroup, reducer::ReducerOptions};
use fused_optim::{Applied, DType, GradStats, Optimizer, Slice};
use half::{bf16, f16};

use super::OptimizerStep;
use crate::Result;
use crate::placement::{ComputeDevice, OptimizerDevice};

/// An engine whose parameters, buffers and batches are on a device.
pub trait DeviceEngine {
    /// The device.
    fn compute_device(&self) -> ComputeDevice;

    /// What an optimizer works through that is to step there: the stream in which this engine computes.
    fn optimizer_device(&self) -> OptimizerDevice;

    /// Runs an optimizer's step on the parameters where they are, with gradients in their order. Gradients on the
    /// host are copied to the device.
    ///
    /// # Errors
    ///
    /// Those of the optimizer; [`Error::Engine`](crate::Error::Engine) for a gradient of another engine.
    fn optimizer_step(
        &mut self,
        step: &mut OptimizerStep<'_>,
        grads: &[Option<Gradient<'_>>],
    ) -> Result<Applied>;

    /// Has an optimizer of this device search for its fastest launches, if
    /// [`compile`](super::Engine::compile) asked for a search. The
    /// [report](super::Engine::compile_report) has the outcome: no result depends on it.
    fn tune(&mut self, optimizer: &mut dyn Optimizer);

    /// Averages of the gradients of `params`, by their index in the model, over the ranks of a group that is on this
    /// device; every rank calls it.
    ///
    /// # Errors
    ///
    /// Those of [`collective::reducer::DeviceReducer::new`].
    fn buckets(
        &self,
        group: ProcessGroup,
        params: Vec<(usize, ParamInfo)>,
        options: ReducerOptions,
    ) -> Result<Box<dyn DeviceBuckets>>;

    /// Moving averages of some of the model's tensors, which are kept on this device.
    ///
    /// # Errors
    ///
    /// [`Error::Engine`](crate::Error::Engine): the device's.
    fn averages(&self, of: Averaged) -> Result<Box<dyn DeviceAverages>>;
}

/// Which of a model's tensors averages are kept of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Averaged {
    /// All parameters.
    Params,
    /// All buffers.
    Buffers,
    /// All parameters and, behind them, all buffers.
    Model,
}

/// A tensor of an engine in the memory of its device, there as long as this is kept: a gradient.
pub trait DeviceTensor: Any + Send + fmt::Debug {
    /// Its elements' type.
    fn dtype(&self) -> DType;

    /// How many elements it has.
    fn count(&self) -> usize;

    /// Adds numbers of the host's, of the same type and length, rounded once per element.
    ///
    /// # Errors
    ///
    /// As [`add`](Self::add).
    fn add_host(&mut self, term: Slice<'_>) -> Result<()>;

    /// Adds another one of the same engine, type and length, rounded once per element.
    ///
    /// # Errors
    ///
    /// [`Error::Engine`](crate::Error::Engine): the device's, or for a tensor that is no such.
    fn add(&mut self, term: &dyn DeviceTensor) -> Result<()>;

    /// A copy in the host's memory. Waits for the device.
    ///
    /// # Errors
    ///
    /// [`Error::Engine`](crate::Error::Engine): the device's.
    fn to_host(&self) -> Result<HostTensor>;
}

/// A tensor's elements in the host's memory.
#[derive(Clone, Debug, PartialEq)]
pub enum HostTensor {
    /// Of `f32`.
    F32(Vec<f32>),
    /// Of `f16`.
    F16(Vec<f16>),
    /// Of `bf16`.
    Bf16(Vec<bf16>),
}

impl HostTensor {
    /// The elements.
    #[must_use]
    pub fn as_slice(&self) -> Slice<'_> {
        match self {
            Self::F32(v) => Slice::F32(v),
            Self::F16(v) => Slice::F16(v),
            Self::Bf16(v) => Slice::Bf16(v),
        }
    }
}

/// Averages of gradients over the ranks of a group, in the memory of an engine's device, where its library makes
/// them while backward computes. Every rank does the same.
pub trait DeviceBuckets: Send + fmt::Debug {
    /// Begins a pass, before its forward. `stats` takes statistics of each average as it becomes final, for the step
    /// that follows.
    ///
    /// # Errors
    ///
    /// That of an earlier pass, which has shown since.
    fn prepare(&mut self, stats: Option<GradStats>) -> Result<()>;

    /// Takes the gradient of parameter `index`, once in a pass.
    ///
    /// # Errors
    ///
    /// Those of [`collective::reducer::DeviceReducer::ready`]; [`Error::Engine`](crate::Error::Engine) for one that is not the engine's.
    fn ready(&mut self, index: usize, grad: &dyn DeviceTensor) -> Result<()>;

    /// Ends the pass: whatever the engine or an optimizer in its stream does next comes behind the averages.
    ///
    /// # Errors
    ///
    /// Those of [`collective::reducer::DeviceReducer::finish`].
    fn finish(&mut self) -> Result<()>;

    /// The average of a parameter's gradients, if a pass has been finished since
    /// [`zero_grad`](Self::zero_grad) in which it had any.
    fn grad(&self, index: usize) -> Option<&dyn DeviceTensor>;

    /// Forgets the averages.
    fn zero_grad(&mut self);
}

/// Moving averages, in f32, of an engine's tensors, in the memory of its device.
pub trait DeviceAverages: Send + fmt::Debug {
    /// Moves each to `average + share * (newest - average)`, each operation rounded to f32, of its tensor as that is
    /// by then; with no share, to the tensor. Waits for nothing.
    ///
    /// # Errors
    ///
    /// [`Error::Engine`](crate::Error::Engine): the device's.
    fn update(&mut self, share: Option<f32>) -> Result<()>;

    /// Copies of them. Waits for the device.
    ///
    /// # Errors
    ///
    /// [`Error::Engine`](crate::Error::Engine): the device's.
    fn to_host(&self) -> Result<Vec<Vec<f32>>>;

    /// Sets them.
    ///
    /// # Errors
    ///
    /// [`Error::Engine`](crate::Error::Engine): the device's, or for others than these in number or length.
    fn load(&mut self, averages: &[Vec<f32>]) -> Result<()>;
}

/// A gradient, where it is.
#[derive(Clone, Copy, Debug)]
pub enum Gradient<'a> {
    /// In the host's memory.
    Host(Slice<'a>),
    /// In the memory of the engine's device.
    Device(&'a dyn DeviceTensor),
}
