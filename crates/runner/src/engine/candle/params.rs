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
use parking_lot::Mutex;

use super::on_device::OnDevice;
use super::{init, optim_dtype};
use crate::engine::{SharedSink, TensorSpec};
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

/// Builds a model, whose parameters and buffers are served to it: the model, both in order of first request, and the slot
/// that gradients go to.
pub(super) fn serve<M>(
    dtype: DType,
    seed: u64,
    device: &Device,
    build: impl FnOnce(VarBuilder<'static>) -> candle_core::Result<M>,
) -> Result<(M, Tensors, Tensors, Arc<Slot>)> {
    let root =
        Var::zeros(1, DType::F32, device).map_err(|e| Error::Engine(format!("candle: {e}")))?;
    let (registry, slot) = (Arc::<Mutex<Registry>>::default(), Arc::<Slot>::default());
    let backend = Backend {
        registry: Arc::clone(&registry),
        slot: Arc::clone(&slot),
        root,
        seed,
        is_f64: dtype == DType::F64,
    };
    let builder = VarBuilder::from_backend(Box::new(backend), dtype, device.clone());
    let model = build(builder).map_err(|e| Error::Engine(format!("building: {e}")))?;
    let mut registry = registry.lock();
    registry.closed = true;
    let params = std::mem::take(&mut registry.params);
    Ok((model, params, std::mem::take(&mut registry.buffers), slot))
}

/// Serves parameters and buffers to a model while it is built.
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
        let dims = shape.dims().to_vec();
        let spec = TensorSpec { name: name.to_owned(), shape: dims, dtype: optim_dtype(dtype)? };
        let tensor = if is_buffer(name) {
            let values = Tensor::from_vec(values, &shape, device)?.to_dtype(dtype)?;
            let tensor = Var::from_tensor(&values)?.into_inner();
            registry.buffers.add(spec, tensor.clone());
            tensor
        } else {
            let values = CpuStorage::F32(values).to_dtype(&Layout::contiguous(&shape), dtype)?;
            let source = Source {
                index: registry.params.specs.len(),
                name: name.to_owned(),
                shape,
                values: Mutex::new(Some(values)),
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

/// The operator whose output is a parameter.
struct Source {
    index: usize,
    name: String,
    shape: Shape,
    /// The first values, which forward moves out.
    values: Mutex<Option<CpuStorage>>,
    slot: Arc<Slot>,
}

impl Source {
    fn first_values(&self) -> candle_core::Result<CpuStorage> {
        let made = || candle_core::Error::msg("a parameter is made once");
        self.values.lock().take().ok_or_else(made)
    }
}

impl CustomOp1 for Source {
    fn name(&self) -> &'static str {
        "parameter"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        Ok((self.first_values()?, self.shape.clone()))
    }

    fn cuda_fwd(
        &self,
        root: &CudaStorage,
        _: &Layout,
    ) -> candle_core::Result<(CudaStorage, Shape)> {
        let values = root.device().storage_from_cpu_storage(&self.first_values()?)?;
        Ok((values, self.shape.clone()))
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
        let mut pass = self.slot.0.lock();
        let Some(pass) = pass.as_mut() else {
            bail!("`{}` has a gradient nobody takes", self.name)
        };
        pass.take(self, &gradient.contiguous()?)?;
        Ok(None)
    }
}

/// Gradients by parameter, in order of backward.
pub(super) type Gradients = Vec<(usize, Tensor)>;

/// Where gradients go while a backward pass runs.
#[derive(Default)]
pub(super) struct Slot(Mutex<Option<Pass>>);

struct Pass {
    sink: Option<SharedSink>,
    /// The gradients themselves, of any type, if they are wanted.
    kept: Option<Gradients>,
    /// The sink's refusal, which stopped the pass.
    refusal: Option<Error>,
}

impl Pass {
    /// Keeps a gradient and hands it to the sink, if there is one.
    fn take(&mut self, of: &Source, gradient: &Tensor) -> candle_core::Result<()> {
        if let Some(kept) = &mut self.kept {
            kept.push((of.index, gradient.detach()));
        }
        let Some(sink) = &self.sink else { return Ok(()) };
        let handed = if gradient.device().is_cpu() {
            let (storage, layout) = gradient.storage_and_layout();
            let (Storage::Cpu(storage), Some((start, end))) =
                (&*storage, layout.contiguous_offsets())
            else {
                bail!("the gradient of `{}` is not contiguous host memory", of.name);
            };
            let slice = match storage {
                CpuStorage::F32(v) => Slice::F32(&v[start..end]),
                CpuStorage::F16(v) => Slice::F16(&v[start..end]),
                CpuStorage::BF16(v) => Slice::Bf16(&v[start..end]),
                other => bail!("the gradient of `{}` is of {:?}", of.name, other.dtype()),
            };
            sink.lock().ready(of.index, slice)
        } else {
            let gradient = Box::new(OnDevice::new(gradient.detach()));
            sink.lock().ready_on_device(of.index, gradient)
        };
        if let Err(refusal) = handed {
            self.refusal = Some(refusal);
            bail!("the sink refused the gradient of `{}`", of.name);
        }
        Ok(())
    }
}

impl Slot {
    /// Runs `backward` with `sink` receiving the gradients, if there is one. The sink's error, if it had one, comes
    /// back unchanged; candle's is wrapped. However `backward` ends, the sink is let go. Returns the gradients, too, if
    /// there is a list to keep them in.
    pub(super) fn run<R>(
        &self,
        sink: Option<&SharedSink>,
        kept: Option<Gradients>,
        backward: impl FnOnce() -> candle_core::Result<R>,
    ) -> Result<Gradients> {
        struct Open<'a>(&'a Slot);
        impl Drop for Open<'_> {
            fn drop(&mut self) {
                *self.0.0.lock() = None;
            }
        }
        *self.0.lock() = Some(Pass { sink: sink.cloned(), kept, refusal: None });
        let open = Open(self);
        let result = backward();
        match open.0.0.lock().take() {
            Some(Pass { refusal: Some(refusal), .. }) => Err(refusal),
            pass => match result {
                Ok(_) => Ok(pass.and_then(|pass| pass.kept).unwrap_or_default()),
                Err(e) => Err(Error::Engine(format!("backward: {e}"))),
            },
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
        let out = Swap(Mutex::new(CpuStorage::F32(Vec::new())));
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
