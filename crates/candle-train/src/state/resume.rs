//! [`Trainer::resume`].

use std::collections::{HashMap, HashSet};
use std::path::Path;

use amp::LossScaler;
use candle_core::{TensorId, Var};
use fused_optim::{HyperParam, StateDict, StateLayout};
use safetensors::Dtype;
use serde::Deserialize;
use serde::de::{DeserializeOwned, IgnoredAny};

use super::file::{Id, Reader};
use super::{
    BoxError, FORMAT, OPTIMIZER, PREFIX, Progress, TRAINER, optimizer_entry, own_entry,
    trained_entry,
};
use tracing::warn;
use train_step::Schedules;

use crate::{Error, Result, Trainer};

/// A checked file, before it changes anything.
struct Loaded<T> {
    file: Reader,
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
    pub fn resume(&mut self, path: impl AsRef<Path>) -> Result<usize> {
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
        let resumed = self.resume_from(path.as_ref(), own);
        resumed.map(|(epoch, _)| epoch).map_err(|error| self.failed("resume", error))
    }

    /// Like [`resume`](Self::resume), from a file of [`save_with`](Self::save_with). Also returns
    /// the data that this rank saved, or `None` if there is no such file.
    ///
    /// # Errors
    ///
    /// The errors of [`resume`](Self::resume); also [`Error::Checkpoint`] if the file was saved by
    /// another number of ranks, or contains no data of this type.
    pub fn resume_with<T: DeserializeOwned>(
        &mut self,
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
        self.resume_from(path.as_ref(), own).map_err(|error| self.failed("resume", error))
    }

    /// Like [`resume_with`](Self::resume_with), by any number of ranks: returns the data of all
    /// ranks that saved, in their order. To evaluate, or to begin an epoch, they may be ignored:
    /// `resume_with_all::<serde::de::IgnoredAny>`.
    ///
    /// # Errors
    ///
    /// The errors of [`resume`](Self::resume); also [`Error::Checkpoint`] if the file contains no
    /// data of this type.
    pub fn resume_with_all<T: DeserializeOwned>(
        &mut self,
        path: impl AsRef<Path>,
    ) -> Result<(usize, Option<Vec<T>>)> {
        let own = |own: Own<'_>| (0..own.ranks()).map(|rank| own.of(rank)).collect();
        self.resume_from(path.as_ref(), own).map_err(|error| self.failed("resume", error))
    }

