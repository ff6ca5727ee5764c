//! Casts and the loss scale on an NVIDIA GPU (feature `cuda`).
//!
//! [`cast`] gives the same bits as [`amp::cast`](crate::cast()). [`CudaScaler`] is a [`LossScaler`]
//! whose scale, growth count and `found_inf` are in device memory: it never synchronizes with the
//! host, and its launches can be captured in a CUDA graph. The tests compile the kernels for the
//! CPU and compare.
//!
//! Building needs no CUDA. The driver (`libcuda.so.1`) and NVRTC are loaded at run time; if one is
//! missing or too old, the error lists the searched paths and what to install. `$NVRTC_LIBRARY`
//! sets the path of NVRTC. Compiled kernels are cached in `$CUBIN_CACHE` (empty: not cached), by
//! default in `cuda-rt/cubin` in the user's cache folder; with a cache filled by [`compile_for`],
//! NVRTC is not needed.
//!
//! ```no_run
//! use amp::cuda::{CudaScaler, DType, DeviceSlice, Gpu};
//! use amp::{LossScaler, LossScalerOptions};
//!
//! # let grad = 0;
//! let scaler = LossScaler::new(LossScalerOptions::default())?;
//! let mut scaler = CudaScaler::new(Gpu::new(0)?, &scaler)?;
//! // SAFETY: the elements stay at this address until the next `bind`.
//! unsafe { scaler.bind(&[DeviceSlice { ptr: grad, len: 1 << 20, dtype: DType::F32 }]) }?;
//! // SAFETY: no other stream uses them meanwhile.
//! unsafe { scaler.unscale() }?;
//! scaler.update()?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#[cfg(test)]
mod machine_code_tests;
mod scaler;
#[cfg(test)]
mod tests;

use cuda_rt::Device;
pub use cuda_rt::{Attempt, Cubin, CudaError, DType, DeviceSlice, Gpu, Nvrtc};

use crate::LossScaler;
use scaler::Scaler;
pub use scaler::Status;

/// Casts element by element, as [`amp::cast`](crate::cast()) does; enqueued on the stream.
///
/// # Errors
///
/// [`CudaError::LengthMismatch`]; [`CudaError::Misaligned`]; those of the driver.
///
/// # Safety
///
/// Both slices must be valid until the kernel has run, and must not overlap.
#[expect(unsafe_code, reason = "an address is only a number")]
pub unsafe fn cast(gpu: &Gpu, from: DeviceSlice, to: DeviceSlice) -> Result<(), CudaError> {
    // SAFETY: the caller guarantees both slices.
    unsafe { cast_on(gpu, from, to) }
}

/// # Safety
///
/// As [`cast`].
#[expect(unsafe_code, reason = "an address is only a number")]
unsafe fn cast_on<D: Device>(
    device: &D,
    from: DeviceSlice,
    to: DeviceSlice,
) -> Result<(), CudaError> {
    if from.len != to.len {
        return Err(CudaError::LengthMismatch { expected: from.len, got: to.len });
    }
    let types = [number(from)?, number(to)?];
    if from.len == 0 {
        return Ok(());
    }
    // Each of 256 threads casts four packs of 4 or 8 elements at once.
    let blocks = u32::try_from(from.len.div_ceil(4 * 256 * 4)).unwrap_or(u32::MAX);
    let blocks = blocks.min(device.processors() * BLOCKS_PER_PROCESSOR);
    let key = ("cast", (3 * types[0] + types[1]) as usize);
    let kernel =
        device.cached_kernel(key, || Program { cast: Some(types) }.kernel(device, "cast"))?;
    // SAFETY: the argument is a `CastJob`; the caller guarantees both addresses.
    unsafe { device.launch(&kernel, blocks, &[from.ptr, to.ptr, from.len as u64]) }
}

/// Compiles all kernels of this crate for an architecture (90 is compute capability 9.0) into the
/// cache of compiled kernels. A machine with a copy of that folder needs no NVRTC. Needs no GPU and
/// no driver.
///
/// # Errors
///
/// Those of NVRTC.
pub fn compile_for(arch: i32) -> Result<(), CudaError> {
    let pairs = (0..3).flat_map(|from| (0..3).map(move |to| Some([from, to])));
    for cast in pairs.chain([None]) {
        cuda_rt::compiled(Program::SOURCE, &Program { cast }.macros(), arch)?;
    }
    Ok(())
}

/// A loss scaler with its state in device memory.
#[derive(Debug)]
pub struct CudaScaler(Scaler<Gpu>);

impl CudaScaler {
    /// Copies the state of `scaler` to the device.
    ///
    /// # Errors
    ///
    /// Those of the driver and NVRTC.
    pub fn new(gpu: Gpu, scaler: &LossScaler) -> Result<Self, CudaError> {
        Ok(Self(Scaler::new(gpu, scaler)?))
    }

