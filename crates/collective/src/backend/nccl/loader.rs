//! Finding NVIDIA's libraries and the functions in them.
//!
//! A library is opened with `dlopen` when first needed, and never closed, since neither the driver
//! nor NCCL survives being unloaded; hence function pointers out of it are good for ever. A variable
//! of the environment names the one file to take; without it the system's loader is asked for the
//! usual names, then the folders in which Python's packages keep theirs.
//!
//! Invariant: a table of functions exists only if all its required symbols were found in one library.

#![expect(unsafe_code, reason = "dlopen, dlsym, and function pointers of declared types")]

use std::ffi::{CStr, CString, OsString, c_void};
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::ptr::NonNull;

use crate::{Error, Result};

/// A library as this crate knows it.
#[derive(Debug)]
pub(super) struct Wanted {
    /// Its usual name.
    pub(super) name: &'static str,
    /// Names for the system's loader, in order.
    pub(super) names: &'static [&'static str],
    /// The variable that names the one file to take.
    pub(super) variable: &'static str,
    /// Where Python's packages have it, below `site-packages`.
    pub(super) in_python: Option<&'static str>,
    /// What to do if it is missing.
    pub(super) install: &'static str,
}

pub(super) const NCCL: Wanted = Wanted {
    name: "libnccl.so.2",
    names: &["libnccl.so.2", "libnccl.so"],
    variable: "COLLECTIVE_NCCL_LIB",
    in_python: Some("nvidia/nccl/lib/libnccl.so.2"),
    install: "install NCCL 2.14 or later (Debian's libnccl2 of NVIDIA's repository, or pip install \
              nvidia-nccl-cu12), or name the file in COLLECTIVE_NCCL_LIB",
};

pub(super) const CUDA: Wanted = Wanted {
    name: "libcuda.so.1",
    names: &["libcuda.so.1", "libcuda.so"],
    variable: "COLLECTIVE_CUDA_LIB",
    in_python: None,
    install: "install NVIDIA's driver, or name the file in COLLECTIVE_CUDA_LIB",
};

impl Wanted {
    /// Where to look, in order; `var` reads the environment.
    pub(super) fn candidates(&self, var: &dyn Fn(&str) -> Option<OsString>) -> Vec<PathBuf> {
        if let Some(path) = var(self.variable).filter(|path| !path.is_empty()) {
            return vec![path.into()];
        }
        let mut paths: Vec<PathBuf> = self.names.iter().map(PathBuf::from).collect();
        if let Some(below) = self.in_python {
            let in_packages = |packages: PathBuf| packages.join(below);
            paths.extend(site_packages(var).into_iter().map(in_packages).filter(|p| p.exists()));
        }
        paths
    }

    fn unusable(&self, reason: String, tried: &[PathBuf]) -> Error {
        let tried = tried.iter().map(|path| path.display().to_string()).collect();
        Error::Library { library: self.name, reason, tried, install: self.install }
    }
}

/// The folders of Python's packages: of the active environments, of the interpreters in `PATH`, of
/// the user, of the system.
fn site_packages(var: &dyn Fn(&str) -> Option<OsString>) -> Vec<PathBuf> {
    // Only absolute paths: anybody may have put a library into the current directory.
    let absolute = |path: &PathBuf| path.is_absolute();
    let paths = |name: &str| -> Vec<PathBuf> {
        std::env::split_paths(&var(name).unwrap_or_default()).filter(absolute).collect()
    };
    let folder = |name: &str| var(name).map(PathBuf::from).filter(absolute);
    let mut folders = paths("PYTHONPATH");
    let active = ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(folder);
    let with_python = paths("PATH").into_iter().filter(|bin| bin.join("python3").exists());
    let interpreters = with_python.filter_map(|bin| Some(bin.parent()?.to_owned()));
    let user = folder("HOME").map(|home| home.join(".local"));
    let system = ["/usr/local", "/usr", "/opt/conda"].map(PathBuf::from);
    for prefix in active.chain(interpreters).chain(user).chain(system) {
        let Ok(entries) = fs::read_dir(prefix.join("lib")) else { continue };
        let mut versions: Vec<PathBuf> = entries.filter_map(|e| Some(e.ok()?.path())).collect();
        versions.retain(|path| {
            path.file_name().is_some_and(|name| name.as_bytes().starts_with(b"python3"))
        });
        // The newest first.
        versions.sort_unstable_by(|a, b| b.cmp(a));
        for folder in
            versions.iter().flat_map(|v| ["site-packages", "dist-packages"].map(|p| v.join(p)))
        {
            if !folders.contains(&folder) {
                folders.push(folder);
            }
        }
    }
    folders
}

/// An open library. It has no `Drop`: libraries stay open until the process ends.
#[derive(Debug)]
pub(super) struct Library {
    wanted: &'static Wanted,
    path: PathBuf,
    handle: NonNull<c_void>,
}

