//! PowerSGD: sends a gradient as two low-rank factors.
//!
//! A gradient of `n x m` is approximated by `P Q^T` with `r` columns each: `(n + m) r` numbers are
//! sent instead of `n m`. One step of power iteration per pass computes them: `P = M Q`, averaged
//! over the ranks, its columns orthonormalized; then `Q = M^T P`, averaged. The approximation's
//! error is added to the next pass's gradient (error feedback), and the next pass begins with `Q`
//! (warm start). Vectors, and matrices that would not shrink, are sent uncompressed.
//!
//! Follows: PyTorch 2.15, `powerSGD_hook.py`. The first `Q` is drawn by this crate's random number
//! generator instead of torch's, seeded by the bucket's first parameter, so the numbers differ from
//! PyTorch's; they are the same on all ranks.
//!
//! Under a loss scale gradients overflow by design. If the averaged factors of a matrix are not
//! finite, neither is its average, so that the optimizer skips the step; its error is zeroed and
//! its `Q` drawn again, on all ranks alike. [`Reducer::rescale`](super::Reducer::rescale) keeps the
//! error in the units of the coming gradients.
//!
//! `P` is sent while backward continues. `Q` needs the averaged `P`, so it is sent in
//! [`wait`](Bucket::wait). [`Reducer::state_dict`](super::Reducer::state_dict) holds the state
//! between passes.

use std::ops::Range;

use super::bucket::{Bucket, BucketMemory, Elements};
use super::plan::{BucketSpec, ParamInfo};
use crate::{Error, ProcessGroup, ReduceOp, Result, SharedBuf, Work};

/// Options of [`CommHook::PowerSgd`](super::CommHook::PowerSgd). The defaults are PyTorch's.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
#[doc(alias = "PowerSGDState")]
pub struct PowerSgd {
    /// Columns of the two factors: more columns are more accurate, and send more data. Default: 1.
    pub rank: usize,
    /// Number of passes with `sync` before compression starts; until then gradients are sent
    /// uncompressed. At least 2 with error feedback or warm start, because buckets are rebuilt
    /// after the first. Default: 1000.
    pub start_iter: u64,
    /// A matrix is compressed only if that shrinks it by more than this factor. Default: 2.
    pub min_compression_rate: usize,
    /// Adds the approximation's error to the next pass's gradient, which is needed for convergence.
    /// Default: true.
    pub error_feedback: bool,
    /// Begins each pass with the last one's `Q` instead of a random one. Default: true.
    pub warm_start: bool,
}

impl Default for PowerSgd {
    fn default() -> Self {
        Self {
            rank: 1,
            start_iter: 1000,
            min_compression_rate: 2,
            error_feedback: true,
            warm_start: true,
        }
    }
}

impl PowerSgd {
    /// Rejects the options that PyTorch rejects.
    pub(super) fn validate(&self) -> Result<()> {
        let invalid = |text: &str| Err(Error::InvalidArgument(text.to_owned()));
        if self.rank == 0 {
            return invalid("PowerSGD: the rank must be at least 1");
        }
        if self.start_iter < 2 && (self.error_feedback || self.warm_start) {
            return invalid(
                "PowerSGD: start_iter must be at least 2 with error feedback or warm start, because \
                 buckets are rebuilt after the first pass",
            );
        }
        Ok(())
    }
}

/// One compressed gradient: its range in the bucket, and the ranges `p` and `q` of its factors in
/// their buffers.
#[derive(Clone, Debug)]
struct Matrix {
    range: Range<usize>,
    cols: usize,
    rank: usize,
    p: Range<usize>,
    q: Range<usize>,
}

/// A bucket that is sent as factors.
#[derive(Debug)]
pub(super) struct PowerSgdBucket {
    buf: SharedBuf<f32>,
    group: ProcessGroup,
    options: PowerSgd,
    matrices: Vec<Matrix>,
    /// Ranges that are not compressed.
    plain: Vec<Range<usize>>,
    /// The `Q` of all matrices.
    q: Vec<f32>,
    /// Errors of past approximations, of the bucket's length; empty before the first.
    error: Vec<f32>,
    /// Seed of the random numbers; differs between the buckets of a model.
    seed: u64,
    /// All `P`, then the uncompressed ranges; or, before `start_iter`, the whole bucket.
    in_flight: Option<Work<Vec<f32>>>,
    compressing: bool,
}

