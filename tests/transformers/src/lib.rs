//! candle-transformers' BERT and Llama moved over to `candle_ops::nn` by replacing `candle_nn` in
//! their files.
//!
//! `build.rs` takes the files from the dependency, so nothing of them is kept here. Llama computes
//! attention in `f32` whatever its type: here it is [`WIDE`], so that gradients can be checked in
//! `f64`.

#![expect(missing_docs, clippy::all, reason = "the models are candle-transformers' files")]
#![allow(dead_code, elided_lifetimes_in_paths, unexpected_cfgs, reason = "as above")]

/// The type of Llama's attention.
pub const WIDE: candle::DType = candle::DType::F64;
type Wide = f64;

macro_rules! moved {
    ($($name:ident),*) => {
        $(pub mod $name {
            include!(concat!(env!("OUT_DIR"), "/", stringify!($name), ".rs"));
        })*
    };
}

moved!(bert, llama, with_tracing);