    /// Sets the gradients. It may be called again at any time.
    ///
    /// # Errors
    ///
    /// [`CudaError::Misaligned`]; those of the driver.
    ///
    /// # Safety
    ///
    /// `grads` must be valid until the next `bind`.
    #[expect(unsafe_code, reason = "an address is only a number")]
    pub unsafe fn bind(&mut self, grads: &[DeviceSlice]) -> Result<(), CudaError> {
        self.0.bind(&[grads])
    }

    /// As [`bind`](Self::bind), with the gradients in parts for [`check_part`](Self::check_part):
    /// for example buckets, each checked after its all-reduce, while it is in the device's cache.
    ///
    /// # Errors
    ///
    /// As [`bind`](Self::bind).
    ///
    /// # Safety
    ///
    /// As [`bind`](Self::bind).
    #[expect(unsafe_code, reason = "an address is only a number")]
    pub unsafe fn bind_parts(&mut self, parts: &[&[DeviceSlice]]) -> Result<(), CudaError> {
        self.0.bind(parts)
    }

    /// Unscales all gradients, as [`LossScaler::unscale`]. `found_inf` accumulates over calls until
    /// [`update`](Self::update).
    ///
    /// # Errors
    ///
    /// [`CudaError::Unsupported`] if a gradient is f16 or bf16, which could underflow; nothing has
    /// changed then. [`CudaError::NotBound`]; those of the driver.
    ///
    /// # Safety
    ///
    /// The bound gradients must be valid, and nothing else may use them until the kernel has run.
    #[expect(unsafe_code, reason = "kernels write to the bound gradients")]
    pub unsafe fn unscale(&mut self) -> Result<(), CudaError> {
        // SAFETY: the caller guarantees the gradients.
        unsafe { self.0.check(true) }
    }

    /// Checks all gradients for overflow without writing them.
    ///
    /// # Errors
    ///
    /// [`CudaError::NotBound`]; those of the driver.
    ///
    /// # Safety
    ///
    /// As [`unscale`](Self::unscale).
    #[expect(unsafe_code, reason = "kernels read the bound gradients")]
    pub unsafe fn check(&mut self) -> Result<(), CudaError> {
        // SAFETY: the caller guarantees the gradients.
        unsafe { self.0.check(false) }
    }

    /// As [`check`](Self::check), for one part. `found_inf` accumulates over all parts until
    /// [`update`](Self::update). The norm covers part 0 and the parts checked after it; their
    /// squares are added in the order of the calls.
    ///
    /// # Errors
    ///
    /// [`CudaError::NotBound`] if there is no such part; those of the driver.
    ///
    /// # Safety
    ///
    /// As [`unscale`](Self::unscale), for the gradients of this part.
    #[expect(unsafe_code, reason = "kernels read the bound gradients")]
    pub unsafe fn check_part(&mut self, part: usize) -> Result<(), CudaError> {
        // SAFETY: the caller guarantees the gradients.
        unsafe { self.0.check_part(part, false) }
    }

    /// Updates the scale, as [`LossScaler::update`], and clears `found_inf`.
    ///
    /// # Errors
    ///
    /// Those of the driver.
    pub fn update(&mut self) -> Result<(), CudaError> {
        self.0.update()
    }

    /// The device address of `found_inf`, a `u32` that is not 0 if a gradient overflowed. An
    /// optimizer skips its step by it; with several ranks it is reduced before.
    #[must_use]
    pub fn found_inf_address(&self) -> u64 {
        self.0.found_inf_address()
    }

    /// The device address of the scale, an `f32`.
    #[must_use]
    pub fn scale_address(&self) -> u64 {
        self.0.scale_address()
    }

    /// Copies the state to the host. Blocks until the stream has reached this call.
    ///
    /// # Errors
    ///
    /// Those of the driver.
    pub fn status(&self) -> Result<Status, CudaError> {
        self.0.status()
    }
}

/// Kernels that are compiled together: `cast` between two types, or (with `None`) all others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Program {
    cast: Option<[u32; 2]>,
}

impl Program {
    const SCALER: Self = Self { cast: None };

    /// Compiler options that define the macros of `amp.cu`.
    fn macros(self) -> Vec<String> {
        let name = |number: u32| ["F32", "F16", "Bf16"][number as usize];
        let Some([from, to]) = self.cast.map(|types| types.map(name)) else { return Vec::new() };
        vec![format!("-DFROM={from}"), format!("-DTO={to}")]
    }

    fn kernel<D: Device>(self, device: &D, name: &str) -> Result<D::Kernel, CudaError> {
        device.kernel(Self::SOURCE, &self.macros(), name)
    }

    const SOURCE: &'static str = include_str!("amp.cu");
}

/// The kernels' number of the slice's type.
fn number(slice: DeviceSlice) -> Result<u32, CudaError> {
    if !slice.ptr.is_multiple_of(slice.dtype.size() as u64) {
        return Err(CudaError::Misaligned { ptr: slice.ptr, dtype: slice.dtype });
    }
    Ok(slice.dtype.number())
}

/// Blocks of 256 threads for each multiprocessor: enough to hide the latency of memory.
const BLOCKS_PER_PROCESSOR: u32 = 4;
