//! `DataLoaderConfig`: a data set and the options of its loader.

use std::sync::Arc;

use collective::ProcessGroup;

use crate::config::{Section, unknown};
use crate::data::{
    BoxError, Collate, DATASETS, DataLoader, Dataset, DatasetFactory, DefaultSampler, STREAMS,
    Sample, SampleRng, Steps, StreamFactory, StreamLoader, StreamOptions, Workers,
};
use crate::{Error, Result};

/// A data set and the options of its loader.
pub struct DataLoaderConfig {
    /// Creates the data set.
    pub dataset: DatasetFactory,
    /// Samples per batch and rank.
    pub batch_size: usize,
    /// Whether every epoch has a new order. Streams are shuffled by `shuffle_buffer` of their
    /// options instead.
    pub shuffle: bool,
    /// Whether to drop a last batch that is smaller than the others.
    pub drop_last: bool,
    /// Whether epochs have no end, for a run by iterations: MMEngine's `InfiniteSampler`.
    pub infinite: bool,
    /// Whether all ranks get the same number of samples, some of them twice if necessary. Required
    /// in training; validations count each sample once in any case.
    pub round_up: bool,
    /// Threads that load batches ahead of time. Batches and their order do not depend on them.
    pub workers: Workers,
    /// Collates samples to batches instead of the data set's own [`batch`](Dataset::batch).
    pub collate: Option<Collate>,
    /// Creates the stream whose samples are used instead of the data set's.
    pub stream: Option<StreamFactory>,
}

impl DataLoaderConfig {
    /// Loads a data set in its own order, including the last, smaller batch.
    #[must_use]
    pub fn new(dataset: impl Dataset + 'static, batch_size: usize) -> Self {
        Self::of(Box::new(move || Ok(Arc::new(dataset))), batch_size)
    }

    /// Reads a data set or stream named in a configuration.
    pub(crate) fn read(mut section: Section, batch_size: usize) -> Result<Self> {
        let batch_size = batch_size.max(1);
        let place = section.offset_of("type");
        if section.text_of("type").is_some_and(|name| STREAMS.knows(name)) {
            let why = "batches of a stream are made by `collate_fn` of the loader";
            section.refuse("batch_augments", why)?;
        }
        let steps = Steps::read(&mut section)?;
        match section.text_of("type") {
            Some(name) if STREAMS.knows(name) => {
                Ok(Self::stream(steps.of_stream(STREAMS.build(section)?), batch_size))
            }
            Some(name) if !DATASETS.knows(name) && !name.contains('.') => {
                let mut all = [DATASETS.names(), STREAMS.names()].concat();
                all.sort_unstable();
                Err(place.error(unknown("data set", name, &all)))
            }
            _ => Ok(Self::of(steps.of(DATASETS.build(section)?), batch_size)),
        }
    }

    /// As [`new`](Self::new), for the factory of a data set.
    fn of(dataset: DatasetFactory, batch_size: usize) -> Self {
        Self {
            dataset,
            batch_size,
            shuffle: false,
            drop_last: false,
            infinite: false,
            round_up: true,
            workers: Workers::new(0),
            collate: None,
            stream: None,
        }
    }

    /// Loads samples of a stream, for a run by iterations, or for a validation or test in one pass.
    /// The run sets its options, which the factory must pass on; it may set `shuffle_buffer`.
    #[doc(alias = "IterableDataset")]
    #[must_use]
    pub fn stream(stream: StreamFactory, batch_size: usize) -> Self {
        Self { stream: Some(stream), infinite: true, ..Self::new(NoLength, batch_size) }
    }

    /// Uses a new order every epoch. With a stream, whose options have `shuffle_buffer` for this,
    /// the run returns an error.
    #[must_use]
    pub fn shuffled(self) -> Self {
        Self { shuffle: true, ..self }
    }

    /// Loads batches ahead of time on threads.
    #[doc(alias("num_workers", "prefetch_factor", "persistent_workers"))]
    #[must_use]
    pub fn workers(self, workers: Workers) -> Self {
        Self { workers, ..self }
    }

    /// Creates the stream, if there is one, with the share of this rank of `group`. Every rank
    /// calls it.
    pub(super) fn make_stream(
        &mut self,
        group: &ProcessGroup,
        seed: u64,
        repeat: bool,
    ) -> Result<Option<StreamLoader>> {
        let Some(stream) = self.stream.take() else { return Ok(None) };
        let (rank, world_size) = (group.rank(), group.world_size());
        if self.shuffle {
            return Err(Error::config(
                "the loader cannot shuffle a stream: set `shuffle_buffer` of the stream's options instead of `shuffle`",
            ));
        }
        let asked = StreamOptions { shuffle_buffer: 0, seed, rank, world_size, repeat };
        let stream = stream(asked)?;
        let made = StreamOptions { shuffle_buffer: 0, ..stream.options() };
        if made != asked {
            return Err(Error::config(format!(
                "rank {rank} of {world_size}: the stream was created with {made:?}, but {asked:?} was requested: pass the \
                 options on, and change only `shuffle_buffer`"
            )));
        }
        let mut all = vec![0; world_size];
        group.all_gather(&mut all, &[stream.layout().fingerprint])?;
        if let Some(other) = all.iter().position(|other| *other != all[0]) {
            return Err(Error::data(format!(
                "rank {other} found other shards of the stream than rank 0: give all ranks files of the same names and \
                 sizes"
            )));
        }
        let mut loader = StreamLoader::new(stream, self.batch_size, self.workers.clone())?;
        if let Some(collate) = self.collate.clone() {
            loader = loader.collate(move |samples| collate(samples));
        }
        Ok(Some(if self.drop_last { loader.drop_last() } else { loader }))
    }

    /// Creates the loader of the data set with the share of this rank of `group`.
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
        let builder = DataLoader::builder(dataset, sampler).batch_size(self.batch_size);
        let mut builder = builder.workers(self.workers);
        if let Some(collate) = self.collate {
            builder = builder.collate(move |samples| collate(samples));
        }
        if self.drop_last {
            builder = builder.drop_last();
        }
        if self.infinite {
            builder = builder.infinite();
        }
        Ok(builder.build()?)
    }
}

/// Placeholder data set for a stream when batches are counted; no run reaches its end.
struct NoLength;

impl Dataset for NoLength {
    fn len(&self) -> usize {
        usize::MAX >> 16
    }

    fn sample(&self, _: usize, _: &mut SampleRng) -> Result<Sample, BoxError> {
        Err("samples of a stream have no index".into())
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
