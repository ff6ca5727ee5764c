//! Runs that train low-rank adapters, and their weights in other programs.

use std::fs;
use std::process::Command;

use runner::LoadOptions;
use runner::checkpoint::{ExportOptions, export};
use safetensors::SafeTensors;

use super::*;

/// An adapter of the first of two layers, with dropout.
const LORA: &str = "lora = { rank = 2, alpha = 3, dropout = 0.25, targets = ['layers.0'] }\n";

fn config() -> String {
    format!("{LORA}{VALIDATION}{MLP}")
}

/// Names, shapes and values of a file's tensors, sorted by name.
fn read(path: &Path) -> Vec<(String, Vec<usize>, Vec<f32>)> {
    let bytes = fs::read(path).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let copy = |(name, view): (String, safetensors::tensor::TensorView<'_>)| {
        let values = view.data().as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
        (name, view.shape().to_vec(), values)
    };
    let mut all: Vec<_> = tensors.tensors().into_iter().map(copy).collect();
    all.sort_by(|a, b| a.0.cmp(&b.0));
    all
}

fn names(tensors: &[(String, Vec<usize>, Vec<f32>)]) -> Vec<&str> {
    tensors.iter().map(|tensor| &*tensor.0).collect()
}

#[test]
fn killed_run_with_adapters_resumes_bit_for_bit() {
    let dir = tempfile::tempdir().unwrap();
    let (whole, broken) = (dir.path().join("whole"), dir.path().join("broken"));
    resume(&config(), &whole, 2);
    killed(&config(), &broken, 2, 17);
    resume(&config(), &broken, 2);
    assert_equal(&whole, &broken, "epoch_2");
    let [before, after] =
        ["epoch_1", "epoch_2"].map(|e| read(&whole.join(e).join("model.safetensors")));
    for ((name, _, before), (_, _, after)) in before.iter().zip(&after) {
        let is_base = ["layers.0.weight", "layers.0.bias"].contains(&&**name);
        assert_eq!(before == after, is_base, "{name}");
    }
}

#[test]
fn published_weights_load_into_a_plain_model_of_equal_accuracy() {
    let dir = tempfile::tempdir().unwrap();
    let trained = run(&config(), &dir.path().join("a"), 1, |builder, _| builder).remove(0).unwrap();
    let checkpoint = dir.path().join("a/epoch_2");
    let out = dir.path().join("merged.safetensors");
    assert_eq!(export(&checkpoint, &out, ExportOptions::default()).unwrap(), 4);
    let merged = read(&out);
    assert_eq!(
        names(&merged),
        ["layers.0.bias", "layers.0.weight", "layers.1.bias", "layers.1.weight"]
    );
    let all = read(&checkpoint.join("model.safetensors"));
    let of = |name: &str| &all.iter().find(|tensor| tensor.0 == name).unwrap().2;
    let (weight, a, b) =
        (of("layers.0.weight"), of("layers.0.lora_A.weight"), of("layers.0.lora_B.weight"));
    for (at, value) in merged[1].2.iter().enumerate() {
        let (row, column) = (at / 64, at % 64);
        let product: f64 =
            (0..2).map(|r| f64::from(b[2 * row + r]) * f64::from(a[64 * r + column])).sum();
        assert!((f64::from(*value) - f64::from(weight[at]) - 1.5 * product).abs() < 1e-6);
    }
    // A run without LoRA and with a learning rate of 0 validates them.
    let plain = format!("load_from = '{}'\n{VALIDATION}{MLP}", out.display())
        .replace("lr = 0.05", "lr = 0.0");
    let plain = run(&plain, &dir.path().join("b"), 1, |builder, _| builder).remove(0).unwrap();
    assert_eq!(trained, plain);
    let adapter = dir.path().join("adapter_model.safetensors");
    export(&checkpoint, &adapter, ExportOptions { adapter: true, ..ExportOptions::default() })
        .unwrap();
    let expected = ["A", "B"].map(|half| format!("base_model.model.layers.0.lora_{half}.weight"));
    assert_eq!(names(&read(&adapter)), expected);
    let text = fs::read_to_string(dir.path().join("adapter_config.json")).unwrap();
    let value: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(value["target_modules"], serde_json::json!(["layers.0"]));
}

