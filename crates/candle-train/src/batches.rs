//! A [`Trainer`]'s batches: the samples of an epoch or an evaluation, distributed over the ranks.

use train_data::{Batch, DataLoader, DefaultSampler};

use crate::{Error, Result, Trainer};

impl Trainer {
    /// This rank's samples of an epoch, in batches. All ranks share a shuffled order of `samples`;
    /// each batch of `batch_size`, a multiple of the number of ranks, is divided among them. All
    /// ranks have the same number of batches; if the number of samples is not divisible, the first
    /// samples are repeated. The last batch ends in a step.
    ///
    /// # Errors
    ///
    /// A batch size of 0 or that is not a multiple of the number of ranks; more samples than fit a
    /// `u32`; batches since the last step.
    pub fn batches(
        &mut self,
        samples: usize,
        batch_size: usize,
        epoch: usize,
    ) -> Result<Vec<Vec<u32>>> {
        let batches = self.deal(samples, batch_size, Some(epoch));
        let (own, batches) = match batches {
            Ok(batches) => (Ok((batches.len(), 0)), batches),
            Err(error) => (Err(error), Vec::new()),
        };
        self.core.begin_epoch_of(own)?;
        Ok(batches)
    }

    /// A sampler that distributes a dataset over the ranks of a [`DataLoader`]: all ranks share a
    /// shuffled order for each epoch.
    #[must_use]
    pub fn sampler(&self, samples: usize) -> DefaultSampler {
        DefaultSampler {
            len: samples,
            shuffle: true,
            seed: self.seed,
            rank: self.rank(),
            world_size: self.world_size(),
            round_up: true,
        }
    }

    /// A sampler that distributes a dataset over the ranks of an evaluation's [`DataLoader`]: each
    /// sample is on one of the ranks once, in order. Ranks may have different numbers of
    /// batches, so call no method for all ranks within the loop.
    #[must_use]
    pub fn eval_sampler(&self, samples: usize) -> DefaultSampler {
        DefaultSampler { shuffle: false, round_up: false, ..self.sampler(samples) }
    }

    /// The batches of an epoch of a loader, or, after its [`resume`](DataLoader::resume), the rest
    /// of them; worker threads may load them in advance. The last batch ends in a step; of an
    /// [infinite](train_data::DataLoaderBuilder::infinite) loader there is none.
    ///
    /// ```
    /// # use candle_core::{DType, Device, Module};
    /// # use candle_nn::{VarBuilder, VarMap};
    /// # use candle_ops::cross_entropy;
    /// use std::sync::Arc;
    ///
    /// use candle_train::train_data::{Array, BoxError, DataLoader, Dataset, Sample};
    /// use candle_train::train_data::{SampleRng, Workers};
    /// use candle_train::{AdamWHyper, Outcome, Trainer};
    ///
    /// struct Points;
    ///
    /// impl Dataset for Points {
    ///     fn len(&self) -> usize {
    ///         100
    ///     }
    ///
    ///     // Reads and decodes a file, augments it at random: anything slow.
    ///     fn sample(&self, index: usize, _random: &mut SampleRng) -> Result<Sample, BoxError> {
    ///         let x = Array::new([2], vec![index as f32, 1.0])?;
    ///         Ok(Sample::new().with("x", x).with("y", Array::scalar((index % 2) as i64)))
    ///     }
    /// }
    ///
    /// # let directory = tempfile::tempdir()?;
    /// # let (path, device) = (directory.path().join("run.safetensors"), Device::Cpu);
    /// # let vars = VarMap::new();
    /// # let net = candle_nn::linear(2, 2, VarBuilder::from_varmap(&vars, DType::F32, &device))?;
    /// let mut train = Trainer::builder(&vars).build(AdamWHyper::default())?;
    /// let loader = DataLoader::builder(Arc::new(Points), train.sampler(100)).batch_size(16);
    /// let mut loader = loader.workers(Workers::new(2)).build()?;
    ///
    /// // Begins, or resumes within an epoch after the last save.
    /// if let (_, Some(position)) = train.resume_with(&path)? {
    ///     loader.resume(position)?;
    /// }
    /// for epoch in loader.position().epoch()..3 {
    ///     for batch in train.batches_of(&loader, epoch)? {
    ///         let batch = batch?;
    ///         let step = train.step_on(&batch, |fields| {
    ///             cross_entropy(&net.forward(fields.get("x")?)?, fields.get("y")?)
    ///         })?;
    ///         if step.outcome == Outcome::Updated && train.steps() % 5 == 0 {
    ///             train.save_with(&path, epoch, &loader.position())?;
    ///         }
    ///     }
    /// }
    /// # assert_eq!(train.steps(), 21);
    /// # let (epoch, position) = train.resume_with(&path)?;
    /// # loader.resume(position.unwrap())?;
    /// # assert_eq!((epoch, loader.batch_range(2)), (2, 6..7));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// A loader for another rank or number of ranks, or without rounding up: its sampler must be
    /// that of [`sampler`](Self::sampler); batches since the last step.
    #[doc(alias = "DataLoader")]
    pub fn batches_of(
        &mut self,
        loader: &DataLoader,
        epoch: usize,
    ) -> Result<impl Iterator<Item = train_data::Result<Batch>> + use<>> {
        self.begin_epoch(loader, epoch)?;
        Ok(loader.batches(epoch))
    }

