//! What a training step is given besides its batch.

use std::fmt;

use fused_optim::{Applied, DeviceOptimizer, GradStats, Optimizer, StepCtl};

use super::SharedSink;
use crate::Result;

/// Options and state of one training step, for [`Engine::train_step`](super::Engine::train_step).
pub struct StepContext<'a> {
    /// Backward starts from the loss times this, so every gradient carries the factor.
    pub loss_scale: f32,
    /// The lower type that suitable operators run in (autocast); parameters and gradients keep their types. The
    /// runner asks [`Engine::supports_autocast`](super::Engine::supports_autocast) first.
    pub autocast: Option<fused_optim::DType>,
    /// Whether gradients are averaged over ranks in this step; else (`no_sync`) they are only added up.
    pub sync: bool,
    /// Takes the gradients.
    pub sink: SharedSink,
    /// State of the engine, in checkpoints.
    pub state: &'a mut EngineState,
    /// The optimizer's step that follows, if one does.
    pub step: Option<OptimizerStep<'a>>,
    /// A line for the log, which the engine may set.
    pub note: Option<String>,
    /// A warning for the log, likewise.
    pub warning: Option<String>,
}

impl<'a> StepContext<'a> {
    /// A synchronized step in the parameters' own types, without an optimizer's.
    #[must_use]
    pub fn new(sink: SharedSink, state: &'a mut EngineState) -> Self {
        Self {
            loss_scale: 1.0,
            autocast: None,
            sync: true,
            sink,
            state,
            step: None,
            note: None,
            warning: None,
        }
    }
}

impl fmt::Debug for StepContext<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StepContext")
            .field("loss_scale", &self.loss_scale)
            .field("autocast", &self.autocast)
            .field("sync", &self.sync)
            .field("state", &self.state)
            .field("step", &self.step)
            .finish_non_exhaustive()
    }
}

/// What an engine goes on from besides parameters and buffers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EngineState {
    /// Seed of the engine's random numbers.
    pub seed: u64,
    /// How many words have been drawn from them; with the seed this determines the next one.
    pub random_position: u64,
    /// The fastest implementations that [`compile`](super::Engine::compile) has found, as text in a form of the
    /// engine's own; empty if there are none.
    pub autotune_cache: String,
}

/// An optimizer's step, which a device may run together with backward.
#[derive(Debug)]
pub struct OptimizerStep<'a> {
    /// The optimizer.
    pub optimizer: &'a mut dyn Optimizer,
    /// Options of the step.
    pub ctl: StepCtl,
    /// Whether an engine may run the step before it reports gradients. A
    /// [`ModelWrapper`](crate::model::ModelWrapper) sets it where the optimizer gets the gradients of this pass as the
    /// engine reports them; a wrapper that changes gradients clears it.
    pub may_join_backward: bool,
    /// What the step did, once an engine has run it.
    pub applied: Option<Applied>,
}

/// An optimizer that steps on a device's memory.
pub(crate) fn on_device(
    optimizer: &mut dyn Optimizer,
) -> fused_optim::Result<&mut dyn DeviceOptimizer> {
    let what = "a step on device memory";
    optimizer.as_device().ok_or(fused_optim::Error::Unsupported { what })
}

impl<'a> OptimizerStep<'a> {
    /// A step that has not run and may not run before gradients are reported.
    pub fn new(optimizer: &'a mut dyn Optimizer, ctl: StepCtl) -> Self {
        Self { optimizer, ctl, may_join_backward: false, applied: None }
    }

    /// Takes statistics of gradients on a device before this step; `None` if the step needs none.
    ///
    /// # Errors
    ///
    /// Those of the optimizer.
    pub fn grad_stats(&mut self) -> Result<Option<GradStats>> {
        let Some(device) = self.optimizer.as_device() else { return Ok(None) };
        Ok(device.grad_stats(&self.ctl)?)
    }
}
