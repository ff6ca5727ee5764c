//! Lets the schedulers step.

use super::{Hook, Priority};
use crate::Result;
use crate::data::Batch;
use crate::engine::Losses;
use crate::runner::Runner;

/// Lets those that count iterations step after each (after a change of the number of ranks: after each of the
/// configuration's), those that count epochs after each, and those
/// that look at a validation's figures after each validation.
#[derive(Clone, Copy, Debug, Default)]
pub struct ParamSchedulerHook;

impl Hook for ParamSchedulerHook {
    fn name(&self) -> &'static str {
        "ParamSchedulerHook"
    }

    fn priority(&self) -> Priority {
        Priority::LOW
    }

    fn after_train_iter(&mut self, runner: &mut Runner, _: &Batch, _: &Losses) -> Result<()> {
        runner.step_iter_schedulers()
    }

    fn after_train_epoch(&mut self, runner: &mut Runner) -> Result<()> {
        runner.step_schedulers(&[], |s| !s.needs_metrics() && s.by_epoch())
    }

    fn after_val_epoch(&mut self, runner: &mut Runner, metrics: &[(String, f64)]) -> Result<()> {
        runner.step_schedulers(metrics, |s| s.needs_metrics())
    }
}
