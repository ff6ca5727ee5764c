//! Compositions of candle's operators, for tensors on a GPU; see `graph/device.rs`.

use candle_core::{Result, Tensor};

#[cfg(feature = "cuda")]
use crate::cuda;
use crate::elementwise::broadcast_add;
use crate::sizes::LinearSizes;

pub(crate) fn linear(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    sizes: LinearSizes,
) -> Result<Tensor> {
    let shape = sizes.output_shape(x.shape());
    #[cfg(feature = "cuda")]
    if let Some(kernels) = cuda::of_many(x, shape.elem_count()) {
        return cuda::linear(&kernels, x, weight, bias, sizes);
    }
    let y = x.reshape((sizes.rows, sizes.inputs))?.matmul(&weight.t()?)?;
    let y = if let Some(bias) = bias { broadcast_add(&y, bias)? } else { y };
    y.reshape(shape)
}
