//! Averages gradients on a rank's GPU by NCCL during the backward pass.
//!
//! A gradient is copied into its bucket in the order of candle's stream; buckets are sent in a
//! stream of the reducer, and the step waits for them by events. The host does not wait. If the
//! step needs statistics of the gradients, their norm or whether they are finite, these can be
//! computed after the all-reduce of each bucket, while the bucket is in the device's cache.

#![expect(unsafe_code, reason = "hands addresses of tensors, and candle's stream, to the reducer")]

use candle_core::cuda_backend::CudaDType;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, DeviceRepr};
use candle_core::op::BackpropOp;
use candle_core::{CudaStorage, Storage, Tensor, Var};
use collective::ProcessGroup;
use collective::device::{DeviceBuf, DeviceStream};
use collective::reducer::{BucketKernels, BucketPlan, DeviceReducer, ParamInfo, ReducerOptions};
use fused_optim::candle::VarOptimizer;
use fused_optim::cuda::{self, DeviceSlice, Gpu};
use fused_optim::{Applied, GradStats, Optimizer, StepCtl};
use half::{bf16, f16};

use crate::{Error, Result};

/// A [`DeviceReducer`] of candle's tensors, on candle's stream.
#[derive(Debug)]
pub struct GpuBuckets {
    reducer: DeviceReducer<Kernels>,
    /// Candle's stream, which outlives the reducer.
    gpu: Gpu,
}

impl GpuBuckets {
    /// A reducer that averages the gradients of `params` over the ranks, by their index in the
    /// optimizer. Every rank of the group must create it with the same arguments. `gpu` uses
    /// candle's stream.
    ///
    /// # Errors
    ///
    /// As [`DeviceReducer::new`].
    pub fn new(
        gpu: Gpu,
        group: ProcessGroup,
        params: Vec<(usize, ParamInfo)>,
        options: ReducerOptions,
    ) -> collective::Result<Self> {
        let (indices, params): (_, Vec<_>) = params.into_iter().unzip();
        let kernels = Kernels {
            ordinal: gpu.stream().context().ordinal(),
            gpu: None,
            indices,
            members: Vec::new(),
            stats: None,
        };
        Ok(Self { reducer: DeviceReducer::new(group, params, options, kernels)?, gpu })
    }

    fn stream(&self) -> DeviceStream {
        // SAFETY: candle's stream on the group's device, which `gpu` keeps until after the reducer
        // is gone.
        unsafe { DeviceStream::from_raw(self.gpu.stream().cu_stream().cast()) }
    }

    /// The GPU, with candle's stream.
    #[must_use]
    pub const fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// Begins a pass whose gradients are averaged. `stats` are the statistics that the following
    /// step needs, if any.
    ///
    /// # Errors
    ///
    /// As [`DeviceReducer::prepare`].
    pub fn prepare(&mut self, stats: Option<GradStats>) -> collective::Result<()> {
        self.reducer.prepare(true)?;
        self.reducer.kernels_mut().stats = stats;
        Ok(())
    }

    /// Adds the gradient of a parameter: contiguous, on the device of candle's stream.
    ///
    /// # Errors
    ///
    /// As [`DeviceReducer::ready`]; a tensor of another device, stream or layout.
    pub fn ready(&mut self, index: usize, grad: &Tensor) -> Result<()> {
        if grad.device().as_cuda_device()?.cuda_stream() != *self.gpu.stream() {
            let text = format!("gradient {index} is of another stream than the variables");
            return Err(Error::InvalidArgument(text));
        }
        // SAFETY: a tensor, contiguous, which candle frees in order of its stream.
        let grad = unsafe { DeviceBuf::from_slice(grad.try_into()?) }?;
        let stream = self.stream();
        // SAFETY: as above, and candle writes it in that stream; the buckets are the reducer's own.
        Ok(unsafe { self.reducer.ready(index, grad, stream) }?)
    }

    /// Ends the pass: later work in candle's stream waits for the averages.
    ///
    /// # Errors
    ///
    /// As [`DeviceReducer::finish`].
    pub fn finish(&mut self) -> collective::Result<()> {
        let stream = self.stream();
        // SAFETY: the stream outlives the reducer; optimizers use the averages in it alone.
        unsafe { self.reducer.finish(stream) }?;
        self.reducer.kernels_mut().stats = None;
        Ok(())
    }

    /// The average of a parameter, if it has one. It is valid in the order of candle's stream until
    /// the next pass.
    ///
    /// # Panics
    ///
    /// If it is of another type than f32, f16 and bf16, which is an error when buckets are laid
    /// out.
    #[must_use]
    pub fn grad(&self, index: usize) -> Option<DeviceSlice> {
        let slice = |buf| slice_of(buf).expect("`laid_out` has refused other types");
        self.reducer.grad(index).map(slice)
    }

    /// As [`DeviceReducer::needs_gradient`].
    #[must_use]
    pub fn needs_gradient(&self, index: usize) -> bool {
        self.reducer.needs_gradient(index)
    }

    /// Drops the averages.
    pub fn zero_grad(&mut self) {
        self.reducer.zero_grad();
    }
}

/// A model's gradients on its GPU: this rank's own tensors, or averages in buckets.
#[derive(Debug)]
pub(crate) struct OnGpu {
    kept: Vec<Option<Tensor>>,
    names: Vec<String>,
    find_unused: bool,
    /// Averages over several ranks.
    buckets: Option<GpuBuckets>,
    /// Whether the last pass was one with `sync`.
    sync: bool,
}

