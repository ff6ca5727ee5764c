//! Ends a run whose metric no longer improves.

use serde_json::{Value, json};
use train_step::find_metric;

use super::monitor::rule_of;
use super::{Hook, Priority};
use crate::config::Section;
use crate::runner::Runner;
use crate::schedulers::Comparison;
use crate::{Error, Result};

/// Ends the run after `patience` validations without improvement of a metric, when the metric
/// passes a threshold, or when it is not finite.
///
/// The counts are saved, so a resumed run ends at the same validation. MMEngine does not save them.
#[derive(Clone, Debug, PartialEq)]
pub struct EarlyStoppingHook {
    /// Name of the metric.
    pub monitor: String,
    /// Decides whether a value is better.
    pub rule: Comparison,
    /// Minimum change that counts as an improvement, 0.1.
    pub min_delta: f64,
    /// Number of validations without improvement after which the run ends, 5.
    pub patience: u64,
    /// Whether a validation without the metric is an error; otherwise it is a warning.
    pub strict: bool,
    /// Whether a metric that is not finite ends the run, true.
    pub check_finite: bool,
    /// The run ends when the metric is better than this.
    pub stopping_threshold: Option<f64>,
    best: Option<f64>,
    waited: u64,
    /// Last value of the metric.
    last: Option<f64>,
}

impl EarlyStoppingHook {
    /// Creates the hook with MMEngine's defaults and the rule derived from the metric's name.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] if no rule can be derived.
    pub fn new(monitor: &str) -> Result<Self> {
        Ok(Self::with_rule(monitor, rule_of(monitor)?))
    }

    /// Creates the hook with a rule and MMEngine's other defaults.
    #[must_use]
    pub fn with_rule(monitor: &str, rule: Comparison) -> Self {
        Self {
            monitor: monitor.to_owned(),
            rule,
            min_delta: 0.1,
            patience: 5,
            strict: false,
            check_finite: true,
            stopping_threshold: None,
            best: None,
            waited: 0,
            last: None,
        }
    }

    /// Counts a validation's metric. Returns the reason for which the run ends, if it does.
    fn count(&mut self, score: f64) -> Option<String> {
        self.last = Some(score);
        if self.ends_with(score).is_none() {
            let score_with_margin = self.rule.worsen(score, self.min_delta);
            let is_better = |best| self.rule.is_better(score_with_margin, best);
            // After a NaN no value would compare as better.
            if score.is_finite() && self.best.is_none_or(is_better) {
                (self.best, self.waited) = (Some(score), 0);
            } else {
                self.waited += 1;
            }
        }
        self.is_over()
    }

    /// Returns the reason for which the run ends after the last value, if it does.
    fn is_over(&self) -> Option<String> {
        let (monitor, score) = (&self.monitor, self.last?);
        self.ends_with(score).or_else(|| {
            let (best, waited) = (self.best.unwrap_or(score), self.waited);
            (waited >= self.patience)
                .then(|| format!("`{monitor}` has not improved on {best} for {waited} validations"))
        })
    }

    /// Returns the reason for which this value ends the run, if it does.
    fn ends_with(&self, score: f64) -> Option<String> {
        let monitor = &self.monitor;
        if self.check_finite && !score.is_finite() {
            return Some(format!("`{monitor}` is {score}"));
        }
        let threshold = self.stopping_threshold?;
        self.rule
            .is_better(score, threshold)
            .then(|| format!("`{monitor}` is {score}, better than {threshold}"))
    }

    fn stop(&self, runner: &mut Runner) {
        if let Some(why) = self.is_over() {
            runner.logger().info(&format!("early stopping: {why}"));
            runner.stop_training();
        }
    }
}

pub(super) fn read(section: &mut Section) -> Result<Box<dyn Hook>> {
    let offset = section.offset_of("monitor");
    let monitor: String = section.required("monitor")?;
    let rule = match section.has("rule") {
        true => section.choice("rule", "less", &Comparison::NAMES)?,
        false => rule_of(&monitor)
            .or_else(|error| section.note(offset.error(error)).map(|()| Comparison::Less))?,
    };
    let mut hook = EarlyStoppingHook::with_rule(&monitor, rule);
    hook.min_delta = section.or("min_delta", hook.min_delta)?;
    hook.patience = section.count("patience", hook.patience)?;
    hook.strict = section.or("strict", hook.strict)?;
    hook.check_finite = section.or("check_finite", hook.check_finite)?;
    hook.stopping_threshold = section.optional("stopping_threshold")?;
    Ok(Box::new(hook))
}

