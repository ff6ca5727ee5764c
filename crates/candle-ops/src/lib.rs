//! Operators and layers for [candle](candle_core) with correct gradients, which train on the CPU at
//! the speed of PyTorch.
//!
//! candle provides automatic differentiation. Its own operators for training are slow on the CPU;
//! some have no backward pass, some a wrong one, and some no half precision. This crate replaces
//! those that image models and transformers need, for `f32`, `f16`, `bf16` and `f64`, on the CPU
//! and, with the feature `cuda`, on a GPU. The operators work on candle's tensors, and can be
//! combined with its operators, its layers and any optimizer.
//!
//! ```
//! use candle_core::{DType, Device, Module, Tensor};
//! use candle_ops::nn::{AdamW, Conv2dConfig, Optimizer, VarBuilder, VarMap, conv2d, linear};
//! use candle_ops::{Context, cross_entropy, dropout, global_avg_pool, relu};
//!
//! let vars = VarMap::new();
//! let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
//! let conv = conv2d(1, 8, 3, Conv2dConfig::default(), vb.pp("conv"))?;
//! let fc = linear(8, 10, vb.pp("fc"))?;
//! let forward = |images: &Tensor| {
//!     fc.forward(&dropout(&global_avg_pool(&relu(&conv.forward(images)?)?)?, 0.1)?)
//! };
//!
//! let mut adamw = AdamW::new_lr(vars.all_vars(), 1e-3)?;
//! let mut context = Context::new(0); // dropout's seed
//! let images = Tensor::randn(0f32, 1.0, (4, 1, 12, 12), &Device::Cpu)?;
//! let labels = Tensor::new(&[3_i64, 1, 4, 1], &Device::Cpu)?;
//! context.enter(|| adamw.backward_step(&cross_entropy(&forward(&images)?, &labels)?))?;
//! assert_eq!(context.evaluate(|| forward(&images))?.dims(), [4, 10]);
//! # Ok::<(), candle_core::Error>(())
//! ```
//!
//! # Overview
//!
//! * This page: the operators, as functions of tensors. The documentation of each has its shapes,
//!   its rounding, and its handling of NaN.
//! * [`nn`]: layers with the names and constructors of candle-nn: they are ported by changing a
//!   `use` line. Methods of `Tensor` stay candle's own: replace those listed in [`stock_candle`].
//! * [`Context`]: random numbers for dropout, autocast, autotuning and CUDA kernels, in one value
//!   that is entered for a pass.
//! * [`record()`]: a tape of the operators, with a faster backward pass than candle's; [`Sources`].
//! * [`autocast()`]: runs each operator in a suitable precision.
//! * [`stock_candle`]: candle's own operators with a wrong gradient or value, and replacements.
//! * [`allow_tf32`]: TF32 on a GPU.
//! * `cuda` (feature `cuda`): fused kernels.
//! * [`known_inputs`]: inputs on a GPU with values known on the host.
//!
//! # Computation
//!
//! On the CPU an operator is a loop over slices. `f32` and half-precision tensors are computed and
//! accumulated in `f32`; half-precision values are widened exactly on input and rounded once, to
//! nearest even, on output. `f64` tensors are computed in `f64`, by the same formulas, so that
//! their gradients can be tested. A gradient is computed in the dtype of its tensor. All operators
//! run on the calling thread, and are bitwise deterministic for given shapes on a processor.
//!
//! On a GPU the same functions are compositions of candle's own operators, or, in a [`Context`]
//! with kernels, CUDA kernels.
//!
//! Under autocast an operator first casts its inputs by PyTorch's lists, with PyTorch's name for
//! it: `conv2d`, `conv3d`, `conv_transpose2d`, `group_norm`, `linear`,
//! `scaled_dot_product_attention`, `lstm_cell`, `gru_cell`, `cross_entropy_loss`, `layer_norm`,
//! `ctc_loss`, `rms_norm`, `softmax`, `log_softmax`, `sum`, `upsample_nearest2d`,
//! `upsample_bilinear2d`. In no list, but available for custom rules, are `instance_norm`, `mean`,
//! `batch_norm`, `mul`, `gather`, `pad`, `avg_pool2d`, `embedding`, `gelu`, `silu` (also for
//! `swiglu`), `tanh`, `sigmoid`, `gelu_tanh`, `leaky_relu`, `elu`, `mish`, `hard_swish`, `relu6`,
//! `rope`, `relu`, `add`, `max_pool2d`, `adaptive_avg_pool2d`, `adaptive_max_pool2d`.

mod activation;
mod attention;
mod autocast;
mod conv;
mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
mod elementwise;
mod error;
mod graph;
mod image;
mod index;
mod kernels;
mod linear;
mod loss;
pub mod nn;
mod norm;
mod recurrent;
mod sizes;
mod state;
#[doc = include_str!("stock_candle.md")]
pub mod stock_candle {}

pub use activation::gelu::gelu;
pub use activation::log_softmax::log_softmax;
pub use activation::scalar::{elu, gelu_tanh, hard_swish, leaky_relu, mish, relu6, sigmoid, tanh};
pub use activation::silu::{silu, swiglu};
pub use activation::softmax::softmax;
pub use attention::rope::{rope, rope_i, rope_thd};
pub use attention::{
    AttentionOptions, SdpaOptions, scaled_dot_product_attention, scaled_dot_product_attention_thd,
    self_attention,
};
pub use autocast::{autocast, cast, check_dtype, lowered_operators, mixed_types_advice};
pub use conv::conv3d::conv3d;
pub use conv::transpose::{ConvTransposeOptions, conv_transpose1d, conv_transpose2d, conv1d};
pub use conv::{ConvOptions, conv2d};
pub use elementwise::composed::{cat, mean, mean_keepdim, mul, sum, sum_keepdim};
pub use elementwise::dropout::dropout;
pub use elementwise::random::{gumbel_softmax, rand, randn};
pub use elementwise::{Normalization, add, add_relu, normalize, relu};
pub use error::Error;
pub use graph::tape::{Sources, Tape, record};
pub use image::avg_pool::{adaptive_avg_pool2d, avg_pool2d};
pub use image::pool::{adaptive_max_pool2d, global_avg_pool, max_pool2d};
pub use image::upsample::{
    pixel_shuffle, pixel_unshuffle, upsample_bilinear2d, upsample_nearest2d,
};
pub use index::embedding::{embedding, embedding_with_padding};
pub use index::scatter::{scatter, scatter_add};
pub use index::take::{PadMode, gather, pad};
pub use linear::linear;
pub use loss::ctc::{CtcLossOptions, Reduction, ctc_loss};
pub use loss::{CrossEntropyOptions, cross_entropy, cross_entropy_with};
pub use norm::batch_norm::{batch_norm, batch_norm_with};
pub use norm::group_norm::group_norm;
pub use norm::instance_norm::instance_norm;
pub use norm::layer_norm::layer_norm;
pub use norm::rms_norm::rms_norm;
pub use sizes::{BatchNormOptions, Statistics, Window};
pub use state::autotune::AutotuneSummary;
pub use state::context;
pub use state::context::Context;
pub use state::known_inputs;
pub use state::precision::{allow_tf32, allows_tf32};

/// Tests the examples of the README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

#[cfg(test)]
use graph::device::tests::composed;

#[cfg(test)]
mod tests;
