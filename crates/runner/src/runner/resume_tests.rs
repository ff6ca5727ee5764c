//! Runs that resume with a changed configuration, on an engine whose gradients are all 1.

use std::path::Path;
use std::sync::Arc;

use fused_optim::{DType, Sgd, SgdHyper, SliceMut};
use parking_lot::Mutex;

use super::{DataLoaderConfig, Hook, Runner, RunnerBuilder, TrainConfig};
use crate::data::Batch;
use crate::hooks::CheckpointHook;
use crate::model::ModelFactory;
use crate::optim_wrapper::{BuildOptimWrapper, OptimWrapper, OptimWrapperFactory};
use crate::schedulers::{Floor, Param, SchedulerConfig, Shape};
use crate::testing::{FakeEngine, Values, blank, builder};
use crate::{Error, Result};

/// Records the number of samples and the learning rate of each batch; ends the run before batch
/// `stop`.
struct Notes {
    batches: Arc<Mutex<Vec<(usize, f64)>>>,
    stop: usize,
}

impl Hook for Notes {
    fn name(&self) -> &'static str {
        "Notes"
    }

    fn before_train_iter(&mut self, runner: &mut Runner, batch: &mut Batch) -> Result<()> {
        if runner.position().iter == self.stop {
            return Err(Error::data("killed"));
        }
        self.batches.lock().push((batch.len(), runner.lr()));
        Ok(())
    }
}

/// A part of a run: number of samples, batch size, batches per step, epochs.
#[derive(Clone, Copy, Debug)]
struct Part {
    samples: usize,
    batch: usize,
    counts: usize,
    epochs: usize,
    /// Index of the batch before which it is killed.
    stop: usize,
    /// Whether it saves a checkpoint after each epoch; otherwise the first part saves one before
    /// that batch, later parts after each batch.
    by_epoch: bool,
}

const PART: Part =
    Part { samples: 24, batch: 2, counts: 3, epochs: 4, stop: usize::MAX, by_epoch: false };

/// Result of the runs in a directory.
struct Done {
    batches: Vec<(usize, f64)>,
    /// Number of optimizer steps, if each step uses the average of its gradients.
    steps: f32,
    outcome: Result<()>,
    log: String,
}

impl Done {
    /// Learning rate of each sample.
    fn rates(&self) -> Vec<f64> {
        let rates = self.batches.iter();
        rates.flat_map(|(count, rate)| std::iter::repeat_n(*rate, *count)).collect()
    }
}

/// Runs the parts one after another.
fn runs(parts: &[Part], change: impl Fn(RunnerBuilder, usize) -> RunnerBuilder) -> Done {
    let dir = tempfile::tempdir().unwrap();
    let batches = Arc::new(Mutex::new(Vec::new()));
    let (mut outcome, mut steps) = (Ok(()), 0.0);
    for (index, part) in parts.iter().enumerate() {
        let loader = DataLoaderConfig { batch_size: part.batch, ..blank(part.samples) };
        let notes = Notes { batches: Arc::clone(&batches), stop: part.stop };
        let interval = match part.stop {
            // After the last batch only.
            usize::MAX => 0,
            stop if index == 0 && !part.by_epoch => stop,
            _ => 1,
        };
        let mut checkpoints = CheckpointHook::new(interval);
        checkpoints.by_epoch = part.by_epoch;
        let run = builder(dir.path(), 1).train_cfg(TrainConfig::new(part.epochs));
        let run = run.train_dataloader(loader.shuffled()).resume(true);
        let run = change(run.optim_wrapper(sgd(0.1, 0.0, part.counts)), index);
        let mut run = run.hook(Box::new(checkpoints)).hook(Box::new(notes)).build().unwrap();
        outcome = run.train().map(drop);
        let read = &mut |params: &mut [SliceMut<'_>]| {
            let SliceMut::F32(weights) = &params[0] else { panic!("not f32") };
            steps = (1.0 - weights[0]) / 0.1;
            Ok(())
        };
        run.engine_mut().with_params(read).unwrap();
    }
    let batches = batches.lock().clone();
    Done { batches, steps, outcome, log: log(dir.path()) }
}

/// All log text in `dir`.
fn log(dir: &Path) -> String {
    let mut text = String::new();
    for path in std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()) {
        if path.is_dir() {
            text += &log(&path);
        } else if path.extension().is_some_and(|end| end == "log") {
            text += &std::fs::read_to_string(path).unwrap();
        }
    }
    text
}

/// SGD that steps every `counts` batches.
fn sgd(lr: f64, weight_decay: f64, counts: usize) -> OptimWrapperFactory {
    let build: BuildOptimWrapper = Box::new(move |params, _| {
        let hyper = SgdHyper { lr, weight_decay, ..SgdHyper::default() };
        Ok(OptimWrapper::new(Box::new(Sgd::with_one_group(hyper, params.len())?), counts))
    });
    OptimWrapperFactory { dtype: DType::F32, build }
}

fn unchanged(run: RunnerBuilder, _: usize) -> RunnerBuilder {
    run
}

