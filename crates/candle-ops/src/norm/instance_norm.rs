//! Instance normalization: of each channel of each sample.

use candle_core::{DType, Result, Tensor};

use super::group_norm::group_norm;
use crate::autocast::without;
use crate::cast;

/// `gamma * (x - mean) / sqrt(var + eps) + beta`, with mean and biased variance of each channel of
/// each sample: [`group_norm`] with a group per channel. Without `gamma` and `beta` these are 1 and
/// 0.
///
/// # Errors
///
/// The errors of [`group_norm`].
pub fn instance_norm(
    x: &Tensor,
    gamma_and_beta: Option<(&Tensor, &Tensor)>,
    eps: f32,
) -> Result<Tensor> {
    let channels = x.dims().get(1).copied().unwrap_or(0);
    let [x, gamma, beta] = match gamma_and_beta {
        Some((gamma, beta)) => cast("instance_norm", [x, gamma, beta])?,
        None => {
            let [x] = cast("instance_norm", [x])?;
            let dtype = if x.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
            let ones = Tensor::ones(channels, dtype, x.device())?;
            let zeros = ones.zeros_like()?;
            [x, ones, zeros]
        }
    };
    without(|| group_norm(&x, channels, &gamma, &beta, eps))
}
