//! The default tensor engine: candle's automatic differentiation, on the CPU or on a CUDA GPU.
//!
//! [`CandleEngine`] makes an [`Engine`] of any [`CandleModel`]: a struct of layers (candle-nn's or
//! those of [`nn`], which have the same names) with a loss and a prediction. The model is built
//! from a [`VarBuilder`]; it needs no change for its gradients to be reported one by one during
//! backward (see `params.rs`).
//!
//! Half precision is supported in two ways. Under [autocast](StepContext::autocast) parameters stay
//! in `f32` and each of [`ops`] runs in the type of PyTorch's lists. With half parameters
//! ([`CandleOptions::dtype`]) parameters are `f16` or `bf16`, except those that a layer requests in
//! `f32` by name (as norm layers do), and float inputs are cast. Models of candle-nn's layers work
//! unchanged with half parameters, except its `BatchNorm`; matrix products in `bf16` are slow on
//! the CPU, where candle makes them in `f32`. Master weights and the loss scale are managed by the
//! caller.
//!
//! Stock candle has operators that silently cut the graph (`LayerNorm`, `softmax_last_dim`,
//! `rms_norm`), and others with a wrong gradient or value (`max_pool2d`, `scatter`, `conv1d` of
//! several samples). The page `stock_candle.md` of the crate `candle-ops` lists them with
//! replacements; most are in [`ops`].
//!
//! A parameter without gradient is an error by name in a run's first step, because
//! [`DistributedDataParallel`](crate::model::DistributedDataParallel) counts gradients. Wrong
//! gradients are detected by differences of the loss, for any operator: [`Engine::check_gradients`]
//! (`runner check CONFIG --gradients`) names the parameters, and a run's first step warns if all
//! gradients together do not match the change of the loss, unless
//! [`CandleOptions::check_gradients`] is false. The check never changes or ends a run. Its limits
//! are listed in `gradcheck.rs`.
//!
//! On a GPU ([`CandleOptions::device`], feature `cuda`) parameters, buffers and batches are
//! in its memory. Batches are copied through pinned memory, large ones during the previous step,
//! and a step does not wait for its losses ([`Losses`]). There [`ops`] are compositions of candle's
//! own operators or, under [`compile`](Engine::compile), kernels of our own. Gradients stay on the
//! GPU if the sink supports it, and an optimizer of that GPU steps there (`cuda/mod.rs`);
//! parameters are lent as copies. `compile` can capture forward and backward as one graph
//! (`candle_train::graph`).
//!
//! Invariant: everything runs on the calling thread except the parallel parts of candle's
//! operators, in rayon and in candle's own pool. `RAYON_NUM_THREADS` sets their size: 1 if several
//! ranks share a node, set by `launch` or by the rank itself
//! ([`limit_threads`](candle_train::process::limit_threads)); `CANDLE_NUM_THREADS` sets that of
//! candle's pool.

#[cfg_attr(not(feature = "cuda"), path = "no_cuda.rs")]
mod cuda;
mod gradcheck;
mod model;
mod params;
mod report;

use std::cell::Cell;
use std::fmt;

use amp::Autocast;
use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use candle_train::{Fields, Inputs, ModelTensors, cuda_device, tensor};
use tracing::debug_span;

use self::model::sending;
pub use self::model::{CandleModel, Loss, Outputs, TensorBatch};
use self::ops::{Context, Tape};
use self::params::{Passes, Served};
use super::{
    CompileOptions, CompileReport, ComputeDevice, DeviceEngine, DeviceModel, Engine, LoraOptions,
    Losses, MatmulPrecision, Model, ModelContext, ModelFactory, StepContext, TensorSpec, Visit,
    WrongGradient,
};
use crate::data::{Array, Batch};
use crate::error::without_backtrace;
use crate::{Error, Result};

pub use candle_ops::{self as ops, nn};
pub use {candle_core, candle_nn};

