//! `Input`: the bytes of a file, decompressed if its name ends with `.gz` or `.tgz`, with a
//! position.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Error, ErrorKind, Read, Seek, SeekFrom};

use flate2::read::MultiGzDecoder;

use super::source::{Files, GZIP, Listed, advice};

/// Maximum size of a record in bytes: a larger one is an error, so that a broken file does not fill
/// the memory.
pub(super) const MAX_RECORD: u64 = 1 << 30;

/// Bytes of a file with the position: the number of (decompressed) bytes before it.
///
/// The file must not change while it is read: where its bytes end, or cannot be read, it is
/// compared with its state when it was listed.
pub(super) struct Input {
    bytes: Bytes,
    place: u64,
    listed: Listed,
}

enum Bytes {
    Plain(BufReader<File>),
    Gz(Box<BufReader<MultiGzDecoder<BufReader<File>>>>),
}

impl Input {
    /// Opens a file at a position. A compressed file is decompressed up to it.
    pub(super) fn open(files: &Files, shard: usize, place: u64) -> io::Result<Self> {
        let (file, listed) = files.open(shard)?;
        let extension = files.path(shard).extension();
        let is_gz = extension.is_some_and(|extension| extension == "gz" || extension == "tgz");
        let file = BufReader::with_capacity(BUFFER, file);
        let bytes = if is_gz {
            let decoder = MultiGzDecoder::new(file);
            Bytes::Gz(Box::new(BufReader::with_capacity(BUFFER, decoder)))
        } else {
            Bytes::Plain(file)
        };
        let mut input = Self { bytes, place: 0, listed };
        input.skip(place)?;
        Ok(input)
    }

    /// Number of bytes before the next one.
    pub(super) const fn place(&self) -> u64 {
        self.place
    }

    /// Advice if the file has a format that is not read; `first` are its first bytes, decompressed.
    pub(super) fn advice(&self, first: &[u8]) -> Option<&'static str> {
        match self.bytes {
            Bytes::Plain(_) => self.listed.advice,
            Bytes::Gz(_) => advice(first).filter(|_| self.place == first.len() as u64),
        }
    }

    /// Skips `count` bytes.
    pub(super) fn skip(&mut self, count: u64) -> io::Result<()> {
        let skipped = match &mut self.bytes {
            Bytes::Plain(file) => {
                let count = count.min(self.listed.bytes.saturating_sub(self.place));
                // Small skips keep the buffer.
                let sought = match i64::try_from(count) {
                    Ok(step) if count < BUFFER as u64 => file.seek_relative(step),
                    _ => file.seek(SeekFrom::Start(self.place + count)).map(drop),
                };
                sought.map(|()| count)
            }
            Bytes::Gz(bytes) => io::copy(&mut bytes.take(count), &mut io::sink()),
        };
        let skipped = self.explain(skipped)?;
        self.place += skipped;
        if skipped == count { Ok(()) } else { Err(self.ends_early(count - skipped)) }
    }

    /// Appends bytes up to the next line feed or the end; at most `limit` bytes. Returns their
    /// number.
    pub(super) fn read_line(&mut self, line: &mut Vec<u8>, limit: u64) -> io::Result<u64> {
        let before = line.len();
        let read = self.reader(limit).read_until(b'\n', line);
        let read = self.explain(read)? as u64;
        self.place += read;
        if read < limit && !line[before..].ends_with(b"\n") {
            self.check_end()?;
        }
        Ok(read)
    }

    /// Appends `count` bytes; fewer are an error. Memory grows with the bytes read, not with
    /// `count`.
    pub(super) fn read_exact(&mut self, bytes: &mut Vec<u8>, count: u64) -> io::Result<()> {
        if let Bytes::Plain(_) = self.bytes {
            let left = self.listed.bytes.saturating_sub(self.place);
            if left < count {
                return Err(self.ends_early(count - left));
            }
            bytes.reserve_exact(usize::try_from(count).map_err(|_| ErrorKind::OutOfMemory)?);
        }
        let read = self.read_up_to(bytes, count)?;
        if read == count { Ok(()) } else { Err(self.ends_early(count - read)) }
    }

    /// Appends up to `count` bytes, fewer only at the end of the file. Returns their number.
    pub(super) fn read_up_to(&mut self, bytes: &mut Vec<u8>, count: u64) -> io::Result<u64> {
        let read = self.reader(count).read_to_end(bytes);
        let read = self.explain(read)? as u64;
        self.place += read;
        if read < count {
            self.check_end()?;
        }
        Ok(read)
    }

    /// Returns an error if the bytes end, but the file is not as it was listed.
    fn check_end(&self) -> io::Result<()> {
        self.listed.check(self.file())?;
        match self.bytes {
            Bytes::Plain(_) if self.place < self.listed.bytes => {
                Err(ends_early(self.listed.bytes - self.place))
            }
            _ => Ok(()),
        }
    }

    /// Replaces an error of reading if its cause is that the file has changed.
    fn explain<T>(&self, read: io::Result<T>) -> io::Result<T> {
        read.map_err(|error| match (self.listed.check(self.file()), &self.bytes) {
            (Err(changed), _) => changed,
            (Ok(()), Bytes::Plain(_)) => error,
            (Ok(()), Bytes::Gz(_)) => {
                let advice = match self.listed.advice {
                    Some(advice) if self.place == 0 && advice != GZIP => format!(" ({advice})"),
                    _ => String::new(),
                };
                let place = self.place;
                let text =
                    format!("not in gzip's format after {place} bytes of content{advice}: {error}");
                Error::new(error.kind(), text)
            }
        })
    }

    fn ends_early(&self, missing: u64) -> Error {
        self.listed.check(self.file()).err().unwrap_or_else(|| ends_early(missing))
    }

    fn file(&self) -> &File {
        match &self.bytes {
            Bytes::Plain(file) => file.get_ref(),
            Bytes::Gz(bytes) => bytes.get_ref().get_ref().get_ref(),
        }
    }

    /// Up to `count` bytes; none that were added after the file was listed.
    fn reader(&mut self, count: u64) -> io::Take<&mut dyn BufRead> {
        let left = self.listed.bytes.saturating_sub(self.place);
        let (bytes, count): (&mut dyn BufRead, _) = match &mut self.bytes {
            Bytes::Plain(file) => (file, count.min(left)),
            Bytes::Gz(bytes) => (bytes, count),
        };
        bytes.take(count)
    }
}

fn ends_early(missing: u64) -> Error {
    Error::new(ErrorKind::UnexpectedEof, format!("the file ends {missing} bytes too early"))
}

const BUFFER: usize = 1 << 16;
