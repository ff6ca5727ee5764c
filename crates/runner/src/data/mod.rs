//! Batches for the model: the types of [`train_data`], and the data sets that a configuration can name.

use std::sync::Arc;

pub use train_data::{
    Array, ArrayData, Batch, BoxError, DataLoader, Dataset, DefaultSampler, Draw, IterScale,
    Layout, Sample, SampleRng,
};

use crate::Result;
use crate::registry::Registry;

/// The data sets a configuration can name, `[train_dataloader.dataset]`: those that the program registers.
pub static DATASETS: Registry<DatasetFactory> = Registry::new("data set");

/// Makes a data set; reading files is left until the whole configuration is known to be right.
pub type DatasetFactory = Box<dyn FnOnce() -> Result<Arc<dyn Dataset>> + Send>;
