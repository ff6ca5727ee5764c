//! `PadCollate`: batches of samples whose arrays differ in length.

use half::{bf16, f16};

use crate::named::Named;
use crate::{Array, ArrayData, Batch, Error, Result, Sample};

/// Pads arrays at their ends to the largest extents of their field in the batch, then stacks them
/// as [`Batch::collate`] does: texts of different lengths, images of different sizes. Equals
/// PyTorch's `torch.nn.utils.rnn.pad_sequence` with `batch_first`, in every dimension.
///
/// ```
/// # use train_data::{Array, PadCollate, Sample};
/// let ids = |ids: &[i64]| Array::new([ids.len()], ids.to_vec());
/// let text = |array| Sample::new().with("ids", array);
/// let texts = vec![text(ids(&[1, 2, 3])?), text(ids(&[4])?)];
/// let batch = PadCollate::new(0.0).collate(texts)?;
/// assert_eq!(*batch.get("ids")?, Array::new([2, 3], vec![1_i64, 2, 3, 4, 0, 0])?);
/// # Ok::<(), train_data::Error>(())
/// ```
#[doc(alias = "pad_sequence")]
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PadCollate {
    value: f64,
    fields: Named<f64>,
}

impl PadCollate {
    /// Pads with `value`.
    #[must_use]
    pub fn new(value: f64) -> Self {
        Self { value, fields: Named::default() }
    }

    /// Pads the field `name` with `value` instead, for example labels with the index that the loss
    /// ignores.
    #[must_use]
    pub fn field(mut self, name: impl Into<String>, value: f64) -> Self {
        self.fields.set(name.into(), value);
        self
    }

    /// Makes a batch.
    ///
    /// # Errors
    ///
    /// [`Error::Collate`] for samples that differ in fields, types or numbers of dimensions, and
    /// for a value that the type of a padded array cannot represent. [`Error::NoField`] for a
    /// [`field`](Self::field) that all samples lack.
    pub fn collate(&self, mut samples: Vec<Sample>) -> Result<Batch> {
        self.fields.iter().try_for_each(|(name, _)| has_field(&samples, name))?;
        let extents = greatest(&samples);
        for (position, sample) in samples.iter_mut().enumerate() {
            for (at, (name, array)) in sample.fields.iter_mut().enumerate() {
                let shape = extents.get(at, name);
                let Some(shape) = shape.filter(|shape| differs(array, shape)) else {
                    continue;
                };
                let value = *self.fields.get(at, name).unwrap_or(&self.value);
                *array = pad(array, shape, value).map_err(|text| Error::Collate {
                    position,
                    text: format!("its field `{name}` {text}"),
                })?;
            }
        }
        Batch::collate(samples)
    }
}

/// Returns an error unless all samples have the field.
fn has_field(samples: &[Sample], name: &str) -> Result<()> {
    let lacks = |sample: &Sample| !sample.fields.has(name);
    match (samples.iter().position(lacks), samples.iter().position(|sample| !lacks(sample))) {
        (Some(position), Some(other)) => {
            let text = format!("has no field `{name}`, which sample {other} has");
            Err(Error::Collate { position, text })
        }
        (Some(position), None) => samples[position].get(name).map(drop),
        (None, _) => Ok(()),
    }
}

/// Returns whether `shape` differs in extents; another number of dimensions is an error of
/// stacking.
fn differs(array: &Array, shape: &[usize]) -> bool {
    array.shape().len() == shape.len() && array.shape() != shape
}

/// Largest extents of each field, with the number of dimensions of the first sample.
fn greatest(samples: &[Sample]) -> Named<Vec<usize>> {
    let mut all: Named<Vec<usize>> = Named::default();
    for (at, (name, array)) in samples.iter().flat_map(|sample| sample.iter().enumerate()) {
        let place = all.find(at, name);
        match place.and_then(|place| all.at_mut(place)) {
            None => all.set(name.to_owned(), array.shape().to_vec()),
            Some(shape) if shape.len() == array.shape().len() => {
                for (extent, other) in shape.iter_mut().zip(array.shape()) {
                    *extent = (*extent).max(*other);
                }
            }
            Some(_) => {}
        }
    }
    all
}

