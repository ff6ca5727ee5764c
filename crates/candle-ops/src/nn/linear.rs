//! Fully connected layers.

use candle_core::{Module, Result, Tensor};
use candle_nn::{Init, VarBuilder};

use super::lora::{self, Adapter};
use super::parameter::parameter;
use super::within_fan_in;

/// A fully connected layer: [`linear`](crate::linear) with a `weight` and an optional `bias`;
/// within [`lora`](lora::lora) also with an adapter.
#[derive(Clone, Debug)]
pub struct Linear {
    weight: Tensor,
    bias: Option<Tensor>,
    adapter: Option<Adapter>,
}

impl Linear {
    /// A layer with a weight `[outputs, inputs]` and a bias `[outputs]`.
    pub const fn new(weight: Tensor, bias: Option<Tensor>) -> Self {
        Self { weight, bias, adapter: None }
    }

    /// Merges the adapter, if any, into the weight.
    ///
    /// # Errors
    ///
    /// Out of memory.
    pub fn merged(&self) -> Result<Self> {
        match &self.adapter {
            Some(adapter) => Ok(Self::new(adapter.merge(&self.weight)?, self.bias.clone())),
            None => Ok(self.clone()),
        }
    }

    /// The weight; of a layer with an adapter the base alone, from which [`merged`](Self::merged)
    /// differs: another layer that uses it does not have the adapter's change.
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
        let y = crate::linear(x, &self.weight, self.bias.as_ref())?;
        match &self.adapter {
            Some(adapter) => adapter.add_to(&y, x),
            None => Ok(y),
        }
    }
}

/// A layer with a bias. Both tensors are initialized uniformly within `1 / sqrt(in_dim)`.
///
/// # Errors
///
/// Errors of the builder; a parameter larger than the memory.
pub fn linear(in_dim: usize, out_dim: usize, vb: VarBuilder<'_>) -> Result<Linear> {
    linear_b(in_dim, out_dim, true, vb)
}

/// Like [`linear`], without a bias.
///
/// # Errors
///
/// Errors of the builder; a parameter larger than the memory.
pub fn linear_no_bias(in_dim: usize, out_dim: usize, vb: VarBuilder<'_>) -> Result<Linear> {
    linear_b(in_dim, out_dim, false, vb)
}

/// Like [`linear`], with or without a bias.
///
/// # Errors
///
/// Errors of the builder; a parameter larger than the memory.
pub fn linear_b(in_dim: usize, out_dim: usize, bias: bool, vb: VarBuilder<'_>) -> Result<Linear> {
    linear_init(in_dim, out_dim, bias, [within_fan_in(in_dim); 2], vb)
}

/// Like [`linear_b`], with other initial values of weight and bias.
pub(super) fn linear_init(
    in_dim: usize,
    out_dim: usize,
    bias: bool,
    [init, bias_init]: [Init; 2],
    vb: VarBuilder<'_>,
) -> Result<Linear> {
    let own = || {
        let weight = parameter((out_dim, in_dim), "weight", init, &vb)?;
        Ok((weight, bias.then(|| parameter(out_dim, "bias", bias_init, &vb)).transpose()?))
    };
    let ((weight, bias), adapter) = lora::build((in_dim, out_dim), &vb, own)?;
    if adapter.is_none() {
        return Ok(Linear::new(weight, bias));
    }
    // Detached, because its tensors may belong to a `VarMap` but must have no gradient.
    Ok(Linear { weight: weight.detach(), bias: bias.map(|bias| bias.detach()), adapter })
}
