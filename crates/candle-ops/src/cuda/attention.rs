//! Attention as a product, softmax and a product. Heads are read and written in place, side by side.

use std::sync::Arc;

use candle_core::{DType, Result, Tensor};

use super::super::attention::Extents;
use super::matmul::{Matrices, ONE};
use super::node::node;
use super::rows::Softmax;
use super::{Kernel, Kernels};
use crate::custom_op::apply1;

pub(in super::super) fn self_attention(
    kernels: &Arc<Kernels>,
    qkv: &Tensor,
    extents: Extents,
) -> Result<Tensor> {
    let qkv = &qkv.contiguous()?;
    let Extents { samples, positions, heads, depth, causal } = extents;
    let of = Attention { dtype: qkv.dtype(), extents };
    let softmax = Softmax { width: positions, causal };
    let scale = (depth as f32).sqrt().recip();
    let (square, thin) = ([positions, depth, positions], [positions, positions, depth]);
    let y = kernels.empty(extents.output_shape(), of.dtype)?;
    let weights = kernels.empty((heads, samples, positions, positions), of.dtype)?;
    let (from, count) = (kernels.address(qkv)?, weights.shape.elem_count());
    for head in 0..heads {
        let ([q, k, _], to) = (of.parts(from, head), of.weights(weights.at, head));
        // SAFETY: one head of all samples, and memory for its scores.
        unsafe { kernels.multiply(samples, square, [q, k.t(), to], [scale, 0.0]) }?;
    }
    // SAFETY: all heads' scores, a row of which is read before it is written.
    unsafe {
        softmax.launch(kernels, Kernel::softmax, of.dtype, count, [weights.at, weights.at, 0])
    }?;
    for head in 0..heads {
        let ([_, _, v], own) = (of.parts(from, head), of.weights(weights.at, head));
        // SAFETY: as above, and that head of the result.
        unsafe { kernels.multiply(samples, thin, [own, v, of.head(y.at, head)], ONE) }?;
    }
    let (kernels, weights) = (kernels.clone(), weights.tensor());
    let backward = move |[qkv]: [&Tensor; 1], _: &Tensor, dy: &Tensor| {
        let dx = kernels.empty(qkv.shape(), of.dtype)?;
        let dweights = kernels.empty(weights.shape(), of.dtype)?;
        let (from, weights, dy) =
            (kernels.address(qkv)?, kernels.address(&weights)?, kernels.address(dy)?);
        for head in 0..heads {
            let ([_, _, v], [_, _, dv]) = (of.parts(from, head), of.parts(dx.at, head));
            let (own, dy) = (of.weights(weights, head), of.head(dy, head));
            // SAFETY: as above, with gradients in their places.
            unsafe { kernels.multiply(samples, thin, [own.t(), dy, dv], ONE) }?;
            let to = of.weights(dweights.at, head);
            // SAFETY: as above.
            unsafe { kernels.multiply(samples, square, [dy, v.t(), to], ONE) }?;
        }
        let job = [dweights.at, weights, dweights.at];
        // SAFETY: as above; a row's sum is taken before it is written.
        unsafe { softmax.launch(&kernels, Kernel::softmax_backward, of.dtype, count, job) }?;
        for head in 0..heads {
            let ([q, k, _], [dq, dk, _]) = (of.parts(from, head), of.parts(dx.at, head));
            let own = of.weights(dweights.at, head);
            // SAFETY: as above.
            unsafe { kernels.multiply(samples, thin, [own, k, dq], [scale, 0.0]) }?;
            // SAFETY: as above.
            unsafe { kernels.multiply(samples, thin, [own.t(), q, dk], [scale, 0.0]) }?;
        }
        Ok([Some(dx.tensor())])
    };
    apply1(node("self_attention", y, backward), [qkv])
}

#[derive(Clone, Copy, Debug)]
struct Attention {
    dtype: DType,
    extents: Extents,
}

impl Attention {
    /// `depth` columns of matrices with `line` columns, one for each sample.
    fn columns(self, at: u64, first: usize, line: usize) -> Matrices {
        let at = at + (first * self.dtype.size_in_bytes()) as u64;
        Matrices {
            line: Some(line),
            ..Matrices::new(at, self.dtype, self.extents.positions * line)
        }
    }

    /// A head's queries, keys and values.
    fn parts(self, qkv: u64, head: usize) -> [Matrices; 3] {
        let width = self.extents.width();
        [0, 1, 2].map(|part| self.columns(qkv, part * width + head * self.extents.depth, 3 * width))
    }

    /// A head of the result.
    fn head(self, y: u64, head: usize) -> Matrices {
        self.columns(y, head * self.extents.depth, self.extents.width())
    }

    /// A head's attention weights.
    fn weights(self, at: u64, head: usize) -> Matrices {
        let square = self.extents.positions * self.extents.positions;
        let before = head * self.extents.samples * square * self.dtype.size_in_bytes();
        Matrices::new(at + before as u64, self.dtype, square)
    }
}
