//! The file of a checkpoint: safetensors with a checksum, written and read one entry at a time.
//!
//! The header's metadata begin with the CRC-32 of the file, computed with zeros in place of its own
//! digits. [`Reader::open`] reads the file once, and verifies it; entries are read afterwards, when
//! all ranks agree, and compared with what was verified.

use std::cell::RefCell;
use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, BufWriter, IntoInnerError, Write};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;

use crc32fast::Hasher;
use half::{bf16, f16};
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use serde::{Deserialize, Serialize};

use crate::BoxError;

/// Beginning of a header with the checksum, after the eight bytes of its length.
const CHECKSUM_PREFIX: &[u8] = br#"{"__metadata__":{"crc32":""#;
const NO_DIGITS: &str = "00000000";
const DIGITS: Range<usize> = 8 + CHECKSUM_PREFIX.len()..16 + CHECKSUM_PREFIX.len();
/// Longest header, as in safetensors.
const MAX_HEADER: u64 = 100_000_000;
/// Bytes written or read at once.
const PIECE: usize = 1 << 20;

/// Identifies the content of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Id {
    len: u64,
    /// The checksum's digits.
    crc: [u8; 8],
}

impl Id {
    /// Reads the length and the checksum's digits of a file, which may be any file; `None` if there
    /// is none.
    ///
    /// # Errors
    ///
    /// Those of the file.
    pub fn of(path: &Path) -> io::Result<Option<Self>> {
        let Some(file) = open(path)? else { return Ok(None) };
        let (len, mut crc) = (file.metadata()?.len(), [0; 8]);
        if len >= DIGITS.end as u64 {
            file.read_exact_at(&mut crc, DIGITS.start as u64)?;
        }
        Ok(Some(Self { len, crc }))
    }

    /// The checksum as text.
    pub fn checksum(&self) -> String {
        String::from_utf8_lossy(&self.crc).into_owned()
    }
}

/// Opens a regular file; `None` if there is none. Opening a FIFO would wait for its writer.
fn open(path: &Path) -> io::Result<Option<File>> {
    let opened = fs::metadata(path).and_then(|metadata| match metadata.is_file() {
        true => File::open(path),
        false if metadata.is_dir() => Err(io::ErrorKind::IsADirectory.into()),
        false => Err(io::Error::other("not a regular file")),
    });
    match opened {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        opened => opened.map(Some),
    }
}

/// Name, type and shape of an entry.
pub type Entry = (String, Dtype, Vec<usize>);

/// Writes a file's entries, in the order of its header.
#[expect(missing_debug_implementations, reason = "a hasher and buffers")]
pub struct Writer<'a> {
    file: BufWriter<&'a File>,
    /// The bytes before the data, with zeros as the checksum's digits.
    header: Vec<u8>,
    /// Checksum of the data.
    crc: Hasher,
    /// Number of bytes of data written, and of those that the header tells.
    len: u64,
    end: u64,
    piece: Vec<u8>,
}

impl<'a> Writer<'a> {
    /// Writes the header, with these keys and texts in its metadata after the checksum.
    ///
    /// # Errors
    ///
    /// Those of the file; names that are too long for a header.
    pub fn new(
        file: &'a File,
        metadata: &[(&str, &str)],
        entries: Vec<Entry>,
    ) -> Result<Self, BoxError> {
        let mut end = 0;
        let infos = entries.into_iter().map(|(name, dtype, shape)| {
            let start = end;
            end += shape.iter().product::<usize>() * dtype.bitsize() / 8;
            (name, TensorInfo { dtype, shape, data_offsets: (start, end) })
        });
        let checksum = HashMap::from([("crc32".to_owned(), NO_DIGITS.to_owned())]);
        let json = serde_json::to_vec(&Metadata::new(Some(checksum), infos.collect())?)?;
        // Inserted as text: a map would not keep the checksum first.
        let (first, rest) = json.split_at(DIGITS.end + 1 - 8);
        let mut header = [&[0; 8], first].concat();
        for (key, text) in metadata {
            write!(header, ",{}:{}", serde_json::to_string(key)?, serde_json::to_string(text)?)?;
        }
        header.extend_from_slice(rest);
        header.resize(header.len().next_multiple_of(8), b' ');
        let count = header.len() as u64 - 8;
        if count > MAX_HEADER {
            return Err("the names of the variables are too long for a safetensors header".into());
        }
        header[..8].copy_from_slice(&count.to_le_bytes());
        let mut file = BufWriter::with_capacity(PIECE, file);
        file.write_all(&header)?;
        let (crc, piece) = (Hasher::new(), Vec::new());
        Ok(Self { file, header, crc, len: 0, end: end as u64, piece })
    }

