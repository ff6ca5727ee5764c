//! Kernels and tables on a device.

use cuda_rt::Device;

use super::table::{Bytes, Job, Types};
use super::tune::LaunchShape;
use crate::Result;

/// Kernels that are compiled together.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Program {
    /// A type of `rules.h`, and whether it sweeps twice; none for `look`.
    pub(super) rule: Option<(String, bool)>,
    pub(super) types: Types,
    /// How `step` is launched.
    pub(super) shape: LaunchShape,
}

impl Program {
    /// The pass over gradients, and averages of weights, for every rule and type.
    pub(super) const LOOK: Self = Self {
        rule: None,
        types: Types { grad: 0, weight: 0, master: false },
        shape: LaunchShape::DEFAULT,
    };

    /// Macros, as a compiler takes them.
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

    /// Looks up a kernel.
    pub(super) fn kernel<D: Device>(&self, device: &D, name: &str) -> Result<D::Kernel> {
        Ok(device.kernel(Self::SOURCE, &self.macros(), name)?)
    }

    /// The kernels.
    pub(super) const SOURCE: &'static str =
        concat!(include_str!("rules.h"), include_str!("optim.cu"));
}

/// Starts blocks of a kernel, in order of the stream.
///
/// # Safety
///
/// All that the job points to must be what the kernel takes it for until it is done.
#[expect(unsafe_code, reason = "a kernel writes wherever its argument says")]
pub(super) unsafe fn launch<D: Device>(
    device: &D,
    kernel: &D::Kernel,
    blocks: u32,
    job: &Job,
) -> Result<()> {
    let bytes = job.bytes();
    let (words, _) = bytes.as_chunks();
    let words: Vec<u64> = words.iter().map(|word| u64::from_ne_bytes(*word)).collect();
    // SAFETY: every kernel takes a `Job`; the caller vouches for what it points to.
    Ok(unsafe { device.launch(kernel, blocks, &words) }?)
}

/// Reads so many values. Waits for the device.
pub(super) fn read_floats<D: Device>(
    device: &D,
    memory: &D::Memory,
    from: usize,
    count: usize,
) -> Result<Vec<f32>> {
    let mut bytes = vec![0; count * 4];
    device.read(memory, from, &mut bytes)?;
    Ok(bytes.as_chunks().0.iter().map(|word| f32::from_ne_bytes(*word)).collect())
}

/// What is sent to a device for good.
#[derive(Debug)]
pub(super) struct Tables<'a, D: Device> {
    device: &'a D,
    pub(super) sent: Vec<D::Memory>,
}

impl<'a, D: Device> Tables<'a, D> {
    pub(super) const fn new(device: &'a D) -> Self {
        Self { device, sent: Vec::new() }
    }

    pub(super) fn memory(&self, bytes: &[u8]) -> Result<D::Memory> {
        let mut memory = self.device.alloc(bytes.len())?;
        self.device.write(&mut memory, 0, bytes)?;
        Ok(memory)
    }

    /// Where it is.
    pub(super) fn send(&mut self, bytes: &[u8]) -> Result<u64> {
        let memory = self.memory(bytes)?;
        let address = D::address(&memory);
        self.sent.push(memory);
        Ok(address)
    }
}
