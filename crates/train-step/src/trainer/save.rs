//! [`Trainer::save`], and the file of one or several trainers.

use std::fmt::Display;
use std::fs::File;
use std::path::Path;

use collective::object::broadcast_object;
use fused_optim::StateLayout;
use safetensors::Dtype;
use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};

use super::Trainer;
use super::progress::{FORMAT, Names, OLD_PREFIX, Progress, parts_of};
use crate::checkpoint::{Entry, Id, Reader, Stored, Writer};
use crate::{BoxError, Error, Result};

/// A rank's part of a save.
#[derive(Serialize, Deserialize)]
struct RankState {
    /// The trainer's name, if the file is of several.
    part: Option<String>,
    path: String,
    epoch: usize,
    steps: u64,
    random_position: u64,
    autotune_cache: String,
    /// Length of the rank's own data.
    own: Option<usize>,
}

impl Trainer {
    /// Saves the model, optimizer, loss scale, schedulers, and the program's
    /// [state](Self::state_mut); `epoch` is the epoch to resume with. Programs for safetensors can
    /// read the tensors.
    ///
    /// Every rank must call it, after a step, with the same epoch. Blocks until rank 0 has written
    /// the file: beside the last one, which it then replaces, so that one of both is complete after
    /// a crash. A symbolic link stays one.
    ///
    /// One run saves to a path: rank 0 locks it until it saves elsewhere or ends (`.NAME.lock`
    /// beside the file, which may be removed after a run that was killed). A file of a run that
    /// this trainer has never resumed is overwritten, if that run has ended. A save that was killed
    /// leaves `.NAME.*.new`, which the next one removes; on a file system without locks it stays
    /// until you remove it, and a second run is not noticed before it has saved.
    ///
    /// Two trainers that save to a file each have files of two moments after a kill between both
    /// saves, and neither resume is an error. [`Parts`](crate::Parts) saves both to one file, of
    /// one moment. With two files compare the epochs that both resumes return; if the run also
    /// saves within epochs, what [`resume_with`](Self::resume_with) returns of both, with a count
    /// of batches as the data. Numbers of [`steps`](Self::steps) are no measure: each trainer takes
    /// and skips its own.
    ///
    /// # Errors
    ///
    /// [`Error::Checkpoint`] on every rank if the file cannot be written, or another run saves
    /// there or has done so since this one resumed or saved; the last file is unchanged then. If
    /// only its directory could not be synced to disk, the new file is in place, and the error says
    /// so. Batches since the last step; ranks with other paths, epochs or numbers of steps.
    pub fn save<S: Stored + ?Sized>(
        &self,
        model: &mut S,
        path: impl AsRef<Path>,
        epoch: usize,
    ) -> Result<()> {
        save_all(&mut [self.alone(model)], path.as_ref(), epoch, Ok(None))
    }

    /// Like [`save`](Self::save), with additional data of each rank in the same file, such as its
    /// position in the data. Data are saved as CBOR: all of serde's types, infinity and NaN
    /// included. `Some(())` and `Some(None)` are resumed as `None`, as in JSON.
    ///
    /// # Errors
    ///
    /// The errors of [`save`](Self::save); data whose `Serialize` fails or that are nested too
    /// deeply to be resumed, on all ranks.
    pub fn save_with<S: Stored + ?Sized>(
        &self,
        model: &mut S,
        path: impl AsRef<Path>,
        epoch: usize,
        own: &impl Serialize,
    ) -> Result<()> {
        save_all(&mut [self.alone(model)], path.as_ref(), epoch, encode(own))
    }

    /// This trainer as the only one of a file.
    fn alone<'a, S: Stored + ?Sized>(&'a self, model: &'a mut S) -> Saved<'a, S> {
        Saved { trainer: self, model, part: None }
    }

    fn rank_state<S: Stored + ?Sized>(
        &self,
        (part, model): (Option<&str>, &S),
        (path, epoch): (&Path, usize),
        own: Option<usize>,
    ) -> Result<RankState, String> {
        let part = part.map(str::to_owned);
        self.check_whole().map_err(|error| error.to_string())?;
        model.check_saved().map_err(|error| error.to_string())?;
        self.check_pending().map_err(|error| format!("save after a step: {error}"))?;
        let random_position = model.random_position().unwrap_or(self.state.random_position);
        let autotune_cache =
            model.autotune_cache().unwrap_or_else(|| self.state.autotune_cache.clone());
        let (path, steps) = (path.display().to_string(), self.steps);
        Ok(RankState { part, path, epoch, steps, random_position, autotune_cache, own })
    }

