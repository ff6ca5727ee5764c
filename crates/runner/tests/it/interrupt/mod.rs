//! Whole programs: killed or interrupted by a signal, they resume bit for bit; on a terminal they
//! draw a progress bar.

use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use runner::config::Config;
use runner::data::Batch;
use runner::hooks::Hook;
use runner::{Error, Result, Runner};
use rustix::process::{Pid, Resource, Rlimit, Signal, kill_process, setrlimit};
use signal_hook::low_level::signal_name;

use crate::common::alone;
use crate::common::from_config;
use crate::common::shards;

mod soak;
mod work_dir;

const RUNNER: &str = env!("CARGO_BIN_EXE_runner");
const DEADLINE: Duration = Duration::from_secs(240);

/// Half parameters, momentum, EMA, a growing loss scale, checkpoints inside of epochs.
const CONFIG: &str = r#"
model = { type = "Mlp", in_features = 64, hidden = [16], num_classes = 10 }
train_dataloader = { batch_size = 64, dataset = { type = "Digits" } }
train_cfg = { by_epoch = false, max_iters = 120 }
default_hooks.checkpoint = { by_epoch = false, interval = 7, max_keep_ckpts = 2 }
custom_hooks = [{ type = "EMAHook", momentum = 0.1 }]
randomness.seed = 3
[optim_wrapper]
type = "AmpOptimWrapper"
dtype = "float16"
loss_scale = { init_scale = 256.0, growth_interval = 5 }
optimizer = { type = "SGD", lr = 0.05, momentum = 0.9 }
"#;

