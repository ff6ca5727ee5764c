//! [`Resumable`]: the epochs and batches of a run, from where its checkpoint says.

use std::fmt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use train_data::{Batch, DataLoader, DataPosition, StreamLoader, StreamPosition};
use train_step::BoxError;

use crate::trainers::Trainers;
use crate::{Error, Parts, Result, Trainer};

/// The epochs and batches of a run that goes on where its checkpoint says: it saves after each
/// epoch, and [every](Self::every) so many batches within one. Made by [`Trainer::resumable`] and
/// [`Trainer::resumable_steps`], and by those of [`Parts`].
pub struct Resumable {
    data: TrainingData,
    path: PathBuf,
    end: End,
    /// The next epoch, or the present one.
    epoch: usize,
    every: Option<usize>,
    /// Batches since the last save.
    unsaved: usize,
    /// The batches of the present epoch; `None` between two epochs, and of a stream.
    batches: Option<Batches>,
    stop: Option<Box<dyn Fn() -> bool + Send>>,
    is_stopped: bool,
    patience: Option<usize>,
    best: Option<Best>,
}

type Batches = Box<dyn Iterator<Item = train_data::Result<Batch>> + Send>;

#[derive(Clone, Copy, Debug)]
enum End {
    Epochs(usize),
    Steps(u64),
}

/// The data of a [`Resumable`] run: a [`DataLoader`] or a [`StreamLoader`].
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "there is one in a run")]
pub enum TrainingData {
    /// Samples with numbers, in epochs.
    Loader(DataLoader),
    /// A stream that repeats.
    Stream(StreamLoader),
}

impl From<DataLoader> for TrainingData {
    fn from(loader: DataLoader) -> Self {
        Self::Loader(loader)
    }
}

impl From<StreamLoader> for TrainingData {
    fn from(stream: StreamLoader) -> Self {
        Self::Stream(stream)
    }
}

/// Each rank's own data in a checkpoint. A loop that is written out reads the position alone.
#[derive(Clone, Copy, Serialize, Deserialize)]
struct Own {
    #[serde(flatten)]
    position: Position,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    best: Option<Best>,
}

#[derive(Clone, Copy, Serialize, Deserialize)]
#[serde(untagged)]
enum Position {
    Loader(DataPosition),
    Stream(StreamPosition),
}

/// The values given to [`Resumable::keep_best`].
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Best {
    /// The best of them; absent while all are NaN.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    value: Option<f64>,
    /// Number of values since it.
    since: usize,
    /// Number of applied steps at the last value.
    steps: u64,
}

impl TrainingData {
    fn position(&self) -> Position {
        match self {
            Self::Loader(loader) => Position::Loader(loader.position()),
            Self::Stream(stream) => Position::Stream(stream.position()),
        }
    }

    /// Resumes at the positions of all ranks that saved, as this rank.
    fn resume(&mut self, all: &[Own], rank: usize) -> Result<(), BoxError> {
        let none = "it was saved by `save`, without a position in the data: save it by `save_with` with \
                    `&loader.position()`, or take another file";
        // All ranks have taken equally many batches of a loader.
        let first = all.first().ok_or(none)?.position;
        match (self, first, all.get(rank).map(|own| own.position)) {
            (Self::Loader(loader), Position::Loader(position), _) => Ok(loader.resume(position)?),
            (Self::Stream(stream), Position::Stream(_), Some(Position::Stream(position))) => {
                Ok(stream.resume(position)?)
            }
            (Self::Stream(stream), Position::Stream(other), _) => Ok(stream.resume(other)?),
            (Self::Loader(_), ..) => {
                Err("its position is one in a stream, and this run has a loader".into())
            }
            (Self::Stream(_), ..) => {
                Err("its position is one in a loader, and this run has a stream".into())
            }
        }
    }
}

