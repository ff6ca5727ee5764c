//! Checks a run before it starts, and implements `runner check`, which also tries samples of each
//! data set on the model.
//!
//! A check runs on one rank on the host and creates nothing on disk. From each data set it takes
//! the samples with the smallest and the largest integers (labels, indices) among a few hundred, so
//! that a label out of range of the model is likely among them.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use collective::ProcessGroup;
use fused_optim::{DType, Slice};
use parking_lot::Mutex;
use tracing::dispatcher::get_default;
use tracing::subscriber::NoSubscriber;

use super::builder::build_model;
use super::loading;
use super::scheduling::make_schedulers;
use super::work_dir::has_run_begun_with;
use super::{DataLoaderConfig, Hook, Length, Priority, RunnerBuilder, TrainConfig};
use crate::checkpoint::check_outside;
use crate::config::Mistakes;
use crate::data::{ArrayData, Batch, DataLoader};
use crate::engine::{Engine, EngineState, GradSink, SharedSink, StepContext, WrongGradient};
use crate::evaluate::Evaluator;
use crate::model::{LoraOptions, ModelContext};
use crate::placement::Placement;
use crate::schedulers::{SchedulerConfig, Shape};
use crate::{Error, Result};

/// Number of samples of a data set that are searched.
const SEARCHED: usize = 256;

impl RunnerBuilder {
    /// Compares the gradients of the model with differences of its loss on samples of the training
    /// data, in `f64` or `f32`. Returns the parameters with wrong gradients.
    pub(crate) fn wrong_gradients(
        self,
        is_f64: bool,
        ignore: &[String],
    ) -> Result<Vec<WrongGradient>> {
        let (Some(model), Some(loader)) = (self.model, self.train_loader) else {
            return Err(Error::Config("checking gradients needs a train_dataloader".to_owned()));
        };
        let group = ProcessGroup::threads(1, Duration::from_secs(60))?.remove(0);
        let cx = context(is_f64, self.frozen, self.lora);
        build_model(model, &cx)?.check_gradients(&make(loader, &group)?.1, ignore)
    }

    /// Returns the errors that can be found before anything is created.
    pub(super) fn refused(&self) -> Result<()> {
        let mistakes = Mistakes::default();
        self.refuse(&mistakes);
        mistakes.check()
    }

    /// Adds all reasons for which this run cannot start to `mistakes`.
    pub(crate) fn refuse(&self, mistakes: &Mistakes) {
        if let Some(split) = self.only.filter(|_| !self.evaluates()) {
            mistakes.add(split.missing());
        }
        check_names(&self.hooks, mistakes);
        let has_subscriber = || !get_default(|current| current.is::<NoSubscriber>());
        if self.log_config.trace.is_some() && has_subscriber() {
            let text = "trace: this program has a subscriber of `tracing` already, which gets the same spans: leave \
                        `trace` out, or install `runner::sinks::ChromeTrace` in its place";
            mistakes.add(Error::Config(text.into()));
        }
        let in_work_dir = self.work_dir.as_ref().map(|dir| dir.join("epoch_1"));
        for out in self.log_config.trace.iter().chain(&in_work_dir) {
            check_outside(out).unwrap_or_else(|error| mistakes.add(error));
        }
        // A run that resumes from its own checkpoints no longer needs that one.
        let goes_on = |from: &Path| {
            self.resume && self.work_dir.as_ref().is_some_and(|dir| has_run_begun_with(dir, from))
        };
        let from = self.load_from.as_ref().filter(|path| !goes_on(path));
        if let Some(why) = from.and_then(|path| loading::refusal(path)) {
            mistakes.add(Error::Checkpoint(why));
        }
        if let Some(train) = &self.train {
            check_lengths(train, self.train_loader.as_ref(), &self.schedulers, mistakes);
        }
    }

