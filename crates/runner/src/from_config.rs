//! Reads a whole configuration into a `RunnerBuilder`, with MMEngine's keys, names and defaults.
//!
//! Keys of MMEngine that are not supported are errors that name the key.

use std::num::NonZero;
use std::path::PathBuf;
use std::time::Duration;

use collective::{Transport, init::Launcher};
use train_log::Level;

use crate::config::{Config, Mistakes, Section};
use crate::data::{COLLATE_FUNCTIONS, Workers};
use crate::engine::{MatmulPrecision, WrongGradient, read_compile};
use crate::evaluate::{Evaluator, read_evaluator};
use crate::hooks::{self, DEFAULTS, Hook, NOOP, Priority};
use crate::model::{DistributedDataParallel, LoraOptions, MODEL_WRAPPERS, MODELS};
use crate::optim_wrapper::OPTIM_WRAPPERS;
use crate::placement::DeviceConfig;
use crate::pretrained::{self, ReviseKeys};
use crate::runner::{
    DataLoaderConfig, EvalSplit, Length, LoadOptions, PARTS, RunnerBuilder, TrainConfig,
};
use crate::schedulers;
use crate::sinks::VIS_BACKENDS;
use crate::{Error, Result};

/// MMEngine's default of `env_cfg.resource_limit`.
const OPEN_FILES: u64 = 4096;

/// MMEngine's keys that are not supported, with the reason or the alternative.
const LEFT_OUT: [(&str, &str); 8] = [
    ("data_preprocessor", "a model normalizes its own inputs (`mean`, `std`)"),
    (
        "default_scope",
        "names have no scopes; register your own components before the runner starts",
    ),
    ("custom_imports", "register your own components before the runner starts"),
    ("runner_type", "there is only one kind of runner"),
    ("strategy", "data parallelism is the only strategy (`model_wrapper_cfg`)"),
    ("activation_checkpointing", "the engine keeps all activations for backward"),
    ("sync_bn", "each rank normalizes its own batches; SyncBuffersHook averages their statistics"),
    ("efficient_conv_bn_eval", "evaluation uses the same convolutions as training"),
];

impl RunnerBuilder {
    /// Reads a whole configuration, as MMEngine's `from_cfg` does. Nothing is created. Hooks are
    /// the default ones, with the configuration's changes, and its own.
    ///
    /// # Errors
    ///
    /// [`Error::Config`](crate::Error::Config) with all errors, one per line, each with file, line
    /// and column.
    #[doc(alias = "from_cfg")]
    pub fn from_config(config: Config) -> Result<Self> {
        let (builder, mistakes) = Self::read(config);
        mistakes.check().map(|()| builder)
    }

    /// Reads to the end in spite of errors. Invalid and missing parts stay unset.
    pub(crate) fn read(config: Config) -> (Self, Mistakes) {
        let mut builder = Self::default();
        builder.log_config.config = Some((config.file_name(), config.text()));
        builder.log_config.source = config.path().to_owned();
        let mut root = config.into_section();
        let mistakes = root.collect_mistakes();
        mistakes.add_of(builder.read_all(root));
        (builder, mistakes)
    }

    /// Returns the warnings that a run of this configuration would log, and a single error with all
    /// errors in the configuration, reasons for which a run would not start, and data that do not
    /// match the model. Creates nothing.
    pub(crate) fn check(config: Config) -> (Vec<String>, Result<()>) {
        let (builder, mistakes) = Self::read(config);
        let is_read = mistakes.len() == 0;
        builder.refuse(&mistakes);
        let mut warnings = Vec::from_iter(builder.launcher_warning());
        mistakes.add_of(builder.try_parts(&mistakes, is_read, &mut warnings));
        (warnings, mistakes.check())
    }

    /// Checks the gradients of a configuration's model, except of the parameters in `ignore`: in
    /// `f64`, or if the model fails in `f64`, in `f32`, and returns that failure.
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
        if lines.is_empty() { Ok(why_f32) } else { Err(Error::engine(lines.join("\n"))) }
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
        // MMEngine's short form; the wrapper's own table takes precedence.
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
        // `auto` is the value used by MMEngine's scripts.
        self.resume = match root.is_string("resume") {
            true => root.choice("resume", "auto", &[("auto", true)])?,
            false => root.or("resume", false)?,
        };
        root.attempt(|root| read_load_from(root, self))?;
        self.frozen = root.one_or_more("frozen")?;
        self.lora = root.attempt_whole(read_lora)?.flatten();
        root.attempt(|root| read_log_config(root, self))?;
        self.compile = root.attempt(read_compile)?.flatten();
        root.finish()
    }
}

