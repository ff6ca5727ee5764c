//! Moving averages of tensors on a device, which move apart from any step.

#![expect(unsafe_code, reason = "an address is only a number")]

use cuda_rt::Device;

use super::device::{Program, launch, read_floats};
use super::table::{Bytes, Chunk, Job, SPAN, Tensor, chunks};
use super::tune::LaunchShape;
use super::{DeviceParam, DeviceSlice, Gpu};
use crate::cpu::plan::Layout;
use crate::{Error, Result};

/// Moving averages, f32, of tensors on a GPU, in its memory.
///
/// An update is one launch for all tensors, and moves 12 bytes for an element of f32: `average + share * (x -
/// average)`, each operation rounded to f32, with the bits of the CPU. A NaN stays one. An average that moves
/// at each step of an optimizer by the same share can be had in its sweep ([`DeviceParam::ema`]).
#[derive(Debug)]
pub struct Averages<D: Device = Gpu> {
    mover: Mover<D>,
    counts: Vec<usize>,
    /// Of each average, where it begins, in bytes.
    offsets: Vec<usize>,
    memory: D::Memory,
}

impl<D: Device> Averages<D> {
    /// Averages of tensors of so many elements, all zero, whose work goes into the stream of `gpu`. Compiles the
    /// kernels that all optimizers share.
    ///
    /// # Errors
    ///
    /// [`Error::Cuda`].
    pub fn new(gpu: D, counts: &[usize]) -> Result<Self> {
        let mut bytes = 0;
        let mut offsets = Vec::with_capacity(counts.len());
        for count in counts {
            offsets.push(bytes);
            bytes += (count * 4).next_multiple_of(16);
        }
        let memory = gpu.alloc(bytes)?;
        Ok(Self { mover: Mover::new(gpu, counts)?, counts: counts.to_vec(), offsets, memory })
    }

    /// Moves each average towards its tensor, in order of the stream: `share` of the tensor's value goes into it. With
    /// none it becomes the tensor, unrounded. Returns before that is done.
    ///
    /// # Errors
    ///
    /// Before anything is changed: [`Error::MissingParam`] and [`Error::LengthMismatch`] for other tensors than the
    /// averages are of; [`Error::InvalidHyper`] for a share outside of `0 ..= 1`;
    /// [`Error::MisalignedPointer`]. And [`Error::Cuda`].
    ///
    /// # Safety
    ///
    /// Each tensor must be where it says, on the device, and not be written by anybody, until the stream has come
    /// this far.
    pub unsafe fn update(&mut self, tensors: &[DeviceSlice], share: Option<f32>) -> Result<()> {
        self.check(tensors.iter().map(|tensor| tensor.len))?;
        if let Some(share) = share.filter(|share| !(0.0..=1.0).contains(share)) {
            return Err(Error::InvalidHyper { name: "share", value: share.into() });
        }
        for (index, tensor) in tensors.iter().enumerate() {
            DeviceParam::new(*tensor, Some(*tensor)).validate(index)?;
        }
        let average = |offset: &usize| D::address(&self.memory) + *offset as u64;
        let pairs = tensors.iter().copied().zip(self.offsets.iter().map(average));
        // SAFETY: the averages are this one's; the tensors are the caller's promise.
        unsafe { self.mover.launch(pairs, share) }
    }

    /// Copies of the averages. Waits for the device.
    ///
    /// # Errors
    ///
    /// [`Error::Cuda`].
    pub fn to_host(&self) -> Result<Vec<Vec<f32>>> {
        let all = self.counts.iter().zip(&self.offsets);
        all.map(|(count, offset)| read_floats(&self.mover.device, &self.memory, *offset, *count))
            .collect()
    }

    /// Takes over what the averages are to be, in order of the stream.
    ///
    /// # Errors
    ///
    /// As [`update`](Self::update).
    pub fn load(&mut self, averages: &[Vec<f32>]) -> Result<()> {
        self.check(averages.iter().map(Vec::len))?;
        for (values, offset) in averages.iter().zip(&self.offsets) {
            self.mover.device.write(&mut self.memory, *offset, &values.bytes())?;
        }
        Ok(())
    }

