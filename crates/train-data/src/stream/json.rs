//! `parse_json`: converts a line of JSON to fields.

use std::cell::OnceCell;
use std::collections::HashMap;

use serde::de::{Deserialize, Deserializer, Error, MapAccess, Visitor};
use serde_json::Value;
use serde_json::map::{Entry, Map};

use super::text::BYTE_ORDER_MARK;
use crate::{Array, ArrayData, BoxError, Sample};

/// Replaces the field `text`, a JSON object, by one field per entry.
///
/// A string becomes its UTF-8 bytes, a number an `i64`, or an `f32` if it is written with a point
/// or an exponent ([`to_floats`](super::to_floats) converts integers as well), true and false a
/// `bool`. Lists of equal lengths, possibly nested, become an array, of `f32` if one of its numbers
/// is. A null is an absent field. A byte order mark before the object is left out.
///
/// An `f32` has 24 bits: of a time in seconds since 1970, written with a point, only multiples of
/// 128 s remain. Write such a number as an integer, or subtract the first time.
///
/// # Errors
///
/// Text that is not a JSON object; a name that is in it twice; lists with several types or of
/// different lengths; an integer beyond `i64`, another number beyond `f32`.
pub fn parse_json(mut sample: Sample) -> Result<Sample, BoxError> {
    let ArrayData::U8(line) = sample.take("text")?.into_data() else {
        return Err("the field `text` is not of bytes".into());
    };
    let object = line.strip_prefix(BYTE_ORDER_MARK).unwrap_or(&line);
    let Entries(entries) = serde_json::from_slice(object)?;
    let known = OnceCell::new();
    let wide = |number: f64| {
        let integer = known.get_or_init(|| wide_integers(&line)).get(&number.to_bits());
        integer.copied()
    };
    for (name, value) in entries {
        if value.is_null() {
            continue;
        }
        let array = array(&value, &wide).map_err(|error| format!("`{name}` {error}"))?;
        sample.set(name, array);
    }
    Ok(sample)
}

/// Entries of an object. An error in a value names its entry.
struct Entries(Map<String, Value>);

impl<'de> Deserialize<'de> for Entries {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(EntriesVisitor)
    }
}

struct EntriesVisitor;

impl<'de> Visitor<'de> for EntriesVisitor {
    type Value = Entries;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a map")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut object: A) -> Result<Entries, A::Error> {
        let mut entries = Map::new();
        while let Some(name) = object.next_key::<String>()? {
            let value = object.next_value();
            let value = value.map_err(|error| A::Error::custom(format!("`{name}`: {error}")))?;
            match entries.entry(name) {
                Entry::Vacant(entry) => drop(entry.insert(value)),
                Entry::Occupied(entry) => {
                    let name = entry.key();
                    return Err(A::Error::custom(format!("`{name}` is in the object twice")));
                }
            }
        }
        Ok(Entries(entries))
    }
}

/// Makes an array of a value. `wide` returns the text of a float that is written as an integer.
fn array<'a>(value: &Value, wide: &impl Fn(f64) -> Option<&'a str>) -> Result<Array, String> {
    if let Value::String(text) = value {
        return Ok(bytes(text.as_bytes()));
    }
    let (mut shape, mut leaves) = (Vec::new(), Vec::new());
    let mut first = value;
    while let Value::Array(values) = first {
        shape.push(values.len());
        let Some(inner) = values.first() else { break };
        first = inner;
    }
    flatten(value, &shape, &mut leaves)?;
    let wrong = || "has neither numbers alone nor true and false alone in it".to_owned();
    let integer = |leaf: &&Value| match leaf.is_u64() {
        true => leaf.as_i64().ok_or_else(|| beyond(&leaf.to_string())),
        false => leaf.as_i64().ok_or_else(wrong),
    };
    let data: ArrayData = if leaves.iter().any(|leaf| leaf.is_f64()) {
        let float = |leaf: &&Value| match leaf.is_f64() {
            true => float(leaf.as_f64().ok_or_else(wrong)?, wide),
            false => integer(leaf).map(|number| number as f32),
        };
        leaves.iter().map(float).collect::<Result<Vec<_>, _>>()?.into()
    } else if leaves.iter().any(|leaf| leaf.is_boolean()) {
        let flag = |leaf: &&Value| leaf.as_bool().ok_or_else(wrong);
        leaves.iter().map(flag).collect::<Result<Vec<_>, _>>()?.into()
    } else {
        leaves.iter().map(integer).collect::<Result<Vec<_>, _>>()?.into()
    };
    Array::new(shape, data).map_err(|error| error.to_string())
}

