//! [`Trainer`]: one call per batch.

use std::cell::Cell;
use std::fmt;

use candle_core::{Device, Tensor};
use candle_nn::VarMap;
use candle_ops::Context;
use collective::ProcessGroup;
use fused_optim::Optimizer;
use train_data::Array;
use train_step::{CompileReport, Outcome, StepContext, WrongGradient};

#[cfg(doc)]
use crate::Clip;
use crate::backward::ParamIndex;
use crate::compile::Compiled;
use crate::eval::with_eval_weights;
use crate::first_step::check_all;
use crate::inputs::Inputs;
use crate::pass::{Pass, Recorder};
use crate::tensors::ModelTensors;
use crate::variables::{Statistics, Variables, is_finite};
use crate::{Error, Result};
#[cfg(doc)]
use train_step::Error::{NonFinite, RankFailed};

/// Result of a batch: its loss, detached, in device memory, and whether the step was taken.
pub type Step = train_step::Step<Tensor>;

/// Trains a model's variables, with all parts of a training loop. Built by [`Trainer::builder`].
///
/// Every rank must call [`step`](Self::step) (or [`step_weighted`](Self::step_weighted)),
/// [`mean`](Self::mean), [`sum`](Self::sum), [`save`](Self::save) and [`resume`](Self::resume), or
/// their forms with data, in the same order. On the CPU ranks compare
/// these calls, and an error names those that differ; on GPUs, where a step does not wait for the
/// other ranks' hosts, the error comes with the group's timeout.
pub struct Trainer {
    pub(crate) map: VarMap,
    pub(crate) variables: Variables,
    /// The trained variables, lent to steps.
    pub(crate) tensors: ModelTensors,
    pub(crate) index: ParamIndex,
    pub(crate) core: train_step::Trainer,
    pub(crate) context: Context,
    pub(crate) device: Device,
    /// Whether steps with gradients that are not finite are skipped.
    pub(crate) is_mixed: bool,
    /// Whether an operator has run in half precision, or none has to.
    pub(crate) has_lowered: Cell<bool>,
    pub(crate) statistics: Statistics,
    pub(crate) compiled: Option<Compiled>,
    /// Copies to the variables' device.
    pub(crate) inputs: Inputs,
    pub(crate) seed: u64,
    /// Whether the first step is to check gradients.
    pub(crate) checks_gradients: bool,
}

impl Trainer {
    /// Trains on a batch: runs `forward`, which returns the mean loss, then the backward pass, and
    /// the optimizer step if it is due. Returns the loss of this rank's batch, in device memory,
    /// and whether the step was taken.
    ///
    /// `forward` runs with dropout, under autocast, on a [tape](candle_ops::record()): it must not
    /// call `backward`. In mixed precision a step with gradients that are not finite is skipped,
    /// and the loss scale is reduced; changes by the last batch to the statistics of norm layers
    /// are undone then.
    ///
    /// After a change of variables elsewhere, as by `VarMap::load`, which has to be the same on all
    /// ranks, call `optimizer().refresh_masters()` if they are of `f16` or `bf16`: the next step
    /// would set them back to their `f32` masters. For `ScheduleFreeAdamW` build a new trainer: its
    /// averages would remain the earlier ones.
    ///
    /// All of `forward` must run on this thread: layers run by others have neither dropout nor
    /// autocast. Operators of other threads on variables may fail while a step updates these.
    ///
    /// In a run's first step `forward` is called several times, to
    /// [check gradients](crate::TrainerBuilder::check_gradients).
    ///
    /// A step is the mean of the losses of its batches and ranks, whatever the number of samples or
    /// tokens of each; if they differ, use [`step_weighted`](Self::step_weighted).
    ///
    /// # Errors
    ///
    /// Errors of `forward`; variables created after this trainer; a loss of several elements, or
    /// one that depends on tensors computed before this call, such as an earlier batch's state
    /// without `detach`, or on no trained variable; autocast without an operator to cast; a
    /// variable without a gradient, by name; a learning rate that is refused; [`NonFinite`]
    /// if too many steps in a row were skipped, or the loss scale has fallen to its minimum; on
    /// several ranks on the CPU [`RankFailed`], another rank that calls another method, and
    /// hyper-parameters that differ.
    ///
    /// After an error no variable has changed, and the statistics of norm layers are as before the
    /// batch. It counts as one of the epoch's batches, but the gradients of its step so far are
    /// dropped. On one rank the batches after it make a step of full strength. On several ranks
    /// all drop the whole step: its last batch is an error on all, also on the rank that has failed
    /// in an earlier batch. After a failure of the process group, an update that fails (other than
    /// by [`NonFinite`]), and on several GPUs after any error, all later calls fail, and
    /// other ranks may have taken the step. On several GPUs a failure that a step without mixed
    /// precision does not wait for is an error of [`settle`](Self::settle).
    pub fn step(&mut self, forward: impl FnMut() -> candle_core::Result<Tensor>) -> Result<Step> {
        self.train(None, |pass, tensors, cx| pass.run_alone(forward, tensors, cx))
            .map_err(|error| self.failed("step", error))
    }

