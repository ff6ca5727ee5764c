//! Checks a run before it starts, and implements `runner check`, which also tries samples of each
//! data set on the model.
//!
//! A check runs on one rank on the host, under the configured autocast and loss scale, and creates
//! nothing on disk. From each data set it takes the samples with the smallest and the largest
//! integers (labels, indices) among a few hundred, so that a label out of range of the model is
//! likely among them.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use amp::{LossScaler, ScaleChange};
use collective::{ProcessGroup, init::Launcher};
use fused_optim::{DType, Slice};
use parking_lot::Mutex;
use tracing::dispatcher::get_default;
use tracing::subscriber::NoSubscriber;
use train_step::has_non_finite;

use super::builder::{build_model, check_autocast, topology};
use super::loading;
use super::scheduling::make_schedules;
use super::work_dir::has_run_begun_with;
use super::{DataLoaderConfig, Hook, Length, Priority, RunnerBuilder, TrainConfig};
use crate::checkpoint::check_outside;
use crate::config::Mistakes;
use crate::data::{ArrayData, Batch, DataLoader};
use crate::engine::{Engine, EngineState, GradSink, StepContext, WrongGradient};
use crate::evaluate::Evaluator;
use crate::model::{LoraOptions, ModelContext};
use crate::optim_wrapper::{OptimWrapper, OptimWrapperFactory};
use crate::placement::{DeviceConfig, Placement};
use crate::schedulers::{SchedulerConfig, Shape};
use crate::sinks::ChromeTrace;
use crate::{Error, Mistake, Result};

/// Keys whose spans appear in messages of `runner check`.
pub(crate) const PARTS: [&str; 7] = [
    "model",
    "launcher",
    "load_from",
    "optim_wrapper",
    "train_dataloader",
    "val_dataloader",
    "test_dataloader",
];

