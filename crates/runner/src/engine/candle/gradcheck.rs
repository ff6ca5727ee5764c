//! Compares gradients with differences of the loss: each parameter's on request, all at once in a run's first step.
//!
//! A random direction moves each element of a parameter by a share of the parameter's root mean square. Dropout draws
//! the same masks in every pass, `compile` searches nothing meanwhile, and parameters, buffers and random numbers are
//! put back bit for bit. Where a loss has kinks (`relu`) it changes more on one side than on the other: as much as
//! that may come of is allowed.
//!
//! [`check`] moves one parameter at a time, from a point near the model's own: a fresh model has activations that are
//! exactly at a kink, those of black pixels and zero biases. A gradient is wrong if it is off at two sizes of step: in
//! `f64`, where steps are so small that they cross next to no kink, by more than a thousandth, in `f32` by more than a
//! tenth, of the slope or of the norm of the terms that it is a sum of, whichever is larger.
//!
//! [`State::check_step`] adds one forward pass on each side of the first step's own. It warns if the loss changes by something
//! else than the gradients say by more than 5%, by more than rounding in the step's precision makes, and by ten
//! times as much as the two sides differ. Steps whose loss or gradients are not finite put it off.
//!
//! It is a net with holes. Not seen: what is wrong by less than that; what this batch and these parameters do not
//! reach; wrong values whose gradient is that of the wrong values; and in the first step what is wrong before
//! parameters that are all zero, which it leaves as they are, all but gross errors in half precision (candle's sums of
//! half tensors, see [`stock_candle`](super::ops::stock_candle)), and what a loss hides that bends much. A gradient that is not the loss's on purpose (a detached branch, a straight-through
//! estimator) is reported, too, and so may be a loss that draws random numbers of its own (candle-nn's `Dropout`).

use amp::Autocast;
use candle_core::{DType, Result, Tensor};
use candle_nn::Init;

use super::model::Loss;
use super::ops::allows_tf32;
use super::ops::context::{random_position, set_random_position, without_autotune};
use super::{CandleEngine, init};
use crate::config::unknown;
use crate::data::Batch;
use crate::engine::{StepContext, TensorSpec, WrongGradient};
use crate::{Error, Result as RunnerResult};

/// What a forward pass changes, as it was before one.
pub(super) struct State {
    pub(super) buffers: Vec<Tensor>,
    random_position: u64,
}

impl State {
    pub(super) fn of(engine: &CandleEngine) -> Result<Self> {
        Ok(Self { buffers: engine.buffers.copies()?, random_position: random_position() })
    }

    pub(super) fn restore(&self, engine: &CandleEngine) -> Result<()> {
        set_random_position(self.random_position);
        engine.buffers.set_all(&self.buffers)
    }
}

/// A model, its parameters, and a direction for each.
struct Probe<'a> {
    engine: &'a CandleEngine,
    batch: &'a Batch,
    start: &'a State,
    params: Vec<Tensor>,
    directions: Vec<Tensor>,
}

impl<'a> Probe<'a> {
    /// Directions have the root mean square of their parameters; of those that are all zero, `of_zeros`.
    fn new(
        engine: &'a CandleEngine,
        batch: &'a Batch,
        start: &'a State,
        of_zeros: f64,
    ) -> Result<Self> {
        let params = engine.params.copies()?;
        let direction = |(param, spec): (&Tensor, &TensorSpec)| {
            let size = param.to_dtype(DType::F64)?.sqr()?.mean_all()?.to_scalar::<f64>()?.sqrt();
            let normal = Init::Randn { mean: 0.0, stdev: if size > 0.0 { size } else { of_zeros } };
            // Not the stream of the initial values: they would be the direction.
            let name = format!("direction of {}", spec.name);
            let values = init::values(normal, param.shape(), 0, &name);
            // Of half types moved in f32.
            let wide = if param.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
            Tensor::from_vec(values, param.shape(), param.device())?.to_dtype(wide)
        };
        let directions = params.iter().zip(&engine.params.specs).map(direction);
        let directions = directions.collect::<Result<_>>()?;
        Ok(Self { engine, batch, start, params, directions })
    }

