//! An optimizer step on a model's parameters and a wrapper's gradients.

use fused_optim::{Applied, ParamMut};

use crate::model::to_f32;
use crate::{Error, Model, ModelWrapper, OptimizerStep, Result, TensorSpec, with_host_grads};

impl OptimizerStep<'_> {
    /// Runs the step with parameters and gradients on the device or on the host.
    ///
    /// # Errors
    ///
    /// Those of the optimizer, and of lending; [`Error::NoGradients`] if no parameter has a
    /// gradient.
    pub fn run(mut self, model: &mut dyn Model, wrapper: &dyn ModelWrapper) -> Result<Applied> {
        let step = &mut self;
        let mut applied = Applied::SkippedNonFinite;
        if step.optimizer.as_device().is_some()
            && let Some(device) = model.on_device()
        {
            wrapper.with_grads(&mut |grads| {
                if !grads.is_empty() && grads.iter().all(Option::is_none) {
                    return Err(Error::NoGradients);
                }
                applied = device.optimizer_step(step, grads)?;
                Ok(())
            })?;
            return Ok(applied);
        }
        let rows: Vec<usize> = model.params().iter().map(TensorSpec::rows).collect();
        model.with_params(&mut |weights| {
            with_host_grads(wrapper, &mut |grads| {
                if !grads.is_empty() && grads.iter().all(Option::is_none) {
                    return Err(Error::NoGradients);
                }
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
}

/// Returns the name of the first parameter whose gradient, times `scale`, is not finite.
///
/// # Errors
///
/// Those of copies from a device.
pub(super) fn first_non_finite(
    scale: f32,
    model: &dyn Model,
    wrapper: &dyn ModelWrapper,
) -> Result<Option<String>> {
    let mut first = None;
    with_host_grads(wrapper, &mut |grads| {
        let is_bad = |grad: &Option<_>| {
            let values = grad.map(to_f32);
            values.is_some_and(|values| values.iter().any(|x| !(x * scale).is_finite()))
        };
        first = grads.iter().position(is_bad);
        Ok(())
    })?;
    Ok(first.map(|index| model.params()[index].name.clone()))
}
