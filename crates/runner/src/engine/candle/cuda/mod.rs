//! CUDA support of the engine: its GPU, kernels and graphs.
//!
//! All work, including the optimizer's kernels, runs in the one stream of the engine's candle
//! device, and candle frees memory in the order of that stream: so no address is used before it is
//! written or after it is freed. Large fields of batches use a separate stream, ordered by events
//! ([`Inputs`]).

#![expect(
    unsafe_code,
    reason = "lends tensors' addresses to an optimizer, and disables event tracking of cudarc"
)]

mod graph;

use std::sync::Arc;

use candle_core::cuda_backend::cudarc::driver::DevicePtr;
use candle_core::{Device, Storage, Tensor};
use candle_train::{Inputs, ModelTensors, tune_optimizer};
use fused_optim::Optimizer;
use fused_optim::cuda::{Gpu, LateRead};
use parking_lot::Mutex;

use self::graph::Graphs;
use super::CandleEngine;
use super::model::Scalars;
use super::ops::AutotuneSummary;
use super::ops::Context;
use super::ops::cuda::{Kernels, NAMES};
use super::ops::known_inputs::{IndexCheck, KnownInputs};
use super::report::{EAGER, NOT_INDUCTOR};
use crate::data::{Array, ArrayData, Batch};
use crate::engine::{
    CompileBackend, CompileOptions, CompileReport, ComputeDevice, DeviceEngine, LateValues, Losses,
    StepContext,
};
use crate::placement::OptimizerDevice;
use crate::{Error, Result};

/// The GPU of an engine.
pub(super) struct Cuda {
    /// GPU with candle's stream.
    gpu: Gpu,
    /// Copies of batches.
    inputs: Inputs,
    /// Kernels that `compile` built to replace compositions, or the reason why not.
    kernels: Option<std::result::Result<Arc<Kernels>, candle_ops::Error>>,
    /// Whole steps as CUDA graphs, if `compile` asked for them.
    graphs: Option<Graphs>,
    /// Result of autotuning an optimizer, or the reason for which it failed.
    tuned: Option<std::result::Result<String, String>>,
}

impl Cuda {
    /// Opens the GPU of a device, also for the model's tensors; `None` for the host.
    pub(super) fn open(device: &Device, tensors: &mut ModelTensors) -> Result<Option<Self>> {
        let Device::Cuda(device) = device else { return Ok(None) };
        let failed = |e| Error::engine_during("opening the GPU for an optimizer", e);
        // SAFETY: events order streams. This context has one stream, candle's, in which everything
        // is allocated, used and freed; the optimizer works in it, and averages and batches are
        // ordered after and before it by events of their own. A model that creates another stream
        // must order it, too.
        unsafe { device.disable_event_tracking() };
        let gpu = Gpu::on(device.cuda_stream()).map_err(failed)?;
        gpu.keep_freed_memory().map_err(failed)?;
        tensors.set_gpu(gpu.clone());
        Ok(Some(Self {
            inputs: Inputs::new(gpu.clone()),
            gpu,
            kernels: None,
            graphs: None,
            tuned: None,
        }))
    }

    /// Builds the kernels and graphs that `options` ask for.
    pub(super) fn compile(
        &mut self,
        device: &Device,
        options: &CompileOptions,
        context: &mut Context,
    ) {
        let Device::Cuda(device) = device else { return };
        self.kernels = options.is_engines().then(|| Kernels::new(device).map(Arc::new));
        context.set_kernels(self.kernels.as_ref().and_then(|built| built.as_ref().ok()).cloned());
        self.graphs = options.graphs().then(|| Graphs::new(options.fullgraph));
    }

    pub(super) fn report(
        &self,
        options: &CompileOptions,
        tuned: Option<AutotuneSummary>,
        report: &mut CompileReport,
    ) {
        match &self.kernels {
            Some(Ok(kernels)) => {
                report.applied.push(format!(
                    "kernels of this engine for tensors of f32, f16 and bf16, forward and backward, in \
                     place of compositions of candle's operators: {NAMES}"
                ));
                match kernels.cudnn() {
                    Ok(name) => report.applied.push(format!(
                        "convolutions of f16 and bf16, and of f32 in TF32, with {name}, deterministic algorithms only"
                    )),
                    Err(why) => report.decline("convolutions by cuDNN", &why.to_string()),
                }
            }
            Some(Err(why)) => report.decline("kernels of this engine", &why.to_string()),
            None => {}
        }
        if options.mode.searches() {
            let cudnn = self.kernels.as_ref().and_then(|built| built.as_ref().ok()?.cudnn().ok());
            match tuned.filter(|_| cudnn.is_some()) {
                Some(AutotuneSummary { timed, improved, .. }) => report.applied.push(format!(
                    "autotuning of cuDNN's convolutions during training, at the first use of each shape ({timed} \
                     shapes so far, {improved} of them faster than the default); a resumed run reuses the algorithms \
                     in its checkpoint"
                )),
                None => {
                    let why = "each operator has one implementation on a GPU";
                    report.decline("autotuning of the model's kernels", why);
                }
            }
        }
        match options.backend {
            CompileBackend::Engine | CompileBackend::Cudagraphs => {}
            CompileBackend::Inductor => report.decline("backend `inductor`", NOT_INDUCTOR),
            CompileBackend::Eager => report.decline("kernels of this engine", EAGER),
        }
        match &self.tuned {
            Some(Ok(found)) => report.applied.push(found.clone()),
            Some(Err(why)) => report.decline("autotuning of the optimizer", why),
            None => {}
        }
        if let Some(graphs) = &self.graphs {
            graphs.report(report);
        }
    }
}

