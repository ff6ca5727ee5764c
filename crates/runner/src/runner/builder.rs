//! `RunnerBuilder`: collects the parts of a run and builds the `Runner`.

use std::num::NonZero;
use std::path::PathBuf;
use std::time::Duration;

use collective::{GroupOptions, ProcessGroup, Topology, Transport, init::Launcher};
use fused_optim::{Sgd, SgdHyper};
use rustix::process::{Resource, getrlimit, setrlimit};
use serde_json::Value;
use train_log::{Level, timestamp};
use train_step::Schedules;

use super::agreement::{Budget, compare};
use super::eval_weights::EvalWeightsHook;
use super::finite::UncheckedLosses;
use super::loading::{LoadOptions, Loaded, Start};
use super::output::Output;
use super::saving::{Configured, Status};
use super::scheduling::{ParamSchedulerHook, make_schedules, options, scale_lr};
use super::state::Seed;
use super::stream::{TrainData, TrainStream};
use super::{DataLoaderConfig, EvalSplit, Evaluation, Hook, Priority, Runner, TrainConfig};
use crate::checkpoint::Position;
use crate::config::Span;
use crate::data::DataLoader;
use crate::engine::{CompileOptions, Engine, EngineState, MatmulPrecision};
use crate::evaluate::Evaluator;
use crate::model::{
    DistributedDataParallel, LoraOptions, ModelContext, ModelFactory, ModelWrapper, WrapperFactory,
};
use crate::optim_wrapper::{OptimWrapper, OptimWrapperFactory};
use crate::placement::{self, DeviceConfig, Placement};
use crate::schedulers::SchedulerConfig;
use crate::sinks::VisBackend;
use crate::{Error, Result};

/// Timeout of collectives, after which missing ranks are named: MMEngine's 30 minutes.
const TIMEOUT: Duration = Duration::from_secs(1800);

/// Collects the parts of a [`Runner`].
#[derive(Default)]
pub struct RunnerBuilder {
    pub(crate) model: Option<ModelFactory>,
    pub(crate) wrapper: Option<WrapperFactory>,
    pub(crate) optim: Option<OptimWrapperFactory>,
    pub(crate) train_loader: Option<DataLoaderConfig>,
    /// Indexed by [`EvalSplit`].
    pub(crate) evaluations: [Option<(DataLoaderConfig, Evaluator)>; 2],
    pub(crate) train: Option<TrainConfig>,
    pub(crate) schedulers: Vec<SchedulerConfig>,
    pub(crate) auto_scale_lr: Option<usize>,
    pub(crate) hooks: Vec<(Priority, Box<dyn Hook>)>,
    pub(crate) work_dir: Option<PathBuf>,
    pub(crate) seed: Option<u64>,
    pub(crate) diff_rank_seed: bool,
    pub(crate) timeout: Option<Duration>,
    pub(crate) transport: Transport,
    pub(crate) open_files: Option<u64>,
    pub(crate) matmul_precision: Option<MatmulPrecision>,
    pub(crate) time_budget: Option<Duration>,
    pub(crate) launcher: Option<Launcher>,
    pub(crate) resume: bool,
    pub(crate) elastic: bool,
    pub(crate) load_from: Option<PathBuf>,
    pub(crate) load_options: LoadOptions,
    pub(crate) frozen: Vec<String>,
    pub(crate) lora: Option<LoraOptions>,
    pub(crate) log_config: LogConfig,
    pub(crate) vis_backends: Vec<Box<dyn VisBackend>>,
    pub(crate) compile: Option<CompileOptions>,
    pub(crate) only: Option<EvalSplit>,
    /// Whether the run only trains.
    trains: bool,
    /// Spans of the configuration's parts, by key.
    pub(crate) spans: Vec<(&'static str, Span)>,
    pub(crate) device: DeviceConfig,
    group: Option<ProcessGroup>,
}

/// Options of the log and of other outputs.
#[derive(Clone, Debug, Default)]
pub(crate) struct LogConfig {
    /// File name and text of the copy of the configuration.
    pub(crate) config: Option<(String, String)>,
    /// Path of the configuration.
    pub(crate) source: PathBuf,
    /// `NAME` in the lines `Exp name: NAME_TIME`.
    pub(crate) experiment_name: Option<String>,
    /// Number of values over which scalars are smoothed.
    pub(crate) window_size: Option<NonZero<usize>>,
    /// Whether log lines count epochs, if different from the run.
    pub(crate) by_epoch: Option<bool>,
    /// Event files for TensorBoard.
    pub(crate) tensorboard: bool,
    /// Minimum severity that is logged.
    pub(crate) log_level: Level,
    /// Whether lines do not go to standard output, or to a file.
    pub(crate) no_console: bool,
    pub(crate) no_file: bool,
    /// Rank 0's file of Chrome's trace format.
    pub(crate) trace: Option<PathBuf>,
}

impl std::fmt::Debug for RunnerBuilder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RunnerBuilder").field("train", &self.train).finish_non_exhaustive()
    }
}

