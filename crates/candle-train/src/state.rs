//! Saves a run, and resumes it bit by bit.
//!
//! A checkpoint is one safetensors file: the variables by their names, so that it is a model file
//! as well, and two entries of bytes, [`OPTIMIZER`] and [`TRAINER`]. Rank 0 writes a new file
//! beside the last one and renames it, so that one of both is complete after a crash. The metadata
//! begin with the CRC-32 of the file, computed with zeros in place of its own digits.
//!
//! Invariant: the whole file is checked before any state changes.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};

use amp::ScalerState;
use candle_core::{DType, Device, Tensor};
use collective::object::{all_gather_object, broadcast_object};
use fused_optim::StateDict;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::{Error, Result, Trainer};

/// Names of the entries that are not variables.
const OPTIMIZER: &str = "candle_train.optimizer";
const TRAINER: &str = "candle_train.trainer";

/// The state of a run besides tensors.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Progress {
    format: u32,
    epoch: usize,
    steps: u64,
    scaler: Option<ScalerState>,
    /// The learning rates by parameter group, before the schedule's factors.
    base_lrs: Vec<f64>,
    /// The number of random words drawn by dropout, by rank.
    random_positions: Vec<u64>,
    /// The argument of `save_with`, by rank; empty without one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    own: Vec<Value>,
}

const FORMAT: u32 = 1;

type BoxError = Box<dyn std::error::Error>;

impl Trainer {
    /// Saves variables, optimizer, loss scale and random states; `epoch` is the epoch to resume
    /// with. candle's `VarMap::load` can read the variables.
    ///
    /// Every rank must call it, after a step. Blocks until rank 0 has written the file.
    ///
    /// # Errors
    ///
    /// [`Error::Checkpoint`] on every rank if the file cannot be written; the last one is unchanged
    /// then. Batches since the last step.
    pub fn save(&self, path: impl AsRef<Path>, epoch: usize) -> Result<()> {
        self.save_with(path, epoch, &())
    }

    /// Like [`save`](Self::save), with additional data of each rank in the same file, such as its
    /// position in a [`Stream`](train_data::Stream).
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
    /// The errors of [`save`](Self::save); data that cannot be written as JSON.
    pub fn save_with(
        &self,
        path: impl AsRef<Path>,
        epoch: usize,
        own: &impl Serialize,
    ) -> Result<()> {
        let own = serde_json::to_value(own).map_err(|e| Error::InvalidArgument(e.to_string()));
        let saved = own.and_then(|own| self.save_to(path.as_ref(), epoch, own));
        saved.map_err(|error| self.failed("save", error))
    }

    fn save_to(&self, path: &Path, epoch: usize, own: Value) -> Result<()> {
        self.check_map()?;
        if self.pending > 0 {
            let pending = self.pending;
            let text = format!("save after a step: {pending} batches wait for the next one");
            return Err(Error::InvalidArgument(text));
        }
        self.announce("save")?;
        let random_positions = all_gather_object(self.group(), &self.context.random_position())?;
        let mut own = all_gather_object(self.group(), &own)?;
        if own.iter().all(Value::is_null) {
            own.clear();
        }
        let scaler = self.scaler.state_dict();
        let progress = Progress {
            format: FORMAT,
            epoch,
            steps: self.steps,
            scaler,
            base_lrs: self.base_lrs.clone(),
            random_positions,
            own,
        };
        let written = match self.is_main() {
            true => self.write(path, &progress).err().map(|error| error.to_string()),
            false => None,
        };
        match broadcast_object(self.group(), self.is_main().then_some(written), 0)? {
            None => Ok(()),
            Some(reason) => Err(Error::Checkpoint { path: path.to_owned(), reason }),
        }
    }

