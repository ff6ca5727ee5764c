//! Schedulers of learning rate and momentum.
//!
//! They follow MMEngine's, with its names and defaults. A [`Scheduler`] counts steps (epochs or
//! iterations), and between `begin` and `end` computes the next value of each parameter group from
//! the current one by its [`Shape`]. Because it starts from the current value, schedulers can be
//! chained or combined. It takes its first step when it is created, which sets the value at the
//! beginning of training.
//!
//! A checkpoint contains schedulers with their configuration. As in MMEngine, a resumed run uses
//! the saved ones even if the configuration has changed, because a recursive formula with other
//! numbers would not follow its own curve. Differences are logged.

mod plateau;
mod schedules;
mod shape;

use std::collections::BTreeSet;
use std::ops::Range;

use serde::{Deserialize, Serialize};
use serde_json::Value;

pub use plateau::{Comparison, Plateau, Threshold, find_metric};
pub use schedules::Schedules;
pub use shape::{Anneal, Floor, OneCycle, Shape};

use crate::{Error, Result};

/// The value of a parameter group that a scheduler changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Param {
    /// The learning rate.
    Lr,
    /// Momentum, or the decay rate of a first moment.
    Momentum,
}

/// A scheduler, as configured.
#[derive(Clone, Debug, PartialEq)]
pub struct SchedulerConfig {
    /// Value that it changes.
    pub param: Param,
    /// Formula of the values.
    pub shape: Shape,
    /// First step at which it is active.
    pub begin: u64,
    /// First step at which it is no longer active; by default the end of the run for shapes that
    /// depend on their length, and never for others.
    pub end: Option<u64>,
    /// Whether it counts epochs; otherwise iterations.
    pub by_epoch: bool,
    /// Whether its numbers, which are in epochs, are converted to iterations.
    pub convert_to_iter_based: bool,
    /// Part of the optimizer whose groups it changes; all groups if not set.
    pub part: Option<String>,
}

impl SchedulerConfig {
    /// Creates a configuration for the whole run, by epochs: it changes with
    /// [`Schedules::step_epoch`].
    #[must_use]
    pub const fn new(param: Param, shape: Shape) -> Self {
        let (begin, end, by_epoch) = (0, None, true);
        Self { param, shape, begin, end, by_epoch, convert_to_iter_based: false, part: None }
    }

    /// Creates a configuration for the whole run, by iterations.
    #[must_use]
    pub const fn by_iters(param: Param, shape: Shape) -> Self {
        let mut config = Self::new(param, shape);
        config.by_epoch = false;
        config
    }

    /// Returns whether it needs a run that counts epochs: in a plateau only `begin` and `end` are
    /// in epochs.
    #[must_use]
    pub const fn counts_epochs(&self) -> bool {
        let needs_none =
            matches!(self.shape, Shape::Plateau(_)) && self.begin == 0 && self.end.is_none();
        self.by_epoch && !self.convert_to_iter_based && !needs_none
    }
}

/// Error of a scheduler by iterations whose numbers would be converted to iterations.
pub const NOT_BY_EPOCHS: &str = "`convert_to_iter_based` needs `by_epoch = true`";

/// Length of a run, for values that a configuration does not set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunLength {
    /// Epochs of the run.
    pub epochs: u64,
    /// Iterations of the run.
    pub iters: u64,
    /// Iterations of an epoch.
    pub epoch_length: u64,
}

impl RunLength {
    /// A run that counts no epochs: its schedulers are by iterations, and none is converted from
    /// epochs.
    #[must_use]
    pub const fn of_iters(iters: u64) -> Self {
        Self { epochs: 1, iters, epoch_length: 0 }
    }
}

/// An active scheduler, as saved in a checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Scheduler {
    param: Param,
    shape: Shape,
    begin: u64,
    end: u64,
    by_epoch: bool,
    groups: Range<usize>,
    progress: Progress,
}

