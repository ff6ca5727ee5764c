//! A model on a rank's GPU: gradients averaged by NCCL during the backward pass, an optimizer's
//! step, moving averages.
//!
//! A gradient is copied into its bucket in the order of candle's stream; buckets are sent in a
//! stream of the reducer, and the step waits for them by events. The host does not wait. If the
//! step needs statistics of the gradients, their norm or whether they are finite, these can be
//! computed after the all-reduce of each bucket, while the bucket is in the device's cache.

#![expect(unsafe_code, reason = "hands addresses of tensors, and candle's stream, to the reducer")]

use std::any::Any;

use candle_core::cuda_backend::CudaDType;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, DevicePtr, DeviceRepr, DriverError};
use candle_core::op::BackpropOp;
use candle_core::{CudaStorage, Storage, Tensor, Var};
use collective::ProcessGroup;
use collective::device::{DeviceBuf, DeviceStream, DeviceWork};
use collective::reducer::{BucketKernels, BucketPlan, DeviceReducer, ParamInfo, ReducerOptions};
use fused_optim::candle::{lend_on_gpu, tensor};
use fused_optim::cuda::LaunchShape;
use fused_optim::cuda::{self, DeviceSlice, Gpu, LateRead};
use fused_optim::{Applied, DType, DeviceParam, DeviceParams, GradStats, Optimizer, Slice, Tuned};
use half::{bf16, f16};
use train_step::{
    Averaged, DeviceAverages, DeviceBuckets, DeviceModel, DeviceTensor, Error, Gradient,
    HostTensor, OptimizerStep, Result, TensorSpec, on_device,
};

use crate::tensors::{FOREIGN, ModelTensors, OnDevice, Tensors, failed, own};

