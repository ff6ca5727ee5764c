//! Saves a run's state to a checkpoint and resumes from one.

use std::path::{Path, PathBuf};

use collective::ProcessGroup;
use collective::object::{all_gather_object, broadcast_object};
use serde_json::Value;
use train_step::differences;

use super::eval_weights::EvalWeightsHook;
use super::loading::Loaded;
use super::{Runner, Save};
use crate::checkpoint::{
    self, AVERAGES, Checkpoint, Contents, Found, Meta, Position, Tensor, copy_from_bytes,
    model_tensors, visit_buffers,
};
use crate::data::Layout;
use crate::engine::TensorSpec;
use crate::{Error, Result};

impl Runner {
    /// Writes a checkpoint on rank 0; the other ranks wait until it is on disk.
    pub(super) fn write_checkpoint(&mut self, save: &Save) -> Result<()> {
        // The ranks communicate for it, so one that fails must not leave the others waiting.
        let contents = self.contents(save);
        let contents = self.or_abort(contents)?;
        self.on_rank_0(|runner| {
            runner.renew_lock()?;
            let optim = save.optimizer.then_some(&runner.optim);
            let path = checkpoint::save(runner.output.work_dir(), &save.name, contents, optim)?;
            runner.remove_checkpoints(&[checkpoint::aside(&path)]);
            Ok(())
        })
    }

