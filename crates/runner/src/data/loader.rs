//! Batches of a data set, in a sampler's order.

use std::sync::Arc;

use super::{Batch, Dataset, DefaultSampler};
use crate::{Error, Result};

/// Cuts a sampler's indices into batches and asks the data set for each.
#[derive(Clone)]
pub struct DataLoader {
    dataset: Arc<dyn Dataset>,
    sampler: DefaultSampler,
    batch_size: usize,
    drop_last: bool,
    infinite: bool,
}

impl std::fmt::Debug for DataLoader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DataLoader")
            .field("dataset", &self.dataset.name())
            .field("sampler", &self.sampler)
            .field("batch_size", &self.batch_size)
            .finish_non_exhaustive()
    }
}

impl DataLoader {
    /// Joins a data set and a sampler. `batch_size` is per rank; with `drop_last` a smaller last
    /// batch is left out.
    ///
    /// # Errors
    ///
    /// [`Error::Data`] if the batch size is zero, or if not a single batch would come out.
    pub fn new(
        dataset: Arc<dyn Dataset>,
        sampler: DefaultSampler,
        batch_size: usize,
        drop_last: bool,
    ) -> Result<Self> {
        if batch_size == 0 {
            return Err(Error::Data("batch_size must be at least 1".into()));
        }
        let loader = Self { dataset, sampler, batch_size, drop_last, infinite: false };
        // Where nothing is rounded up, a rank may go without.
        if loader.batches_of(DefaultSampler { round_up: true, ..sampler }) == 0 {
            return Err(Error::Data(format!(
                "data set `{}` gives no batch of {batch_size} to each of {} ranks: it has {} samples",
                loader.dataset.name(),
                sampler.world_size,
                sampler.len
            )));
        }
        Ok(loader)
    }

    /// Number of batches in an epoch, the same on every rank if the sampler rounds up.
    #[must_use]
    pub fn batches_per_epoch(&self) -> usize {
        self.batches_of(self.sampler)
    }

    /// Number of batches in an epoch that every rank has.
    pub(crate) fn common_batches(&self) -> usize {
        let last = self.sampler.world_size - 1;
        self.batches_of(DefaultSampler { rank: last, ..self.sampler })
    }

    fn batches_of(&self, sampler: DefaultSampler) -> usize {
        let samples = sampler.samples_per_rank();
        if self.drop_last { samples / self.batch_size } else { samples.div_ceil(self.batch_size) }
    }

    /// Number of samples in the data set, over all ranks.
    #[must_use]
    pub fn dataset_len(&self) -> usize {
        self.dataset.len()
    }

    /// The same with MMEngine's `InfiniteSampler`: [`endless`](Self::endless) batches are cut from the
    /// permutations one after another, so that all are of the same size.
    #[must_use]
    pub fn infinite(self) -> Self {
        Self { infinite: true, ..self }
    }

    /// Whether epochs have no end.
    #[must_use]
    pub fn is_infinite(&self) -> bool {
        self.infinite
    }

    /// Samples per batch and rank.
    #[must_use]
    pub fn batch_size(&self) -> usize {
        self.batch_size
    }

    /// Deals the samples as with another seed from now on.
    pub(crate) fn set_seed(&mut self, seed: u64) {
        self.sampler.seed = seed;
    }

    /// The batches of `epoch` from batch `start` on. Skipped batches are not loaded.
    pub fn batches(
        &self,
        epoch: usize,
        start: usize,
    ) -> impl Iterator<Item = Result<Batch>> + use<> {
        let indices = self.sampler.indices(epoch);
        let (dataset, size) = (Arc::clone(&self.dataset), self.batch_size);
        (start..self.batches_per_epoch()).map(move |k| {
            let end = indices.len().min((k + 1) * size);
            dataset.batch(&indices[k * size..end])
        })
    }

    /// Batches without end, pass after pass over the data set, from batch `start` on. Skipped batches
    /// cost nothing, however many they are.
    pub fn endless(&self, start: usize) -> impl Iterator<Item = Result<Batch>> + use<> {
        let loader = self.clone();
        let mut dealt = Dealt { sampler: self.sampler, pass: None };
        if self.infinite {
            // The whole order, of which this rank takes each `world_size`th.
            dealt.sampler = DefaultSampler { rank: 0, world_size: 1, ..self.sampler };
        }
        (start..).map(move |k| {
            let indices = match loader.infinite {
                true => loader.cut(&mut dealt, k),
                false => {
                    let len = loader.batches_per_epoch();
                    let (size, all) = (loader.batch_size, dealt.pass(k / len));
                    all[k % len * size..all.len().min((k % len + 1) * size)].to_vec()
                }
            };
            loader.dataset.batch(&indices)
        })
    }

