//! [`Trainer`]: one call per batch.

use std::cell::RefCell;
use std::collections::HashSet;
use std::fmt;
use std::sync::PoisonError;

use amp::LossScaler;
use candle_core::{DType, Device, Tensor};
use candle_nn::VarMap;
use candle_ops::Context;
use collective::ProcessGroup;
use fused_optim::candle::VarOptimizer;
use fused_optim::{Applied, Clip, FoundInf, HyperParam, Optimizer, StepCtl};
use tracing::debug_span;
use train_step::{Accumulation, BatchRole, OptimizerStep, Schedules, first_non_finite};

use crate::age::check_age;
use crate::averages::DataParallel;
use crate::exchange::{OpenStep, first_line};
use crate::outcome::{Outcome, Step};
use crate::state::Places;
use crate::tensors::ModelTensors;
use crate::variables::{Statistics, Variables, is_finite};
use crate::{Error, Result};

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
    pub(crate) averages: DataParallel,
    pub(crate) optimizer: VarOptimizer<Box<dyn Optimizer>>,
    pub(crate) scaler: LossScaler,
    pub(crate) context: Context,
    pub(crate) device: Device,
    /// Whether steps with gradients that are not finite are skipped.
    pub(crate) is_mixed: bool,
    /// Whether an operator has run in half precision, or none has to.
    pub(crate) has_lowered: bool,
    pub(crate) clip: Option<Clip>,
    pub(crate) accumulation: Accumulation,
    /// Batches since the last step whose gradients wait for it.
    pub(crate) pending: usize,
    /// The step of these batches.
    pub(crate) open: OpenStep,
    /// The mean count of a batch in the last step of [`step_weighted`](Self::step_weighted).
    pub(crate) mean_count: Option<f64>,
    pub(crate) statistics: Statistics,
    /// The number of batches in the epoch and of those already trained, after a call of
    /// [`batches`](Self::batches).
    pub(crate) epoch: Option<(usize, usize)>,
    pub(crate) schedule: Option<Schedule>,
    pub(crate) schedules: Option<Schedules>,
    /// The optimizer's learning rates, by parameter group, before the schedule.
    pub(crate) base_lrs: Vec<f64>,
    /// Number of applied steps.
    pub(crate) steps: u64,
    /// Whether the last step was taken, and by this process.
    pub(crate) has_norm: bool,
    /// Number of steps skipped in a row, and the number that is an error.
    pub(crate) skips: usize,
    pub(crate) max_consecutive_skips: usize,
    pub(crate) seed: u64,
    pub(crate) saves: RefCell<Places>,
    /// Error of a `resume` that has failed after it had changed part of the state.
    pub(crate) torn: Option<String>,
}

