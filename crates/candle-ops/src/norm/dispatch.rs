//! For tensors on a GPU: kernels if there are, else compositions; see `graph/device.rs`.

use candle_core::{D, DType, Result, Tensor};

use crate::elementwise::dispatch::relu;
use crate::graph::device::{self, widened};
use crate::sizes::{BatchNormOptions, NormBy, Planes, Statistics};

/// `x` is `[n, c, ...]`.
pub(crate) fn group_norm(
    x: &Tensor,
    groups: usize,
    [gamma, beta]: [&Tensor; 2],
    eps: f32,
) -> Result<Tensor> {
    let [wide, gamma, beta] = widened([x, gamma, beta])?;
    let (n, c) = (x.dim(0)?, x.dim(1)?);
    let rows = wide.reshape((n, groups, ()))?;
    let centered = rows.broadcast_sub(&rows.mean_keepdim(D::Minus1)?)?;
    let var = centered.sqr()?.mean_keepdim(D::Minus1)?;
    centered
        .broadcast_div(&(var + f64::from(eps))?.sqrt()?)?
        .reshape((n, c, ()))?
        .broadcast_mul(&gamma.reshape((1, c, 1))?)?
        .broadcast_add(&beta.reshape((1, c, 1))?)?
        .reshape(x.shape())?
        .to_dtype(x.dtype())
}

pub(crate) fn layer_norm(x: &Tensor, gamma: &Tensor, beta: &Tensor, eps: f32) -> Result<Tensor> {
    if let Some(kernels) = device::kernels(x) {
        return kernels.layer_norm(x, gamma, beta, eps);
    }
    let [wide, gamma, beta] = widened([x, gamma, beta])?;
    let centered = wide.broadcast_sub(&wide.mean_keepdim(D::Minus1)?)?;
    let var = centered.sqr()?.mean_keepdim(D::Minus1)?;
    centered
        .broadcast_div(&(var + f64::from(eps))?.sqrt()?)?
        .broadcast_mul(&gamma)?
        .broadcast_add(&beta)?
        .to_dtype(x.dtype())
}

pub(crate) fn rms_norm(x: &Tensor, gamma: &Tensor, eps: f32) -> Result<Tensor> {
    let [wide, gamma] = widened([x, gamma])?;
    let mean = wide.sqr()?.mean_keepdim(D::Minus1)?;
    wide.broadcast_div(&(mean + f64::from(eps))?.sqrt()?)?
        .broadcast_mul(&gamma)?
        .to_dtype(x.dtype())
}

/// Returns the statistics, too.
pub(crate) fn batch_norm(
    [x, gamma, beta]: [&Tensor; 3],
    by: NormBy<'_>,
    options: BatchNormOptions,
    planes: Planes,
) -> Result<(Tensor, Statistics)> {
    if let Some(kernels) = device::kernels(x) {
        return kernels.batch_norm([x, gamma, beta], by, options, planes);
    }
    let [wide, gamma, beta] = widened([x, gamma, beta])?;
    let line = |t: &Tensor| t.reshape((1, planes.channels, 1, 1));
    let over = (0, 2, 3);
    let mean = match by {
        NormBy::Given(given) => line(&given.mean.detach())?.to_dtype(wide.dtype())?,
        NormBy::Batch(_) => wide.mean_keepdim(over)?,
    };
    let centered = wide.broadcast_sub(&mean)?;
    let var = match by {
        NormBy::Given(given) => line(&given.var.detach())?.to_dtype(wide.dtype())?,
        NormBy::Batch(_) => centered.sqr()?.mean_keepdim(over)?,
    };
    let scale = (line(&gamma)? / (&var + f64::from(options.eps))?.sqrt()?)?;
    let y = centered.broadcast_mul(&scale)?.broadcast_add(&line(&beta)?)?;
    let y = if options.relu { relu(&y)? } else { y };
    let flat = |t: &Tensor| t.detach().flatten_all()?.to_dtype(DType::F32);
    let statistics = Statistics { mean: flat(&mean)?, var: flat(&var)? };
    if let NormBy::Batch(Some(running)) = by {
        running.track(&statistics)?;
    }
    Ok((y.to_dtype(x.dtype())?, statistics))
}
