//! Tests of the place of a checkpoint in the file system, and of older files.

use std::collections::HashMap;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

use candle_core::Tensor;
use candle_nn::VarMap;
use candle_train::{AdamWHyper, Trainer};

use super::{alone, model, save_a_run, state, step, trainer, weights};

/// Names of the files in a directory.
fn names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name());
    let mut names: Vec<_> = entries.map(|name| name.into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn a_save_leaves_one_file() {
    let directory = tempfile::tempdir().unwrap();
    let folder = directory.path().join("in/folders");
    fs::create_dir_all(&folder).unwrap();
    for mine in ["run.new", ".run.new", ".run.7.new", ".run.7-x.new"] {
        fs::write(folder.join(mine), "mine").unwrap();
    }
    // Of a process that was killed.
    fs::write(folder.join(".run.77-3.new"), "left").unwrap();
    let (vars, _net) = model(1);
    let train = trainer(&vars, &alone());
    train.save(folder.join("run"), 1).unwrap();
    train.save(folder.join("other"), 1).unwrap();
    train.save(folder.join("run"), 2).unwrap();
    drop(train);
    let expected = [".run.7-x.new", ".run.7.new", ".run.new", "other", "run", "run.new"];
    assert_eq!(names(&folder), expected);
    assert_eq!(fs::read(folder.join("run.new")).unwrap(), b"mine");
}

#[test]
fn resume_removes_what_a_killed_save_has_left() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("run");
    let (vars, _net) = model(1);
    trainer(&vars, &alone()).save(&path, 1).unwrap();
    fs::write(directory.path().join(".run.77-3.new"), "left").unwrap();
    assert_eq!(trainer(&vars, &alone()).resume(&path).unwrap(), 1);
    assert_eq!(names(directory.path()), ["run"]);
}

#[test]
fn a_symbolic_link_stays_one_and_its_target_is_replaced() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    fs::create_dir(path("scratch")).unwrap();
    symlink("scratch/epochs", path("link")).unwrap();
    symlink(path("link"), path("run")).unwrap();
    let (vars, _net) = model(1);
    let mut train = trainer(&vars, &alone());
    assert_eq!(train.resume(path("run")).unwrap(), 0);
    for epoch in [1, 2] {
        train.save(path("run"), epoch).unwrap();
        fs::set_permissions(path("scratch/epochs"), fs::Permissions::from_mode(0o600)).unwrap();
        assert!(path("run").is_symlink() && path("link").is_symlink());
        assert_eq!(train.resume(path("scratch/epochs")).unwrap(), epoch);
    }
    train.save(path("scratch/epochs"), 3).unwrap();
    assert_eq!(train.resume(path("run")).unwrap(), 3);
    let mode = fs::metadata(path("scratch/epochs")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    drop(train);
    assert_eq!(names(&path("scratch")), ["epochs"]);
}

#[test]
fn a_run_does_not_overwrite_what_another_has_saved_since() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("run");
    let (vars, net) = model(1);
    let [mut first, mut second, third] = [0; 3].map(|_| trainer(&vars, &alone()));
    for train in [&mut first, &mut second] {
        assert_eq!(train.resume(&path).unwrap(), 0);
    }
    step(&mut first, &net, 0);
    first.save(&path, 1).unwrap();
    let error = second.save(&path, 9).unwrap_err().to_string();
    let says = "another run has saved there since this run began (epoch 1, 1 steps)";
    assert!(error.contains(says), "{error}");
    // Goes on with the other run.
    assert_eq!(second.resume(&path).unwrap(), 1);
    second.save(&path, 2).unwrap();
    let error = first.save(&path, 2).unwrap_err().to_string();
    assert!(
        error.contains("another run has saved there since this run read or wrote it"),
        "{error}"
    );
    assert!(error.contains("or remove the file, and this run saves again"), "{error}");
    fs::remove_file(&path).unwrap();
    first.save(&path, 3).unwrap();
    // One that has looked at no file overwrites it, unless its run goes on.
    let error = third.save(&path, 4).unwrap_err().to_string();
    assert!(error.contains("another trainer of this process saves there"), "{error}");
    drop((first, second));
    third.save(&path, 4).unwrap();
}

#[test]
fn a_run_that_saved_in_a_new_directory_is_noticed() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    fs::create_dir(path("disk")).unwrap();
    symlink("disk", path("link")).unwrap();
    let (vars, _net) = model(1);
    let [mut first, mut second] = [0; 2].map(|_| trainer(&vars, &alone()));
    for train in [&mut first, &mut second] {
        assert_eq!(train.resume(path("link/new/run")).unwrap(), 0);
    }
    first.save(path("link/new/run"), 1).unwrap();
    let error = second.save(path("link/new/run"), 2).unwrap_err().to_string();
    assert!(error.contains("another run has saved there since this run began"), "{error}");
    first.save(path("disk/new/run"), 3).unwrap();
    drop((first, second));
    assert_eq!(names(&path("disk/new")), ["run"]);
}

/// A directory cannot be locked, as nothing can on some file systems.
#[test]
fn without_locks_a_run_saves_and_leaves_what_others_may_be_writing() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("run");
    fs::create_dir(directory.path().join(".run.lock")).unwrap();
    fs::write(directory.path().join(".run.77-3.new"), "being written").unwrap();
    let (vars, _net) = model(1);
    let mut train = trainer(&vars, &alone());
    for epoch in [1, 2] {
        train.save(&path, epoch).unwrap();
        assert_eq!(train.resume(&path).unwrap(), epoch);
    }
    drop(train);
    assert_eq!(names(directory.path()), [".run.77-3.new", ".run.lock", "run"]);
}

