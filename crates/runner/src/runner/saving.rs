//! `Save`: a request for a checkpoint, which is written at once, or after the stage if a hook makes
//! the request.
//!
//! A hook's call of [`Runner::save_checkpoint`] takes effect after all hooks of the stage were
//! called. So the checkpoint does not depend on their order: every scheduler has stepped, every
//! hook has counted, and `EMAHook` has restored the weights that it replaced for a validation.

use std::path::PathBuf;

use collective::object::broadcast_object;
use serde_json::Value;
use tracing::info_span;

use super::{Hook, Runner};
use crate::checkpoint::{self, Position, WorkDirLock, check_name};
use crate::model::LoraOptions;
use crate::optim_wrapper::OptimWrapper;
use crate::{Error, Result, SpentObject};

/// A request for a checkpoint.
#[derive(Clone, Debug)]
pub struct Save {
    /// Name in the work directory: not hidden, without `/`, and not `last_checkpoint`.
    pub name: String,
    /// Position of the run.
    pub position: Position,
    /// Whether the optimizer is saved; without it a run cannot resume from the checkpoint, and
    /// `last_checkpoint` does not name it.
    pub optimizer: bool,
    /// Whether the schedulers are saved.
    pub schedulers: bool,
    /// Whether it is an exported model, not one of the checkpoints that the run resumes from.
    pub export: bool,
    /// Names of checkpoints that are removed when this one is on disk.
    pub replaces: Vec<String>,
    /// Messages that are logged afterwards.
    pub log: Vec<String>,
}

impl Save {
    /// Requests the model only.
    #[must_use]
    pub fn weights(name: &str, position: Position) -> Self {
        Self {
            name: name.to_owned(),
            position,
            optimizer: false,
            schedulers: false,
            export: true,
            replaces: Vec::new(),
            log: Vec::new(),
        }
    }

    /// Requests everything that a run resumes from.
    #[must_use]
    pub fn resumable(name: &str, position: Position) -> Self {
        let all = Self::weights(name, position);
        Self { optimizer: true, schedulers: true, export: false, ..all }
    }
}

/// State of a run between iterations.
#[derive(Debug, Default)]
pub(super) struct Status {
    /// Whether `train` is running.
    pub(super) trains: bool,
    /// Whether `stop_training` was called.
    pub(super) stopped: bool,
    /// Whether the run ends early.
    pub(super) interrupted: bool,
    /// Whether the hooks of a stage are being called.
    in_hooks: bool,
    /// Checkpoints that they requested.
    requested: Vec<Save>,
    /// Iteration of the newest checkpoint that the run can resume from.
    pub(super) resumable: Option<usize>,
    /// Path of that checkpoint.
    pub(super) good: Option<PathBuf>,
    /// Iteration of the first checkpoint since then that was not saved, because the model was not
    /// finite.
    pub(super) refused: Option<usize>,
    /// Whether the ranks have compared whether [`Engine::loss_count`] is known: with it they
    /// exchange counts.
    ///
    /// [`Engine::loss_count`]: crate::engine::Engine::loss_count
    pub(super) compared_counts: bool,
    /// Error that ended this run.
    pub(super) failed: Option<String>,
    /// Lock of the work directory, while this run holds it.
    pub(super) lock: Option<WorkDirLock>,
}

/// Values of the configuration that the run began with, as recorded in checkpoints.
#[derive(Debug)]
pub(super) struct Configured {
    pub(super) accumulative_counts: usize,
    /// Hyper-parameters of the optimizer.
    pub(super) hyper_params: Value,
    pub(super) lora: Option<LoraOptions>,
    /// Whether the learning rate is scaled with the size of a step (`auto_scale_lr`).
    pub(super) scales_lr: bool,
}

impl Configured {
    pub(super) fn new(
        optim: &mut OptimWrapper,
        hyper_params: Value,
        lora: Option<LoraOptions>,
        scales_lr: bool,
    ) -> Self {
        let accumulative_counts = optim.accumulation().counts();
        Self { accumulative_counts, hyper_params, lora, scales_lr }
    }
}

