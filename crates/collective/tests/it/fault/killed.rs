//! SIGKILL of a rank at any point: every survivor names it soon, and nothing is left behind.
//!
//! `COLLECTIVE_FIGURES=1 cargo test --release -p gradstack-collective --test it fault::killed --
//! --nocapture --test-threads 1` on a quiet machine prints the times and asserts them.

use std::fs;
use std::time::Duration;

use collective::{Error, Message, ProcessGroup, ReduceOp, Result, SharedBuf};

use super::{SOON, TIMEOUT, figures};
use crate::common::{Random, Role, Workers};

/// Number of groups that lose a rank.
const WORLDS: u64 = 200;
/// Latest time at which survivors have their error.
const LATEST: Duration = Duration::from_millis(5);

/// Nanoseconds on a clock that all processes share.
fn now() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is valid during the call.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    u64::try_from(time.tv_sec).unwrap() * 1_000_000_000 + u64::try_from(time.tv_nsec).unwrap()
}

/// Files in a directory with our name, except the tests' own.
fn leftovers(path: &str) -> Vec<String> {
    let entries = fs::read_dir(path).unwrap().flatten();
    let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    let ours = |name: &String| name.contains("collective") && !name.contains("collective-test");
    names.filter(ours).collect()
}

/// Runs a group whose ranks have touched `mib` MiB and kills one rank; returns how long each
/// survivor took to get its error.
fn one_world(seed: u64, mib: usize) -> Vec<Duration> {
    let mut random = Random(seed);
    let world = 2 + random.below(3);
    let ranks: Vec<_> = (0..world).collect();
    let mut workers = Workers::start(&format!("fault::chaos-{seed}-{mib}"), world, &ranks, TIMEOUT);
    for rank in &ranks {
        workers.file(&format!("ready-{rank}"));
    }
    let victim = random.below(world);
    std::thread::sleep(Duration::from_micros(random.below(20_000) as u64));
    let pid = workers.children[victim].id();
    let killed = now();
    workers.children[victim].kill().unwrap();
    let mut took = Vec::new();
    for rank in ranks.into_iter().filter(|&rank| rank != victim) {
        let report = workers.file(&format!("report-{rank}"));
        let (times, error) = report.split_once(' ').unwrap();
        assert!(
            error.contains(&format!("rank {victim} (pid {pid}) died")),
            "seed {seed}, rank {rank} of {world}: {report}"
        );
        // A rank that was computing gets the error at its next call.
        let (called, told) = times.split_once('-').unwrap();
        let since = killed.max(called.parse().unwrap());
        took.push(Duration::from_nanos(told.parse::<u64>().unwrap().saturating_sub(since)));
        assert!(workers.wait(rank).success());
    }
    let files = fs::read_dir(&workers.dir.0).unwrap().flatten();
    let names = files.map(|file| file.file_name().to_string_lossy().into_owned());
    let known = ["ready-", "report-", "flight"];
    let strange = |name: &String| !known.iter().any(|known| name.starts_with(known));
    assert_eq!(names.filter(strange).collect::<Vec<_>>(), Vec::<String>::new());
    took
}

/// Times by which 50, 99 and 100 % of the survivors had their error.
fn known_by(mut took: Vec<Duration>) -> [Duration; 3] {
    took.sort_unstable();
    [50, 99, 100].map(|percent| took[(took.len() - 1) * percent / 100])
}

#[test]
fn a_killed_rank_is_named_by_every_survivor() {
    let before = ["/dev/shm", "/tmp"].map(leftovers);
    let [p50, p99, last] = known_by((0..WORLDS).flat_map(|seed| one_world(seed, 0)).collect());
    println!("{WORLDS} kills: p50 {p50:?}, p99 {p99:?}, max {last:?}");
    assert!(last < SOON, "{last:?}");
    assert!(!figures() || p99 <= LATEST, "{p99:?}");
    for (path, before) in ["/dev/shm", "/tmp"].into_iter().zip(before) {
        let new = leftovers(path).into_iter().filter(|name| !before.contains(name));
        assert_eq!(new.collect::<Vec<_>>(), Vec::<String>::new(), "in {path}");
    }
}

