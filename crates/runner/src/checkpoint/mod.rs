//! Checkpoints: directories that are written atomically and verified by checksums.
//!
//! `epoch_3/` contains `model.safetensors` (parameters and buffers by name),
//! `optimizer.safetensors` (parameter groups, moments, f32 masters) and `state.json` (position,
//! loss scaler, schedulers, state of hooks, length and CRC-32 of the other files, and its own
//! CRC-32). During gradient accumulation there is also `gradients_R.safetensors`, the gradients
//! that rank `R` has accumulated; if ranks differ, `rank_R.safetensors`, the buffers of rank `R`;
//! and with PowerSGD, `wrapper_R.safetensors`, the error feedback of rank `R`. Hooks may add files.
//!
//! A checkpoint is written under a temporary name, flushed to disk, and renamed; only then does
//! `last_checkpoint` name it. So a kill at any moment, or a full disk, leaves the previous
//! checkpoint in place; the next run removes the incomplete one.
//!
//! `read` reads and verifies one; `find` finds the newest intact one; `files` writes files; `lock`
//! keeps a second run out of the directory; `tensors` converts tensors.

mod any_path;
mod export;
mod files;
mod find;
mod lock;
mod position;
mod read;
mod tensors;

use std::collections::HashSet;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use fused_optim::DType;
use safetensors::tensor::{SafeTensors, TensorView};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use train_step::BoxError;

pub use self::export::{ExportOptions, export};
use self::files::{Sum, crc32, seal, write_bytes, write_dir, write_file, write_new};
pub(crate) use self::files::{
    aside, check_name, check_outside, is_full, remove, remove_leftovers, write_output,
};
pub use self::find::{Found, newest};
pub(crate) use self::find::{is_file, of_another_run};
pub(crate) use self::lock::WorkDirLock;
pub use self::position::{Begun, Position, Waiting};
pub use self::read::load;
pub(crate) use self::read::{bad, failed, load_meta, lora_options, not_a_checkpoint, verify_model};
use self::read::{damaged, read_whole, unreadable};
pub use self::tensors::{Tensor, model_tensors};
use self::tensors::{
    check, check_convertible, deserialize, scaled, serialize, write_optimizer, write_tensors,
};
pub(crate) use self::tensors::{
    copy_from_bytes, load_into, specs, to_bytes, visit_buffers, visit_model, visit_whole_model,
};
use crate::data::{Layout, StreamPosition};
use crate::engine::{Engine, EngineState, StepContext, TensorSpec};
use crate::model::{LoraOptions, ModelWrapper, with_host_grads};
use crate::optim_wrapper::{OptimWrapper, OptimWrapperState, PendingCounts};
use crate::schedulers::Scheduler;
use crate::{Error, Result};

/// Contents of `state.json` in a checkpoint.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Meta {
    /// Version of the format; [`save`] sets it.
    pub(crate) format: u32,
    /// Position of the run.
    pub position: Position,
    /// Whether the run counts epochs; otherwise iterations.
    pub by_epoch: bool,
    /// Number of ranks.
    pub world_size: usize,
    /// Properties of the data that determine the batches, in which positions are counted.
    pub layout: Layout,
    /// Accumulated gradients that await an optimizer step.
    pub waiting: Waiting,
    /// Counts of the tokens in these gradients, if losses are weighted by counts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub counts: Option<PendingCounts>,
    /// `accumulative_counts` of the configuration.
    pub accumulative_counts: usize,
    /// Hyper-parameters of the optimizer in the configuration that the run began with.
    pub hyper_params: Value,
    /// Seed of the run.
    pub seed: u64,
    /// Text of the configuration; empty for a run without one.
    pub config: String,
    /// State of the loss scaler.
    pub(crate) loss_scaler: Option<::amp::ScalerState>,
    /// Number of optimizer steps skipped in a row.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub(crate) skipped: usize,
    /// State of the schedulers.
    #[serde(default)]
    pub schedulers: Vec<Scheduler>,
    /// State of each hook, by its name.
    pub hooks: Map<String, Value>,
    /// Random position of each rank ([`EngineState::random_position`]); empty if no model draws
    /// random numbers.
    #[serde(default)]
    pub random: Vec<Option<u64>>,
    /// Position of each rank in its training stream; empty for a data set.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub streams: Vec<StreamPosition>,
    /// Autotune cache of each rank ([`EngineState::autotune_cache`]); empty if there is none.
    #[serde(default, rename = "findings")]
    pub autotune_cache: Vec<String>,
    /// Whether this is an exported model, which a run cannot resume from.
    #[serde(default)]
    pub export: bool,
    /// Checkpoint that the run began from, by `load_from`.
    #[serde(default, with = "any_path")]
    pub load_from: Option<PathBuf>,
    /// LoRA options of the model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lora: Option<LoraOptions>,
    pub(crate) files: Vec<FileMeta>,
}

fn is_zero(count: &usize) -> bool {
    *count == 0
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FileMeta {
    name: String,
    bytes: usize,
    crc32: u32,
}

/// A checkpoint read and verified.
#[derive(Debug)]
pub struct Checkpoint {
    /// Contents of `state.json`.
    pub meta: Meta,
    /// State of the optimizer wrapper, if it was saved.
    pub optim: Option<OptimWrapperState>,
    model: Vec<u8>,
    path: PathBuf,
    /// CRC-32 of `state.json`, which contains those of the other files.
    digest: u32,
}

/// Number of tensors that [`Checkpoint::load_weights`] converted, by types.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Converted {
    /// Type in the checkpoint.
    pub from: DType,
    /// Type in the model.
    pub to: DType,
    /// Number of tensors.
    pub tensors: usize,
}

/// Checks that a saved tensor matches one of the model's, and counts it if it must be converted.
pub(crate) fn count_converted(
    all: &mut Vec<Converted>,
    saved: &TensorView<'_>,
    spec: &TensorSpec,
) -> Result<(), String> {
    let (from, to) = (check_convertible(saved, spec)?, spec.dtype);
    match all.iter_mut().find(|of| (of.from, of.to) == (from, to)) {
        Some(of) => of.tensors += 1,
        None if from == to => {}
        None => all.push(Converted { from, to, tensors: 1 }),
    }
    Ok(())
}

/// A checkpoint before it is written. Hooks may change the model and add tensors.
#[derive(Debug, Default)]
pub struct Contents {
    /// Contents of `state.json`.
    pub meta: Meta,
    /// Tensors of the model. Empty on all ranks but the first.
    pub model: Vec<Tensor>,
    /// Additional files of tensors, by name without extension. Only the first rank's are written.
    pub extra: Vec<(String, Vec<Tensor>)>,
    /// Tensors of this rank that may differ between ranks. Those of the first rank are in the
    /// model.
    pub own: Vec<Tensor>,
    /// Files of each rank.
    pub ranks: RankFiles,
    /// Whether `last_checkpoint` should name it.
    pub is_last: bool,
}

