//! Jobs of several nodes: with given ranks, together with torchrun, elastic.
//!
//! On this host, launchers are threads of the test, or processes if one has to die; `hosts` runs
//! them on simulated hosts. `TORCH_PYTHON` is a Python that can import torch; default: `python3`.

mod elastic;
mod errors;
mod hosts;
mod mixed;

use std::net::{TcpListener, TcpStream};
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use collective::{GroupOptions, ReduceOp, Store, TcpStore, Topology, init_process_group};
use launch::{Error, LaunchOptions, Nodes, Result, launch, launch_to, record_failure};

use crate::common::is_gone;
use crate::common::process::{Launcher, SOON, StoreProcess};

const LAUNCH: &str = env!("CARGO_BIN_EXE_launch");

struct Ran {
    code: Result<i32>,
    stdout: Vec<String>,
    stderr: String,
}

impl Ran {
    fn has(&self, line: &str) -> bool {
        self.stdout.iter().any(|have| have == line)
    }
}

pub(crate) fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

fn options(nproc: usize, script: &str, nodes: Nodes) -> LaunchOptions {
    let mut options = LaunchOptions::new(nproc, ["-c", script]);
    options.program = Some("/bin/sh".into());
    options.report_time = Duration::from_millis(300);
    options.grace = Duration::from_secs(1);
    options.rdzv.join = SOON;
    options.rdzv.last_call = Duration::from_millis(300);
    options.rdzv.heartbeat = Duration::from_millis(200);
    // Many, because a busy machine may delay heartbeats.
    options.rdzv.missed_heartbeats = 25;
    options.nodes = nodes;
    options
}

fn fixed(count: usize, rank: usize, port: u16) -> Nodes {
    node(count, rank, "127.0.0.1", port)
}

fn node(count: usize, rank: usize, master_addr: &str, master_port: u16) -> Nodes {
    Nodes::Fixed { count, rank, master_addr: master_addr.to_owned(), master_port }
}

fn elastic(min: usize, max: usize, port: u16) -> Nodes {
    Nodes::Elastic { min, max, host: "127.0.0.1".to_owned(), port }
}

/// Parses `COUNT RANK ADDR PORT` or `elastic MIN MAX HOST PORT`, as passed to launcher processes.
fn parse_nodes(text: &str) -> Nodes {
    let number = |text: &str| text.parse().unwrap();
    let words: Vec<_> = text.split(' ').collect();
    match words[..] {
        ["elastic", min, max, host, port] => Nodes::Elastic {
            min: number(min),
            max: number(max),
            host: host.to_owned(),
            port: port.parse().unwrap(),
        },
        [count, rank, addr, port] => node(number(count), number(rank), addr, port.parse().unwrap()),
        _ => panic!("{text}"),
    }
}

fn run(options: LaunchOptions) -> Ran {
    let stdout = Arc::new(Mutex::new(Vec::new()));
    let stderr = Arc::new(Mutex::new(Vec::new()));
    let code = launch_to(options, stdout.clone(), stderr.clone());
    let text = |bytes: &Mutex<Vec<u8>>| String::from_utf8(bytes.lock().unwrap().clone()).unwrap();
    let mut stdout: Vec<_> = text(&stdout).lines().map(str::to_owned).collect();
    stdout.sort();
    Ran { code, stdout, stderr: text(&stderr) }
}

/// Runs the launchers of all nodes at once.
fn run_all(all: Vec<LaunchOptions>) -> Vec<Ran> {
    let threads: Vec<JoinHandle<Ran>> =
        all.into_iter().map(|options| std::thread::spawn(move || run(options))).collect();
    threads.into_iter().map(|thread| thread.join().unwrap()).collect()
}

