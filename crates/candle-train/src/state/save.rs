//! [`Trainer::save`].

use std::collections::HashMap;
use std::fmt::Display;
use std::fs::File;
use std::path::Path;

use candle_core::Var;
use collective::object::broadcast_object;
use safetensors::Dtype;
use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};

use super::file::{Entry, Id, Reader, Writer};
use super::{BoxError, FORMAT, Progress, TRAINER, optimizer_entry, own_entry, trained_entry};
use crate::{Error, Result, Trainer};

/// A rank's part of a save.
#[derive(Serialize, Deserialize)]
struct Part {
    epoch: usize,
    steps: u64,
    random_position: u64,
    /// Length of the rank's own data.
    own: Option<usize>,
}

impl Trainer {
    /// Saves variables, optimizer, loss scale, seed and random states; `epoch` is the epoch to
    /// resume with. candle's `VarMap::load` can read the variables.
    ///
    /// Every rank must call it, after a step, with the same epoch. Blocks until rank 0 has written
    /// the file: beside the last one, which it then replaces, so that one of both is complete after
    /// a crash. A symbolic link stays one. Needs no memory beside the state, on a GPU that of the
    /// host for a copy of the largest tensor and its optimizer state.
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
    pub fn save(&self, path: impl AsRef<Path>, epoch: usize) -> Result<()> {
        self.save_to(path.as_ref(), epoch, Ok(None)).map_err(|error| self.failed("save", error))
    }

    /// Like [`save`](Self::save), with additional data of each rank in the same file, such as its
    /// position in a [`Stream`](train_data::Stream). Data are saved as CBOR: all of serde's types,
    /// infinity and NaN included. `Some(())` and `Some(None)` are resumed as `None`, as in JSON.
    ///
    /// ```
    /// # use candle_core::{DType, Device, Module};
    /// # use candle_nn::{VarBuilder, VarMap};
    /// # use candle_ops::cross_entropy;
    /// use candle_train::{AdamWHyper, Trainer, tensor};
    /// use candle_train::train_data::{Array, Stream, StreamLoader, StreamOptions, Workers};
    ///
    /// # let directory = tempfile::tempdir()?;
    /// # let folder = directory.path().display();
    /// # let path = directory.path().join("run.safetensors");
    /// # std::fs::write(format!("{folder}/0.txt"), "a\nline\nis\nshort\n")?;
    /// # let vars = VarMap::new();
    /// # let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    /// # let net = candle_nn::linear(1, 2, vb)?;
    /// let mut train = Trainer::builder(&vars).build(AdamWHyper::default())?;
    /// let (rank, world_size) = (train.rank(), train.world_size());
    /// let (shuffle_buffer, repeat) = (1000, true);
    /// let options = StreamOptions { shuffle_buffer, seed: 1, rank, world_size, repeat };
    /// let stream = Stream::text([format!("{folder}/*.txt")], options)?.map(|mut line, _random| {
    ///     let len = line.take("text")?.shape()[0];
    ///     let label = Array::scalar((len % 2) as i64);
    ///     Ok(line.with("len", Array::new([1], vec![len as f32])?).with("label", label))
    /// });
    /// let mut loader = StreamLoader::new(stream, 2, Workers::new(1))?;
    ///
    /// // Begins, or resumes after the last batch before the save.
    /// if let (_, Some(position)) = train.resume_with(&path)? {
    ///     loader.resume(position)?;
    /// }
    /// while train.steps() < 10 && let Some(batch) = loader.next_batch()? {
    ///     let x = tensor(batch.get("len")?, &Device::Cpu)?;
    ///     let y = tensor(batch.get("label")?, &Device::Cpu)?;
    ///     train.step(|| cross_entropy(&net.forward(&x)?, &y))?;
    ///     if train.steps() % 5 == 0 {
    ///         train.save_with(&path, 0, &loader.position())?;
    ///     }
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// The errors of [`save`](Self::save); data whose `Serialize` fails or that are nested too
    /// deeply to be resumed, on all ranks.
    pub fn save_with(
        &self,
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
        self.save_to(path.as_ref(), epoch, own).map_err(|error| self.failed("save", error))
    }