impl Trainer {
    /// Resumes from the file, if there is one, and returns the epochs and batches that are left of
    /// a run of `epochs`, whose loader has the [sampler](Self::sampler) of this trainer. Every rank
    /// must call it, and the methods of its result, equally often.
    ///
    /// A run that is killed at any moment and started again has the bits of an undisturbed one.
    /// Another number of ranks takes the samples of the epoch that no rank has taken. Code after
    /// an epoch's batches, such as a validation, belongs to the epoch: after a kill it is repeated.
    /// A longer run goes on by the schedule of the saved one, also past its end; another run that
    /// saves to the file is noticed at the next save.
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # use candle_core::{DType, Device, Module};
    /// # use candle_nn::VarMap;
    /// # use candle_ops::cross_entropy;
    /// # use candle_train::train_data::{Array, BoxError, DataLoader, Dataset, Sample, SampleRng};
    /// # use candle_train::{AdamWHyper, Trainer, seeded};
    /// # struct Points;
    /// # impl Dataset for Points {
    /// #     fn len(&self) -> usize {
    /// #         100
    /// #     }
    /// #     fn sample(&self, index: usize, _: &mut SampleRng) -> Result<Sample, BoxError> {
    /// #         let x = Array::new([2], vec![index as f32, 1.0])?;
    /// #         Ok(Sample::new().with("x", x).with("y", Array::scalar((index % 2) as i64)))
    /// #     }
    /// # }
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("run.safetensors");
    /// # let vars = VarMap::new();
    /// # let net = candle_nn::linear(2, 2, seeded(&vars, 1, DType::F32, &Device::Cpu))?;
    /// let mut train = Trainer::builder(&vars).build(AdamWHyper::default())?;
    /// let loader = DataLoader::builder(Arc::new(Points), train.sampler(100)).batch_size(16);
    /// let mut run = train.resumable(loader.build()?, &path, 3)?.every(4);
    /// while let Some(epoch) = run.next_epoch(&mut train)? {
    ///     while let Some(batch) = run.next_batch(&mut train)? {
    ///         let loss = |fields: &candle_train::Fields| {
    ///             cross_entropy(&net.forward(fields.get("x")?)?, fields.get("y")?)
    ///         };
    ///         train.step_on(&batch, loss)?;
    ///     }
    ///     println!("epoch {epoch}: {} steps", train.steps()); // and a validation
    /// }
    /// assert_eq!(train.steps(), 21);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// Those of [`resume_with_all`](Self::resume_with_all): a file of [`save`](Self::save) has no
    /// position in the data; a loader of other data, or for another rank. An
    /// [infinite](train_data::DataLoaderBuilder::infinite) loader, which has no epochs.
    pub fn resumable(
        &mut self,
        loader: DataLoader,
        path: impl AsRef<Path>,
        epochs: usize,
    ) -> Result<Resumable> {
        Resumable::new(self, loader.into(), path.as_ref(), End::Epochs(epochs))
    }

    /// Like [`resumable`](Self::resumable), for a run of `steps` applied steps, over as many epochs
    /// as they take. The data may be an infinite loader, or a [`StreamLoader`] that repeats.
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # use candle_core::{DType, Device, Module};
    /// # use candle_nn::VarMap;
    /// # use candle_ops::cross_entropy;
    /// # use candle_train::train_data::{Array, BoxError, DataLoader, Dataset, Sample, SampleRng};
    /// # use candle_train::{AdamWHyper, Trainer, seeded};
    /// # struct Points;
    /// # impl Dataset for Points {
    /// #     fn len(&self) -> usize {
    /// #         100
    /// #     }
    /// #     fn sample(&self, index: usize, _: &mut SampleRng) -> Result<Sample, BoxError> {
    /// #         let x = Array::new([2], vec![index as f32, 1.0])?;
    /// #         Ok(Sample::new().with("x", x).with("y", Array::scalar((index % 2) as i64)))
    /// #     }
    /// # }
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("run.safetensors");
    /// # let vars = VarMap::new();
    /// # let net = candle_nn::linear(2, 2, seeded(&vars, 1, DType::F32, &Device::Cpu))?;
    /// # let mut train = Trainer::builder(&vars).build(AdamWHyper::default())?;
    /// # let loader = DataLoader::builder(Arc::new(Points), train.sampler(100)).batch_size(16);
    /// # let loader = loader.build()?;
    /// let mut run = train.resumable_steps(loader, &path, 20)?.every(5);
    /// while let Some(batch) = run.next_batch(&mut train)? {
    ///     train.step_on(&batch, |fields| {
    ///         cross_entropy(&net.forward(fields.get("x")?)?, fields.get("y")?)
    ///     })?;
    /// }
    /// assert_eq!((train.steps(), run.epoch()), (20, 2));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// Those of [`resumable`](Self::resumable); a stream that ends; a stream's position of another
    /// number of ranks.
    pub fn resumable_steps(
        &mut self,
        data: impl Into<TrainingData>,
        path: impl AsRef<Path>,
        steps: u64,
    ) -> Result<Resumable> {
        Resumable::new(self, data.into(), path.as_ref(), End::Steps(steps))
    }
}

