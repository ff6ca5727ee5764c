//! Saves the run every few epochs.

use std::path::PathBuf;

use serde_json::{Value, json};

use super::{Hook, Priority};
use crate::Result;
use crate::checkpoint::Position;
use crate::config::Section;
use crate::runner::Runner;

/// Writes `epoch_N` every `interval` epochs and after the last, keeping at most `max_keep_ckpts`;
/// `iter_N` if the run ends inside an epoch.
#[derive(Debug)]
pub struct CheckpointHook {
    interval: usize,
    /// 0 keeps all.
    max_keep_ckpts: usize,
    save_last: bool,
    /// Names written so far, oldest first: those this run may prune.
    written: Vec<String>,
}

impl CheckpointHook {
    /// A checkpoint every `interval` epochs, all kept; 0 counts as 1.
    #[must_use]
    pub fn new(interval: usize) -> Self {
        let interval = interval.max(1);
        Self { interval, max_keep_ckpts: 0, save_last: true, written: Vec::new() }
    }

    fn save(&mut self, runner: &mut Runner, name: String, position: Position) -> Result<()> {
        self.written.retain(|n| *n != name);
        self.written.push(name.clone());
        runner.save_checkpoint(&name, position, Some((self.name(), self.state_dict())))?;
        // The list just saved still names these, so what a kill leaves of them goes next time.
        let keep = if self.max_keep_ckpts == 0 { usize::MAX } else { self.max_keep_ckpts };
        let surplus = self.written.len().saturating_sub(keep);
        let pruned: Vec<PathBuf> =
            self.written.drain(..surplus).map(|n| runner.work_dir().join(n)).collect();
        runner.remove_checkpoints(&pruned)
    }
}

pub(super) fn read(section: &mut Section) -> Result<Box<dyn Hook>> {
    let interval = section.or_checked("interval", 1, "at least 1", |n: &usize| *n >= 1)?;
    let max_keep_ckpts = section.or("max_keep_ckpts", 0)?;
    let save_last = section.or("save_last", true)?;
    Ok(Box::new(CheckpointHook { interval, max_keep_ckpts, save_last, written: Vec::new() }))
}

impl Hook for CheckpointHook {
    fn name(&self) -> &'static str {
        "CheckpointHook"
    }

    fn priority(&self) -> Priority {
        Priority::VERY_LOW
    }

    fn after_train_epoch(&mut self, runner: &mut Runner) -> Result<()> {
        let position = runner.position().clone();
        let epoch = position.epoch + 1;
        let last = epoch == runner.max_epochs() && self.save_last;
        if !epoch.is_multiple_of(self.interval) && !last {
            return Ok(());
        }
        runner.logger().info(&format!("Saving checkpoint at {epoch} epochs"));
        self.save(runner, format!("epoch_{epoch}"), Position { epoch, batch: 0, ..position })
    }

    fn after_train(&mut self, runner: &mut Runner) -> Result<()> {
        // The time budget may have ended inside an epoch, or after one that was not saved.
        let position = runner.position().clone();
        let (name, at) = match position.batch {
            0 => (format!("epoch_{}", position.epoch), format!("{} epochs", position.epoch)),
            _ => (format!("iter_{}", position.iter), format!("{} iterations", position.iter)),
        };
        if !self.save_last || position.iter == 0 || self.written.contains(&name) {
            return Ok(());
        }
        runner.logger().info(&format!("Saving checkpoint at {at}"));
        self.save(runner, name, position)
    }

    fn state_dict(&self) -> Option<Value> {
        Some(json!({ "written": self.written }))
    }

    fn load_state_dict(&mut self, state: &Value) -> Result<()> {
        let names = state["written"].as_array().into_iter().flatten();
        self.written = names.filter_map(|n| n.as_str().map(str::to_owned)).collect();
        Ok(())
    }
}
