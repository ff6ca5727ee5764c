//! Resume in another layout: with another number of ranks, batch size or data set.
//!
//! Iterations in a configuration are those of the layout that the run began with: the length of a
//! run by iterations, the intervals of checkpoints and validations, and schedulers. An iteration
//! with more samples completes several of them, one with fewer samples a fraction, in the ratio of
//! the batches per epoch ([`IterScale`](crate::data::IterScale)). A schedule is stepped once for
//! each of them, so it has the same value at the same position in the data, and continues with the
//! same numbers when the first layout returns. Checkpoints (`iter_N`), `scalars.json` and `EMAHook`
//! count them, too; log lines and [`Position::iter`] count iterations of the current layout.
//!
//! With another number of ranks an optimizer step keeps its number of samples:
//! `accumulative_counts` is multiplied by the number of ranks that it was configured for, and
//! divided by the current one, rounded to the nearest number of at least 1. If there is a
//! remainder, steps change in size and a warning is logged; `auto_scale_lr` then scales the
//! learning rate to the new size. If batch size or `accumulative_counts` have changed in the
//! configuration, they are used unconverted, for the current number of ranks.
//!
//! Gradients that await a step are averaged over the ranks that wrote them. The step then consists
//! of their samples and those of its remaining batches, all with equal weight.

use super::scheduling::{remake, scale_lr};
use super::{Length, Runner};
use crate::Result;
use crate::checkpoint::{Meta, Position, Waiting};
use crate::data::Layout;
use crate::optim_wrapper::Accumulation;

/// Conversions to be done after the rest of a checkpoint is loaded.
#[derive(Debug, Default)]
pub(super) struct Takeover {
    /// Factor for the sum of the ranks' gradients; `None` if each rank loads its own.
    pub(super) gradient_share: Option<f32>,
    /// Samples per step before and now, if the learning rate is scaled.
    step_size: Option<[usize; 2]>,
}

impl Runner {
    /// Continues the data order at [`position`](Self::position), where the ranks that wrote the
    /// checkpoint stopped. With the same layout, start and batch are unchanged; another layout
    /// splits the remaining samples anew, so that each sample is seen as often as without the
    /// change.
    pub(super) fn take_place(&mut self, meta: &Meta) -> Result<Takeover> {
        let is = self.train_loader()?.layout();
        let was = in_order_of(meta.layout, is);
        let begun = &mut self.position.begun;
        let first = in_order_of(begun.first.unwrap_or(was), is);
        let counts_for = begun.counts_for.unwrap_or(first.world_size);
        let before = convert_counts(meta.accumulative_counts, counts_for, was.world_size);
        let configured =
            [(meta.accumulative_counts, was), (self.configured.accumulative_counts, is)]
                .map(|(counts, layout)| (counts, layout.batch_size));
        if configured[0] != configured[1] {
            begun.counts_for = Some(is.world_size);
        }
        let counts_for = begun.counts_for.unwrap_or(first.world_size);
        let now = convert_counts(self.configured.accumulative_counts, counts_for, is.world_size);
        self.optim.accumulation().set_counts(now);
        if first != is {
            let length = self.train_loader()?.with(first, 0).batches_per_epoch();
            remake(&mut self.schedules, &self.train, length, &mut self.optim)?;
        }
        let position = self.position.clone();
        let Waiting { samples, step } = self.waiting(&position)?;
        let is_same_step = samples == 0 || step == meta.waiting.step;
        let unchanged = was == is && samples == meta.waiting.samples && is_same_step;
        self.convert_position(first, was, unchanged)?;
        if unchanged {
            return Ok(Takeover::default());
        }
        // Rounded to the nearest batch, and less than `now`, so that the following batches complete
        // the step.
        let (begun, batch) = (&mut self.position.begun, is.iter_samples());
        begun.waiting = meta.waiting.samples;
        begun.pending = ((2 * begun.waiting + batch) / (2 * batch)).min(now - 1);
        let step_size = [was.iter_samples() * before, is.iter_samples() * now];
        self.log_takeover([was, is, first], position.iter, [before, now], step_size);
        let position = self.position.clone();
        let step = self.waiting(&position)?.step;
        let mut share = meta.waiting.step as f32 / (was.world_size * step) as f32;
        if meta.counts.is_some_and(|counts| counts.mean.is_some()) {
            // Weighted by counts, batches of any size have the weight of their tokens.
            share *= is.batch_size as f32 / was.batch_size as f32;
        }
        let step_size = self.configured.scales_lr.then_some(step_size);
        Ok(Takeover { gradient_share: Some(share), step_size })
    }

    /// Logs the conversions, as a warning if optimizer steps change in size.
    fn log_takeover(
        &mut self,
        [was, is, first]: [Layout; 3],
        iter: usize,
        [before, now]: [usize; 2],
        step_size: [usize; 2],
    ) {
        let mut texts = Vec::new();
        if was.world_size != is.world_size {
            texts.push(format!(
                "{} ranks wrote this checkpoint, and {} resume with the rest of its data",
                was.world_size, is.world_size
            ));
        }
        if was.samples != is.samples {
            let (was, is) = (was.samples, is.samples);
            texts.push(format!("the data set has {is} samples instead of {was}"));
        }
        let numbers = [
            ("batch_size", was.batch_size, is.batch_size),
            ("accumulative_counts", before, now),
            ("the iteration", iter, self.position.iter),
        ];
        let changed = numbers.into_iter().filter(|(_, was, is)| was != is);
        texts.extend(changed.map(|(what, was, is)| format!("{what} is {is} instead of {was}")));
        if texts.is_empty() {
            return;
        }
        if is != first {
            let Layout { world_size, batch_size, .. } = first;
            texts.push(format!(
                "iterations in the configuration still count {world_size} x {batch_size} samples"
            ));
        }
        let mut text = texts.join(", ");
        if step_size[0] == step_size[1] {
            self.logger().info(&text);
            return;
        }
        text += &format!("; a step has {} samples instead of {}", step_size[1], step_size[0]);
        text += match self.configured.scales_lr {
            true => "; the learning rate is scaled accordingly",
            false => "; the learning rate is not scaled (see auto_scale_lr)",
        };
        self.logger().warning(&text);
    }

