//! Samples from distributions.

pub use crate::gumbel_softmax;
