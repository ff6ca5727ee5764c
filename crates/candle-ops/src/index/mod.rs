//! Operators with indices: embedding, scatter, gather, padding.

mod dispatch;
pub(crate) mod embedding;
pub(crate) mod scatter;
pub(crate) mod take;
