//! Convolutions.

use candle_core::{Module, Result, Tensor, bail};
use candle_nn::VarBuilder;
pub use candle_nn::conv::Conv2dConfig;

use super::{BatchNorm, within_fan_in};
use crate::Window;

/// Two-dimensional convolution: [`conv2d`](crate::conv2d) with a `weight` and an optional `bias`.
#[derive(Clone, Debug)]
pub struct Conv2d {
    weight: Tensor,
    bias: Option<Tensor>,
    config: Conv2dConfig,
}

impl Conv2d {
    /// A layer of a weight `[out_channels, in_channels, height, width]` and a bias `[out_channels]`.
    pub const fn new(weight: Tensor, bias: Option<Tensor>, config: Conv2dConfig) -> Self {
        Self { weight, bias, config }
    }

    /// Stride and the like.
    pub const fn config(&self) -> &Conv2dConfig {
        &self.config
    }

    /// The weight.
    pub const fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// The bias.
    pub const fn bias(&self) -> Option<&Tensor> {
        self.bias.as_ref()
    }

    /// This layer and `bn` in evaluation behind it as one layer.
    ///
    /// # Errors
    ///
    /// A norm without weight and bias, or of other channels.
    pub fn absorb_bn(&self, bn: &BatchNorm) -> Result<Self> {
        let Some((weight, bias)) = bn.weight_and_bias() else {
            bail!("absorb_bn: the batch norm has no weight and bias");
        };
        let scale = (weight / (bn.running_var() + bn.eps())?.sqrt()?)?;
        let old = match &self.bias {
            Some(bias) => (bias - bn.running_mean())?,
            None => bn.running_mean().neg()?,
        };
        Ok(Self {
            weight: self.weight.broadcast_mul(&scale.reshape(((), 1, 1, 1))?)?,
            bias: Some((bias + (scale * old)?)?),
            config: self.config,
        })
    }
}

impl Module for Conv2d {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let Conv2dConfig { stride, padding, dilation, groups, .. } = self.config;
        if (dilation, groups) != (1, 1) {
            bail!("conv2d: a dilation of {dilation} and {groups} groups are not supported");
        }
        crate::conv2d(x, &self.weight, self.bias.as_ref(), Window { stride, padding })
    }
}

/// A layer with a square kernel and a bias. Both tensors start uniform within `1 / sqrt(fan_in)`.
///
/// # Errors
///
/// Those of the builder.
pub fn conv2d(
    in_channels: usize,
    out_channels: usize,
    kernel_size: usize,
    cfg: Conv2dConfig,
    vb: VarBuilder<'_>,
) -> Result<Conv2d> {
    conv2d_b([in_channels, out_channels], kernel_size, true, cfg, &vb)
}

/// As [`conv2d`], without a bias.
///
/// # Errors
///
/// Those of the builder.
pub fn conv2d_no_bias(
    in_channels: usize,
    out_channels: usize,
    kernel_size: usize,
    cfg: Conv2dConfig,
    vb: VarBuilder<'_>,
) -> Result<Conv2d> {
    conv2d_b([in_channels, out_channels], kernel_size, false, cfg, &vb)
}

fn conv2d_b(
    [in_channels, out_channels]: [usize; 2],
    kernel: usize,
    bias: bool,
    cfg: Conv2dConfig,
    vb: &VarBuilder<'_>,
) -> Result<Conv2d> {
    let in_channels = in_channels / cfg.groups;
    let init = within_fan_in(in_channels * kernel * kernel);
    let weight = vb.get_with_hints((out_channels, in_channels, kernel, kernel), "weight", init)?;
    let bias = bias.then(|| vb.get_with_hints(out_channels, "bias", init)).transpose()?;
    Ok(Conv2d::new(weight, bias, cfg))
}