/// The system takes a while to free the memory of a killed process; survivors do not wait for it.
#[test]
fn a_killed_rank_with_much_memory_is_named_as_soon() {
    let worlds = if figures() { 50 } else { 4 };
    let [p50, p99, last] = known_by((0..worlds).flat_map(|seed| one_world(seed, 200)).collect());
    println!("{worlds} kills: p50 {p50:?}, p99 {p99:?}, max {last:?}");
    assert!(last < SOON, "{last:?}");
    assert!(!figures() || p50 <= LATEST, "{p50:?}");
}

/// Runs a rank: random operations until one fails. If ranks are stopped, no point-to-point
/// messages, whose timeouts name only the peer, see `messages`.
pub(crate) fn play(role: &Role, group: &ProcessGroup) {
    let verbs = if role.scenario.starts_with("stop-") { VERBS - 1 } else { VERBS };
    let mut numbers = role.scenario.split('-').skip(1).map(|number| number.parse().unwrap());
    let (seed, mib) = (numbers.next().unwrap(), numbers.next().unwrap_or(0));
    let _memory = vec![1_u8; (mib as usize) << 20];
    let (mut random, mut first) = (Random(seed), true);
    let mut shared: SharedBuf<f32> = group.alloc(100_000).unwrap();
    let mut called = 0;
    let error = loop {
        let result = anything(group, verbs, &mut random, &mut shared, || {
            called = now();
            role.timeout
        });
        if let Err(error) = result {
            break error;
        }
        if std::mem::take(&mut first) {
            fs::write(role.dir.join(format!("ready-{}", role.rank)), "").unwrap();
        }
    };
    let told = now();
    let next = group.barrier().unwrap_err();
    assert!(matches!(next, Error::Poisoned(_)), "{next}");
    role.report(&format!("{called}-{told} {error}"));
}

/// Number of operations; the last is point-to-point messages.
const VERBS: usize = 16;

/// Runs one of the first `verbs` operations, the same on all ranks if `random` is. Calls for the
/// timeout when its buffers are ready.
fn anything(
    group: &ProcessGroup,
    verbs: usize,
    random: &mut Random,
    shared: &mut SharedBuf<f32>,
    timeout: impl FnOnce() -> Duration,
) -> Result<()> {
    let (rank, world) = (group.rank(), group.world_size());
    let magnitude = random.below(17);
    let count = random.below(2 << magnitude);
    let (root, op) = (random.below(world), [ReduceOp::Sum, ReduceOp::Max][random.below(2)]);
    let (mut one, mut all) = (vec![1.0_f32; count], vec![1.0_f32; count * world]);
    let input = all.clone();
    let counts: Vec<usize> = (0..world).map(|_| random.below(count + 1)).collect();
    let total = counts.iter().sum();
    let timeout = timeout();
    match random.below(verbs) {
        0 => group.all_reduce(&mut one, op),
        1 => group.all_reduce(shared, op),
        2 => group.all_reduce_async(one, op)?.wait().map(drop),
        3 => group.reduce(&mut one, op, root),
        4 => group.broadcast(&mut one, root),
        5 => group.all_gather(&mut all, &one),
        6 => group.reduce_scatter(&mut one, &all, op),
        7 => group.gather(&mut all, &one, root),
        8 => group.scatter(&mut one, &all, root),
        9 => group.all_to_all(&mut all, &input),
        10 => group.all_gather_v(&mut all[..total], &input[..counts[rank]], &counts),
        11 => group.gather_v(&mut all[..total], &input[..counts[rank]], &counts, root),
        12 => group.reduce_scatter_v(&mut all[..counts[rank]], &input[..total], &counts, op),
        13 => group.barrier(),
        14 => group.monitored_barrier(timeout),
        _ => group.batch_isend_irecv(vec![
            Message::recv(&mut one, (rank + world - 1) % world),
            Message::send(&input[..count], (rank + 1) % world),
        ]),
    }
}
