//! Trajectories compared with vectors of f64 references; see `tests/vectors/README.md`.
//!
//! The check is generic over the subject: the crate's optimizers, a plain loop (the slow, obvious
//! twin), and that loop with one mistake in it. The first two must pass and every mistake must
//! fail, otherwise the vectors or the tolerance prove nothing.
//!
//! `ORACLE_DIR` names another folder of the same format; all of its cases are run too.

mod matrices;
#[cfg(feature = "npu")]
mod npu;
mod oracle;
mod twin;

use std::env;
use std::path::{Path, PathBuf};

use fused_optim::{
    Adadelta, Adafactor, Adam, AdamP, AdamW, Applied, BertAdam, FoundInf, Lamb, Lion, Muon,
    Optimizer, ParamGroup, ParamMut, RmsProp, RmsPropTf, ScheduleFreeAdamW, Sgd, Slice, StepCtl,
};
use half::f16;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use oracle::{Loaded, Subject, check, load};
use twin::{MISTAKES, Mistake, Twin};

/// The crate's optimizers.
struct Ours {
    optimizer: Box<dyn Optimizer>,
    weights: Vec<Vec<f32>>,
    shapes: Vec<Vec<usize>>,
    /// Whether the step checks the gradients itself.
    check_finite: bool,
}

impl Ours {
    fn new(loaded: &Loaded, check_finite: bool) -> Self {
        let optimizer = optimizer(&loaded.case.kind, &loaded.case.groups);
        Self::with_optimizer(loaded, check_finite, optimizer)
    }

    fn with_optimizer(loaded: &Loaded, check_finite: bool, optimizer: Box<dyn Optimizer>) -> Self {
        Self { optimizer, weights: loaded.split(), shapes: loaded.shapes.clone(), check_finite }
    }
}

impl Subject for Ours {
    fn step(&mut self, grads: &[Option<Vec<f32>>], grad_scale: f32, found_inf: bool) {
        let mut grads = grads.to_vec();
        let found_inf_option = match self.check_finite {
            true => inject_infinity(&mut grads, found_inf),
            false => FoundInf::Known(found_inf),
        };
        let tensors = self.weights.iter_mut().zip(&grads).zip(&self.shapes);
        let mut params: Vec<_> = tensors
            .map(|((weight, grad), shape)| {
                let grad = grad.as_deref().map(Slice::F32);
                ParamMut::new(&mut weight[..], grad).with_shape(shape)
            })
            .collect();
        let ctl = StepCtl { grad_scale, found_inf: found_inf_option, ..StepCtl::PLAIN };
        let applied = self.optimizer.step(&mut params, &ctl).unwrap();
        assert_eq!(applied == Applied::SkippedNonFinite, found_inf);
    }

    fn weights(&self) -> Vec<f32> {
        self.weights.concat()
    }

    fn state(&self, tensor: usize, name: &str) -> (u64, Option<Vec<f32>>) {
        match self.optimizer.state_dict().unwrap().state.get(&tensor) {
            Some(state) => (state.step, state.tensors.get(name).cloned()),
            None => (0, None),
        }
    }
}

/// Puts an infinity in a gradient if the step should find one; not possible without any element.
fn inject_infinity(grads: &mut [Option<Vec<f32>>], found_inf: bool) -> FoundInf {
    match grads.iter_mut().flatten().filter_map(|grad| grad.last_mut()).last() {
        Some(last) if found_inf => *last = f32::INFINITY,
        Some(_) => {}
        None => return FoundInf::Known(found_inf),
    }
    FoundInf::Check
}

/// An optimizer over groups in the format of the vectors: hyper-parameters, and `idx`.
fn optimizer(kind: &str, json: &[Value]) -> Box<dyn Optimizer> {
    match kind {
        "adadelta" => Box::new(Adadelta::new(groups(json)).unwrap()),
        "adafactor" => Box::new(Adafactor::new(groups(json)).unwrap()),
        "adam" => Box::new(Adam::new(groups(json)).unwrap()),
        "adamp" => Box::new(AdamP::new(groups(json)).unwrap()),
        "adamw" => Box::new(AdamW::new(groups(json)).unwrap()),
        "bert_adam" => Box::new(BertAdam::new(groups(json)).unwrap()),
        "lamb" => Box::new(Lamb::new(groups(json)).unwrap()),
        "lion" => Box::new(Lion::new(groups(json)).unwrap()),
        "muon" => Box::new(Muon::new(groups(json)).unwrap()),
        "schedule_free_adamw" => Box::new(ScheduleFreeAdamW::new(groups(json)).unwrap()),
        "rmsprop" => Box::new(RmsProp::new(groups(json)).unwrap()),
        "rmsprop_tf" => Box::new(RmsPropTf::new(groups(json)).unwrap()),
        "sgd" => Box::new(Sgd::new(groups(json)).unwrap()),
        other => panic!("no optimizer {other}"),
    }
}

fn groups<H: DeserializeOwned>(json: &[Value]) -> Vec<ParamGroup<H>> {
    let group = |json: &Value| {
        let mut json = json.clone();
        let indices = json.as_object_mut().unwrap().remove("idx").unwrap();
        let indices: Vec<usize> = serde_json::from_value(indices).unwrap();
        ParamGroup::new(serde_json::from_value(json).unwrap(), indices)
    };
    json.iter().map(group).collect()
}

