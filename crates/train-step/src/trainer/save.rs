//! [`Trainer::save`].

use std::fmt::Display;
use std::fs::File;
use std::path::Path;

use collective::object::broadcast_object;
use safetensors::Dtype;
use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};

use super::Trainer;
use super::progress::{FORMAT, Names, OLD_PREFIX, PREFIX, Progress};
use crate::checkpoint::{Entry, Id, Reader, Stored, Writer};
use crate::{BoxError, Error, Result};

/// A rank's part of a save.
#[derive(Serialize, Deserialize)]
struct Part {
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
    /// # Errors
    ///
    /// [`Error::Checkpoint`] on every rank if the file cannot be written, or another run saves
    /// there or has done so since this one resumed or saved; the last file is unchanged then. If
    /// only its directory could not be synced to disk, the new file is in place, and the error says
    /// so. Batches since the last step; ranks with other epochs or numbers of steps.
    pub fn save<S: Stored + ?Sized>(
        &self,
        model: &mut S,
        path: impl AsRef<Path>,
        epoch: usize,
    ) -> Result<()> {
        self.save_to(model, path.as_ref(), epoch, Ok(None))
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
        let mut bytes = Vec::new();
        let own = match ciborium::into_writer(own, &mut bytes) {
            // A reader limits how deeply data may be nested.
            Ok(()) => match ciborium::from_reader::<IgnoredAny, _>(&bytes[..]) {
                Ok(_) => Ok(Some(bytes)),
                Err(error) => Err(format!("the data could not be resumed: {error}")),
            },
            Err(ciborium::ser::Error::Value(reason)) => {
                Err(format!("the data cannot be saved: {reason}"))
            }
            Err(error) => Err(format!("the data cannot be saved: {error}")),
        };
        self.save_to(model, path.as_ref(), epoch, own)
    }

    fn save_to<S: Stored + ?Sized>(
        &self,
        model: &mut S,
        path: &Path,
        epoch: usize,
        own: Result<Option<Vec<u8>>, String>,
    ) -> Result<()> {
        self.announce("save")?;
        let failed = |reason| Error::Checkpoint { path: path.to_owned(), reason };
        let len = own.as_ref().map(|own| own.as_ref().map(Vec::len)).map_err(Clone::clone);
        let part = len.and_then(|len| self.part(&*model, epoch, len));
        let parts = self.exchange(part)?.map_err(failed)?;
        check_alike(&parts).map_err(failed)?;
        let own = match own {
            Ok(Some(own)) => self.gather(&own, &parts)?,
            _ => Vec::new(),
        };
        let written = self.is_main().then(|| {
            let mut saves = self.saves.borrow_mut();
            let written = saves.save(path, |new| self.write(model, new, &parts, &own), describe);
            written.err().map(|error| error.to_string())
        });
        match broadcast_object(self.group(), written, 0)? {
            None => Ok(()),
            Some(reason) => Err(failed(reason)),
        }
    }

    fn part<S: Stored + ?Sized>(
        &self,
        model: &S,
        epoch: usize,
        own: Option<usize>,
    ) -> Result<Part, String> {
        self.check_whole().map_err(|error| error.to_string())?;
        model.check_saved().map_err(|error| error.to_string())?;
        self.check_pending().map_err(|error| format!("save after a step: {error}"))?;
        let random_position = model.random_position().unwrap_or(self.state.random_position);
        let autotune_cache =
            model.autotune_cache().unwrap_or_else(|| self.state.autotune_cache.clone());
        Ok(Part { epoch, steps: self.steps, random_position, autotune_cache, own })
    }

    /// Returns the data of all ranks' own on rank 0, one after another.
    fn gather(&self, own: &[u8], parts: &[Part]) -> Result<Vec<u8>> {
        let lens: Vec<_> = parts.iter().map(|part| part.own.unwrap_or(0)).collect();
        let lens = if self.is_main() { &lens[..] } else { &[] };
        let mut all = vec![0; lens.iter().sum()];
        self.group().gather_v(&mut all, own, lens, 0)?;
        Ok(all)
    }