    /// Returns the data of all ranks' own on rank 0, one after another.
    fn gather(&self, own: &[u8], parts: &[Vec<RankState>]) -> Result<Vec<u8>> {
        let lens: Vec<_> = parts.iter().map(|part| part[0].own.unwrap_or(0)).collect();
        let lens = if self.is_main() { &lens[..] } else { &[] };
        let mut all = vec![0; lens.iter().sum()];
        self.group().gather_v(&mut all, own, lens, 0)?;
        Ok(all)
    }

    fn progress(&self, parts: &[&RankState], layout: StateLayout) -> Result<Vec<u8>, BoxError> {
        Ok(serde_json::to_vec(&Progress {
            format: FORMAT,
            epoch: parts[0].epoch,
            steps: self.steps,
            seed: Some(self.state.seed),
            scaler: self.optim.scaler().state_dict(),
            skips: self.optim.skipped(),
            base_lrs: self.base_lrs.clone(),
            has_schedule: self.schedule.is_some(),
            schedulers: self.schedules.as_ref().map_or(Vec::new(), |all| all.all().to_vec()),
            mean_count: self.mean_count,
            random_positions: parts.iter().map(|part| part.random_position).collect(),
            autotune_caches: match parts.iter().any(|part| !part.autotune_cache.is_empty()) {
                true => parts.iter().map(|part| part.autotune_cache.clone()).collect(),
                false => Vec::new(),
            },
            optimizer: Some(layout),
            own: Vec::new(),
        })?)
    }
}

/// A trainer of a file, and its model.
pub(super) struct Saved<'a, S: ?Sized> {
    pub(super) trainer: &'a Trainer,
    pub(super) model: &'a mut S,
    /// The trainer's name, if the file is of several.
    pub(super) part: Option<&'a str>,
}

/// Encodes a rank's own data.
pub(super) fn encode(own: &impl Serialize) -> Result<Option<Vec<u8>>, String> {
    let mut bytes = Vec::new();
    match ciborium::into_writer(own, &mut bytes) {
        // A reader limits how deeply data may be nested.
        Ok(()) => match ciborium::from_reader::<IgnoredAny, _>(&bytes[..]) {
            Ok(_) => Ok(Some(bytes)),
            Err(error) => Err(format!("the data could not be resumed: {error}")),
        },
        Err(ciborium::ser::Error::Value(reason)) => {
            Err(format!("the data cannot be saved: {reason}"))
        }
        Err(error) => Err(format!("the data cannot be saved: {error}")),
    }
}

/// Saves trainers of one group to a file, with a rank's own data.
pub(super) fn save_all<S: Stored + ?Sized>(
    all: &mut [Saved<'_, S>],
    path: &Path,
    epoch: usize,
    own: Result<Option<Vec<u8>>, String>,
) -> Result<()> {
    let first = all[0].trainer;
    first.announce("save")?;
    let failed = |reason| Error::Checkpoint { path: path.to_owned(), reason };
    let len = own.as_ref().map(|own| own.as_ref().map(Vec::len)).map_err(Clone::clone);
    let part = |saved: &Saved<'_, S>, len| {
        let state = saved.trainer.rank_state((saved.part, &*saved.model), (path, epoch), len);
        state.map_err(|reason| of_part(saved.part, reason))
    };
    let parts = len.and_then(|len| all.iter().map(|saved| part(saved, len)).collect());
    let parts: Vec<Vec<RankState>> = first.exchange(parts)?.map_err(failed)?;
    check_alike(&parts).map_err(failed)?;
    let own = match own {
        Ok(Some(own)) => first.gather(&own, &parts)?,
        _ => Vec::new(),
    };
    let part = all[0].part;
    let written = first.is_main().then(|| {
        let mut saves = first.saves.borrow_mut();
        let loses = if saves.knows(path) { loses(path, &parts[0]) } else { None };
        if loses.is_some() {
            return loses;
        }
        let describe = |path: &Path| describe(path, part);
        let written = saves.save(path, |new| write(all, new, &parts, &own), describe);
        written.err().map(|error| error.to_string())
    });
    match broadcast_object(first.group(), written, 0)? {
        None => Ok(()),
        Some(reason) => Err(failed(reason)),
    }
}

