//! Parses TOML text to a tree.

use std::ops::Range;
use std::sync::Arc;

use toml::de::{DeTable, DeValue};

use super::options::parse_float;
use super::tree::{Entry, MAX_DEPTH, Node, Source, Value};
use crate::Result;

/// Parses a whole file.
pub(super) fn parse(source: &Arc<Source>, text: &str) -> Result<Node> {
    let table = DeTable::parse(text)
        .map_err(|e| source.at(e.span().map_or(0, |s| s.start)).error(e.message()))?;
    let value = Value::Table(convert_table(source, table.get_ref(), 0)?);
    Ok(Node { value, place: source.at(0) })
}

/// Parses one value, the part after `key = `.
pub(super) fn parse_value(source: &Arc<Source>, text: &str) -> Result<Value> {
    let value = DeValue::parse(text).map_err(|e| {
        source.at(0).error(format!(
            "not a TOML value: {}; quote the option in the shell with single quotes: \
             'key={{ type = \"SGD\", lr = 0.1 }}'",
            e.message()
        ))
    })?;
    Ok(convert(source, value.get_ref(), &value.span(), 0)?.value)
}

fn convert_table(source: &Arc<Source>, table: &DeTable<'_>, depth: usize) -> Result<Vec<Entry>> {
    let mut entries = Vec::with_capacity(table.len());
    for (key, value) in table {
        // A table made by dotted keys has no span of its own; its first key's is used.
        let span = if value.span().is_empty() { key.span() } else { value.span() };
        let node = convert(source, value.get_ref(), &span, depth + 1)?;
        let key_place = source.at(key.span().start);
        entries.push(Entry { key: key.get_ref().to_string(), key_place, node });
    }
    entries.sort_by_key(|e| e.key_place.offset());
    Ok(entries)
}

fn convert(
    source: &Arc<Source>,
    value: &DeValue<'_>,
    span: &Range<usize>,
    depth: usize,
) -> Result<Node> {
    let place = source.at(span.start);
    if depth > MAX_DEPTH {
        return Err(place.error(format!("nested deeper than {MAX_DEPTH} levels")));
    }
    let value = match value {
        DeValue::String(s) => Value::String(s.to_string()),
        DeValue::Boolean(b) => Value::Boolean(*b),
        DeValue::Datetime(date) => Value::Datetime(date.to_string()),
        DeValue::Integer(i) => Value::Integer(
            i64::from_str_radix(i.as_str(), i.radix())
                .map_err(|e| place.error(format!("`{}`: {e}", i.as_str())))?,
        ),
        DeValue::Float(f) => match f.as_str().parse() {
            Ok(float) => parse_float(f.as_str(), float, &place)?,
            Err(e) => return Err(place.error(format!("`{}`: {e}", f.as_str()))),
        },
        DeValue::Array(items) => {
            let nodes = items.iter().map(|i| convert(source, i.get_ref(), &i.span(), depth + 1));
            Value::Array(nodes.collect::<Result<_>>()?)
        }
        DeValue::Table(table) => Value::Table(convert_table(source, table, depth)?),
    };
    Ok(Node { value, place })
}
