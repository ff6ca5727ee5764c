//! CANN, loaded; its errors as this crate's.

#![expect(unsafe_code, reason = "opens libraries, and asks HCCL for its words")]

use std::ffi::{CStr, c_void};
use std::path::PathBuf;
use std::ptr::NonNull;
use std::sync::{Arc, OnceLock};

use npu_sys::sys::{Acl, Hccl, HcclResult, Nnop, Ops};
use npu_sys::{LoadError, Status};

use crate::{Error, Result};

/// AscendCL and HCCL, and CANN's operators if they are there; open until the process ends.
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
    /// This process's libraries, loaded by the first call; the answer never changes.
    ///
    /// They are `libascendcl.so`, `libhccl.so`, `libnnopbase.so` and `libopapi.so` or its successors,
    /// in `$ASCEND_HOME_PATH/lib64` or where the system's loader finds them.
    ///
    /// # Errors
    ///
    /// [`Error::Library`], the same at every call. Operators that are missing are none: without them
    /// there are no averages.
    pub fn global() -> Result<Self> {
        static LIBRARIES: OnceLock<Result<Libraries>> = OnceLock::new();
        let load = || {
            let (acl, hccl) = (Acl::global().copied(), Hccl::global().copied());
            Self::new(acl, hccl, Nnop::global().copied(), Ops::global().copied())
        };
        LIBRARIES.get_or_init(load).clone()
    }

    /// Loads each family of functions from those of `paths` that can be opened.
    ///
    /// # Errors
    ///
    /// As [`global`](Self::global).
    ///
    /// # Safety
    ///
    /// Whatever is at these paths must be CANN's, or have its C interface: opening it runs its
    /// initialisers, and its functions are called by the prototypes of the headers.
    pub unsafe fn open(paths: &[PathBuf]) -> Result<Self> {
        // SAFETY: the caller vouches for what is at these paths.
        let acl = unsafe { Acl::open(paths) };
        // SAFETY: likewise.
        let hccl = unsafe { Hccl::open(paths) };
        // SAFETY: likewise.
        let nnop = unsafe { Nnop::open(paths) };
        // SAFETY: likewise.
        let ops = unsafe { Ops::open(paths) };
        Self::new(acl, hccl, nnop, ops)
    }

    /// The functions that `find` finds by their C names.
    ///
    /// # Errors
    ///
    /// As [`global`](Self::global).
    ///
    /// # Safety
    ///
    /// What is found under a name must be a function of the prototype in CANN's headers, for as long
    /// as the process lives.
    pub unsafe fn from_symbols(
        find: &dyn Fn(&'static str) -> Option<NonNull<c_void>>,
    ) -> Result<Self> {
        // SAFETY: the caller vouches for what is found.
        let acl = unsafe { Acl::from_symbols(find) };
        // SAFETY: likewise.
        let hccl = unsafe { Hccl::from_symbols(find) };
        // SAFETY: likewise.
        let nnop = unsafe { Nnop::from_symbols(find) };
        // SAFETY: likewise.
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

/// A family that cannot be used, by the name of its library.
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

/// The number of an error of HCCL's, if it is one.
pub(super) fn hccl_code(error: &Error) -> Option<i32> {
    match error {
        Error::Backend { backend: "hccl", name, code, .. } if name.starts_with("HC") => Some(*code),
        _ => None,
    }
}

/// `HCCL_E_TIMEOUT`.
pub(super) const TIMEOUT: i32 = 9;

impl Tables {
    /// An error of `npu-sys` as this crate's.
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
                text: "it made no object".into(),
            },
            other => Error::InvalidArgument(other.to_string()),
        }
    }

    /// A number that `during` gave, with CANN's own words and with what to do.
    pub(super) fn status(&self, during: &str, status: Status) -> Error {
        let (family, words) = match status {
            Status::Hccl(code) => ("HcclResult", self.words(code)),
            Status::Aclnn(_) => ("aclnnStatus", "an operator refused".into()),
            _ => ("aclError", "AscendCL refused".into()),
        };
        let text = match status {
            Status::Hccl(HcclResult(TIMEOUT)) => format!(
                "{words}: HCCL waits as long as HCCL_CONNECT_TIMEOUT says (120 s unless set) for ranks \
                 that join, and as long as HCCL_EXEC_TIMEOUT says (1836 s) for ranks in an operation"
            ),
            _ => words,
        };
        let (during, name) = (during.into(), status.name().unwrap_or(family).to_owned());
        Error::Backend { backend: "hccl", during, name, code: status.code(), text }
    }

    fn words(&self, code: HcclResult) -> String {
        // SAFETY: hccl.h, `HcclGetErrorString`: takes any number.
        match unsafe { self.hccl.HcclGetErrorString(code) } {
            Ok(text) if !text.is_null() => {
                // SAFETY: not null, so a C string of the library's own, which is never closed.
                unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
            }
            _ => "HCCL refused".into(),
        }
    }
}
