//! `DataLoader`: batches of a data set, in a sampler's order.
//!
//! [`builder`] has the options, [`position`] the place that a loader resumes at, [`elastic`] the
//! arithmetic of other numbers of ranks and batch sizes.

mod builder;
mod elastic;
mod position;

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use parking_lot::Mutex;

pub use self::builder::DataLoaderBuilder;
pub use self::elastic::IterScale;
use self::position::Progress;
pub use self::position::{DataPosition, Layout};
use crate::dataset::collate;
use crate::workers::{Workers, catch};
use crate::{Batch, BoxError, Dataset, DefaultSampler, Draw, Error, Result, Sample};

/// Creates a batch of samples. An [`Error::Collate`] is reported with the sample's index in the
/// data set.
#[doc(alias = "collate_fn")]
pub type Collate = Arc<dyn Fn(Vec<Sample>) -> Result<Batch, BoxError> + Send + Sync>;

/// Divides a sampler's indices into batches and requests each from the data set, ahead of time with
/// [`workers`](DataLoaderBuilder::workers).
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
    /// Shared with the iterators, which move it.
    progress: Arc<Mutex<Progress>>,
}

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
    /// Options of a loader of a data set in a sampler's order: batches of one sample, which load on
    /// the calling thread.
    pub fn builder(dataset: Arc<dyn Dataset>, sampler: DefaultSampler) -> DataLoaderBuilder {
        DataLoaderBuilder(Self {
            dataset,
            collate: None,
            workers: Workers::new(0),
            sampler,
            batch_size: 1,
            drop_last: false,
            infinite: false,
            place: 0,
            progress: Arc::default(),
        })
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

    /// Loads a batch for each item, in order, and passes each to `returns`; a batch that times out
    /// is not passed.
    fn load_all<F: FnMut(&Result<Batch>)>(
        &self,
        draws: Box<dyn Iterator<Item = Vec<Draw>> + Send>,
        mut returns: F,
    ) -> impl Iterator<Item = Result<Batch>> + use<F> {
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
                returns(&batch);
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

    /// Returns this rank's samples in the rest of a pass.
    fn indices(&self, pass: usize) -> Vec<usize> {
        self.sampler.rest(pass, self.dealt(pass))
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

    /// Whether the batches of an epoch do not end.
    #[must_use]
    pub const fn is_infinite(&self) -> bool {
        self.infinite
    }

    /// Samples per batch and rank.
    #[must_use]
    pub fn batch_size(&self) -> usize {
        self.batch_size
    }

    /// Changes the seed of the sampler, and restarts from the beginning: of the rest of the data,
    /// if the loader has resumed with another number of ranks.
    pub fn set_seed(&mut self, seed: u64) {
        self.sampler.seed = seed;
        self.progress = Arc::default();
    }

    /// Returns the batches of `epoch`; after [`resume`](Self::resume), of the epoch of the position
    /// only the rest, once; if it has resumed with another number of ranks, always the rest, and of
    /// earlier epochs nothing. A loader that is [infinite](DataLoaderBuilder::infinite) returns
    /// endless batches after its position.
    ///
    /// Each batch returned moves [`position`](Self::position).
    pub fn batches(&self, epoch: usize) -> impl Iterator<Item = Result<Batch>> + use<> {
        let range = self.batch_range(epoch);
        let moves = self.moves(epoch, range.start);
        let draws = match self.infinite {
            true => self.endless_draws(range.start),
            false => self.epoch_draws(epoch, range),
        };
        self.load_all(draws, moves)
    }

    /// Indices of the batches that [`batches`](Self::batches) returns in this epoch.
    pub fn batch_range(&self, epoch: usize) -> Range<usize> {
        let start = self.start_of(epoch);
        if self.infinite { start..usize::MAX } else { self.range_from(epoch, start) }
    }

    fn range_from(&self, epoch: usize, start: usize) -> Range<usize> {
        let first = self.first_batch(epoch);
        start.max(first)..first + self.count(self.sampler.len - self.dealt(epoch))
    }

    /// Returns the batches of `epoch` from batch `start` on, as [`batches`](Self::batches). Skipped
    /// batches are not loaded.
    pub fn batches_from(
        &self,
        epoch: usize,
        start: usize,
    ) -> impl Iterator<Item = Result<Batch>> + use<> {
        let range = self.range_from(epoch, start);
        let moves = self.moves(epoch, range.start);
        self.load_all(self.epoch_draws(epoch, range), moves)
    }

    fn epoch_draws(
        &self,
        epoch: usize,
        range: Range<usize>,
    ) -> Box<dyn Iterator<Item = Vec<Draw>> + Send> {
        let first = self.first_batch(epoch);
        let mut order = Order { loader: self.clone(), pass: None };
        Box::new(range.map(move |k| order.batch(epoch, k - first)))
    }

    /// Returns endless batches, pass after pass over the data set, from batch `start` on. The cost
    /// does not depend on `start`. They do not move [`position`](Self::position).
    pub fn endless(&self, start: usize) -> impl Iterator<Item = Result<Batch>> + use<> {
        self.load_all(self.endless_draws(start), |_: &_| ())
    }

    fn endless_draws(&self, start: usize) -> Box<dyn Iterator<Item = Vec<Draw>> + Send> {
        let loader = self.clone();
        // With an infinite sampler the global order, of which this rank takes every `world_size`th
        // sample.
        let whole = Layout { world_size: 1, ..self.layout() };
        let dealer = if self.infinite { self.with(whole, 0) } else { self.clone() };
        let mut order = Order { loader: dealer, pass: None };
        // Without rounding up a rank may have no batch in any pass.
        let has_none = !self.infinite && self.batches_per_epoch() == 0;
        let end = if has_none { start } else { usize::MAX };
        Box::new((start..end).map(move |k| {
            if loader.infinite {
                return loader.cut(&mut order, k);
            }
            let (pass, k) = loader.locate(k);
            order.batch(pass, k)
        }))
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

    pub(super) fn loader(
        len: usize,
        batch_size: usize,
        rank: usize,
        world_size: usize,
    ) -> DataLoader {
        let sampler = dealt(len, rank, world_size);
        let builder = DataLoader::builder(Arc::new(Counting(len)), sampler);
        builder.batch_size(batch_size).build().unwrap()
    }

    pub(super) fn infinite(loader: DataLoader) -> DataLoader {
        DataLoader { infinite: true, ..loader }
    }

    pub(super) fn values(batch: Result<Batch>) -> Vec<i64> {
        match batch.unwrap().get("i").unwrap().data() {
            ArrayData::I64(values) => values.clone(),
            _ => panic!("not the data set's"),
        }
    }

    /// Each rank's indices, without shuffling, because MMEngine's permutations are PyTorch's.
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
                    let builder = DataLoader::builder(Arc::new(Counting(len)), sampler);
                    let got: Vec<i64> = match kind {
                        "default" => builder.build().unwrap().batches(0).flat_map(values).collect(),
                        _ => {
                            let batches = builder.infinite().build().unwrap().endless(0);
                            batches.take(expected.len()).flat_map(values).collect()
                        }
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
    fn sizes_that_would_overflow_are_refused() {
        for (batch_size, world_size, rank) in
            [(usize::MAX, 1, 0), (usize::MAX / 2, 3, 0), (1, usize::MAX, 0), (0, 1, 0), (1, 0, 0)]
        {
            let sampler = dealt(10, rank, world_size);
            let builder = DataLoader::builder(Arc::new(Counting(10)), sampler);
            let made = builder.batch_size(batch_size).build();
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
        assert!(infinite(loader.clone()).endless(far).next().unwrap().is_ok());
        assert!(loader.batches_from(far, loader.batches_per_epoch() - 1).next().unwrap().is_ok());
        assert_eq!(asked.load(Ordering::Relaxed), 3);
    }

    /// Random samples, one of which returns an error and one panics.
    pub(super) struct Faulty {
        pub(super) len: usize,
        /// Index of the sample with an error, and of the one that panics.
        pub(super) bad: [usize; 2],
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
            let builder = DataLoader::builder(dataset, sampler).batch_size(5);
            let loader = builder.workers(Workers::new(count)).build().unwrap();
            let batches: Vec<_> = loader.batches(0).map(text).collect();
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
        let timeout = std::time::Duration::from_millis(20);
        let builder = DataLoader::builder(dataset, sampler);
        let loader = builder.workers(Workers::new(1).timeout(timeout)).build().unwrap();
        let mut batches = loader.batches(0);
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
        let sampler = DefaultSampler { shuffle: false, ..dealt(9, 0, 1) };
        let builder = DataLoader::builder(Arc::new(Counting(9)), sampler).batch_size(4);
        let odd = |samples: Vec<Sample>| {
            let text = "it is odd".to_owned();
            match samples.len() {
                4 => Ok(Batch::new().with("n", Array::scalar(4_i64))),
                _ => Err(Error::Collate { position: 0, text }.into()),
            }
        };
        let loader = builder.collate(odd).build().unwrap();
        let batches: Vec<_> = loader.batches(0).map(text).collect();
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
            is_infinite: bool, bad in prop::array::uniform2(0usize..60), place in 0usize..50,
        ) {
            let dataset = Arc::new(Faulty { len, bad });
            let mut loader = DataLoader { dataset, ..loader(len, size, world - 1, world) };
            loader.begin_at(place);
            let loader = if is_infinite { infinite(loader) } else { loader };
            let all = |loader: &DataLoader| {
                let epoch = loader.batches_from(1, start).map(text);
                epoch.chain(loader.endless(start).take(9).map(text)).collect::<Vec<_>>()
            };
            let expected = all(&loader);
            for count in [1, 2, 7] {
                let workers = Workers::new(count).prefetch_factor(1 + count % 2).persistent();
                let loader = DataLoader { workers, ..loader.clone() };
                prop_assert_eq!(&all(&loader), &expected, "{} workers", count);
                prop_assert_eq!(&all(&loader), &expected, "{} workers again", count);
            }
        }
    }

    proptest! {
        #[test]
        fn endless_batches_are_those_of_one_epoch_after_another(
            len in 1usize..40, size in 1usize..7, world in 1usize..4, start in 0usize..60,
        ) {
            let loader = loader(len, size, world - 1, world);
            let per_epoch = loader.batches_per_epoch();
            let epochs = (0..=(start + 9) / per_epoch).flat_map(|e| loader.batches(e));
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
                let got = infinite(loader(len, size, rank, world)).endless(start).take(3);
                for (k, batch) in got.enumerate() {
                    let at = (start + k) * size;
                    let expected: Vec<_> = mine[at..at + size].iter().map(|i| **i as i64).collect();
                    prop_assert_eq!(values(batch), expected);
                }
            }
        }
    }
}
