//! `OptimWrapper`: an optimizer with gradient accumulation, clipping and optional mixed precision.
//!
//! There are two kinds of mixed precision. Under autocast parameters, gradients and the optimizer
//! are in `f32`, and the engine runs each operator in the type of its list, as in PyTorch and
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

use std::sync::Arc;

use ::amp::LossScaler;
use fused_optim::{Applied, Clip, DType, FoundInf, Optimizer, ParamMut, StepCtl};
use parking_lot::Mutex;
use serde_json::Value;
use tracing::debug_span;

use super::buffers::BuffersBefore;
use super::counts::{LossCounts, PendingCounts, ZeroSink};
use super::overflow::OverflowCheck;
use super::{Accumulation, Member, OptimWrapperState, OptimizerDict, Update};
use crate::data::Batch;
use crate::engine::{Engine, EngineState, OptimizerStep, StepContext, TensorSpec, to_f32};
use crate::model::{ModelWrapper, with_host_grads};
use crate::placement::Overflows;
use crate::{Error, Result};

/// Drives an optimizer: accumulation, loss scale, clipping. It is `OptimWrapper` in configurations,
/// or with [mixed precision](Self::with_mixed_precision) `AmpOptimWrapper`.
#[derive(Debug)]
#[doc(alias = "AmpOptimWrapper")]
pub struct OptimWrapper {
    optimizer: Box<dyn Optimizer>,
    accumulation: Accumulation,
    scaler: LossScaler,
    /// Whether a step with non-finite gradients is skipped.
    is_mixed: bool,
    pub(super) clip: Option<Clip>,
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
pub(super) const MAX_CONSECUTIVE_SKIPS: usize = 100;

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
    pub(super) fn of_members(members: Vec<Member>, accumulative_counts: usize) -> Self {
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

    /// Runs the engine under autocast, with `dtype` as lower precision; with `None`, the default,
    /// in the parameters' own type.
    #[must_use]
    #[doc(alias = "optim_context")]
    pub fn with_autocast(mut self, dtype: Option<DType>) -> Self {
        self.autocast = dtype;
        self
    }

    /// Adds a source that detects overflows on devices whose values do not show them
    /// ([`Placement::overflows`](crate::placement::Placement::overflows)). Each rank's gradients
    /// are checked before they are averaged, and the source is called at each step.
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
    pub(crate) fn hyper_params(&self) -> Result<Value> {
        let groups = self.optimizer.state_dict()?.param_groups;
        serde_json::from_str(&groups).map_err(|e| Error::Config(format!("param_groups: {e}")))
    }

    /// Returns the options that must be equal on all ranks, by name.
    pub(crate) fn options(&self, hyper_params: &Value) -> Vec<(String, String)> {
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
            return Err(Error::Checkpoint(
                "the checkpoint contains a loss scaler: it was saved with AmpOptimWrapper, but this run uses OptimWrapper"
                    .into(),
            ));
        }
        let mut restored = self.scaler.clone();
        restored.load_state_dict(state.loss_scaler.as_ref()).map_err(|why| {
            let hint = match state.loss_scaler {
                None => ": this run scales its loss, but the run that saved the checkpoint did not (OptimWrapper, or \
                         AmpOptimWrapper without a loss scale): take the model alone with `load_from`",
                Some(_) => "",
            };
            Error::Checkpoint(format!("`loss_scaler`: {why}{hint}"))
        })?;
        self.optimizer.load_state_dict(&state.optimizer)?;
        (self.scaler, self.skipped) = (restored, state.skipped);
        Ok(())
    }

    /// Trains on one batch: forward, backward, and the optimizer step if it is due. `state` is the
    /// engine's.
    ///
    /// If the engine knows the [count](Engine::loss_count) that a loss is the mean of, a step is
    /// the mean over all of its tokens, over batches and ranks; otherwise each batch has the same
    /// weight.
    ///
    /// # Errors
    ///
    /// Those of the engine, of communication, and of the optimizer; a loss scale that has reached
    /// its minimum; [`Error::Diverged`] after too many skipped steps in a row; [`Error::Engine`] if
    /// no parameter has a gradient. After an error each later call is [`Error::Spent`], because
    /// gradients of the failed batch may be left.
    pub fn update_params(
        &mut self,
        engine: &mut dyn Engine,
        model: &mut dyn ModelWrapper,
        batch: &Batch,
        state: &mut EngineState,
    ) -> Result<Update> {
        self.unless_spent(|optim| optim.update(engine, model, batch, state))
    }

