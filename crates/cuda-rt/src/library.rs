//! Searches and opens NVIDIA's libraries.
//!
//! A library is never closed, so its function pointers stay valid. A missing one is an error that
//! lists every path that was tried.

#![expect(unsafe_code, reason = "runs the initializers of libraries")]

use std::env;
use std::error::Error as _;
use std::ffi::{OsString, c_void};
use std::fs;
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;

use libloading::os::unix::{self, RTLD_LOCAL, RTLD_NOW};

use crate::error::{Attempt, CudaError};

/// An open library. It has no `Drop`: it stays open until the process ends.
#[derive(Debug)]
pub struct Library {
    path: PathBuf,
    handle: ManuallyDrop<unix::Library>,
    install: &'static str,
}

impl Library {
    /// Opens the first of `paths` that can be opened. Before that it opens the libraries in the
    /// same folder (after resolving links) whose names start with `beside`: those that the library
    /// opens by name and that the system's loader would not find there. Empty: none.
    ///
    /// # Errors
    ///
    /// [`CudaError::NotFound`].
    ///
    /// # Safety
    ///
    /// The initializers of the libraries at these paths must be sound to run.
    pub unsafe fn open(
        library: &'static str,
        paths: &[PathBuf],
        beside: &str,
        install: &'static str,
    ) -> Result<Self, CudaError> {
        let mut tried = Vec::new();
        for path in paths {
            let folder =
                fs::canonicalize(path).ok().and_then(|path| Some(path.parent()?.to_owned()));
            for helper in folder.map(|folder| matching(&folder, beside)).unwrap_or_default() {
                // SAFETY: the caller guarantees the libraries. An error shows when the helper is
                // needed.
                let _ = unsafe { open(&helper) };
            }
            // SAFETY: as above.
            match unsafe { open(path) } {
                Ok(handle) => return Ok(Self { path: path.clone(), handle, install }),
                Err(reason) => tried.push(Attempt { path: path.clone(), reason }),
            }
        }
        Err(CudaError::NotFound { library, tried, install })
    }

    /// The path of the library.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the address of a function.
    ///
    /// # Errors
    ///
    /// [`CudaError::MissingSymbol`].
    pub fn symbol(&self, symbol: &'static str) -> Result<NonNull<c_void>, CudaError> {
        // SAFETY: only the address is used, and the library is never closed.
        let found = unsafe { self.handle.get::<*mut c_void>(symbol) };
        let address = found.ok().and_then(|found| NonNull::new(found.as_raw_ptr()));
        let (library, install) = (self.path.clone(), self.install);
        address.ok_or(CudaError::MissingSymbol { library, symbol, install })
    }

    /// Returns a function; `T` is the type of its pointer.
    ///
    /// # Errors
    ///
    /// [`CudaError::MissingSymbol`].
    ///
    /// # Safety
    ///
    /// The function has this type.
    pub unsafe fn function<T: Copy>(&self, symbol: &'static str) -> Result<T, CudaError> {
        const { assert!(size_of::<T>() == size_of::<*mut c_void>()) };
        let address = self.symbol(symbol)?.as_ptr();
        // SAFETY: of the same size, and not null; the type is as the caller promises. On Linux,
        // function and data pointers have the same representation.
        Ok(unsafe { std::mem::transmute_copy::<*mut c_void, T>(&address) })
    }
}

/// # Safety
///
/// The initializers of the library at this path must be sound to run.
unsafe fn open(path: &Path) -> Result<ManuallyDrop<unix::Library>, String> {
    // SAFETY: the caller guarantees the initializers.
    let library = unsafe { unix::Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) };
    library.map(ManuallyDrop::new).map_err(|error| error.source().unwrap_or(&error).to_string())
}

/// Files in a folder whose names start with `prefix`; none if `prefix` is empty or the folder is
/// missing.
fn matching(folder: &Path, prefix: &str) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let begins = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        !prefix.is_empty() && name.starts_with(prefix)
    };
    let mut found: Vec<PathBuf> =
        entries.flatten().map(|entry| entry.path()).filter(begins).collect();
    found.sort();
    found
}

/// Candidate paths of a library: only `$variable` if it is set; else the system loader's, the CUDA
/// toolkit's, and those of Python packages. `var` reads the environment.
pub fn candidates(
    var: &dyn Fn(&str) -> Option<OsString>,
    variable: &str,
    names: &[&str],
    packages: &[&str],
) -> Vec<PathBuf> {
    if let Some(path) = var(variable).filter(|path| !path.is_empty()) {
        return vec![path.into()];
    }
    let mut paths: Vec<PathBuf> = names.iter().map(PathBuf::from).collect();
    let mut folders = cuda_folders(var);
    for site in python_sites(var) {
        folders
            .extend(packages.iter().map(|package| site.join("nvidia").join(package).join("lib")));
    }
    let inside = |folder: &PathBuf| names.iter().map(|name| folder.join(name)).collect::<Vec<_>>();
    paths.extend(folders.iter().flat_map(inside).filter(|path| path.exists()));
    paths
}