/// Pads `array` with `value` at its ends, up to `shape`.
fn pad(array: &Array, shape: &[usize], value: f64) -> Result<Array, String> {
    let refused = || format!("is of {}, which {value} is not", array.data().type_name());
    // From -2^63 to 2^63, which i64 does not reach.
    let fits = (i64::MIN as f64..-(i64::MIN as f64)).contains(&value) && value.fract() == 0.0;
    let whole = || fits.then_some(value as i64).ok_or_else(refused);
    // Overflow to infinity is refused.
    let float =
        |is_finite: bool| (is_finite || !value.is_finite()).then_some(()).ok_or_else(refused);
    let extents = array.shape();
    let data: ArrayData = match array.data() {
        ArrayData::F32(from) => {
            let value = value as f32;
            float(value.is_finite())?;
            fill(from, extents, shape, value)?.into()
        }
        ArrayData::F16(from) => {
            let value = f16::from_f64(value);
            float(value.is_finite())?;
            fill(from, extents, shape, value)?.into()
        }
        ArrayData::BF16(from) => {
            let value = bf16::from_f64(value);
            float(value.is_finite())?;
            fill(from, extents, shape, value)?.into()
        }
        ArrayData::U8(from) => {
            fill(from, extents, shape, whole()?.try_into().map_err(|_| refused())?)?.into()
        }
        ArrayData::I32(from) => {
            fill(from, extents, shape, whole()?.try_into().map_err(|_| refused())?)?.into()
        }
        ArrayData::I64(from) => fill(from, extents, shape, whole()?)?.into(),
        ArrayData::Bool(from) => match value {
            0.0 => fill(from, extents, shape, false)?.into(),
            1.0 => fill(from, extents, shape, true)?.into(),
            _ => return Err(refused()),
        },
    };
    Array::new(shape, data).map_err(|error| error.to_string())
}

fn fill<T: Copy>(
    from: &[T],
    extents: &[usize],
    shape: &[usize],
    value: T,
) -> Result<Vec<T>, String> {
    let count = shape.iter().try_fold(1_usize, |count, extent| count.checked_mul(*extent));
    let mut to = Vec::new();
    let count = count.filter(|count| to.try_reserve_exact(*count).is_ok());
    let count = count.ok_or_else(|| format!("padded to {shape:?} does not fit into memory"))?;
    to.resize(count, value);
    // Extents beside one of 0 may have any product.
    if !from.is_empty() {
        copy(from, extents, &mut to, shape);
    }
    Ok(to)
}

