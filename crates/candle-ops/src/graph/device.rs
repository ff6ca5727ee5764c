//! Helpers of the operators on a GPU, which are compositions of candle's own.
//!
//! The operators' loops are for the CPU. On a GPU the same functions are compositions of candle's operators, which
//! differentiates them: each folder's `composed.rs`. Only operators whose gradients are right are used. They allocate and
//! launch more than the kernels of `cuda/`, which replace them where the entered [`Context`](crate::Context) has kernels and they support
//! the type. Results are those of the CPU, except that
//!
//! * products and convolutions of half tensors round the product before the bias is added, and attention its scores and
//!   weights;
//! * which of several largest values of a window gets the gradient is unspecified, and a NaN beside an infinity may lose
//!   to it;
//! * sums are in the device's order, those of a batch's statistics in `f32`.
//!
//! Labels and indices are checked on the host first (`index_range.rs`).
//!
//! The tests run the compositions on the CPU, against differences and against the loops.

use candle_core::{DType, Result, Tensor, bail};

#[cfg(feature = "cuda")]
use crate::cuda;

/// Whether compositions are for this tensor, and not the CPU's loops.
pub(crate) fn composes(x: &Tensor) -> bool {
    !x.device().is_cpu() || forced()
}

/// The sum of two contiguous tensors of one shape, if there is a kernel; of an `f32` and a half one, too, which it widens
/// while it reads it.
pub(crate) fn add([a, b]: [&Tensor; 2]) -> Result<Option<Tensor>> {
    #[cfg(feature = "cuda")]
    if a.shape() == b.shape() && a.is_contiguous() && b.is_contiguous() {
        let (wide, half) = if a.dtype() == DType::F32 { (a, b) } else { (b, a) };
        let Some(kernels) = cuda::of(half) else { return Ok(None) };
        return match (wide.dtype(), half.dtype()) {
            (one, other) if one == other => cuda::add(&kernels, a, b).map(Some),
            (DType::F32, _) => cuda::add_to_f32(&kernels, wide, half).map(Some),
            _ => Ok(None),
        };
    }
    let _ = (a, b);
    Ok(None)
}

/// `x`, contiguous, of another type, if there is a kernel.
pub(crate) fn cast(x: &Tensor, dtype: DType) -> Result<Option<Tensor>> {
    #[cfg(feature = "cuda")]
    if let (DType::F32, half @ (DType::F16 | DType::BF16))
    | (half @ (DType::F16 | DType::BF16), DType::F32) = (x.dtype(), dtype)
        && x.is_contiguous()
        && let Some(kernels) = cuda::of_type(x, half, 1)
    {
        return cuda::cast(&kernels, x, dtype).map(Some);
    }
    let _ = (x, dtype);
    Ok(None)
}

/// A number of `like`'s type on its device. Unlike `Tensor::new` it copies nothing from the host, which a step that is
/// captured as a CUDA graph could not.
pub(crate) fn scalar(value: f64, like: &Tensor) -> Result<Tensor> {
    Tensor::zeros((), like.dtype(), like.device())?.affine(1.0, value)
}

/// Casts all to the type that is computed in: `f64` if the first is, else `f32`.
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

    /// Whether compositions are for tensors on the CPU, too.
    pub(crate) fn forced() -> bool {
        FORCED.get()
    }

    /// Runs `call` with compositions for tensors on the CPU, too.
    pub(crate) fn composed<R>(call: impl FnOnce() -> R) -> R {
        FORCED.set(true);
        let result = call();
        FORCED.set(false);
        result
    }
}
