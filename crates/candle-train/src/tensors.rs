//! A model's tensors lent to a step of `train-step`, and its gradients in device memory.

use std::any::Any;
use std::sync::Arc;

#[cfg(feature = "cuda")]
use std::thread::ThreadId;

use candle_core::{DType, Device, Tensor};
use collective::ProcessGroup;
use fused_optim::candle::{slice, tensor};
#[cfg(feature = "cuda")]
use fused_optim::cuda::Gpu;
use fused_optim::{Slice, SliceMut};
use half::{bf16, f16};
use parking_lot::Mutex;
use train_step::{
    DeviceModel, DeviceTensor, Error, HostTensor, Model, Result, SharedSink, TensorSpec, Visit,
};

/// Tensors of one kind: specs and memory, by the same index.
///
/// Invariant: a tensor owns its storage, contiguous and whole. So [`lend`](Self::lend) can take the
/// memory out, lend it as plain slices, and put it back.
#[derive(Debug, Default)]
pub struct Tensors {
    /// Names, shapes and types.
    pub specs: Vec<TensorSpec>,
    /// The tensors.
    pub tensors: Vec<Tensor>,
}

impl Tensors {
    /// Adds a tensor.
    pub fn add(&mut self, spec: TensorSpec, tensor: Tensor) {
        self.specs.push(spec);
        self.tensors.push(tensor);
    }

    /// Copies all tensors.
    ///
    /// # Errors
    ///
    /// Memory that cannot be allocated.
    pub fn copies(&self) -> candle_core::Result<Vec<Tensor>> {
        self.tensors.iter().map(|tensor| tensor.detach().copy()).collect()
    }

    /// Sets all tensors in place.
    ///
    /// # Errors
    ///
    /// Another shape or type.
    pub fn set_all(&self, values: &[Tensor]) -> candle_core::Result<()> {
        self.tensors.iter().zip(values).try_for_each(|(to, from)| set(to, from))
    }

    /// Lends the memory to `visit`, one slice each, and puts it back in any case. Tensors on a
    /// device are lent as copies, which are copied back.
    ///
    /// # Errors
    ///
    /// Those of `visit`; a violation of this type's invariant; a failed copy.
    pub fn lend(&self, visit: &mut Visit<'_>) -> Result<()> {
        if self.tensors.iter().all(|tensor| tensor.device().is_cpu()) {
            return self.lend_memory(&self.tensors, visit);
        }
        let failed = |e| failed("copying parameters or buffers", e);
        let copy = |tensor: &Tensor| tensor.detach().to_device(&Device::Cpu);
        let copies = self.tensors.iter().map(copy).collect::<candle_core::Result<Vec<_>>>();
        let copies = copies.map_err(failed)?;
        let visited = self.lend_memory(&copies, visit);
        for (tensor, copy) in self.tensors.iter().zip(&copies) {
            let back = copy.to_device(tensor.device()).and_then(|back| set(tensor, &back));
            back.map_err(failed)?;
        }
        visited
    }

