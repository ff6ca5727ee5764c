//! Several hosts, as network namespaces on one switch: killed processes, cut cables, unplugged
//! links, lost and slow packets; and how many bytes a host sends.
//!
//! Needs root, iproute2 and iptables. The switch is a bridge in its own namespace, so this
//! machine's network is not changed, and everything is removed when the test ends.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use collective::{ProcessGroup, ReduceOp, Result, store::TcpStoreServer};

use super::SOON;
use crate::common::{Dir, Role, spawn, wait_for};

/// Prefix of our namespaces' names; the id of the process that made them follows.
const PREFIX: &str = "collective-";

/// The hosts and the ranks on them, removed on drop.
struct Hosts {
    name: String,
    dir: Dir,
    ranks: Vec<Child>,
    store: Option<Child>,
}

fn run(program: &str, args: &str) -> std::result::Result<(), String> {
    let mut command = Command::new(program);
    command.args(args.split(' ')).stdin(Stdio::null());
    let output = command.output().map_err(|error| format!("{program}: {error}"))?;
    let text = String::from_utf8_lossy(&output.stderr);
    if output.status.success() { Ok(()) } else { Err(format!("{program} {args}: {text}")) }
}

/// Removes namespaces that a killed test has left.
fn sweep() {
    for entry in fs::read_dir("/run/netns").into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let pid = name.strip_prefix(PREFIX).and_then(|rest| rest.split('-').next());
        if pid.is_some_and(|pid| !Path::new(&format!("/proc/{pid}")).exists()) {
            drop(run("ip", &format!("netns del {name}")));
        }
    }
}

impl Hosts {
    /// As many hosts as ranks.
    fn up(world: usize) -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        sweep();
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("{PREFIX}{}-{number}", std::process::id());
        let hosts = Self { name, dir: Dir::new(), ranks: Vec::new(), store: None };
        hosts.wire(world).unwrap();
        hosts
    }

    fn wire(&self, world: usize) -> std::result::Result<(), String> {
        let name = &self.name;
        run("ip", &format!("netns add {name}"))?;
        run("ip", &format!("-n {name} link set lo up"))?;
        run("ip", &format!("-n {name} link add eth0 type bridge"))?;
        run("ip", &format!("-n {name} addr add 10.77.0.1/24 dev eth0"))?;
        run("ip", &format!("-n {name} link set eth0 up"))?;
        for rank in 0..world {
            let (host, port) = (self.host(rank), format!("p{rank}"));
            run("ip", &format!("netns add {host}"))?;
            run("ip", &format!("-n {host} link set lo up"))?;
            let peer = format!("type veth peer name {port} netns {name}");
            run("ip", &format!("-n {host} link add eth0 {peer}"))?;
            run("ip", &format!("-n {host} addr add 10.77.0.{}/24 dev eth0", 10 + rank))?;
            run("ip", &format!("-n {host} link set eth0 up"))?;
            run("ip", &format!("-n {name} link set {port} master eth0 up"))?;
        }
        Ok(())
    }

    fn host(&self, rank: usize) -> String {
        format!("{}-h{rank}", self.name)
    }

    fn spawn(&self, namespace: &str, role: &str) -> Child {
        let mut command = Command::new("ip");
        let exe = std::env::current_exe().unwrap();
        command.args(["netns", "exec", namespace]).arg(exe);
        spawn(command, role)
    }

    /// Starts the store on the switch and a rank on every host.
    fn start(&mut self, scenario: &str, world: usize, timeout: Duration) {
        self.start_over("tcp", scenario, world, 1, timeout);
    }

    /// Starts the store on the switch and `each` ranks on every host.
    fn start_over(
        &mut self,
        transport: &str,
        scenario: &str,
        world: usize,
        each: usize,
        timeout: Duration,
    ) {
        let (path, ms) = (self.dir.0.display().to_string(), timeout.as_millis());
        let role = format!("tcp::store tcp 0 1 {ms} - 0 {path}");
        self.store = Some(self.spawn(&self.name, &role));
        let port = self.file("report-0");
        fs::remove_file(self.dir.0.join("report-0")).unwrap();
        let rank = |rank| {
            let role =
                format!("tcp::{scenario} {transport} {rank} {world} {ms} 10.77.0.1 {port} {path}");
            self.spawn(&self.host(rank / each), &role)
        };
        self.ranks = (0..world).map(rank).collect();
    }

    fn file(&self, name: &str) -> String {
        wait_for(|| fs::read_to_string(self.dir.0.join(name)).ok(), name)
    }

    fn all_ready(&self) {
        let read = |name, rank| fs::read_to_string(self.dir.0.join(format!("{name}-{rank}"))).ok();
        for rank in 0..self.ranks.len() {
            wait_for(
                || match read("report", rank) {
                    Some(report) => panic!("rank {rank}: {report}"),
                    None => read("ready", rank),
                },
                "all to be ready",
            );
        }
    }

    /// Drops all packets of the host; its link stays up.
    fn cut(&self, rank: usize) {
        run("bridge", &format!("-n {} link set dev p{rank} state 0", self.name)).unwrap();
    }

    /// Takes the host's link down.
    fn unplug(&self, rank: usize) {
        run("ip", &format!("-n {} link set p{rank} down", self.name)).unwrap();
    }

    /// Drops one in ten of the packets that reach the host.
    fn lose(&self, rank: usize) {
        let rule = "iptables -A INPUT -i eth0 -m statistic --mode random --probability 0.1 -j DROP";
        run("ip", &format!("netns exec {} {rule}", self.host(rank))).unwrap();
    }

    /// Delays the packets that the host sends.
    fn slow_down(&self, rank: usize) {
        let queue = "root tbf rate 40mbit burst 32kbit latency 400ms";
        run("tc", &format!("-n {} qdisc add dev eth0 {queue}", self.host(rank))).unwrap();
    }

    /// Checks that every other rank names the victim in time.
    fn named(&self, victim: usize, words: &str, within: Duration) {
        let start = Instant::now();
        for rank in (0..self.ranks.len()).filter(|&rank| rank != victim) {
            let report = self.file(&format!("report-{rank}"));
            assert!(report.contains(words), "rank {rank}: {report}");
        }
        assert!(start.elapsed() < within, "{:?}", start.elapsed());
    }

    fn all_done(&self) {
        for rank in 0..self.ranks.len() {
            assert_eq!(self.file(&format!("report-{rank}")), "done");
        }
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for child in self.ranks.iter_mut().chain(&mut self.store) {
            drop(child.kill());
            drop(child.wait());
        }
        (0..self.ranks.len().max(8)).for_each(|rank| {
            drop(run("ip", &format!("netns del {}", self.host(rank))));
        });
        drop(run("ip", &format!("netns del {}", self.name)));
    }
}

