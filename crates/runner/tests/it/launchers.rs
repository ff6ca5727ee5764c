//! The same training under every launcher: `runner launch`, `mpirun`, `srun` on a cluster of two
//! nodes, `torchrun` and `torch.distributed.launch` yield the same parameters, bit for bit, and
//! each line has the prefix of its rank.
//!
//! Slurm needs root (`tests/testbed`); `TORCH_PYTHON` is a Python that can import torch, by default
//! `python3`.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::common::slurm::Cluster;

const RUNNER: &str = env!("CARGO_BIN_EXE_runner");
const RANKS: &str = "4";

/// The job of `resnet_digits.toml`, shortened to one epoch.
struct Job {
    dir: tempfile::TempDir,
    config: PathBuf,
}

impl Job {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let text = std::fs::read_to_string(root().join("configs/resnet_digits.toml")).unwrap();
        let mut short = text;
        for (from, to) in [
            ("max_epochs = 15", "max_epochs = 1"),
            ("val_interval = 5", "val_interval = 1"),
            ("interval = 5, max", "interval = 1, max"),
        ] {
            assert!(short.contains(from), "the configuration has another {from}");
            short = short.replace(from, to);
        }
        let config = dir.path().join("digits.toml");
        std::fs::write(&config, short).unwrap();
        Self { dir, config }
    }

    /// Runs `runner train` under a launcher, whose arguments come before those of the runner;
    /// returns whether it succeeded, standard output and standard error.
    fn run(&self, name: &str, launcher: &Launcher<'_>, more: &[&str]) -> (bool, String, String) {
        // Terminates a run that hangs.
        let mut command = Command::new("timeout");
        command
            .args(["--kill-after=10", "300"])
            .args(launcher.words)
            .args(["train"])
            .arg(&self.config)
            .arg("--work-dir")
            .arg(self.work_dir(name))
            .args(launcher.more)
            .args(more)
            .envs(launcher.envs.iter().copied());
        for variable in ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"] {
            command.env_remove(variable);
        }
        // Set by `runner launch` and torchrun, but not by other launchers.
        command.env("RAYON_NUM_THREADS", "1").env("OMP_NUM_THREADS", "1");
        let output = command.stdin(Stdio::null()).output().unwrap();
        (output.status.success(), text(&output.stdout), text(&output.stderr))
    }

    /// Trains under a launcher. Every line has the rank's prefix, and there is no progress bar.
    fn train(&self, name: &str, launcher: &Launcher<'_>) {
        let (success, out, err) = self.run(name, launcher, &[]);
        assert!(success, "{name}:\n{out}{err}");
        let labelled = |line: &str| line.starts_with("[rank 0] ") && !line.contains('\x1b');
        assert!(out.contains("Epoch(val)") && out.lines().all(labelled), "{name}:\n{out:?}");
    }

    /// Runs an invalid configuration under a launcher: the error names a rank.
    fn fail(&self, name: &str, launcher: &Launcher<'_>) {
        let mistake = ["--cfg-options", "train_cfg.max_epochs=no"];
        // On a busy machine MPICH's launcher may exit before it has forwarded the output of the
        // ranks.
        let (success, out, err) = (0..5)
            .map(|_| self.run(name, launcher, &mistake))
            .find(|(success, out, err)| *success || !(out.is_empty() && err.is_empty()))
            .expect("the launcher passes on what ranks write");
        let lines: Vec<_> = err.lines().filter(|line| line.contains("error: --cfg")).collect();
        let labelled = |line: &&str| line.starts_with("[rank ") && line.contains("] error: --cfg");
        assert!(!success && !lines.is_empty() && lines.iter().all(labelled), "{name}:\n{out}{err}");
    }

    fn work_dir(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Returns the final parameters and optimizer state.
    fn result(&self, name: &str) -> [Vec<u8>; 2] {
        let end = self.work_dir(name).join("epoch_1");
        ["model.safetensors", "optimizer.safetensors"]
            .map(|file| std::fs::read(end.join(file)).unwrap())
    }
}

