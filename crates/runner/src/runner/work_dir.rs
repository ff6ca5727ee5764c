//! The work directory: which run may write to it, and which of its checkpoints a run resumes from.
//!
//! A run locks it while it trains ([`WorkDirLock`]). A new run must not start in a directory with
//! checkpoints, because its own would replace them; a launcher's restart may replace those of its
//! own job.

use std::fs::canonicalize;
use std::path::{Path, PathBuf, absolute};

use collective::Topology;
use collective::object::broadcast_object;

use super::Runner;
use super::loading::Loaded;
use crate::checkpoint::{self, Found, WorkDirLock, remove_leftovers};
use crate::{Error, Result};

impl Runner {
    /// Locks the work directory on rank 0, until training ends, and removes incomplete checkpoints
    /// of killed runs.
    ///
    /// # Errors
    ///
    /// [`Error::Checkpoint`] if another run writes to it, or has checkpoints there and this one
    /// does not resume.
    pub(super) fn claim_work_dir(&mut self) -> Result<()> {
        if self.group.rank() != 0 || self.status.lock.is_some() {
            return Ok(());
        }
        let work_dir = self.work_dir().to_owned();
        let logger = self.logger();
        let lock = WorkDirLock::acquire(&work_dir, &mut |text| logger.warning(text))?;
        // The directory was empty, or this job's, when the launcher's last attempt began. A refused
        // attempt does not sign the lock.
        let is_restart = Topology::from_env(|name| std::env::var(name).ok())
            .is_ok_and(|topology| topology.restart_count > 0)
            && lock.is_of_same_launcher();
        let is_fresh = self.start.loaded != Loaded::Run;
        if is_fresh
            && !is_restart
            && let Some(path) = self.find_other_run()?
        {
            return Err(Error::checkpoint(
                Some(&path),
                format!(
                    "{} belongs to another run, whose checkpoints this run would replace: resume that run (--resume, without \
                 --load-from), choose another work_dir (--work-dir), or remove it",
                    path.display()
                ),
            ));
        }
        remove_leftovers(&work_dir)?;
        lock.sign();
        self.status.lock = Some(lock);
        Ok(())
    }

    /// Makes sure that this run still has the work directory to itself, before it saves there.
    ///
    /// # Errors
    ///
    /// [`Error::Checkpoint`] if another run has locked it.
    pub(super) fn renew_lock(&mut self) -> Result<()> {
        let Some(mut lock) = self.status.lock.take() else { return Ok(()) };
        let work_dir = self.work_dir().to_owned();
        let logger = self.logger();
        let renewed = lock.renew(&work_dir, &mut |text| logger.warning(text));
        self.status.lock = Some(lock);
        renewed
    }

    /// Returns a checkpoint in the work directory, unless this run resumes from there.
    fn find_other_run(&mut self) -> Result<Option<PathBuf>> {
        let work_dir = &self.work_dir().to_owned();
        let origin = match &self.start.load_from {
            None if self.start.resume => return Ok(None),
            Some(path) if self.start.resume => resolve(path),
            _ => None,
        };
        let is_inside =
            |path: &PathBuf| path.parent().map(Path::to_owned) == canonicalize(work_dir).ok();
        match origin {
            Some(path) if is_inside(&path) => Ok(None),
            origin => {
                let logger = self.logger();
                checkpoint::of_another_run(work_dir, origin.as_deref(), &mut |why| {
                    logger.warning(why);
                })
            }
        }
    }

    /// Returns the checkpoint to resume from, if there is one, as found by rank 0: the newest in
    /// the work directory; with `load_from` that one, until the run that began from it has saved
    /// others.
    pub(super) fn find_checkpoint(&mut self) -> Result<Found> {
        let found = match self.group.rank() {
            0 => Some(self.search_checkpoint()?),
            _ => None,
        };
        let found: Found = broadcast_object(&self.group, found, 0)?;
        for skipped in &found.skipped {
            self.logger().warning(&format!("skipping a checkpoint: {skipped}"));
        }
        found.unread.iter().for_each(|unread| self.logger().warning(unread));
        Ok(found)
    }

    fn search_checkpoint(&mut self) -> Result<Found> {
        let newest = checkpoint::newest(self.output.work_dir())?;
        let Some(from) = self.start.load_from.clone() else { return Ok(newest) };
        match newest {
            Found { path: Some(path), skipped, unread, .. } if is_begun_with(&path, &from) => {
                let (path_text, from) = (path.display(), from.display());
                let text = format!("resuming from {path_text}, of the run that began with {from}");
                self.logger().info(&text);
                Ok(Found { path: Some(path), skipped, unread, ..Found::default() })
            }
            Found { unread, .. } => Ok(Found { path: Some(from), unread, ..Found::default() }),
        }
    }

    /// Records the checkpoint that the run began from, after it has loaded `path`.
    pub(super) fn note_origin(&mut self, path: &Path, loaded: &checkpoint::Meta) {
        self.start.origin = match self.start.load_from.as_deref() == Some(path) {
            true => resolve(path),
            false => loaded.load_from.clone(),
        };
    }
}

/// Returns whether `work_dir` has a checkpoint to resume from, of a run that began from the
/// checkpoint `from`.
pub(super) fn has_run_begun_with(work_dir: &Path, from: &Path) -> bool {
    let newest = checkpoint::newest(work_dir).ok().and_then(|found| found.path);
    newest.is_some_and(|path| is_begun_with(&path, from))
}

/// Returns whether the run that saved the checkpoint `path` began from the checkpoint `from`.
fn is_begun_with(path: &Path, from: &Path) -> bool {
    let origin = checkpoint::load_meta(path).ok().and_then(|meta| meta.load_from);
    origin.is_some() && origin == resolve(from)
}

/// Returns the absolute path without links of a checkpoint, which may have been removed since.
fn resolve(path: &Path) -> Option<PathBuf> {
    let path = absolute(path).ok()?;
    path.ancestors()
        .find_map(|dir| Some(canonicalize(dir).ok()?.join(path.strip_prefix(dir).ok()?)))
}
