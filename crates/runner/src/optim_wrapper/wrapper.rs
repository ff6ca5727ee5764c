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

use ::amp::LossScaler;
use fused_optim::{Applied, Clip, DType, FoundInf, Optimizer, ParamMut, StepCtl};
use serde_json::Value;
use tracing::debug_span;

use super::buffers::BuffersBefore;
use super::overflow::OverflowCheck;
use super::{Accumulation, Member, OptimWrapperState, OptimizerDict, Update};
use crate::data::Batch;
use crate::engine::{Engine, EngineState, OptimizerStep, StepContext, TensorSpec};
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
    /// Result of the last batch's step, if it ended with one.
    last: Option<Applied>,
}

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
            last: None,
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
        })
    }

    /// Returns hyper-parameters by group, in the format of the optimizer's state dict.
    pub(crate) fn hyper_params(&self) -> Result<Value> {
        let groups = self.optimizer.state_dict()?.param_groups;
        serde_json::from_str(&groups).map_err(|e| Error::Config(format!("param_groups: {e}")))
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
        self.scaler = restored;
        Ok(())
    }

    /// Trains on one batch: forward, backward, and the optimizer step if it is due. `state` is the
    /// engine's.
    ///
    /// # Errors
    ///
    /// Those of the engine, of communication, and of the optimizer; also a loss scale that has
    /// reached its minimum.
    pub fn update_params(
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
        let ctl = self.step_ctl();
        let mut cx = StepContext {
            loss_scale: self.loss_scale() / role.divisor as f32,
            autocast: self.autocast,
            sync: role.steps,
            ..StepContext::new(model.sink(), state)
        };
        // With an overflow check the result is known only after backward.
        if role.steps && self.overflow.is_none() {
            cx.step = Some(OptimizerStep::new(&mut *self.optimizer, ctl));
        }
        model.prepare(Some(&mut *engine), &mut cx)?;
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
        if role.steps {
            match applied {
                Some(applied) => self.stepped(applied)?,
                None => applied = Some(self.step(engine, model)?),
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
    /// buffers.
    ///
    /// # Errors
    ///
    /// As [`update_params`](Self::update_params).
    pub fn step(&mut self, engine: &mut dyn Engine, model: &dyn ModelWrapper) -> Result<Applied> {
        let _span = debug_span!(target: "runner", "optimizer").entered();
        let mut ctl = self.step_ctl();
        if let Some(overflow) = &mut self.overflow
            && overflow.found()?
        {
            ctl.found_inf = FoundInf::Known(true);
        }
        let applied = run(OptimizerStep::new(&mut *self.optimizer, ctl), engine, model)?;
        self.stepped(applied)?;
        Ok(applied)
    }

    /// Returns the options of the next step.
    fn step_ctl(&self) -> StepCtl {
        let found_inf = if self.is_mixed { FoundInf::Check } else { FoundInf::Known(false) };
        StepCtl { grad_scale: self.scaler.inv_scale(), found_inf, clip: self.clip }
    }

    /// Records the result of a step.
    fn stepped(&mut self, applied: Applied) -> Result<()> {
        self.last = Some(applied);
        self.scaler.update(applied == Applied::SkippedNonFinite)?;
        Ok(())
    }
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
            applied = device.optimizer_step(&mut step, grads)?;
            Ok(())
        })?;
        return Ok(applied);
    }
    let rows: Vec<usize> = engine.params().iter().map(TensorSpec::rows).collect();
    engine.with_params(&mut |weights| {
        with_host_grads(model, &mut |grads| {
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
    use ::amp::LossScalerOptions;
    use collective::reducer::ReducerOptions;
    use fused_optim::{AdamP, AdamPHyper, Sgd, SgdHyper};
    use half::f16;

    use super::*;
    use crate::data::Batch;
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
}