    /// Batch `k` of this rank, cut from the permutations one after another.
    fn cut(&self, dealt: &mut Dealt, k: usize) -> Vec<usize> {
        let DefaultSampler { len, rank, world_size, .. } = self.sampler;
        let samples = k * self.batch_size..(k + 1) * self.batch_size;
        let places = samples.map(|sample| sample * world_size + rank);
        places.map(|place| dealt.pass(place / len)[place % len]).collect()
    }
}

/// The order of one pass over the data set, made when it is first asked for.
struct Dealt {
    sampler: DefaultSampler,
    pass: Option<(usize, Vec<usize>)>,
}

impl Dealt {
    fn pass(&mut self, pass: usize) -> &[usize] {
        let made = self.pass.take().filter(|(made, _)| *made == pass);
        &self.pass.insert(made.unwrap_or_else(|| (pass, self.sampler.indices(pass)))).1
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::data::{Array, ArrayData};

    /// Samples that are their own index.
    struct Counting(usize);

    impl Dataset for Counting {
        fn name(&self) -> &'static str {
            "counting"
        }

        fn len(&self) -> usize {
            self.0
        }

        fn batch(&self, indices: &[usize]) -> Result<Batch> {
            let values = indices.iter().map(|i| *i as i64).collect();
            Ok(Batch::new().with("i", Array::new([indices.len()], ArrayData::I64(values))?))
        }
    }

    fn dealt(len: usize, rank: usize, world_size: usize) -> DefaultSampler {
        DefaultSampler { len, shuffle: true, seed: 3, rank, world_size, round_up: true }
    }

    fn loader(len: usize, batch_size: usize, rank: usize, world_size: usize) -> DataLoader {
        let sampler = dealt(len, rank, world_size);
        DataLoader::new(Arc::new(Counting(len)), sampler, batch_size, false).unwrap()
    }

    fn values(batch: Result<Batch>) -> Vec<i64> {
        match batch.unwrap().get("i").unwrap().data() {
            ArrayData::I64(values) => values.clone(),
            _ => panic!("not the data set's"),
        }
    }

    /// Each rank's indices, without shuffling; MMEngine's permutations are PyTorch's, which nobody else
    /// draws.
    #[test]
    fn indices_are_mmengines() {
        let text = include_str!("../../tests/vectors/samplers.json");
        let recorded: serde_json::Value = serde_json::from_str(text).unwrap();
        let mut compared = 0;
        for kind in ["default", "infinite"] {
            for case in recorded[kind].as_array().unwrap() {
                let round_up = case["round_up"] != false;
                let number = |key: &str| case[key].as_u64().unwrap() as usize;
                let (len, world_size) = (number("n"), number("world"));
                for (rank, expected) in case["ranks"].as_array().unwrap().iter().enumerate() {
                    let expected = if kind == "default" { &expected["idx"] } else { expected };
                    let expected: Vec<i64> = serde_json::from_value(expected.clone()).unwrap();
                    let sampler =
                        DefaultSampler { shuffle: false, round_up, ..dealt(len, rank, world_size) };
                    let loader =
                        DataLoader::new(Arc::new(Counting(len)), sampler, 1, false).unwrap();
                    let got: Vec<i64> = match kind {
                        "default" => loader.batches(0, 0).flat_map(values).collect(),
                        _ => loader
                            .infinite()
                            .endless(0)
                            .take(expected.len())
                            .flat_map(values)
                            .collect(),
                    };
                    assert_eq!(got, expected, "{case}");
                    compared += 1;
                }
            }
        }
        assert_eq!(compared, 2 * 3 * (1 + 2 + 3 + 4) + 4);
    }

    proptest! {
        #[test]
        fn endless_batches_are_those_of_one_epoch_after_another(
            len in 1usize..40, size in 1usize..7, world in 1usize..4, start in 0usize..60,
        ) {
            let loader = loader(len, size, world - 1, world);
            let per_epoch = loader.batches_per_epoch();
            let epochs = (0..=(start + 9) / per_epoch).flat_map(|e| loader.batches(e, 0));
            let expected: Vec<_> = epochs.skip(start).take(9).map(values).collect();
            let got: Vec<_> = loader.endless(start).take(9).map(values).collect();
            prop_assert_eq!(got, expected);
        }

        #[test]
        fn infinite_batches_deal_the_permutations_like_cards(
            len in 1usize..40, size in 1usize..7, world in 1usize..4, start in 0usize..60,
        ) {
            let whole = dealt(len, 0, 1);
            let stream: Vec<_> = (0..).flat_map(|e| whole.indices(e)).take(70 * size * world).collect();
            for rank in 0..world {
                let mine: Vec<_> = stream.iter().skip(rank).step_by(world).collect();
                let got = loader(len, size, rank, world).infinite().endless(start).take(3);
                for (k, batch) in got.enumerate() {
                    let at = (start + k) * size;
                    let expected: Vec<_> = mine[at..at + size].iter().map(|i| **i as i64).collect();
                    prop_assert_eq!(values(batch), expected);
                }
            }
        }
    }
}
