//! Elastic jobs: nodes that join, leave and are lost, including the one that hosts the store.

use std::error::Error as _;

use collective::store::TcpStoreServer;

use super::errors::is_rendezvous;
use super::*;

#[test]
fn elastic_job_starts_with_the_nodes_that_join() {
    let port = free_port();
    let script = "echo $RANK of $WORLD_SIZE on $GROUP_RANK of $GROUP_WORLD_SIZE";
    let nodes = [1, 2, 1].map(|nproc| options(nproc, script, elastic(2, 3, port)));
    let ran = run_all(nodes.to_vec());
    let mut lines = Vec::new();
    for ran in ran {
        assert_eq!(ran.code.unwrap(), 0, "{}", ran.stderr);
        lines.extend(ran.stdout);
    }
    lines.sort();
    assert_eq!(lines.len(), 4, "{lines:?}");
    for (rank, line) in lines.iter().enumerate() {
        assert!(line.starts_with(&format!("[rank {rank}] {rank} of 4 on ")), "{lines:?}");
        assert!(line.ends_with(" of 3"), "{lines:?}");
    }
}

#[test]
fn too_few_nodes_are_an_error() {
    let port = free_port();
    let mut alone = options(1, "exit 0", elastic(2, 3, port));
    alone.rdzv.join = Duration::from_millis(500);
    let error = run(alone).code.unwrap_err();
    assert!(is_rendezvous(&error, port) && error.source().is_none(), "{error:?}");
    let error = error.to_string();
    for part in ["fewer than 2 nodes", "other nodes: none", &format!("127.0.0.1:{port}")] {
        assert!(error.contains(part), "{part}: {error}");
    }
}

#[test]
fn error_has_the_reason_for_not_hosting_the_control_store() {
    let other = TcpListener::bind("127.0.0.1:0").unwrap();
    // The local port of a connection is taken, but does not accept connections.
    let client = TcpStream::connect(other.local_addr().unwrap()).unwrap();
    for (taken, listens) in [(client.local_addr(), false), (other.local_addr(), true)] {
        let port = taken.unwrap().port();
        let mut options = options(1, "exit 0", elastic(1, 2, port));
        options.rdzv.join = Duration::from_millis(700);
        let error = run(options).code.unwrap_err();
        let cause = error.source().is_some_and(|cause| cause.is::<collective::Error>());
        assert_eq!(is_rendezvous(&error, port) && cause, listens, "{error:?}");
        let error = error.to_string();
        assert!(error.contains("the port is taken"), "{error}");
        // The launcher retries only if something listens at the port.
        assert_eq!(error.contains("cannot connect after"), listens, "{error}");
    }
}

#[test]
fn elastic_job_of_torchrun_agents_is_an_error() {
    let server = TcpStoreServer::bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let store = TcpStore::connect("127.0.0.1", server.port(), SOON).unwrap();
    store.set("torch.rendezvous.none", b"Y2FuaW1hZGFt").unwrap();
    let error = run(options(1, "exit 0", elastic(1, 2, server.port()))).code.unwrap_err();
    assert!(error.to_string().contains("torchrun agents"), "{error}");
}

#[test]
fn lost_node_restarts_the_others_and_a_new_one_joins() {
    let port = free_port();
    let nodes = format!("elastic 1 2 127.0.0.1 {port}");
    // The ranks succeed only after an attempt with a new second node.
    let dir = tempfile::tempdir().unwrap();
    let flag = dir.path().join("enough");
    let script = format!(
        "echo up $GROUP_RANK of $GROUP_WORLD_SIZE restart $TORCHELASTIC_RESTART_COUNT; \
         while [ ! -e {} ]; do sleep 0.05; done",
        flag.display()
    );
    // The first hosts the control store.
    let mut first = start(this(), &nodes, 1, &script, 3);
    first.reader.await_lines("of 1 restart 0", 1);
    let second = start(this(), &nodes, 1, &script, 3);
    second.reader.await_lines("of 2 restart 0", 1);
    first.reader.await_lines("of 2 restart 0", 1);
    drop(second);
    first.reader.await_lines("of 1 restart 1", 1);
    assert!(first.reader.text().contains("no longer sends heartbeats"), "{}", first.reader.text());
    let mut third = start(this(), &nodes, 1, &script, 3);
    third.reader.await_lines("of 2 restart 1", 1);
    first.reader.await_lines("of 2 restart 1", 1);
    std::fs::write(&flag, "").unwrap();
    assert_eq!((first.wait(), third.wait()), (0, 0));
}

