//! `OptimWrapper`: an optimizer with gradient accumulation, clipping and optional mixed precision.
//!
//! There are two kinds of mixed precision. Under autocast parameters, gradients and the optimizer
//! are in `f32`, and each operator runs in the type of its list, as in PyTorch and
//! MMEngine. With half parameters the model computes in half precision throughout, and the
//! optimizer keeps `f32` master weights: this halves the memory of the model and the bytes of
//! gradients sent, and needs no support by operators.
//!
//! Gradients carry the loss scale `S`, and are already averaged over the ranks: an inf on one rank
//! is an inf on all. In mixed precision the optimizer first checks all gradients and skips the
//! whole step if one is not finite; every rank sees the same gradients, so all ranks skip, and
//! halve their scale, in lockstep. Otherwise it multiplies by `1 / S` in the same sweep that
//! updates. After a skipped step the model's buffers are restored (`buffers.rs`), and the model
//! wrapper's share of later gradients follows the scale. On a device that saturates, an
//! `OverflowCheck` detects infinities before they reach it.

use std::fmt::Display;
use std::sync::Arc;

use amp::LossScaler;
use fused_optim::{Applied, Clip, DType, FoundInf, Optimizer, StepCtl};
use parking_lot::Mutex;
use serde_json::Value;
use tracing::debug_span;

use super::buffers::BuffersBefore;
use super::counts::{LossCounts, PendingCounts, ZeroSink};
use super::overflow::OverflowCheck;
use super::run::first_non_finite;
use super::{Member, OptimWrapperState, OptimizerDict, Overflows, Update};
use crate::{
    Accumulation, EngineState, Error, Model, ModelWrapper, OptimizerStep, Result, StepContext,
};

/// Drives an optimizer: accumulation, loss scale, clipping. It is MMEngine's `OptimWrapper`,
/// or with [mixed precision](Self::with_mixed_precision) `AmpOptimWrapper`.
#[derive(Debug)]
#[doc(alias = "AmpOptimWrapper")]
pub struct OptimWrapper {
    optimizer: Box<dyn Optimizer>,
    accumulation: Accumulation,
    scaler: LossScaler,
    /// Whether a step with non-finite gradients is skipped.
    is_mixed: bool,
    clip: Option<Clip>,
    parts: Vec<(String, usize)>,
    autocast: Option<DType>,
    overflow: Option<OverflowCheck>,
    buffers: BuffersBefore,
    counts: LossCounts,
    /// Number of steps skipped in a row, and the number at which an error ends the run.
    skipped: usize,
    max_skipped: usize,
    /// Result of the last batch's step, if it ended with one.
    last: Option<Applied>,
    /// Error of an earlier batch or step, whose gradients may be incomplete.
    failed: Option<String>,
}

/// Default of [`with_max_consecutive_skips`](OptimWrapper::with_max_consecutive_skips).
pub const MAX_CONSECUTIVE_SKIPS: usize = 100;

impl OptimWrapper {
    /// Wraps `optimizer`; it steps every `accumulative_counts` batches, with unscaled gradients.
    #[must_use]
    pub fn new(optimizer: Box<dyn Optimizer>, accumulative_counts: usize) -> Self {
        Self {
            optimizer,
            accumulation: Accumulation::new(accumulative_counts),
            scaler: LossScaler::disabled(),
            is_mixed: false,
            clip: None,
            parts: Vec::new(),
            autocast: None,
            overflow: None,
            buffers: BuffersBefore::new(),
            counts: LossCounts::default(),
            skipped: 0,
            max_skipped: MAX_CONSECUTIVE_SKIPS,
            last: None,
            failed: None,
        }
    }

    /// Wraps an optimizer for each part of the model.
    pub fn of_members(members: Vec<Member>, accumulative_counts: usize) -> Self {
        let parts = members.iter().map(|m| (m.name.clone(), m.optimizer.group_count())).collect();
        Self::new(Box::new(OptimizerDict::new(members)), accumulative_counts).with_parts(parts)
    }

    /// Scales the loss, unless the scaler is [disabled](LossScaler::disabled), and skips steps with
    /// non-finite gradients. A resumed run uses the scale of the checkpoint.
    #[must_use]
    pub fn with_mixed_precision(mut self, scaler: LossScaler) -> Self {
        (self.scaler, self.is_mixed) = (scaler, true);
        self
    }