    fn lend_memory(&self, tensors: &[Tensor], visit: &mut Visit<'_>) -> Result<()> {
        let label = |index: usize| format!("lending `{}`", self.specs[index].name);
        let visit = |slices: &mut [SliceMut<'_>]| visit(slices);
        fused_optim::candle::lend(&tensors.iter().collect::<Vec<_>>(), label, visit)
            .map_err(Error::model)?
    }
}

/// Copies the elements in place. Both tensors are flattened first, because a scalar has no
/// dimension.
///
/// # Errors
///
/// Another number of elements, or another type.
pub fn set(to: &Tensor, from: &Tensor) -> candle_core::Result<()> {
    if to.elem_count() == 0 {
        return Ok(());
    }
    to.detach().flatten_all()?.slice_set(&from.contiguous()?.flatten_all()?, 0, 0)
}

/// The tensors of a candle model, as a [`Model`].
#[derive(Debug, Default)]
pub struct ModelTensors {
    /// Trained parameters.
    pub params: Tensors,
    /// Statistics of norm layers.
    pub buffers: Tensors,
    /// Parameters that are not trained.
    pub frozen: Tensors,
    /// Their GPU, with candle's stream; `None` for the host.
    #[cfg(feature = "cuda")]
    gpu: Option<Gpu>,
    /// The thread of that stream, if candle may have another stream on other threads.
    #[cfg(feature = "cuda")]
    thread: Option<ThreadId>,
}

impl Tensors {
    /// Returns an error unless the device computes in the tensors' types, and in that of autocast.
    pub(crate) fn check_types(&self, half: Option<amp::DType>) -> candle_core::Result<()> {
        let half = (half == Some(amp::DType::Bf16)).then_some(DType::BF16);
        let mut types = self.tensors.iter().map(Tensor::dtype).chain(half);
        types.try_for_each(|dtype| candle_ops::check_dtype(self.tensors[0].device(), dtype))
    }
}

/// Returns an error for a group that cannot average in the memory of the variables' device.
pub(crate) fn check_group(group: &ProcessGroup, tensors: &ModelTensors) -> crate::Result<()> {
    let is_there = group.world_size() == 1 || group.backend_name() == "nccl";
    if is_there || tensors.params.tensors[0].device().is_cpu() {
        return Ok(());
    }
    Err(crate::Error::InvalidArgument(format!(
        "variables on a GPU need a group over NCCL; this one averages by `{}`: {}; remove `group`, or create it with \
         `GroupOptions::with_cuda_device`",
        group.backend_name(),
        group.backend_reason()
    )))
}

impl ModelTensors {
    /// The parameters of a model without other tensors. On a GPU freed memory is kept for the next
    /// step.
    pub(crate) fn of_params(params: Tensors) -> crate::Result<Self> {
        let mut tensors = Self { params, ..Self::default() };
        let device = tensors.params.tensors[0].device().clone();
        let mut others = tensors.params.specs.iter().zip(&tensors.params.tensors);
        if let Some((spec, other)) = others.find(|(_, of)| !of.device().same_device(&device)) {
            let (name, at, first) = (&spec.name, other.device().location(), device.location());
            let text = format!(
                "`{name}` is on {at:?}; expected {first:?}, the device of the first variable"
            );
            return Err(crate::Error::InvalidArgument(text));
        }
        if !device.is_cpu() {
            tensors.open(&device)?;
        }
        Ok(tensors)
    }

    #[cfg(feature = "cuda")]
    fn open(&mut self, device: &Device) -> crate::Result<()> {
        let stream = device.as_cuda_device()?.cuda_stream();
        let gpu = Gpu::on(stream).map_err(candle_core::Error::wrap)?;
        gpu.keep_freed_memory().map_err(candle_core::Error::wrap)?;
        self.gpu = Some(gpu);
        self.thread = Some(std::thread::current().id());
        Ok(())
    }

    /// Sets the GPU of all tensors, with candle's stream, which is one for all threads.
    #[cfg(feature = "cuda")]
    pub fn set_gpu(&mut self, gpu: Gpu) {
        self.gpu = Some(gpu);
    }

    /// Returns the GPU.
    ///
    /// # Errors
    ///
    /// If the model is on the host; on another thread than a [`Trainer`](crate::Trainer)'s:
    /// candle's stream may differ there.
    #[cfg(feature = "cuda")]
    pub fn on_gpu(&self) -> Result<&Gpu> {
        let gpu = self.gpu.as_ref().ok_or_else(|| Error::model("the model is on the host"))?;
        match self.thread.is_none_or(|thread| thread == std::thread::current().id()) {
            true => Ok(gpu),
            false => Err(Error::model(
                "a step on another thread than the one that created the trainer; candle's stream differs there",
            )),
        }
    }

    #[cfg(not(feature = "cuda"))]
    #[expect(clippy::needless_pass_by_ref_mut, clippy::unused_self, reason = "as with the feature")]
    fn open(&mut self, device: &Device) -> crate::Result<()> {
        let text = format!("variables on {:?}: only the CPU is supported", device.location());
        Err(crate::Error::InvalidArgument(text))
    }
}

impl Model for ModelTensors {
    fn params(&self) -> &[TensorSpec] {
        &self.params.specs
    }

