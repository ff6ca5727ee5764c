//! Attention by kernels that keep no scores in memory (`attention.cu`).

use candle_core::{DType, Result, Tensor};

use super::attention::{Attention, Place};
use super::jobs::{AttentionJob, Operand, u32_of};
use super::{Kernel, Kernels};

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
        let job = AttentionJob { lse: lse.at, ..job(of, [q, k, v, y]) };
        let blocks = of.batch * of.heads * of.queries.div_ceil(ROWS);
        let kernel = match of.bits {
            None => Kernel::attention,
            Some(_) => Kernel::attention_masked,
        };
        // SAFETY: an `AttentionJob` of the forward pass; the caller vouches for the addresses.
        unsafe { kernels.launch(of.dtype, kernel, blocks, &job) }?;
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
        let delta = kernels.empty(lse.shape(), DType::F32)?;
        let [depth, value_depth] = of.depths;
        let job = AttentionJob {
            dy: operand(dy, value_depth),
            dq: operand(dq, depth),
            dk: operand(dk, depth),
            dv: operand(dv, value_depth),
            lse: kernels.address(lse)?,
            delta: delta.at,
            ..job(of, [q, k, v, y])
        };
        let steps = match of.bits {
            None => [Kernel::attention_backward, Kernel::attention_backward_keys],
            Some(_) => [Kernel::attention_backward_masked, Kernel::attention_backward_keys_masked],
        };
        for (kernel, rows) in steps.into_iter().zip([of.queries, of.keys]) {
            let blocks = of.batch * of.heads * rows.div_ceil(ROWS);
            // SAFETY: an `AttentionJob` of the backward pass, in this order; as above.
            unsafe { kernels.launch(of.dtype, kernel, blocks, &job) }?;
        }
        Ok(())
    }
}

/// The job of a call, without gradients and statistics.
fn job(of: &Attention, [q, k, v, y]: [Place; 4]) -> AttentionJob {
    let [depth, value_depth] = of.depths;
    let bits = of.bits.unwrap_or_default();
    let [hidden_sample, hidden_head, hidden_query] = bits.strides.map(u32_of);
    AttentionJob {
        q: operand(q, depth),
        k: operand(k, depth),
        v: operand(v, value_depth),
        y: operand(y, value_depth),
        heads: u32_of(of.heads),
        samples: u32_of(of.batch),
        queries: u32_of(of.queries),
        keys: u32_of(of.keys),
        seen: u32_of(of.seen),
        scale: of.scale,
        hidden: bits.hidden,
        dropped: bits.dropped,
        hidden_sample,
        hidden_head,
        hidden_query,
        line: u32_of(bits.line),
        group: u32_of(bits.group),
        pairs: u32_of(bits.pairs),
        keep: bits.keep,
        ..Default::default()
    }
}

fn operand(Place { at, head, step, line }: Place, depth: usize) -> Operand {
    let [head, step, line, depth] = [head, step, line, depth].map(u32_of);
    Operand { at, head, step, line, depth }
}
