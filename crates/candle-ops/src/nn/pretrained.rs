//! Variables with the values of safetensors files: [`pretrained`].

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use candle_core::safetensors::BufferedSafetensors;
use candle_core::{DType, Device, Error, Result, Shape, Tensor, bail};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder, VarMap};

use super::lora::{is_adapter, is_building};
use super::seeded::Seeded;

/// A builder like [`seeded`](super::seeded()), whose variables have the values of a Hugging Face
/// model, converted to the requested types. `path` is a safetensors file, or a folder with
/// `model.safetensors`, or with the files that `model.safetensors.index.json` lists.
///
/// Within [`lora`](super::lora()) the file's tensors are constants: only adapters become variables,
/// so that neither checkpoints nor optimizers have the others. Adapters that the file lacks are
/// drawn by `seed`.
///
/// ```
/// use std::collections::HashMap;
/// use candle_core::{DType, Device, Tensor};
/// use candle_ops::nn::{VarMap, linear_no_bias, pretrained};
/// # let path = std::env::temp_dir().join(format!("pretrained-{}", std::process::id()));
///
/// let weight = Tensor::ones((4, 8), DType::BF16, &Device::Cpu)?;
/// candle_core::safetensors::save(&HashMap::from([("fc.weight", weight)]), &path)?;
/// let vars = VarMap::new();
/// let vb = pretrained(&vars, &path, 0, DType::F32, &Device::Cpu)?;
/// # std::fs::remove_file(&path)?;
/// let fc = linear_no_bias(8, 4, vb.pp("fc"))?;
/// assert_eq!(fc.weight().to_vec2::<f32>()?, vec![[1.0; 8]; 4]);
/// assert_eq!(vars.all_vars().len(), 1);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
///
/// A file that cannot be read or is not in the format; an index with names that are not those of
/// files in its folder. The builder returns errors for a tensor that
/// the files lack, or have in another shape; a tensor of another type than `f16`, `bf16`, `f32` and
/// `f64`, as those of quantized models are, unless it is requested in its own type.
pub fn pretrained(
    vars: &VarMap,
    path: impl AsRef<Path>,
    seed: u64,
    dtype: DType,
    device: &Device,
) -> Result<VarBuilder<'static>> {
    let path = path.as_ref();
    let files = files(path)?.into_iter().map(|path| {
        let bytes = std::fs::read(&path).map_err(|why| failed(&path, &why))?;
        BufferedSafetensors::new(bytes).map_err(|why| failed(&path, &why))
    });
    let backend = Pretrained {
        path: path.to_owned(),
        files: files.collect::<Result<_>>()?,
        drawn: Seeded::new(vars, seed),
    };
    Ok(VarBuilder::from_backend(Box::new(backend), dtype, device.clone()))
}

fn failed(path: &Path, why: &dyn std::fmt::Display) -> Error {
    Error::msg(format!("{}: {why}", path.display()))
}

/// The safetensors files of a model.
fn files(path: &Path) -> Result<Vec<PathBuf>> {
    let index = path.join("model.safetensors.index.json");
    if !path.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    if !index.exists() {
        return Ok(vec![path.join("model.safetensors")]);
    }
    let text = std::fs::read(&index).map_err(|why| failed(&index, &why))?;
    let json: serde_json::Value =
        serde_json::from_slice(&text).map_err(|why| failed(&index, &why))?;
    let names = json["weight_map"].as_object().map(|map| map.values().filter_map(|v| v.as_str()));
    let names: BTreeSet<&str> = names.into_iter().flatten().collect();
    if names.is_empty() {
        return Err(failed(&index, &"it lists no files in `weight_map`"));
    }
    let is_plain = |name: &str| Path::new(name).file_name().is_some_and(|own| own == name);
    if let Some(name) = names.iter().find(|name| !is_plain(name)) {
        return Err(failed(&index, &format!("`{name}` is not the name of a file")));
    }
    Ok(names.into_iter().map(|name| path.join(name)).collect())
}

struct Pretrained {
    path: PathBuf,
    files: Vec<BufferedSafetensors>,
    /// The variables, and adapters that the files lack.
    drawn: Seeded,
}

impl Pretrained {
    fn find(&self, name: &str) -> Option<&BufferedSafetensors> {
        self.files.iter().find(|file| file.get(name).is_ok())
    }

    fn load(&self, name: &str, dtype: DType, device: &Device) -> Result<Tensor> {
        let path = self.path.display();
        let Some(file) = self.find(name) else { bail!("{path} has no `{name}`") };
        let stored = file.get(name)?.dtype();
        match DType::try_from(stored) {
            Ok(DType::F16 | DType::BF16 | DType::F32 | DType::F64) => {}
            Ok(own) if own == dtype => {}
            _ => bail!(
                "{path}: `{name}` has type {stored:?}, only F16, BF16, F32 and F64 are converted: take a model \
                 that is not quantized"
            ),
        }
        file.load(name, &Device::Cpu)?.to_dtype(dtype)?.to_device(device)
    }
}

impl SimpleBackend for Pretrained {
    fn get(
        &self,
        shape: Shape,
        name: &str,
        init: Init,
        dtype: DType,
        device: &Device,
    ) -> Result<Tensor> {
        let is_drawn = is_adapter(name) && self.find(name).is_none();
        if !is_drawn && !self.drawn.contains_tensor(name) {
            let values = self.load(name, dtype, device)?;
            if *values.shape() != shape {
                let (path, has) = (self.path.display(), values.dims());
                bail!("{path}: `{name}` has shape {has:?}, the model expects {:?}", shape.dims());
            }
            if is_building() && !is_adapter(name) {
                return Ok(values);
            }
            self.drawn.insert(name, &values)?;
        }
        self.drawn.get(shape, name, init, dtype, device)
    }

    /// A constant, unless the tensor is a variable already: without a shape there is nothing that
    /// the model expects.
    fn get_unchecked(&self, name: &str, dtype: DType, device: &Device) -> Result<Tensor> {
        match self.drawn.contains_tensor(name) {
            true => self.drawn.get_unchecked(name, dtype, device),
            false => self.load(name, dtype, device),
        }
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.find(name).is_some() || self.drawn.contains_tensor(name)
    }
}
