//! [`Appender`]: appends lines to a file, several per write.
//!
//! A write takes about a microsecond in the kernel, longer than an iteration of an empty loop. So
//! lines in quick succession are written together, after at most [`FLUSH_INTERVAL`]; readers see
//! complete lines, with a delay. Buffered lines are lost if the process is killed.
//!
//! Invariant: after a failed write, as on a full disk, the file ends where it ended before, so that
//! it never contains half a line.

use std::fs::File;
use std::io::{Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::{Error, Result};

/// Time after which buffered lines are written: the interval between two calls of `flush`.
pub const FLUSH_INTERVAL: Duration = Duration::from_millis(100);

/// Maximum number of buffered bytes.
pub(crate) const MOST: usize = 1 << 16;

/// A file, and the bytes that are buffered for it.
#[derive(Debug)]
pub(crate) struct Appender {
    path: PathBuf,
    file: File,
    waiting: Vec<u8>,
    /// Length of the file without the rest of a failed write; `None` for a device or a pipe.
    whole: Option<u64>,
    /// Whether that rest is still to be cut off.
    is_torn: bool,
    /// The next write takes this many bytes, and fails as on a full disk.
    #[cfg(test)]
    pub(crate) fails_after: Option<usize>,
}

impl Appender {
    /// Opens a file for appending, and creates it if necessary.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        Self::new(path, File::options().create(true).append(true).open(path))
    }

    /// Creates a file in place of an earlier one.
    pub(crate) fn create(path: &Path) -> Result<Self> {
        Self::new(path, File::create(path))
    }

    fn new(path: &Path, file: std::io::Result<File>) -> Result<Self> {
        let file = file.map_err(|source| Error::new("create", path, source))?;
        let metadata = file.metadata().map_err(|source| Error::new("create", path, source))?;
        let whole = metadata.is_file().then_some(metadata.len());
        Ok(Self {
            path: path.to_owned(),
            file,
            waiting: Vec::new(),
            whole,
            is_torn: false,
            #[cfg(test)]
            fails_after: None,
        })
    }

    /// Appends `pieces`, to the buffer if there is room.
    pub(crate) fn push(&mut self, pieces: &[&[u8]]) -> Result<()> {
        pieces.iter().for_each(|piece| self.waiting.extend_from_slice(piece));
        if self.waiting.len() < MOST { Ok(()) } else { self.flush() }
    }

    /// Writes the buffer. If that fails, its content is dropped, and what was written of it is cut
    /// off.
    pub(crate) fn flush(&mut self) -> Result<()> {
        if self.waiting.is_empty() {
            return Ok(());
        }
        let waiting = std::mem::take(&mut self.waiting);
        let written = self.cut().and_then(|()| self.write(&waiting));
        match &written {
            Ok(()) => self.whole = self.whole.map(|len| len + waiting.len() as u64),
            Err(_) => {
                self.is_torn = true;
                // If this fails, the next write tries again.
                let _ = self.cut();
            }
        }
        self.waiting = waiting;
        self.waiting.clear();
        written.map_err(|source| Error::new("write", &self.path, source))
    }

    fn write(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        #[cfg(test)]
        if let Some(count) = self.fails_after.take() {
            self.file.write_all(&bytes[..count])?;
            return Err(std::io::ErrorKind::StorageFull.into());
        }
        self.file.write_all(bytes)
    }

    /// Cuts off the rest of a failed write.
    fn cut(&mut self) -> std::io::Result<()> {
        if let (true, Some(len)) = (self.is_torn, self.whole) {
            self.file.set_len(len)?;
            // A file that was not opened for appending keeps its position.
            self.file.seek(SeekFrom::Start(len))?;
        }
        self.is_torn = false;
        Ok(())
    }
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

    #[test]
    fn half_a_line_is_cut_off_after_a_failed_write() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        let read = || std::fs::read_to_string(&path).unwrap();
        let write = |appender: &mut Appender, line: &str| {
            appender.push(&[line.as_bytes()]).unwrap();
            appender.flush()
        };
        std::fs::write(&path, "an earlier line\n").unwrap();
        for open in [Appender::open, Appender::create] {
            let mut appender = open(&path).unwrap();
            write(&mut appender, "one\n").unwrap();
            let whole = read();
            appender.fails_after = Some(2);
            assert!(write(&mut appender, "two\n").is_err());
            assert_eq!(read(), whole);
            write(&mut appender, "three\n").unwrap();
            assert_eq!(read(), format!("{whole}three\n"));
        }
    }
}
