//! Low-rank adapters of fully connected layers (LoRA), for any model built of
//! [`Linear`](super::Linear)s.
//!
//! Within [`lora`] the constructors of [`linear`](super::linear()) request two more tensors from
//! their builder if the name of the layer matches a target. Such a layer computes
//! `W x + b + alpha / rank * B (A (dropout(x)))`. `W` and `b` have no gradient; the builder's
//! backend may return them as constants ([`builds_frozen`]).
//!
//! Names and initial values are those of PEFT: `lora_A.weight` (`[rank, inputs]`, uniform within
//! `1 / sqrt(inputs)`) and `lora_B.weight` (`[outputs, rank]`, zeros), so that the initial results
//! are those without adapters. [`merged`] returns the weight of a plain layer with the same result.

use std::cell::RefCell;
use std::collections::{BTreeSet, HashMap};
use std::path::Path;
use std::sync::PoisonError;

use candle_core::{Error, Result, Tensor, bail, safetensors};
use candle_nn::{Init, VarBuilder, VarMap};
use serde_json::json;

use super::parameter::parameter;
use super::within_fan_in;

/// Options of adapters: the layers, and the kind of adapter.
#[derive(Clone, Debug, PartialEq)]
pub struct LoraOptions {
    /// Rank of an adapter's product.
    pub rank: usize,
    /// The adapter's result is multiplied by `alpha / rank`.
    pub alpha: f64,
    /// Probability with which elements of its input are dropped in training.
    pub dropout: f32,
    /// Patterns of layer names, see [`fits`].
    pub targets: Vec<String>,
}

/// Options in use, and the targets that have matched a layer.
struct Building {
    options: LoraOptions,
    found: Vec<bool>,
    /// Names of the fully connected layers built so far.
    layers: Vec<String>,
    /// Name of the adapted layer whose own tensors are requested now.
    adapted: Option<String>,
}

thread_local! {
    static BUILDING: RefCell<Option<Building>> = const { RefCell::new(None) };
}

/// Restores the options when dropped, also after a panic.
struct Reset;

impl Drop for Reset {
    fn drop(&mut self) {
        BUILDING.take();
    }
}

/// Builds a model with adapters on the calling thread.
///
/// # Errors
///
/// Errors of `build`; a rank of 0; a target that matches no layer; a nested call.
pub fn lora<R>(options: &LoraOptions, build: impl FnOnce() -> Result<R>) -> Result<R> {
    if options.rank == 0 || options.targets.is_empty() {
        bail!("lora: a rank of at least 1 and a target are needed, got {options:?}");
    }
    if BUILDING.with_borrow(Option::is_some) {
        bail!("lora: a model with adapters is under construction already");
    }
    let found = vec![false; options.targets.len()];
    let (layers, adapted) = (Vec::new(), None);
    BUILDING.set(Some(Building { options: options.clone(), found, layers, adapted }));
    let reset = Reset;
    let model = build()?;
    let building = BUILDING.take();
    drop(reset);
    let Some(Building { found, layers, .. }) = building else { return Ok(model) };
    match options.targets.iter().zip(found).find(|(_, found)| !found) {
        Some((target, _)) => bail!(
            "lora: `{target}` fits no fully connected layer of the model, which has {}",
            listed(&layers)
        ),
        None => Ok(model),
    }
}

/// Lists the names of layers in which numbers are written as `*`, each once: at most
/// [`LISTED`] of them.
fn listed(layers: &[String]) -> String {
    let is_number = |part: &str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
    let mut names: Vec<String> = Vec::new();
    for layer in layers {
        let parts = layer.split('.').map(|part| if is_number(part) { "*" } else { part });
        // A last number is the name of a layer of its own.
        let name = match layer.rsplit_once('.') {
            Some((_, last)) if is_number(last) => layer.clone(),
            _ => parts.collect::<Vec<_>>().join("."),
        };
        let name = format!("`{name}`");
        if !names.contains(&name) {
            names.push(name);
        }
    }
    match names.len() {
        0 => "none (`candle_ops::nn::Linear` is one; other crates' layers get no adapters)".into(),
        count if count > LISTED => {
            format!("{} and {} more", names[..LISTED].join(", "), count - LISTED)
        }
        _ => names.join(", "),
    }
}

/// Maximum number of names in an error.
const LISTED: usize = 16;

/// Whether a model with adapters is under construction on the calling thread.
#[must_use]
pub fn is_building() -> bool {
    BUILDING.with_borrow(Option::is_some)
}

