//! Checks gradients against differences of the loss: of each parameter on request, of all together
//! in a run's first step.
//!
//! Each element of a parameter is moved along a random direction by a share of the parameter's root
//! mean square. Dropout draws the same masks in every pass, autotuning is off, and parameters,
//! buffers and random position are restored bit for bit. At a kink of the loss (`relu`) the two
//! one-sided differences disagree; an error up to the size of that disagreement is allowed.
//!
//! [`check`] moves one parameter at a time, from a point near the model's parameters, because
//! activations of a fresh model can be exactly at a kink (black pixels and zero biases). A gradient
//! is wrong if its error exceeds a tolerance at two step sizes. The tolerance is relative to the
//! larger of the slope and the norm of the terms summed to it: a thousandth in `f64`, whose steps
//! are too small to cross many kinks, and a tenth in `f32`.
//!
//! [`ForwardState::check_step`] runs one more forward pass on each side of the first step's own. It
//! warns if the change of the loss differs from the change predicted by the gradients by more than
//! 5%, by more than rounding errors in the step's precision, and by more than ten times the
//! difference between the two sides. Steps with a non-finite loss or non-finite gradients are
//! skipped.
//!
//! Limits. Not detected: smaller errors; errors in operators that this batch or these parameters do
//! not reach; wrong values with a matching gradient. Not detected in the first step: errors before
//! parameters that are all zero, which are not moved; in half precision, all but large errors
//! (candle's sums of half tensors, see [`stock_candle`](super::ops::stock_candle)), and in bf16
//! gradients that are too large, or noise; errors hidden
//! by a large curvature of the loss. Reported, too: gradients that intentionally differ from the
//! loss's (a detached branch, a straight-through estimator), and possibly a loss that draws its own
//! random numbers (candle-nn's `Dropout`).

use amp::Autocast;
use candle_core::{DType, Result, Tensor};
use candle_nn::Init;

use super::CandleEngine;
use super::model::Loss;
use super::ops::allows_tf32;
use super::ops::context::{random_position, set_random_position, without_autotune};
use super::ops::nn::initial_values;
use crate::config::unknown;
use crate::data::Batch;
use crate::engine::{StepContext, TensorSpec, WrongGradient};
use crate::{Error, Result as RunnerResult};

/// State changed by a forward pass, as it was before the pass.
pub(super) struct ForwardState {
    buffers: Vec<Tensor>,
    random_position: u64,
}

impl ForwardState {
    pub(super) fn of(engine: &CandleEngine) -> Result<Self> {
        Ok(Self { buffers: engine.tensors.buffers.copies()?, random_position: random_position() })
    }

    fn restore(&self, engine: &CandleEngine) -> Result<()> {
        set_random_position(self.random_position);
        engine.tensors.buffers.set_all(&self.buffers)
    }
}

/// A model, its parameters, and a direction for each.
struct Probe<'a> {
    engine: &'a CandleEngine,
    batch: &'a Batch,
    start: &'a ForwardState,
    params: Vec<Tensor>,
    directions: Vec<Tensor>,
}

impl<'a> Probe<'a> {
    /// Creates directions with the root mean square of their parameters, or `of_zeros` for
    /// parameters that are all zero.
    fn new(
        engine: &'a CandleEngine,
        batch: &'a Batch,
        start: &'a ForwardState,
        of_zeros: f64,
    ) -> Result<Self> {
        let params = engine.tensors.params.copies()?;
        let direction = |(param, spec): (&Tensor, &TensorSpec)| {
            let size = param.to_dtype(DType::F64)?.sqr()?.mean_all()?.to_scalar::<f64>()?.sqrt();
            let normal = Init::Randn { mean: 0.0, stdev: if size > 0.0 { size } else { of_zeros } };
            // Not the stream of the initial values, which would equal the direction.
            let name = format!("direction of {}", spec.name);
            let values = initial_values(normal, param.shape(), 0, &name);
            // Parameters of half types are moved in f32.
            let wide = if param.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
            Tensor::from_vec(values, param.shape(), param.device())?.to_dtype(wide)
        };
        let directions = params.iter().zip(&engine.tensors.params.specs).map(direction);
        let directions = directions.collect::<Result<_>>()?;
        Ok(Self { engine, batch, start, params, directions })
    }

