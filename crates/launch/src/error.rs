//! The error type of this crate.

use rustix::io::Errno;

/// Error of [`launch`](crate::launch) and of the other functions of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The options are invalid, or contradict each other or those of another node.
    #[error("{0}")]
    Options(String),
    /// The rendezvous of the nodes failed; the text names the address and the missing nodes.
    #[error("{0}")]
    Rendezvous(String),
    /// A store cannot be hosted or reached.
    #[error(transparent)]
    Collective(#[from] collective::Error),
    /// A system call failed.
    #[error("{what}: {source}{}", advice(source))]
    Io {
        /// The operation, with the path or program.
        what: String,
        /// The error of the operating system.
        source: std::io::Error,
    },
}

impl Error {
    /// Converts an operating-system error of the operation `what` to [`Error::Io`].
    pub(crate) fn io(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> Self {
        let what = what.into();
        |source| Self::Io { what, source }
    }
}

/// Returns what to do about a limit of the system.
fn advice(error: &std::io::Error) -> &'static str {
    match Errno::from_io_error(error) {
        Some(Errno::MFILE) => {
            "; the launcher opens a few files for each rank: raise its limit (`ulimit -n`, and \
             `ulimit -Hn` for the hard limit; `LimitNOFILE=` of a systemd unit)"
        }
        Some(Errno::NFILE) => "; raise the limit of the whole system (`sysctl fs.file-max`)",
        Some(Errno::AGAIN) => {
            "; raise the limit of processes and threads (`ulimit -u`, `pids.max` of the control group)"
        }
        _ => "",
    }
}

/// Result type of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;
