//! `Runner`: holds every part of a run and lets them work together.
//!
//! A [`RunnerBuilder`] collects the parts, from a configuration or by hand, and
//! [`build`](RunnerBuilder::build) joins the process group and makes them. [`Runner::train`] then
//! runs the epoch loop; hooks reach everything through the accessors here.

mod builder;
mod output;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use collective::{ProcessGroup, ReduceOp};
use fused_optim::{Optimizer, SliceMut};
use serde_json::{Map, Value};

pub use builder::{DataLoaderConfig, RunnerBuilder, TrainConfig};
use output::Output;

use crate::checkpoint::{self, Contents, Position};
use crate::data::{Batch, DataLoader};
use crate::engine::{Engine, Losses};
use crate::evaluate::Metric;
use crate::hooks::Hook;
use crate::model::ModelWrapper;
use crate::optim_wrapper::OptimWrapper;
use crate::schedulers::{Param, Progress, Scheduler};
use crate::sinks::{Logger, Scalars};
use crate::{Error, Result, loops};

/// A training run on this rank.
pub struct Runner {
    group: ProcessGroup,
    engine: Box<dyn Engine>,
    model: Box<dyn ModelWrapper>,
    optim: Box<dyn OptimWrapper>,
    schedulers: Vec<Scheduler>,
    hooks: Vec<Box<dyn Hook>>,
    train_loader: DataLoader,
    validation: Option<Validation>,
    train: TrainConfig,
    deadline: Option<Instant>,
    resume: bool,
    stopped: bool,
    seed: u64,
    config_text: String,
    position: Position,
    output: Output,
}

/// What a validation needs, and how the last one went.
pub(crate) struct Validation {
    pub(crate) loader: DataLoader,
    pub(crate) metric: Box<dyn Metric>,
    pub(crate) times: (f64, f64),
}

impl std::fmt::Debug for Runner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Runner")
            .field("rank", &self.group.rank())
            .field("world_size", &self.group.world_size())
            .field("position", &self.position)
            .finish_non_exhaustive()
    }
}

impl Runner {
    /// Starts collecting the parts of a run.
    #[must_use]
    pub fn builder() -> RunnerBuilder {
        RunnerBuilder::default()
    }

    /// Trains to the last epoch, or until the time budget is spent, and validates on the way.
    /// Every rank calls it. Returns the figures of the last validation.
    ///
    /// # Errors
    ///
    /// The first failure of any part. The group is aborted then, with the failure's text, so that
    /// the other ranks end too and say why.
    pub fn train(&mut self) -> Result<Vec<(String, f64)>> {
        // A group that has failed already keeps its first reason.
        loops::train(self).inspect_err(|error| self.group.abort(&error.to_string()))
    }

    /// The ranks of this run.
    #[must_use]
    pub fn group(&self) -> &ProcessGroup {
        &self.group
    }

    /// The model.
    pub fn engine_mut(&mut self) -> &mut dyn Engine {
        &mut *self.engine
    }

    /// The optimizer wrapper.
    pub fn optim_wrapper_mut(&mut self) -> &mut dyn OptimWrapper {
        &mut *self.optim
    }

    /// The optimizer wrapper.
    #[must_use]
    pub fn optim_wrapper(&self) -> &dyn OptimWrapper {
        &*self.optim
    }

    /// Where the run is.
    #[must_use]
    pub fn position(&self) -> &Position {
        &self.position
    }

    /// Number of epochs the run is to have.
    #[must_use]
    pub fn max_epochs(&self) -> usize {
        self.train.max_epochs
    }

    /// Number of batches the run is to train on, on each rank.
    #[must_use]
    pub fn max_iters(&self) -> usize {
        self.train.max_epochs * self.batches_per_epoch()
    }

    /// Number of batches in an epoch.
    #[must_use]
    pub fn batches_per_epoch(&self) -> usize {
        self.train_loader.batches_per_epoch()
    }

