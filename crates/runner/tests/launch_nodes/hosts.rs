//! Launchers on hosts of their own, as namespaces on one switch.
//!
//! A host has its own network, name and processes; the latter, because ranks that see one another's
//! processes take each other for neighbours on one machine, and would speak through its memory.
//!
//! Needs root and iproute2. The switch is a bridge in a namespace of its own, so nothing of this machine's
//! network is touched, and all is gone when the test is over.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use super::{Launcher, OwnStore, RUNNER, Reader, SOON, this};

/// Names of our namespaces begin so, followed by the process that made them.
const PREFIX: &str = "runner-";
const PORT: u16 = 29500;

/// The hosts; gone on drop.
struct Hosts {
    name: String,
    count: usize,
}

fn ip(args: &str) -> Result<(), String> {
    run("ip", args)
}

fn run(program: &str, args: &str) -> Result<(), String> {
    let mut command = Command::new(program);
    command.args(args.split(' ')).stdin(Stdio::null());
    let output = command.output().map_err(|error| format!("{program}: {error}"))?;
    let text = String::from_utf8_lossy(&output.stderr);
    if output.status.success() { Ok(()) } else { Err(format!("{program} {args}: {text}")) }
}

/// Removes what a test that was killed has left.
fn sweep() {
    for entry in fs::read_dir("/run/netns").into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let pid = name.strip_prefix(PREFIX).and_then(|rest| rest.split('-').next());
        if pid.is_some_and(|pid| !Path::new(&format!("/proc/{pid}")).exists()) {
            drop(ip(&format!("netns del {name}")));
        }
    }
}

