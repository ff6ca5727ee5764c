//! Reads and verifies checkpoints.

use std::fs;
use std::path::Path;

use fused_optim::StateDict;
use serde_json::Value;
use train_step::BoxError;

use super::files::{check_seal, crc32, file_meta};
use super::find::{is_file, pointed_to};
use super::{Checkpoint, FORMAT, MODEL, Meta, OPTIMIZER, STATE};
use crate::model::LoraOptions;
use crate::optim_wrapper::OptimWrapperState;
use crate::{Error, Result};

/// Why a checkpoint cannot be read.
#[derive(Debug)]
pub(crate) struct Fault {
    pub(super) why: Error,
    /// Whether it is damaged or incomplete, so that an earlier one may take its place. A checkpoint
    /// of another version, or one that cannot be read at the moment, may be intact: a run that
    /// resumed from an earlier one would replace it.
    pub(super) is_damaged: bool,
}

impl Fault {
    fn damaged(path: &Path, file: &str, why: impl std::fmt::Display) -> Self {
        Self { why: damaged(path, file, why), is_damaged: true }
    }

    fn unreadable(path: &Path, file: &str, error: impl Into<BoxError>) -> Self {
        Self { why: unreadable(&path.join(file), error), is_damaged: true }
    }

    pub(super) fn io(path: &Path, file: &str, why: std::io::Error) -> Self {
        use std::io::ErrorKind::{InvalidData, IsADirectory, NotADirectory, NotFound};
        let is_absent = |name: &str| !path.join(name).exists();
        if why.kind() == NotFound && path.is_dir() && is_absent(STATE) && is_absent(MODEL) {
            let why = Error::checkpoint(Some(path), not_a_checkpoint(path));
            return Self { why, is_damaged: true };
        }
        let absent = [InvalidData, IsADirectory, NotADirectory, NotFound];
        if absent.contains(&why.kind()) {
            return Self::unreadable(path, file, why);
        }
        let mut why = unreadable(&path.join(file), why);
        if let Error::Checkpoint { message, .. } = &mut why {
            *message += "; the checkpoint may be intact: try again, or remove it to resume from an earlier one";
        }
        Self { why, is_damaged: false }
    }
}

impl From<Fault> for Error {
    fn from(fault: Fault) -> Self {
        fault.why
    }
}

/// Reason why a directory without `state.json` cannot be loaded.
pub(crate) fn not_a_checkpoint(dir: &Path) -> String {
    let text = dir.display();
    match pointed_to(dir) {
        Ok(Some(last)) => {
            format!(
                "{text}: a work directory; name one of its checkpoints, such as {}",
                last.display()
            )
        }
        _ => format!("{text}: not a checkpoint: it has no {STATE}"),
    }
}

/// Reads `state.json` of a checkpoint.
pub(crate) fn load_meta(path: &Path) -> Result<Meta> {
    Ok(read_state(path)?.0)
}

/// Reads and verifies `state.json`. Returns it with its CRC-32.
fn read_state(path: &Path) -> Result<(Meta, u32), Fault> {
    let state = fs::read(path.join(STATE)).map_err(|e| Fault::io(path, STATE, e))?;
    // The format is read first: other formats may have another checksum.
    if let Some((format, known)) = of_another_format(&state) {
        let model = path.join(MODEL);
        let why = format!(
            "format {format} is not supported; this version reads {FORMAT}: resume with the version that wrote it, \
             load only its weights (load_from = \"{}\", in another work directory), or remove it",
            model.display()
        );
        let is_damaged = known["export"] == true;
        return Err(Fault { why: damaged(path, STATE, why), is_damaged });
    }
    check_seal(&state).map_err(|e| Fault::damaged(path, STATE, e))?;
    let meta = serde_json::from_slice(&state).map_err(|e| Fault::unreadable(path, STATE, e))?;
    Ok((meta, crc32(&state)))
}

