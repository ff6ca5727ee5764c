//! Trajectories against vectors made from f64 references; see `vectors/README.md`.
//!
//! The check is generic over who takes the steps: the crate's optimizers, a plain loop in this file
//! (the slow, obvious twin), and that loop with one mistake in it. The first two must pass, every
//! mistake must be caught, else the vectors or the tolerance prove nothing.
//!
//! `ORACLE_DIR` names a further folder of the same format, of which the kinds known here are run.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on stops there")]

use std::collections::BTreeMap;
use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use fused_optim::{
    AdamW, AdamWHyper, Applied, FoundInf, Optimizer, ParamGroup, ParamMut, Sgd, SgdHyper, Slice,
    StepCtl,
};
use safetensors::SafeTensors;
use serde::Deserialize;
use serde_json::Value;

#[derive(Deserialize)]
struct Oracle {
    input_sets: BTreeMap<String, InputSet>,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct InputSet {
    shapes: Vec<Vec<usize>>,
    steps: usize,
}

#[derive(Clone, Deserialize)]
struct Case {
    name: String,
    kind: String,
    file: String,
    input: String,
    groups: Vec<Value>,
    snapshots: Vec<usize>,
    states: Vec<String>,
    steps_taken: Vec<u64>,
    naive_f32_max_abs_err: f64,
    naive_f32_state_err: BTreeMap<String, f64>,
    grad_present: Option<Vec<Vec<u8>>>,
    found_inf: Option<Vec<u8>>,
    grad_scale: Option<f32>,
}

/// A case with its numbers.
struct Loaded {
    case: Case,
    counts: Vec<usize>,
    start: Vec<f64>,
    /// By step.
    grads: Vec<Vec<f64>>,
    /// By snapshot.
    expected: Vec<Vec<f64>>,
    state: BTreeMap<String, Vec<f64>>,
}

/// Who takes the steps.
trait Subject {
    /// `grads[tensor]`, scaled by `1 / grad_scale`; weights are kept inside.
    fn step(&mut self, grads: &[Option<Vec<f32>>], grad_scale: f32, found_inf: bool);
    /// Weights, concatenated.
    fn weights(&self) -> Vec<f32>;
    /// One tensor's state, if it has taken a step: the count and the named values.
    fn state(&self, tensor: usize, name: &str) -> Option<(u64, Vec<f32>)>;
}

/// Runs a case; an `Err` says where it first left the tolerance.
fn check(loaded: &Loaded, subject: &mut dyn Subject) -> Result<(), String> {
    let case = &loaded.case;
    let scale = case.grad_scale.unwrap_or(1.0);
    let mut snapshots = loaded.expected.iter();
    for (step, grads) in loaded.grads.iter().enumerate() {
        let mut at = 0;
        let grads = loaded.counts.iter().enumerate().map(|(tensor, count)| {
            let present = case.grad_present.as_ref().is_none_or(|all| all[step][tensor] == 1);
            at += count;
            let values = &grads[at - count..at];
            present.then(|| values.iter().map(|g| *g as f32 * scale).collect::<Vec<f32>>())
        });
        let grads: Vec<_> = grads.collect();
        let found_inf = case.found_inf.as_ref().is_some_and(|all| all[step] == 1);
        subject.step(&grads, 1.0 / scale, found_inf);
        if case.snapshots.contains(&(step + 1)) {
            let expected = snapshots.next().expect("a row for every snapshot");
            let what = format!("{} weight after step {}", case.name, step + 1);
            compare(&what, &subject.weights(), expected, case.naive_f32_max_abs_err)?;
        }
    }
    for name in &case.states {
        let mut at = 0;
        for (tensor, &count) in loaded.counts.iter().enumerate() {
            at += count;
            let expected = &loaded.state[name][at - count..at];
            let what = format!("{} {name} of tensor {tensor}", case.name);
            let (steps, got) = subject.state(tensor, name).unwrap_or_else(|| (0, vec![0.0; count]));
            if steps != case.steps_taken[tensor] {
                return Err(format!("{what}: {steps} steps, not {}", case.steps_taken[tensor]));
            }
            compare(&what, &got, expected, case.naive_f32_state_err[name])?;
        }
    }
    Ok(())
}

fn compare(what: &str, got: &[f32], expected: &[f64], naive: f64) -> Result<(), String> {
    assert_eq!(got.len(), expected.len(), "{what}");
    for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
        let error = (f64::from(*got) - expected).abs();
        let tolerance = 8.0 * naive + 1e-7 * expected.abs();
        // A NaN is not within.
        let within = error <= tolerance;
        if !within {
            return Err(format!("{what}[{i}]: {got} is {error:e} from {expected}"));
        }
    }
    Ok(())
}

