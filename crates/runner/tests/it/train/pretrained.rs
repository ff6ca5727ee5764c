//! Runs that start from weights in a file.

use std::fs;
use std::path::{Path, PathBuf};

use super::{MLP, run};
use runner::LoadOptions;

/// Trains for an epoch, and returns the file of its weights.
fn trained(dir: &Path) -> PathBuf {
    let config = MLP.replace("max_epochs = 2", "max_epochs = 1");
    let config = format!("{config}[default_hooks]\nlogger.interval = 1\n");
    run(&config, dir, 1, |builder, _| builder).remove(0).unwrap();
    dir.join("epoch_1/model.safetensors")
}

/// Returns the log, and the weights of a model that starts with `load_from` and is trained with a
/// learning rate of 0.
fn begun(config: &str, dir: &Path, ranks: usize) -> runner::Result<(Vec<u8>, String)> {
    let config =
        config.replace("max_epochs = 2", "max_epochs = 1").replace("lr = 0.05", "lr = 0.0");
    for outcome in run(&config, dir, ranks, |builder, _| builder) {
        outcome?;
    }
    let log = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    let log = log.filter(|path| path.is_dir()).find_map(|dir| {
        let mut files = fs::read_dir(dir).unwrap().map(|file| file.unwrap().path());
        files.find(|file| file.extension().is_some_and(|e| e == "log"))
    });
    let log = log.map(|log| fs::read_to_string(log).unwrap()).unwrap_or_default();
    Ok((fs::read(dir.join("epoch_1/model.safetensors")).unwrap(), log))
}

fn with_load_from(value: &str) -> String {
    format!("load_from = {value}\n{MLP}")
}

#[test]
fn weights_of_a_file_are_loaded_exactly_on_every_rank() {
    let dir = tempfile::tempdir().unwrap();
    let file = trained(&dir.path().join("a"));
    let copy = dir.path().join("pretrained.safetensors");
    fs::copy(&file, &copy).unwrap();
    let config = with_load_from(&format!("'{}'", copy.display()));
    let config = config.replace("seed = 3", "diff_rank_seed = true");
    let (weights, log) = begun(&config, &dir.path().join("b"), 2).unwrap();
    assert_eq!(weights, fs::read(&file).unwrap());
    assert!(log.contains("(4 of 4 tensors)"), "{log}");
    assert!(!log.contains("does not match"), "{log}");
}

#[test]
fn mismatches_are_a_warning_or_with_strict_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let file = trained(&dir.path().join("a"));
    let of = |more: &str, name: &str| {
        let value = format!("{{ checkpoint = '{}'{more} }}", file.display());
        let config = with_load_from(&value).replace("hidden = [8]", "hidden = [8, 8]");
        begun(&config, &dir.path().join(name), 2)
    };
    let (_, log) = of(", strict = false", "b").unwrap();
    assert!(log.contains("does not match the model, the rest is loaded: missing: "), "{log}");
    let said = of(", strict = true", "c").unwrap_err().to_string();
    assert!(
        said.contains("does not match the model: missing: ") && said.contains("strict = false"),
        "{said}"
    );
    assert!(!dir.path().join("c/epoch_1").exists());
    // Renames all tensors to unknown names.
    let said = of(", strict = false, revise_keys = [['^', 'x.']]", "d").unwrap_err().to_string();
    assert!(said.contains("contains no tensor of the model"), "{said}");
    assert!(said.contains(r"revise_keys = [['^x\.', '']]"), "{said}");
    // A checkpoint's file is verified, however it is read.
    let mut bytes = fs::read(&file).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&file, bytes).unwrap();
    let said = of(", strict = false", "e").unwrap_err().to_string();
    assert!(said.contains("length or checksum differ from state.json"), "{said}");
}

#[test]
fn resumed_run_uses_its_own_checkpoints() {
    let dir = tempfile::tempdir().unwrap();
    let file = trained(&dir.path().join("a"));
    let train = |name: &str, epochs: &str, resume: bool| {
        let config = MLP.replace("max_epochs = 2", epochs);
        let dir = dir.path().join(name);
        let from = |builder: runner::RunnerBuilder, _| {
            builder.load_from(&file).load_options(LoadOptions::default()).resume(resume)
        };
        run(&config, &dir, 1, from).remove(0).unwrap();
        fs::read(dir.join("epoch_2/model.safetensors")).ok()
    };
    let whole = train("b", "max_epochs = 2", false);
    // Started with `--resume`, as under a launcher that restarts it.
    assert_eq!(train("c", "max_epochs = 1", true), None);
    assert_eq!(train("c", "max_epochs = 2", true), whole);
}

#[test]
fn check_reads_the_weights_file() {
    let dir = tempfile::tempdir().unwrap();
    let file = trained(&dir.path().join("a"));
    let config = with_load_from(&format!("'{}'", file.display()));
    let check = |config: &str| {
        let path = dir.path().join("c.toml");
        fs::write(&path, config).unwrap();
        let program = env!("CARGO_BIN_EXE_runner");
        let out = std::process::Command::new(program).arg("check").arg(&path).output().unwrap();
        String::from_utf8(out.stderr).unwrap()
    };
    assert_eq!(check(&config), "");
    let said = check(&config.replace("hidden = [8]", "hidden = [9]"));
    assert!(said.contains("does not match the model: mismatched"), "{said}");
}
