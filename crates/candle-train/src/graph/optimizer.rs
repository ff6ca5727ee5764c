//! An optimizer step in a graph, after the backward pass that computes its gradients.
//!
//! Its launches read from device memory everything that differs between steps: learning rates, the
//! loss scale, addresses of gradients. So they are captured once, and these data are sent before
//! each launch of the graph.

use candle_core::Tensor;
use fused_optim::{DeviceParams, Launches};
use train_step::{Gradient, OptimizerStep, Result, on_device};

use crate::tensors::{ModelTensors, OnDevice};

/// Gradients by parameter index.
type Grads = [(usize, Tensor)];

/// Sends the data of a step on `grads`; returns its launches if the step consists only of launches.
pub(super) fn prepare(
    step: &mut OptimizerStep<'_>,
    tensors: &ModelTensors,
    grads: &Grads,
) -> Result<Option<Launches>> {
    let Some(optimizer) = step.optimizer.as_device() else { return Ok(None) };
    lend(tensors, grads, |lent| optimizer.prepare_step(lent, &step.ctl))
}

/// Enqueues the launches of the prepared step.
pub(super) fn launch(
    step: &mut OptimizerStep<'_>,
    tensors: &ModelTensors,
    grads: &Grads,
) -> Result<()> {
    let OptimizerStep { optimizer, ctl, .. } = step;
    lend(tensors, grads, |lent| on_device(&mut **optimizer)?.launch_step(lent, ctl))
}

fn lend<R>(
    tensors: &ModelTensors,
    grads: &Grads,
    call: impl FnOnce(DeviceParams<'_>) -> fused_optim::Result<R>,
) -> Result<R> {
    let mut all: Vec<Option<OnDevice>> = tensors.params.specs.iter().map(|_| None).collect();
    for (index, grad) in grads {
        all[*index] = Some(OnDevice::new(grad.clone()));
    }
    let all: Vec<_> = all.iter().map(|grad| grad.as_ref().map(|g| Gradient::Device(g))).collect();
    tensors.lend_for_step(&all, call)
}
