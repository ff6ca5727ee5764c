//! Failures of ranks: the right error on every rank, in time, and no leaks.

#![expect(unsafe_code, reason = "tests fork, and stop processes")]

mod files;
mod forked;
mod joining;
mod killed;
pub(crate) mod memory;
mod messages;
mod mismatch;
mod stopped;
mod transports;
mod twice;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::common::refuse::refuse;
use crate::common::{self, Role, SOON, Workers};
use collective::{
    Buffer, Error, GroupOptions, MemoryStore, ProcessGroup, ReduceOp, Result, SharedBuf,
};

const TIMEOUT: Duration = Duration::from_secs(20);

/// Whether to assert the measured times; set on a quiet machine.
fn figures() -> bool {
    std::env::var_os("COLLECTIVE_FIGURES").is_some()
}

/// Checks that a rank that called at `start` fails soon after its timeout. It may fail with a rank
/// that called earlier, but not before the timeout from `base`, before which no rank has called.
fn in_time(base: Instant, start: Instant, timeout: Duration) {
    let slack = if figures() { Duration::from_millis(10) } else { SOON };
    let (all, own) = (base.elapsed(), start.elapsed());
    assert!(all >= timeout && own <= timeout + slack, "{all:?}, {own:?}");
}

/// How long ranks took to detect mismatches, by transport.
static KNOWN: Mutex<BTreeMap<&str, Vec<Duration>>> = Mutex::new(BTreeMap::new());

/// When ranks made mismatched calls.
#[derive(Default)]
struct Calls(Mutex<Vec<Instant>>);

impl Calls {
    /// Records a call.
    fn now(&self) {
        self.0.lock().unwrap().push(Instant::now());
    }

    /// Time from the last call before `known` to `known`. A mismatch cannot be detected before that
    /// call, and one of three ranks on two cores may call late.
    fn until(&self, known: Instant) -> Duration {
        let calls = self.0.lock().unwrap();
        calls.iter().filter_map(|call| known.checked_duration_since(*call)).min().unwrap()
    }
}

/// Checks that a mismatch was detected within 10 ms. The times are those of
///
/// ```sh
/// COLLECTIVE_FIGURES=1 cargo test --release -p gradstack-collective --features gloo --test it -- \
///   fault::mismatch:: fault::messages:: --nocapture --test-threads 1
/// ```
///
/// on a quiet machine. They include formatting the calls, hence `--release`.
#[expect(clippy::print_stdout, reason = "prints the measured times")]
fn at_once(transport: &'static str, took: Duration) {
    if !figures() {
        assert!(took <= SOON, "{took:?}");
        return;
    }
    let mut known = KNOWN.lock().unwrap();
    let times = known.entry(transport).or_default();
    times.push(took);
    times.sort_unstable();
    let [half, most, all] = [50, 99, 100].map(|part| times[(times.len() * part).div_ceil(100) - 1]);
    if times.len().is_multiple_of(250) {
        println!("{transport}, {} calls: half {half:?}, 99 % {most:?}, all {all:?}", times.len());
        assert!(all <= Duration::from_millis(10), "{all:?}");
    }
}

#[test]
fn after_a_kill_flight_records_name_the_operation_in_progress() {
    let mut workers = Workers::start("fault::last", 3, &[0, 1, 2], TIMEOUT);
    workers.all_ready(&[0, 1, 2]);
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

/// As before Linux 5.3 and 5.16, or under a container's seccomp filter.
#[test]
fn a_death_is_detected_without_pidfds() {
    for scenario in ["fault::last-no-pidfd", "fault::last-no-pidfd-nor-waitv"] {
        let mut workers = Workers::start(scenario, 3, &[0, 1, 2], TIMEOUT);
        workers.all_ready(&[0, 1, 2]);
        workers.children[1].kill().unwrap();
        for rank in [0, 2] {
            let report = workers.file(&format!("report-{rank}"));
            assert!(report.contains("rank 1 (pid "), "{scenario}: {report}");
            assert!(workers.wait(rank).success());
        }
    }
}

#[test]
fn a_dropped_work_frees_its_buffer_after_the_operation() {
    common::threads(2, TIMEOUT, |group| {
        for _ in 0..100 {
            drop(group.all_reduce_async(vec![1.0_f32; 20_000], ReduceOp::Sum).unwrap());
        }
        // Dropping the group waits for them.
    });
}

/// A buffer that panics once it is in flight.
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
fn a_panic_on_the_communication_thread_fails_the_group() {
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

/// A buffer whose drop panics.
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
fn a_panic_in_a_buffers_drop_does_not_affect_other_operations() {
    common::threads(2, TIMEOUT, |group| {
        let work = group.all_reduce_async(Bomb(vec![1; 9]), ReduceOp::Sum).unwrap();
        // If the operation is over, this thread drops the buffer.
        drop(std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| drop(work))));
        let work = group.all_reduce_async(vec![1_u8; 9], ReduceOp::Sum).unwrap();
        group.barrier().unwrap();
        assert_eq!(work.wait().unwrap(), [2; 9]);
    });
}

#[test]
fn a_failed_all_reduce_changes_only_its_part_of_a_shared_buffer() {
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
fn an_alloc_that_overflows_is_an_error_and_the_group_stays_usable() {
    common::threads(2, TIMEOUT, |group| {
        let error = group.alloc::<u8>(isize::MAX as usize).unwrap_err();
        assert!(matches!(error, Error::InvalidArgument(_)), "{error}");
        group.barrier().unwrap();
    });
}

#[test]
fn the_timeout_may_be_the_maximum() {
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

/// Rank 1 does not call what the others call, and is killed.
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

/// Runs a process rank.
pub(crate) fn worker() {
    let Some(role) = Role::from_env() else { return };
    if transports::worker(&role) {
        return;
    }
    if role.scenario == "stop-before-joining" {
        return stopped::play(&role);
    }
    match &role.scenario[..] {
        "few-files" | "few-files-first" => return files::play(&role),
        "few-files-store" => return files::serve(&role),
        "small-files" | "small-files-first" => return files::play_small(&role),
        "started-twice" => return twice::play(&role),
        "limited-memory" => return memory::take(&role),
        "not-dumpable" => return memory::play(&role),
        "last-no-pidfd" => refuse(&[libc::SYS_pidfd_open], libc::EPERM),
        "last-no-pidfd-nor-waitv" => {
            refuse(&[libc::SYS_pidfd_open, libc::SYS_futex_waitv], libc::EPERM);
        }
        _ => {}
    }
    let group = role.join().unwrap();
    if role.scenario.starts_with("last") {
        return role.report(&last(&group, || role.ready()).unwrap_err().to_string());
    }
    killed::play(&role, &group);
}
