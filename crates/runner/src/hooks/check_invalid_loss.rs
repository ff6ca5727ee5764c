//! Ends a run whose loss is infinite or NaN.

use super::Hook;
use crate::config::Section;
use crate::data::Batch;
use crate::engine::Losses;
use crate::runner::Runner;
use crate::{Error, Result};

/// Checks the loss after every `interval` iterations, and ends the run if it is infinite or NaN.
/// Without this hook such a loss is only a warning. On a GPU only these checks wait for the loss.
///
/// Follows: MMDetection 3.3, `engine/hooks/checkloss_hook.py`, for MMEngine.
#[derive(Clone, Copy, Debug)]
pub struct CheckInvalidLossHook {
    /// Iterations between checks, 50.
    pub interval: usize,
}

impl Default for CheckInvalidLossHook {
    fn default() -> Self {
        Self { interval: 50 }
    }
}

pub(super) fn read(section: &mut Section) -> Result<Box<dyn Hook>> {
    let interval = section.count("interval", CheckInvalidLossHook::default().interval)?;
    Ok(Box::new(CheckInvalidLossHook { interval }))
}

impl Hook for CheckInvalidLossHook {
    fn name(&self) -> &'static str {
        "CheckInvalidLossHook"
    }

    fn after_train_iter(&mut self, runner: &mut Runner, _: &Batch, losses: &Losses) -> Result<()> {
        let (iter, rank) = (runner.position().iter + 1, runner.group().rank());
        if !iter.is_multiple_of(self.interval) {
            return Ok(());
        }
        let Some(loss) = losses.non_finite()? else { return Ok(()) };
        Err(Error::InvalidLoss { loss, iter, rank })
    }
}