    /// Sets the number of skipped steps in a row after which
    /// [`update_params`](Self::update_params) is an error; 0 counts as 1. Defaults to 100.
    #[must_use]
    pub fn with_max_consecutive_skips(mut self, count: usize) -> Self {
        self.max_skipped = count.max(1);
        self
    }

    /// Clips the gradients of each step, after dividing them by the loss scale.
    #[must_use]
    #[doc(alias = "clip_grad")]
    pub fn with_clip_grad(mut self, clip: Option<Clip>) -> Self {
        self.clip = clip;
        self
    }

    /// Sets the names of an optimizer's parts, in the order of its groups, with the number of
    /// groups of each.
    #[must_use]
    pub fn with_parts(mut self, parts: Vec<(String, usize)>) -> Self {
        self.parts = parts;
        self
    }

    /// Runs forward under autocast, with `dtype` as lower precision; with `None`, the default,
    /// in the parameters' own type.
    #[must_use]
    #[doc(alias = "optim_context")]
    pub fn with_autocast(mut self, dtype: Option<DType>) -> Self {
        self.autocast = dtype;
        self
    }

    /// Adds a source that detects overflows on devices whose values do not show them. Each rank's
    /// gradients are checked before they are averaged, and the source is called at each step.
    #[must_use]
    pub fn with_overflows(mut self, source: Option<Overflows>) -> Self {
        self.overflow = source.map(OverflowCheck::new);
        self
    }

    /// Returns the optimizer.
    #[must_use]
    pub fn optimizer(&self) -> &dyn Optimizer {
        &*self.optimizer
    }

    /// Returns the optimizer.
    pub fn optimizer_mut(&mut self) -> &mut dyn Optimizer {
        &mut *self.optimizer
    }

    /// Returns the parts of an optimizer with their numbers of groups, in the order of the groups.
    #[must_use]
    pub fn parts(&self) -> &[(String, usize)] {
        &self.parts
    }

    /// Returns how gradients are clipped.
    #[must_use]
    pub const fn clip(&self) -> Option<Clip> {
        self.clip
    }

    /// Returns the loss scaler.
    #[must_use]
    pub const fn scaler(&self) -> &LossScaler {
        &self.scaler
    }

    /// Restores the loss scaler, and the number of steps skipped in a row, of a saved run.
    pub(crate) fn resume(&mut self, scaler: LossScaler, skipped: usize) {
        (self.scaler, self.skipped, self.last) = (scaler, skipped, None);
    }

    /// Returns the state of gradient accumulation.
    pub fn accumulation(&mut self) -> &mut Accumulation {
        &mut self.accumulation
    }

    /// Returns the factor of the loss before backward.
    #[must_use]
    pub fn loss_scale(&self) -> f32 {
        self.scaler.scale()
    }

    /// Returns whether steps with non-finite gradients are skipped; otherwise they make the weights
    /// non-finite.
    #[must_use]
    pub fn skips_non_finite(&self) -> bool {
        self.is_mixed
    }

    /// Returns the lower precision of autocast, if enabled.
    #[must_use]
    pub fn autocast(&self) -> Option<DType> {
        self.autocast
    }

    /// Returns scalars for the log: the loss scale, if there is one, and the norm of the gradients,
    /// if the last batch ended with a step that computed it.
    #[must_use]
    pub fn log_scalars(&self) -> Vec<(&'static str, f64)> {
        let scale = self.scaler.is_enabled().then(|| ("loss_scale", self.scaler.scale().into()));
        // Parts have their own clipping.
        let takes_norm = matches!(self.clip, Some(Clip::Norm(_))) || !self.parts.is_empty();
        let has_norm = takes_norm && self.last == Some(Applied::Applied);
        let norm = has_norm.then(|| self.optimizer.grad_norm()).flatten();
        scale.into_iter().chain(norm.map(|norm| ("grad_norm", norm))).collect()
    }

    /// Returns the state to save.
    ///
    /// # Errors
    ///
    /// Those of the optimizer's device.
    pub fn state_dict(&self) -> Result<OptimWrapperState> {
        Ok(OptimWrapperState {
            optimizer: self.optimizer.state_dict()?,
            loss_scaler: self.scaler.state_dict(),
            skipped: self.skipped,
        })
    }

