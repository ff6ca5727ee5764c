//! [`Libraries`]: CANN's libraries, loaded at run time. Converts their errors to this crate's.

#![expect(unsafe_code, reason = "opens libraries, and reads HCCL's error texts")]

use std::ffi::{CStr, c_void};
use std::ptr::NonNull;
use std::sync::{Arc, OnceLock};

use npu_sys::sys::{Acl, Hccl, HcclResult, Nnop, Ops};
use npu_sys::{LoadError, Status};

use crate::{Error, Result};

/// AscendCL, HCCL and, if present, CANN's operators. They stay loaded until the process ends.
#[derive(Clone, Debug)]
pub struct Libraries(Arc<Tables>);

#[derive(Debug)]
pub(super) struct Tables {
    pub(super) acl: Acl,
    pub(super) hccl: Hccl,
    pub(super) nnop: Loaded<Nnop>,
    pub(super) ops: Loaded<Ops>,
}

/// A table of functions, or why its library could not be loaded.
type Loaded<T> = std::result::Result<T, LoadError>;

impl Libraries {
    /// Returns this process's libraries. The first call loads them; every call returns the same
    /// result.
    ///
    /// They are `libascendcl.so`, `libhccl.so`, `libnnopbase.so` and `libopapi.so` or its
    /// successors, in `$ASCEND_HOME_PATH/lib64` or where the dynamic loader finds them.
    ///
    /// # Errors
    ///
    /// [`Error::Library`], the same at every call. Missing operators are not an error, but averages
    /// are unsupported without them.
    pub fn global() -> Result<Self> {
        static LIBRARIES: OnceLock<Result<Libraries>> = OnceLock::new();
        let load = || {
            let (acl, hccl) = (Acl::global().copied(), Hccl::global().copied());
            Self::new(acl, hccl, Nnop::global().copied(), Ops::global().copied())
        };
        LIBRARIES.get_or_init(load).clone()
    }

    /// Uses the functions that `find` returns for their C names.
    ///
    /// # Errors
    ///
    /// As [`global`](Self::global).
    ///
    /// # Safety
    ///
    /// `find` returns functions with the prototypes of CANN's headers, valid as long as the process
    /// lives.
    pub unsafe fn from_symbols(
        find: &dyn Fn(&'static str) -> Option<NonNull<c_void>>,
    ) -> Result<Self> {
        // SAFETY: the caller guarantees the functions.
        let acl = unsafe { Acl::from_symbols(find) };
        // SAFETY: as above.
        let hccl = unsafe { Hccl::from_symbols(find) };
        // SAFETY: as above.
        let nnop = unsafe { Nnop::from_symbols(find) };
        // SAFETY: as above.
        let ops = unsafe { Ops::from_symbols(find) };
        Self::new(acl, hccl, nnop, ops)
    }

    /// AscendCL and HCCL are required.
    fn new(
        acl: Loaded<Acl>,
        hccl: Loaded<Hccl>,
        nnop: Loaded<Nnop>,
        ops: Loaded<Ops>,
    ) -> Result<Self> {
        let acl = acl.map_err(|error| missing(ACL, error))?;
        let hccl = hccl.map_err(|error| missing(HCCL, error))?;
        Ok(Self(Arc::new(Tables { acl, hccl, nnop, ops })))
    }

    pub(super) fn tables(&self) -> &Arc<Tables> {
        &self.0
    }
}

const ACL: &str = "libascendcl.so";
const HCCL: &str = "libhccl.so";
const INSTALL: &str = "install the Ascend CANN toolkit (8.1 or later) and its driver, and source its \
                       set_env.sh, which sets ASCEND_HOME_PATH and LD_LIBRARY_PATH";

/// Returns the error for a library that cannot be loaded.
fn missing(library: &'static str, error: LoadError) -> Error {
    let (reason, tried) = match error {
        LoadError::NotFound { tried, .. } => {
            let reasons: Vec<_> = tried.iter().map(|attempt| attempt.reason.clone()).collect();
            let tried = tried.iter().map(|attempt| attempt.path.display().to_string()).collect();
            (format!("it cannot be loaded: {}", reasons.join("; ")), tried)
        }
        other => (other.to_string(), Vec::new()),
    };
    Error::Library { library, reason, tried, install: INSTALL }
}

/// Returns the code of an HCCL error; `None` for other errors.
pub(super) fn hccl_code(error: &Error) -> Option<i32> {
    match error {
        Error::Backend { backend: "hccl", name, code, .. } if name.starts_with("HC") => Some(*code),
        _ => None,
    }
}

/// `HCCL_E_TIMEOUT`.
pub(super) const TIMEOUT: i32 = 9;

impl Tables {
    /// Converts an error of `npu-sys`.
    pub(super) fn error(&self, error: npu_sys::Error) -> Error {
        match error {
            npu_sys::Error::Load(error) => missing(ACL, error),
            npu_sys::Error::Status { function, status } => self.status(function, status),
            npu_sys::Error::NoFunction { function, .. } => {
                Error::Unsupported { backend: "hccl", what: format!("{function}: {error}") }
            }
            npu_sys::Error::Null { function } => Error::Backend {
                backend: "hccl",
                during: function.into(),
                name: "null".into(),
                code: 0,
                text: "the function returned null".into(),
            },
            other => Error::InvalidArgument(other.to_string()),
        }
    }

    /// Returns the error for a status that `during` returned, with CANN's error text.
    pub(super) fn status(&self, during: &str, status: Status) -> Error {
        let (family, message) = match status {
            Status::Hccl(code) => ("HcclResult", self.error_string(code)),
            Status::Aclnn(_) => ("aclnnStatus", "an operator failed".into()),
            _ => ("aclError", "AscendCL returned an error".into()),
        };
        let text = match status {
            Status::Hccl(HcclResult(TIMEOUT)) => format!(
                "{message}: HCCL waits for HCCL_CONNECT_TIMEOUT (120 s by default) for ranks to \
                 join, and for HCCL_EXEC_TIMEOUT (1836 s by default) for ranks in an operation"
            ),
            _ => message,
        };
        let (during, name) = (during.into(), status.name().unwrap_or(family).to_owned());
        Error::Backend { backend: "hccl", during, name, code: status.code(), text }
    }

    fn error_string(&self, code: HcclResult) -> String {
        // SAFETY: hccl.h, `HcclGetErrorString`: accepts any value.
        match unsafe { self.hccl.HcclGetErrorString(code) } {
            Ok(text) if !text.is_null() => {
                // SAFETY: not null, so a C string of the library, which is never closed.
                unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
            }
            _ => "HCCL returned an error".into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_is_not_found_names_the_paths_tried() {
        // SAFETY: there is nothing at the path.
        let acl = unsafe { Acl::open(&["/nonexistent/libascendcl.so".into()]) };
        let error = missing(ACL, acl.unwrap_err());
        let Error::Library { library: ACL, tried, .. } = &error else { panic!("{error}") };
        assert_eq!(tried, &["/nonexistent/libascendcl.so"]);
    }
}
