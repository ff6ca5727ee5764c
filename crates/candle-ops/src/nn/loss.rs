//! Losses.

use candle_core::{Result, Tensor};
pub use candle_nn::loss::{binary_cross_entropy_with_logit, huber, mse, nll};

pub use crate::CrossEntropyOptions;

/// [`cross_entropy`](crate::cross_entropy), with labels of any integer type.
///
/// # Errors
///
/// As [`cross_entropy`](crate::cross_entropy).
pub fn cross_entropy(inp: &Tensor, target: &Tensor) -> Result<Tensor> {
    crate::cross_entropy(inp, &super::indices(target)?)
}

/// [`cross_entropy_with`](crate::cross_entropy_with), with labels of any integer type.
///
/// # Errors
///
/// As [`cross_entropy_with`](crate::cross_entropy_with).
pub fn cross_entropy_with(
    inp: &Tensor,
    target: &Tensor,
    options: CrossEntropyOptions<'_>,
) -> Result<Tensor> {
    crate::cross_entropy_with(inp, &super::indices(target)?, options)
}
