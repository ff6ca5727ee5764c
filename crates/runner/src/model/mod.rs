//! Model wrappers: they keep a model's gradients, and average them over ranks.
//!
//! A [`ModelWrapper`] owns gradient memory. [`DistributedDataParallel`] averages gradients over a
//! process group while backward still runs; a group of one rank is the same with nothing to
//! average. A wrapper of your own implements the trait, or [`WrapperOver`] to change some of another's
//! ways, and registers itself in [`MODEL_WRAPPERS`].

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

/// What a model is built with.
#[derive(Clone, Debug)]
pub struct ModelContext {
    /// Type of the parameters that layers do not insist to have in f32.
    pub dtype: DType,
    /// Seed of the parameters' initial values.
    pub seed: u64,
    /// Where it is to compute. A run refuses a model that computes elsewhere.
    pub device: ComputeDevice,
    /// Whether parameters are `f64` where they would be `f32`, to have their gradients checked: nothing trains such
    /// a model. An engine that has no `f64` passes over it.
    pub is_f64: bool,
    /// Precision of `f32` matrix products on a GPU; `None` leaves the process's as it is.
    pub matmul_precision: Option<MatmulPrecision>,
    /// Patterns of the names of parameters that are not trained (`*` is any text, `?` any character). One that fits no
    /// parameter is an error; a run refuses an engine that does not freeze.
    pub frozen: Vec<String>,
    /// Low-rank adapters of fully connected layers, if the model is to have them. A target that fits no layer is an
    /// error.
    pub lora: Option<LoraOptions>,
}

/// Low-rank adapters (LoRA): a layer whose name fits a target computes
/// `W x + b + alpha / rank * B (A (dropout(x)))`, and `W` and `b` are frozen.
///
/// Follows: PEFT, `tuners/lora`, in names and initial values.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LoraOptions {
    /// Rank of an adapter's product.
    pub rank: usize,
    /// An adapter's result is multiplied by `alpha / rank`.
    pub alpha: f64,
    /// Share of its input that is dropped in training.
    pub dropout: f64,
    /// Patterns of the layers' names (`*` is any text, `?` any character).
    pub targets: Vec<String>,
}

/// Makes a model once precision and seed are known.
pub type ModelFactory = Box<dyn FnOnce(&ModelContext) -> Result<Box<dyn Engine>> + Send>;

/// Makes a wrapper once the group and the parameters are known. Every rank calls it.
pub type WrapperFactory =
    Box<dyn FnOnce(ProcessGroup, &[TensorSpec]) -> Result<Box<dyn ModelWrapper>> + Send>;

/// Keeps the gradients of a model between backward and the optimizer.
pub trait ModelWrapper: Send {
    /// Where the engine reports gradients.
    fn sink(&self) -> SharedSink;

    /// Called before each forward pass, with the model and the step's context. Without
    /// [`sync`](StepContext::sync) (`no_sync`) the coming gradients are only added up on this rank. A wrapper that
    /// keeps the ranks' buffers or parameters alike does it here. `engine` is `None` where no forward pass follows:
    /// when the gradients of a checkpoint are loaded.
    ///
    /// # Errors
    ///
    /// Those of the communication behind the wrapper, and of the engine.
    fn prepare(&mut self, engine: Option<&mut dyn Engine>, cx: &mut StepContext<'_>) -> Result<()>;

    /// Called after each backward pass: waits until every gradient is final.
    ///
    /// # Errors
    ///
    /// [`collective::Error::UnusedParameters`] if a parameter got none; a peer's failure.
    fn finish(&mut self) -> Result<()>;

    /// Called once, before training, with an engine on a device that an optimizer is to step on: a wrapper whose
    /// group is on that device, too, averages gradients there from now on. Every rank calls it.
    ///
    /// # Errors
    ///
    /// [`Error::Config`](crate::Error::Config) naming what it cannot do there; those of the engine.
    fn place(&mut self, _engine: &mut dyn Engine) -> Result<()> {
        Ok(())
    }

    /// Lends the gradients, in the parameters' order, each where it is; `None` where there is none.
    /// [`with_host_grads`] lends copies of those on a device.
    ///
    /// # Errors
    ///
    /// Those of `visit`.
    fn with_grads(
        &self,
        visit: &mut dyn FnMut(&[Option<Gradient<'_>>]) -> Result<()>,
    ) -> Result<()>;

    /// Forgets all gradients.
    fn zero_grad(&mut self);

    /// Called after a step when the loss scale has changed, with the new one divided by the old one: multiplies what this
    /// rank adds to coming gradients.
    fn rescale(&mut self, _factor: f32) {}

    /// Whether what this rank goes on from besides gradients is finite. If not, no checkpoint is written.
    fn is_state_finite(&self) -> bool {
        true
    }

    /// What this rank goes on from besides gradients, for a checkpoint; empty if that is nothing.
    ///
    /// # Errors
    ///
    /// [`Error::Checkpoint`](crate::Error::Checkpoint) if it cannot be written.
    fn state_dict(&self) -> Result<Vec<u8>> {
        Ok(Vec::new())
    }

    /// Goes on from such a state. Every rank calls it with its own.
    ///
    /// # Errors
    ///
    /// [`Error::Checkpoint`](crate::Error::Checkpoint) if it is not of this wrapper.
    fn load_state_dict(&mut self, _state: &[u8]) -> Result<()> {
        Err(crate::Error::Checkpoint("this model wrapper has no state to go on from".to_owned()))
    }
}

/// Lends a wrapper's gradients in the host's memory: copies of those on a device.
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

/// A wrapper over another one: what it does not change is the other's, except that an optimizer's step never joins
/// backward.
///
/// Its methods are those of [`ModelWrapper`], which it is, with the same errors.
///
/// # Examples
///
/// ```
/// use runner::Result;
/// use runner::engine::{Engine, StepContext};
/// use runner::model::{DistributedDataParallel, ModelWrapper, WrapperOver};
///
/// /// Counts the batches that only add up.
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
#[expect(clippy::missing_errors_doc, reason = "said once, on the trait")]
pub trait WrapperOver: Send {
    /// The type of the other wrapper.
    type Inner: ModelWrapper;

    /// The other wrapper.
    fn inner(&self) -> &Self::Inner;

    /// The other wrapper.
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