    /// Builds model and data sets and tries samples on the model; if the configuration `is_read`
    /// without errors, also builds the other parts.
    pub(crate) fn try_parts(
        mut self,
        mistakes: &Mistakes,
        is_read: bool,
        warnings: &mut Vec<String>,
    ) -> Result<()> {
        let group = ProcessGroup::threads(1, Duration::from_secs(60))?.remove(0);
        let cx = context(false, std::mem::take(&mut self.frozen), self.lora.take());
        let spans = std::mem::take(&mut self.spans);
        let add = |key: &str, why: &str, error: Error| {
            let place = spans.iter().find(|(known, _)| *known == key).map(|(_, place)| place);
            let place = place.map_or_else(String::new, |place| format!("{place}: "));
            mistakes.add(Error::Config(format!("{place}{key}: {why}{error}")));
        };
        let model = self.model.take().map(|model| build_model(model, &cx)).transpose();
        let mut engine = model.unwrap_or_else(|error| {
            add("model", "", error);
            None
        });
        let file = self.load_from.as_ref().filter(|path| loading::refusal(path).is_none());
        let file = file.and_then(|path| self.load_options.file(path));
        if let (Some(engine), Some(file)) = (&engine, file) {
            let checked = self.load_options.check(&file, &**engine);
            checked.map_or_else(|error| add("load_from", "", error), |text| warnings.extend(text));
        }
        let [val, test] = std::mem::take(&mut self.evaluations);
        let parts = [
            ("train_dataloader", self.train_loader.take().map(|loader| (loader, None))),
            ("val_dataloader", val.map(|(loader, evaluator)| (loader, Some(evaluator)))),
            ("test_dataloader", test.map(|(loader, evaluator)| (loader, Some(evaluator)))),
        ];
        let mut trained_on = None;
        // Without the data no begin is beyond the end of an epoch.
        let mut epoch_length = usize::MAX;
        for (key, part) in parts {
            let Some((loader, evaluator)) = part else { continue };
            let (loader, batch) = match make(loader, &group) {
                Ok(made) => made,
                Err(error) => {
                    add(key, "", error);
                    continue;
                }
            };
            if evaluator.is_none() {
                epoch_length = loader.batches_per_epoch();
            }
            let Some(engine) = &mut engine else { continue };
            let tried = try_batch(&mut **engine, &batch, evaluator, &mut trained_on);
            tried.unwrap_or_else(|error| add(key, "trying samples on the model: ", error));
        }
        let Some(train) = self.train else { return Ok(()) };
        let iters = train.length.iters(epoch_length);
        warnings
            .extend(self.hooks.iter().filter_map(|(_, hook)| hook.warning(train.length, iters)));
        let (Some(engine), Some(optim), true) = (engine, self.optim, is_read) else {
            return Ok(());
        };
        // In a run by epochs, the number of iterations of a cycle depends on the number of ranks.
        let is_exact =
            |of: &SchedulerConfig| of.by_epoch || matches!(train.length, Length::Iters(_));
        self.schedulers.retain(|of| is_exact(of) || !matches!(of.shape, Shape::OneCycle(_)));
        let made = (optim.build)(engine.params(), &Placement::host()).and_then(|mut optim| {
            make_schedulers(&self.schedulers, &train, epoch_length, &mut optim)
        });
        made.map_or_else(|error| add("optim_wrapper", "", error), drop);
        Ok(())
    }
}

/// Options of a model that is built on the host for a trial.
fn context(is_f64: bool, frozen: Vec<String>, lora: Option<LoraOptions>) -> ModelContext {
    ModelContext { is_f64, frozen, lora, ..ModelContext::new(DType::F32, 0) }
}

/// Returns a data set's loader and a batch of extreme samples; for a stream its first batch.
fn make(mut config: DataLoaderConfig, group: &ProcessGroup) -> Result<(DataLoader, Batch)> {
    let stream = config.make_stream(group, 0, false)?;
    let loader = config.make(group, 0)?;
    if let Some(mut stream) = stream {
        let first = stream.next_batch()?;
        let none = || Error::Data("the stream has no samples: list shards with records".into());
        return Ok((loader, first.ok_or_else(none)?));
    }
    let len = loader.dataset_len();
    let count = len.min(SEARCHED);
    let searched: Vec<_> = (0..count).map(|k| k * len / count).collect();
    let batch = loader.samples(&searched)?;
    // Normalization layers may need two samples.
    let mut chosen = vec![searched[0], searched[count - 1]];
    for (_, array) in batch.iter() {
        let (ArrayData::I64(numbers), Some(extent)) = (array.data(), array.shape().first()) else {
            continue;
        };
        if *extent != count || numbers.is_empty() {
            continue;
        }
        let of_sample = numbers.len() / count;
        let numbers = || numbers.iter().enumerate();
        let extremes = [numbers().min_by_key(|(_, n)| **n), numbers().max_by_key(|(_, n)| **n)];
        chosen.extend(extremes.iter().flatten().map(|(at, _)| searched[at / of_sample]));
    }
    chosen.sort_unstable();
    chosen.dedup();
    let batch = loader.samples(&chosen)?;
    Ok((loader, batch))
}

