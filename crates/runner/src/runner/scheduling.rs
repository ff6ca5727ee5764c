//! Schedulers of a run: creation for the groups of its optimizer, and steps by
//! [`ParamSchedulerHook`].

use std::ops::Range;

use fused_optim::{Error as OptimError, Optimizer};

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
    use fused_optim::{Applied, ParamMut, Sgd, SgdHyper, Slice, StepCtl};

    use super::*;
    use crate::hooks::EarlyStoppingHook;
    use crate::schedulers::{Plateau, Rule, Shape, Threshold};
    use crate::testing::{Metrics, blank, builder};

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
}
