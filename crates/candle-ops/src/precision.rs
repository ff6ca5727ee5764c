//! The precision of `f32` matrix products on a GPU.

/// How exact products of `f32` matrices are on a GPU; PyTorch's names. Those of other types, and all on the CPU, are as
/// they are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MatmulPrecision {
    /// In `f32`.
    #[default]
    Highest,
    /// In TF32: factors are rounded to 10 bits of mantissa, sums are of `f32`. Several times faster on an Ampere GPU or
    /// later; others go on in `f32`.
    High,
    /// As [`High`](Self::High), as in PyTorch where there is nothing faster.
    Medium,
}

/// Sets the precision of `f32` matrix products on GPUs: this crate's kernels and candle's own operators, in the whole
/// process. [`MatmulPrecision::Highest`] unless it is called, as in PyTorch. No effect without the feature `cuda`.
///
/// Convolutions are matrix products here and follow it, too. (PyTorch's have a switch of their own, `cudnn.allow_tf32`,
/// which is on by default.)
#[doc(alias = "allow_tf32")]
#[cfg_attr(not(feature = "cuda"), expect(unused_variables, reason = "there is no GPU"))]
pub fn set_float32_matmul_precision(precision: MatmulPrecision) {
    #[cfg(feature = "cuda")]
    candle_core::cuda::set_gemm_reduced_precision_f32(precision != MatmulPrecision::Highest);
}

/// Whether products of `f32` matrices on GPUs are in TF32.
#[must_use]
pub fn allows_tf32() -> bool {
    #[cfg(feature = "cuda")]
    return candle_core::cuda::gemm_reduced_precision_f32();
    #[cfg(not(feature = "cuda"))]
    false
}
