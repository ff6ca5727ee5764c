//! What goes wrong with ranks that are connected over TCP: the right error, on every rank, in time.
//! Over the loopback here; over network namespaces, where cables are cut, in [`hosts`].

#![expect(clippy::unwrap_used, reason = "tests")]
#![expect(unsafe_code, reason = "tests fork and stop processes")]
#![expect(clippy::print_stderr, reason = "a test says why it is ignored")]

#[expect(dead_code, reason = "the other tests use the rest")]
mod common;
#[path = "tcp/hosts.rs"]
mod hosts;

use std::fs;
use std::io::Write as _;
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use collective::{
    Error, GroupOptions, MemoryStore, Message, ProcessGroup, ReduceOp, Result, Store, Transport,
};
use common::{DEADLINE, Role, Workers, over_machines, over_tcp, play, wait_for};
use half::f16;

const TIMEOUT: Duration = Duration::from_secs(20);
/// "At once", on a loaded machine.
const SOON: Duration = Duration::from_secs(5);

fn options(timeout: Duration) -> GroupOptions {
    GroupOptions::default().with_timeout(timeout).with_transport(Transport::Tcp)
}

/// Calls `rank` on every rank of a group over TCP, and of one on two machines whose ranks share
/// memory; what they returned.
fn over_both<T: Send>(
    world: usize,
    timeout: Duration,
    rank: impl Fn(ProcessGroup) -> T + Sync,
) -> Vec<T> {
    [over_tcp, over_machines]
        .into_iter()
        .flat_map(|groups| play(groups(world, timeout), &rank))
        .collect()
}

/// Works without end, in all ways there are, until the group fails.
fn work_until_failure(group: &ProcessGroup, ready: impl Fn()) -> Result<()> {
    let (mut small, mut large) = (vec![1_i32; 10], vec![1.0_f32; 400_000]);
    for round in 0.. {
        group.all_reduce(&mut small, ReduceOp::Max)?;
        group.all_reduce(&mut large, ReduceOp::Avg)?;
        large = group.all_reduce_async(large, ReduceOp::Avg)?.wait()?;
        group.broadcast(&mut large, round % group.world_size())?;
        group.barrier()?;
        if round == 0 {
            ready();
        }
    }
    Ok(())
}

#[test]
fn every_size_has_the_bits_of_shared_memory() {
    let counts = [1, 16, 17, 5_000, 70_000, 300_001, 3_000_000];
    let reduced = |group: ProcessGroup| {
        let of = |&count: &usize| {
            let noise = |i: usize| f16::from_f32((i * 7919 % 1009) as f32 * 0.01 - 5.0);
            let mut x: Vec<f16> = (0..count).map(|i| noise(i + group.rank() * 31)).collect();
            group.all_reduce(&mut x, ReduceOp::Sum).unwrap();
            x.iter().map(|x| x.to_bits()).collect::<Vec<_>>()
        };
        counts.iter().map(of).collect::<Vec<_>>()
    };
    for world in [2, 3] {
        let host = play(ProcessGroup::threads(world, TIMEOUT).unwrap(), reduced);
        for groups in [over_tcp, over_machines] {
            assert!(host == play(groups(world, TIMEOUT), reduced), "{world} ranks");
        }
    }
}

#[test]
fn the_group_says_what_carries_it() {
    for group in over_tcp(2, TIMEOUT) {
        assert_eq!((group.backend_name(), group.backend_reason()), ("tcp", "it was asked for"));
    }
    let store = Arc::new(MemoryStore::new());
    let group = ProcessGroup::from_store(store, 0, 1, GroupOptions::default()).unwrap();
    assert_eq!(group.backend_name(), "host");
    assert_eq!(group.backend_reason(), "all ranks are on one machine");
}

#[test]
fn subgroups_and_the_survivors_are_over_tcp_too() {
    play(over_tcp(3, TIMEOUT), |group| {
        let pair = group.split((group.rank() < 2).then_some(0), 0).unwrap();
        if let Some(pair) = pair {
            assert_eq!((pair.backend_name(), pair.world_size()), ("tcp", 2));
            pair.barrier().unwrap();
        }
        if group.rank() == 1 {
            return;
        }
        group.barrier().unwrap_err();
        let left = group.rebuild(Duration::from_millis(500)).unwrap();
        assert_eq!((left.backend_name(), left.world_size()), ("tcp", 2));
        let mut x = [left.rank() as u64 + 1];
        left.all_reduce(&mut x, ReduceOp::Sum).unwrap();
        assert_eq!(x, [3]);
    });
}