    /// Writes bytes of an entry.
    ///
    /// # Errors
    ///
    /// Those of the file.
    pub fn bytes(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.crc.update(bytes);
        self.len += bytes.len() as u64;
        self.file.write_all(bytes)
    }

    /// Writes values of an entry.
    ///
    /// # Errors
    ///
    /// Those of the file.
    pub fn values<T: Number>(&mut self, values: &[T]) -> io::Result<()> {
        let mut piece = std::mem::take(&mut self.piece);
        for values in values.chunks(PIECE / size_of::<T>()) {
            piece.resize(size_of_val(values), 0);
            T::to_bytes(values, &mut piece);
            self.bytes(&piece)?;
        }
        self.piece = piece;
        Ok(())
    }

    /// Writes the checksum, and syncs the file to disk.
    ///
    /// # Errors
    ///
    /// Those of the file.
    pub fn finish(mut self) -> io::Result<Written> {
        if self.len != self.end {
            let (len, end) = (self.len, self.end);
            let text = format!("{len} bytes were written, and the tensors' shapes tell {end}");
            return Err(io::Error::other(text));
        }
        let crc_of = |header: &[u8]| {
            let mut all = Hasher::new();
            all.update(header);
            all.combine(&self.crc);
            all.finalize()
        };
        let digits = format!("{:08x}", crc_of(&self.header));
        self.header[DIGITS].copy_from_slice(digits.as_bytes());
        let crc32 = crc_of(&self.header);
        let file = self.file.into_inner().map_err(IntoInnerError::into_error)?;
        file.write_all_at(digits.as_bytes(), DIGITS.start as u64)?;
        file.sync_all()?;
        let crc = digits.as_bytes().try_into().map_err(io::Error::other)?;
        let len = self.header.len() as u64 + self.len;
        Ok(Written { id: Id { len, crc }, len, crc32 })
    }
}

/// A complete file.
#[derive(Clone, Copy, Debug)]
pub struct Written {
    /// Identifies the content.
    pub id: Id,
    /// Number of bytes.
    pub len: u64,
    /// CRC-32 of all bytes, those of the checksum in the header included.
    pub crc32: u32,
}

/// A verified file.
#[derive(Debug)]
pub struct Reader {
    file: File,
    id: Id,
    /// Offset of the first entry's data.
    start: u64,
    header: Metadata,
    /// Checksums of the entries.
    checksums: HashMap<String, u32>,
    /// Bytes read last, and their offset: small entries are read many at once.
    window: RefCell<(u64, Vec<u8>)>,
}

impl Reader {
    /// Opens a file and verifies its checksum; `None` if there is none. Reads it piece by piece.
    ///
    /// # Errors
    ///
    /// A file that is damaged, or no checkpoint.
    pub fn open(path: &Path) -> Result<Option<Self>, BoxError> {
        let Some(file) = open(path)? else { return Ok(None) };
        let len = file.metadata()?.len();
        let (start, digits, mut all, header) = read_header(&file, len)?;
        let end = start + header.data_len() as u64;
        if end != len {
            let text = format!("the file is damaged: it has {len} bytes, its header tells {end}");
            return Err(text.into());
        }
        let mut reader = Self {
            file,
            id: Id { len, crc: digits },
            start,
            header,
            checksums: HashMap::new(),
            window: RefCell::default(),
        };
        for name in reader.header.offset_keys() {
            let mut crc = Hasher::new();
            reader.pieces(&name, |piece| crc.update(piece))?;
            all.combine(&crc);
            reader.checksums.insert(name, crc.finalize());
        }
        if format!("{:08x}", all.finalize()).as_bytes() != digits {
            return Err(
                "its checksum does not match: the file is damaged; resume from another copy".into(),
            );
        }
        Ok(Some(reader))
    }

    /// Whether a file begins as those with a checksum do.
    pub fn has_checksum(path: &Path) -> bool {
        let mut bytes = [0; DIGITS.start];
        let file = open(path).ok().flatten();
        let read = file.and_then(|file| file.read_exact_at(&mut bytes, 0).ok());
        read.is_some() && bytes[8..] == *CHECKSUM_PREFIX
    }

