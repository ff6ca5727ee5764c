//! Failures over every transport: each must give the same errors.

#![expect(clippy::print_stdout, reason = "the output of a failed test names the transport")]

use std::fs;
use std::sync::Arc;
use std::time::{Duration, Instant};

use collective::{Error, MemoryStore, ProcessGroup, ReduceOp, Result, SharedBuf};

use super::{SOON, TIMEOUT, in_time};
use crate::common::refuse::refuse;
use crate::common::{self, Role, Workers, play};

/// A transport, with sizes and times for its tests.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TestTransport {
    /// A name that [`common::options`] accepts.
    pub(crate) name: &'static str,
    /// Number of elements that takes several steps; a multiple of 2 and 3.
    pub(crate) large: usize,
    /// A timeout that tests wait for.
    short: Duration,
    /// Number of groups that the leak test makes.
    rounds: usize,
}

const HOST: TestTransport =
    TestTransport { name: "host", large: 100_002, short: Duration::from_millis(300), rounds: 2000 };
const TCP: TestTransport = TestTransport { name: "tcp", large: 1_000_002, rounds: 100, ..HOST };
const MACHINES: TestTransport = TestTransport { name: "machines", ..TCP };
/// Reductions continue from machine to machine.
pub(crate) const PAIRS: TestTransport = TestTransport { name: "pairs", ..TCP };
const GLOO: TestTransport =
    TestTransport { name: "gloo", short: Duration::from_millis(500), rounds: 50, ..HOST };
const GLOO_FAST: TestTransport = TestTransport { name: "gloo-fast", ..GLOO };

/// All transports of this build.
pub(crate) fn transports() -> impl Iterator<Item = TestTransport> {
    let built =
        |transport: &TestTransport| cfg!(feature = "gloo") || !transport.name.starts_with("gloo");
    let all = [HOST, TCP, MACHINES, GLOO, GLOO_FAST].into_iter();
    all.filter(built).inspect(|transport| println!("over {}", transport.name))
}

/// All transports but [`HOST`], which has its own tests of killed and stopped ranks.
fn connected() -> impl Iterator<Item = TestTransport> {
    transports().filter(|transport| transport.name != HOST.name).chain([PAIRS])
}

impl TestTransport {
    /// Ranks as threads of this process.
    pub(crate) fn groups(&self, world: usize, timeout: Duration) -> Vec<ProcessGroup> {
        match self.name {
            "host" => ProcessGroup::threads(world, timeout).unwrap(),
            name => common::over(name, world, timeout),
        }
    }

    /// Ranks as processes.
    fn start(&self, scenario: &str, world: usize, timeout: Duration) -> Workers {
        let ranks: Vec<_> = (0..world).collect();
        Workers::start_over(self.name, &format!("fault::{scenario}"), world, &ranks, timeout)
    }
}

#[test]
fn a_rank_that_never_joins_is_named() {
    let timeout = Duration::from_millis(500);
    for transport in transports() {
        let workers = Workers::start_over(transport.name, "fault::work", 3, &[0, 2], timeout);
        for rank in [0, 2] {
            let report = workers.file(&format!("report-{rank}"));
            assert!(report.contains("joining group default: timed out"), "{report}");
            assert!(report.ends_with("missing rank 1"), "{report}");
        }
        let (store, start) = (Arc::new(MemoryStore::new()), Instant::now());
        let options = common::options(transport.name, 1, transport.short);
        let error = ProcessGroup::from_store(store, 1, 3, options).unwrap_err();
        let Error::Timeout { missing, op, .. } = &error else { panic!("{error}") };
        assert_eq!((missing.as_slice(), op.as_str()), (&[0, 2][..], "joining group default"));
        assert!(start.elapsed() < SOON);
    }
}

#[test]
fn late_ranks_are_named_at_the_timeout() {
    for transport in transports() {
        let (timeout, base) = (transport.short, Instant::now());
        let errors = play(transport.groups(4, timeout), |group| {
            let start = Instant::now();
            // Ranks 1 and 3 keep the group but do something else.
            if group.rank() % 2 == 1 {
                std::thread::sleep(2 * timeout);
                let late = group.barrier().unwrap_err();
                assert!(matches!(late, Error::Aborted { .. }), "{late}");
                return None;
            }
            let error = group.all_reduce(&mut [1.0_f32; 5000], ReduceOp::Sum).unwrap_err();
            in_time(base, start, timeout);
            let next = group.barrier().unwrap_err();
            assert!(matches!(next, Error::Poisoned(_)), "{next}");
            Some(error)
        });
        // Over sockets, joining ends with a barrier.
        let first = if transport.name == "host" { "all_reduce #0" } else { "all_reduce #1" };
        for error in errors.into_iter().flatten() {
            let Error::Timeout { missing, op, .. } = &error else { panic!("{error}") };
            assert_eq!(missing, &[1, 3]);
            assert!(op.contains(first), "{op}");
        }
    }
}