impl PowerSgdBucket {
    pub(super) fn new(
        group: &ProcessGroup,
        params: &[ParamInfo],
        spec: &BucketSpec,
        options: &PowerSgd,
    ) -> Result<Self> {
        let (mut matrices, mut plain) = (Vec::new(), Vec::new());
        let (mut at, mut p, mut q) = (0, 0, 0);
        for &index in &spec.params {
            let ParamInfo { rows, count, .. } = params[index];
            let cols = count.checked_div(rows).unwrap_or(0);
            let rank = options.rank.min(rows).min(cols);
            let thin = (rows + cols) * rank;
            if thin > 0 && thin * options.min_compression_rate < count {
                let (p_end, q_end) = (p + rows * rank, q + cols * rank);
                let range = at..at + count;
                matrices.push(Matrix { range, cols, rank, p: p..p_end, q: q..q_end });
                (p, q) = (p_end, q_end);
            } else {
                plain.push(at..at + count);
            }
            at += count;
        }
        Ok(Self {
            buf: group.alloc(spec.count)?,
            group: group.clone(),
            options: options.clone(),
            matrices,
            plain,
            q: vec![0.0; q],
            error: Vec::new(),
            seed: spec.params.first().map_or(0, |&index| index as u64),
            in_flight: None,
            compressing: false,
        })
    }

    /// Computes all `P = M Q`; returns them and the uncompressed ranges.
    fn left_factors(&mut self, pass: u64) -> Vec<f32> {
        if self.options.error_feedback {
            self.error.resize(self.buf.len(), 0.0);
            for matrix in &self.matrices {
                let pairs = self.buf[matrix.range.clone()].iter_mut();
                pairs.zip(&mut self.error[matrix.range.clone()]).for_each(|(value, error)| {
                    *value += *error;
                    *error = *value;
                });
            }
        }
        self.begin(pass);
        let mut wire = Vec::new();
        for matrix in &self.matrices {
            let q = &self.q[matrix.q.clone()];
            for row in self.buf[matrix.range.clone()].chunks_exact(matrix.cols) {
                for k in 0..matrix.rank {
                    let column = q.iter().skip(k).step_by(matrix.rank);
                    wire.push(row.iter().zip(column).map(|(m, q)| m * q).sum());
                }
            }
        }
        self.plain.iter().for_each(|range| wire.extend_from_slice(&self.buf[range.clone()]));
        wire
    }

    /// Initializes the `Q` that a pass begins with.
    fn begin(&mut self, pass: u64) {
        let fresh = pass == self.options.start_iter + 1 || !self.options.warm_start;
        let mut random = Random((self.seed << 32) | pass);
        for matrix in &self.matrices {
            let q = &mut self.q[matrix.q.clone()];
            for k in 0..matrix.rank {
                // A column that became zero would stay zero.
                if fresh || q.iter().skip(k).step_by(matrix.rank).all(|value| *value == 0.0) {
                    let column = q.iter_mut().skip(k).step_by(matrix.rank);
                    column.for_each(|value| *value = random.next());
                }
            }
            if fresh {
                orthonormalize(q, matrix.rank);
            }
        }
    }

    /// Computes the averaged approximation from the averaged `P`.
    fn decompress(&mut self, mut wire: Vec<f32>) -> Result<()> {
        let left = self.matrices.last().map_or(0, |matrix| matrix.p.end);
        let (left, mut plain) = wire.split_at_mut(left);
        for range in &self.plain {
            let (own, rest) = std::mem::take(&mut plain).split_at_mut(range.len());
            self.buf[range.clone()].copy_from_slice(own);
            plain = rest;
        }
        self.q.fill(0.0);
        for matrix in &self.matrices {
            let p = &mut left[matrix.p.clone()];
            orthonormalize(p, matrix.rank);
            let q = &mut self.q[matrix.q.clone()];
            let rows = self.buf[matrix.range.clone()].chunks_exact(matrix.cols);
            for (row, p) in rows.zip(p.chunks_exact(matrix.rank)) {
                for (m, q) in row.iter().zip(q.chunks_exact_mut(matrix.rank)) {
                    q.iter_mut().zip(p).for_each(|(q, p)| *q += m * p);
                }
            }
        }
        self.group.all_reduce(&mut self.q, ReduceOp::Avg)?;
        for matrix in &self.matrices {
            let (p, q) = (&left[matrix.p.clone()], &mut self.q[matrix.q.clone()]);
            let rows = self.buf[matrix.range.clone()].chunks_exact_mut(matrix.cols);
            for (row, p) in rows.zip(p.chunks_exact(matrix.rank)) {
                for (m, q) in row.iter_mut().zip(q.chunks_exact(matrix.rank)) {
                    *m = p.iter().zip(q).map(|(p, q)| p * q).sum();
                }
            }
            if self.options.error_feedback {
                let approximation = &self.buf[matrix.range.clone()];
                let error = &mut self.error[matrix.range.clone()];
                error.iter_mut().zip(approximation).for_each(|(error, m)| *error -= m);
            }
            // A `P` that is not finite makes a `Q` that is not.
            if q.iter().any(|value| !value.is_finite()) {
                // `begin` draws a zero column again.
                q.fill(0.0);
                if self.options.error_feedback {
                    self.error[matrix.range.clone()].fill(0.0);
                }
            }
        }
        Ok(())
    }
}

