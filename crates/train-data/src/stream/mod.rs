//! `Stream`: samples without a length, read in order from shards, dealt to ranks, shuffled in windows, resumed exactly.
//!
//! A [`Source`] opens shards (files of lines, archives, tables) at any place. A stream passes over them again and again,
//! or once:
//!
//! * **Ranks.** Each pass permutes the shards and deals them to the ranks. If there are fewer shards than ranks, every
//!   rank reads all and takes each `world_size`-th record. Either way the ranks' samples of a pass are all records, each
//!   once.
//! * **Shuffling.** `shuffle_buffer` records are read, permuted, and handed out before the next are read.
//! * **Position.** Where the window began, and how many of its records were taken: a few numbers, exact at each sample.
//!   To go on there, at most a window is read again.
//!
//! A [`StreamLoader`] makes batches. One thread reads, workers apply [`Stream::map`]'s functions and collate, so that
//! order and random numbers do not depend on the number of workers. Its position is that of the batch handed out last.
//!
//! Memory: a window of raw records, and the batches that the workers prefetch.
//!
//! ```
//! use train_data::{Array, Stream, StreamLoader, StreamOptions, StreamPosition, Workers};
//!
//! # let directory = tempfile::tempdir()?;
//! # let folder = directory.path().display();
//! # std::fs::write(format!("{folder}/0.txt"), "a line\nanother one\n")?;
//! # std::fs::write(format!("{folder}/1.txt"), "one more\n")?;
//! let options = StreamOptions { shuffle_buffer: 1000, seed: 1, repeat: true, ..StreamOptions::default() };
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
pub use source::{Records, Shard, Source};
pub use tar::TarFiles;
pub use text::TextFiles;

use crate::transforms::Transform;
use crate::workers::catch;
use crate::{BoxError, Result, Sample, SampleRng};

/// Which records of a stream a rank takes, in which order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamOptions {
    /// Number of records that are permuted at a time; the shards are permuted each pass. With 0 all stay in the source's
    /// order, with 1 only shards are permuted.
    pub shuffle_buffer: usize,
    /// Seed of the permutations, and of the samples' random numbers.
    pub seed: u64,
    /// This rank.
    pub rank: usize,
    /// Number of ranks.
    pub world_size: usize,
    /// Pass after pass without end, for training; otherwise one pass.
    pub repeat: bool,
}

impl StreamOptions {
    /// Whether every rank reads all of so many shards.
    const fn shares(&self, shards: usize) -> bool {
        shards < self.world_size
    }
}

impl Default for StreamOptions {
    /// One pass of a single rank, in order.
    fn default() -> Self {
        Self { shuffle_buffer: 0, seed: 0, rank: 0, world_size: 1, repeat: false }
    }
}

/// Samples without a length: the records of shards, in an order that resumes exactly.
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
    /// Lines of text files: [`TextFiles`].
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

    /// Objects in JSON, one a line of text files: [`TextFiles`], [`parse_json`]. Blank lines are skipped.
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

    /// Records of archives in WebDataset's form, labels as numbers: [`TarFiles`], [`parse_integers`].
    ///
    /// # Errors
    ///
    /// Those of [`TarFiles::new`] and of [`new`](Self::new).
    pub fn tar(files: impl IntoIterator<Item: AsRef<str>>, options: StreamOptions) -> Result<Self> {
        Ok(Self::new(TarFiles::new(files)?, options)?.map(|record, _| parse_integers(record)))
    }

    /// Rows of Parquet files: [`ParquetFiles`]. Needs the feature `parquet`.
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

    /// Records of any source.
    ///
    /// # Errors
    ///
    /// [`Error::Options`](crate::Error::Options) without shards, or if the rank is not below the world size.
    pub fn new(source: impl Source + 'static, options: StreamOptions) -> Result<Self> {
        let source = Arc::new(source);
        let layout = StreamLayout::new(source.shards(), &options)?;
        Ok(Self { source, options, layout, maps: Vec::new() })
    }

    /// Applies `map` to each sample, after those that were added before: decoding, transforms. Workers call it; what is
    /// random in it comes from its second argument, so that a resumed run sees the same.
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

    /// Which records the rank takes, in which order.
    #[must_use]
    pub const fn options(&self) -> StreamOptions {
        self.options
    }

    /// Layout that a position must share with the stream.
    #[must_use]
    pub const fn layout(&self) -> StreamLayout {
        self.layout
    }

    /// Changes the seed. A position is of one seed.
    pub fn set_seed(&mut self, seed: u64) {
        (self.options.seed, self.layout.seed) = (seed, seed);
    }

    fn reader(&self) -> Reader {
        Reader::new(Arc::clone(&self.source), self.options, self.layout)
    }

    fn apply(&self, mut sample: Sample, origin: Origin) -> Result<Sample> {
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