    fn update(
        &mut self,
        engine: &mut dyn Engine,
        model: &mut dyn ModelWrapper,
        batch: &Batch,
        state: &mut EngineState,
    ) -> Result<Update> {
        self.last = None;
        let scale = self.loss_scale();
        let steps_there = self.optimizer.as_device().is_some();
        let role = self.accumulation.next_batch();
        let count = engine.loss_count(batch)?;
        let share = self.counts.add(count, role.divisor, model)?;
        let ctl = role.steps.then(|| self.step_ctl(model)).transpose()?;
        let mut cx = StepContext {
            loss_scale: (f64::from(scale / role.divisor as f32) * share) as f32,
            autocast: self.autocast,
            sync: role.steps,
            ..StepContext::new(model.sink(), state)
        };
        // With an overflow check the result is known only after backward.
        if let Some(ctl) = ctl.filter(|_| self.overflow.is_none()) {
            cx.step = Some(OptimizerStep::new(&mut *self.optimizer, ctl));
        }
        model.prepare(Some(&mut *engine), &mut cx)?;
        if count == Some(0.0) {
            cx.sink = Arc::new(Mutex::new(ZeroSink(cx.sink)));
        }
        if let Some(overflow) = &mut self.overflow {
            cx.sink = overflow.before_forward(cx.sink)?;
        }
        if self.is_mixed {
            self.buffers.keep(engine, steps_there)?;
        }
        let span = debug_span!(target: "runner", "train_step");
        let losses = span.in_scope(|| engine.train_step(batch, &mut cx))?;
        let (note, warning) = (cx.note, cx.warning);
        let mut applied = cx.step.and_then(|step| step.applied);
        model.finish()?;
        if let Some(ctl) = ctl {
            match applied {
                Some(applied) => self.stepped(applied, &ctl, engine, model)?,
                None => applied = Some(self.step_by(ctl, engine, model)?),
            }
            model.zero_grad();
            if self.loss_scale() != scale {
                model.rescale(self.loss_scale() / scale);
            }
        }
        let spoils_buffers = match applied {
            Some(applied) => applied == Applied::SkippedNonFinite,
            None => self.is_mixed && self.buffers.has_non_finite(engine)?,
        };
        if spoils_buffers {
            self.buffers.restore(engine)?;
        }
        Ok(Update { losses, applied, note, warning })
    }

    /// Only steps the optimizer, with the present gradients: a skipped step does not restore
    /// buffers. Every rank calls it.
    ///
    /// # Errors
    ///
    /// As [`update_params`](Self::update_params).
    pub fn step(&mut self, engine: &mut dyn Engine, model: &dyn ModelWrapper) -> Result<Applied> {
        self.unless_spent(|optim| {
            let ctl = optim.step_ctl(model)?;
            optim.step_by(ctl, engine, model)
        })
    }

    fn step_by(
        &mut self,
        mut ctl: StepCtl,
        engine: &mut dyn Engine,
        model: &dyn ModelWrapper,
    ) -> Result<Applied> {
        let _span = debug_span!(target: "runner", "optimizer").entered();
        if let Some(overflow) = &mut self.overflow
            && overflow.found()?
        {
            ctl.found_inf = FoundInf::Known(true);
        }
        let applied = run(OptimizerStep::new(&mut *self.optimizer, ctl), engine, model)?;
        self.stepped(applied, &ctl, engine, model)?;
        Ok(applied)
    }

    /// Returns the options of the next step; every rank calls it.
    fn step_ctl(&self, model: &dyn ModelWrapper) -> Result<StepCtl> {
        let found_inf = if self.is_mixed { FoundInf::Check } else { FoundInf::Known(false) };
        let factor = self.counts.step_factor(model)?;
        let grad_scale = (f64::from(self.scaler.inv_scale()) * factor) as f32;
        Ok(StepCtl { grad_scale, found_inf, clip: self.clip })
    }

