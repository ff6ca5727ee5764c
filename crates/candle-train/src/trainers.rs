//! [`Trainers`]: a [`Trainer`], or several as [`Parts`].

use std::path::Path;

use serde::Serialize;
use serde::de::DeserializeOwned;
use train_data::DataLoader;
use train_step::BoxError;

use crate::{Parts, Result, Trainer};

/// A [`Trainer`], or several as [`Parts`], which a [`Resumable`](crate::Resumable) saves.
pub trait Trainers: Sealed {}

impl Trainers for Trainer {}
impl Trainers for Parts<'_> {}

/// The methods that both have.
#[expect(unnameable_types, reason = "seals `Trainers`")]
pub trait Sealed {
    /// The trainer whose group and sampler count.
    fn first(&self) -> Result<&Trainer>;
    fn begin_epoch(&mut self, loader: &DataLoader, epoch: usize) -> Result<()>;
    /// Whether batches wait for a step.
    fn is_pending(&self) -> bool;
    fn save_with(&mut self, path: &Path, epoch: usize, own: &impl Serialize) -> Result<()>;
    fn resume_checked<T: DeserializeOwned, R>(
        &mut self,
        path: &Path,
        check: impl FnOnce(Vec<T>) -> Result<R, BoxError>,
    ) -> Result<(usize, Option<R>)>;
}

impl Sealed for Trainer {
    fn first(&self) -> Result<&Self> {
        Ok(self)
    }

    fn begin_epoch(&mut self, loader: &DataLoader, epoch: usize) -> Result<()> {
        Self::begin_epoch(self, loader, epoch)
    }

    fn is_pending(&self) -> bool {
        self.core.pending() > 0
    }

    fn save_with(&mut self, path: &Path, epoch: usize, own: &impl Serialize) -> Result<()> {
        Self::save_with(self, path, epoch, own)
    }

    fn resume_checked<T: DeserializeOwned, R>(
        &mut self,
        path: &Path,
        check: impl FnOnce(Vec<T>) -> Result<R, BoxError>,
    ) -> Result<(usize, Option<R>)> {
        Self::resume_checked(self, path, check)
    }
}

impl Sealed for Parts<'_> {
    fn first(&self) -> Result<&Trainer> {
        Self::first(self)
    }

    fn begin_epoch(&mut self, loader: &DataLoader, epoch: usize) -> Result<()> {
        Self::begin_epoch(self, loader, epoch)
    }

    fn is_pending(&self) -> bool {
        Self::is_pending(self)
    }

    fn save_with(&mut self, path: &Path, epoch: usize, own: &impl Serialize) -> Result<()> {
        Parts::save_with(self, path, epoch, own)
    }

    fn resume_checked<T: DeserializeOwned, R>(
        &mut self,
        path: &Path,
        check: impl FnOnce(Vec<T>) -> Result<R, BoxError>,
    ) -> Result<(usize, Option<R>)> {
        Parts::resume_checked(self, path, check)
    }
}