    fn buffers(&self) -> &[TensorSpec] {
        &self.buffers.specs
    }

    fn frozen(&self) -> &[TensorSpec] {
        &self.frozen.specs
    }

    fn with_params(&mut self, visit: &mut Visit<'_>) -> Result<()> {
        self.params.lend(visit)
    }

    fn with_buffers(&mut self, visit: &mut Visit<'_>) -> Result<()> {
        self.buffers.lend(visit)
    }

    fn with_frozen(&mut self, visit: &mut Visit<'_>) -> Result<()> {
        self.frozen.lend(visit)
    }

    fn on_device(&mut self) -> Option<&mut dyn DeviceModel> {
        #[cfg(feature = "cuda")]
        if self.gpu.is_some() {
            return Some(self);
        }
        None
    }
}

/// A contiguous gradient in device memory, with the type of its parameter. Its address may change
/// while this value exists: a graph writes the next gradient to the old address.
#[derive(Debug)]
pub struct OnDevice(pub Arc<Mutex<Tensor>>);

impl OnDevice {
    /// Wraps a gradient.
    #[must_use]
    pub fn new(tensor: Tensor) -> Self {
        Self(Arc::new(Mutex::new(tensor)))
    }

    /// Returns the gradient.
    #[must_use]
    pub fn tensor(&self) -> Tensor {
        self.0.lock().clone()
    }

    fn set(&self, sum: candle_core::Result<Tensor>) -> Result<()> {
        *self.0.lock() = sum.map_err(|e| failed("adding gradients", e))?;
        Ok(())
    }
}

impl DeviceTensor for OnDevice {
    fn dtype(&self) -> fused_optim::DType {
        // Gradients of other types do not exist.
        self.tensor().dtype().try_into().unwrap_or(fused_optim::DType::F32)
    }

    fn count(&self) -> usize {
        self.tensor().elem_count()
    }

    fn add(&mut self, term: &dyn DeviceTensor) -> Result<()> {
        self.set(self.tensor() + own(term)?.tensor())
    }

    fn add_host(&mut self, term: Slice<'_>) -> Result<()> {
        let sum = || {
            let own = self.tensor();
            let term = tensor(term, own.shape(), own.device())?;
            own + term
        };
        self.set(sum())
    }

    fn to_host(&self) -> Result<HostTensor> {
        let copy = || {
            let flat = self.tensor().flatten_all()?;
            Ok(match flat.dtype() {
                DType::F16 => HostTensor::F16(flat.to_vec1::<f16>()?),
                DType::BF16 => HostTensor::Bf16(flat.to_vec1::<bf16>()?),
                _ => HostTensor::F32(flat.to_vec1::<f32>()?),
            })
        };
        copy().map_err(|e| failed("copying a gradient", e))
    }
}

/// Returns the gradient of a candle model.
///
/// # Errors
///
/// A gradient of something else.
pub(crate) fn own(tensor: &dyn DeviceTensor) -> Result<&OnDevice> {
    let any: &dyn Any = tensor;
    any.downcast_ref().ok_or_else(|| Error::model(FOREIGN))
}

/// Reports the contiguous gradient of a parameter.
///
/// # Errors
///
/// Those of the sink, unchanged; a gradient of a type other than f32, f16 and bf16.
pub fn report(sink: &SharedSink, index: usize, gradient: Tensor) -> Result<()> {
    if !gradient.device().is_cpu() {
        return sink.lock().ready_on_device(index, Box::new(OnDevice::new(gradient)));
    }
    let (storage, layout) = gradient.storage_and_layout();
    match slice(&storage, layout) {
        Some(slice) => sink.lock().ready(index, slice),
        None => Err(Error::model(format!(
            "backward: unsupported type {:?} of the gradient of parameter {index}",
            gradient.dtype()
        ))),
    }
}

pub(crate) const FOREIGN: &str = "the gradient belongs to another engine";

pub(crate) fn failed(during: &str, error: candle_core::Error) -> Error {
    Error::model(format!("{during}: {error}"))
}
