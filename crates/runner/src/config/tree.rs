//! A configuration as a tree in which every value keeps its span in a file or in an override.

use std::sync::Arc;

use crate::{ConfigPlace, Error, Mistake};

/// Maximum depth of tables and arrays, as trees are walked recursively. JSON is parsed with a limit
/// of 128.
pub(super) const MAX_DEPTH: usize = 64;

/// Number of characters of a text that a message shows.
const MAX_SHOWN: usize = 200;

/// Origin of a configuration or of a part: a file or an override.
#[derive(Debug)]
pub(super) struct Source {
    name: String,
    /// Offsets of line starts; empty for an override, which is a single value.
    line_starts: Vec<usize>,
    text: String,
}

impl Source {
    pub(super) fn file(name: &str, text: &str) -> Arc<Self> {
        let newlines = text.bytes().enumerate().filter(|(_, b)| *b == b'\n').map(|(i, _)| i + 1);
        let line_starts = std::iter::once(0).chain(newlines).collect();
        Arc::new(Self { name: name.to_owned(), line_starts, text: text.to_owned() })
    }

    pub(super) fn cfg_option(option: &str) -> Arc<Self> {
        let name = format!("--cfg-options {}", shortened(option));
        Arc::new(Self { name, line_starts: Vec::new(), text: String::new() })
    }

    pub(super) fn at(self: &Arc<Self>, offset: usize) -> Span {
        Span { source: Arc::clone(self), offset }
    }

    /// Returns the span at a line and a byte in it, both counted from 1.
    pub(super) fn at_line(self: &Arc<Self>, line: usize, byte: usize) -> Span {
        let start = self.line_starts.get(line.saturating_sub(1)).copied().unwrap_or(0);
        self.at(start + byte.saturating_sub(1))
    }
}

/// Returns the beginning of a text that is too long for a message.
pub(super) fn shortened(text: &str) -> std::borrow::Cow<'_, str> {
    match text.char_indices().nth(MAX_SHOWN) {
        Some((end, _)) => format!("{}...", &text[..end]).into(),
        None => text.into(),
    }
}

/// Source and offset of a key or value.
#[derive(Clone, Debug)]
pub struct Span {
    source: Arc<Source>,
    offset: usize,
}

impl Span {
    /// Creates an error at this span.
    #[must_use]
    pub fn error(&self, message: impl std::fmt::Display) -> Error {
        let (place, reason) = (Some(self.place()), message.to_string());
        Error::Config { mistakes: vec![Mistake { place, reason }] }
    }

    /// Returns the place for an error.
    pub(crate) fn place(&self) -> ConfigPlace {
        let Source { name, line_starts, text } = &*self.source;
        let line_and_column = (!line_starts.is_empty()).then(|| {
            let line = self.line();
            let before = text.get(line_starts[line - 1]..self.offset);
            (line, before.map_or(0, |before| before.chars().count()) + 1)
        });
        ConfigPlace { source: name.clone(), line_and_column }
    }

    /// Description relative to `here`: the line, and the file if it differs.
    pub(super) fn line_from(&self, here: &Self) -> String {
        match (Arc::ptr_eq(&self.source, &here.source), self.source.line_starts.is_empty()) {
            (true, false) => format!("on line {}", self.line()),
            _ => format!("at {self}"),
        }
    }

    /// Returns whether both spans are in the same file.
    pub(super) fn is_beside(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.source, &other.source)
    }

    /// Byte offset in the source.
    pub(super) fn offset(&self) -> usize {
        self.offset
    }

    /// Line, counted from 1.
    fn line(&self) -> usize {
        self.source.line_starts.partition_point(|start| *start <= self.offset)
    }
}

/// `file:line:col`, both counted from 1, columns in characters; or the override.
impl std::fmt::Display for Span {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.place().fmt(f)
    }
}

/// A value and its span.
#[derive(Clone, Debug)]
pub(super) struct Node {
    pub(super) value: Value,
    pub(super) place: Span,
}

/// A value of a configuration.
#[derive(Clone, Debug)]
pub(super) enum Value {
    /// Equivalent to an absent key.
    Null,
    String(String),
    Integer(i64),
    Float(f64),
    Boolean(bool),
    Array(Vec<Node>),
    Table(Vec<Entry>),
    /// A date or time as TOML writes it; no key has one.
    Datetime(String),
    /// The text of an environment variable, and the number, boolean or array that it parses to.
    Variable(String, Box<Self>),
}

/// One `key = value` of a table.
#[derive(Clone, Debug)]
pub(super) struct Entry {
    pub(super) key: String,
    pub(super) key_place: Span,
    pub(super) node: Node,
}

impl Value {
    /// Returns the value itself, or the parsed value of a variable.
    pub(super) fn plain(&self) -> &Self {
        match self {
            Self::Variable(_, other) => other,
            value => value,
        }
    }

    /// Kind of value, for messages.
    pub(super) fn kind(&self) -> &'static str {
        match self {
            Self::Null => "nothing",
            Self::String(_) => "a string",
            Self::Integer(_) => "an integer",
            Self::Float(_) => "a float",
            Self::Boolean(_) => "a boolean",
            Self::Array(_) => "an array",
            Self::Table(_) => "a table",
            Self::Datetime(_) => "a date",
            Self::Variable(_, other) => other.kind(),
        }
    }
}
