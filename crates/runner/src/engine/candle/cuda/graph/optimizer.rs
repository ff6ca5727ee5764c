//! An optimizer step in a graph, after the backward pass that computes its gradients.
//!
//! Its launches read from device memory everything that differs between steps: learning rates, the
//! loss scale, addresses of gradients. So they are captured once, and these data are sent before
//! each launch of the graph.

use candle_core::Tensor;
use candle_train::OnDevice;
use fused_optim::{DeviceParams, Launches};
use train_step::on_device;

use super::CandleEngine;
use crate::Result;
use crate::engine::{Gradient, OptimizerStep};

/// Gradients by parameter index.
type Grads = [(usize, Tensor)];

/// Sends the data of a step on `grads`; returns its launches if the step consists only of launches.
pub(super) fn prepare(
    step: &mut OptimizerStep<'_>,
    engine: &CandleEngine,
    grads: &Grads,
) -> Result<Option<Launches>> {
    let Some(optimizer) = step.optimizer.as_device() else { return Ok(None) };
    lend(engine, grads, |lent| optimizer.prepare_step(lent, &step.ctl))
}

/// Enqueues the launches of the prepared step.
pub(super) fn launch(
    step: &mut OptimizerStep<'_>,
    engine: &CandleEngine,
    grads: &Grads,
) -> Result<()> {
    let OptimizerStep { optimizer, ctl, .. } = step;
    lend(engine, grads, |lent| on_device(&mut **optimizer)?.launch_step(lent, ctl))
}

fn lend<R>(
    engine: &CandleEngine,
    grads: &Grads,
    call: impl FnOnce(DeviceParams<'_>) -> fused_optim::Result<R>,
) -> Result<R> {
    let mut all: Vec<Option<OnDevice>> = engine.tensors.params.specs.iter().map(|_| None).collect();
    for (index, grad) in grads {
        all[*index] = Some(OnDevice::new(grad.clone()));
    }
    let all: Vec<_> = all.iter().map(|grad| grad.as_ref().map(|g| Gradient::Device(g))).collect();
    Ok(engine.tensors.lend_for_step(&all, call)?)
}