#[test]
fn resumed_accumulation_averages_its_gradients() {
    let mut failed = Vec::new();
    for stop in [1, 2, 4, 12, 17] {
        for (batch, counts, epochs) in
            [(2, 3, 4), (2, 5, 4), (2, 2, 4), (2, 1, 4), (1, 3, 4), (1, 6, 4), (4, 3, 4), (3, 1, 5)]
        {
            let first = Part { stop, counts: 5, ..PART };
            // The second part is also killed during an accumulation, at an iteration of the first.
            let last = Part { batch, counts, epochs, ..PART };
            let second = Part { stop: 2 * stop / batch + 2, ..last };
            let done = runs(&[first, second, last], unchanged);
            let seen: usize = done.batches.iter().map(|batch| batch.0).sum();
            if seen != epochs * 24 || (done.steps - done.steps.round()).abs() > 1e-4 {
                let (steps, outcome) = (done.steps, done.outcome);
                failed
                    .push(format!("{stop} {batch} {counts} {epochs}: {seen} {steps} {outcome:?}"));
            }
        }
    }
    assert!(failed.is_empty(), "{failed:#?}");
}

#[test]
fn resumed_accumulation_weights_its_gradients_by_tokens() {
    // All gradients are 1, so a step of wrong weights is not 1.
    let change = |run: RunnerBuilder, _| {
        let model: ModelFactory = Box::new(|_| {
            let mut engine = FakeEngine::new(&[("w", Values::F32(vec![1.0, 2.0]))], &[]);
            engine.count = |batch, step| Some((batch.len() * [1, 7, 30][step % 3]) as f64);
            Ok(Box::new(engine))
        });
        run.model(model)
    };
    for stop in [1, 2, 4, 12] {
        for (batch, counts, epochs) in [(2, 5, 4), (2, 3, 4), (1, 6, 4), (4, 3, 4), (3, 1, 5)] {
            let first = Part { stop, counts: 5, ..PART };
            let last = Part { batch, counts, epochs, ..PART };
            let second = Part { stop: 2 * stop / batch + 2, ..last };
            let done = runs(&[first, second, last], change);
            let seen: usize = done.batches.iter().map(|batch| batch.0).sum();
            assert_eq!(seen, epochs * 24, "{:?}", done.outcome);
            let off = (done.steps - done.steps.round()).abs();
            assert!(off < 1e-4, "{stop} {batch} {counts}: {}", done.steps);
        }
    }
    // Gradients of a run that did not count tokens have no weight.
    let parts = [Part { stop: 2, ..PART }, PART];
    let changed = |run, index| if index == 0 { run } else { change(run, index) };
    let error = runs(&parts, changed).outcome.unwrap_err().to_string();
    assert!(error.contains("some batches of a step only"), "{error}");
}

#[test]
fn extended_run_begins_a_new_step() {
    // Steps of five batches, and a step of the remaining seven.
    let first = Part { counts: 5, epochs: 1, ..PART };
    let done = runs(&[first, Part { epochs: 2, ..first }], unchanged);
    assert_eq!(done.steps.round(), 6.0);
    assert!((done.steps - 6.0).abs() < 1e-4, "{}", done.steps);
}

/// Schedules by iterations: a warm-up, one over the whole run, and one by epochs converted to
/// iterations.
fn by_iterations(run: RunnerBuilder, _: usize) -> RunnerBuilder {
    let linear = Shape::Linear { start_factor: 0.1, end_factor: 1.0 };
    let linear = SchedulerConfig::new(Param::Lr, linear);
    let poly = SchedulerConfig::new(Param::Lr, Shape::Poly { power: 1.0, eta_min: 0.0 });
    let decay = SchedulerConfig::new(Param::Lr, Shape::Step { step_size: 1, gamma: 0.5 });
    run.param_scheduler(SchedulerConfig { by_epoch: false, end: Some(30), ..linear })
        .param_scheduler(SchedulerConfig { by_epoch: false, ..poly })
        .param_scheduler(SchedulerConfig { convert_to_iter_based: true, ..decay })
}

#[test]
fn changed_batch_size_keeps_the_rate_of_each_sample() {
    let whole = runs(&[PART], by_iterations).rates();
    for (batch, stop, by_epoch) in [
        (1, 12, true),
        (4, 12, true),
        (1, 12, false),
        (1, 17, false),
        (4, 16, false),
        (6, 24, false),
    ] {
        let first = Part { stop, by_epoch, ..PART };
        let done = runs(&[first, Part { batch, ..PART }], by_iterations);
        done.outcome.as_ref().unwrap();
        let rates = done.rates();
        assert_eq!(rates.len(), whole.len());
        // An iteration uses the rate of its first sample.
        let first_of = |at: usize| if at < 2 * stop { at } else { at / batch * batch };
        let expected: Vec<_> = (0..whole.len()).map(|at| whole[first_of(at)]).collect();
        assert_eq!(rates, expected, "batches of {batch} from {stop}");
        assert!(done.log.contains(&format!("batch_size is {batch} instead of 2")), "{}", done.log);
    }
}

