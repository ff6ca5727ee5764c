//! Checks gradients against differences of the loss: of each parameter on request, of all together
//! in a run's first step. Stock candle has operators with a wrong gradient or none, and reports no
//! error; [`stock_candle`](candle_ops::stock_candle) lists them.
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
//! [`compare`] takes gradients at the parameters as they are, and runs one forward pass on each
//! side. The change of the loss differs if it is off the change predicted by the gradients by more
//! than 5%, by more than rounding errors in the passes' precision, and by more than ten times the
//! difference between the two sides.
//!
//! Limits. Not detected: smaller errors; errors in operators that this batch or these parameters do
//! not reach; wrong values with a matching gradient. Not detected by [`compare`]: errors before
//! parameters that are all zero, which are not moved; in half precision, all but large errors
//! (candle's sums of half tensors), and in bf16 gradients that are too large, or noise; errors
//! hidden by a large curvature of the loss. Reported, too: gradients that intentionally differ from
//! the loss's (a detached branch, a straight-through estimator), and possibly a loss that draws its
//! own random numbers (candle-nn's `Dropout`).

use candle_core::{DType, Result, Tensor};
use candle_nn::Init;
use candle_ops::context::without_autotune;
use candle_ops::nn::initial_values;
use train_step::{TensorSpec, WrongGradient};

use crate::Tensors;

/// A forward pass that can be run again on other parameters.
pub trait Repeatable {
    /// Error of a pass.
    type Error;

    /// The trained parameters.
    fn params(&self) -> &Tensors;

    /// Restores the state that a forward pass changes, such as statistics of norm layers and the
    /// position in random numbers, as it was before the first one.
    ///
    /// # Errors
    ///
    /// Those of candle.
    fn restore(&self) -> Result<()>;

    /// Runs the forward pass; the loss has one element.
    ///
    /// # Errors
    ///
    /// Those of the model.
    fn loss(&mut self) -> std::result::Result<Tensor, Self::Error>;

    /// Runs the forward pass and the backward pass; returns the loss, and gradients by the indices
    /// of parameters.
    ///
    /// # Errors
    ///
    /// Those of the model.
    #[expect(clippy::type_complexity, reason = "a pair")]
    fn gradients(&mut self) -> std::result::Result<(Tensor, Vec<(usize, Tensor)>), Self::Error>;

    /// An error of candle outside of the passes.
    fn failed(error: candle_core::Error) -> Self::Error;
}

/// The only element of a loss.
///
/// # Errors
///
/// Several elements.
pub fn number(loss: &Tensor) -> Result<f64> {
    loss.to_dtype(DType::F64)?.flatten_all()?.squeeze(0)?.to_scalar()
}

/// A model, its parameters, and a direction for each.
struct Probe<'a, P> {
    pass: &'a mut P,
    params: Vec<Tensor>,
    directions: Vec<Tensor>,
}

impl<'a, P: Repeatable> Probe<'a, P> {
    /// Creates directions with the root mean square of their parameters, or `of_zeros` for
    /// parameters that are all zero.
    fn new(pass: &'a mut P, of_zeros: f64) -> Result<Self> {
        let params = pass.params().copies()?;
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
        let directions = params.iter().zip(&pass.params().specs).map(direction);
        let directions = directions.collect::<Result<_>>()?;
        Ok(Self { pass, params, directions })
    }

    /// Moves parameter `i` by `along(i)` times its direction, and restores the other state.
    fn move_by(&self, along: impl Fn(usize) -> f64) -> std::result::Result<(), P::Error> {
        let moved = |(i, (param, direction)): (usize, (&Tensor, &Tensor))| {
            let moved = (param.to_dtype(direction.dtype())? + (direction * along(i))?)?;
            moved.to_dtype(param.dtype())
        };
        let moved = self.params.iter().zip(&self.directions).enumerate().map(moved);
        let moved = moved.collect::<Result<Vec<_>>>();
        let set = moved.and_then(|moved| self.pass.params().set_all(&moved));
        set.and_then(|()| self.pass.restore()).map_err(P::failed)
    }

