//! Joining over NCCL and its failures: libraries, unique ids, splits, rebuilds.

#![expect(unsafe_code, reason = "opens libraries the test made")]

use std::time::{Duration, Instant};

use collective::nccl::{Config, Libraries};
use collective::{Error, GroupOptions, MemoryStore, ProcessGroup, ReduceOp, Result, Store};

use super::fake::{Fake, Fault, Memory, build, devices};
use crate::common::{DEADLINE, leaves_no_keys, play, wait_for};

const TIMEOUT: Duration = Duration::from_millis(1500);

fn sum(group: &ProcessGroup) -> f32 {
    let (stream, mut memory) = (Fake::get().stream(), Memory::new(vec![group.rank() as f32 + 1.0]));
    let calls = group.device().unwrap().all_reduce(memory.buf(), ReduceOp::Sum).unwrap();
    calls.enqueue(stream.raw()).unwrap().wait().unwrap();
    memory.numbers()[0]
}

#[test]
fn ranks_per_id_selects_the_scalable_init() {
    let options = GroupOptions::default().with_timeout(DEADLINE);
    for (world, ranks_per_id, scalable) in [(4, 2, 1), (3, 2, 1), (4, 1, 1), (4, 4, 0), (2, 128, 0)]
    {
        let (devices, config) = (devices(world), Config::default().with_ranks_per_id(ranks_per_id));
        let groups = Fake::get().groups(devices.clone(), &options, &config);
        let groups: Vec<_> = groups.into_iter().map(Result::unwrap).collect();
        assert!(
            play(groups, |group| sum(&group))
                .iter()
                .all(|&x| x == (world * (world + 1) / 2) as f32)
        );
        for device in devices {
            assert_eq!(Fake::get().calls("ncclCommInitRankScalable", device), scalable);
            assert_eq!(Fake::get().calls("ncclCommInitRankConfig", device), 1 - scalable);
        }
    }
}

/// 128 ranks per id is the default.
#[test]
fn more_than_128_ranks_use_the_scalable_init() {
    let (devices, options) = (devices(130), GroupOptions::default().with_timeout(DEADLINE));
    let groups = Fake::get().groups(devices.clone(), &options, &Config::default());
    let groups: Vec<_> = groups.into_iter().map(Result::unwrap).collect();
    assert!(play(groups, |group| sum(&group)).iter().all(|&x| x == (130 * 131 / 2) as f32));
    for device in devices {
        assert_eq!(Fake::get().calls("ncclCommInitRankScalable", device), 1);
        assert_eq!(Fake::get().calls("ncclCommInitRankConfig", device), 0);
    }
}

#[test]
fn ranks_with_different_configurations_do_not_join() {
    let (devices, store) = (devices(2), std::sync::Arc::new(MemoryStore::new()));
    std::thread::scope(|scope| {
        for (rank, device) in devices.enumerate() {
            let store = std::sync::Arc::clone(&store);
            scope.spawn(move || {
                let options = GroupOptions::default().with_timeout(DEADLINE);
                let options = options.with_cuda_device(device);
                let config = Config::default().with_checks(rank == 1);
                let connect = collective::nccl::connector(Fake::get().libraries, config);
                let joined = ProcessGroup::from_store_with(store, rank, 2, options, connect);
                let told = "nccl::Config::with_checks: rank 0: false; rank 1: true";
                assert!(joined.unwrap_err().to_string().ends_with(told));
            });
        }
    });
}

#[test]
fn a_rank_that_is_started_twice_joins_once() {
    let (mut devices, store) = (devices(3), MemoryStore::new());
    let [first, second, third] = [(); 3].map(|()| devices.next().unwrap());
    let join = |rank, device| {
        let options = GroupOptions::default().with_timeout(DEADLINE).with_cuda_device(device);
        let connect = collective::nccl::connector(Fake::get().libraries, Config::default());
        let store = std::sync::Arc::new(store.clone());
        ProcessGroup::from_store_with(store, rank, 3, options, connect)
    };
    std::thread::scope(|scope| {
        let spawn = |rank, device| scope.spawn(move || join(rank, device).map(|group| sum(&group)));
        let joining = [spawn(0, first), spawn(1, second)];
        wait_for(|| store.check(&["default/tried/1"]).unwrap().then_some(()), "rank 1");
        let error = join(1, second).unwrap_err();
        assert!(matches!(error, Error::DuplicateRank { rank: 1, .. }), "{error}");
        for rank in joining.into_iter().chain([spawn(2, third)]) {
            assert!(matches!(rank.join().unwrap(), Ok(6.0)));
        }
    });
}

