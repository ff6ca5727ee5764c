//! The tensor engine as the runner sees it: parameters, a training step, an evaluation.
//!
//! The runner knows no tensor crate. It lends a [`Batch`] to an [`Engine`], which runs forward and
//! backward and reports each parameter's gradient to a [`GradSink`] the moment backward has
//! finished it, so that communication can start while backward still runs. Between steps the
//! engine lends all its parameters at once as plain slices, and the optimizer updates them in
//! place. An engine on a device reports gradients where they are ([`DeviceTensor`]), and has an optimizer of
//! that device step there ([`Engine::step_on_device`]).
//!
//! Invariant: parameter `i` is `params()[i]` everywhere: in gradients, in the slices lent, in the
//! optimizer's state, in checkpoints, and on every rank.
//!
//! `engine/candle/` is the default implementation (feature `candle`).

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use collective::reducer::ParamInfo;
use collective::{ProcessGroup, ReducerOptions};
#[cfg(feature = "candle-cuda")]
use fused_optim::cuda::{Gpu, GradStats};
use fused_optim::{Applied, DType, Optimizer, Slice, SliceMut, StepCtl};
use half::{bf16, f16};
use parking_lot::Mutex;

use crate::data::{Array, Batch};
use crate::{Error, Result};

#[cfg(feature = "candle")]
pub mod candle;
mod compile;

pub use compile::{CompileBackend, CompileMode, CompileOptions, CompileReport};

/// Where a model computes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum ComputeDevice {
    /// The host.
    #[default]
    Cpu,
    /// A CUDA GPU, by its number among those that this process sees.
    Cuda(usize),
}

impl fmt::Display for ComputeDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(index) => write!(f, "cuda:{index}"),
        }
    }
}

/// Name, shape and type of one parameter or buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    /// Dotted path, unique within the model: `layer1.0.conv1.weight`.
    pub name: String,
    /// Row-major extents.
    pub shape: Vec<usize>,
    /// Element type.
    pub dtype: DType,
}

impl TensorSpec {
    /// Number of elements.
    #[must_use]
    pub fn count(&self) -> usize {
        self.shape.iter().product()
    }

    /// Length of the first dimension if there are two or more, else 0: for rules that look at a
    /// weight row by row.
    #[must_use]
    pub fn rows(&self) -> usize {
        match self.shape[..] {
            [rows, _, ..] => rows,
            _ => 0,
        }
    }
}

/// As `collective` calls a type.
pub(crate) const fn type_of(dtype: DType) -> collective::DType {
    match dtype {
        DType::F32 => collective::DType::F32,
        DType::F16 => collective::DType::F16,
        DType::Bf16 => collective::DType::Bf16,
    }
}

/// Receives gradients while backward runs.
pub trait GradSink: Send {
    /// Takes the complete gradient of parameter `index`, contiguous, in the parameter's dtype and
    /// shape. Called at most once per parameter and backward pass, on the thread that called
    /// [`Engine::forward_backward`]; the slice is valid for the call only.
    ///
    /// # Errors
    ///
    /// Whatever the sink does with a gradient can fail (communication does); the engine stops
    /// backward and returns this error unchanged.
    fn ready(&mut self, index: usize, grad: Slice<'_>) -> Result<()>;

    /// As [`ready`](Self::ready), for a gradient in the memory of the engine's device, which the sink may
    /// keep. Unless it does, a copy goes to [`ready`](Self::ready).
    ///
    /// # Errors
    ///
    /// As there, and those of the copy.
    fn ready_on_device(&mut self, index: usize, grad: Box<dyn DeviceTensor>) -> Result<()> {
        self.ready(index, grad.to_host()?.as_slice())
    }
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
    /// [`Error::Engine`]: the device's, or for a tensor that is no such.
    fn add(&mut self, term: &dyn DeviceTensor) -> Result<()>;

    /// A copy in the host's memory. Waits for the device.
    ///
    /// # Errors
    ///
    /// [`Error::Engine`]: the device's.
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
    /// Begins a pass, before its forward.
    ///
    /// # Errors
    ///
    /// That of an earlier pass, which has shown since.
    fn prepare(&mut self) -> Result<()>;

    /// Has averages of this pass looked at as they come, for the step that follows.
    #[cfg(feature = "candle-cuda")]
    fn look_ahead(&mut self, look: GradStats) {
        let _ = look;
    }

    /// Takes the gradient of parameter `index`, once in a pass.
    ///
    /// # Errors
    ///
    /// Those of [`collective::reducer::DeviceReducer::ready`]; [`Error::Engine`] for one that is not the engine's.
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
    /// [`Error::Engine`]: the device's.
    fn update(&mut self, share: Option<f32>) -> Result<()>;

    /// Copies of them. Waits for the device.
    ///
    /// # Errors
    ///
    /// [`Error::Engine`]: the device's.
    fn to_host(&self) -> Result<Vec<Vec<f32>>>;

    /// Sets them.
    ///
    /// # Errors
    ///
    /// [`Error::Engine`]: the device's, or for others than these in number or length.
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

/// A sink shared between the model wrapper that owns it and the engine that calls it.
pub type SharedSink = Arc<Mutex<dyn GradSink>>;

/// What one forward pass over a training batch reports.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Losses {
    /// Named scalars for the log, unscaled. Their order is kept. The loss that backward started
    /// from is the first and is called `loss`.
    pub scalars: Vec<(String, f64)>,
}

impl Losses {
    /// The loss that backward started from, if it is infinite or NaN.
    #[must_use]
    pub fn non_finite(&self) -> Option<f64> {
        self.scalars.first().map(|(_, loss)| *loss).filter(|loss| !loss.is_finite())
    }
}

/// A model with its parameters on some device, able to train and to evaluate.
pub trait Engine {
    /// Trainable parameters in registration (forward) order.
    fn params(&self) -> &[TensorSpec];