#[test]
fn nodes_get_the_same_ranks_as_with_torchrun() {
    let script = "echo $RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $GROUP_RANK \
                  $GROUP_WORLD_SIZE $ROLE_RANK $ROLE_WORLD_SIZE $MASTER_ADDR:$MASTER_PORT";
    let port = free_port();
    let mut nodes: Vec<_> =
        (0..3).map(|rank| options(rank + 1, script, fixed(3, rank, port))).collect();
    nodes[1].role = "reader".to_owned();
    let ran = run_all(nodes);
    let codes: Vec<_> = ran.iter().map(|ran| ran.code.as_ref().unwrap()).collect();
    assert_eq!(codes, [&0, &0, &0], "{}{}{}", ran[0].stderr, ran[1].stderr, ran[2].stderr);
    let at = format!("127.0.0.1:{port}");
    assert_eq!(ran[0].stdout, [format!("[rank 0] 0 0 6 1 0 3 0 4 {at}")]);
    let second =
        [format!("[rank 1] 1 0 6 2 1 3 0 2 {at}"), format!("[rank 2] 2 1 6 2 1 3 1 2 {at}")];
    assert_eq!(ran[1].stdout, second);
    assert_eq!(ran[2].stdout[2], format!("[rank 5] 5 2 6 3 2 3 3 4 {at}"));
}

#[test]
fn failure_on_one_node_ends_all_nodes_with_its_exit_code() {
    for victim in [0, 3] {
        let script = format!("[ $RANK = {victim} ] && exit 7; exec sleep 300");
        let port = free_port();
        let nodes = (0..2).map(|rank| options(2, &script, fixed(2, rank, port)));
        let start = Instant::now();
        for ran in run_all(nodes.collect()) {
            assert_eq!(ran.code.unwrap(), 7, "{}", ran.stderr);
            let cause = format!("root cause: rank {victim} (pid ");
            assert!(ran.stderr.contains(&cause), "{}", ran.stderr);
            assert!(ran.stderr.contains("4 of 4 ranks failed"), "{}", ran.stderr);
        }
        assert!(start.elapsed() < SOON, "{:?}", start.elapsed());
    }
}

#[test]
fn missing_program_on_one_node_ends_all_nodes_and_is_named() {
    for (victim, is_elastic) in [(0, false), (1, false), (1, true)] {
        let port = free_port();
        let nodes = (0..3).map(|rank| {
            let nodes = if is_elastic { elastic(3, 3, port) } else { fixed(3, rank, port) };
            let mut options = options(1, "exec sleep 300", nodes);
            options.max_restarts = 3;
            if rank == victim {
                options.program = Some("/no/such/program".into());
            }
            options
        });
        for (node, ran) in run_all(nodes.collect()).into_iter().enumerate() {
            if node == victim {
                let error = ran.code.unwrap_err().to_string();
                assert!(error.contains("/no/such/program"), "{error}");
                continue;
            }
            assert_eq!(ran.code.unwrap(), 1, "{}", ran.stderr);
            let cause = ran.stderr.lines().find(|line| line.contains("root cause: node "));
            assert!(cause.is_some_and(|line| line.contains("/no/such/program")), "{}", ran.stderr);
            // No node is waited for until it misses its heartbeats.
            let [again, lost] =
                ["restarting", "no longer sends"].map(|text| ran.stderr.contains(text));
            assert!(!again && !lost, "{}", ran.stderr);
        }
    }
}

