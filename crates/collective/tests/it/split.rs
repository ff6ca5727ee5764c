//! Subgroups: their members, the order of these, and independence from the parent.

use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Barrier, mpsc};
use std::time::Duration;

use crate::common::{self, Role, Workers, leaves_no_keys};
use collective::{
    DeviceMesh, Error, GroupOptions, MemoryStore, ProcessGroup, Rank, ReduceOp, Result, Store,
    TcpStore,
    backend::{Backend, Connect},
    store::TcpStoreServer,
};

const TIMEOUT: Duration = Duration::from_secs(30);

/// A small random generator, the same on every rank.
struct Dice(u64);

impl Dice {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963);
        (self.0 >> 33) % end
    }
}

/// Colours and keys of all ranks in one split.
fn draw(dice: &mut Dice, world: usize) -> Vec<(Option<u32>, i64)> {
    let colors = [None, Some(0), Some(7), Some(u32::MAX)];
    let keys = [i64::MIN, -1, 0, 5, i64::MAX];
    let mut one = |_| (colors[dice.below(4) as usize], keys[dice.below(5) as usize]);
    (0..world).map(&mut one).collect()
}

/// The members of a rank's subgroup by the definition, with a selection sort.
fn twin(given: &[(Option<u32>, i64)], rank: Rank) -> Option<Vec<Rank>> {
    let color = given[rank].0?;
    let mut left: Vec<Rank> = (0..given.len()).filter(|&r| given[r].0 == Some(color)).collect();
    let mut members = Vec::new();
    while !left.is_empty() {
        let first = (0..left.len()).min_by_key(|&at| (given[left[at]].1, left[at])).unwrap();
        members.push(left.remove(first));
    }
    Some(members)
}

/// Checks a subgroup by its members' ranks in the parent, in order, and their sum.
fn check(group: &ProcessGroup, parent: &ProcessGroup, members: &[Rank]) -> Result<()> {
    assert_eq!(group.parent_ranks(), members);
    assert_eq!(group.world_size(), members.len());
    assert_eq!(members[group.rank()], parent.rank());
    let global: Vec<Rank> = members.iter().map(|&rank| parent.global_ranks()[rank]).collect();
    assert_eq!(group.global_ranks(), global);
    assert_eq!((group.epoch(), group.backend_name()), (0, parent.backend_name()));
    let mut seen = vec![0; members.len()];
    group.all_gather(&mut seen, &[parent.rank() as u64])?;
    assert!(seen.iter().zip(members).all(|(&seen, &rank)| seen == rank as u64), "{seen:?}");
    let mut sum = vec![parent.rank() as f32; 5000];
    group.all_reduce(&mut sum, ReduceOp::Sum)?;
    assert_eq!(sum, vec![members.iter().sum::<usize>() as f32; 5000]);
    Ok(())
}

/// Splits, splits the subgroups, and splits the parent again while some subgroups exist.
fn suite(group: &ProcessGroup, seed: u64) -> Result<()> {
    let mut dice = Dice(seed);
    let mut kept = Vec::new();
    for _ in 0..4 {
        let given = draw(&mut dice, group.world_size());
        let (color, key) = given[group.rank()];
        let part = group.split(color, key)?;
        let members = twin(&given, group.rank());
        assert_eq!(part.is_some(), members.is_some());
        let (Some(part), Some(members)) = (part, members) else { continue };
        check(&part, group, &members)?;
        // The same seed on all of its ranks.
        let given = draw(&mut Dice(members.len() as u64), part.world_size());
        let (color, key) = given[part.rank()];
        if let Some(nested) = part.split(color, key)? {
            check(&nested, &part, &twin(&given, part.rank()).unwrap())?;
        }
        kept.push((part, members));
    }
    kept.iter().try_for_each(|(part, members)| check(part, group, members))?;
    group.barrier()
}

#[test]
fn the_ranks_of_a_color_form_a_group_in_the_order_of_their_keys() {
    for world in 1..=4 {
        for seed in 0..6 {
            common::threads(world, TIMEOUT, |group| suite(&group, seed).unwrap());
        }
    }
}

#[test]
fn subgroups_work_between_processes() {
    for world in [1, 4] {
        let ranks: Vec<_> = (0..world).collect();
        Workers::start("split::suite", world, &ranks, TIMEOUT).finish();
    }
}

