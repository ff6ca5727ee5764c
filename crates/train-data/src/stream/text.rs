//! `TextFiles`: each line of a text file is a record.

use super::input::{Input, MAX_RECORD};
#[cfg(feature = "tokenizers")]
use super::source::FileState;
use super::source::{Files, Records, Shard, Source};
use crate::{Array, BoxError, Result, Sample};

/// Text files in UTF-8, plain or with a name that ends with `.gz`.
///
/// A line is a [`Sample`] with the single field `text`: its bytes without `\n` or `\r\n`. Empty
/// lines are records, too. A byte order mark at the start of a file is left out. A position is a
/// number of bytes, in a `.gz` file of decompressed ones; to resume, such a file is decompressed
/// from its start. A file must not change as long as the source exists: a size or a time of
/// modification that differs from those at the call of [`new`](Self::new) is an error, when the
/// file is opened and at its end.
#[derive(Debug)]
pub struct TextFiles {
    files: Files,
    skips_blank: bool,
}

impl TextFiles {
    /// Lists the files that match each pattern by name, one pattern after another: `*` matches any
    /// characters, `?` one, `[0-9]` one of these. An existing file with the name of the pattern is
    /// that file.
    ///
    /// # Errors
    ///
    /// [`Error::Options`](crate::Error::Options) for a pattern without a file, a file that is
    /// listed twice or cannot be read.
    pub fn new(patterns: impl IntoIterator<Item: AsRef<str>>) -> Result<Self> {
        Ok(Self { files: Files::find(patterns)?, skips_blank: false })
    }

    /// Skips lines that are empty or consist only of white space.
    #[must_use]
    pub fn skip_blank(self) -> Self {
        Self { skips_blank: true, ..self }
    }

    /// States of the files when they were listed.
    #[cfg(feature = "tokenizers")]
    pub(crate) fn states(&self) -> Vec<FileState> {
        self.files.states()
    }
}

impl Source for TextFiles {
    fn shards(&self) -> &[Shard] {
        &self.files.shards
    }

    fn open(&self, shard: usize, place: u64) -> Result<Box<dyn Records>, BoxError> {
        let input = Input::open(&self.files, shard, place)?;
        Ok(Box::new(Lines { input, max: MAX_RECORD, skips_blank: self.skips_blank }))
    }

    fn checksum(&self, shard: usize) -> u64 {
        self.files.checksum(shard)
    }
}

struct Lines {
    input: Input,
    /// Maximum length of a line in bytes.
    max: u64,
    skips_blank: bool,
}

impl Lines {
    fn line(&mut self, line: &mut Vec<u8>) -> Result<bool, BoxError> {
        loop {
            line.clear();
            let is_first = self.input.place() == 0;
            let read = self.input.read_line(line, self.max.saturating_add(1))?;
            if read > self.max {
                return Err(format!("the line has more than {} bytes", self.max).into());
            }
            if is_first && line.starts_with(BYTE_ORDER_MARK) {
                line.drain(..BYTE_ORDER_MARK.len());
                if line.is_empty() {
                    continue;
                }
            }
            if read == 0 || !self.skips_blank || !line.trim_ascii().is_empty() {
                return Ok(read > 0);
            }
        }
    }
}

impl Records for Lines {
    fn next(&mut self) -> Result<Option<Sample>, BoxError> {
        let mut line = Vec::new();
        if !self.line(&mut line)? {
            return Ok(None);
        }
        if let Err(error) = std::str::from_utf8(&line) {
            let advice = self.input.advice(&line).map(|advice| format!(" ({advice})"));
            let advice = advice.unwrap_or_default();
            return Err(format!("the line is not text in UTF-8{advice}: {error}").into());
        }
        if line.pop_if(|last| *last == b'\n').is_some() {
            line.pop_if(|last| *last == b'\r');
        }
        Ok(Some(Sample::new().with("text", Array::new([line.len()], line)?)))
    }

    fn skip(&mut self) -> Result<bool, BoxError> {
        self.line(&mut Vec::new())
    }

    fn place(&self) -> u64 {
        self.input.place()
    }
}

/// U+FEFF in UTF-8, which some programs write at the start of a file.
pub(super) const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

#[cfg(test)]
pub(super) mod tests {
    use std::io::Write;

    use flate2::{Compression, write::GzEncoder};
    use proptest::prelude::*;

    use super::*;
    use crate::ArrayData;

    fn text(sample: &Sample) -> String {
        match sample.get("text").unwrap().data() {
            ArrayData::U8(bytes) => String::from_utf8(bytes.clone()).unwrap(),
            other => panic!("{other:?}"),
        }
    }

