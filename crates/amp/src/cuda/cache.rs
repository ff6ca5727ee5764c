//! Compiled kernels on disk. The same file in `amp` and `fused-optim`.
//!
//! A file holds all that the code was made from, and then the code. So neither two sources of one hash
//! nor half a file can be taken for something else. Files are written beside and renamed, so processes
//! that compile at once do each other no harm. Nothing here fails: without a cache there is only more
//! to compile.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::{env, fs, process};

/// Where compiled kernels are kept: `$CUBIN_CACHE` (empty: nowhere), or the user's cache.
#[must_use]
pub(super) fn folder() -> Option<PathBuf> {
    if let Some(path) = env::var_os("CUBIN_CACHE") {
        return (!path.is_empty()).then(|| path.into());
    }
    let own = env::var_os("XDG_CACHE_HOME").filter(|path| !path.is_empty()).map(PathBuf::from);
    let home = || env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache"));
    Some(own.or_else(home)?.join(env!("CARGO_PKG_NAME")).join("cubin"))
}

/// Code of this source and these options by whatever version of the compiler: what is left to try
/// where there is none.
pub(super) fn of_any_version(folder: &Path, source: &str, options: &[String]) -> Option<Vec<u8>> {
    let from = format!("{}\n{source}", options.join("\n")).into_bytes();
    let code = |path: PathBuf| {
        let bytes = fs::read(path).ok()?;
        let (length, rest) = bytes.split_first_chunk()?;
        let line = rest.iter().position(|byte| *byte == b'\n')?;
        let code = rest[line + 1..].strip_prefix(&from[..])?;
        (code.len() as u64 == u64::from_le_bytes(*length)).then(|| code.to_vec())
    };
    let mut paths: Vec<PathBuf> =
        fs::read_dir(folder).ok()?.flatten().map(|entry| entry.path()).collect();
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "cubin"));
    paths.sort_unstable();
    paths.into_iter().find_map(code)
}

/// Code in a folder, by what it is made from.
#[derive(Clone, Debug)]
pub(super) struct Entry {
    path: PathBuf,
    /// Source, options, the compiler's version.
    from: Vec<u8>,
}

impl Entry {
    pub(super) fn new(
        folder: PathBuf,
        source: &str,
        options: &[String],
        version: (i32, i32),
    ) -> Self {
        let from = format!("{version:?}\n{}\n{source}", options.join("\n")).into_bytes();
        // FNV-1a: only a name, the file says what it is of.
        let hash = from.iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3)
        });
        Self { path: folder.join(format!("{hash:016x}.cubin")), from }
    }

    /// The code, if it is there and whole.
    pub(super) fn read(&self) -> Option<Vec<u8>> {
        let bytes = fs::read(&self.path).ok()?;
        let (length, rest) = bytes.split_first_chunk()?;
        let code = rest.strip_prefix(&self.from[..])?;
        (code.len() as u64 == u64::from_le_bytes(*length)).then(|| code.to_vec())
    }

    pub(super) fn write(&self, code: &[u8]) {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        // Relaxed: only the numbers must differ.
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let own = self.path.with_extension(format!("{}-{number}", process::id()));
        let bytes = [&(code.len() as u64).to_le_bytes()[..], &self.from, code].concat();
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
    fn what_is_written_is_read_and_nothing_else() {
        let folder = env::temp_dir().join(format!("cubin-test-{}", process::id()));
        let (one, other) = (entry(&folder, "one"), entry(&folder, "other"));
        assert_eq!(one.read(), None);
        one.write(b"code");
        assert_eq!(one.read().unwrap(), b"code");
        assert_eq!(other.read(), None);
        // Another source of the same name, half a file, no file at all.
        fs::rename(&one.path, &other.path).unwrap();
        assert_eq!(other.read(), None);
        one.write(b"code");
        let bytes = fs::read(&one.path).unwrap();
        for cut in 0..bytes.len() {
            fs::write(&one.path, &bytes[..cut]).unwrap();
            assert_eq!(one.read(), None, "cut at {cut}");
        }
        let options = Entry::new(folder.clone(), "one", &[], (13, 0));
        let version = Entry::new(folder.clone(), "one", &["--arch".into()], (12, 1));
        assert!(options.path != one.path && version.path != one.path);
        // Without a compiler its version is all the same, source and options are not.
        one.write(b"code");
        let any = |source, options: &[String]| of_any_version(&folder, source, options);
        assert_eq!(any("one", &["--arch".into()]).unwrap(), b"code");
        version.write(b"older");
        fs::remove_file(&one.path).unwrap();
        assert_eq!(any("one", &["--arch".into()]).unwrap(), b"older");
        assert_eq!((any("one", &[]), any("two", &["--arch".into()])), (None, None));
        one.write(b"code");
        // Where nothing can be written, nothing is, and nobody is told.
        entry(&one.path.join("below a file"), "one").write(b"code");
        fs::remove_dir_all(&folder).unwrap();
    }
}
