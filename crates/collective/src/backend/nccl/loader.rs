//! Loads NCCL and the CUDA driver at run time, and declares their function tables.
//!
//! A library is opened on first use and never closed, because neither the driver nor NCCL supports
//! unloading; so its function pointers stay valid. An environment variable may give the path of the
//! one file to load. Without it, the dynamic loader is tried with the usual names, then CUDA's
//! directories and those of Python packages ([`library`]).
//!
//! Invariant: a function table exists only if all its required symbols were found in one library.

#![expect(unsafe_code, reason = "opens libraries")]

use std::ffi::OsString;
use std::path::PathBuf;

use cuda_rt::CudaError;
use cuda_rt::library::{self, Library};

use crate::{Error, Result};

/// A library to load: its names, where to search, and how to install it.
#[derive(Debug)]
pub(super) struct Wanted {
    /// File names for the dynamic loader, in order; errors use the first.
    names: &'static [&'static str],
    /// Environment variable with the path of the one file to load.
    variable: &'static str,
    /// Python packages that contain it.
    packages: &'static [&'static str],
    /// How to install it, for errors.
    install: &'static str,
}

pub(super) const NCCL: Wanted = Wanted {
    names: &["libnccl.so.2", "libnccl.so"],
    variable: "COLLECTIVE_NCCL_LIB",
    packages: &["nccl"],
    install: "install NCCL 2.19 or later (libnccl2 from NVIDIA's Debian repository, or pip install \
              nvidia-nccl-cu12), or set COLLECTIVE_NCCL_LIB to its path",
};

pub(super) const CUDA: Wanted = Wanted {
    names: &["libcuda.so.1", "libcuda.so"],
    variable: "COLLECTIVE_CUDA_LIB",
    packages: &[],
    install: "install NVIDIA's driver, 470 or later, or set COLLECTIVE_CUDA_LIB to its path",
};

impl Wanted {
    /// Returns the paths to try, in order. `var` reads an environment variable.
    pub(super) fn candidates(&self, var: &dyn Fn(&str) -> Option<OsString>) -> Vec<PathBuf> {
        library::candidates(var, self.variable, self.names, self.packages)
    }

    /// Opens the first of `paths` that can be opened.
    ///
    /// # Safety
    ///
    /// The initialisers of the libraries at these paths must be sound to run.
    pub(super) unsafe fn open(&self, paths: &[PathBuf]) -> Result<Library> {
        // SAFETY: the caller guarantees that the initialisers are sound.
        let library = unsafe { Library::open(self.names[0], paths, "", self.install) };
        library.map_err(|error| self.unusable(error))
    }

    /// Returns the error for a library that cannot be loaded or lacks a function.
    pub(super) fn unusable(&self, error: CudaError) -> Error {
        let (reason, tried) = match error {
            CudaError::NotFound { tried, .. } => {
                let reasons: Vec<_> = tried.iter().map(|attempt| &*attempt.reason).collect();
                let reason = format!("it cannot be loaded: {}", reasons.join("; "));
                (reason, tried.into_iter().map(|attempt| attempt.path).collect())
            }
            CudaError::MissingSymbol { library, symbol, .. } => {
                let path = library.display();
                (format!("{path} is too old: it has no function {symbol}"), vec![library])
            }
            other => (other.to_string(), Vec::new()),
        };
        let tried = tried.iter().map(|path| path.display().to_string()).collect();
        Error::Library { library: self.names[0], reason, tried, install: self.install }
    }
}

