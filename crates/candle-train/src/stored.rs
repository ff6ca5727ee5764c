//! Variables in a checkpoint, and [`Trainer::save`] and [`Trainer::resume`].

use std::collections::HashMap;
use std::path::Path;

use candle_core::{CpuStorage, DType, Device, Storage, Tensor, TensorId, Var};
use candle_nn::VarMap;
use fused_optim::Optimizer;
use half::{bf16, f16};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tracing::warn;
use train_step::BoxError;
use train_step::checkpoint::{Entry, Number, Reader, Stored, Writer};

use crate::eval::eval_tensor;
use crate::tensors::Tensors;
use crate::variables::Variables;
use crate::{Result, Trainer};
#[cfg(doc)]
use train_step::Error;

/// All variables of a trainer, of any type; first those that are trained.
pub(crate) struct StoredVariables<'a> {
    map: &'a VarMap,
    variables: &'a Variables,
    params: &'a Tensors,
    /// This rank's position in random numbers.
    random_position: u64,
    autotune_cache: String,
}

impl StoredVariables<'_> {
    fn vars(&self) -> impl Iterator<Item = &(String, Var)> {
        self.variables.all()
    }
}

impl Stored for StoredVariables<'_> {
    fn entries(&self) -> Vec<Entry> {
        let entry =
            |(name, var): &(String, Var)| (name.clone(), var.dtype().into(), var.dims().to_vec());
        self.vars().map(entry).collect()
    }

    fn trained(&self) -> usize {
        self.variables.params.len()
    }

    fn write(
        &mut self,
        writer: &mut Writer<'_>,
        wanted: &dyn Fn(usize) -> bool,
        eval: Option<&dyn Optimizer>,
    ) -> Result<(), BoxError> {
        // A variable with two names has the same weights in both entries.
        let params = self.variables.params.iter().map(|(_, var)| var.id());
        let params: HashMap<TensorId, usize> = params.zip(0..).collect();
        for (_, (_, var)) in self.vars().enumerate().filter(|(index, _)| wanted(*index)) {
            match eval.zip(params.get(&var.id())) {
                Some((optimizer, index)) => {
                    write(writer, &eval_tensor(self.params, optimizer, *index)?)?;
                }
                None => write(writer, var)?,
            }
        }
        Ok(())
    }

    fn read(
        &mut self,
        reader: &Reader,
        entry: &dyn Fn(usize) -> Option<String>,
    ) -> Result<(), BoxError> {
        for (index, (_, var)) in self.vars().enumerate() {
            if let Some(entry) = entry(index) {
                let tensor = read(reader, &entry, var)?;
                var.set(&tensor.to_device(var.device())?)?;
            }
        }
        Ok(())
    }

    fn random_position(&self) -> Option<u64> {
        Some(self.random_position)
    }

    fn autotune_cache(&self) -> Option<String> {
        Some(self.autotune_cache.clone())
    }

    fn check_saved(&self) -> Result<(), BoxError> {
        Ok(self.variables.check_map(self.map)?)
    }

    /// Names of one variable have the same values.
    fn check(&self, reader: &Reader, entry: &dyn Fn(usize) -> String) -> Result<(), BoxError> {
        let mut first: HashMap<TensorId, (usize, &String)> = HashMap::new();
        for (index, (name, var)) in self.vars().enumerate() {
            let (at, other) = *first.entry(var.id()).or_insert((index, name));
            if reader.checksum(&entry(at)) != reader.checksum(&entry(index)) {
                return Err(format!(
                    "`{other}` and `{name}` have different values, and are one variable of this model"
                )
                .into());
            }
        }
        Ok(())
    }
}

