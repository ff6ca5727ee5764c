//! Hooks: what else happens at each stage of a run.
//!
//! Hooks run in order of [`Priority`], equal ones in order of registration. A hook reaches the
//! whole run through the [`Runner`] it is handed, and may keep state of its own in checkpoints.

mod checkpoint;
mod early_stopping;
mod iter_timer;
mod logger;
mod monitor;
mod param_scheduler;
mod sync_buffers;

use serde_json::Value;

pub use checkpoint::CheckpointHook;
pub use early_stopping::EarlyStoppingHook;
pub use iter_timer::IterTimerHook;
pub use logger::LoggerHook;
pub use param_scheduler::ParamSchedulerHook;
pub use sync_buffers::SyncBuffersHook;

use crate::Result;
use crate::data::Batch;
use crate::engine::Losses;
use crate::registry::Builtin;
use crate::runner::Runner;

/// When a hook's turn comes: small numbers first. The constants are MMEngine's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Priority(pub u8);

impl Priority {
    /// Before everyone.
    pub const HIGHEST: Self = Self(0);
    /// Early.
    pub const VERY_HIGH: Self = Self(10);
    /// Early.
    pub const HIGH: Self = Self(30);
    /// A little early.
    pub const ABOVE_NORMAL: Self = Self(40);
    /// Where nothing is said.
    pub const NORMAL: Self = Self(50);
    /// A little late.
    pub const BELOW_NORMAL: Self = Self(60);
    /// Late.
    pub const LOW: Self = Self(70);
    /// After almost everyone: what writes to disk.
    pub const VERY_LOW: Self = Self(90);
    /// After everyone.
    pub const LOWEST: Self = Self(100);
}

/// Something done at stages of a run. Every method does nothing unless implemented.
///
/// # Errors
///
/// An error from any method ends the run on this rank, and with it the others.
#[expect(unused_variables, reason = "the defaults do nothing; the names are documentation")]
#[expect(clippy::missing_errors_doc, reason = "said once, on the trait")]
pub trait Hook: Send {
    /// Name in logs and in checkpoints; unique within a run.
    fn name(&self) -> &'static str;

    /// Place among the hooks.
    fn priority(&self) -> Priority {
        Priority::NORMAL
    }

    /// Once, before anything else.
    fn before_run(&mut self, runner: &mut Runner) -> Result<()> {
        Ok(())
    }
    /// Once, after parameters are loaded.
    fn before_train(&mut self, runner: &mut Runner) -> Result<()> {
        Ok(())
    }
    /// Before the first batch of an epoch (or of what is left of it after a resume).
    fn before_train_epoch(&mut self, runner: &mut Runner) -> Result<()> {
        Ok(())
    }
    /// Batch in hand, not yet trained on. The hook may change it.
    fn before_train_iter(&mut self, runner: &mut Runner, batch: &mut Batch) -> Result<()> {
        Ok(())
    }
    /// Trained on the batch; `runner.position().iter` does not count it yet.
    fn after_train_iter(
        &mut self,
        runner: &mut Runner,
        batch: &Batch,
        losses: &Losses,
    ) -> Result<()> {
        Ok(())
    }
    /// After the last batch of an epoch; `runner.position().epoch` does not count it yet.
    fn after_train_epoch(&mut self, runner: &mut Runner) -> Result<()> {
        Ok(())
    }
    /// Before a validation.
    fn before_val(&mut self, runner: &mut Runner) -> Result<()> {
        Ok(())
    }
    /// After a validation, with its figures, equal on all ranks.
    fn after_val(&mut self, runner: &mut Runner, metrics: &[(String, f64)]) -> Result<()> {
        Ok(())
    }
    /// Once, after the last epoch, or when the time budget is spent.
    fn after_train(&mut self, runner: &mut Runner) -> Result<()> {
        Ok(())
    }
    /// Once, after everything else.
    fn after_run(&mut self, runner: &mut Runner) -> Result<()> {
        Ok(())
    }

    /// What to save in checkpoints.
    fn state_dict(&self) -> Option<Value> {
        None
    }
    /// Goes on from what was saved.
    fn load_state_dict(&mut self, state: &Value) -> Result<()> {
        Ok(())
    }
}

