//! Reads a whole configuration into a `RunnerBuilder`: MMEngine's keys, with its names and defaults.
//!
//! Keys of MMEngine's that this crate leaves out on purpose are refused by name.

use std::num::NonZero;
use std::path::PathBuf;
use std::time::Duration;

use collective::{Transport, init::Launcher};

use crate::config::{Config, Mistakes, Section, choose};
use crate::data::{COLLATE_FUNCTIONS, Workers};
use crate::engine::{CompileOptions, MatmulPrecision, WrongGradient};
use crate::evaluate::{Evaluator, read_evaluator};
use crate::hooks::{self, DEFAULTS, Hook, NOOP, Priority};
use crate::model::{DistributedDataParallel, LoraOptions, MODEL_WRAPPERS, MODELS};
use crate::optim_wrapper::OPTIM_WRAPPERS;
use crate::placement::DeviceConfig;
use crate::pretrained::{self, ReviseKeys};
use crate::runner::{DataLoaderConfig, EvalSplit, Length, LoadOptions, RunnerBuilder, TrainConfig};
use crate::schedulers;
use crate::sinks::Level;
use crate::{Error, Result};

/// `env_cfg.resource_limit`, MMEngine's.
const OPEN_FILES: u64 = 4096;

/// Keys of MMEngine's that have no meaning here, and what there is instead.
const LEFT_OUT: [(&str, &str); 8] = [
    ("data_preprocessor", "a model normalizes its own inputs (`mean`, `std`)"),
    (
        "default_scope",
        "names have no scopes; a program registers its own before it starts the runner",
    ),
    ("custom_imports", "a program registers its own parts before it starts the runner"),
    ("runner_type", "there is one runner"),
    ("strategy", "there is one runner, with data parallelism (`model_wrapper_cfg`)"),
    ("activation_checkpointing", "the engine keeps what backward needs"),
    ("sync_bn", "batches are normalized on each rank; SyncBuffersHook averages their statistics"),
    ("efficient_conv_bn_eval", "the engine has one way to run a convolution"),
];

impl RunnerBuilder {
    /// Reads a whole configuration, as MMEngine's `from_cfg` does. Nothing is created; hooks are the default ones, as the
    /// configuration changes them, and its own.
    ///
    /// # Errors
    ///
    /// [`Error::Config`](crate::Error::Config) with all mistakes, one a line, each with file, line and column.
    #[doc(alias = "from_cfg")]
    pub fn from_config(config: Config) -> Result<Self> {
        let (builder, mistakes) = Self::read(config);
        mistakes.check().map(|()| builder)
    }

    /// Reads to the end in spite of mistakes. Parts that have one, and missing parts, stay unset.
    pub(crate) fn read(config: Config) -> (Self, Mistakes) {
        let mut builder = Self::default();
        builder.log_config.config = Some((config.file_name(), config.text()));
        builder.log_config.source = config.path().to_owned();
        let mut root = config.into_section();
        let mistakes = root.collect_mistakes();
        mistakes.add_of(builder.read_all(root));
        (builder, mistakes)
    }

    /// Returns the warnings that a run of this configuration would log, and as one error all its mistakes, what a run
    /// would be refused for, and which data do not fit the model. Creates nothing.
    pub(crate) fn check(config: Config) -> (Vec<String>, Result<()>) {
        let (builder, mistakes) = Self::read(config);
        let is_read = mistakes.len() == 0;
        builder.refuse(&mistakes);
        let mut warnings = Vec::new();
        mistakes.add_of(builder.try_parts(&mistakes, is_read, &mut warnings));
        (warnings, mistakes.check())
    }

    /// Checks the gradients of a configuration's model, except of the parameters to `ignore`: in `f64`, or, where the
    /// model does not compute in it, in `f32`, and returns why.
    pub(crate) fn check_gradients(
        load: impl Fn() -> Result<Config>,
        ignore: &[String],
    ) -> Result<Option<Error>> {
        let wrong = |is_f64| Self::read(load()?).0.wrong_gradients(is_f64, ignore);
        let (wrong, why_f32) = match wrong(true) {
            Ok(wrong) => (wrong, None),
            Err(why) => (wrong(false)?, Some(why)),
        };
        let lines: Vec<_> = wrong.iter().map(WrongGradient::to_string).collect();
        if lines.is_empty() { Ok(why_f32) } else { Err(Error::Engine(lines.join("\n"))) }
    }

