//! [`Appender`]: appends lines to a file, several per write.
//!
//! A write takes about a microsecond in the kernel, longer than an iteration of an empty loop. So
//! lines in quick succession are written together, after at most [`WAIT`]; readers see complete
//! lines, with a delay. Buffered lines are lost if the process is killed.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::{Error, Result};

/// Maximum time for which a line is buffered if iterations are shorter.
pub(crate) const WAIT: Duration = Duration::from_millis(100);

/// Maximum number of buffered bytes.
pub(super) const MOST: usize = 1 << 16;

/// A file, and the bytes that are buffered for it.
#[derive(Debug)]
pub(crate) struct Appender {
    path: PathBuf,
    file: File,
    waiting: Vec<u8>,
}

impl Appender {
    /// Opens a file for appending, and creates it if necessary.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        Self::new(path, File::options().create(true).append(true).open(path))
    }

    /// Creates a file in place of an earlier one.
    pub(super) fn create(path: &Path) -> Result<Self> {
        Self::new(path, File::create(path))
    }

    fn new(path: &Path, file: std::io::Result<File>) -> Result<Self> {
        let file = file.map_err(|source| io("create", path, source))?;
        Ok(Self { path: path.to_owned(), file, waiting: Vec::new() })
    }

    /// Appends `pieces`, to the buffer if there is room.
    pub(crate) fn push(&mut self, pieces: &[&[u8]]) -> Result<()> {
        pieces.iter().for_each(|piece| self.waiting.extend_from_slice(piece));
        if self.waiting.len() < MOST { Ok(()) } else { self.flush() }
    }

    /// Writes the buffer. If that fails, its content is dropped.
    pub(crate) fn flush(&mut self) -> Result<()> {
        if self.waiting.is_empty() {
            return Ok(());
        }
        let written = self.file.write_all(&self.waiting);
        self.waiting.clear();
        written.map_err(|source| io("write", &self.path, source))
    }
}

fn io(what: &str, path: &Path, source: std::io::Error) -> Error {
    Error::Io { what: format!("cannot {what} {}", path.display()), source }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_buffered_up_to_a_limit() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        let read = || std::fs::read(&path).unwrap().len();
        let mut appender = Appender::open(&path).unwrap();
        appender.push(&[b"one ", b"line\n"]).unwrap();
        assert_eq!(read(), 0);
        appender.flush().unwrap();
        assert_eq!(read(), 9);
        let half = vec![b'x'; MOST / 2];
        appender.push(&[&half]).unwrap();
        assert_eq!(read(), 9);
        appender.push(&[&half]).unwrap();
        assert_eq!(read(), 9 + MOST);
    }

    #[test]
    fn full_disk_is_an_error_and_clears_the_buffer() {
        let full = Path::new("/dev/full");
        let mut appender = Appender::open(full).unwrap();
        appender.push(&[b"a line\n"]).unwrap();
        let said = appender.flush().unwrap_err().to_string();
        assert!(said.starts_with("cannot write /dev/full"), "{said}");
        appender.flush().unwrap();
    }
}
