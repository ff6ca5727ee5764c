//! Operators and layers for candle with a backward, for `f32`, `f16`, `bf16` and `f64`.
//!
//! candle brings automatic differentiation; its own CPU operators for training are slow, some have
//! no backward, and some no half. These replace the ones that image models and transformers need. Each is a
//! kernel over slices (`real.rs`), of which `operator.rs` makes one of candle's: `f32` and half tensors are
//! computed and accumulated in `f32`, half ones widened exactly on the way in and rounded once, to nearest
//! even, on the way out; `f64` ones in `f64`, by the same formulas, which is how their gradients are checked.
//!
//! Inside a region of [`autocast`] each first has its inputs cast as PyTorch's lists say, under
//! PyTorch's name for it: `conv2d`, `linear`, `scaled_dot_product_attention`, `cross_entropy_loss`,
//! `layer_norm`, `softmax`; and, in no list but open to rules of one's own, `batch_norm`, `embedding`,
//! `gelu`, `relu`, `add`, `max_pool2d`, `adaptive_avg_pool2d`.
//!
//! All run on the calling thread: a rank has one core. All are deterministic for given shapes and
//! processor. A gradient is computed in the dtype of the tensor it belongs to.
//!
//! Of tensors in a device's memory the same operators are compositions of candle's own, and run there;
//! `composed.rs` says in what their results differ. Where an engine on a GPU is told to `compile`, some are kernels
//! of our own (`cuda/`).

mod attention;
mod autocast;
mod autotune;
mod composed;
mod constants;
pub mod context;
mod conv;
#[cfg(feature = "cuda")]
pub mod cuda;
mod dropout;
mod elementwise;
mod embedding;
mod gelu;
mod gemm;
mod index_range;
#[cfg(feature = "cuda")]
pub mod known_inputs;
mod layer_norm;
pub mod layers;
mod linear;
mod loss;
mod norm;
mod operator;
mod pool;
mod real;
mod scatter;
mod simd;
mod softmax;
mod sums;
mod weighted;
mod winograd;

pub use attention::{AttentionOptions, self_attention};
pub use autocast::{autocast, cast, lowered_operators};
pub use autotune::AutotuneSummary;
pub use context::Context;
pub use conv::{Window, conv2d};
pub use dropout::dropout;
pub use elementwise::{Normalization, add, add_relu, normalize, relu};
pub use embedding::embedding;
pub use gelu::gelu;
pub use layer_norm::layer_norm;
pub use linear::linear;
pub use loss::cross_entropy;
pub use norm::{BatchNormOptions, Statistics, batch_norm, batch_norm_with};
pub use pool::{global_avg_pool, max_pool2d};
pub use scatter::{scatter, scatter_add};
pub use softmax::softmax;

#[cfg(test)]
use composed::tests::composed;

#[cfg(test)]
mod autocast_tests;
#[cfg(test)]
mod composed_tests;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod transformer_tests;
