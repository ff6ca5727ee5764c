//! A set of kernels that are compiled together and launched by index.

use std::sync::Arc;

use cudarc::driver::CudaStream;

use crate::device::Device;
use crate::error::Result;
use crate::gpu::{Gpu, Kernel, with_headers};

/// Kernels that are compiled together and launched on one stream.
///
/// Their source is compiled after [`PTX_H`](crate::PTX_H) and [`DEVICE_H`](crate::DEVICE_H), which
/// have element types, packs of 16 bytes and warps. Each kernel is declared as
/// `extern "C" __global__ void __launch_bounds__(THREADS, 2) name(const Job job)`, with one struct
/// as argument, and runs in blocks of 256 threads. They are compiled without contraction of
/// `a * b + c`.
#[derive(Debug)]
pub struct Kernels {
    gpu: Gpu,
    kernels: Vec<Kernel>,
}

impl Kernels {
    /// Compiles `source` with macros (`-DNAME=VALUE`) for the device of a stream, unless it is
    /// cached on disk, and looks up the kernels.
    ///
    /// # Errors
    ///
    /// Those of [`Gpu::on`] and [`Nvrtc`](crate::Nvrtc);
    /// [`CudaError::Driver`](crate::CudaError::Driver) for an unknown name.
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

    /// The compiler's input for `source`: with both headers.
    #[must_use]
    pub fn source(source: &str) -> String {
        with_headers(source)
    }

    /// Launches `blocks` blocks of kernel number `kernel` in the names given to [`new`](Self::new);
    /// enqueued on the stream.
    ///
    /// # Errors
    ///
    /// [`CudaError::Driver`](crate::CudaError::Driver).
    ///
    /// # Panics
    ///
    /// If `kernel` is out of range or `blocks` is 0.
    ///
    /// # Safety
    ///
    /// `argument` must be the kernel's struct, in words of 8 bytes, and all memory that it points
    /// to must be valid until the kernel has run.
    #[expect(unsafe_code, reason = "a kernel accesses the memory that its argument points to")]
    pub unsafe fn launch(&self, kernel: usize, blocks: u32, argument: &[u64]) -> Result<()> {
        assert!(blocks > 0, "launch of 0 blocks");
        // SAFETY: the caller guarantees the argument.
        unsafe { self.gpu.launch(&self.kernels[kernel], blocks, argument) }
    }
}
