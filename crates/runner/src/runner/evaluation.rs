//! Validation and test: the model is evaluated once on every sample of a data set.

use std::time::Instant;

use collective::ReduceOp;
use tracing::info_span;

use super::loading::Loaded;
use super::{Interrupt, Runner};
use crate::data::{Batch, DataLoader, StreamLoader};
use crate::engine::Engine;
use crate::evaluate::{self, Evaluator};
use crate::{Error, Result, signals};

/// Metrics by name.
pub(super) type Metrics = Vec<(String, f64)>;

/// Data on which the model is evaluated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EvalSplit {
    /// The validation set, between epochs.
    Val,
    /// The test set, on request.
    Test,
}

impl EvalSplit {
    /// Name in keys of a configuration and in log lines.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Val => "val",
            Self::Test => "test",
        }
    }

    /// Error for a missing `val_dataloader` or `test_dataloader`.
    pub(super) fn missing(self) -> Error {
        let name = self.name();
        Error::config(format!("the run has no {name}_dataloader and {name}_evaluator"))
    }
}

/// Parts of an evaluation, with the timing of the last one.
pub(super) struct Evaluation {
    /// For a stream, it only counts batches.
    pub(super) loader: DataLoader,
    pub(super) stream: Option<StreamLoader>,
    /// Maximum number of this rank's batches in any evaluation so far.
    pub(super) batches: usize,
    pub(super) evaluator: Evaluator,
    /// Mean seconds per batch in the last one: for loading, and in total.
    pub(super) times: (f64, f64),
}

impl Evaluation {
    pub(super) fn set_seed(&mut self, seed: u64) {
        self.loader.set_seed(seed);
        if let Some(stream) = &mut self.stream {
            stream.set_seed(seed);
        }
    }
}

impl Runner {
    /// Number of batches in a validation or test; for a stream that of the last one.
    pub(crate) fn eval_batches(&self, split: EvalSplit) -> usize {
        self.evaluations[split as usize].as_ref().map_or(0, |part| match part.stream {
            Some(_) => part.batches,
            None => part.loader.batches_per_epoch(),
        })
    }

    /// Mean seconds per batch in the last validation or test: for loading, and in total.
    pub(super) fn eval_times(&self, split: EvalSplit) -> (f64, f64) {
        self.evaluations[split as usize].as_ref().map_or((0.0, 0.0), |part| part.times)
    }

    /// Returns the parts of a validation or test.
    pub(super) fn eval_parts(
        &mut self,
        split: EvalSplit,
    ) -> Result<(&mut Evaluation, &mut dyn Engine)> {
        let part = self.evaluations[split as usize].as_mut().ok_or_else(|| split.missing())?;
        Ok((part, &mut *self.engine))
    }
}

/// Runs an evaluation without training.
pub(super) fn evaluate_only(runner: &mut Runner, split: EvalSplit) -> Result<Metrics> {
    runner.eval_parts(split)?;
    runner.call_hooks(|hook, runner| hook.before_run(runner))?;
    runner.check_whole()?;
    if runner.start.loaded == Loaded::Nothing {
        if !runner.load_weights()? {
            runner
                .logger()
                .warning("no checkpoint is loaded: evaluating a model with initial weights");
            runner.broadcast_model()?;
        }
        runner.start.loaded = Loaded::Model;
    }
    match evaluate(runner, split)? {
        Ok(metrics) => {
            runner.call_hooks(|hook, runner| hook.after_run(runner))?;
            Ok(metrics)
        }
        Err(signal) => Err(Error::Interrupted { signal: signal.into(), saved: false }),
    }
}

/// Evaluates the model on the validation set into `metrics`, if the run has one and has not just
/// done so. Only a signal interrupts it.
pub(super) fn validate(runner: &mut Runner, metrics: &mut Metrics) -> Result<Option<Interrupt>> {
    let position = runner.position();
    let is_missing = runner.evaluations[EvalSplit::Val as usize].is_none();
    if is_missing || position.validated == Some(position.iter) {
        return Ok(None);
    }
    runner.check_all_losses()?;
    runner.settle()?;
    Ok(match evaluate(runner, EvalSplit::Val)? {
        Ok(fresh) => {
            // The ranks exchange before the next iteration, because batches of another data set
            // take another time; an exhausted time budget does not end a validation.
            runner.budget.exchange_next();
            *metrics = fresh;
            None
        }
        Err(signal) => Some(Interrupt::Signal(signal)),
    })
}

/// Calls a stage of validation on the hooks, or the corresponding stage of the test.
macro_rules! stage {
    ($runner:ident, $split:ident, $val:ident | $test:ident ($($arg:expr),*)) => {
        $runner.call_hooks(|hook, runner| match $split {
            EvalSplit::Val => hook.$val(runner $(, $arg)*),
            EvalSplit::Test => hook.$test(runner $(, $arg)*),
        })?
    };
}

