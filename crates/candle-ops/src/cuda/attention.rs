//! Attention: a product, softmax, a product. Heads are read and written where they lie side by side.

use std::sync::Arc;

use candle_core::{DType, Result, Tensor};

use super::super::attention::{self, AttentionOptions};
use super::Kernels;
use super::lines::Shares;
use super::matmul::{Matrices, ONE};
use super::node::node1;

pub(in super::super) fn self_attention(
    kernels: &Arc<Kernels>,
    qkv: &Tensor,
    options: AttentionOptions,
) -> Result<Tensor> {
    let qkv = &qkv.contiguous()?;
    let depth = attention::depth(qkv.shape(), options)?;
    let (samples, positions, _) = qkv.dims3()?;
    let of = Attention { dtype: qkv.dtype(), samples, positions, depth, heads: options.heads };
    let seen = if options.causal { positions } else { 0 };
    let softmax = Shares { count: positions, seen };
    let scale = (depth as f32).sqrt().recip();
    let (square, thin) = ([positions, depth, positions], [positions, positions, depth]);
    let y = kernels.empty((samples, positions, of.heads * depth), of.dtype)?;
    let shares = kernels.empty((of.heads, samples, positions, positions), of.dtype)?;
    let (from, count) = (kernels.address(qkv)?, shares.shape.elem_count());
    for head in 0..of.heads {
        let ([q, k, _], to) = (of.parts(from, head), of.shares(shares.at, head));
        // SAFETY: one head of all samples, and room for its scores.
        unsafe { kernels.multiply(samples, square, [q, k.t(), to], [scale, 0.0]) }?;
    }
    // SAFETY: all heads' scores, a line of which is read before it is written.
    unsafe { softmax.launch(kernels, "softmax", of.dtype, count, [shares.at, shares.at, 0]) }?;
    for head in 0..of.heads {
        let ([_, _, v], own) = (of.parts(from, head), of.shares(shares.at, head));
        // SAFETY: as above, and that head of the result.
        unsafe { kernels.multiply(samples, thin, [own, v, of.head(y.at, head)], ONE) }?;
    }
    let (kernels, shares) = (kernels.clone(), shares.tensor());
    node1("self_attention", [qkv], y, move |[qkv], _, dy| {
        let dx = kernels.empty(qkv.shape(), of.dtype)?;
        let dshares = kernels.empty(shares.shape(), of.dtype)?;
        let (from, shares, dy) =
            (kernels.address(qkv)?, kernels.address(&shares)?, kernels.address(dy)?);
        for head in 0..of.heads {
            let ([_, _, v], [_, _, dv]) = (of.parts(from, head), of.parts(dx.at, head));
            let (own, dy) = (of.shares(shares, head), of.head(dy, head));
            // SAFETY: as above, with gradients in their places.
            unsafe { kernels.multiply(samples, thin, [own.t(), dy, dv], ONE) }?;
            let to = of.shares(dshares.at, head);
            // SAFETY: as above.
            unsafe { kernels.multiply(samples, square, [dy, v.t(), to], ONE) }?;
        }
        let job = [dshares.at, shares, dshares.at];
        // SAFETY: as above; a line's sum is taken before it is written.
        unsafe { softmax.launch(&kernels, "softmax_backward", of.dtype, count, job) }?;
        for head in 0..of.heads {
            let ([q, k, _], [dq, dk, _]) = (of.parts(from, head), of.parts(dx.at, head));
            let own = of.shares(dshares.at, head);
            // SAFETY: as above.
            unsafe { kernels.multiply(samples, thin, [own, k, dq], [scale, 0.0]) }?;
            // SAFETY: as above.
            unsafe { kernels.multiply(samples, thin, [own.t(), q, dk], [scale, 0.0]) }?;
        }
        Ok([Some(dx.tensor())])
    })
}

#[derive(Clone, Copy, Debug)]
struct Attention {
    dtype: DType,
    samples: usize,
    positions: usize,
    depth: usize,
    heads: usize,
}

impl Attention {
    /// `depth` columns of matrices of `line` columns, one for each sample.
    fn columns(self, at: u64, first: usize, line: usize) -> Matrices {
        let at = at + (first * self.dtype.size_in_bytes()) as u64;
        Matrices { line: Some(line), ..Matrices::new(at, self.dtype, self.positions * line) }
    }

    /// A head's queries, keys and values.
    fn parts(self, qkv: u64, head: usize) -> [Matrices; 3] {
        let width = self.heads * self.depth;
        [0, 1, 2].map(|part| self.columns(qkv, part * width + head * self.depth, 3 * width))
    }

    /// A head of the result.
    fn head(self, y: u64, head: usize) -> Matrices {
        self.columns(y, head * self.depth, self.heads * self.depth)
    }

    /// A head's shares.
    fn shares(self, at: u64, head: usize) -> Matrices {
        let square = self.positions * self.positions;
        let before = head * self.samples * square * self.dtype.size_in_bytes();
        Matrices::new(at + before as u64, self.dtype, square)
    }
}