impl Bucket for PowerSgdBucket {
    fn launch(&mut self, group: &ProcessGroup, pass: u64) -> Result<()> {
        self.compressing = pass > self.options.start_iter && !self.matrices.is_empty();
        let wire = if self.compressing { self.left_factors(pass) } else { self.buf.to_vec() };
        self.in_flight = Some(group.all_reduce_async(wire, ReduceOp::Avg)?);
        Ok(())
    }

    fn wait(&mut self) -> Result<()> {
        let Some(work) = self.in_flight.take() else { return Ok(()) };
        let wire = work.wait()?;
        if self.compressing {
            return self.decompress(wire);
        }
        self.buf.copy_from_slice(&wire);
        Ok(())
    }

    fn rescale(&mut self, factor: f32) {
        self.error.iter_mut().for_each(|error| *error *= factor);
    }

    fn memory(&self) -> BucketMemory {
        BucketMemory { q: self.q.clone(), error: self.error.clone() }
    }

    fn set_memory(&mut self, memory: &BucketMemory) -> Result<()> {
        let fits = [0, self.buf.len()].contains(&memory.error.len());
        if memory.q.len() != self.q.len() || !fits {
            let text = "the PowerSGD memory does not match the parameters".to_owned();
            return Err(Error::InvalidArgument(text));
        }
        (self.q, self.error) = (memory.q.clone(), memory.error.clone());
        Ok(())
    }

    fn elements(&self) -> Option<&dyn Elements> {
        let elements: &dyn Elements = &self.buf;
        self.in_flight.is_none().then_some(elements)
    }

    fn elements_mut(&mut self) -> Option<&mut dyn Elements> {
        let elements: &mut dyn Elements = &mut self.buf;
        self.in_flight.is_none().then_some(elements)
    }
}

/// Orthonormalizes the columns of a row-major matrix of `rank` columns, by modified Gram-Schmidt. A
/// column that is linearly dependent on the others becomes zero.
fn orthonormalize(matrix: &mut [f32], rank: usize) {
    let dot = |matrix: &[f32], a: usize, b: usize| -> f64 {
        matrix.chunks_exact(rank).map(|row| f64::from(row[a]) * f64::from(row[b])).sum()
    };
    for k in 0..rank {
        let before = dot(matrix, k, k);
        // Twice: a column that nearly cancels is not yet orthogonal after once.
        for j in (0..k).chain(0..k) {
            let along = dot(matrix, j, k) as f32;
            matrix.chunks_exact_mut(rank).for_each(|row| row[k] -= along * row[j]);
        }
        let square = dot(matrix, k, k);
        // The remainder of a dependent column is rounding error.
        let inverse = if square > before * 1e-12 { square.sqrt().recip() as f32 } else { 0.0 };
        matrix.chunks_exact_mut(rank).for_each(|row| row[k] *= inverse);
    }
}

/// Steele, Lea and Flood's SplitMix64: pseudorandom numbers, the same on every platform.
struct Random(u64);

impl Random {
    /// Returns a number between -1 and 1.
    fn next(&mut self) -> f32 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 40) as f32 / (1 << 23) as f32 - 1.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_become_orthonormal() {
        let mut random = Random(7);
        let mut matrix: Vec<f32> = (0..40 * 3).map(|_| random.next()).collect();
        orthonormalize(&mut matrix, 3);
        for a in 0..3 {
            for b in 0..3 {
                let dot: f32 = matrix.chunks_exact(3).map(|row| row[a] * row[b]).sum();
                assert!((dot - f32::from(u8::from(a == b))).abs() < 1e-6, "{a} {b}: {dot}");
            }
        }
        // The second column is twice the first, the third is zero.
        let mut matrix = vec![1.0, 2.0, 0.0, 1.0, 2.0, 0.0];
        orthonormalize(&mut matrix, 3);
        assert_eq!([matrix[1], matrix[2], matrix[4], matrix[5]], [0.0; 4]);
    }

    #[test]
    fn invalid_options_are_errors() {
        assert!(PowerSgd { rank: 0, ..PowerSgd::default() }.validate().is_err());
        let early = PowerSgd { start_iter: 1, ..PowerSgd::default() };
        assert!(early.validate().unwrap_err().to_string().contains("at least 2"));
        let plain = PowerSgd { error_feedback: false, warm_start: false, ..early };
        plain.validate().unwrap();
    }
}
