//! Loops over slices on the CPU: compute types, SIMD, sums, matrix products.

pub(crate) mod gemm;
pub(crate) mod gemm_bf16;
pub(crate) mod real;
pub(crate) mod simd;
pub(crate) mod sums;
