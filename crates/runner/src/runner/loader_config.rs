//! `DataLoaderConfig`: a data set and how to cut it into batches.

use std::sync::Arc;

use collective::ProcessGroup;

use crate::Result;
use crate::data::{Collate, DataLoader, Dataset, DatasetFactory, DefaultSampler, Workers};

/// A data set and how to cut it into batches.
pub struct DataLoaderConfig {
    /// Makes the data set.
    pub dataset: DatasetFactory,
    /// Samples per batch and rank.
    pub batch_size: usize,
    /// A new order every epoch.
    pub shuffle: bool,
    /// Leave out a last batch that is smaller than the others.
    pub drop_last: bool,
    /// MMEngine's `InfiniteSampler`, for a run by iterations: epochs have no end.
    pub infinite: bool,
    /// As many samples for every rank, some of them twice if they do not divide. Training needs it; a
    /// validation counts each sample once either way.
    pub round_up: bool,
    /// Threads that load batches ahead of time. Neither the batches nor their order depend on them.
    pub workers: Workers,
    /// Makes batches of samples instead of the data set's own [`batch`](Dataset::batch).
    pub collate: Option<Collate>,
}

impl DataLoaderConfig {
    /// A data set in its own order, to the last sample.
    #[must_use]
    pub fn new(dataset: impl Dataset + 'static, batch_size: usize) -> Self {
        let dataset: DatasetFactory = Box::new(move || Ok(Arc::new(dataset)));
        Self {
            dataset,
            batch_size,
            shuffle: false,
            drop_last: false,
            infinite: false,
            round_up: true,
            workers: Workers::new(0),
            collate: None,
        }
    }

    /// In a new order every epoch.
    #[must_use]
    pub fn shuffled(self) -> Self {
        Self { shuffle: true, ..self }
    }

    /// With threads that load batches ahead of time.
    #[doc(alias("num_workers", "prefetch_factor", "persistent_workers"))]
    #[must_use]
    pub fn workers(self, workers: Workers) -> Self {
        Self { workers, ..self }
    }

    /// Makes the data set, of which this rank of `group` gets its share.
    pub(super) fn make(self, group: &ProcessGroup, seed: u64) -> Result<DataLoader> {
        let dataset = (self.dataset)()?;
        let sampler = DefaultSampler {
            len: dataset.len(),
            shuffle: self.shuffle,
            seed,
            rank: group.rank(),
            world_size: group.world_size(),
            round_up: self.round_up,
        };
        let loader = DataLoader::new(dataset, sampler, self.batch_size, self.drop_last)?;
        let mut loader = loader.workers(self.workers);
        if let Some(collate) = self.collate {
            loader = loader.collate(move |samples| collate(samples));
        }
        Ok(if self.infinite { loader.infinite() } else { loader })
    }
}

impl std::fmt::Debug for DataLoaderConfig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DataLoaderConfig")
            .field("batch_size", &self.batch_size)
            .field("shuffle", &self.shuffle)
            .field("workers", &self.workers)
            .finish_non_exhaustive()
    }
}
