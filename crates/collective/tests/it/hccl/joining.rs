//! Joining over HCCL and its failures: libraries, the root info, subgroups, rebuilds.

#![expect(unsafe_code, reason = "functions of C in place of the simulator's")]

use std::ffi::c_void;
use std::sync::Arc;
use std::time::Duration;

use collective::hccl::{Config, connector};
use collective::{Error, GroupOptions, MemoryStore, ProcessGroup, ReduceOp, Result};
use npu_sim::{Config as Simulated, start};

use super::fake::{
    Memory, Stream, finish, groups, join, join_all, libraries, libraries_but, play, play_all,
};
use crate::common::DEADLINE;

const TIMEOUT: Duration = Duration::from_millis(1500);

fn options() -> GroupOptions {
    GroupOptions::default().with_timeout(DEADLINE)
}

fn sum(group: &ProcessGroup, stream: &Stream) -> f32 {
    let mut memory = Memory::new(vec![group.rank() as f32 + 1.0]);
    let calls = group.device().unwrap().all_reduce(memory.buf(), ReduceOp::Sum).unwrap();
    calls.enqueue(stream.raw()).unwrap().wait().unwrap();
    memory.numbers()[0]
}

#[test]
fn ranks_with_different_configurations_do_not_join() {
    let _session = start(Simulated::default());
    let config = |checks| Config::default().with_checks(checks);
    let ranks = [false, true].map(|value| (connector(libraries(), config(value)), options()));
    for joined in join_all(ranks.into()) {
        let error = joined.err().unwrap().to_string();
        let told = "hccl::Config::with_checks: rank 0: false; rank 1: true";
        assert!(error.ends_with(told), "{error}");
    }
}

#[test]
fn an_init_that_fails_on_one_rank_fails_on_all() {
    for function in ["HcclCommInitRootInfoConfig", "HcclGetRootInfo", "aclrtGetDeviceCount"] {
        let connect_timeout = Duration::from_millis(500);
        let session = start(Simulated { connect_timeout, ..Simulated::default() });
        session.fail(function, 1, 4);
        let ranks = groups(2, &options(), &Config::default());
        let errors: Vec<_> = ranks.into_iter().map(Result::unwrap_err).collect();
        let own = errors.iter().position(|error| matches!(error, Error::Backend { .. }));
        let own = own.unwrap_or_else(|| panic!("{errors:?}"));
        assert!(errors[own].to_string().contains(function), "{errors:?}");
        match &errors[1 - own] {
            Error::Aborted { by, reason } => {
                assert!(*by == own && reason.contains(function), "{reason}");
            }
            error => panic!("{error}"),
        }
        // The other rank's init thread runs until HCCL times out.
        std::thread::sleep(2 * connect_timeout);
        finish(session);
    }
}

#[test]
fn a_rank_that_never_joins_is_named() {
    let session = start(Simulated::default());
    let (store, connect) =
        (Arc::new(MemoryStore::new()), connector(libraries(), Config::default()));
    let errors = std::thread::scope(|scope| {
        [0, 2]
            .map(|rank| {
                let (store, connect) = (Arc::clone(&store), Arc::clone(&connect));
                let options = GroupOptions::default().with_timeout(TIMEOUT);
                scope.spawn(move || join(store, (rank, 3), options, connect).unwrap_err())
            })
            .map(|rank| rank.join().unwrap())
    });
    for error in &errors {
        assert!(matches!(error, Error::Timeout { missing, .. } if *missing == [1]), "{error}");
    }
    finish(session);
}

/// Returns the number of devices after [`LATE`].
unsafe extern "C" fn late_count(count: *mut u32) -> i32 {
    std::thread::sleep(LATE);
    // SAFETY: the contract of the function that this replaces.
    unsafe { *count = 8 };
    0
}

const LATE: Duration = Duration::from_secs(3);

/// An init that returns HCCL's timeout error after [`LATE`].
unsafe extern "C" fn late_init(
    _: u32,
    _: *const c_void,
    _: u32,
    _: *const c_void,
    _: *mut *mut c_void,
) -> i32 {
    std::thread::sleep(LATE);
    9
}

/// Joins two ranks, the second with a function later than HCCL's connect timeout.
fn join_with_late_function(
    function: &'static str,
    late: *mut c_void,
    options: &GroupOptions,
) -> Vec<Result<()>> {
    let connect_timeout = Duration::from_millis(500);
    let session = start(Simulated { connect_timeout, ..Simulated::default() });
    let late = libraries_but(&|name| (name == function).then_some(late)).unwrap();
    let connect = |libraries| connector(libraries, Config::default());
    let ranks = vec![(connect(libraries()), options.clone()), (connect(late), options.clone())];
    let joined = join_all(ranks);
    std::thread::sleep(LATE);
    let joined = match joined.iter().all(Result::is_ok) {
        true => play(joined.into_iter().map(Result::unwrap).collect(), |group, stream| {
            assert_eq!(sum(&group, stream), 3.0);
            Ok(())
        }),
        false => joined.into_iter().map(|rank| rank.map(drop)).collect(),
    };
    finish(session);
    joined
}

