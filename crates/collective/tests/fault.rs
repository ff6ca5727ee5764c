//! What goes wrong with ranks: the right error, on every rank, in time, and nothing left behind.

#![expect(clippy::unwrap_used, reason = "tests")]
#![expect(unsafe_code, reason = "one test forks")]

mod common;
#[path = "fault/killed.rs"]
mod killed;
#[path = "fault/messages.rs"]
mod messages;
#[path = "fault/stopped.rs"]
mod stopped;

use std::fs;
use std::sync::Arc;
use std::time::{Duration, Instant};

use collective::{
    Buffer, Error, GroupOptions, MemoryStore, ProcessGroup, ReduceOp, Result, SharedBuf,
};
use common::{Role, Workers};
use half::f16;

const TIMEOUT: Duration = Duration::from_secs(20);
/// "At once", on a loaded machine.
const SOON: Duration = Duration::from_secs(5);

/// Whether to hold the machine to the figures: set on a quiet one.
fn figures() -> bool {
    std::env::var_os("COLLECTIVE_FIGURES").is_some()
}

/// A rank that has called at `start` gives up on a peer when the timeout is over, and a little. It may
/// do so with a rank that called before it, but not before the timeout of any, who all called after
/// `base`.
fn in_time(base: Instant, start: Instant, timeout: Duration) {
    let slack = if figures() { Duration::from_millis(10) } else { SOON };
    let (all, own) = (base.elapsed(), start.elapsed());
    assert!(all >= timeout && own <= timeout + slack, "{all:?}, {own:?}");
}

/// Works without end, in all ways there are, until the group fails.
fn work_until_failure(group: &ProcessGroup, ready: impl Fn()) -> Result<()> {
    let mut shared: SharedBuf<f32> = group.alloc(100_000)?;
    let (mut small, mut large) = (vec![1_i32; 10], vec![1.0_f32; 200_000]);
    for round in 0.. {
        group.all_reduce(&mut small, ReduceOp::Max)?;
        group.all_reduce(&mut large, ReduceOp::Avg)?;
        shared = group.all_reduce_async(shared, ReduceOp::Avg)?.wait()?;
        group.broadcast(&mut large, round % group.world_size())?;
        group.barrier()?;
        if round == 0 {
            ready();
        }
    }
    Ok(())
}

#[test]
fn after_a_kill_the_survivors_records_name_what_was_under_way() {
    let mut workers = Workers::start("last", 3, &[0, 1, 2], TIMEOUT);
    for rank in 0..3 {
        workers.file(&format!("ready-{rank}"));
    }
    workers.children[1].kill().unwrap();
    for rank in [0, 2] {
        workers.file(&format!("report-{rank}"));
        assert!(workers.wait(rank).success());
        let pid = workers.children[rank].id();
        let json = workers.file(&format!("flight/default-rank{rank}-{pid}.json"));
        let record: serde_json::Value = serde_json::from_str(&json).unwrap();
        assert_eq!((&record["rank"], &record["world_size"]), (&rank.into(), &3.into()));
        let calls = record["calls"].as_array().unwrap();
        assert_eq!(calls.len(), 2);
        assert_eq!(calls[0]["call"], "barrier");
        assert_eq!(calls[0]["outcome"], "done");
        assert_eq!(calls[1]["call"], "all_reduce of 12345 f32, avg");
        assert_eq!(calls[1]["asynchronous"], rank == 2);
        let outcome = calls[1]["outcome"]["failed"].as_str().unwrap();
        assert!(outcome.contains("rank 1 (pid "), "{outcome}");
    }
}

#[test]
fn a_rank_that_never_joins_is_named() {
    let timeout = Duration::from_millis(500);
    let workers = Workers::start("work", 3, &[0, 2], timeout);
    for rank in [0, 2] {
        let report = workers.file(&format!("report-{rank}"));
        assert!(report.contains("joining group default: timed out"), "{report}");
        assert!(report.ends_with("missing rank 1"), "{report}");
    }
}

