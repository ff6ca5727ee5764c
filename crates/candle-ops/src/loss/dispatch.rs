//! For tensors on a GPU: kernels if there are, else compositions; see `graph/device.rs`.

use candle_core::{DType, Result, Tensor};

use super::CrossEntropy;
use super::ctc::{Sample, skips};
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

/// One loss for each sample, in the compute type. It is the recursion of the loops, of all samples
/// at once, one frame after the other.
pub(crate) fn ctc_loss(
    log_probs: &Tensor,
    samples: &[Sample],
    zero_infinity: bool,
) -> Result<Tensor> {
    /// The logarithm of no probability. It is finite, so that gradients are.
    const NONE: f64 = -1e30;
    let ([x], device) = (widened([log_probs])?, log_probs.device());
    let none = x.ones_like()?.affine(NONE, 0.0)?;
    let (x, count) = (x.detach().lt(NONE)?.where_cond(&none, &x)?, samples.len());
    let states = samples.iter().map(|sample| sample.states.len()).max().unwrap_or(1);
    let frames = samples.iter().map(|sample| sample.frames).max().unwrap_or(0);
    let of_states = |of: &dyn Fn(&[usize], usize) -> f64, dtype| {
        let row = |sample: &Sample| (0..states).map(|s| of(&sample.states, s)).collect::<Vec<_>>();
        let rows = samples.iter().flat_map(row).collect();
        Tensor::from_vec(rows, (count, states), device)?.to_dtype(dtype)
    };
    // States behind the last one are never left.
    let class = |states: &[usize], s: usize| states.get(s).copied().unwrap_or(0) as f64;
    let classes = of_states(&class, DType::U32)?;
    let skip = |states: &[usize], s: usize| {
        if s < states.len() && skips(states, s) { 0.0 } else { NONE }
    };
    let skip = of_states(&skip, x.dtype())?;
    let front = Tensor::full(NONE, (count, 2), device)?.to_dtype(x.dtype())?;
    let start = Tensor::zeros((count, 1), x.dtype(), device)?;
    let rest = Tensor::full(NONE, (count, states), device)?.to_dtype(x.dtype())?;
    let mut sums = Tensor::cat(&[&front.narrow(1, 1, 1)?, &start, &rest], 1)?;
    for frame in 0..frames {
        let from = |s: usize| sums.narrow(1, s, states);
        let next = log_sum(&[from(2)?, from(1)?, (from(0)? + &skip)?])?;
        let next = (next + x.get(frame)?.contiguous()?.gather(&classes, 1)?)?;
        let next = Tensor::cat(&[&front, &next], 1)?;
        let is_on = samples.iter().map(|sample| u8::from(frame < sample.frames)).collect();
        let is_on = Tensor::from_vec(is_on, (count, 1), device)?.broadcast_as(sums.shape())?;
        sums = is_on.where_cond(&next, &sums)?;
    }
    let ends = samples.iter().flat_map(|sample| [1, 0].map(|i| (sample.states.len() + i) as u32));
    let ends = Tensor::from_vec(ends.collect(), (count, 2), device)?;
    let ends = sums.gather(&ends, 1)?;
    let losses = log_sum(&[ends.narrow(1, 0, 1)?, ends.narrow(1, 1, 1)?])?.squeeze(1)?.neg()?;
    let is_infinite = losses.ge(-NONE / 2.0)?;
    if zero_infinity {
        return is_infinite.where_cond(&losses.zeros_like()?, &losses);
    }
    let ones = losses.ones_like()?;
    &losses * is_infinite.where_cond(&(&ones * f64::INFINITY)?, &ones)?
}

/// The logarithm of a sum of exponentials, element by element.
fn log_sum(terms: &[Tensor]) -> Result<Tensor> {
    let mut largest = terms[0].detach();
    for term in &terms[1..] {
        largest = largest.maximum(&term.detach())?;
    }
    let mut sum = largest.zeros_like()?;
    for term in terms {
        sum = (sum + (term - &largest)?.exp()?)?;
    }
    sum.log()? + largest
}
