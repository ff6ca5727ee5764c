//! Schedulers of a run: their length, and steps by [`ParamSchedulerHook`].

use fused_optim::{HyperParam, Optimizer};
use train_step::Schedules;

use super::agreement::compare;
use super::{Hook, Length, Priority, Runner, TrainConfig};
use crate::Result;
use crate::checkpoint::Position;
use crate::data::Batch;
use crate::engine::Losses;
use crate::optim_wrapper::OptimWrapper;
use crate::schedulers::{RunLength, SchedulerConfig};

/// Creates the schedulers of a run. `epoch_length` and `train` are in iterations of the
/// configuration.
pub(super) fn make_schedules(
    configs: Vec<SchedulerConfig>,
    train: &TrainConfig,
    epoch_length: usize,
    optim: &mut OptimWrapper,
) -> Result<Schedules> {
    let parts = optim.parts().to_vec();
    let length = run_length(train, epoch_length);
    Ok(Schedules::new(configs, length, &parts, optim.optimizer_mut())?)
}

/// Creates the schedulers again, for epochs of another length.
pub(super) fn remake(
    schedules: &mut Schedules,
    train: &TrainConfig,
    epoch_length: usize,
    optim: &mut OptimWrapper,
) -> Result<()> {
    let parts = optim.parts().to_vec();
    let length = run_length(train, epoch_length);
    Ok(schedules.remake(length, &parts, optim.optimizer_mut())?)
}

fn run_length(train: &TrainConfig, epoch_length: usize) -> RunLength {
    let iters = train.length.iters(epoch_length);
    let epochs = match train.length {
        Length::Epochs(epochs) => epochs,
        // A run that only evaluates has no epochs.
        Length::Iters(iters) => iters.div_ceil(epoch_length.max(1)),
    };
    let (epochs, iters, epoch_length) = (epochs as u64, iters as u64, epoch_length as u64);
    RunLength { epochs, iters, epoch_length }
}

/// Returns the schedulers as texts, which must be equal on all ranks.
pub(super) fn options(schedules: &Schedules) -> impl Iterator<Item = (String, String)> {
    let all = schedules.all().iter().enumerate();
    all.map(|(index, scheduler)| (format!("param_scheduler {index}"), format!("{scheduler:?}")))
}

/// Returns the number of steps that the current iteration is for schedulers that count iterations:
/// one, or, after a change of the layout, the iterations of the configuration that it completes.
fn iters_of(schedules: &Schedules, position: &Position) -> u64 {
    let Position { iter, begun, .. } = *position;
    match schedules.iters().filter(|_| begun.first.is_some()) {
        Some(taken) => (begun.scale.to_configured(iter + 1) as u64).saturating_sub(taken),
        None => 1,
    }
}

/// Steps the schedulers: those that count iterations after each iteration (of the configuration, if
/// the layout has changed), those that count epochs after each epoch, and those that need metrics
/// also after each validation.
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
        let count = iters_of(&runner.schedules, &runner.position);
        Ok(runner.schedules.step_iters(count, runner.optim.optimizer_mut())?)
    }

    fn after_train_epoch(&mut self, runner: &mut Runner) -> Result<()> {
        Ok(runner.schedules.step_epoch(runner.optim.optimizer_mut())?)
    }

    fn after_val_epoch(&mut self, runner: &mut Runner, metrics: &[(String, f64)]) -> Result<()> {
        match runner.is_training() {
            true => Ok(runner.schedules.step_metrics(metrics, runner.optim.optimizer_mut())?),
            false => Ok(()),
        }
    }
}

/// Hyper-parameters that hooks may set between steps.
const CHANGEABLE: [HyperParam; 3] = [HyperParam::Lr, HyperParam::Momentum, HyperParam::WeightDecay];

/// Returns the hyper-parameters that hooks may set, by group.
fn changeable(optimizer: &dyn Optimizer) -> impl Iterator<Item = (usize, HyperParam, f64)> {
    let all = (0..optimizer.group_count()).flat_map(|group| CHANGEABLE.map(|param| (group, param)));
    all.filter_map(|(group, param)| {
        Some((group, param, optimizer.hyper_param(group, param).ok()??))
    })
}

