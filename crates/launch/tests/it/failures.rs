//! Failures of ranks in Rust: their errors in the summary, and the root cause among ranks that lose
//! each other.

use std::time::Duration;

use collective::{GroupOptions, ReduceOp, Topology, init_process_group};
use launch::{record_failure, record_panics};

use crate::ranks::{Ran, run};

#[test]
fn panics_and_failures_of_ranks_are_reported() {
    let rank = std::env::current_exe().unwrap().display().to_string();
    let script = format!("exec {rank} --exact failures::helper_fails --ignored --nocapture");
    let ran = run(2, &script, |options| options.report_time = Duration::from_secs(20));
    assert_eq!(ran.code, 9, "{}", ran.stderr);
    assert!(
        ran.stderr.contains(": panicked at ") && ran.stderr.contains("the first"),
        "{}",
        ran.stderr
    );
    assert!(ran.stderr.contains(": an error of rank 1"), "{}", ran.stderr);
    assert!(!ran.stderr.contains(": a consequence"), "{}", ran.stderr);
}

#[test]
#[ignore = "a rank process of other tests"]
fn helper_fails() {
    let Ok(rank) = std::env::var("RANK") else { return };
    record_panics();
    if rank == "0" {
        drop(std::panic::catch_unwind(|| panic!("the first")));
        record_failure("a consequence");
    } else {
        record_failure("an error of rank 1");
    }
    std::process::exit(9);
}

/// Returns the pid that a rank has printed.
fn pid_of(ran: &Ran, rank: usize) -> &str {
    let prefix = format!("[rank {rank}] pid ");
    ran.stdout.iter().find_map(|line| line.strip_prefix(&prefix)).unwrap()
}

/// Runs `helper_group` as both ranks.
fn run_group(how: &str) -> Ran {
    let rank = std::env::current_exe().unwrap().display().to_string();
    let script = format!("exec {rank} --exact failures::helper_group --ignored --nocapture");
    run(2, &script, |options| {
        options.report_time = Duration::from_secs(20);
        options.envs.push(("RANK_TEST_HOW".into(), how.into()));
    })
}

#[test]
fn rank_that_lost_a_peer_is_not_the_root_cause() {
    for (how, code) in [("fails", 3), ("panics", 101)] {
        let ran = run_group(how);
        assert_eq!(ran.code, code, "{}", ran.stderr);
        let cause = format!("root cause: rank 1 (pid {}): exit code {code}\n", pid_of(&ran, 1));
        assert!(ran.stderr.contains(&cause), "{}", ran.stderr);
        let consequence = ran.stderr.lines().find(|line| line.starts_with("  rank 0 ")).unwrap();
        assert!(consequence.contains("exit code 4: the group was aborted by rank 1: it left"));
    }
}

#[test]
fn rank_that_recovered_from_a_lost_peer_fails_by_itself() {
    let ran = run_group("leaves");
    assert_eq!(ran.code, 5, "{}", ran.stderr);
    assert!(ran.stderr.contains("exit code 5: a later failure"), "{}", ran.stderr);
}

/// As the exit of a large program, which takes time.
struct SlowExit;

impl Drop for SlowExit {
    fn drop(&mut self) {
        std::thread::sleep(Duration::from_millis(500));
    }
}

#[test]
#[ignore = "a rank process of other tests"]
fn helper_group() {
    let Ok(how) = std::env::var("RANK_TEST_HOW") else { return };
    let slow = SlowExit;
    let topology = Topology::from_env(|name| std::env::var(name).ok()).unwrap();
    let group = init_process_group(&topology, GroupOptions::default()).unwrap();
    group.barrier().unwrap();
    if group.rank() == 1 {
        println!("pid {}", std::process::id());
        // The group is dropped first: also by a `main` that returns an error, which is printed
        // afterwards.
        assert_ne!(how, "panics");
        drop((group, slow));
        std::process::exit(if how == "fails" { 3 } else { 0 });
    }
    let error = group.all_reduce(&mut [1.0_f32], ReduceOp::Sum).unwrap_err();
    if how == "leaves" {
        let group = group.rebuild(Duration::from_secs(1)).unwrap();
        assert_eq!(group.world_size(), 1);
        record_failure("a later failure");
        std::process::exit(5);
    }
    eprintln!("error: {error}");
    std::process::exit(4);
}
