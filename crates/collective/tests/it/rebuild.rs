//! After every kind of failure the survivors rebuild a working group, repeatedly.

use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::common::{self, Role, SOON, Workers};
use collective::{
    Error, GroupOptions, MemoryStore, ProcessGroup, Rank, ReduceOp, Result, SharedBuf, Store,
    Topology, init_process_group,
};

const TIMEOUT: Duration = Duration::from_secs(30);
/// Longer than the timeout of ranks that wait for a second victim, which would be excluded
/// otherwise.
const GRACE: Duration = Duration::from_secs(6);
/// Longer than any test may take: it is not waited for if the dead ranks are known.
const LONG: Duration = Duration::from_secs(50);

/// A small random generator, the same on every rank.
struct Dice(u64);

impl Dice {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963);
        (self.0 >> 33) % end
    }
}

/// Checks with operations that the group has these ranks of the first one, in order.
fn check(group: &ProcessGroup, epoch: u64, first: Rank, ranks: &[Rank]) {
    try_check(group, epoch, first, ranks).unwrap();
}

fn try_check(group: &ProcessGroup, epoch: u64, first: Rank, ranks: &[Rank]) -> Result<()> {
    assert_eq!((group.epoch(), group.global_ranks()), (epoch, ranks));
    assert_eq!(ranks[group.rank()], first);
    let mut seen = vec![0; ranks.len()];
    group.all_gather(&mut seen, &[first as u64])?;
    assert!(seen.iter().zip(ranks).all(|(&seen, &rank)| seen == rank as u64), "{seen:?}");
    let mut sum = vec![first as f32; 5000];
    group.all_reduce(&mut sum, ReduceOp::Sum)?;
    assert_eq!(sum, vec![ranks.iter().sum::<usize>() as f32; 5000]);
    Ok(())
}

fn check_dead(group: &ProcessGroup) {
    let error = group.all_reduce(&mut [1.0_f32], ReduceOp::Sum).unwrap_err();
    assert!(matches!(error, Error::Poisoned(_)), "{error}");
}

/// Makes the group fail in one of several ways; returns this rank's error.
fn fail(group: &ProcessGroup, way: u64) -> Error {
    let rank = group.rank();
    let result = match way {
        0 if rank == 0 => {
            group.abort("enough");
            group.barrier()
        }
        1 => group.all_reduce(&mut vec![0_u8; 10 + rank], ReduceOp::Sum),
        2 if rank == 0 => group.monitored_barrier(Duration::from_millis(10)),
        2 => {
            std::thread::sleep(Duration::from_millis(100));
            group.barrier()
        }
        _ => group.barrier(),
    };
    result.unwrap_err()
}

/// Two failures in a row; `leavers[k]` is the rank of the first group that leaves at failure `k`.
fn twice(group: ProcessGroup, seed: u64, ways: [u64; 2], leavers: [Rank; 2]) {
    let (first, world) = (group.rank(), group.world_size());
    let mut dice = Dice(seed * 64 + first as u64);
    let mut left: Vec<Rank> = (0..world).collect();
    let mut old = Vec::new();
    let mut group = group;
    for (epoch, (way, leaver)) in (1..).zip(ways.into_iter().zip(leavers)) {
        if way == 3 && first == leaver {
            return;
        }
        let error = fail(&group, way);
        assert!(!matches!(error, Error::InvalidArgument(_)), "{error}");
        if first == leaver {
            return;
        }
        left.retain(|&rank| rank != leaver);
        // Ranks call in a different order each time.
        std::thread::sleep(Duration::from_micros(dice.below(3000)));
        let next = group.rebuild(Duration::from_millis(500)).unwrap();
        check(&next, epoch, first, &left);
        check_dead(&group);
        let error = group.rebuild(LONG).unwrap_err().to_string();
        assert!(error.contains(&format!("default is at epoch {epoch} already")), "{error}");
        old.push(std::mem::replace(&mut group, next));
    }
    old.iter().for_each(check_dead);
    // Its subgroups work, too.
    let part = group.split(Some(group.rank() as u32 % 2), -(first as i64)).unwrap().unwrap();
    let wanted = left.iter().enumerate().filter(|(rank, _)| rank % 2 == group.rank() % 2);
    let mut wanted: Vec<Rank> = wanted.map(|(_, &first)| first).collect();
    wanted.reverse();
    check(&part, 0, first, &wanted);
    group.barrier().unwrap();
}

