//! `select`, `parse_integers` and `to_floats`: map fields of files to fields of a model.

use crate::{Array, ArrayData, BoxError, Error, Sample};

/// Selects, for each name in `fields`, the first of the names after it that the sample has: with
/// `[("inputs", "jpg;png"), ("labels", "cls")]` an image of either kind becomes `inputs`. Other
/// fields are dropped. A field can be selected once.
///
/// # Errors
///
/// [`Error::NoField`] if the sample has none of the names; an error if all that it has are selected
/// already.
#[doc(alias = "to_tuple")]
pub fn select<T: AsRef<str>>(sample: Sample, fields: &[(T, T)]) -> Result<Sample, BoxError> {
    let mut selected = Sample::new();
    let mut rest = sample.fields;
    // For errors: names and what became of them.
    let mut taken: Vec<(&str, &str)> = Vec::new();
    for (to, names) in fields {
        let (to, names) = (to.as_ref(), names.as_ref());
        let found = names.split(';').find_map(|name| Some((name, rest.take(name)?)));
        let Some((name, array)) = found else {
            let mut earlier = taken.iter().filter(|(name, _)| names.split(';').any(|n| n == *name));
            if let Some((name, other)) = earlier.next() {
                return Err(format!("field `{name}` is selected as `{other}` and as `{to}`").into());
            }
            let have = taken.iter().map(|(name, _)| *name).chain(rest.iter().map(|(name, _)| name));
            let have = have.map(str::to_owned).collect();
            return Err(Error::NoField { what: "sample", name: names.to_owned(), have }.into());
        };
        taken.push((name, to));
        selected.set(to, array);
    }
    Ok(selected)
}

/// Parses the fields that WebDataset's decoder treats as integers (`cls`, `cls2`, `class`, `count`,
/// `index`, `inx`, `id`) from bytes with decimal digits.
///
/// # Errors
///
/// Bytes that are not an integer, with the name of the field.
pub fn parse_integers(mut sample: Sample) -> Result<Sample, BoxError> {
    for name in INTEGERS {
        let Some(array) = sample.fields.get(0, name) else { continue };
        let ArrayData::U8(digits) = array.data() else { continue };
        let text = String::from_utf8_lossy(digits);
        let number: i64 =
            text.trim().parse().map_err(|error| format!("field `{name}`: {error}"))?;
        sample.set(name, Array::scalar(number));
    }
    Ok(sample)
}

/// Makes `f32` of the fields `names` that are `i64`: of numbers that JSON has as `1` in one line
/// and as `0.5` in another. A sample without such a field stays as it is. Above 2^24 not every
/// integer is an `f32`: the nearest one is taken.
///
/// # Errors
///
/// None, so far.
pub fn to_floats<T: AsRef<str>>(mut sample: Sample, names: &[T]) -> Result<Sample, BoxError> {
    for name in names.iter().map(AsRef::as_ref) {
        let Some(array) = sample.fields.get(0, name) else { continue };
        let ArrayData::I64(numbers) = array.data() else { continue };
        let floats: Vec<_> = numbers.iter().map(|number| *number as f32).collect();
        let array = Array::new(array.shape(), floats)?;
        sample.set(name, array);
    }
    Ok(sample)
}

const INTEGERS: [&str; 7] = ["cls", "cls2", "class", "count", "index", "inx", "id"];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stream::parse_json;

    fn bytes(text: &str) -> Array {
        Array::new([text.len()], text.as_bytes().to_vec()).unwrap()
    }

    #[test]
    fn floats_do_not_depend_on_how_json_has_them() {
        let lines =
            [r#"{"x": 1, "boxes": [], "id": 3}"#, r#"{"x": 0.5, "boxes": [[2, 3]], "id": 4}"#];
        let expected = Sample::new()
            .with("boxes", Array::new([0], Vec::<f32>::new()).unwrap())
            .with("id", Array::scalar(3_i64))
            .with("x", Array::scalar(1.0_f32));
        let [first, second] = lines.map(|line| {
            let sample = parse_json(Sample::new().with("text", bytes(line))).unwrap();
            to_floats(sample, &["x", "boxes", "none"]).unwrap()
        });
        for (name, array) in expected.iter() {
            assert_eq!(first.get(name).unwrap(), array);
        }
        assert_eq!(second.get("x").unwrap(), &Array::scalar(0.5_f32));
        let boxes = Array::new([1, 2], vec![2.0_f32, 3.0]).unwrap();
        assert_eq!(second.get("boxes").unwrap(), &boxes);
    }

    #[test]
    fn fields_are_selected_by_the_first_name_there_is() {
        let sample = Sample::new().with("png", bytes("p")).with("cls", bytes("7\n"));
        let sample = parse_integers(sample.with("key", bytes("k"))).unwrap();
        let fields = [("labels", "cls"), ("inputs", "jpg;png")];
        let selected = select(sample.clone(), &fields).unwrap();
        let expected =
            Sample::new().with("labels", Array::scalar(7_i64)).with("inputs", bytes("p"));
        assert_eq!(selected, expected);
        let error = select(sample, &[("inputs", "jpg;jpeg")]).unwrap_err().to_string();
        assert!(
            error.contains("no field `jpg;jpeg`; it has [\"png\", \"cls\", \"key\"]"),
            "{error}"
        );
        let sample = Sample::new().with("__key__", bytes("7")).with("jpg", bytes("p"));
        let error = |fields| select(sample.clone(), fields).unwrap_err().to_string();
        let torn = error(&[("inputs", "jpg;png"), ("labels", "cls")]);
        assert_eq!(torn, "the sample has no field `cls`; it has [\"jpg\", \"__key__\"]");
        let twice = error(&[("inputs", "jpg"), ("views", "png;jpg")]);
        assert_eq!(twice, "field `jpg` is selected as `inputs` and as `views`");
        let error = parse_integers(Sample::new().with("cls", bytes("cat"))).unwrap_err();
        assert!(error.to_string().starts_with("field `cls`: invalid digit"), "{error}");
    }
}
