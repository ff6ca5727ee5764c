//! `Input`: the bytes of a file, decompressed if its name ends with `.gz` or `.tgz`, with a
//! position.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Error, ErrorKind, Read, Seek, SeekFrom};
use std::path::Path;

use flate2::read::MultiGzDecoder;

/// Maximum size of a record in bytes: a larger one is an error, so that a broken file does not fill
/// the memory.
pub(super) const MAX_RECORD: u64 = 1 << 30;

/// Bytes of a file with the position: the number of (decompressed) bytes before it.
pub(super) struct Input {
    bytes: Bytes,
    place: u64,
}

enum Bytes {
    /// Uncompressed file with its length.
    Plain(BufReader<File>, u64),
    Gz(Box<BufReader<MultiGzDecoder<BufReader<File>>>>),
}

impl Input {
    /// Opens a file at a position. A compressed file is decompressed up to it.
    pub(super) fn open(path: &Path, place: u64) -> io::Result<Self> {
        let file = File::open(path)?;
        let is_gz =
            path.extension().is_some_and(|extension| extension == "gz" || extension == "tgz");
        let mut input = if is_gz {
            let decoder = MultiGzDecoder::new(BufReader::with_capacity(BUFFER, file));
            let bytes = Bytes::Gz(Box::new(BufReader::with_capacity(BUFFER, decoder)));
            Self { bytes, place: 0 }
        } else {
            let len = file.metadata()?.len();
            Self { bytes: Bytes::Plain(BufReader::with_capacity(BUFFER, file), len), place: 0 }
        };
        input.skip(place)?;
        Ok(input)
    }

    /// Number of bytes before the next one.
    pub(super) const fn place(&self) -> u64 {
        self.place
    }

    /// Skips `count` bytes.
    pub(super) fn skip(&mut self, count: u64) -> io::Result<()> {
        let skipped = match &mut self.bytes {
            Bytes::Plain(file, len) => {
                let count = count.min(len.saturating_sub(self.place));
                // Small skips keep the buffer.
                match i64::try_from(count) {
                    Ok(step) if count < BUFFER as u64 => file.seek_relative(step)?,
                    _ => drop(file.seek(SeekFrom::Start(self.place + count))?),
                }
                count
            }
            Bytes::Gz(bytes) => io::copy(&mut bytes.take(count), &mut io::sink())?,
        };
        self.place += skipped;
        if skipped == count { Ok(()) } else { Err(ends_early(count - skipped)) }
    }

    /// Appends bytes up to the next line feed or the end; at most `limit` bytes. Returns their
    /// number.
    pub(super) fn read_line(&mut self, line: &mut Vec<u8>, limit: u64) -> io::Result<u64> {
        let read = self.reader().take(limit).read_until(b'\n', line)? as u64;
        self.place += read;
        Ok(read)
    }

    /// Appends `count` bytes; fewer are an error. Memory grows with the bytes read, not with
    /// `count`.
    pub(super) fn read_exact(&mut self, bytes: &mut Vec<u8>, count: u64) -> io::Result<()> {
        if let Bytes::Plain(_, len) = self.bytes {
            let left = len.saturating_sub(self.place);
            if left < count {
                return Err(ends_early(count - left));
            }
            bytes.reserve_exact(usize::try_from(count).map_err(|_| ErrorKind::OutOfMemory)?);
        }
        let read = self.read_up_to(bytes, count)?;
        if read == count { Ok(()) } else { Err(ends_early(count - read)) }
    }

    /// Appends up to `count` bytes, fewer only at the end of the file. Returns their number.
    pub(super) fn read_up_to(&mut self, bytes: &mut Vec<u8>, count: u64) -> io::Result<u64> {
        let read = self.reader().take(count).read_to_end(bytes)? as u64;
        self.place += read;
        Ok(read)
    }

    fn reader(&mut self) -> &mut dyn BufRead {
        match &mut self.bytes {
            Bytes::Plain(file, _) => file,
            Bytes::Gz(bytes) => bytes,
        }
    }
}

fn ends_early(missing: u64) -> Error {
    Error::new(ErrorKind::UnexpectedEof, format!("the file ends {missing} bytes too early"))
}

const BUFFER: usize = 1 << 16;