    /// Returns the loss with parameter `i` moved by `along(i)` times its direction.
    fn loss(&self, along: impl Fn(usize) -> f64) -> RunnerResult<Loss> {
        let moved = |(i, (param, direction)): (usize, (&Tensor, &Tensor))| {
            let moved = (param.to_dtype(direction.dtype())? + (direction * along(i))?)?;
            moved.to_dtype(param.dtype())
        };
        let moved = self.params.iter().zip(&self.directions).enumerate().map(moved);
        moved
            .collect::<Result<Vec<_>>>()
            .and_then(|moved| self.engine.tensors.params.set_all(&moved))
            .and_then(|()| self.start.restore(self.engine))
            .map_err(failed)?;
        self.engine.loss(self.batch)
    }

    fn number(&self, along: impl Fn(usize) -> f64) -> RunnerResult<f64> {
        self.loss(along)?.number().map_err(failed)
    }

    /// Returns, for each parameter, the slope of the loss along its direction computed from the
    /// gradient, and the norm of the summed terms; `None` without a gradient.
    fn slopes(&self, gradients: &[(usize, Tensor)]) -> Result<Vec<Option<(f64, f64)>>> {
        let mut slopes = vec![None; self.params.len()];
        for (i, gradient) in gradients {
            let terms = gradient.to_dtype(DType::F64)?;
            let terms = (terms * self.directions[*i].to_dtype(DType::F64)?)?;
            let sum = terms.sum_all()?.to_scalar::<f64>()?;
            slopes[*i] = Some((sum, terms.sqr()?.sum_all()?.to_scalar::<f64>()?.sqrt()));
        }
        Ok(slopes)
    }

    /// Runs `call`, then restores the parameters, and sets the state changed by forward passes to
    /// `end`.
    fn aside<R>(&self, end: &ForwardState, call: impl FnOnce() -> R) -> RunnerResult<R> {
        let result = without_autotune(call);
        let params = self.engine.tensors.params.set_all(&self.params);
        params.and_then(|()| end.restore(self.engine)).map_err(failed)?;
        Ok(result)
    }
}

/// Returns parameters with wrong gradients; see
/// [`Engine::check_gradients`](crate::engine::Engine::check_gradients).
pub(super) fn check(
    engine: &CandleEngine,
    batch: &Batch,
    ignore: &[String],
) -> RunnerResult<Vec<WrongGradient>> {
    let specs = &engine.tensors.params.specs;
    let names: Vec<&str> = specs.iter().map(|spec| spec.name.as_str()).collect();
    if let Some(name) = ignore.iter().find(|name| !names.contains(&name.as_str())) {
        return Err(Error::config(unknown("parameter", name, &names)));
    }
    let start = ForwardState::of(engine).map_err(failed)?;
    let probe = Probe::new(engine, batch, &start, 0.1).map_err(failed)?;
    probe.aside(&start, || {
        let (loss, tape) = engine.passes.record(|| probe.loss(|_| NUDGE));
        let loss = loss?;
        let middle = loss.number().map_err(failed)?;
        let (tolerance, rounding, steps) = match loss.value.dtype() == DType::F64 {
            true => (1e-3, 1e-13 * middle.abs(), [1e-6, 1e-5]),
            false => (0.1, 1e-6 * middle.abs(), [1e-3, 4e-3]),
        };
        let ones = loss.value.ones_like();
        let gradients =
            engine.passes.backward((tape, &loss.value), ones, None, Some(Vec::new()))?;
        let slopes = probe.slopes(&gradients).map_err(failed)?;
        drop(loss);
        let mut wrong = Vec::new();
        for (at, name) in names.iter().enumerate() {
            if ignore.iter().any(|ignored| ignored == name) {
                continue;
            }
            let (gradient, norm) = slopes[at].unwrap_or_default();
            let (mut difference, mut is_wrong) = (0.0, true);
            for step in steps {
                let loss_at = |by| probe.number(|i| if i == at { NUDGE + by } else { NUDGE });
                let (up, down) = (loss_at(step)?, loss_at(-step)?);
                difference = (up - down) / (2.0 * step);
                let kinks = 1.5 * (up - 2.0 * middle + down).abs() / step;
                let allowed = kinks.max(tolerance * norm.max(difference.abs())) + rounding / step;
                // Not within if the difference is NaN.
                let is_within = (difference - gradient).abs() <= allowed;
                is_wrong &= !is_within;
            }
            if is_wrong {
                let gradient = slopes[at].map(|(slope, _)| slope);
                wrong.push(WrongGradient { name: (*name).to_owned(), gradient, difference });
            }
        }
        Ok(wrong)
    })?
}

