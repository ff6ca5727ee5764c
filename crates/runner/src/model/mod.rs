//! Model wrappers: they store a model's gradients, and average them over ranks.
//!
//! A [`ModelWrapper`] owns gradient memory. [`DistributedDataParallel`] averages gradients over a
//! process group during backward; a group of one rank averages nothing. To write your own wrapper,
//! implement the trait, or [`WrapperOver`] to change parts of another wrapper, and register it in
//! [`MODEL_WRAPPERS`].

mod builtin;
mod ddp;
mod state;

use collective::ProcessGroup;
use fused_optim::{DType, Slice};
use serde::{Deserialize, Serialize};

pub use builtin::{MODEL_WRAPPERS, MODELS};
pub use ddp::DistributedDataParallel;

use crate::Result;
use crate::engine::{
    ComputeDevice, Engine, Gradient, HostTensor, MatmulPrecision, SharedSink, StepContext,
    TensorSpec,
};

/// Arguments for building a model.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ModelContext {
    /// Type of the parameters, except those that layers require to be f32.
    pub dtype: DType,
    /// Seed of the parameters' initial values.
    pub seed: u64,
    /// Device of the computation. A run returns an error for a model on another device.
    pub device: ComputeDevice,
    /// Whether parameters are `f64` instead of `f32`, for checking gradients: such a model is never
    /// trained. An engine without `f64` ignores it.
    pub is_f64: bool,
    /// Precision of `f32` matrix products on a GPU; `None` keeps the process's setting.
    pub matmul_precision: Option<MatmulPrecision>,
    /// Name patterns of frozen parameters (`*` is any text, `?` any character). A pattern without a
    /// match is an error, and so is an engine that does not support freezing.
    pub frozen: Vec<String>,
    /// Low-rank adapters of fully connected layers, if enabled. A target without a match is an
    /// error.
    pub lora: Option<LoraOptions>,
}

impl ModelContext {
    /// A model on the CPU, nothing of it frozen.
    #[must_use]
    pub fn new(dtype: DType, seed: u64) -> Self {
        Self {
            dtype,
            seed,
            device: ComputeDevice::Cpu,
            is_f64: false,
            matmul_precision: None,
            frozen: Vec::new(),
            lora: None,
        }
    }
}

/// Low-rank adapters (LoRA): a layer whose name matches a target computes
/// `W x + b + alpha / rank * B (A (dropout(x)))`, and `W` and `b` are frozen.
///
/// Follows: PEFT, `tuners/lora`, in names and initial values.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LoraOptions {
    /// Rank of the product of an adapter's matrices.
    pub rank: usize,
    /// Numerator of the scale `alpha / rank` of an adapter's output.
    pub alpha: f64,
    /// Dropout probability of an adapter's input in training.
    pub dropout: f64,
    /// Name patterns of the layers (`*` is any text, `?` any character).
    pub targets: Vec<String>,
}

impl LoraOptions {
    /// Returns the first of `lora`'s values with which these adapters were trained and that this
    /// run has otherwise, as text; with `all` also the dropout, which only training uses. Targets
    /// are compared by the names of the tensors instead.
    pub(crate) fn difference(&self, run: &Self, all: bool) -> Option<String> {
        let values =
            [("rank", self.rank as f64, run.rank as f64), ("alpha", self.alpha, run.alpha)];
        let dropout = all.then_some(("dropout", self.dropout, run.dropout));
        let differs = |(_, was, is): &(&str, f64, f64)| was != is;
        let (name, was, is) = values.into_iter().chain(dropout).find(differs)?;
        Some(format!("lora.{name} = {was}, but this run has {is}"))
    }
}

/// Creates a model when precision and seed are known.
pub type ModelFactory = Box<dyn FnOnce(&ModelContext) -> Result<Box<dyn Engine>> + Send>;

/// Creates a wrapper when the group and the parameters are known. Every rank calls it.
pub type WrapperFactory =
    Box<dyn FnOnce(ProcessGroup, &[TensorSpec]) -> Result<Box<dyn ModelWrapper>> + Send>;