impl ModelTensors {
    /// Lends parameters and their gradients to an optimizer on the same device.
    ///
    /// # Errors
    ///
    /// Those of `call`; a gradient of another model or stream.
    pub fn lend_for_step<R>(
        &self,
        grads: &[Option<Gradient<'_>>],
        call: impl FnOnce(DeviceParams<'_>) -> fused_optim::Result<R>,
    ) -> Result<R> {
        let (Tensors { specs, tensors }, gpu) = (&self.params, self.on_gpu()?);
        // Device copies of host gradients, kept until the step is enqueued.
        let mut sent = Vec::new();
        let mut grad_at = |index: usize, grad: &Gradient<'_>| match grad {
            Gradient::Device(grad) => address_of(*grad, gpu),
            Gradient::Host(grad) => {
                let copy = tensor(*grad, grad.len(), tensors[index].device());
                let copy = copy.map_err(|e| failed("copying a gradient", e))?;
                let at = address(&copy);
                sent.push(copy);
                at
            }
        };
        let grads = grads.iter().enumerate();
        let grads = grads.map(|(i, grad)| grad.as_ref().map(|g| grad_at(i, g)).transpose());
        let grads = grads.collect::<Result<Vec<_>>>()?;
        check_streams(tensors, gpu)?;
        let tensors: Vec<_> = tensors.iter().collect();
        let label = |index: usize| format!("`{}`", specs[index].name);
        // SAFETY: `self`, `grads` and `sent` own the tensors. candle writes, reads and frees them
        // in the order of the stream of `gpu` only, averages are ordered before it, and none is
        // freed before this returns.
        let lent = unsafe { lend_on_gpu(gpu, &tensors, label, &grads, call) };
        Ok(lent.map_err(|e| failed("lending a tensor", e))??)
    }
}

impl ModelTensors {
    /// Copies a contiguous tensor of `f64` to the host, as bytes, once the GPU has computed it.
    ///
    /// # Errors
    ///
    /// Another type; an error of the device.
    pub fn read_later(&self, values: &Tensor) -> candle_core::Result<LateRead> {
        let gpu = self.on_gpu().map_err(candle_core::Error::wrap)?;
        let (storage, layout) = values.storage_and_layout();
        let (Storage::Cuda(storage), Some((start, end))) = (&*storage, layout.contiguous_offsets())
        else {
            candle_core::bail!("the tensor is on the host, or not contiguous")
        };
        let slice = storage.as_cuda_slice::<f64>()?.slice(start..end);
        let (address, _guard) = slice.device_ptr(gpu.stream());
        // SAFETY: candle frees the tensor in the order of this stream, after the copy. It is not
        // overwritten before either: later steps and graph launches are ordered after the copy.
        unsafe { gpu.read_later(address, 8 * (end - start)) }.map_err(candle_core::Error::wrap)
    }
}

impl ModelTensors {
    /// Broadcasts the values of rank 0 of these variables over the GPUs of `group`, in the order of
    /// candle's stream. `None`, and nothing is done, if the group or one of the variables is on the
    /// host, or one is of a type that gradients do not have.
    ///
    /// # Errors
    ///
    /// Those of the group.
    pub fn broadcast(
        &self,
        vars: &[(String, Var)],
        group: &ProcessGroup,
    ) -> Result<Option<DeviceWork>> {
        let Ok(gpu) = self.on_gpu() else { return Ok(None) };
        let tensors: Vec<_> = vars.iter().map(|(_, var)| var.as_detached_tensor()).collect();
        if group.backend_name() != "nccl" || check_streams(&tensors, gpu).is_err() {
            return Ok(None);
        }
        let mut calls = group.device()?;
        for tensor in &tensors {
            let Ok(at) = address(tensor) else { return Ok(None) };
            // SAFETY: the variable's memory, which candle frees in the order of its stream.
            calls = calls.broadcast(unsafe { DeviceBuf::from_slice(at) }?, 0)?;
        }
        // SAFETY: candle's stream on the group's device, which `self` keeps.
        let stream = unsafe { DeviceStream::from_raw(gpu.stream().cu_stream().cast()) };
        Ok(Some(calls.enqueue(stream)?))
    }
}

impl DeviceModel for ModelTensors {
    fn optimizer_step(
        &mut self,
        step: &mut OptimizerStep<'_>,
        grads: &[Option<Gradient<'_>>],
    ) -> Result<Applied> {
        let OptimizerStep { optimizer, ctl, .. } = step;
        self.lend_for_step(grads, |lent| on_device(&mut **optimizer)?.step_on_device(lent, ctl))
    }

    fn buckets(
        &self,
        group: ProcessGroup,
        params: Vec<(usize, ParamInfo)>,
        options: ReducerOptions,
    ) -> Result<Box<dyn DeviceBuckets>> {
        Ok(Box::new(Buckets::new(self.on_gpu()?.clone(), group, params, options)?))
    }

    fn zero_gradient(&self, index: usize) -> Result<Box<dyn DeviceTensor>> {
        let zeros = self.params.tensors[index].detach().zeros_like();
        Ok(Box::new(OnDevice::new(zeros.map_err(|e| failed("making zeros", e))?)))
    }

    fn averages(&self, of: Averaged) -> Result<Box<dyn DeviceAverages>> {
        let (params, buffers) = (&self.params.tensors[..], &self.buffers.tensors[..]);
        let of = match of {
            Averaged::Params => params.to_vec(),
            Averaged::Buffers => buffers.to_vec(),
            Averaged::Model => [params, buffers].concat(),
        };
        check_streams(&of, self.on_gpu()?)?;
        let counts: Vec<usize> = of.iter().map(Tensor::elem_count).collect();
        let kept = cuda::Averages::new(self.on_gpu()?.clone(), &counts).map_err(averaging)?;
        Ok(Box::new(Averages { of, kept }))
    }
}

/// Moving averages of tensors on the GPU. Requires that the tensors keep their addresses.
#[derive(Debug)]
struct Averages {
    of: Vec<Tensor>,
    kept: cuda::Averages,
}

impl DeviceAverages for Averages {
    fn update(&mut self, share: Option<f32>) -> Result<()> {
        let of = self.of.iter().map(address).collect::<Result<Vec<_>>>()?;
        // SAFETY: this value keeps the tensors, and candle and optimizers write them in the order
        // of the same stream.
        unsafe { self.kept.update(&of, share) }.map_err(averaging)
    }

    fn to_host(&self) -> Result<Vec<Vec<f32>>> {
        self.kept.to_host().map_err(averaging)
    }