/// Makes an `f32` of a number that serde_json reads as a float: one with a point or an exponent, or
/// an integer beyond 64 bits, which is an error.
fn float<'a>(number: f64, wide: impl Fn(f64) -> Option<&'a str>) -> Result<f32, String> {
    if number.abs() >= (1_u64 << 63) as f64
        && let Some(integer) = wide(number)
    {
        return Err(beyond(integer));
    }
    let narrow = number as f32;
    match narrow.is_finite() {
        true => Ok(narrow),
        false => Err(format!("has the number {number:e}, which is beyond f32")),
    }
}

/// Error of an integer beyond `i64`.
fn beyond(integer: &str) -> String {
    format!(
        "has the integer {integer}, which is beyond i64: write it with a point to read it as f32"
    )
}

/// Integers of a line beyond `i64`, by the bits of the floats that serde_json reads.
fn wide_integers(line: &[u8]) -> HashMap<u64, &str> {
    let wide = integers(std::str::from_utf8(line).unwrap_or_default());
    let wide = wide.filter(|text| text.parse::<i64>().is_err());
    let float = |text| serde_json::from_str(text).map(f64::to_bits).ok();
    wide.filter_map(|text| Some((float(text)?, text))).collect()
}

/// Numbers of a JSON text that are written with neither a point nor an exponent.
fn integers(text: &str) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        loop {
            let start = rest.find(|c: char| c == '"' || c == '-' || c.is_ascii_digit())?;
            rest = &rest[start..];
            if let Some(string) = rest.strip_prefix('"') {
                let mut is_escaped = false;
                let end = string.find(|c| {
                    let is_end = c == '"' && !is_escaped;
                    is_escaped = c == '\\' && !is_escaped;
                    is_end
                })?;
                rest = &string[end + 1..];
                continue;
            }
            let is_part = |c: char| c.is_ascii_digit() || matches!(c, '-' | '+' | '.' | 'e' | 'E');
            let len = rest.find(|c| !is_part(c)).unwrap_or(rest.len());
            let (number, after) = rest.split_at(len);
            rest = after;
            if !number.contains(['.', 'e', 'E']) {
                return Some(number);
            }
        }
    })
}

/// Returns the elements of nested lists of this shape, in order.
fn flatten<'a>(
    value: &'a Value,
    shape: &[usize],
    leaves: &mut Vec<&'a Value>,
) -> Result<(), String> {
    match (value, shape) {
        (Value::Array(values), [len, inner @ ..]) if values.len() == *len => {
            values.iter().try_for_each(|value| flatten(value, inner, leaves))
        }
        (Value::Array(_), _) | (_, [_, ..]) => {
            Err("has lists in it that differ in length or depth".into())
        }
        (leaf, []) => {
            leaves.push(leaf);
            Ok(())
        }
    }
}

