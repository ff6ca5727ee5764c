//! `Stream`: samples without a length, read in order from shards, distributed to ranks, shuffled in
//! windows, resumed exactly.
//!
//! A [`Source`] opens shards (text files, archives, tables) at any position. A stream passes over
//! them repeatedly or once:
//!
//! * **Ranks.** Each pass permutes the shards and distributes them to the ranks. If there are fewer
//!   shards than ranks, every rank reads all and takes each `world_size`-th record. In both cases
//!   the ranks' samples of a pass are all records, each once.
//! * **Shuffling.** `shuffle_buffer` records are read, permuted, and returned before the next are
//!   read.
//! * **Position.** The start of the window, and the number of its records taken: a few numbers,
//!   exact at each sample. Resuming reads at most one window again.
//! * **Changes.** A file that changes during a run is an error, not an earlier or later end: its
//!   size and time of modification are compared when it is opened and at its end. A position is
//!   refused by shards of other names, sizes or content. For this each rank opens every file when a
//!   stream is made, and reads up to three blocks of it: on a network file system tens of thousands
//!   of small files delay the start, and few large ones are faster.
//!
//! A [`StreamLoader`] creates batches. One thread reads; workers apply the functions of
//! [`Stream::map`] and collate, so that order and random numbers do not depend on the number of
//! workers. Its position is that of the last batch returned.
//!
//! Memory use: a window of raw records, and the batches prefetched by workers.
//!
//! ```
//! use train_data::{Array, Stream, StreamLoader, StreamOptions, StreamPosition, Workers};
//!
//! # let directory = tempfile::tempdir()?;
//! # let folder = directory.path().display();
//! # std::fs::write(format!("{folder}/0.txt"), "a line\nanother one\n")?;
//! # std::fs::write(format!("{folder}/1.txt"), "one more\n")?;
//! let options = StreamOptions { shuffle_buffer: 1000, repeat: true, ..StreamOptions::default() };
//! let stream = Stream::text([format!("{folder}/*.txt")], options)?
//!     .map(|mut sample, _random| {
//!         let len = sample.take("text")?.shape()[0];
//!         Ok(sample.with("len", Array::scalar(len as i64)))
//!     });
//! let mut loader = StreamLoader::new(stream, 2, Workers::new(1))?;
//! loader.next_batch()?;
//!
//! // A program saves the position beside its model, and goes on with the same samples.
//! let saved = serde_json::to_string(&loader.position())?;
//! let second = loader.next_batch()?;
//! loader.resume(serde_json::from_str(&saved)?)?;
//! assert_eq!(loader.next_batch()?, second);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod fields;
mod input;
mod json;
mod loader;
#[cfg(feature = "parquet")]
mod parquet;
mod position;
mod reader;
mod source;
mod tar;
mod text;

use std::sync::Arc;

pub use fields::{parse_integers, select, to_floats};
pub use json::parse_json;
pub use loader::StreamLoader;
#[cfg(feature = "parquet")]
pub use parquet::ParquetFiles;
pub use position::{StreamLayout, StreamPosition};
use reader::{Origin, Reader};
#[cfg(feature = "tokenizers")]
pub(crate) use source::FileState;
pub use source::{Records, Shard, Source};
pub use tar::TarFiles;
pub use text::TextFiles;

/// FNV-1a hash of bytes.
#[cfg(feature = "tokenizers")]
pub(crate) fn checksum(bytes: &[u8]) -> u64 {
    position::hash(position::HASH, bytes)
}

use crate::transforms::Transform;
use crate::workers::{IS_STOPPED, catch, is_stopped};
use crate::{BoxError, Result, Sample, SampleRng};

/// Selection and order of a rank's records in a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamOptions {
    /// Number of records that are permuted at a time; shards are permuted in each pass. With 0
    /// everything stays in the source's order, with 1 only shards are permuted.
    pub shuffle_buffer: usize,
    /// Seed of the permutations, and of the samples' random numbers.
    pub seed: u64,
    /// This rank.
    pub rank: usize,
    /// Number of ranks.
    pub world_size: usize,
    /// Whether to repeat passes endlessly, for training; otherwise one pass.
    pub repeat: bool,
}

impl StreamOptions {
    /// Returns whether every rank reads all of this number of shards.
    const fn shares(&self, shards: usize) -> bool {
        shards < self.world_size
    }
}

impl Default for StreamOptions {
    /// Reads one pass on a single rank, in order.
    fn default() -> Self {
        Self { shuffle_buffer: 0, seed: 0, rank: 0, world_size: 1, repeat: false }
    }
}