impl Runner {
    /// Saves a checkpoint on rank 0; the other ranks wait until it is on disk. Every rank calls it.
    /// If a hook calls it, the checkpoint is saved after all hooks of that stage. Returns false,
    /// with a warning in the log, if weights, buffers or accumulated gradients are not finite: then
    /// nothing is saved or removed.
    ///
    /// # Errors
    ///
    /// Those of [`checkpoint::save`](crate::checkpoint::save), on every rank; the first error of a
    /// part of the run or a hook that is saved, which ends the run on all ranks; a name that a
    /// checkpoint cannot have is refused at once; [`Error::Config`] if learning rates differ
    /// between ranks; [`Error::Spent`] after an error of the run.
    pub fn save_checkpoint(&mut self, save: Save) -> Result<bool> {
        self.check_unspent()?;
        std::iter::once(&save.name).chain(&save.replaces).try_for_each(|n| check_name(n))?;
        let checked = self.check_all_losses();
        self.or_abort(checked)?;
        self.settle()?;
        self.compare_rates()?;
        let found = self.find_non_finite();
        if let Some(found) = self.or_abort(found)? {
            let text = format!("{} is not saved: {} not finite", save.name, found.what);
            self.logger().warning(&text);
            self.status.refused.get_or_insert(save.position.iter);
            return Ok(false);
        }
        self.status.refused = None;
        self.status.requested.push(save);
        if !self.status.in_hooks {
            self.write_requested()?;
        }
        Ok(true)
    }

    /// Returns an error if averages of gradients have failed that a step has used.
    pub(super) fn settle(&mut self) -> Result<()> {
        let settled = self.model.settle().map_err(Error::from);
        self.or_abort(settled)
    }

    /// Calls `stage` on every hook in order, then saves the checkpoints that they requested. While
    /// a hook runs, the other hooks are not accessible.
    pub(crate) fn call_hooks(
        &mut self,
        mut stage: impl FnMut(&mut dyn Hook, &mut Self) -> Result<()>,
    ) -> Result<()> {
        let nested = std::mem::replace(&mut self.status.in_hooks, true);
        let called = (0..self.hooks.len()).try_for_each(|index| {
            let mut hook = std::mem::replace(&mut self.hooks[index].1, Box::new(Absent));
            let result = stage(&mut *hook, self);
            self.hooks[index].1 = hook;
            result
        });
        self.status.in_hooks = nested;
        if called.is_err() {
            self.status.requested.clear();
        }
        called?;
        if nested { Ok(()) } else { self.write_requested() }
    }

    fn write_requested(&mut self) -> Result<()> {
        let requested = std::mem::take(&mut self.status.requested);
        self.status.in_hooks = true;
        let written = requested.into_iter().try_for_each(|save| self.carry_out(save));
        self.status.in_hooks = false;
        written
    }

    fn carry_out(&mut self, save: Save) -> Result<()> {
        let span = info_span!(target: "runner", "save", name = save.name.as_str());
        span.in_scope(|| self.write_checkpoint(&save))?;
        if save.optimizer {
            self.note_resumable(save.position.configured_iter(), self.work_dir().join(&save.name));
        }
        let replaced: Vec<_> = save.replaces.iter().map(|n| self.work_dir().join(n)).collect();
        self.remove_checkpoints(&replaced);
        save.log.iter().for_each(|line| self.logger().info(line));
        Ok(())
    }

    /// Records that the run can resume from a checkpoint at this iteration (of the configuration).
    pub(crate) fn note_resumable(&mut self, iter: usize, path: PathBuf) {
        (self.status.resumable, self.status.good) = (Some(iter), Some(path));
    }

    /// Runs `call` on rank 0. Its error is one on every rank.
    pub(super) fn on_rank_0(&mut self, call: impl FnOnce(&mut Self) -> Result<()>) -> Result<()> {
        let own = (self.group.rank() == 0).then(|| call(self));
        let why = own.as_ref().map(|own| own.as_ref().err().map(ToString::to_string));
        let why = broadcast_object::<Option<String>>(&self.group, why, 0)?;
        match (own, why) {
            (Some(own), _) => own,
            (None, Some(why)) => Err(Error::checkpoint(None, format!("rank 0: {why}"))),
            (None, None) => Ok(()),
        }
    }

    /// Returns an error if an earlier one has ended this run.
    pub(super) fn check_unspent(&self) -> Result<()> {
        match &self.status.failed {
            None => Ok(()),
            Some(cause) => Err(Error::Spent { object: SpentObject::Run, cause: cause.clone() }),
        }
    }

    /// Replaces the state of one hook in a checkpoint, on rank 0.
    pub(crate) fn record_hook_state(&mut self, name: &str, hook: &str, state: Value) -> Result<()> {
        self.on_rank_0(|runner| {
            checkpoint::record_hook_state(&runner.work_dir().join(name), hook, state)
        })
    }

    /// Lets the hooks save a checkpoint. Returns whether the run can resume from here; if not, logs
    /// a warning.
    pub(crate) fn end_early(&mut self) -> Result<bool> {
        self.status.interrupted = true;
        self.call_hooks(|hook, runner| hook.on_interrupt(runner))?;
        let is_saved = self.is_resumable();
        if !is_saved {
            let iter = self.position.configured_iter();
            let text = format!("no checkpoint was saved at iteration {iter}");
            self.logger().warning(&text);
        }
        Ok(is_saved)
    }
}

