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
    /// Reasons why directories could not be searched that are not called as a run's checkpoints.
    pub unread: Vec<String>,
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
    let named = pointed_to(work_dir).unwrap_or_else(|why| {
        found.skipped.push(why);
        None
    });
    // A run killed while it replaced a checkpoint of the same name leaves the earlier one renamed.
    let named = match named {
        Some(path) if !is_file(&path.join(STATE))? && is_file(&aside(&path).join(STATE))? => {
            Some(aside(&path))
        }
        named => named,
    };
    let others = candidates(work_dir, &mut |why| found.unread.push(why.to_owned()))?;
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
    Err(Error::checkpoint(
        Some(work_dir),
        format!("no checkpoint in {} is intact: {}", work_dir.display(), found.skipped.join("; ")),
    ))
}

/// Returns the first checkpoint in `work_dir` if none of them belongs to a run that began from the
/// checkpoint `origin`. Directories that cannot be searched are told to `warn`, unless they are
/// called as a run's checkpoints.
pub(crate) fn of_another_run(
    work_dir: &Path,
    origin: Option<&Path>,
    warn: &mut dyn FnMut(&str),
) -> Result<Option<PathBuf>> {
    let all = candidates(work_dir, warn)?;
    let is_own = |path: &PathBuf| load_meta(path).is_ok_and(|m| m.load_from.as_deref() == origin);
    let has_own = origin.is_some() && all.iter().any(is_own);
    Ok(all.into_iter().next().filter(|_| !has_own))
}

/// Returns the checkpoint that `last_checkpoint` names; the error text is the reason why it cannot
/// be read.
pub(super) fn pointed_to(work_dir: &Path) -> Result<Option<PathBuf>, String> {
    let pointer = work_dir.join(LAST);
    match fs::read_to_string(&pointer) {
        Ok(name) => Ok(Some(work_dir.join(name.trim())).filter(|path| path != work_dir)),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(format!("{}: {e}", pointer.display())),
    }
}

/// Lists the checkpoints in `work_dir`: first those with an unreadable state, then by iteration,
/// newest first. One that was being replaced when a run was killed counts if its replacement is
/// missing.
///
/// A failed look is an error if the directory is called as a run's checkpoints. Others, such as a
/// `lost+found`, are told to `warn`, and skipped.
fn candidates(work_dir: &Path, warn: &mut dyn FnMut(&str)) -> Result<Vec<PathBuf>> {
    let entries = match fs::read_dir(work_dir) {
        Ok(entries) => entries,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(io("read", work_dir)(e)),
    };
    let (last, mut all) = (pointed_to(work_dir), Vec::new());
    for entry in entries {
        let path = entry.map_err(io("read", work_dir))?.path();
        let hidden = path.file_name().is_some_and(|n| n.to_string_lossy().starts_with('.'));
        let replaced = replaced(&path).map(|name| work_dir.join(name));
        if hidden && replaced.is_none() {
            continue;
        }
        let current = replaced.as_ref().unwrap_or(&path);
        // A `last_checkpoint` that cannot be read may name it.
        let is_last = last.as_ref().map_or(true, |last| last.as_ref() == Some(current));
        let is_own = is_last || is_called_as_own(current);
        let has_replacement = replaced.as_ref().map_or(Ok(false), |path| exists(path));
        match has_replacement.and_then(|has| Ok(!has && is_file(&path.join(STATE))?)) {
            Ok(true) => {}
            Ok(false) => continue,
            Err(why) if is_own => return Err(why),
            Err(why) => {
                warn(&format!("{why}; skipped: it is not called as a checkpoint of this run"));
                continue;
            }
        }
        let iter = load_meta(&path).map_or(usize::MAX, |meta| meta.position.configured_iter());
        all.push((iter, path));
    }
    all.sort_by(|a, b| b.cmp(a));
    Ok(all.into_iter().map(|(_, path)| path).collect())
}

/// Returns whether the default names of `CheckpointHook` may be this one.
fn is_called_as_own(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let number = ["epoch_", "iter_"].iter().find_map(|start| name.strip_prefix(start));
    let is_number = |n: &str| !n.is_empty() && n.bytes().all(|byte| byte.is_ascii_digit());
    name.starts_with("best_") || number.is_some_and(is_number)
}

fn exists(path: &Path) -> Result<bool> {
    path.try_exists().map_err(io("read", path))
}

/// Returns whether there is such a file. Any other answer of the system than its presence or
/// absence is an error: a run that took it for absence would begin anew, and replace it.
pub(crate) fn is_file(path: &Path) -> Result<bool> {
    use std::io::ErrorKind::{NotADirectory, NotFound};
    match path.metadata() {
        Ok(found) => Ok(found.is_file()),
        Err(e) if [NotADirectory, NotFound].contains(&e.kind()) => Ok(false),
        Err(e) => Err(io("read", path)(e)),
    }
}
