//! `DataLoaderBuilder`: the options of a loader, and their checks.

use std::sync::Arc;

use super::DataLoader;
use crate::{Batch, BoxError, Dataset, DefaultSampler, Error, Result, Sample, Workers};

/// Options of a [`DataLoader`].
#[derive(Clone, Debug)]
#[must_use = "a loader is made by `build`"]
pub struct DataLoaderBuilder(pub(super) DataLoader);

/// Maximum number of samples in an iteration, so that products of sizes and counts do not overflow.
pub(super) const MOST_SAMPLES: usize = 1 << 31;

impl DataLoaderBuilder {
    /// Samples per batch and rank; 1 by default.
    pub fn batch_size(mut self, batch_size: usize) -> Self {
        self.0.batch_size = batch_size;
        self
    }

    /// Drops a last batch that is smaller than the others.
    pub fn drop_last(mut self) -> Self {
        self.0.drop_last = true;
        self
    }

    /// Uses MMEngine's `InfiniteSampler`: batches are taken from consecutive permutations, so that
    /// all have the same size, and epochs have no end.
    pub fn infinite(mut self) -> Self {
        self.0.infinite = true;
        self
    }

    /// Loads batches ahead of time on worker threads; by default they load on the calling thread.
    /// Batches and their order do not depend on it. At most `num_workers * prefetch_factor` batches
    /// are prefetched.
    ///
    /// An error of a batch, including a panic, is returned in its turn, after the batches before
    /// it. Dropping the iterator ends the loading, see [`Workers`].
    #[doc(alias("num_workers", "prefetch_factor", "persistent_workers", "timeout"))]
    pub fn workers(mut self, workers: Workers) -> Self {
        self.0.workers = workers;
        self
    }

    /// Collates samples with `collate` instead of the data set's [`batch`](Dataset::batch).
    #[doc(alias = "collate_fn")]
    pub fn collate<F>(mut self, collate: F) -> Self
    where
        F: Fn(Vec<Sample>) -> Result<Batch, BoxError> + Send + Sync + 'static,
    {
        self.0.collate = Some(Arc::new(collate));
        self
    }

    /// Creates the loader.
    ///
    /// # Errors
    ///
    /// [`Error::Options`] if the batch size is zero or far too large, if the sampler has another
    /// length or a rank not below the world size, or if there would be no batch.
    pub fn build(self) -> Result<DataLoader> {
        let loader = self.0;
        let DefaultSampler { len, rank, world_size, .. } = loader.sampler;
        let batch_size = loader.batch_size;
        if batch_size == 0 {
            return Err(Error::Options("batch_size must be at least 1".into()));
        }
        if rank >= world_size {
            let text = format!("`rank` must be below `world_size`, got {rank} of {world_size}");
            return Err(Error::Options(text));
        }
        if batch_size.checked_mul(world_size).is_none_or(|samples| samples > MOST_SAMPLES) {
            return Err(Error::Options(format!(
                "batch_size is {batch_size}, on {world_size} ranks: an iteration has at most {MOST_SAMPLES} samples"
            )));
        }
        let (name, has) = (loader.dataset.name(), loader.dataset.len());
        if len != has {
            let text = format!("data set `{name}` has {has} samples, its sampler {len}");
            return Err(Error::Options(text));
        }
        // Without rounding up, a rank may have no batch.
        if loader.batches_of(DefaultSampler { round_up: true, ..loader.sampler }, len) == 0 {
            return Err(Error::Options(format!(
                "data set `{name}` gives no batch of {batch_size} to each of {world_size} ranks: it has {len} samples"
            )));
        }
        Ok(loader)
    }
}