    /// Records the result of a step.
    fn stepped(
        &mut self,
        applied: Applied,
        ctl: &StepCtl,
        engine: &dyn Engine,
        model: &dyn ModelWrapper,
    ) -> Result<()> {
        self.last = Some(applied);
        self.counts.clear();
        let is_skipped = applied == Applied::SkippedNonFinite;
        self.skipped = if is_skipped { self.skipped + 1 } else { 0 };
        if self.skipped >= self.max_skipped {
            let first = first_non_finite(ctl.grad_scale, engine, model)?;
            return Err(self.always_skipped(first));
        }
        self.scaler.update(is_skipped)?;
        Ok(())
    }

    /// Error for too many skipped steps in a row; `first` is a parameter whose gradient is not
    /// finite.
    fn always_skipped(&self, first: Option<String>) -> Error {
        let (count, scale) = (self.skipped, self.loss_scale());
        let first = first.map_or_else(
            || "the device reports an overflow".to_owned(),
            |name| format!("the first is that of `{name}`"),
        );
        Error::Diverged(format!(
            "{count} optimizer steps in a row were skipped, because gradients are not finite ({first}; loss scale \
             {scale}): the weights no longer change; lower the learning rate, clip gradients, or look for the data \
             that cause it; `max_consecutive_skips` of AmpOptimWrapper sets this number"
        ))
    }

    /// Runs `call` unless an earlier call has failed.
    fn unless_spent<T>(&mut self, call: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        if let Some(why) = &self.failed {
            return Err(Error::Spent(format!(
                "this optimizer wrapper is spent after an error, gradients of the failed batch may be left; build \
                 the run anew, which resumes from its checkpoint; the error was: {why}"
            )));
        }
        call(self).inspect_err(|error| self.failed = Some(error.to_string()))
    }

    /// Returns the counts of batches that await a step, for a checkpoint; every rank calls it.
    pub(crate) fn pending_counts(&self, model: &dyn ModelWrapper) -> Result<Option<PendingCounts>> {
        self.counts.save(model)
    }