#[test]
fn splits_leave_no_keys_in_the_store() {
    let (devices, store) = (devices(2), MemoryStore::new());
    std::thread::scope(|scope| {
        for (rank, device) in devices.enumerate() {
            let store = store.clone();
            scope.spawn(move || {
                let options = GroupOptions::default().with_timeout(DEADLINE);
                let options = options.with_cuda_device(device);
                let connect = collective::nccl::connector(Fake::get().libraries, Config::default());
                let own = std::sync::Arc::new(store.clone());
                let group = ProcessGroup::from_store_with(own, rank, 2, options, connect).unwrap();
                leaves_no_keys(&group, &store, || {
                    for _ in 0..5 {
                        let part = group.split(Some(0), 0).unwrap().unwrap();
                        assert_eq!(sum(&part), 3.0);
                    }
                });
            });
        }
    });
}

/// Injects a fault into the init of rank 1; returns the error of rank 1 and those of the others.
fn failing(fault: Fault, device_of_others: u32) -> (Error, Vec<Error>) {
    let devices = devices(device_of_others + 1);
    let options = GroupOptions::default().with_timeout(TIMEOUT);
    Fake::get().fault("ncclCommInitRankConfig", devices.start + 1, 1, fault);
    let groups = Fake::get().groups(devices.clone(), &options, &Config::default());
    let mut errors: Vec<_> = groups.into_iter().map(Result::unwrap_err).collect();
    for device in devices {
        let aborts = Fake::get().calls("ncclCommAbort", device);
        assert!(aborts <= 1 && Fake::get().retained(device) == 0);
    }
    (errors.remove(1), errors)
}

#[test]
fn an_init_that_fails_on_one_rank_fails_on_all() {
    for fault in [Fault::Return(2), Fault::Async(2)] {
        let start = Instant::now();
        let (own, others) = failing(fault, 2);
        assert!(matches!(own, Error::Backend { code: 2, .. }), "{own}");
        for error in others {
            let Error::Aborted { by: 1, reason } = &error else { panic!("{error}") };
            assert!(reason.contains("ncclSystemError"), "{reason}");
        }
        assert!(start.elapsed() < TIMEOUT + Duration::from_secs(10));
    }
}

#[test]
fn a_rank_that_never_joins_is_named() {
    let devices = devices(3);
    let connect = collective::nccl::connector(Fake::get().libraries, Config::default());
    let store = MemoryStore::new();
    let errors = std::thread::scope(|scope| {
        let join = |rank| {
            let (store, connect) = (std::sync::Arc::new(store.clone()), connect.clone());
            let options = GroupOptions::default().with_timeout(TIMEOUT);
            let options = options.with_cuda_device(devices.start + rank as u32);
            let join = move || ProcessGroup::from_store_with(store, rank, 3, options, connect);
            scope.spawn(move || join().unwrap_err())
        };
        [0, 2].map(join).map(|rank| rank.join().unwrap())
    });
    for error in &errors {
        assert!(matches!(error, Error::Timeout { missing, .. } if *missing == [1]), "{error}");
    }
}

#[test]
fn an_init_that_hangs_times_out() {
    let (own, others) = failing(Fault::Hang, 2);
    let over = |error: &Error| match error {
        Error::Backend { text, .. } | Error::Aborted { reason: text, .. } => {
            text.contains("all ranks have started")
        }
        _ => false,
    };
    assert!(over(&own) && others.iter().all(over), "{own} {others:?}");
}

/// As behind an IOMMU that blocks copies between GPUs.
#[test]
fn gpus_that_cannot_reach_one_another_are_reported_at_the_join() {
    let (devices, options) = (devices(2), GroupOptions::default().with_timeout(TIMEOUT));
    Fake::get().fault("launch", devices.start + 1, 1, Fault::Hang);
    for group in Fake::get().groups(devices.clone(), &options, &Config::default()) {
        let text = group.unwrap_err().to_string();
        for part in ["first all_reduce", "1.5s", "NCCL_P2P_DISABLE=1", "/dev/shm", "driver"] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }
    for device in devices {
        let calls = |function| Fake::get().calls(function, device);
        assert_eq!((calls("ncclCommAbort"), calls("ncclMemFree")), (1, 1));
        assert_eq!(Fake::get().retained(device), 0);
    }
}

