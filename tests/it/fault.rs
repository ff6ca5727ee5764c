//! One rank is killed: the other ends in time, names it, and nothing is left behind.

use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use tests::{Job, MLP, shm_entries, text, wait};

use crate::WORKER;

const CONFIG: &str = r#"
[optim_wrapper]
type = "OptimWrapper"
optimizer = { type = "SGD", lr = 0.1 }

[train_cfg]
max_epochs = 100

[[custom_hooks]]
type = "KillHook"
rank = 1
iter = 30
"#;

/// One rank of two, without a launcher that would step in.
fn rank(job: &Job, rank: usize, port: u16) -> Child {
    Command::new(WORKER)
        .args(job.args())
        .envs([("RANK", rank), ("LOCAL_RANK", rank)].map(|(k, v)| (k, v.to_string())))
        .envs([("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1")])
        .env("MASTER_PORT", port.to_string())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

#[test]
fn the_survivor_names_the_dead_rank_and_ends() {
    let dir = tempfile::tempdir().unwrap();
    let job = Job::new(dir.path(), "kill", &format!("{MLP}{CONFIG}"));
    let before = shm_entries();
    // Free a moment ago; rank 0 binds it next.
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let mut survivor = rank(&job, 0, port);
    let mut victim = rank(&job, 1, port);
    let status = wait(&mut victim, tests::DEADLINE);
    assert!(!status.success());
    // The behaviour under test: the survivor ends within 5 s.
    wait(&mut survivor, Duration::from_secs(5));
    let pid = victim.id();
    let output = survivor.wait_with_output().unwrap();
    let said = text(&output);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains(&format!("rank 1 (pid {pid}) died")), "{said}");
    assert_eq!(shm_entries(), before);
}

#[test]
fn the_launcher_returns_the_dead_ranks_code_and_both_say_why() {
    let dir = tempfile::tempdir().unwrap();
    let job = Job::new(dir.path(), "kill", &format!("{MLP}{CONFIG}"));
    let before = shm_entries();
    let output = job.launch(WORKER, 2, &[]);
    let said = text(&output);
    assert_eq!(output.status.code(), Some(128 + 9), "{said}");
    let survivor = said.lines().find(|l| l.starts_with("[rank 0] error:"));
    assert!(survivor.is_some_and(|l| l.contains("rank 1 (pid ")), "{said}");
    assert_eq!(shm_entries(), before);
}
