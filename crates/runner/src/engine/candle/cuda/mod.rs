//! CUDA support of the engine: its GPU, kernels and graphs ([`Graphs`]).
//!
//! All work, including the optimizer's kernels, runs in the one stream of the engine's candle
//! device, and candle frees memory in the order of that stream: so no address is used before it is
//! written or after it is freed. Large fields of batches use a separate stream, ordered by events
//! ([`Inputs`]). A model that creates another stream must order it, too.

use std::sync::Arc;

use candle_core::{Device, Tensor};
use candle_train::graph::{Computed, GraphModel, Graphs, Scalars};
use candle_train::{Fields, Inputs, ModelTensors, tune_optimizer};
use fused_optim::Optimizer;
use fused_optim::cuda::{Gpu, LateRead};
use parking_lot::Mutex;
use train_step::BoxError;

use super::CandleEngine;
use super::model::{TensorBatch, read_losses};
use super::ops::AutotuneSummary;
use super::ops::Context;
use super::ops::cuda::{Kernels, NAMES};
use super::report::{EAGER, NOT_INDUCTOR};
use crate::data::Batch;
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
        let gpu = Gpu::on(device.cuda_stream()).map_err(failed)?;
        gpu.keep_freed_memory().map_err(failed)?;
        tensors.set_gpu(gpu.clone());
        Ok(Some(Self { gpu, kernels: None, graphs: None, tuned: None }))
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
                    "kernels of this engine for tensors of f32, f16 and bf16 of fewer than 2^31 elements, forward and \
                     backward, in place of compositions of candle's operators: {NAMES}"
                ));
                if let Some(elements) = kernels.too_large() {
                    let what =
                        format!("kernels of this engine for a tensor of {elements} elements");
                    report.decline(&what, "their indices are 32 bits wide");
                }
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
                     shapes so far, {improved} of them faster than the default); different choices may change the last \
                     bits of results, and a resumed run reuses the algorithms in its checkpoint"
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

impl CandleEngine {
    /// Returns the GPU of the model, with the stream in use; `None` on the host.
    #[must_use]
    pub fn gpu(&self) -> Option<&Gpu> {
        self.cuda.as_ref().map(|cuda| &cuda.gpu)
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
    pub(super) fn losses(&self, (names, values): (&[String], &Tensor)) -> Result<Losses> {
        if self.cuda.is_none() {
            return read_losses(names, values);
        }
        let read = self.tensors.read_later(values).map_err(failed_reading)?;
        Ok(Losses::late(names.to_vec(), LateScalars(Mutex::new(read))))
    }
}

impl GraphModel for CandleEngine {
    type Error = Error;
    type Loss = Losses;

    fn error(message: String, source: Option<BoxError>) -> Error {
        Error::Engine { message, source }
    }

    fn tensors(&self) -> &ModelTensors {
        &self.tensors
    }

    fn inputs(&self) -> &Inputs {
        &self.inputs
    }

    fn step(&self, batch: &Batch, cx: &mut StepContext<'_>) -> Result<Losses> {
        Self::step(self, batch, cx)
    }

    fn compute(&self, fields: &Fields, scale: &Tensor) -> Result<Computed> {
        let forward = || self.forward(&TensorBatch::of(fields, self.dtype)?);
        let (loss, tape) = self.passes.record(forward);
        let loss = loss?;
        let (names, values) = loss.scalars()?;
        let scale = scale.broadcast_as(loss.value.shape());
        let grads = self.passes.backward((tape, &loss.value), scale, None, Some(Vec::new()))?;
        Ok(Computed { scalars: Scalars { names, values }, grads })
    }

    fn losses(&self, Scalars { names, values }: &Scalars) -> Result<Losses> {
        Self::losses(self, (names, values))
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

fn failed_reading(error: impl Into<BoxError>) -> Error {
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