    fn read_all(&mut self, mut root: Section) -> Result<()> {
        for (key, why) in LEFT_OUT {
            root.refuse(key, why)?;
        }
        self.spans = PARTS.map(|key| (key, root.offset_of(key))).into();
        self.work_dir = root.optional::<String>("work_dir")?.map(PathBuf::from);
        self.model = root.attempt_whole(|root| MODELS.build(root.section("model")?))?;
        let parts = read_training(&mut root, self)?;
        if let Some(section) = root.optional_section("model_wrapper_cfg")? {
            let ddp = "DistributedDataParallel";
            self.wrapper = root.attempt_whole(|_| MODEL_WRAPPERS.build_or(section, ddp))?;
        }
        // MMEngine's short form, which a wrapper's own table goes before.
        if root.or("find_unused_parameters", false)? && self.wrapper.is_none() {
            self.wrapper = Some(DistributedDataParallel::finding_unused());
        }
        let splits = [
            ["val_dataloader", "val_evaluator", "val_cfg", "ValLoop"],
            ["test_dataloader", "test_evaluator", "test_cfg", "TestLoop"],
        ];
        for (part, [loader, evaluator, cfg, name]) in self.evaluations.iter_mut().zip(splits) {
            let is_there = root.has(loader) || root.has(evaluator);
            *part = root.attempt(|root| read_evaluation(root, loader, evaluator))?.flatten();
            root.attempt(|root| read_eval_cfg(root, cfg, name, is_there))?;
        }
        let metrics = self.evaluations[EvalSplit::Val as usize].as_ref();
        let metrics = metrics.and_then(|(_, evaluator)| evaluator.names());
        self.schedulers = schedulers::read_all(&mut root, &parts, metrics.as_deref())?;
        self.auto_scale_lr = root.attempt(read_auto_scale_lr)?.flatten();
        self.hooks = read_hooks(&mut root, metrics.as_deref(), !self.schedulers.is_empty())?;
        root.attempt(|root| read_randomness(root, self))?;
        root.attempt(|root| read_env(root, self))?;
        self.launcher = root.attempt(read_launcher)?.flatten();
        self.device = root.attempt(DeviceConfig::read)?.unwrap_or_default();
        // `auto` is what MMEngine's scripts call it.
        self.resume = match root.is_string("resume") {
            true => root.choice("resume", "auto", &[("auto", true)])?,
            false => root.or("resume", false)?,
        };
        root.attempt(|root| read_load_from(root, self))?;
        self.frozen = root.one_or_more("frozen")?;
        self.lora = root.attempt_whole(read_lora)?.flatten();
        root.attempt(|root| read_log_config(root, self))?;
        self.compile = root.attempt(CompileOptions::read)?.flatten();
        root.finish()
    }
}

/// Keys whose spans `runner check` names.
const PARTS: [&str; 6] = [
    "model",
    "load_from",
    "optim_wrapper",
    "train_dataloader",
    "val_dataloader",
    "test_dataloader",
];

/// What trains: all of it, or, in a run that only evaluates a model, nothing. The names of the optimizer's
/// parts.
fn read_training(root: &mut Section, builder: &mut RunnerBuilder) -> Result<Vec<String>> {
    let keys = ["train_dataloader", "train_cfg", "optim_wrapper"];
    let evaluates = ["val_dataloader", "test_dataloader"].iter().any(|key| root.has(key));
    if evaluates && !keys.iter().any(|key| root.has(key)) {
        // Asked for all the same, so that they are among the valid names.
        for key in keys {
            root.optional_section(key)?;
        }
        return Ok(Vec::new());
    }
    let mut parts = Vec::new();
    builder.optim = root.attempt_whole(|root| {
        let section = root.section("optim_wrapper")?;
        parts = section.tables();
        OPTIM_WRAPPERS.build_or(section, "OptimWrapper")
    })?;
    builder.train_loader =
        root.attempt(|root| read_loader(root.section("train_dataloader")?, true))?;
    builder.train = root.attempt(|root| read_train(root.section("train_cfg")?))?;
    Ok(parts)
}

