//! Limits on open files: raised where the system allows it, else a rank that needs more says so, and no
//! other is blamed.

use std::fs;
use std::time::Duration;

use crate::common::{Role, Workers};

const TIMEOUT: Duration = Duration::from_secs(4);
/// Files that a limited rank may open: a store's connection, a listener, and too few for its peers.
const FEW: u64 = 5;

#[test]
fn a_rank_that_may_not_open_enough_files_says_so() {
    let workers = Workers::start_over("tcp", "fault::few-files", 4, &[0, 1, 2, 3], TIMEOUT);
    let report = workers.file("report-1");
    assert!(report.contains("RLIMIT_NOFILE") && report.contains("ulimit -n"), "{report}");
}

#[test]
fn a_soft_limit_on_open_files_is_raised() {
    let workers = Workers::start_over("tcp", "fault::few-files-first", 4, &[0, 1, 2, 3], TIMEOUT);
    for rank in 0..4 {
        assert_eq!(workers.file(&format!("report-{rank}")), "joined");
    }
    workers.finish();
}

/// What a rank of such a world does: rank 1 has few files, or few at first.
pub(crate) fn play(role: &Role) {
    if role.rank == 1 {
        limit(role.scenario == "few-files");
    }
    let joined = role.join();
    role.report(&joined.map_or_else(|error| error.to_string(), |_| "joined".into()));
}

fn limit(hard: bool) {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the pointer is good for the call.
    assert_eq!(unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) }, 0);
    limit.rlim_cur = fs::read_dir("/proc/self/fd").unwrap().count() as u64 + FEW;
    if hard {
        limit.rlim_max = limit.rlim_cur;
    }
    // SAFETY: as above.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) }, 0);
}
