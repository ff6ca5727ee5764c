//! `AmpOptimWrapper`: mixed precision with a dynamic loss scale, in one of two ways.
//!
//! Under autocast the parameters, their gradients and the optimizer are of `f32`, and the engine runs
//! each operator in what suits it: PyTorch's and MMEngine's way. With half parameters the model computes
//! in them throughout, and the optimizer keeps their `f32` masters: it halves the model's memory and
//! what gradients cost to send, and needs nothing of the model's operators.
//!
//! Gradients arrive times the loss scale `S`, and already averaged over the ranks: an inf on one
//! rank is by then an inf on all. The optimizer looks at every gradient first and skips the whole
//! step if one is not finite; every rank sees the same gradients, so all ranks skip, and halve
//! their scale, in lockstep. Otherwise it multiplies by `1 / S` in the same sweep that updates.
//! Where a device turns infinities into large numbers, a `Watch` sees them before it does.

use ::amp::{LossScaler, LossScalerOptions};
#[cfg(feature = "candle-cuda")]
use fused_optim::cuda::GradStats;
use fused_optim::{Applied, Clip, DType, FoundInf, Optimizer, StepCtl};

use super::watch::Watch;
use super::{Accumulation, OptimWrapper, OptimWrapperState, grad_norm, optimizer_step};
use crate::Result;
use crate::device::Overflows;
use crate::engine::{Engine, SharedSink};
use crate::model::ModelWrapper;

/// How the loss is scaled.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum LossScale {
    /// Grows while all is well, is halved when a gradient overflows.
    Dynamic(LossScalerOptions),
    /// Always this, or, of a run that is resumed, the checkpoint's; a step with an overflow is skipped all
    /// the same.
    Static(f32),
    /// No scaling: for bf16, whose range is that of f32.
    Off,
}

impl LossScale {
    /// The state machine that follows this rule, if the rule makes sense.
    pub(super) fn scaler(self) -> ::amp::Result<LossScaler> {
        match self {
            Self::Dynamic(options) => LossScaler::new(options),
            Self::Static(scale) => LossScaler::fixed(scale),
            Self::Off => Ok(LossScaler::disabled()),
        }
    }
}

/// Mixed precision: autocast over f32 parameters ([`with_autocast`](Self::with_autocast)), or parameters
/// of a half type, of which the optimizer keeps f32 masters.
#[derive(Debug)]
pub struct AmpOptimWrapper {
    optimizer: Box<dyn Optimizer>,
    accumulation: Accumulation,
    scaler: LossScaler,
    clip: Option<Clip>,
    parts: Vec<(String, usize)>,
    autocast: Option<DType>,
    watch: Option<Watch>,
    last: Option<Applied>,
}

impl AmpOptimWrapper {
    /// Wraps `optimizer`; a step every `accumulative_counts` batches.
    ///
    /// # Errors
    ///
    /// [`amp::Error`](::amp::Error) if the scaler's options make no sense.
    pub fn new(
        optimizer: Box<dyn Optimizer>,
        accumulative_counts: usize,
        loss_scale: LossScale,
    ) -> Result<Self> {
        let accumulation = Accumulation::new(accumulative_counts);
        let scaler = loss_scale.scaler()?;
        Ok(Self {
            optimizer,
            accumulation,
            scaler,
            clip: None,
            parts: Vec::new(),
            autocast: None,
            watch: None,
            last: None,
        })
    }

    /// Bounds the gradients of each step, once the loss scale has been taken out of them.
    #[must_use]
    #[doc(alias = "clip_grad")]
    pub fn with_clip_grad(mut self, clip: Option<Clip>) -> Self {
        self.clip = clip;
        self
    }

    /// Names the optimizer's parts, in the order of its groups, with the number of each one's.
    #[must_use]
    pub fn with_parts(mut self, parts: Vec<(String, usize)>) -> Self {
        self.parts = parts;
        self
    }

    /// Has the engine run under autocast, `dtype` being the lower precision; with none, in the
    /// parameters' own, which is the default.
    #[must_use]
    pub fn with_autocast(mut self, dtype: Option<DType>) -> Self {
        self.autocast = dtype;
        self
    }

    /// Has a further source say whether a step overflowed, for devices on which values do not show it
    /// ([`Device::overflows`](crate::device::Device::overflows)). Each rank's gradients are looked at
    /// before they are averaged, the source's verdict is asked for at each step, and it skips.
    #[must_use]
    pub fn with_overflows(mut self, source: Option<Overflows>) -> Self {
        self.watch = source.map(Watch::new);
        self
    }

