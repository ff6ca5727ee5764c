//! `Hook`: the stages of a run at which hooks are called, and `Priority`, the order among hooks.

use serde_json::Value;

use super::{Length, Runner};
use crate::Result;
use crate::checkpoint::{Checkpoint, Contents};
use crate::config::{Section, unknown};
use crate::data::{Array, Batch};
use crate::engine::Losses;

/// Order among hooks: small numbers first. The constants are MMEngine's.
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

    /// The key `priority` of a hook's section, a name in any case or a number; none if it is absent.
    pub(crate) fn read(section: &mut Section) -> Result<Option<Self>> {
        if !section.has("priority") {
            return Ok(None);
        }
        if section.is_string("priority") {
            let place = section.offset_of("priority");
            let name: String = section.required("priority")?;
            let named = Self::NAMES.iter().find(|(known, _)| known.eq_ignore_ascii_case(&name));
            let names = Self::NAMES.map(|(known, _)| known);
            let refused = || place.error(unknown("value", &name, &names));
            return named.map(|(_, priority)| Some(*priority)).ok_or_else(refused);
        }
        let number = section
            .or_checked("priority", 50, "between 0 and 100", |n: &i64| (0..=100).contains(n))?;
        let number = u8::try_from(number).map_err(|e| section.error(e))?;
        Ok(Some(Self(number)))
    }
}

impl std::fmt::Display for Priority {
    /// Its name, or else its number.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match Self::NAMES.iter().find(|(_, named)| named == self) {
            Some((name, _)) => f.write_str(name),
            None => self.0.fmt(f),
        }
    }
}

/// The methods of [`Hook`] for stages of a run: name and further arguments. Each does nothing by default.
macro_rules! stages {
    ($($(#[$doc:meta])* $stage:ident($($arg:ident: $kind:ty),*);)*) => {$(
        $(#[$doc])*
        fn $stage(&mut self, runner: &mut Runner $(, $arg: $kind)*) -> Result<()> {
            Ok(())
        }
    )*};
}

/// Something done at stages of a run. Every method does nothing unless implemented.
///
/// # Errors
///
/// An error from any method ends the run on this rank, and with it the others.
#[expect(unused_variables, reason = "the defaults do nothing; the names are documentation")]
#[expect(clippy::missing_errors_doc, reason = "documented on the trait")]
pub trait Hook: Send {
    /// Name in logs and in checkpoints; unique within a run.
    fn name(&self) -> &'static str;

    /// Order among the hooks.
    fn priority(&self) -> Priority {
        Priority::NORMAL
    }

    /// Names of the validation's metrics that it needs.
    fn metrics(&self) -> Vec<String> {
        Vec::new()
    }

    /// Warning that is logged when a run of this length, which is of so many iterations, starts with this hook.
    fn warning(&self, length: Length, iters: usize) -> Option<String> {
        None
    }

    stages! {
        /// Once, before anything else.
        before_run();
        /// After the model has been loaded from a checkpoint.
        after_load_checkpoint(checkpoint: &Checkpoint);
        /// Once, after parameters are loaded.
        before_train();
        /// Before the first batch of an epoch (or of what is left of it after a resume).
        before_train_epoch();
        /// Before training on the batch, which the hook may change.
        before_train_iter(batch: &mut Batch);
        /// After training on the batch; `runner.position().iter` does not count it yet.
        after_train_iter(batch: &Batch, losses: &Losses);
        /// After the last batch of an epoch; `runner.position().epoch` does not count it yet.
        after_train_epoch();
        /// The run ends before its time, between two batches: a signal, or the time budget is spent. After a
        /// signal they may be a validation's, whose `after_` stages do not come then.
        on_interrupt();
        /// Before a validation.
        before_val();
        /// Before the first batch of a validation.
        before_val_epoch();
        /// Before batch `index` of a validation, which the hook may change. Ranks may have different numbers of batches: nothing
        /// that all ranks have to call belongs here, or after it.
        before_val_iter(index: usize, batch: &mut Batch);
        /// The model's outputs on batch `index` of a validation.
        after_val_iter(index: usize, batch: &Batch, outputs: &[(String, Array)]);
        /// A validation's metrics, equal on all ranks.
        after_val_epoch(metrics: &[(String, f64)]);
        /// After a validation.
        after_val();
        /// Before a test.
        before_test();
        /// Before the first batch of a test.
        before_test_epoch();
        /// Before batch `index` of a test, as of a validation.
        before_test_iter(index: usize, batch: &mut Batch);
        /// The model's outputs on batch `index` of a test.
        after_test_iter(index: usize, batch: &Batch, outputs: &[(String, Array)]);
        /// A test's metrics, equal on all ranks.
        after_test_epoch(metrics: &[(String, f64)]);
        /// After a test.
        after_test();
        /// A checkpoint is about to be written; the hook may change what is in it. On every rank. A checkpoint
        /// that is asked for here is written after the next stage.
        before_save_checkpoint(contents: &mut Contents);
        /// Once, after the last epoch, or when the time budget is spent.
        after_train();
        /// Once, after everything else.
        after_run();
    }

    /// What to save in checkpoints.
    fn state_dict(&self) -> Option<Value> {
        None
    }
    /// Restores what was saved.
    fn load_state_dict(&mut self, state: &Value) -> Result<()> {
        Ok(())
    }
}
