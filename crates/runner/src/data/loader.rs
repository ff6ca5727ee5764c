//! Batches of a data set, in a sampler's order.

use std::sync::Arc;

use super::{Batch, Dataset, DefaultSampler};
use crate::{Error, Result};

/// Cuts a sampler's indices into batches and asks the data set for each.
#[derive(Clone)]
pub struct DataLoader {
    dataset: Arc<dyn Dataset>,
    sampler: DefaultSampler,
    batch_size: usize,
    drop_last: bool,
}

impl std::fmt::Debug for DataLoader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DataLoader")
            .field("dataset", &self.dataset.name())
            .field("sampler", &self.sampler)
            .field("batch_size", &self.batch_size)
            .finish_non_exhaustive()
    }
}

impl DataLoader {
    /// Joins a data set and a sampler. `batch_size` is per rank; with `drop_last` a smaller last
    /// batch is left out.
    ///
    /// # Errors
    ///
    /// [`Error::Data`] if the batch size is zero, or if not a single batch would come out.
    pub fn new(
        dataset: Arc<dyn Dataset>,
        sampler: DefaultSampler,
        batch_size: usize,
        drop_last: bool,
    ) -> Result<Self> {
        if batch_size == 0 {
            return Err(Error::Data("batch_size must be at least 1".into()));
        }
        let loader = Self { dataset, sampler, batch_size, drop_last };
        if loader.batches_per_epoch() == 0 {
            return Err(Error::Data(format!(
                "data set `{}` gives no batch of {batch_size} to each of {} ranks: it has {} samples",
                loader.dataset.name(),
                sampler.world_size,
                sampler.len
            )));
        }
        Ok(loader)
    }

    /// Number of batches in an epoch, the same on every rank.
    #[must_use]
    pub fn batches_per_epoch(&self) -> usize {
        let samples = if self.sampler.len == 0 { 0 } else { self.sampler.samples_per_rank() };
        if self.drop_last { samples / self.batch_size } else { samples.div_ceil(self.batch_size) }
    }

    /// Number of samples in the data set, over all ranks.
    #[must_use]
    pub fn dataset_len(&self) -> usize {
        self.dataset.len()
    }

    /// Deals the samples as with another seed from now on.
    pub(crate) fn set_seed(&mut self, seed: u64) {
        self.sampler.seed = seed;
    }

    /// The batches of `epoch` from batch `start` on. Skipped batches are not loaded.
    pub fn batches(
        &self,
        epoch: usize,
        start: usize,
    ) -> impl Iterator<Item = Result<Batch>> + 'static {
        let indices = self.sampler.indices(epoch);
        let (dataset, size) = (Arc::clone(&self.dataset), self.batch_size);
        (start..self.batches_per_epoch()).map(move |k| {
            let end = indices.len().min((k + 1) * size);
            dataset.batch(&indices[k * size..end])
        })
    }
}
