//! `ParquetFiles`: each row of a Parquet file is a record.

use std::collections::{HashMap, HashSet};
use std::fs::File;

use parquet::basic::{Compression, ConvertedType, Repetition, Type as Physical};
use parquet::file::metadata::ParquetMetaData;
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::reader::{ReaderIter, TreeBuilder};
use parquet::record::{Field, Row};
use parquet::schema::types::{SchemaDescPtr, SchemaDescriptor, Type};

use super::source::{Files, Listed, Records, Shard, Source};
use crate::{Array, ArrayData, BoxError, Result, Sample};

/// Parquet files, uncompressed or compressed by Snappy, gzip or zstd. Needs the feature `parquet`.
///
/// A row is a [`Sample`]; a column is a field of its name, with the name of its struct and a dot as
/// prefix if it is in one. A number is an array of shape `[]`, text and binary are their bytes, a
/// list is an array with one more dimension. Doubles become `f32`, and one beyond its range is an
/// error; integers become the narrowest of `u8`, `i32` and `i64` that contains all values of their
/// type. A null is an absent field. An `f32` has 24 bits: of a time in seconds since 1970, only
/// multiples of 128 s remain. Write such a column as integers or as timestamps.
///
/// A position is a number of rows: resuming skips row groups, and reads the rows before it within
/// one. A file must not change as long as the source exists, as with
/// [`TextFiles`](super::TextFiles). The files are trusted: a page is decompressed whole, however
/// large its header says that it is, and no limit holds for a row. (A line of text and a record of
/// an archive may have at most 1 GiB.)
#[derive(Debug)]
pub struct ParquetFiles {
    files: Files,
    columns: Option<Vec<String>>,
}

impl ParquetFiles {
    /// Lists the files that match each pattern by name, one pattern after another: `*` matches any
    /// characters, `?` one, `[0-9]` one of these. An existing file with the name of the pattern is
    /// that file.
    ///
    /// # Errors
    ///
    /// [`Error::Options`](crate::Error::Options) for a pattern without a file, a file that is
    /// listed twice or cannot be read.
    pub fn new(patterns: impl IntoIterator<Item: AsRef<str>>) -> Result<Self> {
        Ok(Self { files: Files::find(patterns)?, columns: None })
    }

    /// Reads only these columns.
    #[must_use]
    pub fn columns(self, columns: impl IntoIterator<Item: Into<String>>) -> Self {
        Self { columns: Some(columns.into_iter().map(Into::into).collect()), ..self }
    }

    /// Returns the schema of a file, without unselected columns.
    fn schema(&self, whole: SchemaDescPtr) -> Result<SchemaDescPtr, BoxError> {
        let fields = whole.root_schema().get_fields();
        let schema = match &self.columns {
            None => whole,
            Some(columns) => {
                let known: HashMap<_, _> =
                    fields.iter().map(|field| (field.name(), field)).collect();
                let find = |column: &String| {
                    let found = known.get(column.as_str()).map(|field| (*field).clone());
                    found.ok_or_else(|| {
                        let have: Vec<_> = fields.iter().map(|field| field.name()).collect();
                        format!("the file has no column `{column}`; it has {have:?}")
                    })
                };
                let fields = columns.iter().map(find).collect::<Result<_, _>>()?;
                let name = whole.root_schema().name();
                let root = Type::group_type_builder(name).with_fields(fields).build()?;
                SchemaDescPtr::new(SchemaDescriptor::new(root.into()))
            }
        };
        schema.root_schema().get_fields().iter().try_for_each(|field| check(field, false))?;
        // A column `a.b` beside a struct `a` would replace the struct's field `b`.
        let mut names = HashSet::new();
        for name in schema.columns().iter().map(|column| column.path().string()) {
            if names.contains(&name) {
                return Err(format!("two columns are called `{name}`: leave one out").into());
            }
            names.insert(name);
        }
        Ok(schema)
    }
}

impl Source for ParquetFiles {
    fn shards(&self) -> &[Shard] {
        &self.files.shards
    }

    fn open(&self, shard: usize, place: u64) -> Result<Box<dyn Records>, BoxError> {
        let (file, listed) = self.files.open(shard)?;
        let reader = SerializedFileReader::new(file.try_clone()?)?;
        let schema = self.schema(reader.metadata().file_metadata().schema_descr_ptr())?;
        check_codecs(reader.metadata(), &schema)?;
        let mut rows = Rows { file, listed, reader, schema, group: 0, rows: None, place: 0 };
        rows.skip_to(place)?;
        Ok(Box::new(rows))
    }

    fn checksum(&self, shard: usize) -> u64 {
        self.files.checksum(shard)
    }

