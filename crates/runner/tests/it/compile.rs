//! `compile` in a whole run: the log lists what was applied, training gives the same results, and
//! an engine without a compiler returns an error.

use std::path::Path;
use std::time::Duration;

use collective::ProcessGroup;
use runner::Result;
use runner::config::Config;

use crate::common::from_config;

/// Trains some epochs on the digits; returns accuracy and report.
fn train(dir: &Path, compile: &str, epochs: usize) -> Result<(f64, String)> {
    let text = format!(
        "{compile}
        optim_wrapper = {{ optimizer = {{ type = 'SGD', lr = 0.05, momentum = 0.9 }}, type = 'OptimWrapper' }}
        model = {{ type = 'ResNet', width = 4, blocks = [1, 1] }}
        train_dataloader = {{ batch_size = 32, dataset = {{ type = 'Digits', split = 'train' }} }}
        val_dataloader = {{ batch_size = 64, dataset = {{ type = 'Digits', split = 'test' }} }}
        val_evaluator = {{ type = 'Accuracy' }}
        train_cfg = {{ max_epochs = {epochs} }}
        randomness = {{ seed = 1 }}"
    );
    let group = ProcessGroup::threads(1, Duration::from_secs(60))?.remove(0);
    let builder = from_config(Config::from_text("c.toml", text)?)?;
    let mut runner = builder.work_dir(dir).process_group(group).build()?;
    let report = runner.engine_mut().compile_report();
    let accuracy = runner.train()?[0].1;
    let after = runner.engine_mut().compile_report();
    assert_eq!(report.is_some(), compile.contains("compile"));
    Ok((accuracy, after.map(|report| report.to_string()).unwrap_or_default()))
}

#[test]
fn compile_is_reported_and_training_continues() {
    let dir = tempfile::tempdir().unwrap();
    let (plain, report) = train(&dir.path().join("plain"), "", 1).unwrap();
    assert_eq!(report, "");
    for (at, (compile, said)) in [
        ("compile = true", "fusion of operators"),
        (
            "compile = { mode = 'reduce-overhead', fullgraph = true }",
            "the CPU has no kernel launches",
        ),
        ("compile = { backend = 'inductor', mode = 'max-autotune' }", "it belongs to PyTorch"),
    ]
    .iter()
    .enumerate()
    {
        let (accuracy, report) = train(&dir.path().join(at.to_string()), compile, 1).unwrap();
        assert!(report.split(". Not applied: ").nth(1).unwrap().contains(said), "{report}");
        assert!(!report.contains("(0 so far"), "{report}");
        // Training is the same except for the order of sums.
        assert!((accuracy - plain).abs() < 10.0, "{accuracy} and {plain}");
    }
    // Nothing is applied, and the report says so.
    for (backend, said) in [("eager", "models as written"), ("cudagraphs", "no kernel launches")] {
        let compile = format!("compile = {{ backend = '{backend}', mode = 'max-autotune' }}");
        let (accuracy, report) = train(&dir.path().join(backend), &compile, 1).unwrap();
        assert!(report.starts_with("compile: applied: nothing. Not applied: "), "{report}");
        assert!(report.contains(said) && report.contains("has no modes"), "{report}");
        assert_eq!(accuracy, plain);
    }
}

/// The fastest variant may differ between measurements; a resumed run keeps its choices.
#[test]
fn resumed_run_keeps_its_autotuned_choices() {
    let dir = tempfile::tempdir().unwrap();
    let (whole, broken) = (dir.path().join("whole"), dir.path().join("broken"));
    train(&whole, "compile = true", 2).unwrap();
    std::fs::create_dir_all(broken.join("epoch_1")).unwrap();
    for file in std::fs::read_dir(whole.join("epoch_1")).unwrap() {
        let file = file.unwrap();
        std::fs::copy(file.path(), broken.join("epoch_1").join(file.file_name())).unwrap();
    }
    train(&broken, "resume = true\ncompile = true", 2).unwrap();
    let read = |dir: &Path, file: &str| std::fs::read(dir.join("epoch_2").join(file)).unwrap();
    let cache = |dir: &Path| -> Vec<String> {
        let state: serde_json::Value = serde_json::from_slice(&read(dir, "state.json")).unwrap();
        serde_json::from_value(state["findings"].clone()).unwrap()
    };
    assert!(!cache(&whole)[0].is_empty());
    assert_eq!(cache(&whole), cache(&broken));
    for file in ["model.safetensors", "optimizer.safetensors"] {
        assert!(read(&whole, file) == read(&broken, file), "{file} differs");
    }
}
