//! Copies arrays to the GPU through pinned memory, because a copy from other memory may block the
//! host until the GPU reaches it.
//!
//! Large fields are copied in a stream of their own, so that the copy overlaps with the previous
//! step: the host is ahead of the GPU unless it waits for a loss scale. Such a field is copied to
//! memory kept here, and from there, in the engine's stream, to its tensor, because the tensor's
//! own memory may be in use until then.

#![expect(unsafe_code, reason = "allocates memory without setting it, and copies to its address")]

use std::collections::VecDeque;
use std::{mem, slice};

use candle_core::cuda_backend::cudarc::driver::{
    CudaEvent, CudaSlice, DevicePtrMut, DeviceRepr, result,
};
use candle_core::cuda_backend::{CudaDType, CudaStorage};
use candle_core::op::BackpropOp;
use candle_core::{
    CpuStorage, CudaDevice, Error, InplaceOp1, Layout, Result, Storage, Tensor, bail,
};
use fused_optim::cuda::Gpu;
use half::{bf16, f16};
use parking_lot::Mutex;
use train_data::{Array, ArrayData};

/// Copies arrays to a GPU, in order of candle's stream.
#[derive(Debug)]
pub(crate) struct Pinned {
    /// GPU with candle's stream.
    gpu: Gpu,
    /// Copies of large arrays; created for the first one.
    copies: Mutex<Option<Copies>>,
}

impl Pinned {
    /// Copies to this GPU, which has candle's stream.
    pub(crate) const fn new(gpu: Gpu) -> Self {
        Self { gpu, copies: Mutex::new(None) }
    }

    /// Copies an array to a tensor of its own type on this GPU's device; a mask to bytes of 0 and
    /// 1. The array may change after the return.
    ///
    /// # Errors
    ///
    /// An error of the device; a type that candle does not have.
    pub(crate) fn tensor(&self, array: &Array, device: &CudaDevice) -> Result<Tensor> {
        let shape = array.shape();
        match array.data() {
            ArrayData::F32(values) => self.of(device, values, shape),
            ArrayData::F16(values) => self.of(device, values, shape),
            ArrayData::BF16(values) => self.of(device, values, shape),
            ArrayData::U8(values) => self.of(device, values, shape),
            ArrayData::I32(values) => self.of(device, values, shape),
            ArrayData::I64(values) => self.of(device, values, shape),
            ArrayData::Bool(mask) => self.of(device, &bytes_of(mask), shape),
            other => Err(Error::msg(format!("candle has no tensors of {}", other.type_name()))),
        }
    }

    fn of<T: CudaDType + DeviceRepr + Copy>(
        &self,
        device: &CudaDevice,
        values: &[T],
        shape: &[usize],
    ) -> Result<Tensor> {
        // SAFETY: written below, before anything in the stream can read it.
        let mut memory = unsafe { device.alloc::<T>(values.len()) }?;
        self.write(values, &mut memory)?;
        let storage = Storage::Cuda(CudaStorage::wrap_cuda_slice(memory, device.clone()));
        Ok(Tensor::from_storage(storage, shape, BackpropOp::none(), false))
    }

    /// Copies values to a tensor, in order of the stream. The source may change after the return.
    ///
    /// # Errors
    ///
    /// Another number or type of values; an error of the device.
    pub(crate) fn fill(&self, tensor: &Tensor, values: &ArrayData) -> Result<()> {
        tensor.inplace_op1(&Fill(self, values))
    }

    /// Copies values to the memory of a tensor, in order of the stream.
    fn write<T: DeviceRepr + Copy>(&self, values: &[T], memory: &mut CudaSlice<T>) -> Result<()> {
        if values.len() != memory.len() {
            bail!("{} values for a tensor of {} elements", values.len(), memory.len());
        }
        // SAFETY: element types of an array have no padding.
        let bytes =
            unsafe { slice::from_raw_parts(values.as_ptr().cast::<u8>(), size_of_val(values)) };
        let (address, _guard) = memory.device_ptr_mut(self.gpu.stream());
        if bytes.len() < LARGE {
            // SAFETY: the address has this many bytes, which candle frees in order of this stream.
            return unsafe { self.gpu.write_at(address, bytes) }.map_err(Error::wrap);
        }
        let mut copies = self.copies.lock();
        let copies = match &mut *copies {
            Some(copies) => copies,
            none => none.insert(Copies::new(&self.gpu)?),
        };
        // SAFETY: as above.
        unsafe { copies.write(&self.gpu, address, bytes) }
    }
}

/// Copies host values into a tensor.
struct Fill<'a>(&'a Pinned, &'a ArrayData);