    /// Reads an entry of bytes of a file without verifying it; `None` if there is none.
    pub fn peek(path: &Path, name: &str) -> Option<Vec<u8>> {
        let file = open(path).ok()??;
        let (start, _, _, header) = read_header(&file, file.metadata().ok()?.len()).ok()?;
        let (from, to) = header.info(name)?.data_offsets;
        let mut bytes = vec![0; to - from];
        file.read_exact_at(&mut bytes, start + from as u64).ok()?;
        Some(bytes)
    }

    /// Reads the names of a file's entries without verifying it; none if it cannot be read.
    pub fn peek_names(path: &Path) -> Vec<String> {
        let header = open(path).ok().flatten().and_then(|file| {
            let (_, _, _, header) = read_header(&file, file.metadata().ok()?.len()).ok()?;
            Some(header)
        });
        header.map_or_else(Vec::new, |header| header.offset_keys())
    }

    /// Identifies the content.
    #[must_use]
    pub const fn id(&self) -> Id {
        self.id
    }

    /// Names of the entries.
    pub fn names(&self) -> impl Iterator<Item = &String> {
        self.checksums.keys()
    }

    /// Type and shape of an entry.
    pub fn info(&self, name: &str) -> Option<&TensorInfo> {
        self.header.info(name)
    }

    /// Checksum of an entry.
    pub fn checksum(&self, name: &str) -> Option<u32> {
        self.checksums.get(name).copied()
    }

    /// The bytes of an entry; `None` if there is none of bytes.
    ///
    /// # Errors
    ///
    /// As [`values`](Self::values).
    pub fn bytes(&self, name: &str) -> io::Result<Option<Vec<u8>>> {
        let Some(info) = self.info(name).filter(|info| info.dtype == Dtype::U8) else {
            return Ok(None);
        };
        let mut bytes = vec![0; info.data_offsets.1 - info.data_offsets.0];
        self.values(name, &mut bytes)?;
        Ok(Some(bytes))
    }

    /// Reads the values of an entry.
    ///
    /// # Errors
    ///
    /// Also if the file has changed since it was verified.
    pub fn values<T: Number>(&self, name: &str, values: &mut [T]) -> io::Result<()> {
        let (mut crc, mut rest) = (Hasher::new(), values);
        self.pieces(name, |piece| {
            crc.update(piece);
            let (now, later) = std::mem::take(&mut rest).split_at_mut(piece.len() / size_of::<T>());
            T::from_bytes(piece, now);
            rest = later;
        })?;
        match self.checksum(name) == Some(crc.finalize()) {
            true => Ok(()),
            false => Err(io::Error::other(format!("`{name}` has changed since it was verified"))),
        }
    }

    fn pieces(&self, name: &str, mut take: impl FnMut(&[u8])) -> io::Result<()> {
        let Some(info) = self.info(name) else { return Err(io::ErrorKind::NotFound.into()) };
        let (from, to) = info.data_offsets;
        let (mut at, end) = (self.start + from as u64, self.start + to as u64);
        let (first, window) = &mut *self.window.borrow_mut();
        while at < end {
            let is_inside = (*first..*first + window.len() as u64).contains(&at);
            let skipped = if is_inside { (at - *first) as usize } else { window.len() };
            let (rest, want) = (&window[skipped..], (end - at) as usize);
            if rest.len() < want.min(8) {
                window.resize((self.id.len - at).min(PIECE as u64) as usize, 0);
                *first = at;
                if let Err(error) = self.file.read_exact_at(window, at) {
                    window.clear();
                    return Err(error);
                }
                continue;
            }
            // Whole values, unless it is the entry's end.
            let count = if rest.len() < want { rest.len() / 8 * 8 } else { want };
            take(&rest[..count]);
            at += count as u64;
        }
        Ok(())
    }
}

/// Reads and checks a header. Returns the offset of the data, the checksum's digits, the checksum
/// of the bytes before the data, and the header.
fn read_header(file: &File, len: u64) -> Result<(u64, [u8; 8], Hasher, Metadata), BoxError> {
    let none = "no checksum: the file is damaged, or not saved by this version of `Trainer::save`";
    if len < DIGITS.end as u64 {
        return Err(none.into());
    }
    let mut size = [0; 8];
    file.read_exact_at(&mut size, 0)?;
    let count = u64::from_le_bytes(size);
    if count > MAX_HEADER.min(len - 8) || count < (DIGITS.end - 8) as u64 {
        return Err(none.into());
    }
    let mut bytes = vec![0; 8 + count as usize];
    file.read_exact_at(&mut bytes, 0)?;
    if bytes[8..DIGITS.start] != *CHECKSUM_PREFIX {
        return Err(none.into());
    }
    let mut digits = [0; 8];
    digits.copy_from_slice(&bytes[DIGITS]);
    bytes[DIGITS].copy_from_slice(NO_DIGITS.as_bytes());
    let mut crc = Hasher::new();
    crc.update(&bytes);
    let header = serde_json::from_slice(&bytes[8..]);
    let header = header.map_err(|error| format!("the file is damaged: its header: {error}"))?;
    Ok((8 + count, digits, crc, header))
}