/// Groups of more than eight ranks compare fingerprints in rounds.
#[test]
fn many_ranks_name_the_one_that_differs_or_is_late() {
    for transport in transports().filter(|transport| transport.name != GLOO_FAST.name) {
        let errors = play(transport.groups(21, TIMEOUT), |group| {
            let mut x = vec![1.0_f32; if group.rank() == 13 { 5 } else { 6 }];
            let error = group.all_reduce(&mut x, ReduceOp::Sum).unwrap_err();
            assert!(x.iter().all(|&x| x == 1.0));
            error
        });
        for error in errors {
            let Error::Mismatch { field: "count", by_rank, .. } = &error else { panic!("{error}") };
            assert!(by_rank.contains(&(13, "all_reduce of 5 f32, sum".into())), "{error}");
        }

        let timeout = 3 * transport.short;
        let errors = play(transport.groups(21, timeout), |group| {
            group.barrier().unwrap();
            if group.rank() == 13 {
                std::thread::sleep(2 * timeout);
                return None;
            }
            Some(group.barrier().unwrap_err())
        });
        for error in errors.into_iter().flatten() {
            let Error::Timeout { missing, .. } = &error else { panic!("{error}") };
            assert_eq!(missing, &[13], "over {}", transport.name);
        }
    }
}

#[test]
fn abort_wakes_all_ranks() {
    for transport in transports() {
        let errors = play(transport.groups(5, TIMEOUT), |group| {
            let start = Instant::now();
            if group.rank() == 2 {
                std::thread::sleep(Duration::from_millis(50));
                group.abort("the data loader is out of data");
            }
            let error = match group.rank() {
                // The communication thread, asleep.
                1 => group.all_reduce_async(vec![1_u8; 9], ReduceOp::Sum).unwrap().wait().map(drop),
                3 => group.recv(&mut [0_u8; 9], 2),
                _ => group.barrier(),
            };
            assert!(start.elapsed() < SOON);
            error.unwrap_err()
        });
        for error in errors {
            let Error::Aborted { by: 2, reason } = &error else { panic!("{error}") };
            assert_eq!(reason, "the data loader is out of data");
        }
    }
}

/// More descriptors than RLIMIT_NOFILE, or a container's filter.
#[test]
fn a_rank_that_cannot_poll_fails_the_group() {
    let failed = std::sync::Barrier::new(2);
    let errors = play(TCP.groups(2, TIMEOUT), |group| {
        if group.rank() == 1 {
            refuse(&[libc::SYS_ppoll], libc::EINVAL);
            let error = group.barrier().unwrap_err();
            failed.wait();
            return error;
        }
        failed.wait();
        // Rank 1 has entered the first one.
        loop {
            if let Err(error) = group.barrier() {
                return error;
            }
        }
    });
    let text = errors[1].to_string();
    assert!(text.contains("waiting for peers"), "{text}");
    let Error::Aborted { by: 1, reason } = &errors[0] else { panic!("{}", errors[0]) };
    assert_eq!(*reason, text);
}

#[test]
fn an_abort_reaches_peers_if_the_process_exits_at_once() {
    for transport in transports() {
        for (scenario, reporting) in [("abort", &[0, 1, 2][..]), ("abort-and-end", &[0, 2])] {
            let workers = transport.start(scenario, 3, TIMEOUT);
            for rank in reporting {
                let report = workers.file(&format!("report-{rank}"));
                assert_eq!(report, "the group was aborted by rank 1: enough");
            }
            workers.finish();
        }
    }
}

#[test]
fn a_rank_that_leaves_early_is_named() {
    for transport in transports() {
        for receives in [false, true] {
            let errors = play(transport.groups(3, TIMEOUT), |group| {
                let start = Instant::now();
                let error = match group.rank() {
                    1 => return None,
                    2 if receives => group.recv(&mut [0_u8; 3], 1).unwrap_err(),
                    _ => group.all_reduce(&mut [0_i64; 3000], ReduceOp::Sum).unwrap_err(),
                };
                assert!(start.elapsed() < SOON);
                Some(error)
            });
            for error in errors.into_iter().flatten() {
                let Error::Aborted { by: 1, reason } = &error else { panic!("{error}") };
                let what = if receives { "" } else { "all_reduce" };
                let expected = format!("it left the group before {what}");
                assert!(reason.starts_with(&expected), "{reason}");
            }
        }
    }
}

