//! `Error`: a file that cannot be created or written.

use std::fmt;
use std::io::ErrorKind;
use std::path::Path;

/// A file that cannot be created or written.
///
/// `Debug` prints the same text as `Display`, because a `main` that returns an error prints it with
/// `Debug`.
#[derive(thiserror::Error)]
#[error("{what}: {source}")]
pub struct Error {
    /// The operation and the path.
    pub what: String,
    /// The error of the operating system.
    pub source: std::io::Error,
}

impl Error {
    pub(crate) fn new(what: &str, path: &Path, source: std::io::Error) -> Self {
        Self { what: format!("cannot {what} {}", path.display()), source }
    }

    /// Returns whether the disk is full, which need not end a training.
    #[must_use]
    pub fn is_full(&self) -> bool {
        use ErrorKind::{FileTooLarge, QuotaExceeded, StorageFull};
        matches!(self.source.kind(), FileTooLarge | QuotaExceeded | StorageFull)
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;
