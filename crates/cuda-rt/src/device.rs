//! The trait `Device`: code that is generic over it runs on a GPU and, in tests, on the host.

use std::fmt;
use std::ops::Range;

use crate::error::Result;

/// A device and one stream, which runs all operations in order: a [`Gpu`](crate::Gpu), or
/// `testing::TestDevice` in tests.
pub trait Device: Clone + fmt::Debug {
    /// Device memory, freed when dropped.
    type Memory: fmt::Debug;
    /// A loaded kernel.
    type Kernel: Clone + fmt::Debug;

    /// Allocates zeroed memory; its address is a multiple of 256. `bytes` may be 0.
    ///
    /// # Errors
    ///
    /// [`CudaError::Driver`](crate::CudaError::Driver).
    fn alloc(&self, bytes: usize) -> Result<Self::Memory>;

    /// The memory's address; 0 on a GPU if it has no bytes.
    fn address(memory: &Self::Memory) -> u64;

    /// Copies to the device; enqueued on the stream. `bytes` may be changed after the return.
    ///
    /// # Errors
    ///
    /// [`CudaError::Driver`](crate::CudaError::Driver);
    /// [`CudaError::Capturing`](crate::CudaError::Capturing) during stream capture.
    ///
    /// # Panics
    ///
    /// If `at + bytes.len()` is past the end of the memory.
    fn write(&self, memory: &mut Self::Memory, at: usize, bytes: &[u8]) -> Result<()>;

    /// Sets words of 4 bytes to `value`; enqueued on the stream.
    ///
    /// # Errors
    ///
    /// [`CudaError::Driver`](crate::CudaError::Driver).
    ///
    /// # Panics
    ///
    /// If `words` is past the end of the memory.
    fn fill(&self, memory: &mut Self::Memory, words: Range<usize>, value: u32) -> Result<()>;

    /// Copies from the device. Blocks until the copy is done.
    ///
    /// # Errors
    ///
    /// [`CudaError::Driver`](crate::CudaError::Driver).
    ///
    /// # Panics
    ///
    /// If `at + bytes.len()` is past the end of the memory.
    fn read(&self, memory: &Self::Memory, at: usize, bytes: &mut [u8]) -> Result<()>;

    /// The device's name, for example `NVIDIA H200, sm_90`.
    ///
    /// # Errors
    ///
    /// [`CudaError::Driver`](crate::CudaError::Driver).
    fn name(&self) -> Result<String>;

    /// Number of multiprocessors.
    fn processors(&self) -> u32;

    /// Compiles `source` after [`PTX_H`](crate::PTX_H) and [`DEVICE_H`](crate::DEVICE_H) with
    /// macros (`-DNAME=VALUE`), unless it is loaded or cached on disk, and looks up a kernel.
    ///
    /// # Errors
    ///
    /// Those of [`compiled`](crate::compiled), and [`CudaError::Driver`](crate::CudaError::Driver).
    ///
    /// # Panics
    ///
    /// If `name` contains a NUL.
    fn kernel(&self, source: &str, macros: &[String], name: &str) -> Result<Self::Kernel>;

    /// Returns the kernel cached under `key`: the first call looks it up, further calls read it
    /// without a lock. For functions without a struct that holds the kernel.
    ///
    /// # Errors
    ///
    /// Those of `look_up`.
    fn cached_kernel(
        &self,
        key: (&'static str, usize),
        look_up: impl FnOnce() -> Result<Self::Kernel>,
    ) -> Result<Self::Kernel>;

    /// Launches `blocks` blocks of 256 threads; enqueued on the stream. `argument` is a struct in
    /// words of 8 bytes.
    ///
    /// # Errors
    ///
    /// [`CudaError::Driver`](crate::CudaError::Driver).
    ///
    /// # Safety
    ///
    /// The kernel must take a struct of this layout, and all memory that it points to must be valid
    /// until the kernel has run.
    #[expect(unsafe_code, reason = "a kernel accesses the memory that its argument points to")]
    unsafe fn launch(&self, kernel: &Self::Kernel, blocks: u32, argument: &[u64]) -> Result<()>;
}
