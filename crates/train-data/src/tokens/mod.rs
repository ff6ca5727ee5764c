//! Windows of files of tokens, for language models: [`TokenWindows`]; and the file of tokens of a
//! text, made once: `TokenizedText` (feature `tokenizers`).
//!
//! A file of tokens is a sequence of `u16` or `u32` in little-endian order without a header, as
//! nanoGPT's `train.bin`.

#[cfg(feature = "tokenizers")]
mod text;

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::{Array, BoxError, Dataset, Error, Result, Sample, SampleRng};

#[cfg(feature = "tokenizers")]
pub use text::{TokenizedText, TokenizerSource};

/// Type of the numbers in a file of tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenType {
    /// Two bytes, for vocabularies of up to 65,536 tokens.
    U16,
    /// Four bytes.
    U32,
}

impl TokenType {
    /// Number of bytes of a token.
    #[must_use]
    pub const fn bytes(self) -> usize {
        match self {
            Self::U16 => 2,
            Self::U32 => 4,
        }
    }
}

/// A data set of windows of `length` tokens of files: the fields `input_ids` and `labels`, `i64` of
/// shape `[length]`. A label is the next token, so a window reads `length + 1` tokens; the last one
/// is the first of the next window. Windows follow each other without gaps, and each is of one
/// file, whose last tokens, fewer than `length`, are left out.
///
/// Tokens are read from the open files on request, at their position: a file that is larger than
/// the memory works, and one that is replaced by another meanwhile keeps its tokens.
///
/// ```
/// use train_data::tokens::{TokenType, TokenWindows};
/// use train_data::{Array, Dataset, Draw};
/// # let directory = tempfile::tempdir()?;
/// # let path = directory.path().join("tokens.bin");
///
/// let tokens: Vec<u8> = (0..9_u16).flat_map(u16::to_le_bytes).collect();
/// std::fs::write(&path, tokens)?;
/// let windows = TokenWindows::open([&path], TokenType::U16, 4)?;
/// assert_eq!(windows.len(), 2);
/// let second = windows.sample(1, &mut Draw::from(1).random())?;
/// assert_eq!(*second.get("input_ids")?, Array::new([4], vec![4_i64, 5, 6, 7])?);
/// assert_eq!(*second.get("labels")?, Array::new([4], vec![5_i64, 6, 7, 8])?);
/// # Ok::<(), train_data::BoxError>(())
/// ```
#[derive(Clone, Debug)]
pub struct TokenWindows {
    files: Arc<[TokenFile]>,
    token_type: TokenType,
    length: usize,
    /// The windows of this data set, of those of all files.
    range: Range<usize>,
}

#[derive(Debug)]
struct TokenFile {
    path: PathBuf,
    file: File,
    /// Index of the window after the last one of this file, over all files.
    end: usize,
}

impl TokenWindows {
    /// Opens files of tokens of one type, in this order.
    ///
    /// # Errors
    ///
    /// [`Error::Options`] for a length of 0, no file, a file that cannot be read, whose size is not
    /// a whole number of tokens, or that is shorter than a window.
    pub fn open(
        paths: impl IntoIterator<Item: AsRef<Path>>,
        token_type: TokenType,
        length: usize,
    ) -> Result<Self> {
        let opened = paths.into_iter().map(|path| {
            let path = path.as_ref().to_owned();
            (File::open(&path), path)
        });
        Self::of_files(opened, token_type, length)
    }

    /// As [`open`](Self::open), of files that are open already.
    pub(crate) fn of_files(
        opened: impl IntoIterator<Item = (io::Result<File>, PathBuf)>,
        token_type: TokenType,
        length: usize,
    ) -> Result<Self> {
        if length == 0 || length > MAX_LENGTH {
            let text = format!("a window must have 1 to {MAX_LENGTH} tokens, got {length}");
            return Err(Error::Options(text));
        }
        let mut files: Vec<TokenFile> = Vec::new();
        for (file, path) in opened {
            let first = files.last().map_or(0, |file| file.end);
            let file = file.map_err(|why| why.to_string());
            let counted =
                file.and_then(|file| Ok((count_windows(&file, token_type, length)?, file)));
            let (windows, file) =
                counted.map_err(|why| Error::Options(format!("{}: {why}", path.display())))?;
            files.push(TokenFile { path, file, end: first + windows });
        }
        let Some(last) = files.last() else {
            return Err(Error::Options("no file of tokens was given".to_owned()));
        };
        Ok(Self { range: 0..last.end, files: files.into(), token_type, length })
    }