/// Evaluates the model. Every rank takes its share and gets the same metrics; or all end before the
/// same batch because of a signal, whose number is returned.
fn evaluate(runner: &mut Runner, split: EvalSplit) -> Result<std::result::Result<Metrics, u8>> {
    let (name, iter) = (split.name(), runner.position.iter);
    let _span = info_span!(target: "runner", "evaluate", split = name, iter).entered();
    stage!(runner, split, before_val | before_test());
    stage!(runner, split, before_val_epoch | before_test_epoch());
    let at = |error: train_data::Error| {
        Error::data_failed(Some(format!("{}_evaluator", split.name())), error)
    };
    let (start, mut data_time) = (Instant::now(), 0.0);
    let mut last = start;
    let part = runner.eval_parts(split)?.0;
    part.evaluator.reset();
    let mut batches = Batches::new(part);
    for index in 0.. {
        let mut batch = match batches.next(runner, split, index)? {
            Ok(Some(batch)) => batch,
            Ok(None) => break,
            Err(signal) => return Ok(Err(signal)),
        };
        data_time += last.elapsed().as_secs_f64();
        stage!(runner, split, before_val_iter | before_test_iter(index, &mut batch));
        let (part, engine) = runner.eval_parts(split)?;
        let outputs = engine.eval(&batch)?;
        part.evaluator.update(&batch, &outputs).map_err(at)?;
        let done = (index + 1) as f64;
        part.batches = part.batches.max(index + 1);
        part.times = (data_time / done, start.elapsed().as_secs_f64() / done);
        stage!(runner, split, after_val_iter | after_test_iter(index, &batch, &outputs));
        last = Instant::now();
    }
    let group = runner.group.clone();
    let evaluator = &mut runner.eval_parts(split)?.0.evaluator;
    evaluate::reduce(&group, evaluator)?;
    let metrics = evaluator.compute().map_err(at)?;
    evaluator.reset();
    if split == EvalSplit::Val {
        runner.position.validated = Some(runner.position.iter);
    }
    stage!(runner, split, after_val_epoch | after_test_epoch(&metrics));
    stage!(runner, split, after_val | after_test());
    Ok(Ok(metrics))
}

/// Batches of an evaluation on this rank.
enum Batches {
    /// Of a data set, with the number of batches that every rank has.
    Set(Box<dyn Iterator<Item = train_data::Result<Batch>>>, usize),
    Stream,
}

impl Batches {
    fn new(part: &mut Evaluation) -> Self {
        match &mut part.stream {
            Some(stream) => {
                stream.restart();
                Self::Stream
            }
            None => {
                Self::Set(Box::new(part.loader.batches_from(0, 0)), part.loader.common_batches())
            }
        }
    }

    /// Returns the next batch; `None` at the end; or the number of a signal, before the same batch
    /// on all ranks.
    fn next(
        &mut self,
        runner: &mut Runner,
        split: EvalSplit,
        index: usize,
    ) -> Result<std::result::Result<Option<Batch>, u8>> {
        match self {
            // Ranks may have one batch more than others, and exchange only while all have one.
            Self::Set(batches, common) => {
                if index < *common
                    && let Some(Interrupt::Signal(signal)) = runner.interrupt()?
                {
                    return Ok(Err(signal));
                }
                Ok(Ok(batches.next().transpose()?))
            }
            Self::Stream => loop {
                let stream = &mut runner.eval_parts(split)?.0.stream;
                let batch = stream.as_mut().map_or(Ok(None), StreamLoader::next_batch)?;
                // No rank knows the other ranks' numbers of batches, so each waits for the last.
                let mut all = [u8::from(batch.is_some()), signals::pending()];
                runner.group.all_reduce(&mut all, ReduceOp::Max)?;
                let [any, signal] = all;
                if signal > 0 {
                    return Ok(Err(signal));
                }
                if batch.is_some() || any == 0 {
                    return Ok(Ok(batch));
                }
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;
    use crate::data::{Array, Batch, BoxError};
    use crate::evaluate::Metric;
    use crate::testing::{blank, builder};

    /// Metric that adds this number of records per batch, whatever the batch's size.
    struct Records(usize, Vec<Value>);

    impl Metric for Records {
        fn update(&mut self, _: &Batch, _: &[(String, Array)]) -> Result<(), BoxError> {
            self.1.extend(vec![Value::Null; self.0]);
            Ok(())
        }
        fn records(&mut self) -> Option<&mut Vec<Value>> {
            Some(&mut self.1)
        }
        fn compute(&self) -> Result<Vec<(String, f64)>, BoxError> {
            Ok(vec![("count".into(), self.1.len() as f64)])
        }
        fn reset(&mut self) {
            self.1.clear();
        }
    }

    #[test]
    fn metric_with_one_record_per_batch_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let evaluated = |records, split| {
            // Batches of two, two and one samples.
            let data = || crate::DataLoaderConfig { batch_size: 2, ..blank(5) };
            let run = builder(dir.path(), 1).validation(data(), Records(records, Vec::new()));
            let mut run = run.test(data(), Records(records, Vec::new())).build().unwrap();
            let metrics = if split == EvalSplit::Val { run.validate() } else { run.test() };
            metrics.map_err(|error| error.to_string())
        };
        for (split, part) in [(EvalSplit::Val, "val"), (EvalSplit::Test, "test")] {
            let error = evaluated(1, split).unwrap_err();
            let says =
                format!("{part}_evaluator: metric `Records`: 1 records of a batch of 2 samples: ");
            assert!(error.starts_with(&says), "{error}");
            assert!(error.contains("must add one record for each sample"), "{error}");
        }
        // The last batch is smaller.
        let error = evaluated(2, EvalSplit::Val).unwrap_err();
        assert!(error.contains("`Records`: 2 records of a batch of 1 samples"), "{error}");
    }
}
