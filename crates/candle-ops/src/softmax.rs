//! Softmax over the last dimension.

use candle_core::{Result, Shape, Tensor, bail};

use super::operator::{Input, Operator, apply1};
use super::real::Real;
use super::sums::{dot_centered, sum};
use super::{cast, composed};

/// `exp(x) / sum(exp(x))` over the last dimension.
///
/// Any shape but a scalar's, with the largest of a row subtracted first. A NaN, or an infinite largest
/// value, makes its row NaN; a value of negative infinity has a share of 0. Unlike candle-nn's
/// `softmax_last_dim` it has a backward: `y * (dy - sum(y * dy))`.
///
/// # Errors
///
/// Another dtype; a scalar, or an empty last dimension.
pub fn softmax(x: &Tensor) -> Result<Tensor> {
    let [x] = cast("softmax", [x])?;
    width(x.shape())?;
    if composed::is_for(&x) { composed::softmax(&x) } else { apply1(Softmax, [x]) }
}

struct Softmax;

impl Operator<1> for Softmax {
    const NAME: &'static str = "softmax";

    fn forward<T: Real>(&self, [x]: [Input<'_>; 1]) -> Result<(Vec<T>, Shape)> {
        let width = width(x.shape())?;
        let mut y = x.values()?.into_owned();
        y.chunks_exact_mut(width).for_each(softmax_row);
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
        for (dx, y) in dx.chunks_exact_mut(width).zip(y.values::<T>()?.chunks_exact(width)) {
            softmax_row_backward(y, dx);
        }
        Ok([Some(dx)])
    }
}

fn width(shape: &Shape) -> Result<usize> {
    match shape.dims().last() {
        Some(&width) if width > 0 => Ok(width),
        _ => bail!("softmax: a tensor of shape {shape:?} has no last dimension to sum over"),
    }
}

/// Softmax of one row in place.
pub(super) fn softmax_row<T: Real>(row: &mut [T]) {
    let largest = row.iter().copied().fold(T::NEG_INFINITY, T::max);
    row.iter_mut().for_each(|v| *v = (*v - largest).quick_exp());
    let inverse = sum(row).recip();
    row.iter_mut().for_each(|v| *v *= inverse);
}

/// Replaces the gradient of a softmax `y` by that of its input.
pub(super) fn softmax_row_backward<T: Real>(y: &[T], dy: &mut [T]) {
    let along = dot_centered(y, dy, T::ZERO);
    dy.iter_mut().zip(y).for_each(|(dy, y)| *dy = *y * (*dy - along));
}