    /// The loss where each parameter is so far along its direction.
    fn loss(&self, along: impl Fn(usize) -> f64) -> RunnerResult<Loss> {
        let moved = |(i, (param, direction)): (usize, (&Tensor, &Tensor))| {
            let moved = (param.to_dtype(direction.dtype())? + (direction * along(i))?)?;
            moved.to_dtype(param.dtype())
        };
        let moved = self.params.iter().zip(&self.directions).enumerate().map(moved);
        moved
            .collect::<Result<Vec<_>>>()
            .and_then(|moved| self.engine.params.set_all(&moved))
            .and_then(|()| self.start.restore(self.engine))
            .map_err(failed)?;
        self.engine.loss(self.batch)
    }

    fn number(&self, along: impl Fn(usize) -> f64) -> RunnerResult<f64> {
        self.loss(along)?.number().map_err(failed)
    }

    /// By parameter, what its gradient says the loss's slope is along its direction, and the norm of what that
    /// is a sum of; `None` without a gradient.
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

    /// Runs `call`, then puts back the parameters, and what a forward pass changes to `end`.
    fn aside<R>(&self, end: &State, call: impl FnOnce() -> R) -> RunnerResult<R> {
        let result = without_autotune(call);
        let params = self.engine.params.set_all(&self.params);
        params.and_then(|()| end.restore(self.engine)).map_err(failed)?;
        Ok(result)
    }
}

/// Parameters whose gradients are wrong; see [`Engine::check_gradients`](crate::engine::Engine::check_gradients).
pub(super) fn check(
    engine: &CandleEngine,
    batch: &Batch,
    ignore: &[String],
) -> RunnerResult<Vec<WrongGradient>> {
    let specs = &engine.params.specs;
    let names: Vec<&str> = specs.iter().map(|spec| spec.name.as_str()).collect();
    if let Some(name) = ignore.iter().find(|name| !names.contains(&name.as_str())) {
        return Err(Error::Config(unknown("parameter", name, &names)));
    }
    let start = State::of(engine).map_err(failed)?;
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
                // A NaN is not.
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

impl State {
    /// The comparison in a run's first step, which began with this. Called after the step's backward pass, with its loss and its gradients, which carry the loss scale. Warns in the
    /// context. A pass that fails says nothing; a failure to put parameters back is an error. Returns whether there was
    /// something to compare with; else the next step compares.
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
        // Each parameter goes the way in which its gradient is positive: no share takes another's away.
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
                "gradients do not match the loss: along a random direction it changes by {change:.3e}, by the \
                 gradients {predicted:.3e}; training goes on; `runner check CONFIG --gradients` names the parameters"
            ));
        }
        Ok(true)
    }
}

/// How far from the model's own parameters gradients are checked, as a share of their root mean square.
const NUDGE: f64 = 1e-3;

/// How far a first step's comparison goes, and the relative rounding error of what it computes with.
fn precision(engine: &CandleEngine) -> (f64, f64) {
    let autocast = Some(&engine.autocast).filter(|autocast| autocast.is_enabled());
    match (engine.dtype, autocast.map(Autocast::dtype)) {
        (DType::BF16, _) | (_, Some(amp::DType::Bf16)) => (3e-2, 2f64.powi(-8)),
        (DType::F16, _) | (_, Some(amp::DType::F16)) => (3e-2, 2f64.powi(-11)),
        // TF32 rounds factors to as many bits as f16 has.
        (DType::F32, None) if engine.device.is_cuda() && allows_tf32() => (3e-2, 2f64.powi(-11)),
        _ => (3e-4, 2f64.powi(-24)),
    }
}

fn failed(e: candle_core::Error) -> Error {
    Error::Engine(format!("checking gradients: {e}"))
}
