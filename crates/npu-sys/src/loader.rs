//! Finding CANN's libraries and the functions in them.
//!
//! A library is looked for in `$ASCEND_HOME_PATH/lib64`, in the folders of `LD_LIBRARY_PATH`, and then where
//! `dlopen` looks by itself, which has the system's cache besides. It is opened once per process and never closed, since
//! CANN does not survive being unloaded; hence function pointers out of it are good for ever.
//!
//! CANN has moved functions between libraries, so a family of functions has generations of names. The
//! first generation of which anything can be opened is taken whole, later ones are left alone: two
//! generations in one process would be two copies of the same state.

#![expect(unsafe_code, reason = "dlopen, dlsym")]

use std::env;
use std::ffi::{CStr, CString, OsStr, c_void};
use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;

use crate::installed::version_of;

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
    /// The libraries are there, but lack a function this crate needs.
    #[error("{} has no function {symbol}; CANN 8.1 has it", files(libraries, found.as_deref()))]
    MissingSymbol {
        /// The libraries that were searched.
        libraries: Vec<PathBuf>,
        /// The version of the CANN they are of, for example `8.0.RC3`, if its installer's file is there.
        found: Option<String>,
        /// The C name.
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

fn files(libraries: &[PathBuf], found: Option<&str>) -> String {
    if libraries.is_empty() {
        return "what was given for CANN".into();
    }
    let paths: Vec<_> = libraries.iter().map(|path| path.display().to_string()).collect();
    match found {
        Some(version) => format!("CANN {version} ({})", paths.join(" or ")),
        None => paths.join(" or "),
    }
}

/// The libraries of one family of functions. They stay open until the process ends.
pub(crate) struct Libraries {
    opened: Vec<(PathBuf, NonNull<c_void>)>,
}

impl Libraries {
    /// The first of CANN's generations that is there.
    pub(crate) fn of_cann(generations: &[&[&str]]) -> Result<Self, LoadError> {
        let home = env::var_os("ASCEND_HOME_PATH").map(PathBuf::from);
        let path = env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
        let files = |names: &[&str]| {
            names.iter().map(|name| candidates(home.as_deref(), &path, name)).collect::<Vec<_>>()
        };
        let generations: Vec<_> = generations.iter().map(|names| files(names)).collect();
        // SAFETY: these are CANN's own names, where the user's environment says CANN is.
        unsafe { Self::open_first(&generations) }
    }

    /// All of these files that can be opened.
    ///
    /// # Safety
    ///
    /// The initialisers of whatever is at these paths must be sound to run.
    pub(crate) unsafe fn open(paths: &[PathBuf]) -> Result<Self, LoadError> {
        let generation = paths.iter().map(|path| vec![path.clone()]).collect();
        // SAFETY: the caller vouches for the initialisers.
        unsafe { Self::open_first(&[generation]) }
    }

    /// Of generations of libraries, each with its candidates, the first of which anything opens.
    ///
    /// # Safety
    ///
    /// The initialisers of whatever is at these paths must be sound to run.
    unsafe fn open_first(generations: &[Vec<Vec<PathBuf>>]) -> Result<Self, LoadError> {
        let mut tried = Vec::new();
        for generation in generations {
            let mut opened = Vec::new();
            for paths in generation {
                // SAFETY: the caller vouches for the initialisers.
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

    /// The address of a function, in the first library that has it.
    pub(crate) fn symbol(&self, symbol: &'static str) -> Option<NonNull<c_void>> {
        let name = CString::new(symbol).expect("the tables' names have no NUL");
        self.opened.iter().find_map(|(_, handle)| {
            // SAFETY: the handle is of an open library, since none is ever closed; `name` is a C
            // string.
            NonNull::new(unsafe { libc::dlsym(handle.as_ptr(), name.as_ptr()) })
        })
    }

    /// What a table made of them says of where it comes from. It stays, as the libraries do.
    pub(crate) fn origin(&self) -> &'static str {
        files(&self.paths(), self.version().as_deref()).leak()
    }

    /// An error of making a table of them, with their files and what they are of.
    pub(crate) fn explain(&self, error: LoadError) -> LoadError {
        match error {
            LoadError::MissingSymbol { symbol, .. } => {
                let (libraries, found) = (self.paths(), self.version());
                LoadError::MissingSymbol { libraries, found, symbol }
            }
            other @ LoadError::NotFound { .. } => other,
        }
    }

    /// The version of the CANN that they are of, if its installer's file is there.
    fn version(&self) -> Option<String> {
        self.opened.iter().find_map(|(path, _)| version_of(path))
    }

    /// The files that were opened.
    fn paths(&self) -> Vec<PathBuf> {
        self.opened.iter().map(|(path, _)| path.clone()).collect()
    }
}

/// Where to look for a library: below CANN's home if it is known, in those folders of `LD_LIBRARY_PATH`
/// that have a file of this name, and by bare name. `dlopen` would look into the same folders, but not say
/// where it found what it opened.
fn candidates(home: Option<&Path>, path: &OsStr, name: &str) -> Vec<PathBuf> {
    let in_home = home.map(|home| home.join("lib64").join(name));
    let in_path = env::split_paths(path).filter(|folder| !folder.as_os_str().is_empty());
    let in_path = in_path.map(|folder| folder.join(name)).filter(|file| file.exists());
    in_home.into_iter().chain(in_path).chain([PathBuf::from(name)]).collect()
}

/// The first of `paths` that can be opened.
///
/// # Safety
///
/// The initialisers of whatever is at these paths must be sound to run.
unsafe fn open_one(
    paths: &[PathBuf],
    tried: &mut Vec<Attempt>,
) -> Option<(PathBuf, NonNull<c_void>)> {
    for path in paths {
        let Ok(name) = CString::new(path.as_os_str().as_bytes()) else {
            tried.push(Attempt { path: path.clone(), reason: "the path contains a NUL".into() });
            continue;
        };
        // SAFETY: `name` is a C string; the caller vouches for the initialisers.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        match NonNull::new(handle) {
            Some(handle) => return Some((path.clone(), handle)),
            None => tried.push(Attempt { path: path.clone(), reason: last_error() }),
        }
    }
    None
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn home_comes_before_the_systems_own_search() {
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