impl Library {
    /// Opens the first of `paths` that can be opened.
    ///
    /// # Safety
    ///
    /// The initialisers of whatever is at these paths must be sound to run.
    pub(super) unsafe fn open(wanted: &'static Wanted, paths: &[PathBuf]) -> Result<Self> {
        let mut reasons = Vec::new();
        for path in paths {
            let Ok(name) = CString::new(path.as_os_str().as_bytes()) else {
                reasons.push("the path contains a NUL".into());
                continue;
            };
            // SAFETY: `name` is a C string; the caller vouches for the initialisers.
            let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
            match NonNull::new(handle) {
                Some(handle) => return Ok(Self { wanted, path: path.clone(), handle }),
                None => reasons.push(last_error()),
            }
        }
        Err(wanted.unusable(format!("it cannot be loaded: {}", reasons.join("; ")), paths))
    }

    /// The address of a function, if the library has it.
    pub(super) fn symbol(&self, symbol: &'static CStr) -> Option<NonNull<c_void>> {
        // SAFETY: the handle is of an open library, since none is ever closed.
        NonNull::new(unsafe { libc::dlsym(self.handle.as_ptr(), symbol.as_ptr()) })
    }

    /// The address of a function that must be there.
    pub(super) fn required(&self, symbol: &'static CStr) -> Result<NonNull<c_void>> {
        self.symbol(symbol).ok_or_else(|| {
            let (path, symbol) = (self.path.display(), symbol.to_string_lossy());
            let reason = format!("{path} is too old, it has no function {symbol}");
            self.wanted.unusable(reason, std::slice::from_ref(&self.path))
        })
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

/// Declares a struct of C functions, and `resolve`, which finds them in a library.
macro_rules! table {
    (
        $(#[$meta:meta])*
        $name:ident {
            $($field:ident = $symbol:literal: $prototype:ty,)*
        } optional {
            $($extra:ident = $extra_symbol:literal: $extra_prototype:ty,)*
        }
    ) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug)]
        pub(super) struct $name {
            $(pub(super) $field: $prototype,)*
            $(pub(super) $extra: Option<$extra_prototype>,)*
        }

        #[expect(unsafe_code, reason = "gives an address the type its declaration has")]
        impl $name {
            /// # Safety
            ///
            /// Each symbol must be a function of the prototype declared here.
            pub(super) unsafe fn resolve(
                library: &$crate::backend::nccl::loader::Library,
            ) -> $crate::Result<Self> {
                use std::ffi::c_void;
                Ok(Self {
                    $($field: {
                        let address = library.required($symbol)?.as_ptr();
                        // SAFETY: not null; the caller vouches for the prototype. On Linux function
                        // and data pointers have one representation.
                        unsafe { std::mem::transmute::<*mut c_void, $prototype>(address) }
                    },)*
                    $($extra: library.symbol($extra_symbol).map(|address| {
                        // SAFETY: likewise.
                        unsafe { std::mem::transmute::<*mut c_void, $extra_prototype>(address.as_ptr()) }
                    }),)*
                })
            }
        }
    };
}
pub(super) use table;

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    /// An unset `PYTHONPATH` splits into one empty path, which would be the current directory.
    #[test]
    fn search_paths_that_are_not_absolute_are_ignored() {
        for name in ["PYTHONPATH", "PATH", "VIRTUAL_ENV", "CONDA_PREFIX", "HOME"] {
            for value in ["", "relative/to/here", "."] {
                let var = |asked: &str| (asked == name).then(|| OsString::from(value));
                let mut folders = site_packages(&var);
                folders.retain(|path| !path.is_absolute());
                assert!(folders.is_empty(), "{name}={value}: {folders:?}");
            }
        }
        let var = |name: &str| (name == "PYTHONPATH").then(|| OsString::from("/a::b:/c"));
        assert_eq!(site_packages(&var)[..2], [PathBuf::from("/a"), PathBuf::from("/c")]);
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
            assert_eq!(looked_for(&vars)[2..4], [new.clone(), old.clone()]);
        }
        let site = dir.join("lib/python3.10/site-packages");
        assert_eq!(looked_for(&[("PYTHONPATH", &*site)])[2], old);
        std::os::unix::fs::symlink(&dir, dir.join(".local")).unwrap();
        let local = dir.join(".local/lib/python3.12/site-packages/nvidia/nccl/lib/libnccl.so.2");
        assert_eq!(looked_for(&[("HOME", &*dir)])[2], local);
        // SAFETY: what is there is text, which has no initialisers.
        let error = unsafe { Library::open(&NCCL, std::slice::from_ref(&new)) }.unwrap_err();
        fs::remove_dir_all(&dir).unwrap();
        let Error::Library { library, tried, .. } = &error else { panic!("{error}") };
        assert_eq!((*library, &tried[..]), ("libnccl.so.2", &[new.display().to_string()][..]));
        let text = error.to_string();
        for part in ["file too short", "python3.12", "pip install", "COLLECTIVE_NCCL_LIB"] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }
}
