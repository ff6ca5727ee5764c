//! What stands between a model and its gradients: where they are kept, and whether other ranks
//! have a say in them.
//!
//! A [`ModelWrapper`] owns gradient memory. [`DistributedDataParallel`] averages gradients over a
//! process group while backward still runs; a group of one rank is the same with nothing to
//! average. A wrapper of your own implements the trait, or [`WrapperOver`] to change some of another's
//! ways, and registers itself in [`MODEL_WRAPPERS`].

mod builtin;
mod ddp;
mod state;

use collective::ProcessGroup;
#[cfg(feature = "candle-cuda")]
use fused_optim::cuda::GradStats;
use fused_optim::{DType, Slice};

pub use builtin::MODEL_WRAPPERS;
pub use ddp::DistributedDataParallel;

use crate::Result;
use crate::engine::{ComputeDevice, Engine, Gradient, SharedSink, TensorSpec};

/// What a model is built with.
#[derive(Clone, Copy, Debug)]
pub struct ModelContext {
    /// Type of the parameters that layers do not insist to have in f32.
    pub dtype: DType,
    /// Seed of the parameters' initial values.
    pub seed: u64,
    /// Where it is to compute. A run refuses a model that computes elsewhere.
    pub device: ComputeDevice,
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

    /// Called before each forward pass. With `sync` false (`no_sync`) the coming gradients are
    /// only added up on this rank.
    ///
    /// # Errors
    ///
    /// Those of the communication behind the wrapper.
    fn prepare(&mut self, sync: bool) -> Result<()>;

    /// Called after [`prepare`](Self::prepare), with the model: a wrapper that keeps the ranks'
    /// buffers or parameters alike does it here.
    ///
    /// # Errors
    ///
    /// Those of the communication behind the wrapper, and of the engine.
    fn before_forward(&mut self, _engine: &mut dyn Engine) -> Result<()> {
        Ok(())
    }

    /// Called after [`prepare`](Self::prepare) of a pass that ends in a step on a GPU, if that would have to look at
    /// all gradients before it begins: a wrapper that averages them there may look as they come, as long as
    /// nothing changes them after that.
    #[cfg(feature = "candle-cuda")]
    fn look_ahead(&mut self, look: GradStats) {
        let _ = look;
    }

    /// Called after each backward pass: waits until every gradient is final.
    ///
    /// # Errors
    ///
    /// [`collective::Error::UnusedParameters`] if a parameter got none; a peer's failure.
    fn finish(&mut self) -> Result<()>;

    /// Told once, before training, of an engine on a device that an optimizer is to step on: a wrapper whose group
    /// is on that device, too, averages gradients there from now on. Every rank calls it.
    ///
    /// # Errors
    ///
    /// [`Error::Config`](crate::Error::Config) naming what it cannot do there; those of the engine.
    fn place(&mut self, _engine: &dyn Engine) -> Result<()> {
        Ok(())
    }

    /// Whether the gradients of a pass that is prepared are the step's, each as the engine reports it, and nothing
    /// else waits for them: the step may then be made before they are reported.
    fn passes_on(&self) -> bool {
        false
    }

    /// Lends the gradients, in the parameters' order; `None` where there is none. Of those on a device it lends
    /// copies.
    ///
    /// # Errors
    ///
    /// Those of `visit`.
    fn with_grads(&self, visit: &mut dyn FnMut(&[Option<Slice<'_>>]) -> Result<()>) -> Result<()>;

    /// Lends the gradients as [`with_grads`](Self::with_grads), each where it is.
    ///
    /// # Errors
    ///
    /// Those of `visit`.
    fn with_gradients(
        &self,
        visit: &mut dyn FnMut(&[Option<Gradient<'_>>]) -> Result<()>,
    ) -> Result<()> {
        self.with_grads(&mut |grads| {
            visit(&grads.iter().map(|grad| grad.map(Gradient::Host)).collect::<Vec<_>>())
        })
    }

    /// Forgets all gradients.
    fn zero_grad(&mut self);

    /// What this rank goes on from besides gradients, for a checkpoint; empty if that is nothing.
    ///
    /// # Errors
    ///
    /// [`Error::Checkpoint`](crate::Error::Checkpoint) if it cannot be written.
    fn state(&self) -> Result<Vec<u8>> {
        Ok(Vec::new())
    }

    /// Goes on from such a state. Every rank calls it with its own.
    ///
    /// # Errors
    ///
    /// [`Error::Checkpoint`](crate::Error::Checkpoint) if it is not of this wrapper.
    fn load_state(&mut self, _state: &[u8]) -> Result<()> {
        Err(crate::Error::Checkpoint("this model wrapper has no state to go on from".to_owned()))
    }
}

/// A wrapper over another one: what it does not change is the other's.
///
/// Its methods are those of [`ModelWrapper`], which it is, with the same errors.
///
/// # Examples
///
/// ```
/// use runner::Result;
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
///     fn prepare(&mut self, sync: bool) -> Result<()> {
///         self.1 += usize::from(!sync);
///         self.0.prepare(sync)
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
    fn prepare(&mut self, sync: bool) -> Result<()> {
        self.inner_mut().prepare(sync)
    }

    /// [`ModelWrapper::before_forward`].
    fn before_forward(&mut self, engine: &mut dyn Engine) -> Result<()> {
        self.inner_mut().before_forward(engine)
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

    fn prepare(&mut self, sync: bool) -> Result<()> {
        WrapperOver::prepare(self, sync)
    }

    fn before_forward(&mut self, engine: &mut dyn Engine) -> Result<()> {
        WrapperOver::before_forward(self, engine)
    }

    #[cfg(feature = "candle-cuda")]
    fn look_ahead(&mut self, look: GradStats) {
        self.inner_mut().look_ahead(look);
    }

    fn finish(&mut self) -> Result<()> {
        WrapperOver::finish(self)
    }

    fn place(&mut self, engine: &dyn Engine) -> Result<()> {
        self.inner_mut().place(engine)
    }

    fn with_grads(&self, visit: &mut dyn FnMut(&[Option<Slice<'_>>]) -> Result<()>) -> Result<()> {
        self.inner().with_grads(visit)
    }

    fn with_gradients(
        &self,
        visit: &mut dyn FnMut(&[Option<Gradient<'_>>]) -> Result<()>,
    ) -> Result<()> {
        self.inner().with_gradients(visit)
    }

    fn zero_grad(&mut self) {
        self.inner_mut().zero_grad();
    }

    fn state(&self) -> Result<Vec<u8>> {
        self.inner().state()
    }

    fn load_state(&mut self, state: &[u8]) -> Result<()> {
        self.inner_mut().load_state(state)
    }
}
