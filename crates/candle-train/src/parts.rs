//! [`Parts`]: one checkpoint of several trainers.

use std::path::Path;

use serde::Serialize;
use serde::de::DeserializeOwned;
use train_data::DataLoader;
use train_step::BoxError;

use crate::{Error, Result, Trainer};

/// Several trainers of a program with one checkpoint: those of a GAN's generator and discriminator,
/// of actor and critic, of student and teacher. Each has its own optimizer, precision, clipping and
/// schedule, and steps when the program says so; they are saved and resumed as one, so a killed run
/// never finds them at two moments.
///
/// Each is built with a name ([`part`](crate::TrainerBuilder::part)), and all with the
/// [group](crate::TrainerBuilder::group) of the first, so that ranks compare their calls across
/// trainers:
///
/// ```
/// # use candle_core::{DType, Device, Module, Tensor};
/// # use candle_nn::{VarMap, linear};
/// use candle_train::{AdamWHyper, Parts, Trainer, seeded};
/// # let directory = tempfile::tempdir()?;
/// # let path = directory.path().join("run.safetensors");
/// # let x = Tensor::ones((4, 2), DType::F32, &Device::Cpu)?;
///
/// let (g_vars, d_vars) = (VarMap::new(), VarMap::new());
/// let generator = linear(2, 2, seeded(&g_vars, 1, DType::F32, &Device::Cpu))?;
/// let discriminator = linear(2, 1, seeded(&d_vars, 2, DType::F32, &Device::Cpu))?;
/// let mut g = Trainer::builder(&g_vars).part("generator").build(AdamWHyper::default())?;
/// let group = g.group().clone();
/// let d = Trainer::builder(&d_vars).part("discriminator").group(group);
/// let mut d = d.build(AdamWHyper::default())?;
///
/// for epoch in Parts::of([&mut g, &mut d]).resume(&path)?..3 {
///     let fake = generator.forward(&x)?.detach();
///     d.step(|| discriminator.forward(&fake)?.sqr()?.mean_all())?;
///     g.step(|| discriminator.forward(&generator.forward(&x)?)?.neg()?.mean_all())?;
///     Parts::of([&mut g, &mut d]).save(&path, epoch + 1)?;
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// In the file the names of each one's variables begin with its own and a dot.
#[derive(Debug)]
pub struct Parts<'a> {
    all: Vec<&'a mut Trainer>,
}

impl<'a> Parts<'a> {
    /// These trainers, in the same order on all ranks.
    pub fn of(trainers: impl IntoIterator<Item = &'a mut Trainer>) -> Self {
        Self { all: trainers.into_iter().collect() }
    }

    /// Saves all trainers to one file, as [`Trainer::save`].
    ///
    /// # Errors
    ///
    /// As [`Trainer::save`]; also trainers without names, or with equal ones.
    pub fn save(&mut self, path: impl AsRef<Path>, epoch: usize) -> Result<()> {
        self.run("save", |core| core.save(path, epoch))
    }

    /// As [`Trainer::save_with`]: the ranks' own data are saved once for all trainers.
    ///
    /// # Errors
    ///
    /// As [`Trainer::save_with`] and [`save`](Self::save).
    pub fn save_with(
        &mut self,
        path: impl AsRef<Path>,
        epoch: usize,
        own: &impl Serialize,
    ) -> Result<()> {
        self.run("save", |core| core.save_with(path, epoch, own))
    }

    /// Resumes all trainers, as [`Trainer::resume`].
    ///
    /// # Errors
    ///
    /// As [`Trainer::resume`]; also a file with other trainers; trainers without names, or with
    /// equal ones.
    pub fn resume(&mut self, path: impl AsRef<Path>) -> Result<usize> {
        self.resumed(|core| core.resume(path))
    }

    /// As [`Trainer::resume_with`].
    ///
    /// # Errors
    ///
    /// As [`Trainer::resume_with`] and [`resume`](Self::resume).
    pub fn resume_with<T: DeserializeOwned>(
        &mut self,
        path: impl AsRef<Path>,
    ) -> Result<(usize, Option<T>)> {
        self.resumed(|core| core.resume_with(path))
    }

    /// As [`Trainer::resume_with_all`].
    ///
    /// # Errors
    ///
    /// As [`Trainer::resume_with_all`] and [`resume`](Self::resume).
    pub fn resume_with_all<T: DeserializeOwned>(
        &mut self,
        path: impl AsRef<Path>,
    ) -> Result<(usize, Option<Vec<T>>)> {
        self.resumed(|core| core.resume_with_all(path))
    }

    /// As [`Trainer::resume_checked`].
    ///
    /// # Errors
    ///
    /// As [`Trainer::resume_checked`] and [`resume`](Self::resume).
    pub fn resume_checked<T: DeserializeOwned, R>(
        &mut self,
        path: impl AsRef<Path>,
        check: impl FnOnce(Vec<T>) -> Result<R, BoxError>,
    ) -> Result<(usize, Option<R>)> {
        self.resumed(|core| core.resume_checked(path, check))
    }

    /// [Begins](Trainer::begin_epoch) an epoch of a loader for all trainers.
    ///
    /// # Errors
    ///
    /// Those of [`Trainer::begin_epoch`].
    pub fn begin_epoch(&mut self, loader: &DataLoader, epoch: usize) -> Result<()> {
        self.all.iter_mut().try_for_each(|trainer| trainer.begin_epoch(loader, epoch))
    }

    pub(crate) fn is_pending(&self) -> bool {
        self.all.iter().any(|trainer| trainer.core.pending() > 0)
    }

    pub(crate) fn first(&self) -> Result<&Trainer> {
        let first = self.all.first().map(|trainer| &**trainer);
        first.ok_or_else(|| Error::InvalidArgument("`Parts` has no trainer".to_owned()))
    }

    fn resumed<R>(
        &mut self,
        resume: impl FnOnce(&mut train_step::Parts<'_>) -> train_step::Result<R>,
    ) -> Result<R> {
        let resumed = self.run("resume", resume)?;
        self.all.iter_mut().for_each(|trainer| trainer.take_state());
        Ok(resumed)
    }

    fn run<R>(
        &mut self,
        call: &'static str,
        run: impl FnOnce(&mut train_step::Parts<'_>) -> train_step::Result<R>,
    ) -> Result<R> {
        let (mut cores, mut models) = (Vec::new(), Vec::new());
        for (core, stored) in self.all.iter_mut().map(|trainer| trainer.split()) {
            cores.push(core);
            models.push(stored);
        }
        let mut parts = train_step::Parts::new();
        for (core, stored) in cores.into_iter().zip(&mut models) {
            parts = parts.with(core, stored);
        }
        let result = run(&mut parts);
        result.map_err(|error| match self.all.first() {
            Some(first) => first.failed(call, error.into()),
            None => error.into(),
        })
    }
}
