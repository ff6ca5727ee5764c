//! Exports the weights of a checkpoint as one safetensors file for other programs.

use std::path::{Path, PathBuf};

use serde_json::json;

use super::files::{check_outside, write_bytes, write_users};
use super::{AVERAGES, Checkpoint, TRAINED, Tensor, deserialize, load, write_tensors};
use crate::model::LoraOptions;
use crate::{Error, Result};

/// Selects the weights that [`export`] writes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExportOptions {
    /// Export the trained weights if the checkpoint's model is an average of them (`EMAHook`).
    pub in_training: bool,
    /// Export only the LoRA adapters, by PEFT's names, with an `adapter_config.json` beside the
    /// file. By default adapters are merged into the weights.
    pub adapter: bool,
}

/// Writes the weights of the checkpoint `path` to the safetensors file `out`, with the metadata
/// that Python's `safetensors` and transformers write. Returns the number of tensors.
///
/// # Errors
///
/// [`Error::Checkpoint`] if the checkpoint is damaged or has no adapters to export, or if `out` is
/// inside a checkpoint; [`Error::Io`] with the path.
pub fn export(path: &Path, out: &Path, options: ExportOptions) -> Result<usize> {
    let (dir, name) = destination(out)?;
    check_outside(out)?;
    let checkpoint = load(path)?;
    let mut weights = weights(&checkpoint, options.in_training)?;
    let lora = checkpoint.meta.lora.as_ref();
    if options.adapter {
        let none = || super::bad(path, "the model has no LoRA adapters");
        let lora = lora.ok_or_else(none)?;
        weights.retain(|tensor| layer(&tensor.spec.name).is_some());
        let config = adapter_config(lora, &weights)?;
        weights.iter_mut().for_each(|tensor| tensor.spec.name.insert_str(0, PEFT));
        write_users(&dir, "adapter_config.json", |file| write_bytes(file, config.as_bytes()))?;
    } else if let Some(lora) = lora {
        merge(&mut weights, lora.alpha / lora.rank as f64)?;
    }
    write_users(&dir, &name, |file| write_tensors(file, &[("format", "pt")], &weights))?;
    Ok(weights.len())
}

/// Returns directory and name of the file.
fn destination(out: &Path) -> Result<(PathBuf, String)> {
    let why = match out.file_name().map(|name| name.to_str()) {
        Some(Some(name)) if name.ends_with(".safetensors") => {
            return Ok((out.parent().unwrap_or_else(|| Path::new("")).join("."), name.to_owned()));
        }
        Some(None) => "must be UTF-8",
        _ => "must end with .safetensors",
    };
    Err(Error::config(format!("{}: the name {why}", out.display())))
}

fn weights(checkpoint: &Checkpoint, in_training: bool) -> Result<Vec<Tensor>> {
    let of_file = |why: String| super::bad(&checkpoint.path, why);
    let mut weights = deserialize(&checkpoint.model).map_err(of_file)?;
    weights.sort_by(|a, b| a.spec.name.cmp(&b.spec.name));
    if in_training {
        for trained in checkpoint.extra(AVERAGES)?.unwrap_or_default() {
            let name = trained.spec.name.strip_prefix(TRAINED);
            if let Some(own) = weights.iter_mut().find(|own| name == Some(&own.spec.name)) {
                own.bytes = trained.bytes;
            }
        }
    }
    Ok(weights)
}

/// Returns the layer of an adapter's tensor, and `A` or `B`.
fn layer(name: &str) -> Option<(&str, char)> {
    let halves = [(".lora_A.weight", 'A'), (".lora_B.weight", 'B')];
    halves.iter().find_map(|(end, half)| Some((name.strip_suffix(end)?, *half)))
}

/// Adds `scale * B A` to each weight that has an adapter, summed in `f64` and rounded to the
/// weight's type.
fn merge(weights: &mut Vec<Tensor>, scale: f64) -> Result<()> {
    let (adapters, mut rest): (Vec<_>, Vec<_>) =
        std::mem::take(weights).into_iter().partition(|tensor| layer(&tensor.spec.name).is_some());
    let find = |all: &[Tensor], name: &str| all.iter().position(|t| t.spec.name == name);
    for a in &adapters {
        let Some((layer, 'A')) = layer(&a.spec.name) else { continue };
        let names = [format!("{layer}.lora_B.weight"), format!("{layer}.weight")];
        let (Some(b), Some(own)) = (find(&adapters, &names[0]), find(&rest, &names[1])) else {
            let text = format!("the adapter of `{layer}` lacks `{}` or `{}`", names[0], names[1]);
            return Err(Error::checkpoint(None, text));
        };
        let (b, own) = (&adapters[b], &mut rest[own]);
        let [&[rank, inputs], &[outputs, b_rank]] = [&a.spec.shape[..], &b.spec.shape[..]] else {
            return Err(Error::checkpoint(
                None,
                format!("the adapter of `{layer}` does not consist of matrices"),
            ));
        };
        if rank != b_rank || own.spec.shape != [outputs, inputs] {
            return Err(Error::checkpoint(
                None,
                format!("the adapter of `{layer}` does not match the shape of its weight"),
            ));
        }
        let (a, b, mut values) = (a.to_f32(), b.to_f32(), own.to_f32());
        for (row, b) in values.chunks_exact_mut(inputs.max(1)).zip(b.chunks_exact(rank.max(1))) {
            for (i, value) in row.iter_mut().enumerate() {
                let product = |(r, b): (usize, &f32)| f64::from(*b) * f64::from(a[r * inputs + i]);
                let sum: f64 = b.iter().enumerate().map(product).sum();
                *value = (f64::from(*value) + scale * sum) as f32;
            }
        }
        own.round_from(&values);
    }
    *weights = rest;
    Ok(())
}

/// Returns the text of PEFT's `adapter_config.json`.
fn adapter_config(lora: &LoraOptions, adapters: &[Tensor]) -> Result<String> {
    let mut layers: Vec<_> = adapters.iter().filter_map(|t| Some(layer(&t.spec.name)?.0)).collect();
    layers.dedup();
    let config = json!({
        "peft_type": "LORA",
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": layers,
        "bias": "none",
        "fan_in_fan_out": false,
        "inference_mode": true,
        "task_type": null,
        "base_model_name_or_path": null,
    });
    serde_json::to_string_pretty(&config).map_err(|e| super::failed("adapter_config.json", e))
}

/// Prefix of names in PEFT's adapter files.
const PEFT: &str = "base_model.model.";
