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
mod read;
mod shape;

use std::collections::BTreeSet;
use std::ops::Range;

use serde::{Deserialize, Serialize};
use serde_json::Value;

pub use plateau::{Plateau, Rule, Threshold};
pub use read::PARAM_SCHEDULERS;
pub(crate) use read::read_all;
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
    /// Creates a configuration for the whole run, by epochs.
    #[must_use]
    pub const fn new(param: Param, shape: Shape) -> Self {
        let (begin, end, by_epoch) = (0, None, true);
        Self { param, shape, begin, end, by_epoch, convert_to_iter_based: false, part: None }
    }

    /// Returns whether it needs a run that counts epochs: in a plateau only `begin` and `end` are
    /// in epochs.
    pub(crate) const fn counts_epochs(&self) -> bool {
        let needs_none =
            matches!(self.shape, Shape::Plateau(_)) && self.begin == 0 && self.end.is_none();
        self.by_epoch && !self.convert_to_iter_based && !needs_none
    }
}

const NOT_BY_EPOCHS: &str = "`convert_to_iter_based` needs `by_epoch = true`";

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
    /// [`Error::Config`] if `end` is not after `begin`, if a number of the shape is invalid, or if
    /// a [`OneCycle`] is shorter than the run and its `end`.
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
            return Err(Error::Config(NOT_BY_EPOCHS.into()));
        }
        let whole = if by_epoch { span.epochs } else { span.iters };
        // A run of no epochs or iterations takes no step.
        let last = if whole == 0 { begin + 1 } else { whole };
        let [begin, end, whole] =
            [begin, end.unwrap_or(last), whole].map(|steps| steps.saturating_mul(factor));
        if end <= begin {
            let text = format!("end should be larger than begin, but got begin={begin}, end={end}");
            return Err(Error::Config(text));
        }
        shape.validate()?;
        if !is_finite(&to_json(&shape)) {
            // Checkpoints are written in JSON, which has no other numbers.
            return Err(Error::Config("a scheduler's numbers must be finite".into()));
        }
        shape.stretch(factor);
        // If a run is extended later, its scheduler then took the step at the first end, too.
        let end = if config.end.is_none() && shape.is_endless() { u64::MAX } else { end };
        if let Shape::OneCycle(cycle) = &shape {
            // The last epoch or iteration is also followed by a step.
            let steps = end.min(whole.saturating_add(1)).saturating_sub(begin);
            if steps > cycle.total_steps {
                return Err(Error::Config(format!(
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
    pub(crate) fn moved_to(mut self, first: usize) -> Self {
        self.groups = first..first + self.groups.len();
        self
    }

    /// Returns the groups whose values it changes.
    pub(crate) fn groups(&self) -> Range<usize> {
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
    /// [`Error::Config`] if a plateau's metric is missing in `metrics`, with the known names.
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
    pub(crate) const fn steps(&self) -> u64 {
        self.progress.global_step.saturating_sub(1)
    }

    /// Multiplies its initial values.
    pub(crate) fn scale_base(&mut self, factor: f64) {
        self.progress.base.iter_mut().for_each(|base| *base *= factor);
    }

    /// Replaces it by the `saved` one. Returns a text for each difference from the configured one.
    ///
    /// # Errors
    ///
    /// [`Error::Checkpoint`] if the numbers of groups differ.
    pub fn resume(&mut self, saved: Self) -> Result<Vec<String>> {
        let (was, is) = (saved.progress.base.len(), self.progress.base.len());
        if was != is {
            let text = format!(
                "the checkpoint's scheduler has {was} parameter groups, the run's has {is}"
            );
            return Err(Error::Checkpoint(text));
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
pub(crate) fn differences(key: &str, saved: &Value, configured: &Value, texts: &mut Vec<String>) {
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

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;
    use crate::config::Config;

    const ENDLESS: RunLength =
        RunLength { epochs: 1_000_000_000, iters: 1_000_000_000, epoch_length: 1 };

    fn recorded() -> Value {
        serde_json::from_str(include_str!("../../tests/vectors/schedulers.json")).unwrap()
    }

    /// Reads a scheduler from a configuration with the arguments of a recording.
    fn read(kind: &str, args: &Value) -> Result<SchedulerConfig> {
        let mut text = format!("type = '{kind}'\n");
        for (key, value) in args.as_object().unwrap() {
            match key.as_str() {
                "convert" => text += "convert_to_iter_based = true\n",
                "epoch_len" => {}
                key => text += &format!("{key} = {value}\n"),
            }
        }
        PARAM_SCHEDULERS.build(Config::from_text("c.toml", &text)?.into_section())
    }

    fn floats(values: &Value) -> Vec<f64> {
        values.as_array().unwrap().iter().map(|value| value.as_f64().unwrap()).collect()
    }

    /// Runs a chain of schedulers on one value and compares it step by step.
    fn check(
        chain: &[SchedulerConfig],
        span: RunLength,
        initial: f64,
        expected: &[f64],
        what: &Value,
    ) {
        let (mut base, mut values) = ([initial], [initial]);
        let make = |config| Scheduler::new(config, span, &mut base, &mut values).unwrap();
        let mut chain: Vec<_> = chain.iter().map(make).collect();
        for (step, expected) in expected.iter().enumerate() {
            let [value] = values;
            let off = (value - expected).abs();
            assert!(off <= 1e-9 * expected.abs(), "{what}: step {step}: {value}, not {expected}");
            // Each step restores the scheduler from its saved form.
            for scheduler in &mut chain {
                let saved = serde_json::to_string(scheduler).unwrap();
                let texts = scheduler.resume(serde_json::from_str(&saved).unwrap()).unwrap();
                assert!(texts.is_empty(), "{texts:?}");
                scheduler.step(&mut values, None).unwrap();
            }
        }
    }

    #[test]
    fn schedulers_match_mmengine() {
        for case in recorded()["single"].as_array().unwrap() {
            let kind = case["type"].as_str().unwrap();
            let config = read(kind, &case["args"]).unwrap();
            let initial = case[if kind.ends_with("LR") { "lr" } else { "momentum" }].as_f64();
            let epoch_length = case["args"]["epoch_len"].as_u64().unwrap_or(1);
            // A recording of a cycle ends with the cycle.
            let epochs = case["args"]["total_steps"].as_u64().unwrap_or(ENDLESS.epochs);
            let span = RunLength { epochs, epoch_length, ..ENDLESS };
            check(&[config], span, initial.unwrap(), &floats(&case["values"]), case);
        }
    }

    #[test]
    fn chained_schedulers_match_mmengine() {
        for case in recorded()["chain"].as_array().unwrap() {
            let one = |part: &Value| read(part[0].as_str().unwrap(), &part[1]).unwrap();
            let chain: Vec<_> = case["chain"].as_array().unwrap().iter().map(one).collect();
            check(&chain, ENDLESS, 0.1, &floats(&case["values"]), case);
        }
    }

    /// A restart starts from the value that other schedulers have changed.
    #[test]
    fn restart_in_a_chain_matches_mmengine() {
        let restarts = serde_json::json!({
            "periods": [3, 4], "restart_weights": [1, 0.5], "eta_min": 0.001
        });
        let steps = serde_json::json!({ "step_size": 2, "gamma": 0.7, "begin": 1 });
        let chain = [("CosineRestartLR", restarts), ("StepLR", steps)];
        let chain = chain.map(|(kind, args)| read(kind, &args).unwrap());
        let values = [
            0.1,
            0.075_250_000_000_000_01,
            0.025_750_000_000_000_016,
            0.034_999_999_999_999_996,
            0.030_020_815_280_171_306,
            0.012_599_999_999_999_998,
            0.004_397_561_338_236_05,
            0.003_078_292_936_765_234_7,
        ];
        check(&chain, ENDLESS, 0.1, &values, &Value::Null);
    }

    #[test]
    fn plateau_matches_mmengine() {
        let case = &recorded()["reduce_on_plateau"];
        let config = read("ReduceOnPlateauLR", &case["args"]).unwrap();
        let (mut base, mut values) = ([0.1], [0.1]);
        let mut scheduler = Scheduler::new(&config, ENDLESS, &mut base, &mut values).unwrap();
        assert!(scheduler.needs_metrics());
        let expected = floats(&case["values"]);
        for (metric, expected) in floats(&case["metrics"]).into_iter().zip(expected) {
            let saved = serde_json::to_string(&scheduler).unwrap();
            scheduler.resume(serde_json::from_str(&saved).unwrap()).unwrap();
            scheduler.step(&mut values, Some(&[("loss".into(), metric)])).unwrap();
            assert!((values[0] - expected).abs() < 1e-9, "{values:?} {expected}");
        }
        let error = scheduler.step(&mut values, Some(&[("accuracy".into(), 1.0)])).unwrap_err();
        assert!(error.to_string().contains("no metric `loss`; known: accuracy"), "{error}");
    }

    #[test]
    fn plateau_ignores_non_finite_metrics() {
        for first in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            let config = read("ReduceOnPlateauLR", &serde_json::json!({ "patience": 1 })).unwrap();
            let mut values = [0.1];
            let mut scheduler = Scheduler::new(&config, ENDLESS, &mut [0.1], &mut values).unwrap();
            for metric in [first, 3.0, 2.0, 1.0] {
                scheduler.step(&mut values, Some(&[("loss".into(), metric)])).unwrap();
            }
            assert_eq!(values, [0.1], "{first}");
        }
    }

    /// The relative threshold of a negative metric applies to its magnitude.
    #[test]
    fn relative_plateau_of_a_negative_metric_reduces() {
        for (rule, better) in [("less", -1.2), ("greater", -0.8)] {
            let text = format!(
                "type = 'ReduceOnPlateauLR'\nrule = '{rule}'\nthreshold = 0.1\npatience = 1"
            );
            let section = Config::from_text("c.toml", text).unwrap().into_section();
            let config = PARAM_SCHEDULERS.build(section).unwrap();
            let mut values = [1.0];
            let mut scheduler = Scheduler::new(&config, ENDLESS, &mut [1.0], &mut values).unwrap();
            let mut after = |metric: f64| {
                scheduler.step(&mut values, Some(&[("loss".into(), metric)])).unwrap();
                values[0]
            };
            // The first is the best; equal ones are not better.
            assert_eq!([-1.0; 3].map(&mut after), [1.0, 1.0, 0.1], "{rule}");
            assert_eq!([-1.0, better].map(&mut after), [0.1; 2], "{rule}");
        }
    }

    /// Shapes that do not depend on their length.
    #[test]
    fn extended_run_equals_a_run_of_that_length() {
        for text in [
            "type = 'ExponentialLR'\ngamma = 0.9",
            "type = 'StepLR'\nstep_size = 2",
            "type = 'MultiStepLR'\nmilestones = [1, 3, 5]",
            "type = 'CosineAnnealingLR'\nT_max = 5",
            "type = 'CosineRestartLR'\nperiods = [3, 3]\nrestart_weights = [1.0, 0.5]",
        ] {
            let config =
                PARAM_SCHEDULERS.build(Config::from_text("c", text).unwrap().into_section());
            let config = config.unwrap();
            let made = |epochs, values: &mut [f64]| {
                let span = RunLength { epochs, iters: epochs, epoch_length: 1 };
                Scheduler::new(&config, span, &mut [1.0], values).unwrap()
            };
            let (mut long, mut short) = ([1.0], [1.0]);
            let (mut whole, mut first) = (made(6, &mut long), made(3, &mut short));
            for _ in 0..3 {
                whole.step(&mut long, None).unwrap();
                first.step(&mut short, None).unwrap();
            }
            let mut second = made(6, &mut [1.0]);
            assert_eq!(second.resume(first.clone()).unwrap(), [""; 0]);
            for epoch in 3..6 {
                assert_eq!(short, long, "{text}, epoch {epoch}");
                whole.step(&mut long, None).unwrap();
                second.step(&mut short, None).unwrap();
            }
        }
    }

    #[test]
    fn invalid_schedulers_are_refused_at_creation() {
        for (text, wanted) in [
            ("type = 'ConstantLR'\nbegin = 3\nend = 3", "begin=3, end=3"),
            ("type = 'ConstantLR'\nfactor = 1.5", "factor"),
            ("type = 'ConstantLR'\nfactor = 0", "factor"),
            ("type = 'LinearLR'\nstart_factor = 0", "start_factor"),
            ("type = 'OneCycleLR'\neta_max = 1\ntotal_steps = 9", "`total_steps` is 9"),
            ("type = 'OneCycleLR'\neta_max = 1\ntotal_steps = 9\nend = 10", "`total_steps` is 9"),
            ("type = 'StepLR'\nstep_size = 0", "step_size"),
            ("type = 'StepLR'\nstep_size = 1\ngamma = inf", "must be finite"),
            ("type = 'CosineRestartLR'\nperiods = [1, 2]\neta_min = 0.0", "restart_weights"),
            ("type = 'CosineAnnealingLR'\neta_min = 0\neta_min_ratio = 0", "eta_min_ratio"),
            ("type = 'OneCycleMomentum'\neta_max = 1\ntotal_steps = 9", "unknown scheduler"),
            (
                "type = 'StepLR'\nstep_size = 1\nby_epoch = false\nconvert_to_iter_based = true",
                "epoch",
            ),
        ] {
            let section = Config::from_text("c.toml", text).unwrap().into_section();
            let made = PARAM_SCHEDULERS
                .build(section)
                .and_then(|config| Scheduler::new(&config, ENDLESS, &mut [0.1], &mut [0.1]));
            let error = made.map(drop).unwrap_err().to_string();
            assert!(error.contains(wanted), "{text}: {error}");
        }
    }

    #[test]
    fn cycle_with_a_rise_of_one_step_begins_at_its_maximum() {
        let args = serde_json::json!({ "eta_max": 1.0, "total_steps": 10, "pct_start": 0.1 });
        let config = read("OneCycleLR", &args).unwrap();
        let span = RunLength { epochs: 10, ..ENDLESS };
        let mut values = [0.1];
        let mut scheduler = Scheduler::new(&config, span, &mut [0.1], &mut values).unwrap();
        assert_eq!(values, [1.0]);
        for _ in 0..9 {
            scheduler.step(&mut values, None).unwrap();
            assert!(values[0] < 1.0, "{values:?}");
        }
    }
}
