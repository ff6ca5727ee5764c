//! Saves a run's state to a checkpoint and resumes from one.

use std::path::{Path, PathBuf};

use collective::ProcessGroup;
use collective::object::{all_gather_object, broadcast_object};
use serde_json::Value;

use super::{Runner, Save};
use crate::checkpoint::{
    self, AVERAGES, Checkpoint, Contents, Converted, Found, Meta, Tensor, copy_from_bytes,
    model_tensors, visit_buffers,
};
use crate::engine::TensorSpec;
use crate::schedulers::{Scheduler, differences};
use crate::{Error, Result};

impl Runner {
    /// Writes a checkpoint on rank 0; the other ranks wait until it is on disk.
    pub(super) fn write_checkpoint(&mut self, save: &Save) -> Result<()> {
        let mut contents = Contents {
            meta: Meta {
                position: save.position.clone(),
                world_size: self.group.world_size(),
                batches_per_epoch: self.batches_per_epoch(),
                hyper_params: self.hyper_params.clone(),
                seed: self.seed,
                config: self.output.config_text(),
                export: save.export,
                ..Meta::default()
            },
            is_last: save.optimizer,
            ..Contents::default()
        };
        if self.group.rank() == 0 {
            contents.model = model_tensors(&mut *self.engine)?;
        }
        if self.group.world_size() > 1 {
            visit_buffers(&mut *self.engine, &mut |_, spec, slice| {
                let spec = TensorSpec { name: format!("{BUFFERS}{}", spec.name), ..spec.clone() };
                contents.own.push(Tensor::copy(&spec, slice));
                Ok(())
            })?;
        }
        self.call_hooks(|hook, runner| hook.before_save_checkpoint(runner, &mut contents))?;
        if save.schedulers {
            contents.meta.schedulers.clone_from(&self.schedulers);
        }
        if save.optimizer {
            self.add_resumable(&mut contents)?;
        } else {
            contents.extra.clear();
        }
        if self.group.rank() == 0 {
            let path = checkpoint::save(self.output.work_dir(), &save.name, contents)?;
            self.remove_checkpoints(&[checkpoint::aside(&path)]);
        }
        Ok(self.group.barrier()?)
    }

    /// Adds all that a run is resumed from, besides model, position and schedulers.
    fn add_resumable(&self, contents: &mut Contents) -> Result<()> {
        let Contents { meta, ranks, own, .. } = contents;
        ranks.gradients =
            self.gather(checkpoint::gradient_bytes(self.engine.params(), &*self.model)?)?;
        ranks.wrapper = self.gather(self.model.state()?)?;
        ranks.own = self.gather(checkpoint::own_bytes(own)?)?;
        if ranks.own.iter().all(|bytes| Some(bytes) == ranks.own.first()) {
            ranks.own.clear();
        }
        let drawn = Some(self.engine_state.random_position).filter(|position| *position > 0);
        meta.random = all_gather_object(&self.group, &drawn)?;
        if meta.random.iter().all(Option::is_none) {
            meta.random.clear();
        }
        meta.autotune_cache = all_gather_object(&self.group, &self.engine_state.autotune_cache)?;
        if meta.autotune_cache.iter().all(String::is_empty) {
            meta.autotune_cache.clear();
        }
        for (_, hook) in &self.hooks {
            meta.hooks.extend(hook.state_dict().map(|state| (hook.name().to_owned(), state)));
        }
        if self.group.rank() == 0 {
            contents.optim = Some(self.optim.state_dict()?);
        }
        Ok(())
    }

