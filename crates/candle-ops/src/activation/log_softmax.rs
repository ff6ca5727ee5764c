//! The logarithm of softmax over the last dimension.

use candle_core::{D, Result, Shape, Tensor};

use super::softmax::{Rows, width};
use crate::cast;
use crate::cpu::real::Real;
use crate::cpu::simd::{self, Kernel};
use crate::cpu::sums::{largest, sum, sum_by};
use crate::graph::device::{self, widened};
use crate::graph::operator::{Input, Operator, apply1};

/// `x - ln(sum(exp(x)))` over the last dimension.
///
/// Any shape with at least one dimension. The largest value of a row is subtracted first. A NaN, or
/// an infinite largest value, makes its row NaN; negative infinity stays. The backward pass is
/// `dy - softmax(x) * sum(dy)`.
///
/// # Errors
///
/// An unsupported dtype; a scalar, or an empty last dimension.
pub fn log_softmax(x: &Tensor) -> Result<Tensor> {
    let [x] = cast("log_softmax", [x])?;
    width(x.shape())?;
    if device::dispatches(&x) {
        let [wide] = widened([&x])?;
        let centred = wide.broadcast_sub(&wide.detach().max_keepdim(D::Minus1)?)?;
        let total = centred.exp()?.sum_keepdim(D::Minus1)?.log()?;
        return centred.broadcast_sub(&total)?.to_dtype(x.dtype());
    }
    apply1(LogSoftmax, [x])
}

struct LogSoftmax;

impl Operator<1> for LogSoftmax {
    const NAME: &'static str = "log_softmax";

    fn forward<T: Real>(&self, [x]: [Input<'_>; 1]) -> Result<(Vec<T>, Shape)> {
        let mut y = x.values()?.into_owned();
        simd::run(LogRows { rows: &mut y, width: width(x.shape())? });
        Ok((y, x.shape().clone()))
    }

    fn backward<T: Real>(
        &self,
        [x]: [Input<'_>; 1],
        _y: Input<'_>,
        dy: Input<'_>,
    ) -> Result<[Option<Vec<T>>; 1]> {
        let width = width(x.shape())?;
        let mut dx = x.values::<T>()?.into_owned();
        simd::run(Rows { rows: &mut dx, width, causal: None, is_masked: false });
        simd::run(LogRowsBackward { dx: &mut dx, dy: &dy.values()?, width });
        Ok([Some(dx)])
    }
}

struct LogRows<'a, T> {
    rows: &'a mut [T],
    width: usize,
}

impl<T: Real> Kernel for LogRows<'_, T> {
    #[inline(always)]
    fn run(self) {
        for row in self.rows.chunks_exact_mut(self.width) {
            let largest = largest(row);
            let total = sum_by(row, |v| (v - largest).quick_exp()).ln();
            for v in row {
                *v = *v - largest - total;
            }
        }
    }
}

/// Replaces softmax in `dx` by the gradient.
struct LogRowsBackward<'a, T> {
    dx: &'a mut [T],
    dy: &'a [T],
    width: usize,
}

impl<T: Real> Kernel for LogRowsBackward<'_, T> {
    #[inline(always)]
    fn run(self) {
        for (dx, dy) in self.dx.chunks_exact_mut(self.width).zip(self.dy.chunks_exact(self.width)) {
            let total = sum(dy);
            for (dx, dy) in dx.iter_mut().zip(dy) {
                *dx = *dy - *dx * total;
            }
        }
    }
}
