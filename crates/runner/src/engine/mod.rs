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

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use collective::ProcessGroup;
use fused_optim::{DType, Slice, SliceMut};
use half::slice::HalfFloatSliceExt;
use parking_lot::Mutex;

use crate::data::{Array, Batch};
use crate::{Error, Result};

#[cfg(feature = "candle")]
pub mod candle;
mod compile;
mod device;
mod step;

pub use crate::losses::{LateValues, Losses};
pub use compile::{CompileBackend, CompileMode, CompileOptions, CompileReport};
pub use device::{
    Averaged, DeviceAverages, DeviceBuckets, DeviceEngine, DeviceTensor, Gradient, HostTensor,
};
pub(crate) use step::on_device;
pub use step::{EngineState, OptimizerStep, StepContext};

pub use crate::placement::ComputeDevice;
pub use train_step::TensorSpec;

/// Converts a type to that of `collective`.
pub(crate) const fn type_of(dtype: DType) -> collective::DType {
    match dtype {
        DType::F32 => collective::DType::F32,
        DType::F16 => collective::DType::F16,
        DType::Bf16 => collective::DType::Bf16,
    }
}

/// Broadcasts the elements of rank 0.
pub(crate) fn broadcast(group: &ProcessGroup, slice: &mut SliceMut<'_>) -> Result<()> {
    match slice {
        SliceMut::F32(s) => group.broadcast(s, 0)?,
        SliceMut::F16(s) => group.broadcast(s, 0)?,
        SliceMut::Bf16(s) => group.broadcast(s, 0)?,
    }
    Ok(())
}

/// Returns the elements as f32, exactly.
pub(crate) fn to_f32(slice: Slice<'_>) -> Cow<'_, [f32]> {
    match slice {
        Slice::F32(values) => Cow::Borrowed(values),
        Slice::F16(values) => Cow::Owned(values.to_f32_vec()),
        Slice::Bf16(values) => Cow::Owned(values.to_f32_vec()),
    }
}

/// Copies values, rounded to nearest even if the slice has a narrower type.
pub(crate) fn round_into(slice: &mut SliceMut<'_>, values: &[f32]) {
    match slice {
        SliceMut::F32(v) => v.copy_from_slice(values),
        SliceMut::F16(v) => v.convert_from_f32_slice(values),
        SliceMut::Bf16(v) => v.convert_from_f32_slice(values),
    }
}

/// Receives gradients during backward.
pub trait GradSink: Send {
    /// Takes the complete, contiguous gradient of parameter `index`, with the parameter's type and
    /// shape. Called at most once per parameter and backward pass, on the thread that called
    /// [`Engine::train_step`]; the slice is valid for the call only.
    ///
    /// # Errors
    ///
    /// Those of the sink, such as communication errors; the engine then stops backward and returns
    /// the error unchanged.
    fn ready(&mut self, index: usize, grad: Slice<'_>) -> Result<()>;

    /// As [`ready`](Self::ready), for a gradient in device memory, which the sink may keep. The
    /// default copies it to the host and calls [`ready`](Self::ready).
    ///
    /// # Errors
    ///
    /// Those of [`ready`](Self::ready), and of the copy.
    fn ready_on_device(&mut self, index: usize, grad: Box<dyn DeviceTensor>) -> Result<()> {
        self.ready(index, grad.to_host()?.as_slice())
    }
}

/// A sink shared by the model wrapper, its owner, and the engine, which calls it.
pub type SharedSink = Arc<Mutex<dyn GradSink>>;

/// A parameter whose gradient does not match the loss.
#[derive(Clone, Debug, PartialEq)]
pub struct WrongGradient {
    /// Name of the parameter.
    pub name: String,
    /// Slope of the loss along a random direction, computed from the gradient; `None` without a
    /// gradient.
    pub gradient: Option<f64>,
    /// The same slope computed from differences of the loss.
    pub difference: f64,
}

impl fmt::Display for WrongGradient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, difference, .. } = self;
        match self.gradient {
            Some(gradient) => write!(
                f,
                "the gradient of `{name}` is wrong: the slope of the loss along a random direction is \
                 {difference:.4e}, the gradient yields {gradient:.4e}"
            ),
            None => write!(
                f,
                "`{name}` has no gradient, but the loss depends on it: its slope along a random \
                 direction is {difference:.4e}"
            ),
        }
    }
}

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

/// A model with its parameters on some device, for training and evaluation.
pub trait Engine {
    /// Returns the trainable parameters in registration (forward) order.
    fn params(&self) -> &[TensorSpec];

    /// Returns tensors of the model without gradient (batch-norm statistics). In mixed precision a
    /// skipped step leaves them unchanged; a checkpoint is saved only if all their elements are
    /// finite.
    fn buffers(&self) -> &[TensorSpec];

    /// Returns the frozen parameters
    /// ([`ModelContext::frozen`](crate::model::ModelContext::frozen)): they have no gradients and
    /// no optimizer state, and no step changes them. Empty if the engine does not support freezing.
    fn frozen(&self) -> &[TensorSpec] {
        &[]
    }

    /// Lends every frozen parameter, in the order of [`frozen`](Self::frozen).
    ///
    /// # Errors
    ///
    /// As [`with_params`](Self::with_params).
    fn with_frozen(
        &mut self,
        visit: &mut dyn FnMut(&mut [SliceMut<'_>]) -> Result<()>,
    ) -> Result<()> {
        visit(&mut [])
    }

    /// Lends every parameter as one mutable slice, in the order of [`params`](Self::params). An
    /// engine on a device lends copies, and copies them back after the visit.
    ///
    /// # Errors
    ///
    /// Those of `visit`, and of copies from and to a device.
    fn with_params(
        &mut self,
        visit: &mut dyn FnMut(&mut [SliceMut<'_>]) -> Result<()>,
    ) -> Result<()>;

    /// Lends every buffer, in the order of [`buffers`](Self::buffers).
    ///
    /// # Errors
    ///
    /// As [`with_params`](Self::with_params).
    fn with_buffers(
        &mut self,
        visit: &mut dyn FnMut(&mut [SliceMut<'_>]) -> Result<()>,
    ) -> Result<()>;

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
        Err(Error::Engine("this engine cannot check gradients".to_owned()))
    }

    /// Optimizes later steps as `options` ask. [`compile_report`](Self::compile_report) lists what
    /// was done.
    ///
    /// # Errors
    ///
    /// [`Error::Engine`] if the engine cannot compile.
    fn compile(&mut self, _options: &CompileOptions) -> Result<()> {
        Err(Error::Engine("this engine cannot compile: remove `compile`".to_owned()))
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