/// Options of a [`CandleEngine`].
#[derive(Clone, Debug, PartialEq)]
pub struct CandleOptions {
    /// Type of parameters and activations. Defaults to `f32`.
    pub dtype: fused_optim::DType,
    /// Seed of the initial parameters, equal on every rank. Defaults to 0.
    pub seed: u64,
    /// Device of the model. Defaults to the host.
    pub device: ComputeDevice,
    /// Whether a run's first step compares its gradients with differences of the loss, and warns if
    /// they differ; this takes two more forward passes. Defaults to true.
    pub check_gradients: bool,
    /// Whether parameters and float inputs are `f64` in place of `f32`, for
    /// [`Engine::check_gradients`]. Defaults to false. Such parameters cannot be lent, and so not
    /// trained.
    pub is_f64: bool,
    /// Precision of `f32` matrix products on GPUs, from now on and in the whole process
    /// ([`allow_tf32`](ops::allow_tf32)). Defaults to `None`, which keeps the process's setting
    /// (initially the highest).
    pub matmul_precision: Option<MatmulPrecision>,
    /// Name patterns of frozen parameters, as in [`ModelContext::frozen`]. Defaults to none.
    pub frozen: Vec<String>,
    /// Adapters of fully connected layers, as in [`ModelContext::lora`]. Defaults to none.
    pub lora: Option<LoraOptions>,
}

impl Default for CandleOptions {
    fn default() -> Self {
        Self {
            dtype: fused_optim::DType::F32,
            seed: 0,
            device: ComputeDevice::Cpu,
            check_gradients: true,
            is_f64: false,
            matmul_precision: None,
            frozen: Vec::new(),
            lora: None,
        }
    }
}

/// A candle model with its parameters, as an [`Engine`].
///
/// # Examples
///
/// ```
/// use candle_nn::{Linear, Module, VarBuilder, linear};
/// use runner::engine::Model;
/// use runner::engine::candle::{
///     CandleEngine, CandleModel, CandleOptions, Loss, Outputs, TensorBatch, ops,
/// };
///
/// struct Net(Linear);
///
/// impl CandleModel for Net {
///     fn loss(&self, batch: &TensorBatch) -> candle_core::Result<Loss> {
///         let logits = self.0.forward(batch.get("inputs")?)?;
///         Ok(Loss::new(ops::cross_entropy(&logits, batch.get("labels")?)?))
///     }
///
///     fn predict(&self, batch: &TensorBatch) -> candle_core::Result<Outputs> {
///         Ok(Outputs::new().with("logits", self.0.forward(batch.get("inputs")?)?))
///     }
/// }
///
/// let build = |vb: VarBuilder<'static>| Ok(Net(linear(4, 2, vb.pp("fc"))?));
/// let engine = CandleEngine::new(CandleOptions::default(), build)?;
/// assert_eq!(engine.params()[0].name, "fc.weight");
/// # Ok::<(), runner::Error>(())
/// ```
pub struct CandleEngine {
    model: Box<dyn CandleModel>,
    tensors: ModelTensors,
    passes: Passes,
    /// Copies of batches.
    inputs: Inputs,
    device: Device,
    at: ComputeDevice,
    cuda: Option<cuda::Cuda>,
    dtype: DType,
    /// Autocast lists of the device, enabled as the current step asks.
    autocast: Autocast,
    compiled: Option<CompileOptions>,
    /// State shared by operators: random numbers, autotuning, kernels.
    context: Context,
    /// Whether a step's gradients have been compared with differences of the loss.
    checked: Cell<bool>,
    /// Number of training steps so far.
    steps: Cell<usize>,
    /// [Age](candle_train::age) of a tensor created after the model.
    built: Option<usize>,
}

impl CandleEngine {
    /// Builds a model. Parameters are numbered in the order in which `build` first requests them.
    ///
    /// Initial values are drawn in `f32` from the seed and the parameter's name, then rounded.
    /// Requesting a name twice returns the same, shared parameter.
    ///
    /// The first engine of a process makes glibc's allocator keep up to 1 GiB of freed memory from
    /// then on, for the tensors of the next step
    /// ([`keep_freed_memory`](candle_train::process::keep_freed_memory)).
    ///
    /// # Errors
    ///
    /// [`Error::Engine`] with the error of `build`, for example a name requested with two shapes;
    /// also for a device that does not exist or that candle was built without.
    pub fn new<M: CandleModel + 'static>(
        options: CandleOptions,
        build: impl FnOnce(VarBuilder<'static>) -> candle_core::Result<M>,
    ) -> Result<Self> {
        candle_train::process::keep_freed_memory();
        if let Some(precision) = options.matmul_precision {
            ops::allow_tf32(precision != MatmulPrecision::Highest);
        }
        let dtype = if options.is_f64 { DType::F64 } else { options.dtype.into() };
        let at = options.device;
        let device = match at {
            ComputeDevice::Cpu => Device::Cpu,
            ComputeDevice::Cuda(index) => {
                cuda_device(index).map_err(|e| Error::engine_during(at, e))?
            }
        };
        ops::check_dtype(&device, dtype).map_err(|e| Error::engine_during(at, e))?;
        let Served { model, mut tensors, passes } =
            params::serve((dtype, options.seed), &device, options.frozen, |vb| {
                match options.lora {
                    Some(lora) => nn::lora(&lora.into(), || build(vb)),
                    None => build(vb),
                }
            })?;
        let cuda = cuda::Cuda::open(&device, &mut tensors)?;
        Ok(Self {
            model: Box::new(model),
            inputs: Inputs::new(&device, &tensors),
            tensors,
            passes,
            cuda,
            device,
            at,
            dtype,
            autocast: match at {
                ComputeDevice::Cpu => Autocast::cpu().with_enabled(false),
                ComputeDevice::Cuda(_) => Autocast::cuda().with_enabled(false),
            },
            compiled: None,
            context: Context::new(options.seed),
            checked: Cell::new(!options.check_gradients),
            steps: Cell::new(0),
            built: now().map_err(|e| Error::engine_during("candle", e))?,
        })
    }