impl Hosts {
    fn up(count: usize) -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        sweep();
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let hosts = Self { name: format!("{PREFIX}{}-{number}", std::process::id()), count };
        hosts.wire().unwrap();
        hosts
    }

    fn wire(&self) -> Result<(), String> {
        let name = &self.name;
        ip(&format!("netns add {name}"))?;
        ip(&format!("-n {name} link add eth0 type bridge"))?;
        ip(&format!("-n {name} link set eth0 up"))?;
        for host in 0..self.count {
            let (space, port) = (self.space(host), format!("p{host}"));
            ip(&format!("netns add {space}"))?;
            ip(&format!("-n {space} link set lo up"))?;
            ip(&format!("-n {space} link add eth0 type veth peer name {port} netns {name}"))?;
            ip(&format!("-n {space} addr add {}/24 dev eth0", addr(host)))?;
            ip(&format!("-n {space} addr add {}/64 dev eth0 nodad", addr6(host)))?;
            ip(&format!("-n {space} link set eth0 up"))?;
            ip(&format!("-n {name} link set {port} master eth0 up"))?;
        }
        run("unshare", "--pid --fork --kill-child --mount-proc --uts true")
    }

    /// A program on a host; gone with all it has started when the command's process is.
    fn command(&self, host: usize, program: &str) -> Command {
        let mut command = Command::new("ip");
        command
            .args(["netns", "exec", &self.space(host)])
            .args(["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--uts"])
            .args(["sh", "-c", r#"echo "$0" >/proc/sys/kernel/hostname && exec "$@""#])
            .args([&format!("h{host}"), program]);
        command
    }

    fn space(&self, host: usize) -> String {
        format!("{}-h{host}", self.name)
    }

    /// A launcher on a host, with two ranks.
    fn launch(&self, host: usize, nodes: &str, role: &str, restarts: u32) -> Launcher {
        let command = self.command(host, &this().get_program().to_string_lossy());
        Launcher::start(command, nodes, 2, &format!("role {role}"), restarts)
    }

    /// A launcher on every host.
    fn launch_all(&self, addr: &str, role: &str, restarts: u32) -> Vec<Launcher> {
        let nodes = |host| format!("{} {host} {addr} {PORT}", self.count);
        (0..self.count).map(|host| self.launch(host, &nodes(host), role, restarts)).collect()
    }

    /// From here on the host is silent, with its link up; or again not.
    fn cut(&self, host: usize, cut: bool) {
        let state = if cut { 0 } else { 3 };
        run("bridge", &format!("-n {} link set dev p{host} state {state}", self.name)).unwrap();
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        (0..self.count).for_each(|host| drop(ip(&format!("netns del {}", self.space(host)))));
        drop(ip(&format!("netns del {}", self.name)));
    }
}

fn addr(host: usize) -> String {
    format!("10.77.1.{}", 10 + host)
}

fn addr6(host: usize) -> String {
    format!("fd77::{}", 10 + host)
}

fn all_done(launchers: &mut [Launcher], ranks: usize, attempt: u32) {
    let codes: Vec<_> = launchers.iter_mut().map(Launcher::wait).collect();
    let texts: Vec<_> = launchers.iter().map(|launcher| launcher.reader.text()).collect();
    let text = texts.join("\n");
    assert!(codes.iter().all(|&code| code == 0), "{codes:?}\n{text}");
    for rank in 0..ranks {
        let done = format!("done {rank} of {ranks} attempt {attempt}");
        assert!(text.contains(&done), "{done}\n{text}");
    }
}

#[test]
#[ignore = "needs root and iproute2: network namespaces"]
fn two_and_three_hosts_do_their_work() {
    for (count, master) in [(2, addr(0)), (3, addr(0)), (2, addr6(0))] {
        let hosts = Hosts::up(count);
        let mut launchers = hosts.launch_all(&master, "20 20 30", 0);
        all_done(&mut launchers, 2 * count, 0);
    }
}

#[test]
#[ignore = "needs root and iproute2: network namespaces"]
fn a_cut_cable_ends_every_rank_and_is_named() {
    for victim in [0, 1] {
        let hosts = Hosts::up(2);
        let mut launchers = hosts.launch_all(&addr(0), "1000000 0 3", 0);
        launchers.iter().for_each(|launcher| launcher.reader.await_lines("of 4 attempt 0", 2));
        hosts.cut(victim, true);
        for launcher in &mut launchers {
            assert_ne!(launcher.wait(), 0);
        }
        let text = launchers[1 - victim].reader.text();
        let (first, last) = (2 * victim, 2 * victim + 1);
        let whose = format!("{}, ranks {first} to {last})", addr(victim));
        assert!(text.contains(&whose), "{whose}\n{text}");
    }
}

#[test]
#[ignore = "needs root and iproute2: network namespaces"]
fn a_mended_cable_and_a_restart_finish_the_job() {
    let hosts = Hosts::up(3);
    let mut launchers = hosts.launch_all(&addr(0), "1000000 5 3", 1);
    launchers.iter().for_each(|launcher| launcher.reader.await_lines("of 6 attempt 0", 2));
    hosts.cut(1, true);
    for host in [0, 2] {
        launchers[host].reader.await_lines("restart 1 of 1", 1);
    }
    hosts.cut(1, false);
    all_done(&mut launchers, 6, 1);
}

#[test]
#[ignore = "needs root and iproute2: network namespaces"]
fn an_elastic_job_goes_on_without_a_host_that_was_cut_off() {
    let hosts = Hosts::up(3);
    let nodes = format!("elastic 2 3 {} {PORT}", addr(0));
    let mut launchers: Vec<_> =
        (0..3).map(|host| hosts.launch(host, &nodes, "1000000 5 3", 1)).collect();
    launchers.iter().for_each(|launcher| launcher.reader.await_lines("of 6 attempt 0", 2));
    hosts.cut(2, true);
    let mut cut_off = launchers.pop().unwrap();
    all_done(&mut launchers, 4, 1);
    assert_ne!(cut_off.wait(), 0);
}

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
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let reader = Reader::new(&mut child);
        Launcher { child, reader }
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
    let store = OwnStore::start(training.hosts.command(count, RUNNER), "29400");
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
    assert!(cut_off.reader.text().contains("out of reach"), "{}", cut_off.reader.text());
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
