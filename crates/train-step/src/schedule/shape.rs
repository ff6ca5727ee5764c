//! `Shape`: computes the next value of a schedule from the current one.
//!
//! Formulas are MMEngine's (`mmengine/optim/scheduler/param_scheduler.py`), which compute each
//! value from the previous one instead of from the first, so that schedulers can be combined. `t`
//! counts a scheduler's own steps from 0.

use std::f64::consts::PI;

use serde::{Deserialize, Serialize};

use super::Plateau;
use crate::{Error, Result};

/// Formula of the next value.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type")]
#[non_exhaustive]
pub enum Shape {
    /// Multiplies the value by `factor`, until the end.
    Constant {
        /// Factor above 0, up to 1.
        factor: f64,
    },
    /// Follows half a period of the cosine from the first value down to `floor` in `t_max` steps,
    /// and back.
    CosineAnnealing {
        /// Steps of half a period; by default all steps.
        #[serde(rename = "T_max", default, skip_serializing_if = "Option::is_none")]
        t_max: Option<u64>,
        /// Minimum value.
        floor: Floor,
    },
    /// Falls from a fraction of the first value to `floor`, repeatedly.
    CosineRestart {
        /// Steps of each period.
        periods: Vec<u64>,
        /// Fraction of the first value at the beginning of each period.
        restart_weights: Vec<f64>,
        /// Minimum value.
        floor: Floor,
    },
    /// Multiplies by `gamma` at each step.
    Exponential {
        /// Factor.
        gamma: f64,
    },
    /// Moves from `start_factor` to `end_factor` of the value, in equal steps.
    Linear {
        /// Factor above 0, up to 1.
        start_factor: f64,
        /// Factor from 0 to 1.
        end_factor: f64,
    },
    /// Multiplies by `gamma` at each milestone, twice if it is listed twice.
    MultiStep {
        /// Steps at which the value changes.
        milestones: Vec<u64>,
        /// Factor.
        gamma: f64,
    },
    /// Rises and falls once.
    OneCycle(OneCycle),
    /// Falls to `eta_min` at the end, by a power of the remaining fraction.
    Poly {
        /// Exponent.
        power: f64,
        /// Value at the end.
        eta_min: f64,
    },
    /// Multiplies by `gamma` every `step_size` steps.
    Step {
        /// Number of steps, at least 1.
        step_size: u64,
        /// Factor.
        gamma: f64,
    },
    /// Falls when a metric of the validation no longer improves.
    Plateau(Plateau),
}

/// Minimum of a cosine.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub enum Floor {
    /// An absolute value, also for groups with smaller ones.
    Value(f64),
    /// A fraction of the first value.
    Ratio(f64),
}

/// Interpolation between two values of a [`OneCycle`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Anneal {
    /// Cosine.
    Cos,
    /// Linear.
    Linear,
}

/// Smith's one-cycle policy: rises to `eta_max`, then falls far below the first value. All groups
/// have these values, whatever their own.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OneCycle {
    /// Maximum value.
    pub eta_max: f64,
    /// Total number of steps.
    pub total_steps: u64,
    /// Fraction of the steps in which the value rises, 0.3.
    pub pct_start: f64,
    /// Interpolation.
    pub anneal: Anneal,
    /// Divisor of `eta_max` that yields the first value, 25.
    pub div_factor: f64,
    /// Divisor of the first value that yields the last value, 1e4.
    pub final_div_factor: f64,
    /// Whether the value returns to the first one before it falls further.
    pub three_phase: bool,
}

impl Shape {
    /// Multiplies all numbers of steps by `factor`.
    pub(super) fn stretch(&mut self, factor: u64) {
        let stretch = |steps: &mut u64| *steps = steps.saturating_mul(factor);
        match self {
            Self::CosineAnnealing { t_max: Some(t_max), .. } => stretch(t_max),
            Self::CosineRestart { periods, .. } => periods.iter_mut().for_each(stretch),
            Self::MultiStep { milestones, .. } => milestones.iter_mut().for_each(stretch),
            Self::OneCycle(cycle) => stretch(&mut cycle.total_steps),
            Self::Step { step_size, .. } => stretch(step_size),
            _ => {}
        }
    }

