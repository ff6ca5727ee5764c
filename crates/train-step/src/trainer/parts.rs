//! [`Parts`]: one checkpoint of several trainers.

use std::collections::HashSet;
use std::fmt;
use std::path::Path;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::Trainer;
use super::resume::{Own, Resumed, all_own, own_of, resume_all, without_own};
use super::save::{Saved, encode, save_all};
use crate::checkpoint::Stored;
use crate::{BoxError, Error, Result};

/// Several trainers of a program with one checkpoint: those of a GAN's generator and discriminator,
/// of actor and critic, of student and teacher. Each has its own optimizer, precision, clipping and
/// schedule, and steps when the program says so; they are saved and resumed as one, so a killed run
/// never finds them at two moments.
///
/// Each is built with a name ([`part`](super::TrainerBuilder::part)), and all with the
/// [group](super::TrainerBuilder::group) of the first, so that ranks compare their calls across
/// trainers:
///
/// ```
/// # use train_step::fused_optim::{DType, Sgd, SgdHyper, Slice, SliceMut};
/// # use train_step::{Model, Parts, Result, TensorSpec, Trainer, Visit};
/// # struct Number(Vec<TensorSpec>, [f32; 1]);
/// # impl Model for Number {
/// #     fn params(&self) -> &[TensorSpec] {
/// #         &self.0
/// #     }
/// #     fn with_params(&mut self, visit: &mut Visit<'_>) -> Result<()> {
/// #         visit(&mut [SliceMut::F32(&mut self.1)])
/// #     }
/// # }
/// # let number = || {
/// #     let spec = TensorSpec { name: "x".into(), shape: vec![1], dtype: DType::F32 };
/// #     Number(vec![spec], [1.0])
/// # };
/// # let sgd = || Sgd::with_one_group(SgdHyper { lr: 0.25, ..SgdHyper::default() }, 1);
/// # let directory = tempfile::tempdir()?;
/// # let path = directory.path().join("run.safetensors");
/// # let (mut actor, mut critic) = (number(), number());
/// let mut act = Trainer::builder().part("actor").build(&mut actor, Box::new(sgd()?))?;
/// let group = act.group().clone();
/// let mut judge =
///     Trainer::builder().part("critic").group(group).build(&mut critic, Box::new(sgd()?))?;
///
/// let mut parts = Parts::new().with(&mut act, &mut actor).with(&mut judge, &mut critic);
/// let start = parts.resume(&path)?;
/// for episode in start..3 {
///     judge.step(&mut critic, |_, cx| cx.report(0, Slice::F32(&[1.0])))?;
///     act.step(&mut actor, |_, cx| cx.report(0, Slice::F32(&[1.0])))?;
///     let mut parts = Parts::new().with(&mut act, &mut actor).with(&mut judge, &mut critic);
///     parts.save(&path, episode + 1)?;
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// In the file the names of each one's tensors begin with its own and a dot.
#[derive(Default)]
pub struct Parts<'a> {
    names: Vec<Option<String>>,
    all: Vec<(&'a mut Trainer, &'a mut dyn Stored)>,
}

impl<'a> Parts<'a> {
    /// No trainer yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a trainer with its model.
    #[must_use]
    pub fn with(mut self, trainer: &'a mut Trainer, model: &'a mut dyn Stored) -> Self {
        self.names.push(trainer.part.clone());
        self.all.push((trainer, model));
        self
    }

    /// Saves all trainers to one file, as [`Trainer::save`].
    ///
    /// # Errors
    ///
    /// As [`Trainer::save`]; also trainers without names, or with equal ones.
    pub fn save(&mut self, path: impl AsRef<Path>, epoch: usize) -> Result<()> {
        save_all(&mut self.saved()?, path.as_ref(), epoch, Ok(None))
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
        save_all(&mut self.saved()?, path.as_ref(), epoch, encode(own))
    }

    /// Resumes all trainers, as [`Trainer::resume`].
    ///
    /// # Errors
    ///
    /// As [`Trainer::resume`]; also a file with other trainers; trainers without names, or with
    /// equal ones.
    pub fn resume(&mut self, path: impl AsRef<Path>) -> Result<usize> {
        let resumed = resume_all(&mut self.resumed()?, path.as_ref(), without_own);
        resumed.map(|(epoch, _)| epoch)
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
        let mut all = self.resumed()?;
        let (rank, ranks) = (all[0].trainer.rank(), all[0].trainer.world_size());
        resume_all(&mut all, path.as_ref(), own_of(rank, ranks))
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
        resume_all(&mut self.resumed()?, path.as_ref(), all_own)
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
        resume_all(&mut self.resumed()?, path.as_ref(), |own: Own<'_>| check(all_own(own)?))
    }

    /// Returns an error for trainers without names, or with equal ones.
    fn check(&self) -> Result<()> {
        let mut names = HashSet::new();
        let reason = match self.names.iter().find(|name| name.is_none() || !names.insert(*name)) {
            Some(Some(name)) => format!("two trainers of `Parts` are named `{name}`"),
            Some(None) => {
                "a trainer of `Parts` has no name: build it with `TrainerBuilder::part`".to_owned()
            }
            None => match self.all.split_first() {
                None => "`Parts` has no trainer: add some by `with`".to_owned(),
                Some(((first, _), others)) => {
                    let is_other =
                        |other: &Trainer| !other.group().is_same_membership(first.group());
                    let Some((other, _)) = others.iter().find(|(other, _)| is_other(other)) else {
                        return Ok(());
                    };
                    let name = |trainer: &Trainer| trainer.part.clone().unwrap_or_default();
                    format!(
                        "parts `{}` and `{}` have process groups of their own, so ranks could not compare their \
                         calls across them: build all with a clone of the first one's, `TrainerBuilder::group`",
                        name(first),
                        name(other)
                    )
                }
            },
        };
        Err(Error::InvalidArgument(reason))
    }

    fn saved(&mut self) -> Result<Vec<Saved<'_, dyn Stored + 'a>>> {
        self.check()?;
        let all = self.names.iter().zip(&mut self.all);
        let saved = all.map(|(name, (trainer, model))| Saved {
            trainer,
            model: &mut **model,
            part: name.as_deref(),
        });
        let mut saved: Vec<_> = saved.collect();
        // The first one has the lock of the file, in whatever order they are given.
        saved.sort_by_key(|saved| saved.part);
        Ok(saved)
    }

    fn resumed(&mut self) -> Result<Vec<Resumed<'_, dyn Stored + 'a>>> {
        self.check()?;
        let all = self.names.iter().zip(&mut self.all);
        let resumed = all.map(|(name, (trainer, model))| Resumed {
            trainer,
            model: &mut **model,
            part: name.as_deref(),
        });
        let mut resumed: Vec<_> = resumed.collect();
        resumed.sort_by_key(|resumed| resumed.part);
        Ok(resumed)
    }
}

impl fmt::Debug for Parts<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(&self.names).finish()
    }
}
