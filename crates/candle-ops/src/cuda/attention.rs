//! Attention on packed heads, without copies: for half-precision tensors by fused kernels that keep
//! no scores in memory (`fused_attention.rs`), if supported; otherwise as a product, softmax and a
//! product, for some heads and samples at a time, with scores that fit the GPU's cache.
//!
//! Unless all weights are computed at once, the backward pass recomputes them: they are in memory
//! for one block at a time.

use std::ops::Range;
use std::sync::Arc;

use candle_core::{DType, Result, Tensor, bail};

use super::dropout::line_of;
use super::fused_attention::Fused;
use super::matmul::{Matrices, ONE};
use super::node::node;
use super::rows::Softmax;
use super::{Kernel, Kernels, Output, one_type};
use crate::graph::custom_op::{apply1, apply3};
use crate::sizes::{AttentionSizes, PackedSizes, Words};

/// Bytes of scores at a time. The backward pass has gradients of the same size. An A100's cache has
/// 40 MiB, an H100's 50.
const BUDGET: usize = 12 << 20;

/// Attention of queries, keys and values in one tensor; with this many bytes of scores at a time,
/// or by the fused kernels if supported.
pub(super) fn packed(
    kernels: &Arc<Kernels>,
    qkv: &Tensor,
    sizes: PackedSizes,
    budget: Option<usize>,
) -> Result<Tensor> {
    let qkv = &qkv.contiguous()?;
    let PackedSizes { samples, positions, heads, depth, causal } = sizes;
    let of = Attention {
        dtype: qkv.dtype(),
        heads,
        batch: samples,
        queries: positions,
        keys: positions,
        depths: [depth; 2],
        scale: (depth as f32).sqrt().recip(),
        seen: if causal { positions } else { 0 },
        bits: None,
        budget: budget.unwrap_or(BUDGET),
    };
    let width = sizes.width();
    // The number of parts in a tensor.
    let part = move |at: u64, part: usize, parts: usize| Place {
        at: at + (part * width * of.dtype.size_in_bytes()) as u64,
        head: depth,
        step: positions * parts * width,
        line: parts * width,
    };
    let y = kernels.empty(sizes.output_shape(), of.dtype)?;
    let parts = move |at| [0, 1, 2].map(|i| part(at, i, 3));
    let inputs = parts(kernels.address(qkv)?);
    let fused = Fused::of(kernels, &of, inputs).filter(|_| budget.is_none());
    // SAFETY: parts of the input, and the result.
    let kept = unsafe { of.forward(kernels, fused, inputs, part(y.at, 0, 1)) }?;
    let kernels = kernels.clone();
    let backward = move |[qkv]: [&Tensor; 1], y: &Tensor, dy: &Tensor| {
        let dx = kernels.empty(qkv.shape(), of.dtype)?;
        let dy = &aligned(&kernels, dy)?;
        let results = [part(kernels.address(y)?, 0, 1), part(kernels.address(dy)?, 0, 1)];
        let (inputs, gradients) = (parts(kernels.address(qkv)?), parts(dx.at));
        // SAFETY: as above, with gradients in their places.
        unsafe { of.backward(&kernels, fused, kept.as_ref(), inputs, results, gradients) }?;
        Ok([Some(dx.tensor())])
    };
    apply1(node("self_attention", y, backward), [qkv])
}