    /// Begins an epoch of a loader, whose last batch ends in a step:
    /// [`batches_of`](Self::batches_of) without the batches, for a second trainer of the same ones
    /// that [accumulates], and is trained on each of them. Every rank must call it.
    ///
    /// # Errors
    ///
    /// Those of [`batches_of`](Self::batches_of).
    ///
    /// [accumulates]: crate::TrainerBuilder::accumulate
    pub fn begin_epoch(&mut self, loader: &DataLoader, epoch: usize) -> Result<()> {
        self.core.begin_epoch_of(self.epoch_of(loader, epoch))
    }

    /// The number of batches of an epoch of a loader, and of its first one.
    fn epoch_of(&self, loader: &DataLoader, epoch: usize) -> Result<(usize, usize)> {
        let has = loader.sampler();
        if (has.rank, has.world_size, has.round_up) != (self.rank(), self.world_size(), true) {
            let (rank, world_size, rounds) = (has.rank, has.world_size, has.round_up);
            return Err(Error::InvalidArgument(format!(
                "the loader is for rank {rank} of {world_size} with round_up = {rounds}, this is rank {} of {}, and \
                 ranks train on equally many batches: make it with `Trainer::sampler`",
                self.rank(),
                self.world_size()
            )));
        }
        let batches = loader.batch_range(epoch);
        Ok((batches.end, batches.start))
    }

    /// This rank's samples of an evaluation, in batches: each of `samples` is on one of the ranks
    /// once, in order. Ranks may have different numbers of batches, so call no method for all ranks
    /// within the loop; [`sum`](Self::sum) the counts after it.
    ///
    /// ```
    /// # use candle_core::{DType, Device, Module, Tensor, D};
    /// # use candle_nn::{VarBuilder, VarMap};
    /// # use candle_train::{AdamWHyper, Trainer};
    /// # let vars = VarMap::new();
    /// # let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    /// # let net = candle_nn::linear(2, 4, vb)?;
    /// # let mut train = Trainer::builder(&vars).build(AdamWHyper::default())?;
    /// # let (inputs, labels) = (Tensor::ones((10, 2), DType::F32, &Device::Cpu)?, [0_u32; 10]);
    /// let (mut right, mut seen) = (0, 0);
    /// for rows in train.eval_batches(10, 4)? {
    ///     let x = inputs.index_select(&Tensor::new(&rows[..], &Device::Cpu)?, 0)?;
    ///     let found = train.evaluate(|| net.forward(&x))?.argmax(D::Minus1)?.to_vec1::<u32>()?;
    ///     let pairs = rows.iter().zip(found);
    ///     right += pairs.filter(|(row, found)| labels[**row as usize] == *found).count();
    ///     seen += rows.len();
    /// }
    /// let [right, seen] = train.sum([right as f64, seen as f64])?;
    /// assert_eq!(seen, 10.0);
    /// println!("{:.1} % right", 100.0 * right / seen);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// A batch size of 0 or that is not a multiple of the number of ranks; more samples than fit a
    /// `u32`.
    #[doc(alias = "gather_for_metrics")]
    pub fn eval_batches(&self, samples: usize, batch_size: usize) -> Result<Vec<Vec<u32>>> {
        self.deal(samples, batch_size, None)
    }

    /// This rank's batches of an epoch, or, without an epoch, of an evaluation.
    fn deal(
        &self,
        samples: usize,
        batch_size: usize,
        epoch: Option<usize>,
    ) -> Result<Vec<Vec<u32>>> {
        let world_size = self.world_size();
        let refused = |text: String| Err(Error::InvalidArgument(text));
        if batch_size == 0 || !batch_size.is_multiple_of(world_size) {
            return refused(format!(
                "a batch of {batch_size} samples does not divide among {world_size} ranks: take a multiple"
            ));
        }
        if u32::try_from(samples).is_err() {
            return refused(format!("{samples} samples are more than a `u32` counts"));
        }
        let sampler = match epoch {
            Some(_) => self.sampler(samples),
            None => self.eval_sampler(samples),
        };
        let indices = sampler.indices(epoch.unwrap_or(0));
        let indices: Vec<u32> = indices.into_iter().map(|i| i as u32).collect();
        Ok(indices.chunks(batch_size / world_size).map(<[u32]>::to_vec).collect())
    }
}
