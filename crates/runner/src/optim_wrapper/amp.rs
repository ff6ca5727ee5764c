//! `AmpOptimWrapper`: half parameters, f32 master weights, a dynamic loss scale.
//!
//! Gradients arrive times the loss scale `S`, and already averaged over the ranks: an inf on one
//! rank is by then an inf on all. The optimizer looks at every gradient first and skips the whole
//! step if one is not finite; every rank sees the same gradients, so all ranks skip, and halve
//! their scale, in lockstep. Otherwise it multiplies by `1 / S` in the same sweep that updates.

use ::amp::{LossScaler, LossScalerOptions};
use fused_optim::{Applied, DType, FoundInf, Optimizer, StepCtl};

use super::{Accumulation, OptimWrapper, OptimWrapperState, optimizer_step};
use crate::Result;
use crate::engine::Engine;
use crate::model::ModelWrapper;

/// How the loss is scaled.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum LossScale {
    /// Grows while all is well, is halved when a gradient overflows.
    Dynamic(LossScalerOptions),
    /// Always this; a step with an overflow is skipped all the same.
    Static(f32),
    /// No scaling: for bf16, whose range is that of f32.
    Off,
}

/// Mixed precision. The model keeps parameters of a half type, the optimizer their f32 masters.
#[derive(Debug)]
pub struct AmpOptimWrapper {
    optimizer: Box<dyn Optimizer>,
    accumulation: Accumulation,
    scaler: LossScaler,
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
        let scaler = match loss_scale {
            LossScale::Dynamic(options) => LossScaler::new(options)?,
            LossScale::Static(scale) => LossScaler::fixed(scale)?,
            LossScale::Off => LossScaler::disabled(),
        };
        Ok(Self { optimizer, accumulation: Accumulation::new(accumulative_counts), scaler })
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

    fn accumulation(&mut self) -> &mut Accumulation {
        &mut self.accumulation
    }

    fn loss_scale(&self) -> f32 {
        self.scaler.scale()
    }

    fn log_scalars(&self) -> Vec<(&'static str, f64)> {
        match self.scaler.is_enabled() {
            true => vec![("loss_scale", self.scaler.scale().into())],
            false => Vec::new(),
        }
    }

    fn step(&mut self, engine: &mut dyn Engine, model: &dyn ModelWrapper) -> Result<Applied> {
        let ctl = StepCtl { grad_scale: self.scaler.inv_scale(), found_inf: FoundInf::Check };
        let applied = optimizer_step(&mut *self.optimizer, engine, model, &ctl)?;
        self.scaler.update(applied == Applied::SkippedNonFinite)?;
        Ok(applied)
    }

    fn state_dict(&self) -> OptimWrapperState {
        OptimWrapperState {
            optimizer: self.optimizer.state_dict(),
            loss_scaler: self.scaler.state_dict(),
        }
    }

    fn load_state_dict(&mut self, state: &OptimWrapperState) -> Result<()> {
        let mut restored = self.scaler.clone();
        restored.load_state_dict(state.loss_scaler.as_ref())?;
        self.optimizer.load_state_dict(&state.optimizer)?;
        self.scaler = restored;
        Ok(())
    }
}