/// The device may still use the memory of the first all-reduce.
#[test]
fn memory_of_the_join_is_leaked_if_the_abort_failed() {
    let (devices, options) = (devices(2), GroupOptions::default().with_timeout(TIMEOUT));
    Fake::get().fault("ncclAllReduce", devices.start, 1, Fault::Return(2));
    Fake::get().fault("ncclCommAbort", devices.start, 1, Fault::Return(3));
    for group in Fake::get().groups(devices.clone(), &options, &Config::default()) {
        let text = group.unwrap_err().to_string();
        assert!(text.contains("ncclAllReduce: ncclSystemError"), "{text}");
    }
    for (device, leaked) in devices.zip([1, 0]) {
        let calls = |function| Fake::get().calls(function, device);
        assert_eq!(calls("ncclMemAlloc") - calls("ncclMemFree"), leaked);
    }
}

#[test]
fn a_slow_init_succeeds() {
    let (devices, options) = (devices(2), GroupOptions::default().with_timeout(DEADLINE));
    Fake::get().fault("ncclCommInitRankConfig", devices.start, 1, Fault::Progress(30));
    let groups = Fake::get().groups(devices, &options, &Config::default());
    let groups: Vec<_> = groups.into_iter().map(Result::unwrap).collect();
    assert_eq!(play(groups, |group| sum(&group)), [3.0, 3.0]);
}

#[test]
fn a_missing_device_is_reported_to_all_ranks() {
    let devices = 4095..4097;
    let options = GroupOptions::default().with_timeout(DEADLINE);
    let groups = Fake::get().groups(devices, &options, &Config::default());
    let errors: Vec<_> = groups.into_iter().map(Result::unwrap_err).collect();
    let text = errors[1].to_string();
    assert!(text.starts_with("there is no CUDA device 4096 among 4096;"), "{text}");
    assert!(text.contains("CUDA_VISIBLE_DEVICES"), "{text}");
    let Error::Aborted { by: 1, reason } = &errors[0] else { panic!("{}", errors[0]) };
    assert!(reason.contains("no CUDA device 4096"), "{reason}");
}

/// For example if a launcher starts two ranks and shows both the same GPU.
#[test]
fn two_ranks_on_one_gpu_are_named_with_its_uuid() {
    let (device, store) = (devices(2).start, MemoryStore::new());
    let connect = collective::nccl::connector(Fake::get().libraries, Config::default());
    let errors = std::thread::scope(|scope| {
        let join = |rank| {
            let (store, connect) = (std::sync::Arc::new(store.clone()), connect.clone());
            // Rank 1 has a GPU of its own.
            let device = device + u32::from(rank == 1);
            let options = GroupOptions::default().with_timeout(DEADLINE).with_cuda_device(device);
            let join = move || ProcessGroup::from_store_with(store, rank, 3, options, connect);
            scope.spawn(move || join().unwrap_err())
        };
        [0, 1, 2].map(join).map(|rank| rank.join().unwrap())
    });
    let told = format!("ranks 0 and 2 are both on the GPU {device:08x}-0000-0000-0000-00000000");
    for error in errors {
        let text = error.to_string();
        assert!(text.contains(&told) && text.contains("CUDA_VISIBLE_DEVICES"), "{text}");
    }
    assert_eq!(Fake::get().calls("ncclCommInitRankConfig", device), 0);
}

