//! The parts of a run, collected before anything is made.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use collective::{GroupOptions, Launcher, ProcessGroup, Topology};
use fused_optim::Optimizer;
use jiff::Zoned;

use super::output::Output;
use super::{Runner, Validation, read_values, write_values};
use crate::checkpoint::Position;
use crate::config::{Config, Section};
use crate::data::{DataLoader, DatasetFactory, DefaultSampler};
use crate::evaluate::Metric;
use crate::hooks::{DEFAULTS, Hook, ParamSchedulerHook};
use crate::model::{DistributedDataParallel, ModelContext, ModelFactory, WrapperFactory};
use crate::optim_wrapper::OptimWrapperFactory;
use crate::registry::{
    DATASETS, HOOKS, METRICS, MODEL_WRAPPERS, MODELS, OPTIM_WRAPPERS, PARAM_SCHEDULERS,
};
use crate::schedulers::{Param, Scheduler, SchedulerConfig, Span};
use crate::{Error, Result};

/// How long a collective may take before the missing ranks are named: MMEngine's 30 minutes.
const TIMEOUT: Duration = Duration::from_secs(1800);

/// Length of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TrainConfig {
    /// Number of passes over the data set.
    pub max_epochs: usize,
    /// Validate from this epoch on, counted from 1.
    pub val_begin: usize,
    /// Validate every so many epochs, and after the last.
    pub val_interval: usize,
}

impl TrainConfig {
    /// `max_epochs` epochs with a validation after each.
    #[must_use]
    pub fn new(max_epochs: usize) -> Self {
        Self { max_epochs, val_begin: 1, val_interval: 1 }
    }
}

/// A data set and how to cut it into batches.
pub struct DataLoaderConfig {
    /// Makes the data set.
    pub dataset: DatasetFactory,
    /// Samples per batch and rank.
    pub batch_size: usize,
    /// A new order every epoch.
    pub shuffle: bool,
    /// Leave out a last batch that is smaller than the others.
    pub drop_last: bool,
}

impl std::fmt::Debug for DataLoaderConfig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DataLoaderConfig")
            .field("batch_size", &self.batch_size)
            .field("shuffle", &self.shuffle)
            .finish_non_exhaustive()
    }
}

/// Collects the parts of a [`Runner`].
#[derive(Default)]
pub struct RunnerBuilder {
    model: Option<ModelFactory>,
    wrapper: Option<WrapperFactory>,
    optim: Option<OptimWrapperFactory>,
    train_loader: Option<DataLoaderConfig>,
    validation: Option<(DataLoaderConfig, Box<dyn Metric>)>,
    train: Option<TrainConfig>,
    schedulers: Vec<SchedulerConfig>,
    hooks: Vec<Box<dyn Hook>>,
    work_dir: Option<PathBuf>,
    seed: Option<u64>,
    timeout: Option<Duration>,
    time_budget: Option<Duration>,
    launcher: Option<Launcher>,
    resume: bool,
    config_text: String,
    group: Option<ProcessGroup>,
}

impl std::fmt::Debug for RunnerBuilder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RunnerBuilder").field("train", &self.train).finish_non_exhaustive()
    }
}

impl RunnerBuilder {
    /// Reads a whole configuration. Nothing is created; hooks are the default ones, as the
    /// configuration changes them, and its own.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] at the first mistake, with file, line and column.
    pub fn from_config(config: Config) -> Result<Self> {
        let mut builder = Self { config_text: config.text().to_owned(), ..Self::default() };
        let mut root = config.into_section();
        builder.work_dir = root.optional::<String>("work_dir")?.map(PathBuf::from);
        builder.model = Some(MODELS.build(root.section("model")?)?);
        builder.optim = Some(OPTIM_WRAPPERS.build(root.section("optim_wrapper")?)?);
        if let Some(section) = root.optional_section("model_wrapper_cfg")? {
            builder.wrapper = Some(MODEL_WRAPPERS.build_or(section, "DistributedDataParallel")?);
        }
        builder.train_loader = Some(read_loader(root.section("train_dataloader")?, true)?);
        builder.validation = read_validation(&mut root)?;
        builder.train = Some(read_train(root.section("train_cfg")?)?);
        for section in root.sections("param_scheduler")? {
            builder.schedulers.push(PARAM_SCHEDULERS.build(section)?);
        }
        builder.hooks = read_hooks(&mut root)?;
        if let Some(mut randomness) = root.optional_section("randomness")? {
            builder.seed = randomness.optional("seed")?;
            randomness.finish()?;
        }
        builder.timeout = read_timeout(&mut root)?;
        root.finish()?;
        Ok(builder)
    }