/// Beginning of messages about samples on the model.
const TRYING: &str = "trying samples on the model: ";

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
            return Err(Error::config("checking gradients needs a train_dataloader"));
        };
        let group = ProcessGroup::threads(1, Duration::from_secs(60))?.remove(0);
        let cx = context(DType::F32, is_f64, self.frozen, self.lora);
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
            mistakes.add(Error::config(text));
        }
        if let Some(why) = self.log_config.trace.as_deref().and_then(ChromeTrace::refusal) {
            mistakes.add(Error::config(format!("trace: {why}")));
        }
        // It would be the current directory in some calls, and an error in others.
        if self.work_dir.as_ref().is_some_and(|dir| dir.as_os_str().is_empty()) {
            mistakes.add(Error::config("work_dir is an empty path: use `.`, or leave it out"));
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
            mistakes.add(Error::checkpoint(from.map(AsRef::as_ref), why));
        }
        if let Some(train) = &self.train {
            check_lengths(train, self.train_loader.as_ref(), &self.schedulers, mistakes);
        }
    }

    /// Returns a warning if this process has not the environment of the named launcher, and so
    /// could not train.
    pub(crate) fn launcher_warning(&self) -> Option<String> {
        let named = self.launcher.filter(|launcher| *launcher != Launcher::None)?;
        let error = topology(Some(named)).err()?;
        Some(format!("{}a run started here would end with: {error}", self.place_of("launcher")))
    }

    /// Position and name of a part, for messages.
    fn place_of(&self, key: &str) -> String {
        let place = self.spans.iter().find(|(known, _)| *known == key).map(|(_, place)| place);
        place.map_or_else(|| format!("{key}: "), |place| format!("{place}: {key}: "))
    }

    /// Type of the model's parameters in a trial on the host, where candle may lack an operator in
    /// a half type that it has on a GPU.
    fn trial_dtype(&self) -> DType {
        match (self.device, &self.optim) {
            (DeviceConfig::Cuda { .. }, _) | (_, None) => DType::F32,
            (_, Some(optim)) => optim.dtype,
        }
    }

    /// Builds model, optimizer and data sets, and tries samples on the model in the run's
    /// precision; if the configuration `is_read` without errors, also builds the schedulers.
    pub(crate) fn try_parts(
        mut self,
        mistakes: &Mistakes,
        is_read: bool,
        warnings: &mut Vec<String>,
    ) -> Result<()> {
        let group = ProcessGroup::threads(1, Duration::from_secs(60))?.remove(0);
        let spans = self.spans.clone();
        let add = |key: &str, why: &str, error: Error| {
            let place = spans.iter().find(|(known, _)| *known == key).map(|(_, at)| at.place());
            let reason = format!("{key}: {why}{error}");
            mistakes.add(Error::Config { mistakes: vec![Mistake { place, reason }] });
        };
        let (mut engine, optim) = self.try_model(&add, warnings);
        let [val, test] = std::mem::take(&mut self.evaluations);
        let parts = [
            ("train_dataloader", self.train_loader.take().map(|loader| (loader, None))),
            ("val_dataloader", val.map(|(loader, evaluator)| (loader, Some(evaluator)))),
            ("test_dataloader", test.map(|(loader, evaluator)| (loader, Some(evaluator)))),
        ];
        let mut trial = engine.as_mut().map(|engine| Trial::new(&mut **engine, optim.as_ref()));
        // Without the data no begin is beyond the end of an epoch.
        let mut epoch_length = usize::MAX;
        for (key, part) in parts {
            let Some((config, evaluator)) = part else { continue };
            let last = if evaluator.is_none() { LastBatch::of(&config) } else { None };
            let (loader, batch) = match make(config, &group) {
                Ok(made) => made,
                Err(error) => {
                    add(key, "", error);
                    continue;
                }
            };
            if evaluator.is_none() {
                epoch_length = loader.batches_per_epoch();
            }
            let Some(trial) = &mut trial else { continue };
            match trial.run(&batch, evaluator) {
                Err(error) => add(key, TRYING, error),
                Ok(found) => {
                    warnings.extend(found.map(|text| format!("{key}: {TRYING}{text}")));
                    match last.and_then(|last| trial.one_sample(&loader, last)) {
                        Some((true, error)) => add(key, "", error),
                        Some((false, error)) => warnings.push(format!("{key}: {error}")),
                        None => {}
                    }
                }
            }
        }
        let Some(train) = self.train else { return Ok(()) };
        let iters = train.length.iters(epoch_length);
        warnings
            .extend(self.hooks.iter().filter_map(|(_, hook)| hook.warning(train.length, iters)));
        let (Some(mut optim), true) = (optim, is_read) else { return Ok(()) };
        // In a run by epochs, the number of iterations of a cycle depends on the number of ranks.
        let is_exact =
            |of: &SchedulerConfig| of.by_epoch || matches!(train.length, Length::Iters(_));
        self.schedulers.retain(|of| is_exact(of) || !matches!(of.shape, Shape::OneCycle(_)));
        let schedulers = std::mem::take(&mut self.schedulers);
        let made = make_schedules(schedulers, &train, epoch_length, &mut optim);
        made.map_or_else(|error| add("optim_wrapper", "", error), drop);
        Ok(())
    }

    /// Builds the model, checks the weights that it begins with, and builds the optimizer.
    fn try_model(
        &mut self,
        add: &dyn Fn(&str, &str, Error),
        warnings: &mut Vec<String>,
    ) -> (Option<Box<dyn Engine>>, Option<OptimWrapper>) {
        let frozen = std::mem::take(&mut self.frozen);
        let cx = context(self.trial_dtype(), false, frozen, self.lora.take());
        let Some(model) = self.model.take() else { return (None, None) };
        let engine = match build_model(model, &cx) {
            Ok(engine) => engine,
            Err(error) => {
                add("model", "", error);
                return (None, None);
            }
        };
        let file = self.load_from.as_ref().filter(|path| loading::refusal(path).is_none());
        if let Some(file) = file.and_then(|path| self.load_options.file(path)) {
            let checked = self.load_options.check(&file, &*engine);
            checked.map_or_else(|error| add("load_from", "", error), |text| warnings.extend(text));
        }
        let host = Placement::host();
        let make = |optim: OptimWrapperFactory| {
            let optim = optim.make(engine.params(), &host)?;
            check_autocast(&*engine, &optim).map(|()| optim)
        };
        let optim = self.optim.take().map(make).transpose().unwrap_or_else(|error| {
            add("optim_wrapper", "", error);
            None
        });
        warnings.extend(host.take_warnings());
        (Some(engine), optim)
    }
}

