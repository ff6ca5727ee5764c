//! The error type of this crate.

use rustix::io::Errno;

/// Error of [`launch`](crate::launch) and of the other functions of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The options are invalid, or contradict each other or those of another node.
    #[error("{message}")]
    Options {
        /// The flag, for example `--node-rank`, or the environment variable. Of several that
        /// contradict each other, the first that `message` names. Also for an option that a program
        /// has set in [`LaunchOptions`](crate::LaunchOptions).
        option: &'static str,
        /// The option's value, the reason and the remedy.
        message: String,
        /// The error of the name lookup, if a host name does not resolve.
        source: Option<Cause>,
    },
    /// The rendezvous of the nodes failed.
    #[error("{message}")]
    Rendezvous {
        /// The address of the control store, `host:port`; `None` if a record in it cannot be
        /// parsed.
        address: Option<String>,
        /// The address, the missing nodes and the remedy.
        message: String,
        /// The error of the control store, if it did not answer, or of the parser.
        source: Option<Cause>,
    },
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

/// The error that caused an [`Error`].
type Cause = Box<dyn std::error::Error + Send + Sync>;

impl Error {
    pub(crate) fn options(option: &'static str, message: impl Into<String>) -> Self {
        Self::Options { option, message: message.into(), source: None }
    }

    /// Returns the error for the control store at `address`.
    pub(crate) fn rendezvous(address: String, message: impl Into<String>) -> Self {
        Self::Rendezvous { address: Some(address), message: message.into(), source: None }
    }

    /// Adds the cause to [`Error::Options`] or [`Error::Rendezvous`].
    pub(crate) fn caused_by(mut self, cause: impl Into<Cause>) -> Self {
        if let Self::Options { source, .. } | Self::Rendezvous { source, .. } = &mut self {
            *source = Some(cause.into());
        }
        self
    }

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