#[test]
fn signal_to_a_finished_node_ends_the_other_nodes() {
    for done in [0, 1] {
        let port = free_port();
        let script = format!("echo up; [ $GROUP_RANK = {done} ] || exec sleep 300");
        let mut nodes =
            [0, 1].map(|rank| start(this(), &format!("2 {rank} 127.0.0.1 {port}"), 1, &script, 0));
        nodes.iter().for_each(|node| node.reader.await_lines("up", 1));
        let pid = nodes[done].child.id().to_string();
        assert!(Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
        // The other launcher has sent SIGTERM to its ranks.
        assert_eq!((nodes[0].wait(), nodes[1].wait()), (143, 143), "{}", nodes[1].reader.text());
    }
}

/// Script of ranks that save on SIGTERM.
const SAVES: &str = "trap 'exit 75' TERM; echo up $GROUP_RANK of $GROUP_WORLD_SIZE restart \
    $TORCHELASTIC_RESTART_COUNT; while :; do sleep 0.05; done";

fn terminate(launcher: &Launcher) {
    signal(launcher, "-TERM");
}

pub(crate) fn signal(launcher: &Launcher, signal: &str) {
    signal_pid(launcher.child.id(), signal);
}

fn signal_pid(pid: u32, signal: &str) {
    let pid = pid.to_string();
    assert!(Command::new("kill").args([signal, &pid]).status().unwrap().success());
}

#[test]
fn finished_node_tolerates_a_short_outage_of_the_store() {
    let port = free_port();
    let script = "[ $RANK = 1 ] && exit 0; echo up; sleep 4; echo saved";
    let node = |rank| start(this(), &format!("2 {rank} 127.0.0.1 {port}"), 1, script, 0);
    let (mut first, mut second) = (node(0), node(1));
    first.reader.await_lines("up", 1);
    // The second node's rank ends meanwhile. Then the first launcher, which hosts the store, stops
    // for several heartbeats.
    std::thread::sleep(Duration::from_secs(1));
    signal(&first, "-STOP");
    std::thread::sleep(Duration::from_millis(1500));
    signal(&first, "-CONT");
    assert_eq!((first.wait(), second.wait()), (0, 0), "{}", second.reader.text());
    first.reader.await_lines("saved", 1);
}

#[test]
fn node_that_stops_for_a_moment_at_the_end_learns_the_outcome() {
    let port = free_port();
    let script = "[ $RANK = 1 ] && exit 0; echo up; sleep 2; echo saved";
    let node = |rank| start(this(), &format!("2 {rank} 127.0.0.1 {port}"), 1, script, 0);
    let (mut first, mut second) = (node(0), node(1));
    first.reader.await_lines("up", 1);
    std::thread::sleep(Duration::from_secs(1));
    signal(&second, "-STOP");
    first.reader.await_lines("saved", 1);
    std::thread::sleep(Duration::from_secs(1));
    signal(&second, "-CONT");
    assert_eq!((first.wait(), second.wait()), (0, 0), "{}", second.reader.text());
}

#[test]
fn failure_during_an_outage_of_the_store_ends_all_nodes() {
    let port = free_port();
    let script = "[ $RANK = 1 ] && { sleep 2; exit 7; }; echo up; exec sleep 300";
    let node = |rank| start(this(), &format!("2 {rank} 127.0.0.1 {port}"), 1, script, 0);
    let (mut first, mut second) = (node(0), node(1));
    first.reader.await_lines("up", 1);
    std::thread::sleep(Duration::from_secs(1));
    signal(&first, "-STOP");
    std::thread::sleep(Duration::from_secs(2));
    signal(&first, "-CONT");
    assert_eq!((first.wait(), second.wait()), (7, 7), "{}", second.reader.text());
}

#[test]
fn rendezvous_of_a_restart_ends_with_its_store() {
    let port = free_port();
    let script = "echo up; sleep 300";
    let node = |rank| start(this(), &format!("3 {rank} 127.0.0.1 {port}"), 1, script, 3);
    let [mut first, mut second, third] = [0, 1, 2].map(node);
    for node in [&first, &second, &third] {
        node.reader.await_lines("up", 1);
    }
    // A stopped launcher may continue, unlike a killed one.
    signal(&third, "-STOP");
    for node in [&first, &second] {
        node.reader.await_lines("restart 1 of 3", 1);
    }
    terminate(&first);
    first.wait();
    let start = Instant::now();
    assert_ne!(second.wait(), 0);
    assert!(start.elapsed() < SOON / 2, "{}", second.reader.text());
}

#[test]
fn killed_launcher_ends_a_fixed_job_without_a_restart() {
    let port = free_port();
    let node =
        |rank| start(this(), &format!("3 {rank} 127.0.0.1 {port}"), 1, "echo up; sleep 300", 3);
    let [mut first, mut second, third] = [0, 1, 2].map(node);
    for node in [&first, &second, &third] {
        node.reader.await_lines("up", 1);
    }
    drop(third);
    for node in [&mut first, &mut second] {
        assert_eq!(node.wait(), 1);
        let text = node.reader.text();
        let cause = text.lines().find(|line| line.contains("root cause: node 2 "));
        assert!(cause.is_some_and(|line| line.ends_with("its launcher has ended")), "{text}");
        assert!(!text.contains("restarting"), "{text}");
    }
}

/// `nohup` ignores SIGHUP.
#[test]
fn inherited_ignored_signals_stay_ignored() {
    let mut command = Command::new("sh");
    let script = "trap '' HUP; exec \"$0\" --nnodes 1 sh -c 'echo up; sleep 1; echo done'";
    let mut launcher = Launcher::start(command.args(["-c", script, LAUNCH]));
    launcher.reader.await_lines("up", 1);
    signal(&launcher, "-HUP");
    assert_eq!(launcher.wait(), 0, "{}", launcher.reader.text());
    launcher.reader.await_lines("done", 1);
}

#[test]
fn nodes_whose_ranks_have_saved_are_not_restarted() {
    // The second node's ranks take a second to save, and a signal would end them before.
    let script = "trap 'exit 9' TERM; [ $GROUP_RANK = 1 ] && { sleep 1 & wait; }; exit 75";
    for is_elastic in [false, true] {
        let port = free_port();
        let nodes = (0..2).map(|rank| {
            let nodes = if is_elastic { elastic(2, 2, port) } else { fixed(2, rank, port) };
            let mut options = options(2, script, nodes);
            options.grace = SOON;
            options.max_restarts = 1;
            options
        });
        for ran in run_all(nodes.collect()) {
            assert_eq!(ran.code.unwrap(), 75, "{}", ran.stderr);
            let text = "launch: interrupted after a checkpoint: 4 of 4 ranks\n";
            assert!(
                ran.stderr.ends_with(text) && !ran.stderr.contains("restarting"),
                "{}",
                ran.stderr
            );
        }
    }
}

#[test]
fn ranks_that_save_after_another_node_failed_do_not_prevent_a_restart() {
    for is_elastic in [false, true] {
        let port = free_port();
        let script = "[ $TORCHELASTIC_RESTART_COUNT = 1 ] && exit 0; \
                      [ $RANK = 1 ] && { sleep 0.3; exit 3; }; \
                      trap 'exit 75' TERM; while :; do sleep 0.05; done";
        let nodes = (0..2).map(|rank| {
            let nodes = if is_elastic { elastic(2, 2, port) } else { fixed(2, rank, port) };
            let mut options = options(1, script, nodes);
            options.max_restarts = 1;
            options
        });
        for ran in run_all(nodes.collect()) {
            assert_eq!(ran.code.unwrap(), 0, "{}", ran.stderr);
            assert!(ran.stderr.contains("(restart 1 of 1)"), "{}", ran.stderr);
        }
    }
}

#[test]
fn interrupted_node_lets_all_nodes_save() {
    for told in [0, 1] {
        let port = free_port();
        let mut nodes =
            [0, 1].map(|rank| start(this(), &format!("2 {rank} 127.0.0.1 {port}"), 2, SAVES, 1));
        nodes.iter().for_each(|node| node.reader.await_lines("up", 2));
        terminate(&nodes[told]);
        assert_eq!((nodes[0].wait(), nodes[1].wait()), (75, 75), "{}", nodes[1].reader.text());
        for node in &nodes {
            node.reader.await_lines("interrupted after a checkpoint: 4 of 4 ranks", 1);
        }
    }
}

#[test]
fn restart_of_all_nodes_has_a_new_store() {
    let script = "echo attempt $TORCHELASTIC_RESTART_COUNT at $MASTER_PORT; \
                  [ $TORCHELASTIC_RESTART_COUNT$RANK = 01 ] && exit 3; \
                  [ $TORCHELASTIC_RESTART_COUNT = 0 ] && exec sleep 300; exit 0";
    let port = free_port();
    let nodes = (0..2).map(|rank| {
        let mut options = options(1, script, fixed(2, rank, port));
        options.max_restarts = 1;
        options
    });
    let ran = run_all(nodes.collect());
    let second = |ran: &Ran, rank: usize| {
        let start = format!("[rank {rank}] attempt 1 at ");
        let port = ran.stdout.iter().find_map(|line| line.strip_prefix(&start[..]));
        port.unwrap_or_else(|| panic!("{:?}{}", ran.stdout, ran.stderr)).to_owned()
    };
    for (rank, ran) in ran.iter().enumerate() {
        assert_eq!(*ran.code.as_ref().unwrap(), 0, "{}", ran.stderr);
        assert!(ran.has(&format!("[rank {rank}] attempt 0 at {port}")), "{:?}", ran.stdout);
        assert!(ran.stderr.contains("restart 1 of 1"), "{}", ran.stderr);
    }
    assert_eq!(second(&ran[0], 0), second(&ran[1], 1));
    assert_ne!(second(&ran[0], 0), port.to_string());
}

#[test]
fn launcher_that_ended_before_the_start_can_be_replaced() {
    let port = free_port();
    let node = |rank| start(this(), &format!("3 {rank} 127.0.0.1 {port}"), 1, "exit 0", 0);
    let (first, ended) = (node(0), node(1));
    let store = TcpStore::connect("127.0.0.1", port, SOON).unwrap();
    let registered = "none/torchelastic/role_info/1";
    store.wait(&[registered], SOON).unwrap();
    drop(ended);
    store.delete_key(registered).unwrap();
    let second = node(1);
    store.wait(&[registered], SOON).unwrap();
    for mut node in [first, second, node(2)] {
        assert_eq!(node.wait(), 0, "{}", node.reader.text());
    }
}

/// Stands for a slow name server.
#[test]
fn slow_connection_to_the_store_succeeds() {
    let (port, slow) = (free_port(), TcpListener::bind("127.0.0.1:0").unwrap());
    let slow_port = slow.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for client in slow.incoming().map_while(std::io::Result::ok) {
            std::thread::spawn(move || {
                std::thread::sleep(Duration::from_secs(1));
                let Ok(server) = TcpStream::connect(("127.0.0.1", port)) else { return };
                std::thread::scope(|scope| {
                    scope.spawn(|| std::io::copy(&mut &client, &mut &server));
                    scope.spawn(|| std::io::copy(&mut &server, &mut &client));
                });
            });
        }
    });
    let nodes = [fixed(2, 0, port), fixed(2, 1, slow_port)].map(|nodes| {
        let mut options = options(1, "exit 0", nodes);
        options.rdzv.heartbeat = Duration::from_secs(5);
        options.rdzv.join = Duration::from_secs(20);
        options
    });
    for ran in run_all(nodes.to_vec()) {
        assert_eq!(ran.code.unwrap(), 0, "{}", ran.stderr);
    }
}

