//! Max pooling over windows, average pooling over images.

use std::sync::Arc;

use candle_core::{DType, Result, Tensor};

use super::channels_last::Order;
use super::jobs::{MeanJob, PoolJob, u32_of};
use super::node::{node, node_of};
use super::{Kernel, Kernels, blocks_of_threads, blocks_of_warps, chunks_of};
use crate::graph::custom_op::apply1;
use crate::sizes::Windows;

pub(super) fn max_pool2d(kernels: &Arc<Kernels>, x: &Tensor, extents: Windows) -> Result<Tensor> {
    let order = Order::of(x);
    let pool = Pool { kernels: kernels.clone(), dtype: x.dtype(), extents, order };
    let shape = order.shape(extents.output_shape().dims4()?);
    let y = kernels.empty(&shape[..], x.dtype())?;
    let taken = kernels.empty(&shape[..], DType::U32)?;
    let own = kernels.laid(x, order)?;
    let addresses = [kernels.address(&own)?, y.at, taken.at];
    let forward = order.pick([Kernel::max_pool, Kernel::max_pool_last]);
    // SAFETY: images, and two tensors of their result's extents.
    unsafe { pool.launch(forward, extents.out_height * extents.out_width, addresses) }?;
    let taken = taken.tensor();
    let backward = move |[x]: [&Tensor; 1], _: &Tensor, dy: &Tensor| {
        let kernels = &pool.kernels;
        let dx = kernels.empty(&order.shape(x.dims4()?)[..], x.dtype())?;
        let dy = kernels.laid(dy, order)?;
        let addresses = [dx.at, kernels.address(&dy)?, kernels.address(&taken)?];
        let backward = order.pick([Kernel::max_pool_backward, Kernel::max_pool_last_backward]);
        // SAFETY: as above, with gradients in their places.
        unsafe { pool.launch(backward, extents.height * extents.width, addresses) }?;
        Ok([Some(dx.seen(order)?)])
    };
    apply1(node_of("max_pool2d", y, order, backward), [x])
}

struct Pool {
    kernels: Arc<Kernels>,
    dtype: DType,
    extents: Windows,
    order: Order,
}

impl Pool {
    /// Launches a kernel over planes of `pixels` pixels.
    ///
    /// # Safety
    ///
    /// The addresses must be those of images, and of two tensors of their result's extents, in the
    /// pool's order.
    unsafe fn launch(&self, kernel: Kernel, pixels: usize, [x, y, taken]: [u64; 3]) -> Result<()> {
        let Windows { images, channels, height, width, out_height, out_width, .. } = self.extents;
        let (planes, window) = (images * channels, self.extents.window);
        let job = PoolJob {
            x,
            y,
            taken,
            planes: u32_of(planes),
            height: u32_of(height),
            width: u32_of(width),
            out_height: u32_of(out_height),
            out_width: u32_of(out_width),
            kernel: u32_of(self.extents.kernel),
            stride: u32_of(window.stride),
            padding: u32_of(window.padding),
            channels: u32_of(channels),
            unused: 0,
        };
        let of_planes = blocks_of_warps(chunks_of(planes, pixels));
        let blocks = self.order.pick([of_planes, blocks_of_threads(planes * pixels)]);
        // SAFETY: a `PoolJob`; the caller vouches for the addresses.
        unsafe { self.kernels.launch(self.dtype, kernel, blocks, &job) }
    }
}

pub(super) fn global_avg_pool(kernels: &Arc<Kernels>, x: &Tensor) -> Result<Tensor> {
    let order = Order::of(x);
    let (images, channels, height, width) = x.dims4()?;
    let (planes, pixels) = (images * channels, height * width);
    let y = kernels.empty((images, channels), x.dtype())?;
    let own = kernels.laid(x, order)?;
    let job = MeanJob {
        x: kernels.address(&own)?,
        y: y.at,
        planes: u32_of(planes),
        pixels: u32_of(pixels),
        channels: u32_of(channels),
        unused: 0,
    };
    let forward = order.pick([Kernel::mean_pool, Kernel::mean_pool_last]);
    let blocks = move |elements| order.pick([blocks_of_warps(planes), blocks_of_threads(elements)]);
    // SAFETY: a `MeanJob` of `planes` planes, and a number for each.
    unsafe { kernels.launch(x.dtype(), forward, blocks(planes), &job) }?;
    let kernels = kernels.clone();
    let backward = move |[x]: [&Tensor; 1], _: &Tensor, dy: &Tensor| {
        let dx = kernels.empty(&order.shape(x.dims4()?)[..], x.dtype())?;
        let job = MeanJob { x: dx.at, y: kernels.address(dy)?, ..job };
        let backward = order.pick([Kernel::mean_pool_backward, Kernel::mean_pool_last_backward]);
        // SAFETY: as above, with gradients in their places.
        unsafe { kernels.launch(x.dtype(), backward, blocks(planes * pixels), &job) }?;
        Ok([Some(dx.seen(order)?)])
    };
    apply1(node("global_avg_pool", y, backward), [x])
}