// The crate's optimizers.

struct Ours {
    optimizer: Box<dyn Optimizer>,
    weights: Vec<Vec<f32>>,
    /// Let the step find non-finite gradients itself.
    look: bool,
}

impl Ours {
    fn new(loaded: &Loaded, look: bool) -> Option<Self> {
        let groups = || loaded.case.groups.iter();
        let optimizer: Box<dyn Optimizer> = match loaded.case.kind.as_str() {
            "sgd" => Box::new(Sgd::new(groups().map(group::<SgdHyper>)).unwrap()),
            "adamw" => Box::new(AdamW::new(groups().map(group::<AdamWHyper>)).unwrap()),
            _ => return None,
        };
        Some(Self { optimizer, weights: split(loaded), look })
    }
}

impl Subject for Ours {
    fn step(&mut self, grads: &[Option<Vec<f32>>], grad_scale: f32, found_inf: bool) {
        let mut grads = grads.to_vec();
        let mut verdict = FoundInf::Known(found_inf);
        if self.look {
            verdict = FoundInf::Check;
            let last = grads.iter_mut().flatten().filter_map(|grad| grad.last_mut()).last();
            if let (true, Some(last)) = (found_inf, last) {
                *last = f32::INFINITY;
            }
        }
        let mut params: Vec<_> = (self.weights.iter_mut().zip(&grads))
            .map(|(weight, grad)| ParamMut::new(&mut weight[..], grad.as_deref().map(Slice::F32)))
            .collect();
        let ctl = StepCtl { grad_scale, found_inf: verdict };
        let applied = self.optimizer.step(&mut params, &ctl).unwrap();
        assert_eq!(applied == Applied::SkippedNonFinite, found_inf);
    }

    fn weights(&self) -> Vec<f32> {
        self.weights.concat()
    }

    fn state(&self, tensor: usize, name: &str) -> Option<(u64, Vec<f32>)> {
        let dict = self.optimizer.state_dict();
        let state = dict.state.get(&tensor)?;
        Some((state.step, state.tensors[name].clone()))
    }
}

/// A group of the vectors: the keys are those of the hyper-parameters, and `idx`.
fn group<H: for<'de> Deserialize<'de>>(json: &Value) -> ParamGroup<H> {
    let mut json = json.clone();
    let indices = json.as_object_mut().unwrap().remove("idx").unwrap();
    let indices: Vec<usize> = serde_json::from_value(indices).unwrap();
    ParamGroup::new(serde_json::from_value(json).unwrap(), indices)
}

fn split(loaded: &Loaded) -> Vec<Vec<f32>> {
    let mut rest = loaded.start.iter().map(|x| *x as f32);
    loaded.counts.iter().map(|count| rest.by_ref().take(*count).collect()).collect()
}

// The plain loop, and its mistakes.

#[derive(Clone, Copy, Debug, PartialEq)]
enum Mistake {
    None,
    DecayInGradient,
    DecayForgotten,
    DecayAfterUpdate,
    NoBiasCorrection,
    StepOfWholeOptimizer,
    StepOffByOne,
    EpsInsideRoot,
    EpsBeforeCorrection,
    BetasSwapped,
    AmsgradForgotten,
    DampenedFirstStep,
    NesterovForgotten,
    NesterovTwice,
    MaximizeForgotten,
    ScaleForgotten,
    InfApplied,
    InfCounted,
    MissingGradIsZero,
    FirstGroupForAll,
}

struct Plain {
    mistake: Mistake,
    kind: String,
    groups: Vec<Value>,
    weights: Vec<Vec<f32>>,
    state: Vec<BTreeMap<&'static str, Vec<f32>>>,
    steps: Vec<u64>,
    calls: u64,
}

impl Plain {
    fn new(loaded: &Loaded, mistake: Mistake) -> Self {
        let count = loaded.counts.len();
        Self {
            mistake,
            kind: loaded.case.kind.clone(),
            groups: loaded.case.groups.clone(),
            weights: split(loaded),
            state: vec![BTreeMap::new(); count],
            steps: vec![0; count],
            calls: 0,
        }
    }