    /// Collects a checkpoint. Every rank calls it.
    fn contents(&mut self, save: &Save) -> Result<Contents> {
        let mut contents = Contents {
            meta: Meta {
                position: save.position.clone(),
                by_epoch: self.is_by_epoch(),
                world_size: self.group.world_size(),
                accumulative_counts: self.configured.accumulative_counts,
                hyper_params: self.configured.hyper_params.clone(),
                seed: self.seed.of_run,
                config: self.output.config_text(),
                export: save.export,
                load_from: self.start.origin.clone(),
                lora: self.configured.lora.clone(),
                ..Meta::default()
            },
            is_last: save.optimizer,
            ..Contents::default()
        };
        if let Some(loader) = &self.train_data.loader {
            contents.meta.layout = loader.layout();
            contents.meta.waiting = self.waiting(&save.position)?;
        }
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
            contents.meta.schedulers = self.schedules.all().to_vec();
        }
        if save.optimizer {
            self.add_resumable(&mut contents, &save.position)?;
        } else {
            contents.extra.clear();
        }
        Ok(contents)
    }

    /// Adds everything that a run resumes from, except model, optimizer, position and schedulers.
    fn add_resumable(&self, contents: &mut Contents, position: &Position) -> Result<()> {
        let Contents { meta, ranks, own, model, .. } = contents;
        ranks.gradients =
            self.gather(checkpoint::gradient_bytes(self.engine.params(), &*self.model)?)?;
        ranks.wrapper = self.gather(self.model.state_dict()?)?;
        ranks.own = self.gather(checkpoint::own_bytes(own)?)?;
        // A hook may have replaced the buffers that are saved with the model.
        let is_models = |own: &Tensor| {
            let name = own.spec.name.strip_prefix(BUFFERS);
            let saved = name.and_then(|name| model.iter().find(|t| t.spec.name == name));
            saved.is_none_or(|saved| saved.bytes == own.bytes)
        };
        if ranks.own.iter().all(|bytes| Some(bytes) == ranks.own.first())
            && own.iter().all(is_models)
        {
            ranks.own.clear();
        }
        meta.counts = self.optim.pending_counts(&*self.model)?;
        let drawn = Some(self.engine_state.random_position).filter(|position| *position > 0);
        meta.random = all_gather_object(&self.group, &drawn)?;
        if meta.random.iter().all(Option::is_none) {
            meta.random.clear();
        }
        meta.autotune_cache = all_gather_object(&self.group, &self.engine_state.autotune_cache)?;
        if meta.autotune_cache.iter().all(String::is_empty) {
            meta.autotune_cache.clear();
        }
        if let Some(own) = self.stream_position(position) {
            meta.streams = all_gather_object(&self.group, &own)?;
        }
        for (_, hook) in &self.hooks {
            meta.hooks.extend(hook.state_dict().map(|state| (hook.name().to_owned(), state)));
        }
        Ok(())
    }

    /// Gathers every rank's bytes; empty if no rank has any.
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
            if let Err(why) = checkpoint::remove(path) {
                let text = format!("cannot remove {}: {why}: remove it by hand", path.display());
                self.logger().warning(&text);
            }
        }
    }

    /// Publishes the parts of a checkpoint that `keys` name, on rank 0: see
    /// [`checkpoint::publish`].
    ///
    /// # Errors
    ///
    /// Those of [`checkpoint::publish`], on every rank.
    pub fn publish_checkpoint(&mut self, name: &str, keys: &[String]) -> Result<()> {
        self.on_rank_0(|runner| {
            let path = checkpoint::publish(runner.output.work_dir(), name, keys)?;
            runner.remove_checkpoints(&[checkpoint::aside(&path)]);
            runner.logger().info(&format!("published as {}", path.display()));
            Ok(())
        })
    }

    /// Loads the initial state of the run, unless that was done; without anything to load,
    /// broadcasts rank 0's model.
    pub(crate) fn begin_training(&mut self) -> Result<()> {
        let is_done = match self.start.loaded {
            Loaded::Nothing | Loaded::Part => false,
            Loaded::Model => !self.start.resume,
            Loaded::Run => true,
        };
        self.check_whole()?;
        if !is_done && !self.load_or_resume()? {
            self.broadcast_model()?;
        }
        self.start.loaded = Loaded::Run;
        Ok(())
    }

    /// Resumes from a checkpoint if the run resumes and there is one, or loads weights. Returns
    /// whether all ranks now have equal state.
    fn load_or_resume(&mut self) -> Result<bool> {
        if !self.start.resume {
            return self.load_weights();
        }
        let found = self.find_checkpoint()?;
        let Some(path) = found.path else {
            self.check_absent()?;
            self.start_fresh(&found)?;
            return Ok(false);
        };
        let is_file = (self.group.rank() == 0).then(|| path.is_file());
        if broadcast_object(&self.group, is_file, 0)? {
            // The run that starts from these weights has saved nothing yet.
            self.load_file(&path, &path)?;
            return Ok(true);
        }
        let read = checkpoint::load(&path).and_then(|loaded| {
            self.check_resumable(&path, &loaded)?;
            Ok(loaded)
        });
        let loaded = self.agreed(&path, read)?;
        // The optimizer is first, because it is unchanged if it refuses its state.
        self.load_optimizer(&loaded)?;
        self.start.loaded = Loaded::Part;
        self.resume_from(&path, &loaded)?;
        self.start.loaded = Loaded::Nothing;
        self.mend_pointer(&path);
        Ok(true)
    }

    /// Makes `last_checkpoint` name the newest checkpoint, from which this run has resumed: the run
    /// that saved it may have been killed before.
    fn mend_pointer(&mut self, path: &Path) {
        let is_newest = self.start.load_from.as_deref() != Some(path);
        let is_own = is_newest && path.parent() == Some(self.work_dir());
        let Some(name) = path.file_name().and_then(|name| name.to_str()) else { return };
        if self.group.rank() == 0
            && is_own
            && let Err(why) = checkpoint::point_to(self.work_dir(), name)
        {
            self.logger().warning(&why.to_string());
        }
    }

    /// Returns an error for a checkpoint that this run cannot resume from, without changing
    /// anything.
    fn check_resumable(&self, path: &Path, loaded: &Checkpoint) -> Result<()> {
        self.check_order(path, &loaded.meta)?;
        if loaded.optim.is_none() {
            return Err(Error::checkpoint(Some(path), without_optimizer(path)));
        }
        let (was, is) = (loaded.meta.schedulers.len(), self.schedules.all().len());
        if was != is {
            return Err(Error::checkpoint(
                Some(path),
                format!(
                    "{} has {was} schedulers, but this run has {is}: resume with as many in param_scheduler, or {WEIGHTS_ALONE}",
                    path.display()
                ),
            ));
        }
        self.check_lora(path, loaded.meta.lora.as_ref(), true)?;
        loaded.check_model(&*self.engine)
    }

    /// Takes the state of a checkpoint that all ranks have read and checked.
    fn resume_from(&mut self, path: &Path, loaded: &Checkpoint) -> Result<()> {
        self.position = loaded.meta.position.clone();
        let takeover = self.take_place(&loaded.meta)?;
        let texts = self.schedules.resume(&loaded.meta.schedulers)?;
        self.warn_of_kept(&texts);
        if loaded.meta.position.begun.first.is_some()
            || loaded.meta.layout != self.train_loader()?.layout()
        {
            // Schedulers that were made again have set their initial values.
            self.load_optimizer(loaded)?;
        }
        loaded.load_model(&mut *self.engine)?;
        self.load_trained(loaded)?;
        self.keep_hyper_params(&loaded.meta.hyper_params);
        self.scale_rates(&takeover)?;
        let rank = self.group.rank();
        // State of each rank, which is not loaded with another number of ranks.
        if loaded.meta.world_size == self.group.world_size()
            && let Some(state) = loaded.wrapper(rank)?
        {
            self.model.load_state_dict(&state)?;
        }
        // Resets the positions of random numbers and of a stream.
        self.take_seed(loaded.meta.seed);
        if let (Some(stream), Some(position)) =
            (&mut self.train_data.stream, loaded.meta.streams.get(rank))
        {
            stream.resume(*position)?;
        }
        if let Some(position) = loaded.meta.random.get(rank).copied().flatten() {
            self.engine_state.random_position = position;
        }
        if let Some(cache) = loaded.meta.autotune_cache.get(rank) {
            self.engine_state.autotune_cache.clone_from(cache);
        }
        self.optim.load_pending_counts(loaded.meta.counts, loaded.meta.waiting.samples > 0);
        let share = takeover.gradient_share;
        loaded.load_gradients(rank, share, self.engine.params(), &mut *self.model)?;
        self.call_hooks(|hook, runner| hook.after_load_checkpoint(runner, loaded))?;
        self.load_buffers(loaded.own(rank)?)?;
        for (_, hook) in &mut self.hooks {
            if let Some(state) = loaded.meta.hooks.get(hook.name()) {
                hook.load_state_dict(state)?;
            }
        }
        self.note_origin(path, &loaded.meta);
        self.note_resumable(self.position.configured_iter(), path.to_owned());
        let (epoch, iter) = (self.position.epoch, self.position.iter);
        let text = format!("resumed from {}: epoch {epoch}, iteration {iter}", path.display());
        self.logger().info(&text);
        Ok(())
    }

    fn load_optimizer(&mut self, loaded: &Checkpoint) -> Result<()> {
        let Some(optim) = &loaded.optim else { return Ok(()) };
        self.optim.load_state_dict(optim).map_err(|why| loaded.refused(why.into()))
    }

    /// Returns an error if an earlier attempt to load a checkpoint has changed a part of this run.
    pub(super) fn check_whole(&self) -> Result<()> {
        if self.start.loaded != Loaded::Part {
            return Ok(());
        }
        Err(Error::checkpoint(
            None,
            "an earlier call could load a checkpoint only in part: build the run again",
        ))
    }

    /// Loads the trained model of a checkpoint that contains averages of `EMAHook`, in a run
    /// without this hook.
    fn load_trained(&mut self, loaded: &Checkpoint) -> Result<()> {
        if self.has_hook("EMAHook") || self.has_hook(EvalWeightsHook::NAME) {
            return Ok(());
        }
        let Some(saved) = loaded.extra(AVERAGES)? else { return Ok(()) };
        loaded.load_trained(&saved, &mut *self.engine)?;
        let path = loaded.path().display();
        let text = format!(
            "{path} contains averages of EMAHook, which this run does not have: they are ignored, and \
             training resumes from the trained weights"
        );
        self.logger().warning(&text);
        Ok(())
    }

    /// Returns whether the run resumes from a checkpoint, instead of loading only its model.
    #[must_use]
    pub fn is_resuming(&self) -> bool {
        self.start.resume
    }

    /// Returns an error on every rank if rank 0 sees no checkpoint in the work directory, but
    /// another rank does: the run would begin anew without it.
    fn check_absent(&self) -> Result<()> {
        if self.group.world_size() == 1 {
            return Ok(());
        }
        let own = match self.group.rank() {
            0 => None,
            _ => match checkpoint::newest(self.work_dir()) {
                Ok(found) => found.path.map(|path| path.display().to_string()),
                Err(why) => Some(why.to_string()),
            },
        };
        let all = all_gather_object(&self.group, &own)?;
        let Some((rank, what)) =
            all.iter().enumerate().find_map(|(r, own)| Some((r, own.as_ref()?)))
        else {
            return Ok(());
        };
        Err(Error::checkpoint(
            Some(self.work_dir()),
            format!(
                "rank 0 sees no checkpoint in {}, but rank {rank} does ({what}): all ranks must see the same files; use a \
             work directory that they share, or copy the checkpoint to rank 0's node",
                self.work_dir().display()
            ),
        ))
    }

    /// Starts a new run if no checkpoint was found; returns an error if one was saved without its
    /// optimizer.
    fn start_fresh(&mut self, found: &Found) -> Result<()> {
        if let Some(path) = found.weights.first() {
            return Err(Error::checkpoint(Some(path), without_optimizer(path)));
        }
        for path in &found.exports {
            self.logger().warning(&not_resumable(path, "is an exported model"));
        }
        let text = format!("no checkpoint in {}, starting fresh", self.work_dir().display());
        self.logger().warning(&text);
        Ok(())
    }

    /// Returns an error for a checkpoint after which the data order would differ.
    fn check_order(&self, path: &Path, meta: &Meta) -> Result<()> {
        let refuse =
            |text: String| Err(Error::checkpoint(Some(path), format!("{} {text}", path.display())));
        let (was, is) = (meta.layout, self.train_loader()?.layout());
        if was.world_size == 0 {
            return refuse(format!("was published without its state: {WEIGHTS_ALONE}"));
        }
        self.check_stream(path, meta)?;
        if was.world_size != is.world_size && !self.start.elastic {
            let (was, is) = (was.world_size, is.world_size);
            return refuse(format!(
                "was written by {was} ranks, but this run has {is}: the order of the data would \
                 differ; resume with {was}, or in an elastic job"
            ));
        }
        let (had, has) = (meta.by_epoch, self.is_by_epoch());
        if had != has {
            let [had, has] =
                [had, has].map(|by_epoch| if by_epoch { "epochs" } else { "iterations" });
            return refuse(format!(
                "was saved by a run by {had}, but this run is by {has}: resume by {had}, or {WEIGHTS_ALONE}"
            ));
        }
        let order = |layout: Layout| (layout.samples, layout.shuffle, layout.infinite);
        if order(was) != order(is) && self.is_inside_epoch(meta)? {
            let [had, has] = [was, is].map(|Layout { samples, shuffle, infinite, .. }| {
                let without_end = if infinite { " without end" } else { "" };
                format!("{samples} samples (shuffle = {shuffle}){without_end}")
            });
            return refuse(format!(
                "was written inside an epoch of {had}, but this run has {has}: resume with the same data set and \
                 sampler, from a checkpoint between two epochs, or {WEIGHTS_ALONE}"
            ));
        }
        Ok(())
    }

    /// Records the hyper-parameters of the resumed optimizer; warns if they differ from those of
    /// the configuration.
    fn keep_hyper_params(&mut self, saved: &Value) {
        let mut texts = Vec::new();
        differences("param_groups", saved, &self.configured.hyper_params, &mut texts);
        texts.dedup();
        if !texts.is_empty() {
            self.warn_of_kept(&[format!("optimizer: {}", texts.join(", "))]);
        }
        self.configured.hyper_params.clone_from(saved);
    }

    fn warn_of_kept(&mut self, texts: &[String]) {
        for text in texts {
            let text = format!(
                "resuming with the checkpoint's {text}; to use the configuration's, {WEIGHTS_ALONE}"
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
                Error::checkpoint(
                    None,
                    format!("the file of this rank has no matching `{}`", spec.name),
                )
            })?;
            copy_from_bytes(slice, &saved.bytes);
            Ok(())
        })
    }

    /// Sets the checkpoint's seed, on which data order and the engine's random numbers depend.
    fn take_seed(&mut self, seed: u64) {
        let was = std::mem::replace(&mut self.seed.of_run, seed);
        if seed == was {
            return;
        }
        let text = format!("resuming with seed {seed} of the checkpoint instead of {was}");
        self.logger().info(&text);
        let seed_of_engine = self.seed.of_engine(&self.group);
        (self.engine_state.seed, self.engine_state.random_position) = (seed_of_engine, 0);
        for part in self.evaluations.iter_mut().flatten() {
            part.set_seed(seed);
        }
        self.train_data.set_seed(seed);
    }
}

