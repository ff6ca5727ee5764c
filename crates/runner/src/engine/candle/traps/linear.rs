//! What is linear in a tensor, beside its gradient.
//!
//! If `y` is linear in `w`, and `w` is homogeneous in its parameters `p`, that is, scales with them, then so is
//! `y`, and the sum of `r y` is, for any `r`, that of `p` times the gradient of that sum for `p`, as Euler says.
//! So a gradient says what the values ought to be.

use candle_core::{Device, Result, Shape, Tensor};

use super::{Gradients, Graph, dot, values};

/// Whether `y`, which is linear in `w` and of constants besides, has other values than its gradient says. Nothing
/// is said if `w` does not scale with its parameters.
pub(super) fn is_belied(graph: &Graph<'_>, y: &Tensor, w: &Tensor) -> Result<bool> {
    if is_at_odds(graph, w, 0)? {
        return Ok(false);
    }
    // What is wrong may add up to nearly nothing, by chance, but hardly three times.
    for seed in 1..4 {
        if is_at_odds(graph, y, seed)? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Whether a sum over `t` with weights by chance is not what its gradient says.
fn is_at_odds(graph: &Graph<'_>, t: &Tensor, seed: u64) -> Result<bool> {
    let r = noise(t.shape(), seed)?.to_device(t.device())?;
    let told = along(graph, &graph.gradients(&dot(t, &r)?)?)?;
    let (is, size) = weighed(&values(t)?, &values(&r)?);
    let tolerance = if t.dtype().size_in_bytes() < 4 { 5e-2 } else { 1e-3 };
    Ok((told - is).abs() > tolerance * size)
}

/// The sum of the parameters times `gradients`.
fn along(graph: &Graph<'_>, gradients: &Gradients) -> Result<f64> {
    let mut sum = 0.0;
    for (index, gradient) in gradients {
        sum += weighed(&values(&graph.params.tensors[*index])?, gradient).0;
    }
    Ok(sum)
}

/// The sum of `r v`, and what it would be about if signs were by chance.
fn weighed(v: &[f64], r: &[f64]) -> (f64, f64) {
    let products = v.iter().zip(r).map(|(v, r)| v * r);
    (products.clone().sum(), products.map(|p| p * p).sum::<f64>().sqrt())
}

/// Numbers between 0.5 and 1.5 of either sign.
pub(super) fn noise(shape: &Shape, seed: u64) -> Result<Tensor> {
    let number = |i: usize| {
        let bits = (i as u64 + 1 + (seed << 40)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let bits = (bits ^ (bits >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 32;
        let size = 0.5 + (bits >> 1) as f32 / (1u64 << 31) as f32;
        if bits & 1 == 0 { size } else { -size }
    };
    let numbers: Vec<f32> = (0..shape.elem_count()).map(number).collect();
    Tensor::from_vec(numbers, shape, &Device::Cpu)
}
