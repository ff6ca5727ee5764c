//! Errors of a launcher.

/// Why a launcher gave up.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Options are invalid, or contradict each other or those of another node.
    #[error("{0}")]
    Options(String),
    /// The nodes of a job did not meet; the text names the address and the missing nodes.
    #[error("{0}")]
    Rendezvous(String),
    /// The store cannot be hosted or reached.
    #[error(transparent)]
    Collective(#[from] collective::Error),
    /// The operating system refused a request.
    #[error("{what}: {source}")]
    Io {
        /// The request, with the path or program it is about.
        what: String,
        /// The system's answer.
        source: std::io::Error,
    },
}

impl Error {
    /// Makes an [`Error::Io`] of a system's answer to `what`.
    pub(crate) fn io(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> Self {
        let what = what.into();
        |source| Self::Io { what, source }
    }
}

/// Result of a launcher's operation.
pub type Result<T, E = Error> = std::result::Result<T, E>;
