//! Moving averages of tensors on a device, updated independently of steps.

#![expect(unsafe_code, reason = "an address is only a number")]

use bytemuck::cast_slice;
use cuda_rt::Device;

use super::LaunchShape;
use super::device::{Program, blocks, launch, read_floats};
use super::table::{Chunk, Job, SPAN, Tensor, chunks};
use super::{DeviceSlice, Gpu};
use crate::core::check_len;
use crate::cpu::plan::Layout;
use crate::error::check_aligned;
use crate::rule::require;
use crate::{Error, Result};

/// Moving averages, in f32, of tensors on a GPU, in its memory.
///
/// An update is one launch for all tensors: `average + share * (x - average)`, each operation
/// rounded to f32, with the bits of the CPU; a NaN stays NaN. It reads and writes 12 bytes per
/// element of f32. For an average that is updated in every step of an optimizer, with a constant
/// share, use [`DeviceParam::ema`](super::DeviceParam::ema): it takes no further launch.
#[derive(Debug)]
pub struct Averages<D: Device = Gpu> {
    kernel: AverageKernel<D>,
    counts: Vec<usize>,
    /// Start of each average in `memory`, in bytes.
    offsets: Vec<usize>,
    memory: D::Memory,
}

impl<D: Device> Averages<D> {
    /// Averages of tensors with these element counts, all zero, in the stream of `gpu`. Compiles
    /// the kernels that all optimizers share.
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
        let kernel = AverageKernel::new(gpu, counts)?;
        Ok(Self { kernel, counts: counts.to_vec(), offsets, memory })
    }

    /// Updates each average with `share` of its tensor's value; `None` sets it to the tensor's
    /// value. Launches the update in the stream and returns before it is done.
    ///
    /// # Errors
    ///
    /// [`Error::MissingParam`] or [`Error::LengthMismatch`] for other tensors than those of the
    /// averages; [`Error::InvalidHyper`] for a share outside `0 ..= 1`;
    /// [`Error::MisalignedPointer`]. Nothing is changed then. [`Error::Cuda`].
    ///
    /// # Safety
    ///
    /// Each tensor must be valid on the device, and not be written, until the update is done in the
    /// stream.
    pub unsafe fn update(&mut self, tensors: &[DeviceSlice], share: Option<f32>) -> Result<()> {
        self.check(tensors.iter().map(|tensor| tensor.len))?;
        let value = share.unwrap_or(1.0);
        require((0.0..=1.0).contains(&value), "share", value.into())?;
        for tensor in tensors {
            check_aligned(tensor.ptr, tensor.dtype.into())?;
        }
        let average = |offset: &usize| D::address(&self.memory) + *offset as u64;
        let pairs = tensors.iter().copied().zip(self.offsets.iter().map(average));
        // SAFETY: the averages are owned by `self`; the caller guarantees the tensors.
        unsafe { self.kernel.launch(pairs, share) }
    }

    /// Copies of the averages. Waits for the device.
    ///
    /// # Errors
    ///
    /// [`Error::Cuda`].
    pub fn to_host(&self) -> Result<Vec<Vec<f32>>> {
        let all = self.counts.iter().zip(&self.offsets);
        all.map(|(count, offset)| read_floats(&self.kernel.device, &self.memory, *offset, *count))
            .collect()
    }

    /// Sets the averages, in the order of the stream.
    ///
    /// # Errors
    ///
    /// As [`update`](Self::update).
    pub fn load(&mut self, averages: &[Vec<f32>]) -> Result<()> {
        self.check(averages.iter().map(Vec::len))?;
        for (values, offset) in averages.iter().zip(&self.offsets) {
            self.kernel.device.write(&mut self.memory, *offset, cast_slice(values))?;
        }
        Ok(())
    }

    /// Returns an error unless the lengths are those of the averages.
    fn check(&self, lengths: impl ExactSizeIterator<Item = usize>) -> Result<()> {
        let count = lengths.len();
        if count != self.counts.len() {
            return Err(Error::MissingParam { index: self.counts.len().min(count), count });
        }
        let mut all = lengths.zip(&self.counts).enumerate();
        all.try_for_each(|(index, (got, count))| check_len(index, "average", *count, got))
    }
}

/// The kernel `average` and its tables: updates vectors of f32 with tensors, all in one launch.
#[derive(Debug)]
pub(super) struct AverageKernel<D: Device> {
    device: D,
    average: D::Kernel,
    /// Table of the tensors, and its contents.
    tensor_table: D::Memory,
    tensors: Vec<Tensor>,
    chunk: D::Memory,
    chunks: u32,
}

impl<D: Device> AverageKernel<D> {
    pub(super) fn new(device: D, counts: &[usize]) -> Result<Self> {
        let of_tensor =
            |(tensor, count): (usize, &usize)| chunks(tensor as u32, Layout::new(*count, 0), SPAN);
        let chunks: Vec<Chunk> = counts.iter().enumerate().flat_map(of_tensor).collect();
        let mut chunk = device.alloc(size_of_val(&*chunks))?;
        device.write(&mut chunk, 0, cast_slice(&chunks))?;
        Ok(Self {
            average: Program::SHARED.kernel(&device, "average")?,
            tensor_table: device.alloc(counts.len() * size_of::<Tensor>())?,
            tensors: Vec::new(),
            chunk,
            chunks: chunks.len() as u32,
            device,
        })
    }

    /// Updates the vectors at these addresses; without a share they become the tensors.
    ///
    /// # Safety
    ///
    /// Tensors and vectors must have the element counts given to [`new`](Self::new), and be valid
    /// until the update is done in the stream.
    pub(super) unsafe fn launch(
        &mut self,
        pairs: impl Iterator<Item = (DeviceSlice, u64)>,
        share: Option<f32>,
    ) -> Result<()> {
        let tensors = pairs.map(|(tensor, ema)| Tensor {
            weight: tensor.ptr,
            ema,
            count: tensor.len as u64,
            cols: tensor.len as u64,
            grad_type: tensor.dtype.number(),
            ..Tensor::default()
        });
        let tensors: Vec<Tensor> = tensors.collect();
        let job = Job {
            tensor: D::address(&self.tensor_table),
            chunk: D::address(&self.chunk),
            chunks: self.chunks,
            tensors: tensors.len() as u32,
            share: share.unwrap_or(-1.0),
            ..Job::default()
        };
        if tensors != self.tensors {
            self.device.write(&mut self.tensor_table, 0, cast_slice(&tensors))?;
            self.tensors = tensors;
        }
        let blocks = blocks(&self.device, self.chunks, LaunchShape::DEFAULT.blocks);
        // SAFETY: the tables are owned by `self` and freed in the order of the stream; the caller
        // guarantees the rest.
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

    /// `x` rounded to this type.
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

        /// Every element has the bits of the formula on the CPU, and no other element changes.
        #[test]
        fn averages_equal_the_cpu(
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
    fn invalid_tensors_and_shares_are_errors() {
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
        let misaligned = DeviceSlice { ptr: 2, ..both[1] };
        assert!(matches!(
            refused(&[both[0], misaligned], None),
            Error::MisalignedPointer { ptr: 2, .. }
        ));
        assert!(kept.load(&[vec![0.0; 2]]).is_err());
    }
}