    /// Splits the last `count` windows off, for an evaluation: all but these, and these. No token
    /// is the label of both.
    ///
    /// # Errors
    ///
    /// [`Error::Options`] if one of the two would be empty.
    pub fn split_last(self, count: usize) -> Result<(Self, Self)> {
        let all = self.len();
        if count == 0 || count >= all {
            return Err(Error::Options(format!(
                "of {all} windows {count} cannot be split off: each part needs one"
            )));
        }
        let at = self.range.end - count;
        let first = Self { range: self.range.start..at, ..self.clone() };
        Ok((first, Self { range: at..self.range.end, ..self }))
    }

    /// Number of tokens of a window's input.
    #[must_use]
    pub const fn length(&self) -> usize {
        self.length
    }

    /// The `length + 1` tokens of a window.
    fn tokens(&self, index: usize) -> Result<Vec<i64>, BoxError> {
        if index >= self.len() {
            return Err(format!("there are only {} windows", self.len()).into());
        }
        let window = self.range.start + index;
        let file = self.files.partition_point(|file| file.end <= window);
        let first = file.checked_sub(1).map_or(0, |before| self.files[before].end);
        let TokenFile { path, file, .. } = &self.files[file];
        let width = self.token_type.bytes();
        let mut bytes = vec![0; (self.length + 1) * width];
        let start = (window - first) as u64 * (self.length * width) as u64;
        file.read_exact_at(&mut bytes, start)
            .map_err(|why| format!("{}, tokens at byte {start}: {why}", path.display()))?;
        Ok(match self.token_type {
            TokenType::U16 => {
                bytes.as_chunks().0.iter().map(|b| u16::from_le_bytes(*b).into()).collect()
            }
            TokenType::U32 => {
                bytes.as_chunks().0.iter().map(|b| u32::from_le_bytes(*b).into()).collect()
            }
        })
    }
}

impl Dataset for TokenWindows {
    fn len(&self) -> usize {
        self.range.len()
    }

    fn sample(&self, index: usize, _: &mut SampleRng) -> Result<Sample, BoxError> {
        let mut tokens = self.tokens(index)?;
        let labels = Array::new([self.length], tokens[1..].to_vec())?;
        tokens.pop();
        Ok(Sample::new()
            .with("input_ids", Array::new([self.length], tokens)?)
            .with("labels", labels))
    }
}

/// Counts the windows of a file.
fn count_windows(file: &File, token_type: TokenType, length: usize) -> Result<usize, String> {
    let metadata = file.metadata().map_err(|why| why.to_string())?;
    if !metadata.is_file() {
        return Err("it is not a file".to_owned());
    }
    let (bytes, width) = (metadata.len(), token_type.bytes() as u64);
    if !bytes.is_multiple_of(width) {
        return Err(format!("its {bytes} bytes are not a whole number of {token_type:?} tokens"));
    }
    let tokens = bytes / width;
    match usize::try_from(tokens.saturating_sub(1) / length as u64) {
        Ok(0) => Err(format!(
            "its {tokens} tokens are fewer than the {} of a window and its last label",
            length + 1
        )),
        Ok(windows) => Ok(windows),
        Err(_) => Err(format!("its {tokens} tokens are too many")),
    }
}

