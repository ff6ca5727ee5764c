//! Tests of the TCP transport only: connecting, the ranks that a timeout names, mismatched
//! messages. The failures of every transport are in `fault/transports.rs`. These tests use the
//! loopback; those in [`hosts`] use network namespaces, where cables are cut.

mod hosts;

use std::fs;
use std::io::Write as _;
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::common::{self, DEADLINE, Role, SOON, Workers, over, play, wait_for};
use collective::store::tcp::codec::put_blob;
use collective::{
    Determinism, Error, GroupOptions, MemoryStore, Message, ProcessGroup, ReduceOp, SharedBuf,
    Store, Transport,
};
use half::f16;

const TIMEOUT: Duration = Duration::from_secs(20);

fn options(timeout: Duration) -> GroupOptions {
    GroupOptions::default().with_timeout(timeout).with_transport(Transport::Tcp)
}

/// Calls `rank` on every rank of a group over TCP, and of one on two machines whose ranks share
/// memory; returns the results.
fn over_both<T: Send>(
    world: usize,
    timeout: Duration,
    rank: impl Fn(ProcessGroup) -> T + Sync,
) -> Vec<T> {
    ["tcp", "machines"]
        .into_iter()
        .flat_map(|transport| play(over(transport, world, timeout), &rank))
        .collect()
}

#[test]
fn results_have_the_same_bits_as_over_shared_memory() {
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
        for transport in ["tcp", "machines"] {
            assert!(host == play(over(transport, world, TIMEOUT), reduced), "{world} ranks");
        }
    }
}

/// A rank inside a chain sends a chunk in another round than its neighbour receives it in.
#[test]
fn chains_forward_chunks_of_more_than_512_kib() {
    const COUNT: usize = (60 << 20) / size_of::<i32>();
    play(over("tcp", 3, TIMEOUT), |group| {
        let mut x = vec![group.rank() as i32 + 1; COUNT];
        group.broadcast(&mut x, 1).unwrap();
        assert!(x == vec![2; COUNT]);
        group.reduce(&mut x, ReduceOp::Sum, 0).unwrap();
        assert!(group.rank() > 0 || x == vec![6; COUNT]);
    });
}

/// Their sum is beyond the range of `f16`.
#[test]
fn fast_averages_of_f16_do_not_overflow() {
    let options = options(TIMEOUT).with_determinism(Determinism::Fast);
    play(common::joined(16, |_| options.clone()), |group| {
        for count in [64, 50_000] {
            for op in [ReduceOp::Avg, ReduceOp::pre_mul_sum(1.0 / 16.0)] {
                let mut x = vec![f16::from_f32(40_000.0); count];
                group.all_reduce(&mut x, op).unwrap();
                assert_eq!(x, vec![f16::from_f32(40_000.0); count]);
            }
        }
    });
}

#[test]
fn the_group_reports_its_backend_and_the_reason() {
    for group in over("tcp", 2, TIMEOUT) {
        assert_eq!((group.backend_name(), group.backend_reason()), ("tcp", "requested"));
    }
    let store = Arc::new(MemoryStore::new());
    let group = ProcessGroup::from_store(store, 0, 1, GroupOptions::default()).unwrap();
    assert_eq!(group.backend_name(), "host");
    assert_eq!(group.backend_reason(), "all ranks are on one machine");
}