#[test]
fn a_rank_may_leave_after_its_part_and_is_named_if_before() {
    for transport in transports().chain([PAIRS]) {
        for count in [3, 10_000] {
            play(transport.groups(2, TIMEOUT), |group| {
                if group.rank() == 1 {
                    return group.send(&vec![5_u8; count], 0).unwrap();
                }
                std::thread::sleep(Duration::from_millis(50));
                let mut buf = vec![0_u8; count];
                group.recv(&mut buf, 1).unwrap();
                assert_eq!(buf, vec![5; count]);
                let start = Instant::now();
                let error = group.recv(&mut buf, 1).unwrap_err();
                assert!(matches!(error, Error::Aborted { by: 1, .. }), "{error}");
                assert!(start.elapsed() < SOON);
                assert_eq!(buf, vec![5; count]);
            });
        }
    }
}

/// The last call of a rank whose peers need nothing more of it.
#[test]
fn ranks_may_leave_after_blocks_of_different_lengths() {
    for transport in transports().chain([PAIRS]) {
        play(transport.groups(3, TIMEOUT), |group| {
            let rank = group.rank();
            let mut all = vec![0_u8; if rank == 0 { 30 } else { 0 }];
            let lens = if rank == 0 { &[0, 10, 20][..] } else { &[] };
            if rank == 0 {
                std::thread::sleep(Duration::from_millis(50));
            }
            group.gather_v(&mut all, &vec![rank as u8; 10 * rank], lens, 0).unwrap();
            assert!(rank != 0 || all == [vec![1; 10], vec![2; 20]].concat());
        });
    }
}

#[test]
fn processes_can_leave_after_their_last_operation() {
    for transport in transports() {
        let workers = transport.start("leave", 3, TIMEOUT);
        for rank in [0, 2] {
            let report = workers.file(&format!("report-{rank}"));
            assert!(report.contains("aborted by rank 1: it left the group"), "{report}");
        }
        workers.finish();
        let workers = transport.start("all-leave", 3, TIMEOUT);
        for rank in 0..3 {
            assert_eq!(workers.file(&format!("report-{rank}")), "done");
        }
        workers.finish();
    }
}

#[test]
fn both_processes_report_a_mismatch() {
    for transport in transports() {
        for (scenario, call) in [
            ("mismatch", "rank 1: all_reduce of 1001 f32, sum"),
            ("message", " of 1000 f32 to rank 1"),
        ] {
            let workers = transport.start(scenario, 2, TIMEOUT);
            for rank in 0..2 {
                let report = workers.file(&format!("report-{rank}"));
                assert!(report.contains("disagree on count"), "{report}");
                assert!(report.contains(call), "{report}");
            }
            workers.finish();
        }
    }
}

#[test]
fn a_killed_rank_is_named_by_every_survivor() {
    for transport in connected() {
        for round in 0..8_u64 {
            let world = 2 + round as usize % 3;
            let mut workers = transport.start("work", world, TIMEOUT);
            let ranks: Vec<_> = (0..world).collect();
            workers.all_ready(&ranks);
            let victim = (round as usize * 7 + 1) % world;
            // To kill it at another point each time.
            std::thread::sleep(Duration::from_micros(round * round * 1370 % 9000));
            let pid = workers.children[victim].id();
            workers.children[victim].kill().unwrap();
            let start = Instant::now();
            for rank in ranks.into_iter().filter(|&rank| rank != victim) {
                let report = workers.file(&format!("report-{rank}"));
                assert!(report.contains(&format!("rank {victim} (pid {pid}) died")), "{report}");
                assert!(workers.wait(rank).success());
            }
            assert!(start.elapsed() < SOON, "{:?}", start.elapsed());
        }
    }
}

#[test]
fn a_stopped_rank_is_named_by_all_that_wait() {
    let timeout = Duration::from_secs(2);
    let stop = |transport: TestTransport, victim: usize| {
        let workers = transport.start("work", 3, timeout);
        workers.all_ready(&[0, 1, 2]);
        let pid = workers.children[victim].id().cast_signed();
        // SAFETY: stops our own child, which is killed when the test is over.
        assert_eq!(unsafe { libc::kill(pid, libc::SIGSTOP) }, 0);
        let start = Instant::now();
        for rank in (0..3).filter(|&rank| rank != victim) {
            let report = workers.file(&format!("report-{rank}"));
            assert!(report.contains("timed out"), "{report}");
            assert!(report.ends_with(&format!("still missing rank {victim}")), "{report}");
        }
        assert!(start.elapsed() < timeout + SOON, "{:?}", start.elapsed());
    };
    for transport in connected() {
        std::thread::scope(|scope| {
            for victim in 0..3 {
                scope.spawn(move || stop(transport, victim));
            }
        });
    }
}

