//! Reading the state of PyTorch's optimizers.
//!
//! A checkpoint of `torch.optim` is a pickle, which only Python can read; six lines of Python
//! convert it to a safetensors file.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::{Map, Value};

use crate::core::json_of;
use crate::error::{invalid, problem};
use crate::names::PARAMS;
use crate::rule::Hyper;
use crate::state_dict::{STEP, parse_key, read_file, read_floats};
use crate::{
    AdadeltaHyper, AdamHyper, AdamWHyper, ParamSpec, Result, RmsPropHyper, SgdHyper, StateDict,
    StateProblem,
};

impl StateDict {
    /// Reads the state of a `torch.optim` optimizer: Adadelta, Adam, AdamW, RMSprop or SGD.
    ///
    /// The bytes are a safetensors file with `state.<index>.<name>` (F32, of any shape, `step`
    /// among them) and, as JSON under the metadata key `torch_optim`, `kind`, the class's name, and
    /// `param_groups`:
    ///
    /// ```python
    /// def save_optimizer(optimizer, path):
    ///     saved = optimizer.state_dict()
    ///     tensors = {f"state.{index}.{name}": torch.as_tensor(value).detach().float().contiguous()
    ///                for index, state in saved["state"].items()
    ///                for name, value in state.items() if value is not None}
    ///     header = {"kind": type(optimizer).__name__, "param_groups": saved["param_groups"]}
    ///     safetensors.torch.save_file(tensors, path, {"torch_optim": json.dumps(header)})
    /// ```
    ///
    /// If the optimizer was created with `named_parameters()` (PyTorch 2.6), the names are read
    /// too, with the shapes of the state.
    ///
    /// PyTorch's implementation flags (`foreach`, `fused`, ...) and a scheduler's `initial_lr` are
    /// ignored. PyTorch has no masters: load the weights too; the next step copies the masters of
    /// 16-bit weights from them.
    ///
    /// # Errors
    ///
    /// [`Error::Format`](crate::Error::Format) if the bytes are no such file,
    /// [`Error::State`](crate::Error::State) for another optimizer and for invalid entries.
    pub fn from_torch(bytes: &[u8]) -> Result<Self> {
        let (header, tensors) = read_file::<Header>(bytes, METADATA)?;
        let rule = Rule::of_class(&header.kind)
            .ok_or_else(|| invalid("kind", format!("{:?} is not supported", header.kind)))?;
        let mut params = BTreeMap::new();
        for group in &header.param_groups {
            params.extend(names(group)?);
        }
        let groups = header.param_groups.into_iter().map(|group| rule.group(group));
        let groups = groups.collect::<Result<_>>()?;
        let mut dict = Self {
            kind: rule.kind.into(),
            param_groups: Value::Array(groups).to_string(),
            state: BTreeMap::new(),
            params,
        };
        for (key, view) in tensors.iter() {
            let (index, name) = parse_key(key)?;
            let values = read_floats(key, &view)?;
            let state = dict.state.entry(index).or_default();
            if name == STEP {
                state.step = count(key, &values)?;
            } else {
                state.tensors.insert(name.to_owned(), values);
                if let Some(param) = dict.params.get_mut(&index) {
                    param.shape = Some(view.shape().to_vec());
                }
            }
        }
        for (index, state) in dict.state.iter_mut().filter(|(_, state)| state.step == 0) {
            // PyTorch's SGD saves no step count; it has state after its first step.
            if rule.kind != "sgd" {
                return Err(problem(format!("state.{index}.{STEP}"), StateProblem::Missing));
            }
            state.step = 1;
        }
        Ok(dict)
    }
}

#[derive(Deserialize)]
struct Header {
    kind: String,
    param_groups: Vec<Map<String, Value>>,
}

/// A rule of PyTorch, with hyper-parameters of the same names as ours.
struct Rule {
    kind: &'static str,
    hyper: Map<String, Value>,
}

impl Rule {
    /// The rule of a class of `torch.optim`.
    fn of_class(class: &str) -> Option<Self> {
        match class {
            "Adadelta" => Some(Self::new::<AdadeltaHyper>()),
            "Adam" => Some(Self::new::<AdamHyper>()),
            "AdamW" => Some(Self::new::<AdamWHyper>()),
            "RMSprop" => Some(Self::new::<RmsPropHyper>()),
            "SGD" => Some(Self::new::<SgdHyper>()),
            _ => None,
        }
    }

    fn new<H: Hyper + Default>() -> Self {
        Self { kind: H::KIND, hyper: json_of(&H::default()).unwrap_or_default() }
    }

    /// A group with the rule's keys only. Missing keys are an error when the state is loaded.
    fn group(&self, mut group: Map<String, Value>) -> Result<Value> {
        let decoupled = group.get("decoupled_weight_decay") == Some(&Value::Bool(true));
        if decoupled && self.kind == "adam" {
            let text = "Adam with decoupled weight decay is AdamW; save it as `AdamW`";
            return Err(invalid("decoupled_weight_decay", text));
        }
        // Older versions have no such key.
        group.entry("maximize").or_insert(Value::Bool(false));
        group.retain(|key, _| key == PARAMS || self.hyper.contains_key(key));
        Ok(Value::Object(group))
    }
}

/// The names of a group's parameters by index; empty if the optimizer has none.
fn names(group: &Map<String, Value>) -> Result<BTreeMap<usize, ParamSpec>> {
    let Some(names) = group.get(NAMES) else { return Ok(BTreeMap::new()) };
    let names = Vec::<String>::deserialize(names).ok();
    let indices = group.get(PARAMS).and_then(|all| Vec::<usize>::deserialize(all).ok());
    match (indices, names) {
        (Some(indices), Some(names)) if indices.len() == names.len() => {
            let specs = names.iter().map(|name| ParamSpec::from(&**name));
            Ok(indices.into_iter().zip(specs).collect())
        }
        _ => Err(invalid(NAMES, "the number of names is not that of `params`")),
    }
}

/// A step count, which PyTorch keeps as a float.
fn count(key: &str, values: &[f32]) -> Result<u64> {
    match values {
        [step] if *step >= 1.0 && step.fract() == 0.0 && *step < 9e15 => Ok(*step as u64),
        [step] => Err(invalid(key, format!("{step} is not a step count"))),
        _ => Err(problem(key, StateProblem::Length { expected: 1, got: values.len() })),
    }
}

const METADATA: &str = "torch_optim";
const NAMES: &str = "param_names";
