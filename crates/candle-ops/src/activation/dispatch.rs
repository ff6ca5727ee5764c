//! For tensors on a GPU: kernels if there are, else compositions; see `graph/device.rs`.

use candle_core::{D, Result, Tensor};

use super::silu::END;
use crate::graph::device::{self, widened};

pub(crate) fn gelu(x: &Tensor) -> Result<Tensor> {
    if let Some(kernels) = device::kernels(x) {
        return kernels.gelu(x);
    }
    let [wide] = widened([x])?;
    let (low, bounded) = clamped(&wide, 40.0)?;
    let probability = (bounded * std::f64::consts::FRAC_1_SQRT_2)?.erf()?.affine(0.5, 0.5)?;
    (low * probability)?.to_dtype(x.dtype())
}

/// At least `-end`; and also at most `end`. Infinity times zero is NaN. Unlike these, candle's
/// `clamp` may lose a NaN.
fn clamped(x: &Tensor, end: f64) -> Result<(Tensor, Tensor)> {
    let end = (x.zeros_like()? + end)?;
    let least = end.neg()?;
    let low = x.detach().lt(&least)?.where_cond(&least, x)?;
    let bounded = low.detach().gt(&end)?.where_cond(&end, &low)?;
    Ok((low, bounded))
}

pub(crate) fn silu(x: &Tensor) -> Result<Tensor> {
    let [wide] = widened([x])?;
    wide_silu(&wide)?.to_dtype(x.dtype())
}

fn wide_silu(x: &Tensor) -> Result<Tensor> {
    let (low, bounded) = clamped(x, END)?;
    low / (bounded.neg()?.exp()? + 1.0)?
}

pub(crate) fn swiglu(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    let [wide, up] = widened([gate, up])?;
    (wide_silu(&wide)? * up)?.to_dtype(gate.dtype())
}

pub(crate) fn softmax(x: &Tensor) -> Result<Tensor> {
    if let Some(kernels) = device::kernels(x) {
        return kernels.softmax(x);
    }
    let [wide] = widened([x])?;
    let largest = wide.detach().max_keepdim(D::Minus1)?;
    let shares = wide.broadcast_sub(&largest)?.exp()?;
    shares.broadcast_div(&shares.sum_keepdim(D::Minus1)?)?.to_dtype(x.dtype())
}