    fn unit(&self) -> &'static str {
        "row"
    }
}

struct Rows {
    /// The file of `reader`, with its state when it was listed.
    file: File,
    listed: Listed,
    reader: SerializedFileReader<File>,
    schema: SchemaDescPtr,
    /// Index of the next row group, or, if there are `rows`, of the one after theirs.
    group: usize,
    rows: Option<ReaderIter>,
    place: u64,
}

impl Rows {
    fn skip_to(&mut self, place: u64) -> Result<(), BoxError> {
        for group in self.reader.metadata().row_groups() {
            let rows = u64::try_from(group.num_rows())?;
            if self.place + rows > place {
                break;
            }
            (self.group, self.place) = (self.group + 1, self.place + rows);
        }
        while self.place < place {
            if !self.skip()? {
                return Err(format!("the file ends after {} rows", self.place).into());
            }
        }
        Ok(())
    }

    /// Reads a row. The file is compared with its state when it was listed at its end, and after an
    /// error, whose reason a change may be.
    fn row(&mut self) -> Result<Option<Row>, BoxError> {
        let row = self.next_row();
        if !matches!(row, Ok(Some(_))) {
            self.listed.check(&self.file)?;
        }
        row
    }

    fn next_row(&mut self) -> Result<Option<Row>, BoxError> {
        loop {
            if let Some(row) = self.rows.as_mut().and_then(Iterator::next) {
                let row = row?;
                self.place += 1;
                return Ok(Some(row));
            }
            if self.group == self.reader.num_row_groups() {
                return Ok(None);
            }
            let group = self.reader.get_row_group(self.group)?;
            if group.metadata().num_rows() > 0 {
                let tree = TreeBuilder::new().with_batch_size(ROWS_AHEAD);
                self.rows = Some(tree.as_iter(self.schema.clone(), &*group)?);
            }
            self.group += 1;
        }
    }
}

impl Records for Rows {
    fn next(&mut self) -> Result<Option<Sample>, BoxError> {
        let Some(row) = self.row()? else { return Ok(None) };
        let mut sample = Sample::new();
        set(&mut sample, "", &row, self.schema.root_schema())?;
        Ok(Some(sample))
    }

    fn skip(&mut self) -> Result<bool, BoxError> {
        Ok(self.row()?.is_some())
    }

    fn place(&self) -> u64 {
        self.place
    }
}

/// Returns an error for a column whose compression is not supported.
fn check_codecs(file: &ParquetMetaData, schema: &SchemaDescriptor) -> Result<(), BoxError> {
    let read: HashSet<_> = schema.root_schema().get_fields().iter().map(|f| f.name()).collect();
    for column in file.row_groups().iter().flat_map(|group| group.columns()) {
        let codec = match column.compression() {
            Compression::UNCOMPRESSED
            | Compression::SNAPPY
            | Compression::GZIP(_)
            | Compression::ZSTD(_) => continue,
            Compression::BROTLI(_) => "brotli",
            Compression::LZ4 | Compression::LZ4_RAW => "lz4",
            Compression::LZO => "lzo",
        };
        let path = column.column_path();
        if path.parts().first().is_some_and(|root| read.contains(root.as_str())) {
            let name = path.string();
            return Err(format!(
                "column `{name}` is compressed by {codec}, which is not supported: write the file with snappy, gzip \
                 or zstd (pyarrow: `compression='zstd'`)"
            )
            .into());
        }
    }
    Ok(())
}

/// Returns errors for unsupported types. `in_list`: the parent of the field is annotated as a list.
fn check(field: &Type, in_list: bool) -> Result<(), BoxError> {
    let info = field.get_basic_info();
    let refuse = |what: &str| {
        let name = field.name();
        Err(format!("column `{name}` is {what}, which is not supported: leave it out by `columns`"))
    };
    match info.converted_type() {
        ConvertedType::DECIMAL => refuse("a decimal number")?,
        ConvertedType::INTERVAL => refuse("an interval of time")?,
        ConvertedType::MAP | ConvertedType::MAP_KEY_VALUE => refuse("a map")?,
        ConvertedType::LIST if has_structs(field) => refuse("a list of structs")?,
        _ if info.repetition() == Repetition::REPEATED && !in_list => {
            refuse("repeated without being a list")?;
        }
        _ => {}
    }
    if field.is_group() {
        let is_list = info.converted_type() == ConvertedType::LIST;
        field.get_fields().iter().try_for_each(|field| check(field, is_list))?;
    }
    Ok(())
}

