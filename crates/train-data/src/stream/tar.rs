//! `TarFiles`: records in tar archives as in WebDataset: files with one base name are one record.

use super::input::{Input, MAX_RECORD};
use super::source::{Files, Records, Shard, Source};
use crate::{Array, BoxError, Result, Sample};

/// Archives in WebDataset's format, plain or with a name that ends with `.gz` or `.tgz`.
///
/// Consecutive files whose paths are equal up to the first dot of their names (`a/7.jpg`,
/// `a/7.cls`) are one [`Sample`]: one field of bytes per file, named by the rest after that dot in
/// lower case, and first `__key__`, the part before it. Directories, devices and files without a
/// dot are skipped, unless all files are: that is an error. So is a link that would be a file of a
/// record, as its content is elsewhere. A record's files must be consecutive, as in an archive of
/// sorted names.
///
/// An archive ends with a block of zeros, without which it is an error: it was cut. Blocks of zeros
/// may be followed by another archive (`cat a.tar b.tar`), which is read on. A position is a number
/// of bytes, in a `.gz` file of decompressed ones; to resume, such a file is decompressed from its
/// start. A file must not change as long as the source exists, as with
/// [`TextFiles`](super::TextFiles).
#[doc(alias = "WebDataset")]
#[derive(Debug)]
pub struct TarFiles {
    files: Files,
}

impl TarFiles {
    /// Lists the files that match each pattern by name, one pattern after another: `*` matches any
    /// characters, `?` one, `[0-9]` one of these. An existing file with the name of the pattern is
    /// that file.
    ///
    /// # Errors
    ///
    /// [`Error::Options`](crate::Error::Options) for a pattern without a file, a file that is
    /// listed twice or cannot be read.
    pub fn new(patterns: impl IntoIterator<Item: AsRef<str>>) -> Result<Self> {
        Ok(Self { files: Files::find(patterns)? })
    }
}

impl Source for TarFiles {
    fn shards(&self) -> &[Shard] {
        &self.files.shards
    }

    fn open(&self, shard: usize, place: u64) -> Result<Box<dyn Records>, BoxError> {
        let input = Input::open(&self.files, shard, place)?;
        Ok(Box::new(Archive { input, upcoming: None, max: MAX_RECORD }))
    }

    fn checksum(&self, shard: usize) -> u64 {
        self.files.checksum(shard)
    }
}

/// Next item of an archive.
enum Next {
    File(Entry),
    /// The end, with its position.
    End(u64),
}

/// A file of a record, before its content.
struct Entry {
    /// Position of its headers.
    place: u64,
    key: String,
    extension: String,
    size: u64,
    /// Whether it is the first of an archive that follows the end of another one.
    is_first: bool,
}

struct Archive {
    input: Input,
    /// Item after the last record, which was read to detect the end of the record.
    upcoming: Option<Next>,
    /// Maximum size of a record in bytes: contents, names and headers.
    max: u64,
}

impl Archive {
    /// Calls `take` with each file of the next record; it must read or skip the content. Returns
    /// the record's key, `None` at the end.
    fn record(
        &mut self,
        mut take: impl FnMut(&mut Input, &Entry) -> Result<(), BoxError>,
    ) -> Result<Option<String>, BoxError> {
        let first = match self.upcoming.take() {
            Some(upcoming) => upcoming,
            None => next_entry(&mut self.input)?,
        };
        let mut entry = match first {
            Next::File(entry) => entry,
            end => {
                self.upcoming = Some(end);
                return Ok(None);
            }
        };
        loop {
            take(&mut self.input, &entry)
                .and_then(|()| Ok(self.input.skip(padding(entry.size))?))
                .map_err(|error| format!("file `{}.{}`: {error}", entry.key, entry.extension))?;
            match next_entry(&mut self.input)? {
                Next::File(next) if next.key == entry.key && !next.is_first => entry = next,
                upcoming => {
                    self.upcoming = Some(upcoming);
                    return Ok(Some(entry.key));
                }
            }
        }
    }
}

