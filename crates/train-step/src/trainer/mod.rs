//! `Trainer`: a data-parallel training loop's step, checkpoint and sums, for any tensor crate.

mod buffers;
mod builder;
mod exchange;
mod outcome;
mod parts;
mod progress;
mod resume;
mod save;

use std::cell::RefCell;
use std::fmt::{self, Display};
use std::sync::Arc;

use collective::{ProcessGroup, ReduceOp};
use fused_optim::{Applied, HyperParam, Optimizer, Slice, StepCtl};
use parking_lot::Mutex;
use tracing::debug_span;

use self::buffers::Buffers;
pub use self::builder::TrainerBuilder;
use self::exchange::{OpenStep, first_line};
pub use self::outcome::{Outcome, Step};
pub use self::parts::Parts;
pub use self::progress::is_reserved;
pub use self::resume::optimizer_state;
use crate::checkpoint::Places;
use crate::{
    Averages, BatchRole, DeviceTensor, EngineState, Error, GradSink, Model, OptimWrapper,
    OptimizerStep, Result, Schedules, StepContext,
};

/// Factor of the learning rates as a function of the number of steps taken.
pub type Schedule = Box<dyn Fn(u64) -> f64 + Send>;

/// Trains a model of any tensor crate, which lends its tensors ([`Model`]): averages gradients over
/// ranks during backward, scales the loss, accumulates, clips, steps, saves and resumes. Built by
/// [`Trainer::builder`].
///
/// ```
/// use train_step::fused_optim::{DType, Slice, SliceMut};
/// use train_step::fused_optim::{Sgd, SgdHyper};
/// use train_step::{Model, Result, TensorSpec, Trainer, Visit};
///
/// /// Minimizes the square of one number.
/// struct Square(Vec<TensorSpec>, [f32; 1]);
///
/// impl Model for Square {
///     fn params(&self) -> &[TensorSpec] {
///         &self.0
///     }
///
///     fn with_params(&mut self, visit: &mut Visit<'_>) -> Result<()> {
///         visit(&mut [SliceMut::F32(&mut self.1)])
///     }
/// }
///
/// let spec = TensorSpec { name: "x".into(), shape: vec![1], dtype: DType::F32 };
/// let mut model = Square(vec![spec], [1.0]);
/// let sgd = Sgd::with_one_group(SgdHyper { lr: 0.25, ..SgdHyper::default() }, 1)?;
/// let mut train = Trainer::builder().build(&mut model, Box::new(sgd))?;
/// for _ in 0..10 {
///     // The gradient of the loss, multiplied by its scale.
///     train.step(&mut model, |model, cx| {
///         cx.report(0, Slice::F32(&[2.0 * model.1[0] * cx.loss_scale]))
///     })?;
/// }
/// assert_eq!((train.steps(), model.1[0]), (10, 0.5_f32.powi(10)));
/// assert_eq!(train.mean([0.25])?, [0.25]); // over the ranks: here there is one
/// # Ok::<(), train_step::Error>(())
/// ```
///
/// Every rank must call [`step`](Self::step) (or [`step_weighted`](Self::step_weighted)),
/// [`begin_epoch`](Self::begin_epoch), [`zero_grad`](Self::zero_grad), [`mean`](Self::mean),
/// [`sum`](Self::sum), [`save`](Self::save) and [`resume`](Self::resume), or
/// their forms with data, in the same order. On the host ranks compare these calls, and an error
/// names those that differ; on devices, where a step does not wait for the other ranks' hosts, the
/// error comes with the group's timeout.
pub struct Trainer {
    averages: Averages,
    optim: OptimWrapper,
    buffers: Buffers,
    /// Whether the model is on the host.
    on_host: bool,
    /// Batches since the last step whose gradients wait for it.
    pending: usize,
    /// The step of these batches.
    open: OpenStep,
    /// The mean count of a batch in the last step of [`step_weighted`](Self::step_weighted).
    mean_count: Option<f64>,
    /// The number of batches in the epoch and of those already trained, after a call of
    /// [`begin_epoch`](Self::begin_epoch).
    epoch: Option<(usize, usize)>,
    schedule: Option<Schedule>,
    schedules: Option<Schedules>,
    /// The optimizer's learning rates, by parameter group, before the schedule.
    base_lrs: Vec<f64>,
    /// Number of applied steps.
    steps: u64,
    state: EngineState,
    saves: RefCell<Places>,
    /// Name among the trainers of a program, by [`TrainerBuilder::part`].
    part: Option<String>,
    /// Error of a `resume` that has failed after it had changed part of the state.
    torn: Option<String>,
}

