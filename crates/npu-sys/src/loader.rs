//! Opens CANN's libraries and looks up their functions.
//!
//! A library is searched in `$ASCEND_HOME_PATH/lib64`, in the folders of `LD_LIBRARY_PATH`, and
//! then by `dlopen`, which also searches the system's cache. It is opened once per process and
//! never closed, since CANN cannot be unloaded; so its function pointers stay valid.
//!
//! CANN has moved functions between libraries, so a family of functions has several generations of
//! library names. Only the first generation of which a library can be opened is used: two
//! generations in one process would have two copies of the same state.

#![expect(unsafe_code, reason = "runs the initializers of libraries")]

use std::env;
use std::error::Error as _;
use std::ffi::{OsStr, c_void};
use std::fmt;
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

use crate::installed::version_of;

/// Error for a missing or too old CANN.
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
        /// Every path tried, in order, with the loader's error.
        tried: Vec<Attempt>,
    },
    /// The libraries lack a required function.
    #[error("{} has no function {symbol}; CANN 8.1 has it", files(libraries, found.as_deref()))]
    MissingSymbol {
        /// The libraries that were searched.
        libraries: Vec<PathBuf>,
        /// The version of the installed CANN, for example `8.0.RC3`; `None` without an installer's
        /// file.
        found: Option<String>,
        /// The function's C name.
        symbol: &'static str,
    },
}

impl LoadError {
    pub(crate) const fn missing(symbol: &'static str) -> Self {
        Self::MissingSymbol { libraries: Vec::new(), found: None, symbol }
    }
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

fn files(libraries: &[PathBuf], found: Option<&str>) -> String {
    if libraries.is_empty() {
        return "the given CANN".into();
    }
    let paths: Vec<_> = libraries.iter().map(|path| path.display().to_string()).collect();
    match found {
        Some(version) => format!("CANN {version} ({})", paths.join(" or ")),
        None => paths.join(" or "),
    }
}

/// The libraries of one family of functions. They stay open until the process ends.
pub(crate) struct Libraries {
    opened: Vec<(PathBuf, ManuallyDrop<Library>)>,
}

impl Libraries {
    /// Opens the first of these generations of CANN's libraries that is installed.
    pub(crate) fn of_cann(generations: &[&[&str]]) -> Result<Self, LoadError> {
        let home = env::var_os("ASCEND_HOME_PATH").map(PathBuf::from);
        let path = env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
        let files = |names: &[&str]| {
            names.iter().map(|name| candidates(home.as_deref(), &path, name)).collect::<Vec<_>>()
        };
        let generations: Vec<_> = generations.iter().map(|names| files(names)).collect();
        // SAFETY: these are CANN's names in the folders that the user's environment sets for CANN.
        unsafe { Self::open_first(&generations) }
    }

    /// Opens all of these files that can be opened; at least one.
    ///
    /// # Safety
    ///
    /// The initializers of the libraries at these paths must be sound to run.
    pub(crate) unsafe fn open(paths: &[PathBuf]) -> Result<Self, LoadError> {
        let generation = paths.iter().map(|path| vec![path.clone()]).collect();
        // SAFETY: the caller guarantees the initializers.
        unsafe { Self::open_first(&[generation]) }
    }

    /// Opens the first generation of which a library can be opened. Each library has candidate
    /// paths.
    ///
    /// # Safety
    ///
    /// The initializers of the libraries at these paths must be sound to run.
    unsafe fn open_first(generations: &[Vec<Vec<PathBuf>>]) -> Result<Self, LoadError> {
        let mut tried = Vec::new();
        for generation in generations {
            let mut opened = Vec::new();
            for paths in generation {
                // SAFETY: the caller guarantees the initializers.
                opened.extend(unsafe { open_one(paths, &mut tried) });
            }
            if !opened.is_empty() {
                return Ok(Self { opened });
            }
        }
        let first = generations.first().and_then(|names| names.first()?.last()?.file_name());
        let library = first.unwrap_or_default().to_string_lossy().into_owned();
        Err(LoadError::NotFound { library, tried })
    }

    /// Returns the address of a function in the first library that has it.
    pub(crate) fn symbol(&self, symbol: &'static str) -> Option<NonNull<c_void>> {
        self.opened.iter().find_map(|(_, library)| {
            // SAFETY: only the address is used, and the library is never closed.
            let address = unsafe { library.get::<*mut c_void>(symbol) };
            NonNull::new(address.ok()?.as_raw_ptr())
        })
    }

    /// The libraries and their version, for the errors of a table. Leaked, since a table is never
    /// freed.
    pub(crate) fn origin(&self) -> &'static str {
        files(&self.paths(), self.version().as_deref()).leak()
    }

    /// Adds the libraries and their version to a [`LoadError::MissingSymbol`].
    pub(crate) fn explain(&self, error: LoadError) -> LoadError {
        match error {
            LoadError::MissingSymbol { symbol, .. } => {
                let (libraries, found) = (self.paths(), self.version());
                LoadError::MissingSymbol { libraries, found, symbol }
            }
            other @ LoadError::NotFound { .. } => other,
        }
    }

    /// The version of the installed CANN; `None` without an installer's file.
    fn version(&self) -> Option<String> {
        self.opened.iter().find_map(|(path, _)| version_of(path))
    }

    /// The files that were opened.
    fn paths(&self) -> Vec<PathBuf> {
        self.opened.iter().map(|(path, _)| path.clone()).collect()
    }
}

/// Candidate paths of a library: in CANN's home, in the folders of `LD_LIBRARY_PATH` that have such
/// a file, and the bare name. `dlopen` would search `LD_LIBRARY_PATH`, too, but not return the
/// path.
fn candidates(home: Option<&Path>, path: &OsStr, name: &str) -> Vec<PathBuf> {
    let in_home = home.map(|home| home.join("lib64").join(name));
    let in_path = env::split_paths(path).filter(|folder| !folder.as_os_str().is_empty());
    let in_path = in_path.map(|folder| folder.join(name)).filter(|file| file.exists());
    in_home.into_iter().chain(in_path).chain([PathBuf::from(name)]).collect()
}

/// Opens the first of `paths` that can be opened; adds failures to `tried`.
///
/// # Safety
///
/// The initializers of the libraries at these paths must be sound to run.
unsafe fn open_one(
    paths: &[PathBuf],
    tried: &mut Vec<Attempt>,
) -> Option<(PathBuf, ManuallyDrop<Library>)> {
    for path in paths {
        // SAFETY: the caller guarantees the initializers.
        match unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) } {
            Ok(library) => return Some((path.clone(), ManuallyDrop::new(library))),
            Err(error) => {
                let reason = error.source().unwrap_or(&error).to_string();
                tried.push(Attempt { path: path.clone(), reason });
            }
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_are_searched_in_canns_home_first() {
        let folder = tempfile::tempdir().unwrap();
        let there = folder.path().join("liba.so");
        std::fs::write(&there, "").unwrap();
        let path = env::join_paths([Path::new("/nowhere"), Path::new(""), folder.path()]).unwrap();
        let home = Some(Path::new("/opt/cann"));
        let in_home = PathBuf::from("/opt/cann/lib64/liba.so");
        let bare = PathBuf::from("liba.so");
        assert_eq!(candidates(home, &path, "liba.so"), [in_home, there, bare.clone()]);
        assert_eq!(candidates(None, OsStr::new(""), "liba.so"), [bare]);
    }
}
