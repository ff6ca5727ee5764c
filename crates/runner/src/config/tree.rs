//! TOML text to a tree that remembers where each value stood.

use std::ops::Range;
use std::sync::Arc;

use toml::de::{DeTable, DeValue};

use super::Section;
use crate::{Error, Result};

/// The text a configuration came from, to turn an offset into a place.
#[derive(Debug)]
pub(super) struct Source {
    name: String,
    line_starts: Vec<usize>,
    text: String,
}

impl Source {
    fn new(name: &str, text: &str) -> Self {
        let newlines = text.bytes().enumerate().filter(|(_, b)| *b == b'\n').map(|(i, _)| i + 1);
        let line_starts = std::iter::once(0).chain(newlines).collect();
        Self { name: name.to_owned(), line_starts, text: text.to_owned() }
    }

    /// The line that `offset` is on, counted from 1.
    pub(super) fn line(&self, offset: usize) -> usize {
        self.line_starts.partition_point(|start| *start <= offset)
    }

    /// `file:line:col`, both counted from 1, columns in characters.
    fn place(&self, offset: usize) -> String {
        let line = self.line(offset);
        let start = self.line_starts[line - 1];
        let column = self.text.get(start..offset).map_or(0, |s| s.chars().count()) + 1;
        format!("{}:{line}:{column}", self.name)
    }

    /// An error at `offset`.
    pub(super) fn error(&self, offset: usize, message: impl std::fmt::Display) -> Error {
        Error::Config(format!("{}: {message}", self.place(offset)))
    }
}

/// A value and where it stands.
#[derive(Clone, Debug)]
pub(super) struct Node {
    pub(super) value: Value,
    pub(super) span: Range<usize>,
}

/// What TOML can say.
#[derive(Clone, Debug)]
pub(super) enum Value {
    String(String),
    Integer(i64),
    Float(f64),
    Boolean(bool),
    Array(Vec<Node>),
    Table(Vec<Entry>),
    Datetime,
}

/// One `key = value` of a table.
#[derive(Clone, Debug)]
pub(super) struct Entry {
    pub(super) key: String,
    pub(super) key_span: Range<usize>,
    pub(super) node: Node,
}

impl Value {
    /// The kind of value, as a user would call it.
    pub(super) fn kind(&self) -> &'static str {
        match self {
            Self::String(_) => "a string",
            Self::Integer(_) => "an integer",
            Self::Float(_) => "a float",
            Self::Boolean(_) => "a boolean",
            Self::Array(_) => "an array",
            Self::Table(_) => "a table",
            Self::Datetime => "a date",
        }
    }
}

/// Parses a whole file into its root section.
pub(super) fn parse(name: &str, text: &str) -> Result<Section> {
    let source = Arc::new(Source::new(name, text));
    let table = DeTable::parse(text)
        .map_err(|e| source.error(e.span().map_or(0, |s| s.start), e.message()))?;
    let entries = convert_table(&source, table.get_ref())?;
    Ok(Section::new(source, String::new(), 0, entries))
}

fn convert_table(source: &Source, table: &DeTable<'_>) -> Result<Vec<Entry>> {
    let mut entries = Vec::with_capacity(table.len());
    for (key, value) in table {
        let node =
            Node { value: convert(source, value.get_ref(), value.span())?, span: value.span() };
        entries.push(Entry { key: key.get_ref().to_string(), key_span: key.span(), node });
    }
    entries.sort_by_key(|e| e.key_span.start);
    Ok(entries)
}

fn convert(source: &Source, value: &DeValue<'_>, span: Range<usize>) -> Result<Value> {
    Ok(match value {
        DeValue::String(s) => Value::String(s.to_string()),
        DeValue::Boolean(b) => Value::Boolean(*b),
        DeValue::Datetime(_) => Value::Datetime,
        DeValue::Integer(i) => Value::Integer(
            i64::from_str_radix(i.as_str(), i.radix())
                .map_err(|e| source.error(span.start, format!("`{}`: {e}", i.as_str())))?,
        ),
        DeValue::Float(f) => Value::Float(
            f.as_str()
                .parse()
                .map_err(|e| source.error(span.start, format!("`{}`: {e}", f.as_str())))?,
        ),
        DeValue::Array(items) => {
            let mut nodes = Vec::with_capacity(items.len());
            for item in items {
                nodes.push(Node {
                    value: convert(source, item.get_ref(), item.span())?,
                    span: item.span(),
                });
            }
            Value::Array(nodes)
        }
        DeValue::Table(table) => Value::Table(convert_table(source, table)?),
    })
}