    /// The model.
    #[must_use]
    pub fn model(mut self, model: ModelFactory) -> Self {
        self.model = Some(model);
        self
    }

    /// What wraps the model; [`DistributedDataParallel`] if not said.
    #[must_use]
    pub fn model_wrapper(mut self, wrapper: WrapperFactory) -> Self {
        self.wrapper = Some(wrapper);
        self
    }

    /// The optimizer wrapper.
    #[must_use]
    pub fn optim_wrapper(mut self, optim: OptimWrapperFactory) -> Self {
        self.optim = Some(optim);
        self
    }

    /// What to train on.
    #[must_use]
    pub fn train_dataloader(mut self, loader: DataLoaderConfig) -> Self {
        self.train_loader = Some(loader);
        self
    }

    /// What to validate on, and how.
    #[must_use]
    pub fn validation(mut self, loader: DataLoaderConfig, metric: Box<dyn Metric>) -> Self {
        self.validation = Some((loader, metric));
        self
    }

    /// How long to train.
    #[must_use]
    pub fn train_cfg(mut self, train: TrainConfig) -> Self {
        self.train = Some(train);
        self
    }

    /// Adds a scheduler, which goes on from what those before it make of the value.
    #[must_use]
    pub fn param_scheduler(mut self, scheduler: SchedulerConfig) -> Self {
        self.schedulers.push(scheduler);
        self
    }

    /// Adds a hook.
    #[must_use]
    pub fn hook(mut self, hook: Box<dyn Hook>) -> Self {
        self.hooks.push(hook);
        self
    }

    /// Where checkpoints and logs go.
    #[must_use]
    pub fn work_dir(mut self, dir: impl Into<PathBuf>) -> Self {
        self.work_dir = Some(dir.into());
        self
    }

    /// Keeps the directory there is, if there is one.
    #[must_use]
    pub fn work_dir_or(mut self, dir: impl Into<PathBuf>) -> Self {
        self.work_dir.get_or_insert_with(|| dir.into());
        self
    }

