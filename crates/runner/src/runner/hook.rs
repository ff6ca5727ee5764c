//! `Hook`: the stages of a run at which hooks are called, and `Priority`, the order among hooks.

use serde_json::Value;

use super::{Length, Runner};
use crate::Result;
use crate::checkpoint::{Checkpoint, Contents};
use crate::config::{Section, unknown};
use crate::data::{Array, Batch};
use crate::engine::Losses;

/// Order of hooks: smaller numbers run first. The constants are MMEngine's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Priority(pub u8);

impl Priority {
    /// Before all others.
    pub const HIGHEST: Self = Self(0);
    /// Early.
    pub const VERY_HIGH: Self = Self(10);
    /// Early.
    pub const HIGH: Self = Self(30);
    /// A little early.
    pub const ABOVE_NORMAL: Self = Self(40);
    /// Default.
    pub const NORMAL: Self = Self(50);
    /// A little late.
    pub const BELOW_NORMAL: Self = Self(60);
    /// Late.
    pub const LOW: Self = Self(70);
    /// Late, for hooks that write to disk.
    pub const VERY_LOW: Self = Self(90);
    /// After all others.
    pub const LOWEST: Self = Self(100);

    /// MMEngine's names.
    const NAMES: [(&'static str, Self); 9] = [
        ("HIGHEST", Self::HIGHEST),
        ("VERY_HIGH", Self::VERY_HIGH),
        ("HIGH", Self::HIGH),
        ("ABOVE_NORMAL", Self::ABOVE_NORMAL),
        ("NORMAL", Self::NORMAL),
        ("BELOW_NORMAL", Self::BELOW_NORMAL),
        ("LOW", Self::LOW),
        ("VERY_LOW", Self::VERY_LOW),
        ("LOWEST", Self::LOWEST),
    ];

    /// Reads the key `priority` of a hook's section, a name in any case or a number; `None` if
    /// absent.
    pub(crate) fn read(section: &mut Section) -> Result<Option<Self>> {
        if !section.has("priority") {
            return Ok(None);
        }
        if section.is_string("priority") {
            let place = section.offset_of("priority");
            let name: String = section.required("priority")?;
            let named = Self::NAMES.iter().find(|(known, _)| known.eq_ignore_ascii_case(&name));
            if named.is_none() {
                let names = Self::NAMES.map(|(known, _)| known);
                section.note(place.error(unknown("value", &name, &names)))?;
            }
            return Ok(named.map(|(_, priority)| *priority));
        }
        let number = section
            .or_checked("priority", 50, "between 0 and 100", |n: &i64| (0..=100).contains(n))?;
        let number = u8::try_from(number).map_err(|e| section.error(e))?;
        Ok(Some(Self(number)))
    }
}

impl std::fmt::Display for Priority {
    /// Prints the name, or the number if it has none.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match Self::NAMES.iter().find(|(_, named)| named == self) {
            Some((name, _)) => f.write_str(name),
            None => self.0.fmt(f),
        }
    }
}