/// Reads the training keys: all of them, or none in a configuration that only evaluates. Returns
/// the names of the optimizer's parts.
fn read_training(root: &mut Section, builder: &mut RunnerBuilder) -> Result<Vec<String>> {
    let keys = ["train_dataloader", "train_cfg", "optim_wrapper"];
    let evaluates = ["val_dataloader", "test_dataloader"].iter().any(|key| root.has(key));
    if evaluates && !keys.iter().any(|key| root.has(key)) {
        // Read anyway, so that they are listed as valid keys.
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
    section.refuse("batch_sampler", "batches are consecutive samples of the sampler")?;
    let workers = read_workers(&mut section)?;
    // Ignored: batches for a GPU are always copied through pinned memory.
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
            "streams have no sampler: remove it; to shuffle, set `shuffle_buffer` of the data set",
        )?;
    }
    let (mut infinite, mut shuffle, mut round_up) = (false, train, true);
    if let Some(mut sampler) = section.optional_section("sampler")? {
        let types = [("DefaultSampler", false), ("InfiniteSampler", true)];
        let kind = sampler.attempt(|s| s.choice("type", "DefaultSampler", &types))?;
        infinite = kind.unwrap_or(false);
        shuffle = sampler.or("shuffle", train)?;
        sampler.refuse("seed", "set the seed of the run in `randomness`")?;
        let rounds = sampler.offset_of("round_up");
        round_up = sampler.or("round_up", true)?;
        if train && !round_up {
            let text = "`round_up` must be true: all ranks need equal numbers of batches";
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

/// Reads worker threads and prefetching: PyTorch's keys, defaults and rules.
fn read_workers(section: &mut Section) -> Result<Workers> {
    section.refuse(
        "worker_init_fn",
        "workers are threads, and each sample has its own random numbers",
    )?;
    section.refuse("multiprocessing_context", "workers are threads")?;
    section.refuse("generator", "set the seed of the run in `randomness`")?;
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

/// Reads data set and evaluator of an evaluation; both or neither must be set.
fn read_evaluation(
    root: &mut Section,
    loader: &'static str,
    evaluator: &'static str,
) -> Result<Option<(DataLoaderConfig, Evaluator)>> {
    if !root.has(loader) && !root.has(evaluator) {
        // Read anyway, so that they are listed as valid keys.
        root.optional_section(loader)?;
        root.sections(evaluator)?;
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
        root.note(place.error("InfiniteSampler has no end and can be used only in training"))?;
        return Ok(None);
    }
    Ok(config.zip(metrics))
}

/// Reads `[val_cfg]` or `[test_cfg]`, which have no options of their own but need the other keys.
fn read_eval_cfg(
    root: &mut Section,
    key: &'static str,
    name: &'static str,
    is_there: bool,
) -> Result<()> {
    let Some(mut section) = root.optional_section(key)? else { return Ok(()) };
    if !is_there {
        let part = key.trim_end_matches("_cfg");
        let text = format!("`{key}` needs `{part}_dataloader` and `{part}_evaluator`");
        section.note(section.error(text))?;
    }
    section.choice("type", name, &[(name, ())])?;
    section.refuse("fp16", "evaluation uses the precision of the model")?;
    section.finish()
}

fn read_train(mut section: Section) -> Result<TrainConfig> {
    let types = [("EpochBasedTrainLoop", true), ("IterBasedTrainLoop", false)];
    let place = section.offset_of("type");
    let by_epoch = match (section.optional("by_epoch")?, section.has("type")) {
        (Some(by_epoch), true) => {
            section.note(place.error("`type` and `by_epoch` cannot both be set"))?;
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
                let text = "`dynamic_intervals` must be pairs [begin, interval], with increasing begins from \
                            1 on and intervals of at least 1";
                section.note(place.error(text))?;
                break;
            }
        }
    }
    let [epochs, iters] = ["max_epochs", "max_iters"];
    match config.length {
        Length::Epochs(_) => section.refuse(iters, "EpochBasedTrainLoop uses `max_epochs`")?,
        Length::Iters(_) => section.refuse(epochs, "IterBasedTrainLoop uses `max_iters`")?,
    }
    section.finish()?;
    length.map(|_| config).ok_or_else(Mistakes::listed)
}

fn read_auto_scale_lr(root: &mut Section) -> Result<Option<usize>> {
    let Some(mut section) = root.optional_section("auto_scale_lr")? else { return Ok(None) };
    let enable = section.or("enable", false)?;
    if enable && !section.has("base_batch_size") {
        section.attempt(|section| section.required::<usize>("base_batch_size"))?;
    }
    let base = section.count("base_batch_size", 1)?;
    section.finish()?;
    Ok(enable.then_some(base))
}

/// Reads the default hooks with the changes of `[default_hooks]` by key, further hooks in that
/// table, and `[[custom_hooks]]`.
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
                    let text = "`param_scheduler` cannot be disabled: the schedulers need it; set \
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
                root.note(place.error(format!("`{key}` cannot be disabled: {why}")))?;
            }
            if let Some(given) = section.optional_section(key)? {
                all.extend(root.attempt_whole(|_| hooks::build(given, Some(hook_type), metrics))?);
            }
        }
        section.refuse("visualization", "there is no visualizer")?;
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

