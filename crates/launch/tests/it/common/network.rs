//! Simulated hosts for a test: namespaces connected by a switch.
//!
//! A host has its own network, name and process namespace. Without the latter, ranks would see each
//! other's processes, take each other for neighbours on one machine and communicate through its
//! memory.
//!
//! Needs root and iproute2. The switch is a bridge in its own namespace, so this machine's network
//! is unchanged, and the hosts are removed after the test.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

/// Prefix of the namespaces' names, followed by the process id.
const PREFIX: &str = "launch-";

/// The hosts; removed on drop.
pub(crate) struct Hosts {
    name: String,
    pub(crate) count: usize,
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

/// Removes the namespaces of killed tests.
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
    pub(crate) fn up(count: usize) -> Self {
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

    /// Runs a program on a host; killing the command's process kills it and all its children.
    pub(crate) fn command(&self, host: usize, program: &str) -> Command {
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

    /// Cuts the host off without taking its link down, or reconnects it.
    pub(crate) fn cut(&self, host: usize, cut: bool) {
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

pub(crate) fn addr(host: usize) -> String {
    format!("10.77.1.{}", 10 + host)
}

pub(crate) fn addr6(host: usize) -> String {
    format!("fd77::{}", 10 + host)
}
