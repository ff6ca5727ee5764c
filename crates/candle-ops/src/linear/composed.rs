//! Compositions of candle's operators, for tensors on a GPU; see `graph/device.rs`.

use candle_core::{Result, Tensor};

use super::Extents;
use super::weighted::Kernel;
#[cfg(feature = "cuda")]
use crate::cuda;
use crate::elementwise::broadcast_add;

pub(crate) fn linear(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    extents: Extents,
) -> Result<Tensor> {
    let shape = extents.output_shape(x.shape());
    #[cfg(feature = "cuda")]
    if let Some(kernels) = cuda::of_many(x, shape.elem_count()) {
        return cuda::linear(&kernels, x, weight, bias, extents);
    }
    let y = x.reshape((extents.rows, extents.inputs))?.matmul(&weight.t()?)?;
    let y = if let Some(bias) = bias { broadcast_add(&y, bias)? } else { y };
    y.reshape(shape)
}
