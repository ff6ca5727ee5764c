//! Model wrappers: they store a model's gradients, and average them over ranks.
//!
//! A [`ModelWrapper`] owns gradient memory. [`DistributedDataParallel`] averages gradients over a
//! process group during backward; a group of one rank averages nothing. To write your own wrapper,
//! implement the trait, or [`WrapperOver`] to change parts of another wrapper.

mod ddp;
mod passes;
mod state;

use collective::ProcessGroup;
use fused_optim::Slice;

pub use ddp::DistributedDataParallel;
pub use passes::Averages;

use crate::{Error, Gradient, HostTensor, Model, Result, SharedSink, StepContext, TensorSpec};

/// Creates a wrapper when the group and the parameters are known. Every rank calls it.
pub type WrapperFactory =
    Box<dyn FnOnce(ProcessGroup, &[TensorSpec]) -> Result<Box<dyn ModelWrapper>> + Send>;

/// Stores the gradients of a model between backward and the optimizer step.
pub trait ModelWrapper: Send {
    /// Returns the sink that gradients are reported to.
    fn sink(&self) -> SharedSink;

    /// Called before each forward pass, with the model and the context of the step. Without
    /// [`sync`](StepContext::sync) (`no_sync`) the next gradients are only accumulated on this
    /// rank. A wrapper that synchronizes buffers or parameters does it here. `model` is `None` if
    /// no forward pass follows: when gradients of a checkpoint are loaded.
    ///
    /// # Errors
    ///
    /// Those of the wrapper's communication, and of the model.
    fn prepare(&mut self, model: Option<&mut dyn Model>, cx: &mut StepContext<'_>) -> Result<()>;

    /// Called after each backward pass: waits until every gradient is complete.
    ///
    /// # Errors
    ///
    /// [`collective::Error::UnusedParameters`] if a parameter got no gradient; a peer's failure.
    fn finish(&mut self) -> Result<()>;

    /// Returns an error if averages of gradients have failed that an optimizer step may have used.
    /// On a device, where [`finish`](Self::finish) does not wait, this does.
    ///
    /// # Errors
    ///
    /// A peer's failure.
    fn settle(&self) -> Result<()> {
        Ok(())
    }

    /// Called once before training with a model on the device of the optimizer: a wrapper whose
    /// group supports that device averages gradients there from now on. Every rank calls it.
    ///
    /// # Errors
    ///
    /// [`Error::NotOnDevice`] naming an option that is not supported on the
    /// device; those of the model.
    fn place(&mut self, _model: &mut dyn Model) -> Result<()> {
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
    /// is called only if the counts of batches are known.
    ///
    /// # Errors
    ///
    /// Those of communication. By default [`Error::NoCounts`], because a
    /// wrapper that does not exchange the counts would weigh the ranks wrongly.
    fn mean_over_ranks(&self, _value: f64) -> Result<f64> {
        Err(Error::NoCounts)
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
    /// [`Error::WrapperState`] if the state cannot be encoded.
    fn state_dict(&self) -> Result<Vec<u8>> {
        Ok(Vec::new())
    }

    /// Restores a state. Every rank calls it with its own state.
    ///
    /// # Errors
    ///
    /// [`Error::WrapperState`] if the state belongs to another wrapper.
    fn load_state_dict(&mut self, _state: &[u8]) -> Result<()> {
        Err(Error::NoWrapperState)
    }
}

/// Lends a wrapper's gradients in host memory; those on a device are copied.
///
/// # Errors
///
/// Those of `visit`, and of the copies.
pub fn with_host_grads(
    wrapper: &dyn ModelWrapper,
    visit: &mut dyn FnMut(&[Option<Slice<'_>>]) -> Result<()>,
) -> Result<()> {
    wrapper.with_grads(&mut |grads| {
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
/// use train_step::{
///     DistributedDataParallel, Model, ModelWrapper, Result, StepContext, WrapperOver,
/// };
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
///         model: Option<&mut dyn Model>,
///         cx: &mut StepContext<'_>,
///     ) -> Result<()> {
///         self.1 += usize::from(!cx.sync);
///         self.0.prepare(model, cx)
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
    fn prepare(&mut self, model: Option<&mut dyn Model>, cx: &mut StepContext<'_>) -> Result<()> {
        self.inner_mut().prepare(model, cx)
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

    fn prepare(&mut self, model: Option<&mut dyn Model>, cx: &mut StepContext<'_>) -> Result<()> {
        WrapperOver::prepare(self, model, cx)?;
        // `finish` may change the gradients.
        cx.step.iter_mut().for_each(|step| step.may_join_backward = false);
        Ok(())
    }

    fn finish(&mut self) -> Result<()> {
        WrapperOver::finish(self)
    }

    fn settle(&self) -> Result<()> {
        self.inner().settle()
    }

    fn place(&mut self, model: &mut dyn Model) -> Result<()> {
        self.inner_mut().place(model)
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
