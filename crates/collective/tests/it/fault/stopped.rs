//! SIGSTOP of a rank: it neither dies nor answers, so the others name it at the timeout; when it
//! continues, it gets an error, too.

use std::time::{Duration, Instant};

use crate::common::{Random, Role, SOON, Workers};

fn signal(pid: u32, signal: libc::c_int) {
    // SAFETY: sends a signal to a child of ours that has not been waited for.
    let sent = unsafe { libc::kill(pid.try_into().unwrap(), signal) };
    assert_eq!(sent, 0);
}

/// Stops this process until the parent continues it.
pub(crate) fn stop() {
    // SAFETY: sends a signal to this thread.
    unsafe { libc::raise(libc::SIGSTOP) };
}

#[test]
fn a_rank_stopped_while_joining_is_named() {
    let timeout = Duration::from_millis(700);
    let start = Instant::now();
    let mut workers = Workers::start("fault::stop-before-joining", 3, &[0, 1, 2], timeout);
    for rank in [0, 2] {
        let report = workers.file(&format!("report-{rank}"));
        assert!(report.contains("joining group default: timed out"), "{report}");
        assert!(report.ends_with("missing rank 1"), "{report}");
    }
    assert!(start.elapsed() < timeout + SOON);
    signal(workers.children[1].id(), libc::SIGCONT);
    workers.file("report-1");
    assert!(workers.wait(1).success());
}

#[test]
fn a_stopped_rank_is_named_and_gets_an_error_when_it_continues() {
    let timeout = Duration::from_millis(500);
    for seed in 0..8 {
        let mut random = Random(seed);
        let world = 2 + random.below(3);
        let ranks: Vec<_> = (0..world).collect();
        let mut workers = Workers::start(&format!("fault::stop-{seed}"), world, &ranks, timeout);
        for rank in &ranks {
            workers.file(&format!("ready-{rank}"));
        }
        let victim = random.below(world);
        std::thread::sleep(Duration::from_micros(random.below(20_000) as u64));
        let start = Instant::now();
        signal(workers.children[victim].id(), libc::SIGSTOP);
        for rank in ranks.into_iter().filter(|&rank| rank != victim) {
            let report = workers.file(&format!("report-{rank}"));
            // Ranks that wait for it may be named, too.
            let (_, missing) = report.split_once("still missing rank").unwrap();
            let missing: Vec<&str> = missing.trim_start_matches('s').split(", ").collect();
            let names = |name: &&str| name.trim() == victim.to_string();
            assert!(missing.iter().any(names), "seed {seed}: {report}");
        }
        assert!(start.elapsed() < timeout + SOON, "seed {seed}: {:?}", start.elapsed());
        signal(workers.children[victim].id(), libc::SIGCONT);
        let report = workers.file(&format!("report-{victim}"));
        assert!(report.contains("the group was aborted by rank"), "seed {seed}: {report}");
        assert!(workers.wait(victim).success());
    }
}

/// Runs a rank.
pub(crate) fn play(role: &Role) {
    if role.rank == 1 {
        stop();
    }
    let error = role.join().map(drop).unwrap_err();
    role.report(&error.to_string());
}