/// A store for the other hosts, until this process is killed.
pub(crate) fn serve(role: &Role) {
    let store = TcpStoreServer::bind("0.0.0.0:0".parse().unwrap()).unwrap();
    role.report(&store.port().to_string());
    std::thread::sleep(Duration::from_secs(600));
}

/// Runs operations and checks their results.
pub(crate) fn work_a_while(group: &ProcessGroup) -> Result<()> {
    let world = group.world_size();
    let sum = (0..world).sum::<usize>() as f32;
    for round in 0..40 {
        let mut x = vec![group.rank() as f32; if round % 2 == 0 { 3 } else { 100_000 }];
        group.all_reduce(&mut x, ReduceOp::Sum)?;
        assert!(x.iter().all(|&x| x == sum));
        group.broadcast(&mut x, round % world)?;
    }
    Ok(())
}

/// Elements of the all-reduce whose bytes are counted.
const COUNTED: usize = 1 << 20;

/// Runs an all-reduce and returns the bytes that this host has sent for it, as a multiple of the
/// buffer's.
pub(crate) fn bytes_sent(group: &ProcessGroup) -> Result<f64> {
    let mut x = vec![group.rank() as f32; COUNTED];
    let sent = || {
        group.barrier()?;
        let table = fs::read_to_string("/proc/net/dev").unwrap();
        let (_, columns) = table.split_once("eth0:").unwrap();
        // After eight columns of received data.
        let sent: u64 = columns.split_whitespace().nth(8).unwrap().parse().unwrap();
        group.barrier().map(|()| sent)
    };
    // The first call allocates memory that is kept.
    group.all_reduce(&mut x, ReduceOp::Max)?;
    let before = sent()?;
    group.all_reduce(&mut x, ReduceOp::Sum)?;
    let bytes = sent()? - before;
    assert_eq!(x[1], ((group.world_size() - 1) * group.world_size()) as f32);
    Ok(bytes as f64 / size_of_val(&x[..]) as f64)
}

