//! Operators over rows: the fully connected layer, layer normalisation, softmax, cross entropy.

use std::sync::Arc;

use candle_core::{DType, Result, Tensor};

use super::super::linear::Extents;
use super::super::weighted::Kernel as _;
use super::matmul::{Matrices, ONE};
use super::node::node;
use super::{Kernel, Kernels, Output, blocks_of_warps, one_type, pair, stretches};
use crate::custom_op::{apply1, apply2, apply3};

/// `x * weight^T + bias`.
pub(in super::super) fn linear(
    kernels: &Arc<Kernels>,
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    extents: Extents,
) -> Result<Tensor> {
    one_type("linear", x, [Some(weight), bias])?;
    let (x, weight) = (&x.contiguous()?, &weight.contiguous()?);
    let (Extents { rows, inputs, outputs }, dtype) = (extents, x.dtype());
    let y = kernels.empty(extents.output_shape(x.shape()), dtype)?;
    let matrix = move |at| Matrices::new(at, dtype, 0);
    let factors = [matrix(kernels.address(x)?), matrix(kernels.address(weight)?).t(), matrix(y.at)];
    // SAFETY: matrices of these extents.
    unsafe { kernels.multiply(1, [rows, inputs, outputs], factors, ONE) }?;
    let kept = kernels.clone();
    let backward = move |x: &Tensor, weight: &Tensor, dy: &Tensor| {
        let dw = kept.empty(weight.shape(), dtype)?;
        let from = matrix(kept.address(dy)?);
        let factors = [from.t(), matrix(kept.address(x)?), matrix(dw.at)];
        // SAFETY: as above.
        unsafe { kept.multiply(1, [outputs, rows, inputs], factors, ONE) }?;
        let dx = || {
            let dx = kept.empty(x.shape(), dtype)?;
            let factors = [from, matrix(kept.address(weight)?), matrix(dx.at)];
            // SAFETY: as above.
            unsafe { kept.multiply(1, [rows, outputs, inputs], factors, ONE) }?;
            Ok::<_, candle_core::Error>(dx.tensor())
        };
        Ok::<_, candle_core::Error>((x.track_op().then(dx).transpose()?, dw.tensor()))
    };
    let Some(bias) = bias else {
        let backward = move |[x, weight]: [&Tensor; 2], _: &Tensor, dy: &Tensor| {
            let (dx, dw) = backward(x, weight, dy)?;
            Ok([dx, Some(dw)])
        };
        return apply2(node("linear", y, backward), [x, weight]);
    };
    let bias = &bias.contiguous()?;
    let job = [y.at, kernels.address(bias)?, pair(rows, outputs), 0];
    let blocks = blocks_of_warps(stretches(rows, outputs));
    // SAFETY: a `BiasJob` of the result's rows, and one row.
    unsafe { kernels.launch(dtype, Kernel::add_bias, blocks, &job) }?;
    let kernels = kernels.clone();
    let backward = move |[x, weight, bias]: [&Tensor; 3], _: &Tensor, dy: &Tensor| {
        let (dx, dw) = backward(x, weight, dy)?;
        let [db, _] = kernels.column_sums(dy, outputs, None)?;
        Ok([dx, Some(dw), Some(db.to_dtype(bias.dtype())?)])
    };
    apply3(node("linear", y, backward), [x, weight, bias])
}

pub(in super::super) fn layer_norm(
    kernels: &Arc<Kernels>,
    x: &Tensor,
    gamma: &Tensor,
    beta: &Tensor,
    eps: f32,
) -> Result<Tensor> {
    let x = &x.contiguous()?;
    // A cast to their own type does nothing.
    let [gamma, beta] = [gamma.to_dtype(DType::F32)?, beta.to_dtype(DType::F32)?];
    let (gamma, beta) = (&gamma.contiguous()?, &beta.contiguous()?);
    let (count, dtype) = (gamma.elem_count(), x.dtype());
    let rows = x.elem_count() / count;
    let words = move |[x, y, dy, dx, gamma, beta, row_stats]: [u64; 7]| {
        let extents = [pair(rows, count), pair(eps.to_bits() as usize, 0)];
        [x, y, dy, dx, gamma, beta, row_stats, extents[0], extents[1]]
    };
    let y = kernels.empty(x.shape(), dtype)?;
    let job = words([
        kernels.address(x)?,
        y.at,
        0,
        0,
        kernels.address(gamma)?,
        kernels.address(beta)?,
        0,
    ]);
    // SAFETY: a `LayerNormJob` of the forward pass.
    unsafe { kernels.launch(dtype, Kernel::layer_norm, blocks_of_warps(rows), &job) }?;
    let kernels = kernels.clone();
    let backward = move |[x, gamma, _]: [&Tensor; 3], _: &Tensor, dy: &Tensor| {
        let dx = kernels.empty(x.shape(), dtype)?;
        let row_stats = kernels.empty((rows, 2), DType::F32)?;
        let job = words([
            kernels.address(x)?,
            0,
            kernels.address(dy)?,
            dx.at,
            kernels.address(gamma)?,
            0,
            row_stats.at,
        ]);
        // SAFETY: a `LayerNormJob` of the backward pass.
        unsafe { kernels.launch(dtype, Kernel::layer_norm_backward, blocks_of_warps(rows), &job) }?;
        let [dbeta, dgamma] = kernels.column_sums(dy, count, Some((x, &row_stats)))?;
        Ok([Some(dx.tensor()), Some(dgamma), Some(dbeta)])
    };
    apply3(node("layer_norm", y, backward), [x, gamma, beta])
}

