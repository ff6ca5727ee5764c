//! Loops over slices on the CPU: types to compute in, wider vectors, sums, matrix products.

pub(crate) mod gemm;
pub(crate) mod gemm_bf16;
pub(crate) mod real;
pub(crate) mod simd;
pub(crate) mod sums;