    /// Checks the numbers.
    ///
    /// # Errors
    ///
    /// [`Error::Schedule`] for a number out of range, with its key in MMEngine's configurations.
    pub fn validate(&self) -> Result<()> {
        let (part, some) = (0.0..=1.0, |count: u64| count > 0);
        let (valid, what) = match self {
            Self::Constant { factor } => {
                (part.contains(factor) && *factor > 0.0, "`factor` must be above 0 and at most 1")
            }
            Self::Linear { start_factor, .. }
                if !part.contains(start_factor) || *start_factor == 0.0 =>
            {
                (false, "`start_factor` must be above 0 and at most 1")
            }
            Self::Linear { end_factor, .. } => {
                (part.contains(end_factor), "`end_factor` must be from 0 to 1")
            }
            Self::Exponential { gamma }
            | Self::Step { gamma, .. }
            | Self::MultiStep { gamma, .. }
                if *gamma < 0.0 =>
            {
                (false, "`gamma` must not be negative")
            }
            Self::Poly { power, .. } => (*power >= 0.0, "`power` must not be negative"),
            Self::MultiStep { milestones, .. } => {
                (milestones.is_sorted(), "`milestones` must be in ascending order")
            }
            Self::CosineAnnealing { t_max: Some(t_max), .. } => {
                (some(*t_max), "`T_max` must be at least 1")
            }
            Self::CosineRestart { periods, .. } if !periods.iter().copied().all(some) => {
                (false, "`periods` must each be at least 1")
            }
            Self::CosineRestart { periods, restart_weights, .. } => (
                periods.len() == restart_weights.len(),
                "`restart_weights` and `periods` must have equal lengths",
            ),
            Self::Step { step_size, .. } => (some(*step_size), "`step_size` must be at least 1"),
            Self::OneCycle(cycle) if !some(cycle.total_steps) => {
                (false, "`total_steps` must be at least 1")
            }
            Self::OneCycle(cycle) if cycle.div_factor <= 0.0 || cycle.final_div_factor <= 0.0 => {
                (false, "`div_factor` and `final_div_factor` must be above 0")
            }
            Self::OneCycle(cycle) => {
                (part.contains(&cycle.pct_start), "`pct_start` must be from 0 to 1")
            }
            Self::Plateau(plateau) if plateau.factor.is_nan() || plateau.factor >= 1.0 => {
                (false, "`factor` must be below 1")
            }
            Self::Plateau(plateau) => {
                (plateau.threshold >= 0.0, "`threshold` must not be negative")
            }
            _ => (true, ""),
        };
        if valid { Ok(()) } else { Err(Error::Schedule(what.into())) }
    }

    /// Returns whether [`next`](Self::next) ignores the number of steps.
    pub(super) const fn is_endless(&self) -> bool {
        match self {
            Self::Exponential { .. }
            | Self::Step { .. }
            | Self::MultiStep { .. }
            | Self::CosineRestart { .. }
            | Self::Plateau(_) => true,
            Self::CosineAnnealing { t_max, .. } => t_max.is_some(),
            Self::Constant { .. } | Self::Linear { .. } | Self::OneCycle(_) | Self::Poly { .. } => {
                false
            }
        }
    }

