//! Elastic resume: a run that goes on with another number of ranks.
//!
//! Iterations in a configuration are those of the number of ranks that the run began with: the length of a run by
//! iterations, the intervals of checkpoints and validations, and schedulers. An iteration of more ranks completes
//! several of them, an iteration of fewer ranks a part of one, in the ratio of an epoch's batches
//! ([`IterScale`](crate::data::IterScale)). A schedule is stepped once for each of them, so it has the same value
//! at the same place in the data, and returns to the same numbers when the first number of ranks returns. Checkpoints
//! (`iter_N`), `scalars.json` and `EMAHook` count them, too; log lines and [`Position::iter`] count the iterations of
//! the present number of ranks.
//!
//! A step of the optimizer keeps its number of samples: `accumulative_counts` is multiplied by the first number of
//! ranks and divided by the present one, to the nearest number of at least 1. If there is a remainder, steps change
//! in size and the log warns; `auto_scale_lr` then scales the learning rate to the new size. Gradients that wait for a
//! step are averaged over the ranks that wrote them and keep their share of that step.

use super::scheduling::{make_schedulers, scale_lr};
use super::{Length, Runner};
use crate::Result;
use crate::checkpoint::Position;
use crate::optim_wrapper::Accumulation;
use crate::schedulers::Param;

/// What remains to be converted after the rest of a checkpoint is loaded.
#[derive(Debug, Default)]
pub(super) struct Takeover {
    /// Factor for the sum of the ranks' gradients; `None` if each rank takes its own.
    pub(super) gradient_share: Option<f32>,
    /// Samples of a step before and now, if the learning rate is scaled.
    step_size: Option<[usize; 2]>,
}

impl Runner {
    /// Continues the data order where the `was` ranks that wrote the checkpoint stopped, at
    /// [`position`](Self::position). The same number of ranks takes its start and batch over; another number splits
    /// the rest anew, so that each sample is seen as often as without the change.
    pub(super) fn take_place(&mut self, was: usize) -> Result<Takeover> {
        let is = self.group.world_size();
        let first = self.position.begun.first_world_size.unwrap_or(was);
        let counts = self.optim.accumulation().counts();
        let [before, now] = [was, is].map(|ranks| convert_counts(counts, first, ranks));
        if first != is {
            let length = self.train_loader()?.batches_among(first);
            self.schedulers =
                make_schedulers(&self.scheduler_configs, &self.train, length, &mut self.optim)?;
            self.optim.accumulation().set_counts(now);
        }
        let iter = self.position.iter;
        let (pending, divisor) = self.accumulated(before, self.iters_among(first, was)?);
        self.convert_position(first, was)?;
        if was == is {
            return Ok(Takeover::default());
        }
        // Rounded to the nearest batch, and below `now`, so that the following batches complete the step.
        self.position.begun.pending = ((2 * pending * was + is) / (2 * is)).min(now - 1);
        let (_, divisor_now) = self.accumulated(now, self.max_iters());
        let (batch, to) = (self.train_loader()?.batch_size(), self.position.iter);
        let mut text = format!(
            "{was} ranks wrote this checkpoint, and {is} go on with what is left of its data: iteration {iter} \
             becomes {to}, accumulative_counts is {now} instead of {before}"
        );
        let step_size = [was * before, is * now].map(|batches| batches * batch);
        if step_size[0] == step_size[1] {
            self.logger().info(&text);
        } else {
            text += &format!("; a step is of {} samples instead of {}", step_size[1], step_size[0]);
            text += match self.auto_scales_lr {
                true => ", and the learning rate is scaled to it",
                false => ", and the learning rate is not scaled to it (auto_scale_lr)",
            };
            self.logger().warning(&text);
        }
        let gradient_share = Some(divisor as f32 / (is * divisor_now) as f32);
        Ok(Takeover { gradient_share, step_size: self.auto_scales_lr.then_some(step_size) })
    }

    /// Converts position and data order from `was` ranks to the present number, in a run that began with `first`.
    fn convert_position(&mut self, first: usize, was: usize) -> Result<()> {
        let (is, by_epoch) = (self.group.world_size(), self.is_by_epoch());
        let has_more = self.position.iter < self.iters_among(first, was)?;
        let Position { epoch, iter, batch, validated, mut begun } = self.position.clone();
        let loader = self.train_loader()?;
        begun.place = match by_epoch {
            // No sample of this epoch has been handed out, whatever the data set was before.
            true if batch == 0 => begun.place.min(epoch * loader.dataset_len()),
            _ if was == is => begun.place,
            true => loader.place_in(was, begun.place, epoch, batch),
            false => loader.place_after(was, begun.place, iter.saturating_sub(begun.iter)),
        };
        begun.scale = loader.iter_scale(first, is);
        self.position.begun = begun;
        let batch = self.begin_at(begun.place, epoch);
        if was == is {
            return Ok(());
        }
        let loader = self.train_loader()?;
        let dealt = if by_epoch { epoch * loader.dataset_len() } else { 0 };
        let (iter, max) = (loader.iters_at(begun.place.max(dealt)), self.max_iters());
        // Rounding must neither end a run nor continue one that has ended.
        let iter = if has_more { iter.min(max.saturating_sub(1)) } else { iter.max(max) };
        let position = &mut self.position;
        position.validated = validated.filter(|at| *at == position.iter).map(|_| iter);
        (position.begun.iter, position.begun.first_world_size) = (iter, Some(first));
        position.iter = iter;
        position.batch = if by_epoch { batch } else { iter };
        Ok(())
    }

    /// Starts the data order at `place`. Returns the index of the first batch of `epoch` from there.
    fn begin_at(&mut self, place: usize, epoch: usize) -> usize {
        let Some(loader) = &mut self.train_loader else { return 0 };
        loader.begin_at(place);
        loader.first_batch(epoch)
    }

    /// Length of the run in iterations of `ranks` ranks, if its configuration is for `first`.
    fn iters_among(&self, first: usize, ranks: usize) -> Result<usize> {
        let loader = self.train_loader()?;
        Ok(match self.train.length {
            Length::Epochs(epochs) => epochs.saturating_mul(loader.batches_among(ranks)),
            Length::Iters(iters) => loader.iter_scale(first, ranks).to_present(iters),
        })
    }

    /// Accumulated batches at the position, and the divisor of each batch's loss, in a run of `max_iters` iterations and
    /// steps of `counts` batches.
    fn accumulated(&self, counts: usize, max_iters: usize) -> (usize, usize) {
        let mut accumulation = Accumulation::new(counts);
        let [seen, max] =
            [self.position.iter, max_iters].map(|iter| self.position.begun.accumulated(iter));
        accumulation.initialize_count_status(seen, max);
        accumulation.pending()
    }

    /// Scales learning rates, and the schedulers' initial ones, to the size of a step.
    pub(super) fn scale_rates(&mut self, takeover: &Takeover) -> Result<()> {
        let Some([was, is]) = takeover.step_size else { return Ok(()) };
        for scheduler in self.schedulers.iter_mut().filter(|s| s.param() == Param::Lr) {
            scheduler.scale_base(is as f64 / was as f64);
        }
        scale_lr(self.optim.optimizer_mut(), is, Some(was)).map(drop)
    }
}

/// `accumulative_counts` for `ranks` ranks, if it is `counts` for `first`: the nearest step in size.
fn convert_counts(counts: usize, first: usize, ranks: usize) -> usize {
    ((2 * counts * first + ranks) / (2 * ranks)).max(1)
}
