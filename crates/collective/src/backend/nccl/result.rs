//! [`Libraries`]: NCCL and the CUDA driver, loaded at run time. Converts their status codes to
//! errors, and wraps the functions that need no communicator.

#![expect(unsafe_code, reason = "calls C")]

use std::ffi::CStr;
use std::path::PathBuf;
use std::sync::OnceLock;

use super::loader::{CUDA, NCCL};
use super::sys::{CudaApi, CudaResult, NcclApi, NcclResult, UniqueId};
use crate::{Error, Result};

/// NCCL and the CUDA driver. They stay loaded until the process ends.
#[derive(Clone, Copy, Debug)]
pub struct Libraries {
    pub(super) nccl: NcclApi,
    pub(super) cuda: CudaApi,
    version: i32,
}

impl Libraries {
    /// Returns this process's libraries. The first call loads them; every call returns the same
    /// result.
    ///
    /// `COLLECTIVE_NCCL_LIB` and `COLLECTIVE_CUDA_LIB` may give the paths. Without them, the
    /// dynamic loader is tried with `libnccl.so.2`, `libnccl.so`, `libcuda.so.1`, `libcuda.so`;
    /// then, for NCCL, `nvidia/nccl/lib` in the directories of Python packages.
    ///
    /// # Errors
    ///
    /// [`Error::Library`], the same at every call; [`Error::Backend`] if `ncclGetVersion` fails.
    pub fn global() -> Result<Self> {
        static LIBRARIES: OnceLock<Result<Libraries>> = OnceLock::new();
        let load = || {
            let var = |name: &str| std::env::var_os(name);
            // SAFETY: the libraries' own file names, or paths from the user's environment.
            unsafe { Self::open(&NCCL.candidates(&var), &CUDA.candidates(&var)) }
        };
        LIBRARIES.get_or_init(load).clone()
    }

    /// Loads each library from the first of its paths that can be opened.
    ///
    /// # Errors
    ///
    /// As [`global`](Self::global).
    ///
    /// # Safety
    ///
    /// The files at these paths must be NCCL and the CUDA driver, or have the same C interface:
    /// loading them runs their initialisers, and their functions are called with the prototypes of
    /// the headers.
    pub unsafe fn open(nccl: &[PathBuf], cuda: &[PathBuf]) -> Result<Self> {
        // SAFETY: the caller guarantees the files at these paths.
        let library = unsafe { NCCL.open(nccl) }?;
        // SAFETY: as above, so its symbols have the types of the table.
        let nccl = unsafe { NcclApi::resolve(&library) }.map_err(|error| NCCL.unusable(error))?;
        // SAFETY: the caller guarantees the files at these paths.
        let library = unsafe { CUDA.open(cuda) }?;
        // SAFETY: as above.
        let cuda = unsafe { CudaApi::resolve(&library) }.map_err(|error| CUDA.unusable(error))?;
        let mut version = 0;
        // SAFETY: writes one `int`.
        unsafe { nccl.ncclGetVersion(&raw mut version) }?;
        Ok(Self { nccl, cuda, version })
    }

    /// Returns NCCL's version, for example 22707 for 2.27.7.
    pub fn version(&self) -> i32 {
        self.version
    }

    /// Returns a new `ncclUniqueId`.
    ///
    /// # Errors
    ///
    /// [`Error::Backend`].
    pub fn unique_id(&self) -> Result<[u8; 128]> {
        let mut id = UniqueId([0; 128]);
        // SAFETY: writes one id.
        unsafe { self.nccl.ncclGetUniqueId(&raw mut id) }?;
        Ok(id.0)
    }
}

/// Formats a version, for example 22707 as `2.27.7`.
pub(super) fn version_text(version: i32) -> String {
    format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100)
}

impl NcclApi {
    /// Fails if the status is an error. `ncclInProgress` is not an error.
    pub(super) fn check(&self, result: NcclResult, during: &str) -> Result<()> {
        match result {
            NcclResult::SUCCESS | NcclResult::IN_PROGRESS => Ok(()),
            result => Err(self.error(result, during)),
        }
    }

    /// Returns the error for a status, with the texts of `ncclGetErrorString` and
    /// `ncclGetLastError`.
    pub(super) fn error(&self, result: NcclResult, during: &str) -> Error {
        // SAFETY: accepts any value.
        let meaning = unsafe { (self.ncclGetErrorString)(result) };
        // SAFETY: NCCL ignores the communicator and returns a buffer that it owns.
        let last = unsafe { (self.ncclGetLastError)(std::ptr::null_mut()) };
        let text = |text: *const std::ffi::c_char| match text.is_null() {
            true => String::new(),
            // SAFETY: not null, so a C string that lives as long as the library; copied at once.
            false => unsafe { CStr::from_ptr(text) }.to_string_lossy().trim().to_owned(),
        };
        let (meaning, last) = (text(meaning), text(last));
        let text = if last.is_empty() { meaning } else { format!("{meaning}: {last}") };
        let name = result.name().to_owned();
        Error::Backend { backend: "nccl", during: during.into(), name, code: result.0, text }
    }
}

/// Returns the error for a function that this version of NCCL lacks.
pub(super) fn lacks(function: &str, since: &str) -> Error {
    let what = format!("{function}, which NCCL has since {since}");
    Error::Unsupported { backend: "nccl", what }
}

impl CudaApi {
    pub(super) fn check(&self, result: CudaResult, during: &str) -> Result<()> {
        if result == CudaResult::SUCCESS {
            return Ok(());
        }
        // The suffix is a version of the symbol, not part of the documented name.
        let during = during.trim_end_matches("_v2");
        let mut name = std::ptr::null();
        // SAFETY: accepts any value, and writes one pointer.
        let known = unsafe { (self.cuGetErrorName)(result, &raw mut name) };
        let name = match known == CudaResult::SUCCESS && !name.is_null() {
            // SAFETY: not null, so a C string that the library owns.
            true => unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned(),
            false => "CUresult".into(),
        };
        let (during, text) = (during.into(), "the CUDA driver returned an error".into());
        Err(Error::Backend { backend: "nccl", during, name, code: result.0, text })
    }
}