/// Returns a number that differs if hyper-parameters differ (FNV-1a).
pub(super) fn digest(optimizer: &dyn Optimizer) -> u64 {
    changeable(optimizer)
        .flat_map(|(.., value)| value.to_bits().to_le_bytes())
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        })
}

impl Runner {
    /// Returns an error, on every rank, if ranks have different hyper-parameters: their weights
    /// would diverge. Every rank calls it.
    pub(super) fn compare_rates(&self) -> Result<()> {
        let own = changeable(self.optim.optimizer());
        let own = own.map(|(group, param, value)| (format!("{param} of group {group}"), value));
        let own: Vec<_> = own.map(|(name, value)| (name, value.to_string())).collect();
        let iter = self.position.iter;
        compare(&self.group, &format!("hyper-parameters at iteration {iter}"), &own)
    }
}

/// Scales every group's learning rate from batches of `base` samples to `batch`. Returns the
/// message for the log.
pub(super) fn scale_lr(
    optimizer: &mut dyn Optimizer,
    batch: usize,
    base: Option<usize>,
) -> Result<Option<String>> {
    let Some(base) = base else { return Ok(None) };
    let factor = batch as f64 / base as f64;
    let groups = 0..optimizer.group_count();
    let values: Vec<_> = groups.map(|group| optimizer.lr(group)).collect::<Result<_, _>>()?;
    let scaled: Vec<_> = values.iter().map(|lr| lr * factor).collect();
    for (group, lr) in scaled.iter().enumerate() {
        optimizer.set_lr(group, *lr)?;
    }
    let rate = |rates: &[f64]| rates.first().copied().unwrap_or(f64::NAN);
    Ok(Some(format!(
        "auto_scale_lr: learning rate {} instead of {}: a batch of all ranks has {batch} samples, and \
         base_batch_size is {base}",
        rate(&scaled),
        rate(&values)
    )))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use collective::ProcessGroup;
    use fused_optim::Clip;

    use super::*;
    use crate::hooks::EarlyStoppingHook;
    use crate::runner::RunnerBuilder;
    use crate::schedulers::{Comparison, Param, Plateau, Shape};
    use crate::testing::{Metrics, blank, builder, sgd};

    /// Halves the learning rate after each validation without improvement.
    fn plateau() -> Shape {
        Shape::Plateau(Plateau {
            monitor: "acc".into(),
            rule: Comparison::Greater,
            factor: 0.5,
            patience: 0,
            ..Plateau::default()
        })
    }

    #[test]
    fn validation_outside_of_training_does_not_step_schedulers() {
        let dir = tempfile::tempdir().unwrap();
        let metrics = Metrics::new([f64::INFINITY, 1.0, 2.0].map(|acc| [("acc", acc)]));
        let run =
            builder(dir.path(), 1).train_cfg(TrainConfig::new(2)).validation(blank(1), metrics);
        let run = run.param_scheduler(SchedulerConfig::new(Param::Lr, plateau()));
        let run = run.hook(Box::new(EarlyStoppingHook::new("acc").unwrap()));
        let mut run = run.build().unwrap();
        run.validate().unwrap();
        run.train().unwrap();
        assert_eq!((run.position().epoch, run.lr()), (2, 0.1));
    }

    #[test]
    fn plateau_begins_and_ends_at_epochs_or_iterations() {
        // Validations after epochs 2, 4, 6 and 8, of two iterations each; those after 4 and 6
        // count.
        for (by_epoch, begin, end) in [(true, 4, 7), (false, 8, 14)] {
            let dir = tempfile::tempdir().unwrap();
            let config = SchedulerConfig::new(Param::Lr, plateau());
            let config = SchedulerConfig { begin, end: Some(end), by_epoch, ..config };
            let run = builder(dir.path(), 2).param_scheduler(config);
            let run = run.train_cfg(TrainConfig { val_interval: 2, ..TrainConfig::new(8) });
            let mut run = run.validation(blank(1), Metrics::new([[("acc", 1.0)]])).build().unwrap();
            run.train().unwrap();
            assert_eq!(run.lr(), 0.05, "by_epoch = {by_epoch}");
        }
    }

    #[test]
    fn run_of_no_epochs_may_have_schedulers() {
        for train in [TrainConfig::new(0), TrainConfig::by_iters(0)] {
            for begin in [0, 3] {
                let dir = tempfile::tempdir().unwrap();
                let shape = Shape::Linear { start_factor: 0.5, end_factor: 1.0 };
                let config = SchedulerConfig { begin, ..SchedulerConfig::new(Param::Lr, shape) };
                let by_epoch = matches!(train.length, Length::Epochs(_));
                let run = builder(dir.path(), 2).train_cfg(train.clone());
                let run = run.param_scheduler(SchedulerConfig { by_epoch, ..config });
                assert_eq!(run.build().unwrap().train().unwrap(), []);
            }
        }
    }

    /// Runs two ranks with these changes, and returns their results.
    fn two_ranks(
        change: impl Fn(RunnerBuilder, usize) -> RunnerBuilder + Sync,
    ) -> Vec<Result<Vec<(String, f64)>>> {
        let dir = tempfile::tempdir().unwrap();
        let groups = ProcessGroup::threads(2, Duration::from_secs(30)).unwrap();
        let rank = |group: ProcessGroup| {
            let rank = group.rank();
            let run = builder(dir.path(), 40).process_group(group);
            change(run, rank).build().and_then(|mut run| run.train())
        };
        std::thread::scope(|scope| {
            let ranks: Vec<_> = groups.into_iter().map(|g| scope.spawn(|| rank(g))).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }

    /// Sets a learning rate at an iteration.
    struct SetRate(usize, f64);

    impl Hook for SetRate {
        fn name(&self) -> &'static str {
            "SetRate"
        }

        fn after_train_iter(&mut self, runner: &mut Runner, _: &Batch, _: &Losses) -> Result<()> {
            if runner.position().iter == self.0 {
                runner.optim_wrapper_mut().optimizer_mut().set_lr(0, self.1)?;
            }
            Ok(())
        }
    }

    #[test]
    fn learning_rates_that_differ_between_ranks_are_an_error_on_all() {
        // Both the first iterations and the last one of 20.
        for iter in [0, 3, 19] {
            let done = two_ranks(|run, rank| match rank {
                0 => run,
                _ => run.hook(Box::new(SetRate(iter, 0.2))),
            });
            for error in done {
                let error = error.unwrap_err().to_string();
                assert!(
                    error.contains("learning rate of group 0 is 0.1 on rank 0 and 0.2 on rank 1"),
                    "{error}"
                );
            }
        }
        let done = two_ranks(|run, _| run.hook(Box::new(SetRate(3, 0.2))));
        assert!(done.iter().all(Result::is_ok), "{done:?}");
    }

    #[test]
    fn options_that_differ_between_ranks_are_refused() {
        type Change = fn(RunnerBuilder) -> RunnerBuilder;
        let linear = || {
            let shape = Shape::Linear { start_factor: 0.5, end_factor: 1.0 };
            SchedulerConfig { by_epoch: false, ..SchedulerConfig::new(Param::Lr, shape) }
        };
        let cases: [(Change, &str); 4] = [
            (
                |run| run.optim_wrapper(sgd(0.2)),
                "param_groups[0].lr is 0.1 on rank 0 and 0.2 on rank 1",
            ),
            (
                |run| run.optim_wrapper(sgd(0.1).accumulate(2)),
                "accumulative_counts is 1 on rank 0 and 2 on rank 1",
            ),
            (
                |run| run.optim_wrapper(sgd(0.1).clip(Clip::Value(1.0))),
                "clip_grad is None on rank 0",
            ),
            (
                |run| run.optim_wrapper(sgd(0.1).max_consecutive_skips(3)),
                "max_consecutive_skips is 100 on rank 0",
            ),
        ];
        for (change, says) in cases {
            let done = two_ranks(|run, rank| if rank == 1 { change(run) } else { run });
            for error in done {
                let error = error.unwrap_err().to_string();
                assert!(error.contains(says), "{error}");
            }
        }
        let done =
            two_ranks(|run, rank| if rank == 1 { run.param_scheduler(linear()) } else { run });
        for error in done {
            assert!(error.unwrap_err().to_string().contains("differ in number between ranks"));
        }
    }
}
