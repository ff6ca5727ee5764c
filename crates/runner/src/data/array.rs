//! `Array` and `Batch`: named, shaped arrays in host memory, passed between data sets, engines and metrics.

use crate::{Error, Result};

/// Elements of an [`Array`].
#[derive(Clone, Debug, PartialEq)]
pub enum ArrayData {
    /// 32-bit floats.
    F32(Vec<f32>),
    /// Bytes, as images are stored.
    U8(Vec<u8>),
    /// Class indices, token ids.
    I64(Vec<i64>),
}

impl From<Vec<f32>> for ArrayData {
    fn from(values: Vec<f32>) -> Self {
        Self::F32(values)
    }
}

impl From<Vec<u8>> for ArrayData {
    fn from(values: Vec<u8>) -> Self {
        Self::U8(values)
    }
}

impl From<Vec<i64>> for ArrayData {
    fn from(values: Vec<i64>) -> Self {
        Self::I64(values)
    }
}

impl ArrayData {
    fn len(&self) -> usize {
        match self {
            Self::F32(v) => v.len(),
            Self::U8(v) => v.len(),
            Self::I64(v) => v.len(),
        }
    }
}

/// A row-major array: its shape and as many elements as the shape says.
#[derive(Clone, Debug, PartialEq)]
pub struct Array {
    shape: Vec<usize>,
    data: ArrayData,
}

impl Array {
    /// Pairs elements with a shape.
    ///
    /// # Errors
    ///
    /// [`Error::Data`] if the shape asks for another number of elements.
    pub fn new(shape: impl Into<Vec<usize>>, data: impl Into<ArrayData>) -> Result<Self> {
        let (shape, data) = (shape.into(), data.into());
        let expected: usize = shape.iter().product();
        if expected != data.len() {
            return Err(Error::Data(format!(
                "an array of shape {shape:?} has {expected} elements, got {}",
                data.len()
            )));
        }
        Ok(Self { shape, data })
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
}

/// One batch: named arrays, each with the batch as its first dimension.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Batch {
    fields: Vec<(String, Array)>,
}

impl Batch {
    /// An empty batch.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a field, replacing one of the same name.
    #[must_use]
    pub fn with(mut self, name: impl Into<String>, array: Array) -> Self {
        let name = name.into();
        self.fields.retain(|(n, _)| *n != name);
        self.fields.push((name, array));
        self
    }

    /// The field called `name`.
    ///
    /// # Errors
    ///
    /// [`Error::Data`] that lists the fields there are.
    pub fn get(&self, name: &str) -> Result<&Array> {
        self.fields.iter().find(|(n, _)| n == name).map(|(_, a)| a).ok_or_else(|| {
            let have: Vec<_> = self.fields.iter().map(|(n, _)| n.as_str()).collect();
            Error::Data(format!("the batch has no field `{name}`; it has {have:?}"))
        })
    }

    /// All fields, in the order they were added.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Array)> {
        self.fields.iter().map(|(name, array)| (name.as_str(), array))
    }

    /// Number of samples: the first extent of the first field, 0 for an empty batch.
    #[must_use]
    pub fn len(&self) -> usize {
        self.fields.first().and_then(|(_, a)| a.shape.first().copied()).unwrap_or(0)
    }

    /// True if there is no sample.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shape_that_does_not_fit_is_refused() {
        let error = Array::new([2, 3], ArrayData::U8(vec![0; 5])).unwrap_err();
        assert!(error.to_string().contains("6 elements, got 5"), "{error}");
    }

    #[test]
    fn a_missing_field_names_those_there_are() {
        let batch = Batch::new().with("inputs", Array::new([1], ArrayData::U8(vec![0])).unwrap());
        assert_eq!(batch.len(), 1);
        let error = batch.get("labels").unwrap_err();
        assert!(error.to_string().contains("inputs"), "{error}");
    }
}
