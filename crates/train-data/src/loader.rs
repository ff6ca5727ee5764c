//! `DataLoader`: batches of a data set, in a sampler's order; `Layout`, the properties that
//! determine them; and `IterScale`, the ratio of iterations of different layouts.
//!
//! After a change of the layout (more ranks, smaller batches), samples that were already taken are
//! skipped: `place` is their number in the order of all passes over the data set.

use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::dataset::collate;
use crate::workers::{Workers, catch};
use crate::{Batch, BoxError, Dataset, DefaultSampler, Draw, Error, Result, Sample};

/// Creates a batch of samples. An [`Error::Collate`] is reported with the sample's index in the
/// data set.
#[doc(alias = "collate_fn")]
pub type Collate = Arc<dyn Fn(Vec<Sample>) -> Result<Batch, BoxError> + Send + Sync>;

/// Divides a sampler's indices into batches and requests each from the data set, ahead of time with
/// [`workers`](Self::workers).
#[derive(Clone)]
pub struct DataLoader {
    dataset: Arc<dyn Dataset>,
    collate: Option<Collate>,
    workers: Workers,
    sampler: DefaultSampler,
    batch_size: usize,
    drop_last: bool,
    infinite: bool,
    /// Number of samples, over all passes, that were taken in an earlier layout.
    place: usize,
}

/// Maximum number of samples in an iteration, so that products of sizes and counts do not overflow.
const MOST_SAMPLES: usize = 1 << 31;

impl std::fmt::Debug for DataLoader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DataLoader")
            .field("dataset", &self.dataset.name())
            .field("sampler", &self.sampler)
            .field("batch_size", &self.batch_size)
            .field("workers", &self.workers)
            .finish_non_exhaustive()
    }
}