    /// Like [`step`](Self::step), for a loss that is the mean of `count` tokens or samples: the
    /// step is then the mean of all tokens of its batches and ranks. The count of a batch is that
    /// of the labels that are not ignored.
    ///
    /// ```
    /// # use candle_core::{DType, Device, Module, Tensor};
    /// # use candle_nn::{VarBuilder, VarMap};
    /// # use candle_ops::cross_entropy;
    /// # use candle_train::{AdamWHyper, Trainer};
    /// # let vars = VarMap::new();
    /// # let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    /// # let net = candle_nn::linear(2, 4, vb)?;
    /// # let mut train = Trainer::builder(&vars).accumulate(2).build(AdamWHyper::default())?;
    /// // Two texts, of five tokens and of one.
    /// for labels in [&[1_i64, 3, 2, 0, 1][..], &[2]] {
    ///     let x = Tensor::ones((labels.len(), 2), DType::F32, &Device::Cpu)?;
    ///     let y = Tensor::new(labels, &Device::Cpu)?;
    ///     train.step_weighted(labels.len(), || cross_entropy(&net.forward(&x)?, &y))?;
    /// }
    /// # assert_eq!(train.steps(), 1);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// A batch of 0 tokens adds nothing, and its loss may be NaN: its rank takes part in the step
    /// with the others. All batches of a step, on all ranks, must be trained by the same method. On
    /// GPUs the ranks' hosts wait for each other in each step.
    ///
    /// # Errors
    ///
    /// The errors of [`step`](Self::step); counts that are all 0.
    pub fn step_weighted(
        &mut self,
        count: usize,
        forward: impl FnMut() -> candle_core::Result<Tensor>,
    ) -> Result<Step> {
        let run = |pass: Pass<'_>, tensors: &ModelTensors, cx: &mut StepContext<'_>| {
            pass.run_alone(forward, tensors, cx)
        };
        let trained = self.train(Some(count), run);
        trained.map_err(|error| self.failed("step_weighted", error))
    }

    /// Trains on a batch, whose passes `run` runs.
    pub(crate) fn train(
        &mut self,
        count: Option<usize>,
        run: impl FnOnce(Pass<'_>, &ModelTensors, &mut StepContext<'_>) -> Result<Tensor>,
    ) -> Result<Step> {
        self.statistics.begin();
        let (checks, counts) = (self.core.is_first_batch(), count != Some(0));
        let is_first = checks && self.steps() == 0 && std::mem::take(&mut self.checks_gradients);
        let check = is_first.then(|| self.group().clone());
        let Self { map, variables, tensors, index, core, context, statistics, .. } = self;
        let Self { inputs, has_lowered, .. } = self;
        let recorder = Recorder { index, inputs, has_lowered };
        let pass = Pass {
            map,
            variables,
            recorder,
            context,
            statistics,
            #[cfg(feature = "cuda")]
            graphs: self.compiled.as_mut().and_then(|compiled| compiled.graphs.as_mut()),
            checks,
            counts,
            check,
        };
        let run = |tensors: &mut ModelTensors, cx: &mut StepContext<'_>| run(pass, tensors, cx);
        let ended = match count {
            None => core.step(tensors, run),
            Some(count) => core.step_weighted(count, tensors, run),
        };
        let ended = ended.and_then(|step| {
            self.core.or_abort(self.end_statistics(step.outcome))?;
            Ok(step.map(|loss| loss.detach()))
        });
        if ended.is_err() {
            // The batch's own error is returned.
            let _ = self.statistics.restore(&self.variables.buffers, |_| Ok(true));
        }
        ended
    }

    /// Restores statistics that are lost; after a step broadcasts those of rank 0.
    fn end_statistics(&self, outcome: Outcome) -> Result<()> {
        self.restore_lost(outcome)?;
        match outcome {
            Outcome::Accumulated => Ok(()),
            // After the step and not before the next one: an evaluation, and a run resumed from
            // what rank 0 saves, have the same statistics on all ranks.
            _ => self.broadcast_buffers(),
        }
    }

