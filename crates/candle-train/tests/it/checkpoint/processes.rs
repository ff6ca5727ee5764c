//! Tests with other processes: this test binary runs itself.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use candle_core::{DType, Device, Tensor, Var};
use candle_nn::VarMap;
use candle_train::{AdamWHyper, Trainer};

use super::{alone, model, trainer};

const DIRECTORY: &str = "CANDLE_TRAIN_TEST_DIRECTORY";

/// Runs the ignored test of this name in a process of its own.
fn child(test: &str, directory: &Path) -> Child {
    let test = format!("checkpoint::processes::{test}");
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", &test, "--ignored", "--nocapture"]).env(DIRECTORY, directory);
    command.spawn().unwrap()
}

fn wait_for(path: &Path) {
    let start = Instant::now();
    while !path.exists() {
        assert!(start.elapsed() < Duration::from_secs(60), "{}", path.display());
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// The directory of a child's test; `None` if the test was not started by [`child`].
fn directory() -> Option<PathBuf> {
    std::env::var_os(DIRECTORY).map(PathBuf::from)
}

#[test]
#[ignore = "needs the test that starts it"]
fn saves_for_ever() {
    let Some(directory) = directory() else { return };
    let (vars, _net) = model(1);
    let train = trainer(&vars, &alone());
    for epoch in 0.. {
        train.save(directory.join("run"), epoch).unwrap();
        fs::write(directory.join("saved"), "").unwrap();
    }
}

#[test]
fn a_second_run_is_told_of_the_first() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("run");
    let mut other = child("saves_for_ever", directory.path());
    wait_for(&directory.path().join("saved"));
    let (vars, _net) = model(1);
    let mut train = trainer(&vars, &alone());
    // Reading is allowed.
    train.resume(&path).unwrap();
    let error = train.save(&path, 3).unwrap_err().to_string();
    let holder = format!("another run saves there: process {} on ", other.id());
    assert!(error.contains(&holder), "{error}");
    train.resume(&path).unwrap();
    other.kill().unwrap();
    other.wait().unwrap();
    train.resume(&path).unwrap();
    train.save(&path, 3).unwrap();
}

#[test]
fn killed_saves_leave_a_whole_file_and_nothing_for_long() {
    let directory = tempfile::tempdir().unwrap();
    for kill in 0..8 {
        let _ = fs::remove_file(directory.path().join("saved"));
        let mut other = child("saves_for_ever", directory.path());
        wait_for(&directory.path().join("saved"));
        std::thread::sleep(Duration::from_micros(700 * kill));
        other.kill().unwrap();
        other.wait().unwrap();
        let new = fs::read_dir(directory.path()).unwrap().filter(|entry| {
            entry.as_ref().unwrap().file_name().to_string_lossy().ends_with(".new")
        });
        assert!(new.count() <= 1);
    }
    let (vars, _net) = model(1);
    let mut train = trainer(&vars, &alone());
    train.resume(directory.path().join("run")).unwrap();
    train.save(directory.path().join("run"), 0).unwrap();
    drop(train);
    let mut left: Vec<_> =
        fs::read_dir(directory.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    left.sort();
    assert_eq!(left, ["run", "saved"]);
}

/// A number of `/proc/self/status`, in KiB.
fn status(key: &str) -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(key)).unwrap();
    line.trim_start_matches(':').trim().trim_end_matches(" kB").parse().unwrap()
}

/// Peak of the memory during a call beyond that before it, in KiB.
fn growth(call: impl FnOnce()) -> u64 {
    fs::write("/proc/self/clear_refs", "5").unwrap();
    let before = status("VmRSS");
    call();
    status("VmHWM").saturating_sub(before)
}

#[test]
#[ignore = "needs the test that starts it"]
fn measures_its_memory() {
    let Some(directory) = directory() else { return };
    let (path, len) = (directory.join("run"), 1 << 21);
    let build = || {
        let vars = VarMap::new();
        let all: Vec<_> =
            (0..8).map(|_| Var::ones(len, DType::F32, &Device::Cpu).unwrap()).collect();
        for (at, var) in all.iter().enumerate() {
            vars.data().lock().unwrap().insert(format!("v{at}"), var.clone());
        }
        let builder = Trainer::builder(&vars).group(alone());
        (builder.build(AdamWHyper::default()).unwrap(), all)
    };
    let (mut train, all) = build();
    let zero = || Tensor::zeros((), DType::F32, &Device::Cpu);
    train.step(|| all.iter().try_fold(zero()?, |sum, var| sum + var.sum_all()?)).unwrap();
    // Three times 64 MiB, in tensors of 8 MiB.
    let tensor = (len * 4 / 1024) as u64;
    let save = growth(|| train.save(&path, 1).unwrap());
    let resume = growth(|| assert_eq!(train.resume(&path).unwrap(), 1));
    drop((train, all));
    let (mut train, _all) = build();
    let fresh = growth(|| assert_eq!(train.resume(&path).unwrap(), 1));
    assert!(save < tensor * 2, "save {save}");
    assert!(resume < tensor * 2, "resume {resume}");
    // Creates the optimizer's state, of 128 MiB.
    assert!(fresh < tensor * 18, "resume of a new trainer {fresh}");
}

#[test]
fn a_save_and_a_resume_need_at_most_a_copy_of_a_tensor() {
    let directory = tempfile::tempdir().unwrap();
    assert!(child("measures_its_memory", directory.path()).wait().unwrap().success());
}