/// Samples without a length: the records of shards, in an order that can be resumed exactly.
#[doc(alias = "IterableDataset")]
#[derive(Clone)]
pub struct Stream {
    source: Arc<dyn Source>,
    options: StreamOptions,
    layout: StreamLayout,
    maps: Vec<Arc<Map>>,
}

type Map = dyn Fn(Sample, &mut SampleRng) -> Result<Sample, BoxError> + Send + Sync;

impl Stream {
    /// Reads lines of text files: [`TextFiles`].
    ///
    /// # Errors
    ///
    /// Those of [`TextFiles::new`] and of [`new`](Self::new).
    pub fn text(
        files: impl IntoIterator<Item: AsRef<str>>,
        options: StreamOptions,
    ) -> Result<Self> {
        Self::new(TextFiles::new(files)?, options)
    }

    /// Reads JSON objects, one per line of text files: [`TextFiles`], [`parse_json`]. Blank lines
    /// are skipped.
    ///
    /// # Errors
    ///
    /// As [`text`](Self::text).
    pub fn json(
        files: impl IntoIterator<Item: AsRef<str>>,
        options: StreamOptions,
    ) -> Result<Self> {
        let lines = Self::new(TextFiles::new(files)?.skip_blank(), options)?;
        Ok(lines.map(|line, _| parse_json(line)))
    }

    /// Reads records of archives in WebDataset's format, with labels as numbers: [`TarFiles`],
    /// [`parse_integers`].
    ///
    /// # Errors
    ///
    /// Those of [`TarFiles::new`] and of [`new`](Self::new).
    pub fn tar(files: impl IntoIterator<Item: AsRef<str>>, options: StreamOptions) -> Result<Self> {
        Ok(Self::new(TarFiles::new(files)?, options)?.map(|record, _| parse_integers(record)))
    }

    /// Reads rows of Parquet files: [`ParquetFiles`]. Needs the feature `parquet`.
    ///
    /// # Errors
    ///
    /// Those of [`ParquetFiles::new`] and of [`new`](Self::new).
    #[cfg(feature = "parquet")]
    pub fn parquet(
        files: impl IntoIterator<Item: AsRef<str>>,
        options: StreamOptions,
    ) -> Result<Self> {
        Self::new(ParquetFiles::new(files)?, options)
    }

    /// Reads records of any source.
    ///
    /// # Errors
    ///
    /// [`Error::Options`](crate::Error::Options) without shards, or if the rank is not below the
    /// world size.
    pub fn new(source: impl Source + 'static, options: StreamOptions) -> Result<Self> {
        let source = Arc::new(source);
        let layout = StreamLayout::new(&*source, &options)?;
        Ok(Self { source, options, layout, maps: Vec::new() })
    }

    /// Applies `map` to each sample, after previously added functions: decoding, transforms.
    /// Workers call it; all randomness must come from its second argument, so that a resumed run
    /// gets the same samples.
    #[must_use]
    pub fn map<F>(mut self, map: F) -> Self
    where
        F: Fn(Sample, &mut SampleRng) -> Result<Sample, BoxError> + Send + Sync + 'static,
    {
        self.maps.push(Arc::new(map));
        self
    }

    /// Applies a transform, or a pipeline of them, to each sample: [`map`](Self::map).
    #[must_use]
    pub fn transform(self, transform: impl Transform + 'static) -> Self {
        self.map(move |sample, random| transform.apply(sample, random))
    }

    /// Returns the selection and order of this rank's records.
    #[must_use]
    pub const fn options(&self) -> StreamOptions {
        self.options
    }

    /// Layout that a position must share with the stream.
    #[must_use]
    pub const fn layout(&self) -> StreamLayout {
        self.layout
    }

    /// Changes the seed. Positions of another seed become invalid.
    pub fn set_seed(&mut self, seed: u64) {
        (self.options.seed, self.layout.seed) = (seed, seed);
    }

    fn reader(&self) -> Reader {
        Reader::new(Arc::clone(&self.source), self.options, self.layout)
    }

    fn apply(&self, mut sample: Sample, origin: Origin) -> Result<Sample> {
        if is_stopped() {
            return Err(origin.error(&*self.source, IS_STOPPED.into()));
        }
        let mut random = origin.random(self.options.seed);
        for map in &self.maps {
            let mapped = catch(|| map(sample, &mut random)).map_err(BoxError::from).flatten();
            sample = mapped.map_err(|error| origin.error(&*self.source, error))?;
        }
        Ok(sample)
    }
}

impl std::fmt::Debug for Stream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Stream").field("options", &self.options).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
