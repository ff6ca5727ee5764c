//! The loss scaler on a device.

use cuda_rt::Device;

use super::{BLOCKS_PER_PROCESSOR, CudaError, DType, DeviceSlice, Program, number};
use crate::{LossScaler, Policy};

/// The state of a [`CudaScaler`](super::CudaScaler).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Status {
    /// The scale.
    pub scale: f32,
    /// Number of steps without overflow since the scale last changed.
    pub growth_tracker: u64,
    /// Whether a gradient overflowed since the last update.
    pub found_inf: bool,
    /// Whether gradients have overflowed at the smallest scale, which is
    /// [`Error::ScaleAtFloor`](crate::Error::ScaleAtFloor) on the CPU.
    pub at_floor: bool,
    /// The Euclidean norm of all unscaled gradients at the last check, summed in f64 in an order
    /// that depends only on the lengths.
    pub norm: f64,
}

/// A loss scaler on device `D`.
#[derive(Debug)]
pub(super) struct Scaler<D: Device> {
    pub(super) device: D,
    unscale: D::Kernel,
    update: D::Kernel,
    state: D::Memory,
    /// One table for each part of the gradients.
    parts: Vec<Tables<D::Memory>>,
}

#[derive(Debug)]
struct Tables<M> {
    tensors: M,
    chunks: M,
    sums: M,
    count: u32,
    /// Whether a gradient is f16 or bf16.
    halves: bool,
}

/// Offsets in `Scaler` of `amp.cu`, and its size.
const TRACKER: usize = 32;
const NORM: usize = 40;
const SCALE: usize = 56;
const FOUND_INF: usize = 60;
const AT_FLOOR: usize = 64;
const BYTES: usize = 80;
/// Flags of a launch of `unscale`, as in `amp.cu`.
const WRITES: u32 = 1;
const ADDS: u32 = 2;
/// Elements that one warp sums: `SPAN` of `device.h`.
const SPAN: usize = 1 << 14;

impl<D: Device> Scaler<D> {
    pub(super) fn new(device: D, scaler: &LossScaler) -> Result<Self, CudaError> {
        let mut bytes = Vec::new();
        let options = scaler.options().unwrap_or_default();
        let floor = match options.policy {
            Policy::Guarded { min_scale } => min_scale,
            Policy::Torch => -1.0,
        };
        let interval = options.growth_interval as f64;
        for number in [options.growth_factor, options.backoff_factor, interval] {
            bytes.extend(number.to_ne_bytes());
        }
        bytes.extend(floor.to_ne_bytes());
        bytes.extend(u32::from(scaler.options().is_some()).to_ne_bytes());
        bytes.extend(scaler.growth_tracker().to_ne_bytes());
        bytes.extend([0.0_f64; 2].iter().flat_map(|number| number.to_ne_bytes()));
        bytes.extend(scaler.scale().to_ne_bytes());
        bytes.resize(BYTES, 0);
        let unscale = Program::SCALER.kernel(&device, "unscale")?;
        let update = Program::SCALER.kernel(&device, "update")?;
        let mut state = device.alloc(BYTES)?;
        device.write(&mut state, 0, &bytes)?;
        Ok(Self { device, unscale, update, state, parts: Vec::new() })
    }

    pub(super) fn bind(&mut self, parts: &[&[DeviceSlice]]) -> Result<(), CudaError> {
        self.parts = parts.iter().map(|grads| self.tables(grads)).collect::<Result<_, _>>()?;
        Ok(())
    }

    fn tables(&self, grads: &[DeviceSlice]) -> Result<Tables<D::Memory>, CudaError> {
        let (mut tensors, mut chunks) = (Vec::new(), Vec::new());
        let mut count = 0;
        for (at, grad) in grads.iter().enumerate() {
            tensors.extend([grad.ptr, grad.len as u64, u64::from(number(*grad)?)]);
            for index in 0..grad.len.div_ceil(SPAN) {
                chunks.extend([at as u32, index as u32]);
                count += 1;
            }
        }
        let tensors: Vec<u8> = tensors.iter().flat_map(|word| word.to_ne_bytes()).collect();
        let chunks: Vec<u8> = chunks.iter().flat_map(|word| word.to_ne_bytes()).collect();
        // Behind the sums, what kernels count.
        let sums = self.device.alloc(12 * count as usize)?;
        let send = |bytes: &[u8]| {
            let mut memory = self.device.alloc(bytes.len())?;
            self.device.write(&mut memory, 0, bytes)?;
            Ok(memory)
        };
        let halves = grads.iter().any(|grad| grad.dtype != DType::F32);
        Ok(Tables { tensors: send(&tensors)?, chunks: send(&chunks)?, sums, count, halves })
    }