/// The model and how samples are tried on it.
struct Trial<'a> {
    engine: &'a mut dyn Engine,
    autocast: Option<DType>,
    scaler: LossScaler,
    /// Fields of the last batch that the loss was computed of.
    fields: Option<Vec<String>>,
}

impl<'a> Trial<'a> {
    fn new(engine: &'a mut dyn Engine, optim: Option<&OptimWrapper>) -> Self {
        let autocast = optim.and_then(OptimWrapper::autocast);
        let scaler = optim.map_or_else(LossScaler::disabled, |optim| optim.scaler().clone());
        Self { engine, autocast, scaler, fields: None }
    }

    /// Trains on a batch without a step, or evaluates it. The loss of evaluation data is checked as
    /// well if they have the fields of the training data. Returns a warning for a loss or gradient
    /// that is not finite at any scale that a run would try, or else the engine's.
    fn run(&mut self, batch: &Batch, evaluator: Option<Evaluator>) -> Result<Option<String>> {
        let fields: Vec<_> = batch.iter().map(|(name, _)| name.to_owned()).collect();
        if let Some(mut evaluator) = evaluator {
            evaluator.update(batch, &self.engine.eval(batch)?)?;
            if self.fields.as_ref() != Some(&fields) {
                return Ok(None);
            }
        }
        self.fields = Some(fields);
        let mut scaler = self.scaler.clone();
        loop {
            let scale = scaler.scale();
            let sink = Arc::new(Mutex::new(FiniteSink::default()));
            let mut state = EngineState::default();
            let mut cx = StepContext::new(sink.clone(), &mut state);
            (cx.autocast, cx.loss_scale) = (self.autocast, scale);
            let losses = self.engine.train_step(batch, &mut cx)?;
            let warning = cx.warning.take();
            if let Some(loss) = losses.non_finite()? {
                return Ok(Some(format!("the loss is {loss}: look for values out of range")));
            }
            let Some(param) = sink.lock().non_finite else { return Ok(warning) };
            // As in a run, an overflow lowers a dynamic scale.
            if scale <= 1.0 || !matches!(scaler.update(true), Ok(ScaleChange::BackedOff)) {
                let name = &self.engine.params()[param].name;
                return Ok(Some(format!(
                    "the gradient of `{name}` is not finite at the loss scale {scale}: lower a fixed `loss_scale`, or \
                     look for values out of range"
                )));
            }
        }
    }

    /// Tries one sample, if the last batch of an epoch may have only one, as normalization layers
    /// need several. Returns the error, and whether a run of one rank would end with it.
    fn one_sample(&mut self, loader: &DataLoader, last: LastBatch) -> Option<(bool, Error)> {
        let (is_alone, text) = last.size_one(loader.dataset_len())?;
        let batch = loader.samples(&[0]).map_err(Error::from);
        let error = batch.and_then(|batch| self.run(&batch, None)).err()?.to_string();
        let text = format!(
            "trying one sample on the model: {error} ({text}: set `drop_last = true` in train_dataloader, or another \
             `batch_size`)"
        );
        Some((is_alone, Error::config(text)))
    }
}

/// Options that determine the size of the last batch of an epoch.
#[derive(Clone, Copy)]
struct LastBatch {
    batch_size: usize,
    drop_last: bool,
}

impl LastBatch {
    /// `None` if there is no last batch.
    fn of(config: &DataLoaderConfig) -> Option<Self> {
        let DataLoaderConfig { batch_size, drop_last, .. } = *config;
        let is_endless = config.stream.is_some() || config.infinite && batch_size > 1;
        (!is_endless).then_some(Self { batch_size, drop_last })
    }