/// A program that is killed when dropped.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Running {
    fn start(args: &[&str]) -> Self {
        // Under `nohup` the tests ignore SIGHUP, which child processes would inherit.
        let mut command = Command::new("env");
        command.args(["--default-signal=HUP", RUNNER]).args(args);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        Self(command.spawn().unwrap())
    }

    fn pid(&self) -> Pid {
        Pid::from_child(&self.0)
    }

    fn end(mut self) -> ExitStatus {
        let start = Instant::now();
        loop {
            if let Some(status) = self.0.try_wait().unwrap() {
                return status;
            }
            assert!(start.elapsed() < DEADLINE, "still running");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

struct Job {
    config: PathBuf,
    dir: tempfile::TempDir,
}

impl Job {
    fn new() -> Self {
        Self::with(|_| CONFIG.to_owned())
    }

    /// A job over a stream of five shards.
    fn of_stream() -> Self {
        Self::with(|dir| {
            shards::write(dir, &[333, 100, 0, 500, 210]);
            let files = dir.join("*.jsonl");
            let data = format!("type = \"JsonStream\", files = {files:?}, shuffle_buffer = 50");
            CONFIG.replace("type = \"Digits\"", &data)
        })
    }

    fn with(config: impl FnOnce(&Path) -> String) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("c.toml");
        std::fs::write(&path, config(dir.path())).unwrap();
        Self { config: path, dir }
    }

    fn work_dir(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn train(&self, ranks: Option<usize>, name: &str, iters: usize) -> Running {
        self.train_by(0, ranks, name, iters)
    }

    /// Batches do not depend on the number of workers.
    fn train_by(&self, workers: usize, ranks: Option<usize>, name: &str, iters: usize) -> Running {
        let ranks = ranks.map(|n| n.to_string());
        let iters = format!("train_cfg.max_iters={iters}");
        let workers = format!("train_dataloader.num_workers={workers}");
        let work_dir = self.work_dir(name);
        let mut args = Vec::new();
        if let Some(ranks) = &ranks {
            args.extend(["launch", "--nproc-per-node", ranks, "--"]);
        }
        args.extend(["train", self.config.to_str().unwrap(), "--resume", "--work-dir"]);
        args.extend([work_dir.to_str().unwrap(), "--cfg-options", &iters, &workers]);
        Running::start(&args)
    }

    fn assert_equal(&self, a: &str, b: &str, checkpoint: &str) {
        for file in ["model.safetensors", "optimizer.safetensors", "ema.safetensors"] {
            let read =
                |name| std::fs::read(self.work_dir(name).join(checkpoint).join(file)).unwrap();
            assert!(read(a) == read(b), "{file} differs");
        }
    }
}

/// All log text in `dir`.
fn log(dir: &Path) -> String {
    let dirs = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let files = dirs.flat_map(|d| std::fs::read_dir(d.path()).into_iter().flatten().flatten());
    let files = files.filter(|f| f.path().extension().is_some_and(|e| e == "log"));
    files.map(|f| std::fs::read_to_string(f.path()).unwrap_or_default()).collect()
}

fn wait_for_training(dir: &Path) {
    let start = Instant::now();
    while !log(dir).contains("Iter(train)") {
        assert!(start.elapsed() < DEADLINE, "{}", log(dir));
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Kills a run of `ranks` (under a launcher, if a number is given) `points` times, each after a
/// time drawn from `seed`, and compares every run that finishes, after which it starts anew. With
/// several ranks the last one is killed, which ends the others.
fn kill_at_random(job: &Job, ranks: Option<usize>, points: usize, seed: u64) {
    let start = Instant::now();
    assert!(job.train(ranks, "whole", 120).end().success());
    let took = start.elapsed().as_secs_f64();
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let (mut landed, mut ended) = (0, 0);
    while landed < points {
        assert!(ended < 20 * points, "{landed} of {points} kills came before the end");
        let run = job.train_by([1, 3, 0][(landed + ended) % 3], ranks, "killed", 120);
        std::thread::sleep(Duration::from_secs_f64(took * rng.random::<f64>()));
        let victim = ranks.map_or_else(|| Some(run.pid()), |n| find_rank(run.pid(), n - 1));
        if let Some(victim) = victim {
            let _ = kill_process(victim, Signal::KILL);
        }
        let status = run.end();
        if status.success() {
            job.assert_equal("whole", "killed", "iter_120");
            std::fs::remove_dir_all(job.work_dir("killed")).unwrap();
            ended += 1;
        } else {
            // Either by the signal, or by the launcher's exit code for it.
            assert!(status.signal() == Some(9) || status.code() == Some(128 + 9), "{status}");
            landed += 1;
        }
    }
    assert!(job.train_by(1, ranks, "killed", 120).end().success());
    job.assert_equal("whole", "killed", "iter_120");
}

#[test]
fn run_killed_at_any_time_resumes_bit_for_bit() {
    kill_at_random(&Job::new(), None, 4, 1);
}

#[test]
fn run_over_a_stream_killed_at_any_time_resumes_bit_for_bit() {
    kill_at_random(&Job::of_stream(), None, 2, 3);
    kill_at_random(&Job::of_stream(), Some(2), 3, 4);
}

#[test]
#[ignore = "takes minutes: kills one rank and two ranks fifty times; SEED sets another seed"]
fn nightly_run_killed_at_fifty_times_resumes_bit_for_bit() {
    let seed = std::env::var("SEED").map_or(2, |seed| seed.parse().unwrap());
    for job in [Job::new(), Job::of_stream()] {
        kill_at_random(&job, None, 50, seed);
        kill_at_random(&job, Some(2), 50, seed);
    }
}

/// Returns the process of rank `rank` started by `launcher`, if it runs.
fn find_rank(launcher: Pid, rank: usize) -> Option<Pid> {
    let (ours, wanted) = (format!("{}", launcher.as_raw_nonzero()), format!("RANK={rank}"));
    std::fs::read_dir("/proc").unwrap().flatten().find_map(|entry| {
        let stat = std::fs::read_to_string(entry.path().join("stat")).unwrap_or_default();
        let parent = stat.rsplit(") ").next().and_then(|rest| rest.split(' ').nth(1));
        let environ = std::fs::read(entry.path().join("environ")).unwrap_or_default();
        let mut variables = environ.split(|byte| *byte == 0);
        let is_it = parent == Some(&ours) && variables.any(|v| v == wanted.as_bytes());
        is_it.then(|| Pid::from_raw(entry.file_name().to_str()?.parse().ok()?)).flatten()
    })
}

/// As [`find_rank`], after waiting for its start.
fn rank_of(launcher: Pid, rank: usize) -> Pid {
    let start = Instant::now();
    loop {
        if let Some(pid) = find_rank(launcher, rank) {
            return pid;
        }
        assert!(start.elapsed() < DEADLINE, "rank {rank} was not started");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn signal_to_one_rank_saves_on_all_and_the_run_resumes() {
    use Signal as S;
    let signals = [S::USR1, S::TERM, S::INT, S::HUP, S::USR2, S::XCPU];
    for (signal, workers) in signals.into_iter().zip([1, 3, 0].into_iter().cycle()) {
        let job = Job::new();
        // More iterations than there is time for.
        let run = job.train_by(workers, Some(2), "asked", 100_000_000);
        wait_for_training(&job.work_dir("asked"));
        kill_process(rank_of(run.pid(), 1), signal).unwrap();
        assert_eq!(run.end().code(), Some(runner::signals::EXIT_CODE.into()), "{signal:?}");
        let told = log(&job.work_dir("asked"));
        let name = signal_name(signal.as_raw()).unwrap();
        assert!(told.contains(&format!("received {name} on a rank")), "{told}");
        let last = std::fs::read_to_string(job.work_dir("asked").join("last_checkpoint")).unwrap();
        let iter: usize = last.strip_prefix("iter_").unwrap().parse().unwrap();
        let (iters, end) = (iter + 9, format!("iter_{}", iter + 9));
        assert!(job.train_by(3, Some(2), "asked", iters).end().success());
        assert!(log(&job.work_dir("asked")).contains(&format!("epoch 0, iteration {iter}")));
        // One comparison suffices: all signals save in the same way.
        if signal == Signal::USR1 {
            assert!(job.train(Some(2), "whole", iters).end().success());
            job.assert_equal("whole", "asked", &end);
        }
    }
}

/// Schedulers repeat these signals, so only the first saves, and none ends the run before it has
/// saved. Under `nohup` closing the terminal does not end the run.
#[test]
fn repeated_signals_to_save_do_not_end_the_run() {
    let job = Job::new();
    let mut command = Command::new("nohup");
    command.args([RUNNER, "train", job.config.to_str().unwrap(), "--work-dir"]);
    command.arg(job.work_dir("asked")).args(["--cfg-options", "train_cfg.max_iters=100000000"]);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let run = Running(command.spawn().unwrap());
    wait_for_training(&job.work_dir("asked"));
    kill_process(run.pid(), Signal::HUP).unwrap();
    // It cannot save while stopped.
    kill_process(run.pid(), Signal::STOP).unwrap();
    assert!(!log(&job.work_dir("asked")).contains("received"));
    for signal in [Signal::USR2, Signal::XCPU, Signal::USR2, Signal::TERM] {
        kill_process(run.pid(), signal).unwrap();
    }
    kill_process(run.pid(), Signal::CONT).unwrap();
    assert_eq!(run.end().code(), Some(runner::signals::EXIT_CODE.into()));
}

#[test]
fn exhausted_time_budget_sets_the_exit_code() {
    let job = Job::new();
    let train = |name: &str, ranks: Option<&str>, budget: &str, more: &[&str]| {
        let mut command = Command::new(RUNNER);
        if let Some(ranks) = ranks {
            command.args(["launch", "--nproc-per-node", ranks, "--"]);
        }
        command.args(["train", job.config.to_str().unwrap(), "--work-dir"]);
        command.arg(job.work_dir(name)).args(["--resume", "--time-budget", budget]);
        command.arg("--cfg-options").args(more).stdin(Stdio::null());
        let output = command.output().unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let endless = "train_cfg.max_iters=100000000";
    for (ranks, workers) in [(None, "num_workers=2"), (Some("2"), "num_workers=0")] {
        let name = &format!("{ranks:?}");
        let workers = &format!("train_dataloader.{workers}");
        assert_eq!(train(name, ranks, "2s", &[endless, workers]).0, Some(75), "{name}");
        let unsaved = ["default_hooks.checkpoint=false", endless, workers];
        let (code, said) = train("unsaved", ranks, "2s", &unsaved);
        assert_eq!(code, Some(124), "{said}");
        let reason = "the time budget is exhausted, and no checkpoint was saved";
        let begins = if ranks.is_some() { "exit code 124: " } else { "error: " };
        assert!(said.contains(&format!("{begins}{reason}")), "{said}");
        // A sufficient time budget.
        let last = std::fs::read_to_string(job.work_dir(name).join("last_checkpoint")).unwrap();
        let iters: usize = last.strip_prefix("iter_").unwrap().parse().unwrap();
        let more = format!("train_cfg.max_iters={}", iters + 1);
        assert_eq!(train(name, ranks, "1h", &[&more]).0, Some(0), "{name}");
    }
}

/// Signals its own process once, before a batch of a validation.
struct Ask(bool);

impl Hook for Ask {
    fn name(&self) -> &'static str {
        "Ask"
    }

    fn before_val_iter(&mut self, _: &mut Runner, index: usize, _: &mut Batch) -> Result<()> {
        if index == 2 && std::mem::take(&mut self.0) {
            signal_hook::low_level::raise(signal_hook::consts::SIGTERM).unwrap();
        }
        Ok(())
    }
}

#[test]
#[ignore = "started by the next test in its own process, because of signals"]
fn asked_in_a_validation() {
    let (Ok(config), Ok(dir)) = (std::env::var("ASKED_CONFIG"), std::env::var("ASKED_DIR")) else {
        return;
    };
    runner::signals::catch().unwrap();
    let builder = from_config(Config::from_file(config).unwrap()).unwrap();
    let mut run = builder.work_dir(dir).hook(Box::new(Ask(true))).build().unwrap();
    assert!(matches!(run.train(), Err(Error::Interrupted { signal: 15, saved: true })));
}

#[test]
fn signal_ends_a_validation_which_is_repeated_after_resume() {
    let mut job = Job::new();
    let config = CONFIG.replace("max_iters = 120", "max_iters = 120, val_interval = 20");
    let validation = "val_dataloader = { batch_size = 64, dataset = { type = 'Digits', split = 'test' } }\n\
                      val_evaluator = { type = 'Accuracy' }\n";
    job.config = job.dir.path().join("val.toml");
    std::fs::write(&job.config, format!("{validation}{config}")).unwrap();
    let mut child = alone("interrupt::asked_in_a_validation");
    child.stdout(Stdio::null());
    child.env("ASKED_CONFIG", &job.config).env("ASKED_DIR", job.work_dir("asked"));
    assert!(child.status().unwrap().success());
    // There was no other reason to save here, and the validation yielded no metrics.
    assert!(job.work_dir("asked").join("iter_20").is_dir());
    assert!(!log(&job.work_dir("asked")).contains("accuracy"));
    assert!(job.train(None, "asked", 120).end().success());
    assert!(job.train(None, "whole", 120).end().success());
    for name in ["asked", "whole"] {
        assert_eq!(log(&job.work_dir(name)).matches("accuracy").count(), 6, "{name}");
    }
    job.assert_equal("whole", "asked", "iter_120");
}

#[test]
fn exit_code_is_not_75_without_a_checkpoint_to_resume_from() {
    for (name, hook) in [("weights", "{ save_optimizer = false }"), ("none", "false")] {
        for ranks in [None, Some(2)] {
            let mut job = Job::new();
            let hook = format!("default_hooks.checkpoint = {hook}");
            let old = CONFIG.lines().find(|line| line.starts_with("default_hooks")).unwrap();
            job.config = job.dir.path().join("unsaved.toml");
            std::fs::write(&job.config, CONFIG.replace(old, &hook)).unwrap();
            let run = job.train(ranks, "asked", 100_000_000);
            wait_for_training(&job.work_dir("asked"));
            kill_process(run.pid(), Signal::TERM).unwrap();
            assert_eq!(run.end().code(), Some(128 + 15), "{name} {ranks:?}");
            let told = log(&job.work_dir("asked"));
            assert!(told.contains("no checkpoint was saved"), "{name}: {told}");
        }
    }
}

/// Signals its own process before the first batch.
struct AskFirst;

impl Hook for AskFirst {
    fn name(&self) -> &'static str {
        "AskFirst"
    }

    fn before_train(&mut self, _: &mut Runner) -> Result<()> {
        signal_hook::low_level::raise(signal_hook::consts::SIGTERM).unwrap();
        Ok(())
    }
}

#[test]
#[ignore = "started by the next test in its own process, because of signals"]
fn asked_before_the_first_batch() {
    let (Ok(config), Ok(dir)) = (std::env::var("ASKED_CONFIG"), std::env::var("ASKED_DIR")) else {
        return;
    };
    runner::signals::catch().unwrap();
    let builder = from_config(Config::from_file(config).unwrap()).unwrap();
    let mut run = builder.work_dir(dir).hook(Box::new(AskFirst)).build().unwrap();
    let said = run.train().unwrap_err().to_string();
    assert!(said.starts_with("ended by signal 15; no checkpoint was saved"), "{said}");
}

#[test]
fn signal_before_the_first_batch_reports_no_checkpoint() {
    let job = Job::new();
    let mut child = alone("interrupt::asked_before_the_first_batch");
    child.env("ASKED_CONFIG", &job.config).env("ASKED_DIR", job.work_dir("asked"));
    let output = child.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    assert!(!job.work_dir("asked").join("last_checkpoint").exists());
}

/// From batch 15 on its process cannot write to any file, nor obtain more shared memory, of which
/// it has enough by then because it has saved before.
struct FillDisk;

impl Hook for FillDisk {
    fn name(&self) -> &'static str {
        "FillDisk"
    }

    fn before_train_iter(&mut self, runner: &mut Runner, _: &mut Batch) -> Result<()> {
        if runner.position().iter != 15 {
            return Ok(());
        }
        // SIGXFSZ, which comes with the error, would end the process if it were not caught.
        let caught = Arc::default();
        signal_hook::flag::register(signal_hook::consts::SIGXFSZ, caught).unwrap();
        setrlimit(Resource::Fsize, Rlimit { current: Some(0), maximum: Some(0) }).unwrap();
        Ok(())
    }
}

#[test]
#[ignore = "started by the next test in its own process, which limits file sizes"]
fn on_a_full_disk() {
    let (Ok(config), Ok(dir)) = (std::env::var("FULL_CONFIG"), std::env::var("FULL_DIR")) else {
        return;
    };
    let builder = from_config(Config::from_file(config).unwrap()).unwrap();
    let builder = builder.work_dir(dir).resume(true).hook(Box::new(FillDisk));
    let trained = builder.build().unwrap().train();
    assert!(trained.is_ok(), "{}", trained.unwrap_err());
}

/// Names in a work directory, without logs.
fn entries(dir: &Path) -> Vec<String> {
    let names = std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name());
    let names = names.map(|name| name.into_string().unwrap());
    let mut names: Vec<_> = names
        .filter(|n| !n.starts_with("20") && !n.ends_with(".toml") && n != ".runner.lock")
        .collect();
    names.sort();
    names
}

#[test]
fn full_disk_leaves_the_previous_checkpoint_and_gives_advice() {
    let job = Job::new();
    assert!(job.train(None, "full", 7).end().success());
    let mut child = alone("interrupt::on_a_full_disk");
    child.env("FULL_CONFIG", &job.config).env("FULL_DIR", job.work_dir("full"));
    let output = child.output().unwrap();
    let said = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
    assert!(!output.status.success(), "{said}");
    // It continues to the next checkpoint without a log.
    assert!(said.contains("Saving checkpoint at 21"), "{said}");
    let path = job.work_dir("full").join(".iter_21.tmp");
    assert!(said.contains(&format!("cannot write {}/", path.display())), "{said}");
    assert!(said.contains("free disk space") && said.contains("resume"), "{said}");
    assert_eq!(entries(&job.work_dir("full")), ["iter_14", "iter_7", "last_checkpoint"]);
    assert!(job.train(None, "full", 30).end().success());
    assert!(job.train(None, "whole", 30).end().success());
    job.assert_equal("whole", "full", "iter_30");
}

#[test]
fn run_resumes_without_room_for_its_log() {
    let job = Job::new();
    let dir = job.work_dir("full");
    assert!(job.train(None, "full", 7).end().success());
    let copy = dir.join("c.toml");
    std::fs::remove_file(&copy).unwrap();
    std::os::unix::fs::symlink("/dev/full", &copy).unwrap();
    let mut command = Command::new(RUNNER);
    command.args(["train", job.config.to_str().unwrap(), "--resume", "--work-dir"]).arg(&dir);
    let output = command.args(["--cfg-options", "train_cfg.max_iters=14"]).output().unwrap();
    let said = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
    assert!(output.status.success(), "{said}");
    let told = format!("cannot create {}: No space left on device", copy.display());
    assert!(said.contains(&told) && said.contains("without a log"), "{said}");
    assert!(said.contains("iteration 7") && dir.join("iter_14").is_dir(), "{said}");
}

#[test]
fn incomplete_checkpoints_of_a_killed_run_are_removed_at_start() {
    let job = Job::new();
    assert!(job.train(None, "killed", 7).end().success());
    let dir = job.work_dir("killed");
    std::fs::create_dir(dir.join(".iter_99.tmp")).unwrap();
    std::fs::copy(dir.join("iter_7/state.json"), dir.join(".iter_99.tmp/state.json")).unwrap();
    std::fs::write(dir.join(".last_checkpoint.tmp"), "iter_99").unwrap();
    // Other files are kept.
    std::fs::create_dir(dir.join(".notes.tmp")).unwrap();
    std::fs::write(dir.join(".notes.tmp/notes"), "").unwrap();
    assert!(job.train(None, "killed", 7).end().success());
    assert_eq!(entries(&dir), [".notes.tmp", "iter_7", "last_checkpoint"]);
}

/// Child processes: ranks and their guard.
fn children(parent: Pid) -> Vec<Pid> {
    let parent = parent.as_raw_nonzero().to_string();
    let child = |entry: std::fs::DirEntry| {
        let stat = std::fs::read_to_string(entry.path().join("stat")).ok()?;
        let of = stat.rsplit(") ").next()?.split(' ').nth(1)?;
        (of == parent).then(|| Pid::from_raw(entry.file_name().to_str()?.parse().ok()?)).flatten()
    };
    std::fs::read_dir("/proc").unwrap().flatten().filter_map(child).collect()
}

#[test]
fn signal_to_every_process_of_a_job_counts_once() {
    for signal in [Signal::TERM, Signal::USR1] {
        let job = Job::new();
        let run = job.train(Some(2), "asked", 100_000_000);
        wait_for_training(&job.work_dir("asked"));
        let others = children(run.pid());
        // At least the ranks and the guard; the launcher forwards the signal, so the ranks get it
        // twice.
        assert!(others.len() >= 3, "{others:?}");
        kill_process(run.pid(), signal).unwrap();
        std::thread::sleep(Duration::from_millis(20));
        for other in others {
            // The process may have saved and exited already.
            let _ = kill_process(other, signal);
        }
        assert_eq!(run.end().code(), Some(runner::signals::EXIT_CODE.into()), "{signal:?}");
        assert!(job.work_dir("asked").join("last_checkpoint").exists());
    }
}

/// Returns whether a process has exited, possibly without having been waited for.
fn has_ended(pid: Pid) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero()));
    stat.map_or(true, |stat| stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('Z')))
}

