//! For tensors on a GPU: kernels if there are, else compositions; see `graph/device.rs`.

use candle_core::{DType, Result, Tensor, bail};

use super::Normalization;
use crate::graph::device;

pub(crate) fn relu(x: &Tensor) -> Result<Tensor> {
    if let Some(kernels) = device::kernels(x) {
        return kernels.relu(x);
    }
    // candle's own ReLU has a gradient of 1 at 0, and none for NaN.
    let zeros = x.zeros_like()?;
    x.detach().le(&zeros)?.where_cond(&zeros, x)
}

pub(crate) fn add_relu(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    if let Some(kernels) = device::kernels(a) {
        return kernels.add_relu(a, b);
    }
    relu(&(a + b)?)
}

/// The sum, if there is a kernel and one summand is broadcast over the samples of the other, such
/// as positions.
pub(crate) fn add_rows([a, b]: [&Tensor; 2]) -> Result<Option<Tensor>> {
    let [whole, row] = if a.elem_count() < b.elem_count() { [b, a] } else { [a, b] };
    let ones = row.dims().iter().take_while(|dim| **dim == 1).count();
    let fits = whole.dims().ends_with(&row.dims()[ones..]) && row.rank() <= whole.rank();
    // One warp per row.
    let is_long = row.elem_count() >= 32 && row.elem_count() < whole.elem_count();
    if !(fits && is_long && whole.is_contiguous() && row.is_contiguous()) {
        return Ok(None);
    }
    device::kernels(whole).map(|kernels| kernels.add_rows(whole, row)).transpose()
}

pub(crate) fn normalize(images: &Tensor, by: &Normalization, dtype: DType) -> Result<Tensor> {
    if images.dtype() != DType::U8 {
        bail!("normalize: images must be u8, not {:?}", images.dtype());
    }
    if let Some(kernels) = device::kernels_in(images, dtype) {
        return kernels.normalize(images, [&by.mean, &by.std], dtype);
    }
    let channels =
        |values: &[f32]| Tensor::from_slice(values, (1, values.len(), 1, 1), images.device());
    images
        .to_dtype(DType::F32)?
        .broadcast_div(&channels(&[255.0])?)?
        .broadcast_sub(&channels(&by.mean)?)?
        .broadcast_div(&channels(&by.std)?)?
        .to_dtype(dtype)
}
