//! Dropout, and the bits of hidden and dropped weights of attention (`dropout.cu`).

use std::sync::Arc;

use candle_core::{DType, Result, Tensor};

use super::jobs::{Draws, DropoutJob, DroppedJob, HiddenJob, u32_of};
use super::node::node;
use super::{Kernel, Kernels, Output, THREADS};
use crate::graph::custom_op::apply1;
use crate::sizes::Words;

/// Numbers of bits: each has 16 of a row.
pub(super) const BITS: usize = 16;

pub(super) fn dropout(kernels: &Arc<Kernels>, x: &Tensor, words: Words) -> Result<Tensor> {
    let y = kernels.dropped(x, &words)?;
    let kernels = kernels.clone();
    let backward = move |_: [&Tensor; 1], _: &Tensor, dy: &Tensor| {
        Ok([Some(kernels.dropped(dy, &words)?.tensor())])
    };
    apply1(node("dropout", y, backward), [x])
}

/// Numbers of bits of a row of this many keys: whole words of 8 bytes.
pub(super) const fn line_of(keys: usize) -> usize {
    keys.div_ceil(64) * 4
}

impl Kernels {
    /// Dropout of a contiguous tensor.
    fn dropped(&self, x: &Tensor, words: &Words) -> Result<Output> {
        let y = self.empty(x.shape(), x.dtype())?;
        let count = x.elem_count();
        let job = DropoutJob {
            x: self.address(x)?,
            y: y.at,
            count: count as u64,
            draws: self.draws(words)?,
        };
        // SAFETY: a `DropoutJob` of two tensors of `count` elements of this type.
        unsafe { self.launch(x.dtype(), Kernel::dropout, blocks_of_bits(count), &job) }?;
        Ok(y)
    }

    fn draws(&self, of: &Words) -> Result<Draws> {
        let Words { key: [key0, key1, key2, key3], position, end, keep, .. } = *of;
        let base = of.base.as_ref().map_or(Ok(0), |base| self.address(base))?;
        Ok(Draws { key0, key1, key2, key3, base, position, end, keep })
    }

    /// Bits of the weights that are dropped, of `rows` rows of `keys`, one after another; of a
    /// causal mask over `seen` rows only those that are seen.
    pub(super) fn dropped_bits(
        &self,
        words: &Words,
        (rows, keys, seen): (usize, usize, usize),
    ) -> Result<Tensor> {
        let line = line_of(keys);
        let bits = self.empty((rows, 2 * line), DType::U8)?;
        let job = DroppedJob {
            draws: self.draws(words)?,
            bits: bits.at,
            rows: rows as u64,
            keys: u32_of(keys),
            line: u32_of(line),
            seen: u32_of(seen),
            unused: 0,
        };
        let blocks = blocks_of_bits(rows * line * BITS);
        // SAFETY: a `DroppedJob` of `rows * line` numbers of 16 bits; the type does not matter.
        unsafe { self.launch(DType::F16, Kernel::attention_dropped, blocks, &job) }?;
        Ok(bits.tensor())
    }

    /// Bits of the keys that a mask of `u8` hides, of the last dimension.
    pub(super) fn hidden_bits(&self, mask: &Tensor) -> Result<Tensor> {
        let keys = mask.dims().last().copied().unwrap_or(1);
        let (rows, line) = (mask.elem_count() / keys, line_of(keys));
        let mask = mask.contiguous()?;
        let bits = self.empty((rows, 2 * line), DType::U8)?;
        let job = HiddenJob {
            mask: self.address(&mask)?,
            bits: bits.at,
            rows: rows as u64,
            keys: u32_of(keys),
            line: u32_of(line),
        };
        let blocks = blocks_of_bits(rows * line * BITS);
        // SAFETY: a `HiddenJob` of `rows * keys` bytes and `rows * line` numbers of 16 bits; the
        // type does not matter.
        unsafe { self.launch(DType::F16, Kernel::attention_hidden, blocks, &job) }?;
        Ok(bits.tensor())
    }
}

/// Number of blocks for this many elements, of which a thread has 16 at a time.
fn blocks_of_bits(elements: usize) -> usize {
    elements.div_ceil(BITS * THREADS).min(1 << 12)
}