    /// Makes equal runs equal. Without one, rank 0 draws it.
    #[must_use]
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = Some(seed);
        self
    }

    /// Stop training after this long, measured from `build`; the last validation comes on top.
    #[must_use]
    pub fn time_budget(mut self, budget: Option<Duration>) -> Self {
        self.time_budget = budget;
        self
    }

    /// Who started the ranks; without it, the environment tells.
    #[must_use]
    pub fn launcher(mut self, launcher: Option<Launcher>) -> Self {
        self.launcher = launcher;
        self
    }

    /// Go on from the newest checkpoint of the work directory.
    #[must_use]
    pub fn resume(mut self, resume: bool) -> Self {
        self.resume = resume;
        self
    }

    /// Uses a process group that is there already, instead of joining the one that the environment
    /// describes.
    #[must_use]
    pub fn process_group(mut self, group: ProcessGroup) -> Self {
        self.group = Some(group);
        self
    }

    /// Joins the process group, makes every part, creates the work directory.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] if a part is missing; whatever the parts' factories say; a failed
    /// rendezvous. The work directory is created last, so no failure here leaves anything behind.
    pub fn build(self) -> Result<Runner> {
        let started = Instant::now();
        let need = |what: &str| Error::Config(format!("the run has no {what}"));
        let work_dir = self.work_dir.ok_or_else(|| need("work_dir"))?;
        let train = self.train.ok_or_else(|| need("train_cfg"))?;
        let model = self.model.ok_or_else(|| need("model"))?;
        let optim = self.optim.ok_or_else(|| need("optim_wrapper"))?;
        let train_loader = self.train_loader.ok_or_else(|| need("train_dataloader"))?;
        check_names(&self.hooks)?;
        let group = match self.group {
            Some(group) => group,
            None => join(self.launcher, self.timeout.unwrap_or(TIMEOUT))?,
        };
        let rank = group.rank();
        let shared = (rank == 0).then(|| (self.seed.unwrap_or_else(draw_seed), timestamp()));
        let (seed, timestamp) = collective::object::broadcast_object(&group, shared, 0)?;
        let make = || -> Result<Runner> {
            let engine = model(&ModelContext { dtype: optim.dtype, seed })?;
            let wrapper = self.wrapper.unwrap_or_else(DistributedDataParallel::factory);
            let model = wrapper(group.clone(), engine.params())?;
            let validation = match self.validation {
                Some((loader, metric)) => {
                    let loader = make_loader(loader, &group, seed)?;
                    Some(Validation { loader, metric, times: (0.0, 0.0) })
                }
                None => None,
            };
            let train_loader = make_loader(train_loader, &group, seed)?;
            let mut optim = (optim.build)(engine.params())?;
            let length = train_loader.batches_per_epoch();
            let schedulers =
                make_schedulers(&self.schedulers, &train, length, optim.optimizer_mut())?;
            let mut hooks = self.hooks;
            let steps = hooks.iter().any(|hook| hook.name() == ParamSchedulerHook.name());
            if !schedulers.is_empty() && !steps {
                hooks.push(Box::new(ParamSchedulerHook));
            }
            hooks.sort_by_key(|h| h.priority());
            Ok(Runner {
                optim,
                schedulers,
                model,
                engine,
                hooks,
                train_loader,
                validation,
                train,
                deadline: self.time_budget.map(|budget| started + budget),
                resume: self.resume,
                stopped: false,
                seed,
                config_text: self.config_text,
                position: Position::default(),
                output: Output::new(work_dir, rank == 0),
                group: group.clone(),
            })
        };
        let runner = make().and_then(|mut runner| {
            // No rank creates anything before every rank has got this far.
            group.barrier()?;
            if rank == 0 {
                runner.output.open(&timestamp, &runner.config_text)?;
            }
            Ok(runner)
        });
        if let Err(error) = &runner {
            group.abort(&error.to_string());
        }
        runner
    }
}

/// Refuses two hooks that would save their state in one place.
fn check_names(hooks: &[Box<dyn Hook>]) -> Result<()> {
    for (i, hook) in hooks.iter().enumerate().filter(|(_, h)| h.state_dict().is_some()) {
        let name = hook.name();
        if hooks[..i].iter().any(|h| h.name() == name) {
            let why = format!("two hooks called `{name}` would save their state in one place");
            return Err(Error::Config(why));
        }
    }
    Ok(())
}

/// The group that the environment describes; a group of one without any.
fn join(launcher: Option<Launcher>, timeout: Duration) -> Result<ProcessGroup> {
    let lookup = |name: &str| std::env::var(name).ok();
    let topology = match launcher {
        Some(launcher) => Topology::from_launcher(launcher, lookup)?,
        None => Topology::from_env(lookup)?,
    };
    let options = GroupOptions::default().with_timeout(timeout);
    Ok(collective::init_process_group(&topology, options)?)
}

fn make_loader(config: DataLoaderConfig, group: &ProcessGroup, seed: u64) -> Result<DataLoader> {
    let dataset = (config.dataset)()?;
    let sampler = DefaultSampler {
        len: dataset.len(),
        shuffle: config.shuffle,
        seed,
        rank: group.rank(),
        world_size: group.world_size(),
    };
    DataLoader::new(Arc::clone(&dataset), sampler, config.batch_size, config.drop_last)
}

/// Each takes its first step, so that the optimizer has what training begins with.
fn make_schedulers(
    configs: &[SchedulerConfig],
    train: &TrainConfig,
    epoch_length: usize,
    optimizer: &mut dyn Optimizer,
) -> Result<Vec<Scheduler>> {
    let span = Span { epochs: train.max_epochs as u64, epoch_length: epoch_length as u64 };
    let mut base: [Option<Vec<f64>>; 2] = [None, None];
    let make = |config: &SchedulerConfig| {
        let mut values = read_values(optimizer, config.param)?;
        let base = &mut base[usize::from(config.param == Param::Momentum)];
        let base = base.get_or_insert_with(|| values.clone());
        let scheduler = Scheduler::new(config, span, base, &mut values)?;
        write_values(optimizer, config.param, &values)?;
        Ok(scheduler)
    };
    configs.iter().map(make).collect()
}

