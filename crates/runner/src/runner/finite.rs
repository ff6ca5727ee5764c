//! Checks for non-finite numbers: a non-finite loss is a warning, non-finite weights and buffers
//! are not saved, and a run that ends with them ends with an error.
//!
//! Reading a loss from a device waits for it. So a step's loss is checked when it is available: at
//! the latest when the device is [`MAX_AHEAD`] steps behind, before a checkpoint or a validation,
//! and at the end of training.

use std::collections::VecDeque;

use collective::ReduceOp;
use collective::object::all_gather_object;
use fused_optim::{Applied, SliceMut};

use super::Runner;
use crate::checkpoint::{visit_buffers, visit_model};
use crate::engine::has_non_finite;
use crate::engine::{Losses, TensorSpec};
use crate::model::with_host_grads;
use crate::optim_wrapper::Update;
use crate::{Error, NotFiniteSince, Result};

/// Maximum number of steps that a device may be behind the host.
const MAX_AHEAD: usize = 16;

/// Losses of a step that have not been checked yet.
#[derive(Debug)]
struct Unchecked {
    /// The step's iteration, counted from 1.
    iter: usize,
    losses: Losses,
    /// Consequence if the loss is not finite.
    then: &'static str,
}

/// Losses that were not available when their step ended, in order.
#[derive(Debug, Default)]
pub(super) struct UncheckedLosses {
    steps: VecDeque<Unchecked>,
    /// Iteration of the first of the last checked losses that were not finite; `None` if the last
    /// one was finite.
    since: Option<usize>,
}

/// Reason why a checkpoint would be useless. Equal on all ranks.
#[derive(Debug)]
pub(super) struct NonFinite {
    /// The non-finite numbers, with a verb.
    pub(super) what: String,
    /// Whether they are weights.
    is_weight: bool,
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
            let Some(Unchecked { iter, then, .. }) = self.steps.pop_front() else { break };
            let was_bad = self.since.is_some();
            self.since = bad.map(|_| self.since.unwrap_or(iter));
            let Some(loss) = bad.filter(|_| !was_bad) else { continue };
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
        let then = match update.applied {
            Some(Applied::SkippedNonFinite) => "the optimizer skipped this step",
            None if self.optim.skips_non_finite() => "the optimizer will skip its step",
            _ => "non-finite weights are not saved; add CheckInvalidLossHook to end such a run",
        };
        let (iter, losses) = (self.position.iter + 1, update.losses.clone());
        self.losses.steps.push_back(Unchecked { iter, losses, then });
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

