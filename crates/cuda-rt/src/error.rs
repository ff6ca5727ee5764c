//! The error type of this crate.

use std::fmt;
use std::path::PathBuf;

use crate::DType;

/// The result of this crate's fallible functions.
pub type Result<T, E = CudaError> = std::result::Result<T, E>;

/// CUDA is missing, too old, or failed; or a call was invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CudaError {
    /// No candidate for a library could be opened.
    #[error("cannot load {library}: {}; {install}", list(tried))]
    NotFound {
        /// The library's name.
        library: &'static str,
        /// Every path tried, in order, with the loader's error.
        tried: Vec<Attempt>,
        /// How to install the library.
        install: &'static str,
    },
    /// The library lacks a function: it is too old.
    #[error("{} has no function {symbol}; {install}", library.display())]
    MissingSymbol {
        /// The library that was opened.
        library: PathBuf,
        /// The function's C name.
        symbol: &'static str,
        /// How to install a newer library.
        install: &'static str,
    },
    /// A function of the driver failed.
    #[error("cannot {during}: {name} ({code})")]
    Driver {
        /// The failed operation.
        during: &'static str,
        /// The driver's name of the error.
        name: String,
        /// The error's number.
        code: u32,
    },
    /// NVRTC failed.
    #[error("cannot {during}: {name} ({code}){}{log}", if log.is_empty() { "" } else { ": " })]
    Nvrtc {
        /// The failed operation.
        during: &'static str,
        /// NVRTC's name of the error.
        name: String,
        /// The error's number.
        code: i32,
        /// The compiler's log.
        log: String,
    },
    /// NVRTC no longer compiles for the GPU.
    #[error(
        "NVRTC {}.{} compiles for compute capability {} and later, the GPU has {}; install an older \
         one (`pip install nvidia-cuda-nvrtc-cu12`), or set NVRTC_LIBRARY to its path",
        nvrtc.0, nvrtc.1, capability(*oldest), capability(*arch)
    )]
    OldGpu {
        /// The GPU's architecture, for example 70 for compute capability 7.0.
        arch: i32,
        /// The oldest architecture that NVRTC compiles for.
        oldest: i32,
        /// NVRTC's version.
        nvrtc: (i32, i32),
    },
    /// An operation that no kernel supports.
    #[error("{what} is not supported on a device")]
    Unsupported {
        /// The operation.
        what: &'static str,
    },
    /// The address of a slice is not a multiple of its element size.
    #[error("device pointer {ptr:#x} is not aligned to {dtype}")]
    Misaligned {
        /// The address.
        ptr: u64,
        /// The element type.
        dtype: DType,
    },
    /// Input and output differ in length.
    #[error("the output has {got} elements, the input {expected}")]
    LengthMismatch {
        /// The input's element count.
        expected: usize,
        /// The output's element count.
        got: usize,
    },
    /// The operation needs gradients, or a part of them, that `bind` did not set.
    #[error("part {part} of the gradients is not bound: call `bind` first")]
    NotBound {
        /// The index of the part.
        part: usize,
    },
    /// A host-to-device copy was needed while the stream is captured. Run one step with the same
    /// arguments before the capture.
    #[error("cannot copy to the device during stream capture: run one step before the capture")]
    Capturing,
}

/// One path that could not be opened.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Attempt {
    /// The path given to `dlopen`.
    pub path: PathBuf,
    /// The error of `dlopen`.
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

fn capability(arch: i32) -> String {
    format!("{}.{}", arch / 10, arch % 10)
}