    /// Returns whether the last batch of a run of one rank has one sample, and a text with the
    /// numbers of ranks for which it has; `None` if there are none up to [`MAX_RANKS`].
    fn size_one(self, samples: usize) -> Option<(bool, String)> {
        let Self { batch_size, drop_last } = self;
        if batch_size == 1 {
            return Some((true, "`batch_size` is 1".to_owned()));
        }
        let has_one = |ranks: &usize| samples.div_ceil(*ranks) % batch_size == 1;
        let ranks: Vec<_> = (1..=MAX_RANKS.min(samples)).filter(has_one).collect();
        if drop_last || ranks.is_empty() {
            return None;
        }
        let names: Vec<_> = ranks.iter().map(usize::to_string).collect();
        let plural = if ranks == [1] { "rank" } else { "ranks" };
        let text = format!(
            "of {samples} samples in batches of {batch_size}, an epoch's last batch has one sample on {} {plural}",
            names.join(", ")
        );
        Some((ranks[0] == 1, text))
    }
}

/// Maximum number of ranks for which the last batch is checked.
const MAX_RANKS: usize = 16;

/// Options of a model that is built on the host for a trial.
fn context(
    dtype: DType,
    is_f64: bool,
    frozen: Vec<String>,
    lora: Option<LoraOptions>,
) -> ModelContext {
    ModelContext { is_f64, frozen, lora, ..ModelContext::new(dtype, 0) }
}