    /// Restores the counts of a checkpoint, in which gradients await a step if `waits`.
    pub(crate) fn load_pending_counts(&mut self, saved: Option<PendingCounts>, waits: bool) {
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

/// Returns the name of the first parameter whose gradient, times `scale`, is not finite.
fn first_non_finite(
    scale: f32,
    engine: &dyn Engine,
    model: &dyn ModelWrapper,
) -> Result<Option<String>> {
    let mut first = None;
    with_host_grads(model, &mut |grads| {
        let is_bad = |grad: &Option<_>| {
            let values = grad.map(to_f32);
            values.is_some_and(|values| values.iter().any(|x| !(x * scale).is_finite()))
        };
        first = grads.iter().position(is_bad);
        Ok(())
    })?;
    Ok(first.map(|index| engine.params()[index].name.clone()))
}

/// Error for a step without any gradient.
fn without_gradients() -> Error {
    Error::Engine(
        "no parameter has a gradient: the loss does not depend on the model (is it detached?)"
            .to_owned(),
    )
}

/// Runs a step with parameters and gradients on the device or on the host.
fn run(
    mut step: OptimizerStep<'_>,
    engine: &mut dyn Engine,
    model: &dyn ModelWrapper,
) -> Result<Applied> {
    let mut applied = Applied::SkippedNonFinite;
    if step.optimizer.as_device().is_some()
        && let Some(device) = engine.device()
    {
        model.with_grads(&mut |grads| {
            if !grads.is_empty() && grads.iter().all(Option::is_none) {
                return Err(without_gradients());
            }
            applied = device.optimizer_step(&mut step, grads)?;
            Ok(())
        })?;
        return Ok(applied);
    }
    let rows: Vec<usize> = engine.params().iter().map(TensorSpec::rows).collect();
    engine.with_params(&mut |weights| {
        with_host_grads(model, &mut |grads| {
            if !grads.is_empty() && grads.iter().all(Option::is_none) {
                return Err(without_gradients());
            }
            let mut params: Vec<_> = weights
                .iter_mut()
                .zip(grads)
                .zip(&rows)
                .map(|((weight, grad), &rows)| ParamMut {
                    rows,
                    ..ParamMut::new(weight.reborrow(), *grad)
                })
                .collect();
            applied = step.optimizer.step(&mut params, &step.ctl)?;
            Ok(())
        })
    })?;
    Ok(applied)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use ::amp::LossScalerOptions;
    use collective::ProcessGroup;
    use collective::reducer::ReducerOptions;
    use fused_optim::{AdamP, AdamPHyper, Sgd, SgdHyper};
    use half::f16;

    use super::*;
    use crate::data::{Array, ArrayData, Batch};
    use crate::model::DistributedDataParallel;
    use crate::testing::{FakeEngine, Values, group};

    fn parts(
        counts: usize,
        scaler: LossScaler,
    ) -> (FakeEngine, DistributedDataParallel, OptimWrapper) {
        let engine = FakeEngine::new(&[("w", Values::F16(vec![f16::ONE; 2]))], &[]);
        let options = ReducerOptions::default();
        let model = DistributedDataParallel::new(group(), engine.params(), options).unwrap();
        let sgd = Sgd::with_one_group(SgdHyper { lr: 0.5, ..SgdHyper::default() }, 1).unwrap();
        let optim = OptimWrapper::new(Box::new(sgd), counts);
        (engine, model, optim.with_mixed_precision(scaler))
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

    fn weights(engine: &FakeEngine) -> &Values {
        &engine.params[0]
    }

    fn all(value: f32) -> Values {
        Values::F16(vec![f16::from_f32(value); 2])
    }

    #[test]
    fn gradients_are_unscaled_and_overflows_skipped() {
        let (mut engine, mut model, mut optim) = parts(1, dynamic());
        let mut step = |engine: &mut FakeEngine, gradient: f32| {
            engine.gradient = gradient;
            let update = optim
                .update_params(engine, &mut model, &Batch::new(), &mut EngineState::default())
                .unwrap();
            (update.applied.unwrap(), optim.loss_scale())
        };
        assert_eq!(step(&mut engine, 0.25), (Applied::Applied, 1024.0));
        assert_eq!(*weights(&engine), all(1.0 - 0.5 * 0.25));
        // 100 * 1024 exceeds the range of f16.
        assert_eq!(step(&mut engine, 100.0), (Applied::SkippedNonFinite, 512.0));
        assert_eq!(*weights(&engine), all(0.875));
        // The next steps start with zeroed gradients, and two successful ones double the scale.
        assert_eq!(step(&mut engine, 0.25), (Applied::Applied, 512.0));
        assert_eq!(*weights(&engine), all(0.75));
        assert_eq!(step(&mut engine, 0.25), (Applied::Applied, 1024.0));
    }

    #[test]
    fn overflow_in_any_batch_skips_the_accumulated_step() {
        let (mut engine, mut model, mut optim) = parts(2, dynamic());
        let mut applied = Vec::new();
        for gradient in [0.25, 0.75, 1000.0, 0.25, 0.25, 0.25] {
            engine.gradient = gradient;
            applied.push(
                optim
                    .update_params(
                        &mut engine,
                        &mut model,
                        &Batch::new(),
                        &mut EngineState::default(),
                    )
                    .unwrap()
                    .applied,
            );
            if applied.len() == 2 {
                // The mean of the two gradients, not their sum.
                assert_eq!(*weights(&engine), all(1.0 - 0.5 * 0.5));
            }
        }
        let (yes, no) = (Some(Applied::Applied), Some(Applied::SkippedNonFinite));
        assert_eq!(applied, [None, yes, None, no, None, yes]);
        assert_eq!(*weights(&engine), all(0.75 - 0.5 * 0.25));
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
            let (mut engine, mut model, mut optim) = parts(1, scaler);
            for (gradient, applied) in
                [(f32::INFINITY, Applied::SkippedNonFinite), (0.5, Applied::Applied)]
            {
                engine.gradient = gradient;
                let update = optim
                    .update_params(
                        &mut engine,
                        &mut model,
                        &Batch::new(),
                        &mut EngineState::default(),
                    )
                    .unwrap();
                assert_eq!(update.applied, Some(applied), "{scale}");
                assert_eq!(optim.loss_scale(), scale);
            }
            assert_eq!(*weights(&engine), all(0.75));
            assert_eq!(optim.log_scalars().len(), usize::from(scale > 1.0));
        }
    }

    #[test]
    fn optimizer_receives_the_shapes() {
        // AdamP refuses a number of rows that the weight does not have.
        for (shape, fits) in [([2, 3], true), ([4, 1], false)] {
            let mut engine = FakeEngine::new(&[("w", Values::F32(vec![1.0; 6]))], &[]);
            let options = ReducerOptions::default();
            let mut model =
                DistributedDataParallel::new(group(), engine.params(), options).unwrap();
            let mut state = EngineState::default();
            let mut cx = StepContext::new(model.sink(), &mut state);
            model.prepare(Some(&mut engine), &mut cx).unwrap();
            engine.train_step(&Batch::new(), &mut cx).unwrap();
            model.finish().unwrap();
            engine.specs[0][0].shape = shape.into();
            let adamp = AdamP::with_one_group(AdamPHyper::default(), 1).unwrap();
            let mut optim = OptimWrapper::new(Box::new(adamp), 1);
            assert_eq!(optim.step(&mut engine, &model).is_ok(), fits);
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
        engine: &mut FakeEngine,
        model: &mut DistributedDataParallel,
        optim: &mut OptimWrapper,
    ) -> Result<Option<Applied>> {
        let state = &mut EngineState::default();
        optim.update_params(engine, model, &Batch::new(), state).map(|update| update.applied)
    }

    #[test]
    fn too_many_skipped_steps_in_a_row_are_an_error_with_parameter_and_scale() {
        for (scaler, scale) in [(fixed(8.0), "8"), (LossScaler::disabled(), "1")] {
            let (mut engine, mut model, optim) = parts(1, scaler);
            let mut optim = optim.with_max_consecutive_skips(3);
            for gradient in [f32::INFINITY, f32::NAN, 0.5, f32::NAN, f32::NAN] {
                engine.gradient = gradient;
                update(&mut engine, &mut model, &mut optim).unwrap();
            }
            let error = update(&mut engine, &mut model, &mut optim).unwrap_err();
            assert!(matches!(error, Error::Diverged(_)));
            let text = error.to_string();
            let says = format!(
                "3 optimizer steps in a row were skipped, because gradients are not finite (the first is that of \
                 `w`; loss scale {scale})"
            );
            assert!(text.starts_with(&says), "{text}");
            assert_eq!(*weights(&engine), all(0.75));
        }
        // A resumed run goes on counting.
        let (mut engine, mut model, mut optim) = parts(1, fixed(8.0));
        engine.gradient = f32::NAN;
        for _ in 0..99 {
            update(&mut engine, &mut model, &mut optim).unwrap();
            let saved = optim.state_dict().unwrap();
            optim = parts(1, fixed(8.0)).2;
            optim.load_state_dict(&saved).unwrap();
        }
        update(&mut engine, &mut model, &mut optim).unwrap_err();
        // By default after 100 steps, each of two batches.
        let (mut engine, mut model, mut optim) = parts(2, LossScaler::disabled());
        engine.gradient = f32::NAN;
        for _ in 0..199 {
            update(&mut engine, &mut model, &mut optim).unwrap();
        }
        update(&mut engine, &mut model, &mut optim).unwrap_err();
    }

    #[test]
    fn failed_batch_makes_the_wrapper_spent() {
        for counts in [1, 2] {
            let names = [("v", Values::F32(vec![1.0])), ("w", Values::F32(vec![1.0]))];
            let mut engine = FakeEngine::new(&names, &[]);
            let options = ReducerOptions::default();
            let mut model =
                DistributedDataParallel::new(group(), engine.params(), options).unwrap();
            let sgd = Sgd::with_one_group(SgdHyper { lr: 0.5, ..SgdHyper::default() }, 2).unwrap();
            let mut optim = OptimWrapper::new(Box::new(sgd), counts);
            engine.fails_at = 0;
            let error = update(&mut engine, &mut model, &mut optim).unwrap_err().to_string();
            assert_eq!(error, "backward failed");
            for _ in 0..4 {
                let error = update(&mut engine, &mut model, &mut optim).unwrap_err();
                assert!(matches!(error, Error::Spent(_)), "{error}");
                assert!(error.to_string().ends_with("the error was: backward failed"), "{error}");
            }
            assert!(matches!(optim.step(&mut engine, &model).unwrap_err(), Error::Spent(_)));
            assert_eq!(engine.params[0], Values::F32(vec![1.0]));
        }
    }

    #[test]
    fn step_without_any_gradient_is_an_error() {
        let mut engine = FakeEngine::new(&[], &[]);
        let spec = FakeEngine::new(&[("w", Values::F32(vec![1.0]))], &[]);
        let mut options = ReducerOptions::default();
        options.find_unused_parameters = true;
        let mut model = DistributedDataParallel::new(group(), spec.params(), options).unwrap();
        let sgd = Sgd::with_one_group(SgdHyper { lr: 0.5, ..SgdHyper::default() }, 1).unwrap();
        let mut optim = OptimWrapper::new(Box::new(sgd), 1);
        let error = update(&mut engine, &mut model, &mut optim).unwrap_err().to_string();
        assert!(error.starts_with("no parameter has a gradient"), "{error}");
    }

    /// Returns the number of tokens in a batch.
    fn tokens(batch: &Batch, _: usize) -> Option<f64> {
        let ArrayData::F32(tokens) = batch.get("tokens").ok()?.data() else { return None };
        Some(tokens[0].into())
    }

    /// Creates a batch of one sample with this number of tokens.
    fn batch(tokens: f32) -> Batch {
        Batch::new().with("tokens", Array::new([1], ArrayData::F32(vec![tokens])).unwrap())
    }

    /// Runs batches of `(count, gradient)` on each rank; returns the weight, which begins at 1.
    fn weighted(ranks: &[Vec<(f32, f32)>], half: bool) -> Vec<f32> {
        let groups = ProcessGroup::threads(ranks.len(), Duration::from_secs(30)).unwrap();
        let rank = |group, batches: &[(f32, f32)]| {
            let ones = match half {
                true => Values::F16(vec![f16::ONE]),
                false => Values::F32(vec![1.0]),
            };
            let mut engine = FakeEngine::new(&[("w", ones)], &[]);
            engine.count = tokens;
            let options = ReducerOptions::default();
            let mut model = DistributedDataParallel::new(group, engine.params(), options).unwrap();
            let sgd = Sgd::with_one_group(SgdHyper { lr: 0.5, ..SgdHyper::default() }, 1).unwrap();
            let mut optim = OptimWrapper::new(Box::new(sgd), 2);
            if half {
                optim = optim.with_mixed_precision(dynamic());
            }
            let mut state = EngineState::default();
            for (count, gradient) in batches {
                engine.gradient = *gradient;
                optim.update_params(&mut engine, &mut model, &batch(*count), &mut state).unwrap();
            }
            match &engine.params[0] {
                Values::F16(values) => values[0].to_f32(),
                Values::F32(values) => values[0],
                Values::Bf16(_) => panic!("not bf16"),
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
        let (mut engine, mut model, mut optim) = parts(2, LossScaler::disabled());
        engine.count = |_, step| (step == 0).then_some(2.0);
        update(&mut engine, &mut model, &mut optim).unwrap();
        let error = update(&mut engine, &mut model, &mut optim).unwrap_err().to_string();
        assert!(error.contains("some batches of a step only"), "{error}");
        let (mut engine, mut model, mut optim) = parts(1, LossScaler::disabled());
        engine.count = |_, step| (step == 0).then_some(2.0);
        update(&mut engine, &mut model, &mut optim).unwrap();
        let error = update(&mut engine, &mut model, &mut optim).unwrap_err().to_string();
        assert!(error.contains("for some batches only"), "{error}");
        let invalid: [fn(&Batch, usize) -> Option<f64>; 3] =
            [|_, _| Some(-1.0), |_, _| Some(f64::NAN), |_, _| Some(f64::INFINITY)];
        for count in invalid {
            let (mut engine, mut model, mut optim) = parts(1, LossScaler::disabled());
            engine.count = count;
            let error = update(&mut engine, &mut model, &mut optim).unwrap_err().to_string();
            assert!(error.contains("invalid `loss_count`"), "{error}");
        }
    }
}