    /// Gives all ranks the buffers of rank 0; on GPUs without waiting for them.
    fn broadcast_buffers(&self) -> Result<()> {
        let (buffers, group) = (&self.variables.buffers, self.group());
        if buffers.is_empty() || group.world_size() == 1 {
            return Ok(());
        }
        #[cfg(feature = "cuda")]
        if let Some(work) = self.tensors.broadcast(buffers, group)? {
            self.core.watch(work);
            return Ok(());
        }
        self.variables.broadcast_buffers(group)
    }

    /// An error of one of the methods that all ranks call, with advice.
    pub(crate) fn failed(&self, call: &'static str, error: Error) -> Error {
        error.of_call(call, self.rank(), self.variables.params.len())
    }

    /// In mixed precision, restores the statistics after a batch whose step was skipped, and those
    /// of an earlier batch of the step that are not finite.
    fn restore_lost(&self, outcome: Outcome) -> Result<()> {
        if !self.is_mixed {
            return Ok(());
        }
        self.statistics.restore(&self.variables.buffers, |var| match outcome {
            Outcome::Accumulated => Ok(!is_finite(var)?),
            outcome => Ok(matches!(outcome, Outcome::Skipped { .. })),
        })
    }

    /// Steps the [schedulers](crate::TrainerBuilder::schedulers) that depend on a metric
    /// ([`Plateau`](train_step::Plateau)), with the metrics of a validation, which have to be the
    /// same on all ranks.
    ///
    /// # Errors
    ///
    /// A missing metric, with the known names; a learning rate that is refused.
    pub fn step_metrics(&mut self, metrics: &[(String, f64)]) -> Result<()> {
        Ok(self.core.step_metrics(metrics)?)
    }

    /// Runs a forward pass for evaluation: without dropout, under the same autocast, so results may
    /// be in half precision. Norm layers are switched to evaluation by their own flag
    /// (`forward_t(x, false)`). If the optimizer evaluates
    /// [other weights](Optimizer::has_eval_weights) than it trains, as
    /// [`ScheduleFreeAdamW`](fused_optim::ScheduleFreeAdamW) does, the variables have them
    /// meanwhile. They are computed in each call: run a whole evaluation in one.
    ///
    /// # Panics
    ///
    /// If another thread is updating the variables then.
    pub fn evaluate<R>(&mut self, forward: impl FnOnce() -> R) -> R {
        let Self { context, core, tensors, .. } = self;
        let evaluated =
            with_eval_weights(&tensors.params, core.optimizer(), || context.evaluate(forward));
        evaluated.expect("the variables are this trainer's")
    }

    /// Compares the gradient of each trained variable with differences of the loss, and returns
    /// those that are wrong; see [`gradient_check`](crate::gradient_check) for the method and its
    /// limits. `forward` is run four times for each variable, without autocast, and has to return
    /// the same loss each time: on a fixed batch, without random numbers of candle's own. Variables
    /// and all other state are as before then. Other ranks need not call it.
    ///
    /// The [first step](crate::TrainerBuilder::check_gradients) runs a shorter check by itself.
    ///
    /// ```
    /// # use candle_core::{DType, Device, Module, Tensor};
    /// # use candle_nn::{VarBuilder, VarMap};
    /// # use candle_train::{AdamWHyper, Trainer};
    /// # let vars = VarMap::new();
    /// # let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    /// # let net = candle_nn::conv2d(1, 2, 3, Default::default(), vb)?;
    /// # let image = Tensor::arange(0f32, 36.0, &Device::Cpu)?.sin()?.reshape((1, 1, 6, 6))?;
    /// # let mut train = Trainer::builder(&vars).build(AdamWHyper::default())?;
    /// // candle's pooling of 2 x 2 returns a quarter of the gradient.
    /// let wrong = train.check_gradients(|| {
    ///     # #[allow(clippy::disallowed_methods)]
    ///     net.forward(&image)?.max_pool2d(2)?.sqr()?.mean_all()
    /// })?;
    /// let names: Vec<_> = wrong.iter().map(|wrong| &wrong.name[..]).collect();
    /// assert_eq!(names, ["bias", "weight"]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// Errors of `forward`; a loss of several elements; variables of half types, which are too
    /// coarse for differences.
    #[doc(alias = "gradcheck")]
    pub fn check_gradients(
        &mut self,
        mut forward: impl FnMut() -> candle_core::Result<Tensor>,
    ) -> Result<Vec<WrongGradient>> {
        let Self { variables, tensors, index, context, .. } = self;
        context.enter(|| check_all((tensors, variables, index), &mut forward))
    }

