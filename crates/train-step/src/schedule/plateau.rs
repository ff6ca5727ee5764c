//! `Plateau`: reduces a value when a metric no longer improves.

use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// Multiplies the value by `factor` if a metric of the validation has not improved for more than
/// `patience` steps.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Plateau {
    /// Name of the metric.
    pub monitor: String,
    /// Decides whether a metric is better.
    pub rule: Comparison,
    /// Factor of a reduction, below 1.
    pub factor: f64,
    /// Number of steps without improvement that are tolerated.
    pub patience: u64,
    /// Minimum improvement of the metric.
    pub threshold: f64,
    /// Meaning of `threshold`.
    pub threshold_rule: Threshold,
    /// Number of steps after a reduction that are not counted.
    pub cooldown: u64,
    /// Minimum of the value.
    pub min_value: f64,
    /// Minimum change of the value.
    pub eps: f64,
}

impl Default for Plateau {
    /// MMEngine's values: a tenth after more than ten validations without a smaller `loss`.
    fn default() -> Self {
        Self {
            monitor: "loss".into(),
            rule: Comparison::Less,
            factor: 0.1,
            patience: 10,
            threshold: 1e-4,
            threshold_rule: Threshold::Rel,
            cooldown: 0,
            min_value: 0.0,
            eps: 1e-8,
        }
    }
}

/// Decides which of two metrics is better.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Comparison {
    /// The smaller one is better.
    Less,
    /// The greater one is better.
    Greater,
}

impl Comparison {
    /// MMEngine's names.
    pub const NAMES: [(&'static str, Self); 2] = [("less", Self::Less), ("greater", Self::Greater)];

    /// Returns whether `a` is better than `b`.
    #[must_use]
    pub fn is_better(self, a: f64, b: f64) -> bool {
        match self {
            Self::Less => a < b,
            Self::Greater => a > b,
        }
    }

    /// Returns `value` made worse by `margin`.
    #[must_use]
    pub fn worsen(self, value: f64, margin: f64) -> f64 {
        match self {
            Self::Less => value + margin,
            Self::Greater => value - margin,
        }
    }
}

/// Meaning of a threshold of improvement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Threshold {
    /// Fraction of the best metric's magnitude.
    Rel,
    /// Absolute difference.
    Abs,
}

/// State of a plateau; `best` is `None` before the first metric.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Progress {
    best: Option<f64>,
    bad_steps: u64,
    cooldown: u64,
}

impl Progress {
    pub(super) fn step(
        &mut self,
        plateau: &Plateau,
        values: &mut [f64],
        metrics: &[(String, f64)],
    ) -> Result<()> {
        let metric = find_metric(metrics, &plateau.monitor)
            .map_err(|why| Error::Schedule(format!("`monitor` of the scheduler: {why}")))?;
        // After a NaN no value would compare as better.
        if metric.is_finite() && self.best.is_none_or(|best| plateau.is_better(metric, best)) {
            (self.best, self.bad_steps) = (Some(metric), 0);
        } else {
            self.bad_steps += 1;
        }
        if self.cooldown > 0 {
            self.cooldown -= 1;
            self.bad_steps = 0;
        }
        if self.bad_steps > plateau.patience {
            (self.cooldown, self.bad_steps) = (plateau.cooldown, 0);
            for value in values {
                let new = (*value * plateau.factor).max(plateau.min_value);
                if *value - new > plateau.eps {
                    *value = new;
                }
            }
        }
        Ok(())
    }
}

/// Returns the metric of this name; the error text names the known ones.
///
/// # Errors
///
/// If there is none.
pub fn find_metric(metrics: &[(String, f64)], name: &str) -> Result<f64, String> {
    let found = metrics.iter().find(|(known, _)| known == name);
    found.map(|(_, value)| *value).ok_or_else(|| {
        let names: Vec<_> = metrics.iter().map(|(name, _)| name.as_str()).collect();
        format!("no metric `{name}`; known: {}", names.join(", "))
    })
}

impl Plateau {
    fn is_better(&self, metric: f64, best: f64) -> bool {
        let margin = match self.threshold_rule {
            Threshold::Rel => self.threshold * best.abs(),
            Threshold::Abs => self.threshold,
        };
        self.rule.is_better(metric, self.rule.worsen(best, -margin))
    }
}
