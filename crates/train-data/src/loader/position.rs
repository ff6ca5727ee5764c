//! `DataPosition`: a place in the epochs of a loader, to resume from; `Layout`, the properties that
//! determine the batches.

use std::sync::Arc;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use super::builder::MOST_SAMPLES;
use super::{Batch, DataLoader};
use crate::{DefaultSampler, Error, Result};

/// Position of a loader in its epochs: a few numbers, to be saved with the model. It is the same on
/// all ranks that have returned as many batches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DataPosition {
    epoch: usize,
    /// Index of the next batch, in the layout.
    batch: usize,
    /// Number of samples, over all passes, that were taken before the layout began.
    place: usize,
    layout: Layout,
}

impl DataPosition {
    /// The epoch of the last batch returned.
    #[must_use]
    pub const fn epoch(&self) -> usize {
        self.epoch
    }

    /// Index in the epoch of the batch after the last one returned; the number of its batches if
    /// the epoch is complete.
    #[must_use]
    pub const fn batch(&self) -> usize {
        self.batch
    }

    /// Returns the layout of the loader.
    #[must_use]
    pub const fn layout(&self) -> Layout {
        self.layout
    }

    /// Returns whether all numbers are those of a loader, so that no product of them overflows.
    fn is_valid(&self) -> bool {
        let Layout { samples, world_size, batch_size, infinite, .. } = self.layout;
        let taken = batch_size.checked_mul(world_size).filter(|n| (1..=MOST_SAMPLES).contains(n));
        let [passes, size] = if infinite {
            [Some(self.batch), taken]
        } else {
            [self.epoch.checked_add(1), Some(samples)]
        };
        let product = passes.zip(size).and_then(|(passes, size)| passes.checked_mul(size));
        taken.is_some() && product.is_some_and(|n| n.checked_add(self.place).is_some())
    }
}

/// Progress of a loader's iterators.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Progress {
    epoch: usize,
    batch: usize,
    /// Whether no batch has been returned since the loader resumed.
    is_resumed: bool,
}

impl DataLoader {
    /// Returns the position after the last batch returned by an iterator of
    /// [`batches`](Self::batches), regardless of prefetched ones. Clones of the loader share it.
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # use train_data::{Array, BoxError, DataLoader, Dataset, DefaultSampler, Sample, SampleRng};
    /// # struct Points;
    /// # impl Dataset for Points {
    /// #     fn len(&self) -> usize {
    /// #         100
    /// #     }
    /// #     fn sample(&self, index: usize, _: &mut SampleRng) -> Result<Sample, BoxError> {
    /// #         Ok(Sample::new().with("x", Array::scalar(index as i64)))
    /// #     }
    /// # }
    /// let sampler = DefaultSampler::new(100);
    /// let builder = || DataLoader::builder(Arc::new(Points), sampler).batch_size(8);
    /// let loader = builder().build()?;
    /// let mut batches = loader.batches(0);
    /// batches.next().ok_or("no batch")??;
    /// // A program saves the position beside its model.
    /// let saved = serde_json::to_string(&loader.position())?;
    /// let second = batches.next().ok_or("no batch")??;
    ///
    /// let mut resumed = builder().build()?;
    /// resumed.resume(serde_json::from_str(&saved)?)?;
    /// let start = resumed.position().epoch();
    /// assert_eq!(resumed.batches(start).next().ok_or("no batch")??, second);
    /// # Ok::<(), BoxError>(())
    /// ```
    #[doc(alias("state_dict", "StatefulDataLoader"))]
    #[must_use]
    pub fn position(&self) -> DataPosition {
        let Progress { epoch, batch, .. } = *self.progress.lock();
        DataPosition { epoch, batch, place: self.place, layout: self.layout() }
    }

    /// Resumes at a position of a loader of the same data set: [`batches`](Self::batches) of its
    /// epoch returns the batches after it. With another number of ranks it returns the samples of
    /// the epoch that no rank has taken; the position may be that of any rank. The sampler must
    /// round up.
    ///
    /// # Errors
    ///
    /// [`Error::Position`] if number of samples, batch size, seed, or another property of the
    /// [`Layout`] but the number of ranks differ. The loader is unchanged then.
    #[doc(alias = "load_state_dict")]
    pub fn resume(&mut self, position: DataPosition) -> Result<()> {
        let DataPosition { epoch, batch, place, layout } = position;
        let now = self.layout();
        now.check(layout)?;
        if layout.world_size != now.world_size && !now.round_up {
            let text = "without `round_up` ranks take different numbers of samples, so it does not say for all of them \
                        what is left: resume with as many ranks as before";
            return Err(Error::Position(text.to_owned()));
        }
        let theirs = self.with(layout, place);
        if !position.is_valid() || (!now.infinite && batch > theirs.range_from(epoch, 0).end) {
            let text = format!("no loader has {position:?}: was it saved by another program?");
            return Err(Error::Position(text));
        }
        let (place, batch) = match now.infinite {
            _ if layout == now => (place, batch),
            true => (theirs.place_after(batch), 0),
            false => {
                let place = theirs.place_in(epoch, batch);
                (place, Self { place, ..self.clone() }.first_batch(epoch))
            }
        };
        self.place = place;
        self.progress = Arc::new(Mutex::new(Progress { epoch, batch, is_resumed: true }));
        Ok(())
    }

