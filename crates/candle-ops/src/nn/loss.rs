//! Losses.

use candle_core::{DType, Result, Tensor};
pub use candle_nn::loss::{binary_cross_entropy_with_logit, huber, mse, nll};

/// [`cross_entropy`](crate::cross_entropy), with labels of any integer type.
///
/// # Errors
///
/// As [`cross_entropy`](crate::cross_entropy).
pub fn cross_entropy(inp: &Tensor, target: &Tensor) -> Result<Tensor> {
    crate::cross_entropy(inp, &target.to_dtype(DType::I64)?)
}
