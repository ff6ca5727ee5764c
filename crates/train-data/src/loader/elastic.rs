//! Resuming in another layout: with another number of ranks, batch size or data set.
//!
//! Samples that were already taken are skipped: `place` is their number in the order of all passes
//! over the data set. [`IterScale`] is the ratio of iterations of different layouts.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::{DataLoader, Layout};
use crate::DefaultSampler;

impl DataLoader {
    /// Number of samples of a pass that were taken in an earlier layout.
    pub(super) fn dealt(&self, pass: usize) -> usize {
        self.place.saturating_sub(pass * self.sampler.len).min(self.sampler.len)
    }

    /// Returns the loader of rank 0 in another layout that began at `place`. For a data set of
    /// another length it can only count batches.
    ///
    /// # Panics
    ///
    /// In later calls, if the layout has no samples, no ranks or no samples in a batch.
    pub fn with(&self, layout: Layout, place: usize) -> Self {
        let Layout { samples, world_size, batch_size, drop_last, shuffle, infinite, .. } = layout;
        let Layout { seed, round_up, .. } = layout;
        let sampler = DefaultSampler { len: samples, shuffle, seed, rank: 0, world_size, round_up };
        let progress = Arc::default();
        Self { sampler, batch_size, drop_last, infinite, place, progress, ..self.clone() }
    }

    /// Index of the first remaining batch of `epoch`, chosen so that the epoch ends at its usual
    /// index.
    pub fn first_batch(&self, epoch: usize) -> usize {
        let dealt = self.dealt(epoch);
        // Index 0 means that the epoch has not begun.
        (self.batches_per_epoch() - self.count(self.sampler.len - dealt))
            .max(usize::from(dealt > 0))
    }

    /// Skips the first `place` samples of all passes.
    pub fn begin_at(&mut self, place: usize) {
        self.place = place;
    }

    /// Number of samples taken when all ranks have reached batch `batch` of `epoch`.
    pub fn place_in(&self, epoch: usize, batch: usize) -> usize {
        let batches = batch.saturating_sub(self.first_batch(epoch));
        epoch * self.sampler.len + self.after(self.dealt(epoch), batches)
    }

    /// Number of samples taken when all ranks have had `batches` [`endless`](Self::endless)
    /// batches.
    pub fn place_after(&self, batches: usize) -> usize {
        if self.infinite {
            return self.place + batches * self.layout().iter_samples();
        }
        let (pass, batch) = self.locate(batches);
        pass * self.sampler.len + self.after(self.dealt(pass), batch)
    }

    /// Number of iterations that take `place` samples.
    pub fn iters_at(&self, place: usize) -> usize {
        let len = self.sampler.len;
        if self.infinite {
            return place / self.layout().iter_samples();
        }
        let left = self.count(len - place % len);
        (place / len + 1) * self.batches_per_epoch() - left
    }

    /// Ratio of iterations to those of the layout `first`: the ratio of their numbers per epoch.
    pub fn iter_scale(&self, first: Layout) -> IterScale {
        let layout = self.layout();
        if first == layout {
            return IterScale::default();
        }
        if self.infinite {
            return IterScale { now: first.iter_samples(), configured: layout.iter_samples() };
        }
        let configured = self.with(first, 0).batches_per_epoch();
        IterScale { now: self.batches_per_epoch(), configured }
    }

    /// Number of samples of a pass taken after `batches` batches, after `dealt` samples taken
    /// before.
    fn after(&self, dealt: usize, batches: usize) -> usize {
        if batches >= self.count(self.sampler.len - dealt) {
            // Samples that do not fill a batch are dropped.
            return self.sampler.len;
        }
        dealt + batches * self.layout().iter_samples()
    }

    /// Returns the pass of batch `k` of all passes, and its index there.
    pub(super) fn locate(&self, k: usize) -> (usize, usize) {
        let (pass, first) = (self.place / self.sampler.len, self.place % self.sampler.len);
        let first = self.count(self.sampler.len - first);
        match k.checked_sub(first) {
            None => (pass, k),
            Some(k) => (pass + 1 + k / self.batches_per_epoch(), k % self.batches_per_epoch()),
        }
    }
}

/// Ratio of iterations: `now` iterations of the current layout use as much data as `configured`
/// iterations of the layout that the run began with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IterScale {
    /// Iterations of the current layout.
    pub now: usize,
    /// Iterations of the configuration.
    pub configured: usize,
}

