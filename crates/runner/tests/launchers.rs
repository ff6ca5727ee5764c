//! The same training under every launcher: `runner launch`, `mpirun`, `srun` on a cluster of two
//! nodes, `torchrun` and `torch.distributed.launch` give the same parameters, bit for bit.
//!
//! A launcher that is not installed is said to be ignored. Slurm needs root (`tests/testbed`);
//! `TORCH_PYTHON` names a Python that can import torch, otherwise it is `python3`.

#![cfg(feature = "candle")]
#![expect(clippy::unwrap_used, reason = "a test")]
#![expect(clippy::print_stderr, reason = "a test says what it leaves out")]

#[path = "common/slurm.rs"]
mod slurm;

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use slurm::Cluster;

const RUNNER: &str = env!("CARGO_BIN_EXE_runner");
const RANKS: &str = "4";

/// The digits' job, shortened to an epoch.
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

    /// Trains under a launcher, whose words come before those of the runner.
    fn train(&self, name: &str, launcher: &[&str], envs: &[(&str, &str)], more: &[&str]) {
        // What hangs is ended.
        let mut command = Command::new("timeout");
        command
            .args(["--kill-after=10", "300"])
            .args(launcher)
            .args(["train"])
            .arg(&self.config)
            .arg("--work-dir");
        command.arg(self.work_dir(name)).args(more).envs(envs.iter().copied());
        for variable in ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"] {
            command.env_remove(variable);
        }
        // As `runner launch` and torchrun have it, for those that have no opinion.
        command.env("RAYON_NUM_THREADS", "1").env("OMP_NUM_THREADS", "1");
        let output = command.stdin(Stdio::null()).output().unwrap();
        let (out, err) = (text(&output.stdout), text(&output.stderr));
        assert!(output.status.success(), "{name}: {}\n{out}{err}", output.status);
    }

    fn work_dir(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// The parameters and the optimizer's state at the end.
    fn result(&self, name: &str) -> [Vec<u8>; 2] {
        let end = self.work_dir(name).join("epoch_1");
        ["model.safetensors", "optimizer.safetensors"]
            .map(|file| std::fs::read(end.join(file)).unwrap())
    }

    fn assert_same(&self, name: &str) {
        assert!(self.result(name) == self.result("ours"), "{name} trained something else");
    }
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Whether a program is there, by a harmless call of it; says why a part of the test is left out.
fn is_there(command: &[&str]) -> bool {
    let mut program = Command::new(command[0]);
    let asked = program.args(&command[1..]).stdout(Stdio::null()).stderr(Stdio::null()).status();
    let there = asked.is_ok_and(|status| status.success());
    if !there {
        eprintln!("ignored: `{}` does not work here", command.join(" "));
    }
    there
}

#[test]
fn every_launcher_trains_the_same() {
    let job = Job::new();
    job.train("ours", &[RUNNER, "launch", "--nproc_per_node", RANKS, "--"], &[], &[]);
    under_mpi(&job);
    under_slurm(&job);
    under_torchrun(&job);
}

fn under_mpi(job: &Job) {
    for (name, launcher) in [
        ("openmpi", &["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe"][..]),
        ("mpich", &["mpiexec.mpich"]),
    ] {
        if is_there(&[launcher[0], "--version"]) {
            let ranks = [launcher, &["-n", RANKS, RUNNER]].concat();
            job.train(name, &ranks, &[], &[]);
            job.assert_same(name);
        }
    }
}

fn under_slurm(job: &Job) {
    let Some(cluster) = Cluster::start(&["--gpus", "2"]) else { return };
    let srun = [
        "srun",
        "--ntasks=4",
        "--ntasks-per-node=2",
        "--gres=gpu:2",
        "--kill-on-bad-exit=1",
        RUNNER,
    ];
    job.train("slurm", &srun, &[("SLURM_CONF", &cluster.conf())], &["--launcher", "slurm"]);
    job.assert_same("slurm");
}

fn under_torchrun(job: &Job) {
    let python = std::env::var("TORCH_PYTHON").unwrap_or_else(|_| "python3".into());
    if !is_there(&[&python, "-c", "import torch"]) {
        return;
    }
    for (name, module) in [
        ("torchrun", &["torch.distributed.run", "--standalone"][..]),
        ("launch", &["torch.distributed.launch", "--use-env", "--master-port", "29533"]),
    ] {
        let start: Vec<_> = [&[&python[..], "-m"], module, &["--nproc-per-node", RANKS]].concat();
        job.train(name, &[&start[..], &["--no-python", RUNNER]].concat(), &[], &[]);
        job.assert_same(name);
    }
}