/// HCCL's init starts once all ranks are ready for it, so only the group's timeout applies.
#[test]
fn a_rank_later_than_the_timeout_is_named_and_one_later_than_hccls_joins() {
    let join = |options: GroupOptions| {
        join_with_late_function("aclrtGetDeviceCount", late_count as *mut c_void, &options)
    };
    let joined = join(options());
    assert!(joined.iter().all(Result::is_ok), "{joined:?}");
    let joined = join(GroupOptions::default().with_timeout(TIMEOUT));
    let Err(Error::Timeout { missing, .. }) = &joined[0] else { panic!("{joined:?}") };
    assert_eq!(*missing, [1]);
    assert!(joined[1].as_ref().unwrap_err().to_string().contains("missing rank 1"), "{joined:?}");
}

#[test]
fn an_init_timeout_on_all_ranks_names_hccl_connect_timeout() {
    let late = late_init as *mut c_void;
    let joined = join_with_late_function("HcclCommInitRootInfoConfig", late, &options());
    let Err(Error::Backend { name, code: 9, text, .. }) = &joined[0] else { panic!("{joined:?}") };
    assert_eq!(name, "HCCL_E_TIMEOUT");
    assert!(
        text.contains("all ranks have started") && text.contains("HCCL_CONNECT_TIMEOUT"),
        "{text}"
    );
}

#[test]
fn a_missing_device_is_reported_to_all_ranks() {
    let session =
        start(Simulated { devices: 2, visible: Some("1".into()), ..Simulated::default() });
    let store = Arc::new(MemoryStore::new());
    let connect = connector(libraries(), Config::default());
    let join = |rank: usize| {
        let (store, connect) = (store.clone(), connect.clone());
        let options = options().with_npu_device(rank as u32);
        move || ProcessGroup::from_store_with(store, rank, 2, options, connect).unwrap_err()
    };
    let errors = std::thread::scope(|scope| {
        [0, 1].map(|rank| scope.spawn(join(rank))).map(|rank| rank.join().unwrap())
    });
    let text = errors[1].to_string();
    assert!(
        text.contains("no NPU 1 among 1") && text.contains("ASCEND_RT_VISIBLE_DEVICES"),
        "{text}"
    );
    let Error::Aborted { by: 1, reason } = &errors[0] else { panic!("{}", errors[0]) };
    assert!(reason.contains("no NPU 1"), "{reason}");
    finish(session);
}

#[test]
fn a_subgroup_survives_its_parents_abort() {
    let session = start(Simulated::default());
    play_all(4, &options(), &Config::default(), |group, stream| {
        // Rank 3 joins no subgroup; the others join in reverse order.
        let color = (group.rank() < 3).then_some(7);
        let part = group.split(color, -(group.rank() as i64)).unwrap();
        let Some(part) = part else {
            assert_eq!(group.rank(), 3);
            group.abort("enough");
            return;
        };
        assert_eq!((part.backend_name(), part.rank()), ("hccl", 2 - group.rank()));
        while group.device().is_ok() {
            std::thread::sleep(Duration::from_millis(5));
        }
        assert_eq!(sum(&part, stream), 6.0);
        let mut own = [part.rank() as i32];
        part.broadcast(&mut own, 2).unwrap();
        assert_eq!(own, [2]);
    });
    assert_eq!(session.calls("HcclCommDestroy"), 7);
    finish(session);
}

/// Between machines the host's verbs use TCP.
#[test]
fn ranks_on_several_machines_form_one_group() {
    let session = start(Simulated::default());
    let connect = connector(libraries(), Config::default());
    let rank = |host: &str| (connect.clone(), options().with_host_id(host));
    let ranks = join_all(vec![rank("a"), rank("b")]).into_iter().map(Result::unwrap).collect();
    play(ranks, |group, stream| {
        assert_eq!(sum(&group, stream), 3.0);
        let mut both = [0; 2];
        group.all_gather(&mut both, &[group.rank() as u64]).unwrap();
        assert_eq!(both, [0, 1]);
    });
    finish(session);
}

#[test]
fn survivors_rebuild_over_hccl() {
    let session = start(Simulated::default());
    play_all(3, &options(), &Config::default(), |group, stream| {
        if group.rank() == 1 {
            group.abort("gone");
            return;
        }
        let context = stream.context();
        let _entered = context.enter().unwrap();
        let group = group.rebuild(Duration::from_millis(500)).unwrap();
        assert_eq!((group.backend_name(), group.world_size()), ("hccl", 2));
        assert_eq!(sum(&group, stream), 3.0);
    });
    finish(session);
}

#[test]
fn a_library_without_a_function_names_it() {
    let error = libraries_but(&|name| (name == "HcclAllReduce").then_some(std::ptr::null_mut()));
    let error = error.unwrap_err();
    let Error::Library { library: "libhccl.so", .. } = &error else { panic!("{error}") };
    let text = error.to_string();
    assert!(text.contains("HcclAllReduce") && text.contains("CANN toolkit"), "{text}");
}

#[test]
fn a_group_over_hccl_needs_a_device() {
    let store = Arc::new(MemoryStore::new());
    let connect = connector(libraries(), Config::default());
    let options = GroupOptions::default();
    let error = ProcessGroup::from_store_with(store, 0, 1, options, connect).unwrap_err();
    assert!(error.to_string().contains("with_npu_device"), "{error}");
}
