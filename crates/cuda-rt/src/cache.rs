//! The cache of compiled kernels on disk.
//!
//! A file holds a hash of the code, the compiler's input (version, options, source), and the code.
//! A hash collision, a truncated file or a damaged one is therefore a cache miss. Files are written
//! under a temporary name and renamed, so processes may compile at the same time. Errors are
//! ignored: without a cache more is compiled.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::{env, fs, process};

/// The cache folder: `$CUBIN_CACHE` (empty: none), by default in the user's cache folder.
#[must_use]
pub fn folder() -> Option<PathBuf> {
    folder_by(&|name| env::var_os(name))
}

/// As [`folder`]; `var` reads the environment. Relative `XDG_CACHE_HOME` and `HOME` are ignored.
fn folder_by(var: &dyn Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    if let Some(path) = var("CUBIN_CACHE") {
        return (!path.is_empty()).then(|| path.into());
    }
    let absolute = |name| var(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let own = absolute("XDG_CACHE_HOME").or_else(|| Some(absolute("HOME")?.join(".cache")))?;
    Some(own.join("cuda-rt/cubin"))
}

/// The compiler versions of all cached code for this source and these options.
pub(crate) fn versions(folder: &Path, source: &str, options: &[String]) -> Vec<Version> {
    let version = |path: PathBuf| {
        let (_, version) = path.file_stem()?.to_str()?.split_once('-')?;
        let (major, minor) = version.split_once('.')?;
        let version = (major.parse().ok()?, minor.parse().ok()?);
        let entry = Entry::new(folder.to_owned(), source, options, version);
        (entry.path == path && entry.read().is_some()).then_some(version)
    };
    let files = fs::read_dir(folder).into_iter().flatten().flatten();
    files.filter_map(|file| version(file.path())).collect()
}

/// Major and minor version.
pub(crate) type Version = (i32, i32);

/// FNV-1a.
pub(crate) fn hash(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3)
    })
}

/// A cache file for one compiler input.
#[derive(Clone, Debug)]
pub struct Entry {
    path: PathBuf,
    /// The compiler's version, options and source.
    input: Vec<u8>,
}

impl Entry {
    /// The entry for `source` compiled with `options` by a compiler of this version.
    #[must_use]
    pub fn new(folder: PathBuf, source: &str, options: &[String], version: Version) -> Self {
        let input = format!("{}\n{source}", options.join("\n"));
        let (major, minor) = version;
        let name = format!("{:016x}-{major}.{minor}.cubin", hash(input.as_bytes()));
        Self { path: folder.join(name), input: format!("{version:?}\n{input}").into_bytes() }
    }

    /// The cached code; `None` if it is missing or damaged.
    #[must_use]
    pub fn read(&self) -> Option<Vec<u8>> {
        let bytes = fs::read(&self.path).ok()?;
        let (known, rest) = bytes.split_first_chunk()?;
        let code = rest.strip_prefix(&self.input[..])?;
        (hash(code) == u64::from_le_bytes(*known)).then(|| code.to_vec())
    }

    /// Writes the code; does nothing if that fails.
    ///
    /// # Panics
    ///
    /// Never: an entry's path has a parent.
    pub fn write(&self, code: &[u8]) {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        // Relaxed: the numbers only have to differ.
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let own = self.path.with_extension(format!("{}-{number}", process::id()));
        let bytes = [&hash(code).to_le_bytes()[..], &self.input, code].concat();
        let folder = self.path.parent().expect("an entry is in a folder");
        let written = fs::create_dir_all(folder).and_then(|()| fs::write(&own, bytes));
        if written.and_then(|()| fs::rename(&own, &self.path)).is_err() {
            let _ = fs::remove_file(&own);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(folder: &Path, source: &str) -> Entry {
        Entry::new(folder.to_owned(), source, &["--arch".into()], (13, 0))
    }

    #[test]
    fn damaged_truncated_and_foreign_files_are_cache_misses() {
        let folder = env::temp_dir().join(format!("cubin-test-{}", process::id()));
        let (one, other) = (entry(&folder, "one"), entry(&folder, "other"));
        assert_eq!(one.read(), None);
        one.write(b"code");
        assert_eq!(one.read().unwrap(), b"code");
        assert_eq!(other.read(), None);
        // Another source with the same file name; truncated files.
        fs::rename(&one.path, &other.path).unwrap();
        assert_eq!(other.read(), None);
        fs::remove_file(&other.path).unwrap();
        one.write(b"code");
        let bytes = fs::read(&one.path).unwrap();
        for cut in 0..bytes.len() {
            fs::write(&one.path, &bytes[..cut]).unwrap();
            assert_eq!(one.read(), None, "cut at {cut}");
        }
        // A flipped bit.
        for at in 0..bytes.len() {
            let mut bytes = bytes.clone();
            bytes[at] ^= 16;
            fs::write(&one.path, &bytes).unwrap();
            assert_eq!(one.read(), None, "damaged at {at}");
        }
        let kept = |source, options: &[String]| {
            let mut found = versions(&folder, source, options);
            found.sort_unstable();
            found
        };
        assert_eq!(kept("one", &["--arch".into()]), [], "its code is damaged");
        let options = Entry::new(folder.clone(), "one", &[], (13, 0));
        let version = Entry::new(folder.clone(), "one", &["--arch".into()], (12, 1));
        assert!(options.path != one.path && version.path != one.path);
        // Code of each version is found for its source and options only.
        one.write(b"code");
        assert_eq!(kept("one", &["--arch".into()]), [(13, 0)]);
        version.write(b"older");
        assert_eq!(kept("one", &["--arch".into()]), [(12, 1), (13, 0)]);
        assert_eq!((kept("one", &[]), kept("two", &["--arch".into()])), (vec![], vec![]));
        // The version in the file counts, not the one in its name.
        fs::rename(&version.path, &one.path).unwrap();
        assert_eq!(kept("one", &["--arch".into()]), []);
        one.write(b"code");
        // A failed write is ignored.
        entry(&one.path.join("below a file"), "one").write(b"code");
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn concurrent_writes_never_leave_a_partial_file() {
        let folder = env::temp_dir().join(format!("cubin-race-{}", process::id()));
        let code: Vec<u8> = (0..100_000_u32).map(|i| i as u8).collect();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..50 {
                        let own = entry(&folder, "one");
                        own.write(&code);
                        assert!(own.read().unwrap() == code);
                    }
                });
            }
        });
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 1, "no temporary file is left");
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn environment_sets_the_cache_folder() {
        let folder = |vars: &[(&str, &str)]| {
            let var = |name: &str| {
                vars.iter().find(|(known, _)| *known == name).map(|(_, value)| value.into())
            };
            folder_by(&var).map(|path| path.to_str().unwrap().to_owned())
        };
        let below = |home: &str| Some(format!("{home}/cuda-rt/cubin"));
        assert_eq!(folder(&[("CUBIN_CACHE", "kept"), ("HOME", "/home/a")]), Some("kept".into()));
        assert_eq!(folder(&[("CUBIN_CACHE", ""), ("HOME", "/home/a")]), None);
        assert_eq!(folder(&[("XDG_CACHE_HOME", "/cache"), ("HOME", "/home/a")]), below("/cache"));
        assert_eq!(folder(&[("XDG_CACHE_HOME", ""), ("HOME", "/home/a")]), below("/home/a/.cache"));
        // Relative folders are ignored.
        assert_eq!(folder(&[("XDG_CACHE_HOME", "cache"), ("HOME", "")]), None);
        assert_eq!(folder(&[]), None);
    }
}
