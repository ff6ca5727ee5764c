//! Averages gradients on a GPU by NCCL, concurrently with backward: [`GpuBuckets`] as
//! [`DeviceBuckets`] of an engine.

#![expect(unsafe_code, reason = "copies averages by their addresses")]

use std::sync::Arc;

use candle_core::cuda_backend::cudarc::driver::{CudaSlice, CudaStream, DeviceRepr, DriverError};
use candle_train::gpu::GpuBuckets;
use collective::ProcessGroup;
use collective::reducer::{ParamInfo, ReducerOptions};
use fused_optim::cuda::{DeviceSlice, Gpu};
use fused_optim::{DType, GradStats, Slice};
use half::{bf16, f16};

use super::super::on_device::own;
use crate::engine::{DeviceBuckets, DeviceTensor, HostTensor};
use crate::{Error, Result};

/// Buckets of an engine and their averages.
#[derive(Debug)]
pub(super) struct Buckets {
    buckets: GpuBuckets,
    /// Average of each parameter's gradients, if there is one.
    averages: Vec<Option<Average>>,
}

impl Buckets {
    /// Creates buckets for the gradients of `params`, by their index in the model; every rank of
    /// the group creates them alike.
    pub(super) fn new(
        gpu: Gpu,
        group: ProcessGroup,
        params: Vec<(usize, ParamInfo)>,
        options: ReducerOptions,
    ) -> Result<Self> {
        let averages = vec![None; params.len()];
        Ok(Self { buckets: GpuBuckets::new(gpu, group, params, options)?, averages })
    }
}

impl DeviceBuckets for Buckets {
    fn prepare(&mut self, stats: Option<GradStats>) -> Result<()> {
        Ok(self.buckets.prepare(stats)?)
    }

    fn ready(&mut self, index: usize, grad: &dyn DeviceTensor) -> Result<()> {
        let grad = own(grad)?.tensor();
        self.buckets.ready(index, &grad).map_err(|error| match error {
            candle_train::Error::Collective(error) => error.into(),
            other => Error::Engine(other.to_string()),
        })
    }

    fn finish(&mut self) -> Result<()> {
        self.buckets.finish()?;
        for (index, average) in self.averages.iter_mut().enumerate() {
            let at = self.buckets.grad(index);
            *average = at.map(|at| Average { at, gpu: self.buckets.gpu().clone() });
        }
        Ok(())
    }

    fn grad(&self, index: usize) -> Option<&dyn DeviceTensor> {
        let average: &dyn DeviceTensor = self.averages[index].as_ref()?;
        Some(average)
    }

    fn zero_grad(&mut self) {
        self.averages.fill(None);
        self.buckets.zero_grad();
    }
}

/// An average in its bucket, valid until the next pass.
#[derive(Clone, Debug)]
pub(super) struct Average {
    at: DeviceSlice,
    gpu: Gpu,
}

impl Average {
    pub(super) const fn address(&self) -> DeviceSlice {
        self.at
    }

    pub(super) fn stream(&self) -> Arc<CudaStream> {
        self.gpu.stream().clone()
    }

    /// Copies the elements to the host, in order of candle's stream.
    fn copy<T: DeviceRepr>(&self) -> Result<Vec<T>> {
        let stream = self.gpu.stream();
        // SAFETY: the address is a bucket of this many elements of this type, which lives as long
        // as the reducer; the slice is leaked below, not freed.
        let slice: CudaSlice<T> = unsafe { stream.upgrade_device_ptr(self.at.ptr, self.at.len) };
        let copy = stream.clone_dtoh(&slice);
        let _address = slice.leak();
        copy.map_err(|e: DriverError| Error::Engine(format!("copying an average: {e}")))
    }
}

impl DeviceTensor for Average {
    fn dtype(&self) -> DType {
        self.at.dtype.into()
    }

    fn count(&self) -> usize {
        self.at.len
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

const NO_SUM: &str = "cannot add to an average";
