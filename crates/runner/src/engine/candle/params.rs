//! Where a candle model's parameters live, and how their gradients are caught.
//!
//! candle's backward has no hooks. So each parameter is served as the *output* of an operator,
//! [`Source`], on a one-element dummy variable. candle visits the graph in topological order,
//! which makes the operator's backward run exactly once per pass, when the gradient is complete;
//! it hands the gradient to the sink and returns none, so that candle's own store stays empty.
//! Layers need not know.
//!
//! Invariant: a served tensor owns its storage, contiguous and whole, and no tensor is registered
//! after the model is built. That lets [`lend`] take the memory out, lend it as plain slices, and
//! put it back.

use std::collections::HashMap;
use std::sync::Arc;

use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::{
    CpuStorage, CudaStorage, CustomOp1, DType, Device, InplaceOp1, Layout, Shape, Storage, Tensor,
    Var, bail,
};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder};
use fused_optim::{Slice, SliceMut};
use half::{bf16, f16};
use parking_lot::Mutex;

use super::on_device::OnDevice;
use super::{candle_dtype, init};
use crate::engine::{GradSink, SharedSink, TensorSpec};
use crate::{Error, Result};

/// Tensors of one kind, specification and memory side by side.
#[derive(Default)]
pub(super) struct Tensors {
    pub(super) specs: Vec<TensorSpec>,
    pub(super) tensors: Vec<Tensor>,
}

impl Tensors {
    fn add(&mut self, spec: TensorSpec, tensor: Tensor) {
        self.specs.push(spec);
        self.tensors.push(tensor);
    }

    /// Copies of all.
    pub(super) fn copies(&self) -> candle_core::Result<Vec<Tensor>> {
        self.tensors.iter().map(|tensor| tensor.detach().copy()).collect()
    }

    /// Sets all, in place, where they are.
    pub(super) fn set_all(&self, values: &[Tensor]) -> candle_core::Result<()> {
        self.tensors.iter().zip(values).try_for_each(|(to, from)| set(to, from))
    }
}

/// Copies the elements in place, as lines: what a scalar has no dimension for.
pub(super) fn set(to: &Tensor, from: &Tensor) -> candle_core::Result<()> {
    if to.elem_count() == 0 {
        return Ok(());
    }
    to.detach().flatten_all()?.slice_set(&from.contiguous()?.flatten_all()?, 0, 0)
}

/// What a model has asked for so far.
#[derive(Default)]
struct Registry {
    served: HashMap<String, Tensor>,
    params: Tensors,
    buffers: Tensors,
    /// Set once the model is built.
    closed: bool,
}

/// Serves parameters and buffers to a model while it is built.
pub(super) struct Store {
    registry: Arc<Mutex<Registry>>,
    slot: Arc<Slot>,
}

impl Store {
    /// An empty store, and the builder through which a model fills it.
    pub(super) fn new(
        dtype: DType,
        seed: u64,
        device: &Device,
    ) -> Result<(Self, VarBuilder<'static>)> {
        let registry = Arc::default();
        let slot = Arc::default();
        let is_f64 = dtype == DType::F64;
        let root =
            Var::zeros(1, DType::F32, device).map_err(|e| Error::Engine(format!("candle: {e}")))?;
        let backend = Backend {
            registry: Arc::clone(&registry),
            slot: Arc::clone(&slot),
            root,
            seed,
            is_f64,
        };
        let builder = VarBuilder::from_backend(Box::new(backend), dtype, device.clone());
        Ok((Self { registry, slot }, builder))
    }

    /// Ends registration: parameters and buffers, in order of first request, and the slot their
    /// gradients go to.
    pub(super) fn close(self) -> (Tensors, Tensors, Arc<Slot>) {
        let mut registry = self.registry.lock();
        registry.closed = true;
        let params = std::mem::take(&mut registry.params);
        let buffers = std::mem::take(&mut registry.buffers);
        drop(registry);
        (params, buffers, self.slot)
    }
}

struct Backend {
    registry: Arc<Mutex<Registry>>,
    slot: Arc<Slot>,
    root: Var,
    seed: u64,
    is_f64: bool,
}