impl Records for Archive {
    fn next(&mut self) -> Result<Option<Sample>, BoxError> {
        let (mut sample, mut total) = (Sample::new(), 0_u64);
        let max = self.max;
        let key = self.record(|input, entry| {
            if total == 0 {
                sample.set(KEY, bytes(entry.key.clone().into_bytes())?);
            }
            // Many empty files with long names would also fill the memory.
            let overhead = (entry.extension.len() + BLOCK) as u64;
            total = total.saturating_add(entry.size).saturating_add(overhead);
            if total > max {
                return Err(format!("with it the record has more than {max} bytes").into());
            }
            if sample.fields.len() > MAX_FILES {
                return Err(format!("with it the record has more than {MAX_FILES} files").into());
            }
            if sample.fields.has(&entry.extension) {
                return Err("it is in the record twice".into());
            }
            let mut content = Vec::new();
            input.read_exact(&mut content, entry.size)?;
            sample.set(entry.extension.clone(), bytes(content)?);
            Ok(())
        })?;
        Ok(key.map(|_| sample))
    }

    fn skip(&mut self) -> Result<bool, BoxError> {
        Ok(self.record(|input, entry| Ok(input.skip(entry.size)?))?.is_some())
    }

    fn place(&self) -> u64 {
        match &self.upcoming {
            Some(Next::File(Entry { place, .. }) | Next::End(place)) => *place,
            None => self.input.place(),
        }
    }
}

/// Reads headers up to the next file of a record, and skips other content.
fn next_entry(input: &mut Input) -> Result<Next, BoxError> {
    // Set by headers before the file's own.
    let (mut start, mut long_name, mut long_size) = (None, None, None);
    // First block of zeros; whether a file was skipped.
    let (mut end, mut has_skipped) = (None, false);
    let is_start = input.place() == 0;
    loop {
        let place = input.place();
        let at = |error: BoxError| format!("archive header at byte {place}: {error}");
        let header = match read_header(input, end.is_some()).map_err(at)? {
            Some(header) if !header.is_zero() => header,
            _ if start.is_some() => {
                return Err(at("the file ends after an extended header".into()).into());
            }
            Some(_) => {
                end.get_or_insert(place);
                continue;
            }
            None if end.is_some() && is_start && has_skipped => {
                return Err(at(NO_RECORD.into()).into());
            }
            None => return end.map(Next::End).ok_or_else(|| at(NO_END.into()).into()),
        };
        let size = header.size().map_err(at)?;
        match header.kind() {
            b'x' => {
                let (name, size) = read_extended(input, size).map_err(at)?;
                (long_name, long_size) = (name.or(long_name), size.or(long_size));
                start.get_or_insert(place);
            }
            b'L' => {
                let mut name = read_small(input, size).map_err(at)?;
                name.truncate(name.iter().position(|byte| *byte == 0).unwrap_or(name.len()));
                long_name = Some(name);
                start.get_or_insert(place);
            }
            // The name of a link's target; settings of all files, which stand before a file's own.
            kind @ (b'K' | b'g') => {
                skip_content(input, size)?;
                if kind == b'K' {
                    start.get_or_insert(place);
                }
            }
            b'S' => return Err(at("sparse files are not supported".into()).into()),
            kind @ (0 | b'0'..=b'7' | b'D' | b'V') => {
                let name = long_name.take().unwrap_or_else(|| header.name());
                let size = long_size.take().unwrap_or(size);
                let place = start.take().unwrap_or(place);
                let is_file = matches!(kind, b'0' | b'7' | b'1' | b'2' | 0);
                if is_file && let Some((key, extension)) = split(&name).map_err(at)? {
                    let is_first = end.is_some();
                    if matches!(kind, b'1' | b'2') {
                        return Err(at(LINK.into()).into());
                    }
                    return Ok(Next::File(Entry { place, key, extension, size, is_first }));
                }
                has_skipped |= is_file && !name.ends_with(b"/");
                // Links, devices and directories have no content, regardless of their size.
                if !matches!(kind, b'1'..=b'6') {
                    skip_content(input, size)?;
                }
            }
            kind => {
                let kind = kind.escape_ascii();
                return Err(at(format!("entries of kind `{kind}` are not supported").into()).into());
            }
        }
    }
}

