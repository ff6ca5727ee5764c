//! Softmax over the last dimension.

use candle_core::{Result, Shape, Tensor, bail};

use super::dispatch;
use crate::cast;
use crate::cpu::real::Real;
use crate::cpu::simd::{self, Kernel};
use crate::cpu::sums::{dot_centered, largest, sum};
use crate::graph::device;
use crate::graph::operator::{Input, Operator, apply1};

/// `exp(x) / sum(exp(x))` over the last dimension.
///
/// Any shape with at least one dimension. The largest value of a row is subtracted first. A NaN, or
/// an infinite largest value, makes its row NaN; negative infinity becomes 0. Unlike candle-nn's
/// `softmax_last_dim` it has a backward pass: `y * (dy - sum(y * dy))`.
///
/// # Errors
///
/// An unsupported dtype; a scalar, or an empty last dimension.
pub fn softmax(x: &Tensor) -> Result<Tensor> {
    let [x] = cast("softmax", [x])?;
    width(x.shape())?;
    if device::dispatches(&x) { dispatch::softmax(&x) } else { apply1(Softmax, [x]) }
}

struct Softmax;

impl Operator<1> for Softmax {
    const NAME: &'static str = "softmax";

    fn forward<T: Real>(&self, [x]: [Input<'_>; 1]) -> Result<(Vec<T>, Shape)> {
        let width = width(x.shape())?;
        let mut y = x.values()?.into_owned();
        simd::run(Rows { rows: &mut y, width, causal: None, is_masked: false });
        Ok((y, x.shape().clone()))
    }

    fn backward<T: Real>(
        &self,
        _: [Input<'_>; 1],
        y: Input<'_>,
        dy: Input<'_>,
    ) -> Result<[Option<Vec<T>>; 1]> {
        let width = width(y.shape())?;
        let mut dx = dy.values()?.into_owned();
        simd::run(RowsBackward { y: &y.values()?, dy: &mut dx, width });
        Ok([Some(dx)])
    }
}

pub(super) fn width(shape: &Shape) -> Result<usize> {
    match shape.dims().last() {
        Some(&width) if width > 0 => Ok(width),
        _ => bail!("softmax: a tensor of shape {shape:?} has no last dimension to sum over"),
    }
}

/// Softmax of each row in place.
pub(crate) struct Rows<'a, T> {
    pub(crate) rows: &'a mut [T],
    pub(crate) width: usize,
    /// Index `i` of the first row in the causal case: row `i` has values at `0..=i` only, followed
    /// by zeros.
    pub(crate) causal: Option<usize>,
    /// Whether a row of only negative infinity, all of which is masked, becomes zeros rather than
    /// NaN.
    pub(crate) is_masked: bool,
}

impl<T: Real> Kernel for Rows<'_, T> {
    #[inline(always)]
    fn run(self) {
        for (at, row) in self.rows.chunks_exact_mut(self.width).enumerate() {
            let count = self.causal.map_or(self.width, |first| self.width.min(first + at + 1));
            let (row, unseen) = row.split_at_mut(count);
            let largest = largest(row);
            if self.is_masked && row.iter().all(|v| *v == T::NEG_INFINITY) {
                row.fill(T::ZERO);
                unseen.fill(T::ZERO);
                continue;
            }
            for v in &mut *row {
                *v = (*v - largest).quick_exp();
            }
            let inverse = sum(row).recip();
            for v in row {
                *v *= inverse;
            }
            unseen.fill(T::ZERO);
        }
    }
}

/// Replaces the gradient of each row's softmax `y` with that of its input.
pub(crate) struct RowsBackward<'a, T> {
    pub(crate) y: &'a [T],
    pub(crate) dy: &'a mut [T],
    pub(crate) width: usize,
}

impl<T: Real> Kernel for RowsBackward<'_, T> {
    #[inline(always)]
    fn run(self) {
        let rows = self.dy.chunks_exact_mut(self.width).zip(self.y.chunks_exact(self.width));
        for (dy, y) in rows {
            let along = dot_centered(y, dy, T::ZERO);
            for (dy, y) in dy.iter_mut().zip(y) {
                *dy = *y * (*dy - along);
            }
        }
    }
}
