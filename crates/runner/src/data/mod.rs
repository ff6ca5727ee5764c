//! Batches for the model: named host arrays, data sets that make them, samplers that choose samples.

mod array;
mod dataset;
mod loader;

pub use array::{Array, ArrayData, Batch};
pub use dataset::{DATASETS, Dataset, DatasetFactory};
pub use loader::{DataLoader, IterScale, Layout};
pub use train_data::DefaultSampler;