/// A header block.
struct Header([u8; BLOCK]);

impl Header {
    fn kind(&self) -> u8 {
        self.0[156]
    }

    fn size(&self) -> Result<u64, BoxError> {
        number(&self.0[124..136]).ok_or_else(|| "it has no valid size".into())
    }

    /// `prefix/name`, or the name alone.
    fn name(&self) -> Vec<u8> {
        let field = |range: std::ops::Range<usize>| {
            let bytes = &self.0[range];
            &bytes[..bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len())]
        };
        let (name, prefix) = (field(0..100), field(345..500));
        let is_posix = &self.0[257..263] == b"ustar\0";
        if is_posix && !prefix.is_empty() { [prefix, b"/", name].concat() } else { name.to_vec() }
    }

    fn is_zero(&self) -> bool {
        self.0 == [0; BLOCK]
    }

    /// Returns whether the sum of the bytes, with the sum field read as spaces, equals the header's
    /// sum.
    fn is_whole(&self) -> bool {
        let sum = |byte: fn(u8) -> i64| {
            let bytes = self.0.iter().enumerate();
            bytes.map(|(k, b)| byte(if (148..156).contains(&k) { b' ' } else { *b })).sum::<i64>()
        };
        // Some old programs added signed bytes.
        let sums = [sum(i64::from), sum(|byte| i64::from(byte.cast_signed()))];
        number(&self.0[148..156])
            .is_some_and(|n| sums.iter().any(|sum| u64::try_from(*sum) == Ok(n)))
    }
}

/// Reads a header, or a block of zeros; `None` at the end of the file. `is_after_end`: after a
/// block of zeros.
fn read_header(input: &mut Input, is_after_end: bool) -> Result<Option<Header>, BoxError> {
    let mut block = Vec::with_capacity(BLOCK);
    let read = input.read_up_to(&mut block, BLOCK as u64)?;
    let is_zero = block.iter().all(|byte| *byte == 0);
    let header = match <[u8; BLOCK]>::try_from(block) {
        Ok(block) => Header(block),
        Err(_) if read == 0 || (is_zero && is_after_end) => return Ok(None),
        Err(_) => return Err(format!("the file ends after {read} of its {BLOCK} bytes").into()),
    };
    if is_zero || header.is_whole() {
        return Ok(Some(header));
    }
    if is_after_end {
        return Err("other bytes follow the end of the archive: cut them off".into());
    }
    let advice = input.advice(&header.0).map(|advice| format!(" ({advice})")).unwrap_or_default();
    let what = format!("its checksum is wrong: this is no tar archive{advice}, or it is damaged");
    Err(what.into())
}

/// Error of an archive whose files were all skipped.
const NO_RECORD: &str = "no file of the archive belongs to a record: their names lack a dot";
/// Error of a file without content.
const LINK: &str = "the file is a link to another one: make the archive with its content (`tar --dereference \
                    --hard-dereference`)";
/// Error of an archive without a block of zeros.
const NO_END: &str = "the archive was cut: it lacks the blocks of zeros of its end; make it anew, or, if it is whole, \
                      append 1024 bytes of zeros";

/// Parses octal digits, or, if the first bit is set, a big-endian binary number.
fn number(field: &[u8]) -> Option<u64> {
    if field[0] & 0x80 != 0 {
        let (high, low) = field.split_at(field.len() - 8);
        let is_small = high.iter().enumerate().all(|(k, b)| *b == if k == 0 { 0x80 } else { 0 });
        return is_small.then(|| u64::from_be_bytes(low.try_into().expect("eight bytes")));
    }
    let text = std::str::from_utf8(field).ok()?.trim_matches([' ', '\0']);
    if text.is_empty() { Some(0) } else { u64::from_str_radix(text, 8).ok() }
}

