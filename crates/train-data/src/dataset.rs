//! `Dataset`: a number of samples, created by index; `Draw`, a request for a sample.

use std::sync::Arc;

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng;

use crate::workers::{IS_STOPPED, catch, is_stopped};
use crate::{Batch, BoxError, Error, Sample};

/// Random numbers of a sample, equal on every machine and in every version. It implements the
/// traits of `rand` 0.10: `use rand::RngExt` for `random_range` and others.
pub type SampleRng = ChaCha8Rng;

/// A finite, indexed set of samples.
///
/// Selection, order and distribution of samples over ranks are the sampler's task.
pub trait Dataset: Send + Sync {
    /// Name in logs and errors; by default that of the type.
    fn name(&self) -> &str {
        short_name::<Self>()
    }

    /// Number of samples.
    fn len(&self) -> usize;

    /// Creates sample `index`. All randomness must come from `random`, so that a resumed run gets
    /// the same sample.
    ///
    /// # Errors
    ///
    /// Those of the data set: an index that is not below [`len`](Self::len), a file that cannot be
    /// read.
    fn sample(&self, index: usize, random: &mut SampleRng) -> Result<Sample, BoxError>;

    /// Creates a batch of these samples, in this order: by [`sample`](Self::sample), then
    /// [`Batch::collate`]. A data set that creates whole batches faster may override this.
    ///
    /// # Errors
    ///
    /// Those of the samples; samples of different shapes.
    fn batch(&self, draws: &[Draw]) -> Result<Batch, BoxError> {
        collate(self, draws, |samples| Ok(Batch::collate(samples)?))
    }

    /// Changes a batch of these samples, created by [`batch`](Self::batch) or by a loader's collate
    /// function.
    ///
    /// # Errors
    ///
    /// Those of the data set.
    fn finish(&self, batch: Batch, draws: &[Draw]) -> Result<Batch, BoxError> {
        let _ = draws;
        Ok(batch)
    }

    /// Number of random batch transforms in [`finish`](Self::finish). One that is added around them
    /// draws other random numbers; a data set that wraps another one forwards this.
    fn batch_transforms(&self) -> usize {
        0
    }

    /// True if there is no sample.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Name of a type without path and type arguments; for a closure, that of its function.
pub(crate) fn short_name<T: ?Sized>() -> &'static str {
    let path = std::any::type_name::<T>().trim_end_matches("::{{closure}}");
    let path = path.split('<').next().unwrap_or(path);
    path.rsplit("::").next().unwrap_or(path)
}

/// Creates samples, and a batch of them by `function`. Errors and panics name the data set and the
/// sample.
pub(crate) fn collate(
    dataset: &(impl Dataset + ?Sized),
    draws: &[Draw],
    function: impl FnOnce(Vec<Sample>) -> Result<Batch, BoxError>,
) -> Result<Batch, BoxError> {
    let error = |index, source| Error::Sample { dataset: dataset.name().into(), index, source };
    let sample = |draw: &Draw| {
        if is_stopped() {
            return Err(error(draw.index, IS_STOPPED.into()));
        }
        let sample = catch(|| dataset.sample(draw.index, &mut draw.random()));
        sample.map_err(BoxError::from).flatten().map_err(|e| error(draw.index, e))
    };
    let samples = draws.iter().map(sample).collect::<Result<_, _>>()?;
    function(samples).map_err(|source| match source.downcast_ref() {
        Some(&Error::Collate { position, .. }) if position < draws.len() => {
            error(draws[position].index, source).into()
        }
        _ => source,
    })
}

/// A shared data set.
impl<D: Dataset + ?Sized> Dataset for Arc<D> {
    fn name(&self) -> &str {
        (**self).name()
    }

    fn len(&self) -> usize {
        (**self).len()
    }

    fn sample(&self, index: usize, random: &mut SampleRng) -> Result<Sample, BoxError> {
        (**self).sample(index, random)
    }

    fn batch(&self, draws: &[Draw]) -> Result<Batch, BoxError> {
        (**self).batch(draws)
    }

    fn finish(&self, batch: Batch, draws: &[Draw]) -> Result<Batch, BoxError> {
        (**self).finish(batch, draws)
    }

    fn batch_transforms(&self) -> usize {
        (**self).batch_transforms()
    }
}

/// Samples in memory.
impl Dataset for Vec<Sample> {
    fn len(&self) -> usize {
        self.len()
    }

    fn sample(&self, index: usize, _: &mut SampleRng) -> Result<Sample, BoxError> {
        let sample = self.get(index).cloned();
        sample.ok_or_else(|| format!("there are only {} samples", self.len()).into())
    }
}

