//! Arrays of a dataset as tensors.

use candle_core::{Device, Result, Tensor};
use train_data::{Array, ArrayData};

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