/// Reads an extended header (pax): name and size of the next file.
fn read_extended(input: &mut Input, size: u64) -> Result<(Option<Vec<u8>>, Option<u64>), BoxError> {
    let content = read_small(input, size)?;
    let (mut name, mut size, mut rest) = (None, None, &content[..]);
    while !rest.is_empty() {
        // `length key=value\n`, where `length` is that of the whole line.
        let line = next_line(rest).ok_or("an extended header is damaged")?;
        rest = &rest[line.len()..];
        let blank = line.iter().position(|byte| *byte == b' ').unwrap_or(0);
        let pair = &line[blank + 1..line.len() - 1];
        let equals = pair.iter().position(|b| *b == b'=').ok_or("an extended header is damaged")?;
        let (key, value) = (&pair[..equals], &pair[equals + 1..]);
        match key {
            b"path" => name = Some(value.to_vec()),
            b"size" => {
                let digits = std::str::from_utf8(value).ok().and_then(|text| text.parse().ok());
                size = Some(digits.ok_or("an extended header has no valid size")?);
            }
            _ if key.starts_with(b"GNU.sparse") => {
                return Err("sparse files are not supported".into());
            }
            _ => {}
        }
    }
    Ok((name, size))
}

/// Returns the first line of an extended header, with the length given in it; `None` if invalid.
fn next_line(rest: &[u8]) -> Option<&[u8]> {
    let blank = rest.iter().position(|byte| *byte == b' ')?;
    let len: usize = std::str::from_utf8(&rest[..blank]).ok()?.parse().ok()?;
    rest.get(..len).filter(|line| len > blank + 1 && line.ends_with(b"\n"))
}

/// Content of a header before a file's own.
fn read_small(input: &mut Input, size: u64) -> Result<Vec<u8>, BoxError> {
    if size > MAX_HEADER {
        return Err(
            format!("an extended header of {size} bytes is larger than {MAX_HEADER}").into()
        );
    }
    let mut content = Vec::new();
    input.read_exact(&mut content, size)?;
    input.skip(padding(size))?;
    Ok(content)
}

fn skip_content(input: &mut Input, size: u64) -> Result<(), BoxError> {
    input.skip(size)?;
    Ok(input.skip(padding(size))?)
}

/// Splits a path at the first dot of its last component, with the rest in lower case; `None`
/// without a dot, or with nothing before it.
fn split(path: &[u8]) -> Result<Option<(String, String)>, BoxError> {
    let path = std::str::from_utf8(path)
        .map_err(|_| format!("the name `{}` is not UTF-8", path.escape_ascii()))?;
    let name = path.rfind('/').map_or(0, |slash| slash + 1);
    Ok(match path[name..].split_once('.') {
        Some((stem, extension)) if !stem.is_empty() && !extension.is_empty() => {
            Some((path[..name + stem.len()].to_owned(), extension.to_lowercase()))
        }
        _ => None,
    })
}

fn bytes(content: Vec<u8>) -> Result<Array> {
    Array::new([content.len()], content)
}

/// Number of bytes that pad content to whole blocks.
const fn padding(size: u64) -> u64 {
    (BLOCK as u64 - size % BLOCK as u64) % BLOCK as u64
}

/// Name of the field with the common part of the paths of a record's files.
const KEY: &str = "__key__";
/// Number of bytes of a header.
const BLOCK: usize = 512;
/// Maximum number of files of a record.
const MAX_FILES: usize = 4096;
/// Maximum size of an extended header.
const MAX_HEADER: u64 = 1 << 20;

#[cfg(test)]
pub(super) mod tests {
    use std::path::Path;

    use proptest::prelude::*;

    use super::super::text::tests::gz;
    use super::*;
    use crate::ArrayData;

    /// A file's header, its sum right, and its content.
    pub(in crate::stream) fn file(name: &str, kind: u8, content: &[u8]) -> Vec<u8> {
        let mut block = [0; BLOCK];
        block[..name.len()].copy_from_slice(name.as_bytes());
        block[124..136].copy_from_slice(format!("{:011o}\0", content.len()).as_bytes());
        block[156] = kind;
        let mut file = summed(block).to_vec();
        file.extend(content);
        file.resize(file.len().next_multiple_of(BLOCK), 0);
        file
    }