#[test]
fn dropped_groups_and_buffers_leak_nothing() {
    for transport in transports() {
        let workers = transport.start("churn", 1, TIMEOUT);
        assert_eq!(workers.file("report-0"), "nothing left");
        workers.finish();
    }
}

/// Numbers of descriptors, mappings and threads of this process.
fn resources() -> [usize; 3] {
    let entries = |path| fs::read_dir(path).unwrap().count();
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let shared = maps.lines().filter(|line| line.contains("memfd:collective")).count();
    [entries("/proc/self/fd"), shared, entries("/proc/self/task")]
}

/// Makes and drops groups and buffers, in ways that depend on `round`.
fn make_and_drop(transport: TestTransport, round: usize) {
    // Groups of threads, and groups that join as processes do.
    let groups = match round.is_multiple_of(2) {
        true => transport.groups(2, TIMEOUT),
        false => common::over(transport.name, 2, TIMEOUT),
    };
    play(groups, |group| {
        let shared: SharedBuf<f32> = group.alloc(10_000).unwrap();
        let work = group.all_reduce_async(shared, ReduceOp::Sum).unwrap();
        match round / 2 % 4 {
            0 => {
                drop(work.wait().unwrap());
                group.barrier().unwrap();
            }
            1 => drop(work),
            // Ranks in an operation get an error.
            2 => group.abort("enough"),
            _ => {
                let shared = work.wait().unwrap();
                drop(group.alloc::<u8>(1).unwrap());
                let failed = match group.rank() {
                    0 => group.barrier(),
                    _ => group.broadcast(&mut [0_u8], 0),
                };
                assert!(matches!(failed, Err(Error::Mismatch { .. })), "{failed:?}");
                drop(shared);
            }
        }
    });
}

/// Runs in its own process, where no other test opens anything.
fn churn(name: &str) -> String {
    let transport = transports().find(|transport| transport.name == name).unwrap();
    (0..8).for_each(|round| make_and_drop(transport, round));
    let before = resources();
    (0..transport.rounds).for_each(|round| make_and_drop(transport, round));
    // A joined thread disappears from /proc with a delay.
    let no_more = || resources().iter().zip(&before).all(|(after, before)| after <= before);
    let start = Instant::now();
    while !no_more() && start.elapsed() < SOON {
        std::thread::sleep(Duration::from_millis(1));
    }
    if no_more() { "nothing left".into() } else { format!("{before:?} became {:?}", resources()) }
}

/// Runs a process rank of these tests; returns false if the scenario is not one of them.
pub(crate) fn worker(role: &Role) -> bool {
    if role.scenario == "churn" {
        role.report(&churn(&role.transport));
        return true;
    }
    if !["work", "mismatch", "message", "abort", "abort-and-end", "leave", "all-leave"]
        .contains(&role.scenario.as_str())
    {
        return false;
    }
    let result = role.join().and_then(|group| scenario(role, &group));
    role.report(&result.map_or_else(|error| error.to_string(), |()| "done".into()));
    true
}

fn scenario(role: &Role, group: &ProcessGroup) -> Result<()> {
    let sum = |count| group.all_reduce(&mut vec![1.0_f32; count], ReduceOp::Sum);
    match (role.scenario.as_str(), role.rank) {
        ("work", _) => common::work_until_failure(group, 1 << 20, || role.ready()),
        ("mismatch", rank) => sum(1000 + rank),
        ("message", 0) => group.send(&[1_f32; 1000], 1).and_then(|()| group.barrier()),
        ("message", _) => group.recv(&mut [1_f32; 1001], 0),
        ("abort" | "abort-and-end", 1) => {
            group.barrier().unwrap();
            group.abort("enough");
            if role.scenario == "abort-and-end" {
                std::process::exit(0);
            }
            group.barrier()
        }
        // The abort may overtake the end of the first barrier.
        ("abort" | "abort-and-end", _) => group.barrier().and_then(|()| group.barrier()),
        ("leave", 1) => group.barrier(),
        // The other has left or leaves soon: either way the error names it and is not a timeout.
        ("leave", _) => group.barrier().and_then(|()| sum(100_000)),
        (_, _) => sum(100_000),
    }
}