fn read_loader(mut section: Section, train: bool) -> Result<DataLoaderConfig> {
    section.refuse("batch_sampler", "batches are cut from the sampler's order")?;
    let workers = read_workers(&mut section)?;
    // A GPU gets its batches from pinned memory either way.
    section.optional::<bool>("pin_memory")?;
    let collate =
        section.attempt_whole(|section| match section.optional_section("collate_fn")? {
            Some(function) => COLLATE_FUNCTIONS.build(function),
            None => Ok(None),
        })?;
    let place = section.offset_of("batch_size");
    let batch_size = section.attempt(|section| section.required("batch_size"))?.unwrap_or(1);
    if batch_size == 0 {
        section.note(place.error("`batch_size` must be at least 1, got 0"))?;
    }
    let drop_last = section.or("drop_last", false)?;
    let data = section
        .attempt_whole(|section| DataLoaderConfig::read(section.section("dataset")?, batch_size))?;
    if data.as_ref().is_some_and(|data| data.stream.is_some()) {
        section.refuse(
            "sampler",
            "a stream has none: set `shuffle_buffer` of the data set, or leave it out",
        )?;
    }
    let (mut infinite, mut shuffle, mut round_up) = (false, train, true);
    if let Some(mut sampler) = section.optional_section("sampler")? {
        let types = [("DefaultSampler", false), ("InfiniteSampler", true)];
        let kind = sampler.attempt(|s| s.choice("type", "DefaultSampler", &types))?;
        infinite = kind.unwrap_or(false);
        shuffle = sampler.or("shuffle", train)?;
        sampler.refuse("seed", "the run has one seed (`randomness`)")?;
        let rounds = sampler.offset_of("round_up");
        round_up = sampler.or("round_up", true)?;
        if train && !round_up {
            let text = "`round_up` must be true: ranks train on equally many batches";
            sampler.note(rounds.error(text))?;
            round_up = true;
        }
        sampler.finish()?;
    }
    section.finish()?;
    let data = data.ok_or_else(Mistakes::listed)?;
    let infinite = infinite || data.infinite;
    let shuffle = shuffle && data.stream.is_none();
    let collate = collate.flatten();
    Ok(DataLoaderConfig { shuffle, drop_last, infinite, round_up, workers, collate, ..data })
}

/// Worker threads and their prefetch: PyTorch's keys, with its defaults and rules.
fn read_workers(section: &mut Section) -> Result<Workers> {
    section.refuse("worker_init_fn", "workers are threads; a sample has its own random numbers")?;
    section.refuse("multiprocessing_context", "workers are threads")?;
    section.refuse("generator", "the run has one seed (`randomness`)")?;
    let count_place = section.offset_of("num_workers");
    let count = section.or("num_workers", 0)?;
    let keys = ["prefetch_factor", "persistent_workers", "timeout"];
    let places = keys.map(|key| section.offset_of(key));
    let prefetch_factor = section.optional::<usize>("prefetch_factor")?;
    let is_persistent = section.or("persistent_workers", false)?;
    let timeout = section.or("timeout", Duration::ZERO)?;
    let given = [prefetch_factor.is_some(), is_persistent, !timeout.is_zero()];
    for ((key, place), _) in keys.iter().zip(&places).zip(given).filter(|(_, given)| *given) {
        if count == 0 {
            let text = format!("`{key}` needs `num_workers` to be at least 1");
            section.note(place.error(text))?;
        }
    }
    let too_many = [
        ("num_workers", count_place, count),
        ("prefetch_factor", places[0].clone(), prefetch_factor.unwrap_or(0)),
    ];
    for (key, place, count) in too_many {
        if count > 1024 {
            section.note(place.error(format!("`{key}` must be at most 1024, got {count}")))?;
        }
    }
    if prefetch_factor == Some(0) {
        section.note(places[0].error("`prefetch_factor` must be at least 1, got 0"))?;
    }
    let mut workers = Workers::new(count).prefetch_factor(prefetch_factor.unwrap_or(2));
    if is_persistent {
        workers = workers.persistent();
    }
    Ok(if timeout.is_zero() { workers } else { workers.timeout(timeout) })
}