impl Parts<'_> {
    /// [`Trainer::resumable`] of all trainers: give the methods of its result
    /// `&mut Parts::of([..])`, too. A trainer that accumulates has to be trained on each batch.
    ///
    /// # Errors
    ///
    /// Those of [`Trainer::resumable`] and of [`resume`](Self::resume).
    pub fn resumable(
        &mut self,
        loader: DataLoader,
        path: impl AsRef<Path>,
        epochs: usize,
    ) -> Result<Resumable> {
        Resumable::new(self, loader.into(), path.as_ref(), End::Epochs(epochs))
    }

    /// [`Trainer::resumable_steps`] of all trainers, by the steps of the first one.
    ///
    /// # Errors
    ///
    /// Those of [`Trainer::resumable_steps`] and of [`resume`](Self::resume).
    pub fn resumable_steps(
        &mut self,
        data: impl Into<TrainingData>,
        path: impl AsRef<Path>,
        steps: u64,
    ) -> Result<Resumable> {
        Resumable::new(self, data.into(), path.as_ref(), End::Steps(steps))
    }
}

impl Resumable {
    fn new(
        train: &mut impl Trainers,
        mut data: TrainingData,
        path: &Path,
        end: End,
    ) -> Result<Self> {
        let refused = match (&data, end) {
            (TrainingData::Loader(loader), End::Epochs(_)) => loader.is_infinite().then_some(
                "an infinite loader has no epochs: give `resumable_steps` the number of steps",
            ),
            (TrainingData::Stream(stream), _) => (!stream.layout().repeat).then_some(
                "a stream that ends may have other numbers of batches on each rank: set `repeat`",
            ),
            _ => None,
        };
        if let Some(text) = refused {
            return Err(Error::InvalidArgument(text.to_owned()));
        }
        let (path, rank) = (path.to_owned(), train.first()?.rank());
        let (epoch, best) = train.resume_checked(&path, |all: Vec<Own>| {
            data.resume(&all, rank)?;
            Ok(all[0].best)
        })?;
        Ok(Self {
            data,
            path,
            end,
            epoch,
            every: None,
            unsaved: 0,
            batches: None,
            stop: None,
            is_stopped: false,
            patience: None,
            best: best.flatten(),
        })
    }

    /// Also saves after each `batches` batches of an epoch, or, with accumulation, after the step
    /// that then ends. Default: only after each epoch; data without epochs need a number.
    #[must_use]
    pub fn every(mut self, batches: usize) -> Self {
        self.every = Some(batches.max(1));
        self
    }

    /// Ends the run after a save at which `stop` returns true on one of the ranks: at a time limit,
    /// say, or after a signal that a handler has recorded. Started again, the run goes on there; so
    /// that a scheduler starts it again, end the program then with exit code 75, as `runner` does.
    ///
    /// ```no_run
    /// # use std::time::{Duration, Instant};
    /// # use candle_train::{Resumable, Trainer};
    /// # fn run(run: Resumable, train: &mut Trainer) -> candle_train::Result<()> {
    /// let (start, hour) = (Instant::now(), Duration::from_secs(3600));
    /// let mut run = run.every(100).stop_when(move || start.elapsed() > hour);
    /// while let Some(_epoch) = run.next_epoch(train)? {
    ///     // The batches of the epoch.
    ///     if run.is_stopped() {
    ///         break; // Within the epoch.
    ///     }
    ///     // A validation, after a whole epoch.
    /// }
    /// if run.is_stopped() {
    ///     std::process::exit(75);
    /// }
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn stop_when(mut self, stop: impl Fn() -> bool + Send + 'static) -> Self {
        self.stop = Some(Box::new(stop));
        self
    }

    /// Whether the run has ended early, by [`stop_when`](Self::stop_when).
    #[must_use]
    pub const fn is_stopped(&self) -> bool {
        self.is_stopped
    }

    /// Ends the run, with a save, after `values` values given to [`keep_best`](Self::keep_best) in
    /// a row that are not above the best one. Default: it never ends early.
    #[must_use]
    #[doc(alias = "EarlyStopping")]
    pub const fn patience(mut self, values: usize) -> Self {
        self.patience = Some(values);
        self
    }