    /// Waits until the averages of all steps have ended on the GPUs, and returns their failure: of
    /// a rank that died meanwhile, say. On the CPU a step does so itself, and in mixed precision on
    /// GPUs, too. After another step on several GPUs the weights are those of all ranks' gradients
    /// only if this, or [`mean`](Self::mean), [`sum`](Self::sum), [`save`](Self::save),
    /// [`batches`](Self::batches) or [`batches_of`](Self::batches_of), which call it, has returned
    /// `Ok`: call it before weights are used otherwise, by [`evaluate`](Self::evaluate) or by
    /// candle's `VarMap::save`.
    ///
    /// # Errors
    ///
    /// The failure of a rank or of a GPU. The weights are unspecified then.
    pub fn settle(&self) -> Result<()> {
        self.core.settle().map_err(|error| self.failed("settle", error.into()))
    }

    /// Drops the gradients of the batches since the last step. Within an epoch of
    /// [`batches`](Self::batches) the step's later batches make one of full strength, so that the
    /// epoch's last batch still ends in a step; otherwise the next batch is the first of a step.
    /// Every rank must call it.
    pub fn zero_grad(&mut self) {
        self.core.zero_grad();
    }

    /// The process group of all ranks.
    #[must_use]
    pub const fn group(&self) -> &ProcessGroup {
        self.core.group()
    }

    /// This rank.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.group().rank()
    }

    /// Number of ranks.
    #[must_use]
    pub fn world_size(&self) -> usize {
        self.group().world_size()
    }

    /// Whether this is rank 0, the one that prints.
    #[must_use]
    pub fn is_main(&self) -> bool {
        self.rank() == 0
    }

    /// Number of steps applied since the run began; [`resume`](Self::resume) restores it.
    #[must_use]
    pub const fn steps(&self) -> u64 {
        self.core.steps()
    }

    /// The loss scale; 1 without one.
    #[must_use]
    pub fn loss_scale(&self) -> f32 {
        self.core.loss_scale()
    }

    /// The device of the variables.
    #[must_use]
    pub const fn device(&self) -> &Device {
        &self.device
    }

    /// On a GPU, version and path of the cuDNN used for convolutions of `f16` and `bf16`, or the
    /// reason why none is used, in which case convolutions are slower. `None` on the CPU.
    #[must_use]
    pub fn cudnn(&self) -> Option<std::result::Result<&str, &candle_ops::Error>> {
        #[cfg(feature = "cuda")]
        return self.context.kernels().map(|kernels| kernels.cudnn());
        #[cfg(not(feature = "cuda"))]
        None
    }

    /// Converts an array of a dataset to a tensor on the variables' device, as
    /// [`tensor`](crate::tensor()) does; to a GPU through pinned memory, so that the host does not
    /// wait for the GPU, and a large one in a stream of its own, while the last step runs.
    ///
    /// # Errors
    ///
    /// An error of the device; a type that candle does not have.
    pub fn tensor(&self, array: &Array) -> candle_core::Result<Tensor> {
        self.inputs.tensor(array)
    }

    /// Returns the optimizations of [`compile`](crate::TrainerBuilder::compile) so far; `None`
    /// without it.
    #[must_use]
    pub fn compile_report(&self) -> Option<CompileReport> {
        self.compiled.as_ref().map(|compiled| compiled.report(&self.context, &self.device))
    }

    /// Norm of the averaged gradients of the last step before clipping, if it
    /// [clips by norm](Clip::norm); `None` if it was skipped, and before the first one of this
    /// process. On a GPU it waits for the step.
    #[must_use]
    pub fn grad_norm(&self) -> Option<f64> {
        self.core.grad_norm()
    }

    /// The learning rate of the first parameter group in the last step.
    #[must_use]
    pub fn learning_rate(&self) -> f64 {
        self.core.learning_rate()
    }

    /// The optimizer, to read or set hyper-parameters. A
    /// [`schedule`](crate::TrainerBuilder::schedule) sets learning rates again before each step.
    pub fn optimizer(&mut self) -> &mut dyn Optimizer {
        self.core.optimizer_mut()
    }
}

impl fmt::Debug for Trainer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Trainer")
            .field("rank", &self.rank())
            .field("world_size", &self.world_size())
            .field("device", &self.device)
            .field("variables", &self.variables.params.len())
            .field("optimizer", self.core.optimizer())
            .field("loss_scale", &self.loss_scale())
            .field("steps", &self.steps())
            .finish_non_exhaustive()
    }
}
