//! `parse_json`: converts a line of JSON to fields.

use serde_json::{Map, Value};

use crate::{Array, ArrayData, BoxError, Sample};

/// Replaces the field `text`, a JSON object, by one field per entry.
///
/// A string becomes its UTF-8 bytes, a number an `i64`, or an `f32` if it is written with a point
/// or an exponent ([`to_floats`](super::to_floats) converts integers as well), true and false a
/// `bool`. Lists of equal lengths, possibly nested, become an array, of `f32` if one of its numbers
/// is. A null is an absent field.
///
/// # Errors
///
/// Text that is not a JSON object; lists with several types or of different lengths.
pub fn parse_json(mut sample: Sample) -> Result<Sample, BoxError> {
    let ArrayData::U8(line) = sample.take("text")?.into_data() else {
        return Err("the field `text` is not of bytes".into());
    };
    let entries: Map<String, Value> = serde_json::from_slice(&line)?;
    for (name, value) in entries {
        if value.is_null() {
            continue;
        }
        let array = array(&value).map_err(|error| format!("`{name}` {error}"))?;
        sample.set(name, array);
    }
    Ok(sample)
}

fn array(value: &Value) -> Result<Array, String> {
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
    let data: ArrayData = if leaves.iter().any(|leaf| leaf.is_f64()) {
        let float = |leaf: &&Value| leaf.as_f64().map(|number| number as f32).ok_or_else(wrong);
        leaves.iter().map(float).collect::<Result<Vec<_>, _>>()?.into()
    } else if leaves.iter().any(|leaf| leaf.is_boolean()) {
        let flag = |leaf: &&Value| leaf.as_bool().ok_or_else(wrong);
        leaves.iter().map(flag).collect::<Result<Vec<_>, _>>()?.into()
    } else {
        let integer = |leaf: &&Value| match leaf.is_u64() {
            true => leaf.as_i64().ok_or_else(|| format!("has an integer above {}", i64::MAX)),
            false => leaf.as_i64().ok_or_else(wrong),
        };
        leaves.iter().map(integer).collect::<Result<Vec<_>, _>>()?.into()
    };
    Array::new(shape, data).map_err(|error| error.to_string())
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
            (r#"{"a": 18446744073709551615}"#, "`a` has an integer above 9223372036854775807"),
        ] {
            let error = parse(line).unwrap_err();
            assert!(error.contains(says), "{line}: {error}");
        }
    }
}
