//! Group normalization.

use candle_core::{Module, Result, Tensor, bail};
use candle_nn::VarBuilder;

use super::norm_parameter;

/// Group normalization of `[n, c, ...]`: [`group_norm`](crate::group_norm) with a `weight` and a
/// `bias`.
#[derive(Clone, Debug)]
pub struct GroupNorm {
    weight: Tensor,
    bias: Tensor,
    eps: f64,
    num_groups: usize,
}

impl GroupNorm {
    /// A layer with a weight and a bias, both `[num_channels]`.
    ///
    /// # Errors
    ///
    /// Groups that do not divide the channels.
    pub fn new(
        weight: Tensor,
        bias: Tensor,
        num_channels: usize,
        num_groups: usize,
        eps: f64,
    ) -> Result<Self> {
        if num_groups == 0 || !num_channels.is_multiple_of(num_groups) {
            bail!("group_norm: {num_groups} groups do not divide {num_channels} channels");
        }
        Ok(Self { weight, bias, eps, num_groups })
    }
}

impl Module for GroupNorm {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        crate::group_norm(x, self.num_groups, &self.weight, &self.bias, self.eps as f32)
    }
}

/// A layer that is initialized with a weight of 1 and a bias of 0.
///
/// # Errors
///
/// Errors of the builder; a parameter larger than the memory; groups that do not divide the
/// channels.
pub fn group_norm(
    num_groups: usize,
    num_channels: usize,
    eps: f64,
    vb: VarBuilder<'_>,
) -> Result<GroupNorm> {
    let weight = norm_parameter(num_channels, "weight", 1.0, &vb)?;
    let bias = norm_parameter(num_channels, "bias", 0.0, &vb)?;
    GroupNorm::new(weight, bias, num_channels, num_groups, eps)
}