    fn adamw(&mut self, tensor: usize, h: &AdamWHyper, grad: &[f32]) {
        let is = |mistake| self.mistake == mistake;
        let t = match self.mistake {
            Mistake::StepOfWholeOptimizer => self.calls,
            Mistake::StepOffByOne => self.steps[tensor] + 1,
            _ => self.steps[tensor],
        };
        let (mut b1, mut b2) = h.betas;
        if is(Mistake::BetasSwapped) {
            (b1, b2) = (b2, b1);
        }
        let (mut c1, mut c2) = (1.0 - b1.powf(t as f64), 1.0 - b2.powf(t as f64));
        if is(Mistake::NoBiasCorrection) {
            (c1, c2) = (1.0, 1.0);
        }
        let decay = (1.0 - h.lr * h.weight_decay) as f32;
        for (i, g) in grad.iter().enumerate() {
            let p = &mut self.weights[tensor][i];
            let mut g = if h.maximize && !is(Mistake::MaximizeForgotten) { -g } else { *g };
            if is(Mistake::DecayInGradient) {
                g += *p * h.weight_decay as f32;
            } else if !is(Mistake::DecayForgotten) && !is(Mistake::DecayAfterUpdate) {
                *p *= decay;
            }
            let state = &mut self.state[tensor];
            let mut ema = |name, beta: f64, x: f32| {
                let old = &mut state.entry(name).or_insert_with(|| vec![0.0; grad.len()])[i];
                *old = *old * beta as f32 + x * (1.0 - beta) as f32;
                *old
            };
            let m = ema("exp_avg", b1, g);
            let mut v = ema("exp_avg_sq", b2, g * g);
            if h.amsgrad {
                let name = "max_exp_avg_sq";
                let max = &mut state.entry(name).or_insert_with(|| vec![0.0; grad.len()])[i];
                *max = if is(Mistake::AmsgradForgotten) { v } else { max.max(v) };
                v = *max;
            }
            let eps = h.eps as f32;
            let denominator = match self.mistake {
                Mistake::EpsInsideRoot => (v / c2 as f32 + eps).sqrt(),
                Mistake::EpsBeforeCorrection => (v.sqrt() + eps) / c2.sqrt() as f32,
                _ => v.sqrt() / c2.sqrt() as f32 + eps,
            };
            *p -= (h.lr / c1) as f32 * (m / denominator);
            if is(Mistake::DecayAfterUpdate) {
                *p *= decay;
            }
        }
    }

    fn sgd(&mut self, tensor: usize, h: &SgdHyper, grad: &[f32]) {
        let is = |mistake| self.mistake == mistake;
        let first = !self.state[tensor].contains_key("momentum_buffer");
        let damp = (1.0 - h.dampening) as f32;
        for (i, g) in grad.iter().enumerate() {
            let p = &mut self.weights[tensor][i];
            let mut g = if h.maximize && !is(Mistake::MaximizeForgotten) { -g } else { *g };
            if !is(Mistake::DecayForgotten) {
                g += *p * h.weight_decay as f32;
            }
            if h.momentum != 0.0 {
                let buffers = &mut self.state[tensor];
                let buffer =
                    buffers.entry("momentum_buffer").or_insert_with(|| vec![0.0; grad.len()]);
                let undampened = first && !is(Mistake::DampenedFirstStep);
                let momentum = h.momentum as f32;
                let b = momentum * buffer[i] + if undampened { g } else { g * damp };
                buffer[i] = b;
                g = match (h.nesterov, self.mistake) {
                    (true, Mistake::NesterovTwice) => g + momentum * (g + momentum * b),
                    (false, _) | (true, Mistake::NesterovForgotten) => b,
                    (true, _) => g + momentum * b,
                };
            }
            *p -= h.lr as f32 * g;
        }
    }
}

impl Subject for Plain {
    fn step(&mut self, grads: &[Option<Vec<f32>>], grad_scale: f32, found_inf: bool) {
        if found_inf && self.mistake == Mistake::InfCounted {
            self.steps.iter_mut().for_each(|step| *step += 1);
        }
        if found_inf && self.mistake != Mistake::InfApplied {
            return;
        }
        self.calls += 1;
        let scale = if self.mistake == Mistake::ScaleForgotten { 1.0 } else { grad_scale };
        for group in 0..self.groups.len() {
            let mut json = self.groups[group].clone();
            let indices = json["idx"].take();
            let indices: Vec<usize> = serde_json::from_value(indices).unwrap();
            if self.mistake == Mistake::FirstGroupForAll {
                json = self.groups[0].clone();
            }
            json.as_object_mut().unwrap().remove("idx");
            for tensor in indices {
                let grad = match &grads[tensor] {
                    Some(grad) => grad.iter().map(|g| g * scale).collect(),
                    None if self.mistake == Mistake::MissingGradIsZero => {
                        vec![0.0; self.weights[tensor].len()]
                    }
                    None => continue,
                };
                self.steps[tensor] += 1;
                if self.kind == "sgd" {
                    self.sgd(tensor, &serde_json::from_value(json.clone()).unwrap(), &grad);
                } else {
                    self.adamw(tensor, &serde_json::from_value(json.clone()).unwrap(), &grad);
                }
            }
        }
    }