    /// Returns a factory for [`new`](Self::new), to be called when precision, seed and device are
    /// known.
    pub fn factory<M: CandleModel + 'static>(
        build: impl FnOnce(VarBuilder<'static>) -> candle_core::Result<M> + Send + 'static,
    ) -> ModelFactory {
        Box::new(|cx| {
            let ModelContext { dtype, seed, device, is_f64, matmul_precision, frozen, lora } =
                cx.clone();
            let options = CandleOptions {
                dtype,
                seed,
                device,
                is_f64,
                matmul_precision,
                frozen,
                lora,
                ..CandleOptions::default()
            };
            Ok(Box::new(Self::new(options, build)?))
        })
    }

    fn step(&self, batch: &Batch, cx: &mut StepContext<'_>) -> Result<Losses> {
        let first = (!self.checked.get()).then(|| gradcheck::ForwardState::of(self).ok()).flatten();
        let span = debug_span!(target: "runner", "forward");
        let step = self.steps.replace(self.steps.get().wrapping_add(1));
        let begin = now().map_err(|e| Error::engine_during("candle", e))?;
        let (loss, tape) = span.in_scope(|| self.passes.record(|| self.loss(batch)));
        let loss = loss?;
        if step < 3 || step.is_multiple_of(CARRIED_INTERVAL) {
            self.check_carried(&tape, &loss, begin)?;
        }
        let (names, values) = loss.scalars()?;
        let kept = first.as_ref().map(|_| Vec::new());
        let scale = Tensor::full(cx.loss_scale, loss.value.shape(), &self.device);
        let span = debug_span!(target: "runner", "backward").entered();
        let gradients = self.passes.backward((tape, &loss.value), scale, Some(&cx.sink), kept)?;
        drop((span, loss));
        let losses = self.losses((&names, &values))?;
        if let Some(first) = first {
            let loss = losses.scalars()?[0].1;
            let is_checked = first.check_step(self, (batch, loss), &gradients, cx)?;
            self.checked.set(is_checked);
        }
        Ok(losses)
    }
}

/// Training steps between two checks for state of earlier steps, after the first three steps: they
/// walk the whole graph, which keeps growing with such a state, so a later check finds it, too.
const CARRIED_INTERVAL: usize = 64;

/// Returns the age of a new tensor.
fn now() -> candle_core::Result<Option<usize>> {
    Ok(candle_train::age(Tensor::zeros((), DType::U8, &Device::Cpu)?.id()))
}

impl CandleEngine {
    /// Returns an error if the loss depends on results of earlier steps: their gradients would be
    /// those of the parameters as they were then, and each step would be slower than the last.
    fn check_carried(&self, tape: &Tape, loss: &Loss, begin: Option<usize>) -> Result<()> {
        let (Some(built), Some(begin)) = (self.built, begin) else { return Ok(()) };
        let is_carried = |id| candle_train::age(id).is_some_and(|at| built < at && at < begin);
        if !tape.graph_nodes(&loss.value).into_iter().any(is_carried) {
            return Ok(());
        }
        let text = "forward: the loss depends on a tensor that an earlier step computed from parameters, such as the \
                    state of an earlier batch: call `detach` on what is carried over";
        Err(Error::engine(text))
    }

