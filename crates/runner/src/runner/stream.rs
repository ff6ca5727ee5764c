//! `TrainStream`: batches of a run over a stream, and the position saved in checkpoints.
//!
//! A run counts the batches of a stream as those of an
//! [infinite](train_data::DataLoaderBuilder::infinite) loader over a data set whose end no run
//! reaches. The samples depend only on the stream's position, one for each rank.

use std::path::Path;

use train_data::stream::StreamLayout;

use super::Runner;
use crate::checkpoint::{Meta, Position};
use crate::data::{Batch, DataLoader, StreamLoader, StreamPosition};
use crate::{Error, Result};

/// Data of training.
pub(super) struct TrainData {
    /// Source of batches, or in a run over a stream their counter; `None` in a run that only
    /// evaluates.
    pub(super) loader: Option<DataLoader>,
    pub(super) stream: Option<TrainStream>,
}

impl TrainData {
    pub(super) fn loader(&self) -> Result<&DataLoader> {
        let none =
            "the run has no train_dataloader, train_cfg and optim_wrapper: it can only evaluate";
        self.loader.as_ref().ok_or_else(|| Error::config(none))
    }

    pub(super) fn set_seed(&mut self, seed: u64) {
        if let Some(loader) = &mut self.loader {
            loader.set_seed(seed);
        }
        if let Some(stream) = &mut self.stream {
            stream.set_seed(seed);
        }
    }
}

/// A stream for training.
pub(super) struct TrainStream {
    loader: StreamLoader,
    /// Position before the current batch; between iterations that of the run's [`Position`].
    before: StreamPosition,
    /// Position after that batch.
    after: StreamPosition,
}

impl TrainStream {
    pub(super) fn new(loader: StreamLoader) -> Self {
        let position = loader.position();
        Self { loader, before: position, after: position }
    }

    /// Returns the next training batch.
    pub(super) fn next_batch(&mut self) -> Result<Batch> {
        let batch = self.loader.next_batch()?;
        self.after = self.loader.position();
        let rank = self.after.layout().rank;
        batch.ok_or_else(|| {
            Error::data(format!("rank {rank}: the training stream has ended; set `repeat`"))
        })
    }

    /// Returns a warning for the log if the stream is not shuffled.
    pub(super) fn warning(&self) -> Option<String> {
        (self.loader.layout().shuffle_buffer == 0).then(|| {
            "the training stream is not shuffled: set its `shuffle_buffer` (1 permutes the shards only)".to_owned()
        })
    }

    /// Records that the last batch was trained on.
    pub(super) fn trained(&mut self) {
        self.before = self.after;
    }

    pub(super) fn set_seed(&mut self, seed: u64) {
        self.loader.set_seed(seed);
        (self.before, self.after) = (self.loader.position(), self.loader.position());
    }

    pub(super) fn resume(&mut self, position: StreamPosition) -> Result<()> {
        self.loader.resume(position)?;
        (self.before, self.after) = (position, position);
        Ok(())
    }
}

impl Runner {
    /// Returns the position of this rank's stream at a position of the run, which hooks save before
    /// the current batch is counted.
    pub(super) fn stream_position(&self, position: &Position) -> Option<StreamPosition> {
        let stream = self.train_data.stream.as_ref()?;
        let is_before = position.iter == self.position.iter;
        Some(if is_before { stream.before } else { stream.after })
    }

    /// Returns an error for a checkpoint after which this rank's samples would differ.
    pub(super) fn check_stream(&self, path: &Path, meta: &Meta) -> Result<()> {
        let (rank, shown) = (self.group.rank(), path.display());
        let refuse = |text: String| Err(Error::checkpoint(Some(path), text));
        // If the number of ranks differs, the check reports that first.
        let saved = meta.streams.get(rank).or_else(|| meta.streams.first());
        match (&self.train_data.stream, saved) {
            (None, None) => Ok(()),
            (Some(stream), Some(position)) => {
                let layout = StreamLayout { seed: meta.seed, ..stream.loader.layout() };
                let checked = layout.check(position);
                checked.map_err(|error| Error::Checkpoint {
                    path: Some(path.to_owned()),
                    message: format!("{shown}, rank {rank}: {error}"),
                    source: Some(error.into()),
                })
            }
            (Some(_), None) => refuse(format!(
                "{shown} was saved by a run over a data set, but this run uses a stream: resume with the data set"
            )),
            (None, Some(_)) => refuse(format!(
                "{shown} was saved by a run over a stream, but this run uses a data set: resume with the stream"
            )),
        }
    }
}