/// Writes a tensor's values: on the CPU without a copy of them.
fn write(writer: &mut Writer<'_>, tensor: &Tensor) -> Result<(), BoxError> {
    let tensor = tensor.to_device(&Device::Cpu)?.contiguous()?;
    let (storage, layout) = tensor.storage_and_layout();
    let unsupported = || format!("a variable of {:?} cannot be saved", tensor.dtype());
    let (Storage::Cpu(storage), Some((start, end))) = (&*storage, layout.contiguous_offsets())
    else {
        return Err(unsupported().into());
    };
    match storage {
        CpuStorage::F32(all) => writer.values(&all[start..end]),
        CpuStorage::F16(all) => writer.values(&all[start..end]),
        CpuStorage::BF16(all) => writer.values(&all[start..end]),
        CpuStorage::F64(all) => writer.values(&all[start..end]),
        CpuStorage::I64(all) => writer.values(&all[start..end]),
        CpuStorage::I32(all) => writer.values(&all[start..end]),
        CpuStorage::I16(all) => writer.values(&all[start..end]),
        CpuStorage::U32(all) => writer.values(&all[start..end]),
        CpuStorage::U8(all) => writer.bytes(&all[start..end]),
        _ => return Err(unsupported().into()),
    }?;
    Ok(())
}

/// Reads an entry as a tensor on the CPU, of a variable's type and shape.
fn read(reader: &Reader, entry: &str, var: &Var) -> Result<Tensor, BoxError> {
    match var.dtype() {
        DType::F32 => of_type::<f32>(reader, entry, var),
        DType::F16 => of_type::<f16>(reader, entry, var),
        DType::BF16 => of_type::<bf16>(reader, entry, var),
        DType::F64 => of_type::<f64>(reader, entry, var),
        DType::I64 => of_type::<i64>(reader, entry, var),
        DType::I32 => of_type::<i32>(reader, entry, var),
        DType::I16 => of_type::<i16>(reader, entry, var),
        DType::U32 => of_type::<u32>(reader, entry, var),
        DType::U8 => of_type::<u8>(reader, entry, var),
        other => Err(format!("a variable of {other:?} cannot be resumed").into()),
    }
}