#[test]
#[ignore = "needs IPv6 on the loopback interface"]
fn ipv6_addresses_are_accepted_with_and_without_brackets() {
    let port = free_port();
    let nodes = ["::1", "[::1]"]
        .iter()
        .enumerate()
        .map(|(rank, addr)| options(1, "echo $MASTER_ADDR", node(2, rank, addr, port)));
    for (rank, ran) in run_all(nodes.collect()).into_iter().enumerate() {
        assert_eq!(ran.code.unwrap(), 0, "{}", ran.stderr);
        assert_eq!(ran.stdout, [format!("[rank {rank}] ::1")]);
    }
}

/// Starts this test binary as a launcher process. `nodes` is parsed by [`parse_nodes`].
fn start(mut command: Command, nodes: &str, nproc: usize, script: &str, restarts: u32) -> Launcher {
    Launcher::start(
        command
            .args(["--exact", "nodes::helper_node", "--ignored", "--nocapture"])
            .env("NODE_TEST_NODES", nodes)
            .env("NODE_TEST_NPROC", nproc.to_string())
            .env("NODE_TEST_SCRIPT", script)
            .env("NODE_TEST_RESTARTS", restarts.to_string()),
    )
}

fn this() -> Command {
    Command::new(std::env::current_exe().unwrap())
}