/// Defines the methods of [`Hook`] for stages of a run: name and further arguments. By default they
/// do nothing.
macro_rules! stages {
    ($($(#[$doc:meta])* $stage:ident($($arg:ident: $kind:ty),*);)*) => {$(
        $(#[$doc])*
        fn $stage(&mut self, runner: &mut Runner $(, $arg: $kind)*) -> Result<()> {
            Ok(())
        }
    )*};
}

/// Actions at stages of a run. Every method does nothing by default.
///
/// [`Runner::logger`] writes lines to the terminal and the log file. Numbers added by
/// [`Runner::scalars_mut`] are in the next log line of [`LoggerHook`](crate::hooks::LoggerHook), in
/// `scalars.json` and in every other receiver. Both are of rank 0: sum over the ranks by
/// [`Runner::group`] first.
///
/// # Errors
///
/// An error of any method ends the run on this rank, and with it on the others.
///
/// # Examples
///
/// Logs a number in each iteration and a line after each epoch. A configuration adds the hook by
/// `custom_hooks = [{ type = "Report" }]`, a program by
/// [`RunnerBuilder::hook`](crate::RunnerBuilder::hook):
///
/// ```
/// use runner::data::Batch;
/// use runner::engine::Losses;
/// use runner::hooks::{HOOKS, Hook};
/// use runner::{Result, Runner};
///
/// struct Report;
///
/// impl Hook for Report {
///     fn name(&self) -> &'static str {
///         "Report"
///     }
///
///     fn after_train_iter(
///         &mut self,
///         runner: &mut Runner,
///         batch: &Batch,
///         _: &Losses,
///     ) -> Result<()> {
///         let samples = batch.get("labels")?.shape()[0];
///         runner.scalars_mut().push("samples", samples as f64);
///         Ok(())
///     }
///
///     fn after_train_epoch(&mut self, runner: &mut Runner) -> Result<()> {
///         let (epoch, rate) = (runner.position().epoch + 1, runner.lr());
///         runner.logger().info(&format!("epoch {epoch} ends at rate {rate}"));
///         Ok(())
///     }
/// }
///
/// HOOKS.register("Report", |_section| Ok(Box::new(Report)))?;
/// # Ok::<(), runner::Error>(())
/// ```
#[expect(unused_variables, reason = "the defaults do nothing; the names are documentation")]
#[expect(clippy::missing_errors_doc, reason = "documented on the trait")]
pub trait Hook: Send {
    /// Name in logs and in checkpoints, unique within a run.
    fn name(&self) -> &'static str;

    /// Order among the hooks.
    fn priority(&self) -> Priority {
        Priority::NORMAL
    }

    /// Names of the validation's metrics that this hook needs.
    fn metrics(&self) -> Vec<String> {
        Vec::new()
    }

    /// Returns a warning that is logged at the start of a run of this length, which has `iters`
    /// iterations.
    fn warning(&self, length: Length, iters: usize) -> Option<String> {
        None
    }

    stages! {
        /// Called once, before all other stages.
        before_run();
        /// Called after the model has been loaded from a checkpoint.
        after_load_checkpoint(checkpoint: &Checkpoint);
        /// Called once, after parameters are loaded.
        before_train();
        /// Called before the first batch of an epoch (or of the rest of an epoch after a resume).
        before_train_epoch();
        /// Called before training on a batch, which the hook may change.
        before_train_iter(batch: &mut Batch);
        /// Called after training on a batch; `runner.position().iter` does not count it yet.
        after_train_iter(batch: &Batch, losses: &Losses);
        /// Called after the last batch of an epoch; `runner.position().epoch` does not count it
        /// yet.
        after_train_epoch();
        /// Called between two batches when a signal or the time budget ends the run early. After a
        /// signal the batches may be a validation's, whose `after_` stages are then not called.
        on_interrupt();
        /// Called before a validation.
        before_val();
        /// Called before the first batch of a validation.
        before_val_epoch();
        /// Called before batch `index` of a validation, which the hook may change. Ranks may have
        /// different numbers of batches, so this and the next stage must not use collectives.
        before_val_iter(index: usize, batch: &mut Batch);
        /// Called with the model's outputs on batch `index` of a validation.
        after_val_iter(index: usize, batch: &Batch, outputs: &[(String, Array)]);
        /// Called with a validation's metrics, equal on all ranks.
        after_val_epoch(metrics: &[(String, f64)]);
        /// Called after a validation.
        after_val();
        /// Called before a test.
        before_test();
        /// Called before the first batch of a test.
        before_test_epoch();
        /// Called before batch `index` of a test, as in a validation.
        before_test_iter(index: usize, batch: &mut Batch);
        /// Called with the model's outputs on batch `index` of a test.
        after_test_iter(index: usize, batch: &Batch, outputs: &[(String, Array)]);
        /// Called with a test's metrics, equal on all ranks.
        after_test_epoch(metrics: &[(String, f64)]);
        /// Called after a test.
        after_test();
        /// Called on every rank before a checkpoint is written; the hook may change its contents. A
        /// checkpoint requested here is written after the next stage.
        before_save_checkpoint(contents: &mut Contents);
        /// Called once, after the last epoch, or when the time budget is exhausted.
        after_train();
        /// Called once, after all other stages.
        after_run();
    }

    /// Returns the state to save in checkpoints.
    fn state_dict(&self) -> Option<Value> {
        None
    }
    /// Restores the saved state.
    fn load_state_dict(&mut self, state: &Value) -> Result<()> {
        Ok(())
    }
}