/// Numbers that a file has in little-endian order.
pub trait Number: Copy + Default {
    /// Writes values into bytes.
    fn to_bytes(values: &[Self], bytes: &mut [u8]);
    /// Reads values from bytes.
    fn from_bytes(bytes: &[u8], values: &mut [Self]);
}

macro_rules! numbers {
    ($($number:ty)*) => { $(
        impl Number for $number {
            fn to_bytes(values: &[Self], bytes: &mut [u8]) {
                let (all, _) = bytes.as_chunks_mut();
                all.iter_mut().zip(values).for_each(|(bytes, value)| *bytes = value.to_le_bytes());
            }

            fn from_bytes(bytes: &[u8], values: &mut [Self]) {
                let (all, _) = bytes.as_chunks();
                values.iter_mut().zip(all).for_each(|(value, bytes)| *value = Self::from_le_bytes(*bytes));
            }
        }
    )* };
}
numbers!(f32 f16 bf16 f64 i64 i32 i16 u32 u8);

#[cfg(test)]
mod tests {
    use super::*;

    fn write(path: &Path, values: &[f32]) -> Id {
        let file = File::create(path).unwrap();
        let entries = vec![
            ("empty".to_owned(), Dtype::F32, vec![0, 3]),
            ("values".to_owned(), Dtype::F32, vec![values.len()]),
            ("bytes".to_owned(), Dtype::U8, vec![3]),
        ];
        let mut writer = Writer::new(&file, &[("key", "a \"text\"")], entries).unwrap();
        writer.values(values).unwrap();
        writer.bytes(b"abc").unwrap();
        let written = writer.finish().unwrap();
        let bytes = fs::read(path).unwrap();
        assert_eq!((written.len, written.crc32), (bytes.len() as u64, crc32fast::hash(&bytes)));
        let (_, header) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
        assert_eq!(header.metadata().as_ref().unwrap()["key"], "a \"text\"");
        written.id
    }

    #[test]
    fn entries_longer_than_a_piece_are_read_as_written() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        let values: Vec<f32> = (0..PIECE / 2 + 7).map(|i| i as f32).collect();
        let id = write(&path, &values);
        assert_eq!(Id::of(&path).unwrap(), Some(id));
        let reader = Reader::open(&path).unwrap().unwrap();
        assert_eq!(reader.id(), id);
        let mut read = vec![0.0; values.len()];
        reader.values("values", &mut read).unwrap();
        assert_eq!(read, values);
        assert_eq!(reader.bytes("bytes").unwrap().unwrap(), b"abc");
        assert!(reader.bytes("values").unwrap().is_none());
        let all = safetensors::SafeTensors::deserialize(&fs::read(&path).unwrap()).unwrap().len();
        assert_eq!(all, 3);
    }

    #[test]
    fn a_file_that_changes_after_it_was_verified_is_an_error() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        let mut values = vec![1.0; PIECE / 2];
        write(&path, &values);
        let reader = Reader::open(&path).unwrap().unwrap();
        let file = File::options().write(true).open(&path).unwrap();
        file.write_all_at(&[7], reader.start + 9).unwrap();
        let error = reader.values("values", &mut values).unwrap_err().to_string();
        assert!(error.contains("`values` has changed since it was verified"), "{error}");
        file.set_len(reader.start + 100).unwrap();
        assert!(reader.values("values", &mut values).is_err());
    }

    #[test]
    fn cut_files_are_errors() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        write(&path, &[1.0, 2.0]);
        let whole = fs::read(&path).unwrap();
        for len in 0..whole.len() {
            fs::write(&path, &whole[..len]).unwrap();
            assert!(Reader::open(&path).is_err(), "{len}");
        }
        fs::write(&path, [&whole[..], b"\0"].concat()).unwrap();
        assert!(Reader::open(&path).is_err());
    }
}
