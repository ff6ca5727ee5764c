//! `EpochBasedTrainLoop`: MMEngine's order of stages.

use super::val::validate;
use crate::Result;
use crate::runner::Runner;

/// Runs every stage from `before_run` to `after_run`. Returns the last validation's figures.
pub(crate) fn train(runner: &mut Runner) -> Result<Vec<(String, f64)>> {
    let max_iters = runner.max_iters();
    runner.call_hooks(|hook, runner| hook.before_run(runner))?;
    runner.load_or_resume()?;
    runner.broadcast_model()?;
    let done = runner.position().iter;
    runner.optim_wrapper_mut().accumulation().initialize_count_status(done, max_iters);
    runner.call_hooks(|hook, runner| hook.before_train(runner))?;
    if runner.position().epoch >= runner.max_epochs() {
        let text = format!("nothing to do: trained for {} epochs", runner.position().epoch);
        runner.logger().info(&text);
    }
    let mut metrics = Vec::new();
    // An epoch's checkpoint is written before its validation, whose figures a scheduler may need.
    if runner.position().epoch > 0 && runner.position().batch == 0 && is_due(runner) {
        metrics = validate(runner)?.unwrap_or_default();
    }
    while runner.position().epoch < runner.max_epochs() && !runner.is_stopped() {
        let whole = epoch(runner)?;
        if !whole {
            runner.logger().info("the time budget is spent");
        }
        if (is_due(runner) || !whole)
            && let Some(fresh) = validate(runner)?
        {
            metrics = fresh;
        }
        if !whole {
            break;
        }
    }
    runner.call_hooks(|hook, runner| hook.after_train(runner))?;
    runner.call_hooks(|hook, runner| hook.after_run(runner))?;
    Ok(metrics)
}

/// What is left of the current epoch. False if the time budget ended it early.
fn epoch(runner: &mut Runner) -> Result<bool> {
    runner.call_hooks(|hook, runner| hook.before_train_epoch(runner))?;
    let start = runner.position().clone();
    let batches = runner.train_loader().batches(start.epoch, start.batch);
    for batch in batches {
        if runner.out_of_time()? {
            return Ok(false);
        }
        let mut batch = batch?;
        runner.call_hooks(|hook, runner| hook.before_train_iter(runner, &mut batch))?;
        let losses = runner.train_step(&batch)?;
        runner.call_hooks(|hook, runner| hook.after_train_iter(runner, &batch, &losses))?;
        runner.position_mut().iter += 1;
        runner.position_mut().batch += 1;
    }
    runner.call_hooks(|hook, runner| hook.after_train_epoch(runner))?;
    let position = runner.position_mut();
    (position.epoch, position.batch) = (position.epoch + 1, 0);
    Ok(true)
}

/// Whether a validation follows the epoch just completed.
fn is_due(runner: &Runner) -> bool {
    let (config, epoch) = (runner.train_config(), runner.position().epoch);
    epoch >= config.val_begin && (epoch % config.val_interval == 0 || epoch == config.max_epochs)
}