    /// Number of batches in a validation.
    #[must_use]
    pub fn val_batches(&self) -> usize {
        self.validation.as_ref().map_or(0, |v| v.loader.batches_per_epoch())
    }

    /// Mean seconds per batch of the last validation: for data, and in all.
    #[must_use]
    pub fn val_times(&self) -> (f64, f64) {
        self.validation.as_ref().map_or((0.0, 0.0), |v| v.times)
    }

    /// The epoch a validation is logged under: the last one, or the one a time budget ended in.
    pub(crate) fn val_epoch(&self) -> usize {
        self.position.epoch + usize::from(self.position.batch > 0)
    }

    /// Where checkpoints and logs go.
    #[must_use]
    pub fn work_dir(&self) -> &Path {
        self.output.work_dir()
    }

    /// The log. Only rank 0's writes anything.
    pub fn logger(&mut self) -> &mut Logger {
        self.output.logger()
    }

    /// The scalars logged so far.
    #[must_use]
    pub fn scalars(&self) -> &Scalars {
        &self.output.scalars
    }

    /// The scalars logged so far, to add to.
    pub fn scalars_mut(&mut self) -> &mut Scalars {
        &mut self.output.scalars
    }

    /// The learning rate of the first group.
    #[must_use]
    pub fn lr(&self) -> f64 {
        self.optim.optimizer().lr(0).unwrap_or(f64::NAN)
    }

    /// Time left until the end of the run, as far as the timer knows.
    #[must_use]
    pub fn eta(&self) -> Duration {
        self.output.eta
    }

    /// Tells how much time is left.
    pub fn set_eta(&mut self, eta: Duration) {
        self.output.eta = eta;
    }

    /// What is left of the time budget, if there is one.
    #[must_use]
    pub fn budget_left(&self) -> Option<Duration> {
        self.deadline.map(|d| d.saturating_duration_since(Instant::now()))
    }

    /// Ends the training where it next can, after the epoch that is under way. Every rank calls it.
    pub fn stop_training(&mut self) {
        self.stopped = true;
    }

    /// Whether somebody has asked for its end.
    #[must_use]
    pub fn is_stopped(&self) -> bool {
        self.stopped
    }

    /// Writes a checkpoint on rank 0; the other ranks wait until it is on disk. Every rank calls
    /// it. `own` is the state of the hook that asks, which cannot be asked itself.
    ///
    /// # Errors
    ///
    /// Those of [`checkpoint::save`], on every rank.
    pub fn save_checkpoint(
        &mut self,
        name: &str,
        position: Position,
        own: Option<(&str, Option<Value>)>,
    ) -> Result<()> {
        let mut hooks = Map::new();
        for hook in &self.hooks {
            hooks.extend(hook.state_dict().map(|state| (hook.name().to_owned(), state)));
        }
        hooks.extend(own.and_then(|(name, state)| Some((name.to_owned(), state?))));
        let gradients = self.gather_gradients()?;
        if self.group.rank() == 0 {
            let contents = Contents {
                position,
                world_size: self.group.world_size(),
                batches_per_epoch: self.train_loader.batches_per_epoch(),
                seed: self.seed,
                config: &self.config_text,
                optim: self.optim.state_dict(),
                schedulers: self.schedulers.iter().map(|s| s.progress().clone()).collect(),
                hooks,
                gradients,
            };
            checkpoint::save(self.output.work_dir(), name, &mut *self.engine, contents)?;
        }
        Ok(self.group.barrier()?)
    }

    /// What each rank has added up towards its next step; nothing outside of an accumulation.
    fn gather_gradients(&self) -> Result<Vec<Vec<u8>>> {
        let mut own = checkpoint::gradient_bytes(self.engine.params(), &*self.model)?;
        let mut lens = vec![0; self.group.world_size()];
        self.group.all_gather(&mut lens, &[own.len() as u64])?;
        let longest = lens.iter().max().map_or(0, |len| *len as usize);
        if longest == 0 {
            return Ok(Vec::new());
        }
        own.resize(longest, 0);
        let mut all = vec![0; longest * lens.len()];
        self.group.all_gather(&mut all, &own)?;
        let ranks = all.chunks_exact(longest).zip(lens);
        Ok(ranks.map(|(bytes, len)| bytes[..len as usize].to_vec()).collect())
    }