fn bytes(text: &[u8]) -> Array {
    Array::new([text.len()], text.to_vec()).expect("the shape is that of the bytes")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::PadCollate;

    fn parse(line: &str) -> Result<Sample, String> {
        let sample = Sample::new().with("text", bytes(line.as_bytes()));
        parse_json(sample).map_err(|error| error.to_string())
    }

    #[test]
    fn entries_become_arrays_by_their_types() {
        let line = r#"{"text": "\u00e9", "n": -3, "x": 1.0, "ok": true, "none": null, "ids": [1, 2, 3],
                      "rows": [[1, 2.5], [3, 4]], "mask": [true, false], "empty": []}"#;
        let expected = Sample::new()
            .with("empty", Array::new([0], Vec::<i64>::new()).unwrap())
            .with("ids", Array::new([3], vec![1_i64, 2, 3]).unwrap())
            .with("mask", Array::new([2], vec![true, false]).unwrap())
            .with("n", Array::scalar(-3_i64))
            .with("ok", Array::scalar(true))
            .with("rows", Array::new([2, 2], vec![1.0_f32, 2.5, 3.0, 4.0]).unwrap())
            .with("text", bytes("\u{e9}".as_bytes()))
            .with("x", Array::scalar(1.0_f32));
        let parsed = parse(line).unwrap();
        assert_eq!(parsed.iter().count(), 8);
        for (name, array) in expected.iter() {
            assert_eq!(parsed.get(name).unwrap(), array);
        }
    }

    #[test]
    fn a_byte_order_mark_is_left_out() {
        assert_eq!(parse("\u{feff}{\"a\": 1}"), parse("{\"a\": 1}"));
    }

    #[test]
    fn numbers_up_to_the_limits_of_their_types_are_read() {
        let line = r#"{"a": -9223372036854775808, "b": 9223372036854775807, "c": 18446744073709551616.0,
                      "d": 3.4028235e38, "e": "18446744073709551616", "f": 1e-60}"#;
        let parsed = parse(line).unwrap();
        assert_eq!(parsed.get("a").unwrap(), &Array::scalar(i64::MIN));
        assert_eq!(parsed.get("b").unwrap(), &Array::scalar(i64::MAX));
        assert_eq!(parsed.get("c").unwrap(), &Array::scalar(1.844_674_4e19_f32));
        assert_eq!(parsed.get("d").unwrap(), &Array::scalar(f32::MAX));
        assert_eq!(parsed.get("f").unwrap(), &Array::scalar(0.0_f32));
    }

    /// In quadratic time it would take minutes.
    #[test]
    fn wide_records_are_parsed_changed_and_collated() {
        const FIELDS: usize = 50_000;
        let entries: Vec<_> = (0..FIELDS).map(|k| format!("\"{k:06}\":[{k}]")).collect();
        let line = format!("{{{}}}", entries.join(","));
        let mut first = parse(&line).unwrap();
        let second = parse(&line.replace("[3]", "[3,7]")).unwrap();
        for k in (0..FIELDS).rev() {
            let array = first.take(&format!("{k:06}")).unwrap();
            first.set(format!("{k:06}"), array);
        }
        let pad =
            (0..FIELDS).fold(PadCollate::default(), |pad, k| pad.field(format!("{k:06}"), -1.0));
        let batch = pad.collate(vec![first, second]).unwrap();
        assert_eq!(batch.iter().count(), FIELDS);
        for k in 0..FIELDS {
            let expected = match k as i64 {
                3 => Array::new([2, 2], vec![3, -1, 3, 7_i64]),
                k => Array::new([2, 1], vec![k, k]),
            };
            assert_eq!(batch.get(&format!("{k:06}")).unwrap(), &expected.unwrap());
        }
    }

    /// In quadratic time it would take minutes.
    #[test]
    fn long_lists_of_large_floats_are_read() {
        let line = format!("{{\"a\":[{}1e20]}}", "1e20,".repeat(99_999));
        let expected = Array::new([100_000], vec![1e20_f32; 100_000]).unwrap();
        assert_eq!(parse(&line).unwrap().get("a").unwrap(), &expected);
    }

    #[test]
    fn values_that_are_no_arrays_are_refused_by_name() {
        for (line, says) in [
            ("no json", "expected"),
            ("[1]", "expected a map"),
            (r#"{"a": [[1], [2, 3]]}"#, "`a` has lists in it that differ in length or depth"),
            (r#"{"a": [1, [2]]}"#, "`a` has lists in it that differ in length or depth"),
            (r#"{"a": [[1], 2]}"#, "`a` has lists in it that differ in length or depth"),
            (r#"{"a": [1, true]}"#, "`a` has neither numbers alone nor"),
            (r#"{"a": ["b"]}"#, "`a` has neither numbers alone nor"),
            (r#"{"a": {"b": 1}}"#, "`a` has neither numbers alone nor"),
            (
                r#"{"a": 18446744073709551615}"#,
                "`a` has the integer 18446744073709551615, which is",
            ),
            (
                r#"{"a": [0.5, 9223372036854775808]}"#,
                "`a` has the integer 9223372036854775808, which",
            ),
            (
                r#"{"a": 18446744073709551616}"#,
                "`a` has the integer 18446744073709551616, which is",
            ),
            (
                r#"{"a": [[-9223372036854775809]]}"#,
                "`a` has the integer -9223372036854775809, which",
            ),
            (
                r#"{"a": [7.5, 31415926535897932384626433832]}"#,
                "`a` has the integer 31415926535897932384626433832, which",
            ),
            (
                r#"{"a": "\\\"7", "b": 2e20, "c": 1000000000000000000000}"#,
                "`c` has the integer 10000",
            ),
            (r#"{"a": 1e39}"#, "`a` has the number 1e39, which is beyond f32"),
            (r#"{"a": [1.0, [-3.5e38]]}"#, "`a` has lists in it"),
            (r#"{"a": [1.0, -3.5e38]}"#, "`a` has the number -3.5e38, which is beyond f32"),
            (r#"{"a": 1, "b": [1e999]}"#, "`b`: number out of range at line 1 column"),
            (r#"{"a": 1, "b": 2, "a": 3}"#, "`a` is in the object twice at line 1 column"),
            (r#"{"a": 1, "b": NaN}"#, "`b`: expected value at line 1 column"),
        ] {
            let error = parse(line).unwrap_err();
            assert!(error.contains(says), "{line}: {error}");
        }
    }
}
