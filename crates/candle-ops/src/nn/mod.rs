//! Layers over [the operators](crate) by candle-nn's names and constructors.
//!
//! A model of candle-nn's layers is moved over by its `use` line, `candle_nn` becoming `candle_ops::nn`: types, functions,
//! configurations and names of parameters are the same, gradients are right, and half precision, autocast and tapes work.
//! Modules are candle-nn's as well: `nn::ops`, `nn::loss`, `nn::rotary_emb`, `nn::linear`. What needs nothing of ours, such
//! as [`VarBuilder`] and [`AdamW`], is candle-nn's own.
//!
//! ```
//! use candle_core::{DType, Device, Result, Tensor};
//! use candle_ops::nn::{LayerNorm, Linear, Module, VarBuilder, VarMap, layer_norm, linear};
//!
//! struct Head {
//!     norm: LayerNorm,
//!     out: Linear,
//! }
//!
//! impl Head {
//!     fn new(vb: VarBuilder<'_>) -> Result<Self> {
//!         Ok(Self { norm: layer_norm(8, 1e-5, vb.pp("norm"))?, out: linear(8, 3, vb.pp("out"))? })
//!     }
//! }
//!
//! impl Module for Head {
//!     fn forward(&self, x: &Tensor) -> Result<Tensor> {
//!         self.out.forward(&self.norm.forward(x)?)
//!     }
//! }
//!
//! let vars = VarMap::new();
//! let head = Head::new(VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu))?;
//! let loss = head.forward(&Tensor::randn(0f32, 1.0, (2, 8), &Device::Cpu)?)?.sqr()?.mean_all()?;
//! let gradients = loss.backward()?;
//! assert!(vars.all_vars().iter().all(|var| gradients.get(var).is_some()));
//! # Ok::<(), candle_core::Error>(())
//! ```
//!
//! # What differs from candle-nn
//!
//! * Initial values are PyTorch's: weights and biases of linear and convolution layers start uniform within
//!   `1 / sqrt(fan_in)`, where candle-nn's weights start normal.
//! * `weight` and `bias` have the builder's dtype, except in norm layers: beside half parameters those are `f32`, and so
//!   are a [`BatchNorm`]'s statistics always.
//! * Dropout draws from the entered [`Context`](crate::Context), so a run resumes exactly; it is an error to train with
//!   it outside of one.
//! * `cudnn_fwd_algo` of the configurations of convolutions has no effect.
//! * `ops::sdpa` runs everywhere, where candle-nn's does on Metal alone; it knows no softcapping.
//! * candle-nn's `attention`, `cpu_flash_attention` and `moe` are not here: they have no backward.

pub mod activation;
pub mod batch_norm;
pub mod conv;
pub mod embedding;
pub mod group_norm;
pub mod layer_norm;
pub mod linear;
pub mod lora;
pub mod loss;
pub mod ops;
pub mod rotary_emb;

use candle_core::{DType, Result, Tensor};
pub use candle_core::{Module, ModuleT};
pub use candle_nn::{
    AdamW, Func, FuncT, GRU, GRUConfig, Init, LSTM, LSTMConfig, Optimizer, PReLU, ParamsAdamW, RNN,
    SGD, Sequential, VarBuilder, VarMap, encoding, func, func_t, gru, init, kv_cache, lstm, optim,
    prelu, rnn, sampling, seq, sequential, var_builder, var_map,
};

pub use activation::Activation;
pub use batch_norm::{BatchNorm, BatchNormConfig, batch_norm};
pub use conv::{
    Conv1d, Conv1dConfig, Conv2d, Conv2dConfig, ConvTranspose1d, ConvTranspose1dConfig,
    ConvTranspose2d, ConvTranspose2dConfig, conv_transpose1d, conv_transpose1d_no_bias,
    conv_transpose2d, conv_transpose2d_no_bias, conv1d, conv1d_no_bias, conv2d, conv2d_no_bias,
};
pub use embedding::{Embedding, embedding};
pub use group_norm::{GroupNorm, group_norm};
pub use layer_norm::{
    LayerNorm, LayerNormConfig, RmsNorm, layer_norm, layer_norm_no_bias, rms_norm,
};
pub use linear::{Linear, linear, linear_b, linear_no_bias};
pub use lora::{LoraOptions, lora};
pub use ops::Dropout;

/// Indices in a type that the operators take: `i64` and `u32` as they are, other integers as `i64`. Floats are left to be refused.
fn indices(of: &Tensor) -> Result<Tensor> {
    match of.dtype() {
        DType::U8 | DType::I16 | DType::I32 => of.to_dtype(DType::I64),
        _ => Ok(of.clone()),
    }
}

/// PyTorch's default for weights and biases: `kaiming_uniform` with `a = sqrt(5)`.
fn within_fan_in(fan_in: usize) -> Init {
    let bound = 1.0 / (fan_in as f64).sqrt();
    Init::Uniform { lo: -bound, up: bound }
}

/// A parameter of a norm layer: `f32`, so that half precision keeps its statistics, or `f64` beside `f64` ones.
fn norm_parameter(size: usize, name: &str, value: f64, vb: &VarBuilder<'_>) -> Result<Tensor> {
    let dtype = if vb.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
    vb.get_with_hints_dtype(size, name, Init::Const(value), dtype)
}

#[cfg(test)]
mod tests;
