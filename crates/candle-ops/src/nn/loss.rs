//! Losses.

use candle_core::shape::Dim;
use candle_core::{Result, Tensor, bail};

use crate::graph::device;
use crate::relu;
use crate::state::index_range::IndexRange;
pub use crate::{CrossEntropyOptions, CtcLossOptions, Reduction, ctc_loss};

/// [`cross_entropy`](crate::cross_entropy), with labels of any integer type.
///
/// # Errors
///
/// The errors of [`cross_entropy`](crate::cross_entropy).
pub fn cross_entropy(inp: &Tensor, target: &Tensor) -> Result<Tensor> {
    crate::cross_entropy(inp, &super::indices(target)?)
}

/// [`cross_entropy_with`](crate::cross_entropy_with), with labels of any integer type.
///
/// # Errors
///
/// The errors of [`cross_entropy_with`](crate::cross_entropy_with).
pub fn cross_entropy_with(
    inp: &Tensor,
    target: &Tensor,
    options: CrossEntropyOptions<'_>,
) -> Result<Tensor> {
    crate::cross_entropy_with(inp, &super::indices(target)?, options)
}

/// Mean squared error, a scalar of `f32` (`f64` for `f64`), also for half-precision tensors.
///
/// # Errors
///
/// Mismatched shapes.
pub fn mse(inp: &Tensor, target: &Tensor) -> Result<Tensor> {
    let [inp, target] = wide("mse_loss", [inp, target])?;
    candle_nn::loss::mse(&inp, &target)
}

/// Like [`candle_nn::loss::huber`], a scalar as of [`mse`].
///
/// # Errors
///
/// Mismatched shapes; a `delta` that is not positive and finite.
pub fn huber(inp: &Tensor, target: &Tensor, delta: f64) -> Result<Tensor> {
    if !delta.is_finite() || delta <= 0.0 {
        bail!("huber: delta is {delta}, not positive and finite");
    }
    let [inp, target] = wide("huber_loss", [inp, target])?;
    candle_nn::loss::huber(&inp, &target, delta)
}

/// Mean of `d^2 / (2 * beta)` where the difference `d` is less than `beta`, else of
/// `|d| - beta / 2`: PyTorch's `smooth_l1_loss`, which is [`huber`] divided by `beta`. With a
/// `beta` of 0 it is the mean of `|d|`, whose gradient at 0 is 0. A scalar as of [`mse`].
///
/// # Errors
///
/// Mismatched shapes; a `beta` that is negative or not finite.
pub fn smooth_l1(inp: &Tensor, target: &Tensor, beta: f64) -> Result<Tensor> {
    let [inp, target] = wide("smooth_l1_loss", [inp, target])?;
    if !beta.is_finite() || beta < 0.0 {
        bail!("smooth_l1: beta is {beta}, not finite and at least 0");
    }
    if beta > 0.0 {
        return candle_nn::loss::huber(&inp, &target, beta)? / beta;
    }
    // The gradient of candle's `abs` at 0 is 1.
    let difference = (inp - target)?;
    (relu(&difference)? + relu(&difference.neg()?)?)?.mean_all()
}

/// Mean of `-t * ln(p) - (1 - t) * ln(1 - p)` with `p = sigmoid(x)`, for targets `t` from 0 to 1. A
/// scalar as of [`mse`]. It is computed as `max(x, 0) - x * t + ln(1 + exp(-|x|))`, which is finite
/// for large logits, unlike candle-nn's.
///
/// # Errors
///
/// Mismatched shapes.
pub fn binary_cross_entropy_with_logit(inp: &Tensor, target: &Tensor) -> Result<Tensor> {
    let [x, target] = wide("binary_cross_entropy_with_logits", [inp, target])?;
    let positive = relu(&x)?;
    // -|x|, with the derivative at 0 that fits the one of `relu`.
    let size = (&x - (&positive * 2.0)?)?;
    ((positive - (&x * target)?)? + (size.exp()? + 1.0)?.log()?)?.mean_all()
}

/// Like [`candle_nn::loss::nll`], a scalar as of [`mse`].
///
/// # Errors
///
/// Mismatched shapes; a label that is not a class, or not an integer.
pub fn nll(inp: &Tensor, target: &Tensor) -> Result<Tensor> {
    let [inp] = wide("nll_loss", [inp])?;
    let (target, (_, classes)) = (super::indices(target)?, inp.dims2()?);
    // candle's `gather` takes the greatest index for a 0.
    IndexRange::Nll(classes).check_all(&target)?;
    candle_nn::loss::nll(&inp, &target)
}