#[test]
fn a_mesh_has_a_group_for_each_dimension() {
    common::threads(12, TIMEOUT, |group| {
        let mesh = DeviceMesh::new(&group, &[("pp", 2), ("dp", 3), ("tp", 2)]).unwrap();
        let [pp, dp, tp] = ["pp", "dp", "tp"].map(|name| mesh[name].rank());
        assert_eq!(group.rank(), pp * 6 + dp * 2 + tp);
        let line = |size: usize, first: Rank, stride| (0..size).map(move |at| first + at * stride);
        let [along_pp, along_dp, along_tp] = [
            line(2, dp * 2 + tp, 6).collect::<Vec<_>>(),
            line(3, pp * 6 + tp, 2).collect(),
            line(2, pp * 6 + dp * 2, 1).collect(),
        ];
        check(&mesh["pp"], &group, &along_pp).unwrap();
        check(&mesh["dp"], &group, &along_dp).unwrap();
        check(&mesh["tp"], &group, &along_tp).unwrap();
        assert!(mesh.dims().map(|(name, _)| name).eq(["pp", "dp", "tp"]));
        assert!(mesh.get("ep").is_none());
    });
}

#[test]
#[should_panic(expected = "the mesh has no dimension \"ep\"")]
fn a_mesh_panics_for_a_dimension_that_it_lacks() {
    let group = ProcessGroup::threads(1, TIMEOUT).unwrap().remove(0);
    let _ = &DeviceMesh::new(&group, &[]).unwrap()["ep"];
}

#[test]
fn invalid_mesh_dimensions_are_an_error_and_the_group_stays_usable() {
    common::threads(2, TIMEOUT, |group| {
        let name = if group.rank() == 0 { "dp" } else { "tp" };
        let wrong: [(&[(&str, usize)], &str); 6] = [
            (&[("dp", 3)], "do not multiply to the group's 2 ranks"),
            (&[("dp", 2), ("tp", 0)], "do not multiply"),
            (&[("dp", usize::MAX), ("tp", 2)], "do not multiply"),
            (&[("dp", 2), ("", 1)], "\"\" is empty or duplicate"),
            (&[("dp", 2), ("dp", 1)], "\"dp\" is empty or duplicate"),
            (&[(name, 2)], "rank 0 gives the dimensions [(\"dp\", 2)], rank 1 [(\"tp\", 2)]"),
        ];
        for (dims, text) in wrong {
            let error = DeviceMesh::new(&group, dims).unwrap_err();
            assert!(matches!(error, Error::InvalidArgument(_)), "{error}");
            assert!(error.to_string().contains(text), "{error}");
        }
        group.barrier().unwrap();
    });
}

#[test]
fn a_subgroup_has_the_order_of_its_list() {
    common::threads(4, TIMEOUT, |group| {
        let part = group.subgroup(&[3, 0, 2]).unwrap();
        assert_eq!(part.is_some(), group.rank() != 1);
        if let Some(part) = part {
            check(&part, &group, &[3, 0, 2]).unwrap();
        }
        group.barrier().unwrap();
    });
}

#[test]
fn invalid_member_lists_are_an_error_on_every_rank_and_the_group_stays_usable() {
    common::threads(3, TIMEOUT, |group| {
        let differing: &[Rank] = if group.rank() == 2 { &[0, 1, 2] } else { &[0, 1] };
        for (list, text) in [
            (differing, "rank 0 gives the members [0, 1], rank 2 gives [0, 1, 2]"),
            (&[], "the member list is empty"),
            (&[0, 3], "rank 3 is not below world size 3"),
            (&[1, 0, 1], "rank 1 is listed twice"),
        ] {
            let error = group.subgroup(list).unwrap_err();
            assert!(matches!(&error, Error::InvalidArgument(why) if why.contains(text)), "{error}");
        }
        group.barrier().unwrap();
    });
}

#[test]
fn a_subgroup_works_while_its_parent_does() {
    common::threads(4, TIMEOUT, |group| {
        let half = group.split(Some(group.rank() as u32 % 2), 0).unwrap().unwrap();
        let works: Vec<_> = (0..20)
            .map(|_| group.all_reduce_async(vec![1.0_f32; 20_000], ReduceOp::Sum).unwrap())
            .collect();
        // The halves make different numbers of calls.
        for _ in 0..5 + group.rank() % 2 * 20 {
            let mut x = vec![1.0_f32; 3000];
            half.all_reduce(&mut x, ReduceOp::Sum).unwrap();
            assert_eq!(x, vec![2.0; 3000]);
        }
        for work in works {
            assert_eq!(work.wait().unwrap(), vec![4.0; 20_000]);
        }
    });
}