    /// Checks all parts in order, and unscales them if `write`.
    ///
    /// # Safety
    ///
    /// As [`check_part`](Self::check_part).
    #[expect(unsafe_code, reason = "kernels write to the bound gradients")]
    pub(super) unsafe fn check(&mut self, write: bool) -> Result<(), CudaError> {
        if write && self.parts.iter().any(|part| part.halves) {
            return Err(CudaError::Unsupported {
                what: "unscaling f16 or bf16 gradients in place, where they could underflow (use `check`),",
            });
        }
        // Without parts, part 0 gives the error.
        (0..self.parts.len().max(1)).try_for_each(|part| {
            // SAFETY: the caller guarantees the gradients.
            unsafe { self.check_part(part, write) }
        })
    }

    /// # Safety
    ///
    /// The bound gradients must be valid until the kernel has run.
    #[expect(unsafe_code, reason = "kernels write to the bound gradients")]
    pub(super) unsafe fn check_part(&mut self, part: usize, write: bool) -> Result<(), CudaError> {
        let Some(tables) = self.parts.get(part) else {
            return Err(CudaError::NotBound { part });
        };
        let how = if write { WRITES } else { 0 } | if part > 0 { ADDS } else { 0 };
        let job = [
            D::address(&tables.tensors),
            D::address(&tables.chunks),
            D::address(&tables.sums),
            D::address(&self.state),
            pair(tables.count, how),
        ];
        let most = self.device.processors() * BLOCKS_PER_PROCESSOR;
        let blocks = tables.count.div_ceil(8).clamp(1, most);
        // SAFETY: the argument is an `UnscaleJob` with tables that live as long as `self`; the
        // caller guarantees the gradients.
        unsafe { self.device.launch(&self.unscale, blocks, &job) }
    }

    #[expect(unsafe_code, reason = "launches a kernel")]
    pub(super) fn update(&mut self) -> Result<(), CudaError> {
        let job = [0, 0, 0, D::address(&self.state), 0];
        // SAFETY: the argument is an `UnscaleJob`, of which this kernel uses only the scaler.
        unsafe { self.device.launch(&self.update, 1, &job) }
    }

    pub(super) fn found_inf_address(&self) -> u64 {
        D::address(&self.state) + FOUND_INF as u64
    }

    pub(super) fn scale_address(&self) -> u64 {
        D::address(&self.state) + SCALE as u64
    }

    pub(super) fn status(&self) -> Result<Status, CudaError> {
        let mut bytes = [0; BYTES];
        self.device.read(&self.state, 0, &mut bytes)?;
        let word = |at: usize| -> [u8; 4] { std::array::from_fn(|i| bytes[at + i]) };
        let pair = |at: usize| -> [u8; 8] { std::array::from_fn(|i| bytes[at + i]) };
        Ok(Status {
            scale: f32::from_ne_bytes(word(SCALE)),
            growth_tracker: u64::from_ne_bytes(pair(TRACKER)),
            found_inf: u32::from_ne_bytes(word(FOUND_INF)) != 0,
            at_floor: u32::from_ne_bytes(word(AT_FLOOR)) != 0,
            norm: f64::from_ne_bytes(pair(NORM)),
        })
    }
}

/// Two adjacent `u32` fields of a struct as one word.
fn pair(first: u32, second: u32) -> u64 {
    let bytes: Vec<u8> = [first, second].iter().flat_map(|word| word.to_ne_bytes()).collect();
    u64::from_ne_bytes(bytes.try_into().expect("twice four bytes"))
}
