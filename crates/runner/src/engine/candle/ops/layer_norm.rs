//! Layer normalisation over the last dimension.

use candle_core::{CpuStorage, CustomOp3, Layout, Result, Shape, Tensor, bail};

use super::{cast, dot_centered, host, sum, sum_by};

/// `gamma * (x - mean) / sqrt(var + eps) + beta`, with mean and biased variance over the last
/// dimension.
///
/// Shapes: `x` is `[..., c]`, `gamma` and `beta` are `[c]`. `x` is `f32`, `f16` or `bf16`, and so is
/// the result; `gamma` and `beta` may have another of these types. Computed in `f32`, rounded once
/// at the end. A NaN or infinity makes its whole row NaN. Unlike candle-nn's `layer_norm`, which
/// silently cuts the graph, it has a backward, through the statistics.
///
/// # Errors
///
/// Shapes or dtypes that do not fit, an empty last dimension.
pub fn layer_norm(x: &Tensor, gamma: &Tensor, beta: &Tensor, eps: f32) -> Result<Tensor> {
    let [x, gamma, beta] = cast("layer_norm", [x, gamma, beta])?;
    x.contiguous()?.apply_op3(&gamma.contiguous()?, &beta.contiguous()?, LayerNorm { eps })
}

struct LayerNorm {
    eps: f32,
}

impl LayerNorm {
    /// Mean of a row, and 1 over its deviation.
    fn measure(&self, row: &[f32]) -> (f32, f32) {
        let count = row.len() as f32;
        let mean = sum(row) / count;
        let var = sum_by(row, |v| (v - mean) * (v - mean)) / count;
        (mean, (var + self.eps).sqrt().recip())
    }
}

impl CustomOp3 for LayerNorm {
    fn name(&self) -> &'static str {
        "layer_norm"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        gamma: &CpuStorage,
        gamma_layout: &Layout,
        beta: &CpuStorage,
        beta_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let shape = x_layout.shape();
        let width = shape.dims().last().copied().unwrap_or(0);
        let (gamma_shape, beta_shape) = (gamma_layout.shape().dims(), beta_layout.shape().dims());
        if width == 0 || gamma_shape != [width] || beta_shape != [width] {
            bail!("layer_norm: an input {shape:?}, parameters {gamma_shape:?} and {beta_shape:?}");
        }
        let dtype = host::float_dtype(x)?;
        let (gamma, beta) = (host::floats(gamma, gamma_layout)?, host::floats(beta, beta_layout)?);
        let mut y = host::floats(x, x_layout)?.into_owned();
        for row in y.chunks_exact_mut(width) {
            let (mean, inverse) = self.measure(row);
            for ((v, gamma), beta) in row.iter_mut().zip(&*gamma).zip(&*beta) {
                *v = (*v - mean) * inverse * gamma + beta;
            }
        }
        Ok((host::rounded(y, dtype)?, shape.clone()))
    }

    fn bwd(
        &self,
        x: &Tensor,
        gamma: &Tensor,
        beta: &Tensor,
        _y: &Tensor,
        dy: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let dy = dy.contiguous()?;
        let (x_storage, x_layout) = x.storage_and_layout();
        let (gamma_storage, gamma_layout) = gamma.storage_and_layout();
        let (dy_storage, dy_layout) = dy.storage_and_layout();
        let values = host::floats_of(&x_storage, x_layout)?;
        let scale = host::floats_of(&gamma_storage, gamma_layout)?;
        let mut dx = host::floats_of(&dy_storage, dy_layout)?.into_owned();
        let width = scale.len();
        let (mut dgamma, mut dbeta) = (vec![0.0; width], vec![0.0; width]);
        for (row, dx) in values.chunks_exact(width).zip(dx.chunks_exact_mut(width)) {
            let (mean, inverse) = self.measure(row);
            for (((dx, v), scale), (dgamma, dbeta)) in
                dx.iter_mut().zip(row).zip(&*scale).zip(dgamma.iter_mut().zip(&mut dbeta))
            {
                *dbeta += *dx;
                *dgamma += *dx * (v - mean) * inverse;
                *dx *= scale;
            }
            // dx = (g - mean(g) - n * mean(g * n)) / deviation, with g = dy * gamma and n the
            // normalised input.
            let count = width as f32;
            let average = sum(dx) / count;
            let along = dot_centered(dx, row, mean) * inverse * inverse / count;
            dx.iter_mut()
                .zip(row)
                .for_each(|(g, v)| *g = (*g - average - (v - mean) * along) * inverse);
        }
        Ok((
            Some(host::tensor(dx, x.shape(), x.dtype())?),
            Some(host::tensor(dgamma, gamma.shape(), gamma.dtype())?),
            Some(host::tensor(dbeta, beta.shape(), beta.dtype())?),
        ))
    }
}
