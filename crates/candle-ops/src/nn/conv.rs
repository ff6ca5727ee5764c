//! Convolutions, and transposed ones.

use candle_core::{Module, Result, Tensor, bail};
use candle_nn::VarBuilder;
pub use candle_nn::conv::{
    Conv1dConfig, Conv2dConfig, ConvTranspose1dConfig, ConvTranspose2dConfig,
};

use super::{BatchNorm, within_fan_in};
use crate::{ConvOptions, ConvTransposeOptions};

/// One-dimensional convolution: [`conv1d`](crate::conv1d) with a `weight` and an optional `bias`.
#[derive(Clone, Debug)]
pub struct Conv1d {
    weight: Tensor,
    bias: Option<Tensor>,
    config: Conv1dConfig,
}

impl Conv1d {
    /// A layer of a weight `[out_channels, in_channels / groups, kernel_size]` and a bias `[out_channels]`.
    pub const fn new(weight: Tensor, bias: Option<Tensor>, config: Conv1dConfig) -> Self {
        Self { weight, bias, config }
    }

    /// Stride and the like.
    pub const fn config(&self) -> &Conv1dConfig {
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
}

impl Module for Conv1d {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let Conv1dConfig { padding, stride, dilation, groups, .. } = self.config;
        let options = ConvOptions { stride, padding, dilation, groups };
        crate::conv1d(x, &self.weight, self.bias.as_ref(), options)
    }
}

/// Two-dimensional convolution: [`conv2d`](crate::conv2d) with a `weight` and an optional `bias`.
#[derive(Clone, Debug)]
pub struct Conv2d {
    weight: Tensor,
    bias: Option<Tensor>,
    config: Conv2dConfig,
}

impl Conv2d {
    /// A layer of a weight `[out_channels, in_channels / groups, height, width]` and a bias `[out_channels]`.
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
        let Conv2dConfig { padding, stride, dilation, groups, .. } = self.config;
        let options = ConvOptions { stride, padding, dilation, groups };
        crate::conv2d(x, &self.weight, self.bias.as_ref(), options)
    }
}

/// Transposed convolution of one dimension: [`conv_transpose1d`](crate::conv_transpose1d) with a `weight` and an optional `bias`.
#[derive(Clone, Debug)]
pub struct ConvTranspose1d {
    weight: Tensor,
    bias: Option<Tensor>,
    config: ConvTranspose1dConfig,
}

impl ConvTranspose1d {
    /// A layer of a weight `[in_channels, out_channels / groups, kernel_size]` and a bias `[out_channels]`.
    pub const fn new(weight: Tensor, bias: Option<Tensor>, config: ConvTranspose1dConfig) -> Self {
        Self { weight, bias, config }
    }

    /// Stride and the like.
    pub const fn config(&self) -> &ConvTranspose1dConfig {
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
}

impl Module for ConvTranspose1d {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let ConvTranspose1dConfig { padding, output_padding, stride, dilation, groups } =
            self.config;
        let options = ConvTransposeOptions { stride, padding, output_padding, dilation, groups };
        crate::conv_transpose1d(x, &self.weight, self.bias.as_ref(), options)
    }
}

/// Transposed convolution: [`conv_transpose2d`](crate::conv_transpose2d) with a `weight` and an optional `bias`.
#[derive(Clone, Debug)]
pub struct ConvTranspose2d {
    weight: Tensor,
    bias: Option<Tensor>,
    config: ConvTranspose2dConfig,
    groups: usize,
}

impl ConvTranspose2d {
    /// A layer of a weight `[in_channels, out_channels / groups, height, width]` and a bias `[out_channels]`.
    pub const fn new(weight: Tensor, bias: Option<Tensor>, config: ConvTranspose2dConfig) -> Self {
        Self { weight, bias, config, groups: 1 }
    }

    /// Stride and the like.
    pub const fn config(&self) -> &ConvTranspose2dConfig {
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

    /// Splits the channels into groups, which candle-nn's configuration has no field for.
    #[must_use]
    pub const fn with_groups(mut self, groups: usize) -> Self {
        self.groups = groups;
        self
    }
}

impl Module for ConvTranspose2d {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let ConvTranspose2dConfig { padding, output_padding, stride, dilation } = self.config;
        let options =
            ConvTransposeOptions { stride, padding, output_padding, dilation, groups: self.groups };
        crate::conv_transpose2d(x, &self.weight, self.bias.as_ref(), options)
    }
}

/// A layer with a bias. Both tensors start uniform within `1 / sqrt(fan_in)`.
///
/// # Errors
///
/// Those of the builder; groups that do not divide the channels.
pub fn conv1d(
    in_channels: usize,
    out_channels: usize,
    kernel_size: usize,
    cfg: Conv1dConfig,
    vb: VarBuilder<'_>,
) -> Result<Conv1d> {
    let (weight, bias) =
        conv_parameters(in_channels, out_channels, &[kernel_size], cfg.groups, true, &vb)?;
    Ok(Conv1d::new(weight, bias, cfg))
}

/// As [`conv1d`], without a bias.
///
/// # Errors
///
/// As [`conv1d`].
pub fn conv1d_no_bias(
    in_channels: usize,
    out_channels: usize,
    kernel_size: usize,
    cfg: Conv1dConfig,
    vb: VarBuilder<'_>,
) -> Result<Conv1d> {
    let (weight, bias) =
        conv_parameters(in_channels, out_channels, &[kernel_size], cfg.groups, false, &vb)?;
    Ok(Conv1d::new(weight, bias, cfg))
}

