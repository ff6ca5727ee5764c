//! Launchers on hosts of their own, as network namespaces on one switch.
//!
//! Needs root and iproute2; a test that lacks them says that it is ignored. The switch is a bridge in a
//! namespace of its own, so nothing of this machine's network is touched, and all is gone when the
//! test is over.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use super::{Launcher, this};

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
    /// `None`, after saying why, if there can be none here.
    fn up(count: usize) -> Option<Self> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        sweep();
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let hosts = Self { name: format!("{PREFIX}{}-{number}", std::process::id()), count };
        match hosts.wire() {
            Ok(()) => Some(hosts),
            Err(why) => {
                eprintln!("ignored: no network namespaces here: {why}");
                None
            }
        }
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
        Ok(())
    }

    fn space(&self, host: usize) -> String {
        format!("{}-h{host}", self.name)
    }

    /// A launcher on a host, with two ranks.
    fn launch(&self, host: usize, nodes: &str, role: &str, restarts: u32) -> Launcher {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.space(host)]).arg(this().get_program());
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
fn two_and_three_hosts_do_their_work() {
    for (count, master) in [(2, addr(0)), (3, addr(0)), (2, addr6(0))] {
        let Some(hosts) = Hosts::up(count) else { return };
        let mut launchers = hosts.launch_all(&master, "20 20 30", 0);
        all_done(&mut launchers, 2 * count, 0);
    }
}

#[test]
fn a_cut_cable_ends_every_rank_and_is_named() {
    for victim in [0, 1] {
        let Some(hosts) = Hosts::up(2) else { return };
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
fn a_mended_cable_and_a_restart_finish_the_job() {
    let Some(hosts) = Hosts::up(3) else { return };
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
fn an_elastic_job_goes_on_without_a_host_that_was_cut_off() {
    let Some(hosts) = Hosts::up(3) else { return };
    let nodes = format!("elastic 2 3 {} {PORT}", addr(0));
    let mut launchers: Vec<_> =
        (0..3).map(|host| hosts.launch(host, &nodes, "1000000 5 3", 1)).collect();
    launchers.iter().for_each(|launcher| launcher.reader.await_lines("of 6 attempt 0", 2));
    hosts.cut(2, true);
    let mut cut_off = launchers.pop().unwrap();
    all_done(&mut launchers, 4, 1);
    assert_ne!(cut_off.wait(), 0);
}