    /// Removes checkpoints on rank 0. One that is gone already is no error.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] naming the directory that could not be removed.
    pub fn remove_checkpoints(&mut self, paths: &[PathBuf]) -> Result<()> {
        if self.group.rank() != 0 {
            return Ok(());
        }
        for path in paths.iter().filter(|p| p.exists()) {
            std::fs::remove_dir_all(path).map_err(|source| Error::Io {
                what: format!("cannot remove {}", path.display()),
                source,
            })?;
        }
        Ok(())
    }

    /// Calls `stage` on every hook in turn. While a hook runs, the others are not reachable.
    pub(crate) fn call_hooks(
        &mut self,
        mut stage: impl FnMut(&mut dyn Hook, &mut Self) -> Result<()>,
    ) -> Result<()> {
        for index in 0..self.hooks.len() {
            let mut hook = std::mem::replace(&mut self.hooks[index], Box::new(Absent));
            let result = stage(&mut *hook, self);
            self.hooks[index] = hook;
            result?;
        }
        Ok(())
    }

    /// Goes on from a checkpoint if the run is to resume and there is one; rank 0 says which.
    pub(crate) fn load_or_resume(&mut self) -> Result<()> {
        if !self.resume {
            return Ok(());
        }
        let newest = match self.group.rank() {
            0 => Some(checkpoint::find_last(self.output.work_dir())?),
            _ => None,
        };
        let Some(path) = collective::object::broadcast_object(&self.group, newest, 0)? else {
            let text = format!("no checkpoint in {}, starting fresh", self.work_dir().display());
            self.logger().warning(&text);
            return Ok(());
        };
        let loaded = checkpoint::load(&path)?;
        let (was, is) = (loaded.meta.world_size, self.group.world_size());
        if was != is {
            return Err(Error::Checkpoint(format!(
                "{} was written by {was} ranks and this run has {is}: the order of the data would \
                 differ; resume with {was}",
                path.display()
            )));
        }
        let (was, is) = (loaded.meta.batches_per_epoch, self.batches_per_epoch());
        if was != is && loaded.meta.position.batch > 0 {
            return Err(Error::Checkpoint(format!(
                "{} was written inside an epoch of {was} batches and this run has {is}: resume \
                 with the same batch size and data set",
                path.display()
            )));
        }
        self.resume_schedulers(&loaded.meta.schedulers)?;
        loaded.load_model(&mut *self.engine)?;
        self.optim.load_state_dict(&loaded.optim)?;
        loaded.load_gradients(self.group.rank(), self.engine.params(), &mut *self.model)?;
        self.take_seed(loaded.meta.seed);
        for hook in &mut self.hooks {
            if let Some(state) = loaded.meta.hooks.get(hook.name()) {
                hook.load_state_dict(state)?;
            }
        }
        self.position = loaded.meta.position;
        let (epoch, iter) = (self.position.epoch, self.position.iter);
        let text = format!("resumed from {}: epoch {epoch}, iteration {iter}", path.display());
        self.logger().info(&text);
        Ok(())
    }

    fn resume_schedulers(&mut self, saved: &[Progress]) -> Result<()> {
        let (was, is) = (saved.len(), self.schedulers.len());
        if was != is {
            let text = format!("the checkpoint has {was} schedulers, and this run {is}");
            return Err(Error::Checkpoint(text));
        }
        let mut both = self.schedulers.iter_mut().zip(saved);
        both.try_for_each(|(scheduler, saved)| scheduler.resume(saved.clone()))
    }

