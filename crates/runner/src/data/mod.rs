//! What a model is fed: named host arrays, data sets that make them, samplers that choose.

mod array;
pub mod datasets;

pub use array::{Array, ArrayData, Batch};
