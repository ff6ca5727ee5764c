//! Arguments of a training step other than the batch, and the receiver of its gradients.

use std::fmt;
use std::sync::Arc;

use fused_optim::{Applied, DeviceOptimizer, GradStats, Optimizer, Slice, StepCtl};
use parking_lot::Mutex;

use crate::{DeviceTensor, Result};

/// Options and state of one training step: of the forward and backward pass of one batch.
pub struct StepContext<'a> {
    /// Factor of the loss that backward starts from, and therefore of every gradient.
    pub loss_scale: f32,
    /// Lower-precision type for operators under autocast; parameters and gradients keep their
    /// types.
    pub autocast: Option<fused_optim::DType>,
    /// Whether gradients are averaged over ranks in this step; otherwise (`no_sync`) they are
    /// accumulated on this rank.
    pub sync: bool,
    /// Receiver of the gradients.
    pub sink: SharedSink,
    /// State of the engine that is saved in checkpoints.
    pub state: &'a mut EngineState,
    /// The optimizer step that follows, if the caller offers it to the engine.
    pub step: Option<OptimizerStep<'a>>,
    /// Message for the log, set by the engine.
    pub note: Option<String>,
    /// Warning for the log, set by the engine.
    pub warning: Option<String>,
}

impl<'a> StepContext<'a> {
    /// Creates a context for a step with synchronization, without autocast and optimizer step.
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

    /// Reports the complete gradient of parameter `index`, as [`GradSink::ready`] takes it: in the
    /// parameter's type and shape, multiplied by [`loss_scale`](Self::loss_scale), once per pass.
    ///
    /// # Errors
    ///
    /// Those of [`GradSink::ready`]: `run` has to return them unchanged.
    pub fn report(&self, index: usize, grad: Slice<'_>) -> Result<()> {
        self.sink.lock().ready(index, grad)
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

/// State of an engine other than parameters and buffers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EngineState {
    /// Seed of the engine's random numbers.
    pub seed: u64,
    /// Number of words drawn from them; with the seed it determines the next one.
    pub random_position: u64,
    /// Fastest implementations found by autotuning of the engine, as text in a format of its own;
    /// empty if there are none.
    pub autotune_cache: String,
}

/// An optimizer step, which a device may run together with backward.
#[derive(Debug)]
pub struct OptimizerStep<'a> {
    /// The optimizer.
    pub optimizer: &'a mut dyn Optimizer,
    /// Options of the step.
    pub ctl: StepCtl,
    /// Whether an engine may run the step before it reports gradients. A
    /// [`ModelWrapper`](crate::ModelWrapper) sets it if it passes the gradients of this pass
    /// to the optimizer unchanged; a wrapper that changes gradients clears it.
    pub may_join_backward: bool,
    /// Result of the step if an engine has run it.
    pub applied: Option<Applied>,
}

/// Returns an optimizer's interface to device memory.
///
/// # Errors
///
/// [`Unsupported`](fused_optim::Error::Unsupported) for an optimizer on the host.
pub fn on_device(optimizer: &mut dyn Optimizer) -> fused_optim::Result<&mut dyn DeviceOptimizer> {
    let what = "a step on device memory";
    optimizer.as_device().ok_or(fused_optim::Error::Unsupported { what })
}

impl<'a> OptimizerStep<'a> {
    /// Creates a step that has not run and must not run before gradients are reported.
    pub fn new(optimizer: &'a mut dyn Optimizer, ctl: StepCtl) -> Self {
        Self { optimizer, ctl, may_join_backward: false, applied: None }
    }

    /// Returns the statistics of device gradients that this step needs; `None` if it needs none.
    ///
    /// # Errors
    ///
    /// Those of the optimizer.
    pub fn grad_stats(&mut self) -> Result<Option<GradStats>> {
        let Some(device) = self.optimizer.as_device() else { return Ok(None) };
        Ok(device.grad_stats(&self.ctl)?)
    }
}

/// Receives gradients during backward.
pub trait GradSink: Send {
    /// Takes the complete, contiguous gradient of parameter `index`, with the parameter's type and
    /// shape. Called at most once per parameter and backward pass, on the thread that runs the
    /// step; the slice is valid for the call only.
    ///
    /// # Errors
    ///
    /// Those of the sink, such as communication errors; backward has to stop then, and the error to
    /// be returned unchanged.
    fn ready(&mut self, index: usize, grad: Slice<'_>) -> Result<()>;

    /// As [`ready`](Self::ready), for a gradient in device memory, which the sink may keep. The
    /// default copies it to the host and calls [`ready`](Self::ready).
    ///
    /// # Errors
    ///
    /// Those of [`ready`](Self::ready), and of the copy.
    fn ready_on_device(&mut self, index: usize, grad: Box<dyn DeviceTensor>) -> Result<()> {
        self.ready(index, grad.to_host()?.as_slice())
    }
}

/// A sink shared by the model wrapper, its owner, and the engine, which calls it.
pub type SharedSink = Arc<Mutex<dyn GradSink>>;