/// Returns whether the elements of a list are structs.
fn has_structs(list: &Type) -> bool {
    let [repeated] = list.get_fields() else { return false };
    if repeated.is_primitive() {
        return false;
    }
    // Between a list and its elements there is a group of one field, except in old files.
    let is_plain = |group: &Type| group.get_basic_info().converted_type() == ConvertedType::NONE;
    let element = match repeated.get_fields() {
        [only] if is_plain(repeated) => only,
        _ => repeated,
    };
    element.is_group() && is_plain(element)
}

/// Sets the fields of a row, or of a struct in it.
fn set(sample: &mut Sample, prefix: &str, row: &Row, schema: &Type) -> Result<(), BoxError> {
    for ((name, field), schema) in row.get_column_iter().zip(schema.get_fields()) {
        let name = format!("{prefix}{name}");
        match field {
            Field::Null => {}
            Field::Group(row) => set(sample, &format!("{name}."), row, schema)?,
            field => {
                let array = array(field, schema);
                sample.set(&name, array.map_err(|error| format!("column `{name}`: {error}"))?);
            }
        }
    }
    Ok(())
}

fn array(field: &Field, schema: &Type) -> Result<Array, BoxError> {
    Ok(match field {
        Field::Bool(value) => Array::scalar(*value),
        Field::UByte(value) => Array::scalar(*value),
        Field::Byte(value) => Array::scalar(i32::from(*value)),
        Field::Short(value) => Array::scalar(i32::from(*value)),
        Field::UShort(value) => Array::scalar(i32::from(*value)),
        Field::Int(value) | Field::Date(value) | Field::TimeMillis(value) => Array::scalar(*value),
        Field::UInt(value) => Array::scalar(i64::from(*value)),
        Field::Long(value)
        | Field::TimeMicros(value)
        | Field::TimestampMillis(value)
        | Field::TimestampMicros(value) => Array::scalar(*value),
        Field::ULong(value) => match i64::try_from(*value) {
            Ok(value) => Array::scalar(value),
            Err(_) => return Err(format!("the integer {value} is beyond i64").into()),
        },
        Field::Float16(value) => Array::scalar(*value),
        Field::Float(value) => Array::scalar(*value),
        // Arrays have no type of doubles.
        Field::Double(value) if value.is_finite() && (*value as f32).is_infinite() => {
            return Err(format!("the number {value:e} is beyond f32").into());
        }
        Field::Double(value) => Array::scalar(*value as f32),
        Field::Str(text) => Array::new([text.len()], text.as_bytes().to_vec())?,
        Field::Bytes(bytes) => Array::new([bytes.len()], bytes.data().to_vec())?,
        Field::ListInternal(list) if list.len() == 0 => Array::new([0], of_type(schema))?,
        Field::ListInternal(list) => {
            let elements = list.elements().iter().map(|element| array(element, schema));
            Array::stack(elements.collect::<Result<_, _>>()?)
                .map_err(|(index, text)| format!("element {index} of the list {text}"))?
        }
        Field::Null => return Err("a list has a null in it".into()),
        Field::Group(_) | Field::Decimal(_) | Field::MapInternal(_) => {
            let text = "lists of structs, maps and decimal numbers are not supported: leave it out by `columns`";
            return Err(text.into());
        }
    })
}

/// Returns an empty array with the type of the list's elements.
fn of_type(list: &Type) -> ArrayData {
    let mut element = list;
    while element.is_group()
        && let [only] = element.get_fields()
    {
        element = only;
    }
    if element.is_group() {
        return Vec::<u8>::new().into();
    }
    match (element.get_physical_type(), element.get_basic_info().converted_type()) {
        (Physical::BOOLEAN, _) => Vec::<bool>::new().into(),
        (Physical::INT32, ConvertedType::UINT_8) => Vec::<u8>::new().into(),
        (Physical::INT32, ConvertedType::UINT_32) | (Physical::INT64 | Physical::INT96, _) => {
            Vec::<i64>::new().into()
        }
        (Physical::INT32, _) => Vec::<i32>::new().into(),
        (Physical::FLOAT | Physical::DOUBLE, _) => Vec::<f32>::new().into(),
        (Physical::BYTE_ARRAY | Physical::FIXED_LEN_BYTE_ARRAY, _) => Vec::<u8>::new().into(),
    }
}

/// Number of rows of a column decoded at a time: few, because they may be images.
const ROWS_AHEAD: usize = 32;

#[cfg(test)]
mod tests {
    use half::f16;

    use super::*;

    fn source(file: &str) -> ParquetFiles {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/vectors");
        ParquetFiles::new([format!("{folder}/{file}.parquet")]).unwrap()
    }

