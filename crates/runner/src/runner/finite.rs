//! Checks for non-finite numbers: a non-finite loss is a warning, non-finite weights and buffers
//! are not saved.
//!
//! Reading a loss from a device waits for it. So a step's loss is checked when it is available: at
//! the latest when the device is [`MAX_AHEAD`] steps behind, before a checkpoint or a validation,
//! and at the end of training.

use std::collections::VecDeque;

use collective::ReduceOp;
use fused_optim::{Applied, SliceMut};

use super::Runner;
use crate::Result;
use crate::checkpoint::{visit_buffers, visit_model};
use crate::engine::{Losses, TensorSpec};
use crate::model::with_host_grads;
use crate::optim_wrapper::{Update, has_non_finite};

/// Maximum number of steps that a device may be behind the host.
const MAX_AHEAD: usize = 16;

/// Losses of a step that have not been checked yet.
#[derive(Debug)]
struct Unchecked {
    /// The step's iteration, counted from 1.
    iter: usize,
    losses: Losses,
    is_skipped: bool,
}

/// Losses that were not available when their step ended, in order.
#[derive(Debug, Default)]
pub(super) struct UncheckedLosses {
    steps: VecDeque<Unchecked>,
    /// Whether the last checked loss was not finite.
    is_bad: bool,
}

impl UncheckedLosses {
    /// Checks available losses, waits until at most `left` are not available, and returns the next
    /// warning.
    fn check(&mut self, left: usize, rank: usize) -> Result<Option<String>> {
        while let Some(oldest) = self.steps.front() {
            if self.steps.len() <= left && oldest.losses.poll()?.is_none() {
                break;
            }
            let bad = oldest.losses.non_finite()?;
            let Some(Unchecked { iter, is_skipped, .. }) = self.steps.pop_front() else { break };
            let was_bad = std::mem::replace(&mut self.is_bad, bad.is_some());
            let Some(loss) = bad.filter(|_| !was_bad) else { continue };
            let then = match is_skipped {
                true => "the optimizer skipped this step",
                false => {
                    "non-finite weights are not saved; add CheckInvalidLossHook to end such a run"
                }
            };
            let text = format!("the loss is {loss} at iteration {iter} on rank {rank}: {then}");
            return Ok(Some(text));
        }
        Ok(None)
    }
}

impl Runner {
    /// Warns of non-finite losses on their own rank, once for several in a row. A loss that a
    /// device is still computing is checked after a later step.
    pub(super) fn check_losses(&mut self, update: &Update) -> Result<()> {
        let is_skipped = update.applied == Some(Applied::SkippedNonFinite);
        let (iter, losses) = (self.position.iter + 1, update.losses.clone());
        self.losses.steps.push_back(Unchecked { iter, losses, is_skipped });
        self.check_losses_but(MAX_AHEAD)
    }

    /// As [`check_losses`](Self::check_losses), for all steps so far. Waits for the device.
    pub(super) fn check_all_losses(&mut self) -> Result<()> {
        self.check_losses_but(0)
    }

    fn check_losses_but(&mut self, left: usize) -> Result<()> {
        let rank = self.group.rank();
        while let Some(text) = self.losses.check(left, rank)? {
            self.logger().warning_of_rank(&text);
        }
        Ok(())
    }

    /// Returns the reason why a checkpoint would be useless, with its verb: a non-finite weight or
    /// buffer, non-finite accumulated gradients if a step on them would not be skipped, or a
    /// non-finite state of the model wrapper. Equal on all ranks, except for the name of the weight
    /// or buffer, which only its own rank knows.
    pub(super) fn find_non_finite(&mut self) -> Result<Option<String>> {
        let mut name = None;
        let mut look = |_: usize, spec: &TensorSpec, values: &mut SliceMut<'_>| {
            if name.is_none() && has_non_finite(values.as_slice()) {
                name = Some(spec.name.clone());
            }
            Ok(())
        };
        // Rank 0's weights are saved, and every rank's buffers.
        match self.group.rank() {
            0 => visit_model(&mut *self.engine, &mut look)?,
            _ => visit_buffers(&mut *self.engine, &mut look)?,
        }
        let mut bad_gradients = false;
        if !self.optim.skips_non_finite() {
            with_host_grads(&*self.model, &mut |grads| {
                bad_gradients = grads.iter().flatten().any(|grad| has_non_finite(*grad));
                Ok(())
            })?;
        }
        let bad_state = !self.model.is_state_finite();
        let mut found = [name.is_some(), bad_gradients, bad_state].map(u8::from);
        self.group.all_reduce(&mut found, ReduceOp::Max)?;
        Ok(match found {
            [0, 0, 0] => None,
            [0, 0, _] => Some("the error feedback of PowerSGD is".to_owned()),
            [0, _, _] => Some("the accumulated gradients are".to_owned()),
            _ => Some(match name {
                Some(name) => format!("`{name}` is"),
                None => "a buffer of another rank is".to_owned(),
            }),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::losses::tests::{Device, late};
    use crate::testing::builder;

    #[test]
    fn device_losses_are_checked_when_available_or_too_many_are_pending() {
        let dir = tempfile::tempdir().unwrap();
        let mut runner = builder(dir.path(), 1).build().unwrap();
        let device = Device::default();
        let step = |runner: &mut Runner, loss| {
            let losses = late(&device, loss);
            let update = Update { losses, applied: None, note: None, warning: None };
            runner.check_losses(&update).unwrap();
            (runner.losses.steps.len(), runner.losses.is_bad, device.0.lock().1)
        };
        for steps in 1..=MAX_AHEAD {
            assert_eq!(step(&mut runner, f64::NAN), (steps, false, 0));
        }
        assert_eq!(step(&mut runner, 1.0), (MAX_AHEAD, true, 1));
        runner.check_all_losses().unwrap();
        assert!(runner.losses.steps.is_empty() && !runner.losses.is_bad);
        device.0.lock().0 = true;
        assert_eq!(step(&mut runner, f64::NAN), (0, true, 1 + MAX_AHEAD));
    }
}
