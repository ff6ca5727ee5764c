//! Checkpoints: a directory that is there whole or not at all.
//!
//! `epoch_3/` holds `model.safetensors` (parameters and buffers under their names),
//! `optimizer.safetensors` (groups, moments, f32 masters) and `state.json` (where the run was, the loss
//! scaler, the hooks' state, length and CRC-32 of the other two).
//! It is written under another name, flushed to disk, and renamed; only then does
//! `last_checkpoint` name it. So a kill at any moment leaves the previous checkpoint in place.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use fused_optim::{SliceMut, StateDict};
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::engine::{Engine, TensorSpec};
use crate::optim_wrapper::OptimWrapperState;
use crate::{Error, Result};

/// Where a run is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Position {
    /// Epochs completed.
    pub epoch: usize,
    /// Batches trained on, over all epochs.
    pub iter: usize,
    /// Batches trained on in the current epoch.
    pub batch: usize,
}

/// What a checkpoint says besides tensors.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Meta {
    /// Version of this layout.
    pub format: u32,
    /// Where the run was.
    pub position: Position,
    /// Number of ranks: the order of the data depends on it.
    pub world_size: usize,
    /// Seed of the run.
    pub seed: u64,
    /// The configuration's text, empty for a run that had none.
    pub config: String,
    /// The loss scaler's state.
    loss_scaler: Option<::amp::ScalerState>,
    /// What each hook saved, by its name.
    pub hooks: Map<String, Value>,
    files: Vec<FileMeta>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct FileMeta {
    name: String,
    bytes: usize,
    crc32: u32,
}

/// A checkpoint read back and found whole.
#[derive(Debug)]
pub struct Checkpoint {
    /// What it says besides tensors.
    pub meta: Meta,
    /// The optimizer wrapper's state.
    pub optim: OptimWrapperState,
    model: Vec<u8>,
    path: PathBuf,
}

/// What to save, apart from the model.
#[derive(Debug)]
pub struct Contents<'a> {
    /// Where the run is.
    pub position: Position,
    /// Number of ranks.
    pub world_size: usize,
    /// Seed of the run.
    pub seed: u64,
    /// The configuration's text.
    pub config: &'a str,
    /// The optimizer wrapper's state.
    pub optim: OptimWrapperState,
    /// What each hook saves.
    pub hooks: Map<String, Value>,
}

const FORMAT: u32 = 1;
const MODEL: &str = "model.safetensors";
const OPTIMIZER: &str = "optimizer.safetensors";
const STATE: &str = "state.json";
/// Names the newest checkpoint, in the work directory.
pub const LAST: &str = "last_checkpoint";

/// Writes `work_dir/name` and makes `last_checkpoint` name it. One rank does this.
///
/// # Errors
///
/// [`Error::Io`] with the path; an earlier checkpoint of that name is then still there.
pub fn save(
    work_dir: &Path,
    name: &str,
    engine: &mut dyn Engine,
    contents: Contents<'_>,
) -> Result<PathBuf> {
    let model = model_bytes(engine)?;
    let optimizer = contents.optim.optimizer.to_safetensors()?;
    let meta = Meta {
        format: FORMAT,
        position: contents.position,
        world_size: contents.world_size,
        seed: contents.seed,
        config: contents.config.to_owned(),
        loss_scaler: contents.optim.loss_scaler,
        hooks: contents.hooks,
        files: vec![file_meta(MODEL, &model), file_meta(OPTIMIZER, &optimizer)],
    };
    let state =
        serde_json::to_vec_pretty(&meta).map_err(|e| Error::Checkpoint(format!("{STATE}: {e}")))?;
    let fresh = work_dir.join(format!(".{name}.tmp"));
    if fresh.exists() {
        fs::remove_dir_all(&fresh).map_err(io("remove", &fresh))?;
    }
    fs::create_dir_all(&fresh).map_err(io("create", &fresh))?;
    write_synced(&fresh.join(MODEL), &model)?;
    write_synced(&fresh.join(OPTIMIZER), &optimizer)?;
    write_synced(&fresh.join(STATE), &state)?;
    sync_dir(&fresh)?;
    let path = work_dir.join(name);
    replace_dir(&fresh, &path)?;
    sync_dir(work_dir)?;
    let pointer = work_dir.join(format!(".{LAST}.tmp"));
    write_synced(&pointer, name.as_bytes())?;
    let last = work_dir.join(LAST);
    fs::rename(&pointer, &last).map_err(io("rename to", &last))?;
    sync_dir(work_dir)?;
    Ok(path)
}

