//! The error type of contexts and kernels. Operators return candle's.

/// An error of a [`Context`](crate::Context), or of building its kernels. Converts to candle's.
///
/// `Debug` prints the same text as `Display`, because a `main` that returns an error prints it with
/// `Debug`.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A text is not the JSON of an autotune cache.
    #[error("not an autotune cache: {0}")]
    AutotuneCache(#[from] serde_json::Error),
    /// An autotune cache was saved by a version with other algorithms.
    #[error("algorithm {algorithm} of `{key}` is none of this version's {algorithms}")]
    UnknownAlgorithm {
        /// The operation and its shapes.
        key: String,
        /// The number in the cache.
        algorithm: usize,
        /// Number of algorithms of this version.
        algorithms: usize,
    },
    /// A library of CUDA cannot be loaded, or the driver or NVRTC failed.
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    Cuda(#[from] cuda_rt::CudaError),
    /// A function of cuDNN failed.
    #[error("cuDNN: {call}: {reason}")]
    Cudnn {
        /// The function, or its purpose.
        call: &'static str,
        /// cuDNN's text for the status, or its number.
        reason: String,
    },
    /// candle failed, for example to allocate memory on the device.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
}

impl std::fmt::Debug for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Display::fmt(self, f)
    }
}

impl From<Error> for candle_core::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Candle(error) => error,
            other => Self::wrap(other),
        }
    }
}

/// Result with this crate's [`Error`].
pub(crate) type Result<T> = std::result::Result<T, Error>;
