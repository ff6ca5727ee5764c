//! CUDA kernels on the CPU, for tests (feature `testing`).

/// Stands before [`DEVICE_H`](crate::DEVICE_H) in place of [`PTX_H`](crate::PTX_H) for a C++ compiler: CUDA's names
/// over fibers. A memory access outside of what a test lends, a misaligned one, and a barrier that not all threads
/// reach are reported as faults.
pub const SHIM_H: &str = include_str!("shim.h");