#[test]
fn elastic_job_saves_and_continues_when_nodes_join_and_leave() {
    let port = free_port();
    let start =
        |limits: &str| start(this(), &format!("elastic {limits} 127.0.0.1 {port}"), 1, SAVES, 0);
    // The first hosts the control store.
    let mut first = start("1 2");
    first.reader.await_lines("up 0 of 1 restart 0", 1);
    let mut second = start("1 2");
    for node in [&first, &second] {
        node.reader.await_lines("of 2 restart 0", 1);
    }
    first.reader.await_lines("interrupted after a checkpoint: 1 of 1 ranks", 1);
    // `max` is 2, so the third node waits.
    let mut third = start("1 2");
    terminate(&second);
    assert_eq!(second.wait(), 75, "{}", second.reader.text());
    first.reader.await_lines("interrupted after a checkpoint: 2 of 2 ranks", 1);
    first.reader.await_lines("of 2 restart 0", 2);
    third.reader.await_lines("of 2 restart 0", 1);
    // The job ends with its control store; the other node's ranks save first.
    terminate(&first);
    assert_eq!((first.wait(), third.wait()), (75, 75), "{}", third.reader.text());
    third.reader.await_lines("hosts its control store received a signal", 1);
}

#[test]
fn ranks_that_save_after_a_node_is_lost_do_not_prevent_a_restart() {
    let port = free_port();
    let nodes = format!("elastic 1 2 127.0.0.1 {port}");
    let mut first = start(this(), &nodes, 1, SAVES, 1);
    first.reader.await_lines("up 0 of 1 restart 0", 1);
    let second = start(this(), &nodes, 1, SAVES, 1);
    second.reader.await_lines("of 2 restart 0", 1);
    first.reader.await_lines("of 2 restart 0", 1);
    drop(second);
    first.reader.await_lines("up 0 of 1 restart 1", 1);
    terminate(&first);
    assert_eq!(first.wait(), 75, "{}", first.reader.text());
}

/// Returns the shared state of an elastic job.
fn state(store: &TcpStore) -> String {
    String::from_utf8(store.get("launch/elastic/none/state", SOON).unwrap()).unwrap()
}

fn until(holds: impl Fn() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < SOON);
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn attempt_whose_first_node_is_dead_is_abandoned() {
    let keeper = StoreProcess::start(Command::new(LAUNCH), "127.0.0.1:0");
    let store = TcpStore::connect("127.0.0.1", keeper.port, SOON).unwrap();
    // A node that joined and died; it sorts first.
    let dead = r#"{"host": "", "pid": 1, "id": 7, "addr": "127.0.0.1", "ranks": 1,
        "role": "default", "hosts": false}"#;
    let joined = format!(
        r#"{{"round": 0, "restarts": 0, "phase": "Gathering", "nodes": [{dead}], "waiting": []}}"#
    );
    store.set("launch/elastic/none/state", joined.as_bytes()).unwrap();
    let script = "echo $RANK of $WORLD_SIZE restart $TORCHELASTIC_RESTART_COUNT";
    let ran = run(options(1, script, elastic(1, 2, keeper.port)));
    assert_eq!(ran.code.unwrap(), 0, "{}", ran.stderr);
    assert_eq!(ran.stdout, ["[rank 0] 0 of 1 restart 0"]);
    assert!(ran.stderr.contains("the first node,  (127.0.0.1), did not start"), "{}", ran.stderr);
}

#[test]
fn waiting_node_ends_with_the_exit_code_of_the_job() {
    let port = free_port();
    let nodes = format!("elastic 1 1 127.0.0.1 {port}");
    let mut first = start(this(), &nodes, 1, SAVES, 0);
    first.reader.await_lines("up", 1);
    let mut second = start(this(), &nodes, 1, SAVES, 0);
    // Wait until it is listed as waiting.
    let store = TcpStore::connect("127.0.0.1", port, SOON).unwrap();
    until(|| !state(&store).contains("\"waiting\":[]"));
    terminate(&first);
    assert_eq!((first.wait(), second.wait()), (75, 75), "{}", second.reader.text());
}

#[test]
fn waiting_node_replaces_one_that_received_a_signal() {
    let keeper = StoreProcess::start(Command::new(LAUNCH), "127.0.0.1:0");
    let nodes = format!("elastic 1 1 127.0.0.1 {}", keeper.port);
    let mut first = start(this(), &nodes, 1, SAVES, 0);
    first.reader.await_lines("up", 1);
    let mut second = start(this(), &nodes, 1, SAVES, 0);
    let store = TcpStore::connect("127.0.0.1", keeper.port, SOON).unwrap();
    until(|| !state(&store).contains("\"waiting\":[]"));
    terminate(&first);
    assert_eq!(first.wait(), 75, "{}", first.reader.text());
    second.reader.await_lines("up", 1);
    terminate(&second);
    assert_eq!(second.wait(), 75, "{}", second.reader.text());
}

#[test]
fn waiting_node_outlasts_the_join_timeout_while_the_job_runs() {
    let port = free_port();
    let dir = tempfile::tempdir().unwrap();
    let flag = dir.path().join("fail");
    let script = format!(
        "[ $TORCHELASTIC_RESTART_COUNT = 1 ] && exit 0; \
         while [ ! -e {} ]; do sleep 0.05; done; exit 3",
        flag.display()
    );
    let mut options = options(1, &script, elastic(1, 1, port));
    options.max_restarts = 1;
    options.rdzv.join = Duration::from_secs(2);
    let start = |options: &LaunchOptions| {
        let options = options.clone();
        std::thread::spawn(move || run(options))
    };
    let first = start(&options);
    let store = TcpStore::connect("127.0.0.1", port, SOON).unwrap();
    until(|| state(&store).contains("\"Running\""));
    let second = start(&options);
    until(|| !state(&store).contains("\"waiting\":[]"));
    std::thread::sleep(options.rdzv.join + Duration::from_millis(500));
    std::fs::write(&flag, "").unwrap();
    for node in [first, second] {
        let ran = node.join().unwrap();
        assert_eq!(ran.code.unwrap(), 0, "{}", ran.stderr);
    }
}

