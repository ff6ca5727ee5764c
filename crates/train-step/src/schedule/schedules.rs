//! `Schedules`: the schedulers of an optimizer, which change its groups in order.

use std::ops::Range;

use fused_optim::{Error as OptimError, Optimizer};

use super::{Param, RunLength, Scheduler, SchedulerConfig, to_json};
use crate::{Error, Result};

/// The schedulers of an optimizer, in order: each starts from the values left by previous ones.
///
/// ```
/// use fused_optim::{Optimizer, Sgd, SgdHyper};
/// use train_step::{Param, RunLength, SchedulerConfig, Schedules, Shape};
///
/// let mut sgd = Sgd::with_one_group(SgdHyper { lr: 1.0, ..SgdHyper::default() }, 1)?;
/// // A warm-up of two iterations, and a cosine over the other six.
/// let warm_up = Shape::Linear { start_factor: 0.5, end_factor: 1.0 };
/// let cosine = Shape::CosineAnnealing { t_max: None, floor: train_step::Floor::Value(0.0) };
/// let configs = [
///     SchedulerConfig { end: Some(2), ..SchedulerConfig::by_iters(Param::Lr, warm_up) },
///     SchedulerConfig { begin: 2, ..SchedulerConfig::by_iters(Param::Lr, cosine) },
/// ];
/// let length = RunLength::of_iters(8);
/// let mut schedules = Schedules::new(configs.into(), length, &[], &mut sgd)?;
/// let mut lrs = Vec::new();
/// for _ in 0..8 {
///     lrs.push(sgd.lr(0)?); // and a step of `sgd`
///     schedules.step_iters(1, &mut sgd)?;
/// }
/// assert_eq!(lrs[..3], [0.5, 1.0, 1.0]);
/// assert!(lrs[7] < 0.1);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct Schedules {
    all: Vec<Scheduler>,
    configs: Vec<SchedulerConfig>,
    /// The optimizer's values before any scheduler: value, group, number.
    initial: Vec<(Param, usize, f64)>,
}

impl Schedules {
    /// Creates the schedulers. Each takes its first step, which sets the optimizer's values at the
    /// beginning. `parts` are the names of the optimizer's parts, if it has some, with the number
    /// of groups of each, see [`SchedulerConfig::part`].
    ///
    /// # Errors
    ///
    /// Those of [`Scheduler::new`]; [`Error::UnknownPart`], [`Error::NoMomentum`], and values that
    /// the optimizer refuses.
    pub fn new(
        configs: Vec<SchedulerConfig>,
        length: RunLength,
        parts: &[(String, usize)],
        optimizer: &mut dyn Optimizer,
    ) -> Result<Self> {
        let mut base: [Option<Vec<Option<f64>>>; 2] = [None, None];
        let mut initial: Vec<(Param, usize, f64)> = Vec::new();
        let mut make = |config: &SchedulerConfig| {
            let groups = groups_of(config.part.as_deref(), parts, optimizer.group_count())?;
            let mut values = read(optimizer, config.param, groups.clone())?;
            for (group, value) in groups.clone().zip(&values) {
                if !initial.iter().any(|(param, at, _)| (*param, *at) == (config.param, group)) {
                    initial.push((config.param, group, *value));
                }
            }
            let base = &mut base[usize::from(config.param == Param::Momentum)];
            let unset = || vec![None; optimizer.group_count()];
            let base = &mut base.get_or_insert_with(unset)[groups.clone()];
            // Base values are those at the first scheduler that changes a group.
            let mut own: Vec<f64> =
                base.iter().zip(&values).map(|(b, v)| b.unwrap_or(*v)).collect();
            let scheduler = Scheduler::new(config, length, &mut own, &mut values)?;
            base.iter_mut().zip(own).for_each(|(base, own)| *base = Some(own));
            let first = groups.start;
            write(optimizer, config.param, groups, &values)?;
            Ok(scheduler.moved_to(first))
        };
        let named = |(index, config): (usize, &SchedulerConfig)| {
            make(config).map_err(|error| match error {
                Error::Schedule(text) => {
                    let shape = to_json(&config.shape);
                    Error::Schedule(format!("scheduler {index} ({}): {text}", shape["type"]))
                }
                error => error,
            })
        };
        let all = configs.iter().enumerate().map(named).collect::<Result<_>>()?;
        Ok(Self { all, configs, initial })
    }

    /// Creates the schedulers again, for a run of another length, from the optimizer's values
    /// before them.
    ///
    /// # Errors
    ///
    /// Those of [`new`](Self::new). The schedulers are unchanged then, but not the optimizer's
    /// values.
    pub fn remake(
        &mut self,
        length: RunLength,
        parts: &[(String, usize)],
        optimizer: &mut dyn Optimizer,
    ) -> Result<()> {
        for (param, group, value) in &self.initial {
            write(optimizer, *param, *group..*group + 1, &[*value])?;
        }
        *self = Self::new(self.configs.clone(), length, parts, optimizer)?;
        Ok(())
    }