/// Returns a data set's loader and a batch of extreme samples; for a stream its first batch.
fn make(mut config: DataLoaderConfig, group: &ProcessGroup) -> Result<(DataLoader, Batch)> {
    let stream = config.make_stream(group, 0, false)?;
    let loader = config.make(group, 0)?;
    if let Some(mut stream) = stream {
        let first = stream.next_batch()?;
        let none = || Error::data("the stream has no samples: list shards with records");
        return Ok((loader, first.ok_or_else(none)?));
    }
    let len = loader.dataset_len();
    let count = len.min(SEARCHED);
    // Of more samples than this many, the rest is not searched.
    let searched: Vec<_> = (0..count).map(|k| k * len.min(usize::MAX / SEARCHED) / count).collect();
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

/// Discards gradients, and notes the first that is not finite.
#[derive(Default)]
struct FiniteSink {
    /// Index of its parameter.
    non_finite: Option<usize>,
}

impl GradSink for FiniteSink {
    fn ready(&mut self, index: usize, gradient: Slice<'_>) -> train_step::Result<()> {
        if self.non_finite.is_none() && has_non_finite(gradient) {
            self.non_finite = Some(index);
        }
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
    let add = |text: &str| mistakes.add(Error::config(text));
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
            mistakes.add(Error::config(why));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::model::MODELS;
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
            ("work_dir = ''", "work_dir is an empty path"),
            ("trace = '/no/trace.json'", "trace: /no/trace.json: there is no such directory"),
            ("trace = 'Cargo.toml'", "trace: Cargo.toml: exists and is no trace"),
            ("lora = { alpha = nan, targets = ['*'] }", "`alpha` must be finite"),
            ("load_from = '/'", "/: not a checkpoint: it has no state.json"),
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

    #[test]
    fn launcher_without_its_environment_is_a_warning() {
        register();
        for (launcher, warns) in [("pytorch", true), ("slurm", true), ("none", false)] {
            let (warnings, checked) = check(&format!("{GOOD}launcher = '{launcher}'"));
            checked.unwrap();
            let of = |text: &&String| text.starts_with("c.toml:6:12: launcher: a run started here");
            assert_eq!(warnings.iter().find(of).is_some(), warns, "{launcher}: {warnings:?}");
        }
    }

    #[test]
    fn custom_key_without_a_parameter_is_an_error() {
        register();
        let keys = |keys: &str| {
            let key = format!("optim_wrapper.paramwise_cfg.custom_keys = {{ {keys} }}");
            let (warnings, checked) = check(&format!("{GOOD}{key}"));
            assert_eq!(warnings, [""; 0]);
            checked
        };
        keys("w = { lr_mult = 0.1 }").unwrap();
        let error =
            keys("w = { lr_mult = 0.1 }, '[w]' = { lr_mult = 0.1 }, bias = {}").unwrap_err();
        let Error::Config { mistakes } = &error else { panic!("{error}") };
        let [mistake] = &mistakes[..] else { panic!("{error}") };
        assert!(mistake.place.is_some(), "{error}");
        let said = &mistake.reason;
        assert!(said.contains("contains `[w]`, `bias` of custom_keys"), "{said}");
        assert!(said.contains("not a regular expression"), "{said}");
        assert!(said.ends_with("the parameters are w"), "{said}");
    }

    #[cfg(feature = "candle")]
    mod models {
        use std::sync::Once;

        use candle_core::{Module, ModuleT, Result, Tensor};

        use super::*;
        use crate::engine::candle::nn::{self, BatchNorm, Linear, VarBuilder};
        use crate::engine::candle::{CandleEngine, CandleModel, Loss, Outputs, TensorBatch, ops};

        /// A layer of candle-ops, and one of candle-nn, which wants operands of one type.
        struct Mixed(Linear, candle_nn::Linear);

        impl Mixed {
            fn new(vb: VarBuilder<'_>) -> Result<Self> {
                let stock = candle_nn::linear(4, 10, vb.pp("stock"))?;
                Ok(Self(nn::linear(64, 4, vb.pp("own"))?, stock))
            }

            fn logits(&self, batch: &TensorBatch) -> Result<Tensor> {
                let x = batch.get("inputs")?.to_dtype(batch.dtype())?.flatten_from(1)?;
                self.1.forward(&self.0.forward(&x)?)
            }
        }

        impl CandleModel for Mixed {
            fn loss(&self, batch: &TensorBatch) -> Result<Loss> {
                let logits = self.logits(batch)?;
                Ok(Loss::new(ops::cross_entropy(&logits, batch.get("labels")?)?))
            }

            fn predict(&self, batch: &TensorBatch) -> Result<Outputs> {
                Ok(Outputs::new().with("logits", self.logits(batch)?))
            }
        }

        /// Normalizes one value per sample and channel.
        struct Normed(BatchNorm, Linear);

        impl Normed {
            fn new(vb: VarBuilder<'_>) -> Result<Self> {
                let norm = nn::batch_norm(64, 1e-5, vb.pp("norm"))?;
                Ok(Self(norm, nn::linear(64, 10, vb.pp("fc"))?))
            }

            fn logits(&self, batch: &TensorBatch, train: bool) -> Result<Tensor> {
                let x = batch.get("inputs")?.to_dtype(batch.dtype())?;
                let x = x.reshape(((), 64, 1, 1))?;
                self.1.forward(&self.0.forward_t(&x, train)?.flatten_from(1)?)
            }
        }

        impl CandleModel for Normed {
            fn loss(&self, batch: &TensorBatch) -> Result<Loss> {
                let logits = self.logits(batch, true)?;
                Ok(Loss::new(ops::cross_entropy(&logits, batch.get("labels")?)?))
            }

            fn predict(&self, batch: &TensorBatch) -> Result<Outputs> {
                Ok(Outputs::new().with("logits", self.logits(batch, false)?))
            }
        }

        /// A model with the loss `1e6 * loss + shift`.
        struct Steep(Mixed, f64);

        impl CandleModel for Steep {
            fn loss(&self, batch: &TensorBatch) -> Result<Loss> {
                let loss = ops::cross_entropy(&self.0.logits(batch)?, batch.get("labels")?)?;
                Ok(Loss::new(loss.affine(1e6, self.1)?))
            }

            fn predict(&self, batch: &TensorBatch) -> Result<Outputs> {
                self.0.predict(batch)
            }
        }

        fn register() {
            static ONCE: Once = Once::new();
            crate::zoo::register();
            ONCE.call_once(|| {
                let mixed = |_: &mut _| Ok(CandleEngine::factory(Mixed::new));
                MODELS.register("Mixed", mixed).unwrap();
                for (name, shift) in [("Steep", 0.0), ("Infinite", f64::INFINITY)] {
                    let steep = move |vb| Mixed::new(vb).map(|mixed| Steep(mixed, shift));
                    let steep = move |_: &mut _| Ok(CandleEngine::factory(steep));
                    MODELS.register(name, steep).unwrap();
                }
                let normed = |_: &mut _| Ok(CandleEngine::factory(Normed::new));
                MODELS.register("Normed", normed).unwrap();
            });
        }

        fn check(model: &str, more: &str) -> (Vec<String>, std::result::Result<(), String>) {
            register();
            let text = format!(
                "model.type = '{model}'\ntrain_cfg.max_epochs = 1\n\
                 optim_wrapper.optimizer = {{ type = 'SGD', lr = 0.1 }}\n{more}"
            );
            let (warnings, checked) = super::check(&text);
            (warnings, checked.map_err(|error| error.to_string()))
        }

        const DIGITS: &str = "train_dataloader = { batch_size = 64, dataset.type = 'Digits' }\n";

        #[test]
        fn check_tries_the_configured_precision() {
            check("Mixed", DIGITS).1.unwrap();
            for dtype in ["float16", "bfloat16"] {
                let amp = format!(
                    "optim_wrapper.type = 'AmpOptimWrapper'\noptim_wrapper.dtype = '{dtype}'\n"
                );
                let said = check("Mixed", &format!("{amp}{DIGITS}")).1.unwrap_err();
                assert!(
                    said.starts_with("c.toml:6:20: train_dataloader: trying samples"),
                    "{said}"
                );
                assert!(said.contains("dtype mismatch in matmul"), "{said}");
                assert!(said.contains("cast one operand by `to_dtype`"), "{said}");
                let half = format!("optim_wrapper.half_parameters = true\n{amp}{DIGITS}");
                check("Mixed", &half).1.unwrap();
            }
            let amp = format!("optim_wrapper.type = 'AmpOptimWrapper'\n{DIGITS}");
            check("Normed", &amp).1.unwrap();
        }

        #[test]
        fn loss_or_gradient_that_stays_infinite_is_a_warning() {
            let scaled = |model: &str, scale: &str| {
                let amp = format!(
                    "optim_wrapper.type = 'AmpOptimWrapper'\noptim_wrapper.dtype = 'float32'\n\
                     optim_wrapper.loss_scale = {scale}\n"
                );
                let (warnings, checked) = check(model, &format!("{amp}{DIGITS}"));
                checked.unwrap();
                warnings
            };
            let fixed = scaled("Steep", "3e38");
            let says = "train_dataloader: trying samples on the model: the gradient of `";
            assert!(fixed[0].starts_with(says) && fixed.len() == 1, "{fixed:?}");
            assert!(fixed[0].contains("` is not finite at the loss scale 3"), "{fixed:?}");
            for scale in ["{ init_scale = 3e38 }", "512.0"] {
                assert_eq!(scaled("Steep", scale), [""; 0], "{scale}");
            }
            let infinite = scaled("Infinite", "'dynamic'");
            assert!(infinite[0].contains("the loss is inf: look for"), "{infinite:?}");
        }

        #[test]
        fn last_batch_of_one_sample_is_tried() {
            let digits = |len: usize, batch: usize, more: &str| {
                let text = format!(
                    "train_dataloader = {{ batch_size = {batch}, {more} \
                     dataset = {{ type = 'SyntheticImages', len = {len}, channels = 64, image_size = 1, \
                     num_classes = 10 }} }}\n"
                );
                check("Normed", &text)
            };
            let (warnings, checked) = digits(65, 32, "");
            let said = checked.unwrap_err();
            assert!(said.contains("trying one sample on the model: forward: batch_norm"), "{said}");
            assert!(said.contains("set `drop_last = true` in train_dataloader"), "{said}");
            assert!(said.contains("has one sample on 1, 2 ranks"), "{said}");
            assert_eq!(warnings, [""; 0]);
            // Two ranks with 33 samples each.
            let (warnings, checked) = digits(66, 32, "");
            checked.unwrap();
            let [warning] = &warnings[..] else { panic!("{warnings:?}") };
            assert!(warning.contains("has one sample on 2 ranks: set"), "{warning}");
            assert!(digits(65, 1, "drop_last = true,").1.is_err());
            for (len, more) in [(64, ""), (65, "drop_last = true,")] {
                let (warnings, checked) = digits(len, 32, more);
                checked.unwrap();
                assert_eq!(warnings, [""; 0], "{len}");
            }
            // Whereas this model needs only one sample.
            let one = DIGITS.replace("64", "1");
            check("Mixed", &one).1.unwrap();
        }
    }
}