#[test]
fn a_failure_stays_in_the_group_it_happened_in() {
    common::threads(4, TIMEOUT, |group| {
        let [first, second] =
            [0, 1].map(|_| group.split(Some(group.rank() as u32 / 2), 0).unwrap().unwrap());
        if group.rank() < 2 {
            let count = 10 + first.rank();
            let error = first.all_reduce(&mut vec![0_u8; count], ReduceOp::Sum).unwrap_err();
            assert!(matches!(error, Error::Mismatch { .. }), "{error}");
            assert!(matches!(first.barrier(), Err(Error::Poisoned(_))));
        } else {
            first.barrier().unwrap();
        }
        second.barrier().unwrap();
        group.barrier().unwrap();
        // Subgroups outlive their parent.
        let error = group.broadcast(&mut [0_u8], group.rank()).unwrap_err();
        assert!(matches!(error, Error::Mismatch { .. }), "{error}");
        assert!(matches!(group.split(None, 0), Err(Error::Poisoned(_))));
        second.barrier().unwrap();
        drop(group);
        second.all_reduce(&mut [1.0_f32], ReduceOp::Sum).unwrap();
    });
}

/// Connects, but fails on rank 1 of a subgroup.
fn fails_in_subgroups() -> Arc<Connect> {
    Arc::new(|store: &Arc<dyn Store>, rank, world, options: &GroupOptions| {
        if options.name.contains("split") && rank == 1 {
            let text = "no device left on this rank".into();
            return Err(Error::InvalidArgument(text));
        }
        let group = ProcessGroup::from_store(Arc::clone(store), rank, world, options.clone())?;
        let backend: Arc<dyn Backend> = Arc::new(Wrapped(group));
        Ok(backend)
    })
}

/// A third-party backend over a group.
#[derive(Debug)]
struct Wrapped(ProcessGroup);

#[expect(unsafe_code, reason = "passes its arguments on")]
mod wrapped {
    use collective::{
        DType, Error, Rank, Result,
        backend::{Backend, OpDesc, RawBufs, RawShared, Transfer, Verb, Wait},
    };

    use super::Wrapped;

    impl Backend for Wrapped {
        fn name(&self) -> &'static str {
            "wrapped"
        }
        fn rank(&self) -> Rank {
            self.0.rank()
        }
        fn world_size(&self) -> usize {
            self.0.world_size()
        }
        fn forked(&self) -> bool {
            false
        }
        fn ready(&self) -> Result<()> {
            Ok(())
        }
        unsafe fn run(&self, op: &OpDesc, bufs: RawBufs, _: Wait) -> Result<()> {
            let bytes = |count: usize| count * op.dtype.size();
            let world = self.world_size();
            // SAFETY: the caller's promise.
            let input =
                unsafe { std::slice::from_raw_parts(bufs.input, bytes(op.input_count(world))) };
            match op.verb {
                Verb::Barrier => self.0.barrier(),
                Verb::AllGather => {
                    let len = bytes(op.output_count(world));
                    // SAFETY: the caller's promise.
                    let output = unsafe { std::slice::from_raw_parts_mut(bufs.output, len) };
                    self.0.all_gather(output, input)
                }
                verb => Err(Error::Unsupported { backend: "wrapped", what: verb.to_string() }),
            }
        }
        unsafe fn exchange(&self, op: &OpDesc, _: &[Transfer], _: Wait) -> Result<()> {
            Err(Error::Unsupported { backend: "wrapped", what: op.verb.to_string() })
        }
        fn alloc(&self, _: DType, _: usize) -> Result<RawShared> {
            Err(Error::Unsupported { backend: "wrapped", what: "alloc".into() })
        }
        fn abort(&self, reason: &str) {
            self.0.abort(reason);
        }
    }
}