/// A data set to evaluate the model on, and how: both or neither.
fn read_evaluation(
    root: &mut Section,
    loader: &'static str,
    evaluator: &'static str,
) -> Result<Option<(DataLoaderConfig, Evaluator)>> {
    if !root.has(loader) && !root.has(evaluator) {
        return Ok(None);
    }
    let mut place = None;
    let config = root.attempt(|root| {
        let section = root.section(loader)?;
        place = Some(section.offset_of("sampler"));
        read_loader(section, false)
    })?;
    let metrics = root.attempt_whole(|root| read_evaluator(root, evaluator))?;
    if let (Some(place), true) =
        (place, config.as_ref().is_some_and(|config| config.infinite && config.stream.is_none()))
    {
        root.note(place.error("InfiniteSampler never ends: only training can take it"))?;
        return Ok(None);
    }
    Ok(config.zip(metrics))
}

/// `[val_cfg]` and `[test_cfg]`, which say nothing new, but nothing without the rest either.
fn read_eval_cfg(
    root: &mut Section,
    key: &'static str,
    name: &'static str,
    is_there: bool,
) -> Result<()> {
    let Some(mut section) = root.optional_section(key)? else { return Ok(()) };
    if !is_there {
        let part = key.trim_end_matches("_cfg");
        let text = format!("`{key}` without `{part}_dataloader` and `{part}_evaluator`");
        return Err(section.error(text));
    }
    section.choice("type", name, &[(name, ())])?;
    section.refuse("fp16", "a validation is of the model in its own precision")?;
    section.finish()
}

fn read_train(mut section: Section) -> Result<TrainConfig> {
    let types = [("EpochBasedTrainLoop", true), ("IterBasedTrainLoop", false)];
    let place = section.offset_of("type");
    let by_epoch = match (section.optional("by_epoch")?, section.has("type")) {
        (Some(by_epoch), true) => {
            section.note(place.error("only one of `type` and `by_epoch` can be set"))?;
            section.optional::<String>("type")?;
            by_epoch
        }
        (Some(by_epoch), false) => by_epoch,
        (None, _) => section.choice("type", "EpochBasedTrainLoop", &types)?,
    };
    let length = if by_epoch { "max_epochs" } else { "max_iters" };
    let length = section.attempt(|section| section.required(length))?;
    let new = if by_epoch { TrainConfig::new } else { TrainConfig::by_iters };
    let mut config = new(length.unwrap_or(0));
    config.val_begin = section.or("val_begin", config.val_begin)?;
    config.val_interval = section.count("val_interval", config.val_interval)?;
    let place = section.offset_of("dynamic_intervals");
    for pair in section.or("dynamic_intervals", Vec::<Vec<usize>>::new())? {
        let last = config.dynamic_intervals.last().map_or(0, |(begin, _)| *begin);
        match pair[..] {
            [begin, interval] if begin > last && interval > 0 => {
                config.dynamic_intervals.push((begin, interval));
            }
            _ => {
                let text = "`dynamic_intervals` must be pairs [begin, interval], begins rising from \
                            1, intervals at least 1";
                section.note(place.error(text))?;
                break;
            }
        }
    }
    let [epochs, iters] = ["max_epochs", "max_iters"];
    match config.length {
        Length::Epochs(_) => section.refuse(iters, "an EpochBasedTrainLoop counts `max_epochs`")?,
        Length::Iters(_) => section.refuse(epochs, "an IterBasedTrainLoop counts `max_iters`")?,
    }
    section.finish()?;
    length.map(|_| config).ok_or_else(Mistakes::listed)
}

fn read_auto_scale_lr(root: &mut Section) -> Result<Option<usize>> {
    let Some(mut section) = root.optional_section("auto_scale_lr")? else { return Ok(None) };
    let enable = section.or("enable", false)?;
    if enable && !section.has("base_batch_size") {
        section.required::<usize>("base_batch_size")?;
    }
    let base = section.count("base_batch_size", 1)?;
    section.finish()?;
    Ok(enable.then_some(base))
}

