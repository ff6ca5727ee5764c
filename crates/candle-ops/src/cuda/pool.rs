//! Pooling: largest of a window, mean of an image.

use std::sync::Arc;

use candle_core::{DType, Result, Tensor};

use super::super::conv::{Window, positions};
use super::node::node1;
use super::{Kernels, blocks_of_warps, pair, stretches};

pub(in super::super) fn max_pool2d(
    kernels: &Arc<Kernels>,
    x: &Tensor,
    kernel: usize,
    window: Window,
) -> Result<Tensor> {
    let x = &x.contiguous()?;
    let (images, channels, height, width) = x.dims4()?;
    let pool = Pool {
        kernels: kernels.clone(),
        dtype: x.dtype(),
        planes: images * channels,
        input: (height, width),
        output: (positions(height, kernel, window)?, positions(width, kernel, window)?),
        kernel,
        window,
    };
    let shape = (images, channels, pool.output.0, pool.output.1);
    let y = kernels.empty(shape, x.dtype())?;
    let taken = kernels.empty(shape, DType::U32)?;
    // SAFETY: images, and what is as large as their result.
    unsafe { pool.launch("max_pool", pool.output, [kernels.address(x)?, y.at, taken.at]) }?;
    let taken = taken.tensor();
    node1("max_pool2d", [x], y, move |[x], _, dy| {
        let dx = pool.kernels.empty(x.shape(), x.dtype())?;
        let kernels = &pool.kernels;
        let job = [dx.at, kernels.address(dy)?, kernels.address(&taken)?];
        // SAFETY: as above, with gradients in their places.
        unsafe { pool.launch("max_pool_backward", pool.input, job) }?;
        Ok([Some(dx.tensor())])
    })
}

struct Pool {
    kernels: Arc<Kernels>,
    dtype: DType,
    planes: usize,
    input: (usize, usize),
    output: (usize, usize),
    kernel: usize,
    window: Window,
}

impl Pool {
    /// Over planes of some extents.
    ///
    /// # Safety
    ///
    /// The addresses must be those of images, and of two tensors as large as the result of their pooling.
    unsafe fn launch(&self, kernel: &str, over: (usize, usize), at: [u64; 3]) -> Result<()> {
        let [x, y, taken] = at;
        let job = [
            x,
            y,
            taken,
            pair(self.planes, self.input.0),
            pair(self.input.1, self.output.0),
            pair(self.output.1, self.kernel),
            pair(self.window.stride, self.window.padding),
        ];
        let blocks = blocks_of_warps(stretches(self.planes, over.0 * over.1));
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
    // SAFETY: a `MeanJob` of so many planes, and a number for each.
    unsafe { kernels.launch(x.dtype(), "mean_pool", blocks_of_warps(planes), &job) }?;
    let kernels = kernels.clone();
    node1("global_avg_pool", [x], y, move |[x], _, dy| {
        let dx = kernels.empty(x.shape(), x.dtype())?;
        let (job, blocks) =
            ([dx.at, kernels.address(dy)?, pair(planes, pixels)], blocks_of_warps(planes));
        // SAFETY: as above, with gradients in their places.
        unsafe { kernels.launch(x.dtype(), "mean_pool_backward", blocks, &job) }?;
        Ok([Some(dx.tensor())])
    })
}