    fn save_to(
        &self,
        path: &Path,
        epoch: usize,
        own: Result<Option<Vec<u8>>, String>,
    ) -> Result<()> {
        self.announce("save")?;
        let failed = |reason| Error::Checkpoint { path: path.to_owned(), reason };
        let len = own.as_ref().map(|own| own.as_ref().map(Vec::len)).map_err(Clone::clone);
        let parts = self.exchange(len.and_then(|len| self.part(epoch, len)))?.map_err(failed)?;
        let first = &parts[0];
        for (rank, part) in parts.iter().enumerate() {
            let differs = |what, first: &dyn Display, own: &dyn Display| {
                Err(failed(format!(
                    "ranks differ in {what}: rank 0 has {first}, rank {rank} {own}"
                )))
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
        let own = match own {
            Ok(Some(own)) => self.gather(&own, &parts)?,
            _ => Vec::new(),
        };
        let written = self.is_main().then(|| {
            let mut saves = self.saves.borrow_mut();
            let written = saves.save(path, |new| self.write(new, &parts, &own), describe);
            written.err().map(|error| error.to_string())
        });
        match broadcast_object(self.group(), written, 0)? {
            None => Ok(()),
            Some(reason) => Err(failed(reason)),
        }
    }

    fn part(&self, epoch: usize, own: Option<usize>) -> Result<Part, String> {
        self.check_whole().map_err(|error| error.to_string())?;
        if self.pending > 0 {
            let pending = self.pending;
            return Err(format!("save after a step: {pending} batches wait for the next one"));
        }
        let random_position = self.context.random_position();
        Ok(Part { epoch, steps: self.steps, random_position, own })
    }

    /// Returns the data of all ranks' own on rank 0, one after another.
    fn gather(&self, own: &[u8], parts: &[Part]) -> Result<Vec<u8>> {
        let lens: Vec<_> = parts.iter().map(|part| part.own.unwrap_or(0)).collect();
        let lens = if self.is_main() { &lens[..] } else { &[] };
        let mut all = vec![0; lens.iter().sum()];
        self.group().gather_v(&mut all, own, lens, 0)?;
        Ok(all)
    }

    /// All variables, and again those whose weights in training are not those for evaluation.
    fn saved_variables(&self) -> Vec<Saved<'_>> {
        let all = self.variables.all();
        if !self.saves_eval_weights() {
            return all.map(|(name, var)| Saved::new(name, var)).collect();
        }
        let params = &self.variables.params;
        let indices: HashMap<_, _> = params.iter().map(|(_, var)| var.id()).zip(0..).collect();
        let published = all.map(|(name, var)| Saved {
            eval_index: indices.get(&var.id()).copied(),
            ..Saved::new(name, var)
        });
        let trained = params.iter().map(|(name, var)| Saved::new(&trained_entry(name), var));
        published.chain(trained).collect()
    }

    fn write(&self, new: &File, parts: &[Part], own: &[u8]) -> Result<Id, BoxError> {
        let layout = self.optimizer.state_layout()?;
        let mut variables = self.saved_variables();
        // The widest types first, so that all data are aligned.
        variables.sort_by(|a, b| width(b.var).cmp(&width(a.var)).then(a.entry.cmp(&b.entry)));
        let (wide, narrow) =
            variables.split_at(variables.partition_point(|saved| width(saved.var) >= 4));
        let vectors = layout.state.iter().flat_map(|(index, state)| {
            let names = state.tensors.iter();
            names.map(|(name, len)| (optimizer_entry(*index, name), Dtype::F32, vec![*len]))
        });
        let vectors: Vec<Entry> = vectors.collect();
        let progress = serde_json::to_vec(&Progress {
            format: FORMAT,
            epoch: parts[0].epoch,
            steps: self.steps,
            seed: Some(self.seed),
            scaler: self.scaler.state_dict(),
            skips: self.skips,
            base_lrs: self.base_lrs.clone(),
            has_schedule: self.schedule.is_some(),
            schedulers: self.schedules.as_ref().map_or(Vec::new(), |all| all.all().to_vec()),
            mean_count: self.mean_count,
            random_positions: parts.iter().map(|part| part.random_position).collect(),
            optimizer: Some(layout),
            own: Vec::new(),
        })?;
        let mut rest = own;
        let own = parts.iter().enumerate().filter_map(|(rank, part)| {
            let own = rest.split_off(..part.own?)?;
            Some((own_entry(rank), own))
        });
        let bytes: Vec<_> = own.chain([(TRAINER.to_owned(), &progress[..])]).collect();

        let entry = |Saved { entry, var, .. }: &Saved<'_>| {
            (entry.clone(), Dtype::from(var.dtype()), var.dims().to_vec())
        };
        let mut entries: Vec<Entry> = wide.iter().map(entry).chain(vectors).collect();
        entries.extend(narrow.iter().map(entry));
        entries.extend(bytes.iter().map(|(name, all)| (name.clone(), Dtype::U8, vec![all.len()])));
        let mut writer = Writer::new(new, entries)?;
        let write = |writer: &mut Writer<'_>, variables: &[Saved<'_>]| {
            variables.iter().try_for_each(|saved| match saved.eval_index {
                Some(index) => match self.optimizer.eval_tensor(index)? {
                    Some(weights) => writer.tensor(&weights),
                    None => writer.tensor(saved.var),
                },
                None => writer.tensor(saved.var),
            })
        };
        write(&mut writer, wide)?;
        self.optimizer.visit_state(&mut |_, _, values| writer.values(values))?;
        write(&mut writer, narrow)?;
        bytes.iter().try_for_each(|(_, bytes)| writer.bytes(bytes))?;
        Ok(writer.finish()?)
    }
}

/// A variable to save.
struct Saved<'a> {
    entry: String,
    var: &'a Var,
    /// Its index in the optimizer, if its weights for evaluation are saved.
    eval_index: Option<usize>,
}

impl<'a> Saved<'a> {
    fn new(entry: &str, var: &'a Var) -> Self {
        Self { entry: entry.to_owned(), var, eval_index: None }
    }
}

/// Size of a value, in bytes.
fn width(var: &Var) -> usize {
    var.dtype().size_in_bytes()
}

/// Describes the checkpoint of another run.
fn describe(path: &Path) -> String {
    let progress = Reader::peek(path, TRAINER);
    match progress.and_then(|bytes| serde_json::from_slice::<Progress>(&bytes).ok()) {
        Some(other) => format!(" (epoch {}, {} steps)", other.epoch, other.steps),
        None => String::new(),
    }
}
