//! `Array`, a shaped array in host memory; `Sample` and `Batch`, named arrays.

use half::{bf16, f16};

use crate::named::Named;
use crate::{Error, Result};

/// Elements of an [`Array`].
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum ArrayData {
    /// 32-bit floats.
    F32(Vec<f32>),
    /// IEEE half-precision floats.
    F16(Vec<f16>),
    /// Floats with the exponent of an `f32` and 7 bits of mantissa.
    BF16(Vec<bf16>),
    /// Bytes: images, encoded files, text in UTF-8.
    U8(Vec<u8>),
    /// 32-bit integers.
    I32(Vec<i32>),
    /// 64-bit integers: class indices, token ids.
    I64(Vec<i64>),
    /// Masks.
    Bool(Vec<bool>),
}

/// Evaluates `$body` with the elements of any type as `$values`.
macro_rules! with_elements {
    ($data:expr, $values:ident => $body:expr) => {
        match $data {
            ArrayData::F32($values) => $body,
            ArrayData::F16($values) => $body,
            ArrayData::BF16($values) => $body,
            ArrayData::U8($values) => $body,
            ArrayData::I32($values) => $body,
            ArrayData::I64($values) => $body,
            ArrayData::Bool($values) => $body,
        }
    };
}

pub(crate) use with_elements;

macro_rules! element_types {
    ($($variant:ident, $type:ty, $name:literal;)*) => {
        $(
            impl From<Vec<$type>> for ArrayData {
                fn from(values: Vec<$type>) -> Self {
                    Self::$variant(values)
                }
            }
        )*

        impl ArrayData {
            /// Name of the element type, as Rust spells it.
            #[must_use]
            pub const fn type_name(&self) -> &'static str {
                match self {
                    $(Self::$variant(_) => $name,)*
                }
            }

            /// Appends the elements of `other`, or returns it if it has another type.
            fn append(&mut self, other: Self) -> Result<(), Self> {
                match (self, other) {
                    $((Self::$variant(values), Self::$variant(more)) => values.extend(more),)*
                    (_, other) => return Err(other),
                }
                Ok(())
            }

            fn reserve(&mut self, additional: usize) {
                with_elements!(self, values => values.reserve_exact(additional));
            }
        }
    };
}

element_types! {
    F32, f32, "f32";
    F16, f16, "f16";
    BF16, bf16, "bf16";
    U8, u8, "u8";
    I32, i32, "i32";
    I64, i64, "i64";
    Bool, bool, "bool";
}

impl ArrayData {
    /// Number of elements.
    #[must_use]
    pub fn len(&self) -> usize {
        with_elements!(self, values => values.len())
    }

    /// True if there is no element.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// A row-major array: a shape, and the elements.
#[derive(Clone, Debug, PartialEq)]
pub struct Array {
    shape: Vec<usize>,
    data: ArrayData,
}

impl Array {
    /// Pairs elements with a shape; `[]` is the shape of a single number.
    ///
    /// # Errors
    ///
    /// [`Error::Shape`] if the shape has another number of elements.
    pub fn new(shape: impl Into<Vec<usize>>, data: impl Into<ArrayData>) -> Result<Self> {
        let (shape, data) = (shape.into(), data.into());
        let expected = shape.iter().try_fold(1_usize, |count, extent| count.checked_mul(*extent));
        if expected != Some(data.len()) {
            return Err(Error::Shape { shape, got: data.len() });
        }
        Ok(Self { shape, data })
    }

    /// A single number, of shape `[]`: a label, a target.
    #[must_use]
    pub fn scalar<T>(value: T) -> Self
    where
        ArrayData: From<Vec<T>>,
    {
        Self { shape: Vec::new(), data: vec![value].into() }
    }

    /// Row-major extents.
    #[must_use]
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The elements.
    #[must_use]
    pub fn data(&self) -> &ArrayData {
        &self.data
    }

    /// The elements, without a copy.
    #[must_use]
    pub fn into_data(self) -> ArrayData {
        self.data
    }

