//! Loads only a model's weights: from a checkpoint, or from a file of another program.

use std::path::{Path, PathBuf};

use collective::object::{all_gather_object, broadcast_object};

use serde_json::Value;

use super::Runner;
use crate::checkpoint::{
    self, Checkpoint, Converted, bad, count_converted, load_into, specs, visit_whole_model,
};
use crate::engine::Engine;
use crate::model::LoraOptions;
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
    /// Some of it, before an error: this run can neither train nor be evaluated.
    Part,
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

    /// Returns whether this is the model file of a checkpoint.
    fn is_of_checkpoint(file: &Path) -> Result<bool> {
        match file.ends_with(checkpoint::MODEL) {
            true => checkpoint::is_file(&file.with_file_name(checkpoint::STATE)),
            false => Ok(false),
        }
    }

    /// Compares a file with the model. Returns an error if the weights cannot be loaded.
    fn fit(&self, file: &Path, engine: &dyn Engine) -> Result<(Weights, Fit), String> {
        let revise = ReviseKeys::new(&self.revise_keys)
            .map_err(|why| format!("load_from.revise_keys: {why}"))?;
        let is_checkpoint = Self::is_of_checkpoint(file).map_err(|e| e.to_string())?;
        if is_checkpoint {
            checkpoint::verify_model(file).map_err(|e| e.to_string())?;
        }
        let mut weights = Weights::read(file, &revise)?;
        weights.transpose(&self.transpose)?;
        let specs = specs(engine);
        let wanted: Vec<_> = specs.iter().map(|spec| (&*spec.name, &*spec.shape)).collect();
        let mut fit = weights.fit(&wanted);
        let strict = self.strict.unwrap_or(is_checkpoint);
        match &fit.report {
            report if report.used == 0 => Err(format!("contains no tensor of the model: {report}")),
            report if strict && !report.is_exact() => Err(format!(
                "does not match the model: {report}; set strict = false to load the rest"
            )),
            _ => {
                fit.report.non_finite = weights.check(&fit.sources)?;
                Ok((weights, fit))
            }
        }
    }

    /// Returns the differences that loading a file would log, for `runner check`.
    pub(super) fn check(&self, file: &Path, engine: &dyn Engine) -> Result<Option<String>> {
        match self.fit(file, engine) {
            Ok((_, fit)) => {
                let texts = [difference(file, &fit.report), non_finite(file, &fit.report)];
                let texts: Vec<_> = texts.into_iter().flatten().collect();
                Ok((!texts.is_empty()).then(|| texts.join("; ")))
            }
            Err(why) => Err(unreadable(file, &why)),
        }
    }

    /// Loads a file into the model, which is unchanged if this fails.
    fn load(
        &self,
        file: &Path,
        lora: Option<&LoraOptions>,
        engine: &mut dyn Engine,
    ) -> Result<(Report, Vec<Converted>), String> {
        let (weights, Fit { sources, report }) = self.fit(file, engine)?;
        let is_adapter = |name: &str| checkpoint::ADAPTER.iter().any(|end| name.ends_with(end));
        let mut of_other_shapes =
            report.mismatched.iter().filter_map(|text| text.split('`').nth(1));
        let mut has_adapters = of_other_shapes.any(is_adapter);
        let mut converted = Vec::new();
        for (spec, source) in specs(engine).iter().zip(&sources) {
            let Some(source) = source else { continue };
            count_converted(&mut converted, &weights.view(*source)?, spec)?;
            has_adapters |= is_adapter(&spec.name);
        }
        if let Some(own) = lora.filter(|_| has_adapters)
            && let Some(saved) = lora_options_of(file)?
            && let Some(difference) = saved.difference(own, false)
        {
            return Err(trained_with(&difference));
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

/// Returns the LoRA options of the adapters in a file, recorded beside it: in the `state.json` of a
/// checkpoint, or in PEFT's `adapter_config.json`. The error text is the reason why these cannot be
/// read, or are of adapters that compute something else than this crate's.
fn lora_options_of(file: &Path) -> Result<Option<LoraOptions>, String> {
    let dir = file.parent().unwrap_or_else(|| Path::new(""));
    if let Some(saved) = checkpoint::lora_options(dir).map_err(|e| e.to_string())? {
        return Ok(Some(saved));
    }
    let path = dir.join("adapter_config.json");
    let fail = |why: String| format!("{}: {why}", path.display());
    let text = match std::fs::read(&path) {
        Ok(text) => text,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(fail(e.to_string())),
    };
    let config: Value = serde_json::from_slice(&text).map_err(|e| fail(e.to_string()))?;
    for key in ["use_rslora", "use_dora", "alpha_pattern", "rank_pattern"] {
        let value = &config[key];
        if value == true || value.as_object().is_some_and(|patterns| !patterns.is_empty()) {
            return Err(fail(format!(
                "`{key}` = {value} is not supported: adapters have one rank and the scale alpha / rank here; merge \
                 them into the weights (PEFT's `merge_and_unload`) and load these"
            )));
        }
    }
    let rank = config["r"].as_u64().and_then(|rank| usize::try_from(rank).ok());
    let (Some(rank), Some(alpha)) = (rank, config["lora_alpha"].as_f64()) else {
        return Err(fail("has no numbers `r` and `lora_alpha`".to_owned()));
    };
    Ok(Some(LoraOptions { rank, alpha, dropout: 0.0, targets: Vec::new() }))
}

fn trained_with(difference: &str) -> String {
    format!(
        "its adapters were trained with {difference}: set it as it was, or merge the adapters into the weights \
         (`runner publish CHECKPOINT OUT.safetensors`) and load these with `load_from`"
    )
}

fn unreadable(file: &Path, why: &str) -> Error {
    bad(file, why)
}

/// Returns a warning about differences, if there are any.
fn difference(file: &Path, report: &Report) -> Option<String> {
    let file = file.display();
    let text = || format!("{file} does not match the model, the rest is loaded: {report}");
    (!report.is_exact()).then(text)
}

/// Returns a warning about values that are not finite, if there are any.
fn non_finite(file: &Path, report: &Report) -> Option<String> {
    let names = &report.non_finite;
    let shown = names.len().min(6);
    let more = if shown < names.len() { ", ..." } else { "" };
    let text = || {
        format!(
            "{}: not finite: {}{more}; the loss will not be either",
            file.display(),
            names[..shown].join(", ")
        )
    };
    (!names.is_empty()).then(text)
}

/// Returns the reason why weights cannot be loaded from `path`, if its name or absence implies it.
pub(super) fn refusal(path: &Path) -> Option<String> {
    let text = path.display();
    if path.is_dir() {
        let has = |name: &str| path.join(name).exists();
        let is_loadable = has(checkpoint::STATE) || has(checkpoint::MODEL);
        return (!is_loadable).then(|| checkpoint::not_a_checkpoint(path));
    }
    if path.is_file() && is_known(path) {
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
        let file = self.start.load_options.file(&path).filter(|_| is_origin);
        // Rank 0 decides, because another rank may see another directory.
        let is_file = (self.group.rank() == 0).then_some(file.is_some());
        match broadcast_object(&self.group, is_file, 0)? {
            true => self.load_file(&path, &file.unwrap_or_else(|| path.clone()))?,
            false => self.load_checkpoint_weights(&path)?,
        }
        Ok(true)
    }

    /// Loads weights by name from a file of another program. Rank 0 reads them for all ranks.
    pub(super) fn load_file(&mut self, path: &Path, file: &Path) -> Result<()> {
        let loaded = match self.group.rank() {
            0 => {
                let lora = self.configured.lora.as_ref();
                Some(self.start.load_options.load(file, lora, &mut *self.engine))
            }
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
        let mut from = format!("{} ({} of {count} tensors)", file.display(), report.used);
        if report.doubles > 0 {
            from += &format!(", {} tensors of F64 converted to F32", report.doubles);
        }
        self.log_loaded(&from, &converted);
        for text in [difference(file, &report), non_finite(file, &report)].into_iter().flatten() {
            self.logger().warning(&text);
        }
        Ok(())
    }

    fn load_checkpoint_weights(&mut self, path: &Path) -> Result<()> {
        let read = checkpoint::load(path).and_then(|loaded| {
            self.check_lora(path, loaded.meta.lora.as_ref(), false)?;
            loaded.check_weights(&*self.engine)?;
            Ok(loaded)
        });
        let loaded = self.agreed(path, read)?;
        self.start.loaded = Loaded::Part;
        let converted = loaded.load_weights(&mut *self.engine)?;
        self.tell_of_weights(&loaded)?;
        self.start.loaded = Loaded::Nothing;
        self.note_origin(path, &loaded.meta);
        self.log_loaded(&path.display().to_string(), &converted);
        if self.start.resume {
            // Metrics are logged at this epoch.
            self.position = loaded.meta.position;
        }
        Ok(())
    }

    /// Returns the checkpoint that this rank has read from `path` and checked, if every rank has
    /// read the same: nothing of the run has changed by then.
    pub(super) fn agreed(&self, path: &Path, read: Result<Checkpoint>) -> Result<Checkpoint> {
        let own = match &read {
            Ok(loaded) => Ok(loaded.digest()),
            Err(error) => Err(error.to_string()),
        };
        let all = match self.group.world_size() {
            1 => return read,
            _ => all_gather_object::<Result<u32, String>>(&self.group, &own)?,
        };
        let loaded = read?;
        let failed =
            all.iter().enumerate().find_map(|(rank, own)| Some((rank, own.as_ref().err()?)));
        if let Some((rank, why)) = failed {
            return Err(Error::checkpoint(Some(path), format!("rank {rank}: {why}")));
        }
        match all.iter().position(|other| *other != all[0]) {
            Some(rank) => Err(Error::checkpoint(
                Some(path),
                format!(
                    "rank {rank} has another checkpoint at {} than rank 0: all ranks must see the same files; use a work \
                 directory that they share, or copy rank 0's checkpoint to the other nodes",
                    path.display()
                ),
            )),
            None => Ok(loaded),
        }
    }

    /// Returns an error if this run has other adapters than `saved`, those of the weights at
    /// `path`; `all` also compares what only training uses.
    pub(super) fn check_lora(
        &self,
        path: &Path,
        saved: Option<&LoraOptions>,
        all: bool,
    ) -> Result<()> {
        let (Some(saved), Some(own)) = (saved, &self.configured.lora) else { return Ok(()) };
        let Some(difference) = saved.difference(own, all) else { return Ok(()) };
        Err(unreadable(path, &trained_with(&difference)))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adapters_with_other_scales_or_unreadable_options_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("adapter_model.safetensors");
        assert_eq!(lora_options_of(&file), Ok(None));
        let config = dir.path().join("adapter_config.json");
        let plain = r#""r": 8, "lora_alpha": 16, "alpha_pattern": {}, "use_dora": false"#;
        std::fs::write(&config, format!("{{ {plain} }}")).unwrap();
        let options = lora_options_of(&file).unwrap().unwrap();
        assert_eq!((options.rank, options.alpha), (8, 16.0));
        for (extra, says) in [
            (r#""use_rslora": true"#, "`use_rslora` = true is not supported"),
            (r#""use_dora": true"#, "`use_dora` = true is not supported"),
            (r#""alpha_pattern": { "q": 4 }"#, "`alpha_pattern` = {\"q\":4} is not supported"),
            (r#""rank_pattern": { "q": 4 }"#, "`rank_pattern` = {\"q\":4} is not supported"),
            (r#""r": null"#, "has no numbers `r`"),
            ("damaged", "adapter_config.json: "),
        ] {
            std::fs::write(&config, format!("{{ {plain}, {extra} }}")).unwrap();
            let why = lora_options_of(&file).unwrap_err();
            assert!(why.contains(says), "{why}");
        }
        // A checkpoint's state that cannot be read.
        std::fs::write(&config, format!("{{ {plain} }}")).unwrap();
        let state = dir.path().join("state.json");
        std::fs::write(&state, "{ damaged").unwrap();
        assert!(lora_options_of(&file).unwrap_err().contains("state.json"));
        std::fs::remove_file(&state).unwrap();
        std::os::unix::fs::symlink("state.json", &state).unwrap();
        assert!(lora_options_of(&file).unwrap_err().contains("state.json"));
    }
}
