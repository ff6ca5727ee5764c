//! Table lookup by index. The gradients of a row are summed in the order of the indices, as on the
//! CPU.

use std::sync::Arc;

use candle_core::{DType, Result, Tensor};

use super::jobs::{EmbeddingJob, u32_of};
use super::node::node;
use super::{Kernel, Kernels, THREADS, blocks_of_threads, blocks_of_warps};
use crate::graph::custom_op::apply1;

/// The caller has checked the indices; there is at least one.
pub(super) fn embedding(
    kernels: &Arc<Kernels>,
    ids: &Tensor,
    weight: &Tensor,
    padding: Option<usize>,
) -> Result<Tensor> {
    let weight = &weight.contiguous()?;
    let (rows, width) = weight.dims2()?;
    let (count, dtype) = (ids.elem_count(), weight.dtype());
    let y = kernels.empty([ids.dims(), &[width]].concat(), dtype)?;
    let ids = ids.to_dtype(DType::I64)?.contiguous()?;
    let job = EmbeddingJob {
        ids: kernels.address(&ids)?,
        table: kernels.address(weight)?,
        rows: y.at,
        count: u32_of(count),
        width: u32_of(width),
        padding: padding.map_or(u32::MAX, u32_of),
        ..Default::default()
    };
    // SAFETY: an `EmbeddingJob` of indices, table and result.
    unsafe { kernels.launch(dtype, Kernel::embedding, blocks_of_warps(count), &job) }?;
    let kernels = kernels.clone();
    let backward = move |[weight]: [&Tensor; 1], _: &Tensor, dy: &Tensor| {
        let dw = weight.zeros_like()?;
        let ends = Tensor::zeros(2 * rows, DType::U32, weight.device())?;
        let job = EmbeddingJob {
            ids: kernels.address(&ids)?,
            table: kernels.address(&dw)?,
            rows: kernels.address(dy)?,
            ends: kernels.address(&ends)?,
            ..job
        };
        // SAFETY: an `EmbeddingJob` of indices, and two numbers for each row.
        unsafe { kernels.launch(dtype, Kernel::ends_of_ids, blocks_of_threads(count), &job) }?;
        let blocks = (count * width.div_ceil(THREADS)).min(1 << 16);
        // SAFETY: as above, with the table's gradient, and that of the result, which is contiguous.
        unsafe { kernels.launch(dtype, Kernel::embedding_backward, blocks, &job) }?;
        Ok([Some(dw)])
    };
    apply1(node("embedding", y, backward), [weight])
}
