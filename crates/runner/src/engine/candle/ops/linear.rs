//! The affine map of a fully connected layer.

use candle_core::{CpuStorage, CustomOp2, CustomOp3, Layout, Result, Shape, Tensor, bail};

use super::gemm::{Mat, gemm};
use super::host;

/// `x * weight^T + bias`.
///
/// Shapes: `x` is `[..., i]`, `weight` `[o, i]`, `bias` `[o]`, the result `[..., o]`. `f32`, `f16`
/// and `bf16`: computed and accumulated in `f32`, rounded once at the end. NaN and infinities
/// propagate. Single-threaded.
///
/// Backward gives all three gradients; that of `x` only if something upstream needs it.
///
/// # Errors
///
/// Shapes or dtypes that do not fit.
pub fn linear(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    let (x, weight) = (x.contiguous()?, weight.contiguous()?);
    match bias {
        Some(bias) => x.apply_op3(&weight, &bias.contiguous()?, Linear),
        None => x.apply_op2(&weight, Linear),
    }
}

struct Linear;

impl CustomOp2 for Linear {
    fn name(&self) -> &'static str {
        "linear"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        weight: &CpuStorage,
        weight_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let extents = Extents::new(x_layout.shape(), weight_layout.shape())?;
        let dtype = host::float_dtype(x)?;
        let y = forward(
            &extents,
            &host::floats(x, x_layout)?,
            &host::floats(weight, weight_layout)?,
            None,
        );
        Ok((host::rounded(y, dtype)?, extents.output_shape(x_layout.shape())))
    }

    fn bwd(
        &self,
        x: &Tensor,
        weight: &Tensor,
        _y: &Tensor,
        dy: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let (dx, dw, _) = gradients(x, weight, dy)?;
        Ok((dx, Some(dw)))
    }
}

impl CustomOp3 for Linear {
    fn name(&self) -> &'static str {
        "linear"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        weight: &CpuStorage,
        weight_layout: &Layout,
        bias: &CpuStorage,
        bias_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let extents = Extents::new(x_layout.shape(), weight_layout.shape())?;
        if bias_layout.shape().dims() != [extents.outputs] {
            bail!("linear: a bias of shape {:?} for {extents:?}", bias_layout.shape());
        }
        let dtype = host::float_dtype(x)?;
        let y = forward(
            &extents,
            &host::floats(x, x_layout)?,
            &host::floats(weight, weight_layout)?,
            Some(&host::floats(bias, bias_layout)?),
        );
        Ok((host::rounded(y, dtype)?, extents.output_shape(x_layout.shape())))
    }

    fn bwd(
        &self,
        x: &Tensor,
        weight: &Tensor,
        bias: &Tensor,
        _y: &Tensor,
        dy: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let (dx, dw, db) = gradients(x, weight, dy)?;
        Ok((dx, Some(dw), Some(host::tensor(db, bias.shape(), bias.dtype())?)))
    }
}

/// Extents of the product, checked against each other.
#[derive(Clone, Copy, Debug)]
struct Extents {
    rows: usize,
    inputs: usize,
    outputs: usize,
}

impl Extents {
    fn new(x: &Shape, weight: &Shape) -> Result<Self> {
        let (outputs, inputs) = weight.dims2()?;
        let Some((&last, leading)) = x.dims().split_last() else {
            bail!("linear: the input is a scalar");
        };
        if last != inputs || inputs * outputs == 0 {
            bail!("linear: an input of shape {x:?} does not fit a weight of shape {weight:?}");
        }
        Ok(Self { rows: leading.iter().product(), inputs, outputs })
    }

    fn output_shape(&self, x: &Shape) -> Shape {
        let mut dims = x.dims().to_vec();
        *dims.last_mut().expect("an input has a last dimension") = self.outputs;
        dims.into()
    }
}

fn forward(e: &Extents, x: &[f32], weight: &[f32], bias: Option<&[f32]>) -> Vec<f32> {
    let mut y = vec![0.0; e.rows * e.outputs];
    if let Some(bias) = bias {
        y.chunks_exact_mut(e.outputs).for_each(|row| row.copy_from_slice(bias));
    }
    let weight = Mat::new(weight, e.outputs, e.inputs);
    gemm(&mut y, bias.is_some(), Mat::new(x, e.rows, e.inputs), weight.t());
    y
}

/// Gradients of the input, if anything needs it, of the weight, and of a bias.
fn gradients(
    x: &Tensor,
    weight: &Tensor,
    dy: &Tensor,
) -> Result<(Option<Tensor>, Tensor, Vec<f32>)> {
    let e = Extents::new(x.shape(), weight.shape())?;
    let dy = dy.contiguous()?;
    let (x_storage, x_layout) = x.storage_and_layout();
    let (w_storage, w_layout) = weight.storage_and_layout();
    let (dy_storage, dy_layout) = dy.storage_and_layout();
    let x_values = host::floats_of(&x_storage, x_layout)?;
    let w_values = host::floats_of(&w_storage, w_layout)?;
    let dy_values = host::floats_of(&dy_storage, dy_layout)?;
    let mut db = vec![0.0; e.outputs];
    for row in dy_values.chunks_exact(e.outputs) {
        db.iter_mut().zip(row).for_each(|(db, dy)| *db += dy);
    }
    let dy = Mat::new(&dy_values, e.rows, e.outputs);
    let mut dw = vec![0.0; e.outputs * e.inputs];
    gemm(&mut dw, false, dy.t(), Mat::new(&x_values, e.rows, e.inputs));
    let dx = if x.track_op() {
        let mut dx = vec![0.0; e.rows * e.inputs];
        gemm(&mut dx, false, dy, Mat::new(&w_values, e.outputs, e.inputs));
        Some(host::tensor(dx, x.shape(), x.dtype())?)
    } else {
        None
    };
    Ok((dx, host::tensor(dw, weight.shape(), weight.dtype())?, db))
}
