//! The error type of this crate.

use std::path::PathBuf;

/// The result of this crate's fallible functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A step, a checkpoint or a collective failed; or a call was invalid.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A forward or backward pass, or an optimizer's step on candle's variables.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
    /// The ranks could not join, or a collective failed.
    #[error(transparent)]
    Collective(#[from] collective::Error),
    /// The optimizer refused its hyper-parameters or a saved state.
    #[error(transparent)]
    Optimizer(#[from] fused_optim::Error),
    /// The loss scale has fallen to its floor, or a saved one is invalid.
    #[error(transparent)]
    LossScale(#[from] amp::Error),
    /// A checkpoint cannot be written, or is not this program's.
    #[error("checkpoint {}: {reason}", path.display())]
    Checkpoint {
        /// The file.
        path: PathBuf,
        /// What is wrong, and what to do.
        reason: String,
    },
    /// A call with arguments that do not fit.
    #[error("{0}")]
    InvalidArgument(String),
}