/// Attention of `[b, heads, queries, d]`, and keys and values of the corresponding shapes; `budget`
/// as for [`packed`]. Heads with the same keys are the rows of one product. With hidden keys or
/// dropped weights, `None` unless the fused kernels support it.
pub(super) fn separate(
    kernels: &Arc<Kernels>,
    [q, k, v]: [&Tensor; 3],
    sizes: &AttentionSizes,
    masked: Masked<'_>,
    budget: Option<usize>,
) -> Result<Option<Tensor>> {
    one_type("attention", q, [Some(k), Some(v)])?;
    let (q, k, v) = (&q.contiguous()?, &k.contiguous()?, &v.contiguous()?);
    let AttentionSizes { samples, heads, kv_heads, queries, keys, depth, value_depth, .. } = *sizes;
    let mut of = Attention {
        dtype: q.dtype(),
        heads: 1,
        batch: samples * kv_heads,
        queries: heads / kv_heads * queries,
        keys,
        depths: [depth, value_depth],
        scale: sizes.scale as f32,
        seen: if sizes.causal { queries } else { 0 },
        bits: None,
        budget: budget.unwrap_or(BUDGET),
    };
    let place = |at: u64, rows: usize, line: usize| Place { at, head: 0, step: rows * line, line };
    let inputs = move |at: [u64; 3]| {
        [
            place(at[0], of.queries, depth),
            place(at[1], keys, depth),
            place(at[2], keys, value_depth),
        ]
    };
    let y = kernels.empty((samples, heads, queries, value_depth), of.dtype)?;
    let at = [kernels.address(q)?, kernels.address(k)?, kernels.address(v)?];
    let fused = Fused::of(kernels, &of, inputs(at)).filter(|_| budget.is_none());
    let kept_bits = match masked {
        Masked { hidden: None, dropout: None } => None,
        _ if fused.is_none() => return Ok(None),
        masked => Some(masked.bits(kernels, &of, sizes)?),
    };
    of.bits = kept_bits.as_ref().map(|(bits, _)| *bits);
    let result = move |at: u64| place(at, of.queries, value_depth);
    // SAFETY: the inputs and the result.
    let kept = unsafe { of.forward(kernels, fused, inputs(at), result(y.at)) }?;
    let kernels = kernels.clone();
    let backward = move |[q, k, v]: [&Tensor; 3], y: &Tensor, dy: &Tensor| {
        // Their addresses are in `of`.
        let _kept = &kept_bits;
        let empty = |like: &Tensor| kernels.empty(like.shape(), of.dtype);
        let [dq, dk, dv] = [empty(q)?, empty(k)?, empty(v)?];
        let at = [kernels.address(q)?, kernels.address(k)?, kernels.address(v)?];
        let (inputs, gradients) = (inputs(at), inputs([dq.at, dk.at, dv.at]));
        let dy = &aligned(&kernels, dy)?;
        let results = [result(kernels.address(y)?), result(kernels.address(dy)?)];
        // SAFETY: as above, with gradients in their places.
        unsafe { of.backward(&kernels, fused, kept.as_ref(), inputs, results, gradients) }?;
        Ok([dq, dk, dv].map(|gradient| Some(gradient.tensor())))
    };
    apply3(node("scaled_dot_product_attention", y, backward), [q, k, v]).map(Some)
}

/// Keys and weights that attention leaves out.
#[derive(Clone, Debug, Default)]
pub(super) struct Masked<'a> {
    /// 0 where a query does not attend to a key: `u8` of four dimensions.
    pub(super) hidden: Option<&'a Tensor>,
    pub(super) dropout: Option<Words>,
}

/// The bits of hidden keys and dropped weights, as the kernels find them; see `attention.cu`.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Bits {
    pub(super) hidden: u64,
    pub(super) dropped: u64,
    /// Strides by sample, head and query.
    pub(super) strides: [usize; 3],
    pub(super) line: usize,
    /// Heads with the same keys.
    pub(super) group: usize,
    /// Groups in a sample.
    pub(super) pairs: usize,
    pub(super) keep: f32,
}

impl Masked<'_> {
    /// The bits, and the tensors that have them.
    fn bits(
        self,
        kernels: &Kernels,
        of: &Attention,
        sizes: &AttentionSizes,
    ) -> Result<(Bits, Vec<Tensor>)> {
        let AttentionSizes { heads, kv_heads, keys, .. } = *sizes;
        let (group, line) = (heads / kv_heads, line_of(keys));
        let mut bits = Bits { line, group, pairs: kv_heads, keep: 1.0, ..Bits::default() };
        let mut kept = Vec::new();
        if let Some(mask) = self.hidden {
            let [samples, of_heads, queries, _] = *mask.dims() else { bail!("{mask:?}") };
            let hidden = mask.broadcast_as((samples, of_heads, queries, keys))?;
            let hidden = kernels.hidden_bits(&hidden)?;
            let stride = |extent: usize, inner: usize| if extent > 1 { inner * line } else { 0 };
            let by_sample = stride(samples, of_heads * queries);
            bits.strides = [by_sample, stride(of_heads, queries), stride(queries, 1)];
            bits.hidden = kernels.address(&hidden)?;
            kept.push(hidden);
        }
        if let Some(words) = self.dropout {
            let rows = of.batch * of.queries;
            let dropped = kernels.dropped_bits(&words, (rows, keys, of.seen))?;
            (bits.dropped, bits.keep) = (kernels.address(&dropped)?, words.keep);
            kept.push(dropped);
        }
        Ok((bits, kept))
    }
}