    /// Index of the batch that the batches of an epoch begin with.
    pub(super) fn start_of(&self, epoch: usize) -> usize {
        let progress = *self.progress.lock();
        let goes_on = self.infinite || (progress.is_resumed && progress.epoch == epoch);
        if goes_on { progress.batch } else { 0 }
    }

    /// Returns a function that moves the position with each batch returned, from batch `batch` of
    /// an epoch on; one that failed is passed with the next.
    pub(super) fn moves(
        &self,
        epoch: usize,
        mut batch: usize,
    ) -> impl FnMut(&Result<Batch>) + use<> {
        let progress = Arc::clone(&self.progress);
        move |loaded| {
            batch += 1;
            if loaded.is_ok() {
                *progress.lock() = Progress { epoch, batch, is_resumed: false };
            }
        }
    }

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

    /// Returns an error for a position of a layout that differs in more than the number of ranks.
    fn check(self, saved: Self) -> Result<()> {
        let fields = |layout: Self| {
            let Self { samples, world_size: _, batch_size, drop_last, .. } = layout;
            let Self { shuffle, infinite, seed, round_up, .. } = layout;
            [
                ("samples", samples.to_string()),
                ("batch_size", batch_size.to_string()),
                ("drop_last", drop_last.to_string()),
                ("shuffle", shuffle.to_string()),
                ("infinite", infinite.to_string()),
                ("seed", seed.to_string()),
                ("round_up", round_up.to_string()),
            ]
        };
        let fields =
            fields(saved).into_iter().zip(fields(self)).filter(|(saved, now)| saved != now);
        let text =
            fields.map(|((what, saved), (_, now))| format!("{what} {saved}, this loader {now}"));
        let text = text.collect::<Vec<_>>().join("; ");
        if text.is_empty() {
            return Ok(());
        }
        let is_batch = text.contains("batch_size");
        let each = if is_batch { " (`batch_size` counts one rank's samples)" } else { "" };
        Err(Error::Position(format!(
            "its loader had {text}{each}: set it as before, or begin anew"
        )))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::Workers;
    use crate::loader::tests::{Faulty, infinite, loader, values};

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
        let first = |loader: &DataLoader| values(loader.batches_from(1, 0).next().unwrap());
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

    /// Returns at most `most` batches of the epochs below `epochs`.
    fn run(loader: &DataLoader, epochs: usize, most: usize) -> Vec<Vec<i64>> {
        let mut seen = Vec::new();
        for epoch in loader.position().epoch()..epochs {
            let left = most - seen.len();
            seen.extend(loader.batches(epoch).take(left).map(values));
        }
        seen
    }

    /// Saves and reads a position.
    fn saved(loader: &DataLoader) -> DataPosition {
        serde_json::from_str(&serde_json::to_string(&loader.position()).unwrap()).unwrap()
    }

    #[test]
    fn an_interrupted_loader_resumes_with_the_same_batches() {
        for is_infinite in [false, true] {
            let make = |workers| {
                let made = loader(23, 4, 1, 2);
                DataLoader { infinite: is_infinite, workers: Workers::new(workers), ..made }
            };
            let (epochs, most) = if is_infinite { (1, 9) } else { (3, usize::MAX) };
            let whole = run(&make(0), epochs, most);
            assert_eq!(whole.len(), 9);
            for until in 0..=9 {
                for workers in [0, 2] {
                    let first = make(workers);
                    assert_eq!(run(&first, epochs, until), whole[..until]);
                    let mut second = make(2 - workers);
                    second.resume(saved(&first)).unwrap();
                    assert_eq!(second.position(), first.position());
                    let rest = if is_infinite { 9 - until } else { usize::MAX };
                    assert_eq!(run(&second, epochs, rest), whole[until..], "{until}");
                }
            }
        }
    }

    #[test]
    fn only_the_first_batches_after_a_resume_are_the_rest_of_an_epoch() {
        let mut loader = loader(20, 4, 0, 1);
        let whole: Vec<_> = loader.batches(1).map(values).collect();
        assert_eq!((loader.position().epoch(), loader.position().batch()), (1, 5));
        let mut batches = loader.batches(1);
        assert_eq!(values(batches.next().unwrap()), whole[0]);
        let position = loader.position();
        loader.resume(position).unwrap();
        assert_eq!(loader.batch_range(1), 1..5);
        // An iterator from before the resume no longer moves the position.
        drop(batches.next());
        assert_eq!(loader.position(), position);
        assert_eq!(loader.batches(1).map(values).collect::<Vec<_>>(), whole[1..]);
        assert_eq!(loader.batches(1).map(values).collect::<Vec<_>>(), whole);
        loader.resume(position).unwrap();
        assert_eq!(loader.batches(0).count(), 5);
        assert_eq!((loader.position().epoch(), loader.position().batch()), (0, 5));
    }

    #[test]
    fn a_failed_batch_does_not_move_the_position() {
        let dataset = Arc::new(Faulty { len: 12, bad: [4, 12] });
        let sampler = DefaultSampler { shuffle: false, ..DefaultSampler::new(12) };
        let loader = DataLoader::builder(dataset, sampler).batch_size(3).build().unwrap();
        let mut batches = loader.batches(0);
        for (is_ok, batch) in [(true, 1), (false, 1), (true, 3), (true, 4)] {
            assert_eq!(batches.next().unwrap().is_ok(), is_ok);
            assert_eq!(loader.position().batch(), batch);
        }
    }

    #[test]
    fn a_position_of_another_loader_is_refused_by_what_differs() {
        let own = loader(40, 4, 0, 2);
        let with = |change: fn(&mut DataLoader)| {
            let mut loader = own.clone();
            change(&mut loader);
            loader.position()
        };
        for (position, says) in [
            (with(|l| l.sampler.len = 39), "its loader had samples 39, this loader 40: set it"),
            (
                with(|l| l.batch_size = 5),
                "its loader had batch_size 5, this loader 4 (`batch_size` counts one rank's samples): ",
            ),
            (with(|l| l.drop_last = true), "its loader had drop_last true, this loader false: "),
            (with(|l| l.infinite = true), "its loader had infinite true, this loader false: "),
            (
                with(|l| l.sampler.round_up = false),
                "its loader had round_up false, this loader true: ",
            ),
            (
                with(|l| (l.sampler.shuffle, l.sampler.seed) = (false, 4)),
                "its loader had shuffle false, this loader true; seed 4, this loader 3: ",
            ),
        ] {
            let mut loader = loader(40, 4, 0, 2);
            assert_eq!(run(&loader, 1, 2).len(), 2);
            let before = loader.position();
            let error = loader.resume(position).unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
            assert_eq!(loader.position(), before);
        }
        // Ranks have taken different numbers of samples.
        let mut uneven = own.clone();
        uneven.sampler.round_up = false;
        let position = uneven.position();
        uneven.resume(position).unwrap();
        uneven.sampler.world_size = 3;
        let error = uneven.resume(position).unwrap_err().to_string();
        assert!(error.contains("resume with as many ranks as before"), "{error}");
    }

    #[test]
    fn a_position_of_no_loader_is_refused() {
        let mut loader = loader(40, 4, 0, 2);
        let own = loader.position();
        let world_size =
            |world_size| DataPosition { layout: Layout { world_size, ..own.layout }, ..own };
        for position in [
            DataPosition { batch: 6, ..own },
            DataPosition { batch: usize::MAX, ..own },
            DataPosition { epoch: usize::MAX, ..own },
            DataPosition { epoch: usize::MAX / 40, ..own },
            DataPosition { place: usize::MAX, ..own },
            world_size(0),
            world_size(usize::MAX),
            world_size(MOST_SAMPLES),
        ] {
            let error = loader.resume(position).unwrap_err().to_string();
            assert!(error.contains("no loader has DataPosition"), "{error}");
        }
        let mut endless = infinite(loader);
        let position = DataPosition { batch: usize::MAX / 8 + 1, ..endless.position() };
        assert!(endless.resume(position).is_err());
    }

    proptest! {
        /// Interrupts a run, each time with another number of ranks to go on: every sample of an
        /// epoch is used, and only samples that pad its end are used twice.
        #[test]
        fn an_epoch_resumes_on_another_number_of_ranks(
            len in 4usize..60, size in 1usize..5, worlds in prop::array::uniform3(1usize..5),
            parts in prop::array::uniform2(0usize..12), is_infinite: bool,
        ) {
            let epochs = if is_infinite { 1 } else { 3 };
            let (mut counts, mut samples) = (vec![0; len], 0);
            let mut position: Option<DataPosition> = None;
            for (at, world) in worlds.into_iter().enumerate() {
                let most = parts.get(at).copied().unwrap_or(if is_infinite { 9 } else { usize::MAX });
                let mut reached = Vec::new();
                for rank in 0..world {
                    let made = loader(len, size, rank, world);
                    let mut loader = DataLoader { infinite: is_infinite, ..made };
                    if let Some(position) = position {
                        loader.resume(position).unwrap();
                    }
                    for i in run(&loader, epochs, most).concat() {
                        counts[i as usize] += 1;
                        samples += 1;
                    }
                    reached.push(saved(&loader));
                }
                prop_assert!(reached.iter().all(|other| *other == reached[0]), "{reached:?}");
                position = Some(reached[0]);
            }
            let [least, most] = [counts.iter().min(), counts.iter().max()].map(|n| *n.unwrap());
            if is_infinite {
                prop_assert!(most - least <= 1, "{counts:?}");
            } else {
                prop_assert!(least >= epochs, "{counts:?}");
                // At most three samples pad an epoch.
                prop_assert!(samples <= epochs * (len + 3), "{samples} of {len}");
            }
        }
    }
}