    /// Stacks arrays of equal shape and type along a new first dimension; `Err` contains the index
    /// of the first array that differs from the previous one, and the difference.
    pub(crate) fn stack(arrays: Vec<Self>) -> Result<Self, (usize, String)> {
        let count = arrays.len();
        let mut arrays = arrays.into_iter();
        let Some(Self { shape, mut data }) = arrays.next() else {
            return Ok(Self { shape: vec![0], data: ArrayData::U8(Vec::new()) });
        };
        data.reserve(data.len() * (count - 1));
        for (at, array) in (1..).zip(arrays) {
            if array.shape != shape {
                return Err((at, format!("has shape {:?}, the one before {shape:?}", array.shape)));
            }
            let type_name = data.type_name();
            data.append(array.data).map_err(|other| {
                (at, format!("has type {}, the one before {type_name}", other.type_name()))
            })?;
        }
        Ok(Self { shape: [count].into_iter().chain(shape).collect(), data })
    }
}

/// Named arrays: the methods of [`Sample`] and [`Batch`].
macro_rules! named_arrays {
    ($type:ident, $what:literal) => {
        impl $type {
            /// Creates an instance without fields.
            #[must_use]
            pub fn new() -> Self {
                Self::default()
            }

            /// Adds a field, replacing one of the same name.
            #[must_use]
            pub fn with(mut self, name: impl Into<String>, array: Array) -> Self {
                self.set(name, array);
                self
            }

            /// Sets a field, replacing one of the same name in place.
            pub fn set(&mut self, name: impl Into<String>, array: Array) {
                self.fields.set(name.into(), array);
            }

            /// The field called `name`.
            ///
            /// # Errors
            ///
            /// [`Error::NoField`], which lists the fields.
            pub fn get(&self, name: &str) -> Result<&Array> {
                self.fields.get(0, name).ok_or_else(|| self.missing(name))
            }

            /// Removes the field called `name`.
            ///
            /// # Errors
            ///
            /// As [`get`](Self::get).
            pub fn take(&mut self, name: &str) -> Result<Array> {
                self.fields.take(name).ok_or_else(|| self.missing(name))
            }

            /// All fields, in the order they were added.
            pub fn iter(&self) -> impl Iterator<Item = (&str, &Array)> {
                self.fields.iter()
            }

            fn missing(&self, name: &str) -> Error {
                let have = self.fields.iter().map(|(name, _)| name.to_owned()).collect();
                Error::NoField { what: $what, name: name.to_owned(), have }
            }
        }
    };
}

/// One sample: named arrays without a batch dimension.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Sample {
    pub(crate) fields: Named<Array>,
}

/// One batch: named arrays, each with the batch as its first dimension.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Batch {
    fields: Named<Array>,
}

named_arrays!(Sample, "sample");
named_arrays!(Batch, "batch");

impl Batch {
    /// Stacks samples that have the same fields, of equal shapes and types: PyTorch's
    /// `default_collate`.
    ///
    /// # Errors
    ///
    /// [`Error::Collate`], which names the sample that differs from those before it.
    #[doc(alias = "default_collate")]
    pub fn collate(samples: Vec<Sample>) -> Result<Self> {
        let count = samples.len();
        let mut columns: Named<Vec<Array>> = Named::default();
        for (position, sample) in samples.into_iter().enumerate() {
            let different = |text| Err(Error::Collate { position, text });
            if position > 0 && sample.fields.len() != columns.len() {
                return different(other_fields(&sample, &columns));
            }
            for (at, (name, array)) in sample.fields.into_iter().enumerate() {
                let place = columns.find(at, &name);
                match place.and_then(|place| columns.at_mut(place)) {
                    Some(arrays) => arrays.push(array),
                    None if position == 0 => {
                        let mut arrays = Vec::with_capacity(count);
                        arrays.push(array);
                        columns.set(name, arrays);
                    }
                    None => return different(format!("the one before has no field `{name}`")),
                }
            }
        }
        let mut batch = Self::new();
        for (name, arrays) in columns.into_iter() {
            let array = Array::stack(arrays).map_err(|(position, text)| Error::Collate {
                position,
                text: format!("its field `{name}` {text}"),
            })?;
            batch.set(name, array);
        }
        Ok(batch)
    }