fn draw_seed() -> u64 {
    // MMEngine draws 31 bits; so every language can hold it.
    u64::from(rand::random::<u32>() >> 1)
}

fn timestamp() -> String {
    Zoned::now().strftime("%Y%m%d_%H%M%S").to_string()
}

fn read_loader(mut section: Section, shuffle: bool) -> Result<DataLoaderConfig> {
    let batch_size = section.required("batch_size")?;
    let drop_last = section.or("drop_last", false)?;
    let dataset = DATASETS.build(section.section("dataset")?)?;
    let mut config = DataLoaderConfig { dataset, batch_size, shuffle, drop_last };
    if let Some(mut sampler) = section.optional_section("sampler")? {
        sampler.choice("type", "DefaultSampler", &[("DefaultSampler", ())])?;
        config.shuffle = sampler.or("shuffle", shuffle)?;
        sampler.finish()?;
    }
    section.finish()?;
    Ok(config)
}

/// `[val_dataloader]` and `[val_evaluator]`: both or neither.
fn read_validation(root: &mut Section) -> Result<Option<(DataLoaderConfig, Box<dyn Metric>)>> {
    if !root.has("val_dataloader") && !root.has("val_evaluator") {
        return Ok(None);
    }
    let loader = root.section("val_dataloader")?;
    let metric = METRICS.build(root.section("val_evaluator")?)?;
    Ok(Some((read_loader(loader, false)?, metric)))
}

fn read_train(mut section: Section) -> Result<TrainConfig> {
    section.choice("type", "EpochBasedTrainLoop", &[("EpochBasedTrainLoop", ())])?;
    let at_least_1 = |n: &usize| *n >= 1;
    let mut config = TrainConfig::new(section.required("max_epochs")?);
    config.val_begin = section.or("val_begin", config.val_begin)?;
    config.val_interval =
        section.or_checked("val_interval", config.val_interval, "at least 1", at_least_1)?;
    section.finish()?;
    Ok(config)
}

/// The default hooks, as `[default_hooks]` changes them by key, and `[[custom_hooks]]`.
fn read_hooks(root: &mut Section) -> Result<Vec<Box<dyn Hook>>> {
    let mut hooks = Vec::new();
    let mut section = root.optional_section("default_hooks")?;
    for (key, hook_type) in DEFAULTS {
        let given = match &mut section {
            Some(section) => section.optional_section(key)?,
            None => None,
        };
        let given = given.unwrap_or_else(|| root.empty(key));
        hooks.push(HOOKS.build_or(given, hook_type)?);
    }
    section.map_or(Ok(()), Section::finish)?;
    for section in root.sections("custom_hooks")? {
        hooks.push(HOOKS.build(section)?);
    }
    Ok(hooks)
}

/// `[env_cfg.dist_cfg]`: how ranks talk, and for how long they wait.
fn read_timeout(root: &mut Section) -> Result<Option<Duration>> {
    let Some(mut env) = root.optional_section("env_cfg")? else { return Ok(None) };
    let mut timeout = None;
    if let Some(mut dist) = env.optional_section("dist_cfg")? {
        dist.choice("backend", "host", &[("host", ())])?;
        timeout = dist.optional("timeout")?;
        dist.finish()?;
    }
    env.finish()?;
    Ok(timeout)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hooks::CheckpointHook;
    use crate::testing::builder;

    #[test]
    fn a_missing_part_is_named_and_nothing_created() {
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
        builder(&work_dir, 1).build().unwrap();
        assert!(work_dir.exists());
    }

    #[test]
    fn two_hooks_cannot_save_to_one_place() {
        let dir = tempfile::tempdir().unwrap();
        let hook = || Box::new(CheckpointHook::new(1));
        let error = builder(dir.path(), 1).hook(hook()).hook(hook()).build().unwrap_err();
        assert!(error.to_string().contains("two hooks called `CheckpointHook`"), "{error}");
    }
}