impl SimpleBackend for Backend {
    fn get(
        &self,
        shape: Shape,
        name: &str,
        init: Init,
        dtype: DType,
        device: &Device,
    ) -> candle_core::Result<Tensor> {
        let mut registry = self.registry.lock();
        // Of a model in f64, what a layer asks for in f32 for the sake of half precision is f64, too.
        let dtype = if self.is_f64 && !is_buffer(name) { DType::F64 } else { dtype };
        if let Some(tensor) = registry.served.get(name) {
            if *tensor.shape() != shape || tensor.dtype() != dtype {
                let (have, had) = (tensor.shape(), tensor.dtype());
                bail!("`{name}` is {have:?} of {had:?}, and asked for as {shape:?} of {dtype:?}");
            }
            return Ok(tensor.clone());
        }
        if registry.closed {
            bail!("`{name}` is new: a model asks for its parameters when it is built");
        }
        if !device.same_device(self.root.device()) {
            let own = self.root.device().location();
            bail!("`{name}` is asked for on {:?}; the engine is on {own:?}", device.location());
        }
        let values = init::values(init, &shape, self.seed, name);
        let (values, slice_dtype) = round(values, dtype)?;
        let spec =
            TensorSpec { name: name.to_owned(), shape: shape.dims().to_vec(), dtype: slice_dtype };
        let tensor = if is_buffer(name) {
            let source = Fill { values: Mutex::new(Some(values)), shape };
            let values = self.root.as_detached_tensor().apply_op1_no_bwd(&source)?;
            let tensor = Var::from_tensor(&values)?.into_inner();
            registry.buffers.add(spec, tensor.clone());
            tensor
        } else {
            let source = Source {
                index: registry.params.specs.len(),
                name: name.to_owned(),
                fill: Fill { values: Mutex::new(Some(values)), shape },
                slot: Arc::clone(&self.slot),
            };
            let tensor = self.root.apply_op1(source)?;
            registry.params.add(spec, tensor.clone());
            tensor
        };
        registry.served.insert(name.to_owned(), tensor.clone());
        Ok(tensor)
    }

    fn get_unchecked(
        &self,
        name: &str,
        dtype: DType,
        _device: &Device,
    ) -> candle_core::Result<Tensor> {
        match self.registry.lock().served.get(name) {
            Some(tensor) if tensor.dtype() == dtype => Ok(tensor.clone()),
            Some(tensor) => bail!("`{name}` is of {:?}, not {dtype:?}", tensor.dtype()),
            None => bail!("`{name}` does not exist yet, and its shape is not given"),
        }
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.registry.lock().served.contains_key(name)
    }
}

/// Whether a tensor of this name belongs to the model without being trained: PyTorch's names for
/// the statistics of its norm layers.
fn is_buffer(name: &str) -> bool {
    let last = name.rsplit('.').next().unwrap_or(name);
    matches!(last, "running_mean" | "running_var" | "num_batches_tracked")
}

fn round(values: Vec<f32>, dtype: DType) -> candle_core::Result<(CpuStorage, fused_optim::DType)> {
    Ok(match dtype {
        DType::F32 => (CpuStorage::F32(values), fused_optim::DType::F32),
        DType::F16 => {
            let values = values.into_iter().map(f16::from_f32).collect();
            (CpuStorage::F16(values), fused_optim::DType::F16)
        }
        DType::BF16 => {
            let values = values.into_iter().map(bf16::from_f32).collect();
            (CpuStorage::BF16(values), fused_optim::DType::Bf16)
        }
        // Such a model is never lent: nothing asks for its type.
        DType::F64 => {
            let values = values.into_iter().map(f64::from).collect();
            (CpuStorage::F64(values), fused_optim::DType::F32)
        }
        other => bail!("parameters are f32, f16, bf16 or f64, not {other:?}"),
    })
}

/// Gives a tensor its first values: forward moves them out.
struct Fill {
    values: Mutex<Option<CpuStorage>>,
    shape: Shape,
}

impl CustomOp1 for Fill {
    fn name(&self) -> &'static str {
        "fill"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        match self.values.lock().take() {
            Some(values) => Ok((values, self.shape.clone())),
            None => bail!("a tensor is filled once"),
        }
    }

    fn cuda_fwd(
        &self,
        root: &CudaStorage,
        _: &Layout,
    ) -> candle_core::Result<(CudaStorage, Shape)> {
        match self.values.lock().take() {
            Some(values) => {
                let values = root.device().storage_from_cpu_storage(&values)?;
                Ok((values, self.shape.clone()))
            }
            None => bail!("a tensor is filled once"),
        }
    }
}

/// The operator whose output is a parameter.
struct Source {
    index: usize,
    name: String,
    fill: Fill,
    slot: Arc<Slot>,
}