#[test]
fn subgroups_and_rebuilt_groups_use_tcp() {
    play(over("tcp", 3, TIMEOUT), |group| {
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

/// The ranks of one of two machines survive.
#[test]
fn survivors_on_one_machine_use_shared_memory() {
    play(over("machines", 3, TIMEOUT), |group| {
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
fn ranks_of_one_machine_share_the_memory_of_alloc() {
    play(over("pairs", 4, TIMEOUT), |group| {
        let shared: SharedBuf<f32> = group.alloc(10_000).unwrap();
        let maps = fs::read_to_string("/proc/self/maps").unwrap();
        let address = shared.as_ptr().addr();
        let of = |line: &&str| {
            let (start, end) = line.split_once(' ').unwrap().0.split_once('-').unwrap();
            let [start, end] = [start, end].map(|hex| usize::from_str_radix(hex, 16).unwrap());
            (start..end).contains(&address)
        };
        let line = maps.lines().find(of).unwrap();
        assert!(line.contains("memfd:collective-shared"), "{line}");
        // The two ranks of a pair map the same file.
        let file = line.split_whitespace().nth(4).unwrap().parse::<u64>().unwrap();
        let mut files = [0; 4];
        group.all_gather(&mut files, &[file]).unwrap();
        assert!(files[0] == files[1] && files[2] == files[3] && files[0] != files[2], "{files:?}");
    });
}

#[test]
fn a_computing_rank_gets_a_failure_at_its_next_call() {
    let mut workers = Workers::start_over("tcp", "tcp::compute", 3, &[0, 1, 2], TIMEOUT);
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
fn a_timeout_names_the_rank_at_the_end_of_a_chain() {
    let timeout = Duration::from_millis(600);
    let errors = over_both(4, timeout, |group| {
        // Each rank waits for the next, rank 0 for the longest time; the last computes.
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

#[test]
fn a_message_of_another_count_is_a_mismatch_on_both_ranks() {
    let errors = over_both(3, TIMEOUT, |group| {
        let start = Instant::now();
        let mut into = [7_u8; 100_000];
        let result = match group.rank() {
            0 => group.send(&[f16::ONE; 3], 1),
            1 => group.recv(&mut into, 0),
            _ => Ok(()),
        };
        assert!(into.iter().all(|&x| x == 7));
        // The sender may have been done before; then its next call fails.
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
fn a_message_instead_of_a_collective_is_a_mismatch_on_all_ranks() {
    let errors = over_both(3, TIMEOUT, |group| {
        let sent = match group.rank() {
            0 => group.send(&[1_u8; 2_000_000], 1),
            _ => Ok(()),
        };
        // Only rank 1 may lack a part of the first barrier.
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
fn large_messages_in_both_directions_do_not_deadlock() {
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
fn connections_of_other_programs_are_dropped() {
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
        // Rank 1 publishes its record, but does not connect.
        let addr: SocketAddr = be_rank_1(&store)["addr"].as_str().unwrap().parse().unwrap();
        // One sends nothing, one another protocol, one a `Hello` of another group.
        let _silent = TcpStream::connect(addr).unwrap();
        TcpStream::connect(addr).unwrap().write_all(&[b'x'; 300]).unwrap();
        let words = [0_u64, 0, 2, 1, 0, 0, 0].map(u64::to_le_bytes).concat();
        let hello = [&b"\x01collec1"[..], &words].concat();
        let mut forged = TcpStream::connect(addr).unwrap();
        forged.write_all(&hello).unwrap();
        let mut answer = Vec::new();
        drop(std::io::Read::read_to_end(&mut forged, &mut answer));
        assert!(answer.is_empty());
        join(1);
    });
}

/// The `Hello` of rank 1 of two to rank 0.
fn hello(nonce: &serde_json::Value, channel: u64) -> Vec<u8> {
    let [low, high] = [0, 1].map(|half| nonce[half].as_u64().unwrap());
    let words = [low, high, 2, 1, 0, channel, 0].map(u64::to_le_bytes).concat();
    [&b"\x01collec1"[..], &words].concat()
}

#[test]
fn silent_connections_do_not_evict_ranks() {
    let store = MemoryStore::new();
    std::thread::scope(|scope| {
        let own = Arc::new(store.clone());
        let rank = scope.spawn(move || ProcessGroup::from_store(own, 0, 2, options(TIMEOUT)));
        let said = be_rank_1(&store);
        let addr: SocketAddr = said["addr"].as_str().unwrap().parse().unwrap();
        let connect = |_| TcpStream::connect(addr).unwrap();
        let mut late = [0, 1].map(connect);
        let _silent: Vec<_> = (0..70).map(connect).collect();
        for (channel, stream) in (0..).zip(&mut late) {
            stream.write_all(&hello(&said["nonce"], channel)).unwrap();
            std::io::Read::read_exact(stream, &mut [0; 64]).unwrap();
        }
        drop(late);
        let error = rank.join().unwrap().unwrap_err();
        assert!(matches!(error, Error::PeerDied { rank: 1, .. }), "{error}");
    });
}

/// Publishes the record of a rank 1; returns rank 0's.
fn be_rank_1(store: &MemoryStore) -> serde_json::Value {
    let [_, member] = ["place", "tcp"].map(|what| {
        let said = store.get(&format!("default/1/default/{what}/0"), SOON).unwrap();
        store.set(&format!("default/1/default/{what}/1"), &said).unwrap();
        said
    });
    serde_json::from_slice(&member).unwrap()
}

/// Publishes the records, of both ranks, of a rank 0 that listens at `addr`.
fn be_rank_0(store: &MemoryStore, addr: SocketAddr) {
    let claim =
        r#"{"attempt":1,"token":1,"pid":1,"start_time":1,"machine":"other","host":"other"}"#;
    store.set("default/open", claim.as_bytes()).unwrap();
    let place = store.get("default/1/default/place/1", SOON).unwrap();
    let member = format!("{{\"addr\":\"{addr}\",\"nonce\":[1,2]}}");
    for (what, said) in [("place", &place[..]), ("tcp", member.as_bytes())] {
        let mut all = Vec::new();
        put_blob(&mut all, said);
        put_blob(&mut all, said);
        store.set(&format!("default/1/default/{what}/all"), &all).unwrap();
    }
}

#[test]
fn a_listener_that_is_not_a_rank_is_an_error_with_its_address() {
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
        be_rank_0(&store, addr);
        let error = rank.join().unwrap().unwrap_err();
        let Error::Rendezvous { addr: named, reason } = &error else { panic!("{error}") };
        assert_eq!(*named, addr.to_string());
        assert!(reason.contains("not rank 0 of group default"), "{reason}");
    });
}

#[test]
fn a_rank_that_ended_before_connecting_is_named_at_once() {
    let store = MemoryStore::new();
    let addr = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let own = Arc::new(store.clone());
    let rank = std::thread::spawn(move || ProcessGroup::from_store(own, 1, 2, options(TIMEOUT)));
    let start = Instant::now();
    be_rank_0(&store, addr);
    let error = rank.join().unwrap().unwrap_err().to_string();
    assert!(error.contains(&addr.to_string()) && error.contains("rank 0"), "{error}");
    assert!(start.elapsed() < SOON);
}

/// Runs a process rank.
pub(crate) fn worker() {
    let Some(role) = Role::from_env() else { return };
    if role.scenario == "store" {
        return hosts::serve(&role);
    }
    let group = match role.join() {
        Ok(group) => group,
        Err(error) => return role.report(&error.to_string()),
    };
    let result = match role.scenario.as_str() {
        "work" => common::work_until_failure(&group, 400_000, || role.ready()),
        "count" => hosts::work_a_while(&group),
        "bytes" => match hosts::bytes_sent(&group) {
            Ok(bytes) => return role.report(&bytes.to_string()),
            Err(error) => Err(error),
        },
        "compute" => match role.rank {
            0 => {
                group.barrier().unwrap();
                role.ready();
                wait_for(|| fs::read(role.dir.join("go")).ok(), "the signal to continue");
                group.barrier()
            }
            // If it entered again, the others would need nothing more of it.
            1 => {
                group.barrier().unwrap();
                std::thread::sleep(DEADLINE);
                panic!("the killed rank still runs");
            }
            _ => group.barrier().and_then(|()| group.barrier()),
        },
        other => panic!("no scenario {other}"),
    };
    role.report(&result.map_or_else(|error| error.to_string(), |()| "done".into()));
}
