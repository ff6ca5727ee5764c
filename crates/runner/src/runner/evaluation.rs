//! Validation and test: the model's outputs on every sample of a data set, judged once.

use std::time::Instant;

use super::{Interrupt, Judged, Runner};
use crate::evaluate::{check_records, collect_results};
use crate::{Error, Result};

/// Figures by name.
pub(super) type Metrics = Vec<(String, f64)>;

/// A whole run that only judges the model.
pub(super) fn judge_once(runner: &mut Runner, judged: Judged) -> Result<Metrics> {
    if runner.judged_loader(judged).is_none() {
        return Err(nothing_to_judge(judged));
    }
    runner.call_hooks(|hook, runner| hook.before_run(runner))?;
    if !runner.load_weights()? {
        runner.logger().warning("no checkpoint is loaded: the model is as it was made");
        runner.broadcast_model()?;
    }
    match judge(runner, judged)? {
        Ok(metrics) => {
            runner.call_hooks(|hook, runner| hook.after_run(runner))?;
            Ok(metrics)
        }
        Err(signal) => Err(Error::Interrupted { signal: signal.into(), saved: false }),
    }
}

/// What a run is told that has no data to judge a model by.
pub(super) fn nothing_to_judge(judged: Judged) -> Error {
    let name = if judged == Judged::Val { "val" } else { "test" };
    Error::Config(format!("the run has no {name}_dataloader and {name}_evaluator"))
}

/// Evaluates the model on the validation set, if the run has one and has not just done so, into
/// `metrics`. Only a signal interrupts it.
pub(super) fn validate(runner: &mut Runner, metrics: &mut Metrics) -> Result<Option<Interrupt>> {
    let position = runner.position();
    if position.validated == Some(position.iter) || runner.judged_loader(Judged::Val).is_none() {
        return Ok(None);
    }
    Ok(match judge(runner, Judged::Val)? {
        Ok(fresh) => {
            runner.ask_before_next();
            *metrics = fresh;
            None
        }
        Err(signal) => Some(Interrupt::Signal(signal)),
    })
}

/// Evaluates the model. Every rank takes its share and gets the same figures; or all end before the same
/// batch, because of a signal.
fn judge(runner: &mut Runner, judged: Judged) -> Result<std::result::Result<Metrics, u8>> {
    let val = judged == Judged::Val;
    runner.call_hooks(|h, r| if val { h.before_val(r) } else { h.before_test(r) })?;
    runner.call_hooks(|h, r| if val { h.before_val_epoch(r) } else { h.before_test_epoch(r) })?;
    let mut records = Vec::new();
    let (start, mut data_time) = (Instant::now(), 0.0);
    let mut last = start;
    let loader = runner.judged_loader(judged).ok_or_else(|| nothing_to_judge(judged))?;
    for (index, batch) in loader.batches(0, 0).enumerate() {
        // Ranks may have a batch more than others, and ask where all have one.
        if index < loader.common_batches()
            && let Some(Interrupt::Signal(signal)) = runner.interrupt()?
        {
            return Ok(Err(signal));
        }
        let mut batch = batch?;
        data_time += last.elapsed().as_secs_f64();
        runner.call_hooks(|h, r| match judged {
            Judged::Val => h.before_val_iter(r, index, &mut batch),
            Judged::Test => h.before_test_iter(r, index, &mut batch),
        })?;
        let (outputs, more) = runner.judge_batch(judged, &batch)?;
        check_records(if val { "val" } else { "test" }, more.len(), loader.samples_in(index))?;
        records.extend(more);
        if let Some((part, ..)) = runner.judged_mut(judged) {
            let done = (index + 1) as f64;
            part.times = (data_time / done, start.elapsed().as_secs_f64() / done);
        }
        runner.call_hooks(|h, r| match judged {
            Judged::Val => h.after_val_iter(r, index, &batch, &outputs),
            Judged::Test => h.after_test_iter(r, index, &batch, &outputs),
        })?;
        last = Instant::now();
    }
    let mut metrics = Vec::new();
    if let Some((part, _, group)) = runner.judged_mut(judged) {
        let records = collect_results(group, &records, part.loader.dataset_len())?;
        metrics = part.metric.compute(&records)?;
    }
    if val {
        runner.position_mut().validated = Some(runner.position().iter);
        runner.call_hooks(|hook, runner| hook.after_val_epoch(runner, &metrics))?;
        runner.call_hooks(|hook, runner| hook.after_val(runner))?;
    } else {
        runner.call_hooks(|hook, runner| hook.after_test_epoch(runner, &metrics))?;
        runner.call_hooks(|hook, runner| hook.after_test(runner))?;
    }
    Ok(Ok(metrics))
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;
    use crate::data::{Array, Batch};
    use crate::evaluate::Metric;
    use crate::testing::{blank, builder};

    /// As many records of a batch as this, whatever its size.
    struct Records(usize);

    impl Metric for Records {
        fn process(&self, _: &Batch, _: &[(String, Array)]) -> Result<Vec<Value>> {
            Ok(vec![1.into(); self.0])
        }
        fn compute(&self, records: &[Value]) -> Result<Vec<(String, f64)>> {
            Ok(vec![("count".into(), records.len() as f64)])
        }
    }

    #[test]
    fn a_metric_that_makes_one_record_for_each_batch_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let evaluated = |records, judged| {
            // Batches of two samples, two and one.
            let data = || crate::DataLoaderConfig { batch_size: 2, ..blank(5) };
            let run = builder(dir.path(), 1).validation(data(), Box::new(Records(records)));
            let mut run = run.test(data(), Box::new(Records(records))).build().unwrap();
            let metrics = if judged == Judged::Val { run.validate() } else { run.test() };
            metrics.map_err(|error| error.to_string())
        };
        for (judged, part) in [(Judged::Val, "val"), (Judged::Test, "test")] {
            let error = evaluated(1, judged).unwrap_err();
            let says =
                format!("{part}_evaluator: the metric made 1 records of a batch of 2 samples");
            assert!(error.starts_with(&says), "{error}");
            assert!(error.contains("must return one record for each sample"), "{error}");
        }
        // The last batch is smaller.
        let error = evaluated(2, Judged::Val).unwrap_err();
        assert!(error.contains("made 2 records of a batch of 1 samples"), "{error}");
    }
}
