//! Buffers of a model, such as running statistics, which forward changes before it is known whether
//! the step will be taken.

use collective::ProcessGroup;

use super::{Outcome, Trainer};
use crate::optim::BuffersBefore;
use crate::{Model, Result, broadcast};

/// The buffers as they were before the present batch.
#[derive(Debug)]
pub(super) struct Buffers {
    before: BuffersBefore,
    /// Whether the copies are of the present batch.
    is_kept: bool,
}

impl Buffers {
    pub(super) const fn new() -> Self {
        Self { before: BuffersBefore::new(), is_kept: false }
    }

    /// Forgets the copies of an earlier batch.
    pub(super) const fn begin(&mut self) {
        self.is_kept = false;
    }

    /// Copies the buffers.
    pub(super) fn keep(&mut self, model: &mut dyn Model) -> Result<()> {
        let is_there = model.on_device().is_some();
        self.before.keep(model, is_there)?;
        self.is_kept = true;
        Ok(())
    }

    /// Restores the buffers of the present batch, if it has come so far as to copy them.
    pub(super) fn restore(&self, model: &mut dyn Model) -> Result<()> {
        match self.is_kept {
            true => self.before.restore(model),
            false => Ok(()),
        }
    }
}

impl Trainer {
    /// In mixed precision, restores buffers after a skipped step, and those of an accumulated batch
    /// if one is not finite. After a step broadcasts those of rank 0: an evaluation, and a run
    /// resumed from the file of rank 0, have the same on all ranks.
    pub(super) fn end_buffers(&mut self, model: &mut dyn Model, outcome: Outcome) -> Result<()> {
        if model.buffers().is_empty() {
            return Ok(());
        }
        let is_lost = match outcome {
            Outcome::Accumulated => {
                self.optim.skips_non_finite() && self.buffers.before.has_non_finite(model)?
            }
            outcome => matches!(outcome, Outcome::Skipped { .. }),
        };
        if is_lost {
            self.buffers.restore(model)?;
        }
        match outcome {
            Outcome::Accumulated => Ok(()),
            _ => broadcast_buffers(model, self.group()),
        }
    }
}

fn broadcast_buffers(model: &mut dyn Model, group: &ProcessGroup) -> Result<()> {
    if group.world_size() == 1 {
        return Ok(());
    }
    model.with_buffers(&mut |buffers| {
        buffers.iter_mut().try_for_each(|buffer| broadcast(group, buffer))
    })
}

#[cfg(test)]
mod tests {
    use std::thread;
    use std::time::Duration;

    use fused_optim::{Optimizer, Sgd, SgdHyper};

    use super::*;
    use crate::Error;
    use crate::testing::{FakeModel, Values};

    fn model() -> FakeModel {
        FakeModel::new(&[("w", Values::F32(vec![0.0]))], &[("mean", Values::F32(vec![1.0]))])
    }

    fn trainer(group: ProcessGroup, model: &mut FakeModel, accumulate: usize) -> Trainer {
        let sgd: Box<dyn Optimizer> =
            Box::new(Sgd::with_one_group(SgdHyper::default(), 1).unwrap());
        Trainer::builder().f16().accumulate(accumulate).group(group).build(model, sgd).unwrap()
    }

    /// Trains on a batch that sets the buffer to `mean`, with a gradient of `gradient`.
    fn step(
        train: &mut Trainer,
        model: &mut FakeModel,
        (mean, gradient): (f32, f32),
    ) -> Result<Outcome> {
        model.gradient = gradient;
        let run = |model: &mut FakeModel, cx: &mut crate::StepContext<'_>| {
            model.buffers[0] = Values::F32(vec![mean]);
            model.train_step(cx)
        };
        Ok(train.step(model, run)?.outcome)
    }

    #[test]
    fn a_batch_that_is_skipped_or_fails_leaves_buffers_as_they_were() {
        let mut model = model();
        let mut train = trainer(crate::testing::group(), &mut model, 1);
        let mean = |model: &FakeModel| model.buffers[0].clone();
        step(&mut train, &mut model, (2.0, 1.0)).unwrap();
        assert_eq!(mean(&model), Values::F32(vec![2.0]));
        let skipped = step(&mut train, &mut model, (3.0, f32::INFINITY)).unwrap();
        assert!(matches!(skipped, Outcome::Skipped { .. }));
        assert_eq!(mean(&model), Values::F32(vec![2.0]));
        model.fails_at = 2;
        step(&mut train, &mut model, (3.0, 1.0)).unwrap_err();
        assert_eq!(mean(&model), Values::F32(vec![2.0]));
        let nothing = train.step_weighted(0, &mut model, |model, _| {
            model.buffers[0] = Values::F32(vec![f32::NAN]);
            Ok::<_, Error>(())
        });
        nothing.unwrap_err();
        assert_eq!(mean(&model), Values::F32(vec![2.0]));
    }

    #[test]
    fn an_accumulated_batch_keeps_its_buffers_unless_they_are_not_finite() {
        let mut model = model();
        let mut train = trainer(crate::testing::group(), &mut model, 3);
        for (set, left) in [(2.0, 2.0), (f32::NAN, 2.0), (4.0, 4.0)] {
            step(&mut train, &mut model, (set, 1.0)).unwrap();
            assert_eq!(model.buffers[0], Values::F32(vec![left]));
        }
        assert_eq!(train.steps(), 1);
    }

    #[test]
    fn after_a_step_all_ranks_have_the_buffers_of_rank_0() {
        let groups = ProcessGroup::threads(2, Duration::from_secs(60)).unwrap();
        let rank = |group: ProcessGroup| {
            let (mut model, own) = (model(), group.rank() as f32);
            let mut train = trainer(group, &mut model, 1);
            step(&mut train, &mut model, (5.0 + own, 1.0)).unwrap();
            assert_eq!(model.buffers[0], Values::F32(vec![5.0]));
        };
        let ranks = groups.into_iter().map(|group| thread::spawn(move || rank(group)));
        ranks.collect::<Vec<_>>().into_iter().for_each(|rank| rank.join().unwrap());
    }
}
