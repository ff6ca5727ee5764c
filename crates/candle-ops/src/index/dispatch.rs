//! For tensors on a GPU: kernels if there are, else compositions; see `graph/device.rs`.

use candle_core::{DType, Result, Tensor};

use crate::graph::device::{self, scalar, widened};

/// The caller has checked the indices.
pub(crate) fn embedding(ids: &Tensor, weight: &Tensor, padding: Option<usize>) -> Result<Tensor> {
    let (_, width) = weight.dims2()?;
    if let Some(kernels) = device::kernels_for(weight, ids.elem_count() * width)
        && ids.elem_count() > 0
    {
        return kernels.embedding(ids, weight, padding);
    }
    let [wide] = widened([weight])?;
    let (flat, mut shape) = (ids.flatten_all()?, ids.dims().to_vec());
    let mut y = wide.contiguous()?.index_select(&flat, 0)?;
    if let Some(padding) = padding {
        let flat = flat.to_dtype(DType::I64)?;
        let is_padding = flat.broadcast_eq(&scalar(padding as f64, &flat)?)?.unsqueeze(1)?;
        y = is_padding.broadcast_as(y.shape())?.where_cond(&y.detach(), &y)?;
    }
    shape.push(width);
    y.reshape(shape)?.to_dtype(weight.dtype())
}
