//! CUDA without a toolkit: a GPU's memory, copies and kernel launches, with the driver and NVRTC loaded at run
//! time.
//!
//! Nothing of CUDA is needed to build. [`Gpu`] is a device and one stream on it, a [`Device`]. [`Kernels`] compiles CUDA C++
//! with [`Nvrtc`], keeps the machine code on disk, and launches it. [`DeviceSlice`] says where elements lie in a
//! device's memory; it comes of a slice of cudarc's or, with the feature `candle`, of a tensor of candle's. A
//! missing or outdated library is a [`CudaError`] that names every path that was tried and what to install.
//!
//! Crates that share this one share the types, the loaded libraries and the cache of compiled kernels.
//!
//! # Environment
//!
//! | variable | meaning |
//! |---|---|
//! | `NVRTC_LIBRARY` | path of NVRTC, used instead of all others |
//! | `CUBIN_CACHE` | folder of compiled kernels; empty: none. Default: `cuda-rt/cubin` in the user's cache folder |
//!
//! # Bits
//!
//! Kernels are compiled without contraction of `a * b + c` and without flushing subnormals, and with correctly
//! rounded quotients and roots, so that a kernel and the same lines in Rust have the same bits. [`DEVICE_H`] has
//! element types, packs of 16 bytes, and sums in a fixed order on top of that. With the feature `testing` the same
//! source runs on the CPU, as kernels of a `testing::Host`.

mod cache;
#[cfg(feature = "candle")]
mod candle;
mod device;
mod driver;
mod error;
mod kernels;
pub mod library;
mod nvrtc;
mod slice;
mod staging;
#[cfg(feature = "testing")]
pub mod testing;

pub use cache::{Entry, folder as cache_folder};
pub use device::Device;
pub use driver::{Gpu, Kernel, Memory, compiled, options};
pub use error::{Attempt, CudaError, Result};
pub use kernels::Kernels;
pub use nvrtc::{Cubin, Nvrtc};
pub use slice::{DType, DeviceSlice};

/// Memory instructions and conversions in PTX: the first part of every source given to NVRTC.
pub const PTX_H: &str = include_str!("ptx.h");

/// Element types, packs of 16 bytes, warps, sums in a fixed order: stands between [`PTX_H`] and the kernels.
pub const DEVICE_H: &str = include_str!("device.h");