#[test]
fn changed_data_set_between_epochs_keeps_the_rate_of_each_epoch() {
    let whole = runs(&[PART], by_iterations).rates();
    for (samples, by_epoch) in [(23, true), (36, true), (12, true), (5, true), (36, false)] {
        let first = Part { stop: 12, by_epoch, ..PART };
        let done = runs(&[first, Part { samples, ..PART }], by_iterations);
        done.outcome.as_ref().unwrap();
        let rates = done.rates();
        assert_eq!(rates.len(), 24 + 3 * samples);
        for epoch in 1..4 {
            assert_eq!(rates[24 + (epoch - 1) * samples], whole[24 * epoch], "{samples}: {epoch}");
        }
        let said = format!("data set has {samples} samples instead of 24");
        assert!(done.log.contains(&said), "{}", done.log);
    }
}

#[test]
fn changed_data_set_inside_an_epoch_is_refused() {
    // Six batches of four samples in both cases.
    let first = Part { samples: 22, batch: 4, stop: 3, ..PART };
    let done = runs(&[first, Part { samples: 23, stop: usize::MAX, ..first }], unchanged);
    let said = done.outcome.unwrap_err().to_string();
    assert!(said.contains("iter_3 was written inside an epoch of 22 samples"), "{said}");
    assert!(said.contains("23"), "{said}");
}

#[test]
fn checkpoint_by_epochs_is_refused_by_a_run_by_iterations() {
    let change = |run: RunnerBuilder, index| match index {
        0 => run,
        _ => run.train_cfg(TrainConfig::by_iters(48)),
    };
    let said = runs(&[Part { stop: 14, ..PART }, PART], change).outcome.unwrap_err().to_string();
    assert!(said.contains("by epochs"), "{said}");
}

/// Learning rate of each epoch.
fn by_epoch(parts: &[Part], shape: &Shape) -> (Vec<f64>, String) {
    let done =
        runs(parts, |run, _| run.param_scheduler(SchedulerConfig::new(Param::Lr, shape.clone())));
    done.outcome.as_ref().unwrap();
    (done.rates().into_iter().step_by(24).collect(), done.log)
}

#[test]
fn schedule_of_the_checkpoint_keeps_its_end() {
    let linear = Shape::Linear { start_factor: 0.1, end_factor: 1.0 };
    let poly = Shape::Poly { power: 1.0, eta_min: 0.02 };
    let cosine = Shape::CosineAnnealing { t_max: None, floor: Floor::Value(0.0) };
    for (shape, last) in [(linear, 0.1), (poly, 0.02), (cosine, 0.025)] {
        let first = Part { epochs: 3, ..PART };
        let whole = by_epoch(&[first], &shape).0;
        // Both finished, and inside the second epoch.
        for stop in [usize::MAX, 17] {
            let parts = [Part { stop, ..first }, Part { epochs: 6, ..PART }];
            let (rates, log) = by_epoch(&parts, &shape);
            assert_eq!(rates[..3], whole);
            assert!(rates[2..].iter().all(|rate| (rate - last).abs() < 1e-12), "{rates:?}");
            assert!(log.contains("`end` = 3 instead of 6"), "{log}");
            assert_eq!(log.contains("it has ended"), stop == usize::MAX, "{log}");
        }
        let (_, log) = by_epoch(&[Part { stop: 17, ..first }, first], &shape);
        assert!(!log.contains("resuming with the checkpoint's"), "{log}");
    }
}

#[test]
fn differences_overruled_by_the_checkpoint_are_logged() {
    let change = |run: RunnerBuilder, index: usize| {
        let (lr, weight_decay) = if index == 0 { (0.1, 0.0) } else { (0.05, 0.01) };
        let shape = match index {
            0 => Shape::Step { step_size: 2, gamma: 0.5 },
            _ => Shape::Exponential { gamma: 0.9 },
        };
        run.optim_wrapper(sgd(lr, weight_decay, 1))
            .param_scheduler(SchedulerConfig::new(Param::Lr, shape))
    };
    let done = runs(&[Part { stop: 12, ..PART }, Part { stop: 24, ..PART }, PART], change);
    done.outcome.as_ref().unwrap();
    let rates: Vec<_> = done.rates().into_iter().step_by(24).collect();
    assert_eq!(rates, [0.1, 0.1, 0.05, 0.05]);
    for said in [
        "`lr` = 0.1 instead of 0.05",
        "`weight_decay` = 0.0 instead of 0.01",
        "`type` = \"Step\" instead of \"Exponential\"",
        "`gamma` = 0.5 instead of 0.9",
    ] {
        // Logged at each resume.
        assert_eq!(done.log.matches(said).count(), 2, "{said}: {}", done.log);
    }
}

#[test]
fn changed_number_of_schedulers_is_refused() {
    let decay = || SchedulerConfig::new(Param::Lr, Shape::Exponential { gamma: 0.9 });
    let change =
        |run: RunnerBuilder, index| if index > 0 { run.param_scheduler(decay()) } else { run };
    let said = runs(&[Part { stop: 12, ..PART }, PART], change).outcome.unwrap_err().to_string();
    assert!(said.contains("iter_12 has 0 schedulers, but this run has 1: resume with "), "{said}");
}