/// Kullback-Leibler divergence of log-probabilities `inp` from probabilities `target`: the sum of
/// `target * (ln(target) - inp)`, divided by the length of the first dimension, as PyTorch's
/// `kl_div` with `reduction="batchmean"`. A target of 0 has a term of 0. A scalar as of [`mse`].
///
/// # Errors
///
/// Mismatched shapes; a scalar.
pub fn kl_div(inp: &Tensor, target: &Tensor) -> Result<Tensor> {
    let [inp, target] = wide("kl_div", [inp, target])?;
    let batch = inp.dim(0)?;
    // ln(1) in place of ln(0), whose product with 0 is NaN.
    let is_zero = target.detach().eq(&target.zeros_like()?)?;
    let log = is_zero.where_cond(&target.ones_like()?, &target)?.log()?;
    // Zero times an infinite logarithm is NaN.
    let is_never = (is_zero * inp.detach().eq(f64::NEG_INFINITY)?)?;
    let inp = is_never.where_cond(&inp.zeros_like()?, &inp)?;
    (target * (log - inp)?)?.sum_all()? / batch as f64
}

/// `a . b / (|a| * |b|)` along a dimension, which is removed; lengths are at least `eps` (PyTorch's
/// default is 1e-8). The result is `f32` (`f64` for `f64`).
///
/// # Errors
///
/// Mismatched shapes; no such dimension.
pub fn cosine_similarity(a: &Tensor, b: &Tensor, dim: impl Dim, eps: f64) -> Result<Tensor> {
    let [a, b] = wide("cosine_similarity", [a, b])?;
    let dim = dim.to_index(a.shape(), "cosine_similarity")?;
    // Before the root, whose derivative at 0 is infinite.
    let length = |x: &Tensor| x.sqr()?.sum(dim)?.maximum(eps * eps)?.sqrt();
    (&a * &b)?.sum(dim)? / (length(&a)? * length(&b)?)?
}

/// Mean over rows of `[n, d]`, with the cosines `c` of `a` and `b`: `1 - c` where the target is 1,
/// `max(c - margin, 0)` where it is -1. `target` is `[n]`. A scalar as of [`mse`].
///
/// As in PyTorch 1e-12 is added to squared lengths.
///
/// # Errors
///
/// Mismatched shapes.
pub fn cosine_embedding(a: &Tensor, b: &Tensor, target: &Tensor, margin: f64) -> Result<Tensor> {
    let [a, b] = wide("cosine_embedding_loss", [a, b])?;
    let square = |x: &Tensor| x.sqr()?.sum(1)? + 1e-12;
    let cosine = ((&a * &b)?.sum(1)? / (square(&a)? * square(&b)?)?.sqrt()?)?;
    let target = target.to_dtype(a.dtype())?;
    let is = |value: f64| target.eq(&target.zeros_like()?.affine(1.0, value)?);
    let zeros = cosine.zeros_like()?;
    let alike = is(1.0)?.where_cond(&(1.0 - &cosine)?, &zeros)?;
    (alike + is(-1.0)?.where_cond(&relu(&(&cosine - margin)?)?, &zeros)?)?.mean_all()
}

/// Mean over rows of `[n, d]` of `max(|a - p| - |a - n| + margin, 0)`, for an anchor, a positive
/// and a negative example each: PyTorch's `triplet_margin_loss` with its default norm. A scalar as
/// of [`mse`]. As in PyTorch 1e-6 is added to each difference, so that equal rows have a gradient.
///
/// # Errors
///
/// Mismatched shapes.
pub fn triplet_margin(
    anchor: &Tensor,
    positive: &Tensor,
    negative: &Tensor,
    margin: f64,
) -> Result<Tensor> {
    let [anchor, positive, negative] = wide("triplet_margin_loss", [anchor, positive, negative])?;
    let distance = |to: &Tensor| ((&anchor - to)? + 1e-6)?.sqr()?.sum(1)?.sqrt();
    relu(&((distance(&positive)? - distance(&negative)?)? + margin)?)?.mean_all()
}

/// The inputs in the type in which a loss is computed.
fn wide<const N: usize>(name: &str, inputs: [&Tensor; N]) -> Result<[Tensor; N]> {
    let inputs = crate::cast(name, inputs)?;
    device::widened(inputs.each_ref())
}