fn of_type<T: Number + candle_core::WithDType>(
    reader: &Reader,
    entry: &str,
    var: &Var,
) -> Result<Tensor, BoxError> {
    let mut values = vec![T::default(); var.elem_count()];
    reader.values(entry, &mut values)?;
    Ok(Tensor::from_vec(values, var.shape(), &Device::Cpu)?)
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
    /// Two trainers that save to a file each have files of two moments after a kill between both
    /// saves, and neither resume is an error. [`Parts`](crate::Parts) saves both to one file, of
    /// one moment, and can always go on. With two files compare the epochs that both resumes
    /// return; if the run also saves within epochs, what [`resume_with`](Self::resume_with) returns
    /// of both, with the [position](train_data::DataLoader::position) of the loader or a count of
    /// batches as the data. Numbers of [`steps`](Self::steps) are no measure: each trainer takes
    /// and skips its own.
    ///
    /// ```
    /// # use candle_core::{DType, Device, Module, Tensor};
    /// # use candle_nn::{VarMap, linear};
    /// # use candle_train::{AdamWHyper, Trainer, seeded};
    /// # let directory = tempfile::tempdir()?;
    /// # let [g_path, d_path] = ["g", "d"].map(|name| directory.path().join(name));
    /// # let x = Tensor::ones((4, 2), DType::F32, &Device::Cpu)?;
    /// # let (g_vars, d_vars) = (VarMap::new(), VarMap::new());
    /// # let generator = linear(2, 2, seeded(&g_vars, 1, DType::F32, &Device::Cpu))?;
    /// # let discriminator = linear(2, 1, seeded(&d_vars, 2, DType::F32, &Device::Cpu))?;
    /// let mut g = Trainer::builder(&g_vars).part("generator").build(AdamWHyper::default())?;
    /// let d = Trainer::builder(&d_vars).part("discriminator").group(g.group().clone());
    /// let mut d = d.build(AdamWHyper::default())?;
    ///
    /// let start = g.resume(&g_path)?;
    /// if d.resume(&d_path)? != start {
    ///     return Err("files of two epochs: remove both, or take copies of one".into());
    /// }
    /// for epoch in start..3 {
    ///     let fake = generator.forward(&x)?.detach();
    ///     d.step(|| discriminator.forward(&fake)?.sqr()?.mean_all())?;
    ///     g.step(|| discriminator.forward(&generator.forward(&x)?)?.neg()?.mean_all())?;
    ///     g.save(&g_path, epoch + 1)?;
    ///     d.save(&d_path, epoch + 1)?;
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Checkpoint`] on every rank if the file cannot be written, or another run saves
    /// there or has done so since this one resumed or saved; the last file is unchanged then. If
    /// only its directory could not be synced to disk, the new file is in place, and the error says
    /// so. Batches since the last step; ranks with other epochs or numbers of steps.
    pub fn save(&self, path: impl AsRef<Path>, epoch: usize) -> Result<()> {
        let saved = self.core.save(&mut self.stored(), path, epoch);
        saved.map_err(|error| self.failed("save", error.into()))
    }

    /// Like [`save`](Self::save), with additional data of each rank in the same file, such as its
    /// position in a [`Stream`](train_data::Stream). Data are saved as CBOR: all of serde's types,
    /// infinity and NaN included. `Some(())` and `Some(None)` are resumed as `None`, as in JSON.
    ///
    /// ```
    /// # use candle_core::{DType, Device, Module};
    /// # use candle_nn::{VarBuilder, VarMap};
    /// # use candle_ops::cross_entropy;
    /// use candle_train::{AdamWHyper, Outcome, Trainer, tensor};
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
    ///     let step = train.step(|| cross_entropy(&net.forward(&x)?, &y))?;
    ///     if step.outcome == Outcome::Updated && train.steps() % 5 == 0 {
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
        let saved = self.core.save_with(&mut self.stored(), path, epoch, own);
        saved.map_err(|error| self.failed("save", error.into()))
    }

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
        self.resumed(|core, stored| Ok((core.resume(stored, path)?, ()))).map(|(epoch, ())| epoch)
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
        self.resumed(|core, stored| core.resume_with(stored, path))
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
        self.resumed(|core, stored| core.resume_with_all(stored, path))
    }

    /// As [`resume_with_all`](Self::resume_with_all): `check` gets the data before anything is
    /// changed, and its result is returned.
    ///
    /// # Errors
    ///
    /// Those of [`resume_with_all`](Self::resume_with_all), and of `check`, on all ranks.
    pub fn resume_checked<T: DeserializeOwned, R>(
        &mut self,
        path: impl AsRef<Path>,
        check: impl FnOnce(Vec<T>) -> Result<R, BoxError>,
    ) -> Result<(usize, Option<R>)> {
        self.resumed(|core, stored| core.resume_checked(stored, path, check))
    }

    fn stored(&self) -> StoredVariables<'_> {
        let Self { map, variables, tensors, context, .. } = self;
        let (random_position, autotune_cache) =
            (context.random_position(), context.autotune_cache());
        let params = &tensors.params;
        StoredVariables { map, variables, params, random_position, autotune_cache }
    }

    /// Resumes, and takes this rank's position in random numbers.
    fn resumed<R>(
        &mut self,
        resume: impl FnOnce(
            &mut train_step::Trainer,
            &mut StoredVariables<'_>,
        ) -> train_step::Result<(usize, R)>,
    ) -> Result<(usize, R)> {
        let (core, mut stored) = self.split();
        let resumed = resume(core, &mut stored);
        let resumed = resumed.map_err(|error| self.failed("resume", error.into()))?;
        self.take_state();
        Ok(resumed)
    }

    /// The core, with this rank's random state, and the variables.
    pub(crate) fn split(&mut self) -> (&mut train_step::Trainer, StoredVariables<'_>) {
        let Self { map, variables, tensors, core, context, .. } = self;
        let (random_position, autotune_cache) =
            (context.random_position(), context.autotune_cache());
        let state = core.state_mut();
        state.random_position = random_position;
        state.autotune_cache.clone_from(&autotune_cache);
        let params = &tensors.params;
        (core, StoredVariables { map, variables, params, random_position, autotune_cache })
    }

    /// Takes the random state of a core that has resumed.
    pub(crate) fn take_state(&mut self) {
        let state = self.core.state_mut();
        self.context.set_random_position(state.random_position);
        // Of another version's cache nothing is taken: shapes are timed again.
        if !state.autotune_cache.is_empty()
            && let Err(error) = self.context.load_autotune_cache(&state.autotune_cache)
        {
            warn!("the saved autotune cache is not used: {error}");
        }
    }
}
