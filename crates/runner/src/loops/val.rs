//! Validation: the model's outputs on every sample of a data set, judged once.

use std::time::Instant;

use crate::Result;
use crate::evaluate::collect_results;
use crate::runner::Runner;

/// Evaluates the model on the validation set, if the run has one and has not just done so. Every rank takes its share and
/// gets the same figures.
pub(crate) fn validate(runner: &mut Runner) -> Result<Option<Vec<(String, f64)>>> {
    let position = runner.position();
    if runner.val_batches() == 0 || position.validated == Some(position.iter) {
        return Ok(None);
    }
    runner.call_hooks(|hook, runner| hook.before_val(runner))?;
    let Some((validation, engine, group)) = runner.validation_mut() else { return Ok(None) };
    let mut records = Vec::new();
    let (start, mut data_time) = (Instant::now(), 0.0);
    let mut last = start;
    for batch in validation.loader.batches(0, 0) {
        let batch = batch?;
        data_time += last.elapsed().as_secs_f64();
        let outputs = engine.eval(&batch)?;
        records.extend(validation.metric.process(&batch, &outputs)?);
        last = Instant::now();
    }
    let batches = validation.loader.batches_per_epoch() as f64;
    validation.times = (data_time / batches, start.elapsed().as_secs_f64() / batches);
    let records = collect_results(group, &records, validation.loader.dataset_len())?;
    let metrics = validation.metric.compute(&records)?;
    runner.position_mut().validated = Some(runner.position().iter);
    runner.call_hooks(|hook, runner| hook.after_val(runner, &metrics))?;
    Ok(Some(metrics))
}
