//! What an optimizer asks of a device: memory, copies in order of a stream, launches.

use std::fmt;

use cuda_rt::Kernels;

use super::table::{Job, Types};
use super::tune::LaunchShape;
use crate::Result;

/// A device, or what stands in for one in tests.
pub(super) trait Device: Clone + fmt::Debug {
    /// Memory of the device, freed when dropped.
    type Memory: fmt::Debug;
    /// A kernel that is ready to be launched.
    type Kernel: Clone + fmt::Debug;

    /// Memory of zeros; its address is a multiple of 256. `bytes` may be 0.
    fn alloc(&self, bytes: usize) -> Result<Self::Memory>;
    /// Where it is.
    fn address(memory: &Self::Memory) -> u64;
    /// Copies to the device, in order of the stream.
    fn write(&self, memory: &mut Self::Memory, offset: usize, bytes: &[u8]) -> Result<()>;
    /// Copies from the device, and waits for that.
    fn read(&self, memory: &Self::Memory, offset: usize, bytes: &mut [u8]) -> Result<()>;
    /// The same, from an address.
    ///
    /// # Safety
    ///
    /// So many bytes must be readable there until this returns.
    #[expect(unsafe_code, reason = "an address is only a number")]
    unsafe fn read_at(&self, address: u64, bytes: &mut [u8]) -> Result<()>;
    /// What it is, for who keeps what was found out about it.
    fn name(&self) -> Result<String>;
    /// How many blocks run side by side, at least, if each has a processor of its own.
    fn processors(&self) -> u32;
    /// Looks a program's kernel up, which is launched from then on without.
    fn kernel(&self, program: &Program, name: &'static str) -> Result<Self::Kernel>;
    /// Starts `blocks` blocks of 256 threads of a kernel, in order of the stream.
    ///
    /// # Safety
    ///
    /// All that the job points to must be what the kernel takes it for until it is done.
    #[expect(unsafe_code, reason = "a kernel writes wherever its argument says")]
    unsafe fn launch(&self, kernel: &Self::Kernel, blocks: u32, job: &Job) -> Result<()>;
}

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

    /// What NVRTC compiles.
    pub(super) fn source(&self) -> String {
        Kernels::source(Self::SOURCE)
    }

    /// The kernels.
    pub(super) const SOURCE: &'static str =
        concat!(include_str!("rules.h"), include_str!("optim.cu"));
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