#[test]
fn second_signal_ends_at_once() {
    let job = Job::new();
    let run = job.train(Some(2), "asked", 100_000_000);
    wait_for_training(&job.work_dir("asked"));
    let [other, asked] = [0, 1].map(|rank| rank_of(run.pid(), rank));
    // The stopped rank cannot agree to anything, so the first signal alone ends nothing.
    kill_process(other, Signal::STOP).unwrap();
    let start = Instant::now();
    while !has_ended(asked) {
        kill_process(asked, Signal::TERM).unwrap();
        std::thread::sleep(Duration::from_millis(20));
        assert!(start.elapsed() < DEADLINE, "still running");
    }
    kill_process(other, Signal::CONT).unwrap();
    assert_eq!(run.end().code(), Some(128 + 15));
}

/// On a terminal a progress bar replaces the lines for every tenth iteration.
#[test]
fn terminal_shows_a_progress_bar() {
    let job = Job::new();
    let run = |terminal: bool| {
        let mut command = Command::new(RUNNER);
        command
            .args(["train", job.config.to_str().unwrap(), "--work-dir"])
            .arg(job.work_dir(if terminal { "bar" } else { "lines" }));
        if terminal {
            command.env("RUNNER_TERMINAL", "1");
        }
        let output = command.stdin(Stdio::null()).output().unwrap();
        assert!(output.status.success());
        String::from_utf8(output.stdout).unwrap()
    };
    let (seen, piped) = (run(true), run(false));
    assert!(seen.contains("] 120/120  loss ") && seen.contains('\r'), "{seen:?}");
    assert!(!seen.contains("Iter(train)"), "{seen}");
    assert!(piped.contains("Iter(train) [120/120]") && !piped.contains('\r'), "{piped}");
    // The log has every line in both cases.
    for name in ["bar", "lines"] {
        assert_eq!(log(&job.work_dir(name)).matches("Iter(train) [120/120]").count(), 1, "{name}");
    }
}