/// Reads `load_from`: a path, or a table with the path (`checkpoint`) and rules for renaming
/// tensors.
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

/// Reads `lora`, with PEFT's defaults.
fn read_lora(root: &mut Section) -> Result<Option<LoraOptions>> {
    let Some(mut section) = root.optional_section("lora")? else { return Ok(None) };
    let options = LoraOptions {
        rank: section.count("rank", 8)?,
        alpha: section.or_checked("alpha", 8.0, "finite", |alpha: &f64| alpha.is_finite())?,
        dropout: section
            .or_checked("dropout", 0.0, "at least 0 and less than 1", |p| (0.0..1.0).contains(p))?,
        targets: match section.has("targets") {
            true => section.one_or_more("targets")?,
            false => section.attempt(|s| s.required("targets"))?.unwrap_or_default(),
        },
    };
    section.finish()?;
    Ok(Some(options))
}

fn read_randomness(root: &mut Section, builder: &mut RunnerBuilder) -> Result<()> {
    let Some(mut section) = root.optional_section("randomness")? else { return Ok(()) };
    builder.seed = section.optional("seed")?;
    builder.diff_rank_seed = section.or("diff_rank_seed", false)?;
    // Always deterministic once the algorithms are chosen, so the value is ignored; autotuning
    // (`compile.mode = "max-autotune"`) may choose others in the next run.
    section.optional::<bool>("deterministic")?;
    section.finish()
}

/// Reads `[env_cfg]`: communication between ranks and its timeout, limit of open files, precision
/// of matrix products.
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
    let given = env.has(key);
    let precision = env.choice(key, "highest", &names)?;
    builder.matmul_precision = given.then_some(precision);
    env.refuse(
        "cudnn_benchmark",
        "`compile = { mode = 'max-autotune' }` autotunes cuDNN's convolutions",
    )?;
    env.refuse("mp_cfg", "workers are threads, not processes")?;
    env.finish()
}

/// Reads `backend`, the communication backend of the ranks.
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
    let (backend, feature) = match transport {
        Transport::Gloo => ("gloo", "gloo"),
        Transport::Nccl => ("nccl", "cuda"),
        Transport::Hccl => ("hccl", "npu"),
        _ => return Ok(transport),
    };
    // The program's own engine may need the feature of `collective` only.
    if !transport.is_built_in() {
        dist.note(place.error(format!(
            "backend `{backend}` needs `runner` built with the feature `{feature}`; `auto` and `host` do not"
        )))?;
    }
    Ok(transport)
}

fn read_launcher(root: &mut Section) -> Result<Option<Launcher>> {
    if !root.has("launcher") {
        root.optional::<String>("launcher")?;
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

fn read_log_processor(mut section: Section, builder: &mut RunnerBuilder) -> Result<()> {
    section.choice("type", "LogProcessor", &[("LogProcessor", ())])?;
    let log = &mut builder.log_config;
    log.window_size = NonZero::new(section.count("window_size", 10)?);
    log.by_epoch = section.optional("by_epoch")?;
    section.refuse("custom_cfg", "losses, times and norms are always averaged over the window")?;
    section.finish()
}

/// Returns the backends of `[visualizer]`.
fn read_visualizer(mut section: Section) -> Result<Vec<Section>> {
    section.choice("type", "Visualizer", &[("Visualizer", ())])?;
    let backends = section.sections("vis_backends")?;
    section.optional::<String>("name")?;
    section.finish().map(|()| backends)
}

/// Reads the name of the run and its outputs other than checkpoints.
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
    if let Some(section) = root.optional_section("log_processor")? {
        root.attempt(|_| read_log_processor(section, builder))?;
    }
    let mut backends = root.sections("vis_backends")?;
    if let Some(section) = root.optional_section("visualizer")? {
        backends.extend(root.attempt(|_| read_visualizer(section))?.unwrap_or_default());
    }
    // The one that every run has is read for its mistakes.
    let mut types = vec!["LocalVisBackend".to_owned()];
    for section in backends {
        let kind = section.text_of("type").unwrap_or(&types[0]).to_owned();
        let backend = root.attempt_whole(|_| VIS_BACKENDS.build_or(section, &types[0]))?;
        if !types.contains(&kind) {
            builder.vis_backends.extend(backend);
            types.push(kind);
        }
    }
    builder.log_config.trace = root.optional::<String>("trace")?.map(PathBuf::from);
    Ok(())
}