    /// Returns the loss of moved parameters.
    fn loss(&mut self, along: impl Fn(usize) -> f64) -> std::result::Result<f64, P::Error> {
        self.move_by(along)?;
        number(&self.pass.loss()?).map_err(P::failed)
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

    /// Runs `call`, then restores the parameters and the other state.
    fn aside<R>(&mut self, call: impl FnOnce(&mut Self) -> R) -> std::result::Result<R, P::Error> {
        let result = without_autotune(|| call(self));
        let params = self.pass.params().set_all(&self.params);
        params.and_then(|()| self.pass.restore()).map_err(P::failed)?;
        Ok(result)
    }
}

/// Returns the parameters with wrong gradients among those that `wanted` accepts by index and name.
/// Runs a forward and a backward pass, and four forward passes for each of these. Parameters and
/// the state of forward passes are restored.
///
/// # Errors
///
/// Those of a pass; a failure to restore parameters.
pub fn check<P: Repeatable>(
    pass: &mut P,
    wanted: impl Fn(usize, &str) -> bool,
) -> std::result::Result<Vec<WrongGradient>, P::Error> {
    let mut probe = Probe::new(pass, 0.1).map_err(P::failed)?;
    probe.aside(|probe| {
        probe.move_by(|_| NUDGE)?;
        let (loss, gradients) = probe.pass.gradients()?;
        let middle = number(&loss).map_err(P::failed)?;
        let (tolerance, rounding, steps) = match loss.dtype() == DType::F64 {
            true => (1e-3, 1e-13 * middle.abs(), [1e-6, 1e-5]),
            false => (0.1, 1e-6 * middle.abs(), [1e-3, 4e-3]),
        };
        let slopes = probe.slopes(&gradients).map_err(P::failed)?;
        drop((loss, gradients));
        let names = probe.pass.params().specs.iter().map(|spec| spec.name.clone());
        let names: Vec<String> = names.collect();
        let mut wrong = Vec::new();
        for (at, name) in names.into_iter().enumerate().filter(|(at, name)| wanted(*at, name)) {
            let (gradient, norm) = slopes[at].unwrap_or_default();
            let (mut difference, mut is_wrong) = (0.0, true);
            for step in steps {
                let mut loss_at = |by| probe.loss(|i| if i == at { NUDGE + by } else { NUDGE });
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
                wrong.push(WrongGradient { name, gradient, difference });
            }
        }
        Ok(wrong)
    })?
}

/// Result of [`compare`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Compared {
    /// The gradients match the loss, as far as two passes tell.
    Alike,
    /// Along a random direction the loss changes otherwise than the gradients say.
    Different {
        /// Change of the loss.
        change: f64,
        /// The change according to the gradients.
        predicted: f64,
    },
    /// The loss or a gradient is not finite.
    NotFinite,
    /// A pass failed on other parameters.
    Failed,
}

/// Compares the loss and the gradients of a pass, which have been multiplied by `scale`, with one
/// forward pass on each side. `precision` is the size of the step and the relative rounding error.
/// Parameters and the state of forward passes are restored.
///
/// # Errors
///
/// A failure to restore parameters.
pub fn compare<P: Repeatable>(
    pass: &mut P,
    (loss, scale): (f64, f64),
    gradients: &[(usize, Tensor)],
    (step, epsilon): (f64, f64),
) -> std::result::Result<Compared, P::Error> {
    let Ok(mut probe) = Probe::new(pass, 0.0) else { return Ok(Compared::Failed) };
    let Ok(slopes) = probe.slopes(gradients) else { return Ok(Compared::Failed) };
    // Each parameter moves in the direction of its gradient, so that contributions do not cancel.
    let slope = slopes.iter().flatten().map(|(slope, _)| slope.abs() / scale).sum::<f64>();
    if !slope.is_finite() || !loss.is_finite() {
        return Ok(Compared::NotFinite);
    }
    let sign = |i: usize| match slopes[i] {
        Some((slope, _)) if slope < 0.0 => -1.0,
        _ => 1.0,
    };
    let sides = probe.aside(|probe| -> std::result::Result<_, P::Error> {
        Ok((probe.loss(|i| sign(i) * step)?, probe.loss(|i| -sign(i) * step)?))
    })?;
    let Ok((up, down)) = sides else { return Ok(Compared::Failed) };
    let (change, predicted) = (up - down, 2.0 * step * slope);
    let off = (change - predicted).abs();
    let share = 0.05 * change.abs().max(predicted.abs());
    let kinks = 10.0 * (up - 2.0 * loss + down).abs();
    let rounding = 8.0 * epsilon * (loss.abs() + slope);
    Ok(match off > share && off > kinks && off > rounding {
        true => Compared::Different { change, predicted },
        false => Compared::Alike,
    })
}

/// Distance from the model's parameters to the point of the check, as a share of their root mean
/// square.
const NUDGE: f64 = 1e-3;