/// Defines setters of [`RunnerBuilder`]: name and argument, the field, its value.
macro_rules! setters {
    ($($(#[$doc:meta])* $name:ident($arg:ident: $kind:ty) => $($field:ident).+ = $value:expr;)*) => {$(
        $(#[$doc])*
        #[must_use]
        pub fn $name(mut self, $arg: $kind) -> Self {
            self.$($field).+ = $value;
            self
        }
    )*};
}

impl RunnerBuilder {
    setters! {
        /// Sets the model.
        model(model: ModelFactory) => model = Some(model);
        /// Sets the model wrapper; by default [`DistributedDataParallel`].
        model_wrapper(wrapper: WrapperFactory) => wrapper = Some(wrapper);
        /// Sets the optimizer wrapper.
        optim_wrapper(optim: OptimWrapperFactory) => optim = Some(optim);
        /// Sets the training data.
        train_dataloader(loader: DataLoaderConfig) => train_loader = Some(loader);
        /// Scales the learning rate, given for batches of `base_batch_size` samples over all ranks,
        /// to the actual batch size.
        auto_scale_lr(base_batch_size: usize) => auto_scale_lr = Some(base_batch_size);
        /// Sets the length of training.
        train_cfg(train: TrainConfig) => train = Some(train);
        /// Sets the directory for checkpoints and logs.
        work_dir(dir: impl Into<PathBuf>) => work_dir = Some(dir.into());
        /// Sets the seed of all random numbers. By default rank 0 draws one.
        seed(seed: u64) => seed = Some(seed);
        /// Limits the training time, measured from the end of the first step of this process, so
        /// that compilation and the start of ranks are not counted; the last validation is not
        /// included.
        time_budget(budget: Option<Duration>) => time_budget = budget;
        /// Sets the launcher that started the ranks; by default detected from the environment.
        launcher(launcher: Option<Launcher>) => launcher = launcher;
        /// Resumes from the newest checkpoint in the work directory. Without it, a directory with
        /// checkpoints is an error.
        resume(resume: bool) => resume = resume;
        /// Allows resuming with another number of ranks than that of the checkpoint. Otherwise that
        /// is an error, except in an elastic job of a launcher. The ranks share the remaining
        /// samples; iterations in the configuration refer to the ranks and batches that the run
        /// began with, and an optimizer step keeps its number of samples if `accumulative_counts`
        /// can be converted.
        elastic(elastic: bool) => elastic = elastic;
        /// Loads the model of a checkpoint, or the weights of a `.safetensors` file or a PyTorch
        /// `.pth`, `.pt` or `.bin`, according to [`load_options`](Self::load_options). With
        /// [`resume`](Self::resume), resumes from it; when started again, from the newest
        /// checkpoint saved since.
        load_from(checkpoint: impl Into<PathBuf>) => load_from = Some(checkpoint.into());
        /// Sets how tensor names of [`load_from`](Self::load_from) are mapped to the model's, which
        /// matrices are transposed, and whether all tensors must match.
        load_options(options: LoadOptions) => load_options = options;
        /// Freezes parameters by name patterns (`*` is any text, `?` any character): they have no
        /// gradients, no optimizer state and no averages, but are saved and loaded like others.
        frozen(patterns: Vec<String>) => frozen = patterns;
        /// Adds low-rank adapters to layers, whose own weights are frozen; the other layers are
        /// trained unless they are [`frozen`](Self::frozen), too. A checkpoint of other options is
        /// refused.
        lora(options: LoraOptions) => lora = Some(options);
        /// Writes event files for TensorBoard in addition to `scalars.json`.
        tensorboard(wanted: bool) => log_config.tensorboard = wanted;
        /// Sets whether log lines and the progress bar go to standard output, the default. A
        /// `tracing` subscriber gets the lines either way, see [`sinks`](crate::sinks).
        console(wanted: bool) => log_config.no_console = !wanted;
        /// Sets whether log lines go to a file in the work directory, the default.
        log_file(wanted: bool) => log_config.no_file = !wanted;
        /// Writes a trace of the run, for <https://ui.perfetto.dev>: steps, forward and backward
        /// passes, each gradient bucket from its launch to its average, checkpoints, validations.
        /// Each rank writes a file: rank 0 this one, rank 1 `trace.rank1.json` if this is
        /// `trace.json`. Existing files are replaced.
        trace(path: impl Into<PathBuf>) => log_config.trace = Some(path.into());
        /// Compiles the model with the engine, and logs the result.
        compile(options: CompileOptions) => compile = Some(options);
        /// Sets the device of model and optimizer; by default the host.
        device(device: DeviceConfig) => device = device;
        /// Uses an existing process group, instead of joining the one described by the environment.
        process_group(group: ProcessGroup) => group = Some(group);
    }

    /// Sets the data of validations and their metric, or an [`Evaluator`] of several.
    #[must_use]
    pub fn validation(mut self, loader: DataLoaderConfig, metrics: impl Into<Evaluator>) -> Self {
        self.evaluations[EvalSplit::Val as usize] = Some((loader, metrics.into()));
        self
    }

    /// Sets the data of tests and their metric, or an [`Evaluator`] of several.
    #[must_use]
    pub fn test(mut self, loader: DataLoaderConfig, metrics: impl Into<Evaluator>) -> Self {
        self.evaluations[EvalSplit::Test as usize] = Some((loader, metrics.into()));
        self
    }

    /// Adds a scheduler, which starts from the value left by previous ones.
    #[must_use]
    pub fn param_scheduler(mut self, scheduler: SchedulerConfig) -> Self {
        self.schedulers.push(scheduler);
        self
    }

    /// Adds a hook with its own priority.
    #[must_use]
    pub fn hook(mut self, hook: Box<dyn Hook>) -> Self {
        self.hooks.push((hook.priority(), hook));
        self
    }

    /// Adds a receiver of the run's scalars, beside `scalars.json`.
    #[must_use]
    pub fn vis_backend(mut self, backend: Box<dyn VisBackend>) -> Self {
        self.vis_backends.push(backend);
        self
    }

    /// Sets the work directory unless it is set.
    #[must_use]
    pub fn work_dir_or(mut self, dir: impl Into<PathBuf>) -> Self {
        self.work_dir.get_or_insert_with(|| dir.into());
        self
    }

    /// Limits the run to an evaluation: neither training data nor those of the other split are
    /// created.
    #[must_use]
    pub(crate) fn only(mut self, split: EvalSplit) -> Self {
        self.only = Some(split);
        (self.train_loader, self.auto_scale_lr) = (None, None);
        self.schedulers.clear();
        self.evaluations[1 - split as usize] = None;
        self
    }

    /// Limits the run to training: test data are not created, and [`build`](Self::build) fails if
    /// the run may not write to its work directory.
    #[must_use]
    pub(crate) fn untested(mut self) -> Self {
        self.trains = true;
        self.evaluations[EvalSplit::Test as usize] = None;
        self
    }

    /// Joins the process group, builds every part, and creates the work directory. A run without
    /// the training parts (`train_cfg`, `train_dataloader`, `optim_wrapper`) can only validate or
    /// test.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] if a part is missing; errors of the parts' factories; a failed rendezvous.
    /// The work directory is created last, so a failure leaves nothing behind.
    pub fn build(self) -> Result<Runner> {
        self.refused_on_all()?;
        let (evaluates, all, trains) = (self.evaluates(), self.only.is_none(), self.trains);
        let work_dir = self.work_dir.ok_or_else(|| need("work_dir"))?;
        let model = self.model.ok_or_else(|| need("model"))?;
        let (train, optim, train_loader) =
            training(self.train, self.optim, self.train_loader, evaluates, all)?;
        raise_open_files(self.open_files)?;
        let wanted = self.device.needed(train_loader.is_some());
        let found = wanted.find(|| topology(self.launcher), self.timeout.unwrap_or(TIMEOUT));
        let join = || join(self.launcher, self.timeout, self.transport, (wanted, &found));
        let group = self.group.map_or_else(join, Ok)?;
        let (seed, timestamp) = seed_and_time(&group, self.seed)?;
        let make = || -> Result<(Runner, Placement, Option<String>)> {
            let placement = wanted.open(found?, &group)?;
            let seeds = Seed { of_run: seed, differs_by_rank: self.diff_rank_seed };
            let own_seed = seeds.of_engine(&group);
            let cx = ModelContext {
                dtype: optim.dtype,
                seed: own_seed,
                device: placement.model(),
                is_f64: false,
                matmul_precision: self.matmul_precision,
                frozen: self.frozen,
                lora: self.lora.clone(),
            };
            let (mut engine, placement) = make_engine(model, &cx, placement, self.compile)?;
            let model = wrap_model(self.wrapper, &group, &mut *engine, &placement)?;
            let [val, test] = self.evaluations.map(|part| make_evaluation(part, &group, seed));
            let (train_loader, train_stream) = make_training(train_loader, &group, seed)?;
            let (mut optim, hyper_params) = make_optim(optim, &mut *engine, &placement)?;
            let batch = train_loader.as_ref().map_or(0, |l| l.batch_size() * group.world_size());
            let scaled = scale_lr(optim.optimizer_mut(), batch, self.auto_scale_lr)?;
            let length = train_loader.as_ref().map_or(0, DataLoader::batches_per_epoch);
            let scales_lr = self.auto_scale_lr.is_some();
            let schedules = make_schedules(self.schedulers, &train, length, &mut optim)?;
            compare_options(&group, &optim, &hyper_params, &schedules)?;
            let runner = Runner {
                hooks: in_order(self.hooks, &schedules, &optim)?,
                configured: Configured::new(&mut optim, hyper_params, self.lora, scales_lr),
                optim,
                schedules,
                model,
                engine,
                engine_state: EngineState { seed: own_seed, ..EngineState::default() },
                train_data: TrainData { loader: train_loader, stream: train_stream },
                evaluations: [val?, test?],
                train,
                budget: Budget::new(self.time_budget),
                start: Start {
                    resume: self.resume,
                    elastic: self.elastic || launch::is_elastic(),
                    load_from: self.load_from,
                    load_options: self.load_options,
                    loaded: Loaded::default(),
                    origin: None,
                },
                status: Status::default(),
                losses: UncheckedLosses::default(),
                seed: seeds,
                position: Position::default(),
                output: Output::new(work_dir, group.rank(), self.log_config, timestamp)
                    .with_backends(self.vis_backends),
                group: group.clone(),
            };
            Ok((runner, placement, scaled))
        };
        let runner = make().and_then(|made| open_output(made, &group, trains));
        runner.inspect_err(|error| group.abort(&error.to_string()))
    }

    /// Returns the errors that can be found before anything is created; ranks that wait for this
    /// one are told.
    fn refused_on_all(&self) -> Result<()> {
        self.refused().inspect_err(|error| {
            self.group.iter().for_each(|group| group.abort(&error.to_string()));
        })
    }

    pub(super) fn evaluates(&self) -> bool {
        self.evaluations.iter().any(Option::is_some)
    }
}

/// Returns seed and start time of the run, equal on all ranks.
fn seed_and_time(group: &ProcessGroup, seed: Option<u64>) -> Result<(u64, String)> {
    let shared = || (seed.unwrap_or_else(draw_seed), timestamp());
    Ok(collective::object::broadcast_object(group, (group.rank() == 0).then(shared), 0)?)
}

fn need(what: &str) -> Error {
    Error::config(format!("the run has no {what}"))
}

/// Returns the training parts; or, in a run that only evaluates, no loader and an optimizer that
/// never steps. If the run only evaluates now (`all` is false), the model keeps its training
/// precision.
fn training(
    train: Option<TrainConfig>,
    optim: Option<OptimWrapperFactory>,
    loader: Option<DataLoaderConfig>,
    evaluates: bool,
    all: bool,
) -> Result<(TrainConfig, OptimWrapperFactory, Option<DataLoaderConfig>)> {
    if !all || evaluates && train.is_none() && optim.is_none() && loader.is_none() {
        let idle = |count| Sgd::with_one_group(SgdHyper::default(), count);
        let optim = optim.unwrap_or_else(|| OptimWrapperFactory::fp32(idle));
        return Ok((train.unwrap_or(TrainConfig::new(0)), optim, None));
    }
    let train = train.ok_or_else(|| need("train_cfg"))?;
    let optim = optim.ok_or_else(|| need("optim_wrapper"))?;
    Ok((train, optim, Some(loader.ok_or_else(|| need("train_dataloader"))?)))
}

/// Builds a model; returns an error if the engine does not support freezing.
pub(super) fn build_model(model: ModelFactory, cx: &ModelContext) -> Result<Box<dyn Engine>> {
    let engine = model(cx)?;
    for (key, is_set) in [("frozen", !cx.frozen.is_empty()), ("lora", cx.lora.is_some())] {
        if is_set && engine.frozen().is_empty() {
            let why = format!("{key}: this engine trains all parameters: remove `{key}`");
            return Err(Error::config(why));
        }
    }
    Ok(engine)
}

/// Opens log and work directory.
fn open_output(
    (mut runner, placement, scaled): (Runner, Placement, Option<String>),
    group: &ProcessGroup,
    trains: bool,
) -> Result<Runner> {
    // No rank creates anything before all ranks have reached this point.
    group.barrier()?;
    trains.then(|| runner.claim_work_dir()).transpose()?;
    runner.output.open_trace()?;
    if group.rank() == 0 {
        runner.open_output(&placement, scaled)?;
    }
    Ok(runner)
}

/// Builds the engine; an optimizer on its device uses its stream.
fn make_engine(
    model: ModelFactory,
    cx: &ModelContext,
    placement: Placement,
    compile: Option<CompileOptions>,
) -> Result<(Box<dyn Engine>, Placement)> {
    let mut engine = build_model(model, cx)?;
    let on = engine.device().map(|on| (on.compute_device(), on.optimizer_device()));
    let placement = placement.for_engine(on)?;
    compile.map(|options| engine.compile(&options)).transpose()?;
    Ok((engine, placement))
}

/// Builds the model wrapper, on the device of the optimizer.
fn wrap_model(
    wrapper: Option<WrapperFactory>,
    group: &ProcessGroup,
    engine: &mut dyn Engine,
    placement: &Placement,
) -> Result<Box<dyn ModelWrapper>> {
    let wrapper = wrapper.unwrap_or_else(DistributedDataParallel::factory);
    let mut model = wrapper(group.clone(), engine.params())?;
    placement.steps_on_gpu().then(|| model.place(engine)).transpose()?;
    Ok(model)
}

/// Builds the optimizer wrapper with the hyper-parameters of the configuration.
fn make_optim(
    factory: OptimWrapperFactory,
    engine: &mut dyn Engine,
    placement: &Placement,
) -> Result<(OptimWrapper, Value)> {
    let mut optim = factory.make(engine.params(), placement)?;
    placement.check(optim.optimizer())?;
    check_autocast(engine, &optim)?;
    if let Some(device) = engine.device() {
        device.tune(optim.optimizer_mut());
    }
    let hyper_params = optim.hyper_params()?;
    Ok((optim, hyper_params))
}

/// Returns an error if the engine lacks the wrapper's autocast.
pub(super) fn check_autocast(engine: &dyn Engine, optim: &OptimWrapper) -> Result<()> {
    match optim.autocast().filter(|dtype| !engine.supports_autocast(*dtype)) {
        Some(dtype) => {
            Err(Error::engine(format!("this engine does not support autocast to {dtype:?}")))
        }
        None => Ok(()),
    }
}

/// Raises this process's limit of open files, as far as the system allows.
fn raise_open_files(wanted: Option<u64>) -> Result<()> {
    let Some(wanted) = wanted else { return Ok(()) };
    let mut limit = getrlimit(Resource::Nofile);
    let most = limit.maximum.unwrap_or(u64::MAX);
    limit.current = Some(limit.current.unwrap_or(u64::MAX).max(wanted).min(most));
    setrlimit(Resource::Nofile, limit).map_err(|e| Error::Io {
        what: "cannot raise the limit of open files".into(),
        source: e.into(),
    })
}

/// Builds the training data, if the run trains.
fn make_training(
    loader: Option<DataLoaderConfig>,
    group: &ProcessGroup,
    seed: u64,
) -> Result<(Option<DataLoader>, Option<TrainStream>)> {
    let Some(mut loader) = loader else { return Ok((None, None)) };
    let stream = loader.make_stream(group, seed, true)?.map(TrainStream::new);
    Ok((Some(loader.make(group, seed)?), stream))
}

/// Builds a validation or test, if the run has one.
fn make_evaluation(
    part: Option<(DataLoaderConfig, Evaluator)>,
    group: &ProcessGroup,
    seed: u64,
) -> Result<Option<Evaluation>> {
    let Some((mut loader, evaluator)) = part else { return Ok(None) };
    let stream = loader.make_stream(group, seed, false)?;
    // Without padding, because a metric must count each sample once.
    let loader = DataLoaderConfig { round_up: false, ..loader }.make(group, seed)?;
    Ok(Some(Evaluation { loader, stream, batches: 0, evaluator, times: (0.0, 0.0) }))
}

/// Compares the options that must be equal on all ranks.
fn compare_options(
    group: &ProcessGroup,
    optim: &OptimWrapper,
    hyper_params: &Value,
    schedules: &Schedules,
) -> Result<()> {
    let mut all = optim.options(hyper_params);
    all.extend(options(schedules));
    compare(group, "options of optim_wrapper and param_scheduler", &all)
}

/// Sorts hooks by priority; with schedulers, adds a [`ParamSchedulerHook`] if there is none, and an
/// [`EvalWeightsHook`] if the optimizer has other weights for evaluation.
fn in_order(
    mut hooks: Vec<(Priority, Box<dyn Hook>)>,
    schedules: &Schedules,
    optim: &OptimWrapper,
) -> Result<Vec<(Priority, Box<dyn Hook>)>> {
    let evaluates_others = optim.optimizer().has_eval_weights();
    let has = |name: &str| hooks.iter().any(|(_, hook)| hook.name() == name);
    let steps = has(ParamSchedulerHook.name());
    if evaluates_others && has("EMAHook") {
        let why = "EMAHook: this optimizer has averages of the weights itself: remove EMAHook";
        return Err(Error::config(why));
    }
    if !schedules.all().is_empty() && !steps {
        hooks.push((ParamSchedulerHook.priority(), Box::new(ParamSchedulerHook)));
    }
    if evaluates_others {
        hooks.push((Priority::NORMAL, Box::new(EvalWeightsHook::default())));
    }
    hooks.sort_by_key(|(priority, _)| *priority);
    Ok(hooks)
}

/// Returns rank and world size of this process, from the launcher's environment.
pub(super) fn topology(launcher: Option<Launcher>) -> Result<Topology> {
    let lookup = |name: &str| std::env::var(name).ok();
    Ok(match launcher {
        Some(launcher) => Topology::from_launcher(launcher, lookup)?,
        None => Topology::from_env(lookup)?,
    })
}

/// Joins the group described by the environment; a group of one without any.
fn join(
    launcher: Option<Launcher>,
    timeout: Option<Duration>,
    transport: Transport,
    found: (DeviceConfig, &Result<Option<u32>>),
) -> Result<ProcessGroup> {
    let topology = topology(launcher)?;
    let options = GroupOptions::default().with_timeout(timeout.unwrap_or(TIMEOUT));
    let options = options.with_transport(transport);
    let options = placement::group_options(options, found, topology.world_size)?;
    Ok(collective::init_process_group(&topology, options)?)
}

fn draw_seed() -> u64 {
    // 31 bits as in MMEngine, which any language can represent.
    u64::from(rand::random::<u32>() >> 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::evaluate::Accuracy;
    use crate::hooks::CheckpointHook;
    use crate::testing::{blank, builder, register};

    #[test]
    fn default_hooks_equal_those_of_a_configuration() {
        register();
        let config = "model.type = 'Fake'\ntrain_cfg.max_epochs = 1\n\
                      train_dataloader = { batch_size = 1, dataset.type = 'Blank' }\n\
                      optim_wrapper = { type = 'OptimWrapper', optimizer = { type = 'Adam' } }";
        let names = |builder: &RunnerBuilder| {
            builder.hooks.iter().map(|(_, hook)| hook.name().to_owned()).collect::<Vec<_>>()
        };
        // `type` of the optimizer wrapper may be omitted, as in MMEngine.
        let config = config.replace("type = 'OptimWrapper', ", "");
        let read = RunnerBuilder::from_config(Config::from_text("c.toml", config).unwrap());
        let by_hand = RunnerBuilder::default().default_hooks();
        assert_eq!(names(&by_hand), names(&read.unwrap()));
    }

    #[test]
    fn missing_part_is_named_and_nothing_is_created() {
        let dir = tempfile::tempdir().unwrap();
        let work_dir = dir.path().join("run");
        type Take = fn(&mut RunnerBuilder);
        let parts: [(&str, Take); 5] = [
            ("work_dir", |b| b.work_dir = None),
            ("train_cfg", |b| b.train = None),
            ("model", |b| b.model = None),
            ("optim_wrapper", |b| b.optim = None),
            ("train_dataloader", |b| b.train_loader = None),
        ];
        for (name, take) in parts {
            let mut builder = builder(&work_dir, 1);
            take(&mut builder);
            let error = builder.build().unwrap_err().to_string();
            assert_eq!(error, format!("the run has no {name}"));
            assert!(!work_dir.exists());
        }
        let nowhere = builder(&work_dir, 1).load_from(dir.path().join("nowhere"));
        let error = nowhere.build().unwrap_err().to_string();
        assert!(error.ends_with("nowhere: no such checkpoint"), "{error}");
        assert!(!work_dir.exists());
        builder(&work_dir, 1).build().unwrap();
        assert!(work_dir.exists());
    }

    #[test]
    fn two_hooks_of_one_name_with_state_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let hook = || Box::new(CheckpointHook::new(1));
        let error = builder(dir.path(), 1).hook(hook()).hook(hook()).build().unwrap_err();
        assert!(error.to_string().contains("two hooks called `CheckpointHook`"), "{error}");
    }

    #[test]
    fn evaluation_creates_no_other_data() {
        let dir = tempfile::tempdir().unwrap();
        let none =
            || DataLoaderConfig { dataset: Box::new(|| Err(Error::data("not here"))), ..blank(3) };
        let build = |work_dir: &str, split| {
            let run = builder(&dir.path().join(work_dir), 1).train_dataloader(none());
            let run = run.train_cfg(TrainConfig::by_iters(9));
            run.validation(blank(3), Accuracy::default())
                .test(none(), Accuracy::default())
                .only(split)
        };
        let mut run = build("val", EvalSplit::Val).build().unwrap();
        // The fake engine has no logits, so this error means that the data were read.
        let said = run.validate().unwrap_err().to_string();
        assert!(said.contains("`logits`"), "{said}");
        for (split, says) in [(EvalSplit::Test, "not here"), (EvalSplit::Val, "no val_dataloader")]
        {
            let mut run = build("none", split);
            if split == EvalSplit::Val {
                run.evaluations[EvalSplit::Val as usize] = None;
            }
            let said = run.build().unwrap_err().to_string();
            assert!(said.contains(says), "{said}");
            assert!(!dir.path().join("none").exists());
        }
        let run = builder(&dir.path().join("train"), 1).test(none(), Accuracy::default());
        run.untested().build().unwrap().train().unwrap();
    }
}
