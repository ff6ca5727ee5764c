//! The precision of `f32` matrix products on a GPU.

/// Lets `f32` matrix products on GPUs run in TF32, or no more: factors are rounded to 10 bits of mantissa, sums are of
/// `f32`. Several times faster on an Ampere GPU or later; others go on in `f32`.
///
/// PyTorch's `torch.backends.cuda.matmul.allow_tf32`, and off by default as there. It is for this crate's kernels and
/// candle's own operators, in the whole process. No effect without the feature `cuda`.
///
/// Convolutions follow it, too: by cuDNN, where there is one, if it is allowed, else as matrix products. (PyTorch's have a switch of their own, `cudnn.allow_tf32`,
/// which is on by default.)
#[cfg_attr(not(feature = "cuda"), expect(unused_variables, reason = "there is no GPU"))]
pub fn allow_tf32(is_allowed: bool) {
    #[cfg(feature = "cuda")]
    candle_core::cuda::set_gemm_reduced_precision_f32(is_allowed);
}

/// Whether products of `f32` matrices on GPUs are in TF32.
#[must_use]
pub fn allows_tf32() -> bool {
    #[cfg(feature = "cuda")]
    return candle_core::cuda::gemm_reduced_precision_f32();
    #[cfg(not(feature = "cuda"))]
    false
}