/// A gradient at an address aligned for vectors.
fn aligned(kernels: &Kernels, dy: &Tensor) -> Result<Tensor> {
    if kernels.address(dy)? % 16 == 0 { Ok(dy.clone()) } else { dy.force_contiguous() }
}

/// Location of an operand's matrices: a batch of them for each head.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub(super) at: u64,
    /// Stride between heads, in elements.
    pub(super) head: usize,
    /// Stride between matrices of the batch, in elements.
    pub(super) step: usize,
    /// Stride between rows, in elements.
    pub(super) line: usize,
}

/// The sizes of one call.
#[derive(Clone, Copy, Debug)]
pub(super) struct Attention {
    pub(super) dtype: DType,
    pub(super) heads: usize,
    pub(super) batch: usize,
    pub(super) queries: usize,
    pub(super) keys: usize,
    /// Widths of keys and of values.
    pub(super) depths: [usize; 2],
    pub(super) scale: f32,
    /// If not 0: query `i` attends only to the first `i % seen + 1` keys.
    pub(super) seen: usize,
    /// Only for the fused kernels.
    pub(super) bits: Option<Bits>,
    budget: usize,
}

/// The part of the heads and samples that is computed at a time.
struct Block {
    heads: Range<usize>,
    batch: Range<usize>,
}

impl Attention {
    /// The blocks of all heads and samples. The scores of a block fit the budget, unless a single
    /// matrix does not.
    fn blocks(&self) -> Vec<Block> {
        let matrix = self.queries * self.keys * self.dtype.size_in_bytes();
        let fit = (self.budget / matrix.max(1)).max(1);
        let heads = (fit / self.batch.max(1)).clamp(1, self.heads);
        // Blocks have the same size, except for the last.
        let batch = self.batch.div_ceil(self.batch.div_ceil(fit).max(1)).max(1);
        let parts = |all: usize, size: usize| {
            (0..all).step_by(size).map(move |first| first..all.min(first + size))
        };
        let of_heads = parts(self.heads, heads);
        of_heads
            .flat_map(|heads| {
                parts(self.batch, batch).map(move |batch| Block { heads: heads.clone(), batch })
            })
            .collect()
    }

    /// Memory for the weights of a block.
    fn memory(&self, kernels: &Kernels, blocks: &[Block]) -> Result<Output> {
        let matrices = blocks.iter().map(|block| block.heads.len() * block.batch.len()).max();
        kernels.empty((matrices.unwrap_or(0), self.queries, self.keys), self.dtype)
    }

    /// The part of a head of an operand that belongs to a block.
    fn part(&self, place: Place, head: usize, block: &Block) -> Matrices {
        let first = head * place.head + block.batch.start * place.step;
        let at = place.at + (first * self.dtype.size_in_bytes()) as u64;
        Matrices { line: Some(place.line), ..Matrices::new(at, self.dtype, place.step) }
    }

    /// The weights of the `index`-th head of a block.
    fn weights_of(&self, at: u64, index: usize, block: &Block) -> Matrices {
        let square = self.queries * self.keys;
        let first = index * block.batch.len() * square * self.dtype.size_in_bytes();
        Matrices::new(at + first as u64, self.dtype, square)
    }

    /// Softmax over the scores of a block.
    fn softmax(&self, block: &Block) -> (Softmax, usize) {
        let matrices = block.heads.len() * block.batch.len();
        (Softmax { width: self.keys, seen: self.seen }, matrices * self.queries * self.keys)
    }

    /// Computes the weights of a block.
    ///
    /// # Safety
    ///
    /// The addresses must be those of tensors with these matrices, and of memory for a block's
    /// weights.
    unsafe fn compute_weights(
        &self,
        kernels: &Kernels,
        block: &Block,
        [q, k]: [Place; 2],
        to: u64,
    ) -> Result<()> {
        let extents = [self.queries, self.depths[0], self.keys];
        for (i, head) in block.heads.clone().enumerate() {
            let (q, k) = (self.part(q, head, block), self.part(k, head, block).t());
            let factors = [q, k, self.weights_of(to, i, block)];
            // SAFETY: the caller vouches for the addresses.
            unsafe { kernels.multiply(block.batch.len(), extents, factors, [self.scale, 0.0]) }?;
        }
        let (softmax, count) = self.softmax(block);
        // SAFETY: the block's scores, a row of which is read before it is written.
        unsafe { softmax.launch(kernels, Kernel::softmax, self.dtype, count, [to, to, 0]) }
    }

