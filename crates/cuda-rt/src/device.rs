//! What kernels need of a device, so that the same code drives a GPU and, in tests, the host.

use std::fmt;
use std::ops::Range;

use crate::error::Result;

/// A device with one stream, on which everything is done in order: a [`Gpu`](crate::Gpu), or in tests
/// `testing::Host`.
pub trait Device: Clone + fmt::Debug {
    /// Memory of the device, freed when dropped.
    type Memory: fmt::Debug;
    /// A kernel that is ready to be launched.
    type Kernel: Clone + fmt::Debug;

    /// Allocates memory of zeros; its address is a multiple of 256. `bytes` may be 0.
    ///
    /// # Errors
    ///
    /// [`CudaError::Driver`](crate::CudaError::Driver).
    fn alloc(&self, bytes: usize) -> Result<Self::Memory>;

    /// The memory's address; 0 on a GPU if it has no bytes.
    fn address(memory: &Self::Memory) -> u64;

    /// Copies to the device, in order of the stream. `bytes` may change at once.
    ///
    /// # Errors
    ///
    /// [`CudaError::Driver`](crate::CudaError::Driver); [`CudaError::Capturing`](crate::CudaError::Capturing) while the
    /// stream is captured.
    ///
    /// # Panics
    ///
    /// If `at + bytes.len()` is past the end of the memory.
    fn write(&self, memory: &mut Self::Memory, at: usize, bytes: &[u8]) -> Result<()>;

    /// Sets words of 4 bytes of the memory to `value`, in order of the stream.
    ///
    /// # Errors
    ///
    /// [`CudaError::Driver`](crate::CudaError::Driver).
    ///
    /// # Panics
    ///
    /// If the words are past the end of the memory.
    fn fill(&self, memory: &mut Self::Memory, words: Range<usize>, value: u32) -> Result<()>;

    /// Copies from the device, and waits for that.
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
    /// [`CudaError::Driver`](crate::CudaError::Driver) if the driver does not say.
    fn name(&self) -> Result<String>;

    /// Number of multiprocessors.
    fn processors(&self) -> u32;

    /// Compiles `source` under macros (`-DNAME=VALUE`), if it is not in memory or on disk already, and looks up one of
    /// its kernels. It stands behind [`PTX_H`](crate::PTX_H) and [`DEVICE_H`](crate::DEVICE_H).
    ///
    /// # Errors
    ///
    /// Those of [`compiled`](crate::compiled), and [`CudaError::Driver`](crate::CudaError::Driver).
    ///
    /// # Panics
    ///
    /// If `name` has a NUL.
    fn kernel(&self, source: &str, macros: &[String], name: &str) -> Result<Self::Kernel>;

    /// The kernel that is kept under this key: looked up by the first call, read without a lock by all others. For
    /// functions that have no place of their own to keep one.
    ///
    /// # Errors
    ///
    /// Those of `look_up`.
    fn kept(
        &self,
        key: (&'static str, usize),
        look_up: impl FnOnce() -> Result<Self::Kernel>,
    ) -> Result<Self::Kernel>;

    /// Starts blocks of 256 threads with one argument, a struct in words of 8 bytes, in order of the stream; returns
    /// before they are done.
    ///
    /// # Errors
    ///
    /// [`CudaError::Driver`](crate::CudaError::Driver).
    ///
    /// # Safety
    ///
    /// The kernel must take a struct of this layout, and all it points to must be what the kernel takes it for until
    /// the stream has come this far.
    #[expect(unsafe_code, reason = "a kernel writes wherever its argument says")]
    unsafe fn launch(&self, kernel: &Self::Kernel, blocks: u32, argument: &[u64]) -> Result<()>;
}
