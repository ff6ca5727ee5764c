//! Jobs with torchrun's agent on one node and our launcher on another.

use super::*;

/// Returns a Python that can import torch.
fn torch() -> String {
    std::env::var("TORCH_PYTHON").unwrap_or_else(|_| "python3".into())
}

/// Command of a torchrun agent with two ranks.
fn agent(python: &str, node: usize, port: u16, restarts: u32) -> Command {
    let mut command = Command::new(python);
    command
        .args(["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2"])
        .args([&format!("--node-rank={node}"), "--master-addr=127.0.0.1"])
        .args([&format!("--master-port={port}"), &format!("--max-restarts={restarts}")])
        .args(["--no-python", "--monitor-interval=0.1"]);
    command
}

/// Starts a torchrun agent whose ranks run `helper_rank`.
fn torchrun(python: &str, node: usize, port: u16, role: &str, restarts: u32) -> Launcher {
    let rank = ["--exact", "nodes::helper_rank", "--ignored", "--nocapture"];
    let mut command = agent(python, node, port, restarts);
    // The ranks inherit the role; `helper_node` passes it explicitly.
    Launcher::start(
        command.arg(std::env::current_exe().unwrap()).args(rank).env("NODE_TEST_ROLE", role),
    )
}

#[test]
#[ignore = "needs PyTorch: TORCH_PYTHON, or python3, imports torch"]
fn torchrun_agent_joins_the_job() {
    let python = torch();
    for ours in [0, 1] {
        let port = free_port();
        let nodes = format!("2 {ours} 127.0.0.1 {port}");
        let mut launcher = start(this(), &nodes, 2, "role 20 20 60", 0);
        let mut agent = torchrun(&python, 1 - ours, port, "20 20 60", 0);
        let codes = (launcher.wait(), agent.wait());
        let text = format!("{}\n{}", launcher.reader.text(), agent.reader.text());
        assert_eq!(codes, (0, 0), "{text}");
        for rank in 0..4 {
            assert!(text.contains(&format!("done {rank} of 4 attempt 0")), "{text}");
        }
    }
}

#[test]
#[ignore = "needs PyTorch: TORCH_PYTHON, or python3, imports torch"]
fn failure_ends_our_node_and_the_torchrun_agents_and_is_named() {
    let python = torch();
    // Ours are the ranks 0 and 1, or 2 and 3.
    for (ours, victim, how, code) in
        [(0, 0, "exits", 7), (0, 3, "is killed", 11), (1, 3, "is killed", 137), (1, 0, "exits", 11)]
    {
        let port = free_port();
        let nodes = format!("2 {ours} 127.0.0.1 {port}");
        let role = format!("1000000 0 30 {victim} {}", how.replace("is ", ""));
        let mut launcher = start(this(), &nodes, 2, &format!("role {role}"), 0);
        let mut agent = torchrun(&python, 1 - ours, port, &role, 0);
        let codes = (launcher.wait(), agent.wait());
        let (said, theirs) = (launcher.reader.text(), agent.reader.text());
        assert!(codes.0 == code && codes.1 != 0, "{codes:?}\n{said}\n{theirs}");
        let cause = said.lines().find(|line| line.contains("root cause: ")).unwrap_or_default();
        // Failures of the agent's ranks are known from our ranks' collectives.
        let want = format!("rank {victim}");
        assert!(cause.contains(&want), "rank {victim} {how}: {said}");
    }
}

#[test]
#[ignore = "needs PyTorch: TORCH_PYTHON, or python3, imports torch"]
fn torchrun_agent_restarts_with_our_node() {
    let python = torch();
    let port = free_port();
    let role = "1000000 20 30 1 exits";
    let nodes = format!("2 0 127.0.0.1 {port}");
    let mut launcher = start(this(), &nodes, 2, &format!("role {role}"), 1);
    let mut agent = torchrun(&python, 1, port, role, 1);
    let codes = (launcher.wait(), agent.wait());
    let text = format!("{}\n{}", launcher.reader.text(), agent.reader.text());
    assert_eq!(codes, (0, 0), "{text}");
    for rank in 0..4 {
        assert!(text.contains(&format!("done {rank} of 4 attempt 1")), "{text}");
    }
}

/// The ranks do not communicate, so only the launcher can detect the killed agent.
#[test]
#[ignore = "needs PyTorch: TORCH_PYTHON, or python3, imports torch"]
fn killed_torchrun_agent_ends_our_node() {
    let python = torch();
    for ours in [0, 1] {
        let port = free_port();
        // torchrun leaves its ranks running; they end when the directory is removed.
        let dir = tempfile::tempdir().unwrap();
        let script = format!("echo up; while [ -e {} ]; do sleep 0.1; done", dir.path().display());
        let nodes = format!("2 {ours} 127.0.0.1 {port}");
        let mut launcher = start(this(), &nodes, 1, &script, 1);
        let theirs =
            Launcher::start(agent(&python, 1 - ours, port, 1).args(["/bin/sh", "-c", &script]));
        launcher.reader.await_lines("up", 1);
        theirs.reader.await_lines("up", 2);
        drop(theirs);
        assert_ne!(launcher.wait(), 0);
        let text = launcher.reader.text();
        let whose = match ours {
            0 => "node 1 (torchrun agent, ranks 1 to 2) ended",
            _ => "the control store at 127.0.0.1:",
        };
        assert!(text.contains(whose) && !text.contains("restarting"), "{text}");
    }
}

/// The test registers as torchrun's agent does, and disconnects once it has its ranks.
#[test]
fn disconnected_torchrun_agent_is_the_root_cause() {
    let port = free_port();
    let agent = std::thread::spawn(move || {
        let store = TcpStore::connect("127.0.0.1", port, SOON).unwrap();
        let info = br#"{"role": "default", "rank": 1, "local_world_size": 1}"#;
        store.set("none/torchelastic/role_info/1", info).unwrap();
        store.wait(&["none/torchelastic/assigned_ranks/1"], SOON).unwrap();
    });
    let ran = run(options(1, "exec sleep 300", fixed(2, 0, port)));
    agent.join().unwrap();
    assert_eq!(ran.code.unwrap(), 1, "{}", ran.stderr);
    let cause = "root cause: node 1 (torchrun agent, rank 1) ended";
    assert!(ran.stderr.contains(cause), "{}", ran.stderr);
}