    /// Returns the reason why a checkpoint would be useless: a non-finite weight or buffer,
    /// non-finite accumulated gradients if a step on them would not be skipped, or a non-finite
    /// state of the model wrapper. Every rank calls it.
    pub(super) fn find_non_finite(&mut self) -> Result<Option<NonFinite>> {
        let mut found = None;
        let mut look = |index: usize, spec: &TensorSpec, values: &mut SliceMut<'_>| {
            if found.is_none() && has_non_finite(values.as_slice()) {
                found = Some((index, spec.name.clone()));
            }
            Ok(())
        };
        let (rank, params) = (self.group.rank(), self.engine.params().len());
        // Rank 0's weights are saved, and every rank's buffers.
        match rank {
            0 => visit_model(&mut *self.engine, &mut look)?,
            _ => visit_buffers(&mut *self.engine, &mut look)?,
        }
        let is_weight = rank == 0 && found.as_ref().is_some_and(|(index, _)| *index < params);
        let mut bad_gradients = false;
        if !self.optim.skips_non_finite() {
            with_host_grads(&*self.model, &mut |grads| {
                bad_gradients = grads.iter().flatten().any(|grad| has_non_finite(*grad));
                Ok(())
            })?;
        }
        let bad_state = !self.model.is_state_finite();
        let mut all = [is_weight, found.is_some(), bad_gradients, bad_state].map(u8::from);
        self.group.all_reduce(&mut all, ReduceOp::Max)?;
        let [weight, tensor, gradients, state] = all.map(|flag| flag > 0);
        let what = match (tensor, gradients, state) {
            (false, false, false) => return Ok(None),
            (false, false, true) => "the error feedback of PowerSGD is".to_owned(),
            (false, true, _) => "the accumulated gradients are".to_owned(),
            (true, ..) => {
                let names = all_gather_object(&self.group, &found.map(|(_, name)| name))?;
                let named = names.into_iter().enumerate().find_map(|(rank, name)| {
                    let of = if rank > 0 { format!(" of rank {rank}") } else { String::new() };
                    Some(format!("`{}`{of} is", name?))
                });
                named.unwrap_or_default()
            }
        };
        Ok(Some(NonFinite { what, is_weight: weight }))
    }

    /// Returns an error if the weights are not finite, or if the last checkpoint was not saved for
    /// this reason. Every rank calls it at the end of training.
    pub(super) fn divergence(&mut self) -> Result<Option<Error>> {
        self.check_all_losses()?;
        let Some(found) = self.find_non_finite()? else { return Ok(None) };
        if !found.is_weight && self.status.refused.is_none() {
            return Ok(None);
        }
        let mut since = [self.losses.since.map_or(u64::MAX, |iter| iter as u64)];
        self.group.all_reduce(&mut since, ReduceOp::Min)?;
        let since = match (since[0], self.status.refused) {
            (u64::MAX, refused) => refused.map(NotFiniteSince::Checkpoint),
            (iter, _) => Some(NotFiniteSince::Loss(iter as usize)),
        };
        let (what, iter, good) = (found.what, self.position.iter, self.status.good.clone());
        Ok(Some(Error::Diverged { what, iter, since, good }))
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::time::Duration;

    use fused_optim::{DType, Sgd, SgdHyper};

    use super::*;
    use crate::SpentObject;
    use crate::hooks::CheckpointHook;
    use crate::losses::tests::{Device, late};
    use crate::model::ModelFactory;
    use crate::optim_wrapper::OptimWrapperFactory;
    use crate::runner::{RunnerBuilder, Save, TrainConfig};
    use crate::testing::{FakeEngine, Values, builder};

    #[test]
    fn device_losses_are_checked_when_available_or_too_many_are_pending() {
        let dir = tempfile::tempdir().unwrap();
        let mut runner = builder(dir.path(), 1).build().unwrap();
        let device = Device::default();
        let step = |runner: &mut Runner, loss| {
            let losses = late(&device, loss);
            let update = Update { losses, applied: None, note: None, warning: None };
            runner.check_losses(&update).unwrap();
            (runner.losses.steps.len(), runner.losses.since.is_some(), device.0.lock().1)
        };
        for steps in 1..=MAX_AHEAD {
            assert_eq!(step(&mut runner, f64::NAN), (steps, false, 0));
        }
        assert_eq!(step(&mut runner, 1.0), (MAX_AHEAD, true, 1));
        runner.check_all_losses().unwrap();
        assert!(runner.losses.steps.is_empty() && runner.losses.since.is_none());
        device.0.lock().0 = true;
        assert_eq!(step(&mut runner, f64::NAN), (0, true, 1 + MAX_AHEAD));
    }

    /// Run with NaN from the step with index `nan_from`, and a checkpoint after each epoch of two
    /// iterations.
    fn nan(dir: &Path, nan_from: usize) -> RunnerBuilder {
        let run = builder(dir, 2).train_cfg(TrainConfig::new(4));
        let model: ModelFactory = Box::new(move |_| {
            let mut engine = FakeEngine::new(&[("w", Values::F32(vec![1.0]))], &[]);
            engine.nan_from = nan_from;
            Ok(Box::new(engine))
        });
        run.model(model).hook(Box::new(CheckpointHook::new(1)))
    }

    fn log(dir: &Path) -> String {
        let mut all = String::new();
        for entry in std::fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                all += &log(&path);
            } else if path.extension().is_some_and(|e| e == "log") {
                all += &std::fs::read_to_string(path).unwrap();
            }
        }
        all
    }

    #[test]
    fn run_that_ends_with_nan_weights_ends_with_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let error = nan(dir.path(), 5).build().unwrap().train().unwrap_err();
        let since = Some(NotFiniteSince::Loss(6));
        assert!(
            matches!(&error, Error::Diverged { iter: 8, since: is, good: Some(_), .. } if *is == since)
        );
        let good = dir.path().join("epoch_2");
        let says = format!(
            "training has diverged: `w` is not finite at the end, iteration 8, the loss has not been finite \
             since iteration 6; the last good checkpoint is {}",
            good.display()
        );
        assert!(error.to_string().starts_with(&says), "{error}");
        let log = log(dir.path());
        assert!(log.contains("Saving checkpoint at 2 epochs"), "{log}");
        assert!(log.contains("epoch_4 is not saved: `w` is not finite"), "{log}");
        for epoch in [3, 4] {
            assert!(!log.contains(&format!("Saving checkpoint at {epoch} epochs")), "{log}");
        }
        // A run without checkpoints ends with the same error, also if its time is exhausted.
        for budget in [None, Some(Duration::ZERO)] {
            let dir = tempfile::tempdir().unwrap();
            let run = nan(dir.path(), 0).time_budget(budget);
            let error = run.build().unwrap().train().unwrap_err().to_string();
            assert!(
                error.contains("since iteration 1; this run has no good checkpoint"),
                "{error}"
            );
        }
        // One whose last weights are finite does not.
        let dir = tempfile::tempdir().unwrap();
        nan(dir.path(), 8).build().unwrap().train().unwrap();
    }

    #[test]
    fn ended_run_is_spent_after_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let mut run = nan(dir.path(), 0).build().unwrap();
        run.train().unwrap_err();
        let save = Save::resumable("rescue", run.position().clone());
        for error in [
            run.train().unwrap_err(),
            run.validate().unwrap_err(),
            run.test().unwrap_err(),
            run.save_checkpoint(save).unwrap_err(),
        ] {
            assert!(matches!(error, Error::Spent { object: SpentObject::Run, .. }), "{error}");
            assert!(error.to_string().contains("the error was: training has diverged"), "{error}");
        }
        assert!(!dir.path().join("rescue").exists());
    }

    #[test]
    fn non_finite_loss_of_an_accumulated_batch_is_said_to_be_skipped() {
        let dir = tempfile::tempdir().unwrap();
        let sgd = |count| Sgd::with_one_group(SgdHyper::default(), count);
        let optim = OptimWrapperFactory::amp(DType::F32, sgd).accumulate(2);
        let run = nan(dir.path(), 2).optim_wrapper(optim).build();
        run.unwrap().train().unwrap();
        let log = log(dir.path());
        let says = "the loss is NaN at iteration 3 on rank 0: the optimizer will skip its step";
        assert!(log.contains(says), "{log}");
        assert!(!log.contains("non-finite weights"), "{log}");
    }
}