/// Returns the LoRA options of the checkpoint in the directory, of any format, without verifying
/// it; `None` if it has none, or if there is no checkpoint.
pub(crate) fn lora_options(path: &Path) -> Result<Option<LoraOptions>> {
    if !is_file(&path.join(STATE))? {
        return Ok(None);
    }
    let state = fs::read(path.join(STATE)).map_err(|e| Fault::io(path, STATE, e))?;
    let state: Value =
        serde_json::from_slice(&state).map_err(|e| unreadable(&path.join(STATE), e))?;
    let lora = state.get("lora").cloned().unwrap_or_default();
    serde_json::from_value(lora).map_err(|e| damaged(path, STATE, format!("lora: {e}")))
}

/// Reads a checkpoint and verifies every file against the recorded checksum.
///
/// # Errors
///
/// [`Error::Checkpoint`] naming the file that is missing, truncated or damaged.
pub fn load(path: &Path) -> Result<Checkpoint> {
    Ok(read(path)?)
}

pub(super) fn read(path: &Path) -> Result<Checkpoint, Fault> {
    let (meta, digest) = read_state(path)?;
    let (mut model, mut optim) = (Vec::new(), None);
    for file in &meta.files {
        let bytes = read_verified(path, &meta, &file.name)?;
        match file.name.as_str() {
            MODEL => model = bytes,
            OPTIMIZER => {
                let optimizer = StateDict::from_safetensors(&bytes)
                    .map_err(|e| Fault::unreadable(path, OPTIMIZER, e))?;
                let (loss_scaler, skipped) = (meta.loss_scaler, meta.skipped);
                optim = Some(OptimWrapperState { optimizer, loss_scaler, skipped });
            }
            _ => {}
        }
    }
    Ok(Checkpoint { meta, optim, model, path: path.to_owned(), digest })
}

/// Verifies the model file of a checkpoint against the recorded checksum, unless the checkpoint is
/// of another format.
pub(crate) fn verify_model(file: &Path) -> Result<()> {
    let path = file.parent().unwrap_or(file);
    let state = fs::read(path.join(STATE)).map_err(|e| Fault::io(path, STATE, e))?;
    match of_another_format(&state) {
        Some(_) => Ok(()),
        None => read_whole(path, &load_meta(path)?, MODEL).map(drop),
    }
}

/// Returns the format of `state.json` if it is another than this version's, and the whole.
fn of_another_format(state: &[u8]) -> Option<(u64, Value)> {
    let known = serde_json::from_slice::<Value>(state).unwrap_or_default();
    let format = known["format"].as_u64().filter(|format| *format != u64::from(FORMAT))?;
    Some((format, known))
}

pub(super) fn damaged(path: &Path, file: &str, why: impl std::fmt::Display) -> Error {
    bad(&path.join(file), why)
}

/// Error for a file or directory, with the reason.
pub(crate) fn bad(path: &Path, why: impl std::fmt::Display) -> Error {
    Error::checkpoint(Some(path), format!("{}: {why}", path.display()))
}

/// Error for a file that a library cannot read.
pub(super) fn unreadable(path: &Path, error: impl Into<BoxError>) -> Error {
    let source = error.into();
    let message = format!("{}: {source}", path.display());
    Error::Checkpoint { path: Some(path.to_owned()), message, source: Some(source) }
}

/// Error for a part of a checkpoint that has no file yet, or no longer.
pub(crate) fn failed(what: &str, error: impl Into<BoxError>) -> Error {
    let source = error.into();
    Error::Checkpoint { path: None, message: format!("{what}: {source}"), source: Some(source) }
}

/// Reads a file of the checkpoint at `path`, and verifies length and checksum against `meta`.
pub(super) fn read_whole(path: &Path, meta: &Meta, name: &str) -> Result<Vec<u8>> {
    Ok(read_verified(path, meta, name)?)
}

fn read_verified(path: &Path, meta: &Meta, name: &str) -> Result<Vec<u8>, Fault> {
    let bytes = fs::read(path.join(name)).map_err(|e| Fault::io(path, name, e))?;
    if !meta.files.contains(&file_meta(name, &bytes)) {
        let why = "damaged: length or checksum differ from state.json";
        return Err(Fault::damaged(path, name, why));
    }
    Ok(bytes)
}