#[test]
fn a_subgroup_that_fails_to_join_does_not_affect_its_parent() {
    let store = MemoryStore::new();
    std::thread::scope(|scope| {
        for rank in 0..4 {
            let store: Arc<dyn Store> = Arc::new(store.clone());
            scope.spawn(move || {
                let (options, connect) = (GroupOptions::default(), fails_in_subgroups());
                let group = ProcessGroup::from_store_with(store, rank, 4, options, connect);
                let group = group.unwrap();
                assert_eq!(group.backend_name(), "wrapped");
                let error = group.split(Some(rank as u32 / 2), 0).unwrap_err();
                assert!(error.to_string().contains("no device left"), "{error}");
                if rank % 2 == 0 {
                    // Rank 1's failure, at once.
                    assert!(matches!(error, Error::Aborted { by: 1, .. }), "{error}");
                }
                group.barrier().unwrap();
                // This subgroup has no rank 1.
                let own = group.split(Some(rank as u32), 0).unwrap().unwrap();
                assert_eq!((own.world_size(), own.backend_name()), (1, "wrapped"));
                group.barrier().unwrap();
            });
        }
    });
}

/// Connects a third-party backend.
fn wrap(
    store: &Arc<dyn Store>,
    rank: Rank,
    world: usize,
    options: &GroupOptions,
) -> Result<Arc<dyn Backend>> {
    let group = ProcessGroup::from_store(Arc::clone(store), rank, world, options.clone())?;
    Ok(Arc::new(Wrapped(group)))
}

/// Ranks may have failed to join different numbers of times.
#[test]
fn ranks_can_join_again_after_failures() {
    for alone in [vec![0, 0, 0], vec![1, 1], vec![0, 1, 1]] {
        let store = Arc::new(MemoryStore::new());
        let join = |rank, ms| {
            let options = GroupOptions::default().with_timeout(Duration::from_millis(ms));
            ProcessGroup::from_store(store.clone(), rank, 2, options)
        };
        for rank in alone {
            let Err(Error::Timeout { missing, .. }) = join(rank, 30) else { panic!("{rank}") };
            assert_eq!(missing, [1 - rank]);
        }
        std::thread::scope(|scope| {
            let ranks = [0, 1].map(|rank| scope.spawn(move || join(rank, 5_000)));
            let groups = ranks.map(|rank| rank.join().unwrap().unwrap());
            std::thread::scope(|scope| {
                for group in groups {
                    scope.spawn(move || group.barrier().unwrap());
                }
            });
        });
    }
}

/// Rank 0 is killed, or loses the store, while it joins: its attempt stays open, and rank 1 has
/// tried it.
#[test]
fn joining_again_times_out_while_rank_0_does_not_join_again() {
    let store = Arc::new(MemoryStore::new());
    let fail: Arc<Connect> = Arc::new(|_: &Arc<dyn Store>, _, _, _: &_| {
        let (store, during) = ("memory".into(), "connecting".into());
        Err(Error::Store { store, during, reason: "killed".into() })
    });
    let join = move |rank| {
        let options = GroupOptions::default().with_timeout(Duration::from_millis(100));
        ProcessGroup::from_store_with(store.clone(), rank, 2, options, Arc::clone(&fail))
    };
    for rank in 0..2 {
        assert!(matches!(join(rank), Err(Error::Store { .. })));
    }
    let (sender, outcome) = mpsc::channel();
    std::thread::spawn(move || sender.send(join(1)));
    let outcome = outcome.recv_timeout(TIMEOUT).expect("returns after its timeout");
    let Err(Error::Timeout { missing, .. }) = outcome else { panic!("{outcome:?}") };
    assert_eq!(missing, [0]);
}

/// Rank 1 fails after rank 0 has its group.
#[test]
fn subgroups_work_after_a_join_that_only_some_ranks_completed() {
    let (store, tries) = (Arc::new(MemoryStore::new()), AtomicUsize::new(0));
    let connect: Arc<Connect> =
        Arc::new(move |store: &Arc<dyn Store>, rank, world, options: &_| {
            let backend = wrap(store, rank, world, options)?;
            if rank == 1 && !options.name.contains("split") && tries.fetch_add(1, SeqCst) == 0 {
                return Err(Error::InvalidArgument("no device left on this rank".into()));
            }
            Ok(backend)
        });
    std::thread::scope(|scope| {
        for rank in 0..2 {
            let (store, connect) = (store.clone(), Arc::clone(&connect));
            scope.spawn(move || {
                let join = || {
                    let options = GroupOptions::default().with_timeout(Duration::from_secs(5));
                    let (store, connect) = (store.clone(), Arc::clone(&connect));
                    ProcessGroup::from_store_with(store, rank, 2, options, connect)
                };
                let first = join();
                assert_eq!(first.is_ok(), rank == 0);
                drop(first);
                let group = join().unwrap();
                assert_eq!(group.split(Some(0), 0).unwrap().unwrap().world_size(), 2);
            });
        }
    });
}