#[test]
fn survivors_of_any_failure_rebuild_repeatedly() {
    let of_seed = |seed: u64| {
        let ways = [seed % 4, seed / 4 % 4];
        let mut dice = Dice(seed);
        let world = 3 + dice.below(3) as usize;
        let first = dice.below(world as u64) as usize;
        let second = (first + 1 + dice.below(world as u64 - 1) as usize) % world;
        common::threads(world, TIMEOUT, |group| twice(group, seed, ways, [first, second]));
    };
    // Every pair of: abort, mismatch, timeout, a rank that leaves. Four at a time, as they mostly
    // wait.
    std::thread::scope(|scope| {
        for way in 0..4 {
            scope.spawn(move || (0..4).for_each(|other| of_seed(4 * way + other)));
        }
    });
}

#[test]
fn rebuild_of_all_ranks_does_not_wait_for_the_grace_period() {
    for way in 0..3 {
        common::threads(4, TIMEOUT, |group| {
            let start = Instant::now();
            drop(fail(&group, way));
            let group = group.rebuild(LONG).unwrap();
            check(&group, 1, group.rank(), &[0, 1, 2, 3]);
            assert!(start.elapsed() < SOON, "{:?}", start.elapsed());
        });
    }
}

#[test]
fn a_healthy_group_can_be_rebuilt() {
    common::threads(3, TIMEOUT, |group| {
        // One rank is still in an operation, and gets an error.
        if group.rank() == 2 {
            let error = (0..).find_map(|_| group.recv(&mut [0_u8], 0).err()).unwrap();
            assert!(!matches!(error, Error::InvalidArgument(_)), "{error}");
        }
        let next = group.rebuild(LONG).unwrap();
        check(&next, 1, group.rank(), &[0, 1, 2]);
        check_dead_or_aborted(&group);
        let error = group.rebuild(LONG).unwrap_err();
        assert!(matches!(error, Error::InvalidArgument(_)), "{error}");
    });
}

/// For a rank without an earlier error the first one is the abort itself.
fn check_dead_or_aborted(group: &ProcessGroup) {
    let error = group.barrier().unwrap_err();
    assert!(matches!(error, Error::Aborted { .. } | Error::Poisoned(_)), "{error}");
    check_dead(group);
}

#[test]
fn a_rank_that_misses_the_grace_period_is_excluded() {
    common::threads(3, TIMEOUT, |group| {
        drop(fail(&group, 0));
        if group.rank() == 1 {
            std::thread::sleep(Duration::from_millis(600));
            for _ in 0..2 {
                let error = group.rebuild(LONG).unwrap_err();
                let Error::LeftBehind { epoch: 1, members, .. } = &error else { panic!("{error}") };
                assert_eq!(members, &[0, 2]);
                assert!(error.to_string().contains("grace period (epoch 1, ranks 0, 2)"));
            }
            return;
        }
        let next = group.rebuild(Duration::from_millis(100)).unwrap();
        check(&next, 1, group.rank(), &[0, 2]);
        // The late rank is not a candidate of the next rebuild either.
        let next = next.rebuild(LONG).unwrap();
        check(&next, 2, group.rank(), &[0, 2]);
    });
}

#[test]
fn a_subgroup_is_rebuilt_separately() {
    common::threads(5, TIMEOUT, |group| {
        let rank = group.rank();
        let part = group.split(Some(rank as u32 % 2), -(rank as i64)).unwrap().unwrap();
        if rank % 2 == 0 {
            assert_eq!(part.global_ranks(), [4, 2, 0]);
            drop(fail(&part, 0));
            if rank != 2 {
                let part = part.rebuild(Duration::from_millis(300)).unwrap();
                check(&part, 1, rank, &[4, 0]);
                assert_eq!(part.parent_ranks(), [0, 2]);
            }
        } else {
            part.barrier().unwrap();
        }
        group.barrier().unwrap();
    });
}

/// A store that stops answering once its rank has written its answer.
#[derive(Debug)]
struct Failing {
    store: MemoryStore,
    fails: AtomicBool,
}

impl Failing {
    fn answer(&self) -> Result<&MemoryStore> {
        if !self.fails.load(Ordering::Relaxed) {
            return Ok(&self.store);
        }
        let [store, during, reason] = ["elsewhere:1", "check", "no answer"].map(String::from);
        Err(Error::Store { store, during, reason })
    }
}

impl Store for Failing {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.answer()?.set(key, value)?;
        if key.contains("/roll/") {
            self.fails.store(true, Ordering::Relaxed);
        }
        Ok(())
    }
    fn read(&self, keys: &[&str]) -> Result<Vec<Vec<u8>>> {
        self.answer()?.read(keys)
    }
    fn name(&self) -> String {
        self.store.name()
    }
    fn add(&self, key: &str, delta: i64) -> Result<i64> {
        self.answer()?.add(key, delta)
    }
    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>> {
        self.answer()?.compare_set(key, expected, desired)
    }
    fn try_wait(&self, keys: &[&str], timeout: Duration) -> Result<bool> {
        self.answer()?.try_wait(keys, timeout)
    }
    fn check(&self, keys: &[&str]) -> Result<bool> {
        self.answer()?.check(keys)
    }
    fn delete_key(&self, key: &str) -> Result<bool> {
        self.answer()?.delete_key(key)
    }
    fn num_keys(&self) -> Result<i64> {
        self.answer()?.num_keys()
    }
}

