//! The optimizer wrapper without mixed precision.

use ::amp::ScalerState;
#[cfg(feature = "candle-cuda")]
use fused_optim::cuda::GradStats;
use fused_optim::{Applied, Clip, Optimizer, StepCtl};

use super::{Accumulation, OptimWrapper, OptimWrapperState, grad_norm, optimizer_step};
use crate::engine::Engine;
use crate::model::ModelWrapper;
use crate::{Error, Result};

/// Full precision: the optimizer steps on the gradients as they are. `OptimWrapper` in
/// configurations.
#[derive(Debug)]
pub struct Fp32OptimWrapper {
    optimizer: Box<dyn Optimizer>,
    accumulation: Accumulation,
    clip: Option<Clip>,
    parts: Vec<(String, usize)>,
    last: Option<Applied>,
}

impl Fp32OptimWrapper {
    /// Wraps `optimizer`; a step every `accumulative_counts` batches.
    #[must_use]
    pub fn new(optimizer: Box<dyn Optimizer>, accumulative_counts: usize) -> Self {
        let accumulation = Accumulation::new(accumulative_counts);
        Self { optimizer, accumulation, clip: None, parts: Vec::new(), last: None }
    }

    /// Bounds the gradients of each step.
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

    /// What a step is told.
    fn ctl(&self) -> StepCtl {
        StepCtl { clip: self.clip, ..StepCtl::PLAIN }
    }
}

impl OptimWrapper for Fp32OptimWrapper {
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

    fn log_scalars(&self) -> Vec<(&'static str, f64)> {
        grad_norm(&*self.optimizer, self.clip, self.last).into_iter().collect()
    }

    #[cfg(feature = "candle-cuda")]
    fn look_ahead(&mut self) -> Result<Option<GradStats>> {
        let ctl = self.ctl();
        self.optimizer.as_device().map_or(Ok(None), |device| Ok(device.grad_stats(&ctl)?))
    }

    fn step(&mut self, engine: &mut dyn Engine, model: &dyn ModelWrapper) -> Result<Applied> {
        let ctl = self.ctl();
        let applied = optimizer_step(&mut *self.optimizer, engine, model, &ctl)?;
        self.stepped(applied)?;
        Ok(applied)
    }

    fn step_behind(&mut self) -> Option<(&mut dyn Optimizer, StepCtl)> {
        let ctl = self.ctl();
        Some((&mut *self.optimizer, ctl))
    }

    fn stepped(&mut self, applied: Applied) -> Result<()> {
        self.last = Some(applied);
        Ok(())
    }

    fn state_dict(&self) -> Result<OptimWrapperState> {
        Ok(OptimWrapperState { optimizer: self.optimizer.try_state_dict()?, loss_scaler: None })
    }

    fn load_state_dict(&mut self, state: &OptimWrapperState) -> Result<()> {
        refuse_scaler(state.loss_scaler.as_ref())?;
        Ok(self.optimizer.load_state_dict(&state.optimizer)?)
    }
}

fn refuse_scaler(scaler: Option<&ScalerState>) -> Result<()> {
    match scaler {
        None => Ok(()),
        Some(_) => Err(Error::Checkpoint(
            "the checkpoint holds a loss scaler: it was made with AmpOptimWrapper, this run uses OptimWrapper"
                .into(),
        )),
    }
}

#[cfg(test)]
mod tests {
    use collective::ReducerOptions;
    use fused_optim::{AdamP, AdamPHyper};

    use super::*;
    use crate::data::Batch;
    use crate::model::DistributedDataParallel;
    use crate::testing::{FakeEngine, Values, group};

    #[test]
    fn the_optimizer_is_told_the_shapes() {
        // AdamP refuses rows that the weight has not.
        for (shape, fits) in [([2, 3], true), ([4, 1], false)] {
            let mut engine = FakeEngine::new(&[("w", Values::F32(vec![1.0; 6]))], &[]);
            let options = ReducerOptions::default();
            let mut model =
                DistributedDataParallel::new(group(), engine.params(), options).unwrap();
            model.prepare(true).unwrap();
            engine.forward_backward(&Batch::new(), 1.0, &model.sink()).unwrap();
            model.finish().unwrap();
            engine.specs[0][0].shape = shape.into();
            let adamp = AdamP::with_one_group(AdamPHyper::default(), 1).unwrap();
            let mut optim = Fp32OptimWrapper::new(Box::new(adamp), 1);
            assert_eq!(optim.step(&mut engine, &model).is_ok(), fits);
        }
    }
}