    /// Returns the value at step `t` of `steps`, from the previous value and the value before any
    /// scheduler.
    pub(super) fn next(&self, t: u64, steps: u64, value: f64, base: f64) -> f64 {
        let last = steps - 1;
        match self {
            Self::Constant { factor } if t == 0 => value * factor,
            Self::Constant { factor } if t == last => value * (1.0 / factor),
            Self::Linear { start_factor, .. } if t == 0 => value * start_factor,
            Self::Linear { start_factor, end_factor } => {
                let rise = end_factor - start_factor;
                let before = last as f64 * start_factor + (t - 1) as f64 * rise;
                value * (1.0 + rise / before)
            }
            Self::Exponential { gamma } if t > 0 => value * gamma,
            Self::Step { step_size, gamma } if t > 0 && t.is_multiple_of(*step_size) => {
                value * gamma
            }
            Self::MultiStep { milestones, gamma } => {
                let count = milestones.iter().filter(|&&milestone| milestone == t).count();
                value * gamma.powi(i32::try_from(count).unwrap_or(i32::MAX))
            }
            Self::Poly { power, eta_min } if t > 0 => {
                let left = 1.0 - 1.0 / (last - t + 1) as f64;
                (value - eta_min) * left.powf(*power) + eta_min
            }
            Self::CosineAnnealing { t_max, floor } if t > 0 => {
                anneal(t, t_max.unwrap_or(steps), floor.of(base), value, base)
            }
            Self::CosineRestart { periods, restart_weights, floor } => {
                restart(t, periods, restart_weights, floor.of(base), [value, base]).unwrap_or(value)
            }
            Self::OneCycle(cycle) => cycle.at(t),
            _ => value,
        }
    }
}

impl Floor {
    fn of(self, base: f64) -> f64 {
        match self {
            Self::Value(value) => value,
            Self::Ratio(ratio) => base * ratio,
        }
    }
}

/// Computes a step of cosine annealing.
fn anneal(t: u64, t_max: u64, floor: f64, value: f64, base: f64) -> f64 {
    let angle = |t: u64| PI * t as f64 / t_max as f64;
    // At the minimum the quotient below is undefined.
    if (t - 1) % (2 * t_max) == t_max {
        return value + (base - floor) * (1.0 - angle(1).cos()) / 2.0;
    }
    (1.0 + angle(t).cos()) / (1.0 + angle(t - 1).cos()) * (value - floor) + floor
}

/// Computes a step of cosine annealing with restarts from the previous value; `None` after the last
/// period.
fn restart(
    t: u64,
    periods: &[u64],
    weights: &[f64],
    floor: f64,
    [value, base]: [f64; 2],
) -> Option<f64> {
    let mut start = 0;
    for (&period, weight) in periods.iter().zip(weights) {
        if t == start {
            return Some(weight * base);
        }
        if t < start + period {
            return Some(anneal(t - start, period, floor, value, base));
        }
        start += period;
    }
    None
}

impl OneCycle {
    /// A cycle with MMEngine's other values: a rise over 0.3 of the steps by a cosine, from a 25th
    /// of the maximum.
    #[must_use]
    pub const fn new(eta_max: f64, total_steps: u64) -> Self {
        let (div_factor, final_div_factor) = (25.0, 1e4);
        let (pct_start, anneal, three_phase) = (0.3, Anneal::Cos, false);
        Self { eta_max, total_steps, pct_start, anneal, div_factor, final_div_factor, three_phase }
    }

    /// Returns the first value.
    pub(super) fn initial(&self) -> f64 {
        self.eta_max / self.div_factor
    }

    fn at(&self, t: u64) -> f64 {
        let (initial, steps) = (self.initial(), self.total_steps as f64);
        // The value stays at the last one.
        let t = (t as f64).min(steps - 1.0);
        let least = initial / self.final_div_factor;
        let top = self.pct_start * steps - 1.0;
        // End of each phase: step and value.
        let phases = if self.three_phase {
            let back = 2.0 * self.pct_start * steps - 2.0;
            vec![(top, self.eta_max), (back, initial), (steps - 1.0, least)]
        } else {
            vec![(top, self.eta_max), (steps - 1.0, least)]
        };
        let (mut start, mut from) = (0.0, initial);
        for (end, to) in phases {
            if t <= end || end >= steps - 1.0 {
                // A rise of one step has no length.
                let done = if end > start { (t - start) / (end - start) } else { 1.0 };
                return match self.anneal {
                    Anneal::Cos => to + (from - to) / 2.0 * ((PI * done).cos() + 1.0),
                    Anneal::Linear => (to - from) * done + from,
                };
            }
            (start, from) = (end, to);
        }
        from
    }
}