#[test]
fn a_rank_lost_during_rebuild_is_named_and_excluded_from_the_next() {
    let store = MemoryStore::new();
    std::thread::scope(|scope| {
        for rank in 0..4 {
            let memory = store.clone();
            scope.spawn(move || {
                let store: Arc<dyn Store> = match rank {
                    1 => Arc::new(Failing { store: memory, fails: false.into() }),
                    _ => Arc::new(memory),
                };
                let options = GroupOptions::default().with_timeout(Duration::from_secs(2));
                let group = ProcessGroup::from_store(store, rank, 4, options).unwrap();
                drop(fail(&group, 0));
                if rank == 1 {
                    let error = group.rebuild(LONG).unwrap_err();
                    let Error::Rendezvous { addr, .. } = &error else { panic!("{error}") };
                    assert_eq!(addr, "elsewhere:1");
                    return;
                }
                let error = group.rebuild(LONG).unwrap_err();
                // The rank that detects it first tells the others.
                assert!(matches!(error, Error::Timeout { .. } | Error::Aborted { .. }), "{error}");
                let text = error.to_string();
                assert!(text.contains("joining group default/epoch1: timed out"), "{text}");
                assert!(text.ends_with("missing rank 1"), "{text}");
                let group = group.rebuild(Duration::from_millis(500)).unwrap();
                check(&group, 2, rank, &[0, 2, 3]);
                assert_eq!(group.parent_ranks(), [0, 2, 3]);
            });
        }
    });
}

#[test]
fn a_reused_name_ignores_earlier_rosters() {
    let store = MemoryStore::new();
    for leaver in [0, 2, 1] {
        std::thread::scope(|scope| {
            for rank in 0..3 {
                let store = Arc::new(store.clone());
                scope.spawn(move || {
                    let options = GroupOptions::default().with_timeout(TIMEOUT);
                    let group = ProcessGroup::from_store(store, rank, 3, options).unwrap();
                    drop(fail(&group, 0));
                    if rank != leaver {
                        let ranks: Vec<_> = (0..3).filter(|&rank| rank != leaver).collect();
                        let group = group.rebuild(Duration::from_millis(300)).unwrap();
                        check(&group, 1, rank, &ranks);
                    }
                });
            }
        });
    }
}

/// Runs several operations repeatedly until the group fails.
fn work_until_failure(group: &ProcessGroup) -> Error {
    let work = || -> Result<()> {
        let mut shared: SharedBuf<f32> = group.alloc(50_000)?;
        let mut large = vec![1.0_f32; 100_000];
        loop {
            group.all_reduce(&mut large, ReduceOp::Avg)?;
            shared = group.all_reduce_async(shared, ReduceOp::Avg)?.wait()?;
            group.barrier()?;
        }
    };
    work().unwrap_err()
}

/// Kills two of four processes, the second in an operation or, if `early`, in the rebuild.
fn kill_two(seed: u64, early: bool) {
    let mut dice = Dice(seed);
    let mut workers = Workers::start("rebuild::survive", 4, &[0, 1, 2, 3], GRACE / 3);
    let mut left = vec![0, 1, 2, 3];
    for rank in 0..4 {
        workers.file(&format!("group-{rank}-of-4"));
    }
    for round in 0..2 {
        std::thread::sleep(Duration::from_micros(dice.below(5000)));
        let victim = left.remove(dice.below(left.len() as u64) as usize);
        workers.children[victim].kill().unwrap();
        if early && round == 0 {
            continue;
        }
        let start = Instant::now();
        for rank in &left {
            let name = format!("group-{rank}-of-{}", left.len());
            let ask = || {
                for &rank in &left {
                    workers.check_runs(rank);
                }
                fs::read_to_string(workers.dir.0.join(&name)).ok()
            };
            let report = common::wait_for(ask, &name);
            assert!(report.ends_with(&format!("ranks {left:?}")), "{report}");
            // The first rebuild does not wait for the grace period: all survivors know the dead
            // rank.
            let died = format!("rank {victim} (pid {}) died", workers.children[victim].id());
            assert!(early || round == 1 || report.contains(&died), "{report}");
        }
        let limit = if early { 3 * SOON } else { SOON };
        assert!(start.elapsed() < limit, "{:?}", start.elapsed());
    }
}

