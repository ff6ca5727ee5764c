//! [`Trainer::resume`].

use std::collections::HashSet;
use std::path::Path;

use amp::LossScaler;
use fused_optim::{HyperParam, StateDict, StateLayout};
use safetensors::Dtype;
use serde::Deserialize;
use serde::de::{DeserializeOwned, IgnoredAny};
use tracing::warn;

use super::Trainer;
use super::progress::{FORMAT, Names, OLD_PREFIX, PREFIX, Progress};
use crate::checkpoint::{Entry, Id, Reader, Stored};
use crate::{BoxError, Error, Result, Schedules};

/// A checked file, before it changes anything.
struct Loaded<T> {
    file: Reader,
    names: Names,
    progress: Progress,
    scaler: LossScaler,
    schedules: Option<Schedules>,
    optimizer: Optimizer,
    own: T,
}

impl Trainer {
    /// Resumes a saved run bit by bit, and returns the epoch to resume with. If no rank has such a
    /// file, returns 0 and changes nothing.
    ///
    /// Every rank must call it. All ranks read the file, twice: to verify it, and, if all have the
    /// same one, into their state: on the CPU without further memory, on a GPU with a copy of the
    /// optimizer's state on the host. Batches since the last step are dropped. May be called at any
    /// time, also to go back to a checkpoint.
    ///
    /// Hyper-parameters, including learning rates, are those of the saved run. The seed has to be,
    /// and the number of schedulers. Clipping, accumulation, precision (apart from a loss scale)
    /// and the function of a schedule are not saved: they are the builder's, and may be changed
    /// between two epochs. With another number of ranks the dropout masks and the order of averages
    /// differ.
    ///
    /// # Errors
    ///
    /// [`Error::Checkpoint`] on every rank if on one of them the file is damaged, cannot be read,
    /// belongs to another model, optimizer or seed, is missing, or is another one than rank 0's; or
    /// if it contains data of [`save_with`](Self::save_with). Nothing is changed then on any rank.
    /// If the file cannot be read a second time, the error says so, and every later `step` and
    /// `save` fails until the trainer has resumed.
    pub fn resume<S: Stored + ?Sized>(
        &mut self,
        model: &mut S,
        path: impl AsRef<Path>,
    ) -> Result<usize> {
        let own = |own: Own<'_>| {
            // `None` and `()` are no loss.
            let is_empty = |rank| Ok::<_, BoxError>(own.of::<Option<IgnoredAny>>(rank)?.is_none());
            for rank in 0..own.ranks() {
                if !is_empty(rank)? {
                    return Err("it was saved by `save_with`, with data of each rank such as its place in an epoch: \
                                call `resume_with`, or `resume_with_all` for another number of ranks"
                        .into());
                }
            }
            Ok(())
        };
        self.resume_from(model, path.as_ref(), own).map(|(epoch, _)| epoch)
    }

    /// Like [`resume`](Self::resume), from a file of [`save_with`](Self::save_with). Also returns
    /// the data that this rank saved, or `None` if there is no such file.
    ///
    /// # Errors
    ///
    /// The errors of [`resume`](Self::resume); also [`Error::Checkpoint`] if the file was saved by
    /// another number of ranks, or contains no data of this type.
    pub fn resume_with<T: DeserializeOwned, S: Stored + ?Sized>(
        &mut self,
        model: &mut S,
        path: impl AsRef<Path>,
    ) -> Result<(usize, Option<T>)> {
        let (rank, ranks) = (self.rank(), self.world_size());
        let own = |own: Own<'_>| {
            match own.ranks() {
            saved if saved == ranks => own.of(rank),
            0 => Err("it was saved by `save`, without data of the ranks: call `resume`".into()),
            saved => Err(format!(
                "{saved} ranks saved it, each with data of its own, and this run has {ranks}: resume with {saved}, \
                 or call `resume_with_all`"
            )
            .into()),
        }
        };
        self.resume_from(model, path.as_ref(), own)
    }

    /// Like [`resume_with`](Self::resume_with), by any number of ranks: returns the data of all
    /// ranks that saved, in their order. To evaluate, or to begin an epoch, they may be ignored:
    /// `resume_with_all::<serde::de::IgnoredAny>`.
    ///
    /// # Errors
    ///
    /// The errors of [`resume`](Self::resume); also [`Error::Checkpoint`] if the file contains no
    /// data of this type.
    pub fn resume_with_all<T: DeserializeOwned, S: Stored + ?Sized>(
        &mut self,
        model: &mut S,
        path: impl AsRef<Path>,
    ) -> Result<(usize, Option<Vec<T>>)> {
        let own = |own: Own<'_>| (0..own.ranks()).map(|rank| own.of(rank)).collect();
        self.resume_from(model, path.as_ref(), own)
    }

    fn resume_from<T, S: Stored + ?Sized>(
        &mut self,
        model: &mut S,
        path: &Path,
        own: impl FnOnce(Own<'_>) -> Result<T, BoxError>,
    ) -> Result<(usize, Option<T>)> {
        self.announce("resume")?;
        let failed = |reason| Error::Checkpoint { path: path.to_owned(), reason };
        let loaded = self.read(&*model, path, own).map_err(|error| error.to_string());
        let id = loaded.as_ref().map(|loaded| loaded.as_ref().map(|loaded| loaded.file.id()));
        let ids = self.exchange(id.map_err(Clone::clone))?.map_err(failed)?;
        let of = |has: bool| {
            let ranks = ids.iter().enumerate().filter(|(_, id)| id.is_some() == has);
            ranks.map(|(rank, _)| rank.to_string()).collect::<Vec<_>>().join(", ")
        };
        let first = ids.iter().flatten().next().copied();
        if let (Some(_), Some(_)) = (first, ids.iter().find(|id| id.is_none())) {
            return Err(failed(format!(
                "rank {} has it, rank {} does not: save to a file system that all ranks share",
                of(true),
                of(false)
            )));
        }
        if let Some(rank) = ids.iter().position(|id| *id != first) {
            let checksums: Vec<_> = ids.iter().flatten().map(Id::checksum).collect();
            return Err(failed(format!(
                "rank {rank} has another file than rank 0 (checksums by rank: {}): copy one of them to all ranks, or \
                 save to a file system that they share",
                checksums.join(", ")
            )));
        }
        if self.is_main() {
            self.saves.get_mut().resumed(path, first);
        }
        let Some(loaded) = loaded.map_err(failed)? else { return Ok((0, None)) };
        let epoch = loaded.progress.epoch;
        let (result, own) = match self.change(model, loaded) {
            Ok(own) => (Ok(()), Some(own)),
            Err(error) => (Err(error.to_string()), None),
        };
        self.torn = self.exchange(result)?.err();
        match &self.torn {
            None => Ok((epoch, own)),
            Some(reason) => Err(failed(format!("{reason}; {TORN}"))),
        }
    }

    /// Verifies and checks a file, and changes nothing; `None` if there is no file.
    fn read<T, S: Stored + ?Sized>(
        &mut self,
        model: &S,
        path: &Path,
        own: impl FnOnce(Own<'_>) -> Result<T, BoxError>,
    ) -> Result<Option<Loaded<T>>, BoxError> {
        model.check_saved()?;
        let Some(file) = Reader::open(path)? else { return Ok(None) };
        let names = names_of(&file);
        let progress = file.bytes(&names.trainer())?.ok_or(NOT_OURS)?;
        let Format { format } = serde_json::from_slice(&progress)?;
        if !(1..=FORMAT).contains(&format) {
            return Err(format!("format {format}; this version reads 1 to {FORMAT}").into());
        }
        let mut progress: Progress = serde_json::from_slice(&progress)?;
        let own = own(Own { file: &file, names, progress: &progress })?;
        if let Some(saved) = progress.seed.filter(|saved| *saved != self.state.seed) {
            return Err(format!(
                "it was saved with seed {saved}, and this trainer has seed {}: build it with `.seed({saved})`",
                self.state.seed
            )
            .into());
        }
        let optimizer = match progress.optimizer.take() {
            Some(layout) => Optimizer::Layout(layout),
            None => {
                let bytes = file.bytes(&names.whole_optimizer())?.ok_or(NOT_OURS)?;
                Optimizer::Dict(StateDict::from_safetensors(&bytes)?)
            }
        };
        let tensors = model.entries();
        tensors.iter().try_for_each(|tensor| check_entry(&file, &tensor.0, tensor))?;
        model.check(&file)?;
        check_entries(&file, names, &tensors, &optimizer)?;
        let is_enabled = self.optim.scaler().is_enabled();
        if progress.scaler.is_some() != is_enabled {
            let (saved, now) = match is_enabled {
                true => ("without", "has one"),
                false => ("with", "has none"),
            };
            let text = format!(
                "it was saved {saved} a loss scale and this trainer {now}: see `TrainerBuilder::f16`"
            );
            return Err(text.into());
        }
        let mut scaler = self.optim.scaler().clone();
        scaler.load_state_dict(progress.scaler.as_ref())?;
        let layout = match &optimizer {
            Optimizer::Layout(layout) => layout,
            Optimizer::Dict(dict) => &dict.layout(),
        };
        if layout.params.is_empty() && !tensors.is_empty() {
            return Err("the optimizer's state has no names, so its order of variables is not known: write names and \
                        shapes into `StateDict::params`"
                .into());
        }
        self.optimizer_mut().check_state(layout).map_err(|error| {
            format!(
                "{error}: the optimizer, its groups and the frozen parameters have to be those of the saved run"
            )
        })?;
        if self.saves_eval_weights() && matches!(optimizer, Optimizer::Layout(_)) {
            let mut trained = tensors[..model.trained()].iter();
            trained.try_for_each(|of| check_entry(&file, &names.trained(&of.0), of))?;
        }
        let trained = if self.saves_eval_weights() { model.trained() } else { 0 };
        check_reserved(&file, names, &tensors[..trained], &optimizer)?;
        let schedules = self.resumed_schedules(&progress)?;
        Ok(Some(Loaded { file, names, progress, scaler, schedules, optimizer, own }))
    }

    /// Returns the schedulers as they were saved.
    fn resumed_schedules(&self, progress: &Progress) -> Result<Option<Schedules>, BoxError> {
        let saved = &progress.schedulers;
        let Some(schedules) = &self.schedules else {
            return match saved.is_empty() {
                true => Ok(None),
                false => Err("it was saved with schedulers and this trainer has none: see \
                              `TrainerBuilder::schedulers`"
                    .into()),
            };
        };
        let mut schedules = schedules.clone();
        let resumed = schedules.resume(saved).map_err(|error| {
            format!("{error}: give `TrainerBuilder::schedulers` those of the saved run")
        });
        for text in resumed? {
            warn!("resumed with the saved scheduler: {text}");
        }
        Ok(Some(schedules))
    }

    /// Changes the state to that of a checked file.
    fn change<T, S: Stored + ?Sized>(
        &mut self,
        model: &mut S,
        loaded: Loaded<T>,
    ) -> Result<T, BoxError> {
        let Loaded { file, names, progress, scaler, schedules, optimizer, own } = loaded;
        self.epoch = None;
        self.zero_grad();
        let tensors = model.entries();
        model.read(&file, &|index| Some(tensors[index].0.clone()))?;
        if self.saves_eval_weights() && matches!(optimizer, Optimizer::Layout(_)) {
            let trained = &tensors[..model.trained()];
            model.read(&file, &|index| trained.get(index).map(|of| names.trained(&of.0)))?;
        }
        match optimizer {
            Optimizer::Dict(dict) => self.optimizer_mut().load_state_dict(&dict)?,
            Optimizer::Layout(layout) => {
                self.optimizer_mut().load_state(&layout, &mut |index, name, values| {
                    file.values(&names.optimizer(index, name), values)
                })?;
            }
        }
        let positions = &progress.random_positions;
        let position = positions.get(self.rank()).or_else(|| positions.iter().max());
        self.state.random_position = position.copied().unwrap_or(0);
        let mut caches = progress.autotune_caches;
        let cache = (self.rank() < caches.len()).then(|| caches.swap_remove(self.rank()));
        self.state.autotune_cache = cache.unwrap_or_default();
        self.steps = progress.steps;
        self.base_lrs = progress.base_lrs;
        self.mean_count = progress.mean_count;
        self.optim.resume(scaler, progress.skips);
        self.schedules = schedules;
        if progress.has_schedule && self.schedule.is_none() {
            // The optimizer's are those of the last step, times a factor.
            for (group, lr) in self.base_lrs.iter().enumerate() {
                self.optim.optimizer_mut().set_hyper_param(group, HyperParam::Lr, *lr)?;
            }
        }
        Ok(own)
    }
}

/// Reads the optimizer's state of a checkpoint of [`Trainer`], or of a state dict in a file of its
/// own, as `runner`'s checkpoints have it: to begin another run with it, by
/// [`load_state_dict`](fused_optim::Optimizer::load_state_dict), which assigns state by the names
/// of parameters, and takes the saved hyper-parameters, the last learning rate included: set them
/// again if the new run has others. Groups have to be the same.
///
/// # Errors
///
/// [`Error::Checkpoint`] for a file that is missing, damaged, or neither of both.
pub fn optimizer_state(path: impl AsRef<Path>) -> Result<StateDict> {
    let path = path.as_ref();
    let read = || -> Result<StateDict, BoxError> {
        let Ok(Some(file)) = Reader::open(path) else {
            return Ok(StateDict::from_safetensors(&std::fs::read(path)?)?);
        };
        let names = names_of(&file);
        let progress = file.bytes(&names.trainer())?.ok_or(NOT_OURS)?;
        let progress: Progress = serde_json::from_slice(&progress)?;
        let Some(layout) = progress.optimizer else {
            let bytes = file.bytes(&names.whole_optimizer())?.ok_or(NOT_OURS)?;
            return Ok(StateDict::from_safetensors(&bytes)?);
        };
        let mut values = |index, name: &str, values: &mut [f32]| {
            file.values(&names.optimizer(index, name), values)
        };
        Ok(layout.with_values(&mut values)?)
    };
    read().map_err(|error| Error::Checkpoint { path: path.to_owned(), reason: error.to_string() })
}

/// Names of the entries of a file of this or of an earlier version.
fn names_of(file: &Reader) -> Names {
    let is_new = file.info(&Names(PREFIX).trainer()).is_some();
    Names(if is_new { PREFIX } else { OLD_PREFIX })
}

/// Checks the entries of the optimizer's state, and that no tensors are left.
fn check_entries(
    file: &Reader,
    names: Names,
    tensors: &[Entry],
    optimizer: &Optimizer,
) -> Result<(), BoxError> {
    if let Optimizer::Layout(layout) = optimizer {
        for (index, state) in &layout.state {
            for (name, len) in &state.tensors {
                let entry = names.optimizer(*index, name);
                let info = file.info(&entry);
                if !info.is_some_and(|info| info.dtype == Dtype::F32 && info.shape == [*len]) {
                    return Err(format!("no entry `{entry}` of {len} values of f32").into());
                }
            }
        }
    }
    let known: HashSet<&String> = tensors.iter().map(|(name, ..)| name).collect();
    let others = file.names().filter(|name| !known.contains(name));
    match others.filter(|name| !name.starts_with(names.0)).min() {
        Some(name) => Err(format!("it has `{name}`, which the model does not have").into()),
        None => Ok(()),
    }
}

/// Returns an error for an entry that is no tensor, and that this version does not read.
fn check_reserved(
    file: &Reader,
    names: Names,
    trained: &[Entry],
    optimizer: &Optimizer,
) -> Result<(), BoxError> {
    let mut known = HashSet::from([names.trainer()]);
    let own = (0..).map(|rank| names.own(rank));
    known.extend(own.take_while(|entry| file.info(entry).is_some()));
    match optimizer {
        Optimizer::Dict(_) => drop(known.insert(names.whole_optimizer())),
        Optimizer::Layout(layout) => {
            for (index, state) in &layout.state {
                known.extend(state.tensors.keys().map(|name| names.optimizer(*index, name)));
            }
            known.extend(trained.iter().map(|(name, ..)| names.trained(name)));
        }
    }
    let reserved = file.names().filter(|name| name.starts_with(names.0));
    match reserved.filter(|name| !known.contains(*name)).min() {
        Some(name) => Err(format!(
            "it has an entry `{name}`, which this trainer does not read: resume with the version and the \
             optimizer that saved it"
        )
        .into()),
        None => Ok(()),
    }
}

/// Compares a tensor with an entry of a file.
fn check_entry(file: &Reader, entry: &str, (_, dtype, shape): &Entry) -> Result<(), BoxError> {
    let Some(info) = file.info(entry) else {
        return Err(format!("it has no `{entry}`: it belongs to another model").into());
    };
    if info.shape != *shape || info.dtype != *dtype {
        let (had, of) = (&info.shape, info.dtype);
        return Err(format!(
            "`{entry}` is {had:?} of {of:?}; the model's is {shape:?} of {dtype:?}"
        )
        .into());
    }
    Ok(())
}

/// The optimizer's saved state.
enum Optimizer {
    Layout(StateLayout),
    /// In format 1.
    Dict(StateDict),
}

/// The data of the ranks' own in a file.
struct Own<'a> {
    file: &'a Reader,
    names: Names,
    progress: &'a Progress,
}

impl Own<'_> {
    /// Number of ranks that saved data; 0 for a file of `save`.
    fn ranks(&self) -> usize {
        let saved = (0..).take_while(|rank| self.file.info(&self.names.own(*rank)).is_some());
        self.progress.own.len().max(saved.count())
    }

    fn of<T: DeserializeOwned>(&self, rank: usize) -> Result<T, BoxError> {
        let reason = match self.file.bytes(&self.names.own(rank))? {
            Some(bytes) => match ciborium::from_reader(&bytes[..]) {
                Ok(own) => return Ok(own),
                Err(ciborium::de::Error::Semantic(_, reason)) => reason,
                Err(error) => error.to_string(),
            },
            None => match self.progress.own.get(rank).map(T::deserialize) {
                Some(Ok(own)) => return Ok(own),
                Some(Err(error)) => error.to_string(),
                None => return Err(format!("no data of rank {rank}").into()),
            },
        };
        Err(format!("the data of rank {rank} are not of the type to resume: {reason}").into())
    }
}

#[derive(Deserialize)]
struct Format {
    format: u32,
}

const NOT_OURS: &str = "not a file of `Trainer::save`";
const TORN: &str = "part of the state has been changed: resume again, or build a new trainer";
