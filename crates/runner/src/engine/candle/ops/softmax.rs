//! Softmax over the last dimension, and the exponential that it and others are made of.

use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor, bail};

use super::{cast, host};

/// `exp(x) / sum(exp(x))` over the last dimension.
///
/// Any shape but a scalar's; `f32`, `f16` or `bf16`, computed in `f32` with the largest of a row
/// subtracted first, rounded once. A NaN, or an infinite largest value, makes its row NaN; a value
/// of negative infinity has a share of 0. Unlike candle-nn's `softmax_last_dim` it has a backward:
/// `y * (dy - sum(y * dy))`.
///
/// # Errors
///
/// Another dtype; a scalar, or an empty last dimension.
pub fn softmax(x: &Tensor) -> Result<Tensor> {
    let [x] = cast("softmax", [x])?;
    x.contiguous()?.apply_op1(Softmax)
}

struct Softmax;

impl CustomOp1 for Softmax {
    fn name(&self) -> &'static str {
        "softmax"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let width = width(layout.shape())?;
        let dtype = host::float_dtype(x)?;
        let mut y = host::floats(x, layout)?.into_owned();
        y.chunks_exact_mut(width).for_each(softmax_row);
        Ok((host::rounded(y, dtype)?, layout.shape().clone()))
    }

    fn bwd(&self, _x: &Tensor, y: &Tensor, dy: &Tensor) -> Result<Option<Tensor>> {
        let width = width(y.shape())?;
        let dy = dy.contiguous()?;
        let (y_storage, y_layout) = y.storage_and_layout();
        let (dy_storage, dy_layout) = dy.storage_and_layout();
        let y = host::floats_of(&y_storage, y_layout)?;
        let mut dx = host::floats_of(&dy_storage, dy_layout)?.into_owned();
        for (dx, y) in dx.chunks_exact_mut(width).zip(y.chunks_exact(width)) {
            softmax_row_backward(y, dx);
        }
        Ok(Some(host::tensor(dx, dy.shape(), dy.dtype())?))
    }
}

fn width(shape: &Shape) -> Result<usize> {
    match shape.dims().last() {
        Some(&width) if width > 0 => Ok(width),
        _ => bail!("softmax: a tensor of shape {shape:?} has no last dimension to sum over"),
    }
}

/// Softmax of one row in place.
pub(super) fn softmax_row(row: &mut [f32]) {
    let largest = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    row.iter_mut().for_each(|v| *v = exp(*v - largest));
    let inverse = super::sum(row).recip();
    row.iter_mut().for_each(|v| *v *= inverse);
}

/// Turns the gradient of a softmax `y` into that of its input, in place.
pub(super) fn softmax_row_backward(y: &[f32], dy: &mut [f32]) {
    let along = super::dot_centered(y, dy, 0.0);
    dy.iter_mut().zip(y).for_each(|(dy, y)| *dy = y * (*dy - along));
}

/// `e^x` within 2 ulp for results that are normal numbers, 0 below; NaN stays NaN, what is too large
/// is infinite. Of plain arithmetic, so that loops of it become vector code, which calls of the
/// system's function do not.
///
/// `e^x = 2^n e^r` with `|r| <= ln 2 / 2`, and Taylor's series of seven terms for `e^r`.
#[inline]
pub(super) fn exp(x: f32) -> f32 {
    // Adding and taking away 1.5 * 2^23 rounds to a whole number.
    const ROUND: f32 = 12_582_912.0;
    // ln 2 as a sum of a number of few digits, whose products are exact, and the rest.
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    let clamped = x.clamp(-87.3, 89.0);
    let n = (clamped * std::f32::consts::LOG2_E + ROUND) - ROUND;
    let r = clamped - n * LN2_HIGH - n * LN2_LOW;
    let mut e = 1.0 / 5040.0;
    for factor in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
        e = e * r + factor;
    }
    // Two factors, since 2^128 itself is not an f32.
    let half = (n * 0.5) as i32;
    let power = |n: i32| f32::from_bits(((n + 127) << 23).cast_unsigned());
    let e = e * power(half) * power(n as i32 - half);
    if x < -87.3 { 0.0 } else { e }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_exact_to_two_ulp() {
        for i in -873_000..=887_000 {
            let x = i as f32 * 1e-4;
            let (got, exact) = (f64::from(exp(x)), f64::from(x).exp());
            let ulp = f64::from(exact as f32).abs() * f64::from(f32::EPSILON);
            assert!((got - exact).abs() <= 2.0 * ulp, "{x}: {got} is not {exact}");
        }
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(-90.0), 0.0);
        assert_eq!((exp(0.0), exp(89.0), exp(f32::INFINITY)), (1.0, f32::INFINITY, f32::INFINITY));
        assert!(exp(f32::NAN).is_nan());
    }
}
