//! Training over hosts as network namespaces: a host is disconnected, and the job finishes from its
//! last checkpoint.
//!
//! Needs root and iproute2 (network namespaces).

#[path = "../../../launch/tests/it/common/network.rs"]
mod network;
#[path = "../../../launch/tests/it/common/process.rs"]
mod process;

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use network::{Hosts, addr};
use process::{Launcher, SOON, StoreProcess};

const RUNNER: &str = env!("CARGO_BIN_EXE_runner");

/// The smallest model of the zoo, with half parameters and checkpoints inside of epochs.
const MLP: &str = r#"
model = { type = "Mlp", in_features = 64, hidden = [16], num_classes = 10 }
train_dataloader = { batch_size = 64, dataset = { type = "Digits" } }
train_cfg = { by_epoch = false, max_iters = 1000000 }
default_hooks.checkpoint = { by_epoch = false, interval = 20, max_keep_ckpts = 3 }
env_cfg.dist_cfg.timeout = "3s"
[optim_wrapper]
type = "AmpOptimWrapper"
dtype = "float16"
loss_scale = "dynamic"
optimizer = { type = "SGD", lr = 0.05, momentum = 0.9 }
"#;

/// The job of `resnet_digits.toml`, with many more epochs.
fn digits() -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs/resnet_digits.toml");
    let mut text = fs::read_to_string(path).unwrap();
    for (from, to) in [
        ("max_epochs = 15", "max_epochs = 10000"),
        ("interval = 5, max", "interval = 1, max"),
        ("[randomness]", "[env_cfg]\ndist_cfg = { timeout = \"5s\" }\n\n[randomness]"),
    ] {
        assert!(text.contains(from), "the configuration has another {from}");
        text = text.replace(from, to);
    }
    text
}

/// A training by `runner launch` and `runner train`, on hosts that share a directory.
struct Training {
    dir: tempfile::TempDir,
    hosts: Hosts,
    config: String,
}

impl Training {
    fn new(hosts: Hosts, config: &str) -> Self {
        let training = Self { dir: tempfile::tempdir().unwrap(), hosts, config: config.to_owned() };
        fs::write(training.path("job.toml"), config).unwrap();
        training
    }

    fn path(&self, name: &str) -> String {
        self.dir.path().join(name).display().to_string()
    }

    /// Starts a launcher on a host, whose two ranks resume from the newest checkpoint.
    fn launch(&self, host: usize, flags: &str) -> Launcher {
        let mut command = self.hosts.command(host, RUNNER);
        command
            .args(["launch"])
            .args(["--nproc-per-node=2", "--shutdown-timeout=5", "--max-restarts=1"])
            .arg(
                "--rdzv-conf=join_timeout=60,last_call_timeout=4,keep_alive_interval=0.5,\
                  keep_alive_max_attempt=10",
            )
            .args(flags.split(' '))
            .args(["--", "train", &self.path("job.toml"), "--resume"])
            .args(["--work-dir", &self.path("work")]);
        Launcher::start(&mut command)
    }

    /// Number in the name of the newest checkpoint.
    fn newest(&self) -> Option<usize> {
        let name = fs::read_to_string(self.path("work/last_checkpoint")).ok()?;
        name.trim().rsplit('_').next()?.parse().ok()
    }