    fn write(&self, path: &Path, progress: &Progress) -> Result<(), BoxError> {
        let bytes = |bytes: Vec<u8>| {
            let count = bytes.len();
            Tensor::from_vec(bytes, count, &Device::Cpu)
        };
        let mut entries = HashMap::new();
        for (name, var) in self.variables.all() {
            entries.insert(name.clone(), var.as_detached_tensor());
        }
        let optimizer = self.optimizer.state_dict()?.to_safetensors()?;
        entries.insert(OPTIMIZER.to_owned(), bytes(optimizer)?);
        entries.insert(TRAINER.to_owned(), bytes(serde_json::to_vec(progress)?)?);
        let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty());
        let directory = directory.unwrap_or_else(|| Path::new("."));
        fs::create_dir_all(directory)?;
        let mut new = path.as_os_str().to_owned();
        new.push(".new");
        let new = PathBuf::from(new);
        let metadata = HashMap::from([("crc32".to_owned(), NO_DIGITS.to_owned())]);
        safetensors::serialize_to_file(&entries, Some(metadata), &new)?;
        write_checksum(&new)?;
        fs::rename(&new, path)?;
        // Makes the rename durable.
        File::open(directory)?.sync_all()?;
        Ok(())
    }

    /// Resumes a saved run bit by bit, and returns the epoch to resume with. If there is no such
    /// file, returns 0 and changes nothing. Hyper-parameters, including learning rates, are those
    /// of the saved run. With another number of ranks the dropout masks and the order of averages
    /// differ.
    ///
    /// Every rank must call it, before its first step. All ranks read the file.
    ///
    /// # Errors
    ///
    /// [`Error::Checkpoint`] if the file is damaged, belongs to another model or optimizer, or is
    /// missing on a rank. This rank is unchanged then.
    pub fn resume(&mut self, path: impl AsRef<Path>) -> Result<usize> {
        let resumed = self.resume_from(path.as_ref(), |_| Ok(()));
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
        let own = |progress: &Progress| {
            match progress.own.len() {
            0 => Err("nothing of the ranks' own is in it: it was saved by `save`; resume it by `resume`".into()),
            saved if saved != ranks => Err(format!(
                "{saved} ranks saved it, each with something of its own, and this run has {ranks}: resume with {saved}"
            )
            .into()),
            _ => Ok(T::deserialize(&progress.own[rank])?),
        }
        };
        self.resume_from(path.as_ref(), own).map_err(|error| self.failed("resume", error))
    }

    /// `own` is called before any state changes.
    fn resume_from<T>(
        &mut self,
        path: &Path,
        own: impl FnOnce(&Progress) -> Result<T, BoxError>,
    ) -> Result<(usize, Option<T>)> {
        self.announce("resume")?;
        let exists = all_gather_object(self.group(), &path.exists())?;
        if !exists[0] {
            return Ok((0, None));
        }
        let failed = |reason: String| Error::Checkpoint { path: path.to_owned(), reason };
        if let Some(rank) = exists.iter().position(|exists| !exists) {
            return Err(failed(format!(
                "rank 0 has it, rank {rank} does not: save to a file system that all ranks share"
            )));
        }
        let read = self.read(path, own).map_err(|error| failed(error.to_string()));
        let (progress, entries, own) = read?;
        let epochs = all_gather_object(self.group(), &(progress.epoch, progress.steps))?;
        if let Some(rank) = epochs.iter().position(|other| *other != epochs[0]) {
            return Err(failed(format!("rank {rank} has the file of another run than rank 0")));
        }
        for (name, var) in self.variables.all() {
            var.set(&entries[name].to_device(var.device())?)?;
        }
        let positions = &progress.random_positions;
        let position = positions.get(self.rank()).or_else(|| positions.iter().max());
        self.context.set_random_position(position.copied().unwrap_or(0));
        self.steps = progress.steps;
        self.base_lrs = progress.base_lrs;
        Ok((progress.epoch, Some(own)))
    }

    /// Checks a file, and loads optimizer and loss scale.
    fn read<T>(
        &mut self,
        path: &Path,
        own: impl FnOnce(&Progress) -> Result<T, BoxError>,
    ) -> Result<(Progress, HashMap<String, Tensor>, T), BoxError> {
        let mut file = fs::read(path)?;
        verify_checksum(&mut file)?;
        let entries = candle_core::safetensors::load_buffer(&file, &Device::Cpu)?;
        drop(file);
        let bytes =
            |name: &str| match entries.get(name).filter(|tensor| tensor.dtype() == DType::U8) {
                Some(tensor) => Ok(tensor.to_vec1::<u8>()?),
                None => Err(format!("no entry `{name}`: not a file of `Trainer::save`").into()),
            };
        let progress: Result<Vec<u8>, BoxError> = bytes(TRAINER);
        let progress: Progress = serde_json::from_slice(&progress?)?;
        if progress.format != FORMAT {
            return Err(format!("format {}; expected {FORMAT}", progress.format).into());
        }
        let own = own(&progress)?;
        for (name, var) in self.variables.all() {
            let (shape, dtype) = (var.dims(), var.dtype());
            match entries.get(name) {
                None => return Err(format!("no variable `{name}`").into()),
                Some(saved) if saved.dims() != shape || saved.dtype() != dtype => {
                    let (had, of) = (saved.dims(), saved.dtype());
                    let text = format!(
                        "`{name}` is {had:?} of {of:?}; the model's is {shape:?} of {dtype:?}"
                    );
                    return Err(text.into());
                }
                Some(_) => {}
            }
        }
        let is_known = |name: &String| {
            [OPTIMIZER, TRAINER].contains(&name.as_str())
                || self.variables.all().any(|(known, _)| known == name)
        };
        if let Some(name) = entries.keys().filter(|name| !is_known(name)).min() {
            return Err(format!("the model has no variable `{name}`").into());
        }
        if progress.scaler.is_some() != self.scaler.is_enabled() {
            let (saved, now) = match self.scaler.is_enabled() {
                true => ("without", "has one"),
                false => ("with", "has none"),
            };
            let text = format!(
                "it was saved {saved} a loss scale and this trainer {now}: see `Builder::f16`"
            );
            return Err(text.into());
        }
        let mut scaler = self.scaler.clone();
        scaler.load_state_dict(progress.scaler.as_ref())?;
        let optimizer: Result<Vec<u8>, BoxError> = bytes(OPTIMIZER);
        let optimizer = StateDict::from_safetensors(&optimizer?)?;
        self.optimizer.load_state_dict(&optimizer).map_err(|error| {
            format!(
                "{error}: the optimizer and `Builder::frozen` have to be those of the saved run"
            )
        })?;
        self.scaler = scaler;
        Ok((progress, entries, own))
    }
}

