//! Times data loading and iterations, and estimates the remaining time.

use std::time::{Duration, Instant};

use super::Hook;
use crate::Result;
use crate::data::Batch;
use crate::engine::Losses;
use crate::runner::Runner;

/// Logs `data_time` and `time` of each iteration, and estimates the remaining time from the mean of
/// all iterations since the run (or the resumed part of it) began.
#[derive(Debug, Default)]
pub struct IterTimerHook {
    last: Option<Instant>,
    spent: Duration,
    iterations: usize,
}

impl Hook for IterTimerHook {
    fn name(&self) -> &'static str {
        "IterTimerHook"
    }

    fn before_train_epoch(&mut self, _runner: &mut Runner) -> Result<()> {
        self.last = Some(Instant::now());
        Ok(())
    }

    fn before_train_iter(&mut self, runner: &mut Runner, _batch: &mut Batch) -> Result<()> {
        let waited = self.last.map_or(Duration::ZERO, |last| last.elapsed());
        runner.scalars_mut().push("data_time", waited.as_secs_f64());
        Ok(())
    }

    fn after_train_iter(&mut self, runner: &mut Runner, _: &Batch, _: &Losses) -> Result<()> {
        let now = Instant::now();
        let took = self.last.map_or(Duration::ZERO, |last| now - last);
        self.last = Some(now);
        self.spent += took;
        self.iterations += 1;
        runner.scalars_mut().push("time", took.as_secs_f64());
        let left = runner.max_iters().saturating_sub(runner.position().iter + 1);
        let average = self.spent.as_secs_f64() / self.iterations as f64;
        let eta = Duration::try_from_secs_f64(average * left as f64);
        let mut eta = eta.unwrap_or(Duration::MAX);
        if let Some(budget) = runner.budget_left() {
            eta = eta.min(budget);
        }
        runner.set_eta(eta);
        Ok(())
    }

    /// A run by iterations continues in the same epoch.
    fn after_val(&mut self, _: &mut Runner) -> Result<()> {
        self.last = Some(Instant::now());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runner::TrainConfig;
    use crate::testing::builder;

    #[test]
    fn validation_time_is_not_counted_in_the_next_iteration() {
        let dir = tempfile::tempdir().unwrap();
        let mut run = builder(dir.path(), 1).build().unwrap();
        let start = Instant::now();
        let mut hook = IterTimerHook { last: Some(start), ..IterTimerHook::default() };
        std::thread::sleep(Duration::from_millis(1));
        hook.after_val(&mut run).unwrap();
        assert!(hook.last > Some(start));
    }

    #[test]
    fn endless_run_has_a_remaining_time() {
        let dir = tempfile::tempdir().unwrap();
        let run = builder(dir.path(), 1).train_cfg(TrainConfig::by_iters(usize::MAX));
        let mut run = run.time_budget(Some(Duration::MAX)).build().unwrap();
        let mut hook = IterTimerHook { spent: Duration::from_secs(2), ..IterTimerHook::default() };
        let losses = Losses::default();
        hook.after_train_iter(&mut run, &Batch::new(), &losses).unwrap();
        assert_eq!(run.eta(), Duration::MAX);
    }
}
