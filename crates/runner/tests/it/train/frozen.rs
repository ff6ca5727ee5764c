//! Runs with frozen parameters.

use std::fs;

use safetensors::SafeTensors;

use super::midway::{MIDWAY, assert_same_state};
use super::*;

/// Names and elements of the tensors in a checkpoint's file.
fn tensors(dir: &Path, file: &str) -> Vec<(String, Vec<u8>)> {
    let bytes = fs::read(dir.join(file)).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let copy =
        |(name, view): (String, safetensors::tensor::TensorView<'_>)| (name, view.data().to_vec());
    let mut all: Vec<_> = tensors.tensors().into_iter().map(copy).collect();
    all.sort();
    all
}

fn is_frozen(name: &str) -> bool {
    name.contains("conv1") || name.contains("layer1.0.bn1.weight")
}

/// Freezes a convolution and a norm's weight, with EMA.
fn config() -> String {
    format!("frozen = ['*conv1*', 'layer1.?.bn1.weight']\n{VALIDATION}{MIDWAY}")
}

#[test]
fn frozen_parameters_are_saved_without_state_and_averages() {
    let dir = tempfile::tempdir().unwrap();
    let [frozen, trained, zero] = ["frozen", "trained", "zero"].map(|name| dir.path().join(name));
    resume(&config(), &frozen, 2);
    resume(&format!("{VALIDATION}{MIDWAY}"), &trained, 2);
    // Initial values, because the learning rate is 0.
    resume(&format!("{VALIDATION}{MIDWAY}").replace("lr = 0.05", "lr = 0.0"), &zero, 2);
    let last = checkpoints(&frozen).into_iter().find(|name| !name.starts_with("best")).unwrap();
    let of = |dir: &Path, file: &str| tensors(&dir.join(&last), file);
    let model = of(&frozen, "model.safetensors");
    let names = |tensors: &[(String, Vec<u8>)]| {
        tensors.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>()
    };
    assert_eq!(names(&model), names(&of(&trained, "model.safetensors")));
    let (mut count, mut parameters) = (0, 0);
    for ((name, values), (_, made)) in model.iter().zip(of(&zero, "model.safetensors")) {
        if is_frozen(name) {
            assert!(*values == made, "{name} has changed");
            (count, parameters) = (count + values.len(), parameters + 1);
        }
    }
    assert_eq!(parameters, 3);
    // In addition to its momentum each parameter has a number in the optimizer's group; `ema`
    // contains its average and its trained value.
    for (file, saved) in
        [("optimizer.safetensors", count + 8 * parameters), ("ema.safetensors", 2 * count)]
    {
        let has = of(&frozen, file);
        assert!(has.iter().all(|(name, _)| !is_frozen(name)), "{file}");
        let bytes =
            |tensors: Vec<(String, Vec<u8>)>| tensors.iter().map(|t| t.1.len()).sum::<usize>();
        assert_eq!(bytes(of(&trained, file)) - bytes(has), saved, "{file}");
    }
}

#[test]
fn killed_run_with_frozen_parameters_resumes_bit_for_bit() {
    let dir = tempfile::tempdir().unwrap();
    let (whole, broken) = (dir.path().join("whole"), dir.path().join("broken"));
    resume(&config(), &whole, 2);
    killed(&config(), &broken, 2, 13);
    resume(&config(), &broken, 2);
    let last = checkpoints(&whole).into_iter().find(|name| !name.starts_with("best")).unwrap();
    assert_same_state(&whole, &broken, &last);
}

#[test]
fn frozen_parameters_are_loaded_from_a_file() {
    let dir = tempfile::tempdir().unwrap();
    let first = dir.path().join("a");
    resume(MLP, &first, 1);
    let file = first.join("epoch_2/model.safetensors");
    let config = format!("load_from = '{}'\nfrozen = 'layers.0.*'\n{MLP}", file.display());
    let second = dir.path().join("b");
    for outcome in run(&config, &second, 2, |builder, _| builder) {
        outcome.unwrap();
    }
    let [before, after] = [file, second.join("epoch_2/model.safetensors")]
        .map(|path| tensors(path.parent().unwrap(), "model.safetensors"));
    for ((name, before), (_, after)) in before.iter().zip(&after) {
        assert_eq!(before == after, name.starts_with("layers.0."), "{name}");
    }
}

#[test]
fn pattern_without_a_match_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let config = format!("frozen = ['layers.0.*', 'layer.*']\n{MLP}");
    let said = run(&config, &dir.path().join("a"), 1, |builder, _| builder).remove(0).unwrap_err();
    let want = "frozen: `layer.*` matches none of the model's parameters (`layers.1.weight`, `layers.1.bias`)";
    assert_eq!(said.to_string(), want);
    assert!(!dir.path().join("a").exists());
}