/// Runs `call`, a forward pass, with host copies of a batch's integer fields. Also returns the
/// range checks of labels and indices that other batches must pass.
fn checks_of<R>(
    sent: &[(String, Tensor)],
    batch: &Batch,
    is_capture: bool,
    call: impl FnOnce() -> R,
) -> (R, Vec<IndexCheck>) {
    let inputs = sent.iter().map(|(_, tensor)| tensor).zip(numbers(batch));
    let known = KnownInputs::new(inputs);
    let known = if is_capture { known.for_capture() } else { known };
    known.enter(call)
}

/// As [`checks_of`], without returning the checks.
pub(super) fn with_numbers<R>(
    sent: &[(String, Tensor)],
    batch: &Batch,
    call: impl FnOnce() -> R,
) -> R {
    checks_of(sent, batch, false, call).0
}

/// Returns the values of integer fields.
fn numbers(batch: &Batch) -> Vec<Option<&[i64]>> {
    let numbers = batch.iter().map(|(_, array)| match array.data() {
        ArrayData::I64(numbers) => Some(numbers.as_slice()),
        _ => None,
    });
    numbers.collect()
}

impl CandleEngine {
    /// Copies the fields of a batch to the model's device, in their own types.
    pub(super) fn send(&self, batch: &Batch) -> Result<Vec<(String, Tensor)>> {
        let (Some(cuda), Device::Cuda(device)) = (&self.cuda, &self.device) else {
            return super::model::send(batch, &self.device);
        };
        let field = |(name, array): (&str, &Array)| {
            Ok((name.to_owned(), cuda.inputs.tensor(array, device)?))
        };
        let fields = batch.iter().map(field).collect::<candle_core::Result<_>>();
        fields.map_err(|e| Error::engine_during("batch", e))
    }

    /// Returns the GPU of the model, with the stream in use; `None` on the host.
    #[must_use]
    pub fn gpu(&self) -> Option<&Gpu> {
        self.cuda.as_ref().map(|cuda| &cuda.gpu)
    }

    fn cuda(&self) -> Result<&Cuda> {
        self.cuda.as_ref().ok_or_else(|| Error::engine("the model is on the host"))
    }

    /// Runs a training step, as a graph if `compile` asked for it.
    pub(super) fn step_or_launch(
        &mut self,
        batch: &Batch,
        cx: &mut StepContext<'_>,
    ) -> Result<Losses> {
        let graphs = self.cuda.as_mut().and_then(|cuda| cuda.graphs.take());
        let Some(mut graphs) = graphs else { return self.step(batch, cx) };
        let losses = graphs.step(self, batch, cx);
        if let Some(cuda) = &mut self.cuda {
            cuda.graphs = Some(graphs);
        }
        losses
    }

    /// Reads the scalars of a step, which are copied to the host when the GPU has computed them.
    pub(super) fn losses(&self, scalars: &Scalars) -> Result<Losses> {
        let Some(gpu) = self.gpu() else { return scalars.read() };
        let Scalars { names, values } = scalars;
        let (storage, layout) = values.storage_and_layout();
        let Storage::Cuda(storage) = &*storage else { return scalars.read() };
        let slice = storage.as_cuda_slice::<f64>().map_err(failed_reading)?;
        let slice = slice.slice(layout.start_offset()..layout.start_offset() + names.len());
        let (address, _guard) = slice.device_ptr(gpu.stream());
        // SAFETY: candle frees the tensor in the order of this stream, after the copy. It is not
        // overwritten before either: later steps and graph launches are ordered after the copy.
        let read = unsafe { gpu.read_later(address, 8 * names.len()) }.map_err(failed_reading)?;
        Ok(Losses::late(names.clone(), LateScalars(Mutex::new(read))))
    }
}

/// Scalars of a step that are being copied to the host.
#[derive(Debug)]
struct LateScalars(Mutex<LateRead>);

impl LateValues for LateScalars {
    fn poll(&self) -> Result<Option<Vec<f64>>> {
        let read = self.0.lock();
        let bytes = read.poll().map_err(failed_reading)?;
        Ok(bytes.map(to_f64))
    }

    fn wait(&self) -> Result<Vec<f64>> {
        let read = self.0.lock();
        read.wait().map(to_f64).map_err(failed_reading)
    }
}

fn to_f64(bytes: &[u8]) -> Vec<f64> {
    bytes.as_chunks().0.iter().map(|number| f64::from_ne_bytes(*number)).collect()
}

fn failed_reading(error: impl Into<train_step::BoxError>) -> Error {
    Error::engine_during("reading the losses", error)
}

/// Returns the engine as a device engine; `None` on the host.
pub(super) fn device(engine: &mut CandleEngine) -> Option<&mut dyn DeviceEngine> {
    if engine.cuda.is_some() { Some(engine) } else { None }
}

impl DeviceEngine for CandleEngine {
    fn compute_device(&self) -> ComputeDevice {
        self.at
    }

    fn optimizer_device(&self) -> OptimizerDevice {
        self.gpu().cloned().map_or(OptimizerDevice::Host, OptimizerDevice::Cuda)
    }

    fn tune(&mut self, optimizer: &mut dyn Optimizer) {
        let searches = self.compiled.as_ref().is_some_and(|options| options.mode.searches());
        if let Some(cuda) = self.cuda.as_mut().filter(|_| searches) {
            cuda.tuned = Some(tune_optimizer(&self.tensors.params.specs, optimizer));
        }
    }
}
