//! `DefaultSampler`: selection and order of a rank's samples, as a pure function of seed, epoch and
//! rank.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

/// MMEngine's `DefaultSampler`: one permutation of the data set per epoch, distributed to the ranks
/// in turn (`rank, rank + world_size, ...`), so that the union of the ranks' batches `k` is the
/// single-process batch `k` of the same total size.
///
/// The permutation depends on `seed + epoch`; two runs with equal seeds see the same order, and an
/// interrupted epoch resumes by skipping, without replaying random numbers. As in PyTorch's
/// `DistributedSampler`, epoch 1 of seed 0 therefore has the order of epoch 0 of seed 1: for runs
/// that are to differ, take seeds further apart than the number of epochs.
///
/// `rank` must be below `world_size`, which the methods check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DefaultSampler {
    /// Number of samples in the data set.
    pub len: usize,
    /// Whether to permute in every epoch; otherwise the data set's own order is used.
    pub shuffle: bool,
    /// Seed of the permutations.
    pub seed: u64,
    /// This rank.
    pub rank: usize,
    /// Number of ranks.
    pub world_size: usize,
    /// Whether every rank gets the same number of samples, some of them twice; otherwise each
    /// sample is used once.
    pub round_up: bool,
}

impl DefaultSampler {
    /// Samples all of `len` samples on a single rank, in a new order with seed 0 in every epoch.
    #[must_use]
    pub fn new(len: usize) -> Self {
        Self { len, shuffle: true, seed: 0, rank: 0, world_size: 1, round_up: true }
    }

    /// Number of samples this rank sees per epoch; with `round_up` every rank has as many.
    ///
    /// # Panics
    ///
    /// If `rank` is not below `world_size`.
    #[must_use]
    pub fn samples_per_rank(&self) -> usize {
        self.share_of(self.len)
    }

    /// Number of this rank's samples out of `samples`.
    ///
    /// # Panics
    ///
    /// If `rank` is not below `world_size`.
    #[must_use]
    pub fn share_of(&self, samples: usize) -> usize {
        self.check_rank();
        let first = if self.round_up { 0 } else { self.rank };
        samples.saturating_sub(first).div_ceil(self.world_size)
    }

    /// Returns this rank's sample indices in `epoch`. If `len` is not a multiple of the world size,
    /// `round_up` continues the permutation from its start.
    ///
    /// # Panics
    ///
    /// If `rank` is not below `world_size`.
    #[must_use]
    pub fn indices(&self, epoch: usize) -> Vec<usize> {
        self.rest(epoch, 0)
    }

    /// As [`indices`](Self::indices), without the first `dealt` samples of the permutation.
    ///
    /// # Panics
    ///
    /// If `rank` is not below `world_size`.
    #[must_use]
    pub fn rest(&self, epoch: usize, dealt: usize) -> Vec<usize> {
        self.check_rank();
        let mut order: Vec<usize> = (0..self.len).collect();
        if self.shuffle {
            let seed = self.seed.wrapping_add(epoch as u64);
            shuffle(&mut order, &mut ChaCha8Rng::seed_from_u64(seed));
        }
        let left = self.len.saturating_sub(dealt);
        let rounded = left.next_multiple_of(self.world_size);
        let places = dealt..dealt + if self.round_up { rounded } else { left };
        let own = places.skip(self.rank).step_by(self.world_size);
        own.map(|place| order[place % self.len]).collect()
    }

    fn check_rank(&self) {
        let Self { rank, world_size, .. } = self;
        assert!(rank < world_size, "`rank` must be below `world_size`, got {rank} of {world_size}");
    }
}

/// Fisher-Yates shuffle. Implemented here because checkpoints depend on the order, which must not
/// change with a library's version.
pub(crate) fn shuffle<T>(items: &mut [T], random: &mut ChaCha8Rng) {
    for last in (1..items.len()).rev() {
        items.swap(last, below(random, last + 1));
    }
}

/// Returns a number below `count`, which is not 0.
pub(crate) fn below(random: &mut ChaCha8Rng, count: usize) -> usize {
    ((u128::from(random.next_u64()) * count as u128) >> 64) as usize
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn sampler(len: usize, rank: usize, world_size: usize) -> DefaultSampler {
        DefaultSampler { len, shuffle: true, seed: 7, rank, world_size, round_up: true }
    }

    #[test]
    fn epochs_differ_and_repeat() {
        let s = sampler(100, 0, 1);
        assert_ne!(s.indices(0), s.indices(1));
        assert_eq!(s.indices(3), s.indices(3));
    }

    #[test]
    fn without_shuffling_the_order_is_the_data_sets() {
        let dealt =
            [0, 1].map(|rank| DefaultSampler { shuffle: false, ..sampler(5, rank, 2) }.indices(3));
        assert_eq!(dealt, [[0, 2, 4], [1, 3, 0]]);
    }

    #[test]
    #[should_panic(expected = "`rank` must be below `world_size`, got 0 of 0")]
    fn no_ranks_are_refused() {
        let _ = sampler(5, 0, 0).samples_per_rank();
    }

    #[test]
    #[should_panic(expected = "`rank` must be below `world_size`, got 2 of 2")]
    fn a_rank_that_is_none_is_refused() {
        let _ = sampler(5, 2, 2).indices(0);
    }

    /// As in PyTorch, which the documentation says.
    #[test]
    fn an_epoch_has_the_order_of_the_next_seed_before_it() {
        let next = DefaultSampler { seed: 8, ..sampler(50, 0, 1) };
        assert_eq!(sampler(50, 0, 1).indices(1), next.indices(0));
    }

    #[test]
    fn the_order_never_changes_between_versions() {
        assert_eq!(sampler(8, 0, 1).indices(0), PINNED);
    }

    const PINNED: [usize; 8] = [5, 0, 6, 2, 3, 4, 7, 1];

    proptest! {
        #[test]
        fn ranks_share_the_data_set_evenly(len in 1usize..200, world in 1usize..6, epoch in 0usize..3) {
            let per_rank: Vec<_> = (0..world).map(|r| sampler(len, r, world).indices(epoch)).collect();
            let mut seen = vec![0usize; len];
            for indices in &per_rank {
                prop_assert_eq!(indices.len(), len.div_ceil(world));
                indices.iter().for_each(|i| seen[*i] += 1);
            }
            // Each sample occurs once, and padding is from the start of the permutation.
            let extra: usize = seen.iter().map(|n| n - 1).sum();
            prop_assert_eq!(extra, len.div_ceil(world) * world - len);
            // Distributed in turn from the single-process order.
            let whole = sampler(len, 0, 1).indices(epoch);
            for (r, indices) in per_rank.iter().enumerate() {
                for (k, i) in indices.iter().enumerate() {
                    prop_assert_eq!(*i, whole[(k * world + r) % len]);
                }
            }
            // Without rounding, each rank has the samples before the padding.
            for (r, indices) in per_rank.iter().enumerate() {
                let short = DefaultSampler { round_up: false, ..sampler(len, r, world) };
                prop_assert_eq!(short.indices(epoch), &indices[..short.samples_per_rank()]);
                prop_assert_eq!(short.samples_per_rank(), (r..len).step_by(world).count());
            }
        }
    }
}
