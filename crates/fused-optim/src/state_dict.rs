//! State dicts with PyTorch's names, and their file format.
//!
//! The format is one safetensors file, little-endian: `state.<index>.step` (I64, a scalar) and
//! `state.<index>.<name>` (F32, one dimension). Everything else, with names and shapes of the
//! tensors, is JSON under the metadata key `fused_optim`. Equal state gives equal bytes.

use std::collections::{BTreeMap, HashMap};

use bytemuck::cast_slice;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

#[cfg(doc)]
use crate::Error;
use crate::error::{format, invalid, problem};
use crate::{ParamSpec, Result, StateProblem};

/// An optimizer's state and hyper-parameters, with PyTorch's names.
///
/// It is not validated until [`load_state_dict`](crate::Optimizer::load_state_dict).
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StateDict {
    /// Name of the optimizer's rule, for example `adamw`.
    pub kind: String,
    /// The groups as a JSON array of objects: hyper-parameters, and tensor indices as `params`.
    pub param_groups: String,
    /// State by tensor index; a tensor that never had a gradient has none.
    pub state: BTreeMap<usize, ParamState>,
    /// Names and shapes by tensor index, of all tensors in groups; empty if the optimizer
    /// [has no names](crate::Optimizer::set_param_names). If empty, the state is loaded by index.
    pub params: BTreeMap<usize, ParamSpec>,
}

/// The state of one tensor.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ParamState {
    /// Steps this tensor has taken, at least 1.
    pub step: u64,
    /// Moments by name (`exp_avg`, `momentum_buffer`, ...), and `master`, the f32 value of a half
    /// weight. All have the tensor's length, but for means of rows and columns (`row_var`,
    /// `col_var`).
    pub tensors: BTreeMap<String, Vec<f32>>,
}

impl StateDict {
    /// The state as the bytes of a safetensors file.
    ///
    /// # Errors
    ///
    /// [`Error::Format`] if a step count does not fit an `i64`, or a name cannot be written.
    pub fn to_safetensors(&self) -> Result<Vec<u8>> {
        let (key, header) = metadata(&self.kind, &self.param_groups, &self.params)?;
        let step = |state: &ParamState| {
            let step = i64::try_from(state.step).map_err(format("write the step count"));
            step.map(i64::to_le_bytes)
        };
        let steps = self.state.values().map(step).collect::<Result<Vec<_>>>()?;
        let mut entries = Vec::new();
        let view = |dtype, shape, bytes| {
            TensorView::new(dtype, shape, bytes).map_err(format("write a tensor"))
        };
        for ((index, state), step) in self.state.iter().zip(&steps) {
            let step = view(Dtype::I64, Vec::new(), &step[..])?;
            entries.push((format!("state.{index}.{STEP}"), step));
            for (name, values) in &state.tensors {
                let values = view(Dtype::F32, vec![values.len()], cast_slice(values))?;
                entries.push((format!("state.{index}.{name}"), values));
            }
        }
        let metadata = HashMap::from([(key.to_owned(), header)]);
        safetensors::serialize(entries, Some(metadata)).map_err(format("write safetensors"))
    }

    /// Reads the bytes that [`to_safetensors`](Self::to_safetensors) wrote.
    ///
    /// # Errors
    ///
    /// [`Error::Format`] if the bytes are no such file, [`Error::State`] for an entry with an
    /// invalid name or element type.
    pub fn from_safetensors(bytes: &[u8]) -> Result<Self> {
        let (header, tensors) = read_file(bytes, METADATA)?;
        let Header { format: version, kind, param_groups, params } = header;
        if version != FORMAT {
            let text = format!("format {version} is not supported; this version reads {FORMAT}");
            return Err(invalid(METADATA, text));
        }
        let mut dict = Self { kind, param_groups, state: BTreeMap::new(), params };
        let mut steps = 0;
        for (key, view) in tensors.iter() {
            let (index, name) = parse_key(key)?;
            let state = dict.state.entry(index).or_default();
            if name == STEP {
                state.step = read_step(key, &view)?;
                steps += 1;
            } else {
                state.tensors.insert(name.to_owned(), read_floats(key, &view)?);
            }
        }
        if steps < dict.state.len() {
            return Err(problem("state.*.step", StateProblem::Missing));
        }
        Ok(dict)
    }
}

/// Key and text of a file's metadata.
pub(crate) fn metadata(
    kind: &str,
    param_groups: &str,
    params: &BTreeMap<usize, ParamSpec>,
) -> Result<(&'static str, String)> {
    let header = Header {
        format: FORMAT,
        kind: kind.to_owned(),
        param_groups: param_groups.to_owned(),
        params: params.clone(),
    };
    Ok((METADATA, serde_json::to_string(&header).map_err(format("write the header"))?))
}

/// Contents of the metadata.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Header {
    format: u32,
    kind: String,
    param_groups: String,
    /// Left out if empty: files without names are those of older versions.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    params: BTreeMap<usize, ParamSpec>,
}

