//! Arrays of a dataset as tensors.

use candle_core::{DType, Device, Error, Result, Tensor};
use candle_ops::known_inputs::KnownInputs;
use train_data::{Array, ArrayData, Batch};

/// The fields of a batch as tensors, by name.
#[derive(Debug)]
pub struct Fields(Vec<(String, Tensor)>);

impl Fields {
    /// Converts the arrays of a batch by `tensor`.
    ///
    /// # Errors
    ///
    /// Those of `tensor`.
    pub fn of(batch: &Batch, tensor: impl Fn(&Array) -> Result<Tensor>) -> Result<Self> {
        let field = |(name, array): (&str, &Array)| Ok((name.to_owned(), tensor(array)?));
        Ok(Self(batch.iter().map(field).collect::<Result<_>>()?))
    }

    /// Converts each tensor.
    ///
    /// # Errors
    ///
    /// Those of `call`.
    pub fn map(&self, call: impl Fn(&Tensor) -> Result<Tensor>) -> Result<Self> {
        let field = |(name, tensor): (&str, &Tensor)| Ok((name.to_owned(), call(tensor)?));
        Ok(Self(self.iter().map(field).collect::<Result<_>>()?))
    }

    /// Names and tensors, in the order of the batch.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Tensor)> {
        self.0.iter().map(|(name, tensor)| (name.as_str(), tensor))
    }

    /// Returns the field called `name`, if there is one.
    #[must_use]
    pub fn find(&self, name: &str) -> Option<&Tensor> {
        self.iter().find(|(own, _)| *own == name).map(|(_, tensor)| tensor)
    }

    /// Returns the field called `name`.
    ///
    /// # Errors
    ///
    /// No such field; the error lists the fields.
    pub fn get(&self, name: &str) -> Result<&Tensor> {
        self.find(name).ok_or_else(|| {
            let have: Vec<_> = self.iter().map(|(name, _)| name).collect();
            Error::msg(format!("the batch has no field `{name}`; it has {have:?}"))
        })
    }

    /// Runs `call`, a forward pass on these tensors, whose values are those of `batch`: operators
    /// check labels and indices with the values on the host, without a copy from a GPU.
    pub fn with_known<R>(&self, batch: &Batch, call: impl FnOnce() -> R) -> R {
        self.known(batch).enter(call).0
    }

    /// As [`with_known`](Self::with_known), in a capture. Also returns the checks that other
    /// batches have to pass.
    #[cfg(feature = "cuda")]
    pub(crate) fn in_capture<R>(
        &self,
        batch: &Batch,
        call: impl FnOnce() -> R,
    ) -> (R, Vec<candle_ops::known_inputs::IndexCheck>) {
        self.known(batch).for_capture().enter(call)
    }

    fn known(&self, batch: &Batch) -> KnownInputs {
        KnownInputs::new(self.0.iter().map(|(_, tensor)| tensor).zip(numbers(batch)))
    }
}

/// The values of the fields that are integers.
pub(crate) fn numbers(batch: &Batch) -> Vec<Option<&[i64]>> {
    let numbers = batch.iter().map(|(_, array)| match array.data() {
        ArrayData::I64(numbers) => Some(numbers.as_slice()),
        _ => None,
    });
    numbers.collect()
}

/// Converts a tensor to an array on the host, the inverse of [`tensor`](tensor()): for metrics, for
/// example. Floating-point values are widened to `f32` (those of `f64` rounded), integers to `i64`;
/// those of `u8` stay.
///
/// # Errors
///
/// A failed copy from the device.
pub fn array(tensor: &Tensor) -> Result<Array> {
    let flat = tensor.flatten_all()?;
    let data = match tensor.dtype() {
        DType::U8 => ArrayData::U8(flat.to_vec1()?),
        dtype if dtype.is_float() => ArrayData::F32(flat.to_dtype(DType::F32)?.to_vec1()?),
        _ => ArrayData::I64(flat.to_dtype(DType::I64)?.to_vec1()?),
    };
    Array::new(tensor.dims(), data).map_err(Error::wrap)
}

/// Converts an array to a tensor on `device`, of the same type; a mask to bytes of 0 and 1.
///
/// # Errors
///
/// An error of the device; a type that candle does not have.
pub fn tensor(array: &Array, device: &Device) -> Result<Tensor> {
    let shape = array.shape();
    match array.data() {
        ArrayData::F32(values) => Tensor::from_slice(values, shape, device),
        ArrayData::F16(values) => Tensor::from_slice(values, shape, device),
        ArrayData::BF16(values) => Tensor::from_slice(values, shape, device),
        ArrayData::U8(values) => Tensor::from_slice(values, shape, device),
        ArrayData::I32(values) => Tensor::from_slice(values, shape, device),
        ArrayData::I64(values) => Tensor::from_slice(values, shape, device),
        ArrayData::Bool(mask) => {
            let bytes = mask.iter().map(|is_set| u8::from(*is_set)).collect();
            Tensor::from_vec::<_, u8>(bytes, shape, device)
        }
        other => candle_core::bail!("candle has no tensors of {}", other.type_name()),
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;

    #[test]
    fn arrays_of_tensors_have_shape_and_values() {
        let cpu = Device::Cpu;
        let halves = Tensor::new(&[[bf16::ONE, bf16::NAN]], &cpu).unwrap();
        let array_of = |tensor: &Tensor| array(tensor).unwrap();
        assert_eq!(array_of(&halves).shape(), [1, 2]);
        let ArrayData::F32(values) = array_of(&halves).data().clone() else { panic!() };
        assert!(values[0] == 1.0 && values[1].is_nan());
        let numbers = Tensor::new(&[3_u32, 7], &cpu).unwrap();
        assert_eq!(array_of(&numbers), Array::new([2], vec![3_i64, 7]).unwrap());
        // Not contiguous.
        let turned = Tensor::new(&[[1_u8, 2], [3, 4]], &cpu).unwrap().t().unwrap();
        assert_eq!(array_of(&turned), Array::new([2, 2], vec![1_u8, 3, 2, 4]).unwrap());
        let back = tensor(&array_of(&turned), &cpu).unwrap();
        assert_eq!(back.to_vec2::<u8>().unwrap(), [[1, 3], [2, 4]]);
    }
}
