//! What a model is fed: named host arrays, data sets that make them, samplers that choose.

mod array;
mod builtin;
pub mod datasets;
mod loader;
mod sampler;

pub use array::{Array, ArrayData, Batch};
pub(crate) use builtin::BUILTIN;
pub use builtin::DatasetFactory;
pub use datasets::{Dataset, Digits, FashionMnist, Split};
pub use loader::DataLoader;
pub use sampler::DefaultSampler;
