//! Fully connected layers.

use candle_core::{Module, Result, Tensor};
use candle_nn::VarBuilder;

use super::within_fan_in;

/// A fully connected layer: [`linear`](crate::linear) with a `weight` and an optional `bias`.
#[derive(Clone, Debug)]
pub struct Linear {
    weight: Tensor,
    bias: Option<Tensor>,
}

impl Linear {
    /// A layer of a weight `[outputs, inputs]` and a bias `[outputs]`.
    pub const fn new(weight: Tensor, bias: Option<Tensor>) -> Self {
        Self { weight, bias }
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

impl Module for Linear {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        crate::linear(x, &self.weight, self.bias.as_ref())
    }
}

/// A layer with a bias. Both tensors start uniform within `1 / sqrt(in_dim)`.
///
/// # Errors
///
/// Those of the builder.
pub fn linear(in_dim: usize, out_dim: usize, vb: VarBuilder<'_>) -> Result<Linear> {
    linear_b(in_dim, out_dim, true, vb)
}

/// As [`linear`], without a bias.
///
/// # Errors
///
/// Those of the builder.
pub fn linear_no_bias(in_dim: usize, out_dim: usize, vb: VarBuilder<'_>) -> Result<Linear> {
    linear_b(in_dim, out_dim, false, vb)
}

/// As [`linear`], with or without a bias.
///
/// # Errors
///
/// Those of the builder.
pub fn linear_b(in_dim: usize, out_dim: usize, bias: bool, vb: VarBuilder<'_>) -> Result<Linear> {
    let init = within_fan_in(in_dim);
    let weight = vb.get_with_hints((out_dim, in_dim), "weight", init)?;
    let bias = bias.then(|| vb.get_with_hints(out_dim, "bias", init)).transpose()?;
    Ok(Linear::new(weight, bias))
}