#[test]
#[ignore = "a launcher process of other tests"]
fn helper_node() {
    let Ok(nodes) = std::env::var("NODE_TEST_NODES") else { return };
    let variable = |name: &str| std::env::var(name).unwrap();
    let script = variable("NODE_TEST_SCRIPT");
    let nproc = variable("NODE_TEST_NPROC").parse().unwrap();
    let mut options = options(nproc, &script, parse_nodes(&nodes));
    options.max_restarts = variable("NODE_TEST_RESTARTS").parse().unwrap();
    if let Some(role) = script.strip_prefix("role ") {
        // A rank in Rust instead of a script.
        options.envs.push(("NODE_TEST_ROLE".into(), role.into()));
        options.args =
            ["--exact", "nodes::helper_rank", "--ignored", "--nocapture"].map(Into::into).into();
        options.program = None;
    }
    match launch(options) {
        Ok(code) => std::process::exit(code),
        Err(error) => {
            eprintln!("error: {error}");
            std::process::exit(99);
        }
    }
}

/// A rank that runs as many all-reduces as its role says, and writes the launcher's
/// error file when one fails.
#[test]
#[ignore = "a rank process of other tests"]
fn helper_rank() {
    let Ok(role) = std::env::var("NODE_TEST_ROLE") else { return };
    let words: Vec<_> = role.split(' ').collect();
    let ([rounds, restarted, timeout], harm) = words.split_first_chunk().unwrap();
    let attempt: u32 = std::env::var("TORCHELASTIC_RESTART_COUNT").unwrap().parse().unwrap();
    // A restarted job has fewer rounds.
    let rounds: u64 = if attempt == 0 { rounds } else { restarted }.parse().unwrap();
    let outcome = (|| -> collective::Result<()> {
        let topology = Topology::from_env(|name| std::env::var(name).ok())?;
        let timeout = Duration::from_secs(timeout.parse().unwrap());
        let group = init_process_group(&topology, GroupOptions::default().with_timeout(timeout))?;
        let world = group.world_size();
        println!("rank {} of {world} attempt {attempt}", group.rank());
        for round in 0..rounds {
            if let [victim, how] = *harm
                && (round, attempt, victim) == (5, 0, &*group.rank().to_string())
            {
                fail(how);
            }
            let mut x = [group.rank() as f32];
            group.all_reduce(&mut x, ReduceOp::Sum)?;
            assert_eq!(x, [(world * (world - 1) / 2) as f32]);
            std::thread::sleep(Duration::from_millis(5));
        }
        println!("done {} of {world} attempt {attempt}", group.rank());
        Ok(())
    })();
    if let Err(error) = outcome {
        record_failure(&error.to_string());
        eprintln!("error: {error}");
        std::process::exit(11);
    }
}

/// Ends this rank by `how`.
fn fail(how: &str) {
    if how == "exits" {
        record_failure("simulated failure");
        std::process::exit(7);
    }
    let pid = std::process::id().to_string();
    Command::new("kill").args(["-KILL", &pid]).status().unwrap();
}