/// Whether the builder is being asked for the weight or bias of a layer with an adapter, to which
/// that layer gives no gradient.
#[must_use]
pub fn builds_frozen() -> bool {
    adapted_layer().is_some()
}

/// The name of the layer with an adapter whose weight or bias the builder is being asked for.
#[must_use]
pub fn adapted_layer() -> Option<String> {
    BUILDING.with_borrow(|building| building.as_ref()?.adapted.clone())
}

/// Whether a tensor with this name belongs to an adapter.
#[must_use]
pub fn is_adapter(name: &str) -> bool {
    [A, B].iter().any(|part| name.ends_with(&format!("{part}.weight")))
}

/// Whether a name matches one of the patterns of frozen tensors; never true for an adapter.
#[must_use]
pub fn is_frozen(name: &str, patterns: &[String]) -> bool {
    !is_adapter(name) && patterns.iter().any(|pattern| fits(name, pattern))
}

/// The name of the first adapter factor for the layer with this weight or bias.
#[must_use]
pub fn adapter_of(name: &str) -> Option<String> {
    let layer = ["weight", "bias"].iter().find_map(|part| name.strip_suffix(part))?;
    Some(format!("{layer}{A}.weight"))
}

/// Whether a complete name matches a pattern, in which `*` matches any text, including dots, and
/// `?` any character.
#[must_use]
pub fn fits(name: &str, pattern: &str) -> bool {
    let Some(first) = pattern.chars().next() else { return name.is_empty() };
    let rest = &pattern[first.len_utf8()..];
    let mut tails = name.char_indices().map(|(at, c)| (c, &name[at + c.len_utf8()..]));
    match first {
        '*' => fits(name, rest) || tails.any(|(_, tail)| fits(tail, rest)),
        first => {
            tails.next().is_some_and(|(c, tail)| (c == first || first == '?') && fits(tail, rest))
        }
    }
}

/// The weight of a layer without an adapter with the same result: `weight + scale * b a`, in the
/// weight's dtype, with the product in `f32`, or in `f64` for `f64`. `scale` is `alpha / rank`.
///
/// # Errors
///
/// Mismatched shapes.
pub fn merged(weight: &Tensor, a: &Tensor, b: &Tensor, scale: f64) -> Result<Tensor> {
    use candle_core::DType;
    let dtype = if weight.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
    let [wide, a, b] = [weight, a, b].map(|tensor| tensor.detach().to_dtype(dtype));
    (wide? + (b?.matmul(&a?)? * scale)?)?.to_dtype(weight.dtype())
}

/// Writes the adapters among the variables as PEFT's `adapter_model.safetensors` and
/// `adapter_config.json`, which `PeftModel.from_pretrained` loads onto the model that they were
/// trained on.
///
/// # Errors
///
/// Variables without an adapter; adapters of another rank than in the
/// options; files that cannot be written.
pub fn save_peft(vars: &VarMap, options: &LoraOptions, directory: impl AsRef<Path>) -> Result<()> {
    let directory = directory.as_ref();
    let failed = |why| Error::msg(format!("{}: {why}", directory.display()));
    let all = vars.data().lock().unwrap_or_else(PoisonError::into_inner);
    let adapters = all.iter().filter(|(name, _)| is_adapter(name));
    let tensors: HashMap<String, Tensor> = adapters
        .map(|(name, var)| (format!("base_model.model.{name}"), var.as_tensor().clone()))
        .collect();
    let layers = all.keys().filter_map(|name| name.strip_suffix(&format!(".{A}.weight")));
    let layers: BTreeSet<&str> = layers.collect();
    if layers.is_empty() {
        bail!("lora: the variables have no adapter to save");
    }
    for layer in &layers {
        let rank = all[&format!("{layer}.{A}.weight")].dim(0)?;
        if rank != options.rank {
            bail!("lora: `{layer}` has an adapter of rank {rank}, not {}", options.rank);
        }
    }
    let config = json!({
        "peft_type": "LORA",
        "r": options.rank,
        "lora_alpha": options.alpha,
        "lora_dropout": options.dropout,
        "target_modules": layers,
        "bias": "none",
        "fan_in_fan_out": false,
        "inference_mode": true,
        "task_type": null,
        "base_model_name_or_path": null,
    });
    std::fs::create_dir_all(directory).map_err(failed)?;
    safetensors::save(&tensors, directory.join("adapter_model.safetensors"))?;
    std::fs::write(directory.join("adapter_config.json"), format!("{config:#}")).map_err(failed)
}

