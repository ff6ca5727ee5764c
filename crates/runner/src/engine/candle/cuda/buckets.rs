//! Gradients averaged on a GPU, by NCCL, while backward computes.
//!
//! A gradient is copied into its bucket in order of candle's stream; buckets leave in a stream of the reducer's, and
//! the step comes behind them by events. The host waits for neither. Where the step needs statistics of
//! the gradients, their norm or whether they are finite, these are taken behind each bucket's all-reduce, while the
//! bucket is in the device's cache.

#![expect(unsafe_code, reason = "hands addresses of tensors, and candle's stream, to the reducer")]

use std::sync::Arc;

use candle_core::cuda_backend::cudarc::driver::{CudaSlice, CudaStream, DeviceRepr, DriverError};
use collective::ProcessGroup;
use collective::device::{DeviceBuf, DeviceStream};
use collective::reducer::{BucketKernels, BucketPlan, DeviceReducer, ParamInfo, ReducerOptions};
use fused_optim::cuda::{self, DeviceSlice, Gpu};
use fused_optim::{DType, GradStats, Slice};
use half::{bf16, f16};

use super::address_of;
use crate::engine::{DeviceBuckets, DeviceTensor, HostTensor, type_of};
use crate::{Error, Result};

/// A [`DeviceReducer`] over candle's tensors and stream.
#[derive(Debug)]
pub(super) struct Buckets {
    reducer: DeviceReducer<Kernels>,
    /// By parameter, its average, if it has one.
    averages: Vec<Option<Average>>,
    /// Candle's, which outlives the reducer.
    gpu: Gpu,
}

impl Buckets {
    /// A reducer of the ranks' averages of `params`, by their index in the model; every rank of the group makes one
    /// alike.
    pub(super) fn new(
        gpu: Gpu,
        group: ProcessGroup,
        params: Vec<(usize, ParamInfo)>,
        options: ReducerOptions,
    ) -> Result<Self> {
        let averages = vec![None; params.len()];
        let (indices, params): (_, Vec<_>) = params.into_iter().unzip();
        let kernels = Kernels {
            ordinal: gpu.stream().context().ordinal(),
            gpu: None,
            indices,
            members: Vec::new(),
            stats: None,
        };
        let reducer = DeviceReducer::new(group, params, options, kernels)?;
        Ok(Self { reducer, averages, gpu })
    }

    fn stream(&self) -> DeviceStream {
        // SAFETY: candle's stream on the group's device, which `gpu` keeps until after the reducer is gone.
        unsafe { DeviceStream::from_raw(self.gpu.stream().cu_stream().cast()) }
    }
}

impl DeviceBuckets for Buckets {
    fn prepare(&mut self, stats: Option<GradStats>) -> Result<()> {
        self.reducer.prepare(true)?;
        self.reducer.kernels_mut().stats = stats;
        Ok(())
    }

    fn ready(&mut self, index: usize, grad: &dyn DeviceTensor) -> Result<()> {
        let DeviceSlice { ptr, len, dtype } = address_of(grad, &self.gpu)?;
        // SAFETY: a tensor of this engine, contiguous, which candle frees in order of its stream.
        let grad = unsafe { DeviceBuf::from_raw(ptr, len, type_of(dtype.into())) }?;
        let stream = self.stream();
        // SAFETY: as above, and candle writes it in that stream; the buckets are the reducer's own.
        Ok(unsafe { self.reducer.ready(index, grad, stream) }?)
    }

    fn finish(&mut self) -> Result<()> {
        let stream = self.stream();
        // SAFETY: the stream outlives the reducer; optimizers use the averages in it alone.
        unsafe { self.reducer.finish(stream) }?;
        self.reducer.kernels_mut().stats = None;
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
        slice_of(self.at)
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
        slice_of(self.at).dtype.into()
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

/// As `fused-optim` calls memory.
fn slice_of(buf: DeviceBuf) -> DeviceSlice {
    let dtype = match buf.dtype() {
        collective::DType::F16 => cuda::DType::F16,
        collective::DType::Bf16 => cuda::DType::Bf16,
        _ => cuda::DType::F32,
    };
    DeviceSlice { ptr: buf.address(), len: buf.count(), dtype }
}

/// `amp`'s casts, for buckets that travel in 16 bits, and the optimizer's statistics of averages.
#[derive(Debug)]
struct Kernels {
    ordinal: usize,
    /// The device by the buckets' stream.
    gpu: Option<Gpu>,
    /// By parameter, its index in the model.
    indices: Vec<usize>,
    /// By bucket: its parameters' indices in the model, and where their averages will be.
    members: Vec<Vec<(usize, DeviceSlice)>>,
    /// In a pass that ends in a step that needs them.
    stats: Option<GradStats>,
}

impl Kernels {
    /// Opens the device, if it is not open.
    fn open(&mut self, stream: DeviceStream) -> collective::Result<Gpu> {
        if let Some(gpu) = &self.gpu {
            return Ok(gpu.clone());
        }
        // SAFETY: the reducer's stream, which outlives its kernels.
        let gpu = unsafe { Gpu::with_stream(self.ordinal, stream.as_raw()) };
        Ok(self.gpu.insert(gpu.map_err(|e| kernel("open the device", &e))?).clone())
    }
}

impl Drop for Kernels {
    fn drop(&mut self) {
        // Of a pass that was not finished: no stream waits for its statistics, which read the optimizer's tables.
        // They are never freed.
        std::mem::forget(self.stats.take());
    }
}

impl BucketKernels for Kernels {
    fn laid_out(&mut self, plan: &BucketPlan, buckets: &[DeviceBuf]) -> collective::Result<()> {
        let member = |index: usize| {
            let place = plan.slots()[index];
            let at = buckets[place.bucket].part(place.offset..place.offset + place.count)?;
            Ok((self.indices[index], slice_of(at)))
        };
        let members = plan.buckets().iter().map(|bucket| bucket.params.iter().copied());
        self.members =
            members.map(|all| all.map(member).collect()).collect::<collective::Result<_>>()?;
        Ok(())
    }

    unsafe fn cast(
        &mut self,
        to: DeviceBuf,
        from: DeviceBuf,
        stream: DeviceStream,
    ) -> collective::Result<()> {
        let gpu = self.open(stream)?;
        // SAFETY: the caller vouches for both, in order of the stream.
        unsafe { amp::cuda::cast(&gpu, slice_of(from), slice_of(to)) }
            .map_err(|e| kernel("cast a bucket", &e))
    }

    unsafe fn averaged(
        &mut self,
        bucket: usize,
        _: DeviceBuf,
        stream: DeviceStream,
    ) -> collective::Result<()> {
        if self.stats.is_none() {
            return Ok(());
        }
        let gpu = self.open(stream)?;
        let Some(stats) = &self.stats else { return Ok(()) };
        // SAFETY: the averages of the pass whose end `finish` has candle's stream, the optimizer's, wait for, and
        // that is followed by the step that the statistics are for; the bucket's stream comes behind candle's as it was when
        // the bucket was full, which is behind the last step. A pass that is not finished never frees the tables.
        unsafe { stats.take(&self.members[bucket], &gpu) }
            .map_err(|e| kernel("take a bucket's statistics", &e))
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