/// Adds the trainer's name to a reason, if the file is of several.
pub(super) fn of_part(part: Option<&str>, reason: impl Display) -> String {
    match part {
        Some(part) => format!("part `{part}`: {reason}"),
        None => reason.to_string(),
    }
}

/// The entries of a trainer.
struct Entries {
    tensors: Vec<Entry>,
    /// Weights in training, if the tensors' own entries have those for evaluation.
    trained: Vec<Entry>,
    /// Vectors of the optimizer's state.
    vectors: Vec<Entry>,
}

impl Entries {
    fn of<S: Stored + ?Sized>(saved: &Saved<'_, S>, layout: &StateLayout) -> Self {
        let names = Names::new(saved.part);
        let vectors = layout.state.iter().flat_map(|(index, state)| {
            let vectors = state.tensors.iter();
            vectors.map(|(name, len)| (names.optimizer(*index, name), Dtype::F32, vec![*len]))
        });
        let vectors = vectors.collect();
        let tensors = saved.model.entries();
        let trained = if saved.trainer.saves_eval_weights() { saved.model.trained() } else { 0 };
        let named = |entry: &Entry, name: String| (name, entry.1, entry.2.clone());
        let trained = tensors[..trained].iter().map(|of| named(of, names.trained(&of.0)));
        let trained = trained.collect();
        let tensors = tensors.iter().map(|of| named(of, names.tensor(&of.0))).collect();
        Self { tensors, trained, vectors }
    }

    /// The entries of this width, in the order in which they are written.
    fn of_width(&self, bits: usize) -> impl Iterator<Item = &Entry> {
        let tensors = self.tensors.iter().chain(&self.trained);
        let vectors = self.vectors.iter().filter(move |_| bits == 32);
        tensors.filter(move |of| is_wide(of, bits)).chain(vectors)
    }
}

fn is_wide((_, dtype, _): &Entry, bits: usize) -> bool {
    dtype.bitsize() == bits
}

/// Widths of elements: the widest first, so that all data are aligned.
const WIDTHS: [usize; 4] = [64, 32, 16, 8];