    /// Lets the schedulers step that are `due`, in order, each on what those before it left.
    pub(crate) fn step_schedulers(
        &mut self,
        metrics: &[(String, f64)],
        due: impl Fn(&Scheduler) -> bool,
    ) -> Result<()> {
        let optimizer = self.optim.optimizer_mut();
        for scheduler in self.schedulers.iter_mut().filter(|s| due(s)) {
            let mut values = read_values(optimizer, scheduler.param())?;
            scheduler.step(&mut values, metrics)?;
            write_values(optimizer, scheduler.param(), &values)?;
        }
        Ok(())
    }

    /// Goes on with a checkpoint's seed: the order of the data hangs on it.
    fn take_seed(&mut self, seed: u64) {
        if seed == self.seed {
            return;
        }
        let text = format!("going on with seed {seed} of the checkpoint instead of {}", self.seed);
        self.logger().info(&text);
        self.seed = seed;
        self.train_loader.set_seed(seed);
        if let Some(validation) = &mut self.validation {
            validation.loader.set_seed(seed);
        }
    }

    /// Makes rank 0's parameters and buffers everyone's.
    pub(crate) fn broadcast_model(&mut self) -> Result<()> {
        let group = self.group.clone();
        let mut send = |slices: &mut [SliceMut<'_>]| {
            for slice in slices {
                match slice {
                    SliceMut::F32(s) => group.broadcast(s, 0)?,
                    SliceMut::F16(s) => group.broadcast(s, 0)?,
                    SliceMut::Bf16(s) => group.broadcast(s, 0)?,
                }
            }
            Ok(())
        };
        self.engine.with_params(&mut send)?;
        self.engine.with_buffers(&mut send)
    }

    /// Whether the time budget is spent. All ranks get one answer: that of the most hurried.
    pub(crate) fn out_of_time(&self) -> Result<bool> {
        let Some(deadline) = self.deadline else { return Ok(false) };
        let mut spent = [u8::from(Instant::now() >= deadline)];
        self.group.all_reduce(&mut spent, ReduceOp::Max)?;
        Ok(spent[0] != 0)
    }

    pub(crate) fn train_config(&self) -> &TrainConfig {
        &self.train
    }

    pub(crate) fn train_loader(&self) -> &DataLoader {
        &self.train_loader
    }

    pub(crate) fn position_mut(&mut self) -> &mut Position {
        &mut self.position
    }

    /// Lends validation and model together.
    pub(crate) fn validation_mut(
        &mut self,
    ) -> Option<(&mut Validation, &mut dyn Engine, &ProcessGroup)> {
        let validation = self.validation.as_mut()?;
        Some((validation, &mut *self.engine, &self.group))
    }

    /// Trains on one batch and notes what the model reported.
    pub(crate) fn train_step(&mut self, batch: &Batch) -> Result<Losses> {
        let update = self.optim.update_params(&mut *self.engine, &mut *self.model, batch)?;
        for (name, value) in &update.losses.scalars {
            self.output.scalars.push(name, *value);
        }
        for (name, value) in self.optim.log_scalars() {
            self.output.scalars.push(name, value);
        }
        Ok(update.losses)
    }
}

/// What each parameter group of an optimizer has.
fn read_values(optimizer: &dyn Optimizer, param: Param) -> Result<Vec<f64>> {
    let none = || {
        let text = format!("{} has no momentum for a scheduler to change", optimizer.kind());
        Error::Config(text)
    };
    let read = |group| match param {
        Param::Lr => Ok(optimizer.lr(group)?),
        Param::Momentum => optimizer.momentum(group)?.ok_or_else(none),
    };
    (0..optimizer.group_count()).map(read).collect()
}

fn write_values(optimizer: &mut dyn Optimizer, param: Param, values: &[f64]) -> Result<()> {
    for (group, &value) in values.iter().enumerate() {
        match param {
            Param::Lr => optimizer.set_lr(group, value)?,
            Param::Momentum => optimizer.set_momentum(group, value)?,
        }
    }
    Ok(())
}

/// Stands in for a hook while that hook runs.
struct Absent;

impl Hook for Absent {
    fn name(&self) -> &'static str {
        "absent"
    }
}