    /// Compares the value of a metric with the best one of the run, which is in its checkpoints;
    /// returns whether it is higher. Then also saves to [`best_path`](Self::best_path). Rank 0's
    /// value counts; a NaN is never the best. A second value after the same step, as of a
    /// validation that a resumed run repeats, does not count. For a metric that has to fall, such
    /// as a loss, give its negation. In a run of [steps](Trainer::resumable_steps) that
    /// accumulates, call it when `step.outcome` is [`Outcome::Updated`](crate::Outcome::Updated).
    ///
    /// ```no_run
    /// # use candle_train::{Resumable, Trainer};
    /// # fn accuracy(train: &Trainer) -> f64 {
    /// #     1.0
    /// # }
    /// # fn run(run: Resumable, train: &mut Trainer) -> candle_train::Result<()> {
    /// let mut run = run.patience(5);
    /// while let Some(epoch) = run.next_epoch(train)? {
    ///     // The batches of the epoch.
    ///     let accuracy = accuracy(train);
    ///     if run.keep_best(train, accuracy)? && train.is_main() {
    ///         println!("epoch {epoch}: {accuracy}, saved to {}", run.best_path().display());
    ///     }
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// Those of [`Trainer::sum`] and [`Trainer::save_with`].
    #[doc(alias = "save_best")]
    pub fn keep_best(&mut self, train: &mut impl Trainers, value: f64) -> Result<bool> {
        let first = train.first()?;
        let [value] = first.sum([if first.is_main() { value } else { 0.0 }])?;
        let steps = first.steps();
        let best = self.best.get_or_insert(Best { value: None, since: 0, steps: u64::MAX });
        let is_best = match best.value {
            known if best.steps == steps => return Ok(known == Some(value) && best.since == 0),
            Some(known) => value > known,
            None => !value.is_nan(),
        };
        best.since = if is_best { 0 } else { best.since + 1 };
        best.steps = steps;
        if is_best {
            best.value = Some(value);
        }
        if is_best {
            let path = self.best_path();
            train.save_with(&path, self.epoch, &self.own())?;
        }
        Ok(is_best)
    }

    /// The file of [`keep_best`](Self::keep_best): beside the run's, with `best` in its name.
    #[must_use]
    pub fn best_path(&self) -> PathBuf {
        let end = self.path.extension().map_or_else(
            || "best".into(),
            |extension| {
                let mut end = std::ffi::OsString::from("best.");
                end.push(extension);
                end
            },
        );
        self.path.with_extension(end)
    }

    /// Whether [`patience`](Self::patience) has ended the run.
    fn has_no_patience(&self) -> bool {
        let since = self.best.map_or(0, |best| best.since);
        self.patience.is_some_and(|patience| since >= patience.max(1))
    }

    fn own(&self) -> Own {
        Own { position: self.data.position(), best: self.best }
    }

    /// Ends the present epoch with a save, and begins the next one, whose number is returned;
    /// `None` after the last one.
    ///
    /// # Errors
    ///
    /// Those of [`Trainer::save_with`] and [`Trainer::batches_of`]; an epoch that was left in the
    /// middle of a step; a run of [`resumable_steps`](Trainer::resumable_steps), whose batches are
    /// asked for directly.
    pub fn next_epoch(&mut self, train: &mut impl Trainers) -> Result<Option<usize>> {
        let (End::Epochs(epochs), TrainingData::Loader(loader)) = (self.end, &self.data) else {
            let text = "`next_epoch` was called in a run of steps: call `next_batch` until it returns `None`";
            return Err(Error::InvalidArgument(text.to_owned()));
        };
        if self.batches.is_some() && !self.is_stopped {
            let (position, range) = (loader.position(), loader.batch_range(self.epoch));
            let is_begun = position.epoch() == self.epoch;
            let batch = if is_begun { position.batch() } else { range.start };
            if train.is_pending() && batch < range.end {
                return Err(Error::InvalidArgument(format!(
                    "epoch {} was left after batch {batch} of {}, and batches wait for a step: take all batches, \
                     call `zero_grad`, or end the run by `stop_when`",
                    self.epoch, range.end
                )));
            }
            self.save_or_stop(train, self.epoch + 1, self.epoch + 1 == epochs)?;
            (self.batches, self.epoch) = (None, self.epoch + 1);
        }
        if self.epoch >= epochs || self.is_stopped || self.has_no_patience() {
            return Ok(None);
        }
        self.begin_epoch(train)?;
        Ok(Some(self.epoch))
    }

