//! Schedulers of a run: creation for the groups of its optimizer, and steps by
//! [`ParamSchedulerHook`].

use std::ops::Range;

use fused_optim::{Error as OptimError, HyperParam, Optimizer};

use super::agreement::compare;
use super::{Hook, Length, Priority, Runner, TrainConfig};
use crate::checkpoint::Position;
use crate::config::unknown;
use crate::data::Batch;
use crate::engine::Losses;
use crate::optim_wrapper::OptimWrapper;
use crate::schedulers::{Param, RunLength, Scheduler, SchedulerConfig};
use crate::{Error, Result};

/// Schedulers of a run.
#[derive(Debug)]
pub(super) struct Schedules {
    all: Vec<Scheduler>,
    configs: Vec<SchedulerConfig>,
    /// Whether the learning rate is scaled with the size of a step (`auto_scale_lr`).
    pub(super) scales_lr: bool,
}

impl Schedules {
    /// Creates the schedulers, see [`make_schedulers`].
    pub(super) fn new(
        configs: Vec<SchedulerConfig>,
        scales_lr: bool,
        train: &TrainConfig,
        epoch_length: usize,
        optim: &mut OptimWrapper,
    ) -> Result<Self> {
        let all = make_schedulers(&configs, train, epoch_length, optim)?;
        Ok(Self { all, configs, scales_lr })
    }

    /// Creates the schedulers again, for epochs of another length.
    pub(super) fn remake(
        &mut self,
        train: &TrainConfig,
        epoch_length: usize,
        optim: &mut OptimWrapper,
    ) -> Result<()> {
        self.all = make_schedulers(&self.configs, train, epoch_length, optim)?;
        Ok(())
    }

    pub(super) fn all(&self) -> &[Scheduler] {
        &self.all
    }

    /// Returns the schedulers as texts, which must be equal on all ranks.
    pub(super) fn options(&self) -> impl Iterator<Item = (String, String)> {
        let all = self.all.iter().enumerate();
        all.map(|(index, scheduler)| (format!("param_scheduler {index}"), format!("{scheduler:?}")))
    }

    /// Resumes the schedulers of a checkpoint, of the same number, and returns their differences
    /// from the configuration.
    pub(super) fn resume(&mut self, saved: &[Scheduler]) -> Result<Vec<String>> {
        let mut texts = Vec::new();
        for (index, (scheduler, saved)) in self.all.iter_mut().zip(saved).enumerate() {
            let differences = scheduler.resume(saved.clone())?;
            if !differences.is_empty() {
                texts.push(format!("param_scheduler {index}: {}", differences.join(", ")));
            }
        }
        Ok(texts)
    }

    /// Scales learning rates, and the schedulers' initial ones, from steps of `was` samples to
    /// steps of `is`.
    pub(super) fn scale_rates(
        &mut self,
        [was, is]: [usize; 2],
        optim: &mut OptimWrapper,
    ) -> Result<()> {
        for scheduler in self.all.iter_mut().filter(|s| s.param() == Param::Lr) {
            scheduler.scale_base(is as f64 / was as f64);
        }
        scale_lr(optim.optimizer_mut(), is, Some(was)).map(drop)
    }

    /// Steps the schedulers that are `due`, in order, each on the values left by previous ones.
    fn step(
        &mut self,
        optim: &mut OptimWrapper,
        metrics: Option<&[(String, f64)]>,
        due: impl Fn(&Scheduler) -> bool,
    ) -> Result<()> {
        let optimizer = optim.optimizer_mut();
        for scheduler in self.all.iter_mut().filter(|s| due(s)) {
            let (param, groups) = (scheduler.param(), scheduler.groups());
            let mut values = read_values(optimizer, param, groups.clone())?;
            scheduler.step(&mut values, metrics)?;
            write_values(optimizer, param, groups, &values)?;
        }
        Ok(())
    }

