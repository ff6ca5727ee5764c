//! Loads only a model's weights: from a checkpoint, or from a file of another program.

use std::path::{Path, PathBuf};

use collective::object::broadcast_object;

use super::Runner;
use crate::checkpoint::{
    self, Checkpoint, Converted, count_converted, load_into, specs, visit_whole_model,
};
use crate::engine::Engine;
use crate::pretrained::{FORMATS, Fit, Report, ReviseKeys, Weights, is_known};
use crate::{Error, Result};

/// Checkpoint that a run begins from.
#[derive(Debug)]
pub(super) struct Start {
    /// Whether the run resumes; otherwise it loads the model only.
    pub(super) resume: bool,
    /// Whether the number of ranks may differ from the one that wrote it.
    pub(super) elastic: bool,
    pub(super) load_from: Option<PathBuf>,
    pub(super) load_options: LoadOptions,
    pub(super) loaded: Loaded,
    /// Checkpoint that the run began from, by `load_from`.
    pub(super) origin: Option<PathBuf>,
}

/// Part of a checkpoint that was loaded, to load each part once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Loaded {
    /// Nothing.
    #[default]
    Nothing,
    /// The model, or there is none to load.
    Model,
    /// All, or there is nothing to load: training has begun.
    Run,
}

/// Options for loading weights of [`load_from`](super::RunnerBuilder::load_from) from a file of
/// another program (`.safetensors`, or a PyTorch `.pth`, `.pt` or `.bin`), or from the model of a
/// checkpoint.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LoadOptions {
    /// Regular expressions and replacements, in Python's syntax (`\1`), applied in order to the
    /// names of the tensors.
    pub revise_keys: Vec<(String, String)>,
    /// Regular expressions of the renamed names of matrices that are transposed, such as the
    /// `Conv1D` weights of GPT-2 in transformers, of which square ones would match in shape either
    /// way.
    pub transpose: Vec<String>,
    /// Whether a missing, unexpected or mismatched tensor is an error; otherwise it is a warning,
    /// and the others are loaded. `None` is false for a file and true for a checkpoint.
    pub strict: Option<bool>,
}

impl LoadOptions {
    /// Returns the file to load weights from by name, unless `path` is a checkpoint to load as a
    /// whole.
    pub(crate) fn file(&self, path: &Path) -> Option<PathBuf> {
        if !path.is_dir() {
            return Some(path.to_owned());
        }
        let as_checkpoint =
            self.revise_keys.is_empty() && self.transpose.is_empty() && self.strict != Some(false);
        (!as_checkpoint).then(|| path.join(checkpoint::MODEL))
    }

    /// Compares a file with the model. Returns an error if the weights cannot be loaded.
    fn fit(&self, file: &Path, engine: &dyn Engine) -> Result<(Weights, Fit), String> {
        let revise = ReviseKeys::new(&self.revise_keys)
            .map_err(|why| format!("load_from.revise_keys: {why}"))?;
        let mut weights = Weights::read(file, &revise)?;
        weights.transpose(&self.transpose)?;
        let specs = specs(engine);
        let wanted: Vec<_> = specs.iter().map(|spec| (&*spec.name, &*spec.shape)).collect();
        let fit = weights.fit(&wanted);
        let strict = self.strict.unwrap_or_else(|| {
            file.ends_with(checkpoint::MODEL) && file.with_file_name("state.json").exists()
        });
        match &fit.report {
            report if report.used == 0 => Err(format!("contains no tensor of the model: {report}")),
            report if strict && !report.is_exact() => Err(format!(
                "does not match the model: {report}; set strict = false to load the rest"
            )),
            _ => Ok((weights, fit)),
        }
    }

    /// Returns the differences that loading a file would log, for `runner check`.
    pub(super) fn check(&self, file: &Path, engine: &dyn Engine) -> Result<Option<String>> {
        match self.fit(file, engine) {
            Ok((_, fit)) => Ok(difference(file, &fit.report)),
            Err(why) => Err(unreadable(file, &why)),
        }
    }