    /// Converts position and data order from the layout `was` to the current one, in a run that
    /// began with `first`.
    fn convert_position(&mut self, first: Layout, was: Layout, unchanged: bool) -> Result<()> {
        let by_epoch = self.is_by_epoch();
        let has_more = self.position.iter < self.iters_among(first, was)?;
        let Position { epoch, iter, batch, validated, mut begun } = self.position.clone();
        let loader = self.train_loader()?;
        let theirs = loader.with(was, begun.place);
        begun.place = match by_epoch {
            _ if unchanged => begun.place,
            true => match theirs.place_in(epoch, batch) - epoch * was.samples {
                done if done == was.samples => (epoch + 1) * loader.dataset_len(),
                done => epoch * loader.dataset_len() + done,
            },
            false => theirs.place_after(iter.saturating_sub(begun.iter)),
        };
        begun.scale = loader.iter_scale(first);
        self.position.begun = begun;
        let batch = self.begin_at(begun.place, epoch);
        if unchanged {
            return Ok(());
        }
        let (iter, max) = (self.train_loader()?.iters_at(begun.place), self.max_iters());
        // Rounding must neither end a run nor continue a finished one.
        let iter = if has_more { iter.min(max.saturating_sub(1)) } else { iter.max(max) };
        let position = &mut self.position;
        position.validated = validated.filter(|at| *at == position.iter).map(|_| iter);
        (position.begun.iter, position.begun.first) = (iter, Some(first));
        position.iter = iter;
        position.batch = if by_epoch { batch } else { iter };
        Ok(())
    }

    /// Returns whether a checkpoint was saved before the last batch of an epoch, or in a run
    /// without epochs.
    pub(super) fn is_inside_epoch(&self, meta: &Meta) -> Result<bool> {
        let Position { epoch, iter, batch, begun, .. } = meta.position;
        let loader = self.train_loader()?;
        let theirs = loader.with(in_order_of(meta.layout, loader.layout()), begun.place);
        let place = theirs.place_in(epoch, batch);
        Ok(if meta.by_epoch { place % meta.layout.samples > 0 } else { iter > 0 })
    }

    /// Starts the data order at `place`. Returns the index of the first batch of `epoch` from
    /// there.
    fn begin_at(&mut self, place: usize, epoch: usize) -> usize {
        let Some(loader) = &mut self.train_data.loader else { return 0 };
        loader.begin_at(place);
        loader.first_batch(epoch)
    }

    /// Returns the length of the run in iterations of the layout `was`, if its configuration is for
    /// `first`.
    fn iters_among(&self, first: Layout, was: Layout) -> Result<usize> {
        let theirs = self.train_loader()?.with(was, 0);
        Ok(match self.train.length {
            Length::Epochs(epochs) => epochs.saturating_mul(theirs.batches_per_epoch()),
            Length::Iters(iters) => theirs.iter_scale(first).to_present(iters),
        })
    }

    /// Returns the state of accumulation at a position.
    pub(super) fn accumulation_at(&mut self, position: &Position) -> Result<Accumulation> {
        let (begun, batch) = (position.begun, self.train_loader()?.layout().iter_samples());
        let [seen, max] = [position.iter, self.max_iters()].map(|iter| begun.accumulated(iter));
        let mut accumulation = *self.optim.accumulation();
        accumulation.initialize_count_status(seen, max);
        accumulation.set_excess(begun.waiting as f64 / batch as f64 - begun.pending as f64);
        Ok(accumulation)
    }

    /// Returns the gradients that await an optimizer step at a position.
    pub(super) fn waiting(&mut self, position: &Position) -> Result<Waiting> {
        let (begun, batch) = (position.begun, self.train_loader()?.layout().iter_samples());
        let accumulation = self.accumulation_at(position)?;
        let (pending, step) = accumulation.pending();
        let [mut samples, mut step] = [pending * batch, step * batch];
        if accumulation.is_first_step() {
            // Gradients taken over count as `begun.pending` batches.
            samples = samples + begun.waiting - begun.pending * batch;
            step = step + begun.waiting - begun.pending * batch;
        }
        Ok(Waiting { samples, step })
    }

    /// Scales learning rates, and the initial ones of schedulers, to the size of a step.
    pub(super) fn scale_rates(&mut self, takeover: &Takeover) -> Result<()> {
        let Some(step_size) = takeover.step_size else { return Ok(()) };
        let [was, is] = step_size;
        self.schedules.scale_base_lrs(is as f64 / was as f64);
        scale_lr(self.optim.optimizer_mut(), is, Some(was)).map(drop)
    }
}

/// The layout with the seed and the rounding of `present`: a run keeps its seed ([`Meta::seed`]),
/// which the loader gets only after its place.
fn in_order_of(layout: Layout, present: Layout) -> Layout {
    Layout { seed: present.seed, round_up: present.round_up, ..layout }
}

/// Converts `accumulative_counts` from `first` to `ranks` ranks, to the nearest size of a step.
fn convert_counts(counts: usize, first: usize, ranks: usize) -> usize {
    ((2 * counts * first + ranks) / (2 * ranks)).max(1)
}
