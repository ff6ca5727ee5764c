//! `Error`: data that cannot be read, or does not have the expected form.

use crate::WorkerError;

/// Error of a data set or a transform; `?` converts any error to it.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Data that cannot be read, or does not have the expected form.
///
/// `Debug` prints the same text as `Display`, because a `main` that returns an error prints it with
/// `Debug`.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The shape does not match the number of elements.
    #[error("an array of shape {shape:?} has {} elements, got {got}", elements(.shape))]
    Shape {
        /// Given extents.
        shape: Vec<usize>,
        /// Given number of elements.
        got: usize,
    },
    /// A sample or batch lacks a field.
    #[error("the {what} has no field `{name}`; it has {have:?}")]
    NoField {
        /// `sample` or `batch`.
        what: &'static str,
        /// Requested name.
        name: String,
        /// Names of its fields.
        have: Vec<String>,
    },
    /// Samples of a batch differ in fields, shapes or types.
    #[error("sample {position} of the batch differs from the others: {text}")]
    Collate {
        /// Index in the batch.
        position: usize,
        /// Description of the difference.
        text: String,
    },
    /// A data set failed to create a sample.
    #[error("data set `{dataset}`, sample {index}: {source}")]
    Sample {
        /// Name of the data set.
        dataset: String,
        /// Index of the sample.
        index: usize,
        /// The data set's own error.
        source: BoxError,
    },
    /// A data set failed to create a batch, or did not finish in time.
    #[error("data set `{dataset}`, samples {indices:?}: {source}")]
    Batch {
        /// Name of the data set.
        dataset: String,
        /// Indices of the samples.
        indices: Vec<usize>,
        /// The data set's own error.
        source: BoxError,
    },
    /// A metric failed to add a batch, or to compute its values.
    #[error("metric `{metric}`: {source}")]
    Metric {
        /// Name of the metric.
        metric: String,
        /// The metric's own error.
        source: BoxError,
    },
    /// A record of a stream cannot be read, or a function of it failed.
    #[error("{shard}, record at {unit} {place}: {source}")]
    Record {
        /// Name of the shard: a path.
        shard: String,
        /// Unit of `place`: a byte, a row.
        unit: &'static str,
        /// Position of the record in its shard.
        place: u64,
        /// The reader's or the function's own error.
        source: BoxError,
    },
    /// A loader cannot resume at a position.
    #[error("the loader cannot resume at this position: {0}")]
    Position(String),
    /// A worker panicked, or took too long.
    #[error("{data}: {source}")]
    Workers {
        /// The data set, by name, or the stream.
        data: String,
        /// The worker's error.
        source: WorkerError,
    },
    /// A transform does not support this shape or type.
    #[error("{0}")]
    Input(String),
    /// A transform of a pipeline failed.
    #[error("transform {} (`{name}`): {source}", .step + 1)]
    Transform {
        /// Index in the pipeline.
        step: usize,
        /// Name of the transform.
        name: String,
        /// The transform's own error.
        source: BoxError,
    },
    /// Invalid options of a loader.
    #[error("{0}")]
    Options(String),
}

impl std::fmt::Debug for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Display::fmt(self, f)
    }
}

/// Number of elements of a shape, as text.
fn elements(shape: &[usize]) -> String {
    let count = shape.iter().try_fold(1_usize, |count, extent| count.checked_mul(*extent));
    count.map_or_else(|| "too many".to_owned(), |count| count.to_string())
}

/// Result type of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;
