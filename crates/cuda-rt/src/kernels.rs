//! A set of kernels that is compiled together and launched by number.

use std::sync::Arc;

use cudarc::driver::CudaStream;

use crate::device::Device;
use crate::driver::{Gpu, Kernel};
use crate::error::Result;

/// Kernels that are compiled together, ready to be launched in one stream.
///
/// Their source stands behind [`PTX_H`](crate::PTX_H) and [`DEVICE_H`](crate::DEVICE_H): element types, packs of 16 bytes, warps. Each
/// is a line `extern "C" __global__ void __launch_bounds__(THREADS, 2) name(const Job job)` over one struct, in
/// blocks of 256 threads. They are compiled without contraction of `a * b + c`.
#[derive(Debug)]
pub struct Kernels {
    gpu: Gpu,
    kernels: Vec<Kernel>,
}

impl Kernels {
    /// Compiles `source` under macros (`-DNAME=VALUE`) for the device of a stream, if it is not on disk already,
    /// and looks up the kernels.
    ///
    /// # Errors
    ///
    /// Those of [`Gpu::on`] and [`Nvrtc`](crate::Nvrtc); [`CudaError::Driver`](crate::CudaError::Driver) for a name that
    /// is none of them.
    pub fn new(
        stream: Arc<CudaStream>,
        source: &str,
        macros: &[String],
        names: &[&str],
    ) -> Result<Self> {
        let gpu = Gpu::on(stream)?;
        let look_up = |name: &&str| gpu.kernel(source, macros, name);
        let kernels = names.iter().map(look_up).collect::<Result<_>>()?;
        Ok(Self { gpu, kernels })
    }

    /// What the compiler sees of `source`.
    #[must_use]
    pub fn source(source: &str) -> String {
        [crate::PTX_H, crate::DEVICE_H, source].concat()
    }

    /// Starts `blocks` blocks of the `kernel`-th of the names given, in order of the stream; returns before it is done.
    ///
    /// # Errors
    ///
    /// [`CudaError::Driver`](crate::CudaError::Driver).
    ///
    /// # Panics
    ///
    /// If there are not so many names, or `blocks` is 0.
    ///
    /// # Safety
    ///
    /// `argument` must be the kernel's struct, in words of 8 bytes, and all that it points to must be what the
    /// kernel takes it for until the stream has come this far.
    #[expect(unsafe_code, reason = "a kernel writes wherever its argument says")]
    pub unsafe fn launch(&self, kernel: usize, blocks: u32, argument: &[u64]) -> Result<()> {
        assert!(blocks > 0, "a launch of no blocks");
        // SAFETY: the caller vouches for the argument.
        unsafe { self.gpu.launch(&self.kernels[kernel], blocks, argument) }
    }
}