    /// Computes the result. Returns the state for the backward pass: that of the fused kernels, or
    /// the weights if all are computed at once.
    ///
    /// # Safety
    ///
    /// The addresses must be those of tensors with these matrices, the result apart from the
    /// others.
    unsafe fn forward(
        &self,
        kernels: &Kernels,
        fused: Option<Fused>,
        [q, k, v]: [Place; 3],
        y: Place,
    ) -> Result<Option<Tensor>> {
        if let Some(fused) = fused {
            // SAFETY: the caller vouches for the addresses.
            return unsafe { fused.forward(kernels, self, [q, k, v], y) }.map(Some);
        }
        let blocks = self.blocks();
        let weights = self.memory(kernels, &blocks)?;
        let extents = [self.queries, self.keys, self.depths[1]];
        for block in &blocks {
            // SAFETY: the caller vouches for the addresses; there is memory for the largest block.
            unsafe { self.compute_weights(kernels, block, [q, k], weights.at) }?;
            for (i, head) in block.heads.clone().enumerate() {
                let (v, y) = (self.part(v, head, block), self.part(y, head, block));
                let factors = [self.weights_of(weights.at, i, block), v, y];
                // SAFETY: as above.
                unsafe { kernels.multiply(block.batch.len(), extents, factors, ONE) }?;
            }
        }
        Ok((blocks.len() == 1).then(|| weights.tensor()))
    }

    /// Computes the gradients, with the state returned by the forward pass.
    ///
    /// # Safety
    ///
    /// As [`forward`](Self::forward), with the gradients as results.
    unsafe fn backward(
        &self,
        kernels: &Kernels,
        fused: Option<Fused>,
        kept: Option<&Tensor>,
        [q, k, v]: [Place; 3],
        [y, dy]: [Place; 2],
        [dq, dk, dv]: [Place; 3],
    ) -> Result<()> {
        if let (Some(fused), Some(lse)) = (fused, kept) {
            // SAFETY: the caller vouches for the addresses.
            return unsafe { fused.backward(kernels, self, lse, [q, k, v], [y, dy], [dq, dk, dv]) };
        }
        let blocks = self.blocks();
        let dweights = self.memory(kernels, &blocks)?;
        let again = kept.is_none().then(|| self.memory(kernels, &blocks)).transpose()?;
        let weights = match (kept, &again) {
            (Some(kept), _) => kernels.address(kept)?,
            (None, again) => again.as_ref().map_or(0, |again| again.at),
        };
        let Self { queries, keys, depths: [depth, value_depth], .. } = *self;
        for block in &blocks {
            if kept.is_none() {
                // SAFETY: the caller vouches for the addresses; there is memory for the largest
                // block.
                unsafe { self.compute_weights(kernels, block, [q, k], weights) }?;
            }
            let count = block.batch.len();
            for (i, head) in block.heads.clone().enumerate() {
                let [dy, v, dv] = [dy, v, dv].map(|place| self.part(place, head, block));
                let own = self.weights_of(weights, i, block).t();
                // SAFETY: as above.
                unsafe {
                    kernels.multiply(count, [keys, queries, value_depth], [own, dy, dv], ONE)
                }?;
                let factors = [dy, v.t(), self.weights_of(dweights.at, i, block)];
                // SAFETY: as above.
                unsafe { kernels.multiply(count, [queries, value_depth, keys], factors, ONE) }?;
            }
            let (softmax, elements) = self.softmax(block);
            let job = [dweights.at, weights, dweights.at];
            // SAFETY: as above; a row's sum is taken before it is written.
            unsafe {
                softmax.launch(kernels, Kernel::softmax_backward, self.dtype, elements, job)
            }?;
            let by = [self.scale, 0.0];
            for (i, head) in block.heads.clone().enumerate() {
                let [q, k, dq, dk] = [q, k, dq, dk].map(|place| self.part(place, head, block));
                let own = self.weights_of(dweights.at, i, block);
                // SAFETY: as above.
                unsafe { kernels.multiply(count, [queries, keys, depth], [own, k, dq], by) }?;
                // SAFETY: as above.
                unsafe { kernels.multiply(count, [keys, queries, depth], [own.t(), q, dk], by) }?;
            }
        }
        Ok(())
    }
}