/// Seed of a run.
#[derive(Clone, Copy, Debug)]
pub(super) struct Seed {
    pub(super) of_run: u64,
    /// Whether each rank's engine has its own seed (`diff_rank_seed`).
    pub(super) differs_by_rank: bool,
}

impl Seed {
    /// Seed of this rank's engine. Data order depends on the run's seed; only the model's random
    /// numbers may differ between ranks.
    pub(super) fn of_engine(self, group: &ProcessGroup) -> u64 {
        self.of_run.wrapping_add(if self.differs_by_rank { group.rank() as u64 } else { 0 })
    }
}

/// Advice for a checkpoint that cannot be resumed from.
const WEIGHTS_ALONE: &str = "load only its model (`load_from` without `resume`)";

fn without_optimizer(path: &Path) -> String {
    not_resumable(path, "has no optimizer to resume from")
}

fn not_resumable(path: &Path, why: &str) -> String {
    format!("{} {why}: load it with `load_from` and without `resume`", path.display())
}

/// Prefix of the names of a rank's own buffers.
pub(crate) const BUFFERS: &str = "buffers.";

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::Arc;

    use fused_optim::SliceMut;
    use parking_lot::Mutex;

    use crate::Result;
    use crate::data::Batch;
    use crate::engine::Losses;
    use crate::hooks::{Average, CheckpointHook, EmaHook};
    use crate::runner::{Hook, Runner, RunnerBuilder, TrainConfig};
    use crate::testing::{Metrics, blank, builder};

    /// Returns the first parameter.
    fn weight(runner: &mut Runner) -> f32 {
        let mut value = 0.0;
        let mut read = |slices: &mut [SliceMut<'_>]| {
            if let Some(SliceMut::F32(v)) = slices.first() {
                value = v[0];
            }
            Ok(())
        };
        runner.engine_mut().with_params(&mut read).unwrap();
        value
    }

    /// Records the weight seen by each test, and ends each training after one iteration.
    #[derive(Default)]
    struct Watch(Arc<Mutex<Vec<f32>>>);

    impl Hook for Watch {
        fn name(&self) -> &'static str {
            "Watch"
        }
        fn after_train_iter(&mut self, runner: &mut Runner, _: &Batch, _: &Losses) -> Result<()> {
            runner.stop_training();
            Ok(())
        }
        fn before_test_iter(&mut self, runner: &mut Runner, _: usize, _: &mut Batch) -> Result<()> {
            self.0.lock().push(weight(runner));
            Ok(())
        }
    }

    /// Nine iterations; each call of `train` runs one, which subtracts 1 from the weight.
    fn run(dir: &Path) -> RunnerBuilder {
        let run = builder(dir, 9).optim_wrapper(crate::testing::sgd(1.0));
        run.train_cfg(TrainConfig::by_iters(9)).test(blank(1), Metrics::new([[]]))
    }

    /// A resumable checkpoint of the weight 0; the initial weight is 1.
    fn trained(dir: &Path) -> std::path::PathBuf {
        let mut hook = CheckpointHook::new(0);
        hook.by_epoch = false;
        let run = run(dir).hook(Box::new(Watch::default())).hook(Box::new(hook));
        run.build().unwrap().train().unwrap();
        dir.join("iter_1")
    }

    #[test]
    fn load_from_is_loaded_once() {
        let dir = tempfile::tempdir().unwrap();
        let from = trained(&dir.path().join("a"));
        let watch = Watch::default();
        let seen = Arc::clone(&watch.0);
        let run = run(&dir.path().join("b")).load_from(from).hook(Box::new(watch));
        let mut run = run.build().unwrap();
        run.test().unwrap();
        for _ in 0..2 {
            run.train().unwrap();
            run.test().unwrap();
        }
        assert_eq!(*seen.lock(), [0.0, -1.0, -2.0]);
    }

    #[test]
    fn second_training_of_a_resumed_run_loads_nothing() {
        let dir = tempfile::tempdir().unwrap();
        trained(dir.path());
        // It resumes, and saves nothing itself.
        let run = run(dir.path()).resume(true).hook(Box::new(Watch::default()));
        let mut run = run.build().unwrap();
        for expected in [-1.0, -2.0] {
            run.train().unwrap();
            assert_eq!(weight(&mut run), expected);
        }
        assert_eq!(run.position().iter, 3);
    }

    #[test]
    fn averages_are_kept_after_training() {
        let dir = tempfile::tempdir().unwrap();
        let watch = Watch::default();
        let seen = Arc::clone(&watch.0);
        let hook = EmaHook::new(Average::Exponential { momentum: 0.5 });
        let run = run(dir.path()).hook(Box::new(hook)).hook(Box::new(watch));
        let mut run = run.build().unwrap();
        for _ in 0..3 {
            run.train().unwrap();
            run.test().unwrap();
        }
        // Averages of the weights 0, -1 and -2.
        assert_eq!(*seen.lock(), [0.0, -0.5, -1.25]);
    }

    #[test]
    fn resumed_run_with_load_from_uses_its_own_checkpoints() {
        let dir = tempfile::tempdir().unwrap();
        let from = trained(&dir.path().join("a"));
        let work_dir = dir.path().join("b");
        let go_on = |from: &Path| {
            let mut hook = CheckpointHook::new(1);
            hook.by_epoch = false;
            let run = run(&work_dir).load_from(from).resume(true).hook(Box::new(hook));
            let mut run = run.hook(Box::new(Watch::default())).build().unwrap();
            run.train().unwrap();
            run.position().iter
        };
        assert_eq!([go_on(&from), go_on(&from), go_on(&from)], [2, 3, 4]);
        // Resume from one of its own, and from the next.
        let back = work_dir.join("iter_2");
        assert_eq!([go_on(&back), go_on(&back)], [3, 4]);
        // Also after its removal, as by `max_keep_ckpts`.
        std::fs::remove_dir_all(&back).unwrap();
        assert_eq!(go_on(&back), 5);
    }
}
