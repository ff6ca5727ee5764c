//! `EpochBasedTrainLoop` and `IterBasedTrainLoop`, with MMEngine's order of stages.
//!
//! Between iterations the ranks agree whether to continue: a signal to one of them, or an exhausted
//! time budget, ends all before the same iteration, with a checkpoint of that position if a hook
//! saves one. A signal also ends a validation, which is repeated after a resume; the time budget
//! does not.

use signal_hook::low_level::signal_name;
use tracing::{Span, debug_span};

use super::evaluation::{Metrics, validate};
use super::stream::TrainStream;
use super::{Interrupt, Runner};
use crate::data::Batch;
use crate::{Error, Result};

/// Runs every stage from `before_run` to `after_run`. Returns the last validation's metrics.
pub(super) fn train(runner: &mut Runner) -> Result<Metrics> {
    runner.train_loader()?;
    runner.claim_work_dir()?;
    runner.call_hooks(|hook, runner| hook.before_run(runner))?;
    runner.begin_training()?;
    let (done, max_iters) = (runner.position().iter, runner.max_iters());
    let position = runner.position().clone();
    let accumulation = runner.accumulation_at(&position)?;
    *runner.optim_wrapper_mut().accumulation() = accumulation;
    runner.call_hooks(|hook, runner| hook.before_train(runner))?;
    let (epoch, by_epoch) = (runner.position().epoch, runner.is_by_epoch());
    if if by_epoch { epoch >= runner.max_epochs() } else { done >= max_iters } {
        let text = match by_epoch {
            true => format!("nothing to do: already trained for {epoch} epochs"),
            false => format!("nothing to do: already trained for {done} iterations"),
        };
        runner.logger().info(&text);
    }
    let mut metrics = Vec::new();
    let mut interrupt = None;
    // A checkpoint is saved before its validation, whose metrics a scheduler may need.
    if runner.position().iter > 0 && is_due(runner) {
        interrupt = validate(runner, &mut metrics)?;
    }
    if interrupt.is_none() {
        interrupt = match runner.is_by_epoch() {
            true => epochs(runner, &mut metrics)?,
            false => iterations(runner, &mut metrics)?,
        };
    }
    if interrupt == Some(Interrupt::Budget) {
        runner.logger().info("the time budget is exhausted");
        runner.end_early()?;
        interrupt = validate(runner, &mut metrics)?;
    }
    if let Some(Interrupt::Signal(signal)) = interrupt {
        let name = signal_name(signal.into()).unwrap_or("a signal");
        let text = format!("received {name} on a rank: saving a checkpoint, then exiting");
        runner.logger().warning(&text);
        let saved = runner.end_early()?;
        if let Some(error) = runner.divergence()? {
            runner.logger().warning(&error.to_string());
        }
        runner.call_hooks(|hook, runner| hook.after_run(runner))?;
        return Err(Error::Interrupted { signal: signal.into(), saved });
    }
    runner.settle()?;
    runner.call_hooks(|hook, runner| hook.after_train(runner))?;
    runner.compare_rates()?;
    let divergence = runner.divergence()?;
    runner.call_hooks(|hook, runner| hook.after_run(runner))?;
    divergence.map_or(Ok(metrics), Err)
}

/// Runs epochs until the last one, or an interruption.
fn epochs(runner: &mut Runner, metrics: &mut Metrics) -> Result<Option<Interrupt>> {
    while runner.position().epoch < runner.max_epochs() && !runner.is_stopped() {
        let interrupt = epoch(runner)?;
        if interrupt.is_some() {
            return Ok(interrupt);
        }
        if is_due(runner)
            && let Some(interrupt) = validate(runner, metrics)?
        {
            return Ok(Some(interrupt));
        }
    }
    Ok(None)
}

/// Runs the rest of the current epoch.
fn epoch(runner: &mut Runner) -> Result<Option<Interrupt>> {
    runner.call_hooks(|hook, runner| hook.before_train_epoch(runner))?;
    let start = runner.position().clone();
    let mut batches = runner.train_loader()?.batches_from(start.epoch, start.batch);
    while let Some(batch) = data_span().in_scope(|| batches.next()) {
        if let Some(interrupt) = runner.interrupt()? {
            return Ok(Some(interrupt));
        }
        iteration(runner, batch?)?;
    }
    runner.call_hooks(|hook, runner| hook.after_train_epoch(runner))?;
    let position = &mut runner.position;
    (position.epoch, position.batch) = (position.epoch + 1, 0);
    Ok(None)
}

/// Runs iterations until the last one, or an interruption: one epoch to hooks, over as many passes
/// as necessary.
fn iterations(runner: &mut Runner, metrics: &mut Metrics) -> Result<Option<Interrupt>> {
    runner.call_hooks(|hook, runner| hook.before_train_epoch(runner))?;
    let position = runner.position();
    let start = position.iter.saturating_sub(position.begun.iter);
    let mut batches = match runner.train_data.stream {
        Some(_) => None,
        None => Some(runner.train_loader()?.endless(start)),
    };
    while runner.position().iter < runner.max_iters() && !runner.is_stopped() {
        if let Some(interrupt) = runner.interrupt()? {
            return Ok(Some(interrupt));
        }
        let span = data_span().entered();
        let batch = match (&mut batches, &mut runner.train_data.stream) {
            (Some(batches), _) => batches.next().transpose()?,
            (None, Some(stream)) => Some(stream.next_batch()?),
            (None, None) => None,
        };
        drop(span);
        let Some(batch) = batch else { break };
        iteration(runner, batch)?;
        if is_due(runner)
            && let Some(interrupt) = validate(runner, metrics)?
        {
            return Ok(Some(interrupt));
        }
    }
    runner.call_hooks(|hook, runner| hook.after_train_epoch(runner))?;
    Ok(None)
}

/// The span of waiting for the next batch.
fn data_span() -> Span {
    debug_span!(target: "runner", "data")
}

fn iteration(runner: &mut Runner, mut batch: Batch) -> Result<()> {
    let (epoch, iter) = (runner.position.epoch, runner.position.iter);
    let _span = debug_span!(target: "runner", "step", epoch, iter).entered();
    runner.call_hooks(|hook, runner| hook.before_train_iter(runner, &mut batch))?;
    let losses = runner.train_step(&batch)?;
    runner.budget.stepped();
    runner.call_hooks(|hook, runner| hook.after_train_iter(runner, &batch, &losses))?;
    runner.position.iter += 1;
    runner.position.batch += 1;
    runner.train_data.stream.as_mut().map(TrainStream::trained);
    Ok(())
}

/// Returns whether a validation is due now.
fn is_due(runner: &Runner) -> bool {
    let position = runner.position();
    match runner.is_by_epoch() {
        true => position.batch == 0 && runner.train.is_val_due(position.epoch),
        false => position.completed().any(|iter| runner.train.is_val_due(iter)),
    }
}
