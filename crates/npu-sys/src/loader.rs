//! Finding CANN's libraries and the functions in them.
//!
//! A library is looked for in `$ASCEND_HOME_PATH/lib64` and then where `dlopen` looks by itself:
//! `LD_LIBRARY_PATH` and the system's cache. It is opened once per process and never closed, since
//! CANN does not survive being unloaded; hence function pointers out of it are good for ever.
//!
//! Invariant: a table of functions exists only if all its symbols were found in one library.

#![expect(unsafe_code, reason = "dlopen, dlsym, and function pointers of declared types")]

use std::env;
use std::ffi::{CStr, CString, c_void};
use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::OnceLock;

use crate::sys::{ACL_LIBRARIES, Acl};

/// Why CANN cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// No candidate could be opened.
    #[error(
        "cannot load {library}: {}; install the Ascend CANN toolkit and its driver, and source its set_env.sh, which sets ASCEND_HOME_PATH and LD_LIBRARY_PATH",
        list(tried)
    )]
    NotFound {
        /// The library's name.
        library: String,
        /// Every path tried, in order, and what the system's loader said.
        tried: Vec<Attempt>,
    },
    /// The library is there, but lacks a function this crate needs.
    #[error("{} has no function {symbol}; CANN 8.1 or later has it", library.display())]
    MissingSymbol {
        /// The library that was opened.
        library: PathBuf,
        /// The C name.
        symbol: &'static str,
    },
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

impl Acl {
    /// This process's AscendCL, loaded by the first call; the answer never changes.
    ///
    /// # Errors
    ///
    /// [`LoadError`], the same at every call.
    pub fn global() -> Result<&'static Self, LoadError> {
        static ACL: OnceLock<Result<Acl, LoadError>> = OnceLock::new();
        let load = || {
            let home = env::var_os("ASCEND_HOME_PATH").map(PathBuf::from);
            let paths = candidates(home.as_deref(), ACL_LIBRARIES);
            // SAFETY: these are AscendCL's own names, where the user's environment says CANN is.
            unsafe { Self::open(&paths) }
        };
        ACL.get_or_init(load).as_ref().map_err(Clone::clone)
    }

    /// Loads AscendCL from the first of `paths` that can be opened.
    ///
    /// # Errors
    ///
    /// [`LoadError`].
    ///
    /// # Safety
    ///
    /// Whatever is at these paths must be AscendCL, or have its C interface: opening it runs its
    /// initialisers, and its functions are called by the prototypes declared in [`sys`](crate::sys).
    pub unsafe fn open(paths: &[PathBuf]) -> Result<Self, LoadError> {
        // SAFETY: the caller vouches for what is at these paths.
        let library = unsafe { Library::open(paths) }?;
        // SAFETY: as above, so its symbols have the types of the table.
        unsafe { Self::resolve(&library) }
    }
}

/// Where to look for libraries: below CANN's home if it is known, then by bare name.
fn candidates(home: Option<&Path>, names: &[&str]) -> Vec<PathBuf> {
    let in_home = |name| home.map(|home| home.join("lib64").join(name));
    names.iter().flat_map(|name| in_home(name).into_iter().chain([PathBuf::from(name)])).collect()
}

/// An open library. It has no `Drop`: libraries stay open until the process ends.
pub(crate) struct Library {
    path: PathBuf,
    handle: NonNull<c_void>,
}

impl Library {
    /// # Safety
    ///
    /// The initialisers of whatever is at these paths must be sound to run.
    unsafe fn open(paths: &[PathBuf]) -> Result<Self, LoadError> {
        let mut tried = Vec::new();
        for path in paths {
            let Ok(name) = CString::new(path.as_os_str().as_bytes()) else {
                tried
                    .push(Attempt { path: path.clone(), reason: "the path contains a NUL".into() });
                continue;
            };
            // SAFETY: `name` is a C string; the caller vouches for the initialisers.
            let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
            match NonNull::new(handle) {
                Some(handle) => return Ok(Self { path: path.clone(), handle }),
                None => tried.push(Attempt { path: path.clone(), reason: last_error() }),
            }
        }
        let name = paths.last().and_then(|path| path.file_name()).unwrap_or_default();
        Err(LoadError::NotFound { library: name.to_string_lossy().into_owned(), tried })
    }

    /// The address of a function.
    pub(crate) fn symbol(&self, symbol: &'static str) -> Result<NonNull<c_void>, LoadError> {
        let name = CString::new(symbol).expect("the table's names have no NUL");
        // SAFETY: the handle is of an open library, since none is ever closed; `name` is a C
        // string.
        let address = unsafe { libc::dlsym(self.handle.as_ptr(), name.as_ptr()) };
        NonNull::new(address)
            .ok_or_else(|| LoadError::MissingSymbol { library: self.path.clone(), symbol })
    }
}

/// What the system's loader says about this thread's last failure.
fn last_error() -> String {
    // SAFETY: `dlerror` has no preconditions.
    let text = unsafe { libc::dlerror() };
    if text.is_null() {
        return "no reason given".into();
    }
    // SAFETY: not null, so a C string, which stays valid until this thread's next call of a dl
    // function; it is copied before.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_string_lossy().into_owned()
}

/// Declares a struct of C functions, and `resolve`, which finds them all in a library.
macro_rules! table {
    (
        $(#[$meta:meta])*
        pub struct $name:ident {
            $($(#[$doc:meta])* $field:ident = $symbol:literal: $prototype:ty,)*
        }
    ) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug)]
        pub struct $name {
            $($(#[$doc])* pub(crate) $field: $prototype,)*
        }

        #[expect(unsafe_code, reason = "gives an address the type its declaration has")]
        impl $name {
            /// # Safety
            ///
            /// Each symbol must be a function of the prototype declared here.
            pub(crate) unsafe fn resolve(
                library: &$crate::loader::Library,
            ) -> Result<Self, $crate::LoadError> {
                Ok(Self {
                    $($field: {
                        let address = library.symbol($symbol)?.as_ptr();
                        // SAFETY: not null; the caller vouches for the prototype. On the platforms
                        // CANN exists for, function and data pointers have one representation.
                        unsafe { std::mem::transmute::<*mut std::ffi::c_void, $prototype>(address) }
                    },)*
                })
            }
        }
    };
}
pub(crate) use table;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn home_comes_before_the_systems_own_search() {
        let paths = candidates(Some(Path::new("/opt/cann")), &["liba.so", "libb.so"]);
        let expected = ["/opt/cann/lib64/liba.so", "liba.so", "/opt/cann/lib64/libb.so", "libb.so"];
        assert_eq!(paths, expected.map(PathBuf::from));
        assert_eq!(candidates(None, &["liba.so"]), [PathBuf::from("liba.so")]);
    }
}
