//! `Source`: shards of raw records that can be opened at any position; `Files`, shards given by
//! file name patterns.

use std::collections::HashSet;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use glob::{MatchOptions, glob_with};

use super::position::{HASH, hash};
use crate::{BoxError, Error, Result, Sample};

/// Shards of raw records: text files, archives, tables.
///
/// A stream reads ahead: it returns the last record of a window only when the next window is read,
/// so that its position tells whether the pass has ended. Hence a source whose records arrive over
/// time (a queue, a socket) lags by at least one record.
///
/// A position in a shard is a number chosen by the source, such as a number of bytes; 0 is the
/// beginning.
pub trait Source: Send + Sync {
    /// The shards, in their own order.
    fn shards(&self) -> &[Shard];

    /// Opens a shard, by its index, at a position returned by its [`Records`], or at 0.
    ///
    /// # Errors
    ///
    /// A shard that cannot be read, or ends before the position.
    fn open(&self, shard: usize, place: u64) -> Result<Box<dyn Records>, BoxError>;

    /// Checksum of a shard's content, or of a sample of it; 0 if unknown. A stream resumes only if
    /// those of all shards are unchanged.
    fn checksum(&self, shard: usize) -> u64 {
        let _ = shard;
        0
    }

    /// Unit of a position, for errors.
    fn unit(&self) -> &'static str {
        "byte"
    }
}

/// Records of an open shard, in order.
pub trait Records: Send {
    /// Reads the next record; `None` at the end of the shard.
    ///
    /// # Errors
    ///
    /// A record that is broken or too large.
    fn next(&mut self) -> Result<Option<Sample>, BoxError>;

    /// Skips the next record, which belongs to another rank; false at the end of the shard.
    ///
    /// # Errors
    ///
    /// As [`next`](Self::next).
    fn skip(&mut self) -> Result<bool, BoxError> {
        Ok(self.next()?.is_some())
    }

    /// Position of the next record.
    fn place(&self) -> u64;
}

/// Name and size of a shard. A stream resumes only if those of all shards are unchanged, and their
/// order; folders before the first one that differs between shards do not count.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shard {
    /// Name in errors.
    pub name: String,
    /// Size in bytes; 0 if unknown.
    pub bytes: u64,
}

/// Files that match patterns, as shards.
#[derive(Debug)]
pub(super) struct Files {
    paths: Vec<PathBuf>,
    pub(super) shards: Vec<Shard>,
    listed: Vec<Listed>,
}

/// State of a file when it was listed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Listed {
    pub(super) bytes: u64,
    modified: Option<SystemTime>,
    /// Checksum of the first, the middle and the last block.
    checksum: u64,
    /// Advice if the first bytes are those of a format that is not read under the file's name.
    pub(super) advice: Option<&'static str>,
}

impl Listed {
    fn new(path: &Path) -> io::Result<Self> {
        let mut file = File::open(path)?;
        let metadata = file.metadata()?;
        let bytes = metadata.len();
        let (mut checksum, mut first) = (HASH, Vec::new());
        let starts = match bytes {
            0..=THREE_BLOCKS => [0, BLOCK, 2 * BLOCK],
            _ => [0, bytes / 2, bytes - BLOCK],
        };
        for start in starts.into_iter().filter(|start| *start < bytes) {
            let mut block = Vec::new();
            file.seek(SeekFrom::Start(start))?;
            (&file).take(BLOCK).read_to_end(&mut block)?;
            checksum = hash(checksum, &block);
            if start == 0 {
                first = block;
            }
        }
        let advice = advice(&first);
        Ok(Self { bytes, modified: metadata.modified().ok(), checksum, advice })
    }

    /// Returns an error if the file is no longer as it was listed.
    pub(super) fn check(&self, file: &File) -> io::Result<()> {
        let metadata = file.metadata()?;
        let (had, has) = (self.bytes, metadata.len());
        let change = if had != has {
            format!("it had {had} bytes when the stream was made and has {has} now")
        } else if self.modified != metadata.modified().ok() {
            "it was written to after the stream was made".to_owned()
        } else {
            return Ok(());
        };
        Err(io::Error::other(format!(
            "the file has changed: {change}; shards must stay as they are during a run"
        )))
    }
}

/// Returns advice for a file whose first bytes are those of a format that is not read.
pub(super) fn advice(first: &[u8]) -> Option<&'static str> {
    let found = FORMATS.iter().find(|(magic, _)| first.starts_with(magic));
    found.map(|(_, advice)| *advice)
}

/// First bytes of files, and advice.
const FORMATS: [(&[u8], &str); 8] = [
    (b"\x1f\x8b", GZIP),
    (
        b"\x28\xb5\x2f\xfd",
        "it is compressed by zstd: decompress it (`zstd -d`) or compress it by gzip",
    ),
    (b"\xfd7zXZ\0", "it is compressed by xz: decompress it (`xz -d`) or compress it by gzip"),
    (
        b"\x04\x22\x4d\x18",
        "it is compressed by lz4: decompress it (`lz4 -d`) or compress it by gzip",
    ),
    (b"BZh", "it is compressed by bzip2: decompress it (`bzip2 -d`) or compress it by gzip"),
    (b"PK\x03\x04", "it is a zip archive: unpack it (`unzip`)"),
    (b"\xff\xfe", UTF_16),
    (b"\xfe\xff", UTF_16),
];
pub(super) const GZIP: &str = "it is compressed by gzip: let its name end with `.gz`";
const UTF_16: &str = "it is text in UTF-16: convert it (`iconv -f UTF-16 -t UTF-8`)";
/// Number of bytes of each block in a file's checksum.
const BLOCK: u64 = 1 << 12;
const THREE_BLOCKS: u64 = 3 * BLOCK;