    fn begin_epoch(&mut self, train: &mut impl Trainers) -> Result<()> {
        if let TrainingData::Loader(loader) = &self.data {
            train.begin_epoch(loader, self.epoch)?;
            self.batches = Some(Box::new(loader.batches(self.epoch)));
        }
        Ok(())
    }

    /// Returns the next batch of the epoch, which is to be trained; before it, saves if that is
    /// due. `None` after the last batch, and before the first epoch.
    ///
    /// # Errors
    ///
    /// Those of [`Trainer::save_with`] and of the data set; in a run of steps also those of
    /// [`next_epoch`](Self::next_epoch).
    pub fn next_batch(&mut self, train: &mut impl Trainers) -> Result<Option<Batch>> {
        if self.is_stopped {
            return Ok(None);
        }
        let is_endless = match &self.data {
            TrainingData::Loader(loader) => loader.is_infinite(),
            TrainingData::Stream(_) => true,
        };
        if is_endless && self.every.is_none() {
            let text = "the data have no epochs after which to save: call `every` with a number of batches";
            return Err(Error::InvalidArgument(text.to_owned()));
        }
        let done = train.first()?.steps();
        let is_last = match self.end {
            End::Steps(steps) => done >= steps || self.has_no_patience() && !train.is_pending(),
            End::Epochs(_) => false,
        };
        let is_due = self.every.is_some_and(|every| self.unsaved >= every);
        if (is_due || is_last) && self.unsaved > 0 && !train.is_pending() {
            self.save_or_stop(train, self.epoch, is_last)?;
        }
        if is_last || self.is_stopped {
            return Ok(None);
        }
        let batch = match self.end {
            End::Epochs(_) if self.has_no_patience() => Ok(None),
            End::Epochs(_) => self.batches.as_mut().and_then(Iterator::next).transpose(),
            End::Steps(_) => self.next_of_all(train)?,
        };
        let batch = batch.map_err(train_step::Error::model)?;
        self.unsaved += usize::from(batch.is_some());
        Ok(batch)
    }

    /// The next batch of a stream, or of the epochs of a loader.
    fn next_of_all(
        &mut self,
        train: &mut impl Trainers,
    ) -> Result<train_data::Result<Option<Batch>>> {
        if let TrainingData::Stream(stream) = &mut self.data {
            return Ok(stream.next_batch());
        }
        if self.batches.is_none() {
            self.begin_epoch(train)?;
        }
        if let Some(batch) = self.batches.as_mut().and_then(Iterator::next) {
            return Ok(batch.map(Some));
        }
        if self.unsaved > 0 {
            self.save_or_stop(train, self.epoch + 1, false)?;
        }
        (self.batches, self.epoch) = (None, self.epoch + 1);
        if self.is_stopped {
            return Ok(Ok(None));
        }
        self.begin_epoch(train)?;
        Ok(self.batches.as_mut().and_then(Iterator::next).transpose())
    }

    /// Saves, and ends the run if one of the ranks has to stop.
    fn save_or_stop(
        &mut self,
        train: &mut impl Trainers,
        epoch: usize,
        is_last: bool,
    ) -> Result<()> {
        self.save_at(train, epoch)?;
        if let Some(stop) = self.stop.as_ref().filter(|_| !is_last) {
            let stops = train.first()?.sum([u8::from(stop()).into()])?;
            self.is_stopped = stops[0] > 0.0;
        }
        Ok(())
    }

    fn save_at(&mut self, train: &mut impl Trainers, epoch: usize) -> Result<()> {
        train.save_with(&self.path, epoch, &self.own())?;
        self.unsaved = 0;
        Ok(())
    }

    /// Saves now, between two steps.
    ///
    /// # Errors
    ///
    /// Those of [`Trainer::save_with`].
    pub fn save(&mut self, train: &mut impl Trainers) -> Result<()> {
        self.save_at(train, self.epoch)
    }

    /// Number of the present epoch, or of the next one between two.
    #[must_use]
    pub const fn epoch(&self) -> usize {
        self.epoch
    }
}

impl fmt::Debug for Resumable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Resumable")
            .field("path", &self.path)
            .field("epoch", &self.epoch)
            .field("end", &self.end)
            .finish_non_exhaustive()
    }
}