    /// Waits for a checkpoint written by two ranks on each host.
    fn await_checkpoint(&self, launchers: &[Launcher]) {
        let start = Instant::now();
        let all = format!("\"world_size\":{}", 2 * launchers.len());
        let written = || -> Option<bool> {
            let name = fs::read_to_string(self.path("work/last_checkpoint")).ok()?;
            let state = self.path(&format!("work/{}/state.json", name.trim()));
            let state = fs::read_to_string(state).ok()?;
            Some(state.split_whitespace().collect::<String>().contains(&all))
        };
        while written() != Some(true) {
            let texts: Vec<_> = launchers.iter().map(|launcher| launcher.reader.text()).collect();
            assert!(start.elapsed() < SOON, "no checkpoint\n{}", texts.join("\n"));
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Shortens the job, so that ranks started from now on finish soon.
    fn shorten(&self) {
        let newest = self.newest().unwrap();
        let config = self
            .config
            .replace("max_iters = 1000000", &format!("max_iters = {}", newest + 80))
            .replace("max_epochs = 10000", &format!("max_epochs = {}", newest + 3));
        assert_ne!(config, self.config);
        fs::write(self.path("job.toml"), config).unwrap();
    }

    /// Checks that all launchers succeed after resuming from a checkpoint.
    fn end(&self, launchers: &mut [Launcher]) {
        let codes: Vec<_> = launchers.iter_mut().map(Launcher::wait).collect();
        let texts: Vec<_> = launchers.iter().map(|launcher| launcher.reader.text()).collect();
        let text = texts.join("\n");
        assert!(codes.iter().all(|&code| code == 0), "{codes:?}\n{text}");
        let resumed = text.lines().find(|line| line.contains("resumed from "));
        let iter = resumed.and_then(|line| line.rsplit("iteration ").next()?.parse::<usize>().ok());
        assert!(iter.is_some_and(|iter| iter > 0), "{text}");
    }
}

/// Trains on `count` hosts; the last host is disconnected, and named; one restart finishes the job.
fn fixed_job_finishes_after_a_disconnect(count: usize, config: &str) {
    let hosts = Hosts::up(count);
    let training = Training::new(hosts, config);
    let flags =
        |host| format!("--nnodes={count} --node-rank={host} --master-addr={} --role=x", addr(0));
    let mut launchers: Vec<_> =
        (0..count).map(|host| training.launch(host, &flags(host))).collect();
    training.await_checkpoint(&launchers);
    let victim = count - 1;
    training.hosts.cut(victim, true);
    for launcher in &launchers[..victim] {
        launcher.reader.await_lines("restart 1 of 1", 1);
        let whose = format!("{}, ranks {} to {})", addr(victim), 2 * victim, 2 * victim + 1);
        assert!(launcher.reader.text().contains(&whose), "{whose}\n{}", launcher.reader.text());
    }
    training.shorten();
    training.hosts.cut(victim, false);
    training.end(&mut launchers);
}

/// Trains on `count` hosts, with the control store on a further one; the first is disconnected, and
/// the others continue without it.
fn elastic_job_finishes_after_a_disconnect(count: usize, config: &str) {
    let hosts = Hosts::up(count + 1);
    let training = Training::new(hosts, config);
    let store = StoreProcess::start(training.hosts.command(count, RUNNER), "29400");
    let flags = format!("--nnodes=1:{count} --rdzv-endpoint={}:{}", addr(count), store.port);
    let mut launchers: Vec<_> = (0..count).map(|host| training.launch(host, &flags)).collect();
    training.await_checkpoint(&launchers);
    training.hosts.cut(0, true);
    training.shorten();
    let mut cut_off = launchers.remove(0);
    training.end(&mut launchers);
    let (was, is) = (2 * count, 2 * count - 2);
    let text = launchers.iter().map(|launcher| launcher.reader.text()).collect::<String>();
    assert!(
        text.contains(&format!("{was} ranks wrote this checkpoint, and {is} resume")),
        "{text}"
    );
    assert_ne!(cut_off.wait(), 0);
    assert!(cut_off.reader.text().contains("unreachable"), "{}", cut_off.reader.text());
}

#[test]
#[ignore = "needs root and iproute2: network namespaces"]
fn training_over_hosts_survives_a_disconnect() {
    fixed_job_finishes_after_a_disconnect(2, MLP);
}

#[test]
#[ignore = "needs root and iproute2: network namespaces"]
fn elastic_training_resumes_without_the_lost_host() {
    elastic_job_finishes_after_a_disconnect(2, MLP);
}

#[test]
#[ignore = "takes minutes: `resnet_digits.toml`, and three hosts"]
fn nightly_longer_trainings_over_hosts_survive_disconnects() {
    fixed_job_finishes_after_a_disconnect(3, MLP);
    elastic_job_finishes_after_a_disconnect(3, MLP);
    for count in [2, 3] {
        fixed_job_finishes_after_a_disconnect(count, &digits());
        elastic_job_finishes_after_a_disconnect(count, &digits());
    }
}
