//! Attention on the CPU: one head and a block of its queries at a time.
//!
//! The rows of a head are gathered, multiplied and copied back. Attention weights exist for one
//! block at a time; the backward pass recomputes them. With a causal mask, a block is multiplied
//! only with the keys visible to its last query.

use super::Problem;
use crate::activation::softmax::{Rows, RowsBackward};
use crate::cpu::gemm::{Mat, gemm};
use crate::cpu::real::Real;
use crate::cpu::simd;
use crate::sizes::AttentionSizes;

/// Maximum number of queries in a block.
const QUERIES: usize = 128;

/// Memory layout of the heads of a tensor: offset of the first one, and strides, in elements.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Heads {
    start: usize,
    sample: usize,
    head: usize,
    row: usize,
    depth: usize,
}

impl Heads {
    /// The layout of `[samples, heads, rows, depth]`.
    pub(crate) fn separate(heads: usize, rows: usize, depth: usize) -> Self {
        Self { start: 0, sample: heads * rows * depth, head: rows * depth, row: depth, depth }
    }

    /// The layout of one part of `[samples, rows, parts, heads * depth]`.
    pub(crate) fn packed(
        rows: usize,
        width: usize,
        depth: usize,
        parts: usize,
        part: usize,
    ) -> Self {
        let row = parts * width;
        Self { start: part * width, sample: rows * row, head: depth, row, depth }
    }

    /// Offset of a row.
    fn at(&self, [sample, head, row]: [usize; 3]) -> usize {
        self.start + sample * self.sample + head * self.head + row * self.row
    }
}

/// A tensor and the layout of its heads.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Operand<'a, T>(pub(crate) &'a [T], pub(crate) Heads);

impl<T: Real> Operand<'_, T> {
    /// Gathers `rows` rows of a head, multiplied by `scale`.
    fn gather(&self, [sample, head, first]: [usize; 3], rows: usize, scale: T, to: &mut Vec<T>) {
        let Self(values, heads) = self;
        let to = resized(to, rows * heads.depth);
        for (row, to) in to.chunks_exact_mut(heads.depth).enumerate() {
            let from = &values[heads.at([sample, head, first + row])..][..heads.depth];
            to.iter_mut().zip(from).for_each(|(to, from)| *to = *from * scale);
        }
    }
}

/// Computed rows of a head, to be multiplied by `scale`.
pub(crate) struct Computed<'a, T> {
    values: &'a [T],
    /// Sample, head, and first row.
    at: [usize; 3],
    scale: T,
}

impl<T: Real> Computed<'_, T> {
    /// Copies the rows to their position in the result.
    pub(crate) fn copy_to(&self, heads: Heads, into: &mut [T]) {
        let [sample, head, first] = self.at;
        for (row, values) in self.values.chunks_exact(heads.depth).enumerate() {
            let into = &mut into[heads.at([sample, head, first + row])..][..heads.depth];
            into.iter_mut().zip(values).for_each(|(to, from)| *to = *from * self.scale);
        }
    }
}

/// A block of queries of one head.
#[derive(Clone, Copy, Debug)]
struct Block {
    /// Sample, head, and first query.
    at: [usize; 3],
    rows: usize,
    /// Number of keys that are visible to any of the queries.
    seen: usize,
}

