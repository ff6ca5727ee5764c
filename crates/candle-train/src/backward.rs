//! Gradients of parameters during a backward pass, by parameter index.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;

use candle_core::{Tensor, TensorId, bail};
use candle_ops::Tape;
use train_step::SharedSink;

use crate::tensors::report;
use crate::{Error, Result};

/// Indices of parameters by their tensors: variables, or the tensors of
/// [`Sources`](candle_ops::Sources).
#[derive(Debug)]
pub struct ParamIndex(Arc<HashMap<TensorId, usize>>);

impl ParamIndex {
    /// An index of the parameters with these ids, in this order.
    pub fn new(params: impl IntoIterator<Item = TensorId>) -> Self {
        Self(Arc::new(params.into_iter().zip(0..).collect()))
    }

    /// Runs [`Tape::backward_with`], and calls `ready` with the index and the contiguous gradient
    /// of each of the parameters.
    ///
    /// # Errors
    ///
    /// Errors of `ready`, unchanged; errors of candle, converted by `failed`.
    pub fn backward<E: 'static>(
        &self,
        (tape, loss): (Tape, &Tensor),
        gradient: Tensor,
        mut ready: impl FnMut(usize, Tensor) -> std::result::Result<(), E> + 'static,
        failed: impl FnOnce(candle_core::Error) -> E,
    ) -> std::result::Result<(), E> {
        let refusal = Rc::new(RefCell::new(None));
        let (index, refused) = (Arc::clone(&self.0), Rc::clone(&refusal));
        let ready = move |id, gradient: Tensor| {
            // Other tensors are variables that are not trained.
            let Some(index) = index.get(&id) else { return Ok(()) };
            let Err(error) = ready(*index, gradient.contiguous()?) else { return Ok(()) };
            *refused.borrow_mut() = Some(error);
            bail!("the gradient of parameter {index} was refused")
        };
        let result = tape.backward_with(loss, gradient, ready);
        refusal.take().map_or_else(|| result.map_err(failed), Err)
    }

    /// Runs [`backward`](Self::backward), and reports the gradients to a sink of `train-step`.
    ///
    /// # Errors
    ///
    /// Those of the sink, and of candle.
    pub fn report(
        &self,
        recorded: (Tape, &Tensor),
        gradient: Tensor,
        sink: SharedSink,
    ) -> Result<()> {
        let ready = move |index, gradient| Ok(report(&sink, index, gradient)?);
        self.backward(recorded, gradient, ready, Error::Candle)
    }
}
