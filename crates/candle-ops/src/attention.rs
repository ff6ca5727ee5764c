//! Scaled dot-product attention over several heads, forward and backward in one operator each.
//!
//! The heads lie side by side in the last dimension, as a fully connected layer leaves them, so no tensor is
//! transposed: the rows of one head are gathered, multiplied and copied back. Backward computes the attention weights
//! again rather than keep them, which are `t / d` times the input.

use candle_core::{Result, Shape, Tensor, bail};

use super::gemm::{Mat, gemm};
use super::operator::{Input, Operator, apply1};
use super::real::Real;
use super::simd;
use super::softmax::{Rows, RowsBackward};
use super::{cast, composed};

/// Options of [`self_attention`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionOptions {
    /// Number of heads; divides the width.
    pub heads: usize,
    /// Whether a position sees only itself and those before it.
    pub causal: bool,
}

/// `softmax(q * k^T / sqrt(d)) * v` for each head.
///
/// Shapes: `qkv` is `[n, t, 3 * c]`, of which the first `c` are queries, then keys, then values,
/// `heads` times `d` each; the result is `[n, t, c]`. NaN and infinities reach every position that sees
/// them. Single-threaded.
///
/// # Errors
///
/// A shape or dtype that does not fit.
pub fn self_attention(qkv: &Tensor, options: AttentionOptions) -> Result<Tensor> {
    let [qkv] = cast("scaled_dot_product_attention", [qkv])?;
    let extents = Extents::new(qkv.shape(), options)?;
    if composed::is_for(&qkv) {
        return composed::self_attention(&qkv, extents);
    }
    apply1(Attention(extents), [qkv])
}

/// Extents of one call, checked against each other.
#[derive(Clone, Copy, Debug)]
pub(super) struct Extents {
    pub(super) samples: usize,
    pub(super) positions: usize,
    pub(super) heads: usize,
    /// Width of one head.
    pub(super) depth: usize,
    pub(super) causal: bool,
}

impl Extents {
    fn new(qkv: &Shape, AttentionOptions { heads, causal }: AttentionOptions) -> Result<Self> {
        let (samples, positions, packed) = qkv.dims3()?;
        let width = packed / 3;
        let fits = packed % 3 == 0 && heads > 0 && width.is_multiple_of(heads);
        if !fits || width * positions == 0 {
            bail!("attention: an input of shape {qkv:?} is not 3 times {heads} heads");
        }
        Ok(Self { samples, positions, heads, depth: width / heads, causal })
    }

    /// Width of the result.
    pub(super) fn width(&self) -> usize {
        self.heads * self.depth
    }

    /// Shape of the result.
    pub(super) fn output_shape(&self) -> Shape {
        (self.samples, self.positions, self.width()).into()
    }
}

struct Attention(Extents);

/// Buffers for one head.
struct Head<T> {
    extents: Extents,
    q: Vec<T>,
    k: Vec<T>,
    v: Vec<T>,
    /// Attention weights, `[position, position]`.
    weights: Vec<T>,
}

impl<T: Real> Head<T> {
    fn new(extents: Extents) -> Self {
        let buffer = || vec![T::ZERO; extents.positions * extents.depth];
        let weights = vec![T::ZERO; extents.positions * extents.positions];
        Self { extents, q: buffer(), k: buffer(), v: buffer(), weights }
    }

    /// Gathers one head's queries (scaled), keys and values, and computes the attention weights.
    fn load(&mut self, sample: &[T], head: usize) {
        let Extents { positions, depth, causal, .. } = self.extents;
        let width = self.extents.width();
        let scale = scale(depth);
        let parts = [(&mut self.q, scale), (&mut self.k, T::ONE), (&mut self.v, T::ONE)];
        for (part, (to, scale)) in parts.into_iter().enumerate() {
            let at = part * width + head * depth;
            let rows = sample.chunks_exact(3 * width);
            for (to, row) in to.chunks_exact_mut(depth).zip(rows) {
                to.iter_mut().zip(&row[at..]).for_each(|(to, from)| *to = *from * scale);
            }
        }
        let keys = Mat::new(&self.k, positions, depth).t();
        gemm(&mut self.weights, false, Mat::new(&self.q, positions, depth), keys);
        simd::run(Rows { rows: &mut self.weights, width: positions, causal });
    }
}

