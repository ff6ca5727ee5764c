//! Pooling: the largest value of each window, the mean of each image.

use std::sync::Arc;

use candle_core::{DType, Result, Tensor};

use super::super::pool::Windows;
use super::node::node;
use super::{Kernel, Kernels, blocks_of_warps, pair, stretches};
use crate::custom_op::apply1;

pub(in super::super) fn max_pool2d(
    kernels: &Arc<Kernels>,
    x: &Tensor,
    extents: Windows,
) -> Result<Tensor> {
    let x = &x.contiguous()?;
    let Windows { height, width, out_height, out_width, .. } = extents;
    let pool = Pool { kernels: kernels.clone(), dtype: x.dtype(), extents };
    let y = kernels.empty(extents.output_shape(), x.dtype())?;
    let taken = kernels.empty(extents.output_shape(), DType::U32)?;
    let addresses = [kernels.address(x)?, y.at, taken.at];
    // SAFETY: images, and two tensors of their result's extents.
    unsafe { pool.launch(Kernel::max_pool, out_height * out_width, addresses) }?;
    let taken = taken.tensor();
    let backward = move |[x]: [&Tensor; 1], _: &Tensor, dy: &Tensor| {
        let kernels = &pool.kernels;
        let dx = kernels.empty(x.shape(), x.dtype())?;
        let addresses = [dx.at, kernels.address(dy)?, kernels.address(&taken)?];
        // SAFETY: as above, with gradients in their places.
        unsafe { pool.launch(Kernel::max_pool_backward, height * width, addresses) }?;
        Ok([Some(dx.tensor())])
    };
    apply1(node("max_pool2d", y, backward), [x])
}

struct Pool {
    kernels: Arc<Kernels>,
    dtype: DType,
    extents: Windows,
}

impl Pool {
    /// Launches a kernel over planes of `pixels` pixels.
    ///
    /// # Safety
    ///
    /// The addresses must be those of images, and of two tensors of their result's extents.
    unsafe fn launch(&self, kernel: Kernel, pixels: usize, [x, y, taken]: [u64; 3]) -> Result<()> {
        let Windows { images, channels, height, width, out_height, out_width, .. } = self.extents;
        let (planes, window) = (images * channels, self.extents.window);
        let job = [
            x,
            y,
            taken,
            pair(planes, height),
            pair(width, out_height),
            pair(out_width, self.extents.kernel),
            pair(window.stride, window.padding),
        ];
        let blocks = blocks_of_warps(stretches(planes, pixels));
        // SAFETY: a `PoolJob`; the caller vouches for the addresses.
        unsafe { self.kernels.launch(self.dtype, kernel, blocks, &job) }
    }
}

pub(in super::super) fn global_avg_pool(kernels: &Arc<Kernels>, x: &Tensor) -> Result<Tensor> {
    let x = &x.contiguous()?;
    let (images, channels, height, width) = x.dims4()?;
    let (planes, pixels) = (images * channels, height * width);
    let y = kernels.empty((images, channels), x.dtype())?;
    let job = [kernels.address(x)?, y.at, pair(planes, pixels)];
    // SAFETY: a `MeanJob` of `planes` planes, and a number for each.
    unsafe { kernels.launch(x.dtype(), Kernel::mean_pool, blocks_of_warps(planes), &job) }?;
    let kernels = kernels.clone();
    let backward = move |[x]: [&Tensor; 1], _: &Tensor, dy: &Tensor| {
        let dx = kernels.empty(x.shape(), x.dtype())?;
        let (job, blocks) =
            ([dx.at, kernels.address(dy)?, pair(planes, pixels)], blocks_of_warps(planes));
        // SAFETY: as above, with gradients in their places.
        unsafe { kernels.launch(x.dtype(), Kernel::mean_pool_backward, blocks, &job) }?;
        Ok([Some(dx.tensor())])
    };
    apply1(node("global_avg_pool", y, backward), [x])
}