/// State of a scheduler.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Progress {
    /// Number of steps, including the first one at creation.
    global_step: u64,
    /// Number of steps between begin and end.
    own_steps: u64,
    /// Values before any scheduler changed them, by group.
    base: Vec<f64>,
    /// State of a plateau.
    plateau: plateau::Progress,
}

impl Scheduler {
    /// Creates a scheduler of the parameter groups from group 0 on, and takes its first step, which
    /// sets `values`, by group, to those at the beginning of training. `base` contains the groups'
    /// values before any scheduler; a [`OneCycle`] replaces them for itself and later schedulers.
    ///
    /// # Errors
    ///
    /// [`Error::Schedule`] if `end` is not after `begin`, if a number of the shape is invalid, or
    /// if a [`OneCycle`] is shorter than the run and its `end`.
    pub fn new(
        config: &SchedulerConfig,
        span: RunLength,
        base: &mut [f64],
        values: &mut [f64],
    ) -> Result<Self> {
        let SchedulerConfig { param, mut shape, begin, end, by_epoch, .. } = config.clone();
        let convert_to_iter_based = config.convert_to_iter_based;
        let factor = if convert_to_iter_based { span.epoch_length } else { 1 };
        if convert_to_iter_based && !by_epoch {
            return Err(Error::Schedule(NOT_BY_EPOCHS.into()));
        }
        if factor == 0 && span.iters > 0 {
            let text = "`convert_to_iter_based` needs the number of iterations of an epoch, and this run counts no \
                        epochs: give `RunLength` its `epoch_length`, or count iterations (`by_epoch = false`)";
            return Err(Error::Schedule(text.into()));
        }
        let whole = if by_epoch { span.epochs } else { span.iters };
        // A run of no epochs or iterations takes no step.
        let last = if whole == 0 { begin.saturating_add(1) } else { whole };
        let [begin, end, whole] =
            [begin, end.unwrap_or(last), whole].map(|steps| steps.saturating_mul(factor));
        if end <= begin {
            let text = format!("end should be larger than begin, but got begin={begin}, end={end}");
            return Err(Error::Schedule(text));
        }
        shape.validate()?;
        if !is_finite(&to_json(&shape)) {
            // Checkpoints are written in JSON, which has no other numbers.
            return Err(Error::Schedule("a scheduler's numbers must be finite".into()));
        }
        shape.stretch(factor);
        // If a run is extended later, its scheduler then took the step at the first end, too.
        let end = if config.end.is_none() && shape.is_endless() { u64::MAX } else { end };
        if let Shape::OneCycle(cycle) = &shape {
            // The last epoch or iteration is also followed by a step.
            let steps = end.min(whole.saturating_add(1)).saturating_sub(begin);
            if steps > cycle.total_steps {
                return Err(Error::Schedule(format!(
                    "`total_steps` is {}, but the cycle has {steps} steps: increase it, or set an earlier `end`",
                    cycle.total_steps
                )));
            }
            base.fill(cycle.initial());
        }
        let progress = Progress {
            global_step: 0,
            own_steps: 0,
            base: base.to_owned(),
            plateau: plateau::Progress::default(),
        };
        let by_epoch = by_epoch && !convert_to_iter_based;
        let groups = 0..values.len();
        let mut scheduler = Self { param, shape, begin, end, by_epoch, groups, progress };
        scheduler.step(values, None)?;
        Ok(scheduler)
    }

    /// Moves it to the same number of groups from group `first` on.
    fn moved_to(mut self, first: usize) -> Self {
        self.groups = first..first + self.groups.len();
        self
    }

    /// Returns the groups whose values it changes.
    #[must_use]
    pub fn groups(&self) -> Range<usize> {
        self.groups.clone()
    }

    /// Returns the value that it changes.
    #[must_use]
    pub const fn param(&self) -> Param {
        self.param
    }

    /// Returns whether it counts epochs; otherwise iterations.
    #[must_use]
    pub const fn by_epoch(&self) -> bool {
        self.by_epoch
    }