/// The default hooks, as `[default_hooks]` changes them by key; what else has a type there; and
/// `[[custom_hooks]]`.
fn read_hooks(
    root: &mut Section,
    metrics: Option<&[String]>,
    has_schedulers: bool,
) -> Result<Vec<(Priority, Box<dyn Hook>)>> {
    let mut all = Vec::new();
    let mut section = root.optional_section("default_hooks")?;
    for (key, hook_type) in DEFAULTS {
        let mut given = None;
        if let Some(section) = &mut section {
            let place = section.offset_of(key);
            if section.is_off(key) {
                if has_schedulers && *key == "param_scheduler" {
                    let text = "`param_scheduler` cannot be switched off: the schedulers need it; set \
                                param_scheduler = [] to have none";
                    root.note(place.error(text))?;
                }
                continue;
            }
            given = section.optional_section(key)?;
        }
        let given = given.unwrap_or_else(|| root.empty(key));
        all.extend(root.attempt_whole(|_| hooks::build(given, Some(hook_type), metrics))?);
    }
    if let Some(mut section) = section {
        for (key, hook_type, why) in NOOP {
            let place = section.offset_of(key);
            if section.is_off(key) {
                root.note(place.error(format!("`{key}` cannot be switched off: {why}")))?;
            }
            if let Some(given) = section.optional_section(key)? {
                all.extend(root.attempt_whole(|_| hooks::build(given, Some(hook_type), metrics))?);
            }
        }
        section.refuse("visualization", "there is no visualizer of samples")?;
        for more in section.tables_with("type")? {
            all.extend(root.attempt_whole(|_| hooks::build(more, None, metrics))?);
        }
        section.finish()?;
    }
    for section in root.sections("custom_hooks")? {
        all.extend(root.attempt_whole(|_| hooks::build(section, None, metrics))?);
    }
    Ok(all)
}

/// `load_from`: a path, or a table of it (`checkpoint`) and how its names become the model's.
fn read_load_from(root: &mut Section, builder: &mut RunnerBuilder) -> Result<()> {
    if !root.is_table("load_from") {
        builder.load_from = root.optional::<String>("load_from")?.map(PathBuf::from);
        return Ok(());
    }
    let Some(mut section) = root.optional_section("load_from")? else { return Ok(()) };
    builder.load_from = section.optional::<String>("checkpoint")?.map(PathBuf::from);
    let place = section.offset_of("revise_keys");
    let mut revise_keys = Vec::new();
    for pair in section.or("revise_keys", Vec::<Vec<String>>::new())? {
        match <[String; 2]>::try_from(pair) {
            Ok([pattern, replacement]) => revise_keys.push((pattern, replacement)),
            Err(_) => {
                let text = "`revise_keys` must be pairs [expression, replacement]";
                section.note(place.error(text))?;
            }
        }
    }
    if let Err(why) = ReviseKeys::new(&revise_keys) {
        section.note(place.error(format!("`revise_keys`: {why}")))?;
    }
    let place = section.offset_of("transpose");
    let transpose = section.or("transpose", Vec::<String>::new())?;
    if let Some(why) = transpose.iter().find_map(|pattern| pretrained::compile(pattern).err()) {
        section.note(place.error(format!("`transpose`: {why}")))?;
    }
    builder.load_options =
        LoadOptions { revise_keys, transpose, strict: section.optional("strict")? };
    section.finish()
}

/// `lora`, with PEFT's defaults.
fn read_lora(root: &mut Section) -> Result<Option<LoraOptions>> {
    let Some(mut section) = root.optional_section("lora")? else { return Ok(None) };
    let options = LoraOptions {
        rank: section.count("rank", 8)?,
        alpha: section.or("alpha", 8.0)?,
        dropout: section
            .or_checked("dropout", 0.0, "at least 0 and less than 1", |p| (0.0..1.0).contains(p))?,
        targets: match section.has("targets") {
            true => section.one_or_more("targets")?,
            false => section.required("targets")?,
        },
    };
    section.finish()?;
    Ok(Some(options))
}

fn read_randomness(root: &mut Section, builder: &mut RunnerBuilder) -> Result<()> {
    let Some(mut section) = root.optional_section("randomness")? else { return Ok(()) };
    builder.seed = section.optional("seed")?;
    builder.diff_rank_seed = section.or("diff_rank_seed", false)?;
    // Nothing here is otherwise.
    section.optional::<bool>("deterministic")?;
    section.finish()
}

