//! Layer normalization and RMS normalization over the last dimension.

use candle_core::{Module, Result, Tensor};
use candle_nn::VarBuilder;
pub use candle_nn::layer_norm::LayerNormConfig;

use super::norm_parameter;

/// Layer normalization over the last dimension: [`layer_norm`](crate::layer_norm) with a `weight`
/// and an optional `bias`; or RMS normalization, which does not subtract the mean.
#[derive(Clone, Debug)]
pub struct LayerNorm {
    weight: Tensor,
    bias: Option<Tensor>,
    remove_mean: bool,
    eps: f64,
}

impl LayerNorm {
    /// A layer with a weight and a bias, both `[c]`.
    pub const fn new(weight: Tensor, bias: Tensor, eps: f64) -> Self {
        Self { weight, bias: Some(bias), remove_mean: true, eps }
    }

    /// A layer without a bias.
    pub const fn new_no_bias(weight: Tensor, eps: f64) -> Self {
        Self { weight, bias: None, remove_mean: true, eps }
    }

    /// A layer that divides by the root mean square.
    pub const fn rms_norm(weight: Tensor, eps: f64) -> Self {
        Self { weight, bias: None, remove_mean: false, eps }
    }

    /// The weight.
    pub const fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// The bias.
    pub const fn bias(&self) -> Option<&Tensor> {
        self.bias.as_ref()
    }

    /// The number added to the variance, as `f32`.
    pub const fn eps(&self) -> f64 {
        self.eps
    }

    /// Whether the mean is subtracted.
    pub const fn remove_mean(&self) -> bool {
        self.remove_mean
    }
}

impl Module for LayerNorm {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let eps = self.eps as f32;
        let bias = match &self.bias {
            Some(bias) => bias.clone(),
            None => self.weight.zeros_like()?,
        };
        if self.remove_mean {
            return crate::layer_norm(x, &self.weight, &bias, eps);
        }
        let y = super::ops::rms_norm(x, &self.weight, eps)?;
        if self.bias.is_some() { crate::add(&y, &bias) } else { Ok(y) }
    }
}

/// RMS normalization over the last dimension, with a `weight`.
#[derive(Clone, Debug)]
pub struct RmsNorm(LayerNorm);

impl RmsNorm {
    /// A layer with a weight `[c]`.
    pub const fn new(weight: Tensor, eps: f64) -> Self {
        Self(LayerNorm::rms_norm(weight, eps))
    }

    /// Converts to a [`LayerNorm`].
    pub fn into_inner(self) -> LayerNorm {
        self.0
    }

    /// The weight.
    pub const fn weight(&self) -> &Tensor {
        self.0.weight()
    }

    /// The number added to the mean square, as `f32`.
    pub const fn eps(&self) -> f64 {
        self.0.eps()
    }

    /// The same as `forward`, which has no gradient in candle-nn.
    ///
    /// # Errors
    ///
    /// Errors of the operator.
    pub fn forward_diff(&self, xs: &Tensor) -> Result<Tensor> {
        self.forward(xs)
    }
}

impl Module for RmsNorm {
    fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        self.0.forward(xs)
    }
}

/// A layer that is initialized with a weight of 1 and a bias of 0. As in candle-nn, the old names
/// `gamma` and `beta` are used if the builder has them.
///
/// # Errors
///
/// Errors of the builder; a parameter larger than the memory.
pub fn layer_norm<C: Into<LayerNormConfig>>(
    size: usize,
    config: C,
    vb: VarBuilder<'_>,
) -> Result<LayerNorm> {
    let config = config.into();
    let get = |name, old, value| {
        let is_old = !vb.contains_tensor(name) && vb.contains_tensor(old);
        norm_parameter(size, if is_old { old } else { name }, value, &vb)
    };
    Ok(LayerNorm {
        weight: get("weight", "gamma", 1.0)?,
        bias: config.affine.then(|| get("bias", "beta", 0.0)).transpose()?,
        remove_mean: config.remove_mean,
        eps: config.eps,
    })
}

/// Like [`layer_norm`], without a bias.
///
/// # Errors
///
/// Errors of the builder; a parameter larger than the memory.
pub fn layer_norm_no_bias(size: usize, eps: f64, vb: VarBuilder<'_>) -> Result<LayerNorm> {
    layer_norm(size, LayerNormConfig { eps, remove_mean: true, affine: false }, vb)
}

/// An RMS norm that is initialized with a weight of 1.
///
/// # Errors
///
/// Errors of the builder; a parameter larger than the memory.
pub fn rms_norm(size: usize, eps: f64, vb: VarBuilder<'_>) -> Result<RmsNorm> {
    let config = LayerNormConfig { eps, remove_mean: false, affine: false };
    Ok(RmsNorm(layer_norm(size, config, vb)?))
}
