//! MMEngine's log lines, or a progress bar on a terminal.

use super::{Hook, Priority};
use crate::Result;
use crate::config::Section;
use crate::data::Batch;
use crate::engine::Losses;
use crate::runner::Runner;
use crate::sinks::{format_train_line, format_val_line};

/// Every `interval` batches, logs the smoothed scalars; after each validation, its figures.
#[derive(Debug)]
pub struct LoggerHook {
    interval: usize,
    ignore_last: bool,
}

impl LoggerHook {
    /// A line every `interval` batches of an epoch; 0 counts as 1.
    #[must_use]
    pub fn new(interval: usize) -> Self {
        Self { interval: interval.max(1), ignore_last: true }
    }
}

pub(super) fn read(section: &mut Section) -> Result<Box<dyn Hook>> {
    let interval = section.or_checked("interval", 10, "at least 1", |n: &usize| *n >= 1)?;
    let ignore_last = section.or("ignore_last", true)?;
    Ok(Box::new(LoggerHook { interval, ignore_last }))
}

impl Hook for LoggerHook {
    fn name(&self) -> &'static str {
        "LoggerHook"
    }

    fn priority(&self) -> Priority {
        Priority::BELOW_NORMAL
    }

    fn after_train_iter(&mut self, runner: &mut Runner, _: &Batch, _: &Losses) -> Result<()> {
        let (done, len) = (runner.position().batch + 1, runner.batches_per_epoch());
        runner.draw_progress(done);
        // A tail shorter than the interval says little; an epoch shorter than it must say something.
        let tail = done == len && (!self.ignore_last || len <= self.interval);
        if done % self.interval != 0 && !tail {
            return Ok(());
        }
        let line = format_train_line(runner, done);
        runner.log_progress(&line);
        runner.write_train_scalars()
    }

    fn after_val(&mut self, runner: &mut Runner, metrics: &[(String, f64)]) -> Result<()> {
        let line = format_val_line(runner, metrics);
        runner.logger().info(&line);
        runner.write_val_scalars(metrics)
    }
}
