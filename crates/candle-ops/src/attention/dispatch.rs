//! For tensors on a GPU: kernels if there are, else compositions; see `graph/device.rs`. On the CPU
//! the composition serves for masks that need a gradient.

use candle_core::{D, Result, Tensor};

use super::Problem;
use super::rope::Pairs;
use crate::activation::dispatch::softmax;
use crate::context;
use crate::elementwise::broadcast_add;
use crate::elementwise::dropout::Factors;
use crate::graph::device::{self, scalar, widened};
use crate::sizes::{AttentionSizes, PackedSizes};
use crate::state::constants::constant;

/// `x` is `[b, heads, t, d]`.
pub(crate) fn rope(x: &Tensor, cos: &Tensor, sin: &Tensor, pairs: Pairs) -> Result<Tensor> {
    let [wide, cos, sin] = widened([x, cos, sin])?;
    let (samples, heads, positions, depth) = x.dims4()?;
    // The dimension of the two elements of a pair.
    let (of, shape) = match pairs {
        Pairs::Halves => (3, [samples, heads, positions, 2, depth / 2]),
        Pairs::Neighbours => (4, [samples, heads, positions, depth / 2, 2]),
    };
    let angles = |t: &Tensor| -> Result<Tensor> {
        let t = if t.rank() == 2 { t.unsqueeze(0)? } else { t.clone() };
        t.narrow(1, 0, positions)?.unsqueeze(1)?.unsqueeze(of)
    };
    let (cos, sin, wide) = (angles(&cos)?, angles(&sin)?, wide.reshape(&shape[..])?);
    let (a, b) = (wide.narrow(of, 0, 1)?, wide.narrow(of, 1, 1)?);
    let turned = [
        (a.broadcast_mul(&cos)? - b.broadcast_mul(&sin)?)?,
        (a.broadcast_mul(&sin)? + b.broadcast_mul(&cos)?)?,
    ];
    Tensor::cat(&turned, of)?.reshape(x.shape())?.to_dtype(x.dtype())
}

pub(crate) fn self_attention(qkv: &Tensor, sizes: PackedSizes) -> Result<Tensor> {
    let PackedSizes { samples, positions, heads, depth, .. } = sizes;
    if let Some(kernels) = device::kernels_for(qkv, positions * positions) {
        return kernels.self_attention(qkv, sizes);
    }
    let part = |part: usize| {
        qkv.narrow(2, part * sizes.width(), sizes.width())?
            .reshape((samples, positions, heads, depth))?
            .transpose(1, 2)?
            .contiguous()
    };
    let y = attention([&part(0)?, &part(1)?, &part(2)?], &sizes.separate().into())?;
    y.transpose(1, 2)?.reshape(sizes.output_shape())
}

/// Heads with the same keys are the rows of one product.
pub(crate) fn attention([q, k, v]: [&Tensor; 3], of: &Problem) -> Result<Tensor> {
    let sizes = &of.sizes;
    let AttentionSizes { samples, heads, kv_heads, queries, keys, .. } = *sizes;
    let rows = heads / kv_heads * queries;
    if of.mask.is_none()
        && let Some(kernels) = device::kernels_for(q, rows * keys)
        && let words = of.dropout.as_ref().map(Factors::words)
        && let Some(y) = kernels.attention([q, k, v], sizes, of.seen.as_ref(), words)?
    {
        if of.dropout.is_some() {
            context::drawn_by_kernel(sizes.scores_shape().elem_count());
        }
        return Ok(y);
    }
    let mask = of.added_mask(q.dtype())?;
    let (k, v) = (k.contiguous()?, v.contiguous()?);
    let grouped = (q * sizes.scale)?.reshape((samples, kv_heads, rows, sizes.depth))?;
    let mut scores = grouped.matmul(&k.t()?)?.reshape(sizes.scores_shape())?;
    if let Some(mask) = &mask {
        scores = broadcast_add(&scores.to_dtype(mask.dtype())?, mask)?;
    }
    if sizes.causal {
        let seen = constant("causal", &[queries, keys], q.device(), || {
            let seen = (0..queries).flat_map(|i| (0..keys).map(move |j| u8::from(j <= i)));
            Tensor::from_iter(seen, q.device())?.reshape((queries, keys))
        })?;
        let (shape, never) = (scores.shape(), scalar(f64::NEG_INFINITY, &scores)?);
        scores = seen.broadcast_as(shape)?.where_cond(&scores, &never.broadcast_as(shape)?)?;
    }
    let mut weights = match mask {
        Some(_) => masked_softmax(&scores)?.to_dtype(q.dtype())?,
        None => softmax(&scores)?,
    };
    if let Some(dropout) = &of.dropout {
        weights = dropout.multiply(&weights)?;
    }
    let y = weights.reshape((samples, kv_heads, rows, keys))?.matmul(&v)?;
    y.reshape((samples, heads, queries, sizes.value_depth))
}

/// Softmax that returns 0 for rows of only negative infinity.
fn masked_softmax(x: &Tensor) -> Result<Tensor> {
    let largest = x.detach().max_keepdim(D::Minus1)?;
    let hidden = largest.broadcast_eq(&scalar(f64::NEG_INFINITY, x)?)?;
    let largest = hidden.where_cond(&largest.zeros_like()?, &largest)?;
    let shares = x.broadcast_sub(&largest)?.exp()?;
    let sum = (shares.sum_keepdim(D::Minus1)? + hidden.to_dtype(x.dtype())?)?;
    shares.broadcast_div(&sum)
}