    /// Sets autocast of later forward passes to `dtype`, by the device's lists.
    fn set_autocast(&mut self, dtype: Option<fused_optim::DType>) -> Result<()> {
        if let Some(dtype) = dtype {
            let checked = ops::check_dtype(&self.device, dtype.into());
            checked.map_err(|e| Error::engine_during(format!("autocast on {}", self.at), e))?;
        }
        let lists = self.autocast.clone().with_enabled(dtype.is_some());
        self.autocast = match dtype {
            None => lists,
            Some(fused_optim::DType::F16) => lists.with_f16(),
            Some(fused_optim::DType::Bf16) => lists.with_bf16(),
            Some(fused_optim::DType::F32) => {
                return Err(Error::engine("autocast supports f16 and bf16, not f32"));
            }
        };
        Ok(())
    }

    fn loss(&self, batch: &Batch) -> Result<Loss> {
        let sent = self.inputs.fields(batch).map_err(sending)?;
        sent.with_known(batch, || self.forward(&TensorBatch::of(&sent, self.dtype)?))
    }

    /// Computes the loss, under autocast if enabled.
    fn forward(&self, batch: &TensorBatch) -> Result<Loss> {
        if !self.autocast.is_enabled() {
            return self.model.loss(batch).map_err(|e| failed(e, None));
        }
        let forward = || (self.model.loss(batch), ops::lowered_operators());
        let (loss, lowered) = ops::autocast(&self.autocast, forward);
        let loss = loss.map_err(|e| {
            let advice = ops::mixed_types_advice(&e);
            failed(e, advice)
        })?;
        if lowered == 0 {
            return Err(Error::engine(
                "autocast is on, but no operator ran in half precision: candle-nn's own layers ignore \
                 autocast; use half parameters instead (half_parameters = true)",
            ));
        }
        Ok(loss)
    }

    /// Loads an autotune cache, unless this process has already tuned shapes. Returns the number of
    /// known shapes. Without `compile` nothing is tuned.
    fn take_cache(&mut self, cache: &str) -> Result<usize> {
        if self.shapes_timed() == 0 && !cache.is_empty() {
            let bad =
                |why| Error::checkpoint(None, format!("the autotune cache of `compile`: {why}"));
            self.context.load_autotune_cache(cache).map_err(bad)?;
        }
        Ok(self.shapes_timed())
    }

    /// Returns the number of shapes with a known fastest algorithm.
    fn shapes_timed(&self) -> usize {
        self.context.autotune_summary().map_or(0, |summary| summary.timed)
    }

    /// Runs `call` in the context of the operators.
    fn in_context<R>(&mut self, call: impl FnOnce(&mut Self) -> R) -> R {
        let mut context = std::mem::take(&mut self.context);
        let result = context.enter(|| call(self));
        self.context = context;
        result
    }
}

/// Creates the error of a forward pass in training, with advice.
fn failed(error: candle_core::Error, advice: Option<&str>) -> Error {
    let mut error = Error::engine_during("forward", error);
    if let (Error::Engine { message, .. }, Some(advice)) = (&mut error, advice) {
        *message = format!("{}; {advice}", without_backtrace(message));
    }
    error
}

impl fmt::Debug for CandleEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CandleEngine")
            .field("params", &self.tensors.params.specs.len())
            .field("buffers", &self.tensors.buffers.specs.len())
            .field("device", &self.at)
            .field("dtype", &self.dtype)
            .finish_non_exhaustive()
    }
}

impl Model for CandleEngine {
    fn params(&self) -> &[TensorSpec] {
        self.tensors.params()
    }

    fn buffers(&self) -> &[TensorSpec] {
        self.tensors.buffers()
    }

    fn frozen(&self) -> &[TensorSpec] {
        self.tensors.frozen()
    }

    fn with_params(&mut self, visit: &mut Visit<'_>) -> train_step::Result<()> {
        self.tensors.with_params(visit)
    }

    fn with_buffers(&mut self, visit: &mut Visit<'_>) -> train_step::Result<()> {
        self.tensors.with_buffers(visit)
    }

    fn with_frozen(&mut self, visit: &mut Visit<'_>) -> train_step::Result<()> {
        self.tensors.with_frozen(visit)
    }

    fn on_device(&mut self) -> Option<&mut dyn DeviceModel> {
        self.tensors.on_device()
    }
}

