//! Operators by index: embedding, scatter.

mod composed;
pub(crate) mod embedding;
pub(crate) mod scatter;