#[test]
fn processes_survive_two_kills() {
    (0..8).for_each(|seed| kill_two(seed, false));
}

#[test]
fn processes_survive_a_kill_during_the_rebuild() {
    (0..4).for_each(|seed| kill_two(100 + seed, true));
}

#[test]
fn a_death_is_detected_without_an_operation() {
    let mut workers = Workers::start("rebuild::idle", 3, &[0, 1, 2], TIMEOUT);
    for rank in 0..3 {
        workers.file(&format!("ready-{rank}"));
    }
    workers.children[1].kill().unwrap();
    std::thread::sleep(Duration::from_millis(500));
    let start = Instant::now();
    fs::write(workers.dir.0.join("go"), "").unwrap();
    for rank in [0, 2] {
        assert_eq!(workers.file(&format!("report-{rank}")), "ranks [0, 2]");
        assert!(workers.wait(rank).success());
    }
    assert!(start.elapsed() < SOON, "{:?}", start.elapsed());
}

#[test]
fn a_store_that_ended_with_its_rank_is_named() {
    let mut workers = Workers::start("rebuild::store-in-rank-0", 3, &[0, 1, 2], TIMEOUT);
    let addr = workers.file("addr");
    for rank in 0..3 {
        workers.file(&format!("ready-{rank}"));
    }
    workers.children[0].kill().unwrap();
    let start = Instant::now();
    for rank in 1..3 {
        let report = workers.file(&format!("report-{rank}"));
        assert!(report.starts_with(&format!("rendezvous at {addr}: the store")), "{report}");
        assert!(report.contains("TORCHELASTIC_USE_AGENT_STORE"), "{report}");
        assert!(workers.wait(rank).success());
    }
    assert!(start.elapsed() < SOON, "{:?}", start.elapsed());
}

/// Rebuilds with the survivors and reports each group.
fn survive(role: &Role, mut group: ProcessGroup) {
    let mut failure = String::from("none");
    loop {
        let (world, ranks) = (group.world_size(), group.global_ranks().to_vec());
        failure = match try_check(&group, group.epoch(), role.rank, &ranks) {
            Ok(()) => {
                let text = format!("after {failure}: ranks {ranks:?}");
                role.write(&format!("group-{}-of-{world}", role.rank), &text);
                work_until_failure(&group).to_string()
            }
            Err(error) => error.to_string(),
        };
        group = loop {
            // The second death may not be detected before the rebuild.
            match group.rebuild(GRACE) {
                Ok(group) => break group,
                Err(Error::PeerDied { .. } | Error::Timeout { .. } | Error::Aborted { .. }) => {}
                Err(error) => return role.report(&error.to_string()),
            }
        };
    }
}

/// Rebuilds without an operation since the death.
fn idle(role: &Role, group: &ProcessGroup) {
    group.barrier().unwrap();
    role.write(&format!("ready-{}", role.rank), "");
    common::wait_for(|| fs::exists(role.dir.join("go")).unwrap().then_some(()), "the signal");
    let group = group.rebuild(LONG).unwrap();
    check(&group, 1, role.rank, &[0, 2]);
    role.report(&format!("ranks {:?}", group.global_ranks()));
}

/// Rank 0 serves the store, as with `init_process_group` without a launcher.
fn store_in_rank_0(role: &Role) {
    if role.rank == 0 {
        let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        role.write("addr", &free.local_addr().unwrap().to_string());
    }
    let addr = common::wait_for(|| fs::read_to_string(role.dir.join("addr")).ok(), "the address");
    let port = addr.rsplit(':').next().unwrap();
    let topology = Topology::from_env(|name| match name {
        "RANK" | "LOCAL_RANK" => Some(role.rank.to_string()),
        "WORLD_SIZE" => Some(role.world.to_string()),
        "MASTER_ADDR" => Some("127.0.0.1".into()),
        "MASTER_PORT" => Some(port.into()),
        _ => None,
    });
    let options = GroupOptions::default().with_timeout(role.timeout);
    let group = init_process_group(&topology.unwrap(), options).unwrap();
    group.barrier().unwrap();
    role.write(&format!("ready-{}", role.rank), "");
    drop(work_until_failure(&group));
    role.report(&group.rebuild(LONG).unwrap_err().to_string());
}

/// Runs a process rank.
pub(crate) fn worker() {
    let Some(role) = Role::from_env() else { return };
    match role.scenario.as_str() {
        "survive" => survive(&role, role.join().unwrap()),
        "idle" => idle(&role, &role.join().unwrap()),
        "store-in-rank-0" => store_in_rank_0(&role),
        other => panic!("no scenario {other}"),
    }
}