    fn summed(mut block: [u8; BLOCK]) -> [u8; BLOCK] {
        block[148..156].fill(b' ');
        let sum: u32 = block.iter().map(|byte| u32::from(*byte)).sum();
        block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        block
    }

    /// The two blocks of zeros after the last file.
    pub(in crate::stream) const END: [u8; 2 * BLOCK] = [0; 2 * BLOCK];

    fn source(dir: &Path, bytes: &[u8]) -> TarFiles {
        source_of(dir, "a.tar", bytes)
    }

    fn source_of(dir: &Path, name: &str, bytes: &[u8]) -> TarFiles {
        let path = dir.join(name);
        std::fs::write(&path, bytes).unwrap();
        TarFiles::new([path.to_str().unwrap()]).unwrap()
    }

    fn fields(sample: &Sample) -> Vec<(String, String)> {
        let field = |(name, array): (&str, &Array)| match array.data() {
            ArrayData::U8(bytes) => (name.to_owned(), String::from_utf8(bytes.clone()).unwrap()),
            other => panic!("{other:?}"),
        };
        sample.iter().map(field).collect()
    }

    /// The rest of the records, each with the place before it.
    fn rest(source: &TarFiles, place: u64) -> Result<Vec<(u64, Sample)>, BoxError> {
        let mut records = source.open(0, place)?;
        let mut all = Vec::new();
        loop {
            let place = records.place();
            let Some(sample) = records.next()? else { return Ok(all) };
            all.push((place, sample));
        }
    }

    fn error(bytes: &[u8]) -> String {
        let dir = tempfile::tempdir().unwrap();
        let error = rest(&source(dir.path(), bytes), 0).unwrap_err().to_string();
        let mut records = source(dir.path(), bytes).open(0, 0).unwrap();
        // A reader that skips the record finds the broken header, too.
        if error.contains("header") {
            assert!((0..3).any(|_| records.skip().is_err()), "{error}");
        }
        error
    }

    #[test]
    fn archives_of_gnu_tar_and_python_are_read_from_every_place() {
        let vectors = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/vectors");
        for format in ["v7", "ustar", "gnu", "posix", "python"] {
            let path = vectors.join(format!("{format}.tar.gz"));
            let dir = tempfile::tempdir().unwrap();
            let tgz = dir.path().join("a.tgz");
            std::fs::copy(&path, &tgz).unwrap();
            let source = TarFiles::new([tgz.to_str().unwrap()]).unwrap();
            let all = rest(&source, 0).unwrap();
            let long = "long/".repeat(if format == "v7" { 1 } else { 40 });
            let expected: [&[(&str, &str)]; 4] = [
                &[("__key__", "set/0"), ("cls", "3"), ("jpg", "image 0"), ("seg.png", "mask")],
                &[("__key__", "set/1"), ("cls", ""), ("jpg", &"1".repeat(1024))],
                &[("__key__", "set/\u{e9}"), ("txt", "accent")],
                &[("__key__", &format!("set/{long}2")), ("cls", "4"), ("jpg", "image 2")],
            ];
            assert_eq!(all.len(), expected.len(), "{format}");
            for (k, (place, sample)) in all.iter().enumerate() {
                let got = fields(sample);
                let got: Vec<_> = got.iter().map(|(k, v)| (k.as_str(), v.as_str())).collect();
                assert_eq!(got, expected[k], "{format}");
                assert_eq!(rest(&source, *place).unwrap(), all[k..], "{format}");
                let mut records = source.open(0, *place).unwrap();
                assert!(records.skip().unwrap());
                let after = records.place();
                assert!(rest(&source, after).unwrap() == all[k + 1..], "{format}");
            }
        }
    }