#[test]
fn nccl_comm_split_subgroup_survives_parent_abort() {
    let (devices, options) = (devices(4), GroupOptions::default().with_timeout(DEADLINE));
    let groups = Fake::get().groups(devices.clone(), &options, &Config::default());
    let groups: Vec<_> = groups.into_iter().map(Result::unwrap).collect();
    Fake::get().fault("ncclCommSplit", devices.start, 1, Fault::Progress(5000));
    play(groups, |group| {
        // Rank 3 joins no subgroup, and may not abort while rank 0 is not ready; the others join in
        // reverse order.
        let color = (group.rank() < 3).then_some(7);
        let part = group.split(color, -(group.rank() as i64)).unwrap();
        let Some(part) = part else {
            assert_eq!(group.rank(), 3);
            group.abort("enough");
            return;
        };
        assert_eq!((part.backend_name(), part.rank()), ("nccl", 2 - group.rank()));
        while group.device().is_ok() {
            std::thread::sleep(Duration::from_millis(5));
        }
        assert_eq!(sum(&part), 6.0);
        // NCCL orders the ranks as the subgroup does.
        let stream = Fake::get().stream();
        let (mut one, mut all) = (Memory::new(vec![part.rank() as i32]), Memory::new(vec![-1; 3]));
        let calls = part.device().unwrap().all_gather(all.buf(), one.buf()).unwrap();
        calls.enqueue(stream.raw()).unwrap().wait().unwrap();
        assert_eq!(all.numbers(), [0, 1, 2]);
        let mut own = [part.rank() as i32];
        part.broadcast(&mut own, 2).unwrap();
        assert_eq!(own, [2]);
    });
    for device in devices.clone() {
        assert_eq!(Fake::get().calls("ncclCommSplit", device), 1);
        assert_eq!(Fake::get().calls("ncclCommInitRankConfig", device), 1);
        assert_eq!(Fake::get().calls("ncclCommAbort", device), 1);
        let destroyed = i32::from(device != devices.end - 1);
        assert_eq!(Fake::get().calls("ncclCommDestroy", device), destroyed);
    }
}

/// Down to groups of one rank; groups are dropped before their subgroups.
#[test]
fn subgroups_of_subgroups_use_nccl_comm_split() {
    let (devices, options) = (devices(4), GroupOptions::default().with_timeout(DEADLINE));
    let groups = Fake::get().groups(devices.clone(), &options, &Config::default());
    let groups: Vec<_> = groups.into_iter().map(Result::unwrap).collect();
    play(groups, |group| {
        let half = group.split(Some(group.rank() as u32 / 2), 0).unwrap().unwrap();
        let alone = half.split(Some(half.rank() as u32), 0).unwrap().unwrap();
        assert_eq!((half.world_size(), alone.world_size(), alone.backend_name()), (2, 1, "nccl"));
        assert_eq!((sum(&alone), sum(&half), sum(&group)), (1.0, 3.0, 10.0));
        drop(group);
        assert_eq!((sum(&alone), sum(&half)), (1.0, 3.0));
        drop(half);
        assert_eq!(sum(&alone), 1.0);
    });
    for device in devices {
        let calls = |function| Fake::get().calls(function, device);
        assert_eq!((calls("ncclCommInitRankConfig"), calls("ncclCommSplit")), (1, 2));
        assert_eq!((calls("ncclCommDestroy"), calls("ncclCommAbort")), (3, 0));
        assert_eq!(Fake::get().retained(device), 0);
    }
}

