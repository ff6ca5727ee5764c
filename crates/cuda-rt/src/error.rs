//! Why CUDA cannot be used.

use std::fmt;
use std::path::PathBuf;

/// What this crate's functions return.
pub type Result<T, E = CudaError> = std::result::Result<T, E>;

/// CUDA is missing, too old, or failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CudaError {
    /// No candidate for a library could be opened.
    #[error("cannot load {library}: {}; {install}", list(tried))]
    NotFound {
        /// The library's name.
        library: &'static str,
        /// Every path tried, in order, and what the system's loader said.
        tried: Vec<Attempt>,
        /// What to do about it.
        install: &'static str,
    },
    /// The library is there, but lacks a function: it is too old.
    #[error("{} has no function {symbol}; {install}", library.display())]
    MissingSymbol {
        /// The library that was opened.
        library: PathBuf,
        /// The C name.
        symbol: &'static str,
        /// What to do about it.
        install: &'static str,
    },
    /// A function of the driver failed.
    #[error("{during}: {name} ({code})")]
    Driver {
        /// What was being done.
        during: &'static str,
        /// The driver's name for it.
        name: String,
        /// Its number.
        code: u32,
    },
    /// NVRTC failed.
    #[error("{during}: {name} ({code}){}{log}", if log.is_empty() { "" } else { ": " })]
    Nvrtc {
        /// What was being done.
        during: &'static str,
        /// NVRTC's name for it.
        name: String,
        /// Its number.
        code: i32,
        /// What the compiler said.
        log: String,
    },
    /// What no kernel does.
    #[error("{what} is not supported on a device")]
    Unsupported {
        /// What was asked for.
        what: &'static str,
    },
    /// The host has something new to say while the stream is captured. Take one step with the same
    /// arguments before.
    #[error("a copy from the host while the stream is captured")]
    Capturing,
}

/// One path that could not be opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attempt {
    /// What `dlopen` was given.
    pub path: PathBuf,
    /// What it said.
    pub reason: String,
}

impl fmt::Display for Attempt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.path.display(), self.reason)
    }
}

fn list(tried: &[Attempt]) -> String {
    tried.iter().map(Attempt::to_string).collect::<Vec<_>>().join("; ")
}