    #[test]
    fn an_archive_may_have_no_file_and_be_followed_by_others() {
        let dir = tempfile::tempdir().unwrap();
        let one = || [file("a.txt", 0, b"x"), vec![0; BLOCK]].concat();
        let many = [one(), END.to_vec(), one(), one(), file("b.txt", b'0', b""), END.to_vec()];
        for (bytes, count) in [
            (vec![0; BLOCK], 0),
            (END.to_vec(), 0),
            (vec![0; 20 * BLOCK + 7], 0),
            (one(), 1),
            ([one(), vec![0; 3]].concat(), 1),
            (many.concat(), 4),
            ([file("a.txt", b'0', b""), file("folder/", 0, b""), END.to_vec()].concat(), 1),
            ([file("x", b'g', b"12 a=bcdefg\n"), END.to_vec()].concat(), 0),
        ] {
            let source = source(dir.path(), &bytes);
            let mut records = source.open(0, 0).unwrap();
            for _ in 0..count {
                assert!(records.next().unwrap().is_some());
            }
            for _ in 0..2 {
                assert!(records.next().unwrap().is_none());
                assert!(rest(&source, records.place()).unwrap().is_empty());
            }
        }
    }

    /// Archives of records, each record a key and the extensions of its files.
    fn archives() -> impl Strategy<Value = Vec<Vec<(u8, Vec<u8>)>>> {
        let record = (0..3_u8, prop::collection::btree_set(0..4_u8, 1..4));
        let record = record.prop_map(|(key, files)| (key, files.into_iter().collect()));
        prop::collection::vec(prop::collection::vec(record, 0..4), 1..4)
    }

    proptest! {
        /// Beside a list of the files: records of archives one after another, each cut anywhere.
        #[test]
        fn archives_have_all_their_records_or_an_error(
            archives in archives(),
            zeros in 1..4_usize,
            cuts in prop::collection::vec(0..1_000_000_usize, 3),
            is_gz: bool,
        ) {
            let dir = tempfile::tempdir().unwrap();
            let (mut bytes, mut expected) = (Vec::new(), Vec::new());
            let mut last_file = 0;
            for records in &archives {
                let mut before = None;
                for (at, (key, extensions)) in records.iter().enumerate() {
                    // Neighbours of one key would be one record.
                    let key = if before == Some(*key) { format!("{key}-{at}") } else { key.to_string() };
                    before = key.parse::<u8>().ok();
                    let mut fields = vec![("__key__".to_owned(), format!("d/{key}"))];
                    for extension in extensions {
                        let content = "c".repeat(usize::from(*extension) * 300);
                        bytes.extend(file(&format!("d/{key}.{extension}"), b'0', content.as_bytes()));
                        fields.push((extension.to_string(), content));
                    }
                    last_file = bytes.len();
                    expected.push(fields);
                }
                bytes.resize(bytes.len() + zeros * BLOCK, 0);
            }
            let read = |bytes: &[u8]| {
                let bytes = if is_gz { gz(bytes) } else { bytes.to_vec() };
                let source = source_of(dir.path(), if is_gz { "a.tgz" } else { "a.tar" }, &bytes);
                let all = rest(&source, 0)?;
                Ok::<_, BoxError>(all.iter().map(|(_, sample)| fields(sample)).collect::<Vec<_>>())
            };
            prop_assert_eq!(&read(&bytes).unwrap(), &expected);
            for cut in cuts.iter().flat_map(|cut| [*cut, cut / BLOCK * BLOCK]) {
                let cut = cut % bytes.len();
                match read(&bytes[..cut]) {
                    Ok(all) if archives.len() == 1 || cut >= last_file + BLOCK => {
                        prop_assert!(cut >= last_file + BLOCK, "{}", cut);
                        prop_assert_eq!(&all, &expected);
                    }
                    // The archives before the cut are whole, as nothing tells that more followed.
                    Ok(all) => prop_assert!(expected.starts_with(&all)),
                    Err(error) => {
                        let error = error.to_string();
                        prop_assert!(error.contains("header at byte") || error.contains("file `"), "{}", error);
                    }
                }
            }
            if is_gz {
                let whole = gz(&bytes);
                for len in [0, cuts[0] % whole.len(), cuts[1] % whole.len(), whole.len() - 1] {
                    let source = source_of(dir.path(), "b.tgz", &whole[..len]);
                    prop_assert!(rest(&source, 0).is_err(), "{}", len);
                }
            }
        }
    }