/// Greatest number of tokens of a window: a sample of 128 MiB for each field.
const MAX_LENGTH: usize = 1 << 24;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{ArrayData, Batch, Draw};

    fn write(dir: &Path, name: &str, tokens: &[u32], token_type: TokenType) -> PathBuf {
        let path = dir.join(name);
        let bytes: Vec<u8> = match token_type {
            TokenType::U16 => tokens.iter().flat_map(|t| (*t as u16).to_le_bytes()).collect(),
            TokenType::U32 => tokens.iter().flat_map(|t| t.to_le_bytes()).collect(),
        };
        std::fs::write(&path, bytes).unwrap();
        path
    }

    fn numbers(batch: &Batch, field: &str) -> Vec<i64> {
        match batch.get(field).unwrap().data() {
            ArrayData::I64(numbers) => numbers.clone(),
            other => panic!("{other:?}"),
        }
    }

    fn batch(windows: &TokenWindows) -> Batch {
        let draws: Vec<_> = (0..windows.len()).map(Draw::from).collect();
        windows.batch(&draws).unwrap()
    }

    proptest! {
        /// The windows of each file are the chunks of its tokens, and labels those after them.
        #[test]
        fn windows_are_chunks_of_each_file(
            counts in prop::collection::vec(0_usize..20, 1..4),
            length in 1_usize..6,
            is_wide: bool,
        ) {
            let dir = tempfile::tempdir().unwrap();
            let token_type = if is_wide { TokenType::U32 } else { TokenType::U16 };
            let most = if is_wide { u32::MAX } else { u16::MAX.into() };
            let (mut paths, mut inputs, mut labels) = (Vec::new(), Vec::new(), Vec::new());
            for (file, count) in counts.into_iter().enumerate() {
                let count = count + length + 1;
                let tokens: Vec<u32> = (0..count as u32).map(|i| most - 100 * file as u32 - i).collect();
                paths.push(write(dir.path(), &file.to_string(), &tokens, token_type));
                let whole = (count - 1) / length * length;
                inputs.extend(tokens[..whole].iter().copied().map(i64::from));
                labels.extend(tokens[1..=whole].iter().copied().map(i64::from));
            }
            let windows = TokenWindows::open(&paths, token_type, length).unwrap();
            let all = batch(&windows);
            prop_assert_eq!(all.get("labels").unwrap().shape(), [windows.len(), length]);
            prop_assert_eq!(numbers(&all, "input_ids"), inputs.clone());
            prop_assert_eq!(numbers(&all, "labels"), labels);
            if windows.len() > 1 {
                let (first, last) = windows.split_last(1).unwrap();
                let parts = [batch(&first), batch(&last)].map(|b| numbers(&b, "input_ids"));
                prop_assert_eq!(parts.concat(), inputs);
            }
        }
    }

    #[test]
    fn files_that_have_no_window_are_errors() {
        let dir = tempfile::tempdir().unwrap();
        let error = |paths: &[PathBuf], length| {
            TokenWindows::open(paths, TokenType::U16, length).unwrap_err().to_string()
        };
        let three = write(dir.path(), "three", &[1, 2, 3], TokenType::U16);
        let odd = dir.path().join("odd");
        std::fs::write(&odd, [1, 2, 3]).unwrap();
        let message = error(&[three.clone(), dir.path().join("none")], 2);
        assert!(message.contains("none: No such file"), "{message}");
        let message = error(&[odd], 2);
        assert!(
            message.ends_with("odd: its 3 bytes are not a whole number of U16 tokens"),
            "{message}"
        );
        let message = error(std::slice::from_ref(&three), 3);
        assert!(message.contains("its 3 tokens are fewer than the 4 of a window"), "{message}");
        assert!(error(std::slice::from_ref(&three), 0).contains("1 to 16777216"));
        assert!(error(&[], 2).contains("no file"));
        assert!(error(&[dir.path().to_owned()], 2).contains("not a file"));
        let windows = TokenWindows::open([&three], TokenType::U16, 1).unwrap();
        for count in [0, 2, 3] {
            assert!(windows.clone().split_last(count).is_err(), "{count}");
        }
        let mut random = Draw::from(2).random();
        let message = windows.sample(2, &mut random).unwrap_err().to_string();
        assert_eq!(message, "there are only 2 windows");
        // A file that has become shorter since it was opened.
        std::fs::write(&three, [1, 2]).unwrap();
        let message = windows.sample(1, &mut random).unwrap_err().to_string();
        assert!(message.contains("three, tokens at byte 2: "), "{message}");
    }
}