#[test]
fn elastic_failure_restarts_all_nodes_then_gives_its_exit_code() {
    let port = free_port();
    let nodes = (0..2).map(|at| {
        // The order of the nodes is not known, so the last rank fails.
        let script = "[ $RANK = 1 ] && { sleep 0.2; exit 5; }; exec sleep 300";
        let mut options = options(1, script, elastic(2, 2, port));
        options.max_restarts = 1;
        options.role = format!("role{at}");
        options
    });
    for ran in run_all(nodes.collect()) {
        assert_eq!(ran.code.unwrap(), 5, "{}", ran.stderr);
        assert!(ran.stderr.contains("restart 1 of 1"), "{}", ran.stderr);
        assert_eq!(ran.stderr.matches("root cause: rank 1 ").count(), 2, "{}", ran.stderr);
    }
}

#[test]
fn short_outage_of_the_store_does_not_end_a_node_that_waits() {
    let store = StoreProcess::start(Command::new(LAUNCH), "127.0.0.1:0");
    let nodes = format!("elastic 2 2 127.0.0.1 {}", store.port);
    let start = || start(this(), &nodes, 1, "echo up", 0);
    let mut first = start();
    let client = TcpStore::connect("127.0.0.1", store.port, SOON).unwrap();
    until(|| state(&client).contains("\"pid\""));
    signal_pid(store.child.id(), "-STOP");
    std::thread::sleep(Duration::from_millis(1500));
    signal_pid(store.child.id(), "-CONT");
    let mut second = start();
    assert_eq!((first.wait(), second.wait()), (0, 0), "{}", first.reader.text());
}

/// Script of ranks that print their pid and run.
const SAY_PID: &str = "echo up pid $$; exec sleep 300";

#[test]
fn loss_of_the_control_store_ends_the_job_with_advice() {
    let port = free_port();
    let nodes = format!("elastic 1 2 127.0.0.1 {port}");
    // The first hosts the control store.
    let first = start(this(), &nodes, 2, SAY_PID, 3);
    first.reader.await_lines("up pid", 2);
    let mut second = start(this(), &nodes, 2, SAY_PID, 3);
    second.reader.await_lines("up pid", 2);
    // Two of the first attempt, which ended when the second node joined, and two of the second.
    first.reader.await_lines("up pid", 4);
    let text = [first.reader.text(), second.reader.text()].join("\n");
    let pids: Vec<_> = text.lines().filter_map(|line| line.split_once("up pid ")).collect();
    drop(first);
    assert_ne!(second.wait(), 0);
    let said = second.reader.text();
    for part in
        [&format!("127.0.0.1:{port}, on node "), "unreachable", "--rdzv-endpoint", "`launch store`"]
    {
        assert!(said.contains(part), "{part}: {said}");
    }
    assert!(!said.contains("restarting"), "{said}");
    let start = Instant::now();
    while !pids.iter().all(|(_, pid)| is_gone(pid)) {
        assert!(start.elapsed() < SOON, "ranks are left: {pids:?}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn elastic_job_with_an_external_store_survives_the_loss_of_any_node() {
    let store = StoreProcess::start(Command::new(LAUNCH), "127.0.0.1:0");
    let nodes = format!("elastic 1 2 127.0.0.1 {}", store.port);
    let dir = tempfile::tempdir().unwrap();
    let flag = dir.path().join("enough");
    let script = format!(
        "echo up $GROUP_RANK of $GROUP_WORLD_SIZE restart $TORCHELASTIC_RESTART_COUNT; \
         while [ ! -e {} ]; do sleep 0.05; done",
        flag.display()
    );
    let start = || start(this(), &nodes, 1, &script, 3);
    let (first, second) = (start(), start());
    for node in [&first, &second] {
        node.reader.await_lines("of 2 restart 0", 1);
    }
    // Kills the first node (lower process id), which hosts the ranks' store.
    drop(first);
    second.reader.await_lines("of 1 restart 1", 1);
    let mut third = start();
    for node in [&second, &third] {
        node.reader.await_lines("of 2 restart 1", 1);
    }
    drop(second);
    third.reader.await_lines("of 1 restart 2", 1);
    std::fs::write(&flag, "").unwrap();
    assert_eq!(third.wait(), 0, "{}", third.reader.text());
    // The store still has the state of the ended job.
    let mut late = start();
    assert_ne!(late.wait(), 0);
    assert!(late.reader.text().contains("another --rdzv-id"), "{}", late.reader.text());
}
