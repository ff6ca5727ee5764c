//! Finds the newest intact checkpoint.

use std::fs;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::files::{aside, io, replaced};
use super::read::read;
use super::{LAST, STATE, any_path, load_meta};
use crate::{Error, Result};

/// Result of the search for a checkpoint to resume from.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Found {
    /// The newest intact one.
    #[serde(with = "any_path")]
    pub path: Option<PathBuf>,
    /// Reasons for which newer ones were skipped, each with the file.
    pub skipped: Vec<String>,
    /// If there is none: checkpoints that were saved without optimizer state.
    #[serde(with = "any_path::list")]
    pub weights: Vec<PathBuf>,
    /// If there is none: exported models, such as the best.
    #[serde(with = "any_path::list")]
    pub exports: Vec<PathBuf>,
}

/// Finds a checkpoint to resume from: first the one named in `work_dir/last_checkpoint`, then all
/// others in `work_dir`, newest first. Returns the first intact one.
///
/// # Errors
///
/// [`Error::Io`] if the directory cannot be read; [`Error::Checkpoint`] with the reason for each
/// checkpoint if there are some and none is intact, and for the first one that may be intact but
/// is of another version or cannot be read at the moment.
pub fn newest(work_dir: &Path) -> Result<Found> {
    let mut found = Found::default();
    let pointer = work_dir.join(LAST);
    let named = match fs::read_to_string(&pointer) {
        Ok(name) => Some(work_dir.join(name.trim())).filter(|path| path != work_dir),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => None,
        Err(e) => {
            found.skipped.push(format!("{}: {e}", pointer.display()));
            None
        }
    };
    // A run killed while it replaced a checkpoint of the same name leaves the earlier one renamed.
    let named = named.map(|path| match path.join(STATE).is_file() {
        false if aside(&path).join(STATE).is_file() => aside(&path),
        _ => path,
    });
    let others = candidates(work_dir)?;
    let others = others.into_iter().filter(|path| named.as_ref() != Some(path));
    for path in named.iter().cloned().chain(others) {
        match read(&path) {
            Ok(checkpoint) if checkpoint.optim.is_some() && !checkpoint.meta.export => {
                let (weights, exports) = (Vec::new(), Vec::new());
                return Ok(Found { path: Some(path), weights, exports, ..found });
            }
            Ok(checkpoint) if checkpoint.meta.export => found.exports.push(path),
            Ok(_) => found.weights.push(path),
            Err(fault) if !fault.is_damaged => return Err(fault.into()),
            Err(fault) => found.skipped.push(fault.why.to_string()),
        }
    }
    if found.skipped.is_empty() {
        return Ok(found);
    }
    Err(Error::Checkpoint(format!(
        "no checkpoint in {} is intact: {}",
        work_dir.display(),
        found.skipped.join("; ")
    )))
}

/// Returns the first checkpoint in `work_dir` if none of them belongs to a run that began from the
/// checkpoint `origin`.
pub(crate) fn of_another_run(work_dir: &Path, origin: Option<&Path>) -> Result<Option<PathBuf>> {
    let all = candidates(work_dir)?;
    let is_own = |path: &PathBuf| load_meta(path).is_ok_and(|m| m.load_from.as_deref() == origin);
    let has_own = origin.is_some() && all.iter().any(is_own);
    Ok(all.into_iter().next().filter(|_| !has_own))
}

/// Lists the checkpoints in `work_dir`: first those with an unreadable state, then by iteration,
/// newest first. One that was being replaced when a run was killed counts if its replacement is
/// missing.
fn candidates(work_dir: &Path) -> Result<Vec<PathBuf>> {
    let entries = match fs::read_dir(work_dir) {
        Ok(entries) => entries,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(io("read", work_dir)(e)),
    };
    let mut all = Vec::new();
    for entry in entries {
        let path = entry.map_err(io("read", work_dir))?.path();
        let hidden = path.file_name().is_some_and(|n| n.to_string_lossy().starts_with('.'));
        let is_only = || replaced(&path).is_some_and(|name| !work_dir.join(name).exists());
        if hidden && !is_only() || !is_file(&path.join(STATE))? {
            continue;
        }
        let iter = load_meta(&path).map_or(usize::MAX, |meta| meta.position.configured_iter());
        all.push((iter, path));
    }
    all.sort_by(|a, b| b.cmp(a));
    Ok(all.into_iter().map(|(_, path)| path).collect())
}

/// Returns whether there is such a file. Any other answer of the system than its presence or
/// absence is an error: a run that took it for absence would begin anew, and replace it.
fn is_file(path: &Path) -> Result<bool> {
    use std::io::ErrorKind::{NotADirectory, NotFound};
    match path.metadata() {
        Ok(found) => Ok(found.is_file()),
        Err(e) if [NotADirectory, NotFound].contains(&e.kind()) => Ok(false),
        Err(e) => Err(io("read", path)(e)),
    }
}