/// `[env_cfg]`: how ranks talk, for how long they wait, how many files may be open, how exact products are.
fn read_env(root: &mut Section, builder: &mut RunnerBuilder) -> Result<()> {
    builder.open_files = Some(OPEN_FILES);
    let Some(mut env) = root.optional_section("env_cfg")? else { return Ok(()) };
    if let Some(mut dist) = env.optional_section("dist_cfg")? {
        builder.transport = read_transport(&mut dist)?;
        builder.timeout = dist.optional::<Duration>("timeout")?;
        dist.finish()?;
    }
    builder.open_files = Some(env.or("resource_limit", OPEN_FILES)?);
    let key = "float32_matmul_precision";
    let names = [
        ("highest", MatmulPrecision::Highest),
        ("high", MatmulPrecision::High),
        ("medium", MatmulPrecision::Medium),
    ];
    if env.has(key) {
        builder.matmul_precision = Some(env.choice(key, "highest", &names)?);
    }
    env.refuse(
        "cudnn_benchmark",
        "`compile = { mode = 'max-autotune' }` times cuDNN's convolutions",
    )?;
    env.refuse("mp_cfg", "no data are loaded by other processes")?;
    env.finish()
}

/// `backend`: how ranks reach one another.
fn read_transport(dist: &mut Section) -> Result<Transport> {
    let place = dist.offset_of("backend");
    let names = [
        ("auto", Transport::Auto),
        ("host", Transport::Host),
        ("tcp", Transport::Tcp),
        ("gloo", Transport::Gloo),
        ("nccl", Transport::Nccl),
        ("hccl", Transport::Hccl),
    ];
    let transport = dist.choice("backend", "auto", &names)?;
    let (feature, built) = match transport {
        Transport::Gloo => ("gloo", cfg!(feature = "gloo")),
        Transport::Nccl => ("nccl", cfg!(feature = "nccl")),
        Transport::Hccl => ("npu", cfg!(feature = "npu")),
        _ => return Ok(transport),
    };
    match built {
        true => Ok(transport),
        false => Err(place.error(format!(
            "backend `{}` is not built in: it needs the feature `{feature}`; `auto` and `host` do not",
            if transport == Transport::Hccl { "hccl" } else { feature }
        ))),
    }
}

fn read_launcher(root: &mut Section) -> Result<Option<Launcher>> {
    if !root.has("launcher") {
        return Ok(None);
    }
    let names = [
        ("none", Launcher::None),
        ("pytorch", Launcher::Pytorch),
        ("slurm", Launcher::Slurm),
        ("mpi", Launcher::Mpi),
    ];
    root.choice("launcher", "none", &names).map(Some)
}

/// What a run is called and what it writes besides checkpoints.
fn read_log_config(root: &mut Section, builder: &mut RunnerBuilder) -> Result<()> {
    let log = &mut builder.log_config;
    log.experiment_name = root.optional("experiment_name")?;
    let levels = [
        ("DEBUG", Level::Info),
        ("INFO", Level::Info),
        ("WARNING", Level::Warning),
        ("ERROR", Level::Error),
    ];
    log.log_level = root.choice("log_level", "INFO", &levels)?;
    if let Some(mut section) = root.optional_section("log_processor")? {
        section.choice("type", "LogProcessor", &[("LogProcessor", ())])?;
        let window = section.count("window_size", 10)?;
        log.window_size = NonZero::new(window);
        log.by_epoch = section.optional("by_epoch")?;
        section.refuse("custom_cfg", "losses, times and norms are means over the window")?;
        section.finish()?;
    }
    let mut backends = root.sections("vis_backends")?;
    if let Some(mut section) = root.optional_section("visualizer")? {
        section.choice("type", "Visualizer", &[("Visualizer", ())])?;
        backends.extend(section.sections("vis_backends")?);
        section.optional::<String>("name")?;
        section.finish()?;
    }
    for backend in backends {
        let is_tensorboard = root.attempt(|_| read_backend(backend))?;
        log.tensorboard |= is_tensorboard == Some(true);
    }
    Ok(())
}

/// One of `vis_backends`: whether it is TensorBoard's.
fn read_backend(mut section: Section) -> Result<bool> {
    let place = section.offset_of("type");
    let name: String = section.or("type", "LocalVisBackend".to_owned())?;
    if SERVICES.contains(&name.as_str()) {
        let text = format!("`{name}` is not supported: what it shows is in `scalars.json`");
        return Err(place.error(text));
    }
    section.finish()?;
    let backends = [("LocalVisBackend", false), ("TensorboardVisBackend", true)];
    choose("backend", &name, &backends, &place)
}

/// MMEngine's other backends, each of which needs a service.
const SERVICES: [&str; 6] = [
    "WandbVisBackend",
    "MLflowVisBackend",
    "ClearMLVisBackend",
    "NeptuneVisBackend",
    "DVCLiveVisBackend",
    "AimVisBackend",
];