/// A launcher, with the arguments and variables that `runner train` needs under it.
#[derive(Default)]
struct Launcher<'a> {
    words: &'a [&'a str],
    envs: &'a [(&'a str, &'a str)],
    more: &'a [&'a str],
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Compares training under our launcher with that under another one.
fn assert_trains_the_same(name: &str, launcher: &Launcher<'_>) {
    let job = Job::new();
    let ours = [RUNNER, "launch", "--nproc_per_node", RANKS, "--"];
    job.train("ours", &Launcher { words: &ours, ..Launcher::default() });
    job.train(name, launcher);
    job.fail(name, launcher);
    assert!(job.result(name) == job.result("ours"), "{name} trained something else");
}

#[test]
#[ignore = "needs Debian's openmpi-bin"]
fn open_mpi_trains_the_same() {
    let mpirun = ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-n", RANKS, RUNNER];
    assert_trains_the_same("openmpi", &Launcher { words: &mpirun, ..Launcher::default() });
}

#[test]
#[ignore = "needs Debian's mpich"]
fn mpich_trains_the_same() {
    let mpiexec = ["mpiexec.mpich", "-n", RANKS, RUNNER];
    assert_trains_the_same("mpich", &Launcher { words: &mpiexec, ..Launcher::default() });
}

#[test]
#[ignore = "needs root, Slurm and munge"]
fn slurm_trains_the_same() {
    let cluster = Cluster::start(&["--gpus", "2"]);
    let srun = [
        "srun",
        "--ntasks=4",
        "--ntasks-per-node=2",
        "--gres=gpu:2",
        "--kill-on-bad-exit=1",
        RUNNER,
    ];
    let (conf, more) = (cluster.conf(), ["--launcher", "slurm"]);
    let envs = [("SLURM_CONF", &*conf)];
    assert_trains_the_same("slurm", &Launcher { words: &srun, envs: &envs, more: &more });
}

#[test]
#[ignore = "needs PyTorch: TORCH_PYTHON, or python3, imports torch"]
fn torchrun_trains_the_same() {
    under_torch("torchrun", &["torch.distributed.run", "--standalone"]);
}

#[test]
#[ignore = "needs PyTorch: TORCH_PYTHON, or python3, imports torch"]
fn torch_distributed_launch_trains_the_same() {
    let module = ["torch.distributed.launch", "--use-env", "--master-port", "29533"];
    under_torch("launch", &module);
}

fn under_torch(name: &str, module: &[&str]) {
    let python = std::env::var("TORCH_PYTHON").unwrap_or_else(|_| "python3".into());
    let start = [&[&python[..], "-m"], module, &["--nproc-per-node", RANKS]].concat();
    let words = [&start[..], &["--no-python", RUNNER]].concat();
    assert_trains_the_same(name, &Launcher { words: &words, ..Launcher::default() });
}

#[test]
#[ignore = "needs PyTorch: TORCH_PYTHON, or python3, imports torch"]
fn torchrun_names_the_killed_rank_as_the_cause() {
    let python = std::env::var("TORCH_PYTHON").unwrap_or_else(|_| "python3".into());
    let job = Job::new();
    // Rank 1 is killed during training; rank 0 reports it before torchrun detects the exit.
    // torchrun replaces `$$` by `$`.
    let script = format!(
        "[ $RANK = 1 ] && ( until grep -qs 'Epoch(train)' {}/*/*.log; do sleep 0.1; done
        kill -KILL $$$$ ) & exec {RUNNER} \"$@\"",
        job.work_dir("killed").display()
    );
    let words = [
        &*python,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "--monitor-interval=3",
        "--no-python",
        "sh",
        "-c",
        &script,
        "sh",
    ];
    let more = ["--cfg-options", "train_cfg.max_epochs=10000"];
    let launcher = Launcher { words: &words, ..Launcher::default() };
    let (success, out, err) = job.run("killed", &launcher, &more);
    assert!(!success && err.contains("(pid"), "{out}{err}");
    let (others, cause) = err.split_once("Root Cause").unwrap();
    // The error of rank 0 is in torchrun's own summary.
    assert!(others.split("Failures:").nth(1).unwrap().contains("died"), "{err}");
    let rank = cause.lines().find(|line| line.contains(" rank ")).unwrap();
    assert!(rank.contains(": 1 ("), "{err}");
}
