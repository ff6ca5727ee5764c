//! Arrays of a dataset as tensors.

use candle_core::{Device, Error, Result, Tensor};
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