/// As documented by `init_process_group`: after it has returned on rank 0, that rank and its store
/// may end.
#[test]
fn rank_0_and_its_store_may_end_after_joining() {
    let server = TcpStoreServer::bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let (port, ended) = (server.port(), Arc::new(Barrier::new(2)));
    let join = move |rank, connect| {
        let store = Arc::new(TcpStore::connect("127.0.0.1", port, TIMEOUT).unwrap());
        let options = GroupOptions::default().with_timeout(TIMEOUT);
        ProcessGroup::from_store_with(store, rank, 2, options, connect)
    };
    let before = Arc::clone(&ended);
    let late: Arc<Connect> = Arc::new(move |store: &Arc<dyn Store>, rank, world, options: &_| {
        let backend = wrap(store, rank, world, options);
        before.wait();
        backend
    });
    std::thread::scope(|scope| {
        let rank = scope.spawn(move || join(1, late).map(drop));
        let group = join(0, Arc::new(wrap)).unwrap();
        // Rank 1 does not use the store any more.
        drop(server);
        ended.wait();
        rank.join().unwrap().unwrap();
        drop(group);
    });
}

#[test]
fn splits_leave_no_keys_in_the_store() {
    let store = MemoryStore::new();
    std::thread::scope(|scope| {
        for rank in 0..2 {
            let own = Arc::new(store.clone());
            let store = store.clone();
            scope.spawn(move || {
                let options = GroupOptions::default().with_timeout(TIMEOUT);
                let group = ProcessGroup::from_store(own, rank, 2, options).unwrap();
                leaves_no_keys(&group, &store, || {
                    (0..1000).for_each(|_| drop(group.split(Some(0), 0).unwrap().unwrap()));
                });
            });
        }
    });
}

#[test]
fn from_backend_groups_name_from_store_with_in_errors() {
    let store = Arc::new(MemoryStore::new());
    let group = ProcessGroup::from_store(store, 0, 1, GroupOptions::default()).unwrap();
    let group = ProcessGroup::from_backend(Arc::new(Wrapped(group)));
    for (call, error) in [
        ("split", group.split(None, 0).map(drop).unwrap_err()),
        ("subgroup", group.subgroup(&[0]).map(drop).unwrap_err()),
        ("rebuild", group.rebuild(Duration::ZERO).map(drop).unwrap_err()),
    ] {
        assert!(matches!(error, Error::Unsupported { backend: "wrapped", .. }), "{error}");
        let text = error.to_string();
        assert!(text.contains(&format!("{call} of a group made with from_backend")), "{text}");
        assert!(text.contains("ProcessGroup::from_store_with"), "{text}");
    }
    group.barrier().unwrap();
}

#[test]
fn a_reused_name_ignores_earlier_subgroups() {
    let store = MemoryStore::new();
    // The sizes of the subgroups change, so a leftover key would be a wrong member.
    for sizes in [[3, 1], [2, 2], [1, 3], [2, 2]] {
        std::thread::scope(|scope| {
            for rank in 0..4 {
                let store = Arc::new(store.clone());
                scope.spawn(move || {
                    let options = GroupOptions::default().with_timeout(TIMEOUT);
                    let group = ProcessGroup::from_store(store, rank, 4, options).unwrap();
                    let color = u32::from(rank >= sizes[0]);
                    let part = group.split(Some(color), 0).unwrap().unwrap();
                    let start = color as usize * sizes[0];
                    let members: Vec<_> = (start..start + sizes[color as usize]).collect();
                    check(&part, &group, &members).unwrap();
                });
            }
        });
    }
}

/// Runs a process rank.
pub(crate) fn worker() {
    if let Some(role) = Role::from_env() {
        let group = role.join().unwrap();
        (0..3).for_each(|seed| suite(&group, seed).unwrap());
    }
}