impl InplaceOp1 for Fill<'_> {
    fn name(&self) -> &'static str {
        "fill"
    }

    fn cpu_fwd(&self, _: &mut CpuStorage, _: &Layout) -> Result<()> {
        bail!("cannot fill a tensor on the host")
    }

    fn cuda_fwd(&self, storage: &mut CudaStorage, _: &Layout) -> Result<()> {
        let Self(pinned, values) = self;
        match values {
            ArrayData::F32(v) => pinned.write(v, storage.as_cuda_slice_mut::<f32>()?),
            ArrayData::F16(v) => pinned.write(v, storage.as_cuda_slice_mut::<f16>()?),
            ArrayData::BF16(v) => pinned.write(v, storage.as_cuda_slice_mut::<bf16>()?),
            ArrayData::U8(v) => pinned.write(v, storage.as_cuda_slice_mut::<u8>()?),
            ArrayData::I32(v) => pinned.write(v, storage.as_cuda_slice_mut::<i32>()?),
            ArrayData::I64(v) => pinned.write(v, storage.as_cuda_slice_mut::<i64>()?),
            ArrayData::Bool(v) => pinned.write(&bytes_of(v), storage.as_cuda_slice_mut::<u8>()?),
            other => bail!("candle has no tensors of {}", other.type_name()),
        }
    }
}

/// Converts a mask to bytes of 0 and 1, as candle has no booleans.
fn bytes_of(mask: &[bool]) -> Vec<u8> {
    mask.iter().map(|is_set| u8::from(*is_set)).collect()
}

/// Minimum bytes of a field that is copied in its own stream; a smaller one takes about 40 us.
const LARGE: usize = 1 << 20;
/// Maximum number of buffers kept: two for each of two batches.
const KEPT: usize = 4;

/// Copies in a separate stream.
#[derive(Debug)]
struct Copies {
    /// GPU with that stream.
    gpu: Gpu,
    /// Buffers, least recently used first.
    kept: VecDeque<Kept>,
}

/// A buffer between host and tensor.
#[derive(Debug)]
struct Kept {
    memory: CudaSlice<u8>,
    /// Recorded after the last copy to a tensor.
    read: CudaEvent,
}

impl Copies {
    fn new(engine: &Gpu) -> Result<Self> {
        let stream = engine.stream().context().new_stream().map_err(Error::wrap)?;
        Ok(Self { gpu: Gpu::on(stream).map_err(Error::wrap)?, kept: VecDeque::new() })
    }

    /// Returns a buffer of at least this many bytes, which the stream may write.
    fn take(&mut self, engine: &Gpu, bytes: usize) -> Result<Kept> {
        let oldest = if self.kept.len() < KEPT { None } else { self.kept.pop_front() };
        if let Some(oldest) = oldest.filter(|oldest| oldest.memory.len() >= bytes) {
            self.gpu.stream().wait(&oldest.read).map_err(Error::wrap)?;
            return Ok(oldest);
        }
        // Allocated and freed in order of the engine's stream, which also runs the last copy from
        // it.
        // SAFETY: written before it is read.
        let memory = unsafe { engine.stream().alloc(bytes) }.map_err(Error::wrap)?;
        self.gpu.stream().join(engine.stream()).map_err(Error::wrap)?;
        let read = engine.stream().context().new_event(None).map_err(Error::wrap)?;
        Ok(Kept { memory, read })
    }

    /// Copies bytes to an address, in the engine's stream.
    ///
    /// # Safety
    ///
    /// The address must be valid for this many bytes until that stream has run the copy.
    unsafe fn write(&mut self, engine: &Gpu, address: u64, bytes: &[u8]) -> Result<()> {
        let mut kept = self.take(engine, bytes.len())?;
        let (from, guard) = kept.memory.device_ptr_mut(engine.stream());
        drop(guard);
        // SAFETY: the buffer has this many bytes, and is freed after the copy below.
        let sent = unsafe { self.gpu.write_at(from, bytes) }.map_err(Error::wrap);
        let sent = sent.and_then(|()| engine.stream().join(self.gpu.stream()).map_err(Error::wrap));
        if let Err(error) = sent {
            // The device may still be writing to it: leak it.
            mem::forget(kept.memory);
            return Err(error);
        }
        let stream = engine.stream().cu_stream();
        // SAFETY: the caller vouches for the address, and the buffer has been written at that point
        // of the stream.
        unsafe { result::memcpy_dtod_async(address, from, bytes.len(), stream) }
            .and_then(|()| kept.read.record(engine.stream()))
            .map_err(Error::wrap)?;
        self.kept.push_back(kept);
        Ok(())
    }
}