impl CustomOp1 for Source {
    fn name(&self) -> &'static str {
        "parameter"
    }

    fn cpu_fwd(
        &self,
        root: &CpuStorage,
        layout: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        self.fill.cpu_fwd(root, layout)
    }

    fn cuda_fwd(
        &self,
        root: &CudaStorage,
        layout: &Layout,
    ) -> candle_core::Result<(CudaStorage, Shape)> {
        self.fill.cuda_fwd(root, layout)
    }

    fn bwd(
        &self,
        _root: &Tensor,
        param: &Tensor,
        gradient: &Tensor,
    ) -> candle_core::Result<Option<Tensor>> {
        if gradient.shape() != param.shape() || gradient.dtype() != param.dtype() {
            let (name, got) = (&self.name, (gradient.shape(), gradient.dtype()));
            bail!("the gradient of `{name}` is {got:?}, the parameter {:?}", param.shape());
        }
        let gradient = gradient.contiguous()?;
        let taken = if !self.slot.take(self.index, &gradient) {
            true
        } else if gradient.device().is_cpu() {
            self.report_host(&gradient)?
        } else {
            let gradient = Box::new(OnDevice::new(gradient.detach()));
            self.slot.report(|sink| sink.ready_on_device(self.index, gradient))
        };
        if taken { Ok(None) } else { bail!("`{}` has a gradient nobody takes", self.name) }
    }
}

impl Source {
    /// Hands a gradient in the host's memory to the sink. False if nobody takes it.
    fn report_host(&self, gradient: &Tensor) -> candle_core::Result<bool> {
        let (storage, layout) = gradient.storage_and_layout();
        let (Storage::Cpu(storage), Some((start, end))) = (&*storage, layout.contiguous_offsets())
        else {
            bail!("the gradient of `{}` is not contiguous host memory", self.name);
        };
        let slice = match storage {
            CpuStorage::F32(v) => Slice::F32(&v[start..end]),
            CpuStorage::F16(v) => Slice::F16(&v[start..end]),
            CpuStorage::BF16(v) => Slice::Bf16(&v[start..end]),
            other => bail!("the gradient of `{}` is of {:?}", self.name, other.dtype()),
        };
        Ok(self.slot.report(|sink| sink.ready(self.index, slice)))
    }
}

/// Where gradients go while a backward pass runs.
#[derive(Default)]
pub(super) struct Slot(Mutex<Option<Pass>>);

struct Pass {
    sink: Option<SharedSink>,
    /// The gradients themselves, by parameter, if they are wanted.
    kept: Option<Vec<(usize, Tensor)>>,
    /// The sink's refusal, which stopped the pass.
    refusal: Option<Error>,
}

impl Slot {
    /// Runs `backward` with `sink` receiving the gradients. The sink's error, if it had one, comes
    /// back unchanged; candle's is wrapped. However `backward` ends, the sink is let go.
    pub(super) fn with<R>(
        &self,
        sink: &SharedSink,
        backward: impl FnOnce() -> candle_core::Result<R>,
    ) -> Result<R> {
        let sink = Some(Arc::clone(sink));
        self.run(Pass { sink, kept: None, refusal: None }, backward).map(|(result, _)| result)
    }

    /// As [`with`](Self::with), and returns the gradients, of any type, by parameter; without a sink nobody
    /// else receives them.
    pub(super) fn keep<R>(
        &self,
        sink: Option<&SharedSink>,
        backward: impl FnOnce() -> candle_core::Result<R>,
    ) -> Result<Vec<(usize, Tensor)>> {
        let kept = Some(Vec::new());
        self.run(Pass { sink: sink.cloned(), kept, refusal: None }, backward).map(|(_, kept)| kept)
    }

    fn run<R>(
        &self,
        pass: Pass,
        backward: impl FnOnce() -> candle_core::Result<R>,
    ) -> Result<(R, Vec<(usize, Tensor)>)> {
        struct Open<'a>(&'a Slot);
        impl Drop for Open<'_> {
            fn drop(&mut self) {
                *self.0.0.lock() = None;
            }
        }
        *self.0.lock() = Some(pass);
        let open = Open(self);
        let result = backward();
        match open.0.0.lock().take() {
            Some(Pass { refusal: Some(refusal), .. }) => Err(refusal),
            pass => match result {
                Ok(result) => Ok((result, pass.and_then(|pass| pass.kept).unwrap_or_default())),
                Err(e) => Err(Error::Engine(format!("backward: {e}"))),
            },
        }
    }

    /// Keeps a gradient, if they are wanted. Whether a sink waits for it.
    fn take(&self, index: usize, gradient: &Tensor) -> bool {
        let mut pass = self.0.lock();
        let Some(pass) = pass.as_mut() else { return true };
        if let Some(kept) = &mut pass.kept {
            kept.push((index, gradient.detach()));
        }
        pass.sink.is_some()
    }

    /// Hands a gradient to the sink. False if there is none, or it refused.
    fn report(&self, hand: impl FnOnce(&mut dyn GradSink) -> Result<()>) -> bool {
        let mut pass = self.0.lock();
        let Some(Pass { sink: Some(sink), refusal, .. }) = pass.as_mut() else { return false };
        let handed = hand(&mut *sink.lock());
        match handed {
            Ok(()) => true,
            Err(refused) => {
                *refusal = Some(refused);
                false
            }
        }
    }
}