/// Trains on a batch without a step, or evaluates it. The loss of evaluation data is checked as
/// well if they have the fields of the training data.
fn try_batch(
    engine: &mut dyn Engine,
    batch: &Batch,
    evaluator: Option<Evaluator>,
    trained_on: &mut Option<Vec<String>>,
) -> Result<()> {
    let fields: Vec<_> = batch.iter().map(|(name, _)| name.to_owned()).collect();
    if let Some(mut evaluator) = evaluator {
        evaluator.update(batch, &engine.eval(batch)?)?;
        if trained_on.as_ref() != Some(&fields) {
            return Ok(());
        }
    }
    *trained_on = Some(fields);
    let sink: SharedSink = Arc::new(Mutex::new(NoSink));
    let mut state = EngineState::default();
    engine.train_step(batch, &mut StepContext::new(sink, &mut state)).map(drop)
}

/// Discards gradients.
struct NoSink;

impl GradSink for NoSink {
    fn ready(&mut self, _: usize, _: Slice<'_>) -> Result<()> {
        Ok(())
    }
}

/// Returns errors for options that do not apply to a run by epochs, or by iterations.
fn check_lengths(
    train: &TrainConfig,
    loader: Option<&DataLoaderConfig>,
    schedulers: &[SchedulerConfig],
    mistakes: &Mistakes,
) {
    let add = |text: &str| mistakes.add(Error::Config(text.to_owned()));
    let is_stream = loader.is_some_and(|loader| loader.stream.is_some());
    let infinite = loader.is_some_and(|loader| loader.infinite);
    if is_stream && schedulers.iter().any(|scheduler| scheduler.convert_to_iter_based) {
        add(
            "a stream has no epochs that a scheduler could be converted from: set by_epoch = false, and begin and end \
             in iterations",
        );
    }
    if loader.is_some_and(|loader| !loader.round_up) {
        add("`round_up` must be true in training: all ranks need equal numbers of batches");
    }
    let whole = |scheduler: &SchedulerConfig| match train.length {
        Length::Epochs(epochs) => scheduler.by_epoch.then_some(epochs as u64),
        Length::Iters(iters) => (!scheduler.by_epoch).then_some(iters as u64),
    };
    for scheduler in schedulers.iter().filter(|scheduler| scheduler.end.is_none()) {
        if let Some(end) = whole(scheduler).filter(|end| *end <= scheduler.begin && *end > 0) {
            let begin = scheduler.begin;
            add(&format!(
                "end should be larger than begin, but got begin={begin}, end={end}, and the run ends at {end}"
            ));
        }
    }
    match train.length {
        Length::Epochs(_) if is_stream => add(
            "a stream has no epochs: count iterations, by train_cfg = { by_epoch = false, max_iters = ... }",
        ),
        Length::Epochs(_) if infinite => {
            add("InfiniteSampler has no epochs: set train_cfg.type = \"IterBasedTrainLoop\"");
        }
        Length::Iters(_) if schedulers.iter().any(SchedulerConfig::counts_epochs) => add(
            "a run by iterations has no epochs for a scheduler to count: set by_epoch = false or \
             convert_to_iter_based = true",
        ),
        _ => {}
    }
}