impl ForwardState {
    /// Compares loss and gradients in a run's first step, which began with this state. Called after
    /// the step's backward pass with its loss and its gradients, which carry the loss scale. Sets a
    /// warning in the context. An error of a forward pass is ignored; a failure to restore
    /// parameters is returned. Returns false if the comparison was not possible, so that the next
    /// step repeats it.
    pub(super) fn check_step(
        &self,
        engine: &CandleEngine,
        (batch, loss): (&Batch, f64),
        gradients: &[(usize, Tensor)],
        cx: &mut StepContext<'_>,
    ) -> RunnerResult<bool> {
        let prepared = Self::of(engine).and_then(|end| {
            let probe = Probe::new(engine, batch, self, 0.0)?;
            let slopes = probe.slopes(gradients)?;
            Ok((end, probe, slopes))
        });
        let Ok((end, probe, slopes)) = prepared else { return Ok(true) };
        let scale = f64::from(cx.loss_scale);
        // Each parameter moves in the direction of its gradient, so that contributions do not
        // cancel.
        let slope = slopes.iter().flatten().map(|(slope, _)| slope.abs() / scale).sum::<f64>();
        if !slope.is_finite() || !loss.is_finite() {
            return Ok(false);
        }
        let sign = |i: usize| slopes[i].map_or(1.0, |(slope, _): (f64, f64)| slope.signum());
        let (step, epsilon) = precision(engine);
        let sides = probe.aside(&end, || -> RunnerResult<_> {
            Ok((probe.number(|i| sign(i) * step)?, probe.number(|i| -sign(i) * step)?))
        })?;
        let Ok((up, down)) = sides else { return Ok(true) };
        let (change, predicted) = (up - down, 2.0 * step * slope);
        let off = (change - predicted).abs();
        let share = 0.05 * change.abs().max(predicted.abs());
        let kinks = 10.0 * (up - 2.0 * loss + down).abs();
        let rounding = 8.0 * epsilon * (loss.abs() + slope);
        if off > share && off > kinks && off > rounding {
            cx.warning = Some(format!(
                "gradients do not match the loss: along a random direction it changes by {change:.3e}, \
                 but by {predicted:.3e} according to the gradients; training continues; \
                 `runner check CONFIG --gradients` names the parameters"
            ));
        }
        Ok(true)
    }
}

/// Distance from the model's parameters to the point of the check, as a share of their root mean
/// square.
const NUDGE: f64 = 1e-3;

/// Step size of the first step's comparison, and relative rounding error of its precision: for bf16
/// twice that of one operation, since all slopes of a deep network may be noise, as in PyTorch.
fn precision(engine: &CandleEngine) -> (f64, f64) {
    let autocast = Some(&engine.autocast).filter(|autocast| autocast.is_enabled());
    match (engine.dtype, autocast.map(Autocast::dtype)) {
        (DType::BF16, _) | (_, Some(amp::DType::Bf16)) => (3e-2, 2f64.powi(-7)),
        (DType::F16, _) | (_, Some(amp::DType::F16)) => (3e-2, 2f64.powi(-11)),
        // TF32 rounds factors to as many bits as f16 has.
        (DType::F32, None) if engine.device.is_cuda() && allows_tf32() => (3e-2, 2f64.powi(-11)),
        _ => (3e-4, 2f64.powi(-24)),
    }
}

fn failed(e: candle_core::Error) -> Error {
    Error::engine_during("checking gradients", e)
}