/// Files of each rank, by rank; empty for a rank with nothing to save.
#[derive(Debug, Default)]
pub struct RankFiles {
    /// [`gradient_bytes`]; empty outside of an accumulation.
    pub gradients: Vec<Vec<u8>>,
    /// [`own_bytes`]; empty if all ranks equal the first.
    pub own: Vec<Vec<u8>>,
    /// [`ModelWrapper::state_dict`]; empty if no rank has a state.
    pub wrapper: Vec<Vec<u8>>,
}

const FORMAT: u32 = 3;
/// Ends of the names of an adapter's tensors.
pub(crate) const ADAPTER: [&str; 2] = [".lora_A.weight", ".lora_B.weight"];
/// Name of the file of weights in a checkpoint.
pub(crate) const MODEL: &str = "model.safetensors";
const OPTIMIZER: &str = "optimizer.safetensors";
pub(crate) const STATE: &str = "state.json";
const GRADIENTS: &str = "gradients";
const OWN: &str = "rank";
const WRAPPER: &str = "wrapper";
/// Name of the file of a hook whose averages are the checkpoint's model: it contains the averages
/// and the trained model.
pub(crate) const AVERAGES: &str = "ema";
/// Prefix of the trained model's names in that file.
pub(crate) const TRAINED: &str = "source.";
/// Name of the file in the work directory that names the newest checkpoint.
pub const LAST: &str = "last_checkpoint";

/// Writes the checkpoint `work_dir/name`, and updates `last_checkpoint` if `is_last` is set. Called
/// by one rank. `optim` is saved too, without a copy of its state; a run cannot resume from a
/// checkpoint without it.
///
/// # Errors
///
/// [`Error::Optim`] with the error of the optimizer's device; [`Error::Io`] with the path;
/// [`Error::Checkpoint`] for a name that a checkpoint cannot have. An earlier checkpoint of that
/// name is then still in place.
pub fn save(
    work_dir: &Path,
    name: &str,
    contents: Contents,
    optim: Option<&OptimWrapper>,
) -> Result<PathBuf> {
    check_name(name)?;
    let Contents { meta, model, extra, ranks, is_last, .. } = contents;
    let loss_scaler = optim.and_then(|optim| optim.scaler().state_dict());
    let skipped = optim.map_or(0, OptimWrapper::skipped);
    let meta = Meta { loss_scaler, skipped, ..meta };
    // The tensors of each file are freed before the next is written.
    let path = write(work_dir, name, meta, |add| {
        add(MODEL, &mut |file| write_tensors(file, &[], &model))?;
        drop(model);
        if let Some(optim) = optim {
            add(OPTIMIZER, &mut |file| write_optimizer(file, optim.optimizer()))?;
        }
        for (name, tensors) in extra {
            let file = format!("{name}.safetensors");
            add(&file, &mut |file| write_tensors(file, &[], &tensors))?;
        }
        let RankFiles { gradients, own, wrapper } = ranks;
        for (what, ranks) in [(GRADIENTS, gradients), (OWN, own), (WRAPPER, wrapper)] {
            let mut ranks = ranks.into_iter().enumerate().filter(|(_, bytes)| !bytes.is_empty());
            ranks.try_for_each(|(rank, bytes)| {
                add(&rank_file(what, rank), &mut |file| write_bytes(file, &bytes))
            })?;
        }
        Ok(())
    })?;
    if is_last {
        write_file(work_dir, LAST, name.as_bytes())?;
    }
    Ok(path)
}

/// Writes the content of a file.
type WriteFile<'a> = dyn FnMut(&File) -> Result<Sum, BoxError> + 'a;
/// Adds a file of this name and content to a checkpoint.
type AddFile<'a> = dyn FnMut(&str, &mut WriteFile<'_>) -> Result<()> + 'a;

