//! Parses JSON text to a tree.
//!
//! serde_json does not report where a value is, so this is a parser of our own; strings and numbers are serde_json's.

use std::sync::Arc;

use super::tree::{Entry, Node, Source, Span, Value};
use crate::{Error, Result};

/// Maximum depth of nested objects and arrays.
const MAX_DEPTH: usize = 128;

/// Parses a whole file, whose root must be an object.
pub(super) fn parse(source: &Arc<Source>, text: &str) -> Result<Node> {
    let mut parser = Parser { source, text, at: 0, depth: 0 };
    let root = parser.value()?;
    parser.skip_space();
    if parser.at < text.len() {
        return Err(parser.error("expected the end of the file"));
    }
    match root.value {
        Value::Table(_) => Ok(root),
        other => Err(root.place.error(format!("the root must be an object, got {}", other.kind()))),
    }
}

struct Parser<'a> {
    source: &'a Arc<Source>,
    text: &'a str,
    at: usize,
    depth: usize,
}

impl Parser<'_> {
    fn place(&self) -> Span {
        self.source.at(self.at)
    }

    fn error(&self, message: impl std::fmt::Display) -> Error {
        self.place().error(message)
    }

    fn peek(&self) -> Option<u8> {
        self.text.as_bytes().get(self.at).copied()
    }

    fn skip_space(&mut self) {
        while matches!(self.peek(), Some(b' ' | b'\t' | b'\n' | b'\r')) {
            self.at += 1;
        }
    }

    /// Takes `byte` if it is next.
    fn take(&mut self, byte: u8) -> bool {
        self.skip_space();
        let is_next = self.peek() == Some(byte);
        self.at += usize::from(is_next);
        is_next
    }

    fn value(&mut self) -> Result<Node> {
        self.skip_space();
        let place = self.place();
        let value = match self.peek() {
            Some(b'{') => self.nested(Self::object)?,
            Some(b'[') => self.nested(Self::array)?,
            Some(b'"') => Value::String(self.string()?),
            Some(b'-' | b'0'..=b'9') => self.number()?,
            _ => self.literal()?,
        };
        Ok(Node { value, place })
    }

    fn nested(&mut self, inner: fn(&mut Self) -> Result<Value>) -> Result<Value> {
        if self.depth == MAX_DEPTH {
            return Err(self.error(format!("more than {MAX_DEPTH} nested objects")));
        }
        (self.at, self.depth) = (self.at + 1, self.depth + 1);
        let value = inner(self)?;
        self.depth -= 1;
        Ok(value)
    }

    fn object(&mut self) -> Result<Value> {
        let mut entries: Vec<Entry> = Vec::new();
        while !self.take(b'}') {
            if !entries.is_empty() && !self.take(b',') {
                return Err(self.error("expected `,` or `}`"));
            }
            self.skip_space();
            let key_place = self.place();
            let key = self.string()?;
            if entries.iter().any(|e| e.key == key) {
                return Err(key_place.error(format!("duplicate key `{key}`")));
            }
            if !self.take(b':') {
                return Err(self.error("expected `:`"));
            }
            let node = self.value()?;
            entries.push(Entry { key, key_place, node });
        }
        Ok(Value::Table(entries))
    }

    fn array(&mut self) -> Result<Value> {
        let mut nodes = Vec::new();
        while !self.take(b']') {
            if !nodes.is_empty() && !self.take(b',') {
                return Err(self.error("expected `,` or `]`"));
            }
            nodes.push(self.value()?);
        }
        Ok(Value::Array(nodes))
    }

    fn string(&mut self) -> Result<String> {
        if self.peek() != Some(b'"') {
            return Err(self.error("expected a string in double quotes"));
        }
        let rest = &self.text.as_bytes()[self.at + 1..];
        let mut escaped = false;
        let len = rest.iter().position(|byte| {
            let ends = *byte == b'"' && !escaped;
            escaped = *byte == b'\\' && !escaped;
            ends
        });
        let len = len.ok_or_else(|| self.error("this string does not end"))?;
        let quoted = &self.text[self.at..self.at + len + 2];
        let string =
            serde_json::from_str(quoted).map_err(|e| self.error(format!("not a string: {e}")))?;
        self.at += quoted.len();
        Ok(string)
    }

    fn number(&mut self) -> Result<Value> {
        let rest = &self.text[self.at..];
        let is_in = |c: char| c.is_ascii_digit() || "+-.eE".contains(c);
        let text = &rest[..rest.find(|c| !is_in(c)).unwrap_or(rest.len())];
        let number: serde_json::Number = serde_json::from_str(text)
            .map_err(|_| self.error(format!("`{text}` is not a number")))?;
        let value = match number.as_i64() {
            Some(integer) => Value::Integer(integer),
            None if text.bytes().all(|b| b.is_ascii_digit() || b == b'-') => {
                return Err(self.error(format!("`{text}` does not fit 64 bits")));
            }
            None => Value::Float(number.as_f64().unwrap_or(f64::NAN)),
        };
        self.at += text.len();
        Ok(value)
    }

    fn literal(&mut self) -> Result<Value> {
        let literals = [
            ("true", Value::Boolean(true)),
            ("false", Value::Boolean(false)),
            ("null", Value::Null),
        ];
        for (literal, value) in literals {
            if self.text[self.at..].starts_with(literal) {
                self.at += literal.len();
                return Ok(value);
            }
        }
        Err(self.error("expected a value"))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn plain(node: &Node) -> serde_json::Value {
        match &node.value {
            Value::Null | Value::Datetime => serde_json::Value::Null,
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
        fn reads_what_serde_json_writes(value in prop::collection::btree_map(".{0,4}", json(), 0..4), pretty: bool) {
            let value = serde_json::Value::Object(value.into_iter().collect());
            let text = match pretty {
                true => serde_json::to_string_pretty(&value).unwrap(),
                false => value.to_string(),
            };
            prop_assert_eq!(plain(&read(&text).unwrap()), value);
            // Cut anywhere, it is refused with a place.
            for (end, _) in text.char_indices() {
                let error = read(&text[..end]).unwrap_err().to_string();
                prop_assert!(error.starts_with("c.json:"), "{}", error);
            }
        }

        #[test]
        fn refuses_what_serde_json_refuses(text in "[\\[\\]{}:,\"a1.e \\-]{0,12}") {
            let text = format!("{{\"k\":{text}}}");
            let theirs = serde_json::from_str::<serde_json::Value>(&text);
            // It lets a second key of the same name take the first one's place, and numbers be huge.
            prop_assert!(theirs.is_ok() || read(&text).is_err(), "{}", text);
        }
    }

    #[test]
    fn mistakes_have_a_place() {
        for (text, says) in [
            ("[1]", "c.json:1:1: the root must be an object, got an array"),
            ("{\"a\": 1,\n \"a\": 2}", "c.json:2:2: duplicate key `a`"),
            ("{\"a\": 99999999999999999999}", "c.json:1:7: `99999999999999999999` does not fit"),
            ("{\"a\": tru}", "c.json:1:7: expected a value"),
            ("{\"a\": 1} x", "c.json:1:10: expected the end"),
            ("{\"a\": [1 2]}", "c.json:1:10: expected `,` or `]`"),
            ("{\"a\": \"x}", "c.json:1:7: this string does not end"),
        ] {
            let said = read(text).unwrap_err().to_string();
            assert!(said.starts_with(says), "{said}");
        }
        let deep = format!("{{\"a\": {}", "[".repeat(1000));
        assert!(read(&deep).unwrap_err().to_string().contains("nested objects"));
    }
}