    /// Refuses tensors that are not as long as the averages.
    fn check(&self, lengths: impl ExactSizeIterator<Item = usize>) -> Result<()> {
        let count = lengths.len();
        if count != self.counts.len() {
            return Err(Error::MissingParam { index: self.counts.len().min(count), count });
        }
        for (index, (got, &expected)) in lengths.zip(&self.counts).enumerate() {
            if got != expected {
                return Err(Error::LengthMismatch { index, what: "average", expected, got });
            }
        }
        Ok(())
    }
}

/// Moves vectors of f32 towards tensors, all by one launch.
#[derive(Debug)]
pub(super) struct Mover<D: Device> {
    device: D,
    average: D::Kernel,
    /// What the kernel knows of the tensors, and what was sent of it.
    table: D::Memory,
    sent: Vec<Tensor>,
    chunk: D::Memory,
    chunks: u32,
}

impl<D: Device> Mover<D> {
    pub(super) fn new(device: D, counts: &[usize]) -> Result<Self> {
        let of_tensor =
            |(tensor, count): (usize, &usize)| chunks(tensor as u32, Layout::new(*count, 0), SPAN);
        let chunks: Vec<Chunk> = counts.iter().enumerate().flat_map(of_tensor).collect();
        let mut chunk = device.alloc(chunks.bytes().len())?;
        device.write(&mut chunk, 0, &chunks.bytes())?;
        Ok(Self {
            average: Program::LOOK.kernel(&device, "average")?,
            table: device.alloc(counts.len() * size_of::<Tensor>())?,
            sent: Vec::new(),
            chunk,
            chunks: chunks.len() as u32,
            device,
        })
    }

    /// Moves the vectors at these addresses; without a share they become the tensors.
    ///
    /// # Safety
    ///
    /// Tensors and vectors must have the elements given to [`new`](Self::new), and be there until the stream has come
    /// this far.
    pub(super) unsafe fn launch(
        &mut self,
        pairs: impl Iterator<Item = (DeviceSlice, u64)>,
        share: Option<f32>,
    ) -> Result<()> {
        let table = pairs.map(|(tensor, ema)| Tensor {
            weight: tensor.ptr,
            ema,
            count: tensor.len as u64,
            cols: tensor.len as u64,
            grad_type: tensor.dtype.number(),
            ..Tensor::default()
        });
        let table: Vec<Tensor> = table.collect();
        let job = Job {
            tensor: D::address(&self.table),
            chunk: D::address(&self.chunk),
            chunks: self.chunks,
            tensors: table.len() as u32,
            share: share.unwrap_or(-1.0),
            ..Job::default()
        };
        if table != self.sent {
            self.device.write(&mut self.table, 0, &table.bytes())?;
            self.sent = table;
        }
        let most = self.device.processors() * LaunchShape::DEFAULT.blocks;
        let blocks = self.chunks.div_ceil(8).clamp(1, most);
        // SAFETY: the tables are this one's, whose memory is freed in order of the stream; the rest is the caller's
        // promise.
        unsafe { launch(&self.device, &self.average, blocks, &job) }
    }
}

#[cfg(test)]
mod tests {
    use cuda_rt::testing::{TestBuffer, TestDevice};
    use half::{bf16, f16};
    use proptest::prelude::*;

    use super::*;
    use crate::cuda::DType;
    use crate::cuda::tests::test_device;

    /// As a tensor of this type has it.
    fn widened(dtype: DType, x: f32) -> f32 {
        match dtype {
            DType::F32 => x,
            DType::F16 => f16::from_f32(x).to_f32(),
            DType::Bf16 => bf16::from_f32(x).to_f32(),
        }
    }

    fn bits(all: &[Vec<f32>]) -> Vec<Vec<u32>> {
        let bits = |x: &f32| if x.is_nan() { 0x7fc0_0000 } else { x.to_bits() };
        all.iter().map(|one| one.iter().map(bits).collect()).collect()
    }