    fn resume_from<T>(
        &mut self,
        path: &Path,
        own: impl FnOnce(Own<'_>) -> Result<T, BoxError>,
    ) -> Result<(usize, Option<T>)> {
        self.announce("resume")?;
        let failed = |reason| Error::Checkpoint { path: path.to_owned(), reason };
        let loaded = self.read(path, own).map_err(|error| error.to_string());
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
        let (result, own) = match self.change(loaded) {
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
    fn read<T>(
        &mut self,
        path: &Path,
        own: impl FnOnce(Own<'_>) -> Result<T, BoxError>,
    ) -> Result<Option<Loaded<T>>, BoxError> {
        self.check_map()?;
        let Some(file) = Reader::open(path)? else { return Ok(None) };
        let progress = file.bytes(TRAINER)?.ok_or(NOT_OURS)?;
        let Format { format } = serde_json::from_slice(&progress)?;
        if !(1..=FORMAT).contains(&format) {
            return Err(format!("format {format}; this version reads 1 to {FORMAT}").into());
        }
        let mut progress: Progress = serde_json::from_slice(&progress)?;
        let own = own(Own { file: &file, progress: &progress })?;
        if let Some(saved) = progress.seed.filter(|saved| *saved != self.seed) {
            return Err(format!(
                "it was saved with seed {saved}, and this trainer has seed {}: build it with `.seed({saved})`",
                self.seed
            )
            .into());
        }
        let optimizer = match progress.optimizer.take() {
            Some(layout) => Optimizer::Layout(layout),
            None => {
                let bytes = file.bytes(OPTIMIZER)?.ok_or(NOT_OURS)?;
                Optimizer::Dict(StateDict::from_safetensors(&bytes)?)
            }
        };
        self.check_variables(&file)?;
        self.check_entries(&file, &optimizer)?;
        if progress.scaler.is_some() != self.scaler.is_enabled() {
            let (saved, now) = match self.scaler.is_enabled() {
                true => ("without", "has one"),
                false => ("with", "has none"),
            };
            let text = format!(
                "it was saved {saved} a loss scale and this trainer {now}: see `TrainerBuilder::f16`"
            );
            return Err(text.into());
        }
        let mut scaler = self.scaler.clone();
        scaler.load_state_dict(progress.scaler.as_ref())?;
        let checked = match &optimizer {
            Optimizer::Layout(layout) => self.optimizer.check_state(layout),
            Optimizer::Dict(dict) => self.optimizer.check_state(&dict.layout()),
        };
        checked.map_err(|error| {
            format!(
                "{error}: the optimizer, `TrainerBuilder::groups` and `frozen` have to be those of the saved run"
            )
        })?;
        if self.saves_eval_weights() && matches!(optimizer, Optimizer::Layout(_)) {
            let mut params = self.variables.params.iter();
            params.try_for_each(|(name, var)| check_entry(&file, &trained_entry(name), var))?;
        }
        self.check_reserved(&file, &optimizer)?;
        let schedules = self.resumed_schedules(&progress)?;
        Ok(Some(Loaded { file, progress, scaler, schedules, optimizer, own }))
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

    /// Compares the variables with those of a file.
    fn check_variables(&self, file: &Reader) -> Result<(), BoxError> {
        // Names of one variable have the same values.
        let mut first: HashMap<TensorId, &String> = HashMap::new();
        for (name, var) in self.variables.all() {
            check_entry(file, name, var)?;
            let other = *first.entry(var.id()).or_insert(name);
            if file.checksum(other) != file.checksum(name) {
                return Err(format!(
                    "`{other}` and `{name}` have different values, and are one variable of this model"
                )
                .into());
            }
        }
        Ok(())
    }

    /// Checks the entries of the optimizer's state, and that no variables are left.
    fn check_entries(&self, file: &Reader, optimizer: &Optimizer) -> Result<(), BoxError> {
        if let Optimizer::Layout(layout) = optimizer {
            for (index, state) in &layout.state {
                for (name, len) in &state.tensors {
                    let entry = optimizer_entry(*index, name);
                    let info = file.info(&entry);
                    if !info.is_some_and(|info| info.dtype == Dtype::F32 && info.shape == [*len]) {
                        return Err(format!("no entry `{entry}` of {len} values of f32").into());
                    }
                }
            }
        }
        let known: HashSet<&String> = self.variables.all().map(|(name, _)| name).collect();
        let others = file.names().filter(|name| !known.contains(name));
        match others.filter(|name| !name.starts_with(PREFIX)).min() {
            Some(name) => Err(format!("the model has no variable `{name}`").into()),
            None => Ok(()),
        }
    }

    /// Returns an error for an entry that is no variable, and that this version does not read.
    fn check_reserved(&self, file: &Reader, optimizer: &Optimizer) -> Result<(), BoxError> {
        let mut known = HashSet::from([TRAINER.to_owned()]);
        known.extend((0..).map(own_entry).take_while(|entry| file.info(entry).is_some()));
        match optimizer {
            Optimizer::Dict(_) => drop(known.insert(OPTIMIZER.to_owned())),
            Optimizer::Layout(layout) => {
                for (index, state) in &layout.state {
                    known.extend(state.tensors.keys().map(|name| optimizer_entry(*index, name)));
                }
                if self.saves_eval_weights() {
                    let params = self.variables.params.iter();
                    known.extend(params.map(|(name, _)| trained_entry(name)));
                }
            }
        }
        let reserved = file.names().filter(|name| name.starts_with(PREFIX));
        match reserved.filter(|name| !known.contains(*name)).min() {
            Some(name) => Err(format!(
                "it has an entry `{name}`, which this trainer does not read: resume with the version and the \
                 optimizer that saved it"
            )
            .into()),
            None => Ok(()),
        }
    }

    /// Changes the state to that of a checked file.
    fn change<T>(&mut self, loaded: Loaded<T>) -> Result<T, BoxError> {
        let Loaded { file, progress, scaler, schedules, optimizer, own } = loaded;
        self.epoch = None;
        self.zero_grad();
        for (name, var) in self.variables.all() {
            let tensor = file.tensor(name, var.dtype(), var.dims())?;
            var.set(&tensor.to_device(var.device())?)?;
        }
        if self.saves_eval_weights() && matches!(optimizer, Optimizer::Layout(_)) {
            for (name, var) in &self.variables.params {
                let tensor = file.tensor(&trained_entry(name), var.dtype(), var.dims())?;
                var.set(&tensor.to_device(var.device())?)?;
            }
        }
        match optimizer {
            Optimizer::Dict(dict) => self.optimizer.load_state_dict(&dict)?,
            Optimizer::Layout(layout) => {
                self.optimizer.load_state(&layout, &mut |index, name, values| {
                    file.values(&optimizer_entry(index, name), values)
                })?;
            }
        }
        let positions = &progress.random_positions;
        let position = positions.get(self.rank()).or_else(|| positions.iter().max());
        self.context.set_random_position(position.copied().unwrap_or(0));
        self.steps = progress.steps;
        self.skips = progress.skips;
        self.has_norm = false;
        self.base_lrs = progress.base_lrs;
        self.mean_count = progress.mean_count;
        self.scaler = scaler;
        self.schedules = schedules;
        if progress.has_schedule && self.schedule.is_none() {
            // The optimizer's are those of the last step, times a factor.
            for (group, lr) in self.base_lrs.iter().enumerate() {
                self.optimizer.set_hyper_param(group, HyperParam::Lr, *lr)?;
            }
        }
        Ok(own)
    }
}

/// Compares a variable with an entry of a file.
fn check_entry(file: &Reader, entry: &str, var: &Var) -> Result<(), BoxError> {
    let Some(info) = file.info(entry) else {
        return Err(format!("no variable `{entry}`").into());
    };
    let (shape, dtype) = (var.dims(), var.dtype());
    if info.shape != shape || info.dtype != dtype.into() {
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
    progress: &'a Progress,
}

impl Own<'_> {
    /// Number of ranks that saved data; 0 for a file of `save`.
    fn ranks(&self) -> usize {
        let saved = (0..).take_while(|rank| self.file.info(&own_entry(*rank)).is_some());
        self.progress.own.len().max(saved.count())
    }

    fn of<T: DeserializeOwned>(&self, rank: usize) -> Result<T, BoxError> {
        let reason = match self.file.bytes(&own_entry(rank))? {
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
