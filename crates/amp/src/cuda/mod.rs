//! Casts and the loss scale on an NVIDIA GPU (feature `cuda`).
//!
//! [`cast`] has the bits of [`amp::cast`](crate::cast()). [`CudaScaler`] is a
//! [`LossScaler`] whose scale, growth count and verdict lie on the device: nothing
//! waits for the host, and the launches can be captured in a CUDA graph. The tests compile the kernels
//! for the CPU and compare.
//!
//! Building needs nothing of CUDA. At run time the driver (`libcuda.so.1`) and NVRTC are opened; if one
//! is missing or too old the error says where it was looked for and what to install. `$NVRTC_LIBRARY`
//! is the path of an NVRTC elsewhere. Compiled kernels are kept in `$CUBIN_CACHE` (empty: nowhere), or
//! under `cuda-rt/cubin` in the user's cache; where that folder has them ([`compile_for`]), NVRTC is not
//! needed.
//!
//! ```no_run
//! use amp::cuda::{CudaScaler, DType, DeviceSlice, Gpu};
//! use amp::{LossScaler, LossScalerOptions};
//!
//! # let grad = 0;
//! let scaler = LossScaler::new(LossScalerOptions::default())?;
//! let mut scaler = CudaScaler::new(Gpu::new(0)?, &scaler)?;
//! // SAFETY: there are so many elements at this address, until the next `bind`.
//! unsafe { scaler.bind(&[DeviceSlice { ptr: grad, len: 1 << 20, dtype: DType::F32 }]) }?;
//! // SAFETY: nobody else uses them on another stream meanwhile.
//! unsafe { scaler.unscale() }?;
//! scaler.update()?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#[cfg(test)]
mod gate_tests;
mod scaler;
#[cfg(test)]
mod tests;

use cuda_rt::Device;
pub use cuda_rt::{Attempt, Cubin, CudaError, DType, DeviceSlice, Gpu, Nvrtc};

use crate::LossScaler;
use scaler::Scaler;
pub use scaler::Status;

/// Casts element by element, as [`amp::cast`](crate::cast()) does, in order of the stream.
///
/// # Errors
///
/// [`CudaError::Unsupported`] for lengths that differ, or an address between two elements; and the driver's.
///
/// # Safety
///
/// Both must lie where they say until the stream has come this far, and not overlap.
#[expect(unsafe_code, reason = "an address is only a number")]
pub unsafe fn cast(gpu: &Gpu, from: DeviceSlice, to: DeviceSlice) -> Result<(), CudaError> {
    // SAFETY: the caller vouches for both.
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
        return Err(CudaError::Unsupported { what: "a cast between different lengths" });
    }
    let types = [number(from)?, number(to)?];
    if from.len == 0 {
        return Ok(());
    }
    // Packs of 4 or 8 by 256 threads, four times.
    let blocks = u32::try_from(from.len.div_ceil(8 * 256 * 4)).unwrap_or(u32::MAX);
    let blocks = blocks.min(device.processors() * BLOCKS_PER_PROCESSOR);
    let key = ("cast", (3 * types[0] + types[1]) as usize);
    let kernel = device.kept(key, || Program { cast: Some(types) }.kernel(device, "cast"))?;
    // SAFETY: a `CastJob`; the caller vouches for both addresses.
    unsafe { device.launch(&kernel, blocks, &[from.ptr, to.ptr, from.len as u64]) }
}

/// Compiles all kernels of this crate for devices of an architecture (90 is compute capability 9.0) and
/// keeps them where compiled kernels are kept: a machine that is given that folder needs no NVRTC. Needs
/// no GPU and no driver.
///
/// # Errors
///
/// NVRTC's.
pub fn compile_for(arch: i32) -> Result<(), CudaError> {
    let pairs = (0..3).flat_map(|from| (0..3).map(move |to| Some([from, to])));
    for cast in pairs.chain([None]) {
        cuda_rt::compiled(Program::SOURCE, &Program { cast }.macros(), arch)?;
    }
    Ok(())
}

/// A loss scale on a device.
#[derive(Debug)]
pub struct CudaScaler(Scaler<Gpu>);

impl CudaScaler {
    /// A copy of a scaler, that goes on from there.
    ///
    /// # Errors
    ///
    /// The driver's and NVRTC's.
    pub fn new(gpu: Gpu, scaler: &LossScaler) -> Result<Self, CudaError> {
        Ok(Self(Scaler::new(gpu, scaler)?))
    }

