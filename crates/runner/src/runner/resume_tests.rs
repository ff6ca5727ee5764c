//! Runs that resume with a changed configuration, on an engine whose every gradient is 1.

use std::path::Path;
use std::sync::Arc;

use fused_optim::{DType, Sgd, SgdHyper};
use parking_lot::Mutex;

use super::{DataLoaderConfig, Hook, Runner, RunnerBuilder, TrainConfig};
use crate::data::Batch;
use crate::hooks::CheckpointHook;
use crate::optim_wrapper::{BuildOptimWrapper, OptimWrapper, OptimWrapperFactory};
use crate::schedulers::{Floor, Param, SchedulerConfig, Shape};
use crate::testing::{blank, builder};
use crate::{Error, Result};

/// Samples of each batch and the learning rate that it was trained with; ends the run before batch `stop`.
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
            return Err(Error::Data("killed".into()));
        }
        self.batches.lock().push((batch.len(), runner.lr()));
        Ok(())
    }
}

/// A run of so many epochs over so many samples, in batches of a size, each step of so many batches.
#[derive(Clone, Copy, Debug)]
struct Part {
    samples: usize,
    batch: usize,
    counts: usize,
    epochs: usize,
    /// The batch that it is killed before.
    stop: usize,
    /// Whether it has a checkpoint after each epoch; else before that batch.
    by_epoch: bool,
}

const PART: Part =
    Part { samples: 24, batch: 2, counts: 3, epochs: 4, stop: usize::MAX, by_epoch: false };

/// What the runs in a directory did, one after the other.
struct Done {
    batches: Vec<(usize, f64)>,
    outcome: Result<()>,
    log: String,
}

impl Done {
    /// The learning rate of each sample.
    fn rates(&self) -> Vec<f64> {
        let rates = self.batches.iter();
        rates.flat_map(|(count, rate)| std::iter::repeat_n(*rate, *count)).collect()
    }
}

/// Runs one after the other.
fn runs(parts: &[Part], change: impl Fn(RunnerBuilder, usize) -> RunnerBuilder) -> Done {
    let dir = tempfile::tempdir().unwrap();
    let batches = Arc::new(Mutex::new(Vec::new()));
    let mut outcome = Ok(());
    for (index, part) in parts.iter().enumerate() {
        let loader = DataLoaderConfig { batch_size: part.batch, ..blank(part.samples) };
        let notes = Notes { batches: Arc::clone(&batches), stop: part.stop };
        let interval = if part.by_epoch { 1 } else { part.stop };
        let mut checkpoints = CheckpointHook::new(interval);
        checkpoints.by_epoch = part.by_epoch;
        let run = builder(dir.path(), 1).train_cfg(TrainConfig::new(part.epochs));
        let run = run.train_dataloader(loader.shuffled()).resume(true);
        let run = change(run.optim_wrapper(sgd(0.1, 0.0, part.counts)), index);
        let mut run = run.hook(Box::new(checkpoints)).hook(Box::new(notes)).build().unwrap();
        outcome = run.train().map(drop);
    }
    let batches = batches.lock().clone();
    Done { batches, outcome, log: log(dir.path()) }
}

/// Everything logged into `dir`.
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

/// The learning rate of each epoch.
fn by_epoch(parts: &[Part], shape: &Shape) -> (Vec<f64>, String) {
    let done =
        runs(parts, |run, _| run.param_scheduler(SchedulerConfig::new(Param::Lr, shape.clone())));
    done.outcome.as_ref().unwrap();
    (done.rates().into_iter().step_by(24).collect(), done.log)
}

#[test]
fn a_schedule_ends_where_it_was_to_end() {
    let linear = Shape::Linear { start_factor: 0.1, end_factor: 1.0 };
    let poly = Shape::Poly { power: 1.0, eta_min: 0.02 };
    let cosine = Shape::CosineAnnealing { t_max: None, floor: Floor::Value(0.0) };
    for (shape, last) in [(linear, 0.1), (poly, 0.02), (cosine, 0.025)] {
        let first = Part { epochs: 3, ..PART };
        let whole = by_epoch(&[first], &shape).0;
        // Finished, and inside the second epoch.
        for stop in [usize::MAX, 17] {
            let parts = [Part { stop, ..first }, Part { epochs: 6, ..PART }];
            let (rates, log) = by_epoch(&parts, &shape);
            assert_eq!(rates[..3], whole);
            assert!(rates[2..].iter().all(|rate| (rate - last).abs() < 1e-12), "{rates:?}");
            assert!(log.contains("`end` 3 instead of 6"), "{log}");
            assert_eq!(log.contains("it has ended"), stop == usize::MAX, "{log}");
        }
        let (_, log) = by_epoch(&[Part { stop: 17, ..first }, first], &shape);
        assert!(!log.contains("going on with the checkpoint's"), "{log}");
    }
}

#[test]
fn what_a_checkpoint_overrules_is_said() {
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
        "`lr` 0.1 instead of 0.05",
        "`weight_decay` 0.0 instead of 0.01",
        "`type` \"Step\" instead of \"Exponential\"",
        "`gamma` 0.5 instead of 0.9",
    ] {
        // Each time.
        assert_eq!(done.log.matches(said).count(), 2, "{said}: {}", done.log);
    }
}
