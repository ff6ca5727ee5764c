//! Gradients averaged on a GPU, by NCCL, while backward computes.
//!
//! A gradient is copied into its bucket in order of candle's stream; buckets leave in a stream of the reducer's, and
//! the step comes behind them by events. The host waits for neither.

#![expect(unsafe_code, reason = "hands addresses of tensors, and candle's stream, to the reducer")]

use std::sync::Arc;

use candle_core::cuda_backend::cudarc::driver::{CudaSlice, CudaStream, DeviceRepr, DriverError};
use collective::reducer::{
    BucketKernels, CommHook, Compress, DeviceReducer, DeviceReducerOptions, ParamInfo,
};
use collective::{DeviceBuf, DeviceStream, ProcessGroup, ReducerOptions};
use fused_optim::cuda::{DeviceSlice, Gpu};
use fused_optim::{DType, Slice};
use half::{bf16, f16};

use super::on_device::address_of;
use crate::engine::{DeviceBuckets, DeviceTensor, HostTensor, type_of};
use crate::{Error, Result};

/// A [`DeviceReducer`] over candle's tensors and stream.
#[derive(Debug)]
pub(super) struct Buckets {
    reducer: DeviceReducer<Casts>,
    /// By parameter, its average, if it has one.
    averages: Vec<Option<Average>>,
    /// Candle's, which outlives the reducer.
    gpu: Gpu,
}

impl Buckets {
    /// A reducer of the ranks' averages; every rank of the group makes one alike.
    pub(super) fn new(
        gpu: Gpu,
        group: ProcessGroup,
        params: Vec<ParamInfo>,
        mut options: ReducerOptions,
    ) -> Result<Self> {
        let mut device = DeviceReducerOptions::default();
        device.compress = match &options.comm_hook {
            CommHook::Fp16Compress => Some(Compress::F16),
            CommHook::Bf16Compress => Some(Compress::Bf16),
            _ => None,
        };
        if device.compress.is_some() {
            options.comm_hook = CommHook::AllReduce;
        }
        device.buckets = options;
        let averages = vec![None; params.len()];
        let casts = Casts { ordinal: gpu.stream().context().ordinal(), on: None };
        let reducer = DeviceReducer::new(group, params, device, casts)?;
        Ok(Self { reducer, averages, gpu })
    }

    fn stream(&self) -> DeviceStream {
        // SAFETY: candle's stream on the group's device, which `gpu` keeps until after the reducer is gone.
        unsafe { DeviceStream::from_raw(self.gpu.stream().cu_stream().cast()) }
    }
}

impl DeviceBuckets for Buckets {
    fn prepare(&mut self) -> Result<()> {
        Ok(self.reducer.prepare(true)?)
    }

    fn ready(&mut self, index: usize, grad: &dyn DeviceTensor) -> Result<()> {
        let DeviceSlice { ptr, len, dtype } = address_of(grad, &self.gpu)?;
        // SAFETY: a tensor of this engine, contiguous, which candle frees in order of its stream.
        let grad = unsafe { DeviceBuf::from_raw(ptr, len, type_of(dtype)) }?;
        let stream = self.stream();
        // SAFETY: as above, and candle writes it in that stream; the buckets are the reducer's own.
        Ok(unsafe { self.reducer.ready(index, grad, stream) }?)
    }

    fn finish(&mut self) -> Result<()> {
        let stream = self.stream();
        // SAFETY: the stream outlives the reducer; optimizers use the averages in it alone.
        unsafe { self.reducer.finish(stream) }?;
        for (index, average) in self.averages.iter_mut().enumerate() {
            let at = self.reducer.grad(index);
            *average = at.map(|at| Average { at, gpu: self.gpu.clone() });
        }
        Ok(())
    }

    fn grad(&self, index: usize) -> Option<&dyn DeviceTensor> {
        let average: &dyn DeviceTensor = self.averages[index].as_ref()?;
        Some(average)
    }