    /// Tensors that belong to the model but get no gradient (batch-norm statistics).
    fn buffers(&self) -> &[TensorSpec];

    /// Where forward and backward run, and parameters, buffers and batches are.
    fn device(&self) -> ComputeDevice {
        ComputeDevice::Cpu
    }

    /// Lends every parameter, in order of [`params`](Self::params), as one mutable slice each.
    /// Of one that computes elsewhere these are copies, which are taken over after the visit.
    ///
    /// # Errors
    ///
    /// Those of `visit`, and of the engine if the memory cannot be reached from the host.
    fn with_params(
        &mut self,
        visit: &mut dyn FnMut(&mut [SliceMut<'_>]) -> Result<()>,
    ) -> Result<()>;

    /// Lends every buffer, in order of [`buffers`](Self::buffers).
    ///
    /// # Errors
    ///
    /// As [`with_params`](Self::with_params).
    fn with_buffers(
        &mut self,
        visit: &mut dyn FnMut(&mut [SliceMut<'_>]) -> Result<()>,
    ) -> Result<()>;

    /// Has an optimizer of this engine's [device](Self::device) step on the parameters where they are, with
    /// gradients in their order. Those that are on the host are copied there.
    ///
    /// # Errors
    ///
    /// Those of the optimizer; [`Error::Engine`] of an engine without a device, and for a gradient that is not
    /// its own.
    fn step_on_device(
        &mut self,
        _optimizer: &mut dyn Optimizer,
        _grads: &[Option<Gradient<'_>>],
        _ctl: &StepCtl,
    ) -> Result<Applied> {
        Err(Error::Engine(format!("an engine on {} lets nobody step there", self.device())))
    }

    /// Has an optimizer that steps on this engine's GPU search for its fastest launches, if
    /// [`compile`](Self::compile) asked for a search. Whether it did, or why not, is in the
    /// [report](Self::compile_report): no result depends on it.
    fn tune(&mut self, _optimizer: &mut dyn Optimizer) {}

    /// Averages of this model's gradients over the ranks of a group that is on this engine's device; every rank
    /// calls it.
    ///
    /// # Errors
    ///
    /// [`Error::Engine`] of an engine without a device; those of [`collective::reducer::DeviceReducer::new`].
    fn device_buckets(
        &self,
        _group: ProcessGroup,
        _params: Vec<ParamInfo>,
        _options: ReducerOptions,
    ) -> Result<Box<dyn DeviceBuckets>> {
        Err(Error::Engine(format!("an engine on {} has nothing to average there", self.device())))
    }

    /// Averages of all parameters, and of buffers behind them if asked for, that are kept on this engine's
    /// [device](Self::device); none of an engine whose parameters are best averaged where it
    /// [lends](Self::with_params) them.
    ///
    /// # Errors
    ///
    /// [`Error::Engine`]: the device's.
    fn averages(&self, _with_buffers: bool) -> Result<Option<Box<dyn DeviceAverages>>> {
        Ok(None)
    }

    /// The GPU it computes on, by the stream in which it does, for an optimizer that is to step there.
    #[cfg(feature = "candle-cuda")]
    fn gpu(&self) -> Option<Gpu> {
        None
    }

    /// Runs forward and backward in training mode. Backward starts from the loss times
    /// `loss_scale`, so every gradient reported to `sink` carries that factor.
    ///
    /// # Errors
    ///
    /// The model's own (a field missing in the batch, a shape that does not fit), and the sink's.
    fn forward_backward(
        &mut self,
        batch: &Batch,
        loss_scale: f32,
        sink: &SharedSink,
    ) -> Result<Losses>;

    /// As [`forward_backward`](Self::forward_backward), with the step of an optimizer that steps on this engine's
    /// [device](Self::device) behind it, where both can be one launch: what became of that step then, before
    /// gradients are reported; else it has not stepped. The step is on the gradients of this batch.
    ///
    /// # Errors
    ///
    /// As [`forward_backward`](Self::forward_backward) and [`step_on_device`](Self::step_on_device).
    fn forward_backward_step(
        &mut self,
        batch: &Batch,
        loss_scale: f32,
        sink: &SharedSink,
        _step: (&mut dyn Optimizer, &StepCtl),
    ) -> Result<(Losses, Option<Applied>)> {
        Ok((self.forward_backward(batch, loss_scale, sink)?, None))
    }

    /// Runs forward in evaluation mode and returns the model's named outputs, the first dimension
    /// of each being the batch.
    ///
    /// # Errors
    ///
    /// The model's own.
    fn eval(&mut self, batch: &Batch) -> Result<Vec<(String, Array)>>;

    /// Trains with each operator in the precision that suits it, `dtype` being the lower one, or, with
    /// none, in that of the parameters. Parameters and gradients keep their types, and so does
    /// [`eval`](Self::eval).
    ///
    /// # Errors
    ///
    /// [`Error::Engine`] if the engine knows no autocast, or not to this type.
    fn set_autocast(&mut self, dtype: Option<DType>) -> Result<()> {
        match dtype {
            None => Ok(()),
            Some(dtype) => Err(Error::Engine(format!("this engine has no autocast to {dtype:?}"))),
        }
    }

    /// Does what it can to make steps faster, from now on, and says what that is.
    ///
    /// # Errors
    ///
    /// [`Error::Engine`] if the engine has nothing of the kind.
    fn compile(&mut self, _options: &CompileOptions) -> Result<CompileReport> {
        Err(Error::Engine("this engine does not compile: leave `compile` out".to_owned()))
    }

    /// Draws its random numbers from this seed, from the first word on. Parameters stay as they are.
    fn set_random_seed(&mut self, _seed: u64) {}

    /// How many words this engine has drawn from its random numbers, which seed and position determine;
    /// none if it draws none.
    fn random_position(&self) -> Option<u64> {
        None
    }

    /// Goes on drawing from there, as a run that was there would.
    ///
    /// # Errors
    ///
    /// [`Error::Checkpoint`] if the engine draws no random numbers.
    fn set_random_position(&mut self, _position: u64) -> Result<()> {
        Err(Error::Checkpoint(
            "the checkpoint's engine drew random numbers, this one does not".into(),
        ))
    }

    /// What this engine has found by trying and computes by from then on, as text for a checkpoint; empty if
    /// that is nothing.
    fn findings(&self) -> String {
        String::new()
    }

    /// Computes by these findings, as a run that made them would, where it would otherwise try.
    ///
    /// # Errors
    ///
    /// [`Error::Checkpoint`] if they are not of this engine.
    fn set_findings(&mut self, _findings: &str) -> Result<()> {
        Err(Error::Checkpoint(
            "the checkpoint's engine found ways by trying, this one does not".into(),
        ))
    }

    /// What has come of [`compile`](Self::compile) since this was last asked, for the log.
    fn compile_news(&mut self) -> Option<String> {
        None
    }

    /// What [`compile`](Self::compile) has come to by now; none if it was not asked for.
    fn compile_report(&self) -> Option<CompileReport> {
        None
    }
}
