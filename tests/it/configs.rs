//! The files in `configs/`: each is right, and shows what it says when it is run for a few
//! iterations.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use runner::config::Config;
use rustix::process::{Pid, Signal, kill_process};
use safetensors::SafeTensors;

use crate::WORKER;

/// A directory of one test, in which the programs run: with the files that configurations name.
struct Place(tempfile::TempDir);

impl Place {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Runs a program to its end, with this exit code, and returns what it wrote.
    fn run(&self, program: &str, args: &[&str], code: i32) -> String {
        let command = [&["-C", self.0.path().to_str().unwrap(), program], args].concat();
        let output = tests::run("env", command);
        let text = tests::text(&output);
        assert_eq!(output.status.code(), Some(code), "{args:?}: {text}");
        text
    }

    /// Runs a command of the runner, which must write each of `said`.
    fn runner(&self, args: &[&str], said: &[&str]) -> String {
        let text = self.run(WORKER, args, 0);
        said.iter().for_each(|said| assert!(text.contains(said), "no `{said}` in:\n{text}"));
        text
    }

    /// Starts a program, and collects what it writes in the file `name`.
    fn start(&self, name: &str, args: &[&str]) -> Running {
        let log = std::fs::File::create(self.path(name)).unwrap();
        let mut command = Command::new(WORKER);
        command.args(args).current_dir(&self.0).stdin(Stdio::null());
        Running(command.stdout(log.try_clone().unwrap()).stderr(log).spawn().unwrap())
    }

    fn log(&self, name: &str) -> String {
        std::fs::read_to_string(self.path(name)).unwrap()
    }

