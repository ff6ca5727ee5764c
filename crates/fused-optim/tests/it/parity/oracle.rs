//! Reads the vectors, and compares a subject with them.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

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
pub(crate) struct Case {
    pub(crate) name: String,
    pub(crate) kind: String,
    pub(crate) file: String,
    pub(crate) input: String,
    pub(crate) groups: Vec<Value>,
    pub(crate) snapshots: Vec<usize>,
    pub(crate) states: Vec<String>,
    pub(crate) steps_taken: Vec<u64>,
    pub(crate) naive_f32_max_abs_err: f64,
    pub(crate) naive_f32_state_err: BTreeMap<String, f64>,
    pub(crate) grad_present: Option<Vec<Vec<u8>>>,
    pub(crate) found_inf: Option<Vec<u8>>,
    pub(crate) grad_scale: Option<f32>,
}

/// A case with its values.
pub(crate) struct Loaded {
    pub(crate) case: Case,
    pub(crate) counts: Vec<usize>,
    pub(crate) shapes: Vec<Vec<usize>>,
    pub(crate) start: Vec<f64>,
    /// By step.
    pub(crate) grads: Vec<Vec<f64>>,
    /// By snapshot.
    pub(crate) expected: Vec<Vec<f64>>,
    pub(crate) state: BTreeMap<String, Vec<f64>>,
}

impl Loaded {
    /// The weights at the start, by tensor.
    pub(crate) fn split(&self) -> Vec<Vec<f32>> {
        let mut rest = self.start.iter().map(|x| *x as f32);
        self.counts.iter().map(|count| rest.by_ref().take(*count).collect()).collect()
    }

    /// Lengths of first dimensions, 0 for scalars and vectors.
    pub(crate) fn rows(&self) -> Vec<usize> {
        self.shapes.iter().map(|shape| if shape.len() > 1 { shape[0] } else { 0 }).collect()
    }
}

/// The optimizer under test.
pub(crate) trait Subject {
    /// `grads[tensor]`, scaled by `1 / grad_scale`; weights are kept inside.
    fn step(&mut self, grads: &[Option<Vec<f32>>], grad_scale: f32, found_inf: bool);
    /// Weights, concatenated.
    fn weights(&self) -> Vec<f32>;
    /// One tensor's steps, and its state of this name if it has one.
    fn state(&self, tensor: usize, name: &str) -> (u64, Option<Vec<f32>>);
}

/// Runs a case; returns an error for the first value outside the tolerance.
pub(crate) fn check(loaded: &Loaded, subject: &mut dyn Subject) -> Result<(), String> {
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
            let (steps, got) = subject.state(tensor, name);
            // The vectors have the initial value of state that does not exist.
            let initial = if case.kind == "rmsprop_tf" && name == "square_avg" { 1.0 } else { 0.0 };
            let got = got.unwrap_or_else(|| vec![initial; count]);
            // The vectors have the means of rows and columns for each element.
            let got: Vec<f32> = match (name.as_str(), got.len()) {
                ("row_var", rows) => (0..count).map(|i| got[i * rows / count]).collect(),
                ("col_var", cols) => (0..count).map(|i| got[i % cols]).collect(),
                _ => got,
            };
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
        // False for a NaN.
        let within = error <= tolerance;
        if !within {
            return Err(format!("{what}[{i}]: {got} is {error:e} from {expected}"));
        }
    }
    Ok(())
}

pub(crate) fn load(folder: &Path) -> Vec<Loaded> {
    let read = |name: &str| {
        let path = folder.join(name);
        fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
    };
    let oracle: Oracle = serde_json::from_slice(&read("optim.json")).unwrap();
    let cases = oracle.cases.into_iter();
    cases
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
                shapes: set.shapes.clone(),
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
