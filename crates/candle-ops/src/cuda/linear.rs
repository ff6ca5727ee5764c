//! The fully connected layer.
//!
//! For a weight that autocast has cast, the variable is the operator's input, and the cast is used
//! in the product: the gradient is summed and written in `f32`, without a cast. The same applies to
//! the bias.

use std::sync::Arc;

use candle_core::{DType, Result, Tensor};

use super::jobs::{BiasJob, u32_of};
use super::matmul::{Matrices, ONE};
use super::node::node;
use super::{Kernel, Kernels, blocks_of_warps, chunks_of, one_type};
use crate::graph::custom_op::{apply2, apply3};
use crate::graph::tape::casts::leaf_of_cast;
use crate::sizes::LinearSizes;

/// `x * weight^T + bias`.
pub(super) fn linear(
    kernels: &Arc<Kernels>,
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    sizes: LinearSizes,
) -> Result<Tensor> {
    one_type("linear", x, [Some(weight), bias])?;
    let (input, variable) = (&x.contiguous()?, &variable(weight));
    let (kernels, weight) = (kernels.clone(), weight.detach().contiguous()?);
    let of = Linear { kernels, weight, sizes };
    let y = of.forward(input, bias)?;
    let Some(bias) = bias else {
        let backward = move |[x, weight]: [&Tensor; 2], _: &Tensor, dy: &Tensor| {
            Ok([of.input_gradient(x, dy)?, of.weight_gradient(x, weight, dy)?])
        };
        return apply2(node("linear", y, backward), [input, variable]);
    };
    let backward = move |[x, weight, bias]: [&Tensor; 3], _: &Tensor, dy: &Tensor| {
        let sums = || of.kernels.column_sums(dy, sizes.outputs)?.to_dtype(bias.dtype());
        let db = bias.track_op().then(sums).transpose()?;
        Ok([of.input_gradient(x, dy)?, of.weight_gradient(x, weight, dy)?, db])
    };
    apply3(node("linear", y, backward), [input, variable, &self::variable(bias)])
}

/// The `f32` variable that autocast has cast to this tensor, or the tensor itself.
fn variable(cast: &Tensor) -> Tensor {
    let leaf = leaf_of_cast(cast).filter(|leaf| leaf.dtype() == DType::F32);
    leaf.unwrap_or_else(|| cast.clone())
}

struct Linear {
    kernels: Arc<Kernels>,
    /// The type of the input.
    weight: Tensor,
    sizes: LinearSizes,
}

impl Linear {
    fn matrix(&self, tensor: &Tensor) -> Result<Matrices> {
        Ok(Matrices::new(self.kernels.address(tensor)?, tensor.dtype(), 0))
    }

    fn forward(&self, x: &Tensor, bias: Option<&Tensor>) -> Result<super::Output> {
        let LinearSizes { rows, inputs, outputs } = self.sizes;
        let (kernels, dtype) = (&self.kernels, x.dtype());
        let y = kernels.empty(self.sizes.output_shape(x.shape()), dtype)?;
        let bias = bias.map(Tensor::contiguous).transpose()?;
        let (from, weight) = (self.matrix(x)?, self.matrix(&self.weight)?);
        if let Some(bias) = &bias {
            let all = [from.at, weight.at, kernels.address(bias)?, y.at];
            // SAFETY: matrices of these extents.
            if unsafe { kernels.multiply_biased(dtype, self.sizes, all) }? {
                return Ok(y);
            }
        }
        let factors = [from, weight.t(), Matrices::new(y.at, dtype, 0)];
        // SAFETY: as above.
        unsafe { kernels.multiply(1, [rows, inputs, outputs], factors, ONE) }?;
        let Some(bias) = bias else { return Ok(y) };
        let job = BiasJob {
            y: y.at,
            bias: kernels.address(&bias)?,
            rows: u32_of(rows),
            count: u32_of(outputs),
            ..Default::default()
        };
        let blocks = blocks_of_warps(chunks_of(rows, outputs));
        // SAFETY: a `BiasJob` of the result's rows, and one row.
        unsafe { kernels.launch(dtype, Kernel::add_bias, blocks, &job) }?;
        Ok(y)
    }

    /// Computed only if it is needed.
    fn input_gradient(&self, x: &Tensor, dy: &Tensor) -> Result<Option<Tensor>> {
        if !x.track_op() {
            return Ok(None);
        }
        let LinearSizes { rows, inputs, outputs } = self.sizes;
        let dx = self.kernels.empty(x.shape(), x.dtype())?;
        let to = Matrices::new(dx.at, x.dtype(), 0);
        let factors = [self.matrix(dy)?, self.matrix(&self.weight)?, to];
        // SAFETY: matrices of these extents.
        unsafe { self.kernels.multiply(1, [rows, outputs, inputs], factors, ONE) }?;
        Ok(Some(dx.tensor()))
    }

    /// In the type of the variable; computed only if it is needed.
    fn weight_gradient(
        &self,
        x: &Tensor,
        variable: &Tensor,
        dy: &Tensor,
    ) -> Result<Option<Tensor>> {
        if !variable.track_op() {
            return Ok(None);
        }
        let LinearSizes { rows, inputs, outputs } = self.sizes;
        let dw = self.kernels.empty(variable.shape(), variable.dtype())?;
        let to = Matrices::new(dw.at, variable.dtype(), 0);
        let factors = [self.matrix(dy)?.t(), self.matrix(x)?, to];
        // SAFETY: matrices of these extents.
        unsafe { self.kernels.multiply(1, [outputs, rows, inputs], factors, ONE) }?;
        Ok(Some(dw.tensor()))
    }
}