impl DataLoader {
    /// Combines a data set and a sampler. `batch_size` is per rank; with `drop_last` a smaller last
    /// batch is dropped. Without [`workers`](Self::workers) batches load on the calling thread.
    ///
    /// # Errors
    ///
    /// [`Error::Options`] if the batch size is zero or far too large, if the sampler has another
    /// length or a rank not below the world size, or if there would be no batch.
    pub fn new(
        dataset: Arc<dyn Dataset>,
        sampler: DefaultSampler,
        batch_size: usize,
        drop_last: bool,
    ) -> Result<Self> {
        if batch_size == 0 {
            return Err(Error::Options("batch_size must be at least 1".into()));
        }
        let DefaultSampler { len, rank, world_size, .. } = sampler;
        if rank >= world_size {
            let text = format!("`rank` must be below `world_size`, got {rank} of {world_size}");
            return Err(Error::Options(text));
        }
        if batch_size.checked_mul(world_size).is_none_or(|samples| samples > MOST_SAMPLES) {
            return Err(Error::Options(format!(
                "batch_size is {batch_size}, on {world_size} ranks: an iteration has at most {MOST_SAMPLES} samples"
            )));
        }
        if len != dataset.len() {
            let (name, has) = (dataset.name(), dataset.len());
            let text = format!("data set `{name}` has {has} samples, its sampler {len}");
            return Err(Error::Options(text));
        }
        let loader = Self {
            dataset,
            collate: None,
            workers: Workers::new(0),
            sampler,
            batch_size,
            drop_last,
            infinite: false,
            place: 0,
        };
        // Without rounding up, a rank may have no batch.
        if loader.batches_of(DefaultSampler { round_up: true, ..sampler }, sampler.len) == 0 {
            return Err(Error::Options(format!(
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
        self.count(self.sampler.len)
    }

    /// Number of batches in an epoch that every rank has.
    pub fn common_batches(&self) -> usize {
        let last = self.sampler.world_size - 1;
        self.batches_of(DefaultSampler { rank: last, ..self.sampler }, self.sampler.len)
    }

    /// Number of this rank's batches out of `samples` samples of all ranks.
    fn count(&self, samples: usize) -> usize {
        self.batches_of(self.sampler, samples)
    }

    fn batches_of(&self, sampler: DefaultSampler, samples: usize) -> usize {
        let samples = sampler.share_of(samples);
        if self.drop_last { samples / self.batch_size } else { samples.div_ceil(self.batch_size) }
    }

    /// Loads a batch of these samples, as in the first pass.
    ///
    /// # Errors
    ///
    /// Those of the data set.
    pub fn samples(&self, indices: &[usize]) -> Result<Batch> {
        self.load(&self.draws(0, indices))
    }

    fn draws(&self, pass: usize, indices: &[usize]) -> Vec<Draw> {
        indices.iter().map(|&index| Draw { index, seed: self.sampler.seed, pass }).collect()
    }

    /// Loads batches ahead of time on worker threads. Batches and their order do not depend on it.
    /// At most `num_workers * prefetch_factor` batches are prefetched.
    ///
    /// An error of a batch, including a panic, is returned in its turn, after the batches before
    /// it. Dropping the iterator ends the loading, see [`Workers`].
    #[doc(alias("num_workers", "prefetch_factor", "persistent_workers", "timeout"))]
    #[must_use]
    pub fn workers(self, workers: Workers) -> Self {
        Self { workers, ..self }
    }

    /// Collates samples with `collate` instead of the data set's [`batch`](Dataset::batch).
    #[doc(alias = "collate_fn")]
    #[must_use]
    pub fn collate<F>(self, collate: F) -> Self
    where
        F: Fn(Vec<Sample>) -> Result<Batch, BoxError> + Send + Sync + 'static,
    {
        Self { collate: Some(Arc::new(collate)), ..self }
    }

    /// Loads a batch for each item, in order.
    fn load_all(
        &self,
        draws: Box<dyn Iterator<Item = Vec<Draw>> + Send>,
    ) -> impl Iterator<Item = Result<Batch>> + use<> {
        // Samples of all batches not yet returned, in order, for the error of a batch that times
        // out.
        let asked = Arc::new(Mutex::new(VecDeque::new()));
        let asks = Arc::clone(&asked);
        let draws = draws.inspect(move |draws| asks.lock().push_back(draws.clone()));
        let (worker, loader) = (self.clone(), self.clone());
        let loaded = self.workers.map(draws, move |draws| worker.load(&draws));
        loaded.map(move |batch| match batch {
            Ok(batch) => {
                asked.lock().pop_front();
                batch
            }
            Err(source) => Err(match asked.lock().front() {
                Some(draws) => loader.batch_error(draws, source.into()),
                None => {
                    let data = format!("data set `{}`", loader.dataset.name());
                    Error::Workers { data, source }
                }
            }),
        })
    }

    /// Loads a batch; an error names the data set and the sample.
    fn load(&self, draws: &[Draw]) -> Result<Batch> {
        let batch = catch(|| {
            let batch = match &self.collate {
                None => self.dataset.batch(draws),
                Some(function) => collate(&*self.dataset, draws, |samples| function(samples)),
            };
            self.dataset.finish(batch?, draws)
        });
        batch.map_err(BoxError::from).flatten().map_err(|source| match source.downcast() {
            Ok(named) if matches!(*named, Error::Sample { .. }) => *named,
            Ok(other) => self.batch_error(draws, other),
            Err(other) => self.batch_error(draws, other),
        })
    }

    fn batch_error(&self, draws: &[Draw], source: BoxError) -> Error {
        let indices = draws.iter().map(|draw| draw.index).collect();
        Error::Batch { dataset: self.dataset.name().into(), indices, source }
    }

    /// Number of samples in batch `k` of a whole epoch.
    pub fn samples_in(&self, k: usize) -> usize {
        let samples = self.sampler.samples_per_rank();
        samples.saturating_sub(k * self.batch_size).min(self.batch_size)
    }

    /// Number of samples of a pass that were taken in an earlier layout.
    fn dealt(&self, pass: usize) -> usize {
        self.place.saturating_sub(pass * self.sampler.len).min(self.sampler.len)
    }

    /// Returns this rank's samples in the rest of a pass.
    fn indices(&self, pass: usize) -> Vec<usize> {
        self.sampler.rest(pass, self.dealt(pass))
    }

    /// Returns the properties that determine the batches of all ranks.
    pub fn layout(&self) -> Layout {
        let DefaultSampler { len, shuffle, seed, world_size, round_up, .. } = self.sampler;
        let &Self { batch_size, drop_last, infinite, .. } = self;
        let samples = len;
        Layout { samples, world_size, batch_size, drop_last, shuffle, infinite, seed, round_up }
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
        Self { sampler, batch_size, drop_last, infinite, place, ..self.clone() }
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
    fn locate(&self, k: usize) -> (usize, usize) {
        let (pass, first) = (self.place / self.sampler.len, self.place % self.sampler.len);
        let first = self.count(self.sampler.len - first);
        match k.checked_sub(first) {
            None => (pass, k),
            Some(k) => (pass + 1 + k / self.batches_per_epoch(), k % self.batches_per_epoch()),
        }
    }

    /// Returns the sampler.
    #[must_use]
    pub fn sampler(&self) -> DefaultSampler {
        self.sampler
    }

    /// Number of samples in the data set, over all ranks.
    #[must_use]
    pub fn dataset_len(&self) -> usize {
        self.dataset.len()
    }

    /// Uses MMEngine's `InfiniteSampler`: [`endless`](Self::endless) batches are taken from
    /// consecutive permutations, so that all have the same size.
    #[must_use]
    pub fn infinite(self) -> Self {
        Self { infinite: true, ..self }
    }

    /// Returns whether epochs have no end.
    #[must_use]
    pub fn is_infinite(&self) -> bool {
        self.infinite
    }

    /// Samples per batch and rank.
    #[must_use]
    pub fn batch_size(&self) -> usize {
        self.batch_size
    }

    /// Changes the seed of the sampler.
    pub fn set_seed(&mut self, seed: u64) {
        self.sampler.seed = seed;
    }

    /// Returns the batches of `epoch` from batch `start` on. Skipped batches are not loaded.
    pub fn batches(
        &self,
        epoch: usize,
        start: usize,
    ) -> impl Iterator<Item = Result<Batch>> + use<> {
        let start = start.saturating_sub(self.first_batch(epoch));
        let left = self.count(self.sampler.len - self.dealt(epoch));
        let mut order = Order { loader: self.clone(), pass: None };
        self.load_all(Box::new((start..left).map(move |k| order.batch(epoch, k))))
    }

    /// Returns endless batches, pass after pass over the data set, from batch `start` on. The cost
    /// does not depend on `start`.
    pub fn endless(&self, start: usize) -> impl Iterator<Item = Result<Batch>> + use<> {
        let loader = self.clone();
        // With an infinite sampler the global order, of which this rank takes every `world_size`th
        // sample.
        let whole = Layout { world_size: 1, ..self.layout() };
        let dealer = if self.infinite { self.with(whole, 0) } else { self.clone() };
        let mut order = Order { loader: dealer, pass: None };
        // Without rounding up a rank may have no batch in any pass.
        let has_none = !self.infinite && self.batches_per_epoch() == 0;
        let end = if has_none { start } else { usize::MAX };
        self.load_all(Box::new((start..end).map(move |k| {
            if loader.infinite {
                return loader.cut(&mut order, k);
            }
            let (pass, k) = loader.locate(k);
            order.batch(pass, k)
        })))
    }

    /// Returns batch `k` of this rank, from consecutive permutations.
    fn cut(&self, order: &mut Order, k: usize) -> Vec<Draw> {
        let DefaultSampler { len, seed, rank, world_size, .. } = self.sampler;
        let samples = k * self.batch_size..(k + 1) * self.batch_size;
        let places = samples.map(|sample| self.place + sample * world_size + rank);
        let draw = |place| {
            let pass = place / len;
            Draw { index: order.pass(pass)[place % len], seed, pass }
        };
        places.map(draw).collect()
    }
}

/// A loader with the cached order of one pass over the data set.
struct Order {
    loader: DataLoader,
    pass: Option<(usize, Vec<usize>)>,
}

impl Order {
    fn pass(&mut self, pass: usize) -> &[usize] {
        let made = self.pass.take().filter(|(made, _)| *made == pass);
        &self.pass.insert(made.unwrap_or_else(|| (pass, self.loader.indices(pass)))).1
    }

    /// Returns batch `k` of the rest of a pass.
    fn batch(&mut self, pass: usize, k: usize) -> Vec<Draw> {
        let size = self.loader.batch_size;
        let indices = self.pass(pass);
        let batch = indices[k * size..indices.len().min((k + 1) * size)].to_vec();
        self.loader.draws(pass, &batch)
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
    use std::sync::atomic::{AtomicUsize, Ordering};

    use proptest::prelude::*;

    use super::*;
    use crate::{Array, ArrayData, Sample, SampleRng};

    /// Samples that contain their own index.
    struct Counting(usize);

    impl Dataset for Counting {
        fn name(&self) -> &'static str {
            "counting"
        }

        fn len(&self) -> usize {
            self.0
        }

        fn sample(&self, index: usize, _: &mut SampleRng) -> Result<Sample, BoxError> {
            Ok(Sample::new().with("i", Array::scalar(index as i64)))
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

    /// Each rank's indices, without shuffling, because MMEngine's permutations are PyTorch's.
    #[test]
    fn indices_are_mmengines() {
        let text = include_str!("../tests/vectors/samplers.json");
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

    /// Samples, and the number of requested batches.
    struct Asked(Counting, Arc<AtomicUsize>);

    impl Dataset for Asked {
        fn name(&self) -> &'static str {
            "asked"
        }

        fn len(&self) -> usize {
            self.0.len()
        }

        fn sample(&self, index: usize, random: &mut SampleRng) -> Result<Sample, BoxError> {
            self.0.sample(index, random)
        }

        fn batch(&self, draws: &[Draw]) -> Result<Batch, BoxError> {
            // Relaxed: one thread.
            self.1.fetch_add(1, Ordering::Relaxed);
            self.0.batch(draws)
        }
    }

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

    #[test]
    fn sizes_that_would_overflow_are_refused() {
        for (batch_size, world_size, rank) in
            [(usize::MAX, 1, 0), (usize::MAX / 2, 3, 0), (1, usize::MAX, 0), (0, 1, 0), (1, 0, 0)]
        {
            let sampler = dealt(10, rank, world_size);
            let made = DataLoader::new(Arc::new(Counting(10)), sampler, batch_size, false);
            assert!(matches!(made, Err(Error::Options(_))), "{batch_size} {world_size}");
        }
    }

    #[test]
    fn a_skip_costs_the_same_however_far_it_is() {
        let asked = Arc::new(AtomicUsize::new(0));
        let dataset = Arc::new(Asked(Counting(1000), Arc::clone(&asked)));
        let loader = DataLoader { dataset, ..loader(1000, 2, 1, 3) };
        let far = 1_000_000_000_000;
        assert!(loader.endless(far).next().unwrap().is_ok());
        assert!(loader.clone().infinite().endless(far).next().unwrap().is_ok());
        assert!(loader.batches(far, loader.batches_per_epoch() - 1).next().unwrap().is_ok());
        assert_eq!(asked.load(Ordering::Relaxed), 3);
    }

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

    /// Random samples, one of which returns an error and one panics.
    struct Faulty {
        len: usize,
        /// Index of the sample with an error, and of the one that panics.
        bad: [usize; 2],
    }

    impl Dataset for Faulty {
        fn name(&self) -> &'static str {
            "faulty"
        }

        fn len(&self) -> usize {
            self.len
        }

        fn sample(&self, index: usize, random: &mut SampleRng) -> Result<Sample, BoxError> {
            if index == self.bad[0] {
                return Err("it is broken".into());
            }
            assert_ne!(index, self.bad[1], "it is worse");
            std::thread::sleep(std::time::Duration::from_micros(random.next_u64() % 200));
            Ok(Sample::new().with("i", Array::scalar(random.next_u64() as i64 ^ index as i64)))
        }
    }

    fn text(batch: Result<Batch>) -> Result<Batch, String> {
        batch.map_err(|error| error.to_string())
    }

    #[test]
    fn samples_that_fail_are_named_with_any_number_of_workers() {
        for count in [0, 1, 3] {
            let dataset = Arc::new(Faulty { len: 30, bad: [12, 23] });
            let sampler = DefaultSampler { shuffle: false, ..dealt(30, 0, 1) };
            let loader = DataLoader::new(dataset, sampler, 5, false).unwrap();
            let loader = loader.workers(Workers::new(count));
            let batches: Vec<_> = loader.batches(0, 0).map(text).collect();
            let errors: Vec<_> = batches.iter().map(|b| b.as_ref().err().cloned()).collect();
            let [broken, worse] = [&errors[2], &errors[4]].map(|error| error.clone().unwrap());
            assert_eq!(broken, "data set `faulty`, sample 12: it is broken");
            assert!(worse.starts_with("data set `faulty`, sample 23: panicked: "), "{worse}");
            assert!(worse.contains("it is worse"), "{worse}");
            assert_eq!(errors.iter().flatten().count(), 2, "{errors:?}");
        }
    }

    #[test]
    fn a_batch_that_does_not_come_ends_the_wait() {
        struct Stuck(Mutex<std::sync::mpsc::Receiver<()>>);
        impl Dataset for Stuck {
            fn name(&self) -> &'static str {
                "stuck"
            }
            fn len(&self) -> usize {
                3
            }
            fn sample(&self, _: usize, _: &mut SampleRng) -> Result<Sample, BoxError> {
                self.0.lock().recv()?;
                Ok(Sample::new())
            }
        }
        let sampler = DefaultSampler { shuffle: false, ..dealt(3, 0, 1) };
        let (open, gate) = std::sync::mpsc::channel();
        let dataset = Arc::new(Stuck(Mutex::new(gate)));
        let loader = DataLoader::new(dataset, sampler, 1, false).unwrap();
        let timeout = std::time::Duration::from_millis(20);
        let mut batches = loader.workers(Workers::new(1).timeout(timeout)).batches(0, 0);
        let error = batches.next().unwrap().unwrap_err().to_string();
        assert!(
            error
                .starts_with("data set `stuck`, samples [0]: no result from 1 workers within 20ms"),
            "{error}"
        );
        drop(open);
    }

    #[test]
    fn a_collate_function_is_told_with_the_samples_index() {
        let loader = DataLoader {
            sampler: DefaultSampler { shuffle: false, ..dealt(9, 0, 1) },
            ..loader(9, 4, 0, 1)
        };
        let odd = |samples: Vec<Sample>| {
            let text = "it is odd".to_owned();
            match samples.len() {
                4 => Ok(Batch::new().with("n", Array::scalar(4_i64))),
                _ => Err(Error::Collate { position: 0, text }.into()),
            }
        };
        let batches: Vec<_> = loader.collate(odd).batches(0, 0).map(text).collect();
        assert_eq!(batches[0].as_ref().unwrap().get("n").unwrap(), &Array::scalar(4_i64));
        let error = batches[2].as_ref().unwrap_err();
        assert!(
            error.starts_with("data set `counting`, sample 8: ") && error.ends_with("it is odd"),
            "{error}"
        );
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]

        #[test]
        fn batches_do_not_depend_on_workers(
            len in 1usize..40, size in 1usize..7, world in 1usize..4, start in 0usize..20,
            infinite: bool, bad in prop::array::uniform2(0usize..60), place in 0usize..50,
        ) {
            let dataset = Arc::new(Faulty { len, bad });
            let mut loader = DataLoader { dataset, ..loader(len, size, world - 1, world) };
            loader.begin_at(place);
            let loader = if infinite { loader.infinite() } else { loader };
            let all = |loader: &DataLoader| {
                let epoch = loader.batches(1, start).map(text);
                epoch.chain(loader.endless(start).take(9).map(text)).collect::<Vec<_>>()
            };
            let expected = all(&loader);
            for count in [1, 2, 7] {
                let workers = Workers::new(count).prefetch_factor(1 + count % 2).persistent();
                let loader = loader.clone().workers(workers);
                prop_assert_eq!(&all(&loader), &expected, "{} workers", count);
                prop_assert_eq!(&all(&loader), &expected, "{} workers again", count);
            }
        }
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
                seen.extend(of_all(&loader, world, |l| l.batches(epoch, start).take(part)));
                let batches = loader.batches(epoch, start).count().min(part);
                place = loader.place_in(epoch, start + batches);
                // A run resumed with the same number of ranks is at that batch, too.
                prop_assert_eq!(loader.batches(epoch, start + batches).count(),
                    loader.batches(epoch, start).count() - batches);
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
            parts in prop::array::uniform3(0usize..20), infinite: bool,
        ) {
            let (mut seen, mut place) = (Vec::new(), 0);
            for ((world, size), part) in worlds.into_iter().zip(sizes).zip(parts) {
                let mut loader = loader(len, size, 0, world);
                loader = if infinite { loader.infinite() } else { loader };
                loader.begin_at(place);
                seen.extend(of_all(&loader, world, |l| l.endless(0).take(part)));
                place = loader.place_after(part);
            }
            let whole = loader(len, 1, 0, 1);
            let order = (0..=place / len).flat_map(|pass| whole.batches(pass, 0)).flat_map(values);
            let mut expected = vec![0i64; len];
            order.take(place).for_each(|i| expected[i as usize] += 1);
            seen.iter().for_each(|i| expected[*i as usize] -= 1);
            // Additional samples pad the last round of a pass.
            prop_assert!(expected.iter().all(|n| *n <= 0), "{expected:?}");
            let padding: i64 = expected.iter().map(|n| -n).sum();
            let most = if infinite { 0 } else { 3 * (place / len) as i64 };
            prop_assert!(padding <= most, "{padding}");
        }

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