    /// What a step is told.
    fn ctl(&self, found_inf: FoundInf) -> StepCtl {
        StepCtl { grad_scale: self.scaler.inv_scale(), found_inf, clip: self.clip }
    }

    /// Dynamic scaling for f16, none for anything with f32's range.
    #[must_use]
    pub fn default_loss_scale(dtype: DType) -> LossScale {
        match dtype {
            DType::F16 => LossScale::Dynamic(LossScalerOptions::default()),
            DType::Bf16 | DType::F32 => LossScale::Off,
        }
    }
}

impl OptimWrapper for AmpOptimWrapper {
    fn optimizer(&self) -> &dyn Optimizer {
        &*self.optimizer
    }

    fn optimizer_mut(&mut self) -> &mut dyn Optimizer {
        &mut *self.optimizer
    }

    fn parts(&self) -> Vec<(String, usize)> {
        self.parts.clone()
    }

    fn accumulation(&mut self) -> &mut Accumulation {
        self.last = None;
        &mut self.accumulation
    }

    fn loss_scale(&self) -> f32 {
        self.scaler.scale()
    }

    fn skips_non_finite(&self) -> bool {
        true
    }

    fn autocast(&self) -> Option<DType> {
        self.autocast
    }

    fn log_scalars(&self) -> Vec<(&'static str, f64)> {
        let scale = self.scaler.is_enabled().then(|| ("loss_scale", self.scaler.scale().into()));
        let norm = grad_norm(&*self.optimizer, self.clip, self.last);
        scale.into_iter().chain(norm).collect()
    }

    #[cfg(feature = "candle-cuda")]
    fn look_ahead(&mut self) -> Result<Option<GradStats>> {
        let ctl = self.ctl(FoundInf::Check);
        self.optimizer.as_device().map_or(Ok(None), |device| Ok(device.grad_stats(&ctl)?))
    }

    fn step(&mut self, engine: &mut dyn Engine, model: &dyn ModelWrapper) -> Result<Applied> {
        let overflow = self.watch.as_mut().map_or(Ok(false), Watch::overflowed)?;
        let found_inf = if overflow { FoundInf::Known(true) } else { FoundInf::Check };
        let ctl = self.ctl(found_inf);
        let applied = optimizer_step(&mut *self.optimizer, engine, model, &ctl)?;
        self.stepped(applied)?;
        Ok(applied)
    }

    fn step_behind(&mut self) -> Option<(&mut dyn Optimizer, StepCtl)> {
        // Whose verdict comes after backward.
        if self.watch.is_some() {
            return None;
        }
        let ctl = self.ctl(FoundInf::Check);
        Some((&mut *self.optimizer, ctl))
    }

    fn stepped(&mut self, applied: Applied) -> Result<()> {
        self.last = Some(applied);
        self.scaler.update(applied == Applied::SkippedNonFinite)?;
        Ok(())
    }

    fn before_forward(&mut self, sink: SharedSink) -> Result<SharedSink> {
        match &mut self.watch {
            None => Ok(sink),
            Some(watch) => watch.before_forward(sink),
        }
    }

    fn state_dict(&self) -> Result<OptimWrapperState> {
        Ok(OptimWrapperState {
            optimizer: self.optimizer.try_state_dict()?,
            loss_scaler: self.scaler.state_dict(),
        })
    }