/// Declares a table of C functions: a struct of function pointers; `resolve`, which looks them up
/// in a library; and for each function that returns a status, a method of the same name that
/// returns a `Result`.
macro_rules! table {
    (
        $(#[$meta:meta])*
        $table:ident: $status:ident {
            $(fn $f:ident($($a:ident: $t:ty),*);)*
        } optional {
            $(fn $of:ident($($oa:ident: $ot:ty),*) since $version:literal;)*
        } unchecked {
            $(fn $uf:ident($($ut:ty),*) -> $ur:ty;)*
        }
    ) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug)]
        #[expect(non_snake_case, reason = "the names are C's")]
        pub(super) struct $table {
            $($f: unsafe extern "C" fn($($t),*) -> $status,)*
            $(pub(super) $of: Option<unsafe extern "C" fn($($ot),*) -> $status>,)*
            $(pub(super) $uf: unsafe extern "C" fn($($ut),*) -> $ur,)*
        }

        #[expect(unsafe_code, reason = "calls C by function pointers of declared types")]
        #[expect(non_snake_case, reason = "the names are C's")]
        impl $table {
            /// # Safety
            ///
            /// Each symbol must be a function of the prototype declared here.
            pub(super) unsafe fn resolve(
                library: &cuda_rt::library::Library,
            ) -> Result<Self, cuda_rt::CudaError> {
                Ok(Self {
                    // SAFETY: the caller promises the field's type, here and below.
                    $($f: unsafe { library.function(stringify!($f)) }?,)*
                    // SAFETY: as above.
                    $($of: unsafe { library.function(stringify!($of)) }.ok(),)*
                    // SAFETY: as above.
                    $($uf: unsafe { library.function(stringify!($uf)) }?,)*
                })
            }

            $(
                /// # Safety
                ///
                /// As the C function's documentation requires.
                pub(super) unsafe fn $f(&self, $($a: $t),*) -> $crate::Result<()> {
                    // SAFETY: the caller's promise; the type is the declared one.
                    let result = unsafe { (self.$f)($($a),*) };
                    self.check(result, stringify!($f))
                }
            )*

            $(
                /// # Safety
                ///
                /// As the C function's documentation requires.
                pub(super) unsafe fn $of(&self, $($oa: $ot),*) -> $crate::Result<()> {
                    let function = self.$of.ok_or_else(|| lacks(stringify!($of), $version))?;
                    // SAFETY: the caller's promise; the type is the declared one.
                    let result = unsafe { function($($oa),*) };
                    self.check(result, stringify!($of))
                }
            )*
        }
    };
}
pub(super) use table;

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::*;

    fn in_python(mut paths: Vec<PathBuf>) -> Vec<PathBuf> {
        paths.retain(|path| path.to_string_lossy().contains("-packages"));
        paths
    }

    fn looked_for(vars: &[(&str, &Path)]) -> Vec<PathBuf> {
        let var = |name: &str| {
            let (_, value) = vars.iter().find(|(known, _)| *known == name)?;
            Some(value.as_os_str().to_owned())
        };
        NCCL.candidates(&var)
    }

    #[test]
    fn a_named_file_is_the_only_candidate_and_python_comes_last() {
        let named = Path::new("/opt/libnccl.so.2");
        assert_eq!(looked_for(&[("COLLECTIVE_NCCL_LIB", named)]), [named]);
        let plain = ["libnccl.so.2", "libnccl.so"].map(PathBuf::from);
        assert_eq!(looked_for(&[("COLLECTIVE_NCCL_LIB", Path::new(""))])[..2], plain);

        let dir = std::env::temp_dir().join(format!("collective-nccl-{}", std::process::id()));
        let library = |python: &str| {
            let folder = dir.join("lib").join(python).join("site-packages/nvidia/nccl/lib");
            fs::create_dir_all(&folder).unwrap();
            fs::write(folder.join("libnccl.so.2"), "no library").unwrap();
            folder.join("libnccl.so.2")
        };
        let (old, new) = (library("python3.10"), library("python3.12"));
        fs::create_dir_all(dir.join("bin")).unwrap();
        fs::write(dir.join("bin/python3"), "").unwrap();
        let bin = dir.join("bin");
        for vars in [[("VIRTUAL_ENV", &*dir)], [("PATH", &*bin)]] {
            assert_eq!(in_python(looked_for(&vars))[..2], [new.clone(), old.clone()]);
        }
        let site = dir.join("lib/python3.10/site-packages");
        assert_eq!(in_python(looked_for(&[("PYTHONPATH", &*site)]))[0], old);
        std::os::unix::fs::symlink(&dir, dir.join(".local")).unwrap();
        let local = dir.join(".local/lib/python3.12/site-packages/nvidia/nccl/lib/libnccl.so.2");
        assert_eq!(in_python(looked_for(&[("HOME", &*dir)]))[0], local);
        // SAFETY: the file is text, so it has no initialisers.
        let error = unsafe { NCCL.open(std::slice::from_ref(&new)) }.unwrap_err();
        fs::remove_dir_all(&dir).unwrap();
        let Error::Library { library, tried, .. } = &error else { panic!("{error}") };
        assert_eq!((*library, &tried[..]), ("libnccl.so.2", &[new.display().to_string()][..]));
        let text = error.to_string();
        for part in ["file too short", "python3.12", "pip install", "COLLECTIVE_NCCL_LIB"] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }
}
