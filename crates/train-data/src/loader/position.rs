//! `Layout`: the properties that determine the batches of a loader.

use serde::{Deserialize, Serialize};

use super::DataLoader;
use crate::DefaultSampler;

impl DataLoader {
    /// Returns the properties that determine the batches of all ranks.
    pub fn layout(&self) -> Layout {
        let DefaultSampler { len, shuffle, seed, world_size, round_up, .. } = self.sampler;
        let &Self { batch_size, drop_last, infinite, .. } = self;
        let samples = len;
        Layout { samples, world_size, batch_size, drop_last, shuffle, infinite, seed, round_up }
    }
}

/// Properties that determine the batches of all ranks, in addition to the data themselves and their
/// transforms. Two loaders with equal layouts have the same samples in the same batches, so that
/// the index of a batch means the same in both.
///
/// A layout serialized without the last two fields, by an older version, is read as one of seed 0
/// that rounds up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Layout {
    /// Number of samples in the data set.
    pub samples: usize,
    /// Number of ranks.
    pub world_size: usize,
    /// Samples per batch and rank.
    pub batch_size: usize,
    /// Whether a last batch smaller than the others is dropped.
    pub drop_last: bool,
    /// Whether each epoch has its own order.
    pub shuffle: bool,
    /// Whether epochs have no end.
    pub infinite: bool,
    /// Seed of the order, and of the samples' random numbers.
    #[serde(default)]
    pub seed: u64,
    /// Whether samples are repeated so that every rank has as many.
    #[serde(default = "rounds_up")]
    pub round_up: bool,
}

const fn rounds_up() -> bool {
    true
}

impl Layout {
    /// Number of samples in an iteration of all ranks.
    pub const fn iter_samples(&self) -> usize {
        self.batch_size * self.world_size
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::loader::tests::{loader, values};

    #[test]
    fn a_layout_holds_whatever_decides_the_batches() {
        let base = loader(40, 4, 0, 2);
        let with = |change: fn(&mut DataLoader)| {
            let mut loader = base.clone();
            change(&mut loader);
            loader
        };
        let others = [
            with(|l| l.sampler.seed = 4),
            with(|l| l.sampler.shuffle = false),
            with(|l| l.sampler.round_up = false),
            with(|l| l.sampler.world_size = 4),
            with(|l| l.sampler.len = 39),
            with(|l| l.batch_size = 5),
            with(|l| l.drop_last = true),
            with(|l| l.infinite = true),
        ];
        for other in &others {
            assert_ne!(other.layout(), base.layout(), "{:?}", other.layout());
            let saved = serde_json::to_string(&other.layout()).unwrap();
            assert_eq!(serde_json::from_str::<Layout>(&saved).unwrap(), other.layout());
        }
        // The rank is not a property of the layout of all ranks.
        assert_eq!(with(|l| l.sampler.rank = 1).layout(), base.layout());
        // Another layout has the samples of its own loader.
        let first = |loader: &DataLoader| values(loader.batches(1, 0).next().unwrap());
        for other in &others {
            assert_eq!(first(&base.with(other.layout(), 0)), first(other));
        }
    }

    #[test]
    fn a_layout_of_an_older_version_is_read() {
        let text = r#"{"samples": 40, "world_size": 2, "batch_size": 4, "drop_last": false,
            "shuffle": true, "infinite": false}"#;
        let old: Layout = serde_json::from_str(text).unwrap();
        let mut now = loader(40, 4, 1, 2);
        assert_ne!(old, now.layout());
        now.set_seed(0);
        assert_eq!(old, now.layout());
    }
}