    /// Says where the gradients are; at any time again.
    ///
    /// # Errors
    ///
    /// As [`cast`].
    ///
    /// # Safety
    ///
    /// What `grads` say must be so until the next `bind`.
    #[expect(unsafe_code, reason = "an address is only a number")]
    pub unsafe fn bind(&mut self, grads: &[DeviceSlice]) -> Result<(), CudaError> {
        self.0.bind(&[grads])
    }

    /// As [`bind`](Self::bind), with the gradients in parts that may be looked at one by one: buckets,
    /// each behind its all-reduce and while it is in the device's cache.
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

    /// As [`LossScaler::unscale`] over all gradients. The verdict is kept until [`update`](Self::update), with
    /// that of earlier calls.
    ///
    /// # Errors
    ///
    /// [`CudaError::Unsupported`] if a gradient is f16 or bf16, where quotients could underflow; nothing has changed
    /// then. And the driver's.
    ///
    /// # Safety
    ///
    /// The gradients must be where `bind` was told, and nobody else may use them until the stream has
    /// come this far.
    #[expect(unsafe_code, reason = "kernels write where `bind` was told")]
    pub unsafe fn unscale(&mut self) -> Result<(), CudaError> {
        // SAFETY: the caller vouches for the gradients.
        unsafe { self.0.look(true) }
    }

    /// Looks at all gradients, and writes none.
    ///
    /// # Errors
    ///
    /// The driver's.
    ///
    /// # Safety
    ///
    /// As [`unscale`](Self::unscale).
    #[expect(unsafe_code, reason = "kernels read where `bind` was told")]
    pub unsafe fn check(&mut self) -> Result<(), CudaError> {
        // SAFETY: the caller vouches for the gradients.
        unsafe { self.0.look(false) }
    }

    /// As [`check`](Self::check) of one part alone. The verdict is one of all parts looked at since
    /// [`update`](Self::update); the norm is of part 0 and those that were looked at after it, their
    /// squares added in this order.
    ///
    /// # Errors
    ///
    /// [`CudaError::Unsupported`] if there is no such part; the driver's.
    ///
    /// # Safety
    ///
    /// As [`unscale`](Self::unscale), of the gradients of this part.
    #[expect(unsafe_code, reason = "kernels read where `bind` was told")]
    pub unsafe fn check_part(&mut self, part: usize) -> Result<(), CudaError> {
        // SAFETY: the caller vouches for the gradients.
        unsafe { self.0.look_at(part, false) }
    }

    /// Moves the scale by the verdict, as [`LossScaler::update`], and forgets the verdict.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn update(&mut self) -> Result<(), CudaError> {
        self.0.update()
    }

    /// Where the verdict is, a `u32` that is not 0 if a gradient overflowed: what an optimizer's step
    /// is to be skipped by, or is reduced over ranks before.
    #[must_use]
    pub fn found_inf_address(&self) -> u64 {
        self.0.found_inf_address()
    }

    /// Where the scale is, an `f32`, for whoever multiplies the loss by it.
    #[must_use]
    pub fn scale_address(&self) -> u64 {
        self.0.scale_address()
    }

    /// What the device knows. Waits for it.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn status(&self) -> Result<Status, CudaError> {
        self.0.status()
    }
}

/// Kernels that are compiled together: `cast` between two types, or all others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Program {
    cast: Option<[u32; 2]>,
}

impl Program {
    const SCALER: Self = Self { cast: None };

    /// Macros, as a compiler takes them.
    fn macros(self) -> Vec<String> {
        let name = |number: u32| ["F32", "F16", "Bf16"][number as usize];
        let Some([from, to]) = self.cast.map(|types| types.map(name)) else { return Vec::new() };
        vec![format!("-DFROM={from}"), format!("-DTO={to}")]
    }

    fn kernel<D: Device>(self, device: &D, name: &str) -> Result<D::Kernel, CudaError> {
        device.kernel(Self::SOURCE, &self.macros(), name)
    }

    /// The kernels.
    const SOURCE: &'static str = include_str!("amp.cu");
}

/// The number a type has in kernels, if the slice can be given to one.
fn number(slice: DeviceSlice) -> Result<u32, CudaError> {
    if !slice.ptr.is_multiple_of(slice.dtype.size() as u64) {
        return Err(CudaError::Unsupported { what: "an address between two elements" });
    }
    Ok(slice.dtype.number())
}

/// Blocks of 256 threads that hide the latency of memory; more only wait for each other.
const BLOCKS_PER_PROCESSOR: u32 = 4;