    /// Number of samples: the first extent of the first field, 0 for an empty batch.
    #[must_use]
    pub fn len(&self) -> usize {
        self.fields.iter().next().and_then(|(_, a)| a.shape.first().copied()).unwrap_or(0)
    }

    /// True if there is no sample.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Describes a sample that has another number of fields than those before it.
fn other_fields(sample: &Sample, columns: &Named<Vec<Array>>) -> String {
    let [had, has] = [columns.len(), sample.fields.len()];
    let added = sample.iter().map(|(name, _)| name).find(|name| !columns.has(name));
    let absent = columns.iter().map(|(name, _)| name).find(|name| !sample.fields.has(name));
    let which = match (added, absent) {
        (Some(name), _) if has > had => format!("that one lacks `{name}`"),
        (_, Some(name)) => format!("it lacks `{name}`"),
        _ => String::new(),
    };
    format!("it has {has} fields, the one before {had}: {which}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shape_that_does_not_fit_is_refused() {
        let error = Array::new([2, 3], vec![0_u8; 5]).unwrap_err();
        assert!(error.to_string().contains("6 elements, got 5"), "{error}");
        let error = Array::new([usize::MAX, 2], vec![0_u8; 5]).unwrap_err();
        assert!(error.to_string().contains("too many"), "{error}");
    }

    #[test]
    fn a_missing_field_names_those_there_are() {
        let batch = Batch::new().with("inputs", Array::new([1], vec![0_u8]).unwrap());
        assert_eq!(batch.len(), 1);
        let error = batch.get("labels").unwrap_err();
        assert!(error.to_string().contains("inputs"), "{error}");
    }

    fn sample(image: Array, label: i64) -> Sample {
        Sample::new().with("image", image).with("label", Array::scalar(label))
    }

    #[test]
    fn samples_are_stacked_by_field() {
        let image = |n| Array::new([2], vec![n, n + 1_i32]).unwrap();
        let batch = Batch::collate(vec![sample(image(0), 5), sample(image(2), 6)]).unwrap();
        assert_eq!(*batch.get("image").unwrap(), Array::new([2, 2], vec![0, 1, 2, 3]).unwrap());
        assert_eq!(*batch.get("label").unwrap(), Array::new([2], vec![5_i64, 6]).unwrap());
        assert_eq!(batch.len(), 2);
        assert!(Batch::collate(Vec::new()).unwrap().is_empty());
    }

    #[test]
    fn samples_that_differ_are_named() {
        let image = |len| Array::new([len], vec![0_u8; len]).unwrap();
        let error = |other| {
            let samples = vec![sample(image(3), 0), sample(image(3), 0), other];
            Batch::collate(samples).unwrap_err().to_string()
        };
        let other = error(sample(image(4), 1));
        assert!(other.contains("sample 2 ") && other.contains("`image` has shape [4]"), "{other}");
        let floats = Array::new([3], vec![0.0_f32; 3]).unwrap();
        let other = error(sample(floats, 1));
        assert!(other.contains("`image` has type f32, the one before u8"), "{other}");
        let other = error(sample(image(3), 1).with("more", Array::scalar(true)));
        assert!(
            other.ends_with("it has 3 fields, the one before 2: that one lacks `more`"),
            "{other}"
        );
        let other = error(Sample::new().with("image", image(3)));
        assert!(other.ends_with("it has 1 fields, the one before 2: it lacks `label`"), "{other}");
        let mut renamed = sample(image(3), 1);
        let label = renamed.take("label").unwrap();
        let other = error(renamed.with("labels", label));
        assert!(other.contains("no field `labels`"), "{other}");
    }
}
