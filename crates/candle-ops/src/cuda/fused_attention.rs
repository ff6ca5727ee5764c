//! Attention by kernels that keep no scores in memory (`attention.cu`).

use candle_core::{DType, Result, Tensor};

use super::attention::{Attention, Place};
use super::{Kernel, Kernels, pair};

/// The same as in `attention.cu`: number of queries, or keys, in a block.
const ROWS: usize = 128;

/// Maximum width of heads.
const DEPTH: usize = 64;

/// Proof that the kernels support a call.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fused(());

impl Fused {
    /// Supports half precision on tensor cores, and heads that are aligned for vectors and not too
    /// wide.
    pub(super) fn of(kernels: &Kernels, of: &Attention, inputs: [Place; 3]) -> Option<Self> {
        let is_half = matches!(of.dtype, DType::F16 | DType::BF16);
        let fits = of.depths.iter().all(|depth| *depth <= DEPTH && depth.is_multiple_of(8));
        let is_aligned = inputs.iter().all(|place| {
            let Place { at, head, step, line } = *place;
            at.is_multiple_of(16)
                && [head, step, line]
                    .iter()
                    .all(|n| n.is_multiple_of(8) && u32::try_from(*n).is_ok())
        });
        (kernels.tensor_cores && is_half && fits && is_aligned).then_some(Self(()))
    }

    /// Computes the result. Returns the logarithm of each row's sum of exponentials.
    ///
    /// # Safety
    ///
    /// The addresses must be those of tensors with these matrices, the result apart from the
    /// others.
    pub(super) unsafe fn forward(
        self,
        kernels: &Kernels,
        of: &Attention,
        [q, k, v]: [Place; 3],
        y: Place,
    ) -> Result<Tensor> {
        let lse = kernels.empty((of.batch * of.heads, of.queries), DType::F32)?;
        let places = [Some(q), Some(k), Some(v), Some(y), None, None, None, None];
        let job = job(of, places, [lse.at, 0]);
        let blocks = of.batch * of.heads * of.queries.div_ceil(ROWS);
        // SAFETY: an `AttentionJob` of the forward pass; the caller vouches for the addresses.
        unsafe { kernels.launch(of.dtype, Kernel::attention, blocks, &job) }?;
        Ok(lse.tensor())
    }

    /// Computes the gradients.
    ///
    /// # Safety
    ///
    /// As [`forward`](Self::forward), with the gradients as results.
    pub(super) unsafe fn backward(
        self,
        kernels: &Kernels,
        of: &Attention,
        lse: &Tensor,
        [q, k, v]: [Place; 3],
        [y, dy]: [Place; 2],
        [dq, dk, dv]: [Place; 3],
    ) -> Result<()> {
        let along = kernels.empty(lse.shape(), DType::F32)?;
        let places = [q, k, v, y, dy, dq, dk, dv].map(Some);
        let job = job(of, places, [kernels.address(lse)?, along.at]);
        let steps =
            [(Kernel::attention_backward, of.queries), (Kernel::attention_backward_keys, of.keys)];
        for (kernel, rows) in steps {
            let blocks = of.batch * of.heads * rows.div_ceil(ROWS);
            // SAFETY: an `AttentionJob` of the backward pass, in this order; as above.
            unsafe { kernels.launch(of.dtype, kernel, blocks, &job) }?;
        }
        Ok(())
    }
}

/// The words of an `AttentionJob`: `q`, `k`, `v`, `y` and their gradients, the logarithms and
/// `along`.
fn job(of: &Attention, places: [Option<Place>; 8], rows: [u64; 2]) -> Vec<u64> {
    let [depth, value_depth] = of.depths;
    let depths = [depth, depth, value_depth, value_depth, value_depth, depth, depth, value_depth];
    let mut words = Vec::with_capacity(29);
    for (place, depth) in places.into_iter().zip(depths) {
        let Place { at, head, step, line } =
            place.unwrap_or(Place { at: 0, head: 0, step: 0, line: 0 });
        words.extend([at, pair(head, step), pair(line, depth)]);
    }
    words.extend(rows);
    words.extend([pair(of.heads, of.batch), pair(of.queries, of.keys)]);
    words.push(pair(of.seen, of.scale.to_bits() as usize));
    words
}
