//! Log lines in MMEngine's format, or a progress bar on a terminal.

use super::{Hook, Priority};
use crate::Result;
use crate::config::Section;
use crate::data::{Array, Batch};
use crate::engine::Losses;
use crate::runner::{EvalSplit, Runner, format_eval_line, format_eval_progress, format_train_line};

/// Every `interval` iterations, logs the smoothed scalars; after each validation or test, its
/// metrics.
///
/// Lines less than a tenth of a second apart are written together, to the terminal, the log and
/// `scalars.json`. So SIGKILL, or a second signal, can lose the lines of the last tenth of a
/// second, or of the current iteration if it takes longer; any other exit writes them all.
///
/// Follows: MMEngine 0.10.7, `hooks/logger_hook.py`.
#[derive(Clone, Copy, Debug)]
pub struct LoggerHook {
    /// Iterations between lines, 10.
    pub interval: usize,
    /// Whether the tail of an epoch that is shorter than the interval has no line, true.
    pub ignore_last: bool,
    /// Iterations between lines with the run's name, 1000; each epoch ends with one, too.
    pub interval_exp_name: usize,
    /// Whether a validation's metrics are recorded at the epoch, true; otherwise at the iteration.
    /// A run by iterations always records them at the iteration; MMEngine records 0 unless this is
    /// false.
    pub log_metric_by_epoch: bool,
}

impl LoggerHook {
    /// Logs a line every `interval` iterations of an epoch; 0 counts as 1.
    #[must_use]
    pub fn new(interval: usize) -> Self {
        let interval = interval.max(1);
        Self { interval, ignore_last: true, interval_exp_name: 1000, log_metric_by_epoch: true }
    }

    fn log_progress(&self, runner: &mut Runner, split: EvalSplit, index: usize) {
        let done = index + 1;
        let is_due = done.is_multiple_of(self.interval) && done < runner.eval_batches(split);
        if is_due && runner.logger().wants_info() {
            let line = format_eval_progress(runner, split, done);
            runner.logger().info(&line);
        }
    }
}