#[test]
fn ranks_that_never_come_are_named_in_time() {
    let (timeout, base) = (Duration::from_millis(300), Instant::now());
    let errors = common::threads(4, timeout, |group| {
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
    for error in errors.into_iter().flatten() {
        let Error::Timeout { missing, op, .. } = &error else { panic!("{error}") };
        assert_eq!(missing, &[1, 3]);
        assert!(op.contains("all_reduce #0"), "{op}");
    }
}

/// Two ranks call, with the same buffers, what `call` says; both must see `field` differ, name what
/// each called, and have their bytes unchanged.
fn mismatch(
    field: &str,
    call: impl Fn(&ProcessGroup, &mut [f32], &mut [f32]) -> Result<()> + Sync,
) {
    for count in [10, 100_000] {
        common::threads(2, TIMEOUT, |group| {
            let start = Instant::now();
            let fill: Vec<f32> = (0..count).map(|i| (i + group.rank()) as f32).collect();
            let (mut one, mut two) = (fill.clone(), fill.repeat(2));
            let error = call(&group, &mut one, &mut two).unwrap_err();
            assert!(start.elapsed() < SOON);
            let Error::Mismatch { field: got, by_rank, .. } = &error else { panic!("{error}") };
            assert_eq!(*got, field, "{error}");
            assert_eq!(by_rank.iter().map(|(rank, _)| *rank).collect::<Vec<_>>(), [0, 1]);
            assert_ne!(by_rank[0].1, by_rank[1].1);
            assert_eq!(one, fill);
            assert_eq!(two, fill.repeat(2));
            let next = group.barrier().unwrap_err();
            assert!(next.to_string().contains("disagree"), "{next}");
            let next = group.send(&one, 1 - group.rank()).unwrap_err();
            assert!(matches!(next, Error::Poisoned(_)), "{next}");
        });
    }
}

#[test]
fn different_calls_are_a_mismatch_and_change_nothing() {
    let sum = ReduceOp::Sum;
    mismatch("verb", |group, one, _| match group.rank() {
        0 => group.all_reduce(one, sum),
        _ => group.barrier(),
    });
    mismatch("verb", |group, one, two| match group.rank() {
        0 => group.all_gather(two, one),
        _ => group.reduce_scatter(one, two, sum),
    });
    mismatch("dtype", |group, one, _| match group.rank() {
        0 => group.all_reduce(one, sum),
        _ => group.all_reduce(&mut vec![f16::ONE; one.len()], sum),
    });
    mismatch("op", |group, one, _| {
        group.all_reduce(one, if group.rank() == 0 { sum } else { ReduceOp::Avg })
    });
    mismatch("root", |group, one, _| group.broadcast(one, group.rank()));
    mismatch("count", |group, one, _| {
        let count = one.len() - group.rank();
        group.all_reduce(&mut one[..count], sum)
    });
    mismatch("op", |group, one, _| {
        group.all_reduce(one, ReduceOp::pre_mul_sum(0.5 + group.rank() as f64))
    });
    mismatch("op", |group, one, _| {
        group.reduce(one, if group.rank() == 0 { sum } else { ReduceOp::Max }, 0)
    });
    mismatch("root", |group, one, _| group.reduce(one, sum, group.rank()));
    // From one algorithm to another.
    mismatch("count", |group, one, two| match group.rank() {
        0 => group.all_reduce(&mut one[..5], sum),
        _ => group.all_reduce(two, sum),
    });
    mismatch("buffer", |group, one, _| {
        let mut shared: SharedBuf<f32> = group.alloc(one.len())?;
        let result = match group.rank() {
            0 => group.all_reduce(&mut shared, sum),
            _ => group.all_reduce(one, sum),
        };
        assert!(shared.iter().all(|&x| x == 0.0));
        result
    });
}

#[test]
fn different_exchanges_are_a_mismatch_and_change_nothing() {
    let sum = ReduceOp::Sum;
    mismatch("verb", |group, one, two| match group.rank() {
        0 => group.gather(two, one, 0),
        _ => group.scatter(one, two, 0),
    });
    mismatch("verb", |group, one, two| match group.rank() {
        0 => group.all_to_all(two, &one.repeat(2)),
        _ => group.all_reduce(one, sum),
    });
    mismatch("dtype", |group, one, two| match group.rank() {
        0 => group.gather(two, one, 0),
        _ => group.gather(&mut [], &vec![1_i32; one.len()], 0),
    });
    mismatch("root", |group, one, two| group.gather(two, one, group.rank()));
    mismatch("root", |group, one, two| group.scatter(one, two, group.rank()));
    mismatch("count", |group, one, two| match group.rank() {
        0 => group.gather(two, one, 0),
        _ => group.gather(&mut [], &one[1..], 0),
    });
    mismatch("count", |group, one, two| match group.rank() {
        0 => group.scatter(one, two, 0),
        _ => group.scatter(&mut one[1..], &[], 0),
    });
    mismatch("count", |group, one, two| match group.rank() {
        0 => group.all_to_all(two, &one.repeat(2)),
        _ => group.all_to_all(one, &two[..two.len() / 2]),
    });
}

#[test]
fn lengths_that_do_not_fit_are_a_mismatch_and_change_nothing() {
    // What rank 0 says, and what rank 1 does.
    let lists = |n| [[n, n - 1], [n - 1, n]];
    mismatch("count", |group, one, two| {
        group.all_gather_v(&mut two[1..], one, &lists(one.len())[group.rank()])
    });
    mismatch("count", |group, one, two| {
        group.gather_v(&mut two[1..], one, &lists(one.len())[0], 0)
    });
    mismatch("count", |group, one, two| group.scatter_v(one, &two[1..], &lists(one.len())[0], 0));
    mismatch("count", |group, one, two| match (group.rank(), one.len()) {
        (0, n) => group.all_to_all_v(&mut two[..n], &[0, n], one, &[0, n]),
        (_, n) => group.all_to_all_v(&mut two[1..n], &[n - 1, 0], &one[1..], &[n - 1, 0]),
    });
    mismatch("count", |group, one, two| {
        group.reduce_scatter_v(one, &two[1..], &lists(one.len())[group.rank()], ReduceOp::Sum)
    });
    mismatch("verb", |group, one, two| {
        let n = one.len();
        match group.rank() {
            0 => group.all_gather_v(two, one, &[n, n]),
            _ => group.reduce_scatter_v(one, two, &[n, n], ReduceOp::Sum),
        }
    });
}

#[test]
fn a_mismatch_between_processes_is_told_by_both() {
    let workers = Workers::start("mismatch", 2, &[0, 1], TIMEOUT);
    for rank in 0..2 {
        let report = workers.file(&format!("report-{rank}"));
        assert!(report.contains("disagree on count"), "{report}");
        assert!(report.contains("rank 1: all_reduce of 1001 f32, sum"), "{report}");
    }
    workers.finish();
}

#[test]
fn abort_wakes_everyone() {
    let errors = common::threads(4, TIMEOUT, |group| {
        let start = Instant::now();
        if group.rank() == 2 {
            std::thread::sleep(Duration::from_millis(50));
            group.abort("the data loader is out of data");
        }
        let error = match group.rank() {
            // The communication thread, asleep.
            1 => group.all_reduce_async(vec![1_u8; 9], ReduceOp::Sum).unwrap().wait().unwrap_err(),
            _ => group.barrier().unwrap_err(),
        };
        assert!(start.elapsed() < SOON);
        error
    });
    for error in errors {
        let Error::Aborted { by: 2, reason } = &error else { panic!("{error}") };
        assert_eq!(reason, "the data loader is out of data");
    }
}

#[test]
fn an_abort_reaches_the_other_processes() {
    let workers = Workers::start("abort", 3, &[0, 1, 2], TIMEOUT);
    for rank in 0..3 {
        let report = workers.file(&format!("report-{rank}"));
        assert_eq!(report, "the group was aborted by rank 1: enough");
    }
    workers.finish();
}

#[test]
fn a_rank_that_leaves_early_is_named() {
    let errors = common::threads(3, TIMEOUT, |group| {
        let start = Instant::now();
        if group.rank() == 1 {
            return None;
        }
        let error = group.all_reduce(&mut [0_i64; 3000], ReduceOp::Sum).unwrap_err();
        assert!(start.elapsed() < SOON);
        Some(error)
    });
    for error in errors.into_iter().flatten() {
        assert!(matches!(error, Error::Aborted { by: 1, .. }), "{error}");
    }
}

#[test]
fn a_process_that_leaves_in_order_does_no_harm() {
    let workers = Workers::start("leave", 3, &[0, 1, 2], TIMEOUT);
    for rank in [0, 2] {
        let report = workers.file(&format!("report-{rank}"));
        assert!(report.contains("aborted by rank 1: it left the group"), "{report}");
    }
    workers.finish();
}

#[test]
fn a_dropped_work_frees_its_buffer_after_the_operation() {
    common::threads(2, TIMEOUT, |group| {
        for _ in 0..100 {
            drop(group.all_reduce_async(vec![1.0_f32; 20_000], ReduceOp::Sum).unwrap());
        }
        // The group waits for them as it is dropped.
    });
}

/// A buffer that breaks its promise once it is in flight.
struct Faulty(u32);

impl Buffer for Faulty {
    type Elem = u8;

    fn as_mut_slice(&mut self) -> &mut [u8] {
        self.0 += 1;
        assert!(self.0 < 2, "this panic is part of a test");
        &mut []
    }
}

#[test]
fn a_panic_in_flight_ends_the_group_for_everyone() {
    common::threads(2, TIMEOUT, |group| {
        let start = Instant::now();
        let error = match group.rank() {
            0 => group.all_reduce_async(Faulty(0), ReduceOp::Sum).unwrap().wait().map(drop),
            _ => group.barrier(),
        };
        assert!(matches!(error, Err(Error::Aborted { by: 0, .. })), "{error:?}");
        assert!(group.barrier().is_err());
        assert!(start.elapsed() < SOON);
    });
}

/// A buffer whose end is a panic.
struct Bomb(Vec<u8>);

impl Buffer for Bomb {
    type Elem = u8;

    fn as_mut_slice(&mut self) -> &mut [u8] {
        &mut self.0
    }
}

impl Drop for Bomb {
    fn drop(&mut self) {
        panic!("this panic is part of a test");
    }
}

#[test]
fn a_panic_in_the_drop_of_a_buffer_harms_no_other_operation() {
    common::threads(2, TIMEOUT, |group| {
        drop(group.all_reduce_async(Bomb(vec![1; 9]), ReduceOp::Sum).unwrap());
        let work = group.all_reduce_async(vec![1_u8; 9], ReduceOp::Sum).unwrap();
        group.barrier().unwrap();
        assert_eq!(work.wait().unwrap(), [2; 9]);
    });
}

#[test]
fn a_failure_changes_nothing_beside_the_part_it_was_given() {
    common::threads(2, TIMEOUT, |group| {
        let mut shared: SharedBuf<f32> = group.alloc(100_000).unwrap();
        if group.rank() == 1 {
            return;
        }
        shared.fill(7.0);
        let error = group.all_reduce(&mut shared[5000..50_000], ReduceOp::Sum).unwrap_err();
        assert!(matches!(error, Error::Aborted { by: 1, .. }), "{error}");
        assert!(shared[..5000].iter().chain(&shared[50_000..]).all(|&x| x == 7.0));
    });
}

#[test]
fn more_than_memory_can_hold_is_refused_and_the_group_stays() {
    common::threads(2, TIMEOUT, |group| {
        let error = group.alloc::<u8>(isize::MAX as usize).unwrap_err();
        assert!(matches!(error, Error::InvalidArgument(_)), "{error}");
        group.barrier().unwrap();
    });
}

#[test]
fn a_timeout_may_be_forever() {
    let store = MemoryStore::new();
    std::thread::scope(|scope| {
        for rank in 0..2 {
            let store = Arc::new(store.clone());
            scope.spawn(move || {
                let options = GroupOptions::default().with_timeout(Duration::MAX);
                let group = ProcessGroup::from_store(store, rank, 2, options).unwrap();
                group.barrier().unwrap();
            });
        }
    });
}

/// Descriptors, mappings and threads of this process.
fn holdings() -> [usize; 3] {
    let entries = |path| fs::read_dir(path).unwrap().count();
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let shared = maps.lines().filter(|line| line.contains("memfd:collective")).count();
    [entries("/proc/self/fd"), shared, entries("/proc/self/task")]
}

/// Makes and drops one of everything, in ways that differ by `round`.
fn come_and_go(store: &MemoryStore, round: usize) {
    let play = |group: &ProcessGroup| {
        let shared: SharedBuf<f32> = group.alloc(10_000).unwrap();
        let work = group.all_reduce_async(shared, ReduceOp::Sum).unwrap();
        match round % 4 {
            0 => drop(work.wait().unwrap()),
            1 => drop(work),
            // Whoever still works gets an error.
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
    };
    if round.is_multiple_of(2) {
        let play = |group| play(&group);
        common::threads(2, TIMEOUT, play);
        return;
    }
    std::thread::scope(|scope| {
        for rank in 0..2 {
            let (store, options) = (Arc::new(store.clone()), GroupOptions::default());
            scope.spawn(move || play(&ProcessGroup::from_store(store, rank, 2, options).unwrap()));
        }
    });
}

#[test]
fn groups_and_buffers_that_came_and_went_leave_nothing() {
    let workers = Workers::start("churn", 1, &[0], TIMEOUT);
    assert_eq!(workers.file("report-0"), "nothing left");
    workers.finish();
}

/// In a process of its own, where no other test opens anything.
fn churn() -> String {
    let store = MemoryStore::new();
    (0..8).for_each(|round| come_and_go(&store, round));
    let before = holdings();
    (0..2000).for_each(|round| come_and_go(&store, round));
    // The system takes a moment to forget a thread that was joined, of the first rounds too.
    let no_more = || holdings().iter().zip(&before).all(|(after, before)| after <= before);
    let start = Instant::now();
    while !no_more() && start.elapsed() < SOON {
        std::thread::sleep(Duration::from_millis(1));
    }
    if no_more() { "nothing left".into() } else { format!("{before:?} became {:?}", holdings()) }
}

#[test]
fn a_fork_may_not_use_the_group_and_does_it_no_harm() {
    common::threads(2, TIMEOUT, |group| {
        // The communication thread runs, so that the child lacks it.
        drop(group.all_reduce_async(vec![0_u8; 9], ReduceOp::Sum).unwrap().wait().unwrap());
        // SAFETY: the child allocates little, which libc allows after a fork, and exits.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let refused = [
                group.barrier(),
                group.send(&[1_u8], 1 - group.rank()),
                group.recv(&mut [1_u8], 1 - group.rank()),
                group.reduce(&mut [1_u8], ReduceOp::Sum, 0),
            ];
            let refused = refused.iter().all(|it| matches!(it, Err(Error::InvalidArgument(_))));
            group.abort("the child's opinion");
            drop(group);
            // SAFETY: ends the child without running the parent's destructors.
            unsafe { libc::_exit(i32::from(!refused)) };
        }
        let mut status = 0;
        // SAFETY: waits for our own child.
        unsafe { libc::waitpid(child, &raw mut status, 0) };
        assert_eq!(status, 0);
        group.barrier().unwrap();
    });
}

/// Rank 1 stays away from what the others call, and is killed.
fn last(group: &ProcessGroup, ready: impl Fn()) -> Result<()> {
    group.barrier()?;
    ready();
    let (mut buf, op) = (vec![1.0_f32; 12345], ReduceOp::Avg);
    match group.rank() {
        0 => group.all_reduce(&mut buf, op),
        1 => loop {
            std::thread::sleep(SOON);
        },
        _ => group.all_reduce_async(buf, op)?.wait().map(drop),
    }
}

/// Not a test: what a process rank runs.
#[test]
fn worker() {
    let Some(role) = Role::from_env() else { return };
    match role.scenario.as_str() {
        "churn" => return role.report(&churn()),
        "stop-before-joining" => return stopped::play(&role),
        _ => {}
    }
    let group = match role.join() {
        Ok(group) => group,
        Err(error) => return role.report(&error.to_string()),
    };
    let result = match role.scenario.as_str() {
        chaos if chaos.starts_with("chaos-") => return killed::play(&role, &group),
        "work" => work_until_failure(&group, || {
            fs::write(role.dir.join(format!("ready-{}", role.rank)), "").unwrap();
        }),
        "last" => last(&group, || {
            fs::write(role.dir.join(format!("ready-{}", role.rank)), "").unwrap();
        }),
        "mismatch" => group.all_reduce(&mut vec![0.0_f32; 1000 + role.rank], ReduceOp::Sum),
        "abort" => {
            group.barrier().unwrap();
            if role.rank == 1 {
                group.abort("enough");
            }
            group.barrier()
        }
        "leave" => {
            group.barrier().unwrap();
            if role.rank == 1 {
                return;
            }
            // The other has ended, or will soon: either way it is named, not timed out.
            group.all_reduce(&mut [1_u8; 100_000], ReduceOp::Sum)
        }
        other => panic!("no scenario {other}"),
    };
    role.report(&result.unwrap_err().to_string());
}
