//! [`Resumable`]: the epochs and batches of a run, from where its checkpoint says.

use std::fmt;
use std::path::{Path, PathBuf};

use train_data::{Batch, DataLoader, DataPosition};

use crate::{Result, Trainer};

/// The epochs and batches of a run that goes on where its checkpoint says: it saves after each
/// epoch, and [every](Self::every) so many batches within one. Made by [`Trainer::resumable`].
pub struct Resumable {
    loader: DataLoader,
    path: PathBuf,
    epochs: usize,
    /// The next epoch, or the present one.
    epoch: usize,
    every: Option<usize>,
    /// Batches since the last save.
    unsaved: usize,
    /// The batches of the present epoch; `None` between two epochs.
    batches: Option<Box<dyn Iterator<Item = train_data::Result<Batch>> + Send>>,
    stop: Option<Box<dyn Fn() -> bool + Send>>,
    is_stopped: bool,
}

impl Trainer {
    /// Resumes from the file, if there is one, and returns the epochs and batches that are left of
    /// a run of `epochs`, whose loader has the [sampler](Self::sampler) of this trainer. Every rank
    /// must call it, and the methods of its result, equally often.
    ///
    /// A run that is killed at any moment and started again has the bits of an undisturbed one.
    /// Another number of ranks takes the samples of the epoch that no rank has taken. Code after
    /// an epoch's batches, such as a validation, belongs to the epoch: after a kill it is repeated.
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
    /// position in the data; a loader of other data, or for another rank.
    pub fn resumable(
        &mut self,
        loader: DataLoader,
        path: impl AsRef<Path>,
        epochs: usize,
    ) -> Result<Resumable> {
        let path = path.as_ref().to_owned();
        let mut loader = loader;
        let (epoch, _) = self.resume_checked(&path, |positions: Vec<DataPosition>| {
            // All ranks have taken equally many batches.
            let Some(position) = positions.into_iter().next() else {
                return Err("it was saved by `save`, without a position in the data: save it by `save_with` with \
                            `&loader.position()`, or take another file"
                    .into());
            };
            Ok(loader.resume(position)?)
        })?;
        Ok(Resumable {
            loader,
            path,
            epochs,
            epoch,
            every: None,
            unsaved: 0,
            batches: None,
            stop: None,
            is_stopped: false,
        })
    }
}

impl Resumable {
    /// Also saves after each `batches` batches of an epoch, or, with accumulation, after the step
    /// that then ends. Default: only after each epoch.
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
    ///     // ...
    ///     if run.is_stopped() {
    ///         std::process::exit(75);
    ///     }
    ///     // A validation, after a whole epoch.
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

    /// Ends the present epoch with a save, and begins the next one, whose number is returned;
    /// `None` after the last one.
    ///
    /// # Errors
    ///
    /// Those of [`Trainer::save_with`] and [`Trainer::batches_of`]; batches that wait for a step,
    /// if the epoch was left early.
    pub fn next_epoch(&mut self, train: &mut Trainer) -> Result<Option<usize>> {
        if self.batches.is_some() && !self.is_stopped {
            self.save_or_stop(train, self.epoch + 1)?;
            (self.batches, self.epoch) = (None, self.epoch + 1);
        }
        if self.epoch >= self.epochs || self.is_stopped {
            return Ok(None);
        }
        self.batches = Some(Box::new(train.batches_of(&self.loader, self.epoch)?));
        Ok(Some(self.epoch))
    }

    /// Returns the next batch of the epoch, which is to be trained; before it, saves if that is
    /// due. `None` after the last batch, and before the first epoch.
    ///
    /// # Errors
    ///
    /// Those of [`Trainer::save_with`] and of the data set.
    pub fn next_batch(&mut self, train: &mut Trainer) -> Result<Option<Batch>> {
        let is_due = !self.is_stopped && self.every.is_some_and(|every| self.unsaved >= every);
        if is_due && self.batches.is_some() && train.core.pending() == 0 {
            self.save_or_stop(train, self.epoch)?;
        }
        let batches = self.batches.as_mut().filter(|_| !self.is_stopped);
        let Some(batch) = batches.and_then(Iterator::next) else { return Ok(None) };
        let batch = batch.map_err(train_step::Error::model)?;
        self.unsaved += 1;
        Ok(Some(batch))
    }

    /// Saves, and ends the run if one of the ranks has to stop.
    fn save_or_stop(&mut self, train: &Trainer, epoch: usize) -> Result<()> {
        self.save_at(train, epoch)?;
        if let Some(stop) = self.stop.as_ref().filter(|_| epoch < self.epochs) {
            let stops = train.sum([u8::from(stop()).into()])?;
            self.is_stopped = stops[0] > 0.0;
        }
        Ok(())
    }

    fn save_at(&mut self, train: &Trainer, epoch: usize) -> Result<()> {
        train.save_with(&self.path, epoch, &self.loader.position())?;
        self.unsaved = 0;
        Ok(())
    }

    /// Saves now, between two steps.
    ///
    /// # Errors
    ///
    /// Those of [`Trainer::save_with`].
    pub fn save(&mut self, train: &Trainer) -> Result<()> {
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
            .field("epochs", &self.epochs)
            .finish_non_exhaustive()
    }
}
