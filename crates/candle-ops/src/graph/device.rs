//! Helpers for operators on a GPU: the entered context's kernels, and parts of compositions.
//!
//! The loops of the operators are for the CPU. On a GPU the same functions go by `dispatch.rs` in
//! each folder: by [`DeviceKernels`], if the entered [`Context`](crate::Context) has kernels that
//! support the type, else as compositions of candle's operators, which candle differentiates.
//! Compositions use only operators with correct gradients; they allocate and launch more than
//! kernels. Results are those of the CPU, except that
//!
//! * products and convolutions of half-precision tensors round the product before the bias is
//!   added, and attention rounds its scores and weights;
//! * if a window has several largest values, it is unspecified which one gets the gradient, and a
//!   NaN beside an infinity may be lost;
//! * sums are computed in the device's order, those of batch statistics in `f32`.
//!
//! Labels and indices are checked on the host first (`index_range.rs`).
//!
//! The tests run the compositions on the CPU, and compare them with finite differences and with the
//! loops.

use std::sync::Arc;

use candle_core::{DType, Result, Tensor, bail};

use crate::context;
use crate::kernels::DeviceKernels;

/// Whether operators on this tensor go by `dispatch.rs`, rather than by the CPU's loops.
pub(crate) fn dispatches(x: &Tensor) -> bool {
    !x.device().is_cpu() || forced()
}

/// The kernels of the entered context, if it has any for `x`.
pub(crate) fn kernels(x: &Tensor) -> Option<Arc<dyn DeviceKernels>> {
    kernels_for(x, 1)
}

/// Like [`kernels`], for an operator that also has tensors of up to this many elements.
pub(crate) fn kernels_for(x: &Tensor, elements: usize) -> Option<Arc<dyn DeviceKernels>> {
    find_kernels(x, x.dtype(), elements)
}

/// Like [`kernels`], for an operator that computes in `dtype`.
pub(crate) fn kernels_in(x: &Tensor, dtype: DType) -> Option<Arc<dyn DeviceKernels>> {
    find_kernels(x, dtype, 1)
}

fn find_kernels(x: &Tensor, dtype: DType, elements: usize) -> Option<Arc<dyn DeviceKernels>> {
    if x.device().is_cpu() {
        return None;
    }
    let kernels = context::with(|context| context.kernels.clone())?;
    kernels.supports(x, dtype, elements).then_some(kernels)
}

/// The sum of two contiguous tensors of the same shape, if there is a kernel. An `f32` and a
/// half-precision tensor can be added, too: the kernel widens the latter while reading it.
pub(crate) fn add([a, b]: [&Tensor; 2]) -> Result<Option<Tensor>> {
    if a.shape() != b.shape() || !a.is_contiguous() || !b.is_contiguous() {
        return Ok(None);
    }
    let (wide, half) = if a.dtype() == DType::F32 { (a, b) } else { (b, a) };
    let Some(kernels) = kernels(half) else { return Ok(None) };
    match (wide.dtype(), half.dtype()) {
        (one, other) if one == other => kernels.add(a, b).map(Some),
        (DType::F32, _) => kernels.add_to_f32(wide, half).map(Some),
        _ => Ok(None),
    }
}

/// Casts a contiguous `x` to another type, if there is a kernel.
pub(crate) fn cast(x: &Tensor, dtype: DType) -> Result<Option<Tensor>> {
    if let (DType::F32, half @ (DType::F16 | DType::BF16))
    | (half @ (DType::F16 | DType::BF16), DType::F32) = (x.dtype(), dtype)
        && x.is_contiguous()
        && let Some(kernels) = kernels_in(x, half)
    {
        return kernels.cast(x, dtype).map(Some);
    }
    Ok(None)
}

/// A scalar with the type and device of `like`. Unlike `Tensor::new` it copies nothing from the
/// host, which is not possible while a step is captured as a CUDA graph.
pub(crate) fn scalar(value: f64, like: &Tensor) -> Result<Tensor> {
    Tensor::zeros((), like.dtype(), like.device())?.affine(1.0, value)
}

/// Casts all inputs to the compute type: `f64` if the first one is `f64`, else `f32`.
pub(crate) fn widened<const N: usize>(inputs: [&Tensor; N]) -> Result<[Tensor; N]> {
    let wide = if inputs[0].dtype() == DType::F64 { DType::F64 } else { DType::F32 };
    each(inputs, |input| match input.dtype().is_float() {
        true => input.to_dtype(wide),
        false => bail!("expected a floating-point type, got {:?}", input.dtype()),
    })
}

/// Applies `cast` to each input.
pub(crate) fn each<const N: usize>(
    inputs: [&Tensor; N],
    mut cast: impl FnMut(&Tensor) -> Result<Tensor>,
) -> Result<[Tensor; N]> {
    let mut outputs = inputs.map(Clone::clone);
    for output in &mut outputs {
        *output = cast(output)?;
    }
    Ok(outputs)
}

#[cfg(not(test))]
const fn forced() -> bool {
    false
}

#[cfg(test)]
use tests::forced;

#[cfg(test)]
pub(crate) mod tests {
    use std::cell::Cell;

    thread_local! {
        static FORCED: Cell<bool> = const { Cell::new(false) };
    }

    /// Whether tensors on the CPU use compositions as well.
    pub(crate) fn forced() -> bool {
        FORCED.get()
    }

    /// Runs `call` with compositions for tensors on the CPU as well.
    pub(crate) fn composed<R>(call: impl FnOnce() -> R) -> R {
        FORCED.set(true);
        let result = call();
        FORCED.set(false);
        result
    }
}
