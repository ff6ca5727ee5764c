//! What can go wrong in a run, and what to do about it.

/// A failure of the runner or of a crate under it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The configuration is wrong; the text names file, line, column and the nearest valid name.
    #[error("{0}")]
    Config(String),
    /// Data that cannot be read or does not have the expected form.
    #[error("{0}")]
    Data(String),
    /// The tensor engine failed.
    #[error("{0}")]
    Engine(String),
    /// A checkpoint that is missing, damaged, or of another model.
    #[error("{0}")]
    Checkpoint(String),
    /// A signal to one of the ranks ended the run, after a checkpoint.
    #[error("ended by signal {signal}, after a checkpoint: resume to go on")]
    Interrupted {
        /// The signal's number.
        signal: i32,
    },
    /// A collective failed: a peer died, timed out, or called something else.
    #[error(transparent)]
    Collective(#[from] collective::Error),
    /// An optimizer refused its parameters or its state.
    #[error(transparent)]
    Optim(#[from] fused_optim::Error),
    /// The loss scale has nowhere to go.
    #[error(transparent)]
    Amp(#[from] amp::Error),
    /// The operating system refused.
    #[error("{what}: {source}")]
    Io {
        /// What was being done, to which path.
        what: String,
        /// The system's answer.
        source: std::io::Error,
    },
}

/// Result of a runner operation.
pub type Result<T, E = Error> = std::result::Result<T, E>;