impl Hook for EarlyStoppingHook {
    fn name(&self) -> &'static str {
        "EarlyStoppingHook"
    }

    fn priority(&self) -> Priority {
        Priority::LOWEST
    }

    /// A run ended by this hook does not continue when resumed.
    fn before_train(&mut self, runner: &mut Runner) -> Result<()> {
        self.stop(runner);
        Ok(())
    }

    fn after_val_epoch(&mut self, runner: &mut Runner, metrics: &[(String, f64)]) -> Result<()> {
        match find_metric(metrics, &self.monitor) {
            _ if !runner.is_training() => Ok(()),
            Ok(score) => {
                self.count(score);
                self.stop(runner);
                Ok(())
            }
            Err(why) if self.strict => Err(Error::config(format!("EarlyStoppingHook: {why}"))),
            Err(why) => {
                runner.logger().warning(&format!("EarlyStoppingHook: {why}"));
                Ok(())
            }
        }
    }

    fn metrics(&self) -> Vec<String> {
        vec![self.monitor.clone()]
    }

    fn state_dict(&self) -> Option<Value> {
        // As text, because JSON has no non-finite numbers.
        let last = self.last.map(|last| last.to_string());
        Some(json!({ "best": self.best, "waited": self.waited, "last": last }))
    }

    fn load_state_dict(&mut self, state: &Value) -> Result<()> {
        self.best = state["best"].as_f64();
        self.waited = state["waited"].as_u64().unwrap_or(0);
        self.last = state["last"].as_str().and_then(|last| last.parse().ok());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the number of metrics after which the run ends.
    fn ends(hook: &mut EarlyStoppingHook, scores: &[f64]) -> Option<usize> {
        scores.iter().position(|&score| hook.count(score).is_some()).map(|at| at + 1)
    }

    #[test]
    fn patience_counts_validations_without_sufficient_improvement() {
        let mut hook = EarlyStoppingHook::new("accuracy").unwrap();
        (hook.patience, hook.min_delta) = (2, 1.0);
        // 81 is better than 80, but not by more than 1; 82 is.
        assert_eq!(ends(&mut hook.clone(), &[80.0, 81.0, 82.0, 50.0, 83.0, 90.0]), Some(5));
        let mut hook = EarlyStoppingHook { rule: Comparison::Less, ..hook };
        assert_eq!(ends(&mut hook, &[3.0, 1.5, 1.0, 0.6]), Some(4));
    }

    #[test]
    fn threshold_and_nan_end_the_run_at_once() {
        let mut hook = EarlyStoppingHook::new("loss").unwrap();
        hook.stopping_threshold = Some(0.5);
        assert_eq!(ends(&mut hook.clone(), &[2.0, 0.5, 0.4]), Some(3));
        assert_eq!(ends(&mut hook.clone(), &[2.0, f64::NAN]), Some(2));
        hook.check_finite = false;
        assert_eq!(ends(&mut hook, &[2.0, f64::NAN]), None);
        let mut hook = EarlyStoppingHook { patience: 2, ..EarlyStoppingHook::new("loss").unwrap() };
        hook.check_finite = false;
        for first in [f64::NAN, f64::NEG_INFINITY] {
            assert_eq!(ends(&mut hook.clone(), &[first, 3.0, 2.0, 1.0]), None, "{first}");
        }
    }

    #[test]
    fn counts_are_saved() {
        let mut hook = EarlyStoppingHook { patience: 3, ..EarlyStoppingHook::new("acc").unwrap() };
        assert_eq!(ends(&mut hook, &[5.0, 4.0, 4.0]), None);
        let mut other = EarlyStoppingHook { patience: 3, ..EarlyStoppingHook::new("acc").unwrap() };
        other.load_state_dict(&hook.state_dict().unwrap()).unwrap();
        assert_eq!(hook, other);
        assert_eq!(other.is_over(), None);
        assert_eq!(ends(&mut other, &[4.0]), Some(1));
        // The end is saved, too, unless patience is increased.
        hook.load_state_dict(&other.state_dict().unwrap()).unwrap();
        assert!(hook.is_over().is_some());
        hook.patience = 4;
        assert_eq!(hook.is_over(), None);
        hook.count(f64::NAN);
        other.load_state_dict(&hook.state_dict().unwrap()).unwrap();
        assert_eq!(other.is_over().unwrap(), "`acc` is NaN");
    }
}