/// Stores the gradients of a model between backward and the optimizer step.
pub trait ModelWrapper: Send {
    /// Returns the sink that the engine reports gradients to.
    fn sink(&self) -> SharedSink;

    /// Called before each forward pass, with the model and the context of the step. Without
    /// [`sync`](StepContext::sync) (`no_sync`) the next gradients are only accumulated on this
    /// rank. A wrapper that synchronizes buffers or parameters does it here. `engine` is `None` if
    /// no forward pass follows: when gradients of a checkpoint are loaded.
    ///
    /// # Errors
    ///
    /// Those of the wrapper's communication, and of the engine.
    fn prepare(&mut self, engine: Option<&mut dyn Engine>, cx: &mut StepContext<'_>) -> Result<()>;

    /// Called after each backward pass: waits until every gradient is complete.
    ///
    /// # Errors
    ///
    /// [`collective::Error::UnusedParameters`] if a parameter got no gradient; a peer's failure.
    fn finish(&mut self) -> Result<()>;

    /// Called once before training with an engine on the device of the optimizer: a wrapper whose
    /// group supports that device averages gradients there from now on. Every rank calls it.
    ///
    /// # Errors
    ///
    /// [`Error::Config`](crate::Error::Config) naming an option that is not supported on the
    /// device; those of the engine.
    fn place(&mut self, _engine: &mut dyn Engine) -> Result<()> {
        Ok(())
    }

    /// Lends the gradients in the order of the parameters, each on its own device; `None` for a
    /// parameter without gradient. [`with_host_grads`] lends host copies of device gradients.
    ///
    /// # Errors
    ///
    /// Those of `visit`.
    fn with_grads(
        &self,
        visit: &mut dyn FnMut(&[Option<Gradient<'_>>]) -> Result<()>,
    ) -> Result<()>;

    /// Discards all gradients.
    fn zero_grad(&mut self);

    /// Called after a step that changed the loss scale, with the new scale divided by the old one:
    /// multiplies this rank's share of later gradients.
    fn rescale(&mut self, _factor: f32) {}

    /// Returns the mean of a number over the ranks that average gradients. Every rank calls it; it
    /// is called only if the model knows [`Engine::loss_count`].
    ///
    /// # Errors
    ///
    /// Those of communication. By default [`Error::Config`](crate::Error::Config), because a
    /// wrapper that does not exchange the counts would weigh the ranks wrongly.
    fn mean_over_ranks(&self, _value: f64) -> Result<f64> {
        Err(crate::Error::Config(
            "this model wrapper does not support a model with `loss_count`: implement `mean_over_ranks`".to_owned(),
        ))
    }

    /// Returns whether this rank's state other than gradients is finite. If not, no checkpoint is
    /// saved.
    fn is_state_finite(&self) -> bool {
        true
    }

    /// Returns this rank's state other than gradients, for a checkpoint; empty if there is none.
    ///
    /// # Errors
    ///
    /// [`Error::Checkpoint`](crate::Error::Checkpoint) if the state cannot be encoded.
    fn state_dict(&self) -> Result<Vec<u8>> {
        Ok(Vec::new())
    }

    /// Restores a state. Every rank calls it with its own state.
    ///
    /// # Errors
    ///
    /// [`Error::Checkpoint`](crate::Error::Checkpoint) if the state belongs to another wrapper.
    fn load_state_dict(&mut self, _state: &[u8]) -> Result<()> {
        Err(crate::Error::Checkpoint(
            "this model wrapper does not support restoring a state".to_owned(),
        ))
    }
}

/// Lends a wrapper's gradients in host memory; those on a device are copied.
///
/// # Errors
///
/// Those of `visit`, and of the copies.
pub fn with_host_grads(
    model: &dyn ModelWrapper,
    visit: &mut dyn FnMut(&[Option<Slice<'_>>]) -> Result<()>,
) -> Result<()> {
    model.with_grads(&mut |grads| {
        let copy = |grad: &Option<Gradient<'_>>| match grad {
            Some(Gradient::Device(grad)) => grad.to_host().map(Some),
            _ => Ok(None),
        };
        let copies: Vec<_> = grads.iter().map(copy).collect::<Result<_>>()?;
        let slices = grads.iter().zip(&copies).map(|(grad, copy)| match grad {
            Some(Gradient::Host(slice)) => Some(*slice),
            _ => copy.as_ref().map(HostTensor::as_slice),
        });
        visit(&slices.collect::<Vec<_>>())
    })
}

/// A wrapper around another one, to which all methods default. An optimizer step of such a wrapper
/// never joins backward.
///
/// Implementors are [`ModelWrapper`]s; the methods are those of that trait, with the same errors.
///
/// # Examples
///
/// ```
/// use runner::Result;
/// use runner::engine::{Engine, StepContext};
/// use runner::model::{DistributedDataParallel, ModelWrapper, WrapperOver};
///
/// /// Counts the batches that only accumulate.
/// struct Counting(DistributedDataParallel, usize);
///
/// impl WrapperOver for Counting {
///     type Inner = DistributedDataParallel;
///
///     fn inner(&self) -> &Self::Inner {
///         &self.0
///     }
///
///     fn inner_mut(&mut self) -> &mut Self::Inner {
///         &mut self.0
///     }
///
///     fn prepare(
///         &mut self,
///         engine: Option<&mut dyn Engine>,
///         cx: &mut StepContext<'_>,
///     ) -> Result<()> {
///         self.1 += usize::from(!cx.sync);
///         self.0.prepare(engine, cx)
///     }
/// }
/// ```
#[expect(clippy::missing_errors_doc, reason = "documented on the trait")]
pub trait WrapperOver: Send {
    /// Type of the inner wrapper.
    type Inner: ModelWrapper;

    /// Returns the inner wrapper.
    fn inner(&self) -> &Self::Inner;

    /// Returns the inner wrapper.
    fn inner_mut(&mut self) -> &mut Self::Inner;

    /// [`ModelWrapper::prepare`].
    fn prepare(&mut self, engine: Option<&mut dyn Engine>, cx: &mut StepContext<'_>) -> Result<()> {
        self.inner_mut().prepare(engine, cx)
    }

    /// [`ModelWrapper::finish`].
    fn finish(&mut self) -> Result<()> {
        self.inner_mut().finish()
    }
}

impl<T: WrapperOver> ModelWrapper for T {
    fn sink(&self) -> SharedSink {
        self.inner().sink()
    }

    fn prepare(&mut self, engine: Option<&mut dyn Engine>, cx: &mut StepContext<'_>) -> Result<()> {
        WrapperOver::prepare(self, engine, cx)?;
        // `finish` may change the gradients.
        cx.step.iter_mut().for_each(|step| step.may_join_backward = false);
        Ok(())
    }

    fn finish(&mut self) -> Result<()> {
        WrapperOver::finish(self)
    }

    fn place(&mut self, engine: &mut dyn Engine) -> Result<()> {
        self.inner_mut().place(engine)
    }

    fn with_grads(
        &self,
        visit: &mut dyn FnMut(&[Option<Gradient<'_>>]) -> Result<()>,
    ) -> Result<()> {
        self.inner().with_grads(visit)
    }

    fn zero_grad(&mut self) {
        self.inner_mut().zero_grad();
    }

    fn rescale(&mut self, factor: f32) {
        self.inner_mut().rescale(factor);
    }

    fn mean_over_ranks(&self, value: f64) -> Result<f64> {
        self.inner().mean_over_ranks(value)
    }

    fn is_state_finite(&self) -> bool {
        self.inner().is_state_finite()
    }

    fn state_dict(&self) -> Result<Vec<u8>> {
        self.inner().state_dict()
    }

    fn load_state_dict(&mut self, state: &[u8]) -> Result<()> {
        self.inner_mut().load_state_dict(state)
    }
}