    fn rest(source: &ParquetFiles, place: u64) -> Result<Vec<Sample>, BoxError> {
        let mut rows = source.open(0, place)?;
        let mut all = Vec::new();
        while let Some(sample) = rows.next()? {
            assert_eq!(rows.place(), place + all.len() as u64 + 1);
            all.push(sample);
        }
        Ok(all)
    }

    /// Row `k` of `rows.py`.
    fn row(k: u8) -> Sample {
        let bytes = |bytes: &[u8]| Array::new([bytes.len()], bytes.to_vec()).unwrap();
        let tokens: Vec<_> = (0..i32::from(k % 4)).collect();
        let matrix = vec![f32::from(k), 1.0, 2.0, 3.0];
        let mut row = Sample::new()
            .with("label", Array::scalar(i64::from(k)))
            .with("small", Array::scalar(i32::from(k) - 2))
            .with("byte", Array::scalar(250 + k % 5))
            .with("wide", Array::scalar((1_i64 << 31) + i64::from(k)))
            .with("flag", Array::scalar(k.is_multiple_of(2)))
            .with("half", Array::scalar(f16::from_f32(f32::from(k) / 2.0)))
            .with("score", Array::scalar(f32::from(k) / 4.0))
            .with("day", Array::scalar(i32::from(k)));
        if k != 1 {
            row.set("text", bytes(format!("row {k}").as_bytes()));
        }
        row.set("image.bytes", bytes(&vec![k; usize::from(k)]));
        if k.is_multiple_of(2) {
            row.set("image.path", bytes(format!("{k}.jpg").as_bytes()));
        }
        row.with("tokens", Array::new([tokens.len()], tokens).unwrap())
            .with("matrix", Array::new([2, 2], matrix).unwrap())
    }

    #[test]
    fn files_of_pyarrow_are_read_from_every_row() {
        let expected: Vec<_> = (0..10).map(row).collect();
        for file in ["none", "snappy", "gzip", "zstd"] {
            for place in 0..=10 {
                let rows = rest(&source(file), place as u64).unwrap();
                assert_eq!(rows, expected[place..], "{file} {place}");
            }
            let error = rest(&source(file), 11).unwrap_err().to_string();
            assert_eq!(error, "the file ends after 10 rows");
        }
        assert!(rest(&source("empty"), 0).unwrap().is_empty());
        let mut rows = source("snappy").open(0, 3).unwrap();
        assert!(rows.skip().unwrap());
        assert_eq!(rows.next().unwrap().unwrap(), row(4));
    }

    #[test]
    fn columns_are_chosen_by_name() {
        let chosen = rest(&source("snappy").columns(["tokens", "label"]), 5).unwrap();
        let names: Vec<_> = chosen[0].iter().map(|(name, _)| name).collect();
        assert_eq!(names, ["tokens", "label"]);
        assert_eq!(chosen[4].get("label").unwrap(), &Array::scalar(9_i64));
    }

    #[test]
    fn unsupported_columns_are_refused_by_name() {
        let error = |file: &str, columns: &[&str]| {
            rest(&source(file).columns(columns.iter().copied()), 0).unwrap_err().to_string()
        };
        for (columns, says) in [
            (&["money"][..], "column `money` is a decimal number, which is not supported: leave"),
            (&["map"], "column `map` is a map"),
            (&["plain", "holes"], "column `holes`: a list has a null in it"),
            (&["words"], "column `words`: element 1 of the list has shape [2], the one before [1]"),
            (&["plain", "plain"], "two columns are called `plain`"),
            (&["huge"], "column `huge`: the number 1e300 is beyond f32"),
            (&["huges"], "column `huges`: the number -1e39 is beyond f32"),
            (&["above"], "column `above`: the integer 9223372036854775808 is beyond i64"),
            (
                &["messages"],
                "column `messages` is a list of structs, which is not supported: leave it out",
            ),
            (&["plain", "other"], "the file has no column `other`; it has [\"money\", \"map\""),
        ] {
            let error = error("odd", columns);
            assert!(error.contains(says), "{columns:?}: {error}");
        }
        assert_eq!(rest(&source("odd").columns(["plain"]), 0).unwrap().len(), 1);
        for codec in ["brotli", "lz4"] {
            let says =
                format!("column `label` is compressed by {codec}, which is not supported: write");
            assert!(error(codec, &["label"]).starts_with(&says));
        }
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("no.parquet");
        std::fs::write(&path, b"not a Parquet file").unwrap();
        let broken = ParquetFiles::new([path.to_str().unwrap()]).unwrap();
        let error = rest(&broken, 0).unwrap_err().to_string();
        assert!(error.contains("Parquet"), "{error}");
    }
}