    #[test]
    fn errors_say_what_is_wrong_where() {
        let whole = || file("a.txt", b'0', &[b'x'; 700]);
        let with = |bytes: Vec<u8>| [whole(), bytes].concat();
        let mut damaged = file("b.txt", b'0', b"y");
        damaged[3] ^= 1;
        let mut sizeless = [0; BLOCK];
        sizeless[..BLOCK].copy_from_slice(&file("b.txt", b'0', b"")[..BLOCK]);
        sizeless[124] = b'9';
        let mut huge = sizeless;
        huge[124..136].copy_from_slice(&[0x80, 0, 0, 0, 255, 255, 255, 255, 255, 255, 255, 255]);
        for (bytes, says) in [
            (with(damaged), "archive header at byte 1536: its checksum is wrong"),
            (with(summed(sizeless).to_vec()), "at byte 1536: it has no valid size"),
            (
                with(summed(huge).to_vec()),
                "file `b.txt`: with it the record has more than 1073741824",
            ),
            (with(vec![1; 100]), "at byte 1536: the file ends after 100 of its 512 bytes"),
            (with(file("x", b'S', b"")), "at byte 1536: sparse files are not supported"),
            (with(file("x", b'x', b"22 GNU.sparse.major=1\n")), "sparse files are not supported"),
            (with(file("x", b'x', b"12 path=b.c\n")), "the file ends after an extended header"),
            (with(file("x", b'x', b"13 path=b.c\n")), "an extended header is damaged"),
            (with(file("x", b'x', b"2 \n")), "an extended header is damaged"),
            (with(file("x", b'x', b"9 size=a\n")), "no valid size"),
            (with(file("a.TXT", b'0', b"")), "file `a.txt`: it is in the record twice"),
            (file("a.__key__", b'0', b""), "it is in the record twice"),
            (with(file("a.b\u{e9}", b'0', b""))[..whole().len() + 511].to_vec(), "after 511"),
            (whole(), "at byte 1536: the archive was cut: it lacks the blocks of zeros"),
            (vec![], "archive header at byte 0: the archive was cut"),
            (with(file("b.txt", b'1', b"")), "at byte 1536: the file is a link to another one"),
            (
                [file("d/", 0, b""), file("d/a", b'0', b"y"), END.to_vec()].concat(),
                "no file of the",
            ),
            (file("d/a", b'0', b"y"), "at byte 1024: the archive was cut"),
            (with(file("b.txt", b'2', b"")), "the file is a link to another one: make"),
            ([file("a", b'2', b""), END.to_vec()].concat(), "no file of the archive belongs"),
            (with(file("x", b'M', b"y")), "at byte 1536: entries of kind `M` are not supported"),
            (with([END.to_vec(), vec![1; 600]].concat()), "byte 2560: other bytes follow the end"),
            (with([END.to_vec(), vec![1; 6]].concat()), "byte 2560: the file ends after 6 of its"),
            (b"(\xb5/\xfd".repeat(200), "no tar archive (it is compressed by zstd: decompress it"),
            (whole()[..900].to_vec(), "file `a.txt`: the file ends 312 bytes too early"),
            (whole()[..1300].to_vec(), "file `a.txt`: the file ends 236 bytes too early"),
        ] {
            let error = error(&bytes);
            assert!(error.contains(says), "{says}: {error}");
        }
        let mut latin = [0; BLOCK];
        latin.copy_from_slice(&file("a.txt", b'0', b""));
        latin[0] = 0xe9;
        assert!(error(&summed(latin)).contains(r"the name `\xe9.txt` is not UTF-8"));
        let mut long = file("x", b'L', b"");
        long[124..135].copy_from_slice(b"00004000001");
        let long: [u8; BLOCK] = long.try_into().unwrap();
        let error = error(&summed(long));
        assert!(error.contains("of 1048577 bytes is larger than 1048576"), "{error}");
    }

