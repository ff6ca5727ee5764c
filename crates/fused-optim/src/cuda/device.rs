//! Kernels and tables on a device.

use cuda_rt::Device;

use super::LaunchShape;
use super::table::{Job, Types};
use crate::Result;

/// Kernels that are compiled together.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Program {
    /// A type of `rules.h`, and whether it has two sweeps; `None` for the kernels that all rules
    /// share.
    pub(super) rule: Option<(String, bool)>,
    pub(super) types: Types,
    /// How `step` is launched.
    pub(super) shape: LaunchShape,
}

impl Program {
    /// The kernels that all rules and types share: gradient statistics and moving averages.
    pub(super) const SHARED: Self = Self {
        rule: None,
        types: Types { grad: 0, weight: 0, master: false },
        shape: LaunchShape::DEFAULT,
    };

    /// The compiler's macro options.
    pub(super) fn macros(&self) -> Vec<String> {
        let Some((rule, twice)) = &self.rule else { return Vec::new() };
        let Types { grad, weight, master } = self.types;
        let name = |number: u32| ["F32", "F16", "Bf16"][number as usize];
        vec![
            format!("-DRULE={rule}"),
            format!("-DSWEEPS={}", if *twice { 2 } else { 1 }),
            format!("-DGRAD={}", name(grad)),
            format!("-DWEIGHT={}", name(weight)),
            format!("-DMASTER={master}"),
            format!("-DSWEEP={}", self.shape.sweep),
            format!("-DPACK={}", self.shape.pack),
        ]
    }

    /// Compiles or finds a kernel.
    pub(super) fn kernel<D: Device>(&self, device: &D, name: &str) -> Result<D::Kernel> {
        Ok(device.kernel(Self::SOURCE, &self.macros(), name)?)
    }

    /// CUDA C++ of all kernels.
    pub(super) const SOURCE: &'static str =
        concat!(include_str!("rules.h"), include_str!("optim.cu"));
}

/// Launches blocks of a kernel in the device's stream.
///
/// # Safety
///
/// Everything that the job points to must be valid for the kernel until it is done.
#[expect(unsafe_code, reason = "a kernel writes wherever its argument says")]
pub(super) unsafe fn launch<D: Device>(
    device: &D,
    kernel: &D::Kernel,
    blocks: u32,
    job: &Job,
) -> Result<()> {
    let words: [u64; size_of::<Job>() / 8] = bytemuck::cast(*job);
    // SAFETY: every kernel takes a `Job`; the caller guarantees what it points to.
    Ok(unsafe { device.launch(kernel, blocks, &words) }?)
}

/// Number of blocks for `chunks` chunks: a warp per chunk, and at most `most` blocks per
/// multiprocessor.
pub(super) fn blocks<D: Device>(device: &D, chunks: u32, most: u32) -> u32 {
    chunks.div_ceil(8).clamp(1, device.processors() * most)
}

/// Reads `count` values, from byte `from` on. Waits for the device.
pub(super) fn read_floats<D: Device>(
    device: &D,
    memory: &D::Memory,
    from: usize,
    count: usize,
) -> Result<Vec<f32>> {
    let mut values = vec![0.0_f32; count];
    device.read(memory, from, bytemuck::cast_slice_mut(&mut values))?;
    Ok(values)
}

/// Uploads read-only tables and owns their memory.
#[derive(Debug)]
pub(super) struct Tables<'a, D: Device> {
    device: &'a D,
    pub(super) memory: Vec<D::Memory>,
}

impl<'a, D: Device> Tables<'a, D> {
    pub(super) const fn new(device: &'a D) -> Self {
        Self { device, memory: Vec::new() }
    }

    /// Uploads a table that the caller owns.
    pub(super) fn upload(&self, bytes: &[u8]) -> Result<D::Memory> {
        let mut memory = self.device.alloc(bytes.len())?;
        self.device.write(&mut memory, 0, bytes)?;
        Ok(memory)
    }

    /// Uploads a table and returns its address.
    pub(super) fn add(&mut self, bytes: &[u8]) -> Result<u64> {
        let memory = self.upload(bytes)?;
        let address = D::address(&memory);
        self.memory.push(memory);
        Ok(address)
    }
}
