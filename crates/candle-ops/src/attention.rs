//! Scaled dot-product attention over several heads, forward and backward in one operator each.
//!
//! The heads lie side by side in the last dimension, as a fully connected layer leaves them, so no
//! tensor is transposed: a head's few rows are copied together, multiplied, and copied back.
//! Backward computes the shares again rather than keep them, which are `t / d` times the input.

use candle_core::{Result, Shape, Tensor, bail};

use super::gemm::{Mat, gemm};
use super::operator::{Input, Operator, apply1};
use super::real::Real;
use super::softmax::{softmax_row, softmax_row_backward};
use super::{cast, composed};

/// What [`self_attention`] takes beside its tensor.
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
    if composed::takes(&qkv) {
        return composed::self_attention(&qkv, options);
    }
    apply1(Attention(options), [qkv])
}

struct Attention(AttentionOptions);

/// Width of one head.
pub(super) fn depth(shape: &Shape, options: AttentionOptions) -> Result<usize> {
    let (_, positions, packed) = shape.dims3()?;
    let width = packed / 3;
    let fits = packed % 3 == 0 && options.heads > 0 && width.is_multiple_of(options.heads);
    if !fits || width * positions == 0 {
        bail!("attention: an input of shape {shape:?} is not 3 times {} heads", options.heads);
    }
    Ok(width / options.heads)
}

/// The extents of one call, and room for one head.
struct Heads<T> {
    options: AttentionOptions,
    positions: usize,
    width: usize,
    /// Width of one head.
    depth: usize,
    q: Vec<T>,
    k: Vec<T>,
    v: Vec<T>,
    shares: Vec<T>,
}

impl<T: Real> Heads<T> {
    fn new(shape: &Shape, options: AttentionOptions) -> Result<Self> {
        let depth = depth(shape, options)?;
        let (_, positions, packed) = shape.dims3()?;
        let width = packed / 3;
        let room = || vec![T::ZERO; positions * depth];
        let shares = vec![T::ZERO; positions * positions];
        Ok(Self { options, positions, width, depth, q: room(), k: room(), v: room(), shares })
    }

    /// Copies one head's queries (scaled), keys and values together and computes the shares.
    fn load(&mut self, sample: &[T], head: usize) {
        let scale = scale(self.depth);
        let parts = [(&mut self.q, scale), (&mut self.k, T::ONE), (&mut self.v, T::ONE)];
        for (part, (to, scale)) in parts.into_iter().enumerate() {
            let at = part * self.width + head * self.depth;
            let rows = sample.chunks_exact(3 * self.width);
            for (to, row) in to.chunks_exact_mut(self.depth).zip(rows) {
                to.iter_mut().zip(&row[at..]).for_each(|(to, from)| *to = *from * scale);
            }
        }
        let (positions, depth) = (self.positions, self.depth);
        let keys = Mat::new(&self.k, positions, depth).t();
        gemm(&mut self.shares, false, Mat::new(&self.q, positions, depth), keys);
        for (at, row) in self.shares.chunks_exact_mut(positions).enumerate() {
            let seen = if self.options.causal { at + 1 } else { positions };
            let (seen, unseen) = row.split_at_mut(seen);
            softmax_row(seen);
            unseen.fill(T::ZERO);
        }
    }
}

/// What scores are multiplied by.
fn scale<T: Real>(depth: usize) -> T {
    T::of(depth as f64).sqrt().recip()
}

impl Operator<1> for Attention {
    const NAME: &'static str = "self_attention";

    fn forward<T: Real>(&self, [qkv]: [Input<'_>; 1]) -> Result<(Vec<T>, Shape)> {
        let mut heads = Heads::new(qkv.shape(), self.0)?;
        let (samples, ..) = qkv.shape().dims3()?;
        let qkv = qkv.values::<T>()?;
        let (positions, width, depth) = (heads.positions, heads.width, heads.depth);
        let mut y = vec![T::ZERO; qkv.len() / 3];
        let mut own = vec![T::ZERO; positions * depth];
        let inputs = qkv.chunks_exact(positions * 3 * width);
        for (sample, y) in inputs.zip(y.chunks_exact_mut(positions * width)) {
            for head in 0..self.0.heads {
                heads.load(sample, head);
                let shares = Mat::new(&heads.shares, positions, positions);
                gemm(&mut own, false, shares, Mat::new(&heads.v, positions, depth));
                scatter(&own, y, depth, width, head * depth, T::ONE);
            }
        }
        Ok((y, (samples, positions, width).into()))
    }

    fn backward<T: Real>(
        &self,
        [qkv]: [Input<'_>; 1],
        _y: Input<'_>,
        dy: Input<'_>,
    ) -> Result<[Option<Vec<T>>; 1]> {
        let mut heads = Heads::new(qkv.shape(), self.0)?;
        let (values, dy) = (qkv.values::<T>()?, dy.values::<T>()?);
        let (positions, width, depth) = (heads.positions, heads.width, heads.depth);
        let mut dx = vec![T::ZERO; values.len()];
        let mut own = vec![T::ZERO; positions * depth];
        let mut part = own.clone();
        let mut dshares = vec![T::ZERO; positions * positions];
        let scale = scale(depth);
        let samples = values.chunks_exact(positions * 3 * width);
        let gradients = dx.chunks_exact_mut(positions * 3 * width);
        for ((sample, dy), dx) in samples.zip(dy.chunks_exact(positions * width)).zip(gradients) {
            for head in 0..self.0.heads {
                heads.load(sample, head);
                for (own, row) in own.chunks_exact_mut(depth).zip(dy.chunks_exact(width)) {
                    own.copy_from_slice(&row[head * depth..][..depth]);
                }
                let square = |values| Mat::new(values, positions, positions);
                let thin = |values| Mat::new(values, positions, depth);
                let mut give = |values: &[T], part: usize, scale: T| {
                    scatter(values, dx, depth, 3 * width, part * width + head * depth, scale);
                };
                gemm(&mut part, false, square(&heads.shares).t(), thin(&own));
                give(&part, 2, T::ONE);
                gemm(&mut dshares, false, thin(&own), thin(&heads.v).t());
                let shares = heads.shares.chunks_exact(positions);
                for (dshares, shares) in dshares.chunks_exact_mut(positions).zip(shares) {
                    softmax_row_backward(shares, dshares);
                }
                // The queries held here are scaled already, and so is what the keys get.
                gemm(&mut part, false, square(&dshares).t(), thin(&heads.q));
                give(&part, 1, T::ONE);
                gemm(&mut part, false, square(&dshares), thin(&heads.k));
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
