//! The interface to a tensor engine: parameters, training steps, evaluation.
//!
//! The runner depends on no tensor crate. It lends a [`Batch`] to an [`Engine`], which runs forward
//! and backward and reports each parameter's gradient to a [`GradSink`] as soon as backward has
//! completed it, so that communication starts during backward. All other options and state of a
//! step are in its [`StepContext`]. Between steps the engine lends all its parameters at once as
//! plain slices, and the optimizer updates them in place. An engine on a device reports gradients
//! in device memory ([`DeviceTensor`]), and an optimizer of that device steps there
//! ([`DeviceEngine`]).
//!
//! Invariant: parameter `i` is `params()[i]` everywhere: in gradients, in the slices lent, in the
//! optimizer's state, in checkpoints, and on every rank.
//!
//! `engine/candle/` is the default implementation (feature `candle`).

use fused_optim::{DType, Optimizer};

use crate::data::{Array, Batch};
use crate::placement::OptimizerDevice;
use crate::{Error, Result};

mod build;
#[cfg(feature = "candle")]
pub mod candle;
mod compile;

pub use crate::losses::{LateValues, Losses};
pub use build::{LoraOptions, ModelContext, ModelFactory};
pub use compile::{CompileBackend, CompileMode, CompileOptions, CompileReport, read_compile};
pub use train_step::{
    Averaged, DeviceAverages, DeviceBuckets, DeviceModel, DeviceTensor, EngineState, GradSink,
    Gradient, HostTensor, Model, OptimizerStep, SharedSink, StepContext, TensorSpec, Visit,
    WrongGradient,
};
pub(crate) use train_step::{broadcast, has_non_finite, round_into, to_f32};

pub use crate::placement::ComputeDevice;

/// Precision of `f32` matrix products on a GPU, as in PyTorch's `set_float32_matmul_precision`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MatmulPrecision {
    /// `f32`.
    #[default]
    Highest,
    /// TF32: factors are rounded to 10 bits of mantissa, sums are in `f32`.
    High,
    /// Same as [`High`](Self::High); PyTorch does the same if there is nothing faster.
    Medium,
}

/// A [`Model`] whose parameters and buffers are on a device.
pub trait DeviceEngine {
    /// Returns the device.
    fn compute_device(&self) -> ComputeDevice;

    /// Returns the handle for optimizers of this device: the stream in which this engine computes.
    fn optimizer_device(&self) -> OptimizerDevice;

    /// Autotunes the kernel launches of an optimizer of this device, if
    /// [`compile`](Engine::compile) asked for autotuning. The [report](Engine::compile_report) has
    /// the outcome; results do not depend on it.
    fn tune(&mut self, optimizer: &mut dyn Optimizer);
}

/// A model that trains and evaluates: its tensors are a [`Model`]'s.
///
/// A checkpoint is saved only if all elements of [buffers](Model::buffers) are finite. Frozen
/// parameters are those of [`ModelContext::frozen`].
pub trait Engine: Model {
    /// Runs forward and backward in training mode, and reports the gradients to the context's sink.
    /// An engine on a device may also run the context's [`OptimizerStep`] if it permits that.
    ///
    /// # Errors
    ///
    /// Those of the model (a missing field, a wrong shape), of the sink and of the optimizer.
    fn train_step(&mut self, batch: &Batch, cx: &mut StepContext<'_>) -> Result<Losses>;

    /// Returns the number of tokens, or of samples, that the loss of this batch is the mean of. If
    /// known, batches of a step are weighted by it, over accumulated batches and ranks; by default
    /// it is not, and they have equal weight. Known for all batches of a run and on all ranks, or
    /// for none; otherwise the run ends with an error.
    ///
    /// A batch with count 0 does not count. On the CPU its gradients are replaced by zeros, so its
    /// loss may be NaN, as a mean over nothing is. Gradients on a GPU are only multiplied by 2^-60:
    /// there they must be finite, as those of candle-ops' cross entropy are. NaN gradients become
    /// those of the step, which only `AmpOptimWrapper` with `skip_non_finite` skips.
    ///
    /// # Errors
    ///
    /// Those of the model, as in [`train_step`](Self::train_step).
    fn loss_count(&self, _batch: &Batch) -> Result<Option<f64>> {
        Ok(None)
    }

    /// Runs forward in evaluation mode and returns the model's named outputs; their first dimension
    /// is the batch. Autocast does not apply.
    ///
    /// # Errors
    ///
    /// Those of the model.
    fn eval(&mut self, batch: &Batch) -> Result<Vec<(String, Array)>>;

    /// Returns whether [`StepContext::autocast`] may be this type.
    fn supports_autocast(&self, _dtype: DType) -> bool {
        false
    }

    /// Compares gradients with differences of the loss along a random direction, for each parameter
    /// except those in `ignore`. Returns the parameters with wrong gradients; restores all state
    /// that it changes.
    ///
    /// # Errors
    ///
    /// Those of the model; [`Error::Engine`] if the engine cannot check gradients.
    fn check_gradients(
        &mut self,
        _batch: &Batch,
        _ignore: &[String],
    ) -> Result<Vec<WrongGradient>> {
        Err(Error::engine("this engine cannot check gradients"))
    }

    /// Optimizes later steps as `options` ask. [`compile_report`](Self::compile_report) lists what
    /// was done.
    ///
    /// # Errors
    ///
    /// [`Error::Engine`] if the engine cannot compile.
    fn compile(&mut self, _options: &CompileOptions) -> Result<()> {
        Err(Error::engine("this engine cannot compile: remove `compile`"))
    }

    /// Returns the optimizations applied so far; `None` if [`compile`](Self::compile) was not
    /// called.
    fn compile_report(&self) -> Option<CompileReport> {
        None
    }

    /// Returns the device of parameters, buffers and batches; `None` for the host.
    fn device(&mut self) -> Option<&mut dyn DeviceEngine> {
        None
    }
}