/// Library folders of CUDA toolkits.
fn cuda_folders(var: &dyn Fn(&str) -> Option<OsString>) -> Vec<PathBuf> {
    let variables = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(var);
    let homes = variables.chain([OsString::from("/usr/local/cuda")]);
    homes.map(|home| Path::new(&home).join("lib64")).filter(|path| path.is_absolute()).collect()
}

/// Python's package folders: `PYTHONPATH`, active environments, interpreters in `PATH`, the user's,
/// the system's.
fn python_sites(var: &dyn Fn(&str) -> Option<OsString>) -> Vec<PathBuf> {
    // Only absolute paths: loading from the current directory is unsafe.
    let absolute = |path: &PathBuf| path.is_absolute();
    let paths = |name: &str| -> Vec<PathBuf> {
        env::split_paths(&var(name).unwrap_or_default()).filter(absolute).collect()
    };
    let folder = |name: &str| var(name).map(PathBuf::from).filter(absolute);
    let mut sites = paths("PYTHONPATH");
    let active = ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(folder);
    let with_python = paths("PATH").into_iter().filter(|bin| bin.join("python3").exists());
    let interpreters = with_python.filter_map(|bin| Some(bin.parent()?.to_owned()));
    let user = folder("HOME").map(|home| home.join(".local"));
    let system = ["/usr/local", "/usr", "/opt/conda"].map(PathBuf::from);
    for root in active.chain(interpreters).chain(user).chain(system) {
        // The newest Python first.
        for python in matching(&root.join("lib"), "python3").into_iter().rev() {
            for site in ["site-packages", "dist-packages"].map(|name| python.join(name)) {
                if !sites.contains(&site) {
                    sites.push(site);
                }
            }
        }
    }
    sites
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_is_an_error_with_every_path_and_what_to_install() {
        let paths = ["/nonexistent/libx.so.1", "libx-of-nobody.so"].map(PathBuf::from);
        // SAFETY: there is nothing at these paths.
        let error = unsafe { Library::open("libx", &paths, "libx-", "install x") }.unwrap_err();
        let CudaError::NotFound { tried, .. } = &error else { panic!("{error}") };
        assert_eq!(
            tried.iter().map(|one| &one.path).collect::<Vec<_>>(),
            paths.iter().collect::<Vec<_>>()
        );
        let text = error.to_string();
        assert!(text.starts_with("cannot load libx: /nonexistent/libx.so.1: "), "{text}");
        assert!(text.ends_with("; install x"), "{text}");
    }

    #[test]
    fn a_missing_function_is_an_error_with_the_librarys_path() {
        // SAFETY: the C library is already part of this process.
        let libc = unsafe { Library::open("libc", &["libc.so.6".into()], "", "update") }.unwrap();
        assert!(libc.symbol("malloc").is_ok());
        let text = libc.symbol("no_such_function").unwrap_err().to_string();
        assert_eq!(text, "libc.so.6 has no function no_such_function; update");
    }

    #[test]
    fn a_path_with_nul_is_an_error() {
        let path = PathBuf::from("lib\0x.so");
        // SAFETY: there is no such path.
        assert!(unsafe { Library::open("libx", &[path], "", "") }.is_err());
    }

    #[test]
    fn libraries_in_python_environments_and_user_packages_are_found() {
        let root = env::temp_dir().join(format!("sites-{}", std::process::id()));
        let install = |file: &str| {
            let path = root.join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, "").unwrap();
            path
        };
        let venv = |python: &str, file: &str| {
            install(&format!("venv/lib/{python}/site-packages/nvidia/{file}"))
        };
        let old = venv("python3.11", "cu13/lib/libx.so.13");
        let new = venv("python3.12", "cu13/lib/libx.so.13");
        let twelve = venv("python3.12", "cuda_x/lib/libx.so.12");
        let user = install("home/.local/lib/python3.11/site-packages/nvidia/cuda_x/lib/libx.so.12");
        let toolkit = install("cuda/lib64/libx.so.12");
        install("venv/bin/python3");
        let names = ["libx.so.13", "libx.so.12"];
        let found = |vars: &[(&str, &str)]| {
            let var = |name: &str| {
                let (_, value) = vars.iter().find(|(known, _)| *known == name)?;
                Some(if value.is_empty() { "".into() } else { root.join(value).into() })
            };
            candidates(&var, "X_LIBRARY", &names, &["cu13", "cuda_x"])
        };
        let plain = names.map(PathBuf::from).to_vec();
        let after = |more: &[&PathBuf]| {
            [&plain[..], &more.iter().copied().cloned().collect::<Vec<_>>()].concat()
        };
        assert_eq!(found(&[]), plain);
        assert_eq!(
            found(&[("X_LIBRARY", "own.so"), ("VIRTUAL_ENV", "venv")]),
            [root.join("own.so")]
        );
        for active in ["VIRTUAL_ENV", "CONDA_PREFIX"] {
            let empty = ("X_LIBRARY", "");
            assert_eq!(
                found(&[empty, (active, "venv")]),
                after(&[&new, &twelve, &old]),
                "{active}"
            );
        }
        assert_eq!(found(&[("PATH", "venv/bin")]), after(&[&new, &twelve, &old]));
        assert_eq!(found(&[("HOME", "home")]), after(&[&user]));
        let site = "venv/lib/python3.11/site-packages";
        assert_eq!(found(&[("PYTHONPATH", site), ("HOME", "home")]), after(&[&old, &user]));
        assert_eq!(found(&[("CUDA_HOME", "cuda"), ("HOME", "home")]), after(&[&toolkit, &user]));
        fs::remove_dir_all(&root).unwrap();
    }

    /// An unset `PYTHONPATH` splits into one empty path, which would be the current directory.
    #[test]
    fn search_paths_that_are_not_absolute_are_ignored() {
        let relative = ["", "relative/to/here", "."];
        for name in
            ["PYTHONPATH", "PATH", "VIRTUAL_ENV", "CONDA_PREFIX", "HOME", "CUDA_HOME", "CUDA_PATH"]
        {
            for value in relative {
                let var = |asked: &str| (asked == name).then(|| OsString::from(value));
                let sites = python_sites(&var);
                let folders = cuda_folders(&var);
                let all = sites.iter().chain(&folders);
                let bad: Vec<_> = all.filter(|path| !path.is_absolute()).collect();
                assert!(bad.is_empty(), "{name}={value}: {bad:?}");
            }
        }
        assert!(python_sites(&|_| None).iter().all(|path| path.is_absolute()));
        let var = |name: &str| (name == "PYTHONPATH").then(|| OsString::from("/a::b:/c"));
        assert_eq!(python_sites(&var)[..2], [PathBuf::from("/a"), PathBuf::from("/c")]);
    }

    /// Like NVRTC and its builtins, opened through a link.
    #[test]
    fn helper_libraries_are_opened_from_the_librarys_folder() {
        let folder = env::temp_dir().join(format!("beside-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let compile = |name: &str, source: &str| {
            let (from, to) = (folder.join(format!("{name}.cc")), folder.join(name));
            fs::write(&from, source).unwrap();
            let compiler = env::var_os("CXX").unwrap_or_else(|| "c++".into());
            let mut compiler = std::process::Command::new(compiler);
            compiler.args(["-shared", "-fPIC", &format!("-Wl,-soname,{name}"), "-o"]);
            assert!(compiler.arg(&to).arg(&from).status().unwrap().success());
            to
        };
        let own = format!("beside{}", std::process::id());
        let helper = format!("lib{own}-builtins.so.1");
        compile(&helper, "");
        let source = format!(
            "#include <dlfcn.h>\nextern \"C\" int finds() {{ return dlopen(\"{helper}\", RTLD_NOW) != 0; }}"
        );
        let library = compile(&format!("lib{own}.so.1"), &source);
        let link = folder.join("elsewhere/link.so");
        fs::create_dir_all(link.parent().unwrap()).unwrap();
        std::os::unix::fs::symlink(&library, &link).unwrap();
        let finds = |beside: &str| {
            // SAFETY: libraries made above.
            let library =
                unsafe { Library::open("x", std::slice::from_ref(&link), beside, "") }.unwrap();
            let finds = library.symbol("finds").unwrap().as_ptr();
            // SAFETY: that is its prototype.
            let finds =
                unsafe { std::mem::transmute::<*mut c_void, extern "C" fn() -> i32>(finds) };
            finds() == 1
        };
        assert!(!finds(""), "the system's loader finds it");
        assert!(finds(&format!("lib{own}-builtins")));
        fs::remove_dir_all(&folder).unwrap();
    }
}
