//! `Source`: shards of raw records, each opened at any place; `Files`, the shards that patterns of file names stand for.

use std::path::{Path, PathBuf};

use crate::{BoxError, Error, Result, Sample};

/// Shards of raw records: files of lines, archives, tables.
///
/// A place in a shard is a number that the source chooses, such as a count of bytes; 0 is the beginning.
pub trait Source: Send + Sync {
    /// The shards, in their own order.
    fn shards(&self) -> &[Shard];

    /// Opens a shard, by its index, at a place that its [`Records`] returned, or at 0.
    ///
    /// # Errors
    ///
    /// A shard that cannot be read, or ends before the place.
    fn open(&self, shard: usize, place: u64) -> Result<Box<dyn Records>, BoxError>;

    /// What a place counts, for errors.
    fn unit(&self) -> &'static str {
        "byte"
    }
}

/// The records of an open shard, in order.
pub trait Records: Send {
    /// Reads the next record; none at the end of the shard.
    ///
    /// # Errors
    ///
    /// A record that is broken or too large.
    fn next(&mut self) -> Result<Option<Sample>, BoxError>;

    /// Skips the next record, which another rank takes; false at the end of the shard.
    ///
    /// # Errors
    ///
    /// As [`next`](Self::next).
    fn skip(&mut self) -> Result<bool, BoxError> {
        Ok(self.next()?.is_some())
    }

    /// Place of the next record.
    fn place(&self) -> u64;
}

/// Name and size of a shard. A stream resumes only where those of all shards are as before; of a name that is a path, the
/// last part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shard {
    /// What errors call it.
    pub name: String,
    /// Its size in bytes; 0 if that is not known.
    pub bytes: u64,
}

/// The files that patterns stand for, as shards.
#[derive(Debug)]
pub(super) struct Files {
    paths: Vec<PathBuf>,
    pub(super) shards: Vec<Shard>,
}

impl Files {
    /// The files of each pattern by name, one pattern after another. In the last part of a path `*` stands for any
    /// characters and `?` for one.
    pub(super) fn find(patterns: impl IntoIterator<Item: AsRef<str>>) -> Result<Self> {
        let mut paths = Vec::new();
        for pattern in patterns {
            let found = matching(pattern.as_ref())?;
            if let Some(path) = found.iter().find(|path| paths.contains(*path)) {
                let text = format!("{} is listed twice: name each file once", path.display());
                return Err(Error::Options(text));
            }
            paths.extend(found);
        }
        let shards = paths.iter().map(|path| shard(path)).collect::<Result<_>>()?;
        Ok(Self { paths, shards })
    }

    pub(super) fn path(&self, shard: usize) -> &Path {
        &self.paths[shard]
    }
}

fn shard(path: &Path) -> Result<Shard> {
    let name = path.display().to_string();
    match path.metadata() {
        Ok(metadata) if metadata.is_file() => Ok(Shard { name, bytes: metadata.len() }),
        Ok(_) => Err(Error::Options(format!("{name} is not a file; a shard is one"))),
        Err(error) => Err(Error::Options(format!("{name}: {error}"))),
    }
}

/// The files of a pattern, by name: at least one.
fn matching(pattern: &str) -> Result<Vec<PathBuf>> {
    let path = Path::new(pattern);
    let is_pattern = |text: &str| text.contains(['*', '?']);
    let (folder, name) = match (path.parent(), path.file_name().and_then(|name| name.to_str())) {
        (Some(folder), Some(name)) if is_pattern(name) => (folder, name),
        _ => return Ok(vec![path.to_owned()]),
    };
    let refuse = |text: String| Err(Error::Options(format!("{pattern}: {text}")));
    if is_pattern(&folder.to_string_lossy()) {
        return refuse("`*` and `?` stand only in the last part of a path".into());
    }
    let here = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    let entries = match here.read_dir().and_then(Iterator::collect::<Result<Vec<_>, _>>) {
        Ok(entries) => entries,
        Err(error) => return refuse(format!("cannot list {}: {error}", here.display())),
    };
    let names = entries.into_iter().map(|entry| entry.file_name());
    let mut found: Vec<_> = names
        .filter(|found| found.to_str().is_some_and(|found| matches(found, name)))
        .map(|found| folder.join(found))
        .collect();
    if found.is_empty() {
        return refuse("there is no such file".into());
    }
    found.sort();
    Ok(found)
}

/// Whether a name is of a pattern. A leading dot must be in the pattern, as in a shell.
fn matches(name: &str, pattern: &str) -> bool {
    if name.starts_with('.') && !pattern.starts_with('.') {
        return false;
    }
    let [name, pattern]: [Vec<char>; 2] = [name, pattern].map(|text| text.chars().collect());
    // `fits[k]`: the first `k` characters of the name are of the pattern read so far.
    let mut fits: Vec<bool> = (0..=name.len()).map(|k| k == 0).collect();
    for of_pattern in pattern {
        let before = std::mem::replace(&mut fits, vec![false; name.len() + 1]);
        for k in 0..=name.len() {
            fits[k] = match of_pattern {
                '*' => before[k] || (k > 0 && fits[k - 1]),
                '?' => k > 0 && before[k - 1],
                one => k > 0 && before[k - 1] && name[k - 1] == one,
            };
        }
    }
    fits[name.len()]
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
        let at = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
        let find = |names: &[&str]| {
            let found = Files::find(names.iter().map(|name| at(name)));
            let name = |path: &PathBuf| path.file_name().unwrap().to_str().unwrap().to_owned();
            found.map(|files| files.paths.iter().map(name).collect::<Vec<_>>())
        };
        assert_eq!(find(&["*.txt"]).unwrap(), ["a-1.txt", "a-10.txt", "b-1.txt"]);
        assert_eq!(find(&["b*", "?-1.tar"]).unwrap(), ["b-1.txt", "a-1.tar"]);
        for (names, says) in [
            (&["c*"][..], "c*: there is no such file"),
            (&["a-1.txt", "a*"], "a-1.txt is listed twice"),
            (&["x/*.txt"], "cannot list"),
            (&["*/a.txt"], "No such file"),
            (&["*/*.txt"], "only in the last part"),
            (&["."], "is not a file"),
        ] {
            let error = find(names).unwrap_err().to_string();
            assert!(error.contains(says), "{names:?}: {error}");
        }
    }

    #[test]
    fn stars_and_question_marks_match_as_in_a_shell() {
        for (pattern, name, fits) in [
            ("*", "", true),
            ("*", "abc", true),
            ("a*c", "abcbc", true),
            ("a*c", "abcb", false),
            ("a**", "a", true),
            ("?", "", false),
            ("a?c", "abc", true),
            ("*.tar", ".tar", false),
            (".*", ".tar", true),
        ] {
            assert_eq!(matches(name, pattern), fits, "{pattern} {name}");
        }
    }
}