pub(super) fn read(section: &mut Section) -> Result<Box<dyn Hook>> {
    let mut hook = LoggerHook::new(section.count("interval", 10)?);
    hook.ignore_last = section.or("ignore_last", true)?;
    hook.interval_exp_name = section.count("interval_exp_name", 1000)?;
    hook.log_metric_by_epoch = section.or("log_metric_by_epoch", true)?;
    section.refuse("out_dir", "logs are written to the run's `work_dir`")?;
    Ok(Box::new(hook))
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
        runner.draw_progress(done)?;
        let ends = done == len;
        let is_read = runner.logger().wants_info();
        if is_read && (ends || (runner.position().iter + 1).is_multiple_of(self.interval_exp_name))
        {
            let line = format!("Exp name: {}", runner.experiment_name());
            runner.log_progress(&line);
        }
        // The tail of an epoch has no line; an epoch shorter than the interval has one.
        let tail = ends && (!self.ignore_last || len <= self.interval);
        if done.is_multiple_of(self.interval) || tail {
            if is_read {
                let line = format_train_line(runner, done)?;
                runner.log_progress(&line);
            }
            runner.write_train_scalars()?;
        }
        runner.flush_if_due()
    }

    fn after_train_epoch(&mut self, runner: &mut Runner) -> Result<()> {
        runner.flush()
    }

    fn before_val(&mut self, runner: &mut Runner) -> Result<()> {
        runner.flush()
    }

    fn after_val_iter(
        &mut self,
        runner: &mut Runner,
        index: usize,
        _: &Batch,
        _: &[(String, Array)],
    ) -> Result<()> {
        self.log_progress(runner, EvalSplit::Val, index);
        Ok(())
    }

    fn after_val_epoch(&mut self, runner: &mut Runner, metrics: &[(String, f64)]) -> Result<()> {
        let line = format_eval_line(runner, EvalSplit::Val, metrics);
        runner.logger().info(&line);
        runner.write_val_scalars(metrics, self.log_metric_by_epoch)
    }

    fn after_test_iter(
        &mut self,
        runner: &mut Runner,
        index: usize,
        _: &Batch,
        _: &[(String, Array)],
    ) -> Result<()> {
        self.log_progress(runner, EvalSplit::Test, index);
        Ok(())
    }

    fn after_test_epoch(&mut self, runner: &mut Runner, metrics: &[(String, f64)]) -> Result<()> {
        let line = format_eval_line(runner, EvalSplit::Test, metrics);
        runner.logger().info(&line);
        runner.write_test_scalars(metrics)
    }
}

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};

    use serde_json::Value;

    use super::*;
    use crate::testing::{Metrics, blank, builder};
    use crate::{Error, TrainConfig};

    /// Calls the function after iteration `.0`, after all other hooks.
    struct After<F>(usize, F);

    impl<F: FnMut(&Path) -> Result<()> + Send> Hook for After<F> {
        fn name(&self) -> &'static str {
            "After"
        }
        fn priority(&self) -> Priority {
            Priority::LOWEST
        }
        fn after_train_iter(&mut self, runner: &mut Runner, _: &Batch, _: &Losses) -> Result<()> {
            if runner.position().iter == self.0 { (self.1)(runner.work_dir()) } else { Ok(()) }
        }
    }

    /// Numbers of lines of the log and of the scalars on disk.
    fn written(dir: &Path) -> (usize, usize) {
        let stamp = std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().path()).find(|p| p.is_dir());
        let stamp = stamp.unwrap();
        let log: PathBuf = stamp.join(stamp.file_name().unwrap()).with_extension("log");
        let count = |path: &Path, what: &str| {
            let text = std::fs::read_to_string(path).unwrap();
            assert!(text.is_empty() || text.ends_with('\n'), "{text}");
            text.matches(what).count()
        };
        (count(&log, "Epoch(train)"), count(&stamp.join("vis_data/scalars.json"), "\"loss\": "))
    }

    #[test]
    fn lines_are_flushed_after_a_tenth_of_a_second_and_at_the_end_of_an_epoch() {
        let dir = tempfile::tempdir().unwrap();
        let sleep = |_: &Path| {
            std::thread::sleep(train_log::FLUSH_INTERVAL);
            Ok(())
        };
        let due = |dir: &Path| {
            assert_eq!(written(dir), (2, 2));
            Ok(())
        };
        let run = builder(dir.path(), 38).hook(Box::new(LoggerHook::new(10)));
        let run = run.hook(Box::new(After(20, sleep))).hook(Box::new(After(21, due)));
        let mut run = run.build().unwrap();
        run.train().unwrap();
        assert_eq!(written(dir.path()), (3, 3));
    }

    #[test]
    fn validation_is_recorded_at_its_iteration_in_a_run_by_iterations() {
        let by_iters = TrainConfig { val_interval: 20, ..TrainConfig::by_iters(60) };
        let by_epochs = TrainConfig::new(2);
        for (train, by_epoch, want) in [
            (by_iters.clone(), true, vec![20, 40, 60]),
            (by_epochs.clone(), true, vec![1, 2]),
            (by_epochs, false, vec![24, 48]),
        ] {
            let dir = tempfile::tempdir().unwrap();
            let hook = LoggerHook { log_metric_by_epoch: by_epoch, ..LoggerHook::new(10) };
            let run = builder(dir.path(), 24).train_cfg(train);
            let run =
                run.validation(blank(5), Metrics::new([[("constant", 1.0)]])).hook(Box::new(hook));
            run.build().unwrap().train().unwrap();
            let stamps = std::fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().path());
            let files = stamps.map(|stamp| stamp.join("vis_data/scalars.json"));
            let text = std::fs::read_to_string(files.into_iter().find(|f| f.is_file()).unwrap());
            let text = text.unwrap();
            let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
            let lines = lines.filter(|line| line["constant"].is_number());
            let steps: Vec<_> = lines.map(|line| line["step"].as_u64().unwrap()).collect();
            assert_eq!(steps, want);
        }
    }

    #[test]
    fn failed_run_flushes_its_log() {
        let dir = tempfile::tempdir().unwrap();
        let fail = |_: &Path| Err(Error::data("on purpose"));
        let run = builder(dir.path(), 38).hook(Box::new(LoggerHook::new(10)));
        run.hook(Box::new(After(25, fail))).build().unwrap().train().unwrap_err();
        assert_eq!(written(dir.path()), (2, 2));
    }
}
