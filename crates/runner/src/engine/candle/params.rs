//! Storage of a candle model's parameters, and interception of their gradients.
//!
//! Each parameter is served as a tensor of [`Sources`], which reports the gradient when it is
//! complete, during backward. Layers need no change.
//!
//! Invariant: a served tensor owns its storage, contiguous and whole, as [`ModelTensors`] has to,
//! and no tensor is registered after the model is built.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, DType, Device, Layout, Shape, Tensor, Var, bail};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder};
use candle_train::{ModelTensors, ParamIndex, is_buffer, report};
use parking_lot::Mutex;

use super::ops::nn::lora::{adapted_layer, fits, is_frozen};
use super::ops::nn::{check_size, initial_values};
use super::ops::{Sources, Tape};
use super::optim_dtype;
use crate::engine::{SharedSink, TensorSpec};
use crate::{Error, Result};

/// Tensors requested by a model so far.
#[derive(Default)]
struct Registry {
    served: HashMap<String, Tensor>,
    tensors: ModelTensors,
    /// For each served tensor, the layer with an adapter that requested it, if it was one.
    adapted: HashMap<String, Option<String>>,
    /// Set when the model is built.
    closed: bool,
}

impl Registry {
    /// Records the layer that requests a tensor. Returns an error if a layer with an adapter
    /// shares it with a layer without: the base would be trained, and merging the adapter would
    /// change the other layer.
    fn check_shared(&mut self, name: &str) -> candle_core::Result<()> {
        let (is, layer) = (adapted_layer(), name.rsplit_once('.').map_or(name, |(layer, _)| layer));
        let Some(was) = self.adapted.insert(name.to_owned(), is.clone()) else { return Ok(()) };
        if was == is {
            return Ok(());
        }
        let other = match (&was, &is) {
            (Some(_), Some(other)) => format!("layer `{other}`, which has another adapter,"),
            _ => format!("a layer without adapter called `{layer}` (an embedding, say)"),
        };
        let adapted = was.or(is).unwrap_or_default();
        bail!(
            "lora: layer `{adapted}` gets an adapter, but {other} has the same weight `{name}` (tied): merged into \
             it, the adapter would change both; leave `{adapted}` out of lora.targets, or build the two layers from \
             weights of their own"
        )
    }
}

/// A model with the parameters, buffers and frozen parameters served to it, in the order of first
/// request.
pub(super) struct Served<M> {
    pub(super) model: M,
    pub(super) tensors: ModelTensors,
    pub(super) passes: Passes,
}