impl Trainer {
    /// Trains on a batch: `run` runs forward and backward, and reports each gradient, multiplied by
    /// [`loss_scale`](StepContext::loss_scale), by [`report`](StepContext::report) of its context
    /// (or to its [`sink`](StepContext::sink), which a backward pass may keep). The optimizer steps
    /// if it is due. Returns the result of `run`, and whether the step was taken.
    ///
    /// In mixed precision a step with gradients that are not finite is skipped, and the loss scale
    /// is reduced; [buffers](Model::buffers) are as before the batch then. After each step all
    /// ranks have those of rank 0.
    ///
    /// A step is the mean of the losses of its batches and ranks, whatever the number of samples or
    /// tokens of each; if they differ, use [`step_weighted`](Self::step_weighted).
    ///
    /// # Errors
    ///
    /// Errors of `run`; a parameter without a gradient, by name; a learning rate that is refused;
    /// [`Error::NonFinite`] if too many steps in a row were skipped, or the loss scale has fallen
    /// to its minimum; on several ranks on the host [`Error::RankFailed`], another rank that calls
    /// another method, and hyper-parameters that differ.
    ///
    /// After an error no parameter has changed, and buffers are as before the batch, which counts
    /// as one of the epoch's, but the gradients of its step so far are dropped. On one rank
    /// the batches after it make a step of full strength. On several ranks all drop the whole step:
    /// its last batch is an error on all, also on the rank that has failed in an earlier batch.
    /// After a failure of the process group, an update that fails (other than by
    /// [`Error::NonFinite`]), and on several devices after any error, all later calls fail, and
    /// other ranks may have taken the step.
    pub fn step<M: Model + ?Sized, L, E: From<Error> + Display>(
        &mut self,
        model: &mut M,
        run: impl FnOnce(&mut M, &mut StepContext<'_>) -> Result<L, E>,
    ) -> Result<Step<L>, E> {
        self.train(model, ("step", 1.0), run)
    }

    /// Like [`step`](Self::step), for a loss that is the mean of `count` tokens or samples: the
    /// step is then the mean of all tokens of its batches and ranks.
    ///
    /// A batch of 0 tokens adds nothing, and its loss may be NaN: its rank takes part in the step
    /// with the others. All batches of a step, on all ranks, must be trained by the same method. On
    /// devices the ranks' hosts wait for each other in each step.
    ///
    /// # Errors
    ///
    /// The errors of [`step`](Self::step); counts that are all 0.
    pub fn step_weighted<M: Model + ?Sized, L, E: From<Error> + Display>(
        &mut self,
        count: usize,
        model: &mut M,
        run: impl FnOnce(&mut M, &mut StepContext<'_>) -> Result<L, E>,
    ) -> Result<Step<L>, E> {
        self.train(model, ("step_weighted", count as f64), run)
    }

    fn train<M: Model + ?Sized, L, E: From<Error> + Display>(
        &mut self,
        mut model: &mut M,
        (call, count): (&'static str, f64),
        run: impl FnOnce(&mut M, &mut StepContext<'_>) -> Result<L, E>,
    ) -> Result<Step<L>, E> {
        let _span = debug_span!(target: "train_step", "step", rank = self.rank()).entered();
        self.buffers.begin();
        self.begin_batch(call, count)?;
        let role = self.next_batch();
        let own = self.pass(&mut *model, (call, count), role, run);
        let ended = self.end_batch(&mut model, count, role, own).and_then(|(loss, applied)| {
            let outcome = match applied {
                None => Outcome::Accumulated,
                Some(Applied::SkippedNonFinite) => {
                    Outcome::Skipped { loss_scale: self.optim.loss_scale() }
                }
                Some(_) => Outcome::Updated,
            };
            let restored = self.end_buffers(&mut model, outcome);
            self.or_abort(restored)?;
            Ok(Step { loss, outcome })
        });
        if ended.is_err() {
            // The batch's own error is returned.
            let _ = self.buffers.restore(&mut model);
        }
        ended
    }

    /// The role of the next batch, which counts as one of the epoch also if it fails. After an
    /// epoch's last batch the same batches may be iterated again.
    fn next_batch(&mut self) -> BatchRole {
        let role = self.optim.accumulation().next_batch();
        if let Some((len, seen)) = &mut self.epoch {
            *seen += 1;
            if seen == len {
                *seen = 0;
                self.optim.accumulation().initialize_count_status(0, *len);
            }
        }
        role
    }

    /// Runs the forward and the backward pass of a batch, up to the end of the averaging. Also
    /// returns the result of the optimizer step, if `run` has run it.
    fn pass<M: Model + ?Sized, L, E: From<Error>>(
        &mut self,
        mut model: &mut M,
        (call, count): (&'static str, f64),
        role: BatchRole,
        run: impl FnOnce(&mut M, &mut StepContext<'_>) -> Result<L, E>,
    ) -> Result<(L, Option<Applied>), E> {
        self.averages.prepare(&mut model, role.steps)?;
        self.check_whole()?;
        if self.open.call != Some(call) {
            let text = "`step` and `step_weighted` were called for batches of one step";
            return Err(Error::InvalidArgument(text.to_owned()).into());
        }
        let factor = f64::from(self.optim.loss_scale()) / role.divisor * (count / self.open.unit);
        let (counts, autocast) = (count > 0.0, self.optim.autocast());
        let sink = if counts { self.averages.sink() } else { Arc::new(Mutex::new(NoGradients)) };
        let joins = role.steps && counts && !self.on_host;
        let joins = joins && self.averages.gradients().passes_unchanged();
        if joins {
            self.schedule_rates()?;
        }
        let ctl = self.step_ctl(role.divisor, self.open.count + count);
        let step = OptimizerStep::new(self.optim.optimizer_mut(), ctl);
        let mut cx = StepContext {
            loss_scale: if counts { factor as f32 } else { 1.0 },
            autocast,
            sync: role.steps,
            step: joins.then_some(OptimizerStep { may_join_backward: true, ..step }),
            ..StepContext::new(sink, &mut self.state)
        };
        self.buffers.keep(&mut model)?;
        let loss = run(model, &mut cx)?;
        let ran = cx.step.and_then(|step| step.applied);
        match counts {
            true => self.averages.check()?,
            // They may be NaN, as the loss may.
            false => self.buffers.restore(&mut model)?,
        }
        Ok((loss, ran))
    }

    /// Ends a batch, and runs the optimizer step if it is due. After an error the gradients of the
    /// step so far are dropped; on one rank the batches after it make a step of full strength.
    fn end_batch<L, E: From<Error> + Display>(
        &mut self,
        model: &mut dyn Model,
        count: f64,
        role: BatchRole,
        own: Result<(L, Option<Applied>), E>,
    ) -> Result<(L, Option<Applied>), E> {
        // A schedule may return a rate that is refused, on this rank alone.
        let own = own.and_then(|own| match role.steps && own.1.is_none() {
            true => self.schedule_rates().map(|()| own).map_err(E::from),
            false => Ok(own),
        });
        match &own {
            Ok(_) => {
                self.pending += 1;
                self.open.count += count;
            }
            Err(error) if self.world_size() > 1 => {
                let text = error.to_string();
                let reason = first_line(&text);
                if !self.on_host {
                    self.group().abort(reason);
                }
                self.open.failed.get_or_insert_with(|| reason.to_owned());
            }
            Err(_) => {}
        }
        let has_gradients = own.is_ok() && count > 0.0;
        let ran = own.as_ref().ok().map(|(_, ran)| *ran);
        let ended = self.end_pass(model, role, ran, has_gradients);
        if role.steps {
            self.drop_gradients();
            self.open = OpenStep::default();
        } else if own.is_err() || ended.is_err() {
            self.drop_gradients();
        }
        own.and_then(|(loss, _)| Ok((loss, ended?)))
    }

    /// Ends the averages of a batch, and runs the optimizer step if it is due. `own` is `None`
    /// after an error, and otherwise has the result of a step that the backward pass has run.
    fn end_pass(
        &mut self,
        model: &mut dyn Model,
        role: BatchRole,
        own: Option<Option<Applied>>,
        has_gradients: bool,
    ) -> Result<Option<Applied>> {
        if role.steps && !has_gradients {
            // The other ranks wait for this one's gradients.
            self.or_abort(self.averages.fill(model))?;
        }
        let finished = self.averages.finish(model);
        self.or_abort(finished)?;
        let tells = self.world_size() > 1 && self.compares(self.open.call.unwrap_or("step"));
        if !role.steps || (own.is_none() && !tells) {
            return Ok(None);
        }
        let total = self.agree(role.divisor)?;
        let ctl = self.step_ctl(role.divisor, total);
        match self.update(model, ctl, own.flatten()) {
            // All ranks have it.
            Err(error @ Error::NonFinite { .. }) => Err(error),
            updated => self.or_abort(updated).map(Some),
        }
    }

    /// Drops the gradients of the batches since the last step.
    fn drop_gradients(&mut self) {
        self.averages.zero_grad();
        self.pending = 0;
        self.open.count = 0.0;
    }

    /// Steps the schedulers for the steps taken since they were stepped last.
    fn step_schedulers(&mut self) -> Result<()> {
        let Some(schedules) = &mut self.schedules else { return Ok(()) };
        let Some(iters) = schedules.iters() else { return Ok(()) };
        let due = self.steps.saturating_sub(iters);
        schedules.step_iters(due, self.optim.optimizer_mut())
    }

    /// Sets the learning rates of the next step by the schedule.
    fn schedule_rates(&mut self) -> Result<()> {
        self.step_schedulers()?;
        let Some(schedule) = &self.schedule else { return Ok(()) };
        let factor = schedule(self.steps);
        for (group, base) in self.base_lrs.iter().enumerate() {
            self.optim.optimizer_mut().set_hyper_param(group, HyperParam::Lr, base * factor)?;
        }
        Ok(())
    }

    /// Options of the optimizer step on the averages of gradients that were divided by `divisor`,
    /// and of counts with this sum over batches and ranks.
    fn step_ctl(&self, divisor: f64, total: f64) -> StepCtl {
        // 1, if all batches have the same count.
        self.optim.ctl(divisor * self.world_size() as f64 * self.open.unit / total)
    }

    /// Runs the optimizer step, unless it `ran` in the backward pass.
    fn update(
        &mut self,
        model: &mut dyn Model,
        ctl: StepCtl,
        ran: Option<Applied>,
    ) -> Result<Applied> {
        let applied = self.optim.apply((ctl, ran), model, self.averages.gradients_mut())?;
        self.steps += u64::from(applied != Applied::SkippedNonFinite);
        Ok(applied)
    }

    /// Steps the [schedulers](TrainerBuilder::schedulers) that depend on a metric
    /// ([`Plateau`](crate::Plateau)), with the metrics of a validation, which have to be the same
    /// on all ranks.
    ///
    /// # Errors
    ///
    /// A missing metric, with the known names; a learning rate that is refused.
    pub fn step_metrics(&mut self, metrics: &[(String, f64)]) -> Result<()> {
        self.step_schedulers()?;
        match &mut self.schedules {
            Some(schedules) => schedules.step_metrics(metrics, self.optim.optimizer_mut()),
            None => Ok(()),
        }
    }

    /// Begins an epoch of `len` batches at batch `first`: its last batch ends in a step. Every rank
    /// must call it, with the same numbers. Blocks until all ranks have called it.
    ///
    /// # Errors
    ///
    /// On all ranks: numbers that differ between them; batches since the last step, of an earlier
    /// epoch; a `first` beyond `len`.
    pub fn begin_epoch(&mut self, len: usize, first: usize) -> Result<()> {
        self.begin_epoch_of::<Error>(Ok((len, first)))
    }

    /// As [`begin_epoch`](Self::begin_epoch) of `(len, first)`; an error of one rank is one on all.
    ///
    /// # Errors
    ///
    /// The error of this or of another rank; as [`begin_epoch`](Self::begin_epoch).
    pub fn begin_epoch_of<E: From<Error>>(
        &mut self,
        own: Result<(usize, usize), E>,
    ) -> Result<(), E> {
        let own = own.and_then(|(len, first)| {
            self.check_pending()?;
            match first > len {
                true => Err(Error::InvalidArgument(format!(
                    "an epoch of {len} batches does not begin at batch {first}"
                ))
                .into()),
                false => Ok((len, first)),
            }
        });
        let (len, first) = self.compare_epochs(own)?;
        self.open = OpenStep::default();
        self.optim.accumulation().initialize_count_status(first, len);
        self.epoch = Some((len, first));
        Ok(())
    }

    /// Returns an error if batches wait for a step.
    ///
    /// # Errors
    ///
    /// Batches since the last step.
    pub fn check_pending(&self) -> Result<()> {
        let pending = self.pending;
        if pending == 0 {
            return Ok(());
        }
        Err(Error::InvalidArgument(format!(
            "{pending} batches wait for a step: train the epoch's other batches, or call `zero_grad`; an epoch's \
             last batch ends in a step if this trainer has begun the epoch"
        )))
    }

    /// Drops the gradients of the batches since the last step. Within an
    /// [epoch](Self::begin_epoch) the step's later batches make one of full strength, so that the
    /// epoch's last batch still ends in a step; otherwise the next batch is the first of a step.
    /// Every rank must call it.
    pub fn zero_grad(&mut self) {
        self.drop_gradients();
        self.open = OpenStep::default();
        if self.epoch.is_none() {
            let accumulation = self.optim.accumulation();
            *accumulation = crate::Accumulation::new(accumulation.counts());
        }
    }

    /// Returns the sums over the ranks of several numbers per rank, such as the numbers of correct
    /// predictions and of samples. Every rank must call it, with the same number of values.
    ///
    /// # Errors
    ///
    /// A failure of another rank.
    pub fn sum<V: AsMut<[f64]>>(&self, values: V) -> Result<V> {
        self.total("sum", Ok(values))
    }

    /// Returns the means over the ranks of several numbers per rank, such as `[loss]`. Every rank
    /// must call it, with the same number of values.
    ///
    /// # Errors
    ///
    /// A failure of another rank.
    pub fn mean<V: AsMut<[f64]>>(&self, values: V) -> Result<V> {
        let mut values = self.total::<V, Error>("mean", Ok(values))?;
        values.as_mut().iter_mut().for_each(|value| *value /= self.world_size() as f64);
        Ok(values)
    }

    /// As [`sum`](Self::sum), called by the method `call`; an error of one rank is one on all.
    ///
    /// # Errors
    ///
    /// The error of this or of another rank.
    pub fn total<V: AsMut<[f64]>, E: From<Error>>(
        &self,
        call: &'static str,
        own: Result<V, E>,
    ) -> Result<V, E> {
        let mut values = self.announce_result(call, own)?;
        self.group().all_reduce(values.as_mut(), ReduceOp::Sum).map_err(Error::from)?;
        Ok(values)
    }

    /// The process group of all ranks.
    #[must_use]
    pub const fn group(&self) -> &ProcessGroup {
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

    /// Number of steps applied since the run began; [`resume`](Self::resume) restores it.
    #[must_use]
    pub const fn steps(&self) -> u64 {
        self.steps
    }

    /// Number of batches since the last step whose gradients wait for it.
    #[must_use]
    pub const fn pending(&self) -> usize {
        self.pending
    }

    /// The loss scale; 1 without one.
    #[must_use]
    pub fn loss_scale(&self) -> f32 {
        self.optim.loss_scale()
    }

    /// Norm of the averaged gradients of the last step before clipping, if it clips by norm; `None`
    /// if it was skipped, and before the first one of this process. On a device it waits for the
    /// step.
    #[must_use]
    pub fn grad_norm(&self) -> Option<f64> {
        self.optim.grad_norm()
    }

    /// The learning rate of the first parameter group in the last step.
    #[must_use]
    pub fn learning_rate(&self) -> f64 {
        self.optim.optimizer().lr(0).unwrap_or(f64::NAN)
    }

    /// The optimizer.
    #[must_use]
    pub fn optimizer(&self) -> &dyn Optimizer {
        self.optim.optimizer()
    }

    /// The optimizer, to set hyper-parameters. Schedules set learning rates again before each step.
    pub fn optimizer_mut(&mut self) -> &mut dyn Optimizer {
        self.optim.optimizer_mut()
    }

    /// The program's state that is saved in checkpoints: its seed, and this rank's position in the
    /// random numbers.
    pub const fn state_mut(&mut self) -> &mut EngineState {
        &mut self.state
    }

    /// Returns an error after a `resume` that has changed part of the state.
    ///
    /// # Errors
    ///
    /// The error of that `resume`.
    pub fn check_whole(&self) -> Result<()> {
        match &self.torn {
            Some(reason) => Err(Error::InvalidArgument(format!(
                "`resume` has failed when it had changed part of the state ({reason}): resume again, or build a new \
                 trainer"
            ))),
            None => Ok(()),
        }
    }

    /// Whether [`check_whole`](Self::check_whole) is due: once a step, and after a failed resume.
    #[must_use]
    pub const fn is_first_batch(&self) -> bool {
        self.pending == 0 || self.torn.is_some()
    }
}

/// The receiver of the gradients of a batch that does not count.
struct NoGradients;

impl GradSink for NoGradients {
    fn ready(&mut self, _: usize, _: Slice<'_>) -> Result<()> {
        Ok(())
    }

    fn ready_on_device(&mut self, _: usize, _: Box<dyn DeviceTensor>) -> Result<()> {
        Ok(())
    }
}

impl fmt::Debug for Trainer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Trainer")
            .field("rank", &self.rank())
            .field("world_size", &self.world_size())
            .field("optimizer", self.optim.optimizer())
            .field("loss_scale", &self.loss_scale())
            .field("steps", &self.steps)
            .finish_non_exhaustive()
    }
}