/// The checkpoint that `work_dir/last_checkpoint` names, if there is one.
///
/// # Errors
///
/// [`Error::Io`] if the pointer cannot be read, [`Error::Checkpoint`] if what it names is not
/// there.
pub fn find_last(work_dir: &Path) -> Result<Option<PathBuf>> {
    let pointer = work_dir.join(LAST);
    let name = match fs::read_to_string(&pointer) {
        Ok(name) => name,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(io("read", &pointer)(e)),
    };
    let path = work_dir.join(name.trim());
    // A run killed while it replaced a checkpoint of the same name leaves the earlier one aside.
    if let Some(whole) = [&path, &aside(&path)].into_iter().find(|p| p.join(STATE).is_file()) {
        return Ok(Some(whole.clone()));
    }
    Err(Error::Checkpoint(format!(
        "{} names {}, which is not a checkpoint",
        pointer.display(),
        path.display()
    )))
}

/// Reads a checkpoint and holds it against its own checksums.
///
/// # Errors
///
/// [`Error::Checkpoint`] naming the file that is missing, short or damaged.
pub fn load(path: &Path) -> Result<Checkpoint> {
    let damaged = |file: &str, why: String| {
        Error::Checkpoint(format!("{}: {why}", path.join(file).display()))
    };
    let state = fs::read(path.join(STATE)).map_err(|e| damaged(STATE, e.to_string()))?;
    let meta: Meta = serde_json::from_slice(&state).map_err(|e| damaged(STATE, e.to_string()))?;
    if meta.format != FORMAT {
        let why = format!("format {} is not the {FORMAT} this version reads", meta.format);
        return Err(damaged(STATE, why));
    }
    let read = |name: &str| -> Result<Vec<u8>> {
        let bytes = fs::read(path.join(name)).map_err(|e| damaged(name, e.to_string()))?;
        let expected = meta.files.iter().find(|f| f.name == name);
        if expected != Some(&file_meta(name, &bytes)) {
            return Err(damaged(name, "damaged: length or checksum differ from state.json".into()));
        }
        Ok(bytes)
    };
    let (model, optimizer) = (read(MODEL)?, read(OPTIMIZER)?);
    let optim = OptimWrapperState {
        optimizer: StateDict::from_safetensors(&optimizer)
            .map_err(|e| damaged(OPTIMIZER, e.to_string()))?,
        loss_scaler: meta.loss_scaler,
    };
    Ok(Checkpoint { meta, optim, model, path: path.to_owned() })
}

impl Checkpoint {
    /// Copies parameters and buffers into the model.
    ///
    /// # Errors
    ///
    /// [`Error::Checkpoint`] naming the tensor that is missing, left over, or of another shape or
    /// type; the model has not been changed then.
    pub fn load_model(&self, engine: &mut dyn Engine) -> Result<()> {
        let fail =
            |why: String| Error::Checkpoint(format!("{}: {why}", self.path.join(MODEL).display()));
        let tensors = SafeTensors::deserialize(&self.model).map_err(|e| fail(e.to_string()))?;
        let (params, buffers) = (engine.params().to_vec(), engine.buffers().to_vec());
        for spec in params.iter().chain(&buffers) {
            let view = tensors
                .tensor(&spec.name)
                .map_err(|_| fail(format!("has no `{}`: it is of another model", spec.name)))?;
            if view.shape() != spec.shape || view.dtype() != dtype(spec.dtype) {
                return Err(fail(format!(
                    "`{}` is {:?} {:?}, the model has {} {:?}",
                    spec.name,
                    view.dtype(),
                    view.shape(),
                    spec.dtype,
                    spec.shape
                )));
            }
        }
        if tensors.len() != params.len() + buffers.len() {
            let known = |name: &str| params.iter().chain(&buffers).any(|s| s.name == name);
            let extra = tensors.names().into_iter().find(|n| !known(n)).unwrap_or_default();
            return Err(fail(format!("has `{extra}`, which the model does not")));
        }
        let copy = |specs: &[TensorSpec], slices: &mut [SliceMut<'_>]| {
            for (spec, slice) in specs.iter().zip(slices) {
                let view = tensors.tensor(&spec.name).map_err(|e| fail(e.to_string()))?;
                copy_from_bytes(slice, view.data());
            }
            Ok(())
        };
        engine.with_params(&mut |slices| copy(&params, slices))?;
        engine.with_buffers(&mut |slices| copy(&buffers, slices))
    }
}

