//! Which samples each rank of a training job sees, in which order, and which batches end in a step.
//!
//! [`DefaultSampler`] deals one permutation of the data set per epoch to the ranks. [`Accumulation`] counts batches
//! towards the next step. Neither knows loops or tensors.

mod accumulation;
mod sampler;

pub use accumulation::{Accumulation, BatchRole};
pub use sampler::DefaultSampler;
