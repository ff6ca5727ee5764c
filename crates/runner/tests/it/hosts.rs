//! Trainings over hosts of their own: a host is cut off, and the job ends from its last checkpoint.
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

/// The smallest job of the zoo: half parameters, checkpoints inside of an epoch.
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

/// The digits' own job, with many epochs before it ends.
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

/// A training by `runner launch` and `runner train`, on hosts that share a folder.
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

    /// A launcher on a host, whose two ranks go on from the newest checkpoint.
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

    /// The number in the name of the newest checkpoint.
    fn newest(&self) -> Option<usize> {
        let name = fs::read_to_string(self.path("work/last_checkpoint")).ok()?;
        name.trim().rsplit('_').next()?.parse().ok()
    }

    /// Waits for a checkpoint that two ranks on each host have written.
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

    /// The ranks that start from now on have little left to do.
    fn shorten(&self) {
        let newest = self.newest().unwrap();
        let config = self
            .config
            .replace("max_iters = 1000000", &format!("max_iters = {}", newest + 80))
            .replace("max_epochs = 10000", &format!("max_epochs = {}", newest + 3));
        assert_ne!(config, self.config);
        fs::write(self.path("job.toml"), config).unwrap();
    }

    /// All end well, having gone on from a checkpoint.
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

/// Ranks train on `count` hosts; the last host is cut off, and named; one restart finishes the job.
fn a_fixed_job_is_cut_and_ends(count: usize, config: &str) {
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

/// Ranks train on `count` hosts, whose control store is on a further one; the first is cut off; the
/// others go on without it.
fn an_elastic_job_is_cut_and_ends(count: usize, config: &str) {
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
    assert!(text.contains(&format!("{was} ranks wrote this checkpoint, and {is} go on")), "{text}");
    assert_ne!(cut_off.wait(), 0);
    assert!(cut_off.reader.text().contains("unreachable"), "{}", cut_off.reader.text());
}

#[test]
#[ignore = "needs root and iproute2: network namespaces"]
fn a_training_over_hosts_ends_in_spite_of_a_cut_cable() {
    a_fixed_job_is_cut_and_ends(2, MLP);
}

#[test]
#[ignore = "needs root and iproute2: network namespaces"]
fn an_elastic_training_goes_on_from_its_checkpoint_without_a_host() {
    an_elastic_job_is_cut_and_ends(2, MLP);
}

#[test]
#[ignore = "takes minutes: the digits' own job, and three hosts"]
fn nightly_longer_trainings_over_hosts_end_in_spite_of_cut_cables() {
    a_fixed_job_is_cut_and_ends(3, MLP);
    an_elastic_job_is_cut_and_ends(3, MLP);
    for count in [2, 3] {
        a_fixed_job_is_cut_and_ends(count, &digits());
        an_elastic_job_is_cut_and_ends(count, &digits());
    }
}
