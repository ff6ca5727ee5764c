//! What stands between a model and its gradients: where they are kept, and whether other ranks
//! have a say in them.
//!
//! A [`ModelWrapper`] owns gradient memory. [`DistributedDataParallel`] averages gradients over a
//! process group while backward still runs; a group of one rank is the same with nothing to
//! average. A wrapper of your own implements the trait and registers itself in
//! [`MODEL_WRAPPERS`](crate::registry::MODEL_WRAPPERS).

mod builtin;
mod ddp;

use collective::ProcessGroup;
use fused_optim::{DType, Slice};

pub(crate) use builtin::BUILTIN;
pub use ddp::DistributedDataParallel;

use crate::Result;
use crate::engine::{Engine, SharedSink, TensorSpec};

/// What a model is built with.
#[derive(Clone, Copy, Debug)]
pub struct ModelContext {
    /// Type of the parameters that layers do not insist to have in f32.
    pub dtype: DType,
    /// Seed of the parameters' initial values.
    pub seed: u64,
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

    /// Called after each backward pass: waits until every gradient is final.
    ///
    /// # Errors
    ///
    /// [`collective::Error::UnusedParameters`] if a parameter got none; a peer's failure.
    fn finish(&mut self) -> Result<()>;

    /// Lends the gradients, in the parameters' order; `None` where there is none.
    ///
    /// # Errors
    ///
    /// Those of `visit`.
    fn with_grads(&self, visit: &mut dyn FnMut(&[Option<Slice<'_>>]) -> Result<()>) -> Result<()>;

    /// Forgets all gradients.
    fn zero_grad(&mut self);
}