    /// Waits until the file `name` contains `text`.
    fn await_text(&self, name: &str, text: &str) {
        let start = Instant::now();
        while !self.log(name).contains(text) {
            assert!(
                start.elapsed() < tests::DEADLINE,
                "no `{text}` in {name}:\n{}",
                self.log(name)
            );
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Writes the weights for `finetune_digits.toml`, with the commands at the head of
    /// `transformer_digits.toml` and a shorter training.
    fn pretrain(&self) {
        let config = configuration("transformer_digits");
        self.runner(
            &["train", &config, "--cfg-options", "train_cfg.max_epochs=2"],
            &["compile: applied: ", "EMAHook", "is saved to best_accuracy_epoch_1"],
        );
        let out = "transformer_digits.safetensors";
        self.runner(&["publish", "work_dirs/transformer_digits", out], &["31 tensors"]);
    }

    /// Writes the files of `stream_digits.toml`, with the command at its head.
    fn write_shards(&self) {
        let text = std::fs::read_to_string(configuration("stream_digits")).unwrap();
        let script = text.split("mkdir").nth(1).unwrap().split("\n#\n").next().unwrap();
        let script = script.replace("\n#", "\n");
        let digits = tests::root().join("crates").canonicalize().unwrap();
        let script = script.replace("crates/", &format!("{}/", digits.display()));
        self.run("bash", &["-euo", "pipefail", "-c", &format!("mkdir{script}")], 0);
    }

    /// The tensors of a file, sorted by name.
    fn tensors(&self, file: &str) -> Vec<(String, Vec<u8>)> {
        let bytes = std::fs::read(self.path(file)).unwrap();
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        let all = tensors.iter().map(|(name, view)| (name.to_owned(), view.data().to_vec()));
        let mut all: Vec<_> = all.collect();
        all.sort_unstable();
        all
    }
}

/// A process that does not outlive its test.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

/// The path of a file in `configs/`.
fn configuration(name: &str) -> String {
    let path = tests::root().join("configs").join(format!("{name}.toml"));
    path.canonicalize().unwrap().to_str().unwrap().to_owned()
}

/// Names of the files in `configs/`, without `.toml`.
fn names() -> Vec<String> {
    let files = std::fs::read_dir(tests::root().join("configs")).unwrap();
    let names = files.map(|file| file.unwrap().file_name().into_string().unwrap());
    names.map(|name| name.strip_suffix(".toml").unwrap().to_owned()).collect()
}

#[test]
fn every_configuration_is_right() {
    let place = Place::new();
    place.write_shards();
    place.pretrain();
    for name in names() {
        let path = configuration(&name);
        if name == "resnet_fashion" {
            // Its data set may be missing.
            runner::zoo::register();
            let config = Config::from_file(Path::new(&path)).unwrap();
            drop(runner::RunnerBuilder::from_config(config).unwrap());
        } else {
            place.runner(&["check", &path], &[": ok"]);
        }
    }
}

#[test]
fn every_configuration_has_a_row_in_the_readme() {
    let readme = std::fs::read_to_string(tests::root().join("README.md")).unwrap();
    let table = readme.split("## Configurations to copy").nth(1).unwrap();
    let table = table.split("\n## ").next().unwrap();
    let rows = table.lines().filter_map(|line| line.strip_prefix("| [`"));
    let mut listed: Vec<_> =
        rows.map(|row| row.split(".toml`]").next().unwrap().to_owned()).collect();
    let mut names = names();
    listed.sort_unstable();
    names.sort_unstable();
    assert_eq!(listed, names);
}

#[test]
fn the_transformer_has_groups_averages_workers_and_a_base() {
    let place = Place::new();
    place.pretrain();
    let whole = place.runner(
        &["config", &configuration("transformer_digits"), "--show-origin"],
        &["transformer_digits.toml", "resnet_digits.toml"],
    );
    assert!(!whole.contains("blocks"), "{whole}");
    let state = place.log("work_dirs/transformer_digits/epoch_2/state.json");
    let state = state.split_whitespace().collect::<String>();
    let groups = state.split("\"hyper_params\":[").nth(1).unwrap().split("}]").next().unwrap();
    let number = |group: &str, key: &str| -> f64 {
        let value = group.split(&format!("\"{key}\":")).nth(1).unwrap();
        value.split([',', '}']).next().unwrap().parse().unwrap()
    };
    // Half the rate for `embed`, and two groups with and without weight decay at the whole rate.
    let groups: Vec<_> = groups.split("},").collect();
    let rates: Vec<_> = groups.iter().map(|group| number(group, "lr")).collect();
    assert_eq!(rates, [1e-3, 2e-3, 2e-3]);
    let decays: Vec<_> = groups.iter().map(|group| number(group, "weight_decay")).collect();
    assert_eq!(decays, [0.05, 0.0, 0.05]);
    // The model of a checkpoint is the average; the trained one is beside it.
    let published = place.tensors("transformer_digits.safetensors");
    let epoch = "work_dirs/transformer_digits/epoch_2";
    let trained = place.tensors(&format!("{epoch}/ema.safetensors"));
    assert!(!trained.is_empty());
    let averages = place.tensors(&format!("{epoch}/model.safetensors"));
    assert!(averages == published, "other weights than the averages were published");
}

#[test]
fn finetuning_changes_adapters_and_no_pretrained_weight() {
    let place = Place::new();
    place.pretrain();
    let config = configuration("finetune_digits");
    let options = ["--cfg-options", "train_cfg.max_epochs=2"];
    place.runner(&[&["train", &config], &options[..]].concat(), &["(31 of 41 tensors)"]);
    let (before, after) = (
        place.tensors("transformer_digits.safetensors"),
        place.tensors("work_dirs/finetune_digits/epoch_2/model.safetensors"),
    );
    let is_trained = |name: &str| name.starts_with("fc.") || name == "position";
    for (name, bytes) in &before {
        let (_, now) = after.iter().find(|(other, _)| other == name).unwrap();
        assert_eq!(now != bytes, is_trained(name), "{name}");
    }
    let adapters = after.iter().filter(|(name, _)| name.contains(".lora_"));
    assert_eq!(adapters.count(), 2 * 5);
    let run = "work_dirs/finetune_digits";
    place.runner(&["publish", run, "merged.safetensors"], &["31 tensors"]);
    place.runner(&["publish", run, "adapter.safetensors", "--adapter"], &["10 tensors"]);
}

#[test]
fn a_stream_resumes_after_its_last_sample() {
    let place = Place::new();
    place.write_shards();
    let config = configuration("stream_digits");
    let train = |work_dir: &str, more: &[&str], code| {
        let launch = ["launch", "--nproc-per-node", "2", "--", "train", &config, "--resume"];
        let options = ["--work-dir", work_dir, "--cfg-options", "train_cfg.max_iters=100"];
        place.run(WORKER, &[&launch[..], &options, more].concat(), code)
    };
    let said = train("whole", &[], 0);
    for text in ["accuracy/top1: ", "accuracy/top3: ", "is saved to best_val_loss_iter_100"] {
        assert!(said.contains(text), "no `{text}` in {said}");
    }
    // Ends inside an epoch, after the first iteration.
    train("parts", &["--time-budget", "1ms"], 75);
    let said = train("parts", &[], 0);
    assert!(said.contains("resumed from parts/iter_"), "{said}");
    let weights = |run: &str| place.tensors(&format!("{run}/iter_100/model.safetensors"));
    assert!(weights("whole") == weights("parts"), "the resumed run has other weights");
}

#[test]
fn an_elastic_run_goes_on_without_a_lost_node() {
    let place = Place::new();
    let config = configuration("elastic_digits");
    let _store = place.start("store.log", &["store", "--listen", "127.0.0.1:0"]);
    place.await_text("store.log", "\n");
    let endpoint =
        format!("127.0.0.1:{}", place.log("store.log").trim().rsplit(':').next().unwrap());
    let node = |name| {
        let launch = ["launch", "--nnodes", "1:4", "--nproc-per-node", "1", "--max-restarts", "3"];
        let meet = ["--rdzv-endpoint", &endpoint];
        let soon = ["--rdzv-conf", "last_call_timeout=1,keep_alive_interval=1"];
        let train = ["--", "train", &config, "--resume", "--work-dir", "run"];
        let long = ["--cfg-options", "train_cfg.max_epochs=1000"];
        place.start(name, &[&launch[..], &meet, &soon, &train, &long].concat())
    };
    let (mut kept, lost) = (node("kept.log"), node("lost.log"));
    let saved = place.path("run/last_checkpoint");
    let start = Instant::now();
    while !saved.exists() {
        assert!(start.elapsed() < tests::DEADLINE, "{}", place.log("kept.log"));
        std::thread::sleep(Duration::from_millis(10));
    }
    drop(lost);
    place.await_text("kept.log", "resumed from run/iter_");
    let pid = Pid::from_child(&kept.0);
    kill_process(pid, Signal::TERM).unwrap();
    let status = tests::wait(&mut kept.0, tests::DEADLINE);
    let said = place.log("kept.log");
    // Ended by a signal, after a checkpoint.
    assert_eq!(status.code(), Some(75), "{said}");
    assert!(said.contains("2 ranks wrote this checkpoint, and 1 resume"), "{said}");
    assert!(said.contains("accumulative_counts is 8 instead of 4"), "{said}");
}