/// Lends the memory of `tensors` to `visit`, one slice each, and puts it back however that ends. Of
/// tensors on a device it lends copies, and takes over what has become of them.
///
/// # Errors
///
/// Those of `visit`; a tensor that broke this module's invariant; a copy that failed.
pub(super) fn lend(
    tensors: &Tensors,
    visit: &mut dyn FnMut(&mut [SliceMut<'_>]) -> Result<()>,
) -> Result<()> {
    let Tensors { specs, tensors } = tensors;
    if tensors.iter().all(|tensor| tensor.device().is_cpu()) {
        return lend_memory(tensors, specs, visit);
    }
    let failed = |e| Error::Engine(format!("copying parameters or buffers: {e}"));
    let copy = |tensor: &Tensor| tensor.detach().to_device(&Device::Cpu);
    let copies: Vec<_> =
        tensors.iter().map(copy).collect::<candle_core::Result<_>>().map_err(failed)?;
    let visited = lend_memory(&copies, specs, visit);
    for (tensor, copy) in tensors.iter().zip(&copies) {
        let back = copy.to_device(tensor.device()).and_then(|back| set(tensor, &back));
        back.map_err(failed)?;
    }
    visited
}

fn lend_memory(
    tensors: &[Tensor],
    specs: &[TensorSpec],
    visit: &mut dyn FnMut(&mut [SliceMut<'_>]) -> Result<()>,
) -> Result<()> {
    let mut lent = Lent { tensors, taken: Vec::new() };
    for (tensor, spec) in tensors.iter().zip(specs) {
        let out = Swap(Mutex::new(empty(candle_dtype(spec.dtype))?));
        tensor
            .inplace_op1(&out)
            .map_err(|e| Error::Engine(format!("lending `{}`: {e}", spec.name)))?;
        lent.taken.push(out.0.into_inner());
    }
    let mut slices = Vec::with_capacity(lent.taken.len());
    for (taken, spec) in lent.taken.iter_mut().zip(specs) {
        slices.push(match taken {
            CpuStorage::F32(v) => SliceMut::F32(v),
            CpuStorage::F16(v) => SliceMut::F16(v),
            CpuStorage::BF16(v) => SliceMut::Bf16(v),
            other => {
                return Err(Error::Engine(format!("`{}` is of {:?}", spec.name, other.dtype())));
            }
        });
    }
    visit(&mut slices)
}

/// Memory taken out of the first tensors of a list; dropping it puts the memory back.
struct Lent<'a> {
    tensors: &'a [Tensor],
    taken: Vec<CpuStorage>,
}

impl Drop for Lent<'_> {
    fn drop(&mut self) {
        for (tensor, storage) in self.tensors.iter().zip(self.taken.drain(..)) {
            // Cannot fail: the same operator has just worked on the same tensor.
            let _ = tensor.inplace_op1(&Swap(Mutex::new(storage)));
        }
    }
}

/// Exchanges a tensor's storage with the one held. Never touches the elements.
struct Swap(Mutex<CpuStorage>);

impl InplaceOp1 for Swap {
    fn name(&self) -> &'static str {
        "swap"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> candle_core::Result<()> {
        let mut held = self.0.lock();
        let count = layout.shape().elem_count();
        if layout.contiguous_offsets() != Some((0, count)) {
            bail!("a view, not a tensor that owns its storage");
        }
        std::mem::swap(storage, &mut held);
        Ok(())
    }
}

fn empty(dtype: DType) -> Result<CpuStorage> {
    match dtype {
        DType::F32 => Ok(CpuStorage::F32(Vec::new())),
        DType::F16 => Ok(CpuStorage::F16(Vec::new())),
        DType::BF16 => Ok(CpuStorage::BF16(Vec::new())),
        other => Err(Error::Engine(format!("no parameter is of {other:?}"))),
    }
}
