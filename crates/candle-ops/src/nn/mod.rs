//! Layers based on [the operators](crate), with the names and constructors of candle-nn.
//!
//! To port a model with candle-nn's layers, change `candle_nn` to `candle_ops::nn` in its `use`
//! line: types, functions, configurations and parameter names are the same; gradients are correct,
//! and half precision, autocast and tapes are supported. The modules are the same as in candle-nn:
//! `nn::ops`, `nn::loss`, `nn::rotary_emb`, `nn::linear`. Items without an operator of this crate,
//! such as [`VarBuilder`] and [`AdamW`], are re-exported from candle-nn. Methods of `Tensor` that a
//! model calls itself stay candle's own: [`stock_candle`](crate::stock_candle) lists those to
//! replace.
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
//! # Differences to candle-nn
//!
//! * Initial values are those of PyTorch: weights and biases of linear and convolution layers are
//!   uniform within `1 / sqrt(fan_in)`; candle-nn's weights are normally distributed.
//! * `weight` and `bias` have the builder's dtype, except that norm layers have `f32` parameters if
//!   the builder's dtype is in half precision. The statistics of a [`BatchNorm`] are always `f32`.
//! * [`seeded`] is a [`VarBuilder`] whose initial values are drawn by seed and name: candle's own
//!   cannot be drawn again.
//! * Dropout uses the random numbers of the entered [`Context`](crate::Context), so a run resumes
//!   exactly; training with [`Dropout`] outside of a context is an error. The dropout of [`Lstm`],
//!   [`Gru`] and LoRA adapters, which have no argument `train`, has no effect there.
//! * `cudnn_fwd_algo` in the configurations of convolutions has no effect.
//! * `ops::sdpa` runs on every device; candle-nn's runs only on Metal. It does not support
//!   softcapping.
//! * candle-nn's `attention`, `cpu_flash_attention` and `moe` are missing: they have no backward
//!   pass.

pub mod activation;
pub mod batch_norm;
pub mod conv;
pub mod embedding;
pub mod generate;
pub mod group_norm;
pub mod instance_norm;
pub mod layer_norm;
pub mod linear;
pub mod llama;
mod llama_config;
pub mod lora;
pub mod loss;
pub mod ops;
mod parameter;
mod pretrained;
pub mod rnn;
pub mod rotary_emb;
pub mod sampling;
mod seeded;

use candle_core::{DType, Result, Tensor};
pub use candle_core::{Module, ModuleT};
pub use candle_nn::{
    AdamW, Func, FuncT, GRU, GRUConfig, Init, LSTM, LSTMConfig, Optimizer, PReLU, ParamsAdamW, RNN,
    SGD, Sequential, VarBuilder, VarMap, encoding, func, func_t, gru, init, kv_cache, lstm, optim,
    prelu, seq, sequential, var_builder, var_map,
};

pub use activation::Activation;
pub use batch_norm::{BatchNorm, BatchNormConfig, batch_norm};
pub use conv::{
    Conv1d, Conv1dConfig, Conv2d, Conv2dConfig, ConvTranspose1d, ConvTranspose1dConfig,
    ConvTranspose2d, ConvTranspose2dConfig, conv_transpose1d, conv_transpose1d_no_bias,
    conv_transpose2d, conv_transpose2d_no_bias, conv1d, conv1d_no_bias, conv2d, conv2d_no_bias,
};
pub use embedding::{Embedding, embedding};
pub use generate::GenerateOptions;
pub use group_norm::{GroupNorm, group_norm};
pub use instance_norm::{InstanceNorm, InstanceNormConfig, instance_norm};
pub use layer_norm::{
    LayerNorm, LayerNormConfig, RmsNorm, layer_norm, layer_norm_no_bias, rms_norm,
};
pub use linear::{Linear, linear, linear_b, linear_no_bias};
pub use llama::{Llama, LlamaCache};
pub use llama_config::{Llama3RopeScaling, LlamaConfig};
pub use lora::{LoraOptions, lora};
pub use ops::Dropout;
pub use parameter::check_size;
pub use pretrained::pretrained;
pub use rnn::{Gru, Lstm, LstmState, RnnConfig};
pub use seeded::{initial_values, seeded};

use self::parameter::parameter_of;

/// Indices in a type supported by the operators: `i64` and `u32` unchanged, other integers as
/// `i64`. Floats are unchanged, and the operators return an error.
fn indices(of: &Tensor) -> Result<Tensor> {
    match of.dtype() {
        DType::U8 | DType::I16 | DType::I32 => of.to_dtype(DType::I64),
        _ => Ok(of.clone()),
    }
}

/// PyTorch's default initialization of weights and biases: `kaiming_uniform` with `a = sqrt(5)`.
fn within_fan_in(fan_in: usize) -> Init {
    let bound = 1.0 / (fan_in as f64).sqrt();
    Init::Uniform { lo: -bound, up: bound }
}

/// A parameter of a norm layer: `f32`, because half precision would be too coarse, or `f64` in an
/// `f64` model.
fn norm_parameter(size: usize, name: &str, value: f64, vb: &VarBuilder<'_>) -> Result<Tensor> {
    let dtype = if vb.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
    parameter_of(dtype, size, name, Init::Const(value), vb)
}

#[cfg(test)]
mod tests;
