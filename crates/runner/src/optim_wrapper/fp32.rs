//! The optimizer wrapper without mixed precision.

use ::amp::ScalerState;
use fused_optim::{Applied, Optimizer, StepCtl};

use super::{Accumulation, OptimWrapper, OptimWrapperState, optimizer_step};
use crate::engine::Engine;
use crate::model::ModelWrapper;
use crate::{Error, Result};

/// Full precision: the optimizer steps on the gradients as they are. `OptimWrapper` in
/// configurations.
#[derive(Debug)]
pub struct Fp32OptimWrapper {
    optimizer: Box<dyn Optimizer>,
    accumulation: Accumulation,
}

impl Fp32OptimWrapper {
    /// Wraps `optimizer`; a step every `accumulative_counts` batches.
    #[must_use]
    pub fn new(optimizer: Box<dyn Optimizer>, accumulative_counts: usize) -> Self {
        Self { optimizer, accumulation: Accumulation::new(accumulative_counts) }
    }
}

impl OptimWrapper for Fp32OptimWrapper {
    fn optimizer(&self) -> &dyn Optimizer {
        &*self.optimizer
    }

    fn optimizer_mut(&mut self) -> &mut dyn Optimizer {
        &mut *self.optimizer
    }

    fn accumulation(&mut self) -> &mut Accumulation {
        &mut self.accumulation
    }

    fn step(&mut self, engine: &mut dyn Engine, model: &dyn ModelWrapper) -> Result<Applied> {
        optimizer_step(&mut *self.optimizer, engine, model, &StepCtl::PLAIN)
    }

    fn state_dict(&self) -> OptimWrapperState {
        OptimWrapperState { optimizer: self.optimizer.state_dict(), loss_scaler: None }
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