    fn zero_grad(&mut self) {
        self.averages.fill(None);
        self.reducer.zero_grad();
    }
}

/// A gradient in its bucket, until the next pass.
#[derive(Clone, Debug)]
pub(super) struct Average {
    at: DeviceBuf,
    gpu: Gpu,
}

impl Average {
    pub(super) fn address(&self) -> DeviceSlice {
        DeviceSlice { ptr: self.at.address(), len: self.at.count(), dtype: self.dtype() }
    }

    pub(super) fn stream(&self) -> Arc<CudaStream> {
        self.gpu.stream().clone()
    }

    /// Copies it, in order of candle's stream.
    fn copy<T: DeviceRepr>(&self) -> Result<Vec<T>> {
        let stream = self.gpu.stream();
        // SAFETY: a bucket of that many elements of this type, which lives until the reducer goes; it is given
        // back below.
        let slice: CudaSlice<T> =
            unsafe { stream.upgrade_device_ptr(self.at.address(), self.at.count()) };
        let copy = stream.clone_dtoh(&slice);
        let _address = slice.leak();
        copy.map_err(|e: DriverError| Error::Engine(format!("copying an average: {e}")))
    }
}

impl DeviceTensor for Average {
    fn dtype(&self) -> DType {
        match self.at.dtype() {
            collective::DType::F16 => DType::F16,
            collective::DType::Bf16 => DType::Bf16,
            _ => DType::F32,
        }
    }

    fn count(&self) -> usize {
        self.at.count()
    }

    fn add_host(&mut self, _: Slice<'_>) -> Result<()> {
        Err(Error::Engine(NO_SUM.to_owned()))
    }

    fn add(&mut self, _: &dyn DeviceTensor) -> Result<()> {
        Err(Error::Engine(NO_SUM.to_owned()))
    }

    fn to_host(&self) -> Result<HostTensor> {
        Ok(match self.dtype() {
            DType::F32 => HostTensor::F32(self.copy::<f32>()?),
            DType::F16 => HostTensor::F16(self.copy::<f16>()?),
            DType::Bf16 => HostTensor::Bf16(self.copy::<bf16>()?),
        })
    }
}

const NO_SUM: &str = "nothing is added to an average";

/// `amp`'s casts, for buckets that travel in 16 bits.
#[derive(Debug)]
struct Casts {
    ordinal: usize,
    /// The device by the buckets' stream.
    on: Option<amp::cuda::Gpu>,
}

impl Casts {
    fn gpu(&mut self, stream: DeviceStream) -> collective::Result<&amp::cuda::Gpu> {
        if self.on.is_none() {
            // SAFETY: the reducer's stream, which outlives its kernels.
            let gpu = unsafe { amp::cuda::Gpu::with_stream(self.ordinal, stream.as_raw()) };
            self.on = Some(gpu.map_err(|e| kernel("open the device", &e))?);
        }
        Ok(self.on.as_ref().expect("opened a moment ago"))
    }
}

impl BucketKernels for Casts {
    unsafe fn cast(
        &mut self,
        to: DeviceBuf,
        from: DeviceBuf,
        stream: DeviceStream,
    ) -> collective::Result<()> {
        let slice = |buf: DeviceBuf| amp::cuda::DeviceSlice {
            ptr: buf.address(),
            len: buf.count(),
            dtype: match buf.dtype() {
                collective::DType::F16 => amp::DType::F16,
                collective::DType::Bf16 => amp::DType::Bf16,
                _ => amp::DType::F32,
            },
        };
        let gpu = self.gpu(stream)?;
        // SAFETY: the caller vouches for both, in order of the stream.
        unsafe { amp::cuda::cast(gpu, slice(from), slice(to)) }
            .map_err(|e| kernel("cast a bucket", &e))
    }
}

fn kernel(during: &str, error: &dyn std::error::Error) -> collective::Error {
    collective::Error::Backend {
        backend: "kernels",
        during: during.into(),
        name: "error".into(),
        code: -1,
        text: error.to_string(),
    }
}
