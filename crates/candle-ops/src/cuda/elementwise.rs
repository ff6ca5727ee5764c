//! ReLU, GELU, and the sum that ends a residual block.

use std::sync::Arc;

use candle_core::{Result, Tensor};

use super::node::{node1, node2};
use super::{Kernels, Output, THREADS};

pub(in super::super) fn relu(kernels: &Arc<Kernels>, x: &Tensor) -> Result<Tensor> {
    let x = &x.contiguous()?;
    let y = kernels.map("relu", [x, x])?;
    let kernels = kernels.clone();
    node1("relu", [x], y, move |_, y, dy| {
        Ok([Some(kernels.map("relu_backward", [y, dy])?.tensor())])
    })
}

pub(in super::super) fn gelu(kernels: &Arc<Kernels>, x: &Tensor) -> Result<Tensor> {
    let x = &x.contiguous()?;
    let y = kernels.map("gelu", [x, x])?;
    let kernels = kernels.clone();
    node1("gelu", [x], y, move |[x], _, dy| {
        Ok([Some(kernels.map("gelu_backward", [x, dy])?.tensor())])
    })
}

/// Of one shape and type.
pub(in super::super) fn add_relu(kernels: &Arc<Kernels>, a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let (a, b) = (&a.contiguous()?, &b.contiguous()?);
    let y = kernels.map("add_relu", [a, b])?;
    let kernels = kernels.clone();
    node2("add_relu", [a, b], y, move |_, y, dy| {
        let dx = kernels.map("relu_backward", [y, dy])?.tensor();
        Ok([Some(dx.clone()), Some(dx)])
    })
}

impl Kernels {
    /// A kernel over the elements of two contiguous tensors of one shape and type.
    pub(super) fn map(&self, kernel: &str, [a, b]: [&Tensor; 2]) -> Result<Output> {
        let y = self.empty(a.shape(), a.dtype())?;
        let count = a.elem_count();
        // Some elements to a thread.
        let blocks = count.div_ceil(8 * THREADS).min(1 << 12);
        let job = [self.address(a)?, self.address(b)?, y.at, count as u64];
        // SAFETY: a `MapJob` of three tensors of `count` elements of this type.
        unsafe { self.launch(a.dtype(), kernel, blocks, &job) }?;
        Ok(y)
    }
}
