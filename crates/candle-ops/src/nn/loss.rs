//! Losses.

use candle_core::{Result, Tensor};

pub use crate::CrossEntropyOptions;

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

/// Mean squared error, in `f32` under autocast.
///
/// # Errors
///
/// Mismatched shapes.
pub fn mse(inp: &Tensor, target: &Tensor) -> Result<Tensor> {
    let [inp, target] = crate::cast("mse_loss", [inp, target])?;
    candle_nn::loss::mse(&inp, &target)
}

/// Like [`candle_nn::loss::huber`], in `f32` under autocast.
///
/// # Errors
///
/// Mismatched shapes.
pub fn huber(inp: &Tensor, target: &Tensor, delta: f64) -> Result<Tensor> {
    let [inp, target] = crate::cast("huber_loss", [inp, target])?;
    candle_nn::loss::huber(&inp, &target, delta)
}

/// Like [`candle_nn::loss::binary_cross_entropy_with_logit`], in `f32` under autocast.
///
/// # Errors
///
/// Mismatched shapes.
pub fn binary_cross_entropy_with_logit(inp: &Tensor, target: &Tensor) -> Result<Tensor> {
    let [inp, target] = crate::cast("binary_cross_entropy_with_logits", [inp, target])?;
    candle_nn::loss::binary_cross_entropy_with_logit(&inp, &target)
}

/// Like [`candle_nn::loss::nll`], in `f32` under autocast.
///
/// # Errors
///
/// Mismatched shapes.
pub fn nll(inp: &Tensor, target: &Tensor) -> Result<Tensor> {
    let [inp] = crate::cast("nll_loss", [inp])?;
    candle_nn::loss::nll(&inp, &super::indices(target)?)
}