impl Problem {
    /// Computes the result.
    pub(crate) fn forward<T: Real>(
        &self,
        inputs: [Operand<'_, T>; 3],
        mask: Option<&[T]>,
        heads: Heads,
        y: &mut [T],
    ) {
        let (mut work, mut own) = (Work::new(self, inputs, mask), Vec::new());
        for (sample, kv_head) in self.kv_heads() {
            work.load_keys(sample, kv_head);
            for block in self.blocks(sample, kv_head) {
                work.compute_weights(block);
                let own = resized(&mut own, block.rows * self.sizes.value_depth);
                let values = &work.v[..block.seen * self.sizes.value_depth];
                gemm(
                    own,
                    false,
                    work.shares(block),
                    Mat::new(values, block.seen, self.sizes.value_depth),
                );
                Computed { values: own, at: block.at, scale: T::ONE }.copy_to(heads, y);
            }
        }
    }

    /// Calls `give` with the index of an input and some rows of its gradient, until all rows are
    /// given.
    pub(crate) fn backward<T: Real>(
        &self,
        inputs: [Operand<'_, T>; 3],
        mask: Option<&[T]>,
        dy: Operand<'_, T>,
        mut give: impl FnMut(usize, Computed<'_, T>),
    ) {
        let (depth, width) = (self.sizes.depth, self.sizes.value_depth);
        let mut work = Work::new(self, inputs, mask);
        let (mut own, mut dweights, mut dq) = (Vec::new(), Vec::new(), Vec::new());
        let mut dk = vec![T::ZERO; self.sizes.keys * depth];
        let mut dv = vec![T::ZERO; self.sizes.keys * width];
        for (sample, kv_head) in self.kv_heads() {
            work.load_keys(sample, kv_head);
            dk.fill(T::ZERO);
            dv.fill(T::ZERO);
            for block in self.blocks(sample, kv_head) {
                let Block { at, rows, seen } = block;
                work.compute_weights(block);
                dy.gather(at, rows, T::ONE, &mut own);
                let own = Mat::new(&own, rows, width);
                gemm(&mut dv[..seen * width], true, work.shares(block).t(), own);
                let dweights = resized(&mut dweights, rows * seen);
                gemm(dweights, false, own, Mat::new(&work.v[..seen * width], seen, width).t());
                if self.dropout.is_some() {
                    dweights.iter_mut().zip(&work.factors).for_each(|(d, factor)| *d *= *factor);
                }
                simd::run(RowsBackward { y: &work.weights, dy: dweights, width: seen });
                let dweights = Mat::new(dweights, rows, seen);
                // The queries are already scaled, and so is the gradient of the keys.
                let queries = Mat::new(&work.q, rows, depth);
                gemm(&mut dk[..seen * depth], true, dweights.t(), queries);
                let dq = resized(&mut dq, rows * depth);
                gemm(dq, false, dweights, Mat::new(&work.k[..seen * depth], seen, depth));
                give(0, Computed { values: dq, at, scale: T::of(self.sizes.scale) });
            }
            let at = [sample, kv_head, 0];
            give(1, Computed { values: &dk, at, scale: T::ONE });
            give(2, Computed { values: &dv, at, scale: T::ONE });
        }
    }

    /// Samples and heads of the keys.
    fn kv_heads(&self) -> impl Iterator<Item = (usize, usize)> {
        let kv_heads = self.sizes.kv_heads;
        (0..self.sizes.samples)
            .flat_map(move |sample| (0..kv_heads).map(move |head| (sample, head)))
    }

    /// Blocks of queries with the same head of keys.
    fn blocks(&self, sample: usize, kv_head: usize) -> impl Iterator<Item = Block> {
        let AttentionSizes { queries, keys, causal, heads, kv_heads, .. } = self.sizes;
        let group = heads / kv_heads;
        (kv_head * group..(kv_head + 1) * group).flat_map(move |head| {
            (0..queries).step_by(QUERIES).map(move |first| {
                let rows = QUERIES.min(queries - first);
                let seen = if causal { keys.min(first + rows) } else { keys };
                Block { at: [sample, head, first], rows, seen }
            })
        })
    }
}

/// Buffers for one head and one block.
struct Work<'a, T> {
    of: &'a Problem,
    inputs: [Operand<'a, T>; 3],
    mask: Option<&'a [T]>,
    /// The scaled queries.
    q: Vec<T>,
    k: Vec<T>,
    v: Vec<T>,
    /// Attention weights, `[rows, seen]`.
    weights: Vec<T>,
    /// Dropout factors.
    factors: Vec<T>,
    /// Attention weights times factors.
    dropped: Vec<T>,
}

impl<'a, T: Real> Work<'a, T> {
    fn new(of: &'a Problem, inputs: [Operand<'a, T>; 3], mask: Option<&'a [T]>) -> Self {
        let [q, k, v, weights, factors, dropped] = [const { Vec::new() }; 6];
        Self { of, inputs, mask, q, k, v, weights, factors, dropped }
    }

    fn load_keys(&mut self, sample: usize, kv_head: usize) {
        let (at, keys) = ([sample, kv_head, 0], self.of.sizes.keys);
        self.inputs[1].gather(at, keys, T::ONE, &mut self.k);
        self.inputs[2].gather(at, keys, T::ONE, &mut self.v);
    }

    /// Loads the queries of a block and computes their attention weights.
    fn compute_weights(&mut self, block: Block) {
        let Block { at, rows, seen } = block;
        let depth = self.of.sizes.depth;
        self.inputs[0].gather(at, rows, T::of(self.of.sizes.scale), &mut self.q);
        let weights = resized(&mut self.weights, rows * seen);
        let keys = Mat::new(&self.k[..seen * depth], seen, depth);
        gemm(weights, false, Mat::new(&self.q, rows, depth), keys.t());
        self.add_mask(block);
        let (causal, is_masked) = (self.of.sizes.causal.then_some(at[2]), self.mask.is_some());
        simd::run(Rows { rows: &mut self.weights, width: seen, causal, is_masked });
        self.drop_some(block);
    }

    fn add_mask(&mut self, Block { at: [sample, head, first], seen, .. }: Block) {
        let (Some(values), Some(mask)) = (self.mask, &self.of.mask) else { return };
        let dims = mask.dims();
        // Stride of a dimension: 0 if it is broadcast.
        let step = |dim: usize| {
            if dims[dim] == 1 { 0 } else { dims[dim + 1..].iter().product::<usize>() }
        };
        let start = sample * step(0) + head * step(1);
        for (row, scores) in self.weights.chunks_exact_mut(seen).enumerate() {
            let own = &values[start + (first + row) * step(2)..];
            if step(3) == 0 {
                scores.iter_mut().for_each(|score| *score += own[0]);
            } else {
                scores.iter_mut().zip(own).for_each(|(score, own)| *score += *own);
            }
        }
    }

    fn drop_some(&mut self, Block { at: [sample, head, first], rows, seen }: Block) {
        let Some(dropout) = &self.of.dropout else { return };
        let AttentionSizes { heads, queries, keys, .. } = self.of.sizes;
        let factors = resized(&mut self.factors, rows * seen);
        let start = (sample * heads + head) * queries + first;
        for (row, factors) in factors.chunks_exact_mut(seen).enumerate() {
            dropout.write((start + row) * keys, factors);
        }
        let weights = self.weights.iter().zip(&self.factors);
        self.dropped.clear();
        self.dropped.extend(weights.map(|(weight, factor)| *weight * *factor));
    }

    /// The attention weights that the values are multiplied by.
    fn shares(&self, Block { rows, seen, .. }: Block) -> Mat<'_, T> {
        let values = if self.of.dropout.is_some() { &self.dropped } else { &self.weights };
        Mat::new(values, rows, seen)
    }
}

/// Resizes the buffer to this number of elements, with unspecified values.
fn resized<T: Real>(buffer: &mut Vec<T>, len: usize) -> &mut [T] {
    buffer.resize(len, T::ZERO);
    buffer
}
