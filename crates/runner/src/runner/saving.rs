//! `Save`: a request for a checkpoint, which is written at once, or after the stage if a hook makes it.
//!
//! A hook's call of [`Runner::save_checkpoint`] is carried out after all hooks of the stage were called. So what is
//! saved does not depend on their order: every scheduler has stepped, every hook has counted, and the weights that
//! `EMAHook` replaced for a validation are back.

use std::collections::VecDeque;
use std::path::PathBuf;

use serde_json::Value;

use super::finite::Unchecked;
use super::{Hook, Runner};
use crate::Result;
use crate::checkpoint::{self, Position, WorkDirLock};

/// A checkpoint to be written.
#[derive(Clone, Debug)]
pub struct Save {
    /// Its name in the work directory.
    pub name: String,
    /// Where the run is.
    pub position: Position,
    /// Whether the optimizer is saved; without it a run cannot be resumed from it, and `last_checkpoint` does not
    /// name it.
    pub optimizer: bool,
    /// Whether the schedulers are saved.
    pub schedulers: bool,
    /// Whether it is a model for others, beside the checkpoints that the run is resumed from.
    pub export: bool,
    /// Names of checkpoints that are removed once it is on disk.
    pub replaces: Vec<String>,
    /// What is logged then.
    pub log: Vec<String>,
}

impl Save {
    /// The model alone.
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

    /// All that a run is resumed from.
    #[must_use]
    pub fn resumable(name: &str, position: Position) -> Self {
        let all = Self::weights(name, position);
        Self { optimizer: true, schedulers: true, export: false, ..all }
    }
}

/// State of a run between batches.
#[derive(Debug, Default)]
pub(super) struct Status {
    /// `train` is running.
    pub(super) trains: bool,
    /// `stop_training` was called.
    pub(super) stopped: bool,
    /// It ends before its time.
    pub(super) interrupted: bool,
    /// The hooks of a stage are being called.
    in_hooks: bool,
    /// Checkpoints that they requested.
    requested: Vec<Save>,
    /// The iteration of the newest checkpoint that it can be resumed from.
    pub(super) resumable: Option<usize>,
    /// The last loss that was checked was not finite.
    pub(super) loss_is_bad: bool,
    /// Losses that were not there when their step ended, in order.
    pub(super) unchecked: VecDeque<Unchecked>,
    /// What was loaded.
    pub(super) loaded: Loaded,
    /// The checkpoint, of `load_from`, that the run began with.
    pub(super) origin: Option<PathBuf>,
    /// The work directory is this run's.
    pub(super) lock: Option<WorkDirLock>,
}

/// How much of a checkpoint is loaded, so that it is loaded once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Loaded {
    /// Nothing.
    #[default]
    Nothing,
    /// The model, or that there is none to load.
    Model,
    /// All, or that there is nothing to load: the training has begun.
    Run,
}

impl Runner {
    /// Writes a checkpoint on rank 0; the other ranks wait until it is on disk. Every rank calls it. If a hook
    /// does, the checkpoint is written after all hooks of that stage. Returns false, with a warning in the log, if
    /// weights or buffers (or gradients that wait for their step) are not finite: nothing is written then or removed.
    ///
    /// # Errors
    ///
    /// Those of [`checkpoint::save`](crate::checkpoint::save), on every rank.
    pub fn save_checkpoint(&mut self, save: Save) -> Result<bool> {
        self.check_all_losses()?;
        if let Some(what) = self.find_non_finite()? {
            let text = format!("{} is not written: {what} not finite", save.name);
            self.logger().warning(&text);
            return Ok(false);
        }
        self.status.requested.push(save);
        if !self.status.in_hooks {
            self.write_requested()?;
        }
        Ok(true)
    }

    /// Calls `stage` on every hook in order, and then writes the checkpoints that they requested. While a hook
    /// runs, the others are not reachable.
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
        self.write_checkpoint(&save)?;
        if save.optimizer {
            self.note_resumable(save.position.configured_iter());
        }
        let replaced: Vec<_> = save.replaces.iter().map(|n| self.work_dir().join(n)).collect();
        self.remove_checkpoints(&replaced);
        save.log.iter().for_each(|line| self.logger().info(line));
        Ok(())
    }

    /// Records that a checkpoint of this iteration (of the configuration) can be resumed from.
    pub(crate) fn note_resumable(&mut self, iter: usize) {
        self.status.resumable = Some(iter);
    }

    /// Replaces what one hook has saved in a checkpoint, on rank 0.
    pub(crate) fn record_hook_state(&self, name: &str, hook: &str, state: Value) -> Result<()> {
        if self.group.rank() == 0 {
            checkpoint::record_hook_state(&self.work_dir().join(name), hook, state)?;
        }
        Ok(self.group.barrier()?)
    }

    /// Lets the hooks save a checkpoint. Returns whether the run can be resumed from here; if not, logs a warning.
    pub(crate) fn end_early(&mut self) -> Result<bool> {
        self.status.interrupted = true;
        self.call_hooks(|hook, runner| hook.on_interrupt(runner))?;
        let is_saved = self.is_resumable();
        if !is_saved {
            let iter = self.position.configured_iter();
            let text = format!("no checkpoint to resume from was written at iteration {iter}");
            self.logger().warning(&text);
        }
        Ok(is_saved)
    }
}

/// Stands in for a hook while that hook runs.
struct Absent;

impl Hook for Absent {
    fn name(&self) -> &'static str {
        "absent"
    }
}
