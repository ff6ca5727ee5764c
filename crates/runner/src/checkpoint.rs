//! Checkpoints: a directory that is there whole or not at all.
//!
//! `epoch_3/` holds `model.safetensors` (parameters and buffers under their names),
//! `optimizer.safetensors` (groups, moments, f32 masters) and `state.json` (where the run was, the loss
//! scaler, schedulers, the hooks' state, length and CRC-32 of the other files). Inside a gradient accumulation
//! there is `gradients_R.safetensors` as well: what rank `R` has added up towards its next step.
//! It is written under another name, flushed to disk, and renamed; only then does
//! `last_checkpoint` name it. So a kill at any moment leaves the previous checkpoint in place.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use fused_optim::{DType, Slice, SliceMut, StateDict};
use half::{bf16, f16};
use safetensors::tensor::{self, SafeTensors, TensorView};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::engine::{Engine, TensorSpec};
use crate::model::ModelWrapper;
use crate::optim_wrapper::OptimWrapperState;
use crate::{Error, Result, schedulers};

/// Where a run is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Position {
    /// Epochs completed.
    pub epoch: usize,
    /// Batches trained on, over all epochs.
    pub iter: usize,
    /// Batches trained on in the current epoch.
    pub batch: usize,
    /// How many were trained on before the last validation.
    #[serde(default)]
    pub validated: Option<usize>,
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
    /// Number of batches in an epoch: what a place inside one is counted in.
    pub batches_per_epoch: usize,
    /// Seed of the run.
    pub seed: u64,
    /// The configuration's text, empty for a run that had none.
    pub config: String,
    /// The loss scaler's state.
    loss_scaler: Option<::amp::ScalerState>,
    /// Where each scheduler was.
    #[serde(default)]
    pub schedulers: Vec<schedulers::Progress>,
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
    /// Number of batches in an epoch.
    pub batches_per_epoch: usize,
    /// Seed of the run.
    pub seed: u64,
    /// The configuration's text.
    pub config: &'a str,
    /// The optimizer wrapper's state.
    pub optim: OptimWrapperState,
    /// Where each scheduler is.
    pub schedulers: Vec<schedulers::Progress>,
    /// What each hook saves.
    pub hooks: Map<String, Value>,
    /// Each rank's [`gradient_bytes`]; none outside of an accumulation.
    pub gradients: Vec<Vec<u8>>,
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
    let mut files = vec![(MODEL.to_owned(), model), (OPTIMIZER.to_owned(), optimizer)];
    let gradients = contents.gradients.into_iter().enumerate();
    files.extend(
        gradients.filter(|(_, g)| !g.is_empty()).map(|(rank, g)| (gradients_file(rank), g)),
    );
    let meta = Meta {
        format: FORMAT,
        position: contents.position,
        world_size: contents.world_size,
        batches_per_epoch: contents.batches_per_epoch,
        seed: contents.seed,
        config: contents.config.to_owned(),
        loss_scaler: contents.optim.loss_scaler,
        schedulers: contents.schedulers,
        hooks: contents.hooks,
        files: files.iter().map(|(name, bytes)| file_meta(name, bytes)).collect(),
    };
    let state =
        serde_json::to_vec_pretty(&meta).map_err(|e| Error::Checkpoint(format!("{STATE}: {e}")))?;
    let fresh = work_dir.join(format!(".{name}.tmp"));
    if fresh.exists() {
        fs::remove_dir_all(&fresh).map_err(io("remove", &fresh))?;
    }
    fs::create_dir_all(&fresh).map_err(io("create", &fresh))?;
    for (name, bytes) in &files {
        write_synced(&fresh.join(name), bytes)?;
    }
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
    let state = fs::read(path.join(STATE)).map_err(|e| damaged(path, STATE, e))?;
    let meta: Meta = serde_json::from_slice(&state).map_err(|e| damaged(path, STATE, e))?;
    if meta.format != FORMAT {
        let why = format!("format {} is not the {FORMAT} this version reads", meta.format);
        return Err(damaged(path, STATE, why));
    }
    let model = read_whole(path, &meta, MODEL)?;
    let optimizer = read_whole(path, &meta, OPTIMIZER)?;
    let optim = OptimWrapperState {
        optimizer: StateDict::from_safetensors(&optimizer)
            .map_err(|e| damaged(path, OPTIMIZER, e))?,
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
        let fail = |why: String| damaged(&self.path, MODEL, why);
        let tensors = SafeTensors::deserialize(&self.model).map_err(|e| fail(e.to_string()))?;
        let (params, buffers) = (engine.params().to_vec(), engine.buffers().to_vec());
        for spec in params.iter().chain(&buffers) {
            let view = tensors
                .tensor(&spec.name)
                .map_err(|_| fail(format!("has no `{}`: it is of another model", spec.name)))?;
            check(&view, spec).map_err(fail)?;
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

    /// Gives the model back what this rank had added up towards its next step.
    ///
    /// # Errors
    ///
    /// [`Error::Checkpoint`] naming the file that is missing, damaged, or of other parameters.
    pub fn load_gradients(
        &self,
        rank: usize,
        params: &[TensorSpec],
        model: &mut dyn ModelWrapper,
    ) -> Result<()> {
        let file = gradients_file(rank);
        model.zero_grad();
        if !self.meta.files.iter().any(|f| f.name == file) {
            return Ok(());
        }
        let bytes = read_whole(&self.path, &self.meta, &file)?;
        let tensors =
            SafeTensors::deserialize(&bytes).map_err(|e| damaged(&self.path, &file, e))?;
        model.prepare(false)?;
        let sink = model.sink();
        for (index, spec) in params.iter().enumerate() {
            // A parameter may have no gradient.
            let Ok(view) = tensors.tensor(&spec.name) else { continue };
            check(&view, spec).map_err(|why| damaged(&self.path, &file, why))?;
            let mut sink = sink.lock();
            match spec.dtype {
                DType::F32 => sink.ready(index, Slice::F32(&floats(view.data())))?,
                DType::F16 => sink.ready(index, Slice::F16(&f16s(view.data())))?,
                DType::Bf16 => sink.ready(index, Slice::Bf16(&bf16s(view.data())))?,
            }
        }
        model.finish()
    }
}

/// The gradients that wait for the next step, as safetensors; empty if there are none.
///
/// # Errors
///
/// Those of the model.
pub fn gradient_bytes(params: &[TensorSpec], model: &dyn ModelWrapper) -> Result<Vec<u8>> {
    let mut tensors = Vec::new();
    model.with_grads(&mut |grads| {
        let pairs = params.iter().zip(grads);
        tensors.extend(pairs.filter_map(|(spec, grad)| Some((spec.clone(), to_bytes((*grad)?)))));
        Ok(())
    })?;
    if tensors.is_empty() { Ok(Vec::new()) } else { serialize("gradients", &tensors) }
}

fn gradients_file(rank: usize) -> String {
    format!("gradients_{rank}.safetensors")
}

fn damaged(path: &Path, file: &str, why: impl std::fmt::Display) -> Error {
    Error::Checkpoint(format!("{}: {why}", path.join(file).display()))
}

/// Whether a saved tensor is one of the model's, by shape and type.
fn check(saved: &TensorView<'_>, spec: &TensorSpec) -> Result<(), String> {
    let (is, has) = ((saved.dtype(), saved.shape()), (dtype(spec.dtype), &spec.shape[..]));
    if is == has {
        return Ok(());
    }
    Err(format!("`{}` is {:?} {:?}, the model has {:?} {:?}", spec.name, is.0, is.1, has.0, has.1))
}

/// A file of the checkpoint at `path`, as long and with the checksum that `meta` says.
fn read_whole(path: &Path, meta: &Meta, name: &str) -> Result<Vec<u8>> {
    let bytes = fs::read(path.join(name)).map_err(|e| damaged(path, name, e))?;
    if !meta.files.contains(&file_meta(name, &bytes)) {
        return Err(damaged(path, name, "damaged: length or checksum differ from state.json"));
    }
    Ok(bytes)
}

fn model_bytes(engine: &mut dyn Engine) -> Result<Vec<u8>> {
    let mut tensors: Vec<(TensorSpec, Vec<u8>)> = Vec::new();
    let (params, buffers) = (engine.params().to_vec(), engine.buffers().to_vec());
    let mut gather = |specs: &[TensorSpec], slices: &mut [SliceMut<'_>]| {
        tensors.extend(specs.iter().cloned().zip(slices.iter().map(|s| to_bytes(s.as_slice()))));
    };
    engine.with_params(&mut |slices| {
        gather(&params, slices);
        Ok(())
    })?;
    engine.with_buffers(&mut |slices| {
        gather(&buffers, slices);
        Ok(())
    })?;
    serialize(MODEL, &tensors)
}

fn serialize(what: &str, tensors: &[(TensorSpec, Vec<u8>)]) -> Result<Vec<u8>> {
    let views = tensors.iter().map(|(spec, bytes)| {
        TensorView::new(dtype(spec.dtype), spec.shape.clone(), bytes).map(|v| (&spec.name, v))
    });
    let views = views.collect::<std::result::Result<Vec<_>, _>>();
    views
        .and_then(|views| safetensors::serialize(views, None))
        .map_err(|e| Error::Checkpoint(format!("{what}: {e}")))
}

fn dtype(dtype: DType) -> tensor::Dtype {
    match dtype {
        DType::F32 => tensor::Dtype::F32,
        DType::F16 => tensor::Dtype::F16,
        DType::Bf16 => tensor::Dtype::BF16,
    }
}

fn to_bytes(slice: Slice<'_>) -> Vec<u8> {
    match slice {
        Slice::F32(v) => v.iter().flat_map(|x| x.to_le_bytes()).collect(),
        Slice::F16(v) => v.iter().flat_map(|x| x.to_le_bytes()).collect(),
        Slice::Bf16(v) => v.iter().flat_map(|x| x.to_le_bytes()).collect(),
    }
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

fn f16s(bytes: &[u8]) -> Vec<f16> {
    bytes.as_chunks().0.iter().map(|b| f16::from_le_bytes(*b)).collect()
}

fn bf16s(bytes: &[u8]) -> Vec<bf16> {
    bytes.as_chunks().0.iter().map(|b| bf16::from_le_bytes(*b)).collect()
}

/// Copies little-endian elements; the caller has compared lengths.
fn copy_from_bytes(slice: &mut SliceMut<'_>, bytes: &[u8]) {
    match slice {
        SliceMut::F32(v) => v.copy_from_slice(&floats(bytes)),
        SliceMut::F16(v) => v.copy_from_slice(&f16s(bytes)),
        SliceMut::Bf16(v) => v.copy_from_slice(&bf16s(bytes)),
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

#[cfg(test)]
mod tests {
    use collective::ReducerOptions;
    use fused_optim::{Optimizer, Sgd, SgdHyper};

    use super::*;
    use crate::data::Batch;
    use crate::model::DistributedDataParallel;
    use crate::testing::{FakeEngine, Values, group};

    /// All types; a NaN with a payload and the smallest subnormals among the values.
    fn engine() -> FakeEngine {
        let halves = [0x7e01, 0x0001, 0xfbff].map(f16::from_bits).to_vec();
        let brains = [0x7fc1, 0x0001, 0xff7f].map(bf16::from_bits).to_vec();
        FakeEngine::new(
            &[
                ("a", Values::F32(vec![f32::from_bits(0x7fc0_0001), 1.5, f32::from_bits(1)])),
                ("b", Values::F16(halves)),
                ("c", Values::Bf16(brains)),
            ],
            &[("mean", Values::F32(vec![-3.25]))],
        )
    }

    fn zeroed(mut engine: FakeEngine) -> FakeEngine {
        for values in engine.params.iter_mut().chain(&mut engine.buffers) {
            match values {
                Values::F32(v) => v.fill(0.0),
                Values::F16(v) => v.fill(f16::ZERO),
                Values::Bf16(v) => v.fill(bf16::ZERO),
            }
        }
        engine
    }

    fn bits(engine: &mut FakeEngine) -> Vec<Vec<u8>> {
        let mut all = Vec::new();
        let mut read = |slices: &mut [SliceMut<'_>]| {
            all.extend(slices.iter().map(|s| to_bytes(s.as_slice())));
            Ok(())
        };
        engine.with_params(&mut read).unwrap();
        engine.with_buffers(&mut read).unwrap();
        all
    }

    fn contents(gradients: Vec<Vec<u8>>) -> Contents<'static> {
        let sgd = Sgd::with_one_group(SgdHyper { lr: 0.1, ..SgdHyper::default() }, 3).unwrap();
        let scaler = ::amp::LossScaler::new(::amp::LossScalerOptions::default()).unwrap();
        Contents {
            position: Position { epoch: 1, iter: 17, batch: 5, validated: Some(12) },
            world_size: 2,
            batches_per_epoch: 12,
            seed: u64::MAX,
            config: "x = 1",
            optim: OptimWrapperState {
                optimizer: sgd.state_dict(),
                loss_scaler: scaler.state_dict(),
            },
            schedulers: Vec::new(),
            hooks: [("H".to_owned(), Value::from(7))].into_iter().collect(),
            gradients,
        }
    }

    fn reason(result: Result<impl Sized>) -> String {
        result.map(|_| ()).unwrap_err().to_string()
    }

    #[test]
    fn what_is_saved_is_what_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = save(dir.path(), "epoch_1", &mut engine(), contents(Vec::new())).unwrap();
        assert_eq!(find_last(dir.path()).unwrap(), Some(path.clone()));
        let loaded = load(&path).unwrap();
        let saved = contents(Vec::new());
        assert_eq!(loaded.meta.position, saved.position);
        assert_eq!((loaded.meta.world_size, loaded.meta.seed), (2, u64::MAX));
        assert_eq!((loaded.meta.config.as_str(), &loaded.meta.hooks["H"]), ("x = 1", &7.into()));
        assert_eq!(loaded.optim.loss_scaler, saved.optim.loss_scaler);
        let mut other = zeroed(engine());
        assert_ne!(bits(&mut other), bits(&mut engine()));
        loaded.load_model(&mut other).unwrap();
        assert_eq!(bits(&mut other), bits(&mut engine()));
    }

    #[test]
    fn gradients_in_hand_come_back() {
        let dir = tempfile::tempdir().unwrap();
        let mut engine = engine();
        let model = |engine: &FakeEngine| {
            let options = ReducerOptions::default();
            DistributedDataParallel::new(group(), engine.params(), options).unwrap()
        };
        let mut ddp = model(&engine);
        assert!(gradient_bytes(engine.params(), &ddp).unwrap().is_empty());
        ddp.prepare(false).unwrap();
        engine.forward_backward(&Batch::new(), 0.75, &ddp.sink()).unwrap();
        ddp.finish().unwrap();
        let bytes = gradient_bytes(engine.params(), &ddp).unwrap();
        let path = save(dir.path(), "a", &mut engine, contents(vec![bytes.clone()])).unwrap();
        let mut other = model(&engine);
        load(&path).unwrap().load_gradients(0, engine.params(), &mut other).unwrap();
        assert_eq!(gradient_bytes(engine.params(), &other).unwrap(), bytes);
        other
            .with_grads(&mut |g| {
                assert!(matches!(g[0], Some(Slice::F32([0.75, 0.75, 0.75]))), "{g:?}");
                Ok(())
            })
            .unwrap();
        // A rank without a file had none.
        load(&path).unwrap().load_gradients(1, engine.params(), &mut other).unwrap();
        assert!(gradient_bytes(engine.params(), &other).unwrap().is_empty());
    }

    #[test]
    fn a_damaged_file_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let mut engine = engine();
        let mut ddp =
            DistributedDataParallel::new(group(), engine.params(), ReducerOptions::default())
                .unwrap();
        ddp.prepare(false).unwrap();
        engine.forward_backward(&Batch::new(), 1.0, &ddp.sink()).unwrap();
        ddp.finish().unwrap();
        let gradients = vec![gradient_bytes(engine.params(), &ddp).unwrap()];
        let path = save(dir.path(), "a", &mut engine, contents(gradients)).unwrap();
        let specs = engine.params().to_vec();
        let mut read = || load(&path).and_then(|c| c.load_gradients(0, &specs, &mut ddp));
        read().unwrap();
        for name in [MODEL, OPTIMIZER, STATE, "gradients_0.safetensors"] {
            let file = path.join(name);
            let whole = fs::read(&file).unwrap();
            let mut flipped = whole.clone();
            let last = flipped.len() - 2;
            flipped[last] ^= 0x80;
            for bytes in [&whole[..whole.len() / 2], &[], &flipped] {
                fs::write(&file, bytes).unwrap();
                let said = reason(read());
                assert!(said.starts_with(&file.display().to_string()), "{name}: {said}");
            }
            fs::remove_file(&file).unwrap();
            let said = reason(read());
            assert!(said.starts_with(&file.display().to_string()), "{name}: {said}");
            fs::write(&file, whole).unwrap();
        }
        read().unwrap();
    }

    #[test]
    fn another_model_is_named_and_left_as_it_was() {
        let dir = tempfile::tempdir().unwrap();
        let path = save(dir.path(), "a", &mut engine(), contents(Vec::new())).unwrap();
        let loaded = load(&path).unwrap();
        let (a, b) = (Values::F32(vec![9.0; 3]), Values::F16(vec![f16::ONE; 3]));
        let mean = [("mean", Values::F32(vec![0.0]))];
        let c = Values::Bf16(vec![bf16::ONE; 3]);
        let cases = [
            (vec![("a", a.clone()), ("b", b.clone()), ("d", c.clone())], "has no `d`"),
            (vec![("a", a.clone()), ("b", b.clone())], "has `c`, which the model does not"),
            (
                vec![("a", a.clone()), ("b", a.clone()), ("c", c.clone())],
                "`b` is F16 [3], the model has F32 [3]",
            ),
            (
                vec![("a", Values::F32(vec![9.0; 4])), ("b", b), ("c", c)],
                "`a` is F32 [3], the model has F32 [4]",
            ),
        ];
        for (params, says) in cases {
            let mut other = FakeEngine::new(&params, &mean);
            let before = bits(&mut other);
            let said = reason(loaded.load_model(&mut other));
            assert!(said.contains(says) && said.contains(MODEL), "{said}");
            assert_eq!(bits(&mut other), before, "{says}");
        }
    }

    #[test]
    fn a_checkpoint_is_replaced_whole_or_not_at_all() {
        let dir = tempfile::tempdir().unwrap();
        let entries = || {
            let entries = fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name());
            let mut names: Vec<_> = entries.map(|n| n.into_string().unwrap()).collect();
            names.sort();
            names
        };
        let path = save(dir.path(), "a", &mut engine(), contents(Vec::new())).unwrap();
        // What a kill in the middle of a save and of a replacement leaves.
        fs::create_dir(dir.path().join(".a.tmp")).unwrap();
        fs::create_dir(dir.path().join("a.old")).unwrap();
        save(dir.path(), "a", &mut zeroed(engine()), contents(Vec::new())).unwrap();
        assert_eq!(entries(), ["a", LAST]);
        let mut now = engine();
        load(&path).unwrap().load_model(&mut now).unwrap();
        assert_eq!(bits(&mut now), bits(&mut zeroed(engine())));
        // Nothing can be written: what is there stays.
        fs::write(dir.path().join(".a.tmp"), "").unwrap();
        let said = reason(save(dir.path(), "a", &mut engine(), contents(Vec::new())));
        assert!(said.contains(".a.tmp"), "{said}");
        load(&path).unwrap();
    }

    #[test]
    fn the_newest_is_found_or_its_absence_explained() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(find_last(dir.path()).unwrap(), None);
        let path = save(dir.path(), "a", &mut engine(), contents(Vec::new())).unwrap();
        let old = dir.path().join("a.old");
        fs::rename(&path, &old).unwrap();
        assert_eq!(find_last(dir.path()).unwrap(), Some(old.clone()));
        fs::remove_dir_all(old).unwrap();
        let said = reason(find_last(dir.path()));
        assert!(said.contains("last_checkpoint names") && said.contains("/a,"), "{said}");
        for pointer in ["", "\n"] {
            fs::write(dir.path().join(LAST), pointer).unwrap();
            assert!(reason(find_last(dir.path())).contains("not a checkpoint"));
        }
    }
}