    /// Returns the schedulers, which are their state: for a checkpoint.
    #[must_use]
    pub fn all(&self) -> &[Scheduler] {
        &self.all
    }

    /// Resumes saved schedulers, of the same number. Returns a text for each that was configured
    /// differently: the saved configuration applies, because a recursive formula with other numbers
    /// would not follow its own curve. Load the optimizer's state after [`new`](Self::new), which
    /// sets its values; the state has those of the moment when it was saved.
    ///
    /// # Errors
    ///
    /// [`Error::OtherGroups`]; [`Error::Schedule`] for another number of schedulers.
    pub fn resume(&mut self, saved: &[Scheduler]) -> Result<Vec<String>> {
        let (was, is) = (saved.len(), self.all.len());
        if was != is {
            let text = format!("the checkpoint has {was} schedulers, the run has {is}");
            return Err(Error::Schedule(text));
        }
        let mut resumed = self.all.clone();
        let mut texts = Vec::new();
        for (index, (scheduler, saved)) in resumed.iter_mut().zip(saved).enumerate() {
            let differences = scheduler.resume(saved.clone())?;
            if !differences.is_empty() {
                texts.push(format!("param_scheduler {index}: {}", differences.join(", ")));
            }
        }
        self.all = resumed;
        Ok(texts)
    }

    /// Multiplies the initial learning rates, as of the optimizer's groups.
    pub fn scale_base_lrs(&mut self, factor: f64) {
        for scheduler in self.all.iter_mut().filter(|s| s.param() == Param::Lr) {
            scheduler.scale_base(factor);
        }
    }

    /// Number of steps of the schedulers that count iterations; `None` if there is none.
    #[must_use]
    pub fn iters(&self) -> Option<u64> {
        self.all.iter().find(|scheduler| !scheduler.by_epoch()).map(Scheduler::steps)
    }

    /// Steps the schedulers that count iterations `count` times.
    ///
    /// # Errors
    ///
    /// A value that the optimizer refuses. Nothing has changed by that step then.
    pub fn step_iters(&mut self, count: u64, optimizer: &mut dyn Optimizer) -> Result<()> {
        (0..count).try_for_each(|_| self.step(optimizer, None, |scheduler| !scheduler.by_epoch()))
    }

    /// Steps the schedulers that count epochs, after an epoch.
    ///
    /// # Errors
    ///
    /// A value that the optimizer refuses.
    pub fn step_epoch(&mut self, optimizer: &mut dyn Optimizer) -> Result<()> {
        self.step(optimizer, None, Scheduler::by_epoch)
    }

    /// Steps the plateaus, with the metrics of a validation.
    ///
    /// # Errors
    ///
    /// [`Error::Schedule`] for a missing metric; a value that the optimizer refuses.
    pub fn step_metrics(
        &mut self,
        metrics: &[(String, f64)],
        optimizer: &mut dyn Optimizer,
    ) -> Result<()> {
        self.step(optimizer, Some(metrics), Scheduler::needs_metrics)
    }

    /// Steps the schedulers that are `due`, in order, each on the values left by previous ones.
    /// After an error neither they nor the optimizer's values have changed.
    fn step(
        &mut self,
        optimizer: &mut dyn Optimizer,
        metrics: Option<&[(String, f64)]>,
        due: impl Fn(&Scheduler) -> bool,
    ) -> Result<()> {
        let mut next = self.all.clone();
        let mut before = Vec::new();
        let mut take = |scheduler: &mut Scheduler| {
            let (param, groups) = (scheduler.param(), scheduler.groups());
            let mut values = read(optimizer, param, groups.clone())?;
            before.push((param, groups.clone(), values.clone()));
            scheduler.step(&mut values, metrics)?;
            write(optimizer, param, groups, &values)
        };
        let taken = next.iter_mut().filter(|s| due(s)).try_for_each(&mut take);
        if taken.is_ok() {
            self.all = next;
            return Ok(());
        }
        for (param, groups, values) in before.into_iter().rev() {
            write(optimizer, param, groups, &values)?;
        }
        taken
    }
}

/// Returns the groups of one of the `parts`; all groups without a name.
fn groups_of(part: Option<&str>, parts: &[(String, usize)], count: usize) -> Result<Range<usize>> {
    let Some(part) = part else { return Ok(0..count) };
    let Some(at) = parts.iter().position(|(name, _)| name == part) else {
        let known = parts.iter().map(|(name, _)| name.clone()).collect();
        return Err(Error::UnknownPart { part: part.to_owned(), known });
    };
    let first = parts[..at].iter().map(|(_, count)| count).sum();
    Ok(first..first + parts[at].1)
}