/// Placeholder for a hook while that hook runs.
struct Absent;

impl Hook for Absent {
    fn name(&self) -> &'static str {
        "absent"
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::time::Duration;

    use collective::ProcessGroup;

    use super::*;
    use crate::checkpoint::{Contents, newest};
    use crate::data::Batch;
    use crate::runner::RunnerBuilder;
    use crate::testing::{FakeEngine, Values, builder};

    /// Runs `call` on two ranks after their training.
    fn after_training(
        dir: &Path,
        call: impl Fn(&mut Runner) -> Result<bool> + Sync,
    ) -> Vec<Result<bool>> {
        on_two_ranks(|_| builder(dir, 4), |run| run.train().and_then(|_| call(run)))
    }

    /// Runs `call` on two ranks, with a run of `build` for each.
    fn on_two_ranks<T: Send>(
        build: impl Fn(usize) -> RunnerBuilder + Sync,
        call: impl Fn(&mut Runner) -> Result<T> + Sync,
    ) -> Vec<Result<T>> {
        let groups = ProcessGroup::threads(2, Duration::from_secs(30)).unwrap();
        let rank = |group: ProcessGroup| {
            let run = build(group.rank()).process_group(group);
            call(&mut run.build().unwrap())
        };
        std::thread::scope(|scope| {
            let ranks: Vec<_> = groups.into_iter().map(|g| scope.spawn(|| rank(g))).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }

    #[test]
    fn failed_save_is_an_error_on_every_rank() {
        let dir = tempfile::tempdir().unwrap();
        let saved = after_training(&dir.path().join("a"), |run| {
            if run.group().rank() == 0 {
                std::fs::remove_dir_all(run.work_dir()).unwrap();
                std::fs::write(run.work_dir(), "not a directory").unwrap();
            }
            run.save_checkpoint(Save::resumable("last", run.position().clone()))
        });
        let errors: Vec<_> = saved.into_iter().map(|e| e.unwrap_err().to_string()).collect();
        assert_eq!(errors[1], format!("rank 0: {}", errors[0]));
        let saved = after_training(&dir.path().join("other"), |run| {
            run.save_checkpoint(Save::resumable("last", run.position().clone()))
        });
        assert!(saved.iter().all(|saved| matches!(saved, Ok(true))), "{saved:?}");
        assert!(newest(&dir.path().join("other")).unwrap().path.is_some());
    }

    /// Fails on rank 1 while a checkpoint is collected.
    struct Fails;

    impl Hook for Fails {
        fn name(&self) -> &'static str {
            "Fails"
        }
        fn before_save_checkpoint(&mut self, runner: &mut Runner, _: &mut Contents) -> Result<()> {
            match runner.group().rank() {
                1 => Err(Error::engine("no memory for a copy")),
                _ => Ok(()),
            }
        }
    }

    #[test]
    fn hook_that_fails_before_a_save_is_an_error_on_every_rank() {
        let dir = tempfile::tempdir().unwrap();
        let saved = on_two_ranks(
            |_| builder(dir.path(), 4).hook(Box::new(Fails)),
            |run| run.save_checkpoint(Save::resumable("last", run.position().clone())),
        );
        for error in saved.into_iter().map(|saved| saved.unwrap_err().to_string()) {
            assert!(error.contains("no memory for a copy"), "{error}");
        }
    }

    #[test]
    fn loss_counts_of_some_ranks_only_are_an_error_on_every_rank() {
        type Count = fn(&Batch, usize) -> Option<f64>;
        let counts: [(Count, &str); 2] = [
            (|_, _| None, "known on rank 0 and not known on rank 1"),
            (|_, step| (step == 0).then_some(1.0), "for some batches only"),
        ];
        for (of_rank_1, says) in counts {
            let dir = tempfile::tempdir().unwrap();
            let trained = on_two_ranks(
                |rank| {
                    let mut engine = FakeEngine::new(&[("w", Values::F32(vec![1.0]))], &[]);
                    engine.count = if rank == 1 { of_rank_1 } else { |_, _| Some(1.0) };
                    builder(dir.path(), 8).model(Box::new(|_| Ok(Box::new(engine))))
                },
                Runner::train,
            );
            for error in trained.into_iter().map(|trained| trained.unwrap_err().to_string()) {
                assert!(error.contains(says), "{error}");
            }
        }
    }

    #[test]
    fn run_without_a_set_of_data_can_still_use_its_others() {
        let dir = tempfile::tempdir().unwrap();
        let mut run = builder(dir.path(), 4).build().unwrap();
        for result in [run.validate(), run.test()] {
            assert!(matches!(result, Err(Error::Config { .. })), "{result:?}");
        }
        run.train().unwrap();
    }
}