/// Reads a file of saved state: its header, which is JSON in the metadata, and its tensors.
pub(crate) fn read_file<'a, H: DeserializeOwned>(
    bytes: &'a [u8],
    header: &str,
) -> Result<(H, SafeTensors<'a>)> {
    let (_, metadata) =
        SafeTensors::read_metadata(bytes).map_err(format("read the safetensors header"))?;
    let text = metadata.metadata().as_ref().and_then(|all| all.get(header));
    let text = text.ok_or_else(|| problem(header, StateProblem::Missing))?;
    let header = serde_json::from_str(text).map_err(format("read the header"))?;
    let tensors = SafeTensors::deserialize(bytes).map_err(format("read safetensors"))?;
    Ok((header, tensors))
}

/// Parses `state.<index>.<name>`, with the index as `usize` prints it.
pub(crate) fn parse_key(key: &str) -> Result<(usize, &str)> {
    let parts = || {
        let (digits, name) = key.strip_prefix("state.")?.split_once('.')?;
        let index: usize = digits.parse().ok()?;
        (index.to_string() == digits && !name.is_empty()).then_some((index, name))
    };
    parts().ok_or_else(|| problem(key, StateProblem::Unknown))
}

fn read_step(key: &str, view: &TensorView<'_>) -> Result<u64> {
    let bytes = read_bytes(key, view, Dtype::I64, "I64")?;
    let bytes = bytes.try_into().map_err(|_| {
        problem(key, StateProblem::Length { expected: 1, got: bytes.len() / size_of::<i64>() })
    })?;
    u64::try_from(i64::from_le_bytes(bytes)).map_err(|_| invalid(key, "negative step count"))
}

pub(crate) fn read_floats(key: &str, view: &TensorView<'_>) -> Result<Vec<f32>> {
    let bytes = read_bytes(key, view, Dtype::F32, "F32")?;
    let (words, _) = bytes.as_chunks();
    Ok(words.iter().map(|word| f32::from_le_bytes(*word)).collect())
}

fn read_bytes<'a>(
    key: &str,
    view: &TensorView<'a>,
    dtype: Dtype,
    expected: &'static str,
) -> Result<&'a [u8]> {
    if view.dtype() == dtype {
        return Ok(view.data());
    }
    Err(problem(key, StateProblem::Dtype { expected, got: format!("{:?}", view.dtype()) }))
}

/// Name of a half weight's f32 value in a tensor's state.
pub(crate) const MASTER: &str = "master";
pub(crate) const STEP: &str = "step";
const METADATA: &str = "fused_optim";
const FORMAT: u32 = 1;

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> StateDict {
        let tensors = BTreeMap::from([
            ("exp_avg".to_owned(), vec![1.0, -0.0, 1e-45]),
            ("master".to_owned(), vec![]),
        ]);
        StateDict {
            kind: "adamw".into(),
            param_groups: "[]".into(),
            state: BTreeMap::from([
                (0, ParamState { step: 1, tensors: BTreeMap::new() }),
                (12, ParamState { step: 1 << 60, tensors }),
            ]),
            params: BTreeMap::from([
                (0, ParamSpec::from("fc.bias")),
                (12, ParamSpec::new("fc.weight", &[3, 1])),
            ]),
        }
    }

    #[test]
    fn bytes_round_trip() {
        let dict = sample();
        let bytes = dict.to_safetensors().unwrap();
        assert_eq!(bytes, dict.to_safetensors().unwrap());
        assert_eq!(StateDict::from_safetensors(&bytes).unwrap(), dict);
    }

    #[test]
    fn malformed_keys_are_rejected() {
        assert_eq!(parse_key("state.12.exp_avg").unwrap(), (12, "exp_avg"));
        for key in ["state.012.m", "state.+1.m", "state.1.", "state.1", "states.1.m", "1.m", ""] {
            assert!(parse_key(key).is_err(), "{key}");
        }
    }

    #[test]
    fn corrupt_bytes_are_errors() {
        let bytes = sample().to_safetensors().unwrap();
        for cut in 0..bytes.len() {
            assert!(StateDict::from_safetensors(&bytes[..cut]).is_err(), "cut at {cut}");
        }
        let metadata = || {
            Some(HashMap::from([(
                METADATA.to_owned(),
                r#"{"format":1,"kind":"sgd","param_groups":"[]"}"#.to_owned(),
            )]))
        };
        let read = |key: &str, dtype, bytes: &[u8]| {
            let view = TensorView::new(dtype, Vec::new(), bytes).unwrap();
            let bytes = safetensors::serialize([(key, view)], metadata()).unwrap();
            StateDict::from_safetensors(&bytes).unwrap_err().to_string()
        };
        let f32 = |key| read(key, Dtype::F32, &1.0_f32.to_le_bytes());
        let i64 = |key, step: i64| read(key, Dtype::I64, &step.to_le_bytes());
        assert_eq!(f32("state.0.step"), "state dict, state.0.step: expected I64, got F32");
        assert_eq!(f32("state.0.m"), "state dict, state.*.step: missing");
        assert_eq!(f32("weight"), "state dict, weight: unknown");
        let negative = "state dict, state.0.step: negative step count";
        assert_eq!(i64("state.0.step", -1), negative);
        assert_eq!(i64("state.0.m", 1), "state dict, state.0.m: expected F32, got I64");
        let step = TensorView::new(Dtype::I64, Vec::new(), &[0; 8]).unwrap();
        let bare = safetensors::serialize([("state.0.step", step)], None).unwrap();
        let error = StateDict::from_safetensors(&bare).unwrap_err().to_string();
        assert_eq!(error, "state dict, fused_optim: missing");
    }
}
