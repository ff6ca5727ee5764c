//! Operators with indices: embedding, scatter.

mod composed;
pub(crate) mod embedding;
pub(crate) mod scatter;
