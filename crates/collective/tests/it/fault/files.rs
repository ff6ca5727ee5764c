//! Limits on open files: they are raised if the system allows it; otherwise the rank that needs
//! more reports that.

use std::fs;
use std::net::TcpStream;
use std::time::Duration;

use crate::common::{Role, Workers};
use collective::store::TcpStoreServer;
use collective::{Store, TcpStore};

const TIMEOUT: Duration = Duration::from_secs(4);
/// Open files of a limited rank: enough for the store and a listener, too few for its peers.
const FEW: u64 = 5;

#[test]
fn too_few_open_files_is_an_error_that_names_the_limit() {
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

#[test]
fn a_store_without_free_files_closes_silent_connections() {
    let workers = Workers::start("fault::few-files-store", 1, &[0], TIMEOUT);
    let port: u16 = workers.file("report-0").parse().unwrap();
    let connect = || TcpStream::connect(("127.0.0.1", port)).unwrap();
    let silent: Vec<_> = (0..3 * FEW).map(|_| connect()).collect();
    let clients: Vec<_> = (0..FEW - 1)
        .map(|_| {
            TcpStore::connect("127.0.0.1", port, TIMEOUT)
                .expect("the store closes a silent connection")
        })
        .collect();
    assert_eq!(clients.iter().map(|store| store.add("clients", 1).unwrap()).max(), Some(4));
    drop((silent, clients));
}

/// The kernel's answer to a memory file above the limit is SIGXFSZ, which kills.
#[test]
fn a_limit_on_the_size_of_files_is_an_error_that_names_it() {
    for scenario in ["small-files-first", "small-files"] {
        let workers = Workers::start(&format!("fault::{scenario}"), 2, &[0, 1], TIMEOUT);
        for rank in 0..2 {
            let report = workers.file(&format!("report-{rank}"));
            assert!(report.contains("RLIMIT_FSIZE") && report.contains("ulimit -f"), "{report}");
        }
        workers.finish();
    }
}

/// Runs a rank whose files may have 1 MiB: from the beginning, or once it has joined.
pub(crate) fn play_small(role: &Role) {
    let limit = libc::rlimit { rlim_cur: 1 << 20, rlim_max: 1 << 20 };
    // SAFETY: the pointer is good for the call.
    let set = || assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &raw const limit) }, 0);
    if role.scenario == "small-files-first" {
        set();
    }
    let result = role.join().and_then(|group| {
        set();
        group.alloc::<u8>(8 << 20).map(drop)
    });
    role.report(&result.unwrap_err().to_string());
}

/// Serves a store with few files for its clients.
pub(crate) fn serve(role: &Role) {
    let server = TcpStoreServer::bind("127.0.0.1:0".parse().unwrap()).unwrap();
    limit(true);
    role.report(&server.port().to_string());
    std::thread::park();
}

/// Runs a rank: rank 1 has few files, or few at first.
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