/// A request for a sample, with the source of its random numbers: a function of seed, pass and
/// index only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Draw {
    /// Index of the sample.
    pub index: usize,
    /// Seed of the run.
    pub seed: u64,
    /// Number of the pass over the data set.
    pub pass: usize,
}

impl Draw {
    /// Returns the sample's random numbers, from their start.
    #[must_use]
    pub fn random(&self) -> SampleRng {
        let mut key = *b"........ ........ samples of ...";
        key[..8].copy_from_slice(&self.seed.to_le_bytes());
        key[8..16].copy_from_slice(&(self.pass as u64).to_le_bytes());
        let mut random = SampleRng::from_seed(key);
        random.set_stream(self.index as u64);
        random
    }
}

/// Draws sample `index` with seed 0 in pass 0.
impl From<usize> for Draw {
    fn from(index: usize) -> Self {
        Self { index, seed: 0, pass: 0 }
    }
}

#[cfg(test)]
mod tests {
    use rand_chacha::rand_core::Rng;

    use super::*;

    #[test]
    fn names_have_neither_paths_nor_type_arguments() {
        struct Wrapper<T>(std::marker::PhantomData<T>);
        impl<T: Send + Sync> Dataset for Wrapper<T> {
            fn len(&self) -> usize {
                0
            }

            fn sample(&self, _: usize, _: &mut SampleRng) -> Result<Sample, BoxError> {
                Err("no samples".into())
            }
        }
        assert_eq!(Wrapper::<Vec<Draw>>(std::marker::PhantomData).name(), "Wrapper");
    }

    #[test]
    fn samples_in_memory_are_a_data_set() {
        let sample = |x: i64| Sample::new().with("x", crate::Array::scalar(x));
        let data: &dyn Dataset = &vec![sample(3), sample(5)];
        assert_eq!((data.len(), data.name()), (2, "Vec"));
        assert_eq!(data.sample(1, &mut Draw::from(1).random()).unwrap(), sample(5));
        let error = data.batch(&[Draw::from(2)]).unwrap_err().to_string();
        assert!(error.ends_with("sample 2: there are only 2 samples"), "{error}");
    }

    /// Notes the number that it draws in a field of the batch.
    struct Note(&'static str);

    impl crate::transforms::BatchTransform for Note {
        fn apply(&self, mut batch: Batch, random: &mut SampleRng) -> Result<Batch, BoxError> {
            batch.set(self.0, crate::Array::scalar(random.next_u64() as i64));
            Ok(batch)
        }
    }

    #[test]
    fn batch_transforms_of_nested_data_sets_draw_different_numbers() {
        use crate::transforms::{Pipeline, Transformed};

        struct One;
        impl Dataset for One {
            fn len(&self) -> usize {
                1
            }

            fn sample(&self, _: usize, _: &mut SampleRng) -> Result<Sample, BoxError> {
                Ok(Sample::new().with("x", crate::Array::scalar(1.0_f32)))
            }
        }
        let inner = Transformed::new(One, Pipeline::new()).with_batch_transform(Note("a"));
        let draws = [Draw { index: 0, seed: 3, pass: 1 }];
        let alone = inner.finish(Batch::new(), &draws).unwrap();
        // A data set without batch transforms in between changes nothing.
        let between = Transformed::new(Arc::new(inner), Pipeline::new());
        let outer = Transformed::new(between, Pipeline::new()).with_batch_transform(Note("b"));
        let outer = outer.with_batch_transform(Note("c"));
        let whole = Transformed::new(outer, Pipeline::new()).with_batch_transform(Note("d"));
        assert_eq!(whole.batch_transforms(), 4);
        let batch = whole.finish(Batch::new(), &draws).unwrap();
        let number = |name| batch.get(name).unwrap().clone();
        assert_eq!(number("a"), *alone.get("a").unwrap());
        let numbers = ["a", "b", "c", "d"].map(|name| format!("{:?}", number(name)));
        let different: std::collections::HashSet<_> = numbers.iter().collect();
        assert_eq!(different.len(), 4, "{numbers:?}");
    }

    #[test]
    fn random_numbers_are_those_of_seed_pass_and_index() {
        let draw = Draw { index: 3, seed: 1, pass: 2 };
        let first = |draw: Draw| draw.random().next_u64();
        assert_eq!(first(draw), first(draw));
        // Checkpoints depend on these numbers.
        assert_eq!(first(draw), 12_638_750_188_559_902_989);
        for other in [Draw { index: 4, ..draw }, Draw { seed: 2, ..draw }, Draw { pass: 1, ..draw }]
        {
            assert_ne!(first(draw), first(other));
        }
    }
}
