//! Forks of a rank's process: a child cannot use what belongs to its parent, and does not affect
//! it.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use collective::reducer::{ParamInfo, Reducer, ReducerOptions};
use collective::store::TcpStoreServer;
use collective::{DType, Error, ProcessGroup, ReduceOp, SharedBuf, Store, TcpStore};

use super::TIMEOUT;
use super::transports::transports;
use crate::common::play;

/// A child process.
struct Child(libc::pid_t);

/// Forks; returns `None` in the child, which must end with [`exit`].
fn fork() -> Option<Child> {
    // SAFETY: the child allocates little, which libc allows after a fork, and exits.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0, "fork: {}", std::io::Error::last_os_error());
    (pid > 0).then_some(Child(pid))
}

/// Ends a child, which passes if `check` returns true.
fn exit(check: impl FnOnce() -> bool) -> ! {
    let passed = catch_unwind(AssertUnwindSafe(check)).unwrap_or(false);
    // SAFETY: ends the child without running the parent's destructors.
    unsafe { libc::_exit(i32::from(!passed)) }
}

impl Child {
    /// Waits for the child to end.
    fn passed(self) -> bool {
        let mut status = 0;
        // SAFETY: waits for our own child.
        unsafe { libc::waitpid(self.0, &raw mut status, 0) };
        status == 0
    }
}

#[test]
fn a_fork_cannot_use_the_group_and_does_not_affect_it() {
    for transport in transports() {
        for busy in [false, true] {
            play(transport.groups(2, TIMEOUT), |group| {
                if busy {
                    // Starts the communication thread, which does not exist in the child.
                    let work = group.all_reduce_async(vec![0_u8; 9], ReduceOp::Sum).unwrap();
                    drop(work.wait().unwrap());
                }
                let Some(child) = fork() else {
                    exit(move || {
                        let refused = is_refused(&group);
                        group.abort("called in the child");
                        drop(group);
                        refused
                    })
                };
                assert!(child.passed());
                group.barrier().unwrap();
            });
        }
    }
}

fn is_refused(group: &ProcessGroup) -> bool {
    let peer = 1 - group.rank();
    let calls = [
        group.barrier(),
        group.send(&[1_u8], peer),
        group.recv(&mut [1_u8], peer),
        group.reduce(&mut [1_u8], ReduceOp::Sum, 0),
        group.all_reduce_async(vec![1_u8], ReduceOp::Sum).map(drop),
        group.alloc::<u8>(1).map(drop),
        group.split(Some(0), 0).map(drop),
        group.subgroup(&[0]).map(drop),
        group.rebuild(Duration::ZERO).map(drop),
    ];
    let of_fork = |text: &str| text.contains("in a fork of the process that made it");
    calls.iter().all(|call| matches!(call, Err(Error::InvalidArgument(text)) if of_fork(text)))
}

#[test]
fn a_fork_cannot_use_a_shared_buffer_and_does_not_affect_it() {
    for transport in transports() {
        play(transport.groups(2, TIMEOUT), |group| {
            let mut buf: SharedBuf<f32> = group.alloc(3).unwrap();
            buf.fill(1.0);
            let Some(child) = fork() else {
                exit(move || {
                    let read = catch_unwind(AssertUnwindSafe(|| buf[0])).map(drop);
                    let written = catch_unwind(AssertUnwindSafe(|| buf.fill(9.0)));
                    let sum = group.all_reduce_async(buf, ReduceOp::Sum);
                    let refused = |panic: &(dyn std::any::Any + Send)| {
                        let text = panic.downcast_ref::<&str>();
                        text.is_some_and(|text| text.contains("fork of the process that made it"))
                    };
                    matches!(sum, Err(Error::InvalidArgument(_)))
                        && [read, written]
                            .iter()
                            .all(|call| call.as_ref().is_err_and(|panic| refused(&**panic)))
                })
            };
            let passed = child.passed();
            assert_eq!((&buf[..], passed), (&[1.0; 3][..], true));
            let buf = group.all_reduce_async(buf, ReduceOp::Sum).unwrap().wait().unwrap();
            assert_eq!(buf[..], [2.0; 3]);
        });
    }
}

#[test]
fn a_fork_cannot_use_a_reducer_and_does_not_affect_it() {
    play(ProcessGroup::threads(2, TIMEOUT).unwrap(), |group| {
        let params = vec![ParamInfo::new("weight", 3, DType::F32)];
        let mut reducer = Reducer::new(group, params, ReducerOptions::default()).unwrap();
        reducer.prepare(true).unwrap();
        let Some(child) = fork() else {
            exit(|| {
                let calls =
                    [reducer.ready(0, &[9.0_f32; 3]), reducer.finish(), reducer.prepare(true)];
                calls.iter().all(|call| matches!(call, Err(Error::InvalidArgument(_))))
            })
        };
        assert!(child.passed());
        reducer.ready(0, &[1.0_f32; 3]).unwrap();
        reducer.finish().unwrap();
        assert_eq!(reducer.grad::<f32>(0), Some(&[1.0; 3][..]));
    });
}

/// Parent and child send requests at the same time.
#[test]
fn a_fork_does_not_use_its_parents_connections_to_the_store() {
    let server = TcpStoreServer::bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let store = TcpStore::connect("127.0.0.1", server.port(), Duration::from_secs(3)).unwrap();
    let get = |key, times| {
        let values = (0..times).map(|_| store.get(key, TIMEOUT));
        values.filter(|value| !matches!(value, Ok(value) if value == key.as_bytes())).count()
    };
    for key in ["parent", "child", "grandchild"] {
        store.set(key, key.as_bytes()).unwrap();
    }
    let Some(child) = fork() else {
        exit(|| {
            let Some(grandchild) = fork() else { exit(|| get("grandchild", 1000) == 0) };
            let wrong = get("child", 1000);
            grandchild.passed() && wrong == 0
        })
    };
    let wrong = get("parent", 1000);
    assert_eq!((wrong, child.passed()), (0, true), "wrong or failed, and whether the child passed");
}

#[test]
fn a_fork_has_no_server_and_does_not_end_its_parents() {
    let server = TcpStoreServer::bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let Some(child) = fork() else {
        exit(move || {
            let clients = server.disconnected();
            drop(server);
            clients.is_empty()
        })
    };
    assert!(child.passed());
    TcpStore::connect("127.0.0.1", server.port(), TIMEOUT).unwrap().set("key", b"1").unwrap();
}
