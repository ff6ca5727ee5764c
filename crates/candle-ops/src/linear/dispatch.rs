//! For tensors on a GPU: kernels if there are, else compositions; see `graph/device.rs`.

use candle_core::{Result, Tensor};

use crate::elementwise::broadcast_add;
use crate::graph::device;
use crate::sizes::LinearSizes;

pub(crate) fn linear(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    sizes: LinearSizes,
) -> Result<Tensor> {
    let shape = sizes.output_shape(x.shape());
    if let Some(kernels) = device::kernels_for(x, shape.elem_count()) {
        return kernels.linear(x, weight, bias, sizes);
    }
    let y = x.reshape((sizes.rows, sizes.inputs))?.matmul(&weight.t()?)?;
    let y = if let Some(bias) = bias { broadcast_add(&y, bias)? } else { y };
    y.reshape(shape)
}