/// A layer with a square kernel and a bias. Both tensors start uniform within `1 / sqrt(fan_in)`.
///
/// # Errors
///
/// Those of the builder; groups that do not divide the channels.
pub fn conv2d(
    in_channels: usize,
    out_channels: usize,
    kernel_size: usize,
    cfg: Conv2dConfig,
    vb: VarBuilder<'_>,
) -> Result<Conv2d> {
    let (weight, bias) =
        conv_parameters(in_channels, out_channels, &[kernel_size; 2], cfg.groups, true, &vb)?;
    Ok(Conv2d::new(weight, bias, cfg))
}

/// As [`conv2d`], without a bias.
///
/// # Errors
///
/// As [`conv2d`].
pub fn conv2d_no_bias(
    in_channels: usize,
    out_channels: usize,
    kernel_size: usize,
    cfg: Conv2dConfig,
    vb: VarBuilder<'_>,
) -> Result<Conv2d> {
    let (weight, bias) =
        conv_parameters(in_channels, out_channels, &[kernel_size; 2], cfg.groups, false, &vb)?;
    Ok(Conv2d::new(weight, bias, cfg))
}

/// A layer with a bias. Both tensors start uniform within `1 / sqrt(fan_in)`.
///
/// # Errors
///
/// Those of the builder; groups that do not divide the channels.
pub fn conv_transpose1d(
    in_channels: usize,
    out_channels: usize,
    kernel_size: usize,
    cfg: ConvTranspose1dConfig,
    vb: VarBuilder<'_>,
) -> Result<ConvTranspose1d> {
    let (weight, bias) =
        transposed_parameters(in_channels, out_channels, &[kernel_size], cfg.groups, true, &vb)?;
    Ok(ConvTranspose1d::new(weight, bias, cfg))
}

/// As [`conv_transpose1d`], without a bias.
///
/// # Errors
///
/// As [`conv_transpose1d`].
pub fn conv_transpose1d_no_bias(
    in_channels: usize,
    out_channels: usize,
    kernel_size: usize,
    cfg: ConvTranspose1dConfig,
    vb: VarBuilder<'_>,
) -> Result<ConvTranspose1d> {
    let (weight, bias) =
        transposed_parameters(in_channels, out_channels, &[kernel_size], cfg.groups, false, &vb)?;
    Ok(ConvTranspose1d::new(weight, bias, cfg))
}

/// A layer with a square kernel and a bias. Both tensors start uniform within `1 / sqrt(fan_in)`.
///
/// # Errors
///
/// Those of the builder; groups that do not divide the channels.
pub fn conv_transpose2d(
    in_channels: usize,
    out_channels: usize,
    kernel_size: usize,
    cfg: ConvTranspose2dConfig,
    vb: VarBuilder<'_>,
) -> Result<ConvTranspose2d> {
    let (weight, bias) =
        transposed_parameters(in_channels, out_channels, &[kernel_size; 2], 1, true, &vb)?;
    Ok(ConvTranspose2d::new(weight, bias, cfg))
}

/// As [`conv_transpose2d`], without a bias.
///
/// # Errors
///
/// As [`conv_transpose2d`].
pub fn conv_transpose2d_no_bias(
    in_channels: usize,
    out_channels: usize,
    kernel_size: usize,
    cfg: ConvTranspose2dConfig,
    vb: VarBuilder<'_>,
) -> Result<ConvTranspose2d> {
    let (weight, bias) =
        transposed_parameters(in_channels, out_channels, &[kernel_size; 2], 1, false, &vb)?;
    Ok(ConvTranspose2d::new(weight, bias, cfg))
}

/// Weight and bias of a convolution.
fn conv_parameters(
    in_channels: usize,
    out_channels: usize,
    kernel: &[usize],
    groups: usize,
    bias: bool,
    vb: &VarBuilder<'_>,
) -> Result<(Tensor, Option<Tensor>)> {
    check_groups(groups, [in_channels, out_channels])?;
    parameters(out_channels, in_channels / groups, kernel, bias.then_some(out_channels), vb)
}

/// Weight and bias of a transposed convolution.
fn transposed_parameters(
    in_channels: usize,
    out_channels: usize,
    kernel: &[usize],
    groups: usize,
    bias: bool,
    vb: &VarBuilder<'_>,
) -> Result<(Tensor, Option<Tensor>)> {
    check_groups(groups, [in_channels, out_channels])?;
    parameters(in_channels, out_channels / groups, kernel, bias.then_some(out_channels), vb)
}

fn check_groups(groups: usize, channels: [usize; 2]) -> Result<()> {
    match groups > 0 && channels.iter().all(|channels| channels.is_multiple_of(groups)) {
        true => Ok(()),
        false => bail!("{groups} groups do not divide {channels:?} channels"),
    }
}

/// A weight `[first, second, kernel...]` and a bias. The fan-in is PyTorch's, of all dimensions but the first.
fn parameters(
    first: usize,
    second: usize,
    kernel: &[usize],
    bias: Option<usize>,
    vb: &VarBuilder<'_>,
) -> Result<(Tensor, Option<Tensor>)> {
    let shape = [&[first, second], kernel].concat();
    let init = within_fan_in(shape[1..].iter().product());
    let weight = vb.get_with_hints(shape, "weight", init)?;
    Ok((weight, bias.map(|len| vb.get_with_hints(len, "bias", init)).transpose()?))
}