impl OnGpu {
    pub(crate) fn new(
        first: &Var,
        params: Vec<ParamInfo>,
        group: &ProcessGroup,
        options: ReducerOptions,
    ) -> Result<Self> {
        let names = params.iter().map(|param| param.name.clone()).collect();
        let (kept, find_unused) = (vec![None; params.len()], options.find_unused_parameters);
        let stream = first.device().as_cuda_device()?.cuda_stream();
        let gpu = Gpu::on(stream).map_err(candle_core::Error::wrap)?;
        gpu.keep_freed_memory().map_err(candle_core::Error::wrap)?;
        let make = || {
            GpuBuckets::new(gpu, group.clone(), params.into_iter().enumerate().collect(), options)
        };
        let buckets = (group.world_size() > 1).then(make).transpose()?;
        Ok(Self { kept, names, find_unused, buckets, sync: false })
    }

    pub(crate) fn prepare(&mut self, sync: bool) -> Result<()> {
        self.sync = sync;
        match self.buckets.as_mut().filter(|_| sync) {
            Some(buckets) => Ok(buckets.prepare(None)?),
            None => Ok(()),
        }
    }

    pub(crate) fn ready(&mut self, index: usize, gradient: &Tensor) -> Result<()> {
        let sum = match self.kept[index].take() {
            Some(others) => (others + gradient)?,
            None => gradient.detach(),
        };
        match self.buckets.as_mut().filter(|_| self.sync) {
            Some(buckets) => buckets.ready(index, &sum),
            None => {
                self.kept[index] = Some(sum);
                Ok(())
            }
        }
    }

    pub(crate) fn needs(&self, index: usize) -> bool {
        let buckets = self.buckets.as_ref().filter(|_| self.sync);
        buckets.is_none_or(|buckets| buckets.needs_gradient(index))
    }

    pub(crate) fn finish(&mut self) -> Result<()> {
        if let Some(buckets) = self.buckets.as_mut().filter(|_| self.sync) {
            // Parameters that had a gradient in earlier passes, and have none in this one.
            let kept = self.kept.iter_mut().enumerate();
            for (index, kept) in kept.filter_map(|(index, kept)| Some((index, kept.take()?))) {
                buckets.ready(index, &kept)?;
            }
            return Ok(buckets.finish()?);
        }
        let has_none = self.kept.iter().zip(&self.names).filter(|(kept, _)| kept.is_none());
        let names: Vec<_> = has_none.map(|(_, name)| name.clone()).collect();
        if self.sync && !self.find_unused && !names.is_empty() {
            return Err(collective::Error::UnusedParameters { rank: 0, names }.into());
        }
        Ok(())
    }

    /// Drops all gradients.
    pub(crate) fn zero_grad(&mut self) {
        self.kept.fill(None);
        self.buckets.iter_mut().for_each(GpuBuckets::zero_grad);
    }

    /// A step of an optimizer of the same variables.
    pub(crate) fn step<O: Optimizer>(
        &self,
        optimizer: &mut VarOptimizer<O>,
        ctl: &StepCtl,
    ) -> Result<Applied> {
        let Some(buckets) = self.buckets.as_ref().filter(|_| self.sync) else {
            return Ok(optimizer.step_tensors(&self.kept, ctl)?);
        };
        let averages: Vec<_> = (0..self.kept.len()).map(|index| buckets.grad(index)).collect();
        // SAFETY: buckets of this GPU, complete in candle's stream by `finish`, and written again
        // by the next pass in order of it.
        Ok(unsafe { optimizer.step_device_slices(&averages, ctl) }?)
    }

    /// A copy of a gradient.
    pub(crate) fn tensor(&self, index: usize, var: &Var) -> Result<Option<Tensor>> {
        let Some(buckets) = self.buckets.as_ref().filter(|_| self.sync) else {
            return Ok(self.kept[index].clone());
        };
        let Some(at) = buckets.grad(index) else { return Ok(None) };
        let copy = match at.dtype {
            cuda::DType::F32 => buckets.copy::<f32>(at, var)?,
            cuda::DType::F16 => buckets.copy::<f16>(at, var)?,
            cuda::DType::Bf16 => buckets.copy::<bf16>(at, var)?,
        };
        Ok(Some(copy))
    }
}

impl GpuBuckets {
    /// A tensor like `var` with these values, copied in the order of candle's stream.
    fn copy<T: CudaDType + DeviceRepr>(&self, at: DeviceSlice, var: &Var) -> Result<Tensor> {
        let (stream, device) = (self.gpu.stream(), var.device().as_cuda_device()?);
        // SAFETY: a bucket of that many elements of this type, which lives until the reducer goes;
        // it is given back below.
        let bucket: CudaSlice<T> = unsafe { stream.upgrade_device_ptr(at.ptr, at.len) };
        let copy = stream.clone_dtod(&bucket);
        let _address = bucket.leak();
        let copy = copy.map_err(candle_core::Error::wrap)?;
        let storage = Storage::Cuda(CudaStorage::wrap_cuda_slice(copy, device.clone()));
        Ok(Tensor::from_storage(storage, var.shape(), BackpropOp::none(), false))
    }
}

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