    /// Steps the schedulers that count iterations: once, or, after a change of the layout, for each
    /// iteration of the configuration that the current one completes.
    fn step_iters(&mut self, optim: &mut OptimWrapper, position: &Position) -> Result<()> {
        let counts_iters = |s: &Scheduler| !s.by_epoch();
        let Position { iter, begun, .. } = *position;
        let mut steps = 1;
        if begun.first.is_some()
            && let Some(scheduler) = self.all.iter().find(|s| counts_iters(s))
        {
            let wanted = begun.scale.to_configured(iter + 1) as u64;
            steps = wanted.saturating_sub(scheduler.steps());
        }
        (0..steps).try_for_each(|_| self.step(optim, None, counts_iters))
    }
}

/// Creates the schedulers. Each takes its first step, which sets the optimizer's initial values.
/// `epoch_length` and `train` are in iterations of the configuration.
pub(super) fn make_schedulers(
    configs: &[SchedulerConfig],
    train: &TrainConfig,
    epoch_length: usize,
    optim: &mut OptimWrapper,
) -> Result<Vec<Scheduler>> {
    let parts = optim.parts().to_vec();
    let optimizer = optim.optimizer_mut();
    let iters = train.length.iters(epoch_length);
    let epochs = match train.length {
        Length::Epochs(epochs) => epochs,
        // A run that only evaluates has no epochs.
        Length::Iters(iters) => iters.div_ceil(epoch_length.max(1)),
    };
    let (epochs, iters, epoch_length) = (epochs as u64, iters as u64, epoch_length as u64);
    let length = RunLength { epochs, iters, epoch_length };
    let mut base: [Option<Vec<Option<f64>>>; 2] = [None, None];
    let make = |config: &SchedulerConfig| {
        let groups = groups_of(config.part.as_deref(), &parts, optimizer.group_count())?;
        let mut values = read_values(optimizer, config.param, groups.clone())?;
        let base = &mut base[usize::from(config.param == Param::Momentum)];
        let unset = || vec![None; optimizer.group_count()];
        let base = &mut base.get_or_insert_with(unset)[groups.clone()];
        // Base values are those at the first scheduler that changes a group.
        let mut own: Vec<f64> = base.iter().zip(&values).map(|(b, v)| b.unwrap_or(*v)).collect();
        let scheduler = Scheduler::new(config, length, &mut own, &mut values)?;
        base.iter_mut().zip(own).for_each(|(base, own)| *base = Some(own));
        let first = groups.start;
        write_values(optimizer, config.param, groups, &values)?;
        Ok(scheduler.moved_to(first))
    };
    configs.iter().map(make).collect()
}

/// Returns the groups of one of the `parts`, given as names and numbers of groups; all groups
/// without a name.
fn groups_of(part: Option<&str>, parts: &[(String, usize)], count: usize) -> Result<Range<usize>> {
    let Some(part) = part else { return Ok(0..count) };
    let Some(at) = parts.iter().position(|(name, _)| name == part) else {
        let known: Vec<_> = parts.iter().map(|(name, _)| name.as_str()).collect();
        return Err(Error::Config(unknown("part of the optimizer", part, &known)));
    };
    let first = parts[..at].iter().map(|(_, count)| count).sum();
    Ok(first..first + parts[at].1)
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
        runner.schedules.step_iters(&mut runner.optim, &runner.position)
    }

    fn after_train_epoch(&mut self, runner: &mut Runner) -> Result<()> {
        runner.schedules.step(&mut runner.optim, None, Scheduler::by_epoch)
    }

    fn after_val_epoch(&mut self, runner: &mut Runner, metrics: &[(String, f64)]) -> Result<()> {
        let trains = runner.is_training();
        let due = |s: &Scheduler| trains && s.needs_metrics();
        runner.schedules.step(&mut runner.optim, Some(metrics), due)
    }
}