fn write<S: Stored + ?Sized>(
    all: &mut [Saved<'_, S>],
    new: &File,
    parts: &[Vec<RankState>],
    own: &[u8],
) -> Result<Id, BoxError> {
    let (mut entries, mut progress) = (Vec::new(), Vec::new());
    for (index, saved) in all.iter().enumerate() {
        let layout = saved.trainer.optimizer().state_layout()?;
        entries.push(Entries::of(saved, &layout));
        let parts: Vec<_> = parts.iter().map(|parts| &parts[index]).collect();
        let name = Names::new(saved.part).trainer();
        progress.push((name, saved.trainer.progress(&parts, layout)?));
    }
    let mut tensors = entries.iter().flat_map(|of| &of.tensors);
    if let Some((name, dtype, _)) = tensors.find(|(_, of, _)| !WIDTHS.contains(&of.bitsize())) {
        return Err(format!("`{name}` of {dtype:?} cannot be saved").into());
    }
    let mut rest = own;
    let own = parts.iter().enumerate().filter_map(|(rank, parts)| {
        let own = rest.split_off(..parts[0].own?)?;
        Some((Names::new(None).own(rank), own))
    });
    let progress = progress.iter().map(|(name, bytes)| (name.clone(), &bytes[..]));
    let bytes: Vec<_> = own.chain(progress).collect();
    let header = WIDTHS.iter().flat_map(|bits| entries.iter().flat_map(|of| of.of_width(*bits)));
    let mut header: Vec<Entry> = header.cloned().collect();
    header.extend(bytes.iter().map(|(name, all)| (name.clone(), Dtype::U8, vec![all.len()])));
    let mut writer = Writer::new(new, &[], header)?;
    for bits in WIDTHS {
        for (saved, entries) in all.iter_mut().zip(&entries) {
            write_width(saved, entries, &mut writer, bits)?;
        }
    }
    bytes.iter().try_for_each(|(_, bytes)| writer.bytes(bytes))?;
    Ok(writer.finish()?.id)
}

/// Writes the entries of a trainer that have this width.
fn write_width<S: Stored + ?Sized>(
    Saved { trainer, model, .. }: &mut Saved<'_, S>,
    Entries { tensors, trained, .. }: &Entries,
    writer: &mut Writer<'_>,
    bits: usize,
) -> Result<(), BoxError> {
    let eval = trainer.saves_eval_weights().then(|| trainer.optimizer());
    if tensors.iter().any(|entry| is_wide(entry, bits)) {
        model.write(writer, &|index| is_wide(&tensors[index], bits), eval)?;
    }
    if trained.iter().any(|entry| is_wide(entry, bits)) {
        let is_trained =
            |index: usize| trained.get(index).is_some_and(|entry| is_wide(entry, bits));
        model.write(writer, &is_trained, None)?;
    }
    if bits == 32 {
        trainer.optimizer().visit_state(&mut |_, _, values| writer.values(values))?;
    }
    Ok(())
}

/// Returns an error for ranks that save something else than rank 0.
fn check_alike(parts: &[Vec<RankState>]) -> Result<(), String> {
    let names = |parts: &[RankState]| {
        let names: Vec<_> = parts.iter().filter_map(|part| part.part.as_deref()).collect();
        if names.is_empty() { "`Trainer::save`".to_owned() } else { format!("parts {names:?}") }
    };
    let called: Vec<_> = parts.iter().map(|parts| names(parts)).collect();
    if let Some(rank) = called.iter().position(|names| *names != called[0]) {
        let (first, other) = (&called[0], &called[rank]);
        return Err(format!("ranks differ in their call: rank 0 has {first}, rank {rank} {other}"));
    }
    let ranks = parts.iter().enumerate();
    let pairs = ranks.flat_map(|(rank, parts)| parts.iter().map(move |part| (rank, part)));
    for ((rank, part), first) in pairs.zip(parts[0].iter().cycle()) {
        let differs = |what, first: &dyn Display, own: &dyn Display| {
            Err(format!("ranks differ in {what}: rank 0 has {first}, rank {rank} {own}"))
        };
        if part.path != first.path {
            return differs("the path", &first.path, &part.path);
        }
        if part.epoch != first.epoch {
            return differs("the epoch to save", &first.epoch, &part.epoch);
        }
        if part.steps != first.steps {
            return differs("the number of steps", &first.steps, &part.steps);
        }
        if part.own.is_some() != first.own.is_some() {
            let call = |part: &RankState| if part.own.is_some() { "`save_with`" } else { "`save`" };
            return differs("their call", &call(first), &call(part));
        }
    }
    Ok(())
}

/// Returns why a file of this run must not be replaced by one of these trainers: it has more.
fn loses(path: &Path, parts: &[RankState]) -> Option<String> {
    let names = Reader::peek_names(path);
    let others = parts_of(&names);
    let mut own: Vec<_> = parts.iter().filter_map(|part| part.part.clone()).collect();
    own.sort();
    if own.is_empty() && !others.is_empty() {
        return Some(format!(
            "it has the trainers {others:?}, and would have one of them: save them by `Parts`, or this one to \
             another path"
        ));
    }
    let has_own = names.contains(&Names::new(None).own(0));
    (has_own && parts[0].own.is_none()).then(|| {
        "it has data of each rank, such as a position in the data set, and would have none: save by `save_with`, \
         or to another path"
            .to_owned()
    })
}

/// Describes the checkpoint of another run.
fn describe(path: &Path, part: Option<&str>) -> String {
    let old = Names { prefix: OLD_PREFIX, part: None };
    let names = [Names::new(part), Names::new(None), old];
    let progress = names.iter().filter_map(|names| Reader::peek(path, &names.trainer()));
    let mut progress = progress.filter_map(|bytes| serde_json::from_slice::<Progress>(&bytes).ok());
    match progress.next() {
        Some(other) => format!(" (epoch {}, {} steps)", other.epoch, other.steps),
        None => String::new(),
    }
}