    /// Returns whether its steps need the metrics of a validation.
    #[must_use]
    pub const fn needs_metrics(&self) -> bool {
        matches!(self.shape, Shape::Plateau(_))
    }

    /// Takes a step: sets `values`, by group, to those of the next epoch or iteration, which a
    /// plateau only counts; or, with the `metrics` of a validation, lets a plateau update them.
    ///
    /// # Errors
    ///
    /// [`Error::Schedule`] if a plateau's metric is missing in `metrics`, with the known names.
    pub fn step(&mut self, values: &mut [f64], metrics: Option<&[(String, f64)]>) -> Result<()> {
        let (steps, counted) = (self.begin..self.end, self.steps());
        let Progress { global_step, own_steps, base, plateau } = &mut self.progress;
        match (&self.shape, metrics) {
            (Shape::Plateau(shape), Some(metrics)) if steps.contains(&counted) => {
                return plateau.step(shape, values, metrics);
            }
            (_, Some(_)) => return Ok(()),
            (shape, None) if steps.contains(global_step) => {
                for (value, base) in values.iter_mut().zip(base) {
                    *value = shape.next(*own_steps, self.end - self.begin, *value, *base);
                }
                *own_steps += 1;
            }
            (_, None) => {}
        }
        *global_step += 1;
        Ok(())
    }

    /// Number of steps since its creation.
    #[must_use]
    pub const fn steps(&self) -> u64 {
        self.progress.global_step.saturating_sub(1)
    }

    /// Multiplies its initial values.
    fn scale_base(&mut self, factor: f64) {
        self.progress.base.iter_mut().for_each(|base| *base *= factor);
    }

    /// Replaces it by the `saved` one. Returns a text for each difference from the configured one.
    ///
    /// # Errors
    ///
    /// [`Error::OtherGroups`] if the numbers of groups differ.
    pub fn resume(&mut self, saved: Self) -> Result<Vec<String>> {
        let (was, is) = (saved.progress.base.len(), self.progress.base.len());
        if was != is {
            return Err(Error::OtherGroups { was, is });
        }
        let made = std::mem::replace(self, saved);
        let [saved, made] = [&*self, &made].map(|scheduler| {
            let mut json = to_json(scheduler);
            json["progress"].take();
            json
        });
        let mut texts = Vec::new();
        differences("", &saved, &made, &mut texts);
        if !texts.is_empty() && self.progress.global_step >= self.end {
            texts.push("it has ended, so its values no longer change".to_owned());
        }
        Ok(texts)
    }
}

/// Adds a text for each `saved` value that differs from the configured one.
pub fn differences(key: &str, saved: &Value, configured: &Value, texts: &mut Vec<String>) {
    match (saved, configured) {
        (Value::Object(a), Value::Object(b)) => {
            let keys: BTreeSet<_> = a.keys().chain(b.keys()).collect();
            keys.into_iter().for_each(|key| differences(key, &saved[key], &configured[key], texts));
        }
        (Value::Array(a), Value::Array(b)) if a.len() == b.len() => {
            a.iter().zip(b).for_each(|(a, b)| differences(key, a, b, texts));
        }
        _ if saved == configured => {}
        _ => {
            let [saved, configured] = [saved, configured].map(|value| match value {
                _ if value.is_null() || *value == u64::MAX => "none".to_owned(),
                _ => value.to_string(),
            });
            texts.push(format!("`{key}` = {saved} instead of {configured}"));
        }
    }
}

fn is_finite(json: &Value) -> bool {
    match json {
        Value::Null => false,
        Value::Array(values) => values.iter().all(is_finite),
        Value::Object(values) => values.values().all(is_finite),
        _ => true,
    }
}

/// Converts to JSON; `null` for values that JSON cannot represent.
fn to_json(value: &impl Serialize) -> Value {
    serde_json::to_value(value).unwrap_or_default()
}