#[test]
#[ignore = "needs root and iproute2: network namespaces"]
fn an_all_reduce_sends_each_hosts_data_once_for_all_its_ranks() {
    for (machines, each, at_most) in
        [(2, 1, 1.05), (2, 2, 1.05), (2, 4, 1.05), (3, 2, 2.1), (4, 2, 2.1)]
    {
        let mut hosts = Hosts::up(machines);
        hosts.start_over("namespaces", "bytes", machines * each, each, super::TIMEOUT);
        for rank in 0..machines * each {
            let report = hosts.file(&format!("report-{rank}"));
            let sent: f64 = report.parse().unwrap_or_else(|_| panic!("rank {rank}: {report}"));
            assert!(sent <= at_most, "{machines} hosts of {each} ranks: {sent} b");
        }
    }
}

const TIMEOUT: Duration = Duration::from_secs(3);

#[test]
#[ignore = "needs root and iproute2: network namespaces"]
fn a_process_killed_on_another_host_is_named_at_once() {
    let mut hosts = Hosts::up(3);
    hosts.start("work", 3, super::TIMEOUT);
    hosts.all_ready();
    let pid = hosts.ranks[1].id();
    hosts.ranks[1].kill().unwrap();
    hosts.named(1, &format!("rank 1 (pid {pid}) died"), SOON);
}

#[test]
#[ignore = "needs root and iproute2: network namespaces"]
fn a_cut_cable_is_named_within_the_timeout() {
    for victim in [0, 2] {
        let mut hosts = Hosts::up(3);
        hosts.start("work", 3, TIMEOUT);
        hosts.all_ready();
        hosts.cut(victim);
        hosts.named(victim, &format!("still missing rank {victim}"), TIMEOUT + SOON);
    }
}

/// Cuts off the second of three hosts, which forwards the partial sums of the first, and then the
/// last host.
#[test]
#[ignore = "needs root and iproute2: network namespaces"]
fn a_host_of_two_ranks_that_is_cut_off_during_an_all_reduce_is_named() {
    type Fault = fn(&Hosts, usize);
    let faults: [(usize, Fault); 2] = [(1, Hosts::cut), (2, Hosts::unplug)];
    for (victim, cut) in faults {
        let mut hosts = Hosts::up(3);
        hosts.start_over("namespaces", "work", 6, 2, TIMEOUT);
        hosts.all_ready();
        let start = Instant::now();
        cut(&hosts, victim);
        for rank in (0..6).filter(|rank| rank / 2 != victim) {
            let report = hosts.file(&format!("report-{rank}"));
            let lost = [2 * victim, 2 * victim + 1];
            let both = format!("still missing ranks {}, {}", lost[0], lost[1]);
            let one = lost.map(|lost| format!("still missing rank {lost}"));
            let named = report.contains(&both) || one.iter().any(|one| report.ends_with(one));
            assert!(named, "rank {rank}: {report}");
        }
        assert!(start.elapsed() < TIMEOUT + SOON, "{:?}", start.elapsed());
    }
}

#[test]
#[ignore = "needs root and iproute2: network namespaces"]
fn an_unplugged_link_is_named_within_the_timeout() {
    let mut hosts = Hosts::up(4);
    hosts.start("work", 4, TIMEOUT);
    hosts.all_ready();
    hosts.unplug(1);
    hosts.named(1, "still missing rank 1", TIMEOUT + SOON);
}

#[test]
#[ignore = "needs root and iproute2: network namespaces"]
fn lost_packets_cause_no_failure() {
    let mut hosts = Hosts::up(3);
    for rank in 0..3 {
        hosts.lose(rank);
    }
    // A packet that is lost repeatedly is sent again after twice the time: 3, 6, 12 s and more.
    hosts.start("count", 3, Duration::from_secs(120));
    hosts.all_done();
}

#[test]
#[ignore = "needs root and iproute2: network namespaces"]
fn a_cut_cable_is_named_despite_packet_loss() {
    let mut hosts = Hosts::up(3);
    hosts.start("work", 3, 3 * TIMEOUT);
    hosts.all_ready();
    for rank in 0..3 {
        hosts.lose(rank);
    }
    std::thread::sleep(Duration::from_millis(500));
    hosts.cut(1);
    hosts.named(1, "still missing rank 1", 3 * TIMEOUT + SOON);
}

#[test]
#[ignore = "needs root and iproute2: network namespaces"]
fn a_slow_network_causes_no_failure() {
    let mut hosts = Hosts::up(3);
    for rank in 0..3 {
        hosts.slow_down(rank);
    }
    hosts.start("count", 3, Duration::from_secs(30));
    hosts.all_done();
}