impl Default for IterScale {
    fn default() -> Self {
        Self { now: 1, configured: 1 }
    }
}

impl IterScale {
    /// Smallest number of iterations that completes `iters` of the configuration.
    pub fn to_present(self, iters: usize) -> usize {
        let iters = (iters as u128 * self.now as u128).div_ceil(self.configured.max(1) as u128);
        usize::try_from(iters).unwrap_or(usize::MAX)
    }

    /// Number of iterations of the configuration that `iters` complete.
    pub fn to_configured(self, iters: usize) -> usize {
        let iters = iters as u128 * self.configured as u128 / self.now.max(1) as u128;
        usize::try_from(iters).unwrap_or(usize::MAX)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::loader::tests::{infinite, loader, values};
    use crate::{Batch, Result};

    /// Samples of all ranks, batch by batch.
    fn of_all<I: Iterator<Item = Result<Batch>>>(
        loader: &DataLoader,
        world: usize,
        batches: impl Fn(&DataLoader) -> I,
    ) -> Vec<i64> {
        let ranks = (0..world).flat_map(|rank| {
            let sampler = DefaultSampler { rank, world_size: world, ..loader.sampler };
            batches(&DataLoader { sampler, ..loader.clone() }).flat_map(values).collect::<Vec<_>>()
        });
        ranks.collect()
    }

    proptest! {
        /// Resumes an epoch with other numbers of ranks and other batch sizes: every sample is
        /// used, and only samples that pad the last round are used twice.
        #[test]
        fn an_epoch_goes_on_with_another_number_of_ranks(
            len in 1usize..60, sizes in prop::array::uniform3(1usize..5),
            worlds in prop::array::uniform3(1usize..5),
            parts in prop::array::uniform2(0usize..12), epoch in 0usize..3,
        ) {
            let mut seen = Vec::new();
            let (mut place, mut start) = (0, 0);
            for (at, (world, size)) in worlds.into_iter().zip(sizes).enumerate() {
                let mut loader = loader(len, size, 0, world);
                loader.begin_at(place);
                if at > 0 {
                    start = loader.first_batch(epoch);
                }
                let part = parts.get(at).map_or(usize::MAX, |part| *part);
                seen.extend(of_all(&loader, world, |l| l.batches_from(epoch, start).take(part)));
                let batches = loader.batches_from(epoch, start).count().min(part);
                place = loader.place_in(epoch, start + batches);
                // A run resumed with the same number of ranks is at that batch, too.
                prop_assert_eq!(loader.batches_from(epoch, start + batches).count(),
                    loader.batches_from(epoch, start).count() - batches);
            }
            prop_assert_eq!(place, (epoch + 1) * len);
            let mut counts = vec![0; len];
            seen.iter().for_each(|i| counts[*i as usize] += 1);
            prop_assert!(counts.iter().all(|n| *n >= 1), "{counts:?}");
            // Padding is at the end of the order, so it can occur once.
            prop_assert!(seen.len() < len + 4, "{} of {len}", seen.len());
        }

        /// The same for endless batches, with rounds of different sizes.
        #[test]
        fn passes_go_on_with_another_number_of_ranks(
            len in 1usize..30, sizes in prop::array::uniform3(1usize..5),
            worlds in prop::array::uniform3(1usize..5),
            parts in prop::array::uniform3(0usize..20), is_infinite: bool,
        ) {
            let (mut seen, mut place) = (Vec::new(), 0);
            for ((world, size), part) in worlds.into_iter().zip(sizes).zip(parts) {
                let mut loader = loader(len, size, 0, world);
                loader = if is_infinite { infinite(loader) } else { loader };
                loader.begin_at(place);
                seen.extend(of_all(&loader, world, |l| l.endless(0).take(part)));
                place = loader.place_after(part);
            }
            let whole = loader(len, 1, 0, 1);
            let order = (0..=place / len).flat_map(|pass| whole.batches(pass)).flat_map(values);
            let mut expected = vec![0i64; len];
            order.take(place).for_each(|i| expected[i as usize] += 1);
            seen.iter().for_each(|i| expected[*i as usize] -= 1);
            // Additional samples pad the last round of a pass.
            prop_assert!(expected.iter().all(|n| *n <= 0), "{expected:?}");
            let padding: i64 = expected.iter().map(|n| -n).sum();
            let most = if is_infinite { 0 } else { 3 * (place / len) as i64 };
            prop_assert!(padding <= most, "{padding}");
        }
    }
}