/// Copies an array to the first corner of a larger one.
fn copy<T: Copy>(from: &[T], extents: &[usize], to: &mut [T], shape: &[usize]) {
    let ([extent, inner @ ..], [_, outer @ ..]) = (extents, shape) else {
        return to.copy_from_slice(from);
    };
    if inner.is_empty() {
        return to[..*extent].copy_from_slice(from);
    }
    let (source, target) = (inner.iter().product::<usize>(), outer.iter().product::<usize>());
    for row in 0..*extent {
        copy(&from[row * source..][..source], inner, &mut to[row * target..][..target], outer);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn of(shape: &[usize], first: i32) -> Array {
        let count: usize = shape.iter().product();
        Array::new(shape, (first..first + count as i32).collect::<Vec<_>>()).unwrap()
    }

    proptest! {
        /// Beside the element-wise definition.
        #[test]
        fn every_element_is_a_samples_own_or_padding(
            shapes in prop::collection::vec(prop::array::uniform3(0usize..4), 1..5),
        ) {
            let samples = shapes.iter().enumerate();
            let samples = samples.map(|(at, shape)| Sample::new().with("x", of(shape, 100 * at as i32)));
            let batch = PadCollate::new(9.0).field("x", -7.0).collate(samples.collect()).unwrap();
            let most = |axis: usize| shapes.iter().map(|shape| shape[axis]).max().unwrap();
            let [a, b, c] = [most(0), most(1), most(2)];
            let x = batch.get("x").unwrap();
            prop_assert_eq!(x.shape(), [shapes.len(), a, b, c]);
            let ArrayData::I32(values) = x.data() else { panic!("another type") };
            for (at, value) in values.iter().enumerate() {
                let [k, j, i, s] = [at % c, at / c % b, at / c / b % a, at / c / b / a];
                let [p, q, r] = shapes[s];
                let own = i < p && j < q && k < r;
                let expected = if own { (100 * s + (i * q + j) * r + k) as i32 } else { -7 };
                prop_assert_eq!(*value, expected);
            }
        }
    }

    #[test]
    fn a_field_that_no_sample_has_is_refused() {
        let sample = Sample::new().with("labels", of(&[1], 0));
        let error = PadCollate::new(0.0).field("lables", -100.0).collate(vec![sample]).unwrap_err();
        assert!(error.to_string().contains("no field `lables`"), "{error}");
    }

    #[test]
    fn a_field_that_one_sample_lacks_is_refused_with_its_position() {
        let with = |name: &str| Sample::new().with("x", of(&[1], 0)).with(name, of(&[1], 0));
        for (samples, [lacks, has]) in [
            (vec![with("labels"), with("boxes")], [1, 0]),
            (vec![with("boxes"), with("labels")], [0, 1]),
        ] {
            let error = PadCollate::new(0.0).field("labels", -100.0).collate(samples).unwrap_err();
            let says = format!("has no field `labels`, which sample {has} has");
            let error = error.to_string();
            assert!(
                error.contains(&format!("sample {lacks} ")) && error.contains(&says),
                "{error}"
            );
        }
    }

    #[test]
    fn pad_errors_name_the_sample() {
        let said = |collate: PadCollate, arrays: Vec<Array>| {
            let samples = arrays.into_iter().map(|array| Sample::new().with("x", array));
            collate.collate(samples.collect()).unwrap_err().to_string()
        };
        let bytes = |len: usize| Array::new([len], vec![1_u8; len]).unwrap();
        for value in [-1.0, 256.0, 0.5, f64::NAN] {
            let text = said(PadCollate::new(value), vec![bytes(3), bytes(2)]);
            assert!(text.starts_with("sample 1 "), "{text}");
            assert!(
                text.contains(&format!("its field `x` is of u8, which {value} is not")),
                "{text}"
            );
        }
        let text = said(PadCollate::default(), vec![bytes(3), of(&[1, 2], 0)]);
        assert!(text.starts_with("sample 1 ") && text.contains("shape [1, 2]"), "{text}");
        let pair = |data: [ArrayData; 2]| {
            data.into_iter().map(|data| Array::new([data.len()], data).unwrap()).collect()
        };
        for value in [1e19, -1e19, 9.3e18, f64::INFINITY] {
            let arrays = pair([vec![1_i64].into(), vec![1_i64; 2].into()]);
            let text = said(PadCollate::new(value), arrays);
            assert!(text.contains(&format!("is of i64, which {value} is not")), "{text}");
        }
        for (value, arrays) in [
            (1e9, pair([vec![f16::ONE].into(), vec![f16::ONE; 2].into()])),
            (-1e39, pair([vec![bf16::ONE].into(), vec![bf16::ONE; 2].into()])),
            (1e39, pair([vec![1_f32].into(), vec![1_f32; 2].into()])),
        ] {
            let text = said(PadCollate::new(value), arrays);
            assert!(text.contains(&format!("which {value} is not")), "{text}");
        }
        let masks = [vec![true], vec![false; 2]].map(|m| Array::new([m.len()], m).unwrap());
        let text = said(PadCollate::new(2.0), masks.to_vec());
        assert!(text.contains("is of bool, which 2 is not"), "{text}");
    }

    #[test]
    fn shapes_without_elements_are_padded_or_refused() {
        const MANY: usize = 1 << 40;
        let padded = |shapes: [&[usize]; 2]| {
            let empty = |shape: &[usize]| Array::new(shape, Vec::<f32>::new()).unwrap();
            let samples = shapes.map(|shape| Sample::new().with("x", empty(shape)));
            let batch = PadCollate::new(1.0).collate(samples.into());
            batch.map(|batch| batch.get("x").unwrap().shape().to_vec())
        };
        for (shapes, largest) in [
            ([&[MANY, 0][..], &[0, MANY]], "[1099511627776, 1099511627776]"),
            ([&[1 << 31, 0], &[0, 1 << 31]], "[2147483648, 2147483648]"),
        ] {
            let error = padded(shapes).unwrap_err().to_string();
            let says = format!("its field `x` padded to {largest} does not fit into memory");
            assert!(error.starts_with("sample 0 ") && error.ends_with(&says), "{error}");
        }
        assert_eq!(padded([&[MANY, 0], &[MANY + 1, 0]]).unwrap(), [2, MANY + 1, 0]);
        assert_eq!(padded([&[0, MANY, MANY], &[0, 1, 1]]).unwrap(), [2, 0, MANY, MANY]);
    }

    #[test]
    fn floats_are_padded_with_infinity_and_nan() {
        for value in [f64::NEG_INFINITY, f64::NAN] {
            let samples = [vec![1_f32], vec![1.0, 2.0]]
                .map(|x| Sample::new().with("x", Array::new([x.len()], x).unwrap()));
            let batch = PadCollate::new(value).collate(samples.into()).unwrap();
            let ArrayData::F32(floats) = batch.get("x").unwrap().data() else { panic!() };
            assert_eq!(floats[1].to_bits(), (value as f32).to_bits());
        }
    }
}