    fn load(&mut self, averages: &[Vec<f32>]) -> Result<()> {
        self.kept.load(averages).map_err(averaging)
    }
}

fn averaging(error: fused_optim::Error) -> Error {
    Error::model(format!("averaging parameters: {error}"))
}

/// Returns the address of a gradient or average that is used in the stream of `gpu`.
fn address_of(grad: &dyn DeviceTensor, gpu: &Gpu) -> Result<DeviceSlice> {
    let any: &dyn Any = grad;
    let (at, stream) = match any.downcast_ref::<Average>() {
        Some(average) => (average.at, Some(average.gpu.stream().clone())),
        None => {
            let tensor = own(grad)?.tensor();
            let stream = tensor.device().as_cuda_device().map(|device| device.cuda_stream());
            (address(&tensor)?, stream.ok())
        }
    };
    match stream.as_ref() == Some(gpu.stream()) {
        true => Ok(at),
        false => Err(Error::model(FOREIGN)),
    }
}

/// Returns an error unless candle uses these tensors in the stream of `gpu`.
fn check_streams(tensors: &[Tensor], gpu: &Gpu) -> Result<()> {
    let is_there = |tensor: &Tensor| {
        let device = tensor.device().as_cuda_device();
        device.is_ok_and(|device| device.cuda_stream() == *gpu.stream())
    };
    match tensors.iter().all(is_there) {
        true => Ok(()),
        false => Err(Error::model("a parameter or buffer is not on the model's GPU")),
    }
}

/// Returns the address of a tensor.
fn address(tensor: &Tensor) -> Result<DeviceSlice> {
    tensor.try_into().map_err(|e| failed("lending a tensor", e))
}

/// A [`DeviceReducer`] of candle's tensors, on candle's stream, and its averages.
#[derive(Debug)]
struct Buckets {
    reducer: DeviceReducer<Kernels>,
    /// Candle's stream, which outlives the reducer.
    gpu: Gpu,
    /// Average of each parameter's gradients, if there is one.
    averages: Vec<Option<Average>>,
}

impl Buckets {
    /// Creates buckets for the gradients of `params`, by their index in the model; every rank of
    /// the group creates them alike. `gpu` uses candle's stream.
    fn new(
        gpu: Gpu,
        group: ProcessGroup,
        params: Vec<(usize, ParamInfo)>,
        options: ReducerOptions,
    ) -> Result<Self> {
        let (indices, params): (Vec<_>, Vec<_>) = params.into_iter().unzip();
        let averages = vec![None; params.len()];
        let kernels = Kernels {
            ordinal: gpu.stream().context().ordinal(),
            gpu: None,
            indices,
            members: Vec::new(),
            stats: None,
        };
        Ok(Self { reducer: DeviceReducer::new(group, params, options, kernels)?, gpu, averages })
    }

    fn stream(&self) -> DeviceStream {
        // SAFETY: candle's stream on the group's device, which `gpu` keeps until after the reducer
        // is gone.
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
        // SAFETY: a tensor, contiguous, which candle frees in order of its stream.
        let grad = unsafe { DeviceBuf::from_slice(address_of(grad, &self.gpu)?) }?;
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
            let at = self.reducer.grad(index).map(slice_of).transpose()?;
            *average = at.map(|at| Average { at, gpu: self.gpu.clone() });
        }
        Ok(())
    }

    fn settle(&self) -> Result<()> {
        Ok(self.reducer.wait()?)
    }

    fn grad(&self, index: usize) -> Option<&dyn DeviceTensor> {
        let average: &dyn DeviceTensor = self.averages[index].as_ref()?;
        Some(average)
    }

    fn needs_gradient(&self, index: usize) -> bool {
        self.reducer.needs_gradient(index)
    }

    fn zero_grad(&mut self) {
        self.averages.fill(None);
        self.reducer.zero_grad();
    }
}

/// An average in its bucket, valid in the order of candle's stream until the next pass.
#[derive(Clone, Debug)]
struct Average {
    at: DeviceSlice,
    gpu: Gpu,
}

impl Average {
    /// Calls `read` with the elements.
    fn read<T: DeviceRepr, R>(
        &self,
        read: impl FnOnce(&CudaSlice<T>) -> std::result::Result<R, DriverError>,
    ) -> Result<R> {
        let (stream, at) = (self.gpu.stream(), self.at);
        // SAFETY: the address is a bucket of this many elements of this type, which lives as long
        // as the reducer; the slice is leaked below, not freed.
        let bucket: CudaSlice<T> = unsafe { stream.upgrade_device_ptr(at.ptr, at.len) };
        let result = read(&bucket);
        let _address = bucket.leak();
        result.map_err(|e| Error::model(format!("copying an average: {e}")))
    }

    /// Copies the elements to the host, in order of candle's stream.
    fn copy<T: DeviceRepr>(&self) -> Result<Vec<T>> {
        self.read(|bucket| self.gpu.stream().clone_dtoh(bucket))
    }

