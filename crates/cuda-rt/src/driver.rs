//! NVIDIA's driver, libcuda: its functions, version and errors.
//!
//! libcuda and the functions that cudarc calls are looked up before the first call, since cudarc
//! panics if one is missing.

#![expect(unsafe_code, reason = "opens a library, and calls the driver")]

use std::cmp::Reverse;
use std::path::PathBuf;
use std::sync::OnceLock;

use cudarc::driver::{CudaContext, DriverError, result, sys};

use crate::cache::Version;
use crate::error::{CudaError, Result};
use crate::library::Library;

/// Opens the driver once and checks that it has all `SYMBOLS`.
pub(crate) fn load() -> Result<()> {
    static DRIVER: OnceLock<Result<()>> = OnceLock::new();
    let open = || {
        let paths = ["libcuda.so.1", "libcuda.so"].map(PathBuf::from);
        // SAFETY: these are the driver's names.
        let library = unsafe { Library::open("NVIDIA's driver (libcuda)", &paths, "", INSTALL) }?;
        has_all(&library)
    };
    DRIVER.get_or_init(open).clone()
}

fn has_all(library: &Library) -> Result<()> {
    SYMBOLS.iter().try_for_each(|symbol| library.symbol(symbol).map(|_| ()))
}

/// Converts an error of the driver; `during` is the failed operation.
pub(crate) fn failed(during: &'static str) -> impl Fn(DriverError) -> CudaError {
    move |error| {
        let name = error.error_name().map(|name| name.to_string_lossy().into_owned());
        let name = name.unwrap_or_else(|_| "unknown".into());
        CudaError::Driver { during, name, code: error.0 as u32 }
    }
}

/// Makes a context current, for a `drop`: `CudaContext::bind_to_thread` would take, and lose, an
/// error that an earlier `drop` has recorded for the next call.
pub(crate) fn make_current(context: &CudaContext) -> Result<(), DriverError> {
    // SAFETY: the context is alive as long as its owner.
    unsafe { result::ctx::set_current(context.cu_ctx()) }
}

/// Keeps what the driver can load, the newest first; if all are newer than the driver, only the
/// oldest.
pub(crate) fn loadable<T>(
    mut all: Vec<T>,
    version: impl Fn(&T) -> Version,
    driver: Option<Version>,
) -> Vec<T> {
    all.sort_by_key(|one| Reverse(version(one)));
    let newer = all.partition_point(|one| driver.is_some_and(|driver| version(one) > driver));
    all.drain(..newer.min(all.len().saturating_sub(1)));
    all
}

/// The driver's CUDA version; `None` without a driver.
pub(crate) fn version() -> Option<Version> {
    load().ok()?;
    let mut version = 0;
    // SAFETY: the driver has this function; it writes one number.
    let status = unsafe { sys::cuDriverGetVersion(&raw mut version) };
    status.result().ok()?;
    Some((version / 1000, version % 1000 / 10))
}

const INSTALL: &str = "install NVIDIA's driver 525 or later (CUDA 12); in a container, start it with \
    the GPU (`--gpus all`)";

/// The functions that cudarc calls for this crate.
const SYMBOLS: &[&str] = &[
    "cuInit",
    "cuDriverGetVersion",
    "cuGetErrorName",
    "cuGetErrorString",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDeviceGetName",
    "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxRelease_v2",
    "cuCtxGetCurrent",
    "cuCtxSetCurrent",
    "cuCtxSynchronize",
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuDeviceGetDefaultMemPool",
    "cuMemPoolSetAttribute",
    "cuMemAllocAsync",
    "cuMemFreeAsync",
    "cuMemHostAlloc",
    "cuMemFreeHost",
    "cuMemsetD8Async",
    "cuMemsetD32Async",
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventQuery",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuStreamSynchronize",
    "cuStreamIsCapturing",
    "cuModuleLoadData",
    "cuModuleGetFunction",
    "cuLaunchKernel",
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loadable_prefers_the_newest_version_that_is_not_newer_than_the_driver() {
        let of = |driver| loadable(vec![(12, 4), (13, 0), (12, 9)], |one| *one, driver);
        assert_eq!(of(None), [(13, 0), (12, 9), (12, 4)]);
        assert_eq!(of(Some((13, 1))), of(None));
        assert_eq!(of(Some((12, 9))), [(12, 9), (12, 4)]);
        assert_eq!(of(Some((12, 8))), [(12, 4)]);
        assert_eq!(of(Some((12, 1))), [(12, 4)]);
        assert_eq!(loadable(Vec::<Version>::new(), |one| *one, None), []);
    }

    #[test]
    fn an_old_driver_is_an_error_that_names_the_missing_function() {
        // SAFETY: the C library is already part of this process.
        let libc = unsafe { Library::open("libcuda", &["libc.so.6".into()], "", INSTALL) }.unwrap();
        let text = has_all(&libc).unwrap_err().to_string();
        assert!(
            text.starts_with("libc.so.6 has no function cuInit; install NVIDIA's driver"),
            "{text}"
        );
    }
}