/// The hooks a configuration can name.
pub(crate) const BUILTIN: Builtin<Box<dyn Hook>> = &[
    ("CheckpointHook", checkpoint::read),
    ("EarlyStoppingHook", early_stopping::read),
    ("IterTimerHook", |_| Ok(Box::new(IterTimerHook::default()))),
    ("LoggerHook", logger::read),
    ("ParamSchedulerHook", |_| Ok(Box::new(ParamSchedulerHook))),
    ("SyncBuffersHook", |_| Ok(Box::new(SyncBuffersHook::default()))),
];

/// The hooks a run has unless told otherwise: key in `[default_hooks]`, and type.
pub(crate) const DEFAULTS: &[(&str, &str)] = &[
    ("timer", "IterTimerHook"),
    ("sync_buffers", "SyncBuffersHook"),
    ("logger", "LoggerHook"),
    ("param_scheduler", "ParamSchedulerHook"),
    ("checkpoint", "CheckpointHook"),
];

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use parking_lot::Mutex;

    use super::*;
    use crate::testing::builder;

    /// Writes each stage it sees to a list.
    struct Trace(&'static str, Priority, Arc<Mutex<Vec<String>>>);

    impl Trace {
        fn note(&self, stage: &str) -> Result<()> {
            self.2.lock().push(format!("{} {stage}", self.0));
            Ok(())
        }
    }

    impl Hook for Trace {
        fn name(&self) -> &'static str {
            self.0
        }
        fn priority(&self) -> Priority {
            self.1
        }
        fn before_run(&mut self, _: &mut Runner) -> Result<()> {
            self.note("before_run")
        }
        fn before_train(&mut self, _: &mut Runner) -> Result<()> {
            self.note("before_train")
        }
        fn before_train_epoch(&mut self, _: &mut Runner) -> Result<()> {
            self.note("before_train_epoch")
        }
        fn before_train_iter(&mut self, _: &mut Runner, _: &mut Batch) -> Result<()> {
            self.note("before_train_iter")
        }
        fn after_train_iter(&mut self, runner: &mut Runner, _: &Batch, _: &Losses) -> Result<()> {
            self.note(&format!("after_train_iter {}", runner.position().iter))
        }
        fn after_train_epoch(&mut self, runner: &mut Runner) -> Result<()> {
            self.note(&format!("after_train_epoch {}", runner.position().epoch))
        }
        fn after_train(&mut self, _: &mut Runner) -> Result<()> {
            self.note("after_train")
        }
        fn after_run(&mut self, _: &mut Runner) -> Result<()> {
            self.note("after_run")
        }
    }

    #[test]
    fn stages_come_in_mmengines_order_and_hooks_by_priority() {
        let dir = tempfile::tempdir().unwrap();
        let seen = Arc::default();
        let hook = |name, priority| Box::new(Trace(name, priority, Arc::clone(&seen)));
        builder(dir.path(), 2)
            .hook(hook("late", Priority::LOW))
            .hook(hook("first", Priority::NORMAL))
            .hook(hook("second", Priority::NORMAL))
            .hook(hook("early", Priority(49)))
            .build()
            .unwrap()
            .train()
            .unwrap();
        let stages = [
            "before_run",
            "before_train",
            "before_train_epoch",
            "before_train_iter",
            "after_train_iter 0",
            "before_train_iter",
            "after_train_iter 1",
            "after_train_epoch 0",
            "after_train",
            "after_run",
        ];
        let names = ["early", "first", "second", "late"];
        let expected: Vec<_> =
            stages.iter().flat_map(|stage| names.map(|name| format!("{name} {stage}"))).collect();
        assert_eq!(*seen.lock(), expected);
    }

    #[test]
    fn buffers_are_averaged_before_they_are_logged_or_saved() {
        let config = crate::config::Config::from_text("c.toml", "").unwrap().into_section();
        let hooks = DEFAULTS
            .iter()
            .map(|(key, name)| crate::registry::HOOKS.build_or(config.empty(key), name).unwrap());
        let mut priorities: Vec<_> = hooks.map(|h| (h.priority().0, h.name())).collect();
        priorities.sort_by_key(|p| p.0);
        // MMEngine's numbers.
        let expected = [
            (50, "IterTimerHook"),
            (50, "SyncBuffersHook"),
            (60, "LoggerHook"),
            (70, "ParamSchedulerHook"),
            (90, "CheckpointHook"),
        ];
        assert_eq!(priorities, expected);
    }
}
