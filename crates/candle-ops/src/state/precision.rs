//! The precision of `f32` matrix products on a GPU.

/// Enables or disables TF32 for `f32` matrix products on GPUs: factors are rounded to 10 bits of
/// mantissa, sums are in `f32`. This is several times faster on an Ampere GPU or later; older GPUs
/// use `f32`.
///
/// PyTorch's `torch.backends.cuda.matmul.allow_tf32`; disabled by default, as in PyTorch. Applies
/// to this crate's kernels and candle's own operators, in the whole process. No effect without the
/// feature `cuda`.
///
/// Applies to convolutions, too: by cuDNN, if it is available and allowed, else as matrix products.
/// (PyTorch's convolutions have a separate switch, `cudnn.allow_tf32`, which is enabled by
/// default.)
pub fn allow_tf32(is_allowed: bool) {
    candle_core::cuda::set_gemm_reduced_precision_f32(is_allowed);
}

/// Whether products of `f32` matrices on GPUs use TF32.
#[must_use]
pub fn allows_tf32() -> bool {
    cfg!(feature = "cuda") && candle_core::cuda::gemm_reduced_precision_f32()
}