fn vectors() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/vectors")
}

#[test]
fn every_case_is_reproduced() {
    let mut own = load(&vectors());
    assert_eq!(own.len(), 108);
    own.extend(load(&vectors().join("newer")));
    assert_eq!(own.len(), 156);
    let further = env::var_os("ORACLE_DIR").map(PathBuf::from);
    let further = further.map(|folder| load(&folder));
    assert!(further.as_ref().is_none_or(|cases| !cases.is_empty()), "ORACLE_DIR has no case");
    let mut failures = Vec::new();
    for loaded in own.iter().chain(further.iter().flatten()) {
        for check_finite in [false, true] {
            failures.extend(check(loaded, &mut Ours::new(loaded, check_finite)).err());
        }
    }
    assert!(failures.is_empty(), "{failures:#?}");
}

#[test]
fn the_plain_loop_passes_and_every_mistake_fails() {
    let mut cases = load(&vectors());
    cases.extend(load(&vectors().join("newer")));
    let failures = |mistake| {
        let run = |loaded: &&Loaded| check(loaded, &mut Twin::new(loaded, mistake)).is_err();
        cases.iter().filter(run).map(|loaded| loaded.case.name.clone()).collect::<Vec<_>>()
    };
    assert_eq!(failures(Mistake::None), Vec::<String>::new());
    let passed: Vec<_> =
        MISTAKES.iter().copied().filter(|mistake| failures(*mistake).is_empty()).collect();
    assert!(passed.is_empty(), "{passed:?} passed every case");
}

/// Values that Ascend's test suite recorded for its optimizers: sums of each parameter after ten
/// steps.
struct Golden {
    /// For messages.
    name: String,
    kind: &'static str,
    group: Value,
    shape: Vec<usize>,
    is_half: bool,
    expected: f64,
}

impl Golden {
    fn all() -> Vec<Self> {
        let bytes = std::fs::read(vectors().join("torch_npu_golden.json")).unwrap();
        let golden: Value = serde_json::from_slice(&bytes).unwrap();
        let defaults = json!({
            "AdamP": { "cos_eps": "add" },
            "BertAdam": { "max_grad_norm": -1.0, "clip": "group" },
            "Lamb": { "adam": false, "use_global_grad_norm": false },
            "RMSpropTF": { "centered": false, "decoupled_decay": false, "decoupled_lr": false,
                "lr_in_momentum": true },
        });
        let kinds = [
            ("AdamP", "adamp"),
            ("BertAdam", "bert_adam"),
            ("Lamb", "lamb"),
            ("RMSpropTF", "rmsprop_tf"),
        ];
        let parameters = golden["parameters"].as_array().unwrap();
        let one = |(name, kind): (&str, &'static str), tensor: usize| {
            let mut group = golden["cases"][name]["hyper"].clone();
            let fields = group.as_object_mut().unwrap();
            fields.remove("clip_reached");
            fields.extend(defaults[name].as_object().unwrap().clone());
            fields.insert("idx".into(), json!([0]));
            Self {
                name: format!("{name}, tensor {tensor}"),
                kind,
                group,
                shape: serde_json::from_value(parameters[tensor]["shape"].clone()).unwrap(),
                is_half: parameters[tensor]["dtype"] == "f16",
                expected: golden["cases"][name]["sums"][tensor].as_f64().unwrap(),
            }
        };
        let pairs = kinds.iter().flat_map(|kind| (0..parameters.len()).map(|at| (*kind, at)));
        pairs.map(|(kind, at)| one(kind, at)).collect()
    }

    /// Takes the ten steps, in f32 or in the recorded type.
    fn run(&self, optimizer: &mut dyn Optimizer, typed: bool) {
        let mut weight: Vec<f32> =
            (0..self.shape.iter().product::<usize>()).map(|i| i as f32).collect();
        let grad: Vec<f32> = weight.iter().map(|p| p / 100.0).collect();
        let half = |values: &[f32]| values.iter().map(|x| f16::from_f32(*x)).collect::<Vec<_>>();
        let (mut half_weight, half_grad) = (half(&weight), half(&grad));
        for _ in 0..10 {
            let param = match typed && self.is_half {
                true => ParamMut::new(&mut half_weight[..], Some(Slice::F16(&half_grad))),
                false => ParamMut::new(&mut weight[..], Some(Slice::F32(&grad))),
            };
            let _ = optimizer.step(&mut [param.with_shape(&self.shape)], &StepCtl::PLAIN).unwrap();
        }
        if typed && self.is_half {
            weight = half_weight.iter().map(|x| x.to_f32()).collect();
        }
        self.assert_sum(&weight);
    }

    /// Recorded sums have three decimals. Those of f16 were rounded at every step, up to 2^-9 each.
    fn assert_sum(&self, weight: &[f32]) {
        let tolerance = if self.is_half { 4e-3 } else { 6e-5 };
        let sum = f64::from(weight.iter().sum::<f32>());
        let error = (sum / self.expected - 1.0).abs();
        assert!(error < tolerance, "{}: {sum}, not {}", self.name, self.expected);
    }
}

#[test]
fn sums_of_ascends_tests_are_reproduced() {
    let all = Golden::all();
    assert_eq!(all.len(), 24);
    for golden in all {
        golden.run(&mut *optimizer(golden.kind, std::slice::from_ref(&golden.group)), false);
    }
}