#[test]
fn runs_on_threads_of_one_process_leave_whole_files() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("run");
    let save = || {
        let (vars, _net) = model(1);
        let mut train = trainer(&vars, &alone());
        for epoch in 0..40 {
            match train.save(&path, epoch) {
                Ok(()) => {}
                Err(error) => {
                    let error = error.to_string();
                    let is_refused = error.contains("another run has saved there")
                        || error.contains("another trainer of this process");
                    assert!(is_refused, "{error}");
                    train.resume(&path).unwrap();
                }
            }
        }
    };
    std::thread::scope(|scope| (0..4).for_each(|_| drop(scope.spawn(save))));
    assert_eq!(names(directory.path()), ["run"]);
}

/// Writes a file as version 1 did.
fn save_format_1(path: &Path, train: &mut Trainer, vars: &VarMap, own: &str) {
    let mut entries = HashMap::new();
    for (name, var) in vars.data().lock().unwrap().iter() {
        entries.insert(name.clone(), var.as_detached_tensor());
    }
    let bytes = |bytes: Vec<u8>| {
        let count = bytes.len();
        Tensor::from_vec(bytes, count, &candle_core::Device::Cpu).unwrap()
    };
    let optimizer = train.optimizer().state_dict().unwrap().to_safetensors().unwrap();
    entries.insert("candle_train.optimizer".to_owned(), bytes(optimizer));
    let progress = format!(
        r#"{{"format":1,"epoch":5,"steps":{},"scaler":null,"base_lrs":[0.01],"random_positions":[0]{own}}}"#,
        train.steps()
    );
    entries.insert("candle_train.trainer".to_owned(), bytes(progress.into_bytes()));
    write(path, &entries);
}

/// Writes a file with its checksum.
fn write(path: &Path, entries: &HashMap<String, Tensor>) {
    let zeros = "00000000".to_owned();
    let metadata = [("crc32".to_owned(), zeros.clone())].into_iter().collect();
    let mut file = safetensors::serialize(entries, Some(metadata)).unwrap();
    let digits = format!("{:08x}", crc32fast::hash(&file));
    let at = file.windows(8).position(|at| at == zeros.as_bytes()).unwrap();
    file[at..at + 8].copy_from_slice(digits.as_bytes());
    fs::write(path, file).unwrap();
}

#[test]
fn an_entry_of_another_version_is_refused_by_name() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("run");
    save_a_run(&path, 1, 3);
    let mut entries = candle_core::safetensors::load(&path, &candle_core::Device::Cpu).unwrap();
    let (vars, _net) = model(1);
    let mut train = trainer(&vars, &alone());
    write(&path, &entries);
    assert_eq!(train.resume(&path).unwrap(), 3);
    let other = entries["train_step.trainer"].clone();
    entries.insert("train_step.later".to_owned(), other);
    write(&path, &entries);
    let error = train.resume(&path).unwrap_err().to_string();
    assert!(error.contains("entry `train_step.later`, which this trainer does not"), "{error}");
}

#[test]
fn files_of_format_1_are_resumed() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("run");
    let build = |seed| {
        let (vars, net) = model(seed);
        let hyper = AdamWHyper { lr: 1e-2, ..AdamWHyper::default() };
        let train = Trainer::builder(&vars).group(alone()).build(hyper).unwrap();
        (train, vars, net)
    };
    for (own, expected) in [("", None), (r#","own":[[7,0.5]]"#, Some((7, 0.5)))] {
        let (mut train, vars, net) = build(1);
        (0..3).for_each(|first| step(&mut train, &net, first));
        save_format_1(&path, &mut train, &vars, own);
        let saved = state(&mut train, &vars);
        let (mut train, vars, _net) = build(9);
        match expected {
            None => assert_eq!(train.resume(&path).unwrap(), 5),
            Some(own) => {
                assert!(train.resume(&path).unwrap_err().to_string().contains("`resume_with`"));
                assert_eq!(train.resume_with::<(u32, f64)>(&path).unwrap(), (5, Some(own)));
            }
        }
        assert_eq!(state(&mut train, &vars), saved);
        assert_eq!(weights(&vars), saved.0);
    }
}

#[test]
fn a_file_of_format_2_is_resumed() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("run");
    save_a_run(&path, 1, 3);
    let resume = || {
        let (vars, _net) = model(1);
        let mut train = trainer(&vars, &alone());
        assert_eq!(train.resume(&path).unwrap(), 3);
        (weights(&vars), train.optimizer().state_dict().unwrap(), train.steps())
    };
    let now = resume();
    // Only the prefix of names and the number of the format differ.
    let entries = candle_core::safetensors::load(&path, &candle_core::Device::Cpu).unwrap();
    let old = entries.into_iter().map(|(name, tensor)| match name.strip_prefix("train_step.") {
        Some("trainer") => {
            let text = String::from_utf8(tensor.to_vec1::<u8>().unwrap()).unwrap();
            let text = text.replace("\"format\":3", "\"format\":2");
            let tensor = Tensor::from_slice(text.as_bytes(), text.len(), &candle_core::Device::Cpu);
            ("candle_train.trainer".to_owned(), tensor.unwrap())
        }
        Some(rest) => (format!("candle_train.{rest}"), tensor),
        None => (name, tensor),
    });
    write(&path, &old.collect());
    assert_eq!(resume(), now);
}