    fn load_state_dict(&mut self, state: &OptimWrapperState) -> Result<()> {
        let mut restored = self.scaler.clone();
        restored.load_state_dict(state.loss_scaler.as_ref())?;
        self.optimizer.load_state_dict(&state.optimizer)?;
        self.scaler = restored;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use collective::ReducerOptions;
    use fused_optim::{Sgd, SgdHyper};
    use half::f16;

    use super::*;
    use crate::data::Batch;
    use crate::model::DistributedDataParallel;
    use crate::testing::{FakeEngine, Values, group};

    fn parts(
        counts: usize,
        loss_scale: LossScale,
    ) -> (FakeEngine, DistributedDataParallel, AmpOptimWrapper) {
        let engine = FakeEngine::new(&[("w", Values::F16(vec![f16::ONE; 2]))], &[]);
        let options = ReducerOptions::default();
        let model = DistributedDataParallel::new(group(), engine.params(), options).unwrap();
        let sgd = Sgd::with_one_group(SgdHyper { lr: 0.5, ..SgdHyper::default() }, 1).unwrap();
        let optim = AmpOptimWrapper::new(Box::new(sgd), counts, loss_scale).unwrap();
        (engine, model, optim)
    }

    fn dynamic() -> LossScale {
        LossScale::Dynamic(LossScalerOptions {
            init_scale: 1024.0,
            growth_interval: 2,
            ..LossScalerOptions::default()
        })
    }

    fn weights(engine: &FakeEngine) -> &Values {
        &engine.params[0]
    }

    fn all(value: f32) -> Values {
        Values::F16(vec![f16::from_f32(value); 2])
    }

    #[test]
    fn a_step_is_unscaled_and_an_overflow_skipped() {
        let (mut engine, mut model, mut optim) = parts(1, dynamic());
        let mut step = |engine: &mut FakeEngine, gradient: f32| {
            engine.gradient = gradient;
            let update = optim.update_params(engine, &mut model, &Batch::new()).unwrap();
            (update.applied.unwrap(), optim.loss_scale())
        };
        assert_eq!(step(&mut engine, 0.25), (Applied::Applied, 1024.0));
        assert_eq!(*weights(&engine), all(1.0 - 0.5 * 0.25));
        // 100 * 1024 is more than an f16 can hold.
        assert_eq!(step(&mut engine, 100.0), (Applied::SkippedNonFinite, 512.0));
        assert_eq!(*weights(&engine), all(0.875));
        // The next ones begin with clean gradients, and two good ones double the scale.
        assert_eq!(step(&mut engine, 0.25), (Applied::Applied, 512.0));
        assert_eq!(*weights(&engine), all(0.75));
        assert_eq!(step(&mut engine, 0.25), (Applied::Applied, 1024.0));
    }

    #[test]
    fn an_overflow_in_any_batch_skips_the_accumulated_step() {
        let (mut engine, mut model, mut optim) = parts(2, dynamic());
        let mut applied = Vec::new();
        for gradient in [0.25, 0.75, 1000.0, 0.25, 0.25, 0.25] {
            engine.gradient = gradient;
            applied
                .push(optim.update_params(&mut engine, &mut model, &Batch::new()).unwrap().applied);
            if applied.len() == 2 {
                // The mean of the two, not their sum.
                assert_eq!(*weights(&engine), all(1.0 - 0.5 * 0.5));
            }
        }
        let (yes, no) = (Some(Applied::Applied), Some(Applied::SkippedNonFinite));
        assert_eq!(applied, [None, yes, None, no, None, yes]);
        assert_eq!(*weights(&engine), all(0.75 - 0.5 * 0.25));
        assert_eq!(optim.loss_scale(), 512.0);
    }

    #[test]
    fn a_fixed_scale_is_resumed() {
        let (_, _, optim) = parts(1, LossScale::Static(8.0));
        let (_, _, mut other) = parts(1, LossScale::Static(4.0));
        let mut saved = optim.state_dict().unwrap();
        other.load_state_dict(&saved).unwrap();
        assert_eq!(other.loss_scale(), 8.0);
        // A checkpoint of an older version has none.
        saved.loss_scaler = None;
        other.load_state_dict(&saved).unwrap();
        assert_eq!(other.loss_scale(), 8.0);
        let (_, _, mut other) = parts(1, dynamic());
        assert!(other.load_state_dict(&optim.state_dict().unwrap()).is_err());
    }

    #[test]
    fn a_fixed_scale_stays_and_none_is_one() {
        for (loss_scale, scale) in [(LossScale::Static(8.0), 8.0), (LossScale::Off, 1.0)] {
            let (mut engine, mut model, mut optim) = parts(1, loss_scale);
            for (gradient, applied) in
                [(f32::INFINITY, Applied::SkippedNonFinite), (0.5, Applied::Applied)]
            {
                engine.gradient = gradient;
                let update = optim.update_params(&mut engine, &mut model, &Batch::new()).unwrap();
                assert_eq!(update.applied, Some(applied), "{loss_scale:?}");
                assert_eq!(optim.loss_scale(), scale);
            }
            assert_eq!(*weights(&engine), all(0.75));
            assert_eq!(optim.log_scalars().len(), usize::from(scale > 1.0));
        }
    }
}
