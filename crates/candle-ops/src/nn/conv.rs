//! Convolutions and transposed convolutions.

use candle_core::{Module, Result, Tensor, bail};
use candle_nn::VarBuilder;
pub use candle_nn::conv::{
    Conv1dConfig, Conv2dConfig, ConvTranspose1dConfig, ConvTranspose2dConfig,
};

use super::parameter::parameter;
use super::{BatchNorm, within_fan_in};
use crate::{ConvOptions, ConvTransposeOptions};

/// Defines a layer's type and accessors, and its constructors with a builder. `$tensors` are its
/// weight and bias.
macro_rules! layer {
    (
        $(#[$doc:meta])* $layer:ident, $config:ident, $weight:literal, $new:ident, $new_no_bias:ident,
        $tensors:expr $(, $groups:ident)?
    ) => {
        $(#[$doc])*
        #[derive(Clone, Debug)]
        pub struct $layer {
            weight: Tensor,
            bias: Option<Tensor>,
            config: $config,
            $($groups: usize,)?
        }

        impl $layer {
            #[doc = concat!("A layer of a weight `[", $weight, "]` and a bias `[out_channels]`.")]
            pub const fn new(weight: Tensor, bias: Option<Tensor>, config: $config) -> Self {
                Self { weight, bias, config, $($groups: 1)? }
            }

            /// The options, such as the stride.
            pub const fn config(&self) -> &$config {
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

        /// A layer with a bias. Both tensors are initialized uniformly within `1 / sqrt(fan_in)`.
        /// Two-dimensional kernels are square.
        ///
        /// # Errors
        ///
        /// Errors of the builder; a parameter larger than the memory; groups that do not divide the
        /// channels.
        pub fn $new(
            in_channels: usize,
            out_channels: usize,
            kernel_size: usize,
            cfg: $config,
            vb: VarBuilder<'_>,
        ) -> Result<$layer> {
            let (weight, bias) = $tensors(&cfg, [in_channels, out_channels], kernel_size, true, &vb)?;
            Ok($layer::new(weight, bias, cfg))
        }

        #[doc = concat!("As [`", stringify!($new), "`], without a bias.")]
        ///
        /// # Errors
        ///
        #[doc = concat!("As [`", stringify!($new), "`].")]
        pub fn $new_no_bias(
            in_channels: usize,
            out_channels: usize,
            kernel_size: usize,
            cfg: $config,
            vb: VarBuilder<'_>,
        ) -> Result<$layer> {
            let (weight, bias) = $tensors(&cfg, [in_channels, out_channels], kernel_size, false, &vb)?;
            Ok($layer::new(weight, bias, cfg))
        }
    };
}

layer! {
    /// One-dimensional convolution: [`conv1d`](crate::conv1d) with a `weight` and an optional
    /// `bias`.
    Conv1d, Conv1dConfig, "out_channels, in_channels / groups, kernel_size", conv1d, conv1d_no_bias,
    |cfg: &Conv1dConfig, channels, size, bias, vb| parameters(channels, &[size], cfg.groups, bias, vb)
}

layer! {
    /// Two-dimensional convolution: [`conv2d`](crate::conv2d) with a `weight` and an optional
    /// `bias`.
    Conv2d, Conv2dConfig, "out_channels, in_channels / groups, height, width", conv2d, conv2d_no_bias,
    |cfg: &Conv2dConfig, channels, size, bias, vb| {
        parameters(channels, &[size; 2], cfg.groups, bias, vb)
    }
}

layer! {
    /// One-dimensional transposed convolution: [`conv_transpose1d`](crate::conv_transpose1d) with a
    /// `weight` and an optional `bias`.
    ConvTranspose1d, ConvTranspose1dConfig, "in_channels, out_channels / groups, kernel_size", conv_transpose1d,
    conv_transpose1d_no_bias,
    |cfg: &ConvTranspose1dConfig, channels, size, bias, vb| {
        transposed_parameters(channels, &[size], cfg.groups, bias, vb)
    }
}

layer! {
    /// Two-dimensional transposed convolution: [`conv_transpose2d`](crate::conv_transpose2d) with a
    /// `weight` and an optional `bias`.
    ConvTranspose2d, ConvTranspose2dConfig, "in_channels, out_channels / groups, height, width", conv_transpose2d,
    conv_transpose2d_no_bias,
    |_: &ConvTranspose2dConfig, channels, size, bias, vb| {
        transposed_parameters(channels, &[size; 2], 1, bias, vb)
    },
    groups
}

impl Conv2d {
    /// Fuses this layer and the following `bn`, in evaluation mode, into one layer.
    ///
    /// # Errors
    ///
    /// A norm without weight and bias, or with another number of channels.
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

impl ConvTranspose2d {
    /// Splits the channels into groups; candle-nn's configuration has no field for this.
    #[must_use]
    pub const fn with_groups(mut self, groups: usize) -> Self {
        self.groups = groups;
        self
    }
}

impl Module for Conv1d {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let Conv1dConfig { padding, stride, dilation, groups, .. } = self.config;
        let options = ConvOptions { stride, padding, dilation, groups };
        crate::conv1d(x, &self.weight, self.bias.as_ref(), options)
    }
}

impl Module for Conv2d {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let Conv2dConfig { padding, stride, dilation, groups, .. } = self.config;
        let options = ConvOptions { stride, padding, dilation, groups };
        crate::conv2d(x, &self.weight, self.bias.as_ref(), options)
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

impl Module for ConvTranspose2d {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let ConvTranspose2dConfig { padding, output_padding, stride, dilation } = self.config;
        let options =
            ConvTransposeOptions { stride, padding, output_padding, dilation, groups: self.groups };
        crate::conv_transpose2d(x, &self.weight, self.bias.as_ref(), options)
    }
}

/// Weight and bias of a convolution.
fn parameters(
    [in_channels, out_channels]: [usize; 2],
    kernel: &[usize],
    groups: usize,
    bias: bool,
    vb: &VarBuilder<'_>,
) -> Result<(Tensor, Option<Tensor>)> {
    check_groups(groups, [in_channels, out_channels])?;
    get([out_channels, in_channels / groups], kernel, bias.then_some(out_channels), vb)
}

/// Weight and bias of a transposed convolution.
fn transposed_parameters(
    [in_channels, out_channels]: [usize; 2],
    kernel: &[usize],
    groups: usize,
    bias: bool,
    vb: &VarBuilder<'_>,
) -> Result<(Tensor, Option<Tensor>)> {
    check_groups(groups, [in_channels, out_channels])?;
    get([in_channels, out_channels / groups], kernel, bias.then_some(out_channels), vb)
}

fn check_groups(groups: usize, channels: [usize; 2]) -> Result<()> {
    match groups > 0 && channels.iter().all(|channels| channels.is_multiple_of(groups)) {
        true => Ok(()),
        false => bail!("{groups} groups do not divide {channels:?} channels"),
    }
}

/// A weight `[channels..., kernel...]` and a bias. As in PyTorch, the fan-in is the product of all
/// dimensions but the first.
fn get(
    channels: [usize; 2],
    kernel: &[usize],
    bias: Option<usize>,
    vb: &VarBuilder<'_>,
) -> Result<(Tensor, Option<Tensor>)> {
    let shape = [&channels, kernel].concat();
    let init =
        within_fan_in(shape[1..].iter().fold(1, |len: usize, next| len.saturating_mul(*next)));
    let weight = parameter(shape, "weight", init, vb)?;
    Ok((weight, bias.map(|len| parameter(len, "bias", init, vb)).transpose()?))
}