    pub(in crate::stream) fn gz(bytes: &[u8]) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
        encoder.write_all(bytes).unwrap();
        encoder.finish().unwrap()
    }

    /// The file's bytes as `a.txt` and, compressed, as `a.txt.gz`; two members one after another.
    fn sources(dir: &std::path::Path, bytes: &[u8]) -> [TextFiles; 2] {
        let (first, second) = bytes.split_at(bytes.len() / 2);
        let compressed = [gz(first), gz(second)].concat();
        [("a.txt", bytes), ("a.txt.gz", &compressed)].map(|(name, bytes)| {
            let path = dir.join(name);
            std::fs::write(&path, bytes).unwrap();
            TextFiles::new([path.to_str().unwrap()]).unwrap()
        })
    }

    /// The rest of the records, each with the place before it.
    fn rest(source: &TextFiles, place: u64) -> Result<Vec<(u64, String)>, BoxError> {
        let mut records = source.open(0, place)?;
        let mut all = Vec::new();
        loop {
            let place = records.place();
            let Some(sample) = records.next()? else { return Ok(all) };
            all.push((place, text(&sample)));
        }
    }

    proptest! {
        #[test]
        fn lines_are_those_of_str_from_every_place(text in "[a\u{e9}\r\n]{0,60}") {
            let dir = tempfile::tempdir().unwrap();
            for source in sources(dir.path(), text.as_bytes()) {
                let all = rest(&source, 0).unwrap();
                prop_assert!(all.iter().map(|(_, line)| line.as_str()).eq(text.lines()));
                for (k, (place, _)) in all.iter().enumerate() {
                    prop_assert_eq!(&rest(&source, *place).unwrap(), &all[k..]);
                    let mut records = source.open(0, *place).unwrap();
                    prop_assert!(records.skip().unwrap());
                    prop_assert_eq!(records.place(), all.get(k + 1).map_or(text.len() as u64, |n| n.0));
                }
            }
        }

        #[test]
        fn broken_input_is_an_error_not_a_panic(bytes: Vec<u8>, place in 0_u64..300) {
            let dir = tempfile::tempdir().unwrap();
            for source in sources(dir.path(), &bytes) {
                let _ = rest(&source, place);
            }
            let path = dir.path().join("broken.gz");
            std::fs::write(&path, &bytes).unwrap();
            let _ = rest(&TextFiles::new([path.to_str().unwrap()]).unwrap(), place);
        }
    }

    #[test]
    fn a_byte_order_mark_at_the_start_is_left_out() {
        let dir = tempfile::tempdir().unwrap();
        for (content, lines) in [
            ("\u{feff}a\nb\n", &["a", "b"][..]),
            ("\u{feff}", &[]),
            ("\u{feff}\n", &[""]),
            ("a\n\u{feff}b", &["a", "\u{feff}b"]),
        ] {
            for source in sources(dir.path(), content.as_bytes()) {
                let all = rest(&source, 0).unwrap();
                assert!(all.iter().map(|(_, line)| line).eq(lines));
                for (k, (place, _)) in all.iter().enumerate() {
                    assert_eq!(rest(&source, *place).unwrap(), all[k..]);
                }
            }
        }
    }

    #[test]
    fn formats_that_are_not_read_are_named() {
        let dir = tempfile::tempdir().unwrap();
        let utf_16: Vec<u8> = "\u{feff}a\nb\n".encode_utf16().flat_map(u16::to_le_bytes).collect();
        let error = |name: &str, bytes: &[u8]| {
            let path = dir.path().join(name);
            std::fs::write(&path, bytes).unwrap();
            let source = TextFiles::new([path.to_str().unwrap()]).unwrap();
            rest(&source, 0).unwrap_err().to_string()
        };
        for (name, bytes, says) in [
            ("a.txt", &utf_16[..], "not text in UTF-8 (it is text in UTF-16: convert it"),
            ("a.gz", &gz(&utf_16), "not text in UTF-8 (it is text in UTF-16: convert it"),
            ("a.txt", &gz(b"a\n"), "(it is compressed by gzip: let its name end with `.gz`)"),
            ("a.zst", b"\x28\xb5\x2f\xfd\0\xff", "(it is compressed by zstd: decompress it"),
            (
                "a.gz",
                b"\x28\xb5\x2f\xfd\0\xff",
                "after 0 bytes of content (it is compressed by zstd",
            ),
            ("a.gz", b"a\n", "not in gzip's format after 0 bytes of content: "),
            ("a.gz", b"", "not in gzip's format after 0 bytes of content: "),
            ("a.gz", &[&gz(b"a\n")[..], b"\0\0"].concat(), "format after 2 bytes of content: "),
            (
                "a.gz",
                &[&gz(b"a\n")[..], b"more than a header"].concat(),
                "after 2 bytes of content: ",
            ),
        ] {
            let error = error(name, bytes);
            assert!(error.contains(says), "{name}: {error}");
        }
    }

    #[test]
    fn a_gz_file_that_is_cut_anywhere_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.gz");
        let (first, second) = (gz(b"a\nb\n"), gz(b"c\n"));
        let whole = [&first[..], &second].concat();
        for len in (0..whole.len()).filter(|len| *len != first.len()) {
            std::fs::write(&path, &whole[..len]).unwrap();
            assert!(rest(&TextFiles::new([path.to_str().unwrap()]).unwrap(), 0).is_err(), "{len}");
        }
    }

    #[test]
    fn errors_say_what_is_wrong_with_a_line() {
        let dir = tempfile::tempdir().unwrap();
        for source in sources(dir.path(), b"good\nbad \xff\n") {
            let error = rest(&source, 0).unwrap_err().to_string();
            assert!(error.contains("not text in UTF-8: invalid utf-8 sequence"), "{error}");
            let error = rest(&source, 20).unwrap_err().to_string();
            assert!(error.contains("ends 9 bytes too early"), "{error}");
        }
        let [plain, _] = sources(dir.path(), b"1234\n12345\n");
        let mut lines =
            Lines { input: Input::open(&plain.files, 0, 0).unwrap(), max: 5, skips_blank: false };
        assert_eq!(text(&lines.next().unwrap().unwrap()), "1234");
        let error = lines.next().unwrap_err().to_string();
        assert_eq!(error, "the line has more than 5 bytes");
        let whole = gz(b"a line\n");
        let path = dir.path().join("cut.gz");
        std::fs::write(&path, &whole[..whole.len() - 9]).unwrap();
        let cut = TextFiles::new([path.to_str().unwrap()]).unwrap();
        assert!(rest(&cut, 0).is_err());
    }
}