    #[test]
    fn names_count_as_bytes_of_a_record_and_its_files_are_limited() {
        let dir = tempfile::tempdir().unwrap();
        let files = |count: usize| -> Vec<u8> {
            (0..count).flat_map(|k| file(&format!("a.{k}"), b'0', b"")).chain(END).collect()
        };
        let next = |bytes: &[u8], max| {
            let path = dir.path().join("a.tar");
            std::fs::write(&path, bytes).unwrap();
            let files = Files::find([path.to_str().unwrap()]).unwrap();
            Archive { input: Input::open(&files, 0, 0).unwrap(), upcoming: None, max }.next()
        };
        assert!(next(&files(5), 2565).unwrap().is_some());
        let error = next(&files(5), 2564).unwrap_err().to_string();
        assert_eq!(error, "file `a.4`: with it the record has more than 2564 bytes");
        assert!(next(&files(4096), MAX_RECORD).unwrap().is_some());
        let error = next(&files(4097), MAX_RECORD).unwrap_err().to_string();
        assert_eq!(error, "file `a.4096`: with it the record has more than 4096 files");
    }

    #[test]
    fn headers_that_are_skipped_keep_a_long_name() {
        let dir = tempfile::tempdir().unwrap();
        let (short, link) = (file("a.txt", b'0', b"y"), file("x", b'K', b"target"));
        let (long, pax) = (file("x", b'L', b"b.txt\0"), file("x", b'x', b"14 path=b.txt\n"));
        let global = file("x", b'g', b"14 path=c.txt\n");
        for headers in [[&long, &link], [&link, &long], [&pax, &global], [&global, &pax]] {
            let bytes = [&headers[0][..], headers[1], &short, &END].concat();
            let source = source(dir.path(), &bytes);
            let all = rest(&source, 0).unwrap();
            assert_eq!(fields(&all[0].1)[0].1, "b");
        }
    }

    /// Pieces of which archives are made: right, wrong and cut ones.
    fn piece() -> impl Strategy<Value = Vec<u8>> {
        let name = prop::sample::select(vec!["a.txt", "a.cls", "b.txt", "c", "d/", "../e.f.g"]);
        let kind = prop::sample::select(b"0\x007xLKgS125z".to_vec());
        let content = prop_oneof![
            Just(b"12 path=b.c\n11 size=70\n".to_vec()),
            prop::collection::vec(any::<u8>(), 0..600),
        ];
        let header =
            (name, kind, content).prop_map(|(name, kind, content)| file(name, kind, &content));
        let changed =
            (header.clone(), 0..12_usize, any::<u8>()).prop_map(|(mut file, at, byte)| {
                file[124 + at] = byte;
                let block = summed(file[..BLOCK].try_into().unwrap());
                file[..BLOCK].copy_from_slice(&block);
                file
            });
        let cut = (header.clone(), 0..600_usize).prop_map(|(mut file, len)| {
            file.truncate(len);
            file
        });
        prop_oneof![4 => header, 2 => changed, 1 => cut, 1 => Just(vec![0; BLOCK])]
    }

    proptest! {
        #[test]
        fn broken_archives_are_errors_not_panics(
            pieces in prop::collection::vec(piece(), 0..6),
            place in prop_oneof![Just(0), 0..4000_u64],
        ) {
            let dir = tempfile::tempdir().unwrap();
            let bytes = [&pieces.concat()[..], &END].concat();
            let source = source(dir.path(), &bytes);
            let Ok(all) = rest(&source, place) else { return Ok(()) };
            for (k, (place, _)) in all.iter().enumerate() {
                prop_assert_eq!(&rest(&source, *place).unwrap(), &all[k..]);
                let mut records = source.open(0, *place).unwrap();
                prop_assert!(records.skip().unwrap());
                prop_assert_eq!(&rest(&source, records.place()).unwrap(), &all[k + 1..]);
            }
        }
    }
}