/// Beginning of a header with the checksum, after the eight bytes of its length.
const CHECKSUM_PREFIX: &[u8] = br#"{"__metadata__":{"crc32":""#;
const NO_DIGITS: &str = "00000000";
const DIGITS: Range<usize> = 8 + CHECKSUM_PREFIX.len()..16 + CHECKSUM_PREFIX.len();

/// Writes the checksum of a file that has [`NO_DIGITS`] in its place, and syncs it to disk.
fn write_checksum(path: &Path) -> io::Result<()> {
    let mut file = File::options().read(true).write(true).open(path)?;
    let (mut crc, mut part) = (crc32fast::Hasher::new(), vec![0; 1 << 20]);
    loop {
        match file.read(&mut part)? {
            0 => break,
            count => crc.update(&part[..count]),
        }
    }
    file.seek(SeekFrom::Start(DIGITS.start as u64))?;
    file.write_all(format!("{:08x}", crc.finalize()).as_bytes())?;
    file.sync_all()
}

/// Verifies the checksum, and replaces it with [`NO_DIGITS`].
fn verify_checksum(file: &mut [u8]) -> Result<(), &'static str> {
    let none = "no checksum: the file is damaged, or not saved by this version of `Trainer::save`";
    let digits = file.get_mut(DIGITS).ok_or(none)?;
    let written = digits.to_vec();
    digits.copy_from_slice(NO_DIGITS.as_bytes());
    if file[8..DIGITS.start] != *CHECKSUM_PREFIX {
        return Err(none);
    }
    if format!("{:08x}", crc32fast::hash(file)).as_bytes() != written {
        return Err("its checksum does not match: the file is damaged; resume from another copy");
    }
    Ok(())
}