    fn upload(device: &TestDevice, dtype: DType, skipped: usize, x: &[f32]) -> TestBuffer {
        let x = x.iter().copied();
        match dtype {
            DType::F32 => device.upload_at(skipped, &x.collect::<Vec<_>>()),
            DType::F16 => device.upload_at(skipped, &x.map(f16::from_f32).collect::<Vec<_>>()),
            DType::Bf16 => device.upload_at(skipped, &x.map(bf16::from_f32).collect::<Vec<_>>()),
        }
    }

    fn number() -> impl Strategy<Value = f32> {
        prop_oneof![8 => -3.0_f32..3.0, 1 => any::<f32>(), 1 => Just(-0.0_f32)]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]

        /// Every element moves as one line of Rust has it, to the bit, and no other does.
        #[test]
        fn averages_are_the_cpus(
            shapes in prop::collection::vec(
                (prop_oneof![0_usize..40, 16_000_usize..17_000], 0_usize..3, 0_usize..3), 0..5),
            numbers in prop::collection::vec(number(), 97),
            shares in prop::collection::vec(prop::option::of(0.0_f32..=1.0), 1..4),
            seed: u64,
        ) {
            let device = test_device(seed);
            let counts: Vec<usize> = shapes.iter().map(|(count, ..)| *count).collect();
            let mut kept = Averages::new(device.clone(), &counts).unwrap();
            let number = |at: usize| numbers[at % numbers.len()];
            let mut twin: Vec<Vec<f32>> = (counts.iter().enumerate())
                .map(|(at, count)| (0..*count).map(|i| number(i + at)).collect())
                .collect();
            kept.load(&twin).unwrap();
            for (step, share) in shares.into_iter().enumerate() {
                let mut tensors = Vec::new();
                for (&(count, dtype, skipped), twin) in shapes.iter().zip(&mut twin) {
                    let dtype = [DType::F32, DType::F16, DType::Bf16][dtype];
                    let x: Vec<f32> = (0..count).map(|i| number(7 * i + 3 * step)).collect();
                    tensors.push(upload(&device, dtype, skipped, &x));
                    for (average, x) in twin.iter_mut().zip(x) {
                        let x = widened(dtype, x);
                        match share {
                            Some(share) => *average += share * (x - *average),
                            None => *average = x,
                        }
                    }
                }
                let slices: Vec<DeviceSlice> = tensors.iter().map(TestBuffer::slice).collect();
                // SAFETY: `tensors` live until `to_host` has waited.
                unsafe { kept.update(&slices, share) }.unwrap();
                prop_assert_eq!(bits(&kept.to_host().unwrap()), bits(&twin));
            }
        }
    }

    #[test]
    fn other_tensors_and_shares_are_refused() {
        let mut kept = Averages::new(test_device(0), &[2, 3]).unwrap();
        let slice = |len| DeviceSlice { ptr: 4, len, dtype: DType::F32 };
        let mut refused = |tensors: &[DeviceSlice], share| {
            // SAFETY: nothing is launched.
            unsafe { kept.update(tensors, share) }.unwrap_err()
        };
        let both = [slice(2), slice(3)];
        assert!(matches!(refused(&both[..1], None), Error::MissingParam { index: 1, count: 1 }));
        let swapped = refused(&[both[1], both[0]], None);
        assert!(matches!(swapped, Error::LengthMismatch { index: 0, expected: 2, got: 3, .. }));
        for share in [-0.5, 1.5, f32::NAN] {
            assert!(matches!(refused(&both, Some(share)), Error::InvalidHyper { .. }), "{share}");
        }
        let between = DeviceSlice { ptr: 2, ..both[1] };
        assert!(matches!(
            refused(&[both[0], between], None),
            Error::MisalignedPointer { ptr: 2, .. }
        ));
        assert!(kept.load(&[vec![0.0; 2]]).is_err());
    }
}
