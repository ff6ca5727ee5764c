//! Parses JSON text to a tree.
//!
//! `jsonc_parser` reports positions but accepts more than JSON, and serde_json reports no positions
//! of values: so `jsonc_parser` builds the tree, and serde_json validates the text.

use std::sync::Arc;

use jsonc_parser::common::Ranged;
use jsonc_parser::{CollectOptions, ParseOptions, ast, parse_to_ast};
use serde::de::IgnoredAny;

use super::options::parse_float;
use super::tree::{Entry, Node, Source, Span, Value};
use crate::Result;

/// Disables all extensions of `jsonc_parser` to JSON.
pub(crate) const STRICT: ParseOptions = ParseOptions {
    allow_comments: false,
    allow_loose_object_property_names: false,
    allow_trailing_commas: false,
    allow_missing_commas: false,
    allow_single_quoted_strings: false,
    allow_hexadecimal_numbers: false,
    allow_unary_plus_numbers: false,
    allow_bare_decimal_point_numbers: false,
    allow_non_finite_numbers: false,
    allow_extended_string_escapes: false,
};

/// Parses a whole file, whose root must be an object.
pub(super) fn parse(source: &Arc<Source>, text: &str) -> Result<Node> {
    let parsed = parse_to_ast(text, &CollectOptions::default(), &STRICT);
    let parsed = parsed.map_err(|e| {
        // A missing comma is reported at the next token.
        let rest = text[e.range().start..].trim_start();
        source.at(text.len() - rest.len()).error(format!("not JSON: {}", e.kind()))
    })?;
    // `jsonc_parser` accepts control characters in strings and Unicode white space.
    if let Err(e) = serde_json::from_str::<IgnoredAny>(text) {
        return Err(source.at_line(e.line(), e.column()).error(format!("not JSON: {e}")));
    }
    match parsed.value {
        Some(value @ ast::Value::Object(_)) => convert(source, value),
        Some(value) => {
            let Node { value, place } = convert(source, value)?;
            Err(place.error(format!("the root must be an object, got {}", value.kind())))
        }
        None => Err(source.at(text.len()).error("expected an object")),
    }
}

fn convert(source: &Arc<Source>, value: ast::Value<'_>) -> Result<Node> {
    let place = source.at(value.range().start);
    let value = match value {
        ast::Value::NullKeyword(_) => Value::Null,
        ast::Value::BooleanLit(boolean) => Value::Boolean(boolean.value),
        ast::Value::StringLit(string) => Value::String(string.value.into_owned()),
        ast::Value::NumberLit(number) => parse_number(number.value, &place)?,
        ast::Value::Array(array) => {
            let nodes = array.elements.into_iter().map(|element| convert(source, element));
            Value::Array(nodes.collect::<Result<_>>()?)
        }
        ast::Value::Object(object) => {
            let mut entries: Vec<Entry> = Vec::new();
            for property in object.properties {
                let key_place = source.at(property.name.range().start);
                let key = property.name.into_string();
                if entries.iter().any(|e| e.key == key) {
                    return Err(key_place.error(format!("duplicate key `{key}`")));
                }
                entries.push(Entry { key, key_place, node: convert(source, property.value)? });
            }
            Value::Table(entries)
        }
    };
    Ok(Node { value, place })
}

fn parse_number(text: &str, place: &Span) -> Result<Value> {
    if let Ok(integer) = text.parse() {
        return Ok(Value::Integer(integer));
    }
    match text.parse() {
        Ok(float) => parse_float(text, float, place),
        Err(e) => Err(place.error(format!("`{text}`: {e}"))),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn plain(node: &Node) -> serde_json::Value {
        match &node.value {
            Value::Null | Value::Datetime(_) => serde_json::Value::Null,
            Value::String(s) | Value::Variable(s, _) => s.as_str().into(),
            Value::Integer(i) => (*i).into(),
            Value::Float(f) => (*f).into(),
            Value::Boolean(b) => (*b).into(),
            Value::Array(nodes) => nodes.iter().map(plain).collect(),
            Value::Table(entries) => {
                let pairs = entries.iter().map(|e| (e.key.clone(), plain(&e.node)));
                serde_json::Value::Object(pairs.collect())
            }
        }
    }

    fn read(text: &str) -> Result<Node> {
        parse(&Source::file("c.json", text), text)
    }

    fn json() -> impl Strategy<Value = serde_json::Value> {
        let leaf = prop_oneof![
            Just(serde_json::Value::Null),
            any::<bool>().prop_map(Into::into),
            any::<i64>().prop_map(Into::into),
            (-1e9..1e9f64).prop_map(Into::into),
            ".{0,8}".prop_map(Into::into),
        ];
        leaf.prop_recursive(4, 32, 4, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(Into::into),
                prop::collection::btree_map(".{0,4}", inner, 0..4)
                    .prop_map(|map| serde_json::Value::Object(map.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #[test]
        fn reads_output_of_serde_json(value in prop::collection::btree_map(".{0,4}", json(), 0..4), pretty: bool) {
            let value = serde_json::Value::Object(value.into_iter().collect());
            let text = match pretty {
                true => serde_json::to_string_pretty(&value).unwrap(),
                false => value.to_string(),
            };
            prop_assert_eq!(plain(&read(&text).unwrap()), value);
            // Truncated text is refused, with a position.
            for (end, _) in text.char_indices() {
                let error = read(&text[..end]).unwrap_err().to_string();
                prop_assert!(error.starts_with("c.json:"), "{}", error);
            }
        }

        #[test]
        fn refuses_text_that_serde_json_refuses(text in "[\\[\\]{}:,\"a1.e \\-]{0,12}") {
            let text = format!("{{\"k\":{text}}}");
            let theirs = serde_json::from_str::<serde_json::Value>(&text);
            // serde_json accepts duplicate keys and huge numbers.
            prop_assert!(theirs.is_ok() || read(&text).is_err(), "{}", text);
        }
    }

    #[test]
    fn errors_have_a_position() {
        for (text, says) in [
            ("[1]", "c.json:1:1: the root must be an object, got an array"),
            ("{\"a\": 1,\n \"a\": 2}", "c.json:2:2: duplicate key `a`"),
            (
                "{\"a\": 99999999999999999999}",
                "c.json:1:7: `99999999999999999999` does not fit into 64 bits",
            ),
            ("{\"a\": 1e999}", "c.json:1:7: `1e999` does not fit into 64 bits"),
            ("{\"a\": tru}", "c.json:1:7: not JSON: Unexpected token"),
            ("{\"a\": 1} x", "c.json:1:10: not JSON: Text cannot contain more than one"),
            ("{\"a\": [1 2]}", "c.json:1:10: not JSON: Expected comma"),
            ("{\"a\": 1\n \"b\": 2}", "c.json:2:2: not JSON: Expected comma"),
            ("{\"a\": \"x}", "c.json:1:7: not JSON: Unterminated string"),
            ("", "c.json:1:1: not JSON: "),
            // Accepted by the parser, but not JSON.
            ("{\n\"a\": \"b\tc\"}", "c.json:2:7: not JSON: control character"),
            ("{\n\"a\":\u{a0}1}", "c.json:2:5: not JSON: expected value"),
        ] {
            let said = read(text).unwrap_err().to_string();
            assert!(said.starts_with(says), "{said}");
        }
        let deep = format!("{{\"a\": {}", "[".repeat(1000));
        assert!(read(&deep).unwrap_err().to_string().contains("nesting depth"));
    }
}