fn read(optimizer: &dyn Optimizer, param: Param, groups: Range<usize>) -> Result<Vec<f64>> {
    let none = || Error::NoMomentum { optimizer: optimizer.kind() };
    let read = |group| match param {
        Param::Lr => Ok(optimizer.lr(group)?),
        Param::Momentum => optimizer.momentum(group)?.ok_or_else(none),
    };
    groups.map(read).collect()
}

fn write(
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

/// Replaces a momentum of 0 at the end of a schedule if an optimizer keeps its buffer: in `f32`, a
/// buffer times this value adds nothing to a gradient. (SGD with dampening still dampens in this
/// case; PyTorch's does not.)
const LEAST_MOMENTUM: f64 = f32::MIN_POSITIVE as f64;

#[cfg(test)]
mod tests {
    use fused_optim::{Applied, ParamMut, Sgd, SgdHyper, Slice, StepCtl};

    use super::*;
    use crate::Shape;

    fn sgd(lr: f64) -> Sgd {
        Sgd::with_one_group(SgdHyper { lr, ..SgdHyper::default() }, 1).unwrap()
    }

    #[test]
    fn conversion_needs_the_length_of_an_epoch() {
        let shape = Shape::Step { step_size: 1, gamma: 0.1 };
        let config = SchedulerConfig {
            convert_to_iter_based: true,
            ..SchedulerConfig::new(Param::Lr, shape)
        };
        let length = RunLength::of_iters(8);
        let error = Scheduler::new(&config, length, &mut [1.0], &mut [1.0]).unwrap_err();
        assert!(error.to_string().contains("this run counts no epochs"), "{error}");
        let length = RunLength { epochs: 2, iters: 8, epoch_length: 4 };
        Scheduler::new(&config, length, &mut [1.0], &mut [1.0]).unwrap();
    }

    #[test]
    fn an_error_of_a_scheduler_names_it() {
        let shape = Shape::Linear { start_factor: 0.1, end_factor: 1.0 };
        let good = SchedulerConfig::by_iters(Param::Lr, shape);
        let bad = SchedulerConfig { begin: 8, ..good.clone() };
        let made = Schedules::new(vec![good, bad], RunLength::of_iters(8), &[], &mut sgd(1.0));
        let error = made.unwrap_err().to_string();
        assert!(error.contains("scheduler 1 (\"Linear\"): end should be larger"), "{error}");
    }

    #[test]
    fn schedulers_made_again_begin_with_the_optimizers_own_values() {
        let mut optimizer = sgd(1.0);
        let warm_up = Shape::Linear { start_factor: 0.1, end_factor: 1.0 };
        let config =
            SchedulerConfig { end: Some(3), ..SchedulerConfig::by_iters(Param::Lr, warm_up) };
        let length = RunLength::of_iters(8);
        let mut schedules = Schedules::new(vec![config], length, &[], &mut optimizer).unwrap();
        for _ in 0..2 {
            schedules.remake(length, &[], &mut optimizer).unwrap();
            assert_eq!(optimizer.lr(0).unwrap(), 0.1);
            schedules.step_iters(3, &mut optimizer).unwrap();
            assert!((optimizer.lr(0).unwrap() - 1.0).abs() < 1e-12);
        }
        assert_eq!(schedules.all().len(), 1);
    }

    #[test]
    fn refused_value_changes_neither_schedulers_nor_optimizer() {
        let mut optimizer = sgd(1.0);
        let halves = SchedulerConfig::by_iters(Param::Lr, Shape::Exponential { gamma: 0.5 });
        // Its second value is negative.
        let bad = Shape::Poly { power: 1.0, eta_min: -100.0 };
        let bad = SchedulerConfig::by_iters(Param::Lr, bad);
        let length = RunLength::of_iters(8);
        let mut schedules = Schedules::new(vec![halves, bad], length, &[], &mut optimizer).unwrap();
        for _ in 0..2 {
            schedules.step_iters(1, &mut optimizer).unwrap_err();
            assert_eq!((optimizer.lr(0).unwrap(), schedules.iters()), (1.0, Some(0)));
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
        write(&mut with, Param::Momentum, 0..1, &[0.0]).unwrap();
        let mut expected = weight;
        for grad in [[0.5, -0.25, 1e-9], [0.0, 4.0, -0.5]] {
            step(&mut with, &mut weight, &grad);
            step(&mut without, &mut expected, &grad);
            assert_eq!(weight, expected);
        }
        // Without a buffer, none can be added.
        write(&mut without, Param::Momentum, 0..1, &[0.5]).unwrap_err();
    }
}