    fn write<S: Stored + ?Sized>(
        &self,
        model: &mut S,
        new: &File,
        parts: &[Part],
        own: &[u8],
    ) -> Result<Id, BoxError> {
        let names = Names(PREFIX);
        let layout = self.optimizer().state_layout()?;
        let vectors = layout.state.iter().flat_map(|(index, state)| {
            let vectors = state.tensors.iter();
            vectors.map(|(name, len)| (names.optimizer(*index, name), Dtype::F32, vec![*len]))
        });
        let vectors: Vec<Entry> = vectors.collect();
        let tensors = model.entries();
        // Those in training, if the tensors' own entries have weights for evaluation.
        let eval = self.saves_eval_weights().then(|| self.optimizer());
        let trained = if eval.is_some() { model.trained() } else { 0 };
        let trained = tensors[..trained].iter();
        let trained: Vec<Entry> = trained
            .map(|(name, dtype, shape)| (names.trained(name), *dtype, shape.clone()))
            .collect();
        let progress = self.progress(parts, layout)?;
        let mut rest = own;
        let own = parts.iter().enumerate().filter_map(|(rank, part)| {
            let own = rest.split_off(..part.own?)?;
            Some((names.own(rank), own))
        });
        let bytes: Vec<_> = own.chain([(names.trainer(), &progress[..])]).collect();

        if let Some((name, dtype, _)) =
            tensors.iter().find(|(_, dtype, _)| ![8, 16, 32, 64].contains(&dtype.bitsize()))
        {
            return Err(format!("`{name}` of {dtype:?} cannot be saved").into());
        }
        // The widest types first, so that all data are aligned.
        let is_wide = |(_, dtype, _): &Entry, bits: usize| dtype.bitsize() == bits;
        let of_width = |bits: usize| {
            let all = tensors.iter().chain(&trained);
            all.filter(move |entry| is_wide(entry, bits)).cloned()
        };
        let mut entries: Vec<Entry> = of_width(64).chain(of_width(32)).chain(vectors).collect();
        entries.extend(of_width(16).chain(of_width(8)));
        entries.extend(bytes.iter().map(|(name, all)| (name.clone(), Dtype::U8, vec![all.len()])));
        let mut writer = Writer::new(new, entries)?;
        for bits in [64, 32, 16, 8] {
            if tensors.iter().any(|entry| is_wide(entry, bits)) {
                model.write(&mut writer, &|index| is_wide(&tensors[index], bits), eval)?;
            }
            if trained.iter().any(|entry| is_wide(entry, bits)) {
                let is_trained =
                    |index: usize| trained.get(index).is_some_and(|entry| is_wide(entry, bits));
                model.write(&mut writer, &is_trained, None)?;
            }
            if bits == 32 {
                self.optimizer().visit_state(&mut |_, _, values| writer.values(values))?;
            }
        }
        bytes.iter().try_for_each(|(_, bytes)| writer.bytes(bytes))?;
        Ok(writer.finish()?)
    }

    fn progress(
        &self,
        parts: &[Part],
        layout: fused_optim::StateLayout,
    ) -> Result<Vec<u8>, BoxError> {
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

/// Returns an error for ranks that save something else than rank 0.
fn check_alike(parts: &[Part]) -> Result<(), String> {
    let first = &parts[0];
    for (rank, part) in parts.iter().enumerate() {
        let differs = |what, first: &dyn Display, own: &dyn Display| {
            Err(format!("ranks differ in {what}: rank 0 has {first}, rank {rank} {own}"))
        };
        if part.epoch != first.epoch {
            return differs("the epoch to save", &first.epoch, &part.epoch);
        }
        if part.steps != first.steps {
            return differs("the number of steps", &first.steps, &part.steps);
        }
        if part.own.is_some() != first.own.is_some() {
            let call = |part: &Part| if part.own.is_some() { "`save_with`" } else { "`save`" };
            return differs("their call", &call(first), &call(part));
        }
    }
    Ok(())
}

/// Describes the checkpoint of another run.
fn describe(path: &Path) -> String {
    let progress = [PREFIX, OLD_PREFIX].into_iter();
    let progress = progress.filter_map(|prefix| Reader::peek(path, &Names(prefix).trainer()));
    let mut progress = progress.filter_map(|bytes| serde_json::from_slice::<Progress>(&bytes).ok());
    match progress.next() {
        Some(other) => format!(" (epoch {}, {} steps)", other.epoch, other.steps),
        None => String::new(),
    }
}