    fn weights(&self) -> Vec<f32> {
        self.weights.concat()
    }

    fn state(&self, tensor: usize, name: &str) -> Option<(u64, Vec<f32>)> {
        let values = self.state[tensor].get(name).cloned().unwrap_or_default();
        (self.steps[tensor] > 0).then_some((self.steps[tensor], values))
    }
}

// Reading the vectors.

fn load(folder: &Path) -> Vec<Loaded> {
    let read = |name: &str| {
        let path = folder.join(name);
        fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
    };
    let oracle: Oracle = serde_json::from_slice(&read("optim.json")).unwrap();
    let known = oracle.cases.into_iter().filter(|case| matches!(&*case.kind, "sgd" | "adamw"));
    known
        .map(|case| {
            let bytes = read(&case.file);
            let file = SafeTensors::deserialize(&bytes).unwrap();
            let set = &oracle.input_sets[&format!("{}/{}", case.kind, case.input)];
            let counts: Vec<usize> = set.shapes.iter().map(|s| s.iter().product()).collect();
            let rows = |key: &str, rows: usize| {
                let all = floats(&file, key);
                let row = all.len() / rows;
                (0..rows).map(|i| all[i * row..(i + 1) * row].to_vec()).collect::<Vec<_>>()
            };
            Loaded {
                start: floats(&file, &format!("set/{}/p0", case.input)),
                grads: rows(&format!("set/{}/g", case.input), set.steps),
                expected: rows(&format!("case/{}/p", case.name), case.snapshots.len()),
                state: (case.states.iter())
                    .map(|name| {
                        (name.clone(), floats(&file, &format!("case/{}/{name}", case.name)))
                    })
                    .collect(),
                counts,
                case,
            }
        })
        .collect()
}

fn floats(file: &SafeTensors<'_>, key: &str) -> Vec<f64> {
    let view = file.tensor(key).unwrap_or_else(|error| panic!("{key}: {error}"));
    match view.dtype() {
        safetensors::Dtype::F32 => (view.data().as_chunks().0.iter())
            .map(|word| f64::from(f32::from_le_bytes(*word)))
            .collect(),
        safetensors::Dtype::F64 => {
            view.data().as_chunks().0.iter().map(|word| f64::from_le_bytes(*word)).collect()
        }
        other => panic!("{key} is {other:?}"),
    }
}

fn vectors() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/vectors")
}

#[test]
fn every_case_is_reproduced() {
    let mut folders = vec![vectors()];
    folders.extend(env::var_os("ORACLE_DIR").map(PathBuf::from));
    for folder in folders {
        let cases = load(&folder);
        assert!(cases.len() >= 21, "{}: only {} cases", folder.display(), cases.len());
        for loaded in &cases {
            for look in [false, true] {
                let mut ours = Ours::new(loaded, look).expect("`load` keeps the known kinds");
                check(loaded, &mut ours).unwrap();
            }
        }
    }
}

#[test]
fn the_plain_loop_passes_and_every_mistake_is_caught() {
    use Mistake::*;
    let cases = load(&vectors());
    let failures = |mistake| {
        let run = |loaded: &&Loaded| check(loaded, &mut Plain::new(loaded, mistake)).is_err();
        cases.iter().filter(run).map(|loaded| loaded.case.name.clone()).collect::<Vec<_>>()
    };
    assert_eq!(failures(None), Vec::<String>::new());
    for mistake in [
        DecayInGradient,
        DecayForgotten,
        DecayAfterUpdate,
        NoBiasCorrection,
        StepOfWholeOptimizer,
        StepOffByOne,
        EpsInsideRoot,
        EpsBeforeCorrection,
        BetasSwapped,
        AmsgradForgotten,
        DampenedFirstStep,
        NesterovForgotten,
        NesterovTwice,
        MaximizeForgotten,
        ScaleForgotten,
        InfApplied,
        InfCounted,
        MissingGradIsZero,
        FirstGroupForAll,
    ] {
        assert!(!failures(mistake).is_empty(), "{mistake:?} passed every case");
    }
}
