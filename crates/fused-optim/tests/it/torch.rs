//! Training resumes from checkpoints of real PyTorch as it does in PyTorch.
//!
//! The environment variable `TORCH_PYTHON` names a Python interpreter that can import torch; the
//! default is `python3`.

use std::process::Command;
use std::{env, fs};

use fused_optim::{
    Adadelta, AdadeltaHyper, Adam, AdamHyper, AdamW, AdamWHyper, Optimizer, ParamGroup, ParamMut,
    RmsProp, RmsPropHyper, Sgd, SgdHyper, Slice, StateDict, StepCtl,
};
use safetensors::SafeTensors;
use serde_json::json;

#[test]
#[ignore = "needs PyTorch: TORCH_PYTHON, or python3, imports torch"]
fn training_resumes_as_in_pytorch() {
    let python = env::var("TORCH_PYTHON").unwrap_or_else(|_| "python3".into());
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/torch_checkpoints.py");
    let folder = env::temp_dir().join(format!("fused-optim-torch-{}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    let output = Command::new(&python).arg(script).arg(&folder).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let mut cases = 0;
    for entry in fs::read_dir(&folder).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "state") {
            resume(&fs::read(&path).unwrap(), &fs::read(path.with_extension("run")).unwrap());
            cases += 1;
        }
    }
    assert_eq!(cases, 10);
    fs::remove_dir_all(&folder).unwrap();
}

fn resume(state: &[u8], run: &[u8]) {
    let dict = StateDict::from_torch(state).unwrap();
    let mut optimizer = empty(&dict.kind);
    optimizer.load_state_dict(&dict).unwrap();
    assert!(!dict.state.contains_key(&3), "it never had a gradient");
    // The loaded state is saved unchanged, but for PyTorch's own bookkeeping.
    assert_eq!(optimizer.state_dict().unwrap().state, dict.state);

    let run = SafeTensors::deserialize(run).unwrap();
    let floats = |key: &str| -> Option<Vec<f32>> {
        let view = run.tensor(key).ok()?;
        let (words, _) = view.data().as_chunks();
        Some(words.iter().map(|word| f32::from_le_bytes(*word)).collect())
    };
    let mut weights: Vec<_> = (0..4).map(|i| floats(&format!("weights.{i}")).unwrap()).collect();
    for step in 3..7 {
        let grads: Vec<_> = (0..4).map(|i| floats(&format!("grads.{step}.{i}"))).collect();
        let mut params: Vec<_> = (weights.iter_mut().zip(&grads))
            .map(|(w, g)| ParamMut::new(&mut w[..], g.as_deref().map(Slice::F32)))
            .collect();
        let _ = optimizer.step(&mut params, &StepCtl::PLAIN).unwrap();
    }
    for (i, weights) in weights.iter().enumerate() {
        let expected = floats(&format!("expected.{i}")).unwrap();
        for (got, expected) in weights.iter().zip(expected) {
            // Four steps with a few roundings each; PyTorch's own implementations differ as much.
            let tolerance = 1e-6 * expected.abs().max(1.0);
            assert!((got - expected).abs() <= tolerance, "{}: {got} {expected}", dict.kind);
        }
    }
}

/// An optimizer over the groups of the script, with default hyper-parameters.
fn empty(kind: &str) -> Box<dyn Optimizer> {
    fn groups<H: Default>() -> [ParamGroup<H>; 2] {
        [ParamGroup::new(H::default(), [0, 1]), ParamGroup::new(H::default(), [2, 3])]
    }
    match kind {
        "adadelta" => Box::new(Adadelta::new(groups::<AdadeltaHyper>()).unwrap()),
        "adam" => Box::new(Adam::new(groups::<AdamHyper>()).unwrap()),
        "adamw" => Box::new(AdamW::new(groups::<AdamWHyper>()).unwrap()),
        "rmsprop" => Box::new(RmsProp::new(groups::<RmsPropHyper>()).unwrap()),
        "sgd" => Box::new(Sgd::new(groups::<SgdHyper>()).unwrap()),
        other => panic!("no optimizer {other}"),
    }
}

/// A file in the format of the script.
fn file(header: serde_json::Value, tensors: &[(&str, &[f32])]) -> Vec<u8> {
    let mut text = json!({ "__metadata__": { "torch_optim": header.to_string() } });
    let mut data = Vec::new();
    for (name, values) in tensors {
        let start = data.len();
        data.extend(values.iter().flat_map(|x| x.to_le_bytes()));
        text[name] =
            json!({ "dtype": "F32", "shape": [values.len()], "data_offsets": [start, data.len()] });
    }
    let text = text.to_string().into_bytes();
    [&(text.len() as u64).to_le_bytes()[..], &text, &data].concat()
}

#[test]
fn invalid_files_are_errors() {
    let group = json!({ "params": [0], "lr": 0.1, "momentum": 0.9, "dampening": 0.0,
        "weight_decay": 0.0, "nesterov": false, "foreach": null, "initial_lr": 0.2 });
    let sgd = json!({ "kind": "SGD", "param_groups": [group] });
    let good = file(sgd.clone(), &[("state.0.momentum_buffer", &[1.0, 2.0])]);
    let dict = StateDict::from_torch(&good).unwrap();
    let mut optimizer = Sgd::with_one_group(SgdHyper::default(), 1).unwrap();
    optimizer.load_state_dict(&dict).unwrap();
    assert_eq!(
        (optimizer.lr(0).unwrap(), optimizer.state_dict().unwrap().state[&0].step),
        (0.1, 1)
    );

    let adam = json!({ "kind": "Adam",
        "param_groups": [{ "params": [0], "lr": 0.1, "decoupled_weight_decay": true }] });
    let uncounted = json!({ "kind": "Adam", "param_groups": [{ "params": [0], "lr": 0.1 }] });
    let lbfgs = json!({ "kind": "LBFGS", "param_groups": [] });
    for (header, tensors, expected) in [
        (sgd.clone(), [("weight", &[1.0][..])], "state dict, weight: unknown"),
        (
            sgd.clone(),
            [("state.0.step", &[1.5][..])],
            "state dict, state.0.step: 1.5 is not a step count",
        ),
        (
            sgd,
            [("state.0.step", &[1.0, 2.0][..])],
            "state dict, state.0.step: expected 1 elements, got 2",
        ),
        (lbfgs, [("state.0.step", &[1.0][..])], "state dict, kind: \"LBFGS\" is not supported"),
        (uncounted, [("state.0.exp_avg", &[1.0][..])], "state dict, state.0.step: missing"),
        (
            adam,
            [("state.0.step", &[1.0][..])],
            "state dict, decoupled_weight_decay: Adam with decoupled weight decay is AdamW; save it as `AdamW`",
        ),
    ] {
        let error = StateDict::from_torch(&file(header, &tensors)).unwrap_err();
        assert_eq!(error.to_string(), expected);
    }
    for cut in 0..good.len() {
        assert!(StateDict::from_torch(&good[..cut]).is_err(), "cut at {cut}");
    }
}