/// Writes a checkpoint of the files that `fill` adds, and a `state.json` that lists them.
fn write(
    work_dir: &Path,
    name: &str,
    meta: Meta,
    fill: impl FnOnce(&mut AddFile<'_>) -> Result<()>,
) -> Result<PathBuf> {
    write_dir(work_dir, name, |dir| {
        let mut files = Vec::new();
        fill(&mut |name, write| {
            let Sum { bytes, crc32 } = write_new(&dir.join(name), write)?;
            files.push(FileMeta { name: name.to_owned(), bytes: bytes as usize, crc32 });
            Ok(())
        })?;
        let state = state_file(&Meta { format: FORMAT, files, ..meta })?;
        write_new(&dir.join(STATE), |file| write_bytes(file, &state)).map(drop)
    })
}

fn state_file(meta: &Meta) -> Result<Vec<u8>> {
    let state = serde_json::to_string_pretty(meta);
    let state = state.map_err(|e| failed(STATE, e))?;
    Ok(seal(&state).into_bytes())
}

/// Atomically replaces the state of one hook in the checkpoint at `path`.
pub(crate) fn record_hook_state(path: &Path, hook: &str, state: Value) -> Result<()> {
    let mut meta = load_meta(path)?;
    meta.hooks.insert(hook.to_owned(), state);
    write_file(path, STATE, &state_file(&meta)?)
}

/// Writes `last_checkpoint` if it does not name this checkpoint of the work directory: a run may
/// have been killed before it did.
pub(crate) fn point_to(work_dir: &Path, name: &str) -> Result<()> {
    let named = fs::read_to_string(work_dir.join(LAST)).unwrap_or_default();
    if named.trim() == name { Ok(()) } else { write_file(work_dir, LAST, name.as_bytes()) }
}

impl Checkpoint {
    /// Returns an empty checkpoint, passed to hooks when weights come from another program's file.
    pub(crate) fn of_weights(file: &Path) -> Self {
        let (meta, path) = (Meta::default(), file.to_owned());
        Self { meta, optim: None, model: Vec::new(), path, digest: 0 }
    }

    /// Returns a number that differs if any file of this checkpoint does: every file has been
    /// verified against the checksums that it covers.
    pub(crate) fn digest(&self) -> u32 {
        self.digest
    }

    /// Checks that parameters and buffers are those of the model, as
    /// [`load_model`](Self::load_model) does before it changes anything.
    pub(crate) fn check_model(&self, engine: &dyn Engine) -> Result<()> {
        self.fitting(engine, &mut check).map(drop)
    }

    /// As [`check_model`](Self::check_model), for [`load_weights`](Self::load_weights). Returns
    /// what it would convert.
    pub(crate) fn check_weights(&self, engine: &dyn Engine) -> Result<Vec<Converted>> {
        let mut all = Vec::new();
        self.fitting(engine, &mut |view, spec| count_converted(&mut all, view, spec))?;
        Ok(all)
    }

    /// Copies parameters and buffers into the model, bit for bit.
    ///
    /// # Errors
    ///
    /// [`Error::Checkpoint`] naming the tensor that is missing, unexpected, or of another shape or
    /// type; the model is then unchanged.
    pub fn load_model(&self, engine: &mut dyn Engine) -> Result<()> {
        self.copy_model(engine, &mut check)
    }

    /// As [`load_model`](Self::load_model), for weights without the state of a run: tensors of
    /// another floating-point type are converted, rounding to the nearest value.
    ///
    /// # Errors
    ///
    /// As [`load_model`](Self::load_model), except for types; also for a value out of range of the
    /// model's type.
    pub fn load_weights(&self, engine: &mut dyn Engine) -> Result<Vec<Converted>> {
        let mut all = Vec::new();
        self.copy_model(engine, &mut |view, spec| count_converted(&mut all, view, spec))?;
        Ok(all)
    }

    /// Returns the saved tensors if they are those of the model.
    fn fitting(
        &self,
        engine: &dyn Engine,
        fits: &mut dyn FnMut(&TensorView<'_>, &TensorSpec) -> Result<(), String>,
    ) -> Result<SafeTensors<'_>> {
        let fail = |why: String| damaged(&self.path, MODEL, why);
        let tensors = SafeTensors::deserialize(&self.model).map_err(|e| fail(e.to_string()))?;
        let specs = specs(engine);
        for spec in &specs {
            let view = tensors.tensor(&spec.name).map_err(|_| {
                let hint = self.adapters_hint(&spec.name);
                fail(format!("has no `{}`: it belongs to another model{hint}", spec.name))
            })?;
            fits(&view, spec).map_err(fail)?;
        }
        if tensors.len() != specs.len() {
            let known: HashSet<_> = specs.iter().map(|s| s.name.as_str()).collect();
            let extra = tensors.names().into_iter().find(|n| !known.contains(n));
            let extra = extra.unwrap_or_default();
            let hint = self.adapters_hint(extra);
            return Err(fail(format!("has `{extra}`, which the model does not have{hint}")));
        }
        Ok(tensors)
    }

    /// Returns the saved LoRA options as text if a name that does not match is an adapter's.
    fn adapters_hint(&self, name: &str) -> String {
        match &self.meta.lora {
            Some(saved) if ADAPTER.iter().any(|end| name.ends_with(end)) => {
                let LoraOptions { rank, alpha, targets, .. } = saved;
                format!(
                    " (it was trained with lora = {{ rank = {rank}, alpha = {alpha}, targets = {targets:?} }})"
                )
            }
            _ => String::new(),
        }
    }

    fn copy_model(
        &self,
        engine: &mut dyn Engine,
        fits: &mut dyn FnMut(&TensorView<'_>, &TensorSpec) -> Result<(), String>,
    ) -> Result<()> {
        let fail = |why: String| damaged(&self.path, MODEL, why);
        let tensors = self.fitting(engine, fits)?;
        visit_whole_model(engine, &mut |_, spec, slice| {
            let view = tensors.tensor(&spec.name).map_err(|e| fail(e.to_string()))?;
            load_into(slice, &view).map_err(fail)
        })
    }

    /// Copies the trained weights into the model if the checkpoint's model is an average of them.
    /// `saved` are the tensors of its file [`AVERAGES`].
    pub(crate) fn load_trained(&self, saved: &[Tensor], engine: &mut dyn Engine) -> Result<()> {
        let fail = |why: String| damaged(&self.path, &format!("{AVERAGES}.safetensors"), why);
        let mut sources = Vec::new();
        for spec in engine.params().iter().chain(engine.buffers()) {
            let name = format!("{TRAINED}{}", spec.name);
            let source = saved.iter().find(|tensor| tensor.spec.name == name);
            let source = source.ok_or_else(|| fail(format!("has no `{name}`")))?;
            if (&source.spec.shape, source.spec.dtype) != (&spec.shape, spec.dtype) {
                return Err(fail(format!(
                    "`{}` has another shape or type than in the model",
                    spec.name
                )));
            }
            sources.push(source);
        }
        visit_model(engine, &mut |i, _, slice| {
            copy_from_bytes(slice, &sources[i].bytes);
            Ok(())
        })
    }

    /// Reads a file of this checkpoint, `None` if absent.
    fn file(&self, name: &str) -> Result<Option<Vec<u8>>> {
        let is_there = self.meta.files.iter().any(|file| file.name == name);
        is_there.then(|| read_whole(&self.path, &self.meta, name)).transpose()
    }

    /// Returns the tensors of a file added by a hook, `None` if absent.
    ///
    /// # Errors
    ///
    /// [`Error::Checkpoint`] naming the file that is missing or damaged.
    pub fn extra(&self, name: &str) -> Result<Option<Vec<Tensor>>> {
        self.tensors(&format!("{name}.safetensors"))
    }

    fn tensors(&self, file: &str) -> Result<Option<Vec<Tensor>>> {
        let Some(bytes) = self.file(file)? else { return Ok(None) };
        deserialize(&bytes).map(Some).map_err(|e| damaged(&self.path, file, e))
    }

    /// Returns the tensors of `rank` that differed from the first rank's, `None` if there were
    /// none.
    ///
    /// # Errors
    ///
    /// [`Error::Checkpoint`] naming the file that is missing or damaged.
    pub fn own(&self, rank: usize) -> Result<Option<Vec<Tensor>>> {
        self.tensors(&rank_file(OWN, rank))
    }

    /// Returns the directory of this checkpoint.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the state of `rank`'s model wrapper, `None` if there was none.
    ///
    /// # Errors
    ///
    /// [`Error::Checkpoint`] naming the file that is missing or damaged.
    pub fn wrapper(&self, rank: usize) -> Result<Option<Vec<u8>>> {
        self.file(&rank_file(WRAPPER, rank))
    }

    /// Adds the path of `state.json` to an error of the optimizer wrapper.
    pub(crate) fn refused(&self, why: Error) -> Error {
        match why {
            Error::Checkpoint { message, source, .. } => {
                let path = self.path.join(STATE);
                let message = format!("{}: {message}", path.display());
                Error::Checkpoint { path: Some(path), message, source }
            }
            why => unreadable(&self.path.join(OPTIMIZER), why),
        }
    }

    /// Restores the gradients that this rank had accumulated. If the checkpoint was written by
    /// another number of ranks, each rank gets `share` times the sum over all ranks.
    ///
    /// # Errors
    ///
    /// [`Error::Checkpoint`] naming the file that is missing, damaged, or of other parameters.
    pub fn load_gradients(
        &self,
        rank: usize,
        share: Option<f32>,
        params: &[TensorSpec],
        model: &mut dyn ModelWrapper,
    ) -> Result<()> {
        model.zero_grad();
        let Some(share) = share else { return self.add_gradients(rank, 1.0, params, model) };
        (0..self.meta.world_size)
            .try_for_each(|rank| self.add_gradients(rank, share, params, model))
    }

    fn add_gradients(
        &self,
        rank: usize,
        share: f32,
        params: &[TensorSpec],
        model: &mut dyn ModelWrapper,
    ) -> Result<()> {
        let file = rank_file(GRADIENTS, rank);
        let Some(bytes) = self.file(&file)? else { return Ok(()) };
        let fail = |why: String| damaged(&self.path, &file, why);
        let tensors = SafeTensors::deserialize(&bytes).map_err(|e| fail(e.to_string()))?;
        let mut state = EngineState::default();
        let mut cx = StepContext { sync: false, ..StepContext::new(model.sink(), &mut state) };
        model.prepare(None, &mut cx)?;
        let sink = model.sink();
        for (index, spec) in params.iter().enumerate() {
            // A parameter may have no gradient.
            let Ok(view) = tensors.tensor(&spec.name) else { continue };
            check(&view, spec).map_err(fail)?;
            sink.lock().ready(index, scaled(spec.dtype, view.data(), share).as_slice())?;
        }
        Ok(model.finish()?)
    }
}

/// Returns the accumulated gradients as safetensors; empty if there are none.
///
/// # Errors
///
/// Those of the model wrapper.
pub fn gradient_bytes(params: &[TensorSpec], model: &dyn ModelWrapper) -> Result<Vec<u8>> {
    let mut tensors = Vec::new();
    with_host_grads(model, &mut |grads| {
        let pairs = params.iter().zip(grads);
        tensors.extend(pairs.filter_map(|(spec, grad)| {
            Some(Tensor { spec: spec.clone(), bytes: to_bytes((*grad)?) })
        }));
        Ok(())
    })?;
    if tensors.is_empty() { Ok(Vec::new()) } else { serialize("gradients", &tensors) }
}

/// Returns a rank's own tensors as safetensors; empty if there are none.
///
/// # Errors
///
/// [`Error::Checkpoint`] if two tensors have the same name.
pub fn own_bytes(own: &[Tensor]) -> Result<Vec<u8>> {
    if own.is_empty() { Ok(Vec::new()) } else { serialize("tensors of a rank", own) }
}

/// Writes the parts of the checkpoint `work_dir/name` that `keys` name (`model`, `optimizer`,
/// `state`) as a new checkpoint for publication, whose name ends with the CRC-32 of the model.
/// Without `state`, its `state.json` contains no information about the run.
///
/// # Errors
///
/// [`Error::Checkpoint`] if the checkpoint is damaged, [`Error::Io`] with the path.
pub fn publish(work_dir: &Path, name: &str, keys: &[String]) -> Result<PathBuf> {
    check_name(name)?;
    let from = work_dir.join(name);
    let meta = load_meta(&from)?;
    let model = read_whole(&from, &meta, MODEL)?;
    let published = format!("{name}-{:08x}", crc32(&model));
    let has = |key: &str| keys.iter().any(|k| k == key);
    let optimizer = has("optimizer") && meta.files.iter().any(|file| file.name == OPTIMIZER);
    let optimizer = optimizer.then(|| read_whole(&from, &meta, OPTIMIZER)).transpose()?;
    let loss_scaler = meta.loss_scaler;
    let lora = meta.lora.clone();
    let meta = if has("state") { meta } else { Meta { lora, ..Meta::default() } };
    write(work_dir, &published, Meta { loss_scaler, export: true, ..meta }, |add| {
        if has("model") {
            add(MODEL, &mut |file| write_bytes(file, &model))?;
        }
        match optimizer {
            Some(bytes) => add(OPTIMIZER, &mut |file| write_bytes(file, &bytes)),
            None => Ok(()),
        }
    })
}

/// Returns the name of a rank's file of gradients, buffers, or wrapper state.
fn rank_file(what: &str, rank: usize) -> String {
    format!("{what}_{rank}.safetensors")
}

#[cfg(test)]
mod tests {
    use collective::reducer::ReducerOptions;
    use fused_optim::{Sgd, SgdHyper, Slice, SliceMut};
    use half::{bf16, f16};

    use super::files::check_seal;
    use super::read::Fault;
    use super::*;
    use crate::data::Batch;
    use crate::engine::{Gradient, Model as _};
    use crate::model::DistributedDataParallel;
    use crate::testing::{FakeEngine, Values, group};

    /// Tensors of all types; a NaN with a payload and the smallest subnormals among the values.
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

    fn optim() -> OptimWrapper {
        let sgd = Sgd::with_one_group(SgdHyper { lr: 0.1, ..SgdHyper::default() }, 3).unwrap();
        let scaler = ::amp::LossScaler::new(::amp::LossScalerOptions::default()).unwrap();
        let mut optim = OptimWrapper::new(Box::new(sgd), 1).with_mixed_precision(scaler);
        let state = OptimWrapperState { skipped: 2, ..optim.state_dict().unwrap() };
        optim.load_state_dict(&state).unwrap();
        optim
    }

    fn contents(gradients: Vec<Vec<u8>>) -> Contents {
        let position = Position {
            epoch: 1,
            iter: 17,
            batch: 5,
            validated: Some(12),
            begun: Begun { iter: 3, place: 99, ..Begun::default() },
        };
        let meta = Meta {
            position,
            world_size: 2,
            seed: u64::MAX,
            config: "x = 1".to_owned(),
            hooks: [("H".to_owned(), Value::from(7))].into_iter().collect(),
            random: vec![None, Some(u64::MAX)],
            autotune_cache: vec!["a".to_owned(), String::new()],
            ..Meta::default()
        };
        Contents {
            meta,
            model: Vec::new(),
            extra: vec![("more".into(), vec![Tensor::f32("x".into(), vec![2], &[1.0, -2.5])])],
            own: Vec::new(),
            ranks: RankFiles {
                gradients,
                own: Vec::new(),
                wrapper: vec![Vec::new(), vec![1, 2, 3]],
            },
            is_last: true,
        }
    }

    fn save(
        dir: &Path,
        name: &str,
        engine: &mut FakeEngine,
        contents: Contents,
    ) -> Result<PathBuf> {
        let contents = Contents { model: model_tensors(engine)?, ..contents };
        super::save(dir, name, contents, Some(&optim()))
    }

    /// Without an optimizer.
    fn save_weights(dir: &Path, name: &str, engine: &mut FakeEngine, contents: Contents) {
        let contents = Contents { model: model_tensors(engine).unwrap(), ..contents };
        super::save(dir, name, contents, None).unwrap();
    }

    fn reason(result: Result<impl Sized>) -> String {
        result.map(|_| ()).unwrap_err().to_string()
    }

    #[test]
    fn saved_checkpoint_is_read_back() {
        let dir = tempfile::tempdir().unwrap();
        let path = save(dir.path(), "epoch_1", &mut engine(), contents(Vec::new())).unwrap();
        assert_eq!(find_last(dir.path()), Some(path.clone()));
        let loaded = load(&path).unwrap();
        let saved = contents(Vec::new());
        assert_eq!(loaded.meta.position, saved.meta.position);
        assert_eq!((loaded.meta.world_size, loaded.meta.seed), (2, u64::MAX));
        assert_eq!((loaded.meta.config.as_str(), &loaded.meta.hooks["H"]), ("x = 1", &7.into()));
        let (optim, saved_optim) = (loaded.optim.as_ref().unwrap(), optim().state_dict().unwrap());
        assert_eq!((optim.loss_scaler, optim.skipped), (saved_optim.loss_scaler, 2));
        assert_eq!(optim.optimizer, saved_optim.optimizer);
        assert_eq!(loaded.extra("more").unwrap().unwrap(), saved.extra[0].1);
        assert_eq!(loaded.extra("less").unwrap(), None);
        assert_eq!(loaded.meta.random, saved.meta.random);
        assert_eq!(loaded.meta.autotune_cache, saved.meta.autotune_cache);
        assert_eq!([0, 1].map(|rank| loaded.wrapper(rank).unwrap()), [None, Some(vec![1, 2, 3])]);
        let mut other = zeroed(engine());
        assert_ne!(bits(&mut other), bits(&mut engine()));
        loaded.load_model(&mut other).unwrap();
        assert_eq!(bits(&mut other), bits(&mut engine()));
    }

    /// Runs a pass that only accumulates.
    fn pass(engine: &mut FakeEngine, ddp: &mut DistributedDataParallel, scale: f32) {
        let mut state = EngineState::default();
        let cx = StepContext::new(ddp.sink(), &mut state);
        let mut cx = StepContext { sync: false, loss_scale: scale, ..cx };
        ddp.prepare(Some(engine), &mut cx).unwrap();
        engine.train_step(&Batch::new(), &mut cx).unwrap();
        ddp.finish().unwrap();
    }

    #[test]
    fn accumulated_gradients_are_restored() {
        let dir = tempfile::tempdir().unwrap();
        let mut engine = engine();
        let model = |engine: &FakeEngine| {
            let options = ReducerOptions::default();
            DistributedDataParallel::new(group(), engine.params(), options).unwrap()
        };
        let mut ddp = model(&engine);
        assert!(gradient_bytes(engine.params(), &ddp).unwrap().is_empty());
        pass(&mut engine, &mut ddp, 0.75);
        let bytes = gradient_bytes(engine.params(), &ddp).unwrap();
        let path = save(dir.path(), "a", &mut engine, contents(vec![bytes.clone()])).unwrap();
        let mut other = model(&engine);
        load(&path).unwrap().load_gradients(0, None, engine.params(), &mut other).unwrap();
        assert_eq!(gradient_bytes(engine.params(), &other).unwrap(), bytes);
        other
            .with_grads(&mut |g| {
                assert!(
                    matches!(g[0], Some(Gradient::Host(Slice::F32([0.75, 0.75, 0.75])))),
                    "{g:?}"
                );
                Ok(())
            })
            .unwrap();
        // A rank without a file had no gradients.
        load(&path).unwrap().load_gradients(1, None, engine.params(), &mut other).unwrap();
        assert!(gradient_bytes(engine.params(), &other).unwrap().is_empty());
        // Two ranks wrote it, one without gradients: each of three ranks gets half of the sum.
        load(&path).unwrap().load_gradients(2, Some(0.5), engine.params(), &mut other).unwrap();
        other
            .with_grads(&mut |g| {
                assert!(
                    matches!(g[0], Some(Gradient::Host(Slice::F32([0.375, 0.375, 0.375])))),
                    "{g:?}"
                );
                Ok(())
            })
            .unwrap();
    }

    #[test]
    fn damaged_file_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let mut engine = engine();
        let mut ddp =
            DistributedDataParallel::new(group(), engine.params(), ReducerOptions::default())
                .unwrap();
        pass(&mut engine, &mut ddp, 1.0);
        let gradients = vec![gradient_bytes(engine.params(), &ddp).unwrap()];
        let path = save(dir.path(), "a", &mut engine, contents(gradients)).unwrap();
        let specs = engine.params().to_vec();
        let mut read = || load(&path).and_then(|c| c.load_gradients(0, None, &specs, &mut ddp));
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
    fn mismatched_model_is_refused_by_name_and_not_changed() {
        let dir = tempfile::tempdir().unwrap();
        let path = save(dir.path(), "a", &mut engine(), contents(Vec::new())).unwrap();
        let loaded = load(&path).unwrap();
        let (a, b) = (Values::F32(vec![9.0; 3]), Values::F16(vec![f16::ONE; 3]));
        let mean = [("mean", Values::F32(vec![0.0]))];
        let c = Values::Bf16(vec![bf16::ONE; 3]);
        let cases = [
            (vec![("a", a.clone()), ("b", b.clone()), ("d", c.clone())], "has no `d`"),
            (vec![("a", a.clone()), ("b", b.clone())], "has `c`, which the model does not have"),
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
    fn weights_of_another_type_are_converted_but_not_resumed_from() {
        let dir = tempfile::tempdir().unwrap();
        let mut halves = engine();
        let path = save(dir.path(), "a", &mut halves, contents(Vec::new())).unwrap();
        let loaded = load(&path).unwrap();
        assert_eq!(loaded.load_weights(&mut zeroed(engine())).unwrap(), []);
        let f32s = |count| Values::F32(vec![0.0; count]);
        let wide = || {
            let params = [("a", f32s(3)), ("b", f32s(3)), ("c", f32s(3))];
            FakeEngine::new(&params, &[("mean", f32s(1))])
        };
        let mut target = wide();
        let (to, tensors) = (DType::F32, 1);
        let converted = [DType::F16, DType::Bf16].map(|from| Converted { from, to, tensors });
        assert_eq!(loaded.load_weights(&mut target).unwrap(), converted);
        assert_eq!(bits(&mut target)[0], bits(&mut halves)[0]);
        for (wide, half) in target.params.iter().zip(&halves.params).skip(1) {
            let Values::F32(wide) = wide else { panic!("{wide:?}") };
            let exact: Vec<f32> = match half {
                Values::F16(v) => v.iter().map(|x| x.to_f32()).collect(),
                Values::Bf16(v) => v.iter().map(|x| x.to_f32()).collect(),
                Values::F32(v) => v.clone(),
            };
            let same = |(a, b): (&f32, &f32)| a == b || a.is_nan() && b.is_nan();
            assert!(wide.iter().zip(&exact).all(same), "{wide:?} {exact:?}");
        }
        assert!(reason(loaded.load_model(&mut wide())).contains("`b` is F16 [3]"));

        // To a narrower type values are rounded, unless they overflow.
        let narrow = |value| {
            let mut source = FakeEngine::new(&[("w", Values::F32(vec![value]))], &[]);
            let path = save(dir.path(), "w", &mut source, contents(Vec::new())).unwrap();
            let mut target = FakeEngine::new(&[("w", Values::F16(vec![f16::ONE]))], &[]);
            let outcome = load(&path).unwrap().load_weights(&mut target);
            (outcome.map_err(|e| e.to_string()), target.params.remove(0))
        };
        let (outcome, value) = narrow(0.1);
        let converted = Converted { from: DType::F32, to: DType::F16, tensors };
        assert_eq!((outcome, value), (Ok(vec![converted]), Values::F16(vec![f16::from_f32(0.1)])));
        let (outcome, value) = narrow(1e5);
        assert!(
            outcome
                .unwrap_err()
                .contains("`w` contains 100000, which is out of range of the model's F16")
        );
        assert_eq!(value, Values::F16(vec![f16::ONE]));
    }

    #[test]
    fn checkpoint_is_replaced_atomically() {
        let dir = tempfile::tempdir().unwrap();
        let entries = || {
            let entries = fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name());
            let mut names: Vec<_> = entries.map(|n| n.into_string().unwrap()).collect();
            names.sort();
            names
        };
        let path = save(dir.path(), "a", &mut engine(), contents(Vec::new())).unwrap();
        // Leftovers of a kill during a save and during a replacement.
        fs::create_dir(dir.path().join(".a.tmp")).unwrap();
        fs::create_dir(dir.path().join(".a.old")).unwrap();
        fs::write(path.join(".state.json.tmp"), "").unwrap();
        save(dir.path(), "a", &mut zeroed(engine()), contents(Vec::new())).unwrap();
        assert_eq!(entries(), ["a", LAST]);
        let mut now = engine();
        load(&path).unwrap().load_model(&mut now).unwrap();
        assert_eq!(bits(&mut now), bits(&mut zeroed(engine())));
        // If nothing can be written, the existing checkpoint stays.
        fs::write(dir.path().join(".a.tmp"), "").unwrap();
        let said = reason(save(dir.path(), "a", &mut engine(), contents(Vec::new())));
        assert!(said.contains(".a.tmp"), "{said}");
        load(&path).unwrap();
    }

    #[test]
    fn failed_save_leaves_no_files() {
        let dir = tempfile::tempdir().unwrap();
        let entries = || {
            let names = fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name());
            let mut names: Vec<_> = names.map(|name| name.into_string().unwrap()).collect();
            names.sort();
            names
        };
        let path = save(dir.path(), "a", &mut engine(), contents(Vec::new())).unwrap();
        // The model is written before this invalid file name fails.
        let extra = vec![("no/directory".to_owned(), Vec::new())];
        let broken = Contents { extra, ..contents(Vec::new()) };
        let said = reason(save(dir.path(), "b", &mut engine(), broken));
        assert!(said.contains("/.b.tmp/no/directory.safetensors: No such file"), "{said}");
        assert_eq!(entries(), ["a", LAST]);
        // Leftovers of a killed run are not published, and are removed when a run starts.
        let sum = crc32(&fs::read(path.join(MODEL)).unwrap());
        let stale = dir.path().join(format!(".a-{sum:08x}.tmp"));
        fs::create_dir(&stale).unwrap();
        fs::write(stale.join(OPTIMIZER), "stale").unwrap();
        let published = publish(dir.path(), "a", &["model".to_owned()]).unwrap();
        assert_eq!(fs::read_dir(&published).unwrap().count(), 2);
        fs::create_dir(&stale).unwrap();
        fs::write(stale.join(OPTIMIZER), "stale").unwrap();
        remove_leftovers(dir.path()).unwrap();
        assert_eq!(entries(), ["a", &format!("a-{sum:08x}"), LAST]);
    }

    fn find_last(dir: &Path) -> Option<PathBuf> {
        newest(dir).unwrap().path
    }

    #[test]
    fn newest_finds_the_newest_or_explains_its_absence() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(newest(dir.path()).unwrap(), Found::default());
        assert_eq!(newest(&dir.path().join("absent")).unwrap(), Found::default());
        let path = save(dir.path(), "a", &mut engine(), contents(Vec::new())).unwrap();
        let old = dir.path().join(".a.old");
        fs::rename(&path, &old).unwrap();
        assert_eq!(find_last(dir.path()), Some(old.clone()));
        // A checkpoint of weights only cannot be resumed from.
        let weights = Contents { is_last: false, ..contents(Vec::new()) };
        save_weights(dir.path(), "best", &mut engine(), weights);
        assert_eq!(find_last(dir.path()), Some(old.clone()));
        fs::remove_dir_all(old).unwrap();
        let error = newest(dir.path()).unwrap_err();
        assert!(matches!(&error, Error::Checkpoint { path: Some(at), .. } if at == dir.path()));
        let said = error.to_string();
        assert!(said.contains("/a/state.json: No such file"), "{said}");
        let error = load(&path).unwrap_err();
        let Error::Checkpoint { path: Some(at), source: Some(source), .. } = &error else {
            panic!("{error}")
        };
        assert_eq!(*at, path.join(STATE));
        let missing = source.downcast_ref::<std::io::Error>().unwrap();
        assert_eq!(missing.kind(), std::io::ErrorKind::NotFound);
        assert_eq!(std::error::Error::source(&error).unwrap().to_string(), missing.to_string());
        for pointer in ["", "\n"] {
            fs::write(dir.path().join(LAST), pointer).unwrap();
            let weights = vec![dir.path().join("best")];
            assert_eq!(newest(dir.path()).unwrap(), Found { weights, ..Found::default() });
        }
        let mut export = Contents { is_last: false, ..contents(Vec::new()) };
        export.meta.export = true;
        save_weights(dir.path(), "best", &mut engine(), export);
        let exports = vec![dir.path().join("best")];
        assert_eq!(newest(dir.path()).unwrap(), Found { exports, ..Found::default() });
    }

    #[test]
    fn damaged_checkpoints_are_skipped_and_named() {
        let dir = tempfile::tempdir().unwrap();
        let at = |iter| {
            let mut contents = contents(Vec::new());
            contents.meta.position = Position { iter, ..Position::default() };
            contents
        };
        for (name, iter) in [("c", 5), ("a", 7), ("b", 9)] {
            save(dir.path(), name, &mut engine(), at(iter)).unwrap();
        }
        assert_eq!(find_last(dir.path()), Some(dir.path().join("b")));
        let mut broken: Vec<PathBuf> = Vec::new();
        for (name, file) in [("b", STATE), ("a", OPTIMIZER), ("c", MODEL)] {
            let left = newest(dir.path()).unwrap();
            assert_eq!(left.path, Some(dir.path().join(name)));
            assert_eq!(left.skipped.len(), broken.len());
            for file in &broken {
                let named = format!("{}: ", file.display());
                assert!(left.skipped.iter().any(|s| s.starts_with(&named)), "{left:?}");
            }
            let file = dir.path().join(name).join(file);
            let mut bytes = fs::read(&file).unwrap();
            let middle = bytes.len() / 2;
            bytes[middle] ^= 1;
            fs::write(&file, bytes).unwrap();
            broken.push(file);
        }
        let said = reason(newest(dir.path()));
        assert!(broken.iter().all(|file| said.contains(file.to_str().unwrap())), "{said}");
    }

    #[test]
    fn checkpoint_of_another_format_ends_the_search() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["epoch_1", "epoch_2"] {
            save(dir.path(), name, &mut engine(), contents(Vec::new())).unwrap();
        }
        let state = dir.path().join("epoch_2").join(STATE);
        let text = fs::read_to_string(&state).unwrap();
        for (format, other) in [
            (4, text.replace("\"format\": 3", "\"format\": 4")),
            (2, text.replace("\"format\": 3", "\"format\": 2")),
        ] {
            fs::write(&state, other).unwrap();
            let said = reason(newest(dir.path()));
            assert!(said.contains(&format!("format {format} is not supported")), "{said}");
            assert!(said.contains("load_from = "), "{said}");
        }
        // An exported model is none to resume from.
        let mut export = Contents { is_last: false, ..contents(Vec::new()) };
        export.meta.export = true;
        save_weights(dir.path(), "best", &mut engine(), export);
        let best = dir.path().join("best").join(STATE);
        let other = fs::read_to_string(&best).unwrap().replace("\"format\": 3", "\"format\": 2");
        fs::write(&best, other).unwrap();
        fs::write(&state, text).unwrap();
        assert_eq!(find_last(dir.path()), Some(dir.path().join("epoch_2")));
    }

    #[test]
    fn checkpoint_that_cannot_be_read_is_not_skipped() {
        let at = Path::new("run/epoch_1");
        for (kind, is_damaged) in [
            (std::io::ErrorKind::NotFound, true),
            (std::io::ErrorKind::PermissionDenied, false),
            (std::io::ErrorKind::StaleNetworkFileHandle, false),
            (std::io::ErrorKind::Other, false),
        ] {
            assert_eq!(Fault::io(at, STATE, kind.into()).is_damaged, is_damaged, "{kind}");
        }
        // A loop of links is neither a file nor its absence.
        let dir = tempfile::tempdir().unwrap();
        save(dir.path(), "a", &mut engine(), contents(Vec::new())).unwrap();
        for name in ["epoch_2", "iter_7", "best_acc_epoch_1", ".epoch_3.old"] {
            let at = dir.path().join(name);
            fs::create_dir(&at).unwrap();
            std::os::unix::fs::symlink(STATE, at.join(STATE)).unwrap();
            let said = reason(newest(dir.path()));
            let file = format!("/{name}/state.json");
            assert!(said.contains("cannot read ") && said.contains(&file), "{said}");
            fs::remove_dir_all(at).unwrap();
        }
    }

    #[test]
    fn directory_that_is_no_checkpoint_and_cannot_be_read_is_skipped() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["lost+found", "epoch_notes"] {
            fs::create_dir(dir.path().join(name)).unwrap();
            std::os::unix::fs::symlink(STATE, dir.path().join(name).join(STATE)).unwrap();
        }
        let mut unread = Vec::new();
        let other =
            of_another_run(dir.path(), None, &mut |why| unread.push(why.to_owned())).unwrap();
        assert_eq!((other, unread.len()), (None, 2), "{unread:?}");
        assert!(unread.iter().any(|why| why.contains("lost+found/state.json")), "{unread:?}");
        let path = save(dir.path(), "a", &mut engine(), contents(Vec::new())).unwrap();
        let found = newest(dir.path()).unwrap();
        assert_eq!((found.path, found.skipped.len(), found.unread.len()), (Some(path), 0, 2));
        // A checkpoint with a name of its own counts if `last_checkpoint` names it.
        fs::write(dir.path().join(LAST), "lost+found").unwrap();
        assert!(reason(newest(dir.path())).contains("lost+found/state.json"));
        assert!(of_another_run(dir.path(), None, &mut |_| {}).is_err());
        fs::write(dir.path().join(LAST), [0xff]).unwrap();
        assert!(of_another_run(dir.path(), None, &mut |_| {}).is_err());
        // A look at files that fails is no permission to remove them.
        assert!(remove(&dir.path().join(LAST)).is_err());
    }

    #[test]
    fn replaced_checkpoint_is_removed_or_gets_its_name_back() {
        let dir = tempfile::tempdir().unwrap();
        let path = save(dir.path(), "a", &mut engine(), contents(Vec::new())).unwrap();
        let copy = |name: &str| {
            let to = dir.path().join(name);
            fs::create_dir(&to).unwrap();
            for file in fs::read_dir(&path).unwrap().map(|file| file.unwrap()) {
                fs::copy(file.path(), to.join(file.file_name())).unwrap();
            }
            to
        };
        // Killed before it was removed.
        let (old, older) = (copy(".a.old"), copy("..a.old.old"));
        // Not a checkpoint's, and a user's.
        fs::create_dir(dir.path().join(".git.old")).unwrap();
        fs::create_dir(dir.path().join("a.old")).unwrap();
        remove_leftovers(dir.path()).unwrap();
        assert!(!old.exists() && !older.exists() && path.exists());
        assert!(dir.path().join(".git.old").exists() && dir.path().join("a.old").exists());
        // Killed before the new one had its name.
        fs::rename(&path, &old).unwrap();
        fs::remove_file(dir.path().join(LAST)).unwrap();
        assert_eq!(find_last(dir.path()), Some(old.clone()));
        remove_leftovers(dir.path()).unwrap();
        assert!(!old.exists());
        assert_eq!(find_last(dir.path()), Some(path));
    }

    #[test]
    fn invalid_names_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let work_dir = dir.path().join("run");
        let attempt = |name: &str| save(&work_dir, name, &mut engine(), contents(Vec::new()));
        let long = "x".repeat(201);
        for name in ["", ".", "..", "a/b", "/a", "a/", LAST, ".runner.lock", ".a.old", "a\0", &long]
        {
            let said = reason(attempt(name));
            assert!(said.contains(&format!("cannot be called {name:?}")), "{said}");
            assert!(!work_dir.exists(), "{name}");
        }
        attempt("a").unwrap();
    }

    #[test]
    fn export_into_a_checkpoint_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = save(dir.path(), "a", &mut engine(), contents(Vec::new())).unwrap();
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        fs::create_dir(dir.path().join("b")).unwrap();
        let other = save(dir.path(), "c", &mut engine(), contents(Vec::new())).unwrap();
        for dir in [&path, &link, &other, &path.join("new")] {
            for file in [MODEL, OPTIMIZER, "new.safetensors"] {
                let said = reason(export(&path, &dir.join(file), ExportOptions::default()));
                assert!(said.contains("is inside the checkpoint"), "{said}");
            }
        }
        // Links to files of a checkpoint are replaced, not written through.
        let before = fs::read(path.join(OPTIMIZER)).unwrap();
        for (name, hard) in [("soft.safetensors", false), ("hard.safetensors", true)] {
            let out = dir.path().join("b").join(name);
            let target = path.join(OPTIMIZER);
            match hard {
                true => fs::hard_link(target, &out).unwrap(),
                false => std::os::unix::fs::symlink(target, &out).unwrap(),
            }
            // Files with the name of a temporary one are the user's.
            let unfinished = dir.path().join("b").join(format!(".{name}.tmp"));
            std::os::unix::fs::symlink(path.join(MODEL), unfinished).unwrap();
            export(&path, &out, ExportOptions::default()).unwrap();
            assert_eq!(fs::read(path.join(OPTIMIZER)).unwrap(), before);
        }
        load(&path).unwrap();
        assert_eq!(fs::read_dir(dir.path().join("b")).unwrap().count(), 4);
    }

    #[test]
    fn output_with_a_name_that_is_not_utf8_replaces_a_link() {
        use std::os::unix::ffi::OsStrExt;
        let dir = tempfile::tempdir().unwrap();
        let users = dir.path().join(format!(".runner-{}-0.tmp", std::process::id()));
        let (target, out) = (
            dir.path().join("target"),
            dir.path().join(std::ffi::OsStr::from_bytes(b"plot-\xff.svg")),
        );
        for path in [&users, &target] {
            fs::write(path, "kept").unwrap();
        }
        std::os::unix::fs::symlink(&target, &out).unwrap();
        write_output(&out, b"new").unwrap();
        assert_eq!(fs::read(&out).unwrap(), b"new");
        for path in [&users, &target] {
            assert_eq!(fs::read(path).unwrap(), b"kept");
        }
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 3);
    }

    #[test]
    fn pointer_is_written_if_it_is_stale() {
        let dir = tempfile::tempdir().unwrap();
        point_to(dir.path(), "epoch_2").unwrap();
        assert_eq!(fs::read_to_string(dir.path().join(LAST)).unwrap(), "epoch_2");
        point_to(dir.path(), "epoch_3").unwrap();
        assert_eq!(fs::read_to_string(dir.path().join(LAST)).unwrap(), "epoch_3");
    }

    #[test]
    fn paths_that_are_not_utf8_are_kept() {
        use std::os::unix::ffi::OsStringExt;
        let odd = PathBuf::from(std::ffi::OsString::from_vec(vec![b'r', 0xff, b'/', b'a']));
        let found = Found {
            path: Some(odd.clone()),
            exports: vec![odd.clone(), PathBuf::from("plain")],
            ..Found::default()
        };
        let text = serde_json::to_string(&found).unwrap();
        assert_eq!(serde_json::from_str::<Found>(&text).unwrap(), found);
        let dir = tempfile::tempdir().unwrap();
        let mut contents = contents(Vec::new());
        contents.meta.load_from = Some(odd.clone());
        let path = save(dir.path(), "a", &mut engine(), contents).unwrap();
        assert_eq!(load_meta(&path).unwrap().load_from, Some(odd));
    }

    #[test]
    fn unknown_format_is_refused_by_number() {
        let dir = tempfile::tempdir().unwrap();
        let path = save(dir.path(), "a", &mut engine(), contents(Vec::new())).unwrap();
        // Format 1 had no checksum of its own.
        fs::write(path.join(STATE), r#"{ "format": 1, "position": { "epoch": 1 } }"#).unwrap();
        let said = reason(load(&path));
        assert!(
            said.contains("a/state.json: format 1 is not supported; this version reads 3"),
            "{said}"
        );
    }

    #[test]
    fn checksum_covers_every_bit_of_the_state() {
        let dir = tempfile::tempdir().unwrap();
        let path = save(dir.path(), "a", &mut engine(), contents(Vec::new())).unwrap();
        let whole = fs::read(path.join(STATE)).unwrap();
        serde_json::from_slice::<Value>(&whole).unwrap();
        for bit in 0..8 * whole.len() {
            let mut flipped = whole.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(check_seal(&flipped).is_err(), "bit {bit}");
        }
        for len in 0..whole.len() {
            assert!(check_seal(&whole[..len]).is_err(), "{len} bytes");
        }
        check_seal(&whole).unwrap();
    }

    #[test]
    fn publish_writes_the_requested_parts() {
        let dir = tempfile::tempdir().unwrap();
        save(dir.path(), "a", &mut engine(), contents(Vec::new())).unwrap();
        let path = publish(dir.path(), "a", &["model".to_owned()]).unwrap();
        let sum = crc32(&fs::read(path.join(MODEL)).unwrap());
        assert_eq!(path.file_name().unwrap().to_str().unwrap(), format!("a-{sum:08x}"));
        // A published model can be loaded, but not resumed from.
        let published = load(&path).unwrap();
        published.load_model(&mut zeroed(engine())).unwrap();
        assert!(published.optim.is_none());
        assert_eq!((published.meta.config.as_str(), published.meta.export), ("", true));
        let all = ["model", "optimizer", "state"].map(str::to_owned);
        let path = publish(dir.path(), "a", &all).unwrap();
        let published = load(&path).unwrap();
        assert!(published.optim.is_some() && published.meta.position.iter == 17);
        fs::remove_file(dir.path().join(LAST)).unwrap();
        assert_eq!(find_last(dir.path()), Some(dir.path().join("a")));
    }
}