/// The adapter of a layer.
#[derive(Clone, Debug)]
pub(super) struct Adapter {
    a: Tensor,
    b: Tensor,
    scale: f64,
    dropout: f32,
}

impl Adapter {
    /// `y + alpha / rank * B (A (dropout(x)))`.
    pub(super) fn add_to(&self, y: &Tensor, x: &Tensor) -> Result<Tensor> {
        let x = crate::dropout(x, self.dropout)?;
        let low = crate::linear(&x, &self.a, None)?;
        crate::add(y, &(crate::linear(&low, &self.b, None)? * self.scale)?)
    }

    pub(super) fn merge(&self, weight: &Tensor) -> Result<Tensor> {
        merged(weight, &self.a, &self.b, self.scale)
    }
}

/// Requests a layer's own tensors and, if its name matches a target, those of an adapter.
pub(super) fn build<R>(
    (in_dim, out_dim): (usize, usize),
    vb: &VarBuilder<'_>,
    own: impl FnOnce() -> Result<R>,
) -> Result<(R, Option<Adapter>)> {
    let name = vb.prefix();
    let options = BUILDING.with_borrow_mut(|building| {
        let Building { options, found, layers, adapted } = building.as_mut()?;
        layers.push(name.clone());
        let targets = options.targets.iter().zip(found);
        let fitting = targets.filter(|(target, _)| fits(&name, target));
        *adapted = (fitting.map(|(_, found)| *found = true).count() > 0).then_some(name);
        adapted.is_some().then(|| options.clone())
    });
    let own = own();
    BUILDING.with_borrow_mut(|building| {
        building.iter_mut().for_each(|building| building.adapted = None);
    });
    let own = own?;
    let Some(LoraOptions { rank, alpha, dropout, .. }) = options else { return Ok((own, None)) };
    let a = parameter((rank, in_dim), "weight", within_fan_in(in_dim), &vb.pp(A))?;
    let b = parameter((out_dim, rank), "weight", Init::Const(0.0), &vb.pp(B))?;
    Ok((own, Some(Adapter { a, b, scale: alpha / rank as f64, dropout })))
}