pub(in super::super) fn softmax(kernels: &Arc<Kernels>, x: &Tensor) -> Result<Tensor> {
    let x = &x.contiguous()?;
    let of = Softmax { width: x.dims().last().copied().unwrap_or(1), causal: false };
    let y = kernels.empty(x.shape(), x.dtype())?;
    // SAFETY: rows, and memory for as many.
    unsafe {
        of.launch(
            kernels,
            Kernel::softmax,
            x.dtype(),
            x.elem_count(),
            [kernels.address(x)?, y.at, 0],
        )
    }?;
    let kernels = kernels.clone();
    let backward = move |[x]: [&Tensor; 1], y: &Tensor, dy: &Tensor| {
        let dx = kernels.empty(x.shape(), x.dtype())?;
        let (job, count) = ([dx.at, kernels.address(y)?, kernels.address(dy)?], x.elem_count());
        // SAFETY: as above.
        unsafe { of.launch(&kernels, Kernel::softmax_backward, x.dtype(), count, job) }?;
        Ok([Some(dx.tensor())])
    };
    apply1(node("softmax", y, backward), [x])
}

/// Softmax over rows.
#[derive(Clone, Copy, Debug)]
pub(super) struct Softmax {
    /// Values of a row.
    pub(super) width: usize,
    /// Whether row `i` sees its first `i % width + 1` values only.
    pub(super) causal: bool,
}

impl Softmax {
    /// # Safety
    ///
    /// The addresses must be those of contiguous tensors of `elements` elements of this type: `x`, or its gradient
    /// backward; `y`; and backward `dy`.
    pub(super) unsafe fn launch(
        self,
        kernels: &Kernels,
        kernel: Kernel,
        dtype: DType,
        elements: usize,
        [x, y, dy]: [u64; 3],
    ) -> Result<()> {
        let (rows, seen) = (elements / self.width, if self.causal { self.width } else { 0 });
        let job = [x, y, dy, pair(rows, self.width), pair(seen, 0)];
        // SAFETY: a `SoftmaxJob`; the caller vouches for the addresses.
        unsafe { kernels.launch(dtype, kernel, blocks_of_warps(rows), &job) }
    }
}

/// The caller has checked the labels.
pub(in super::super) fn cross_entropy(
    kernels: &Arc<Kernels>,
    logits: &Tensor,
    labels: &Tensor,
) -> Result<Tensor> {
    let x = &logits.contiguous()?;
    let (rows, count) = x.dims2()?;
    let labels = labels.to_dtype(DType::I64)?.contiguous()?;
    let loss = kernels.empty((), DType::F32)?;
    let part = kernels.empty(rows, DType::F64)?;
    let arrived = kernels.address(&kernels.arrived)?;
    let extents = pair(rows, count);
    let job =
        [kernels.address(x)?, kernels.address(&labels)?, loss.at, 0, 0, part.at, arrived, extents];
    // SAFETY: a `LossJob` of the forward pass; `part` has a number for each row.
    unsafe { kernels.launch(x.dtype(), Kernel::cross_entropy, blocks_of_warps(rows), &job) }?;
    let kernels = kernels.clone();
    let backward = move |[x]: [&Tensor; 1], _: &Tensor, dy: &Tensor| {
        let dx = kernels.empty(x.shape(), x.dtype())?;
        let job = [
            kernels.address(x)?,
            kernels.address(&labels)?,
            0,
            kernels.address(dy)?,
            dx.at,
            0,
            0,
            extents,
        ];
        let blocks = blocks_of_warps(rows);
        // SAFETY: a `LossJob` of the backward pass.
        unsafe { kernels.launch(x.dtype(), Kernel::cross_entropy_backward, blocks, &job) }?;
        Ok([Some(dx.tensor())])
    };
    apply1(node("cross_entropy", loss, backward), [x])
}

impl Kernels {
    /// Sums of the columns of `dy`, `f32`; and of `dy` times the normalised `x`, by the statistics that
    /// `layer_norm_backward` wrote for each row.
    fn column_sums(
        &self,
        dy: &Tensor,
        count: usize,
        normal: Option<(&Tensor, &Output)>,
    ) -> Result<[Tensor; 2]> {
        let rows = dy.elem_count() / count;
        let parts = (rows / 64).clamp(1, 64);
        let (sum, dot) = (self.empty(count, DType::F32)?, self.empty(count, DType::F32)?);
        let part = self.empty((parts, count, 2), DType::F64)?;
        let (x, row_stats) = match normal {
            Some((x, row_stats)) => (self.address(x)?, row_stats.at),
            None => (0, 0),
        };
        let job = [
            x,
            self.address(dy)?,
            row_stats,
            sum.at,
            dot.at,
            part.at,
            self.address(&self.arrived)?,
            pair(rows, count),
            pair(parts, 0),
        ];
        let blocks = count.div_ceil(32) * parts;
        // SAFETY: a `ColumnSumsJob`.
        unsafe { self.launch(dy.dtype(), Kernel::column_sums, blocks, &job) }?;
        Ok([sum, dot].map(Output::tensor))
    }
}