    /// Returns hyper-parameters by group, in the format of the optimizer's state dict.
    ///
    /// # Errors
    ///
    /// Those of the optimizer's device.
    pub fn hyper_params(&self) -> Result<Value> {
        let groups = self.optimizer.state_dict()?.param_groups;
        serde_json::from_str(&groups).map_err(|e| super::dict::invalid(e.to_string()).into())
    }

    /// Returns the options that must be equal on all ranks, by name.
    pub fn options(&self, hyper_params: &Value) -> Vec<(String, String)> {
        let mut options = vec![
            ("the optimizer".to_owned(), self.optimizer.kind().to_owned()),
            ("accumulative_counts".to_owned(), self.accumulation.counts().to_string()),
            ("clip_grad".to_owned(), format!("{:?}", self.clip)),
            ("loss_scale".to_owned(), format!("{:?}", self.scaler)),
            ("autocast".to_owned(), format!("{:?}", self.autocast)),
            ("skip_non_finite".to_owned(), self.is_mixed.to_string()),
            ("max_consecutive_skips".to_owned(), self.max_skipped.to_string()),
        ];
        flatten("param_groups", hyper_params, &mut options);
        options
    }

    /// Restores a saved state.
    ///
    /// # Errors
    ///
    /// If the state belongs to another optimizer or other parameters, or has a loss scaler that
    /// this wrapper lacks; the wrapper is then unchanged.
    pub fn load_state_dict(&mut self, state: &OptimWrapperState) -> Result<()> {
        if !self.is_mixed && state.loss_scaler.is_some() {
            return Err(Error::SavedScaler);
        }
        let mut restored = self.scaler.clone();
        restored.load_state_dict(state.loss_scaler.as_ref()).map_err(|source| {
            Error::OtherScaler { is_missing: state.loss_scaler.is_none(), source }
        })?;
        self.optimizer.load_state_dict(&state.optimizer)?;
        (self.scaler, self.skipped) = (restored, state.skipped);
        Ok(())
    }

