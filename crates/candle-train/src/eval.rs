//! Weights for evaluation, in place of those of training.

use candle_core::{Result, Tensor, bail};
use fused_optim::Optimizer;
use fused_optim::candle::slice;

use crate::tensors::{Tensors, set};

/// Returns the weights for evaluation of a parameter, in its type; the parameter's own, if it is in
/// no group.
///
/// # Errors
///
/// Those of [`Optimizer::eval_weights`]; a parameter that is not on the CPU, or that another thread
/// is updating.
pub(crate) fn eval_tensor(
    params: &Tensors,
    optimizer: &dyn Optimizer,
    index: usize,
) -> Result<Tensor> {
    let tensor = &params.tensors[index];
    let (storage, layout) = tensor.storage_and_layout();
    let Some(weight) = slice(&storage, layout) else {
        bail!("`{}` is not on the CPU, or is being updated", params.specs[index].name)
    };
    let mut values = vec![0.0; weight.len()];
    match optimizer.eval_weights(index, weight, &mut values) {
        Err(fused_optim::Error::MissingParam { .. }) => return tensor.detach().copy(),
        result => result.map_err(candle_core::Error::wrap)?,
    }
    Tensor::from_vec(values, tensor.shape(), tensor.device())?.to_dtype(tensor.dtype())
}

/// Calls `call` while the parameters have their weights for evaluation, and then gives them back
/// those of training, bit for bit, also if it panics.
///
/// # Errors
///
/// Those of [`eval_tensor`].
pub(crate) fn with_eval_weights<R>(
    params: &Tensors,
    optimizer: &dyn Optimizer,
    call: impl FnOnce() -> R,
) -> Result<R> {
    if !optimizer.has_eval_weights() {
        return Ok(call());
    }
    let weights = (0..params.tensors.len()).map(|index| eval_tensor(params, optimizer, index));
    let weights = weights.collect::<Result<Vec<_>>>()?;
    let mut restored = Restored { params, trained: params.copies()? };
    params.set_all(&weights)?;
    let result = call();
    params.set_all(&std::mem::take(&mut restored.trained))?;
    Ok(result)
}

/// Restores trained weights when it is dropped, unless they were taken.
struct Restored<'a> {
    params: &'a Tensors,
    trained: Vec<Tensor>,
}

impl Drop for Restored<'_> {
    fn drop(&mut self) {
        for (to, from) in self.params.tensors.iter().zip(&self.trained) {
            // It is of the same shape and type.
            let _ = set(to, from);
        }
    }
}