#[test]
fn adapters_of_other_options_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let work_dir = dir.path().join("a");
    killed(&config(), &work_dir, 2, 17);
    let state = || fs::read(work_dir.join("epoch_1/state.json")).unwrap();
    let before = state();
    let changes = [
        ("alpha = 3", "alpha = 12", "lora.alpha = 3, but this run has 12"),
        ("rank = 2", "rank = 4", "lora.rank = 2, but this run has 4"),
        ("dropout = 0.25", "dropout = 0.5", "lora.dropout = 0.25, but this run has 0.5"),
        ("'layers.0'", "'layers.1'", "trained with lora = { rank = 2, alpha = 3, targets = "),
    ];
    for (from, to, says) in changes {
        let changed = config().replace(from, to);
        let resumed = run(&changed, &work_dir, 2, |builder, _| builder.resume(true));
        let checkpoint = work_dir.join("epoch_1");
        let loaded =
            run(&changed, &dir.path().join("b"), 1, |builder, _| builder.load_from(&checkpoint));
        let file = checkpoint.join("model.safetensors");
        let by_name =
            run(&changed, &dir.path().join("c"), 1, |builder, _| builder.load_from(&file));
        let loose = LoadOptions { strict: Some(false), ..LoadOptions::default() };
        let loose = run(&changed, &dir.path().join("d"), 1, |builder, _| {
            builder.load_from(&checkpoint).load_options(loose.clone())
        });
        for outcome in loose {
            // Adapters of other layers are left out, with a warning.
            let is_taken = outcome.is_ok();
            assert_eq!(is_taken, to.starts_with("dropout") || to.starts_with('\''), "{to}");
        }
        // Dropout belongs to training: another run may have another one.
        let is_dropout = to.starts_with("dropout");
        for outcome in resumed {
            let said = outcome.unwrap_err().to_string();
            assert!(said.contains(says), "{said}");
        }
        for outcome in loaded {
            assert_eq!(outcome.is_ok(), is_dropout, "{to}");
            let said = outcome.err().map(|e| e.to_string()).unwrap_or_default();
            assert!(is_dropout || said.contains(says), "{said}");
        }
        for outcome in by_name {
            assert_eq!(outcome.is_ok(), is_dropout, "{to}");
        }
        for name in ["b", "c", "d"] {
            let _ = fs::remove_dir_all(dir.path().join(name));
        }
    }
    assert_eq!(state(), before);
    resume(&config(), &work_dir, 2);
}

#[test]
fn adapter_of_peft_with_another_alpha_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    run(&config(), &dir.path().join("a"), 1, |builder, _| builder).remove(0).unwrap();
    let adapter = dir.path().join("adapter_model.safetensors");
    let options = ExportOptions { adapter: true, ..ExportOptions::default() };
    export(&dir.path().join("a/epoch_2"), &adapter, options).unwrap();
    let from = format!(
        "load_from = {{ checkpoint = '{}', revise_keys = [['^base_model\\.model\\.', '']] }}\n",
        adapter.display()
    );
    let load = |config: &str, name: &str| {
        run(&format!("{from}{config}"), &dir.path().join(name), 1, |builder, _| builder).remove(0)
    };
    load(&config(), "b").unwrap();
    let said = load(&config().replace("alpha = 3", "alpha = 4"), "c").unwrap_err().to_string();
    assert!(said.contains("lora.alpha = 3, but this run has 4"), "{said}");
}

#[test]
fn target_without_a_match_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let config = config().replace("'layers.0'", "'layer.0'");
    let said = run(&config, dir.path(), 1, |builder, _| builder).remove(0).unwrap_err().to_string();
    let names = "lora: `layer.0` fits no fully connected layer of the model, which has `layers.0`, `layers.1`";
    assert!(said.contains(names), "{said}");
}

#[test]
#[ignore = "needs PyTorch: TORCH_PYTHON, or python3, imports torch and safetensors"]
fn python_reads_published_weights() {
    let dir = tempfile::tempdir().unwrap();
    run(&config(), &dir.path().join("a"), 1, |builder, _| builder).remove(0).unwrap();
    let (config, out) = (dir.path().join("c.toml"), dir.path().join("model.safetensors"));
    fs::write(&config, format!("work_dir = '{}'\n{MLP}", dir.path().join("a").display())).unwrap();
    let program = env!("CARGO_BIN_EXE_runner");
    let done = Command::new(program).arg("publish").args([&config, &out]).output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    let script = "
import sys, torch
from safetensors import safe_open
from safetensors.torch import load_file
state = load_file(sys.argv[1])
net = torch.nn.ModuleDict({'layers': torch.nn.ModuleList([torch.nn.Linear(64, 8), torch.nn.Linear(8, 10)])})
meta = safe_open(sys.argv[1], 'pt').metadata()
print(net.load_state_dict(state), sorted(meta), meta['format'], state['layers.0.weight'].sum().item())
";
    let python = std::env::var("TORCH_PYTHON").unwrap_or_else(|_| "python3".into());
    let read_there = Command::new(python).args(["-c", script]).arg(&out).output().unwrap();
    let said = String::from_utf8(read_there.stdout.clone()).unwrap();
    let sum = said.rsplit(' ').next().unwrap().trim().parse::<f32>();
    assert!(
        said.starts_with("<All keys matched successfully> ['crc32', 'format'] pt "),
        "{said} {read_there:?}"
    );
    let own: f32 = read(&out)[1].2.iter().sum();
    assert!((sum.unwrap() - own).abs() < 1e-3);
}
