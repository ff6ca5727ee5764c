//! Operators with indices: embedding, scatter.

mod dispatch;
pub(crate) mod embedding;
pub(crate) mod scatter;
