//! Loops over slices on the CPU: compute types, SIMD, sums, matrix products.

pub(crate) mod gemm;
pub(crate) mod gemm_bf16;
pub(crate) mod real;
pub(crate) mod simd;
#[cfg(any(target_arch = "x86_64", test))]
pub(crate) mod simd_limit;
pub(crate) mod sums;