/// Of two machines one is left.
#[test]
fn survivors_of_one_machine_share_its_memory() {
    play(over_machines(3, TIMEOUT), |group| {
        assert_eq!(group.backend_name(), "tcp");
        if group.rank() == 1 {
            return;
        }
        group.barrier().unwrap_err();
        let left = group.rebuild(Duration::from_millis(500)).unwrap();
        assert_eq!((left.backend_name(), left.world_size()), ("host", 2));
        left.barrier().unwrap();
    });
}

#[test]
fn a_killed_rank_is_named_by_every_survivor() {
    for round in 0..16_u64 {
        let world = 2 + round as usize % 3;
        let ranks: Vec<_> = (0..world).collect();
        let transport = ["tcp", "machines"][round as usize / 3 % 2];
        let mut workers = Workers::start_over(transport, "work", world, &ranks, TIMEOUT);
        for rank in &ranks {
            workers.file(&format!("ready-{rank}"));
        }
        let victim = (round as usize * 7 + 1) % world;
        // To hit another point each time.
        std::thread::sleep(Duration::from_micros(round * round * 137 % 5000));
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

#[test]
fn a_stopped_rank_is_named_by_all_who_wait_for_one_another() {
    let timeout = Duration::from_secs(2);
    for (victim, transport) in
        [(0, "tcp"), (1, "tcp"), (2, "tcp"), (0, "machines"), (1, "machines")]
    {
        let workers = Workers::start_over(transport, "work", 3, &[0, 1, 2], timeout);
        for rank in 0..3 {
            workers.file(&format!("ready-{rank}"));
        }
        let pid = workers.children[victim].id().cast_signed();
        // SAFETY: stops our own child, which is killed when the test is over.
        assert_eq!(unsafe { libc::kill(pid, libc::SIGSTOP) }, 0);
        let start = Instant::now();
        for rank in (0..3).filter(|&rank| rank != victim) {
            let report = workers.file(&format!("report-{rank}"));
            assert!(report.ends_with(&format!("still missing rank {victim}")), "{report}");
        }
        assert!(start.elapsed() < timeout + SOON, "{:?}", start.elapsed());
    }
}

#[test]
fn a_rank_that_computes_finds_out_at_its_next_call() {
    let mut workers = Workers::start_over("tcp", "compute", 3, &[0, 1, 2], TIMEOUT);
    workers.file("ready-0");
    let pid = workers.children[1].id();
    workers.children[1].kill().unwrap();
    // Rank 2 waits in an operation; rank 0 computes until then.
    let report = workers.file("report-2");
    assert!(report.contains(&format!("rank 1 (pid {pid}) died")), "{report}");
    fs::write(workers.dir.0.join("go"), "").unwrap();
    let start = Instant::now();
    let report = workers.file("report-0");
    assert!(report.contains(&format!("rank 1 (pid {pid}) died")), "{report}");
    assert!(start.elapsed() < SOON);
}

#[test]
fn a_rank_that_never_joins_is_named() {
    let timeout = Duration::from_millis(500);
    let workers = Workers::start_over("tcp", "work", 3, &[0, 2], timeout);
    for rank in [0, 2] {
        let report = workers.file(&format!("report-{rank}"));
        assert!(report.contains("joining group default: timed out"), "{report}");
        assert!(report.ends_with("missing rank 1"), "{report}");
    }
}

#[test]
fn ranks_that_never_come_are_named_in_time() {
    let timeout = Duration::from_millis(300);
    let errors = over_both(4, timeout, |group| {
        let start = Instant::now();
        // Ranks 1 and 3 keep the group but do something else.
        if group.rank() % 2 == 1 {
            std::thread::sleep(2 * timeout);
            let late = group.barrier().unwrap_err();
            assert!(matches!(late, Error::Aborted { .. }), "{late}");
            return None;
        }
        let error = group.all_reduce(&mut [1.0_f32; 5000], ReduceOp::Sum).unwrap_err();
        let waited = start.elapsed();
        assert!(waited >= timeout.mul_f32(0.9) && waited < timeout + SOON, "{waited:?}");
        let next = group.barrier().unwrap_err();
        assert!(matches!(next, Error::Poisoned(_)), "{next}");
        Some(error)
    });
    for error in errors.into_iter().flatten() {
        let Error::Timeout { missing, op, .. } = &error else { panic!("{error}") };
        assert_eq!(missing, &[1, 3]);
        assert!(op.contains("all_reduce #1"), "{op}");
    }
}

#[test]
fn whoever_waits_for_a_third_is_not_blamed() {
    let timeout = Duration::from_millis(600);
    let errors = over_both(4, timeout, |group| {
        // Each waits for the next, the first since longer than the others; the last computes.
        std::thread::sleep(Duration::from_millis(20) * group.rank() as u32);
        match group.rank() {
            3 => {
                std::thread::sleep(2 * timeout);
                None
            }
            rank => Some(group.recv(&mut [0_u8; 10], rank + 1).unwrap_err()),
        }
    });
    for error in errors.into_iter().flatten() {
        let Error::Timeout { missing, .. } = &error else { panic!("{error}") };
        assert_eq!(missing, &[3]);
    }
}

/// Two ranks call, with the same buffers, what `call` says; both must see `field` differ, name what
/// each called, and have their bytes unchanged.
fn mismatch(
    field: &str,
    call: impl Fn(&ProcessGroup, &mut [f32], &mut [f32]) -> Result<()> + Sync,
) {
    for count in [10, 1_000_000] {
        over_both(3, TIMEOUT, |group| {
            let start = Instant::now();
            let fill: Vec<f32> = (0..count).map(|i| (i + group.rank()) as f32).collect();
            let (mut one, mut two) = (fill.clone(), fill.repeat(3));
            let error = call(&group, &mut one, &mut two).unwrap_err();
            assert!(start.elapsed() < SOON);
            let Error::Mismatch { field: got, by_rank, .. } = &error else { panic!("{error}") };
            assert_eq!(*got, field, "{error}");
            assert_eq!(by_rank.iter().map(|(rank, _)| *rank).collect::<Vec<_>>(), [0, 1, 2]);
            assert!(by_rank.iter().any(|(_, call)| *call != by_rank[0].1), "{error}");
            assert!(one == fill && two == fill.repeat(3));
            let next = group.barrier().unwrap_err();
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
        1 => group.all_gather(two, one),
        _ => group.reduce_scatter(one, two, sum),
    });
    mismatch("verb", |group, one, two| match group.rank() {
        2 => group.gather(two, one, 2),
        _ => group.scatter(one, if group.rank() == 0 { two } else { &[] }, 0),
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
    // From one algorithm to another.
    mismatch("count", |group, one, two| match group.rank() {
        0 => group.all_reduce(&mut one[..5], sum),
        _ => group.all_reduce(two, sum),
    });
}

#[test]
fn a_message_that_does_not_fit_is_told_to_both() {
    let errors = over_both(3, TIMEOUT, |group| {
        let start = Instant::now();
        let mut into = [7_u8; 100_000];
        let result = match group.rank() {
            0 => group.send(&[f16::ONE; 3], 1),
            1 => group.recv(&mut into, 0),
            _ => Ok(()),
        };
        assert!(into.iter().all(|&x| x == 7));
        // The sender may have been done before; then its next call says so.
        let error = result.and_then(|()| group.barrier()).unwrap_err();
        assert!(start.elapsed() < SOON);
        error
    });
    for error in errors {
        let Error::Mismatch { field, by_rank, .. } = &error else { panic!("{error}") };
        assert_eq!(*field, "dtype");
        assert_eq!(by_rank[0], (0, "a message of 3 f16 to rank 1".into()));
        assert_eq!(by_rank[1], (1, "a message of 100000 u8 from rank 0".into()));
    }
}

#[test]
fn a_message_in_the_place_of_a_collective_is_a_mismatch_for_all() {
    let errors = over_both(3, TIMEOUT, |group| {
        let sent = match group.rank() {
            0 => group.send(&[1_u8; 2_000_000], 1),
            _ => Ok(()),
        };
        // Of the first barrier, only rank 1 misses a part.
        sent.and_then(|()| group.barrier()).and_then(|()| group.barrier())
    });
    for error in errors {
        let error = error.unwrap_err();
        let Error::Mismatch { field: "verb", by_rank, .. } = &error else { panic!("{error}") };
        assert_eq!(by_rank[0], (0, "a message of 2000000 u8 to rank 1".into()));
        assert_eq!(by_rank[1], (1, "barrier".into()));
    }
}

#[test]
fn messages_to_each_other_larger_than_any_buffer_do_not_lock_up() {
    over_both(3, TIMEOUT, |group| {
        let (rank, count) = (group.rank(), 8_000_000);
        let out = vec![rank as u8; count];
        let (mut left, mut right) = (vec![9_u8; count], vec![9_u8; count]);
        let [before, after] = [(rank + 2) % 3, (rank + 1) % 3];
        let messages = vec![
            Message::send(&out, after),
            Message::send(&out, before),
            Message::recv(&mut left, before),
            Message::recv(&mut right, after),
        ];
        group.batch_isend_irecv(messages).unwrap();
        assert!(left.iter().all(|&x| usize::from(x) == before));
        assert!(right.iter().all(|&x| usize::from(x) == after));
    });
}

#[test]
fn abort_wakes_everyone() {
    let errors = over_both(4, TIMEOUT, |group| {
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
fn an_abort_reaches_the_others_though_the_process_ends_at_once() {
    let workers = Workers::start_over("tcp", "abort", 3, &[0, 1, 2], TIMEOUT);
    for rank in [0, 2] {
        let report = workers.file(&format!("report-{rank}"));
        assert_eq!(report, "the group was aborted by rank 1: enough");
    }
}

#[test]
fn a_rank_that_leaves_early_is_named() {
    let errors = over_both(3, TIMEOUT, |group| {
        let start = Instant::now();
        if group.rank() == 1 {
            return None;
        }
        let error = group.all_reduce(&mut [0_i64; 3000], ReduceOp::Sum).unwrap_err();
        assert!(start.elapsed() < SOON);
        Some(error)
    });
    for error in errors.into_iter().flatten() {
        let Error::Aborted { by: 1, reason } = &error else { panic!("{error}") };
        assert!(reason.starts_with("it left the group before all_reduce"), "{reason}");
    }
}

#[test]
fn a_rank_may_leave_while_others_still_receive() {
    for _ in 0..20 {
        over_both(3, TIMEOUT, |group| {
            let mut x = vec![group.rank() as f32; 1_000_000];
            group.broadcast(&mut x, 0).unwrap();
            assert!(x.iter().all(|&x| x == 0.0));
        });
    }
}

#[test]
fn a_group_that_all_leave_in_order_fails_nowhere() {
    let workers = Workers::start_over("tcp", "leave", 3, &[0, 1, 2], TIMEOUT);
    for rank in 0..3 {
        assert_eq!(workers.file(&format!("report-{rank}")), "done");
    }
    workers.finish();
}

#[test]
fn strangers_are_not_let_in() {
    let (store, world) = (MemoryStore::new(), 2);
    std::thread::scope(|scope| {
        let join = |rank| {
            let store = Arc::new(store.clone());
            scope.spawn(move || {
                let group = ProcessGroup::from_store(store, rank, world, options(TIMEOUT)).unwrap();
                let mut x = [rank as u64 + 1];
                group.all_reduce(&mut x, ReduceOp::Sum).unwrap();
                assert_eq!(x, [3]);
            })
        };
        join(0);
        // Rank 1 says where it is, but then keeps rank 0 waiting.
        for what in ["place", "tcp"] {
            let said = store.get(&format!("default/1/{what}/0"), SOON).unwrap();
            store.set(&format!("default/1/{what}/1"), &said).unwrap();
        }
        let member: serde_json::Value =
            serde_json::from_slice(&store.get("default/1/tcp/0", SOON).unwrap()).unwrap();
        let addr: SocketAddr = member["addr"].as_str().unwrap().parse().unwrap();
        // One says nothing, one speaks something else, one knows the form but not the group.
        let _silent = TcpStream::connect(addr).unwrap();
        TcpStream::connect(addr).unwrap().write_all(&[b'x'; 300]).unwrap();
        let words = [0_u64, 0, 1, 2, 1, 0, 0].map(u64::to_le_bytes).concat();
        let hello = [&b"\x01collec1"[..], &words].concat();
        let mut forged = TcpStream::connect(addr).unwrap();
        forged.write_all(&hello).unwrap();
        let mut answer = Vec::new();
        drop(std::io::Read::read_to_end(&mut forged, &mut answer));
        assert!(answer.is_empty());
        join(1);
    });
}

#[test]
fn a_listener_that_is_no_rank_is_named_with_its_address() {
    let store = MemoryStore::new();
    let other = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = other.local_addr().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let (mut stream, _) = other.accept().unwrap();
            stream.write_all(&[b'x'; 64]).unwrap();
            std::thread::sleep(Duration::from_millis(200));
        });
        let own = Arc::new(store.clone());
        let rank = scope.spawn(move || ProcessGroup::from_store(own, 1, 2, options(TIMEOUT)));
        let place = wait_for(|| store.get("default/1/place/1", SOON).ok(), "rank 1");
        store.set("default/1/place/0", &place).unwrap();
        let member = format!("{{\"addr\":\"{addr}\",\"nonce\":[1,2]}}");
        store.set("default/1/tcp/0", member.as_bytes()).unwrap();
        let error = rank.join().unwrap().unwrap_err();
        let Error::Rendezvous { addr: named, reason } = &error else { panic!("{error}") };
        assert_eq!(*named, addr.to_string());
        assert!(reason.contains("not rank 0 of group default"), "{reason}");
    });
}

#[test]
fn a_rank_that_ended_before_it_was_connected_to_is_named_at_once() {
    let store = MemoryStore::new();
    let addr = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let own = Arc::new(store.clone());
    let rank = std::thread::spawn(move || ProcessGroup::from_store(own, 1, 2, options(TIMEOUT)));
    let place = wait_for(|| store.get("default/1/place/1", SOON).ok(), "rank 1");
    let start = Instant::now();
    store.set("default/1/place/0", &place).unwrap();
    let member = format!("{{\"addr\":\"{addr}\",\"nonce\":[1,2]}}");
    store.set("default/1/tcp/0", member.as_bytes()).unwrap();
    let error = rank.join().unwrap().unwrap_err().to_string();
    assert!(error.contains(&addr.to_string()) && error.contains("rank 0"), "{error}");
    assert!(start.elapsed() < SOON);
}

#[test]
fn a_fork_may_not_use_the_group_and_does_it_no_harm() {
    over_both(2, TIMEOUT, |group| {
        // SAFETY: the child allocates little, which libc allows after a fork, and exits.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let refused = matches!(group.barrier(), Err(Error::InvalidArgument(_)));
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

/// Descriptors and threads of this process.
fn holdings() -> [usize; 2] {
    ["/proc/self/fd", "/proc/self/task"].map(|path| fs::read_dir(path).unwrap().count())
}

#[test]
fn groups_that_came_and_went_leave_nothing() {
    let workers = Workers::start("churn", 1, &[0], TIMEOUT);
    assert_eq!(workers.file("report-0"), "nothing left");
    workers.finish();
}

/// In a process of its own, where no other test opens anything.
fn churn() -> String {
    let come_and_go = |round: usize| {
        over_both(2, TIMEOUT, |group| match round % 3 {
            0 => group.barrier().unwrap(),
            1 => group.abort("enough"),
            _ => drop(group.all_reduce_async(vec![1_u8; 9], ReduceOp::Sum).unwrap()),
        });
    };
    (0..3).for_each(come_and_go);
    let before = holdings();
    (0..100).for_each(come_and_go);
    let no_more = || holdings().iter().zip(&before).all(|(after, before)| after <= before);
    // The system takes a moment to forget a thread that was joined.
    let start = Instant::now();
    while !no_more() && start.elapsed() < SOON {
        std::thread::sleep(Duration::from_millis(1));
    }
    if no_more() { "nothing left".into() } else { format!("{before:?} became {:?}", holdings()) }
}

/// Not a test: what a process rank runs.
#[test]
fn worker() {
    let Some(role) = Role::from_env() else { return };
    match role.scenario.as_str() {
        "churn" => return role.report(&churn()),
        "store" => return hosts::serve(&role),
        _ => {}
    }
    let group = match role.join() {
        Ok(group) => group,
        Err(error) => return role.report(&error.to_string()),
    };
    let ready = || fs::write(role.dir.join(format!("ready-{}", role.rank)), "").unwrap();
    let result = match role.scenario.as_str() {
        "work" => work_until_failure(&group, ready),
        "count" => hosts::work_a_while(&group),
        "compute" => match role.rank {
            0 => {
                group.barrier().unwrap();
                ready();
                wait_for(|| fs::read(role.dir.join("go")).ok(), "the word");
                group.barrier()
            }
            // Had it entered again, the others would need nothing more of it.
            1 => {
                group.barrier().unwrap();
                std::thread::sleep(DEADLINE);
                panic!("it should be dead");
            }
            _ => group.barrier().and_then(|()| group.barrier()),
        },
        "abort" if role.rank == 1 => {
            group.barrier().unwrap();
            group.abort("enough");
            std::process::exit(0);
        }
        // The abort may overtake the end of the first barrier.
        "abort" => group.barrier().and_then(|()| group.barrier()),
        "leave" => group.all_reduce(&mut vec![1.0_f32; 100_000], ReduceOp::Sum),
        other => panic!("no scenario {other}"),
    };
    role.report(&result.map_or_else(|error| error.to_string(), |()| "done".into()));
}