#[test]
fn a_failed_split_fails_the_group() {
    for fault in [Fault::Hang, Fault::Return(3), Fault::Async(6)] {
        let (devices, options) = (devices(2), GroupOptions::default().with_timeout(TIMEOUT));
        Fake::get().fault("ncclCommSplit", devices.start, 1, fault);
        let groups = Fake::get().groups(devices.clone(), &options, &Config::default());
        let groups: Vec<_> = groups.into_iter().map(Result::unwrap).collect();
        play(groups, |group| {
            let text = group.split(Some(0), 0).unwrap_err().to_string();
            let expected = match fault {
                Fault::Hang => ["ncclCommSplit", "did not join in time"],
                // `ncclCommSplit` succeeds on rank 1, which learns of rank 0's failure when it
                // joins the subgroup.
                Fault::Async(_) => ["ncclCommGetAsyncError", "ncclRemoteError"],
                _ => ["ncclCommSplit", "ncclInternalError"],
            };
            assert!(expected.iter().all(|part| text.contains(part)), "{fault:?}: {text}");
            // Rank 1 may know of the failure before its parent group does.
            let start = Instant::now();
            while !matches!(group.device(), Err(Error::Poisoned(_))) {
                assert!(start.elapsed() < DEADLINE);
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        for (rank, device) in devices.enumerate() {
            // A subgroup's communicator that was begun is aborted, too.
            let begun = 1 + i32::from(rank == 1 || !matches!(fault, Fault::Return(_)));
            assert_eq!(Fake::get().calls("ncclCommAbort", device), begun, "{fault:?}, rank {rank}");
            assert_eq!(Fake::get().retained(device), 0);
        }
    }
}

/// Between machines the host's verbs use TCP.
#[test]
fn ranks_on_several_machines_form_one_group() {
    let (devices, connect) =
        (devices(2), collective::nccl::connector(Fake::get().libraries, Config::default()));
    let store = MemoryStore::new();
    let groups = std::thread::scope(|scope| {
        let join = |rank| {
            let (store, connect) = (std::sync::Arc::new(store.clone()), connect.clone());
            let options = GroupOptions::default().with_timeout(DEADLINE);
            let options = options.with_host_id(["a", "b"][rank]);
            let options = options.with_cuda_device(devices.start + rank as u32);
            let join = move || ProcessGroup::from_store_with(store, rank, 2, options, connect);
            scope.spawn(move || join().unwrap())
        };
        [0, 1].map(join).map(|rank| rank.join().unwrap())
    });
    play(groups.into(), |group| {
        assert_eq!(sum(&group), 3.0);
        let mut both = [0; 2];
        group.all_gather(&mut both, &[group.rank() as u64]).unwrap();
        assert_eq!(both, [0, 1]);
        if group.rank() == 0 {
            group.abort("enough");
        }
        while group.device().is_ok() {
            std::thread::sleep(Duration::from_millis(5));
        }
        let Err(Error::Poisoned(why)) = group.device() else { panic!() };
        assert!(matches!(*why, Error::Aborted { by: 0, .. }), "{why}");
    });
}

#[test]
fn survivors_rebuild_over_nccl() {
    let (devices, options) = (devices(3), GroupOptions::default().with_timeout(DEADLINE));
    let groups = Fake::get().groups(devices, &options, &Config::default());
    let groups: Vec<_> = groups.into_iter().map(Result::unwrap).collect();
    play(groups, |group| {
        if group.rank() == 1 {
            group.abort("gone");
            return;
        }
        let group = group.rebuild(Duration::from_millis(500)).unwrap();
        assert_eq!((group.backend_name(), group.world_size(), sum(&group)), ("nccl", 2, 3.0));
    });
}

#[test]
fn a_library_that_is_too_old_names_the_missing_function() {
    let path = build("2.18", &["ncclMemAlloc", "ncclMemFree"]);
    let fake = std::slice::from_ref(&Fake::get().path);
    // SAFETY: both were made by this test.
    let error = unsafe { Libraries::open(std::slice::from_ref(&path), fake) }.unwrap_err();
    let Error::Library { library: "libnccl.so.2", tried, .. } = &error else { panic!("{error}") };
    assert_eq!(tried, &[path.display().to_string()]);
    let text = error.to_string();
    assert!(text.contains("no function ncclMemAlloc") && text.contains("2.19 or later"), "{text}");
    // SAFETY: there is nothing at the path.
    let error =
        unsafe { Libraries::open(fake, &["/nonexistent/libcuda.so.1".into()]) }.unwrap_err();
    let text = error.to_string();
    assert!(text.starts_with("libcuda.so.1: ") && text.contains("NVIDIA's driver"), "{text}");
}

/// NCCL itself would hang, or not name the rank.
#[test]
fn ranks_with_different_nccl_versions_do_not_join() {
    let (devices, store) = (devices(3), MemoryStore::new());
    let errors = std::thread::scope(|scope| {
        let join = |rank: usize| {
            let libraries = [Fake::get(), Fake::old()][rank / 2].libraries;
            let connect = collective::nccl::connector(libraries, Config::default());
            let store = std::sync::Arc::new(store.clone());
            let options = GroupOptions::default().with_timeout(DEADLINE);
            let options = options.with_cuda_device(devices.start + rank as u32);
            let join = move || ProcessGroup::from_store_with(store, rank, 3, options, connect);
            scope.spawn(move || join().unwrap_err())
        };
        [0, 1, 2].map(join).map(|rank| rank.join().unwrap())
    });
    for error in errors {
        let text = "rank 0 has NCCL 2.27.7, rank 2 has 2.19.3; all ranks need the same";
        assert!(error.to_string().contains(text), "{error}");
    }
}

#[test]
fn a_group_over_nccl_needs_a_device() {
    let store = std::sync::Arc::new(MemoryStore::new());
    let connect = collective::nccl::connector(Fake::get().libraries, Config::default());
    let options = GroupOptions::default();
    let error = ProcessGroup::from_store_with(store, 0, 1, options, connect).unwrap_err();
    assert!(error.to_string().contains("with_cuda_device"), "{error}");
    let host = ProcessGroup::threads(1, TIMEOUT).unwrap().remove(0);
    assert!(matches!(host.device(), Err(Error::Unsupported { backend: "host", .. })));
}
