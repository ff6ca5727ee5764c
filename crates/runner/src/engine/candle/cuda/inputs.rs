//! Batches on their way to the GPU, by pinned memory: a copy of other memory may hold up the host until the GPU comes to
//! it.

#![expect(unsafe_code, reason = "allocates memory without setting it, and copies to its address")]

use std::slice;

use candle_core::cuda_backend::cudarc::driver::{CudaSlice, DevicePtrMut, DeviceRepr};
use candle_core::cuda_backend::{CudaDType, CudaStorage};
use candle_core::op::BackpropOp;
use candle_core::{CudaDevice, Device, Error, Result, Storage, Tensor};
use fused_optim::cuda::Gpu;

use crate::data::{Array, ArrayData, Batch};
use crate::engine::candle::CandleEngine;

impl CandleEngine {
    /// The fields of a batch where the model computes, in the types that they have.
    pub(in crate::engine::candle) fn send(
        &self,
        batch: &Batch,
    ) -> crate::Result<Vec<(String, Tensor)>> {
        let (Some(gpu), Device::Cuda(device)) = (self.gpu(), &self.device) else {
            return super::super::model::send(batch, &self.device);
        };
        let field = |(name, array): (&str, &Array)| {
            let tensor = match array.data() {
                ArrayData::F32(values) => tensor(gpu, device, values, array.shape()),
                ArrayData::F16(values) => tensor(gpu, device, values, array.shape()),
                ArrayData::BF16(values) => tensor(gpu, device, values, array.shape()),
                ArrayData::U8(values) => tensor(gpu, device, values, array.shape()),
                ArrayData::I32(values) => tensor(gpu, device, values, array.shape()),
                ArrayData::I64(values) => tensor(gpu, device, values, array.shape()),
                ArrayData::Bool(mask) => tensor(gpu, device, &bytes_of(mask), array.shape()),
                other => Err(Error::msg(format!("candle has no tensors of {}", other.type_name()))),
            };
            Ok((name.to_owned(), tensor?))
        };
        let fields = batch.iter().map(field).collect::<Result<_>>();
        fields.map_err(|e| crate::Error::Engine(format!("batch: {e}")))
    }
}

/// A mask as candle has it: bytes of 0 and 1.
pub(super) fn bytes_of(mask: &[bool]) -> Vec<u8> {
    mask.iter().map(|is_set| u8::from(*is_set)).collect()
}

fn tensor<T: CudaDType + DeviceRepr + Copy>(
    gpu: &Gpu,
    device: &CudaDevice,
    values: &[T],
    shape: &[usize],
) -> Result<Tensor> {
    // SAFETY: written below, before anything in the stream can read it.
    let mut memory = unsafe { device.alloc::<T>(values.len()) }?;
    write(gpu, values, &mut memory)?;
    let storage = Storage::Cuda(CudaStorage::wrap_cuda_slice(memory, device.clone()));
    Ok(Tensor::from_storage(storage, shape, BackpropOp::none(), false))
}

/// Copies numbers to the memory of a tensor, in order of the stream. They may change once this returns.
pub(super) fn write<T: Copy>(gpu: &Gpu, values: &[T], memory: &mut CudaSlice<T>) -> Result<()> {
    if values.len() != memory.len() {
        candle_core::bail!("{} numbers for a tensor of {}", values.len(), memory.len());
    }
    // SAFETY: numbers of any type in a batch have no padding.
    let bytes = unsafe { slice::from_raw_parts(values.as_ptr().cast::<u8>(), size_of_val(values)) };
    let (address, _guard) = memory.device_ptr_mut(gpu.stream());
    // SAFETY: as many bytes, which candle frees in order of this stream.
    unsafe { gpu.write_at(address, bytes) }.map_err(Error::wrap)
}
