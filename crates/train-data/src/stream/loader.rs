//! `StreamLoader`: batches of a stream, loaded by workers, with the position of the last one
//! returned.

use std::sync::Arc;

use super::reader::{Reader, Record};
use super::{Stream, StreamLayout, StreamPosition};
use crate::workers::catch;
use crate::{Batch, BoxError, Collate, Error, OrderedMap, Result, Sample, Workers};

/// Batches of a stream, in order.
pub struct StreamLoader {
    stream: Stream,
    options: Options,
    workers: Workers,
    collate: Collate,
    position: StreamPosition,
    /// Batches from `position` on, created on the first request, each with the position after it.
    batches: Option<OrderedMap<Result<(Batch, StreamPosition)>>>,
}

#[derive(Clone, Copy)]
struct Options {
    batch_size: usize,
    drop_last: bool,
}

impl StreamLoader {
    /// Creates a loader of batches of `batch_size` samples, stacked by [`Batch::collate`]; the last
    /// batch of a stream that does not repeat may be smaller.
    ///
    /// # Errors
    ///
    /// [`Error::Options`] if the batch size is zero.
    pub fn new(stream: Stream, batch_size: usize, workers: Workers) -> Result<Self> {
        if batch_size == 0 {
            return Err(Error::Options("batch_size must be at least 1".into()));
        }
        let position = stream.reader().position();
        let options = Options { batch_size, drop_last: false };
        let collate: Collate = Arc::new(|samples| Ok(Batch::collate(samples)?));
        Ok(Self { stream, options, workers, collate, position, batches: None })
    }

    /// Drops a last batch that is smaller than the others.
    #[must_use]
    pub fn drop_last(mut self) -> Self {
        self.options.drop_last = true;
        self
    }

    /// Collates samples with `collate`, which workers call.
    #[must_use]
    pub fn collate<F>(mut self, collate: F) -> Self
    where
        F: Fn(Vec<Sample>) -> Result<Batch, BoxError> + Send + Sync + 'static,
    {
        self.collate = Arc::new(collate);
        self
    }

    /// Returns the position after the last batch returned, regardless of prefetched ones.
    #[must_use]
    pub const fn position(&self) -> StreamPosition {
        self.position
    }

    /// Resumes at a position of a loader of the same stream.
    ///
    /// # Errors
    ///
    /// [`Error::Position`] if the number of ranks, the shards, the shuffle buffer or the seed have
    /// changed, or if this stream ends and that of the position repeats.
    pub fn resume(&mut self, position: StreamPosition) -> Result<()> {
        self.stream.layout().check(&position)?;
        (self.position, self.batches) = (position, None);
        Ok(())
    }

    /// Returns the next batch; `None` at the end of a stream that does not repeat.
    ///
    /// # Errors
    ///
    /// [`Error::Record`], which names the shard and the position in it; [`Error::Workers`];
    /// [`Error::Position`] if the shards end before the position. After a record that cannot be
    /// read the loader is at its end. After a failed map or collate function the next call returns
    /// the batch after the failed one.
    pub fn next_batch(&mut self) -> Result<Option<Batch>> {
        let batches = match self.batches.take() {
            Some(batches) => batches,
            None => self.start(),
        };
        let Some(loaded) = self.batches.insert(batches).next() else { return Ok(None) };
        let named = |source| Error::Workers { data: "the stream".to_owned(), source };
        let (batch, position) = loaded.map_err(named)??;
        self.position = position;
        Ok(Some(batch))
    }

    /// Restarts from the beginning.
    pub fn restart(&mut self) {
        (self.position, self.batches) = (self.stream.reader().position(), None);
    }

    /// Changes the seed, and restarts from the beginning.
    pub fn set_seed(&mut self, seed: u64) {
        self.stream.set_seed(seed);
        self.restart();
    }

    /// Layout that a position must share with the stream.
    #[must_use]
    pub const fn layout(&self) -> StreamLayout {
        self.stream.layout()
    }

    /// Starts loading the batches after `position`.
    fn start(&self) -> OrderedMap<Result<(Batch, StreamPosition)>> {
        let (reader, start) = (self.stream.reader(), Some(self.position));
        let jobs = Jobs { reader, start, options: self.options, has_failed: false };
        let (stream, collate) = (self.stream.clone(), Arc::clone(&self.collate));
        self.workers.map(jobs, move |job: Result<Job>| {
            let Job { records, position } = job?;
            Ok((stream.batch(records, &collate)?, position))
        })
    }
}

impl std::fmt::Debug for StreamLoader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StreamLoader")
            .field("stream", &self.stream)
            .field("batch_size", &self.options.batch_size)
            .field("position", &self.position)
            .finish_non_exhaustive()
    }
}

/// Records of a batch, and the position after them.
struct Job {
    records: Vec<Record>,
    position: StreamPosition,
}

/// Records of each batch; the first error is the last item.
struct Jobs {
    reader: Reader,
    /// First position of the reader. Workers seek to it, because that may read much data.
    start: Option<StreamPosition>,
    options: Options,
    has_failed: bool,
}

impl Jobs {
    fn job(&mut self) -> Result<Option<Job>> {
        let Options { batch_size, drop_last } = self.options;
        if let Some(start) = self.start.take() {
            self.reader.resume(&start)?;
        }
        let mut records = Vec::new();
        while records.len() < batch_size
            && let Some(record) = self.reader.next()?
        {
            records.push(record);
        }
        let is_left_out = records.is_empty() || (drop_last && records.len() < batch_size);
        let position = self.reader.position();
        Ok((!is_left_out).then_some(Job { records, position }))
    }
}

impl Iterator for Jobs {
    type Item = Result<Job>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.has_failed {
            return None;
        }
        let job = self.job().transpose();
        self.has_failed = matches!(job, Some(Err(_)));
        job
    }
}

impl Stream {
    /// Transforms and stacks the records of a batch. An error names the record.
    fn batch(&self, records: Vec<Record>, collate: &Collate) -> Result<Batch> {
        let origins: Vec<_> = records.iter().map(|record| record.origin).collect();
        let samples = records.into_iter().map(|record| self.apply(record.sample, record.origin));
        let samples = samples.collect::<Result<_>>()?;
        let batch = catch(|| collate(samples)).map_err(BoxError::from).flatten();
        batch.map_err(|error| {
            let position = match error.downcast_ref() {
                Some(Error::Collate { position, .. }) => *position,
                _ => 0,
            };
            origins[position.min(origins.len() - 1)].error(&*self.source, error)
        })
    }
}
