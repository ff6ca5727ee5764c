//! NCCL and CUDA's driver, loaded; their statuses as errors; the functions that need no
//! communicator.

#![expect(unsafe_code, reason = "calls C")]

use std::ffi::CStr;
use std::path::PathBuf;
use std::sync::OnceLock;

use super::loader::{CUDA, NCCL};
use super::sys::{CudaApi, CudaResult, NcclApi, NcclResult, UniqueId};
use crate::{Error, Result};

/// NCCL and the driver beneath it, open until the process ends.
#[derive(Clone, Copy, Debug)]
pub struct Libraries {
    pub(super) nccl: NcclApi,
    pub(super) cuda: CudaApi,
    version: i32,
}

impl Libraries {
    /// This process's libraries, loaded by the first call; the answer never changes.
    ///
    /// Each is the file that `COLLECTIVE_NCCL_LIB` or `COLLECTIVE_CUDA_LIB` names; else what the
    /// system's loader finds as `libnccl.so.2`, `libnccl.so`, `libcuda.so.1`, `libcuda.so`; else, for
    /// NCCL, what Python's packages have in `nvidia/nccl/lib`.
    ///
    /// # Errors
    ///
    /// [`Error::Library`], the same at every call; [`Error::Backend`] if NCCL does not tell its
    /// version.
    pub fn global() -> Result<Self> {
        static LIBRARIES: OnceLock<Result<Libraries>> = OnceLock::new();
        let load = || {
            let var = |name: &str| std::env::var_os(name);
            // SAFETY: these are the libraries' own names, or where the user's environment says they
            // are.
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
    /// Whatever is at these paths must be NCCL and CUDA's driver, or have their C interface: opening
    /// it runs its initialisers, and its functions are called by the prototypes of the headers.
    pub unsafe fn open(nccl: &[PathBuf], cuda: &[PathBuf]) -> Result<Self> {
        // SAFETY: the caller vouches for what is at these paths.
        let library = unsafe { NCCL.open(nccl) }?;
        // SAFETY: as above, so its symbols have the types of the table.
        let nccl = unsafe { NcclApi::resolve(&library) }.map_err(|error| NCCL.unusable(error))?;
        // SAFETY: the caller vouches for what is at these paths.
        let library = unsafe { CUDA.open(cuda) }?;
        // SAFETY: as above.
        let cuda = unsafe { CudaApi::resolve(&library) }.map_err(|error| CUDA.unusable(error))?;
        let mut version = 0;
        // SAFETY: writes one `int`.
        unsafe { nccl.ncclGetVersion(&raw mut version) }?;
        Ok(Self { nccl, cuda, version })
    }

    /// NCCL's version, for example 22707 for 2.27.7.
    pub fn version(&self) -> i32 {
        self.version
    }

    /// A fresh id of a group, as NCCL makes them.
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

/// A version as people write it.
pub(super) fn version_text(version: i32) -> String {
    format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100)
}

impl NcclApi {
    /// An error if the status is one; a call that goes on in the background is none.
    pub(super) fn check(&self, result: NcclResult, during: &str) -> Result<()> {
        match result {
            NcclResult::SUCCESS | NcclResult::IN_PROGRESS => Ok(()),
            result => Err(self.error(result, during)),
        }
    }

    /// The status, with NCCL's own words of it and of what happened last.
    pub(super) fn error(&self, result: NcclResult, during: &str) -> Error {
        // SAFETY: takes any number.
        let meaning = unsafe { (self.ncclGetErrorString)(result) };
        // SAFETY: NCCL ignores the communicator and returns a buffer of its own.
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

/// This NCCL is too old for something.
pub(super) fn lacks(function: &str, since: &str) -> Error {
    let what = format!("{function}, which NCCL has since {since}");
    Error::Unsupported { backend: "nccl", what }
}

impl CudaApi {
    pub(super) fn check(&self, result: CudaResult, during: &str) -> Result<()> {
        if result == CudaResult::SUCCESS {
            return Ok(());
        }
        // The end of a symbol's name says which version of the function it is.
        let during = during.trim_end_matches("_v2");
        let mut name = std::ptr::null();
        // SAFETY: takes any number, and writes one pointer.
        let known = unsafe { (self.cuGetErrorName)(result, &raw mut name) };
        let name = match known == CudaResult::SUCCESS && !name.is_null() {
            // SAFETY: not null, so a C string of the library's own.
            true => unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned(),
            false => "CUresult".into(),
        };
        let (during, text) = (during.into(), "CUDA's driver refused".into());
        Err(Error::Backend { backend: "nccl", during, name, code: result.0, text })
    }
}