    /// Every rank's bytes; empty if no rank has any.
    fn gather(&self, mut own: Vec<u8>) -> Result<Vec<Vec<u8>>> {
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

    /// Removes checkpoints on rank 0; logs a warning for each that cannot be removed.
    pub fn remove_checkpoints(&mut self, paths: &[PathBuf]) {
        if self.group.rank() != 0 {
            return;
        }
        for path in paths.iter().filter(|p| p.exists()) {
            if let Err(why) = std::fs::remove_dir_all(path) {
                let text = format!("cannot remove {}: {why}: remove it by hand", path.display());
                self.logger().warning(&text);
            }
        }
    }

    /// Writes the parts of a checkpoint that `keys` name once more, on rank 0: see
    /// [`checkpoint::publish`].
    ///
    /// # Errors
    ///
    /// Those of [`checkpoint::publish`], on every rank.
    pub fn publish_checkpoint(&mut self, name: &str, keys: &[String]) -> Result<()> {
        if self.group.rank() == 0 {
            let path = checkpoint::publish(self.output.work_dir(), name, keys)?;
            self.logger().info(&format!("published as {}", path.display()));
        }
        Ok(self.group.barrier()?)
    }

    /// Loads the model of a checkpoint, and nothing else: of `load_from`, or, if the run resumes, of the newest. Returns
    /// whether there is one.
    pub(crate) fn load_weights(&mut self) -> Result<bool> {
        let path = if self.resume { self.find_checkpoint()?.path } else { self.load_from.clone() };
        let Some(path) = path else { return Ok(false) };
        let loaded = checkpoint::load(&path)?;
        let converted = loaded.load_weights(&mut *self.engine)?;
        // Hooks load the model too, and nothing else.
        let resume = std::mem::replace(&mut self.resume, false);
        let told = self.call_hooks(|hook, runner| hook.after_load_checkpoint(runner, &loaded));
        self.resume = resume;
        told?;
        let mut text = format!("loaded the model from {}", path.display());
        for Converted { from, to, tensors } in converted {
            text += &format!(", {tensors} tensors of {from:?} converted to {to:?}");
        }
        self.logger().info(&text);
        if self.resume {
            // For the epoch that metrics are logged under.
            self.position = loaded.meta.position;
        }
        Ok(true)
    }

    /// Resumes from a checkpoint if the run resumes and there is one, or loads the weights of one. Returns whether all
    /// ranks have the same state now.
    pub(crate) fn load_or_resume(&mut self) -> Result<bool> {
        if !self.resume {
            return self.load_weights();
        }
        let found = self.find_checkpoint()?;
        let Some(path) = found.path else {
            self.start_fresh(&found)?;
            return Ok(false);
        };
        let loaded = checkpoint::load(&path)?;
        self.check_order(&path, &loaded)?;
        let Some(optim) = &loaded.optim else {
            return Err(Error::Checkpoint(without_optimizer(&path)));
        };
        self.position = loaded.meta.position.clone();
        let takeover = self.take_place(loaded.meta.world_size)?;
        self.resume_schedulers(&loaded.meta.schedulers)?;
        loaded.load_model(&mut *self.engine)?;
        self.load_trained(&loaded)?;
        self.optim.load_state_dict(optim)?;
        self.keep_hyper_params(&loaded.meta.hyper_params);
        self.scale_rates(&takeover)?;
        let rank = self.group.rank();
        // Each rank's own: with another number of ranks no rank takes it.
        if loaded.meta.world_size == self.group.world_size()
            && let Some(state) = loaded.wrapper(rank)?
        {
            self.model.load_state(&state)?;
        }
        // Resets the position of the random numbers.
        self.take_seed(loaded.meta.seed);
        if let Some(position) = loaded.meta.random.get(rank).copied().flatten() {
            self.engine_state.random_position = position;
        }
        if let Some(cache) = loaded.meta.autotune_cache.get(rank) {
            self.engine_state.autotune_cache.clone_from(cache);
        }
        let share = takeover.gradient_share;
        loaded.load_gradients(rank, share, self.engine.params(), &mut *self.model)?;
        self.call_hooks(|hook, runner| hook.after_load_checkpoint(runner, &loaded))?;
        self.load_buffers(loaded.own(rank)?)?;
        for (_, hook) in &mut self.hooks {
            if let Some(state) = loaded.meta.hooks.get(hook.name()) {
                hook.load_state_dict(state)?;
            }
        }
        let (epoch, iter) = (self.position.epoch, self.position.iter);
        let text = format!("resumed from {}: epoch {epoch}, iteration {iter}", path.display());
        self.logger().info(&text);
        Ok(true)
    }

    /// Without `EMAHook`, takes the model in training of a checkpoint that this hook has put its averages into.
    fn load_trained(&mut self, loaded: &Checkpoint) -> Result<()> {
        if self.hooks.iter().any(|(_, hook)| hook.name() == "EMAHook") {
            return Ok(());
        }
        let Some(saved) = loaded.extra(AVERAGES)? else { return Ok(()) };
        loaded.load_trained(&saved, &mut *self.engine)?;
        let path = loaded.path().display();
        let text = format!(
            "{path} has averages of EMAHook, which this run does not have: they are dropped, and training goes on from \
             the weights in training"
        );
        self.logger().warning(&text);
        Ok(())
    }

    /// Whether the run resumes from a checkpoint, rather than loading only its model.
    #[must_use]
    pub fn is_resuming(&self) -> bool {
        self.resume
    }

    /// Starts a new run if no checkpoint was found; refuses if one was written without its optimizer.
    fn start_fresh(&mut self, found: &Found) -> Result<()> {
        if let Some(path) = found.weights.first() {
            return Err(Error::Checkpoint(without_optimizer(path)));
        }
        for path in &found.exports {
            self.logger().warning(&not_resumable(path, "is an exported model"));
        }
        let text = format!("no checkpoint in {}, starting fresh", self.work_dir().display());
        self.logger().warning(&text);
        Ok(())
    }

    /// The checkpoint to resume from, if there is one, as rank 0 finds it.
    fn find_checkpoint(&mut self) -> Result<Found> {
        if let Some(path) = &self.load_from {
            return Ok(Found { path: Some(path.clone()), ..Found::default() });
        }
        let found = match self.group.rank() {
            0 => Some(checkpoint::newest(self.output.work_dir())?),
            _ => None,
        };
        let found: Found = broadcast_object(&self.group, found, 0)?;
        for skipped in &found.skipped {
            self.logger().warning(&format!("passing over a checkpoint: {skipped}"));
        }
        Ok(found)
    }

    /// Refuses a checkpoint after which the data order would differ.
    fn check_order(&self, path: &Path, loaded: &Checkpoint) -> Result<()> {
        let (was, is) = (loaded.meta.world_size, self.group.world_size());
        if was != is && !self.elastic {
            return Err(Error::Checkpoint(format!(
                "{} was written by {was} ranks and this run has {is}: the order of the data would \
                 differ; resume with {was}, or in an elastic job",
                path.display()
            )));
        }
        let loader = self.train_loader()?;
        let (had, has) = (loaded.meta.batches_per_epoch, loader.batches_among(was));
        if had != has && loaded.meta.position.batch > 0 {
            return Err(Error::Checkpoint(format!(
                "{} was written inside an epoch of {had} batches and this run has {has}: resume \
                 with the same batch size and data set",
                path.display()
            )));
        }
        Ok(())
    }

    /// Goes on with a checkpoint's schedulers; warns where they are not those of the configuration.
    fn resume_schedulers(&mut self, saved: &[Scheduler]) -> Result<()> {
        let (was, is) = (saved.len(), self.schedulers.len());
        if was != is {
            let text = format!("the checkpoint has {was} schedulers, and this run {is}");
            return Err(Error::Checkpoint(text));
        }
        let mut texts = Vec::new();
        for (index, (scheduler, saved)) in self.schedulers.iter_mut().zip(saved).enumerate() {
            let differences = scheduler.resume(saved.clone())?;
            if !differences.is_empty() {
                texts.push(format!("param_scheduler {}: {}", index, differences.join(", ")));
            }
        }
        self.warn_of_kept(&texts);
        Ok(())
    }

    /// Notes the hyper-parameters that the optimizer goes on with; warns where they are not those of the configuration.
    fn keep_hyper_params(&mut self, saved: &Value) {
        let mut texts = Vec::new();
        differences("param_groups", saved, &self.hyper_params, &mut texts);
        texts.dedup();
        if !texts.is_empty() {
            self.warn_of_kept(&[format!("optimizer: {}", texts.join(", "))]);
        }
        self.hyper_params.clone_from(saved);
    }

    fn warn_of_kept(&mut self, texts: &[String]) {
        for text in texts {
            let text = format!(
                "going on with the checkpoint's {text}; for those of the configuration {WEIGHTS_ALONE}"
            );
            self.logger().warning(&text);
        }
    }

    /// Restores this rank's own buffers.
    fn load_buffers(&mut self, own: Option<Vec<Tensor>>) -> Result<()> {
        let Some(own) = own else { return Ok(()) };
        visit_buffers(&mut *self.engine, &mut |_, spec, slice| {
            let wanted = TensorSpec { name: format!("{BUFFERS}{}", spec.name), ..spec.clone() };
            let saved = own.iter().find(|tensor| tensor.spec == wanted).ok_or_else(|| {
                Error::Checkpoint(format!("this rank's own file has no such `{}`", spec.name))
            })?;
            copy_from_bytes(slice, &saved.bytes);
            Ok(())
        })
    }

    /// Takes a checkpoint's seed, on which data order and the engine's random numbers depend.
    fn take_seed(&mut self, seed: u64) {
        if seed == self.seed {
            return;
        }
        let text = format!("going on with seed {seed} of the checkpoint instead of {}", self.seed);
        self.logger().info(&text);
        self.seed = seed;
        let seed_of_engine = engine_seed(seed, self.diff_rank_seed, &self.group);
        (self.engine_state.seed, self.engine_state.random_position) = (seed_of_engine, 0);
        let evaluations = self.evaluations.iter_mut().flatten();
        for loader in evaluations.map(|part| &mut part.loader).chain(&mut self.train_loader) {
            loader.set_seed(seed);
        }
    }
}

/// Seed of this rank's engine. Data order is by the run's seed; only the model's random numbers may differ.
pub(super) fn engine_seed(seed: u64, diff_rank_seed: bool, group: &ProcessGroup) -> u64 {
    seed.wrapping_add(if diff_rank_seed { group.rank() as u64 } else { 0 })
}

/// How to use a checkpoint that cannot be resumed from.
const WEIGHTS_ALONE: &str = "load its model alone (`load_from` without `resume`)";

fn without_optimizer(path: &Path) -> String {
    not_resumable(path, "has no optimizer to go on with")
}

fn not_resumable(path: &Path, why: &str) -> String {
    format!("{} {why}: load it with `load_from` and without `resume`", path.display())
}

/// Prefix of the names of a rank's own buffers.
pub(crate) const BUFFERS: &str = "buffers.";