/// The factor of the scores.
fn scale<T: Real>(depth: usize) -> T {
    T::of(depth as f64).sqrt().recip()
}

impl Operator<1> for Attention {
    const NAME: &'static str = "self_attention";

    fn forward<T: Real>(&self, [qkv]: [Input<'_>; 1]) -> Result<(Vec<T>, Shape)> {
        let Extents { positions, depth, .. } = self.0;
        let (width, mut loaded) = (self.0.width(), Head::new(self.0));
        let qkv = qkv.values::<T>()?;
        let mut y = vec![T::ZERO; qkv.len() / 3];
        let mut own = vec![T::ZERO; positions * depth];
        let inputs = qkv.chunks_exact(positions * 3 * width);
        for (sample, y) in inputs.zip(y.chunks_exact_mut(positions * width)) {
            for head in 0..self.0.heads {
                loaded.load(sample, head);
                let weights = Mat::new(&loaded.weights, positions, positions);
                gemm(&mut own, false, weights, Mat::new(&loaded.v, positions, depth));
                scatter(&own, y, depth, width, head * depth, T::ONE);
            }
        }
        Ok((y, self.0.output_shape()))
    }

    fn backward<T: Real>(
        &self,
        [qkv]: [Input<'_>; 1],
        _y: Input<'_>,
        dy: Input<'_>,
    ) -> Result<[Option<Vec<T>>; 1]> {
        let Extents { positions, depth, .. } = self.0;
        let (width, mut loaded) = (self.0.width(), Head::new(self.0));
        let (values, dy) = (qkv.values::<T>()?, dy.values::<T>()?);
        let mut dx = vec![T::ZERO; values.len()];
        let mut own = vec![T::ZERO; positions * depth];
        let mut part = own.clone();
        let mut dweights = vec![T::ZERO; positions * positions];
        let scale = scale(depth);
        let samples = values.chunks_exact(positions * 3 * width);
        let gradients = dx.chunks_exact_mut(positions * 3 * width);
        for ((sample, dy), dx) in samples.zip(dy.chunks_exact(positions * width)).zip(gradients) {
            for head in 0..self.0.heads {
                loaded.load(sample, head);
                for (own, row) in own.chunks_exact_mut(depth).zip(dy.chunks_exact(width)) {
                    own.copy_from_slice(&row[head * depth..][..depth]);
                }
                let square = |values| Mat::new(values, positions, positions);
                let thin = |values| Mat::new(values, positions, depth);
                let mut give = |values: &[T], part: usize, scale: T| {
                    scatter(values, dx, depth, 3 * width, part * width + head * depth, scale);
                };
                gemm(&mut part, false, square(&loaded.weights).t(), thin(&own));
                give(&part, 2, T::ONE);
                gemm(&mut dweights, false, thin(&own), thin(&loaded.v).t());
                let (y, dy) = (&*loaded.weights, &mut *dweights);
                simd::run(RowsBackward { y, dy, width: positions });
                // The queries here are scaled already, and so is the keys' gradient.
                gemm(&mut part, false, square(&dweights).t(), thin(&loaded.q));
                give(&part, 1, T::ONE);
                gemm(&mut part, false, square(&dweights), thin(&loaded.k));
                give(&part, 0, scale);
            }
        }
        Ok([Some(dx)])
    }
}

/// Copies rows of `depth` elements, times `scale`, into rows of `width` elements, from `at` on.
fn scatter<T: Real>(rows: &[T], into: &mut [T], depth: usize, width: usize, at: usize, scale: T) {
    for (row, into) in rows.chunks_exact(depth).zip(into.chunks_exact_mut(width)) {
        into[at..at + depth].iter_mut().zip(row).for_each(|(to, from)| *to = *from * scale);
    }
}
