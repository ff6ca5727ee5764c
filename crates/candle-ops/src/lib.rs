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
#[doc(hidden)]
pub mod autocast;
mod composed;
mod conv;
#[cfg(feature = "cuda")]
#[doc(hidden)]
pub mod cuda;
#[doc(hidden)]
pub mod dropout;
mod elementwise;
mod embedding;
#[cfg(feature = "cuda")]
#[doc(hidden)]
pub mod fields;
mod gelu;
mod gemm;
mod layer_norm;
pub mod layers;
mod limit;
mod linear;
mod loss;
mod norm;
mod operator;
mod pool;
mod real;
mod scatter;
#[doc(hidden)]
pub mod search;
mod simd;
mod softmax;
#[doc(hidden)]
pub mod tables;
mod weighted;
mod winograd;

pub use attention::{AttentionOptions, self_attention};
pub use autocast::{autocast, cast};
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

use self::real::Real;

/// ReLU of one value; NaN stays NaN.
#[inline]
fn relu_of<T: Real>(v: T) -> T {
    if v <= T::ZERO { T::ZERO } else { v }
}

/// Sum of a slice, in [`LANES`] partial sums, which the compiler keeps in vector registers.
fn sum<T: Real>(values: &[T]) -> T {
    sum_by(values, |v| v)
}

/// Sum of `f` over a slice, as [`sum`].
#[inline]
fn sum_by<T: Real>(values: &[T], f: impl Fn(T) -> T) -> T {
    let (chunks, rest) = values.as_chunks::<LANES>();
    let mut lanes = [T::ZERO; LANES];
    for chunk in chunks {
        for (lane, v) in lanes.iter_mut().zip(chunk) {
            *lane += f(*v);
        }
    }
    lanes.into_iter().sum::<T>() + rest.iter().map(|v| f(*v)).sum::<T>()
}

/// Sum of `a * (b - center)`, as [`sum`].
fn dot_centered<T: Real>(a: &[T], b: &[T], center: T) -> T {
    let (a_chunks, a_rest) = a.as_chunks::<LANES>();
    let (b_chunks, b_rest) = b.as_chunks::<LANES>();
    let mut lanes = [T::ZERO; LANES];
    for (a, b) in a_chunks.iter().zip(b_chunks) {
        for ((lane, a), b) in lanes.iter_mut().zip(a).zip(b) {
            *lane += *a * (*b - center);
        }
    }
    let rest: T = a_rest.iter().zip(b_rest).map(|(a, b)| *a * (*b - center)).sum();
    lanes.into_iter().sum::<T>() + rest
}

/// Partial sums of a reduction.
const LANES: usize = 16;

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