/// Factor of the learning rates as a function of the number of steps taken.
pub(crate) type Schedule = Box<dyn Fn(u64) -> f64 + Send>;

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
    /// A step is the mean of the losses of its batches and ranks, whatever the number of samples or
    /// tokens of each; if they differ, use [`step_weighted`](Self::step_weighted).
    ///
    /// # Errors
    ///
    /// Errors of `forward`; variables created after this trainer; a loss of several elements, or
    /// one that depends on tensors computed before this call, such as an earlier batch's state
    /// without `detach`, or on no trained variable; autocast without an operator to cast; a
    /// variable without a gradient, by name; a learning rate that is refused; [`Error::NonFinite`]
    /// if too many steps in a row were skipped, or the loss scale has fallen to its minimum; on
    /// several ranks on the CPU [`Error::RankFailed`], another rank that calls another method, and
    /// hyper-parameters that differ.
    ///
    /// After an error no variable has changed, and the statistics of norm layers are as before the
    /// batch. It counts as one of the epoch's batches, but the gradients of its step so far are
    /// dropped. On one rank the batches after it make a step of full strength. On several ranks
    /// all drop the whole step: its last batch is an error on all, also on the rank that has failed
    /// in an earlier batch. After a failure of the process group, an update that fails (other than
    /// by [`Error::NonFinite`]), and on several GPUs after any error, all later calls fail, and
    /// other ranks may have taken the step.
    pub fn step(&mut self, forward: impl FnOnce() -> candle_core::Result<Tensor>) -> Result<Step> {
        let _span = debug_span!(target: "candle_train", "step", rank = self.rank()).entered();
        self.train("step", 1.0, forward).map_err(|error| self.failed("step", error))
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
        forward: impl FnOnce() -> candle_core::Result<Tensor>,
    ) -> Result<Step> {
        let _span = debug_span!(target: "candle_train", "step", rank = self.rank()).entered();
        let trained = self.train("step_weighted", count as f64, forward);
        trained.map_err(|error| self.failed("step_weighted", error))
    }

    fn train(
        &mut self,
        call: &'static str,
        count: f64,
        forward: impl FnOnce() -> candle_core::Result<Tensor>,
    ) -> Result<Step> {
        self.begin_batch(call, count)?;
        let role = self.next_batch();
        self.statistics.begin();
        let own = self.pass((call, count), role, forward);
        let ended = self.end_batch(count, role, own).and_then(|(loss, applied)| {
            self.or_abort(self.end_statistics(applied))?;
            let loss_scale = self.loss_scale();
            let outcome = match applied {
                None => Outcome::Accumulated,
                Some(Applied::SkippedNonFinite) => Outcome::Skipped { loss_scale },
                Some(_) => Outcome::Updated,
            };
            Ok(Step { loss: loss.detach(), outcome })
        });
        if ended.is_err() {
            // The batch's own error is returned.
            let _ = self.statistics.restore(&self.variables.buffers, |_| Ok(true));
        }
        ended
    }

    /// Restores statistics that are lost; after a step broadcasts those of rank 0.
    fn end_statistics(&self, applied: Option<Applied>) -> Result<()> {
        self.restore_lost(applied)?;
        match applied {
            // After the step and not before the next one: an evaluation, and a run resumed from
            // what rank 0 saves, have the same statistics on all ranks.
            Some(_) => self.variables.broadcast_buffers(self.averages.group()),
            None => Ok(()),
        }
    }

    /// The role of the next batch, which counts as one of the epoch also if it fails. After an
    /// epoch's last batch the same batches may be iterated again.
    fn next_batch(&mut self) -> BatchRole {
        let role = self.accumulation.next_batch();
        if let Some((len, seen)) = &mut self.epoch {
            *seen += 1;
            if seen == len {
                *seen = 0;
                self.accumulation.initialize_count_status(0, *len);
            }
        }
        role
    }

    /// Runs the forward and the backward pass of a batch, up to the end of the averaging.
    fn pass(
        &mut self,
        (call, count): (&'static str, f64),
        role: BatchRole,
        forward: impl FnOnce() -> candle_core::Result<Tensor>,
    ) -> Result<Tensor> {
        self.averages.prepare(role.steps)?;
        self.statistics.copy(&self.variables.buffers)?;
        // Once a step: it looks up each variable.
        if self.pending == 0 || self.torn.is_some() {
            self.check_whole()?;
        }
        let refused = |text: &str| Err(Error::InvalidArgument(text.to_owned()));
        if self.open.call != Some(call) {
            return refused("`step` and `step_weighted` were called for batches of one step");
        }
        let begin = Tensor::zeros((), DType::U8, &Device::Cpu)?;
        let forward = || (candle_ops::record(forward), candle_ops::lowered_operators());
        let span = debug_span!(target: "candle_train", "forward");
        let ((loss, tape), lowered) = span.in_scope(|| self.context.enter(forward));
        let loss = loss?;
        check_age(&loss, &tape, &begin)?;
        if loss.elem_count() != 1 {
            let shape = loss.dims();
            let text =
                format!("the loss has shape {shape:?}; expected one element, the batch's mean");
            return Err(Error::InvalidArgument(text));
        }
        self.has_lowered |= lowered > 0;
        if !self.has_lowered {
            return refused(
                "autocast is enabled, but no operator ran in half precision: candle-nn's own layers do not support \
                 autocast; use those of `candle_ops`",
            );
        }
        if count == 0.0 {
            // The loss may be NaN, and so would be its gradients times 0, and statistics.
            self.statistics.restore(&self.variables.buffers, |_| Ok(true))?;
            return Ok(loss);
        }
        let factor = f64::from(self.scaler.scale()) / role.divisor * (count / self.open.unit);
        let gradient =
            Tensor::full(factor as f32, loss.shape(), loss.device())?.to_dtype(loss.dtype())?;
        let averages = &mut self.averages;
        let backward = || averages.pass((tape, &loss), gradient);
        let span = debug_span!(target: "candle_train", "backward");
        span.in_scope(|| self.context.enter(backward))?;
        Ok(loss)
    }

    /// Ends a batch, and runs the optimizer step if it is due. After an error the gradients of the
    /// step so far are dropped; on one rank the batches after it make a step of full strength.
    fn end_batch(
        &mut self,
        count: f64,
        role: BatchRole,
        own: Result<Tensor>,
    ) -> Result<(Tensor, Option<Applied>)> {
        // A schedule may return a rate that is refused, on this rank alone.
        let own = own.and_then(|loss| match role.steps {
            true => self.schedule_rates().map(|()| loss),
            false => Ok(loss),
        });
        match &own {
            Ok(_) => {
                self.pending += 1;
                self.open.count += count;
            }
            Err(error) if self.world_size() > 1 => {
                let text = error.to_string();
                let reason = first_line(&text);
                if !self.device.is_cpu() {
                    self.group().abort(reason);
                }
                self.open.failed.get_or_insert_with(|| reason.to_owned());
            }
            Err(_) => {}
        }
        let has_gradients = own.is_ok() && count > 0.0;
        let ended = self.end_pass(role, own.is_ok(), has_gradients);
        if role.steps {
            self.drop_gradients();
            self.open = OpenStep::default();
        } else if own.is_err() || ended.is_err() {
            self.drop_gradients();
        }
        own.and_then(|loss| Ok((loss, ended?)))
    }

    fn end_pass(
        &mut self,
        role: BatchRole,
        is_ok: bool,
        has_gradients: bool,
    ) -> Result<Option<Applied>> {
        if role.steps && !has_gradients {
            // The other ranks wait for this one's gradients.
            self.or_abort(self.averages.fill())?;
        }
        let finished = self.averages.finish();
        self.or_abort(finished)?;
        let tells = self.world_size() > 1 && self.compares(self.open.call.unwrap_or("step"));
        if !role.steps || (!is_ok && !tells) {
            return Ok(None);
        }
        let total = self.agree(role.divisor)?;
        match self.update(role.divisor, total) {
            // All ranks have it.
            Err(error @ Error::NonFinite { .. }) => Err(error),
            updated => self.or_abort(updated).map(Some),
        }
    }

    /// Drops the gradients of the batches since the last step.
    pub(crate) fn drop_gradients(&mut self) {
        self.averages.zero_grad();
        self.pending = 0;
        self.open.count = 0.0;
    }

    /// Returns an error after a `resume` that has changed part of the state, or for another map.
    pub(crate) fn check_whole(&self) -> Result<()> {
        match &self.torn {
            Some(reason) => Err(Error::InvalidArgument(format!(
                "`resume` has failed when it had changed part of the state ({reason}): resume again, or build a new \
                 trainer"
            ))),
            None => self.check_map(),
        }
    }

    /// Returns an error for variables created after this trainer, which would be neither trained
    /// nor saved, and for variables that are no longer in the map.
    pub(crate) fn check_map(&self) -> Result<()> {
        let map = self.map.data().lock().unwrap_or_else(PoisonError::into_inner);
        for (name, var) in self.variables.all() {
            let text = match map.get(name) {
                Some(now) if now.id() == var.id() => continue,
                Some(_) => {
                    format!("variable `{name}` has been replaced in the `VarMap`: use `Var::set`")
                }
                None => format!("variable `{name}` has been removed from the `VarMap`"),
            };
            return Err(Error::InvalidArgument(format!("{text}, or build a new trainer")));
        }
        if map.len() == self.variables.all().count() {
            return Ok(());
        }
        let known: HashSet<&str> = self.variables.all().map(|(name, _)| name.as_str()).collect();
        let mut new: Vec<_> = map.keys().filter(|name| !known.contains(name.as_str())).collect();
        new.sort();
        let text =
            format!("variables made after the trainer: {new:?}; build the whole model before it");
        Err(Error::InvalidArgument(text))
    }

    /// An error of one of the methods that all ranks call, with advice.
    pub(crate) fn failed(&self, call: &'static str, error: Error) -> Error {
        error.of_call(call, self.rank(), self.variables.params.len())
    }

    /// In mixed precision, restores the statistics after a batch whose step was skipped, and those
    /// of an earlier batch of the step that are not finite.
    fn restore_lost(&self, applied: Option<Applied>) -> Result<()> {
        if !self.is_mixed {
            return Ok(());
        }
        self.statistics.restore(&self.variables.buffers, |var| match applied {
            Some(applied) => Ok(applied == Applied::SkippedNonFinite),
            None => Ok(!is_finite(var)?),
        })
    }

    /// Steps the schedulers for the steps taken since they were stepped last.
    fn step_schedulers(&mut self) -> Result<()> {
        let Some(schedules) = &mut self.schedules else { return Ok(()) };
        let Some(iters) = schedules.iters() else { return Ok(()) };
        let due = self.steps.saturating_sub(iters);
        Ok(schedules.step_iters(due, self.optimizer.optimizer_mut())?)
    }

    /// Sets the learning rates of the next step by the schedule.
    fn schedule_rates(&mut self) -> Result<()> {
        self.step_schedulers()?;
        let Some(schedule) = &self.schedule else { return Ok(()) };
        let factor = schedule(self.steps);
        for (group, base) in self.base_lrs.iter().enumerate() {
            self.optimizer.set_hyper_param(group, HyperParam::Lr, base * factor)?;
        }
        Ok(())
    }

    /// Runs the optimizer step on the averages of gradients that were divided by `divisor`, and of
    /// counts with this sum over batches and ranks.
    fn update(&mut self, divisor: f64, total: f64) -> Result<Applied> {
        let _span = debug_span!(target: "candle_train", "optimizer").entered();
        let found_inf = if self.is_mixed { FoundInf::Check } else { FoundInf::Known(false) };
        // 1, if all batches have the same count.
        let factor = divisor * self.world_size() as f64 * self.open.unit / total;
        let grad_scale = (f64::from(self.scaler.inv_scale()) * factor) as f32;
        let ctl = StepCtl { grad_scale, found_inf, clip: self.clip };
        let step = OptimizerStep::new(&mut **self.optimizer.optimizer_mut(), ctl);
        let applied = step.run(&mut self.tensors, &self.averages.gradients)?;
        let is_skipped = applied == Applied::SkippedNonFinite;
        self.steps += u64::from(!is_skipped);
        self.has_norm = !is_skipped;
        self.skips = if is_skipped { self.skips + 1 } else { 0 };
        let scale = self.scaler.scale();
        let floor = self.scaler.update(is_skipped).err();
        if floor.is_some() || self.skips >= self.max_consecutive_skips {
            let (tensors, gradients) = (&self.tensors, &self.averages.gradients);
            let parameter = first_non_finite(grad_scale, tensors, gradients)?;
            return Err(Error::NonFinite {
                parameter: parameter.unwrap_or_else(|| "?".to_owned()),
                skips: self.skips,
                scale,
                floor,
            });
        }
        Ok(applied)
    }

    /// Steps the [schedulers](crate::TrainerBuilder::schedulers) that depend on a metric
    /// ([`Plateau`](train_step::Plateau)), with the metrics of a validation, which have to be the
    /// same on all ranks.
    ///
    /// # Errors
    ///
    /// A missing metric, with the known names; a learning rate that is refused.
    pub fn step_metrics(&mut self, metrics: &[(String, f64)]) -> Result<()> {
        self.step_schedulers()?;
        match &mut self.schedules {
            Some(schedules) => Ok(schedules.step_metrics(metrics, self.optimizer.optimizer_mut())?),
            None => Ok(()),
        }
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
        let context = &mut self.context;
        let evaluated = self.optimizer.with_eval_weights(|| context.evaluate(forward));
        evaluated.expect("the variables are this trainer's")
    }

    /// Drops the gradients of the batches since the last step. Within an epoch of
    /// [`batches`](Self::batches) the step's later batches make one of full strength, so that the
    /// epoch's last batch still ends in a step; otherwise the next batch is the first of a step.
    /// Every rank must call it.
    pub fn zero_grad(&mut self) {
        self.drop_gradients();
        self.open = OpenStep::default();
        if self.epoch.is_none() {
            self.accumulation = Accumulation::new(self.accumulation.counts());
        }
    }

    /// The process group of all ranks.
    #[must_use]
    pub fn group(&self) -> &ProcessGroup {
        self.averages.group()
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

    /// Number of applied steps.
    #[must_use]
    pub const fn steps(&self) -> u64 {
        self.steps
    }

    /// The loss scale; 1 without one.
    #[must_use]
    pub fn loss_scale(&self) -> f32 {
        self.scaler.scale()
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

    /// Norm of the averaged gradients of the last step before clipping, if it
    /// [clips by norm](Clip::norm); `None` if it was skipped, and before the first one of this
    /// process. On a GPU it waits for the step.
    #[must_use]
    pub fn grad_norm(&self) -> Option<f64> {
        self.optimizer.optimizer().grad_norm().filter(|_| self.has_norm)
    }

    /// The learning rate of the first parameter group in the last step.
    #[must_use]
    pub fn learning_rate(&self) -> f64 {
        self.optimizer.optimizer().lr(0).unwrap_or(f64::NAN)
    }

    /// The optimizer, to read or set hyper-parameters. A
    /// [`schedule`](crate::TrainerBuilder::schedule) sets learning rates again before each step.
    pub fn optimizer(&mut self) -> &mut VarOptimizer<Box<dyn Optimizer>> {
        &mut self.optimizer
    }
}

impl fmt::Debug for Trainer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Trainer")
            .field("rank", &self.rank())
            .field("world_size", &self.world_size())
            .field("device", &self.device)
            .field("variables", &self.variables.params.len())
            .field("optimizer", self.optimizer.optimizer())
            .field("loss_scale", &self.loss_scale())
            .field("steps", &self.steps)
            .finish_non_exhaustive()
    }
}