impl Engine for CandleEngine {
    fn train_step(&mut self, batch: &Batch, cx: &mut StepContext<'_>) -> Result<Losses> {
        // Zero and non-finite scales are invalid.
        if !(cx.loss_scale > 0.0 && cx.loss_scale.is_finite()) {
            return Err(Error::engine(format!(
                "invalid loss scale {}: it must be positive and finite",
                cx.loss_scale
            )));
        }
        self.set_autocast(cx.autocast)?;
        let known = self.take_cache(&cx.state.autotune_cache)?;
        self.context.set_seed(cx.state.seed);
        self.context.set_random_position(cx.state.random_position);
        let losses = self.in_context(|engine| engine.step_or_launch(batch, cx));
        cx.state.random_position = self.context.random_position();
        if self.shapes_timed() > known {
            cx.state.autotune_cache = self.context.autotune_cache();
        }
        losses
    }

    fn loss_count(&self, batch: &Batch) -> Result<Option<f64>> {
        self.model.loss_count(batch).map_err(|e| Error::engine_during("loss_count", e))
    }

    fn check_gradients(&mut self, batch: &Batch, ignore: &[String]) -> Result<Vec<WrongGradient>> {
        self.in_context(|engine| gradcheck::check(engine, batch, ignore))
    }

    fn supports_autocast(&self, dtype: fused_optim::DType) -> bool {
        dtype != fused_optim::DType::F32
    }

    fn compile(&mut self, options: &CompileOptions) -> Result<()> {
        let on_host = self.at == ComputeDevice::Cpu;
        if options.fullgraph && !on_host && !options.graphs() {
            let at = self.at;
            return Err(Error::engine(format!(
                "compile: `fullgraph` on {at} needs mode `reduce-overhead` or `max-autotune`, or \
                 backend `cudagraphs`: set one of these, or remove `fullgraph`"
            )));
        }
        self.compiled = Some(options.clone());
        if let Some(cuda) = &mut self.cuda {
            cuda.compile(&self.device, options, &mut self.context);
        }
        let searches = options.is_engines() && (on_host || options.mode.searches());
        self.context.set_autotune(searches.then_some(options.search_rounds));
        Ok(())
    }

    fn compile_report(&self) -> Option<CompileReport> {
        self.compiled.as_ref().map(|options| self.report(options))
    }

    fn eval(&mut self, batch: &Batch) -> Result<Vec<(String, Array)>> {
        let count = batch.len();
        let sent = Fields::of(batch, |array| tensor(array, &self.device));
        let batch = TensorBatch::of(&sent.map_err(sending)?, self.dtype)?;
        let Self { model, context, .. } = self;
        let outputs = context.evaluate(|| model.predict(&batch));
        let outputs = outputs.map_err(|e| Error::engine_during("forward", e))?;
        outputs.into_arrays(count)
    }

    fn device(&mut self) -> Option<&mut dyn DeviceEngine> {
        cuda::device(self)
    }
}

impl From<LoraOptions> for nn::LoraOptions {
    fn from(LoraOptions { rank, alpha, dropout, targets }: LoraOptions) -> Self {
        Self { rank, alpha, dropout: dropout as f32, targets }
    }
}

/// Converts a parameter's type to that of `fused-optim`. For `f64`, whose parameters are never
/// lent, returns `f32`.
fn optim_dtype(dtype: DType) -> candle_core::Result<fused_optim::DType> {
    if dtype == DType::F64 { Ok(fused_optim::DType::F32) } else { dtype.try_into() }
}

#[cfg(test)]
mod tests {
    use std::backtrace::Backtrace;

    use super::*;

    #[test]
    fn advice_comes_before_candles_backtrace() {
        let with_backtrace = |error| candle_core::Error::WithBacktrace {
            inner: Box::new(error),
            backtrace: Box::new(Backtrace::force_capture()),
        };
        let (lhs, rhs, op) = (DType::BF16, DType::F32, "matmul");
        let error = with_backtrace(candle_core::Error::DTypeMismatchBinaryOp { lhs, rhs, op });
        let advice = ops::mixed_types_advice(&error);
        let error = failed(error, advice);
        let cause = std::error::Error::source(&error).unwrap();
        assert!(cause.is::<candle_core::Error>(), "{cause}");
        let said = error.to_string();
        assert!(
            said.starts_with("forward: dtype mismatch in matmul, lhs: BF16, rhs: F32; "),
            "{said}"
        );
        assert!(said.ends_with("cast one operand by `to_dtype`"), "{said}");
    }
}
