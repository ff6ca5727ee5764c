//! Scaled dot-product attention over several heads, forward and backward in one operator each.
//!
//! The heads lie side by side in the last dimension, as a fully connected layer leaves them, so no
//! tensor is transposed: a head's few rows are copied together, multiplied, and copied back.
//! Backward computes the shares again rather than keep them, which are `t / d` times the input.

use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor, bail};

use super::gemm::{Mat, gemm};
use super::softmax::{softmax_row, softmax_row_backward};
use super::{cast, host};

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
/// `heads` times `d` each; the result is `[n, t, c]`. `f32`, `f16` or `bf16`: computed in `f32`,
/// rounded once. NaN and infinities reach every position that sees them. Single-threaded.
///
/// # Errors
///
/// A shape or dtype that does not fit.
pub fn self_attention(qkv: &Tensor, options: AttentionOptions) -> Result<Tensor> {
    let [qkv] = cast("scaled_dot_product_attention", [qkv])?;
    qkv.contiguous()?.apply_op1(Attention(options))
}

struct Attention(AttentionOptions);

/// The extents of one call, and room for one head.
struct Heads {
    options: AttentionOptions,
    positions: usize,
    width: usize,
    /// Width of one head.
    depth: usize,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    shares: Vec<f32>,
}

impl Heads {
    fn new(shape: &Shape, options: AttentionOptions) -> Result<Self> {
        let (_, positions, packed) = shape.dims3()?;
        let width = packed / 3;
        let fits = packed % 3 == 0 && options.heads > 0 && width.is_multiple_of(options.heads);
        if !fits || width * positions == 0 {
            bail!("attention: an input of shape {shape:?} is not 3 times {} heads", options.heads);
        }
        let depth = width / options.heads;
        let room = || vec![0.0; positions * depth];
        let shares = vec![0.0; positions * positions];
        Ok(Self { options, positions, width, depth, q: room(), k: room(), v: room(), shares })
    }

    /// Copies one head's queries (scaled), keys and values together and computes the shares.
    fn load(&mut self, sample: &[f32], head: usize) {
        let scale = (self.depth as f32).sqrt().recip();
        let parts = [(&mut self.q, scale), (&mut self.k, 1.0), (&mut self.v, 1.0)];
        for (part, (to, scale)) in parts.into_iter().enumerate() {
            let at = part * self.width + head * self.depth;
            let rows = sample.chunks_exact(3 * self.width);
            for (to, row) in to.chunks_exact_mut(self.depth).zip(rows) {
                to.iter_mut().zip(&row[at..]).for_each(|(to, from)| *to = from * scale);
            }
        }
        let (positions, depth) = (self.positions, self.depth);
        let keys = Mat::new(&self.k, positions, depth).t();
        gemm(&mut self.shares, false, Mat::new(&self.q, positions, depth), keys);
        for (at, row) in self.shares.chunks_exact_mut(positions).enumerate() {
            let seen = if self.options.causal { at + 1 } else { positions };
            let (seen, unseen) = row.split_at_mut(seen);
            softmax_row(seen);
            unseen.fill(0.0);
        }
    }
}

impl CustomOp1 for Attention {
    fn name(&self) -> &'static str {
        "self_attention"
    }

    fn cpu_fwd(&self, qkv: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let mut heads = Heads::new(layout.shape(), self.0)?;
        let dtype = host::float_dtype(qkv)?;
        let qkv = host::floats(qkv, layout)?;
        let (positions, width, depth) = (heads.positions, heads.width, heads.depth);
        let mut y = vec![0.0; qkv.len() / 3];
        let mut own = vec![0.0; positions * depth];
        let samples = qkv.chunks_exact(positions * 3 * width);
        for (sample, y) in samples.zip(y.chunks_exact_mut(positions * width)) {
            for head in 0..self.0.heads {
                heads.load(sample, head);
                let shares = Mat::new(&heads.shares, positions, positions);
                gemm(&mut own, false, shares, Mat::new(&heads.v, positions, depth));
                scatter(&own, y, depth, width, head * depth, 1.0);
            }
        }
        let (samples, ..) = layout.shape().dims3()?;
        Ok((host::rounded(y, dtype)?, (samples, positions, width).into()))
    }

    fn bwd(&self, qkv: &Tensor, _y: &Tensor, dy: &Tensor) -> Result<Option<Tensor>> {
        let mut heads = Heads::new(qkv.shape(), self.0)?;
        let dy = dy.contiguous()?;
        let (qkv_storage, qkv_layout) = qkv.storage_and_layout();
        let (dy_storage, dy_layout) = dy.storage_and_layout();
        let values = host::floats_of(&qkv_storage, qkv_layout)?;
        let dy = host::floats_of(&dy_storage, dy_layout)?;
        let (positions, width, depth) = (heads.positions, heads.width, heads.depth);
        let mut dx = vec![0.0; values.len()];
        let mut own = vec![0.0; positions * depth];
        let mut part = own.clone();
        let mut dshares = vec![0.0; positions * positions];
        let scale = (depth as f32).sqrt().recip();
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
                let mut give = |values: &[f32], part: usize, scale: f32| {
                    scatter(values, dx, depth, 3 * width, part * width + head * depth, scale);
                };
                gemm(&mut part, false, square(&heads.shares).t(), thin(&own));
                give(&part, 2, 1.0);
                gemm(&mut dshares, false, thin(&own), thin(&heads.v).t());
                let shares = heads.shares.chunks_exact(positions);
                for (dshares, shares) in dshares.chunks_exact_mut(positions).zip(shares) {
                    softmax_row_backward(shares, dshares);
                }
                // The queries held here are scaled already, and so is what the keys get.
                gemm(&mut part, false, square(&dshares).t(), thin(&heads.q));
                give(&part, 1, 1.0);
                gemm(&mut part, false, square(&dshares), thin(&heads.k));
                give(&part, 0, scale);
            }
        }
        Ok(Some(host::tensor(dx, qkv.shape(), qkv.dtype())?))
    }
}

/// Copies rows of `depth` elements, times `scale`, into rows of `width` elements, from `at` on.
fn scatter(rows: &[f32], into: &mut [f32], depth: usize, width: usize, at: usize, scale: f32) {
    for (row, into) in rows.chunks_exact(depth).zip(into.chunks_exact_mut(width)) {
        into[at..at + depth].iter_mut().zip(row).for_each(|(to, from)| *to = from * scale);
    }
}
