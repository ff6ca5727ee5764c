//! For tensors on a GPU: kernels if there are, else compositions; see `graph/device.rs`.

use candle_core::{DType, Result, Tensor};

use super::CrossEntropy;
use crate::graph::device::{self, scalar, widened};

/// The caller has checked the labels.
pub(crate) fn cross_entropy(logits: &Tensor, labels: &Tensor, of: &CrossEntropy) -> Result<Tensor> {
    if let Some(kernels) = device::kernels(logits).filter(|_| of.is_plain()) {
        return kernels.cross_entropy(logits, labels);
    }
    let [wide] = widened([logits])?;
    let shifted = wide.broadcast_sub(&wide.detach().max_keepdim(1)?)?;
    let log = shifted.exp()?.sum_keepdim(1)?.log()?;
    if of.is_plain() {
        return (log - shifted.gather(&labels.unsqueeze(1)?, 1)?)?.mean_all();
    }
    let labels = labels.to_dtype(DType::I64)?;
    // Any number that is not a label, if none is ignored.
    let kept = labels.broadcast_ne(&scalar(of.ignore_index.unwrap_or(-1) as f64, &labels)?)?;
    let at = kept.where_cond(&labels, &labels.zeros_like()?)?;
    let (_, classes) = logits.dims2()?;
    let weights = match &of.weight {
        Some(weight) => weight.to_device(logits.device())?.to_dtype(wide.dtype())?,
        None => Tensor::ones(classes, wide.dtype(), logits.device())?,
    };
    let own = (weights.index_select(&at, 0)? * kept.to_dtype(wide.dtype())?)?;
    let nll = (&log - shifted.gather(&at.unsqueeze(1)?, 1)?)?.squeeze(1)?;
    let mut rows = ((nll * &own)? * (1.0 - of.smoothing))?;
    if of.smoothing > 0.0 {
        let all = log.broadcast_sub(&shifted)?.broadcast_mul(&weights)?.sum(1)?;
        rows = (rows + (all * (of.smoothing / classes as f64))?)?;
    }
    let total = kept.where_cond(&rows, &rows.zeros_like()?)?.sum_all()?;
    // If all labels are ignored, the loss is NaN, and gradients are 0.
    let weight = own.sum_all()?;
    let none = weight.eq(&weight.zeros_like()?)?;
    let nan = none.where_cond(&(weight.zeros_like()? * f64::NAN)?, &weight.zeros_like()?)?;
    (total / (weight + none.to_dtype(wide.dtype())?)?)? + nan
}