impl Files {
    /// Lists the files that match each pattern by name, one pattern after another: `*` matches any
    /// characters, `?` one, `[0-9]` one of these. An existing file with the name of the pattern is
    /// that file.
    pub(super) fn find(patterns: impl IntoIterator<Item: AsRef<str>>) -> Result<Self> {
        let (mut paths, mut shards, mut listed) = (Vec::new(), Vec::new(), Vec::new());
        // Canonical, so that a file has only one path.
        let mut known = HashSet::new();
        for pattern in patterns {
            for path in matching(pattern.as_ref())? {
                let state = state(&path)?;
                shards.push(Shard { name: path.display().to_string(), bytes: state.bytes });
                listed.push(state);
                if !known.insert(path.canonicalize().unwrap_or_else(|_| path.clone())) {
                    let text = format!("{} is listed twice: name each file once", path.display());
                    return Err(Error::Options(text));
                }
                paths.push(path);
            }
        }
        Ok(Self { paths, shards, listed })
    }

    pub(super) fn path(&self, shard: usize) -> &Path {
        &self.paths[shard]
    }

    /// Opens a file that is still as it was listed.
    pub(super) fn open(&self, shard: usize) -> io::Result<(File, Listed)> {
        let (file, listed) = (File::open(&self.paths[shard])?, self.listed[shard]);
        listed.check(&file)?;
        Ok((file, listed))
    }

    pub(super) fn checksum(&self, shard: usize) -> u64 {
        self.listed[shard].checksum
    }

    /// States of the files when they were listed.
    #[cfg(feature = "tokenizers")]
    pub(super) fn states(&self) -> Vec<FileState> {
        let states = self.shards.iter().zip(&self.listed).map(|(shard, listed)| {
            let since_epoch = |time: SystemTime| time.duration_since(SystemTime::UNIX_EPOCH).ok();
            FileState {
                name: shard.name.clone(),
                bytes: listed.bytes,
                modified: listed.modified.and_then(since_epoch),
                checksum: listed.checksum,
            }
        });
        states.collect()
    }
}

/// State of a file: other ones have another content, as far as a file's metadata and its first,
/// middle and last block show.
#[cfg(feature = "tokenizers")]
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub(crate) struct FileState {
    name: String,
    bytes: u64,
    /// Time of modification, since 1970.
    modified: Option<std::time::Duration>,
    checksum: u64,
}

fn state(path: &Path) -> Result<Listed> {
    let name = path.display();
    match path.metadata() {
        Ok(metadata) if !metadata.is_file() => {
            Err(Error::Options(format!("{name} is not a file; a shard is one")))
        }
        metadata => metadata
            .and_then(|_| Listed::new(path))
            .map_err(|error| Error::Options(format!("{name}: {error}"))),
    }
}

/// Returns the files of a pattern, by name: at least one. As in a shell, a leading dot must be in
/// the pattern.
fn matching(pattern: &str) -> Result<Vec<PathBuf>> {
    let path = PathBuf::from(pattern);
    if path.exists() || !pattern.contains(['*', '?', '[', '{']) {
        return Ok(vec![path]);
    }
    let none = |why: &str| Error::Options(format!("{pattern}: there is no such file{why}"));
    let options = MatchOptions { require_literal_leading_dot: true, ..MatchOptions::new() };
    let found = glob_with(pattern, options).map_err(|error| none(&format!(": {error}")))?;
    let found = found.collect::<Result<Vec<_>, _>>();
    let found = found.map_err(|error| Error::Options(format!("{pattern}: {error}")))?;
    match found.is_empty() {
        true if pattern.contains('{') => {
            Err(none(": braces are not expanded; name the files, or write `*` or `?`"))
        }
        true => Err(none("")),
        false => Ok(found),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_stand_for_files_by_name() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["b-1.txt", "a-1.txt", "a-10.txt", ".a-2.txt", "a-1.tar"] {
            std::fs::write(dir.path().join(name), name).unwrap();
        }
        std::fs::create_dir(dir.path().join("x")).unwrap();
        std::os::unix::fs::symlink("../a-1.txt", dir.path().join("x/link.txt")).unwrap();
        std::fs::write(dir.path().join("x/[a].txt"), "").unwrap();
        let at = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
        let find = |names: &[&str]| {
            let found = Files::find(names.iter().map(|name| at(name)));
            let name = |path: &PathBuf| path.file_name().unwrap().to_str().unwrap().to_owned();
            found.map(|files| files.paths.iter().map(name).collect::<Vec<_>>())
        };
        assert_eq!(find(&["*.txt"]).unwrap(), ["a-1.txt", "a-10.txt", "b-1.txt"]);
        assert_eq!(find(&["b*", "?-1.tar"]).unwrap(), ["b-1.txt", "a-1.tar"]);
        assert_eq!(find(&["[b-z]-1.txt", "?/*.txt"]).unwrap(), ["b-1.txt", "[a].txt", "link.txt"]);
        assert_eq!(find(&["x/[a].txt"]).unwrap(), ["[a].txt"]);
        for (names, says) in [
            (&["c*"][..], "c*: there is no such file"),
            (&["a-1.txt", "a*"], "a-1.txt is listed twice"),
            (&["y/*.txt"], "y/*.txt: there is no such file"),
            (&["."], "is not a file"),
            (&["a-[1.txt"], "a-[1.txt: there is no such file: "),
            (&["a-{1..2}.txt"], "a-{1..2}.txt: there is no such file: braces are not expanded"),
            (&["a-1.txt", "x/../a-1.txt"], "x/../a-1.txt is listed twice"),
            (&["x/link.txt", "a-1.txt"], "a-1.txt is listed twice"),
        ] {
            let error = find(names).unwrap_err().to_string();
            assert!(error.contains(says), "{names:?}: {error}");
        }
    }
}
