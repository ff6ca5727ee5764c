//! `Dataset`: a number of samples, and batches of any of them.
//!
//! Which samples, in which order and on which rank, is a sampler's business.

use std::sync::Arc;

use super::Batch;
use crate::Result;
use crate::registry::Registry;

/// A finite, indexed set of samples.
pub trait Dataset: Send + Sync {
    /// What it is called, for logs; its type's name unless it has another.
    fn name(&self) -> &str {
        std::any::type_name::<Self>()
    }

    /// Number of samples.
    fn len(&self) -> usize;

    /// Makes a batch of the samples `indices`, in this order.
    ///
    /// # Errors
    ///
    /// [`Error::Data`](crate::Error::Data) if an index is not below [`len`](Self::len), or a sample cannot be read.
    fn batch(&self, indices: &[usize]) -> Result<Batch>;

    /// True if there is no sample.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The data sets a configuration can name, `[train_dataloader.dataset]`: those that the program registers.
pub static DATASETS: Registry<DatasetFactory> = Registry::new("data set");

/// Makes a data set; reading files is left until the whole configuration is known to be right.
pub type DatasetFactory = Box<dyn FnOnce() -> Result<Arc<dyn Dataset>> + Send>;