/// Reads the values of these parameter groups of an optimizer.
pub(super) fn read_values(
    optimizer: &dyn Optimizer,
    param: Param,
    groups: Range<usize>,
) -> Result<Vec<f64>> {
    let none = || {
        let text = format!("{} has no momentum for a scheduler to change", optimizer.kind());
        Error::Config(text)
    };
    let read = |group| match param {
        Param::Lr => Ok(optimizer.lr(group)?),
        Param::Momentum => optimizer.momentum(group)?.ok_or_else(none),
    };
    groups.map(read).collect()
}

pub(super) fn write_values(
    optimizer: &mut dyn Optimizer,
    param: Param,
    groups: Range<usize>,
    values: &[f64],
) -> Result<()> {
    for (group, &value) in groups.zip(values) {
        match param {
            Param::Lr => optimizer.set_lr(group, value)?,
            Param::Momentum => match optimizer.set_momentum(group, value) {
                Err(OptimError::MomentumFromZero { .. }) if value == 0.0 => {
                    optimizer.set_momentum(group, LEAST_MOMENTUM)?;
                }
                set => set?,
            },
        }
    }
    Ok(())
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
    let values = read_values(optimizer, Param::Lr, groups.clone())?;
    let scaled: Vec<_> = values.iter().map(|lr| lr * factor).collect();
    write_values(optimizer, Param::Lr, groups, &scaled)?;
    let rate = |rates: &[f64]| rates.first().copied().unwrap_or(f64::NAN);
    Ok(Some(format!(
        "auto_scale_lr: learning rate {} instead of {}: a batch of all ranks has {batch} samples, and \
         base_batch_size is {base}",
        rate(&scaled),
        rate(&values)
    )))
}

/// Replaces a momentum of 0 at the end of a schedule if an optimizer keeps its buffer: in `f32`, a
/// buffer times this value adds nothing to a gradient. (SGD with dampening still dampens in this
/// case; PyTorch's does not.)
const LEAST_MOMENTUM: f64 = f32::MIN_POSITIVE as f64;

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use collective::ProcessGroup;
    use fused_optim::{Applied, Clip, ParamMut, Sgd, SgdHyper, Slice, StepCtl};

    use super::*;
    use crate::hooks::EarlyStoppingHook;
    use crate::runner::RunnerBuilder;
    use crate::schedulers::{Plateau, Rule, Shape, Threshold};
    use crate::testing::{Metrics, blank, builder, sgd};

    /// Halves the learning rate after each validation without improvement.
    fn plateau() -> Shape {
        Shape::Plateau(Plateau {
            monitor: "acc".into(),
            rule: Rule::Greater,
            factor: 0.5,
            patience: 0,
            threshold: 0.0,
            threshold_rule: Threshold::Abs,
            cooldown: 0,
            min_value: 0.0,
            eps: 0.0,
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

    #[test]
    fn schedule_may_end_at_zero_momentum() {
        let sgd = |momentum| {
            let hyper = SgdHyper { lr: 0.1, momentum, ..SgdHyper::default() };
            Sgd::with_one_group(hyper, 1).unwrap()
        };
        let step = |sgd: &mut Sgd, weight: &mut [f32], grad: &[f32]| {
            let mut params = [ParamMut::new(weight, Some(Slice::F32(grad)))];
            assert_eq!(sgd.step(&mut params, &StepCtl::PLAIN).unwrap(), Applied::Applied);
        };
        let (mut with, mut without) = (sgd(0.9), sgd(0.0));
        let mut weight = [1.0, -2.0, 0.5];
        step(&mut with, &mut weight, &[3.0, 1e-3, -7.0]);
        write_values(&mut with, Param::Momentum, 0..1, &[0.0]).unwrap();
        let mut expected = weight;
        for grad in [[0.5, -0.25, 1e-9], [0.0, 4.0, -0.5]] {
            step(&mut with, &mut weight, &grad);
            step(&mut without, &mut expected, &grad);
            assert_eq!(weight, expected);
        }
        // Without a buffer, none can be added.
        write_values(&mut without, Param::Momentum, 0..1, &[0.5]).unwrap_err();
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
