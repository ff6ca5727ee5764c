//! `JsonLine`: a JSON object on a line, as MMEngine writes it.

use serde::Serialize;

/// A JSON object on one line, with keys in the order of insertion and spaces as in Python.
#[derive(Debug)]
pub struct JsonLine(Vec<u8>);

impl JsonLine {
    /// An object without a key.
    #[must_use]
    #[expect(clippy::new_without_default, reason = "an empty object is rarely meant")]
    pub fn new() -> Self {
        Self(Vec::with_capacity(256))
    }

    /// Adds a value: a count or a number, `null` for a non-finite one.
    ///
    /// # Panics
    ///
    /// If a value cannot be JSON, such as a map with keys that are no strings.
    pub fn put(&mut self, name: &str, value: impl Serialize) {
        let before: &[u8] = if self.0.is_empty() { b"{" } else { b", " };
        self.0.extend_from_slice(before);
        serde_json::to_writer(&mut self.0, name).expect("a name is a JSON string");
        self.0.extend_from_slice(b": ");
        serde_json::to_writer(&mut self.0, &value).expect("a value is JSON");
    }

    /// Returns the object with the end of the line.
    #[must_use]
    pub fn end(mut self) -> Vec<u8> {
        let after: &[u8] = if self.0.is_empty() { b"{}\n" } else { b"}\n" };
        self.0.extend_from_slice(after);
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A line of MMEngine 0.10.7, compared byte by byte.
    #[test]
    fn line_matches_mmengine() {
        let recorded = concat!(
            r#"{"lr": 0.04521739130434783, "data_time": 0.0015882015228271484, "#,
            r#""grad_norm": 0.466180282831192, "loss": 2.310242438316345, "#,
            r#""loss_cls": 2.310242438316345, "time": 0.007432246208190918, "#,
            r#""epoch": 1, "iter": 10, "step": 10}"#
        );
        let mut line = JsonLine::new();
        for (name, value) in [
            ("lr", 0.045_217_391_304_347_83),
            ("data_time", 0.001_588_201_522_827_148_4),
            ("grad_norm", 0.466_180_282_831_192),
            ("loss", 2.310_242_438_316_345),
            ("loss_cls", 2.310_242_438_316_345),
            ("time", 0.007_432_246_208_190_918),
        ] {
            line.put(name, value);
        }
        for (name, count) in [("epoch", 1), ("iter", 10), ("step", 10)] {
            line.put(name, count);
        }
        assert_eq!(String::from_utf8(line.end()).unwrap(), format!("{recorded}\n"));
        let mut odd = JsonLine::new();
        odd.put("a \"b\"", f64::NAN);
        assert_eq!(odd.end(), b"{\"a \\\"b\\\"\": null}\n");
        assert_eq!(JsonLine::new().end(), b"{}\n");
    }
}