/// Builds a model and serves its parameters and buffers; parameters whose names match a pattern of
/// `frozen` are served without gradient.
pub(super) fn serve<M>(
    (dtype, seed): (DType, u64),
    device: &Device,
    frozen: Vec<String>,
    build: impl FnOnce(VarBuilder<'static>) -> candle_core::Result<M>,
) -> Result<Served<M>> {
    let sources = Sources::new(device).map_err(|e| Error::engine_during("candle", e))?;
    let registry = Arc::<Mutex<Registry>>::default();
    let backend = Backend {
        registry: Arc::clone(&registry),
        sources: sources.clone(),
        seed,
        is_f64: dtype == DType::F64,
        frozen: frozen.clone(),
    };
    let builder = VarBuilder::from_backend(Box::new(backend), dtype, device.clone());
    let model = build(builder).map_err(|e| Error::engine_during("building", e))?;
    let mut registry = registry.lock();
    registry.closed = true;
    let tensors = std::mem::take(&mut registry.tensors);
    let ModelTensors { params, frozen: found, .. } = &tensors;
    let is_found = |pattern: &&String| found.specs.iter().any(|spec| fits(&spec.name, pattern));
    if let Some(pattern) = frozen.iter().find(|pattern| !is_found(pattern)) {
        let names: Vec<_> = params.specs.iter().map(|spec| format!("`{}`", spec.name)).collect();
        return Err(Error::config(format!(
            "frozen: `{pattern}` matches none of the model's parameters ({})",
            shortened(&names)
        )));
    }
    let passes = Passes { sources, index: ParamIndex::new(params.tensors.iter().map(Tensor::id)) };
    Ok(Served { model, tensors, passes })
}

/// Serves parameters and buffers to a model while it is built.
struct Backend {
    registry: Arc<Mutex<Registry>>,
    sources: Sources,
    seed: u64,
    is_f64: bool,
    frozen: Vec<String>,
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
        // In a model in f64, parameters that layers request in f32 (to avoid half types) are f64,
        // too.
        let dtype = if self.is_f64 && !is_buffer(name) { DType::F64 } else { dtype };
        registry.check_shared(name)?;
        if let Some(tensor) = registry.served.get(name) {
            if *tensor.shape() != shape || tensor.dtype() != dtype {
                let (have, had) = (tensor.shape(), tensor.dtype());
                bail!(
                    "`{name}` exists as {have:?} of {had:?}, but was requested as {shape:?} of {dtype:?}"
                );
            }
            return Ok(tensor.clone());
        }
        if registry.closed {
            bail!(
                "`{name}` was requested after the model was built; request all parameters in the constructor"
            );
        }
        if !device.same_device(self.sources.device()) {
            let own = self.sources.device().location();
            bail!(
                "`{name}` was requested on {:?}, but the engine is on {own:?}",
                device.location()
            );
        }
        // Initial values are computed in host memory.
        check_size(name, &shape, dtype, &Device::Cpu)?;
        let values = initial_values(init, &shape, self.seed, name);
        let dims = shape.dims().to_vec();
        let spec = TensorSpec { name: name.to_owned(), shape: dims, dtype: optim_dtype(dtype)? };
        let tensor = if is_buffer(name) {
            let values = Tensor::from_vec(values, &shape, device)?.to_dtype(dtype)?;
            let tensor = Var::from_tensor(&values)?.into_inner();
            registry.tensors.buffers.add(spec, tensor.clone());
            tensor
        } else if adapted_layer().is_some() || is_frozen(name, &self.frozen) {
            // A frozen parameter is not a variable: neither candle's graph nor a tape records it.
            let tensor = Tensor::from_vec(values, &shape, &Device::Cpu)?.to_dtype(dtype)?;
            let tensor = tensor.to_device(device)?;
            registry.tensors.frozen.add(spec, tensor.clone());
            tensor
        } else {
            let values = CpuStorage::F32(values).to_dtype(&Layout::contiguous(&shape), dtype)?;
            let tensor = self.sources.tensor(name, values, &shape)?;
            registry.tensors.params.add(spec, tensor.clone());
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
        let mut registry = self.registry.lock();
        registry.check_shared(name)?;
        match registry.served.get(name) {
            Some(tensor) if tensor.dtype() == dtype => Ok(tensor.clone()),
            Some(tensor) => bail!("`{name}` has type {:?}, not {dtype:?}", tensor.dtype()),
            None => bail!("`{name}` does not exist, and no shape was given"),
        }
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.registry.lock().served.contains_key(name)
    }
}

/// Joins the first few names.
fn shortened(names: &[String]) -> String {
    let shown = names.len().min(6);
    let more = if shown < names.len() { ", ..." } else { "" };
    names[..shown].join(", ") + more
}

/// Gradients by parameter index, in order of backward.
pub(super) type Gradients = Vec<(usize, Tensor)>;

/// Forward and backward passes.
pub(super) struct Passes {
    sources: Sources,
    index: ParamIndex,
}

impl Passes {
    /// Runs a forward pass for [`backward`](Self::backward).
    pub(super) fn record<R>(&self, forward: impl FnOnce() -> R) -> (R, Tape) {
        self.sources.record(forward)
    }

    /// Runs a backward pass from a loss, starting with the given gradient, and reports gradients to
    /// `sink` and to the list, if given. An error of the sink is returned unchanged; candle's
    /// errors are wrapped. The sink is released in any case.
    pub(super) fn backward(
        &self,
        (tape, loss): (Tape, &Tensor),
        gradient: candle_core::Result<Tensor>,
        sink: Option<&SharedSink>,
        kept: Option<Gradients>,
    ) -> Result<Gradients> {
        let failed = |e| Error::engine_during("backward", e);
        let kept = Rc::new(RefCell::new(kept));
        let (own, sink) = (Rc::clone(&kept), sink.cloned());
        let ready = move |index, gradient: Tensor| {
            if let Some(kept) = &mut *own.borrow_mut() {
                kept.push((index, gradient.clone()));
            }
            sink.as_ref().map_or(Ok(()), |sink| Ok(report(sink, index, gradient)?))
        };
        self.index.backward((tape, loss), gradient.map_err(failed)?, ready, failed)?;
        Ok(kept.take().unwrap_or_default())
    }
}
