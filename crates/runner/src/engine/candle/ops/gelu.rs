//! The Gaussian error linear unit.

use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor};

use super::softmax::exp;
use super::{cast, host};

/// `x * P(z <= x)` for a standard normal `z`: PyTorch's `gelu` without approximation.
///
/// Any shape; `f32`, `f16` or `bf16`, computed in `f32`, rounded once; the probability is within
/// 3e-7. NaN stays NaN.
///
/// # Errors
///
/// Another dtype.
pub fn gelu(x: &Tensor) -> Result<Tensor> {
    let [x] = cast("gelu", [x])?;
    x.contiguous()?.apply_op1(Gelu)
}

struct Gelu;

impl CustomOp1 for Gelu {
    fn name(&self) -> &'static str {
        "gelu"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let dtype = host::float_dtype(x)?;
        let y = host::floats(x, layout)?.iter().map(|x| x * normal(*x).0).collect();
        Ok((host::rounded(y, dtype)?, layout.shape().clone()))
    }

    fn bwd(&self, x: &Tensor, _y: &Tensor, dy: &Tensor) -> Result<Option<Tensor>> {
        let dy = dy.contiguous()?;
        let (x_storage, x_layout) = x.storage_and_layout();
        let (dy_storage, dy_layout) = dy.storage_and_layout();
        let x = host::floats_of(&x_storage, x_layout)?;
        let gradient = host::floats_of(&dy_storage, dy_layout)?;
        let slope = |x: f32| {
            let (probability, density) = normal(x);
            probability + x * density
        };
        let dx = x.iter().zip(&*gradient).map(|(x, dy)| dy * slope(*x)).collect();
        Ok(Some(host::tensor(dx, dy.shape(), dy.dtype())?))
    }
}

/// The standard normal's probability up to `x`, and its density there.
///
/// Abramowitz and Stegun's 7.1.26: `1 - erf(u)` is a polynomial in `1 / (1 + 0.3275911 u)` times
/// `exp(-u^2)`, within 1.5e-7; the density needs the same exponential.
#[inline]
fn normal(x: f32) -> (f32, f32) {
    // Bounded, so that a product of infinity and zero cannot come up; beyond, nothing changes.
    let bounded = x.clamp(-13.0, 13.0);
    let u = bounded.abs() * std::f32::consts::FRAC_1_SQRT_2;
    let gauss = exp(-u * u);
    let t = (1.0 + 0.327_591_1 * u).recip();
    let mut tail = 1.061_405_4;
    for factor in [-1.453_152_1, 1.421_413_7, -0.284_496_74, 0.254_829_6] {
        tail = tail * t + factor;
    }
    let tail = 0.5 * tail * t * gauss;
    let probability = if bounded < 0.0 { tail } else { 1.0 - tail };
    // 1 / sqrt(2 pi).
    (probability, 0.398_942_3 * gauss)
}
