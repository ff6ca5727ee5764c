//! An optimizer's step in a graph, behind the backward whose gradients it is on.
//!
//! Its launches read on the device all that differs from step to step: learning rates, the loss scale, where the
//! gradients are. So they are captured once, and sent for before each launch of the graph.

use candle_core::Tensor;
use fused_optim::cuda::Launches;
use fused_optim::{Applied, FoundInf, Optimizer, StepCtl};

use super::CandleEngine;
use crate::Result;
use crate::engine::Gradient;
use crate::engine::candle::on_device::{OnDevice, of};

/// An optimizer, and what its step is told.
pub(in super::super) struct Behind<'a> {
    pub(in super::super) optimizer: &'a mut dyn Optimizer,
    pub(in super::super) ctl: StepCtl,
}

/// Gradients by parameter.
type Grads = [(usize, Tensor)];

impl Behind<'_> {
    /// Has the device know what a step on `grads` reads; which launches that is, if it is nothing else.
    pub(super) fn ready(
        &mut self,
        engine: &CandleEngine,
        grads: &Grads,
    ) -> Result<Option<Launches>> {
        let Self { optimizer, ctl } = self;
        let Some(optimizer) = optimizer.as_device() else { return Ok(None) };
        lend(engine, grads, |lent| optimizer.prepare_step(lent, ctl))
    }

    /// As [`ready`](Self::ready), for a step that is skipped: it changes nothing.
    pub(super) fn ready_to_skip(&mut self, engine: &CandleEngine, grads: &Grads) -> Result<()> {
        let ctl = StepCtl { found_inf: FoundInf::Known(true), ..self.ctl };
        let launches = Behind { optimizer: &mut *self.optimizer, ctl }.ready(engine, grads);
        launches.map(|_launches| ())
    }

    /// Launches what was made ready.
    pub(super) fn launch(&mut self, engine: &CandleEngine, grads: &Grads) -> Result<()> {
        let Self { optimizer, ctl } = self;
        lend(engine, grads, |lent| of(&mut **optimizer)?.launch_step(lent, ctl))
    }

    /// What became of it.
    pub(super) fn outcome(&mut self) -> Result<Applied> {
        Ok(of(&mut *self.optimizer)?.step_outcome(&self.ctl)?)
    }
}

fn lend<R>(
    engine: &CandleEngine,
    grads: &Grads,
    call: impl FnOnce(fused_optim::cuda::DeviceParams<'_>) -> fused_optim::Result<R>,
) -> Result<R> {
    let mut all: Vec<Option<OnDevice>> = engine.params.specs.iter().map(|_| None).collect();
    for (index, grad) in grads {
        all[*index] = Some(OnDevice::new(grad.clone()));
    }
    let all: Vec<_> = all.iter().map(|grad| grad.as_ref().map(|g| Gradient::Device(g))).collect();
    engine.lend(&all, call)
}