/// Returns errors for two hooks that would save their state under one name, step schedulers twice
/// or measure times twice.
fn check_names(hooks: &[(Priority, Box<dyn Hook>)], mistakes: &Mistakes) {
    for (i, (_, hook)) in hooks.iter().enumerate() {
        let name = hook.name();
        let is_one =
            hook.state_dict().is_some() || ["IterTimerHook", "ParamSchedulerHook"].contains(&name);
        if is_one && hooks[..i].iter().any(|(_, h)| h.name() == name) {
            let why =
                format!("two hooks called `{name}`, but a run can have only one: remove the other");
            mistakes.add(Error::Config(why));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::testing::register;

    const GOOD: &str = "model.type = 'Fake'\ntrain_cfg.max_epochs = 2\n\
                        train_dataloader.batch_size = 1\ntrain_dataloader.dataset.type = 'Blank'\n\
                        optim_wrapper.optimizer = { type = 'SGD', lr = 0.1 }\n";

    fn check(config: &str) -> (Vec<String>, Result<()>) {
        RunnerBuilder::check(Config::from_text("c.toml", config).unwrap())
    }

    #[test]
    fn check_finds_conflicts_between_parts() {
        register();
        let check = |more: &str| check(&format!("{GOOD}{more}")).1.map_err(|e| e.to_string());
        check("param_scheduler = { type = 'LinearLR', begin = 1 }").unwrap();
        check("default_hooks.param_scheduler = false\nparam_scheduler = []").unwrap();
        check("param_scheduler = { type = 'LinearLR', begin = 9, by_epoch = false }").unwrap();
        // With several ranks there would be fewer iterations.
        let cycle = "type = 'OneCycleLR', eta_max = 1, total_steps = 9, by_epoch = false";
        check(&format!("param_scheduler = {{ {cycle} }}")).unwrap();
        for (more, says) in [
            (
                "param_scheduler = { type = 'LinearLR', begin = 2 }",
                "begin=2, end=2, and the run ends",
            ),
            ("custom_hooks = [{ type = 'EMAHook' }, { type = 'EMAHook' }]", "two hooks called"),
            ("custom_hooks = [{ type = 'ParamSchedulerHook' }]", "two hooks called"),
            ("custom_hooks = [{ type = 'IterTimerHook' }]", "two hooks called"),
            (
                "default_hooks.param_scheduler = false\nparam_scheduler = { type = 'ConstantLR' }",
                "c.toml:6:33: `param_scheduler` cannot be disabled",
            ),
            ("train_dataloader.sampler.type = 'InfiniteSampler'", "InfiniteSampler has no epochs"),
            ("load_from = 'x.pth'", "x.pth: no such checkpoint"),
        ] {
            let error = check(more).unwrap_err();
            assert!(error.contains(says), "{more}: {error}");
        }
        let by_iters = GOOD.replace("max_epochs = 2", "by_epoch = false\ntrain_cfg.max_iters = 4");
        let plateau = |more: &str| {
            let more = format!("param_scheduler = {{ type = 'ReduceOnPlateauLR'{more} }}");
            let config = Config::from_text("c.toml", format!("{by_iters}{more}"));
            RunnerBuilder::check(config.unwrap()).1.map_err(|e| e.to_string())
        };
        plateau("").unwrap();
        plateau(", begin = 1, by_epoch = false").unwrap();
        assert!(plateau(", begin = 1").unwrap_err().contains("no epochs for a scheduler to count"));
        // An error that only the optimizer can detect.
        let adadelta = GOOD.replace("'SGD', lr = 0.1", "'Adadelta'");
        let momentum = "param_scheduler = { type = 'StepMomentum', step_size = 1 }";
        let error = RunnerBuilder::check(
            Config::from_text("c.toml", format!("{adadelta}{momentum}")).unwrap(),
        );
        let error = error.1.unwrap_err().to_string();
        assert!(error.starts_with("c.toml:5:1: optim_wrapper: "), "{error}");
        assert!(error.contains("has no momentum for a scheduler to change"), "{error}");
    }

    #[test]
    fn stream_is_checked_with_its_first_batch() {
        register();
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.txt");
        let by_iters = GOOD.replace("max_epochs = 2", "by_epoch = false\ntrain_cfg.max_iters = 4");
        let stream =
            format!("type = 'TextStream'\ntrain_dataloader.dataset.files = '{}'", path.display());
        let config = by_iters.replace("type = 'Blank'", &stream);
        let text = |config: &str| check(config).1.map_err(|error| error.to_string());
        let missing = text(&config).unwrap_err();
        assert!(missing.starts_with("c.toml:4:1: train_dataloader: "), "{missing}");
        assert!(missing.contains("a.txt: No such file"), "{missing}");
        std::fs::write(&path, "").unwrap();
        assert!(text(&config).unwrap_err().contains("the stream has no samples: list shards"));
        std::fs::write(&path, b"\xff").unwrap();
        assert!(
            text(&config).unwrap_err().contains("a.txt, record at byte 0: the line is not text")
        );
        std::fs::write(&path, "a line").unwrap();
        text(&config).unwrap();
    }

    #[test]
    fn average_that_never_starts_is_a_warning() {
        register();
        for (begin, warns) in [
            ("begin_epoch = 2", false),
            ("begin_epoch = 3", true),
            ("begin_iter = 16", false),
            ("begin_iter = 17", true),
        ] {
            let hook = format!("custom_hooks = [{{ type = 'EMAHook', {begin} }}]");
            let (warnings, checked) = check(&format!("{GOOD}{hook}"));
            checked.unwrap();
            let warned = warnings.iter().any(|text| text.contains("EMAHook never starts"));
            assert_eq!(warned, warns, "{begin}: {warnings:?}");
        }
    }
}
