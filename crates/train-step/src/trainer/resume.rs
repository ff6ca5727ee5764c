//! [`Trainer::resume`], and that of several trainers.

use std::collections::HashSet;
use std::path::Path;

use amp::LossScaler;
use fused_optim::{HyperParam, StateDict, StateLayout};
use safetensors::Dtype;
use serde::Deserialize;
use serde::de::{DeserializeOwned, IgnoredAny};
use tracing::warn;

use super::Trainer;
use super::progress::{FORMAT, Names, OLD_PREFIX, PREFIX, Progress, parts_of};
use super::save::of_part;
use crate::checkpoint::{Entry, Id, Reader, Stored};
use crate::{BoxError, Error, Result, Schedules};

/// A checked file, before it changes anything.
struct Loaded<'a, T> {
    file: Reader,
    parts: Vec<LoadedPart<'a>>,
    own: T,
}

/// The state of a trainer in a checked file.
struct LoadedPart<'a> {
    names: Names<'a>,
    progress: Progress,
    scaler: LossScaler,
    schedules: Option<Schedules>,
    optimizer: Optimizer,
}

/// A trainer to resume, and its model.
pub(super) struct Resumed<'a, S: ?Sized> {
    pub(super) trainer: &'a mut Trainer,
    pub(super) model: &'a mut S,
    /// The trainer's name, if the file is of several.
    pub(super) part: Option<&'a str>,
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
        let resumed = resume_all(&mut [self.alone_mut(model)], path.as_ref(), without_own);
        resumed.map(|(epoch, _)| epoch)
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
        let own = own_of(self.rank(), self.world_size());
        resume_all(&mut [self.alone_mut(model)], path.as_ref(), own)
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
        self.resume_checked(model, path, Ok)
    }

    /// As [`resume_with_all`](Self::resume_with_all): `check` gets the data before anything is
    /// changed, and its result is returned.
    ///
    /// # Errors
    ///
    /// Those of [`resume_with_all`](Self::resume_with_all), and of `check`, as
    /// [`Error::Checkpoint`] on all ranks.
    pub fn resume_checked<T: DeserializeOwned, R, S: Stored + ?Sized>(
        &mut self,
        model: &mut S,
        path: impl AsRef<Path>,
        check: impl FnOnce(Vec<T>) -> Result<R, BoxError>,
    ) -> Result<(usize, Option<R>)> {
        let own = |own: Own<'_>| check(all_own(own)?);
        resume_all(&mut [self.alone_mut(model)], path.as_ref(), own)
    }

    /// This trainer as the only one of a file.
    fn alone_mut<'a, S: Stored + ?Sized>(&'a mut self, model: &'a mut S) -> Resumed<'a, S> {
        Resumed { trainer: self, model, part: None }
    }

    /// Checks the seed, and the entries of the tensors and of the optimizer's state. Returns this.
    fn check_tensors<S: Stored + ?Sized>(
        &self,
        model: &S,
        (file, names): (&Reader, Names<'_>),
        progress: &mut Progress,
    ) -> Result<Optimizer, BoxError> {
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
        tensors.iter().try_for_each(|of| check_entry(file, &names.tensor(&of.0), of))?;
        model.check(file, &|index| names.tensor(&tensors[index].0))?;
        if let Optimizer::Layout(layout) = &optimizer {
            check_vectors(file, names, layout)?;
        }
        Ok(optimizer)
    }

    /// Checks the loss scale and the optimizer's state. Returns the names of the entries that are
    /// no tensors.
    fn check_state<S: Stored + ?Sized>(
        &mut self,
        model: &S,
        (file, names): (&Reader, Names<'_>),
        (progress, optimizer): (&Progress, &Optimizer),
    ) -> Result<HashSet<String>, BoxError> {
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
        self.resumed_scaler(progress)?;
        let layout = match optimizer {
            Optimizer::Layout(layout) => layout,
            Optimizer::Dict(dict) => &dict.layout(),
        };
        let tensors = model.entries();
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
        let mut known = HashSet::from([names.trainer()]);
        match optimizer {
            Optimizer::Dict(_) => drop(known.insert(names.whole_optimizer())),
            Optimizer::Layout(layout) => {
                for (index, state) in &layout.state {
                    known.extend(state.tensors.keys().map(|name| names.optimizer(*index, name)));
                }
                let trained = if self.saves_eval_weights() { model.trained() } else { 0 };
                for tensor in &tensors[..trained] {
                    let name = names.trained(&tensor.0);
                    check_entry(file, &name, tensor)?;
                    known.insert(name);
                }
            }
        }
        Ok(known)
    }

    /// Returns the loss scaler with the saved state.
    fn resumed_scaler(&self, progress: &Progress) -> Result<LossScaler, BoxError> {
        let mut scaler = self.optim.scaler().clone();
        scaler.load_state_dict(progress.scaler.as_ref())?;
        Ok(scaler)
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
    fn change<S: Stored + ?Sized>(
        &mut self,
        model: &mut S,
        file: &Reader,
        loaded: LoadedPart<'_>,
    ) -> Result<(), BoxError> {
        let LoadedPart { names, progress, scaler, schedules, optimizer } = loaded;
        self.epoch = None;
        self.zero_grad();
        let tensors = model.entries();
        model.read(file, &|index| Some(names.tensor(&tensors[index].0)))?;
        if self.saves_eval_weights() && matches!(optimizer, Optimizer::Layout(_)) {
            let trained = &tensors[..model.trained()];
            model.read(file, &|index| trained.get(index).map(|of| names.trained(&of.0)))?;
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
        Ok(())
    }
}

/// Resumes trainers of one group from a file, of which `own` returns the ranks' own data. Returns
/// the epoch and these data.
pub(super) fn resume_all<T, S: Stored + ?Sized>(
    all: &mut [Resumed<'_, S>],
    path: &Path,
    own: impl FnOnce(Own<'_>) -> Result<T, BoxError>,
) -> Result<(usize, Option<T>)> {
    let first = &all[0].trainer;
    first.announce("resume")?;
    let failed = |reason| Error::Checkpoint { path: path.to_owned(), reason };
    let loaded = read(all, path, own).map_err(|error| error.to_string());
    let id = loaded.as_ref().map(|loaded| loaded.as_ref().map(|loaded| loaded.file.id()));
    let first = &mut all[0].trainer;
    let own = id.map(|id| (id, path.display().to_string())).map_err(Clone::clone);
    let all_own = first.exchange(own)?.map_err(failed)?;
    let (ids, paths): (Vec<_>, Vec<_>) = all_own.into_iter().unzip();
    check_same(&ids, &paths).map_err(failed)?;
    if first.is_main() {
        first.saves.get_mut().resumed(path, ids[0]);
    }
    let Some(Loaded { file, parts, own }) = loaded.map_err(failed)? else { return Ok((0, None)) };
    let epoch = parts[0].progress.epoch;
    let mut pairs = all.iter_mut().zip(parts);
    let result = pairs.try_for_each(|(resumed, part)| {
        let changed = resumed.trainer.change(resumed.model, &file, part);
        changed.map_err(|error| of_part(resumed.part, error))
    });
    let torn = all[0].trainer.exchange(result)?.err();
    all.iter_mut().for_each(|resumed| resumed.trainer.torn.clone_from(&torn));
    match torn {
        None => Ok((epoch, Some(own))),
        Some(reason) => Err(failed(format!("{reason}; {TORN}"))),
    }
}

/// Returns an error if the ranks have different files, or some of them none. Equal copies of a file
/// may have a path of their own on each rank.
fn check_same(ids: &[Option<Id>], paths: &[String]) -> Result<(), String> {
    let other = paths.iter().position(|path| *path != paths[0]);
    let other = other.map_or_else(String::new, |rank| {
        let (first, own) = (&paths[0], &paths[rank]);
        format!("ranks differ in the path: rank 0 has {first}, rank {rank} {own}; ")
    });
    let of = |has: bool| {
        let ranks = ids.iter().enumerate().filter(|(_, id)| id.is_some() == has);
        ranks.map(|(rank, _)| rank.to_string()).collect::<Vec<_>>().join(", ")
    };
    let first = ids.iter().flatten().next().copied();
    match ids.iter().position(|id| *id != first) {
        None if first.is_none() && !other.is_empty() => {
            Err(format!("{other}give all ranks the same one"))
        }
        None => Ok(()),
        Some(_) if ids.contains(&None) => Err(format!(
            "{other}rank {} has it, rank {} does not: save to a file system that all ranks share",
            of(true),
            of(false)
        )),
        Some(rank) => {
            let checksums: Vec<_> = ids.iter().flatten().map(Id::checksum).collect();
            Err(format!(
                "{other}rank {rank} has another file than rank 0 (checksums by rank: {}): copy one of them to all \
                 ranks, or save to a file system that they share",
                checksums.join(", ")
            ))
        }
    }
}

/// Verifies and checks a file, and changes nothing; `None` if there is no file.
fn read<'a, T, S: Stored + ?Sized>(
    all: &mut [Resumed<'a, S>],
    path: &Path,
    own: impl FnOnce(Own<'_>) -> Result<T, BoxError>,
) -> Result<Option<Loaded<'a, T>>, BoxError> {
    all.iter().try_for_each(|resumed| resumed.model.check_saved())?;
    let Some(file) = Reader::open(path)? else { return Ok(None) };
    let names = names_of(&file);
    check_parts(&file, all)?;
    let mut states = Vec::new();
    for Resumed { part, .. } in &*all {
        let names = Names { part: *part, ..names };
        states.push((names, read_progress(&file, names)?));
    }
    let own = own(Own { file: &file, names, progress: &states[0].1 })?;
    let (mut optimizers, mut tensors) = (Vec::new(), HashSet::new());
    for (resumed, (names, progress)) in all.iter().zip(&mut states) {
        let Resumed { trainer, model, part } = resumed;
        let checked = trainer.check_tensors(&**model, (&file, *names), progress);
        optimizers.push(checked.map_err(|error| of_part(*part, error))?);
        tensors.extend(model.entries().iter().map(|of| names.tensor(&of.0)));
    }
    let others = file.names().filter(|name| !tensors.contains(*name));
    if let Some(name) = others.filter(|name| !name.starts_with(names.prefix)).min() {
        return Err(format!("it has `{name}`, which the model does not have").into());
    }
    let own_names = (0..).map(|rank| names.own(rank));
    let mut known: HashSet<_> = own_names.take_while(|entry| file.info(entry).is_some()).collect();
    for ((resumed, (names, progress)), optimizer) in all.iter_mut().zip(&states).zip(&optimizers) {
        let Resumed { trainer, model, part } = resumed;
        let checked = trainer.check_state(&**model, (&file, *names), (progress, optimizer));
        known.extend(checked.map_err(|error| of_part(*part, error))?);
    }
    let reserved = file.names().filter(|name| name.starts_with(names.prefix));
    if let Some(name) = reserved.filter(|name| !known.contains(*name)).min() {
        return Err(format!(
            "it has an entry `{name}`, which this trainer does not read: resume with the version and the \
             optimizer that saved it"
        )
        .into());
    }
    let mut parts = Vec::new();
    for ((resumed, (names, progress)), optimizer) in all.iter().zip(states).zip(optimizers) {
        let schedules = resumed.trainer.resumed_schedules(&progress);
        let schedules = schedules.map_err(|error| of_part(resumed.part, error))?;
        let scaler = resumed.trainer.resumed_scaler(&progress)?;
        parts.push(LoadedPart { names, progress, scaler, schedules, optimizer });
    }
    Ok(Some(Loaded { file, parts, own }))
}

/// Checks that a file is of these trainers.
fn check_parts<S: ?Sized>(file: &Reader, all: &[Resumed<'_, S>]) -> Result<(), BoxError> {
    let saved = parts_of(file.names());
    let mut own: Vec<_> = all.iter().filter_map(|resumed| resumed.part).collect();
    own.sort_unstable();
    match (saved.is_empty(), own.is_empty()) {
        _ if saved == own => Ok(()),
        (_, true) => {
            Err(format!("it has several trainers, {saved:?}: resume it with `Parts`").into())
        }
        (true, _) => match file.info(&names_of(file).trainer()) {
            Some(_) => Err("it has one trainer: resume it with `Trainer::resume`".into()),
            None => Err(NOT_OURS.into()),
        },
        _ => Err(format!("it has the trainers {saved:?}, and this program {own:?}").into()),
    }
}

/// Reads a trainer's state besides vectors.
fn read_progress(file: &Reader, names: Names<'_>) -> Result<Progress, BoxError> {
    let progress = file.bytes(&names.trainer())?.ok_or(NOT_OURS)?;
    let Format { format } = serde_json::from_slice(&progress)?;
    if !(1..=FORMAT).contains(&format) {
        return Err(format!("format {format}; this version reads 1 to {FORMAT}").into());
    }
    Ok(serde_json::from_slice(&progress)?)
}

/// Returns an error for a file with data of the ranks' own.
pub(super) fn without_own(own: Own<'_>) -> Result<(), BoxError> {
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
}

/// Returns a function that returns the data of this rank of as many ranks as have saved.
pub(super) fn own_of<T: DeserializeOwned>(
    rank: usize,
    ranks: usize,
) -> impl FnOnce(Own<'_>) -> Result<T, BoxError> {
    move |own: Own<'_>| {
        match own.ranks() {
        saved if saved == ranks => own.of(rank),
        0 => Err("it was saved by `save`, without data of the ranks: call `resume`".into()),
        saved => Err(format!(
            "{saved} ranks saved it, each with data of its own, and this run has {ranks}: resume with {saved}, \
             or call `resume_with_all`"
        )
        .into()),
    }
    }
}

/// Returns the data of all ranks.
pub(super) fn all_own<T: DeserializeOwned>(own: Own<'_>) -> Result<Vec<T>, BoxError> {
    (0..own.ranks()).map(|rank| own.of(rank)).collect()
}

/// Reads the optimizer's state of a checkpoint of [`Trainer`], or of a state dict in a file of its
/// own, as `runner`'s checkpoints have it: to begin another run with it, by
/// [`load_state_dict`](fused_optim::Optimizer::load_state_dict), which assigns state by the names
/// of parameters, and takes the saved hyper-parameters, the last learning rate included: set them
/// again if the new run has others. Groups have to be the same.
///
/// # Errors
///
/// [`Error::Checkpoint`] for a file that is missing, damaged, neither of both, or of several
/// trainers.
pub fn optimizer_state(path: impl AsRef<Path>) -> Result<StateDict> {
    let path = path.as_ref();
    let read = || -> Result<StateDict, BoxError> {
        let file = match Reader::open(path) {
            Ok(Some(file)) => file,
            Err(error) if Reader::has_checksum(path) => return Err(error),
            _ => return Ok(StateDict::from_safetensors(&std::fs::read(path)?)?),
        };
        let names = names_of(&file);
        let Some(progress) = file.bytes(&names.trainer())? else {
            let parts = parts_of(file.names());
            return match parts.is_empty() {
                true => Ok(StateDict::from_safetensors(&std::fs::read(path)?)?),
                false => {
                    Err(format!("it has several trainers, {parts:?}, each with a state").into())
                }
            };
        };
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
fn names_of(file: &Reader) -> Names<'static> {
    let is_old = file.info(&Names { prefix: OLD_PREFIX, part: None }.trainer()).is_some();
    Names { prefix: if is_old { OLD_PREFIX } else { PREFIX }, part: None }
}

/// Checks the entries of the optimizer's state.
fn check_vectors(file: &Reader, names: Names<'_>, layout: &StateLayout) -> Result<(), BoxError> {
    for (index, state) in &layout.state {
        for (name, len) in &state.tensors {
            let entry = names.optimizer(*index, name);
            let info = file.info(&entry);
            if !info.is_some_and(|info| info.dtype == Dtype::F32 && info.shape == [*len]) {
                return Err(format!("no entry `{entry}` of {len} values of f32").into());
            }
        }
    }
    Ok(())
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
pub(super) struct Own<'a> {
    file: &'a Reader,
    names: Names<'a>,
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