const A: &str = "lora_A";
const B: &str = "lora_B";

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device, Module};
    use candle_nn::VarMap;

    use super::super::{Linear, linear};
    use super::*;
    use crate::tests::values;

    fn options(targets: &[&str]) -> LoraOptions {
        let targets = targets.iter().map(|target| (*target).to_owned()).collect();
        LoraOptions { rank: 2, alpha: 3.0, dropout: 0.0, targets }
    }

    fn double(name: &str, shape: &[usize]) -> Tensor {
        values(name, shape).to_dtype(DType::F64).unwrap()
    }

    /// Two layers in `f64`, the first of them with an adapter whose `B` is not zero.
    fn net(vars: &VarMap) -> Result<[Linear; 2]> {
        let vb = VarBuilder::from_varmap(vars, DType::F64, &Device::Cpu);
        let build = || Ok([linear(5, 4, vb.pp("a.query"))?, linear(4, 3, vb.pp("out"))?]);
        let net = lora(&options(&["*.query"]), build)?;
        let set = |name: &str, value: &Tensor| vars.data().lock().unwrap()[name].set(value);
        set("a.query.lora_B.weight", &double("b", &[4, 2]))?;
        Ok(net)
    }

    #[test]
    fn an_adapter_has_pefts_names_and_starts_as_nothing() {
        let vars = VarMap::new();
        let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
        let with = lora(&options(&["*.query"]), || linear(5, 4, vb.pp("a.query"))).unwrap();
        let without = linear(5, 4, vb.pp("a.query")).unwrap();
        let x = values("x", &[3, 5]);
        let [with, without] = [with, without].map(|layer| layer.forward(&x).unwrap());
        assert_eq!(with.to_vec2::<f32>().unwrap(), without.to_vec2::<f32>().unwrap());
        let data = vars.data().lock().unwrap();
        let mut shapes: Vec<_> = data.iter().map(|(name, var)| (&**name, var.dims())).collect();
        shapes.sort();
        let expected: [(&str, &[usize]); 4] = [
            ("a.query.bias", &[4]),
            ("a.query.lora_A.weight", &[2, 5]),
            ("a.query.lora_B.weight", &[4, 2]),
            ("a.query.weight", &[4, 5]),
        ];
        assert_eq!(shapes, expected);
        let a = data["a.query.lora_A.weight"].abs().unwrap().max_all().unwrap();
        let a = a.to_scalar::<f32>().unwrap();
        assert!(a > 0.0 && a <= 1.0 / 5f32.sqrt(), "{a}");
    }

    #[test]
    fn gradients_are_those_of_the_formula_and_the_base_has_none() {
        let vars = VarMap::new();
        let [first, second] = net(&vars).unwrap();
        let (x, dy) = (double("x", &[3, 5]), double("dy", &[3, 3]));
        let y = second.forward(&first.forward(&x).unwrap()).unwrap();
        let ours = (y * &dy).unwrap().sum_all().unwrap().backward().unwrap();
        let data = vars.data().lock().unwrap();
        let of = |name: &str| data[name].as_tensor();
        let by_candle = |x: &Tensor, w: &Tensor| x.matmul(&w.t().unwrap()).unwrap();
        let low =
            by_candle(&by_candle(&x, of("a.query.lora_A.weight")), of("a.query.lora_B.weight"));
        let base = by_candle(&x, of("a.query.weight")).broadcast_add(of("a.query.bias")).unwrap();
        let y = (base + (low * 1.5).unwrap()).unwrap();
        let y = by_candle(&y, of("out.weight")).broadcast_add(of("out.bias")).unwrap();
        let right = (y * dy).unwrap().sum_all().unwrap().backward().unwrap();
        for (name, var) in data.iter() {
            let ours = ours.get(var);
            if name.starts_with("a.query") && !is_adapter(name) {
                assert!(ours.is_none(), "{name}");
                continue;
            }
            let difference = (ours.unwrap() - right.get(var).unwrap()).unwrap();
            let difference = difference.abs().unwrap().max_all().unwrap();
            assert!(difference.to_scalar::<f64>().unwrap() < 1e-12, "{name}");
        }
    }

    #[test]
    fn a_merged_layer_computes_the_same() {
        let [layer, other] = net(&VarMap::new()).unwrap();
        let x = double("x", &[3, 5]);
        let merged = layer.merged().unwrap();
        let [a, b] = [&layer, &merged].map(|layer| layer.forward(&x).unwrap());
        let difference = (a - b).unwrap().abs().unwrap().max_all().unwrap();
        assert!(difference.to_scalar::<f64>().unwrap() < 1e-14);
        assert_eq!(other.merged().unwrap().weight().id(), other.weight().id());
    }

    #[test]
    fn mistakes_are_named_and_end_with_their_call() {
        let build = |options: &LoraOptions| {
            let vb = VarBuilder::zeros(DType::F32, &Device::Cpu);
            lora(options, || linear(5, 4, vb.pp("a.query"))).unwrap_err().to_string()
        };
        let said = build(&options(&["*.query", "*.value"]));
        assert!(
            said.starts_with(
                "lora: `*.value` fits no fully connected layer of the model, which has `a.query`"
            ),
            "{said}"
        );
        assert!(build(&LoraOptions { rank: 0, ..options(&["*"]) }).contains("rank"));
        assert!(BUILDING.with_borrow(Option::is_none));
    }

    #[test]
    fn layers_are_listed_once_without_their_numbers() {
        let names = |names: &[&str]| names.iter().map(|n| (*n).to_owned()).collect::<Vec<_>>();
        let layers = names(&["h.0.query", "h.0.up", "h.1.query", "h.1.up", "layers.0", "layers.1"]);
        assert_eq!(listed(&layers), "`h.*.query`, `h.*.up`, `layers.0`, `layers.1`");
        let many: Vec<_> = (0..20).map(|at| format!("layer{at}")).collect();
        assert!(listed(&many).ends_with("`layer15` and 4 more"), "{}", listed(&many));
        assert!(listed(&[]).starts_with("none"));
    }

    #[test]
    fn patterns_fit_whole_names() {
        let name = "encoder.0.weight";
        for pattern in
            ["encoder.*", "*", "*.0.weight", "encoder.?.weight", "e*0*t", "encoder.0.weight*"]
        {
            assert!(fits(name, pattern), "{pattern}");
        }
        for pattern in
            ["encoder", "encoder.??.weight", "ncoder.*", "*.bias", "", "encoder.0.weight?"]
        {
            assert!(!fits(name, pattern), "{pattern}");
        }
    }
}