    /// Copies the elements to a tensor like `var`, in order of candle's stream.
    fn to_tensor<T: CudaDType + DeviceRepr>(&self, var: &Tensor) -> Result<Tensor> {
        let device = var.device().as_cuda_device().map_err(|e| failed("copying an average", e))?;
        let copy = self.read::<T, _>(|bucket| self.gpu.stream().clone_dtod(bucket))?;
        let storage = Storage::Cuda(CudaStorage::wrap_cuda_slice(copy, device.clone()));
        Ok(Tensor::from_storage(storage, var.shape(), BackpropOp::none(), false))
    }
}

/// Returns a gradient or average of the variable `var` as a tensor.
pub(crate) fn to_tensor(grad: &dyn DeviceTensor, var: &Tensor) -> Result<Tensor> {
    let any: &dyn Any = grad;
    match any.downcast_ref::<Average>() {
        None => Ok(own(grad)?.tensor()),
        Some(average) => match average.dtype() {
            DType::F32 => average.to_tensor::<f32>(var),
            DType::F16 => average.to_tensor::<f16>(var),
            DType::Bf16 => average.to_tensor::<bf16>(var),
        },
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
        Err(Error::model(NO_SUM))
    }

    fn add(&mut self, _: &dyn DeviceTensor) -> Result<()> {
        Err(Error::model(NO_SUM))
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

/// The memory in the types of `fused-optim`.
fn slice_of(buf: DeviceBuf) -> collective::Result<DeviceSlice> {
    let dtype = match buf.dtype() {
        collective::DType::F32 => cuda::DType::F32,
        collective::DType::F16 => cuda::DType::F16,
        collective::DType::Bf16 => cuda::DType::Bf16,
        other => {
            let what = format!("gradients of {other}; expected f32, f16 or bf16");
            return Err(collective::Error::Unsupported { backend: "nccl", what });
        }
    };
    Ok(DeviceSlice { ptr: buf.address(), len: buf.count(), dtype })
}

/// The casts of `amp` for buckets in 16 bits, and the optimizer's statistics of averages.
#[derive(Debug)]
struct Kernels {
    ordinal: usize,
    /// The device, with the stream of the buckets.
    gpu: Option<Gpu>,
    /// The index in the model, by parameter.
    indices: Vec<usize>,
    /// For each bucket, the indices of its parameters in the model, and the addresses of their
    /// averages.
    members: Vec<Vec<(usize, DeviceSlice)>>,
    /// Set in a pass before a step that needs them.
    stats: Option<GradStats>,
}

impl Kernels {
    /// Opens the device, if it is not open yet.
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
        // A pass was not finished: no stream waits for its statistics, which read the optimizer's
        // tables. They are never freed.
        std::mem::forget(self.stats.take());
    }
}

impl BucketKernels for Kernels {
    fn laid_out(&mut self, plan: &BucketPlan, buckets: &[DeviceBuf]) -> collective::Result<()> {
        let member = |index: usize| {
            let place = plan.slots()[index];
            let at = buckets[place.bucket].part(place.offset..place.offset + place.count)?;
            Ok((self.indices[index], slice_of(at)?))
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
        let (from, to) = (slice_of(from)?, slice_of(to)?);
        // SAFETY: the caller vouches for both, in order of the stream.
        unsafe { amp::cuda::cast(&gpu, from, to) }.map_err(|e| kernel("cast a bucket", &e))
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
        // SAFETY: the averages of the pass whose end `finish` has candle's stream, the optimizer's,
        // wait for, and that is followed by the step that the statistics are for; the bucket's
        // stream comes behind candle's as it was when the bucket was full, which is behind the last
        // step. A pass that is not finished never frees the tables.
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

/// Autotunes `optimizer` on parameters of these shapes; returns a description.
///
/// # Errors
///
/// The reason why it did not.
pub fn tune_optimizer(
    params: &[TensorSpec],
    optimizer: &mut dyn Optimizer,
) -> std::result::Result<String, String> {
    let like = |spec: &TensorSpec| {
        let weight = DeviceSlice { ptr: 0, len: spec.count(), dtype: spec.dtype.into() };
        DeviceParam { rows: spec.rows(), ..DeviceParam::new(weight, None) }
    };
    let params: Vec<_> = params.iter().map(like).collect();
    let device = optimizer.as_device().ok_or("the optimizer is on the host")?;
    let tuned = device.tune(&params).map_err(|e| e.to_string())?;
    let each = tuned.iter().map(|Tuned { types: (weight, _), shape, searched }| {
        let how = match searched.len() {
            0 => "from the cache".to_owned(),
            tried => format!("the fastest of {tried}"),
        };
        let LaunchShape { blocks, sweep, pack } = shape;
        format!(
            "{weight} weights by up to {blocks} blocks a multiprocessor, {sweep} elements a warp \
             and {pack} a thread at a time ({how})"
        )
    });
    let each = each.collect::<Vec<_>>().join(", ");
    Ok(format!("autotuning of the optimizer: {each}"))
}
