//! The tensor engine as the runner sees it: parameters, a training step, an evaluation.
//!
//! The runner knows no tensor crate. It lends a [`Batch`] to an [`Engine`], which runs forward and
//! backward and reports each parameter's gradient to a [`GradSink`] the moment backward has
//! finished it, so that communication can start while backward still runs. All other options and state of a step
//! are its [`StepContext`]. Between steps the
//! engine lends all its parameters at once as plain slices, and the optimizer updates them in
//! place. An engine on a device reports gradients where they are ([`DeviceTensor`]), and an optimizer of
//! that device steps there ([`DeviceEngine`]).
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

/// Makes rank 0's elements every rank's.
pub(crate) fn broadcast(group: &ProcessGroup, slice: &mut SliceMut<'_>) -> Result<()> {
    match slice {
        SliceMut::F32(s) => group.broadcast(s, 0)?,
        SliceMut::F16(s) => group.broadcast(s, 0)?,
        SliceMut::Bf16(s) => group.broadcast(s, 0)?,
    }
    Ok(())
}

/// The elements as f32, exactly.
pub(crate) fn to_f32(slice: Slice<'_>) -> Cow<'_, [f32]> {
    match slice {
        Slice::F32(values) => Cow::Borrowed(values),
        Slice::F16(values) => Cow::Owned(values.to_f32_vec()),
        Slice::Bf16(values) => Cow::Owned(values.to_f32_vec()),
    }
}

/// Copies values, rounded to nearest even where the slice is narrower.
pub(crate) fn round_into(slice: &mut SliceMut<'_>, values: &[f32]) {
    match slice {
        SliceMut::F32(v) => v.copy_from_slice(values),
        SliceMut::F16(v) => v.convert_from_f32_slice(values),
        SliceMut::Bf16(v) => v.convert_from_f32_slice(values),
    }
}

/// Receives gradients while backward runs.
pub trait GradSink: Send {
    /// Takes the complete gradient of parameter `index`, contiguous, in the parameter's dtype and
    /// shape. Called at most once per parameter and backward pass, on the thread that called
    /// [`Engine::train_step`]; the slice is valid for the call only.
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

/// A sink shared between the model wrapper that owns it and the engine that calls it.
pub type SharedSink = Arc<Mutex<dyn GradSink>>;

/// A parameter whose gradient is not the loss's.
#[derive(Clone, Debug, PartialEq)]
pub struct WrongGradient {
    /// The parameter's name.
    pub name: String,
    /// The loss's slope along a random direction in the parameter, by its gradient; `None` if it has none.
    pub gradient: Option<f64>,
    /// The same by differences of the loss.
    pub difference: f64,
}

impl fmt::Display for WrongGradient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, difference, .. } = self;
        match self.gradient {
            Some(gradient) => write!(
                f,
                "the gradient of `{name}` is wrong: along a random direction the loss's slope is \
                 {difference:.4e}, by the gradient {gradient:.4e}"
            ),
            None => write!(
                f,
                "`{name}` has no gradient, and the loss depends on it: along a random direction its slope is \
                 {difference:.4e}"
            ),
        }
    }
}

/// How exact products of `f32` matrices are on a GPU, by PyTorch's `set_float32_matmul_precision`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MatmulPrecision {
    /// In `f32`.
    #[default]
    Highest,
    /// In TF32: factors are rounded to 10 bits of mantissa, sums are of `f32`.
    High,
    /// As [`High`](Self::High), as in PyTorch where there is nothing faster.
    Medium,
}

/// A model with its parameters on some device, able to train and to evaluate.
pub trait Engine {
    /// Trainable parameters in registration (forward) order.
    fn params(&self) -> &[TensorSpec];

    /// Tensors that belong to the model but get no gradient (batch-norm statistics). In mixed precision a batch whose
    /// step is skipped leaves them as they were; a checkpoint is written only if all their elements are finite.
    fn buffers(&self) -> &[TensorSpec];

    /// Parameters that are not trained ([`ModelContext::frozen`](crate::model::ModelContext::frozen)): they get neither
    /// gradients nor an optimizer's state, and no step changes them. None if the engine does not freeze.
    fn frozen(&self) -> &[TensorSpec] {
        &[]
    }

    /// Lends every frozen parameter, in order of [`frozen`](Self::frozen).
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

    /// Lends every parameter, in order of [`params`](Self::params), as one mutable slice each.
    /// An engine on a device lends copies, and takes them over after the visit.
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

    /// Runs forward and backward in training mode, and reports the gradients to the context's sink. An engine on a
    /// device may run the context's [`OptimizerStep`] with them, if that allows it.
    ///
    /// # Errors
    ///
    /// The model's own (a field missing in the batch, a shape that does not fit), and those of the sink and the
    /// optimizer.
    fn train_step(&mut self, batch: &Batch, cx: &mut StepContext<'_>) -> Result<Losses>;

    /// Runs forward in evaluation mode and returns the model's named outputs, the first dimension
    /// of each being the batch. Autocast does not apply.
    ///
    /// # Errors
    ///
    /// The model's own.
    fn eval(&mut self, batch: &Batch) -> Result<Vec<(String, Array)>>;

    /// Whether [`StepContext::autocast`] may be this type.
    fn supports_autocast(&self, _dtype: DType) -> bool {
        false
    }

    /// Compares, for each parameter but those to `ignore`, the loss's differences along a random direction with the
    /// gradient's product with it. Returns the parameters whose gradients are wrong; restores all that it changes.
    ///
    /// # Errors
    ///
    /// The model's own; [`Error::Engine`] of an engine that does not check gradients.
    fn check_gradients(
        &mut self,
        _batch: &Batch,
        _ignore: &[String],
    ) -> Result<Vec<WrongGradient>> {
        Err(Error::Engine("this engine does not check gradients".to_owned()))
    }

    /// Makes later steps faster as `options` ask. [`compile_report`](Self::compile_report) lists what was done.
    ///
    /// # Errors
    ///
    /// [`Error::Engine`] if the engine cannot compile.
    fn compile(&mut self, _options: &CompileOptions) -> Result<()> {
        Err(Error::Engine("this engine does not compile: leave `compile` out".to_owned()))
    }

    /// What [`compile`](Self::compile) has done so far; `None` if it was not called.
    fn compile_report(&self) -> Option<CompileReport> {
        None
    }

    /// The device that parameters, buffers and batches are on; `None` if that is the host.
    fn device(&mut self) -> Option<&mut dyn DeviceEngine> {
        None
    }
}
