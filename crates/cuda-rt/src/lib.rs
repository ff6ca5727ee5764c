//! CUDA without a toolkit: device memory, copies and kernel launches, with the driver and NVRTC
//! loaded at run time.
//!
//! Building needs no CUDA. [`Gpu`] is a device and one of its streams, and implements [`Device`].
//! [`Kernels`] compiles CUDA C++ with [`Nvrtc`], caches the machine code on disk, and launches it.
//! [`DeviceSlice`] is the address, length and type of elements in device memory; it converts from
//! cudarc's slices and, with the features `candle` and `cuda`, from candle's tensors; the latter
//! builds candle for CUDA, which needs nvcc. A missing or outdated library is a [`CudaError`] that
//! lists every path that was tried and what to install.
//!
//! Crates that use this one share the types, the loaded libraries and the cache of compiled
//! kernels.
//!
//! # Environment
//!
//! | variable | meaning |
//! |---|---|
//! | `NVRTC_LIBRARY` | path of NVRTC; disables the search |
//! | `CUBIN_CACHE` | cache folder of compiled kernels; empty: no cache. Default: `cuda-rt/cubin` in the user's cache folder |
//!
//! # Reproducibility
//!
//! Kernels are compiled without contraction of `a * b + c`, without flushing subnormals, and with
//! correctly rounded quotients and roots, so that a kernel computes the same bits as the same code
//! in Rust. [`DEVICE_H`] adds element types, packs of 16 bytes, and sums in a fixed order. With the
//! feature `testing` the same source runs on the CPU, on a `testing::TestDevice`.

#[cfg(not(unix))]
compile_error!("`cuda-rt` needs Unix: it opens the driver and NVRTC by `dlopen`");

mod cache;
#[cfg(feature = "candle")]
mod candle;
mod device;
mod driver;
mod error;
mod gpu;
mod kernels;
pub mod library;
mod nvrtc;
mod slice;
mod staging;
#[cfg(feature = "testing")]
pub mod testing;

pub use cache::{Entry, folder as cache_folder};
pub use device::Device;
pub use error::{Attempt, CudaError, Result};
pub use gpu::{Gpu, Kernel, Memory, compiled, options};
pub use kernels::Kernels;
pub use nvrtc::{Cubin, Nvrtc};
pub use slice::{DType, DeviceSlice};
pub use staging::LateRead;

/// Memory instructions and conversions in PTX: the first part of every source given to NVRTC.
pub const PTX_H: &str = include_str!("ptx.h");

/// Element types, packs of 16 bytes, warps, sums in a fixed order: the part between [`PTX_H`] and
/// the kernels.
pub const DEVICE_H: &str = include_str!("device.h");

/// Tests the examples of the README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