    /// Loads a file into the model, which is unchanged if this fails.
    fn load(
        &self,
        file: &Path,
        engine: &mut dyn Engine,
    ) -> Result<(Report, Vec<Converted>), String> {
        let (weights, Fit { sources, report }) = self.fit(file, engine)?;
        let mut converted = Vec::new();
        for (spec, source) in specs(engine).iter().zip(&sources) {
            let Some(source) = source else { continue };
            count_converted(&mut converted, &weights.view(*source)?, spec)?;
        }
        visit_whole_model(engine, &mut |at, _, slice| match sources[at] {
            None => Ok(()),
            Some(source) => weights
                .view(source)
                .and_then(|view| load_into(slice, &view))
                .map_err(|why| unreadable(file, &why)),
        })
        .map_err(|e| e.to_string())?;
        Ok((report, converted))
    }
}

fn unreadable(file: &Path, why: &str) -> Error {
    Error::Checkpoint(format!("{}: {why}", file.display()))
}

/// Returns a warning about differences, if there are any.
fn difference(file: &Path, report: &Report) -> Option<String> {
    let file = file.display();
    let text = || format!("{file} does not match the model, the rest is loaded: {report}");
    (!report.is_exact()).then(text)
}

/// Returns the reason why weights cannot be loaded from `path`, if its name or absence implies it.
pub(super) fn refusal(path: &Path) -> Option<String> {
    let text = path.display();
    if path.is_dir() || path.is_file() && is_known(path) {
        return None;
    }
    Some(match path.is_file() || path.extension().is_some() && !is_known(path) {
        false => format!("{text}: no such checkpoint"),
        true => format!(
            "{text}: not a checkpoint, which would be a directory such as work_dirs/NAME/epoch_3 with \
             model.safetensors and state.json in it, nor {FORMATS}"
        ),
    })
}

impl Runner {
    /// Loads only the model of a checkpoint or file: of `load_from`, or, if the run resumes, of the
    /// newest checkpoint. Returns whether there is one.
    pub(crate) fn load_weights(&mut self) -> Result<bool> {
        let path = match self.start.resume {
            true => self.find_checkpoint()?.path,
            false => self.start.load_from.clone(),
        };
        let Some(path) = path else { return Ok(false) };
        let is_origin = self.start.load_from.as_ref() == Some(&path);
        match self.start.load_options.file(&path).filter(|_| is_origin) {
            Some(file) => self.load_file(&path, &file)?,
            None => self.load_checkpoint_weights(&path)?,
        }
        Ok(true)
    }

    /// Loads weights by name from a file of another program. Rank 0 reads them for all ranks.
    pub(super) fn load_file(&mut self, path: &Path, file: &Path) -> Result<()> {
        let loaded = match self.group.rank() {
            0 => Some(self.start.load_options.load(file, &mut *self.engine)),
            _ => None,
        };
        let why = loaded.as_ref().map(|loaded| loaded.as_ref().err().cloned());
        if let Some(why) = broadcast_object::<Option<String>>(&self.group, why, 0)? {
            return Err(unreadable(file, &why));
        }
        self.broadcast_model()?;
        let loaded_model = Checkpoint::of_weights(file);
        self.tell_of_weights(&loaded_model)?;
        self.note_origin(path, &loaded_model.meta);
        let Some(Ok((report, converted))) = loaded else { return Ok(()) };
        let count = specs(&*self.engine).len();
        let from = format!("{} ({} of {count} tensors)", file.display(), report.used);
        self.log_loaded(&from, &converted);
        if let Some(text) = difference(file, &report) {
            self.logger().warning(&text);
        }
        Ok(())
    }

    fn load_checkpoint_weights(&mut self, path: &Path) -> Result<()> {
        let loaded = checkpoint::load(path)?;
        let converted = loaded.load_weights(&mut *self.engine)?;
        self.tell_of_weights(&loaded)?;
        self.note_origin(path, &loaded.meta);
        self.log_loaded(&path.display().to_string(), &converted);
        if self.start.resume {
            // Metrics are logged at this epoch.
            self.position = loaded.meta.position;
        }
        Ok(())
    }

    /// Lets hooks load the model as well, without their state.
    fn tell_of_weights(&mut self, loaded: &Checkpoint) -> Result<()> {
        let resume = std::mem::replace(&mut self.start.resume, false);
        let told = self.call_hooks(|hook, runner| hook.after_load_checkpoint(runner, loaded));
        self.start.resume = resume;
        told
    }

    fn log_loaded(&mut self, from: &str, converted: &[Converted]) {
        let mut text = format!("loaded the model from {from}");
        for Converted { from, to, tensors } in converted {
            text += &format!(", {tensors} tensors of {from:?} converted to {to:?}");
        }
        self.logger().info(&text);
    }
}