fn model_bytes(engine: &mut dyn Engine) -> Result<Vec<u8>> {
    let mut tensors: Vec<(TensorSpec, Vec<u8>)> = Vec::new();
    let (params, buffers) = (engine.params().to_vec(), engine.buffers().to_vec());
    let mut gather = |specs: &[TensorSpec], slices: &mut [SliceMut<'_>]| {
        tensors.extend(specs.iter().cloned().zip(slices.iter().map(to_bytes)));
    };
    engine.with_params(&mut |slices| {
        gather(&params, slices);
        Ok(())
    })?;
    engine.with_buffers(&mut |slices| {
        gather(&buffers, slices);
        Ok(())
    })?;
    let views = tensors.iter().map(|(spec, bytes)| {
        TensorView::new(dtype(spec.dtype), spec.shape.clone(), bytes).map(|v| (&spec.name, v))
    });
    let views = views.collect::<std::result::Result<Vec<_>, _>>();
    views
        .and_then(|views| safetensors::serialize(views, None))
        .map_err(|e| Error::Checkpoint(format!("{MODEL}: {e}")))
}

fn dtype(dtype: fused_optim::DType) -> Dtype {
    match dtype {
        fused_optim::DType::F32 => Dtype::F32,
        fused_optim::DType::F16 => Dtype::F16,
        fused_optim::DType::Bf16 => Dtype::BF16,
    }
}

fn to_bytes(slice: &SliceMut<'_>) -> Vec<u8> {
    match slice {
        SliceMut::F32(v) => v.iter().flat_map(|x| x.to_le_bytes()).collect(),
        SliceMut::F16(v) => v.iter().flat_map(|x| x.to_le_bytes()).collect(),
        SliceMut::Bf16(v) => v.iter().flat_map(|x| x.to_le_bytes()).collect(),
    }
}

/// Copies little-endian elements; the caller has compared lengths.
fn copy_from_bytes(slice: &mut SliceMut<'_>, bytes: &[u8]) {
    match slice {
        SliceMut::F32(v) => {
            for (to, from) in v.iter_mut().zip(bytes.as_chunks().0) {
                *to = f32::from_le_bytes(*from);
            }
        }
        SliceMut::F16(v) => {
            for (to, from) in v.iter_mut().zip(bytes.as_chunks().0) {
                *to = half::f16::from_le_bytes(*from);
            }
        }
        SliceMut::Bf16(v) => {
            for (to, from) in v.iter_mut().zip(bytes.as_chunks().0) {
                *to = half::bf16::from_le_bytes(*from);
            }
        }
    }
}

fn file_meta(name: &str, bytes: &[u8]) -> FileMeta {
    let mut crc = flate2::Crc::new();
    crc.update(bytes);
    FileMeta { name: name.to_owned(), bytes: bytes.len(), crc32: crc.sum() }
}

fn io<'a>(what: &'a str, path: &'a Path) -> impl FnOnce(std::io::Error) -> Error + 'a {
    move |source| Error::Io { what: format!("cannot {what} {}", path.display()), source }
}

fn write_synced(path: &Path, bytes: &[u8]) -> Result<()> {
    let write = || {
        let mut file = File::create(path)?;
        file.write_all(bytes)?;
        file.sync_all()
    };
    write().map_err(io("write", path))
}

/// Flushes a directory's entries, so that a rename in it survives a power cut.
fn sync_dir(path: &Path) -> Result<()> {
    File::open(path).and_then(|d| d.sync_all()).map_err(io("flush", path))
}

/// Where a checkpoint waits while another takes its place.
fn aside(path: &Path) -> PathBuf {
    let mut old = path.as_os_str().to_owned();
    old.push(".old");
    PathBuf::from(old)
}

/// Puts `fresh` in the place of `path`. A checkpoint already there steps aside first and goes
/// last, so that at every moment one of the two is whole.
fn replace_dir(fresh: &Path, path: &Path) -> Result<()> {
    let old = aside(path);
    if path.exists() {
        if old.exists() {
            fs::remove_dir_all(&old).map_err(io("remove", &old))?;
        }
        fs::rename(path, &old).map_err(io("rename", path))?;
    }
    fs::rename(fresh, path).map_err(io("rename to", path))?;
    if old.exists() {
        fs::remove_dir_all(&old).map_err(io("remove", &old))?;
    }
    Ok(())
}
