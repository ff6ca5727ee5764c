//! Conversion of candle's tensors to `DeviceSlice`, and of its devices to `Gpu` (feature `candle`).
//! Without the feature `cuda` candle is built without CUDA, and conversions are errors.

#[cfg(feature = "cuda")]
use candle_core::{DType as Type, Storage};
use candle_core::{Device, Error, Result, Tensor, bail};

use crate::{DeviceSlice, Gpu};

impl TryFrom<&Tensor> for DeviceSlice {
    type Error = Error;

    /// The elements of a contiguous tensor on a GPU, of f32, f16 or bf16; valid while the tensor
    /// lives. Use it only on the stream of the tensor's device (`CudaDevice::cuda_stream`).
    #[cfg(feature = "cuda")]
    fn try_from(tensor: &Tensor) -> Result<Self> {
        let (storage, layout) = tensor.storage_and_layout();
        let Storage::Cuda(storage) = &*storage else { bail!("{tensor:?} is not on a GPU") };
        let Some((start, end)) = layout.contiguous_offsets() else {
            bail!("{tensor:?} is not contiguous in memory: copy it with `contiguous()` first")
        };
        let whole = match tensor.dtype() {
            Type::F32 => Self::from(storage.as_cuda_slice::<f32>()?),
            Type::F16 => Self::from(storage.as_cuda_slice::<half::f16>()?),
            Type::BF16 => Self::from(storage.as_cuda_slice::<half::bf16>()?),
            other => bail!("{tensor:?}: kernels support f32, f16 and bf16, not {other:?}"),
        };
        let ptr = whole.ptr + (start * tensor.dtype().size_in_bytes()) as u64;
        Ok(Self { ptr, len: end - start, ..whole })
    }

    /// An error: candle is built without CUDA.
    #[cfg(not(feature = "cuda"))]
    fn try_from(tensor: &Tensor) -> Result<Self> {
        bail!("{tensor:?} is not on a GPU: {NO_CUDA}")
    }
}

impl TryFrom<&Device> for Gpu {
    type Error = Error;

    /// The GPU of candle's device, with candle's stream of this thread.
    #[cfg(feature = "cuda")]
    fn try_from(device: &Device) -> Result<Self> {
        Self::on(device.as_cuda_device()?.cuda_stream()).map_err(Error::wrap)
    }

    /// An error: candle is built without CUDA.
    #[cfg(not(feature = "cuda"))]
    fn try_from(device: &Device) -> Result<Self> {
        bail!("{:?} is no GPU: {NO_CUDA}", device.location())
    }
}

#[cfg(not(feature = "cuda"))]
const NO_CUDA: &str = "candle is built without CUDA; enable the feature `cuda` of `cuda-rt`";