    /// Trains on one batch: `run` runs forward and backward, and the optimizer steps if it is due.
    /// `state` is that of the program that runs them.
    ///
    /// `count` is the number of tokens, or samples, that the loss of the batch is the mean of. If
    /// known, a step is the mean over all of its tokens, over batches and ranks; otherwise each
    /// batch has the same weight. It has to be known for all batches of a run and on all ranks, or
    /// for none.
    ///
    /// `run` reports each gradient, multiplied by [`loss_scale`](StepContext::loss_scale), to the
    /// [`sink`](StepContext::sink) of its context. It may run the context's [`OptimizerStep`] if
    /// that permits it.
    ///
    /// # Errors
    ///
    /// Those of `run`, of communication, and of the optimizer; [`Error::NonFinite`] after too many
    /// skipped steps in a row, and for a loss scale that has reached its minimum;
    /// [`Error::NoGradients`] if no parameter has a gradient. After an error each later call is
    /// [`Error::Spent`], because gradients of the failed batch may be left.
    pub fn update_params<M: Model + ?Sized, R, E: From<Error> + Display>(
        &mut self,
        (model, wrapper): (&mut M, &mut dyn ModelWrapper),
        count: Option<f64>,
        state: &mut EngineState,
        run: impl FnOnce(&mut M, &mut StepContext<'_>) -> Result<R, E>,
    ) -> Result<Update<R>, E> {
        self.unless_spent(|optim| optim.update((model, wrapper), count, state, run))
    }

    fn update<M: Model + ?Sized, R, E: From<Error>>(
        &mut self,
        (mut model, wrapper): (&mut M, &mut dyn ModelWrapper),
        count: Option<f64>,
        state: &mut EngineState,
        run: impl FnOnce(&mut M, &mut StepContext<'_>) -> Result<R, E>,
    ) -> Result<Update<R>, E> {
        self.last = None;
        let scale = self.loss_scale();
        let steps_there = self.optimizer.as_device().is_some();
        let role = self.accumulation.next_batch();
        let share = self.counts.add(count, role.divisor, wrapper)?;
        let ctl = role.steps.then(|| self.step_ctl(wrapper)).transpose()?;
        let mut cx = StepContext {
            loss_scale: (f64::from(scale / role.divisor as f32) * share) as f32,
            autocast: self.autocast,
            sync: role.steps,
            ..StepContext::new(wrapper.sink(), state)
        };
        // With an overflow check the result is known only after backward.
        if let Some(ctl) = ctl.filter(|_| self.overflow.is_none()) {
            cx.step = Some(OptimizerStep::new(&mut *self.optimizer, ctl));
        }
        wrapper.prepare(Some(&mut model), &mut cx)?;
        if count == Some(0.0) {
            cx.sink = Arc::new(Mutex::new(ZeroSink(cx.sink)));
        }
        if let Some(overflow) = &mut self.overflow {
            cx.sink = overflow.before_forward(cx.sink)?;
        }
        if self.is_mixed {
            self.buffers.keep(&mut model, steps_there)?;
        }
        let span = debug_span!(target: "train_step", "train_step");
        let losses = span.in_scope(|| run(model, &mut cx))?;
        let (note, warning) = (cx.note, cx.warning);
        let mut applied = cx.step.and_then(|step| step.applied);
        wrapper.finish()?;
        if let Some(ctl) = ctl {
            match applied {
                Some(applied) => self.stepped(applied, &ctl, &model, wrapper)?,
                None => applied = Some(self.step_by(ctl, &mut model, wrapper)?),
            }
            wrapper.zero_grad();
            if self.loss_scale() != scale {
                wrapper.rescale(self.loss_scale() / scale);
            }
        }
        let spoils_buffers = match applied {
            Some(applied) => applied == Applied::SkippedNonFinite,
            None => self.is_mixed && self.buffers.has_non_finite(&mut model)?,
        };
        if spoils_buffers {
            self.buffers.restore(&mut model)?;
        }
        Ok(Update { losses, applied, note, warning })
    }

    /// Only steps the optimizer, with the present gradients: a skipped step does not restore
    /// buffers. Every rank calls it.
    ///
    /// # Errors
    ///
    /// As [`update_params`](Self::update_params).
    pub fn step(&mut self, model: &mut dyn Model, wrapper: &dyn ModelWrapper) -> Result<Applied> {
        self.unless_spent(|optim| {
            let ctl = optim.step_ctl(wrapper)?;
            optim.step_by(ctl, model, wrapper)
        })
    }

    /// Steps the optimizer with the present gradients, unless the step `ran` in the backward pass.
    /// Unlike after [`step`](Self::step), later calls are possible after an error.
    pub(crate) fn apply(
        &mut self,
        (ctl, ran): (StepCtl, Option<Applied>),
        model: &mut dyn Model,
        wrapper: &mut dyn ModelWrapper,
    ) -> Result<Applied> {
        self.last = None;
        let scale = self.loss_scale();
        let applied = match ran {
            Some(applied) => self.stepped(applied, &ctl, model, wrapper).map(|()| applied)?,
            None => self.step_by(ctl, model, wrapper)?,
        };
        if self.loss_scale() != scale {
            wrapper.rescale(self.loss_scale() / scale);
        }
        Ok(applied)
    }

    /// Returns the norm of the averaged gradients of the last batch's step before clipping, if the
    /// step was taken and clips by norm.
    #[must_use]
    pub fn grad_norm(&self) -> Option<f64> {
        self.optimizer.grad_norm().filter(|_| self.last == Some(Applied::Applied))
    }

    /// Returns the number of steps skipped in a row.
    #[must_use]
    pub const fn skipped(&self) -> usize {
        self.skipped
    }

    fn step_by(
        &mut self,
        mut ctl: StepCtl,
        model: &mut dyn Model,
        wrapper: &dyn ModelWrapper,
    ) -> Result<Applied> {
        let _span = debug_span!(target: "train_step", "optimizer").entered();
        if let Some(overflow) = &mut self.overflow
            && overflow.found()?
        {
            ctl.found_inf = FoundInf::Known(true);
        }
        let applied = OptimizerStep::new(&mut *self.optimizer, ctl).run(model, wrapper)?;
        self.stepped(applied, &ctl, model, wrapper)?;
        Ok(applied)
    }

    /// Returns the options of the next step; every rank calls it.
    fn step_ctl(&self, wrapper: &dyn ModelWrapper) -> Result<StepCtl> {
        Ok(self.ctl(self.counts.step_factor(wrapper)?))
    }

    /// Returns the options of a step with gradients times `factor` besides the loss scale's
    /// inverse.
    pub(crate) fn ctl(&self, factor: f64) -> StepCtl {
        let found_inf = if self.is_mixed { FoundInf::Check } else { FoundInf::Known(false) };
        let grad_scale = (f64::from(self.scaler.inv_scale()) * factor) as f32;
        StepCtl { grad_scale, found_inf, clip: self.clip }
    }

    /// Records the result of a step.
    fn stepped(
        &mut self,
        applied: Applied,
        ctl: &StepCtl,
        model: &dyn Model,
        wrapper: &dyn ModelWrapper,
    ) -> Result<()> {
        if ctl.found_inf == FoundInf::Check {
            // The host has waited for the step, so this costs nothing.
            wrapper.settle()?;
        }
        self.last = Some(applied);
        self.counts.clear();
        let is_skipped = applied == Applied::SkippedNonFinite;
        self.skipped = if is_skipped { self.skipped + 1 } else { 0 };
        let scale = self.loss_scale();
        // First, so that a caller who goes on after an error has the next scale.
        let floor = self.scaler.update(is_skipped).err();
        if floor.is_none() && self.skipped < self.max_skipped {
            return Ok(());
        }
        let parameter = first_non_finite(ctl.grad_scale, model, wrapper)?;
        Err(Error::NonFinite { parameter, skips: self.skipped, scale, floor })
    }

    /// Runs `call` unless an earlier call has failed.
    fn unless_spent<T, E: From<Error> + Display>(
        &mut self,
        call: impl FnOnce(&mut Self) -> Result<T, E>,
    ) -> Result<T, E> {
        if let Some(cause) = self.failed.clone() {
            return Err(Error::Spent { cause }.into());
        }
        call(self).inspect_err(|error| self.failed = Some(error.to_string()))
    }

    /// Returns the counts of batches that await a step, for a checkpoint; every rank calls it.
    ///
    /// # Errors
    ///
    /// Those of communication.
    pub fn pending_counts(&self, wrapper: &dyn ModelWrapper) -> Result<Option<PendingCounts>> {
        self.counts.save(wrapper)
    }

    /// Restores the counts of a checkpoint, in which gradients await a step if `waits`.
    pub fn load_pending_counts(&mut self, saved: Option<PendingCounts>, waits: bool) {
        self.counts.load(saved, waits);
    }
}

/// Adds the numbers and texts of a value, by their paths.
fn flatten(path: &str, value: &Value, all: &mut Vec<(String, String)>) {
    match value {
        Value::Array(items) => {
            let items = items.iter().enumerate();
            items.for_each(|(index, item)| flatten(&format!("{path}[{index}]"), item, all));
        }
        Value::Object(items) => {
            items.iter().for_each(|(key, item)| flatten(&format!("{path}.{key}"), item, all));
        }
        value => all.push((path.to_owned(), value.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use amp::LossScalerOptions;
    use collective::ProcessGroup;
    use collective::reducer::ReducerOptions;
    use fused_optim::{AdamP, AdamPHyper, Sgd, SgdHyper};
    use half::f16;

    use super::*;
    use crate::DistributedDataParallel;
    use crate::testing::{FakeModel, Values, group};

    fn parts(
        counts: usize,
        scaler: LossScaler,
    ) -> (FakeModel, DistributedDataParallel, OptimWrapper) {
        let model = FakeModel::new(&[("w", Values::F16(vec![f16::ONE; 2]))], &[]);
        let options = ReducerOptions::default();
        let wrapper = DistributedDataParallel::new(group(), model.params(), options).unwrap();
        let sgd = Sgd::with_one_group(SgdHyper { lr: 0.5, ..SgdHyper::default() }, 1).unwrap();
        let optim = OptimWrapper::new(Box::new(sgd), counts);
        (model, wrapper, optim.with_mixed_precision(scaler))
    }

    fn dynamic() -> LossScaler {
        let options = LossScalerOptions {
            init_scale: 1024.0,
            growth_interval: 2,
            ..LossScalerOptions::default()
        };
        LossScaler::new(options).unwrap()
    }

    fn fixed(scale: f32) -> LossScaler {
        LossScaler::fixed(scale).unwrap()
    }

    fn weights(model: &FakeModel) -> &Values {
        &model.params[0]
    }

    fn all(value: f32) -> Values {
        Values::F16(vec![f16::from_f32(value); 2])
    }

    #[test]
    fn gradients_are_unscaled_and_overflows_skipped() {
        let (mut model, mut wrapper, mut optim) = parts(1, dynamic());
        let mut step = |model: &mut FakeModel, gradient: f32| {
            model.gradient = gradient;
            let update = model.update(&mut wrapper, &mut optim, None).unwrap();
            (update.applied.unwrap(), optim.loss_scale())
        };
        assert_eq!(step(&mut model, 0.25), (Applied::Applied, 1024.0));
        assert_eq!(*weights(&model), all(1.0 - 0.5 * 0.25));
        // 100 * 1024 exceeds the range of f16.
        assert_eq!(step(&mut model, 100.0), (Applied::SkippedNonFinite, 512.0));
        assert_eq!(*weights(&model), all(0.875));
        // The next steps start with zeroed gradients, and two successful ones double the scale.
        assert_eq!(step(&mut model, 0.25), (Applied::Applied, 512.0));
        assert_eq!(*weights(&model), all(0.75));
        assert_eq!(step(&mut model, 0.25), (Applied::Applied, 1024.0));
    }

    #[test]
    fn overflow_in_any_batch_skips_the_accumulated_step() {
        let (mut model, mut wrapper, mut optim) = parts(2, dynamic());
        let mut applied = Vec::new();
        for gradient in [0.25, 0.75, 1000.0, 0.25, 0.25, 0.25] {
            model.gradient = gradient;
            applied.push(model.update(&mut wrapper, &mut optim, None).unwrap().applied);
            if applied.len() == 2 {
                // The mean of the two gradients, not their sum.
                assert_eq!(*weights(&model), all(1.0 - 0.5 * 0.5));
            }
        }
        let (yes, no) = (Some(Applied::Applied), Some(Applied::SkippedNonFinite));
        assert_eq!(applied, [None, yes, None, no, None, yes]);
        assert_eq!(*weights(&model), all(0.75 - 0.5 * 0.25));
        assert_eq!(optim.loss_scale(), 512.0);
    }

    #[test]
    fn fixed_scale_is_resumed() {
        let (_, _, optim) = parts(1, fixed(8.0));
        let (_, _, mut other) = parts(1, fixed(4.0));
        let mut saved = optim.state_dict().unwrap();
        other.load_state_dict(&saved).unwrap();
        assert_eq!(other.loss_scale(), 8.0);
        // Checkpoints of an older version have none.
        saved.loss_scaler = None;
        other.load_state_dict(&saved).unwrap();
        assert_eq!(other.loss_scale(), 8.0);
        let (_, _, mut other) = parts(1, dynamic());
        assert!(other.load_state_dict(&optim.state_dict().unwrap()).is_err());
    }

    #[test]
    fn fixed_scale_is_constant_and_no_scale_is_one() {
        for (scaler, scale) in [(fixed(8.0), 8.0), (LossScaler::disabled(), 1.0)] {
            let (mut model, mut wrapper, mut optim) = parts(1, scaler);
            for (gradient, applied) in
                [(f32::INFINITY, Applied::SkippedNonFinite), (0.5, Applied::Applied)]
            {
                model.gradient = gradient;
                let update = model.update(&mut wrapper, &mut optim, None).unwrap();
                assert_eq!(update.applied, Some(applied), "{scale}");
                assert_eq!(optim.loss_scale(), scale);
            }
            assert_eq!(*weights(&model), all(0.75));
            assert_eq!(optim.log_scalars().len(), usize::from(scale > 1.0));
        }
    }

    #[test]
    fn optimizer_receives_the_shapes() {
        // AdamP refuses a number of rows that the weight does not have.
        for (shape, fits) in [([2, 3], true), ([4, 1], false)] {
            let mut model = FakeModel::new(&[("w", Values::F32(vec![1.0; 6]))], &[]);
            let options = ReducerOptions::default();
            let mut wrapper =
                DistributedDataParallel::new(group(), model.params(), options).unwrap();
            let mut state = EngineState::default();
            let mut cx = StepContext::new(wrapper.sink(), &mut state);
            wrapper.prepare(Some(&mut model), &mut cx).unwrap();
            model.train_step(&mut cx).unwrap();
            wrapper.finish().unwrap();
            model.specs[0][0].shape = shape.into();
            let adamp = AdamP::with_one_group(AdamPHyper::default(), 1).unwrap();
            let mut optim = OptimWrapper::new(Box::new(adamp), 1);
            assert_eq!(optim.step(&mut model, &wrapper).is_ok(), fits);
        }
    }

    #[test]
    fn loss_scaler_in_a_checkpoint_is_refused_without_amp() {
        let (_, _, mixed) = parts(1, dynamic());
        let sgd = Sgd::with_one_group(SgdHyper { lr: 0.5, ..SgdHyper::default() }, 1).unwrap();
        let mut plain = OptimWrapper::new(Box::new(sgd), 1);
        let error = plain.load_state_dict(&mixed.state_dict().unwrap()).unwrap_err().to_string();
        assert!(
            error.contains("was saved with AmpOptimWrapper, but this run uses OptimWrapper"),
            "{error}"
        );
        assert!(plain.state_dict().unwrap().loss_scaler.is_none());
    }

    /// Runs a batch; returns the result of its step.
    fn update(
        model: &mut FakeModel,
        wrapper: &mut DistributedDataParallel,
        optim: &mut OptimWrapper,
    ) -> Result<Option<Applied>> {
        model.update(wrapper, optim, None).map(|update| update.applied)
    }

    #[test]
    fn too_many_skipped_steps_in_a_row_are_an_error_with_parameter_and_scale() {
        for (scaler, scale) in [(fixed(8.0), 8.0), (LossScaler::disabled(), 1.0)] {
            let (mut model, mut wrapper, optim) = parts(1, scaler);
            let mut optim = optim.with_max_consecutive_skips(3);
            for gradient in [f32::INFINITY, f32::NAN, 0.5, f32::NAN, f32::NAN] {
                model.gradient = gradient;
                update(&mut model, &mut wrapper, &mut optim).unwrap();
            }
            let error = update(&mut model, &mut wrapper, &mut optim).unwrap_err();
            let Error::NonFinite { parameter, skips, scale: last, floor } = error else {
                panic!("{error}")
            };
            assert_eq!((parameter.as_deref(), skips, last), (Some("w"), 3, scale));
            assert!(floor.is_none());
            assert_eq!(*weights(&model), all(0.75));
        }
        // A resumed run goes on counting.
        let (mut model, mut wrapper, mut optim) = parts(1, fixed(8.0));
        model.gradient = f32::NAN;
        for _ in 0..99 {
            update(&mut model, &mut wrapper, &mut optim).unwrap();
            let saved = optim.state_dict().unwrap();
            optim = parts(1, fixed(8.0)).2;
            optim.load_state_dict(&saved).unwrap();
        }
        update(&mut model, &mut wrapper, &mut optim).unwrap_err();
        // By default after 100 steps, each of two batches.
        let (mut model, mut wrapper, mut optim) = parts(2, LossScaler::disabled());
        model.gradient = f32::NAN;
        for _ in 0..199 {
            update(&mut model, &mut wrapper, &mut optim).unwrap();
        }
        update(&mut model, &mut wrapper, &mut optim).unwrap_err();
    }

    #[test]
    fn failed_batch_makes_the_wrapper_spent() {
        for counts in [1, 2] {
            let names = [("v", Values::F32(vec![1.0])), ("w", Values::F32(vec![1.0]))];
            let mut model = FakeModel::new(&names, &[]);
            let options = ReducerOptions::default();
            let mut wrapper =
                DistributedDataParallel::new(group(), model.params(), options).unwrap();
            let sgd = Sgd::with_one_group(SgdHyper { lr: 0.5, ..SgdHyper::default() }, 2).unwrap();
            let mut optim = OptimWrapper::new(Box::new(sgd), counts);
            model.fails_at = 0;
            let error = update(&mut model, &mut wrapper, &mut optim).unwrap_err().to_string();
            assert_eq!(error, "backward failed");
            for _ in 0..4 {
                let error = update(&mut model, &mut wrapper, &mut optim).unwrap_err();
                assert!(matches!(error, Error::Spent { .. }), "{error}");
                assert!(error.to_string().ends_with("the error was: backward failed"), "{error}");
            }
            assert!(matches!(optim.step(&mut model, &wrapper).unwrap_err(), Error::Spent { .. }));
            assert_eq!(model.params[0], Values::F32(vec![1.0]));
        }
    }

    #[test]
    fn step_without_any_gradient_is_an_error() {
        let mut model = FakeModel::new(&[], &[]);
        let spec = FakeModel::new(&[("w", Values::F32(vec![1.0]))], &[]);
        let mut options = ReducerOptions::default();
        options.find_unused_parameters = true;
        let mut wrapper = DistributedDataParallel::new(group(), spec.params(), options).unwrap();
        let sgd = Sgd::with_one_group(SgdHyper { lr: 0.5, ..SgdHyper::default() }, 1).unwrap();
        let mut optim = OptimWrapper::new(Box::new(sgd), 1);
        let error = update(&mut model, &mut wrapper, &mut optim).unwrap_err().to_string();
        assert!(error.starts_with("no parameter has a gradient"), "{error}");
    }

    /// Runs batches of `(count, gradient)` on each rank; returns the weight, which begins at 1.
    fn weighted(ranks: &[Vec<(f32, f32)>], half: bool) -> Vec<f32> {
        let groups = ProcessGroup::threads(ranks.len(), Duration::from_secs(30)).unwrap();
        let rank = |group, batches: &[(f32, f32)]| {
            let ones = match half {
                true => Values::F16(vec![f16::ONE]),
                false => Values::F32(vec![1.0]),
            };
            let mut model = FakeModel::new(&[("w", ones)], &[]);
            let options = ReducerOptions::default();
            let mut wrapper = DistributedDataParallel::new(group, model.params(), options).unwrap();
            let sgd = Sgd::with_one_group(SgdHyper { lr: 0.5, ..SgdHyper::default() }, 1).unwrap();
            let mut optim = OptimWrapper::new(Box::new(sgd), 2);
            if half {
                optim = optim.with_mixed_precision(dynamic());
            }
            for (count, gradient) in batches {
                model.gradient = *gradient;
                model.update(&mut wrapper, &mut optim, Some((*count).into())).unwrap();
            }
            match &model.params[0] {
                Values::F16(values) => values[0].to_f32(),
                Values::F32(values) => values[0],
            }
        };
        std::thread::scope(|scope| {
            let ranks = groups.into_iter().zip(ranks);
            let ranks: Vec<_> =
                ranks.map(|(group, batches)| scope.spawn(|| rank(group, batches))).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }

    #[test]
    fn step_is_the_mean_over_all_tokens_of_batches_and_ranks() {
        for half in [false, true] {
            // (1*1 + 3*2 + 4*3 + 8*4) / 16 = 51/16.
            let ranks = [vec![(1.0, 1.0), (3.0, 2.0)], vec![(4.0, 3.0), (8.0, 4.0)]];
            let wanted = 1.0 - 0.5 * 51.0 / 16.0;
            weighted(&ranks, half).iter().for_each(|w| assert!((w - wanted).abs() < 1e-3, "{w}"));
            // A batch without tokens counts nothing, on one rank or first of all.
            let ranks = [vec![(0.0, 9.0), (3.0, 1.0)], vec![(0.0, f32::NAN), (1.0, 2.0)]];
            let wanted = 1.0 - 0.5 * 5.0 / 4.0;
            weighted(&ranks, half).iter().for_each(|w| assert!((w - wanted).abs() < 1e-3, "{w}"));
            assert_eq!(weighted(&[vec![(0.0, 1.0), (0.0, 1.0)]], half), [1.0]);
        }
    }

    #[test]
    fn counts_of_some_batches_only_are_an_error() {
        for (counts, says) in [(2, "some batches of a step only"), (1, "for some batches only")] {
            let (mut model, mut wrapper, mut optim) = parts(counts, LossScaler::disabled());
            model.update(&mut wrapper, &mut optim, Some(2.0)).unwrap();
            let error = update(&mut model, &mut wrapper, &mut optim).unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
        }
        for count in [-1.0, f64::NAN, f64::INFINITY] {
            let (mut model, mut wrapper, mut optim) = parts(1, LossScaler::disabled());
            let error = model.update(&mut wrapper, &mut optim, Some(count)).unwrap_err();
            assert!(error.to_string().contains("invalid `loss_count`"), "{error}");
        }
    }
}
