//! The schedulers of a run: made for the groups of its optimizer.

use std::ops::Range;

use super::{Length, TrainConfig, read_values, write_values};
use crate::config::unknown;
use crate::optim_wrapper::OptimWrapper;
use crate::schedulers::{Param, Scheduler, SchedulerConfig, Span};
use crate::{Error, Result};

/// Each takes its first step, so that the optimizer has what training begins with. `epoch_length` is in the
/// configuration's iterations, as `train` is.
pub(super) fn make_schedulers(
    configs: &[SchedulerConfig],
    train: &TrainConfig,
    epoch_length: usize,
    optim: &mut dyn OptimWrapper,
) -> Result<Vec<Scheduler>> {
    let parts = optim.parts();
    let optimizer = optim.optimizer_mut();
    let (epochs, iters) = match train.length {
        Length::Epochs(epochs) => (epochs, epochs.saturating_mul(epoch_length)),
        // A run that only judges has no epochs.
        Length::Iters(iters) => (iters.div_ceil(epoch_length.max(1)), iters),
    };
    let (epochs, iters, epoch_length) = (epochs as u64, iters as u64, epoch_length as u64);
    let span = Span { epochs, iters, epoch_length };
    let mut base: [Option<Vec<Option<f64>>>; 2] = [None, None];
    let make = |config: &SchedulerConfig| {
        let groups = groups_of(config.part.as_deref(), &parts, optimizer.group_count())?;
        let mut values = read_values(optimizer, config.param, groups.clone())?;
        let base = &mut base[usize::from(config.param == Param::Momentum)];
        let unset = || vec![None; optimizer.group_count()];
        let base = &mut base.get_or_insert_with(unset)[groups.clone()];
        // Those of the first scheduler that changes a group.
        let mut own: Vec<f64> = base.iter().zip(&values).map(|(b, v)| b.unwrap_or(*v)).collect();
        let scheduler = Scheduler::new(config, span, &mut own, &mut values)?;
        base.iter_mut().zip(own).for_each(|(base, own)| *base = Some(own));
        let first = groups.start;
        write_values(optimizer, config.param, groups, &values)?;
        Ok(scheduler.moved_to(first))
    };
    configs.iter().map(make).collect()
}

/// The groups of one of the `parts`, which are names and numbers of groups; all without a name.
fn groups_of(part: Option<&str>, parts: &[(String, usize)], count: usize) -> Result<Range<usize>> {
    let Some(part) = part else { return Ok(0..count) };
    let Some(at) = parts.iter().position(|(name, _)| name == part) else {
        let known: Vec<_> = parts.iter().map(|(name, _)| name.as_str()).collect();
        return Err(Error::Config(unknown("part of the optimizer", part, &known)));
    };
    let first = parts[..at].iter().map(|(_, count)| count).sum();
    Ok(first..first + parts[at].1)
}
